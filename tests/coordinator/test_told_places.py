"""Where others are told to look: checked where it is read, and what another one has written is passed over."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from coordinator import operating
from coordinator.app import OUTSIDE, serve
from coordinator.errors import UsageError
from coordinator.folder import RunFolder, read_founded, read_identity
from coordinator.journal import Journal
from coordinator.places import ServeOptions, advertised, find_places
from coordinator.site import Whereabouts
from coordinator.standby import Here, Others
from protos import limits
from protos.invite import Invite, parse
from tests.coordinator.made import RUN, FakeClock, make_run

HERE = Here("first:1", "first:2", 1)
BAD = ("[https://coord2.example.org]:8470", "a b:1", "second:0", "second", "", "[::1%eth0]:1", "second:1\t")
NO_HOSTS = (
    "https://coord2.example.org",
    "a b",
    "barn.example:8470",
    "barn.example/x",
    "-",
    "[",
    "a,b",
)


@pytest.mark.parametrize("text", NO_HOSTS)
def test_a_host_that_nobody_can_be_told_is_a_mistake_where_it_is_read(tmp_path: Path, text: str) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(UsageError, match="--advertise") as caught:
        find_places(folder, ServeOptions(tmp_path, advertise=text))
    assert caught.value.exit_code == 2
    folder.ports.write_text(json.dumps({"http": "0.0.0.0:8470", "advertise": text}))
    with pytest.raises(UsageError, match="--advertise"):
        find_places(folder, ServeOptions(tmp_path))
    assert find_places(folder, ServeOptions(tmp_path, advertise="barn.example")).public_hosts == ("barn.example",)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("barn.example", "barn.example"),
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("my_host", "my_host"),
    ],
)
def test_a_name_or_an_address_is_one(text: str, host: str) -> None:
    assert advertised(text) == host


def test_a_listener_that_others_cannot_be_told_needs_a_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--advertise HOST"):
        find_places(RunFolder(tmp_path), ServeOptions(tmp_path, http="[fe80::1%eth0]:8470"))
    places = find_places(RunFolder(tmp_path), ServeOptions(tmp_path, http="[fe80::1%eth0]:8470", advertise="barn"))
    assert places.public_host == "barn"


def test_serving_says_so_before_anything_begins(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    options = ServeOptions(
        folder.path, "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0", advertise="https://coord2.example.org"
    )
    with pytest.raises(UsageError, match="--advertise"):
        asyncio.run(serve(options, print, print, OUTSIDE))
    assert not folder.ports.exists()


@dataclass
class Told:
    others: tuple[str, ...] = ()


@pytest.mark.parametrize("bad", BAD)
def test_rows_that_are_no_addresses_are_passed_over(bad: str) -> None:
    whereabouts = Told()
    said: list[str] = []
    met = [(bad, "second:2"), ("third:1", bad), ("fourth:1", "fourth:2"), (HERE.http, HERE.line)]
    others = Others(HERE, HERE.line, cast(Whereabouts, whereabouts), met[:2])
    assert (others.http, whereabouts.others) == ((), ())
    others.learn(met, RUN.peer, said.append)
    assert (others.http, whereabouts.others) == (("fourth:1",), ("fourth:2",))
    assert str(Invite(RUN.peer, (HERE.http, "fourth:1"))) in said[0]


def test_many_rows_leave_room_for_ours() -> None:
    whereabouts = Told()
    met = [*[(bad, bad) for bad in BAD * limits.ADDRESSES], *[(f"h{n}:1", f"h{n}:2") for n in range(100)]]
    others = Others(HERE, HERE.line, cast(Whereabouts, whereabouts), met)
    assert len(Invite(RUN.peer, (HERE.http, *others.http)).hosts) == limits.ADDRESSES


def test_the_invite_command_passes_them_over_too(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    founded = read_founded(folder)
    journal = Journal.open(folder.journal, founded.run)
    journal.begin_term("another one")
    assert journal.lead is not None
    for bad in BAD:
        journal.lead.meet(bad, "second:2")
    journal.lead.meet("second:1", "second:2")
    journal.close()
    folder.ports.write_text(json.dumps({"http": "0.0.0.0:8470", "advertise": "barn.example"}))
    text = asyncio.run(operating.invite(folder.path, uses=1, expires_s=60.0))
    assert parse(text).hosts == ("barn.example:8470", "second:1")
    folder.ports.write_text(json.dumps({"http": "0.0.0.0:8470", "advertise": "https://barn.example"}))
    with pytest.raises(UsageError, match="--advertise"):
        asyncio.run(operating.invite(folder.path, uses=1, expires_s=60.0))


def test_the_signed_addresses_can_be_made_of_whatever_was_written(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    founded, identity = read_founded(folder), read_identity(folder.keys / "coordinator.pem")
    whereabouts = Whereabouts(founded, identity, ("first:2",), FakeClock(at=1.0))
    Others(HERE, HERE.line, whereabouts, [(f"h{n}:1", bad) for n, bad in enumerate(("a b\tc", "x" * 10_000))])
    assert whereabouts.others == ()
    assert whereabouts.envelope(None, None)
