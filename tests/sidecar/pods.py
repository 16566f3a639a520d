"""Pods as processes: the real sidecar and an app on their own address, and configuration mounted as by a kubelet.

Processes that outlive a killed test run carry the instance's tag; the next run kills them.
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
from itertools import chain, count
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

APP = Path(__file__).with_name("app.py")
PORT = 9911  # of the sidecar's status
APP_PORT = 8080
PULL_PORT = 9912
# Runs the sidecar with commits every 0.5 s instead of every 5 s: nearly every test waits for commits.
COMMITTING_OFTEN = """
import sys
from rota.sidecar import agent
from rota.sidecar.__main__ import main
agent.COMMIT_SECONDS /= 10
sys.exit(main())
"""
SIDECAR = ("-c", COMMITTING_OFTEN)

_numbers = count(10)  # of addresses: lower ones belong to servers


class Pod:
    """One pod: two processes, a volume with the configuration, a disk for the sidecar's state."""

    def __init__(self, instance: Instance, name: str, folder: Path, *, is_pull: bool = False) -> None:
        """Create the pod's folders and its key; in Pull mode the app requests messages, in Push mode it gets them."""
        self.is_pull = is_pull
        self.name = name
        self.uid = f"{next(_numbers):08x}-0000-4000-8000-000000000000"
        self.folder = folder
        self.address = instance.address(int(self.uid[:8], 16))
        self.documents = folder / "documents"
        self.state = folder / "state"
        self.log = folder / "sidecar.log"
        self.sidecar: subprocess.Popen[bytes] | None = None
        self.app: subprocess.Popen[bytes] | None = None
        self._instance = instance
        self._deliveries = folder / "app.jsonl"
        self._versions = count(1)
        self.run = folder / "run"
        self._key = os.urandom(KEY_BYTES)
        self._key_folder = folder / "key"
        for created in (self.documents, self.state, self.run, self._key_folder):
            created.mkdir(parents=True)
        (self._key_folder / "current").write_bytes(self._key)

    @property
    def client_id(self) -> str:
        """The client id of the member at the brokers."""
        return f"{self.address}@{self.name}#{self.uid[:8]}"

    # Processes.

    def start_app(self) -> None:
        """Start the app with the current rules."""
        port = PULL_PORT if self.is_pull else APP_PORT
        arguments = (APP, self.address, str(port), self._deliveries, self.folder / "rules.json")
        self.app = self._start("app", *arguments, *(["pull"] if self.is_pull else []))

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

    def _start(self, container: str, *arguments: str | Path, **variables: str) -> subprocess.Popen[bytes]:
        tag = {TAG: f"{self._instance.id}/{self.name}-{container}"}
        with (self.folder / f"{container}.log").open("ab") as output:
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
        """Terminate the sidecar by SIGTERM, and return its exit code."""
        assert self.sidecar
        self.sidecar.terminate()
        return await asyncio.to_thread(self.sidecar.wait, 60)

    def kill_sidecar(self) -> None:
        """Kill the sidecar."""
        _kill(self.sidecar)

    def kill_app(self) -> None:
        """Kill the app."""
        _kill(self.app)

    # Its configuration.

    def mount(self, files: Mapping[str, str | bytes]) -> None:
        """Mount files as a kubelet does: write a new folder, switch the link to it, then delete the previous folder."""
        folder = self.documents / f"..{next(self._versions)}"
        link = self.documents / "..data"
        previous = link.resolve() if link.is_symlink() else None
        folder.mkdir()
        for name, text in files.items():
            folder.joinpath(name).write_bytes(text.encode() if isinstance(text, str) else text)
            if not (self.documents / name).is_symlink():
                (self.documents / name).symlink_to(f"..data/{name}")
        temporary_link = self.documents / "..data_tmp"
        temporary_link.symlink_to(folder.name)
        temporary_link.rename(link)
        if previous:
            shutil.rmtree(previous)

    def rules(self, *rules: Mapping[str, Any]) -> None:
        """Set the app's rules; without rules it accepts every message at once."""
        temporary = self.folder / "rules.json.new"
        temporary.write_text(json.dumps(rules))
        temporary.rename(self.folder / "rules.json")

    # Its responses and logs.

    async def get(self, session: ClientSession, path: str) -> str:
        """Return the body of the sidecar's response."""
        async with session.get(f"http://{self.address}:{PORT}{path}", timeout=ClientTimeout(90)) as response:
            return await response.text()

    async def run_prestop_hook(self) -> tuple[int, str]:
        """Run the preStop hook of the sidecar's container, as the kubelet does; return its exit code and errors."""
        hook = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "rota.sidecar.prestop"),
            env={**os.environ, "ROTA_RUN": str(self.run)},
            stderr=asyncio.subprocess.PIPE,
        )
        _, error = await hook.communicate()
        return hook.returncode or 0, error.decode()

    async def drain_for_good(self, session: ClientSession, uid: str) -> int:
        """Request a final drain, and return the status of the response."""
        return await signed_drain(session, f"http://{self.address}:{CONTROL_PORT}/v1/drain", uid, self._key)

    async def report(self, session: ClientSession) -> WholeReport | None:
        """Return the report, or None if the sidecar does not respond."""
        try:
            return await whole_report(partial(self._get_signed, session))
        except ClientError:
            return None

    async def first_deliveries(self, session: ClientSession) -> DeliveriesPage:
        """Return the first page of the delivery counts."""
        page = decode_deliveries(await self._get_signed(session, "/v1/report/deliveries"))
        assert page
        return page

    async def _get_signed(self, session: ClientSession, path: str) -> str:
        return await signed_report(session, f"http://{self.address}:{CONTROL_PORT}{path}", self.uid, self._key)

    async def wait_for_report(self, session: ClientSession) -> WholeReport:
        """Return the report once the sidecar responds."""

        async def read_report() -> WholeReport | None:
            assert self.sidecar
            assert self.sidecar.poll() is None, self.log.read_text()
            return await self.report(session)

        report = await soon(read_report)
        assert report
        return report

    def deliveries(self, group: str, *, orderly: bool) -> list[Delivery]:
        """Return the deliveries from the app's log; unless it is Orderly, a group retries from its retry topic."""
        if not self._deliveries.exists():
            return []
        requests: dict[str, list[Delivery]] = {}
        for line in whole_lines(self._deliveries):
            entry = json.loads(line)
            if "begin" in entry:
                requests[entry["name"]] = [
                    self._delivery(entry, message, group, orderly=orderly) for message in entry["messages"]
                ]
            elif "end" in entry:
                requests[entry["name"]] = [
                    delivery._replace(end=entry["end"], status=entry["status"]) for delivery in requests[entry["name"]]
                ]
        return [*chain.from_iterable(requests.values())]

    def _delivery(self, entry: dict[str, Any], message: dict[str, Any], group: str, *, orderly: bool) -> Delivery:
        retried = not orderly and message["attempt"] > 1
        topic = RETRY_TOPIC_PREFIX + group if retried else message["topic"]
        return Delivery(
            begin=entry["begin"],
            end=None,
            status=None,
            member=self.name,
            queue=Queue(topic, message["broker"], message["queue"]),
            offset=message["offset"],
            number=message["number"],
            attempt=message["attempt"],
            generation=message["generation"],
            batch_size=len(entry["messages"]),
            id=message["id"],
        )

    def complaints(self) -> list[str]:
        """Return logged errors of which a sidecar should log none."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if '"error"' in line or "Traceback" in line or "never awaited" in line]

    def end(self) -> None:
        """Kill both processes."""
        self.kill_sidecar()
        self.kill_app()


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    if process:
        process.kill()
        process.wait()


def now() -> float:
    """Return the time of the monotonic clock, which apps log, too."""
    return time.monotonic()
