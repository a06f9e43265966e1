from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from node.training.tokenizer import END_TOKEN, TokenizerError, byte_level, read, tokenizer_hash

OURS = byte_level()
THEIRS = Tokenizer.from_str(OURS.json_text)


@given(st.text().filter(lambda text: END_TOKEN not in text))
def test_it_encodes_as_the_library_does_and_comes_back(text: str) -> None:
    ids = OURS.encode(text.encode())
    assert ids.tolist() == THEIRS.encode(text).ids
    assert THEIRS.decode(ids.tolist(), skip_special_tokens=False) == text


def test_a_token_is_a_byte_and_the_end_has_its_own() -> None:
    assert OURS.ids_of_bytes.tolist() == list(range(256))
    assert (OURS.end_id, OURS.vocab_size, OURS.token_bytes) == (256, 257, 2)
    assert THEIRS.token_to_id(END_TOKEN) == 256


def test_the_end_token_inside_a_text_is_plain_bytes() -> None:
    assert OURS.end_id not in OURS.encode(END_TOKEN.encode())


def test_another_numbering_is_followed() -> None:
    document = json.loads(OURS.json_text)
    document["model"]["vocab"] = {symbol: 255 - number for symbol, number in document["model"]["vocab"].items()}
    np.testing.assert_array_equal(read(json.dumps(document)).encode(b"\x00A"), [255, 255 - 65])


def test_transformers_loads_it(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    (tmp_path / "tokenizer.json").write_text(OURS.json_text)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    text = "def f(x):\n\treturn 'é 漢字 🎉'\n"
    assert theirs(text)["input_ids"] == list(text.encode())
    assert theirs.decode(theirs(text)["input_ids"]) == text


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.pop("model"),
        lambda document: document["model"].update(merges=[["a", "b"]]),
        lambda document: document["model"].update(type="WordPiece"),
        lambda document: document["model"]["vocab"].pop("a"),
        lambda document: document["model"]["vocab"].update(a=5000),
        lambda document: document["model"]["vocab"].update(a="x"),
        lambda document: document.update(added_tokens=[]),
        lambda document: document.update(normalizer={"type": "NFC"}),
        lambda document: document["pre_tokenizer"].update(add_prefix_space=True),
        lambda document: document.update(pre_tokenizer=None),
    ],
)
def test_any_other_tokenizer_is_refused(change: object) -> None:
    document = json.loads(OURS.json_text)
    change(document)  # type: ignore[operator]
    with pytest.raises(TokenizerError):
        read(json.dumps(document))


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"model": 3, "added_tokens": 4}'])
def test_what_is_no_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(TokenizerError):
        read(text)


def test_the_hash_is_of_the_whole_document() -> None:
    assert OURS.hash == tokenizer_hash(OURS.json_text) != tokenizer_hash(OURS.json_text + " ")
