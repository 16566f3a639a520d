"""Plant small bugs one by one, and see which tests notice: `python tests/mutants.py [file or folder ...]`.

The working tree is copied once and never written to. One process collects the tests and sees which functions each of
them calls. Every mutant then lives in a fork of that process: a changed function or variable is exchanged in place,
and of the tests only those run that call the function, those that noticed lately first and then the quick ones. For
what is changed in a class everything of ours is imported anew. A test that fails ends it, and so does too much time.
"""

import ast
import contextlib
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial, reduce
from importlib.machinery import SourceFileLoader
from itertools import takewhile
from math import ceil
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).parents[1]
ROTA, PAGE = Path("operator/rota"), Path("docs/mutants.md")
PLANNER = ["tests/unit/planner", "tests/unit/test_gates.py"]
TESTS = {  # what speaks about each
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
*_, OUTSIDE = ast.cmpop.__subclasses__()  # the last one is that of `not in`
SWAPPED: dict[type, tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (OUTSIDE,),
    OUTSIDE: (ast.In,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.BitOr: (ast.BitAnd,),
    ast.BitAnd: (ast.BitOr,),
    ast.Break: (ast.Continue,),
    ast.Continue: (ast.Break,),
    **dict.fromkeys((ast.AugAssign, ast.Delete, ast.Expr, ast.For, ast.If, ast.Raise, ast.While), (ast.Pass,)),
}
RENAMED = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
ARGUMENTS = ["-q", "-s", "--tb=no", "-pno:cacheprovider", "--hypothesis-profile=mutants"]
ARGUMENTS += ["-Wignore::pytest.PytestAssertRewriteWarning"]  # hypothesis is imported before pytest begins
SLOW = 2.0  # seconds: a test that takes longer is not asked
SKIPPED = {"annotation", "decorator_list", "returns", "format_spec"}


def of_values(node: ast.AST, members: dict[str, set[str]]) -> Iterator[ast.AST]:
    """Yield other values for a constant or a name; a string with a blank in it is a message, and stays."""
    match node:
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int() | float() as number):
            yield from (ast.Constant(number + 1), ast.Constant(number - 1))
        case ast.Constant(value=str() as text) if " " not in text:
            yield ast.Constant(f"{text}?")
        case ast.Name(id=name) if name in RENAMED:
            yield ast.Name(RENAMED[name], ast.Load())
        case ast.Attribute(value=ast.Name(id=name)) if node.attr in members[name]:
            others = sorted(members[name])
            if len(others) > 1:
                yield ast.Attribute(node.value, others[(others.index(node.attr) + 1) % len(others)], node.ctx)


def of_shapes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield expressions and statements of which a part is left out."""
    match node:
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.IfExp():
            yield from (node.body, node.orelse)
        case ast.BoolOp(values=[one, other]):
            yield from (other, one)
        case ast.BoolOp() | ast.Dict() | ast.Call() | ast.comprehension() | ast.Match():
            yield from _shorter(node, {"values", "keys", "keywords", "ifs", "cases"})
        case ast.Tuple(ctx=ast.Load()) | ast.List(ctx=ast.Load()) | ast.Set():
            yield from _shorter(node, {"elts"})
        case ast.match_case(guard=ast.AST()):
            yield _with(node, guard=None)
        case ast.Return(value=ast.AST() as value) if not isinstance(value, ast.Constant) or value.value is not None:
            yield ast.Return(ast.Constant(None))


def _shorter(node: ast.AST, fields: set[str]) -> Iterator[ast.AST]:
    lists = {name: value for name, value in ast.iter_fields(node) if name in fields}
    for at, part in enumerate(next(iter(lists.values()))):
        if isinstance(part, ast.keyword) and _only_tells(node, part):
            continue
        yield _with(node, **{name: value[:at] + value[at + 1 :] for name, value in lists.items()})


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    copied = copy(node)
    for name, value in fields.items():
        setattr(copied, name, value)
    return copied


def speaking_of(path: Path) -> list[str]:
    """Return the tests that speak about a file."""
    return next(tests for room, tests in TESTS.items() if path.relative_to(ROTA).is_relative_to(room))


class Mutant(NamedTuple):
    """A file with one change."""

    path: Path
    line: int
    told: str
    code: CodeType
    function: str  # that it is in; empty: in none
    variable: CodeType | None = None  # the statement, if it gives a module's variable its value


def mutants(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file of the copied tree; its one tree is changed and put right again for each."""
    tree, members = ast.parse(path.read_text()), defaultdict[str, set[str]](set)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr.isupper():
            members[node.value.id].add(node.attr)  # an enumeration's

    def walk(parent: ast.AST, statement: ast.AST, scope: str, function: str) -> Iterator[Mutant]:
        if isinstance(parent, ast.ClassDef | ast.FunctionDef):
            scope = f"{scope}.{parent.name}".strip(".")
        for field, at, old in _children(parent):
            inside = function or (scope if isinstance(parent, ast.FunctionDef) and field == "body" else "")
            place = old if isinstance(old, ast.stmt) else statement
            before = ast.unparse(place)
            for new in (*of_values(old, members), *of_shapes(old), *(kind() for kind in SWAPPED.get(type(old), ()))):
                _put(parent, field, at, new)
                told = _told(before, ast.unparse(new if place is old else place))
                with contextlib.suppress(SyntaxError, ValueError):  # what is no program is no mutant
                    code = compile(ast.fix_missing_locations(tree), path, "exec")
                    line = getattr(old, "lineno", getattr(parent, "lineno", 0))
                    yield Mutant(path, line, told, code, inside, _assigning(place) if statement in tree.body else None)
                _put(parent, field, at, old)
            yield from walk(old, place, scope, inside)

    yield from walk(tree, tree, "", "")


def _children(parent: ast.AST) -> Iterator[tuple[str, int | None, ast.AST]]:
    for field, value in ast.iter_fields(parent):
        for at, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and field not in SKIPPED and not _only_tells(parent, child):
                yield field, at, child


def _assigning(place: ast.AST) -> CodeType | None:
    match place:
        case (
            ast.Assign(targets=[ast.Name() as name], value=value)
            | ast.AnnAssign(target=ast.Name() as name, value=value)
        ):
            statement = ast.Assign([name], value or ast.Constant(None))
            return compile(ast.fix_missing_locations(ast.Module([statement], [])), name.id, "exec")
    return None


def _put(parent: ast.AST, field: str, at: int | None, child: ast.AST) -> None:
    if at is None:
        setattr(parent, field, child)
    else:
        getattr(parent, field)[at] = child


def _only_tells(parent: ast.AST, node: ast.AST) -> bool:
    """Whether this is a docstring, the text of a message, or a name for a type."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.keyword(arg="strict"):
            return True  # of `zip`: it states what is always so
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name == "__all__" or (name[0].isupper() and not name.isupper())
    return isinstance(node, ast.Constant) and isinstance(parent, ast.JoinedStr)


def _told(before: str, after: str) -> str:
    if after == "pass":
        return f"without {before.splitlines()[0]}"
    head = _alike(before, after)
    tail = _alike(before[head:][::-1], after[head:][::-1])
    return " → ".join(" ".join(_words(it, head - 30, len(it) - tail + 20).split()) for it in (before, after))


def _words(text: str, start: int, end: int) -> str:
    """Cut out a piece, and what its first and last word lack."""
    return text[text.rfind(" ", 0, max(start, 0)) + 1 : end] + text[end:].partition(" ")[0].partition("\n")[0]


def _alike(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class Again:
    """Runs some tests in their order, and says which one fails."""

    def __init__(self, wanted: list[str]) -> None:
        self.places = {name: place for place, name in enumerate(wanted)}
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((it for it in items if it.nodeid in self.places), key=lambda it: self.places[it.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = report.nodeid


class Trial:
    """Tries mutants in forks of a process that has collected the tests."""

    def __init__(self, folder: Path, paths: list[Path]) -> None:
        self.folder, self.paths = folder, paths
        self.failed = ""  # the test that did
        self.rows: list[tuple[Path, int, int]] = []
        self.unknown = 0  # survivors for which the page gives no reason

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = report.nodeid

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try every mutant instead of running the tests once."""
        usual = _answer_of_fork(partial(self._usual, session.items))
        if not isinstance(usual, dict):
            pytest.exit(f"without any mutant this fails: {usual}", returncode=1)
        for path in self.paths:
            rooms = tuple(speaking_of(path))
            items = [it for it in session.items if it.nodeid.startswith(rooms) and usual[it.nodeid][0] < SLOW]
            items.sort(key=lambda it: usual[it.nodeid][0])
            planted, survived, lately = 0, 0, list[str]()
            for mutant in mutants(path):
                called = [str(self.folder / path), mutant.function]
                chosen = [it for it in items if not mutant.function or called in usual[it.nodeid][1]]
                chosen.sort(key=lambda it: lately.index(it.nodeid) if it.nodeid in lately else len(lately))
                seconds = [usual[it.nodeid][0] for it in chosen]
                noticed = _answer_of_fork(partial(self._first_failure, mutant, chosen, seconds))
                planted, survived = planted + 1, survived + (noticed == "")
                if noticed == "" and not known(mutant):
                    self.unknown += 1
                    print(f"{path}:{mutant.line}: {mutant.told}", flush=True)
                lately = [str(noticed), *(it for it in lately if it != noticed)]
            self.rows.append((path, planted, survived))
        return True

    def _usual(self, items: list[pytest.Item]) -> object:
        """Return how long each test takes, and the functions that it calls; or the test that fails."""
        found = {}
        for item in items:
            called: set[tuple[str, str]] = set()

            def note(frame: FrameType, event: str, _: object, into: set[tuple[str, str]] = called) -> None:
                if event == "call":
                    into.add((frame.f_code.co_filename, frame.f_code.co_qualname.partition(".<locals>")[0]))

            since = time.process_time()
            sys.setprofile(note)
            self._run(item)
            sys.setprofile(None)
            if self.failed:
                return self.failed
            found[item.nodeid] = time.process_time() - since, sorted(called)
        return found

    def _first_failure(self, mutant: Mutant, items: list[pytest.Item], seconds: list[float]) -> str:
        if mutant.function or mutant.variable:
            self._exchange(mutant)
            for item, usual in zip(items, seconds, strict=True):
                _limit(1 + 3 * usual)
                self._run(item)
                if self.failed:
                    break
            return self.failed
        _limit(10 + 3 * sum(seconds))
        path, read = str(self.folder / mutant.path), SourceFileLoader.get_code

        def get_code(loader: Any, name: str) -> CodeType | None:
            return mutant.code if loader.path == path else read(loader, name)

        SourceFileLoader.get_code = get_code  # type: ignore[assignment,method-assign]
        for name in self._ours():
            del sys.modules[name]
        again = Again([it.nodeid for it in items])
        ended = pytest.main([*ARGUMENTS, "-x", *sorted({str(it.path) for it in items})], plugins=[again])
        return again.failed or ("" if ended == pytest.ExitCode.OK else "?")

    def _ours(self) -> dict[str, ModuleType]:
        modules = {name: module for name, module in sys.modules.items() if getattr(module, "__file__", None)}
        return {name: it for name, it in modules.items() if str(it.__file__).startswith(str(self.folder))}

    def _exchange(self, mutant: Mutant) -> None:
        """Give what is already imported, whoever else imported it, its mutant's code or value."""
        parts = mutant.path.relative_to(ROTA.parent).with_suffix("").parts
        module = sys.modules[".".join(parts).removesuffix(".__init__")]
        if mutant.variable:
            name = mutant.variable.co_filename
            was = vars(module)[name]
            exec(mutant.variable, vars(module))  # noqa: S102 - one statement of ours
            for other in self._ours().values():
                if vars(other).get(name) is was:
                    setattr(other, name, vars(module)[name])
            return
        *classes, name = mutant.function.split(".")
        function = vars(reduce(getattr, classes, module))[name]
        for wrapped in ("fget", "func", "__func__", "__wrapped__"):
            function = getattr(function, wrapped, function)
        code = mutant.code
        for part in (*classes, name):
            code = next(it for it in code.co_consts if isinstance(it, CodeType) and it.co_name == part)
        function.__code__ = code

    def _run(self, item: pytest.Item) -> None:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)


def _limit(seconds: float) -> None:
    """End this process if it works for so long from now."""
    soon = ceil(time.process_time() + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (soon, resource.RLIM_INFINITY))


def _answer_of_fork(work: Callable[[], object]) -> object:
    """Return what a piece of work answers in a process of its own; None: it was ended."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        for output in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        with contextlib.suppress(BaseException), os.fdopen(writes, "w") as pipe:
            json.dump(work(), pipe)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else None


def known(mutant: Mutant) -> bool:
    """Whether the page gives a reason for a survivor."""
    of_file = (ROOT / PAGE).read_text().partition(f"\n## {mutant.path}\n")[2].partition("\n## ")[0]
    return f"`{mutant.told}`" in of_file


def main() -> int:
    """Print the survivors that the page does not know, and a table; 1 if there are such."""
    asked = [Path(it) for it in sys.argv[1:]] or [ROTA / room for room in TESTS]
    paths = [it for some in asked for it in ([some] if some.is_file() else sorted(some.rglob("*.py")))]
    tests = {test for path in paths for test in speaking_of(path)}
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
    print(f"\n{trial.unknown} survivors have no reason in {PAGE}.")
    return bool(trial.unknown) or not trial.rows


if __name__ == "__main__":
    sys.exit(main())
