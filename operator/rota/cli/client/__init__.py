"""Requests to the operator: at its address or through the API server's proxy, once or repeatedly.

May know `console`. Knows no command.
"""
