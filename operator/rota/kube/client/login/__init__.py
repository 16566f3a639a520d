"""The login to the API server: accounts, kubeconfigs, login programs, proxies, and sessions that carry credentials.

May know the Kubernetes client. Knows no object of the cluster.
"""
