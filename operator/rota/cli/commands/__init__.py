"""The commands of `rota`: each module is imported only when its command runs.

May use `client`, `console` and the package that its command needs.
"""
