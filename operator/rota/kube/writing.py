"""A group's document on its way to the API server: an answer that gets lost does not say whether it was taken.

Only the record says that. So it is asked for, and the plan whose document it turns out to be is followed up then.
"""

from collections import deque
from dataclasses import replace
from typing import NamedTuple

from rota.kube import apply
from rota.kube.api import Api, ApiError, Unanswered
from rota.kube.group import Group
from rota.planner import Plan

REFUSED = frozenset({400, 403, 413, 422})  # by a shape, a right, a quota, a webhook: it is people's to mend
MOST_UNANSWERED = 5  # that are remembered: the record is asked for after each, and rules out all others


class Sent(NamedTuple):
    """A plan whose document is written, and the seconds that it took to make."""

    plan: Plan
    seconds: float


class Writing:
    """The writes of one group's document."""

    def __init__(self, api: Api, group: Group) -> None:
        """Write nothing yet."""
        self._api, self._group = api, group
        self._unanswered: deque[Sent] = deque(maxlen=MOST_UNANSWERED)

    async def write(self, sent: Sent) -> None:
        """Write a plan's document."""
        try:
            self._group.keep(await apply.write_document(self._api, self._group, sent.plan))
        except (ApiError, Unanswered, apply.Stale) as error:
            # A conflict may be with itself: requests are repeated where a connection breaks.
            if not (isinstance(error, ApiError) and error.status in REFUSED):
                self._unanswered.append(Sent(replace(sent.plan, data={}), sent.seconds))
                self._group.outdated = True
            raise
        self._unanswered.clear()

    def taken(self) -> Sent | None:
        """Return what was taken though nobody said so, once."""
        document = self._group.record.document
        found = next((it for it in self._unanswered if it.plan.document == document), None)
        if found:
            self._unanswered.clear()
        return found

    def forget(self) -> None:
        """Forget what was sent: whoever led meanwhile has told of the record as it is."""
        self._unanswered.clear()
