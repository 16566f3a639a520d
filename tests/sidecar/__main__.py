"""`python -m sidecar`: injects random faults into fleets of real processes at a real broker, until interrupted."""

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from ground.instance import temporary
from ground.report import Missing
from ground.rocketmq import RocketMQ
from sidecar.conftest import FAST_RETRIES, SHORT_LOCKS
from sidecar.faults import FAULTS
from sidecar.fleet import FAST_CLOCKS, SidecarFleet, a_fleet
from soaking import soak

MEMBERS = 3
QUEUES = 6
FAULTS_PER_FLEET = 5


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m sidecar", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--runs", type=int, help="how many (default: until interrupted)")
    parser.add_argument("--seconds", type=float, help="how long (default: until interrupted)")
    arguments = parser.parse_args()
    with temporary("soak") as instance:
        rocketmq = RocketMQ(instance, settings=FAST_RETRIES, prefix=SHORT_LOCKS)
        rocketmq.up()

        sums: Counter[str] = Counter()

        def find_failure(seed: int) -> str:
            return asyncio.run(_find_failure(rocketmq, seed, sums))

        code = soak(find_failure, arguments.first, arguments.runs, seconds=arguments.seconds, what="fleets", every=5)
        summary = f"{sums['messages']:,} messages, 0 lost, {sums['again']:,} came again, each explained"
        print(f"Of fleets that did not fail: {summary}")
        return code


async def _find_failure(rocketmq: RocketMQ, seed: int, sums: Counter[str]) -> str:
    """Run a seed's fleet; return the faults, the failure and the folder of the logs, or nothing if it passed."""
    folder = Path(tempfile.mkdtemp(prefix=f"soak-{seed}-"))
    random = Random(seed)
    events: list[str] = []
    try:
        sums.update(await _run_fleet(rocketmq, folder, random, events))
    except (AssertionError, TimeoutError) as error:
        return f"{', '.join(events)}: {error} ({folder})"
    except Missing as error:
        logs = rocketmq.instance.keep_logs()
        await asyncio.to_thread(rocketmq.up)  # for the next fleet
        return f"{', '.join(events)}: {error} ({logs})"
    shutil.rmtree(folder)
    return ""


async def _run_fleet(rocketmq: RocketMQ, folder: Path, random: Random, events: list[str]) -> dict[str, int]:
    """Run a fleet with random faults; return the number of messages, and of repeated attempts."""
    orderly: dict[str, Any] = {"ordering": "Orderly"} if random.random() < 1 / 3 else {}
    push = {"timeout": "2s", "maxBatch": random.choice((1, 8))}
    events.append(f"{orderly.get('ordering', 'Concurrent')} by {push['maxBatch']}")
    async with a_fleet(rocketmq, folder, queues=QUEUES, push=push, **orderly) as fleet:
        fleet.program = ("-c", FAST_CLOCKS)
        await _start_pods(fleet)
        async with fleet.traffic(pause=0.05):
            await fleet.wait_for_deliveries(100)
            for inject in random.choices(FAULTS, k=FAULTS_PER_FLEET):
                events.append(inject.__name__)
                await inject(fleet, random)
            await fleet.wait_for_deliveries(100)
        await fleet.wait_until_all_done()
        await fleet.wait_until_all_committed()
        await fleet.check()
        attempts = Counter((delivery.number, delivery.attempt) for delivery in fleet.delivered())
        numbers = {number for number, _ in attempts}
        return {"messages": len(numbers), "again": sum(count - 1 for count in attempts.values())}


async def _start_pods(fleet: SidecarFleet) -> None:
    for index in range(MEMBERS):
        name = f"m{index}"
        pod = await fleet.add(name)
        pod.rules({"seconds": 0.01})
        retry = [] if index or fleet.settings.get("ordering") else [fleet.retry]
        await fleet.grant(**{name: [*fleet.queues[index::MEMBERS], *retry]})


if __name__ == "__main__":
    sys.exit(main())
