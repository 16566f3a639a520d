"""Input and output of commands: manifests, tables, numbers, errors.

Knows neither a cluster nor a command.
"""
