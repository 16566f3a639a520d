"""RocketMQ's remoting protocol as bytes and values: frames, requests, messages, signatures.

No I/O. May know the port (`rota.brokers`) only.
"""
