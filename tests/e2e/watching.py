"""What is seen of a cluster while things happen: each version of an object, and what a group's record says."""

import json
import os
import subprocess
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from threading import Lock, Thread
from typing import Any, NamedTuple

from ground.cluster import NodeCluster
from ground.instance import TAG
from ground.programs import program
from rota.documents import Assignment, decode_assignment
from rota.model import Queue
from sidecar.checker import Fact

RESTART_SECONDS = 0.1  # before another kubectl watches
MILLISECOND = 0.001  # how exactly a record tells its time


class Seen(NamedTuple):
    """One version of an object."""

    at: float  # on the clock that apps note
    event: str
    body: dict[str, Any]

    @property
    def name(self) -> str:
        """The object's."""
        return str(self.body["metadata"]["name"])


class Watch:
    """A `kubectl get --watch` of some objects, for as long as it is not ended."""

    def __init__(self, node: NodeCluster, *what: str) -> None:
        kubectl = [str(program("kubectl")), "--kubeconfig", str(node.kubeconfig)]
        self._what = " ".join(what)
        self._argv = [*kubectl, "get", *what, "--watch", "--output-watch-events", "-o", "json"]
        self._env = {**os.environ, TAG: f"{node.instance.id}/watch"}
        self._seen: list[Seen] = []
        self._lock = Lock()
        self._begin()

    def _begin(self) -> None:
        self._ending = False
        self._start()
        self._reader = Thread(target=self._read, name=f"watch {self._what}", daemon=True)
        self._reader.start()

    def _start(self) -> None:
        self._first = len(self._seen)  # of those that this kubectl tells
        self._kubectl = subprocess.Popen(self._argv, env=self._env, stdout=subprocess.PIPE, text=True)

    def seen(self) -> list[Seen]:
        """Return all that was seen so far."""
        assert self._reader.is_alive(), "kubectl does not watch any more"
        return self._seen.copy()

    def now(self) -> dict[str, dict[str, Any]]:
        """Return all that is there, by name."""
        latest = {it.name: it for it in self.seen()[self._first :]}
        return {name: it.body for name, it in latest.items() if it.event != "DELETED"}

    def renew(self) -> None:
        """Go on by another kubectl, which tells anew what there is; what goes at this moment is not seen to go."""
        self.end()
        self._begin()

    def end(self) -> None:
        """End it."""
        with self._lock:
            self._ending = True
            self._kubectl.terminate()
        self._reader.join()

    def _read(self) -> None:
        """Read until the watch is ended; the API server ends kubectl's after half an hour, or when a CRD changes."""
        while True:
            with self._kubectl as kubectl:  # which closes what it read from, and waits
                for line in kubectl.stdout or ():
                    told = json.loads(line)
                    self._seen.append(Seen(time.monotonic(), told["type"], told["object"]))
            time.sleep(RESTART_SECONDS)
            with self._lock:
                if self._ending:
                    return
                self._start()


def documents(records: Iterable[Seen]) -> Iterator[Assignment]:
    """Yield the documents that members may obey: those that are whole, and newer than all before of the same group."""
    latest: dict[str, int] = {}
    for record in records:
        owner = record.body["metadata"].get("ownerReferences", [{}])[0].get("uid", "")
        try:
            it = decode_assignment(record.body.get("data", {}).get("assignment.json", ""))
        except ValueError:  # somebody edited it
            continue
        if it.generation > latest.get(owner, 0) and record.event != "DELETED":
            latest[owner] = it.generation
            yield it


def decided(found: Iterable[Assignment]) -> Iterator[Fact]:
    """Yield what a group's documents say of who may work what, for the checker.

    A document gives what it names from when it was made. Who had a queue before gave it up before the document was made
    that does not name them with it any more.
    """
    ahead = time.monotonic() - time.time()
    before: dict[Queue, str] = {}
    for it in found:
        at = datetime.fromisoformat(it.issued_at).timestamp() + ahead
        owners = {queue: name for name, share in it.members.items() for queue in share.queues}
        leaving = {queue: release.holder.name for queue, release in it.releasing.items()}
        for name, share in it.members.items():
            yield Fact(at, "given", name, frozenset(share.queues), it.generation)
        for queue, name in before.items():
            if name not in {owners.get(queue), leaving.get(queue)}:
                kind = "forced" if it.forced.get(queue) == it.generation else "released"
                yield Fact(at + MILLISECOND, kind, name, frozenset({queue}), it.generation)
        before = leaving | owners


def ended(pods: Iterable[Seen]) -> Iterator[Fact]:
    """Yield which pods were gone since when."""
    return (Fact(pod.at, "ended", pod.name) for pod in pods if pod.event == "DELETED")
