"""How a member's deciding code sees itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.rounds.events import Instant


@dataclass(frozen=True, slots=True)
class View:
    """The member's own view, for `node status`."""

    state: str
    round: int
    epoch: int
    step: int
    h: int
    tokens_per_s: float
    inner_loss: float
    digest: bytes
    accepted: int  # rounds that counted this member, as the commits say
    rejected: Mapping[str, int]  # rounds that did not, by kind of reason: without its figures
    waiting_for: str
    since: Instant
    role: str
    reachable: bool | None  # as the leader's last plan has it; None before one named this member
    paused_by: tuple[str, ...]
    leader: str = ""  # whom this member follows: the coordinator or a stand-in, maybe itself
    idle_share: float | None = None  # of the trainer's time in the last rounds; None before there were any
