"""Sidecar of every consumer pod: follows the pod's assignment, delivers messages and loses none.

Each package may import the packages before it: member, storage and status, consume, delivery. `agent.py` connects them.
"""
