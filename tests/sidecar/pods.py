"""Pods as processes: the real sidecar, an app beside it, an address of their own, and documents as a kubelet's.

Whatever a process leaves behind when a test run is killed is known by the instance's tag, and swept by the next run.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout

from ground.deliveries import whole_lines
from ground.instance import TAG, Instance
from ground.poll import soon
from rota.deliveries import DeliveriesPage, decode_deliveries
from rota.model import RETRY_TOPIC_PREFIX, Queue
from rota.sidecar.status.control_api import PORT as CONTROL_PORT
from rota.signing import KEY_BYTES
from sidecar.checker import Delivery
from sidecar.whole_report import WholeReport, whole_report
from signed import signed_drain, signed_report

APP, PORT, APP_PORT, ASK_PORT = Path(__file__).with_name("app.py"), 9911, 8080, 9912
# The sidecar, but it commits every half second instead of every five: nearly every test waits for commits.
COMMITTING_OFTEN = """
import sys
from rota.sidecar import agent
from rota.sidecar.__main__ import main
agent.COMMIT_SECONDS /= 10
sys.exit(main())
"""
SIDECAR = ("-c", COMMITTING_OFTEN)

_numbers = count(10)  # of addresses: the lower ones are servers'


class Pod:
    """One pod: two processes, a volume of documents, a disk for the sidecar's state."""

    def __init__(self, instance: Instance, name: str, folder: Path, *, asks: bool = False) -> None:
        """Start nothing yet; the app is posted to, or asks."""
        self.asks = asks
        self.name, self.uid, self.folder = name, f"{next(_numbers):08x}-0000-4000-8000-000000000000", folder
        self.address = instance.address(int(self.uid[:8], 16))
        self.documents, self.state = folder / "documents", folder / "state"
        self.log = folder / "sidecar.log"
        self.sidecar: subprocess.Popen[bytes] | None = None
        self.app: subprocess.Popen[bytes] | None = None
        self._instance, self._deliveries = instance, folder / "app.jsonl"
        for it in (self.documents, self.state):
            it.mkdir(parents=True)
        self._links = count(1)
        self.run = folder / "run"
        self.run.mkdir()
        self._key, self._key_folder = os.urandom(KEY_BYTES), folder / "key"
        self._key_folder.mkdir()
        (self._key_folder / "current").write_bytes(self._key)

    @property
    def client_id(self) -> str:
        """By which brokers know it."""
        return f"{self.address}@{self.name}#{self.uid[:8]}"

    # Processes.

    def start_app(self) -> None:
        """Start the app, with the rules that it was given."""
        port = ASK_PORT if self.asks else APP_PORT
        arguments = (APP, self.address, str(port), self._deliveries, self.folder / "rules.json")
        self.app = self._start("app", *arguments, *(["asks"] if self.asks else []))

    def start_sidecar(self, program: Sequence[str] = SIDECAR, **changed: str) -> None:
        """Start the sidecar's container, for the first time or again."""
        variables = {
            "POD_NAME": self.name,
            "POD_NAMESPACE": "shop",
            "POD_UID": self.uid,
            "POD_IP": self.address,
            "ROTA_LOCAL": self.address,
            "ROTA_DOCUMENTS": str(self.documents),
            "ROTA_STATE": str(self.state),
            "ROTA_KEY": str(self._key_folder),
            "ROTA_RUN": str(self.run),
            "ROTA_LOG_LEVEL": "debug",
        }
        self.sidecar = self._start("sidecar", *program, **variables, **changed)

    def _start(self, what: str, *arguments: str | Path, **variables: str) -> subprocess.Popen[bytes]:
        tag = {TAG: f"{self._instance.id}/{self.name}-{what}"}
        with (self.folder / f"{what}.log").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, *arguments],
                env={**os.environ, **variables, **tag},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def signal_sidecar(self, number: signal.Signals) -> None:
        """Send the sidecar a signal."""
        assert self.sidecar
        self.sidecar.send_signal(number)

    async def terminate(self) -> int:
        """Ask the sidecar to end, and return its exit code."""
        assert self.sidecar
        self.sidecar.terminate()
        return await asyncio.to_thread(self.sidecar.wait, 60)

    def kill_sidecar(self) -> None:
        """End the sidecar at once."""
        _kill(self.sidecar)

    def kill_app(self) -> None:
        """End the app at once."""
        _kill(self.app)

    # What it is told.

    def show(self, files: Mapping[str, str | bytes]) -> None:
        """Show documents as a kubelet does: a folder of their own, then the link to it, then the folder before goes."""
        place, link = self.documents / f"..{next(self._links)}", self.documents / "..data"
        before = link.resolve() if link.is_symlink() else None
        place.mkdir()
        for name, text in files.items():
            place.joinpath(name).write_bytes(text.encode() if isinstance(text, str) else text)
            if not (self.documents / name).is_symlink():
                (self.documents / name).symlink_to(f"..data/{name}")
        fresh = self.documents / "..data_tmp"
        fresh.symlink_to(place.name)
        fresh.rename(link)
        if before:
            shutil.rmtree(before)

    def rules(self, *rules: Mapping[str, Any]) -> None:
        """Say how the app behaves from now on; without rules it is done with everything at once."""
        fresh = self.folder / "rules.json.new"
        fresh.write_text(json.dumps(rules))
        fresh.rename(self.folder / "rules.json")

    # What it says.

    async def get(self, session: ClientSession, path: str) -> str:
        """Return what the sidecar answers."""
        async with session.get(f"http://{self.address}:{PORT}{path}", timeout=ClientTimeout(90)) as answer:
            return await answer.text()

    async def run_prestop_hook(self) -> tuple[int, str]:
        """Run the program that the kubelet runs in the sidecar's container before the pod ends."""
        hook = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "rota.sidecar.prestop"),
            env={**os.environ, "ROTA_RUN": str(self.run)},
            stderr=asyncio.subprocess.PIPE,
        )
        _, error = await hook.communicate()
        return hook.returncode or 0, error.decode()

    async def drain_for_good(self, session: ClientSession, uid: str) -> int:
        """Ask for a final drain, and return the status of the answer."""
        return await signed_drain(session, f"http://{self.address}:{CONTROL_PORT}/v1/drain", uid, self._key)

    async def report(self, session: ClientSession) -> WholeReport | None:
        """Return its report, if it answers."""
        try:
            return await whole_report(partial(self._ask_signed, session))
        except ClientError:
            return None

    async def first_deliveries(self, session: ClientSession) -> DeliveriesPage:
        """Return the first page about its deliveries."""
        page = decode_deliveries(await self._ask_signed(session, "/v1/report/deliveries"))
        assert page
        return page

    async def _ask_signed(self, session: ClientSession, path: str) -> str:
        return await signed_report(session, f"http://{self.address}:{CONTROL_PORT}{path}", self.uid, self._key)

    async def heard(self, session: ClientSession) -> WholeReport:
        """Return its report once it answers."""

        async def answered() -> WholeReport | None:
            assert self.sidecar
            assert self.sidecar.poll() is None, self.log.read_text()
            return await self.report(session)

        report = await soon(answered)
        assert report
        return report

    def deliveries(self, group: str, *, orderly: bool) -> list[Delivery]:
        """Return what came to the app; what is tried again, but not in place, lies in the retry topic."""
        if not self._deliveries.exists():
            return []
        begun: dict[str, list[Delivery]] = {}
        for line in whole_lines(self._deliveries):
            told = json.loads(line)
            if "begin" in told:
                begun[told["name"]] = [self._delivery(told, it, group, orderly) for it in told["messages"]]
            elif "end" in told:
                begun[told["name"]] = [
                    it._replace(end=told["end"], status=told["status"]) for it in begun[told["name"]]
                ]
        return [it for delivery in begun.values() for it in delivery]

    def _delivery(self, told: dict[str, Any], message: dict[str, Any], group: str, orderly: bool) -> Delivery:  # noqa: FBT001
        retried = not orderly and message["attempt"] > 1
        topic = RETRY_TOPIC_PREFIX + group if retried else message["topic"]
        return Delivery(
            begin=told["begin"],
            end=None,
            status=None,
            member=self.name,
            queue=Queue(topic, message["broker"], message["queue"]),
            offset=message["offset"],
            number=message["number"],
            attempt=message["attempt"],
            generation=message["generation"],
            together=len(told["messages"]),
            id=message["id"],
        )

    def complaints(self) -> list[str]:
        """Return what the sidecar logged that it never should: errors with a stack."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if '"error"' in line or "Traceback" in line or "never awaited" in line]

    def end(self) -> None:
        """End everything, as at the end of a test."""
        self.kill_sidecar()
        self.kill_app()


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    if process:
        process.kill()
        process.wait()


def now() -> float:
    """Return the time on the clock that apps note."""
    return time.monotonic()
