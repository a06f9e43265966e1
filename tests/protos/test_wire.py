"""Encoding and decoding of messages: the same message comes back, and nothing else gets in."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import limits
from protos.calls import PingReply
from protos.convert import converter
from protos.messages import (
    AdmitRequest,
    Body,
    Commit,
    Commitment,
    ExchangeReport,
    Fetch,
    FetchHead,
    Heartbeat,
    Hello,
    Leave,
    MemberState,
    Part,
    PeerId,
    Promise,
    Proposal,
    Range,
    Receipt,
    Record,
    Refusal,
    Results,
    Seat,
    Vote,
)
from protos.wire import WireError, as_reason, decode, decode_commits, encode, encode_commits, split
from tests.protos import golden
from tests.protos.strategies import MESSAGES, PEERS, any_message

HEARTBEAT = Heartbeat(1, 2, b"", b"", MemberState.TRAINING, 3, 4, 5.0, 6.0, 7.0, 8, 9)
VOTE = Vote(0, 3, 1, PEERS[0], b"\x01" * 32, b"\x02" * 32)
COMMIT = Commit(b"body", bytes(32), 0, (b"vote",), ())

# -- what comes back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@settings(max_examples=15)
@given(data=st.data())
def test_a_message_comes_back_equal(cls: type, data: st.DataObject) -> None:
    message = data.draw(any_message(cls))
    raw = encode(message)
    assert decode(cls, raw) == message
    assert encode(decode(cls, raw)) == raw


def test_types_come_back_too() -> None:
    back = decode(Heartbeat, encode(dataclasses.replace(HEARTBEAT, tokens_per_s=5)))
    assert back == HEARTBEAT
    assert type(back.tokens_per_s) is float
    assert back.state is MemberState.TRAINING
    body = decode(Body, encode(golden.body()))
    assert type(body.members) is tuple
    assert type(body.members[0].used[0]) is Range


def test_absent_and_empty_submessages_differ() -> None:
    promise = Promise(0, 1, 2, PEERS[0], bytes(32), -1, None)
    empty = dataclasses.replace(promise, voted_attempt=0, proposal=Proposal(b"b", b"", b"", (), ()))
    assert decode(Promise, encode(promise)).proposal is None
    assert decode(Promise, encode(empty)) == empty


def test_a_message_that_protobuf_wrote_is_read() -> None:
    proto = converter(Vote).proto(
        epoch=0, round=3, attempt=1, leader=PEERS[0], body_hash=b"\x01" * 32, digest=b"\x02" * 32
    )
    assert decode(Vote, proto.SerializeToString()) == VOTE


# -- what a newer version may add ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [b"\xc0\x3e\x96\x01", b"\xc1\x3e" + bytes(8), b"\xc2\x3e\x03abc", b"\xc5\x3e" + bytes(4)],
    ids=["varint", "fixed64", "bytes", "fixed32"],
)
def test_unknown_fields_are_skipped(extra: bytes) -> None:
    assert decode(Vote, encode(VOTE) + extra) == VOTE
    assert decode(Vote, extra * 3 + encode(VOTE)) == VOTE


def test_a_report_of_an_older_node_measures_less() -> None:
    older = ExchangeReport(0, 3, 10, 20, 1.0, 2.0, 3.0)
    assert decode(ExchangeReport, encode(older)) == older == dataclasses.replace(older, idle_s=0.0, worked_s=0.0)
    assert encode(change(older, idle_s=4.0, worked_s=5.0)).startswith(encode(older))  # what it adds comes last


def test_unknown_fields_inside_a_list_are_skipped() -> None:
    inner = encode(Range(3, 4)) + b"\xc2\x3e\x03abc"
    raw = encode(Seat(PEERS[0], (), 1)) + b"\x12" + bytes([len(inner)]) + inner
    assert decode(Seat, raw) == Seat(PEERS[0], (Range(3, 4),), 1)


# -- what does not get in ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@settings(max_examples=15)
@given(raw=st.binary(max_size=200))
def test_any_bytes_give_a_message_or_a_wire_error(cls: type, raw: bytes) -> None:
    assert_total(cls, raw)


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@settings(max_examples=15)
@given(data=st.data())
def test_a_damaged_message_gives_a_message_or_a_wire_error(cls: type, data: st.DataObject) -> None:
    raw = bytearray(encode(data.draw(any_message(cls))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        end = data.draw(st.integers(at, min(len(raw), at + 3)))
        raw[at:end] = data.draw(st.binary(max_size=3))
    assert_total(cls, bytes(raw))


def assert_total(cls: type, raw: bytes) -> None:
    """A value that may be written again, or a WireError that names the message."""
    message: object = None
    why = cls.__name__
    try:
        message = decode(cls, raw)
    except WireError as error:
        why = str(error)
    assert why.startswith(cls.__name__)
    assert message is None or decode(cls, encode(message)) == message


def change(message: Any, **values: Any) -> Any:
    return dataclasses.replace(message, **values)


ROOT = bytes(32)
COMMITMENT = Commitment(ROOT, ROOT, (1.0,), 1, 1, (), 0.1, 0.1)
REPORT = ExchangeReport(0, 3, 10, 20, 1.0, 2.0, 3.0, 4.0, 5.0)
ADMIT = AdmitRequest(PEERS[0], PEERS[1], b"csr", 1, ROOT, b"", b"", "Ada", False)
RECORD = Record(PEERS[0], 1, ("a:1",), (), 0, 0, b"")


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (change(VOTE, epoch=-1), r"Vote\.epoch: -1 outside 0…9007199254740992"),
        (change(VOTE, round=2**53 + 1), r"Vote\.round: \d+ outside"),
        (change(VOTE, round=2**70), r"Vote\.round: an integer outside"),
        (change(VOTE, attempt=True), r"Vote\.attempt: bool instead of an integer"),
        (change(VOTE, leader=PeerId("")), r"Vote\.leader: no peer id"),
        (change(VOTE, leader=PeerId("0OIl")), r"Vote\.leader: '0OIl' is no peer id"),
        (change(VOTE, leader=PeerId("1" * 129)), r"Vote\.leader: a peer id of 129 characters"),
        (change(VOTE, digest=b""), r"Vote\.digest: 0 bytes instead of 32$"),
        (change(VOTE, digest=bytes(33)), r"Vote\.digest: 33 bytes instead of 32"),
        (change(VOTE, digest=bytearray(32)), r"Vote\.digest: bytearray instead of bytes"),
        (change(HEARTBEAT, head=bytes(31)), r"Heartbeat\.head: 31 bytes instead of 32 or none"),
        (change(HEARTBEAT, inner_loss=float("nan")), r"Heartbeat\.inner_loss: nan is not finite"),
        (change(HEARTBEAT, inner_loss=float("-inf")), r"Heartbeat\.inner_loss: -inf is not finite"),
        (change(HEARTBEAT, time_left_s=-0.5), r"Heartbeat\.time_left_s: -0\.5 is below 0"),
        (change(HEARTBEAT, tokens_per_s=2**2000), r"Heartbeat\.tokens_per_s: int instead of a float"),
        (change(HEARTBEAT, state="training"), r"Heartbeat\.state: str instead of MemberState"),
        (change(REPORT, idle_s=-1.0), r"ExchangeReport\.idle_s: -1\.0 is below 0"),
        (change(REPORT, worked_s=float("inf")), r"ExchangeReport\.worked_s: inf is not finite"),
        (change(COMMITMENT, norms=(1.0, float("inf"))), r"Commitment\.norms\[1\]: inf is not finite"),
        (change(COMMITMENT, norms=[1.0]), r"Commitment\.norms: list instead of a tuple"),
        (change(COMMITMENT, used=(Range(0, 1), Range(1, -1))), r"Commitment\.used\[1\]\.count: -1 outside"),
        (change(COMMITMENT, used=(ROOT,)), r"Commitment\.used\[0\]: bytes instead of Range"),
        (change(ADMIT, name="A" * 101), r"AdmitRequest\.name: 101 characters exceed the limit of 100"),
        (change(ADMIT, name="\x1b[31mAda"), r"AdmitRequest\.name: '\\x1b\[31mAda' holds characters"),
        (change(ADMIT, name="\ud800"), r"AdmitRequest\.name: '\\ud800' holds characters"),
        (change(ADMIT, csr=b""), r"AdmitRequest\.csr: 0 bytes, at least 1"),
        (change(ADMIT, nonce=bytes(65)), r"AdmitRequest\.nonce: 65 bytes exceed the limit of 64"),
        (change(ADMIT, observer=1), r"AdmitRequest\.observer: int instead of a truth value"),
        (change(RECORD, grpc=("a:1",) * 17), r"Record\.grpc: 17 values exceed the limit of 16"),
        (change(RECORD, grpc=("a" * 250,) * 5), r"Record: \d+ bytes exceed the limit of 1024"),
        (Receipt(ROOT, PEERS[0], (limits.CHUNKS,)), r"Receipt\.chunks\[0\]: 262144 outside 0…262143"),
        (FetchHead(ROOT, -2), r"FetchHead\.n_bytes: -2 outside -1…"),
        (Part(bytes(limits.PART_BYTES + 1)), r"Part\.data: 1064961 bytes exceed the limit of 1064960"),
        (change(golden.body(), voters=(PEERS[0],) * 33), r"Body\.voters: 33 values exceed the limit of 32"),
        (change(golden.body(), reason="x" * 1025), r"Body\.reason: 1025 characters"),
        (change(golden.body(), reason="\x1b[2J"), r"Body\.reason: .* holds characters"),
        (change(golden.body(), fragment=None), r"Body\.fragment: NoneType instead of Range"),
    ],
)
def test_an_unfit_message_is_neither_written_nor_read(message: Any, why: str) -> None:
    with pytest.raises(WireError, match=f"^{why}"):
        encode(message)


@pytest.mark.parametrize(
    ("cls", "values", "why"),
    [
        (Vote, {"epoch": 2**53 + 1}, r"Vote\.epoch: \d+ outside"),
        (Vote, {"leader": ""}, r"Vote\.leader: no peer id"),
        (Vote, {"digest": bytes(31)}, r"Vote\.digest: 31 bytes instead of 32"),
        (Heartbeat, {"inner_loss": float("nan")}, r"Heartbeat\.inner_loss: nan is not finite"),
        (Heartbeat, {"state": "dancing"}, r"Heartbeat\.state: 'dancing' is none of joining, waiting"),
        (Heartbeat, {"state": ""}, r"Heartbeat\.state: '' is none of"),
        (PingReply, {"peer": "not a peer"}, r"PingReply\.peer: 'not a peer' is no peer id"),
    ],
)
def test_what_protobuf_would_carry_is_refused_on_reading(cls: type, values: dict[str, Any], why: str) -> None:
    fit = {Vote: VOTE, Heartbeat: HEARTBEAT, PingReply: PingReply(b"", PEERS[0])}[cls]
    proto = converter(cls).to_proto(fit)
    for name, value in values.items():
        setattr(proto, name, value)
    with pytest.raises(WireError, match=f"^{why}"):
        decode(cls, proto.SerializeToString())


def test_a_missing_submessage_is_named() -> None:
    proto: Any = converter(Body).to_proto(golden.body())
    proto.ClearField("fragment")
    with pytest.raises(WireError, match=r"^Body\.fragment: is missing"):
        decode(Body, proto.SerializeToString())


def test_text_that_is_no_utf8_is_refused() -> None:
    raw = encode(VOTE).replace(PEERS[0].encode(), b"\xff" * len(PEERS[0]))
    with pytest.raises(WireError, match=r"^Vote: is no protobuf of this kind"):
        decode(Vote, raw)


def test_the_raw_length_is_checked_before_anything_else() -> None:
    with pytest.raises(WireError, match=r"^Record: 1025 bytes exceed the limit of 1024"):
        decode(Record, b"\xff" * 1025)


def test_too_long_a_list_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    proto: Any = converter(Fetch).proto

    def never(raw: bytes) -> Any:
        raise AssertionError("parsed")

    monkeypatch.setattr(proto, "FromString", never, raising=False)
    hashes = b"\x12\x00" * (limits.HASHES + 1)
    with pytest.raises(WireError, match=r"^Fetch\.hashes: more than 4096"):
        decode(Fetch, hashes)


def test_lists_of_the_longest_length_pass() -> None:
    fetch = Fetch("state", (b"\x07" * 32,) * limits.HASHES)
    assert decode(Fetch, encode(fetch)) == fetch
    with pytest.raises(WireError, match=r"^Fetch\.hashes: 4097 values exceed"):
        encode(Fetch("state", (bytes(32),) * (limits.HASHES + 1)))


def test_a_commit_gives_back_what_each_of_the_most_members_has_left() -> None:
    returned = tuple(Range(20 * number, 10) for number in range(limits.MEMBERS))
    found = dataclasses.replace(golden.body(), returned=returned)
    assert decode(Body, encode(found)) == found


def test_encode_takes_messages_only() -> None:
    with pytest.raises(TypeError, match="no message"):
        encode("hello")


def test_hello_of_a_newcomer_and_of_a_member() -> None:
    newcomer = Hello(1, b"record", 0, 0, b"", b"", False, False, "", 0)
    member = change(newcomer, head=ROOT, digest=ROOT, holds_state=True)
    for hello in (newcomer, member):
        assert decode(Hello, encode(hello)) == hello


def test_a_commit_holds_leaves_beside_votes() -> None:
    proposal = Proposal(bytes(9000), b"", b"", (), ())
    commit = change(COMMIT, votes=(b"a vote", encode(Leave(0, 3, 1, PEERS[0], ROOT, 1, proposal))))
    assert decode(Commit, encode(commit)) == commit


def test_results_of_no_chunks() -> None:
    results = Results(ROOT, ROOT, (), 0.0)
    assert decode(Results, encode(results)) == results


# -- things in parts -----------------------------------------------------------------------------------------------


PART = limits.PART_BYTES


@pytest.mark.parametrize(("size", "n_parts"), [(0, 0), (1, 1), (PART, 1), (PART + 1, 2), (3 * PART, 3)])
def test_parts_concatenate_to_the_whole(size: int, n_parts: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    parts = list(split(data))
    assert b"".join(part.data for part in parts) == data
    assert len(parts) == n_parts
    assert all(len(encode(part)) <= limits.PART_BYTES + 8 for part in parts)


@given(st.lists(any_message(Commit), max_size=3))
@settings(max_examples=20)
def test_commits_come_back_in_order(commits: list[Commit]) -> None:
    assert decode_commits(encode_commits(commits)) == tuple(commits)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"\x01\x00", r"commits\[0\]: ends within a length"),
        (b"\x05\x00\x00\x00abc", r"commits\[0\]: ends after 3 of 5 bytes"),
        (b"\xff\xff\xff\xff", r"commits\[0\]: ends after 0 of 4294967295 bytes"),
        (encode_commits([COMMIT]) + b"\x00\x00\x00\x00", r"Commit\.body: 0 bytes, at least 1"),
    ],
)
def test_damaged_commits_are_refused(raw: bytes, why: str) -> None:
    with pytest.raises(WireError, match=f"^{why}"):
        decode_commits(raw)


def test_an_answer_holds_a_bounded_number_of_commits() -> None:
    answer = encode_commits(COMMIT for _ in range(limits.COMMITS + 5))
    assert len(decode_commits(answer)) == limits.COMMITS
    with pytest.raises(WireError, match="more than 1024"):
        decode_commits(answer + encode_commits([COMMIT]))


@given(st.text(max_size=50) | st.text(max_size=3).map(lambda text: text * 400))
@settings(max_examples=30)
def test_any_text_can_be_made_a_reason(text: str) -> None:
    refusal = Refusal(0, 1, 0, as_reason(text))
    assert decode(Refusal, encode(refusal)) == refusal


def test_a_plain_reason_stays_as_it_is() -> None:
    assert as_reason("θ differs:\n\tsee above") == "θ differs:\n\tsee above"
    assert as_reason("\x1b[31mred") == "?[31mred"
