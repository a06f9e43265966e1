"""What a run is to be: a preset, a TOML file and `--set key=value`, checked and merged into one configuration.

It is a RunSpec without what only the data and the model can tell (counts, roots, digests). Keys are a RunSpec's.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from aggregation.spec import unknown_codec, unknown_rule
from coordinator.errors import UsageError
from protos.runspec import (
    CodecSpec,
    Count,
    DeadlineSpec,
    EvaluationSpec,
    InnerSpec,
    KeepSpec,
    MembershipSpec,
    OuterSpec,
    Part,
    Positive,
    RuleSpec,
    RunSpec,
    WorkSpec,
    changed_keys,
    tunable_keys,
)

PresetName = Literal["tiny", "150M", "1B", "7B"]
CONFIG_BYTES_MAX = 2**20


class ModelConfig(Part):
    config: dict[str, Any] = Field(default_factory=dict)
    """Keys of the Hugging Face config that differ from the preset's."""


class DataConfig(Part):
    path: Annotated[str, Field(min_length=1)] = "stdlib"
    """A file or a folder of text; `stdlib` is the source of the interpreter's own standard library."""
    sequence_length: Positive = 128


class RunConfig(Part):
    """What `init` is asked for, whole and valid."""

    name: Annotated[str, Field(max_length=100)] = ""
    seed: Count = 0
    preset: PresetName = "tiny"
    licence: Annotated[str, Field(max_length=200)] = "Apache-2.0"
    precisions: tuple[Literal["fp32", "bf16"], ...] = ("fp32",)
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    inner: InnerSpec = InnerSpec()
    outer: OuterSpec = OuterSpec()
    work: WorkSpec = WorkSpec()
    codec: CodecSpec = CodecSpec()
    rule: RuleSpec = RuleSpec()
    deadlines: DeadlineSpec = DeadlineSpec()
    membership: MembershipSpec = MembershipSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    keep: KeepSpec = KeepSpec()

    @model_validator(mode="after")
    def _batch_is_whole_sequences(self) -> RunConfig:
        if self.work.batch_tokens % self.data.sequence_length:
            raise ValueError(
                f"work.batch_tokens ({self.work.batch_tokens}) must be a multiple of data.sequence_length "
                f"({self.data.sequence_length})"
            )
        return self

    def spec_sections(self) -> dict[str, Any]:
        """What goes into the RunSpec as it is; `model` and `data` come from the packed data and the model itself."""
        return self.model_dump(mode="json", exclude={"model", "data"})

    def wish(self) -> dict[str, Any]:
        """What the node's tool is asked for."""
        return {
            **self.spec_sections(),
            "corpus": self.data.path,
            "model": {"config": self.model.config},
            "data": {"sequence_length": self.data.sequence_length},
        }


def _large(h: int, lr: float, batch_tokens: int, sequence_length: int) -> dict[str, Any]:
    return {
        "data": {"sequence_length": sequence_length},
        "inner": {"lr": lr, "warmup_steps": 1000, "beta2": 0.95},
        "outer": {"lr": 0.7, "momentum": 0.9},
        "work": {"batch_tokens": batch_tokens, "h": h},
        "deadlines": {
            "train_limit_s": 4 * 3600.0,
            "commitment_s": 600.0,
            "exchange_s": 8 * 3600.0,
            "vote_s": 8 * 3600.0,
            "heartbeat_s": 5.0,
            "heartbeat_timeout_s": 60.0,
            "gone_grace_s": 30.0,
        },
        "precisions": ["fp32", "bf16"],
    }


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "data": {"sequence_length": 128},
        "inner": {"lr": 3e-3, "warmup_steps": 50},
        "outer": {"lr": 0.7, "momentum": 0.6},
        "work": {"batch_tokens": 8 * 128, "h": 30},
        "codec": {"chunk_values": 2**13, "leaf_values": 2**10},
    },
    "150M": _large(500, 4e-4, 512 * 1024, 1024),
    "1B": _large(125, 4e-4, 512 * 2048, 2048),
    "7B": _large(100, 7.5e-5, 2**21, 2048),
}
"""What each preset sets beside RunConfig's defaults."""


def load(preset: str | None, file: Path | None, sets: Iterable[str]) -> RunConfig:
    """The configuration of these layers, later ones over earlier ones: preset, file, `--set`.

    Raises UsageError that names source, key and value, and for an unknown key the nearest one.
    """
    layers: list[tuple[str, dict[str, Any]]] = []
    if file is not None:
        layers.append((str(file), _read_toml(file)))
    layers += [(f"--set {text}", _parse_set(text)) for text in sets]
    for source, layer in layers:
        _refuse_unknown(RunConfig, layer, source, "")
    name = preset or next((layer["preset"] for _, layer in reversed(layers) if "preset" in layer), "tiny")
    if name not in PRESETS:
        raise UsageError(f"{name!r} is no preset", f"presets are {', '.join(PRESETS)}")
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, layer in [(f"preset {name}", PRESETS[name]), *layers]:
        _merge(merged, layer, source, sources, "")
    merged["preset"] = name
    _refuse_unknown_names(merged, sources)
    try:
        return RunConfig.model_validate_json(json.dumps(merged), strict=True)
    except ValidationError as error:
        raise _explained(error, sources) from error
    except (TypeError, ValueError) as error:  # dates and infinities of TOML have no JSON
        raise UsageError(f"the configuration holds a value of a kind that no setting has: {error}") from error


def amend(spec: RunSpec, sets: Iterable[str]) -> RunSpec:
    """The next revision of a RunSpec, with these settings changed.

    Raises UsageError that names key and value; for what can't change while the run goes on, too.
    """
    content = spec.model_dump(mode="json")
    sources: dict[str, str] = {}
    tunable = tunable_keys()
    for text in sets:
        layer = _parse_set(text)
        _refuse_unknown(RunConfig, layer, f"--set {text}", "")
        key = text.partition("=")[0].strip()
        if key not in tunable:
            close = difflib.get_close_matches(key, tunable, n=1, cutoff=0.5)
            near = f"did you mean {close[0]}?" if close else f"these can: {', '.join(tunable)}"
            raise UsageError(f"{key} can't change while the run goes on", near)
        _merge(content, layer, f"--set {text}", sources, "")
    if not sources:
        raise UsageError("nothing is to be changed", "give --set KEY=VALUE, such as --set inner.lr=0.001")
    _refuse_unknown_names(content, sources)
    content["revision"] = spec.revision + 1
    try:
        amended = RunSpec.model_validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        raise _explained(error, sources) from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"a setting holds a value of a kind that none has: {error}") from error
    if not changed_keys(spec, amended.model_copy(update={"revision": spec.revision})):
        raise UsageError("the run has these settings already", "coordinator status shows which revision is in force")
    return amended


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            raw = opened.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"--config {file} can't be read: {error.strerror}", "give the path of a TOML file") from error
    if len(raw) > CONFIG_BYTES_MAX:
        raise UsageError(f"--config {file} is longer than {CONFIG_BYTES_MAX} bytes", "give a TOML file of settings")
    try:
        return tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is no TOML: {error}", "correct the file") from error


def _parse_set(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UsageError(f"--set {text!r} is not key=value", "write for example --set work.h=10")
    parts = key.split(".")
    parsed: Any = value.strip() if _is_text(parts) else _parse_value(value.strip())
    for part in reversed(parts):
        parsed = {part: parsed}
    assert isinstance(parsed, dict)
    return parsed


def _parse_value(text: str) -> Any:
    """As TOML reads it; what TOML can't read is a word."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _is_text(parts: list[str]) -> bool:
    """Whether the key's field holds text, so that `--set name=2024` needs no quotes."""
    model: type[BaseModel] = RunConfig
    for index, part in enumerate(parts):
        field = model.model_fields.get(part)
        if field is None:
            return False
        if index == len(parts) - 1:
            return field.annotation is str
        inner = _section(field)
        if inner is None:
            return False
        model = inner
    return False


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """All dotted keys that a configuration may hold."""
    found: list[str] = []
    for name, field in model.model_fields.items():
        inner = _section(field)
        found += keys(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return found


def _refuse_unknown(model: type[BaseModel], layer: Mapping[str, Any], source: str, prefix: str) -> None:
    for name, value in layer.items():
        key = f"{prefix}{name}"
        field = model.model_fields.get(name)
        if field is None:
            raise UsageError(f"{source}: unknown key {key} (value {_shown(value)})", _nearest(key))
        inner = _section(field)
        if inner is None:
            continue
        if not isinstance(value, Mapping):
            raise UsageError(
                f"{source}: {key} is a section, not a value ({_shown(value)})",
                f"its keys are {', '.join(keys(inner, key + '.'))}",
            )
        _refuse_unknown(inner, value, source, f"{key}.")


def _refuse_unknown_names(merged: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    for section, why_not in (("rule", unknown_rule), ("codec", unknown_codec)):
        name = merged.get(section, {}).get("name")
        if isinstance(name, str) and (why := why_not(name)):
            _, _, help_ = why.partition(": ")
            key = f"{section}.name"
            raise UsageError(f"{sources[key]}: {key} = {_shown(name)} is no {section}", help_)


def _nearest(key: str) -> str:
    known = keys()
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not close:  # the right name in the wrong section
        last = key.rpartition(".")[2]
        names = {name.rpartition(".")[2]: name for name in reversed(known)}
        close = [names[match] for match in difflib.get_close_matches(last, names, n=1, cutoff=0.6)]
    return f"did you mean {close[0]}?" if close else f"sections are {', '.join(RunConfig.model_fields)}"


def _merge(into: dict[str, Any], layer: Mapping[str, Any], source: str, sources: dict[str, str], prefix: str) -> None:
    for name, value in layer.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key != "model.config":
            _merge(into.setdefault(name, {}), value, source, sources, f"{key}.")
        else:
            into[name] = value
            sources[key] = source


def _explained(error: ValidationError, sources: Mapping[str, str]) -> UsageError:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    key = ".".join(path)
    source = next((sources[".".join(path[:n])] for n in range(len(path), 0, -1) if ".".join(path[:n]) in sources), "")
    said = first["msg"].removeprefix("Value error, ")
    if not source:  # a relation between fields: the sentence names them
        return UsageError(f"{key}: {said}" if key else said, "change one of the settings it names")
    return UsageError(f"{source}: {key} = {_shown(first['input'])}: {said}", f"give {key} another value")


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
