"""Exact divergences between two laws of the next token, per state, in nats (ALGORITHMS 2.4).

Axes: S states, V vocabulary, N token states in batch order, M messages.

Laws are log-probabilities. A token of probability 0 is -inf and contributes 0 to value and gradient; p > 0 where q = 0 is
+inf, a value that must fail a gate; a NaN stays a NaN. Nothing is clamped: these numbers decide.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from baton.core.losses import LOG_RATIO_BOUND
from baton.errors import ConfigError, DataError

MIN_TEMPERATURE = 0.01
"""Lowest temperature that is scored: below it fp32 logits divided by T overflow or lose all but one token."""


def log_law(
    logits: Float[Tensor, "*states V"], *, temperature: float, forbidden: Bool[Tensor, " V"] | None = None
) -> Float[Tensor, "*states V"]:
    """Log-probabilities of logits / T, in fp32 (fp64 stays fp64). The only way from logits to a law (A01).

    `forbidden` marks vocabulary rows that cannot be sampled, padded rows among them: they get probability 0 (-inf).

    Raises:
        ConfigError: temperature below MIN_TEMPERATURE or not finite.
        DataError: every token is forbidden.
    """
    if not (math.isfinite(temperature) and temperature >= MIN_TEMPERATURE):
        raise ConfigError(f"temperature {temperature}: need a finite number >= {MIN_TEMPERATURE}")
    scaled = logits if logits.dtype == torch.float64 else logits.float()
    # Each operation takes a copy of all logits, and another for its gradient: none that changes nothing.
    if temperature != 1.0:
        scaled = scaled / temperature
    if forbidden is not None and bool(forbidden.any()):
        if bool(forbidden.all()):
            raise DataError(f"all {forbidden.numel()} tokens are forbidden; leave at least one")
        scaled = scaled.masked_fill(forbidden, -math.inf)
    return torch.log_softmax(scaled, dim=-1)


def kl(log_p: Float[Tensor, "S V"], log_q: Float[Tensor, "S V"]) -> Float[Tensor, " S"]:
    """KL(p || q) = sum_v p (log p - log q) of each state, in nats."""
    absent = log_p == -math.inf
    # An absent token reads p = q = 1 from here on: it adds 1 * (0 - 0), to the value and to the gradient.
    log_p, log_q = log_p.masked_fill(absent, 0.0), log_q.masked_fill(absent, 0.0)
    unmatched = log_q == -math.inf
    # p may underflow to 0 where q = 0: 0 * inf would be NaN, and the divergence is infinite.
    finite = torch.exp(log_p) * (log_p - log_q.masked_fill(unmatched, 0.0))
    return finite.masked_fill(unmatched, math.inf).sum(dim=-1)


def exact(log_new: Float[Tensor, "S V"], log_old: Float[Tensor, "S V"]) -> tuple[Float[Tensor, " S"], Float[Tensor, " S"]]:
    """(kl_new_old, kl_old_new) of each state, in nats: KL(candidate || current) and KL(current || candidate)."""
    return kl(log_new, log_old), kl(log_old, log_new)


def directed(
    log_new: Float[Tensor, "S V"], log_old: Float[Tensor, "S V"], direction: Literal["new_old", "old_new"]
) -> Float[Tensor, " S"]:
    """One of the two, with its gradient."""
    return kl(log_new, log_old) if direction == "new_old" else kl(log_old, log_new)


def entropy(log_p: Float[Tensor, "S V"]) -> Float[Tensor, " S"]:
    """-sum_v p log p of each state, in nats."""
    log_p = log_p.masked_fill(log_p == -math.inf, 0.0)  # an absent token adds 1 * 0
    return -(torch.exp(log_p) * log_p).sum(dim=-1)


def total_variation(log_p: Float[Tensor, "S V"], log_q: Float[Tensor, "S V"]) -> Float[Tensor, " S"]:
    """Half the sum of |p - q| of each state: the largest difference of the probability of any event, in [0, 1]."""
    return 0.5 * (torch.exp(log_p) - torch.exp(log_q)).abs().sum(dim=-1)


def k3(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """e^x - 1 - x at x = log candidate - log current of a sampled token: non-negative, for logs and losses only.

    On tokens sampled by `current` its mean estimates kl_old_new; it is not exact, and no gate reads it. Above x =
    LOG_RATIO_BOUND = 20 it stays at its value there, e^20 - 21 = 4.8516517e8, with gradient 0 (A13). NaN stays NaN.
    """
    x = log_ratio.clamp(max=LOG_RATIO_BOUND)
    return torch.expm1(x) - x


def message_values(values: Float[Tensor, " N"], row: Int[Tensor, " N"]) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
    """(mean, sum) of the values of each message, in fp64. `row` says which message a state belongs to.

    Messages come in order of first appearance, whatever their numbers.
    """
    _, place = torch.unique(row, return_inverse=True)
    count = int(place.max()) + 1 if place.numel() else 0
    position = torch.arange(place.numel(), device=place.device)
    first = position.new_zeros(count).scatter_reduce(0, place, position, "amin", include_self=False)
    rank = torch.empty_like(first)
    rank[torch.argsort(first)] = torch.arange(count, device=place.device)
    place = rank[place]
    zeros = torch.zeros(count, dtype=torch.float64, device=values.device)
    sums = zeros.index_add(0, place, values.double())
    sizes = zeros.index_add(0, place, torch.ones_like(values, dtype=torch.float64))
    return sums / sizes, sums


# ---- entering the ball (2.8) -------------------------------------------------------------------------------


def between(
    log_pre_SV: Float[Tensor, "S V"], log_current_SV: Float[Tensor, "S V"], w_S: Float[Tensor, " S"]
) -> Float[Tensor, "S V"]:
    """The laws on the way from `pre` (w = 0) to `current` (w = 1): ~ pre^(1-w) current^w. Where w > 0 a token of probability
    0 in either law gets 0."""
    w_S1 = w_S.to(log_pre_SV.dtype)[:, None]
    absent = (log_pre_SV == -math.inf) | ((log_current_SV == -math.inf) & (w_S1 > 0.0))
    mixed = (1.0 - w_S1) * log_pre_SV.masked_fill(absent, 0.0) + w_S1 * log_current_SV.masked_fill(
        absent | (log_current_SV == -math.inf), 0.0
    )
    return torch.log_softmax(mixed.masked_fill(absent, -math.inf), dim=-1)


def project(
    log_pre_SV: Float[Tensor, "S V"], log_current_SV: Float[Tensor, "S V"], *, radius: float, entries: int = 1 << 18
) -> tuple[Float[Tensor, "S V"], Float[Tensor, " S"]]:
    """(log new, w): each newcomer's law moved towards `current` until KL(new || current) = radius, and how far (2.8; G8).

    new ~ pre^(1-w) current^w, w = lam/(1+lam) in [0, 1): of all laws in the ball the one of smallest KL to `pre`. Inside it
    w = 0 and the law stays as it came. A token of probability 0 in either law gets 0. Newton in w between shrinking bounds,
    to 1e-9 nats: with h = log current - log pre, dKL/dw = -(1-w) Var_new(h). In fp64, whole rows at a time, about `entries`
    numbers, so memory does not grow with S. No gradient: it is a target.

    Raises:
        ConfigError: radius is not > 0.
        DataError: a state where no law on the tokens that both laws have lies inside the ball, or with a NaN (names it).
    """
    if not radius > 0.0:
        raise ConfigError(f"radius {radius}: need a number of nats > 0")
    new_SV, w_S = log_pre_SV.detach().clone(), log_pre_SV.new_zeros(len(log_pre_SV), dtype=torch.float64)
    rows = max(1, entries // log_pre_SV.shape[1])
    for begin in range(0, len(new_SV), rows):
        block = slice(begin, begin + rows)
        pre, current = (torch.log_softmax(law[block].detach().double(), dim=-1) for law in (log_pre_SV, log_current_SV))
        outside, shared = ~(kl(pre, current) <= radius), (pre > -math.inf) & (current > -math.inf)
        nearest = -current.masked_fill(~shared, -math.inf).logsumexp(dim=-1)
        if bool((lost := outside & ~(nearest < radius)).any()):
            state = begin + int(lost.nonzero()[0, 0])
            raise DataError(
                f"state {state}: no law on the tokens that both laws have is within {radius} nats, or one is NaN"
            )
        h, pre = torch.where(shared, current - pre, 0.0), pre.masked_fill(~shared, -math.inf)
        low, high, w = torch.zeros_like(nearest), torch.ones_like(nearest), torch.zeros_like(nearest)
        while True:
            mixed = pre + w[:, None] * h
            top = mixed.amax(dim=-1, keepdim=True)
            weight = torch.exp(mixed - top)  # the one exp of a step: everything else is sums of it
            total = weight.sum(dim=-1)
            weight *= h
            mean, square = weight.sum(dim=-1) / total, torch.linalg.vecdot(weight, h) / total
            log_z = top[:, 0] + total.log()
            gap = -(1.0 - w) * mean - log_z - radius
            open_ = outside & (gap.abs() > 1e-9) & (high - low > 1e-15)
            if not bool(open_.any()):
                break
            low, high = torch.where(gap > 0.0, w, low), torch.where(gap > 0.0, high, w)
            newton = w + gap / ((1.0 - w) * (square - mean.square()))
            w = torch.where(open_, torch.where((newton > low) & (newton < high), newton, (low + high) / 2.0), w)
        new_SV[block] = torch.where(outside[:, None], (mixed - log_z[:, None]).to(new_SV.dtype), new_SV[block])
        w_S[block] = torch.where(outside, w, 0.0)
    return new_SV, w_S
