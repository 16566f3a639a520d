"""`python -m sidecar`: fleets of real processes at a real broker, to which things happen, until told to stop."""

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
from sidecar.conftest import QUICK, SHORT_LOCKS
from sidecar.fleet import HURRIED, SidecarFleet, a_fleet
from sidecar.troubles import TROUBLES
from soaking import soak

MEMBERS, QUEUES, HAPPENINGS = 3, 6, 5


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m sidecar", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--runs", type=int, help="how many (default: until interrupted)")
    parser.add_argument("--seconds", type=float, help="how long (default: until interrupted)")
    asked = parser.parse_args()
    with temporary("soak") as instance:
        rocketmq = RocketMQ(instance, settings=QUICK, prefix=SHORT_LOCKS)
        rocketmq.up()

        sums: Counter[str] = Counter()

        def broken(seed: int) -> str:
            return asyncio.run(_broken(rocketmq, seed, sums))

        code = soak(broken, asked.first, asked.runs, seconds=asked.seconds, what="fleets", every=5)
        told = f"{sums['messages']:,} messages, 0 lost, {sums['again']:,} came again, each explained"
        print(f"Of fleets that did not fail: {told}")
        return code


async def _broken(rocketmq: RocketMQ, seed: int, sums: Counter[str]) -> str:
    """Return what a seed's fleet broke, and where its logs are."""
    folder = Path(tempfile.mkdtemp(prefix=f"soak-{seed}-"))
    random = Random(seed)
    happened: list[str] = []
    try:
        sums.update(await _lived(rocketmq, folder, random, happened))
    except (AssertionError, TimeoutError) as error:
        return f"{', '.join(happened)}: {error} ({folder})"
    except Missing as error:
        logs = rocketmq.instance.keep_logs()
        await asyncio.to_thread(rocketmq.up)  # the next fleet needs it
        return f"{', '.join(happened)}: {error} ({logs})"
    shutil.rmtree(folder)
    return ""


async def _lived(rocketmq: RocketMQ, folder: Path, random: Random, happened: list[str]) -> dict[str, int]:
    """Live through what a seed brings; return how many messages came, and how many attempts were made again."""
    orderly: dict[str, Any] = {"ordering": "Orderly"} if random.random() < 1 / 3 else {}
    push = {"timeout": "2s", "maxBatch": random.choice((1, 8))}
    happened.append(f"{orderly.get('ordering', 'Concurrent')} by {push['maxBatch']}")
    async with a_fleet(rocketmq, folder, queues=QUEUES, push=push, **orderly) as fleet:
        fleet.program = ("-c", HURRIED)
        await _begun(fleet)
        async with fleet.traffic(pause=0.05):
            await fleet.more(100)
            for trouble in random.choices(TROUBLES, k=HAPPENINGS):
                happened.append(trouble.__name__)
                await trouble(fleet, random)
            await fleet.more(100)
        await fleet.all_done()
        await fleet.all_committed()
        await fleet.check()
        came = Counter((it.number, it.attempt) for it in fleet.delivered())
        return {"messages": len({number for number, _ in came}), "again": sum(many - 1 for many in came.values())}


async def _begun(fleet: SidecarFleet) -> None:
    names = [f"m{number}" for number in range(MEMBERS)]
    for place, name in enumerate(names):
        pod = await fleet.add(name)
        pod.rules({"seconds": 0.01})
        retry = [] if place or fleet.settings.get("ordering") else [fleet.retry]
        await fleet.give(**{name: [*fleet.queues[place::MEMBERS], *retry]})


if __name__ == "__main__":
    sys.exit(main())
