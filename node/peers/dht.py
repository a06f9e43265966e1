"""The DHT: each member's signed address record, kept by the members themselves, through hivemind's daemon.

A record lies under its owner's key with its sequence number as subkey, so what is newest is decided by what the owner
signed and not by expiration times, which anybody can make up. Storing nodes take records from their owners' keys only,
keep the newest two of each, and none for longer than `EXPIRES_S`.

hivemind needs one clock on all nodes; it is given the run's. Its daemon (p2pd) ends when the connection that this
process holds to it ends, however this process dies, and is started again when it dies by itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from node.errors import MachineError, PortTaken
from node.files import writing
from node.peers import multiaddresses
from node.peers.kademlia import (
    DHTID,
    EXPIRES_S,
    P2P,
    Daemon,
    Multiaddr,
    Node,
    OwnersOnly,
    P2PDaemonError,
    PeerID,
    Storage,
    give_clock,
)
from protos import limits, wire
from protos.messages import PeerId, Record
from protos.records import dht_key, open_record, seal_record
from protos.signing import Identity, SignatureError

FIND_S = 5.0
START_S = 30.0
STOP_S = 3.0
IDLE_S = 15.0
"""A daemon that this process could not connect to before it died ends after so long."""
RESTART_FIRST_S, RESTART_MAX_S = 0.5, 60.0
SOCKET_PATH_MAX = 100  # of 107 that a unix socket's path may have

_log = logging.getLogger(__name__)
_FAULTS = Exception
"""What a query may end with, and nothing else may: hivemind asserts what others answer, and passes on what they do."""


class Dht:
    """The port `Records` over hivemind's node, in this event loop. Made by `start`.

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
        self._node: Node | None = None
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
        give_clock(dht._clock)
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

        class OurDaemon(Daemon):
            _UNIX_SOCKET_PREFIX = f"/unix{self._sockets.absolute()}/"

            def __init__(self) -> None:
                super().__init__()
                this._p2p = self  # also if it fails to start: then it is to be ended

        try:
            p2p = await OurDaemon.create(
                identity_path=str(self._folder / "p2p.key"),
                check_if_identity_free=False,
                host_maddrs=multiaddresses.listened(self._listen) if self._listen else None,
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
        self._node = await Node.create(
            p2p,
            node_id=DHTID.from_bytes(hashlib.sha1(self._identity.peer.encode()).digest()),
            client_mode=self._listen is None,
            record_validator=OwnersOnly(self._run, self._clock),
            strict=False,
            ensure_bootstrap_success=False,
        )
        for name in ("storage", "cache"):
            setattr(self._node.protocol, name, Storage(maxsize=limits.MEMBERS))
        if self._listen is not None:
            visible = tuple(str(address) for address in await p2p.get_visible_maddrs(latest=True))
            self._listen = multiaddresses.with_port(self._listen, visible)
            self._addresses = multiaddresses.told(visible, self._host)
        await self.join(self._bootstrap)

    async def _meet(self, p2p: P2P, node: Node, address: str) -> bool:
        try:
            multiaddress = Multiaddr(address)
            peer = PeerID.from_base58(multiaddress["p2p"])
            if peer == p2p.peer_id:
                return False
            bare = multiaddress.decapsulate(Multiaddr(f"/p2p/{peer.to_base58()}"))
            async with asyncio.timeout(FIND_S):
                await multiaddresses.knock(str(bare))  # the daemon would not try again soon what failed
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
