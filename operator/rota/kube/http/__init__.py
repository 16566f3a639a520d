"""The operator's HTTP server, read-only: the page, its JSON and events, metrics and probes.

May import all packages of kube except `operator.py`, which starts the server.
"""
