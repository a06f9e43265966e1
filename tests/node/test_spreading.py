"""Who lays in which piece first: everything twice before anyone has it all, and what is needed next before the rest."""

from __future__ import annotations

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from node.spreading import COPIES, likeliest, needs, places_of, ranks, stock_order
from node.training.shards import pieces_of_batches
from protos.messages import PeerId, Range
from protos.runspec import RunSpec
from tests.node.chain import peer
from tests.node.runs import make_run

HASHES = [blake3(bytes([n])).digest() for n in range(64)]
PEERS = [peer(n) for n in range(1, 8)]
N_TRAIN_PIECES = 13


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    return make_run(tmp_path_factory.mktemp("run"))


def test_the_likeliest_holders_are_those_of_the_first_ranks() -> None:
    ranks_NP = np.array([ranks(places_of(HASHES), me, PEERS) for me in PEERS])
    assert (np.sort(ranks_NP, axis=0) == np.arange(len(PEERS))[:, None]).all()
    for piece, line in enumerate(likeliest(HASHES, PEERS)):
        assert [int(ranks_NP[PEERS.index(name), piece]) for name in line] == list(range(len(PEERS)))
    first_N = (ranks_NP == 0).sum(axis=1)
    assert first_N.sum() == len(HASHES)
    assert first_N.min() > 0
    assert likeliest(HASHES[:2], []) == [[], []]
    assert likeliest([], PEERS) == []


def test_who_has_gone_changes_nothing_about_the_order_of_the_others() -> None:
    for before, after in zip(likeliest(HASHES, PEERS), likeliest(HASHES, PEERS[1:]), strict=True):
        assert [name for name in before if name != PEERS[0]] == after


@settings(max_examples=30, deadline=None)
@given(cursor=st.integers(0, 100))
def test_needs_are_an_order_in_which_leases_come_true(cursor: int, spec: RunSpec) -> None:
    needs_P = needs(spec, cursor)
    assert len(needs_P) == len({*needs_P.tolist()}) == N_TRAIN_PIECES
    leased: dict[int, None] = {}
    for batch in range(cursor, cursor + 2 * spec.n_batches):
        for piece in pieces_of_batches(spec, [Range(batch, 1)]):
            leased.setdefault(piece)
    rest = [piece for piece in range(N_TRAIN_PIECES) if piece not in leased]
    assert np.argsort(needs_P)[: len(leased)].tolist() == list(leased)
    assert all(needs_P[piece] > needs_P[other] for piece in rest for other in leased)


def test_far_ahead_pieces_come_as_they_lie(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.spreading.LOOK_AHEAD", 4)
    assert np.argsort(needs(spec, 10)).tolist() == [5, 6, 7, 8, 9, 10, 11, 12, 0, 1, 2, 3, 4]


def test_together_the_members_hold_everything_twice_before_one_has_it_all(spec: RunSpec) -> None:
    places_P = places_of(HASHES[:N_TRAIN_PIECES])
    orders = [stock_order(spec, 6, places_P, me, PEERS) for me in PEERS]
    assert all(sorted(order) == list(range(N_TRAIN_PIECES)) for order in orders)
    needs_P = needs(spec, 6)
    held = np.zeros(N_TRAIN_PIECES, int)
    for me, order in zip(PEERS, orders, strict=True):
        mine = ranks(places_P, me, PEERS) < COPIES
        first = order[: mine.sum()]
        assert mine[first].all()
        assert (np.diff(needs_P[first]) > 0).all()
        held[first] += 1
    assert (held == COPIES).all()
    alone: list[PeerId] = []
    assert stock_order(spec, 6, places_P, PEERS[0], alone).tolist() == np.argsort(needs_P).tolist()
