"""Access control of the page: the API server authenticates users, and their rights to ConsumerGroups apply.

May import the API server's client and `rota.http_server`. Independent of the state of groups.
"""
