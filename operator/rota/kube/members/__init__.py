"""The members' sidecars over HTTP: their reports, their drains, and the nodes that they run on.

May know `client`, `state` and what is below. Decides nothing.
"""
