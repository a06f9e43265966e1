"""A node that stands in: what it leads by are the settings and the books that its node knows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger, fold
from coordinator.rounds.orders import Orders
from coordinator.rounds.proposing import build_body
from node.journal import Journal
from node.leading import Leading, StandInParts
from protos.hashes import body_hash, commit_hash
from protos.messages import Body, Commit, Order, PeerId, Vote
from protos.orders import Kind, open_order, seal_order
from protos.runspec import RunSpec
from protos.sealer import KeySealer
from protos.signing import Identity
from protos.wire import encode
from tests.coordinator.made import COORDINATOR, RUN, genesis, spec
from tests.node.states import advance, new_store

ME = Identity.from_private_bytes(bytes([9]) * 32)
SPEC = spec()


def commit_of(ledger: Ledger, *given: Any, target: Ledger | None = None) -> tuple[Commit, Body, Ledger]:
    """An empty commit by the coordinator, the only voter."""
    body = build_body(
        ledger, SPEC, COORDINATOR.peer, attempt=0, leader=COORDINATOR.peer, evidence=None, reason="by order", seated=(),
        left=(), orders=Orders(given, target, {1: SPEC}),
    )  # fmt: skip
    digest = target.digest if target is not None else ledger.digest
    content = encode(body)
    vote = Vote(0, body.round, 0, COORDINATOR.peer, body_hash(content), digest)
    commit = Commit(content, digest, 0, (KeySealer(COORDINATOR, RUN.peer).seal(vote),), ())
    return commit, body, fold(ledger, body, given, target).at(commit_hash(content, digest), digest)


def leading(path: Path, held: tuple[Commit, Ledger], targets: Mapping[bytes, Ledger], told: list[bool]) -> Leading:
    specs: dict[int, RunSpec] = {1: SPEC}
    return Leading(
        StandInParts(
            me=ME.peer, run=RUN.peer, coordinator=COORDINATOR.peer, spec=lambda: SPEC, specs=lambda: specs,
            targets=lambda: targets, sealer=KeySealer(ME, RUN.peer), journal=Journal(path), peers=None,  # type: ignore[arg-type]
            held=lambda: held, head_since=lambda: Instant(0.0), signed_head=lambda: b"", seconds=lambda: 0.0,
            run_time_s=lambda: 0.0, say=lambda _: None, led=told.append, failed=lambda error: None,
        )
    )  # fmt: skip


def test_a_stand_in_knows_the_books_that_the_run_may_go_back_to(tmp_path: Path) -> None:
    commit_0, _, first = genesis(SPEC)
    commit_1, _, second = commit_of(first)
    raw = seal_order(RUN, Order(RUN.peer, 1, str(Kind.ROLLBACK), PeerId(""), first.round, first.head, ""))
    order = open_order(raw, run=RUN.peer, coordinator=COORDINATOR.peer)
    back, body, _ = commit_of(second, order, target=first)

    async def main() -> None:
        told: list[bool] = []
        stand_in = leading(tmp_path / "votes.sqlite", (commit_1, second), {first.head: first}, told)
        await stand_in.begin()
        assert told == [True]
        driver = stand_in._driver
        assert driver is not None
        assert driver._rounds._targets == {first.head: first}  # type: ignore[attr-defined]
        stand_in.applied(back)  # its session has gone back with the coordinator meanwhile
        async with asyncio.timeout(60):
            while driver.ledger.head == second.head:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0)
        assert driver.ledger.rollbacks == 1
        assert driver.ledger.head == commit_hash(back.body, back.digest)
        await stand_in.close()

    asyncio.run(main())
    assert commit_0.digest == back.digest
    assert body.orders == (raw,)


def test_the_books_of_kept_states_are_there_by_their_heads(tmp_path: Path) -> None:
    store, first = new_store(tmp_path)
    name, _, commit, second = advance(store, first)
    store.apply(name, commit, second)
    assert store.books() == {first.head: first, second.head: second}
