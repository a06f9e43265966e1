"""Pieces of training data for tests: a run whose data were packed here, stores of nodes, and sources that count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from node.blocks import PieceStore
from node.sources import Donors, PeerSource, Sink
from node.training.shards import TRAIN_FILE, VAL_FILE
from protos.messages import PeerId
from protos.runspec import RunSpec
from tests.fakes.holder import FakeHolder
from tests.fakes.peers import FakePeers
from tests.node.chain import peer
from tests.node.runs import make_run

Run = tuple[RunSpec, PieceStore]
ME, OBSERVER, OTHER = peer(1), peer(2), peer(3)


def nodes(peers: FakePeers, *donors: PeerId, seconds: Callable[[], float] = lambda: 0.0) -> PeerSource:
    """These nodes as a source; the observer is one of them."""

    async def known() -> Donors:
        return [(donor, ()) for donor in donors]

    return PeerSource(peers, known, lambda: OBSERVER, seconds)


def now() -> float:
    return 0.0


def cut(path: str, offset: int, n_bytes: int) -> bytes:
    return Path(path).read_bytes()[offset : offset + n_bytes]


class Serving(FakeHolder):
    """A node that serves what its store holds."""

    def __init__(self, store: PieceStore) -> None:
        super().__init__(store.files.folder)
        self.store = store
        self.asked: list[bytes] = []

    def locate(self, caller: PeerId, kind: str, hash_: bytes) -> tuple[str, int, int] | None:
        self.asked.append(hash_)
        return self.store.locate(hash_) if kind == "piece" else None


class Counting:
    """A source that counts what it is asked for."""

    def __init__(self, inner: PieceStore) -> None:
        self.inner = inner
        self.asked: list[bytes] = []

    async def fetch(self, hashes: Sequence[bytes], max_bytes: int, sink: Sink, *, urgent: bool = True) -> None:
        for hash_ in hashes:
            self.asked.append(hash_)
            place = self.inner.locate(hash_)
            if place is not None:
                path, offset, n_bytes = place
                await sink(hash_, cut(path, offset, n_bytes))


def packed_run(folder: Path) -> Run:
    """A run and the store of a node that packed its data."""
    spec = make_run(folder)
    return spec, new_store(folder, spec)


def new_store(folder: Path, spec: RunSpec, *sources: object) -> PieceStore:
    store = PieceStore(folder, spec, sources)  # type: ignore[arg-type]
    store.open()
    return store


def whole(folder: Path) -> tuple[bytes, bytes]:
    return (folder / TRAIN_FILE).read_bytes(), (folder / VAL_FILE).read_bytes()
