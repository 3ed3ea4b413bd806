"""What each part of a stage is worth: fresh episodes for each agent, the gate, taking turns.

    python benchmarks/claims/sat_ablation.py [--quick] [--seed N] [--seeds N] [--keep DIR]

Two tasks: the relay of configs/quickstart.toml, whose agents hand a symbol on, and parity with tables, in which a code has
to be agreed on. Arms, all from one start a seed, on the same prompts and keys, at equal generated training episodes (an
update takes its batch as it is, however little it tells; the gate's probe episodes are not counted):

- a full grid of taking turns or not (`sat`, `joint`), the gate or none, and large or small batches;
- reuse: one batch a stage for all agents, each episode weighted by min(1, its likelihood ratio); plain reuse: not weighted;
- independent: one agent after another, each beside teammates as they were at the start.

A result is the mean reward of the trained team on the test prompts. The primary contrast is taking turns minus joint, both
behind the gate, at the large batch, on the relay. The last line is JSON; the exit code is 0 only if all bars hold.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claim import KEEPS_RESULTS, ROOT, Bars, arguments, guarded, last_line, results, run_missing, shown, training_tokens

import baton

SEEDS = 8


@dataclass(frozen=True, kw_only=True)
class Family:
    """One task: its config, what all arms change of it, and the episodes of an update with the stages that these allow."""

    config: Path
    changes: tuple[str, ...]
    batches: Mapping[str, tuple[int, int]]


FAMILIES: Mapping[str, Family] = {
    "relay": Family(
        config=ROOT / "configs" / "quickstart.toml",
        changes=("engine.threads=1", "eval.episodes=1000", "algorithm.min_informative=1"),
        batches={"large": (128, 40), "small": (32, 160)},
    ),
    "parity": Family(
        config=ROOT / "configs" / "parity.toml",
        changes=("eval.episodes=400", "algorithm.min_informative=1"),
        batches={"large": (64, 8), "small": (16, 32)},
    ),
}
"""Budgets at which a good arm is on its way and not at its end: 15,360 episodes of the relay, 1,024 of parity."""

NO_GATE = "agents.{i}.radius={{token=inf, message_mean=inf}}"
GRID = {
    f"{turns}, {gate}, {batch}": (turns, gate, batch)
    for turns in ("sequential", "joint")
    for gate in ("gate", "no gate")
    for batch in ("large", "small")
}
BESIDE: Mapping[str, tuple[str, ...]] = {
    "reuse": ("algorithm.data=reuse",),
    "plain reuse": ("algorithm.data=reuse", "algorithm.reuse.weights=none"),
    "independent": ("algorithm.name=independent",),
}
"""Arms beside the grid: behind the gate, at the large batch."""

FIRST, SECOND = "sequential, gate, large", "joint, gate, large"


def changes(family: Family, arm: str, agents: int) -> list[str]:
    """What an arm changes of its family's config."""
    turns, gate, batch = GRID.get(arm, ("sequential", "gate", "large"))
    episodes, stages = family.batches[batch]
    made = [*family.changes, f"algorithm.episodes={episodes}", f"algorithm.stages={stages}", *BESIDE.get(arm, ())]
    if turns == "joint":
        made.append("algorithm.name=joint")
    if gate == "no gate":
        made += [NO_GATE.format(i=i) for i in range(agents)]
    return made


def trained(family: Family, arm: str, seed: int, more: Sequence[str] = ()) -> dict[str, Any]:
    """Train one arm on one seed, and what the team then earns; `more` is changed besides."""
    agents = len(baton.load_config(family.config).agents)
    with tempfile.TemporaryDirectory(prefix="baton-claim-") as folder:
        made = [f"seed={seed}", *changes(family, arm, agents), *more]
        run = baton.train(family.config, run=Path(folder) / "run", overrides=made)
        report = baton.evaluate(run.path, baselines=False)
        team, start = (next(r for r in report["rows"] if r["name"] == n)["value"] for n in ("team", "untrained team"))
        return {
            "team": team,
            "untrained": start,
            "training_tokens": training_tokens(run),
            "words": dict(Counter(u["word"] for u in run.updates)),
            "ending": run.ending,
        }


def measure(task: tuple[str, str, int, bool]) -> dict[str, Any]:
    """An arm of a family, as a process of its own runs it."""
    name, arm, seed, quick = task
    short = ["algorithm.stages=2", "eval.episodes=100"]
    if name == "relay":
        short += [f"agents.{i}.warm_start.steps=25" for i in range(3)]
    return trained(FAMILIES[name], arm, seed, short if quick else ())


def main() -> int:
    parser = arguments(__doc__, seeds=SEEDS, fewest=2, quick="two stages, two seeds: shows that it runs", keep=KEEPS_RESULTS)
    args = parser.parse_args()
    seeds = list(range(args.seed, args.seed + (2 if args.quick else args.seeds)))
    arms = [f"{family}: {arm}" for family in FAMILIES for arm in (*GRID, *BESIDE)]
    with results(args.keep, __file__, {"quick": args.quick}) as found:
        tasks = {(arm, seed): (*arm.split(": ", 1), seed, args.quick) for seed in seeds for arm in arms}
        run_missing(found, measure, tasks)
    figures: dict[str, Any] = {}
    for family in FAMILIES:
        print(f"\n{family}, {len(seeds)} seeds: mean reward on test prompts, and {FIRST} minus it")
        for arm in (*GRID, *BESIDE):
            own = found.mean(f"{family}: {arm}", seeds, lambda r: r["team"])
            less = found.contrast(f"{family}: {FIRST}", f"{family}: {arm}", seeds, lambda r: r["team"])
            tokens = found.mean(f"{family}: {arm}", seeds, lambda r: r["training_tokens"])
            print(f"  {arm:28} {shown(own)}   {shown(less, sign='+')}   {tokens.value:,.0f} tokens")
            figures[f"{family}: {arm}"] = {"team": own, "first_minus_this": less, "training_tokens": tokens.value}
    primary = found.contrast(f"relay: {FIRST}", f"relay: {SECOND}", seeds, lambda r: r["team"])
    bars: Bars = {"primary contrast, low end of its interval": (primary.low, 0.0, primary.low > 0.0)}
    if args.quick:
        done = len(found.found)
        bars = {"results": (done, len(arms) * len(seeds), done == len(arms) * len(seeds))}
    return last_line("sat_ablation", quick=args.quick, figures=figures, bars=bars)


if __name__ == "__main__":
    sys.exit(guarded(main))
