"""A run that begins with a swap, against the run before it: what was handed over, and the looks that let the newcomer in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from baton import assemble, records
from baton.algorithms import stage0
from baton.algorithms.acceptance import judged
from baton.algorithms.stage0 import SwapOptions, radii
from baton.assemble import Crew
from baton.audit.episodes import EpisodeFiles, Part, Playing
from baton.audit.findings import PRUNED, STAGES
from baton.audit.subject import Subject, sealed
from baton.audit.tolerances import kl_tolerance
from baton.engines.engine import Learner
from baton.journal import BEFORE, SWAPS, Run, is_after_swap
from baton.records import LookRows, Record
from baton.rollout import Play
from baton.swap import DIVERGENCES, EVIDENCE, STAGE0, address, handed_over, probe_prompts, stages_done
from baton.types import Snapshot

LINE = "line 1"
NOT_KEPT = "the episodes of a swap's report and of its pairs are not kept: their figures are taken as they are"
NOT_TAUGHT = "a newcomer is not taught again: what is computed from the weights is its last look"


def run_before(subject: Subject, swap: Record) -> Run | None:
    """The run that the swap was asked of, as it stood then; None where it is not here (a fault)."""
    home = subject.run.home
    name = str(swap["before"])
    path = home if name == BEFORE else home / SWAPS / name
    if not is_after_swap(subject.run.path) or not (path / "stages.jsonl").is_file():
        subject.found.at(STAGES, LINE).wrong("swap", f"the run before the swap is not at {path}")
        return None
    return Run(path, until=int(swap["stages"]))


def check_swap(subject: Subject, swap: Record, files: EpisodeFiles) -> None:
    """Position, group, weights and moments as they were handed over; every look from its divergences."""
    found, start, agent = subject.found, subject.start, str(swap["agent"])
    here = found.at(STAGES, LINE)
    before = run_before(subject, swap)
    if before is None:
        return
    found.ok("swap")
    member = before.position.team.member(agent)
    told = {
        "agent": agent,
        "model_before": member.model,
        "model": next(a.model for a in subject.config.agents if a.name == agent),
        "parameters": start["parameters"].get(agent),
        "parameters_before": before.start["parameters"].get(agent),
        "from_version": member.version,
        "incarnation": member.incarnation + 1,
        "stages": stages_done(before),
        "mode": SwapOptions(**swap["options"]).mode,
        "fingerprints": dict(start["fingerprints"]),
        "fingerprints_before": {name: before.fingerprint(name) for name in before.files},
    }
    here.compare("swap", "swap", {name: swap.get(name) for name in told}, told)
    lrs = {name: trainee.lr for name, trainee in subject.world.trainees.items()}
    expected = handed_over(before, subject.config, agent, str(swap["model"]), lrs)
    here.compare("swap", "position", start["position"], records.position_record(expected))
    here.compare("swap", "group", start["group"], before.start["group"])
    for name in before.files:
        if name == agent:
            continue
        found.ok("swap")
        here.compare("swap", f"fingerprint of '{name}'", start["fingerprints"].get(name), before.fingerprint(name))
        one, other = before.files[name]["training"], start["files"][name]["training"]
        if other is not None and not (subject.run.path / other).exists():
            found.skip("swap", PRUNED, 1, other)
            continue
        with found.at(str(other)).reading("swap"):
            if one is not None and not (before.path / one).exists():
                found.skip("swap", PRUNED, 1, one)
            elif not _same(before.path / one if one else None, subject.run.path / other if other else None):
                found.at(str(other)).wrong("swap", f"the moments of '{name}' are not those that were handed over")
    found.skip("swap", NOT_KEPT)
    kinds = {"distill": {"rounds", "gate", "evidence"}, "mixture": {"bound"}, "imitate": {"imitation"}, "raw": set[str]()}
    evidence = {"rounds", "gate", "evidence", "bound", "imitation"} & swap.keys()
    if evidence != kinds[SwapOptions(**swap["options"]).mode]:
        here.wrong("swap", f"what a swap of mode '{swap['mode']}' rests on", sorted(evidence))
    if swap["mode"] != "distill":
        return
    found.skip("swap", NOT_TAUGHT)
    here.compare("swap", "gate", swap.get("gate"), swap["rounds"][-1]["look"])
    with found.at(DIVERGENCES).reading("swap"):
        read = _looks(subject, swap)
        if read:
            _speaks(subject, swap, before, files, read[-1])


def _same(one: Path | None, other: Path | None) -> bool:
    moments = [{} if path is None else dict(records.load_training(path)[1]) for path in (one, other)]
    return moments[0].keys() == moments[1].keys() and all(torch.equal(moments[0][n], moments[1][n]) for n in moments[0])


def _looks(subject: Subject, swap: Record) -> list[LookRows]:
    """Each look's record from the divergences of its states, and the verdict from the last one."""
    found, gate, options = subject.found, subject.config.gate, SwapOptions(**swap["options"])
    read = records.read_divergences(subject.run.path / DIVERGENCES)
    here = found.at(STAGES, LINE)
    if len(read) != len(swap["rounds"]):
        here.wrong("swap", "rounds, against the looks in the divergences file", len(swap["rounds"]), len(read))
    for number, (told, one) in enumerate(zip(swap["rounds"], read, strict=False)):
        found.ok("swap")
        computed = judged(one.divergence, one, radii(options), gate, looks=options.rounds, scale=one.scale)
        here.compare("swap", f"round {number + 1}: look", told["look"], records.plain(replace(computed, attempt=number)))
        if computed.passed != (number + 1 == len(read)):
            here.wrong("swap", f"round {number + 1}: the gate's answer does not fit the rounds", told["look"]["passed"])
    return read


def _speaks(subject: Subject, swap: Record, before: Run, files: EpisodeFiles, last: LookRows) -> None:
    """The last look's divergences again: the probe episodes as the keys draw them, and the laws of both models there."""
    found, agent, config = subject.found, str(swap["agent"]), subject.config
    rows, promoted = files.read("swap", EVIDENCE), before.path / before.files[agent]["weights"]
    if rows is None:
        return
    if not promoted.is_dir():
        found.skip("swap", PRUNED, 1, promoted.name)
        return
    plan = assemble.prepare(sealed(before, before.config), root=subject.plan.root, asks_endpoints=False)
    index = next(i for i, seat in enumerate(plan.seats) if seat.agent == agent)
    at = address(config.seed, int(swap["incarnation"]), agent)
    nobody: Any = None
    playing = Playing(
        table=assemble.table(plan, nobody, subject.pool),
        address=(*at, "probe"),
        versions=before.position.team.versions,
        until=agent,
        drawn_from="probe",
    )
    drawn = probe_prompts(plan, config.gate.probe_prompts, at=at)
    episodes = files.check(Part(EVIDENCE, rows), playing, [Play(task=t, sibling=i) for i, t in enumerate(drawn)], "probe")
    pair = stage0.contexts(
        episodes,
        {task.id: task for task in drawn},
        protocol=plan.protocol,
        was=plan.seats[index],
        seat=subject.plan.seats[index],
        index=index,
    )
    taken = subject.run.path / records.version_folder(agent, 0)
    incumbent = _learner(assemble.crew(plan.config, {agent: promoted}, learners=[agent]), agent, promoted)
    states, current = stage0.probed(incumbent, pair, config.gate, at=(*at, STAGE0))
    newcomer = _learner(assemble.crew(subject.plan.config, {agent: taken}, learners=[agent]), agent, taken)
    again = newcomer.divergence(states.batch, current)
    here = found.at(DIVERGENCES)
    places = [states.message.tolist(), states.unit.tolist(), states.drawn.tolist(), again.position.tolist()]
    if places != [last.message.tolist(), last.unit.tolist(), last.drawn.tolist(), last.divergence.position.tolist()]:
        here.wrong("swap", "the last look's states are not those that the probe episodes and keys give")
        return
    found.ok("swap")
    floor = float(subject.start["noise_floor"].get(agent, {}).get("token", 0.0))
    for direction in ("kl_new_old", "kl_old_new"):
        said, computed = getattr(last.divergence, direction).double(), getattr(again, direction).double()
        gap = torch.where(said == computed, 0.0, (said - computed).abs())
        found.gap("swap", float(gap.max()))
        bad = (~(gap <= kl_tolerance(computed, floor))).nonzero()[:, 0].tolist()
        if bad:
            told = f"the last look from both models' weights, state {bad[0] + 1} ({len(bad)} states in all): {direction}"
            here.wrong("swap", told, float(said[bad[0]]), float(computed[bad[0]]))


def _learner(crew: Crew, agent: str, folder: Path) -> Learner:
    """An agent's learner with the weights of this folder."""
    learner = crew.learners[agent].awake
    learner.restore(Snapshot(weights=crew.load(folder).tensors, moments={}, steps=0))
    return learner
