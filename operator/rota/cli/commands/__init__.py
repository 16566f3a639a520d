"""The commands of `rota`: each module is imported when its command runs, and only then.

May know `client`, `console` and the package that its command uses.
"""
