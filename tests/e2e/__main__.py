"""`python -m e2e`: one event after another, under load, on a fleet with a real node and a real broker."""

import argparse
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from chart.charts import Helm, HelmError
from e2e import events
from e2e.consumers import RESULTS, Consumers, broker_of
from e2e.release import Installation
from ground.instance import temporary
from ground.node import RealNode, prepare
from ground.report import Missing, plainly
from rota.kube.client.pod_status import SIDECAR_CONTAINER
from soaking import soak

MAX_MEMBERS = 10  # events during a rebalance add one member
LONG_SECONDS = 1200  # from this duration on, a run starts without an operator
DOWN_SECONDS = 600  # for so long
EVENT_ERRORS = (AssertionError, LookupError, TimeoutError, RuntimeError, HelmError, Missing)


def choose_size(consumers: Consumers, random: Random) -> int:
    """Choose another number of members."""
    return random.choice([size for size in range(1, MAX_MEMBERS + 1) if size != consumers.members])


def choose_pod(consumers: Consumers, random: Random) -> str:
    """Choose a pod."""
    return random.choice(consumers.pods())


def choose_unrestarted_pod(consumers: Consumers, random: Random) -> str:
    """Choose a pod without restarts: the kubelet delays each further restart for longer."""

    def restart_count(pod: str) -> int:
        containers = ("app", SIDECAR_CONTAINER)
        return sum(events.restarts(consumers, pod, container).restart_count for container in containers)

    def unrestarted() -> list[str]:
        return [pod for pod in consumers.pods() if not restart_count(pod)]

    if not unrestarted():
        events.roll_pods(consumers)
    return random.choice(unrestarted())


def choose_seconds(_: Consumers, random: Random) -> int:
    """Choose the duration of an event."""
    return random.randint(10, 90)


Event = Callable[..., None]
Choice = Callable[[Consumers, Random], Any]

# Events, and how their arguments are chosen.
EVENTS: tuple[tuple[Event, tuple[Choice, ...]], ...] = (
    (events.scale_members, (choose_size,)),
    (events.roll_pods, ()),
    (events.delete_pod, (choose_pod,)),
    (events.force_delete_pod, (choose_pod,)),
    (events.exhaust_sidecar_memory, (choose_unrestarted_pod,)),
    (events.crash_app, (choose_unrestarted_pod,)),
    (events.cut_off_from_broker, (choose_pod,)),
    (events.cut_off_from_operators, ()),
    (events.delete_leader, ()),
    (events.force_delete_operators, ()),
    (events.stop_operators, (choose_seconds,)),
    (events.upgrade_chart, ()),
    (events.edit_config_map, ()),
    (events.delete_config_map, ()),
    (events.kill_broker_process, ()),
    (events.kill_broker_while_scaling, (choose_size,)),
)


class Soak:
    """Runs one event after another, each by a seed; after a failed event the group is recreated."""

    def __init__(self, consumers: Consumers, folder: Path) -> None:
        """Write the diagnostics of failed events to the folder."""
        self._consumers = consumers
        self._folder = folder
        self._failed = False

    def failure_of(self, seed: int, down: float = 0) -> str:
        """Run the event of a seed, or stop the operators for `down` seconds; return the failure, or ""."""
        random = Random(seed)
        first_result = len(RESULTS)
        event_name = "before the event"
        needs_recovery = self._failed
        self._failed = True  # until the event has succeeded
        try:
            if needs_recovery:
                recreate(self._consumers)
            self._consumers.resume_watching()
            event, choices = (events.stop_operators, (lambda *_: down,)) if down else self._draw_event(random)
            event_name = event.__name__.replace("_", " ")
            event(self._consumers, *(choose(self._consumers, random) for choose in choices))
            self._failed = False
        except EVENT_ERRORS as error:
            report = self._folder / f"{seed}.txt"
            report.write_text(f"{traceback.format_exc()}\n{self._consumers.diagnostics()}\n")
            return f"{event_name}: {error} ({report})"
        finally:
            for result in RESULTS[first_result:]:
                print(f"seed {seed}: {result}", flush=True)
        return ""

    def _draw_event(self, random: Random) -> tuple[Event, tuple[Choice, ...]]:
        drawn = random.choice(EVENTS)
        return drawn if self._consumers.members <= MAX_MEMBERS else (events.scale_members, (choose_size,))


def recreate(consumers: Consumers) -> None:
    """Recreate the group, with all that it needs."""
    consumers.broker.up()
    installation = consumers.installation
    installation.ensure_installed()
    installation.operator_kubectl("scale", "deploy/rota", "--replicas=2")
    installation.wait_for_operators()
    consumers.delete_group()
    consumers.reset()


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m e2e", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=LONG_SECONDS, help="how long (default: %(default)s)")
    default = f"{DOWN_SECONDS} for a run of {LONG_SECONDS} seconds or more, else none"
    down_help = f"seconds without an operator at the start (default: {default})"
    parser.add_argument("--down", type=float, help=down_help)
    options = parser.parse_args()
    default_down = DOWN_SECONDS if options.seconds >= LONG_SECONDS else 0
    down = default_down if options.down is None else options.down
    codes: list[int] = []

    def work() -> None:
        with temporary("soak") as instance:
            try:
                node = RealNode(instance)
                prepare()
            except Missing as missing:
                print(f"e2e: the soak on a real node is left out. {missing}.", file=sys.stderr)
            else:
                codes.append(run(node, options.first, options.seconds, down))

    return plainly("e2e", work) or sum(codes)


def run(node: RealNode, first: int, seconds: float, down: float) -> int:
    """Run events on a fleet for so many seconds; return an exit code."""
    folder = Path(tempfile.mkdtemp(prefix=f"soak-{first}-"))
    deliveries = folder / "deliveries"
    deliveries.mkdir()
    node.up()
    broker = broker_of(node)
    broker.up()
    consumers = Consumers(Installation.build(node, Helm(folder)), broker, deliveries)
    try:
        consumers.reset()
        soak_run = Soak(consumers, folder)

        def failure_of(seed: int) -> str:
            return soak_run.failure_of(seed, down if seed == first else 0)

        code = soak(failure_of, first, None, seconds=seconds, what="events", every=10)
    finally:
        consumers.stop_watches()
        sent = sum(result.sent for result in RESULTS)
        lost = sum(result.lost for result in RESULTS)
        duplicated = sum(result.duplicated for result in RESULTS)
        print(f"{sent} messages, {lost} lost, {duplicated} twice")
    if not code:
        shutil.rmtree(folder)
    return code


if __name__ == "__main__":
    sys.exit(main())
