"""Connections to brokers and name servers: requests in flight, memory for frames, reconnects.

May know `wire`. Knows nothing of consumers.
"""
