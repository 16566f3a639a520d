"""Mutation testing: `python tests/mutants.py [file or folder ...]` makes small changes and runs the tests on each.

The working tree is copied once and never written to. One process collects the tests and records which functions each of
them calls. Every mutant then runs in a fork of that process. A changed function or variable is replaced in place, and
only the tests that call the function run: first the tests that failed recently, then the quick ones. After a change in
the body of a class all modules of the copy are imported again. A failing test or a CPU limit ends the fork.
"""

import contextlib
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial, reduce
from importlib.machinery import SourceFileLoader
from math import ceil
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, settings

from syntax_mutations import Mutant, mutants

ROOT = Path(__file__).parents[1]
ROTA = Path("operator/rota")
PAGE = Path("docs/mutants.md")
PLANNER = ["tests/unit/planner", "tests/unit/test_gates.py"]
TESTS = {  # of each file or folder
    "handover.py": ["tests/unit/test_handover.py", *PLANNER],
    "gates.py": PLANNER,
    "planner/status/journal_records.py": [*PLANNER, "tests/unit/kube/telemetry/journal/test_recorder.py"],
    "planner": PLANNER,
    "lag.py": ["tests/unit/test_lag.py"],
    "kube/brokers/lag/lag_totals.py": ["tests/unit/kube/brokers/lag/test_lag_totals.py"],
    "kube/telemetry/rebalances.py": [
        "tests/unit/kube/telemetry/test_rebalances.py",
        "tests/unit/kube/telemetry/test_traces.py",
    ],
    "strategies": [
        "tests/unit/strategies/test_strategies.py",
        "tests/unit/strategies/test_details.py",
        "tests/unit/strategies/test_golden.py",
        "tests/unit/project/test_policies_page.py",
        "tests/properties",
    ],
}
ARGUMENTS = ["-q", "-s", "--tb=no", "-pno:cacheprovider", "--hypothesis-profile=mutants"]
ARGUMENTS += ["-Wignore::pytest.PytestAssertRewriteWarning"]  # hypothesis is imported before pytest starts
SLOW = 2.0  # seconds: slower tests do not run


def tests_of(path: Path) -> list[str]:
    """Return the tests of a file."""
    return next(tests for folder, tests in TESTS.items() if path.relative_to(ROTA).is_relative_to(folder))


class SelectedTests:
    """Runs selected tests in the given order, and records the failing test."""

    def __init__(self, test_ids: list[str]) -> None:
        self.places = {name: place for place, name in enumerate(test_ids)}
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.places), key=lambda item: self.places[item.nodeid]
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = report.nodeid


class MeasuredTest(NamedTuple):
    """CPU seconds of a test, and the functions that it calls, each by file and qualified name."""

    seconds: float
    called: list[list[str]]


class Trial:
    """Tries mutants in forks of a process that has collected the tests."""

    def __init__(self, folder: Path, paths: list[Path]) -> None:
        self.folder = folder
        self.paths = paths
        self.failed = ""  # the last test that failed
        self.rows: list[tuple[Path, int, int]] = []  # file, its mutants, those that survived
        self.unexplained = 0  # survivors without a reason on the page

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = report.nodeid

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try every mutant instead of running the tests once."""
        measured = _run_in_fork(partial(self._measure_tests, session.items))
        if not isinstance(measured, dict):
            pytest.exit(f"without any mutant this fails: {measured}", returncode=1)
        measurements = {name: MeasuredTest(*values) for name, values in measured.items()}
        for path in self.paths:
            folders = tuple(tests_of(path))
            items = [item for item in session.items if item.nodeid.startswith(folders)]
            items = [item for item in items if measurements[item.nodeid].seconds < SLOW]
            items.sort(key=lambda item: measurements[item.nodeid].seconds)
            planted = 0
            survived = 0
            recent = list[str]()
            for mutant in mutants(path):
                called = [str(self.folder / path), mutant.function]
                chosen = [item for item in items if not mutant.function or called in measurements[item.nodeid].called]
                chosen.sort(key=lambda item: recent.index(item.nodeid) if item.nodeid in recent else len(recent))
                seconds = [measurements[item.nodeid].seconds for item in chosen]
                failed_test = _run_in_fork(partial(self._first_failure, mutant, chosen, seconds))
                has_survived = failed_test == ""  # None: the fork was killed at a limit
                planted += 1
                survived += has_survived
                if has_survived and not has_reason(mutant):
                    self.unexplained += 1
                    print(f"{path}:{mutant.line}: {mutant.description}", flush=True)
                recent = [str(failed_test), *(name for name in recent if name != failed_test)]
            self.rows.append((path, planted, survived))
        return True

    def _measure_tests(self, items: list[pytest.Item]) -> object:
        """Return each test's CPU seconds and the functions that it calls, or the name of a failing test."""
        measurements = {}
        for item in items:
            called: set[tuple[str, str]] = set()

            def note(frame: FrameType, event: str, _: object, into: set[tuple[str, str]] = called) -> None:
                if event == "call":
                    into.add((frame.f_code.co_filename, frame.f_code.co_qualname.partition(".<locals>")[0]))

            began = time.process_time()
            sys.setprofile(note)
            self._run(item)
            sys.setprofile(None)
            if self.failed:
                return self.failed
            measurements[item.nodeid] = time.process_time() - began, sorted(called)
        return measurements

    def _first_failure(self, mutant: Mutant, items: list[pytest.Item], seconds: list[float]) -> str:
        if mutant.function or mutant.variable:
            self._apply_in_place(mutant)
            for item, usual_seconds in zip(items, seconds, strict=True):
                _limit(1 + 3 * usual_seconds)
                self._run(item)
                if self.failed:
                    break
            return self.failed
        _limit(10 + 3 * sum(seconds))
        path = str(self.folder / mutant.path)
        original_get_code = SourceFileLoader.get_code

        def get_code(loader: Any, name: str) -> CodeType | None:
            return mutant.code if loader.path == path else original_get_code(loader, name)

        SourceFileLoader.get_code = get_code  # type: ignore[assignment,method-assign]
        for name in self._copied_modules():
            del sys.modules[name]
        selected = SelectedTests([item.nodeid for item in items])
        exit_code = pytest.main([*ARGUMENTS, "-x", *sorted({str(item.path) for item in items})], plugins=[selected])
        return selected.failed or ("" if exit_code == pytest.ExitCode.OK else "?")

    def _copied_modules(self) -> dict[str, ModuleType]:
        modules = {name: module for name, module in sys.modules.items() if getattr(module, "__file__", None)}
        return {name: module for name, module in modules.items() if str(module.__file__).startswith(str(self.folder))}

    def _apply_in_place(self, mutant: Mutant) -> None:
        """Give an imported function or variable the mutant's code or value, also where other modules imported it."""
        parts = mutant.path.relative_to(ROTA.parent).with_suffix("").parts
        module = sys.modules[".".join(parts).removesuffix(".__init__")]
        if mutant.variable:
            name = mutant.variable.co_filename
            original = vars(module)[name]
            exec(mutant.variable, vars(module))  # noqa: S102 - one statement of ours
            for other_module in self._copied_modules().values():
                if vars(other_module).get(name) is original:
                    setattr(other_module, name, vars(module)[name])
            return
        *classes, name = mutant.function.split(".")
        function = vars(reduce(getattr, classes, module))[name]
        for wrapped in ("fget", "func", "__func__", "__wrapped__"):
            function = getattr(function, wrapped, function)
        code = mutant.code
        for part in (*classes, name):
            code = next(
                constant for constant in code.co_consts if isinstance(constant, CodeType) and constant.co_name == part
            )
        function.__code__ = code

    def _run(self, item: pytest.Item) -> None:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)


def _limit(seconds: float) -> None:
    """End this process after so many further CPU seconds."""
    soon = ceil(time.process_time() + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (soon, resource.RLIM_INFINITY))


def _run_in_fork(work: Callable[[], object]) -> object:
    """Return the result of a function that runs in a fork, or None if the fork was killed."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        with contextlib.suppress(BaseException), os.fdopen(writes, "w") as pipe:
            json.dump(work(), pipe)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        result = pipe.read()
    os.waitpid(child, 0)
    return json.loads(result) if result else None


def has_reason(mutant: Mutant) -> bool:
    """Whether the page gives a reason for a survivor."""
    of_file = (ROOT / PAGE).read_text().partition(f"\n## {mutant.path}\n")[2].partition("\n## ")[0]
    return f"`{mutant.description}`" in of_file


def main() -> int:
    """Print a table and the survivors without a reason on the page; return 1 if any survivor has none."""
    roots = list(map(Path, sys.argv[1:])) or [ROTA / folder for folder in TESTS]
    paths: list[Path] = []
    for root in roots:
        paths += [root] if root.is_file() else sorted(root.rglob("*.py"))
    tests = {test for path in paths for test in tests_of(path)}
    phases = [Phase.explicit, Phase.generate]
    settings.register_profile("mutants", deadline=None, derandomize=True, max_examples=10, phases=phases)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__"), dirs_exist_ok=True)
        os.chdir(folder)
        sys.path.insert(0, str(folder / ROTA.parent))
        trial = Trial(folder, paths)
        pytest.main([*ARGUMENTS, *sorted(tests)], plugins=[trial])
    print("\n| file | mutants | killed | survived | % |\n|---|--:|--:|--:|--:|")
    for path, planted, survived in trial.rows:
        killed = planted - survived
        print(f"| {path} | {planted} | {killed} | {survived} | {100 * killed / max(planted, 1):.1f} |")
    print(f"\n{trial.unexplained} survivors have no reason in {PAGE}.")
    return bool(trial.unexplained) or not trial.rows


if __name__ == "__main__":
    sys.exit(main())
