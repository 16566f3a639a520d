"""Pages as programs: what they tell people to type is typed into a shell, and must be answered as they show."""

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
ON_A_CLUSTER = "On a cluster of your own"  # a section of it, which is typed on a real node
# Local pods have no kubelet that would answer these: tests/e2e types them, or the like, on a real node.
ON_A_NODE = ("kubectl logs ",)
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
OTHERWISE = {  # what is another one each time: names of pods, addresses, decimals, how long ago something was
    r"\b[a-z]+(-[a-z0-9]{5,10})?-[a-z0-9]{5}\b": "POD",
    r"\b\d+\.\d+\.\d+\.\d+(:\d+)?\b": "ADDRESS",
    r"\bgeneration \d+": "generation N",
    r"#[0-9a-f]{8}\b": "#UID",
    r"\b\d+(\.\d+)?([smhd](\d+s)?|/s)(?=\s|\Z)": "TIME",
    r"[─ ]+": " ",
}


class Typed(NamedTuple):
    """A command, and what the page shows of its answer."""

    command: str
    shown: str


def blocks(page: Path, language: str, section: str = "") -> list[str]:
    """Return a page's (or a section's) blocks in a language, without the indentation that a list gives them."""
    text = page.read_text()
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [textwrap.dedent(it[3]) for it in BLOCK.finditer(text) if it[2] == language]


def typed(page: Path, section: str = "") -> list[Typed]:
    """Return what a page, or a section of it, tells people to type."""
    found: list[Typed] = []
    for line in "".join(blocks(page, "console", section)).splitlines(keepends=True):
        if line.startswith("$ "):
            found.append(Typed(line[2:], ""))
        elif found[-1].command.endswith("\\\n"):
            found[-1] = Typed(found[-1].command + line, "")
        else:
            found[-1] = found[-1]._replace(shown=found[-1].shown + line)
    return found


def put(page: Path, here: Mapping[str, str], section: str = "") -> list[Typed]:
    """Return what a page or a section tells people to type, with what there is here in the place of what it names."""
    found = []
    for it in typed(page, section):
        command = it.command
        for there, ours in here.items():
            command = command.replace(there, ours)
        found.append(it._replace(command=command))
    return found


def likeness(text: str) -> set[str]:
    """Return an answer's lines without what is another one each time; an ellipsis stands for lines not shown."""
    for pattern, word in OTHERWISE.items():
        text = re.sub(pattern, word, text)
    return {line.strip() for line in text.splitlines()} - {"", "…"}


class Shell:
    """A bash that stays, so that what one line exports or starts the next one has."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def run(self, command: str, seconds: float = 240) -> str:
        """Type a command, and return what it printed; it has to succeed."""
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

    async def begin(self, command: str, until: str = ".") -> str:
        """Type what goes on until Ctrl-C; end it as soon as it has printed such a line, and return that."""
        begun = f"exec {{said}}< <(exec {command.rstrip()}\n)"  # a comment ends with its line
        seen = f"grep --max-count=1 {shlex.quote(until)} <&$said; saw=$?; kill $!; exec {{said}}<&-; test $saw = 0"
        return await self.run(f"{begun}\n{seen}")

    async def follow(self, it: Typed) -> None:
        """Type a command of a page; where it shows an answer look again, as people do, until that has come."""
        last = ""

        async def answered() -> bool:
            nonlocal last
            last = await self.run(it.command)
            return likeness(it.shown) <= likeness(last)

        try:
            await soon(answered)
        except TimeoutError as error:
            error.add_note(f"$ {it.command}is not answered as the page shows, but:\n{last}")
            raise


@asynccontextmanager
async def a_shell(folder: Path, variables: Mapping[str, str]) -> AsyncIterator[Shell]:
    """Start a shell in a folder; what it has started in the background and left there ends with it."""
    env = os.environ | variables
    process = await asyncio.create_subprocess_exec(
        "bash", cwd=folder, env=env, stdin=PIPE, stdout=PIPE, stderr=STDOUT, limit=2**20, start_new_session=True
    )
    try:
        yield Shell(process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
