"""The same events with Rota and with a fleet of Java push consumers, on one broker, one after the other.

`python -m bench.compare [EVENT...] [--write FILE]` runs all events or the named ones, prints a table, and puts it into
the file between the lines `<!-- compare -->` and `<!-- /compare -->`. With `--node` Rota's fleet runs on a real node,
as users have it, and only some of the events are offered; Java's consumers are processes of this machine even then.
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

QUEUES = 16
RATE = 2000  # messages a second
SIZE = 1024  # bytes of a message
WARM = 8.0  # seconds: a JVM that has just started compiles
QUIET = 3.0  # seconds without a delivery after which no more are expected
HUNG = 40.0  # seconds for which a member is frozen
MORE = 24  # queues, after the topic has grown


class Act(NamedTuple):
    """An action on a fleet, `delay` seconds after the previous one."""

    do: Callable[[ComparedFleet], None]
    delay: float = 0.0


@dataclass(frozen=True)
class Event:
    """The actions on a fleet of so many members, and for how many seconds messages are sent meanwhile."""

    what: str
    members: int
    seconds: float
    acts: tuple[Act, ...]
    orderly: bool = False
    queues: int = QUEUES  # after the event


def scale(members: int, delay: float = 0.0) -> Act:
    """Return the act that changes the number of members."""
    return Act(lambda fleet: fleet.scale(members), delay)


EVENTS = {
    "join": Event("a member joins two others", 2, 35, (scale(3),)),
    "leave": Event("one of three leaves", 3, 18, (scale(2),)),
    "lose": Event("one of three is killed, for good", 3, 20, (Act(lambda fleet: fleet.lose()),)),
    "crash": Event("one of three is killed, and started again", 3, 30, (Act(lambda fleet: fleet.crash()),)),
    "hang": Event(
        "one of three is suspended for 40 s",
        3,
        55,
        (Act(lambda fleet: fleet.freeze()), Act(lambda fleet: fleet.thaw(), HUNG)),
    ),
    "roll": Event("rolling restart of four", 4, 60, (Act(lambda fleet: fleet.roll()),)),
    "grow": Event("two become eight", 2, 45, (scale(8),)),
    "twin": Event(
        "a third one with the second's client id (with Rota: a third pod of the template)",
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
    """Start the fleet, send messages, perform the event's acts, and collect the deliveries."""
    fleet.make(event.members)
    sent = int(RATE * (WARM + event.seconds))
    options = {"rate": RATE, "size": SIZE, "sharded": event.orderly, "poll": 1000}
    producer = peers.producer(ground.rocketmq, fleet.topic, sent, **options)
    eventually(lambda: producer.lines("sent"), 30)  # logged every second
    time.sleep(WARM - 1)
    acts = []
    for act in event.acts:
        time.sleep(act.delay)
        acts.append(time.time())
        act.do(fleet)
    eventually(lambda: producer.done, 3 * event.seconds)
    over = time.time()
    _quiet(fleet)
    came = fleet.came()
    fleet.end()
    return Run(came, sent, event.queues, acts, over, fleet.struck)


def _quiet(fleet: ComparedFleet) -> None:
    """Wait until deliveries have stopped."""
    noted = fleet.noted()
    since = time.monotonic()
    deadline = since + 90
    while time.monotonic() - since < QUIET and time.monotonic() < deadline:
        time.sleep(0.2)
        now = fleet.noted()
        if now != noted:
            noted = now
            since = time.monotonic()


def compare(names: list[str], keep: Path | None = None, *, node: bool = False) -> list[Line]:
    """Run each event with both systems."""
    with standing("compare", NodeGround if node else LocalGround) as ground:
        return [_line(ground, name, keep) for name in names]


def _line(ground: Ground, name: str, keep: Path | None) -> Line:
    event = EVENTS[name]
    outcomes = []
    for kind in (Rota, Java):
        say(f"{event.what}: {kind.__name__}")
        fleet = kind(ground, name, QUEUES, orderly=event.orderly)
        try:
            result = run(event, fleet, ground)
        except TimeoutError as late:  # does not name the fleet
            raise Missing(f"{fleet.topic} was not as it should be in time: {late}") from late
        if keep:
            (keep / f"{fleet.topic}.json").write_text(json.dumps(asdict(result)))
        outcomes.append(outcome(result))
    ours, theirs = outcomes
    line = Line(event.what, ours, theirs, event.orderly)
    say(spelled(line))
    return line


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("events", nargs="*", metavar="EVENT", help=f"of {', '.join(EVENTS)}; none: all of them")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into this file, too")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what came there, for a closer look")
    parser.add_argument("--node", action="store_true", help=f"on a real node, of {', '.join(ON_A_NODE)}; needs root")
    options = parser.parse_args(arguments)
    if options.write and options.events:
        print("compare: --write puts the whole table there; leave out the events.", file=sys.stderr)
        return 2
    offered = [*ON_A_NODE] if options.node else [*EVENTS]
    unknown = [name for name in options.events if name not in offered]
    if unknown:
        where = " on a node" if options.node else ""
        print(f"compare: there is no event {unknown[0]}{where}; choose among {', '.join(offered)}.", file=sys.stderr)
        return 2
    for path, prepare in ((options.keep, _folder), (options.write, _marked)):  # fail now, not after the events
        try:
            if path:
                prepare(path)
        except (OSError, UnicodeDecodeError, Unmarked) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            print(f"compare: {path} cannot be written: {reason}.", file=sys.stderr)
            return 2
    return plainly("compare", lambda: _work(options.events or offered, options.write, options.keep, node=options.node))


def _folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)


def _marked(path: Path) -> None:
    replaced(path.read_text(), "")


def _work(names: list[str], target: Path | None, keep: Path | None, *, node: bool) -> None:
    lines = compare(names, keep, node=node)
    new_table = table(lines)
    print(new_table, flush=True)
    if target:
        target.write_text(replaced(target.read_text(), new_table))
    if broken := [*promises_broken(zip(names, lines, strict=True))]:
        raise Missing("; ".join(broken))


def promises_broken(lines: Iterable[tuple[str, Line]]) -> Iterator[str]:
    """Yield a sentence for each guarantee of Rota that a run violated."""
    for name, line in lines:
        outcome = line.ours
        graceful = name in GRACEFUL
        if outcome.lost:
            yield f"Rota lost {outcome.lost} messages where {line.what}"
        if graceful and outcome.twice:
            yield f"Rota delivered {outcome.twice} messages twice where {line.what}"
        if outcome.overlap and (graceful or line.ordered):
            yield f"Two of Rota's members worked one queue for {outcome.overlap:.2f} s where {line.what}"
        if line.ordered and outcome.disorder:
            yield f"Rota delivered {outcome.disorder} messages out of order where {line.what}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
