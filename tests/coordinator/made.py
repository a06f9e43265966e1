"""A run to test the coordinator's edges with: keys, a RunSpec over a few hundred bytes of data, a chain of commits."""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from blake3 import blake3
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from coordinator.admission import token_context
from coordinator.config import load
from coordinator.folder import RunFolder
from coordinator.founding import found, genesis_commit
from coordinator.journal import Journal
from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger, fold
from protos import limits
from protos.hashes import commit_hash
from protos.messages import (
    ZERO_HASH,
    AdmitRequest,
    Body,
    Commit,
    MemberEntry,
    Operator,
    Outcome,
    PeerId,
    Range,
    Record,
    ReducerEntry,
    Seat,
)
from protos.runspec import RunSpec
from protos.signing import Identity, Purpose, seal, seal_to
from protos.wire import encode

TODAY = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
SEQUENCE, PER_PIECE = 16, 4
N_TRAIN, N_VAL = 10, 3


def identity(number: int) -> Identity:
    """The same key for the same number."""
    return Identity.from_private_bytes(blake3(b"test key %d" % number).digest())


RUN, COORDINATOR = identity(1), identity(2)


def shards() -> tuple[bytes, bytes, list[bytes]]:
    """Bytes of the training and the validation shard, and the hashes of their pieces."""
    train = bytes(i % 251 for i in range(N_TRAIN * SEQUENCE))
    val = bytes((7 * i) % 251 for i in range(N_VAL * SEQUENCE))
    size = PER_PIECE * SEQUENCE
    pieces = [shard[start : start + size] for shard in (train, val) for start in range(0, len(shard), size)]
    return train, val, [blake3(piece).digest() for piece in pieces]


@cache
def spec(*sets: str) -> RunSpec:
    """A RunSpec of a made-up model; `sets` as in `--set`."""
    words = ("data.sequence_length=16", "work.batch_tokens=16", "work.h=2", "rule.degraded=true", *sets)
    content = {
        **load("tiny", None, words).spec_sections(),
        "model": {
            "config": {"model_type": "llama"},
            "tokenizer": "{}",
            "tokenizer_hash": "11" * 32,
            "n_parameters": 1000,
            "n_values": 20480,
            "layout_digest": "22" * 32,
            "initial_digest": "33" * 32,
        },
        "data": {
            "root": "44" * 32,
            "sequence_length": SEQUENCE,
            "token_bytes": 1,
            "n_train_sequences": N_TRAIN,
            "n_val_sequences": N_VAL,
            "piece_bytes": PER_PIECE * SEQUENCE,
            "sequences_per_piece": PER_PIECE,
            "seed": 0,
            "source": "made up",
        },
    }
    return RunSpec.model_validate(content)


async def make_data(wish_path: Path, to: Path) -> dict[str, Any]:
    """Stands in for the node's tool: the made-up model's state, and real little shards."""
    return _make_data(json.loads(wish_path.read_bytes()), to)  # noqa: ASYNC240 - a few bytes in a test


def _make_data(wish: dict[str, Any], to: Path) -> dict[str, Any]:
    train, val, hashes = shards()
    for name, content in (
        ("data/train.bin", train),
        ("data/val.bin", val),
        ("data/pieces.json", json.dumps({"pieces": [hash_.hex() for hash_ in hashes]}).encode()),
        ("state/theta.bin", bytes(8)),
        ("state/momentum.bin", bytes(8)),
    ):
        path = to / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    made = spec().model_dump(mode="json")
    return {**made, **{name: wish[name] for name in wish if name not in ("model", "data", "corpus")}}


def make_run(path: Path, *sets: str) -> RunFolder:
    """A founded run in this folder."""
    words = ("data.sequence_length=16", "work.batch_tokens=16", *sets)
    asyncio.run(found(path, load("tiny", None, words), make_data, TODAY))
    return RunFolder(path)


# -- the chain -----------------------------------------------------------------------------------------------------


def genesis(run_spec: RunSpec | None = None) -> tuple[Commit, Body, Ledger]:
    return genesis_commit(RUN, COORDINATOR.peer, run_spec or spec())


def next_commit(ledger: Ledger, *, counted: tuple[PeerId, ...] = (), seats: tuple[Seat, ...] = ()) -> Chained:
    """A commit on top of this ledger: `counted` members used their seat's first batch; `seats` are the next ones."""
    members = tuple(
        MemberEntry(peer, True, "", 1, 16, 16.0, (Range(seat.ranges[0].start, 1),), b"r" * 32, 1.5, 0.01, 3.0 + index)
        for index, peer in enumerate(counted)
        if (seat := ledger.seat_of(peer)) is not None
    )
    used = {member.peer: member.used for member in members}
    kept = set() if members else {seat.peer for seat in seats}  # over an empty round
    returned = tuple(
        Range(seat.ranges[0].start + len(used.get(seat.peer, ())), left)
        for seat in ledger.seats
        if seat.peer not in kept and (left := seat.ranges[0].count - len(used.get(seat.peer, ())))
    )
    body = Body(
        run=ledger.run, epoch=ledger.epoch, round=ledger.round + 1, previous=ledger.head, attempt=0,
        leader=COORDINATOR.peer, spec_revision=1, fragment=Range(0, 20480), tau=0, anchor_digest=ledger.digest,
        outcome=Outcome.COMMITTED if members else Outcome.EMPTY, reason="" if members else "nobody came",
        members=members, reducers=tuple(ReducerEntry(peer, 2, 100.0) for peer in counted), rule="mean", f=0,
        fallback="", degraded="", codec="int8", results_root=ZERO_HASH, clip_factor=1.0, aggregate_norm=0.5,
        numerics_version=1, h=2, lr=0.003, outer_lr=0.7, outer_momentum=0.6, returned=returned, standing=(),
        orders=(), seats=seats,
        voters=(*(seat.peer for seat in seats), COORDINATOR.peer), ledger_hash=ZERO_HASH,
    )  # fmt: skip
    after = fold(ledger, body)
    body = replace(body, ledger_hash=after.hash())
    raw = encode(body)
    digest = blake3(b"state" + raw).digest() if members else ledger.digest
    commit = Commit(raw, digest, 0, (b"vote",), ())
    return Chained(commit, body, ledger, after.at(commit_hash(raw, digest), digest))


@dataclass(frozen=True, slots=True)
class Chained:
    commit: Commit
    body: Body
    before: Ledger
    after: Ledger


def journal(place: Path | str) -> tuple[Journal, Ledger]:
    """A journal with commit 0."""
    commit, body, ledger = genesis()
    return Journal.create(place, RUN.peer, commit, body, ledger, origin_unix_s=1000.0), ledger


def append(to: Journal, link: Chained, at_run_s: float = 1.0) -> None:
    to.append(link.commit, link.body, link.before, link.after, (), at_run_s)


# -- admission -----------------------------------------------------------------------------------------------------


def csr(key: EllipticCurvePrivateKey | None = None, name: str = "anything") -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject)
    return request.sign(key or generate_private_key(SECP256R1()), SHA256()).public_bytes(Encoding.DER)


def admit_request(
    who: Identity,
    operator: Operator,
    *,
    token: bytes = b"",
    change: Callable[[AdmitRequest], AdmitRequest] = lambda request: request,
    signer: Identity | None = None,
    observer: bool = False,
) -> bytes:
    """The envelope that a node would send."""
    run = operator.run
    sealed = seal_to(operator.seal_key, token, context=token_context(run, who.peer)) if token else b""
    request = AdmitRequest(
        run, who.peer, csr(), limits.PROTOCOL, bytes.fromhex("22" * 32), sealed, b"nonce", "somebody", observer
    )
    return seal(signer or who, Purpose.ADMIT, run, encode(change(request)))


def record(who: Identity, run: PeerId, *, sequence: int = 1, grpc: tuple[str, ...] = ()) -> Record:
    return Record(who.peer, sequence, grpc, (), 0, 0, b"")


@dataclass(slots=True)
class FakeClock:
    """Stands still until it is moved."""

    at: float = 0.0
    origin: float = field(default=100.0)

    def now(self) -> Instant:
        return Instant(self.at)

    def run_time_s(self) -> float:
        return self.origin + self.at
