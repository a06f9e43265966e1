"""The packed data on disk: `train.bin`, `val.bin` and `pieces.json`, and where a batch, a sequence or a piece lies.

A shard is nothing but sequences of `sequence_length` tokens, little-endian unsigned, one after the other, already in
the order in which the first pass reads them. A sequence stands alone: it is input and, shifted by one, target, so L
tokens give L - 1 predictions. A piece is `sequences_per_piece` whole sequences of one shard, the last one of a shard
fewer; pieces are numbered through the train shard and then the validation shard, and are what is hashed and fetched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aggregation.digest import merkle_root, tagged_hash
from node.training.schedule import locate
from protos.messages import Range
from protos.runspec import DataSpec, RunSpec

TRAIN_FILE = "train.bin"
VAL_FILE = "val.bin"
PIECES_FILE = "pieces.json"
PIECE_BYTES_MAX = 2**20
PIECES_MAX = 2**24
_ROOT_TAG = "barnraise.data"


class DataError(ValueError):
    """Packed data that are not what the RunSpec says."""


@dataclass(frozen=True, slots=True)
class PiecePlace:
    """Where a piece's bytes lie."""

    file: str
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Shards:
    """The arithmetic of one packed data set; raises DataError where its numbers contradict each other."""

    n_train_sequences: int
    n_val_sequences: int
    sequence_bytes: int
    sequences_per_piece: int

    def __post_init__(self) -> None:
        if (
            min(
                self.n_train_sequences,
                self.n_val_sequences,
                self.sequence_bytes,
                self.sequences_per_piece,
            )
            < 1
        ):
            raise DataError("data need sequences to train on, sequences to validate on, and pieces that hold some")
        if self.sequence_bytes * self.sequences_per_piece > PIECE_BYTES_MAX:
            raise DataError(
                f"a piece of {self.sequences_per_piece} sequences of {self.sequence_bytes} bytes "
                f"is more than {PIECE_BYTES_MAX} bytes"
            )
        if self.n_pieces > PIECES_MAX:
            raise DataError(f"{self.n_pieces} pieces are more than {PIECES_MAX}")

    @classmethod
    def of(cls, data: DataSpec) -> Shards:
        """Those of a RunSpec."""
        return cls(
            data.n_train_sequences,
            data.n_val_sequences,
            data.sequence_length * data.token_bytes,
            data.sequences_per_piece,
        )

    @property
    def n_train_pieces(self) -> int:
        return -(-self.n_train_sequences // self.sequences_per_piece)

    @property
    def n_val_pieces(self) -> int:
        return -(-self.n_val_sequences // self.sequences_per_piece)

    @property
    def n_pieces(self) -> int:
        return self.n_train_pieces + self.n_val_pieces

    @property
    def val_pieces(self) -> range:
        """Indices of the validation shard's pieces."""
        return range(self.n_train_pieces, self.n_pieces)

    def file_bytes(self, file: str) -> int:
        """The exact size of `TRAIN_FILE` or `VAL_FILE`."""
        n_sequences = {
            TRAIN_FILE: self.n_train_sequences,
            VAL_FILE: self.n_val_sequences,
        }[file]
        return n_sequences * self.sequence_bytes

    def place(self, piece: int) -> PiecePlace:
        """Where a piece lies; raises IndexError for one that is not."""
        if not 0 <= piece < self.n_pieces:
            raise IndexError(f"no piece {piece} among {self.n_pieces}")
        file, index = (TRAIN_FILE, piece) if piece < self.n_train_pieces else (VAL_FILE, piece - self.n_train_pieces)
        offset = index * self.sequences_per_piece * self.sequence_bytes
        n_bytes = min(
            self.sequences_per_piece * self.sequence_bytes,
            self.file_bytes(file) - offset,
        )
        return PiecePlace(file, offset, n_bytes)

    def pieces_of_train(self, first_sequence: int, n_sequences: int) -> range:
        """The pieces that hold these training sequences."""
        last = first_sequence + n_sequences - 1
        return range(
            first_sequence // self.sequences_per_piece,
            last // self.sequences_per_piece + 1,
        )


def pieces_of_batches(spec: RunSpec, ranges: Iterable[Range]) -> tuple[int, ...]:
    """The pieces that a lease's batches need, ascending, each once."""
    shards = Shards.of(spec.data)
    pieces: dict[int, None] = {}
    for span in ranges:
        for index in range(span.start, span.start + span.count):
            _, batch = locate(index, spec.n_batches, spec.data.seed)
            for piece in shards.pieces_of_train(batch * spec.batch_sequences, spec.batch_sequences):
                pieces[piece] = None
    return tuple(sorted(pieces))


def pieces_of_evaluation(spec: RunSpec) -> tuple[int, ...]:
    """The pieces that an evaluation reads: the beginning of the validation shard."""
    shards = Shards.of(spec.data)
    last = (n_evaluated_sequences(spec) - 1) // shards.sequences_per_piece
    return tuple(shards.val_pieces[: last + 1])


def n_evaluated_sequences(spec: RunSpec) -> int:
    """Validation sequences that hold at most `evaluation.max_tokens` tokens, but at least one."""
    return max(
        1,
        min(
            spec.data.n_val_sequences,
            spec.evaluation.max_tokens // spec.data.sequence_length,
        ),
    )


def data_root(piece_hashes: Sequence[bytes]) -> bytes:
    """`data.root` of a RunSpec: the Merkle root over the plain BLAKE3 hashes of all pieces, in order."""
    return tagged_hash(_ROOT_TAG, merkle_root(piece_hashes))


def write_pieces(piece_hashes: Sequence[bytes]) -> bytes:
    """The content of `pieces.json`: all pieces' BLAKE3 hashes, train shard then validation shard."""
    return json.dumps(
        {"pieces": [piece_hash.hex() for piece_hash in piece_hashes]},
        separators=(",", ":"),
    ).encode()


def read_pieces(raw: bytes, data: DataSpec) -> tuple[bytes, ...]:
    """The hashes of a `pieces.json` that belongs to this RunSpec; raises DataError for any other bytes."""
    n_pieces = Shards.of(data).n_pieces
    if len(raw) > 256 + 70 * n_pieces:
        raise DataError(f"{PIECES_FILE} of {len(raw)} bytes is too long for {n_pieces} pieces")
    try:
        found = json.loads(raw)
        hashes = tuple(bytes.fromhex(text) for text in found["pieces"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{PIECES_FILE} is no list of hashes: {error}") from error
    if len(hashes) != n_pieces or any(len(piece_hash) != 32 for piece_hash in hashes):
        raise DataError(f"{PIECES_FILE} holds {len(hashes)} hashes, the run has {n_pieces} pieces")
    if data_root(hashes).hex() != data.root:
        raise DataError(f"{PIECES_FILE} does not have the root that the RunSpec names")
    return hashes
