"""A run: started, interrupted, resumed, extended, loaded. The run directory is the memory; this is who writes it.

`train` and `load_team` are the only places where a config becomes a running team.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from baton import assemble, records, requests
from baton.algorithms import sat
from baton.algorithms.options import KNOBS
from baton.algorithms.state import Ending, Position, World
from baton.assemble import Plan
from baton.config import Config
from baton.config import load as load_config
from baton.core.scores import mean_interval
from baton.envs.pool import GraderPool, refuse_at_import
from baton.errors import ConfigError, DataError, Interrupted, ModelError, RunError
from baton.host import Reporter, Silent, Stop, complete, stoppable
from baton.journal import (
    Run,
    RunJournal,
    check_directory,
    current,
    is_after_swap,
    open_run,
    owed_stage,
    resumed_config,
    saved_state,
    settle,
    standing,
    write_team,
)
from baton.records import Record
from baton.rollout import Play, Table
from baton.starting import facts, first_record, trainees_of
from baton.swap import exchange, stages_done, tested
from baton.team import Member, Team
from baton.trackers import Trackers
from baton.trackers import check as check_trackers
from baton.types import (
    AgentId,
    Episode,
    Failed,
    Outcome,
    Task,
)
from baton.warm_start import WarmStartRecord

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
    if is_after_swap(target.path):
        target = Run(standing(target.path).home)
    check_directory(target, parsed, resume=resume)
    with records.locked(target.path):
        here = Run(current(target.path))
        if resume:
            parsed, root = resumed_config(here, parsed, root)
        else:
            check_directory(target, parsed, resume=False)
        with stoppable(reporter) as stop:
            try:
                ending = complete(_train(parsed, root, here, reporter, stop))
            except (Interrupted, KeyboardInterrupt) as stopped:
                here = Run(current(target.path))
                # The line counts only for runs that started: before that there is nothing to take up.
                if here.records("start"):
                    records.append_record(here.path / "stages.jsonl", {"kind": "end", "ending": "interrupted"})
                raise Interrupted("stopped by the user") from stopped
            except (ConfigError, ModelError, DataError):
                # Refused before anything began: the directory is free for the mended config.
                if not (target.path / "stages.jsonl").exists():
                    (target.path / "config.toml").unlink(missing_ok=True)
                raise
        here = Run(current(target.path))
        records.append_record(here.path / "stages.jsonl", {"kind": "end", "ending": ending})
    return here


async def _train(config: Config, root: Path, run: Run, reporter: Reporter, stop: Stop) -> Ending:
    """Train to the end, with the swaps that are asked of a running job between two stages."""
    while True:
        ending = await _train_until(config, root, run, reporter, stop)
        asked = requests.asked_of(run.home)
        if ending != "asked" or asked is None:
            return "finished" if ending == "asked" else ending
        answer = await exchange(run, asked.agent, asked.model, asked.options, reporter=reporter, stop=stop, request=asked.id)
        requests.answer(run.home, answer)
        if answer["accepted"]:
            run = Run(current(run.home))
            config, root = resumed_config(run, config, root)


async def _train_until(config: Config, root: Path, run: Run, reporter: Reporter, stop: Stop) -> Ending | Literal["asked"]:
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


async def _train_with(
    pool: GraderPool | None, threads: int, plan: Plan, run: Run, reporter: Reporter, stop: Stop
) -> Ending | Literal["asked"]:
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
        trainees = trainees_of(plan, crew)
        if started is None:
            started = await first_record(run, plan, crew, table, trainees, team, warm, threads, stop)
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
        if (asked := requests.asked_of(run.home)) is not None:
            reporter.say(
                f"a swap is asked: {asked.agent} to {asked.model}, after this stage (remove swaps/request.json to stop it)"
            )
        trackers.start(config.model_dump(mode="json"), run.records())
        try:
            if owed := owed_stage(run, trainees, config.algorithm.name):
                await sat.close_stage(world, position, *owed)
            async for reached, _ in sat.train(world, position):
                position = reached
                if not position.entries and requests.asked_of(run.home) is not None:
                    return "asked"
        finally:
            journal.close()
        ending = sat.ending(world, position) or "finished"
        _say_ending(ending, position, run, reporter)
        return ending
    finally:
        trackers.finish()


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


def since_swap(path: str | Path, record: Record) -> Record:
    """The team as it is now on the prompts of a swap's report, and what training it since then took."""
    run, team = open_run(path), load_team(path)
    try:
        rewards = complete(tested(team.plan, team.table, team.team.versions))
    finally:
        team.close()
    found: Record = {
        "stages": stages_done(run) - int(record["stages"]),
        "accuracy": mean_interval(rewards),
        "training_tokens": sum(sum(u["episodes"]["tokens"].values()) for u in run.updates),
        "fingerprints": {name: run.fingerprint(name) for name in run.files},
    }
    return records.plain(found)


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
