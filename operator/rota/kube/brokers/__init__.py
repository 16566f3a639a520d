"""Access to the brokers of groups: connections, topic routes, online consumers, and lag.

May import `client` (Secrets hold credentials) and `state`; must not depend on sidecars or Deployments.
"""
