"""Errors: one class for each exit code, each message with cause and remedy."""

from __future__ import annotations

import pytest

from node import errors
from node.errors import DiskFull, NodeError, PortTaken, Unreachable


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("NodeError", 1),
        ("ConfigError", 2),
        ("MachineError", 3),
        ("PortTaken", 3),
        ("DiskFull", 3),
        ("Unreachable", 4),
        ("Refused", 5),
        ("LocalStateError", 6),
    ],
)
def test_exit_codes_are_those_that_outsiders_rely_on(name: str, code: int) -> None:
    assert getattr(errors, name).exit_code == code


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NodeError("the sky fell", "hold it up"), "the sky fell; hold it up"),
        (
            PortTaken("127.0.0.1:80", "--dht"),
            "127.0.0.1:80 is in use by another program; choose another port",
        ),
        (DiskFull("the state", "/x", 3 * 2**30, 1023), "the state needs 3.0 GiB in /x, 1023 bytes are free; free some"),
        (DiskFull("the state", "/x", 5 * 2**40, None), "the state needs 5.0 TiB in /x, too few are free; free some"),
        (Unreachable("it", ["a: refused", "b: silent"]), "it could not be reached (a: refused; b: silent); check"),
        (Unreachable("it", []), "it could not be reached (no address is known); check"),
    ],
)
def test_messages_end_in_cause_and_remedy(error: NodeError, text: str) -> None:
    assert str(error).startswith(text)
    assert str(error).endswith(error.remedy)
