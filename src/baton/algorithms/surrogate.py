"""Surrogate certificate: what an update's probe episodes say of its candidate, which has played none (ALGORITHMS 3.5, 3.6).

The promoted team plays them to the end; each own message is weighted by how much likelier the candidate makes it. Nothing
of the step has seen them, and the draw of their prompts is the update's own, so the gain in them is one of the probe pool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from baton.algorithms.state import SurrogateReport, World
from baton.core import certificate
from baton.engines.engine import ScoreRequest
from baton.team import Team
from baton.types import AgentId, Episode, Failed, Turn


def why_void(
    world: World, team: Team, agent: AgentId, probe: Sequence[Episode]
) -> Literal["too_few_samples", "own_lag", "stale_data", ""]:
    """Why these episodes say nothing of a candidate of `agent` that is to join the team; empty where they may.

    The bound speaks of the team that played them (3.5): of no other, where a teammate was accepted since (joint), or where
    teammates are those of the run's start (independent). Staleness is read from the versions, whatever the schedule.
    """
    if not world.certificate.plays_out(world.gate):
        return "too_few_samples"
    behind = {name for e in probe for name in team.agents if e.versions[name] != team.member(name).version}
    return "own_lag" if agent in behind else "stale_data" if behind else ""


async def evaluate(
    world: World,
    team: Team,
    agent: AgentId,
    probe: Sequence[Episode],
    *,
    version: int,
    baseline: float,
    stage: int,
) -> tuple[SurrogateReport, Sequence[Episode]]:
    """Score the own messages of the probe episodes by the candidate in its slot, and conclude.

    Messages are scored in the waves in which they were sampled: the decoding loop then meets the same batches, and an
    unchanged candidate has a ratio of exactly 1, in bfloat16 too.
    """
    if why_void(world, team, agent, probe):
        return judged(world, team, agent, probe, (), baseline=baseline, stage=stage), ()
    temperature = next(seat.temperature for seat in world.table.seats if seat.agent == agent)
    waves: dict[int, list[tuple[int, Turn]]] = {}
    for n, episode in enumerate(probe):
        for place, turn in enumerate(episode.turns):
            if _is_own(turn, agent):
                waves.setdefault(place, []).append((n, turn))
    scores: list[list[Sequence[float]]] = [[] for _ in probe]
    for place in sorted(waves):
        requests = [
            ScoreRequest(agent=agent, slot="candidate", prompt_ids=t.prompt_ids, ids=t.ids, temperature=temperature)
            for _, t in waves[place]
        ]
        for (n, _), score in zip(waves[place], await world.sampler.score(requests), strict=True):
            scores[n].append(score)
    restated = restate(probe, agent, version, scores)
    return judged(world, team, agent, probe, restated, baseline=baseline, stage=stage), restated


def restate(
    probe: Sequence[Episode], agent: AgentId, version: int, scores: Sequence[Sequence[Sequence[float]]]
) -> list[Episode]:
    """Each probe episode's messages of `agent` alone, as its candidate `version` would have sampled them: with these
    log-probabilities, by message and token. Their outcome is `Failed("restated")`: nobody has played them."""
    return [
        Episode(
            id=f"{episode.id}/restated",
            group=episode.group,
            task_id=episode.task_id,
            versions={**episode.versions, agent: version},
            turns=tuple(_restated(t, version, s) for t, s in zip(_own(episode, agent), own, strict=True)),
            answer="",
            outcome=Failed(reason="restated"),
        )
        for episode, own in zip(probe, scores, strict=True)
    ]


def judged(
    world: World,
    team: Team,
    agent: AgentId,
    probe: Sequence[Episode],
    restated: Sequence[Episode],
    *,
    baseline: float,
    stage: int,
) -> SurrogateReport:
    """What the probe episodes show, with the candidate's log-probabilities of their messages (none where nothing is said).

    `baseline`: V, the mean return of the update's own train episodes, which is independent of the probe's.
    """
    options, m, (low, high) = world.certificate, world.table.protocol.own_turns, world.reward_range
    level = certificate.miss_rate(options.delta, n_agents=len(world.trainees), stage=stage if options.run_level else None)
    log_ratio_Nm = torch.zeros(len(probe), m, dtype=torch.float64)
    for n, (episode, other) in enumerate(zip(probe, restated, strict=False)):
        for k, (then, now) in enumerate(zip(_own(episode, agent), other.turns, strict=True)):
            log_ratio_Nm[n, k] = math.fsum(now.logprobs) - math.fsum(then.logprobs)
    why = why_void(world, team, agent, probe)
    returns = [e.reward if e.is_scored else None for e in probe]
    if why in ("own_lag", "stale_data"):
        gain = certificate.void("surrogate", why, n=len(probe), confidence=1.0 - level)
    else:
        values_Nm = torch.full_like(log_ratio_Nm, baseline)
        looks = world.options.looks
        gain = certificate.surrogate(log_ratio_Nm, returns, values_Nm, low=low, high=high, level=level, looks=looks)
    return SurrogateReport(
        turns=m,
        missing=0 if why == "too_few_samples" else sum(r is None for r in returns),
        delta=options.delta,
        is_run_level=options.run_level,
        pool=world.probe_pool,
        gain=gain,
    )


def _is_own(turn: Turn, agent: AgentId) -> bool:
    return turn.kind == "action" and turn.agent == agent


def _own(episode: Episode, agent: AgentId) -> list[Turn]:
    return [turn for turn in episode.turns if _is_own(turn, agent)]


def _restated(turn: Turn, version: int, score: Sequence[float]) -> Turn:
    return replace(turn, logprobs=tuple(score), versions=(version,) * len(turn.ids))
