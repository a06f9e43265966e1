"""Named parameters and the one flat fp32 vector (D,) that they make; and the digest of that layout.

Tensors of two and more dimensions come first, each from a block boundary on, with zeros in the gaps; then, from the
next boundary, all others without gaps; the end is not padded. Within each kind the order is the given one. Buffers
are not in the vector, running statistics neither: they stay each node's own.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from aggregation.digest import tagged_hash
from aggregation.errors import LayoutError

Floats = NDArray[np.float32]
Parameters = Sequence[tuple[str, Tensor]]

MAX_ENTRIES = 1 << 17
MAX_NAME_CHARS = 512
MAX_DIMS = 8
MAX_VALUES = 1 << 42
MAX_JSON_CHARS = 1 << 25

_TAG = "barnraise.layout"
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What torch.compile, FSDP and activation checkpointing put into names, anywhere; `module`, of DDP, only in front,
since a model may well call a part of its own so."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one parameter lies: values [offset, offset + n_values)."""

    name: str
    shape: tuple[int, ...]
    offset: int
    n_values: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All parameters' places in a vector of `n_values`, in the order of their offsets."""

    entries: tuple[Entry, ...]
    n_values: int
    block: int

    @property
    def digest(self) -> bytes:
        """32 bytes that differ whenever block, names, shapes, order or offsets do."""
        numbers = struct.pack("<QQQ", self.block, self.n_values, len(self.entries))
        parts = [numbers]
        for entry in self.entries:
            parts.append(entry.name.encode())
            parts.append(struct.pack(f"<Q{len(entry.shape)}Q", entry.offset, *entry.shape))
        return tagged_hash(_TAG, *parts)

    def to_json(self) -> str:
        """One JSON document that `from_json` turns into an equal layout."""
        parameters = [[entry.name, list(entry.shape)] for entry in self.entries]
        return json.dumps({"block": self.block, "parameters": parameters}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The layout of a document by `to_json`; raises LayoutError for anything else, whatever it is."""
        if len(text) > MAX_JSON_CHARS:
            raise LayoutError(f"layout of {len(text)} characters, at most {MAX_JSON_CHARS}")
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise LayoutError(f"layout is no JSON: {error}") from None
        match document:
            case {"block": int(block), "parameters": list(parameters)} if len(document) == 2:
                named = [_parameter(item) for item in parameters]
            case _:
                raise LayoutError("layout is not an object of block and parameters")
        layout = layout_of(named, block=block)
        if [entry.name for entry in layout.entries] != [name for name, _ in named]:
            raise LayoutError("parameters are not named and ordered as a layout has them")
        return layout


def layout_of(named_parameters: Iterable[tuple[str, Sequence[int]]], *, block: int) -> Layout:
    """The layout of parameters given by name and shape; names lose what wrappers put into them.

    Raises LayoutError for none, too many, doubled or empty ones.
    """
    if type(block) is not int or block < 1:
        raise LayoutError(f"block {block!r}")
    named = [(plain_name(name), tuple(int(size) for size in shape)) for name, shape in named_parameters]
    _check_named(named)
    entries: list[Entry] = []
    end = 0
    for name, shape in (item for item in named if len(item[1]) >= 2):
        offset = -(-end // block) * block
        entries.append(Entry(name, shape, offset, math.prod(shape)))
        end = offset + math.prod(shape)
    packed = [item for item in named if len(item[1]) < 2]
    if packed:
        end = -(-end // block) * block
    for name, shape in packed:
        entries.append(Entry(name, shape, end, math.prod(shape)))
        end += math.prod(shape)
    if end > MAX_VALUES:
        raise LayoutError(f"{end} values, at most {MAX_VALUES}")
    return Layout(tuple(entries), end, block)


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers of the module put into it."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in ("module", *_WRAPPERS):
        parts = parts[1:]
    return ".".join(part for part in parts if part not in _WRAPPERS)


def trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Name and parameter of everything that is trained, in the module's order: frozen ones out, tied ones once."""
    return [(plain_name(name), parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def flatten_into(parameters: Parameters, layout: Layout, out_D: Floats) -> None:
    """Write the parameters as fp32 to their places and zeros between them; raises LayoutError where they don't fit."""
    out = _vector("out", out_D, layout, writable=True)
    for entry, parameter in _matched(parameters, layout):
        out[entry.offset : entry.offset + entry.n_values] = _host_values(parameter, 0, entry.n_values)
    for start, stop in _gaps(layout):
        out[start:stop] = 0.0


@torch.no_grad()
def load_from(parameters: Parameters, layout: Layout, values_D: Floats) -> None:
    """Copy a flat vector into the parameters, in place, rounding to their precision; raises LayoutError.

    All shapes are compared before the first parameter changes.
    """
    values = _vector("values", values_D, layout, writable=False)
    for entry, parameter in _matched(parameters, layout):
        # A copy of its own, since torch will not look at a read-only mapping.
        own = np.array(values[entry.offset : entry.offset + entry.n_values], np.float32)
        parameter.copy_(torch.from_numpy(own).view(entry.shape))


def delta_into(parameters: Parameters, layout: Layout, anchor_D: Floats, out_P: Floats, *, start: int = 0) -> None:
    """Write anchor minus parameters for the values [start, start + P) of the vector, zeros between the parameters.

    With `start` 0 and an array of the layout's length that is the whole pseudo-gradient; chunk by chunk it never
    stands in memory as a whole. Raises LayoutError where something doesn't fit.
    """
    anchor = _vector("anchor", anchor_D, layout, writable=False)
    out = np.asarray(out_P)
    stop = start + out.size
    if out.dtype != np.float32 or out.ndim != 1 or not out.flags.writeable or not 0 <= start <= stop <= layout.n_values:
        raise LayoutError(f"values [{start}, {stop}) of {layout.n_values} do not go into {out.dtype}{out.shape}")
    out[:] = 0.0
    for entry, parameter in _matched(parameters, layout):
        first, last = max(start, entry.offset), min(stop, entry.offset + entry.n_values)
        if first < last:
            trained = _host_values(parameter, first - entry.offset, last - entry.offset)
            np.subtract(anchor[first:last], trained, out=out[first - start : last - start])


def first_difference(a: Layout, b: Layout) -> str | None:
    """The first thing in which two layouts differ, in words; None where they are equal."""
    if a.block != b.block:
        return f"block {a.block} against {b.block}"
    for mine, other in zip(a.entries, b.entries, strict=False):
        if mine.name != other.name:
            return f"parameter {mine.name} against {other.name}"
        if mine.shape != other.shape:
            return f"{mine.name} of shape {mine.shape} against {other.shape}"
        if mine.offset != other.offset:
            return f"{mine.name} at {mine.offset} against {other.offset}"
    if len(a.entries) != len(b.entries):
        longer, side = (a, "first") if len(a.entries) > len(b.entries) else (b, "second")
        name = longer.entries[min(len(a.entries), len(b.entries))].name
        return f"{name} is only in the {side}"
    return None if a.n_values == b.n_values else f"{a.n_values} values against {b.n_values}"


def _parameter(item: Any) -> tuple[str, list[int]]:
    match item:
        case [str(name), list(shape)] if len(shape) <= MAX_DIMS and all(type(size) is int for size in shape):
            return name, shape
    raise LayoutError(f"no parameter: {str(item)[:80]}")


def _check_named(named: list[tuple[str, tuple[int, ...]]]) -> None:
    if not 1 <= len(named) <= MAX_ENTRIES:
        raise LayoutError(f"{len(named)} parameters, not between 1 and {MAX_ENTRIES}")
    seen: set[str] = set()
    for name, shape in named:
        if not 1 <= len(name) <= MAX_NAME_CHARS or name in seen:
            raise LayoutError(f"parameter name {name[:80]!r} is empty, too long or there twice")
        if len(shape) > MAX_DIMS or any(not 1 <= size <= MAX_VALUES for size in shape):
            raise LayoutError(f"{name[:80]} has shape {shape}")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise LayoutError(f"parameter name {name[:80]!r} is no text") from None
        seen.add(name)


def _matched(parameters: Parameters, layout: Layout) -> Iterator[tuple[Entry, Tensor]]:
    """Entries with their parameters, after a comparison of all names and shapes; raises LayoutError."""
    by_name = {plain_name(name): parameter for name, parameter in parameters}
    if len(by_name) != len(layout.entries):
        raise LayoutError(f"{len(by_name)} parameters for a layout of {len(layout.entries)}")
    for entry in layout.entries:
        parameter = by_name.get(entry.name)
        if parameter is None:
            raise LayoutError(f"no parameter {entry.name}")
        if tuple(parameter.shape) != entry.shape:
            raise LayoutError(f"{entry.name} has shape {tuple(parameter.shape)}, its layout {entry.shape}")
    return ((entry, by_name[entry.name]) for entry in layout.entries)


def _host_values(parameter: Tensor, start: int, stop: int) -> Floats:
    """Values [start, stop) of a parameter as fp32 on the host; a view where they already are."""
    values: Floats = parameter.detach().reshape(-1)[start:stop].to("cpu", torch.float32).numpy()
    return values


def _gaps(layout: Layout) -> Iterator[tuple[int, int]]:
    end = 0
    for entry in layout.entries:
        if entry.offset > end:
            yield end, entry.offset
        end = entry.offset + entry.n_values


def _vector(what: str, values: Floats, layout: Layout, *, writable: bool) -> Floats:
    array = np.asarray(values)
    if array.dtype != np.float32 or array.shape != (layout.n_values,) or (writable and not array.flags.writeable):
        raise LayoutError(f"{what} is {array.dtype}{array.shape}, not fp32 of {layout.n_values} values")
    return array
