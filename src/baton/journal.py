"""The run directory as a run: `Run` reads where it stands, `RunJournal` writes it as it happens, and what a crash left half
done is settled here (see `records` for the layout)."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch

from baton import records
from baton.algorithms import sat
from baton.algorithms.acceptance import Trainee
from baton.algorithms.state import Evidence, Pair, Position, StageEntry, StageReport, UpdateReport
from baton.assemble import Crew, Plan
from baton.config import CheckpointOptions, Config
from baton.config import load as load_config
from baton.errors import ConfigError, RunError
from baton.host import Reporter, Stop
from baton.records import Record
from baton.trackers import Trackers
from baton.types import (
    AgentId,
    Snapshot,
    Weights,
    verdict_word,
)

SWAPS = "swaps"
"""Where a run goes on after its first swap: one directory a swap, each a run directory of its own that begins with the team
as it was handed over, and `current`, which names the one that counts."""
BEFORE = "000"
"""The run before any swap, by the same kind of name; there is no such directory."""


def is_after_swap(path: Path) -> bool:
    """The directory is one that a swap made, or the name of the run before any."""
    return path.parent.name == SWAPS and re.fullmatch(r"\d{3}", path.name) is not None


def current(path: Path) -> Path:
    """The directory that a run is at: the one of its last swap that stands, or itself."""
    pointer = path / SWAPS / "current"
    if is_after_swap(path) or not pointer.is_file():
        return path
    name = pointer.read_text(encoding="utf-8").strip()
    if name == BEFORE:
        return path
    if not (path / SWAPS / name / "config.toml").is_file():
        raise RunError(f"{pointer} names '{name}', which is no run directory; restore {path / SWAPS} from a copy")
    return path / SWAPS / name


@dataclass(frozen=True)
class Run:
    """A run directory as it lies on disk."""

    path: Path
    until: int | None = None
    """Read as it stood after this stage, whatever came later; None: as it stands."""

    @property
    def home(self) -> Path:
        """The directory that people name: of a run after a swap, the one that the run began in."""
        return self.path.parent.parent if is_after_swap(self.path) else self.path

    @property
    def swap(self) -> Record | None:
        """What the swap was that this directory began with; None before any."""
        return cast("Record | None", self.start.get("swap"))

    @property
    def config(self) -> Config:
        """The resolved config of the run. Raises RunError where the file is damaged."""
        try:
            return load_config(self.path / "config.toml")
        except ConfigError as error:
            raise RunError(f"{self.path / 'config.toml'} is damaged ({error}); restore it from a copy of the run") from error

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
        """The lines of its agent updates."""
        return [u for u in self.records("update") if self.until is None or int(u["stage"]) <= self.until]

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

    def fingerprint(self, agent: AgentId) -> str:
        """Of a trained agent's promoted weights, as recorded when they were."""
        accepted = [u for u in self.updates if u["agent"] == agent and u["fingerprint"]]
        return str(accepted[-1]["fingerprint"] if accepted else self.start["fingerprints"][agent])

    def folder(self, agent: AgentId, version: int | None = None) -> Path:
        """The folder of an agent's promoted version, or of an older one. Raises RunError where it was not kept."""
        relative = self.files[agent]["weights"] if version is None else records.version_folder(agent, version)
        folder = self.path / relative
        if not folder.is_dir():
            is_kept = version in (None, 0) or str(relative) == self.files[agent]["weights"]
            remedy = (
                "it was removed: restore it from a copy"
                if is_kept
                else "checkpoint.keep_promoted = 'all' keeps every version"
            )
            raise RunError(f"{folder} of '{agent}' is not there; {remedy}")
        return folder


def open_run(path: str | Path) -> Run:
    """A run directory to read.

    Raises:
        RunError: there is none.
    """
    run = Run(Path(path))
    if is_after_swap(run.path) and run.path.name == BEFORE:
        run = Run(run.home)
        if (run.path / "config.toml").is_file():
            return run
    if not (run.path / "config.toml").is_file():
        raise RunError(f"{path} is no run directory: it has no config.toml")
    return Run(current(run.path))


def standing(path: str | Path) -> Run:
    """The directory in which a run stands, to go on there.

    Raises:
        RunError: there is none, or the path names another directory of a run that was swapped.
    """
    run = open_run(path)
    if run.path != current(run.home):
        raise RunError(f"{path} is not where the run stands since its last swap or undo: name the run itself, {run.home}")
    return run


# ---- writing ---------------------------------------------------------------------------------------------------


class RunJournal:
    """Writes a run as it happens (see `records` for the layout).

    Lines and files are written beside the loop, in one order, each durable before the next: the next update begins to play
    while this one is written, at most one is in hand, and what failed is raised at the next tick. What was written is told
    (`reporter`, `trackers`) once it is durable. A learner that rests wakes with what is written, and waits for it.
    """

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
        """(can be resumed from, files) of every update that is written."""
        self._what, self._done = "", 0
        self._prompts = {t.id: t.prompt for t in (*plan.splits.train, *plan.splits.probe, *plan.splits.certify)}
        self._writer = ThreadPoolExecutor(max_workers=1, initializer=_give_way if crew.leaving else None)
        self._waiting: deque[tuple[Future[Record | None], Callable[[Record], None]]] = deque()
        self._is_broken = False
        """Something could not be written: nothing may follow it."""

    def begin(self, agent: AgentId, stage: int) -> int:
        # Nobody is being updated here: whoever was since the last update leaves.
        self.rest()
        version = self.next_versions[agent]
        self.next_versions[agent] = version + 1
        self._write(partial(self._append, {"kind": "begin", "agent": agent, "stage": stage, "version": version}))
        return version

    def rest(self) -> None:
        for agent in self.crew.leaving:
            self.crew.rest(agent, partial(self._saved, agent))

    def _saved(self, agent: AgentId) -> Snapshot:
        self.wait()
        return saved_state(self.run, self.crew, agent, self.points[-1][1][agent])

    def tick(self, what: str, total: int) -> None:
        self.stop.check()
        self._tell(waits=False)
        self._done = self._done + 1 if what == self._what and self._done < total else 1
        self._what = what
        self.reporter.progress(what, self._done, total)

    def commit(
        self, report: UpdateReport, evidence: Evidence, position: Position, promoted: tuple[Snapshot, Weights] | None
    ) -> None:
        self.stop.check()
        self.wait()
        if promoted is not None and report.agent not in self.crew.leaving:
            # The learner may go on while its state is written; one that rests leaves these tensors behind.
            snapshot, weights = promoted
            masters = {name: tensor.clone() for name, tensor in snapshot.weights.items()}
            moments = {name: tensor.clone() for name, tensor in snapshot.moments.items()}
            promoted = Snapshot(weights=masters, moments=moments, steps=snapshot.steps), weights
        self._write(partial(self._commit, report, evidence, position, promoted), self._tell_update)

    def stage(self, report: StageReport, pairs: Sequence[Pair]) -> None:
        def line() -> Record:
            if pairs:
                rows = records.pair_rows(pairs, prompts=self._prompts)
                records.write_episodes(self.run.path / records.stage_pairs_file(report.stage), rows)
            return self._append({"kind": "stage", **records.plain(report), "time": time.time()})

        self._write(line, self._tell_stage)

    def weights(self, agent: AgentId, version: int) -> Weights:
        self.wait()
        return self.crew.load(self.run.path / records.version_folder(agent, version))

    def wait(self) -> None:
        """Until everything that was begun is written and told. Raises what a write raised."""
        self._tell(waits=True)

    def close(self) -> None:
        """Wait, and end."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def _write(self, job: Callable[[], Record], tell: Callable[[Record], None] = lambda _: None) -> None:
        def guarded() -> Record | None:
            if self._is_broken:
                return None
            try:
                return job()
            except BaseException:
                self._is_broken = True
                raise

        self._waiting.append((self._writer.submit(guarded), tell))

    def _tell(self, *, waits: bool) -> None:
        """Tell what is durable by now; with `waits`, everything. Raises what a write raised."""
        while self._waiting and (waits or self._waiting[0][0].done()):
            future, tell = self._waiting.popleft()
            if (record := future.result()) is not None:
                tell(record)

    def _tell_update(self, record: Record) -> None:
        self.reporter.update(record)
        self.trackers.tell(record)

    def _tell_stage(self, record: Record) -> None:
        self.reporter.stage(record)
        self.trackers.tell(record)

    def _append(self, record: Record) -> Record:
        records.append_record(self.journal, record)
        return record

    def _commit(
        self, report: UpdateReport, evidence: Evidence, position: Position, promoted: tuple[Snapshot, Weights] | None
    ) -> Record:
        files = dict(self.points[-1][1])
        if promoted is not None:
            files[report.agent] = self._save(report, promoted, files[report.agent])
        name = f"{report.index:06d}-{report.agent}"
        rows = records.episode_rows(evidence.episodes, use="train", prompts=self._prompts)
        rows += records.episode_rows(evidence.probe, use="probe", prompts=self._prompts)
        rows += records.episode_rows(evidence.ordering, use="order", prompts=self._prompts)
        rows += records.pair_rows(evidence.pairs, prompts=self._prompts)
        rows += records.episode_rows(evidence.restated, use="restated", prompts=self._prompts)
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
        self._append(record)
        is_resumable = not self.plan.config.algorithm.shares_episodes or not position.entries
        self.points.append((is_resumable, files))
        write_team(self.run, position, files)
        self._prune()
        return record

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


def owed_stage(run: Run, trainees: Mapping[AgentId, Trainee], schedule: str) -> tuple[int, tuple[StageEntry, ...]] | None:
    """The stage whose line is missing because the process died between it and its last update."""
    updates = run.updates
    n_stages = sum(not u["position"]["entries"] for u in updates)
    if not updates or updates[-1]["position"]["entries"] or len(run.records("stage")) >= n_stages:
        return None
    last = updates[-1:] if schedule == "independent" else updates[-len(trainees) :]
    entries = tuple(
        StageEntry(
            agent=u["agent"],
            q_gate=u["verdict"]["gate"]["q_gate"] if u["to_version"] is not None else 0.0,
            radius=sat.allowed(trainees[u["agent"]], run.position.stage).radius_token,
            episodes=u["episodes"]["n"],
            word=u["word"],
            from_version=u["from_version"],
        )
        for u in last
    )
    return int(updates[-1]["stage"]), entries


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


# ---- going on --------------------------------------------------------------------------------------------------


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


GIVES_WAY = 10
"""Niceness of the thread that writes large files: far enough that products of matrices beside it hardly wait, and not so far
that it starves, with the interpreter's lock in hand, where other processes want the processors too."""


def _give_way() -> None:
    """This thread gives way to the loop's (on Linux; elsewhere they share): a product of matrices waits for the slowest of
    its threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), GIVES_WAY)


def put_to_rest(run: Run, crew: Crew, files: Mapping[AgentId, Record]) -> None:
    """Those of these agents that leave memory between their updates do so; what they wake with are the files."""
    for agent in crew.leaving & files.keys():
        crew.rest(agent, partial(saved_state, run, crew, agent, files[agent]))


def check_directory(run: Run, config: Config, *, resume: bool) -> None:
    """A new run needs a directory that holds none; a resumed one needs a run that got somewhere.

    Raises:
        RunError: says which, and what to do.
    """
    started = (run.path / "stages.jsonl").exists() and bool(run.records("start"))
    entries = sorted(p.name for p in run.path.iterdir() if not p.name.startswith(".")) if run.path.is_dir() else []
    if entries and not resume and not {"config.toml", "stages.jsonl", "state", "trackers.json"} & set(entries):
        shown = ", ".join(entries[:3]) + (", ..." if entries[3:] else "")
        raise RunError(f"{run.path} holds other files ({shown}) and no run; give a new or empty folder with --run DIR")
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
    asked = _seated(run, own, asked)
    if own.digest != asked.digest:
        changed = records.differences(own.model_dump(mode="json"), asked.model_dump(mode="json"))
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


def _seated(run: Run, own: Config, asked: Config) -> Config:
    """What was asked, with the newcomers in their seats: a config that was written before a swap still names the models of
    then."""
    if run.path == run.home:
        return asked
    first = {agent.name: agent for agent in Run(run.home).config.agents}
    now = {agent.name: agent for agent in own.agents}
    agents = tuple(now.get(a.name, a) if a == first.get(a.name) else a for a in asked.agents)
    return asked.model_copy(update={"agents": agents})
