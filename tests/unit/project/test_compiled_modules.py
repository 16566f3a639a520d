"""The modules that the sidecar's image has compiled: any of them may be replaced by its pure form."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compiled import COMPILED_MODULES
from ground.cluster import PROJECT


@pytest.mark.parametrize("module", COMPILED_MODULES)
def test_image_compiles_no_module_that_defines_a_struct(module: str) -> None:
    """A compiled class has lost the parameters of its fields' types, which msgspec needs."""
    tree = _syntax_tree(module)
    bases = [ast.unparse(base) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
    assert [base for base in bases if base.rpartition(".")[2] == "Struct"] == []


@pytest.mark.parametrize("module", COMPILED_MODULES)
def test_image_compiles_no_coroutine_that_waits_while_it_handles_an_error(module: str) -> None:
    """Meanwhile, that error would be the current one of the whole thread, and the context of all other errors."""
    waits = (ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Yield, ast.YieldFrom)
    lines = [
        node.lineno
        for statement in ast.walk(_syntax_tree(module))
        if isinstance(statement, ast.Try)
        for part in (*statement.handlers, *statement.finalbody)
        for node in ast.walk(part)
        if isinstance(node, waits)
    ]
    assert lines == []


def test_image_modules_are_compiled_only_in_the_run_of_compiled_modules() -> None:
    """`make test-compiled` sets ROTA_COMPILED, and PYTHONPATH, which child processes such as sidecars inherit."""
    program = "import importlib, sys; print(*[importlib.import_module(name).__file__ for name in sys.argv[1:]])"
    command = [sys.executable, "-c", program, *COMPILED_MODULES]
    child_files = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    own_files = [importlib.import_module(module).__file__ or "" for module in COMPILED_MODULES]
    expected_suffix = ".so" if "ROTA_COMPILED" in os.environ else ".py"
    assert {Path(file).suffix for file in (*own_files, *child_files)} == {expected_suffix}


def _syntax_tree(module: str) -> ast.Module:
    return ast.parse((PROJECT / "operator" / f"{module.replace('.', '/')}.py").read_text())
