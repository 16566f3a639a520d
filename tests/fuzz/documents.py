"""Targets: documents that users and pods of a namespace can write: ConfigMaps, reports, annotations, resources."""

import gzip
import hashlib
import json
from contextlib import suppress
from random import Random
from typing import Any

import msgspec

from builders import a_spec
from fuzz.mutations import mutate
from fuzz.target import Target, mutated
from rota import records
from rota.deliveries import decode_deliveries, describe_message
from rota.delivery_totals import GroupDeliveries, MemberDeliveries
from rota.documents import Assignment, AssignmentTooLargeError, Release, Share, decode_assignment, encode_assignment
from rota.kube.workload.reverse_patch import apply_patch, make_patch
from rota.model import Holder, Queue
from rota.queue_offsets import decode_offsets, decode_progress
from rota.ranges import MAX_QUEUES_PER_DOCUMENT
from rota.reports import decode_report
from rota.spec import GroupSpec, PolicySpec, parse_group, parse_policy
from rota.spec.resolved import (
    GroupSettings,
    decode_drain_timeout,
    decode_group_name,
    decode_settings,
    encode_settings,
)

NOW = "2026-11-21T08:00:00.000Z"
_QUEUES = tuple(Queue("orders", "broker-a", number) for number in range(6))
_ASSIGNMENT = Assignment(
    group="shop/orders",
    generation=42,
    issued_at=NOW,
    strategy="Sticky",
    members={"orders-abc": Share("uid-1", _QUEUES[:2]), "orders-xyz": Share("uid-2", _QUEUES[2:5])},
    releasing={_QUEUES[5]: Release(Holder("orders-abc", "uid-1"), "orders-xyz", 42, NOW)},
    forced={_QUEUES[1]: 41},
    spent=((NOW, 4),),
    barrier=7,
    begun={"orders": NOW},
    extra={"later": {"a": [1, None, "x"]}},
)


def _plain_assignment() -> bytes:
    (text,) = encode_assignment(_ASSIGNMENT).values()
    return text.encode() if isinstance(text, str) else text


ASSIGNMENTS = [_plain_assignment(), gzip.compress(_plain_assignment(), mtime=0)]
_BOMB = gzip.compress(b'{"extra":[' + b"[]," * 2**24 + b"0]}", mtime=0)
REPORTS = [
    (
        b'{"member":"orders-abc","uid":"uid-1","generation":42,"revision":3,"reads":2,"state":"draining","final":true,'
        b'"held":{"orders":{"broker-a":"0-3,7"}},"releasing":{"orders":{"broker-b":"0"}},"brokers":{"broker-a":true},'
        b'"troubles":{"BrokerUnreachable":"no answer"},"inflight":1,"incarnation":"b8","uncommitted":[{'
        b'"topic":"orders","broker":"broker-b","id":0,"given":13,"start":4}],"queues":[{"topic":"orders","broker":"broker-a",'
        b'"id":0,"committed":12,"pulled":14,"buffered":2,"locked":false,"start":4,"given":13}]}'
    ),
]
DELIVERIES = [
    (
        b'{"incarnation":"4f1c","age":12.5,"queues":[{"topic":"orders","broker":"broker-a","id":0,"firstAttempts":5,'
        b'"done":2,"failures":{"5xx":3},"activeSeconds":9.5}],"times":[{"topic":"orders","buckets":{"7":3}}],'
        b'"delayed":3,"lastFailure":{"outcome":"5xx","age":1.5,"status":500},"failing":[{"topic":"orders",'
        b'"queueTopic":"%RETRY%shop","broker":"broker-a","id":0,"offset":17,"attempts":4,"age":2.5,'
        b'"outcome":"5xx","status":500}],"next":200}'
    ),
]
SETTINGS = [encode_settings("orders", a_spec(), 30.0, NOW).encode()]
GROUPS = [
    (
        b'{"metadata":{"name":"orders"},"spec":{"broker":{"rocketmq":{"nameServers":["rmq:9876"],"credentialsSecret":'
        b'{"name":"rmq"}}},"subscriptions":[{"topic":"orders","expression":"a || b"}],"policyRef":{"name":"canary"},'
        b'"delivery":{"mode":"Push","retry":{"maxAttempts":16}},"startFrom":{"position":"Earliest"}}}'
    ),
]
POLICIES = [
    (
        b'{"metadata":{"name":"canary"},"spec":{"strategy":"Sticky","triggers":{"debounce":"1s","resync":"20s"},'
        b'"handover":{"drainTimeout":"90s","mode":"Immediate"},"budget":{"maxMoves":4,"per":"1m"},"paused":true}}'
    ),
    (
        b'{"metadata":{"name":"fixed"},"spec":{"strategy":"ByConfig","options":{"byConfig":{"members":[{"index":0,'
        b'"queues":[{"topic":"orders","broker":"broker-a","ids":"0-3,7"}]}]}}}}'
    ),
]
JOURNAL = [
    (
        b'{"schema":1,"kind":"handover","group":"shop/orders","at":"2026-11-21T08:59:59.999Z","generation":6,'
        b'"act":"Revoke","proof":"None","state":"Owned","from":"orders-b","fromUid":"93b7d2f4","to":"orders-a",'
        b'"toUid":"0f8e1c5a","queues":{"orders":{"broker-a":"2-3","broker-b":"0,2"}}}'
    ),
    (
        b'{"schema":1,"kind":"offsets","group":"shop/orders","at":"2026-11-21T09:00:05.012Z","topics":{"orders":'
        b'{"broker-a":{"ids":[0,1],"first":[0,0],"last":[1500,1498],"committed":[1500,null]}}},"verdicts":{"Slow":1}}'
    ),
    (
        b'{"schema":1,"kind":"redelivered","group":"shop/orders","at":"2026-11-21T09:00:03.120Z","cause":"crash",'
        b'"messages":5,"estimate":true,"from":"orders-b","fromUid":"93b7d2f4","to":"orders-a","toUid":"0f8e1c5a",'
        b'"queues":{"orders":{"broker-a":"2"}}}'
    ),
    (
        b'{"schema":1,"kind":"gap","at":"2026-11-21T09:12:40.002Z","writer":"rota-6c8d-x2",'
        b'"since":"2026-11-21T09:03:11.870Z","missing":412}'
    ),
]
_TEMPLATE: dict[str, Any] = {"spec": {"containers": [{"name": "app", "image": "app:1"}], "grace": 30}}
_RAISED: dict[str, Any] = {"spec": {"containers": [{"name": "app", "image": "app:2"}], "grace": 60}}
REVERSE_PATCHES = [make_patch(_RAISED, _TEMPLATE).encode(), make_patch(_TEMPLATE, {"spec": {}}).encode()]


def check_assignment(data: bytes) -> None:
    """Reject an assignment with a ValueError, or read one that survives encoding and decoding."""
    try:
        assignment = decode_assignment(data)
    except ValueError:
        return
    with suppress(AssignmentTooLargeError):
        (text,) = encode_assignment(assignment).values()
        assert decode_assignment(text) == assignment, "it is not read as it was written"


def check_report(data: bytes) -> None:
    """Reject a report with a ValueError, or read one with a limited number of queues."""
    decode_offsets(data)
    decode_progress(data)
    with suppress(ValueError):
        report = decode_report(data)
        assert len(report.active_queues) <= MAX_QUEUES_PER_DOCUMENT, "more queues than a report may name"


def check_deliveries(data: bytes) -> None:
    """Read no page, or one with counters that can be summed up and messages that can be described."""
    if page := decode_deliveries(data):
        deliveries = MemberDeliveries.from_page(page)
        group = GroupDeliveries()
        group.record("uid", "", deliveries, {"orders"}, 0.0)
        group.update_problem(0.0)
        assert all(map(describe_message, deliveries.failing_messages))


def check_settings(data: bytes) -> None:
    """Reject settings with a ValueError; the fields that are also read alone have defaults."""
    text = data.decode(errors="replace")
    assert 0 < decode_drain_timeout(text) < float("inf"), "no drain timeout"
    assert isinstance(decode_group_name(text), str)
    with suppress(ValueError):
        assert isinstance(decode_settings(data), GroupSettings)


def check_spec(data: bytes) -> None:
    """Reject a ConsumerGroup or a RebalancePolicy with a ValueError."""
    with suppress(ValueError, RecursionError):  # raised by the JSON decoder
        body = msgspec.json.decode(data, type=dict[str, Any])
        with suppress(ValueError):
            assert isinstance(parse_group(body), GroupSpec)
        with suppress(ValueError):
            assert isinstance(parse_policy(body), PolicySpec)


def check_journal(data: bytes) -> None:
    """Reject a journal record with a ValueError."""
    with suppress(ValueError):
        assert isinstance(records.decode_record(data), records.Record)


def check_reverse_patch(data: bytes) -> None:
    """Apply the reverse patch in a pod template's annotation; any content must give a template."""
    assert isinstance(apply_patch(_RAISED, data.decode(errors="replace")), dict)


def _with_right_sum(chance: Random) -> bytes:
    """Change an assignment and correct its checksum: otherwise decoding would always stop at the checksum."""
    data = mutate(chance, ASSIGNMENTS[0], ASSIGNMENTS)
    try:
        body = json.loads(data)
        body.pop("sum", None)
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    except (ValueError, AttributeError, TypeError, RecursionError):
        return data
    body["sum"] = hashlib.sha256(text).hexdigest()
    whole = json.dumps(body).encode()
    return gzip.compress(whole, mtime=0) if chance.random() < 0.2 else whole


def _compressed_bomb(chance: Random) -> bytes:
    """Change a compressed assignment, or rarely, because each takes a second, one that is too large decompressed."""
    return mutate(chance, _BOMB if chance.random() < 0.01 else ASSIGNMENTS[1], ASSIGNMENTS)


TARGETS = (
    Target("assignment", check_assignment, (mutated(ASSIGNMENTS), _compressed_bomb, _with_right_sum, _with_right_sum)),
    Target("report", check_report, (mutated(REPORTS),)),
    Target("deliveries", check_deliveries, (mutated(DELIVERIES),)),
    Target("settings", check_settings, (mutated(SETTINGS),)),
    Target("spec", check_spec, (mutated(GROUPS), mutated(POLICIES))),
    Target("journal", check_journal, (mutated(JOURNAL),)),
    Target("reverse_patch", check_reverse_patch, (mutated(REVERSE_PATCHES),)),
)
