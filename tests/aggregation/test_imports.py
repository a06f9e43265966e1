"""What the package may import: torch in two modules only, and nothing that does IO for us."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import aggregation

ROOT = Path(aggregation.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
WITH_TORCH = {"aggregation.vector", "aggregation.codec.device"}
ALLOWED = {"aggregation", "blake3", "llvmlite", "numba", "numpy", *sys.stdlib_module_names} - {
    "asyncio", "socket", "time", "random", "os", "pathlib", "subprocess", "threading", "pickle", "secrets",
}  # fmt: skip


def dotted(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_a_module_imports_only_what_it_may(path: Path) -> None:
    allowed = ALLOWED | ({"torch"} if dotted(path) in WITH_TORCH else set())
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [node.module or ""]
        else:
            continue
        for name in found:
            assert name.split(".")[0] in allowed | {"typing_extensions"}, f"{path.name} imports {name}"


def test_torch_stays_out_of_a_fresh_interpreter() -> None:
    names = [name for name in map(dotted, MODULES) if name not in WITH_TORCH]
    code = f"import sys, {', '.join(names)}; assert not {{'torch', 'hivemind', 'grpc'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)
