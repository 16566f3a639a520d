"""Check of names in input files that become names of Kubernetes objects and of manifest files."""

from rota.spec.names import is_dns_subdomain

_MAX_NAME_CHARACTERS = 240  # characters; with .yaml it still fits into the name of a file


def is_manifest_name(name: str) -> bool:
    """Return whether a Kubernetes object and the file of its manifest can have this name."""
    return len(name) <= _MAX_NAME_CHARACTERS and is_dns_subdomain(name)
