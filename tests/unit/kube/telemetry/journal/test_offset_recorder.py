"""Records of offsets and lag in the journal."""

import asyncio

import msgspec
import pytest

from rota import records
from rota.kube.brokers.lag.lag_history import UNKNOWN_QUEUE_LAG, QueueLag
from rota.kube.brokers.lag.lag_poller import GroupLag
from rota.kube.telemetry.journal.offset_recorder import RECORD_INTERVAL_SECONDS, OffsetRecorder
from rota.lag import LagState
from rota.model import Queue

ORDERS, BILLS = ("shop", "orders"), ("shop", "bills")
A, B, C, D = (Queue("orders", "broker-a", number) for number in range(4))
AT = 1_763_712_000.0
LAG = GroupLag(
    {
        B: QueueLag(0, 9, None, 0, 0.0, LagState.KEEPING_UP),
        A: QueueLag(2, 9, 4, 5, 1.0, LagState.SLOW),
        C: UNKNOWN_QUEUE_LAG,
        D: QueueLag(0, 9),
        Queue("%RETRY%orders", "broker-a", 0): QueueLag(0, 0, 0, 0, 0.0, LagState.KEEPING_UP),
    },
    sampled_at=AT,
)


async def test_journal_offsets_record_of_a_lag_sample_can_be_read_back() -> None:
    [record] = await OffsetRecorder(lambda _: LAG).build_due_records([ORDERS], 0.0)
    decoded = records.decode_record(msgspec.json.encode(record))
    assert isinstance(decoded, records.OffsetsRecord)
    assert (decoded.group, decoded.at.timestamp()) == ("shop/orders", AT)
    assert decoded.topics["orders"]["broker-a"] == records.Columns([0, 1], [2, 0], [9, 9], [4, None])
    assert decoded.topics["%RETRY%orders"]["broker-a"] == records.Columns([0], [0], [0], [0])
    assert decoded.verdicts == {"KeepingUp": 2, "Slow": 1}


async def test_journal_offsets_record_is_due_once_a_minute_for_each_group() -> None:
    recorder = OffsetRecorder(lambda _: LAG)
    assert [record["group"] for record in await recorder.build_due_records([ORDERS], 0.0)] == ["shop/orders"]
    assert [record["group"] for record in await recorder.build_due_records([ORDERS, BILLS], 15.0)] == ["shop/bills"]
    after_a_minute = await recorder.build_due_records([ORDERS, BILLS], RECORD_INTERVAL_SECONDS)
    assert [record["group"] for record in after_a_minute] == ["shop/orders"]


async def test_journal_offsets_record_is_due_as_soon_as_lag_is_known() -> None:
    lags = [GroupLag({}), LAG]
    recorder = OffsetRecorder(lambda _: lags.pop(0))
    assert await recorder.build_due_records([ORDERS], 0.0) == []
    assert [record["group"] for record in await recorder.build_due_records([ORDERS], 15.0)] == ["shop/orders"]


async def test_journal_offsets_record_is_made_once_when_polls_of_two_brokers_end_together() -> None:
    recorder = OffsetRecorder(lambda _: LAG)
    records_by_poll = await asyncio.gather(*(recorder.build_due_records([ORDERS], 0.0) for _ in range(2)))
    assert sorted(map(len, records_by_poll)) == [0, 1]


@pytest.mark.parametrize(
    "lag", [GroupLag({}), GroupLag({A: UNKNOWN_QUEUE_LAG}, sampled_at=AT), GroupLag({A: QueueLag(0, 9)}, sampled_at=AT)]
)
async def test_journal_offsets_record_is_omitted_while_lag_is_unknown(lag: GroupLag) -> None:
    assert await OffsetRecorder(lambda _: lag).build_due_records([ORDERS], 0.0) == []
