"""Turns texts into verified shards of token sequences: split by file, permuted by seed, cut into hashed pieces."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from node.training.corpus import Corpus, Text
from node.training.shards import (
    PIECE_BYTES_MAX,
    PIECES_FILE,
    TRAIN_FILE,
    VAL_FILE,
    data_root,
    write_pieces,
)
from node.training.tokenizer import ByteTokenizer
from protos.runspec import DataSpec

VAL_FRACTION = 0.02
WINDOW_SEQUENCES_MIN = 2**16
WINDOW_TOKENS = 2**26
"""Sequences are permuted within windows of at least so many: what has to be in memory at once."""


class PackError(ValueError):
    """A corpus that gives no data set: says what is lacking."""


@dataclass(frozen=True, slots=True)
class Packed:
    """What was packed: `data` goes into the RunSpec, the counts are for people."""

    data: DataSpec
    n_texts: int
    n_skipped: int  # not UTF-8, or with NUL bytes
    n_train_tokens: int
    n_val_tokens: int


@dataclass(frozen=True, slots=True)
class _Split:
    """Documents of each side, as (text, first byte, byte after the last)."""

    train: tuple[tuple[Text, int, int], ...]
    val: tuple[tuple[Text, int, int], ...]


def pack(
    corpus: Corpus,
    tokenizer: ByteTokenizer,
    sequence_length: int,
    seed: int,
    to_dir: Path,
    *,
    batch_sequences: int = 1,
) -> Packed:
    """Write `train.bin`, `val.bin` and `pieces.json` into a folder, each whole or not at all.

    A document is a text's bytes as tokens and then the end token; documents follow each other without a gap, and the
    rest that fills no sequence is dropped. About 2 % of the files (at least one; of a single file the last 2 % of its
    text) are for validation. Raises PackError where the text is not enough for one batch and one validation sequence.
    """
    sequence_bytes = sequence_length * tokenizer.token_bytes
    if not 2 <= sequence_length or sequence_bytes > PIECE_BYTES_MAX:
        raise PackError(f"a sequence of {sequence_length} tokens does not fit: 2 tokens to {PIECE_BYTES_MAX} bytes")
    sequences_per_piece = PIECE_BYTES_MAX // sequence_bytes
    texts = [text for text in corpus.texts if text.is_text()]
    split = _split(texts, sequence_length)
    to_dir.mkdir(parents=True, exist_ok=True)
    parts = {file: to_dir / f"{file}.part" for file in (TRAIN_FILE, VAL_FILE, PIECES_FILE)}
    n_sequences: dict[str, int] = {}
    hashes: list[bytes] = []
    try:
        for lane, (file, documents) in enumerate(((TRAIN_FILE, split.train), (VAL_FILE, split.val))):
            with parts[file].open("wb") as out:
                shard = _ShardWriter(out, tokenizer.token_bytes, sequence_length, sequences_per_piece, (seed, lane))
                for tokens in _tokens(documents, tokenizer):
                    shard.add(tokens)
                shard.finish()
                out.flush()
                os.fsync(out.fileno())
            n_sequences[file] = shard.n_sequences
            hashes += shard.piece_hashes
        _check_enough(n_sequences, sequence_length, batch_sequences)
        parts[PIECES_FILE].write_bytes(write_pieces(hashes))
        for file, part in parts.items():
            part.replace(to_dir / file)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
    data = DataSpec(
        root=data_root(hashes).hex(),
        sequence_length=sequence_length,
        token_bytes=1 if tokenizer.token_bytes == 1 else 2,
        n_train_sequences=n_sequences[TRAIN_FILE],
        n_val_sequences=n_sequences[VAL_FILE],
        piece_bytes=sequences_per_piece * sequence_bytes,
        sequences_per_piece=sequences_per_piece,
        seed=seed,
        source=corpus.source,
    )
    return Packed(
        data,
        len(texts),
        len(corpus.texts) - len(texts),
        n_sequences[TRAIN_FILE] * sequence_length,
        n_sequences[VAL_FILE] * sequence_length,
    )


def permutation(seed: tuple[int, int], first: int, count: int) -> NDArray[np.int64]:
    """(count,) order of the sequences [first, first + count): that of splitmix64 of (seed, lane, index).

    Written out, because a library's shuffle promises nothing across its versions.
    """
    start = int.from_bytes(blake3(b"barnraise sequences %d %d" % seed).digest()[:8], "little")
    keys = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    keys += np.array([start], np.uint64)
    keys ^= keys >> np.uint64(30)
    keys *= np.uint64(0xBF58476D1CE4E5B9)
    keys ^= keys >> np.uint64(27)
    keys *= np.uint64(0x94D049BB133111EB)
    keys ^= keys >> np.uint64(31)
    return np.argsort(keys, kind="stable")


class _ShardWriter:
    """Collects tokens, and writes and hashes window after window of permuted sequences."""

    def __init__(
        self, out: BinaryIO, token_bytes: int, sequence_length: int, sequences_per_piece: int, seed: tuple[int, int]
    ) -> None:
        self.piece_hashes: list[bytes] = []
        self.n_sequences = 0
        self._out = out
        self._dtype = np.dtype(f"<u{token_bytes}")
        self._length = sequence_length
        self._per_piece = sequences_per_piece
        self._seed = seed
        window = max(WINDOW_SEQUENCES_MIN, WINDOW_TOKENS // sequence_length)
        self._window_tokens = -(-window // sequences_per_piece) * sequences_per_piece * sequence_length
        self._waiting: list[NDArray[np.uint16]] = []
        self._n_waiting = 0

    def add(self, tokens: NDArray[np.uint16]) -> None:
        self._waiting.append(tokens)
        self._n_waiting += tokens.size
        while self._n_waiting >= self._window_tokens:
            self._write(self._window_tokens)

    def finish(self) -> None:
        """Write the last window; what fills no sequence is dropped."""
        if self._n_waiting >= self._length:
            self._write(self._n_waiting - self._n_waiting % self._length)

    def _write(self, n_tokens: int) -> None:
        tokens = np.concatenate(self._waiting)
        self._waiting = [tokens[n_tokens:]]
        self._n_waiting = tokens.size - n_tokens
        ids_SL = tokens[:n_tokens].reshape(-1, self._length)
        order = permutation(self._seed, self.n_sequences, len(ids_SL))
        for start in range(0, len(ids_SL), self._per_piece):
            piece = ids_SL[order[start : start + self._per_piece]].astype(self._dtype).tobytes()
            self.piece_hashes.append(blake3(piece).digest())
            self._out.write(piece)
        self.n_sequences += len(ids_SL)


def _tokens(documents: Sequence[tuple[Text, int, int]], tokenizer: ByteTokenizer) -> Iterator[NDArray[np.uint16]]:
    end = np.array([tokenizer.end_id], np.uint16)
    for text, first, stop in documents:
        offset = 0
        for part in text.slices():
            wanted = part[max(0, first - offset) : max(0, stop - offset)]
            offset += len(part)
            if wanted:
                yield tokenizer.encode(wanted)
        yield end


def _split(texts: Sequence[Text], sequence_length: int) -> _Split:
    """Which documents are for validation: decided by the hash of each file's name, so a new file moves no other."""
    if not texts:
        raise PackError("no text: not one file is UTF-8 without NUL bytes")
    sizes = {text.name: text.path.stat().st_size for text in texts}
    if len(texts) == 1:
        size = sizes[texts[0].name]
        cut = _character_start(texts[0], max(0, size - max(int(size * VAL_FRACTION), sequence_length)))
        return _Split(((texts[0], 0, cut),), ((texts[0], cut, size),))
    keys = {text.name: int.from_bytes(blake3(os.fsencode(text.name)).digest()[:8], "little") / 2**64 for text in texts}
    val: dict[str, None] = {}
    n_bytes = 0
    for text in sorted(texts, key=lambda text: (keys[text.name], text.name))[:-1]:
        if keys[text.name] >= VAL_FRACTION and n_bytes >= sequence_length:
            break
        val[text.name] = None
        n_bytes += sizes[text.name]
    documents = [(text, 0, sizes[text.name]) for text in texts]
    return _Split(
        tuple(document for document in documents if document[0].name not in val),
        tuple(document for document in documents if document[0].name in val),
    )


def _character_start(text: Text, offset: int) -> int:
    """The offset, moved back to the first byte of a UTF-8 character."""
    with text.path.open("rb") as file:
        first = max(0, offset - 3)
        file.seek(first)
        around = file.read(offset - first + 1)
    while offset > first and len(around) == offset - first + 1 and around[-1] & 0xC0 == 0x80:
        offset, around = offset - 1, around[:-1]
    return offset


def _check_enough(n_sequences: dict[str, int], sequence_length: int, batch_sequences: int) -> None:
    for file, needed, what in (
        (TRAIN_FILE, batch_sequences, "one batch"),
        (VAL_FILE, 1, "validation"),
    ):
        if n_sequences[file] < needed:
            raise PackError(
                f"too little text: it gives {n_sequences[file]} of the {needed} sequences of {sequence_length} tokens "
                f"that {what} needs; give more text, or shorter sequences"
            )
