"""The data of one update: which prompts, whose episodes, what they are worth, whether they may still be used.

The numbered steps are those of ALGORITHMS 2.2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from baton.algorithms.options import GateOptions, SatOptions
from baton.algorithms.state import (
    EpisodeStats,
    Position,
    Reuse,
    World,
)
from baton.core import advantages as adv
from baton.core import batching, trust_region
from baton.core.keyed import PROBE, PROMPTS, SAMPLE, key, permutation
from baton.engines.engine import ScoreRequest
from baton.errors import MissingError, StaleAdvantagesError, TaskFault
from baton.rollout import Play
from baton.team import Team
from baton.types import (
    AdvantageBatch,
    AgentId,
    Episode,
    Failed,
    Slot,
    Task,
    Trajectory,
)


def draw_prompts(
    tasks: Sequence[Task], cursor: int, count: int, *, at: tuple[str | int, ...], skip: frozenset[str] = frozenset()
) -> tuple[list[Task], int]:
    """The next `count` distinct tasks after `cursor` in a keyed shuffle per epoch, and the cursor behind them.

    Raises:
        MissingError: fewer than `count` tasks are left that are not in `skip`.
    """
    if count > len(tasks) - len(skip):
        raise MissingError(f"{count} distinct prompts wanted, {len(tasks) - len(skip)} are there")
    taken: dict[str, Task] = {}
    order: list[int] = []
    epoch = -1
    while len(taken) < count:
        if cursor // len(tasks) != epoch:
            epoch = cursor // len(tasks)
            order = permutation(key(*at, epoch), len(tasks))
        task = tasks[order[cursor % len(tasks)]]
        cursor += 1
        # Two epochs can meet inside one draw: a task is taken once.
        if task.id not in taken and task.id not in skip:
            taken[task.id] = task
    return list(taken.values()), cursor


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The episodes E of an update: scored ones to train on, all of them for the record."""

    scored: tuple[Episode, ...]
    all: tuple[Episode, ...]
    cursor: int
    informative: int


def acting(team: Team, slots: Mapping[AgentId, Slot]) -> Mapping[AgentId, int]:
    """Versions that speak: the promoted ones, and 0 for an agent that acts with its start weights."""
    return {m.agent: 0 if slots.get(m.agent) == "start" else m.version for m in team.members}


async def collect(
    world: World,
    team: Team,
    cursor: int,
    *,
    stage: int,
    who: str,
    prompts: int,
    slots: Mapping[AgentId, Slot],
) -> Collected:
    """Steps 4 and 5: fresh episodes of the team as it is, drawing up to twice as many prompts again while too few
    groups are informative.

    Raises:
        TaskFault: every episode failed (names the commonest reason).
    """
    address = (world.seed, stage, who, SAMPLE)
    episodes: list[Episode] = []
    seen: set[str] = set()
    informative = 0
    is_batch = world.options.objective.choice.baseline == "batch_mean"
    count = adv.decided_prompts if is_batch else adv.informative_groups
    for _ in range(3):
        wanted = min(prompts, len(world.train) - len(seen))
        if wanted == 0:
            break
        tasks, cursor = draw_prompts(world.train, cursor, wanted, at=(world.seed, PROMPTS, who), skip=frozenset(seen))
        seen.update(task.id for task in tasks)
        plays = [Play(task=task, sibling=g) for task in tasks for g in range(world.group)]
        total = len(plays) * len(world.table.seats) * world.table.protocol.own_turns
        episodes += await world.table.play(
            plays,
            address=address,
            versions=acting(team, slots),
            slots=slots,
            tick=lambda: world.journal.tick(f"{who}: episodes", total),  # noqa: B023
        )
        scored = tuple(e for e in episodes if e.is_scored)
        if not scored:
            reasons = Counter(e.outcome.reason for e in episodes if isinstance(e.outcome, Failed))
            reason, n = reasons.most_common(1)[0]
            raise TaskFault(f"all {len(episodes)} episodes of stage {stage} failed; {n} times: {reason}")
        informative = count(_rewards(scored), [e.group for e in scored])
        if informative >= world.options.min_informative:
            break
    return Collected(
        scored=tuple(e for e in episodes if e.is_scored), all=tuple(episodes), cursor=cursor, informative=informative
    )


async def collect_probe(
    world: World,
    team: Team,
    *,
    stage: int,
    who: str,
    until: AgentId | None,
    slots: Mapping[AgentId, Slot],
) -> list[Episode]:
    """Step 4: one episode for each of a fresh keyed draw of probe prompts, played to the last own turn of the agent `until`,
    or to the end and graded."""
    order = permutation(key(world.seed, stage, who, PROBE), len(world.probe))
    tasks = [world.probe[i] for i in order[: world.gate.probe_prompts]]
    total = len(tasks) * len(world.table.seats) * world.table.protocol.own_turns
    return await world.table.play(
        [Play(task=task) for task in tasks],
        address=(world.seed, stage, who, PROBE),
        versions=acting(team, slots),
        slots=slots,
        until=until,
        tick=lambda: world.journal.tick(f"{who}: probe", total),
    )


def _rewards(episodes: Sequence[Episode]) -> Float[Tensor, " E"]:
    return torch.tensor([e.reward for e in episodes], dtype=torch.float64)


def episode_advantages(options: SatOptions, episodes: Sequence[Episode]) -> adv.EpisodeAdvantages:
    """Step 7: the advantage of each episode under the configured baseline; siblings must be of one team."""
    rewards, groups, teams = _rewards(episodes), [e.group for e in episodes], [dict(e.versions) for e in episodes]
    baseline = options.objective.choice.baseline
    if baseline == "group":
        return adv.group(rewards, groups, teams=teams, clip=options.objective.advantage_clip)
    if baseline == "loo":
        return adv.loo(rewards, groups, teams=teams)
    return adv.batch_mean(rewards, groups, teams=teams)


def check_fresh(team: Team, episodes: Sequence[Episode], agents: Sequence[AgentId]) -> None:
    """Advantages hold under the team that played: refuse episodes in which one of `agents` had another version than now.

    Raises:
        StaleAdvantagesError: names the agent and both versions.
    """
    for episode in episodes:
        for name in agents:
            played, now = episode.versions.get(name), team.member(name).version
            if played != now:
                raise StaleAdvantagesError(
                    f"an episode was played by {name}@{played}, but the team now has {name}@{now}; collect again or reweight"
                )


def agent_batch(
    episodes: Sequence[Episode], values: adv.EpisodeAdvantages, agent: AgentId, *, temperature: float, team: Team
) -> AdvantageBatch:
    """One agent's own tokens of these episodes, each with its episode's advantage."""
    rows = [t for e in episodes for t in batching.trajectories(e, agent)]
    if not rows:
        raise MissingError(f"'{agent}' sampled no token in {len(episodes)} episodes; it cannot be updated")
    batch = batching.token_batch(rows, temperature=temperature)
    per_episode = {e.id: float(a) for e, a in zip(episodes, values.values.tolist(), strict=True)}
    return batching.with_advantages(batch, per_episode, team=team.versions)


def unheard(
    gate: GateOptions,
    episodes: Sequence[Episode],
    values: adv.EpisodeAdvantages,
    probe: Sequence[Trajectory],
    agent: AgentId,
    *,
    looks: int,
) -> str:
    """Why an agent that the protocol did not let act often enough cannot be updated (masked activation); empty where it can.

    Episodes without a turn of its own have no row, and such probe episodes are no units of the gate.
    """
    told = [bool(batching.trajectories(e, agent)) for e in episodes]
    pulls = sum(acts and a != 0.0 for acts, a in zip(told, values.values.tolist(), strict=True))
    if not pulls:
        acted = f"'{agent}' acted in {sum(told)} of {len(episodes)} episodes"
        return f"{acted}, none of them with an advantage" if any(told) else acted
    units, needed = len({t.group for t in probe}), 1
    if gate.require_certified:
        needed = trust_region.units_needed(level=gate.quantile, confidence_miss=gate.eta / looks)
    return "" if units >= needed else f"'{agent}' acted on {units} probe prompts, the gate needs {needed}"


def mean_return(collected: Collected) -> float:
    """Of the scored episodes."""
    return float(_rewards(collected.scored).mean())


def stats(world: World, collected: Collected, values: adv.EpisodeAdvantages) -> EpisodeStats:
    """Counts of a batch: failures by reason, tokens and cut share per agent."""
    failed = Counter(e.outcome.reason for e in collected.all if isinstance(e.outcome, Failed))
    agents = [seat.agent for seat in world.table.seats]
    turns = {a: [t for e in collected.all for t in e.turns if t.agent == a] for a in agents}
    return EpisodeStats(
        n=len(collected.all),
        failed=dict(failed),
        reward=mean_return(collected),
        tokens={a: sum(len(t.ids) for t in turns[a]) for a in agents},
        cut={a: sum(t.cut for t in turns[a]) / max(1, len(turns[a])) for a in agents},
        prompts=len({e.group for e in collected.all}),
        degenerate_groups=values.degenerate_groups,
    )


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What a stage that shares its episodes plays once; without `probe`, each update plays its own."""

    collected: Collected
    probe: Sequence[Episode] | None


@dataclass(frozen=True, kw_only=True)
class UpdateData:
    """What one update rests on: its episodes, the gate's, and (reuse) the weight of each scored episode."""

    collected: Collected
    probe: Sequence[Episode]
    cursor: int
    weights: Float[Tensor, " E"] | None = None
    reuse: Reuse | None = None


async def gather(
    world: World, position: Position, agent: AgentId, *, stage: int, slots: Mapping[AgentId, Slot], shared: Shared | None
) -> UpdateData:
    """Step 4: fresh episodes of the team as it is, or the stage's shared ones. Reused ones are reweighted for the teammates
    that were accepted since, and given up for fresh ones where too little of them is left."""
    cursor = position.agents[agent].cursor
    probe = None if shared is None else shared.probe
    if probe is None:
        until = None if world.certificate.plays_out(world.gate) else agent
        probe = await collect_probe(world, position.team, stage=stage, who=agent, until=until, slots=slots)
    reuse: Reuse | None = None
    if shared is not None:
        if world.options.data != "reuse":
            return UpdateData(collected=shared.collected, probe=probe, cursor=cursor)
        changed = tuple(entry.agent for entry in position.entries if entry.word != "rejected")
        log_ratios = await log_ratio_sums(world, shared.collected.scored, changed)
        weights = adv.reuse_weights(log_ratios)[1] if world.options.reuse.weights == "truncated" else None
        share = adv.effective_sample_share(log_ratios)
        reuse = Reuse(
            changed=changed,
            effective_share=share,
            mean_weight=1.0 if weights is None else float(weights.mean()),
            is_resampled=world.options.reuse.gives_up(share),
        )
        if not reuse.is_resampled:
            return UpdateData(collected=shared.collected, probe=probe, cursor=cursor, weights=weights, reuse=reuse)
    prompts = world.options.episodes // world.group
    collected = await collect(world, position.team, cursor, stage=stage, who=agent, prompts=prompts, slots=slots)
    return UpdateData(collected=collected, probe=probe, cursor=collected.cursor, reuse=reuse)


async def log_ratio_sums(world: World, episodes: Sequence[Episode], changed: Sequence[AgentId]) -> Float[Tensor, " E"]:
    """Log of the likelihood ratio of each episode under the team as it is to the team that played it: the sum over ALL turns
    of changed teammates of promoted minus recorded log-probability, by the sampler that now serves them (2.3)."""
    temperature = {seat.agent: seat.temperature for seat in world.table.seats}
    turns = [(n, t) for n, e in enumerate(episodes) for t in e.turns if t.kind == "action" and t.agent in changed]
    scores = await world.sampler.score(
        [
            ScoreRequest(
                agent=t.agent, slot="promoted", prompt_ids=t.prompt_ids, ids=t.ids, temperature=temperature[t.agent]
            )
            for _, t in turns
        ]
    )
    out = torch.zeros(len(episodes), dtype=torch.float64)
    for (n, turn), score in zip(turns, scores, strict=True):
        out[n] += math.fsum(score) - math.fsum(turn.logprobs)
    return out
