"""Three SmolLM2-135M learn the relay of names: `make smollm2` (SEED=3, SEEDS=1, QUICK=1).

    python benchmarks/claims/smollm2.py [--quick] [--seed N] [--seeds N] [--keep DIR]

Trains configs/smollm2.toml, once a seed, and measures each team on held-out prompts beside its own start (paired), the
proven caps, each seat replaced by chance, and the baselines; then configs/smollm2_gym.toml, the same team on a family of
reasoning-gym, once. The last line is JSON; the exit code is 0 only if all bars hold. `--quick` shows that the relay runs.
`--keep DIR` keeps the runs with every promoted version (6 GB a seed), for `baton verify`; a second call goes on where the
first was ended.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from quickstart import ROOT, at_least_one, guarded, one_seed, runs_folder, where

RELAY, GYM = ROOT / "configs" / "smollm2.toml", ROOT / "configs" / "smollm2_gym.toml"
SINGLE_CALL = 0.25
"""No single call of the relay of four names can be right more often (cap A of ALGORITHMS section 11)."""

MINUTES = 10.0
SHORT_START = ("steps=2", "batch=4", "demonstrations=40", "held_out=8")
SHORT_RUN = ("stages=1", "episodes=8", "min_informative=1")
QUICK = [
    *(f"agents.{i}.warm_start.{key}" for i in range(3) for key in SHORT_START),
    *(f"algorithm.{key}" for key in SHORT_RUN),
    *("gate.probe_prompts=4", "eval.episodes=8"),
]


def row(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(r for r in result["rows"] if r["name"] == name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=at_least_one, default=3, help="how many seeds of the relay, counted up from --seed")
    parser.add_argument("--quick", action="store_true", help="one tiny stage of one seed: shows that it runs")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs in DIR")
    args = parser.parse_args()
    overrides = QUICK if args.quick else []
    seeds = range(args.seed, args.seed + (1 if args.quick else args.seeds))
    results: list[dict[str, Any]] = []
    gym: list[dict[str, Any]] = []
    for seed in seeds:
        # A run of three such models takes 7 GB: a folder each, gone before the next begins.
        with runs_folder(args.keep) as (folder, extra):
            results.append(one_seed(RELAY, seed, folder / f"relay-{seed}", [*overrides, *extra], baselines=not args.quick))
    if not args.quick:
        with runs_folder(args.keep) as (folder, extra):
            gym.append(one_seed(GYM, args.seed, folder / f"gym-{args.seed}", extra))
    better = sum(row(r, "untrained team")["difference"][1] > 0 for r in results)
    above = sum(row(r, "team")["low"] > SINGLE_CALL for r in results)
    longest = max(r["rl_minutes"] for r in results)
    bars = {
        "seeds whose team is better than its start (paired 95 % interval)": (better, len(results), better >= len(results)),
        "seeds whose team is above .25 (95 % interval)": (above, len(results), above >= len(results)),
        "longest RL of a seed, minutes": (longest, MINUTES, longest < MINUTES),
    }
    if args.quick:
        judged = sum(results[0]["verdicts"].values())
        bars = {"updates judged": (judged, 3, judged == 3)}
    line = {
        "name": "smollm2",
        "quick": args.quick,
        "figures": {"relay": results, "reasoning_gym": gym},
        "bars": {name: {"value": value, "bar": bar, "holds": holds} for name, (value, bar, holds) in bars.items()},
        **where(),
    }
    print(json.dumps(line))
    return 0 if all(holds for _, _, holds in bars.values()) else 1


if __name__ == "__main__":
    sys.exit(guarded(main))
