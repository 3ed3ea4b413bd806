"""Disk of a run: what an update writes, what stays, and what is written in all."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from baton import records
from baton.algorithms import surrogate
from baton.assemble import Plan as Prepared
from baton.journal import kept_files
from baton.plan.members import Member
from baton.plan.rehearsal import Rehearsal
from baton.plan.schedule import ordering_episodes, pair_episodes, updates
from baton.records import Record
from baton.starting import START_PROMPTS
from baton.types import AgentId, Episode

BLOCK = 4096
"""Bytes in which a file system hands out space."""


def record(prepared: Prepared, team: Sequence[Member], update: Rehearsal) -> Record:
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
    steps = updates(a, tuple(names), config.seed)
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
    typical = names[len(names) // 2]
    used = {"train": update.train, "probe": update.probe_until[typical]}
    if config.certificate.plays_out(config.gate):
        used["restated"] = _restated(update.probe, typical)
    logs = {
        "episodes": _episodes_bytes(prepared, used),
        "divergences": _blocks(3_000 + 9 * max(probe.n_act for probe in update.probes.values())),
        "journal": 3_000 + 400 * len(names),
    }
    per_update = {n: version[n] + training[n] + sum(logs.values()) for n in names}
    rows = len(steps) * sum(logs.values()) + _episodes_bytes(prepared, {"start": update.train[:START_PROMPTS]})
    if measured := ordering_episodes(a):
        ordering = (
            _episodes_bytes(prepared, {"order": update.train[:measured]}) * measured // min(measured, len(update.train))
        )
        logs["ordering, once a stage"] = ordering
        rows += ordering * a.stages
    if most := pair_episodes(config.certificate, len(names)):
        logs["pairs, at most, a stage"] = most * _episodes_bytes(prepared, {"pair": update.train}) // len(update.train)
        rows += logs["pairs, at most, a stage"] * a.stages
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


def _restated(probe: Sequence[Episode], agent: AgentId) -> tuple[Episode, ...]:
    """What is kept of a candidate's own log-probabilities, with made-up ones that are not those of the episodes."""
    own = [[t.logprobs[::-1] for t in e.turns if t.agent == agent] for e in probe]
    return tuple(surrogate.restate(probe, agent, 1, own))


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _version_bytes(m: Member) -> int:
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
