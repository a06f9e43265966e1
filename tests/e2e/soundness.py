"""What must hold of every village after its rounds, and the small things that its tests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregation.vector import flatten_into
from tests.e2e.village import Village
from tests.fakes.tiny import TinyTask
from tests.reference import diloco

UNHURRIED = (
    "deadlines.heartbeat_timeout_s=20",
    "deadlines.no_progress_s=20",
    "deadlines.train_limit_s=60",
    "deadlines.commitment_s=20",
    "deadlines.exchange_s=25",
    "deadlines.vote_s=20",
)
LATE_S = 15.0
"""Much longer than the grace for who has gone, whatever else a machine does, and shorter than any of these limits: what
comes about so soon was not waited for until one of them."""

BATCH_TOKENS = 44


def started(n: int, *more: str) -> tuple[str, ...]:
    return (f"membership.start_contributors={n}", *more)


def committed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["outcome"] == "committed"]


def one_chain(rows: Sequence[dict[str, Any]], digests: Mapping[str, Mapping[str, str]]) -> None:
    """Assert that rows from round 1 on are one chain, that all digests are the commits', and no batch counts twice."""
    assert [row["round"] for row in rows] == list(range(1, len(rows) + 1))
    for before, after in pairwise(rows):
        assert after["previous_hash"] == before["commit_hash"]
        assert after["anchor_digest"] == before["state_digest"]
    for row in rows:
        assert set(digests.get(row["commit_hash"], {}).values()) <= {row["state_digest"]}, row["round"]
    used = [
        batch
        for row in committed(rows)
        for member in row["members"]
        for start, count in member["batches"]
        for batch in range(start, start + count)
    ]
    assert len(used) == len(set(used))


async def sound(here: Village) -> list[dict[str, Any]]:
    """The ledger's rows, if they are sane: one chain, all digests equal, no batch twice, tokens and weights right."""
    rows, digests = await here.ledger(), await here.digests()
    peers = {member.peer for member in here.members}
    n_chunks = -(-here.spec.model.n_values // here.spec.codec.chunk_values)
    one_chain(rows, digests)
    for row in committed(rows):
        n_reduced = sum(reducer["chunks"] for reducer in row["reducers"])
        # Of a chunk's replicas those that were late are not named.
        assert n_reduced == n_chunks if here.spec.rule.replicas == 1 else n_reduced >= n_chunks
        accepted = [member for member in row["members"] if member["accepted"]]
        assert accepted
        for member in accepted:
            assert member["peer"] in peers
            assert member["tokens"] == BATCH_TOKENS * sum(count for _, count in member["batches"])
            assert 0 < member["steps"] <= 4 * here.spec.work.h  # over empty rounds steps add up
            assert member["weight"] == member["tokens"]
    return rows


def flat(here: Village, task: diloco.Learner) -> NDArray[np.float32]:
    theta_D = np.zeros(here.spec.model.n_values, np.float32)
    flatten_into(task.parameters(), TinyTask.of(here.spec).layout(here.spec.codec.block), theta_D)
    return theta_D


def off(found_D: NDArray[np.float32], wanted_D: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(found_D - wanted_D) / np.linalg.norm(wanted_D))
