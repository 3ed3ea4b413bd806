"""What a run will take, said before any of its models loads: memory, disk, time, tokens, and the fewest accepted updates
that its trust regions allow (ALGORITHMS 2.13).

Configs, tokenizers, tasks and safetensors headers are read; weights are not. Three things stand in for the run:

- one update's episodes, rendered by the protocol itself with messages of the expected length: they give every shape;
- each model's own forward and backward traced on tensors without storage: they give the activations;
- a few layers of each model with random weights, run through the engine itself: they give the speed of this machine.

Everything assumes updates that are accepted whole. What shrinks or is rejected writes less and looks more often.
"""

from __future__ import annotations

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
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baton import assemble, records
from baton.algorithms import sat
from baton.assemble import Plan as Prepared
from baton.config import Config
from baton.core import batching, divergence, losses, trust_region
from baton.core.keyed import key, uniforms
from baton.doctor import cores
from baton.engines import local, models
from baton.engines.engine import Request, Sampler, ScoreRequest
from baton.engines.table import symbols_of
from baton.errors import ConfigError
from baton.records import Record
from baton.rollout import Seat
from baton.run import Reporter, Silent, complete, kept_files
from baton.types import AdvantageBatch, AgentId, Episode, Scored, Task, TokenBatch, Turn, Weights

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
    team = [_Member.of(prepared, seat, update) for seat in prepared.seats]
    reporter.say("tracing each model without its weights")
    memory = _memory(prepared, team, update)
    disk = _disk(prepared, team, update)
    reporter.say("timing a few layers of each model with random weights")
    seconds = _time(prepared, team, update, reporter)
    return {
        "kind": "plan",
        "agents": [member.record(prepared) for member in team],
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
    probe: tuple[Episode, ...]
    """Whole episodes; each agent's gate hears them until its own last turn."""
    batches: Mapping[AgentId, AdvantageBatch]
    probes: Mapping[AgentId, TokenBatch]
    expected: Mapping[AgentId, str]
    """Where each agent's message length comes from."""
    seconds_per_turn: float
    """Of rendering and encoding alone: what playing costs beside the model."""

    def probe_until(self, agent: AgentId) -> list[Episode]:
        """The probe episodes as this agent's gate has them played."""
        return [replace(e, turns=_until(e.turns, agent)) for e in self.probe]

    def record(self) -> Record:
        """Sizes of the update's batches, per agent."""
        return {
            agent: {
                "rows": batch.batch.n_rows,
                "longest_row": int(batch.batch.lengths.max()),
                "trained_tokens": int(batch.batch.lengths.sum()),
                "own_tokens": batch.batch.n_act,
                "gate_states": self.probes[agent].n_act,
                "message_length": self.expected[agent],
            }
            for agent, batch in self.batches.items()
        }

    def tokens(self, config: Config) -> Record:
        """Tokens that the team generates in a stage and in the run, probe episodes apart."""
        names = [a.name for a in config.agents]
        sampled = _generated(self.train) * (1 if config.algorithm.name == "joint" else len(names))
        if config.algorithm.name == "joint":
            probed = _generated(self.probe)
        else:
            probed = sum(_generated(self.probe_until(name)) for name in names)
        stages = config.algorithm.stages
        return {"stage": {"train": sampled, "probe": probed}, "run": {"train": sampled * stages, "probe": probed * stages}}


def _generated(episodes: Sequence[Episode]) -> int:
    return sum(len(t.ids) for e in episodes for t in e.turns)


def _until(turns: tuple[Turn, ...], agent: AgentId) -> tuple[Turn, ...]:
    last = max((n for n, turn in enumerate(turns) if turn.agent == agent), default=-1)
    return turns[: last + 1]


def rehearsed(prepared: Prepared, answer_tokens: int | None = None) -> Rehearsal:
    """One update's episodes as the protocol would have them, without a model: prompts are real, messages have the expected
    length, log-probabilities and rewards are made up."""
    config = prepared.config
    a = config.algorithm
    group = 4 if a.group == "auto" else a.group
    prompts = a.episodes // group * (len(config.agents) if a.name == "joint" else 1)
    messages = [_message(prepared, i, answer_tokens) for i in range(len(prepared.seats))]
    said = [one for one, _ in messages]
    began = time.monotonic()
    train = [_episode(prepared, task, sibling, said) for task in prepared.splits.train[:prompts] for sibling in range(group)]
    probe = [_episode(prepared, task, 0, said) for task in prepared.splits.probe[: config.gate.probe_prompts]]
    spent = time.monotonic() - began
    batches: dict[AgentId, AdvantageBatch] = {}
    probes: dict[AgentId, TokenBatch] = {}
    versions = {seat.agent: 0 for seat in prepared.seats}
    for seat in prepared.seats:
        rows = [t for e in train for t in batching.trajectories(e, seat.agent)]
        signs = {e.id: 1.0 if n % 2 else -1.0 for n, e in enumerate(train)}
        batch = batching.token_batch(rows, temperature=seat.temperature)
        batches[seat.agent] = batching.with_advantages(batch, signs, team=versions)
        rows = [t for e in probe for t in batching.trajectories(e, seat.agent)]
        probes[seat.agent] = batching.token_batch(rows, temperature=seat.temperature)
    return Rehearsal(
        train=tuple(train),
        probe=tuple(probe),
        batches=batches,
        probes=probes,
        expected={seat.agent: why for seat, (_, why) in zip(prepared.seats, messages, strict=True)},
        seconds_per_turn=spent / sum(len(e.turns) for e in (*train, *probe)),
    )


Said = Callable[[Task, int], tuple[int, ...]]
"""The ids of a seat's message on a task, for one of its siblings."""


def _message(prepared: Prepared, index: int, answer_tokens: int | None) -> tuple[Said, str]:
    """(what a seat says, where the length of it comes from)."""
    seat, agent, env = prepared.seats[index], prepared.config.agents[index], prepared.env
    warm = agent.warm_start
    is_shown = warm is not None and warm.source == "env" and env.demonstration(prepared.splits.train[0], index) is not None
    if answer_tokens is None and seat.max_new_tokens > 1 and is_shown:

        def shown(task: Task, sibling: int) -> tuple[int, ...]:
            demo = env.demonstration(task, index)
            return seat.codec.reply(demo.reply if demo else "")[: seat.max_new_tokens]

        return shown, "as demonstrated"
    length = min(answer_tokens or seat.max_new_tokens, seat.max_new_tokens)
    if prepared.config.engine.name == "table":
        words = list(symbols_of(agent.model))
    else:
        words = [f" {word}" for task in prepared.splits.train[:32] for word in task.prompt.split()] or [" a"]

    def filled(task: Task, sibling: int) -> tuple[int, ...]:
        """Words of the prompts in a keyed order: as long as is wanted, and no easier to compress than answers are."""
        draws = uniforms([key("plan", task.id, sibling, index)], length)[0]
        ids = seat.codec.reply("".join(words[int(draw * len(words))] for draw in draws))
        while len(ids) < length:
            ids = (*ids[:-1], *ids)
        return ids[:length]

    return filled, "as given" if answer_tokens else "agents.max_new_tokens"


def _episode(prepared: Prepared, task: Task, sibling: int, said: Sequence[Said]) -> Episode:
    turns: list[Turn] = []
    while due := prepared.protocol.due(turns, 0):
        spoken: list[Turn] = []
        for index in due:
            seat = prepared.seats[index]
            ids = said[index](task, sibling)
            chances = uniforms([key("plan", task.id, sibling, index, "log-probabilities")], len(ids))[0]
            seen = prepared.protocol.messages(task, turns, index, seat.system)
            spoken.append(
                Turn(
                    kind="action",
                    agent=seat.agent,
                    seat=index,
                    text=seat.codec.decode(ids),
                    prompt_ids=seat.codec.encode(seen),
                    ids=ids,
                    # fp32 numbers, each its own: parquet must not compress what a run's would not.
                    logprobs=tuple(-float(np.float32(chance)) for chance in chances),
                    versions=(0,) * len(ids),
                )
            )
        turns += spoken
    return Episode(
        id=f"0/1/{prepared.seats[0].agent}/sample/{task.id}/{sibling}",
        group=task.id,
        task_id=task.id,
        versions={seat.agent: 0 for seat in prepared.seats},
        turns=tuple(turns),
        answer=turns[-1].text if turns else "",
        outcome=Scored(reward=0.0),
    )


# ---- the team's models -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Member:
    """What of an agent's model and batches decides about memory, disk and time. Bytes unless a name says otherwise."""

    agent: AgentId
    folder: Path
    parameters: int
    served: int
    """The served weights, once."""
    layers: int
    width: int
    vocabulary: int
    kv_per_token: int
    """Keys and values of one token."""
    compute: local.Compute
    item: int
    """Bytes of one served number."""

    @classmethod
    def of(cls, prepared: Prepared, seat: Seat, update: Rehearsal) -> _Member:
        folder = prepared.bases[seat.agent]
        if prepared.config.engine.name == "table":
            # A table's rows are made as states are met: as many as there are different prompts, of 8 bytes a logit.
            rows = len({t.prompt_ids for e in update.train for t in e.turns if t.agent == seat.agent})
            size = rows * len(symbols_of(next(a.model for a in prepared.config.agents if a.name == seat.agent)))
            shape: dict[str, Any] = {"layers": 0, "width": 0, "vocabulary": 0, "kv_per_token": 0}
            return cls(agent=seat.agent, folder=folder, parameters=size, served=8 * size, compute="float32", item=8, **shape)
        serve, compute = assemble.precision(prepared.config, prepared.bases)
        config = _text_config(folder)
        heads = int(config["num_attention_heads"])
        head = int(config.get("head_dim") or config["hidden_size"] // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        layers = int(config["num_hidden_layers"])
        return cls(
            agent=seat.agent,
            folder=folder,
            parameters=prepared.parameters[seat.agent],
            served=serve.itemsize * prepared.parameters[seat.agent],
            layers=layers,
            width=int(config["hidden_size"]),
            vocabulary=int(config["vocab_size"]),
            kv_per_token=2 * layers * kv_heads * head * serve.itemsize,
            compute=compute,
            item=serve.itemsize,
        )

    @property
    def serve(self) -> torch.dtype:
        return {2: torch.bfloat16, 4: torch.float32}.get(self.item, torch.float64)

    @property
    def serves_masters(self) -> bool:
        return self.item >= 4

    @property
    def forward_flops(self) -> float:
        """Products and sums of one token's forward, attention over the context left out."""
        inside = self.parameters - (self.vocabulary * self.width if self.layers else 0)
        return 2.0 * max(0, inside)

    def record(self, prepared: Prepared) -> Record:
        seat = next(s for s in prepared.seats if s.agent == self.agent)
        return {
            "agent": self.agent,
            "parameters": self.parameters,
            "serving": str(self.serve).removeprefix("torch."),
            "compute": self.compute,
            "max_new_tokens": seat.max_new_tokens,
        }


def _text_config(folder: Path) -> dict[str, Any]:
    config = models.read_config(folder)
    return cast("dict[str, Any]", config.get("text_config") or config)


# ---- memory ----------------------------------------------------------------------------------------------------

Phase = Literal["sample", "step", "gate", "commit"]
PHASES: tuple[Phase, ...] = ("sample", "step", "gate", "commit")


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One part of the memory of an update, in bytes, and the phases in which it is held."""

    name: str
    bytes: int
    phases: tuple[Phase, ...] = PHASES


def memory_terms(
    team: Sequence[_Member], mover: _Member, moved: frozenset[AgentId], *, has_start: bool, work: Mapping[str, int]
) -> list[Term]:
    """Everything that is held while `mover` is updated and the agents `moved` have been before: THE memory model.

    `work` are the parts that depend on shapes: process, activations, anchors, laws, decoding, kv.
    """
    p = mover.parameters
    had_moments = 8 * p if mover.agent in moved else 0
    before = 4 * p + had_moments
    after = 12 * p
    copies = [m for m in team if not m.serves_masters]
    return [
        Term(name="process: python, libraries, tasks", bytes=work["process"]),
        Term(name="sampler: promoted slots", bytes=sum(m.served for m in team)),
        Term(name="sampler: candidate slots", bytes=sum(m.served for m in team if m.agent in moved)),
        Term(name="sampler: candidate slot, new", bytes=0 if mover.agent in moved else mover.served, phases=("commit",)),
        Term(name="sampler: start slots", bytes=sum(m.served for m in team) if has_start else 0),
        Term(name="learners: fp32 masters", bytes=sum(4 * m.parameters for m in team)),
        Term(name="learners: served copies", bytes=sum(m.served for m in copies)),
        Term(name="learners: AdamW moments", bytes=sum(8 * m.parameters for m in team if m.agent in moved)),
        Term(name="moments, new", bytes=8 * p - had_moments, phases=("step", "gate", "commit")),
        Term(name="gradients", bytes=4 * p, phases=("step",)),
        Term(name="snapshot before the step", bytes=before, phases=("step", "gate", "commit")),
        Term(name="snapshot of the whole step (line search)", bytes=after, phases=("gate", "commit")),
        Term(name="blend of two snapshots (line search)", bytes=4 * p, phases=("gate",)),
        Term(name="snapshot to write", bytes=after, phases=("commit",)),
        Term(name="weights to publish", bytes=mover.served, phases=("commit",)),
        Term(name="anchors: hidden states and unembeddings", bytes=work["anchors"], phases=("step", "gate", "commit")),
        Term(name="activations and logits of the biggest micro-batch", bytes=work["activations"], phases=("step",)),
        Term(name="laws at the probe states", bytes=work["laws"], phases=("gate",)),
        Term(name="decode batch: activations and laws", bytes=work["decoding"], phases=("sample",)),
        Term(name="decode batch: keys and values", bytes=work["kv"], phases=("sample",)),
    ]


def _memory(prepared: Prepared, team: Sequence[_Member], update: Rehearsal) -> Record:
    """Terms at the moment of the highest sum over the updates of the first two stages; later ones repeat the second."""
    config = prepared.config
    process = _process_bytes(prepared)
    by_name = {m.agent: m for m in team}
    two = config.algorithm.model_copy(update={"stages": min(2, config.algorithm.stages)})
    work = {m.agent: {"process": process, **_work(config, m, update)} for m in team}
    decoding = {part: max(w[part] for w in work.values()) for part in ("decoding", "kv")}
    moved: frozenset[AgentId] = frozenset()
    best: tuple[int, str, Phase, list[Term]] | None = None
    for _, agent in sat.plan(two, tuple(by_name), config.seed):
        terms = memory_terms(
            team,
            by_name[agent],
            moved,
            has_start=config.algorithm.name == "independent",
            work={**work[agent], **decoding},
        )
        for phase in PHASES:
            total = sum(t.bytes for t in terms if phase in t.phases)
            if best is None or total > best[0]:
                best = (total, agent, phase, terms)
        moved |= {agent}
    assert best is not None
    total, agent, phase, terms = best
    phases = {name: sum(t.bytes for t in terms if name in t.phases) for name in PHASES}
    found: Record = {"peak": total, "at": {"agent": agent, "phase": phase}, "phases": phases}
    held = [t for t in terms if phase in t.phases and t.bytes]
    for name in by_name:
        warm = _warm_terms(prepared, by_name[name], update, process)
        phases["warm start"] = max(phases.get("warm start", 0), sum(t.bytes for t in warm))
        if sum(t.bytes for t in warm) > found["peak"]:
            found |= {"peak": sum(t.bytes for t in warm), "at": {"agent": name, "phase": "warm start"}}
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
    step = traced(m.folder, rows=rows, width=longest, states=states, compute=m.compute, kl=False)
    p = m.parameters
    return [
        Term(name="process: python, libraries, tasks", bytes=process),
        Term(name="learner: masters and moments", bytes=12 * p + (0 if m.serves_masters else m.served)),
        Term(name="gradients", bytes=4 * p),
        Term(name="activations and logits of the biggest micro-batch", bytes=max(0, step - 4 * p)),
        # A few Python objects each, and two tuples of its ids.
        Term(name="demonstrations", bytes=warm.demonstrations * (1000 + 16 * longest)),
    ]


def _work(config: Config, m: _Member, update: Rehearsal) -> dict[str, int]:
    """Bytes of an agent's update that follow from the shapes of its batches."""
    batch, probe = update.batches[m.agent], update.probes[m.agent]
    if not m.layers:
        return {"activations": 0, "anchors": 0, "laws": 0, "decoding": 0, "kv": 0}
    parts = [part.batch for part in batching.parts(batch, config.algorithm.inner_steps)]
    shapes = {
        _shape(part, rows) for part in parts for rows in batching.micro_batches(part, max_tokens=config.engine.micro_tokens)
    }
    rows, width, states = max(shapes, key=lambda shape: (shape[0] * shape[1], shape[2]))
    has_kl = config.algorithm.penalty.start > 0
    step = traced(m.folder, rows=rows, width=width, states=states, compute=m.compute, kl=has_kl)
    head = m.vocabulary * m.width * m.item
    anchors = (len(parts) + 1) * head + (batch.batch.n_act + probe.n_act) * m.width * m.item
    seen = min(probe.n_act, max(1, local.CHUNK // m.vocabulary))
    # Two laws and what the two directions of their divergence need beside them: eight numbers an entry, as traced.
    laws = 8 * 4 * seen * m.vocabulary
    prompts = [(len(t.prompt_ids), len(t.ids), t.prompt_ids) for e in update.train for t in e.turns if t.agent == m.agent]
    longest, answer = max(p for p, _, _ in prompts), max(a for _, a, _ in prompts)
    lines = min(config.engine.batch_size, len(prompts))
    distinct = min(lines, len({ids for _, _, ids in prompts}))
    prefill = traced(m.folder, rows=distinct, width=longest, states=0, compute="float32", kl=False, serve=m.serve)
    # A law in fp32 with its logits, then its exponential and its running sum in fp64.
    drawing = (4 + 4 + 4 + 8) * min(len(prompts), config.engine.batch_size * (1 if answer > 1 else 4)) * m.vocabulary
    kv = (lines * (longest + answer) + distinct * longest) * m.kv_per_token if answer > 1 else 0
    return {
        "activations": max(0, step - 4 * m.parameters),
        "anchors": anchors,
        "laws": laws,
        "decoding": prefill + drawing,
        "kv": kv,
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
    serve: torch.dtype = torch.float32,
) -> int:
    """Most bytes held at once, beside the weights, by a forward and backward of this model on [rows, width] tokens with the
    loss at `states` of them (0: a forward alone, in the serving dtype), as `LocalLearner.step` does it.

    The model is its own code on tensors without storage: no weight is read, nothing is computed.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM

    live = _Live()
    with models.quiet(), torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True):
        settings = cast(Any, AutoConfig).from_pretrained(folder, local_files_only=True)
        model = cast(Any, AutoModelForCausalLM).from_config(settings, dtype=serve, attn_implementation="sdpa").eval()
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


def _process_bytes(prepared: Prepared) -> int:
    """Resident memory of this process once it holds what a run's process holds beside its models: the tasks, and the
    libraries after a first forward and backward (of the smallest model that there is)."""
    if prepared.config.engine.name == "local":
        model: Any = models.load(models.resolve(f"tiny:{models.SMALLEST // 1000}k"), dtype=torch.float32)
        model(input_ids=torch.zeros(64, 32, dtype=torch.long), use_cache=False).logits.float().log_softmax(
            -1
        ).sum().backward()
        del model
    statm = Path("/proc/self/statm")
    if statm.is_file():
        return int(statm.read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- disk ------------------------------------------------------------------------------------------------------


def _disk(prepared: Prepared, team: Sequence[_Member], update: Rehearsal) -> Record:
    """Bytes on disk: what an accepted update writes, what is kept after the last one, and what is written in all."""
    config = prepared.config
    version = {m.agent: _version_bytes(m) for m in team}
    training = {m.agent: _blocks(8 * m.parameters + (0 if m.serves_masters else 4 * m.parameters)) for m in team}
    names = [m.agent for m in team]
    files: dict[AgentId, Record] = {}
    for m in team:
        start = None if m.serves_masters else f"state/{m.agent}/training-start.safetensors"
        files[m.agent] = {"weights": f"state/{m.agent}/v00000", "training": start}
    points: list[tuple[bool, dict[AgentId, Record]]] = [(True, dict(files))]
    counts = dict.fromkeys(names, 0)
    steps = sat.plan(config.algorithm, tuple(names), config.seed)
    for index, (_, agent) in enumerate(steps):
        counts[agent] += 1
        training_file = f"state/{agent}/training-{index:06d}.safetensors"
        files = {**files, agent: {"weights": f"state/{agent}/v{counts[agent]:05d}", "training": training_file}}
        points.append((config.algorithm.name != "joint" or (index + 1) % len(names) == 0, files))
    kept = kept_files(points, config.checkpoint)
    state = sum((version if "/v" in path else training)[path.split("/")[1]] for path in kept)
    logs = {
        "episodes": _blocks(_episodes_bytes(prepared, update)),
        "divergences": _blocks(3_000 + 9 * max(probe.n_act for probe in update.probes.values())),
        "journal": 3_000 + 400 * len(names),
    }
    per_update = {m.agent: version[m.agent] + training[m.agent] + sum(logs.values()) for m in team}
    rows = len(steps) * sum(logs.values())
    return {
        "accepted_update": per_update,
        "weights_of_a_version": version,
        "training_state": training,
        "logs_of_an_update": logs,
        "kept": {"state": state, "logs": rows, "total": state + rows},
        # A new version is whole before an old one goes.
        "most": state + rows + max(version[n] + training[n] for n in names),
        "written": rows + sum(counts[n] * (version[n] + training[n]) for n in names),
    }


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _version_bytes(m: _Member) -> int:
    """A version's folder: weights in the serving dtype beside copies of tokenizer, template and configs."""
    if not m.layers:
        return _blocks(m.served) + BLOCK
    copied = [f for f in m.folder.iterdir() if f.suffix in {".json", ".jinja", ".txt", ".model"}]
    copied = [f for f in copied if not f.name.endswith(".index.json")]
    return _blocks(m.served) + sum(_blocks(f.stat().st_size) for f in copied) + BLOCK


def _episodes_bytes(prepared: Prepared, update: Rehearsal) -> int:
    """The parquet file of one update, written to memory."""
    tasks = {t.id: t.prompt for t in (*prepared.splits.train, *prepared.splits.probe)}
    middle = prepared.seats[len(prepared.seats) // 2].agent
    rows = records.episode_rows(update.train, use="train", prompts=tasks)
    rows += records.episode_rows(update.probe_until(middle), use="probe", prompts=tasks)
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=records.EPISODES), sink, compression="zstd")
    return sink.tell()


# ---- time ------------------------------------------------------------------------------------------------------

PARTS = ("sample", "read", "step", "gate", "publish", "snapshots", "write")
"""Parts of an update's seconds: playing; replay and anchors; optimiser steps; one look; publication with its proof; copies
for exact restore; files with their fsync."""


def _time(prepared: Prepared, team: Sequence[_Member], update: Rehearsal, reporter: Reporter) -> Record:
    """Seconds of an update of an agent, a stage and the run, by part; none where this machine cannot hold the test."""
    config = prepared.config
    load, usable = os.getloadavg()[0], cores()
    needed, free = max(40 * _few_parameters(m) for m in team), _available()
    if needed > free // 2:
        why = f"not timed: a few layers of the largest model need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        return {"measured": why, "stage": None, "run": None}
    measured = _measured(prepared, team, update, reporter)
    updates: dict[AgentId, dict[str, float]] = {}
    for m in team:
        own = measured[m.agent]
        played = [t for e in update.train for t in e.turns]
        if config.algorithm.name == "joint":  # one collection for all
            turns = [*played, *(t for e in update.probe for t in e.turns)]
            share = 1 / len(team)
        else:
            turns = [*played, *(t for e in update.probe_until(m.agent) for t in e.turns)]
            share = 1.0
        sample = sum(measured[t.agent]["request"] + update.seconds_per_turn for t in turns) * share
        updates[m.agent] = {"sample": sample, **{part: own[part] for part in PARTS[1:]}}
    stage = {part: sum(one[part] for one in updates.values()) for part in PARTS}
    total = sum(stage.values())
    trained = {m.agent: int(update.batches[m.agent].batch.lengths.sum()) for m in team}
    flops = sum(3 * m.forward_flops * trained[m.agent] for m in team)
    few = any(m.parameters >= SMALL for m in team)
    return {
        "measured": "a few layers of each model, with random weights" if few else "each model as it is",
        "update": {agent: {**parts, "total": sum(parts.values())} for agent, parts in updates.items()},
        "stage": {**stage, "total": total},
        "run": total * config.algorithm.stages,
        "busy": f"{load:.1f} other processes want {usable:g} cores" if load > usable / 2 else "",
        "warm_starts_at_most": _warm_seconds(config, team, update, measured),
        "step_gflops": flops / 1e9,
        "step_gflops_per_second": flops / 1e9 / max(1e-9, stage["step"]),
    }


def _measured(
    prepared: Prepared, team: Sequence[_Member], update: Rehearsal, reporter: Reporter
) -> dict[AgentId, dict[str, float]]:
    """Seconds of each part of each agent's update at all its layers; `request` is one message's share of a decode batch.

    Agents on one large model are timed once; what depends on tokens is then scaled by theirs.
    """
    found: dict[AgentId, dict[str, float]] = {}
    timed: dict[Path, _Member] = {}
    with tempfile.TemporaryDirectory(prefix=".baton-plan-", dir=_writable()) as name:
        for n, m in enumerate(team, start=1):
            reporter.progress("timing", n, len(team), m.agent)
            if m.parameters < SMALL:
                found[m.agent] = complete(_timed_update(prepared, m, m.folder, update, Path(name)))
                continue
            twin = timed.setdefault(m.folder, m)
            if twin is m:
                depths = sorted({1, min(FEW_LAYERS, m.layers)})
                folders = [_cut_down(m, depth, Path(name) / f"{n}-{depth}") for depth in depths]
                spent = [complete(_timed_update(prepared, m, folder, update, Path(name))) for folder in folders]
                found[m.agent] = _extended(spent, depths, m.layers)
                continue
            own, other = (update.batches[x.agent].batch.lengths.sum() for x in (m, twin))
            ratio = float(own) / float(other)
            scaled = {"request", "read", "step", "gate"}
            found[m.agent] = {part: s * ratio if part in scaled else s for part, s in found[twin.agent].items()}
    return found


def _few_parameters(m: _Member) -> int:
    """Parameters of what is timed for a model."""
    ends = m.vocabulary * m.width
    return m.parameters if m.parameters < SMALL else ends + (m.parameters - ends) * min(FEW_LAYERS, m.layers) // m.layers


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
    """A model folder of this architecture and width with `depth` layers and random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = cast(Any, AutoConfig).from_pretrained(m.folder, local_files_only=True)
    changed: dict[str, Any] = {"num_hidden_layers": depth}
    if getattr(settings, "layer_types", None):
        changed["layer_types"] = list(settings.layer_types[:depth])
    for name, value in changed.items():
        setattr(settings, name, value)
    with models.quiet(), torch.random.fork_rng(devices=[]):
        model = cast(Any, AutoModelForCausalLM).from_config(settings, dtype=m.serve)
    tensors = {name: tensor.clone() for name, tensor in models.held_tensors(model).items()}
    models.save(folder, Weights(tensors=tensors, checksums={}, fingerprint=""), source=m.folder)
    (folder / "config.json").write_text(json.dumps(models.read_config(folder) | changed), encoding="utf-8")
    return folder


async def _timed_update(prepared: Prepared, m: _Member, folder: Path, update: Rehearsal, scratch: Path) -> dict[str, float]:
    """Seconds of each part of one update of `m` with the model in `folder`, by the engine's own calls."""
    config = prepared.config
    if m.layers:
        precision = {"dtype": str(m.serve).removeprefix("torch."), "compute": m.compute}
        config = config.model_copy(update={"engine": config.engine.model_copy(update=precision)})
    crew = assemble.crew(config, {m.agent: folder}, learners=[m.agent])
    learner, sampler = crew.learners[m.agent], crew.sampler
    await sampler.publish(m.agent, "promoted", learner.weights(), 0)
    seconds = {"request": await _request_seconds(m, sampler, update, config.engine.batch_size, prepared)}

    parts = batching.parts(update.batches[m.agent], config.algorithm.inner_steps)
    part, scale = _one_micro_batch(parts[0], config.engine.micro_tokens)
    probe = update.probes[m.agent]
    learner.remember(part.batch)  # the first call warms the libraries
    read, anchor = _spent(lambda: learner.remember(part.batch))
    read_probe, at = _spent(lambda: learner.remember(probe))
    seconds["read"] = read * scale * len(parts) + read_probe
    options = config.algorithm
    objective = losses.Objective(weight=options.objective.weight_of(), penalty=options.penalty.start)

    def step() -> object:
        return learner.step(part, objective, lr=1e-9, anchor=anchor if objective.needs_kl else None)

    step()
    seconds["step"] = _spent(step)[0] * scale * len(parts)
    seconds["gate"], _ = _spent(lambda: learner.divergence(probe, at))
    copied, snapshot = _spent(learner.snapshot)
    seconds["snapshots"] = 2 * copied
    made, weights = _spent(learner.weights)
    await sampler.publish(m.agent, "candidate", weights, 1)  # the first publication loads the slot
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
    rows = records.episode_rows((*update.train, *update.probe), use="train", prompts={})

    def write() -> None:
        records.write_folder(scratch / "version", lambda partial: crew.save(m.agent, partial, weights))
        records.save_training(scratch / "training.safetensors", snapshot, with_masters=not crew.serves_masters)
        records.write_episodes(scratch / "episodes.parquet", rows)
        records.write_file(scratch / "divergences.parquet", lambda partial: cast("None", partial.write_bytes(bytes(4000))))
        records.write_text(scratch / "team.json", "{}")
        for _ in range(2):
            records.append_record(scratch / "lines.jsonl", {"kind": "begin", "text": "x" * 3000})

    seconds["write"], _ = _spent(write)
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
    for agent, m in zip(config.agents, team, strict=True):
        warm = agent.warm_start
        if warm is not None:
            batch = update.batches[m.agent].batch
            per_row = measured[m.agent]["step"] / batch.n_rows
            reads = warm.steps // warm.check_every * warm.held_out * measured[m.agent]["read"] / batch.n_rows
            own = (m.folder, warm.model_dump_json()) if warm.seats == "all" else agent.name
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
