"""Writer of a group's Deployment, if the group has a template, and (by `MemberKeys`) of the Secret with its key.

It applies the whole manifest (server-side apply), and not again while neither the manifest nor the Deployment's spec
has changed since.
"""

import hashlib
from collections.abc import Collection
from typing import NamedTuple

import msgspec

from rota.kube.client.api import Api, ApiError, ConflictError, NoResponseError, read_if_exists
from rota.kube.client.deployment_status import RolloutState
from rota.kube.client.objects import MAX_DEPLOYMENT_BYTES, Deployment, ObjectKey
from rota.kube.client.paths import object_path
from rota.kube.state.group import AppliedTemplate, Group
from rota.kube.state.member_problems import unauthenticated_pods
from rota.kube.workload.deployment_manifest import build_manifest
from rota.kube.workload.member_keys import MemberKeys
from rota.kube.workload.sidecar_container import SidecarSpec, default_image
from rota.model import Finding, Reason, single_line
from rota.spec import GroupSpec, InvalidSpecError

# The start of the message for an unknown field, which has status 500. The message continues:
# (shop/orders; apps/v1, Kind=Deployment): .spec.template.spec.volume: field not declared in schema
_UNKNOWN_FIELD_TEXT = "failed to create typed patch object"
_DISABLED_MESSAGE = (
    "This operator manages no Deployments (--no-fleets; rbac.fleets in the chart): remove spec.template, and add the"
    " sidecar to your own Deployment with rota inject"
)

_SyncResult = tuple[tuple[Finding, ...], int]  # problems, and the number of write requests


class _AppliedManifest(NamedTuple):
    digest: str  # of the manifest that was applied last
    # The Deployment's `metadata.generation` after it. If still the same, no other client has changed the spec.
    generation: int


class Deployments:
    """Writes the Deployments and Secrets of groups."""

    def __init__(self, api: Api, image: str = "", *, enabled: bool = True, keys: MemberKeys | None = None) -> None:
        """`image`: the sidecar image of new injections; empty: that of this version. `keys` None: no keys."""
        self._api = api
        self._keys = keys
        self._image = image or default_image()
        self._enabled = enabled
        self._observed: dict[ObjectKey, Deployment] = {}
        self._applied: dict[ObjectKey, _AppliedManifest] = {}
        # By Deployment whose apply is under way: the version at which it was reported deleted meanwhile; 0: it was not.
        self._deleted_versions: dict[ObjectKey, int] = {}

    def on_upsert(self, observed: Deployment) -> bool:
        """Record the state of a Deployment; return whether it is new, or its generation or rollout has changed.

        States arrive from the watch and in responses to writes, in any order: an older one is ignored.
        """
        previous = self._observed.get(observed.metadata.key)
        if previous and observed.metadata.version_number < previous.metadata.version_number:
            return False
        self._observed[observed.metadata.key] = observed
        if previous is None or previous.metadata.generation != observed.metadata.generation:
            return True
        return previous.rollout is not observed.rollout

    def on_delete(self, deleted: Deployment) -> None:
        """Handle a deleted Deployment, unless another one of its name was created meanwhile."""
        if deleted.metadata.key in self._deleted_versions:
            self._deleted_versions[deleted.metadata.key] = deleted.metadata.version_number
        current = self._observed.get(deleted.metadata.key)
        if current is None or current.metadata.uid == deleted.metadata.uid:
            self._observed.pop(deleted.metadata.key, None)
            self._applied.pop(deleted.metadata.key, None)

    @property
    def expected(self) -> Collection[Deployment]:
        """The Deployments that this operator has seen or written. The informer expects them in its next list."""
        return self._observed.values()

    async def ensure_key(self, group: Group) -> None:
        """Write the Secret with the key of a group, if a member is not authenticated.

        Call it before all other writes for the group: the reports of such members are ignored, so their pods are poked
        repeatedly. With a thousand new groups, those pokes would leave the API server no capacity for the Secrets.
        """
        if self._keys and unauthenticated_pods(group.pods):
            await self._keys.write_secret_if_due(group)

    async def sync(self, group: Group) -> int:
        """Bring a group's Secret and Deployment up to date; return the number of write requests."""
        spec = group.resolved_spec.spec
        key = (group.namespace, group.name)
        key_writes = await self._keys.distribute(group) if self._keys else 0
        # If the key could not be written, roll out no pods: they could not authenticate.
        if spec is None or group.body is None or group.key_problems:
            return key_writes
        generation = group.body.metadata.generation
        problems, writes = await self._sync_deployment(group, spec, key)
        # Replaced only now, so that a status published during the await has the previous ones.
        group.deployment_problems = problems
        current = self._observed.get(key) if spec.template is not None else None
        is_rolling_out = current is not None and current.rollout is RolloutState.UNDER_WAY
        # Set after a rejection, too: this generation was tried, and its problems are known.
        group.rollout = AppliedTemplate(generation, is_rolling_out=is_rolling_out)
        return key_writes + writes

    async def _sync_deployment(self, group: Group, spec: GroupSpec, key: ObjectKey) -> _SyncResult:
        """Apply the Deployment, or delete the one of a group that has lost its template."""
        if not self._enabled:
            problems = (Finding(Reason.TEMPLATE_REJECTED, _DISABLED_MESSAGE),) if spec.template else ()
            return problems, 0
        if spec.template is not None:
            return await self._apply_template(group, spec, key)
        current = self._observed.get(key)
        if current is None or not current.metadata.is_owned_by(group.uid):
            return (), 0
        await self._delete(current)
        return (), 1

    async def _apply_template(self, group: Group, spec: GroupSpec, key: ObjectKey) -> _SyncResult:
        current = self._observed.get(key)
        # The watch does not report a Deployment without the label: one may exist.
        if current is None and key not in self._applied:
            current = await self._read(key)
        if current and not current.metadata.is_owned_by(group.uid):
            message = f"The Deployment {group.name} is not owned by this group; delete it or rename the group"
            return (Finding(Reason.RESOURCE_CONFLICT, message),), 0
        try:
            writes = await self._apply(group, spec, current)
            applied = self._observed.get(key)  # None: deleted meanwhile, which causes another reconcile
            return (_rollout_problems(applied) if applied else ()), writes
        except ConflictError:
            # Observe it again: if the template is removed before the retry, `sync` deletes only an observed Deployment.
            await self._refresh(key)
            raise
        except InvalidSpecError as mistake:
            message = str(mistake)
        except NoResponseError as error:
            message = f"The Deployment {group.name} could not be written: {error}"
        except ApiError as error:
            message = f"The API server rejected spec.template: {_rejection_cause(error)}"
        return (Finding(Reason.TEMPLATE_REJECTED, message),), 0

    async def _read(self, key: ObjectKey) -> Deployment | None:
        return await read_if_exists(self._api, object_path("deployments", *key), Deployment)

    async def _refresh(self, key: ObjectKey) -> None:
        latest = await self._read(key)
        if latest:
            self.on_upsert(latest)
        else:
            self._observed.pop(key, None)

    async def _apply(self, group: Group, spec: GroupSpec, current: Deployment | None) -> int:
        """Apply the Deployment, unless it is still as last applied. Raise ConflictError if it has changed meanwhile."""
        assert group.body is not None  # noqa: S101 - only existing groups have a Deployment
        if current and current.is_too_large:
            message = f"The Deployment {group.name} has a spec of more than {MAX_DEPLOYMENT_BYTES:,} bytes"
            raise InvalidSpecError(f"{message}; shorten spec.template")
        key = (group.namespace, group.name)
        sidecar = SidecarSpec.from_spec(spec, self._image, group.drain_timeout)
        # Without autoUpgrade, the manifest keeps the sidecar that an earlier version of the operator injected.
        manifest = build_manifest(group.body, spec, sidecar, _as_manifest(current) if current else None)
        digest = hashlib.sha256(msgspec.json.encode(manifest, order="deterministic")).hexdigest()
        if current and self._applied.get(key) == _AppliedManifest(digest, current.metadata.generation):
            return 0
        if current:  # so that the API server rejects an apply for an outdated version, such as a deposed leader's
            manifest["metadata"]["resourceVersion"] = current.metadata.resource_version
        self._deleted_versions[key] = 0
        try:
            applied = await self._api.apply(object_path("deployments", *key), manifest, Deployment)
        except ApiError as error:
            if not error.is_conflict:
                raise
            self._applied.pop(key, None)
            raise ConflictError(str(error)) from None
        finally:
            deleted_version = self._deleted_versions.pop(key)
        if applied.metadata.version_number > deleted_version:  # otherwise it was deleted before the response arrived
            self._applied[key] = _AppliedManifest(digest, applied.metadata.generation)
            self.on_upsert(applied)  # unless a watch event has already brought a later state
        return 1

    async def _delete(self, current: Deployment) -> None:
        """Delete a Deployment, unless it was deleted or recreated meanwhile."""
        try:
            await self._api.delete(object_path("deployments", *current.metadata.key), current.metadata.uid)
        except ApiError as error:
            if not (error.is_not_found or error.is_conflict):
                raise


def _rollout_problems(applied: Deployment) -> tuple[Finding, ...]:
    if applied.rollout is not RolloutState.FAILED:
        return ()
    message = f"The rollout of the Deployment {applied.metadata.name} makes no progress: "
    return (Finding(Reason.ROLLOUT_FAILED, message + applied.status.progressing.message),)


def _rejection_cause(error: ApiError) -> str:
    """Return the error's message; of that for an unknown field, only the part from the field's path on."""
    message, _, details = str(error).partition(_UNKNOWN_FIELD_TEXT)
    return single_line(details.partition("): ")[2] or message)


def _as_manifest(current: Deployment) -> dict[str, object]:
    return {"metadata": {"annotations": current.metadata.annotations}, "spec": msgspec.json.decode(current.spec)}
