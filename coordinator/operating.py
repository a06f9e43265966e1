"""The operator's hand on a run: through the process that serves it, or on its folder while nobody does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coordinator import listening, tools
from coordinator.admission import make_token
from coordinator.clock import RunClock
from coordinator.commanding import desk_at_rest
from coordinator.control import Caller, find
from coordinator.errors import UsageError
from coordinator.folder import Founded, RunFolder, read_founded, read_identity, read_json
from coordinator.journal import Journal
from coordinator.places import advertised, is_place
from coordinator.rows import empty_at_last, round_rows
from protos import limits
from protos.invite import Invite

Say = Callable[[str], None]
ROWS_LOOKED_AT = 100
"""So many of the last rounds are looked at for how many in a row were empty."""


async def status(data: Path) -> dict[str, Any]:
    """The contract's status. While nobody serves the run it is what the ledger says."""
    folder = RunFolder(data)
    founded = read_founded(folder)
    serving = find(folder)
    if serving is not None:
        async with Caller(serving) as caller:
            return await caller.status()
    return await asyncio.to_thread(_status_at_rest, folder, founded)


async def ledger(data: Path) -> list[dict[str, Any]]:
    """A row for each commit, oldest first."""
    folder = RunFolder(data)
    founded = read_founded(folder)
    serving = find(folder)
    if serving is not None:
        async with Caller(serving) as caller:
            return await caller.ledger()
    spec, leader = founded.spec, founded.operator.coordinator
    return await asyncio.to_thread(_with_journal, folder, founded, lambda journal: round_rows(journal, spec, leader))


async def evaluate(data: Path, say: Say) -> dict[str, Any]:
    """The validation loss of the newest state on this machine."""
    folder = RunFolder(data)
    founded = read_founded(folder)
    theta, place = tools.newest_state(folder)
    found = await tools.evaluate(folder, theta, say)
    return {"run_id": founded.run, "state": place or "initial", **found}


async def export(data: Path, to: Path, say: Say) -> dict[str, Any]:
    """Write the newest state on this machine as a model's folder; what is in it."""
    folder = RunFolder(data)
    founded = read_founded(folder)
    theta, place = tools.newest_state(folder)
    rows = await ledger(data)
    meta = account(founded, rows, place)
    await tools.export(folder, theta, to, meta, say)
    return {"export": str(to), **meta}


def account(founded: Founded, rows: list[dict[str, Any]], place: str) -> dict[str, Any]:
    """What the run says of itself at the state of this place ("ROUND-HEAD"), for a model card."""
    number = place.partition("-")[0]
    last = int(number) if number.isdigit() else 0
    upto = [row for row in rows if row["round"] <= last]
    counted = {member["peer"] for row in upto for member in row["members"] if member["accepted"]}
    newest: dict[str, Any] = upto[-1] if upto else {}
    return {
        "run_id": founded.run,
        "rounds": sum(1 for row in upto if row["outcome"] == "committed"),
        "tokens": newest.get("tokens", 0),
        "contributors": len(counted),
        "val_loss": next((row["val_loss"] for row in reversed(upto) if row["val_loss"] is not None), None),
        "state_digest": newest.get("state_digest", founded.spec.model.initial_digest),
        "commit_hash": newest.get("commit_hash", ""),
    }


async def invite(data: Path, *, uses: int, expires_s: float) -> str:
    """A fresh invite with a token. Made from the folder's keys, whether the run is served or not."""
    folder = RunFolder(data)
    founded = read_founded(folder)
    identity = read_identity(folder.keys / "coordinator.pem")
    hosts = _hosts(folder)
    origin_s, recorded_s, others = await asyncio.to_thread(
        _with_journal,
        folder,
        founded,
        lambda journal: (journal.origin_unix_s(), journal.run_time_s(), journal.coordinators()),
    )
    hosts = tuple(dict.fromkeys((*hosts, *(http for http, _ in others if is_place(http)))))[: limits.ADDRESSES]
    now_s = RunClock(origin_s, recorded_s).run_time_s()
    token, _ = make_token(identity, founded.run, uses=uses, valid_s=expires_s, run_time_s=now_s)
    return str(Invite(founded.run, hosts, token))


def parse_duration_s(text: str) -> float:
    """Seconds of "90s", "15m", "12h", "7d". Raises UsageError."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    number, unit = text[:-1], text[-1:]
    if unit not in units or not number.isascii() or not number.isdigit() or not 0 < int(number) < 10**6:
        raise UsageError(f"--expires {text!r} is no duration", "write for example 12h or 7d")
    return int(number) * units[unit]


def _hosts(folder: RunFolder) -> tuple[str, ...]:
    """Where newcomers find the coordinator: where it is, or was the last time."""
    last = read_json(folder.ports)
    if last is None:
        raise UsageError(
            "the run has never been served, so nobody knows at which address",
            f"serve it first: coordinator serve --data {folder.path}",
        )
    http = listening.parse(str(last.get("http")), "--http")
    advertise = str(last.get("advertise") or "")
    hosts = listening.public_hosts(http.host, advertised(advertise) if advertise else "")
    return tuple(listening.host_port(host, http.port) for host in hosts)


def _with_journal(folder: RunFolder, founded: Founded, read: Callable[[Journal], Any]) -> Any:
    last = read_json(folder.ports) or {}
    journal = Journal.open(str(last.get("database") or "") or folder.journal, founded.run)
    try:
        return read(journal)
    finally:
        journal.close()


def _status_at_rest(folder: RunFolder, founded: Founded) -> dict[str, Any]:
    def read(journal: Journal) -> dict[str, Any]:
        recovered = journal.recover()
        known, names = recovered.ledger, journal.names()
        led_by = journal.led_by()
        losses = journal.observations("evaluation")
        last = round_rows(journal, founded.spec, founded.operator.coordinator, known.round - ROWS_LOOKED_AT)
        n_empty, reason = empty_at_last(last)
        members = [
            {
                "peer": seat.peer,
                "name": names.get(seat.peer, ""),
                "state": "unknown",
                "standing": str(known.standing.get(seat.peer, "good")),
                "step": 0,
                "tokens_per_s": 0.0,
                "reachable": None,
                "last_seen_s": None,
                "observer": False,
            }
            for seat in known.seats
        ]
        return {
            "run_id": founded.run,
            "round": known.round + 1,
            "epoch": known.epoch,
            "phase": "not served",
            "deadline_in_s": None,
            "leader": None,
            "members": members,
            "tokens": known.tokens,
            "val_loss": losses[-1].content["val_loss"] if losses else None,
            "head": known.head.hex(),
            "waiting_for": f"nobody here: {led_by} leads" if led_by else "somebody to serve the run",
            "n_committed": known.n_committed,
            "empty_rounds": n_empty,
            "empty_reason": reason,
            "serving": False,
            **desk_at_rest(folder, founded, journal).status(),
        }

    found: dict[str, Any] = _with_journal(folder, founded, read)
    return found
