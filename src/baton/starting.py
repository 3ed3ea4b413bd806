"""What a run decides once, before its first stage: version 0 of everybody on disk, the start accuracy, the noise floors.

A run that begins with a swap inherits the rest from the run before it.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version as package_version

from baton import assemble, protocols, records
from baton.algorithms.acceptance import Trainee, check_floor
from baton.algorithms.episodes import draw_prompts
from baton.algorithms.options import resolve_group
from baton.algorithms.state import AgentState, Position
from baton.assemble import Crew, Plan
from baton.config import Config
from baton.core import batching
from baton.core.keyed import SAMPLE
from baton.engines import local
from baton.engines.engine import Learner
from baton.errors import BatonError
from baton.host import Stop
from baton.journal import Run, put_to_rest
from baton.records import Record
from baton.rollout import Play, Seat, Table
from baton.team import Team
from baton.types import AgentId, Episode, Task, TokenBatch, Trajectory, Turn, Weights
from baton.warm_start import WarmStartRecord

START_PROMPTS = 64
"""Train prompts on which the start accuracy is measured (ALGORITHMS 2.2)."""
START_EPISODES = "episodes/start.parquet"


def _write_start(run: Run, crew: Crew, agent: AgentId, weights: Weights) -> Record:
    """Version 0 of an agent on disk, and the files that it is."""
    learner, folder = crew.learners[agent], run.path / records.version_folder(agent, 0)
    records.write_folder(folder, lambda partial: crew.save(agent, partial, weights))
    training: str | None = None
    snapshot, with_masters = learner.snapshot(), not crew.serves_masters(agent)
    if with_masters or snapshot.steps:
        path = run.path / "state" / agent / "training-start.safetensors"
        records.save_training(path, snapshot, with_masters=with_masters)
        training = str(path.relative_to(run.path))
    return {"weights": str(folder.relative_to(run.path)), "training": training, "steps": snapshot.steps}


def _copy_start(run: Run, crew: Crew, agent: AgentId) -> Record:
    """What a frozen agent is, on disk like everybody's version 0, and its files."""
    folder = run.path / records.version_folder(agent, 0)
    records.write_folder(folder, lambda partial: crew.copy_start(agent, partial))
    return {"weights": str(folder.relative_to(run.path)), "training": None, "steps": 0}


def trainees_of(plan: Plan, crew: Crew) -> dict[AgentId, Trainee]:
    out: dict[AgentId, Trainee] = {}
    for agent in plan.config.agents:
        if not agent.trainable:
            continue
        radius = plan.config.radius(agent)
        out[agent.name] = Trainee(
            agent=agent.name,
            learner=crew.learners[agent.name],
            lr=plan.lr(agent),
            radius_token=radius.token,
            radius_message_mean=radius.message_mean,
            is_exact=crew.is_exact,
        )
    return out


@dataclass(frozen=True, kw_only=True)
class Inherited:
    """What a run that begins with a swap has of the run before it."""

    position: Position
    group: int
    swap: Record


async def first_record(
    run: Run,
    plan: Plan,
    crew: Crew,
    table: Table,
    trainees: Mapping[AgentId, Trainee],
    team: Team,
    warm: Mapping[AgentId, tuple[WarmStartRecord, bool]],
    threads: int,
    stop: Stop,
    inherited: Inherited | None = None,
) -> Record:
    """Version 0 of everybody, the start accuracy, the noise floors: all that a run decides once (or has `inherited`)."""
    config = plan.config

    def tick() -> None:
        stop.check()

    # The sampler was made of the very folders that version 0 is written from.
    plays = start_plays(plan)
    episodes = await table.play(plays, address=start_address(plan), versions=team.versions, tick=tick)
    rows = records.episode_rows(episodes, use="start", prompts={p.task.id: p.task.prompt for p in plays})
    records.write_episodes(run.path / START_EPISODES, rows)
    scored = [e.reward for e in episodes if e.is_scored]
    if not scored:
        reasons = {e.outcome.reason for e in episodes if not e.is_scored and hasattr(e.outcome, "reason")}
        raise BatonError(f"all {len(episodes)} episodes of the start failed: {sorted(reasons)[0]}")
    accuracy = sum(scored) / len(scored)
    floors: dict[AgentId, dict[str, float]] = {}
    files: dict[AgentId, Record] = {}
    fingerprints: dict[AgentId, str] = {}
    for index, seat in enumerate(plan.seats):
        name = seat.agent
        if name in trainees:
            rows = await _own_words(plan, table, index, episodes, [p.task for p in plays])
            floors[name] = _floor(seat, trainees[name], crew, rows)
            weights = crew.learners[name].weights()
            files[name] = _write_start(run, crew, name, weights)
            await crew.sampler.publish(name, "promoted", weights, team.member(name).version)
            put_to_rest(run, crew, {name: files[name]})
        elif name in plan.local:
            files[name] = _copy_start(run, crew, name)
            weights = crew.load(run.path / files[name]["weights"])
        else:
            continue
        fingerprints[name] = weights.fingerprint
    position = Position(
        team=team,
        agents={name: AgentState(beta=config.algorithm.penalty.start, lr=trainee.lr) for name, trainee in trainees.items()},
    )
    low, high = plan.env.reward_range
    group = resolve_group(config.algorithm, (accuracy - low) / (high - low))
    if inherited is not None:
        position, group = inherited.position, inherited.group
    return {
        "kind": "start",
        "time": time.time(),
        "digest": config.digest,
        "root": str(plan.root),
        **facts(config, threads),
        "splits": records.plain(plan.splits.record),
        "parameters": dict(plan.parameters),
        "warm_start": {n: {**records.plain(r), "cached": cached} for n, (r, cached) in warm.items()},
        "noise_floor": floors,
        "start_accuracy": accuracy,
        "start_prompts": len(scored),
        "start_failed": len(episodes) - len(scored),
        "group": group,
        "facts": dict(plan.env.facts(len(plan.seats))),
        "is_repeatable": all(seat.speaker is None for seat in plan.seats),
        "episodes_file": START_EPISODES,
        "fingerprints": fingerprints,
        "files": files,
        "position": records.position_record(position),
        **({} if inherited is None else {"swap": inherited.swap}),
    }


def start_plays(plan: Plan) -> list[Play]:
    """The episodes of the start accuracy: one on each of a keyed draw of train prompts."""
    train = plan.splits.train
    tasks, _ = draw_prompts(train, 0, min(START_PROMPTS, len(train)), at=(plan.config.seed, "start prompts"))
    return [Play(task=task) for task in tasks]


def start_address(plan: Plan) -> tuple[str | int, ...]:
    """Where the draws of the start accuracy begin their keys."""
    return (plan.config.seed, 0, "start", SAMPLE)


def noise_floor(learner: Learner, batch: TokenBatch) -> tuple[float, float]:
    """(q99 over states, mean over messages) of the divergence of these weights from themselves, nats; tables have none."""
    return local.noise_floor(learner, batch) if isinstance(learner, local.LocalLearner) else (0.0, 0.0)


async def _own_words(
    plan: Plan, table: Table, index: int, episodes: Sequence[Episode], tasks: Sequence[Task]
) -> list[Trajectory]:
    """What the agent in this seat said in the episodes of the start; where nobody called it, it speaks first on the same
    tasks: the noise floor is rounding, which any words of its own show."""
    seat = plan.seats[index]
    rows = [t for e in episodes for t in batching.trajectories(e, seat.agent)]
    if rows:
        return rows

    def alone(task: Task, turns: Sequence[Turn], names: Sequence[AgentId]) -> int:
        return index

    agents = [s.agent for s in plan.seats]
    protocol = protocols.build(protocols.RouterOptions(max_turns=1), agents, rule=alone)
    asked = await replace(table, protocol=protocol).play(
        [Play(task=t) for t in tasks],
        address=(plan.config.seed, 0, seat.agent, "floor"),
        versions=episodes[0].versions,
        until=seat.agent,
    )
    rows = [t for e in asked for t in batching.trajectories(e, seat.agent)]
    if not rows:
        raise BatonError(f"'{seat.agent}' sampled no token on {len(tasks)} tasks of the start")
    return rows


def _floor(seat: Seat, trainee: Trainee, crew: Crew, rows: Sequence[Trajectory]) -> dict[str, float]:
    """An agent's noise floor on its own words; a radius below it is refused (ALGORITHMS 2.4)."""
    batch = batching.token_batch(rows, temperature=seat.temperature)
    q99, mean = noise_floor(crew.learners[seat.agent].awake, batch)
    check_floor(trainee, (q99, mean))
    return {"token": q99, "message_mean": mean}


def facts(config: Config, threads: int) -> Record:
    """What bitwise equality of a resumed run rests on."""
    packages = ["baton-rl", "torch", "transformers", "numpy", *(["peft"] if any(a.lora for a in config.agents) else [])]
    return {
        "versions": {name: package_version(name) for name in packages},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "devices": sorted({str(device) for device in assemble.devices_of(config).values()}),
        "threads": threads,
    }
