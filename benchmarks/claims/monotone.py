"""How often an accepted update makes the team truly worse, and what the gate and the harm test change about it.

    python benchmarks/claims/monotone.py [--quick] [--seed N] [--seeds N] [--keep DIR]

Two tables learn parity (configs/parity.toml) from batches of EPISODES episodes, small enough that a gradient often points
the wrong way. The true accuracy of every promoted team is enumerated: every view, every message. Full grid: three radii
(those of the gate's presets, and none) x harm test off and on (`certificate.update_pairs`), the same seeds in every cell.

Measured, per cell: the share of accepted updates after which the true accuracy is lower, by anything and by more than
VISIBLE; the accuracy at the end; and among updates with a positive certificate the share whose bound lies above the true
change on the prompt pool that it names, which may be at most its stated error.

The primary contrast is the share of worse updates with the preset's radii `default`, harm test off minus on. The last line
is JSON; the exit code is 0 only if all bars hold: at most WORSE of accepted updates worse with radii and harm test on, and
positive certificates wrong at most at their stated rate.
"""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from claim import (
    KEEPS_RESULTS,
    ROOT,
    Bars,
    arguments,
    arm_of,
    guarded,
    last_line,
    results,
    run_missing,
    shown,
)
from safetensors.torch import load_file
from torch import Tensor

import baton
from baton import assemble
from baton.assemble import Plan
from baton.core.keyed import key
from baton.engines.table import row_name
from baton.types import Task, Turn

CONFIG = ROOT / "configs" / "parity.toml"
STAGES, EPISODES, PAIRS = 40, 32, 512
VISIBLE, WORSE = 0.005, 0.025
RADII = {
    "default": ("gate.preset=default",),
    "demo": ("gate.preset=demo",),
    "none": tuple(f"agents.{i}.radius={{token=inf,message_mean=inf}}" for i in range(2)),
}
HARM = {"off": (), "on": (f"certificate.update_pairs={PAIRS}",)}
CELLS = {arm_of(radius, harm): (*RADII[radius], *HARM[harm]) for radius in RADII for harm in HARM}

Tables = Mapping[str, Mapping[str, Tensor]]


def value(plan: Plan, task: Task, tables: Tables) -> float:
    """Chance that this team answers the task rightly: every message enumerated, one symbol each, speakers in turn."""
    protocol = plan.protocol

    def onwards(turns: tuple[Turn, ...]) -> float:
        due = protocol.due(task, turns, 0)
        if not due:
            return plan.env.grade(task, protocol.answer(turns, plan.env.normalise, key("no tie in a chain"))).reward
        (index,) = due
        seat = plan.seats[index]
        assert seat.codec is not None
        prompt = seat.codec.encode(protocol.messages(task, turns, index, seat.system))
        logits = tables[seat.agent].get(row_name(prompt), torch.zeros(2))
        law = torch.softmax(logits.double() / seat.temperature, 0).tolist()
        said = [
            Turn(
                kind="action",
                agent=seat.agent,
                seat=index,
                text=seat.codec.decode((token,)),
                prompt_ids=prompt,
                ids=(token,),
                logprobs=(0.0,),
                versions=(0,),
            )
            for token in range(2)
        ]
        return math.fsum(p * onwards((*turns, turn)) for p, turn in zip(law, said, strict=True))

    return onwards(())


def accuracy(plan: Plan, tasks: Sequence[Task], tables: Tables) -> float:
    """Mean of `value` over these tasks; tasks with the same views are the same."""
    first = {task.views: task for task in tasks}
    times = Counter(task.views for task in tasks)
    return math.fsum(times[views] * value(plan, task, tables) for views, task in first.items()) / len(tasks)


def one(task: tuple[tuple[str, ...], int, int]) -> dict[str, Any]:
    """A run of a cell: what each accepted update truly did, and what its pairs said."""
    overrides, seed, stages = task
    common = (
        "engine.threads=1",
        f"algorithm.stages={stages}",
        f"algorithm.episodes={EPISODES}",
        "algorithm.min_informative=1",
    )
    with tempfile.TemporaryDirectory(prefix="baton-claim-") as folder:
        path = Path(folder) / "run"
        kept = (f"seed={seed}", "checkpoint.keep_promoted=all", *common, *overrides)
        run = baton.train(CONFIG, run=path, overrides=kept)
        plan = assemble.prepare(run.config, root=CONFIG.parent)
        everything = list({t.views: t for t in map(plan.env.task, range(plan.env.size))}.values())

        def loaded(agent: str, version: int) -> Mapping[str, Tensor]:
            return load_file(run.folder(agent, version) / "table.safetensors")

        tables = {a.name: loaded(a.name, 0) for a in run.config.agents}
        pool = plan.splits.certify
        before, pooled = accuracy(plan, everything, tables), accuracy(plan, pool, tables)
        changes: list[dict[str, Any]] = []
        for update in run.updates:
            if update["to_version"] is None:
                continue
            tables[update["agent"]] = loaded(update["agent"], update["to_version"])
            after, now = accuracy(plan, everything, tables), accuracy(plan, pool, tables)
            pairs = update["pairs"]
            changes.append(
                {
                    "change": after - before,
                    "pool": now - pooled,
                    "positive": pairs is not None and pairs["gain"]["verdict"] == "positive",
                    "bound": None if pairs is None else pairs["gain"]["lower_bound"],
                    "n": 0 if pairs is None else pairs["n"],
                    "discordance": None if pairs is None else pairs["discordance"],
                }
            )
            before, pooled = after, now
        reasons = Counter(u["verdict"]["reason"] for u in run.updates if u["to_version"] is None)
        return {"changes": changes, "rejected": dict(reasons), "accuracy": before}


def share(result: Mapping[str, Any], by: float) -> float:
    """Share of a run's accepted updates whose true accuracy is lower by more than `by`."""
    changes = result["changes"]
    return sum(c["change"] < -by for c in changes) / max(1, len(changes))


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(
        __doc__, seeds=8, fewest=2, quick="two seeds of a few stages: shows that it runs", keep=KEEPS_RESULTS
    ).parse_args(argv)
    seeds = range(args.seed, args.seed + (2 if args.quick else args.seeds))
    stages = 4 if args.quick else STAGES
    figures: dict[str, Any] = {}
    with results(args.keep, __file__, {"claim": "monotone", "stages": stages}) as kept:
        tasks = {(arm, seed): (own, seed, stages) for arm, own in CELLS.items() for seed in seeds}
        run_missing(kept, one, tasks)
        wrong = certified = 0
        for radius, harm in itertools.product(RADII, HARM):
            arm = arm_of(radius, harm)
            found = [kept.found[arm, seed] for seed in seeds]
            changes = [c for result in found for c in result["changes"]]
            positive = [c for c in changes if c["positive"]]
            wrong += sum(c["bound"] > c["pool"] for c in positive)
            certified += len(positive)
            figures[arm] = {
                "accepted": len(changes),
                "worse": kept.mean(arm, seeds, lambda result: share(result, 1e-12)),
                f"worse by {VISIBLE}": kept.mean(arm, seeds, lambda result: share(result, VISIBLE)),
                "largest loss": max((-c["change"] for c in changes), default=0.0),
                "accuracy": kept.mean(arm, seeds, lambda result: result["accuracy"]),
                "rejected for harm": sum(result["rejected"].get("harm", 0) for result in found),
                "positive": len(positive),
                "positive and not better on the pool": sum(c["pool"] <= 0.0 for c in positive),
            }
            row = figures[arm]
            print(
                f"radii {radius:8} harm test {harm:4} {len(changes):4} accepted, worse {shown(row['worse'])}, visibly "
                f"{shown(row[f'worse by {VISIBLE}'])}, at the end {shown(row['accuracy'])}; {len(positive)} certified, "
                f"{row['rejected for harm']} rejected for harm"
            )
        primary = kept.contrast(arm_of("default", "off"), arm_of("default", "on"), seeds, lambda r: share(r, 1e-12))
        figures["primary: harm test off minus on, radii default"] = primary
        print(f"primary contrast {shown(primary, sign='+')}; {wrong} of {certified} positive certificates above the truth")
    worst = max(figures[arm_of(radius, "on")]["worse"].value for radius in ("default", "demo"))
    rate = wrong / certified if certified else 0.0
    # A certificate of an update may be wrong in delta / n_agents of all updates.
    compared = sum(figures[arm_of(radius, "on")]["accepted"] for radius in RADII)
    stated = 0.05 / 2 * compared
    bars: Bars = {
        "share of accepted updates that are worse, radii and harm test on": (worst, WORSE, worst <= WORSE),
        "positive certificates above the truth": (wrong, stated, wrong <= stated),
    }
    if args.quick:
        done = len(kept.found)
        bars = {"results": (done, len(tasks), done == len(tasks))}
    figures["share of positive certificates above the truth"] = rate
    return last_line("monotone", quick=args.quick, figures=figures, bars=bars)


if __name__ == "__main__":
    sys.exit(guarded(main))
