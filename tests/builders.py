"""Rosters for tests: what a case does not name is filled in."""

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from rota.model import Queue, Roster

TOPICS = ("orders", "payments", "%RETRY%shop")
BROKERS = ("room1@a", "room1@b", "room2@a", "plain")


def a_roster(queues: int = 8, members: int = 3, owned: dict[int, str] | None = None) -> Roster:
    """Return a roster of one topic on one broker; `owned` names present owners by queue id."""
    listed = [Queue("orders", "broker-a", number) for number in range(queues)]
    current = {listed[number]: name for number, name in (owned or {}).items()}
    return Roster.of(listed, [f"m{number}" for number in range(members)], current)


@st.composite
def rosters(draw: DrawFn, *, topics: tuple[str, ...] = TOPICS, largest: int = 6) -> Roster:
    """Draw a roster of a few topics, brokers and members, with any present owners, gone ones among them."""
    places = st.tuples(st.sampled_from(topics), st.sampled_from(BROKERS), st.integers(0, largest))
    queues = draw(st.lists(places, min_size=1, max_size=4 * largest, unique=True))
    names = st.sampled_from([f"m{number}" for number in range(9)])
    members = draw(st.lists(names, min_size=1, max_size=9, unique=True))
    owners = draw(st.lists(st.one_of(st.none(), names), min_size=len(queues), max_size=len(queues)))
    current = {queue: owner for queue, owner in zip(queues, owners, strict=True) if owner}
    return Roster.of(queues, members, current)
