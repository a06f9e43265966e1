"""Which codecs there are, by name and by the id in a frame's header. An id is never given a second meaning."""

from __future__ import annotations

from aggregation.codec.fp32 import Fp32
from aggregation.codec.frame import Codec
from aggregation.codec.int8 import Int8
from aggregation.errors import CodecError

_CODECS: tuple[Codec, ...] = (Int8(), Fp32())
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
