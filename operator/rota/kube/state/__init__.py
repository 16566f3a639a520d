"""What the operator knows of each group between reconciles: its spec, pods, stored assignment and limits.

Values and pure functions over them; requests nothing. May know the objects of `client`.
"""
