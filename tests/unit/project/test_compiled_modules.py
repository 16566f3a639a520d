"""The modules that the sidecar's image has compiled: any of them may be replaced by its pure form."""

import ast

import pytest

from compiled import COMPILED_MODULES
from ground.cluster import PROJECT


@pytest.mark.parametrize("module", COMPILED_MODULES)
def test_image_compiles_no_module_that_defines_a_struct(module: str) -> None:
    """A compiled class has lost the parameters of its fields' types, which msgspec needs."""
    tree = ast.parse((PROJECT / "operator" / f"{module.replace('.', '/')}.py").read_text())
    bases = [ast.unparse(base) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
    assert [base for base in bases if base.rpartition(".")[2] == "Struct"] == []
