"""ROUND: one commit as one JSON object, what it says and beside it what was observed of its round.

What is observed (`val_loss`, `seconds`, `bytes_*`, `idle_*`, `worked_s`) is outside the commit's hash and null until
known. A figure that is no finite number is null, too: what members say may be anything that a float holds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.journal import Entry, Journal
from coordinator.leading.observing import round_subject
from protos.messages import MemberEntry, Outcome, PeerId
from protos.runspec import RunSpec

FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""Forward and backward pass, attention's own products left out: the usual estimate (Kaplan, arXiv 2001.08361)."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What was observed of one round: each member's exchange report, and the observer's evaluation of the state."""

    reports: Mapping[PeerId, Mapping[str, Any]] = field(default_factory=dict)
    val_loss: float | None = None


def round_row(entry: Entry, observed: Observed, spec: RunSpec, coordinator: PeerId) -> dict[str, Any]:
    """The row of one commit: the contract's keys, and beside them what replays the round without the commit.

    `batches` are those that a member used, as [first, count]; `nominal_step` is the schedule's clock at the round's
    start, `tokens` the run's total after it, `seats` the leases of the next round. Failed attempts are those that the
    coordinator led: what failed under a stand-in it isn't told.
    """
    body = entry.body
    members = [_member(member, observed.reports.get(member.peer)) for member in body.members]
    counted = [member for member in body.members if member.counted]
    tokens = sum(member.tokens for member in counted)
    committed = body.outcome is Outcome.COMMITTED
    row = {
        "round": body.round,
        "epoch": body.epoch,
        "attempt": body.attempt,
        "leader": body.leader,
        "members": members,
        "rule": body.rule,
        "f": body.f,
        "fallback": body.fallback,
        "degraded": body.degraded,
        "codec": body.codec,
        "h": body.h,
        "lr": body.lr,
        "outer_lr": body.outer_lr,
        "clip_factor": body.clip_factor,
        "flops": FLOPS_PER_PARAMETER_AND_TOKEN * spec.model.n_parameters * tokens,
        "energy_wh": None,
        "inner_loss": _inner_loss(counted),
        "val_loss": observed.val_loss,
        "delta_norm": body.aggregate_norm if committed else None,
        "seconds": _seconds(observed.reports, {member.peer for member in body.members}),
        "anchor_digest": body.anchor_digest.hex(),
        "state_digest": entry.commit.digest.hex(),
        "commit_hash": entry.commit_hash.hex(),
        "previous_hash": body.previous.hex(),
        "outcome": body.outcome.value,
        "reason": body.reason,
        "failed_attempts": [
            {"attempt": failed.attempt, "leader": coordinator, "reason": failed.reason} for failed in entry.failed
        ],
        "orphaned": entry.orphaned or entry.undone,
        # beside the contract's keys
        "outer_momentum": body.outer_momentum,
        "reducers": [{"peer": reducer.peer, "chunks": reducer.n_chunks} for reducer in body.reducers],
        "nominal_step": entry.nominal_step,
        "tokens": entry.tokens,
        "seats": [
            {
                "peer": seat.peer,
                "batches": [[span.start, span.count] for span in seat.ranges],
                "batch_scale": seat.batch_scale,
            }
            for seat in body.seats
        ],
    }
    return {name: _finite(value) for name, value in row.items()}


def round_rows(
    journal: Journal, spec: RunSpec, coordinator: PeerId, after_round: int = -1, limit: int | None = None
) -> list[dict[str, Any]]:
    """The rows of later commits, oldest first."""
    entries = journal.entries(after_round, limit)
    return [
        round_row(entry, observed, spec, coordinator)
        for entry, observed in zip(entries, observe(journal, entries), strict=True)
    ]


def empty_at_last(rows: Sequence[Mapping[str, Any]]) -> tuple[int, str]:
    """How many of the last rounds in a row were empty, and why the last one was; 0 where it was committed."""
    n, reason = 0, ""
    for row in reversed(rows):
        if row["outcome"] != Outcome.EMPTY.value or not row["round"]:  # commit 0 is no round
            break
        n, reason = n + 1, reason or str(row["reason"])
    return n, reason


def observe(journal: Journal, entries: Sequence[Entry]) -> list[Observed]:
    """What is known of these rounds, from the journal."""
    if not entries:
        return []
    subjects = [round_subject(entry.body.epoch, entry.body.round) for entry in entries]
    reports: dict[str, dict[PeerId, Mapping[str, Any]]] = {}
    for each in journal.observations("report", subjects):
        reports.setdefault(each.subject, {})[each.peer] = each.content
    digests = [entry.commit.digest.hex() for entry in entries]
    losses: dict[str, Any] = {
        each.subject: each.content.get("val_loss") for each in journal.observations("evaluation", digests)
    }
    return [
        Observed(reports.get(subject, {}), losses.get(digest))
        for subject, digest in zip(subjects, digests, strict=True)
    ]


def _finite(value: Any) -> Any:
    """The same with None for each number that JSON has no word for, however deep it lies."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {name: _finite(each) for name, each in value.items()}
        case list():
            return [_finite(each) for each in value]
        case _:
            return value


def _member(member: MemberEntry, report: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "peer": member.peer,
        "tokens": member.tokens,
        "steps": member.steps,
        "weight": member.weight,
        "accepted": member.counted,
        "reason": member.reason,
        "bytes_sent": report["bytes_sent"] if report else None,
        "bytes_received": report["bytes_received"] if report else None,
        # beside the contract's keys
        **_idle(report or {}),
        "batches": [[span.start, span.count] for span in member.used],
        "sum_lr": member.sum_lr,
        "delta_norm": member.delta_norm,
        "inner_loss": member.inner_loss,
    }


def _idle(report: Mapping[str, Any]) -> dict[str, float | None]:
    """How the member's trainer spent the round; reports of before this was measured don't say."""
    idle_s, worked_s = report.get("idle_s"), report.get("worked_s")
    if idle_s is None or worked_s is None or idle_s + worked_s <= 0:
        return {"idle_s": None, "worked_s": None, "idle_share": None}
    return {"idle_s": idle_s, "worked_s": worked_s, "idle_share": round(idle_s / (idle_s + worked_s), 4)}


def _inner_loss(counted: Sequence[MemberEntry]) -> float | None:
    """Mean over the members that counted, by tokens, of what each says; not finite where one says too much."""
    tokens = sum(member.tokens for member in counted)
    if not tokens:
        return None
    return sum(member.inner_loss * member.tokens for member in counted) / tokens


def _seconds(reports: Mapping[PeerId, Mapping[str, Any]], members: set[PeerId]) -> dict[str, float | None]:
    """The median over members that reported: one that reports nonsense moves nothing."""
    own = [report for peer, report in reports.items() if peer in members]
    return {
        name: statistics.median(float(report[f"{name}_s"]) for report in own) if own else None
        for name in ("train", "exchange", "apply")
    }
