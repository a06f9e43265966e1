"""The models of the presets, as data. What else a preset sets is the coordinator's to say.

All of them use the byte-level tokenizer: a RunSpec carries its tokenizer whole, and the vocabularies of megabytes
that larger runs use do not fit into one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VOCABULARY = 257  # 256 bytes and the end of a text


@dataclass(frozen=True, slots=True)
class Preset:
    """A Hugging Face config, and the sequence length that it is made for."""

    config: dict[str, Any]
    sequence_length: int


def _llama(
    *, hidden: int, intermediate: int, layers: int, heads: int, key_value_heads: int, length: int, tied: bool
) -> Preset:
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "max_position_embeddings": length,
        "tie_word_embeddings": tied,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "bos_token_id": VOCABULARY - 1,
        "eos_token_id": VOCABULARY - 1,
    }
    return Preset(config, length)


PRESETS: dict[str, Preset] = {
    # 117,120 parameters.
    "tiny": _llama(hidden=64, intermediate=176, layers=2, heads=4, key_value_heads=4, length=128, tied=True),
    # 0.154 B.
    "150M": _llama(hidden=1024, intermediate=2816, layers=12, heads=16, key_value_heads=16, length=1024, tied=True),
    # 1.08 B.
    "1B": _llama(hidden=2048, intermediate=5632, layers=24, heads=32, key_value_heads=8, length=2048, tied=False),
    # 6.98 B.
    "7B": _llama(hidden=4096, intermediate=12288, layers=32, heads=32, key_value_heads=32, length=2048, tied=False),
}
