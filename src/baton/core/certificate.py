"""Lower bounds on the change of the team's return, term by term (ALGORITHMS 3).

A certificate shows what each of its terms rests on. The published bound is kept for information: it is
vacuous at every practical setting (3.3) and always void. What can be positive is `measured`, from pairs of episodes, and
`surrogate`, from held-out episodes of the promoted team and the message-level bounds (3.5), which have a proof behind them.

Axes: runs any, n pairs in the order in which they were drawn, N prompts, m own turns. The unit is the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from baton.errors import ConfigError, DataError, MissingError, NonFiniteError

Basis = Literal["measured", "bounded", "assumed"]
VoidReason = Literal[
    "stale_data", "own_lag", "tokenizer_swap", "kl_not_measured", "too_few_samples", "sampling_mismatch",
    "reward_out_of_range", "prompt_overlap", "assumed_term", "not_evaluated",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One signed contribution to a lower bound, in reward units, and what it rests on."""

    name: str
    value: float
    basis: Basis
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """A lower bound on a change of return. `lower_bound` is the sum of the terms' values.

    `positive` only if the bound is above 0 and no term is assumed; `void` names why no statement is made.
    """

    kind: str
    terms: tuple[Term, ...]
    lower_bound: float
    is_vacuous: bool
    """lower_bound <= 0."""
    verdict: Literal["positive", "inconclusive", "void"]
    reason: VoidReason | Literal[""]
    n: int
    """Fewest episodes (pairs, where it is measured) that any step's statement rests on."""
    confidence: float
    needed: int | None = None
    """Where it is void for too few samples: the n from which on it can be positive."""

    def __post_init__(self) -> None:
        if self.verdict == "positive" and (self.lower_bound <= 0.0 or any(term.basis == "assumed" for term in self.terms)):
            raise DataError(
                f"certificate '{self.kind}' cannot be positive: bound {self.lower_bound}, assumed terms "
                f"{[term.name for term in self.terms if term.basis == 'assumed']}"
            )


def published(
    deltas: Sequence[float],
    n_episodes: Sequence[int],
    *,
    gamma: float = 0.99,
    a_max: float = 5.0,
    delta_conf: float = 0.05,
    kappas: Sequence[float] | None = None,
    curvatures: Sequence[float] | None = None,
    zetas: Sequence[float] | None = None,
) -> Certificate:
    """The SAT paper's bound as printed, for information (ALGORITHMS 3.1): always void(assumed_term).

    sum_i (kappa_i sqrt(delta_i) - a_i delta_i) - 2 gamma/(1-gamma)^2 A_max sum_i sqrt(delta_i/2)
        - sum_i zeta_i/(1-gamma) - sum_i A_max/(1-gamma) sqrt(log(2n/delta_conf)/(2 N_i))

    One entry per agent step: `deltas` in nats (achieved q_gate, or the configured radius), `n_episodes` =
    N_i. Inputs that were not measured enter as 0, of basis `assumed`, noted 'not measured'.

    Raises:
        MissingError: no steps.  DataError: lists of different length, or a step of no episodes.
        NonFiniteError: an input is not finite.  ConfigError: gamma, a_max, delta_conf or a delta out of
        range.
    """
    n_steps = len(deltas)
    if n_steps == 0:
        raise MissingError("a bound over no steps; give one radius per agent step")
    if not (0.0 <= gamma < 1.0 and a_max > 0.0 and 0.0 < delta_conf < 1.0):
        raise ConfigError(
            f"gamma {gamma}, a_max {a_max}, delta_conf {delta_conf}: need gamma in [0, 1), a_max > 0 and "
            "delta_conf in (0, 1)"
        )
    inputs = {"deltas": deltas, "n_episodes": n_episodes, "kappas": kappas, "curvatures": curvatures, "zetas": zetas}
    for name, values in inputs.items():
        if values is None:
            continue
        if len(values) != n_steps:
            raise DataError(f"{len(values)} {name} for {n_steps} deltas; give one per agent step")
        for step, value in enumerate(values):
            if not math.isfinite(value):
                raise NonFiniteError(f"{name}[{step}] is {value}; need a finite number")
    if min(n_episodes) < 1:
        raise DataError(f"a step of {min(n_episodes)} episodes; need at least 1")
    if min(deltas) < 0.0:
        raise ConfigError(f"radius {min(deltas)}: need a number of nats >= 0")

    horizon = 1.0 / (1.0 - gamma)
    occupancy = sum(occupancy_penalty_printed(delta, gamma=gamma, a_max=a_max) for delta in deltas)
    spread = math.log(2.0 * n_steps / delta_conf)
    sample = sum(a_max * horizon * math.sqrt(spread / (2.0 * n)) for n in n_episodes)
    terms = (
        _unless_missing("gain", kappas, lambda k: sum(k[i] * math.sqrt(deltas[i]) for i in range(n_steps))),
        _unless_missing("curvature", curvatures, lambda a: -sum(a[i] * deltas[i] for i in range(n_steps))),
        Term(name="occupancy", value=-occupancy, basis="assumed", note="a quantile stands for the supremum over states"),
        _unless_missing("bias", zetas, lambda z: -horizon * sum(z)),
        Term(
            name="sample",
            value=-sample,
            basis="assumed",
            note="range as printed, half of the range of a variable in [-A_max, A_max]",
        ),
    )
    return concluded("published", terms, n=min(n_episodes), confidence=1.0 - delta_conf)


def concluded(kind: str, terms: Sequence[Term], *, n: int, confidence: float) -> Certificate:
    """Terms with their sum and its verdict: void where one of them is assumed, positive above 0, else inconclusive (3.7)."""
    bound, is_assumed = math.fsum(term.value for term in terms), any(term.basis == "assumed" for term in terms)
    return Certificate(
        kind=kind,
        terms=tuple(terms),
        lower_bound=bound,
        is_vacuous=bound <= 0.0,
        verdict="void" if is_assumed else "positive" if bound > 0.0 else "inconclusive",
        reason="assumed_term" if is_assumed else "",
        n=n,
        confidence=confidence,
    )


def void(kind: str, reason: VoidReason, *, n: int = 0, confidence: float, needed: int | None = None) -> Certificate:
    """No statement, and why: no terms, and the one lower bound that needs none, -inf (3.7)."""
    empty = concluded(kind, (), n=n, confidence=confidence)
    return replace(empty, lower_bound=-math.inf, verdict="void", reason=reason, needed=needed)


def summed(kind: str, steps: Sequence[Certificate]) -> Certificate:
    """A stage of single updates: their bounds added, and their miss rates (union bound); void if one is void (3.7).

    A rejected update changes nothing and is left out.  Raises MissingError without steps.
    """
    if not steps:
        raise MissingError("a sum over no updates; a stage without an accepted update has changed nothing")
    n, confidence = min(step.n for step in steps), max(0.0, 1.0 - math.fsum(1.0 - step.confidence for step in steps))
    for step in steps:
        if step.reason:
            return void(kind, step.reason, n=n, confidence=confidence, needed=step.needed)
    terms = [Term(name=f"update {i}", value=step.lower_bound, basis="measured") for i, step in enumerate(steps, start=1)]
    return concluded(kind, terms, n=n, confidence=confidence)


def miss_rate(delta_conf: float, *, n_agents: int = 1, stage: int | None = None) -> float:
    """Share of statements that may be wrong: delta_conf of a stage, delta_conf/n_agents of each update in it; with `stage`
    k = 1, 2, ... 6/(pi^2 k^2) times that: all stages of a run, however many, add up to delta_conf (union bound, 3.6).

    Raises:
        ConfigError: delta_conf outside (0, 1), no agents, or a stage below 1.
    """
    if not (0.0 < delta_conf < 1.0 and n_agents >= 1 and (stage is None or stage >= 1)):
        raise ConfigError(f"delta_conf {delta_conf}, {n_agents} agents, stage {stage}: need (0, 1), and counts from 1")
    return delta_conf / n_agents / (1.0 if stage is None else (math.pi * stage) ** 2 / 6.0)


# ---- bounds of a mean (3.6) --------------------------------------------------------------------------------


def log_wealth(d: Float[Tensor, "*runs n"], gain: float | Tensor, *, width: float, level: float) -> Float[Tensor, "*runs n"]:
    """log K_t, after each pair t, of a bet that the mean of d exceeds `gain`; both in [-width, width], fp64.

    K_t(m) = prod_{s<=t} (1 + min(lam_s, .5/m)(X_s - m)), X = (d + width)/(2 width), m likewise (arXiv 2010.09686; 3.6, G31)
    lam_s = sqrt(2 ln(1/level)/(v_{s-1} s ln(1+s))), v_t the running variance from v_0 = 1/4 on

    If the mean is at most `gain`, P(K_t >= 1/level at any t) <= level, whoever looks and whenever. Falls in `gain`.

    Raises:
        ConfigError: level outside (0, 1).  DataError: a difference outside [-width, width], or NaN.
    """
    if not 0.0 < level < 1.0:
        raise ConfigError(f"level {level}: need a number in (0, 1)")
    if not bool((d.abs() <= width).all()):
        raise DataError(f"a difference of two returns lies outside [-{width}, {width}], or is NaN")
    x, m = (d.double() / width + 1.0) / 2.0, (torch.as_tensor(gain, dtype=torch.float64) / width + 1.0) / 2.0
    t = torch.arange(1, d.shape[-1] + 1, dtype=torch.float64)
    mean = (0.5 + x.cumsum(-1)) / (t + 1.0)
    squares = 0.25 + (x - mean).square().cumsum(-1)
    before = torch.cat([torch.full_like(squares[..., :1], 0.25), squares[..., :-1]], dim=-1)  # t v_{t-1}
    bet = torch.sqrt(-2.0 * math.log(level) / (before * torch.log1p(t)))
    return torch.log1p(torch.minimum(bet, 0.5 / m) * (x - m)).cumsum(-1)


def betting_bound(d: Float[Tensor, "*runs n"], *, width: float, level: float) -> Float[Tensor, "*runs"]:
    """The largest gain against which the wealth has reached 1/level at any pair: a lower bound of the mean of d for all n at
    once, so one may look and stop at will; minus that of -d is an upper bound (3.6, G31)."""
    low, high = (torch.full(d.shape[:-1], side * width, dtype=torch.float64) for side in (-1.0, 1.0))
    for _ in range(60):
        middle = (low + high) / 2.0
        reached = log_wealth(d, middle[..., None], width=width, level=level).amax(-1) >= -math.log(level)
        low, high = torch.where(reached, middle, low), torch.where(reached, high, middle)
    return low


def may_still_show(d: Float[Tensor, " n"], *, count: int, width: float, level: float, errors: float = 2.0) -> bool:
    """Whether the pairs up to the `count`-th may still make the wealth reach 1/level: they would if each of them were as far
    above the mean so far as `errors` standard errors (with the variance that bets rest on, which is never 0). To stop where
    they would not is to look and leave: it costs power, and no certificate is wrong more often for it."""
    n = d.shape[-1]
    if bool(log_wealth(d, 0.0, width=width, level=level).amax() >= -math.log(level)) or n >= count:
        return n < count
    x = (d.double() / width + 1.0) / 2.0
    t = torch.arange(1, n + 1, dtype=torch.float64)
    variance = float((0.25 + (x - (0.5 + x.cumsum(-1)) / (t + 1.0)).square().sum()) / (n + 1.0))
    hoped = min(width, float(d.double().mean()) + errors * 2.0 * width * math.sqrt(variance / n))
    ahead = torch.cat([d.double(), torch.full((count - n,), hoped, dtype=torch.float64)])
    return bool(log_wealth(ahead, 0.0, width=width, level=level).amax() >= -math.log(level))


def bernstein_bound(values: Float[Tensor, "*runs n"], *, reach: float, level: float) -> Float[Tensor, "*runs"]:
    """mean - sqrt(2 s^2 ln(2/level)/n) - 7 reach ln(2/level)/(3(n-1)): a lower bound of the mean at one n that was fixed
    before (arXiv 0907.3740; 3.6, G32). `reach`: length of the range of values.  Raises MissingError at n < 2."""
    if (n := values.shape[-1]) < 2:
        raise MissingError(f"a spread of {n} values; give at least 2")
    mean, spread, log = values.double().mean(-1), values.double().var(-1), math.log(2.0 / level)
    return mean - torch.sqrt(2.0 * spread * log / n) - 7.0 * reach * log / (3.0 * (n - 1))


def betting_n(level: float) -> int:
    """Fewest pairs that betting can call positive: a pair multiplies the wealth by at most 1.5, so 1.5^n > 1/level."""
    return math.floor(-math.log(level) / math.log(1.5)) + 1


def bernstein_n(level: float, *, share: float = 1.0) -> int:
    """Fewest values in [-1, 1] whose range term 14 ln(2/level)/(3(n-1)) is below `share`; 1 is the largest mean (G51)."""
    return math.floor(14.0 * math.log(2.0 / level) / (3.0 * share)) + 2


# ---- what a run can show (3.6) -----------------------------------------------------------------------------

FEWEST_PROMPTS = 500
"""Probe prompts below which a surrogate is not computed (3.6)."""


def measured(
    candidate: Sequence[float | None],
    promoted: Sequence[float | None],
    *,
    low: float,
    high: float,
    level: float,
    method: Literal["betting", "bernstein"] = "betting",
) -> Certificate:
    """By how much the candidate's mean return exceeds the promoted team's, from their returns in [low, high] (3.6).

    Pair i is of the i-th prompt drawn, with replacement. None is a missing return, which counts against the claim: `low` for
    the candidate, `high` for the promoted team. The harm test is this with the teams exchanged: positive means harm. `level`
    is the share of statements that may be wrong (`miss_rate`); `betting` may be asked after every pair, `bernstein` once.

    Raises:
        DataError: lists of different length.  NonFiniteError: a return is NaN.  ConfigError: not low < high.
    """
    n, width, confidence = len(candidate), high - low, 1.0 - level
    if len(promoted) != n:
        raise DataError(f"{n} returns of the candidate and {len(promoted)} of the promoted team; pair them by draw")
    _require_range(low, high)
    returns = [[low if r is None else r for r in candidate], [high if r is None else r for r in promoted]]
    both = torch.tensor(returns, dtype=torch.float64)
    if bool(torch.isnan(both).any()):
        raise NonFiniteError("a return is NaN; a missing return is None")
    needed = betting_n(level) if method == "betting" else bernstein_n(level)
    if n < needed:
        return void("measured", "too_few_samples" if n else "not_evaluated", n=n, confidence=confidence, needed=needed)
    if not bool(((both >= low) & (both <= high)).all()):
        return void("measured", "reward_out_of_range", n=n, confidence=confidence)
    d = both[0] - both[1]
    is_betting = method == "betting"
    bound = betting_bound(d, width=width, level=level) if is_betting else bernstein_bound(d, reach=2.0 * width, level=level)
    is_real = torch.tensor([a is not None and b is not None for a, b in zip(candidate, promoted, strict=True)])
    gain, missing = float(d[is_real].sum()) / n, sum(r is None for r in (*candidate, *promoted))
    imputed = float(d[~is_real].sum()) / n
    terms = (
        Term(name="paired gain", value=gain, basis="measured", note=f"{n} pairs"),
        Term(name="imputation", value=imputed, basis="bounded", note=f"{missing} returns missing, each against the claim"),
        Term(name="sampling", value=float(bound) - gain - imputed, basis="bounded", note=method),
    )
    return concluded("measured", terms, n=n, confidence=confidence)


def surrogate_terms(
    log_ratio_Nm: Float[Tensor, "N m"], returns_N: Float[Tensor, " N"], values_Nm: Float[Tensor, "N m"], *, cap: float = 2.0
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"], Float[Tensor, "N m"]]:
    """(gain, lost, apart) of each episode of the promoted team, fp64, by the ratios r_k of own messages (3.6, G28, G41).

    gain = sum_k (min(r_k, cap) - 1)(R - V(s_k)), on average above the surrogate gain by at most width E[lost] (V10);
    lost = sum_k (1 - min(r_k, cap)), on average zeta_trunc; apart_k = (1 - r_k)^+, on average abar_k (cap >= 1). A turn that
    did not come has log-ratio 0 and adds nothing.
    """
    less_Nm = 1.0 - torch.exp(log_ratio_Nm.double().clamp(max=math.log(cap)))
    return -(less_Nm * (returns_N.double()[:, None] - values_Nm)).sum(1), less_Nm.sum(1), less_Nm.clamp(min=0.0)


def surrogate(
    log_ratio_Nm: Float[Tensor, "N m"],
    returns: Sequence[float | None],
    values_Nm: Float[Tensor, "N m"],
    *,
    low: float,
    high: float,
    level: float,
    looks: int = 5,
    fewest: int = FEWEST_PROMPTS,
) -> Certificate:
    """LCB(G) - P - width UCB(zeta_trunc) of an update of one agent, from one episode of the promoted team per probe prompt:
    P = 0 where it speaks at most m = 1 times, else UCB(P_mean) (3.5, 3.6).

    Empirical Bernstein, `level` split evenly over terms and the `looks` candidates judged on these episodes; prompts may be
    drawn without replacement (docs/equations.md). The baseline V was not trained on them and is clipped to [low, high]. None
    is a missing return: it counts as whichever of `low` and `high` makes the gain of its own episode smaller, so the bound
    holds whatever it was. Below `fewest` prompts, or where the range term alone outweighs every gain, it is void and not
    computed.

    Raises:
        DataError: returns of another number.  NonFiniteError: a NaN, or a ratio of +inf.  ConfigError: not low < high, or
        looks below 1.
    """
    (n, m), width, confidence = log_ratio_Nm.shape, high - low, 1.0 - level
    _require_range(low, high)
    if looks < 1:
        raise ConfigError(f"looks {looks}: need at least 1")
    if len(returns) != n:
        raise DataError(f"{len(returns)} returns of {n} episodes; give one each, None where it is missing")
    given_N = torch.tensor([low if r is None else r for r in returns], dtype=torch.float64)
    if not bool((log_ratio_Nm < math.inf).all()) or bool(torch.isnan(values_Nm).any() | torch.isnan(given_N).any()):
        raise NonFiniteError("a log-ratio of a message is NaN or +inf, or a return or baseline is NaN")
    each = level / (looks * (2 if m == 1 else 3))
    if n < (needed := max(fewest, bernstein_n(each))):
        return void("surrogate", "too_few_samples", n=n, confidence=confidence, needed=needed)
    if not bool(((given_N >= low) & (given_N <= high)).all()):
        return void("surrogate", "reward_out_of_range", n=n, confidence=confidence)
    values_Nm = values_Nm.clamp(low, high)
    _, lost, apart = surrogate_terms(log_ratio_Nm, given_N, values_Nm)
    # The gain of an episode is -lost R + constant.
    is_real = torch.tensor([r is not None for r in returns])
    worst_N = torch.where(is_real | (lost <= 0.0), given_N, high)
    gain, _, _ = surrogate_terms(log_ratio_Nm, worst_N, values_Nm)
    sure = float(bernstein_bound(gain, reach=2.0 * m * width, level=each))
    mean, imputed = float(gain[is_real].sum()) / n, float(gain[~is_real].sum()) / n
    zeta = max(0.0, -float(bernstein_bound(-lost, reach=2.0 * m, level=each)))
    drift = 0.0 if m == 1 else -2.0 * float(bernstein_bound(-apart[:, :-1].sum(1), reach=m - 1.0, level=each))
    terms = (
        Term(name="held-out gain", value=mean, basis="measured", note=f"{n} prompts"),
        Term(
            name="imputation",
            value=imputed,
            basis="bounded",
            note=f"{n - int(is_real.sum())} returns missing, each against the claim",
        ),
        Term(name="sampling", value=sure - mean - imputed, basis="bounded", note="empirical Bernstein"),
        Term(name="truncation", value=-width * zeta, basis="measured", note="upper end"),
        Term(
            name="drift",
            value=-width * drift if drift else 0.0,
            basis="bounded" if m == 1 else "measured",
            note=f"at most {m} own turns",
        ),
    )
    return concluded("surrogate", terms, n=n, confidence=confidence)


# ---- discounted forms (3.2, 3.4) ---------------------------------------------------------------------------


def occupancy_penalty_printed(delta: float, *, gamma: float, a_max: float) -> float:
    """2 gamma/(1-gamma)^2 A_max sqrt(delta/2): one step's occupancy penalty as printed, in reward units (3.1; G10)."""
    _require_radius(delta)
    return 2.0 * gamma / (1.0 - gamma) ** 2 * a_max * math.sqrt(delta / 2.0)


def occupancy_penalty_trpo(delta: float, *, gamma: float, a_max: float) -> float:
    """2 gamma/(1-gamma)^2 A_max delta: the same with the test function bounded by 2 TV A_max (V2; G10)."""
    _require_radius(delta)
    return 2.0 * gamma / (1.0 - gamma) ** 2 * a_max * delta


def teamtr_drift(*, gamma: float, a_max: float) -> float:
    """sqrt(2) gamma/(1-gamma)^2 A_max: TeamTR's drift constant, per sqrt(nat) (ALGORITHMS 3.2; G39)."""
    return math.sqrt(2.0) * gamma / (1.0 - gamma) ** 2 * a_max


def discount_at(gamma: float, n: int) -> float:
    """gamma^n: what a terminal reward is worth n tokens earlier (V8; G42)."""
    return gamma**n


# ---- sample sizes (V6) -------------------------------------------------------------------------------------


def dkw_epsilon(n: int, *, eta: float) -> float:
    """sqrt(log(2/eta) / (2n)): uniform error of an empirical CDF, a probability and not a divergence (V6; G9)."""
    if n < 1:
        raise MissingError(f"a CDF of {n} samples; need at least 1")
    return math.sqrt(math.log(2.0 / eta) / (2.0 * n))


def dkw_n(eps: float, *, eta: float) -> int:
    """Fewest samples for which `dkw_epsilon` is at most eps (G9)."""
    return math.ceil(math.log(2.0 / eta) / (2.0 * eps**2))


def zero_violation_n(alpha: float, *, confidence: float) -> int:
    """Fewest independent units that, none of them violating, bound the violation rate by alpha (G9)."""
    return math.ceil(math.log(1.0 - confidence) / math.log(1.0 - alpha))


# ---- the message-level bound (3.5) -------------------------------------------------------------------------


def message_bound_amax(m: int, delta: float, a_max: float) -> float:
    """m(m-1) delta A_max: P_amax for an agent of at most m own turns, delta >= sup of its message KL (either direction).

    0 for an agent that speaks once.
    """
    _require_turns(m)
    _require_radius(delta)
    return m * (m - 1) * delta * a_max


def message_bound_span(m: int, delta: float, span: float) -> float:
    """m(m-1) delta span / 2: P_span, span = sup_s (max_a A - min_a A)."""
    _require_turns(m)
    _require_radius(delta)
    return m * (m - 1) * delta * span / 2.0


def message_bound_mean(abar: Sequence[float], width: float) -> float:
    """2 width sum_{k<m} abar_k: P_mean, which needs no supremum.

    `abar` holds E[(1 - r_k)^+] of each of the agent's m own turns, in order; the last one costs nothing, so
    an agent that speaks once has 0. `width` is the range of returns.
    """
    _require_abar(abar)
    return 2.0 * width * math.fsum(abar[:-1])


def message_bound_mixed(abar: Sequence[float], alpha: float, span: float) -> float:
    """2 span alpha sum_{k<m} (m-k) abar_k: P_mixed. `abar` as in `message_bound_mean`, alpha = sup message TV."""
    _require_abar(abar)
    m = len(abar)
    return 2.0 * span * alpha * math.fsum((m - k) * value for k, value in enumerate(abar, start=1))


def staleness_bound(m: int, alpha: float, accepted: Sequence[tuple[int, float]], width: float) -> float:
    """2 width m alpha sum_u m_u alpha_u: error of a surrogate on episodes of a team that has since accepted updates u of
    teammates (at most m_u own turns, sup message TV alpha_u), for an agent of m own turns and sup TV alpha (6.6; G37)."""
    _require_turns(min([m, *(turns for turns, _ in accepted)]))
    return 2.0 * width * m * alpha * math.fsum(turns * other for turns, other in accepted)


def alpha_from_kl(delta: float) -> float:
    """min(sqrt(delta/2), sqrt(1 - exp(-delta))): the TV that a KL of delta nats allows (Pinsker, Bretagnolle-Huber; G29)."""
    _require_radius(delta)
    return min(math.sqrt(delta / 2.0), math.sqrt(-math.expm1(-delta)))


def _unless_missing(name: str, values: Sequence[float] | None, contribution: Callable[[Sequence[float]], float]) -> Term:
    if values is None:
        return Term(name=name, value=0.0, basis="assumed", note="not measured")
    return Term(name=name, value=contribution(values), basis="measured")


def _require_range(low: float, high: float) -> None:
    if not low < high:
        raise ConfigError(f"returns in [{low}, {high}]: need low < high")


def _require_radius(delta: float) -> None:
    if not delta >= 0.0:
        raise ConfigError(f"divergence {delta}: need a number of nats >= 0")


def _require_turns(m: int) -> None:
    if m < 1:
        raise ConfigError(f"{m} own turns: an agent that is updated acts at least once")


def _require_abar(abar: Sequence[float]) -> None:
    if not abar:
        raise MissingError("abar of no turns; give one mean total variation per own turn, the last one included")
    for k, value in enumerate(abar, start=1):
        if not 0.0 <= value <= 1.0:
            raise DataError(f"abar of own turn {k} is {value}; a mean total variation lies in [0, 1]")
