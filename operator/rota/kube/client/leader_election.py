"""Leader election by a Lease. It only saves work: resource versions reject conflicting writes of two leaders."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rota.kube.client.api import Api, ApiError, NoResponseError
from rota.kube.client.objects import Metadata
from rota.kube.client.paths import collection_path, object_path
from rota.spec.names import is_dns_subdomain
from rota.timestamps import format_time

SAID = 60.0  # seconds between two log lines about the same problem
# An annotation with the uid of the holder's pod: if that pod does not exist any more, the Lease is free. An operator
# outside a pod sets none, and other candidates wait until its Lease expires.
POD_UID = "rota.dev/pod-uid"
PAGE_AUTH = "rota.dev/page-auth"  # an annotation with the holder's --page-auth, if it authenticates its users
KUBERNETES = "Kubernetes"  # its value for users of the cluster
CHECK_HOLDER_SECONDS = 3.0  # check the holder's pod once the Lease has not been renewed for this long
LIVES, RENEW_UNTIL = 15, 10.0  # seconds: duration of the Lease; limit after which an unrenewed leader steps down
RENEW, LOOK = 2.0, 0.5  # seconds between renewals by the leader; between reads by the other candidates

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


class PodMetadata(msgspec.Struct, frozen=True):
    """A pod, of which only the uid matters."""

    metadata: Metadata


class Leader:
    """One candidate of the election; `leads` is called at each change of its leadership."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        me: str,
        leads: Callable[[bool], None],
        name: str,
        *,
        annotations: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """Take part in the election only after `run`; in a pod, `me` is its name.

        `annotations` is called at each renewal, and returns the annotations that the leader sets on the Lease.
        """
        self._api, self._me, self._leads, self._annotations = api, me, leads, annotations
        self._namespace = namespace
        self._collection = collection_path("leases", namespace)
        self._path = object_path("leases", namespace, name)
        self._name = name
        self._seen: tuple[str | None, str | None] = (None, None)  # holder and renew time
        self._changed = 0.0  # when these last changed, by this machine's clock: clocks differ
        self._free = math.inf  # when another holder's Lease expires unless renewed
        self._until = 0.0  # end of this candidate's leadership unless renewed
        self._refused = False  # whether the last request was refused: then an early retry is useless
        self._said, self._said_at = "", -math.inf
        self.leading = False
        self._others: Mapping[str, str] = {}  # annotations of the Lease while another candidate holds it

    async def run(self) -> None:
        """Compete for the Lease and renew it until cancelled, then release it."""
        try:
            while True:
                await self._look()
                slow = self.leading or self._refused
                await asyncio.sleep(RENEW if slow else min(LOOK, max(self._free - self._now, 0.1)))
        finally:
            self._lead(leads=False)
            await self._give_back()

    @property
    def holder_annotations(self) -> Mapping[str, str]:
        """The annotations of the Lease, while another candidate holds it; none once it should have been renewed."""
        return self._others if self._now < self._free else {}

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _look(self) -> None:
        began = self._now
        try:
            async with asyncio.timeout(RENEW_UNTIL / 2):
                held = await self._take()
        except (ApiError, NoResponseError, TimeoutError) as error:
            self._refused = isinstance(error, ApiError)
            self._complain(str(error) or "the API server is slow")
            if self.leading and self._now > self._until:
                self._lead(leads=False)
            return
        self._refused, self._said = False, ""
        if held:
            self._until = began + RENEW_UNTIL
        self._lead(leads=held)

    def _complain(self, why: str) -> None:
        """Log a problem; if it persists, only once in a while."""
        if why != self._said or self._now - self._said_at >= SAID:
            self._said, self._said_at = why, self._now
            _log.warning("The Lease %s could not be renewed: %s", self._path, why)

    async def _take(self) -> bool:
        """Renew the own Lease, or acquire a free one; return whether this candidate holds it."""
        lease = await self._read()
        if lease is None:
            return await self._write(None, LeaseSpec())
        spec = lease.spec
        if spec.holder_identity != self._me:
            if self._seen != (spec.holder_identity, spec.renew_time):
                self._seen, self._changed = (spec.holder_identity, spec.renew_time), self._now
            self._free = self._changed + (spec.lease_duration_seconds or LIVES)
            if spec.holder_identity and self._now < self._free and not await self._holder_has_ended(lease):
                self._others = lease.metadata.annotations
                return False
        self._others = {}
        self._free = math.inf
        return await self._write(lease, spec)

    async def _holder_has_ended(self, lease: Lease) -> bool:
        """Whether the holder's pod does not exist any more; False if the API server does not say."""
        uid, holder = lease.metadata.annotations.get(POD_UID), lease.spec.holder_identity or ""
        if not uid or not is_dns_subdomain(holder) or self._now - self._changed < CHECK_HOLDER_SECONDS:
            return False
        try:
            pod = await self._api.get(object_path("pods", self._namespace, holder), PodMetadata)
        except ApiError as error:
            has_ended = error.unknown
        else:
            has_ended = pod.metadata.uid != uid
        if has_ended:
            _log.info("The pod %s with uid %s, which holds the Lease, does not exist any more", holder, uid)
        return has_ended

    async def _read(self) -> Lease | None:
        try:
            return await self._api.get(self._path, Lease)
        except ApiError as error:
            if error.unknown:
                return None
            raise

    async def _write(self, lease: Lease | None, spec: LeaseSpec) -> bool:
        at = format_time(time.time(), "microseconds")
        ours = spec.holder_identity == self._me
        body: dict[str, Any] = {
            "metadata": {"name": self._name, "annotations": {**self._annotations()}},
            "spec": {
                "holderIdentity": self._me,
                "leaseDurationSeconds": LIVES,
                "renewTime": at,
                "acquireTime": spec.acquire_time if ours else at,
                "leaseTransitions": (spec.lease_transitions or 0) + (not ours),
            },
        }
        try:
            if lease is None:
                await self._api.create(self._collection, body, Lease)
            else:
                body["metadata"]["resourceVersion"] = lease.metadata.resource_version
                await self._api.replace(self._path, body, Lease)
        except ApiError as error:
            if error.conflict:  # another candidate was quicker
                return False
            raise
        return True

    def _lead(self, *, leads: bool) -> None:
        if leads != self.leading:
            self.leading = leads
            _log.info("%s %s", self._me, "leads" if leads else "does not lead any more")
            self._leads(leads)

    async def _give_back(self) -> None:
        """Release the Lease, so that another candidate can lead at once."""
        try:
            async with asyncio.timeout(RENEW_UNTIL):  # much other work at shutdown may slow this down
                lease = await self._read()
                if lease and lease.spec.holder_identity == self._me:
                    at = format_time(time.time(), "microseconds")
                    spec = {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": at}
                    metadata = {"name": self._name, "resourceVersion": lease.metadata.resource_version}
                    await self._api.replace(self._path, {"metadata": metadata, "spec": spec}, Lease)
        except (ApiError, NoResponseError, TimeoutError) as error:
            _log.info("The Lease was not given back: %s", error)
