"""Whether the order matters: the one in which agents speak, whose caps are theorems, and the one in which they are updated.

    python benchmarks/claims/order.py [--quick] [--seed N] [--seeds N] [--keep DIR]

The relay of configs/quickstart.toml, three agents that each hear only the message before theirs, at equal generated training
tokens (those of a measured order included, the gate's probe episodes not). Arms, from demonstrations of one kind:

- right: the holder of the start speaks first; updated in a random order, as everywhere in the quickstart;
- reversed: it speaks last, and the holder of the last table first (`relays.Backwards`);
- rotated: the first speaker changes from episode to episode (`protocol.rotate`);
- static, greedy, bandit: they speak as in right and are updated in another order (ALGORITHMS 2.6).

What a team can reach in a wrong order of speaking is bounded, whatever its size and training (ALGORITHMS 11; `env.facts`):
.427 reversed, .618 rotated, and .427 in each of the two wrong rotations. A seed passes its cap where the one-sided 99.9 %
Clopper-Pearson lower end of its test accuracy lies above it; none may. The primary contrast is right minus rotated. The last
line is JSON; the exit code is 0 only if all bars hold.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import relays
from claim import (
    KEEPS_RESULTS,
    ROOT,
    Bars,
    arguments,
    below,
    code,
    guarded,
    last_line,
    results,
    run_missing,
    shown,
    training_tokens,
)

import baton
from baton import records

CONFIG = ROOT / "configs" / "quickstart.toml"
SEEDS, STAGES = 8, 100
EPISODES, AGENTS = 128, 3
ORDERING = 64
"""Episodes a stage on which a measured order rests (the product's default)."""

COMMON = ("engine.threads=1", "algorithm.min_informative=1", f"algorithm.episodes={EPISODES}", "eval.episodes=2000")
RIGHT, REVERSED, ROTATED, GREEDY = "right", "reversed", "rotated", "greedy"
ARMS: Mapping[str, tuple[str, ...]] = {
    RIGHT: (),
    REVERSED: ('env={name="relays:Backwards", arguments={symbols=8, demonstration_accuracy=0.6}}',),
    ROTATED: ("protocol.rotate=true",),
    "static": ("algorithm.order=static",),
    GREEDY: ("algorithm.order=greedy", f"algorithm.ordering_episodes={ORDERING}"),
    "bandit": ("algorithm.order=bandit",),
}
CAPS: Mapping[str, str] = {REVERSED: "cap_wrong_order_strict", ROTATED: "cap_rotated_strict"}
"""Arm -> its cap among the facts of the env. In the right order a team can reach 1."""
TURNED: Mapping[str, str] = {"1": "cap_wrong_order_strict", "2": "cap_wrong_order_strict"}
"""First speaker of a wrong rotation -> its cap: 231 asks the holder of the start last; in 312 all that the second agent
hears of the last table is one symbol, sent before its holder had heard anything."""


def stages_within(tokens: int, a_stage: int) -> int:
    """Most stages of so many tokens that do not take more than `tokens`."""
    return tokens // a_stage


def stages(arm: str, most: int) -> int:
    """Stages of an arm at the tokens that `most` stages without a measured order take."""
    plain = EPISODES * AGENTS
    return stages_within(most * plain, plain + (ORDERING if arm == GREEDY else 0))


def measure(task: tuple[str, int, bool]) -> dict[str, Any]:
    """Train one arm on one seed, and how often the team is then right, by who spoke first."""
    arm, seed, quick = task
    made = [f"seed={seed}", *COMMON, *ARMS[arm], f"algorithm.stages={stages(arm, 2 if quick else STAGES)}"]
    if quick:
        place = "env.arguments.prompts" if arm == REVERSED else "env.prompts"
        made += [f"{place}=1000", "eval.episodes=100", *(f"agents.{i}.warm_start.steps=10" for i in range(AGENTS))]
    with tempfile.TemporaryDirectory(prefix="baton-claim-") as folder:
        run = baton.train(CONFIG, run=Path(folder) / "run", overrides=made)
        report = baton.evaluate(run.path, baselines=False)
        team, start = (next(r for r in report["rows"] if r["name"] == n)["value"] for n in ("team", "untrained team"))
        played = (run.path / report["file"]).with_suffix(".parquet")
        rows = records.read_episodes(played, ["use", "reward", "turns.list.element.seat"])
        right, asked = Counter[str](), Counter[str]()
        for row in rows:
            if row["use"] == "team" and row["reward"] is not None:
                first = str(row["turns"][0]["seat"])
                asked[first] += 1
                right[first] += row["reward"] == 1.0
        return {
            "team": team,
            "untrained": start,
            "right": dict(right),
            "asked": dict(asked),
            "caps": report["facts"],
            "training_tokens": training_tokens(run),
            "words": dict(Counter(u["word"] for u in run.updates)),
            "ending": run.ending,
        }


# ---- what is asked of a result -----------------------------------------------------------------------------------------


def counted(result: Mapping[str, Any], first: str | None = None) -> tuple[int, int]:
    """(right, asked) of a result, of all its test prompts or of those in which this seat spoke first."""
    right, asked = result["right"], result["asked"]
    return (sum(right.values()), sum(asked.values())) if first is None else (right.get(first, 0), asked[first])


def cap_bars(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Bars:
    """One bar for each proven cap, from the results of each arm's seeds."""
    caps = found[REVERSED][0]["caps"]
    bars: Bars = {}
    for arm, name in CAPS.items():
        bars[f"{arm}: highest lower end of a seed, at most the cap"] = below(caps[name], map(counted, found[arm]))
    for first, name in TURNED.items():
        counts = [counted(result, first) for result in found[ROTATED]]
        order = "".join(str((int(first) + i) % AGENTS + 1) for i in range(AGENTS))
        bars[f"rotated, order {order}: highest lower end of a seed, at most the cap"] = below(caps[name], counts)
    return bars


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, seeds=SEEDS, fewest=2, quick="two stages, two seeds: shows that it runs", keep=KEEPS_RESULTS)
    args = parser.parse_args(argv)
    seeds = list(range(args.seed, args.seed + (2 if args.quick else args.seeds)))
    settings = {"quick": args.quick, "relays": code(Path(relays.__file__))}
    with results(args.keep, __file__, settings) as found:
        run_missing(found, measure, {(arm, seed): (arm, seed, args.quick) for seed in seeds for arm in ARMS})
    kept = {arm: [found.found[arm, seed] for seed in seeds] for arm in ARMS}
    caps = kept[REVERSED][0]["caps"]
    figures: dict[str, Any] = {}
    print(f"\n{len(seeds)} seeds: accuracy on test prompts, what is left to the cap, and right minus it")
    for arm in ARMS:
        own = found.mean(arm, seeds, lambda r: r["team"])
        cap = caps[CAPS[arm]] if arm in CAPS else 1.0
        left = found.mean(arm, seeds, lambda r, cap=cap: cap - r["team"])
        less = found.contrast(RIGHT, arm, seeds, lambda r: r["team"])
        tokens = found.mean(arm, seeds, lambda r: r["training_tokens"])
        untrained = found.mean(arm, seeds, lambda r: r["untrained"])
        figures[arm] = {"team": own, "untrained": untrained, "cap": cap, "left": left, "right_minus_this": less} | {
            "training_tokens": tokens.value
        }
        print(
            f"  {arm:10} {shown(own)}   cap {cap:.3f}, {shown(left)} left   {shown(less, sign='+')}   "
            f"{tokens.value:,.0f} tokens"
        )
    for first in ("0", *TURNED):
        own = found.mean(ROTATED, seeds, lambda r, first=first: r["right"].get(first, 0) / r["asked"][first])
        figures[f"rotated, first speaker {int(first) + 1}"] = {"team": own}
        print(f"  rotated, first speaker {int(first) + 1}: {shown(own)}")
    bars = cap_bars(kept)
    if args.quick:
        done = len(found.found)
        bars["results"] = (done, len(ARMS) * len(seeds), done == len(ARMS) * len(seeds))
    else:
        primary, own, cap = figures[ROTATED]["right_minus_this"], figures[RIGHT]["team"], figures[ROTATED]["cap"]
        bars["primary contrast, right minus rotated: lower end above"] = (primary.low, 0.0, primary.low > 0.0)
        bars["right: lower end above what a rotated team can reach"] = (own.low, cap, own.low > cap)
    return last_line("order", quick=args.quick, figures=figures, bars=bars)


if __name__ == "__main__":
    sys.exit(guarded(main))
