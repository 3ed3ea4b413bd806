"""How much better an episode was than its baseline (ALGORITHMS 2.3, 4.8).

Axes: E episodes, T steps of one episode. Rewards are team returns in reward units (F3). Failed episodes have
no reward and are left out by the caller: a NaN here is an error, never a sample to skip, and a group that lost
siblings is simply smaller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from baton.errors import ConfigError, DataError, MissingError, NonFiniteError, StaleAdvantagesError


@dataclass(frozen=True, kw_only=True)
class EpisodeAdvantages:
    """One advantage per episode, in the order of the rewards, and how many baselines said nothing."""

    values: Float[Tensor, " E"]
    n_groups: int
    """Prompts."""
    degenerate_groups: int
    """Prompts whose baseline saw equal rewards only (a group of one among them): advantages 0, tokens counted
    all the same."""


def group(
    rewards: Float[Tensor, " E"],
    groups: Sequence[str],
    *,
    teams: Sequence[Mapping[str, int]] | None = None,
    clip: float | None = 5.0,
    eps: float = 1e-8,
) -> EpisodeAdvantages:
    """(R_i - mean) / (std + eps) over the siblings of a prompt, clipped to [-clip, clip].

    (SAT paper; ALGORITHMS F4, F5.) Population std. A constant group gives exact zeros and is counted.
    `teams` holds the team (versions) of each episode; the key of a group is its prompt, whatever the agents
    are called.

    Raises:
        StaleAdvantagesError: siblings were played by different teams (names both).
        NonFiniteError: a reward is NaN or infinite (names the episode's index).
        DataError, MissingError: groups or teams do not match the rewards; there are no rewards.
    """
    if clip is not None and not clip > 0.0:
        raise ConfigError(f"advantage clip {clip}: need a number > 0, or None for no clip")
    members = _members(rewards, groups, teams)
    values = torch.zeros(len(groups), dtype=torch.float64)
    degenerate = 0
    for index in members.values():
        own = rewards[index].double()
        if _constant(own):
            degenerate += 1
            continue
        values[index] = (own - own.mean()) / (own.std(correction=0) + eps)
    if clip is not None:
        values = values.clamp(-clip, clip)
    return EpisodeAdvantages(values=values.to(rewards.dtype), n_groups=len(members), degenerate_groups=degenerate)


def loo(
    rewards: Float[Tensor, " E"], groups: Sequence[str], *, teams: Sequence[Mapping[str, int]] | None = None
) -> EpisodeAdvantages:
    """R_i - mean of the other siblings' rewards (leave-one-out; ALGORITHMS 2.3), in reward units.

    Raises:
        DataError: a group of one, which has no others; use `batch_mean` or more episodes per prompt.
        StaleAdvantagesError, NonFiniteError, MissingError: as for `group`.
    """
    members = _members(rewards, groups, teams)
    values = torch.zeros(len(groups), dtype=torch.float64)
    degenerate = 0
    for name, index in members.items():
        own = rewards[index].double()
        if len(index) < 2:
            raise DataError(f"group '{name}' has one episode, leave-one-out needs two; play more or use batch_mean")
        if _constant(own):
            degenerate += 1
            continue
        values[index] = own - (own.sum() - own) / (len(index) - 1)
    return EpisodeAdvantages(values=values.to(rewards.dtype), n_groups=len(members), degenerate_groups=degenerate)


def batch_mean(
    rewards: Float[Tensor, " E"], groups: Sequence[str], *, teams: Sequence[Mapping[str, int]] | None = None
) -> EpisodeAdvantages:
    """R_i - mean reward of the batch (ALGORITHMS 4.8), in reward units.

    The whole batch is one baseline: either it is constant and every group is degenerate, or none is.

    Raises:
        StaleAdvantagesError: the batch mixes episodes of different teams.
        NonFiniteError, DataError, MissingError: as for `group`.
    """
    n_groups = len(_members(rewards, groups, teams))
    if teams is not None:
        _require_one_team("the batch", list(range(len(groups))), teams)
    own = rewards.double()
    constant = _constant(own)
    values = torch.zeros_like(own) if constant else own - own.mean()
    degenerate = n_groups if constant else 0
    return EpisodeAdvantages(values=values.to(rewards.dtype), n_groups=n_groups, degenerate_groups=degenerate)


def truncated_trace(
    rewards_T: Float[Tensor, " T"], values_T: Float[Tensor, " T"], ratios_T: Float[Tensor, " T"], *, gamma: float, lam: float
) -> Float[Tensor, " T"]:
    """A_t = d_t + gamma lam c_{t+1} A_{t+1}, d_t = r_t + gamma V_{t+1} - V_t, c = min(1, rho) (SAT paper; F2, G16).

    V is the value before step t under the intermediate team, 0 after the last; rho the team ratio (F1). Ratios of
    1 give plain GAE. c corrects the continuation only, never the law of the states: see `reuse_weights`.

    Raises:
        NonFiniteError: a reward, value or ratio is not finite.  ConfigError: gamma or lam outside [0, 1].
    """
    if not (0.0 <= gamma <= 1.0 and 0.0 <= lam <= 1.0):
        raise ConfigError(f"gamma {gamma}, lam {lam}: need numbers in [0, 1]")
    if not bool(torch.isfinite(torch.stack([rewards_T, values_T, ratios_T])).all()):
        raise NonFiniteError("a reward, value or ratio of the trace is not finite; leave failed episodes out")
    advantages_T = torch.zeros_like(values_T)
    following = after = 0.0
    for t in reversed(range(len(values_T))):
        advantages_T[t] = rewards_T[t] + gamma * following - values_T[t] + gamma * lam * after
        following, after = float(values_T[t]), float(ratios_T[t].clamp(max=1.0) * advantages_T[t])
    return advantages_T


def reuse_weights(log_ratios_E: Float[Tensor, " E"]) -> tuple[Float[Tensor, " E"], Float[Tensor, " E"]]:
    """(w, min(1, w)) of each episode under the intermediate team, w = exp(log_ratio), in double precision.

    (ALGORITHMS 2.3.) A log-ratio is the sum of log rho over ALL turns of changed teammates: earlier turns correct
    the law of the states, later ones the return, either alone stays biased. min(1, w) multiplies the loss and is
    itself a bias towards the team that played; `effective_sample_share` reads the untruncated weights.

    Raises:
        NonFiniteError: a log-ratio is NaN or +inf (names the episode's index); -inf is a weight of 0.
    """
    bad = (torch.isnan(log_ratios_E) | torch.isposinf(log_ratios_E)).nonzero()
    if bad.numel():
        index = int(bad[0, 0])
        raise NonFiniteError(f"log-ratio {float(log_ratios_E[index])} of episode {index}: score its turns again")
    weights_E = log_ratios_E.double().exp()
    return weights_E, weights_E.clamp(max=1.0)


def effective_sample_share(log_weights_E: Float[Tensor, " E"]) -> float:
    """ESS/B = (sum w)^2 / (B sum w^2), from log w: no weight is too large or too small (ALGORITHMS 2.3; G34).

    Raises:
        MissingError: no episodes.  NonFiniteError: NaN, +inf, or every weight is 0.
    """
    if log_weights_E.numel() == 0:
        raise MissingError("an effective sample size of no episodes; give at least one log weight")
    logs_E = log_weights_E.double()
    if not bool(torch.isfinite(logs_E.max())):  # a NaN is the largest of all
        raise NonFiniteError(f"log weights up to {float(logs_E.max())}: need one that is finite, none NaN or +inf")
    share = 2.0 * logs_E.logsumexp(0) - (2.0 * logs_E).logsumexp(0) - math.log(len(logs_E))
    return min(1.0, math.exp(float(share)))


def informative_share(accuracy: float, group: int) -> float:
    """Expected share of groups with unequal rewards, 1 - p^G - (1-p)^G, for 0/1 rewards (ALGORITHMS 2.2;
    G49).

    Raises:
        ConfigError: accuracy outside [0, 1] or a group below 1.
    """
    if not 0.0 <= accuracy <= 1.0 or group < 1:
        raise ConfigError(f"accuracy {accuracy}, group {group}: need accuracy in [0, 1] and a group of at least 1")
    return 1.0 - accuracy**group - (1.0 - accuracy) ** group


def informative_groups(rewards: Float[Tensor, " E"], groups: Sequence[str]) -> int:
    """How many prompts have siblings with unequal rewards: the groups that carry a gradient (ALGORITHMS
    2.2, step 5).

    Raises:
        NonFiniteError, DataError, MissingError: as for `group`.
    """
    return sum(not _constant(rewards[index]) for index in _members(rewards, groups, None).values())


def decided_prompts(rewards: Float[Tensor, " E"], groups: Sequence[str]) -> int:
    """How many prompts speak for the batch-mean baseline: the smaller of the numbers of prompts whose mean reward is above
    the batch's mean and below it (ALGORITHMS 2.2, step 5, for the baseline of 4.8).

    Raises:
        NonFiniteError, DataError, MissingError: as for `group`.
    """
    members = _members(rewards, groups, None)
    if _constant(rewards):
        return 0
    mean = rewards.double().mean()
    means = torch.stack([rewards[index].double().mean() for index in members.values()])
    return int(min((means > mean).sum(), (means < mean).sum()))


def _constant(own: Float[Tensor, " G"]) -> bool:
    # Compared, not subtracted from a mean: rounding of the mean divided by eps would look like an advantage.
    return bool((own == own[0]).all())


def _members(
    rewards: Float[Tensor, " E"], groups: Sequence[str], teams: Sequence[Mapping[str, int]] | None
) -> dict[str, list[int]]:
    """Indices of each group, in order of first appearance, once everything about them is known to be
    sound."""
    if rewards.numel() == 0:
        raise MissingError("advantages of no episodes; collect at least one scored episode")
    if len(groups) != rewards.numel():
        raise DataError(f"{len(groups)} groups for {rewards.numel()} rewards; give each episode its prompt")
    if teams is not None and len(teams) != rewards.numel():
        raise DataError(f"{len(teams)} teams for {rewards.numel()} rewards; give each episode its team")
    bad = (~torch.isfinite(rewards)).nonzero()
    if bad.numel():
        index = int(bad[0, 0])
        raise NonFiniteError(
            f"reward {float(rewards[index])} of episode {index} (group '{groups[index]}') is not finite; "
            "a failed episode has no reward and is left out"
        )
    members: dict[str, list[int]] = {}
    for index, name in enumerate(groups):
        members.setdefault(name, []).append(index)
    if teams is not None:
        for name, own in members.items():
            _require_one_team(f"group '{name}'", own, teams)
    return members


def _require_one_team(what: str, index: Sequence[int], teams: Sequence[Mapping[str, int]]) -> None:
    first = dict(teams[index[0]])
    for other in index[1:]:
        if dict(teams[other]) != first:
            raise StaleAdvantagesError(
                f"{what} mixes episodes of team {_name(first)} and of team {_name(teams[other])}; "
                "a baseline belongs to one team: collect again"
            )


def _name(team: Mapping[str, int]) -> str:
    return "(" + ", ".join(f"{agent}@{version}" for agent, version in team.items()) + ")"
