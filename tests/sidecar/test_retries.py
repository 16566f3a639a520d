"""Messages that an app rejects, at a real broker that retries after 1 s."""

import signal
from pathlib import Path

import pytest

from ground.poll import soon
from ground.rocketmq import RocketMQ
from rota.deliveries import FailingMessage
from sidecar.fleet import a_fleet

WRONG, DEAD = {"status": 500}, {"status": 422}


async def test_retry_returns_failed_messages_by_the_retry_topic_with_attempts_counted(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    async with a_fleet(rocketmq, tmp_path, delivery={"retry": {"maxAttempts": 4}}) as fleet:
        pod = await fleet.add("a")
        pod.rules({"numbers": [3], **WRONG}, {"numbers": [5, 6], "attempts": [1, 2], **WRONG})
        await fleet.grant(a=[*fleet.queues, fleet.retry])
        await fleet.send(20)
        await fleet.wait_until_all_done({*range(20)} - {3})

        assert await soon(fleet.read_dead_letters) == {3}
        attempts = {
            number: [delivery.attempt for delivery in fleet.delivered() if delivery.number == number]
            for number in range(20)
        }
        assert attempts == {number: [1] for number in range(20)} | {3: [1, 2, 3, 4], 5: [1, 2, 3], 6: [1, 2, 3]}
        assert len({delivery.id for delivery in fleet.delivered()}) == 20, "a message keeps its id in all attempts"
        await fleet.wait_until_all_committed()
        await fleet.check()


async def test_message_that_fails_repeatedly_is_reported_until_it_is_done(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        pod = await fleet.add("a")
        pod.rules({"numbers": [3], **WRONG})
        await fleet.grant(a=[*fleet.queues, fleet.retry])
        await fleet.send(20)

        async def failing_messages() -> list[FailingMessage]:
            return (await pod.first_deliveries(fleet.session)).failing

        [message] = await soon(failing_messages)
        assert (message.topic, message.queue_topic) == (fleet.topic, fleet.retry.topic)
        assert (message.outcome, message.status, message.attempts >= 3) == ("5xx", 500, True)
        pod.rules()
        await fleet.wait_until_all_done()

        async def is_over() -> bool:
            return not await failing_messages()

        await soon(is_over)


@pytest.mark.slow("a dead letter from a batch, by whole sidecars")
async def test_dead_letter_of_a_batch_leaves_the_other_messages_consumed(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path, push={"maxBatch": 8, "concurrency": 1}) as fleet:
        pod = await fleet.add("a")
        pod.rules({"act": "hold"})
        await fleet.grant(a=[*fleet.queues, fleet.retry])
        await fleet.send(1)
        # The app listens now: a batch that a closed port refuses is retried as single messages.
        await fleet.wait_until(fleet.delivered)
        await fleet.send(63)

        async def all_are_pulled() -> bool:
            report = await fleet.read_report("a")
            return report is not None and sum(queue.pulled for queue in report.queues) == 64

        await soon(all_are_pulled)  # a message that is pulled alone would not be delivered in a batch
        pod.rules({"numbers": [13], **DEAD})
        await fleet.wait_until_all_done({*range(64)} - {13})

        assert await soon(fleet.read_dead_letters) == {13}
        assert max(delivery.batch_size for delivery in fleet.delivered()) == 8
        assert {delivery.attempt for delivery in fleet.delivered()} == {1}
        rejected = [delivery for delivery in fleet.delivered() if delivery.number == 13]
        assert [(delivery.batch_size > 1, delivery.status) for delivery in rejected] == [(True, 422), (False, 422)]
        await fleet.wait_until_all_committed()
        await fleet.check()


async def test_push_to_an_app_that_hangs_on_one_queue_does_not_delay_other_queues(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    async with a_fleet(rocketmq, tmp_path, push={"timeout": "3s"}) as fleet:
        pod = await fleet.add("a")
        pod.rules({"queues": [1], "attempts": [1], "act": "hang"}, {"attempts": [2], "act": "hold"})
        await fleet.send(400)
        await fleet.grant(a=[*fleet.queues, fleet.retry])
        await fleet.wait_until_all_done([message.number for message in fleet.sent if message.queue.id != 1])
        assert not fleet.done() & {message.number for message in fleet.sent if message.queue.id == 1}
        pod.rules()
        await fleet.wait_until_all_done()
        await fleet.wait_until_all_committed()
        await fleet.check()


async def test_handover_while_messages_fail_and_await_retry_repeats_no_attempt(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        first, second = await fleet.add("a"), await fleet.add("b")
        for pod in (first, second):
            pod.rules({"attempts": [1, 2], **WRONG})
        await fleet.grant(a=[*fleet.queues, fleet.retry])
        async with fleet.traffic(pause=0.05):
            await fleet.wait_until(lambda: len(fleet.delivered()) > 40)
            await fleet.hand_over(b=[*fleet.queues[:2], fleet.retry])
            await fleet.wait_until(lambda: len(second.deliveries(fleet.group, orderly=False)) > 40)
            await fleet.hand_over(a=[*fleet.queues[:2], fleet.retry])
        await fleet.wait_until_all_done()
        attempts = [(delivery.number, delivery.attempt) for delivery in fleet.delivered()]
        assert len(attempts) == len(set(attempts)), "no attempt is made twice"
        assert {attempt for _, attempt in attempts} == {1, 2, 3}
        await fleet.wait_until_all_committed()
        await fleet.check()


async def test_drain_timeout_cuts_hanging_deliveries_and_another_member_gets_them(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        fleet.drain_timeout = 2.0
        pod, _ = await fleet.add("a"), await fleet.add("b")
        pod.rules({"numbers": [4, 5], "act": "hang"})
        await fleet.grant(a=fleet.queues)
        await fleet.send(40)
        await fleet.wait_until_all_done({*range(40)} - {4, 5})
        await fleet.hand_over(b=fleet.queues)
        await fleet.wait_until_all_done()
        repeated = {delivery.number for delivery in fleet.delivered() if delivery.member == fleet.pods["b"].name}
        assert {4, 5} <= repeated, "from the first message that hung"
        fleet.pods["b"].signal_sidecar(signal.SIGTERM)
        assert await fleet.pods["b"].terminate() == 0
        committed = await fleet.sample()
        assert sum(committed.values()) == 40
