"""Settings: layers in their order, and every mistake named with its source, key, value and the nearest right key."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.config import PRESETS, load
from coordinator.errors import UsageError


def refused(*sets: str, file: Path | None = None, preset: str | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        load(preset, file, sets)
    return str(caught.value)


def test_later_layers_stand_over_earlier_ones(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('name = "ours"\n[work]\nh = 11\nbatch_tokens = 2048\n[inner]\nlr = 0.5\n')
    config = load("tiny", file, ["work.h=12", "codec.name=fp32"])
    assert (config.work.h, config.work.batch_tokens, config.inner.lr) == (12, 2048, 0.5)
    assert (config.codec.name, config.codec.chunk_values, config.name) == ("fp32", 2**13, "ours")


def test_a_file_may_name_its_preset_and_the_command_line_overrules_it(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('preset = "150M"\n')
    assert load(None, file, []).work.h == 500
    assert load("1B", file, []).work.h == 125


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid(preset: str) -> None:
    config = load(preset, None, [])
    assert config.preset == preset
    assert config.work.batch_tokens % config.data.sequence_length == 0


def test_text_needs_no_quotes_and_lists_work() -> None:
    config = load(None, None, ["name=2024", 'precisions=["fp32","bf16"]', "rule.degraded=false"])
    assert config.name == "2024"
    assert config.precisions == ("fp32", "bf16")
    assert config.rule.degraded is False


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("work.hh=1", "work.h"),
        ("memberhsip.admission=invite", "membership.admission"),
        ("admision=invite", "membership.admission"),
        ("inner.learning_rate=1", "inner"),
    ],
)
def test_an_unknown_key_names_the_nearest(word: str, nearest: str) -> None:
    said = refused(word)
    assert f"--set {word}" in said
    assert nearest in said


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("work.h=ten", ("work.h", '"ten"', "integer")),
        ("work.h=-5", ("work.h", "-5")),
        ("work.h=2.5", ("work.h", "2.5")),
        ("work.h=true", ("work.h", "true")),
        ("inner.lr=inf", ("inner.lr",)),
        ("codec.name=int9", ("codec.name", "int9", "did you mean int8?", "fp32", "topk")),
        ("rule.name=kurm", ("rule.name", "kurm", "did you mean krum?", "default", "arc+nnm+trimmed_mean")),
        ("rule.name=arc+nmm+trimmed_mean", ("did you mean arc+nnm+trimmed_mean?",)),
        ("rule.name=krum+nnm", ("did you mean nnm+krum?",)),
        ("rule.name=3", ("rule.name", "is no rule", "median")),
        ("rule.replicas=5", ("rule.replicas", "5", "auto")),
        ("rule.fraction=0.6", ("rule.fraction", "0.6", "0.5")),
        ("rule.f_max=65537", ("rule.f_max", "65537")),
        ("work=3", ("work is a section",)),
        ("membership.admission=closed", ("membership.admission", "closed")),
        ("deadlines.heartbeat_s=9", ("heartbeat_timeout_s", "3 heartbeat_s")),
        ("deadlines.exchange_s=29", ("no_progress_s must not exceed exchange_s", "never replaced in time")),
        ("work.batch_tokens=1000", ("1000", "data.sequence_length")),
        ("codec.leaf_values=3000", ("leaf_values",)),
        ("codec.block=40", ("block", "multiple of 16", "40")),
        ("data.path=", ("data.path",)),
    ],
)
def test_a_wrong_value_names_key_and_value(word: str, parts: tuple[str, ...]) -> None:
    said = refused(word)
    for part in parts:
        assert part in said


@pytest.mark.parametrize(
    "name", ["default", "bulyan", "nnm", "arc+nnm+trimmed_mean", "norm_clip+median", "nnm+arc+krum"]
)
def test_every_rule_may_be_named(name: str) -> None:
    assert load(None, None, [f"rule.name={name}"]).rule.name == name


@pytest.mark.parametrize("name", ["int8", "fp32", "fp16", "int4", "topk"])
def test_every_codec_may_be_named(name: str) -> None:
    assert load(None, None, [f"codec.name={name}"]).codec.name == name


def test_topk_has_blocks_of_its_own() -> None:
    words = ["codec.name=topk", "codec.leaf_values=6144", "codec.chunk_values=6144"]
    assert load(None, None, [*words, "codec.block=128"]).codec.block == 128
    said = refused(*words, "codec.block=96")
    assert "topk" in said
    assert "multiple of 64" in said
    assert "4096" in refused("codec.name=topk", "codec.block=8192", "codec.leaf_values=8192")


def test_what_a_run_is_by_default() -> None:
    rule = load(None, None, []).rule
    assert (rule.name, rule.f_max, rule.fraction, rule.replicas, rule.weight_cap) == (
        "default",
        2**16,
        0.2,
        "auto",
        None,
    )
    assert load(None, None, []).codec.name == "int8"
    assert load(None, None, ["rule.replicas=2"]).rule.replicas == 2
    assert load(None, None, ["rule.replicas=auto"]).rule.replicas == "auto"


def test_a_file_is_named_with_its_mistake(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[work]\nh = "ten"\n')
    assert refused(file=file).startswith(f"{file}: work.h = ")
    file.write_text("[work\n")
    assert str(file) in refused(file=file)
    file.write_text("name = 1979-05-27\n")
    assert "name" in refused(file=file) or "kind" in refused(file=file)
    assert "can't be read" in refused(file=tmp_path / "missing.toml")


def test_words_that_are_no_setting() -> None:
    assert "key=value" in refused("work.h")
    assert "presets are" in refused(preset="2B")
