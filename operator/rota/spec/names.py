"""Names that Kubernetes accepts: the two rules of DNS (RFC 1123) by which it names namespaces and objects."""

import re
from typing import Annotated

from msgspec import Meta

_LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
LABEL_PATTERN = rf"^{_LABEL}\Z"
SUBDOMAIN_PATTERN = rf"^(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*\Z"

NAMING_RULE = "lower-case letters, digits, - and ., as kubectl get shows it"

ObjectName = Annotated[str, Meta(min_length=1, pattern=SUBDOMAIN_PATTERN)]


def is_dns_label(text: str) -> bool:
    """Whether a namespace can have this name."""
    return re.search(LABEL_PATTERN, text) is not None


def is_dns_subdomain(text: str) -> bool:
    """Whether an object such as a pod, a Secret or a ConfigMap can have this name."""
    return re.search(SUBDOMAIN_PATTERN, text) is not None
