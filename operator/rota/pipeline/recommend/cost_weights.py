"""Weights of the cost function: points for one unit of each measure, with the reason for each default.

One point is the cost of one move of one queue; all other measures are compared with that.
"""

from typing import Annotated, NamedTuple

import msgspec
import yaml
from msgspec import Meta, Struct

from rota.kubectl_yaml import KubectlLoader
from rota.model import single_line

# Fraction of the cost that a change must save. A smaller gain is within the model's error.
MIN_GAIN_FRACTION = 0.05
LAG_UNIT_MESSAGES = 1000  # a group with less lag keeps up

MAX_WEIGHT = 1e12  # a higher weight is taken for a mistyped one


class CostMeasure(NamedTuple):
    """Title and unit of a measure, and the reason for its default weight."""

    title: str
    unit: str  # counted per day
    reason: str


MEASURES = {
    "moves": CostMeasure(
        "Moves",
        "queue moved",
        "This is the unit: a queue's new owner starts with empty caches, and its old one finishes or drops work.",
    ),
    "pause": CostMeasure(
        "Pauses",
        "second without delivery of a queue",
        "Five seconds in which a queue is paused are as bad as its move: messages are late, but none is lost.",
    ),
    "duplicates": CostMeasure(
        "Duplicates",
        "message expected to be delivered twice",
        "Ten messages processed twice are as bad as a move: apps must tolerate them, but each is work and a risk.",
    ),
    "imbalance": CostMeasure(
        "Imbalance",
        "1.0 by which the busiest member's load exceeds the mean, over the mean",
        "A member with twice the mean load is as bad as 100 moves a day: the group is as slow as that member, "
        "and half of the other members' capacity is wasted.",
    ),
    "idle": CostMeasure(
        "Idle members",
        "hour of a member without a queue",
        "A pod that is idle for an hour costs about as much as a move.",
    ),
    "unowned": CostMeasure(
        "Unowned",
        "second in which a queue had no owner",
        "Worse than a pause: no member will take over. It counts in addition to the pause.",
    ),
    "lag": CostMeasure(
        "Lag",
        f"doubling of the lag beyond {LAG_UNIT_MESSAGES:,} messages, half of it by the mean and half by the peak",
        "Doublings, because ten times the lag is not ten times the harm, and groups of all sizes are comparable. "
        "Twice the lag all day is as bad as 20 moves a day.",
    ),
}

Weight = Annotated[float, Meta(ge=0)]


class CostWeights(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Points for one unit of each measure; `MEASURES` has the units and the reasons for the defaults."""

    moves: Weight = 1.0
    pause: Weight = 0.2
    duplicates: Weight = 0.1
    imbalance: Weight = 100.0
    idle: Weight = 1.0
    unowned: Weight = 0.5
    lag: Weight = 20.0

    def weight_of(self, measure: str) -> float:
        """Return the weight of a measure."""
        weight: float = getattr(self, measure)
        return weight


def parse_weights(text: str, source_name: str = "--weights") -> CostWeights:
    """Return weights from YAML, with defaults for missing ones; raise ValueError with one sentence for a mistake."""
    try:
        loader = KubectlLoader(text)
        root = loader.get_single_node()
        names = [key.value for key, _ in root.value] if isinstance(root, yaml.MappingNode) else []
        parsed = root and loader.construct_document(root)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):  # constructors of values raise more than the parser
        raise ValueError(f"{source_name} is not valid YAML; write lines such as moves: 1") from None
    entries = {} if parsed is None else parsed
    if not isinstance(entries, dict):
        raise ValueError(f"{source_name} contains no weights; write lines such as moves: 1")  # noqa: TRY004 - a user's mistake
    for name, value in entries.items():
        _check_weight(name, value, source_name)
    if repeated := next((name for name in names if names.count(name) > 1), None):  # `entries` has only the last value
        raise ValueError(f"{source_name} names {repeated} twice; give each weight once")
    weights = msgspec.convert(entries, CostWeights)
    if not any(msgspec.structs.astuple(weights)):
        raise ValueError(f"{source_name} sets every weight to 0; at least one must be above 0")
    return weights


def _check_weight(name: object, value: object, source_name: str) -> None:
    if name not in MEASURES:
        remedy = f"choose from {', '.join(MEASURES)}"
        raise ValueError(f"{source_name} names {single_line(str(name), 60)!r}, which is not a weight; {remedy}")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < MAX_WEIGHT:  # type: ignore[operator]
        shown = single_line(str(value), 60)
        raise ValueError(f"{source_name}: {name} is {shown}; give a number of at least 0, below {MAX_WEIGHT:g}")
