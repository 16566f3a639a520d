"""Writer of a group's Secret with its members' key, and of the Deployment of a group that has a template."""

import hashlib
from collections.abc import Collection

import msgspec

from rota.kube.client.api import Api, ApiError, ConflictError, NoResponseError
from rota.kube.client.objects import MAX_DEPLOYMENT_BYTES, Deployment, Key
from rota.kube.client.paths import object_path
from rota.kube.state.group import Group
from rota.kube.state.member_problems import unauthenticated_pods
from rota.kube.workload.deployment_manifest import deployment
from rota.kube.workload.member_keys import MemberKeys
from rota.kube.workload.sidecar_container import SidecarSpec, newest_image
from rota.model import Reason, Verdict, plain
from rota.spec import GroupSpec, InvalidSpecError
from rota.spec.resolved import read_drain_timeout

_UNTYPED = "failed to create typed patch object"  # the message for an unknown field, with status 500
_DISABLED = (
    "This operator manages no Deployments (--no-fleets; rbac.fleets in the chart): remove spec.template, and put the"
    " sidecar into a Deployment of your own with rota inject"
)


class Deployments:
    """The Deployments that the operator runs for groups."""

    def __init__(self, api: Api, image: str = "", *, enabled: bool = True, keys: MemberKeys | None = None) -> None:
        """`image`: the sidecar image of new injections, by default that of this version."""
        self._api = api
        self._keys = keys
        self._image = image or newest_image()
        self._enabled = enabled
        self._standing: dict[Key, Deployment] = {}
        self._stated: dict[Key, tuple[str, int]] = {}  # last applied digest, and its generation

    def seen(self, observed: Deployment) -> bool:
        """Record the state of a Deployment; return whether it is new or has another generation, after a change."""
        previous = self._standing.get(observed.metadata.key)
        if previous and observed.metadata.version < previous.metadata.version:
            return False
        self._standing[observed.metadata.key] = observed
        return previous is None or previous.metadata.generation != observed.metadata.generation

    def gone(self, deleted: Deployment) -> None:
        """Handle a deleted Deployment, unless another one of its name was created meanwhile."""
        current = self._standing.get(deleted.metadata.key)
        if current is None or current.metadata.uid == deleted.metadata.uid:
            self._standing.pop(deleted.metadata.key, None)
            self._stated.pop(deleted.metadata.key, None)

    @property
    def expected(self) -> Collection[Deployment]:
        """The Deployments that exist as far as this operator has seen or written them."""
        return self._standing.values()

    async def give_key(self, group: Group) -> None:
        """Write the Secret with the key of a group, if a member is not authenticated.

        This comes before all other writes for the group: the reports of such members are ignored, so they are poked
        repeatedly. With a thousand new groups, the pokes left the API server no capacity for most of the Secrets.
        """
        if self._keys and unauthenticated_pods(group.pods):
            await self._keys.keep_secret(group)

    async def keep(self, group: Group) -> int:
        """Bring a group's Secret and Deployment up to date; return the number of writes."""
        spec, key = group.wish.spec, (group.namespace, group.name)
        key_writes = await self._keys.keep(group) if self._keys else 0
        if spec is None or group.body is None or group.key_problems:  # new pods could not authenticate
            return key_writes
        group.fleet, writes = await self._kept(group, spec, key)  # in one step: reconciles read it meanwhile
        return key_writes + writes

    async def _kept(self, group: Group, spec: GroupSpec, key: Key) -> tuple[tuple[Verdict, ...], int]:
        if not self._enabled:
            return ((Verdict(Reason.TEMPLATE_REFUSED, _DISABLED),) if spec.template else ()), 0
        current = self._standing.get(key)
        ours = current is not None and current.metadata.owned_by(group.uid)
        if spec.template is None:
            return (), await self._end(current) if current and ours else 0
        if current is None and key not in self._stated:  # without the label it is not watched
            current = await self._there(key)
        if current and not current.metadata.owned_by(group.uid):
            message = f"The Deployment {group.name} is somebody else's; delete it or rename the group"
            return (Verdict(Reason.NAME_TAKEN, message),), 0
        try:
            return (), await self._state(group, spec, current)
        except InvalidSpecError as mistake:
            message = str(mistake)
        except NoResponseError as error:
            message = f"The Deployment {group.name} could not be written: {error}"
        except ApiError as error:
            message = f"spec.template is refused: {_why(error)}"
        return (Verdict(Reason.TEMPLATE_REFUSED, message),), 0

    async def _there(self, key: Key) -> Deployment | None:
        try:
            return await self._api.get(object_path("deployments", *key), Deployment)
        except ApiError as error:
            if error.unknown:
                return None
            raise

    async def _state(self, group: Group, spec: GroupSpec, current: Deployment | None) -> int:
        """Apply the Deployment, unless it is still as last applied."""
        assert group.body is not None  # noqa: S101 - only existing groups have a Deployment
        if current and current.is_too_large:
            message = f"The Deployment {group.name} has a spec of more than {MAX_DEPLOYMENT_BYTES:,} bytes"
            raise InvalidSpecError(f"{message}; shorten spec.template")
        policy, key = group.wish.policy, (group.namespace, group.name)
        drain_timeout = policy.handover.drain_timeout if policy else read_drain_timeout(group.record.settings)
        sidecar = SidecarSpec.of(spec, self._image, drain_timeout)
        manifest = deployment(group.body, spec, sidecar, _unchanged(current) if current else None)
        digest = hashlib.sha256(msgspec.json.encode(manifest, order="deterministic")).hexdigest()
        if current and self._stated.get(key) == (digest, current.metadata.generation):
            return 0
        if current:  # rejects the outdated apply of a deposed leader
            manifest["metadata"]["resourceVersion"] = current.metadata.resource_version
        try:
            applied = await self._api.apply(object_path("deployments", *key), manifest, Deployment)
        except ApiError as error:
            if not error.conflict:
                raise
            self._stated.pop(key, None)
            # Read it now: if the group loses its template meanwhile, the Deployment to delete must be known.
            if latest := await self._there(key):
                self.seen(latest)
            else:
                self._standing.pop(key, None)
            raise ConflictError(str(error)) from None
        self._stated[key] = (digest, applied.metadata.generation)
        self._standing[key] = applied
        return 1

    async def _end(self, current: Deployment) -> int:
        """Delete the Deployment of a group that has no template any more."""
        try:
            await self._api.delete(object_path("deployments", *current.metadata.key), current.metadata.uid)
        except ApiError as error:
            if not (error.unknown or error.conflict):
                raise
        return 1


def _why(error: ApiError) -> str:
    message, _, field = str(error).partition(_UNTYPED)
    return plain(field.partition("): ")[2] or message)


def _unchanged(current: Deployment) -> dict[str, object]:
    return {"metadata": {"annotations": current.metadata.annotations}, "spec": msgspec.json.decode(current.spec)}
