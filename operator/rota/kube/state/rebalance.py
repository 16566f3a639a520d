"""One rebalance of a group, as metrics, the page and traces know it."""

from msgspec import Struct


class Rebalance(Struct, frozen=True, rename="camel"):
    """Queues that changed owners; fields that are known only at its end are None until then."""

    reason: str
    message: str
    at: str
    generation: int  # of its first document
    moved: int = 0
    forced: int = 0
    seconds: float | None = None  # from its first document until everybody obeyed
    longest: float | None = None  # the longest that one queue took from its revoke until its next owner obeyed

    @property
    def outcome(self) -> str:
        """Whether everybody was heard."""
        return "Forced" if self.forced else "Settled"
