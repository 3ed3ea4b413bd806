"""A run that begins with a swap, against the run before it: what was handed over, and the looks that let the newcomer in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from baton import records
from baton.algorithms.stage0 import QUANTILE_FACTOR, SwapOptions
from baton.audit.findings import PRUNED, STAGES
from baton.audit.subject import Subject
from baton.core import trust_region
from baton.journal import BEFORE, SWAPS, Run, is_after_swap
from baton.records import Record
from baton.swap import DIVERGENCES, EVIDENCE, handed_over, stages_done

LINE = "line 1"
NOT_KEPT = "the episodes of a swap's report and of its pairs are not kept: their figures are taken as they are"
NOT_TAUGHT = "a newcomer is not made ready again; what the gate saw of it is judged from the recorded divergences"


def run_before(subject: Subject, swap: Record) -> Run | None:
    """The run that the swap was asked of, as it stood then; None where it is not here (a fault)."""
    home = subject.run.home
    name = str(swap["before"])
    path = home if name == BEFORE else home / SWAPS / name
    if not is_after_swap(subject.run.path) or not (path / "stages.jsonl").is_file():
        subject.found.at(STAGES, LINE).wrong("swap", f"the run before the swap is not at {path}")
        return None
    return Run(path, until=int(swap["stages"]))


def check_swap(subject: Subject, swap: Record) -> None:
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
    if not (subject.run.path / EVIDENCE).is_file():
        found.at(EVIDENCE).wrong("swap", "is gone: the probe episodes of the newcomer's looks")
    with found.at(DIVERGENCES).reading("swap"):
        _looks(subject, swap)


def _same(one: Path | None, other: Path | None) -> bool:
    moments = [{} if path is None else dict(records.load_training(path)[1]) for path in (one, other)]
    return moments[0].keys() == moments[1].keys() and all(torch.equal(moments[0][n], moments[1][n]) for n in moments[0])


def _looks(subject: Subject, swap: Record) -> None:
    """Each look's record from the divergences of its states, and the verdict from the last one."""
    found, gate, options = subject.found, subject.config.gate, SwapOptions(**swap["options"])
    read = records.read_divergences(subject.run.path / DIVERGENCES)
    here = found.at(STAGES, LINE)
    if len(read) != len(swap["rounds"]):
        here.wrong("swap", "rounds, against the looks in the divergences file", len(swap["rounds"]), len(read))
        return
    for number, (told, one) in enumerate(zip(swap["rounds"], read, strict=True)):
        found.ok("swap")
        computed = trust_region.gate(
            one.divergence,
            message=one.message,
            unit=one.unit,
            drawn=one.drawn,
            direction=gate.direction,
            alpha=1.0 - gate.quantile,
            eta=gate.eta,
            looks=options.rounds,
            radius_token=QUANTILE_FACTOR * options.radius,
            radius_message_mean=options.radius,
            require_certified=gate.require_certified,
            scale=one.scale,
        )
        here.compare("swap", f"round {number + 1}: look", told["look"], records.plain(replace(computed, attempt=number)))
        if computed.passed != (number + 1 == len(read)):
            here.wrong("swap", f"round {number + 1}: the gate's answer does not fit the rounds", told["look"]["passed"])
