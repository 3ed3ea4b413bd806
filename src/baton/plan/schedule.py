"""What a run will do that its options alone decide: who is updated when, and how many episodes that takes."""

from __future__ import annotations

from collections.abc import Sequence

from baton.algorithms.options import CertificateOptions, SatOptions, resolve_group
from baton.team import update_order
from baton.types import AgentId


def group_of(options: SatOptions) -> int:
    """Episodes per prompt; where a run decides that after its start episodes, as if it starts well."""
    return resolve_group(options, 1.0)


def ordering_episodes(options: SatOptions) -> int:
    """Episodes on which a stage measures its order or its radii."""
    group = group_of(options)
    return max(1, options.ordering_episodes // group) * group if options.is_measured else 0


def pair_episodes(pairs: CertificateOptions, trained: int) -> int:
    """Most episodes that a stage of so many updates plays in pairs."""
    return 2 * (trained * pairs.update_pairs + pairs.stage_pairs)


def updates(options: SatOptions, agents: Sequence[AgentId], seed: int) -> list[tuple[int, AgentId]]:
    """Every (stage, agent) of a run. An order that a run measures as it goes is taken as the team's own."""
    stages = range(1, options.stages + 1)
    if options.name == "independent":
        return [(k, a) for a in agents for k in stages]
    fixed = options.name == "joint" or options.order not in ("random", "static", "reverse")
    return [(k, a) for k in stages for a in (agents if fixed else update_order(options.order, agents, seed=seed, stage=k))]
