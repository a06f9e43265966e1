"""What a contributor asks for on the command line, validated once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from node.errors import ConfigError
from node.peers.pacing import RATE_LEAST_BYTES_S
from protos import limits
from protos.invite import Invite, InviteError, check_host_port, parse
from protos.messages import Record
from protos.records import seal_record
from protos.signing import Identity
from protos.wire import WireError

ANY_PORT = "0.0.0.0:0"
NAME_CHARS_MAX = 32
DATA_CACHE_BYTES = 8 * 2**30

_RATE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?) ?(|[kKMG]|[kKMG]?B|[kKMG]iB|[kKMG]?bit)(?:/s|ps)?")
_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?) ?([kKMGT]?)(i?)(B?)")
_FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"k": 2**10, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """A node's own settings; what the run fixes comes with its RunSpec."""

    invite: Invite
    data: Path
    threads: int
    listen: str = ANY_PORT
    dht: str = ANY_PORT
    advertise: str = ""
    """HOST or HOST:PORT that others reach this node at; several are separated by commas."""
    rounds: int | None = None
    name: str = ""
    max_up: int | None = None
    """The most bytes a second that this node sends to others, all of them together; None: as many as the line takes."""
    max_down: int | None = None
    """The same for what it receives."""
    data_cache: int = DATA_CACHE_BYTES
    """Bytes of the training data that this node keeps, those of its lease included, which alone may be more."""
    run_dir: Path | None = None
    """The run's own folder: this node is its observer."""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigError(f"--threads {self.threads} is not a number of threads", "give 1 or more")
        if self.rounds is not None and self.rounds < 1:
            raise ConfigError(f"--rounds {self.rounds} is not a number of rounds", "give 1 or more, or leave it out")
        if len(self.name) > NAME_CHARS_MAX or not self.name.isprintable():
            raise ConfigError(
                "--name is too long or can't be shown", f"use at most {NAME_CHARS_MAX} printable characters"
            )
        for option, rate in (("--max-up", self.max_up), ("--max-down", self.max_down)):
            if rate is not None and rate < RATE_LEAST_BYTES_S:
                raise ConfigError(
                    f"{option} of {rate} bytes a second is too little to take part",
                    f"give at least {RATE_LEAST_BYTES_S // 1024}KiB, or leave it out",
                )
        for option, value in (("--listen", self.listen), ("--dht", self.dht)):
            _checked(value, option)
        told = [each if _has_port(each) else f"{each}:65535" for each in self.advertise.split(",") if self.advertise]
        for each in told:
            _checked(each, "--advertise")
        if told:
            _check_room_for(told)

    @property
    def observer(self) -> bool:
        return self.run_dir is not None


def read_invite(text: str) -> Invite:
    """Raises ConfigError that names the offending part."""
    try:
        return parse(text)
    except InviteError as error:
        raise ConfigError(str(error), "copy the whole line that the coordinator printed") from error


def read_rate(text: str, option: str) -> int:
    """Bytes a second of words such as 5M, 500K, 1.5MiB/s (bytes) or 20Mbit. Raises ConfigError."""
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{option} {text} is no rate", "write it as 5M or 500K (bytes a second), or as 20Mbit")
    amount, unit = float(found[1]), found[2]
    if unit.endswith("iB"):
        return int(amount * _BINARY[unit[0]])
    if unit.endswith("bit"):
        return int(amount * _FACTORS[unit.removesuffix("bit")] / 8)
    return int(amount * _FACTORS[unit.removesuffix("B")])


def read_size(text: str, option: str) -> int:
    """Bytes of words such as 8G, 500MB or 1.5GiB. Raises ConfigError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found[3] and not (found[2] and found[4])):
        raise ConfigError(f"{option} {text} is no size", "write it as 8GiB, 500M or 2T")
    return int(float(found[1]) * (_BINARY if found[3] else _FACTORS)[found[2]])


def _checked(value: str, option: str) -> None:
    any_port = value.endswith(":0")
    try:
        check_host_port(f"{value[:-2]}:1" if any_port else value)
    except InviteError as error:
        raise ConfigError(
            f"{option} {value}: {error}", "write it as HOST:PORT, with port 0 for any free one"
        ) from error


def _check_room_for(told: list[str]) -> None:
    """Raise ConfigError where the record by which others learn of these addresses would have no room for them."""
    anybody = Identity.generate()
    dht = f"/dns/{told[0].rpartition(':')[0].strip('[]')}/tcp/65535/p2p/{anybody.peer}"
    most = limits.INTEGER
    record = Record(anybody.peer, most, tuple(told), (dht,), epoch=most, round=most, head=bytes(32))
    try:
        seal_record(anybody, anybody.peer, record)
    except WireError as error:
        raise ConfigError(
            f"--advertise: {len(told)} addresses of {sum(map(len, told))} characters are more than others can be told",
            f"give fewer or shorter ones: at most {limits.ADDRESSES}, and all of a node's record, in which the first "
            f"stands twice, takes no more than {limits.RECORD_BYTES} bytes",
        ) from error


def _has_port(value: str) -> bool:
    return value.rpartition(":")[2].isdigit() and ":" in value.rpartition("]")[2]
