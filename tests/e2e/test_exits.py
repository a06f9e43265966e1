"""What goes wrong at the command line: the exit code of its kind, and a last line that says what to do."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import COORDINATOR, NODE, Ended, environment, left_over, run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

ENDS_S = 100.0
"""So long what ends by itself may take on a busy machine: importing it all is most of that."""
RUN = "12D3KooWDrpQMfY4mKzJNAdgY16vXqD7LPuVV3BswnkjVeXLqwH7"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A founded run on a little text of its own."""
    base = tmp_path_factory.mktemp("exits")
    text = base / "text"
    text.mkdir()
    for index in range(4):
        (text / f"{index}.txt").write_text("".join(f"line {line} of text {index}\n" for line in range(4000)))
    made = run(*COORDINATOR, "init", "--data", base / "run", "--data-path", text)
    assert made.code == 0, made.err
    return base / "run"


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield int(taken.getsockname()[1])


def explains(ended: Ended, code: int, *words: str) -> None:
    assert ended.code == code, ended.err
    assert "Traceback" not in ended.err
    for word in words:
        assert word in ended.last_line, ended.last_line


@pytest.mark.parametrize("option", ["--http", "--listen", "--dht", "--observer"])
def test_a_taken_port_of_the_coordinator(folder: Path, taken_port: int, option: str) -> None:
    ports = {
        "--http": "127.0.0.1:0",
        "--listen": "127.0.0.1:0",
        "--dht": "127.0.0.1:0",
        option: f"127.0.0.1:{taken_port}",
    }
    words = [word for pair in ports.items() for word in pair]
    explains(run(*COORDINATOR, "serve", "--data", folder, *words, limit_s=ENDS_S), 3, str(taken_port), option)


def test_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    explains(run(*COORDINATOR, "init", "--data", tmp_path / "file" / "run"), 3, "--data")
    explains(run(*NODE, "join", f"barnraise://{RUN}@127.0.0.1:9", "--data", tmp_path / "file" / "node"), 3, "--data")


@pytest.mark.parametrize(
    "invite",
    [
        "",
        "http://example.org",
        "barnraise://nobody@127.0.0.1:8470",
        f"barnraise://{RUN}@127.0.0.1",
        f"barnraise://{RUN}@127.0.0.1:99999",
        f"barnraise://{RUN}@127.0.0.1:1barnraise://{RUN}@127.0.0.1:2",
    ],
)
def test_a_wrong_invite(tmp_path: Path, invite: str) -> None:
    explains(run(*NODE, "join", invite, "--data", tmp_path / "node"), 2, "copy")
    assert not (tmp_path / "node").exists()


def test_an_invite_to_nobody(tmp_path: Path, taken_port: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = free.getsockname()[1]
    ended = run(*NODE, "join", f"barnraise://{RUN}@127.0.0.1:{nobody}", "--data", tmp_path / "node")
    explains(ended, 4, str(nobody), "refused")


def test_unknown_settings_are_refused_with_the_nearest_one(tmp_path: Path) -> None:
    explains(run(*COORDINATOR, "init", "--data", tmp_path / "a", "--set", "work.hh=10"), 2, "work.h")
    explains(run(*COORDINATOR, "init", "--data", tmp_path / "b", "--set", "work.h=ten"), 2, "work.h", "ten")
    (tmp_path / "run.toml").write_text("[wrok]\nh = 3\n")
    explains(run(*COORDINATOR, "init", "--data", tmp_path / "c", "--config", tmp_path / "run.toml"), 2, "wrok", "work")
    assert not any((tmp_path / name).exists() for name in "abc")
    assert run(*NODE, "join", "--bandwith", "3").code == 2


def test_called_like_node_js() -> None:
    ended = run(*NODE, "server.js")
    assert ended.code == 64
    assert "Barnraise" in ended.last_line


def test_a_second_process_on_the_same_folder(folder: Path) -> None:
    words: list[str | Path] = [
        "serve",
        "--data",
        folder,
        "--http",
        "127.0.0.1:0",
        "--listen",
        "127.0.0.1:0",
        "--dht",
        "127.0.0.1:0",
    ]
    first = subprocess.Popen(
        [str(word) for word in (*COORDINATOR, *words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
    )
    try:
        assert first.stdout is not None
        invite = first.stdout.readline().split()[-1]
        explains(run(*COORDINATOR, *words, limit_s=ENDS_S), 6, str(folder))
        node = subprocess.Popen(
            [*NODE, "join", invite, "--data", str(folder.parent / "node"), "--listen", "127.0.0.1:0"],
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        try:
            assert node.stderr is not None
            assert "this node is" in node.stderr.readline()
            second = run(*NODE, "join", invite, "--data", folder.parent / "node", limit_s=ENDS_S)
            explains(second, 6, "in use by process", "--data")
            wrong_run = invite.replace(invite.split("//")[1].split("@")[0], RUN)
            explains(run(*NODE, "join", wrong_run, "--data", folder.parent / "other", limit_s=ENDS_S), 5, RUN)
        finally:
            node.send_signal(signal.SIGTERM)
            node.communicate(timeout=ENDS_S)
        assert node.returncode == 0
    finally:
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=ENDS_S)
    assert first.returncode == 0
    assert left_over(folder.parent) == []
