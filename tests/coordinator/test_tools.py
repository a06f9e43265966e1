"""The node's tools as processes: one JSON document comes back, or the error that their exit code stands for."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from coordinator import tools
from coordinator.errors import CoordinatorError, MachineError, StateError, UsageError
from coordinator.folder import RunFolder
from coordinator.tools import newest_state

FAKE_NODE = """
import sys
name, words = sys.argv[2], dict(zip(sys.argv[3::2], sys.argv[4::2]))
print("at work on", words["--config"], file=sys.stderr)
assert sys.argv[1] == "tool" and words["--parent-pid"].isdigit()
{body}
"""


def ran(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, list[str]]:
    """Run a tool of a `node` that does this."""
    (tmp_path / "node.py").write_text(FAKE_NODE.format(body=body))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    try:
        return asyncio.run(tools.run("init", {"config": "c"}, said.append)), said
    except CoordinatorError as error:
        return error, said


def test_a_document_comes_back_and_progress_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, said = ran('print(\'{"spec": {"a": 1}}\')', tmp_path, monkeypatch)
    assert found == {"spec": {"a": 1}}
    assert said == ["at work on c"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [(2, UsageError), (3, MachineError), (6, StateError), (1, CoordinatorError), (64, CoordinatorError)],
)
def test_an_exit_code_becomes_its_error_with_the_last_line_as_cause(
    code: int, kind: type[CoordinatorError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f"print('too little text; give more', file=sys.stderr)\nsys.exit({code})"
    found, _ = ran(body, tmp_path, monkeypatch)
    assert type(found) is kind
    assert str(found) == "too little text; give more"


@pytest.mark.parametrize("body", ["print('no json')", "print('[]')", "print('[' * 100000)", "pass"])
def test_what_is_no_document_is_a_fault(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = ran(body, tmp_path, monkeypatch)
    assert isinstance(found, CoordinatorError)
    assert found.exit_code == 1


def test_a_tool_that_the_kernel_ends_is_the_machines_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large models: there is no memory left, and the largest process goes."""
    found, _ = ran("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", tmp_path, monkeypatch)
    assert isinstance(found, MachineError)
    assert "ended by a signal: Killed; free memory" in str(found)


def test_cancelling_ends_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "node.py").write_text(
        "import os, sys, time\nprint(os.getpid(), file=sys.stderr, flush=True)\ntime.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    pids: list[int] = []

    async def main() -> None:
        started = asyncio.Event()

        def say(text: str) -> None:
            pids.append(int(text))
            started.set()

        task = asyncio.ensure_future(tools.run("init", {}, say))
        async with asyncio.timeout(60):
            await started.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    from coordinator.parent import is_alive

    assert not is_alive(pids[0])
    assert sys.executable


def test_the_newest_state_is_the_observers(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(StateError, match="coordinator serve"):
        newest_state(folder)
    folder.state.mkdir()
    (folder.state / "theta.bin").write_bytes(b"0")
    assert newest_state(folder) == (folder.state / "theta.bin", "")
    held = folder.observer / "state" / "7-abcdef01"
    held.mkdir(parents=True)
    (held.parent / "CURRENT").write_text("7-abcdef01")
    assert newest_state(folder)[1] == ""  # named, but not there
    (held / "theta.bin").write_bytes(b"7")
    assert newest_state(folder) == (held / "theta.bin", "7-abcdef01")
    (held.parent / "CURRENT").write_text("../../../keys")
    assert newest_state(folder)[1] == ""
