"""The sidecar that runs in every consumer pod: it obeys its assignment, delivers messages and loses none.

Packages stand on those before them: member, storage and status, consume, delivery; `agent.py` connects them.
"""
