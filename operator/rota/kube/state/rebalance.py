"""Rebalance of a group, as shown in metrics, traces and on the web page."""

from msgspec import Struct


class Rebalance(Struct, frozen=True, rename="camel"):
    """Queues that changed owners; fields that are known only at its end are None until then."""

    reason: str
    message: str
    at: str  # when it began, as in the status
    generation: int  # of its first document; 0: not known, as from a group's status
    moved: int = 0  # queues, so far
    forced: int = 0  # queues taken from a member that did not respond, so far
    seconds: float | None = None  # from its first document until every member obeyed
    longest: float | None = None  # of the slowest queue: from its revoke until its next owner obeyed

    @property
    def outcome(self) -> str:
        """`Forced` if a queue was taken from a member that did not respond, else `Settled`."""
        return "Forced" if self.forced else "Settled"
