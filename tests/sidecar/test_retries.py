"""What becomes of messages that an app does not take, at a real broker whose retries come soon."""

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
        await fleet.give(a=[*fleet.queues, fleet.retry])
        await fleet.send(20)
        await fleet.all_done({*range(20)} - {3})

        async def dead() -> set[int]:
            return await fleet.dead_letters()

        assert await soon(dead) == {3}
        attempts = {number: [it.attempt for it in fleet.delivered() if it.number == number] for number in range(20)}
        assert attempts == {it: [1] for it in range(20)} | {3: [1, 2, 3, 4], 5: [1, 2, 3], 6: [1, 2, 3]}
        assert len({it.id for it in fleet.delivered()}) == 20, "a message keeps its id, however often it is tried"
        await fleet.all_committed()
        await fleet.check()


async def test_message_that_fails_again_and_again_is_named_until_it_is_done(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        pod = await fleet.add("a")
        pod.rules({"numbers": [3], **WRONG})
        await fleet.give(a=[*fleet.queues, fleet.retry])
        await fleet.send(20)

        async def named() -> list[FailingMessage]:
            return (await pod.first_deliveries(fleet.session)).failing

        [message] = await soon(named)
        assert (message.topic, message.queue_topic) == (fleet.topic, fleet.retry.topic)
        assert (message.outcome, message.status, message.attempts >= 3) == ("5xx", 500, True)
        pod.rules()
        await fleet.all_done()

        async def is_over() -> bool:
            return not await named()

        await soon(is_over)


@pytest.mark.slow("a dead letter out of a batch, by whole sidecars")
async def test_dead_letter_of_a_batch_leaves_the_other_messages_consumed(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path, push={"maxBatch": 8, "concurrency": 1}) as fleet:
        pod = await fleet.add("a")
        pod.rules({"act": "hold"})
        await fleet.give(a=[*fleet.queues, fleet.retry])
        await fleet.send(1)
        await fleet.until(fleet.delivered)  # what an app that does not listen yet did not get comes again alone
        await fleet.send(63)

        async def fetched() -> bool:
            report = await fleet.hear("a")
            return report is not None and sum(it.pulled for it in report.queues) == 64

        await soon(fetched)  # or the one would come alone, where it was the first to be read
        pod.rules({"numbers": [13], **DEAD})
        await fleet.all_done({*range(64)} - {13})

        async def dead() -> set[int]:
            return await fleet.dead_letters()

        assert await soon(dead) == {13}
        assert max(it.together for it in fleet.delivered()) == 8
        assert {it.attempt for it in fleet.delivered()} == {1}
        guilty = [it for it in fleet.delivered() if it.number == 13]
        assert [(it.together > 1, it.status) for it in guilty] == [(True, 422), (False, 422)]
        await fleet.all_committed()
        await fleet.check()


async def test_push_to_an_app_that_hangs_on_one_queue_does_not_delay_other_queues(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    async with a_fleet(rocketmq, tmp_path, push={"timeout": "3s"}) as fleet:
        pod = await fleet.add("a")
        pod.rules({"queues": [1], "attempts": [1], "act": "hang"}, {"attempts": [2], "act": "hold"})
        await fleet.send(400)
        await fleet.give(a=[*fleet.queues, fleet.retry])
        await fleet.all_done([it.number for it in fleet.sent if it.queue.id != 1])
        assert not fleet.done() & {it.number for it in fleet.sent if it.queue.id == 1}
        pod.rules()
        await fleet.all_done()
        await fleet.all_committed()
        await fleet.check()


async def test_handover_while_messages_fail_and_await_retry_repeats_no_attempt(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        one, other = await fleet.add("a"), await fleet.add("b")
        for pod in (one, other):
            pod.rules({"attempts": [1, 2], **WRONG})
        await fleet.give(a=[*fleet.queues, fleet.retry])
        async with fleet.traffic(pause=0.05):
            await fleet.until(lambda: len(fleet.delivered()) > 40)
            await fleet.hand_over(b=[*fleet.queues[:2], fleet.retry])
            await fleet.until(lambda: len(other.deliveries(fleet.group, orderly=False)) > 40)
            await fleet.hand_over(a=[*fleet.queues[:2], fleet.retry])
        await fleet.all_done()
        seen = [(it.number, it.attempt) for it in fleet.delivered()]
        assert len(seen) == len(set(seen)), "no attempt is made twice"
        assert {attempt for _, attempt in seen} == {1, 2, 3}
        await fleet.all_committed()
        await fleet.check()


async def test_drain_timeout_cuts_hanging_deliveries_and_another_member_gets_them(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        fleet.drain_timeout = 2.0
        pod, _ = await fleet.add("a"), await fleet.add("b")
        pod.rules({"numbers": [4, 5], "act": "hang"})
        await fleet.give(a=fleet.queues)
        await fleet.send(40)
        await fleet.all_done({*range(40)} - {4, 5})
        await fleet.hand_over(b=fleet.queues)
        await fleet.all_done()
        again = {it.number for it in fleet.delivered() if it.member == fleet.pods["b"].name}
        assert {4, 5} <= again, "from the first that hung on"
        fleet.pods["b"].signal_sidecar(signal.SIGTERM)
        assert await fleet.pods["b"].terminate() == 0
        committed = await fleet.sample()
        assert sum(committed.values()) == 40
