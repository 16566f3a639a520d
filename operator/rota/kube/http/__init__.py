"""What the operator answers over HTTP: the page, its JSON and events, metrics and probes; read-only.

May know all packages of kube but `operator.py`, which starts it.
"""
