"""What a group's brokers last reported of it, and by which ids they know its members."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from rota.kube.state.pod_state import GroupPods, client_id, name_of
from rota.kube.state.stored_assignment import Record
from rota.model import Queue, Verdict
from rota.planner import View
from rota.spec.consumer_settings import ConsumerSettings

FORGOTTEN_SECONDS = 240.0  # after which no broker lists an ended member; it notices after 120


@dataclass(frozen=True)
class AtBroker:
    """What a broker tells of a group: views of its topics, who else is there, what is wrong."""

    views: Mapping[str, View | None] = field(default_factory=dict)
    foreigners: tuple[str, ...] | None = None
    problems: tuple[Verdict, ...] = ()
    unmanaged: Mapping[str, ConsumerSettings] = field(default_factory=dict)  # by client id; of those that answered


class ClientIds:
    """The client ids of a group's current and recently ended members."""

    def __init__(self, pods: GroupPods) -> None:
        """Start with no ended members."""
        self._pods = pods
        self._last_seen: dict[str, float] = {}  # by the end of an id
        self._unlocked: set[str] = set()  # uids of pods whose locks were released

    def suffixes(self, record: Record, now: float) -> Collection[str]:
        """Return the suffixes `pod#uid` of the ids; an ended member's is kept as long as a broker may list it."""
        names = {name_of(name, known.pod.metadata.uid) for name, known in self._pods.items()}
        names |= {name_of(*holder) for holder in record.holders}
        seen = self._last_seen | dict.fromkeys(names, now)
        self._last_seen = {name: at for name, at in seen.items() if now - at < FORGOTTEN_SECONDS}
        return self._last_seen.keys()

    def locks_left(self, record: Record) -> list[tuple[str, list[Queue]]]:
        """Return the client ids of ended members whose locks must be released, and their queues; once each."""
        held = {holder: [*queues] for holder, queues in record.shares.items()}
        for queue, release in record.document.releasing.items() if record.document else ():
            held.setdefault(release.holder, []).append(queue)
        ended = {known.pod.metadata.uid: client_id(known.pod) for known in self._pods.values() if known.pod.ended}
        clients = self._pods.client_ids | ended
        left = {holder: queues for holder, queues in held.items() if queues and holder.uid in clients}
        found = [(clients[holder.uid], queues) for holder, queues in left.items() if holder.uid not in self._unlocked]
        self._unlocked |= {holder.uid for holder in left}
        return found

    def forget_gone(self, uids: Collection[str]) -> None:
        """Forget whose locks were released, except of pods with these uids."""
        self._unlocked.intersection_update(uids)
