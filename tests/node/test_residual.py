"""What encoding leaves over, on disk: it follows the commits that count its contribution, and never counts twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.rounds.ledger import Ledger
from node.errors import MachineError
from node.residual import CURRENT, NEXT, Feedback, Residuals
from node.state import Held
from node.training.shared import RESIDUAL_HEAD_BYTES, map_residual
from protos.messages import MemberEntry, Outcome, Range
from protos.runspec import RunSpec
from tests.node.chain import RUN, body_after, commit_of, commit_zero, peer
from tests.node.runs import make_run

ME, OTHER = peer(1), peer(2)
ROOT, OTHER_ROOT = b"r" * 32, b"o" * 32
N_VALUES = 1000
TOKENS = 40


def spec_of(folder: Path, codec: str = "int4", n_values: int = N_VALUES, layout: str = "0" * 64) -> RunSpec:
    made = make_run(folder)
    return made.model_copy(
        update={
            "codec": made.codec.model_copy(update={"name": codec}),
            "model": made.model.model_copy(update={"n_values": n_values, "layout_digest": layout}),
        }
    )


def entry(root: bytes = ROOT, *, counted: bool = True, who: object = ME) -> MemberEntry:
    used = (Range(0, 1),)
    return MemberEntry(who, counted, "" if counted else "late", 1, TOKENS, 1.0, used, root, 1.0, 0.1, 0.0)  # type: ignore[arg-type]


class Node:
    """A chain of commits, and one member's residuals beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        self.spec = spec_of(folder)
        self.held = held_of(*commit_zero(bytes(32)))
        self.restart()

    def restart(self, spec: RunSpec | None = None, run: object = RUN) -> None:
        self.residuals = Residuals(self.folder, run, ME, spec or self.spec)  # type: ignore[arg-type]
        self.residuals.settle(self.held)

    def encode(self, value: float, root: bytes = ROOT) -> Feedback:
        """As driver and trainer do: begin, write, seal."""
        feedback = self.begin(value)
        self.residuals.seal(self.held.ledger.round + 1, root)
        return feedback

    def begin(self, value: float) -> Feedback:
        feedback = self.residuals.begin(self.held)
        assert feedback is not None
        map_residual(Path(feedback.next), N_VALUES, writable=True)[:] = value
        return feedback

    def commit(self, *members: MemberEntry) -> None:
        """The next round's commit; the state is switched, nothing else is done yet."""
        outcome = Outcome.COMMITTED if members else Outcome.EMPTY
        body, folded = body_after(self.held.ledger, outcome, members=members)
        self.held = held_of(*commit_of(body, folded, bytes(32)))

    def settle(self) -> None:
        self.residuals.settle(self.held)

    def value(self) -> float | None:
        """What every value of the current residual is."""
        path = self.folder / CURRENT
        if not path.exists():
            return None
        values = np.unique(map_residual(path, N_VALUES))
        assert len(values) == 1
        return float(values[0])

    @property
    def pending(self) -> bool:
        return (self.folder / NEXT).exists()


def held_of(commit: object, ledger: Ledger) -> Held:
    return Held(Path(), commit, ledger, (), ())  # type: ignore[arg-type]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def counted_once(node: Node) -> None:
    """A round that counted, so that there is a residual of ones."""
    node.encode(1.0)
    node.commit(entry())
    node.settle()
    assert (node.value(), node.pending) == (1.0, False)


def test_it_advances_with_a_commit_that_counts_its_contribution(node: Node) -> None:
    assert node.encode(1.0).residual == ""  # nothing is left over yet
    assert node.value() is None
    node.commit(entry(OTHER_ROOT, who=OTHER), entry())
    node.settle()
    assert node.value() == 1.0
    assert node.encode(2.0).residual == str(node.folder / CURRENT)
    assert node.value() == 1.0
    node.commit(entry())
    node.settle()
    assert (node.value(), node.pending) == (2.0, False)


@pytest.mark.parametrize(
    "members",
    [(), (entry(counted=False),), (entry(who=OTHER),), (entry(ROOT, counted=False), entry(ROOT, who=OTHER))],
    ids=["an empty round", "left out", "not planned", "another one's with the same root"],
)
def test_a_round_that_does_not_count_it_leaves_the_residual_as_it_was(
    node: Node, members: tuple[MemberEntry, ...]
) -> None:
    counted_once(node)
    node.encode(2.0)
    node.commit(*members)
    node.settle()
    assert (node.value(), node.pending) == (1.0, False)
    node.encode(3.0)
    node.commit(entry())
    node.settle()
    assert node.value() == 3.0


@pytest.mark.parametrize("when", ["before the commit", "before it is settled", "after"])
def test_it_outlives_a_restart(node: Node, when: str) -> None:
    counted_once(node)
    node.encode(2.0)
    if when == "before the commit":
        node.restart()
        assert (node.value(), node.pending) == (1.0, True)
    node.commit(entry())
    if when == "before it is settled":
        node.restart()
    node.settle()
    if when == "after":
        node.restart()
    assert (node.value(), node.pending) == (2.0, False)


@pytest.mark.parametrize("at", ["replace", "unlink"])
def test_cut_off_in_the_middle_it_is_settled_at_the_next_start(
    node: Node, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    counted_once(node)
    node.encode(2.0)
    node.commit(entry()) if at == "replace" else node.commit(entry(counted=False))

    class Killed(Exception):
        pass

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Path, at, die)
        with pytest.raises(Killed):
            node.settle()
    node.restart()
    assert (node.value(), node.pending) == (2.0 if at == "replace" else 1.0, False)


def counted_by_another_contribution(node: Node) -> None:
    node.commit(entry(OTHER_ROOT))
    node.settle()


def counted_before_it_was_whole(node: Node) -> None:
    node.begin(3.0)
    node.commit(entry())
    node.settle()


def counted_in_a_round_that_was_skipped(node: Node) -> None:
    node.commit(entry())
    node.commit(entry(who=OTHER))
    node.settle()


def on_another_branch(node: Node) -> None:
    ledger = replace(node.held.ledger, credit={})
    node.held = replace(node.held, ledger=replace(ledger, round=ledger.round + 1))
    node.settle()


@pytest.mark.parametrize(
    "happens",
    [
        counted_by_another_contribution,
        counted_before_it_was_whole,
        counted_in_a_round_that_was_skipped,
        on_another_branch,
    ],
)
def test_what_may_have_gone_out_already_is_dropped(node: Node, happens: Callable[[Node], None]) -> None:
    counted_once(node)
    node.encode(2.0)
    happens(node)
    assert (node.value(), node.pending) == (None, False)


def test_rounds_that_are_skipped_without_it_change_nothing(node: Node) -> None:
    counted_once(node)
    node.encode(2.0)
    node.commit(entry(who=OTHER))
    node.commit()
    node.settle()
    assert (node.value(), node.pending) == (1.0, False)


def test_a_residual_of_something_else_is_dropped(node: Node, tmp_path: Path) -> None:
    strange: list[tuple[RunSpec, object]] = [
        (spec_of(tmp_path, layout="1" * 64), RUN),
        (spec_of(tmp_path, n_values=N_VALUES + 1), RUN),
        (spec_of(tmp_path, codec="topk"), RUN),
        (spec_of(tmp_path, codec="int8"), RUN),
        (node.spec, OTHER),
    ]
    for spec, run in strange:
        counted_once(node)
        node.encode(2.0)
        node.restart(spec, run)
        assert (node.value(), node.pending) == (None, False)
        node.restart()


@pytest.mark.parametrize("harm", ["cut off", "no head"])
def test_a_damaged_file_is_none(node: Node, harm: str) -> None:
    counted_once(node)
    path = node.folder / CURRENT
    path.write_bytes(path.read_bytes()[:-1] if harm == "cut off" else bytes(path.stat().st_size))
    node.restart()
    assert node.value() is None


def test_a_seal_that_comes_late_seals_nothing(node: Node) -> None:
    node.begin(1.0)
    node.commit(entry(who=OTHER))
    node.settle()
    node.residuals.seal(1, ROOT)
    assert not node.pending
    node.begin(2.0)
    node.residuals.seal(1, ROOT)
    node.commit(entry())
    node.settle()
    assert (node.value(), node.pending) == (None, False)


def test_without_feedback_there_are_no_files(node: Node, tmp_path: Path) -> None:
    node.restart(spec_of(tmp_path, codec="fp16"))
    assert node.residuals.begin(node.held) is None
    assert list(node.folder.iterdir()) == []


def test_no_room_is_an_error_with_a_remedy(node: Node, tmp_path: Path) -> None:
    counted_once(node)
    huge = Residuals(node.folder, RUN, ME, spec_of(tmp_path, n_values=2**50))
    with pytest.raises(MachineError, match="what encoding leaves over"):
        huge.begin(node.held)
    assert node.value() == 1.0
    assert RESIDUAL_HEAD_BYTES % 4096 == 0  # a mapping's values begin on a page
