"""`rota sidecar`: one member without Kubernetes, for an app developer's laptop."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, NamedTuple

import click
from msgspec.structs import replace

from rota.brokers.errors import BrokerError, Unknown
from rota.brokers.memory import BROKER, Memory, MemoryConsumer
from rota.brokers.port import Brokers
from rota.brokers.rocketmq.admin import Cluster
from rota.brokers.rocketmq.wire.addresses import split_address
from rota.cli.console import inputs as reading
from rota.documents import Assignment, Share, write_assignment
from rota.model import RETRY, Queue
from rota.sidecar.consume.broker_session import Connect
from rota.sidecar.delivery import pull
from rota.sidecar.main import to_rocketmq, work
from rota.sidecar.storage.environment import Who
from rota.sidecar.storage.secret_files import Access
from rota.spec import GroupSpec, StartFrom
from rota.spec.resolved import write_settings
from rota.timestamps import format_time

LOOK_AGAIN = 5.0  # for queues that are new
MEMORY, QUEUES = "memory", 4
MODE = 0o700


class Place(NamedTuple):
    """Where messages come from."""

    brokers: Brokers
    connect: Connect
    memory: Memory | None = None


def run(given: Mapping[str, Any]) -> None:
    """Be a member until Ctrl-C; a second one does not wait for what is at the app."""
    name, group, policy = reading.resources(given["filename"], given["policy"])
    group = replace(group, group=group.group or name)
    if not group.group:
        raise ValueError(f"The ConsumerGroup in {reading.spelled(given['filename'])} has no metadata.name; give it one")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="rota-")))
        who = _who(folder, given)
        asyncio.run(_run(who, _changed(group, given), policy.handover.drain_timeout, given))


def _who(folder: Path, given: Mapping[str, Any]) -> Who:
    for part in ("documents", "state"):
        (folder / part).mkdir(mode=MODE)
    return Who(
        pod=f"local-{os.getpid()}",
        namespace="local",
        uid=os.urandom(16).hex(),
        documents=str(folder / "documents"),
        state=str(folder / "state"),
        credentials=given["credentials"],
        authorities=given["authorities"],
        client=given["client"],
    )


def _changed(group: GroupSpec, given: Mapping[str, Any]) -> GroupSpec:
    """Return the group as it is here: at another broker, perhaps with the app at another port."""
    broker, delivery = given["broker"], group.delivery
    if given["app_port"] and delivery.mode == "Push":
        group = replace(group, delivery=replace(delivery, push=replace(delivery.push, port=given["app_port"])))
    if broker == MEMORY:  # which is empty: whatever is in it was sent to us
        return replace(group, start_from=StartFrom(position="Earliest"))
    if split_address(broker) is None:
        raise ValueError(
            f"--broker {broker} is neither memory nor the address of a name server, such as 127.0.0.1:9876"
        )
    rocketmq = replace(group.broker.rocketmq, name_servers=[broker])
    return replace(group, broker=replace(group.broker, rocketmq=rocketmq))


async def _run(who: Who, group: GroupSpec, drain_timeout: float, given: Mapping[str, Any]) -> None:
    place = await _memory(group) if given["broker"] == MEMORY else _real(who, group)
    documents = _Documents(Path(who.documents), who, group)
    documents.settings(drain_timeout)
    beside = [documents.follow(place.brokers)]
    if place.memory:
        beside.append(_send(place.memory))
        click.echo(f"Lines `TOPIC BODY` are sent, to {_listed(group)}; Ctrl-C ends.", err=True)
    ending = asyncio.Event()
    _end_by_signal(ending)
    tasks = [asyncio.create_task(it) for it in beside]
    try:
        asked = given["app_port"] if given["app_port"] and group.delivery.mode == "Pull" else pull.PORT
        await work(who, place.connect, ending, given["port"], asked)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await place.brokers.close()


def _end_by_signal(ending: asyncio.Event) -> None:
    loop, signals = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)

    def end() -> None:
        ending.set()
        for number in signals:
            loop.remove_signal_handler(number)

    for number in signals:
        loop.add_signal_handler(number, end)


def _listed(group: GroupSpec) -> str:
    return ", ".join(it.topic for it in group.subscriptions)


async def _memory(group: GroupSpec) -> Place:
    memory = Memory()
    for subscription in group.subscriptions:
        await memory.create_topic(subscription.topic, BROKER, QUEUES)
    return Place(memory, lambda _, membership: MemoryConsumer(memory, membership), memory)


def _real(who: Who, group: GroupSpec) -> Place:
    access = Access(who)
    return Place(Cluster(access.site(group.broker.rocketmq)), to_rocketmq(access))


class _Documents:
    """What an operator would write for the one member that there is."""

    def __init__(self, folder: Path, who: Who, group: GroupSpec) -> None:
        self._folder, self._who, self._group = folder, who, group
        self._generation = 0
        self._told = ""

    def settings(self, drain_timeout: float) -> None:
        """Write the group's settings."""
        created = format_time(time.time())
        self._write("group.json", write_settings("", self._group, drain_timeout, created))

    async def follow(self, brokers: Brokers) -> None:
        """Give the member every queue, also those that come later."""
        before: list[Queue] | None = None
        while True:
            found = await self._queues(brokers)
            if found is not None and found != before:
                before = found
                self._give(tuple(found))
            await asyncio.sleep(LOOK_AGAIN)

    async def _queues(self, brokers: Brokers) -> list[Queue] | None:
        """Return the queues that there are; None if that is not known."""
        found: list[Queue] = []
        missing = []
        retries = [] if self._group.message_model == "Broadcasting" else [f"{RETRY}{self._group.group}"]
        for topic in [*(it.topic for it in self._group.subscriptions), *retries]:
            try:
                found += await brokers.queues(topic)
            except Unknown:  # the retry topic comes with the first member
                missing += [topic] if topic not in retries else []
            except BrokerError as error:
                self._tell(str(error))
                return None
        self._tell(f"There is no topic {', '.join(missing)} yet" if missing else "")
        return sorted(found)

    def _tell(self, sentence: str) -> None:
        if sentence and sentence != self._told:
            click.echo(sentence, err=True)
        self._told = sentence

    def _give(self, queues: tuple[Queue, ...]) -> None:
        self._generation += 1
        broadcasting = self._group.message_model == "Broadcasting"
        assignment = Assignment(
            group=f"{self._who.namespace}/{self._group.group}",
            generation=self._generation,
            issued_at=format_time(time.time()),
            members={self._who.pod: Share(self._who.uid, () if broadcasting else queues)},
            everyone=queues if broadcasting else None,
        )
        for name, text in write_assignment(assignment).items():
            self._write(name, text)

    def _write(self, name: str, text: str | bytes) -> None:
        """Write it whole beside its place, and rename it."""
        new = self._folder / f"{name}.new"
        new.write_bytes(text.encode() if isinstance(text, str) else text)
        new.rename(self._folder / name)


# Lines on standard input.


async def _send(memory: Memory) -> None:
    """Send each line; what cannot be sent is a sentence."""
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    Thread(target=_read, args=(lambda line: loop.call_soon_threadsafe(lines.put_nowait, line),), daemon=True).start()
    while True:
        topic, _, body = (await lines.get()).decode(errors="replace").strip().partition(" ")
        try:
            if topic:
                await memory.send(topic, body.strip().encode())
        except BrokerError as error:
            click.echo(f"{error}; write TOPIC BODY", err=True)


def _read(take: Callable[[bytes], object]) -> None:
    """Read to the end, in a thread of its own: not every file can be waited for.

    By the descriptor, since a thread that is stopped in the midst of Python's own reader stops the interpreter's end.
    """
    rest = b""
    with suppress(OSError, ValueError, AttributeError, RuntimeError):  # there is none, or nobody listens any more
        while data := os.read(sys.stdin.fileno(), 65536):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                take(line)
        take(rest)
