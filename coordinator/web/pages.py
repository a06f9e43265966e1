"""The routes: first contact for newcomers (`/v1`), JSON and events for people (`/api`), checks for monitors."""

from __future__ import annotations

import asyncio
import html
import io
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from coordinator.web.pieces import PieceDamaged
from coordinator.web.site import AdmitMalformed, AdmitRefused, OrderRefused, Site
from protos import limits

SITE = web.AppKey("site", Site)
OCTETS = "application/octet-stream"
NOT_KEPT = {"Cache-Control": "no-store"}
ROWS_MOST = 1000
"""Rows of one answer; who wants more asks again with the last round."""
PIECES_AT_ONCE, PIECES_PER_CALLER = 64, 32
LEDGERS_AT_ONCE, LEDGERS_PER_CALLER = 8, 4
"""Each may have megabytes in memory until they are sent."""
ADMISSIONS_WAITING_MOST = 256
ADMISSIONS_AT_ONCE = 2
"""So many stand between what the leader appends, which waits for each of them to be on disk."""
SENT_S = 30.0
SENT_LEAST_BYTES_S = 32 * 1024
"""A large answer is given so long, and a second more for each of these; who takes it no faster loses its connection."""
EVENT_PAUSE_S = 15.0
"""A comment is sent after so long a silence, so that proxies keep the stream open."""
EVENT_TAKEN_S = 30.0
"""Who takes no event for so long gives its place to others."""
BODY_S = 20.0
"""So long a body of some kilobytes may take to come: a call that was only half sent holds its connection no longer."""
CALLS_PER_S = 50.0
CALLS_BURST = 2000.0
CALLERS_REMEMBERED = 10_000


def make_app(site: Site) -> web.Application:
    """The application. Bodies are bounded, callers are rationed, and every error is JSON."""
    app = web.Application(client_max_size=limits.ADMIT_BYTES + 1024, middlewares=[_errors, _Rations().middleware])
    app[SITE] = site
    app.add_routes(
        [
            web.get("/", _front),
            web.get("/healthz", _health),
            web.get("/metrics", _metrics),
            web.get("/v1/run", _run),
            web.post("/v1/admit", _Admissions().post),
            web.get("/v1/data/{hash}", _Data().get),
            web.post("/v1/orders", _order),
            web.get("/api/status", _status),
            web.get("/api/ledger", _Ledgers().get),
            web.get("/api/digests", _digests),
            web.get("/api/events", _events),
            web.get("/api/members/{peer}", _member),
        ]
    )
    return app


def answer_json(content: object, status: int = 200, **headers: str) -> web.Response:
    """An answer that nobody keeps."""
    return web.json_response(content, status=status, headers={**NOT_KEPT, **headers})


def _error(status: int, code: str, reason: str, **headers: str) -> web.Response:
    return answer_json({"code": code, "reason": reason}, status, **headers)


def _too_slow() -> web.Response:
    return _error(408, "too_slow", f"the body did not come within {BODY_S:g} s")


# -- around every call ---------------------------------------------------------------------------------------------


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        return _error(413, "too_large", f"a body has at most {limits.ADMIT_BYTES} bytes")
    except web.HTTPMethodNotAllowed as error:
        return _error(405, "method", f"{request.path} takes {', '.join(sorted(error.allowed_methods))}")
    except web.HTTPNotFound:
        return _error(404, "not_found", f"there is no {request.path[:100]} here")
    except web.HTTPException as error:
        return _error(error.status, "http", error.reason)


class _Rations:
    """So many calls a second for each address, and a burst: a node asks dozens, a thousand nodes behind one do too."""

    def __init__(self) -> None:
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    @property
    def middleware(self) -> Middleware:
        @web.middleware
        async def ration(request: web.Request, handler: Handler) -> web.StreamResponse:
            if not self._take(request.remote or ""):
                return _error(429, "busy", "too many calls from this address", **{"Retry-After": "2"})
            return await handler(request)

        return ration

    def _take(self, caller: str) -> bool:
        now = time.monotonic()
        left, at = self._left.pop(caller, (CALLS_BURST, now))
        left = min(CALLS_BURST, left + (now - at) * CALLS_PER_S)
        allowed = left >= 1
        self._left[caller] = (left - 1 if allowed else left, now)
        if len(self._left) > CALLERS_REMEMBERED:
            self._left.popitem(last=False)
        return allowed


# -- first contact -------------------------------------------------------------------------------------------------


async def _run(request: web.Request) -> web.Response:
    revision = request.query.get("revision", "0")
    info = request.app[SITE].run_info(int(revision)) if revision.isdecimal() and len(revision) < 16 else None
    if info is None:
        return _error(404, "not_found", f"there is no revision {revision[:20]} of the RunSpec here")
    return web.Response(body=info, content_type=OCTETS, headers={"Cache-Control": "no-store"})


class _Admissions:
    """Requests to join, few of them at once: who appends for the leader waits behind no crowd."""

    def __init__(self) -> None:
        self._n_waiting = 0
        self._going = asyncio.Semaphore(ADMISSIONS_AT_ONCE)

    async def post(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.read()
        except TimeoutError:
            return _too_slow()
        if self._n_waiting >= ADMISSIONS_WAITING_MOST:
            return _error(503, "busy", "many ask to join at the moment", **{"Retry-After": "2"})
        self._n_waiting += 1
        try:
            async with self._going:
                answer = await request.app[SITE].admit(body)
        except AdmitRefused as refusal:
            return _error(403, refusal.code, str(refusal))
        except AdmitMalformed as error:
            return _error(400, "malformed", str(error))
        finally:
            self._n_waiting -= 1
        return web.Response(body=answer, content_type=OCTETS)


class _Busy(Exception):
    """All places are taken."""


class _Places:
    """For answers that take memory until they are sent: so many at once, and so many for one address."""

    def __init__(self) -> None:
        self._by_caller: Counter[str] = Counter()

    @contextmanager
    def place(self, request: web.Request, most: int, per_caller: int) -> Iterator[None]:
        """Keep a place. Raises _Busy."""
        caller = request.remote or ""
        if self._by_caller.total() >= most or self._by_caller[caller] >= per_caller:
            raise _Busy
        self._by_caller[caller] += 1
        try:
            yield
        finally:
            self._by_caller[caller] -= 1
            if not self._by_caller[caller]:
                del self._by_caller[caller]


async def _deliver(request: web.Request, body: bytes, headers: Mapping[str, str], content_type: str) -> web.Response:
    """Answer 200 with this, and return once it is sent but for what the system buffers, or the time for it is over."""
    with io.BytesIO(body) as content:  # closed, it keeps nothing: a connection keeps its last answer until the next one
        response = web.Response(body=content, headers=headers, content_type=content_type)
        try:
            async with asyncio.timeout(SENT_S + len(body) / SENT_LEAST_BYTES_S):
                await response.prepare(request)
                await response.write_eof()
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
            return web.Response()  # nobody is there to read it
        return response


class _Data:
    """Pieces, so many at once; whoever comes when all are taken is told to come again."""

    def __init__(self) -> None:
        self._places = _Places()

    async def get(self, request: web.Request) -> web.Response:
        try:
            hash_ = bytes.fromhex(request.match_info["hash"])
        except ValueError:
            hash_ = b""
        if len(hash_) != 32:
            return _error(400, "malformed", "a hash has 64 hexadecimal digits")
        try:
            with self._places.place(request, PIECES_AT_ONCE, PIECES_PER_CALLER):
                data = await request.app[SITE].piece(hash_)
                if data is None:
                    return _error(404, "not_found", "no data of this run has this hash")
                headers = {"Cache-Control": "public, max-age=31536000, immutable"}
                return await _deliver(request, data, headers, OCTETS)
        except _Busy:
            return _error(503, "busy", "many fetch data at the moment", **{"Retry-After": "1"})
        except (PieceDamaged, OSError) as error:
            return _error(500, "damaged", f"this piece can't be served: {error}")


# -- for people ----------------------------------------------------------------------------------------------------


async def _front(request: web.Request) -> web.Response:
    status = request.app[SITE].status()
    members = sum(1 for member in status["members"] if not member["observer"] and member["state"] != "gone")
    loss = status["val_loss"]
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in (
            ("run", status["run_id"]),
            ("round", status["round"]),
            ("phase", status["phase"]),
            ("members", members),
            ("tokens", f"{status['tokens']:,}"),
            ("validation loss", "not known yet" if loss is None else f"{loss:.4f}"),
        )
    )
    text = (
        "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=5>"
        f"<title>Barnraise {html.escape(status['run_id'][-8:])}</title><h1>Barnraise</h1><table>{rows}</table>"
        "<p><a href=/api/status>status</a> · <a href=/api/ledger>ledger</a> · <a href=/metrics>metrics</a></html>"
    )
    return web.Response(text=text, content_type="text/html", headers={"Cache-Control": "no-store"})


async def _health(request: web.Request) -> web.Response:
    status = request.app[SITE].status()
    return answer_json({"ok": True, "run_id": status["run_id"], "round": status["round"]})


async def _metrics(request: web.Request) -> web.Response:
    body = request.app[SITE].metrics()
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def _status(request: web.Request) -> web.Response:
    return answer_json(request.app[SITE].status())


class _Ledgers:
    """Rows of the ledger; a thousand of them are megabytes, and a second's work."""

    def __init__(self) -> None:
        self._places = _Places()

    async def get(self, request: web.Request) -> web.Response:
        try:
            after = int(request.query.get("after", "-1"))
            limit = int(request.query.get("limit", str(ROWS_MOST)))
        except ValueError:
            return _error(400, "malformed", "after and limit are whole numbers")
        if not -1 <= after <= limits.INTEGER or limit < 1:
            return _error(400, "malformed", "after is a round, limit at least 1")
        try:
            with self._places.place(request, LEDGERS_AT_ONCE, LEDGERS_PER_CALLER):
                rows = await request.app[SITE].rows(after, min(limit, ROWS_MOST))
                body = await asyncio.to_thread(_json_list, rows)
                return await _deliver(request, body, NOT_KEPT, "application/json")
        except _Busy:
            return _error(503, "busy", "many read the ledger at the moment", **{"Retry-After": "1"})


def _json_list(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Row by row: a single call would keep the interpreter, and so the loop, until it is done."""
    return b"[" + b", ".join(json.dumps(row).encode() for row in rows) + b"]"


async def _digests(request: web.Request) -> web.Response:
    if (refusal := _only_operator(request)) is not None:
        return refusal
    return answer_json(await request.app[SITE].digests())


async def _member(request: web.Request) -> web.Response:
    peer = request.match_info["peer"]
    return answer_json({"peer": peer, "story": request.app[SITE].explain(peer)})


async def _events(request: web.Request) -> web.StreamResponse:
    site = request.app[SITE]
    follower = site.follow()
    if follower is None:
        return _error(503, "busy", "too many follow already; poll /api/status", **{"Retry-After": "10"})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    try:
        await response.prepare(request)
        await _send_event(response, "status", site.status())
        while True:
            try:
                async with asyncio.timeout(EVENT_PAUSE_S):
                    kind, content = await follower.next()
            except TimeoutError:
                async with asyncio.timeout(EVENT_TAKEN_S):
                    await response.write(b": still here\n\n")
                continue
            await _send_event(response, kind, content)
            if kind == "round":
                await _send_event(response, "status", site.status())
    except (ConnectionResetError, TimeoutError):  # it left, or takes nothing any more
        return response
    finally:
        site.unfollow(follower)


async def _send_event(response: web.StreamResponse, kind: str, content: object) -> None:
    async with asyncio.timeout(EVENT_TAKEN_S):
        await response.write(f"event: {kind}\ndata: {json.dumps(content, separators=(',', ':'))}\n\n".encode())


# -- for the operator ----------------------------------------------------------------------------------------------


def _only_operator(request: web.Request) -> web.Response | None:
    """The refusal for whoever is not the operator."""
    secret = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if not secret.isprintable():  # as bytes are that are no UTF-8
        return _error(401, "not_operator", "the header Authorization is no text", **{"WWW-Authenticate": "Bearer"})
    if not request.app[SITE].is_operator(secret):
        return _error(403, "not_operator", "this is for the operator, who holds the run's folder")
    return None


async def _order(request: web.Request) -> web.Response:
    if (refusal := _only_operator(request)) is not None:
        return refusal
    envelope = b""
    try:
        async with asyncio.timeout(BODY_S):
            while len(envelope) <= limits.ORDER_BYTES and (part := await request.content.readany()):
                envelope += part
    except TimeoutError:
        return _too_slow()
    if len(envelope) > limits.ORDER_BYTES:
        return _error(413, "too_large", f"an order has at most {limits.ORDER_BYTES} bytes")
    try:
        return answer_json(await request.app[SITE].order(envelope))
    except OrderRefused as refused:
        return _error(409, "refused", str(refused))
