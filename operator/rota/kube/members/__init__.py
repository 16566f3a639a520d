"""HTTP client of the members' sidecars: reports, deliveries and drains; also the topology of their nodes.

May import `client`, `state` and the packages below them. Makes no decisions.
"""
