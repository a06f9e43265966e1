"""What is kept for who was away: commits, results of the last rounds, a snapshot every few, and nothing more."""

from __future__ import annotations

from pathlib import Path

import pytest

from aggregation.digest import chunk_root
from node.commits import CommitLog
from node.keeping import Keeper
from node.results import ResultsStore
from node.state import StateStore
from protos.messages import Outcome
from protos.runspec import KeepSpec
from tests.node.states import GRID, THETA, advance, frames_of, new_store

FRAMES = frames_of(THETA)
HASHES = [chunk_root(frame, 1024) for frame in FRAMES]
KEEP = KeepSpec(results=3, snapshot_every=2)


class Home:
    """A node's stores, and its rounds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store, self.ledger = new_store(folder)
        self.open()

    def open(self) -> None:
        self.results = ResultsStore(self.folder / "results", [len(frame) for frame in FRAMES], 1024, kept=2)
        self.commits = CommitLog(self.folder / "commits", 64)
        self.keeper = Keeper(self.store, self.results, self.commits, KEEP)

    def restart(self) -> list[str]:
        self.results.close()
        self.store = StateStore(self.folder / "state", GRID)
        said = self.store.open()
        self.open()
        return [*said, *self.keeper.settle()]

    def round(self, outcome: Outcome = Outcome.COMMITTED) -> list[str]:
        name, _, commit, self.ledger = advance(self.store, self.ledger, outcome, seed=self.ledger.round)
        if outcome is Outcome.COMMITTED:
            area = self.results.area(name)
            for chunk, frame in enumerate(FRAMES):
                area.put(chunk, frame, HASHES[chunk])
        self.store.apply(name, commit, self.ledger)
        return self.keeper.settle()

    def kept(self) -> list[int]:
        """The rounds whose results are here."""
        names = {path.name for path in (self.folder / "results").iterdir()}
        rounds = [(entry.round, entry.body_hash.hex()) for entry in self.commits.back(self.ledger.head)]
        return sorted(round_ for round_, name in rounds if name in names)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_results_of_the_last_rounds_and_a_snapshot_every_few(home: Home) -> None:
    assert home.keeper.settle() == []
    frozen = []
    for _ in range(9):
        assert home.round() == []
        assert home.store.frozen is not None
        frozen.append(home.store.frozen.ledger.round)
    assert frozen == [0, 2, 2, 4, 4, 6, 6, 8, 8]
    assert set(home.kept()) >= {7, 8, 9}
    assert len(home.kept()) <= 3 + 2  # those that are kept anyway for a while
    assert [entry.round for entry in home.commits.back(home.ledger.head)] == list(range(9, -1, -1))
    for number in range(4):  # other attempts come to nothing
        home.results.area(bytes([number]) * 32)
    assert home.kept() == [7, 8, 9]


def test_empty_rounds_take_no_place_from_results(home: Home) -> None:
    home.round()
    home.round()
    for _ in range(6):
        home.round(Outcome.EMPTY)
    for number in range(4):
        home.results.area(bytes([number]) * 32)
    assert home.kept() == [1, 2]


def test_a_restart_keeps_what_is_kept(home: Home) -> None:
    for _ in range(5):
        home.round()
    before = home.kept()
    assert home.restart() == []
    assert home.kept() == before
    assert home.store.frozen is not None
    assert home.store.frozen.ledger.round == 4


def test_a_crash_between_the_switch_and_the_rest_is_made_up_for(home: Home) -> None:
    home.round()
    name, _, commit, home.ledger = advance(home.store, home.ledger)
    home.store.apply(name, commit, home.ledger)  # and no more
    assert home.restart() == []
    assert [entry.round for entry in home.commits.back(home.ledger.head)] == [2, 1]
    assert home.store.frozen is not None
    assert home.store.frozen.ledger.round == 2


def test_what_has_no_room_is_left_out_and_said(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("node.snapshots.link_vectors", full)
    monkeypatch.setattr("node.commits.replace_file", full)
    home.round()
    said = home.round()
    assert len(said) == 2
    assert "commit of round 2 is not kept" in said[0]
    assert "no snapshot after round 2" in said[1]
    assert home.store.current is not None
    assert home.store.current.ledger.round == 2


def test_nothing_is_kept_of_nothing(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "state", GRID)
    results = ResultsStore(tmp_path / "results", [100], 1024)
    assert Keeper(store, results, CommitLog(tmp_path / "commits", 8), KEEP).settle() == []
    results.close()
