"""`rota sidecar`: runs one member without Kubernetes, for app developers.

The command plays the operator: it writes the files that a pod has mounted, the group's settings and an assignment of
every queue, into a temporary folder, and runs the sidecar's own code on it. The broker is one in memory, which gets its
messages from standard input, or a real cluster.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, NamedTuple

import click
from msgspec.structs import replace

from rota.brokers.errors import BrokerError, NotFoundError
from rota.brokers.memory import BROKER, MemoryCluster, MemoryConsumer
from rota.brokers.port import Brokers
from rota.brokers.rocketmq.brokers import RocketMQBrokers
from rota.brokers.rocketmq.wire.addresses import split_address
from rota.cli.console.inputs import display_name, load_group_and_policy
from rota.documents import Assignment, Share, encode_assignment
from rota.model import RETRY_TOPIC_PREFIX, Queue
from rota.sidecar.consume.broker_session import Connect
from rota.sidecar.delivery import pull
from rota.sidecar.main import rocketmq_connector, run_member
from rota.sidecar.storage.environment import PodIdentity
from rota.sidecar.storage.secret_files import SecretFiles
from rota.spec import GroupSpec, StartFrom
from rota.spec.resolved import encode_settings
from rota.timestamps import format_time

QUEUE_CHECK_SECONDS = 5.0  # seconds between two checks for new queues
MEMORY_BROKER = "memory"
QUEUES_PER_TOPIC = 4
FOLDER_MODE = 0o700


class MessageSource(NamedTuple):
    """The brokers, and a function that connects a member to them; `memory_cluster` is set for a broker in memory."""

    brokers: Brokers
    connect: Connect
    memory_cluster: MemoryCluster | None = None


def run(options: Mapping[str, Any]) -> None:
    """Run a member until Ctrl-C; a second Ctrl-C does not wait for open deliveries."""
    name, group, policy = load_group_and_policy(options["filename"], options["policy"])
    group = replace(group, group=group.group or name)
    if not group.group:
        raise ValueError(f"The ConsumerGroup in {display_name(options['filename'])} has no metadata.name; give it one")
    with TemporaryDirectory(prefix="rota-") as folder:
        identity = _pod_identity(Path(folder), options)
        asyncio.run(_run_member(identity, _apply_options(group, options), policy.handover.drain_timeout, options))


def _pod_identity(folder: Path, options: Mapping[str, Any]) -> PodIdentity:
    for part in ("documents", "state"):
        (folder / part).mkdir(mode=FOLDER_MODE)
    return PodIdentity(
        name=f"local-{os.getpid()}",
        namespace="local",
        uid=os.urandom(16).hex(),
        config_folder=str(folder / "documents"),
        state_folder=str(folder / "state"),
        credentials_folder=options["credentials"],
        ca_folder=options["authorities"],
        client_folder=options["client"],
    )


def _apply_options(group: GroupSpec, options: Mapping[str, Any]) -> GroupSpec:
    """Return the group with the broker, and perhaps the app's port, replaced by the options."""
    broker = options["broker"]
    delivery = group.delivery
    if options["app_port"] and delivery.mode == "Push":
        group = replace(group, delivery=replace(delivery, push=replace(delivery.push, port=options["app_port"])))
    if broker == MEMORY_BROKER:  # it starts empty: every message in it is meant for this member
        return replace(group, start_from=StartFrom(position="Earliest"))
    if split_address(broker) is None:
        problem = f"--broker {broker} is neither memory nor the address of a name server, such as 127.0.0.1:9876"
        raise ValueError(problem)
    rocketmq = replace(group.broker.rocketmq, name_servers=[broker])
    return replace(group, broker=replace(group.broker, rocketmq=rocketmq))


async def _run_member(
    identity: PodIdentity, group: GroupSpec, drain_timeout: float, options: Mapping[str, Any]
) -> None:
    source = await _connect_memory(group) if options["broker"] == MEMORY_BROKER else _connect_rocketmq(identity, group)
    config_writer = _LocalConfigWriter(Path(identity.config_folder), identity, group)
    config_writer.write_group_settings(drain_timeout)
    background = [config_writer.assign_queues(source.brokers)]
    if source.memory_cluster:
        background.append(_send_lines(source.memory_cluster))
        topics = ", ".join(group.topics)
        click.echo(f"Type `TOPIC BODY` to send a message; topics: {topics}. Ctrl-C stops.", err=True)
    stopping = asyncio.Event()
    _stop_on_signal(stopping)
    tasks = list(map(asyncio.create_task, background))
    try:
        # --app-port: in Push the port of the app (`_apply_options`), in Pull the port at which the app asks.
        pull_port = options["app_port"] if options["app_port"] and group.delivery.mode == "Pull" else pull.PORT
        await run_member(identity, source.connect, stopping, options["port"], pull_port)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await source.brokers.close()


def _stop_on_signal(stopping: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        stopping.set()
        for number in signals:  # a second signal does not wait for open deliveries
            loop.remove_signal_handler(number)

    for number in signals:
        loop.add_signal_handler(number, stop)


async def _connect_memory(group: GroupSpec) -> MessageSource:
    memory = MemoryCluster()
    for topic in group.topics:
        await memory.create_topic(topic, BROKER, QUEUES_PER_TOPIC)
    return MessageSource(memory, lambda _, membership: MemoryConsumer(memory, membership), memory)


def _connect_rocketmq(identity: PodIdentity, group: GroupSpec) -> MessageSource:
    access = SecretFiles(identity)
    return MessageSource(RocketMQBrokers(access.connection_config(group.broker.rocketmq)), rocketmq_connector(access))


class _LocalConfigWriter:
    """Writes the settings and assignments that an operator would write for the single member."""

    def __init__(self, folder: Path, identity: PodIdentity, group: GroupSpec) -> None:
        self._folder = folder
        self._identity = identity
        self._group = group
        self._generation = 0
        self._last_message = ""

    def write_group_settings(self, drain_timeout: float) -> None:
        """Write the group's settings."""
        name = ""  # not needed: `run` has set `spec.group`
        self._write("group.json", encode_settings(name, self._group, drain_timeout, format_time(time.time())))

    async def assign_queues(self, brokers: Brokers) -> None:
        """Assign every queue to the member, including queues that are created later."""
        assigned: list[Queue] | None = None
        while True:
            queues = await self._list_queues(brokers)
            if queues is not None and queues != assigned:
                assigned = queues
                self._write_assignment(tuple(queues))
            await asyncio.sleep(QUEUE_CHECK_SECONDS)

    async def _list_queues(self, brokers: Brokers) -> list[Queue] | None:
        """Return the existing queues; None if a broker gives an error."""
        queues: list[Queue] = []
        missing = []
        is_broadcasting = self._group.message_model == "Broadcasting"
        retry_topics = [] if is_broadcasting else [f"{RETRY_TOPIC_PREFIX}{self._group.group}"]
        for topic in [*self._group.topics, *retry_topics]:
            try:
                queues += await brokers.queues(topic)
            except NotFoundError:
                if topic not in retry_topics:  # the first member creates the retry topic
                    missing.append(topic)
            except BrokerError as error:
                self._print_if_changed(str(error))
                return None
        self._print_if_changed(f"Topics that do not exist yet: {', '.join(missing)}" if missing else "")
        return sorted(queues)

    def _print_if_changed(self, sentence: str) -> None:
        if sentence and sentence != self._last_message:
            click.echo(sentence, err=True)
        self._last_message = sentence

    def _write_assignment(self, queues: tuple[Queue, ...]) -> None:
        self._generation += 1
        broadcasting = self._group.message_model == "Broadcasting"
        assignment = Assignment(
            group=f"{self._identity.namespace}/{self._group.group}",
            generation=self._generation,
            issued_at=format_time(time.time()),
            members={self._identity.name: Share(self._identity.uid, () if broadcasting else queues)},
            everyone=queues if broadcasting else None,
        )
        for name, content in encode_assignment(assignment).items():
            self._write(name, content)

    def _write(self, name: str, content: str | bytes) -> None:
        """Write a file completely under another name, then rename it."""
        new = self._folder / f"{name}.new"
        new.write_bytes(content.encode() if isinstance(content, str) else content)
        new.rename(self._folder / name)


async def _send_lines(memory_cluster: MemoryCluster) -> None:
    """Send each line of standard input to its topic; print an error for a line that cannot be sent."""
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    Thread(
        target=_read_lines, args=(lambda line: loop.call_soon_threadsafe(lines.put_nowait, line),), daemon=True
    ).start()
    while True:
        topic, _, body = (await lines.get()).decode(errors="replace").strip().partition(" ")
        try:
            if topic:
                await memory_cluster.send(topic, body.strip().encode())
        except BrokerError as error:
            click.echo(f"{error}; write lines as TOPIC BODY", err=True)


def _read_lines(on_line: Callable[[bytes], object]) -> None:
    """Read standard input to the end, in a thread of its own: asyncio cannot wait for every kind of file.

    `os.read` is used, because a thread within Python's buffered reader would block the interpreter's exit.
    """
    incomplete = b""
    with suppress(OSError, ValueError, AttributeError, RuntimeError):  # no standard input, or the event loop is closed
        while data := os.read(sys.stdin.fileno(), 65536):
            *lines, incomplete = (incomplete + data).split(b"\n")
            for line in lines:
                on_line(line)
        on_line(incomplete)
