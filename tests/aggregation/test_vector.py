"""Parameters to one flat vector and back, and the layout that all must share."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from aggregation import vector
from aggregation.errors import LayoutError
from aggregation.vector import Layout, first_difference, layout_of


class Net(nn.Module):
    """Two matrices, one tied to the second; vectors, a scalar; a frozen part and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.inner = nn.Linear(4, 6)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.register_buffer("running", torch.ones(7))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def layout(module: nn.Module, block: int = 16) -> Layout:
    return layout_of([(name, each.shape) for name, each in vector.trainable(module)], block=block)


def test_frozen_are_out_tied_are_once_and_buffers_are_not_there() -> None:
    names = [name for name, _ in vector.trainable(net())]
    assert names == ["gain", "embed.weight", "norm.weight", "norm.bias", "inner.weight", "inner.bias"]


def test_matrices_start_on_blocks_and_the_rest_is_packed_behind_them() -> None:
    places = [(entry.name, entry.offset, entry.n_values) for entry in layout(net()).entries]
    assert places == [
        ("embed.weight", 0, 20),
        ("inner.weight", 32, 24),
        ("gain", 64, 1),
        ("norm.weight", 65, 4),
        ("norm.bias", 69, 4),
        ("inner.bias", 73, 6),
    ]
    assert layout(net()).n_values == 79


def test_a_vector_of_matrices_or_of_vectors_alone() -> None:
    assert layout_of([("a", (3, 5)), ("b", (2, 8))], block=16).n_values == 32
    assert layout_of([("a", (3,)), ("b", ())], block=16).n_values == 4


def test_there_and_back_is_exact_and_gaps_are_zero() -> None:
    one, other = net(1), net(2)
    places = layout(one)
    flat = np.full(places.n_values, np.nan, np.float32)
    vector.flatten_into(vector.trainable(one), places, flat)
    assert flat[64] == 2.0
    assert (flat[20:32] == 0).all()
    assert (flat[56:64] == 0).all()
    flat.setflags(write=False)  # as a read-only mapping is
    vector.load_from(vector.trainable(other), places, flat)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs) == (mine.requires_grad)
    assert other.head.weight is other.embed.weight


def test_a_delta_is_before_minus_after_in_any_pieces() -> None:
    before, after = net(1), net(2)
    places = layout(before)
    anchor = np.empty(places.n_values, np.float32)
    trained = np.empty(places.n_values, np.float32)
    vector.flatten_into(vector.trainable(before), places, anchor)
    vector.flatten_into(vector.trainable(after), places, trained)
    whole = np.full(places.n_values, np.nan, np.float32)
    vector.delta_into(vector.trainable(after), places, anchor, whole)
    assert whole.tobytes() == (anchor - trained).tobytes()
    for size in (1, 7, 32):
        for start in range(0, places.n_values, size):
            piece = np.full(min(size, places.n_values - start), np.nan, np.float32)
            vector.delta_into(vector.trainable(after), places, anchor, piece, start=start)
            assert piece.tobytes() == whole[start : start + size].tobytes()


def test_other_precisions_are_widened_out_and_rounded_in() -> None:
    half = [("w", nn.Parameter(torch.full((2, 8), 1.0, dtype=torch.bfloat16)))]
    places = layout_of([("w", (2, 8))], block=16)
    flat = np.zeros(16, np.float32)
    vector.flatten_into(half, places, flat)
    assert (flat == 1).all()
    vector.load_from(half, places, np.full(16, 1.001, np.float32))
    assert (half[0][1] == 1.0).all()


def test_strided_parameters_are_read_in_row_order() -> None:
    values = torch.arange(32.0).view(4, 8)
    flat = np.zeros(32, np.float32)
    vector.flatten_into([("w", values.t())], layout_of([("w", (8, 4))], block=16), flat)
    assert flat.tolist() == values.t().reshape(-1).tolist()


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("_orig_mod.a.weight", "a.weight"),
        ("module.a.weight", "a.weight"),
        ("module._orig_mod.a.weight", "a.weight"),
        ("_orig_mod.module.a.weight", "a.weight"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.weight", "layers.0.weight"),
        ("layers.0._orig_mod.weight", "layers.0.weight"),
        ("layers.0._checkpoint_wrapped_module.weight", "layers.0.weight"),
        ("a.module.weight", "a.module.weight"),
        ("module", "module"),
    ],
)
def test_names_lose_their_wrappers(wrapped: str, plain: str) -> None:
    assert vector.plain_name(wrapped) == plain
    assert layout_of([(wrapped, (4,))], block=16) == layout_of([(plain, (4,))], block=16)


def test_a_compiled_module_has_the_same_layout() -> None:
    compiled = torch.compile(net(), backend="eager")
    assert isinstance(compiled, nn.Module)
    assert layout(compiled) == layout(net())


def test_the_digest_tells_layouts_apart() -> None:
    base = [("a", (4, 8)), ("b", (8, 4)), ("c", (4,))]
    variants = [
        layout_of(base, block=16),
        layout_of(base, block=32),
        layout_of(base[::-1], block=16),
        layout_of(base[:2], block=16),
        layout_of([("a", (8, 4)), *base[1:]], block=16),
        layout_of([("x", (4, 8)), *base[1:]], block=16),
        layout_of([*base[:2], ("c", (4, 1))], block=16),
    ]
    assert len({each.digest for each in variants}) == len(variants)
    assert layout_of(base, block=16).digest == variants[0].digest
    assert layout_of(base, block=16).digest.hex() == (
        "8403bdb1f84ac8555d40fe22e2ee3d8cf46c4fedf33861452466d9e6811c2efb"
    )


def test_json_there_and_back() -> None:
    places = layout(net())
    assert Layout.from_json(places.to_json()) == places
    assert Layout.from_json(places.to_json()).digest == places.digest


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "[]",
        "{}",
        "[" * 100_000,
        '{"block":16,"parameters":[]}',
        '{"block":16,"parameters":{}}',
        '{"block":true,"parameters":[["a",[2]]]}',
        '{"block":0,"parameters":[["a",[2]]]}',
        '{"block":16,"parameters":[["a",[2]]],"more":1}',
        '{"block":16,"parameters":[["a"]]}',
        '{"block":16,"parameters":[["a",[0]]]}',
        '{"block":16,"parameters":[["a",[-1]]]}',
        '{"block":16,"parameters":[["a",[true]]]}',
        '{"block":16,"parameters":[["a",[1.5]]]}',
        '{"block":16,"parameters":[["a",[1,1,1,1,1,1,1,1,1]]]}',
        '{"block":16,"parameters":[["a",[4398046511104,2]]]}',
        '{"block":16,"parameters":[["",[2]]]}',
        '{"block":16,"parameters":[["a",[2]],["a",[3]]]}',
        '{"block":16,"parameters":[["a",[2]],["b",[3,3]]]}',
        '{"block":16,"parameters":[["module.a",[2]]]}',
        '{"block":16,"parameters":[["\\ud800",[2]]]}',
        json.dumps({"block": 16, "parameters": [["a" * 600, [2]]]}),
    ],
)
def test_json_of_anything_else_is_refused(text: str) -> None:
    with pytest.raises(LayoutError):
        Layout.from_json(text)


def test_the_first_difference_is_named() -> None:
    base = layout_of([("a", (4, 8)), ("b", (4,))], block=16)
    for other, words in (
        (layout_of([("a", (4, 8)), ("b", (4,))], block=16), None),
        (layout_of([("a", (4, 8)), ("b", (4,))], block=32), "block 16 against 32"),
        (layout_of([("a", (4, 8)), ("c", (4,))], block=16), "parameter b against c"),
        (layout_of([("a", (8, 4)), ("b", (4,))], block=16), "a of shape (4, 8) against (8, 4)"),
        (layout_of([("a", (4, 8))], block=16), "b is only in the first"),
        (layout_of([("a", (4, 8)), ("b", (4,)), ("c", (1,))], block=16), "c is only in the second"),
    ):
        assert first_difference(base, other) == words


def test_what_does_not_fit_changes_nothing() -> None:
    module = net()
    places = layout(module)
    parameters = vector.trainable(module)
    flat = np.zeros(places.n_values, np.float32)
    wrong_shape = [*parameters[:-1], (parameters[-1][0], nn.Parameter(torch.zeros(5)))]
    wrong_name = [*parameters[:-1], ("else", parameters[-1][1])]
    for bad in (parameters[:-1], wrong_shape, wrong_name, [*parameters, ("more", torch.zeros(1))]):
        with pytest.raises(LayoutError):
            vector.flatten_into(bad, places, flat)
        with pytest.raises(LayoutError):
            vector.load_from(bad, places, flat)
    assert module.gain.item() == 2.0
    unfit: list[Any] = [flat[:-1], flat.astype(np.float64), flat.reshape(1, -1)]
    for out in unfit:
        with pytest.raises(LayoutError):
            vector.flatten_into(parameters, places, out)
    with pytest.raises(LayoutError):
        vector.delta_into(parameters, places, flat, np.zeros(10, np.float32), start=places.n_values - 9)
    with pytest.raises(LayoutError):
        vector.delta_into(parameters, places, flat[:-1], flat)
