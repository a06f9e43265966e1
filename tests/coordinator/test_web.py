"""The HTTP side: first contact, JSON, events, metrics; limits; and errors that are JSON with a reason."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from coordinator.bulletin import Follower
from coordinator.errors import StateError
from coordinator.web import pages
from coordinator.web.metrics import Metrics
from coordinator.web.pages import make_app
from coordinator.web.pieces import PieceDamaged, Pieces
from coordinator.web.site import AdmitMalformed, AdmitRefused, OrderRefused
from coordinator.web.site import Follower as AnyFollower
from protos import limits
from tests.coordinator.made import make_run, shards, spec

Client = TestClient[Any, Any]

STATUS: dict[str, Any] = {
    "run_id": "12D3KooW<run>", "round": 3, "epoch": 0, "phase": "train", "deadline_in_s": 5.0, "leader": "L",
    "members": [
        {"peer": "p", "name": "n", "state": "training", "standing": "good", "step": 2, "tokens_per_s": 10.0,
         "reachable": True, "last_seen_s": 0.1, "observer": False},
        {"peer": "o", "name": "", "state": "waiting", "standing": "good", "step": 0, "tokens_per_s": 0.0,
         "reachable": True, "last_seen_s": 0.1, "observer": True},
    ],
    "tokens": 1234, "val_loss": 2.5, "head": "00", "n_committed": 2, "bytes_sent": 7, "bytes_received": 8,
    "restarts": {"observer": 1},
}  # fmt: skip


@dataclass
class FakeSite:
    asked: list[Any] = field(default_factory=list)
    pieces: dict[bytes, bytes] = field(default_factory=dict)
    gate: asyncio.Event | None = None
    follower: Follower | None = field(default_factory=Follower)

    def run_info(self, revision: int = 0) -> bytes | None:
        return b"run info" if revision < 2 else None

    async def admit(self, raw: bytes) -> bytes:
        self.asked.append(raw)
        if raw == b"refuse":
            raise AdmitRefused("banned", "this peer is banned")
        if raw == b"rubbish":
            raise AdmitMalformed("no envelope")
        return b"admitted"

    async def piece(self, hash_: bytes) -> bytes | None:
        if self.gate is not None:
            await self.gate.wait()
        if hash_ == b"d" * 32:
            raise PieceDamaged("train.bin is damaged at byte 0")
        return self.pieces.get(hash_)

    def status(self) -> dict[str, Any]:
        return STATUS

    async def rows(self, after_round: int, limit: int) -> list[dict[str, Any]]:
        self.asked.append((after_round, limit))
        return [{"round": after_round + 1}]

    def follow(self) -> Follower | None:
        return self.follower

    def unfollow(self, follower: AnyFollower) -> None:
        self.asked.append("unfollowed")

    async def order(self, envelope: bytes) -> dict[str, Any]:
        if envelope != b"pause":
            raise OrderRefused("no order of this run")
        self.asked.append("pause")
        return {"number": 1, "kind": "pause", "round": 1}

    def is_operator(self, secret: str) -> bool:
        return secret == "s3cret"

    async def digests(self) -> dict[str, dict[str, str]]:
        return {"c": {"p": "d"}}

    def explain(self, peer: str) -> list[str]:
        return [f"story of {peer}"]

    def metrics(self) -> bytes:
        return Metrics("R").render(STATUS)


def served(scene: Callable[[Client, FakeSite], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        site = FakeSite()
        async with asyncio.timeout(60), TestClient(TestServer(make_app(site))) as client:
            await scene(client, site)

    asyncio.run(main())


def test_first_contact() -> None:
    async def scene(client: Client, site: FakeSite) -> None:
        response = await client.get("/v1/run")
        assert (response.status, response.content_type, await response.read()) == (
            200, "application/octet-stream", b"run info",
        )  # fmt: skip
        response = await client.post("/v1/admit", data=b"please")
        assert (response.status, await response.read()) == (200, b"admitted")
        response = await client.post("/v1/admit", data=b"refuse")
        assert (response.status, await response.json()) == (
            403, {"code": "banned", "reason": "this peer is banned"},
        )  # fmt: skip
        response = await client.post("/v1/admit", data=b"rubbish")
        assert (response.status, (await response.json())["code"]) == (400, "malformed")

    served(scene)


def test_a_body_is_bounded() -> None:
    async def scene(client: Client, site: FakeSite) -> None:
        response = await client.post("/v1/admit", data=b"x" * (limits.ADMIT_BYTES + 5000))
        assert (response.status, (await response.json())["code"]) == (413, "too_large")
        assert site.asked == []

    served(scene)


def test_calls_that_were_only_half_sent_hold_up_nobody_and_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    n_halves, asked, all_asked = 60, list[web.BaseRequest](), asyncio.Event()

    async def read(request: web.BaseRequest) -> bytes:
        asked.append(request)
        if len(asked) == n_halves:
            all_asked.set()
        return await whole(request)

    whole = web.BaseRequest.read
    monkeypatch.setattr(web.BaseRequest, "read", read)
    monkeypatch.setattr(pages, "BODY_S", 0.2)

    async def scene(client: Client, site: FakeSite) -> None:
        halves = [await asyncio.open_connection(client.host, client.port) for _ in range(n_halves)]
        for _, writer in halves:
            writer.write(b"POST /v1/admit HTTP/1.1\r\nHost: here\r\nContent-Length: 100\r\n\r\nhalf")
        await all_asked.wait()
        monkeypatch.setattr(pages, "BODY_S", 60.0)  # for who sends a whole one
        response = await client.post("/v1/admit", data=b"a whole one")
        assert (response.status, await response.read()) == (200, b"admitted")
        assert (await client.get("/api/status")).status == 200
        for reader, writer in halves:
            assert b" 408 " in await reader.readline()
            assert b'"too_slow"' in await reader.readuntil(b"}")
            writer.close()
        assert site.asked == [b"a whole one"]

    served(scene)


def test_data_by_hash() -> None:
    async def scene(client: Client, site: FakeSite) -> None:
        site.pieces[b"a" * 32] = b"piece"
        response = await client.get("/v1/data/" + "61" * 32)
        assert (response.status, await response.read()) == (200, b"piece")
        for path, status in (("62" * 32, 404), ("64" * 32, 500), ("abc", 400), ("zz" * 32, 400), ("61" * 33, 400)):
            response = await client.get("/v1/data/" + path)
            assert response.status == status
            assert (await response.json())["reason"]

    served(scene)


def test_too_many_fetches_at_once_are_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PIECES_AT_ONCE", 2)

    async def scene(client: Client, site: FakeSite) -> None:
        site.gate = asyncio.Event()
        first = [asyncio.ensure_future(client.get("/v1/data/" + "61" * 32)) for _ in range(3)]
        done, _ = await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        response = done.pop().result()
        assert response.status == 503
        assert response.headers["Retry-After"]
        site.gate.set()
        assert sorted([(await each).status for each in first]) == [404, 404, 503]

    served(scene)


def test_callers_are_rationed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "CALLS_BURST", 3.0)
    monkeypatch.setattr(pages, "CALLS_PER_S", 0.0)

    async def scene(client: Client, site: FakeSite) -> None:
        statuses = [(await client.get("/healthz")).status for _ in range(5)]
        assert statuses == [200, 200, 200, 429, 429]

    served(scene)


def test_json_for_people() -> None:
    async def scene(client: Client, site: FakeSite) -> None:
        assert await (await client.get("/api/status")).json() == STATUS
        assert await (await client.get("/api/ledger")).json() == [{"round": 0}]
        assert await (await client.get("/api/ledger?after=7&limit=5")).json() == [{"round": 8}]
        assert site.asked == [(-1, pages.ROWS_MOST), (7, 5)]
        for query in ("after=x", "after=-2", "limit=0", "after=9e99"):
            assert (await client.get(f"/api/ledger?{query}")).status == 400
        assert (await (await client.get("/healthz")).json())["ok"] is True
        assert await (await client.get("/api/members/abc")).json() == {"peer": "abc", "story": ["story of abc"]}

    served(scene)


def test_the_front_page_escapes_what_it_shows() -> None:
    async def scene(client: Client, site: FakeSite) -> None:
        response = await client.get("/")
        text = await response.text()
        assert response.content_type == "text/html"
        assert "12D3KooW&lt;run&gt;" in text
        assert "<run>" not in text

    served(scene)


def test_metrics() -> None:
    async def scene(client: Client, site: FakeSite) -> None:
        response = await client.get("/metrics")
        lines = (await response.text()).splitlines()
        assert 'barnraise_members{state="training"} 1.0' in lines
        assert "barnraise_round 3.0" in lines
        assert "barnraise_val_loss 2.5" in lines
        assert 'barnraise_restarts{process="observer"} 1.0' in lines
        assert not any("python_" in line for line in lines)

    served(scene)


def test_events_follow_what_happens() -> None:
    async def scene(client: Client, site: FakeSite) -> None:
        assert site.follower is not None
        async with client.get("/api/events") as response:
            assert response.content_type == "text/event-stream"
            assert await _event(response) == ("status", STATUS)
            site.follower.tell("round", {"round": 3})
            assert await _event(response) == ("round", {"round": 3})
            assert await _event(response) == ("status", STATUS)
            site.follower.tell("say", {"text": "one\ntwo"})
            assert await _event(response) == ("say", {"text": "one\ntwo"})
        site.follower = None
        assert (await client.get("/api/events")).status == 503

    served(scene)


async def _event(response: Any) -> tuple[str, Any]:
    kind = (await response.content.readline()).decode().removeprefix("event: ").strip()
    data = (await response.content.readline()).decode().removeprefix("data: ")
    assert await response.content.readline() == b"\n"
    return kind, json.loads(data)


def test_a_follower_forgets_the_oldest() -> None:
    async def main() -> tuple[str, Any]:
        follower = Follower()
        for number in range(1000):
            follower.tell("round", number)
        return await follower.next()

    assert asyncio.run(main()) == ("round", 1000 - 256)


def test_orders_are_for_the_operator() -> None:
    async def scene(client: Client, site: FakeSite) -> None:
        assert (await client.post("/v1/orders", data=b"pause")).status == 403
        assert (await client.get("/api/digests")).status == 403
        wrong = {"Authorization": "Bearer guess"}
        assert (await client.post("/v1/orders", data=b"pause", headers=wrong)).status == 403
        assert site.asked == []
        right = {"Authorization": "Bearer s3cret"}
        assert (await client.post("/v1/orders", data=b"pause", headers=right)).status == 200
        refused = await client.post("/v1/orders", data=b"explode", headers=right)
        assert refused.status == 409
        assert (await refused.json())["reason"] == "no order of this run"
        long = b"x" * (limits.ORDER_BYTES + 1)
        assert (await client.post("/v1/orders", data=long, headers=right)).status == 413
        assert await (await client.get("/api/digests", headers=right)).json() == {"c": {"p": "d"}}
        assert site.asked == ["pause"]

    served(scene)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nope", 404), ("GET", "/v1/admit", 405)])
def test_errors_are_json(method: str, path: str, status: int) -> None:
    async def scene(client: Client, site: FakeSite) -> None:
        response = await client.request(method, path)
        assert response.status == status
        assert set(await response.json()) == {"code", "reason"}

    served(scene)


# -- pieces --------------------------------------------------------------------------------------------------------


def test_pieces_of_both_shards_by_hash(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    pieces = Pieces(folder.data, spec().data)
    train, val, hashes = shards()
    assert len(hashes) == 4  # 3 of the training shard, the last one shorter, and 1
    assert b"".join(pieces.read(hash_) or b"" for hash_ in hashes) == train + val
    assert pieces.read(bytes.fromhex(spec().data.root)) == b"".join(hashes)
    assert pieces.read(b"x" * 32) is None


def test_a_damaged_piece_is_not_served(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    pieces = Pieces(folder.data, spec().data)
    path = folder.data / "train.bin"
    path.write_bytes(path.read_bytes()[:100])
    _, _, hashes = shards()
    assert pieces.read(hashes[0])
    with pytest.raises(PieceDamaged, match=r"train\.bin"):
        pieces.read(hashes[1])


@pytest.mark.parametrize("content", ["", "[]", '{"pieces": ["00"]}', '{"pieces": [1]}', '{"pieces": []}'])
def test_a_bad_list_of_pieces_is_named(tmp_path: Path, content: str) -> None:
    folder = make_run(tmp_path / "run")
    (folder.data / "pieces.json").write_text(content)
    with pytest.raises(StateError, match=r"pieces\.json"):
        Pieces(folder.data, spec().data)
