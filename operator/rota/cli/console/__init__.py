"""Input and output of commands: manifests, tables, figures, errors.

Knows neither a cluster nor a command.
"""
