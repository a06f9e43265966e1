"""The DHT: each member's signed address record, kept by the members themselves; the only place that knows hivemind.

A record lies under its owner's key with its sequence number as subkey, so what is newest is decided by what the owner
signed and not by expiration times, which anybody can make up. Storing nodes take records from their owners' keys only,
keep the newest two of each, and none for longer than `EXPIRES_S`.

hivemind needs one clock on all nodes; it is given the run's. Its daemon (p2pd) ends when the connection that this
process holds to it ends, however this process dies, and is started again when it dies by itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from node.errors import MachineError, PortTaken
from node.files import writing
from protos import limits, wire
from protos.messages import Envelope, PeerId, Record
from protos.records import dht_key, open_record, seal_record
from protos.signing import Identity, SignatureError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what it imports and we don't use
    import hivemind.dht.node
    import hivemind.dht.protocol
    import hivemind.dht.routing
    import hivemind.p2p.p2p_daemon
    import hivemind.utils.timed_storage
    from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
    from hivemind.p2p import P2P, PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
    from hivemind.utils import MSGPackSerializer
    from hivemind.utils.logging import use_hivemind_log_handler
    from hivemind.utils.multiaddr import Multiaddr

EXPIRES_S = 600.0
CLOCK_SLACK_S = 60.0
FIND_S = 5.0
START_S = 30.0
STOP_S = 3.0
IDLE_S = 15.0
"""A daemon that this process could not connect to before it died ends after so long."""
RESTART_FIRST_S, RESTART_MAX_S = 0.5, 60.0
SEQUENCES_KEPT = 2
SOCKET_PATH_MAX = 100  # of 107 that a unix socket's path may have

_log = logging.getLogger(__name__)
_FAULTS = Exception
"""What a query may end with, and nothing else may: hivemind asserts what others answer, and passes on what they do."""


def _tame_hivemind() -> None:
    """Undo what importing it did to logging: its messages go where ours go, and its daemon's chatter nowhere.

    And find its daemon by a way that Python has not deprecated.
    """
    use_hivemind_log_handler("nowhere")
    logging.addLevelName(logging.WARNING, "WARNING")
    logging.getLogger("hivemind").setLevel(logging.ERROR)
    hivemind.p2p.p2p_daemon.path = lambda package, name: as_file(files(package) / name)


_tame_hivemind()


def _give_clock(clock: Callable[[], float]) -> None:
    """Put a clock where hivemind looks up the time; there is one for the whole process."""
    for module in (hivemind.utils.timed_storage, hivemind.dht.protocol, hivemind.dht.node, hivemind.dht.routing):
        module.get_dht_time = clock


class _OwnersOnly(RecordValidatorBase):  # type: ignore[misc]
    """Lets a record in only if the owner of its key signed it, and not for longer than records live."""

    def __init__(self, run: PeerId, clock: Callable[[], float]) -> None:
        self._run = run
        self._clock = clock

    def validate(self, record: DHTRecord) -> bool:
        try:
            value = MSGPackSerializer.loads(record.value)
            if not isinstance(value, bytes) or len(value) > limits.RECORD_BYTES:
                return False
            opened = open_record(value, run=self._run, peer=wire.decode(Envelope, value).signer)
        except Exception:  # whatever msgpack makes of bytes that anybody may send
            return False
        return bool(
            record.key == DHTID.generate(dht_key(self._run, opened.peer)).to_bytes()
            and record.subkey == MSGPackSerializer.dumps(opened.sequence)
            and record.expiration_time <= self._clock() + EXPIRES_S + CLOCK_SLACK_S
        )


class _Storage(DHTLocalStorage):  # type: ignore[misc]
    """Of each owner the records with the highest sequence numbers, so that replays of old ones gather nowhere."""

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        entry = self.get(key)
        kept = entry.value.data if entry is not None and isinstance(entry.value, DictionaryDHTValue) else {}
        if not isinstance(subkey, int) or (len(kept) >= SEQUENCES_KEPT and subkey < min(kept)):
            return False
        stored: bool = super().store_subkey(key, subkey, value, expiration_time)
        entry = self.get(key)
        if entry is not None and isinstance(entry.value, DictionaryDHTValue):
            for old in sorted(entry.value.data)[:-SEQUENCES_KEPT]:
                del entry.value[old]
        return stored


class _Daemon(P2P):  # type: ignore[misc]
    """hivemind's handle on its daemon; one that failed to start can be collected without a word."""

    _daemon_listen_maddr = None
    _client_listen_maddr = None


class _Node(DHTNode):  # type: ignore[misc]
    """One that others may name as its own neighbour: hivemind asserts that nobody does.

    A node that went over to dialling out only is still known from before, and a liar may say it of anyone.
    """

    def _filter_blacklisted(self, peer_ids: dict[DHTID, PeerID]) -> dict[DHTID, PeerID]:
        known: dict[DHTID, PeerID] = super()._filter_blacklisted(peer_ids)
        known.pop(self.node_id, None)
        return known


class Dht:
    """The port `Records` over hivemind's DHTNode, in this event loop. Made by `start`.

    Args:
        identity: this node's; also its libp2p identity.
        listen: HOST:PORT, port 0 for any free one; None for a node that only dials out.
        host: the host that others are told; None: whatever addresses the machine has. Empty: none, since nobody can
            connect to this node, which therefore holds no keys for others either.
        bootstrap: multiaddresses of nodes that are in the DHT.
        clock: the run's clock, in seconds.
        folder: for the daemon's identity file and sockets.
        failed: told when the daemon died or could not be started again.
    """

    def __init__(
        self,
        identity: Identity,
        run: PeerId,
        *,
        listen: str | None,
        host: str | None = None,
        bootstrap: Sequence[str],
        clock: Callable[[], float],
        folder: Path,
        failed: Callable[[str], None] = lambda _: None,
        option: str = "--dht",
    ) -> None:
        self._identity = identity
        self._run = run
        self._listen = None if host == "" else listen
        self._host = host
        self._bootstrap = tuple(bootstrap)
        self._clock = clock
        self._folder = folder
        self._failed = failed
        self._option = option
        self._sockets = folder
        self._p2p: P2P | None = None
        self._node: DHTNode | None = None
        self._addresses: tuple[str, ...] = ()
        self._keeper: asyncio.Task[None] | None = None
        self._anew = asyncio.Event()  # another daemon is wanted, although this one is well
        self._joining = asyncio.Lock()

    @classmethod
    async def start(cls, identity: Identity, run: PeerId, **options: Any) -> Dht:
        """Start the daemon and join; see the class for options. Bootstrap nodes that don't answer are no error.

        Raises PortTaken or MachineError.
        """
        dht = cls(identity, run, **options)
        _give_clock(dht._clock)
        with writing(dht._folder, "the DHT's key", 4096):
            dht._prepare_folder()
        try:
            await dht._up()
        except BaseException:
            await dht.close()
            raise
        dht._keeper = asyncio.create_task(dht._keep(), name="DHT daemon")
        return dht

    # -- the port --------------------------------------------------------------------------------------------------

    async def publish(self, record: Record) -> None:
        """Put this node's record where others look for it. Repeat it well within `EXPIRES_S`."""
        raw = seal_record(self._identity, self._run, record)
        node = self._node
        if node is None:
            return
        if self.alone:
            await self.join(self._bootstrap)
        with suppress(_FAULTS):
            async with asyncio.timeout(FIND_S):
                await node.store(
                    dht_key(self._run, record.peer), raw, self._clock() + EXPIRES_S, subkey=record.sequence
                )

    async def find(self, peer: PeerId, min_sequence: int) -> Record | None:
        """The freshest record that the peer signed; None if there is none as fresh as that, or not in time."""
        node = self._node
        if node is None:
            return None
        try:
            async with asyncio.timeout(FIND_S):
                found = await node.get(dht_key(self._run, peer), latest=True)
        except _FAULTS:
            return None
        entries = found.value if found is not None else None
        if not isinstance(entries, dict):
            return None
        records: list[Record] = []
        for entry in entries.values():
            with suppress(SignatureError, wire.WireError, TypeError):
                records.append(open_record(entry.value, run=self._run, peer=peer))
        best = max(records, key=lambda record: record.sequence, default=None)
        return best if best is not None and best.sequence >= min_sequence else None

    @property
    def alone(self) -> bool:
        """Whether no other node of the DHT is known."""
        return self._node is None or not self._node.protocol.routing_table.uid_to_peer_id

    def addresses(self) -> tuple[str, ...]:
        """Multiaddresses that others can bootstrap from; none for a node that only dials out."""
        return self._addresses

    async def dial_out_only(self) -> None:
        """Others can't connect to this node: hold no keys for them, and don't tell them an address.

        A key on a node that can't be dialled is lost to those who look for it.
        """
        if self._listen is None:
            return
        self._listen, self._addresses = None, ()
        self._anew.set()

    async def join(self, bootstrap: Sequence[str]) -> bool:
        """Get to know nodes that are in the DHT; whether one of them answered."""
        async with self._joining:
            node, p2p = self._node, self._p2p
            if node is None or p2p is None:
                return False
            answers = await asyncio.gather(*(self._meet(p2p, node, address) for address in bootstrap))
            if any(answers):
                with suppress(_FAULTS):
                    async with asyncio.timeout(FIND_S):
                        await node.find_nearest_nodes([node.node_id])
            return any(answers)

    async def close(self) -> None:
        """Leave the DHT and end the daemon."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        await self._down()
        if self._sockets != self._folder:
            shutil.rmtree(self._sockets, ignore_errors=True)

    # -- the daemon ------------------------------------------------------------------------------------------------

    def _prepare_folder(self) -> None:
        """An identity file for the daemon, and a place for its sockets whose path is short enough."""
        path = self._folder / "p2p.key"
        path.unlink(missing_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(file, self._identity.libp2p_private_key())
        finally:
            os.close(file)
        self._prepare_sockets()

    def _prepare_sockets(self) -> None:
        if len(str(self._folder.absolute())) + len("/p2pclient-0123456789a.sock") > SOCKET_PATH_MAX:
            self._sockets = _short_folder(self._folder)
        for left in self._sockets.glob("p2p*.sock"):
            left.unlink(missing_ok=True)

    async def _up(self) -> None:
        this = self

        class Daemon(_Daemon):
            _UNIX_SOCKET_PREFIX = f"/unix{self._sockets.absolute()}/"

            def __init__(self) -> None:
                super().__init__()
                this._p2p = self  # also if it fails to start: then it is to be ended

        try:
            p2p = await Daemon.create(
                identity_path=str(self._folder / "p2p.key"),
                check_if_identity_free=False,
                host_maddrs=_listened(self._listen) if self._listen else None,
                no_listen=self._listen is None,
                dht_mode="client" if self._listen is None else "server",
                idle_timeout=IDLE_S,
                startup_timeout=START_S,
                auto_nat=False,
                nat_port_map=False,
                use_relay=False,
            )
        except (P2PDaemonError, OSError) as error:
            await self._down()
            if "in use" in str(error) and self._listen:
                raise PortTaken(self._listen, self._option) from error
            raise MachineError(
                f"the DHT's helper program could not be started ({error})",
                f"check that {self._option} names an address of this machine, and see the log",
            ) from error
        self._node = await _Node.create(
            p2p,
            node_id=DHTID.from_bytes(hashlib.sha1(self._identity.peer.encode()).digest()),
            client_mode=self._listen is None,
            record_validator=_OwnersOnly(self._run, self._clock),
            strict=False,
            ensure_bootstrap_success=False,
        )
        for name in ("storage", "cache"):
            setattr(self._node.protocol, name, _Storage(maxsize=limits.MEMBERS))
        if self._listen is not None:
            visible = tuple(str(address) for address in await p2p.get_visible_maddrs(latest=True))
            self._listen = _with_port(self._listen, visible)
            self._addresses = _told(visible, self._host)
        await self.join(self._bootstrap)

    async def _meet(self, p2p: P2P, node: DHTNode, address: str) -> bool:
        try:
            multiaddress = Multiaddr(address)
            peer = PeerID.from_base58(multiaddress["p2p"])
            if peer == p2p.peer_id:
                return False
            bare = multiaddress.decapsulate(Multiaddr(f"/p2p/{peer.to_base58()}"))
            async with asyncio.timeout(FIND_S):
                await _knock(str(bare))  # the daemon would not try again soon what failed
                await p2p._client.connect(peer, [bare])
                return await node.protocol.call_ping(peer) is not None
        except _FAULTS as error:
            _log.debug("DHT node %s does not answer: %r", address, error)
            return False

    async def _keep(self) -> None:
        """Wait for the daemon to die, and start another one, whatever goes wrong over that."""
        pause_s = RESTART_FIRST_S
        while True:
            try:
                if self._p2p is not None and self._p2p._child is not None:
                    if (code := await self._ended(self._p2p._child)) is not None:
                        self._failed(f"the DHT's helper program ended with {code}; starting it again")
                    await self._down()
                    if not self._anew.is_set():
                        await asyncio.sleep(pause_s)
                self._anew.clear()
                if not self._sockets.is_dir():  # whoever cleans up a machine's folder for temporary files
                    self._prepare_sockets()
                await self._up()
                pause_s = RESTART_FIRST_S
            except _FAULTS as error:
                self._failed(str(error))
                with suppress(_FAULTS):
                    await self._down()
                pause_s = min(2 * pause_s, RESTART_MAX_S)
                await asyncio.sleep(pause_s)

    async def _ended(self, child: asyncio.subprocess.Process) -> int | None:
        """The daemon's exit code, once it has one; None as soon as another daemon is wanted."""
        waiting = [asyncio.ensure_future(child.wait()), asyncio.ensure_future(self._anew.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()
        return child.returncode

    async def _down(self) -> None:
        node, p2p = self._node, self._p2p
        self._node = self._p2p = None
        if node is not None:
            node.is_alive = False
            if (refreshing := node.cache_refresh_task) is not None:  # it would wait for ever
                refreshing.cancel()
                await asyncio.gather(refreshing, return_exceptions=True)
        if p2p is None:
            return
        child = p2p._child
        p2p._terminate()
        if child is not None:
            try:
                async with asyncio.timeout(STOP_S):
                    await child.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
            child._transport.close()  # hivemind stops reading its output, so asyncio would wait for the end of it
        for left in self._sockets.glob("p2p*.sock"):
            left.unlink(missing_ok=True)


def _short_folder(folder: Path) -> Path:
    """A private folder for sockets whose own path would be too long; the same one after a crash."""
    name = hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:12]
    short = Path(tempfile.gettempdir()) / f"barnraise-{os.getuid()}-{name}"
    with suppress(FileExistsError):
        short.mkdir(mode=0o700)
    found = short.lstat()
    if short.is_symlink() or not short.is_dir() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        return Path(tempfile.mkdtemp(prefix="barnraise-"))
    return short


def _multiaddress(listen: str) -> str:
    """HOST:PORT as a TCP multiaddress. Raises MachineError for anything else."""
    host, colon, port = listen.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise MachineError(f"the DHT can't listen at {listen!r}", "give HOST:PORT, port 0 for any free one")
    try:
        return f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/{port}"
    except ValueError:
        return f"/dns/{host}/tcp/{port}"


def _told(visible: Sequence[str], host: str | None) -> tuple[str, ...]:
    """What others are told of the addresses that the daemon listens at: with the host that is known to lead here, else
    all but loopback, which is another machine for everybody else. Loopback alone stays: then all are on this machine.
    """
    if host and visible:
        port, name = visible[0].split("/tcp/")[1].split("/")[0], visible[0].rpartition("/p2p/")[2]
        bracketed = f"[{host}]" if ":" in host else host
        return (f"{_multiaddress(f'{bracketed}:{port}')}/p2p/{name}",)
    outside = tuple(each for each in visible if not each.startswith(("/ip4/127.", "/ip6/::1/")))
    return outside or tuple(visible)


def _listened(listen: str) -> list[str]:
    """Multiaddresses to listen at: all of IPv6 means all of IPv4 as well, as it does for TCP elsewhere."""
    host, _, port = listen.rpartition(":")
    return [_multiaddress(listen), *([f"/ip4/0.0.0.0/tcp/{port}"] if host.strip("[]") == "::" else [])]


async def _knock(multiaddress: str) -> None:
    """Raises OSError if nothing listens at a TCP multiaddress, ValueError for another kind."""
    match multiaddress.strip("/").split("/"):
        case ["ip4" | "ip6" | "dns" | "dns4" | "dns6", host, "tcp", port]:
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        case _:
            raise ValueError(f"{multiaddress} is no TCP address")


def _with_port(listen: str, addresses: Sequence[str]) -> str:
    """The address listened at with the port that was got, so that a daemon started again takes the same."""
    host, _, port = listen.rpartition(":")
    ports = [address.split("/tcp/")[1].split("/")[0] for address in addresses if "/tcp/" in address]
    return f"{host}:{ports[0]}" if port == "0" and ports else listen
