"""The sidecar that runs in every consumer pod: it obeys its assignment, delivers messages and loses none.

Each package may import those before it: member, storage and status, consume, delivery. `agent.py` connects them.
"""
