"""Which pieces of the training data a node lays in first, and who is likely to hold one: pure arithmetic.

For each piece every member has a rank of its own among all members, by a mixed hash of both (rendezvous hashing). A
node lays in the pieces for which it is among the first `COPIES`, those that the run needs soonest before the others,
then those for which it is among the next `COPIES`, and so on. So the members together hold everything that often before
one of them has it all; what their room allows are the pieces that will be leased next, wherever the run is in its data;
and who looks for a piece asks those first who lay it in first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from node.training.schedule import batch_order
from node.training.shards import Shards
from protos.messages import PeerId
from protos.runspec import RunSpec

COPIES = 2
LOOK_AHEAD = 2**15
"""So many batches ahead the order of need is exact; after that, pieces come as they lie in the shard."""
HASH_BYTES = 32

_U64 = NDArray[np.uint64]


def places_of(hashes: Sequence[bytes]) -> _U64:
    """(P,) the first 8 bytes of each piece's hash: what members are ranked by."""
    return np.frombuffer(b"".join(hashes), "<u8").reshape(len(hashes), HASH_BYTES // 8)[:, 0].astype(np.uint64)


def ranks(places_P: _U64, me: PeerId, others: Iterable[PeerId]) -> NDArray[np.int32]:
    """(P,) how many of the others come before me at each piece."""
    mine_P = _keys(me, places_P)
    ranks_P = np.zeros(len(places_P), np.int32)
    for other in others:
        if other != me:
            ranks_P += _keys(other, places_P) < mine_P
    return ranks_P


def likeliest(hashes: Sequence[bytes], peers: Sequence[PeerId]) -> list[list[PeerId]]:
    """For each piece the peers in the order in which they lay it in."""
    if not peers or not hashes:
        return [[] for _ in hashes]
    places_P = places_of(hashes)
    order_NP = np.argsort(np.stack([_keys(peer, places_P) for peer in peers]), axis=0, kind="stable")
    return [[peers[index] for index in column] for column in order_NP.T.tolist()]


def needs(spec: RunSpec, cursor: int) -> NDArray[np.int64]:
    """(P,) when the run needs each piece of the train shard, from the next batch that it will lease on: an order."""
    shards, n_batches, per_batch = Shards.of(spec.data), spec.n_batches, spec.batch_sequences
    n_pieces = shards.n_train_pieces
    pass_index, index = divmod(cursor, n_batches)
    order = batch_order(n_batches, pass_index, spec.data.seed)
    first = shards.pieces_of_train(order.batch(index) * per_batch, per_batch)[0]
    later = n_pieces * (LOOK_AHEAD + 1)
    needs_P = later + (np.arange(n_pieces, dtype=np.int64) - first) % n_pieces
    seen: dict[int, None] = {}
    for _ in range(min(LOOK_AHEAD, 2 * n_batches)):
        for piece in shards.pieces_of_train(order.batch(index) * per_batch, per_batch):
            seen.setdefault(piece)
        if len(seen) == n_pieces:
            break
        index += 1
        if index == n_batches:
            pass_index, index = pass_index + 1, 0
            order = batch_order(n_batches, pass_index, spec.data.seed)
    needs_P[np.fromiter(seen, np.int64, len(seen))] = np.arange(len(seen))
    return needs_P


def stock_order(spec: RunSpec, cursor: int, places_P: _U64, me: PeerId, others: Iterable[PeerId]) -> NDArray[np.int64]:
    """(P,) the pieces of the train shard in the order in which this node lays them in.

    `places_P` are those of the train shard's pieces, `others` the members that one could fetch from.
    """
    return np.lexsort((needs(spec, cursor), ranks(places_P, me, others) // COPIES)).astype(np.int64)


def _keys(peer: PeerId, places_P: _U64) -> _U64:
    """Numbers that look random for each pair of peer and piece: splitmix64's last steps over both."""
    seed = np.frombuffer(blake3(b"barnraise stock" + peer.encode()).digest()[:8], "<u8")
    mixed_P = places_P ^ seed
    mixed_P = (mixed_P ^ (mixed_P >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed_P = (mixed_P ^ (mixed_P >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys_P: _U64 = mixed_P ^ (mixed_P >> np.uint64(31))
    return keys_P
