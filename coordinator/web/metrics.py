"""Prometheus metrics of the run, set anew from its status each time they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest


class Metrics:
    """A registry of its own: nothing that another library registers shows up here."""

    def __init__(self, run: str) -> None:
        self._registry = CollectorRegistry()
        self._info = self._gauge("run_info", "Always 1; says which run this is.", ("run",))
        self._info.labels(run).set(1)
        self._round = self._gauge("round", "Round in progress.")
        self._epoch = self._gauge("epoch", "Epoch of the head.")
        self._committed = self._gauge("rounds_committed", "Committed rounds with contributions.")
        self._tokens = self._gauge("tokens", "Tokens that counted, over the run.")
        self._val_loss = self._gauge("val_loss", "Newest validation loss, nats per token, as the observer says.")
        self._members = self._gauge("members", "Members by what they say that they do.", ("state",))
        self._rate = self._gauge("tokens_per_second", "Sum of what members say.")
        self._sent = self._gauge("members_sent_bytes", "Bytes that connected members have sent, as they measured.")
        self._received = self._gauge("members_received_bytes", "Bytes that connected members have received.")
        self._restarts = self._gauge("restarts", "Restarts of helper processes.", ("process",))

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"barnraise_{name}", text, labels, registry=self._registry)

    def render(self, status: Mapping[str, Any]) -> bytes:
        """The text format, from a run's status."""
        self._round.set(status["round"])
        self._epoch.set(status["epoch"])
        self._committed.set(status["n_committed"])
        self._tokens.set(status["tokens"])
        self._val_loss.set(float("nan") if status["val_loss"] is None else status["val_loss"])
        members = [member for member in status["members"] if not member["observer"]]
        self._members.clear()
        for state, n in Counter(str(member["state"]) for member in members).items():
            self._members.labels(state).set(n)
        self._rate.set(sum(member["tokens_per_s"] for member in members))
        self._sent.set(status["bytes_sent"])
        self._received.set(status["bytes_received"])
        for process, n in status["restarts"].items():
            self._restarts.labels(process).set(n)
        return generate_latest(self._registry)
