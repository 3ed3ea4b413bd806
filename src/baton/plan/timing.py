"""Time of an update: a few layers of each model with random weights, run through the engine itself on this machine."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from baton import assemble, records
from baton.assemble import Plan as Prepared
from baton.config import Config
from baton.core import batching
from baton.core.keyed import key
from baton.doctor import cores
from baton.engines import adapters, models
from baton.engines.engine import Request, Sampler, ScoreRequest
from baton.host import Reporter, complete
from baton.journal import Run, saved_state
from baton.plan.members import Member
from baton.plan.rehearsal import Rehearsal, shape_of
from baton.plan.schedule import ordering_episodes, pair_episodes
from baton.records import Record
from baton.types import AdvantageBatch, AgentId, Episode, Weights

SMALL = 5_000_000
"""Parameters below which a model is timed as it is."""

FEW_LAYERS = 4
"""Layers of a larger model that are timed; one layer and these give the time of each further one."""

PARTS = ("sample", "read", "step", "gate", "publish", "snapshots", "write")
"""Parts of an update's seconds: playing; replay and anchors; optimiser steps; one look; publication with its proof; the
state to go back to (a copy, or what wakes a learner that left memory); files with their fsync. A stage has `order` beside
them where it measures who goes first."""


def record(prepared: Prepared, team: Sequence[Member], update: Rehearsal, reporter: Reporter) -> Record:
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
    if measured_on := ordering_episodes(a):
        scored = sum(measured[m.agent]["score"] for m in trained) * measured_on
        stage["order"] = collected * measured_on / len(update.train) + scored
    if most := pair_episodes(config.certificate, len(trained)):
        stage["pairs, at most"] = most * collected / len(update.train)
    if config.certificate.plays_out(config.gate):  # own messages of the probe episodes, by the decoding loop once more
        stage["surrogate"] = sum(played(update.probe, by=frozenset({m.agent})) for m in trained)
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
    prepared: Prepared, team: Sequence[Member], update: Rehearsal, reporter: Reporter
) -> dict[AgentId, dict[str, float]]:
    """Seconds of each part of each agent's update at all its layers; `request` is one message's share of a decode batch,
    `score` (where an order is measured) one episode's of a gradient. A frozen agent has requests alone.

    Agents on one large model are timed once; what depends on tokens is then scaled by theirs.
    """
    found: dict[AgentId, dict[str, float]] = {}
    timed: dict[tuple[Path, int], Member] = {}
    with tempfile.TemporaryDirectory(prefix=".baton-plan-", dir=_writable()) as name:
        # A plan that is killed leaves the folder: it is nobody's to commit.
        (Path(name) / ".gitignore").write_text("*\n")
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


def _few_parameters(m: Member) -> int:
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


def _cut_down(m: Member, depth: int, folder: Path) -> Path:
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


async def _timed_update(prepared: Prepared, m: Member, folder: Path, update: Rehearsal, scratch: Path) -> dict[str, float]:
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


async def _request_seconds(m: Member, sampler: Sampler, update: Rehearsal, batch_size: int, prepared: Prepared) -> float:
    """Seconds of one message in a full decode batch of this agent's own prompts."""
    seat = next(s for s in prepared.seats if s.agent == m.agent)
    turns = update.spoken(m.agent)[:batch_size]
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
    padded = [rows * width for rows, width, _ in (shape_of(part.batch, chunk) for chunk in chunks)]
    return part.rows(list(chunks[0])), sum(padded) / padded[0]


def _warm_seconds(
    config: Config, team: Sequence[Member], update: Rehearsal, measured: Mapping[AgentId, Mapping[str, float]]
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
