"""A contributor's settings: refused with the option's name and what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from node.config import DATA_CACHE_BYTES, NodeOptions, read_invite, read_rate, read_size
from node.errors import ConfigError
from node.record import OwnRecord, advertised, advertised_hosts
from protos import limits
from protos.invite import Invite
from protos.signing import Identity

ME = Identity.from_private_bytes(bytes(32))
RUN = ME.peer


def options(**changes: Any) -> NodeOptions:
    return NodeOptions(**{"invite": Invite(RUN, ("localhost:1",)), "data": Path("here"), "threads": 1, **changes})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rounds": 1},
        {"max_up": 65_536, "max_down": None},
        {"max_down": 5_000_000},
        {"name": "a" * 32},
        {"listen": "0.0.0.0:0"},
        {"listen": "[::]:8471"},
        {"advertise": "node.example"},
        {"advertise": "node.example:1"},
        {"advertise": "[2001:db8::1]:1"},
        {"dht": "192.0.2.1:65535"},
    ],
)
def test_what_makes_sense_is_taken(settings: dict[str, Any]) -> None:
    made = options(**settings)
    assert {key: getattr(made, key) for key in settings} == settings
    assert not made.observer
    assert options(run_dir=Path("run")).observer


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"threads": 0}, "--threads"),
        ({"rounds": 0}, "--rounds"),
        ({"max_up": 65_535}, "--max-up"),
        ({"max_down": 0}, "--max-down"),
        ({"rounds": -3}, "--rounds"),
        ({"name": "a" * 33}, "--name"),
        ({"name": "a\nb"}, "--name"),
        ({"listen": "8471"}, "--listen"),
        ({"listen": ":1"}, "--listen"),
        ({"listen": "here:65536"}, "--listen"),
        ({"listen": "here:-1"}, "--listen"),
        ({"dht": "unix:socket"}, "--dht"),
        ({"dht": "two words:1"}, "--dht"),
        ({"advertise": "here:port"}, "--advertise"),
        ({"advertise": "a/b"}, "--advertise"),
    ],
)
def test_what_does_not_is_refused_by_its_option(settings: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError, match=option) as caught:
        options(**settings)
    assert caught.value.remedy


def names(n: int, n_chars: int) -> str:
    return ",".join(f"{i:02}.{'a' * (n_chars - 3)}" for i in range(n))


@pytest.mark.parametrize(("n", "n_chars"), [(17, 8), (16, 60), (4, 63), (1, 63)])
def test_no_more_names_are_let_in_than_others_can_be_told(n: int, n_chars: int) -> None:
    """Said at the start, and not at the first hello, for which the record is made that holds them."""
    if n >= 16:
        with pytest.raises(ConfigError, match=r"--advertise: .* at most 16, .* 1024 bytes"):
            options(advertise=names(n, n_chars))
        return
    given = options(advertise=names(n, n_chars))
    addresses, dht = advertised(given, 65535), f"/dns/{advertised_hosts(given)[0]}/tcp/65535/p2p/{RUN}"
    record = OwnRecord(ME, RUN, addresses, dht=lambda: (dht,), held=lambda: None, run_time_s=lambda: 1e9)
    assert len(record.sealed()) <= limits.RECORD_BYTES


def test_of_long_names_as_many_are_let_in_as_fit() -> None:
    fit = [n for n in range(1, 17) if _fits(names(n, 60))]
    assert fit == list(range(1, fit[-1] + 1))
    assert 5 < fit[-1] < 16


def _fits(advertise: str) -> bool:
    try:
        options(advertise=advertise)
    except ConfigError:
        return False
    return True


def test_an_invite_is_read_or_refused_with_a_remedy() -> None:
    assert read_invite(f"barnraise://{RUN}@localhost:1") == Invite(RUN, ("localhost:1",))
    with pytest.raises(ConfigError, match="copy the whole line"):
        read_invite("barnraise://nobody@localhost:1")


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("5M", 5_000_000),
        ("500K", 500_000),
        ("500k", 500_000),
        ("2G", 2_000_000_000),
        ("1.5MB", 1_500_000),
        ("1.5MiB/s", 1_572_864),
        ("20Mbit", 2_500_000),
        ("20 Mbit/s", 2_500_000),
        ("20Mbitps", 2_500_000),
        ("8000bit", 1000),
        ("1234", 1234),
        ("1234B", 1234),
        (" 64KiB ", 65_536),
    ],
)
def test_a_rate_is_read_as_bytes_a_second(text: str, n_bytes: int) -> None:
    assert read_rate(text, "--max-up") == n_bytes


@pytest.mark.parametrize(
    "text", ["fast", "-5M", "5 M M", "5m", "20Mb", "5MBit", "1e6", "", "M", "1.M", "9" * 13, "inf"]
)
def test_what_is_no_rate_is_refused_with_examples(text: str) -> None:
    """`m` and `Mb` too: one might be milli, the other a bit or a byte."""
    with pytest.raises(ConfigError, match="--max-down") as caught:
        read_rate(text, "--max-down")
    assert "20Mbit" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("0", 0),
        ("8GiB", DATA_CACHE_BYTES),
        ("500M", 500_000_000),
        ("500 MB", 500_000_000),
        ("1.5TiB", 3 * 2**39),
        ("64k", 64_000),
    ],
)
def test_sizes_are_read(text: str, n_bytes: int) -> None:
    assert read_size(text, "--data-cache") == n_bytes


@pytest.mark.parametrize("text", ["", "much", "-1", "8iB", "8Gi", "8iG", "1e9", "8Gbit", "9" * 30])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--data-cache .* is no size"):
        read_size(text, "--data-cache")
