"""Runs documentation pages: types their commands into a shell, and compares the answers with those on the page."""

import asyncio
import os
import re
import shlex
import signal
import textwrap
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from ground.poll import soon

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs/tutorial.md"
ON_A_CLUSTER = "On a cluster of your own"  # a section of the tutorial, run on a real node by tests/e2e
# Local pods have no kubelet for these commands: tests/e2e runs them, or similar ones, on a real node.
ON_A_NODE = ("kubectl logs ",)
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
VARYING = {  # parts that differ in each run: pod names, addresses, decimals, ages
    r"\b[a-z]+(-[a-z0-9]{5,10})?-[a-z0-9]{5}\b": "POD",
    r"\b\d+\.\d+\.\d+\.\d+(:\d+)?\b": "ADDRESS",
    r"\bgeneration \d+": "generation N",
    r"#[0-9a-f]{8}\b": "#UID",
    r"\b\d+(\.\d+)?([smhd](\d+s)?|/s)(?=\s|\Z)": "TIME",
    r"[─ ]+": " ",
}


class TypedCommand(NamedTuple):
    """A command, and the answer that the page shows."""

    command: str
    shown: str


def blocks(page: Path, language: str, section: str = "") -> list[str]:
    """Return a page's (or a section's) blocks in a language, without the indentation that a list gives them."""
    text = page.read_text()
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [textwrap.dedent(block[3]) for block in BLOCK.finditer(text) if block[2] == language]


def typed_commands(page: Path, section: str = "") -> list[TypedCommand]:
    """Return the commands in the console blocks of a page, or of a section of it."""
    commands: list[TypedCommand] = []
    for line in "".join(blocks(page, "console", section)).splitlines(keepends=True):
        if line.startswith("$ "):
            commands.append(TypedCommand(line[2:], ""))
        elif commands[-1].command.endswith("\\\n"):
            commands[-1] = TypedCommand(commands[-1].command + line, "")
        else:
            commands[-1] = commands[-1]._replace(shown=commands[-1].shown + line)
    return commands


def substituted_commands(page: Path, substitutions: Mapping[str, str], section: str = "") -> list[TypedCommand]:
    """Return the commands of a page or a section, with the names of `here` replaced by their values."""
    commands = []
    for typed in typed_commands(page, section):
        text = typed.command
        for name, value in substitutions.items():
            text = text.replace(name, value)
        commands.append(typed._replace(command=text))
    return commands


def normalized_lines(text: str) -> set[str]:
    """Return an answer's lines without the parts that differ in each run; an ellipsis stands for omitted lines."""
    for pattern, word in VARYING.items():
        text = re.sub(pattern, word, text)
    return set(map(str.strip, text.splitlines())) - {"", "…"}


class Shell:
    """A bash that keeps running: each line sees the variables and background jobs of the previous lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def run(self, command: str, seconds: float = 240) -> str:
        """Type a command, and return its output; raise AssertionError if it fails."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{{\n{command}\n}} </dev/null\nprintf '\\n%s\\n' \"ended:$?\"\n".encode())
        printed: list[str] = []
        async with asyncio.timeout(seconds):
            while not printed or not printed[-1].startswith("ended:"):
                line = (await self._process.stdout.readline()).decode()
                assert line, f"the shell ended at {command}: {''.join(printed)}"
                printed.append(line)
        assert printed[-1] == "ended:0\n", f"{command}: {''.join(printed)}"
        return "".join(printed[:-1])

    async def run_until_printed(self, command: str, until: str = ".") -> str:
        """Start a command that runs until Ctrl-C, end it at the first line that matches, and return that line."""
        start = f"exec {{said}}< <(exec {command.rstrip()}\n)"  # the newline ends a comment in the command
        matching = f"grep --max-count=1 {shlex.quote(until)} <&$said; saw=$?; kill $!; exec {{said}}<&-; test $saw = 0"
        return await self.run(f"{start}\n{matching}")

    async def run_as_shown(self, typed: TypedCommand) -> None:
        """Run a command of a page; repeat it until its answer is the one that the page shows."""
        last = ""

        async def answered() -> bool:
            nonlocal last
            last = await self.run(typed.command)
            return normalized_lines(typed.shown) <= normalized_lines(last)

        try:
            await soon(answered)
        except TimeoutError as error:
            error.add_note(f"$ {typed.command}is not answered as the page shows, but:\n{last}")
            raise


@asynccontextmanager
async def a_shell(folder: Path, variables: Mapping[str, str]) -> AsyncIterator[Shell]:
    """Start a shell in a folder; its background processes end with it."""
    env = os.environ | variables
    process = await asyncio.create_subprocess_exec(
        "bash", cwd=folder, env=env, stdin=PIPE, stdout=PIPE, stderr=STDOUT, limit=2**20, start_new_session=True
    )
    try:
        yield Shell(process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
