"""Storage of the sidecar: mounted files, environment variables, and the state on its disk."""
