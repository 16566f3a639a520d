"""The API server: requests, objects and their paths, informers, the Lease, what kopf watches.

May know kopf and the Kubernetes API. Knows nothing of groups, brokers or members.
"""
