"""What commands read and print: manifests, tables, figures, errors.

Knows neither a cluster nor a command.
"""
