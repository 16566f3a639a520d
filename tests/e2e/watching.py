"""Watches of a cluster: each version of its objects, and the facts in a group's assignments."""

import json
import os
import subprocess
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from threading import Lock, Thread
from typing import Any, NamedTuple

from builders import owners_of
from ground.cluster import NodeCluster
from ground.instance import TAG
from ground.programs import program
from rota.documents import Assignment, decode_assignment
from rota.model import Queue
from sidecar.checker import Fact

RESTART_SECONDS = 0.1  # before kubectl is started again
MILLISECOND = 0.001  # the resolution of an assignment's time


class ObjectVersion(NamedTuple):
    """One version of an object."""

    at: float  # on the clock of the apps' logs
    event: str
    body: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the object."""
        return str(self.body["metadata"]["name"])


class Watch:
    """A `kubectl get --watch` of some objects, until it is stopped."""

    def __init__(self, node: NodeCluster, *arguments: str) -> None:
        kubectl = [str(program("kubectl")), "--kubeconfig", str(node.kubeconfig)]
        self._arguments = " ".join(arguments)
        self._argv = [*kubectl, "get", *arguments, "--watch", "--output-watch-events", "-o", "json"]
        self._env = {**os.environ, TAG: f"{node.instance.id}/watch"}
        self._versions: list[ObjectVersion] = []
        self._lock = Lock()
        self._start_reader()

    def _start_reader(self) -> None:
        self._is_stopping = False
        self._start_kubectl()
        self._reader = Thread(target=self._read, name=f"watch {self._arguments}", daemon=True)
        self._reader.start()

    def _start_kubectl(self) -> None:
        self._first = len(self._versions)  # index of the first version from this kubectl
        self._kubectl = subprocess.Popen(self._argv, env=self._env, stdout=subprocess.PIPE, text=True)

    def versions(self) -> list[ObjectVersion]:
        """Return all versions so far."""
        assert self._reader.is_alive(), "kubectl does not watch any more"
        return self._versions.copy()

    def current(self) -> dict[str, dict[str, Any]]:
        """Return the present objects by name."""
        latest = {version.name: version for version in self.versions()[self._first :]}
        return {name: version.body for name, version in latest.items() if version.event != "DELETED"}

    def restart(self) -> None:
        """Restart kubectl, which lists all objects again; deletions in between are missed."""
        self.stop()
        self._start_reader()

    def stop(self) -> None:
        """Stop kubectl and the reader."""
        with self._lock:
            self._is_stopping = True
            self._kubectl.terminate()
        self._reader.join()

    def _read(self) -> None:
        """Read until the watch is stopped; the API server ends a watch after half an hour, or when a CRD changes."""
        while True:
            with self._kubectl as kubectl:  # closes its pipe, and waits for its end
                for line in kubectl.stdout or ():
                    event = json.loads(line)
                    self._versions.append(ObjectVersion(time.monotonic(), event["type"], event["object"]))
            time.sleep(RESTART_SECONDS)
            with self._lock:
                if self._is_stopping:
                    return
                self._start_kubectl()


def documents(versions: Iterable[ObjectVersion]) -> Iterator[Assignment]:
    """Yield the documents that members may obey: valid, and newer than all earlier ones of the same group."""
    latest: dict[str, int] = {}
    for version in versions:
        owner = version.body["metadata"].get("ownerReferences", [{}])[0].get("uid", "")
        try:
            document = decode_assignment(version.body.get("data", {}).get("assignment.json", ""))
        except ValueError:  # edited by a user
            continue
        if document.generation > latest.get(owner, 0) and version.event != "DELETED":
            latest[owner] = document.generation
            yield document


def ownership_facts(documents: Iterable[Assignment]) -> Iterator[Fact]:
    """Yield the owners of queues by a group's documents, for the checker.

    A document assigns its queues from the time at which it was issued. A previous owner has released a queue before
    the first document that lists it neither as owner nor as releasing.
    """
    clock_difference = time.monotonic() - time.time()
    previous_owners: dict[Queue, str] = {}
    for document in documents:
        at = datetime.fromisoformat(document.issued_at).timestamp() + clock_difference
        owners = {queue: holder.name for queue, holder in owners_of(document).items()}
        releasing = {queue: release.holder.name for queue, release in document.releasing.items()}
        for name, share in document.members.items():
            yield Fact(at, "granted", name, frozenset(share.queues), document.generation)
        for queue, name in previous_owners.items():
            if name not in {owners.get(queue), releasing.get(queue)}:
                kind = "forced" if document.forced.get(queue) == document.generation else "released"
                yield Fact(at + MILLISECOND, kind, name, frozenset({queue}), document.generation)
        previous_owners = releasing | owners


def pod_ends(pods: Iterable[ObjectVersion]) -> Iterator[Fact]:
    """Yield the times at which pods were deleted."""
    return (Fact(pod.at, "ended", pod.name) for pod in pods if pod.event == "DELETED")
