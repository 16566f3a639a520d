"""Where a plan is made: at once, or aside where it takes long or may, so that it delays no other group."""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from rota.kube.client.api import Unanswered
from rota.planner import Plan, Snapshot, plan
from rota.spec import PolicySpec

STRANGERS, STRANGERS_SECONDS = 4, 10.0  # custom strategies at work at once; what one of them may take
LARGE = 2000  # queues and pods: a plan about more takes longer than ten milliseconds


class _Asked(NamedTuple):
    """A plan that a custom strategy is to make, and the policy that it is to go by."""

    policy: PolicySpec
    future: Future[Plan]


class Planning:
    """The plans of all groups; it knows which custom strategies are at work."""

    def __init__(self) -> None:
        """Plan nothing yet."""
        self._strangers = ThreadPoolExecutor(STRANGERS, thread_name_prefix="custom")
        self._at_it: dict[str, _Asked] = {}  # by group: what a custom strategy was asked last

    def close(self) -> None:
        """Plan no more; a custom strategy that hangs is left behind."""
        self._strangers.shutdown(wait=False, cancel_futures=True)

    def forget(self, group: str) -> None:
        """Wait for no answer about a group: it is no more, or another one by now."""
        if asked := self._at_it.pop(group, None):
            asked.future.cancel()

    async def plan(self, snapshot: Snapshot, now: float) -> Plan:
        """Plan; a custom strategy that does not answer in time is `Unanswered`, and not asked again before it has."""
        if snapshot.policy and snapshot.policy.strategy == "Custom":
            return await self._by_a_stranger(snapshot, snapshot.policy, now)
        self.forget(snapshot.group)
        if len(snapshot.pods) + sum(len(view.queues) for view in snapshot.views.values() if view) > LARGE:
            return await asyncio.to_thread(plan, snapshot, now)
        return plan(snapshot, now)

    async def _by_a_stranger(self, snapshot: Snapshot, policy: PolicySpec, now: float) -> Plan:
        asked = self._at_it.get(snapshot.group)
        if asked is None or asked.policy != policy or asked.future.done():
            self.forget(snapshot.group)
            asked = _Asked(policy, self._strangers.submit(plan, snapshot, now))
            self._at_it[snapshot.group] = asked  # at once: the group may go while it is waited for
            await asyncio.wait({asyncio.wrap_future(asked.future)}, timeout=STRANGERS_SECONDS)
            if asked.future.done() and not asked.future.cancelled():
                return asked.future.result()
        raise Unanswered(f"The custom strategy has not answered for {STRANGERS_SECONDS:g} s; what was assigned stays")
