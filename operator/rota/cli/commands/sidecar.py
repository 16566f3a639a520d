"""`rota sidecar`: runs one member without Kubernetes, for app developers."""

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

from rota.brokers.errors import BrokerError, NotFoundError
from rota.brokers.memory import BROKER, MemoryCluster, MemoryConsumer
from rota.brokers.port import Brokers
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.wire.addresses import split_address
from rota.cli.console import inputs as reading
from rota.documents import Assignment, Share, write_assignment
from rota.model import RETRY, Queue
from rota.sidecar.consume.broker_session import Connect
from rota.sidecar.delivery import pull
from rota.sidecar.main import to_rocketmq, work
from rota.sidecar.storage.environment import PodIdentity
from rota.sidecar.storage.secret_files import SecretFiles
from rota.spec import GroupSpec, StartFrom
from rota.spec.resolved import write_settings
from rota.timestamps import format_time

LOOK_AGAIN = 5.0  # seconds between two checks for new queues
MEMORY, QUEUES = "memory", 4
MODE = 0o700


class MessageSource(NamedTuple):
    """The source of the messages."""

    brokers: Brokers
    connect: Connect
    memory: MemoryCluster | None = None


def run(flags: Mapping[str, Any]) -> None:
    """Run a member until Ctrl-C; a second Ctrl-C does not wait for open deliveries."""
    name, group, policy = reading.resources(flags["filename"], flags["policy"])
    group = replace(group, group=group.group or name)
    if not group.group:
        raise ValueError(
            f"The ConsumerGroup in {reading.display_name(flags['filename'])} has no metadata.name; give it one"
        )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="rota-")))
        who = _who(folder, flags)
        asyncio.run(_run(who, _changed(group, flags), policy.handover.drain_timeout, flags))


def _who(folder: Path, options: Mapping[str, Any]) -> PodIdentity:
    for part in ("documents", "state"):
        (folder / part).mkdir(mode=MODE)
    return PodIdentity(
        pod=f"local-{os.getpid()}",
        namespace="local",
        uid=os.urandom(16).hex(),
        documents=str(folder / "documents"),
        state=str(folder / "state"),
        credentials=options["credentials"],
        authorities=options["authorities"],
        client=options["client"],
    )


def _changed(group: GroupSpec, options: Mapping[str, Any]) -> GroupSpec:
    """Return the group with the broker, and perhaps the app's port, replaced by the options."""
    broker, delivery = options["broker"], group.delivery
    if options["app_port"] and delivery.mode == "Push":
        group = replace(group, delivery=replace(delivery, push=replace(delivery.push, port=options["app_port"])))
    if broker == MEMORY:  # it starts empty: every message in it is meant for this member
        return replace(group, start_from=StartFrom(position="Earliest"))
    if split_address(broker) is None:
        raise ValueError(
            f"--broker {broker} is neither memory nor the address of a name server, such as 127.0.0.1:9876"
        )
    rocketmq = replace(group.broker.rocketmq, name_servers=[broker])
    return replace(group, broker=replace(group.broker, rocketmq=rocketmq))


async def _run(who: PodIdentity, group: GroupSpec, drain_timeout: float, options: Mapping[str, Any]) -> None:
    place = await _memory(group) if options["broker"] == MEMORY else _real(who, group)
    documents = _Documents(Path(who.documents), who, group)
    documents.settings(drain_timeout)
    background = [documents.follow(place.brokers)]
    if place.memory:
        background.append(_send(place.memory))
        click.echo(f"Lines `TOPIC BODY` are sent, to {_listed(group)}; Ctrl-C ends.", err=True)
    ending = asyncio.Event()
    _end_by_signal(ending)
    tasks = [asyncio.create_task(coroutine) for coroutine in background]
    try:
        pull_port = options["app_port"] if options["app_port"] and group.delivery.mode == "Pull" else pull.PORT
        await work(who, place.connect, ending, options["port"], pull_port)
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
    return ", ".join(subscription.topic for subscription in group.subscriptions)


async def _memory(group: GroupSpec) -> MessageSource:
    memory = MemoryCluster()
    for subscription in group.subscriptions:
        await memory.create_topic(subscription.topic, BROKER, QUEUES)
    return MessageSource(memory, lambda _, membership: MemoryConsumer(memory, membership), memory)


def _real(who: PodIdentity, group: GroupSpec) -> MessageSource:
    access = SecretFiles(who)
    return MessageSource(AdminClient(access.site(group.broker.rocketmq)), to_rocketmq(access))


class _Documents:
    """Writes the settings and assignments that an operator would write for the single member."""

    def __init__(self, folder: Path, who: PodIdentity, group: GroupSpec) -> None:
        self._folder, self._who, self._group = folder, who, group
        self._generation = 0
        self._told = ""

    def settings(self, drain_timeout: float) -> None:
        """Write the group's settings."""
        created = format_time(time.time())
        self._write("group.json", write_settings("", self._group, drain_timeout, created))

    async def follow(self, brokers: Brokers) -> None:
        """Assign every queue to the member, including queues that are created later."""
        assigned: list[Queue] | None = None
        while True:
            queues = await self._queues(brokers)
            if queues is not None and queues != assigned:
                assigned = queues
                self._give(tuple(queues))
            await asyncio.sleep(LOOK_AGAIN)

    async def _queues(self, brokers: Brokers) -> list[Queue] | None:
        """Return the existing queues; None if a broker gives an error."""
        queues: list[Queue] = []
        missing = []
        retries = [] if self._group.message_model == "Broadcasting" else [f"{RETRY}{self._group.group}"]
        for topic in [*(subscription.topic for subscription in self._group.subscriptions), *retries]:
            try:
                queues += await brokers.queues(topic)
            except NotFoundError:  # the first member creates the retry topic
                missing += [topic] if topic not in retries else []
            except BrokerError as error:
                self._tell(str(error))
                return None
        self._tell(f"There is no topic {', '.join(missing)} yet" if missing else "")
        return sorted(queues)

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
        for name, content in write_assignment(assignment).items():
            self._write(name, content)

    def _write(self, name: str, content: str | bytes) -> None:
        """Write a file completely under another name, then rename it."""
        new = self._folder / f"{name}.new"
        new.write_bytes(content.encode() if isinstance(content, str) else content)
        new.rename(self._folder / name)


async def _send(memory: MemoryCluster) -> None:
    """Send each line of standard input to its topic; print an error for a line that cannot be sent."""
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


def _read(on_line: Callable[[bytes], object]) -> None:
    """Read standard input to the end, in a thread of its own: asyncio cannot wait for every kind of file.

    By the descriptor: a thread that is stopped within Python's buffered reader blocks the interpreter's exit.
    """
    incomplete = b""
    with suppress(OSError, ValueError, AttributeError, RuntimeError):  # no standard input, or the event loop is closed
        while data := os.read(sys.stdin.fileno(), 65536):
            *lines, incomplete = (incomplete + data).split(b"\n")
            for line in lines:
                on_line(line)
        on_line(incomplete)
