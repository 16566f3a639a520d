"""One pod as it is known: its state, since when that is so, and what its sidecar last said."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rota.documents import Report
from rota.kube.client.objects import Pod
from rota.model import Queue, Reason
from rota.planner import Heard
from rota.planner import Pod as Seen


@dataclass(slots=True)
class Known:
    """A pod, and since when what is known of it is so."""

    pod: Pod
    first_seen: float
    ready_changed: float
    poke_changed: float
    leaving_since: float | None = None
    heard: Heard | None = None
    offsets: Mapping[Queue, int | None] | None = None  # of a Broadcasting group's member; None: it was not heard
    unheard_since: float | None = None
    doubt: Reason | None = None  # why its last response was ignored; the report before it is kept
    unproved_since: float | None = None  # of a pod deleted by force: since when no authenticated response came
    cut_off_since: dict[str, float] = field(default_factory=dict)
    strayed: bool = False  # it has lost our label: it works on until it is told otherwise, but it counts no more
    lingers: bool = False  # the API server knows it no more, for it was deleted by force, and its sidecar answers
    has_key: bool = field(init=False)  # whether its sidecar mounts the group's key; a pod's mounts never change

    def __post_init__(self) -> None:
        """Look at the mounts once: each plan asks for the result, of every pod."""
        self.has_key = self.pod.has_key

    def see(self, pod: Pod, now: float) -> None:
        """Take a newer state of the same pod."""
        if pod.ready != self.pod.ready:
            self.ready_changed = now
        if pod.poke != self.pod.poke:
            self.poke_changed = now
        if pod.terminating and self.leaving_since is None:
            self.leaving_since = now
        self.pod, self.strayed = pod, pod.labelled != pod.works_for

    def hear(self, report: Report | None, now: float, asked: float, doubt: Reason | None = None) -> bool:
        """Take what it said, or that it said nothing since it was asked; return whether that is news.

        A response that is ignored, because of `doubt`, releases no queues, and it is not silence either.
        """
        was_doubted, self.doubt = self.doubt, doubt
        if doubt:
            news, self.unheard_since = doubt is not was_doubted or self.unheard_since is not None, None
            return news
        if report is None:
            news, self.unheard_since = self.unheard_since is None, self.unheard_since or asked
            return news
        news = self.heard is None or self.heard.report != report or self.unheard_since is not None
        news = news or was_doubted is not None
        self.unheard_since = None
        if news:
            self.heard = Heard(report)
            cut_off = [broker for broker, reachable in report.brokers.items() if not reachable]
            self.cut_off_since = {broker: self.cut_off_since.get(broker, now) for broker in cut_off}
        return news

    def linger(self, report: Report | None, now: float, asked: float, doubt: Reason | None = None) -> None:
        """Take what it said though there is no such pod any more: it goes, as one does that is told to."""
        self.lingers, self.leaving_since = True, self.leaving_since or now
        self.hear(report, now, asked, doubt)

    @property
    def counts(self) -> bool:
        """Whether it is one of those of whom some may be ended when the fleet shrinks."""
        return not (self.strayed or self.lingers or self.pod.terminating or self.pod.ended)

    @property
    def reaches(self) -> frozenset[str]:
        """The brokers that it says it can reach; nothing is known of who is not ready, or not heard."""
        sure = self.counts and self.pod.ready and self.heard and self.unheard_since is None
        brokers = self.heard.report.brokers if sure and self.heard else {}
        return frozenset(broker for broker, reachable in brokers.items() if reachable)

    def shown(self, now: float, room: str | None, reached: Mapping[str, float]) -> Seen:
        """Return it as the planner sees it; `reached`: since when others reach which brokers."""
        pod = self.pod
        return Seen(
            name=pod.metadata.name,
            uid=pod.metadata.uid,
            started=pod.started,
            ready=pod.ready and not self.strayed,
            steady=math.inf if self.strayed else now - self.ready_changed,
            age=now - self.first_seen,
            terminating=pod.terminating or self.lingers,
            leaving=0.0 if self.leaving_since is None else now - self.leaving_since,
            ended=pod.ended,
            room=room,
            client_id=client_id(pod),
            heard=self.heard,
            unheard=0.0 if self.unheard_since is None else now - self.unheard_since,
            cut_off={it: now - max(since, reached.get(it, now)) for it, since in self.cut_off_since.items()},
            poke=pod.poke,
            poked=now - self.poke_changed,
        )


def client_id(pod: Pod) -> str:
    """Return the id by which a pod's sidecar is known at the broker."""
    return f"{pod.status.pod_ip}@{name_of(pod.metadata.name, pod.metadata.uid)}"


def name_of(pod: str, uid: str) -> str:
    """Return how that id ends, whatever address the pod has."""
    return f"{pod}#{uid[:8]}"
