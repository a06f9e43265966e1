"""Model FLOPs and their share of a device's peak, against the figures that PaLM's paper gives for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.training.device import name_of, peak_flops_of
from node.training.presets import PRESETS
from node.training.utilisation import flops_per_token, peak_flops, utilisation
from protos.runspec import RunSpec
from tests.coordinator.rounds.cases import SPEC

PALM = {"n_layer": 118, "n_head": 48, "head_dim": 256, "n_embd": 18_432}
PALM_PARAMETERS = 540_350_000_000
TPU_V4, CHIPS, TOKENS_PER_S = 275e12, 6144, 238_300.0


def spec_of(config: dict[str, Any], n_parameters: int, sequence_length: int) -> RunSpec:
    model = SPEC.model.model_copy(update={"config": config, "n_parameters": n_parameters})
    data = SPEC.data.model_copy(update={"sequence_length": sequence_length})
    return SPEC.model_copy(update={"model": model, "data": data})


def test_the_figures_of_palms_appendix_b() -> None:
    """46.2 %, and 45.7 % without the attention's own products, at the throughput of table 3."""
    with_attention = flops_per_token(spec_of(PALM, PALM_PARAMETERS, 2048))
    without = flops_per_token(spec_of({"n_layer": 118}, PALM_PARAMETERS, 2048))
    assert utilisation(TOKENS_PER_S, with_attention, CHIPS * TPU_V4) == pytest.approx(0.462, abs=5e-4)
    assert utilisation(TOKENS_PER_S, without, CHIPS * TPU_V4) == pytest.approx(0.457, abs=5e-4)


def test_a_preset_counted_by_hand() -> None:
    preset = PRESETS["tiny"]
    spec = spec_of(preset.config, 117_120, preset.sequence_length)
    assert flops_per_token(spec) == 6 * 117_120 + 12 * 2 * 4 * 16 * 128  # N; L = 2, H = 4, Q = 64 / 4, T = 128


def test_the_size_of_a_head_may_be_said() -> None:
    wide = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}
    assert flops_per_token(spec_of(wide, 1000, 10)) == 6 * 1000 + 12 * 3 * 4 * 32 * 10
    assert flops_per_token(spec_of(wide | {"head_dim": None}, 1000, 10)) == 6 * 1000 + 12 * 3 * 64 * 10


@settings(max_examples=20)
@given(
    st.dictionaries(
        st.sampled_from(["num_hidden_layers", "n_layer", "hidden_size", "num_attention_heads", "head_dim"]),
        st.none() | st.integers(-2, 2**31) | st.booleans() | st.text(max_size=2) | st.floats() | st.just([1]),
    )
)
def test_whatever_a_config_says_the_parameters_count(config: dict[str, Any]) -> None:
    assert flops_per_token(spec_of(config, 1000, 10)) >= 6000


def test_without_a_speed_or_a_peak_nothing_is_said() -> None:
    assert utilisation(0.0, 6000.0, 1e12) is None
    assert utilisation(100.0, 6000.0, 0.0) is None
    assert utilisation(100.0, 6000.0, 1.2e6) == 0.5


def test_peaks_are_known_by_whole_names_and_by_precision() -> None:
    assert peak_flops("NVIDIA H200", "bf16") == 989e12
    assert peak_flops("NVIDIA H200", "fp32") == 67e12
    assert peak_flops("NVIDIA GeForce RTX 4090", "fp32") > peak_flops("NVIDIA GeForce RTX 3090", "fp32") > 0
    for device in ("cpu", "", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"):
        assert peak_flops(device, "fp32") == peak_flops(device, "bf16") == 0
    assert peak_flops("Tesla T4", "bf16") == 0  # it has none
    assert peak_flops("NVIDIA H200", "fp8") == 0


def test_a_processor_has_no_peak() -> None:
    parameter = torch.zeros(1)
    assert name_of(parameter.device) == "cpu"
    assert peak_flops_of(parameter) == 0.0


def test_a_devices_name_and_the_parameters_precision_find_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.training.device.name_of", lambda device: "NVIDIA A10")
    assert peak_flops_of(torch.zeros(1)) == 31.2e12
    assert peak_flops_of(torch.zeros(1, dtype=torch.bfloat16)) == 125e12
    assert peak_flops_of(torch.zeros(1, dtype=torch.float16)) == 0.0
