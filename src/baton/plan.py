"""What a run will take, said before any of its models loads: memory, disk, time, tokens, and the fewest accepted updates
that its trust regions allow (ALGORITHMS 2.13).

Configs, tokenizers, tasks and safetensors headers are read; weights are not. Three things stand in for the run:

- one update's episodes, rendered by the protocol itself with messages of the expected length: they give every shape;
- each model's own forward and backward traced on tensors without storage: they give the activations;
- a few layers of each model with random weights, run through the engine itself: they give the speed of this machine.

Everything assumes updates that are accepted whole. What shrinks or is rejected writes less and looks more often. What cannot
be known before (whom a router calls, what a teammate behind an endpoint says) is assumed, and the plan says how (`notes`).
"""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import resource
import statistics
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baton import assemble, records
from baton.algorithms.acceptance import probe_states
from baton.algorithms.options import SatOptions
from baton.assemble import Plan as Prepared
from baton.config import Config
from baton.core import batching, divergence, trust_region
from baton.core.keyed import choice, key, uniforms
from baton.doctor import cores
from baton.engines import adapters, local, models
from baton.engines.adapters import LoraOptions
from baton.engines.engine import Request, Sampler, ScoreRequest
from baton.engines.table import symbols_of
from baton.errors import ConfigError
from baton.host import Reporter, Silent, complete
from baton.journal import Run, kept_files, saved_state
from baton.protocols import Router
from baton.records import Record
from baton.rollout import Seat
from baton.run import START_PROMPTS
from baton.team import update_order
from baton.types import AdvantageBatch, AgentId, Episode, Scored, Task, TokenBatch, TokenIds, Turn, Weights

BLOCK = 4096
"""Bytes in which a file system hands out space."""

SMALL = 5_000_000
"""Parameters below which a model is timed as it is."""

FEW_LAYERS = 4
"""Layers of a larger model that are timed; one layer and these give the time of each further one."""


def plan(
    config: Config,
    *,
    root: Path,
    start: float = 0.25,
    goal: float = 0.95,
    answer_tokens: int | None = None,
    reporter: Reporter | None = None,
) -> Record:
    """What a run of this config would take on this machine, as one record.

    Args:
        root: the folder that relative paths of the config start from.
        start, goal: probabilities of a right answer between which the speed limit is stated.
        answer_tokens: expected length of every message (default: a demonstration's where the agent is warm-started on
            them, else agents.max_new_tokens).

    Raises:
        ConfigError, ModelError, DataError: what `baton train` would refuse, with the same words.
    """
    reporter = reporter or Silent()
    if not 0.0 < start < goal < 1.0:
        raise ConfigError(f"--from {start:g} --to {goal:g}: give two probabilities between 0 and 1, the lower first")
    prepared = assemble.prepare(config, root=root)
    assemble.check_models(prepared)
    threads = assemble.set_threads(config, prepared.parameters)
    reporter.say("one update's episodes, with messages of the expected length")
    update = rehearsed(prepared, answer_tokens)
    team = members(prepared, update)
    reporter.say("tracing each model without its weights")
    memory = _memory(prepared, team, update)
    disk = _disk(prepared, team, update)
    reporter.say("timing a few layers of each model with random weights")
    seconds = _time(prepared, team, update, reporter)
    return {
        "kind": "plan",
        "notes": _notes(prepared, update),
        "agents": _agents(prepared, team),
        "episodes": update.record(),
        "memory": memory,
        "disk": disk,
        "time": {**seconds, "threads": threads},
        "tokens": update.tokens(config),
        "speed_limit": _limits(config, update, start, goal),
    }


# ---- one update, rehearsed -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The episodes of one update with messages of the expected length, and what each agent would train on."""

    train: tuple[Episode, ...]
    """Of one update, or of a stage whose agents share them."""
    probe: tuple[Episode, ...]
    """Whole episodes."""
    probe_until: Mapping[AgentId, tuple[Episode, ...]]
    """The probe episodes as each trained agent's gate has them played: to the last turn that it can have."""
    batches: Mapping[AgentId, AdvantageBatch]
    """Own rows of every agent whose weights are here, a frozen one's too."""
    probes: Mapping[AgentId, TokenBatch]
    """Of each trained agent, the states that its gate reads."""
    expected: Mapping[AgentId, str]
    """Where each agent's message length comes from."""
    too_long: Mapping[AgentId, int]
    """Turns whose prompt left no room for the answer in the agent's context; here their prompts lack their beginning."""
    seconds_per_turn: float
    """Of rendering and encoding alone: what playing costs beside the model."""

    def record(self) -> Record:
        """Sizes of the batches of each agent whose weights are here."""
        return {
            agent: {
                "rows": batch.batch.n_rows,
                "longest_row": int(batch.batch.lengths.max()),
                "trained_tokens": int(batch.batch.lengths.sum()),
                "own_tokens": batch.batch.n_act,
                "gate_states": self.probes[agent].n_act if agent in self.probes else 0,
                "message_length": self.expected[agent],
            }
            for agent, batch in self.batches.items()
        }

    def tokens(self, config: Config) -> Record:
        """Tokens that the local agents generate in a stage and in the run: to train on, for the gate, to find an order."""
        a = config.algorithm
        stage = {
            "train": _generated(self.train) * (1 if a.shares_episodes else len(self.probes)),
            "probe": _generated(self.probe)
            if a.name == "joint"
            else sum(_generated(heard) for heard in self.probe_until.values()),
        }
        if a.is_measured:
            stage["order"] = round(_generated(self.train) * _ordering_episodes(a) / len(self.train))
        return {"stage": stage, "run": {use: count * a.stages for use, count in stage.items()}}


def _generated(episodes: Sequence[Episode]) -> int:
    return sum(len(t.ids) for e in episodes for t in e.turns)


def _group(options: SatOptions) -> int:
    return 4 if options.group == "auto" else options.group


def _ordering_episodes(options: SatOptions) -> int:
    """Episodes on which a stage measures its order or its radii."""
    group = _group(options)
    return max(1, options.ordering_episodes // group) * group if options.is_measured else 0


def rehearsed(prepared: Prepared, answer_tokens: int | None = None) -> Rehearsal:
    """One update's episodes as the protocol would have them, without a model: prompts are real, messages have the expected
    length, log-probabilities and rewards are made up."""
    config = prepared.config
    a = config.algorithm
    trained = [agent.name for agent in config.agents if agent.trainable]
    prompts = a.episodes // _group(a) * (len(trained) if a.shares_episodes else 1)
    messages = [_message(prepared, i, answer_tokens) for i in range(len(prepared.seats))]
    stage = _Stage(prepared, [one for one, _ in messages], dict.fromkeys(prepared.local, 0))
    began = time.monotonic()
    train = [stage.play(task, sibling)[0] for task in prepared.splits.train[:prompts] for sibling in range(_group(a))]
    probe = [stage.play(task, 0) for task in prepared.splits.probe[: config.gate.probe_prompts]]
    spent = time.monotonic() - began
    batches: dict[AgentId, AdvantageBatch] = {}
    probes: dict[AgentId, TokenBatch] = {}
    versions = {seat.agent: 0 for seat in prepared.seats}
    for seat in prepared.seats:
        if seat.codec is None:
            continue
        rows = [t for e in train for t in batching.trajectories(e, seat.agent)]
        signs = {e.id: 1.0 if n % 2 else -1.0 for n, e in enumerate(train)}
        batch = batching.token_batch(rows, temperature=seat.temperature)
        batches[seat.agent] = batching.with_advantages(batch, signs, team=versions)
        if seat.agent in trained:
            rows = [t for e, _ in probe for t in batching.trajectories(e, seat.agent)]
            told = batching.token_batch(rows, temperature=seat.temperature)
            probes[seat.agent] = probe_states(told, config.gate, at=("plan", seat.agent)).batch
    own = prepared.protocol.own_turns
    return Rehearsal(
        train=tuple(train),
        probe=tuple(e for e, _ in probe),
        probe_until={name: tuple(_until(e, waves, name, own) for e, waves in probe) for name in trained},
        batches=batches,
        probes=probes,
        expected={seat.agent: why for seat, (_, why) in zip(prepared.seats, messages, strict=True)},
        too_long={name: count for name, count in stage.too_long.items() if count},
        seconds_per_turn=spent / sum(len(e.turns) for e in (*train, *(e for e, _ in probe))),
    )


def _until(episode: Episode, waves: Sequence[int], agent: AgentId, own_turns: int) -> Episode:
    """The episode up to the end of the wave of simultaneous turns in which this agent has its last one."""
    turns: list[Turn] = []
    for wave in waves:
        if sum(turn.agent == agent for turn in turns) >= own_turns:
            break
        turns += episode.turns[len(turns) : len(turns) + wave]
    return replace(episode, turns=tuple(turns))


Said = Callable[[Task, int, int], tuple[str, TokenIds]]
"""(text, ids) of a seat's message on a task, for one of its siblings, as its so manyth turn; no ids behind an endpoint."""


def _message(prepared: Prepared, index: int, answer_tokens: int | None) -> tuple[Said, str]:
    """(what a seat says, where the length of it comes from)."""
    seat, agent, env = prepared.seats[index], prepared.config.agents[index], prepared.env
    words = [f" {word}" for task in prepared.splits.train[:32] for word in task.prompt.split()] or [" a"]
    codec = seat.codec
    if codec is None:

        def remote(task: Task, sibling: int, turn: int) -> tuple[str, TokenIds]:
            draws = uniforms([key("plan", task.id, sibling, turn, index)], seat.max_new_tokens)[0]
            return "".join(words[int(draw * len(words))] for draw in draws).strip(), ()

        return remote, "a word a token of agents.max_new_tokens"
    warm = agent.warm_start
    is_shown = warm is not None and warm.source == "env" and env.demonstration(prepared.splits.train[0], index) is not None
    if answer_tokens is None and seat.max_new_tokens > 1 and is_shown:

        def shown(task: Task, sibling: int, turn: int) -> tuple[str, TokenIds]:
            demo = env.demonstration(task, index)
            ids = codec.reply(demo.reply if demo else "")[: seat.max_new_tokens]
            return codec.decode(ids), ids

        return shown, "as demonstrated"
    length = min(answer_tokens or seat.max_new_tokens, seat.max_new_tokens)
    if prepared.config.engine.name == "table":
        words = list(symbols_of(agent.model))

    def filled(task: Task, sibling: int, turn: int) -> tuple[str, TokenIds]:
        """Words of the prompts in a keyed order: as long as is wanted, and no easier to compress than answers are."""
        draws = uniforms([key("plan", task.id, sibling, turn, index)], length)[0]
        ids = codec.reply("".join(words[int(draw * len(words))] for draw in draws))
        while len(ids) < length:
            ids = (*ids[:-1], *ids)
        return codec.decode(ids[:length]), ids[:length]

    return filled, "as given" if answer_tokens else "agents.max_new_tokens"


@dataclass
class _Stage:
    """Where episodes are rehearsed."""

    prepared: Prepared
    said: Sequence[Said]
    too_long: dict[AgentId, int]

    def _due(self, task: Task, turns: Sequence[Turn], rotation: int) -> tuple[int, ...]:
        """Whoever is due; where messages decide that, all agents in the order of the seats until each had all its turns."""
        protocol, n = self.prepared.protocol, len(self.prepared.seats)
        if isinstance(protocol, Router):
            return (len(turns) % n,) if len(turns) < n * protocol.own_turns else ()
        return protocol.due(task, turns, rotation)

    def play(self, task: Task, sibling: int) -> tuple[Episode, list[int]]:
        """An episode, and how many spoke at once in each of its waves."""
        prepared = self.prepared
        protocol, seats = prepared.protocol, prepared.seats
        rotation = choice(key("plan", task.id, sibling, "rotation"), len(seats)) if protocol.rotates else 0
        turns: list[Turn] = []
        waves: list[int] = []
        while due := self._due(task, turns, rotation):
            turns += [self._turn(task, sibling, turns, index) for index in due]
            waves.append(len(due))
        episode = Episode(
            id=f"0/1/{seats[0].agent}/sample/{task.id}/{sibling}",
            group=task.id,
            task_id=task.id,
            versions={seat.agent: 0 for seat in seats},
            turns=tuple(turns),
            answer=turns[-1].text if turns else "",
            outcome=Scored(reward=0.0),
        )
        return episode, waves

    def _turn(self, task: Task, sibling: int, turns: Sequence[Turn], index: int) -> Turn:
        seat = self.prepared.seats[index]
        text, ids = self.said[index](task, sibling, len(turns))
        if seat.codec is None:
            return Turn(kind="observation", agent=seat.agent, seat=index, text=text)
        prompt = seat.codec.encode(self.prepared.protocol.messages(task, turns, index, seat.system))
        room = seat.codec.context_length - seat.max_new_tokens
        if len(prompt) > room:
            self.too_long[seat.agent] += 1
            prompt = prompt[-room:]
        chances = uniforms([key("plan", task.id, sibling, len(turns), index, "log-probabilities")], len(ids))[0]
        return Turn(
            kind="action",
            agent=seat.agent,
            seat=index,
            text=text,
            prompt_ids=prompt,
            ids=ids,
            # fp32 numbers, each its own: parquet must not compress what a run's would not.
            logprobs=tuple(-float(np.float32(chance)) for chance in chances),
            versions=(0,) * len(ids),
        )


def _notes(prepared: Prepared, update: Rehearsal) -> list[str]:
    """What the plan assumes about this team, a sentence each."""
    config, a = prepared.config, prepared.config.algorithm
    notes: list[str] = []
    if isinstance(prepared.protocol, Router):
        notes.append(
            "whom a router calls is not known before: as if every agent had all its turns of an episode "
            f"({prepared.protocol.own_turns}), in the order of the seats"
        )
    for agent in config.agents:
        if agent.is_remote:
            notes.append(
                f"'{agent.name}' answers from an endpoint: as if with {agent.max_new_tokens} words; its time, memory and "
                "tokens are not counted"
            )
    for name, count in update.too_long.items():
        notes.append(
            f"{count} prompts of '{name}' leave no room for an answer in its context: such episodes fail; shorten messages "
            "or take a model with a longer context"
        )
    if a.backtrack.tries > 1:
        notes.append(f"an update that leaves the region is trained up to {a.backtrack.tries} times; here once")
    if a.data == "reuse":
        notes.append("a stage's episodes are played once; where too little of them is left, an agent plays its own")
    devices = (
        sorted({str(device) for device in assemble.devices_of(config).values()}) if config.engine.name == "local" else []
    )
    if devices not in ([], ["cpu"]):
        notes.append(f"memory is that of {', '.join(devices)} and of this process together")
    return notes


# ---- the team's models -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Member:
    """What of an agent with weights here decides about memory, disk and time. Bytes unless a name says otherwise."""

    agent: AgentId
    folder: Path
    """A model, or an adapter on one."""
    base: Path
    """The model; the folder itself where there is no adapter."""
    device: str
    lora: LoraOptions | None
    is_trained: bool
    learns: bool
    """Trained, or at least warm-started."""
    leaves: bool
    """Its learner leaves memory between its updates."""
    parameters: int
    """Its own: all of a model's, or an adapter's."""
    whole: int
    """Parameters of the model, or of the base."""
    served: int
    """Its own served weights, once."""
    layers: int
    width: int
    vocabulary: int
    kv_per_token: int
    """Keys and values of one token."""
    compute: local.Compute
    item: int
    """Bytes of one served number of the model, or of the base."""

    @property
    def serve(self) -> torch.dtype:
        return {2: torch.bfloat16, 4: torch.float32}.get(self.item, torch.float64)

    @property
    def serves_masters(self) -> bool:
        return self.item >= 4 or self.lora is not None

    @property
    def shared(self) -> int:
        """Of the base that adapters share."""
        return self.whole * self.item if self.lora else 0

    @property
    def learner(self) -> int:
        """Masters, and the served copy where that is something else."""
        return 4 * self.parameters + self.copy

    @property
    def copy(self) -> int:
        return 0 if self.serves_masters else self.served

    @property
    def largest(self) -> int:
        """Numbers of the largest trained tensor; of an adapter too few to count."""
        return 0 if self.lora else self.vocabulary * self.width

    @property
    def forward_flops(self) -> float:
        """Products and sums of one token's forward, attention over the context left out."""
        inside = self.whole - (self.vocabulary * self.width if self.layers else 0)
        return 2.0 * max(0, inside)


def members(prepared: Prepared, update: Rehearsal) -> list[_Member]:
    """The agents whose weights are here, in the team's order."""
    config = prepared.config
    if config.engine.name == "table":
        return [_table(config, seat, update) for seat in prepared.seats if seat.codec is not None]
    folders = {
        agent.name: assemble.fresh_folder(prepared, i) for i, agent in enumerate(config.agents) if not agent.is_remote
    }
    serve, devices = assemble.serve_dtype(config, folders), assemble.devices_of(config)
    found: list[_Member] = []
    for agent in config.agents:
        if agent.is_remote:
            continue
        folder, base = folders[agent.name], prepared.bases[agent.name]
        settings = _text_config(base)
        heads = int(settings["num_attention_heads"])
        head = int(settings.get("head_dim") or settings["hidden_size"] // heads)
        layers = int(settings["num_hidden_layers"])
        own = models.describe(folder).parameters
        found.append(
            _Member(
                agent=agent.name,
                folder=folder,
                base=base,
                device=str(devices[agent.name]),
                lora=agent.lora,
                is_trained=agent.trainable,
                learns=agent.trainable or agent.warm_start is not None,
                leaves=agent.trainable and assemble.leaves(config, own),
                parameters=own,
                whole=prepared.parameters[agent.name],
                served=own * (4 if agent.lora else serve.itemsize),
                layers=layers,
                width=int(settings["hidden_size"]),
                vocabulary=int(settings["vocab_size"]),
                kv_per_token=2 * layers * int(settings.get("num_key_value_heads") or heads) * head * serve.itemsize,
                compute=assemble.compute(config, folders, devices[agent.name]),
                item=serve.itemsize,
            )
        )
    return found


def _table(config: Config, seat: Seat, update: Rehearsal) -> _Member:
    """A table's rows are made as states are met: as many as there are different prompts, of 8 bytes a logit."""
    agent = next(a for a in config.agents if a.name == seat.agent)
    rows = len({t.prompt_ids for e in update.train for t in e.turns if t.agent == seat.agent})
    size = rows * len(symbols_of(agent.model))
    return _Member(
        agent=seat.agent,
        folder=Path(),
        base=Path(),
        device="cpu",
        lora=None,
        is_trained=agent.trainable,
        learns=agent.trainable,
        leaves=agent.trainable and assemble.leaves(config, 0),
        parameters=size,
        whole=size,
        served=8 * size,
        layers=0,
        width=0,
        vocabulary=0,
        kv_per_token=0,
        compute="float32",
        item=8,
    )


def _agents(prepared: Prepared, team: Sequence[_Member]) -> list[Record]:
    """What each agent of the team is, in its order."""
    here = {m.agent: m for m in team}
    found: list[Record] = []
    for agent in prepared.config.agents:
        m = here.get(agent.name)
        kind = "endpoint" if m is None else "trained" if m.is_trained else "frozen"
        row: Record = {"agent": agent.name, "kind": kind, "max_new_tokens": agent.max_new_tokens}
        if m is not None:
            row |= {
                "parameters": m.parameters,
                "base_parameters": m.whole if m.lora else None,
                "serving": "float32 adapter on " * bool(m.lora) + str(m.serve).removeprefix("torch."),
                "compute": m.compute,
                "rests": m.leaves,
            }
        found.append(row)
    return found


def _text_config(folder: Path) -> dict[str, Any]:
    config = models.read_config(folder)
    return cast("dict[str, Any]", config.get("text_config") or config)


# ---- memory ----------------------------------------------------------------------------------------------------

Phase = Literal["order", "sample", "step", "gate", "commit"]
PHASES: tuple[Phase, ...] = ("order", "sample", "step", "gate", "commit")
"""Measuring a stage's order (where it is measured), playing, training, looking, publishing and writing."""

AWAKE: tuple[Phase, ...] = ("step", "gate", "commit")
"""Phases in which the updated agent's learner is in memory, also one that leaves between its updates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One part of the memory of an update, in bytes, and the phases in which it is held."""

    name: str
    bytes: int
    phases: tuple[Phase, ...] = PHASES


def memory_terms(
    team: Sequence[_Member], mover: _Member, moved: frozenset[AgentId], *, options: SatOptions, work: Mapping[str, int]
) -> list[Term]:
    """Everything that is held while `mover` is updated and the agents `moved` have been before: THE memory model.

    `work` are the parts that depend on shapes: process, activations, anchors, laws, decoding, kv, scores.
    """
    p = mover.parameters
    trained = [m for m in team if m.is_trained]
    keepers = [m for m in trained if not m.leaves and m is not mover]
    # Shared episodes are played before the next update begins, and so before whoever was updated last has left.
    late: tuple[Phase, ...] = ("sample", *AWAKE) if options.shares_episodes and moved else AWAKE
    # A measured order wakes every learner in turn.
    awake: tuple[Phase, ...] = ("order", *late) if mover.leaves else PHASES
    moments = 8 * p if mover.agent in moved else 0
    if mover.leaves:  # the saved state stands for a snapshot: on disk, or read whole where its file is small
        files = [4 * p, moments] if mover.serves_masters else [4 * p + moments]
        before = sum(size for size in files if size <= records.READ_WHOLE)
    else:
        before = 4 * p + moments
    searched: tuple[Phase, ...] = AWAKE if options.backtrack.tries > 1 else ("gate", "commit")
    is_searched = options.looks > 1
    # An adapter's slot gets new tensors every time; a slot that was emptied too.
    is_new = mover.leaves or mover.lora is not None or mover.agent not in moved
    return [
        Term(name="process: python, libraries, tasks", bytes=work["process"]),
        Term(name="bases that adapters share", bytes=sum({(m.base, m.device): m.shared for m in team}.values())),
        Term(name="sampler: promoted slots", bytes=sum(m.served for m in team)),
        Term(name="sampler: candidate slots", bytes=sum(m.served for m in trained if m.agent in moved and not m.leaves)),
        Term(name="sampler: candidate slot, new", bytes=mover.served if is_new else 0, phases=("commit",)),
        Term(name="sampler: start slots", bytes=sum(m.served for m in trained) if options.name == "independent" else 0),
        Term(name="other learners: fp32 masters", bytes=sum(4 * m.parameters for m in keepers)),
        Term(name="other learners: served copies", bytes=sum(m.copy for m in keepers)),
        Term(name="other learners: AdamW moments", bytes=sum(8 * m.parameters for m in keepers if m.agent in moved)),
        Term(name="learner: fp32 masters", bytes=4 * p, phases=awake),
        Term(name="learner: served copy", bytes=mover.copy, phases=awake),
        Term(name="learner: AdamW moments", bytes=moments, phases=awake),
        Term(name="learner: AdamW moments, new", bytes=8 * p - moments, phases=AWAKE),
        Term(name="gradients", bytes=4 * p, phases=("step",)),
        Term(name="snapshot before the step", bytes=before, phases=AWAKE),
        Term(name="masters of the whole step (line search)", bytes=4 * p if is_searched else 0, phases=searched),
        # A difference in fp32, then in fp64, and its square.
        Term(
            name="largest tensor, compared (line search)", bytes=20 * mover.largest if is_searched else 0, phases=("gate",)
        ),
        Term(name="masters of a retry", bytes=4 * p if options.backtrack.tries > 1 else 0, phases=("gate",)),
        Term(name="weights to publish", bytes=mover.served, phases=("commit",)),
        Term(name="anchors: hidden states and unembeddings", bytes=work["anchors"], phases=AWAKE),
        Term(name="activations and logits of the biggest micro-batch", bytes=work["activations"], phases=("step",)),
        Term(name="laws at the probe states", bytes=work["laws"], phases=("gate",)),
        Term(name="decode batch: activations and laws", bytes=work["decoding"], phases=("order", "sample")),
        Term(name="decode batch: keys and values", bytes=work["kv"], phases=("order", "sample")),
        Term(name="scores of episodes, one by one", bytes=work["scores"], phases=("order",)),
    ]


def _turns(options: SatOptions, agents: Sequence[AgentId], seed: int) -> list[tuple[int, AgentId]]:
    """Every (stage, agent) of a run. An order that a run measures as it goes is taken as the team's own."""
    stages = range(1, options.stages + 1)
    if options.name == "independent":
        return [(k, a) for a in agents for k in stages]
    fixed = options.name == "joint" or options.order not in ("random", "static", "reverse")
    return [(k, a) for k in stages for a in (agents if fixed else update_order(options.order, agents, seed=seed, stage=k))]


def _memory(prepared: Prepared, team: Sequence[_Member], update: Rehearsal) -> Record:
    """Terms at the moment of the highest sum over the updates of the first two stages; later ones repeat the second."""
    config = prepared.config
    process = _process_bytes(prepared)
    trained = {m.agent: m for m in team if m.is_trained}
    two = config.algorithm.model_copy(update={"stages": min(2, config.algorithm.stages)})
    work = {m.agent: {"process": process, **_work(config, m, update)} for m in team}
    common = {part: max(w[part] for w in work.values()) for part in ("decoding", "kv", "scores")}
    phases: tuple[Phase, ...] = tuple(phase for phase in PHASES if phase != "order" or config.algorithm.is_measured)
    moved: frozenset[AgentId] = frozenset()
    best: tuple[int, str, Phase, list[Term]] | None = None
    for _, agent in _turns(two, tuple(trained), config.seed):
        terms = memory_terms(team, trained[agent], moved, options=config.algorithm, work={**work[agent], **common})
        for phase in phases:
            total = sum(t.bytes for t in terms if phase in t.phases)
            if best is None or total > best[0]:
                best = (total, agent, phase, terms)
        moved |= {agent}
    assert best is not None
    total, agent, phase, terms = best
    sums: dict[str, int] = {name: sum(t.bytes for t in terms if name in t.phases) for name in phases}
    found: Record = {"peak": total, "at": {"agent": agent, "phase": phase}, "phases": sums}
    held = [t for t in terms if phase in t.phases and t.bytes]
    for m in team:
        warm = _warm_terms(prepared, m, update, process)
        sums["warm start"] = max(sums.get("warm start", 0), sum(t.bytes for t in warm))
        if sum(t.bytes for t in warm) > found["peak"]:
            found |= {"peak": sum(t.bytes for t in warm), "at": {"agent": m.agent, "phase": "warm start"}}
            held = warm
    return {**found, "terms": {t.name: t.bytes for t in held}}


def _warm_terms(prepared: Prepared, m: _Member, update: Rehearsal, process: int) -> list[Term]:
    """What an agent's warm start holds, before the team is loaded; nothing where it has none."""
    warm = next(a.warm_start for a in prepared.config.agents if a.name == m.agent)
    if warm is None:
        return []
    longest = int(update.batches[m.agent].batch.lengths.max())
    rows = min(warm.batch, max(1, prepared.config.engine.micro_tokens // longest))
    states = rows * max(1, update.batches[m.agent].batch.n_act // update.batches[m.agent].batch.n_rows)
    step = traced(m.folder, rows=rows, width=longest, states=states, compute=m.compute, kl=False, dtype=_trained_dtype(m))
    p = m.parameters
    return [
        Term(name="process: python, libraries, tasks", bytes=process),
        Term(name="base of the adapter", bytes=m.shared),
        Term(name="learner: masters and moments", bytes=m.learner + 8 * p),
        Term(name="gradients", bytes=4 * p),
        Term(name="activations and logits of the biggest micro-batch", bytes=max(0, step - 4 * p)),
        # A few Python objects each, and two tuples of its ids.
        Term(name="demonstrations", bytes=warm.demonstrations * (1000 + 16 * longest)),
    ]


def _trained_dtype(m: _Member) -> torch.dtype:
    """What a training forward runs on: the masters, or a base as it is served."""
    return m.serve if m.lora else torch.float32


def _work(config: Config, m: _Member, update: Rehearsal) -> dict[str, int]:
    """Bytes of an agent's update that follow from the shapes of its batches; of a frozen agent those of playing."""
    batch = update.batches[m.agent]
    none = {"activations": 0, "anchors": 0, "laws": 0, "decoding": 0, "kv": 0, "scores": 0}
    if not m.layers:
        return none
    prompts = [(len(t.prompt_ids), len(t.ids), t.prompt_ids) for e in update.train for t in e.turns if t.agent == m.agent]
    longest, answer = max(p for p, _, _ in prompts), max(a for _, a, _ in prompts)
    lines = min(config.engine.batch_size, len(prompts))
    distinct = min(lines, len({ids for _, _, ids in prompts}))
    prefill = traced(m.folder, rows=distinct, width=longest, states=0, compute="float32", kl=False, dtype=m.serve)
    # A law in fp32 with its logits, then its exponential and its running sum in fp64.
    drawing = (4 + 4 + 4 + 8) * min(len(prompts), config.engine.batch_size * (1 if answer > 1 else 4)) * m.vocabulary
    kv = (lines * (longest + answer) + distinct * longest) * m.kv_per_token if answer > 1 else 0
    playing = {**none, "decoding": prefill + drawing, "kv": kv}
    if not m.is_trained:
        return playing
    probe = update.probes[m.agent]
    parts = [part.batch for part in batching.parts(batch, config.algorithm.inner_steps)]
    shapes = {
        _shape(part, rows) for part in parts for rows in batching.micro_batches(part, max_tokens=config.engine.micro_tokens)
    }
    rows, width, states = max(shapes, key=lambda shape: (shape[0] * shape[1], shape[2]))
    shape: dict[str, Any] = {"compute": m.compute, "dtype": _trained_dtype(m)}
    step = traced(m.folder, rows=rows, width=width, states=states, kl=config.algorithm.penalty.start > 0, **shape)
    # An adapter's head is its base's, which nobody trains.
    head = 0 if m.lora else (len(parts) + 1) * m.vocabulary * m.width * m.item
    seen = min(probe.n_act, max(1, local.CHUNK // m.vocabulary))
    scores = 0
    if config.algorithm.is_measured:
        one = _shape(batch.batch, batch.batch.episode.eq(0).nonzero()[:, 0].tolist())
        # Beside the gradient: one score, its square, and the two means.
        scores = traced(m.folder, rows=one[0], width=one[1], states=one[2], kl=False, **shape) + 16 * m.parameters
    return {
        **playing,
        "activations": max(0, step - 4 * m.parameters),
        "anchors": head + (batch.batch.n_act + probe.n_act) * m.width * m.item,
        # Two laws and what the two directions of their divergence need beside them: eight numbers an entry, as traced.
        "laws": 8 * 4 * seen * m.vocabulary,
        "scores": scores,
    }


def _shape(batch: TokenBatch, rows: Sequence[int]) -> tuple[int, int, int]:
    part = batch.rows(list(rows))
    return part.n_rows, int(part.lengths.max()), part.n_act


class _Live(TorchDispatchMode):
    """Counts the bytes of every tensor that an operation made and that is still held; `peak` is the most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage: Any = leaf.untyped_storage()
                if storage not in self._known:
                    size = int(storage.nbytes())
                    self._known[storage] = size
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._free, size)
        return out

    def _free(self, size: int) -> None:
        self.now -= size


@lru_cache(maxsize=256)
def traced(
    folder: Path,
    *,
    rows: int,
    width: int,
    states: int,
    compute: local.Compute,
    kl: bool,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Most bytes held at once, beside the weights, by a forward and backward of this model (or of this adapter on its base)
    on [rows, width] tokens with the loss at `states` of them (0: a forward alone), as `LocalLearner.step` does it.

    `dtype` is that of the weights; an adapter's own are fp32.

    The model is its own code on tensors without storage: no weight is read, nothing is computed.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM

    live = _Live()
    base = adapters.base_of(folder) if adapters.is_adapter(folder) else folder
    adapter: adapters.Adapter | None = None  # held, or it leaves the base again
    with models.quiet(), torch.random.fork_rng(devices=[]), torch.device("meta"):
        settings = cast(Any, AutoConfig).from_pretrained(base, local_files_only=True)
        model = cast(Any, AutoModelForCausalLM).from_config(settings, dtype=dtype, attn_implementation="sdpa").eval()
        if base != folder:
            shared = adapters.Shared(model)
            adapter = shared.add(folder, is_trained=states > 0)
            shared.activate(adapter)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _without_storage(model)
        ids = torch.zeros(rows, max(1, width - 1) if states else width, dtype=torch.long)
        head = model.get_output_embeddings().weight
        with live, torch.set_grad_enabled(states > 0):
            with torch.autocast("cpu", torch.bfloat16, enabled=compute == "bfloat16"):
                hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
                if not states:
                    return live.peak
                chosen = hidden.flatten(0, 1).index_select(0, torch.zeros(states, dtype=torch.long))
                logits = torch.nn.functional.linear(chosen, head)
            law = divergence.log_law(logits, temperature=1.0)
            loss = law.gather(1, torch.zeros(states, 1, dtype=torch.long)).sum()
            if kl:
                with torch.no_grad():
                    old = divergence.log_law(torch.nn.functional.linear(chosen.detach(), head), temperature=1.0)
                loss = loss + divergence.kl(law, old).sum()
            del logits
            loss.backward()
    return live.peak


def _without_storage(model: Any) -> None:
    """Give a module on the device `meta`, inside a mode of fake tensors, tensors that say they are on the CPU."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in made:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
                held[name] = None if tensor is None else made[id(tensor)]


def _process_bytes(prepared: Prepared) -> int:
    """Resident memory of this process once it holds what a run's process holds beside its models: the tasks, and the
    libraries after a first forward and backward (of the smallest model that there is)."""
    if prepared.config.engine.name == "local":
        model: Any = models.load(models.resolve(f"tiny:{models.SMALLEST // 1000}k"), dtype=torch.float32)
        model(input_ids=torch.zeros(64, 32, dtype=torch.long), use_cache=False).logits.float().log_softmax(
            -1
        ).sum().backward()
        del model
    if any(agent.lora for agent in prepared.config.agents):
        importlib.import_module("peft")
    statm = Path("/proc/self/statm")
    if statm.is_file():
        return int(statm.read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- disk ------------------------------------------------------------------------------------------------------


def _disk(prepared: Prepared, team: Sequence[_Member], update: Rehearsal) -> Record:
    """Bytes on disk: what an accepted update writes, what is kept after the last one, and what is written in all."""
    config = prepared.config
    a = config.algorithm
    version = {m.agent: _version_bytes(m) for m in team}
    masters = {m.agent: 0 if m.serves_masters else 4 * m.parameters for m in team}
    training = {m.agent: _blocks(8 * m.parameters + masters[m.agent]) for m in team}
    names = [m.agent for m in team if m.is_trained]
    files: dict[AgentId, Record] = {}
    for m in team:
        has_file = m.is_trained and not m.serves_masters
        files[m.agent] = {
            "weights": f"state/{m.agent}/v00000",
            "training": f"state/{m.agent}/training-start.safetensors" if has_file else None,
        }
    points: list[tuple[bool, dict[AgentId, Record]]] = [(True, dict(files))]
    counts = dict.fromkeys(names, 0)
    steps = _turns(a, tuple(names), config.seed)
    for index, (_, agent) in enumerate(steps):
        counts[agent] += 1
        training_file = f"state/{agent}/training-{index:06d}.safetensors"
        files = {**files, agent: {"weights": f"state/{agent}/v{counts[agent]:05d}", "training": training_file}}
        points.append((not a.shares_episodes or (index + 1) % len(names) == 0, files))

    def held(path: str) -> int:
        agent = path.split("/")[1]
        # No moments yet beside the masters of the start.
        return version[agent] if "/v" in path else _blocks(masters[agent]) if "-start." in path else training[agent]

    state = sum(held(path) for path in kept_files(points, config.checkpoint))
    logs = {
        "episodes": _episodes_bytes(prepared, {"train": update.train, "probe": update.probe_until[names[len(names) // 2]]}),
        "divergences": _blocks(3_000 + 9 * max(probe.n_act for probe in update.probes.values())),
        "journal": 3_000 + 400 * len(names),
    }
    per_update = {n: version[n] + training[n] + sum(logs.values()) for n in names}
    rows = len(steps) * sum(logs.values()) + _episodes_bytes(prepared, {"start": update.train[:START_PROMPTS]})
    if measured := _ordering_episodes(a):
        ordering = (
            _episodes_bytes(prepared, {"order": update.train[:measured]}) * measured // min(measured, len(update.train))
        )
        logs["ordering, once a stage"] = ordering
        rows += ordering * a.stages
    return {
        "accepted_update": per_update,
        "weights_of_a_version": version,
        "training_state": {n: training[n] for n in names},
        "logs_of_an_update": logs,
        "kept": {"state": state, "logs": rows, "total": state + rows},
        # A new version is whole before an old one goes.
        "most": state + rows + max(version[n] + training[n] for n in names),
        "written": rows + sum(counts[n] * (version[n] + training[n]) for n in names),
    }


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _version_bytes(m: _Member) -> int:
    """A version's folder: weights as served beside copies of tokenizer, template and configs. Of an adapter, and of an agent
    that nobody trained, it is as large as the folder that it came in."""
    if not m.layers:
        return _blocks(m.served if m.is_trained else 0) + BLOCK
    if m.lora or not m.learns:
        files = [f for f in m.folder.iterdir() if f.is_file() and not f.name.startswith(".")]
        return sum(_blocks(f.stat().st_size) for f in files) + BLOCK
    copied = [f for f in m.folder.iterdir() if f.suffix in {".json", ".jinja", ".txt", ".model"}]
    copied = [f for f in copied if not f.name.endswith(".index.json")]
    return _blocks(m.served) + sum(_blocks(f.stat().st_size) for f in copied) + BLOCK


def _episodes_bytes(prepared: Prepared, used: Mapping[str, Sequence[Episode]]) -> int:
    """On disk: a parquet file of these episodes by their use, written to memory."""
    tasks = {t.id: t.prompt for t in (*prepared.splits.train, *prepared.splits.probe)}
    rows = [row for use, episodes in used.items() for row in records.episode_rows(episodes, use=use, prompts=tasks)]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=records.EPISODES), sink, compression="zstd")
    return _blocks(sink.tell())


# ---- time ------------------------------------------------------------------------------------------------------

PARTS = ("sample", "read", "step", "gate", "publish", "snapshots", "write")
"""Parts of an update's seconds: playing; replay and anchors; optimiser steps; one look; publication with its proof; the
state to go back to (a copy, or what wakes a learner that left memory); files with their fsync. A stage has `order` beside
them where it measures who goes first."""


def _time(prepared: Prepared, team: Sequence[_Member], update: Rehearsal, reporter: Reporter) -> Record:
    """Seconds of an update of an agent, a stage and the run, by part; none where this machine cannot hold the test."""
    config = prepared.config
    a = config.algorithm
    load, usable = os.getloadavg()[0], cores()
    needed, free = max(40 * _few_parameters(m) for m in team), _available()
    if needed > free // 2:
        why = f"not timed: a few layers of the largest model need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        return {"measured": why, "stage": None, "run": None}
    measured = _measured(prepared, team, update, reporter)
    trained = [m for m in team if m.is_trained]

    def played(episodes: Sequence[Episode], *, by: frozenset[AgentId] | None = None) -> float:
        turns = [t for e in episodes for t in e.turns if by is None or t.agent in by]
        return sum((measured[t.agent]["request"] if t.ids else 0.0) + update.seconds_per_turn for t in turns)

    collected = played(update.train)
    updates: dict[AgentId, dict[str, float]] = {}
    for m in trained:
        if a.name == "joint":  # one collection for all
            sample = (collected + played(update.probe)) / len(trained)
        elif a.shares_episodes:  # and scored again for the teammates before it that have changed: on average half of them
            others = frozenset(n.agent for n in trained) - {m.agent}
            sample = collected / len(trained) + played(update.probe_until[m.agent]) + played(update.train, by=others) / 2
        else:
            sample = collected + played(update.probe_until[m.agent])
        updates[m.agent] = {"sample": sample, **{part: measured[m.agent][part] for part in PARTS[1:]}}
    stage = {part: sum(one[part] for one in updates.values()) for part in PARTS}
    if measured_on := _ordering_episodes(a):
        scored = sum(measured[m.agent]["score"] for m in trained) * measured_on
        stage["order"] = collected * measured_on / len(update.train) + scored
    total = sum(stage.values())
    # A backward is two forwards, of an adapter about one; a mask over the whole batch takes a forward of its own.
    more = 1 if a.objective.loss(penalty=0.0).needs_batch else 0
    flops = sum(
        ((2 if m.lora else 3) + more) * m.forward_flops * int(update.batches[m.agent].batch.lengths.sum()) for m in trained
    )
    few = any(m.whole >= SMALL for m in team)
    return {
        "measured": "a few layers of each model, with random weights" if few else "each model as it is",
        "update": {agent: {**parts, "total": sum(parts.values())} for agent, parts in updates.items()},
        "stage": {**stage, "total": total},
        "run": total * a.stages,
        "busy": f"{load:.1f} other processes want {usable:g} cores" if load > usable / 2 else "",
        "warm_starts_at_most": _warm_seconds(config, team, update, measured),
        "step_gflops": flops / 1e9,
        "step_gflops_per_second": flops / 1e9 / max(1e-9, stage["step"]),
    }


def _measured(
    prepared: Prepared, team: Sequence[_Member], update: Rehearsal, reporter: Reporter
) -> dict[AgentId, dict[str, float]]:
    """Seconds of each part of each agent's update at all its layers; `request` is one message's share of a decode batch,
    `score` (where an order is measured) one episode's of a gradient. A frozen agent has requests alone.

    Agents on one large model are timed once; what depends on tokens is then scaled by theirs.
    """
    found: dict[AgentId, dict[str, float]] = {}
    timed: dict[tuple[Path, int], _Member] = {}
    with tempfile.TemporaryDirectory(prefix=".baton-plan-", dir=_writable()) as name:
        for n, m in enumerate(sorted(team, key=lambda m: not m.learns), start=1):
            reporter.progress("timing", n, len(team), m.agent)
            if m.whole < SMALL:
                found[m.agent] = complete(_timed_update(prepared, m, m.folder, update, Path(name)))
                continue
            twin = timed.setdefault((m.base, m.parameters), m)
            if twin is m:
                depths = sorted({1, min(FEW_LAYERS, m.layers)})
                folders = [_cut_down(m, depth, Path(name) / f"{n}-{depth}") for depth in depths]
                spent = [complete(_timed_update(prepared, m, folder, update, Path(name))) for folder in folders]
                found[m.agent] = _extended(spent, depths, m.layers)
                continue
            own, other = (update.batches[x.agent].batch.lengths.sum() for x in (m, twin))
            ratio = float(own) / float(other)
            scaled = {"request", "read", "step", "gate", "score"}
            found[m.agent] = {part: s * ratio if part in scaled else s for part, s in found[twin.agent].items()}
    return found


def _few_parameters(m: _Member) -> int:
    """Parameters of what is timed for a model."""
    ends = m.vocabulary * m.width
    return m.whole if m.whole < SMALL else ends + (m.whole - ends) * min(FEW_LAYERS, m.layers) // m.layers


def _available() -> int:
    info = Path("/proc/meminfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _writable() -> str | None:
    """Where runs would lie, if that can be written: its disk is the one that counts."""
    here = Path("runs") if Path("runs").is_dir() else Path()
    return str(here) if os.access(here, os.W_OK) else None


def _extended(spent: Sequence[Mapping[str, float]], depths: Sequence[int], layers: int) -> dict[str, float]:
    """Seconds at all layers: those of one layer, and for each further one what the few took each."""
    one, few = spent[0], spent[-1]
    further = max(1, depths[-1] - depths[0])
    each = {part: max(0.0, few[part] - one[part]) / further for part in one}
    return {part: one[part] + each[part] * (layers - depths[0]) for part in one}


def _cut_down(m: _Member, depth: int, folder: Path) -> Path:
    """A model folder of this architecture and width with `depth` layers and random weights; of an adapter a fresh one of its
    kind on such a model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = cast(Any, AutoConfig).from_pretrained(m.base, local_files_only=True)
    changed: dict[str, Any] = {"num_hidden_layers": depth}
    if getattr(settings, "layer_types", None):
        changed["layer_types"] = list(settings.layer_types[:depth])
    for name, value in changed.items():
        setattr(settings, name, value)
    with models.quiet(), torch.random.fork_rng(devices=[]):
        model = cast(Any, AutoModelForCausalLM).from_config(settings, dtype=m.serve)
    tensors = {name: tensor.clone() for name, tensor in models.held_tensors(model).items()}
    models.save(folder, Weights(tensors=tensors, checksums={}, fingerprint=""), source=m.base)
    (folder / "config.json").write_text(json.dumps(models.read_config(folder) | changed), encoding="utf-8")
    if m.lora:
        return adapters.start(folder, str(folder), m.lora, at=("plan",), cache=folder.parent)
    return folder


async def _timed_update(prepared: Prepared, m: _Member, folder: Path, update: Rehearsal, scratch: Path) -> dict[str, float]:
    """Seconds of each part of one update of `m` with the model in `folder`, by the engine's own calls."""
    config = prepared.config
    if m.layers:
        precision = {"dtype": str(m.serve).removeprefix("torch."), "compute": m.compute}
        config = config.model_copy(update={"engine": config.engine.model_copy(update=precision)})
    crew = assemble.crew(config, {m.agent: folder}, learners=[m.agent] if m.learns else [])
    sampler = crew.sampler
    seconds = {"request": await _request_seconds(m, sampler, update, config.engine.batch_size, prepared)}
    if not m.learns:
        return seconds
    learner = crew.learners[m.agent]
    await sampler.publish(m.agent, "promoted", learner.weights(), 0)
    batch = update.batches[m.agent].batch
    parts = batching.parts(update.batches[m.agent], config.algorithm.inner_steps)
    part, scale = _one_micro_batch(parts[0], config.engine.micro_tokens)
    probe = update.probes.get(m.agent, part.batch)
    learner.remember(part.batch)  # the first call warms the libraries
    read, anchor = _spent(lambda: learner.remember(part.batch))
    read_probe, at = _spent(lambda: learner.remember(probe))
    seconds["read"] = read * scale * len(parts) + read_probe
    options = config.algorithm
    objective = options.objective.loss(penalty=options.penalty.start)

    def step() -> object:
        return learner.step(part, objective, lr=1e-9, anchor=anchor if objective.needs_kl else None)

    step()
    seconds["step"] = _spent(step)[0] * scale * len(parts)
    seconds["gate"], _ = _spent(lambda: learner.divergence(probe, at))
    copied, _ = _spent(learner.snapshot)
    seconds["snapshots"] = copied
    made, weights = _spent(learner.weights)
    if not m.leaves:  # a slot that stays is loaded once
        await sampler.publish(m.agent, "candidate", weights, 1)
    began = time.monotonic()
    await sampler.publish(m.agent, "candidate", weights, 2)
    turns = [t for e in update.probe[:4] for t in e.turns if t.agent == m.agent]
    await sampler.score(
        [
            ScoreRequest(agent=m.agent, slot="candidate", prompt_ids=t.prompt_ids, ids=t.ids, temperature=probe.temperature)
            for t in turns
        ]
    )
    seconds["publish"] = made + time.monotonic() - began
    if options.is_measured:
        few = update.batches[m.agent].rows(batch.episode.lt(4).nonzero()[:, 0].tolist())
        seconds["score"] = _spent(lambda: learner.score_gradients(few))[0] / len(set(few.batch.episode_ids))
    rows = records.episode_rows((*update.train, *update.probe), use="train", prompts={})
    snapshot = learner.snapshot(lend=True)

    def write() -> None:
        records.write_folder(scratch / "version", lambda partial: crew.save(m.agent, partial, weights))
        with_masters = not crew.serves_masters(m.agent)
        records.save_training(scratch / "training.safetensors", snapshot, with_masters=with_masters)
        records.write_episodes(scratch / "episodes.parquet", rows)
        records.write_file(scratch / "divergences.parquet", lambda partial: cast("None", partial.write_bytes(bytes(4000))))
        records.write_text(scratch / "team.json", "{}")
        for _ in range(2):
            records.append_record(scratch / "lines.jsonl", {"kind": "begin", "text": "x" * 3000})

    seconds["write"], _ = _spent(write)
    if m.leaves:
        files: Record = {"weights": "version", "training": "training.safetensors", "steps": snapshot.steps}
        del snapshot
        crew.rest(m.agent, partial(saved_state, Run(scratch), crew, m.agent, files))
        began = time.monotonic()
        assert learner.awake
        seconds["snapshots"] = time.monotonic() - began
    return seconds


async def _request_seconds(m: _Member, sampler: Sampler, update: Rehearsal, batch_size: int, prepared: Prepared) -> float:
    """Seconds of one message in a full decode batch of this agent's own prompts."""
    seat = next(s for s in prepared.seats if s.agent == m.agent)
    turns = [t for e in update.train for t in e.turns if t.agent == m.agent][:batch_size]
    requests = [
        Request(
            id=str(n),
            agent=m.agent,
            slot="promoted",
            prompt_ids=t.prompt_ids,
            max_new_tokens=len(t.ids),
            temperature=seat.temperature,
            key=key("plan", n),
        )
        for n, t in enumerate(turns)
    ]
    spent: list[float] = []
    for _ in range(4):  # the first warms the libraries
        began = time.monotonic()
        async for _said in sampler.submit(requests):
            pass
        spent.append(time.monotonic() - began)
    return statistics.median(spent[1:]) / len(requests)


def _one_micro_batch(part: AdvantageBatch, micro_tokens: int) -> tuple[AdvantageBatch, float]:
    """A part of an update, or the first of its micro-batches where there are several, and how many times as much it is."""
    chunks = batching.micro_batches(part.batch, max_tokens=micro_tokens)
    if len(chunks) == 1:
        return part, 1.0
    padded = [rows * width for rows, width, _ in (_shape(part.batch, chunk) for chunk in chunks)]
    return part.rows(list(chunks[0])), sum(padded) / padded[0]


def _warm_seconds(
    config: Config, team: Sequence[_Member], update: Rehearsal, measured: Mapping[AgentId, Mapping[str, float]]
) -> float:
    """Seconds of all warm starts if none reaches its target early and none is cached. Starts that are shared count once."""
    each: dict[object, float] = {}
    here = {m.agent: m for m in team}
    for agent in config.agents:
        warm = agent.warm_start
        if warm is not None:
            m = here[agent.name]
            batch = update.batches[m.agent].batch
            per_row = measured[m.agent]["step"] / batch.n_rows
            reads = warm.steps // warm.check_every * warm.held_out * measured[m.agent]["read"] / batch.n_rows
            own = (m.base, warm.model_dump_json()) if warm.seats == "all" else agent.name
            each[own] = warm.steps * warm.batch * per_row + reads
    return sum(each.values())


def _spent(action: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result): of one call, or where it is short the median of several."""
    spent: list[float] = []
    result = None
    while not spent or (sum(spent) < 0.3 and len(spent) < 7):
        began = time.monotonic()
        result = action()
        spent.append(time.monotonic() - began)
    return statistics.median(spent), result


# ---- the speed limit -------------------------------------------------------------------------------------------


def _limits(config: Config, update: Rehearsal, start: float, goal: float) -> Record:
    """The fewest accepted updates from `start` to `goal` that each radius allows (ALGORITHMS 2.13), and whether the plan's
    updates can be enough.

    An accepted update of an agent with L tokens an episode moves the law of the team's answer by at most sqrt(2 L delta) of
    Fisher-Rao length; what all agents' updates of a stage allow adds up.
    """
    way = trust_region.fisher_rao(start, goal)
    direction = config.gate.direction
    rows: list[Record] = []
    reach = {"token": 0.0, "message_mean": 0.0}
    for agent in config.agents:
        if not agent.trainable:
            continue
        radius = config.radius(agent)
        length = update.batches[agent.name].batch.n_act / len(update.train)
        row: Record = {"agent": agent.name, "tokens": length}
        for name, delta in (("token", radius.token), ("message_mean", radius.message_mean)):
            allowed = delta * max(1.0, length)
            reach[name] += math.sqrt(2.0 * allowed)
            row[name] = {
                "delta": delta,
                "updates": math.ceil(trust_region.speed_limit(start, goal, delta=allowed)),
            }
            if row[name]["updates"] <= 10_000:  # each step is searched for: a tiny radius would take minutes
                row[name]["greedy"] = trust_region.greedy_exact_steps(start, goal, delta=allowed, direction=direction)
        rows.append(row)
    stages = config.algorithm.stages
    needed = {name: math.ceil(way / each - 1e-12) for name, each in reach.items()}
    warnings = [
        f"the {name} radii allow {start:g} -> {goal:g} in no fewer than {n} stages, the plan has {stages}: raise "
        "algorithm.stages or the radii"
        for name, n in needed.items()
        if n > stages
    ]
    return {
        "from": start,
        "to": goal,
        "length": way,
        "direction": direction,
        "is_exact": direction == "max",
        "agents": rows,
        "stages_needed": needed,
        "stages": stages,
        "warnings": warnings,
    }
