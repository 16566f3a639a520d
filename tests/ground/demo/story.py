"""What happens to the fleet: the operator tells why queues moved, and what the apps noted tells what it cost."""

import sys
import time
from collections.abc import Callable, Collection
from statistics import median_high
from threading import Event
from typing import NamedTuple

from ground import programs
from ground.deliveries import again, moves
from ground.demo.stage import CALM, GIVES_UP, GROUP, QUEUES, RATE, ROOT, Stage, Told
from ground.instance import temporary
from ground.report import Missing

Names = Collection[str]

NOTE = f"""
How to read on: a queue that moves is let go by one member and then taken up by another one. Meanwhile it pauses.
Why a queue moved, the operator tells. The rest is counted from what the apps noted of each numbered message:
pauses of queues that moved, messages that came twice, messages that never came (lost). A pause is often longer
than what the operator tells, which ends when members say that they obey: it goes on until the next message is there.
Who leaves in good order finishes and commits first, which takes a moment; who is killed cannot.
Lag is looked at every 15 s, so it may be of a while ago.
The operator counts one queue more than the topic's {QUEUES}: the group's retry queue."""


class Cost(NamedTuple):
    """What a step was like."""

    title: str
    rebalances: int
    moved: int
    pauses: list[float]
    twice: int
    lost: int
    seconds: float  # until all was at rest


def run(seconds: int | None) -> None:
    """Do it all in a ground of its own."""
    with temporary("demo") as instance:
        try:
            stage = Stage(instance)
            stand_up(stage)
            costs = Story(stage).told()
        except (RuntimeError, TimeoutError) as error:
            raise Missing(f"{error} (logs: {instance.keep_logs()})") from None
        except Missing as missing:
            raise Missing(str(missing).replace(f"{instance.folder}/log", str(instance.keep_logs()))) from None
        print(table(costs), flush=True)
        stay(stage, seconds)
    print("Everything is taken down.", flush=True)


def stand_up(stage: Stage) -> None:
    """Start all that the fleet needs, and say what that is."""
    tell(
        "Rota's demo: a fleet of consumers that is scaled, rolled and hurt while messages come. All of it is real, runs"
    )
    tell("as processes on this machine, and is taken down in the end. Ctrl-C ends it at any time.")
    tell("\nStanding up: a Kubernetes control plane, two local nodes, a RocketMQ broker, the operator ...")
    stage.up()
    stage.start_operator()
    stage.send()
    tell(f"A producer sends {RATE} numbered messages a second to the topic {GROUP}, which has {QUEUES} queues.")
    tell(f"The operator's page, to look on in a browser: {stage.address}/")
    tell(NOTE)


class Story:
    """The steps, in their order."""

    def __init__(self, stage: Stage) -> None:
        """Have told nothing yet."""
        self._stage = stage
        self._costs: list[Cost] = []

    def told(self) -> list[Cost]:
        """Let everything happen, and return what it cost."""
        self._step("3 members start", "kubectl apply -f docs/examples/ground/demo.yaml", self._apply, 3)
        self._step("3 become 6", f"kubectl scale cg/{GROUP} --replicas=6", lambda: self._scale(6), 6)
        self._step("6 become 2", f"kubectl scale cg/{GROUP} --replicas=2", lambda: self._scale(2), 2)
        self._step("the fleet is rolled", "its template changes, so each pod is replaced by a new one", self._roll, 2)
        what = "it has no time to say how far it is, so what it did last may come again"
        self._step("a member is killed", what, self._kill, 2)
        what = f"nobody hears it any more; Kubernetes gives it up after {GIVES_UP} s here (by default 50)"
        self._step("a node dies", what, self._lose_node, 2)
        return self._costs

    def _step(self, title: str, how: str, act: Callable[[], Names], members: int) -> None:
        tell(f"\n== {title}: {how}")
        generation = self._stage.fleet().get("summary", {}).get("generation", 0)
        began = time.time()
        fleet = self._stage.settled(members, act())
        seconds = time.time() - began
        lost = self._stage.delivered()
        came = self._stage.came()
        new = [it for it in reversed(fleet["rebalances"]) if it["generation"] > generation]
        pauses = [it.seconds for it in moves(came) if it.at >= began]
        twice = sum(it.at >= began for it in again(came))
        moved = sum(it["moved"] for it in new)
        self._costs.append(Cost(title, len(new), moved, pauses, twice, len(lost), seconds))
        for it in new:
            tell(f"   {it['reason']}: {it['message']}")
            tell(f"      {many(it['moved'], 'queue')} moved in {it['seconds']:.2f} s{forced(it)}")
        for line in shares(fleet):
            tell(f"   {line}")
        lag = fleet["summary"]["lag"]
        tell(f"   {price(self._costs[-1])}")
        tell(f"   at rest after {seconds:.1f} s; lag, when last looked at: {'not known yet' if lag is None else lag}")

    # What happens; each returns the members that are to be gone when it is over.

    def _apply(self) -> Names:
        asked = time.time()
        self._stage.apply()
        tell(f"   the first message was delivered {self._stage.first() - asked:.1f} s after that")
        return ()

    def _scale(self, replicas: int) -> Names:
        self._stage.cluster.kubectl("scale", f"cg/{GROUP}", f"--replicas={replicas}")
        return ()

    def _roll(self) -> Names:
        before = self._stage.where()
        change = '{"spec": {"template": {"metadata": {"labels": {"version": "2"}}}}}'
        self._stage.cluster.kubectl("patch", f"cg/{GROUP}", "--type=merge", "-p", change)
        return before.keys()

    def _kill(self) -> Names:
        victim = min(self._stage.where())
        tell(f"   kubectl delete pod {victim} --force --grace-period=0")
        self._stage.cluster.kubectl("delete", "pod", victim, "--force", "--grace-period=0")
        return [victim]

    def _lose_node(self) -> Names:
        where = self._stage.where()
        node = min(self._stage.nodes, key=lambda it: [*where.values()].count(it.name) or len(where))
        victims = [name for name, its in where.items() if its == node.name]
        tell(f"   {node.name} dies, and with it {' and '.join(victims)}")
        self._stage.instance.kill(node.program)  # what watches over it kills all of its pods' processes
        self._stage.taken_over(2, victims)
        tell(f"   others have taken over; {node.name} comes back, and with it the word that its pods have ended")
        node.up()
        return victims


def shares(fleet: Told) -> list[str]:
    """Say which queues of the topic each member works."""
    names = [it["name"] for it in fleet["members"]]
    owned = {name: [q["id"] for q in fleet["queues"] if q["owner"] == name and q["topic"] == GROUP] for name in names}
    return [f"{name} works {ranges(ids)}" for name, ids in owned.items()]


def ranges(ids: list[int]) -> str:
    """Spell numbers that follow each other as 0-3."""
    starts = [it for it in ids if it - 1 not in ids]
    ends = [it for it in ids if it + 1 not in ids]
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, ends, strict=True)) or "none"


def many(number: int, what: str) -> str:
    """Count something."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def forced(rebalance: Told) -> str:
    """Say how many queues were taken without a word of who had them."""
    return f", {rebalance['forced']} without a word of their member" if rebalance["forced"] else ""


def price(cost: Cost) -> str:
    """Say what a step cost."""
    middle, longest = median_high(cost.pauses or [0]), max(cost.pauses, default=0)
    pause = f"paused for {middle:.2f} s (median), {longest:.2f} s at most" if cost.pauses else ""
    came = f"{many(cost.twice, 'message')} came twice, {cost.lost} lost"
    return f"queues that moved {pause or 'did not pause'}; {came}"


def table(costs: list[Cost]) -> str:
    """Return all steps, a line each."""
    head = ("step", "rebalances", "moved", "pause", "longest", "twice", "lost", "at rest after")
    rows = [
        (
            it.title,
            str(it.rebalances),
            str(it.moved),
            f"{median_high(it.pauses or [0]):.2f} s",
            f"{max(it.pauses, default=0):.2f} s",
            str(it.twice),
            str(it.lost),
            f"{it.seconds:.1f} s",
        )
        for it in costs
    ]
    first, *others = (max(map(len, column)) for column in zip(head, *rows, strict=True))
    form = "  ".join([f"{{:<{first}}}", *(f"{{:>{width}}}" for width in others)])
    lines = [form.format(*row) for row in (head, *rows)]
    return "\n".join(["", lines[0], "-" * len(lines[0]), *lines[1:]])


def stay(stage: Stage, seconds: int | None) -> None:
    """Leave the fleet up for so long, or until Ctrl-C where somebody can press it."""
    if seconds == 0 or (seconds is None and not sys.stdin.isatty()):
        return
    stage.send(CALM)
    until = "until you press Ctrl-C" if seconds is None else f"for {seconds} s"
    tell(f"\nThe fleet works on {until}, with {CALM} messages a second:")
    tell(f"   its page       {stage.address}/")
    tell(f"   by kubectl     {programs.program('kubectl')} --kubeconfig {stage.cluster.kubeconfig} get cg -o wide")
    tell(f"   by Rota        ROTA_OPERATOR={stage.address} {ROOT}/.venv/bin/rota status")
    try:
        Event().wait(seconds)
    except KeyboardInterrupt:
        tell("")


def tell(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)
