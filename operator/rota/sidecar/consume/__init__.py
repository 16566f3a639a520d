"""Broker side of the sidecar: the session with the brokers, and for each queue a reader with a window of messages.

May import `member`, `storage` and `status`. Does not depend on how messages reach the app.
"""
