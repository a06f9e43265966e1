"""Constructs a serving coordinator and wires it; nothing is constructed anywhere else."""

from __future__ import annotations

import asyncio
import datetime
import os
import secrets
import signal
import socket
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from coordinator import listening, standby
from coordinator.admission import Admission
from coordinator.authority import Authority, CertificateError, Tls
from coordinator.bulletin import Bulletin
from coordinator.children import Supervised
from coordinator.clock import RunClock
from coordinator.control import Serving
from coordinator.database import RESTORE, is_server
from coordinator.errors import KILLED, CoordinatorError, StateError, UsageError
from coordinator.folder import (
    FolderLock,
    Founded,
    RunFolder,
    read_founded,
    read_identity,
    read_private,
    read_seal_key,
)
from coordinator.journal import Journal
from coordinator.lead import Lead
from coordinator.leading import descriptors
from coordinator.leading.asking import GrpcChain
from coordinator.leading.driver import Driver
from coordinator.leading.learning import Learner
from coordinator.leading.orders import open_orders
from coordinator.leading.ports import Journal as Journalling
from coordinator.leading.prober import GrpcProber
from coordinator.leading.service import PortError, Service
from coordinator.ledger_file import LedgerFile
from coordinator.listening import Address
from coordinator.observing import Launch, ObserverOrder, launch, starter
from coordinator.orders import Desk, read_orders, revisions_of, waiting
from coordinator.parent import ORPHANED
from coordinator.places import Places, ServeOptions, find_places, remember
from coordinator.rounds import policy
from coordinator.rounds.events import Ordered
from coordinator.rounds.machine import Rounds
from coordinator.rounds.voter import Voter
from coordinator.rows import empty_at_last, round_rows
from coordinator.site import CoordinatorSite, Whereabouts, read_allowed
from coordinator.standby import Here, Leading, Others, Standby, keep_lead
from coordinator.web.pages import make_app
from coordinator.web.pieces import Pieces
from coordinator.web.server import WebServer
from coordinator.web.waiting import make_waiting_app
from coordinator.writer import Writer
from protos import limits
from protos.invite import Invite
from protos.messages import Body, Standing
from protos.sealer import KeySealer
from protos.signing import Identity
from protos.wire import decode

__all__ = ["OUTSIDE", "Outside", "ServeOptions", "serve"]

LINES_GRACE_S = 0.5
FRESH_EPOCHS = 2**32
"""An epoch's number is above all known ones by less than this, by chance: 2^20 of them stay under 2^52."""
WITHOUT_US = (
    "stopping: the run goes on without you as far as its members can, and waits for you otherwise; "
    "`coordinator pause` before stopping pauses it for all"
)


Say = Callable[[str], None]


def on_signals(say: Say) -> asyncio.Event:
    """An event that the first SIGINT or SIGTERM sets; the second ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def signalled() -> None:
        if stop.is_set():
            os._exit(KILLED)  # the observer is told by the kernel
        stop.set()
        say(WITHOUT_US)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled)

    def orphaned() -> None:
        if not stop.is_set():
            signalled()

    loop.add_signal_handler(ORPHANED, orphaned)
    return stop


@dataclass(frozen=True, slots=True)
class Outside:
    """What a serving coordinator is built upon, and what others may put in its place: tests serve beside nodes."""

    launch_observer: Launch = launch
    until: Callable[[Say], asyncio.Event] = on_signals
    """Gives the event that ends it."""
    watch: Callable[[Bulletin, Driver], Coroutine[Any, Any, None]] | None = None
    """Shows the run to whoever sits there, until it is cancelled."""
    journal: Callable[[Journalling], Journalling] = lambda writer: writer
    """Stands between the driver and its journal."""


OUTSIDE = Outside()


async def serve(options: ServeOptions, say: Say, show: Say, outside: Outside = OUTSIDE) -> None:
    """Serve a run until it is told to stop. `say` is progress, `show` the result: invite and page.

    Raises CoordinatorError.
    """
    descriptors.raise_limit()
    folder = RunFolder(options.data)
    founded = read_founded(folder)
    async with AsyncExitStack() as stack:
        stack.enter_context(FolderLock(folder))
        places = find_places(folder, options)
        http = stack.enter_context(listening.bind(places.http))
        places = replace(places, listen=listening.reserve(places.listen))
        host, port = places.public_host, int(http.getsockname()[1])
        here = Here(listening.host_port(host, port), listening.host_port(host, places.listen.port), os.getpid())
        leading = await _lead(folder, founded, places, http, here, options, say)
        stack.callback(leading.journal.close)
        leader = await _leader(folder, founded, leading, places, options, stack, say, outside)
        await _serve(folder, founded, places, http, here, leader, stack, say, show, outside)


async def _lead(
    folder: RunFolder,
    founded: Founded,
    places: Places,
    http: socket.socket,
    here: Here,
    options: ServeOptions,
    say: Say,
) -> Leading:
    """The journal, once this process may lead; until then it stands by."""
    run = founded.run
    if not is_server(places.database):
        if options.standby:
            raise UsageError(
                "--standby needs a database that both coordinators reach", "give --database postgresql://…"
            )
        journal = await asyncio.to_thread(Journal.open, places.database or folder.journal, run)
        return await asyncio.to_thread(standby.begin, journal, folder, here, options.lease_s)
    waiting = Standby(folder, run, places.database, here, patient=options.standby, lease_s=options.lease_s, say=say)
    if not options.standby:
        return await waiting.lead()
    remember(
        folder,
        places,
        http=int(http.getsockname()[1]),
        listen=places.listen.port,
        dht=places.dht.port,
        observer=places.observer.port,
    )
    web = WebServer(make_waiting_app(waiting.about))
    await web.start(http.dup())
    say(f"stands by at http://{here.http}/healthz")
    try:
        return await waiting.lead()
    finally:
        await web.stop()


@dataclass(frozen=True, slots=True)
class _Leader:
    """What leads the run, before anybody can reach it."""

    identity: Identity
    tls: Tls
    clock: RunClock
    journal: Journal
    lead: Lead
    writer: Writer
    bulletin: Bulletin
    driver: Driver
    admission: Admission
    desk: Desk


async def _leader(
    folder: RunFolder,
    founded: Founded,
    leading: Leading,
    places: Places,
    options: ServeOptions,
    stack: AsyncExitStack,
    say: Say,
    outside: Outside,
) -> _Leader:
    run, spec = founded.run, founded.spec
    if why := policy.unknown(spec):
        raise StateError(
            f"this version can't compute what the run's settings ask for: {why}",
            "serve it with the version of Barnraise that made it",
        )
    if spec.protocol != limits.PROTOCOL:
        raise StateError(
            f"the run was made for protocol {spec.protocol}, this version speaks {limits.PROTOCOL}: nobody could join",
            "serve it with the version of Barnraise that made it",
        )
    identity, authority, seal_private = _keys(folder, founded)
    journal, lost = leading.journal, leading.lost
    recovered = journal.recover()
    if lost:
        say(
            f"the database is an older copy than this folder knows: the coordinator signs nothing in round "
            f"{recovered.body.round + 1}, which may have begun"
        )
    clock = RunClock(journal.origin_unix_s(), recovered.run_time_s, off_by_s=options.clock_offset_s)
    writer = Writer(journal, clock)
    stack.push_async_callback(writer.close)
    rows = round_rows(journal, spec, identity.peer)
    file = LedgerFile(folder.ledger, rows)
    stack.callback(file.close)
    promise = recovered.promise
    orders = read_orders(journal, run, identity.peer)
    revisions = revisions_of(founded, orders)
    if (spec_now := revisions.specs.get(recovered.ledger.spec_revision)) is None:
        raise StateError(
            f"the database has lost revision {recovered.ledger.spec_revision} of the run's settings", RESTORE
        )
    given = [Ordered(each, None) for each in orders if each.order.number <= recovered.ledger.n_orders]
    given += waiting(orders, recovered.ledger, journal)
    voted = decode(Body, promise.proposal.body) if promise is not None and promise.proposal else None
    rounds = Rounds(
        identity.peer,
        spec_now,
        recovered.ledger,
        recovered.commit,
        KeySealer(identity, run),
        now=clock.now(),
        coordinator=identity.peer,
        opened=max(recovered.opened, 0) if lost else recovered.opened,  # number 0 may have been used
        numbers=recovered.numbers,
        epoch=recovered.epoch,
        voter=Voter(identity.peer, promise, lost=lost, signed=recovered.signed),
        voter_body=voted,
        voter_orders=open_orders(voted, run, identity.peer) if voted is not None else (),
        specs=revisions.specs,
        relay=options.relay,
        fresh_epoch=1 + secrets.randbelow(FRESH_EPOCHS - 1),
    )
    val_loss = next((row["val_loss"] for row in reversed(rows) if row["val_loss"] is not None), None)
    bulletin = Bulletin(
        run, identity.peer, spec, journal, file,
        val_loss=val_loss, empty=empty_at_last(rows), flushed=writer.flushed, say=say,
        carried=lambda orders: desk.carried(orders),
    )  # fmt: skip
    tls = authority.issue_own(identity.peer, _today(options.clock_offset_s))
    driver = Driver(
        rounds,
        recovered.ledger,
        journal=outside.journal(writer),
        prober=GrpcProber(tls),
        clock=clock,
        audience=bulletin,
        orders=given,
        may_sign=journal.check_lead,
        learner=Learner(run, identity.peer, GrpcChain(tls), writer),
    )
    admission = Admission(
        spec,
        run,
        identity.peer,
        authority,
        seal_private,
        journal,
        allowed=lambda: read_allowed(folder.allowed),
        banned=lambda peer: driver.ledger.standing.get(peer) is Standing.BANNED,
        today=lambda: _today(options.clock_offset_s),
    )
    desk = Desk(
        folder, founded, journal, revisions, given,
        books=lambda: driver.ledger, write=writer.run, give=driver.order, run_time_s=clock.run_time_s,
    )  # fmt: skip
    return _Leader(identity, tls, clock, journal, leading.lead, writer, bulletin, driver, admission, desk)


async def _serve(
    folder: RunFolder,
    founded: Founded,
    places: Places,
    http: socket.socket,
    here: Here,
    leader: _Leader,
    stack: AsyncExitStack,
    say: Say,
    show: Say,
    outside: Outside,
) -> None:
    """Open the ports, start the observer, and serve until told to stop."""
    run, spec, identity, admission = founded.run, founded.spec, leader.identity, leader.admission
    service = Service(
        run,
        leader.tls,
        leader.driver,
        leader.clock,
        observer=lambda: admission.observer,
        coordinator=identity.peer,
        beat_s=lambda: leader.desk.spec().deadlines.heartbeat_s,
        silence_s=lambda: 2 * leader.desk.spec().deadlines.heartbeat_timeout_s,
    )
    line_port = await _listen(service, places.listen)
    stack.push_async_callback(service.stop, 0)
    dht, observing = await asyncio.gather(listening.reserve_soon(places.dht), listening.reserve_soon(places.observer))
    host, http_port = places.public_host, int(http.getsockname()[1])
    line = listening.host_port(host, line_port)
    lines = tuple(listening.host_port(each, line_port) for each in places.public_hosts)
    whereabouts = Whereabouts(founded, identity, lines, leader.clock)
    await leader.writer.run(lambda: leader.lead.meet(here.http, line))
    secret = secrets.token_urlsafe(24)
    site = CoordinatorSite(
        founded,
        leader.driver,
        leader.bulletin,
        admission,
        leader.writer,
        leader.clock,
        Pieces(folder.data, spec.data),
        whereabouts,
        secret,
        leader.desk,
    )
    web = WebServer(make_app(site))
    local = listening.host_port(listening.local_host(places.http.host), http_port)
    order = ObserverOrder(
        invite=str(Invite(run, (local,))),
        listen=str(observing),
        dht=str(dht),
        advertise=",".join(listening.bracketed(each) for each in places.public_hosts),
    )
    start = starter(folder, run, identity, admission, leader.clock, order, outside.launch_observer)
    observer = Supervised("observer", start, leader.bulletin.said)
    leader.bulletin.watch("observer", observer)
    stop = outside.until(say)
    await web.start(http)
    stack.push_async_callback(web.stop)
    remember(folder, places, http=http_port, listen=line_port, dht=dht.port, observer=observing.port)
    others = Others(here, line, whereabouts, await leader.writer.run(leader.lead.beat))
    more = [listening.host_port(each, http_port) for each in places.public_hosts[1:]]
    invite = Invite(run, (here.http, *more, *others.http)[: limits.ADDRESSES])
    Serving(local, secret, os.getpid(), run, str(invite)).write(folder)
    stack.callback(folder.serving.unlink, missing_ok=True)
    if spec.membership.admission == "invite":
        show(f"invite (by invitation only) print one with: coordinator invite --data {folder.path}")
    else:
        show(f"invite {invite}")
    if spec.membership.admission == "allow_list":
        say(f"only the peers in {folder.allowed} are let in, one peer id a line")
    show(f"page   http://{listening.host_port(host, http_port)}/")
    if listening.is_loopback(host):
        say("this invite works on this machine only; listen on 0.0.0.0 or give --advertise HOST for others")
    beating = keep_lead(leader.lead, leader.writer, lambda met: others.learn(met, run, say))
    watching = outside.watch and outside.watch(leader.bulletin, leader.driver)
    await _until_stopped(stop, leader.driver, leader.bulletin, service, observer, beating, watching)


async def _until_stopped(
    stop: asyncio.Event,
    driver: Driver,
    bulletin: Bulletin,
    service: Service,
    observer: Supervised,
    beating: Coroutine[Any, Any, None],
    watching: Coroutine[Any, Any, None] | None,
) -> None:
    """Run the tasks until the signal or the first failure; then end them in order, within seconds."""
    try:
        async with asyncio.TaskGroup() as tasks:
            leading = tasks.create_task(driver.run(), name="driver")
            keeping = tasks.create_task(beating, name="lease")
            showing = tasks.create_task(bulletin.run(), name="bulletin")
            observing = tasks.create_task(observer.run(), name="observer")
            looking = tasks.create_task(watching, name="display") if watching is not None else None
            await stop.wait()
            if looking is not None:
                looking.cancel()
            driver.stop()
            await leading
            observing.cancel()
            await service.stop(LINES_GRACE_S)
            await asyncio.wait((observing,))
            showing.cancel()
            keeping.cancel()
    except* CoordinatorError as group:
        raise _first(group) from group
    except* Exception as group:
        raise CoordinatorError(f"a fault of ours: {_first(group)!r}", "run again with -v and report it") from group


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _keys(folder: RunFolder, founded: Founded) -> tuple[Identity, Authority, bytes]:
    identity = read_identity(folder.keys / "coordinator.pem")
    if identity.peer != founded.operator.coordinator:
        raise StateError(
            f"{folder.keys / 'coordinator.pem'} is not the key that the run's operator has certified",
            "restore it from a copy of the folder",
        )
    try:
        authority = Authority.from_pem(
            read_private(folder.keys / "ca.pem", "the authority's key"),
            read_private(folder.keys / "ca-cert.pem", "the authority's certificate"),
        )
    except CertificateError as error:
        raise StateError(f"{folder.keys}: {error}", "restore ca.pem and ca-cert.pem from a copy") from error
    return identity, authority, read_seal_key(folder.keys / "seal.pem")


async def _listen(service: Service, address: Address) -> int:
    place = listening.reserve(address)  # says what is wrong, which gRPC doesn't
    try:
        return await service.start(str(place))
    except PortError as error:
        raise listening.taken(place) from error


def _today(off_by_s: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=off_by_s)
