"""The `node` command: which words it takes, the exit code of each failure, and what it prints where."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from node import cli, control
from node.control import ControlServer
from node.identity import FolderLock, load_or_make, make_folder
from protos.signing import Identity

RUN = Identity.from_private_bytes(bytes(32)).peer
INVITE = f"barnraise://{RUN}@127.0.0.1:1"


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return self.err.strip().splitlines()[-1] if self.err.strip() else ""


class Terminal:
    """Calls the command with these words, in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def node(self, *words: str | Path) -> Said:
        self._capsys.readouterr()
        code = cli.run([str(word) for word in words])
        return Said(code, *self._capsys.readouterr())


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Terminal:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("node.signals.THREADS_S", 1000.0)  # else a machine that stands still ends this process
    monkeypatch.setattr(control, "ANSWER_S", 60.0)
    return Terminal(capsys)


@pytest.mark.parametrize("words", [("server.js",), ("-e", "1"), ("--eval", "1"), ("app.mjs", "--port", "1"), ("-p",)])
def test_called_like_node_js_it_says_who_it_is(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["node", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 64
    said = capsys.readouterr().err
    assert "not Node.js" in said
    assert "barnraise-node" in said


def test_the_command_ends_the_process_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(sys, "argv", ["node", "join", "no invite"])
    cli.main()
    assert ended == [2]


@pytest.mark.parametrize(("given", "kept"), [("", "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_a_trainers_threads_sleep_where_they_wait_unless_their_owner_says_otherwise(given: str, kept: str) -> None:
    """Spinning, two nodes and one busy process on two cores trained at a hundredth of their speed."""
    mine = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    said = subprocess.run(
        [sys.executable, "-c", "import node.cli, os; print(os.environ['OMP_WAIT_POLICY'])"],
        env=mine | ({"OMP_WAIT_POLICY": given} if given else {}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == kept


def test_help_is_no_error(terminal: Terminal) -> None:
    said = terminal.node("--help")
    assert said.code == 0
    assert "join" in said.out
    assert "observe" not in said.out, "what the coordinator starts is not for people"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("dance",), "dance"),
        (("join",), "INVITE"),
        (("join", INVITE, "--speed", "9"), "--speed"),
        (("join", INVITE, "--threads", "many"), "--threads"),
        (("join", "https://example.org"), "barnraise://"),
        (("join", INVITE.replace(RUN, "nobody")), "copy the whole line"),
        (("join", INVITE, "--device", "abacus"), "--device abacus"),
        (("join", INVITE, "--device", "cuda:"), "--device cuda:"),
        (("join", INVITE, "--device", "cuda:0,"), "--device cuda:0,"),
        (("join", INVITE, "--device", "mps:0"), "--device mps:0"),
        (("join", INVITE, "--threads", "-1"), "--threads -1"),
        (("join", INVITE, "--rounds", "0"), "--rounds 0"),
        (("join", INVITE, "--listen", "everywhere"), "--listen everywhere"),
        (("join", INVITE, "--max-up", "fast"), "--max-up fast"),
        (("join", INVITE, "--max-down", "12"), "--max-down of 12"),
        (("status",), "--data"),
    ],
)
def test_wrong_words_are_exit_code_2_and_are_named(terminal: Terminal, words: tuple[str, ...], named: str) -> None:
    said = terminal.node(*words)
    assert said.code == 2
    assert named in said.last_line
    assert "Traceback" not in said.err
    assert said.out == ""


@pytest.mark.parametrize("device", ["mps", "cuda", "cuda:0", "cuda:0,1", "cuda:2,13"])
def test_a_device_that_this_version_has_no_use_for_is_exit_code_3(
    terminal: Terminal, tmp_path: Path, device: str
) -> None:
    said = terminal.node("join", INVITE, "--data", tmp_path / "node", "--device", device)
    assert said.code == 3
    assert f"--device {device}:" in said.last_line
    assert "--device cpu" in said.last_line
    assert not (tmp_path / "node").exists()


def test_an_unreachable_coordinator_is_exit_code_4(terminal: Terminal, tmp_path: Path) -> None:
    said = terminal.node("join", INVITE, "--data", tmp_path / "node")
    assert said.code == 4
    assert "127.0.0.1:1: connection refused" in said.last_line


def test_a_folder_that_is_none_is_exit_code_3(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = terminal.node("join", INVITE, "--data", tmp_path / "file")
    assert said.code == 3
    assert "--data" in said.last_line


def test_a_traceback_is_shown_on_request_only(terminal: Terminal, tmp_path: Path) -> None:
    words = ("join", INVITE, "--data", tmp_path / "node")
    assert "Traceback" not in terminal.node(*words).err
    said = terminal.node(*words, "-v")
    assert "Traceback" in said.err
    assert "connection refused" in said.last_line


def test_a_fault_of_ours_is_exit_code_1(terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(folder: Path, word: str) -> Mapping[str, Any]:
        raise ZeroDivisionError(word)

    monkeypatch.setattr(control, "ask", broken)
    said = terminal.node("status", "--data", tmp_path)
    assert said.code == 1
    assert "a fault of ours: ZeroDivisionError('status')" in said.last_line
    assert "in node/test_cli.py:" in said.last_line
    assert "-v" in said.last_line


# -- told to go before it takes part -----------------------------------------------------------------------------


OWNERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", OWNERS)
def test_told_to_go_while_it_waits_for_the_coordinator_it_leaves(
    terminal: Terminal, tmp_path: Path, number: signal.Signals
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def tell() -> None:
            calling, _ = silent.accept()
            with calling:
                os.kill(os.getpid(), number)
                calling.recv(1 << 16)
                while calling.recv(1 << 16):
                    pass

        thread = threading.Thread(target=tell)
        thread.start()
        said = terminal.node("join", INVITE[:-1] + str(silent.getsockname()[1]), "--data", tmp_path / "node")
        thread.join()
    assert (said.code, said.out) == (0, "")
    assert said.last_line == "left on a signal, before this node took part"
    FolderLock(tmp_path / "node").release()


@pytest.mark.parametrize("swallowed", [False, True])
@pytest.mark.parametrize("number", OWNERS)
def test_told_to_go_while_the_program_is_loaded_it_leaves(number: signal.Signals, swallowed: bool) -> None:
    before = [signal.getsignal(each) for each in OWNERS]

    async def node() -> str:
        raise AssertionError

    def begin() -> Coroutine[Any, Any, str]:
        with suppress(BaseException) if swallowed else nullcontext():  # a module that is loaded may
            os.kill(os.getpid(), number)
        return node()

    assert cli._run_node(begin, False, 0) == "left on a signal, before this node took part"
    assert [signal.getsignal(each) for each in OWNERS] == before


def test_told_twice_while_the_program_is_loaded_it_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)

    def begin() -> Coroutine[Any, Any, str]:
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(BaseException):
                os.kill(os.getpid(), number)
        return forever()

    async def forever() -> str:
        raise AssertionError

    cli._run_node(begin, False, 0)
    assert codes == [130]


# -- the contributor's hand on a running node ----------------------------------------------------------------------


@pytest.fixture
def running(tmp_path: Path) -> Iterator[list[str]]:
    """The control port of the only node of a contributor, in a thread; the words that it was told."""
    folder, heard = tmp_path / "home" / "barnraise" / "a", list[str]()
    folder.mkdir(parents=True)

    def answer(word: str) -> Mapping[str, Any]:
        heard.append(word)
        return {"state": "training", "rejected": {}} if word == "status" else {"said": f"{word}: yes"}

    started, over = threading.Event(), threading.Event()

    async def serve() -> None:
        server = ControlServer(folder, answer)
        await server.start()
        started.set()
        await asyncio.to_thread(over.wait)
        await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(60)
    yield heard
    over.set()
    thread.join()


def test_status_of_the_only_node_there_is(terminal: Terminal, running: list[str]) -> None:
    said = terminal.node("status", "--json")
    assert (said.code, said.err) == (0, "")
    assert json.loads(said.out) == {"state": "training", "rejected": {}}
    plain = terminal.node("status")
    assert plain.out.splitlines()[0].split() == ["state", "training"]


@pytest.mark.parametrize("word", ["leave", "pause", "resume"])
def test_a_word_to_the_node(terminal: Terminal, running: list[str], word: str) -> None:
    said = terminal.node(word)
    assert (said.code, said.out, running) == (0, f"{word}: yes\n", [word])


def test_of_several_nodes_one_must_be_named(terminal: Terminal, running: list[str], tmp_path: Path) -> None:
    (tmp_path / "home" / "barnraise" / "b").mkdir()
    said = terminal.node("leave")
    assert (said.code, running) == (2, [])
    assert "--data" in said.last_line
    assert terminal.node("leave", "--data", tmp_path / "home" / "barnraise" / "a").code == 0
    empty = terminal.node("status", "--json", "--data", tmp_path / "home" / "barnraise" / "b")
    assert (empty.code, empty.out) == (4, "")
    assert "node join" in empty.last_line


# -- identities ----------------------------------------------------------------------------------------------------


def test_an_identity_is_shown_exported_and_imported(terminal: Terminal, tmp_path: Path) -> None:
    make_folder(tmp_path / "one")
    identity = load_or_make(tmp_path / "one")
    shown = terminal.node("identity", "show", "--data", tmp_path / "one")
    assert shown.code == 0
    assert shown.out.split()[0] == identity.peer
    assert terminal.node("identity", "export", tmp_path / "key.pem", "--data", tmp_path / "one").code == 0
    assert terminal.node("identity", "import", tmp_path / "key.pem", "--data", tmp_path / "two").code == 0
    assert load_or_make(tmp_path / "two").peer == identity.peer
    make_folder(tmp_path / "four")
    load_or_make(tmp_path / "four")
    again = terminal.node("identity", "import", tmp_path / "key.pem", "--data", tmp_path / "four")
    assert again.code == 6, "a folder's own key is never replaced"
    missing = terminal.node("identity", "show", "--data", tmp_path / "three")
    assert missing.code == 6


def test_a_run_has_its_own_folder_below_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert cli.default_folder(RUN) == tmp_path / "barnraise" / RUN[-12:]
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.default_folder(RUN) == tmp_path / ".local" / "share" / "barnraise" / RUN[-12:]
