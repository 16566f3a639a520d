"""Reads YAML whose anchors, aliases and merge keys expand to a bounded size.

Aliases can name exponentially many values: ten anchors, each of which names the previous one ten times, name ten
billion. PyYAML shares aliased values, but copies the keys of merged maps; JSON has a copy of each value.
"""

from typing import Any, Final

import yaml

MAX_EXPANDED_SIZE: Final = 2**22  # values and characters, those of an anchor once for each of its aliases
MAX_DIGITS: Final = 100  # PyYAML needs minutes for the largest numbers in base 60, such as 1:30:00
_NUMBERS: Final = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class ExpansionError(ValueError):
    """The aliases of a document expand to too many values."""


def load_yaml(text: str) -> Any:
    """Return the one document of a text. Raise yaml.YAMLError, ExpansionError or another ValueError if it is invalid.

    As with `yaml.safe_load`, malformed scalars may raise further errors.
    """
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _expanded_size(node, {}) > MAX_EXPANDED_SIZE:
            raise ExpansionError(f"its aliases expand to more than {MAX_EXPANDED_SIZE:,} values")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _expanded_size(node: yaml.Node, sizes: dict[yaml.Node, float]) -> float:
    """Return how many values and characters a node has without aliases; infinity if it contains itself."""
    if node in sizes:
        return sizes[node]
    sizes[node] = float("inf")
    size = 1.0
    if isinstance(node, yaml.ScalarNode):
        if node.tag in _NUMBERS and len(node.value) > MAX_DIGITS:
            raise ValueError("it has a number that is too long")
        size += len(node.value)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            size += _expanded_size(key, sizes) + _expanded_size(value, sizes)
    else:
        for value in node.value:
            size += _expanded_size(value, sizes)
    sizes[node] = size
    return size
