"""The byte-level tokenizer: one token for each byte of UTF-8 and one that ends a text.

As a `tokenizer.json` it is a BPE without merges over the byte alphabet of GPT-2, so that every Hugging Face tool reads
it. Token b is byte b: encoding a corpus is a copy, and needs no call a text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END_TOKEN = "<|endoftext|>"
N_BYTES = 256


class TokenizerError(ValueError):
    """A tokenizer that this version can't use: says why."""


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """A byte-level tokenizer by its `tokenizer.json`."""

    json_text: str
    ids_of_bytes: NDArray[np.uint16]  # (256,)
    end_id: int

    @property
    def vocab_size(self) -> int:
        return int(max(int(self.ids_of_bytes.max()), self.end_id)) + 1

    @property
    def token_bytes(self) -> int:
        """Width of a stored token."""
        return 1 if self.vocab_size <= 2**8 else 2

    @property
    def hash(self) -> str:
        """`model.tokenizer_hash` of a RunSpec: plain BLAKE3 of the UTF-8 of `tokenizer.json`, as hex."""
        return tokenizer_hash(self.json_text)

    def encode(self, text: bytes) -> NDArray[np.uint16]:
        """(n,) tokens of n bytes; the end token is not added, and its name inside a text is plain bytes."""
        return self.ids_of_bytes[np.frombuffer(text, np.uint8)]


def byte_level() -> ByteTokenizer:
    """The one that all presets use: token b is byte b, the end token is 256."""
    symbols = byte_symbols()
    tokenizer = Tokenizer(models.BPE(vocab={symbols[byte]: byte for byte in range(N_BYTES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_TOKEN])
    return read(tokenizer.to_str())


def read(json_text: str) -> ByteTokenizer:
    """The tokenizer of a RunSpec; raises TokenizerError where it is not byte-level without merges."""
    try:
        found = json.loads(json_text)
        model, added = found["model"], found["added_tokens"]
        plain = (
            model["type"] == "BPE"
            and not model["merges"]
            and found.get("normalizer") is None
            and found["pre_tokenizer"]["type"] == "ByteLevel"
            and found["pre_tokenizer"]["add_prefix_space"] is False
        )
        ids = [int(model["vocab"][symbol]) for symbol in byte_symbols()]
        ends = [int(token["id"]) for token in added if token["content"] == END_TOKEN]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TokenizerError(f"not a byte-level tokenizer.json: {type(error).__name__} {error}") from error
    if not plain or len(ends) != 1:
        raise TokenizerError(f"only a byte-level tokenizer without merges, with {END_TOKEN}, can be used")
    if sorted({*ids, *ends}) != list(range(N_BYTES + 1)):
        raise TokenizerError(f"the tokens are not the numbers from 0 to {N_BYTES}")
    return ByteTokenizer(json_text, np.array(ids, np.uint16), ends[0])


def tokenizer_hash(json_text: str) -> str:
    """Plain BLAKE3 of a `tokenizer.json`, as hex."""
    return blake3(json_text.encode()).hexdigest()


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary: itself where it is printable."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(N_BYTES, 2 * N_BYTES))
    return [chr(byte if byte in printable else next(others)) for byte in range(N_BYTES)]
