"""What a group's brokers last reported of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rota.model import Verdict
from rota.planner import View


@dataclass(frozen=True)
class AtBroker:
    """What a broker tells of a group: views of its topics, who else is there, what is wrong."""

    views: Mapping[str, View | None] = field(default_factory=dict)
    foreigners: tuple[str, ...] | None = None
    problems: tuple[Verdict, ...] = ()
