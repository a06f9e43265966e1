"""Signs the operator's orders and hands them over: to the process that serves the run, or to its journal at rest.

The run key may lie elsewhere: an order can be signed with a key from any file, written to a file in place of being
handed over, and handed over on another machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.clock import RunClock
from coordinator.config import amend as amended
from coordinator.control import Caller, find
from coordinator.errors import OrderRefused, StateError, UsageError
from coordinator.folder import FolderLock, Founded, RunFolder, read_founded, read_identity, read_json, write_whole
from coordinator.journal import Journal
from coordinator.orders import Desk, Refused, read_orders, revisions_of, waiting
from coordinator.rows import round_rows
from protos import limits
from protos.messages import Order, PeerId, RunInfo
from protos.orders import BY_COORDINATOR, Kind, OpenedOrder, OrderError, open_order, open_spec, seal_order, seal_spec
from protos.runspec import RunSpec
from protos.signing import Identity, SignatureError, public_key_of
from protos.wire import WireError, decode

SUFFIX_LEAST = 6
"""So many last characters of a peer id may stand for it, where they are one member's."""
TRIES = 3
WAIT_S = 15.0
"""So long it is waited for the commit that carries an order which is obeyed at once."""
LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Handling:
    """How an order is signed and handed over.

    Args:
        key: the file of the key to sign with; None: the folder's own.
        out: write the signed order here and hand nothing over.
        number: the order's; 0: the next one, as far as is known here.
    """

    key: Path | None = None
    out: Path | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be ordered. Raises on use whatever the run can't do."""

    kind: Kind
    peer: str = ""
    round: int = 0
    reason: str = ""
    sets: tuple[str, ...] = field(default_factory=tuple)


async def command(data: Path, wish: Wish, handling: Handling = Handling()) -> str:
    """Order it; one line that says what has become of it."""
    folder = RunFolder(data)
    founded = read_founded(folder)
    identity = _signer(folder, founded, wish.kind, handling.key)
    for attempt in range(TRIES):
        order = await _order_of(folder, founded, wish, handling.number, identity)
        try:
            envelope = seal_order(identity, order)
        except (OrderError, WireError) as error:
            raise UsageError(str(error)) from error
        if handling.out is not None:
            await asyncio.to_thread(write_whole, handling.out, envelope)
            return f"order {order.number} ({order.kind}) is in {handling.out}; give it with: coordinator order FILE"
        try:
            return await _hand_over(folder, founded, envelope, order)
        except OrderRefused as refused:
            # Another order may have come in between; the next number is a free one then.
            if handling.number or "has been given before" not in str(refused) or attempt == TRIES - 1:
                raise
    raise AssertionError("the last try returns or raises")


async def hand_over(data: Path, file: Path) -> str:
    """Give an order that was signed before, wherever that was."""
    folder = RunFolder(data)
    founded = read_founded(folder)
    try:
        with file.open("rb") as opened:
            envelope = opened.read(limits.ORDER_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{file} can't be read: {error.strerror}", "give the file that --out wrote") from error
    try:
        order = open_order(envelope, run=founded.run, coordinator=founded.operator.coordinator)
    except OrderError as error:
        raise UsageError(f"{file} holds no order of this run: {error}", "give the file that --out wrote") from error
    return await _hand_over(folder, founded, envelope, order.order)


def desk_at_rest(folder: RunFolder, founded: Founded, journal: Journal) -> Desk:
    """The desk of a run that nobody serves: what it takes in is given when somebody does."""
    recovered = journal.recover()
    orders = read_orders(journal, founded.run, founded.operator.coordinator)
    clock = RunClock(journal.origin_unix_s(), recovered.run_time_s)
    return Desk(
        folder,
        founded,
        journal,
        revisions_of(founded, orders),
        waiting(orders, recovered.ledger, journal),
        books=lambda: recovered.ledger,
        write=asyncio.to_thread,
        give=lambda _: None,
        run_time_s=clock.run_time_s,
    )


# -- what is signed ------------------------------------------------------------------------------------------------


def _signer(folder: RunFolder, founded: Founded, kind: Kind, key: Path | None) -> Identity:
    """The key to sign with: the one that is given, else the folder's run key, or the coordinator's where it will do."""
    if key is not None:
        identity = read_identity(key)
    elif kind in BY_COORDINATOR:
        identity = read_identity(folder.keys / "coordinator.pem")
    else:
        path = folder.keys / "run.pem"
        if not path.exists():
            raise StateError(
                f"{kind} is signed by the run key, and {path} is not here",
                "give it with --key FILE, or sign where it is with --out FILE and give it here with: "
                "coordinator order FILE",
            )
        identity = read_identity(path)
    if identity.peer not in (founded.run, founded.operator.coordinator):
        raise UsageError(f"{key} is neither the run's key nor its coordinator's", "give --key the run key's file")
    return identity


async def _order_of(folder: RunFolder, founded: Founded, wish: Wish, number: int, identity: Identity) -> Order:
    known = await _known(folder, founded)
    content, round_, peer = b"", wish.round, PeerId("")
    match wish.kind:
        case Kind.AMEND:
            if identity.peer != founded.run:
                raise UsageError("amend is signed by the run key", "give its file with --key")
            content = seal_spec(identity, amended(known.newest, wish.sets))
        case Kind.ROLLBACK:
            content = await _commit_hash(folder, founded, round_)
        case Kind.EVICT | Kind.RESUME if wish.peer:
            peer = _peer(wish.peer, known)
        case _:
            pass
    return Order(founded.run, number or known.next_number, str(wish.kind), peer, round_, content, wish.reason)


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of the run where an order is signed."""

    next_number: int
    newest: RunSpec
    members: tuple[PeerId, ...]


async def _known(folder: RunFolder, founded: Founded) -> _Known:
    serving = find(folder)
    if serving is None:
        return await asyncio.to_thread(
            _with_journal, folder, founded, lambda journal: _known_at_rest(folder, founded, journal)
        )
    async with Caller(serving) as caller:
        status = await caller.status()
        raw = await caller.run_info(int(status.get("newest_revision", 0)))
    try:
        newest = open_spec(decode(RunInfo, raw).spec, founded.run)
    except (OrderError, WireError) as error:
        raise StateError(f"what serves the run gives settings that are none: {error}") from error
    members = tuple(PeerId(str(member["peer"])) for member in status["members"])
    return _Known(int(status["next_order"]), newest, members)


def _known_at_rest(folder: RunFolder, founded: Founded, journal: Journal) -> _Known:
    desk = desk_at_rest(folder, founded, journal)
    specs = desk.revisions.specs
    return _Known(desk.next_number(), specs[max(specs)], tuple(journal.names()))


def _peer(text: str, known: _Known) -> PeerId:
    """The peer that is meant: a whole peer id, or the end of a member's."""
    try:
        public_key_of(text)
        return PeerId(text)
    except SignatureError:
        pass
    found = [peer for peer in known.members if peer.endswith(text)] if len(text) >= SUFFIX_LEAST else []
    if len(found) != 1:
        some = "several members" if found else "no member"
        raise UsageError(f"{text!r} is {some}", "give a whole peer id: coordinator status shows them")
    return found[0]


async def _commit_hash(folder: RunFolder, founded: Founded, round_: int) -> bytes:
    serving = find(folder)
    if serving is not None:
        async with Caller(serving) as caller:
            rows = await caller.ledger(round_ - 1)
    else:
        spec, leader = founded.spec, founded.operator.coordinator
        rows = await asyncio.to_thread(
            _with_journal, folder, founded, lambda journal: round_rows(journal, spec, leader, round_ - 1)
        )
    of_round = [row for row in rows if row["round"] == round_]
    if not of_round:
        raise UsageError(f"round {round_} is not in the ledger", "coordinator ledger shows the rounds")
    chosen = next((row for row in reversed(of_round) if not row["orphaned"]), of_round[-1])
    return bytes.fromhex(str(chosen["commit_hash"]))


# -- handing over --------------------------------------------------------------------------------------------------


async def _hand_over(folder: RunFolder, founded: Founded, envelope: bytes, order: Order) -> str:
    serving = find(folder)
    if serving is None:
        with FolderLock(folder):
            await _take_at_rest(folder, founded, envelope)
        return f"order {order.number} ({order.kind}) is noted: nobody serves the run at the moment, it waits until then"
    async with Caller(serving) as caller:
        taken = await caller.order(envelope)
        at_once = order.kind != Kind.AMEND and (order.kind != Kind.END or order.round < int(taken["round"]))
        if not at_once:
            return f"order {order.number} ({order.kind}) is given: the commit of round {taken['round']} carries it"
        return await _carried(caller, order)


async def _carried(caller: Caller, order: Order) -> str:
    """Wait a moment for the commit that carries an order. Raises OrderRefused where the leader can't obey it."""
    waited = 0.0
    while waited < WAIT_S:
        status = await caller.status()
        if int(status["n_orders"]) >= order.number:
            return f"order {order.number} ({order.kind}) is obeyed, as of round {int(status['round']) - 1}"
        await asyncio.sleep(LOOK_S)
        waited += LOOK_S
    waits = str(status.get("waiting_for") or status.get("phase"))
    return f"order {order.number} ({order.kind}) is given; the run waits for: {waits}"


async def _take_at_rest(folder: RunFolder, founded: Founded, envelope: bytes) -> OpenedOrder:
    def prepared() -> tuple[Journal, Desk]:
        journal = _journal(folder, founded)
        try:
            journal.begin_term("the operator's order")
            return journal, desk_at_rest(folder, founded, journal)
        except BaseException:
            journal.close()
            raise

    journal, desk = await asyncio.to_thread(prepared)
    try:
        return await desk.take(envelope)
    except Refused as refused:
        raise OrderRefused(str(refused)) from refused
    finally:
        await asyncio.to_thread(journal.close)


def _journal(folder: RunFolder, founded: Founded) -> Journal:
    last = read_json(folder.ports) or {}
    return Journal.open(str(last.get("database") or "") or folder.journal, founded.run)


def _with_journal(folder: RunFolder, founded: Founded, read: Callable[[Journal], Any]) -> Any:
    journal = _journal(folder, founded)
    try:
        return read(journal)
    finally:
        journal.close()
