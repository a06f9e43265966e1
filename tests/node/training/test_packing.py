from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from node.training import packing
from node.training.corpus import Corpus, Text
from node.training.packing import Packed, PackError, pack, permutation
from node.training.shards import PIECES_FILE, TRAIN_FILE, VAL_FILE, Shards, data_root, read_pieces
from node.training.tokenizer import byte_level

LENGTH = 8
TOKENIZER = byte_level()


def corpus_of(folder: Path, contents: dict[str, bytes]) -> Corpus:
    folder.mkdir(exist_ok=True)
    texts = []
    for name, content in sorted(contents.items()):
        (folder / name).write_bytes(content)
        texts.append(Text(name, folder / name))
    return Corpus("made up", tuple(texts))


def numbered(n: int, size: int = 100) -> dict[str, bytes]:
    """Texts of one letter each, another for each, so that a token says where it comes from."""
    return {f"{i:03d}": bytes([33 + i]) * size for i in range(n)}


def ids(folder: Path, file: str) -> NDArray[np.int64]:
    return np.fromfile(folder / file, "<u2").reshape(-1, LENGTH).astype(np.int64)


def rows(folder: Path, file: str) -> Counter[bytes]:
    return Counter(row.tobytes() for row in ids(folder, file))


def packed_of(folder: Path, contents: dict[str, bytes], *, seed: int = 0, to: str = "data") -> tuple[Packed, Path]:
    return pack(corpus_of(folder / "texts", contents), TOKENIZER, LENGTH, seed, folder / to), folder / to


def stream_of(contents: dict[str, bytes], names: set[str]) -> list[int]:
    return [token for name in sorted(names) for token in [*contents[name], 256]]


def cut(stream: list[int]) -> NDArray[np.int64]:
    return np.array(stream[: len(stream) // LENGTH * LENGTH]).reshape(-1, LENGTH)


def val_names(folder: Path) -> set[str]:
    """Which of the numbered texts are for validation."""
    return {f"{token - 33:03d}" for token in set(ids(folder, VAL_FILE).ravel().tolist()) - {256}}


def test_each_shard_is_its_files_tokens_in_sequences_in_another_order(tmp_path: Path) -> None:
    contents = numbered(60)
    packed, folder = packed_of(tmp_path, contents)
    assert 1 <= len(val_names(folder)) <= 5
    for file, names in ((TRAIN_FILE, contents.keys() - val_names(folder)), (VAL_FILE, val_names(folder))):
        wanted = cut(stream_of(contents, names))
        assert rows(folder, file) == Counter(row.tobytes() for row in wanted)
        assert file == VAL_FILE or ids(folder, file).tolist() != wanted.tolist()
    assert packed.n_train_tokens == packed.data.n_train_sequences * LENGTH == len(ids(folder, TRAIN_FILE)) * LENGTH
    assert packed.n_val_tokens == len(ids(folder, VAL_FILE)) * LENGTH


def test_the_same_texts_and_seed_give_the_same_bytes_and_another_seed_another_order(tmp_path: Path) -> None:
    contents = numbered(20)
    first, a = packed_of(tmp_path, contents, to="a")
    again, b = packed_of(tmp_path, contents, to="b")
    other, c = packed_of(tmp_path, contents, seed=1, to="c")
    assert first == again
    assert (a / TRAIN_FILE).read_bytes() == (b / TRAIN_FILE).read_bytes()
    assert (a / TRAIN_FILE).read_bytes() != (c / TRAIN_FILE).read_bytes()
    assert rows(a, TRAIN_FILE) == rows(c, TRAIN_FILE)
    assert other.data.root != first.data.root


def test_a_new_file_changes_no_other_files_side(tmp_path: Path) -> None:
    contents = numbered(60, size=LENGTH - 1)  # with its end token a document is exactly one sequence
    _, before = packed_of(tmp_path, contents, to="before")
    _, after = packed_of(tmp_path, contents | {"new": b"new text"[: LENGTH - 1]}, to="after")
    assert not rows(before, TRAIN_FILE) & rows(after, VAL_FILE)
    assert not rows(before, VAL_FILE) & rows(after, TRAIN_FILE)


def test_of_a_single_file_the_end_is_for_validation(tmp_path: Path) -> None:
    content = "".join(f"line {number} é\n" for number in range(500)).encode()
    packed, folder = packed_of(tmp_path, {"one": content})
    n_val_bytes = len(content) // 50
    wanted_val = cut([*content[-n_val_bytes:], 256])
    assert rows(folder, VAL_FILE) == Counter(row.tobytes() for row in wanted_val)
    assert packed.data.n_train_sequences == (len(content) - n_val_bytes + 1) // LENGTH


@pytest.mark.parametrize("shift", range(4))
def test_a_single_file_is_cut_between_characters(tmp_path: Path, shift: int) -> None:
    content = b"x" * shift + "漢".encode() * 400
    packed_of(tmp_path, {"one": content})
    split = packing._split([Text("one", tmp_path / "texts" / "one")], LENGTH)
    ((_, _, cut),), ((_, start, stop),) = split.train, split.val
    assert (start, stop) == (cut, len(content))
    assert (cut - shift) % 3 == 0
    content[cut:].decode()


def test_files_that_are_no_text_are_skipped_and_counted(tmp_path: Path) -> None:
    contents = numbered(10)
    packed, folder = packed_of(tmp_path, contents | {"bad": b"\xff\xfe" * 50, "nul": b"\0" * 99}, to="with")
    _, without = packed_of(tmp_path, contents, to="without")
    assert (packed.n_texts, packed.n_skipped) == (10, 2)
    assert (folder / TRAIN_FILE).read_bytes() == (without / TRAIN_FILE).read_bytes()


def test_pieces_are_whole_sequences_and_hash_to_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PIECE_BYTES_MAX", 5 * LENGTH * 2)
    packed, folder = packed_of(tmp_path, numbered(30))
    data = packed.data
    assert data.sequences_per_piece == 5
    shards = Shards.of(data)
    hashes = read_pieces((folder / PIECES_FILE).read_bytes(), data)
    assert len(hashes) == shards.n_pieces > 50
    for piece, piece_hash in enumerate(hashes):
        place = shards.place(piece)
        raw = (folder / place.file).read_bytes()[place.offset : place.offset + place.n_bytes]
        assert len(raw) == place.n_bytes
        assert place.n_bytes % (LENGTH * 2) == 0
        assert blake3(raw).digest() == piece_hash
    assert data_root(hashes).hex() == data.root
    for file in (TRAIN_FILE, VAL_FILE):
        assert shards.file_bytes(file) == (folder / file).stat().st_size


def test_windows_bound_what_is_permuted_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PIECE_BYTES_MAX", 5 * LENGTH * 2)
    _, whole = packed_of(tmp_path, numbered(30), to="whole")
    monkeypatch.setattr(packing, "WINDOW_SEQUENCES_MIN", 20)
    monkeypatch.setattr(packing, "WINDOW_TOKENS", 1)
    packed, windowed = packed_of(tmp_path, numbered(30), to="windowed")
    assert rows(whole, TRAIN_FILE) == rows(windowed, TRAIN_FILE)
    assert len(read_pieces((windowed / PIECES_FILE).read_bytes(), packed.data)) == Shards.of(packed.data).n_pieces
    stored = ids(windowed, TRAIN_FILE)
    in_file_order = cut(stream_of(numbered(30), {f"{i:03d}" for i in range(30)} - val_names(windowed)))
    for first in range(0, len(stored), 20):
        window = Counter(row.tobytes() for row in stored[first : first + 20])
        assert window == Counter(row.tobytes() for row in in_file_order[first : first + 20])
    assert stored[:20].tolist() != in_file_order[:20].tolist()


@given(st.integers(0, 2**53), st.integers(0, 1), st.integers(0, 2**40), st.integers(1, 300))
def test_a_permutation_is_one(seed: int, lane: int, first: int, count: int) -> None:
    assert sorted(permutation((seed, lane), first, count).tolist()) == list(range(count))


def test_the_permutation_of_a_seed_never_changes() -> None:
    assert permutation((7, 0), 0, 6).tolist() == [3, 0, 4, 1, 5, 2]
    assert permutation((7, 1), 1000, 6).tolist() == [0, 5, 3, 1, 2, 4]


@pytest.mark.parametrize(
    ("contents", "why"),
    [
        ({"a": b"\xff"}, "no text"),
        ({"a": b""}, "too little text"),
        ({"a": b"tiny"}, "too little text"),
        ({"a": b"0123456789"}, "one batch"),
        ({"a": b"0" * 100, "b": b"1"}, "validation|one batch"),
    ],
)
def test_too_little_text_is_refused_and_leaves_nothing(tmp_path: Path, contents: dict[str, bytes], why: str) -> None:
    corpus = corpus_of(tmp_path / "texts", contents)
    with pytest.raises(PackError, match=why):
        pack(corpus, TOKENIZER, LENGTH, 0, tmp_path / "data", batch_sequences=2)
    assert not (tmp_path / "data").exists() or not list((tmp_path / "data").iterdir())


@pytest.mark.parametrize("length", [1, 2**20])
def test_a_sequence_fits_a_piece_and_predicts_something(tmp_path: Path, length: int) -> None:
    with pytest.raises(PackError, match="does not fit"):
        pack(corpus_of(tmp_path / "texts", numbered(3)), TOKENIZER, length, 0, tmp_path / "data")
