"""What an operator's command makes of the serving process's answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from coordinator import control
from coordinator.control import Caller, Serving
from coordinator.errors import StateError, UnreachableError
from tests.coordinator.made import RUN


@asynccontextmanager
async def answering(*answers: tuple[int, object]) -> AsyncIterator[tuple[Caller, list[str]]]:
    """A caller of a coordinator that gives these answers, the last one again and again; the paths asked for."""
    asked: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        status, content = answers[min(len(asked), len(answers) - 1)]
        asked.append(request.path_qs)
        return web.json_response(content, status=status)

    app = web.Application()
    app.router.add_get("/{rest:.*}", handle)
    async with TestServer(app) as server:
        serving = Serving(f"127.0.0.1:{server.port}", "secret", 1, RUN.peer, "")
        async with Caller(serving) as caller:
            yield caller, asked


BUSY = (503, {"code": "busy", "reason": "many read the ledger at the moment"})


def test_a_coordinator_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "AGAIN_S", 0.001)

    async def scene() -> None:
        async with answering(BUSY, (200, [{"round": 0}]), BUSY, BUSY, (200, [])) as (caller, asked):
            assert await caller.ledger() == [{"round": 0}]
            assert asked == ["/api/ledger?after=-1"] * 2 + ["/api/ledger?after=0"] * 3

    asyncio.run(scene())


def test_one_that_stays_busy_is_worth_another_try_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "AGAIN_S", 0.001)
    monkeypatch.setattr(control, "BUSY_S", 0.01)

    async def scene() -> None:
        async with answering(BUSY) as (caller, _):
            with pytest.raises(UnreachableError, match="many read the ledger at the moment; try again"):
                await caller.ledger()

    asyncio.run(scene())


@pytest.mark.parametrize("content", [{"code": "standby", "reason": "it waits"}, ["busy"], "busy", None])
def test_other_answers_are_final(content: object) -> None:
    async def scene() -> None:
        async with answering((503, content)) as (caller, asked):
            with pytest.raises(StateError, match="answers 503"):
                await caller.status()
            assert len(asked) == 1

    asyncio.run(scene())
