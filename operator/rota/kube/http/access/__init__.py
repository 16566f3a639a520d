"""Who may read the operator's answers: users as the API server authenticates them, with their rights to ConsumerGroups.

May know the API server's client and `rota.http_server`. Knows no group.
"""
