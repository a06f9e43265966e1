"""The RunSpec: everything that all nodes of a run must agree on, validated once and signed by the run key.

Its bytes are canonical JSON inside an envelope with purpose "runspec"; what is signed is those exact bytes, so a reader
never depends on how a writer orders its keys. Unknown keys are refused: a newer revision of the protocol names its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from protos.limits import PROTOCOL

SPEC_BYTES_MAX = 256 * 1024

Positive = Annotated[int, Field(gt=0, le=2**53)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]

TUNABLE: Final = "tunable"
T = TypeVar("T")
Tunable = Annotated[T, TUNABLE]
"""A field that an amendment may change while the run goes on. What the bytes of state, data and rows depend on is not:
it is what members have agreed on for good. Nor is what a process can take in at its start alone."""


class SpecError(ValueError):
    """A RunSpec that can't be: names the field."""


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class ModelSpec(Part):
    task: Literal["causal_lm"] = "causal_lm"
    config: dict[str, Any]
    """A Hugging Face config as JSON, with `model_type`."""
    tokenizer: str
    """`tokenizer.json`, whole, for a byte-level tokenizer; its hash is in `tokenizer_hash`."""
    tokenizer_hash: Hex32
    n_parameters: Positive
    n_values: Positive
    """D: values of the flat vector, block padding included."""
    layout_digest: Hex32
    initial_digest: Hex32


class DataSpec(Part):
    root: Hex32
    """Root of the Merkle tree over the pieces' BLAKE3 hashes, train shard then validation shard."""
    sequence_length: Positive
    token_bytes: Literal[1, 2, 4]
    """Width of a stored token, little-endian unsigned."""
    n_train_sequences: Positive
    n_val_sequences: Positive
    piece_bytes: Positive = 2**20
    sequences_per_piece: Positive
    """No sequence straddles a piece: a piece holds this many whole sequences (the last one fewer)."""
    seed: Count
    source: str
    """What it was made from, for people: "python standard library 3.11.7", a folder's name."""


class InnerSpec(Part):
    optimiser: Literal["adamw", "sgd"] = "adamw"
    lr: Tunable[Annotated[float, Field(ge=0, le=10)]] = 3e-3
    warmup_steps: Tunable[Count] = 50
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    weight_decay: Tunable[Annotated[float, Field(ge=0, le=10)]] = 0.1
    decay_exempt: Literal["one_dimensional", "none"] = "one_dimensional"
    clip_norm: Tunable[Annotated[float, Field(ge=0, le=1e6)]] = 1.0
    """Global gradient norm; 0 means no clipping."""
    decay_start: Tunable[Count] = 0
    """Step of the schedule's clock from which the rate falls, if it does; an amendment orders it, late in a run."""
    decay_steps: Tunable[Count] = 0
    """Over so many steps the rate falls, linearly, to 0; 0: it never falls."""

    def warmed(self, step: int) -> float:
        """Share of `lr` at a step of the schedule's clock: a linear warm-up, then constant, then a linear decay."""
        share = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        if self.decay_steps and step >= self.decay_start:
            share *= max(0.0, 1.0 - (step - self.decay_start) / self.decay_steps)
        return share


class OuterSpec(Part):
    lr: Tunable[Annotated[float, Field(ge=0, le=10)]] = 0.7
    momentum: Tunable[Annotated[float, Field(ge=0, lt=1)]] = 0.6


class WorkSpec(Part):
    batch_tokens: Positive = 1024
    h: Tunable[Annotated[int, Field(gt=0, le=10**6)]] = 30
    steps_min: Tunable[Positive] = 1
    batch_scale_max: Tunable[Annotated[int, Field(ge=1, le=64)]] = 4
    end_rounds: Tunable[Count] = 0
    """Committed rounds with contributions after which the run ends; 0: none."""
    end_tokens: Tunable[Count] = 0
    round_s: Tunable[Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]] = 0.0
    """How long the operator wants a round's training to take; 0: as long as H steps take."""


class CodecSpec(Part):
    name: Literal["int8", "fp32", "fp16", "int4", "topk"] = "int8"
    block: Annotated[int, Field(ge=32, le=65536)] = 1024
    chunk_values: Annotated[int, Field(ge=1024, le=2**24)] = 2**20
    leaf_values: Annotated[int, Field(ge=1024, le=2**20)] = 2**16

    @model_validator(mode="after")
    def _nested(self) -> CodecSpec:
        if self.block % 16:
            raise ValueError(f"block must be a multiple of 16, not {self.block}")
        if self.leaf_values % self.block or self.chunk_values % self.leaf_values:
            raise ValueError("chunk_values must be a multiple of leaf_values, and leaf_values of block")
        if self.name == "topk" and (self.block > 4096 or self.block % 64):
            raise ValueError(f"codec topk needs a block of at most 4096 and a multiple of 64, not {self.block}")
        return self


class RuleSpec(Part):
    name: Tunable[Annotated[str, Field(min_length=1, max_length=100)]] = "default"
    """One of `aggregation.rules`, compositions `a+b+c` included. That it is one is checked by who computes with it, so
    that what only reads a RunSpec needs no numerics."""
    f_max: Tunable[Annotated[int, Field(ge=0, le=2**16)]] = 2**16
    """The most Byzantine contributions to plan for, as many as `fraction` gives by default; 0 gives up robustness."""
    fraction: Tunable[Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)]] = 0.2
    """Share of the contributions that may be Byzantine: f of N is ⌊fraction·N⌋, at least 1 from N = 3 on."""
    weight_cap: Tunable[Annotated[float, Field(ge=1, le=1e6)] | None] = None
    """Times the median of the tokens that a contribution weighs at most. None: 2 in open runs, 8 in others."""
    gate_low: Tunable[Annotated[float, Field(ge=0, le=1)]] = 0.1
    gate_high: Tunable[Annotated[float, Field(ge=1, le=1e6)]] = 3.0
    replicas: Tunable[Literal["auto", 1, 2, 3, 4]] = "auto"
    """Reducers of a chunk. auto: all that can be reached while that costs each at most 16 MiB, else f + 1; 1 in
    allow-list runs."""
    degraded: Tunable[bool | None] = None
    """Whether one or two contributions make a round, of which nobody can tell which lies; None: not in open runs."""


class DeadlineSpec(Part):
    train_limit_s: Tunable[Seconds] = 600.0
    commitment_s: Tunable[Seconds] = 60.0
    exchange_s: Tunable[Seconds] = 120.0
    vote_s: Tunable[Seconds] = 120.0
    heartbeat_s: Tunable[Seconds] = 1.0
    heartbeat_timeout_s: Tunable[Seconds] = 15.0
    gone_grace_s: Tunable[Seconds] = 3.0
    """How long a seated member whose line broke is still waited for: reconnecting takes about a second."""
    no_progress_s: Seconds = 30.0
    """A transfer without a byte for this long is given up and goes elsewhere."""
    minority_wait_s: Tunable[Seconds] = 300.0
    stand_in_s: Tunable[Seconds] = 20.0
    """The k-th stand-in asks for promises after (k + 1) times so long a silence of the leader."""
    deadline_k: Tunable[Annotated[float, Field(ge=0, le=100)]] = 1.0
    """TRAIN ends so many median absolute deviations after the median of the announced finish times, within bounds that
    `coordinator.rounds.deadline` gives; 0: it waits for all, and `train_limit_s` alone ends it. Who is late contributes
    what it has, so little is won by waiting: 3 costs 1 % where members slow down for a while (`tests.bench churn`)."""
    max_absence_s: Tunable[Seconds] = 7 * 86400.0

    @model_validator(mode="after")
    def _nested(self) -> DeadlineSpec:
        if self.heartbeat_timeout_s < 3 * self.heartbeat_s:
            raise ValueError("heartbeat_timeout_s must be at least 3 heartbeat_s")
        if self.no_progress_s > self.exchange_s:
            raise ValueError(
                "no_progress_s must not exceed exchange_s, or a stalled transfer is never replaced in time"
            )
        return self


class MembershipSpec(Part):
    admission: Literal["open", "invite", "allow_list"] = "open"
    start_contributors: Tunable[Annotated[int, Field(ge=1, le=10000)]] = 1
    min_contributors: Tunable[Annotated[int, Field(ge=1, le=10000)]] = 1
    max_members: Tunable[Annotated[int, Field(ge=1, le=10000)]] = 1024


class KeepSpec(Part):
    results: Annotated[int, Field(ge=1, le=1000)] = 16
    """Commits whose results a reachable member keeps, so that who was away replays them."""
    snapshot_every: Annotated[int, Field(ge=1, le=1000)] = 8
    """Commits between two frozen snapshots, which donors serve while the state moves on."""

    @model_validator(mode="after")
    def _overlap(self) -> KeepSpec:
        if self.snapshot_every > self.results:
            raise ValueError("snapshot_every must not exceed results, or a snapshot's results are gone before the next")
        return self


class EvaluationSpec(Part):
    every_rounds: Tunable[Count] = 1
    max_tokens: Tunable[Positive] = 65536


class RunSpec(Part):
    """Shapes, hyperparameters, limits of a run. Revision 1 is made by `coordinator init`; amendments count up."""

    name: Annotated[str, Field(max_length=100)] = ""
    revision: Positive = 1
    protocol: Positive = PROTOCOL
    numerics_version: Positive = 2
    seed: Count = 0
    preset: str = "tiny"
    model: ModelSpec
    data: DataSpec
    inner: InnerSpec = InnerSpec()
    outer: OuterSpec = OuterSpec()
    work: WorkSpec = WorkSpec()
    codec: CodecSpec = CodecSpec()
    rule: RuleSpec = RuleSpec()
    deadlines: DeadlineSpec = DeadlineSpec()
    membership: MembershipSpec = MembershipSpec()
    keep: KeepSpec = KeepSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    precisions: tuple[Literal["fp32", "bf16"], ...] = ("fp32",)
    licence: Annotated[str, Field(max_length=200)] = "Apache-2.0"

    @model_validator(mode="after")
    def _batch_is_whole_sequences(self) -> RunSpec:
        if self.work.batch_tokens % self.data.sequence_length:
            raise ValueError("work.batch_tokens must be a multiple of data.sequence_length")
        if self.n_batches < 1:
            raise ValueError("data.n_train_sequences holds less than one batch")
        return self

    @property
    def batch_sequences(self) -> int:
        """Sequences of one inner step's batch."""
        return self.work.batch_tokens // self.data.sequence_length

    @property
    def n_batches(self) -> int:
        """Whole batches in one pass over the training data; a shorter remainder is not used."""
        return self.data.n_train_sequences // self.batch_sequences

    def to_bytes(self) -> bytes:
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(raw: bytes) -> RunSpec:
        """Parse and validate. Raises SpecError with the first field that is wrong."""
        if len(raw) > SPEC_BYTES_MAX:
            raise SpecError(f"RunSpec of {len(raw)} bytes exceeds the limit of {SPEC_BYTES_MAX}")
        try:
            return RunSpec.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "RunSpec"
            raise SpecError(f"{where}: {first['msg']}") from error


# -- amendments --------------------------------------------------------------------------------------------------


def tunable_keys() -> tuple[str, ...]:
    """The dotted keys that an amendment may change."""
    return tuple(key for key, tunable in _leaves(RunSpec, "") if tunable)


def amendment_faults(before: RunSpec, after: RunSpec) -> list[str]:
    """Why `after` is no amendment of `before`: another revision than the next, or changes of what is not tunable."""
    faults: list[str] = []
    if after.revision != before.revision + 1:
        faults.append(f"revision {after.revision} doesn't follow revision {before.revision}")
    tunable = dict(_leaves(RunSpec, ""))
    changed = [key for key in changed_keys(before, after) if not tunable.get(key, False)]
    faults += [f"{key} can't change while the run goes on" for key in changed if key != "revision"]
    return faults


def changed_keys(before: RunSpec, after: RunSpec) -> list[str]:
    """The dotted keys whose values differ, in the order of the fields."""
    first, second = before.model_dump(mode="json"), after.model_dump(mode="json")
    return [key for key, _ in _leaves(RunSpec, "") if _at(first, key) != _at(second, key)]


def _leaves(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, bool]]:
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", TUNABLE in field.metadata


def _at(content: Mapping[str, Any], key: str) -> Any:
    value: Any = content
    for part in key.split("."):
        value = value[part]
    return value
