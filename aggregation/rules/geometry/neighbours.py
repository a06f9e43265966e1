"""Nearest-neighbour mixing: each row becomes the mean of the rows around it."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from aggregation.rules.geometry.distances import checked_gram, neighbours, squared_distances
from aggregation.rules.geometry.matrix import Mixing, with_fixed


def nnm(gram_NN: ArrayLike, f: int, *, n_fixed: int = 0) -> Mixing:
    """NNM (Allouah et al. 2023, arXiv 2302.01772): y_i = mean of the N - f rows nearest to x_i, itself included.

    (N, N) -> N rows; needs N >= 2f + 1; O(N² log N). Ties by lowest index. A row whose N - f nearest are all the same
    as itself stays as it is. The last `n_fixed` rows of the Gram matrix (a centre) are nobody's neighbour and stay.
    For f = 0 all mixed rows are the mean.
    """
    gram = checked_gram(gram_NN, f=f, needed=2 * f + 1, n_fixed=n_fixed)
    n = len(gram) - n_fixed
    distances = squared_distances(gram[:n, :n])
    order = neighbours(distances)
    numerators = np.zeros((n, n), np.float32)
    divisors = np.ones(n, np.float32)
    for i in range(n):
        if distances[i, order[i, n - f - 1]] == 0:
            numerators[i, i] = 1
        else:
            numerators[i, order[i, : n - f]] = 1
            divisors[i] = n - f
    return with_fixed(Mixing(numerators, divisors), n_fixed)
