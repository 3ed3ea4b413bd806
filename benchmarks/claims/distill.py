"""A team taught to one model of its total size that answers alone: what is kept, and for how many tokens?

    python benchmarks/claims/distill.py [--quick] [--task sums relay] [--seed N] [--seeds N] [--keep DIR]

Chains of three agents of 65,104 parameters, trained as in configs/quickstart.toml and each with a part of the question;
then `baton distill RUN tiny:195k`, with OPTIONS where they differ from the defaults. The student sees the whole question and
says the answer in one token, a third of the team's:

- sums (`sums.Sums`; 40 stages): a digit for each seat, and a whole question that one model answers in one token;
- relay (60 stages): three tables, and a whole question that takes one look-up after the other.

The primary contrast is the student of sums minus .95 times its team, within the seed: its lower end has to lie above 0, and
no student of sums may take more than a third of its team's tokens. What the relay's student keeps is told and bars nothing.
The last line is JSON; the exit code is 0 only if all bars hold.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sums
from claim import KEEPS_RESULTS, ROOT, Bars, arguments, code, guarded, last_line, results, shown

import baton
from baton.core.scores import Interval, mean_interval, paired_interval
from baton.distillation import DistillOptions

CONFIG = ROOT / "configs" / "quickstart.toml"
SEEDS, STUDENT = 3, "tiny:195k"
COMMON = ("engine.threads=1", "algorithm.min_informative=1", "eval.episodes=1000")
TEAMS: Mapping[str, Sequence[str]] = {
    "sums": (
        'env={name="sums:Sums", arguments={demonstration_accuracy=0.8}}',
        "algorithm.stages=40",
        # A demonstrator that is right eight times in ten is imitated at .8 squared plus .2 squared.
        *(f"agents.{i}.warm_start.target=0.66" for i in range(3)),
    ),
    "relay": ("algorithm.stages=60",),
}
OPTIONS: Mapping[str, DistillOptions] = {
    # Some students sit on a plateau for hundreds of steps before they find the sum; who has found it stops at the target.
    "sums": DistillOptions(steps=2000, target=0.9),
    "relay": DistillOptions(steps=600),
}
SHORT = ("algorithm.stages=2", "eval.episodes=100", *(f"agents.{i}.warm_start.steps=10" for i in range(3)))
PROMPTS: Mapping[str, str] = {"sums": "env.arguments.prompts=1000", "relay": "env.prompts=1000"}
KEPT, SHARE = 0.95, 1.0 / 3.0
"""Of the team's accuracy, at least, and of its tokens, at most."""


def measure(task: str, seed: int, *, quick: bool) -> dict[str, Any]:
    """Train the team of a task on one seed and teach it to a student; what the distillation recorded."""
    made = [f"seed={seed}", *COMMON, *TEAMS[task], *([*SHORT, PROMPTS[task]] if quick else [])]
    options = DistillOptions(steps=5, rounds=1, contexts=64) if quick else OPTIONS[task]
    with tempfile.TemporaryDirectory(prefix="baton-claim-") as name:
        run = baton.train(CONFIG, run=Path(name) / "run", overrides=made)
        record = baton.distill(run.path, STUDENT, Path(name) / "student", options=options)
    kept = {key: record[key] for key in ("rows", "kept", "parameters", "tokens", "seconds")}
    return kept | {"imitated": record["imitation"]["accuracy"][-1], "rounds": record["on_policy"]["rounds"]}


def row(result: Mapping[str, Any], name: str, what: str = "value") -> float:
    """A number of this row of a student's table."""
    return next(float(r[what]) for r in result["rows"] if r["name"] == name)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, seeds=SEEDS, fewest=2, quick="two seeds, some steps: shows that it runs", keep=KEEPS_RESULTS)
    parser.add_argument(
        "--task", nargs="+", choices=list(TEAMS), default=list(TEAMS), help="which of the two (default: both)"
    )
    args = parser.parse_args(argv)
    tasks = list(dict.fromkeys(args.task))
    seeds = list(range(args.seed, args.seed + (2 if args.quick else args.seeds)))
    settings = {"quick": args.quick, "sums": code(Path(sums.__file__))}
    with results(args.keep, __file__, settings) as found:
        for seed in seeds:
            for task in tasks:
                found.of(task, seed, lambda task=task, seed=seed: measure(task, seed, quick=args.quick))
                print(f"{task}, seed {seed}: done", file=sys.stderr)
    figures: dict[str, Any] = {}
    above: dict[str, Interval] = {}
    print(f"\n{len(seeds)} seeds: accuracy on test prompts, student minus {KEPT:g} of its team, and tokens an answer")
    for task in tasks:
        own = [found.found[task, seed] for seed in seeds]
        team, imitated, student = ([row(r, n) for r in own] for n in ("team", "student after imitation", "student"))
        above[task] = paired_interval(student, [KEPT * value for value in team])
        told: dict[str, Any] = {
            "team": mean_interval(team),
            "student": mean_interval(student),
            "student_minus_kept_share_of_team": above[task],
            "kept": mean_interval([r["kept"]["value"] for r in own]),
            "rounds_add": paired_interval(student, imitated),
            "token_share": max(r["kept"]["tokens_per_answer"] for r in own),
            "read_share": max(r["kept"]["read_per_answer"] for r in own),
        }
        figures[task] = told | {"results": own}
        print(
            f"  {task:6} team {shown(told['team'])}   student {shown(told['student'])}, kept {shown(told['kept'])}\n"
            f"  {'':6} minus {KEPT:g} of the team {shown(above[task], sign='+')}; rounds add "
            f"{shown(told['rounds_add'], sign='+')}; {told['token_share']:.3f} of the tokens, {told['read_share']:.3f} read"
        )
    if args.quick:
        done = len(found.found)
        bars: Bars = {"results": (done, len(tasks) * len(seeds), done == len(tasks) * len(seeds))}
        return last_line("distill", quick=True, figures=figures, bars=bars)
    if "sums" not in tasks:
        return last_line("distill", quick=False, figures=figures, bars={})
    primary, share = above["sums"], figures["sums"]["token_share"]
    bars = {
        f"primary contrast, sums: student minus {KEPT:g} of its team, lower end above": (
            primary.low,
            0.0,
            primary.low > 0.0,
        ),
        "sums: largest share of the team's tokens, at most": (share, SHARE, share <= SHARE + 1e-9),
    }
    return last_line("distill", quick=False, figures=figures, bars=bars)


if __name__ == "__main__":
    sys.exit(guarded(main))
