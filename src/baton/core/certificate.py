"""Lower bounds on the change of the team's return, term by term (ALGORITHMS 3).

A certificate shows what each of its terms rests on. The published bound is kept for information: it is
vacuous at every practical setting (3.3) and always void. The message-level bounds (3.5) are the ones with a
proof behind them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from baton.errors import ConfigError, DataError, MissingError, NonFiniteError

Basis = Literal["measured", "bounded", "assumed"]


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
    reason: str
    n: int
    """Fewest episodes that any step's statement rests on."""
    confidence: float

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
    inputs = {
        "deltas": deltas,
        "n_episodes": n_episodes,
        "kappas": kappas,
        "curvatures": curvatures,
        "zetas": zetas,
    }
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
        Term(
            name="occupancy",
            value=-occupancy,
            basis="assumed",
            note="a quantile stands for the supremum over states",
        ),
        _unless_missing("bias", zetas, lambda z: -horizon * sum(z)),
        Term(
            name="sample",
            value=-sample,
            basis="assumed",
            note="range as printed, half of the range of a variable in [-A_max, A_max]",
        ),
    )
    lower_bound = math.fsum(term.value for term in terms)
    return Certificate(
        kind="published",
        terms=terms,
        lower_bound=lower_bound,
        is_vacuous=lower_bound <= 0.0,
        verdict="void",
        reason="assumed_term",
        n=min(n_episodes),
        confidence=1.0 - delta_conf,
    )


# ---- discounted forms (3.2, 3.4) ---------------------------------------------------------------------------


def occupancy_penalty_printed(delta: float, *, gamma: float, a_max: float) -> float:
    """2 gamma/(1-gamma)^2 A_max sqrt(delta/2): one step's occupancy penalty as printed, in reward units
    (3.1; G10)."""
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
    """sqrt(log(2/eta) / (2n)): uniform error of an empirical CDF, a probability and not a divergence (V6;
    G9)."""
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
    """m(m-1) delta A_max: P_amax for an agent of at most m own turns, delta >= sup of its message KL
    (either direction).

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
    """2 span alpha sum_{k<m} (m-k) abar_k: P_mixed. `abar` as in `message_bound_mean`, alpha = sup message
    TV."""
    _require_abar(abar)
    m = len(abar)
    return 2.0 * span * alpha * math.fsum((m - k) * value for k, value in enumerate(abar, start=1))


def alpha_from_kl(delta: float) -> float:
    """min(sqrt(delta/2), sqrt(1 - exp(-delta))): the TV that a KL of delta nats allows (Pinsker,
    Bretagnolle-Huber; G29)."""
    _require_radius(delta)
    return min(math.sqrt(delta / 2.0), math.sqrt(-math.expm1(-delta)))


def _unless_missing(name: str, values: Sequence[float] | None, contribution: Callable[[Sequence[float]], float]) -> Term:
    if values is None:
        return Term(name=name, value=0.0, basis="assumed", note="not measured")
    return Term(name=name, value=contribution(values), basis="measured")


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
