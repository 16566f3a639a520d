"""The Deployments of groups with a template, the injected sidecar, and the Secrets with members' keys.

May know `client` and `state`. Knows nothing of brokers.
"""
