"""A whole run on this machine: one coordinator and N `node join`, real processes and sockets, watched to its end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from coordinator import config, operating, tools
from coordinator.children import Child
from coordinator.control import Caller, Serving, find
from coordinator.display import Display
from coordinator.errors import CoordinatorError, MachineError, StateError, UnreachableError, error_for_exit_code
from coordinator.folder import PRIVATE, RunFolder, read_founded, read_json, write_json, write_whole
from coordinator.founding import found
from coordinator.killing import Kill, Killing, Part, process_of
from coordinator.leftovers import MARK, end_leftovers
from coordinator.parent import is_alive
from protos.signing import Identity

MARKER = "simulate.json"
NODE_KEY = "identity.pem"
ANY_PORT = "127.0.0.1:0"
SERVE_STARTS_S = 25.0
POLL_S = 0.5
STALL_S = 300.0
STALL_LARGE_S = 3600.0
EMPTY_MOST = 10
"""So many rounds in a row that take nothing in, and the run would go on like that for ever."""
LAST_FIGURES_S = 30.0
RESTART_AFTER_S = 1.0
ENDS_S = 5.0
STOP_NODES_S = 2.5
STOP_S = 5.0
NODES_MOST = 64
DATA_CACHE = "256MiB"
"""What each node lays in of the training data: they all lie on one disk, beside the whole of it."""


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What to simulate; all of it is compared when a call is repeated on the same folder."""

    nodes: int = 4
    rounds: int = 8
    model: str = "tiny"
    steps: int | None = None
    rule: str | None = None
    f: int | None = None
    codec: str | None = None
    kill_every: int = 0
    data_path: str | None = None
    seed: int = 0
    sets: tuple[str, ...] = ()

    def settings(self) -> list[str]:
        """As `--set` words: a simulation's own first, so that the user's stand over them.

        All nodes share one machine, so who is the last of them says how its cores were shared out and nothing else:
        nobody's training is cut short, and what counts doesn't hang on what else the machine was doing.
        """
        words = [
            f"membership.start_contributors={self.nodes}",
            f"work.end_rounds={self.rounds}",
            f"seed={self.seed}",
            "deadlines.heartbeat_s=0.5",
            "deadlines.deadline_k=0",
            "name=simulation",
            "rule.degraded=true",
        ]
        for key, value in (
            ("work.h", self.steps),
            ("rule.name", self.rule),
            ("rule.f_max", self.f),
            ("codec.name", self.codec),
        ):
            if value is not None:
                words.append(f"{key}={value}")
        if self.data_path is not None:
            words.append(f"data.path={Path(self.data_path).absolute()}")
        return [*words, *self.sets]


@dataclass(slots=True)
class _Run:
    """The processes of one simulation and what has been seen of it."""

    folder: RunFolder
    options: SimulateOptions
    display: Display
    serving: Serving
    coordinator: Child
    mark: str
    nodes: dict[int, Child]
    killing: Killing
    rows: list[dict[str, Any]] = field(default_factory=list)
    killed: list[Kill] = field(default_factory=list)
    restarts_at: dict[int, float] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)

    @property
    def n_committed(self) -> int:
        return sum(row["outcome"] == "committed" for row in self.rows)


async def simulate(options: SimulateOptions, data: Path, display: Display) -> dict[str, Any]:
    """Run it in this folder; the contract's JSON document. Raises CoordinatorError; leaves no process in any case."""
    began = time.monotonic()
    folder = RunFolder(data)
    mark = secrets.token_hex(8)
    await _prepare(folder, options, display)
    marker = read_json(folder.path / MARKER) or {}
    write_json(folder.path / MARKER, {**marker, "pid": os.getpid(), "mark": mark})
    try:
        async with AsyncExitStack() as stack:
            run = await _start(folder, options, display, stack, mark)
            await _watch(run)
            result = await _conclude(run)
    finally:
        left = await end_leftovers(mark, display.say)
    if left:
        raise CoordinatorError(f"processes were left: {'; '.join(left)}", "they have been ended; please report this")
    founded = read_founded(folder)
    by_round = {row["round"]: row for row in run.rows}
    rounds = [row for row in run.rows if row["round"] > 0]
    losses = [row["val_loss"] for row in rounds if row["val_loss"] is not None]
    return {
        "run_id": founded.run,
        "nodes": options.nodes,
        "rounds": rounds,
        "val_loss": losses[-1] if losses else None,
        "initial_val_loss": by_round[0]["val_loss"] if 0 in by_round else None,
        "digests_equal": result["digests_equal"],
        "seconds": time.monotonic() - began,
        "export": result["export"],
        "kills": [{"node": kill.number, "part": str(kill.part), "after": kill.after_rounds} for kill in run.killed],
    }


# -- the folder ----------------------------------------------------------------------------------------------------


async def _prepare(folder: RunFolder, options: SimulateOptions, display: Display) -> None:
    """Make the run, or take up the one that is there.

    An unfinished run of the same options goes on where it stopped; a finished one, or one of other options, makes room
    for a new one. A folder that no simulation made is never touched.
    """
    asked = {**asdict(options), "sets": list(options.sets)}
    marker = read_json(folder.path / MARKER)
    if marker is None and folder.holds_run():
        raise StateError(
            f"{folder.path} holds a run that no simulation made",
            f"serve it with: coordinator serve --data {folder.path}, or choose another folder with --data",
        )
    if marker is not None:
        await _end_before(folder, marker, display)
    if marker is not None and folder.holds_run():
        if marker.get("options") == asked and not marker.get("finished"):
            display.say(f"going on with the unfinished run in {folder.path}")
            return
        why = "finished" if marker.get("finished") else "of other options"
        display.say(f"the run in {folder.path} is {why}: a new one takes its place")
    if marker is not None:
        await asyncio.to_thread(shutil.rmtree, folder.path)
    wish = config.load(options.model, None, options.settings())
    display.say("packing text and drawing the first parameters")

    async def run_tool(path: Path, to: Path) -> Any:
        made = await tools.init(path, to, display.say)
        await asyncio.to_thread(write_json, to / MARKER, {"options": asked, "finished": False})
        return made

    await found(folder.path, wish, run_tool, datetime.now(UTC))


async def _end_before(folder: RunFolder, marker: dict[str, Any], display: Display) -> None:
    """One that was killed leaves processes that are on their way out: wait for them, so that we can start at once."""
    pid, mark = marker.get("pid"), marker.get("mark")
    if isinstance(pid, int) and pid != os.getpid() and is_alive(pid) and find(folder) is not None:
        raise StateError(f"a simulation runs in {folder.path} already", "stop it, or choose another folder with --data")
    if isinstance(mark, str):
        await end_leftovers(mark, display.say)
    if find(folder) is not None:
        raise StateError(f"the run in {folder.path} is being served", "stop that, or choose another folder with --data")


# -- processes -----------------------------------------------------------------------------------------------------


async def _start(
    folder: RunFolder, options: SimulateOptions, display: Display, stack: AsyncExitStack, mark: str
) -> _Run:
    display.say("starting the coordinator")
    words = ["-v", "serve", "--data", str(folder.path), "--http", ANY_PORT, "--listen", ANY_PORT, "--dht", ANY_PORT]
    coordinator = await Child.start("coordinator", words, folder.logs / "coordinator.log", extra={MARK: mark})
    nodes: dict[int, Child] = {}
    stack.push_async_callback(_stop_all, coordinator, nodes)
    serving = await _until_serving(folder, coordinator)
    killing = Killing(options.kill_every, options.rounds, options.seed, options.nodes)
    run = _Run(folder, options, display, serving, coordinator, mark, nodes, killing)
    display.say(f"starting {options.nodes} nodes; logs are in {folder.logs}")
    for number in range(options.nodes):
        await _start_node(run, number)
    return run


async def _until_serving(folder: RunFolder, coordinator: Child) -> Serving:
    try:
        async with asyncio.timeout(SERVE_STARTS_S):
            while True:
                serving = find(folder)
                if serving is not None and serving.pid == coordinator.pid:
                    return serving
                if coordinator.exit_code is not None:
                    raise error_for_exit_code(
                        coordinator.exit_code, coordinator.last_line(), f"the log is {coordinator.log}"
                    )
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise MachineError(
            f"the coordinator did not start within {SERVE_STARTS_S:.0f} s", f"see {coordinator.log}"
        ) from None


def node_identity(seed: int, number: int) -> Identity:
    """A simulated node's key: the same for the same seed, so that a run can be had again, batch by batch."""
    return Identity.from_private_bytes(hashlib.sha256(f"barnraise simulated node {seed} {number}".encode()).digest())


async def _start_node(run: _Run, number: int) -> None:
    place = run.folder.path / "nodes" / str(number)
    if not (place / NODE_KEY).exists():
        await asyncio.to_thread(place.mkdir, mode=0o700, parents=True, exist_ok=True)
        key = node_identity(run.options.seed, number).to_pem()
        await asyncio.to_thread(write_whole, place / NODE_KEY, key, mode=PRIVATE)
    words = [
        "join",
        run.serving.invite,
        *("--data", str(place)),
        *("--threads", "1", "--device", "cpu", "--data-cache", DATA_CACHE),
        *("--listen", ANY_PORT, "--dht", ANY_PORT),
        "-v",
    ]
    log = run.folder.logs / f"node-{number}.log"
    run.nodes[number] = await Child.start("node", words, log, extra={MARK: run.mark})


async def _stop_all(coordinator: Child, nodes: dict[int, Child]) -> None:
    """The coordinator first: nodes that haven't left by themselves then have nobody to leave, and keep their seats.

    So the run goes on where it stood when it is simulated again.
    """
    await coordinator.stop(STOP_S)
    await asyncio.gather(*(child.stop(STOP_NODES_S) for child in nodes.values()))


# -- watching ------------------------------------------------------------------------------------------------------


async def _watch(run: _Run) -> None:
    """Until the run has reached its end. Raises CoordinatorError where it can't."""
    limit_s = STALL_S if run.options.model == "tiny" else STALL_LARGE_S
    seen: object = None
    moved_at = time.monotonic()
    async with Caller(run.serving) as caller:
        while True:
            status = await _asked(run, caller)
            await _update_rows(run, caller)
            run.display.update(status, run.rows)
            if status.get("ended"):
                return
            now = time.monotonic()
            if (moved := _progress(status)) != seen:
                seen, moved_at = moved, now
            if now - moved_at > limit_s:
                raise CoordinatorError(
                    f"the run has made no progress for {limit_s:.0f} s in round {status['round']} "
                    f"({status['phase']}), it waits for {status.get('waiting_for') or 'nothing that it names'}",
                    f"see the logs in {run.folder.logs}",
                )
            check_empty(status)
            _check_nodes(run)
            await _kill_some(run)
            await asyncio.sleep(POLL_S)


async def _asked(run: _Run, caller: Caller) -> dict[str, Any]:
    try:
        return await caller.status()
    except UnreachableError:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDS_S):  # its port closes a moment before it ends
                code = await run.coordinator.wait()
                raise error_for_exit_code(
                    code or 1,
                    f"the coordinator has ended: {run.coordinator.last_line()}",
                    f"the log is {run.coordinator.log}",
                ) from None
        raise


async def _update_rows(run: _Run, caller: Caller) -> None:
    """Fetch the newest rows again, since figures of a round come after its commit."""
    known = [row for row in run.rows if row["val_loss"] is not None][:-1]
    after = known[-1]["round"] if known else -1
    fresh = await caller.ledger(after)
    run.rows = [row for row in run.rows if row["round"] <= after] + fresh


def check_empty(status: dict[str, Any]) -> None:
    """Raises CoordinatorError for a run whose rounds, though they pass, come to nothing."""
    if (n_empty := status.get("empty_rounds", 0)) >= EMPTY_MOST:
        raise CoordinatorError(
            f"{n_empty} rounds in a row were empty, the last one for: {status['empty_reason']}",
            "change with --nodes or --set what it names",
        )


def _progress(status: dict[str, Any]) -> object:
    steps = tuple((member["peer"], member["state"], member["step"]) for member in status["members"])
    return status["round"], status["phase"], status.get("attempt"), steps


def _check_nodes(run: _Run) -> None:
    """A node that has ended by itself is said once; when the last one has, the run can't go on."""
    for number, child in run.nodes.items():
        if child.exit_code is not None and number not in run.gone and number not in run.restarts_at:
            run.gone.add(number)
            run.display.say(f"node {number} has ended with exit code {child.exit_code}: {child.last_line()}")
    if len(run.gone) == len(run.nodes):
        child = run.nodes[max(run.gone)]
        raise error_for_exit_code(
            max(1, child.exit_code or 1),
            f"all nodes have ended, the last one with: {child.last_line()}",
            f"the logs are in {run.folder.logs}",
        )


async def _kill_some(run: _Run) -> None:
    """Every so many rounds something of a node dies without warning; an agent is started again, which does the rest."""
    now, n_committed = time.monotonic(), run.n_committed
    for number in [number for number, at in run.restarts_at.items() if now >= at]:
        del run.restarts_at[number]
        await _start_node(run, number)
    _note_recovered(run)
    living = [number for number in run.nodes if number not in run.gone and number not in run.restarts_at]
    run.killing.draw(n_committed, living, now, _round_s(run.rows))
    for kill in run.killing.due(now, living, n_committed) if n_committed < run.options.rounds else []:
        child = run.nodes[kill.number]
        victim = process_of(child.pid, kill.part)
        if victim is None:
            run.killing.pending.append(kill)  # it is not there at this moment, so it can't die
            continue
        run.display.say(f"killing the {kill.part} of node {kill.number} after {n_committed} rounds")
        run.killed.append(kill)
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
        if kill.part is Part.AGENT:
            await child.wait()
            run.restarts_at[kill.number] = time.monotonic() + RESTART_AFTER_S


def _note_recovered(run: _Run) -> None:
    committed = [row for row in run.rows if row["outcome"] == "committed"]
    for number in list(run.killing.recovering):
        peer = node_identity(run.options.seed, number).peer
        for index, row in enumerate(committed, 1):
            if any(member["peer"] == peer and member["accepted"] for member in row["members"]):
                run.killing.counted(number, index)


def _round_s(rows: Sequence[dict[str, Any]]) -> float:
    """How long the last round took to train and exchange; 1 s while nobody has said."""
    return next((s for row in reversed(rows) if (s := sum(filter(None, row["seconds"].values()))) > 0), 1.0)


# -- the end -------------------------------------------------------------------------------------------------------


async def _conclude(run: _Run) -> dict[str, Any]:
    """Wait for the last figures, export the model, and compare the digests."""
    run.display.say("the run has reached its end; waiting for the last figures")
    last = await _last_figures(run)
    async with Caller(run.serving) as caller:
        digests = await caller.digests()
    to = run.folder.path / "export"
    run.display.say(f"exporting the model to {to}")
    await operating.export(run.folder.path, to, run.display.say)
    marker = read_json(run.folder.path / MARKER) or {}
    write_json(run.folder.path / MARKER, {**marker, "finished": True})
    if last is None:
        run.display.say("the observer has not evaluated the last round in time")
    return {"digests_equal": digests_equal(run.rows, digests), "export": str(to)}


async def _last_figures(run: _Run) -> float | None:
    """The validation loss of the last round, once the observer holds its state; None if that takes too long."""
    loss: float | None = None
    try:
        async with asyncio.timeout(LAST_FIGURES_S), Caller(run.serving) as caller:
            while True:
                await _update_rows(run, caller)
                run.display.update(await caller.status(), run.rows)
                newest = run.rows[-1]
                loss = newest["val_loss"]
                _, place = await asyncio.to_thread(tools.newest_state, run.folder)
                if loss is not None and place.partition("-")[0] == str(newest["round"]):
                    return loss
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        return loss


def digests_equal(rows: Sequence[dict[str, Any]], digests: dict[str, dict[str, str]]) -> bool:
    """Whether every digest that a member or the observer has said is its commit's, and each round has one."""
    for row in rows:
        said = digests.get(row["commit_hash"], {})
        if any(digest != row["state_digest"] for digest in said.values()):
            return False
        if row["outcome"] == "committed" and not said:
            return False
    return bool(rows)


def tidy(folder: RunFolder) -> None:
    """Leave of a finished simulation in a temporary folder what people look at: the model, the ledger, the logs."""
    for name in ("nodes", "observer", "data", "state", "keys"):
        shutil.rmtree(folder.path / name, ignore_errors=True)


def document(result: dict[str, Any]) -> str:
    return json.dumps(result, allow_nan=False)
