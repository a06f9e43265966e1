"""What each field of each message may hold: a length for bytes and text, a range for numbers, a count for lists.

Looked up by message and field, then by field name. Integers and figures are non-negative, and texts one line of
printable characters, unless it says otherwise here; bytes and lists have no default, so a new one is decided on here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TypeVar

from protos import limits

_BASE58 = re.compile(r"[1-9A-HJ-NP-Za-km-z]+")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

T = TypeVar("T")


class Unfit(ValueError):
    """A value that its bound refuses: says why, and gathers the path to the field on the way up."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why
        self.path = ""

    def within(self, step: str) -> Unfit:
        self.path = step + self.path
        return self


@dataclass(frozen=True, slots=True)
class Bytes:
    most: int
    least: int = 0
    or_empty: bool = False

    def check(self, value: object) -> None:
        if type(value) is not bytes:
            raise Unfit(f"{type(value).__name__} instead of bytes")
        size = len(value)
        if self.least <= size <= self.most or (size == 0 and self.or_empty):
            return
        if self.least == self.most:
            raise Unfit(f"{size} bytes instead of {self.most}{' or none' if self.or_empty else ''}")
        if size < self.least:
            raise Unfit(f"{size} bytes, at least {self.least} are needed")
        raise Unfit(f"{size} bytes exceed the limit of {self.most}")


@dataclass(frozen=True, slots=True)
class Integer:
    least: int = 0
    most: int = limits.INTEGER

    def check(self, value: object) -> None:
        if type(value) is not int:
            raise Unfit(f"{type(value).__name__} instead of an integer")
        if not self.least <= value <= self.most:
            raise Unfit(f"{value if abs(value) <= 2**64 else 'an integer'} outside {self.least}…{self.most}")


@dataclass(frozen=True, slots=True)
class Figure:
    """A finite float."""

    least: float = 0.0
    most: float = math.inf

    def check(self, value: object) -> None:
        if type(value) is int and abs(value) <= limits.INTEGER:
            value = float(value)  # Python takes an int where a float is asked for
        if not isinstance(value, float):
            raise Unfit(f"{type(value).__name__} instead of a float")
        if not math.isfinite(value):
            raise Unfit(f"{value} is not finite")
        if value < self.least:
            raise Unfit(f"{value} is below {self.least}")
        if value > self.most:
            raise Unfit(f"{value} is above {self.most}")


@dataclass(frozen=True, slots=True)
class Flag:
    def check(self, value: object) -> None:
        if type(value) is not bool:
            raise Unfit(f"{type(value).__name__} instead of a truth value")


@dataclass(frozen=True, slots=True)
class Text:
    """`one_line`: printable characters only; else tabs and line breaks too. Nothing in it steers a terminal."""

    most: int = limits.TEXT
    least: int = 0
    one_line: bool = True

    def check(self, value: object) -> None:
        if not isinstance(value, str):
            raise Unfit(f"{type(value).__name__} instead of text")
        if len(value) > self.most:
            raise Unfit(f"{len(value)} characters exceed the limit of {self.most}")
        if len(value) < self.least:
            raise Unfit("is empty")
        if not value.isprintable() if self.one_line else _CONTROL.search(value):
            raise Unfit(f"{_shown(value)} holds characters that can't be shown")


@dataclass(frozen=True, slots=True)
class Peer:
    """The form of a peer id, not yet whether it holds a key: `signing.public_key_of` says that."""

    or_empty: bool = False

    def check(self, value: object) -> None:
        if not isinstance(value, str):
            raise Unfit(f"{type(value).__name__} instead of a peer id")
        if not value:
            if self.or_empty:
                return
            raise Unfit("no peer id")
        if len(value) > limits.PEER_ID:
            raise Unfit(f"a peer id of {len(value)} characters exceeds the limit of {limits.PEER_ID}")
        if not _BASE58.fullmatch(value):
            raise Unfit(f"{_shown(value)} is no peer id (base58)")


Bound = Bytes | Integer | Figure | Flag | Text | Peer

HASH = Bytes(32, least=32)
HASH_OR_NONE = Bytes(32, least=32, or_empty=True)
SIGNATURE = Bytes(64, least=64)
KEY = Bytes(32, least=32)
MESSAGE = Bytes(limits.MESSAGE_BYTES)
"""Bytes that the size of the whole message bounds."""
ENVELOPE = Bytes(limits.MESSAGE_BYTES, least=1)
RECORD = Bytes(limits.RECORD_BYTES, least=1)
CERTIFICATE = Bytes(limits.CERTIFICATE_BYTES, least=1)
WORD = Text(limits.WORD)
REASON = Text(limits.TEXT, one_line=False)
ADDRESS = Text(limits.ADDRESS, least=1)
AT_LEAST_MINUS_ONE = Integer(least=-1)
CHUNK = Integer(most=limits.CHUNKS - 1)
ANY_SIGN = Figure(least=-math.inf)

_ITEMS: dict[str, Bound] = {
    # identity
    "Envelope.purpose": WORD,
    "Envelope.plan": HASH_OR_NONE,
    "Envelope.body": MESSAGE,
    "Signed.envelope": ENVELOPE,
    "signature": SIGNATURE,
    "ca_certificate": CERTIFICATE,
    "seal_key": KEY,
    "Addresses.observer": Peer(or_empty=True),
    "Leave.leader": Peer(or_empty=True),
    "Order.peer": Peer(or_empty=True),
    "Order.spec": Bytes(limits.SPEC_BYTES + limits.ENVELOPE_EXTRA_BYTES),
    "grpc": ADDRESS,
    "dht": ADDRESS,
    "observer_grpc": ADDRESS,
    "RunInfo.spec": Bytes(limits.SPEC_BYTES + limits.ENVELOPE_EXTRA_BYTES, least=1),
    "RunInfo.operator": Bytes(limits.CERTIFICATE_BYTES + limits.ENVELOPE_EXTRA_BYTES, least=1),
    "RunInfo.addresses": Bytes(limits.ADDRESSES_BYTES + limits.ENVELOPE_EXTRA_BYTES, least=1),
    "csr": CERTIFICATE,
    "layout_digest": HASH_OR_NONE,  # a newcomer has not built the model yet
    "sealed_token": Bytes(limits.TOKEN_BYTES + limits.SEALED_EXTRA_BYTES),
    "nonce": Bytes(limits.NONCE_BYTES),
    "name": WORD,
    "certificate": CERTIFICATE,
    "serial": Bytes(16, least=16),
    # hashes; a member that holds no state has no head and no digest
    "head": HASH_OR_NONE,
    "Promise.head": HASH,
    "Head.head": HASH,
    "digest": HASH,
    "Hello.digest": HASH_OR_NONE,
    "Heartbeat.digest": HASH_OR_NONE,
    "previous": HASH,
    "anchor_digest": HASH,
    "commitment_root": HASH_OR_NONE,
    "results_root": HASH,
    "ledger_hash": HASH,
    "body_hash": HASH,
    "plan": HASH,
    "root": HASH,
    "set_hash": HASH,
    "hash": HASH,
    "hashes": HASH,
    "result_hashes": HASH,
    "theta_hashes": HASH,
    "momentum_hashes": HASH,
    "path": HASH,
    # envelopes and bodies
    "body": Bytes(limits.MESSAGE_BYTES, least=1),
    "votes": ENVELOPE,  # beside votes there may be leaves, which carry a proposal
    "orders": Bytes(limits.ORDER_BYTES, least=1),
    "commitments": ENVELOPE,
    "Proposal.plan": MESSAGE,  # an empty round has neither plan nor deal
    "Proposal.deal": MESSAGE,
    "redeal": MESSAGE,
    "signed_head": Bytes(limits.VOTE_BYTES),
    "Proposal.results": ENVELOPE,
    "record": RECORD,
    "records": RECORD,
    "ledger": MESSAGE,
    "Part.data": Bytes(limits.PART_BYTES),
    # words and sentences
    "reason": REASON,
    "rule": WORD,
    "fallback": Text(),
    "degraded": Text(),
    "codec": WORD,
    "privatise": WORD,
    "kind": WORD,
    "code": WORD,
    # numbers
    "voted_attempt": AT_LEAST_MINUS_ONE,
    "Leave.attempt": AT_LEAST_MINUS_ONE,
    "chunk": CHUNK,
    "chunks": CHUNK,
    "n_chunks": Integer(most=limits.CHUNKS),
    "Deal.number": Integer(most=2**32 - 1),
    "Redeal.number": Integer(most=2**32 - 1),
    "set_number": Integer(most=2**32 - 1),
    "n_most": Integer(most=limits.COMMITS),
    "Plan.replicas": Integer(least=1, most=limits.MEMBERS),
    "ChunkHead.n_bytes": Integer(most=limits.THING_BYTES),
    "FetchHead.n_bytes": Integer(least=-1, most=limits.THING_BYTES),
    "run_time_s": Figure(most=limits.RUN_TIME_S),
    "inner_loss": ANY_SIGN,
    "val_loss": ANY_SIGN,
}

_COUNTS: dict[str, int] = {
    "grpc": limits.ADDRESSES,
    "dht": limits.ADDRESSES,
    "observer_grpc": limits.ADDRESSES,
    "ranges": limits.RANGES,
    "used": limits.RANGES,
    "returned": limits.RETURNED,
    "members": limits.MEMBERS,
    "reducers": limits.MEMBERS,
    "standing": limits.MEMBERS,
    "seats": limits.MEMBERS,
    "commitments": limits.MEMBERS,
    "excluded": limits.MEMBERS,
    "bandwidths": limits.MEMBERS,
    "holders": limits.MEMBERS,
    "records": limits.MEMBERS,
    "Proposal.results": limits.MEMBERS,
    "orders": limits.ORDERS,
    "voters": limits.VOTERS,
    "votes": 2 * limits.VOTERS,  # a voter may have voted and left
    "result_hashes": limits.CHUNKS,
    "theta_hashes": limits.CHUNKS,
    "momentum_hashes": limits.CHUNKS,
    "norms": limits.CHUNKS,
    "chunks": limits.CHUNKS,
    "Results.results": limits.CHUNKS,
    "lacks": limits.LACKS,
    "asked": limits.MEMBERS,
    "senders": limits.MEMBERS,
    "lost": limits.MEMBERS,
    "moved": limits.LACKS,
    "path": limits.PATH,
    "hashes": limits.HASHES,
}

_SIZES: dict[str, int] = {
    "Record": limits.RECORD_BYTES,
    "Addresses": limits.ADDRESSES_BYTES,
    "Operator": limits.CERTIFICATE_BYTES + limits.ENVELOPE_EXTRA_BYTES,
    "RunInfo": limits.SPEC_BYTES + limits.CERTIFICATE_BYTES + limits.ADDRESSES_BYTES + 4 * limits.ENVELOPE_EXTRA_BYTES,
    "AdmitRequest": limits.ADMIT_BYTES,
    "AdmitResponse": limits.ADMIT_BYTES,
    "Token": limits.TOKEN_BYTES,
    "Genesis": limits.VOTE_BYTES,
    "Vote": limits.VOTE_BYTES,
    "Prepare": limits.VOTE_BYTES,
    "Head": limits.VOTE_BYTES,
    "Order": limits.ORDER_BYTES,
    "Propose": limits.PROPOSE_BYTES,
    "Heartbeat": 4096,
    "ExchangeReport": 4096,
    "Evaluation": 4096,
    "StateDigest": 4096,
    "Refusal": 8192,
    "AttemptFailed": 8192,
    "Goodbye": 8192,
    "Hello": 8192,
    "Missing": 2**21,
    "Inquiry": 2**20,
    "Fetch": 2**20,
    "FetchHead": 4096,
    "ChunkHead": 8192,
    "CommitsAfter": 4096,
    "Part": limits.PART_BYTES + 64,
}


def item_bound(message: str, field: str, kind: type) -> Bound:
    """What one value of the field may be; `kind` is int, float, bool, str or bytes."""
    found = _look_up(_ITEMS, message, field)
    if found is not None:
        return found
    if kind is int:
        return Integer()
    if kind is float:
        return Figure()
    if kind is bool:
        return Flag()
    raise TypeError(f"protos.bounds doesn't say what {message}.{field} ({kind.__name__}) may hold")


def peer_bound(message: str, field: str) -> Peer:
    """Whether the peer id may be left out."""
    found = _ITEMS.get(f"{message}.{field}")
    return found if isinstance(found, Peer) else Peer()


def count_bound(message: str, field: str) -> int:
    """How many values the list may hold."""
    found = _look_up(_COUNTS, message, field)
    if found is None:
        raise TypeError(f"protos.bounds doesn't say how many {message}.{field} may hold")
    return found


def size_bound(message: str) -> int:
    """How many bytes the message may take, encoded."""
    return _SIZES.get(message, limits.MESSAGE_BYTES)


def as_reason(text: str) -> str:
    """A sentence that fits a field `reason`, out of any text: an exception's words may be long and hold anything."""
    clean = _CONTROL.sub("?", text)
    return clean if len(clean) <= limits.TEXT else clean[: limits.TEXT - 1] + "…"


def entries() -> list[str]:
    """All that the tables speak of, so that a test can find what no message has any more."""
    return [*_ITEMS, *_COUNTS, *_SIZES]


def _look_up(table: dict[str, T], message: str, field: str) -> T | None:
    return table.get(f"{message}.{field}", table.get(field))


def _shown(value: str) -> str:
    return ascii(value if len(value) <= 60 else value[:60] + "…")
