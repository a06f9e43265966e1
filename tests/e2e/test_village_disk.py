"""A village with a member whose disk refuses it: the others commit without it at once, and it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from node import driver
from node.centre import centre_of
from node.errors import MachineError
from tests.e2e.soundness import LATE_S, UNHURRIED, sound, started
from tests.e2e.village import live, village

pytestmark = pytest.mark.slow


def test_a_member_that_can_not_begin_an_exchange_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(3, *UNHURRIED)) as here:
            victim, *others = here.settle(3)
            await here.rounds(1)
            n_failed = 0

            def without_descriptors(held: Any, results: Any) -> Any:
                nonlocal n_failed
                if n_failed == 0 and victim.folder in results.folder.parents:
                    n_failed = 1
                    raise MachineError("results can't be written: Too many open files", "look")
                return centre_of(held, results)

            await victim.halted("training")
            n_before = len(here.committed())
            monkeypatch.setattr(driver, "centre_of", without_descriptors)
            victim.go_on()
            await here.until(lambda: n_failed == 1, "an exchange that does not begin")
            await here.rounds(n_before + 1, LATE_S)
            commit = here.committed()[n_before]
            assert commit.commit.attempt == 0
            assert {entry.peer for entry in commit.body.members if entry.counted} == {m.peer for m in others}
            await here.counts(victim, after=n_before + 1)
            await sound(here)

    live(scenario(), limit_s=90.0)
