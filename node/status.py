"""What `node status` says: the contract's JSON, from the session's view and what was counted."""

from __future__ import annotations

from typing import Any

from node.ports import Traffic
from node.session.view import View
from node.stages import Stages
from protos.messages import PeerId


def status_of(
    view: View, run: PeerId, me: PeerId, traffic: Traffic, stages: Stages, since_s: float, mfu: float | None = None
) -> dict[str, Any]:
    """One node now; `since_s` is how long it has been in this state. What is not measured is null."""
    return {
        "peer": me,
        "run_id": run,
        "state": view.state,
        "epoch": view.epoch,
        "round": view.round,
        "step": view.step,
        "h": view.h,
        "tokens_per_s": view.tokens_per_s,
        "inner_loss": view.inner_loss,
        "digest": view.digest.hex(),
        "accepted": view.accepted,
        "rejected": dict(view.rejected),
        "waiting_for": view.waiting_for,
        "since_s": round(since_s, 1),
        "reachable": view.reachable,
        "role": view.role,
        "leader": view.leader or None,
        "mfu": round(mfu, 4) if mfu is not None else None,
        "idle_share": round(view.idle_share, 4) if view.idle_share is not None else None,
        "bytes_sent": traffic.sent,
        "bytes_received": traffic.received,
        "paused_by": list(view.paused_by),
        "stages": {
            name: {"bytes": stage.n_bytes, "seconds": round(stage.seconds, 3), "copies": round(stage.copies, 2)}
            for name, stage in stages.sums().items()
        },
    }
