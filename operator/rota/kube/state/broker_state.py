"""State of a group at its brokers, and the client ids under which brokers list its members."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from rota.kube.state.pod_state import GroupPods, client_id, client_id_suffix
from rota.kube.state.stored_assignment import AssignmentState
from rota.model import Finding, Queue
from rota.planner import QueueView
from rota.spec.consumer_settings import ConsumerSettings
from rota.tls import Validity

KEEP_ENDED_SECONDS = 240.0  # brokers list an ended member for less: they detect its end after 120 s


@dataclass(frozen=True)
class BrokerState:
    """A group as its brokers report it: the queues of its topics (views), unmanaged consumers, and problems."""

    views: Mapping[str, QueueView | None] = field(default_factory=dict)  # by topic; None: no response
    unmanaged_ids: tuple[str, ...] | None = None  # client ids of unmanaged consumers; None: no response
    problems: tuple[Finding, ...] = ()
    # By client id; only of unmanaged consumers that responded.
    unmanaged_settings: Mapping[str, ConsumerSettings] = field(default_factory=dict)
    client_validity: Validity | None = None  # of the client certificate that the operator presents to the brokers


class ClientIds:
    """The client ids of a group's current and recently ended members.

    Brokers know members only by client id: a client whose id is not among these is an unmanaged consumer. In an Orderly
    group, an ended member's id still holds its queues' locks at the brokers.
    """

    def __init__(self, pods: GroupPods, assignment: AssignmentState) -> None:
        self._pods = pods
        self._assignment = assignment
        self._last_seen: dict[str, float] = {}  # by suffix of the client id: when the member existed last
        self._unlocked_uids: set[str] = set()  # uids of ended members whose locks were returned for release

    def suffixes(self, now: float) -> Collection[str]:
        """Return the suffixes `pod#uid` of all client ids; an ended member's is kept while brokers may list it."""
        last_seen = dict(self._last_seen)
        for holder in self._pods.holders | self._assignment.stored.holders:
            last_seen[client_id_suffix(*holder)] = now
        self._last_seen = {suffix: at for suffix, at in last_seen.items() if now - at < KEEP_ENDED_SECONDS}
        return self._last_seen.keys()

    def take_locks_to_release(self) -> list[tuple[str, list[Queue]]]:
        """Return the client ids of ended members and the queues whose locks they hold, each member in one call only."""
        stored = self._assignment.stored
        queues_by_holder = {holder: [*queues] for holder, queues in stored.shares.items()}
        releasing = stored.document.releasing if stored.document else {}
        for queue, release in releasing.items():
            queues_by_holder.setdefault(release.holder, []).append(queue)
        ended_client_ids = dict(self._pods.deleted_client_ids)  # by uid of the pod
        for state in self._pods.values():
            if state.pod.ended:
                ended_client_ids[state.pod.metadata.uid] = client_id(state.pod)
        locks: list[tuple[str, list[Queue]]] = []
        for holder, queues in queues_by_holder.items():
            if queues and holder.uid in ended_client_ids and holder.uid not in self._unlocked_uids:
                locks.append((ended_client_ids[holder.uid], queues))
                self._unlocked_uids.add(holder.uid)
        return locks

    def forget_deleted(self, kept_uids: Collection[str]) -> None:
        """Forget the ended members whose locks were returned for release, except those with these uids."""
        self._unlocked_uids.intersection_update(kept_uids)
