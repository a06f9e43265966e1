"""The model that a node builds: refused before any work where it is not the run's."""

from __future__ import annotations

import pytest

from aggregation.vector import layout_of
from node.training.model import ModelError, check_layout
from protos.runspec import RunSpec
from tests.fakes.tiny import tiny_run

Shapes = list[tuple[str, tuple[int, ...]]]


def shapes(width: int = 64, vocabulary: int = 256, names: tuple[str, str] = ("up", "down")) -> Shapes:
    first, second = names
    return [
        ("embedding", (vocabulary, width)),
        (first, (4 * width, width)),
        (second, (4 * width, width)),
        ("norm", (width,)),
    ]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    made = tiny_run(tmp_path_factory.mktemp("run")).spec
    layout = layout_of(shapes(), block=made.codec.block)
    changes = {"n_values": layout.n_values, "layout_digest": layout.digest.hex()}
    return made.model_copy(update={"model": made.model.model_copy(update=changes)})


def test_the_runs_own_layout_will_do(spec: RunSpec) -> None:
    check_layout(layout_of(shapes(), block=spec.codec.block), spec)


@pytest.mark.parametrize(
    "built",
    [
        shapes(width=96),
        shapes(vocabulary=257),
        shapes(names=("down", "up")),
        [("embedding", (64, 256)), *shapes()[1:]],
        shapes()[:-1],
    ],
    ids=["wider", "another vocabulary", "in another order", "transposed", "one less"],
)
def test_another_layout_is_refused(spec: RunSpec, built: Shapes) -> None:
    """Also one of as many values: an average of these would be none."""
    with pytest.raises(ModelError, match=f"another layout than the run's of {spec.model.n_values}"):
        check_layout(layout_of(built, block=spec.codec.block), spec)
