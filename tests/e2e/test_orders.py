"""The operator's orders in real processes: given by the command line, carried by commits, obeyed by every node."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator import cli, operating
from coordinator.folder import RunFolder
from coordinator.orders import held_rounds
from node import control
from tests.e2e.runs import COORDINATOR, NODE, Ended, environment, left_over, run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

UNTIL_S = 120.0
LOOK_S = 0.1
SETTINGS = (
    "work.h=4",
    "membership.start_contributors=2",
    "rule.degraded=true",
    "deadlines.heartbeat_s=0.3",
    "deadlines.heartbeat_timeout_s=6",
    "evaluation.every_rounds=0",
)


class Running:
    """A run of real processes: what serves it, and its nodes."""

    def __init__(self, base: Path) -> None:
        self.base, self.folder = base, base / "run"
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.invite = ""

    def serve(self) -> None:
        names = () if (self.folder / "ports.json").exists() else ("--http", "--listen", "--dht")
        ports = [word for name in names for word in (name, "127.0.0.1:0")]
        if (old := self.processes.get("serve")) is not None and old.stdout is not None:
            old.stdout.close()
        with (self.base / "serve.log").open("a") as log:
            self.processes["serve"] = subprocess.Popen(
                [*COORDINATOR, "serve", "--data", str(self.folder), *ports],
                stdout=subprocess.PIPE, stderr=log, text=True, env=environment(), start_new_session=True,
            )  # fmt: skip
        out = self.processes["serve"].stdout
        assert out is not None
        for line in out:
            if line.startswith("invite "):
                self.invite = line.split()[1]
                return
        pytest.fail((self.base / "serve.log").read_text()[-3000:])

    def join(self, name: str) -> None:
        with (self.base / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(
                [*NODE, "join", self.invite, "--data", str(self.base / name), "--threads", "1", "--name", name,
                 "--listen", "127.0.0.1:0", "--dht", "127.0.0.1:0"],
                stdout=log, stderr=log, text=True, env=environment(), start_new_session=True,
            )  # fmt: skip

    def order(self, *words: str, code: int = 0) -> Ended:
        """As the command line has it, without a process for each."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            found = cli.run([words[0], "--data", str(self.folder), *words[1:]])
        ended = Ended(found, out.getvalue(), err.getvalue())
        assert ended.code == code, (words, ended.out, ended.err)
        return ended

    def status(self) -> dict[str, Any]:
        return asyncio.run(operating.status(self.folder))

    def node(self, name: str) -> dict[str, Any]:
        return dict(asyncio.run(control.ask(self.base / name, "status")))

    def rows(self) -> list[dict[str, Any]]:
        return asyncio.run(operating.ledger(self.folder))

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Look now and then until it holds."""
        ends_at = time.monotonic() + UNTIL_S
        while not holds():
            time.sleep(LOOK_S)
            if time.monotonic() > ends_at:
                logs = "\n".join(
                    f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(self.base.glob("*.log"))
                )
                pytest.fail(f"{what} did not come about: {self.status()}\n{logs}")

    def exit_code(self, name: str) -> int:
        return self.processes[name].wait(UNTIL_S)

    def stop(self) -> None:
        for name, process in self.processes.items():
            if process.poll() is None and name == "serve":
                process.terminate()  # it takes its observer along
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    text = tmp_path / "text"
    text.mkdir()
    for index in range(4):
        (text / f"{index}.txt").write_text("".join(f"line {line} of text {index}\n" for line in range(4000)))
    found = Running(tmp_path)
    sets = [word for setting in SETTINGS for word in ("--set", setting)]
    made = run(*COORDINATOR, "init", "--data", found.folder, "--data-path", text, *sets)
    assert made.code == 0, made.err
    yield found
    found.stop()
    assert left_over(tmp_path) == []


def test_every_order_in_turn(running: Running) -> None:
    running.serve()
    for name in ("a", "b"):
        running.join(name)
    running.until(lambda: running.status()["n_committed"] >= 2, "two rounds")

    # Paused, everybody waits, through a restart of the coordinator.
    running.order("pause", "--reason", "a look at the figures")
    paused = running.status()
    assert paused["paused"]
    assert paused["waiting_for"] == "the operator, who has paused the run"
    running.until(lambda: running.node("a")["state"] == "paused", "a pause")
    assert running.node("a")["paused_by"] == ["operator"]
    os.killpg(running.processes["serve"].pid, signal.SIGKILL)
    running.processes["serve"].wait(10)
    assert running.status()["paused"]

    # An order that is given while nobody serves waits until somebody does; so does what --out has written.
    file = running.base / "order"
    assert "is in" in running.order("resume", "--out", str(file)).out
    assert "nobody serves" in running.order("order", str(file)).out
    running.serve()
    before = paused["n_committed"]
    running.until(lambda: running.status()["n_committed"] > before, "a round after the pause")
    assert not running.status()["paused"]
    running.until(lambda: running.node("a")["paused_by"] == [], "its end at a node")

    # An amendment is in force from a round on, for everybody.
    refused = running.order("amend", "--set", "codec.block=32", code=2)
    assert "can't change while the run goes on" in refused.last_line
    running.order("amend", "--set", "work.h=3", "--set", "outer.lr=0.5")
    running.until(lambda: running.status()["spec_revision"] == 2, "the amendment")
    amended_from = running.status()["round"]
    running.until(lambda: running.status()["round"] > amended_from + 1, "rounds under the amendment")
    row = next(row for row in reversed(running.rows()) if row["outcome"] == "committed")
    assert (row["h"], row["outer_lr"]) == (3, 0.5)
    assert [member["steps"] for member in row["members"] if member["accepted"]] == [3, 3]

    # Back to the state of a round, and on from there.
    assert "holds those of" in running.order("rollback", "1", code=5).last_line
    running.order("pause")
    last = running.rows()[-1]
    target = next(
        row for row in reversed(running.rows()) if row["outcome"] == "committed" and row["round"] < last["round"]
    )
    running.until(lambda: target["round"] in held_rounds(RunFolder(running.folder)), "the observer's holding it")
    running.order("rollback", str(target["round"]))
    gone_back = running.rows()[-1]
    assert (gone_back["state_digest"], gone_back["outcome"]) == (target["state_digest"], "empty")
    assert [row["round"] for row in running.rows() if row["orphaned"]] == list(
        range(target["round"] + 1, gone_back["round"])
    )
    running.until(lambda: running.node("b")["digest"] == target["state_digest"], "the state gone back to")
    running.order("resume")
    again = running.status()["n_committed"]
    running.until(lambda: running.status()["n_committed"] > again, "a round from the state gone back to")

    # Who is evicted is told, and let in no more until it is taken back.
    evicted = running.node("b")["peer"]
    running.order("evict", evicted[-8:], "--reason", "it was a test")
    assert running.exit_code("b") == 5
    assert "it was a test" in (running.base / "b.log").read_text()
    running.join("b")
    assert running.exit_code("b") == 5
    running.order("evict", evicted, "--undo")
    running.join("b")
    running.until(
        lambda: [member["peer"] for member in running.rows()[-1]["members"] if member["accepted"]].count(evicted) == 1,
        "a round with who was taken back",
    )

    # The end, with its reason.
    running.order("end", "--reason", "that was all")
    for name in ("a", "b"):
        assert running.exit_code(name) == 0
        assert "that was all" in (running.base / f"{name}.log").read_text()
    assert running.status()["n_orders"] == 9, "by a commit of its own, or by the one that was under way"
