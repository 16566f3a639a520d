"""Leader election by a Lease, among the replicas of the operator (*candidates*).

The election only saves work: if two candidates lead at once, resource versions reject their conflicting writes.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rota.aio import loop_time
from rota.kube.client.api import Api, ApiError, NoResponseError, read_if_exists
from rota.kube.client.objects import Metadata, PartialObjectMetadata
from rota.kube.client.paths import collection_path, object_path
from rota.spec.names import is_dns_subdomain
from rota.timestamps import format_time

REPEAT_LOG_SECONDS = 60.0  # between two log lines about the same problem
# Annotation with the uid of the holder's pod: if that pod no longer exists, the Lease is free. An operator outside a
# pod does not set it, and other candidates wait until its Lease expires.
POD_UID_ANNOTATION = "rota.dev/pod-uid"
# Annotation with the holder's option --page-auth; empty if its page does not authenticate users.
PAGE_AUTH_ANNOTATION = "rota.dev/page-auth"
PAGE_AUTH_KUBERNETES = "Kubernetes"  # value of the annotation if users log in to the page with tokens of the cluster
CHECK_HOLDER_SECONDS = 3.0  # check the holder's pod once the Lease has not been renewed for this long
LEASE_DURATION_SECONDS = 15  # other candidates acquire the Lease this long after the last renewal that they saw
RENEW_DEADLINE_SECONDS = 10.0  # a leader that could not renew for so long stops leading, before others may start
RENEW_INTERVAL_SECONDS = 2.0  # between renewals by the leader
RETRY_PERIOD_SECONDS = 0.5  # between attempts of other candidates, at most
MIN_RETRY_SECONDS = 0.1  # between attempts of other candidates when the holder's Lease is about to expire

_log = logging.getLogger(__name__)


class LeaseSpec(msgspec.Struct, frozen=True, rename="camel"):
    """Which candidate leads, and until when it has to renew the Lease."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    renew_time: str | None = None
    acquire_time: str | None = None
    lease_transitions: int | None = None


class Lease(msgspec.Struct, frozen=True):
    """The Lease of an operator's replicas."""

    metadata: Metadata
    spec: LeaseSpec = LeaseSpec()


class LeaderElector:
    """One candidate of the election; `on_leadership` is called at each change of its leadership."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        identity: str,
        on_leadership: Callable[[bool], None],
        name: str,
        *,
        annotations: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`annotations` is called at each renewal, and returns the annotations that the leader sets on the Lease."""
        self._api = api
        self._identity = identity
        self._on_leadership = on_leadership
        self._annotations = annotations
        self._namespace = namespace
        self._collection = collection_path("leases", namespace)
        self._path = object_path("leases", namespace, name)
        self._name = name
        self._observed_renewal: tuple[str | None, str | None] = (None, None)  # holder and renew time of the Lease
        # Loop's time when that pair last changed; renew times are not used, as another machine's clock may differ.
        self._observed_at = 0.0
        self._expires_at = math.inf  # loop's time at which another holder's Lease expires unless it is renewed
        self._leads_until = 0.0  # loop's time at which this candidate's leadership ends unless the Lease is renewed
        self._was_refused = False  # whether the API server refused the last request, so that an early retry is useless
        self._logged_problem = ""
        self._logged_at = -math.inf
        self.is_leading = False
        self._holder_annotations: Mapping[str, str] = {}  # annotations of the Lease while another candidate holds it

    async def run(self) -> None:
        """Compete for the Lease and renew it until cancelled, then release it."""
        try:
            while True:
                await self._try_acquire()
                await asyncio.sleep(self._pause_seconds)
        finally:
            self._set_leading(is_leading=False)
            await self._release()

    @property
    def _pause_seconds(self) -> float:
        """Seconds until the next attempt: at most until a leader's leadership ends, or another's Lease expires."""
        if self.is_leading:
            return min(RENEW_INTERVAL_SECONDS, max(self._leads_until - loop_time(), 0.0))
        if self._was_refused:
            return RENEW_INTERVAL_SECONDS
        return min(RETRY_PERIOD_SECONDS, max(self._expires_at - loop_time(), MIN_RETRY_SECONDS))

    @property
    def holder_annotations(self) -> Mapping[str, str]:
        """The annotations of the Lease while another candidate holds it; none once the Lease has expired."""
        return self._holder_annotations if loop_time() < self._expires_at else {}

    async def _try_acquire(self) -> None:
        """Renew or acquire the Lease. If the request fails, a leader stays leader until `_leads_until`."""
        started_at = loop_time()
        timeout = RENEW_DEADLINE_SECONDS / 2
        if self.is_leading:  # the request ends before another candidate may acquire the Lease
            timeout = min(timeout, self._leads_until - started_at)
        try:
            async with asyncio.timeout(timeout):
                is_held = await self._acquire()
        except (ApiError, NoResponseError, TimeoutError) as error:
            self._was_refused = isinstance(error, ApiError)
            self._log_problem(str(error) or "the API server did not respond in time")
            if self.is_leading and loop_time() >= self._leads_until:
                self._set_leading(is_leading=False)
            return
        self._was_refused = False
        self._logged_problem = ""
        if is_held:
            self._leads_until = started_at + RENEW_DEADLINE_SECONDS
        self._set_leading(is_leading=is_held)

    def _log_problem(self, problem: str) -> None:
        """Log a problem; if it persists, only once in a while."""
        if problem != self._logged_problem or loop_time() - self._logged_at >= REPEAT_LOG_SECONDS:
            self._logged_problem = problem
            self._logged_at = loop_time()
            _log.warning("The Lease %s could not be renewed: %s", self._path, problem)

    async def _acquire(self) -> bool:
        """Renew the own Lease, or acquire a free one; return whether this candidate holds it."""
        lease = await read_if_exists(self._api, self._path, Lease)
        if lease and lease.spec.holder_identity != self._identity and await self._is_held_by_another(lease):
            self._holder_annotations = lease.metadata.annotations
            return False
        self._holder_annotations = {}
        self._expires_at = math.inf
        return await self._write_lease(lease)

    async def _is_held_by_another(self, lease: Lease) -> bool:
        """Whether a Lease that is not this candidate's has a holder, has not expired, and its holder's pod exists."""
        renewal = lease.spec.holder_identity, lease.spec.renew_time
        if self._observed_renewal != renewal:  # the Lease expires some time after the last renewal that was seen
            self._observed_renewal = renewal
            self._observed_at = loop_time()
        self._expires_at = self._observed_at + (lease.spec.lease_duration_seconds or LEASE_DURATION_SECONDS)
        if not lease.spec.holder_identity or loop_time() >= self._expires_at:
            return False
        return not await self._holder_has_ended(lease)

    async def _holder_has_ended(self, lease: Lease) -> bool:
        """Whether the holder's pod no longer exists.

        False if the holder has just renewed the Lease or names no pod, or if the pod cannot be read.
        """
        uid = lease.metadata.annotations.get(POD_UID_ANNOTATION)
        holder = lease.spec.holder_identity or ""
        if not uid or not is_dns_subdomain(holder) or loop_time() - self._observed_at < CHECK_HOLDER_SECONDS:
            return False
        try:
            pod = await self._api.get(object_path("pods", self._namespace, holder), PartialObjectMetadata)
        except ApiError as error:
            has_ended = error.is_not_found
        else:
            has_ended = pod.metadata.uid != uid
        if has_ended:
            _log.info("The Lease's holder %s (pod uid %s) no longer exists; acquiring the Lease", holder, uid)
        return has_ended

    async def _write_lease(self, lease: Lease | None) -> bool:
        """Make this candidate the holder; return False if another candidate has written the Lease meanwhile."""
        spec = lease.spec if lease else LeaseSpec()
        is_ours = spec.holder_identity == self._identity
        at = format_time(time.time(), "microseconds")
        body: dict[str, Any] = {
            "metadata": {"name": self._name, "annotations": {**self._annotations()}},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": LEASE_DURATION_SECONDS,
                "renewTime": at,
                "acquireTime": spec.acquire_time if is_ours else at,
                "leaseTransitions": (spec.lease_transitions or 0) + (0 if is_ours else 1),
            },
        }
        try:
            if lease is None:
                await self._api.create(self._collection, body, Lease)
            else:
                body["metadata"]["resourceVersion"] = lease.metadata.resource_version
                await self._api.replace(self._path, body, Lease)
        except ApiError as error:
            if error.is_conflict:
                return False
            raise
        return True

    def _set_leading(self, *, is_leading: bool) -> None:
        if is_leading != self.is_leading:
            self.is_leading = is_leading
            _log.info("%s became the leader" if is_leading else "%s is no longer the leader", self._identity)
            self._on_leadership(is_leading)

    async def _release(self) -> None:
        """Release the Lease, so that another candidate can lead at once."""
        try:
            async with asyncio.timeout(RENEW_DEADLINE_SECONDS):  # much other work at shutdown may slow this down
                lease = await read_if_exists(self._api, self._path, Lease)
                if lease and lease.spec.holder_identity == self._identity:
                    at = format_time(time.time(), "microseconds")
                    spec = {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": at}
                    metadata = {"name": self._name, "resourceVersion": lease.metadata.resource_version}
                    await self._api.replace(self._path, {"metadata": metadata, "spec": spec}, Lease)
        except (ApiError, NoResponseError, TimeoutError) as error:
            _log.info("The Lease could not be released: %s", error)
