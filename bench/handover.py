"""Handovers under load: a complete Rota fleet and Java push consumers, on one broker; `compare` has more events."""

from collections.abc import Iterator

from bench.compare import EVENTS, QUEUES, RATE, Event, run, scale
from bench.fleets import Ground, Java, Rota, standing
from bench.measure import Row, Sample
from bench.reckoning import Outcome, outcome

BOTH_WAYS = Event("two members become three, then two", 2, 50, (scale(3), scale(2, delay=25)))


def rows() -> Iterator[Row]:
    """Grow and shrink a fleet under load, then kill a member of an Orderly fleet, with its pod."""
    with standing("bench-handover") as ground:
        ours, theirs = (_outcome(BOTH_WAYS, kind, ground, "both-ways") for kind in (Rota, Java))
        lost, killed = (_outcome(EVENTS["orderly"], kind, ground, "orderly") for kind in (Rota, Java))
    template = "under {:,} messages a second, {}: {} duplicates, {} lost (Java: {} duplicates, {} lost)"
    what = template.format(RATE, BOTH_WAYS.what, ours.twice, ours.lost, theirs.twice, theirs.lost)
    yield Row(f"{what}; pause of a queue that moves", Sample(ours.touched), Sample(theirs.touched), "0, 0, ≤ 1 s")
    yield Row(
        "pause of a queue that does not move", Sample(ours.others or [0.0]), Sample(theirs.others or [0.0]), "none"
    )
    yield Row(
        "an Orderly member is killed: its queues consumed again", Sample(lost.touched), Sample(killed.touched), "≤ 3 s"
    )


def _outcome(event: Event, kind: type[Rota] | type[Java], ground: Ground, name: str) -> Outcome:
    return outcome(run(event, kind(ground, name, QUEUES, orderly=event.orderly), ground))
