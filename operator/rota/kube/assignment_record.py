"""A group's assignment as it stands in the ConfigMap `<group>-rota`, and what is wrong with it."""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from rota.documents import PACKED, PLAIN, Assignment, TooNew, read_assignment
from rota.kube.objects import GROUP_LABEL, ConfigMap
from rota.model import Reason, Verdict

SETTINGS = "group.json"


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


def read_record(found: ConfigMap, group: str, uid: str) -> Record:
    """Read the record of the group with that name and uid."""
    version, number = found.metadata.resource_version, found.metadata.version
    if not _belongs_to(found, group, uid):
        told = f"The ConfigMap {found.metadata.name} is somebody else's; delete it or rename the group"
        return Record(version, number, ours=False, problems=(Verdict(Reason.NAME_TAKEN, told),))
    text: str | bytes = found.data.get(PLAIN) or found.binary_data.get(PACKED) or ""
    beside = found.data.get(SETTINGS, "")
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
