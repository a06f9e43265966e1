"""Which codecs there are, by name and by the id in a frame's header. An id is never given a second meaning."""

from __future__ import annotations

from aggregation.codec.fp16 import Fp16
from aggregation.codec.fp32 import Fp32
from aggregation.codec.frame import Codec
from aggregation.codec.int4 import Int4
from aggregation.codec.int8 import Int8
from aggregation.codec.topk import TopK
from aggregation.errors import CodecError

_CODECS: tuple[Codec, ...] = (Int8(), Fp32(), Fp16(), Int4(), TopK())
_BY_NAME = {codec.name: codec for codec in _CODECS}
_BY_ID = {codec.id: codec for codec in _CODECS}


def names() -> list[str]:
    """The codecs that a run may name."""
    return list(_BY_NAME)


def by_name(name: str) -> Codec:
    """The codec of that name; raises CodecError."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise CodecError(f"no codec {name!r}; there are {', '.join(_BY_NAME)}") from None


def by_id(codec_id: int) -> Codec:
    """The codec with that id in a frame's header; raises CodecError."""
    try:
        return _BY_ID[codec_id]
    except KeyError:
        raise CodecError(f"no codec has id {codec_id}") from None


def result_codec(name: str) -> str:
    """The codec of the results of contributions in `name`; raises CodecError.

    Itself where a value keeps enough of its bits. A reducer has no residual in which to keep what a coarse codec drops,
    so a second coarse step would lose small values for good: sums of `int4` and `topk` rows travel back as `int8`.
    """
    return "int8" if feedback_decay(name) is not None else by_name(name).name


def feedback_decay(name: str) -> float | None:
    """What a sender's residual is multiplied by before the next delta is added, None without error feedback.

    `int4` keeps all of it. `topk` 0.95, SparseLoCo's (arXiv 2508.15706), since a value may wait for many rounds and
    what is old points elsewhere. Raises CodecError for an unknown codec.
    """
    return {"int4": 1.0, "topk": 0.95}.get(by_name(name).name)
