"""Simulated pod of a replay: its member state comes from the history, and it obeys documents as a real member does."""

from dataclasses import dataclass, field

from rota.model import Holder, Poke, Queue
from rota.planner import DecodedReport, PodSnapshot
from rota.ranges import to_ranges
from rota.reports import Report

FOREVER_SECONDS = 1e9  # longer than any history

REACHABLE_BROKER = "a broker"  # a broker that every member reaches, except one in state CutOff
AWAY_STATES = {"Ended", "Lost"}  # states (planner's MemberState) of a member that neither reports nor consumes


@dataclass
class SimulatedMember:
    """State of a simulated pod and its sidecar."""

    name: str
    uid: str
    index: int  # its number in the arrays of the metrics
    state: str  # a MemberState, as recorded
    room: str | None
    created_at: float
    state_since: float  # time at which its member state changed last
    generation: int = 0  # the generation that it has obeyed; 0: none
    held: tuple[Queue, ...] = ()  # queues that it owns by that generation
    draining: tuple[Queue, ...] = ()  # revoked queues whose messages it still finishes
    has_drained: bool = False  # whether it has drained all queues, as at its end
    poke: Poke = field(default_factory=Poke)
    poked_at: float = 0.0
    _cached_report: DecodedReport | None = None
    _ranges: dict[str, dict[str, str]] = field(default_factory=dict)  # `held` as ranges, for reports

    @property
    def holder(self) -> Holder:
        """The pod as an owner."""
        return Holder(self.name, self.uid)

    @property
    def may_obey(self) -> bool:
        """Whether the pod reads documents and obeys them."""
        return self.state not in {*AWAY_STATES, "Leaving"} and not self.has_drained

    @property
    def may_consume(self) -> bool:
        """Whether the pod delivers messages."""
        return self.may_obey and self.state != "Joining"

    @property
    def is_draining(self) -> bool:
        """Whether the pod still finishes messages of queues that were revoked from it."""
        return bool(self.draining) and self.may_obey

    def set_state(self, state: str, room: str | None, now: float) -> None:
        """Set member state and machine room from now on."""
        self.room = room
        if state != self.state:
            self.state = state
            self.state_since = now
            self._cached_report = None

    def obey(self, generation: int, queues: tuple[Queue, ...]) -> tuple[Queue, ...]:
        """Hold `queues` from now on; return the queues that the member held before and has to drain now."""
        self.generation = generation
        self._cached_report = None
        self.draining = ()
        if queues != self.held:
            still_held = set(queues)
            self.draining = tuple(queue for queue in self.held if queue not in still_held)
            self.held = queues
            self._ranges = to_ranges(queues)
        return self.draining

    def finish_drain(self, *, is_final: bool = False) -> None:
        """End the drain of revoked queues, or of all queues if `is_final`."""
        self.draining = ()
        self._cached_report = None
        if is_final:
            self.held = ()
            self._ranges = {}
            self.has_drained = True

    def to_pod(self, now: float) -> PodSnapshot:
        """Return the pod as input of the planner."""
        is_ready = self.state in {"Ready", "CutOff"}
        has_reported = is_ready or self.generation > 0
        return PodSnapshot(
            name=self.name,
            uid=self.uid,
            started=self.state != "Joining" or self.generation > 0,
            ready=is_ready,
            # Out is unready beyond the grace that the policy gives, so it must have been unready for long.
            stable_for=FOREVER_SECONDS if self.state == "Out" else now - self.state_since,
            age=now - self.created_at,
            terminating=self.state == "Leaving",
            terminating_for=now - self.state_since if self.state == "Leaving" else 0.0,
            ended=self.state == "Ended",
            room=self.room,
            client_id=self.name,
            decoded_report=self._build_report() if has_reported else None,
            unreachable_for=FOREVER_SECONDS if self.state == "Lost" else 0.0,
            cut_off_brokers={REACHABLE_BROKER: FOREVER_SECONDS} if self.state == "CutOff" else {},
            poke=self.poke,
            poked_for=now - self.poked_at,
        )

    def _build_report(self) -> DecodedReport:
        if self._cached_report is None:
            report = Report(
                member=self.name,
                uid=self.uid,
                generation=self.generation,
                state="drained" if self.has_drained else "serving",
                final=self.has_drained,
                held=self._ranges,
                releasing=to_ranges(self.draining),
                brokers={REACHABLE_BROKER: self.state != "CutOff"},
            )
            self._cached_report = DecodedReport(report)
        return self._cached_report
