"""Makes mutants of a file's syntax tree: every small change that gives another valid program."""

import ast
import contextlib
from collections import defaultdict
from collections.abc import Iterator
from copy import copy
from itertools import takewhile
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

*_, OUTSIDE = ast.cmpop.__subclasses__()  # the last class is that of `not in`: codespell takes its name for a mistake
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
SKIPPED = {"annotation", "decorator_list", "returns", "format_spec"}


def mutate_value(node: ast.AST, members: dict[str, set[str]]) -> Iterator[ast.AST]:
    """Yield other values for a constant or a name; a string with a blank is a message and stays unchanged."""
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
            names = sorted(members[name])
            if len(names) > 1:
                yield ast.Attribute(node.value, names[(names.index(node.attr) + 1) % len(names)], node.ctx)


def shorten(node: ast.AST) -> Iterator[ast.AST]:
    """Yield expressions and statements without one of their parts."""
    match node:
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.IfExp():
            yield from (node.body, node.orelse)
        case ast.BoolOp(values=[left, right]):
            yield from (right, left)
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
        if isinstance(part, ast.keyword) and _is_text_only(node, part):
            continue
        yield _with(node, **{name: value[:at] + value[at + 1 :] for name, value in lists.items()})


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    copied = copy(node)
    for name, value in fields.items():
        setattr(copied, name, value)
    return copied


class Mutant(NamedTuple):
    """A file with one change."""

    path: Path
    line: int
    description: str
    code: CodeType
    function: str  # that contains the change; empty: none
    variable: CodeType | None = None  # the changed statement, if it assigns a variable of the module


def mutants(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file of the copy; all share one syntax tree, which is changed and restored for each."""
    tree = ast.parse(path.read_text())
    members = defaultdict[str, set[str]](set)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr.isupper():
            members[node.value.id].add(node.attr)  # of an enumeration

    def walk(parent: ast.AST, statement: ast.AST, scope: str, function: str) -> Iterator[Mutant]:
        if isinstance(parent, ast.ClassDef | ast.FunctionDef):
            scope = f"{scope}.{parent.name}".strip(".")
        for field, at, old in _children(parent):
            inside = function or (scope if isinstance(parent, ast.FunctionDef) and field == "body" else "")
            enclosing = old if isinstance(old, ast.stmt) else statement
            text_before = ast.unparse(enclosing)
            for new in (*mutate_value(old, members), *shorten(old), *(kind() for kind in SWAPPED.get(type(old), ()))):
                _put(parent, field, at, new)
                description = _describe_change(text_before, ast.unparse(new if enclosing is old else enclosing))
                with contextlib.suppress(SyntaxError, ValueError):  # not every change gives a valid program
                    code = compile(ast.fix_missing_locations(tree), path, "exec")
                    line = getattr(old, "lineno", getattr(parent, "lineno", 0))
                    variable = _assigning(enclosing) if statement in tree.body else None
                    yield Mutant(path, line, description, code, inside, variable)
                _put(parent, field, at, old)
            yield from walk(old, enclosing, scope, inside)

    yield from walk(tree, tree, "", "")


def _children(parent: ast.AST) -> Iterator[tuple[str, int | None, ast.AST]]:
    for field, value in ast.iter_fields(parent):
        for at, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and field not in SKIPPED and not _is_text_only(parent, child):
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


def _is_text_only(parent: ast.AST, node: ast.AST) -> bool:
    """Whether this is a docstring, the text of a message, or a name for a type."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.keyword(arg="strict"):
            return True  # of `zip`: an assertion that never fails
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name == "__all__" or (name[0].isupper() and not name.isupper())
    return isinstance(node, ast.Constant) and isinstance(parent, ast.JoinedStr)


def _describe_change(old: str, new: str) -> str:
    if new == "pass":
        return f"without {old.splitlines()[0]}"
    head = _common_prefix(old, new)
    tail = _common_prefix(old[head:][::-1], new[head:][::-1])
    return " → ".join(" ".join(_cut_out(text, head - 30, len(text) - tail + 20).split()) for text in (old, new))


def _cut_out(text: str, start: int, end: int) -> str:
    """Cut out a piece, extended to whole words."""
    return text[text.rfind(" ", 0, max(start, 0)) + 1 : end] + text[end:].partition(" ")[0].partition("\n")[0]


def _common_prefix(left: str, right: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
