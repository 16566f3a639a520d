"""RocketMQ's remoting protocol as bytes and values: frames, requests, messages, signatures.

No I/O. May import only the port (`rota.brokers`).
"""
