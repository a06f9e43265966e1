"""What is shown of a run: digests as votes and heartbeats say them, lines and events as figures come in."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator.bulletin import Bulletin, said_digests, status_of
from coordinator.leading.ports import Observation
from coordinator.ledger_file import LedgerFile
from coordinator.rounds.events import Committed, Instant, MemberView, View
from coordinator.rows import round_rows
from coordinator.writer import Writer
from protos.messages import Range, Seat, Vote
from protos.sealer import KeySealer
from tests.coordinator.made import COORDINATOR, RUN, FakeClock, append, identity, journal, next_commit, spec

ALICE, BOB = identity(10), identity(11)


def rounds(path: Path) -> list[int]:
    return [json.loads(line)["round"] for line in path.read_text().splitlines()]


def test_digests_come_from_votes_and_from_what_members_say(tmp_path: Path) -> None:
    kept, ledger = journal(tmp_path / "j.sqlite")
    link = next_commit(ledger)
    digest = link.commit.digest
    vote = Vote(0, 1, 0, COORDINATOR.peer, b"b" * 32, digest)
    votes = (KeySealer(ALICE, RUN.peer).seal(vote), b"no envelope")
    append(kept, replace(link, commit=replace(link.commit, votes=votes)))
    head = link.after.head.hex()
    kept.observe(
        [
            Observation("digest", ALICE.peer, head, {"digest": digest.hex()}),
            Observation("digest", BOB.peer, head, {"digest": "aa"}),
        ],
        1.0,
    )
    assert said_digests(kept) == {head: {ALICE.peer: digest.hex(), BOB.peer: "aa"}}
    kept.observe([Observation("digest", ALICE.peer, head, {"digest": "bb"})], 2.0)
    assert said_digests(kept)[head][ALICE.peer] == "differing"
    kept.close()


def test_lines_and_events_follow_commits_and_figures(tmp_path: Path) -> None:
    events: list[tuple[str, Any]] = []
    path = tmp_path / "ledger.jsonl"

    async def main() -> None:
        kept, ledger = journal(tmp_path / "j.sqlite")
        clock = FakeClock()
        writer = Writer(kept, clock)
        file = LedgerFile(path, round_rows(kept, spec(), COORDINATOR.peer))
        bulletin = Bulletin(RUN.peer, COORDINATOR.peer, spec(), kept, file, flushed=writer.flushed, say=lambda _: None)
        follower = bulletin.follow()
        assert follower is not None
        task = asyncio.ensure_future(bulletin.run())
        first = next_commit(ledger, seats=(Seat(ALICE.peer, (Range(0, 2),), 1),))
        second = next_commit(first.after, counted=(ALICE.peer,))
        for link in (first, second):
            effect = Committed(link.commit, link.body, link.after.head, ())
            await writer.commit(effect, link.before, link.after)
            bulletin.committed(effect, link.after)
            while not events or events[-1][1].get("round") != link.body.round:
                events.append(await follower.next())
        content = {"val_loss": 2.5, "n_tokens": 10}
        observation = Observation("evaluation", BOB.peer, second.commit.digest.hex(), content)
        writer.observe(observation)
        bulletin.observed(observation)
        while events[-1][1]["val_loss"] is None:
            events.append(await follower.next())
        assert bulletin.val_loss == 2.5
        assert rounds(path) == [0]  # two newer ones are there; round 1 still waits for its own figure
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        bulletin.unfollow(follower)
        await writer.close()
        kept.close()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert events.pop(0) == ("say", {"text": "round 1 is empty: nobody came"})
    assert [kind for kind, _ in events] == ["round"] * len(events)
    assert {row["round"] for _, row in events} == {0, 1, 2}
    assert (events[-1][1]["round"], events[-1][1]["val_loss"]) == (2, 2.5)
    assert rounds(path) == [0, 1, 2]


def test_why_rounds_are_empty_is_said_once_and_stands_in_the_status(tmp_path: Path) -> None:
    said: list[str] = []

    async def main() -> None:
        kept, ledger = journal(tmp_path / "j.sqlite")
        writer = Writer(kept, FakeClock())
        file = LedgerFile(tmp_path / "ledger.jsonl", [])
        empty = (4, "nobody came")
        bulletin = Bulletin(
            RUN.peer, COORDINATOR.peer, spec(), kept, file, empty=empty, flushed=writer.flushed, say=said.append
        )

        def committed(link: Any) -> tuple[int, str]:
            bulletin.committed(Committed(link.commit, link.body, link.after.head, ()), link.after)
            return bulletin._n_empty, bulletin._empty_reason

        seats = (Seat(ALICE.peer, (Range(0, 2),), 1),)
        first = next_commit(ledger, seats=seats)
        second = next_commit(first.after, seats=seats)
        third = next_commit(second.after, counted=(ALICE.peer,), seats=(Seat(ALICE.peer, (Range(1, 1),), 1),))
        assert [committed(link) for link in (first, second, third)] == [(5, "nobody came"), (6, "nobody came"), (0, "")]
        assert said == ["round 1 is empty: nobody came"]
        committed(next_commit(third.after))
        assert said[1:] == ["round 4 is empty: nobody came"]
        file.close()
        await writer.close()
        kept.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_status_has_the_contracts_keys() -> None:
    member = MemberView(ALICE.peer, "alice", "training", "good", 3, 10.0, None, Instant(90.0), False)
    view = View(0, 4, "train", "alice", Instant(105.0), -1, (member,), 77, b"h" * 32, 3)
    status = status_of(RUN.peer, COORDINATOR.peer, view, Instant(100.0))
    assert {"run_id", "round", "epoch", "phase", "deadline_in_s", "leader", "members", "tokens", "head"} <= set(status)
    assert (status["deadline_in_s"], status["members"][0]["last_seen_s"]) == (5.0, 10.0)
    assert set(status["members"][0]) == {
        "peer", "name", "state", "standing", "step", "tokens_per_s", "reachable", "last_seen_s", "observer",
        "idle_share",
    }  # fmt: skip
