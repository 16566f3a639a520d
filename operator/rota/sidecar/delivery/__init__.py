"""App side of the sidecar: messages are pushed or pulled, acknowledged, retried or dead-lettered.

May import `consume` and the packages below it.
"""
