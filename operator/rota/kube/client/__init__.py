"""Client of the API server: requests, objects and their paths, informers, leader election, kopf's watches.

May use kopf and the Kubernetes API; must not depend on groups, brokers or members.
"""
