"""What a node keeps in its data folder, opened in the order that a crash at any moment asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from aggregation import codec
from coordinator.rounds import ledger as ledgers
from coordinator.rounds import policy
from coordinator.rounds.voter import Voter
from node.commits import CommitLog
from node.config import NodeOptions
from node.files import replace_file, writing
from node.journal import Journal
from node.keeping import Keeper
from node.residual import Residuals
from node.results import ResultsStore
from node.room import check_room_for
from node.session.catching_up import commits_kept
from node.specs import SpecsFolder
from node.state import StateStore
from node.training.shared import frame_sizes
from protos import hashes, wire
from protos.messages import Commit, PeerId
from protos.runspec import RunSpec

ROWS_PREFIX, EVALUATED_PREFIX = "rows.", "evaluate."
"""What the names of two kinds of files in the work folder begin with: an attempt's received rows, a state's θ."""
_LEFT = (f"{ROWS_PREFIX}*", f"{EVALUATED_PREFIX}*", "*.new")
"""What only a process that was cut off leaves there: nobody takes it up again."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A data folder, open."""

    spec: RunSpec
    """The settings that are in force at the state which is held; not always the newest that are known."""
    specs: Mapping[int, RunSpec]
    kept_specs: SpecsFolder
    store: StateStore
    results: ResultsStore
    residuals: Residuals
    commits: CommitLog
    keeper: Keeper
    journal: Journal
    voter: Voter
    signed_head: bytes
    """The envelope that the journal has of the head; empty: none."""
    work: Path
    """What the agent and the trainer hand each other."""
    data: Path
    """Training data."""

    @property
    def spec_path(self) -> Path:
        """The settings in force, as the trainer reads them."""
        return self.work / "spec.json"


async def open_folder(
    options: NodeOptions,
    me: PeerId,
    run: PeerId,
    coordinator: PeerId,
    spec: RunSpec,
    pool: ThreadPoolExecutor,
    stack: AsyncExitStack,
    *,
    seconds: Callable[[], float],
    say: Callable[[str], None],
) -> Folder:
    """Open it, put right what a crash left, and have the stack close it. Whoever calls has the folder's lock.

    Args:
        spec: as admission gave it.
        pool: its threads work on these files, and end before the files close.
        say: takes what a contributor would want to read.

    Raises NodeError: a folder that is damaged or another run's, a disk that is too small or full.
    """
    work = options.data / "work"
    await asyncio.to_thread(_make, work)
    for problem in await asyncio.to_thread(_clear, work):
        say(problem)
    grid = policy.grid(spec)
    store = StateStore(options.data / "state", grid, pool, seconds=seconds)
    for problem in await asyncio.to_thread(store.open):
        say(problem)
    kept_specs = SpecsFolder(options.data / "specs", run)
    specs = {spec.revision: spec, **await asyncio.to_thread(kept_specs.load)}
    if store.current is not None:  # the coordinator may have told of one that is not in force here yet
        spec = specs.get(store.current.ledger.spec_revision, spec)
    await asyncio.to_thread(check_room_for, spec, options.data)
    await asyncio.to_thread(_write_spec, work / "spec.json", spec)
    if options.run_dir is not None and store.current is None:
        await asyncio.to_thread(_install_first_state, options.run_dir, store, run, coordinator)
    result_codec = codec.result_codec(spec.codec.name)
    results = ResultsStore(
        options.data / "results", frame_sizes(grid, result_codec, spec.codec.block), spec.codec.leaf_values
    )
    stack.callback(results.close)
    # Before the files close: a thread that still wrote would write into whatever is opened next.
    stack.push_async_callback(asyncio.to_thread, pool.shutdown, wait=True, cancel_futures=True)
    residuals = Residuals(work, run, me, spec)
    await asyncio.to_thread(residuals.settle, store.current)
    commits = CommitLog(options.data / "commits", commits_kept(spec.keep))
    keeper = Keeper(store, results, commits, spec.keep)
    for note in await asyncio.to_thread(keeper.settle):
        say(note)
    journal = Journal(options.data / "votes.sqlite")
    stack.callback(journal.close)
    record, fresh = await asyncio.to_thread(journal.load)
    signed = await asyncio.to_thread(journal.signed)
    return Folder(
        spec=spec,
        specs=specs,
        kept_specs=kept_specs,
        store=store,
        results=results,
        residuals=residuals,
        commits=commits,
        keeper=keeper,
        journal=journal,
        voter=Voter(me, record, lost=fresh, signed=signed),
        signed_head=await asyncio.to_thread(journal.head),
        work=work,
        data=options.run_dir / "data" if options.run_dir else options.data / "data",
    )


def _make(work: Path) -> None:
    with writing(work.parent, "the folder of the trainer", 4096):
        work.mkdir(exist_ok=True)


def _clear(work: Path) -> list[str]:
    """Remove what a crash left; what can't be removed, which stops nobody."""
    problems: list[str] = []
    for path in sorted({path for pattern in _LEFT for path in work.glob(pattern)}):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            problems.append(f"{path} is needed no more and can't be removed: {error.strerror or error}")
    return problems


def _write_spec(path: Path, spec: RunSpec) -> None:
    raw = spec.to_bytes()
    with writing(path.parent, "the run's settings", len(raw)):
        replace_file(path, raw)


def _install_first_state(run_dir: Path, store: StateStore, run: PeerId, coordinator: PeerId) -> None:
    """The observer starts from the run's own folder, wherever the chain is by now."""
    commit = wire.decode(Commit, (run_dir / "genesis.bin").read_bytes())
    first = ledgers.genesis(run, coordinator)
    head = hashes.commit_hash(commit.body, commit.digest)
    state = run_dir / "state"
    store.install_initial(state / "theta.bin", state / "momentum.bin", commit, first.at(head, commit.digest))
