"""What members say may be anything that a float holds: a row is JSON all the same, and the ledger's file goes on."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.bulletin import Bulletin
from coordinator.errors import MachineError
from coordinator.journal import Entry
from coordinator.leading.ports import Observation
from coordinator.ledger_file import LedgerFile, line
from coordinator.rounds.events import Committed
from coordinator.rows import Observed, round_row, round_rows
from coordinator.writer import Writer
from protos.hashes import commit_hash
from protos.messages import Range, Seat
from protos.wire import encode
from tests.coordinator.made import COORDINATOR, RUN, Chained, FakeClock, append, identity, journal, next_commit, spec

ALICE, BOB = sorted(identity(number).peer for number in (10, 11))
MOST = 1.7e308


def said(link: Chained, *losses: float) -> Chained:
    """The same commit with other losses of its members."""
    members = tuple(replace(member, inner_loss=loss) for member, loss in zip(link.body.members, losses, strict=True))
    body = replace(link.body, members=members)
    commit = replace(link.commit, body=encode(body))
    return Chained(commit, body, link.before, link.after.at(commit_hash(commit.body, commit.digest), commit.digest))


def chain(ledger: Any, *losses: float) -> tuple[Chained, Chained]:
    seats = (Seat(ALICE, (Range(0, 2),), 1), Seat(BOB, (Range(2, 2),), 1))
    first = next_commit(ledger, seats=seats)
    return first, said(next_commit(first.after, counted=(ALICE, BOB)), *losses)


@pytest.mark.parametrize(
    ("losses", "mean"),
    [((3.0, 4.0), 3.5), ((MOST, 1.0), None), ((MOST, MOST), None), ((MOST, -MOST), None), ((-MOST, -MOST), None)],
)
def test_a_mean_that_is_no_number_is_null(tmp_path: Path, losses: tuple[float, float], mean: float | None) -> None:
    kept, ledger = journal(tmp_path / "j.sqlite")
    kept.close()
    _, link = chain(ledger, *losses)
    row = round_row(
        Entry(link.commit, link.body, link.after.head, (), 0, 32, False, False), Observed(), spec(), COORDINATOR.peer
    )
    assert row["inner_loss"] == mean
    assert [member["inner_loss"] for member in row["members"]] == [*losses]
    assert json.loads(line(row)) == row


def test_no_figure_of_a_row_is_anything_but_finite(tmp_path: Path) -> None:
    kept, ledger = journal(tmp_path / "j.sqlite")
    kept.close()
    _, link = chain(ledger, 3.0, 4.0)
    inf, nan = float("inf"), float("nan")
    report = {
        "bytes_sent": 1, "bytes_received": 2, "train_s": inf, "exchange_s": nan, "apply_s": 1.0,
        "idle_s": inf, "worked_s": inf,
    }  # fmt: skip
    body = replace(link.body, clip_factor=inf, aggregate_norm=nan)
    entry = Entry(link.commit, body, link.after.head, (), 0, 32, False, False)
    row = round_row(entry, Observed({ALICE: report}, nan), spec(), COORDINATOR.peer)
    assert json.loads(line(row)) == row
    assert (row["clip_factor"], row["delta_norm"], row["val_loss"]) == (None, None, None)
    assert row["seconds"] == {"train": None, "exchange": None, "apply": 1.0}
    assert (row["members"][0]["idle_share"], row["members"][0]["idle_s"]) == (None, None)
    assert row["members"][0]["bytes_sent"] == 1


def test_a_chain_with_such_a_round_is_shown_and_served_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"

    async def main() -> None:
        kept, ledger = journal(tmp_path / "j.sqlite")
        writer = Writer(kept, FakeClock())
        file = LedgerFile(path, round_rows(kept, spec(), COORDINATOR.peer))
        bulletin = Bulletin(RUN.peer, COORDINATOR.peer, spec(), kept, file, flushed=writer.flushed, say=lambda _: None)
        follower = bulletin.follow()
        assert follower is not None
        task = asyncio.ensure_future(bulletin.run())
        for link in chain(ledger, MOST, MOST):
            append(kept, link)
            subject = link.commit.digest.hex()  # with its evaluation it is written at once
            kept.observe([Observation("evaluation", ALICE, subject, {"val_loss": 2.0, "n_tokens": 1})], 1.0)
            bulletin.committed(Committed(link.commit, link.body, link.after.head, ()), link.after)
        while (await follower.next())[1].get("round") != 2:
            pass
        assert not task.done()
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()
        assert [json.loads(each)["round"] for each in path.read_text().splitlines()] == [0, 1, 2]
        await writer.close()
        LedgerFile(path, round_rows(kept, spec(), COORDINATOR.peer)).close()  # as at the next start
        kept.close()

    asyncio.run(asyncio.wait_for(main(), 60))
    text = path.read_text()
    assert "NaN" not in text
    assert "Infinity" not in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_said_once(tmp_path: Path) -> None:
    """Closing a file that could not be written raises the same again, where it would hide why all ended."""
    file = LedgerFile(tmp_path / "ledger.jsonl", [])
    file.close()
    file._file = Path("/dev/full").open("a")
    file.committed(1)
    with pytest.raises(MachineError, match="No space left"):
        file.write([{"round": 1, "val_loss": 1.0}])
    file.close()
    assert file._file is None
