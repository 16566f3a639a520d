"""YAML with the values that kubectl and Helm read: the rules of PyYAML differ for numbers, booleans and times."""

import math
import re
from typing import Any

import yaml

MAX_EXACT_INTEGER = 2**53  # a float represents all smaller integers exactly


class KubectlLoader(yaml.SafeLoader):
    """Loads YAML as kubectl does (sigs.k8s.io/yaml, by YAML 1.1 and Go's rules for numbers).

    For kubectl, unlike PyYAML, dates, times, 12:30 and = are strings, y and n are booleans, and 1e3, 089 and 0o17 are
    numbers.
    """


class KubectlDumper(yaml.SafeDumper):
    """Dumps YAML that kubectl loads as the same values, with literal blocks for several lines, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - SafeDumper's signature
        """Return True, so that repeated values are written in full."""
        return True


# Go's numbers: digits may be separated by _, and 017 and 0o17 are octal. 089 is not octal, so it is a float, 89.
_INTEGER = re.compile(
    r"[-+]?(0[bB]_*[01][01_]*|0[xX]_*[0-9a-fA-F][0-9a-fA-F_]*|0[oO]?_*[0-7][0-7_]*|0_*|[1-9][0-9_]*)\Z"
)
_FLOAT = re.compile(
    r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)([eE][-+]?[0-9][0-9_]*)?\Z"
    r"|[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z"
)
_SHORT_BOOLEAN = re.compile(r"[yYnN]\Z")


def _tag(name: str) -> str:
    return f"tag:yaml.org,2002:{name}"


def _configure_yaml() -> None:
    """Replace PyYAML's rules that determine the type of a plain scalar by those of kubectl."""
    replaced_tags = {*map(_tag, ("timestamp", "int", "float", "value"))}  # `value`: YAML 1.1's scalar =
    KubectlLoader.yaml_implicit_resolvers = {}
    for first_character, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items():
        remaining = [(tag, pattern) for tag, pattern in resolvers if tag not in replaced_tags]
        KubectlLoader.yaml_implicit_resolvers[first_character] = remaining
    # The dumper needs the rules, too: it quotes strings that would be loaded as numbers or booleans.
    for yaml_class in (KubectlLoader, KubectlDumper):
        yaml_class.add_implicit_resolver(_tag("int"), _INTEGER, list("-+0123456789"))
        yaml_class.add_implicit_resolver(_tag("float"), _FLOAT, list("-+0123456789."))
        yaml_class.add_implicit_resolver(_tag("bool"), _SHORT_BOOLEAN, list("yYnN"))
    KubectlLoader.bool_values = {**yaml.SafeLoader.bool_values, "y": True, "n": False}
    KubectlLoader.add_constructor(_tag("int"), _construct_integer)
    KubectlLoader.add_constructor(_tag("float"), _construct_float)
    KubectlDumper.add_representer(str, _represent_string)


def _construct_integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node).replace("_", "")
    text = re.sub(r"^([-+]?)0(?=[0-9])", r"\g<1>0o", text)  # 017 becomes 0o17, Python's spelling
    return int(text, base=0)


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float | str:
    """Return the number, as an integer if it is one: for the API server 1e3 and 1000.0 are valid integers.

    A text such as 1e400, which no float can represent, is a string for kubectl.
    """
    text = loader.construct_scalar(node)
    if text[-1] in "fFnN":  # Python reads inf and nan only without the point
        return float(text.replace(".", ""))
    number = float(text.replace("_", ""))
    if math.isinf(number):
        return text
    return int(number) if number.is_integer() and abs(number) < MAX_EXACT_INTEGER else number


def _represent_string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(_tag("str"), text, style="|" if "\n" in text else None)


_configure_yaml()
