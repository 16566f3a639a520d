"""The operator, and the only package that knows kopf and Kubernetes. Read `operator.py` first.

Packages stand on those before them: client, state, brokers and workload, members, reconcile, telemetry, http.
"""
