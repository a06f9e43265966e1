"""Addresses of others outlive the process, where their owners signed them; a damaged file teaches nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from node.addressbook import AddressBook
from tests.node.test_whereabouts import OTHER, THIRD, made, record, relayed


class Enough(Exception):
    """The book has had its turn."""


def kept(path: Path, *envelopes: bytes) -> None:
    """An earlier process has learnt these."""

    async def once(_: float) -> None:
        raise Enough

    async def main() -> None:
        whereabouts, _ = made()
        whereabouts.learn(envelopes)
        with pytest.raises(Enough):
            await AddressBook(path, whereabouts).run(sleep=once)

    asyncio.run(main())


def read(path: Path) -> list[tuple[str, ...]]:
    async def main() -> list[tuple[str, ...]]:
        whereabouts, _ = made()
        await AddressBook(path, whereabouts).load()
        return [each.grpc for each in whereabouts.all()]

    return asyncio.run(main())


def test_what_was_learnt_is_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "addresses.bin"
    assert read(path) == []
    one, two = relayed(record()), relayed(record(THIRD, grpc=("b:2",)), by=THIRD)
    kept(path, *one, *two, *relayed(record(sequence=2, grpc=("c:3",))))
    assert sorted(read(path)) == [("b:2",), ("c:3",)]


def test_who_only_dials_out_and_what_is_forged_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "addresses.bin"
    kept(path, *relayed(record(grpc=())), b"forged")
    assert read(path) == []


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x0a\x03abc"])
def test_a_damaged_file_teaches_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "addresses.bin"
    path.write_bytes(content)
    assert read(path) == []
    kept(path, *relayed(record(OTHER)))
    assert read(path) == [("a:1",)]
