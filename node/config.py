"""What a contributor asks for on the command line, validated once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from node.errors import ConfigError
from protos.invite import Invite, InviteError, check_host_port, parse

ANY_PORT = "0.0.0.0:0"
NAME_CHARS_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """A node's own settings; what the run fixes comes with its RunSpec."""

    invite: Invite
    data: Path
    threads: int
    listen: str = ANY_PORT
    dht: str = ANY_PORT
    advertise: str = ""
    rounds: int | None = None
    name: str = ""
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
        for option, value in (("--listen", self.listen), ("--dht", self.dht)):
            _checked(value, option)
        if self.advertise:
            _checked(self.advertise if _has_port(self.advertise) else f"{self.advertise}:1", "--advertise")

    @property
    def observer(self) -> bool:
        return self.run_dir is not None


def read_invite(text: str) -> Invite:
    """Raises ConfigError that names the offending part."""
    try:
        return parse(text)
    except InviteError as error:
        raise ConfigError(str(error), "copy the whole line that the coordinator printed") from error


def _checked(value: str, option: str) -> None:
    any_port = value.endswith(":0")
    try:
        check_host_port(f"{value[:-2]}:1" if any_port else value)
    except InviteError as error:
        raise ConfigError(
            f"{option} {value}: {error}", "write it as HOST:PORT, with port 0 for any free one"
        ) from error


def _has_port(value: str) -> bool:
    return value.rpartition(":")[2].isdigit() and ":" in value.rpartition("]")[2]
