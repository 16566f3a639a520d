"""Checks names from input files before they name Kubernetes objects and manifest files; makes texts safe to print."""

from rota.spec.names import is_dns_subdomain

# Files of manifests that Rota has written begin with this; other files belong to the user.
MANIFEST_PREFIX = "# `rota pipeline recommend` recommends policy "
_MAX_NAME_CHARACTERS = 240  # a file name has at most 255, and a manifest's file adds .yaml


def is_manifest_name(name: str) -> bool:
    """Return whether a Kubernetes object and the file of its manifest can have this name."""
    return len(name) <= _MAX_NAME_CHARACTERS and is_dns_subdomain(name)


def replace_unprintable(text: str) -> str:
    """Return a text with unprintable characters replaced, also line breaks."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
