"""The command: exit codes by class of mistake, the last line says what to do, JSON alone on standard output."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator import cli
from coordinator.operating import parse_duration_s
from protos.invite import parse
from tests.coordinator.made import make_run

ROOT = Path(__file__).parents[2]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, standard output, and the last line of standard error."""
    code = cli.run(words)
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.strip()]
    return code, out, lines[-1] if lines else ""


def served_before(path: Path) -> None:
    (path / "ports.json").write_text('{"http": "0.0.0.0:8470", "advertise": "barn.example"}')


@pytest.mark.parametrize(
    ("words", "code", "last"),
    [
        (["serve"], 2, "--data"),
        (["frobnicate"], 2, "frobnicate"),
        (["init", "--data", "x", "--sett", "a=b"], 2, "--sett"),
        (["init", "--data", "{tmp}/x", "--set", "work.hh=3"], 2, "work.h?"),
        (["init", "--data", "{tmp}/x", "--preset", "2B"], 2, "tiny"),
        (["init", "--data", "{tmp}/x", "--config", "{tmp}/none.toml"], 2, "none.toml"),
        (["init", "--data", "{tmp}/run"], 6, "coordinator serve"),
        (["init", "--data", "{tmp}/run/keys"], 3, "--data"),
        (["init", "--data", "/proc/nowhere/run"], 3, "--data"),
        (["serve", "--data", "{tmp}/none"], 6, "coordinator init"),
        (["serve", "--data", "{tmp}/run", "--http", "nonsense:port"], 2, "--http"),
        (["serve", "--data", "{tmp}/run", "--http", "203.0.113.7:0"], 3, "--http"),
        (["status", "--data", "{tmp}/none"], 6, "coordinator init"),
        (["invite", "--data", "{tmp}/run", "--expires", "soon"], 2, "12h"),
        (["invite", "--data", "{tmp}/run"], 2, "serve it first"),
        (["simulate", "--nodes", "0"], 2, "--nodes"),
        (["simulate", "--rule", "kurm", "--data", "{tmp}/x"], 2, "did you mean krum?"),
        (["simulate", "--codec", "int9", "--data", "{tmp}/x"], 2, "did you mean int8?"),
        (["init", "--data", "{tmp}/x", "--set", "rule.name=arc+nmm+median"], 2, "did you mean arc+nnm+median?"),
        (["simulate", "--data", "{tmp}/run"], 6, "no simulation made"),
    ],
)
def test_mistakes_have_their_exit_code_and_a_last_line_that_helps(
    words: list[str],
    code: int,
    last: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_run(tmp_path / "run")
    found, out, line = run(capsys, *(word.format(tmp=tmp_path) for word in words))
    assert (found, out) == (code, "")
    assert last in line
    assert "Traceback" not in line


@pytest.mark.parametrize(
    ("words", "last"),
    [
        (("foo",), "No such command 'foo'; see coordinator --help"),
        (("--nope",), "No such option: --nope; see coordinator --help"),
        (("status", "--nope"), "No such option: --nope; see coordinator status --help"),
        (("rollback", "--data", "{tmp}"), "Missing argument 'ROUND'; see coordinator rollback --help"),
        (("serve", "--lease", "0.5", "--data", "{tmp}"), "see coordinator serve --help"),
    ],
)
def test_wrong_words_end_with_what_to_read(
    words: tuple[str, ...], last: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, line = run(capsys, *(word.format(tmp=tmp_path) for word in words))
    assert (code, out) == (2, "")
    assert line.endswith(last)


def test_a_taken_port_is_named_with_its_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        names = ("--http", "--listen", "--dht", "--observer")
        for option in names:
            ports = {**dict.fromkeys(names, "127.0.0.1:0"), option: taken}
            words = [word for pair in ports.items() for word in pair]
            code, _, line = run(capsys, "serve", "--data", str(tmp_path / "run"), *words)
            assert code == 3
            assert f"{option} {taken}" in line


def test_status_and_ledger_of_a_run_at_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run")
    code, out, _ = run(capsys, "status", "--data", str(tmp_path / "run"), "--json")
    status = json.loads(out)
    assert code == 0
    assert {
        "run_id",
        "round",
        "epoch",
        "phase",
        "deadline_in_s",
        "leader",
        "members",
        "tokens",
        "val_loss",
        "head",
    } <= set(status)
    assert (status["round"], status["phase"], status["serving"]) == (1, "not served", False)
    code, out, _ = run(capsys, "ledger", "--data", str(tmp_path / "run"), "--json")
    (row,) = [json.loads(line) for line in out.splitlines()]
    assert (code, row["round"], row["commit_hash"]) == (0, 0, status["head"])


def test_orders_wait_until_the_run_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(make_run(tmp_path / "run").path)
    code, out, _ = run(capsys, "pause", "--data", folder, "--reason", "a look")
    assert code == 0
    assert "order 1 (pause) is noted" in out
    run(capsys, "amend", "--data", folder, "--set", "inner.lr=0.001")
    _, out, _ = run(capsys, "status", "--data", folder, "--json")
    status = json.loads(out)
    assert [each["kind"] for each in status["orders_waiting"]] == ["pause", "amend"]
    assert status["orders_waiting"][0]["reason"] == "a look"
    assert (status["next_order"], status["newest_revision"], status["spec_revision"]) == (3, 2, 1)


def test_an_order_may_be_signed_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    key, file = tmp_path / "run.pem", tmp_path / "order"
    (folder.keys / "run.pem").rename(key)
    data = str(folder.path)
    code, _, err = run(capsys, "end", "--data", data)
    assert (code, "--key FILE" in err) == (6, True)
    code, out, _ = run(capsys, "end", "--data", data, "--key", str(key), "--out", str(file), "--after", "7")
    assert code == 0
    assert "order 1 (end)" in out
    assert run(capsys, "status", "--data", data, "--json")[1].count('"kind"') == 0
    assert run(capsys, "order", str(file), "--data", data)[0] == 0
    code, _, err = run(capsys, "order", str(file), "--data", data)
    assert (code, "has been given before: sign it as number 2" in err) == (5, True)


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["amend", "--set", "codec.block=64"], 2, "codec.block can't change while the run goes on"),
        (["amend", "--set", "inner.lrr=1"], 2, "did you mean inner.lr?"),
        (["amend", "--set", "inner.lr=fast"], 2, "inner.lr"),
        (["amend", "--set", "work.h=30"], 2, "these settings already"),
        (["amend"], 2, "nothing is to be changed"),
        (["rollback", "7"], 2, "round 7 is not in the ledger"),
        (["rollback", "0"], 5, "the observer doesn't hold the state after round 0; it holds those of: none"),
        (["evict", "nobody"], 2, "give a whole peer id"),
        (["evict", "nobody", "--key", "missing.pem"], 6, "missing.pem"),
    ],
)
def test_orders_that_can_not_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, why: str
) -> None:
    folder = make_run(tmp_path / "run")
    found = run(capsys, *words, "--data", str(folder.path))
    assert found[0] == code, found
    assert why in found[2]


def test_an_invite_carries_a_token_of_this_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    served_before(folder.path)
    code, out, _ = run(capsys, "invite", "--data", str(folder.path), "--uses", "3")
    invite = parse(out)
    assert code == 0
    assert invite.hosts == ("barn.example:8470",)
    assert invite.token
    _, again, _ = run(capsys, "invite", "--data", str(folder.path), "--uses", "3")
    assert parse(again).token != invite.token


def test_durations() -> None:
    assert [parse_duration_s(text) for text in ("90s", "15m", "12h", "7d")] == [90.0, 900.0, 43200.0, 604800.0]


def test_a_traceback_comes_only_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: dict[bool, list[str]] = {}
    for verbose in (False, True):
        assert cli.run(["status", "--data", str(tmp_path), *(["-v"] if verbose else [])]) == 6
        said[verbose] = capsys.readouterr().err.splitlines()
    assert len(said[False]) == 1
    assert said[True][0].startswith("Traceback")
    assert said[True][-1] == said[False][-1]


@pytest.mark.slow
def test_the_coordinator_imports_neither_torch_nor_hivemind() -> None:
    code = (
        "import sys, coordinator.cli, coordinator.app, coordinator.simulate, coordinator.operating\n"
        "print([name for name in ('torch', 'hivemind', 'transformers', 'node') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.strip() == "[]"
