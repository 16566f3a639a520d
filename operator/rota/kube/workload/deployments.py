"""What a group's members are made of: the Secret with their key, and the Deployment of a group that has a template."""

import hashlib

import msgspec

from rota.kube.client.api import Api, ApiError, Stale, Unanswered
from rota.kube.client.objects import MAX_DEPLOYMENT_BYTES, Deployment, Key
from rota.kube.client.paths import object_path
from rota.kube.state.group import Group
from rota.kube.state.member_problems import unauthenticated
from rota.kube.workload.deployment_manifest import deployment
from rota.kube.workload.member_keys import MemberKeys
from rota.kube.workload.sidecar_container import SidecarSpec, newest_image
from rota.model import Reason, Verdict, plain
from rota.spec import GroupSpec, Mistake
from rota.spec.resolved import read_drain_timeout

_UNTYPED = "failed to create typed patch object"  # how a field that there is not is refused, with a 500
_DISABLED = (
    "This operator manages no Deployments (--no-fleets; rbac.fleets in the chart): remove spec.template, and put the"
    " sidecar into a Deployment of your own with rota inject"
)


class Fleets:
    """All Deployments of ours."""

    def __init__(self, api: Api, image: str = "", *, enabled: bool = True, keys: MemberKeys | None = None) -> None:
        """`image` is that of sidecars which are put in from now on; by default that of this version."""
        self._api = api
        self._keys = keys
        self._image = image or newest_image()
        self._enabled = enabled
        self._standing: dict[Key, Deployment] = {}
        self._stated: dict[Key, tuple[str, int]] = {}  # what we last stated, and which generation that made

    def seen(self, it: Deployment) -> bool:
        """Take a Deployment as it is; return whether somebody has changed what it shall be."""
        before = self._standing.get(it.metadata.key)
        if before and it.metadata.version < before.metadata.version:
            return False
        self._standing[it.metadata.key] = it
        return before is None or before.metadata.generation != it.metadata.generation

    def gone(self, it: Deployment) -> None:
        """Know that a Deployment is no more."""
        self._standing.pop(it.metadata.key, None)
        self._stated.pop(it.metadata.key, None)

    async def give_key(self, group: Group) -> None:
        """Write the Secret with the key of a group, if a member is not authenticated.

        This comes before all that is written for the group: what such members obey cannot be known, so they are poked
        again and again. At a thousand new groups the pokes left no room at the API server for most of the Secrets.
        """
        if self._keys and unauthenticated(group.pods):
            await self._keys.keep_secret(group)

    async def keep(self, group: Group) -> int:
        """See to it that a group's Secret and Deployment are as they shall be; return how many writes that took."""
        spec, key = group.wish.spec, (group.namespace, group.name)
        key_writes = await self._keys.keep(group) if self._keys else 0
        if spec is None or group.body is None or group.key_problems:  # new pods could not authenticate
            return key_writes
        group.fleet, writes = await self._kept(group, spec, key)  # at once: rounds look at it meanwhile
        return key_writes + writes

    async def _kept(self, group: Group, spec: GroupSpec, key: Key) -> tuple[tuple[Verdict, ...], int]:
        if not self._enabled:
            return ((Verdict(Reason.TEMPLATE_REFUSED, _DISABLED),) if spec.template else ()), 0
        standing = self._standing.get(key)
        ours = standing is not None and standing.metadata.owned_by(group.uid)
        if spec.template is None:
            return (), await self._end(standing) if standing and ours else 0
        if standing is None and key not in self._stated:  # one without our label is not watched
            standing = await self._there(key)
        if standing and not standing.metadata.owned_by(group.uid):
            told = f"The Deployment {group.name} is somebody else's; delete it or rename the group"
            return (Verdict(Reason.NAME_TAKEN, told),), 0
        try:
            return (), await self._state(group, spec, standing)
        except Mistake as mistake:
            told = str(mistake)
        except Unanswered as error:
            told = f"The Deployment {group.name} could not be written: {error}"
        except ApiError as error:
            told = f"spec.template is refused: {_why(error)}"
        return (Verdict(Reason.TEMPLATE_REFUSED, told),), 0

    async def _there(self, key: Key) -> Deployment | None:
        try:
            return await self._api.get(object_path("deployments", *key), Deployment)
        except ApiError as error:
            if error.unknown:
                return None
            raise

    async def _state(self, group: Group, spec: GroupSpec, standing: Deployment | None) -> int:
        """State the Deployment, unless it is as we stated it last."""
        assert group.body is not None  # noqa: S101 - nobody keeps the fleet of a group that is not there
        if standing and standing.is_too_large:
            told = f"The Deployment {group.name} has a spec of more than {MAX_DEPLOYMENT_BYTES:,} bytes"
            raise Mistake(f"{told}; shorten spec.template")
        policy, key = group.wish.policy, (group.namespace, group.name)
        patience = policy.handover.drain_timeout if policy else read_drain_timeout(group.record.settings)
        sidecar = SidecarSpec.of(spec, self._image, patience)
        wanted = deployment(group.body, spec, sidecar, _as_it_is(standing) if standing else None)
        mark = hashlib.sha256(msgspec.json.encode(wanted, order="deterministic")).hexdigest()
        if standing and self._stated.get(key) == (mark, standing.metadata.generation):
            return 0
        if standing:  # a leader that was deposed knows an older one
            wanted["metadata"]["resourceVersion"] = standing.metadata.resource_version
        try:
            made = await self._api.apply(object_path("deployments", *key), wanted, Deployment)
        except ApiError as error:
            if not error.conflict:
                raise
            self._stated.pop(key, None)
            # Read it now: a group that loses its template meanwhile has to find the Deployment that is to be deleted.
            if current := await self._there(key):
                self.seen(current)
            else:
                self._standing.pop(key, None)
            raise Stale(str(error)) from None
        self._stated[key] = (mark, made.metadata.generation)
        self._standing[key] = made
        return 1

    async def _end(self, standing: Deployment) -> int:
        """End the fleet of a group that has no template any more."""
        try:
            await self._api.delete(object_path("deployments", *standing.metadata.key), standing.metadata.uid)
        except ApiError as error:
            if not (error.unknown or error.conflict):
                raise
        return 1


def _why(error: ApiError) -> str:
    told, _, field = str(error).partition(_UNTYPED)
    return plain(field.partition("): ")[2] or told)


def _as_it_is(standing: Deployment) -> dict[str, object]:
    return {"metadata": {"annotations": standing.metadata.annotations}, "spec": msgspec.json.decode(standing.spec)}
