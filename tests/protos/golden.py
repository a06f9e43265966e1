"""Fixed messages whose bytes are kept in tests/golden, so that the wire can't drift without someone saying so.

`python -m tests.protos.golden` writes the files anew; a change in the diff is a change of the protocol.
"""

from __future__ import annotations

from pathlib import Path

from google.protobuf.descriptor import FieldDescriptor

from protos import convert
from protos.messages import (
    Body,
    MemberEntry,
    Outcome,
    Range,
    ReducerEntry,
    Seat,
    Standing,
    StandingChange,
)
from protos.signing import Identity, Purpose, seal
from protos.wire import encode

GOLDEN = Path(__file__).parent.parent / "golden"

RUN, ADA, BOB = (Identity.from_private_bytes(bytes([i]) * 32) for i in (1, 2, 3))


def body() -> Body:
    """A body with something in every field."""
    return Body(
        run=RUN.peer,
        epoch=1,
        round=300,
        previous=b"\x11" * 32,
        attempt=2,
        leader=ADA.peer,
        spec_revision=1,
        fragment=Range(0, 120_000),
        tau=1,
        anchor_digest=b"\x22" * 32,
        outcome=Outcome.COMMITTED,
        reason="all but one\narrived",
        members=(
            MemberEntry(
                ADA.peer, True, "", 30, 30_720, 1.5, (Range(7, 2), Range(20, 28)), b"\x33" * 32, 0.25, 0.09, -0.5
            ),
            MemberEntry(BOB.peer, False, "no commitment in time", 0, 0, 0.0, (), b"", 0.0, 0.0, 0.0),
        ),
        reducers=(ReducerEntry(ADA.peer, 15, 2048.5),),
        rule="mean",
        f=1,
        fallback="median",
        degraded="no robustness",
        codec="int8",
        results_root=b"\x44" * 32,
        clip_factor=1.0,
        aggregate_norm=1e-3,
        numerics_version=1,
        h=30,
        lr=3e-3,
        outer_lr=0.7,
        outer_momentum=0.6,
        returned=(Range(48, 12),),
        standing=(StandingChange(BOB.peer, Standing.QUARANTINED, "sent zeros"),),
        orders=(b"an order",),
        seats=(Seat(ADA.peer, (Range(60, 30),), 2),),
        voters=(ADA.peer, RUN.peer),
        ledger_hash=b"\x55" * 32,
    )


def envelope() -> bytes:
    """That body, sealed: Ed25519 signatures are deterministic."""
    return seal(ADA, Purpose.PROPOSE, RUN.peer, encode(body()), plan=b"\x66" * 32)


def fields() -> str:
    """Every field of every message: file, message, number, name, kind. A line may be added, never changed."""
    kinds = {
        value: name.removeprefix("TYPE_").lower()
        for name, value in vars(FieldDescriptor).items()
        if name.startswith("TYPE_")
    }
    lines: list[str] = []
    for module in convert.MODULES:
        for message in module.DESCRIPTOR.message_types_by_name.values():
            for field in message.fields:
                kind = field.message_type.name if field.message_type is not None else kinds[field.type]
                some = "repeated " if field.is_repeated else ""
                lines.append(f"{module.DESCRIPTOR.name} {message.name} {field.number} {field.name} {some}{kind}")
    return "\n".join(lines) + "\n"


def files() -> dict[str, str]:
    """File name in tests/golden to content."""
    return {
        "wire_body.hex": _lines(encode(body())),
        "wire_envelope.hex": _lines(envelope()),
        "wire_fields.txt": fields(),
    }


def _lines(raw: bytes) -> str:
    text = raw.hex()
    return "\n".join(text[start : start + 100] for start in range(0, len(text), 100)) + "\n"


if __name__ == "__main__":
    for name, content in files().items():
        (GOLDEN / name).write_text(content)
