"""The broker's side of the sidecar: a session, and a reader for each queue with its window of messages.

May know `member`, `storage` and `status`. Knows nothing of how messages reach the app.
"""
