"""Names that Kubernetes accepts for namespaces and objects.

A namespace is a DNS label of at most 63 characters. An object's name has labels with dots between them and at most 253
characters. As in Kubernetes, but unlike RFC 1123, a single label of an object's name may be longer than 63.
"""

import re
from typing import Annotated

from msgspec import Meta

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
LABEL_PATTERN = rf"^(?=.{{1,63}}\Z){_LABEL}\Z"
SUBDOMAIN_PATTERN = rf"^(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*\Z"

NAMING_RULE = "lower-case letters, digits, - and ., as kubectl get shows it"  # errors end with "write", and this

ObjectName = Annotated[str, Meta(min_length=1, pattern=SUBDOMAIN_PATTERN)]


def is_dns_label(text: str) -> bool:
    """Whether a namespace can have this name."""
    return re.search(LABEL_PATTERN, text) is not None


def is_dns_subdomain(text: str) -> bool:
    """Whether an object such as a pod, a Secret or a ConfigMap can have this name."""
    return re.search(SUBDOMAIN_PATTERN, text) is not None
