"""Memory of an update: everything that is held, by phase, in bytes."""

from __future__ import annotations

import importlib
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from baton import records
from baton.algorithms.options import CertificateOptions, SatOptions
from baton.assemble import Plan as Prepared
from baton.config import Config
from baton.core import batching
from baton.engines import local, models
from baton.plan.members import Member
from baton.plan.rehearsal import Rehearsal, shape_of
from baton.plan.schedule import updates
from baton.plan.tracing import traced
from baton.records import Record
from baton.types import AgentId

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


NO_PAIRS = CertificateOptions()


def memory_terms(
    team: Sequence[Member],
    mover: Member,
    moved: frozenset[AgentId],
    *,
    options: SatOptions,
    work: Mapping[str, int],
    pairs: CertificateOptions = NO_PAIRS,
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
    has_start = options.name == "independent" or bool(pairs.stage_pairs and moved)
    played: tuple[Phase, ...] = ("order", "sample", *(("commit",) if pairs.update_pairs or pairs.surrogate else ()))
    # An adapter's slot gets new tensors every time; a slot that was emptied too.
    is_new = mover.leaves or mover.lora is not None or mover.agent not in moved
    return [
        Term(name="process: python, libraries, tasks", bytes=work["process"]),
        Term(name="bases that adapters share", bytes=sum({(m.base, m.device): m.shared for m in team}.values())),
        Term(name="sampler: promoted slots", bytes=sum(m.served for m in team)),
        Term(name="sampler: candidate slots", bytes=sum(m.served for m in trained if m.agent in moved and not m.leaves)),
        Term(name="sampler: candidate slot, new", bytes=mover.served if is_new else 0, phases=("commit",)),
        Term(name="sampler: start slots", bytes=sum(m.served for m in trained) if has_start else 0),
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
        Term(name="decode batch: activations and laws", bytes=work["decoding"], phases=played),
        Term(name="decode batch: keys and values", bytes=work["kv"], phases=played),
        # Both teams' networks read the same tokens side by side.
        Term(name="decode batch: keys and values beside", bytes=work["kv"] if pairs.update_pairs else 0, phases=("commit",)),
        Term(name="scores of episodes, one by one", bytes=work["scores"], phases=("order",)),
    ]


def record(prepared: Prepared, team: Sequence[Member], update: Rehearsal) -> Record:
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
    for _, agent in updates(two, tuple(trained), config.seed):
        terms = memory_terms(
            team,
            trained[agent],
            moved,
            options=config.algorithm,
            work={**work[agent], **common},
            pairs=config.certificate,
        )
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


def _warm_terms(prepared: Prepared, m: Member, update: Rehearsal, process: int) -> list[Term]:
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


def _trained_dtype(m: Member) -> torch.dtype:
    """What a training forward runs on: the masters, or a base as it is served."""
    return m.serve if m.lora else torch.float32


def _work(config: Config, m: Member, update: Rehearsal) -> dict[str, int]:
    """Bytes of an agent's update that follow from the shapes of its batches; of a frozen agent those of playing."""
    batch = update.batches[m.agent]
    none = {"activations": 0, "anchors": 0, "laws": 0, "decoding": 0, "kv": 0, "scores": 0}
    if not m.layers:
        return none
    prompts = [(len(t.prompt_ids), len(t.ids), t.prompt_ids) for t in update.spoken(m.agent)]
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
    most = config.engine.micro_tokens
    shapes = {shape_of(part, rows) for part in parts for rows in batching.micro_batches(part, max_tokens=most)}
    rows, width, states = max(shapes, key=lambda shape: (shape[0] * shape[1], shape[2]))
    shape: dict[str, Any] = {"compute": m.compute, "dtype": _trained_dtype(m)}
    step = traced(m.folder, rows=rows, width=width, states=states, kl=config.algorithm.penalty.start > 0, **shape)
    # An adapter's head is its base's, which nobody trains.
    head = 0 if m.lora else (len(parts) + 1) * m.vocabulary * m.width * m.item
    seen = min(probe.n_act, max(1, local.CHUNK // m.vocabulary))
    scores = 0
    if config.algorithm.is_measured:
        one = shape_of(batch.batch, batch.batch.episode.eq(0).nonzero()[:, 0].tolist())
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
