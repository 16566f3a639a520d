"""Goes through all worlds of a configuration, breadth first: the way to what does not hold is a shortest one.

What decides is real: the planner's `plan()` and the sidecar's `Member`. What is around them is a model, as
hostile as the real thing may be: whatever takes time is a turn of its own, and every order of turns is gone
through. There is no chance in it and no clock. Faults happen so often as a configuration says, everything else
any number of times.

What is left out because it leads to worlds that are gone through anyway: a write that is lost is a plan not made;
a write whose reply is lost, and an operator that dies after its write, are that write followed by a restart; a
document between the shown and the newest one is shown while it is the newest, and read later.
"""

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from simulation.exploration import laws
from simulation.exploration.keys import Keys
from simulation.exploration.setting import Configuration, Setting
from simulation.exploration.turns import at_once, turns
from simulation.exploration.world import ExploredState, Turn
from simulation.judge import Broken

# What happens once there are no faults any more, the first that changes anything first. What is not named here is
# a fault, or need not happen. Who hangs or is cut off comes back first, or stays so: both ways are followed.
HEALING = ("wake", "find")
FAIR = (
    *("back", "start", "answer", "ready", "end", "finished", "make", "show", "read", "see", "hear", "deaf", "confirm"),
    *("drain", "write", "conflict", "plan", "reread", "tick", "exit", "wait"),
)
RANK = {kind: rank for rank, kind in enumerate(HEALING + FAIR)}
NOTHING = len(RANK)  # the rank of what need not happen
REST = -1


class Found(NamedTuple):
    """How much was gone through."""

    states: int
    transitions: int
    plans: int
    kinds: Counter[str]


class Exploration:
    """All worlds of a configuration, numbered in the order in which they are found."""

    def __init__(self, configuration: Configuration) -> None:
        self.setting = Setting(configuration)
        self.key = Keys()
        self.known: dict[Any, int] = {}
        self.ways: list[tuple[int, str]] = []  # to each world: from which one, and by what
        self.healed: list[int] = []  # from each world: where fair turns lead next
        self.unhealed: list[int] = []  # the same where nothing heals
        self.ahead: deque[ExploredState] = deque()
        self.kinds: Counter[str] = Counter()

    def run(self) -> Found:
        """Go everywhere; what does not hold is raised with the way to it."""
        self._enter(self._settled(self.setting.first()), REST, "at rest")
        while self.ahead:
            self._expand(len(self.healed), self.ahead.popleft())
        for way in (self.healed, self.unhealed):
            self._comes_to_rest(way)
        return Found(len(self.known), self.kinds.total(), len(self.setting.plans), self.kinds)

    def _settled(self, world: ExploredState) -> ExploredState:
        """Let a world come to rest before anything happens and anybody comes."""
        passed = set()
        while (key := self.key(world)) not in passed:
            passed.add(key)
            fair = [turn for turn in turns(self.setting, world) if turn.kind in RANK and turn.kind != "make"]
            fair = [turn for turn in fair if self.key(turn.world) != key]
            if not fair:
                return world
            world = at_once(self.setting, min(fair, key=lambda turn: RANK[turn.kind]).world)
        raise Broken("It does not come to rest even before anything happens")

    def _enter(self, world: ExploredState, before: int, text: str) -> int:
        """Return a world's number; it is looked at the first time."""
        world = laws.excused(at_once(self.setting, world))
        number = self.known.setdefault(self.key(world), len(self.known))
        if number == len(self.ways):
            self.ways.append((before, text))
            self.ahead.append(world)
            if wrong := laws.objection(world):
                raise self._broken(wrong, number)
        return number

    def _expand(self, number: int, world: ExploredState) -> None:
        healed = unhealed = (NOTHING, REST)
        for kind, text, after in self._turns(world, number):
            there = self._enter(after, number, text)
            if there == number:
                continue
            self.kinds[kind] += 1
            rank = RANK.get(kind, NOTHING)
            if rank < NOTHING:
                healed = min(healed, (rank, there))
            if len(HEALING) <= rank < NOTHING:
                unhealed = min(unhealed, (rank, there))
        self.healed.append(healed[1])
        self.unhealed.append(unhealed[1])
        for rests, is_healed in ((healed[1] == REST, True), (unhealed[1] == REST, False)):
            if rests and (wrong := laws.unrest(world, healed=is_healed)):
                raise self._broken(f"At rest: {wrong}", number)

    def _turns(self, world: ExploredState, number: int) -> Iterator[Turn]:
        """Return what can happen next; where the planner or a member fails on the way, tell the way, too."""
        try:
            yield from turns(self.setting, world)
        except Exception as error:
            error.add_note(self._way(number))
            raise

    def _comes_to_rest(self, way: list[int]) -> None:
        """Follow the fair turns from everywhere: they must end."""
        ends = bytearray(len(way))
        for start in range(len(way)):
            path: dict[int, int] = {}
            at = start
            while at != REST and not ends[at]:
                if at in path:
                    circle = "; ".join(self.ways[it][1] for it in list(path)[path[at] :])
                    raise self._broken(f"It never comes to rest: {circle}; and so on", at)
                path[at] = len(path)
                at = way[at]
            for it in path:
                ends[it] = True

    def _broken(self, why: str, number: int) -> Broken:
        broken = Broken(why)
        broken.add_note(self._way(number))
        return broken

    def _way(self, number: int) -> str:
        """Tell the way to a world as a numbered list."""
        lines: list[str] = []
        while number != REST:
            number, text = self.ways[number]
            lines.append(text)
        return "\n".join(f"{place:4}. {text}" for place, text in enumerate(reversed(lines)))
