"""What stops a command: one tree, each branch with its exit code, each message with cause and remedy.

    CoordinatorError            1  a fault of ours
    ├── UsageError              2  wrong words on the command line, in a file or in an invite
    ├── MachineError            3  this machine can't do it as asked: memory, disk, folder, port, a dependency
    ├── UnreachableError        4  nobody could be reached; worth retrying
    ├── RefusedError            5  refused; retrying won't help
    │   └── OrderRefused              an order that the run can't obey
    └── StateError              6  local state is damaged or in use by another process

Numbers are never reused. 0 is done, 64 is taken by the node.
"""

from __future__ import annotations

KILLED = 130
"""Ended at once, on a second signal."""


class CoordinatorError(Exception):
    """Ends a command; `str` is one line: the cause, then what to do about it."""

    exit_code = 1

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(f"{cause}; {remedy}" if remedy else cause)
        self.cause = cause
        self.remedy = remedy


class UsageError(CoordinatorError):
    exit_code = 2


class MachineError(CoordinatorError):
    exit_code = 3


class UnreachableError(CoordinatorError):
    exit_code = 4


class RefusedError(CoordinatorError):
    exit_code = 5


class OrderRefused(RefusedError):
    pass


class StateError(CoordinatorError):
    exit_code = 6


def error_for_exit_code(code: int, cause: str, remedy: str = "") -> CoordinatorError:
    """The error that stands for another process's exit code; its own fault where the code is not one of ours."""
    for kind in (UsageError, MachineError, UnreachableError, RefusedError, StateError):
        if kind.exit_code == code:
            return kind(cause, remedy)
    return CoordinatorError(cause, remedy)
