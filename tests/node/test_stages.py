"""Sums of the data path's stages, from several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from node.stages import NAMES, Stage, Stages


def test_sums_are_kept_by_stage_and_nothing_is_lost_between_threads() -> None:
    stages = Stages()
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(stages.add, "check", 10, 0.5, copied_bytes=5) for _ in range(200)]:
            done.result()
    assert tuple(stages.sums()) == NAMES
    assert stages.sums()["check"] == Stage(2000, 100.0, 1000)
    assert stages.sums()["check"].copies == 0.5
    assert stages.sums()["send"] == Stage()
    assert Stage().copies == 0.0


def test_what_was_added_since() -> None:
    stages = Stages()
    stages.add("send", 10, 1.0)
    before = stages.sums()
    stages.add("send", 5, 0.25, copied_bytes=5)
    assert stages.since(before)["send"] == Stage(5, 0.25, 5)
    assert stages.since(before)["fetch"] == Stage()


def test_work_that_failed_is_not_counted() -> None:
    stages = Stages()
    with stages.timed("combine", 7, copied_bytes=3):
        pass
    with pytest.raises(ZeroDivisionError), stages.timed("combine", 7):
        raise ZeroDivisionError
    done = stages.sums()["combine"]
    assert (done.n_bytes, done.copied_bytes) == (7, 3)
    assert done.seconds > 0
    with pytest.raises(KeyError):
        stages.add("nonsense", 1)
