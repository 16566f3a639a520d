"""The specs of Rota's custom resources, parsed and validated; a user's mistake raises InvalidSpecError.

The CRDs reject most mistakes at `kubectl apply` already. This module also covers specs in files, and objects that no
CRD has checked. `rota.spec.rules` has the rules that concern several fields.
"""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from rota.model import single_line
from rota.spec.names import NAMING_RULE, SUBDOMAIN_PATTERN, ObjectName
from rota.spec.rules import group_mistakes, policy_mistakes

T = TypeVar("T", bound=Struct)

MAX_INT32 = 2**31 - 1  # the largest number that Kubernetes and brokers accept
MAX_BUDGET_MOVES = 1_000_000  # as many as a group can have queues

# Topics and groups may have the characters that RocketMQ permits in their names.
Topic = Annotated[str, Meta(min_length=1, max_length=127, pattern=r"^[%|a-zA-Z0-9_-]+\Z")]
NonEmptyText = Annotated[str, Meta(min_length=1)]
GroupName = Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[%|a-zA-Z0-9_-]+\Z")]
Count = Annotated[int, Meta(ge=1, le=MAX_INT32)]
Mebibytes = Annotated[int, Meta(ge=1, le=1024)]  # size of one message
Port = Annotated[int, Meta(ge=1, le=65535)]
# Ids of queues, such as 0-3,7.
Ranges = Annotated[str, Meta(pattern=r"^[0-9]{1,9}(-[0-9]{1,9})?(,[0-9]{1,9}(-[0-9]{1,9})?)*\Z")]
CountOrPercent = Annotated[int, Meta(ge=0, le=MAX_INT32)] | Annotated[str, Meta(pattern=r"^(100|[0-9]{1,2})%\Z")]


class Seconds(float):
    """A duration, as users write it: 500ms, 30s, 1m."""

    UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}  # noqa: RUF012 - a constant

    @classmethod
    def parse(cls, text: object) -> "Seconds":
        """Parse a duration above zero; raise ValueError with a sentence if the text is none."""
        match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)(ms|s|m|h)", text) if isinstance(text, str) else None
        if not match or not float(match[1]):
            raise ValueError(f"Expected a duration such as 500ms, 30s or 1m, got {text!r}")
        return cls(float(match[1]) * cls.UNITS[match[2]])

    def __str__(self) -> str:
        """Spell the duration so that `parse` reads it back."""
        return f"{self:.6f}".rstrip("0").rstrip(".") + "s"


class InvalidSpecError(ValueError):
    """A user's spec is invalid; the text is one sentence that names the field."""


class _SpecBlock(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """One block of a spec: unknown fields are mistakes, and field names are camelCase in YAML."""


class Reference(_SpecBlock, frozen=True):
    """A named object in the same namespace."""

    name: ObjectName


class Tls(_SpecBlock, frozen=True):
    """TLS of the connection to the broker."""

    enabled: bool = False
    ca_secret: Reference | None = None
    client_secret: Reference | None = None


class RocketMQ(_SpecBlock, frozen=True, rename="camel"):
    """How to reach a RocketMQ cluster."""

    name_servers: Annotated[list[NonEmptyText], Meta(min_length=1)]
    credentials_secret: Reference | None = None
    tls: Tls = Tls()


class Broker(_SpecBlock, frozen=True):
    rocketmq: RocketMQ


class Subscription(_SpecBlock, frozen=True):
    """A topic, and a filter of its messages."""

    topic: Topic
    expression: NonEmptyText = "*"
    type: Literal["Tag", "SQL92"] = "Tag"


class StartFrom(_SpecBlock, frozen=True):
    """Where a queue without a committed offset of the group starts."""

    position: Literal["Latest", "Earliest", "Timestamp"] = "Latest"
    timestamp: datetime | None = None


class Push(_SpecBlock, frozen=True):
    """How the sidecar posts messages to the app."""

    port: Port = 8080
    path: Annotated[str, Meta(pattern="^/")] = "/"
    timeout: Seconds = Seconds(30)
    concurrency: Count = 16
    max_batch: Count = 1


class Pull(_SpecBlock, frozen=True):
    """How the app asks the sidecar for messages."""

    visibility_timeout: Seconds = Seconds(30)


class Retry(_SpecBlock, frozen=True):
    """How often a message is tried before it goes to the dead-letter topic; -1: for ever; None: see `GroupSpec`."""

    max_attempts: Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None = None


class Buffer(_SpecBlock, frozen=True):
    """How much a member reads ahead."""

    messages_per_queue: Count = 1000
    mebibytes_per_queue: Count = 100
    messages_per_topic: Count | None = None
    mebibytes_per_topic: Count | None = None
    mebibytes_per_message: Mebibytes = 4  # a compressed body that is larger is delivered compressed


class Traces(_SpecBlock, frozen=True):
    """Where spans of deliveries are sent."""

    endpoint: Annotated[str, Meta(max_length=2048)]


class Delivery(_SpecBlock, frozen=True):
    """How messages reach the app."""

    mode: Literal["Push", "Pull"] = "Push"
    push: Push = Push()
    pull: Pull = Pull()
    retry: Retry = Retry()
    buffer: Buffer = Buffer()
    traces: Traces | None = None


class Rollout(_SpecBlock, frozen=True):
    """How fast the pods of a fleet are replaced."""

    max_surge: CountOrPercent = 1
    max_unavailable: CountOrPercent = 0


class Sidecar(_SpecBlock, frozen=True):
    """The sidecar's container."""

    resources: dict[str, Any] = {}
    auto_upgrade: bool = False


class GroupSpec(_SpecBlock, frozen=True):
    """The spec of a ConsumerGroup."""

    broker: Broker
    subscriptions: Annotated[list[Subscription], Meta(min_length=1)]
    group: GroupName | None = None
    message_model: Literal["Clustering", "Broadcasting"] = "Clustering"
    ordering: Literal["Concurrent", "Orderly"] = "Concurrent"
    start_from: StartFrom = StartFrom()
    delivery: Delivery = Delivery()
    replicas: Annotated[int, Meta(ge=0, le=MAX_INT32)] | None = None
    template: dict[str, Any] | None = None
    rollout: Rollout = Rollout()
    sidecar: Sidecar = Sidecar()
    policy_ref: Reference | None = None
    paused: bool = False

    @property
    def topics(self) -> list[str]:
        """The subscribed topics."""
        return [subscription.topic for subscription in self.subscriptions]

    @property
    def is_orderly(self) -> bool:
        """Whether each queue's messages are delivered one after another."""
        return self.ordering == "Orderly"

    @property
    def max_attempts(self) -> int:
        """How often a message is tried; Orderly groups never skip a message unless the user sets a limit."""
        if self.delivery.retry.max_attempts is not None:
            return self.delivery.retry.max_attempts
        return -1 if self.is_orderly else 16


class QueueRange(_SpecBlock, frozen=True):
    """Some queues of one topic on one broker."""

    topic: Topic
    broker: NonEmptyText
    ids: Ranges


class ConfiguredMember(_SpecBlock, frozen=True):
    """The queues of the member with this index among the sorted names (pod names change with every rollout)."""

    index: Annotated[int, Meta(ge=0)]
    queues: list[QueueRange]


class BrokerRoom(_SpecBlock, frozen=True):
    """The machine room of a broker."""

    broker: NonEmptyText
    room: NonEmptyText


# The strategies' options: each class has the name of its strategy.
class ByConfig(_SpecBlock, frozen=True):
    members: Annotated[list[ConfiguredMember], Meta(min_length=1)]


class ByMachineRoom(_SpecBlock, frozen=True):
    rooms: Annotated[list[NonEmptyText], Meta(min_length=1)]


class MachineRoomNearby(_SpecBlock, frozen=True):
    room_label: NonEmptyText
    brokers: Annotated[list[BrokerRoom], Meta(min_length=1)]
    inner: Literal["Averagely", "AveragelyByCircle", "ConsistentHash", "Sticky"] = "Averagely"


class ConsistentHash(_SpecBlock, frozen=True):
    virtual_nodes: Annotated[int, Meta(ge=1, le=1000)] = 10


class Balanced(_SpecBlock, frozen=True):
    room_label: NonEmptyText | None = None
    brokers: list[BrokerRoom] = []


class Custom(_SpecBlock, frozen=True):
    name: NonEmptyText
    options: dict[str, Any] = {}


class StrategyOptions(_SpecBlock, frozen=True):
    """One block for each strategy that has options."""

    by_config: ByConfig | None = None
    by_machine_room: ByMachineRoom | None = None
    machine_room_nearby: MachineRoomNearby | None = None
    consistent_hash: ConsistentHash | None = None
    balanced: Balanced | None = None
    custom: Custom | None = None


class Handover(_SpecBlock, frozen=True):
    """How queues move from one member to another."""

    mode: Literal["Cooperative", "Immediate"] = "Cooperative"
    drain_timeout: Seconds = Seconds(30)  # limit for a member to finish the messages of a revoked queue
    # Limit for a member that is neither Ready nor reachable, until others get its queues.
    lost_after: Seconds = Seconds(10)


class Triggers(_SpecBlock, frozen=True):
    """When a group is reconciled again."""

    debounce: Seconds = Seconds(0.5)  # minimum time between an assignment and the next moves
    resync: Seconds = Seconds(20)  # interval of reconciling without any event
    unready_grace: Seconds = Seconds(10)  # limit for a member to be unready before it gives up its queues


class Budget(_SpecBlock, frozen=True):
    """How many queues may move in a period."""

    max_moves: Annotated[int, Meta(ge=0, le=MAX_BUDGET_MOVES)]
    per: Seconds = Seconds(60)


StrategyName = Literal[
    "Averagely",
    "AveragelyByCircle",
    "ByConfig",
    "ByMachineRoom",
    "MachineRoomNearby",
    "ConsistentHash",
    "Sticky",
    "Balanced",
    "Custom",
]


class PolicySpec(_SpecBlock, frozen=True):
    """The user's rules for a group's rebalances; the defaults are those of a group without a policy."""

    strategy: StrategyName = "Averagely"
    options: StrategyOptions = StrategyOptions()
    handover: Handover = Handover()
    triggers: Triggers = Triggers()
    budget: Budget | None = None
    paused: bool = False


def parse_group(body: Mapping[str, Any]) -> GroupSpec:
    """Parse a ConsumerGroup's `spec`; raise InvalidSpecError for its first mistake."""
    spec = _parse(body, GroupSpec)
    metadata = body.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    for mistake in group_mistakes(spec, spec.group or name):  # raises for the first one
        raise InvalidSpecError(mistake)
    return spec


def parse_policy(body: Mapping[str, Any]) -> PolicySpec:
    """Parse a RebalancePolicy's `spec`; raise InvalidSpecError for its first mistake."""
    spec = _parse(body, PolicySpec)
    own_block = spec.strategy[0].lower() + spec.strategy[1:]  # the field of `spec.options` for this strategy
    present: set[str] = set()
    for field in msgspec.structs.fields(StrategyOptions):
        if getattr(spec.options, field.name) is not None:
            present.add(field.encode_name)
    for block in sorted(present - {own_block}):
        raise InvalidSpecError(f"spec.options.{block} does not belong to strategy {spec.strategy}; remove it")
    if own_block in _REQUIRED_OPTIONS and own_block not in present:
        raise InvalidSpecError(f"spec.options.{own_block} is missing: strategy {spec.strategy} requires it")
    for mistake in policy_mistakes(spec):  # raises for the first one
        raise InvalidSpecError(mistake)
    return spec


def policy_body(policy: PolicySpec) -> dict[str, Any]:
    """Write a policy as a RebalancePolicy's `spec`, without blocks that are as by default; `parse_policy` reads it."""
    fields: dict[str, Any] = msgspec.to_builtins(policy, enc_hook=Seconds.__str__)
    defaults: dict[str, Any] = msgspec.to_builtins(PolicySpec(), enc_hook=Seconds.__str__)
    body: dict[str, Any] = {"strategy": policy.strategy}
    for name, value in fields.items():
        if value != defaults[name]:
            body[name] = _without_none(value)
    return body


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


_REQUIRED_OPTIONS = {"byConfig", "byMachineRoom", "machineRoomNearby", "custom"}


def _parse(body: Mapping[str, Any], kind: type[T]) -> T:
    spec = body.get("spec")
    try:
        return msgspec.convert({} if spec is None else spec, kind, dec_hook=_decode_duration)
    except msgspec.ValidationError as error:
        raise InvalidSpecError(single_line(_describe_error(str(error), kind))) from None
    except UnicodeEncodeError as error:
        problem = f"spec contains text that is not valid Unicode: {single_line(ascii(error.object), 40)}"
        raise InvalidSpecError(problem) from None
    except RecursionError:
        raise InvalidSpecError("spec is nested too deeply to be read") from None


def _decode_duration(kind: type[Any], value: object) -> object:
    if kind is Seconds:
        return Seconds.parse(value)
    raise NotImplementedError


def _describe_error(error: str, kind: type[Struct]) -> str:
    """Return msgspec's message with the path first, since users look for the field.

    "Expected `int`, got `str` - at `$.replicas`" becomes "spec.replicas: expected int, got str".
    """
    message, _, path = error.partition(" - at ")
    key, _, where = path.strip("`").rpartition("$")  # msgspec writes "key in $.template" if a key is wrong
    if repr(SUBDOMAIN_PATTERN) in message:  # as msgspec quotes it
        return f"spec{where} is not the name of a Kubernetes object; write {NAMING_RULE}"
    choices = f"; choose one of {', '.join(_choices(kind, where))}" if message.startswith("Invalid enum") else ""
    return f"spec{where}: {'of a key, ' if key else ''}{message[0].lower()}{message[1:]}{choices}".replace("`", "")


def _choices(kind: Any, path: str) -> tuple[str, ...]:
    """Return the permitted values of the field at a path in a spec, such as `.subscriptions[...].type`."""
    for name in re.findall(r"[a-z]\w*", path, re.IGNORECASE):
        kind = next(field.type for field in msgspec.structs.fields(kind) if field.encode_name == name)
        while get_origin(kind) not in {None, Literal}:  # the items of a list, or the type of an optional field
            kind = get_args(kind)[0]
    return get_args(kind)
