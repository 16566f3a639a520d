"""The Deployments of groups with a template, the injected sidecar, and the Secrets with members' keys.

May import `client` and `state`, and nothing about brokers.
"""
