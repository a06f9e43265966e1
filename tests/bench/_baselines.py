"""All-reduces of others to measure against, in processes of their own: gloo's fp32 and hivemind's fp16 averager.

Run as `python -m tests.bench._baselines KIND RANK PEERS VALUES SEED FOLDER` this module is one worker, which takes a
word a line on standard input (`prepare`, `go`, `measure`, `close`) and answers one JSON line each. A worker leads a
process group, which ends with it when its input ends, whatever became of who started it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from tests.bench import report

Floats = NDArray[np.float32]

START_S = 120.0
TURN_S = 180.0
SAMPLED_EVERY = 61
"""The outcome is compared with the true mean at every so many values: each part of a transfer has thousands of them."""
HIVEMIND_TENSOR_VALUES = 1 << 20
"""hivemind hands out a tensor only whole: in pieces it overlaps more, and takes some 6 % less time than for one."""


TRIES = 5
"""Turns of a baseline until one averages: now and then hivemind leaves a peer's values out and reports success, or its
peers wait for each other until their time is up."""
HIVEMIND_S = 30.0


class BaselineFailed(RuntimeError):
    """A baseline that did not start, did not finish, or finished without having averaged."""


class NotAveraged(BaselineFailed):
    """A turn ended without the mean; the next one may not."""


def gaussian(seed: int, peer: int, n_values: int) -> Floats:
    """The input of one peer: standard normal values, the same in every process."""
    return np.random.default_rng((seed, peer)).standard_normal(n_values, np.float32)


def relative_error(found: Floats, wanted: Floats | NDArray[np.float64]) -> float:
    """‖found - wanted‖ / ‖wanted‖, infinite where something is not finite."""
    difference = found.astype(np.float64) - wanted.astype(np.float64)
    error = float(np.linalg.norm(difference) / np.linalg.norm(wanted.astype(np.float64)))
    return error if math.isfinite(error) else math.inf


class Baseline:
    """Long-lived workers, one a peer, that repeat the same all-reduce; a context manager.

    `error` is the largest relative error against the true mean that any peer had in any turn, NaN before the first.
    """

    def __init__(self, kind: str, n_peers: int, n_values: int, *, seed: int, error_limit: float) -> None:
        self.name = kind
        self.error = math.nan
        self._error_limit = error_limit
        self._folder = Path(tempfile.mkdtemp(prefix="barnraise-bench-"))
        self._workers: list[_Worker] = []
        try:
            for rank in range(n_peers):
                words = [kind, str(rank), str(n_peers), str(n_values), str(seed), str(self._folder)]
                self._workers.append(_Worker(f"{kind} {rank}", words, self._folder / f"worker-{rank}.err"))
            for worker in self._workers:
                worker.answer(START_S)
        except BaseException:
            self.close()
            raise

    def turn(self) -> float:
        """Seconds from a common start to the end of the slowest peer; raises BaselineFailed, NotAveraged.

        What comes before an all-reduce (fresh inputs, hivemind's matchmaking) is done before the start, and the error
        is measured after the end.
        """
        self._all("prepare")
        began = time.monotonic()
        answers = self._all("go")
        if missed := next((answer["missed"] for answer in answers if "missed" in answer), ""):
            raise NotAveraged(f"{self.name}: {missed}")
        ended_at: float = max(answer["ended_at"] for answer in answers)  # one clock for all processes of a machine
        error = max(answer["error"] for answer in self._all("measure"))
        self.error = error if math.isnan(self.error) else max(self.error, error)
        if not error <= self._error_limit:
            raise NotAveraged(f"{self.name} reports success, but its relative error is {error:.3g}")
        return ended_at - began

    def average(self) -> float:
        """As `turn`, again where it did not average, a few times."""
        for _ in range(TRIES - 1):
            try:
                return self.turn()
            except NotAveraged as error:
                report.say(f"{error}: that turn does not count")
        return self.turn()

    def close(self) -> None:
        """End the workers and all that they started, and remove their files."""
        for worker in self._workers:
            worker.ask("close")
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _all(self, word: str) -> list[dict[str, Any]]:
        for worker in self._workers:
            worker.ask(word)
        return [worker.answer(TURN_S) for worker in self._workers]

    def __enter__(self) -> Baseline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def gloo_fp32(n_peers: int, n_values: int, *, seed: int = 0) -> Baseline:
    """torch.distributed's gloo on loopback: the sum of fp32 values, unencrypted. The division is not in its time."""
    return Baseline("gloo", n_peers, n_values, seed=seed, error_limit=1e-5)


def hivemind_fp16(n_peers: int, n_values: int, *, seed: int = 0) -> Baseline:
    """hivemind's DecentralizedAverager with fp16 compression, a DHT and a p2pd a peer, over loopback."""
    return Baseline("hivemind", n_peers, n_values, seed=seed, error_limit=0.01)


class _Worker:
    def __init__(self, name: str, words: list[str], errors: Path) -> None:
        self._name, self._errors = name, errors
        with errors.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.bench._baselines", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": _loopback(), "PYTHONWARNINGS": "ignore"},
                start_new_session=True,
            )
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, word: str) -> None:
        """Send a word; a worker that is gone says so when its answer is read."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise BaselineFailed(f"{self._name} did not answer within {timeout_s:.0f} s{self._last_words()}") from None
        if not line:
            raise BaselineFailed(f"{self._name} ended{self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise BaselineFailed(f"{self._name}: {answer['failed']}")
        return answer

    def end(self) -> None:
        """Wait for its end, and see to it: the group is killed with whatever hivemind has forked into it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(15.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(b"")

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._errors.read_text(errors="replace").strip().splitlines()
            return ": " + " | ".join(lines[-3:]) if lines else ""
        return ""


def _loopback() -> str:
    return "lo" if sys.platform == "linux" else "lo0"


class _Collective(Protocol):
    """One peer's side of an all-reduce, in a worker."""

    def prepare(self, input_D: Floats) -> None: ...

    def go(self) -> None: ...

    def outcome(self) -> Floats:
        """Every SAMPLED_EVERY-th value of the mean."""
        ...

    def close(self) -> None: ...


class _Gloo:
    def __init__(self, rank: int, n_peers: int, n_values: int, folder: Path) -> None:
        import torch
        from torch import distributed

        torch.set_num_threads(1)
        self._all_reduce, self._destroy, self._n_peers = (
            distributed.all_reduce, distributed.destroy_process_group, n_peers,
        )  # fmt: skip
        distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=n_peers)
        self._values = torch.zeros(n_values)

    def prepare(self, input_D: Floats) -> None:
        self._values.numpy()[:] = input_D

    def go(self) -> None:
        self._all_reduce(self._values)

    def outcome(self) -> Floats:
        outcome: Floats = np.divide(self._values.numpy()[::SAMPLED_EVERY], self._n_peers, dtype=np.float32)
        return outcome

    def close(self) -> None:
        self._destroy()


class _Hivemind:
    def __init__(self, rank: int, n_peers: int, n_values: int, folder: Path) -> None:
        import hivemind
        import torch
        from hivemind.averaging.control import AveragingStage
        from hivemind.p2p import P2P

        torch.set_num_threads(1)
        P2P._UNIX_SOCKET_PREFIX = f"/unix{folder}/"  # its sockets outlive it, so they go with the folder
        self._stages = (AveragingStage.AWAITING_TRIGGER, AveragingStage.FINISHED)
        self._n_peers = n_peers
        addresses = folder / "addresses"
        if rank == 0:
            self._dht = hivemind.DHT(start=True, **self._quiet())
            draft = folder / "addresses.draft"
            draft.write_text("\n".join(map(str, self._dht.get_visible_maddrs())))
            draft.rename(addresses)
        else:
            deadline = time.monotonic() + START_S
            while not addresses.exists():
                if time.monotonic() > deadline:
                    raise BaselineFailed("the first peer published no address")
                time.sleep(0.02)
            self._dht = hivemind.DHT(addresses.read_text().split(), start=True, **self._quiet())
        sizes = [min(HIVEMIND_TENSOR_VALUES, n_values - at) for at in range(0, n_values, HIVEMIND_TENSOR_VALUES)]
        self._averager = hivemind.averaging.DecentralizedAverager(
            [torch.zeros(size) for size in sizes],
            self._dht,
            start=True,
            prefix="bench",
            target_group_size=n_peers,
            min_group_size=n_peers,
            min_matchmaking_time=2.0,
            compression=hivemind.compression.Float16Compression(),
            allow_state_sharing=False,
        )
        self._step: Any = None

    @staticmethod
    def _quiet() -> dict[str, Any]:
        return {"use_relay": False, "auto_nat": False, "nat_port_map": False}

    def prepare(self, input_D: Floats) -> None:
        at = 0
        with self._averager.get_tensors() as tensors:
            for tensor in tensors:
                tensor.numpy()[:] = input_D[at : at + tensor.numel()]
                at += tensor.numel()
        self._step = self._averager.step(wait=False, require_trigger=True, timeout=HIVEMIND_S)
        while self._step.stage not in self._stages and not self._step.done():
            time.sleep(0.005)

    def go(self) -> None:
        self._step.allow_allreduce()
        group = self._step.result(timeout=HIVEMIND_S)
        if group is None or len(group) != self._n_peers:
            raise BaselineFailed(f"averaged with {len(group or ())} of {self._n_peers} peers")

    def outcome(self) -> Floats:
        with self._averager.get_tensors() as tensors:
            return np.concatenate([tensor.numpy() for tensor in tensors])[::SAMPLED_EVERY]

    def close(self) -> None:
        self._averager.shutdown()
        self._dht.shutdown()


_KINDS: dict[str, Callable[[int, int, int, Path], _Collective]] = {"gloo": _Gloo, "hivemind": _Hivemind}


def _work(kind: str, rank: int, n_peers: int, n_values: int, seed: int, folder: Path) -> None:
    words = _words(folder)
    answers = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # what libraries print is no answer

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")

    try:
        collective = _KINDS[kind](rank, n_peers, n_values, folder)
        inputs = [gaussian(seed, peer, n_values) for peer in range(n_peers)]
        wanted = np.stack([values[::SAMPLED_EVERY] for values in inputs]).astype(np.float64).mean(axis=0)
        input_D = inputs[rank]
        del inputs
        say({"ready": True})
        while (word := words.get()) != "close":
            if word == "prepare":
                collective.prepare(input_D)
                say({"ready": True})
            elif word == "go":
                try:
                    collective.go()
                    say({"ended_at": time.monotonic()})
                except Exception as error:
                    say({"missed": f"{type(error).__name__} {error}".rstrip()})
            elif word == "measure":
                say({"error": relative_error(collective.outcome(), wanted)})
        with contextlib.suppress(Exception):
            collective.close()
    except Exception as error:
        say({"failed": f"{type(error).__name__}: {error}"})
        words.get()  # stay until the other side has read it
    _end_group(folder)


def _words(folder: Path) -> queue.Queue[str]:
    """Words from standard input; the group ends when the input does."""
    words: queue.Queue[str] = queue.Queue()

    def read() -> None:
        # Without sys.stdin, whose lock a fork would find held, and without a buffer, which would share words with it.
        with open(0, "rb", buffering=0, closefd=False) as lines:
            for line in lines:
                words.put(line.decode().strip())
        _end_group(folder)

    threading.Thread(target=read, daemon=True).start()
    return words


def _end_group(folder: Path) -> NoReturn:
    """Kill this process with all that hivemind forked, none of which can be trusted to notice."""
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgid(0), signal.SIGKILL)
    raise SystemExit(1)


if __name__ == "__main__":
    _kind, *_numbers, _folder = sys.argv[1:]
    _rank, _n_peers, _n_values, _seed = map(int, _numbers)
    _work(_kind, _rank, _n_peers, _n_values, _seed, Path(_folder))
