"""A run: started, interrupted, resumed, extended, loaded. The run directory is the memory; this is who writes it.

`train` and `load_team` are the only places where a config becomes a running team.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version as package_version
from pathlib import Path

from baton import assemble, protocols, records
from baton.algorithms import sat
from baton.algorithms.acceptance import Trainee, check_floor
from baton.algorithms.episodes import draw_prompts
from baton.algorithms.options import KNOBS, resolve_group
from baton.algorithms.state import AgentState, Ending, Position, World
from baton.assemble import Crew, Plan
from baton.config import Config
from baton.config import load as load_config
from baton.core import batching
from baton.core.keyed import SAMPLE
from baton.engines import local
from baton.engines.engine import Learner
from baton.envs.pool import GraderPool, refuse_at_import
from baton.errors import BatonError, ConfigError, DataError, Interrupted, ModelError, RunError
from baton.host import Reporter, Silent, Stop, complete, stoppable
from baton.journal import (
    Run,
    RunJournal,
    check_directory,
    open_run,
    owed_stage,
    put_to_rest,
    resumed_config,
    saved_state,
    settle,
    write_team,
)
from baton.records import Record
from baton.rollout import Play, Seat, Table
from baton.team import Member, Team
from baton.trackers import Trackers
from baton.trackers import check as check_trackers
from baton.types import (
    AgentId,
    Episode,
    Failed,
    Outcome,
    Task,
    TokenBatch,
    Trajectory,
    Turn,
    Weights,
)
from baton.warm_start import WarmStartRecord

START_PROMPTS = 64
"""Train prompts on which the start accuracy is measured (ALGORITHMS 2.2)."""
START_EPISODES = "episodes/start.parquet"


# ---- training --------------------------------------------------------------------------------------------------


def train(
    config: Config | str | Path,
    *,
    run: str | Path | None = None,
    resume: bool = False,
    overrides: Sequence[str] = (),
    reporter: Reporter | None = None,
) -> Run:
    """Train a team and return its run. From a path, `overrides` are `a.b=c` as on the command line.

    Args:
        run: the run directory (default: runs/<name of the config file>, or runs/run).
        resume: continue the run there; `algorithm.stages`, `[checkpoint]`, `[eval]` and `[track]` may have changed, nothing
            else.

    Raises:
        ConfigError, ModelError, DataError: refused before any model loads.
        RunError: the directory is taken, absent, of another config, or unwritable.
        Interrupted: the user asked to stop; what was complete is on disk.
    """
    refuse_at_import()
    reporter = reporter or Silent()
    if isinstance(config, Config):
        parsed, root, name = config, Path.cwd(), "run"
    else:
        parsed, root, name = load_config(config, overrides), Path(config).resolve().parent, Path(config).stem
    check_trackers(parsed.track)
    target = Run(Path(run) if run is not None else Path("runs") / name)
    check_directory(target, parsed, resume=resume)
    with records.locked(target.path):
        if resume:
            parsed, root = resumed_config(target, parsed, root)
        else:
            check_directory(target, parsed, resume=False)
        with stoppable(reporter) as stop:
            try:
                ending = complete(_train(parsed, root, target, reporter, stop))
            except (Interrupted, KeyboardInterrupt) as stopped:
                # The line counts only for runs that started: before that there is nothing to take up.
                if target.records("start"):
                    records.append_record(target.path / "stages.jsonl", {"kind": "end", "ending": "interrupted"})
                raise Interrupted("stopped by the user") from stopped
            except (ConfigError, ModelError, DataError):
                # Refused before anything began: the directory is free for the mended config.
                if not (target.path / "stages.jsonl").exists():
                    (target.path / "config.toml").unlink(missing_ok=True)
                raise
        records.append_record(target.path / "stages.jsonl", {"kind": "end", "ending": ending})
    return target


async def _train(config: Config, root: Path, run: Run, reporter: Reporter, stop: Stop) -> Ending:
    usable = os.cpu_count() or 1
    if config.engine.threads != "auto" and config.engine.threads > usable:
        raise ConfigError(f"engine.threads = {config.engine.threads}: this machine has {usable} cores; lower it, or 'auto'")
    plan = assemble.prepare(config, root=root, own=run.origins if run.records("start") else {})
    threads = assemble.set_threads(config, plan.parameters)
    pool = assemble.grader_pool(plan, check=stop.check)
    try:
        assemble.check_grader(plan, pool)
        stop.check()
        stop.nothing_to_save = False
        return await _train_with(pool, threads, plan, run, reporter, stop)
    finally:
        if pool is not None:
            pool.close()


async def _train_with(pool: GraderPool | None, threads: int, plan: Plan, run: Run, reporter: Reporter, stop: Stop) -> Ending:
    config = plan.config
    records.write_text(run.path / "config.toml", config.to_toml())
    journal_file = run.path / "stages.jsonl"
    lines = settle(run, config)
    started = next((line for line in lines if line["kind"] == "start"), None)
    if started is None:
        folders, warm = _starts(plan, reporter, stop)
        team = Team(members=tuple(Member(agent=a.name, model=a.model) for a in config.agents))
    else:
        # Models are built from version 0, which is never pruned and lends its tokenizer to every later version; learners
        # wake with the promoted state.
        folders, warm, team = {name: run.folder(name, 0) for name in plan.local}, {}, run.position.team
        for name, files in run.files.items():
            if not (run.path / files["weights"]).is_dir():
                raise RunError(
                    f"the weights of '{name}' ({run.path / files['weights']}) are gone; the run cannot be resumed "
                    "without them"
                )
    names = [a.name for a in config.agents if a.trainable]
    models = ", ".join(f"{a.name} ({a.model}{', an adapter' if a.lora else ''})" for a in config.agents)
    reporter.say(f"loading {len(config.agents)} agents: {models}")
    crew = assemble.crew(config, folders, learners=names)
    files = dict(run.files) if started is not None else dict[AgentId, Record]()
    for name in names if started is not None else ():
        if files[name]["training"] is not None:
            records.check_training(run.path / files[name]["training"])
        crew.rest(name, partial(saved_state, run, crew, name, files[name]))
        weights = crew.load(run.path / files[name]["weights"])
        if weights.fingerprint != (promoted := run.fingerprint(name)):
            raise RunError(
                f"{run.path / files[name]['weights']} is damaged: its tensors are not those that were promoted (fingerprint "
                f"{weights.fingerprint[:12]}, recorded {promoted[:12]}); restore it from a copy of the run"
            )
        await crew.sampler.publish(name, "promoted", weights, team.member(name).version)
    trackers = Trackers(config.track, run.path, say=reporter.say)
    try:
        table = assemble.table(plan, crew.sampler, pool)
        next_versions = {name: 1 for name in names}
        for line in lines:
            if line["kind"] == "begin":
                next_versions[line["agent"]] = int(line["version"]) + 1
        journal = RunJournal(run, plan, crew, reporter, trackers, stop, next_versions)
        trainees = _trainees(plan, crew)
        if started is None:
            started = await _first_record(run, plan, crew, table, trainees, team, warm, threads, stop)
            records.append_record(journal_file, started)
        elif lines[-1] is not started:
            records.append_record(journal_file, {"kind": "resume", **facts(config, threads), "time": time.time()})
            _compare_facts(started, facts(config, threads), reporter)
        if config.algorithm.name == "independent":
            for name in names:
                await crew.sampler.publish(name, "start", crew.load(run.folder(name, 0)), 0)
        write_team(run, run.position, run.files)
        journal.points = [(True, started["files"])]
        journal.points += [
            (not config.algorithm.shares_episodes or not u["position"]["entries"], u["files"]) for u in run.updates
        ]
        position = run.position
        world = World(
            seed=config.seed,
            options=config.algorithm,
            gate=config.gate,
            group=int(started["group"]),
            table=table,
            sampler=crew.sampler,
            trainees=trainees,
            train=plan.splits.train,
            probe=plan.splits.probe,
            reward_range=plan.env.reward_range,
            journal=journal,
            certify=plan.splits.certify,
            pool=plan.splits.record["certify"]["sha256"],
            probe_pool=plan.splits.record["probe"]["sha256"],
            certificate=config.certificate,
        )
        _announce(world, started, position, reporter)
        trackers.start(config.model_dump(mode="json"), run.records())
        try:
            if owed := owed_stage(run, trainees, config.algorithm.name):
                await sat.close_stage(world, position, *owed)
            async for reached, _ in sat.train(world, position):
                position = reached
        finally:
            journal.close()
        ending = sat.ending(world, position) or "finished"
        _say_ending(ending, position, run, reporter)
        return ending
    finally:
        trackers.finish()


def _write_start(run: Run, crew: Crew, agent: AgentId, weights: Weights) -> Record:
    """Version 0 of an agent on disk, and the files that it is."""
    learner, folder = crew.learners[agent], run.path / records.version_folder(agent, 0)
    records.write_folder(folder, lambda partial: crew.save(agent, partial, weights))
    training: str | None = None
    if not crew.serves_masters(agent):
        path = run.path / "state" / agent / "training-start.safetensors"
        records.save_training(path, learner.snapshot(), with_masters=True)
        training = str(path.relative_to(run.path))
    return {"weights": str(folder.relative_to(run.path)), "training": training, "steps": 0}


def _copy_start(run: Run, crew: Crew, agent: AgentId) -> Record:
    """What a frozen agent is, on disk like everybody's version 0, and its files."""
    folder = run.path / records.version_folder(agent, 0)
    records.write_folder(folder, lambda partial: crew.copy_start(agent, partial))
    return {"weights": str(folder.relative_to(run.path)), "training": None, "steps": 0}


def _starts(
    plan: Plan, reporter: Reporter, stop: Stop
) -> tuple[dict[AgentId, Path], dict[AgentId, tuple[WarmStartRecord, bool]]]:
    folders: dict[AgentId, Path] = {}
    warm: dict[AgentId, tuple[WarmStartRecord, bool]] = {}

    def tick(name: str, step: int, total: int, accuracy: float) -> None:
        stop.check()
        reporter.progress(f"{name}: warm start", step, total, f"accuracy {accuracy:.2f}")

    for i, agent in enumerate(plan.config.agents):
        if agent.is_remote:
            continue
        folder, record, is_cached = assemble.start_folder(plan, i, tick=tick)
        folders[agent.name] = folder
        if record is not None:
            warm[agent.name] = (record, is_cached)
            step, accuracy = record.accuracy[-1]
            where = "from the cache" if is_cached else f"{step} steps, {record.tokens:,} tokens"
            reporter.say(
                f"warm start of {agent.name}: {where}; expected accuracy on held-out demonstrations "
                f"{record.accuracy[0][1]:.2f} -> {accuracy:.2f}"
            )
    return folders, warm


def _trainees(plan: Plan, crew: Crew) -> dict[AgentId, Trainee]:
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


async def _first_record(
    run: Run,
    plan: Plan,
    crew: Crew,
    table: Table,
    trainees: Mapping[AgentId, Trainee],
    team: Team,
    warm: Mapping[AgentId, tuple[WarmStartRecord, bool]],
    threads: int,
    stop: Stop,
) -> Record:
    """Version 0 of everybody, the start accuracy, the noise floors: all that a run decides once."""
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
        "group": resolve_group(config.algorithm, (accuracy - low) / (high - low)),
        "facts": dict(plan.env.facts(len(plan.seats))),
        "is_repeatable": all(seat.speaker is None for seat in plan.seats),
        "episodes_file": START_EPISODES,
        "fingerprints": fingerprints,
        "files": files,
        "position": records.position_record(position),
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


def _compare_facts(started: Record, now: Record, reporter: Reporter) -> None:
    then = {k: started.get(k, v) for k, v in now.items()}
    changed = [f"{k}: {a} then, {b} now" for k, a, b in records.differences(then, now)]
    if changed:
        reporter.say(
            "not bitwise the same machine as at the start (" + "; ".join(changed) + "): resuming without that promise"
        )


def _announce(world: World, started: Record, position: Position, reporter: Reporter) -> None:
    updates = sat.total_updates(world.options, len(world.trainees))
    if position.done:
        reporter.say(f"resuming after {position.done} of {updates} agent updates")
        return
    floors = ", ".join(f"{n} {f['token']:.1e}" for n, f in started["noise_floor"].items())
    lost = started.get("start_failed", 0)
    failed = f" ({lost} more failed)" if lost else ""
    reporter.say(
        f"start accuracy {started['start_accuracy']:.3f} on {started['start_prompts']} train prompts{failed}; "
        f"{world.options.episodes} episodes an update in groups of {world.group}; noise floor {floors} nats"
    )


def _remedy(reason: str, run: Run) -> str:
    """What helps against this reason: of its last case the detail, where that says more than the reason does."""
    details = [u["verdict"].get("detail", "") for u in run.updates if u["verdict"].get("reason") == reason]
    told = details[-1] if details else ""
    if reason == "no_signal" and " acted " in told:
        return f"{told}; let the protocol call it more often, or raise algorithm.episodes and gate.probe_prompts"
    return KNOBS[reason]


def _say_ending(ending: Ending, position: Position, run: Run, reporter: Reporter) -> None:
    if ending == "converged":
        reporter.say("converged: three stages without anything left to learn from (every group right)")
    if ending == "stalled":
        reasons = [reason for reason, _ in position.stalled]
        commonest = max(sorted(set(reasons)), key=reasons.count)
        reporter.say(
            f"stopped: three stages in a row rejected every update, mostly {commonest}. Remedy: {_remedy(commonest, run)}"
        )


# ---- playing ---------------------------------------------------------------------------------------------------


@dataclass
class LoadedTeam:
    """A trained team that plays."""

    plan: Plan
    table: Table
    team: Team
    close: Callable[[], None]

    def play(
        self,
        task: Task | str | Sequence[str],
        *,
        sibling: int = 0,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> Episode:
        """One episode on a task, on a question that every seat gets, or on one text per seat.

        What is no task has no answer to be compared with: its outcome is `Failed(UNGRADED)` where nothing else failed.

        Args:
            sibling: another number is another episode of the same question.
            temperature: sampling temperature of every seat (default: each its own).
            seed: seed of the draws (default: the run's).

        Raises:
            DataError: not one text per seat.
        """
        table = self.table
        if not isinstance(task, Task):
            task = self._asked(task)
            table = replace(table, grade=_ungraded)
        if temperature is not None:
            table = replace(table, seats=tuple(replace(seat, temperature=temperature) for seat in table.seats))
        address = (self.plan.config.seed if seed is None else seed, "play")
        plays = [Play(task=task, sibling=sibling)]
        return complete(table.play(plays, address=address, versions=self.team.versions))[0]

    def _asked(self, question: str | Sequence[str]) -> Task:
        env = self.plan.env.name
        if isinstance(question, str):
            return Task(id=f"ask:{question}", env=env, prompt=question, answer="")
        views, seats = tuple(question), self.table.seats
        if len(views) != len(seats):
            raise DataError(
                f"{len(views)} texts for {len(seats)} seats ({', '.join(s.agent for s in seats)}): give each seat its own, "
                "or one question for all"
            )
        return Task(id=f"ask:{json.dumps(views)}", env=env, prompt="\n\n".join(views), views=views, answer="")


UNGRADED = "ungraded: a plain question has no answer to compare with"


def _ungraded(answers: Sequence[tuple[Task, str]]) -> list[Outcome]:
    return [Failed(reason=UNGRADED) for _ in answers]


def load_team(path: str | Path) -> LoadedTeam:
    """The promoted team of a run directory, ready to play."""
    run = open_run(path)
    config, root = run.config, Path(run.start["root"])
    plan = assemble.prepare(config, root=root, own=run.origins)
    assemble.set_threads(config, plan.parameters)
    crew = assemble.crew(config, {name: run.folder(name) for name in plan.local}, learners=[])
    team = run.position.team

    async def publish() -> None:
        for name in plan.local:
            weights = crew.load(run.folder(name))
            await crew.sampler.publish(name, "promoted", weights, team.member(name).version)

    complete(publish())
    pool = assemble.grader_pool(plan)
    return LoadedTeam(
        plan=plan,
        table=assemble.table(plan, crew.sampler, pool),
        team=team,
        close=pool.close if pool is not None else lambda: None,
    )
