"""Names that Kubernetes takes."""

import re

_LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
NAME = re.compile(rf"(?=.{{1,240}}\Z){_LABEL}(\.{_LABEL})*\Z")  # with .yaml still the name of a file
NAMESPACE = re.compile(rf"{_LABEL}\Z")
