"""A group's assignment as it stands in the ConfigMap `<group>-rota`, and what is wrong with it."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import itemgetter

from rota.documents import PACKED, PLAIN, SCHEMA, Assignment, TooNew, read_assignment
from rota.kube.client.objects import GROUP_LABEL, SETTINGS, ConfigMap
from rota.kube.state.queue_quota import MAX_QUEUES, QueueQuota
from rota.kube.state.retention_budget import RetentionBudget
from rota.model import Holder, Queue, Reason, Verdict

MAX_EARLY_BYTES = 32 * 2**20  # of assignments whose groups are not seen yet: at the start these come first
MAX_SETTINGS_BYTES = 64 * 1024  # longer ones were not written by an operator, and are replaced


@dataclass(frozen=True)
class Record:
    """The ConfigMap, read once for each version of it."""

    version: str = ""
    number: int = 0
    document: Assignment | None = None
    damage: str = ""
    settings: str = ""
    problems: tuple[Verdict, ...] = ()
    ours: bool = True

    @cached_property
    def brokers(self) -> dict[str, set[str]]:
        """On which brokers it has queues of each topic; what is on its way out is not counted."""
        found: dict[str, set[str]] = {}
        if self.document:
            shares = [share.queues for share in self.document.members.values()]
            moving = [queue for queue, release in self.document.releasing.items() if release.to]
            for queue in chain(*shares, moving, self.document.everyone or ()):
                found.setdefault(queue.topic, set()).add(queue.broker)
        return found

    @property
    def shares(self) -> dict[Holder, tuple[Queue, ...]]:
        """The queues of each member."""
        members = self.document.members if self.document else {}
        return {Holder(name, share.uid): share.queues for name, share in members.items()}

    @property
    def owners(self) -> dict[Queue, str]:
        """The name of each queue's owner."""
        return {queue: holder.name for holder, queues in self.shares.items() for queue in queues}

    @property
    def broadcasting(self) -> bool:
        """Whether every member consumes every queue."""
        return self.document is not None and self.document.everyone is not None

    @property
    def holders(self) -> set[Holder]:
        """Every pod that it names: members, and those that still hold a queue that moves to another member."""
        releasing = self.document.releasing.values() if self.document else ()
        return {*self.shares, *(release.holder for release in releasing)}

    @cached_property
    def uids(self) -> frozenset[str]:
        """The uids of the pods that it names."""
        if self.document is None:
            return frozenset()
        members = (share.uid for share in self.document.members.values())
        return frozenset(chain(members, (release.holder.uid for release in self.document.releasing.values())))

    @property
    def queue_counts(self) -> list[dict[str, int]]:
        """How many queues it names, by broker, for each topic."""
        if self.document is None:
            return []
        shares = [share.queues for share in self.document.members.values()]
        queues = chain(*shares, self.document.releasing, self.document.everyone or ())
        counts: dict[str, dict[str, int]] = {}
        for (topic, broker), count in Counter(map(itemgetter(0, 1), queues)).items():
            counts.setdefault(topic, {})[broker] = count
        return [*counts.values()]


class RecordLimits:
    """Limits of assignments: who may edit a ConfigMap can write one that names 131,072 queues."""

    def __init__(self, max_queues: int = MAX_QUEUES, max_schema: int = SCHEMA) -> None:
        """`max_queues`: that the assignments of all groups may name together; `max_schema`: that is written."""
        self.max_schema = max_schema
        self._quota = QueueQuota(total=max_queues, what="The assignment names")
        self._early = RetentionBudget(MAX_EARLY_BYTES)

    def may_keep(self, found: ConfigMap) -> bool:
        """Whether there is room for an assignment whose group is not seen yet."""
        return self._early.admit(found.metadata.namespace, found, found.bytes_kept)

    def read(self, found: ConfigMap, group: str, uid: str) -> Record:
        """Read the assignment of the group with that name and uid, unless it names too many queues."""
        record, key = read_record(found, group, uid), (found.metadata.namespace, group)
        self._quota.claim(key, record.queue_counts)
        rejection = self._quota.rejection(key)
        return Record(ours=False, problems=(rejection,)) if rejection else record

    def forget(self, key: tuple[str, str]) -> None:
        """Know that a group has no assignment any more."""
        self._quota.release(key)


def read_record(found: ConfigMap, group: str, uid: str) -> Record:
    """Read the record of the group with that name and uid."""
    version, number = found.metadata.resource_version, found.metadata.version
    if not _belongs_to(found, group, uid):
        told = f"The ConfigMap {found.metadata.name} is somebody else's; delete it or rename the group"
        return Record(version, number, ours=False, problems=(Verdict(Reason.NAME_TAKEN, told),))
    text: str | bytes = found.data.get(PLAIN) or found.binary_data.get(PACKED) or ""
    settings = found.data.get(SETTINGS, "")
    beside = settings if len(settings) <= MAX_SETTINGS_BYTES else ""
    if found.metadata.labels.get(GROUP_LABEL) != group:  # so it is not watched
        return Record(version, number, damage=f"The label {GROUP_LABEL} of the assignment is gone", settings=beside)
    try:
        return Record(version, number, read_assignment(text), settings=beside)
    except TooNew as error:
        return Record(version, number, settings=beside, problems=(Verdict(Reason.RECORD_TOO_NEW, str(error)),))
    except ValueError as error:
        return Record(version, number, damage=str(error), settings=beside)


def _belongs_to(found: ConfigMap, group: str, uid: str) -> bool:
    """Whether it is the group's; one with its label and without an owner was put there by hand, in place of it."""
    labelled = found.metadata.labels.get(GROUP_LABEL) == group
    return found.metadata.owned_by(uid) or (labelled and not found.metadata.owner_references)
