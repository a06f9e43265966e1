"""What a coordinator that stands by answers: that it does, and for whom it waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web

from coordinator.web.pages import answer_json

RETRY_AFTER_S = 5


def make_waiting_app(about: Callable[[], dict[str, Any]]) -> web.Application:
    """`/healthz` says what `about` does; all else is 503, so that nodes go on to the invite's next address."""

    async def health(_: web.Request) -> web.Response:
        return answer_json(about())

    async def elsewhere(_: web.Request) -> web.Response:
        reason = f"this coordinator stands by, waiting for {about()['waiting_for'] or 'the database'}"
        return answer_json({"code": "standby", "reason": reason}, 503, **{"Retry-After": str(RETRY_AFTER_S)})

    app = web.Application(client_max_size=1024)
    app.add_routes([web.get("/healthz", health), web.route("*", "/{path:.*}", elsewhere)])
    return app
