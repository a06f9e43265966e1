"""A node's files and questions where the operator's orders need them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from node.errors import Unreachable
from node.obeying import Obeying
from node.session import effects as fx
from node.session import events as ev
from node.specs import SpecsFolder
from protos.orders import seal_spec
from protos.runspec import RunSpec
from protos.signing import Identity
from tests.sim.options import sim_spec

RUN = Identity.from_private_bytes(b"r" * 32)
SPEC = sim_spec(n_chunks=1).model_copy(update={"revision": 2})
ENVELOPE = seal_spec(RUN, SPEC)


class Outside:
    """A store that holds nothing, a coordinator that is away at first, and what was said."""

    def __init__(self, folder: Path, n_away: int = 0) -> None:
        self.said: list[str] = []
        self.in_force: list[RunSpec] = []
        self.n_away = n_away
        self.specs = SpecsFolder(folder / "specs", RUN.peer)
        self.obeying = Obeying(
            self.specs,
            self,  # type: ignore[arg-type]
            folder / "spec.json",
            ask=self.ask,
            amended=self.in_force.append,
            say=self.said.append,
        )

    async def ask(self, revision: int) -> tuple[bytes, RunSpec]:
        if self.n_away:
            self.n_away -= 1
            raise Unreachable("the coordinator", ["it is away"])
        return ENVELOPE, SPEC

    def restore(self, head: bytes, body_hash: bytes) -> None:
        return None


def test_revisions_come_back_from_the_disk_and_others_are_passed_over(tmp_path: Path) -> None:
    folder = SpecsFolder(tmp_path / "specs", RUN.peer)
    assert folder.load() == {}
    folder.keep(ENVELOPE, 2)
    folder.keep(seal_spec(Identity.from_private_bytes(b"x" * 32), SPEC), 3)
    folder.keep(b"rubbish", 4)
    (tmp_path / "specs" / "notes.txt").write_text("mine")
    unknown = SPEC.model_copy(update={"revision": 5, "rule": SPEC.rule.model_copy(update={"name": "later"})})
    folder.keep(seal_spec(RUN, unknown), 5)
    assert folder.load() == {2: SPEC}


def test_what_is_in_force_is_on_disk_before_anybody_works_by_it(tmp_path: Path) -> None:
    outside = Outside(tmp_path)

    async def scene() -> None:
        await outside.obeying.at_once(fx.KeepSpec(ENVELOPE, 2))
        await outside.obeying.at_once(fx.Amended(SPEC))

    asyncio.run(scene())
    assert outside.specs.load() == {2: SPEC}
    assert RunSpec.from_bytes((tmp_path / "spec.json").read_bytes()) == SPEC
    assert outside.in_force == [SPEC]


def test_a_revision_is_asked_for_until_somebody_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.obeying.AGAIN_FIRST_S", 0.0)
    outside = Outside(tmp_path, n_away=2)
    assert asyncio.run(outside.obeying.in_time(fx.FetchSpec(2))) == ev.SpecKnown(SPEC)
    assert len(outside.said) == 2
    assert "revision 2" in outside.said[0]
    assert outside.specs.load() == {2: SPEC}


def test_a_state_that_is_not_kept_can_not_be_gone_back_to(tmp_path: Path) -> None:
    found = asyncio.run(Outside(tmp_path).obeying.in_time(fx.Restore(b"h" * 32, 7, b"b" * 32)))
    assert found == ev.RestoreFailed(b"b" * 32, "the state after round 7 is not kept here")
