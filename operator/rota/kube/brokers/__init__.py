"""The brokers of groups: how each is reached, the routes of their topics, and their lag.

May know `client` (Secrets hold credentials) and `state`. Knows nothing of members' sidecars or Deployments.
"""
