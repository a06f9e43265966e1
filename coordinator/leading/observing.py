"""What members report that decides nothing: checked for sense, kept once, said by whom."""

from __future__ import annotations

from collections import OrderedDict

from coordinator.leading.ports import Observation
from coordinator.rounds.ledger import Ledger
from protos.messages import Evaluation, ExchangeReport, Heartbeat, Hello, PeerId

SUBJECTS_KEPT = 4096
"""So many reports are remembered, so that a repeated one is not written again."""
LONGEST_S = 30 * 86400.0
LOSS_MOST = 1e6


class Observing:
    """Turns reports into observations; what is implausible or has been said before gives none."""

    def __init__(self) -> None:
        self.heartbeats: dict[PeerId, Heartbeat] = {}
        self._seen: OrderedDict[tuple[str, PeerId, str], None] = OrderedDict()

    def hello(self, peer: PeerId, hello: Hello) -> list[Observation]:
        if not hello.holds_state:
            return []
        return self._digest(peer, hello.head, hello.digest)

    def heartbeat(self, peer: PeerId, heartbeat: Heartbeat) -> list[Observation]:
        """A peer's digest after a commit, the first time that it says so."""
        self.heartbeats[peer] = heartbeat
        return self._digest(peer, heartbeat.head, heartbeat.digest)

    def departed(self, peer: PeerId) -> None:
        """Its line has ended: its last heartbeat says nothing any more."""
        self.heartbeats.pop(peer, None)

    def report(self, peer: PeerId, message: ExchangeReport | Evaluation, ledger: Ledger) -> list[Observation]:
        """`ledger` is the head's: nobody can report of a round that is not over or just ending."""
        if message.epoch > ledger.epoch or message.round > ledger.round + 1:
            return []
        match message:
            case ExchangeReport():
                spans_s = (message.train_s, message.exchange_s, message.apply_s, message.idle_s, message.worked_s)
                if not all(0 <= span_s <= LONGEST_S for span_s in spans_s):
                    return []
                content = {
                    "bytes_sent": message.bytes_sent,
                    "bytes_received": message.bytes_received,
                    "train_s": message.train_s,
                    "exchange_s": message.exchange_s,
                    "apply_s": message.apply_s,
                }
                if message.idle_s or message.worked_s:  # an older node measures neither
                    content |= {"idle_s": message.idle_s, "worked_s": message.worked_s}
                return self._once(Observation("report", peer, round_subject(message.epoch, message.round), content))
            case Evaluation():
                if not 0 <= message.val_loss <= LOSS_MOST or not message.n_tokens:
                    return []
                content = {"val_loss": message.val_loss, "n_tokens": message.n_tokens, "round": message.round}
                return self._once(Observation("evaluation", peer, message.digest.hex(), content))

    def _digest(self, peer: PeerId, head: bytes, digest: bytes) -> list[Observation]:
        if not head or not digest:
            return []
        return self._once(Observation("digest", peer, head.hex(), {"digest": digest.hex()}))

    def _once(self, observation: Observation) -> list[Observation]:
        key = (observation.kind, observation.peer, observation.subject)
        if observation.kind == "digest":  # another digest for the same head is news
            key = (str(observation.content["digest"]), observation.peer, observation.subject)
        if key in self._seen:
            return []
        self._seen[key] = None
        if len(self._seen) > SUBJECTS_KEPT:
            self._seen.popitem(last=False)
        return [observation]


def round_subject(epoch: int, round_: int) -> str:
    """The subject of what concerns a round."""
    return f"{epoch}.{round_}"
