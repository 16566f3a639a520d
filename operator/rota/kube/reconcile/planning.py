"""Runner of the planner: large plans and custom strategies run in threads, so that they delay no other group."""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from rota.kube.client.api import NoResponseError
from rota.planner import Plan, Snapshot, plan
from rota.spec import PolicySpec

STRANGERS, STRANGERS_SECONDS = 4, 10.0  # concurrent custom strategies; time limit of each
LARGE = 2000  # queues and pods: a plan for more takes longer than ten milliseconds


class _Asked(NamedTuple):
    """A plan requested from a custom strategy, and the policy that it follows."""

    policy: PolicySpec
    future: Future[Plan]


class Planning:
    """Makes the plans of all groups; tracks the custom strategies that are running."""

    def __init__(self) -> None:
        self._strangers = ThreadPoolExecutor(STRANGERS, thread_name_prefix="custom")
        self._at_it: dict[str, _Asked] = {}  # the last plan requested from a custom strategy, by group

    def close(self) -> None:
        """Stop planning; a custom strategy that hangs is abandoned."""
        self._strangers.shutdown(wait=False, cancel_futures=True)

    def forget(self, group: str) -> None:
        """Discard the pending custom strategy of a group: its plan is not needed any more."""
        if request := self._at_it.pop(group, None):
            request.future.cancel()

    async def plan(self, snapshot: Snapshot, now: float) -> Plan:
        """Return the plan. A custom strategy that is too slow raises NoResponseError; its next call waits for it."""
        if snapshot.policy and snapshot.policy.strategy == "Custom":
            return await self._by_a_stranger(snapshot, snapshot.policy, now)
        self.forget(snapshot.group)
        if len(snapshot.pods) + sum(len(view.queues) for view in snapshot.views.values() if view) > LARGE:
            return await asyncio.to_thread(plan, snapshot, now)
        return plan(snapshot, now)

    async def _by_a_stranger(self, snapshot: Snapshot, policy: PolicySpec, now: float) -> Plan:
        request = self._at_it.get(snapshot.group)
        if request is None or request.policy != policy or request.future.done():
            self.forget(snapshot.group)
            request = _Asked(policy, self._strangers.submit(plan, snapshot, now))
            self._at_it[snapshot.group] = request  # before the await: the group may be deleted during it
            await asyncio.wait({asyncio.wrap_future(request.future)}, timeout=STRANGERS_SECONDS)
            if request.future.done() and not request.future.cancelled():
                return request.future.result()
        raise NoResponseError(
            f"The custom strategy has not answered for {STRANGERS_SECONDS:g} s; what was assigned stays"
        )
