"""The team: agents in order, the version of each that is promoted, and the order in which a stage updates them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, assert_never

from baton.core.keyed import ORDER, key, permutation
from baton.errors import BatonError, MissingError
from baton.types import Accepted, AgentId, Rejected, Verdict

OrderName = Literal["random", "static", "reverse", "greedy", "grad_norm", "bandit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One seat of the team. `version` counts promotions of this incarnation, with gaps where candidates were refused."""

    agent: AgentId
    model: str
    version: int = 0
    incarnation: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Team:
    """An immutable team; every change gives a new one."""

    members: tuple[Member, ...]

    @property
    def agents(self) -> tuple[AgentId, ...]:
        return tuple(member.agent for member in self.members)

    @property
    def versions(self) -> Mapping[AgentId, int]:
        return {member.agent: member.version for member in self.members}

    def member(self, agent: AgentId) -> Member:
        for member in self.members:
            if member.agent == agent:
                return member
        raise BatonError(f"the team has no agent '{agent}'; it has {', '.join(self.agents)}")

    def promote(self, agent: AgentId, verdict: Verdict, version: int) -> Team:
        """The team with this agent at a new version. Takes an `Accepted` verdict and nothing else (ALGORITHMS R8)."""
        match verdict:
            case Accepted():
                pass
            case Rejected():
                raise BatonError(f"'{agent}' was rejected ({verdict.reason}); a rejected candidate is never promoted")
            case _:
                assert_never(verdict)
        old = self.member(agent)
        if version <= old.version:
            raise BatonError(f"'{agent}' is at version {old.version}; version {version} was used before")
        return replace(
            self,
            members=tuple(replace(m, version=version) if m.agent == agent else m for m in self.members),
        )


def update_order(
    name: OrderName, agents: Sequence[AgentId], *, seed: int, stage: int, gains: Mapping[AgentId, float | None] | None = None
) -> tuple[AgentId, ...]:
    """The order sigma of one stage (ALGORITHMS 2.6): `random` is a keyed shuffle of (run seed, stage); `greedy`, `grad_norm`
    and `bandit` go by descending gain, equal ones by index.

    Args:
        gains: predicted or remembered gain of each agent; None for one that `bandit` has not seen, which goes first.

    Raises:
        MissingError: a measured order without an agent's gain.
    """
    match name:
        case "static":
            return tuple(agents)
        case "reverse":
            return tuple(reversed(agents))
        case "random":
            return tuple(agents[i] for i in permutation(key(seed, stage, ORDER), len(agents)))
        case "greedy" | "grad_norm" | "bandit":
            known = dict(gains or {})
            missing = [a for a in agents if a not in known or (known[a] is None and name != "bandit")]
            if missing:
                raise MissingError(f"order '{name}' of stage {stage} has no gain of '{missing[0]}'; measure it first")
            by_gain = {a: math.inf if (gain := known[a]) is None else gain for a in agents}
            return tuple(sorted(agents, key=lambda a: -by_gain[a]))
        case _:
            assert_never(name)
