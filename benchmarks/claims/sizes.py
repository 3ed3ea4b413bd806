"""Does the worth of taking turns depend on the size of the agents?

    python benchmarks/claims/sizes.py [--quick] [--seed N] [--seeds N] [--keep DIR] [--size 0.06M|1M|135M]

The primary contrast of sat_ablation.py, taking turns minus joint, both behind the gate, with agents of three sizes: the
relay of symbols with models of 65,000 and of 1.0 million parameters, and the relay of names with SmolLM2-135M. Arms of a
size have the same starts, prompts and keys, and generate as many training tokens. Sizes differ in more than size (learning
rates, form of the task, episodes), so only signs are compared. The row of 135M has three seeds and is called indicative: so
few resolve large effects only. It runs where `--size` names it and takes most of an hour; `make claims` has the other two.
The last line is JSON; the exit code is 0 only if all bars hold.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sat_ablation
from claim import KEEPS_RESULTS, ROOT, Bars, arguments, code, guarded, last_line, results, run_missing, shown
from sat_ablation import FAMILIES, FIRST, SECOND, Family, trained

RELAY = FAMILIES["relay"]


@dataclass(frozen=True, kw_only=True)
class Size:
    """A size's task, its seeds unless told, and how many of its processes run at a time."""

    family: Family
    seeds: int
    processes: int
    short: tuple[str, ...]
    """Changes of a quick run."""


QUICK = ("algorithm.stages=2", "eval.episodes=40", *(f"agents.{i}.warm_start.steps=2" for i in range(3)))
MILLION = tuple(f"agents.{i}.{key}" for i in range(3) for key in ("model=tiny:1M", "lr=3e-4", "warm_start.lr=1e-3"))
SIZES: Mapping[str, Size] = {
    "0.06M": Size(family=RELAY, seeds=8, processes=2, short=QUICK),
    "1M": Size(
        family=Family(config=RELAY.config, changes=(*RELAY.changes, *MILLION), batches={"large": (128, 24)}),
        seeds=4,
        processes=2,
        short=QUICK,
    ),
    "135M": Size(
        family=Family(
            config=ROOT / "configs" / "smollm2.toml",
            changes=("algorithm.min_informative=1", "eval.episodes=240"),
            batches={"large": (80, 5)},
        ),
        seeds=3,
        processes=1,
        short=(
            *QUICK,
            "algorithm.episodes=8",
            "gate.probe_prompts=4",
            *(f"agents.{i}.warm_start.{key}" for i in range(3) for key in ("batch=4", "demonstrations=40", "held_out=8")),
        ),
    ),
}
USUAL = ("0.06M", "1M")


def measure(task: tuple[str, str, int, bool]) -> dict[str, Any]:
    """An arm of a size, as a process of its own runs it."""
    name, arm, seed, quick = task
    return trained(SIZES[name].family, arm, seed, SIZES[name].short if quick else ())


def main() -> int:
    parser = arguments(__doc__, seeds=0, fewest=2, quick="two stages of two seeds: shows that it runs", keep=KEEPS_RESULTS)
    parser.add_argument("--size", choices=SIZES, action="append", help=f"one size (repeatable; default: {', '.join(USUAL)})")
    args = parser.parse_args()
    names: list[str] = args.size or list(USUAL)
    figures: dict[str, Any] = {}
    done = 0
    settings = {"quick": args.quick, "sat_ablation": code(Path(sat_ablation.__file__))}
    with results(args.keep, __file__, settings) as found:
        for name in names:
            size = SIZES[name]
            seeds = list(range(args.seed, args.seed + (2 if args.quick else args.seeds or size.seeds)))
            tasks = {(f"{name}: {arm}", seed): (name, arm, seed, args.quick) for seed in seeds for arm in (FIRST, SECOND)}
            run_missing(found, measure, tasks, processes=size.processes)
            done += len(tasks)
            figures[name] = {
                "seeds": seeds,
                "start": found.mean(f"{name}: {FIRST}", seeds, lambda r: r["untrained"]),
                **{arm: found.mean(f"{name}: {arm}", seeds, lambda r: r["team"]) for arm in (FIRST, SECOND)},
                "difference": found.contrast(f"{name}: {FIRST}", f"{name}: {SECOND}", seeds, lambda r: r["team"]),
                "training_tokens": found.mean(f"{name}: {FIRST}", seeds, lambda r: r["training_tokens"]).value,
            }
    for name, row in figures.items():
        print(f"\n{name}, {len(row['seeds'])} seeds: start {shown(row['start'])}")
        print(f"  taking turns {shown(row[FIRST])}  joint {shown(row[SECOND])}")
        print(f"  difference {shown(row['difference'], sign='+')}")
    positive = sum(row["difference"].value > 0 for row in figures.values())
    bars: Bars = {"sizes at which taking turns is ahead (point estimate)": (positive, len(names), positive == len(names))}
    if args.quick:
        bars = {"results": (len(found.found), done, len(found.found) == done)}
    return last_line("sizes", quick=args.quick, figures=figures, bars=bars)


if __name__ == "__main__":
    sys.exit(guarded(main))
