"""`group.json`: a group's settings for its sidecars, a key of the ConfigMap `<group>-rota`.

The operator writes it from the group's spec, with all defaults filled in; sidecars read it from a mounted volume. Equal
settings have equal texts, so a hash of the text (`settings_digest`) tells which settings a sidecar applies.
"""

import hashlib
import json
from datetime import datetime, timedelta
from functools import cached_property
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from rota.model import single_line
from rota.spec import Broker, Delivery, GroupSpec, Seconds, StartFrom, Subscription

# With `startFrom` Timestamp but no time, a group starts with messages that are this old at its creation. RocketMQ's
# client does the same at its own start.
START_BEFORE_CREATION = timedelta(minutes=30)
SETTINGS_SCHEMA = 1
DEFAULT_DRAIN_SECONDS = 30.0
MAX_DURATION_SECONDS = 3.6e9  # the longest duration in a spec is 999,999 hours

_SIDECAR_FIELDS = ("broker", "subscriptions", "message_model", "ordering", "start_from", "delivery", "paused")


class GroupSettings(Struct, frozen=True, kw_only=True, rename="camel", dict=True):
    """The settings of a group, as a sidecar reads them."""

    group: str  # its name at the broker
    broker: Broker
    subscriptions: Annotated[list[Subscription], Meta(min_length=1)]
    delivery: Delivery
    message_model: Literal["Clustering", "Broadcasting"] = "Clustering"
    ordering: Literal["Concurrent", "Orderly"] = "Concurrent"
    start_from: StartFrom = StartFrom()
    drain_timeout: float = DEFAULT_DRAIN_SECONDS  # seconds; from the group's policy
    paused: bool = False

    @property
    def is_broadcasting(self) -> bool:
        """Whether every member reads every queue, and keeps its own offsets."""
        return self.message_model == "Broadcasting"

    @cached_property
    def topics(self) -> frozenset[str]:
        """The subscribed topics."""
        return frozenset([subscription.topic for subscription in self.subscriptions])

    @property
    def is_orderly(self) -> bool:
        """Whether a queue's messages are delivered one after another, under the broker's lock."""
        return self.ordering == "Orderly" and not self.is_broadcasting

    @property
    def traces_endpoint(self) -> str:
        """The receiver of spans of deliveries, or "" if the group has none."""
        return self.delivery.traces.endpoint if self.delivery.traces else ""

    @property
    def max_attempts(self) -> int:
        """How often a message is tried; -1: for ever."""
        limit = self.delivery.retry.max_attempts
        return -1 if limit is None else limit


def encode_settings(name: str, spec: GroupSpec, drain_timeout: float, created_at: str | None) -> str:
    """Return the text of a group's settings; durations are numbers of seconds, and defaults are written out."""
    fields = {_to_camel_case(field): getattr(spec, field) for field in _SIDECAR_FIELDS}
    body: dict[str, Any] = msgspec.to_builtins(fields, enc_hook=float, order="deterministic")
    body["delivery"]["retry"]["maxAttempts"] = spec.max_attempts
    start = body["startFrom"]
    if created_at and start["position"] == "Timestamp" and start["timestamp"] is None:
        start_at = datetime.fromisoformat(created_at) - START_BEFORE_CREATION
        start["timestamp"] = start_at.isoformat().replace("+00:00", "Z")
    return json.dumps(
        {"schema": SETTINGS_SCHEMA, "group": spec.group or name, "drainTimeout": float(drain_timeout), **body},
        sort_keys=True,
        separators=(",", ":"),
    )


def settings_digest(text: str | bytes) -> str:
    """Return the hash by which reports name the settings in force."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def decode_settings(text: str | bytes) -> GroupSettings:
    """Read a text of `encode_settings`; ignore fields of a later operator, and raise ValueError for anything else."""
    try:
        body = msgspec.json.decode(text)
        schema = body.get("schema") if isinstance(body, dict) else None
        if schema == SETTINGS_SCHEMA:
            return msgspec.convert(_drop_unknown_fields(body, GroupSettings), GroupSettings, dec_hook=_decode_seconds)
        problem = f"its schema is {schema}; this version reads schema {SETTINGS_SCHEMA}"
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        problem = single_line(str(error))
    raise ValueError(f"The settings in group.json cannot be read: {problem}")


class _GroupName(Struct):
    group: str


class _DrainTimeout(Struct, rename="camel"):
    drain_timeout: Annotated[float, Meta(gt=0, le=MAX_DURATION_SECONDS)]


def decode_group_name(text: str) -> str:
    """Return the group's name at the broker, or "" if the settings do not contain it."""
    try:
        return msgspec.json.decode(text, type=_GroupName).group
    except (ValueError, RecursionError):
        return ""


def decode_drain_timeout(text: str) -> float:
    """Return the stored drain timeout, which applies while the policy is unreadable; the default if none is stored."""
    try:
        return msgspec.json.decode(text, type=_DrainTimeout).drain_timeout
    except (ValueError, RecursionError):
        return DEFAULT_DRAIN_SECONDS


def _drop_unknown_fields(value: Any, kind: Any) -> Any:
    """Remove fields that this version does not know: the structs of a spec would reject them."""
    kind = getattr(kind, "__origin__", kind) if hasattr(kind, "__metadata__") else kind  # the type inside Annotated
    kinds = [kind, *get_args(kind)]  # for a list, the items' type comes last; for an optional field, all its types
    if isinstance(value, list):
        return [_drop_unknown_fields(item, kinds[-1]) for item in value]
    struct = next((item for item in kinds if isinstance(item, type) and issubclass(item, Struct)), None)
    if struct is None or not isinstance(value, dict):
        return value
    types = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
    fields: dict[str, Any] = {}
    for name, item in value.items():
        if name in types:
            fields[name] = _drop_unknown_fields(item, types[name])
    return fields


def _decode_seconds(kind: type[Any], value: object) -> object:
    if kind is Seconds and isinstance(value, int | float) and value > 0:
        return Seconds(value)
    raise ValueError(f"{value!r} is not a number of seconds")


def _to_camel_case(field: str) -> str:
    first, *more = field.split("_")
    return first + "".join(map(str.capitalize, more))
