"""`node status` as JSON: exactly the contract's keys and those beside them, null where nothing is known."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from coordinator.rounds.events import Instant
from node.ports import Traffic
from node.session.view import View
from node.stages import Stages
from node.status import status_of
from protos.messages import PeerId

CONTRACT = {
    "peer", "run_id", "state", "round", "step", "h", "tokens_per_s", "inner_loss", "digest", "accepted", "rejected",
    "waiting_for", "since_s", "reachable", "role", "mfu", "idle_share", "bytes_sent", "bytes_received", "paused_by",
}  # fmt: skip
BESIDE = {"epoch", "leader", "stages"}

VIEW = View(
    state="training", round=3, epoch=0, step=1, h=4, tokens_per_s=8.0, inner_loss=1.5, digest=b"d" * 32, accepted=2,
    rejected={"late": 1}, waiting_for="", since=Instant(0.0), role="member", paused_by=(), reachable=None,
)  # fmt: skip


def status(view: View, mfu: float | None) -> dict[str, Any]:
    said = status_of(view, PeerId("run"), PeerId("me"), Traffic(), Stages(), 1.0, mfu)
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    return said


def test_the_contracts_keys() -> None:
    assert set(status(VIEW, None)) == CONTRACT | BESIDE


def test_what_is_not_known_is_null() -> None:
    said = status(VIEW, None)
    assert [said[name] for name in ("mfu", "idle_share", "reachable", "leader")] == [None] * 4


def test_shares_are_rounded() -> None:
    said = status(replace(VIEW, idle_share=0.123456), 0.456789)
    assert (said["mfu"], said["idle_share"]) == (0.4568, 0.1235)
