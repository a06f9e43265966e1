"""What an agent and its trainer say to each other: commands and reports, and their bytes on a pair of pipes.

A message is a frozen dataclass; on the pipe it is its length (u32, big-endian) and so many bytes of JSON. Decoding is
total and bounded: a message or a LinkError, for a trainer may be dying while it writes. Big vectors never travel here,
only the paths of mapped files do. One pair of pipes is one rank.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, get_type_hints

from protos.messages import Range

BODY_BYTES_MAX = 2**24
HEADER = struct.Struct(">I")
_TEXT_MAX = 2**16
_INT_MAX = 2**63 - 1


class LinkError(ValueError):
    """Bytes on the link that are no message."""


# -- commands: what the agent asks for ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Build the model of a run. The first command; answered by Ready."""

    spec_path: str  # RunSpec as JSON
    data_dir: str  # the folder with the packed shards
    threads: int
    rank: int = 0
    ranks: int = 1
    run: str = ""
    checkpoints: str = ""  # the folder for them; empty: make none


@dataclass(frozen=True, slots=True)
class Load:
    """Replace the parameters by an anchor and forget the progress since the last one. Moments stay unless fresh.

    The file stays mapped until the next Load: it may be replaced or unlinked, but not written to. Where it is gone when
    this is carried out, so is the round: what is asked for before the next Load is left undone.
    """

    theta_path: str
    round: int  # of the commit that this is the state after
    nominal_step: int  # nominal steps of all rounds up to it
    fresh_moments: bool
    anchor: str = ""  # the state's digest, hex: the name by which a checkpoint knows its anchor


@dataclass(frozen=True, slots=True)
class Train:
    """Train on the batches of these ranges, in order, `batch_scale` of them a step, and stop after the last whole step.

    Without a Load since the last Train the steps add up and the local parameters go on. What was used since the Load
    stays used: where these ranges begin with it, training goes on after it; else what is left of the earlier ranges is
    given up. The pieces of all these batches are on disk.
    """

    round: int
    ranges: tuple[Range, ...]
    h: int  # nominal H, for the learning rate
    first_k: int = 0  # the k of the first of them; at least the number of steps made since the Load
    batch_scale: int = 1


@dataclass(frozen=True, slots=True)
class Encode:
    """Stop after the current step and write the encoded pseudo-gradient into an area of the right size.

    Declined, and training goes on, where the round is over: after a Train for a later one, or a Load of its own commit.
    With error feedback, what earlier rounds left over is read from the residual, if there is one, and what this round
    leaves over is written into the next one; both are `shared.map_residual` files.
    """

    round: int
    codes_path: str
    residual_path: str = ""  # empty: nothing is left over
    next_path: str = ""  # empty: no error feedback


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Validation loss of these outer parameters. Replaces the parameters: the next training needs a Load."""

    round: int
    theta_path: str


@dataclass(frozen=True, slots=True)
class Amend:
    """The run's settings have changed, as far as they can while a run goes on: work by these from the next step on."""

    spec_path: str  # RunSpec as JSON


@dataclass(frozen=True, slots=True)
class Pause:
    """Make no step until Resume."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on."""


@dataclass(frozen=True, slots=True)
class Quit:
    """End the process."""


Command = Start | Load | Train | Encode | Evaluate | Amend | Pause | Resume | Quit


# -- reports: what the trainer says ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is built and measured: its layout as it came out here, which should be the run's."""

    n_values: int
    layout_digest: str  # hex
    tokens_per_s: float
    moments_round: int = 0  # the round that the moments of a checkpoint are of, which a Load would take; 0: none
    peak_flops: float = 0.0  # what its device can do at most at the precision that it trains in, a second; 0: not known


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the training since the anchor is: at the beginning and the end of a Train, else twice a second."""

    round: int
    step: int  # steps since the anchor: batches used, by `batch_scale`
    n_steps: int  # the same at the end of this Train
    tokens: int  # of the used batches
    loss: float  # mean over the last steps; 0 while unknown
    tokens_per_s: float  # 0 while unknown
    time_left_s: float  # 0 at the end, and while unknown
    skipped_steps: int
    paused: bool


@dataclass(frozen=True, slots=True)
class Written:
    """While it encodes: the first chunks lie in the area of codes, and may be read."""

    round: int
    n_chunks: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """The pseudo-gradient since the anchor lies in the area of codes."""

    round: int
    steps: int  # optimiser steps that it is the sum of
    tokens: int  # of the used batches
    sum_lr: float
    inner_loss: float  # mean over the steps; 0 without any
    used: tuple[Range, ...]  # since the anchor: of each Train's ranges a prefix of whole batches
    skipped_steps: int  # batches that gave a loss or a gradient that is not finite
    encode_s: float  # from the parameters to the area


@dataclass(frozen=True, slots=True)
class Evaluating:
    """While it evaluates: so far it has come. Says that it is alive."""

    round: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Declined:
    """In place of an Encoded or Evaluated: what was asked for comes too late, and nothing has changed."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Mean cross entropy for each predicted token of the validation shard, in nats."""

    round: int
    val_loss: float
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint is on disk, or could not be written; training goes on either way."""

    round: int
    step: int  # batches used since the anchor
    save_s: float
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Remark:
    """Something that the contributor should read."""

    text: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The trainer can't go on, and ends. The last report."""

    reason: str


Report = Ready | Progress | Written | Encoded | Evaluating | Evaluated | Declined | Saved | Remark | Failed


class Trainer(Protocol):
    """What the agent's driver needs of a trainer, wherever that runs."""

    async def start(self) -> None:
        """Bring it up; then the first command is Start. May be called again after it has ended, for a fresh one."""

    def send(self, command: Command) -> None:
        """Hand over a command; never blocks. One to a trainer that has ended is dropped: its Failed is on the way."""

    def reports(self) -> AsyncIterator[Report]:
        """Reports in order, for one reader. Ends after a Failed, or after the end that `stop` or Quit asked for."""

    async def stop(self) -> None:
        """End it, gently if it listens and by force if not; afterwards nothing of it is left. Safe to repeat."""


# -- bytes -------------------------------------------------------------------------------------------------------


def encode(message: Command | Report) -> bytes:
    """The message with its length in front. A number that is not finite is a fault of ours: ValueError."""
    values: dict[str, Any] = {"kind": type(message).__name__}
    for field in fields(message):
        value = getattr(message, field.name)
        if field.name in _RANGE_FIELDS:
            value = [[span.start, span.count] for span in value]
        values[field.name] = value
    body = json.dumps(values, allow_nan=False, separators=(",", ":")).encode()
    if len(body) > BODY_BYTES_MAX:
        raise ValueError(f"a message of {len(body)} bytes exceeds {BODY_BYTES_MAX}")
    return HEADER.pack(len(body)) + body


def body_bytes(header: bytes) -> int:
    """Length of the body that follows these four bytes; raises LinkError before memory is spent."""
    if len(header) != HEADER.size:
        raise LinkError(f"a length has {HEADER.size} bytes, not {len(header)}")
    (n_bytes,) = HEADER.unpack(header)
    if n_bytes > BODY_BYTES_MAX:
        raise LinkError(f"a message of {n_bytes} bytes exceeds {BODY_BYTES_MAX}")
    return int(n_bytes)


def decode_command(body: bytes) -> Command:
    """The command that these bytes are; raises LinkError."""
    message: Command = _decode(body, _COMMANDS)
    return message


def decode_report(body: bytes) -> Report:
    """The report that these bytes are; raises LinkError."""
    message: Report = _decode(body, _REPORTS)
    return message


def _decode(body: bytes, kinds: Mapping[str, type[Any]]) -> Any:
    try:
        values = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise LinkError(f"no JSON: {error}") from error
    if not isinstance(values, dict):
        raise LinkError("a message is an object")
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise LinkError(f"no message is called {str(kind)[:40]!r}")
    readers = _READERS[kind]
    if values.keys() != readers.keys():
        raise LinkError(f"{kind} has the fields {', '.join(readers)}")
    try:
        return kinds[kind](**{name: read(values[name]) for name, read in readers.items()})
    except LinkError as error:
        raise LinkError(f"{kind}: {error}") from error


def _no_constant(name: str) -> float:
    raise LinkError(f"{name} is no number")


def _int(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _INT_MAX:
        raise LinkError("a count is a whole number, not negative")
    return value


def _float(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(number := float(value)):
        raise LinkError("a figure is a finite number")
    return number


def _str(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _TEXT_MAX:
        raise LinkError(f"a text has at most {_TEXT_MAX} characters")
    return value


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise LinkError("a flag is true or false")
    return value


def _ranges(value: Any) -> tuple[Range, ...]:
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise LinkError("ranges are pairs of start and count")
    return tuple(Range(_int(start), _int(count)) for start, count in value)


_READ_BY_TYPE: dict[Any, Callable[[Any], Any]] = {
    int: _int,
    float: _float,
    str: _str,
    bool: _bool,
    tuple[Range, ...]: _ranges,
}
_RANGE_FIELDS = frozenset({"ranges", "used"})
_COMMANDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Start, Load, Train, Encode, Evaluate, Amend, Pause, Resume, Quit)
}
_REPORTS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (Ready, Progress, Written, Encoded, Evaluating, Evaluated, Declined, Saved, Remark, Failed)
}
_READERS: dict[str, dict[str, Callable[[Any], Any]]] = {
    name: {field: _READ_BY_TYPE[hint] for field, hint in get_type_hints(kind).items()}
    for name, kind in {**_COMMANDS, **_REPORTS}.items()
}
