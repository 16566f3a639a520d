"""Names from files that become names of Kubernetes objects and of files."""

from rota.spec.names import is_dns_subdomain

_LONGEST = 240  # with .yaml it is still the name of a file


def is_manifest_name(name: str) -> bool:
    """Whether an object can have this name, and the file of its manifest, too."""
    return len(name) <= _LONGEST and is_dns_subdomain(name)
