"""Frames of what a leader tells a member: records beyond what one message may hold follow in frames of their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from protos import limits
from protos.messages import LeaderMessage, Records, Signed, Welcome
from protos.wire import encode_leader_frame

RECORDS_MOST = limits.MEMBERS
"""Lines may be a few more than a run's members: there are the observer and those who wait for a seat."""


def frames(message: LeaderMessage | Signed, first: Iterable[bytes] = ()) -> list[bytes]:
    """The frames that say it, in order.

    Args:
        first: records that go before others where there are too many for one message.

    Raises WireError for what no bytes may hold.
    """
    if not isinstance(message, Welcome | Records) or len(message.records) <= RECORDS_MOST:
        return [encode_leader_frame(message)]
    there = set(message.records)
    records = tuple(dict.fromkeys((*(raw for raw in first if raw in there), *message.records)))
    parts = [records[start : start + RECORDS_MOST] for start in range(0, len(records), RECORDS_MOST)]
    rest = [Records(part) for part in parts[1:]]
    return [encode_leader_frame(each) for each in (replace(message, records=parts[0]), *rest)]
