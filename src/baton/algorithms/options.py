"""`[algorithm]` and `[gate]` of stage mode. Class defaults are the default column of ALGORITHMS 2.10."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from baton.core import losses
from baton.team import OrderName
from baton.types import Direction


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


PRESETS: Mapping[str, tuple[str, str, str]] = {
    "grpo_dis": ("dis", "tight", "group"),
    "grpo": ("ppo", "none", "group"),
    "sequence": ("sequence", "none", "group"),
}
"""Preset -> (weight, band, baseline), ALGORITHMS 4.8; `sequence` is the published SAT objective (F6)."""

LATER_PRESETS = ("sao", "gspo", "flash_reinforce", "dppo", "m2po", "reinforce_is", "troll")
LATER_BASELINES = ("critic", "running_mean")
"""Names from the specification that this version refuses."""


class ObjectiveOptions(_Options):
    """The loss as weight x band x baseline; a preset fixes all three, single keys override it."""

    preset: Literal["grpo_dis", "grpo", "sequence"] = Field(
        default="grpo_dis", description="weight, band and baseline at once"
    )
    weight: Literal["preset", "dis", "ppo", "sequence"] = Field(default="preset", description="how a token's ratio enters")
    band: Literal["preset", "tight", "reasoning", "coding"] = Field(
        default="preset",
        description="ratio band of weight `dis`: tight (.8, 1.25), reasoning (.7, 6), coding (.2, 4), strict",
    )
    clip: float = Field(default=0.2, gt=0, lt=1, description="clip of the ratio for weights `ppo` and `sequence`")
    baseline: Literal["preset", "group", "loo", "batch_mean"] = Field(
        default="preset", description="what an advantage is relative to"
    )
    advantage_clip: float = Field(default=5.0, gt=0, description="largest absolute group-normalised advantage (F5)")

    @property
    def resolved(self) -> tuple[str, str, str]:
        """(weight, band, baseline) with the preset filled in."""
        weight, band, baseline = PRESETS[self.preset]
        weight = weight if self.weight == "preset" else self.weight
        if weight != "dis":
            band = "none"
        elif self.band != "preset":
            band = self.band
        elif band == "none":
            band = "tight"
        return weight, band, baseline if self.baseline == "preset" else self.baseline

    @model_validator(mode="after")
    def _no_unread_key(self) -> ObjectiveOptions:
        weight = self.resolved[0]
        if self.band != "preset" and weight != "dis":
            raise ValueError(f"band = '{self.band}' has no effect with weight '{weight}'; remove it or set weight = 'dis'")
        if self.clip != type(self).model_fields["clip"].default and weight == "dis":
            raise ValueError("clip has no effect with weight 'dis'; remove it or set weight = 'ppo' or 'sequence'")
        return self

    def weight_of(self) -> losses.Weight:
        """The core's weight of these options."""
        weight, band, _ = self.resolved
        if weight == "dis":
            return losses.Dis(band=losses.BANDS[band])
        return losses.Ppo(clip=self.clip) if weight == "ppo" else losses.SequenceRatio(clip=self.clip)


class PenaltyOptions(_Options):
    """The exact KL term of the loss and its coefficient beta (ALGORITHMS 2.5)."""

    start: float = Field(
        default=0.001, ge=0, description="beta at the start, per nat and token; 0 leaves the term out for good"
    )
    low: float = Field(default=1e-3, gt=0, description="smallest beta that adaption reaches")
    high: float = Field(default=10.0, gt=0, description="largest beta")

    @model_validator(mode="after")
    def _start_within_bounds(self) -> PenaltyOptions:
        if self.start != 0.0 and not self.low <= self.start <= self.high:
            raise ValueError(
                f"start = {self.start} is outside low = {self.low} .. high = {self.high}; move it in, or set it to 0"
            )
        return self


class LineSearchOptions(_Options):
    """Shrinking a displacement that left the region."""

    halvings: int = Field(default=4, ge=0, le=12, description="halvings of the first displacement that are looked at")


class SatOptions(_Options):
    """`[algorithm]`: schedule, data and step of one agent update."""

    name: Literal["sat", "joint", "independent"] = Field(default="sat", description="schedule of updates (ALGORITHMS 2.14)")
    stages: int = Field(default=40, ge=1, description="stages to train; may be raised when a run is extended")
    episodes: int = Field(default=128, ge=2, description="episodes per agent update (joint: per agent and stage)")
    group: Literal["auto"] | int = Field(
        default="auto", description="episodes per prompt; auto: 4, or 8 where the start accuracy is below .15"
    )
    order: OrderName = Field(default="random", description="order of the agents in a stage")
    inner_steps: int = Field(
        default=2, ge=1, description="optimiser steps per update, each on a disjoint part of the episodes"
    )
    min_informative: int = Field(
        default=4,
        ge=1,
        description="groups with unequal rewards that an update needs (batch_mean: prompts on either side of the mean)",
    )
    objective: ObjectiveOptions = Field(default=ObjectiveOptions(), description="the loss")
    penalty: PenaltyOptions = Field(default=PenaltyOptions(), description="the KL term")
    line_search: LineSearchOptions = Field(default=LineSearchOptions(), description="what happens outside the region")

    @model_validator(mode="after")
    def _episodes_in_groups(self) -> SatOptions:
        # auto may settle on 4 or on 8: a multiple of 8 serves both.
        for size in (8,) if self.group == "auto" else (self.group,):
            if size < 1:
                raise ValueError(f"group = {size}: a prompt needs at least one episode")
            if size < 2 and self.objective.resolved[2] != "batch_mean":
                raise ValueError(
                    f"group = {size}: this baseline compares siblings; use 2 or more, or objective.baseline = 'batch_mean'"
                )
            if self.episodes % size:
                near = sorted({self.episodes // size * size or size, -(-self.episodes // size) * size})
                group = "auto: 4 or 8" if self.group == "auto" else self.group
                raise ValueError(
                    f"episodes = {self.episodes} is no multiple of {size}, and episodes = prompts x group "
                    f"(group = {group}); nearest: {' or '.join(map(str, near))}"
                )
        return self


class GateOptions(_Options):
    """`[gate]`: who may say no, and on what evidence (ALGORITHMS 2.4)."""

    preset: Literal["default", "demo"] = Field(
        default="default",
        description="radii where an agent sets none: default .05 / .01, demo .5 / .06 (tiny models, short runs)",
    )
    probe_prompts: int = Field(default=64, ge=1, description="held-out prompts per update, one episode each")
    quantile: float = Field(
        default=0.99, gt=0, lt=1, description="quantile of the per-state divergence that the radius bounds"
    )
    eta: float = Field(default=0.05, gt=0, lt=1, description="miss probability of the certified quantile, over all looks")
    direction: Direction = Field(default="max", description="which KL the gate reads")
    require_certified: bool = Field(
        default=False, description="refuse a config whose probe prompts cannot certify the quantile"
    )
    max_states_per_message: int = Field(default=128, ge=1, description="states read per message")
    max_states: int = Field(default=8192, ge=1, description="states read in all")


RADII: Mapping[str, tuple[float, float]] = {"default": (0.05, 0.01), "demo": (0.5, 0.06)}
"""Gate preset -> (token radius, message-mean radius) in nats."""


def resolve_group(options: SatOptions, start_accuracy: float) -> int:
    """G of a run (ALGORITHMS 2.2): as configured, or 4, or 8 where the start accuracy is below .15."""
    if options.group == "auto":
        return 8 if start_accuracy < 0.15 else 4
    return options.group


KNOBS: Mapping[str, str] = {
    "radius": "raise agents.radius (or gate.preset), or lower agents.lr",
    "no_signal": "the groups' rewards are all equal: warm start the agents, use an easier task or a larger algorithm.group "
    "(or nobody asks the agent: `baton inspect` says so)",
    "non_finite": "lower agents.lr and look at the diagnostics of the last updates",
    "not_published": "run `baton doctor`; set engine.dtype = 'float32' to tell rounding from a fault",
    "harm": "lower agents.lr or raise algorithm.episodes",
}
"""Which key helps against a reason for rejection."""
