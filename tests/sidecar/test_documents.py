"""Real sidecars with invalid, old or missing documents, and with a full disk."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ground.poll import soon
from ground.rocketmq import RocketMQ
from rota.documents import PLAIN_KEY, decode_assignment, encode_assignment
from sidecar.fleet import SidecarFleet, a_fleet
from sidecar.small_disk import a_small_disk, fill


@pytest.mark.slow("a whole sidecar reads truncated, old, modified and deleted documents")
async def test_document_that_is_torn_old_changed_or_deleted_changes_nothing(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        pod = await fleet.add("a")
        await fleet.grant(a=[*fleet.queues, fleet.retry])
        old = fleet.files()
        fleet.publish()
        report = await fleet.wait_until_obeyed("a")
        good = fleet.files()
        whole = str(good[PLAIN_KEY])
        nothing = encode_assignment(replace(decode_assignment(whole), members={}))
        bad = {
            "not a complete JSON object": whole[: len(whole) // 2],
            "its checksum does not match": whole.replace(f'"generation":{fleet.generation}', '"generation":99'),
            "has generation 1; generation 2 is already in force": old[PLAIN_KEY],
            "differs from the assignment of the same generation 2": nothing[PLAIN_KEY],
        }
        for problem, text in bad.items():
            pod.mount({**good, PLAIN_KEY: text})
            await fleet.wait_for_log("a", problem)
            await still_works(fleet, report.held)
        pod.mount({name: text for name, text in good.items() if name != PLAIN_KEY})
        await fleet.wait_for_log("a", "There is no assignment; generation 2 stays in force")
        await still_works(fleet, report.held)
        pod.mount({**good, "group.json": "{"})
        await still_works(fleet, report.held)
        assert "UnsupportedSettings" in (await fleet.wait_until_obeyed("a")).troubles
        shutil.rmtree(pod.documents)
        await still_works(fleet, report.held)
        pod.documents.mkdir()
        fleet.publish()
        await fleet.wait_until_obeyed("a")
        await still_works(fleet, report.held)
        assert (await fleet.wait_until_obeyed("a")).troubles == {}
        await fleet.check()


async def still_works(fleet: SidecarFleet, held: object) -> None:
    await fleet.send(8)
    await fleet.wait_until_all_done()
    report = await fleet.read_report("a")
    assert report
    assert report.held == held


async def test_restart_with_an_older_document_takes_no_queues(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        pod = await fleet.add("a")
        await fleet.grant(a=fleet.queues)
        old = fleet.files()
        await fleet.revoke(fleet.queues)
        await fleet.wait_until_released("a", fleet.queues)
        await fleet.wait_for_log(
            "a", f"A new assignment is in force: 0 queues start, {len(fleet.queues)} queues are released"
        )
        fleet.kill("a", "sidecar")
        pod.mount(old)
        pod.start_sidecar()
        report = await pod.wait_for_report(fleet.session)
        assert report.generation == 2
        await fleet.wait_for_log("a", "has generation 1; generation 2 was obeyed before the restart")
        await fleet.send(8)
        assert (await fleet.wait_until_obeyed("a")).held == {}
        pod.mount(fleet.files())
        fleet.releasing.clear()
        await fleet.grant(a=fleet.queues)
        await fleet.wait_until_all_done()
        await fleet.check()


async def test_disk_full_defers_a_new_generation_until_it_can_be_stored(rocketmq: RocketMQ, tmp_path: Path) -> None:
    first, second = 2, 3
    async with a_fleet(rocketmq, tmp_path) as fleet:
        pod = await fleet.add("a")
        pod.kill_sidecar()
        with a_small_disk(pod.state):
            pod.start_sidecar()
            await pod.wait_for_report(fleet.session)
            await fleet.grant(a=fleet.queues[:first])
            await fleet.send(8, fleet.queues[:first])
            await fleet.wait_until_all_done()
            fill(pod.state)
            for queue in fleet.queues[first:]:
                fleet.owners[queue] = "a"
            fleet.publish()
            for again in range(2):
                await soon_in_trouble(fleet)
                report = await fleet.read_report("a")
                assert report
                assert report.generation == 1, "it reports no generation that it would not know after a restart"
                if not again:
                    await fleet.send(8, fleet.queues[:first])
                    await fleet.wait_until_all_done()
                    await fleet.send(8, fleet.queues[first:])
                    fleet.kill("a", "sidecar")
                    pod.start_sidecar()
                    await pod.wait_for_report(fleet.session)
            assert {delivery.queue for delivery in fleet.delivered()} <= {*fleet.queues[:first]}
            (pod.state / "filler").unlink()
            report = await fleet.wait_until_obeyed("a")
            assert report.generation == second - 1
            await fleet.wait_until_all_done()
            assert (await fleet.wait_until_obeyed("a")).troubles == {}
            assert json.loads((pod.state / "obeyed.json").read_text())["obeyed"] == report.generation
            assert await pod.terminate() == 0
        await fleet.check()


@pytest.mark.slow("a sidecar with a full disk is terminated")
async def test_disk_full_does_not_prevent_termination_of_the_sidecar(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        pod = await fleet.add("a")
        pod.kill_sidecar()
        with a_small_disk(pod.state):
            pod.start_sidecar()
            await pod.wait_for_report(fleet.session)
            await fleet.grant(a=fleet.queues)
            await fleet.send(40)
            await fleet.wait_until_all_done()
            fill(pod.state)
            fleet.publish()
            await soon_in_trouble(fleet)
            await fleet.send(40)
            await fleet.wait_until_all_done()
            assert await pod.terminate() == 0
        await fleet.wait_until_all_committed()
        await fleet.check()


async def soon_in_trouble(fleet: SidecarFleet) -> None:
    async def is_reported() -> bool:
        report = await fleet.read_report("a")
        return bool(report and "StateWriteFailed" in report.troubles)

    await soon(is_reported)
