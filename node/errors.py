"""What can go wrong for a contributor, one class for each exit code; every message ends in cause and remedy.

NodeError              1   a fault of ours
├── ConfigError        2   wrong words on the command line, in a config file or in an invite
├── MachineError       3   this machine can't do it as asked
│   ├── PortTaken          another program listens there
│   └── DiskFull           too little room for what is needed
├── Unreachable        4   nobody could be reached; worth retrying
├── LeaderAway         4   who leads the run has been away for too long
├── Refused            5   the run refused us; retrying won't help
└── LocalStateError    6   local state is damaged or in use by another process
"""

from __future__ import annotations

from collections.abc import Sequence

KILLED = 130
"""Ended at once, on a second signal."""
NODE_JS_EXIT_CODE = 64
"""Called like Node.js, whose command has our name."""


class NodeError(Exception):
    """Args: what happened and why; what the contributor can do about it."""

    exit_code = 1

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(f"{cause}; {remedy}")
        self.cause = cause
        self.remedy = remedy


class ConfigError(NodeError):
    exit_code = 2


class MachineError(NodeError):
    exit_code = 3


class PortTaken(MachineError):
    """Args: HOST:PORT; the option that chose it."""

    def __init__(self, address: str, option: str) -> None:
        super().__init__(
            f"{address} is in use by another program",
            f"choose another port with {option}, or port 0 for any free one",
        )


class DiskFull(MachineError):
    """Args: what needs the room; the folder; bytes needed and bytes there (None: the file system did not say)."""

    def __init__(self, what: str, folder: str, needed_bytes: int, free_bytes: int | None) -> None:
        free = "too few are free" if free_bytes is None else f"{_size(free_bytes)} are free"
        super().__init__(
            f"{what} needs {_size(needed_bytes)} in {folder}, {free}",
            "free some space or choose another folder with --data",
        )


class Unreachable(NodeError):
    """Args: what was looked for; one line for each address that was tried."""

    exit_code = 4

    def __init__(self, what: str, tried: Sequence[str], remedy: str = "check the network, and try again later") -> None:
        super().__init__(f"{what} could not be reached ({'; '.join(tried) or 'no address is known'})", remedy)
        self.tried = tuple(tried)


class LeaderAway(NodeError):
    exit_code = 4


class Refused(NodeError):
    exit_code = 5


class LocalStateError(NodeError):
    exit_code = 6


def _size(n_bytes: int) -> str:
    amount = float(n_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
