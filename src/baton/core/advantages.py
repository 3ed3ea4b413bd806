"""How much better an episode was than its baseline (ALGORITHMS 2.3, 4.8).

Axes: E episodes. Rewards are team returns in reward units (F3). Failed episodes have no reward and are left
out by the caller: a NaN here is an error, never a sample to skip, and a group that lost siblings is simply
smaller.
"""

from __future__ import annotations

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
