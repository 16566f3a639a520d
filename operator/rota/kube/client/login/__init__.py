"""Login to the API server: accounts, kubeconfigs, exec plugins, proxies, and sessions that carry credentials.

May use the Kubernetes client; must not depend on objects of the cluster.
"""
