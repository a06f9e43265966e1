"""Everything stopped and started again goes on as if nothing had been: the same batches, the same digests."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.simulation import Simulation, Status, exchanging, history, in_training

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(1200)]

ROUNDS, STEPS = 3, 50
FIXED = (
    # Nobody is done without, however long a start takes: the membership is the same in each round.
    "membership.min_contributors=3",
    "deadlines.gone_grace_s=100",
    "deadlines.heartbeat_timeout_s=100",
    # And nobody does less because this machine has much to do.
    "work.round_s=0",
    "work.batch_tokens=256",
)
STOPS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    text = tmp_path_factory.mktemp("text")
    for index in range(8):
        (text / f"{index}.txt").write_text("".join(f"{index}: line {line * index}\n" for line in range(1500)))
    sets = [word for setting in FIXED for word in ("--set", setting)]
    return (
        "--nodes",
        "3",
        "--rounds",
        str(ROUNDS),
        "--steps",
        str(STEPS),
        "--seed",
        "5",
        "--data-path",
        str(text),
        *sets,
    )


@pytest.fixture(scope="module")
def whole(words: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    result = Simulation(folder, *words).to_its_end()
    assert result["digests_equal"]
    assert len(history(folder)) == ROUNDS
    return folder


def test_killed_and_interrupted_it_comes_to_the_same(tmp_path: Path, words: tuple[str, ...], whole: Path) -> None:
    simulation = Simulation(tmp_path / "run", *words)
    assert simulation.stop_when(in_training(0, 20), signal.SIGKILL) == -signal.SIGKILL
    assert simulation.stop_when(in_training(1, 35), signal.SIGINT) == 0
    assert simulation.to_its_end()["digests_equal"]
    assert history(simulation.folder) == history(whole)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_stopped_anywhere_it_comes_to_the_same(tmp_path: Path, words: tuple[str, ...], whole: Path, seed: int) -> None:
    draw = random.Random(seed)
    simulation = Simulation(tmp_path / "run", *words)
    moments: list[Callable[[Status], bool]] = []
    for n_committed in range(ROUNDS):
        moments += [in_training(n_committed, draw.randrange(STEPS)), exchanging(n_committed)]
    for moment in sorted(draw.sample(range(len(moments)), 4)):
        simulation.stop_when(moments[moment], draw.choice(STOPS))
    assert simulation.to_its_end()["digests_equal"]
    assert history(simulation.folder) == history(whole)
