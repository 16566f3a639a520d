"""Peers of the strategies in Java: the reference client's, and Kafka's server-side assignors."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache as once
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.measure import Sample
from ground import cache, java
from ground.report import Missing, say
from rota.model import Queue, Roster


@dataclass(frozen=True)
class Measured:
    """A peer's runs, and its description of the result."""

    sample: Sample
    answer: dict[str, Any]


class Reference:
    """The reference client's strategies: each member computes its own share; only some of these calls are made."""

    def __init__(self, roster: Roster, rooms: Sequence[str]) -> None:
        """Write down the roster, and each member's machine room, as the Java program reads them."""
        self.roster = roster
        self._queues = "\n".join(f"{queue.topic}\t{queue.broker}\t{queue.id}" for queue in roster.queues)
        self._members = "\n".join(f"{name}\t{room}" for name, room in zip(roster.members, rooms, strict=True))

    def measure(self, strategy: str, calls: int, owners: Sequence[int]) -> Sample | None:
        """Time a strategy; raise ValueError if its assignment is not ours, because the ratio would mean nothing."""
        member = len(self.roster.members) // 2
        with TemporaryDirectory() as folder:
            queues, members = Path(folder, "queues"), Path(folder, "members")
            queues.write_text(self._queues)
            members.write_text(self._members)
            asked_member = self.roster.members[member]
            options = {"strategy": strategy, "queues": queues, "members": members, "calls": calls, "ask": asked_member}
            measured = _run(java.ROCKETMQ, "Strategies", options)
        if not measured:
            return None
        ours = [queue for queue, owner in zip(self.roster.queues, owners, strict=True) if owner == member]
        if measured[0].answer["queues"] != _format_queues(ours):
            raise ValueError(f"{strategy} answers otherwise than we do: {measured[0].answer['queues'][:200]}")
        return measured[0].sample


def _format_queues(queues: Sequence[Queue]) -> str:
    return " ".join(f"{queue.broker}/{queue.id}" for queue in queues)


def kafka(assignor: str, cases: Sequence[str]) -> Sequence[Measured | None]:
    """Time one of Kafka's assignors on each case; `java/kafka/Assignors.java` documents the format of cases."""
    return _run(java.KAFKA, "Assignors", {"assignor": assignor, "works": ",".join(cases)}) or [None] * len(cases)


def _run(product: java.Product, main: str, options: dict[str, object]) -> list[Measured]:
    """Run a peer in a new JVM; return an empty list if Java or the peer is not available."""
    path = _class_path(product)
    if not path:
        return []
    words = [f"{name}={value}" for name, value in options.items()]
    with TemporaryDirectory() as home:
        argv = java.command(main, *words, home=Path(home), path=path, level="WARN", tuning=java.MEASURED)
        printed = cache.run(argv, f"Java's {main}")
    return list(_measured(json.loads(line) for line in printed.splitlines() if line.startswith("{")))


def _measured(lines: Iterable[dict[str, Any]]) -> Iterator[Measured]:
    runs: list[float] = []
    for line in lines:
        if line["event"] == "run":
            runs.append(line["seconds"])
        else:
            yield Measured(Sample(runs), line)
            runs = []


@once
def _class_path(product: java.Product) -> str:
    try:
        return java.class_path(java.classes(product), product=product)
    except Missing as missing:
        say(f"{product.name}'s strategies are left out: {missing}.")
        return ""
