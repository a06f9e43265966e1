"""What a simulated world is like: one frozen set of options, which with its seed decides all that happens in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protos.runspec import (
    CodecSpec,
    DataSpec,
    DeadlineSpec,
    InnerSpec,
    MembershipSpec,
    ModelSpec,
    RuleSpec,
    RunSpec,
    WorkSpec,
)

CHUNK_VALUES = 1024
SHORT = DeadlineSpec(
    train_limit_s=60.0,
    commitment_s=8.0,
    exchange_s=12.0,
    vote_s=12.0,
    heartbeat_s=1.0,
    heartbeat_timeout_s=5.0,
    gone_grace_s=2.0,
    no_progress_s=6.0,
)


@dataclass(frozen=True, slots=True)
class Options:
    """A world before anything goes wrong in it, and what its network does to messages."""

    seed: int = 0

    # who takes part
    n_members: int = 3
    n_leaders: int = 1
    """Leader 0 is the coordinator; the others lead as well, from number 1 on, and share nothing with it."""
    observer: bool = True
    n_newcomers: int = 0
    """The last so many members begin without the state, and fetch it."""
    unreachable: tuple[int, ...] = ()
    """Members nobody can connect to."""

    all_vote: bool = False
    """Whether all members are voters of round 1 already, so that it is a contest of ballots without an exchange."""

    # the run
    h: int = 4
    round_s: float = 0.0
    """How long the operator wants a round's training to take; 0: no aim."""
    n_chunks: int = 2
    chunk_values: int = CHUNK_VALUES
    min_contributors: int = 1
    start_contributors: int = 0
    """0: all members."""
    end_rounds: int = 0
    rule: str = "default"
    replicas: Literal["auto", 1, 2, 3, 4] = "auto"
    deadlines: DeadlineSpec = SHORT

    # how long work takes
    step_s: tuple[float, ...] = (0.5,)
    """Seconds of an inner step, by member, around."""
    never_trains: tuple[int, ...] = ()
    diverges: tuple[int, ...] = ()
    """Members whose Δ is not finite, so that encoding fails."""
    unable_rounds: tuple[int, ...] = ()
    """Rounds in which no reducer can combine, as when what the rule starts from is nowhere to be had."""
    work_s: float = 0.01
    """A check, a combination, an encoding, a step of the outer optimiser."""
    fetch_s: float = 0.05
    instant_rows: bool = False
    """Whether rows take no time and no events, where thousands exchange and the exchange is not what is looked at."""
    restart_s: float = 1.0

    # the network
    delay_s: tuple[float, float] = (0.01, 0.05)
    fifo: bool = True
    """Whether a line keeps the order of its messages."""
    spikes: float = 0.0
    """Share of messages that take up to `spike_s` longer."""
    spike_s: float = 3.0
    loss: float = 0.0
    duplication: float = 0.0
    row_break: float = 0.0
    keepalive_s: float = 6.0
    """Both ends of a line across a partition find it broken after so long."""

    # the leaders
    learns: bool = True
    """Whether a leader that hears of a newer head follows that chain."""
    relay: bool = False
    stand_ins: bool = False
    """Whether members lead while the coordinator is away."""
    memory: bool = True
    """Whether equal pure computations of different members are done once."""
    checks: bool = True

    def spec(self) -> RunSpec:
        return sim_spec(
            n_chunks=self.n_chunks,
            work=WorkSpec(batch_tokens=8, h=self.h, end_rounds=self.end_rounds, round_s=self.round_s),
            rule=RuleSpec(name=self.rule, replicas=self.replicas),
            membership=MembershipSpec(
                start_contributors=self.start_contributors or self.n_members,
                min_contributors=self.min_contributors,
            ),
            deadlines=self.deadlines,
            codec=CodecSpec(block=1024, chunk_values=self.chunk_values, leaf_values=1024),
        )


def sim_spec(
    *,
    n_chunks: int = 2,
    work: WorkSpec | None = None,
    rule: RuleSpec | None = None,
    membership: MembershipSpec | None = None,
    deadlines: DeadlineSpec | None = None,
    codec: CodecSpec | None = None,
) -> RunSpec:
    """A RunSpec of so many small chunks, without a model or data behind it.

    Unless `rule` decides, rounds of one or two members commit.
    """
    rule = rule or RuleSpec()
    if rule.degraded is None:
        rule = rule.model_copy(update={"degraded": True})
    codec = codec or CodecSpec(block=1024, chunk_values=CHUNK_VALUES, leaf_values=1024)
    return RunSpec(
        model=ModelSpec(
            config={"model_type": "none"},
            tokenizer="",
            tokenizer_hash="0" * 64,
            n_parameters=n_chunks * codec.chunk_values,
            n_values=n_chunks * codec.chunk_values,
            layout_digest="0" * 64,
            initial_digest="0" * 64,
        ),
        data=DataSpec(
            root="0" * 64,
            sequence_length=8,
            token_bytes=1,
            n_train_sequences=10_000,
            n_val_sequences=1,
            sequences_per_piece=1000,
            seed=0,
            source="nothing",
        ),
        inner=InnerSpec(lr=0.01, warmup_steps=0),
        work=work or WorkSpec(batch_tokens=8, h=4),
        codec=codec,
        rule=rule,
        membership=membership or MembershipSpec(),
        deadlines=deadlines or DeadlineSpec(),
    )
