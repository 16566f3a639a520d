"""Stored assignment of a group: the ConfigMap `<group>-rota`, parsed, and its problems.

`StoredAssignment` is one version of the ConfigMap. `AssignmentState` holds the newest known version of a group.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import itemgetter

from rota.documents import ASSIGNMENT_SCHEMA, GZIP_KEY, PLAIN_KEY, Assignment, UnsupportedSchemaError, decode_assignment
from rota.kube.client.objects import GROUP_LABEL, SETTINGS_KEY, ConfigMap, Metadata, assignment_name
from rota.kube.state.pod_state import GroupPods
from rota.kube.state.queue_quota import MAX_QUEUES, QueueQuota
from rota.kube.state.retention_budget import RetentionBudget
from rota.model import Finding, Holder, Queue, Reason

MAX_UNCLAIMED_BYTES = 32 * 2**20  # of ConfigMaps that are seen before their ConsumerGroups, as at startup
MAX_SETTINGS_BYTES = 64 * 1024  # longer settings were not written by an operator: they are ignored and replaced


@dataclass(frozen=True)
class StoredAssignment:
    """The ConfigMap, parsed once for each version of it."""

    resource_version: str = ""
    version_number: int = 0
    document: Assignment | None = None
    damage: str = ""  # why the document cannot be decoded; the planner then rebuilds it
    settings: str = ""  # for the sidecars, next to the document
    problems: tuple[Finding, ...] = ()
    is_writable: bool = True  # False: the ConfigMap belongs to another object, or names too many queues

    @cached_property
    def brokers_by_topic(self) -> dict[str, set[str]]:
        """The brokers of each topic's queues, without queues that are being released and have no next owner."""
        brokers: dict[str, set[str]] = {}
        if self.document:
            moving = [queue for queue, release in self.document.releasing.items() if release.to]
            for queue in chain(*self.shares.values(), moving, self.document.everyone or ()):
                brokers.setdefault(queue.topic, set()).add(queue.broker)
        return brokers

    @property
    def shares(self) -> dict[Holder, tuple[Queue, ...]]:
        """The queues of each member."""
        members = self.document.members if self.document else {}
        return {Holder(name, share.uid): share.queues for name, share in members.items()}

    @property
    def owners(self) -> dict[Queue, str]:
        """The name of each queue's owner."""
        owners: dict[Queue, str] = {}
        for holder, queues in self.shares.items():
            owners |= dict.fromkeys(queues, holder.name)
        return owners

    @property
    def is_broadcasting(self) -> bool:
        """Whether every member consumes every queue."""
        return self.document is not None and self.document.is_broadcasting

    @property
    def holders(self) -> set[Holder]:
        """All pods that the document names: members, and pods that still hold a queue to be released."""
        releasing = self.document.releasing.values() if self.document else ()
        return {*self.shares, *(release.holder for release in releasing)}

    @cached_property
    def uids(self) -> frozenset[str]:
        """The uids of the pods that the document names."""
        return frozenset(holder.uid for holder in self.holders)

    @property
    def queue_counts(self) -> list[dict[str, int]]:
        """For each topic that the document names: the number of its queues by broker."""
        if self.document is None:
            return []
        queues = chain(*self.shares.values(), self.document.releasing, self.document.everyone or ())
        counts: dict[str, dict[str, int]] = {}
        topic_and_broker = itemgetter(0, 1)  # of a Queue: (queue.topic, queue.broker)
        for (topic, broker), count in Counter(map(topic_and_broker, queues)).items():
            counts.setdefault(topic, {})[broker] = count
        return [*counts.values()]


class AssignmentLimits:
    """Limits that protect the operator's memory: a user with access to ConfigMaps can name 131,072 queues in one."""

    def __init__(self, max_queues: int = MAX_QUEUES, max_schema: int = ASSIGNMENT_SCHEMA) -> None:
        """`max_queues`: limit for the assignments of all groups together; `max_schema`: newest schema to write."""
        self.max_schema = max_schema
        self._quota = QueueQuota(max_total=max_queues, subject="The assignment names")
        self._unclaimed_budget = RetentionBudget(MAX_UNCLAIMED_BYTES)

    def may_keep(self, config_map: ConfigMap) -> bool:
        """Whether a ConfigMap that is seen before its ConsumerGroup fits into the memory budget; if so, count it."""
        return self._unclaimed_budget.admit(config_map.metadata.namespace, config_map, config_map.size_bytes)

    def parse(self, config_map: ConfigMap, group: str, uid: str) -> StoredAssignment:
        """Parse the assignment of the group with that name and uid; reject it if it names too many queues."""
        stored = parse_stored_assignment(config_map, group, uid)
        key = (config_map.metadata.namespace, group)
        self._quota.claim(key, stored.queue_counts)
        rejection = self._quota.rejection(key)
        # Without a version, even an unchanged ConfigMap is parsed again: it may fit into the quota later.
        return StoredAssignment(is_writable=False, problems=(rejection,)) if rejection else stored

    def forget(self, key: tuple[str, str]) -> None:
        """Release the quota of a group that has no assignment any more."""
        self._quota.release(key)


def parse_stored_assignment(config_map: ConfigMap, group: str, uid: str) -> StoredAssignment:
    """Parse the assignment of the group with that name and uid."""
    metadata = config_map.metadata
    parsed = StoredAssignment(metadata.resource_version, metadata.version_number)  # the following checks add to it
    if not _belongs_to(config_map, group, uid):
        message = f"The ConfigMap {metadata.name} is not owned by this group; delete it or rename the group"
        return replace(parsed, is_writable=False, problems=(Finding(Reason.RESOURCE_CONFLICT, message),))
    settings = config_map.data.get(SETTINGS_KEY, "")
    if len(settings) <= MAX_SETTINGS_BYTES:
        parsed = replace(parsed, settings=settings)
    if metadata.labels.get(GROUP_LABEL) != group:  # the watch selects by this label, so it does not report changes
        return replace(parsed, damage=f"The assignment's ConfigMap has lost its label {GROUP_LABEL}")
    text: str | bytes = config_map.data.get(PLAIN_KEY) or config_map.binary_data.get(GZIP_KEY) or ""
    try:
        return replace(parsed, document=decode_assignment(text))
    except UnsupportedSchemaError as error:
        return replace(parsed, problems=(Finding(Reason.UNSUPPORTED_ASSIGNMENT, str(error)),))
    except ValueError as error:
        return replace(parsed, damage=str(error))


def _belongs_to(config_map: ConfigMap, group: str, uid: str) -> bool:
    """Whether the group owns a ConfigMap, or its label is on one without owner, as after a manual restore."""
    is_labelled = config_map.metadata.labels.get(GROUP_LABEL) == group
    return config_map.metadata.is_owned_by(uid) or (is_labelled and not config_map.metadata.owner_references)


class AssignmentState:
    """State of one group's ConfigMap: the newest known version of the stored assignment, and whether it is current."""

    def __init__(self, namespace: str, group: str, limits: AssignmentLimits, pods: GroupPods) -> None:
        self._key = (namespace, group)
        self._pods = pods
        self.limits = limits
        self.stored = StoredAssignment()
        self.unclaimed_config_map: ConfigMap | None = None  # seen before its ConsumerGroup
        self.deleted_version = 0  # version at which the ConfigMap was last seen deleted, or without its label; 0: never
        self.is_outdated = False  # whether this ConfigMap must be read, as it may differ from `stored`
        # Whether assignment, pods, routes and reports were read again after `stored` was found missing or damaged.
        self.was_everything_refetched = False
        self.highest_generation = 0  # of the group's assignments that were seen: a restored old copy has a lower one
        self.requested: Assignment | None = None  # the document of this operator's last write, stored or not
        self._seen_settings = ""  # the stored settings at the last call of `observe_settings_age`
        self._settings_seen_at = 0.0  # when a call saw these settings first

    @property
    def stored(self) -> StoredAssignment:
        """The stored assignment as last seen. Setting it also gives the pods its document."""
        return self._stored

    @stored.setter
    def stored(self, stored: StoredAssignment) -> None:
        self._stored = stored
        self._pods.assignment = stored.document

    def set(self, config_map: ConfigMap | None, group_uid: str | None) -> None:
        """Set the ConfigMap (None: it does not exist); a version that is not newer than the known one is ignored.

        If `group_uid` is None, the ConsumerGroup was not seen yet: the ConfigMap is kept until the group is seen.
        """
        self.is_outdated = False
        _, group = self._key
        if group_uid is None:
            is_kept = config_map is not None and self.limits.may_keep(config_map)
            self.unclaimed_config_map = config_map if is_kept else None  # if not kept, the first reconcile reads it
        elif config_map is None:
            self.clear()
            self.was_everything_refetched = False
        elif config_map.metadata.version_number > self.stored.version_number:
            self.stored = self.limits.parse(config_map, group, group_uid)
            self.was_everything_refetched = False
            if document := self.stored.document:
                self.highest_generation = max(self.highest_generation, document.generation)

    @property
    def is_own(self) -> bool:
        """Whether the stored document equals the one that this operator wrote last."""
        return self.stored.document is not None and self.stored.document == self.requested

    def clear(self) -> None:
        """Forget the stored assignment: it does not exist, or it is another ConsumerGroup's."""
        self.stored = StoredAssignment()
        self.limits.forget(self._key)

    @property
    def metadata(self) -> Metadata | None:
        """Name and version of the ConfigMap, which the informer expects in its next list: if absent, it was deleted.

        None without a ConfigMap, and for one that is damaged or another's: it may lack the label that lists select.
        """
        stored = self.stored
        if not stored.resource_version or stored.damage or not stored.is_writable:
            return None
        namespace, group = self._key
        version = stored.resource_version
        labels = {GROUP_LABEL: group}
        return Metadata(assignment_name(group), namespace=namespace, resource_version=version, labels=labels)

    def observe_settings_age(self, now: float) -> float:
        """Return the seconds since a call of this method first saw the stored settings; 0 if this call did."""
        if self.stored.settings != self._seen_settings:
            self._seen_settings = self.stored.settings
            self._settings_seen_at = now
        return now - self._settings_seen_at
