"""The same events with Rota and with a fleet of Java push consumers, on one broker, one after the other.

`python -m bench.compare [EVENT...] [--write FILE]` runs all of them or those named, prints a table, and puts it into
the file between the lines `<!-- compare -->` and `<!-- /compare -->`. With `--node` Rota's fleet is on a real node, as
users have it, and what happens to both is what happens in good order; Java's consumers are processes there as well.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from bench.fleets import ComparedFleet, Ground, Java, LocalGround, Rota, standing
from bench.node import NodeGround
from bench.reckoning import Line, Run, Unmarked, outcome, replaced, spelled, table
from ground import peers
from ground.poll import eventually
from ground.report import Missing, plainly, say

QUEUES, RATE, SIZE = 16, 2000, 1024
WARM = 8.0  # seconds: a Java that has just started compiles
QUIET = 3.0  # seconds in which nothing comes any more, to believe that nothing will
HUNG = 40.0
MORE = 24


class Act(NamedTuple):
    """What is done to a fleet, so many seconds after what was done to it before."""

    do: Callable[[ComparedFleet], None]
    after: float = 0.0


@dataclass(frozen=True)
class Event:
    """What happens to a fleet of so many members, and for how many seconds it is looked at."""

    what: str
    members: int
    seconds: float
    acts: tuple[Act, ...]
    orderly: bool = False
    queues: int = QUEUES  # in the end


def scale(members: int, after: float = 0.0) -> Act:
    """Have so many members."""
    return Act(lambda fleet: fleet.scale(members), after)


EVENTS = {
    "join": Event("a member joins two others", 2, 35, (scale(3),)),
    "leave": Event("one of three leaves", 3, 18, (scale(2),)),
    "lose": Event("one of three is killed, for good", 3, 20, (Act(lambda fleet: fleet.lose()),)),
    "crash": Event("one of three is killed, and started again", 3, 30, (Act(lambda fleet: fleet.crash()),)),
    "hang": Event(
        "one of three stands still for 40 s",
        3,
        55,
        (Act(lambda fleet: fleet.freeze()), Act(lambda fleet: fleet.thaw(), HUNG)),
    ),
    "roll": Event("rolling restart of four", 4, 60, (Act(lambda fleet: fleet.roll()),)),
    "grow": Event("two become eight", 2, 45, (scale(8),)),
    "twin": Event(
        "a third one with the client id of the second (Rota: of the same template, which is all that can be alike)",
        2,
        22,
        (Act(lambda fleet: fleet.twin()),),
    ),
    "queues": Event("16 queues become 24", 3, 58, (Act(lambda fleet: fleet.queues(MORE)),), queues=MORE),
    "orderly": Event(
        "Orderly: one of two is killed, for good", 2, 68, (Act(lambda fleet: fleet.lose()),), orderly=True
    ),
}


GRACEFUL = ("join", "leave", "roll", "grow", "queues")
ON_A_NODE = (*GRACEFUL, "crash", "lose")


def run(event: Event, fleet: ComparedFleet, ground: Ground) -> Run:
    """Make the fleet, send to it, let it happen, and see what came."""
    fleet.make(event.members)
    sent = int(RATE * (WARM + event.seconds))
    options = {"rate": RATE, "size": SIZE, "sharded": event.orderly, "poll": 1000}
    producer = peers.producer(ground.rocketmq, fleet.topic, sent, **options)
    eventually(lambda: producer.lines("sent"), 30)  # it says so every second
    time.sleep(WARM - 1)
    acts = []
    for act in event.acts:
        time.sleep(act.after)
        acts.append(time.time())
        act.do(fleet)
    eventually(lambda: producer.done, 3 * event.seconds)
    over = time.time()
    _quiet(fleet)
    came = fleet.came()
    fleet.end()
    return Run(came, sent, event.queues, acts, over, fleet.struck)


def _quiet(fleet: ComparedFleet) -> None:
    """Wait until nothing comes any more."""
    noted, since, deadline = fleet.noted(), time.monotonic(), time.monotonic() + 90
    while time.monotonic() - since < QUIET and time.monotonic() < deadline:
        time.sleep(0.2)
        now = fleet.noted()
        if now != noted:
            noted, since = now, time.monotonic()


def compare(names: list[str], keep: Path | None = None, *, node: bool = False) -> list[Line]:
    """Let each event happen to either system."""
    with standing("compare", NodeGround if node else LocalGround) as ground:
        return [_line(ground, name, keep) for name in names]


def _line(ground: Ground, name: str, keep: Path | None) -> Line:
    event, found = EVENTS[name], []
    for kind in (Rota, Java):
        say(f"{event.what}: {kind.__name__}")
        fleet = kind(ground, name, QUEUES, orderly=event.orderly)
        try:
            seen = run(event, fleet, ground)
        except TimeoutError as late:  # it does not say whose
            raise Missing(f"{fleet.topic} was not as it should be in time: {late}") from late
        if keep:
            (keep / f"{fleet.topic}.json").write_text(json.dumps(asdict(seen)))
        found.append(outcome(seen))
    ours, theirs = found
    line = Line(event.what, ours, theirs, event.orderly)
    say(spelled(line))
    return line


def main(arguments: list[str]) -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("events", nargs="*", metavar="EVENT", help=f"of {', '.join(EVENTS)}; none: all of them")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into this file, too")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what came there, for a closer look")
    parser.add_argument("--node", action="store_true", help=f"on a real node, of {', '.join(ON_A_NODE)}; needs root")
    given = parser.parse_args(arguments)
    if given.write and given.events:
        print("compare: --write puts the whole table there; leave out the events.", file=sys.stderr)
        return 2
    offered = [*ON_A_NODE] if given.node else [*EVENTS]
    unknown = [name for name in given.events if name not in offered]
    if unknown:
        where = " on a node" if given.node else ""
        print(f"compare: there is no event {unknown[0]}{where}; choose among {', '.join(offered)}.", file=sys.stderr)
        return 2
    for path, prepare in ((given.keep, _folder), (given.write, _marked)):  # before a quarter of an hour is spent
        try:
            if path:
                prepare(path)
        except (OSError, UnicodeDecodeError, Unmarked) as trouble:
            why = trouble.strerror if isinstance(trouble, OSError) else trouble
            print(f"compare: {path} cannot be written: {why}.", file=sys.stderr)
            return 2
    return plainly("compare", lambda: _work(given.events or offered, given.write, given.keep, node=given.node))


def _folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)


def _marked(path: Path) -> None:
    replaced(path.read_text(), "")


def _work(names: list[str], into: Path | None, keep: Path | None, *, node: bool) -> None:
    lines = compare(names, keep, node=node)
    found = table(lines)
    print(found, flush=True)
    if into:
        into.write_text(replaced(into.read_text(), found))
    if broken := [*promises_broken(zip(names, lines, strict=True))]:
        raise Missing("; ".join(broken))


def promises_broken(lines: Iterable[tuple[str, Line]]) -> Iterator[str]:
    """Say what Rota may never do, whatever it costs in time, and did."""
    for name, line in lines:
        it, graceful = line.ours, name in GRACEFUL
        if it.lost:
            yield f"Rota lost {it.lost} messages where {line.what}"
        if graceful and it.twice:
            yield f"Rota delivered {it.twice} messages twice where {line.what}"
        if it.overlap and (graceful or line.ordered):
            yield f"Two of Rota's members worked one queue for {it.overlap:.2f} s where {line.what}"
        if line.ordered and it.disorder:
            yield f"Rota delivered {it.disorder} messages out of order where {line.what}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
