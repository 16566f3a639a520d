"""Client of the operator: requests at its address or through the API server, once or repeatedly.

May use `console`. Knows no command.
"""
