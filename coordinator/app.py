"""Constructs a serving coordinator and wires it; nothing is constructed anywhere else."""

from __future__ import annotations

import asyncio
import datetime
import os
import secrets
import signal
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from coordinator import listening
from coordinator.admission import Admission
from coordinator.authority import Authority, CertificateError, Tls
from coordinator.bulletin import Bulletin
from coordinator.children import Supervised
from coordinator.clock import RunClock
from coordinator.control import Serving
from coordinator.errors import CoordinatorError, StateError
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
from coordinator.leading.driver import Driver
from coordinator.leading.ports import Journal as Journalling
from coordinator.leading.prober import GrpcProber
from coordinator.leading.service import PortError, Service
from coordinator.ledger_file import LedgerFile
from coordinator.listening import Address
from coordinator.observing import Launch, ObserverOrder, launch, starter
from coordinator.places import Places, ServeOptions, find_places, remember
from coordinator.rounds import policy
from coordinator.rounds.machine import Rounds
from coordinator.rounds.voter import Voter
from coordinator.rows import empty_at_last, round_rows
from coordinator.site import CoordinatorSite, Whereabouts, read_allowed
from coordinator.web.pieces import Pieces
from coordinator.web.server import WebServer
from coordinator.writer import Writer
from protos.invite import Invite
from protos.messages import Body, Standing
from protos.sealer import KeySealer
from protos.signing import Identity
from protos.wire import decode

__all__ = ["OUTSIDE", "Outside", "ServeOptions", "serve"]

LINES_GRACE_S = 0.5
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
            os._exit(1)  # the observer is told by the kernel
        stop.set()
        say(WITHOUT_US)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled)
    return stop


@dataclass(frozen=True, slots=True)
class Outside:
    """What a serving coordinator is built upon, and what others may put in its place: tests serve beside nodes."""

    launch_observer: Launch = launch
    until: Callable[[Say], asyncio.Event] = on_signals
    """Gives the event that ends it."""
    journal: Callable[[Journalling], Journalling] = lambda writer: writer
    """Stands between the driver and its journal."""


OUTSIDE = Outside()


async def serve(options: ServeOptions, say: Say, show: Say, outside: Outside = OUTSIDE) -> None:
    """Serve a run until it is told to stop. `say` is progress, `show` the result: invite and page.

    Raises CoordinatorError.
    """
    folder = RunFolder(options.data)
    founded = read_founded(folder)
    async with AsyncExitStack() as stack:
        stack.enter_context(FolderLock(folder))
        places = find_places(folder, options)
        http = stack.enter_context(listening.bind(places.http))
        leader = await _leader(folder, founded, places, options, stack, say, outside)
        await _serve(folder, founded, places, http, leader, stack, say, show, outside)


@dataclass(frozen=True, slots=True)
class _Leader:
    """What leads the run, before anybody can reach it."""

    identity: Identity
    tls: Tls
    clock: RunClock
    journal: Journal
    writer: Writer
    bulletin: Bulletin
    driver: Driver
    admission: Admission


async def _leader(
    folder: RunFolder,
    founded: Founded,
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
    identity, authority, seal_private = _keys(folder, founded)
    journal = Journal.open(places.database or folder.journal, run)
    stack.callback(journal.close)
    recovered = journal.recover()
    clock = RunClock(journal.origin_unix_s(), recovered.run_time_s)
    writer = Writer(journal, clock)
    stack.push_async_callback(writer.close)
    rows = round_rows(journal, spec)
    file = LedgerFile(folder.ledger, rows)
    stack.callback(file.close)
    promise = recovered.promise
    rounds = Rounds(
        identity.peer,
        spec,
        recovered.ledger,
        recovered.commit,
        KeySealer(identity, run),
        now=clock.now(),
        coordinator=identity.peer,
        opened=recovered.opened,
        epoch=recovered.epoch,
        voter=Voter(identity.peer, promise),
        voter_body=decode(Body, promise.proposal.body) if promise is not None and promise.proposal else None,
        relay=options.relay,
    )
    val_loss = next((row["val_loss"] for row in reversed(rows) if row["val_loss"] is not None), None)
    bulletin = Bulletin(
        run, identity.peer, spec, journal, file,
        val_loss=val_loss, empty=empty_at_last(rows), flushed=writer.flushed, say=say,
    )  # fmt: skip
    tls = authority.issue_own(identity.peer, _today())
    driver = Driver(
        rounds,
        recovered.ledger,
        journal=outside.journal(writer),
        prober=GrpcProber(tls),
        clock=clock,
        audience=bulletin,
        paused=recovered.paused,
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
        today=_today,
    )
    return _Leader(identity, tls, clock, journal, writer, bulletin, driver, admission)


async def _serve(
    folder: RunFolder,
    founded: Founded,
    places: Places,
    http: socket.socket,
    leader: _Leader,
    stack: AsyncExitStack,
    say: Say,
    show: Say,
    outside: Outside,
) -> None:
    """Open the ports, start the observer, and serve until told to stop."""
    run, spec, identity, admission = founded.run, founded.spec, leader.identity, leader.admission
    service = Service(run, leader.tls, leader.driver, leader.clock, observer=lambda: admission.observer)
    line_port = await _listen(service, places.listen)
    stack.push_async_callback(service.stop, 0)
    dht = listening.reserve(places.dht)
    host, http_port = places.public_host, int(http.getsockname()[1])
    secret = secrets.token_urlsafe(24)
    site = CoordinatorSite(
        founded,
        leader.driver,
        leader.bulletin,
        admission,
        leader.journal,
        leader.writer,
        leader.clock,
        Pieces(folder.data, spec.data),
        Whereabouts(founded, identity, (listening.host_port(host, line_port),), leader.clock),
        secret,
    )
    web = WebServer(site)
    local = listening.host_port(listening.local_host(places.http.host), http_port)
    order = ObserverOrder(
        invite=str(Invite(run, (local,))),
        listen=listening.host_port(places.listen.host, 0),
        dht=str(dht),
        advertise=places.advertise,
    )
    start = starter(folder, run, identity, admission, leader.clock, order, outside.launch_observer)
    observer = Supervised("observer", start, leader.bulletin.said)
    leader.bulletin.watch("observer", observer)
    stop = outside.until(say)
    await web.start(http)
    stack.push_async_callback(web.stop)
    remember(folder, places, http_port, line_port, dht.port)
    invite = Invite(run, (listening.host_port(host, http_port),))
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
    await _until_stopped(stop, leader.driver, leader.bulletin, service, observer)


async def _until_stopped(
    stop: asyncio.Event, driver: Driver, bulletin: Bulletin, service: Service, observer: Supervised
) -> None:
    """Run the tasks until the signal or the first failure; then end them in order, within seconds."""
    try:
        async with asyncio.TaskGroup() as tasks:
            leading = tasks.create_task(driver.run(), name="driver")
            showing = tasks.create_task(bulletin.run(), name="bulletin")
            observing = tasks.create_task(observer.run(), name="observer")
            await stop.wait()
            driver.stop()
            await leading
            observing.cancel()
            await service.stop(LINES_GRACE_S)
            await asyncio.wait((observing,))
            showing.cancel()
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


def _today() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
