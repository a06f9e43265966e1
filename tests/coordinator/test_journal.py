"""The journal: what was acknowledged is there after any death, and damage is found at the start.

One suite for SQLite and for PostgreSQL; what only SQLite can meet is at the end.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.errors import MachineError, StateError, UsageError
from coordinator.journal import Journal
from coordinator.leading.ports import Observation
from coordinator.rounds.events import Opened
from coordinator.rounds.ledger import Ledger
from protos.messages import AttemptFailed, PeerId, Promise, Proposal, Range, Seat
from protos.wire import encode
from tests.coordinator.databases import ALICE, Place, _patient, chain, kept, place, tamper, wait_until_nobody_leads
from tests.coordinator.made import COORDINATOR, RUN, append, journal, next_commit

__all__ = ["_patient", "kept", "place"]


def test_the_chain_comes_back(kept: tuple[Journal, Ledger, Place]) -> None:
    made, ledger, place = kept
    links = chain(ledger, 5)
    failed = (AttemptFailed(0, 1, 0, "a reducer was lost"),)
    made.append(links[0].commit, links[0].body, links[0].before, links[0].after, failed, 7.0)
    for link in links[1:]:
        append(made, link, 8.0)
        append(made, link, 9.0)  # again changes nothing
    made.close()
    again = Journal.open(place, RUN.peer)
    recovered = again.recover()
    assert (recovered.commit, recovered.body, recovered.ledger) == (links[-1].commit, links[-1].body, links[-1].after)
    assert (recovered.opened, recovered.promise, recovered.run_time_s) == (-1, None, 8.0)
    entries = again.entries()
    assert [entry.body.round for entry in entries] == [0, 1, 2, 3, 4, 5]
    assert entries[1].failed == failed
    assert [entry.nominal_step for entry in entries] == [0, 0, 0, 2, 4, 6]
    assert [entry.tokens for entry in entries] == [0, 0, 16, 32, 48, 64]
    assert [entry.body.round for entry in again.entries(after_round=3)] == [4, 5]
    assert again.origin_unix_s() == 1000.0
    again.close()


def test_the_ledger_is_folded_again_where_the_stored_one_does_not_fit(kept: tuple[Journal, Ledger, Place]) -> None:
    made, ledger, place = kept
    links = chain(ledger, 3)
    for link in links:
        append(made, link)
    tamper(place, "UPDATE ledgers SET content = :content", content=ledger.to_bytes())
    assert made.recover().ledger == links[-1].after


def test_promises_openings_and_orders(kept: tuple[Journal, Ledger, Place]) -> None:
    made, ledger, _ = kept
    link = chain(ledger, 1)[0]
    proposal = Proposal(link.commit.body, b"", b"", (), ())
    made.persist(Opened(0, 1, 0))
    made.persist(proposal)
    made.persist(Promise(0, 1, 1, COORDINATOR.peer, b"h" * 32, -1, None))
    voted = Promise(0, 1, 2, COORDINATOR.peer, b"h" * 32, 2, proposal)
    made.persist(Opened(0, 1, 2))
    made.persist(voted)
    made.order("pause", b"first", 3.0)
    recovered = made.recover()
    assert (recovered.opened, recovered.promise, recovered.run_time_s) == (2, voted, 3.0)
    append(made, link)
    made.order("resume", b"second", 4.0)
    recovered = made.recover()
    assert (recovered.opened, recovered.promise, recovered.run_time_s) == (-1, voted, 4.0)
    assert made.orders() == [b"first", b"second"]


def test_an_epoch_of_a_branch_that_was_given_up_is_not_open(kept: tuple[Journal, Ledger, Place]) -> None:
    made, ledger, _ = kept
    fork, first = chain(ledger, 2)
    append(made, fork)
    made.persist(Opened(0, 2, 1))
    made.persist(Promise(0, 2, 1, COORDINATOR.peer, fork.after.head, -1, None))
    lonely = fork.after.in_epoch(1, COORDINATOR.peer)
    for link in chain(lonely, 2):
        made.persist(Opened(1, link.body.round, 0))
        append(made, link)
    made.persist(Opened(1, 4, 3))
    made.persist(Promise(1, 4, 3, COORDINATOR.peer, b"h" * 32, -1, None))
    assert (made.recover().ledger.epoch, made.recover().epoch, made.recover().opened) == (1, 1, 3)
    made.orphan(fork.after)
    others = [first, next_commit(first.after, counted=(ALICE,), seats=(Seat(ALICE, (Range(90, 2),), 1),))]
    for link in others:
        append(made, link)
    recovered = made.recover()
    assert (recovered.ledger, recovered.epoch, recovered.opened) == (others[-1].after, 0, -1), "round 4 again"
    assert recovered.numbers == {(0, 2): 1, (1, 2): 0, (1, 3): 0, (1, 4): 3}
    assert recovered.signed == {0: 2, 1: 4}
    made.persist(Opened(2, 4, 0))
    assert made.recover().epoch == 2, "one that was opened since"


def test_observations_are_read_by_kind_and_subject(kept: tuple[Journal, Ledger, Place]) -> None:
    made, _, _ = kept
    first = Observation("evaluation", ALICE, "aa", {"val_loss": 2.5})
    second = Observation("evaluation", ALICE, "bb", {"val_loss": 2.0})
    made.observe([first, Observation("digest", ALICE, "aa", {"digest": "11"}), second], 1.0)
    made.observe([], 1.0)
    assert made.observations("evaluation") == [first, second]
    assert made.observations("evaluation", ["bb"]) == [second]
    assert made.observations("report") == []


def test_another_run_and_another_schema_are_refused(kept: tuple[Journal, Ledger, Place]) -> None:
    made, _, place = kept
    with pytest.raises(StateError, match="is of run"):
        Journal.open(place, PeerId("12D3KooWother"))
    made.close()
    tamper(place, "UPDATE facts SET value = '99' WHERE name = 'schema'")
    with pytest.raises(StateError, match="schema 99"):
        Journal.open(place, RUN.peer)


def test_a_changed_commit_is_noticed(kept: tuple[Journal, Ledger, Place]) -> None:
    made, ledger, place = kept
    links = chain(ledger, 2)
    for link in links:
        append(made, link)
    tamper(place, "UPDATE commits SET content = :content WHERE round = 2", content=encode(links[0].commit))
    with pytest.raises(StateError, match="doesn't have its hash"):
        made.recover()


def test_a_missing_commit_is_noticed(kept: tuple[Journal, Ledger, Place]) -> None:
    made, ledger, place = kept
    for link in chain(ledger, 3):
        append(made, link)
    tamper(place, "DELETE FROM commits WHERE round = 2")
    with pytest.raises(StateError, match="a commit is missing"):
        made.recover()


_WRITER = """
import sys
from pathlib import Path
from coordinator.journal import Journal
from coordinator.rounds.events import Opened
from tests.coordinator.databases import chain
from tests.coordinator.made import RUN, append

journal = Journal.open(sys.argv[1] if "://" in sys.argv[1] else Path(sys.argv[1]), RUN.peer)
journal.begin_term("a writer")
recovered = journal.recover()
links = chain(recovered.ledger, 200)
for number, link in enumerate(links):
    journal.persist(Opened(0, link.body.round, number))
    append(journal, link)
    print(link.body.round, flush=True)
"""


@pytest.mark.slow
def test_kill_9_loses_no_acknowledged_write(place: Place) -> None:
    made, _ = journal(place)
    made.close()
    for n_lines in (1, 7, 23):
        wait_until_nobody_leads(place)
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(place)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
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
        wait_until_nobody_leads(place)
        again = Journal.open(place, RUN.peer)
        recovered = again.recover()
        rounds = [entry.body.round for entry in again.entries()]
        again.close()
        assert recovered.body.round >= acknowledged
        assert rounds == list(range(recovered.body.round + 1))


# -- SQLite alone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"not a database at all, but long enough to be looked at" * 100])
def test_a_damaged_file_is_named_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(content)
    with pytest.raises(StateError, match=str(path)) as caught:
        Journal.open(path, RUN.peer)
    assert "copy" in str(caught.value)
    assert caught.value.exit_code == 6


def test_overwritten_pages_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    made, ledger = journal(path)
    for link in chain(ledger, 30):
        append(made, link)
    made.close()
    raw = bytearray(path.read_bytes())
    for start in range(4096, len(raw), 4096):
        raw[start : start + 64] = b"\xff" * 64
    path.write_bytes(raw)
    with pytest.raises(StateError, match="damaged"):
        Journal.open(path, RUN.peer)


def test_a_missing_file_and_a_bad_url(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="missing"):
        Journal.open(tmp_path / "none.sqlite", RUN.peer)
    with pytest.raises(UsageError, match="--database"):
        Journal.open("nonsense://x", RUN.peer)
    with pytest.raises(MachineError):
        Journal.open(f"sqlite:///{tmp_path}/no/such/folder/x.sqlite", RUN.peer)
