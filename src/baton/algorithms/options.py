"""`[algorithm]` and `[gate]` of stage mode. Class defaults are the default column of ALGORITHMS 2.10."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from baton.core import certificate, losses
from baton.team import OrderName
from baton.types import Direction


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Choice(NamedTuple):
    """The columns of ALGORITHMS 4.8, by name."""

    weight: str
    mask: str
    level: Literal["token", "sequence"]
    baseline: str


PRESETS: Mapping[str, Choice] = {
    "grpo_dis": Choice("dis", "none", "token", "group"),
    "grpo": Choice("ppo", "none", "token", "group"),
    "gspo": Choice("gspo", "none", "sequence", "group"),
    "flash_reinforce": Choice("is", "sequence_trust", "sequence", "batch_mean"),
    "dppo": Choice("is", "probability", "token", "group"),
    "m2po": Choice("is", "second_moment", "token", "group"),
    "reinforce_is": Choice("is", "none", "token", "batch_mean"),
    "sequence": Choice("sequence", "none", "sequence", "group"),
}
"""Preset -> its choices (ALGORITHMS 4.8); `sequence` is the published SAT objective (F6)."""

MASKS: Mapping[str, losses.ProbabilityDifference | losses.BinaryKl | losses.SecondMoment | losses.SequenceTrust] = {
    "probability": losses.ProbabilityDifference(),
    "probability_symmetric": losses.ProbabilityDifference(limit=0.2, form="symmetric"),
    "binary_kl": losses.BinaryKl(),
    "second_moment": losses.SecondMoment(),
    "sequence_trust": losses.SequenceTrust(),
}
"""Masks with a limit, at their published one."""

LATER_PRESETS = ("sao", "troll")
LATER_BASELINES = ("critic", "running_mean")
"""Names from the specification that this version refuses."""


class ObjectiveOptions(_Options):
    """The loss as weight x mask x level, and its baseline; a preset fixes all four, single keys override it."""

    preset: Literal["grpo_dis", "grpo", "gspo", "flash_reinforce", "dppo", "m2po", "reinforce_is", "sequence"] = Field(
        default="grpo_dis", description="weight, mask, level and baseline at once"
    )
    weight: Literal["preset", "dis", "is", "ppo", "gspo", "sequence"] = Field(
        default="preset", description="how the ratio of a token (gspo, sequence: of an episode's own tokens) enters"
    )
    mask: Literal[
        "preset", "none", "band", "probability", "probability_symmetric", "binary_kl", "second_moment", "sequence_trust"
    ] = Field(default="preset", description="which tokens are kept out of the step (they stay in its denominator)")
    level: Literal["preset", "token", "sequence"] = Field(
        default="preset", description="mean over tokens, or over episodes of the mean over their own tokens"
    )
    baseline: Literal["preset", "group", "loo", "batch_mean"] = Field(
        default="preset", description="what an advantage is relative to"
    )
    band: Literal["preset", "tight", "reasoning", "coding"] = Field(
        default="preset",
        description="ratio band of weight `dis` or mask `band`: tight (.8, 1.25; the preset's), reasoning (.7, 6), "
        "coding (.2, 4), bounds excluded",
    )
    clip: float = Field(default=0.2, gt=0, lt=1, description="clip of the ratio for weights `ppo`, `gspo` and `sequence`")
    cap: Literal["preset", "none"] | Annotated[float, Field(ge=1)] = Field(
        default="preset", description="largest ratio of weight `is`; preset: 20 for `dppo`, none for the others"
    )
    limit: Literal["preset"] | Annotated[float, Field(gt=0)] = Field(
        default="preset",
        description="limit of the mask; preset: .15 (probability), .2 (probability_symmetric), .05 nats (binary_kl), "
        ".04 (second_moment), .003 nats (sequence_trust)",
    )
    advantage_clip: float = Field(default=5.0, gt=0, description="largest absolute group-normalised advantage")

    @property
    def choice(self) -> Choice:
        """The four choices with the preset filled in."""
        preset = PRESETS[self.preset]
        return Choice(
            weight=preset.weight if self.weight == "preset" else self.weight,
            mask=preset.mask if self.mask == "preset" else self.mask,
            level=preset.level if self.level == "preset" else self.level,
            baseline=preset.baseline if self.baseline == "preset" else self.baseline,
        )

    @model_validator(mode="after")
    def _no_unread_key(self) -> ObjectiveOptions:
        weight, mask, _, baseline = self.choice
        here = f"weight '{weight}', mask '{mask}' and baseline '{baseline}'"
        if weight == "dis" and mask == "band":
            raise ValueError("mask = 'band' has no effect with weight 'dis', which has that band; use weight = 'is'")
        for name, is_read, remedy in (
            ("band", weight == "dis" or mask == "band", "weight = 'dis' or mask = 'band'"),
            ("clip", weight in ("ppo", "gspo", "sequence"), "weight = 'ppo', 'gspo' or 'sequence'"),
            ("cap", weight == "is", "weight = 'is'"),
            ("limit", mask in MASKS, f"mask to one of {', '.join(MASKS)}"),
            ("advantage_clip", baseline == "group", "baseline = 'group'"),
        ):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default and not is_read:
                raise ValueError(f"{name} = {value!r} has no effect with {here}; remove it or set {remedy}")
        return self

    def loss(self, *, penalty: float) -> losses.Objective:
        """The core's objective of these options, with the KL coefficient beta."""
        weight, mask, level, _ = self.choice
        band = losses.BANDS["tight" if self.band == "preset" else self.band]
        cap = (20.0 if self.preset == "dppo" else None) if self.cap == "preset" else self.cap
        weights: Mapping[str, losses.Weight] = {
            "dis": losses.Dis(band=band),
            "is": losses.Is(cap=None if cap == "none" else cap),
            "ppo": losses.Ppo(clip=self.clip),
            "gspo": losses.Gspo(clip=self.clip),
            "sequence": losses.SequenceRatio(clip=self.clip),
        }
        masks: Mapping[str, losses.Mask | None] = {"none": None, "band": band, **MASKS}
        chosen = masks[mask] if self.limit == "preset" else replace(MASKS[mask], limit=self.limit)
        return losses.Objective(weight=weights[weight], penalty=penalty, mask=chosen, level=level)


class PenaltyOptions(_Options):
    """The exact KL term of the loss and its coefficient beta (ALGORITHMS 2.5)."""

    start: float = Field(
        default=0.001, ge=0, description="beta at the start, per nat and token; 0 leaves the term out for good"
    )
    low: float = Field(default=1e-3, gt=0, description="smallest beta that adaption reaches")
    high: float = Field(default=10.0, gt=0, description="largest beta")

    @model_validator(mode="after")
    def _start_within_bounds(self) -> PenaltyOptions:
        if self.low > self.high:
            raise ValueError(f"low = {self.low} is above high = {self.high}; exchange them")
        if self.start != 0.0 and not self.low <= self.start <= self.high:
            raise ValueError(
                f"start = {self.start} is outside low = {self.low} .. high = {self.high}; move it in, or set it to 0"
            )
        return self


class LineSearchOptions(_Options):
    """Shrinking a displacement that left the region."""

    halvings: int = Field(default=4, ge=0, le=12, description="halvings of the first displacement that are looked at")


class BacktrackOptions(_Options):
    """Training again from the same start where the first candidate left the region (ALGORITHMS 2.5)."""

    tries: int = Field(
        default=1,
        ge=1,
        le=6,
        description="trainings before the line search; retry r has the penalty x 10^r (at least .5) and lr / 2^r",
    )


class ReuseOptions(_Options):
    """One batch of episodes for all agents of a stage, reweighted for teammates that have changed (ALGORITHMS 2.3)."""

    ess_floor: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="effective share of the reweighted episodes below which an agent plays fresh ones",
    )
    weights: Literal["truncated", "none"] = Field(
        default="truncated",
        description="truncated: each episode by min(1, its likelihood ratio); none: as it was played, which is biased and "
        "there to be compared with",
    )

    @model_validator(mode="after")
    def _no_unread_floor(self) -> ReuseOptions:
        if self.weights == "none" and self.ess_floor != type(self).model_fields["ess_floor"].default:
            raise ValueError(f"ess_floor = {self.ess_floor} has no effect with weights = 'none'; remove it")
        return self

    def gives_up(self, effective_share: float) -> bool:
        """Whether so small a share of the episodes is left that fresh ones are played."""
        return self.weights == "truncated" and effective_share < self.ess_floor


class SatOptions(_Options):
    """`[algorithm]`: schedule, data and step of one agent update."""

    name: Literal["sat", "joint", "independent"] = Field(
        default="sat",
        description="one agent after another (sat), all on the same episodes (joint), or each alone (independent)",
    )
    stages: int = Field(default=40, ge=1, description="stages to train; may be raised when a run is extended")
    episodes: int = Field(default=128, ge=2, description="episodes per agent update (joint: per agent and stage)")
    group: Literal["auto"] | int = Field(
        default="auto", description="episodes per prompt; auto: 4, or 8 where the start accuracy is below .15"
    )
    data: Literal["resample", "reuse"] = Field(
        default="resample",
        description="fresh episodes for each update, or (schedule sat) one batch a stage, reweighted for changed teammates",
    )
    reuse: ReuseOptions = Field(default=ReuseOptions(), description="what data = 'reuse' does")
    order: OrderName = Field(
        default="random",
        description="order of the agents in a stage; greedy and grad_norm measure it on episodes of their own, bandit "
        "learns it from the reward of the batches that follow an update (noisy)",
    )
    radius_allocation: Literal["uniform", "greedy"] = Field(
        default="uniform",
        description="a stage's radii: each agent's own, or their sum shared out by predicted gain, at most 2x each",
    )
    ordering_episodes: int = Field(
        default=64,
        ge=32,
        description="episodes a stage on which a measured order or allocation rests, beside the updates' own",
    )
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
    backtrack: BacktrackOptions = Field(default=BacktrackOptions(), description="training again outside the region")
    line_search: LineSearchOptions = Field(default=LineSearchOptions(), description="what happens outside the region")

    @property
    def shares_episodes(self) -> bool:
        """The agents of a stage train on the same episodes: an incomplete stage is played again as a whole."""
        return self.name == "joint" or self.data == "reuse"

    @property
    def is_measured(self) -> bool:
        """A stage begins with episodes that predict what each agent could gain."""
        return self.order in ("greedy", "grad_norm") or self.radius_allocation == "greedy"

    @property
    def looks(self) -> int:
        """The most candidates of one update that the gate sees."""
        return self.backtrack.tries + self.line_search.halvings

    @model_validator(mode="after")
    def _no_unread_key(self) -> SatOptions:
        fields = type(self).model_fields
        if self.data == "reuse" and self.name != "sat":
            raise ValueError(f"data = 'reuse' is for name = 'sat'; '{self.name}' has its own way with episodes, remove it")
        if self.reuse != fields["reuse"].default and self.data != "reuse":
            raise ValueError("reuse has no effect with data = 'resample'; remove it or set data = 'reuse'")
        if self.order in ("greedy", "grad_norm", "bandit") and self.name != "sat":
            raise ValueError(f"order = '{self.order}' is for name = 'sat'; '{self.name}' has an order of its own, remove it")
        if self.order == "bandit" and self.data == "reuse":
            raise ValueError("order = 'bandit' learns from fresh episodes after each update; set data = 'resample'")
        if self.radius_allocation == "greedy" and self.name == "independent":
            raise ValueError("radius_allocation = 'greedy' shares a stage's radii; 'independent' has one agent a stage")
        if self.ordering_episodes != fields["ordering_episodes"].default and not self.is_measured:
            raise ValueError("ordering_episodes has no effect: no order or allocation is measured; remove it")
        if self.backtrack.tries > 1 and self.inner_steps < 2:
            raise ValueError(
                f"backtrack.tries = {self.backtrack.tries} needs inner_steps >= 2: the penalty's gradient is zero at the "
                "start, so with one step a retry is only a shorter one, which the line search gives for less"
            )
        return self

    @model_validator(mode="after")
    def _episodes_in_groups(self) -> SatOptions:
        # auto may settle on 4 or on 8: a multiple of 8 serves both.
        for size in (8,) if self.group == "auto" else (self.group,):
            if size < 1:
                raise ValueError(f"group = {size}: a prompt needs at least one episode")
            if size < 2 and self.objective.choice.baseline != "batch_mean":
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
        groups = self.episodes // (4 if self.group == "auto" else self.group)
        # Too few are drawn again up to three times in all; against the whole batch, those on the smaller side of its mean.
        most = max(1, 3 * groups // (2 if self.objective.choice.baseline == "batch_mean" else 1))
        for name, value, bound in (
            ("min_informative", self.min_informative, most),
            ("inner_steps", self.inner_steps, groups),
        ):
            if value > bound:
                raise ValueError(f"{name} = {value}: an update of {self.episodes} episodes can have {bound}; lower it")
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


FEWEST_PAIRS = 256
"""Pairs below which a paired evaluation sees almost nothing (ALGORITHMS 3.6)."""


class CertificateOptions(_Options):
    """`[certificate]`: what is shown of an update or a stage, and how surely (ALGORITHMS 3.6)."""

    update_pairs: int = Field(
        default=0, ge=0, description="most pairs on which a candidate is compared with the promoted team; 0 for none"
    )
    stage_pairs: int = Field(
        default=0, ge=0, description="most pairs on which a stage's team is compared with that of its start; 0 for none"
    )
    coupling: Literal["maximal", "inverse_cdf", "none"] = Field(
        default="maximal",
        description="how the two teams' tokens are drawn together: maximal lets them differ as rarely as can be, "
        "inverse_cdf shares uniforms, none shares nothing",
    )
    method: Literal["betting", "bernstein"] = Field(
        default="betting", description="bound of the gain: betting may stop early, bernstein plays all pairs"
    )
    give_up: bool = Field(
        default=True,
        description="stop playing pairs once neither a gain nor a harm could be shown by the last of them (betting only)",
    )
    surrogate: bool = Field(
        default=False,
        description="bound an accepted update's gain from its probe episodes, which are then played to the end and graded; "
        f"needs gate.probe_prompts of {certificate.FEWEST_PROMPTS} or more",
    )
    delta: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="chance that a stage's certificate is wrong, and that any of its updates' is, of each kind",
    )
    run_level: bool = Field(
        default=False,
        description="spread delta over all stages, so that it bounds a whole run",
    )

    @model_validator(mode="after")
    def _no_unread_key(self) -> CertificateOptions:
        for name in ("update_pairs", "stage_pairs"):
            value = getattr(self, name)
            if 0 < value < FEWEST_PAIRS:
                raise ValueError(f"{name} = {value}: below {FEWEST_PAIRS} pairs show almost nothing; raise it or set 0")
        if not self.update_pairs and not self.stage_pairs:
            unread = ("coupling", "method", "give_up", *(() if self.surrogate else ("delta", "run_level")))
            for name in unread:
                if getattr(self, name) != type(self).model_fields[name].default:
                    other = ", or surrogate" if name in ("delta", "run_level") else ""
                    raise ValueError(
                        f"{name} has no effect without pairs; remove it, or set update_pairs or stage_pairs{other}"
                    )
        return self

    def plays_out(self, gate: GateOptions) -> bool:
        """Probe episodes are played to the end and graded; fewer could show nothing."""
        return self.surrogate and gate.probe_prompts >= certificate.FEWEST_PROMPTS


RADII: Mapping[str, tuple[float, float]] = {"default": (0.05, 0.01), "demo": (0.5, 0.06)}
"""Gate preset -> (token radius, message-mean radius) in nats."""


def resolve_group(options: SatOptions, start_accuracy: float) -> int:
    """G of a run (ALGORITHMS 2.2): as configured, or 4, or 8 where the start accuracy is below .15."""
    if options.group == "auto":
        return 8 if start_accuracy < 0.15 else 4
    return options.group


KNOBS: Mapping[str, str] = {
    "radius": "raise agents.radius (or gate.preset), or lower agents.lr",
    "no_signal": "the groups' rewards are all equal: warm start the agents, use an easier task or a larger algorithm.group",
    "non_finite": "lower agents.lr and look at the diagnostics of the last updates",
    "not_published": "run `baton doctor`; set engine.dtype = 'float32' to tell rounding from a fault",
    "harm": "lower agents.lr or raise algorithm.episodes",
}
"""Which key helps against a reason for rejection."""
