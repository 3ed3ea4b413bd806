"""Judging a divergence, and what follows from the judgement: penalty, learning rate, line search
(ALGORITHMS 2.4, 2.5, 2.13); whom to update first and how far to let them go (2.6, 2.14).

Axes: N token states, P parameters, U prompts (the independent unit of every statistic).

The judge reads what was measured and compares; it repairs nothing. Missing, empty or NaN input is an error,
+inf fails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy import special
from torch import Tensor

from baton.core.divergence import message_values
from baton.errors import ConfigError, DataError, MissingError, NonFiniteError
from baton.types import Direction, GateRecord, RejectReason, TokenDivergence

SCALES = (1 / 2, 1 / 4, 1 / 8, 1 / 16)
"""Shares of the first displacement that the default line search looks at after the whole one."""


# ---- order statistics --------------------------------------------------------------------------------------


def order_statistic_rank(n_units: int, *, level: float, confidence_miss: float) -> int | None:
    """Smallest k such that the k-th smallest of n_units draws bounds the `level`-quantile from above.

    k = min{k : BinomCDF(k-1; N, level) >= 1 - confidence_miss}; None where no k <= N does it (ALGORITHMS
    2.4; G23). `confidence_miss` is eta' = eta / looks, the share of such bounds that may lie below the
    quantile.

    Raises:
        ConfigError: level or confidence_miss outside (0, 1).  MissingError: no units.
    """
    _require_share(level=level, confidence_miss=confidence_miss)
    if n_units < 1:
        raise MissingError(f"a quantile of {n_units} units; probe at least one prompt")
    reached = special.bdtr(np.arange(n_units), n_units, level) >= 1.0 - confidence_miss
    ranks = np.flatnonzero(reached)
    return int(ranks[0]) + 1 if ranks.size else None


def certifiable_level(n_units: int, *, confidence_miss: float) -> float:
    """The highest quantile level that n_units can certify: confidence_miss^(1/N), reached by their maximum.

    Raises:
        ConfigError: confidence_miss outside (0, 1).  MissingError: no units.
    """
    _require_share(confidence_miss=confidence_miss)
    if n_units < 1:
        raise MissingError(f"a quantile of {n_units} units; probe at least one prompt")
    return confidence_miss ** (1.0 / n_units)


def units_needed(*, level: float, confidence_miss: float) -> int:
    """Fewest units for which an order statistic certifies the `level`-quantile: least N with level^N <=
    confidence_miss.

    Raises:
        ConfigError: level or confidence_miss outside (0, 1).
    """
    _require_share(level=level, confidence_miss=confidence_miss)
    return max(1, math.ceil(math.log(confidence_miss) / math.log(level)))


def clopper_pearson_upper(k: int, n: int, *, confidence: float = 0.95) -> float:
    """Exact upper confidence bound of a probability that came up k times in n independent trials (G24).

    Raises:
        ConfigError: confidence outside (0, 1).  DataError: not 0 <= k <= n with n >= 1.
    """
    _require_share(confidence=confidence)
    if not 0 <= k <= n or n < 1:
        raise DataError(f"{k} of {n} trials: need 0 <= k <= n and n >= 1")
    return 1.0 if k == n else float(special.betaincinv(k + 1, n - k, confidence))


def quantile_point(values: Float[Tensor, " N"], *, alpha: float) -> float:
    """The (1 - alpha)-quantile as an order statistic, X_(ceil((1-alpha) N)), without interpolation.

    Raises:
        MissingError: no values.  NonFiniteError: a NaN (names the index).  ConfigError: alpha outside (0, 1).
    """
    _require_share(alpha=alpha)
    if values.numel() == 0:
        raise MissingError("a quantile of no states; give at least one")
    if bool(torch.isnan(values).any()):
        raise NonFiniteError(f"value {int(torch.isnan(values).nonzero()[0, 0])} of {values.numel()} is NaN")
    # (1 - .41) * 100 is a little more than 59 in double precision; rounding first keeps the rank exact.
    rank = max(1, math.ceil(round((1.0 - alpha) * values.numel(), 9)))
    return float(torch.sort(values).values[rank - 1])


# ---- the gate ----------------------------------------------------------------------------------------------


def gate(
    divergence: TokenDivergence,
    *,
    message: Int[Tensor, " N"],
    unit: Int[Tensor, " N"],
    drawn: Int[Tensor, " U"],
    direction: Direction,
    alpha: float,
    eta: float,
    looks: int,
    radius_token: float,
    radius_message_mean: float,
    require_certified: bool = False,
    scale: float = 1.0,
) -> GateRecord:
    """One look at a candidate: measured, compared with both radii, recorded (ALGORITHMS 2.4).

    `message` and `unit` number the message and the prompt of each state; `drawn` holds the one state of
    each prompt that the caller drew by key. Passes iff max(q_point, q_ucb where certified) <= radius_token
    and the mean over messages of their mean d <= radius_message_mean, all of them finite. `looks` is how
    many looks this update may take in all: the bound's miss rate is eta / looks. `message_sum` is the mean
    over messages of the sum of kl_old_new over the states given: of whole messages only where no message
    was capped.

    Raises:
        DataError: message, unit or drawn do not fit the states, or `drawn` is not one state of each prompt.
        ConfigError: a radius, alpha, eta, looks or scale out of range; or `require_certified` with too few
        prompts
            (names the number needed).
    """
    d = divergence.of(direction).double()
    _require_fit(d.numel(), message, unit, drawn)
    _require_share(alpha=alpha, eta=eta)
    if looks < 1:
        raise ConfigError(f"looks {looks}: need at least 1")
    for name, radius in (("radius_token", radius_token), ("radius_message_mean", radius_message_mean)):
        if not radius > 0.0:
            raise ConfigError(f"{name} {radius}: need a number of nats > 0")
    if not 0.0 < scale <= 1.0:
        raise ConfigError(f"scale {scale}: need a share of the displacement in (0, 1]")

    level, miss, n_units = 1.0 - alpha, eta / looks, int(drawn.numel())
    q_point = quantile_point(d, alpha=alpha)
    rank = order_statistic_rank(n_units, level=level, confidence_miss=miss)
    if rank is None and require_certified:
        needed = units_needed(level=level, confidence_miss=miss)
        raise ConfigError(
            f"{n_units} probe prompts cannot certify the {level:g}-quantile at miss rate {miss:g}: "
            f"need {needed} prompts, or gate.require_certified = false"
        )
    q_ucb = None if rank is None else float(torch.sort(d[drawn]).values[rank - 1])
    q_gate = q_point if q_ucb is None else max(q_point, q_ucb)
    message_mean = float(message_values(d, message)[0].mean())
    inside = q_gate <= radius_token and message_mean <= radius_message_mean
    return GateRecord(
        q_point=q_point,
        q_ucb=q_ucb,
        q_gate=q_gate,
        message_mean=message_mean,
        n_units=n_units,
        n_states=int(d.numel()),
        certified=rank is not None,
        certifiable_level=certifiable_level(n_units, confidence_miss=miss),
        radius_token=radius_token,
        radius_message_mean=radius_message_mean,
        direction=direction,
        scale=scale,
        # An infinite radius switches a comparison off, never the rule that +inf fails.
        passed=inside and bool(torch.isfinite(d).all()),
        message_sum=float(message_values(divergence.kl_old_new, message)[1].mean()),
    )


# ---- after the judgement -----------------------------------------------------------------------------------


def next_penalty(beta: float, *, full_step_failed: bool, relaxed: bool, low: float = 1e-3, high: float = 10.0) -> float:
    """The agent's next KL coefficient, per nat: doubled, halved or kept, within [low, high] (ALGORITHMS
    2.5; G27).

    `full_step_failed`: the whole displacement did not pass (the update was shrunk or rejected). `relaxed`:
    scale 1 passed with q_gate below half the token radius.

    Raises:
        ConfigError: not 0 < low <= beta <= high.  DataError: both flags at once.
    """
    if not 0.0 < low <= beta <= high:
        raise ConfigError(f"penalty {beta}: need 0 < {low} <= penalty <= {high}")
    if full_step_failed and relaxed:
        raise DataError("a full step that failed cannot also have passed below half the radius")
    if full_step_failed:
        return min(high, 2.0 * beta)
    return max(low, beta / 2.0) if relaxed else beta


def line_search_scales(halvings: int) -> tuple[float, ...]:
    """1/2, 1/4, ... : the shares of the first displacement to look at after the whole one; powers of two
    are exact.

    Raises:
        ConfigError: a negative number of halvings.
    """
    if halvings < 0:
        raise ConfigError(f"halvings {halvings}: need 0 or more")
    return tuple(0.5**step for step in range(1, halvings + 1))


def next_lr(lr_now: float, *, configured: float, accepted: bool, reason: RejectReason | None) -> float:
    """The agent's next learning rate: halved on Rejected(radius), doubled back up to `configured` on
    acceptance.

    Any other rejection leaves it (ALGORITHMS 2.5).

    Raises:
        ConfigError: not 0 < lr_now <= configured.
        DataError: an acceptance with a reason of rejection.  MissingError: a rejection without one.
    """
    if not 0.0 < lr_now <= configured:
        raise ConfigError(f"lr {lr_now}: need 0 < lr <= the configured {configured}")
    if accepted:
        if reason is not None:
            raise DataError(f"an accepted update has no reason of rejection, not '{reason}'")
        return min(configured, 2.0 * lr_now)
    if reason is None:
        raise MissingError("a rejected update needs its reason to set the next learning rate")
    return lr_now / 2.0 if reason == "radius" else lr_now


def retry_penalty(beta: float, r: int) -> float:
    """min(10, max(beta, .05) 10^r), per nat: the KL coefficient of retry r = 1, 2, ... (ALGORITHMS 2.5; G27).

    A penalty of 0 stays 0: it was left out for good.

    Raises:
        ConfigError: r below 1, or a negative beta.
    """
    if r < 1 or not beta >= 0.0:
        raise ConfigError(f"retry {r} from penalty {beta}: need r >= 1 (0 is the first try) and a penalty >= 0")
    return min(10.0, max(beta, 0.05) * 10.0**r) if beta else 0.0


def retry_lr(lr: float, r: int) -> float:
    """lr / 2^r: the learning rate of retry r = 1, 2, ... (ALGORITHMS 2.5).

    Raises:
        ConfigError: r below 1, or lr is not > 0.
    """
    if r < 1 or not lr > 0.0:
        raise ConfigError(f"retry {r} from lr {lr}: need r >= 1 (0 is the first try) and lr > 0")
    return lr / 2.0**r


def shrinkage(first_norm: float, retry_norm: float, lr_ratio: float) -> tuple[float, float, float]:
    """(total, lr, beta): total = |theta_r - theta_S| / |theta_0 - theta_S| = lr_r/lr_j times what is beta's.

    (ALGORITHMS 2.5; G26b.) Norms are the masters'.

    Raises:
        DataError: not first_norm > 0, retry_norm >= 0 and lr_ratio > 0, all finite.
    """
    if not (0.0 < first_norm < math.inf and 0.0 <= retry_norm < math.inf and 0.0 < lr_ratio < math.inf):
        raise DataError(f"norms {first_norm} and {retry_norm}, lr ratio {lr_ratio}: a first try moves, by finite steps")
    total = retry_norm / first_norm
    return total, lr_ratio, total / lr_ratio


# ---- whose turn, and how far ---------------------------------------------------------------------------------


def greedy_gain(
    gradient_P: Float[Tensor, " P"], fisher_P: Float[Tensor, " P"], *, delta: float, eps: float = 1e-8
) -> tuple[float, float]:
    """(kappa, gain): kappa = sqrt(2 sum g^2/(f + eps)), gain = kappa sqrt(delta) (ALGORITHMS 2.6; G38).

    The first-order gain attainable within KL delta: g the mean surrogate gradient, f the diagonal Fisher. A
    heuristic: with many parameters coordinates of f near 0 and noise dominate it.

    Raises:
        NonFiniteError: an entry is not finite, or f + eps not above 0.  ConfigError: delta is not > 0.
    """
    if not delta > 0.0:
        raise ConfigError(f"radius {delta}: need a number of nats > 0")
    total = float((gradient_P.square() / (fisher_P + eps)).sum(dtype=torch.float64))
    if not (math.isfinite(total) and bool(((fisher_P + eps > 0.0) & torch.isfinite(fisher_P)).all())):
        raise NonFiniteError(f"sum of g^2/(f + eps) is {total}: a gradient is finite, a diagonal Fisher a mean square")
    kappa = math.sqrt(2.0 * total)
    return kappa, kappa * math.sqrt(delta)


def allocate_radius(kappas: Sequence[float], *, budget: float, quantum: float, cap: float) -> tuple[float, ...]:
    """The stage's budget of nats in quanta, each to the agent whose kappa sqrt(delta) it raises most (ALGORITHMS 2.14).

    Every agent has one quantum first, so no radius is 0, and at most `cap`: what no agent may take stays unspent.
    Ties: fewest quanta so far, then the lower index.

    Raises:
        ConfigError: the budget does not reach one quantum for each agent, or the cap not one.
        MissingError, DataError: no agents; a kappa that is not a finite number >= 0.
    """
    _require_kappas(kappas)
    # Sums of decimal quanta end a little below their whole multiples.
    total, most = (math.floor(nats / quantum * (1.0 + 1e-9)) if quantum > 0.0 else 0 for nats in (budget, cap))
    if most < 1 or total < len(kappas):
        raise ConfigError(
            f"{budget} nats in quanta of {quantum}, at most {cap} each: need one for each of {len(kappas)} agents"
        )
    held = [1] * len(kappas)
    for _ in range(min(total, most * len(kappas)) - len(kappas)):
        open_to = [j for j in range(len(kappas)) if held[j] < most]
        held[max(open_to, key=lambda j: (kappas[j] * (math.sqrt(held[j] + 1) - math.sqrt(held[j])), -held[j], -j))] += 1
    return tuple(quanta * quantum for quanta in held)


def allocate_radius_continuous(kappas: Sequence[float], budget: float) -> tuple[float, ...]:
    """budget kappa_j^2 / sum kappa^2: what maximises sum kappa_j sqrt(delta_j) (ALGORITHMS 2.14; G48).

    Raises:
        ConfigError: the budget is not > 0, or every kappa 0.  MissingError, DataError: as for `allocate_radius`.
    """
    _require_kappas(kappas)
    if not (budget > 0.0 and max(kappas) > 0.0):
        raise ConfigError(f"a budget of {budget} nats for kappas {list(kappas)}: need one above 0 of each")
    squares = [(kappa / max(kappas)) ** 2 for kappa in kappas]
    return tuple(budget * square / math.fsum(squares) for square in squares)


# ---- the speed limit ---------------------------------------------------------------------------------------


def fisher_rao(p0: float, p1: float) -> float:
    """|2 (asin sqrt p1 - asin sqrt p0)|: Fisher-Rao length of the way between two probabilities of an
    answer, in radians.

    Raises:
        DataError: a probability outside [0, 1].
    """
    for p in (p0, p1):
        if not 0.0 <= p <= 1.0:
            raise DataError(f"probability {p}: need a number in [0, 1]")
    return abs(2.0 * (math.asin(math.sqrt(p1)) - math.asin(math.sqrt(p0))))


def speed_limit(p0: float, p1: float, *, delta: float) -> float:
    """Fewest accepted updates from p0 to p1 within a radius of delta nats, not rounded: S / sqrt(2 delta).

    Exact at every step size for direction `max` (max of both KLs >= S^2/2); for one direction alone it
    holds for small steps only (ALGORITHMS 2.13; G43).

    Raises:
        DataError: a probability outside [0, 1].  ConfigError: delta is not > 0.
    """
    if not delta > 0.0:
        raise ConfigError(f"radius {delta}: need a number of nats > 0")
    return fisher_rao(p0, p1) / math.sqrt(2.0 * delta)


def greedy_exact_steps(p0: float, p1: float, *, delta: float, direction: Direction = "max") -> int:
    """Updates that a learner needs which goes as far as the radius allows each time, two answers
    (ALGORITHMS 2.13; G43).

    Raises:
        DataError: a probability outside (0, 1): certainty is infinitely far.  ConfigError: delta is not > 0.
    """
    if not (0.0 < p0 < 1.0 and 0.0 < p1 < 1.0):
        raise DataError(f"probabilities {p0} and {p1}: need numbers in (0, 1)")
    if not delta > 0.0:
        raise ConfigError(f"radius {delta}: need a number of nats > 0")
    here, target = (p0, p1) if p0 <= p1 else (1.0 - p0, 1.0 - p1)
    steps = 0
    while here < target:
        steps += 1
        if _binary_divergence(target, here, direction) <= delta:
            break
        inside, outside = here, target
        while inside < (middle := (inside + outside) / 2.0) < outside:
            if _binary_divergence(middle, here, direction) <= delta:
                inside = middle
            else:
                outside = middle
        if inside == here:
            raise ConfigError(f"radius {delta}: no step of double precision fits inside it at probability {here}")
        here = inside
    return steps


def _binary_divergence(new: float, old: float, direction: Direction) -> float:
    odds = math.log(new / old), math.log((1.0 - new) / (1.0 - old))
    new_old, old_new = new * odds[0] + (1.0 - new) * odds[1], -old * odds[0] - (1.0 - old) * odds[1]
    match direction:
        case "new_old":
            return new_old
        case "old_new":
            return old_new
        case "max":
            return max(new_old, old_new)


def _require_share(**shares: float) -> None:
    for name, value in shares.items():
        if not 0.0 < value < 1.0:
            raise ConfigError(f"{name} {value}: need a number in (0, 1)")


def _require_kappas(kappas: Sequence[float]) -> None:
    if not kappas:
        raise MissingError("radii of no agents; give the predicted gain of each")
    if not all(0.0 <= kappa < math.inf for kappa in kappas):
        raise DataError(f"kappas {list(kappas)}: need finite numbers >= 0")


def _require_fit(n_states: int, message: Tensor, unit: Tensor, drawn: Tensor) -> None:
    for name, index in (("message", message), ("unit", unit)):
        if index.shape != (n_states,):
            raise DataError(f"{name} has shape {tuple(index.shape)} for {n_states} states; number each state's own")
    if drawn.numel() == 0:
        raise MissingError("no state was drawn; draw one of each probe prompt")
    if drawn.dim() != 1 or int(drawn.min()) < 0 or int(drawn.max()) >= n_states:
        raise DataError(f"a drawn state is outside the {n_states} states")
    units = torch.sort(unit[drawn]).values
    if not torch.equal(units, torch.unique(unit)):
        raise DataError(
            f"{drawn.numel()} drawn states for {torch.unique(unit).numel()} prompts; draw exactly one "
            "of each: states of one prompt are not independent"
        )
