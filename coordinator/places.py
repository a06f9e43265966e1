"""Where a run is served: what was asked for, what was used the last time, what others are told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coordinator import listening
from coordinator.errors import UsageError
from coordinator.folder import PRIVATE, RunFolder, read_json, write_json
from coordinator.lead import LEASE_S
from coordinator.listening import Address
from protos.invite import InviteError, check_host_port

DEFAULT_HTTP, DEFAULT_LISTEN, DEFAULT_DHT = "0.0.0.0:8470", "0.0.0.0:8471", "0.0.0.0:8472"
DEFAULT_OBSERVER_PORT = 8473


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `serve` is asked for; empty addresses are those of the last time, or the defaults."""

    data: Path
    http: str = ""
    listen: str = ""
    dht: str = ""
    observer: str = ""
    advertise: str = ""
    database: str = ""
    relay: bool = True
    standby: bool = False
    lease_s: float = LEASE_S
    clock_offset_s: float = 0.0
    """So many seconds this machine's clock and calendar are wrong, in trials."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where to listen, and what others are told."""

    http: Address
    listen: Address
    dht: Address
    observer: Address
    advertise: str
    database: str

    @property
    def public_host(self) -> str:
        return self.public_hosts[0]

    @property
    def public_hosts(self) -> tuple[str, ...]:
        """By which hosts others reach this machine, the first one first."""
        return listening.public_hosts(self.http.host, self.advertise)


def advertised(text: str) -> str:
    """The host of `--advertise`, an IPv6 address without its brackets. Raises UsageError where none can be meant."""
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        check_host_port(listening.host_port(host, 1))
    except InviteError as error:
        raise UsageError(
            f"--advertise {text!r} is no host: {error}",
            "give a name or an address alone, for example --advertise barn.example",
        ) from error
    return host


def is_place(text: str) -> bool:
    """Whether others can be told this HOST:PORT."""
    try:
        check_host_port(text)
    except InviteError:
        return False
    return True


def find_places(folder: RunFolder, options: ServeOptions) -> Places:
    """Given options first, then what was used the last time (people hold invites that name it), then the defaults.

    Raises UsageError for what can't be an address, or none that others can be told.
    """
    last = read_json(folder.ports) or {}

    def address(given: str, key: str, default: str) -> Address:
        remembered = last.get(key)
        known = remembered if isinstance(remembered, str) else ""
        option, remembered = f"--{key}", bool(known) and given in ("", known)
        return listening.parse(given or known or default, option, asked=bool(given or known), remembered=remembered)

    def word(given: str, key: str) -> str:
        remembered = last.get(key)
        return given or (remembered if isinstance(remembered, str) else "")

    http = address(options.http, "http", DEFAULT_HTTP)
    advertise = word(options.advertise, "advertise")
    if advertise:
        advertise = advertised(advertise)
    elif http.host not in listening.ANY and not is_place(listening.host_port(http.host, 1)):
        raise UsageError(f"others can't be told --http {http}", "name this machine for them with --advertise HOST")
    listen = address(options.listen, "listen", DEFAULT_LISTEN)
    beside = listening.host_port(listen.host, DEFAULT_OBSERVER_PORT if listen.port else 0)
    return Places(
        http=http,
        listen=listen,
        dht=address(options.dht, "dht", DEFAULT_DHT),
        observer=address(options.observer, "observer", beside),
        advertise=advertise,
        database=word(options.database, "database"),
    )


def remember(folder: RunFolder, places: Places, *, http: int, listen: int, dht: int, observer: int) -> None:
    """Note where the run is served, with the ports that were got."""
    write_json(
        folder.ports,
        {
            "http": listening.host_port(places.http.host, http),
            "listen": listening.host_port(places.listen.host, listen),
            "dht": listening.host_port(places.dht.host, dht),
            "observer": listening.host_port(places.observer.host, observer),
            "advertise": places.advertise,
            "database": places.database,
        },
        mode=PRIVATE,
    )
