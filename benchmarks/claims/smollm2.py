"""Three SmolLM2-135M learn the relay of names: `make smollm2` (SEED=3, SEEDS=1, QUICK=1).

    python benchmarks/claims/smollm2.py [--quick] [--seed N] [--seeds N] [--keep DIR]

Trains configs/smollm2.toml, once a seed, and measures each team on held-out prompts beside its own start (paired), the
proven caps, each seat replaced by chance, and the baselines; then configs/smollm2_gym.toml, the same team on a family of
reasoning-gym, once. The last line is JSON; the exit code is 0 only if all bars hold. `--quick` shows that the relay runs, in
little memory and few files: adapters learn in two of its seats.
`--keep DIR` keeps the runs with every promoted version (6 GB a seed), for `baton verify`; a second call goes on where the
first was ended.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from claim import ROOT, Bars, arguments, guarded, last_line, one_seed, results, runs_folder, tell_seed

RELAY, GYM = ROOT / "configs" / "smollm2.toml", ROOT / "configs" / "smollm2_gym.toml"
SINGLE_CALL = 0.25
"""No single call of the relay of four names can be right more often (cap A of ALGORITHMS section 11)."""

MINUTES = 10.0
SHORT_START = ("steps=2", "batch=4", "demonstrations=40", "held_out=8")
SHORT_RUN = ("stages=1", "episodes=8", "min_informative=1", "inner_steps=1")
QUICK = [
    *(f"agents.{i}.warm_start.{key}" for i in range(3) for key in SHORT_START),
    *(f"algorithm.{key}" for key in SHORT_RUN),
    *("gate.probe_prompts=4", "eval.episodes=8", "env.prompts=28"),
    *("agents.1.adapter=lora", "agents.2.adapter=lora"),
]


def row(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(r for r in result["rows"] if r["name"] == name)


def main() -> int:
    args = arguments(
        __doc__, seeds=3, quick="one tiny stage of one seed: shows that it runs", keep="keep the runs in DIR"
    ).parse_args()
    overrides = QUICK if args.quick else []
    seeds = range(args.seed, args.seed + (1 if args.quick else args.seeds))
    settings = {"claim": "smollm2", "relay": RELAY.read_text(), "gym": GYM.read_text(), "quick": overrides}
    with results(args.keep, __file__, settings) as kept:

        def measured(config: Path, name: str, seed: int) -> dict[str, Any]:
            def work() -> dict[str, Any]:
                # A run of three such models takes 7 GB: a folder each, gone before the next begins.
                with runs_folder(args.keep) as (folder, extra):
                    path = folder / f"{name}-{seed}"
                    return one_seed(config, seed, path, [*overrides, *extra], baselines=not args.quick)

            tell_seed(result := kept.of(name, seed, work))
            return result

        relays = [measured(RELAY, "relay", seed) for seed in seeds]
        gym = [] if args.quick else [measured(GYM, "gym", args.seed)]
    better = sum(row(r, "untrained team")["difference"][1] > 0 for r in relays)
    above = sum(row(r, "team")["low"] > SINGLE_CALL for r in relays)
    longest = max(r["rl_minutes"] for r in relays)
    bars: Bars = {
        "seeds whose team is better than its start (paired 95 % interval)": (better, len(relays), better >= len(relays)),
        "seeds whose team is above .25 (95 % interval)": (above, len(relays), above >= len(relays)),
        "longest RL of a seed, minutes": (longest, MINUTES, longest < MINUTES),
    }
    if args.quick:
        judged = sum(relays[0]["verdicts"].values())
        bars = {"updates judged": (judged, 3, judged == 3)}
    return last_line("smollm2", quick=args.quick, figures={"relay": relays, "reasoning_gym": gym}, bars=bars)


if __name__ == "__main__":
    sys.exit(guarded(main))
