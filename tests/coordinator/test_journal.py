"""The journal: what was acknowledged is there after any death, and damage is found at the start."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.errors import MachineError, StateError, UsageError
from coordinator.journal import Journal
from coordinator.leading.ports import Observation
from coordinator.rounds.events import Opened
from coordinator.rounds.ledger import Ledger
from protos.messages import AttemptFailed, PeerId, Promise, Proposal, Range, Seat
from tests.coordinator.made import COORDINATOR, RUN, Chained, append, identity, journal, next_commit

ALICE = identity(10).peer


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[tuple[Journal, Ledger, Path]]:
    path = tmp_path / "journal.sqlite"
    made, ledger = journal(path)
    yield made, ledger, path
    made.close()


def chain(ledger: Ledger, n: int) -> list[Chained]:
    links = [next_commit(ledger, seats=(Seat(ALICE, (Range(ledger.cursor, 2),), 1),))]
    while len(links) < n:
        before = links[-1].after
        seats = (Seat(ALICE, (Range(before.cursor, 2),), 1),)
        links.append(next_commit(before, counted=(ALICE,), seats=seats))
    return links


def test_the_chain_comes_back(kept: tuple[Journal, Ledger, Path]) -> None:
    made, ledger, path = kept
    links = chain(ledger, 5)
    failed = (AttemptFailed(0, 1, 0, "a reducer was lost"),)
    made.append(links[0].commit, links[0].body, links[0].before, links[0].after, failed, 7.0)
    for link in links[1:]:
        append(made, link, 8.0)
        append(made, link, 9.0)  # again changes nothing
    made.close()
    again = Journal.open(path, RUN.peer)
    recovered = again.recover()
    assert (recovered.commit, recovered.body, recovered.ledger) == (links[-1].commit, links[-1].body, links[-1].after)
    assert (recovered.opened, recovered.promise, recovered.paused, recovered.run_time_s) == (-1, None, False, 8.0)
    entries = again.entries()
    assert [entry.body.round for entry in entries] == [0, 1, 2, 3, 4, 5]
    assert entries[1].failed == failed
    assert [entry.nominal_step for entry in entries] == [0, 0, 0, 2, 4, 6]
    assert [entry.tokens for entry in entries] == [0, 0, 16, 32, 48, 64]
    assert [entry.body.round for entry in again.entries(after_round=3)] == [4, 5]
    assert again.origin_unix_s() == 1000.0
    again.close()


def test_the_ledger_is_folded_again_where_the_stored_one_does_not_fit(kept: tuple[Journal, Ledger, Path]) -> None:
    made, ledger, path = kept
    links = chain(ledger, 3)
    for link in links:
        append(made, link)
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE ledgers SET content = ?", (ledger.to_bytes(),))
    raw.close()
    assert made.recover().ledger == links[-1].after


def test_promises_openings_and_orders(kept: tuple[Journal, Ledger, Path]) -> None:
    made, ledger, _ = kept
    link = chain(ledger, 1)[0]
    proposal = Proposal(link.commit.body, b"", b"", (), ())
    made.persist(Opened(0, 1, 0))
    made.persist(proposal)
    made.persist(Promise(0, 1, 1, COORDINATOR.peer, b"h" * 32, -1, None))
    voted = Promise(0, 1, 2, COORDINATOR.peer, b"h" * 32, 2, proposal)
    made.persist(Opened(0, 1, 2))
    made.persist(voted)
    made.order("pause", {}, 3.0)
    recovered = made.recover()
    assert (recovered.opened, recovered.promise, recovered.paused) == (2, voted, True)
    append(made, link)
    made.order("resume", {}, 4.0)
    recovered = made.recover()
    assert (recovered.opened, recovered.promise, recovered.paused) == (-1, voted, False)


def test_observations_are_read_by_kind_and_subject(kept: tuple[Journal, Ledger, Path]) -> None:
    made, _, _ = kept
    first = Observation("evaluation", ALICE, "aa", {"val_loss": 2.5})
    second = Observation("evaluation", ALICE, "bb", {"val_loss": 2.0})
    made.observe([first, Observation("digest", ALICE, "aa", {"digest": "11"}), second], 1.0)
    made.observe([], 1.0)
    assert made.observations("evaluation") == [first, second]
    assert made.observations("evaluation", ["bb"]) == [second]
    assert made.observations("report") == []


def test_another_run_and_another_schema_are_refused(kept: tuple[Journal, Ledger, Path]) -> None:
    made, _, path = kept
    with pytest.raises(StateError, match="is of run"):
        Journal.open(path, PeerId("12D3KooWother"))
    made.close()
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE facts SET value = '99' WHERE name = 'schema'")
    raw.close()
    with pytest.raises(StateError, match="schema 99"):
        Journal.open(path, RUN.peer)


@pytest.mark.parametrize("content", [b"", b"not a database at all, but long enough to be looked at" * 100])
def test_a_damaged_file_is_named_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(content)
    with pytest.raises(StateError, match=str(path)) as caught:
        Journal.open(path, RUN.peer)
    assert "copy" in str(caught.value)
    assert caught.value.exit_code == 6


def test_overwritten_pages_are_noticed(kept: tuple[Journal, Ledger, Path]) -> None:
    made, ledger, path = kept
    for link in chain(ledger, 30):
        append(made, link)
    made.close()
    raw = bytearray(path.read_bytes())
    for start in range(4096, len(raw), 4096):
        raw[start : start + 64] = b"\xff" * 64
    path.write_bytes(raw)
    with pytest.raises(StateError, match="damaged"):
        Journal.open(path, RUN.peer)


def test_a_changed_commit_is_noticed(kept: tuple[Journal, Ledger, Path]) -> None:
    made, ledger, path = kept
    links = chain(ledger, 2)
    for link in links:
        append(made, link)
    with sqlite3.connect(path) as raw:
        other = links[0].commit
        from protos.wire import encode

        raw.execute("UPDATE commits SET content = ? WHERE round = 2", (encode(other),))
    raw.close()
    with pytest.raises(StateError, match="doesn't have its hash"):
        made.recover()


def test_a_missing_commit_is_noticed(kept: tuple[Journal, Ledger, Path]) -> None:
    made, ledger, path = kept
    for link in chain(ledger, 3):
        append(made, link)
    with sqlite3.connect(path) as raw:
        raw.execute("DELETE FROM commits WHERE round = 2")
    raw.close()
    with pytest.raises(StateError, match="a commit is missing"):
        made.recover()


def test_a_missing_file_and_a_bad_url(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="missing"):
        Journal.open(tmp_path / "none.sqlite", RUN.peer)
    with pytest.raises(UsageError, match="--database"):
        Journal.open("nonsense://x", RUN.peer)
    with pytest.raises(MachineError):
        Journal.open(f"sqlite:///{tmp_path}/no/such/folder/x.sqlite", RUN.peer)


_WRITER = """
import sys
from pathlib import Path
from coordinator.journal import Journal
from coordinator.rounds.events import Opened
from tests.coordinator.made import RUN, append
from tests.coordinator.test_journal import chain

journal = Journal.open(Path(sys.argv[1]), RUN.peer)
recovered = journal.recover()
links = chain(recovered.ledger, 200)
for number, link in enumerate(links):
    journal.persist(Opened(0, link.body.round, number))
    append(journal, link)
    print(link.body.round, flush=True)
"""


@pytest.mark.slow
def test_kill_9_loses_no_acknowledged_write(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    made, _ = journal(path)
    made.close()
    for n_lines in (1, 7, 23):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        assert process.stdout is not None
        with process.stdout:
            acknowledged = 0
            for _ in range(n_lines):
                acknowledged = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read().splitlines(keepends=True)
        whole = [line for line in rest if line.endswith("\n")]
        acknowledged = int(whole[-1]) if whole else acknowledged
        process.wait()
        again = Journal.open(path, RUN.peer)
        recovered = again.recover()
        rounds = [entry.body.round for entry in again.entries()]
        again.close()
        assert recovered.body.round >= acknowledged
        assert rounds == list(range(recovered.body.round + 1))
