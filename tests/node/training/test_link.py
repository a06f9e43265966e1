from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.training.link import (
    BODY_BYTES_MAX,
    HEADER,
    Amend,
    Command,
    Declined,
    Encode,
    Encoded,
    Evaluate,
    Evaluated,
    Evaluating,
    Failed,
    LinkError,
    Load,
    Pause,
    Progress,
    Quit,
    Ready,
    Remark,
    Report,
    Resume,
    Saved,
    Start,
    Train,
    Written,
    body_bytes,
    decode_command,
    decode_report,
    encode,
)
from protos.messages import Range

ENCODED = Encoded(3, 7, 700, 0.02, 2.5, (Range(1, 2), Range(9, 5)), 1, 0.25)
COMMANDS: list[Command] = [
    Start("spec.json", "data/ä", 2, 1, 4),
    Start("spec.json", "data", 2, run="run", checkpoints="checkpoints"),
    Load("theta.bin", 3, 90, True),
    Load("theta.bin", 3, 90, False, "ab" * 32),
    Train(4, (Range(0, 30), Range(500, 2)), 30, 6),
    Train(4, (), 30),
    Encode(4, "codes.0"),
    Encode(4, "codes.0", "residual.bin", "residual.next"),
    Evaluate(4, "theta.bin"),
    Amend("spec.json"),
    Pause(),
    Resume(),
    Quit(),
]
REPORTS: list[Report] = [
    Ready(118_080, "ab" * 32, 1234.5),
    Ready(118_080, "ab" * 32, 1234.5, 7, 67e12),
    Progress(4, 3, 30, 300, 2.0, 1e5, 0.0, 0, False),
    Written(4, 12),
    ENCODED,
    Evaluating(4, 1024),
    Evaluated(4, 2.25, 65024),
    Declined(4, "round 5 has begun"),
    Saved(4, 3, 0.25),
    Saved(4, 3, 0.25, "no space left on device"),
    Remark("a checkpoint is torn"),
    Failed("no space left on device"),
]


@pytest.mark.parametrize("message", [*COMMANDS, *REPORTS], ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message: Command | Report) -> None:
    raw = encode(message)
    body = raw[HEADER.size :]
    assert body_bytes(raw[: HEADER.size]) == len(body)
    decode = decode_command if isinstance(message, Command) else decode_report
    assert decode(body) == message


def test_a_command_is_no_report_and_the_other_way_round() -> None:
    with pytest.raises(LinkError, match="no message"):
        decode_report(encode(Pause())[HEADER.size :])
    with pytest.raises(LinkError, match="no message"):
        decode_command(encode(Failed("x"))[HEADER.size :])


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_bytes_are_a_message_or_a_link_error(body: bytes) -> None:
    for decode in (decode_command, decode_report):
        with pytest.raises(LinkError):
            decode(body)


@given(
    st.sampled_from(
        ["round", "steps", "tokens", "sum_lr", "inner_loss", "used", "skipped_steps", "encode_s", "kind", "x"]
    ),
    st.none()
    | st.booleans()
    | st.integers(max_value=-1)
    | st.integers(min_value=2**63)
    | st.just(math.inf)
    | st.just(math.nan)
    | st.text(max_size=3)
    | st.dictionaries(st.text(max_size=2), st.integers(), max_size=1)
    | st.lists(st.lists(st.integers(max_value=-1), min_size=1, max_size=3), min_size=1, max_size=2),
)
def test_one_wrong_field_makes_it_a_link_error(name: str, value: object) -> None:
    fields = json.loads(encode(ENCODED)[HEADER.size :])
    fields[name] = value
    if name in ("sum_lr", "inner_loss", "encode_s") and type(value) is int and abs(value) < 1e300:
        return  # a whole number will do for a figure
    with pytest.raises(LinkError):
        decode_report(json.dumps(fields).encode())


def test_a_missing_field_is_a_link_error() -> None:
    fields = json.loads(encode(ENCODED)[HEADER.size :])
    del fields["used"]
    with pytest.raises(LinkError, match="Encoded has the fields"):
        decode_report(json.dumps(fields).encode())


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"kind":"Pause","kind":"Load"}', b'{"kind":["Pause"]}', b"1" * 5000]
)
def test_hostile_json_is_a_link_error(body: bytes) -> None:
    with pytest.raises(LinkError):
        decode_command(body)


def test_a_length_is_checked_before_memory_is_spent() -> None:
    assert body_bytes(HEADER.pack(BODY_BYTES_MAX)) == BODY_BYTES_MAX
    with pytest.raises(LinkError, match="exceeds"):
        body_bytes(HEADER.pack(BODY_BYTES_MAX + 1))
    with pytest.raises(LinkError):
        body_bytes(b"abc")


def test_what_is_not_finite_or_too_long_is_never_sent() -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode(replace(ENCODED, inner_loss=math.nan))
    with pytest.raises(ValueError, match="exceeds"):
        encode(Failed("x" * BODY_BYTES_MAX))
