"""Policy losses: weight x mask x level, one penalty, one denominator (ALGORITHMS 2.3, 4.2, 4.8).

Axes: B rows, T tokens, E episodes, N action tokens. x = log pi_theta - behavior_logprob, rho = exp(x), A a
token's advantage; p = exp(behavior_logprob) and q = exp(log pi_theta), probabilities of the sampled token.

Every loss is a sum divided by a denominator that the caller counted over the whole optimiser batch, so
micro-batches add up to one large batch. What stands under a False mask is set aside before anything is
computed from it: a NaN there reaches neither the value nor the gradient, while a NaN on an action token
reaches both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from baton.errors import ConfigError, DataError, MissingError
from baton.types import AdvantageBatch, TokenBatch

LOG_RATIO_BOUND = 20.0
"""Largest exponent of a ratio, in nats: e^20 = 4.85e8 still multiplies and adds in fp32. It bounds losses
only; no decision reads it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Ratios that count: low < rho < high, strict at both ends (SAO paper, Eq. 3; ALGORITHMS B2).

    Two bounds, never 1 - eps: in double precision 1 - .8 is below .2, so a ratio of .2 would pass (G40).
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.low < 1.0 < self.high < math.inf:
            raise ConfigError(f"band ({self.low}, {self.high}): need 0 <= low < 1 < high, so that an unmoved token counts")


TIGHT = Band(low=0.8, high=1.25)
"""Synchronous mode (decision)."""
REASONING = Band(low=0.7, high=6.0)
"""SAO paper, mathematics with Python."""
CODING = Band(low=0.2, high=4.0)
"""SAO paper, coding."""
BANDS: Mapping[str, Band] = MappingProxyType({"tight": TIGHT, "reasoning": REASONING, "coding": CODING})


@dataclass(frozen=True, kw_only=True, slots=True)
class Dis:
    """Ratio as a constant weight inside the band, 0 outside (ALGORITHMS 4.2)."""

    band: Band


@dataclass(frozen=True, kw_only=True, slots=True)
class Is:
    """Ratio as a constant weight, at most `cap` (ALGORITHMS 4.8, weight `is`)."""

    cap: float | None = None

    def __post_init__(self) -> None:
        if self.cap is not None and not 1.0 <= self.cap < math.inf:
            raise ConfigError(f"cap {self.cap}: need a number >= 1, so that an unmoved token keeps its weight, or None")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ppo:
    """Clipped ratio per token (ALGORITHMS 4.8, weight `ppo`)."""

    clip: float = 0.2

    def __post_init__(self) -> None:
        _require_clip(self.clip)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceRatio:
    """Clipped ratio of an episode's own tokens taken together (ALGORITHMS F6; parity with the SAT paper)."""

    clip: float = 0.2

    def __post_init__(self) -> None:
        _require_clip(self.clip)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gspo:
    """Clipped geometric mean of the ratios of an episode's own tokens (ALGORITHMS 4.8, weight `gspo`)."""

    clip: float = 0.2

    def __post_init__(self) -> None:
        _require_clip(self.clip)


@dataclass(frozen=True, kw_only=True, slots=True)
class Likelihood:
    """w = 1: with advantage 1 this is maximum likelihood, the objective of a supervised warm start."""


Weight = Dis | Is | Ppo | Gspo | SequenceRatio | Likelihood


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbabilityDifference:
    """Drops a token with |q - p| > limit: always where `symmetric`, else only if the step moves it further (DPPO)."""

    limit: float = 0.15
    form: Literal["directional", "symmetric"] = "directional"


@dataclass(frozen=True, kw_only=True, slots=True)
class BinaryKl:
    """Drops a token whose two-outcome KL exceeds the limit, in nats, and which the step moves further (DPPO)."""

    limit: float = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class SecondMoment:
    """Drops the largest x^2 of the whole optimiser batch until the mean of the rest is within the limit, tau (M2PO)."""

    limit: float = 0.04


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceTrust:
    """Drops a whole episode whose mean two-outcome KL over its own tokens exceeds the limit, in nats."""

    limit: float = 3e-3


Mask = Band | ProbabilityDifference | BinaryKl | SecondMoment | SequenceTrust
"""Which action tokens may move the policy at all (ALGORITHMS 4.8); with a `Band`, those whose ratio lies inside."""


@dataclass(frozen=True, kw_only=True)
class LossTerm:
    """A loss, already divided by its denominator, and what to log beside it.

    `diagnostics` are sums over tokens or episodes: those of micro-batches add up to those of the batch.
    """

    total: Float[Tensor, ""]
    diagnostics: dict[str, float]


# ---- pieces ------------------------------------------------------------------------------------------------


def log_ratio(
    logprobs_BT: Float[Tensor, "B T"], behavior_BT: Float[Tensor, "B T"], mask_BT: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """x = log pi_theta - behavior_logprob in nats on action tokens, exactly 0 elsewhere."""
    return _under(mask_BT, logprobs_BT) - _under(mask_BT, behavior_BT)


def safe_exp(x: Float[Tensor, "*shape"]) -> tuple[Float[Tensor, "*shape"], int]:
    """exp(min(x, LOG_RATIO_BOUND)), and how many entries met the bound.

    Every weight goes through here. Beyond the bound the gradient is 0, and the entry is counted. NaN stays
    NaN.
    """
    return torch.exp(x.clamp(max=LOG_RATIO_BOUND)), int((x > LOG_RATIO_BOUND).sum())


def kl_term(kl_BT: Float[Tensor, "B T"], mask_BT: Bool[Tensor, "B T"], *, denominator: float) -> Float[Tensor, ""]:
    """Sum of a divergence over action tokens / denominator, in nats per token when the denominator is N_act."""
    return _divide(_under(mask_BT, kl_BT).sum(), int(mask_BT.sum()), denominator)


# ---- weights -----------------------------------------------------------------------------------------------


def dis(
    logprobs_BT: Float[Tensor, "B T"],
    behavior_BT: Float[Tensor, "B T"],
    advantages_BT: Float[Tensor, "B T"],
    mask_BT: Bool[Tensor, "B T"],
    *,
    band: Band,
    denominator: float,
) -> LossTerm:
    """-sum_t mask_t * sg(f(rho_t)) * A_t * log pi_theta / denominator, f(rho) = rho inside the band, else 0.

    (SAO paper, Eq. 1 and 3.) Without the stop-gradient sg the derivative gains a factor 1 + log pi and is
    wrong (G19). The denominator counts rejected tokens too. Diagnostics: tokens, kept, rejected_low,
    rejected_high, clamped.

    Raises:
        DataError: the denominator is not a positive number although there are action tokens.
    """
    ratio_BT, clamped = safe_exp(log_ratio(logprobs_BT, behavior_BT, mask_BT).detach())
    low_BT, high_BT = mask_BT & (ratio_BT <= band.low), mask_BT & (ratio_BT >= band.high)
    # "Not rejected" rather than "inside": a NaN ratio is neither, and must reach the loss.
    counts_BT = mask_BT & ~(low_BT | high_BT)
    terms_BT = _under(counts_BT, ratio_BT) * _under(counts_BT, advantages_BT) * _under(counts_BT, logprobs_BT)
    tokens = int(mask_BT.sum())
    diagnostics = {
        "tokens": float(tokens),
        "kept": float((mask_BT & (ratio_BT > band.low) & (ratio_BT < band.high)).sum()),
        "rejected_low": float(low_BT.sum()),
        "rejected_high": float(high_BT.sum()),
        "clamped": float(clamped),
    }
    return LossTerm(total=_divide(-terms_BT.sum(), tokens, denominator), diagnostics=diagnostics)


def importance(
    logprobs_BT: Float[Tensor, "B T"],
    behavior_BT: Float[Tensor, "B T"],
    advantages_BT: Float[Tensor, "B T"],
    mask_BT: Bool[Tensor, "B T"],
    *,
    cap: float | None,
    denominator: float,
) -> LossTerm:
    """-sum_t mask_t * sg(min(rho_t, cap)) * A_t * log pi_theta / denominator; no cap where it is None.

    (ALGORITHMS 4.8, weight `is`.) Diagnostics: tokens, capped, clamped.

    Raises:
        DataError: the denominator is not a positive number although there are action tokens.
    """
    ratio_BT, clamped = safe_exp(log_ratio(logprobs_BT, behavior_BT, mask_BT).detach())
    bounded_BT = ratio_BT if cap is None else ratio_BT.clamp(max=cap)
    terms_BT = _under(mask_BT, bounded_BT) * _under(mask_BT, advantages_BT) * _under(mask_BT, logprobs_BT)
    tokens = int(mask_BT.sum())
    capped = float((mask_BT & (bounded_BT < ratio_BT)).sum())
    return LossTerm(
        total=_divide(-terms_BT.sum(), tokens, denominator),
        diagnostics={"tokens": float(tokens), "capped": capped, "clamped": float(clamped)},
    )


def ppo(
    logprobs_BT: Float[Tensor, "B T"],
    behavior_BT: Float[Tensor, "B T"],
    advantages_BT: Float[Tensor, "B T"],
    mask_BT: Bool[Tensor, "B T"],
    *,
    clip: float,
    denominator: float,
) -> LossTerm:
    """-sum_t mask_t * min(rho_t A_t, clip(rho_t, 1-eps, 1+eps) A_t) / denominator.

    (PPO 1707.06347; ALGORITHMS 4.8.) Differentiated through the ratio. Diagnostics: tokens, clipped (the
    minimum took the clipped side), clamped.

    Raises:
        DataError: the denominator is not a positive number although there are action tokens.
    """
    ratio_BT, clamped = safe_exp(log_ratio(logprobs_BT, behavior_BT, mask_BT))
    advantage_BT = _under(mask_BT, advantages_BT)
    free_BT = ratio_BT * advantage_BT
    bounded_BT = ratio_BT.clamp(1.0 - clip, 1.0 + clip) * advantage_BT
    tokens = int(mask_BT.sum())
    diagnostics = {
        "tokens": float(tokens),
        "clipped": float((bounded_BT < free_BT).sum()),
        "clamped": float(clamped),
    }
    total = _divide(-torch.minimum(free_BT, bounded_BT).sum(), tokens, denominator)
    return LossTerm(total=total, diagnostics=diagnostics)


def likelihood(
    logprobs_BT: Float[Tensor, "B T"],
    advantages_BT: Float[Tensor, "B T"],
    mask_BT: Bool[Tensor, "B T"],
    *,
    denominator: float,
) -> LossTerm:
    """-sum_t mask_t * A_t * log pi_theta / denominator. No behavior policy enters. Diagnostics: tokens."""
    tokens = int(mask_BT.sum())
    terms_BT = _under(mask_BT, advantages_BT) * _under(mask_BT, logprobs_BT)
    return LossTerm(total=_divide(-terms_BT.sum(), tokens, denominator), diagnostics={"tokens": float(tokens)})


def sequence(
    logprobs_BT: Float[Tensor, "B T"],
    behavior_BT: Float[Tensor, "B T"],
    advantages_BT: Float[Tensor, "B T"],
    mask_BT: Bool[Tensor, "B T"],
    *,
    episode_B: Int[Tensor, " B"],
    clip: float,
    denominator: float,
    is_mean: bool = False,
) -> LossTerm:
    """-sum_e min(r_e A_e, exp(clip(u_e, log(1-eps), log(1+eps))) A_e) / denominator, r = exp(u).

    (SAT paper, trust-region update; ALGORITHMS F6.) u_e sums x over all own tokens of the episode, in all of its
    rows, without length normalisation; with `is_mean` it is their mean, and r the geometric mean of the ratios
    (GSPO 2507.18071; ALGORITHMS 4.8). A_e is the one advantage that the episode's action tokens carry. All rows
    of an episode must be in the call. Diagnostics: episodes, clipped, clamped.

    Raises:
        DataError: action tokens of one episode carry different advantages, or the denominator is not positive.
    """
    _, place_B = torch.unique(episode_B, return_inverse=True)
    n_episodes = int(place_B.max()) + 1 if place_B.numel() else 0
    x_BT = log_ratio(logprobs_BT, behavior_BT, mask_BT)
    zero_E = torch.zeros(n_episodes, dtype=x_BT.dtype, device=x_BT.device)
    u_E = zero_E.index_add(0, place_B, x_BT.sum(dim=1))
    if is_mean:
        u_E = u_E / zero_E.index_add(0, place_B, mask_BT.sum(dim=1).to(u_E)).clamp(min=1.0)
    advantage_E, acts_E = _episode_advantages(advantages_BT, mask_BT, place_B, n_episodes)
    ratio_E, clamped = safe_exp(u_E)
    free_E = ratio_E * advantage_E
    bounded_E = torch.exp(u_E.clamp(math.log1p(-clip), math.log1p(clip))) * advantage_E
    episodes = int(acts_E.sum())
    diagnostics = {
        "episodes": float(episodes),
        "clipped": float((bounded_E < free_E).sum()),
        "clamped": float(clamped),
    }
    total = _divide(-torch.minimum(free_E, bounded_E).sum(), episodes, denominator)
    return LossTerm(total=total, diagnostics=diagnostics)


# ---- masks: True on the action tokens that are kept; a NaN is never dropped, it must reach the loss ---------


def band_mask(
    logprobs_BT: Float[Tensor, "B T"], behavior_BT: Float[Tensor, "B T"], mask_BT: Bool[Tensor, "B T"], *, band: Band
) -> Bool[Tensor, "B T"]:
    """low < rho < high: weight `is` under it is weight `dis` (ALGORITHMS 4.8)."""
    ratio_BT, _ = safe_exp(log_ratio(logprobs_BT, behavior_BT, mask_BT).detach())
    return mask_BT & ~((ratio_BT <= band.low) | (ratio_BT >= band.high))


def dppo_mask(
    logprobs_BT: Float[Tensor, "B T"],
    behavior_BT: Float[Tensor, "B T"],
    advantages_BT: Float[Tensor, "B T"],
    mask_BT: Bool[Tensor, "B T"],
    *,
    rule: ProbabilityDifference | BinaryKl,
) -> Bool[Tensor, "B T"]:
    """A statistic of (p, q) within the rule's limit, or a step that moves q back to p (not where symmetric).

    (DPPO 2602.04879; ALGORITHMS 4.8, G47.) The statistic is |q - p| or `binary_kl`. A step moves further where
    A > 0 and rho > 1, or A < 0 and rho < 1.
    """
    if isinstance(rule, BinaryKl):
        dropped_BT = binary_kl(logprobs_BT, behavior_BT, mask_BT) > rule.limit
    else:
        dropped_BT = (_probability(logprobs_BT, mask_BT) - _probability(behavior_BT, mask_BT)).abs() > rule.limit
    if isinstance(rule, BinaryKl) or rule.form == "directional":
        x_BT = log_ratio(logprobs_BT, behavior_BT, mask_BT)
        dropped_BT &= ((advantages_BT > 0.0) & (x_BT > 0.0)) | ((advantages_BT < 0.0) & (x_BT < 0.0))
    return mask_BT & ~dropped_BT


def second_moment_mask(
    logprobs_BT: Float[Tensor, "B T"], behavior_BT: Float[Tensor, "B T"], mask_BT: Bool[Tensor, "B T"], *, limit: float
) -> Bool[Tensor, "B T"]:
    """What is left after dropping the largest x^2 until the mean of the rest is <= limit, whatever the sign of A.

    (M2PO; ALGORITHMS 4.8, G46.) Equal values stay or go together, so the order of rows does not matter. The
    rows are those of a whole optimiser batch: parts of it have other means.
    """
    square_N = log_ratio(logprobs_BT, behavior_BT, mask_BT).detach()[mask_BT].double().square()
    ordered_N = square_N.sort().values
    count_N = torch.arange(1, len(ordered_N) + 1, device=ordered_N.device)
    inside = int((ordered_N.cumsum(0) / count_N <= limit).sum())  # running means of rising numbers rise
    if inside == len(ordered_N):
        return mask_BT.clone()
    return mask_BT.masked_scatter(mask_BT, ~(square_N >= ordered_N[inside]))


def sequence_trust_mask(
    logprobs_BT: Float[Tensor, "B T"],
    behavior_BT: Float[Tensor, "B T"],
    mask_BT: Bool[Tensor, "B T"],
    *,
    episode_B: Int[Tensor, " B"],
    limit: float,
) -> Bool[Tensor, "B T"]:
    """All own tokens of an episode iff the mean of `binary_kl` over them is <= limit (ALGORITHMS 4.8, G45).

    All rows of an episode must be in the call.
    """
    total_B = _episode_sums(binary_kl(logprobs_BT, behavior_BT, mask_BT).sum(dim=1), episode_B)
    return mask_BT & ~(total_B / _episode_sums(mask_BT.sum(dim=1), episode_B) > limit)[:, None]


def binary_kl(
    logprobs_BT: Float[Tensor, "B T"], behavior_BT: Float[Tensor, "B T"], mask_BT: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """d = p log(p/q) + (1-p) log((1-p)/(1-q)): KL of "this token or another", in nats; 0 outside the mask.

    No gradient. p and q are taken within [1e-6, 1 - 1e-6]: a statistic of a mask, never a gate's.
    """
    p_BT, q_BT = (_probability(x, mask_BT).clamp(1e-6, 1.0 - 1e-6) for x in (behavior_BT, logprobs_BT))
    return _under(mask_BT, p_BT * (p_BT / q_BT).log() + (1.0 - p_BT) * ((1.0 - p_BT) / (1.0 - q_BT)).log())


# ---- objective ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """What one optimiser step minimises: policy term + penalty * mean divergence from an anchor over action tokens.

    (ALGORITHMS 2.3, objective decision; 4.8.) The policy term is weight x mask x level; tokens that the mask
    drops stay in every denominator. With penalty 0 the divergence is neither needed nor looked at: infinite
    KL times 0 would be NaN. With weight None there is no policy term: the divergence alone is distillation (2.8).
    """

    weight: Weight | None
    penalty: float
    """beta, per nat."""
    direction: Literal["new_old", "old_new"] = "new_old"
    """Which divergence is penalised: KL(policy || anchor), or KL(anchor || policy), that of a teacher from its student."""
    mask: Mask | None = None
    level: Literal["token", "sequence"] | None = None
    """token: mean over action tokens; sequence: mean over episodes of the mean over their own tokens. None: as the
    weight was published, sequence for `SequenceRatio` and `Gspo`, token for all others."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.penalty) and self.penalty >= 0.0):
            raise ConfigError(f"penalty {self.penalty}: need a finite number >= 0")
        if self.weight is None and (self.penalty == 0.0 or self.mask is not None):
            raise ConfigError("an objective without a policy term needs a penalty > 0 and has nothing to mask")
        if self.mask is not None and not isinstance(self.mask, Band) and not 0.0 < self.mask.limit < math.inf:
            raise ConfigError(f"limit {self.mask.limit} of a mask: need a finite number > 0")

    @property
    def needs_kl(self) -> bool:
        return self.penalty > 0.0

    @property
    def needs_batch(self) -> bool:
        """Whether the mask is a statement about the whole optimiser batch, which `keep` must see at once."""
        return isinstance(self.mask, SecondMoment)

    @property
    def _is_episodic(self) -> bool:
        return isinstance(self.weight, SequenceRatio | Gspo)

    @property
    def _counts_episodes(self) -> bool:
        return self._is_episodic if self.level is None else self.level == "sequence"

    def denominator(self, batch: TokenBatch) -> float:
        """What the policy term is divided by: the batch's action tokens, or its episodes at level `sequence`."""
        return float(batch.n_episodes if self._counts_episodes else batch.n_act)

    def keep(self, logprobs_BT: Float[Tensor, "B T"], batch: AdvantageBatch) -> Bool[Tensor, "B T"]:
        """The action tokens that the mask keeps, from the policy's log-probabilities now; no gradient.

        The rows are whole episodes, and the whole optimiser batch where `needs_batch`.
        """
        tokens, device = batch.batch, logprobs_BT.device
        behavior_BT, mask_BT = tokens.behavior_logprobs.to(device), tokens.mask.to(device)
        match self.mask:
            case None:
                return mask_BT
            case Band():
                return band_mask(logprobs_BT, behavior_BT, mask_BT, band=self.mask)
            case ProbabilityDifference() | BinaryKl():
                return dppo_mask(logprobs_BT, behavior_BT, batch.advantages.to(device), mask_BT, rule=self.mask)
            case SecondMoment(limit=limit):
                return second_moment_mask(logprobs_BT, behavior_BT, mask_BT, limit=limit)
            case SequenceTrust(limit=limit):
                episode_B = tokens.episode.to(device)
                return sequence_trust_mask(logprobs_BT, behavior_BT, mask_BT, episode_B=episode_B, limit=limit)

    def __call__(
        self,
        logprobs_BT: Float[Tensor, "B T"],
        batch: AdvantageBatch,
        *,
        kl_BT: Float[Tensor, "B T"] | None,
        denominator: float,
        n_act: int,
        keep_BT: Bool[Tensor, "B T"] | None = None,
    ) -> LossTerm:
        """The loss of these rows; `denominator` and `n_act` are those of the whole optimiser batch.

        `kl_BT` is the divergence of `direction`, policy now and anchor, in nats with its gradient; read when `needs_kl`.
        `keep_BT` is these rows' part of `keep`, required where `needs_batch` and found here where None. All rows
        of an episode must be in the call. Diagnostics are those of the weight (of the tokens that it sees), with
        a mask `masked` (action tokens dropped), and with a penalty `kl_sum` (nats summed over action tokens).

        Raises:
            MissingError: the penalty needs a divergence, or the mask the whole batch, and there is none.
            DataError: see the weight's own function.
        """
        tokens, device = batch.batch, logprobs_BT.device
        behavior_BT, mask_BT = tokens.behavior_logprobs.to(device), tokens.mask.to(device)
        episode_B = tokens.episode.to(device)
        if keep_BT is None:
            if self.needs_batch:
                raise MissingError(
                    f"the mask {self.mask} of '{tokens.agent}' is over the whole optimiser batch; pass its part of `keep`"
                )
            keep_BT = self.keep(logprobs_BT, batch)
        kept_BT = mask_BT & keep_BT.to(device)
        # A per-episode ratio is of all own tokens: there the mask takes its share of the term instead.
        seen_BT = mask_BT if self._is_episodic else kept_BT
        advantages_BT = batch.advantages.to(device)
        share_B = torch.ones_like(advantages_BT[:, 0])
        if self._is_episodic:
            share_B = share_B * _episode_sums(kept_BT.sum(dim=1), episode_B)
        if self._counts_episodes:
            share_B = share_B / _episode_sums(mask_BT.sum(dim=1), episode_B)
        advantages_BT = advantages_BT * share_B[:, None]
        match self.weight:
            case None:
                term = LossTerm(total=logprobs_BT.new_zeros(()), diagnostics={})
            case Dis(band=band):
                term = dis(logprobs_BT, behavior_BT, advantages_BT, seen_BT, band=band, denominator=denominator)
            case Is(cap=cap):
                term = importance(logprobs_BT, behavior_BT, advantages_BT, seen_BT, cap=cap, denominator=denominator)
            case Ppo(clip=clip):
                term = ppo(logprobs_BT, behavior_BT, advantages_BT, seen_BT, clip=clip, denominator=denominator)
            case Likelihood():
                term = likelihood(logprobs_BT, advantages_BT, seen_BT, denominator=denominator)
            case SequenceRatio(clip=clip) | Gspo(clip=clip):
                term = sequence(
                    logprobs_BT,
                    behavior_BT,
                    advantages_BT,
                    seen_BT,
                    episode_B=episode_B,
                    clip=clip,
                    denominator=denominator,
                    is_mean=isinstance(self.weight, Gspo),
                )
        total, diagnostics = term.total, dict(term.diagnostics)
        if self.mask is not None:
            diagnostics["masked"] = float((mask_BT & ~kept_BT).sum())
        if self.needs_kl:
            if kl_BT is None:
                raise MissingError(
                    f"objective of '{tokens.agent}' has penalty {self.penalty} and no divergence; "
                    "pass kl_BT or set penalty 0"
                )
            total = total + self.penalty * kl_term(kl_BT, mask_BT, denominator=float(n_act))
            diagnostics["kl_sum"] = float(_under(mask_BT, kl_BT.detach()).sum())
        return LossTerm(total=total, diagnostics=diagnostics)


def _require_clip(clip: float) -> None:
    if not 0.0 < clip < 1.0:
        raise ConfigError(f"clip {clip}: need 0 < clip < 1 (the lower end of the interval is 1 - clip)")


def _probability(logprobs_BT: Float[Tensor, "B T"], mask_BT: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Probability of the sampled token in double precision, without gradient; 1 outside the mask."""
    return _under(mask_BT, logprobs_BT.detach().double()).exp()


def _episode_sums(values_B: Num[Tensor, " B"], episode_B: Int[Tensor, " B"]) -> Num[Tensor, " B"]:
    """For each row, the sum over all rows of its episode."""
    _, place_B = torch.unique(episode_B, return_inverse=True)
    return torch.zeros_like(values_B).index_add(0, place_B, values_B)[place_B]


def _under(mask_BT: Bool[Tensor, "B T"], value_BT: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """The value where the mask is True and 0 elsewhere; chosen, not multiplied, so junk leaves no
    gradient."""
    return torch.where(mask_BT, value_BT, torch.zeros_like(value_BT))


def _divide(total: Float[Tensor, ""], count: int, denominator: float) -> Float[Tensor, ""]:
    """total / denominator. A sum over nothing is exactly 0, whatever the denominator."""
    if count == 0:
        return total.abs()  # an empty sum, with its graph; abs because -0.0 prints badly
    if not (math.isfinite(denominator) and denominator > 0.0):
        raise DataError(f"loss over {count} terms has denominator {denominator}; count it over the whole optimiser batch")
    return total / denominator


def _episode_advantages(
    advantages_BT: Float[Tensor, "B T"], mask_BT: Bool[Tensor, "B T"], place_B: Int[Tensor, " B"], count: int
) -> tuple[Float[Tensor, " E"], Bool[Tensor, " E"]]:
    """The advantage that each episode's action tokens agree on (0 without any), and which episodes have
    any."""
    owner = place_B[:, None].expand_as(mask_BT)[mask_BT]
    values = advantages_BT[mask_BT]
    empty_E = torch.zeros(count, dtype=values.dtype, device=values.device)
    top_E = empty_E.scatter_reduce(0, owner, values, "amax", include_self=False)
    bottom_E = empty_E.scatter_reduce(0, owner, values, "amin", include_self=False)
    uneven_E = (top_E != bottom_E) & ~torch.isnan(top_E)
    if bool(uneven_E.any()):
        place = int(uneven_E.nonzero()[0, 0])
        raise DataError(
            f"episode number {place} of this batch has advantages from {float(bottom_E[place])} to "
            f"{float(top_E[place])}; a ratio of whole episodes needs one advantage for each"
        )
    acts_E = torch.zeros(count, dtype=torch.bool, device=values.device)
    acts_E[owner] = True
    return top_E, acts_E
