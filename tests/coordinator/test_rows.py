"""ROUND rows: exactly the contract's keys and those beside them; and the file that they are written to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coordinator.journal import Entry
from coordinator.leading.ports import Observation
from coordinator.ledger_file import LedgerFile
from coordinator.rows import Observed, empty_at_last, round_row, round_rows
from protos.messages import AttemptFailed, Range, Seat
from tests.coordinator.made import COORDINATOR, append, genesis, identity, journal, next_commit, spec

ALICE, BOB = sorted(identity(number).peer for number in (10, 11))

CONTRACT = {
    "round", "epoch", "attempt", "leader", "members", "rule", "f", "fallback", "degraded", "codec", "h", "lr",
    "outer_lr", "clip_factor", "flops", "energy_wh", "inner_loss", "val_loss", "delta_norm", "seconds",
    "anchor_digest", "state_digest", "commit_hash", "previous_hash", "outcome", "reason", "failed_attempts", "orphaned",
}  # fmt: skip
BESIDE = {"outer_momentum", "reducers", "nominal_step", "tokens", "seats"}
CONTRACT_MEMBER = {"peer", "tokens", "steps", "weight", "accepted", "reason", "bytes_sent", "bytes_received"}
BESIDE_MEMBER = {"batches", "sum_lr", "delta_norm", "inner_loss", "idle_s", "worked_s", "idle_share"}


def two_rounds() -> tuple[Any, Any]:
    _, _, ledger = genesis()
    seats = (Seat(ALICE, (Range(0, 2),), 1), Seat(BOB, (Range(2, 2),), 1))
    first = next_commit(ledger, seats=seats)
    return first, next_commit(first.after, counted=(ALICE, BOB))


def test_a_row_has_the_contracts_keys() -> None:
    _, link = two_rounds()
    failed = (AttemptFailed(0, 2, 0, "lost a reducer"),)
    entry = Entry(link.commit, link.body, link.after.head, failed, 0, 32, False, False)
    reports = {
        ALICE: {"bytes_sent": 10, "bytes_received": 20, "train_s": 1.0, "exchange_s": 0.5, "apply_s": 0.1},
        BOB: {"bytes_sent": 11, "bytes_received": 21, "train_s": 3.0, "exchange_s": 0.7, "apply_s": 0.3},
    }
    row = round_row(entry, Observed(reports, 2.5), spec(), COORDINATOR.peer)
    assert set(row) == CONTRACT | BESIDE
    assert all(set(member) == CONTRACT_MEMBER | BESIDE_MEMBER for member in row["members"])
    assert row["outcome"] == "committed"
    assert row["failed_attempts"] == [{"attempt": 0, "leader": COORDINATOR.peer, "reason": "lost a reducer"}]
    assert row["seconds"] == {"train": 2.0, "exchange": 0.6, "apply": 0.2}
    assert [member["bytes_sent"] for member in row["members"]] == [10, 11]
    assert [member["batches"] for member in row["members"]] == [[[0, 1]], [[2, 1]]]
    assert row["inner_loss"] == 3.5
    assert row["flops"] == 6 * 1000 * 32
    assert row["commit_hash"] == link.after.head.hex()
    assert row["previous_hash"] == link.before.head.hex()
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def idle_of(link: Any, reports: dict[Any, dict[str, Any]]) -> list[tuple[Any, ...]]:
    row = round_row(
        Entry(link.commit, link.body, link.after.head, (), 0, 32, False, False),
        Observed(reports),
        spec(),
        COORDINATOR.peer,
    )
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    return [tuple(member[name] for name in ("idle_s", "worked_s", "idle_share")) for member in row["members"]]


def test_each_members_idle_share_is_in_the_row() -> None:
    _, link = two_rounds()
    report = {"bytes_sent": 10, "bytes_received": 20, "train_s": 1.0, "exchange_s": 0.5, "apply_s": 0.1}
    unknown = (None, None, None)
    assert idle_of(link, {}) == [unknown, unknown]
    assert idle_of(link, {ALICE: report, BOB: report | {"idle_s": 1.0, "worked_s": 3.0}}) == [unknown, (1.0, 3.0, 0.25)]
    nothing, all_of_it = {"idle_s": 0.0, "worked_s": 0.0}, {"idle_s": 2.5, "worked_s": 0.0}
    assert idle_of(link, {ALICE: report | nothing, BOB: report | all_of_it}) == [unknown, (2.5, 0.0, 1.0)]


def test_how_many_of_the_last_rounds_were_empty() -> None:
    def row(round_: int, reason: str) -> dict[str, Any]:
        return {"round": round_, "outcome": "empty" if reason else "committed", "reason": reason}

    assert empty_at_last([]) == (0, "")
    assert empty_at_last([row(0, "founding")]) == (0, "")
    assert empty_at_last([row(0, "founding"), row(1, "seats")]) == (1, "seats")
    rows = [row(0, "founding"), row(1, "seats"), row(2, ""), row(3, "one is too few"), row(4, "two are too few")]
    assert empty_at_last(rows) == (2, "two are too few")
    assert empty_at_last(rows[:3]) == (0, "")


def test_what_is_not_observed_is_null() -> None:
    first, link = two_rounds()
    row = round_row(
        Entry(link.commit, link.body, link.after.head, (), 0, 32, False, False), Observed(), spec(), COORDINATOR.peer
    )
    assert row["val_loss"] is None
    assert row["seconds"] == {"train": None, "exchange": None, "apply": None}
    assert row["members"][0]["bytes_sent"] is None
    empty = round_row(
        Entry(first.commit, first.body, first.after.head, (), 0, 0, False, False), Observed(), spec(), COORDINATOR.peer
    )
    assert (empty["outcome"], empty["inner_loss"], empty["delta_norm"]) == ("empty", None, None)
    assert empty["seats"][1] == {"peer": BOB, "batches": [[2, 2]], "batch_scale": 1}


def test_rows_take_observations_from_the_journal(tmp_path: Path) -> None:
    kept, ledger = journal(tmp_path / "j.sqlite")
    first, second = two_rounds()
    assert first.before == ledger
    for link in (first, second):
        append(kept, link)
    kept.observe(
        [
            Observation("evaluation", ALICE, second.commit.digest.hex(), {"val_loss": 2.5, "n_tokens": 10}),
            Observation("evaluation", ALICE, first.commit.digest.hex(), {"val_loss": 5.0, "n_tokens": 10}),
            Observation(
                "report", BOB, "0.2",
                {"bytes_sent": 7, "bytes_received": 8, "train_s": 1, "exchange_s": 2, "apply_s": 3},
            ),
        ],
        1.0,
    )  # fmt: skip
    rows = round_rows(kept, spec(), COORDINATOR.peer)
    kept.close()
    assert [row["val_loss"] for row in rows] == [5.0, 5.0, 2.5]  # commit 0 and the empty round hold the same state
    assert [member["bytes_sent"] for member in rows[2]["members"]] == [None, 7]
    assert [member["idle_share"] for member in rows[2]["members"]] == [None, None]  # written before it was measured
    assert [row["nominal_step"] for row in rows] == [0, 0, 0]


# -- the file ------------------------------------------------------------------------------------------------------


def row(number: int, loss: float | None) -> dict[str, Any]:
    return {"round": number, "val_loss": loss}


def lines(path: Path) -> list[tuple[int, float | None]]:
    return [(each["round"], each["val_loss"]) for each in map(json.loads, path.read_text().splitlines())]


def test_a_line_waits_for_its_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    file = LedgerFile(path, [row(0, 5.0)])
    file.committed(1)
    file.write([row(1, None)])
    assert lines(path) == [(0, 5.0)]
    file.committed(2)
    file.write([row(1, None), row(2, 2.0)])
    assert lines(path) == [(0, 5.0)]  # in order: 2 waits for 1
    file.write([row(1, 3.0), row(2, 2.0)])
    assert lines(path) == [(0, 5.0), (1, 3.0), (2, 2.0)]
    file.close()


def test_the_next_commit_but_one_writes_it_without(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    file = LedgerFile(path, [])
    for number in (1, 2, 3):
        file.committed(number)
    file.write([row(1, None), row(2, None), row(3, None)])
    assert lines(path) == [(1, None)]
    file.write([row(2, None), row(3, None)], all_of_them=True)
    assert lines(path) == [(1, None), (2, None), (3, None)]
    assert file.has_gaps
    file.rewrite([row(1, 3.0), row(2, 2.0), row(3, 1.0)])
    assert lines(path) == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert not file.has_gaps
    file.close()


def test_a_start_rebuilds_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"round": 1, "val_loss": null}\n{"rou')
    file = LedgerFile(path, [row(0, 5.0), row(1, 4.0), row(2, None), row(3, 3.0), row(4, None)])
    assert lines(path) == [(0, 5.0), (1, 4.0), (2, None), (3, 3.0)]
    assert file.waiting == (4,)
    file.write([row(4, 2.0)])
    assert lines(path)[-1] == (4, 2.0)
    file.close()
