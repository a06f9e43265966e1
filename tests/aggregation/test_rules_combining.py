"""Frames in, one frame out: byte for byte what plain Python makes of them, by any number of threads in any order."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregation import codec, rules
from aggregation.errors import CodecError, RuleError
from tests.aggregation import rule_twins, twins

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "aggregation_cases.json").read_text())["frames"]
FLOATS = np.float32
ALL_RULES = [
    *rules.names(),
    "arc+mean",
    "norm_clip+centered_clip",
    "nnm+default",
    "arc+nnm+bulyan",
    "norm_clip+nnm+krum",
]
BLOCK = 64
"""One that every codec can have."""


def vectors(n: int, n_values: int, seed: int = 0) -> np.ndarray:
    """Rows around a common one, the last a liar's."""
    random = np.random.default_rng(seed)
    out = random.standard_normal(n_values) + random.standard_normal((n, n_values)) * np.linspace(0.3, 1.5, n)[:, None]
    out[-1] *= -4
    return (out * 1e-3).astype(FLOATS)


def encoded(updates: np.ndarray, name: str = "int8", block: int = BLOCK) -> list[bytes]:
    return [codec.encode(name, row, block=block) for row in updates]


def combined(rule: str, frames: Sequence[Any], **more: Any) -> tuple[bytes, float]:
    options = {"weights_N": [1] * len(frames), "f": 0, "codec": "int8", "block": BLOCK, **more}
    return rules.combine(rule, frames, **options)


def twin(
    rule: str, frames: list[bytes], weights: list[int], f: int, previous: bytes | None, scale: float, block: int
) -> bytes:
    """An int8 chunk's result, without a line of the code under test but two kernels uncompiled."""
    rows = np.stack([twins.decode_int8(frame) for frame in frames])
    gram = rule_twins.gram_of_frames(frames, [1.0] * len(frames))
    if rules.is_centred(rule):
        if previous is None:
            rows = np.vstack([rows, twins.median(rows)])
            gram = rule_twins.gram_of_values(rows, block)
        else:
            rows = np.vstack([rows, FLOATS(scale) * twins.decode_int8(previous)])
            gram = rule_twins.gram_of_frames([*frames, previous], [1.0] * len(frames) + [scale])
    fp32 = [float(FLOATS(weight)) if rules.uses_weights(rule) else 1.0 for weight in weights]
    given = rule_twins.Given(rows, gram, fp32, f, rules.is_centred(rule))
    return twins.encode_int8(rule_twins.apply(rule, given), block)


@pytest.mark.parametrize("rule", ALL_RULES)
@pytest.mark.parametrize(("n", "f", "n_values", "block"), [(7, 1, 200, 64), (12, 2, 130, 32), (3, 0, 33, 16)])
def test_every_rule_equals_its_twin_byte_for_byte(rule: str, n: int, f: int, n_values: int, block: int) -> None:
    frames = encoded(vectors(n, n_values, seed=n), block=block)
    weights = [1000 + 137 * i for i in range(n)]
    previous = codec.encode("int8", vectors(2, n_values, seed=99)[0], block=block)
    for centre, scale in ((None, 1.0), (previous, 1.0), (previous, 0.37)):
        result, norm = rules.combine(
            rule, frames, weights_N=weights, f=f, codec="int8", block=block, previous=centre, previous_scale=scale
        )
        assert result == twin(rule, frames, weights, f, centre, scale, block)
        assert norm == twins.squared_norm_int8(result)
        codec.check(result, codec="int8", block=block, n_values=n_values, scale_cap=codec.RESULT_SCALE_CAP)


@pytest.mark.parametrize("name", ["int4", "fp32"])
def test_near_a_tie_another_block_than_that_of_aggregate_may_choose_another_row(name: str) -> None:
    """Five rows of the same values at other places are equally far apart, but for the order of the sums in lanes."""
    differs = {64: False, 1024: False}
    for seed in range(20):
        generator = np.random.default_rng(seed)
        values = (generator.integers(-7, 8, (64, 16)) * 0.1).astype(FLOATS)
        values[:, 0] = FLOATS(0.7)  # each block's largest, so that int4 sends all of them as they are
        updates = np.zeros((5, 5 * 1024), FLOATS)
        for i in range(5):
            places = values[generator.permutation(64)][:, generator.permutation(16)]
            updates[i, i * 1024 : (i + 1) * 1024] = places.reshape(-1)
        for block in differs:
            frames = encoded(updates, name, block)
            decoded = np.stack([codec.decode(frame, updates.shape[1]) for frame in frames])
            result, _ = combined("krum", frames, f=1, codec=name, block=block)
            whole = rules.aggregate("krum", decoded, f=1)
            differs[block] |= result != codec.encode(codec.result_codec(name), whole, block=block)
    assert differs == {64: True, 1024: False}


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_ties_copies_zeros_and_extremes_equal_the_twin_too(data: st.DataObject) -> None:
    rule = data.draw(st.sampled_from([rule for rule in ALL_RULES if "caf" not in rule and "median" not in rule]))
    n = data.draw(st.integers(7, 9))
    distinct = data.draw(st.lists(st.lists(st.integers(-3, 3), min_size=20, max_size=20), min_size=1, max_size=4))
    sizes = st.sampled_from([0.0, 1.0, 1.0, 1.0, 2.0**-60, 2.0**30])
    updates = np.array([data.draw(st.sampled_from(distinct)) for _ in range(n)], FLOATS)
    updates *= np.array([data.draw(sizes) for _ in range(n)], FLOATS)[:, None]
    weights = data.draw(st.lists(st.integers(1, 10**9), min_size=n, max_size=n))
    frames = encoded(updates, block=16)
    previous = data.draw(st.sampled_from([None, frames[0]]))
    result, _ = combined(rule, frames, weights_N=weights, f=1, block=16, previous=previous)
    assert result == twin(rule, frames, weights, 1, previous, 1.0, 16)


@pytest.mark.parametrize("common", [0.0, 1e4])
@pytest.mark.parametrize("rule", ALL_RULES)
def test_decoded_rows_are_combined_as_their_twin_says(rule: str, common: float) -> None:
    """What is no int8 frame is summed in fp64 lanes: fp32 frames, and `aggregate` with blocks of 1024.

    Where rows have a large value in common, distances are what its square leaves of the last bits, so that another
    order of the sums shows in the result.
    """
    n, f, n_values = 8, 1, 1500
    updates = vectors(n, n_values, seed=3)
    updates[:, 5] += FLOATS(common)
    weights = [5.0, 1, 2, 3, 4, 5, 6, 7]
    previous = vectors(2, n_values, seed=98)[0]
    previous[5] += FLOATS(common)
    for centre in (None, previous):
        rows = updates
        if rules.is_centred(rule):
            rows = np.vstack([updates, twins.median(updates) if centre is None else centre])
        used = weights if rules.uses_weights(rule) else [1.0] * n
        for block in (64, 1024):
            gram = rule_twins.gram_of_values(rows, block)
            expected = rule_twins.apply(rule, rule_twins.Given(rows, gram, used, f, rules.is_centred(rule)))
            result, _ = combined(
                rule,
                encoded(updates, "fp32", block),
                weights_N=weights,
                f=f,
                codec="fp32",
                block=block,
                previous=None if centre is None else codec.encode("fp32", centre, block=block),
            )
            assert result == codec.encode("fp32", expected, block=block)
        whole = rules.aggregate(rule, updates, f=f, weights_N=weights, previous_D=centre)
        assert whole.tobytes() == expected.tobytes()


@pytest.mark.parametrize("rule", rules.names())
@pytest.mark.parametrize("name", codec.names())
def test_any_codec_is_combined_and_the_result_is_in_the_codec_of_results(name: str, rule: str) -> None:
    updates = vectors(7, 300)
    result_codec = codec.result_codec(name)
    previous = codec.encode(result_codec, updates[0], block=BLOCK)
    result, norm = combined(
        rule, encoded(updates, name), f=1, codec=name, previous=previous, previous_scale=0.5, checked=True
    )
    assert codec.header(result)[0] == result_codec
    assert norm == codec.squared_norm(result)
    decoded = np.stack([codec.decode(frame, 300) for frame in encoded(updates, name)])
    centre = FLOATS(0.5) * codec.decode(previous, 300)
    expected = rules.aggregate(rule, decoded, f=1, previous_D=centre)
    steps = {"int8": 127, "fp16": 1024, "fp32": 2**20}[result_codec]
    np.testing.assert_allclose(codec.decode(result, 300), expected, atol=0.6 * np.abs(expected).max() / steps)


@pytest.mark.parametrize("rule", ["mean", "median", "trimmed_mean", "meamed"])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_rules_per_coordinate_are_decode_reduce_encode(rule: str, n: int) -> None:
    updates = vectors(n, 40_001)
    weights = [1000 + 37 * i for i in range(n)]
    decoded = np.stack([twins.decode_int8(frame) for frame in encoded(updates)])
    result, _ = combined(rule, encoded(updates), weights_N=weights)
    assert result == twins.encode_int8(rules.aggregate(rule, decoded, weights_N=weights), BLOCK)


@pytest.mark.parametrize("rule", ["mean", "default", "krum", "nnm+trimmed_mean", "bulyan", "geometric_median"])
def test_chunk_by_chunk_is_the_whole_vector_on_any_threads_in_any_order(rule: str) -> None:
    """Every reducer's chunk is what one process makes of whole vectors, whoever combines which when."""
    n, n_values, chunk_values = 9, 70_000, 1 << 12
    updates = vectors(n, n_values, seed=8)
    previous = vectors(2, n_values, seed=97)[0]
    whole = rules.aggregate(rule, updates, f=1, previous_D=previous, chunk_values=chunk_values)
    chunks = [(start, min(start + chunk_values, n_values)) for start in range(0, n_values, chunk_values)]

    def chunk(bounds: tuple[int, int]) -> bytes:
        part = slice(*bounds)
        before = codec.encode("fp32", previous[part])
        frames = encoded(updates[:, part], "fp32", 1024)
        return combined(rule, frames, f=1, codec="fp32", block=1024, previous=before)[0]

    shuffled = chunks * 2
    random.Random(rule).shuffle(shuffled)
    with ThreadPoolExecutor(8) as pool:
        for bounds, result in zip(shuffled, pool.map(chunk, shuffled), strict=True):
            assert result == codec.encode("fp32", whole[slice(*bounds)])


@pytest.mark.parametrize("rule", ["mean", "median", "default", "arc+nnm+trimmed_mean"])
def test_threads_do_not_show_in_int8_results(rule: str) -> None:
    jobs = [encoded(vectors(8, 5000, seed=seed)) for seed in range(6)]
    alone = [combined(rule, frames, f=1, previous=frames[0]) for frames in jobs]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            assert list(pool.map(lambda frames: combined(rule, frames, f=1, previous=frames[0]), jobs)) == alone


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['rule']}-{case['codec']}-{case['n']}")
def test_golden_results_stay_what_they_are(case: dict[str, Any]) -> None:
    """A change here is a new numerics_version."""
    z = np.arange(case["n"] * case["d"], dtype=np.uint64).reshape(case["n"], case["d"]) + np.uint64(case["seed"] << 32)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    updates = ((z ^ (z >> np.uint64(31))) >> np.uint64(40)).astype(np.float64) / 2**24 - 0.25
    frames = encoded(updates.astype(FLOATS), case["codec"], case["block"])
    weights = [100 + 7 * i for i in range(case["n"])]
    options = {"weights_N": weights, "f": case["f"], "codec": case["codec"], "block": case["block"]}
    if case["previous"]:
        options |= {"previous": rules.combine("mean", frames, **options)[0], "previous_scale": 0.75}
    result, norm = rules.combine(case["rule"], frames, **options)
    assert (sha256(result).hexdigest(), norm.hex()) == (case["result_sha256"], case["squared_norm"])


def test_a_mean_at_the_cap_is_still_a_result() -> None:
    top = np.full(40, 127 * 2.0**32, FLOATS)
    for rule in ("mean", "default", "geometric_median", "norm_clip"):
        for weights in ([3, 5, 2**62], [4526270, 5164521, 687422]):
            result, _ = combined(rule, encoded(np.stack([top] * 3), block=16), weights_N=weights, block=16)
            codec.check(result, codec="int8", block=16, n_values=40, scale_cap=codec.RESULT_SCALE_CAP)
            if (rule, weights[0]) == ("mean", 4526270):
                assert codec.decode(result, 40).min() > top[0]  # it did round up


@pytest.mark.parametrize("rule", ALL_RULES)
def test_no_result_is_longer_than_the_rule_and_its_encoding_may_make_it(rule: str) -> None:
    """Rows of small codes beside one large one, which their mean rounds up all at once."""
    n, f, block = 11, 2, 1024
    encoding = max(((127**2 + 1023 * (k + 1) ** 2) / (127**2 + 1023 * (k + 0.5) ** 2)) ** 0.5 for k in range(127))
    for low, n_high in ((0, 6), (3, 6), (3, 8), (4, 7)):
        is_high = (np.arange(n)[:, None] - np.arange(2 * block)) % n < n_high
        updates = (low + is_high).astype(FLOATS)
        updates[:, ::block] = 127
        frames = encoded(updates, block=block)
        previous = frames[0]
        for more in ({}, {"previous": previous}):
            _, norm = combined(rule, frames, f=f, block=block, **more)
            longest = max(codec.squared_norm(frame) for frame in frames)
            assert (norm / longest) ** 0.5 <= rules.norm_growth(rule, n, f) * encoding * (1 + 1e-5)
            if rule == "mean" and (low, n_high) == (3, 6):
                assert (norm / longest) ** 0.5 > 1.05  # so the rule's own bound is not enough


def test_who_weighs_nothing_is_checked_but_not_there() -> None:
    frames = encoded(vectors(8, 50))
    for rule in rules.names():
        without = combined(rule, [frames[0], *frames[2:]], f=1)
        assert combined(rule, frames, weights_N=[1, 0, 1, 1, 1, 1, 1, 1], f=1) == without
        with pytest.raises(CodecError):
            combined(rule, [frames[0], b"", *frames[2:]], weights_N=[1, 0, 1, 1, 1, 1, 1, 1], f=1)
    with pytest.raises(RuleError, match="no contribution has weight"):
        combined("mean", frames, weights_N=[0] * 8)
    with pytest.raises(RuleError, match="3 contributions for f = 1, 2 count"):
        combined("median", frames[:4], weights_N=[1, 0, 1, 0], f=1)


def test_a_frame_that_is_not_canonical_or_unlike_the_others_never_reaches_a_rule() -> None:
    good = codec.encode("int8", vectors(2, 50)[0], block=16)
    poisoned = good[:16] + FLOATS(np.nan).tobytes() + good[20:]
    unlike = (
        good[:-1],
        codec.encode("int8", np.ones(49), block=16),
        codec.encode("int8", np.ones(50), block=32),
        codec.encode("fp32", np.ones(50), block=16),
        b"",
    )
    for bad in (poisoned, *unlike):
        for frames in ([good, bad], [bad, good]):
            for weights in ([1, 1], [0, 1]):
                with pytest.raises(CodecError):
                    combined("mean", frames, weights_N=weights, block=16)
        for rule in ("default", "nnm+centered_clip"):
            with pytest.raises(CodecError):
                combined(rule, [good, good], block=16, previous=bad)
    for bad in unlike:  # sizes are compared even where somebody says that all is checked: kernels read by them
        with pytest.raises(CodecError):
            combined("mean", [good, bad], block=16, checked=True)


def test_the_last_result_is_a_result_and_matters_to_centred_rules_alone() -> None:
    frames = encoded(vectors(7, 200))
    other = codec.encode("int8", np.ones(200), block=BLOCK)
    for rule in rules.names():
        assert (combined(rule, frames, f=1, previous=other) != combined(rule, frames, f=1)) == rules.is_centred(rule)
    for scale in (-0.5, 1.5, float("nan")):
        with pytest.raises(RuleError, match="scaled"):
            combined("default", frames, previous=other, previous_scale=scale)


def test_the_scale_of_the_last_result_is_taken_once_as_fp32() -> None:
    frames, fp32 = encoded(vectors(7, 200)), encoded(vectors(7, 200), "fp32")
    last = vectors(2, 200, seed=5)[0]
    halved = combined("default", frames, previous=codec.encode("int8", last, block=BLOCK), previous_scale=0.5)
    assert halved == combined("default", frames, previous=codec.encode("int8", last * FLOATS(0.5), block=BLOCK))
    scaled = codec.encode("fp32", FLOATS(0.3) * last, block=BLOCK)
    options: dict[str, Any] = {"f": 1, "codec": "fp32"}
    given_scale = combined(
        "default", fp32, previous=codec.encode("fp32", last, block=BLOCK), previous_scale=0.3, **options
    )
    assert given_scale == combined("default", fp32, previous=scaled, **options)
    nowhere = combined("default", fp32, previous=scaled, previous_scale=0.0, **options)
    assert nowhere == combined("default", fp32, previous=codec.encode("fp32", np.zeros(200), block=BLOCK), **options)


def test_frames_may_lie_anywhere_in_memory() -> None:
    frames = encoded(vectors(7, 200))
    expected = combined("default", frames, f=1, previous=frames[3])
    room = bytearray(10_000)
    views = []
    for i, frame in enumerate(frames):  # at odd addresses, in another order than theirs
        at = 1 + (i * 3 % 7) * 1001
        room[at : at + len(frame)] = frame
        views.append(memoryview(room)[at : at + len(frame)])
    assert combined("default", views, f=1, previous=views[3]) == expected
    assert combined("default", [np.frombuffer(each, np.uint8) for each in frames], f=1, previous=frames[3]) == expected


def test_what_makes_no_sense_is_refused() -> None:
    good = codec.encode("int8", vectors(2, 50)[0], block=BLOCK)
    calls: list[Callable[[], object]] = [
        lambda: combined("mean", [good], weights_N=[1, 1]),
        lambda: combined("mean", [], weights_N=[]),
        lambda: combined("mean", [good], f=-1),
        lambda: combined("kurm", [good]),
        lambda: combined("median", [good, good], f=1),
        lambda: combined("mean", [good, good], weights_N=[1, float("nan")]),
        lambda: combined("mean", [good, good], weights_N=[1, 2.0**63]),
    ]
    for call in calls:
        with pytest.raises(RuleError):
            call()
    with pytest.raises(CodecError, match="no codec"):
        combined("mean", [good], codec="int7")
