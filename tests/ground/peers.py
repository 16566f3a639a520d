"""Reference peers in Java: a producer of numbered messages and a push consumer that reports each message."""

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ground import java
from ground.instance import Instance
from ground.rocketmq import RocketMQ

Line = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """A running peer; its output is JSON lines, each with an `event` and `at`, in microseconds."""

    instance: Instance
    program: str

    def lines(self, event: str) -> list[Line]:
        """Return the lines of this event so far."""
        return [line for line in self._lines() if line["event"] == event]

    def numbers(self) -> list[int]:
        """Return the numbers of all messages that a consumer has received, in that order."""
        return [line["number"] for line in self.lines("message")]

    @property
    def done(self) -> bool:
        """Whether a producer has sent all messages."""
        return bool(self.lines("done"))

    @property
    def count(self) -> int:
        """How many messages a quiet consumer has counted."""
        counts = self.lines("count")
        return int(counts[-1]["count"]) if counts else 0

    def stop(self) -> None:
        """End the peer in good order: a consumer commits and leaves its group."""
        self.instance.stop(self.program)

    def _lines(self) -> Iterator[Line]:
        log = self.instance.log(self.program)
        for line in log.read_text().splitlines(keepends=True) if log.exists() else []:
            if line.startswith("{") and line.endswith("}\n"):  # the other lines are RocketMQ's own log
                yield json.loads(line)


def producer(rocketmq: RocketMQ, topic: str, count: int, **options: object) -> Peer:
    """Start a producer; `java/Producer.java` names its options."""
    return _start(rocketmq, "Producer", topic=topic, count=count, **options)


def push_consumer(rocketmq: RocketMQ, group: str, topic: str, **options: object) -> Peer:
    """Start a push consumer; `java/PushConsumer.java` names its options."""
    return _start(rocketmq, "PushConsumer", group=group, topic=topic, **options)


def http_bridge(rocketmq: RocketMQ, group: str, topic: str, url: str, **options: object) -> Peer:
    """Start a push consumer that posts each message to an app and counts it, compiled as in production."""
    words = _words(rocketmq, group=group, topic=topic, post=url, quiet=True, **options)
    path = java.class_path(java.classes())
    argv = java.command("PushConsumer", *words, home=rocketmq.folder, path=path, level="WARN", tuning=java.BRIDGE)
    return _run(rocketmq, "PushConsumer", argv)


def lite_pull(rocketmq: RocketMQ, topic: str, count: int, **options: object) -> Peer:
    """Start a reader of a topic in a loop, with Java's production settings; `java/LitePull.java` names its options."""
    words = _words(rocketmq, topic=topic, count=count, **options)
    path = java.class_path(java.classes())
    argv = java.command("LitePull", *words, home=rocketmq.folder, path=path, level="WARN", tuning=java.MEASURED)
    return _run(rocketmq, "LitePull", argv)


def _start(rocketmq: RocketMQ, main: str, **options: object) -> Peer:
    words = _words(rocketmq, **options)
    return _run(rocketmq, main, rocketmq.java(main, *words, path=java.class_path(java.classes()), level="WARN"))


def _words(rocketmq: RocketMQ, **options: object) -> list[str]:
    settings = {"nameServer": rocketmq.name_server, **options}
    return [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in settings.items()]


def _run(rocketmq: RocketMQ, main: str, argv: Sequence[str | Path]) -> Peer:
    program = f"{main.lower()}-{secrets.token_hex(3)}"
    rocketmq.instance.start(program, argv)
    return Peer(rocketmq.instance, program)
