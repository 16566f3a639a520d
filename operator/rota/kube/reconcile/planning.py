"""Runner of the planner: large plans and custom strategies run in threads, so that they delay no other group."""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from rota.kube.client.api import NoResponseError
from rota.planner import Plan, Snapshot, plan
from rota.spec import PolicySpec

MAX_CUSTOM_STRATEGIES = 4  # custom strategies that run concurrently
CUSTOM_STRATEGY_SECONDS = 10.0  # time limit of one run
LARGE_PLAN_ITEMS = 2000  # number of queues and pods above which a plan takes longer than ten milliseconds


class _RequestedPlan(NamedTuple):
    """A plan requested from a custom strategy, and the policy that it follows."""

    policy: PolicySpec
    future: Future[Plan]


class PlanRunner:
    """Computes the plans of all groups; tracks the custom strategies that are running."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(MAX_CUSTOM_STRATEGIES, thread_name_prefix="custom")
        self._requested_plans: dict[str, _RequestedPlan] = {}  # by group: the last plan from a custom strategy

    def close(self) -> None:
        """Stop planning; a custom strategy that hangs is abandoned."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def discard_request(self, group: str) -> None:
        """Discard the pending custom strategy of a group: its plan is not needed any more."""
        if request := self._requested_plans.pop(group, None):
            request.future.cancel()

    async def plan(self, snapshot: Snapshot, now: float) -> Plan:
        """Return the plan; raise NoResponseError if a custom strategy has not returned in time.

        `WorkQueue` expects this error of requests to the API server: it logs one line, and reconciles the group again.
        While the strategy still runs, further calls raise at once: repeated runs would use up all threads.
        """
        if snapshot.policy and snapshot.policy.strategy == "Custom":
            return await self._plan_custom(snapshot, snapshot.policy, now)
        self.discard_request(snapshot.group)
        queue_count = sum(len(view.queues) for view in snapshot.views.values() if view)  # a view is of one topic
        if queue_count + len(snapshot.pods) > LARGE_PLAN_ITEMS:
            return await asyncio.to_thread(plan, snapshot, now)
        return plan(snapshot, now)

    async def _plan_custom(self, snapshot: Snapshot, policy: PolicySpec, now: float) -> Plan:
        """Run the strategy, unless a run for the same policy is still under way; a plan that comes late is not used."""
        request = self._requested_plans.get(snapshot.group)
        if request is None or request.policy != policy or request.future.done():
            self.discard_request(snapshot.group)
            request = _RequestedPlan(policy, self._executor.submit(plan, snapshot, now))
            self._requested_plans[snapshot.group] = request  # before the await: the group may be deleted during it
            await asyncio.wait({asyncio.wrap_future(request.future)}, timeout=CUSTOM_STRATEGY_SECONDS)
            if request.future.done() and not request.future.cancelled():
                return request.future.result()
        message = f"The custom strategy has not returned within {CUSTOM_STRATEGY_SECONDS:g} s"
        raise NoResponseError(f"{message}; the assignment stays unchanged")
