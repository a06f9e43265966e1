"""The run's data by hash: the list of pieces under the data root, and each piece, from plain files.

A piece's bytes are checked before they are served, so a damaged file is noticed here and not by every joiner.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from coordinator.errors import StateError
from protos.runspec import DataSpec

PIECES_FILE = "pieces.json"
TRAIN_FILE = "train.bin"
VAL_FILE = "val.bin"
_JSON_BYTES_PER_PIECE = 70


class PieceDamaged(Exception):
    """A piece on disk is not what its hash says."""


@dataclass(frozen=True, slots=True)
class _Place:
    file: str
    offset: int
    n_bytes: int


class Pieces:
    """What of the run's data lies in one folder. Raises StateError where its list is not that of the RunSpec."""

    def __init__(self, folder: Path, spec: DataSpec) -> None:
        self._folder = folder
        self._root = bytes.fromhex(spec.root)
        hashes = _read_list(folder / PIECES_FILE, spec)
        self._list = b"".join(hashes)
        self._places = dict(zip(hashes, _places(spec), strict=True))

    def read(self, hash_: bytes) -> bytes | None:
        """The list of all pieces' hashes for the root, 32 bytes each, in order; else a piece; None for another hash.

        Raises PieceDamaged, and OSError where the file can't be read.
        """
        if hash_ == self._root:
            return self._list
        place = self._places.get(hash_)
        if place is None:
            return None
        with (self._folder / place.file).open("rb") as file:
            file.seek(place.offset)
            data = file.read(place.n_bytes)
        if blake3(data).digest() != hash_:
            raise PieceDamaged(f"{place.file} is damaged at byte {place.offset}")
        return data


def _n_pieces(n_sequences: int, spec: DataSpec) -> int:
    return -(-n_sequences // spec.sequences_per_piece)


def _places(spec: DataSpec) -> list[_Place]:
    sequence_bytes = spec.sequence_length * spec.token_bytes
    piece_bytes = spec.sequences_per_piece * sequence_bytes
    places: list[_Place] = []
    for file, n_sequences in ((TRAIN_FILE, spec.n_train_sequences), (VAL_FILE, spec.n_val_sequences)):
        size = n_sequences * sequence_bytes
        places += [
            _Place(file, offset, min(piece_bytes, size - offset))
            for offset in range(0, _n_pieces(n_sequences, spec) * piece_bytes, piece_bytes)
        ]
    return places


def _read_list(path: Path, spec: DataSpec) -> list[bytes]:
    n_pieces = _n_pieces(spec.n_train_sequences, spec) + _n_pieces(spec.n_val_sequences, spec)
    try:
        with path.open("rb") as file:
            raw = file.read(1024 + _JSON_BYTES_PER_PIECE * n_pieces)
        hashes = [bytes.fromhex(text) for text in json.loads(raw)["pieces"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(f"{path} can't be used: {error}", "restore the folder data from a copy") from error
    if len(hashes) != n_pieces or any(len(hash_) != 32 for hash_ in hashes):
        raise StateError(
            f"{path} lists {len(hashes)} pieces, the run has {n_pieces}", "restore the folder data from a copy"
        )
    return hashes
