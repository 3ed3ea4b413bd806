"""The run under audit: what it says of itself, and what its algorithm would act on, built again from the directory alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from baton import assemble, records
from baton.algorithms.acceptance import ProbeStates, Trainee, probe_states
from baton.algorithms.options import SatOptions
from baton.algorithms.state import World
from baton.assemble import Plan
from baton.audit.findings import ODD, STAGES, Findings, in_one_line
from baton.audit.tolerances import Tolerances
from baton.config import AgentOptions, Config
from baton.core import batching
from baton.core.keyed import PROBE
from baton.engines import adapters, local, models
from baton.envs.custom import CustomOptions
from baton.envs.pool import GraderPool
from baton.errors import ConfigError, DataError, ModelError, RunError, TaskFault
from baton.host import Reporter
from baton.journal import Run
from baton.protocols import RouterOptions
from baton.records import Record
from baton.types import AgentId, Episode, GateRecord, Task, TokenBatch, Trajectory


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One run under audit, and the findings about it."""

    run: Run
    config: Config
    """As the run wrote it."""
    plan: Plan
    """Of the sealed config: with the run's own version 0 for each model."""
    lines: Sequence[Record]
    found: Findings
    tolerances: Tolerances
    reporter: Reporter
    threads: int
    world: World
    """What the algorithm acts on. It cannot sample, step or write here."""
    sets: Mapping[str, str]
    """Task id -> the prompt set that it is of."""
    pool: GraderPool | None

    def close(self) -> None:
        """End the graders' processes."""
        if self.pool is not None:
            self.pool.close()

    @property
    def start(self) -> Record:
        """The line of the start."""
        return self.lines[0]

    @property
    def options(self) -> SatOptions:
        return self.config.algorithm

    @property
    def agents(self) -> tuple[AgentId, ...]:
        return tuple(a.name for a in self.config.agents)

    @property
    def trained(self) -> tuple[AgentId, ...]:
        return tuple(a.name for a in self.config.agents if a.trainable)

    def batch(self, rows: Sequence[Trajectory], agent: AgentId) -> TokenBatch:
        """An agent's rows as they were sampled in its own seat. Raises MissingError where there are none."""
        temperature = next(seat.temperature for seat in self.plan.seats if seat.agent == agent)
        return batching.token_batch(rows, temperature=temperature)

    def probe_states(self, probe: Sequence[Episode], agent: AgentId, stage: int) -> ProbeStates:
        """The states that the gate of an agent's update saw in its probe episodes."""
        batch = self.batch(own_rows(probe, agent), agent)
        return probe_states(batch, self.config.gate, at=(self.world.seed, stage, agent, PROBE))


def own_rows(episodes: Sequence[Episode], agent: AgentId) -> list[Trajectory]:
    """What an agent sampled in these episodes, row by row."""
    return [t for e in episodes for t in batching.trajectories(e, agent)]


@dataclass(frozen=True, kw_only=True)
class Update:
    """The line of one agent update, read as far as the audit's rooms have to agree on it."""

    line: Record
    where: str
    """Which line it is."""
    trainee: Trainee
    """With the radii that its stage gave it, and no learner."""
    looks: Sequence[GateRecord]

    @property
    def agent(self) -> AgentId:
        return self.trainee.agent

    @property
    def stage(self) -> int:
        return int(self.line["stage"])

    @property
    def version(self) -> int:
        """The candidate's."""
        return int(self.line["candidate_version"])

    @property
    def name(self) -> str:
        """What its files are called."""
        return f"{int(self.line['index']):06d}-{self.agent}"

    @property
    def episodes_file(self) -> str:
        """As the line names it."""
        return str(self.line["episodes_file"])

    @property
    def divergences_file(self) -> str:
        return f"divergences/{self.name}.parquet"

    def is_shared(self, options: SatOptions) -> bool:
        """The update trains on the episodes that its stage shares."""
        reuse = self.line["reuse"]
        return options.shares_episodes and not (reuse is not None and reuse["is_resampled"])


# ---- opening ---------------------------------------------------------------------------------------------------


def open_subject(run: Run, found: Findings, *, root: str | Path | None, reporter: Reporter) -> Subject | None:
    """The run under audit, or None where the files that everything rests on cannot be read (which is then a fault).

    Raises:
        RunError: the run was never started.
        ConfigError: its env cannot be built here, or is code that nobody allowed to run by naming a `root`.
    """
    try:
        lines = records.read_records(run.path / STAGES)
    except RunError as error:
        found.at(STAGES).wrong("sequence", str(error))
        return None
    if not any(line.get("kind") == "start" for line in lines):
        raise RunError(f"{run.path} holds no started run: stages.jsonl has no line of kind 'start'")
    if lines[0].get("kind") != "start":
        found.at(STAGES, "line 1").wrong("sequence", "the line of the start is not the first one")
        return None
    try:
        config = run.config
    except RunError as error:
        found.at("config.toml").wrong("files", str(error))
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
        own = sealed(run, config)
        folder = Path(root if root is not None else lines[0]["root"])
        plan = assemble.prepare(own, root=folder, asks_endpoints=False)
        return _subject(run, config, plan, lines, found, reporter)
    except (ConfigError, DataError, TaskFault) as error:
        folder = root if root is not None else lines[0].get("root")
        raise ConfigError(
            f"the run's task cannot be built here: {error} (files that its config names are looked for in {folder}; "
            "--root DIR names another folder)"
        ) from error
    except ODD as error:
        found.at("").wrong("files", f"what the run began with cannot be read: {in_one_line(error)}")
        return None


def _subject(run: Run, config: Config, plan: Plan, lines: Sequence[Record], found: Findings, reporter: Reporter) -> Subject:
    is_table = config.engine.name == "table"
    tolerances = Tolerances(is_table=is_table, is_exact=is_table or plan.config.engine.dtype == "float32")
    threads = assemble.set_threads(plan.config, plan.parameters)
    pool = assemble.grader_pool(plan)
    # An audit samples nothing, steps nothing and writes nothing: whoever is asked to is a fault of ours.
    nobody: Any = None
    world = World(
        seed=config.seed,
        options=config.algorithm,
        gate=config.gate,
        group=int(lines[0]["group"]),
        table=assemble.table(plan, nobody, pool),
        sampler=nobody,
        trainees={
            a.name: Trainee(
                agent=a.name,
                learner=nobody,
                lr=plan.lr(a),
                radius_token=config.radius(a).token,
                radius_message_mean=config.radius(a).message_mean,
                is_exact=tolerances.is_exact,
            )
            for a in config.agents
            if a.trainable
        },
        train=plan.splits.train,
        probe=plan.splits.probe,
        reward_range=plan.env.reward_range,
        journal=nobody,
        certify=plan.splits.certify,
        pool=plan.splits.record["certify"]["sha256"],
        probe_pool=plan.splits.record["probe"]["sha256"],
        certificate=config.certificate,
    )
    return Subject(
        run=run,
        config=config,
        plan=plan,
        lines=lines,
        found=found,
        tolerances=tolerances,
        reporter=reporter,
        threads=threads,
        world=world,
        sets={
            task.id: name
            for name in ("train", "probe", "certify", "test")
            for task in cast("Sequence[Task]", getattr(plan.splits, name))
        },
        pool=pool,
    )


def sealed(run: Run, config: Config) -> Config:
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
    kept = config.model_copy(update={"agents": tuple(agents)})
    # Adapters and frozen models are stored in a dtype of their own.
    dtype = dtypes.pop() if dtypes else assemble.serve_dtype(kept, folders)
    engine = config.engine.model_copy(update={"dtype": str(dtype).removeprefix("torch.")})
    return kept.model_copy(update={"engine": engine})


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
