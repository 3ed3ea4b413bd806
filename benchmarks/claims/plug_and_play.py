"""Next month's models take two of three seats: what does it cost at once, and what is it worth later?

    python benchmarks/claims/plug_and_play.py [--quick] [--seed N] [--seeds N] [--keep DIR]

Two tasks of three seats, in which the agents hand a symbol on in a private code (`relays.Coded`): the relay of tables, and a
chain of sums, where each seat sees one operation on a digit. A team of three `tiny:64k` learns it (a warm start on
demonstrations that err four times in ten, then stages). Newcomers of four times the parameters were taught without errors,
but the code of another team: able, and foreign. Then, each from the same trained team:

- raw: two newcomers take the seats X and Y as they are;
- distill: by Stage 0 onto their projection around the incumbents (`baton swap`, radius RADIUS);
- mixture: newcomer and incumbent serve the seat together;
- imitate: two newcomers with another vocabulary imitate the incumbents' messages;
- scratch: the same mixed team from its own warm starts in the team's code, trained on as many episodes as the team before
  and after the swap together.

Measured on the same test prompts: before, right after, and after MORE further stages. The primary contrast is distill
minus raw, right after, on the relay. Bars, all on the relay: raw falls to at most chance and .1 more; distill loses at most
.05 and mixture at most .02 right after (ends of the paired intervals), and no newcomer is refused; distilled and trained on,
the team is not below what it was (lower end of the difference above -.02). And the third seat's weights are the same bytes
after every swap. TeamTR reports a shock of 18 points raw and 3 aligned; the SAT paper +10.4 points for two stronger seats.
The last line is JSON; the exit code is 0 only if all bars hold.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import relays
from claim import (
    KEEPS_RESULTS,
    ROOT,
    Bars,
    arguments,
    code,
    guarded,
    last_line,
    results,
    run_missing,
    shown,
    training_tokens,
)

import baton
from baton import swap as swaps
from baton.algorithms.stage0 import SwapOptions
from baton.core.keyed import key, permutation
from baton.core.scores import Interval, mean_interval, paired_interval
from baton.engines import models
from baton.host import complete
from baton.journal import Run

CONFIG = ROOT / "configs" / "quickstart.toml"
SEEDS, STAGES, MORE = 8, 40, 15
RADIUS = 0.05
SWAPPED, KEPT = ("X", "Y"), "Z"
SEATS = (*SWAPPED, KEPT)
CASES: Mapping[str, tuple[str, float]] = {"relay": ("symbols=8", 1 / 8), "sums": ("sums=true", 1 / 10)}
"""Case -> what its env is given, and the accuracy of who knows nothing."""
WAYS = ("raw", "distill", "mixture", "imitate")
QUICK_WAYS = ("raw", "distill")
OPTIONS: Mapping[str, SwapOptions] = {
    "raw": SwapOptions(mode="raw"),
    "distill": SwapOptions(radius=RADIUS, contexts=2000, steps=500, rounds=4, batch=128, lr=1.5e-3),
    "mixture": SwapOptions(mode="mixture"),
    "imitate": SwapOptions(mode="imitate", contexts=3000, rounds=2, steps=350, batch=128, lr=1.5e-3),
}


def shared(seed: int, *, quick: bool) -> list[str]:
    """What every training here changes of the quickstart."""
    return [f"seed={seed}", "engine.threads=1", "algorithm.min_informative=1", f"eval.episodes={60 if quick else 1000}"]


def env(case: str, team: int, *, accuracy: float, quick: bool) -> str:
    """The task in the code of a team."""
    given = f"code={team}, {CASES[case][0]}, demonstration_accuracy={accuracy}, prompts={1000 if quick else 20000}"
    return f'env={{name="relays:Coded", arguments={{{given}}}}}'


def warm(agents: Sequence[int], *, steps: int, target: float) -> list[str]:
    return [
        f"agents.{i}.warm_start.{name}={value}" for i in agents for name, value in (("steps", steps), ("target", target))
    ]


def other_vocabulary(folder: Path, seed: int) -> Path:
    """A `tiny:256k` whose ids of plain characters are shuffled: another tokenizer, and no weight has been trained yet."""
    source = models.resolve("tiny:256k", seed=seed)
    shutil.copytree(source, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    control = {token["content"] for token in tokenizer["added_tokens"]} | {tokenizer["model"]["unk_token"]}
    plain = [token for token in vocabulary if token not in control]
    order = permutation(key("plug and play", "vocabulary"), len(plain))
    tokenizer["model"]["vocab"] = vocabulary | {token: vocabulary[plain[i]] for token, i in zip(plain, order, strict=True)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    return folder


def newcomers(case: str, folder: Path, seed: int, model: str, *, quick: bool) -> dict[str, Path]:
    """Able models that were taught another team's code, as folders: the start of a team that never learnt together."""
    made = [*shared(seed + 5000, quick=quick), env(case, seed + 5000, accuracy=1.0, quick=quick), "algorithm.stages=1"]
    made += ["algorithm.episodes=8", "gate.probe_prompts=8", "algorithm.stages=1"]
    made += [f'agents.{i}.model="{model}"' for i in range(len(SWAPPED))]
    made += warm(range(len(SWAPPED)), steps=10 if quick else 500, target=0.95)
    made += ['agents.2.model="tiny:32k"', "agents.2.warm_start.steps=1"]
    run = baton.train(CONFIG, run=folder, overrides=made)
    return {name: run.folder(name, 0) for name in SWAPPED}


def accuracy(run: Run | Path) -> list[float]:
    """Rewards on the test prompts by which swaps are told."""
    team = baton.load_team(run.path if isinstance(run, Run) else run)
    try:
        return complete(swaps.tested(team.plan, team.table, team.team.versions))
    finally:
        team.close()


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def measure(task: tuple[str, int, bool]) -> dict[str, Any]:
    """One team of a task, and what each way of swapping two of its seats comes to."""
    case, seed, quick = task
    stages, more = (2, 1) if quick else (STAGES, MORE)
    with tempfile.TemporaryDirectory(prefix="baton-claim-") as name:
        folder = Path(name)
        made = [*shared(seed, quick=quick), env(case, seed, accuracy=0.6, quick=quick), f"algorithm.stages={stages}"]
        if quick:
            made += warm(range(3), steps=10, target=0.37)
        before = baton.train(CONFIG, run=folder / "before", overrides=made)
        found: dict[str, Any] = {"before": mean(accuracy(before)), "tokens": {"before": training_tokens(before)}, "ways": {}}
        able = newcomers(case, folder / "able", seed, "tiny:256k", quick=quick)
        strange: Mapping[str, Path] = {}
        if not quick:
            foreign = other_vocabulary(folder / "vocabulary", seed)
            strange = newcomers(case, folder / "strange", seed, str(foreign), quick=quick)
        for way in QUICK_WAYS if quick else WAYS:
            here = folder / way
            shutil.copytree(before.path, here)
            found["ways"][way] = swapped(here, strange if way == "imitate" else able, way, stages + more, quick=quick)
        mixed = [*made, *(f"agents.{i}.model=tiny:256k" for i in range(len(SWAPPED))), f"algorithm.stages={stages + more}"]
        scratch = baton.train(CONFIG, run=folder / "scratch", overrides=mixed)
        found["scratch"] = mean(accuracy(scratch))
        found["tokens"]["scratch"] = training_tokens(scratch)
        return found


def swapped(here: Path, models_of: Mapping[str, Path], way: str, stages: int, *, quick: bool) -> dict[str, Any]:
    """Both seats given away and the team trained on; where a swap is refused, why."""
    options = OPTIONS[way]
    if quick:
        options = options.model_copy(update={"contexts": 200, "steps": 10, "radius": 5.0, "batch": 32, "rounds": 1})
    third, spent = baton.open_run(here).fingerprint(KEPT), {"played": 0, "trained": 0}
    for agent in SWAPPED:
        try:
            record = swaps.swap(here, agent, str(models_of[agent]), options=options)
        except swaps.Refused as refused:
            return {"refused": str(refused), "third": baton.open_run(here).fingerprint(KEPT) == third}
        spent = {name: spent[name] + record["tokens"][name] for name in spent}
    after = accuracy(here)
    kept = baton.open_run(here).fingerprint(KEPT) == third
    config = baton.open_run(here).config
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"stages": stages})})
    trained = baton.train(config, run=here, resume=True)
    return {
        "after": mean(after),
        "later": mean(accuracy(trained)),
        "third": kept,
        "spent": spent,
        "training_tokens": training_tokens(trained),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, seeds=SEEDS, fewest=2, quick="two stages, two seeds: shows that it runs", keep=KEEPS_RESULTS)
    parser.add_argument("--case", choices=CASES, action="append", help="one task (repeatable; default: all)")
    args = parser.parse_args(argv)
    seeds = list(range(args.seed, args.seed + (2 if args.quick else args.seeds)))
    cases: list[str] = args.case or list(CASES)[: 1 if args.quick else None]
    ways = QUICK_WAYS if args.quick else WAYS
    with results(args.keep, __file__, {"quick": args.quick, "relays": code(Path(relays.__file__))}) as found:
        run_missing(found, measure, {(case, seed): (case, seed, args.quick) for case in cases for seed in seeds})
    figures: dict[str, Any] = {}
    bars: Bars = {}
    same: list[bool] = []
    for case in cases:
        rows = [found.found[case, seed] for seed in seeds]
        before = [r["before"] for r in rows]
        told: dict[str, Any] = {"before": mean_interval(before), "scratch": mean_interval([r["scratch"] for r in rows])}
        print(f"\n{case}, {len(seeds)} seeds: accuracy on test prompts, and what it is above the team before")
        print(f"  before             {shown(told['before'])}")
        print(f"  scratch            {shown(told['scratch'])}")
        same += [r["ways"][way]["third"] for r in rows for way in ways]

        def less(
            way: str, when: str, rows: Sequence[Any] = rows, before: Sequence[float] = before
        ) -> tuple[Interval, Interval] | None:
            pairs = [(r["ways"][way].get(when), b) for r, b in zip(rows, before, strict=True)]
            there = [(value, b) for value, b in pairs if value is not None]
            if len(there) < 2:
                return None
            values, starts = [v for v, _ in there], [b for _, b in there]
            return mean_interval(values), paired_interval(values, starts)

        for way in ways:
            refused = sum("refused" in r["ways"][way] for r in rows)
            told[way] = {"refused": refused}
            for when in ("after", "later"):
                if (one := less(way, when)) is not None:
                    told[way][when] = {"accuracy": one[0], "difference": one[1]}
                    print(f"  {way + ', ' + when:18} {shown(one[0])}   {shown(one[1], sign='+')}")
            if refused:
                print(f"  {way}: {refused} of {len(seeds)} teams refused the newcomer")
        both = [(r["ways"]["distill"]["after"], r["ways"]["raw"]["after"]) for r in rows if "after" in r["ways"]["distill"]]
        if len(both) > 1:
            told["distill minus raw, right after"] = paired_interval([a for a, _ in both], [b for _, b in both])
            print(f"  distill minus raw, right after: {shown(told['distill minus raw, right after'], sign='+')}")
        figures[case] = told
    bars["third seat: share of swaps that left its weights alone"] = (sum(same) / len(same), 1.0, all(same))
    if args.quick:
        done = len(found.found)
        bars["results"] = (done, len(cases) * len(seeds), done == len(cases) * len(seeds))
    elif "relay" in figures:
        bars |= relay_bars(figures["relay"], len(seeds))
    return last_line("plug_and_play", quick=args.quick, figures=figures, bars=bars)


def relay_bars(told: Mapping[str, Any], seeds: int) -> Bars:
    """What is asked of the relay; a way that was refused everywhere holds nothing."""
    nothing = Interval(value=float("nan"), low=float("-inf"), high=float("inf"), n=0, method="student")

    def part(way: str, when: str, what: str) -> Interval:
        return told[way].get(when, {}).get(what, nothing)

    chance = CASES["relay"][1]
    raw, primary = part("raw", "after", "accuracy"), told.get("distill minus raw, right after", nothing)
    distilled, mixed = part("distill", "after", "difference"), part("mixture", "after", "difference")
    later = part("distill", "later", "difference")
    asked: Mapping[str, tuple[float, float, Callable[[float, float], bool]]] = {
        "primary contrast, distill minus raw right after: lower end above": (primary.low, 0.0, lambda a, b: a > b),
        "raw, right after: upper end at most": (raw.high, chance + 0.1, lambda a, b: a <= b),
        "distill, right after: lower end of the difference above": (distilled.low, -0.05, lambda a, b: a > b),
        "mixture, right after: lower end of the difference above": (mixed.low, -0.02, lambda a, b: a > b),
        "distill, later: lower end of the difference above": (later.low, -0.02, lambda a, b: a > b),
        "distill: teams that refused": (told["distill"]["refused"], 0.0, lambda a, b: a <= b),
    }
    return {name: (value, bar, holds(value, bar)) for name, (value, bar, holds) in asked.items()}


if __name__ == "__main__":
    sys.exit(guarded(main))
