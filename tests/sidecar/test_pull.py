"""An app that pulls its messages: real HTTP, a sidecar in this process, a cluster in memory."""

import asyncio
import gc
import socket
import time
from base64 import b64decode
from collections import ChainMap, Counter
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from ground.instance import Instance
from ground.poll import soon
from rota import aio
from rota.brokers.memory import BROKER
from rota.brokers.message import Message
from rota.deliveries import decode_deliveries
from rota.model import Reason
from rota.sidecar import agent
from rota.sidecar.delivery import assignment_events, pull, pull_messages, settlement
from sidecar.in_process import DEAD, LONG_VISIBILITY, RETRIES, PulledMessage, a_member, read_event

SHORT_VISIBILITY = {"mode": "Pull", "pull": {"visibilityTimeout": "200ms"}}


@pytest.fixture(autouse=True)
def frequent_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit offsets more often than would be good for a broker."""
    monkeypatch.setattr(agent, "COMMIT_SECONDS", 0.05)


def bodies(messages: list[PulledMessage]) -> list[str]:
    return [b64decode(message["bodyBase64"]).decode() for message in messages]


# Responses to pulls.


def test_pull_hands_out_batch_and_damaged_messages_like_any_other() -> None:
    damaged = Message(RETRIES, 7, b"x", ChainMap({"A": "1"}, {"B": "2"}), body_error="its checksum does not match")
    encoded = msgspec.json.decode(msgspec.json.encode(pull_messages.AppMessage.from_message("m-1", damaged, 2)))
    assert (encoded["properties"], encoded["attempt"], encoded["damage"]) == (
        {"A": "1", "B": "2"},
        2,
        "its checksum does not match",
    )


async def test_pull_message_carries_its_position_attempt_keys_and_properties(
    instance: Instance, tmp_path: Path
) -> None:
    async with a_member(instance, tmp_path, queues=2) as member:
        await member.send("ä", queue=1, TAGS="paid", KEYS="k1 k2", colour="red", UNIQ_KEY="U1")
        [message] = await member.get()
        properties = {"TAGS": "paid", "KEYS": "k1 k2", "colour": "red", "UNIQ_KEY": "U1"}
        assert message.pop("id")
        assert bodies([message]) == ["ä"]
        assert message.pop("bodyBase64")
        assert message == {
            "topic": "orders",
            "broker": BROKER,
            "queue": 1,
            "offset": 0,
            "attempt": 1,
            "tag": "paid",
            "keys": "k1 k2",
            "properties": properties,
        }


async def test_pull_serves_queues_in_turn(instance: Instance, tmp_path: Path) -> None:
    async with a_member(instance, tmp_path, queues=3) as member:
        await member.send(*map(str, range(30)), queue=0)
        await member.send("a", "b", queue=1)
        await member.send("x", "y", queue=2)
        await member.wait_until_buffered(34)
        answers = [await member.get(2) for _ in range(3)]
        assert [len(answer) for answer in answers] == [2, 2, 2]
        assert {message["queue"] for answer in answers for message in answer} == {0, 1, 2}


async def test_pull_response_is_filled_from_several_queues(instance: Instance, tmp_path: Path) -> None:
    async with a_member(instance, tmp_path, queues=3) as member:
        for number in range(3):
            await member.send("a", "b", queue=number)
        await member.wait_until_buffered(6)
        assert Counter(message["queue"] for message in await member.get(5)).total() == 5
        assert len(await member.get(5)) == 1


async def test_pull_response_has_fewer_messages_when_they_are_large(instance: Instance, tmp_path: Path) -> None:
    async with a_member(instance, tmp_path) as member:
        await member.send(*["x" * (1 << 20)] * 12)
        await member.wait_until_buffered(12)
        assert 7 <= len(await member.get(32)) <= 9
        assert 3 <= len(await member.get(32)) <= 5


async def test_pull_long_poll_is_answered_when_messages_arrive(instance: Instance, tmp_path: Path) -> None:
    async with a_member(instance, tmp_path) as member:
        waiting = [asyncio.create_task(member.get(1, "30s")) for _ in range(2)]
        await member.send("a", "b")
        assert sorted(bodies([message for answer in await asyncio.gather(*waiting) for message in answer])) == [
            "a",
            "b",
        ]


async def test_pull_long_poll_without_messages_returns_an_empty_list(instance: Instance, tmp_path: Path) -> None:
    async with a_member(instance, tmp_path) as member:
        assert await member.get(wait="0s") == await member.get(wait="50ms") == []


async def test_pull_long_poll_that_is_cancelled_takes_no_message(instance: Instance, tmp_path: Path) -> None:
    async with a_member(instance, tmp_path) as member:
        waiting = [asyncio.create_task(member.get(wait="30s")) for _ in range(3)]
        await member.get(wait="50ms")  # the polls have arrived by now
        for poll in waiting:
            poll.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await member.send("a")
        [message] = await member.get_all(1)
        assert message["attempt"] == 1


async def test_pull_disconnect_before_the_response_is_written_returns_the_messages(
    instance: Instance, tmp_path: Path
) -> None:
    async with a_member(instance, tmp_path) as member:
        await member.send(*["x" * (1 << 20)] * 7)
        await member.wait_until_buffered(7)
        reader, writer = await asyncio.open_connection(member.address, pull.PORT, limit=1024)
        writer.write(b"GET /v1/messages?max=7 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert (await member.report()).inflight == 7
        writer.transport.abort()
        messages = await member.get_all(7)
        assert {message["attempt"] for message in messages} == {1}
        assert await member.ack(*messages) == []
        await member.wait_until_committed(0, 7)
        assert not [tracked for tracked in gc.get_objects() if type(tracked) is pull_messages.OpenMessage], (
            "bodies would stay for visibilityTimeout"
        )


# Acks, nacks and timeouts.


async def test_ack_out_of_order_commits_only_up_to_the_first_open_message(instance: Instance, tmp_path: Path) -> None:
    async with a_member(instance, tmp_path) as member:
        await member.send("a", "b", "c")
        a, b, c = await member.get_all(3)
        assert await member.ack(c, a) == []
        await member.wait_until_committed(0, 1)
        assert await member.ack(b) == []
        await member.wait_until_committed(0, 3)
        assert await member.metric('messages_total{outcome="done",topic="orders"}') == 3


async def test_ack_of_a_repeated_or_unknown_id_is_returned_as_unknown(instance: Instance, tmp_path: Path) -> None:
    async with a_member(instance, tmp_path) as member:
        await member.send("a", "b")
        a, b = await member.get_all(2)
        assert await member.ack(a, a) == [a["id"]]
        assert await member.nack(a) == [a["id"]]
        assert await member.ack({"id": "never seen"}, b) == ["never seen"]


async def test_retry_of_a_nacked_message_ends_as_a_dead_letter_after_the_last_attempt(
    instance: Instance, tmp_path: Path
) -> None:
    async with a_member(instance, tmp_path, delivery=LONG_VISIBILITY | {"retry": {"maxAttempts": 2}}) as member:
        await member.send("a", UNIQ_KEY="U1")
        [first] = await member.get_all(1)
        assert await member.nack(first) == []
        await member.wait_until_committed(0, 1)
        await member.advance_clock(10)
        [second] = await member.get_all(1)
        assert (second["attempt"], second["topic"], second["queue"]) == (2, "orders", 0)
        assert second["id"] != first["id"]
        assert await member.ack(first) == [first["id"]]
        assert await member.nack(second) == []
        [dead] = await member.wait_for_messages(DEAD)
        assert dead.body == b"a"
        assert await member.metric('messages_total{outcome="later",topic="orders"}') == 1
        assert await member.metric('messages_total{outcome="dead",topic="orders"}') == 1
        assert await member.metric("redelivered_total") == 1
        page = decode_deliveries(await member.fetch("/v1/report/deliveries"))
        assert page
        counted = {(queue.topic, queue.first_attempts): queue.failures for queue in page.queues}
        assert counted == {("orders", 1): {"nack": 1}, (RETRIES.topic, 0): {"nack": 1}}


async def test_pull_visibility_timeout_redelivers_messages_without_ack_or_nack(
    instance: Instance, tmp_path: Path
) -> None:
    async with a_member(instance, tmp_path, delivery=SHORT_VISIBILITY) as member:
        await member.send("a", "b", UNIQ_KEY="U1")
        messages = await member.get_all(2)
        await member.wait_until_committed(0, 2)
        assert await member.ack(*messages) == [message["id"] for message in messages]
        assert await member.metric('messages_total{outcome="expired",topic="orders"}') == 2
        member.settings["delivery"] = LONG_VISIBILITY
        await member.assign(member.all_queues)
        await member.advance_clock(10)
        again = await member.get_all(2)
        assert [message["attempt"] for message in again] == [2, 2]
        assert await member.ack(*again) == []


async def test_pull_visibility_timeout_returns_no_message_of_a_queue_lost_during_a_stall(
    instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio, "STALL_SECONDS", 0.5)
    async with a_member(instance, tmp_path, delivery=SHORT_VISIBILITY) as member:
        member.drain_timeout = 60.0
        await member.send("a")
        await member.get_all(1)
        member.publish([RETRIES])
        time.sleep(1)  # noqa: ASYNC251 - stalls the whole process

        async def is_released() -> bool:
            return not (await member.report()).releasing

        await soon(is_released)
        assert await member.metric('messages_total{outcome="cut",topic="orders"}') == 1
        assert await member.metric('messages_total{outcome="expired",topic="orders"}') == 0


async def test_pull_visibility_timeout_when_shortened_applies_to_open_messages(
    instance: Instance, tmp_path: Path
) -> None:
    async with a_member(instance, tmp_path) as member:
        await member.send("a")
        [message] = await member.get_all(1)
        member.settings["delivery"] = SHORT_VISIBILITY
        await member.assign(member.all_queues)
        await member.wait_until_committed(0, 1)
        assert await member.ack(message) == [message["id"]]


async def test_retry_at_an_unreachable_broker_hands_the_message_out_again_locally(
    instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settlement, "SEND_BACK_RETRY_SECONDS", 0.05)
    async with a_member(instance, tmp_path) as member:
        await member.send("a")
        [first] = await member.get_all(1)
        member.memory.take_down(BROKER)
        await member.nack(first)
        [second] = await member.get_all(1)
        assert second["attempt"] == 1
        assert second["id"] != first["id"]
        member.memory.bring_up(BROKER)
        assert await member.ack(second) == []
        await member.wait_until_committed(0, 1)


async def test_broadcasting_in_pull_mode_has_no_second_attempt(instance: Instance, tmp_path: Path) -> None:
    async with a_member(instance, tmp_path, messageModel="Broadcasting") as member:
        await member.send("a", "b")
        a, _ = await member.get_all(2)
        await member.nack(a)
        member.settings["delivery"] = SHORT_VISIBILITY
        await member.assign(member.all_queues)
        await member.wait_until_buffered(0)
        assert not member.memory.store.logs_of(DEAD.topic)
        assert await member.memory.messages_of(RETRIES) == []


# Drains.


async def test_drain_in_pull_mode_waits_for_open_messages(instance: Instance, tmp_path: Path) -> None:
    async with a_member(instance, tmp_path) as member:
        member.drain_timeout = 60.0
        await member.assign(member.all_queues)
        await member.send("a")
        [message] = await member.get_all(1)
        await member.send("b")
        await member.wait_until_buffered(2)
        await member.begin_drain()
        draining = asyncio.create_task(member.fetch("/v1/drained"))
        assert (await member.report()).state == "draining"
        assert await member.get(wait="50ms") == []
        assert not draining.done()
        assert await member.ack(message) == []
        assert await draining == "drained\n"
        await member.wait_until_committed(0, 1)


async def test_queue_release_in_pull_mode_keeps_open_messages_until_the_drain_timeout(
    instance: Instance, tmp_path: Path
) -> None:
    async with a_member(instance, tmp_path, queues=2) as member:
        await member.send("a", queue=0)
        await member.send("b", queue=1)
        messages = sorted(await member.get_all(2), key=lambda message: str(message["queue"]))
        member.drain_timeout = 60.0
        member.publish([])

        async def revoked() -> bool:
            return not (await member.report()).held

        await soon(revoked)
        assert await member.ack(messages[0]) == []
        await member.wait_until_committed(0, 1)
        assert (await member.report()).releasing == {"orders": {BROKER: "1"}}
        member.drain_timeout = 0.01
        await member.assign(member.all_queues)
        await member.assign([])  # now the delivery is cut
        assert await member.ack(messages[1]) == [messages[1]["id"]]
        assert await member.metric('messages_total{outcome="cut",topic="orders"}') == 1
        await member.assign(member.all_queues)
        [again] = await member.get_all(1)
        assert (bodies([again]), again["attempt"]) == (["b"], 1)
        assert await member.ack(again) == []


async def test_queue_released_and_reassigned_between_pulls_is_handed_out_again(
    instance: Instance, tmp_path: Path
) -> None:
    async with a_member(instance, tmp_path) as member:
        await member.send("a")
        await member.wait_until_buffered(1)
        await member.assign([])
        await member.assign(member.all_queues)
        await member.wait_until_buffered(1)
        assert bodies(await member.get(wait="0s")) == ["a"]


# Assignments.


async def test_pull_assignments_stream_reports_assigned_and_revoked_queues(instance: Instance, tmp_path: Path) -> None:
    async with a_member(instance, tmp_path, queues=4) as member:
        stream = await member.session.get(f"{member.app}/v1/assignments")
        assert stream.content_type == "text/event-stream"
        everything = {RETRIES.topic: {BROKER: "0"}, "orders": {BROKER: "0-3"}}
        assert await read_event(stream) == ("assigned", {"queues": everything, "generation": 1})
        await member.assign([*member.queues[:2], RETRIES])
        assert await read_event(stream) == ("revoked", {"queues": {"orders": {BROKER: "2-3"}}, "generation": 2})
        await member.assign([*member.queues[:2], RETRIES])  # another generation, the same queues
        await member.assign(member.queues[1:4])
        revoked = {RETRIES.topic: {BROKER: "0"}, "orders": {BROKER: "0"}}
        assert await read_event(stream) == ("revoked", {"queues": revoked, "generation": 4})
        assert await read_event(stream) == ("assigned", {"queues": {"orders": {BROKER: "2-3"}}, "generation": 4})
        member.stop_requested.set()
        assert await read_event(stream) == ("revoked", {"queues": {"orders": {BROKER: "1-3"}}, "generation": 4})
        assert await stream.content.read() == b""


async def test_pull_assignments_stream_sends_keep_alives_while_idle(
    instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assignment_events, "KEEP_ALIVE_SECONDS", 0.05)
    async with a_member(instance, tmp_path) as member:
        stream = await member.session.get(f"{member.app}/v1/assignments")
        await read_event(stream)
        assert (await stream.content.readline()).startswith(b":")
        stream.close()


# Invalid requests, and modes.


@pytest.mark.parametrize(
    "query", ["max=0", "max=1001", "max=x", "max=-1", "max=", "wait=10", "wait=x", "max=" + "9" * 5000]
)
async def test_pull_with_invalid_parameters_is_rejected_with_a_sentence(
    instance: Instance, tmp_path: Path, query: str
) -> None:
    async with a_member(instance, tmp_path) as member:
        await member.send("a")
        async with member.session.get(f"{member.app}/v1/messages?{query}") as answer:
            assert answer.status == 400
            assert await answer.text() == "max must be a number from 1 to 1000, wait must be a duration such as 10s\n"
        assert len(await member.get_all(1)) == 1


@pytest.mark.parametrize("text", ["", "x", "[]", "{}", '{"ids": "a"}', '{"ids": [1]}', "\udcff"])
@pytest.mark.parametrize("where", ["acks", "nacks"])
async def test_ack_or_nack_with_an_invalid_body_is_rejected_with_a_sentence(
    instance: Instance, tmp_path: Path, where: str, text: str
) -> None:
    async with a_member(instance, tmp_path) as member:
        body = text.encode(errors="surrogateescape")
        async with member.session.post(f"{member.app}/v1/{where}", data=body) as answer:
            assert answer.status == 400
            assert (await answer.text()).startswith('The body must be {"ids": [...]} with message ids: ')


async def test_pull_by_a_head_request_takes_no_message(instance: Instance, tmp_path: Path) -> None:
    async with a_member(instance, tmp_path) as member:
        await member.send("a")
        await member.wait_until_buffered(1)
        async with member.session.head(f"{member.app}/v1/messages") as answer:
            assert answer.status == 405
        assert len(await member.get(wait="0s")) == 1


async def test_pull_is_refused_in_a_pod_that_shares_the_nodes_network(instance: Instance, tmp_path: Path) -> None:
    async with a_member(instance, tmp_path, shares_node_network=True, delivery=LONG_VISIBILITY) as member:

        async def find_problem() -> str | None:
            return (await member.report()).troubles.get(Reason.PULL_PORT_UNAVAILABLE)

        assert (await soon(find_problem) or "").startswith("The pod uses hostNetwork")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((member.address, pull.PORT), 1)


async def test_pull_mode_is_switched_at_runtime_and_a_port_in_use_is_reported(
    instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "BIND_RETRY_SECONDS", 0.05)
    async with a_member(instance, tmp_path, delivery={"mode": "Push", "push": {"port": 1}}) as member:
        await member.send("a")

        async def app_is_not_listening() -> bool:
            return Reason.APP_NOT_LISTENING in (await member.report()).troubles

        await soon(app_is_not_listening)
        with socket.create_server((member.address, pull.PORT)):
            member.settings["delivery"] = LONG_VISIBILITY
            member.publish(member.all_queues)

            async def find_problem() -> str | None:
                return (await member.report()).troubles.get(Reason.PULL_PORT_UNAVAILABLE)

            assert (
                await soon(find_problem)
                == f"Cannot listen on {member.address}, port {pull.PORT}: Address already in use"
            )
        await member.wait_for_pull_port()
        assert (await member.report()).troubles == {}
        assert bodies(await member.get_all(1)) == ["a"]
        member.settings["delivery"] = {"mode": "Push", "push": {"port": 1}}
        member.drain_timeout = 0.01
        member.publish(member.all_queues)

        async def is_closed() -> bool:
            with suppress(OSError):
                socket.create_connection((member.address, pull.PORT), 1).close()
                return False
            return True

        await soon(is_closed)
