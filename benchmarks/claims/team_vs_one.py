"""Three agents against one: what a team is worth beside a model of its total size, trained on as much.

    python benchmarks/claims/team_vs_one.py [--quick] [--size 64k ...] [--seed N] [--seeds N] [--keep DIR]

The relay of configs/quickstart.toml. Each arm has SYMBOLS demonstrated symbols, each right six times in ten, and imitates
them until there is nothing left to imitate or it has been shown TAUGHT tokens; then it learns by reinforcement from as many
generated tokens in as many updates as each other arm, behind the same gate:

- team: three agents, each sees one table and hears the one before it;
- shared start: the same, but each begins as one and the same model that imitated all three seats; asked for its self-relay;
- answer: one model of the total size, sees the whole question and says the answer alone;
- works: the same, and writes one symbol for each table first, as the team does: its last symbol is the answer;
- one shard: one model of the total size that sees the start and the first table, as one call of a team does.

The team's report (`baton.evaluate`, with `answer` as its model of full information) has three more: the best of its agents
in all seats, and the best asked the whole question, with three times the tokens or by majority of three answers. Of these,
answer, works and one shard are trained as fairly as we know how; the rest were never trained for what they are asked.

At equal tokens and with the whole question a single model is never worse in principle (ALGORITHMS 3.8), so the primary
contrast is team minus works, and what would be news is a team that is better. A call that lacks a table is right one time in
eight, whatever its size (11). The last line is JSON; the exit code is 0 only if all bars hold.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import relays
from claim import (
    KEEPS_RESULTS,
    ROOT,
    Bars,
    Results,
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
from baton.core.scores import Interval, mean_interval, paired_interval
from baton.errors import ConfigError
from baton.journal import Run

CONFIG = ROOT / "configs" / "quickstart.toml"
SEEDS = 8
TOTAL: Mapping[str, str] = {"64k": "195k", "1M": "3M"}
"""Size of an agent -> of one model as large as three of them (`tiny:SIZE`)."""


# ---- equal tokens ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What a training takes: stages of so many agents, episodes an update, tokens an episode."""

    stages: int
    agents: int
    episodes: int
    tokens: int

    @property
    def updates(self) -> int:
        return self.stages * self.agents

    @property
    def total(self) -> int:
        """Generated tokens, the gate's probe episodes not counted."""
        return self.updates * self.episodes * self.tokens

    def alone(self, tokens: int) -> Spent:
        """The same updates of the same tokens for one agent whose episodes have `tokens` of them.

        Raises:
            ConfigError: an update's tokens are no whole number of such episodes.
        """
        an_update = self.episodes * self.tokens
        if an_update % tokens:
            raise ConfigError(f"{an_update} tokens an update are no whole number of episodes of {tokens} tokens")
        return Spent(stages=self.updates, agents=1, episodes=an_update // tokens, tokens=tokens)


def lessons(taught: int, tokens: int, *, batch: int) -> int:
    """Batches of demonstrations that show `taught` tokens to imitate, `tokens` in each demonstration."""
    return taught // (batch * tokens)


TEAM = Spent(stages=50, agents=3, episodes=128, tokens=3)
BATCH = 128
SYMBOLS, TAUGHT = 3 * 16_000, 3 * 700 * BATCH
"""Symbols demonstrated, and tokens to imitate them in, at most: of the quickstart's three seats together."""
PROMPTS = 20_000
"""Of the quickstart. An arm with one symbol in each demonstration needs as many tasks as symbols, three times as many; the
test prompts of the fewer are among those of the more, and train prompts of neither."""
HOP = 0.37
"""Expected accuracy of a symbol at which there is nothing left to imitate (configs/quickstart.toml)."""
FEW = 10
"""Updates of one shard: no training can change what is proven."""


# ---- arms --------------------------------------------------------------------------------------------------------------

TEAM_ARM, SHARED, WORKS, SHARD = "team", "shared start", "works", "one shard"
ARMS = (TEAM_ARM, SHARED, WORKS, SHARD)
"""What is trained apart; `answer` is trained beside the team, whose report asks it."""
QUICK_WARM, QUICK_EPISODES, QUICK_PROMPTS = 5, 32, 1000


def team_changes(size: str, arm: str, *, quick: bool) -> list[str]:
    """What a team of three changes of the quickstart."""
    made = [f"agents.{i}.model=tiny:{size}" for i in range(3)]
    made += [f"algorithm.stages={2 if quick else TEAM.stages}", f"algorithm.episodes={TEAM.episodes}"]
    for i in range(3):
        if arm == SHARED:
            steps = lessons(TAUGHT, 1, batch=BATCH)
            warm = {"seats": "all", "steps": steps, "demonstrations": SYMBOLS}
            made += [f"agents.{i}.warm_start.{name}={value}" for name, value in warm.items()]
        if quick:
            made.append(f"agents.{i}.warm_start.steps={QUICK_WARM}")
    made.append(f"env.prompts={QUICK_PROMPTS if quick else 3 * PROMPTS if arm == SHARED else PROMPTS}")
    return [*made, f"algorithm.episodes={QUICK_EPISODES}"] if quick else made


def one_changes(size: str, arm: str, *, quick: bool) -> list[str]:
    """What one model alone changes of it. It says a symbol and ends, or three symbols."""
    tokens, symbols = (3, 3) if arm == WORKS else (2, 1)
    spent = TEAM.alone(tokens)
    seen = {WORKS: "works=true, ", SHARD: "shard=0, "}.get(arm, "")
    steps = QUICK_WARM if quick else lessons(TAUGHT, tokens, batch=BATCH) // (4 if arm == SHARD else 1)
    target = HOP**3 if arm == WORKS else HOP
    warm = f"lr=1.5e-3, batch={BATCH}, target={target:.4f}, steps={steps}, held_out=512, check_every=25"
    warm += f", demonstrations={SYMBOLS // symbols}"
    stages = 4 if quick else FEW if arm == SHARD else spent.stages
    prompts = QUICK_PROMPTS if quick else PROMPTS * 3 // symbols
    model = f'name="one", model="tiny:{TOTAL[size]}", system="", max_new_tokens={tokens}, lr=5e-4'
    return [
        f'env={{name="relays:Alone", arguments={{{seen}symbols=8, demonstration_accuracy=0.6, prompts={prompts}}}}}',
        f"agents=[{{{model}, warm_start={{{warm}}}}}]",
        f"algorithm.stages={stages}",
        f"algorithm.episodes={QUICK_EPISODES if quick else spent.episodes}",
    ]


def trained(folder: Path, seed: int, made: Sequence[str], *, quick: bool) -> Run:
    common = [f"seed={seed}", "engine.threads=1", "algorithm.min_informative=1", f"eval.episodes={100 if quick else 1000}"]
    return baton.train(CONFIG, run=folder, overrides=[*common, *made])


def cost(run: Run) -> dict[str, Any]:
    """What a run was given: parameters, tokens to imitate and to learn from, and how well it imitated in the end."""
    starts, own = run.start["warm_start"], {a.name: a.max_new_tokens for a in run.config.agents}
    # A start that all seats share was made once.
    is_shared = all(a.warm_start is not None and a.warm_start.seats == "all" for a in run.config.agents)
    made = dict(list(starts.items())[:1]) if is_shared else starts
    return {
        "parameters": sum(run.start["parameters"].values()),
        "imitated_tokens": sum(r["steps"] * BATCH * own[name] for name, r in made.items()),
        "imitated": {name: r["accuracy"][-1][1] for name, r in starts.items()},
        "training_tokens": training_tokens(run),
        "words": dict(Counter(u["word"] for u in run.updates)),
        "ending": run.ending,
    }


def measure(task: tuple[str, str, int, bool]) -> dict[str, Any]:
    """Train an arm of one size on one seed; the rows that it gives, each with its tokens an answer."""
    size, arm, seed, quick = task
    with tempfile.TemporaryDirectory(prefix="baton-claim-") as name:
        folder = Path(name)
        if arm in (TEAM_ARM, SHARED):
            run = trained(folder / "team", seed, team_changes(size, arm, quick=quick), quick=quick)
            one = None
            if arm == TEAM_ARM:
                one = trained(folder / "answer", seed, one_changes(size, "answer", quick=quick), quick=quick)
            report = baton.evaluate(run.path, full_information=None if one is None else str(one.folder("one")))
            rows = {r["name"]: r for r in report["rows"]}
            found = {TEAM_ARM: rows["team"], "untrained team": rows["untrained team"]}
            found["same model in all seats"] = rows["same model in all seats"]
            if one is not None:
                found["answer"] = rows["one model of the total size, full information"]
                found |= alone_rows(run, report)
            costs = {arm: cost(run)} | ({} if one is None else {"answer": cost(one)})
        else:
            run = trained(folder / "one", seed, one_changes(size, arm, quick=quick), quick=quick)
            report = baton.evaluate(run.path, baselines=False)
            found, costs = {arm: report["rows"][0]}, {arm: cost(run)}
        kept = {n: {k: r[k] for k in ("value", "n", "tokens_per_answer", "note")} for n, r in found.items()}
        return {"rows": kept, "costs": costs, "facts": report["facts"]}


def alone_rows(run: Run, report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The best of a team's agents, asked the whole question: by one longer answer, and by majority; from the episodes of a
    report, whose own row has the better of the two."""
    played = (run.path / report["file"]).with_suffix(".parquet")
    rows = records.read_episodes(played, ["use", "reward", "turns.list.element.ids"])
    n = len(run.config.agents)
    found: dict[str, dict[str, Any]] = {}
    for name, suffix in (
        (f"best agent, {n}x tokens", f"alone, {n}x tokens"),
        ("best agent, majority", f"alone, majority of {n}"),
    ):
        means: dict[str, tuple[float, int, float]] = {}
        for agent in run.config.agents:
            own = [row for row in rows if row["use"] == f"{agent.name} {suffix}" and row["reward"] is not None]
            tokens = math.fsum(len(turn["ids"]) for row in own for turn in row["turns"])
            means[agent.name] = (math.fsum(row["reward"] for row in own) / len(own), len(own), tokens / len(own))
        best = max(means, key=lambda agent: means[agent][0])
        value, prompts, tokens = means[best]
        found[name] = {"value": value, "n": prompts, "tokens_per_answer": tokens, "note": best}
    return found


# ---- what is said ------------------------------------------------------------------------------------------------------

WORSE = 0.05
"""By how much a team may be better than one model that writes down its work, which in principle is never worse."""
SAME_TOKENS = 0.02
"""Largest relative difference of the tokens that two trainings generated and are called equal."""

ROWS: Mapping[str, tuple[str, str]] = {
    "team": (TEAM_ARM, "team"),
    "untrained team": (TEAM_ARM, "untrained team"),
    "one call, one shard": (SHARD, SHARD),
    "one model, whole question, answer": (TEAM_ARM, "answer"),
    "one model, whole question, works": (WORKS, WORKS),
    "self-relay of the best agent": (TEAM_ARM, "same model in all seats"),
    "self-relay, shared start": (SHARED, "same model in all seats"),
    "team, shared start": (SHARED, TEAM_ARM),
    "best agent, 3x tokens": (TEAM_ARM, "best agent, 3x tokens"),
    "best agent, majority": (TEAM_ARM, "best agent, majority"),
}
"""Row as it is told -> (arm, row of its result)."""


COSTS: Mapping[str, str] = {TEAM_ARM: TEAM_ARM, "answer": TEAM_ARM, WORKS: WORKS, SHARED: SHARED, SHARD: SHARD}
"""Training -> the arm whose result tells what it took."""


def at(size: str, arm: str) -> str:
    """An arm of a size, as results are kept."""
    return f"{size}: {arm}"


def accuracy(row: str) -> Callable[[Any], float]:
    """The accuracy that a result has in this row."""
    return lambda result: result["rows"][row]["value"]


def apart(tokens: Sequence[float]) -> float:
    """Largest relative difference of two of these counts."""
    return (max(tokens) - min(tokens)) / min(tokens)


def size_bars(size: str, kept: Results, seeds: Sequence[int], less: Mapping[str, Interval]) -> Bars:
    """The bars of one size; `less` is team minus each of ROWS."""
    tokens = [
        apart([kept.found[at(size, COSTS[n]), s]["costs"][n]["training_tokens"] for n in (TEAM_ARM, "answer", WORKS)])
        for s in seeds
    ]
    lone = [kept.found[at(size, SHARD), s] for s in seeds]
    counts = [(round(r["rows"][SHARD]["value"] * r["rows"][SHARD]["n"]), r["rows"][SHARD]["n"]) for r in lone]
    works, shard = less["one model, whole question, works"], less["one call, one shard"]
    return {
        f"{size}: primary contrast, team minus works: upper end at most": (works.high, WORSE, works.high <= WORSE),
        f"{size}: team minus one call, lower end above": (shard.low, 0.0, shard.low > 0.0),
        f"{size}: one call, one shard: highest lower end of a seed, at most the cap": below(
            lone[0]["facts"]["cap_one_call"], counts
        ),
        f"{size}: generated tokens, largest difference": (max(tokens), SAME_TOKENS, max(tokens) <= SAME_TOKENS),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(
        __doc__, seeds=SEEDS, fewest=2, quick="two seeds, some steps, not one shard: shows that it runs", keep=KEEPS_RESULTS
    )
    parser.add_argument(
        "--size",
        nargs="+",
        choices=list(TOTAL),
        default=["64k"],
        help="size of an agent; 1M takes some 160 core-minutes a seed",
    )
    args = parser.parse_args(argv)
    sizes = ["64k"] if args.quick else list(dict.fromkeys(args.size))
    seeds = list(range(args.seed, args.seed + (2 if args.quick else args.seeds)))
    settings = {"quick": args.quick, "relays": code(Path(relays.__file__))}
    with results(args.keep, __file__, settings) as kept:
        arms = ARMS[:-1] if args.quick else ARMS
        tasks = {(at(size, arm), seed): (size, arm, seed, args.quick) for size in sizes for seed in seeds for arm in arms}
        run_missing(kept, measure, tasks)
    figures: dict[str, Any] = {}
    bars: Bars = {}
    for size in sizes:
        print(f"\n{size}, {len(seeds)} seeds: accuracy on test prompts, and team minus it")
        told: dict[str, Any] = {}
        less: dict[str, Interval] = {}
        team = kept.values(at(size, TEAM_ARM), seeds, accuracy(TEAM_ARM))
        for name, (arm, row) in ROWS.items():
            if arm not in arms:
                continue
            own = kept.values(at(size, arm), seeds, accuracy(row))
            less[name] = paired_interval(team, own)
            tokens = kept.mean(at(size, arm), seeds, lambda r, row=row: r["rows"][row]["tokens_per_answer"]).value
            told[name] = {"accuracy": mean_interval(own), "team_minus_this": less[name], "tokens_per_answer": tokens}
            own_and_less = f"{shown(told[name]['accuracy'])}   {shown(less[name], sign='+')}"
            print(f"  {name:34} {own_and_less}   {tokens:.2f} tokens an answer")
        costs = {n: [kept.found[at(size, arm), s]["costs"][n] for s in seeds] for n, arm in COSTS.items() if arm in arms}
        for name, given in costs.items():
            imitated, generated = (fmean(c[k] for c in given) for k in ("imitated_tokens", "training_tokens"))
            print(
                f"  {name:14} {given[0]['parameters']:,} parameters, {imitated:,.0f} tokens to imitate, "
                f"{generated:,.0f} generated"
            )
        figures[size] = {"rows": told, "costs": costs}
        if not args.quick:
            bars |= size_bars(size, kept, seeds, less)
    if args.quick:
        done = len(kept.found)
        bars["results"] = (done, len(tasks), done == len(tasks))
    return last_line("team_vs_one", quick=args.quick, figures=figures, bars=bars)


if __name__ == "__main__":
    sys.exit(guarded(main))
