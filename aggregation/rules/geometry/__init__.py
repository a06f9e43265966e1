"""Geometry: from the (N, N) Gram matrix of a chunk's rows to a mixing of them, in fp64 and the same on every machine.

Pure functions without IO. No libm beyond sqrt, no LAPACK, no sums in an unspecified order: the same Gram matrix gives
the same bits everywhere.
"""

from __future__ import annotations

from aggregation.rules.geometry.clipping import arc, centered_clip, norm_clip
from aggregation.rules.geometry.diameter import mda, mda_fits
from aggregation.rules.geometry.distances import ROWS_MAX
from aggregation.rules.geometry.filtering import caf
from aggregation.rules.geometry.matrix import Mixing, mixed_gram
from aggregation.rules.geometry.median import geometric_median
from aggregation.rules.geometry.neighbours import nnm
from aggregation.rules.geometry.selection import bulyan_selection, krum, multi_krum

__all__ = [
    "ROWS_MAX",
    "Mixing",
    "arc",
    "bulyan_selection",
    "caf",
    "centered_clip",
    "geometric_median",
    "krum",
    "mda",
    "mda_fits",
    "mixed_gram",
    "multi_krum",
    "nnm",
    "norm_clip",
]
