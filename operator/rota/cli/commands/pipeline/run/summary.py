"""Summary of a run: rows, durations and findings, as values for programs and as text."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rota.cli.console.formatting import print_line
from rota.cli.console.output import print_table
from rota.pipeline.history.audit import OPERATOR_ERRORS, ViolationKind
from rota.pipeline.recommend.backtest import BacktestSummary
from rota.pipeline.report.sections.backtest_section import backtest_value, describe_result
from rota.sentences import pluralize

SECONDS_DECIMALS = 1


@dataclass
class RunSummary:
    """Rows, durations and findings of a run; its steps fill it."""

    lake: str
    read_snapshot: int = 0
    published_snapshot: int = 0
    segments: int = 0
    rows: dict[str, int] = field(default_factory=dict)  # by table the number of written rows
    seconds: dict[str, float] = field(default_factory=dict)  # by step
    violations: dict[str, int] = field(default_factory=lambda: {kind.value: 0 for kind in ViolationKind})  # by kind
    gaps: int = 0  # journal records that report lost records
    quarantined_lines: int = 0
    recommended_changes: int | None = None  # None: no policies were simulated
    report: str | None = None  # path of the report; None: no policies were simulated
    backtest: BacktestSummary | None = None  # None: no advice was tested

    @property
    def operator_errors(self) -> int:
        """Number of violations that are mistakes of the operator."""
        return sum(self.violations.get(kind, 0) for kind in OPERATOR_ERRORS)

    @contextmanager
    def measure(self, step: str) -> Iterator[None]:
        """Record the duration of a step."""
        started_at = time.monotonic()
        yield
        self.seconds[step] = self.seconds.get(step, 0.0) + time.monotonic() - started_at

    def add_rows(self, rows: Mapping[str, int]) -> None:
        """Record by table the number of written rows; it replaces an earlier number of the same table."""
        self.rows.update(rows)

    def to_value(self) -> dict[str, Any]:
        """Return the summary for programs."""
        return {
            "lake": self.lake,
            "snapshot": {"read": self.read_snapshot, "published": self.published_snapshot},
            "segments": self.segments,
            "rows": self.rows,
            "seconds": {step: round(seconds, SECONDS_DECIMALS) for step, seconds in self.seconds.items()},
            "found": {
                "violations": self.violations,
                "gaps": self.gaps,
                "quarantined_lines": self.quarantined_lines,
                "recommended_changes": self.recommended_changes,
                "backtest": None if self.backtest is None else backtest_value(self.backtest),
            },
            "report": self.report,
        }

    def print_text(self) -> None:
        """Print the summary for people."""
        print_table([{"step": step, "seconds": f"{seconds:.1f}"} for step, seconds in self.seconds.items()])
        print_table([{"table": table, "rows": f"{rows:,}"} for table, rows in self.rows.items() if rows])
        lines = pluralize(self.quarantined_lines, "line")
        print_line(f"{pluralize(self.segments, 'new segment')}, {lines} in quarantine, {pluralize(self.gaps, 'gap')}")
        print_line(f"Errors of the operator in queue ownership: {self._count_kinds(OPERATOR_ERRORS)}")
        periods = self._count_kinds((ViolationKind.UNOWNED, ViolationKind.UNKNOWN))
        print_line(f"Periods in which a queue had no owner, or an unknown one: {periods}")
        if self.recommended_changes is not None:
            print_line(f"Groups for which another policy is recommended: {self.recommended_changes}")
        if self.backtest is not None:
            print_line(describe_result(self.backtest))
        if self.report is not None:
            print_line(f"The report is {self.report}")
        print_line(f"The newest snapshot of {self.lake} is {self.published_snapshot}")

    def _count_kinds(self, kinds: Iterable[ViolationKind]) -> str:
        counts = [f"{kind} {self.violations[kind]}" for kind in kinds if self.violations.get(kind)]
        return ", ".join(counts) or "none"
