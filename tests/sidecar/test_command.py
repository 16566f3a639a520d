"""`rota sidecar`: a member on a laptop, as a process next to an app."""

import asyncio
import json
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import pytest
import yaml

from ground.poll import answers, soon
from ground.rocketmq import RocketMQ
from rota.brokers.errors import BrokerError
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.routing import ConnectionConfig
from sidecar.in_memory import App, Event, accept, port_of

ROOT = Path(__file__).parents[2]
GROUP = """
apiVersion: rota.dev/v1alpha1
kind: ConsumerGroup
metadata: {name: shop}
spec:
  broker: {rocketmq: {nameServers: ["nowhere.invalid:9876"]}}
  subscriptions: [{topic: orders}, {topic: bills}]
"""


def a_port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Command:
    """The process, its port and its app."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, app: App) -> None:
        self.process = process
        self.port = port
        self.app = app

    def write(self, text: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(text.encode())

    async def wait_until_done(self, *bodies: str) -> None:
        async def are_done() -> bool:
            return sorted(self.app.done) == sorted(bodies)

        await soon(are_done)

    async def wait_until_ready(self) -> None:
        await soon(lambda: asyncio.to_thread(answers, f"http://127.0.0.1:{self.port}/readyz"))

    async def end(self, number: int = signal.SIGINT) -> tuple[int, str]:
        """End the process by a signal; return its exit code and its errors."""
        self.process.send_signal(number)
        assert self.process.stderr
        errors = await self.process.stderr.read()
        return await self.process.wait(), errors.decode()


async def start(*arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "rota.cli", "sidecar", *arguments]
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)


@asynccontextmanager
async def a_command(folder: Path, manifest: str = GROUP, *arguments: str) -> AsyncIterator[Command]:
    """Start the command and an app."""
    (folder / "group.yaml").write_text(manifest)
    app = App(accept)
    port = a_port()
    serving = await app.serve()
    options = ["--group", str(folder / "group.yaml"), "--port", str(port), "--app-port", str(port_of(serving))]
    process = await start(*options, *arguments)
    try:
        yield Command(process, port, app)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
        await serving.cleanup()


async def test_cli_sidecar_sends_each_input_line_as_a_message_to_the_app(tmp_path: Path) -> None:
    async with a_command(tmp_path) as command:
        command.write("orders first\nbills  a second one \n\n")
        await command.wait_until_done("first", "a second one")
        command.write("orders third\nbil")
        await command.wait_until_done("first", "a second one", "third")
        command.write("ls fourth\n")
        await command.wait_until_done("first", "a second one", "third", "fourth")
        await command.wait_until_ready()
        code, errors = await command.end()
        assert code == 0
        assert "Type `TOPIC BODY` to send a message; topics: orders, bills. Ctrl-C stops." in errors
        assert "Traceback" not in errors


async def test_example_app_that_the_readme_names_prints_messages_of_a_sidecar_on_a_laptop() -> None:
    app_port, port = a_port(), a_port()
    named = re.search(r"\[fleet\.yaml\]\((\S+)\)", (ROOT / "README.md").read_text())
    assert named
    fleet, *_ = yaml.safe_load_all((ROOT / named[1]).read_text())
    (container,) = fleet["spec"]["template"]["spec"]["containers"]
    *options, program = container["command"][1:]
    argv = [sys.executable, *options, program.replace("8080", str(app_port))]
    env = {name: value for name, value in os.environ.items() if name != "ROTA_LOCAL"}
    app = await asyncio.create_subprocess_exec(*argv, env=env, stdout=asyncio.subprocess.PIPE)
    manifest = str(ROOT / "docs/examples/group.yaml")
    sidecar = await start("--group", manifest, "--app-port", str(app_port), "--port", str(port))
    assert sidecar.stdin
    assert app.stdout
    try:
        sidecar.stdin.write(b"orders hello\n")
        assert (await app.stdout.readline()).endswith(b" 1 hello\n")
    finally:
        for process in (sidecar, app):
            process.kill()
            await process.communicate()


async def test_cli_sidecar_rejects_an_invalid_line_with_a_sentence_and_continues(tmp_path: Path) -> None:
    async with a_command(tmp_path, GROUP, "--broker", "memory") as command:
        command.write("payments one\norders\norders two\n")
        await command.wait_until_done("two")
        _, errors = await command.end(signal.SIGTERM)
        assert "There is no topic payments; write lines as TOPIC BODY" in errors
        assert "has no body; write lines as TOPIC BODY" in errors


async def test_cli_sidecar_continues_after_the_end_of_its_input(tmp_path: Path) -> None:
    async with a_command(tmp_path) as command:
        command.write("orders the last")
        assert command.process.stdin
        command.process.stdin.close()
        await command.wait_until_done("the last")
        await command.wait_until_ready()
        assert (await command.end())[0] == 0


async def test_cli_sidecar_second_interrupt_stops_it_without_waiting_for_the_app(tmp_path: Path) -> None:
    async def never(_: Event) -> int:
        await asyncio.Event().wait()
        return 204

    async with a_command(tmp_path) as command:
        command.app.answer = never
        command.write("orders first\n")

        async def report_contains(text: str) -> bool:
            return text in await asyncio.to_thread(report, command.port)

        await soon(lambda: report_contains('"inflight":1'))
        command.process.send_signal(signal.SIGINT)
        await soon(lambda: report_contains('"state":"draining"'))
        code, errors = await command.end()
        assert code == 130
        assert "Traceback" not in errors


def report(port: int) -> str:
    """Return the response with its head; nothing while the port is closed."""
    with suppress(ConnectionError), closing(socket.create_connection(("127.0.0.1", port))) as connection:
        connection.sendall(b"GET /v1/report HTTP/1.0\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    return ""


@pytest.mark.parametrize("model", ["Clustering", "Broadcasting"])
async def test_cli_sidecar_member_owns_every_queue(tmp_path: Path, model: str) -> None:
    async with a_command(tmp_path, GROUP + f"  messageModel: {model}\n") as command:
        await command.wait_until_ready()
        expected = {"orders": {"memory": "0-3"}, "bills": {"memory": "0-3"}}
        if model == "Clustering":
            expected["%RETRY%shop"] = {"memory": "0"}

        async def owns_all_queues() -> bool:
            text = (await asyncio.to_thread(report, command.port)).partition("\r\n\r\n")[2]
            return bool(text and json.loads(text)["held"] == expected)

        await soon(owns_all_queues)


@pytest.mark.parametrize(
    ("manifest", "arguments", "message"),
    [
        ("{", [], "group.yaml is not valid YAML, line 1; give a file with a ConsumerGroup"),
        ("", [], "group.yaml contains 0 ConsumerGroups; exactly one is needed"),
        (GROUP.replace("topic: orders", "topic: 'no topic'"), [], "spec.subscriptions[0].topic"),
        (GROUP.replace("{name: shop}", "{}"), [], "group.yaml has no metadata.name; give it one"),
        (GROUP, ["--policy", "steady"], "contains 0 RebalancePolicies named steady (from --policy)"),
        (GROUP, ["--broker", "nowhere"], "--broker nowhere is neither memory nor the address of a name server"),
        (GROUP, ["--port", "0"], "Invalid value for '--port'"),
    ],
)
async def test_cli_sidecar_input_mistake_is_reported_in_one_sentence(
    tmp_path: Path, manifest: str, arguments: list[str], message: str
) -> None:
    async with a_command(tmp_path, manifest, *arguments) as command:
        _, errors = await command.process.communicate()
        assert command.process.returncode == 2
        assert message in errors.decode()
        assert "Traceback" not in errors.decode()


async def test_cli_sidecar_missing_file_is_reported_in_one_sentence(tmp_path: Path) -> None:
    process = await start("--group", str(tmp_path / "none.yaml"))
    _, errors = await process.communicate()
    assert (process.returncode, errors.decode()) == (
        2,
        f"rota: {tmp_path}/none.yaml cannot be read: No such file or directory\n",
    )


async def test_cli_sidecar_port_in_use_is_reported_in_one_sentence(tmp_path: Path) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with a_command(tmp_path, GROUP, "--port", str(port)) as command:
            _, errors = await command.process.communicate()
            assert command.process.returncode == 2
            last = errors.decode().splitlines()[-1]
            assert last == f"rota: Cannot listen on 127.0.0.1, port {port}: Address already in use"
            assert "Traceback" not in errors.decode()


async def test_cli_sidecar_removes_its_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    async with a_command(tmp_path) as command:
        await command.wait_until_ready()
        assert len([*temporary.iterdir()]) == 1
        await command.end()
        assert [*temporary.iterdir()] == []


async def test_cli_sidecar_finds_a_broker_by_name_server_and_consumes_topics_created_later(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    topics = [f"{name}-{secrets.token_hex(3)}" for name in ("orders", "bills")]
    rocketmq.create_topic(topics[0], 2)
    manifest = GROUP.replace("topic: orders", f"topic: {topics[0]}").replace("topic: bills", f"topic: {topics[1]}")
    manifest = manifest.replace("shop", f"shop-{secrets.token_hex(3)}") + "  startFrom: {position: Earliest}\n"
    cluster = AdminClient(ConnectionConfig([rocketmq.name_server]))
    async with a_command(tmp_path, manifest, "--broker", rocketmq.name_server) as command:
        for queue in await cluster.queues(topics[0]):
            await cluster.send(topics[0], f"order {queue.id}".encode(), queue=queue)
        await command.wait_until_done("order 0", "order 1")
        rocketmq.create_topic(topics[1], 1)
        await soon(lambda: sent(cluster, topics[1], b"bill"))
        await command.wait_until_done("order 0", "order 1", "bill")
        code, errors = await command.end()
        assert code == 0
        assert f"Topics that do not exist yet: {topics[1]}" in errors
    await cluster.close()


async def sent(cluster: AdminClient, topic: str, body: bytes) -> bool:
    """Send a message; return False while the name server does not know the topic."""
    try:
        await cluster.send(topic, body)
    except BrokerError:
        return False
    return True
