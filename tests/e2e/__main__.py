"""`python -m e2e`: a fleet on a real node, with a real broker, to which one thing after another happens, under load."""

import argparse
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from chart.charts import Helm, Refused
from e2e import events
from e2e.consumers import VERDICTS, Consumers, broker_of
from e2e.release import Installed
from ground.instance import temporary
from ground.node import RealNode, prepare
from ground.report import Missing, plainly
from rota.kube.client.pod_status import SIDECAR_CONTAINER
from soaking import soak

MOST = 10  # members; a handover that something happens in the middle of is one to a further member
LONG, DOWN = 1200, 600  # seconds: a run as long as that begins with no operator for so long
WRONG = (
    AssertionError,
    LookupError,
    TimeoutError,
    RuntimeError,
    Refused,
    Missing,
)  # what an event that fails ends with


def other_size(consumers: Consumers, random: Random) -> int:
    """Choose another number of members."""
    return random.choice([it for it in range(1, MOST + 1) if it != consumers.members])


def any_pod(consumers: Consumers, random: Random) -> str:
    """Choose a pod."""
    return random.choice(consumers.pods())


def fresh_pod(consumers: Consumers, random: Random) -> str:
    """Choose a pod in which nothing was started again yet: the kubelet would wait ever longer before it does."""

    def fresh() -> list[str]:
        containers = ("app", SIDECAR_CONTAINER)
        return [it for it in consumers.pods() if not any(events.restarts(consumers, it, of)[0] for of in containers)]

    if not fresh():
        events.rolled(consumers)
    return random.choice(fresh())


def a_while(_: Consumers, random: Random) -> int:
    """Choose how many seconds something lasts."""
    return random.randint(10, 90)


Event = Callable[..., None]
Choice = Callable[[Consumers, Random], Any]

# What may happen, and how it is chosen to what.
EVENTS: tuple[tuple[Event, tuple[Choice, ...]], ...] = (
    (events.scaled, (other_size,)),
    (events.rolled, ()),
    (events.pod_deleted, (any_pod,)),
    (events.pod_deleted_by_force, (any_pod,)),
    (events.sidecar_out_of_memory, (fresh_pod,)),
    (events.app_crashing, (fresh_pod,)),
    (events.cut_off_from_broker, (any_pod,)),
    (events.cut_off_from_operators, ()),
    (events.leader_deleted, ()),
    (events.operators_deleted_by_force, ()),
    (events.no_operator, (a_while,)),
    (events.chart_upgraded, ()),
    (events.record_edited, ()),
    (events.record_deleted, ()),
    (events.broker_killed, ()),
    (events.broker_killed_while_scaling, (other_size,)),
)


class Soak:
    """One event after another, each by a seed; after one that failed the group is made anew."""

    def __init__(self, consumers: Consumers, folder: Path) -> None:
        """Put into that folder what can be known of each that fails."""
        self._consumers, self._folder = consumers, folder
        self._failed = False

    def broken(self, seed: int, down: float = 0) -> str:
        """Return what a seed's event broke: the one that it draws, or no operator for so many seconds."""
        random, told, what = Random(seed), len(VERDICTS), "before anything happened"
        mend, self._failed = self._failed, True
        try:
            if mend:
                afresh(self._consumers)
            self._consumers.look_on()
            event, choices = (events.no_operator, (lambda *_: down,)) if down else self._drawn(random)
            what = event.__name__.replace("_", " ")
            event(self._consumers, *(choose(self._consumers, random) for choose in choices))
            self._failed = False
        except WRONG as error:
            story = self._folder / f"{seed}.txt"
            story.write_text(f"{traceback.format_exc()}\n{self._consumers.story()}\n")
            return f"{what}: {error} ({story})"
        finally:
            for it in VERDICTS[told:]:
                print(f"seed {seed}: {it}", flush=True)
        return ""

    def _drawn(self, random: Random) -> tuple[Event, tuple[Choice, ...]]:
        drawn = random.choice(EVENTS)
        return drawn if self._consumers.members <= MOST else (events.scaled, (other_size,))


def afresh(consumers: Consumers) -> None:
    """Make the group anew, with all that it needs."""
    consumers.broker.up()
    installed = consumers.installed
    installed.ensure()
    installed.home("scale", "deploy/rota", "--replicas=2")
    installed.whole()
    consumers.gone()
    consumers.up()


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m e2e", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=LONG, help="how long (default: %(default)s)")
    told = f"seconds without an operator, to begin with (default: {DOWN} in {LONG} seconds or more, else none)"
    parser.add_argument("--down", type=float, help=told)
    asked = parser.parse_args()
    down = asked.down if asked.down is not None else DOWN * (asked.seconds >= LONG)
    codes: list[int] = []

    def work() -> None:
        with temporary("soak") as instance:
            try:
                node = RealNode(instance)
                prepare()
            except Missing as missing:
                print(f"e2e: the soak on a real node is left out. {missing}.", file=sys.stderr)
            else:
                codes.append(run(node, asked.first, asked.seconds, down))

    return plainly("e2e", work) or sum(codes)


def run(node: RealNode, first: int, seconds: float, down: float) -> int:
    """Have a fleet on a node, and things happen to it for so long; return an exit code."""
    folder = Path(tempfile.mkdtemp(prefix=f"soak-{first}-"))
    deliveries = folder / "deliveries"
    deliveries.mkdir()
    node.up()
    broker = broker_of(node)
    broker.up()
    consumers = Consumers(Installed.on(node, Helm(folder)), broker, deliveries)
    try:
        consumers.up()
        it = Soak(consumers, folder)

        def broken(seed: int) -> str:
            return it.broken(seed, down if seed == first else 0)

        code = soak(broken, first, None, seconds=seconds, what="events", every=10)
    finally:
        consumers.end()
        sent, lost, twice = (sum(getattr(it, what) for it in VERDICTS) for what in ("sent", "lost", "twice"))
        print(f"{sent} messages, {lost} lost, {twice} twice")
    if not code:
        shutil.rmtree(folder)
    return code


if __name__ == "__main__":
    sys.exit(main())
