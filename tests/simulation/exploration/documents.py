"""Documents of which there is one each, so that they are the same where they are equal."""

from datetime import datetime
from typing import Any

from builders import NOW
from rota.documents import Assignment, Share, decode_assignment
from rota.model import Holder
from simulation.judge import Broken


class Numbering(dict[Any, int]):
    """Gives each value a number: quick to compare, and equal where the values are."""

    def __missing__(self, value: Any) -> int:
        self[value] = number = len(self)
        return number


class Document:
    """A document that was planned; what it says apart from generations and times is its body."""

    def __init__(self, assignment: Assignment, text: str, bodies: Numbering) -> None:
        self.assignment, self.text, self.number = assignment, text, assignment.generation
        members = sorted(assignment.members.items())
        self.owners = {queue: Holder(name, share.uid) for name, share in members for queue in share.queues}
        releasing, forced = sorted(assignment.releasing.items()), sorted(assignment.forced.items())
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
        issued = [assignment.issued_at] if assignment.barrier else []  # else nobody asks how old it is
        self.times = tuple(_seconds(at) for at in [*issued, *(release.at for _, release in releasing)])
        self._parts = {name: self._part(share, bodies) for name, share in members}

    def _part(self, share: Share, bodies: Numbering) -> tuple[int, tuple[int, ...]]:
        forced = tuple(queue for queue in share.queues if queue in self.assignment.forced)
        return bodies[share.uid, share.queues, share.incarnation, forced], tuple(
            self.assignment.forced[queue] for queue in forced
        )

    def part(self, name: str) -> tuple[int, tuple[int, ...]]:
        """Return all that a member of this name can make of it: a body, and the generations of what was forced."""
        return self._parts.get(name, (-1, ()))

    def __str__(self) -> str:
        """Tell it in a trace."""
        it = self.assignment
        shares = ", ".join(
            f"{share.uid}{f' process {share.incarnation}' * bool(share.incarnation)}: {[it.id for it in share.queues]}"
            for share in it.members.values()
        )
        releasing = it.releasing.items()
        taken = ", ".join(f"{queue.id} from {release.holder.uid} to {release.to}" for queue, release in releasing)
        forced = [queue.id for queue, since in it.forced.items() if since == it.generation]
        more = f"; releasing {taken}" * bool(taken) + f"; by force {forced}" * bool(forced)
        return f"generation {it.generation}: {shares}{more}{f'; barrier {it.barrier}' * bool(it.barrier)}"


class Documents:
    """Every document that was planned."""

    def __init__(self) -> None:
        self._known: dict[str, Document] = {}
        self._bodies = Numbering()

    def of(self, assignment: Assignment, text: str) -> Document:
        """Return the one document of this text."""
        found = self._known.get(text)
        if found is None:
            found = self._known[text] = Document(decode_assignment(text), text, self._bodies)
            twice = found.owners.keys() & assignment.releasing.keys()
            if twice or assignment != found.assignment:
                raise Broken(f"Generation {found.number} does not say one thing: {text}")
        return found


def _seconds(at: str) -> float:
    return datetime.fromisoformat(at).timestamp() - NOW
