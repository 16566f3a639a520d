"""Connections to brokers and name servers: pending requests, memory for frames, reconnects.

May import `wire`. Does not depend on consumers.
"""
