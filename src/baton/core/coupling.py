"""Draws from laws: the inverse CDF, and two teams' tokens that differ as rarely as their laws allow (ALGORITHMS 3.6, 5.6).

Axes: S states, V vocabulary. Laws are log-probabilities, uniforms come from `keyed`.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from baton.errors import DataError, NonFiniteError


def inverse_cdf(weights_SV: Float[Tensor, "S V"], u_S: Float[Tensor, " S"]) -> Int[Tensor, " S"]:
    """The first token whose running sum of weights (fp64) exceeds u, or the last one of positive weight if none does.

    Raises:
        NonFiniteError: weights of a state that do not sum to a number.
    """
    running_SV = weights_SV.cumsum(dim=-1, dtype=torch.float64)
    if not bool(torch.isfinite(running_SV[:, -1]).all()):
        raise NonFiniteError("the law of the next token is NaN or infinite: the served weights are not finite")
    token_S = torch.searchsorted(running_SV, u_S.double().contiguous()[:, None], right=True)[:, 0]
    if bool((token_S == weights_SV.shape[1]).any()):
        last_S = weights_SV.shape[1] - 1 - (weights_SV > 0).flip(-1).to(torch.uint8).argmax(dim=-1)
        token_S = torch.minimum(token_S, last_S)
    return token_S


def coupled(
    log_p_SV: Float[Tensor, "S V"],
    log_q_SV: Float[Tensor, "S V"],
    u_S2: Float[Tensor, "S 2"],
    *,
    together_S: Bool[Tensor, " S"] | None = None,
    token_S: Int[Tensor, " S"] | None = None,
) -> tuple[Int[Tensor, " S"], Int[Tensor, " S"]]:
    """(promoted token, candidate token) of each state: laws p and q exactly, and they differ with probability TV(p, q).

    The promoted token x is the inverse CDF of p at the first uniform, as if nobody were beside it, or `token_S` where it was
    sampled before. The candidate's is x too with probability min(1, q(x)/p(x)), else a draw from the normalised excess
    (q - p)^+, made by what that decision leaves of the second uniform (3.6, maximal; G50). Where `together_S` is False the
    prefixes have parted, p and q are of different contexts, and the candidate's token is the inverse CDF of q at the second
    uniform: independent of x, or, where the caller gives the first one again, as near to it as the order of symbols has it.

    Raises:
        DataError: a given token to which p gives probability 0.  NonFiniteError: as for `inverse_cdf`.
    """
    p_SV, q_SV, u_S = log_p_SV.exp(), log_q_SV.exp(), u_S2[:, 1].double()
    token_S = inverse_cdf(p_SV, u_S2[:, 0]) if token_S is None else token_S
    p_S, q_S = (law.gather(1, token_S[:, None])[:, 0].double() for law in (p_SV, q_SV))
    if bool((p_S == 0.0).any()):
        state = int((p_S == 0.0).nonzero()[0, 0])
        raise DataError(f"token {int(token_S[state])} of state {state} has probability 0 under the law that sampled it")
    share_S, excess_SV = (q_S / p_S).clamp(max=1.0), (q_SV - p_SV).clamp(min=0.0)
    total_S = excess_SV.sum(dim=-1, dtype=torch.float64)
    # Laws that differ by rounding alone may have a share below 1 and no excess to draw from.
    keeps_S = (u_S < share_S) | (total_S == 0.0)
    left_S = (u_S - share_S) / torch.where(keeps_S, 1.0, 1.0 - share_S)
    other_S = torch.where(keeps_S, token_S, inverse_cdf(excess_SV, left_S * total_S))
    return token_S, other_S if together_S is None else torch.where(together_S, other_S, inverse_cdf(q_SV, u_S))
