"""Real sidecars that push to real apps, at a real broker, without faults."""

import asyncio
import signal
from collections import Counter
from pathlib import Path

from ground.poll import soon
from ground.rocketmq import RocketMQ
from sidecar.fleet import a_fleet


async def test_push_delivers_every_message_once_also_across_a_restart(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        pod = await fleet.add("a")
        await fleet.grant(a=[*fleet.queues, fleet.retry])
        await fleet.send(400)
        await fleet.wait_until_all_done()
        assert await pod.terminate() == 0
        assert await fleet.cluster.online_consumers(fleet.group, "broker-0") == ()
        pod.start_sidecar()
        await fleet.wait_until_obeyed("a")
        late = await fleet.send(40)
        await fleet.wait_until_all_done()
        assert Counter(delivery.number for delivery in fleet.delivered()) == Counter(range(440))
        assert {delivery.number for delivery in fleet.delivered()[400:]} == {*late}
        await fleet.wait_until_all_committed()
        await fleet.check()


async def test_push_handover_under_load_loses_and_repeats_no_message(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        for name in ("a", "b"):
            pod = await fleet.add(name)
            pod.rules({"seconds": 0.05})
        first, second = fleet.queues[:2], fleet.queues[2:]
        await fleet.grant(a=[*fleet.queues, fleet.retry])
        async with fleet.traffic():
            await fleet.wait_until(lambda: len(fleet.done()) > 50)
            await fleet.hand_over(b=first)
            await fleet.wait_until(lambda: fleet.pods["b"].name in {delivery.member for delivery in fleet.delivered()})
            await fleet.hand_over(a=first[:1], b=second)
            await fleet.hand_over(a=[first[1], *second])
        await fleet.wait_until_all_done()
        counted = Counter(delivery.number for delivery in fleet.delivered())
        assert {*counted.values()} == {1}
        assert {delivery.member for delivery in fleet.delivered()} == {pod.name for pod in fleet.pods.values()}
        await fleet.wait_until_all_committed()
        await fleet.check()


async def test_sidecar_termination_with_a_thousand_messages_in_flight_commits_them(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    async with a_fleet(rocketmq, tmp_path, push={"concurrency": 1400}) as fleet:
        pod, heir = await fleet.add("a"), await fleet.add("b")
        pod.rules({"act": "hold"})
        await fleet.send(1500)
        await fleet.grant(a=fleet.queues)
        await fleet.wait_until(lambda: len(fleet.delivered()) > 1000)  # the last quarter is reserved for other queues
        pod.signal_sidecar(signal.SIGTERM)
        await fleet.wait_until_obeyed("a", "draining")
        pod.rules()
        assert await pod.terminate() == 0
        assert await fleet.cluster.online_consumers(fleet.group, "broker-0") != (), "the other member is online"
        assert pod.client_id not in {
            consumer.client_id for consumer in await fleet.cluster.online_consumers(fleet.group, "broker-0")
        }
        done = len(fleet.done())
        assert done > 1000
        assert sum((await fleet.sample()).values()) == done, "every finished message is committed"
        fleet.note("ended", "a")
        fleet.ended.add("a")
        fleet.owners.clear()
        await fleet.grant(b=fleet.queues)
        heir.rules()
        await fleet.wait_until_all_done()
        assert {*Counter(delivery.number for delivery in fleet.delivered()).values()} == {1}
        await fleet.wait_until_all_committed()
        await fleet.check()


async def test_drain_hook_drains_the_sidecar_before_its_app_ends(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        pod = await fleet.add("a")
        pod.rules({"seconds": 0.1})
        await fleet.grant(a=[*fleet.queues, fleet.retry])
        await fleet.send(100)
        await fleet.wait_until(lambda: len(fleet.done()) > 20)
        assert await pod.run_prestop_hook() == (0, "")
        assert await pod.get(fleet.session, "/v1/drained") == "drained\n"
        report = await fleet.wait_until_obeyed("a", "drained")
        assert (report.held, report.releasing, report.inflight, report.final) == ({}, {}, 0, False)
        assert sum((await fleet.sample()).values()) == len(fleet.done()), "every finished message is committed"
        assert await pod.run_prestop_hook() == (0, "")
        assert await pod.terminate() == 0
        status, error = await pod.run_prestop_hook()
        assert (status, "cannot start the drain" in error, "Traceback" in error) == (1, True, False)
        pod.start_sidecar()
        await fleet.wait_until_obeyed("a", "serving")
        pod.rules()
        await fleet.wait_until_all_done()
        assert {*Counter(delivery.number for delivery in fleet.delivered()).values()} == {1}
        await fleet.check()


async def test_push_to_an_app_that_does_not_listen_yet_costs_no_attempt(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        pod = await fleet.add("a", app=False)
        await fleet.grant(a=[*fleet.queues, fleet.retry])
        await fleet.send(100)

        async def tried() -> bool:
            return 'outcome="away",' in await pod.get(fleet.session, "/metrics")

        await soon(tried)
        await fleet.hand_over(a=[])
        pod.start_app()
        await fleet.wait_until_all_done()
        attempts = Counter((delivery.number, delivery.attempt) for delivery in fleet.delivered())
        assert attempts.keys() >= {(message.number, 1) for message in fleet.sent if message.acked}
        assert {(attempt, times) for (_, attempt), times in attempts.items()} == {(1, 1)}
        assert f'outcome="done",topic="{fleet.queues[0].topic}"}} {float(len(attempts))}' in await pod.get(
            fleet.session, "/metrics"
        )
        await fleet.wait_until_all_committed()
        await fleet.check()


async def test_push_to_a_missing_path_is_reported_and_commits_nothing(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        pod = await fleet.add("a")
        pod.rules({"status": 404})
        await fleet.grant(a=[*fleet.queues, fleet.retry])
        await fleet.send(100)

        async def find_problem() -> str:
            return (await fleet.wait_until_obeyed("a")).troubles.get("AppPathNotFound", "")

        assert "404 to POST /" in await soon(find_problem)
        await fleet.wait_for_deliveries(
            1
        )  # it is tried again and again; how many went out before the first 404 is chance
        assert set((await fleet.sample()).values()) == {0}
        pod.rules()
        await fleet.wait_until_all_done()
        assert {delivery.attempt for delivery in fleet.delivered()} == {1}

        async def has_no_problem() -> bool:  # the app logs the end of a delivery before the sidecar gets the response
            return not (await fleet.wait_until_obeyed("a")).troubles

        await soon(has_no_problem)
        await fleet.wait_until_all_committed()
        await fleet.check()


async def test_offset_reset_by_a_user_is_applied(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        pod = await fleet.add("a")
        await fleet.grant(a=[*fleet.queues, fleet.retry])
        await fleet.send(100)
        await fleet.wait_until_all_done()
        await fleet.wait_until_all_committed()
        fleet.note("reset", "a", fleet.queues)
        await fleet.cluster.reset_offsets(fleet.group, fleet.topic, "broker-0", timestamp=0)
        await fleet.send(4)  # the broker announces a reset in its next response, so these messages end the open pulls
        await fleet.wait_until(lambda: Counter(delivery.number for delivery in fleet.delivered()).total() > 200)
        counts = Counter(delivery.number for delivery in fleet.delivered())
        assert {*range(100)} <= {number for number, times in counts.items() if times == 2}
        await fleet.wait_until_all_committed()
        await fleet.check()
        pod.rules({"seconds": 1})
        await fleet.send(400)
        await fleet.wait_until(lambda: len(fleet.delivered()) > 210)
        fleet.note("reset", "a", fleet.queues)
        printed = await asyncio.to_thread(
            rocketmq.mqadmin, "resetOffsetByTime", "-g", fleet.group, "-t", fleet.topic, "-s", "now"
        )
        assert printed.count("broker-0") >= len(fleet.queues), printed
        pod.rules()
        late = await fleet.send(20)
        await fleet.wait_until_all_done(late)
        assert len(fleet.delivered()) < 500, "it skipped the messages before the new offset"
        await fleet.wait_until_all_committed()
