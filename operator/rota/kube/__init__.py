"""The operator process, and the only package that uses kopf and the Kubernetes API. Read `operator.py` first.

Each package imports only from earlier ones: client, state, brokers and workload, members, reconcile, telemetry, http.
"""
