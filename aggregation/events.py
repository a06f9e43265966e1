"""What an exchange is told, and what it asks for: the events and effects of `aggregation.exchange`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# -- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowArrived:
    """A chunk of a sender is in the work area, whole, after `admit` let it in."""

    sender: str
    chunk: int


@dataclass(frozen=True, slots=True)
class RowBroken:
    """A chunk that was let in did not come whole; it may come again."""

    sender: str
    chunk: int


@dataclass(frozen=True, slots=True)
class RowChecked:
    """Hash against the commitment, canonical form and norm: `fault` is empty when all hold."""

    sender: str
    chunk: int
    fault: str


@dataclass(frozen=True, slots=True)
class Receipted:
    """A reducer's signed receipt for chunks of mine has come."""

    reducer: str
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Combined:
    """`set_number` is that of the set that was combined, as `CombineChunk` names it."""

    chunk: int
    hash: bytes
    norm_sq: float
    set_number: int = 0


@dataclass(frozen=True, slots=True)
class CombineFailed:
    chunk: int
    reason: str
    set_number: int = 0


@dataclass(frozen=True, slots=True)
class Unable:
    """This member can't take rows in, as a reducer must: it has no room for them."""


@dataclass(frozen=True, slots=True)
class Expired:
    """The time for the exchange is over: say what is missing."""


@dataclass(frozen=True, slots=True)
class Stalled:
    """Nothing has come from these senders for longer than a moving transfer takes: say what of theirs is missing."""

    senders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inquired:
    """The leader asks what of these senders, who are gone, is not here."""

    senders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Redealt:
    """What the leader has changed since the deal, in whole; a lower number than the last one is an old word.

    `weights` are those of all who are still included; `reducers` are each chunk's, in order.
    """

    number: int
    set_number: int
    weights: Mapping[str, float]
    reducers: tuple[tuple[str, ...], ...]


ExchangeEvent = (
    RowArrived
    | RowBroken
    | RowChecked
    | Receipted
    | Combined
    | CombineFailed
    | Unable
    | Expired
    | Stalled
    | Inquired
    | Redealt
)

# -- effects -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendRows:
    """Stream these chunks of my contribution to a reducer; the driver tries again until receipted or expired."""

    reducer: str
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopRows:
    """This reducer needs these chunks no more."""

    reducer: str
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckRow:
    sender: str
    chunk: int


@dataclass(frozen=True, slots=True)
class GiveReceipt:
    sender: str
    chunk: int


@dataclass(frozen=True, slots=True)
class RefuseRow:
    """The row is wrong: tell its sender why, and count it against it."""

    sender: str
    chunk: int
    reason: str


@dataclass(frozen=True, slots=True)
class DropRow:
    """The row counts no more, wherever it is: on its way, being checked, or held."""

    sender: str
    chunk: int


@dataclass(frozen=True, slots=True)
class CombineChunk:
    """Combine the rows of these senders, in this order, with these weights. The rows are kept: the set may shrink."""

    chunk: int
    senders: tuple[str, ...]
    weights: tuple[float, ...]
    set_number: int = 0


@dataclass(frozen=True, slots=True)
class ReportResults:
    set_hash: bytes
    results: tuple[Combined, ...]


@dataclass(frozen=True, slots=True)
class ReportMissing:
    """These rows have not come: a claim, or the answer about the senders that the leader asked about.

    `unable`: this reducer can't take rows in or combine them, and no sender is to blame.
    """

    lacks: tuple[tuple[int, str], ...]  # (chunk, sender)
    asked: tuple[str, ...] = ()
    unable: bool = False


ExchangeEffect = (
    SendRows | StopRows | CheckRow | GiveReceipt | RefuseRow | DropRow | CombineChunk | ReportResults | ReportMissing
)
