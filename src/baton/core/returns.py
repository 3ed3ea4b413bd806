"""What a token of one rollout is worth beside a critic's value: advantages along a chain of action tokens (SAO paper,
Eq. 4-5; ALGORITHMS 4.2, 6.4).

Axes: B rows, T tokens. A chain is the action tokens of a row, where `mask_BT` is True: of one agent (the own chain, C2), or
of all agents of a team (C1). The rest is skipped: what lies between two of its tokens, a tool's answer or a teammate's
turn, is one step, however long, and no value there can reach a result. V of a token is the critic's at the prefix before.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from baton.errors import ConfigError, NonFiniteError


def last_action(mask_BT: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """True at the last action token of each row: where the reward of an episode lies (6.4). A row without any has none."""
    after_BT = mask_BT.flip(1).cumsum(1).flip(1)
    return mask_BT & (after_BT == 1)


def adaptive_lambda(tokens_B: Int[Tensor, " B"], *, alpha: float = 1.5) -> Float[Tensor, " B"]:
    """max(0, 1 - 1/(alpha l)) of chains of l action tokens, fp64; 0 for an empty one (SAO paper, 4.1; G5).

    Raises:
        ConfigError: alpha is not > 0.
    """
    if not alpha > 0.0:
        raise ConfigError(f"alpha {alpha}: need a number > 0")
    length_B = tokens_B.double()
    return torch.where(length_B > 0, (1.0 - 1.0 / (alpha * length_B.clamp(min=1.0))).clamp(min=0.0), 0.0)


def skip_gae(
    values_BT: Float[Tensor, "B T"],
    rewards_BT: Float[Tensor, "B T"],
    mask_BT: Bool[Tensor, "B T"],
    *,
    gamma: float,
    lam: float | Float[Tensor, " B"],
    bootstrap_B: Float[Tensor, " B"] | None = None,
) -> Float[Tensor, "B T"]:
    """Generalised advantages on the chain of each row, 0 elsewhere, without gradient (G2-G4, G12-G15).

    d_k = r_k + gamma V_{k+1} - V_k, A_k = d_k + gamma lam A_{k+1}, over the action tokens k of a row alone. Behind the last
    one V is `bootstrap_B` (where a limit cut the episode and its value counts on) or 0. With lam = 1, A + V is the
    discounted return, the critic's target.

    Args:
        rewards_BT: reward units, on action tokens; what stands elsewhere is not read.
        lam: one for all rows, or each row's own (`adaptive_lambda`).

    Raises:
        NonFiniteError: a value or reward of an action token, or a bootstrap, is not finite.
        ConfigError: gamma or lam outside [0, 1].
    """
    rows = values_BT.shape[0]
    lam_B = torch.as_tensor(lam, dtype=torch.float64, device=values_BT.device).expand(rows)
    if not 0.0 <= gamma <= 1.0 or not bool(((lam_B >= 0.0) & (lam_B <= 1.0)).all()):
        raise ConfigError(f"gamma {gamma}, lam {lam}: need numbers in [0, 1]")
    values, rewards = (torch.where(mask_BT, x.detach().double(), 0.0) for x in (values_BT, rewards_BT))
    following = torch.zeros(rows, dtype=torch.float64, device=values.device)
    if bootstrap_B is not None:
        following = bootstrap_B.detach().double()
    if not bool(torch.isfinite(values).all() & torch.isfinite(rewards).all() & torch.isfinite(following).all()):
        raise NonFiniteError("a value or a reward of an action token is not finite; leave failed episodes out")
    out_BT, after = torch.zeros_like(values), torch.zeros_like(following)
    # Chains are pushed together, so that a step is one token of every chain.
    order_BT = torch.argsort(mask_BT.to(torch.uint8), dim=1, descending=True, stable=True)
    longest = int(mask_BT.sum(1).max()) if mask_BT.numel() else 0
    for k in reversed(range(longest)):
        at = order_BT[:, k : k + 1]
        acts, value = mask_BT.gather(1, at)[:, 0], values.gather(1, at)[:, 0]
        advantage = rewards.gather(1, at)[:, 0] + gamma * following - value + gamma * lam_B * after
        following, after = torch.where(acts, value, following), torch.where(acts, advantage, after)
        out_BT.scatter_(1, at, torch.where(acts, advantage, 0.0)[:, None])
    return out_BT.to(values_BT.dtype)


def value_loss(
    values_BT: Float[Tensor, "B T"], targets_BT: Float[Tensor, "B T"], mask_BT: Bool[Tensor, "B T"], *, denominator: float
) -> Float[Tensor, ""]:
    """Sum of squared errors over action tokens / denominator, that of the whole optimiser batch (4.2). Nothing is clipped.

    Raises:
        ConfigError: the denominator is not a finite number > 0.
    """
    if not 0.0 < denominator < math.inf:
        raise ConfigError(f"denominator {denominator}: need a finite number > 0, counted over the whole optimiser batch")
    gap_BT = torch.where(mask_BT, values_BT, 0.0) - torch.where(mask_BT, targets_BT.detach(), 0.0)
    return gap_BT.square().sum() / denominator


def explained_variance(returns: Float[Tensor, " N"], values: Float[Tensor, " N"]) -> float | None:
    """1 - Var(R - V) / Var(R) over action tokens; None where all returns are equal, which explains nothing (G35).

    Raises:
        NonFiniteError: a return or value is not finite.
    """
    own, guess = returns.detach().double(), values.detach().double()
    if not bool(torch.isfinite(own).all() & torch.isfinite(guess).all()):
        raise NonFiniteError("a return or a value is not finite; explained variance is of those of action tokens")
    if own.numel() == 0 or bool((own == own[0]).all()):
        return None
    return 1.0 - float((own - guess).var(correction=0) / own.var(correction=0))
