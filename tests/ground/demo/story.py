"""The steps of the demo. The operator explains why queues moved; the apps' notes show the cost of each move."""

import sys
import time
from collections.abc import Callable, Collection
from statistics import median_high
from threading import Event
from typing import NamedTuple

from ground import programs
from ground.deliveries import queue_moves, repeated_arrivals
from ground.demo.stage import CALM, GIVE_UP_SECONDS, GROUP, QUEUES, RATE, ROOT, Payload, Stage
from ground.instance import temporary
from ground.report import Missing

Names = Collection[str]

NOTE = f"""
How to read the output: in a handover one member releases a queue before another one owns it. Meanwhile it pauses.
The operator explains why queues moved. The other figures are counted from the apps' notes of each numbered message:
pauses of queues that moved, messages that arrived twice, messages that never arrived (lost). A pause is often longer
than the operator's figure, which ends when the members report the new generation; a pause ends with the next message.
A member that is stopped in good order drains and commits first, which takes a moment; a killed member cannot.
Lag is polled every 15 s, so it may be some seconds old.
The operator counts one queue more than the topic's {QUEUES}: the group's retry queue."""


class Cost(NamedTuple):
    """The cost of one step."""

    title: str
    rebalances: int
    moved: int
    pauses: list[float]
    twice: int
    lost: int
    seconds: float  # until the fleet was at rest


def run(seconds: int | None) -> None:
    """Run the whole demo in a ground of its own."""
    with temporary("demo") as instance:
        try:
            stage = Stage(instance)
            start_everything(stage)
            costs = Story(stage).play()
        except (RuntimeError, TimeoutError) as error:
            raise Missing(f"{error} (logs: {instance.keep_logs()})") from None
        except Missing as missing:
            raise Missing(str(missing).replace(f"{instance.folder}/log", str(instance.keep_logs()))) from None
        print(format_table(costs), flush=True)
        keep_running(stage, seconds)
    print("Everything is taken down.", flush=True)


def start_everything(stage: Stage) -> None:
    """Start everything that the fleet needs, and print what is started."""
    show("Rota's demo: a fleet of consumers that is scaled, rolled and disrupted under load. All of it is real, runs")
    show("as processes on this machine, and is taken down in the end. Ctrl-C ends it at any time.")
    show("\nStarting: a Kubernetes control plane, two local nodes, a RocketMQ broker, the operator ...")
    stage.up()
    stage.start_operator()
    stage.send()
    show(f"A producer sends {RATE} numbered messages a second to the topic {GROUP}, which has {QUEUES} queues.")
    show(f"The operator's page, for a browser: {stage.address}/")
    show(NOTE)


class Story:
    """The steps, in their order."""

    def __init__(self, stage: Stage) -> None:
        """Take the stage; `play` runs the steps."""
        self._stage = stage
        self._costs: list[Cost] = []

    def play(self) -> list[Cost]:
        """Run every step, and return the costs."""
        self._step("3 members start", "kubectl apply -f docs/examples/ground/demo.yaml", self._apply, 3)
        self._step("3 become 6", f"kubectl scale cg/{GROUP} --replicas=6", lambda: self._scale(6), 6)
        self._step("6 become 2", f"kubectl scale cg/{GROUP} --replicas=2", lambda: self._scale(2), 2)
        self._step("the fleet is rolled", "its template changes, so each pod is replaced by a new one", self._roll, 2)
        what = "it cannot commit its last offsets, so its last messages may be delivered again"
        self._step("a member is killed", what, self._kill, 2)
        what = f"its heartbeats end; Kubernetes marks it as unreachable after {GIVE_UP_SECONDS} s here (by default 50)"
        self._step("a node dies", what, self._lose_node, 2)
        return self._costs

    def _step(self, title: str, how: str, act: Callable[[], Names], members: int) -> None:
        show(f"\n== {title}: {how}")
        generation = self._stage.fleet().get("summary", {}).get("generation", 0)
        started_at = time.time()
        fleet = self._stage.wait_for_rest(members, act())
        seconds = time.time() - started_at
        lost = self._stage.wait_for_deliveries()
        came = self._stage.came()
        new = [rebalance for rebalance in reversed(fleet["rebalances"]) if rebalance["generation"] > generation]
        pauses = [move.seconds for move in queue_moves(came) if move.at >= started_at]
        twice = sum(arrival.at >= started_at for arrival in repeated_arrivals(came))
        moved = sum(rebalance["moved"] for rebalance in new)
        self._costs.append(Cost(title, len(new), moved, pauses, twice, len(lost), seconds))
        for rebalance in new:
            show(f"   {rebalance['reason']}: {rebalance['message']}")
            moves = f"{count(rebalance['moved'], 'queue')} moved in {rebalance['seconds']:.2f} s"
            show(f"      {moves}{describe_forced(rebalance)}")
        for line in describe_ownership(fleet):
            show(f"   {line}")
        lag = fleet["summary"]["lag"]
        show(f"   {format_cost(self._costs[-1])}")
        show(f"   at rest after {seconds:.1f} s; lag at the last poll: {'not known yet' if lag is None else lag}")

    # The acts; each returns the members that must have disappeared when the step is over.

    def _apply(self) -> Names:
        applied_at = time.time()
        self._stage.apply()
        show(f"   the first message was delivered {self._stage.first_arrival() - applied_at:.1f} s after that")
        return ()

    def _scale(self, replicas: int) -> Names:
        self._stage.cluster.kubectl("scale", f"cg/{GROUP}", f"--replicas={replicas}")
        return ()

    def _roll(self) -> Names:
        previous = self._stage.nodes_by_pod()
        change = '{"spec": {"template": {"metadata": {"labels": {"version": "2"}}}}}'
        self._stage.cluster.kubectl("patch", f"cg/{GROUP}", "--type=merge", "-p", change)
        return previous.keys()

    def _kill(self) -> Names:
        victim = min(self._stage.nodes_by_pod())
        show(f"   kubectl delete pod {victim} --force --grace-period=0")
        self._stage.cluster.kubectl("delete", "pod", victim, "--force", "--grace-period=0")
        return [victim]

    def _lose_node(self) -> Names:
        nodes_by_pod = self._stage.nodes_by_pod()
        node = min(self._stage.nodes, key=lambda node: [*nodes_by_pod.values()].count(node.name) or len(nodes_by_pod))
        victims = [name for name, node_name in nodes_by_pod.items() if node_name == node.name]
        show(f"   {node.name} is killed, and with it {' and '.join(victims)}")
        self._stage.instance.kill(node.program)  # the agent's watcher then kills the processes of all its pods
        self._stage.wait_for_takeover(2, victims)
        show(f"   other members own its queues; {node.name} restarts, and reports that its pods have ended")
        node.up()
        return victims


def describe_ownership(fleet: Payload) -> list[str]:
    """Describe which of the topic's queues each member owns."""
    names = [member["name"] for member in fleet["members"]]
    owned = {
        name: [queue["id"] for queue in fleet["queues"] if queue["owner"] == name and queue["topic"] == GROUP]
        for name in names
    }
    return [f"{name} owns {format_ranges(ids)}" for name, ids in owned.items()]


def format_ranges(ids: list[int]) -> str:
    """Format consecutive numbers as 0-3."""
    starts = [number for number in ids if number - 1 not in ids]
    ends = [number for number in ids if number + 1 not in ids]
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, ends, strict=True)) or "none"


def count(number: int, what: str) -> str:
    """Return the number with its noun, in the plural where it needs one."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def describe_forced(rebalance: Payload) -> str:
    """Describe how many queues were granted although their previous owners never reported the release."""
    return f", {rebalance['forced']} granted without a report of their release" if rebalance["forced"] else ""


def format_cost(cost: Cost) -> str:
    """Describe the cost of a step."""
    middle, longest = median_high(cost.pauses or [0]), max(cost.pauses, default=0)
    pause = f"paused for {middle:.2f} s (median), {longest:.2f} s at most" if cost.pauses else ""
    came = f"{count(cost.twice, 'message')} arrived twice, {cost.lost} lost"
    return f"queues that moved {pause or 'did not pause'}; {came}"


def format_table(costs: list[Cost]) -> str:
    """Format all steps, a line each."""
    head = ("step", "rebalances", "moved", "pause", "longest", "twice", "lost", "at rest after")
    rows = [
        (
            cost.title,
            str(cost.rebalances),
            str(cost.moved),
            f"{median_high(cost.pauses or [0]):.2f} s",
            f"{max(cost.pauses, default=0):.2f} s",
            str(cost.twice),
            str(cost.lost),
            f"{cost.seconds:.1f} s",
        )
        for cost in costs
    ]
    first_width, *other_widths = (max(map(len, column)) for column in zip(head, *rows, strict=True))
    form = "  ".join([f"{{:<{first_width}}}", *(f"{{:>{width}}}" for width in other_widths)])
    lines = [form.format(*row) for row in (head, *rows)]
    return "\n".join(["", lines[0], "-" * len(lines[0]), *lines[1:]])


def keep_running(stage: Stage, seconds: int | None) -> None:
    """Keep the fleet up for this many seconds; None: until Ctrl-C, if the input is a terminal."""
    if seconds == 0 or (seconds is None and not sys.stdin.isatty()):
        return
    stage.send(CALM)
    until = "until you press Ctrl-C" if seconds is None else f"for {seconds} s"
    show(f"\nThe fleet keeps running {until}, with {CALM} messages a second:")
    show(f"   its page       {stage.address}/")
    show(f"   by kubectl     {programs.program('kubectl')} --kubeconfig {stage.cluster.kubeconfig} get cg -o wide")
    show(f"   by Rota        ROTA_OPERATOR={stage.address} {ROOT}/.venv/bin/rota status")
    try:
        Event().wait(seconds)
    except KeyboardInterrupt:
        show("")


def show(text: str) -> None:
    """Print a line, and flush the output."""
    print(text, flush=True)
