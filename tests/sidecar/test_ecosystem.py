"""A sidecar as RocketMQ's own admin tool sees it: a consumer like any other."""

import asyncio
from pathlib import Path

import pytest

from ground.poll import soon
from ground.rocketmq import RocketMQ
from sidecar.fleet import a_fleet


@pytest.mark.slow("a sidecar as RocketMQ's mqadmin sees it")
async def test_sidecar_appears_in_mqadmin_as_an_ordinary_consumer(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:

        async def admin(command: str, *arguments: str) -> str:
            return await asyncio.to_thread(rocketmq.mqadmin, command, "-g", fleet.group, *arguments)

        first, second = await fleet.add("a"), await fleet.add("b")
        ids = {first.client_id, second.client_id}
        await fleet.grant(a=[*fleet.queues[:3], fleet.retry], b=fleet.queues[3:])
        await fleet.send(40)
        await fleet.wait_until_all_done()
        await fleet.wait_until_all_committed()

        printed = await admin("consumerConnection")
        rows = {line.split()[0]: line.split() for line in printed.splitlines() if "@" in line}
        assert rows.keys() == ids
        assert {row[2] for row in rows.values()} == {"PYTHON"}
        assert f"{fleet.topic} " in printed
        for property_value in ("CONSUME_PASSIVELY", "CLUSTERING"):
            assert property_value in printed

        async def shown() -> bool:
            printed = await admin("consumerProgress", "-s", "true")
            lines = [line.split() for line in printed.splitlines() if line.startswith(f"{fleet.topic} ")]
            addresses = {int(line[2]): line[5] for line in lines}
            owners = {queue.id: pod.address for queue in fleet.queues for pod in [fleet.pods[fleet.owners[queue]]]}
            return addresses == owners and "Consume Diff Total: 0" in printed

        await soon(shown)
        printed = await admin("consumerStatus")
        assert all(client_id in printed for client_id in ids)
        assert "Same subscription in the same group of consumer" in printed
        printed = await admin("consumerStatus", "-i", first.client_id)
        rows = {line.split()[2]: line.split() for line in printed.splitlines() if line.startswith(f"{fleet.topic} ")}
        assert rows.keys() >= {str(queue.id) for queue in fleet.queues[:3]}, printed
        assert "PROP_CONSUMER_START_TIMESTAMP" in printed

        assert await first.terminate() == 0
        printed = await admin("consumerConnection")
        assert [line.split()[0] for line in printed.splitlines() if "@" in line] == [second.client_id]
        await fleet.check()
