"""A run checked by somebody else, from its directory alone.

Everything that a run claims is computed again from what it kept: the divergence of each promoted update from both versions'
weights, each look and verdict from the divergences, each reward from the recorded turns, each log-probability from the
version that sampled it, each count and accuracy from the episodes (ALGORITHMS 2.2, 2.4, 2.5, 2.6, 2.12, 5.6). What cannot be
checked is listed with its reason. Nothing is written, and at most two versions of one agent are in memory at a time.

A run that was forged as a whole, by training it, is a run. What is found here is a record that does not follow from its own
episodes and weights.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor

from baton import assemble, records
from baton import run as runs
from baton.algorithms import sat
from baton.algorithms.acceptance import (
    REPLAY_EXACT,
    REPLAY_ROUNDED,
    ProbeStates,
    ReplaySums,
    Trainee,
    check_replay,
    look,
    probe_states,
)
from baton.algorithms.episodes import Collected, acting, agent_batch, draw_prompts, episode_advantages, stats, unheard
from baton.algorithms.options import resolve_group
from baton.algorithms.state import AgentState, Position, Retry, StageEntry, StagePlan, World
from baton.assemble import Crew, Plan
from baton.config import AgentOptions, Config
from baton.core import advantages, batching, trust_region
from baton.core.keyed import PROBE, PROMPTS, SAMPLE, choice, key, permutation
from baton.engines import adapters, local, models
from baton.engines.engine import Anchor, Codec, Learner
from baton.envs.custom import CustomOptions
from baton.errors import BatonError, ConfigError, DataError, ModelError, ReplayGapError, RunError, TaskFault, cause
from baton.evaluation import Bench, Measurement, report_rows, row_record
from baton.host import Reporter, Silent, complete
from baton.journal import Run, open_run, team_record
from baton.protocols import RouterOptions
from baton.records import LookRows, Record
from baton.rollout import Play, Seat, Substitute, Table
from baton.team import Member, Team, update_order
from baton.types import (
    Accepted,
    AgentId,
    Episode,
    Failed,
    GateRecord,
    Message,
    Rejected,
    Slot,
    Snapshot,
    Task,
    TokenBatch,
    Truncated,
    Turn,
    Verdict,
    verdict_word,
)

CHECKS: Mapping[str, str] = {
    "files": "config, prompt sets, team.json, every file that a line names",
    "sequence": "lines: none missing, version ids used once, each position, order and radius from what was before",
    "episodes": "tasks drawn by key, prompt ids, texts of the sampled ids, answers",
    "rewards": "answers, graded again",
    "counts": "mean rewards, counts and weights of reuse of each update; start accuracy and noise floors",
    "gate": "looks: probe states drawn by key, all fields from the recorded divergences",
    "verdicts": "updates: verdict, retries, version, beta, lr and streak from the looks",
    "weights": "kept versions: fingerprints of their tensors",
    "log-probs": "sampled tokens, scored again by the version that sampled them",
    "divergences": "promoted updates: both KLs from the weights of both versions",
    "evaluations": "rows: value, interval and difference from the stored episodes",
}
"""What is checked, in the order of the report, and what is counted there."""

TOKEN_TABLE, TOKEN_EXACT, TOKEN_ROUNDED = 1e-6, 1e-3, 2.0
"""Largest gap of one token's log-probability, nats: tables, fp32 serving, bf16 serving (135M: .53 in 4,000 honest
tokens). The mean over an update's tokens obeys the replay bound beside it (acceptance.py)."""
MEAN_EXACT, MEAN_ROUNDED = 1e-5, 5e-3
"""How far the recorded mean of a replay gap may lie from the recomputed one, nats: one changed number shows here too."""
SHARE_EXACT, SHARE_ROUNDED = 1e-4, 0.1
"""How far an effective share or a mean weight of reused episodes may lie from the recomputed one: fp32 serving, bf16."""
KL_FLOOR = 1e-6
"""Smallest tolerance of a divergence, nats; above it the run's own noise floor decides (`kl_tolerance`)."""
RELATIVE = 1e-9
"""Relative tolerance of a number that is computed again from recorded numbers by the same operations."""
SHOWN = 3
"""Places that are named of what was not checked for one reason."""

NOT_STEPPED = "optimiser steps (loss, gradient, where a step went, moments) are not taken again"
NOT_SAMPLED = "messages are not sampled again: that a token is the one its key draws is not shown, only its probability"
NOT_PROMOTED = (
    "the weights of a candidate that was not promoted are not kept: its recorded divergences are taken as they are"
)
FAILED_EPISODE = "what failed is not failed again; it has no reward"
NOT_PUBLISHED = "a publication that failed is not repeated"
PRUNED = "pruned versions are not kept (checkpoint.keep_promoted = 'all' keeps every one)"
FOREIGN = "a model from outside the run is not kept in it"
AFTER_A_GAP = "what an update began with is unknown after a missing line"
NOT_FINITE = "a step that was not finite is not taken again"
NOT_MEASURED = "predicted gains are taken as they are: the gradients under them are not computed again"
NOT_ALLOCATED = "order 'grad_norm' records norms, not the gains that the radii were shared out by: only their sum is checked"
NOT_HEARD = "what a teammate behind an endpoint said cannot be computed here: its text is taken as it is"
NOT_CALLED = "nobody called the agent at the start: its noise floor rests on words of its own that are not kept"

_ODD = (
    BatonError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    OSError,
    RuntimeError,
    SafetensorError,
)
"""What a stranger's files can raise on the way through code that trusts its own."""


def kl_tolerance(d: Float[Tensor, " N"], floor: float) -> Float[Tensor, " N"]:
    """How far a divergence d may lie from the recorded one, nats: `KL_FLOOR + 4 (f + sqrt(f |d|))`.

    The noise floor f is the divergence of the weights from themselves, of order e^2 / 2 for an error e of the log-law; the
    same error moves KL(p || q) by about e times the spread of log p - log q, sqrt(2 KL).
    """
    f = max(floor, 0.0)
    return KL_FLOOR + 4.0 * (f + (f * d.abs()).sqrt())


# ---- what was found --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Something recorded that does not follow from the rest of the run."""

    check: str
    file: str
    where: str
    """Line, row or look in the file."""
    what: str
    recorded: Any = None
    recomputed: Any = None


@dataclass
class Findings:
    """What an audit has found so far."""

    checked: Counter[str] = field(default_factory=lambda: Counter[str]())
    faults: list[Fault] = field(default_factory=lambda: list[Fault]())
    unchecked: dict[tuple[str, str], int] = field(default_factory=lambda: dict[tuple[str, str], int]())
    places: dict[tuple[str, str], list[str]] = field(default_factory=lambda: dict[tuple[str, str], list[str]]())
    gaps: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    """Largest gap in nats where numbers are compared within a tolerance."""

    def ok(self, check: str, count: int = 1) -> None:
        """So many were looked at."""
        self.checked[check] += count

    def wrong(self, check: str, file: str, where: str, what: str, recorded: Any = None, recomputed: Any = None) -> None:
        """One line for people."""
        self.faults.append(Fault(check=check, file=file, where=where, what=what, recorded=recorded, recomputed=recomputed))

    def skip(self, check: str, reason: str, count: int = 1, place: str = "") -> None:
        """So many could not be looked at, and why."""
        if not count:
            return
        at = (check, reason)
        self.unchecked[at] = self.unchecked.get(at, 0) + count
        places = self.places.setdefault(at, [])
        if place and len(places) < SHOWN:
            places.append(place)

    def compare(self, check: str, file: str, where: str, what: str, recorded: Any, recomputed: Any) -> bool:
        """Whether two records are equal, with a fault for each field that is not."""
        found = records.differences(recorded, records.plain(recomputed), relative=RELATIVE)
        for at, one, other in found:
            self.wrong(check, file, where, f"{what}{'.' if what and at else ''}{at}", one, other)
        return not found

    def gap(self, name: str, value: float) -> None:
        """The largest gap so far."""
        self.gaps[name] = max(value, self.gaps.get(name, 0.0))

    def reading(self, check: str, file: str, where: str = "") -> _Reading:
        """Read a stranger's data inside: what does not fit is a fault in one line."""
        return _Reading(self, check, file, where)


@dataclass(frozen=True)
class _Reading:
    """Data of any shape may be met inside: what it raises becomes a fault, never a traceback."""

    found: Findings
    check: str
    file: str
    where: str

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, _ODD):
            return False
        self.found.wrong(self.check, self.file, self.where, f"cannot be read: {_said(error)}")
        return True


def _said(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(str(error).split()) if isinstance(error, BatonError) else cause(error)


# ---- the audit -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Scoring:
    """Messages of one seat in one file that one version sampled: to be scored again when that version is loaded."""

    file: str
    uses: frozenset[str]
    """Rows of these uses alone."""
    seat: AgentId
    temperature: float
    tokens: int
    update: Record | None = None
    """The update whose replay test these tokens were part of."""


@dataclass(kw_only=True)
class _Reweighed:
    """Shared episodes of a stage, to be weighted again for the teammates that were promoted since (2.3)."""

    update: Record
    where: str
    file: str
    """Where the stage's first update keeps them."""
    waiting: dict[AgentId, int]
    """Changed teammates whose versions were not loaded yet."""
    log_ratios: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    """By episode, over the teammates that were."""


@dataclass(frozen=True, kw_only=True)
class _Judged:
    """A promoted update whose divergence waits for its second version."""

    update: Record
    where: str
    states: ProbeStates
    anchor: Anchor
    recorded: LookRows


def verify(
    path: str | Path, *, updates: int | None = None, root: str | Path | None = None, reporter: Reporter | None = None
) -> Record:
    """Check a run from its directory and give what was found: `checks`, `faults`, `not_checked`, and whether it `holds`.

    Args:
        updates: look into the files of the newest so many updates only; the lines of all of them are checked.
        root: folder that relative paths of the config start from, where it is not where the run was made. Required where the
            env is code of the run's own: nothing that a stranger's config names is executed unasked.

    Raises:
        RunError: there is no started run.
        ConfigError: the run's env cannot be built here.
    """
    run = open_run(path)
    found = Findings()
    audit = _open(run, found, root=root, reporter=reporter or Silent())
    if audit is not None:
        try:
            audit.all(updates)
        finally:
            audit.close()
    return _report(run, found, audit)


def _open(run: Run, found: Findings, *, root: str | Path | None, reporter: Reporter) -> _Audit | None:
    """The audit, or None where the files that everything rests on cannot be read (which is then a fault)."""
    try:
        lines = records.read_records(run.path / "stages.jsonl")
    except RunError as error:
        found.wrong("sequence", "stages.jsonl", "", str(error))
        return None
    if not any(line.get("kind") == "start" for line in lines):
        raise RunError(f"{run.path} holds no started run: stages.jsonl has no line of kind 'start'")
    if lines[0]["kind"] != "start":
        found.wrong("sequence", "stages.jsonl", "line 1", "the line of the start is not the first one")
        return None
    try:
        config = run.config
    except ConfigError as error:
        found.wrong("files", "config.toml", "", str(error))
        return None
    code = [f"env '{config.env.name}'"] if isinstance(config.env, CustomOptions) else []
    if isinstance(config.protocol, RouterOptions) and config.protocol.rule != "mention":
        code.append(f"protocol.rule '{config.protocol.rule}'")
    if code and root is None:
        raise ConfigError(
            f"{code[0]} is code that the run names and an audit would execute: read it, then say with "
            "--root DIR where it lies"
        )
    try:
        sealed = _sealed(run, config)
        folder = Path(root if root is not None else lines[0]["root"])
        plan = assemble.prepare(sealed, root=folder, asks_endpoints=False)
        return _Audit(run, config, plan, lines, found, reporter)
    except (ConfigError, DataError, TaskFault) as error:
        folder = root if root is not None else lines[0].get("root")
        raise ConfigError(
            f"the run's task cannot be built here: {error} (files that its config names are looked for in {folder}; "
            "--root DIR names another folder)"
        ) from error
    except _ODD as error:
        found.wrong("files", "", "", f"what the run began with cannot be read: {_said(error)}")
        return None


def _sealed(run: Run, config: Config) -> Config:
    """The config with each model replaced by the run's own version 0 (an adapter's by the base that it names), so that no
    hub, cache or memory here decides; and with devices that are here."""
    if config.engine.name == "table":
        return config
    folders = {a.name: run.path / records.version_folder(a.name, 0) for a in config.agents if not a.is_remote}
    dtypes: set[torch.dtype | None] = set()
    agents: list[AgentOptions] = []
    for agent in config.agents:
        if agent.name in folders:
            folder = folders[agent.name]
            is_adapter = adapters.is_adapter(folder)
            if is_adapter != (agent.lora is not None):
                raise ModelError(f"{folder} holds {'an adapter' if is_adapter else 'no adapter'}, unlike its config")
            if agent.trainable and not is_adapter:
                dtypes.add(models.describe(folder).dtype)
            model = _base_of(folder) if is_adapter else folder
            agent = agent.model_copy(update={"model": str(model), "warm_start": None, "device": _device(agent.device)})
        agents.append(agent)
    if len(dtypes) > 1:
        raise ModelError(f"version 0 of the agents is stored in {sorted(map(str, dtypes))}; a run serves one dtype")
    sealed = config.model_copy(update={"agents": tuple(agents)})
    # Adapters and frozen models are stored in a dtype of their own.
    dtype = dtypes.pop() if dtypes else assemble.serve_dtype(sealed, folders)
    engine = config.engine.model_copy(update={"dtype": str(dtype).removeprefix("torch.")})
    return sealed.model_copy(update={"engine": engine})


def _base_of(folder: Path) -> Path:
    """The base of an adapter, which no run keeps. Raises ConfigError where it is not here."""
    try:
        return adapters.base_of(folder)
    except ModelError as error:
        raise ConfigError(str(error)) from error


def _device(name: str) -> str:
    """The device of this name, or whichever is here."""
    try:
        local.device_of(name)
    except ModelError:
        return "auto"
    return name


def _report(run: Run, found: Findings, audit: _Audit | None) -> Record:
    skipped = Counter[str]()
    for (check, _), count in found.unchecked.items():
        skipped[check] += count
    wrong = Counter(fault.check for fault in found.faults)
    return {
        "run": str(run.path),
        "holds": not found.faults,
        "checks": [
            {"check": name, "what": what, "checked": found.checked[name], "not_checked": skipped[name], "wrong": wrong[name]}
            for name, what in CHECKS.items()
        ],
        "faults": [records.plain(fault) for fault in found.faults],
        "not_checked": [
            {"check": check, "reason": reason, "count": count, "places": found.places[check, reason]}
            for (check, reason), count in found.unchecked.items()
        ],
        "tolerances": audit.tolerances() if audit is not None else {},
        "largest_gaps": dict(found.gaps),
    }


class _Audit:
    """One run under audit. Lines first, then each update's files, then the weights, agent by agent."""

    def __init__(
        self, run: Run, config: Config, plan: Plan, lines: Sequence[Record], found: Findings, reporter: Reporter
    ) -> None:
        self.run, self.config, self.plan, self.found, self.reporter = run, config, plan, found, reporter
        self.lines = lines
        self.start = lines[0]
        self.threads = assemble.set_threads(plan.config, plan.parameters)
        self.agents = tuple(a.name for a in config.agents)
        self.trained = tuple(a.name for a in config.agents if a.trainable)
        self.is_table = config.engine.name == "table"
        self.is_exact = self.is_table or plan.config.engine.dtype == "float32"
        self.floors: dict[AgentId, float] = {}
        self.scorings: dict[tuple[AgentId, int], list[_Scoring]] = {}
        self.promotions: dict[tuple[AgentId, int], tuple[Record, str]] = {}
        """(agent, from-version) -> its accepted update and that update's place."""
        self.fingerprints: dict[tuple[AgentId, int], tuple[str, str]] = {}
        """(agent, version) -> fingerprint as recorded, and where."""
        self.pool = assemble.grader_pool(plan)
        # An audit samples nothing, steps nothing and writes nothing: whoever is asked to is a fault of ours.
        nobody: Any = None
        self.world = World(
            seed=config.seed,
            options=config.algorithm,
            gate=config.gate,
            group=int(self.start["group"]),
            table=assemble.table(plan, nobody, self.pool),
            sampler=nobody,
            trainees={
                a.name: Trainee(
                    agent=a.name,
                    learner=nobody,
                    lr=plan.lr(a),
                    radius_token=config.radius(a).token,
                    radius_message_mean=config.radius(a).message_mean,
                    is_exact=self.is_exact,
                )
                for a in config.agents
                if a.trainable
            },
            train=plan.splits.train,
            probe=plan.splits.probe,
            reward_range=plan.env.reward_range,
            journal=nobody,
        )
        self.sets: dict[str, str] = {
            task.id: name
            for name in ("train", "probe", "certify", "test")
            for task in cast("Sequence[Task]", getattr(plan.splits, name))
        }
        self.encoded: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self.positions: list[Position] = []
        self.files: Record = {}
        """Files of the team after the last line that was read."""
        self.entries: tuple[StageEntry, ...] | None = ()
        """Updates of the stage in hand; None where a line of it is missing."""
        self.stage_team: Team | None = None
        """The team at the start of the stage in hand."""
        self.stage_file = ""
        """Episodes of the first update of the stage in hand."""
        self.last_stage: tuple[int, str, list[Record]] | None = None
        """(stage, file, rows) of the shared episodes that were checked last."""
        self.reweighed: dict[tuple[AgentId, int], list[_Reweighed]] = {}
        self.at_hand: tuple[str, list[Record]] | None = None

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()

    def tolerances(self) -> Record:
        """What a gap is compared with, nats."""
        return {
            "token": TOKEN_TABLE if self.is_table else TOKEN_EXACT if self.is_exact else TOKEN_ROUNDED,
            "token_mean": REPLAY_EXACT if self.is_exact else REPLAY_ROUNDED,
            "divergence": f"{KL_FLOOR:g} + 4 (f + sqrt(f d)), d the divergence, f the agent's noise floor",
            "noise_floor": dict(self.floors),
            "relative": RELATIVE,
        }

    def all(self, newest: int | None) -> None:
        """Every check, in turn."""
        done = [line for line in self.lines if line["kind"] == "update"]
        chosen = {id(line) for line in (done if newest is None else done[-newest:])}
        if len(chosen) < len(done):
            self.found.skip("episodes", f"not asked for: the newest {newest} updates only", len(done) - len(chosen))
        self._facts()
        self._start()
        self._journal(chosen)
        self._leftovers()
        self._evaluations()
        self._weights()

    # ---- config, prompt sets, start ----

    def _facts(self) -> None:
        found, start = self.found, self.start
        found.ok("files", 2)
        found.compare("files", "config.toml", "", "digest", start.get("digest"), self.config.digest)
        found.compare("files", "stages.jsonl", "line 1", "splits", start.get("splits"), self.plan.splits.record)
        found.compare("files", "stages.jsonl", "line 1", "parameters", start.get("parameters"), dict(self.plan.parameters))
        facts = dict(self.plan.env.facts(len(self.agents)))
        found.compare("counts", "stages.jsonl", "line 1", "facts", start.get("facts"), facts)
        here = runs.facts(self.config, self.threads)
        for at, then, now in records.differences({name: start.get(name) for name in here}, here, relative=RELATIVE):
            reason = f"another {at} than the run's ({then} then, {now} now): numbers need not be equal bit for bit"
            found.skip("log-probs", reason)
        for name in start["warm_start"]:
            found.skip("weights", "warm starts are not trained again", 1, name)

    def _start(self) -> None:
        found, start, line = self.found, self.start, "line 1"
        fingerprints = start.get("fingerprints")
        for name in self.plan.local:
            if fingerprints is None:
                found.skip("weights", "the start line holds no fingerprint of version 0", 1, f"{name}@0")
            else:
                self.fingerprints[name, 0] = (str(fingerprints.get(name)), "stages.jsonl line 1")
        members = tuple(Member(agent=a.name, model=a.model) for a in self.config.agents)
        beta = self.config.algorithm.penalty.start
        states = {n: AgentState(beta=beta, lr=t.lr) for n, t in self.world.trainees.items()}
        expected = records.position_record(Position(team=Team(members=members), agents=states))
        found.ok("sequence")
        found.compare("sequence", "stages.jsonl", line, "position", start["position"], expected)
        file = start.get("episodes_file")
        if file is None:
            found.skip("counts", "the start line names no episodes: the start accuracy is taken as it is")
            return
        with found.reading("counts", "stages.jsonl", line):
            rows = self._rows("counts", file)
            if rows is None:
                return
            play = _Playing(
                self.world.table, runs.start_address(self.plan), {n: 0 for n in self.agents}, None, None, "train"
            )
            episodes = self.episodes(file, rows, play, runs.start_plays(self.plan), "start")
            scored = [e.reward for e in episodes if e.is_scored]
            accuracy = sum(scored) / len(scored)
            low, high = self.plan.env.reward_range
            found.ok("counts")
            computed = {
                "start_accuracy": accuracy,
                "start_prompts": len(scored),
                "is_repeatable": all(seat.speaker is None for seat in self.plan.seats),
                "group": resolve_group(self.config.algorithm, (accuracy - low) / (high - low)),
            }
            recorded = {name: start.get(name) for name in computed}
            found.compare("counts", "stages.jsonl", line, "", recorded, computed)
            for seat in self.plan.seats:
                self.score_later(seat.agent, 0, file, ["start"], seat, _tokens(episodes, seat.agent))

    # ---- the lines ----

    def _journal(self, chosen: set[int]) -> None:
        """Every line in its order: ids, positions, orders; and the files of each chosen update on the way."""
        found, file = self.found, "stages.jsonl"
        total = sat.total_updates(self.config.algorithm, len(self.trained))
        before: Position | None = records.read_position(self.start["position"])
        self.positions, self.files = [before], self.start["files"]
        begun: dict[str, Record] = {}
        index = 0
        owed: Record | None = None
        """The update whose stage line comes next."""
        for number, line in enumerate(self.lines[1:], start=2):
            where, kind = f"line {number}", line.get("kind")
            found.ok("sequence")
            if owed is not None and kind in ("begin", "update", "end"):
                found.wrong("sequence", file, where, f"the line of stage {owed['stage']} is missing before this one")
                owed = None
            if kind == "start":
                found.wrong("sequence", file, where, "a second line of the start")
            elif kind == "begin":
                with found.reading("sequence", file, where):
                    self._begin(line, where, begun)
            elif kind == "update":
                with found.reading("sequence", file, where):
                    if line["index"] != index:
                        lost = f"update {index}" if line["index"] == index + 1 else f"updates {index} to {line['index'] - 1}"
                        what = f"no line tells of {lost}" if line["index"] > index else "an update is told of twice"
                        found.wrong("sequence", file, where, f"{what}: index", line["index"], index)
                        before, self.entries, self.stage_team = None, None, None
                    index = int(line["index"]) + 1
                    if index > total:
                        found.wrong("sequence", file, where, "more updates than stages: index", index - 1, total - 1)
                after: Position | None = None
                with found.reading("sequence", file, where):
                    self.reporter.progress("updates", index, total)
                    after = self._update(line, where, before, begun, is_chosen=id(line) in chosen)
                    self.positions.append(after)
                    self.files = line["files"]
                    owed = None if after.entries else line
                if after is None:
                    self.entries = self.stage_team = None
                before = after
            elif kind == "stage":
                with found.reading("sequence", file, where):
                    if owed is None:
                        found.wrong("sequence", file, where, "a stage line where no stage ended")
                    elif self.entries is not None:
                        expected = sat.stage_report(int(owed["stage"]), self.entries)
                        recorded = {n: v for n, v in line.items() if n not in ("kind", "schema", "time")}
                        found.compare("sequence", file, where, "", recorded, expected)
                owed, self.entries = None, ()
            elif kind not in ("resume", "end"):
                found.wrong("sequence", file, where, "a line of no known kind", kind)
        with found.reading("sequence", file, f"line {len(self.lines)}"):
            self._ending(total)
        self._unfinished(self.positions[-1])
        self._team(self.positions[-1])

    def _begin(self, line: Record, where: str, begun: dict[str, Record]) -> None:
        agent, version = line["agent"], line["version"]
        last = begun[agent]["version"] if agent in begun else 0
        begun[agent] = {**line, "where": where}
        if agent not in self.trained:
            self.found.wrong("sequence", "stages.jsonl", where, "an agent that the team does not train", agent)
        elif version <= last:
            what = f"a version id is given twice or goes back: {agent}@"
            self.found.wrong("sequence", "stages.jsonl", where, what, version, last + 1)
        elif version > last + 1:
            what = f"the line that takes version {last + 1} of '{agent}' is missing: version"
            self.found.wrong("sequence", "stages.jsonl", where, what, version, last + 1)

    def _ending(self, total: int) -> None:
        """How the run says that it ended, against where it stands."""
        last = self.lines[-1]
        if last["kind"] != "end" or last.get("ending") == "interrupted":
            return
        position = self.positions[-1]
        computed = sat.ending(self.world, position) or ("finished" if position.done == total else "(not at its end)")
        self.found.compare("sequence", "stages.jsonl", f"line {len(self.lines)}", "ending", last["ending"], computed)

    def _team(self, position: Position) -> None:
        """team.json, and the files of the promoted team."""
        found = self.found
        found.ok("files")
        with found.reading("files", "team.json"):
            said = json.loads((self.run.path / "team.json").read_text(encoding="utf-8"))
            now = team_record(position, self.files)
            if self.lines[-1]["kind"] == "update" and records.differences(said, now, relative=RELATIVE):
                found.skip("files", "the run stopped between its last update's line and team.json, which is written next")
            else:
                found.compare("files", "team.json", "", "", said, now)
        with found.reading("files", "stages.jsonl"):
            for files in self.files.values():
                for name in ("weights", "training"):
                    if files[name] is not None:
                        found.ok("files")
                        if not (self.run.path / files[name]).exists():
                            found.wrong("files", files[name], "", "is gone: the promoted team's files are always kept")

    def _leftovers(self) -> None:
        """Files of updates that no line names. Between an update's files and its line a process can die, so only a run that
        came to its end has none."""
        if self.lines[-1]["kind"] != "end":
            return
        named = {str(line.get("episodes_file")) for line in self.lines}
        for path in sorted((self.run.path / "episodes").glob("[0-9]*.parquet")):
            name = f"episodes/{path.name}"
            if name not in named:
                self.found.wrong("sequence", name, "", "belongs to an update that no line of stages.jsonl tells of")

    # ---- one update ----

    def _update(
        self, line: Record, where: str, before: Position | None, begun: Mapping[str, Record], *, is_chosen: bool
    ) -> Position:
        """Check one update's line against the position before it and its own files; gives the position it records."""
        found, file, agent = self.found, "stages.jsonl", str(line["agent"])
        index, stage = int(line["index"]), int(line["stage"])
        after = records.read_position(line["position"])
        plan = self._whose_turn(line, where, before, after)
        trainee = sat.allowed(self.world.trainees[agent], plan)
        looks = records.read_looks(line)
        taken = begun.get(agent)
        found.compare("sequence", file, where, "schedule", line["schedule"], self.config.algorithm.name)
        if taken is None:
            found.wrong("sequence", file, where, f"no line begins this update of '{agent}'")
        else:
            found.compare("sequence", file, where, "candidate_version", line["candidate_version"], taken["version"])
            found.compare("sequence", file, where, "stage", stage, taken["stage"])
        name = f"{index:06d}-{agent}"
        found.compare("files", file, where, "episodes_file", line["episodes_file"], f"episodes/{name}.parquet")

        read = None
        if before is None:
            found.skip("episodes", AFTER_A_GAP, 1, where)
        else:
            if not before.entries:
                self.stage_team, self.stage_file = before.team, str(line["episodes_file"])
            before = replace(before, stage=plan)
            if self.config.algorithm.order == "bandit":
                before = sat.credit(before, float(line["episodes"]["reward"]))
            if is_chosen:
                read = self._files(line, where, before, trainee, looks, divergences=f"divergences/{name}.parquet")
        retries = tuple(Retry(**retry) for retry in line["retries"])
        verdict = self._verdict(line, where, looks, retries, None if read is None else read.has_signal)
        word = verdict_word(verdict)
        is_accepted = isinstance(verdict, Accepted)
        version = int(line["candidate_version"])
        found.ok("verdicts")
        found.compare("verdicts", file, where, "word", line["word"], word)
        found.compare("verdicts", file, where, "to_version", line["to_version"], version if is_accepted else None)
        if bool(line["fingerprint"]) != is_accepted:
            found.wrong("verdicts", file, where, f"a fingerprint and '{word}' do not fit: fingerprint", line["fingerprint"])
        if is_accepted:
            self.fingerprints[agent, version] = (str(line["fingerprint"]), f"{file} {where}")
            bound = REPLAY_EXACT if trainee.is_exact else REPLAY_ROUNDED
            if line["published_gap"] is None or not line["published_gap"] <= bound:
                found.wrong("verdicts", file, where, f"published_gap, at most {bound:g}", line["published_gap"])
        if is_chosen:
            found.skip("verdicts", NOT_STEPPED, 1 if line["steps"] else 0)
            at_hand = sum(g.passed for g in looks) if is_accepted else 0
            found.skip("divergences", NOT_PROMOTED, len(looks) - at_hand)

        if before is None:
            return after
        found.compare("sequence", file, where, "from_version", line["from_version"], before.team.member(agent).version)
        if is_chosen and is_accepted:
            self.promotions[agent, int(line["from_version"])] = (line, where)
        self._files_of(line, where, verdict)
        state = before.agents[agent]
        found.compare("verdicts", file, where, "beta", line["beta"], state.beta)
        found.compare("verdicts", file, where, "lr", line["lr"], state.lr)
        found.compare(
            "verdicts", file, where, "retries", line["retries"], [_again(state, n, r) for n, r in enumerate(retries, 1)]
        )
        # What only the episodes tell is taken as recorded where they were not looked into.
        recorded = after.agents[agent]
        sums = recorded.replay if read is None else read.replay(state, line)
        cursor = state.cursor
        if is_accepted and not self._is_shared(line):
            cursor = recorded.cursor if read is None else read.collected.cursor
        adapted = sat.adapt(replace(state, replay=sums, cursor=cursor), trainee, verdict, looks, self.config.algorithm)
        found.compare("verdicts", file, where, "after", line["after"], adapted)
        self._position(line, where, before, trainee, verdict, adapted)
        return after

    def _is_shared(self, line: Record) -> bool:
        """The update trains on the episodes that its stage shares."""
        reuse = line["reuse"]
        return self.config.algorithm.shares_episodes and not (reuse is not None and reuse["is_resampled"])

    def _whose_turn(self, line: Record, where: str, before: Position | None, after: Position) -> StagePlan | None:
        """Whose turn it is, and what its stage has decided: of the stage's first update as `sat.plan_stage` decides it."""
        options, n, index = self.config.algorithm, len(self.trained), int(line["index"])
        plan: StagePlan | None = None
        if options.name == "independent":
            turn = {"stage": index % options.stages + 1, "agent": self.trained[min(index // options.stages, n - 1)]}
        else:
            stage = index // n + 1
            if before is None:
                plan = after.stage
            elif before.stage is not None and index % n:
                plan = before.stage
            else:
                plan = self._planned(where, before, after.stage, stage)
            order = self.trained if plan is None else plan.order
            turn = {"stage": stage, "agent": order[index % n]}
        ours = {"stage": line["stage"], "agent": line["agent"]}
        self.found.compare("sequence", "stages.jsonl", where, "whose turn", ours, turn)
        return plan

    def _planned(self, where: str, before: Position, recorded: StagePlan | None, stage: int) -> StagePlan | None:
        """Order and radii of a stage. Where they were measured, they follow from the recorded gains."""
        options, trained, found = self.config.algorithm, self.trained, self.found
        if not options.is_measured:
            return complete(sat.plan_stage(self.world, before, stage))[0]
        if recorded is None or set(recorded.gains) != set(trained):
            found.wrong("sequence", "stages.jsonl", where, "position.stage tells of no gain of each agent", recorded)
            return None
        found.skip("sequence", NOT_MEASURED, 1, f"stage {stage}")
        gains: dict[AgentId, float | None] = {a: float(recorded.gains[a]) for a in trained}
        order = (
            trained
            if options.name == "joint"
            else update_order(options.order, trained, seed=self.world.seed, stage=stage, gains=gains)
        )
        radii = {a: t.radius_token for a, t in self.world.trainees.items()}
        if options.radius_allocation == "greedy":
            mean = sum(radii.values()) / len(radii)
            if options.order == "grad_norm":
                found.skip("sequence", NOT_ALLOCATED, 1, f"stage {stage}")
                quanta = [recorded.radii[a] / (mean / 4.0) for a in trained]
                if not all(q in range(1, 9) for q in quanta) or sum(quanta) != 4 * len(quanta):
                    what = f"position.stage.radii are no shares of {mean * len(radii):g} nats in quanta of {mean / 4.0:g}"
                    found.wrong("sequence", "stages.jsonl", where, what, dict(recorded.radii))
                radii = dict(recorded.radii)
            else:
                given = trust_region.allocate_radius(
                    [float(recorded.gains[a]) / math.sqrt(radii[a]) for a in trained],
                    budget=mean * len(radii),
                    quantum=mean / 4.0,
                    cap=2.0 * mean,
                )
                radii = dict(zip(trained, given, strict=True))
        return StagePlan(order=order, radii=radii, gains=recorded.gains)

    def _position(
        self, line: Record, where: str, before: Position, trainee: Trainee, verdict: Verdict, adapted: AgentState
    ) -> None:
        """The position after an update, as `sat.update` makes it."""
        agent, options = str(line["agent"]), self.config.algorithm
        reward = float(line["episodes"]["reward"])
        entries = (*before.entries, _entry(line, trainee, verdict))
        self.entries = entries if self.entries is not None else None
        is_whole = options.name == "independent" or len(entries) == len(self.trained)
        is_accepted = isinstance(verdict, Accepted)
        lost = () if isinstance(verdict, Accepted) else ((verdict.reason, reward),)
        expected = replace(
            before,
            team=before.team.promote(agent, verdict, int(line["candidate_version"])) if is_accepted else before.team,
            agents={**before.agents, agent: adapted},
            done=before.done + 1,
            stalled=() if is_accepted else before.stalled + lost,
            entries=() if is_whole else entries,
            moved=(agent, reward, is_accepted) if options.order == "bandit" else None,
        )
        computed = records.position_record(expected)
        self.found.compare("sequence", "stages.jsonl", where, "position", line["position"], computed)

    def _files_of(self, line: Record, where: str, verdict: Verdict) -> None:
        """The files after an update: those before it, with the promoted agent's own in place of its old ones."""
        before = self.files
        expected = dict(before)
        agent = str(line["agent"])
        if isinstance(verdict, Accepted):
            # What was shrunk keeps the moments of its start; a retry has its own training's.
            trained = len(line["steps"]) // (1 + len(line["retries"]))
            steps = before[agent]["steps"] + (trained if verdict.scale == 1.0 or verdict.gate.attempt else 0)
            weights = records.version_folder(agent, int(line["candidate_version"]))
            training = line["files"][agent]["training"]
            own = f"state/{agent}/training-{line['index']:06d}.safetensors"
            training = training if training == own else before[agent]["training"]
            expected[agent] = {"weights": weights, "training": training, "steps": steps}
        self.found.compare("files", "stages.jsonl", where, "files", line["files"], expected)

    def _verdict(
        self, line: Record, where: str, looks: Sequence[GateRecord], retries: Sequence[Retry], has_signal: bool | None
    ) -> Verdict:
        """The verdict that follows from the looks (and from the episodes, where they were read)."""
        found, file, recorded, options = self.found, "stages.jsonl", line["verdict"], self.config.algorithm
        steps = [(1.0, 0), *((min(1.0, r.shrink_total), n) for n, r in enumerate(retries, 1) if r.shrink_total > 0.0)]
        if len(retries) == options.backtrack.tries - 1:
            steps += [(scale, 0) for scale in trust_region.line_search_scales(options.line_search.halvings)]
        found.compare(
            "verdicts", file, where, "scales of the looks", [g.scale for g in looks], [x for x, _ in steps[: len(looks)]]
        )
        found.compare(
            "verdicts", file, where, "attempts of the looks", [g.attempt for g in looks], [n for _, n in steps[: len(looks)]]
        )
        passed = [n for n, g in enumerate(looks) if g.passed]
        if passed and passed[0] != len(looks) - 1:
            found.wrong("verdicts", file, where, f"look {passed[0] + 1} passed, and {len(looks)} were taken")
        reason = recorded.get("reason")
        tried = len(retries)
        if passed or reason == "radius":
            # A retry is made because every candidate before it failed, and none is left out before the line search.
            last = looks[-1] if looks else None
            is_first = last is not None and len(looks) == 1 and last.passed
            tried = (
                0
                if is_first
                else last.attempt
                if last is not None and last.attempt and last.passed
                else options.backtrack.tries - 1
            )
        found.compare("verdicts", file, where, "number of retries", len(retries), tried)
        verdict: Verdict
        if passed:
            verdict = Accepted(scale=looks[-1].scale, gate=looks[-1])
            if reason == "not_published":
                found.skip("verdicts", NOT_PUBLISHED, 1, where)
                verdict = Rejected(reason="not_published", gate=looks[-1])
        elif len(looks) == len(steps) and len(retries) == options.backtrack.tries - 1:
            verdict = Rejected(reason="radius", gate=looks[-1])
        elif not looks and (reason == "no_signal" if has_signal is None else not has_signal):
            verdict = Rejected(reason="no_signal")
        else:
            if reason == "non_finite":
                found.skip("verdicts", NOT_FINITE, 1, where)
            verdict = Rejected(reason="non_finite")
        said = str(recorded["kind"]) + "".join(f" {recorded[n]}" for n in ("scale", "reason") if n in recorded)
        follows = f"accepted {verdict.scale}" if isinstance(verdict, Accepted) else f"rejected {verdict.reason}"
        if said != follows:
            found.wrong("verdicts", file, where, "verdict", said, follows)
        else:
            found.compare("verdicts", file, where, "verdict.gate", recorded["gate"], verdict.gate)
        if (line["replay"] is None) != (follows == "rejected no_signal"):
            found.wrong("verdicts", file, where, "the replay test is made unless there is no signal: replay", line["replay"])
        return verdict

    def _files(
        self,
        line: Record,
        where: str,
        before: Position,
        trainee: Trainee,
        looks: Sequence[GateRecord],
        *,
        divergences: str,
    ) -> _Read | None:
        """An update's episodes and divergences: what was played, its rewards, its counts, its looks."""
        found, agent, options = self.found, trainee.agent, self.config.algorithm
        file = str(line["episodes_file"])
        rows = self._rows("episodes", file)
        if rows is None:
            return None
        found.compare("counts", "stages.jsonl", where, "is reused", line["reuse"] is not None, options.data == "reuse")
        seed, stage, is_shared, is_joint = (
            self.world.seed,
            int(line["stage"]),
            self._is_shared(line),
            options.name == "joint",
        )
        if is_shared and self.stage_team is None:
            found.skip("episodes", AFTER_A_GAP, 1, where)
            return None
        slots: Mapping[AgentId, Slot] = (
            {a: "start" for a in self.agents if a != agent} if options.name == "independent" else {}
        )
        now = acting(before.team, slots)
        then = now if self.stage_team is None else acting(self.stage_team, slots)
        # The stage's agents share what the team of its start has played (joint: also the probe).
        who, prompts, cursor = agent, options.episodes // self.world.group, before.agents[agent].cursor
        if is_shared:
            prompts = len(self.trained) * options.episodes // self.world.group
            who, cursor = "team", (stage - 1) * prompts
        judge = "team" if is_joint else agent
        played = {use: [row for row in rows if row["use"] == use] for use in ("train", "probe", "order")}
        if sum(map(len, played.values())) != len(rows):
            found.wrong("episodes", file, "", "holds rows of another use than train, probe and order")
        shared = (
            [row for use in (("train", "probe") if is_joint else ("train",)) for row in played[use]] if is_shared else []
        )
        known = is_shared and self._seen_already(line, file, shared)
        table = self.world.table
        playing = _Playing(table, (seed, stage, who, SAMPLE), then if is_shared else now, None, None, "train")
        collected = self._collected(file, played["train"], playing, cursor, prompts, who, check=not known)
        order = permutation(key(seed, stage, judge, PROBE), len(self.world.probe))
        probed = [Play(task=self.world.probe[i]) for i in order[: self.config.gate.probe_prompts]]
        until = None if is_joint else agent
        probing = _Playing(table, (seed, stage, judge, PROBE), then if is_joint else now, until, None, "probe")
        first = len(played["train"])
        probe = self.episodes(file, played["probe"], probing, probed, "probe", first=first, check=not (known and is_joint))
        ordering = self._ordering(line, file, played["order"], before, first + len(played["probe"]))

        found.ok("counts")
        values = episode_advantages(options, collected.scored)
        counted = stats(self.world, collected, values)
        found.compare("counts", "stages.jsonl", where, "episodes", line["episodes"], counted)
        found.compare("counts", "stages.jsonl", where, "probe_episodes", line["probe_episodes"], len(probe))
        for seat in self.plan.seats:
            # Each trained agent scores its own tokens of shared episodes: its replay test was made on them.
            is_own = seat.agent == agent
            elsewhere = not is_own and (known or seat.agent in self.trained)
            spoken: dict[int, list[str]] = {}
            for use, version in (("train", playing.versions), ("probe", probing.versions), ("order", now)):
                if not (elsewhere and is_shared and (use == "train" or (use == "probe" and is_joint))):
                    spoken.setdefault(version[seat.agent], []).append(use)
            of_use = {"train": collected.all, "probe": probe, "order": ordering}
            for version, uses in spoken.items():
                tokens = sum(_tokens(of_use[use], seat.agent) for use in uses)
                update = line if is_own and line["replay"] is not None else None
                self.score_later(seat.agent, version, file, uses, seat, tokens, update)
        if line["reuse"] is not None:
            self._reuse(line, where, before)
        messages = [t for e in probe for t in batching.trajectories(e, agent)]
        silence = unheard(self.config.gate, collected.scored, values, messages, agent, looks=options.looks)
        has_signal = collected.informative >= options.min_informative and not silence
        own = _tokens(collected.scored, agent)
        read = _Read(collected=collected, own_tokens=own, has_signal=has_signal)
        if looks or (self.run.path / divergences).exists():
            with found.reading("gate", divergences):
                self._looks(line, where, divergences, trainee, looks, probe)
        return read

    def _ordering(self, line: Record, file: str, rows: Sequence[Record], before: Position, first: int) -> Sequence[Episode]:
        """What a stage's order or radii were measured on: episodes of the team of its start, beside its first update's."""
        options, stage = self.config.algorithm, int(line["stage"])
        if before.entries or not options.is_measured:
            if rows:
                self.found.wrong(
                    "episodes", file, f"row {first + 1}", "measures an order where none is measured", len(rows), 0
                )
            return ()
        prompts = max(1, options.ordering_episodes // self.world.group)
        versions = before.team.versions
        playing = _Playing(self.world.table, (self.world.seed, stage, "order", SAMPLE), versions, None, None, "train")
        collected = self._collected(file, rows, playing, (stage - 1) * prompts, prompts, "order", first=first, check=True)
        gains = {} if before.stage is None else before.stage.gains
        for agent, gain in gains.items():
            acted = any(t.kind == "action" and t.agent == agent for e in collected.scored for t in e.turns)
            if gain < 0.0 or (gain > 0.0 and not acted):
                told = f"gain of '{agent}', which {'acted' if acted else 'did not act'} in the episodes of the order"
                self.found.wrong("sequence", file, "", told, gain, 0.0)
        return collected.all

    def _reuse(self, line: Record, where: str, before: Position) -> None:
        """Who has changed since the shared episodes were played; what that makes of them waits for the changed versions."""
        found, reuse = self.found, line["reuse"]
        changed = tuple(entry.agent for entry in before.entries if entry.word != "rejected")
        computed = {"changed": changed, "is_resampled": reuse["effective_share"] < self.config.algorithm.reuse.ess_floor}
        found.compare("counts", "stages.jsonl", where, "reuse", {n: reuse[n] for n in computed}, computed)
        waiting = {a: before.team.member(a).version for a in changed}
        weighed = _Reweighed(update=line, where=where, file=self.stage_file, waiting=waiting)
        for at in waiting.items():
            self.reweighed.setdefault(at, []).append(weighed)
        if not waiting:
            self._weighed(weighed)

    def _seen_already(self, line: Record, file: str, rows: list[Record]) -> bool:
        """In a stage that shares its episodes: whether these are those of its first file, which were checked there."""
        stage = int(line["stage"])
        if self.last_stage is None or self.last_stage[0] != stage:
            self.last_stage = (stage, file, rows)
            return False
        if rows != self.last_stage[2]:
            schedule = "joint stage" if self.config.algorithm.name == "joint" else "stage that reuses them"
            what = f"differs from {self.last_stage[1]}, though the agents of a {schedule} share their episodes"
            self.found.wrong("episodes", file, "", what)
            return False
        return True

    def _unfinished(self, last: Position) -> None:
        """Shared episodes of a stage that ended early: the tokens of those who had no update of their own in it."""
        stage = 1 + last.done // len(self.trained)
        if not last.entries or self.last_stage is None or self.last_stage[0] != stage:
            return
        _, file, rows = self.last_stage
        waiting = set(self.trained) - {entry.agent for entry in last.entries}
        episodes = [records.read_episode(row) for row in rows]
        for seat in self.plan.seats:
            if seat.agent in waiting and self.stage_team is not None:
                uses = sorted({str(row["use"]) for row in rows})
                version = self.stage_team.member(seat.agent).version
                self.score_later(seat.agent, version, file, uses, seat, _tokens(episodes, seat.agent))

    def _collected(
        self,
        file: str,
        rows: Sequence[Record],
        playing: _Playing,
        cursor: int,
        prompts: int,
        who: str,
        *,
        first: int = 0,
        check: bool,
    ) -> Collected:
        """Train episodes, drawn as `sat.collect` draws them: again while too few groups are informative."""
        options, train, group = self.config.algorithm, self.world.train, self.world.group
        is_batch = options.objective.choice.baseline == "batch_mean"
        count = advantages.decided_prompts if is_batch else advantages.informative_groups
        episodes: list[Episode] = []
        seen: set[str] = set()
        informative = used = 0
        for draw in range(3):
            wanted = min(prompts, len(train) - len(seen))
            if wanted == 0:
                break
            at = (self.world.seed, PROMPTS, who)
            tasks, cursor = draw_prompts(train, cursor, wanted, at=at, skip=frozenset(seen))
            seen.update(task.id for task in tasks)
            plays = [Play(task=task, sibling=g) for task in tasks for g in range(group)]
            part = rows[used : used + len(plays)]
            what = f"{who if who == 'order' else 'train'}, draw {draw + 1}"
            episodes += self.episodes(file, part, playing, plays, what, first=first + used, check=check)
            used += len(part)
            scored = [e for e in episodes if e.is_scored]
            rewards = torch.tensor([e.reward for e in scored], dtype=torch.float64)
            informative = count(rewards, [e.group for e in scored])
            if informative >= options.min_informative:
                break
        if used < len(rows):
            what = f"{who if who == 'order' else 'train'} episodes too many"
            self.found.wrong("episodes", file, f"row {first + used + 1}", what, len(rows), used)
        return Collected(
            scored=tuple(e for e in episodes if e.is_scored), all=tuple(episodes), cursor=cursor, informative=informative
        )

    # ---- episodes ----

    def rows(self, file: str) -> list[Record]:
        """The rows of an episodes file; the last file read is at hand."""
        if self.at_hand is None or self.at_hand[0] != file:
            self.at_hand = (file, records.read_episodes(self.run.path / file))
        return self.at_hand[1]

    def _rows(self, check: str, file: str) -> list[Record] | None:
        self.found.ok("files")
        try:
            return self.rows(file)
        except RunError as error:
            self.found.wrong("files", file, "", str(error))
            self.found.skip(check, "its file cannot be read", 1, file)
            return None

    def episodes(
        self,
        file: str,
        rows: Sequence[Record],
        playing: _Playing,
        plays: Sequence[Play],
        what: str,
        *,
        first: int = 0,
        check: bool = True,
    ) -> list[Episode]:
        """Rows as episodes, each checked against the play that it should be of, and graded again."""
        found = self.found
        if len(rows) != len(plays):
            found.wrong("episodes", file, "", f"{what} episodes", len(rows), len(plays))
        episodes: list[Episode] = []
        to_grade: list[tuple[str, Episode, Task, str]] = []
        for number, row in enumerate(rows, start=first + 1):
            where = f"row {number}"
            with found.reading("episodes", file, where):
                episode = records.read_episode(row)
                episodes.append(episode)
                if not episode.is_scored and row["reward"] is not None:
                    found.wrong("rewards", file, where, "a failed episode has a reward", row["reward"])
                if not check or number - first > len(plays):
                    continue
                found.ok("episodes")
                play = plays[number - first - 1]
                if self._is_play(file, where, row, episode, playing, play):
                    answer = self._turns(file, where, episode, playing, play)
                    if answer is not None:
                        to_grade.append((where, episode, play.task, answer))
        self._grade(file, playing.table, to_grade)
        return episodes

    def _is_play(self, file: str, where: str, row: Record, episode: Episode, playing: _Playing, play: Play) -> bool:
        """Whether a row is of the task that was drawn for it."""
        found, task = self.found, play.task
        if episode.task_id != task.id:
            of = self.sets.get(episode.task_id)
            home = "of no set" if of is None else f"of the {of} set"
            told = f"the task is {home}, these are drawn from {playing.drawn_from}" if of != playing.drawn_from else "task"
            found.wrong("episodes", file, where, f"{told}: task_id", episode.task_id, task.id)
            return False
        identity = "/".join(str(part) for part in (*playing.address, task.id, play.sibling))
        ours = {"id": row["id"], "prompt": row["prompt"], "versions": dict(episode.versions)}
        return found.compare(
            "episodes", file, where, "", ours, {"id": identity, "prompt": task.prompt, "versions": dict(playing.versions)}
        )

    def _turns(self, file: str, where: str, episode: Episode, playing: _Playing, play: Play) -> str | None:
        """Replay who spoke when, what each was asked and said. Gives the answer to grade; None where nothing is graded."""
        found, table, task = self.found, playing.table, play.task
        protocol = table.protocol
        failure = episode.outcome.reason if isinstance(episode.outcome, Failed) else ""
        if failure and (playing.until is None or failure != "probe") and not failure.startswith("rule: "):
            found.skip("episodes", FAILED_EPISODE, 1, f"{file} {where}")
            return None
        rotation = 0
        if protocol.rotates:
            rotation = choice(key(*playing.address, task.id, play.sibling, "rotation"), len(table.seats))
        done: list[Turn] = []
        left = list(episode.turns)
        while True:
            own = sum(turn.agent == playing.until for turn in done)
            is_over = playing.until is not None and own >= protocol.own_turns
            try:
                due = () if is_over else protocol.due(task, done, rotation)
            except TaskFault as fault:
                found.compare("episodes", file, where, "failure", failure, f"rule: {fault}")
                if left:
                    found.wrong("episodes", file, where, f"{len(left)} turns after the rule had failed")
                return None
            if not due:
                break
            said: list[Turn] = []
            for index in sorted(due):
                if not left:
                    found.wrong("episodes", file, where, f"turn {len(episode.turns) + 1} of seat {index + 1} is missing")
                    return None
                turn = left.pop(0)
                said.append(turn)
                at = f"turn {len(done) + len(said)}"
                if not self._turn(file, where, at, episode.id, turn, index, done, playing, task):
                    return None
            done += said
        if left:
            found.wrong("episodes", file, where, f"{len(left)} turns more than the protocol has")
            return None
        if failure.startswith("rule: "):
            found.wrong("episodes", file, where, "the rule does not fail here", failure)
            return None
        if playing.until is not None:
            if episode.outcome != Failed(reason="probe") or episode.answer:
                found.wrong("episodes", file, where, "a probe episode has an outcome or an answer", episode.answer)
            return None
        answer = protocol.answer(done, table.normalise, key(episode.id, "tie"))
        found.compare("episodes", file, where, "answer", episode.answer, answer)
        is_cut = isinstance(episode.outcome, Truncated)
        found.compare("episodes", file, where, "truncated", is_cut, protocol.is_cut(done))
        return answer

    def _turn(
        self,
        file: str,
        where: str,
        at: str,
        episode_id: str,
        turn: Turn,
        index: int,
        before: Sequence[Turn],
        playing: _Playing,
        task: Task,
    ) -> bool:
        """One message; False where what follows it cannot be judged."""
        found, seat = self.found, playing.table.seats[index]
        if (turn.seat, turn.agent) != (index, seat.agent):
            what = f"{at}: who speaks"
            found.wrong("episodes", file, where, what, f"{turn.agent} in seat {turn.seat}", f"{seat.agent} in seat {index}")
            return False
        text = None
        if playing.substitute is not None:
            drawn = key(*playing.address, episode_id, len(before), "substitute")
            text = playing.substitute(task, index, drawn)
        if text is None and seat.speaker is not None:
            found.skip("episodes", NOT_HEARD, 1, f"{file} {where}")
            ours = {"kind": turn.kind, "versions": list(turn.versions), "cut": turn.cut}
            said = {"kind": "observation", "versions": [], "cut": turn.finish_reason == "length"}
            return found.compare("episodes", file, where, at, ours, said)
        if text is not None or turn.kind != "action":
            ours = {"kind": turn.kind, "text": turn.text}
            return found.compare("episodes", file, where, at, ours, {"kind": "observation", "text": text})
        if playing.is_foreign(seat.agent):
            found.skip("episodes", FOREIGN, 1, file)
            return True
        if seat.codec is None:
            found.wrong("episodes", file, where, f"{at}: sampled ids of '{seat.agent}', which has no model here")
            return False
        prompt = self._encode(seat.codec, playing.table.protocol.messages(task, before, index, seat.system))
        ends = turn.ids[-1] in seat.codec.end_ids if turn.ids else False
        is_full = len(turn.ids) == seat.max_new_tokens
        computed = {
            "text": seat.codec.decode(turn.ids),
            "versions": [playing.versions[seat.agent]] * len(turn.ids),
            "finish_reason": "stop" if ends else "length",
            "cut": not ends and seat.max_new_tokens > 1,
        }
        ours = {"text": turn.text, "versions": list(turn.versions), "finish_reason": turn.finish_reason, "cut": turn.cut}
        if ours["text"] != computed["text"]:
            told = f"{at}: the text is not that of the sampled ids {_few(turn.ids)}: text"
            found.wrong("episodes", file, where, told, turn.text, computed["text"])
            ours["text"] = computed["text"]
        found.compare("episodes", file, where, at, ours, computed)
        if not turn.ids or len(turn.ids) > seat.max_new_tokens or not (ends or is_full):
            what = f"{at}: number of sampled ids, of {seat.max_new_tokens} at most and fewer only with an end token"
            found.wrong("episodes", file, where, what, len(turn.ids))
        if any(i in seat.codec.end_ids for i in turn.ids[:-1]):
            found.wrong("episodes", file, where, f"{at}: goes on after an end token")
        if turn.prompt_ids != prompt:
            told = f"{at}: the prompt is not what '{seat.agent}' is shown: prompt_ids"
            found.wrong("episodes", file, where, told, _few(turn.prompt_ids), _few(prompt))
        return True

    def _encode(self, codec: Codec, messages: Sequence[Message]) -> tuple[int, ...]:
        """`codec.encode`, once per conversation (siblings ask the same)."""
        at = (id(codec), *messages)
        if at not in self.encoded:
            if len(self.encoded) >= 4096:
                self.encoded.clear()
            self.encoded[at] = codec.encode(messages)
        return self.encoded[at]

    def _grade(self, file: str, table: Table, items: Sequence[tuple[str, Episode, Task, str]]) -> None:
        """Grade answers again, all of a file at once."""
        found = self.found
        if not items:
            return
        for (where, episode, _, _), outcome in zip(items, table.grade([(t, a) for _, _, t, a in items]), strict=True):
            if isinstance(outcome, Failed) or outcome.reason.startswith("late"):
                found.skip("rewards", f"the grader gave no reward here: {outcome.reason}", 1, f"{file} {where}")
                continue
            if not isinstance(episode.outcome, Failed) and episode.outcome.reason.startswith("late"):
                found.skip("rewards", "the run's grader was late, this one was not", 1, f"{file} {where}")
                continue
            found.ok("rewards")
            found.compare(
                "rewards", file, where, f"reward of the answer {_few(episode.answer)}", episode.reward, outcome.reward
            )

    # ---- the gate ----

    def _looks(
        self,
        line: Record,
        where: str,
        file: str,
        trainee: Trainee,
        looks: Sequence[GateRecord],
        probe: Sequence[Episode],
    ) -> None:
        """Probe states against the keyed draw, and each look's record against its divergences and its stage's radii."""
        found, agent = self.found, str(line["agent"])
        states = self._states(probe, agent, int(line["stage"]))
        read = records.read_divergences(self.run.path / file)
        found.ok("files")
        found.compare("gate", file, "", "scales of the looks", [r.scale for r in read], [g.scale for g in looks])
        gate = self.config.gate
        row, position = (index.tolist() for index in states.batch.mask.nonzero(as_tuple=True))
        drawn = {
            "episode": [states.batch.episode_ids[r] for r in row],
            "token": position,
            "message": states.message.tolist(),
            "prompt": states.unit.tolist(),
            "drawn": states.drawn.tolist(),
        }
        for number, (recorded, one) in enumerate(zip(looks, read, strict=False), start=1):
            found.ok("gate")
            at = f"look {number} (scale {recorded.scale:g})"
            ours = {
                "episode": list(one.episode),
                "token": one.divergence.position.tolist(),
                "message": one.message.tolist(),
                "prompt": one.unit.tolist(),
                "drawn": one.drawn.tolist(),
            }
            odd = [name for name in drawn if ours[name] != drawn[name]]
            if odd:
                told = f"{at}: the states are not those that the probe episodes and keys give ({', '.join(odd)}): states"
                found.wrong("gate", file, "", told, len(one.episode), len(row))
            computed = trust_region.gate(
                one.divergence,
                message=one.message,
                unit=one.unit,
                drawn=one.drawn,
                direction=gate.direction,
                alpha=1.0 - gate.quantile,
                eta=gate.eta,
                looks=self.config.algorithm.looks,
                radius_token=trainee.radius_token,
                radius_message_mean=trainee.radius_message_mean,
                scale=one.scale,
            )
            # Which training a look is of is told by the retries (`_verdict`).
            computed = replace(computed, attempt=recorded.attempt)
            found.compare("gate", "stages.jsonl", where, at, records.plain(recorded), computed)

    def _states(self, probe: Sequence[Episode], agent: AgentId, stage: int) -> ProbeStates:
        rows = [t for e in probe for t in batching.trajectories(e, agent)]
        batch = batching.token_batch(rows, temperature=self._temperature(agent))
        return probe_states(batch, self.config.gate, at=(self.world.seed, stage, agent, PROBE))

    def _temperature(self, agent: AgentId) -> float:
        return next(seat.temperature for seat in self.plan.seats if seat.agent == agent)

    # ---- evaluations ----

    def _evaluations(self) -> None:
        folder = self.run.path / "evaluations"
        for path in sorted(folder.glob("*.json")):
            file = f"evaluations/{path.name}"
            with self.found.reading("evaluations", file):
                self._evaluation(file, json.loads(path.read_text(encoding="utf-8")))

    def _evaluation(self, file: str, report: Record) -> None:
        """Make the report's rows of its stored episodes, by the list that made the report."""
        found = self.found
        episodes = file.removesuffix(".json") + ".parquet"
        rows = self._rows("evaluations", episodes)
        if rows is None:
            return
        versions: dict[AgentId, int] = report["versions"]
        if not any(dict(p.team.versions) == versions for p in self.positions):
            found.wrong("evaluations", file, "", "the run was never at these versions", versions)
            return
        config = self.plan.config
        config = config.model_copy(
            update={"eval": config.eval.model_copy(update={"temperature": float(report["temperature"])})}
        )
        count = int(report["prompts"]) * int(report["k"])
        bench = _StoredBench(self, episodes, rows, replace(self.plan, config=config), k=int(report["k"]), count=count)
        try:
            now = {n: self.run.path / records.version_folder(n, versions[n]) for n in self.plan.local}
            start = {n: self.run.path / records.version_folder(n, 0) for n in self.plan.local}
            made = report_rows(bench, now, start, baselines=report["baselines"], full_information=report["full_information"])
        finally:
            bench.close()
        found.compare("evaluations", file, "", "prompts", report["prompts"], len(bench.tasks))
        facts = dict(self.plan.env.facts(len(self.agents)))
        found.compare("evaluations", file, "", "facts", report["facts"], facts)
        played = {result.name for result in bench.results}
        for use in sorted({str(row["use"]) for row in rows} - played):
            found.wrong("evaluations", episodes, "", "episodes of a measurement that is none of the report's", use)
        said = {str(row["name"]): row for row in report["rows"]}
        found.compare("evaluations", file, "", "rows", list(said), [row.name for row in made])
        for row in made:
            found.ok("evaluations")
            if row.name in said:
                # A note is words beside the numbers, and may name a model that is not here.
                computed = row_record(replace(row, note=said[row.name]["note"]))
                found.compare("evaluations", file, f"row '{row.name}'", "", said[row.name], computed)

    # ---- weights ----

    def score_later(
        self,
        agent: AgentId,
        version: int,
        file: str,
        uses: Sequence[str],
        seat: Seat,
        tokens: int,
        update: Record | None = None,
    ) -> None:
        """Note messages for the time when the version that sampled them is loaded."""
        scoring = _Scoring(
            file=file, uses=frozenset(uses), seat=seat.agent, temperature=seat.temperature, tokens=tokens, update=update
        )
        if tokens:
            self.scorings.setdefault((agent, version), []).append(scoring)

    def _weights(self) -> None:
        """Agent by agent, version by version: fingerprint, log-probabilities, divergence from the version before."""
        now = self.positions[-1].team.versions
        total = len({*self.fingerprints, *self.scorings})
        done = 0
        self.found.skip("log-probs", NOT_SAMPLED, sum(s.tokens for many in self.scorings.values() for s in many))
        for agent in self.plan.local:
            crew: Crew | None = None
            with self.found.reading("weights", records.version_folder(agent, 0)):
                origin = self.run.path / records.version_folder(agent, 0)
                crew = assemble.crew(self.plan.config, {agent: origin}, learners=[agent])
            judged: _Judged | None = None
            versions = {v for a, v in [*self.fingerprints, *self.scorings] if a == agent} | {0, now.get(agent, 0)}
            for version in sorted(versions):
                done += 1
                self.reporter.progress("versions", done, total)
                folder = records.version_folder(agent, version)
                learner = None if crew is None else self._load(crew, agent, version, now)
                if learner is None:
                    self._without(agent, version, judged)
                    judged = None
                    continue
                for scoring in self.scorings.get((agent, version), []):
                    with self.found.reading("log-probs", scoring.file):
                        self._score(scoring, learner, agent, version)
                for weighed in self.reweighed.get((agent, version), []):
                    with self.found.reading("counts", weighed.file):
                        self._reweigh(weighed, learner, agent)
                if agent not in self.world.trainees:
                    continue
                trainee = replace(self.world.trainees[agent], learner=learner)
                if version == 0:
                    with self.found.reading("counts", "stages.jsonl", "line 1"):
                        self._floor(agent, learner)
                if judged is not None and judged.update["candidate_version"] == version:
                    with self.found.reading("divergences", str(judged.update["episodes_file"])):
                        self._divergence(judged, trainee)
                judged = None
                if (agent, version) in self.promotions:
                    with self.found.reading("divergences", folder):
                        judged = self._judge(trainee, *self.promotions[agent, version])
        unweighed = {id(w): w for many in self.reweighed.values() for w in many if w.waiting}
        for weighed in unweighed.values():
            lost = ", ".join(f"{a}@{v}" for a, v in weighed.waiting.items())
            self.found.skip(
                "counts", "reused episodes whose changed versions are not to be had are not weighted again", 1, lost
            )

    def _load(self, crew: Crew, agent: AgentId, version: int, now: Mapping[AgentId, int]) -> Learner | None:
        """The agent's learner with the weights of a version, as they are served; None where they are not to be had."""
        found = self.found
        folder = records.version_folder(agent, version)
        if not (self.run.path / folder).is_dir():
            if version in (0, now.get(agent)):
                found.wrong("weights", folder, "", "is gone: version 0 and the promoted version are always kept")
            else:
                found.skip("weights", PRUNED, 1, f"{agent}@{version}")
            return None
        with found.reading("weights", folder):
            weights = crew.load(self.run.path / folder)
            found.ok("weights")
            if (agent, version) in self.fingerprints:
                recorded, place = self.fingerprints[agent, version]
                if recorded != weights.fingerprint:
                    told = f"the tensors of {agent}@{version} are not those that {place} names: fingerprint"
                    found.wrong("weights", folder, "", told, recorded, weights.fingerprint)
            learner = crew.learners[agent].awake
            if agent in self.world.trainees:
                learner.restore(Snapshot(weights=weights.tensors, moments={}, steps=0))
            return learner
        return None

    def _without(self, agent: AgentId, version: int, judged: _Judged | None) -> None:
        """Count what hangs on weights that are not there."""
        found, name = self.found, f"{agent}@{version}"
        is_kept = (self.run.path / records.version_folder(agent, version)).is_dir()
        why = "the weights cannot be read" if is_kept else PRUNED
        tokens = sum(scoring.tokens for scoring in self.scorings.get((agent, version), []))
        if tokens:
            found.skip("log-probs", why, tokens, name)
        if (agent, version) in self.promotions:
            found.skip("divergences", why, 1, name)
        if judged is not None:
            found.skip("divergences", why, 1, name)

    def _floor(self, agent: AgentId, learner: Learner) -> None:
        """The noise floor of version 0 on the start's episodes: compared with the record, and the scale of tolerances."""
        file = self.start.get("episodes_file")
        recorded = self.start["noise_floor"][agent]
        self.floors[agent] = float(recorded["token"])
        if file is None:
            self.found.skip("counts", "the start line names no episodes: the noise floors are taken as they are", 1, agent)
            return
        episodes = [records.read_episode(row) for row in self.rows(file)]
        rows = [t for e in episodes for t in batching.trajectories(e, agent)]
        if not rows:
            self.found.skip("counts", NOT_CALLED, 1, agent)
            return
        floor = runs.noise_floor(learner, batching.token_batch(rows, temperature=self._temperature(agent)))
        self.floors[agent] = floor[0]
        self.found.ok("counts")
        for name, said, computed in zip(
            ("token", "message_mean"), (recorded["token"], recorded["message_mean"]), floor, strict=True
        ):
            # Rounding differs from machine to machine: the floor's size is what counts.
            if not abs(said - computed) <= KL_FLOOR + max(abs(said), abs(computed)) / 2:
                self.found.wrong("counts", "stages.jsonl", "line 1", f"noise_floor.{agent}.{name}", said, computed)

    def _score(self, scoring: _Scoring, learner: Learner, agent: AgentId, version: int) -> None:
        """The sampled tokens of one seat in one file, scored by the version that is loaded."""
        found = self.found
        rows = [
            (number, records.read_episode(row), row["use"])
            for number, row in enumerate(self.rows(scoring.file), start=1)
            if row["use"] in scoring.uses
        ]
        number_of = {episode.id: number for number, episode, _ in rows}
        rest = [episode for _, episode, _ in rows]
        batches: list[TokenBatch] = []
        update = scoring.update
        if update is not None:
            # The replay test's own batches: the same machine gives the recorded gap bit for bit.
            scored = [e for _, e, use in rows if use == "train" and e.is_scored]
            values = episode_advantages(self.config.algorithm, scored)
            team = self.positions[0].team
            whole = agent_batch(scored, values, scoring.seat, temperature=scoring.temperature, team=team)
            batches = [p.batch for p in batching.parts(whole, self.config.algorithm.inner_steps)]
            rest = [e for _, e, use in rows if use != "train" or not e.is_scored]
        tested = len(batches)
        others = [t for e in rest for t in batching.trajectories(e, scoring.seat)]
        if others:
            batches.append(batching.token_batch(others, temperature=scoring.temperature))
        limit = self.tolerances()["token"]
        gaps: list[Tensor] = []
        for batch in batches:
            # A seat may have been played with another agent's model.
            again = learner.logprobs(replace(batch, agent=agent))
            gap = (again - batch.behavior_logprobs)[batch.mask].double()
            gaps.append(gap)
            found.ok("log-probs", gap.numel())
            found.gap("log-probs", float(gap.abs().max()))
            bad = (~(gap.abs() <= limit)).nonzero()[:, 0].tolist()
            if bad:
                row, position = (index[bad[0]].item() for index in batch.mask.nonzero(as_tuple=True))
                where = f"row {number_of[batch.episode_ids[int(row)]]}"
                more = f" ({len(bad) - 1} more tokens here)" if len(bad) > 1 else ""
                told = f"token {int(position)} of '{scoring.seat}' under {agent}@{version}{more}: log-probability"
                one = float(batch.behavior_logprobs[int(row), int(position)])
                found.wrong("log-probs", scoring.file, where, told, one, one + float(gap[bad[0]]))
        if update is not None:
            self._replay(scoring, update, torch.cat(gaps[:tested]), agent, limit)

    def _replay(self, scoring: _Scoring, update: Record, gap: Float[Tensor, " N"], agent: AgentId, limit: float) -> None:
        """The replay test of an update (B18), as it was made."""
        found, file = self.found, scoring.file
        try:
            check_replay(ReplaySums(), gap, agent=agent, is_exact=self.is_exact)
        except ReplayGapError as error:
            found.wrong("log-probs", file, "", f"the replay test fails: {str(error).partition(':')[2].strip()}")
        computed = {"mean": float(gap.abs().mean()), "max": float(gap.abs().max()), "signed": float(gap.mean())}
        for name, value in computed.items():
            said = update["replay"][name]
            if not abs(said - value) <= (limit if name == "max" else MEAN_EXACT if self.is_exact else MEAN_ROUNDED):
                what = f"replay.{name} of update {update['index']}"
                found.wrong("log-probs", "stages.jsonl", f"update {update['index']}", what, said, value)

    def _reweigh(self, weighed: _Reweighed, learner: Learner, agent: AgentId) -> None:
        """What one changed teammate's version makes of the shared episodes, as `sat.log_ratio_sums` does."""
        episodes = [records.read_episode(row) for row in self.rows(weighed.file) if row["use"] == "train"]
        scored = [e for e in episodes if e.is_scored]
        for episode in scored:
            weighed.log_ratios.setdefault(episode.id, 0.0)
        rows = [t for e in scored for t in batching.trajectories(e, agent)]
        if rows:
            batch = batching.token_batch(rows, temperature=self._temperature(agent))
            now = learner.logprobs(batch).double().sum(1).tolist()
            then = torch.where(batch.mask, batch.behavior_logprobs.double(), 0.0).sum(1).tolist()
            for name, one, other in zip(batch.episode_ids, now, then, strict=True):
                weighed.log_ratios[name] += one - other
        del weighed.waiting[agent]
        if not weighed.waiting:
            self._weighed(weighed)

    def _weighed(self, weighed: _Reweighed) -> None:
        """The recorded effective share and mean weight against the computed log-ratios; without any, all weights are 1."""
        found, where = self.found, weighed.where
        log_ratios = torch.tensor(list(weighed.log_ratios.values()) or [0.0], dtype=torch.float64)
        found.ok("counts")
        computed = {
            "effective_share": advantages.effective_sample_share(log_ratios),
            "mean_weight": float(advantages.reuse_weights(log_ratios)[1].mean()),
        }
        for name, value in computed.items():
            said = float(weighed.update["reuse"][name])
            found.gap("reuse", abs(said - value))
            if not abs(said - value) <= (SHARE_EXACT if self.is_exact else SHARE_ROUNDED):
                found.wrong("counts", "stages.jsonl", where, f"reuse.{name}", said, value)

    def _judge(self, trainee: Trainee, line: Record, where: str) -> _Judged | None:
        """The first half of a promoted update's divergence: the probe states, and the law of the version before."""
        agent = trainee.agent
        version = int(line["candidate_version"])
        if not (self.run.path / records.version_folder(agent, version)).is_dir():
            self.found.skip("divergences", PRUNED, 1, f"{agent}@{version}")
            return None
        probe = [records.read_episode(row) for row in self.rows(str(line["episodes_file"])) if row["use"] == "probe"]
        states = self._states(probe, agent, int(line["stage"]))
        name = f"divergences/{line['index']:06d}-{agent}.parquet"
        recorded = records.read_divergences(self.run.path / name)[-1]
        anchor = trainee.learner.remember(states.batch)
        return _Judged(update=line, where=where, states=states, anchor=anchor, recorded=recorded)

    def _divergence(self, judged: _Judged, trainee: Trainee) -> None:
        """The second half: the KLs of the promoted version from the one before, per state and as judged."""
        found, line = self.found, judged.update
        found.ok("divergences")
        floor = self.floors.get(trainee.agent, 0.0)
        scale, looks = float(judged.recorded.scale), self.config.algorithm.looks
        gate, again = look(trainee, judged.states, judged.anchor, self.config.gate, looks=looks, scale=scale)
        name = f"divergences/{line['index']:06d}-{trainee.agent}.parquet"
        who = f"{trainee.agent}@{line['from_version']} to @{line['candidate_version']}"
        for direction in ("kl_new_old", "kl_old_new"):
            said: Tensor = getattr(judged.recorded.divergence, direction).double()
            computed: Tensor = getattr(again, direction).double()
            if said.shape != computed.shape:
                found.wrong("divergences", name, "", f"{who}: number of states", said.numel(), computed.numel())
                return
            gap = torch.where(said == computed, 0.0, (said - computed).abs())
            found.gap("divergences", float(gap.max()))
            bad = (~(gap <= kl_tolerance(computed, floor))).nonzero()[:, 0].tolist()
            if bad:
                more = f" ({len(bad) - 1} more states)" if len(bad) > 1 else ""
                told = f"{who}, state {bad[0] + 1} of the accepted look{more}: {direction}"
                found.wrong("divergences", name, "", told, float(said[bad[0]]), float(computed[bad[0]]))
        recorded = line["looks"][-1]
        for field_name in ("q_point", "q_ucb", "message_mean"):
            one, other = recorded[field_name], getattr(gate, field_name)
            if one is None or other is None:
                same = one is other
            else:
                same = abs(one - other) <= float(kl_tolerance(torch.tensor([other]), floor))
            if not same:
                told = f"{who}, from the weights: {field_name}"
                found.wrong("divergences", "stages.jsonl", judged.where, told, one, other)


@dataclass(frozen=True)
class _Playing:
    """How a batch of episodes was played, as `Table.play` was asked to."""

    table: Table
    address: tuple[str | int, ...]
    versions: Mapping[AgentId, int]
    until: AgentId | None
    substitute: Substitute | None
    drawn_from: str
    foreign: frozenset[AgentId] = frozenset()

    def is_foreign(self, agent: AgentId) -> bool:
        """The model in this seat is not kept in the run, nor its tokenizer."""
        return agent in self.foreign


@dataclass(frozen=True, kw_only=True)
class _Read:
    """What an update's files said."""

    collected: Collected
    own_tokens: int
    """Sampled tokens of the agent in scored episodes."""
    has_signal: bool
    """The episodes allow an update of the agent."""

    def replay(self, state: AgentState, line: Record) -> ReplaySums:
        """The running sums after this update; only a replay test adds to them."""
        sums, gap = state.replay, line["replay"]
        if gap is None:
            return sums
        return ReplaySums(
            tokens=sums.tokens + self.own_tokens,
            absolute=sums.absolute + gap["mean"] * self.own_tokens,
            signed=sums.signed + gap["signed"] * self.own_tokens,
        )


class _StoredBench(Bench):
    """Gives an evaluation's rows the episodes that were stored, each checked on the way."""

    def __init__(self, audit: _Audit, file: str, rows: Sequence[Record], plan: Plan, *, k: int, count: int) -> None:
        super().__init__(plan, k=k, episodes=count, reporter=Silent())
        self.audit, self.file = audit, file
        self.rows: dict[str, list[Record]] = {}
        self.first: dict[str, int] = {}
        for number, row in enumerate(rows):
            self.first.setdefault(str(row["use"]), number)
            self.rows.setdefault(str(row["use"]), []).append(row)

    def outside(self, spec: str) -> tuple[Path, Codec, int]:
        """A model of which the run holds nothing."""
        nobody: Any = None
        return Path(), nobody, 0

    def play(self, measurement: Measurement) -> Sequence[Episode]:
        name = measurement.name
        if name not in self.rows:
            raise DataError(f"{self.file} holds no episodes of '{name}'")
        nobody: Any = None
        foreign = frozenset(agent for agent, folder in measurement.folders.items() if folder == Path())
        playing = _Playing(
            self.table(measurement, nobody),
            self.address,
            measurement.versions,
            None,
            measurement.substitute,
            "test",
            foreign,
        )
        episodes = self.audit.episodes(self.file, self.rows[name], playing, measurement.plays, name, first=self.first[name])
        if len(episodes) != len(measurement.plays):
            raise DataError(f"{len(episodes)} episodes of '{name}', the report speaks of {len(measurement.plays)}")
        for seat in measurement.lineup.seats:
            if seat.codec is None:
                continue
            folder = measurement.folders[seat.agent]
            tokens = _tokens(episodes, seat.agent)
            if seat.agent in foreign:
                self.audit.found.skip("log-probs", FOREIGN, tokens, self.file)
                continue
            self.audit.score_later(folder.parent.name, records.version_of(folder), self.file, [name], seat, tokens)
        return episodes


def _tokens(episodes: Sequence[Episode], agent: AgentId) -> int:
    return sum(len(turn.ids) for e in episodes for turn in e.turns if turn.agent == agent)


def _again(state: AgentState, number: int, retry: Retry) -> Retry:
    """Retry `number` of an update that began in this state, with the length that was recorded of it (2.5)."""
    lr = trust_region.retry_lr(state.lr, number)
    ratio = lr / state.lr
    return replace(
        retry,
        beta=trust_region.retry_penalty(state.beta, number),
        lr=lr,
        shrink_lr=ratio,
        shrink_beta=retry.shrink_total / ratio,
    )


def _entry(line: Record, trainee: Trainee, verdict: Verdict) -> StageEntry:
    """What a stage keeps of an update."""
    return StageEntry(
        agent=str(line["agent"]),
        q_gate=verdict.gate.q_gate if isinstance(verdict, Accepted) else 0.0,
        radius=trainee.radius_token,
        episodes=int(line["episodes"]["n"]),
        word=verdict_word(verdict),
    )


def _few(value: Sequence[int] | str) -> str:
    """A long text or list of ids in a line."""
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:37] + "...")
    return str(list(value) if len(value) <= 12 else [*value[:11], "..."])


__all__ = ["CHECKS", "Fault", "Findings", "kl_tolerance", "verify"]
