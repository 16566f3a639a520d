"""Reports the load of the machine at the start of a test run, and the time by folder at its end."""

import os
from collections import defaultdict
from pathlib import PurePath

import pytest

_seconds: defaultdict[str, float] = defaultdict(float)
_tests: defaultdict[str, int] = defaultdict(int)


def pytest_report_header() -> str:
    """Report the machine's load: times of two runs are comparable only on an idle machine."""
    load = os.getloadavg()[0]
    return f"load at the start: {load:.2f} on {os.cpu_count()} cores"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add the time of a test's set-up, call or tear-down to that of its folder."""
    folder = "/".join(PurePath(report.location[0]).parts[:2])
    _seconds[folder] += report.duration
    _tests[folder] += report.when == "call"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the time by folder. With several workers the times add up to more than the run took."""
    terminalreporter.section("time by folder")
    for folder, seconds in sorted(_seconds.items(), key=lambda entry: -entry[1]):
        terminalreporter.write_line(f"{seconds / 60:6.1f} min {_tests[folder]:6} tests  {folder}")
