from __future__ import annotations

import subprocess
import sys

import pytest

FOR_THE_AGENT = (
    "corpus",
    "link",
    "packing",
    "presets",
    "process",
    "schedule",
    "shards",
    "shared",
    "tokenizer",
    "utilisation",
)


@pytest.mark.slow
def test_what_the_agent_imports_loads_no_torch() -> None:
    imports = ", ".join(f"node.training.{name}" for name in FOR_THE_AGENT)
    code = f"import sys, {imports}; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout == "[]\n"
