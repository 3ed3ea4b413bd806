"""A run: started, interrupted, resumed, extended, loaded. The run directory is the memory; this is who writes it.

`train` and `load_team` are the only places where a config becomes a running team.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version as package_version
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar, cast

import torch

from baton import assemble, protocols, records
from baton.algorithms import sat
from baton.algorithms.acceptance import Trainee, check_floor
from baton.algorithms.options import KNOBS, resolve_group
from baton.algorithms.sat import (
    AgentState,
    Evidence,
    Position,
    StageEntry,
    StageReport,
    UpdateReport,
    World,
)
from baton.algorithms.warm_start import WarmStartRecord
from baton.assemble import Crew, Plan
from baton.config import CheckpointOptions, Config
from baton.config import load as load_config
from baton.core import batching
from baton.core.keyed import SAMPLE
from baton.engines import local
from baton.engines.engine import Learner
from baton.errors import BatonError, ConfigError, DataError, Interrupted, ModelError, RunError
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
    Snapshot,
    Task,
    TokenBatch,
    Trajectory,
    Turn,
    Weights,
    verdict_word,
)

START_PROMPTS = 64
"""Train prompts on which the start accuracy is measured (ALGORITHMS 2.2)."""
START_EPISODES = "episodes/start.parquet"


class Reporter(Protocol):
    """What a person sees of a run while it runs."""

    def say(self, text: str) -> None:
        """One line worth keeping."""
        ...

    def progress(self, what: str, done: int, total: int, note: str = "") -> None:
        """A long step is at `done` of `total`."""
        ...

    def update(self, record: Record) -> None:
        """An agent update is complete."""
        ...

    def stage(self, record: Record) -> None: ...


class Silent:
    """A reporter that says nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def progress(self, what: str, done: int, total: int, note: str = "") -> None:
        """Nothing."""

    def update(self, record: Record) -> None:
        """Nothing."""

    def stage(self, record: Record) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Run:
    """A run directory as it lies on disk."""

    path: Path

    @property
    def config(self) -> Config:
        """The resolved config of the run."""
        return load_config(self.path / "config.toml")

    def records(self, kind: str | None = None) -> list[Record]:
        """The lines of `stages.jsonl`, all or of one kind."""
        found = records.read_records(self.path / "stages.jsonl")
        return found if kind is None else [r for r in found if r["kind"] == kind]

    @property
    def start(self) -> Record:
        """The line of the start. Raises RunError where the run never got that far."""
        lines = self.records("start")
        if not lines:
            raise RunError(f"{self.path} holds no started run: stages.jsonl has no line of kind 'start'")
        return lines[0]

    @property
    def updates(self) -> list[Record]:
        return self.records("update")

    @property
    def position(self) -> Position:
        """Where the run stands: after its last complete agent update."""
        last = self.updates[-1] if self.updates else self.start
        return records.read_position(last["position"])

    @property
    def ending(self) -> str | None:
        """How the run last ended: finished, converged, stalled, interrupted; None while it runs or after a crash."""
        last = self.records()
        return str(last[-1]["ending"]) if last and last[-1]["kind"] == "end" else None

    @property
    def origins(self) -> dict[AgentId, Path]:
        """Folder of version 0 of each agent whose weights are in the run; none for tables."""
        if self.config.engine.name == "table":
            return {}
        return {name: self.folder(name, 0) for name in self.files}

    @property
    def files(self) -> dict[AgentId, Record]:
        """Agent -> {weights, training, steps}: the files of its promoted version."""
        last = self.updates[-1] if self.updates else self.start
        return cast("dict[AgentId, Record]", last["files"])

    def folder(self, agent: AgentId, version: int | None = None) -> Path:
        """The folder of an agent's promoted version, or of an older one. Raises RunError where it was not kept."""
        relative = self.files[agent]["weights"] if version is None else records.version_folder(agent, version)
        folder = self.path / relative
        if not folder.is_dir():
            raise RunError(
                f"{agent}@{version} is not kept in {self.path}; checkpoint.keep_promoted = 'all' keeps every version"
            )
        return folder


def open_run(path: str | Path) -> Run:
    """A run directory to read.

    Raises:
        RunError: there is none.
    """
    run = Run(Path(path))
    if not (run.path / "config.toml").is_file():
        raise RunError(f"{path} is no run directory: it has no config.toml")
    return run


# ---- stopping --------------------------------------------------------------------------------------------------


class Stop:
    """A request to stop, made by the first Ctrl-C (or SIGTERM) and obeyed at the next tick; the second one is final."""

    def __init__(self, reporter: Reporter) -> None:
        self.asked = False
        self._reporter = reporter

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.asked = True
        self._reporter.say("stopping: the update in hand is dropped, everything before it is saved (again to stop at once)")

    def check(self) -> None:
        if self.asked:
            raise Interrupted("stopped by the user")


@contextmanager
def stoppable(reporter: Reporter) -> Generator[Stop]:
    """Turn the first Ctrl-C into an orderly stop while the block runs (outside the main thread, signals are the host's)."""
    stop = Stop(reporter)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


T = TypeVar("T")


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where an event loop is already running (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        # A loop of our own that leaves signals alone: Ctrl-C is `stoppable`'s.
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(work)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
    box: list[T | BaseException] = []

    def target() -> None:
        try:
            box.append(complete(work))
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    result = box[0]
    if isinstance(result, BaseException):
        raise result
    return result


# ---- the journal -----------------------------------------------------------------------------------------------


class RunJournal:
    """Writes a run as it happens (see `records` for the layout)."""

    def __init__(
        self,
        run: Run,
        plan: Plan,
        crew: Crew,
        reporter: Reporter,
        trackers: Trackers,
        stop: Stop,
        next_versions: dict[AgentId, int],
    ) -> None:
        self.run, self.plan, self.crew, self.reporter, self.stop = run, plan, crew, reporter, stop
        self.trackers = trackers
        self.journal = run.path / "stages.jsonl"
        self.next_versions = next_versions
        self.points: list[tuple[bool, dict[AgentId, Record]]] = []
        """(can be resumed from, files) of every update so far."""
        self._what, self._done = "", 0
        self._prompts: dict[str, str] = {}

    def begin(self, agent: AgentId, stage: int) -> int:
        # Nobody is being updated here: whoever was since the last update leaves.
        self.rest()
        version = self.next_versions[agent]
        self.next_versions[agent] = version + 1
        records.append_record(self.journal, {"kind": "begin", "agent": agent, "stage": stage, "version": version})
        return version

    def rest(self) -> None:
        put_to_rest(self.run, self.crew, self.points[-1][1])

    def tick(self, what: str, total: int) -> None:
        self.stop.check()
        self._done = self._done + 1 if what == self._what and self._done < total else 1
        self._what = what
        self.reporter.progress(what, self._done, total)

    def commit(
        self, report: UpdateReport, evidence: Evidence, position: Position, promoted: tuple[Snapshot, Weights] | None
    ) -> None:
        self.stop.check()
        files = dict(self.points[-1][1])
        if promoted is not None:
            files[report.agent] = self._save(report, promoted, files[report.agent])
        name = f"{report.index:06d}-{report.agent}"
        prompts = (
            {t.id: t.prompt for t in (*self.plan.splits.train, *self.plan.splits.probe)}
            if not self._prompts
            else self._prompts
        )
        self._prompts = prompts
        rows = records.episode_rows(evidence.episodes, use="train", prompts=prompts)
        rows += records.episode_rows(evidence.probe, use="probe", prompts=prompts)
        rows += records.episode_rows(evidence.ordering, use="order", prompts=prompts)
        records.write_episodes(self.run.path / "episodes" / f"{name}.parquet", rows)
        records.write_divergences(self.run.path / "divergences" / f"{name}.parquet", evidence)
        record: Record = {
            "kind": "update",
            "word": verdict_word(report.verdict),
            **cast("Record", records.plain(report)),
            "to_version": report.to_version,
            "time": time.time(),
            "episodes_file": f"episodes/{name}.parquet",
            "files": files,
            "position": records.position_record(position),
        }
        records.append_record(self.journal, record)
        is_resumable = not self.plan.config.algorithm.shares_episodes or not position.entries
        self.points.append((is_resumable, files))
        write_team(self.run, position, files)
        self._prune()
        self.reporter.update(record)
        self.trackers.tell(record)

    def _save(self, report: UpdateReport, promoted: tuple[Snapshot, Weights], before: Record) -> Record:
        snapshot, weights = promoted
        folder = self.run.path / "state" / report.agent
        version = folder / f"v{report.candidate_version:05d}"
        records.write_folder(version, lambda partial: self.crew.save(report.agent, partial, weights))
        training = before["training"]
        # A shrunk update keeps its moments (a table may have met new states), and masters that are served lie in the
        # version folder already.
        held = frozenset[str]() if training is None else records.moment_names(self.run.path / training)
        with_masters = not self.crew.serves_masters(report.agent)
        if held != frozenset(snapshot.moments) or snapshot.steps != before["steps"] or with_masters:
            path = folder / f"training-{report.index:06d}.safetensors"
            records.save_training(path, snapshot, with_masters=with_masters)
            training = str(path.relative_to(self.run.path))
        return {"weights": str(version.relative_to(self.run.path)), "training": training, "steps": snapshot.steps}

    def stage(self, report: StageReport) -> None:
        record: Record = {"kind": "stage", **cast("Record", records.plain(report)), "time": time.time()}
        records.append_record(self.journal, record)
        self.reporter.stage(record)
        self.trackers.tell(record)

    def _prune(self) -> None:
        """Remove what no kept resume point and no kept version needs."""
        kept = kept_files(self.points, self.plan.config.checkpoint)
        for agent in self.points[-1][1]:
            folder = self.run.path / "state" / agent
            # Folders that no record names were never promoted: a process died before it could write the record.
            for path in (*folder.glob("v[0-9]*"), *folder.glob("training-*.safetensors"), *folder.glob(".*.partial")):
                if str(path.relative_to(self.run.path)) not in kept:
                    _remove(path)


def kept_files(points: Sequence[tuple[bool, Mapping[AgentId, Record]]], options: CheckpointOptions) -> frozenset[str]:
    """Paths below the run directory that stay after the last of these points: what a kept resume point or a kept version
    needs. A point is (can be resumed from, files of every agent), as in `RunJournal.points`."""
    resumable = [i for i, (is_resumable, _) in enumerate(points) if is_resumable]
    first = resumable[-options.keep] if len(resumable) >= options.keep else 0
    kept = {str(f[n]) for _, files in points[first:] for f in files.values() for n in ("weights", "training") if f[n]}
    for agent in points[-1][1]:
        promoted = list(dict.fromkeys(str(files[agent]["weights"]) for _, files in points))
        kept.update(promoted if options.keep_promoted == "all" else (promoted[0], *promoted[-2:]))
    return frozenset(kept)


def _remove(path: Path) -> None:
    if path.is_dir():
        for inner in path.iterdir():
            inner.unlink()
        path.rmdir()
    else:
        path.unlink()


def catch_up(run: Run, trainees: Mapping[AgentId, Trainee], schedule: str) -> None:
    """Write what follows a record where the process died between the two: the line of its stage, and team.json."""
    updates = run.updates
    n_stages = sum(not u["position"]["entries"] for u in updates)
    if updates and not updates[-1]["position"]["entries"] and len(run.records("stage")) < n_stages:
        last = updates[-1:] if schedule == "independent" else updates[-len(trainees) :]
        entries = tuple(
            StageEntry(
                agent=u["agent"],
                q_gate=u["verdict"]["gate"]["q_gate"] if u["to_version"] is not None else 0.0,
                radius=sat.allowed(trainees[u["agent"]], run.position.stage).radius_token,
                episodes=u["episodes"]["n"],
                word=u["word"],
            )
            for u in last
        )
        report = sat.stage_report(updates[-1]["stage"], entries)
        line: Record = {"kind": "stage", **cast("Record", records.plain(report)), "time": time.time()}
        records.append_record(run.path / "stages.jsonl", line)
    write_team(run, run.position, run.files)


def write_team(run: Run, position: Position, files: Mapping[AgentId, Record]) -> None:
    """`team.json`: which agent at which version, and where it lies."""
    records.write_text(run.path / "team.json", json.dumps(team_record(position, files), indent=2) + "\n")


def team_record(position: Position, files: Mapping[AgentId, Record]) -> Record:
    """What `team.json` says of a position."""
    return {
        "schema": records.SCHEMA,
        "agents": [
            {
                "name": m.agent,
                "model": m.model,
                "version": m.version,
                "incarnation": m.incarnation,
                **files.get(m.agent, {}),
            }
            for m in position.team.members
        ],
    }


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
            except Interrupted:
                # The line counts only for runs that started: before that there is nothing to take up.
                if target.records("start"):
                    records.append_record(target.path / "stages.jsonl", {"kind": "end", "ending": "interrupted"})
                raise
            except (ConfigError, ModelError, DataError):
                # Refused before anything began: the directory is free for the mended config.
                if not (target.path / "stages.jsonl").exists():
                    (target.path / "config.toml").unlink(missing_ok=True)
                raise
        records.append_record(target.path / "stages.jsonl", {"kind": "end", "ending": ending})
    return target


def check_directory(run: Run, config: Config, *, resume: bool) -> None:
    """A new run needs a directory that holds none; a resumed one needs a run that got somewhere.

    Raises:
        RunError: says which, and what to do.
    """
    started = (run.path / "stages.jsonl").exists() and bool(run.records("start"))
    orphans = [] if started else sorted(p for p in run.path.glob("state/*/v[0-9]*") if p.name != "v00000")
    if orphans:
        raise RunError(
            f"{run.path} holds {orphans[0].relative_to(run.path)} ({len(orphans)} such folders), but its stages.jsonl has "
            "no line of kind 'start' that names them; restore that file from a copy, or start elsewhere with --run DIR"
        )
    if resume and not (run.path / "config.toml").is_file():
        raise RunError(f"nothing to resume in {run.path}: it holds no run; leave out --resume to start one")
    if not resume and started:
        raise RunError(f"{run.path} already holds a run; --resume continues it, --run DIR starts another one elsewhere")


def resumed_config(run: Run, asked: Config, root: Path) -> tuple[Config, Path]:
    """The config to go on with: the run's own, with what may change taken from `asked`.

    Raises:
        RunError: something else differs (names each key with both values), or stages would shrink below what is done.
    """
    own = run.config
    if own.digest != asked.digest:
        changed = _differences(own.model_dump(mode="json"), asked.model_dump(mode="json"))
        allowed = ("algorithm.stages", "checkpoint.", "eval.", "track.")
        refused = [f"{k}: {a!r} in the run, {b!r} asked" for k, a, b in changed if not k.startswith(allowed)]
        raise RunError(
            f"{run.path} was started with another config; only algorithm.stages, [checkpoint], [eval] and [track] may "
            "change:\n  " + "\n  ".join(refused)
        )
    lines = run.records("start")
    if not lines:
        return asked, root
    updates = run.updates
    done = int(updates[-1]["stage"]) if updates else 0
    if asked.algorithm.stages < done:
        raise RunError(
            f"algorithm.stages = {asked.algorithm.stages}: the run is at stage {done} already; ask for at least that"
        )
    if own.algorithm.name == "independent" and asked.algorithm.stages != own.algorithm.stages:
        raise RunError(
            "an independent run trains one agent after another and cannot be extended; start one with more stages"
        )
    return asked, Path(lines[0]["root"])


def _differences(a: Any, b: Any, at: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        left, right = cast("Record", a), cast("Record", b)
        return [d for k in sorted(left | right) for d in _differences(left.get(k), right.get(k), f"{at}.{k}" if at else k)]
    if isinstance(a, list) and isinstance(b, list) and len(cast("list[Any]", a)) == len(cast("list[Any]", b)):
        pairs = zip(cast("list[Any]", a), cast("list[Any]", b), strict=True)
        return [d for i, (x, y) in enumerate(pairs) for d in _differences(x, y, f"{at}.{i}")]
    return [] if a == b else [(at, a, b)]


async def _train(config: Config, root: Path, run: Run, reporter: Reporter, stop: Stop) -> sat.Ending:
    usable = os.cpu_count() or 1
    if config.engine.threads != "auto" and config.engine.threads > usable:
        raise ConfigError(f"engine.threads = {config.engine.threads}: this machine has {usable} cores; lower it, or 'auto'")
    plan = assemble.prepare(config, root=root, own=run.origins if run.records("start") else {})
    threads = assemble.set_threads(config, plan.parameters)
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
    for name in names:
        if started is None:
            files[name] = _write_start(run, crew, name)
            put_to_rest(run, crew, {name: files[name]})
        else:
            crew.rest(name, partial(saved_state, run, crew, name, files[name]))
        weights = crew.load(run.path / files[name]["weights"])
        await crew.sampler.publish(name, "promoted", weights, team.member(name).version)
        if config.algorithm.name == "independent":
            await crew.sampler.publish(name, "start", crew.load(run.folder(name, 0)), 0)
    for name in plan.local if started is None else ():
        if name not in names:
            files[name] = _copy_start(run, crew, name)
    pool = assemble.grader_pool(plan)
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
            started = await _first_record(run, plan, crew, table, trainees, team, files, warm, threads, reporter, stop)
            records.append_record(journal_file, started)
        elif lines[-1] is not started:
            records.append_record(journal_file, {"kind": "resume", **facts(config, threads), "time": time.time()})
            _compare_facts(started, facts(config, threads), reporter)
        catch_up(run, trainees, config.algorithm.name)
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
        )
        _announce(world, started, position, reporter)
        trackers.start(config.model_dump(mode="json"), run.records())
        async for reached, _ in sat.train(world, position):
            position = reached
        ending = sat.ending(world, position) or "finished"
        _say_ending(ending, position, run, reporter)
        return ending
    finally:
        trackers.finish()
        if pool is not None:
            pool.close()


def settle(run: Run, config: Config) -> list[Record]:
    """The journal of a run that is about to go on: a torn last line is dropped, an incomplete stage whose agents
    share episodes (joint, reuse) is taken back and played again as a whole: those are of the team at the stage's start."""
    path = run.path / "stages.jsonl"
    if not path.exists():
        return []
    lines = records.read_records(path)
    if config.algorithm.shares_episodes:
        updates = [i for i, line in enumerate(lines) if line["kind"] == "update"]
        while updates and lines[updates[-1]]["position"]["entries"]:
            del lines[updates.pop()]
    if path.read_bytes() != b"" and (len(records.read_records(path)) != len(lines) or not path.read_bytes().endswith(b"\n")):
        records.rewrite_records(path, lines)
    return lines


def saved_state(run: Run, crew: Crew, agent: AgentId, files: Record) -> Snapshot:
    """Where its last promotion left an agent's learner: masters, moments, steps."""
    masters: Mapping[str, torch.Tensor] = {}
    moments: Mapping[str, torch.Tensor] = {}
    if files["training"] is not None:
        masters, moments = records.load_training(run.path / files["training"])
    weights = crew.stored(run.path / files["weights"]) if crew.serves_masters(agent) else masters
    return Snapshot(weights=weights, moments=moments, steps=int(files["steps"]))


def put_to_rest(run: Run, crew: Crew, files: Mapping[AgentId, Record]) -> None:
    """Those of these agents that leave memory between their updates do so; what they wake with are the files."""
    for agent in crew.leaving & files.keys():
        crew.rest(agent, partial(saved_state, run, crew, agent, files[agent]))


def _write_start(run: Run, crew: Crew, agent: AgentId) -> Record:
    """Version 0 of an agent on disk, and the files that it is."""
    learner, folder = crew.learners[agent], run.path / records.version_folder(agent, 0)
    weights = learner.weights()
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
    files: Mapping[AgentId, Record],
    warm: Mapping[AgentId, tuple[WarmStartRecord, bool]],
    threads: int,
    reporter: Reporter,
    stop: Stop,
) -> Record:
    """The start accuracy, the noise floors: all that a run decides once."""
    config = plan.config

    def tick() -> None:
        stop.check()

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
    for index, seat in enumerate(plan.seats):
        if seat.agent in trainees:
            rows = await _own_words(plan, table, index, episodes, [p.task for p in plays])
            floors[seat.agent] = _floor(seat, trainees[seat.agent], crew, rows)
            put_to_rest(run, crew, {seat.agent: files[seat.agent]})
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
        "fingerprints": {name: crew.load(run.path / f["weights"]).fingerprint for name, f in files.items()},
        "files": dict(files),
        "position": records.position_record(position),
    }


def start_plays(plan: Plan) -> list[Play]:
    """The episodes of the start accuracy: one on each of a keyed draw of train prompts."""
    train = plan.splits.train
    tasks, _ = sat.draw_prompts(train, 0, min(START_PROMPTS, len(train)), at=(plan.config.seed, "start prompts"))
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
    changed = [f"{k}: {a} then, {b} now" for k, a, b in _differences(then, now)]
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


def _say_ending(ending: sat.Ending, position: Position, run: Run, reporter: Reporter) -> None:
    if ending == "converged":
        reporter.say("converged: three stages without anything left to learn from (every group right)")
    if ending == "stalled":
        reasons = [reason for reason, _ in position.stalled]
        commonest = max(sorted(set(reasons)), key=reasons.count)
        reporter.say(f"stopped: three stages in a row rejected every update, mostly {commonest}. Remedy: {KNOBS[commonest]}")


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
