"""Documents as shared values: equal documents are the same object."""

from datetime import datetime
from typing import Any

from builders import NOW, owners_of
from rota.documents import Assignment, Share, decode_assignment
from simulation.judge import InvariantError


class Numbering(dict[Any, int]):
    """Numbers values: equal values have equal numbers, which are quick to compare."""

    def __missing__(self, value: Any) -> int:
        self[value] = number = len(self)
        return number


class Document:
    """A planned document; `body` identifies its content without generations and times."""

    def __init__(self, assignment: Assignment, text: str, bodies: Numbering) -> None:
        self.assignment = assignment
        self.text = text
        self.number = assignment.generation
        members = sorted(assignment.members.items())
        self.owners = owners_of(assignment)
        releasing = sorted(assignment.releasing.items())
        forced = sorted(assignment.forced.items())
        self.holding = {(queue, holder.uid) for queue, holder in self.owners.items()}
        self.holding |= {(queue, release.holder.uid) for queue, release in releasing}
        self.uids = {share.uid for _, share in members} | {release.holder.uid for _, release in releasing}
        self.body = bodies[
            tuple((name, share.uid, share.queues, share.incarnation) for name, share in members),
            tuple((queue, release.holder, release.to, release.incarnation) for queue, release in releasing),
            tuple(queue for queue, _ in forced),
            bool(assignment.barrier),
        ]
        since = [release.since for _, release in releasing]
        self.numbers = (*since, *(at for _, at in forced), assignment.barrier, assignment.incarnations_since)
        issued = [assignment.issued_at] if assignment.barrier else []  # its age matters only with a barrier
        self.times = tuple(map(_seconds, [*issued, *(release.at for _, release in releasing)]))
        self._parts = {name: self._part(share, bodies) for name, share in members}

    def _part(self, share: Share, bodies: Numbering) -> tuple[int, tuple[int, ...]]:
        forced = tuple(queue for queue in share.queues if queue in self.assignment.forced)
        return bodies[share.uid, share.queues, share.incarnation, forced], tuple(
            self.assignment.forced[queue] for queue in forced
        )

    def part(self, name: str) -> tuple[int, tuple[int, ...]]:
        """Return what a member of this name reads of the document: a body, and the generations of forced grants."""
        return self._parts.get(name, (-1, ()))

    def __str__(self) -> str:
        """Return the document as a trace shows it."""
        assignment = self.assignment
        shares = ", ".join(map(_format_share, assignment.members.values()))
        releasing = assignment.releasing.items()
        revoked = ", ".join(f"{queue.id} from {release.holder.uid} to {release.to}" for queue, release in releasing)
        forced = [queue.id for queue, since in assignment.forced.items() if since == assignment.generation]
        text = f"generation {assignment.generation}: {shares}"
        if revoked:
            text += f"; releasing {revoked}"
        if forced:
            text += f"; by force {forced}"
        if assignment.barrier:
            text += f"; barrier {assignment.barrier}"
        return text


class Documents:
    """All planned documents, by text."""

    def __init__(self) -> None:
        self._documents: dict[str, Document] = {}
        self._bodies = Numbering()

    def of(self, assignment: Assignment, text: str) -> Document:
        """Return the document of this text."""
        document = self._documents.get(text)
        if document is None:
            document = self._documents[text] = Document(decode_assignment(text), text, self._bodies)
            queues_in_both = document.owners.keys() & assignment.releasing.keys()
            if queues_in_both or assignment != document.assignment:
                raise InvariantError(f"Generation {document.number} is ambiguous: {text}")
        return document


def _format_share(share: Share) -> str:
    process = f" process {share.incarnation}" if share.incarnation else ""
    return f"{share.uid}{process}: {[queue.id for queue in share.queues]}"


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp() - NOW
