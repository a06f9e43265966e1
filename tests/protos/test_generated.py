"""The committed protobuf code is what comes out of the .proto files."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow  # starts protoc and its plugins
def test_the_committed_code_is_the_generated() -> None:
    done = subprocess.run(
        ["bash", "deploy/protos.sh", "--check"],
        cwd=ROOT,
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_generated_code_stays_among_its_own() -> None:
    """Only this package and the two gRPC shells may import it: the rest speaks in dataclasses."""
    allowed = {ROOT / "coordinator/leading/service.py", ROOT / "node/peers/grpc.py"}
    strangers = [
        str(path.relative_to(ROOT))
        for package in ("aggregation", "coordinator", "node")
        for path in sorted((ROOT / package).rglob("*.py"))
        if path not in allowed and "_pb2" in path.read_text()
    ]
    assert strangers == []


def version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split("."))


def test_the_declared_dependencies_can_load_the_generated_code() -> None:
    """Generated code refuses an older runtime at import, so the package must not promise that one will do."""
    generated = (ROOT / "protos/round_pb2.py").read_text() + (ROOT / "protos/round_pb2_grpc.py").read_text()
    needed = {
        "protobuf": re.findall(r"# Protobuf Python Version: ([0-9.]+)", generated)[0],
        "grpcio": re.findall(r"GRPC_GENERATED_VERSION = '([0-9.]+)'", generated)[0],
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, least in needed.items():
        (declared,) = (found[1] for line in project["dependencies"] if (found := re.match(rf"{name}>=([0-9.]+)", line)))
        assert version(declared) >= version(least), f"pyproject.toml says {name}>={declared}, generated with {least}"
