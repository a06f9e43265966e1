"""What the attacked runs train: a small network on scikit-learn's digits, by eight workers with unequal shards.

The workers' networks are rows of one (W, D) tensor, so that a step of all of them is a handful of batched products.
Nothing mixes rows: the loss is a sum over workers, and AdamW works value by value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aggregation.vector import Layout, layout_of

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]

N_WORKERS = 8
N_CLASSES = 10
N_HIDDEN = 48
BATCH = 32
INNER_LR = 3e-3
"""The `tiny` preset's. At 1e-3, AdamW's own default, the default rule's worst case is 84.7 % in place of 89.3."""
BLOCK = 64
TEST_SHARE = 0.2

_SHAPES = (("first", (64, N_HIDDEN)), ("second", (N_HIDDEN, N_CLASSES)), ("hidden", (N_HIDDEN,)), ("out", (N_CLASSES,)))


def layout() -> Layout:
    """Where the 64-48-10 network's parameters lie in the flat vector (D,)."""
    return layout_of(list(_SHAPES), block=BLOCK)


@dataclass(frozen=True)
class Digits:
    """Images (·, 64) in [0, 1] and labels, split for training and testing, and each worker's shard of the former."""

    train_x: Floats
    train_y: Labels
    test_x: Floats
    test_y: Labels
    shards: tuple[Labels, ...]


@lru_cache(maxsize=4)
def digits(seed: int, *, alpha: float) -> Digits:
    """Split by seed; how much of each class a worker has is drawn from a Dirichlet distribution of that alpha."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    x, y = load_digits(return_X_y=True)
    x, y = (x / 16).astype(np.float32), y.astype(np.int64)
    generator = np.random.default_rng((seed, 1))
    order = generator.permutation(len(x))
    n_test = int(TEST_SHARE * len(x))
    test, train = order[:n_test], order[n_test:]
    while True:
        shards: list[list[int]] = [[] for _ in range(N_WORKERS)]
        for label in range(N_CLASSES):
            members = generator.permutation(np.flatnonzero(y[train] == label))
            cuts = np.cumsum(generator.dirichlet(np.full(N_WORKERS, alpha)))[:-1] * len(members)
            for shard, part in zip(shards, np.split(members, cuts.astype(np.int64)), strict=True):
                shard.extend(part.tolist())
        if min(map(len, shards)) >= BATCH:
            break
    return Digits(x[train], y[train], x[test], y[test], tuple(np.array(sorted(shard), np.int64) for shard in shards))


class Workers:
    """Eight workers that keep their AdamW moments from round to round; `flipped` ones learn 9 - label."""

    def __init__(self, data: Digits, seed: int, *, h: int, flipped: frozenset[int] = frozenset()) -> None:
        self._data, self._h, self._layout = data, h, layout()
        self._generator = np.random.default_rng((seed, 2))
        self._flipped_W = np.array([worker in flipped for worker in range(N_WORKERS)])
        self._theta_WD = torch.zeros(N_WORKERS, self._layout.n_values, requires_grad=True)
        self._optimiser = torch.optim.AdamW([self._theta_WD], lr=INNER_LR)
        self.sum_lr = h * INNER_LR

    def initial(self, seed: int) -> Floats:
        """θ_0: uniform within ±1/√inputs, as torch.nn.Linear starts."""
        generator = np.random.default_rng((seed, 3))
        theta_D = np.zeros(self._layout.n_values, np.float32)
        for entry in self._layout.entries:
            bound = 1 / np.sqrt(64 if entry.name in ("first", "hidden") else N_HIDDEN)
            values = generator.uniform(-bound, bound, entry.n_values)
            theta_D[entry.offset : entry.offset + entry.n_values] = values
        return theta_D

    def train(self, anchor_D: Floats) -> Floats:
        """H inner steps of each worker from the anchor; their pseudo-gradients (W, D), anchor minus where they came."""
        anchor = torch.from_numpy(anchor_D)
        with torch.no_grad():
            self._theta_WD.copy_(anchor)
        picks = [shard[self._generator.integers(0, len(shard), (self._h, BATCH))] for shard in self._data.shards]
        x_WHBI = torch.from_numpy(self._data.train_x[np.stack(picks)])
        labels = self._data.train_y[np.stack(picks)]
        y_WHB = torch.from_numpy(np.where(self._flipped_W[:, None, None], N_CLASSES - 1 - labels, labels))
        for step in range(self._h):
            self._optimiser.zero_grad()
            logits_WBC = self._logits(self._theta_WD, x_WHBI[:, step])
            loss = torch.nn.functional.cross_entropy(
                logits_WBC.flatten(0, 1), y_WHB[:, step].flatten(), reduction="sum"
            )
            (loss / BATCH).backward()  # type: ignore[no-untyped-call]
            self._optimiser.step()
        return (anchor - self._theta_WD.detach()).numpy()

    def accuracy(self, theta_D: Floats) -> float:
        """Share of the test images that the network names rightly, in percent."""
        with torch.no_grad():
            logits_WBC = self._logits(torch.from_numpy(theta_D)[None], torch.from_numpy(self._data.test_x)[None])
        return 100 * float(np.mean(logits_WBC[0].argmax(1).numpy() == self._data.test_y))

    def _logits(self, theta_WD: Tensor, x_WBI: Tensor) -> Tensor:
        first, second, hidden, out = (
            theta_WD[:, entry.offset : entry.offset + entry.n_values].reshape(-1, *entry.shape)
            for entry in self._layout.entries
        )
        hidden_WBJ = torch.relu(x_WBI @ first + hidden[:, None])
        logits_WBC: Tensor = hidden_WBJ @ second + out[:, None]
        return logits_WBC
