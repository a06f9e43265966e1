"""What is on the disk of a simulated member, and the hashes that stand for its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aggregation import exchange as ex
from aggregation.digest import tagged_hash
from coordinator.rounds.ledger import Ledger
from protos.messages import Body, Commit, Leave, Outcome, Promise


@dataclass(slots=True)
class MemberDisk:
    """What survives a member's process."""

    record: Promise | Leave | None = None
    signed: dict[int, int] = field(default_factory=dict)  # the last round that it signed in, by epoch
    ledger: Ledger | None = None
    commit: Commit | None = None
    results: dict[bytes, None] = field(default_factory=dict)
    revisions: dict[int, None] = field(default_factory=dict)  # of the RunSpec, beside the first

    def keep(self, entry: Promise | Leave) -> None:
        self.record = entry
        self.signed[entry.epoch] = max(entry.round, self.signed.get(entry.epoch, -1))


def digest_after(body_hash: bytes, body: Body, held: bytes) -> bytes:
    """The digest of the state that a body leads to from a state with this digest."""
    return held if body.outcome is Outcome.EMPTY else tagged_hash("digest", body_hash, held)


def result_hash(chunk: int, roots: Mapping[str, bytes], effect: ex.CombineChunk) -> bytes:
    """A result depends on the rows that are in it, in their order, and on their weights."""
    rows = b"".join(roots[sender] for sender in effect.senders)
    return tagged_hash("result", chunk.to_bytes(4, "little"), rows, repr(effect.weights).encode())
