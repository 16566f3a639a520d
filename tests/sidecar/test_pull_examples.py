"""The apps and commands of docs/pull.md: each is run."""

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest

from ground.instance import Instance
from kube.pages import a_shell, substituted_commands
from rota.sidecar import agent
from rota.sidecar.delivery import pull
from sidecar.in_process import a_member

DOCS = Path(__file__).parents[2] / "docs"
APPS = DOCS / "examples" / "apps"
COMMANDS = {
    "python": ("python3", "app.py"),
    "go": ("go", "run", "app.go"),
    "java": ("java", "App.java"),
    "javascript": ("node", "app.mjs"),
}


SLOW_GO = pytest.param("go", marks=pytest.mark.slow("the Go example of docs/pull.md, which `go run` compiles"))


@pytest.mark.parametrize("language", [SLOW_GO if language == "go" else language for language in COMMANDS])
async def test_example_app_consumes_and_acknowledges_every_message(
    instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, language: str
) -> None:
    program, *arguments = COMMANDS[language]
    if not shutil.which(program):
        assert "CI" not in os.environ, f"{program} is not installed"
        pytest.skip(f"{program} is not installed")
    monkeypatch.setattr(agent, "COMMIT_SECONDS", 0.05)
    async with a_member(instance, tmp_path, queues=2) as member:
        for number in range(2):
            await member.send(*(f"{number}/{index} é" for index in range(40)), queue=number)
        app = await asyncio.create_subprocess_exec(
            program,
            *arguments,
            cwd=APPS / language,
            env=os.environ | {"ROTA": f"{member.address}:{pull.PORT}"},
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert app.stdout
        try:
            lines = {(await app.stdout.readline()).decode() for _ in range(80)}
            assert lines == {f"orders 1 {number}/{index} é\n" for number in range(2) for index in range(40)}
            for number in range(2):
                await member.wait_until_committed(number, 40)
        finally:
            os.killpg(app.pid, 9)  # `go run` has a child
            await app.communicate()
        assert await member.metric('messages_total{outcome="done",topic="orders"}') == 80


def test_docs_of_pull_show_the_example_app_that_is_run() -> None:
    assert (APPS / "python" / "app.py").read_text() in (DOCS / "pull.md").read_text()
    assert sorted(folder.name for folder in APPS.iterdir()) == sorted(COMMANDS)


async def test_docs_of_pull_show_commands_that_work(
    instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "COMMIT_SECONDS", 0.05)
    async with a_member(instance, tmp_path) as member, a_shell(tmp_path, {}) as terminal:
        pull_messages, acknowledge, listen = substituted_commands(
            DOCS / "pull.md", {"127.0.0.1:9912": f"{member.address}:{pull.PORT}"}
        )
        await member.send("a")
        [message] = json.loads(await terminal.run(pull_messages.command))["messages"]
        response = await terminal.run(acknowledge.command.replace("5f0c2a91be07-1", message["id"]))
        assert json.loads(response) == {"unknown": []}
        await member.wait_until_committed(0, 1)
        assert "event: assigned" in await terminal.run_until_printed(listen.command)
