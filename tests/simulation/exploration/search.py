"""Explores all states of a configuration, breadth first: the trace to a violation is a shortest one.

The deciding code is real: the planner's `plan()` and the sidecar's `Member`. Their environment is a model, as
hostile as the real one may be: each step that takes time is a transition of its own, and every order of
transitions is explored, without chance and without a clock. Faults happen at most as often as the configuration
allows, all other transitions any number of times.

Left out, as they lead to states that are explored anyway: a lost write is a plan that is not made; a write with a
lost response, and an operator that crashes after its write, are that write followed by a restart; a document
between the mounted and the newest one is mounted while it is the newest, and read later. A sent document that
arrives after two newer ones were stored is such a document, too: the volume of its member shows an older one instead,
which has no effect but to be rejected.
"""

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from simulation.exploration import invariants
from simulation.exploration.keys import Keys
from simulation.exploration.setting import Configuration, Setting
from simulation.exploration.state import ExploredState, Transition
from simulation.exploration.transitions import apply_instant_transitions, transitions
from simulation.judge import InvariantError

# Transitions that happen once no fault is left, by rank; the first that changes the state comes first. All other
# kinds are faults, or need not happen. Hung and cut-off pods come back first, or never: both ways are followed.
HEALING = ("wake", "find")
FAIR = (
    *("back", "start", "answer", "ready", "end", "finished", "make", "show", "read", "see", "hear", "deaf", "confirm"),
    *("drain", "write", "conflict", "plan", "reread", "tick", "exit", "wait"),
)
RANK = {kind: rank for rank, kind in enumerate(HEALING + FAIR)}
NO_RANK = len(RANK)  # of transitions that need not happen
REST = -1


class Coverage(NamedTuple):
    """How much an exploration covered."""

    states: int
    transitions: int
    plans: int
    kinds: Counter[str]


class Exploration:
    """All states of a configuration, numbered in the order in which they are reached."""

    def __init__(self, configuration: Configuration) -> None:
        self.setting = Setting(configuration)
        self.key = Keys()
        self.numbers: dict[Any, int] = {}
        self.predecessors: list[tuple[int, str]] = []  # of each state: the previous one, and the transition
        self.next_healed: list[int] = []  # of each state: the successor by fair transitions
        self.next_unhealed: list[int] = []  # the same without healing
        self.frontier: deque[ExploredState] = deque()
        self.kinds: Counter[str] = Counter()

    def run(self) -> Coverage:
        """Explore all states; raise the first violation, with its trace."""
        self._enter(self._settle(self.setting.first()), REST, "at rest")
        while self.frontier:
            self._expand(len(self.next_healed), self.frontier.popleft())
        for successors in (self.next_healed, self.next_unhealed):
            self._check_rest(successors)
        return Coverage(len(self.numbers), self.kinds.total(), len(self.setting.plans), self.kinds)

    def _settle(self, state: ExploredState) -> ExploredState:
        """Bring the first state to rest, before faults and before further pods join."""
        visited = set()
        while (key := self.key(state)) not in visited:
            visited.add(key)
            fair = [
                transition
                for transition in transitions(self.setting, state)
                if transition.kind in RANK and transition.kind != "make"
            ]
            fair = [transition for transition in fair if self.key(transition.state) != key]
            if not fair:
                return state
            state = apply_instant_transitions(
                self.setting, min(fair, key=lambda transition: RANK[transition.kind]).state
            )
        raise InvariantError("The first state does not come to rest")

    def _enter(self, state: ExploredState, predecessor: int, text: str) -> int:
        """Return the number of a state; check its invariants when it is new."""
        state = invariants.forget_resolved_losses(apply_instant_transitions(self.setting, state))
        number = self.numbers.setdefault(self.key(state), len(self.numbers))
        if number == len(self.predecessors):
            self.predecessors.append((predecessor, text))
            self.frontier.append(state)
            if problem := invariants.violation(state):
                raise self._error(problem, number)
        return number

    def _expand(self, number: int, state: ExploredState) -> None:
        healed = unhealed = (NO_RANK, REST)  # rank and successor of the first transition, with healing and without
        for kind, text, next_state in self._transitions(state, number):
            successor = self._enter(next_state, number, text)
            if successor == number:
                continue
            self.kinds[kind] += 1
            rank = RANK.get(kind, NO_RANK)
            if rank < NO_RANK:
                healed = min(healed, (rank, successor))
            if len(HEALING) <= rank < NO_RANK:
                unhealed = min(unhealed, (rank, successor))
        self.next_healed.append(healed[1])
        self.next_unhealed.append(unhealed[1])
        for is_at_rest, is_healed in ((healed[1] == REST, True), (unhealed[1] == REST, False)):
            if is_at_rest and (problem := invariants.unsettled(state, healed=is_healed)):
                raise self._error(f"At rest: {problem}", number)

    def _transitions(self, state: ExploredState, number: int) -> Iterator[Transition]:
        """Return the transitions of a state; an exception of the planner or of a member gets the trace as a note."""
        try:
            yield from transitions(self.setting, state)
        except Exception as error:
            error.add_note(self._trace(number))
            raise

    def _check_rest(self, successors: list[int]) -> None:
        """Follow the fair transitions from every state: they must end."""
        ends = bytearray(len(successors))
        for start in range(len(successors)):
            path: dict[int, int] = {}
            current = start
            while current != REST and not ends[current]:
                if current in path:
                    circle = "; ".join(self.predecessors[visited][1] for visited in list(path)[path[current] :])
                    raise self._error(f"The state never comes to rest: {circle}; and so on", current)
                path[current] = len(path)
                current = successors[current]
            for visited in path:
                ends[visited] = True

    def _error(self, problem: str, number: int) -> InvariantError:
        error = InvariantError(problem)
        error.add_note(self._trace(number))
        return error

    def _trace(self, number: int) -> str:
        """Return the transitions to a state as a numbered list."""
        lines: list[str] = []
        while number != REST:
            number, text = self.predecessors[number]
            lines.append(text)
        return "\n".join(f"{step:4}. {text}" for step, text in enumerate(reversed(lines)))
