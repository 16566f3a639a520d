"""Real sidecars at a real broker, delivering to real apps: what they do while all is well."""

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
        await fleet.give(a=[*fleet.queues, fleet.retry])
        await fleet.send(400)
        await fleet.all_done()
        assert await pod.terminate() == 0
        assert await fleet.cluster.online_consumers(fleet.group, "broker-0") == ()
        pod.start_sidecar()
        await fleet.obeys("a")
        late = await fleet.send(40)
        await fleet.all_done()
        assert Counter(it.number for it in fleet.delivered()) == Counter(range(440))
        assert {it.number for it in fleet.delivered()[400:]} == {*late}
        await fleet.all_committed()
        await fleet.check()


async def test_push_handover_under_load_loses_and_repeats_no_message(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        for name in ("a", "b"):
            pod = await fleet.add(name)
            pod.rules({"seconds": 0.05})
        first, second = fleet.queues[:2], fleet.queues[2:]
        await fleet.give(a=[*fleet.queues, fleet.retry])
        async with fleet.traffic():
            await fleet.until(lambda: len(fleet.done()) > 50)
            await fleet.hand_over(b=first)
            await fleet.until(lambda: fleet.pods["b"].name in {it.member for it in fleet.delivered()})
            await fleet.hand_over(a=first[:1], b=second)
            await fleet.hand_over(a=[first[1], *second])
        await fleet.all_done()
        counted = Counter(it.number for it in fleet.delivered())
        assert {*counted.values()} == {1}
        assert {it.member for it in fleet.delivered()} == {pod.name for pod in fleet.pods.values()}
        await fleet.all_committed()
        await fleet.check()


async def test_sidecar_termination_with_a_thousand_messages_in_flight_commits_them(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    async with a_fleet(rocketmq, tmp_path, push={"concurrency": 1400}) as fleet:
        pod, heir = await fleet.add("a"), await fleet.add("b")
        pod.rules({"act": "hold"})
        await fleet.send(1500)
        await fleet.give(a=fleet.queues)
        await fleet.until(lambda: len(fleet.delivered()) > 1000)  # the last quarter is for other queues
        pod.signal_sidecar(signal.SIGTERM)
        await fleet.obeys("a", "draining")
        pod.rules()
        assert await pod.terminate() == 0
        assert await fleet.cluster.online_consumers(fleet.group, "broker-0") != (), "the other one is still there"
        assert pod.client_id not in {
            it.client_id for it in await fleet.cluster.online_consumers(fleet.group, "broker-0")
        }
        at_its_end = len(fleet.done())
        assert at_its_end > 1000
        assert sum((await fleet.sample()).values()) == at_its_end, "all that was done is committed"
        fleet.note("ended", "a")
        fleet.ended.add("a")
        fleet.owners.clear()
        await fleet.give(b=fleet.queues)
        heir.rules()
        await fleet.all_done()
        assert {*Counter(it.number for it in fleet.delivered()).values()} == {1}
        await fleet.all_committed()
        await fleet.check()


async def test_drain_hook_drains_the_sidecar_before_its_app_ends(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        pod = await fleet.add("a")
        pod.rules({"seconds": 0.1})
        await fleet.give(a=[*fleet.queues, fleet.retry])
        await fleet.send(100)
        await fleet.until(lambda: len(fleet.done()) > 20)
        assert await pod.run_prestop_hook() == (0, "")
        assert await pod.get(fleet.session, "/v1/drained") == "drained\n"
        report = await fleet.obeys("a", "drained")
        assert (report.held, report.releasing, report.inflight, report.final) == ({}, {}, 0, False)
        assert sum((await fleet.sample()).values()) == len(fleet.done()), "all that was done is committed"
        assert await pod.run_prestop_hook() == (0, "")
        assert await pod.terminate() == 0
        status, error = await pod.run_prestop_hook()
        assert (status, "cannot start the drain" in error, "Traceback" in error) == (1, True, False)
        pod.start_sidecar()
        await fleet.obeys("a", "serving")
        pod.rules()
        await fleet.all_done()
        assert {*Counter(it.number for it in fleet.delivered()).values()} == {1}
        await fleet.check()


async def test_push_to_an_app_that_does_not_listen_yet_costs_no_attempt(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        pod = await fleet.add("a", app=False)
        await fleet.give(a=[*fleet.queues, fleet.retry])
        await fleet.send(100)

        async def tried() -> bool:
            return 'outcome="away",' in await pod.get(fleet.session, "/metrics")

        await soon(tried)
        await fleet.hand_over(a=[])
        pod.start_app()
        await fleet.all_done()
        found = Counter((it.number, it.attempt) for it in fleet.delivered())
        assert found.keys() >= {(it.number, 1) for it in fleet.sent if it.acked}
        assert {(attempt, times) for (_, attempt), times in found.items()} == {(1, 1)}
        assert f'outcome="done",topic="{fleet.queues[0].topic}"}} {float(len(found))}' in await pod.get(
            fleet.session, "/metrics"
        )
        await fleet.all_committed()
        await fleet.check()


async def test_push_to_a_missing_path_is_reported_and_commits_nothing(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        pod = await fleet.add("a")
        pod.rules({"status": 404})
        await fleet.give(a=[*fleet.queues, fleet.retry])
        await fleet.send(100)

        async def told() -> str:
            return (await fleet.obeys("a")).troubles.get("AppPathNotFound", "")

        assert "404 to POST /" in await soon(told)
        await fleet.more(1)  # it is tried again and again; how many went out before the first 404 is chance
        assert set((await fleet.sample()).values()) == {0}
        pod.rules()
        await fleet.all_done()
        assert {it.attempt for it in fleet.delivered()} == {1}

        async def well() -> bool:  # the app is done with a message a moment before its sidecar hears of it
            return not (await fleet.obeys("a")).troubles

        await soon(well)
        await fleet.all_committed()
        await fleet.check()


async def test_offset_reset_by_a_user_is_applied(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        pod = await fleet.add("a")
        await fleet.give(a=[*fleet.queues, fleet.retry])
        await fleet.send(100)
        await fleet.all_done()
        await fleet.all_committed()
        fleet.note("reset", "a", fleet.queues)
        await fleet.cluster.reset_offsets(fleet.group, fleet.topic, "broker-0", timestamp=0)
        await fleet.send(
            4
        )  # a broker tells it when it is asked the next time, and a question that it holds is the last
        await fleet.until(lambda: Counter(it.number for it in fleet.delivered()).total() > 200)
        assert {*range(100)} <= {
            number for number, times in Counter(it.number for it in fleet.delivered()).items() if times == 2
        }
        await fleet.all_committed()
        await fleet.check()
        pod.rules({"seconds": 1})
        await fleet.send(400)
        await fleet.until(lambda: len(fleet.delivered()) > 210)
        fleet.note("reset", "a", fleet.queues)
        printed = await asyncio.to_thread(
            rocketmq.mqadmin, "resetOffsetByTime", "-g", fleet.group, "-t", fleet.topic, "-s", "now"
        )
        assert printed.count("broker-0") >= len(fleet.queues), printed
        pod.rules()
        late = await fleet.send(20)
        await fleet.all_done(late)
        assert len(fleet.delivered()) < 500, "it did not go through all that lay before the new offset"
        await fleet.all_committed()
