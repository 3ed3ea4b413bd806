"""From a config to concrete things: env, prompt sets, codecs, engine, table. Nothing above `run` does this.

Work is ordered so that whatever can be refused is refused before a weight is read: `prepare` touches configs, tokenizers
and tasks only; `Crew` loads models.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, assert_never

import torch
from safetensors.torch import save_file
from torch import Tensor

from baton import envs, protocols
from baton.config import AgentOptions, Config
from baton.core.keyed import key, permutation
from baton.engines import adapters, local, mixture, models
from baton.engines.chat import codec_of
from baton.engines.endpoint import Endpoint, EndpointOptions
from baton.engines.engine import Codec, Sampler
from baton.engines.table import TableCodec, TableLearner, TableSampler, symbols_of
from baton.envs.custom import user_code
from baton.envs.env import Env
from baton.envs.jsonl import load_dialogues
from baton.envs.pool import GraderPool
from baton.envs.splits import Splits, split
from baton.errors import ConfigError, DataError, ModelError, TaskFault
from baton.protocols import RouterOptions, TeamProtocol
from baton.records import plain, stored, write_folder
from baton.resting import Resting
from baton.rollout import Grader, Seat, Table
from baton.types import AgentId, Failed, Outcome, Scored, Snapshot, Task, Turn, Weights
from baton.warm_start import Dialogue, WarmStartRecord, render, render_messages, warm_start

# ---- engines ---------------------------------------------------------------------------------------------------


class Crew(Protocol):
    """A loaded engine: one sampler for the team, one learner per agent, and how weights are written and read."""

    @property
    def sampler(self) -> Sampler: ...
    @property
    def learners(self) -> Mapping[AgentId, Resting]: ...
    @property
    def leaving(self) -> frozenset[AgentId]:
        """Agents whose learners leave memory between their updates (`engine.resting`)."""
        ...

    @property
    def is_exact(self) -> bool:
        """fp32 (or better) on both sides of the replay test."""
        ...

    def serves_masters(self, agent: AgentId) -> bool:
        """What is served are the masters themselves, not a rounded copy."""
        ...

    def rest(self, agent: AgentId, saved: Callable[[], Snapshot]) -> None:
        """Free what an agent needs only during its update: the learner, which wakes with `saved`, and a stale candidate."""
        ...

    def save(self, agent: AgentId, folder: Path, weights: Weights) -> None:
        """Write served weights as a folder that the engine's own loader reads."""
        ...

    def copy_start(self, agent: AgentId, folder: Path) -> None:
        """Write what a frozen agent was loaded from as such a folder."""
        ...

    def stored(self, folder: Path) -> Mapping[str, Tensor]:
        """The tensors of such a folder, as they were saved."""
        ...

    def load(self, folder: Path) -> Weights:
        """The same as weights, in the dtype that is served."""
        ...

    def fits(self, agent: AgentId, folder: Path) -> bool:
        """The folder's weights can be published for this agent: it holds the same model, however trained."""
        ...


class LocalCrew:
    """PyTorch models on this machine."""

    def __init__(self, config: Config, folders: Mapping[AgentId, Path], *, learners: Sequence[AgentId]) -> None:
        self.serve_dtype = serve_dtype(config, folders)
        self.folders = dict(folders)
        devices = devices_of(config)
        bases = local.Bases()
        self.sampler = local.LocalSampler(
            folders, dtype=self.serve_dtype, batch_size=config.engine.batch_size, devices=devices, bases=bases
        )
        self.learners = {
            name: Resting(
                partial(
                    local.MixedLearner,
                    name,
                    folders[name],
                    dtype=self.serve_dtype,
                    device=devices[name],
                    micro_tokens=config.engine.micro_tokens,
                )
                if mixture.is_mixture(folders[name])
                else partial(
                    local.LocalLearner,
                    name,
                    folders[name],
                    serve_dtype=self.serve_dtype,
                    compute=compute(config, folders, devices[name]),
                    micro_tokens=config.engine.micro_tokens,
                    device=devices[name],
                    bases=bases,
                )
            )
            for name in learners
        }
        sizes = {name: models.describe(adapters.whole(folders[name])).parameters for name in learners}
        self.leaving = frozenset(name for name in learners if leaves(config, sizes[name]))

    @property
    def is_exact(self) -> bool:
        # Replayed log-probabilities are those of the served weights; training's own precision does not enter them.
        return self.serve_dtype == torch.float32

    def serves_masters(self, agent: AgentId) -> bool:
        return self.serve_dtype == torch.float32 or adapters.is_adapter(self.folders[agent])

    def rest(self, agent: AgentId, saved: Callable[[], Snapshot]) -> None:
        self.learners[agent].rest(saved)
        self.sampler.drop(agent, "candidate")

    def save(self, agent: AgentId, folder: Path, weights: Weights) -> None:
        save_model(folder, weights, source=self.folders[agent])

    def stored(self, folder: Path) -> Mapping[str, Tensor]:
        if mixture.is_mixture(folder):
            return mixture.tensors(folder)
        return stored(folder / (adapters.TENSORS if adapters.is_adapter(folder) else "model.safetensors"))

    def copy_start(self, agent: AgentId, folder: Path) -> None:
        copy_model(self.folders[agent], folder)

    def load(self, folder: Path) -> Weights:
        tensors = self.stored(folder)
        if not adapters.is_adapter(folder) and models.describe(folder).dtype != self.serve_dtype:
            # A frozen agent is kept as it came.
            tensors = {name: tensor.to(self.serve_dtype) for name, tensor in tensors.items()}
        return weights_of(tensors)

    def fits(self, agent: AgentId, folder: Path) -> bool:
        return codec_of(folder) is self.sampler.codec(agent)


class TableCrew:
    """Exact tabular policies."""

    def __init__(self, config: Config, folders: Mapping[AgentId, Path], *, learners: Sequence[AgentId]) -> None:
        specs = {a.name: a for a in config.agents}
        self.sampler = TableSampler({name: table_codec(specs[name]) for name in folders})
        self.learners = {
            name: Resting(
                partial(TableLearner, name, table_codec(specs[name]).vocabulary, micro_tokens=config.engine.micro_tokens)
            )
            for name in learners
        }
        self.leaving = frozenset(name for name in learners if leaves(config, 0))
        self.is_exact = True

    def serves_masters(self, agent: AgentId) -> bool:
        return True

    def rest(self, agent: AgentId, saved: Callable[[], Snapshot]) -> None:
        self.learners[agent].rest(saved)

    def save(self, agent: AgentId, folder: Path, weights: Weights) -> None:
        save_file({k: v.contiguous() for k, v in weights.tensors.items()}, folder / "table.safetensors")

    def copy_start(self, agent: AgentId, folder: Path) -> None:
        save_file({}, folder / "table.safetensors")  # a table without rows is uniform

    def stored(self, folder: Path) -> Mapping[str, Tensor]:
        return stored(folder / "table.safetensors")

    def load(self, folder: Path) -> Weights:
        return weights_of(self.stored(folder))

    def fits(self, agent: AgentId, folder: Path) -> bool:
        return True


def weights_of(tensors: Mapping[str, Tensor]) -> Weights:
    """Tensors as weights, with their checksums."""
    sums = models.checksums(tensors)
    return Weights(tensors=tensors, checksums=sums, fingerprint=models.fingerprint(sums))


def crew(config: Config, folders: Mapping[AgentId, Path], *, learners: Sequence[AgentId]) -> Crew:
    """Load the engine with these agents; a learner only for those named."""
    match config.engine.name:
        case "local":
            return LocalCrew(config, folders, learners=learners)
        case "table":
            return TableCrew(config, folders, learners=learners)
        case _:
            assert_never(config.engine.name)


def devices_of(config: Config) -> dict[AgentId, torch.device]:
    """Where each agent's sampler and learner work. Raises ModelError where a named device does not exist."""
    tables = config.engine.name == "table"
    return {
        a.name: torch.device("cpu") if tables else local.device_of(a.device, key=f"agents.{a.name}.device")
        for a in config.agents
    }


def _loaded(config: Config, folders: Mapping[AgentId, Path]) -> dict[torch.device, list[int]]:
    """Parameters of each model that these folders put on each device; a base that adapters share counts once."""
    devices = devices_of(config)
    found: dict[torch.device, dict[Path | AgentId, Path]] = {}
    for name, folder in folders.items():
        whole = adapters.whole(folder)
        found.setdefault(devices[name], {})[name if whole == folder else whole] = whole
    return {device: [models.describe(folder).parameters for folder in place.values()] for device, place in found.items()}


def serve_dtype(config: Config, folders: Mapping[AgentId, Path]) -> torch.dtype:
    """The one serving dtype of a run: as configured, or float32 where every device has room for it (ALGORITHMS 2.11)."""
    if config.engine.dtype != "auto":
        return getattr(torch, config.engine.dtype)
    found = {local.auto_dtype(sum(sizes), device=device) for device, sizes in _loaded(config, folders).items()}
    return torch.float32 if found == {torch.float32} else torch.bfloat16


def compute(config: Config, folders: Mapping[AgentId, Path], device: torch.device) -> local.Compute:
    """Precision of training's products on a device: as configured, or by the team's largest model and the device."""
    if config.engine.compute != "auto":
        return config.engine.compute
    return local.auto_compute(max(max(sizes) for sizes in _loaded(config, folders).values()), device)


def leaves(config: Config, parameters: int) -> bool:
    """Whether the learner of a model (or base) of so many parameters leaves memory between its updates."""
    resting = config.engine.resting
    return resting == "disk" or (resting == "auto" and parameters >= RESTS_FROM)


RESTS_FROM = 20_000_000
"""Parameters of a model from which its learner rests on disk where the config says auto. Below, it takes less than half a
GB, and an update is so short that reading it again would show."""


def save_model(folder: Path, weights: Weights, *, source: Path) -> None:
    """Weights as a folder of the kind that `source` is, a whole model or an adapter."""
    if adapters.is_adapter(source):
        adapters.save(folder, weights, source=source)
    else:
        models.save(folder, weights, source=source)


def table_codec(agent: AgentOptions) -> TableCodec:
    """The codec of a `table:SYMBOLS` agent."""
    return TableCodec(symbols_of(agent.model), has_end=agent.max_new_tokens > 1)


def auto_lr(parameters: int, *, is_adapter: bool = False) -> float:
    """AdamW learning rate by the size of the model, or of an adapter's base (ALGORITHMS 2.13)."""
    if is_adapter:
        return 1e-4 if parameters < 1_000_000_000 else 1e-5
    return 1e-3 if parameters < 5_000_000 else 1e-5 if parameters < 1_000_000_000 else 2e-6


# ---- what needs no weights -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything about a run that exists before a weight is read."""

    config: Config
    env: Env
    protocol: TeamProtocol
    splits: Splits
    bases: Mapping[AgentId, Path]
    """Folder of each local agent's model (where it has an adapter: of the base); empty path for tables."""
    codecs: Mapping[AgentId, Codec]
    """Of each local agent; one behind an endpoint has none."""
    seats: tuple[Seat, ...]
    parameters: Mapping[AgentId, int]
    """Of each agent's model or base, an adapter's own not counted."""
    root: Path

    @property
    def local(self) -> tuple[AgentId, ...]:
        """Agents whose weights are here, in the team's order."""
        return tuple(self.codecs)

    @property
    def total_parameters(self) -> int:
        """Of the whole team; a base that adapters share counts once."""
        shared = {self.bases[a.name]: self.parameters[a.name] for a in self.config.agents if a.lora}
        return sum(shared.values()) + sum(self.parameters.get(a.name, 0) for a in self.config.agents if not a.lora)

    def lr(self, agent: AgentOptions) -> float:
        """The agent's configured learning rate, or its size's."""
        if agent.lr != "auto":
            return agent.lr
        return auto_lr(self.parameters[agent.name], is_adapter=agent.lora is not None)


def game(config: Config, *, root: Path) -> tuple[Env, TeamProtocol]:
    """The task and the rules of a config; touches no model.

    Raises:
        ConfigError, DataError: they cannot be built, or are for another number of agents.
    """
    n = len(config.agents)
    env = envs.build(config.env, n_agents=n, root=root)
    if env.seats is not None and env.seats != n:
        raise ConfigError(f"env '{env.name}' needs {env.seats} agents, the config has {n}; add or remove [[agents]]")
    rule = None
    if isinstance(config.protocol, RouterOptions) and config.protocol.rule != "mention":
        rule = user_code(config.protocol.rule, key="protocol.rule", root=root)
    return env, protocols.build(config.protocol, [agent.name for agent in config.agents], rule=rule)


def check_names(config: Config, *, root: Path) -> None:
    """Devices, models and files of demonstrations that the config names, as far as this machine knows without a network.

    Raises:
        ConfigError, DataError, ModelError: the first that is not there.
    """
    devices_of(config)
    for agent in config.agents:
        if config.engine.name == "local" and not agent.is_remote:
            models.check(agent.model, asks_hub=False)
        if agent.lora:
            adapters.require_peft()
        if agent.warm_start is not None and agent.warm_start.source != "env":
            load_dialogues(root / agent.warm_start.source)


FEWEST_PROMPTS = 64
"""Distinct prompts that pairs are drawn from (ALGORITHMS 2.12)."""


def prompt_sets(config: Config, env: Env) -> Splits:
    """The four prompt sets of a config; touches no model.

    Raises:
        ConfigError: too few distinct prompts for the settings.
    """
    a = config.algorithm
    smallest_group = 4 if a.group == "auto" else a.group
    trained = sum(agent.trainable for agent in config.agents)
    return split(
        env,
        seed=config.seed,
        train_prompts_needed=a.episodes // smallest_group * (trained if a.shares_episodes else 1),
        probe_needed=config.gate.probe_prompts,
        certify_needed=FEWEST_PROMPTS if config.certificate.update_pairs or config.certificate.stage_pairs else 0,
    )


def prepare(
    config: Config, *, root: Path, own: Mapping[AgentId, Path] = MappingProxyType({}), asks_endpoints: bool = True
) -> Plan:
    """Build and check all that needs no weights; `root` is the folder that relative paths of the config start from.

    `own` holds what a run has of its agents, its version 0: a run that has begun speaks with its own tokenizers and
    templates, and needs of the models that it came from only the bases of its adapters. `asks_endpoints` = False leaves
    servers alone: nobody at the table will speak.

    Raises:
        ConfigError, ModelError, DataError: the first thing that cannot work, with its remedy.
    """
    env, protocol = game(config, root=root)
    if config.engine.name == "local":
        devices_of(config)
        for agent in config.agents:
            if not agent.is_remote and agent.name not in own:
                models.check(agent.model)
            if agent.lora:
                adapters.require_peft()
    splits = prompt_sets(config, env)
    bases: dict[AgentId, Path] = {}
    codecs: dict[AgentId, Codec] = {}
    parameters: dict[AgentId, int] = {}
    speakers: dict[AgentId, Endpoint] = {}
    for i, agent in enumerate(config.agents):
        if agent.is_remote:
            url = agent.model.removeprefix("endpoint:")
            speakers[agent.name] = Endpoint(agent.name, url, agent.endpoint or EndpointOptions())
            if asks_endpoints:
                speakers[agent.name].check()
            continue
        if config.engine.name == "table":
            bases[agent.name], codecs[agent.name], parameters[agent.name] = Path(), table_codec(agent), 0
            continue
        if agent.name in own:
            mine = own[agent.name]
            bases[agent.name] = adapters.base_of(mine) if adapters.is_adapter(mine) else mine
            codecs[agent.name] = codec_of(mine)
            parameters[agent.name] = models.describe(bases[agent.name]).parameters
            continue
        # Seats that share a start or a base share its random weights; elsewhere every seat has its own.
        is_shared = agent.lora is not None or has_shared_start(agent)
        folder = models.resolve(agent.model, seed=config.seed * 1000 + (0 if is_shared else i))
        bases[agent.name] = folder
        codecs[agent.name] = codec_of(folder)
        parameters[agent.name] = models.describe(folder).parameters
    seats = tuple(
        Seat(
            agent=agent.name,
            system=protocol.default_system(i) if agent.system == "default" else agent.system,
            max_new_tokens=agent.max_new_tokens,
            temperature=agent.temperature,
            codec=codecs.get(agent.name),
            speaker=speakers.get(agent.name),
        )
        for i, agent in enumerate(config.agents)
    )
    check_contexts(seats, protocol, splits)
    return Plan(
        config=config,
        env=env,
        protocol=protocol,
        splits=splits,
        bases=bases,
        codecs=codecs,
        seats=seats,
        parameters=parameters,
        root=root,
    )


def has_shared_start(agent: AgentOptions) -> bool:
    """The agent begins with the one warm start that all seats share."""
    return agent.warm_start is not None and agent.warm_start.seats == "all"


def check_contexts(seats: Sequence[Seat], protocol: TeamProtocol, splits: Splits) -> None:
    """Refuse a task whose prompt cannot fit a seat's context, with the seat's system prompt, the template and an
    empty message from each earlier speaker. Measured on the very ids that would be sent, for the longest views of every set.

    Raises:
        ConfigError: names the task, the seat, its tokens and the limit.
    """
    tasks = [t for group in (splits.train, splits.probe, splits.certify, splits.test) for t in group]
    for index, seat in enumerate(seats):
        if seat.codec is None:
            continue
        # Longer in bytes is nearly always longer in tokens; the rest is caught in play and fails that episode, counted.
        for task in sorted(tasks, key=lambda t: len(t.view(index).encode()), reverse=True)[:64]:
            for turns in _foreseen(seats, protocol, task, index):
                prompt = len(seat.codec.encode(protocol.messages(task, turns, index, seat.system)))
                if prompt + seat.max_new_tokens > seat.codec.context_length:
                    raise ConfigError(
                        f"task {task.id}: the prompt of '{seat.agent}' has {prompt} tokens (system prompt and template too) "
                        f"and may be answered with {seat.max_new_tokens}; its context holds {seat.codec.context_length}. "
                        "Shorten the prompt, lower agents.max_new_tokens, or use a model with a longer context"
                    )


def _foreseen(seats: Sequence[Seat], protocol: TeamProtocol, task: Task, index: int) -> Iterator[Sequence[Turn]]:
    """What may have been said, at the least, whenever this seat speaks: nothing, and the empty messages of an episode in
    which nobody says a word. Where messages decide who is next, that episode need not have a turn of this seat."""
    yield ()
    turns: list[Turn] = []
    try:
        while due := protocol.due(task, turns, 0):
            if turns and index in due:
                yield tuple(turns)
            turns += [Turn(kind="observation", agent=seats[s].agent, seat=s, text="") for s in due]
    except TaskFault:
        return  # that episode fails in play, and is counted there


# ---- grading ---------------------------------------------------------------------------------------------------


def grader(plan: Plan, pool: GraderPool | None) -> Grader:
    """Grade answers beside the run, or in worker processes that can be killed where the env asks for it."""
    env, spec = plan.env, envs.spec(plan.config.env, n_agents=len(plan.seats), root=plan.root)

    def one(task: Task, answer: str) -> Outcome:
        try:
            grade = env.grade(task, answer)
        except TaskFault as fault:
            return Failed(reason=f"grader: {fault}")
        return Scored(reward=grade.reward, reason=grade.reason)

    def grade(answers: Sequence[tuple[Task, str]]) -> list[Outcome]:
        if pool is not None:
            grades = pool.grade_many(spec, answers)
            return [g if isinstance(g, Failed) else Scored(reward=g.reward, reason=g.reason) for g in grades]
        return [one(task, answer) for task, answer in answers]

    return grade


def table(plan: Plan, sampler: Sampler, pool: GraderPool | None) -> Table:
    """The table that the plan's team plays at."""
    return Table(
        seats=plan.seats,
        protocol=plan.protocol,
        sampler=sampler,
        grade=grader(plan, pool),
        normalise=plan.env.normalise,
    )


def grader_pool(plan: Plan, *, check: Callable[[], None] = lambda: None) -> GraderPool | None:
    """Worker processes for graders that can hang; None where grading is a line of our own arithmetic. `check` is called
    while one waits, and may raise."""
    return GraderPool(check=check) if plan.env.is_isolated else None


def check_grader(plan: Plan, pool: GraderPool | None) -> None:
    """Grade a right answer and an empty one before a model loads: code that fails on these fails on every other.

    Raises:
        DataError: names the task, the answer and what went wrong.
    """
    task = plan.splits.train[0]
    answers = list(dict.fromkeys([task.answer, ""]))
    for answer, outcome in zip(answers, grader(plan, pool)([(task, answer) for answer in answers]), strict=True):
        if isinstance(outcome, Failed):
            what = f"its own answer {answer[:80]!r}" if answer else "an empty answer"
            raise DataError(f"task {task.id} and {what} cannot be graded: {outcome.reason}")


# ---- warm starts -----------------------------------------------------------------------------------------------


def dialogues(plan: Plan, index: int) -> list[Dialogue]:
    """The demonstrations of one agent's warm start, from train prompts only.

    Raises:
        ConfigError: the env has none for this seat.
    """
    agent, seat = plan.config.agents[index], plan.seats[index]
    options = agent.warm_start
    if options is None:
        return []
    assert seat.codec is not None
    if options.source != "env":
        path = plan.root / options.source
        return [
            render_messages(messages, id=f"{path.name}:{n}", system=seat.system, codec=seat.codec)
            for n, messages in enumerate(load_dialogues(path), start=1)
        ]
    is_shared = options.seats == "all"
    whose = range(len(plan.seats)) if is_shared else (index,)
    at = (plan.config.seed, "warm start", options.seats, *(() if is_shared else (index,)))
    order = permutation(key(*at), len(plan.splits.train))
    out: list[Dialogue] = []
    for n, i in enumerate(order[: options.demonstrations]):
        own = whose[n % len(whose)]
        task = plan.splits.train[i]
        demo = plan.env.demonstration(task, own)
        if demo is None:
            raise ConfigError(
                f"agents.{agent.name}.warm_start: env '{plan.env.name}' has no demonstrations for seat {own}; "
                "give warm_start.source a JSONL of dialogues"
            )
        out.append(
            render(
                demo,
                id=f"{task.id}:{own}",
                protocol=plan.protocol,
                agents=[s.agent for s in plan.seats],
                system=plan.seats[own].system,
                codec=seat.codec,
                max_new_tokens=seat.max_new_tokens,
            )
        )
    return out


def fresh_folder(plan: Plan, index: int) -> Path:
    """The folder of this agent before any warm start: its model, or a fresh adapter on it."""
    agent = plan.config.agents[index]
    if agent.lora is None:
        return plan.bases[agent.name]
    seat = "all" if has_shared_start(agent) else index
    return adapters.start(plan.bases[agent.name], agent.model, agent.lora, at=(plan.config.seed, seat))


def start_folder(
    plan: Plan, index: int, *, tick: Callable[[str, int, int, float], None]
) -> tuple[Path, WarmStartRecord | None, bool]:
    """The folder that this agent begins RL with, its warm start's record, and whether it came from the cache.

    The cache key is everything the result depends on: base weights, demonstrations as ids, options, precision, threads; for
    an adapter also the fresh one that it begins as.
    """
    agent = plan.config.agents[index]
    base, source = plan.bases[agent.name], fresh_folder(plan, index)
    options = agent.warm_start
    if options is None:
        return source, None, False
    if plan.config.engine.name != "local":
        raise ConfigError(f"agents.{agent.name}.warm_start: tables start from zeros; remove it")
    rows = dialogues(plan, index)
    device = local.device_of(agent.device, key=f"agents.{agent.name}.device")
    precision = compute(plan.config, {agent.name: source}, device)
    lr = 3.0 * plan.lr(agent) if options.lr == "auto" else options.lr
    seed: tuple[str | int, ...] = (plan.config.seed, "warm start", options.seats)
    if options.seats == "own":
        seed = (*seed, index)
    digest = hashlib.sha256(
        json.dumps(
            [
                *("1", *(_folder_digest(folder) for folder in dict.fromkeys((base, source)))),
                *(options.model_dump(mode="json"), lr, precision, seed, *(() if device.type == "cpu" else (device.type,))),
                *(torch.get_num_threads(), torch.__version__, plan.config.engine.micro_tokens),
                [(d.prompt_ids, d.reply_ids) for d in rows],
            ]
        ).encode()
    ).hexdigest()
    target = models.cache_folder() / "warm" / digest[:24]
    record_file = target / "warm_start.json"
    if record_file.exists():
        saved = json.loads(record_file.read_text(encoding="utf-8"))
        saved["accuracy"] = tuple((int(s), float(a)) for s, a in saved["accuracy"])
        saved["losses"] = tuple(saved["losses"])
        return target, WarmStartRecord(**saved), True
    # Trained with fp32 masters and stored in fp32 unless the run serves bf16: what RL starts from is what it serves.
    learner = local.LocalLearner(
        agent.name,
        source,
        serve_dtype=serve_dtype(plan.config, {agent.name: source}),
        compute=precision,
        micro_tokens=plan.config.engine.micro_tokens,
        device=device,
    )
    record = warm_start(
        learner,
        rows,
        options,
        agent=agent.name,
        lr=lr,
        at=seed,
        tick=lambda step, accuracy: tick(agent.name, step, options.steps, accuracy),
    )

    def write(folder: Path) -> None:
        save_model(folder, learner.weights(), source=source)
        (folder / "warm_start.json").write_text(json.dumps(plain(record)), encoding="utf-8")

    write_folder(target, write)
    return target, record, False


def _folder_digest(folder: Path) -> str:
    """Checksum of a model folder's weights and tokenizer."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".json", ".jinja"):
            digest.update(path.name.encode())
            with path.open("rb") as handle:
                digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()


def copy_model(source: Path, folder: Path) -> None:
    """A model folder's files, for the run's own version 0 (and those of the model that a mixture holds inside)."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.startswith(".") and path.name != "warm_start.json":
            shutil.copyfile(path, folder / path.name)
    if mixture.is_mixture(source):
        (folder / mixture.INCUMBENT).mkdir()
        copy_model(source / mixture.INCUMBENT, folder / mixture.INCUMBENT)


def set_threads(config: Config, parameters: Mapping[AgentId, int]) -> int:
    """Set PyTorch's CPU threads for this process and return them: several processes of tiny models want one each."""
    if config.engine.threads == "auto":
        threads = 1 if max(parameters.values(), default=0) < 5_000_000 else (os.cpu_count() or 1)
    else:
        threads = config.engine.threads
    torch.set_num_threads(threads)
    _keep_memory()
    return threads


def _keep_memory() -> None:
    """Tell glibc to keep freed memory: giving pages back and taking them again costs a fifth of a step, of a tiny model or
    of a large one. Elsewhere (other libc's, other systems) nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim, top_pad, mmap = -1, -2, -3  # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD of malloc.h
        # An embedding's gradient has to come from the heap as well; -1 is never.
        for option, size in ((mmap, 1 << 30), (trim, -1), (top_pad, 1 << 26)):
            mallopt(option, size)


def check_models(plan: Plan) -> None:
    """Refuse models that could not be trained here, still before weights are read."""
    for agent in plan.config.agents:
        if plan.config.engine.name == "local" and plan.parameters.get(agent.name) == 0:
            raise ModelError(f"model '{agent.model}' of '{agent.name}' has no parameters; check its folder")


def load_base(spec: str, config: Config) -> tuple[Path, Codec, int]:
    """(folder, codec, parameters) of one model outside the team. Raises ConfigError for a team of tables."""
    if config.engine.name == "table":
        raise ConfigError(
            f"model '{spec}': engine.name = 'table' loads none, and what it plays is made for tables; leave it out"
        )
    models.check(spec)
    folder = models.resolve(spec, seed=config.seed)
    return folder, codec_of(folder), models.describe(folder).parameters
