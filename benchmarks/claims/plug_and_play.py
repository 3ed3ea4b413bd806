"""What is it worth to give two seats of a trained team to models with four times the parameters, and what does it cost?

    python benchmarks/claims/plug_and_play.py [--quick] [--seed N] [--seeds N] [--keep DIR]

Two tasks for three agents of 65,000 parameters (`relays.Coded`, `relays.Sums`), in both of which a call that lacks what one
seat sees can only guess:

- relay: that of configs/quickstart.toml, but the first two seats say a symbol in a private code, a permutation that belongs
  to the team and that its seats learn in their warm start and in RL; the answer is plain;
- sums: a digit goes through three operations modulo 10, one a seat. Nothing is private.

A team imitates demonstrators that err one time in ten, and is trained. Then its first two seats are given away, one
`baton swap` after the other, to models of 257,000 parameters, each of which was taught without errors what the seat of
another team says (its own code: capable, but foreign). The third seat stays. Then the team is trained on. Arms, from one and
the same trained team:

- kept: no swap, the team is trained on as it is;
- raw: the newcomer as it comes;
- distill: Stage 0, behind its gate; a newcomer that the gate refuses takes the seat as a mixture (ALGORITHMS 2.8);
- mixture: both models run, and the seat is not trained any further;
- imitate: the same newcomer with other token ids, so that no law of one is near a law of the other (relay only);
- scratch: a team with two seats of 257,000 parameters from the start, taught and trained as the small team was (relay only).

Every swapped team is trained on for as many tokens. Kept is measured there as well, and then where it has generated as many
as distill with the episodes that Stage 0 plays, which is what scratch is given too (the gate's probe episodes of RL are not
counted, nor what a warm start imitates). Measured on the same test prompts with the same keys: accuracy before the swap,
right after it, and after training on. TeamTR (arXiv 2605.15207) reports a shock of 18.3 points raw and 2.9 with Stage 0;
the SAT paper reports +10.4 points for two seats and +13.9 for all three, of "continued" training.

The primary contrast is distill minus raw right after the swap, on the relay. Bars, over seeds:

- primary contrast: lower end above 0;
- relay: raw right after the swap, upper end at most chance + .1 (it falls);
- both tasks: distill minus before, right after, lower end at least -.05; mixture minus before at least -.02;
- both tasks: distill trained on minus before, lower end above -.02;
- the third seat's weights are bit for bit the same behind every swap; the gate refuses at most one of four newcomers;
- generated training tokens of kept and scratch beside those of distill, largest relative difference.

Not a bar, but told: what large seats are worth (distill, and each other arm, minus kept). The last line is JSON; the exit
code is 0 only if all bars hold.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import relays
from claim import (
    KEEPS_RESULTS,
    ROOT,
    Bars,
    Results,
    arguments,
    code,
    guarded,
    last_line,
    results,
    run_missing,
    shown,
    training_tokens,
)
from safetensors.torch import load_file, save_file

import baton
from baton import assemble, records
from baton.algorithms.stage0 import Mode, SwapOptions
from baton.core.scores import Interval, paired_interval
from baton.engines import models
from baton.host import complete
from baton.journal import Run, open_run
from baton.swap import Refused, stages_done, swap, tested

CONFIG = ROOT / "configs" / "quickstart.toml"
SEEDS = 8
RELAY, SUMS = "relay", "sums"
SMALL, LARGE = "tiny:64k", "tiny:256k"
SEATS, SWAPPED, THIRD = ("X", "Y", "Z"), ("X", "Y"), "Z"
CHANCE: Mapping[str, float] = {RELAY: 1 / 8, SUMS: 1 / 10}
"""Of an answer that no seat's mistake can make likelier: uniform over symbols, over digits."""

BEFORE, KEPT, RAW, DISTILL, MIXTURE, IMITATE, SCRATCH = "before", "kept", "raw", "distill", "mixture", "imitate", "scratch"
MODES: Mapping[str, Mode] = {RAW: "raw", DISTILL: "distill", MIXTURE: "mixture", IMITATE: "imitate"}
ARMS: Mapping[str, Sequence[str]] = {RELAY: (KEPT, *MODES, SCRATCH), SUMS: (KEPT, RAW, DISTILL, MIXTURE)}


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large everything is."""

    stages: int
    """Of the team before the swap."""
    more: int
    """After it, each with the tokens of a whole team's stage."""
    episodes: int
    taught: int
    """Most batches of a seat's warm start."""
    learned: int
    """Most batches of a newcomer's."""
    demonstrations: int
    held_out: int
    prompts: int
    tests: int
    swap: Mapping[str, Any]
    """Options of every swap."""
    of_mode: Mapping[str, Mapping[str, Any]]
    """Options of the swaps of an arm. The targets of a distillation lie at half of its radius, what a mixture serves lies on
    its radius wherever the newcomer is outside; imitation takes all of its rounds, since nothing ends it sooner."""


BATCH, RATE = 128, 1.5e-3
"""Of every warm start and Stage 0 (configs/quickstart.toml)."""
FULL = Size(
    stages=30,
    more=15,
    episodes=128,
    taught=500,
    learned=400,
    demonstrations=16_000,
    held_out=512,
    prompts=20_000,
    tests=1000,
    swap={"contexts": 4000, "steps": 150, "batch": 128, "lr": RATE},
    of_mode={DISTILL: {"radius": 0.05}, MIXTURE: {"radius": 0.002}, IMITATE: {"rounds": 2}},
)
QUICK = Size(
    stages=1,
    more=1,
    episodes=32,
    taught=2,
    learned=2,
    demonstrations=400,
    held_out=64,
    prompts=1000,
    tests=50,
    swap={"contexts": 64, "rounds": 1, "steps": 2, "batch": 16, "lr": RATE, "radius": 20.0},
    of_mode={},
)
RIGHT = 0.9
"""How often the demonstrators of the team's seats are right."""
ENOUGH: Mapping[str, float] = {RELAY: 0.75, SUMS: 0.79}
"""Expected accuracy at which a seat has imitated enough: one that says just what the demonstrators do has .81."""
CAPABLE = 0.95
"""Expected accuracy at which a newcomer has learned its former team's seat."""


# ---- teams -------------------------------------------------------------------------------------------------------------


def own_env(case: str, size: Size, *, team: int, right: float) -> str:
    """The env of a team, by number."""
    given = f"prompts={size.prompts}, demonstration_accuracy={right}"
    if case == SUMS:
        return f'env={{name="relays:Sums", arguments={{{given}}}}}'
    return f'env={{name="relays:Coded", arguments={{code={team}, symbols=8, {given}}}}}'


def warm(size: Size, *, steps: int, target: float) -> str:
    """A warm start of a seat."""
    drawn = f"batch={min(BATCH, size.demonstrations // 4)}, demonstrations={size.demonstrations}, held_out={size.held_out}"
    return f"{{lr={RATE}, target={target}, steps={steps}, {drawn}, check_every=25}}"


def team_changes(case: str, seed: int, size: Size, *, large: Sequence[str] = (), stages: int) -> list[str]:
    """What a team changes of the quickstart; `large` are the seats of LARGE models."""
    made = [f"seed={seed}", "engine.threads=1", "algorithm.min_informative=1", own_env(case, size, team=seed, right=RIGHT)]
    for i, name in enumerate(SEATS):
        made.append(f"agents.{i}.model={LARGE if name in large else SMALL}")
        made.append(f"agents.{i}.warm_start={warm(size, steps=size.taught, target=ENOUGH[case])}")
    return [*made, f"algorithm.episodes={size.episodes}", f"algorithm.stages={stages}", f"eval.episodes={size.tests}"]


def stage_tokens(size: Size, agents: int = len(SEATS)) -> int:
    """Tokens that a stage generates to learn from, with so many agents in training: each message is one token."""
    return agents * size.episodes * len(SEATS)


def without_workers(stack: ExitStack) -> None:
    """Grade in this process: comparing two characters of our own needs no process that can be killed, and a pair of them for
    each of the forty times that a team of a seed is loaded would take as long as training it."""
    stack.enter_context(patch.object(assemble, "grader_pool", lambda *_, **__: None))


def accuracy(path: Path) -> float:
    """Of the team in a run, on its test prompts; the same prompts and keys for every team of a seed."""
    team = baton.load_team(path)
    try:
        return fmean(complete(tested(team.plan, team.table, team.team.versions)))
    finally:
        team.close()


def weights_of(run: Run, agent: str) -> str:
    """Checksum of the tensors that an agent is served from, as they lie on disk."""
    return models.fingerprint(models.checksums(records.stored(run.folder(agent) / "model.safetensors")))


# ---- newcomers ---------------------------------------------------------------------------------------------------------


def newcomer(case: str, seed: int, size: Size, agent: str, folder: Path) -> dict[str, Any]:
    """Teach a large model the seat of another team, into `folder`; what that took."""
    index = SEATS.index(agent)
    made = team_changes(case, seed, size, large=SWAPPED, stages=1)
    made += [own_env(case, size, team=1_000_000 + len(SEATS) * seed + index, right=1.0)]
    made += [f"agents.{index}.warm_start={warm(size, steps=size.learned, target=CAPABLE)}"]
    plan = assemble.prepare(baton.load_config(CONFIG, made), root=CONFIG.parent)
    assemble.set_threads(plan.config, plan.parameters)
    source, record, _ = assemble.start_folder(plan, index, tick=lambda *_: None)
    assert record is not None
    folder.mkdir(parents=True)
    assemble.copy_model(source, folder)
    return {"steps": record.steps, "tokens": record.tokens, "accuracy": record.accuracy[-1][1]}


def respell(source: Path, target: Path) -> None:
    """The same tiny model with its token ids in the opposite order: it says the same, and no id of it means what it did."""
    target.mkdir(parents=True)
    assemble.copy_model(source, target)
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    last = len(tokenizer["model"]["vocab"]) - 1
    tokenizer["model"]["vocab"] = {token: last - i for token, i in reversed(tokenizer["model"]["vocab"].items())}
    added = [{**token, "id": last - token["id"]} for token in tokenizer["added_tokens"]]
    tokenizer["added_tokens"] = sorted(added, key=lambda token: token["id"])
    models.write_json(target / "tokenizer.json", tokenizer)
    for name in ("config.json", "generation_config.json"):
        told = json.loads((source / name).read_text(encoding="utf-8"))
        models.write_json(target / name, told | {k: last - told[k] for k in ("eos_token_id", "pad_token_id")})
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


# ---- arms --------------------------------------------------------------------------------------------------------------


def measure(task: tuple[str, str, int, bool, str, int]) -> dict[str, Any]:
    """One arm of a case on one seed. BEFORE makes what the others begin with, in the folder that is named before the tokens
    which KEPT and SCRATCH are to generate."""
    case, arm, seed, quick, place, tokens = task
    size, home = QUICK if quick else FULL, Path(place) / f"{case}-{seed}"
    began = time.process_time()
    with ExitStack() as stack:
        without_workers(stack)
        if arm == BEFORE:
            found = before(case, seed, size, home)
        else:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-claim-")))
            match arm:
                case "scratch":
                    found = scratch(case, seed, size, work, tokens)
                case "kept":
                    found = stayed(case, seed, size, home, work, tokens)
                case _:
                    found = swapped(case, seed, size, home, work, arm)
    return found | {"cpu_seconds": time.process_time() - began}


def before(case: str, seed: int, size: Size, home: Path) -> dict[str, Any]:
    """Train the small team, and teach the newcomers."""
    shutil.rmtree(home, ignore_errors=True)
    newcomers = {name: newcomer(case, seed, size, name, home / name) for name in SWAPPED}
    for name in SWAPPED:
        respell(home / name, home / f"{name} respelt")
    run = baton.train(CONFIG, run=home / "run", overrides=team_changes(case, seed, size, stages=size.stages))
    return told(run, accuracy(run.path)) | {"newcomers": newcomers, "weights": weights_of(run, THIRD)}


def told(run: Run, later: float) -> dict[str, Any]:
    """What every arm says of the run that it ended with."""
    return {
        "later": later,
        "tokens": training_tokens(run),
        "parameters": run.start["parameters"],
        "imitated": {name: record["accuracy"][-1][1] for name, record in run.start["warm_start"].items()},
        "words": dict(Counter(u["word"] for u in run.updates)),
        "ending": run.ending,
    }


def copied(home: Path, work: Path) -> Path:
    """The small team's run, to go on with."""
    shutil.copytree(home / "run", work / "run", ignore=shutil.ignore_patterns(".lock"))
    return work / "run"


def scratch(case: str, seed: int, size: Size, work: Path, tokens: int) -> dict[str, Any]:
    """Train the mixed team from its own warm starts."""
    made = team_changes(case, seed, size, large=SWAPPED, stages=round(tokens / stage_tokens(size)))
    run = baton.train(CONFIG, run=work / "run", overrides=made)
    return told(run, accuracy(run.path))


def stayed(case: str, seed: int, size: Size, home: Path, work: Path, tokens: int) -> dict[str, Any]:
    """Train the small team on: as the swapped ones are, and then to these tokens."""
    path = copied(home, work)
    baton.train(CONFIG, run=path, resume=True, overrides=team_changes(case, seed, size, stages=size.stages + size.more))
    soon = accuracy(path)
    stages = max(size.stages + size.more, round(tokens / stage_tokens(size)))
    run = baton.train(CONFIG, run=path, resume=True, overrides=team_changes(case, seed, size, stages=stages))
    return told(run, soon) | {"at_equal_tokens": accuracy(path)}


def options_of(size: Size, arm: str) -> SwapOptions:
    return SwapOptions(mode=MODES[arm], **{**size.swap, **size.of_mode.get(arm, {})})


def swapped(case: str, seed: int, size: Size, home: Path, work: Path, arm: str) -> dict[str, Any]:
    """Swap both seats as the arm does, and train on."""
    path = copied(home, work)
    swaps: dict[str, Any] = {}
    for index, name in enumerate(SWAPPED):
        folder, options = str(home / (f"{name} respelt" if arm == IMITATE else name)), options_of(size, arm)
        refused, wasted = None, 0
        try:
            record = swap(path, name, folder, options=options)
        except Refused as no:
            refused = str(no)
            # Every message is one token, and whoever is refused has used all rounds; the gate's own prompts are a few more.
            wasted = options.rounds * options.contexts * (index + 1)
            record = swap(path, name, folder, options=options_of(size, MIXTURE))
        kept = ("mode", "rounds", "tokens", "seconds", "parameters")
        swaps[name] = {k: record[k] for k in kept if k in record} | {"refused": refused}
        swaps[name]["tokens"]["played"] += wasted
        if "imitation" in record:
            swaps[name]["imitation"] = record["imitation"]["accuracy"][-1][1]
    run = open_run(path)
    found = {"swaps": swaps, "right_after": accuracy(path), "weights": weights_of(run, THIRD)}
    # A seat that two models hold is not trained, and stages of fewer agents have fewer tokens.
    agents = sum(a.trainable for a in run.config.agents)
    more = round(size.more * stage_tokens(size) / stage_tokens(size, agents))
    made = team_changes(case, seed, size, stages=stages_done(run) + more)
    run = baton.train(CONFIG, run=path, resume=True, overrides=made)
    last = told(run, accuracy(path))
    played = sum(s["tokens"]["played"] for s in swaps.values())
    base = 0 if run.path == run.home else training_tokens(Run(run.home))
    return found | last | {"tokens": base + played + last["tokens"]}


# ---- what is said ------------------------------------------------------------------------------------------------------

FALLS, SHOCK, MIXED_SHOCK, LATER, REFUSED = 0.1, 0.05, 0.02, 0.02, 0.25
SAME_TOKENS = 0.02
"""Largest relative difference of the tokens that two trainings generated and are called equal."""


def at(case: str, arm: str) -> str:
    """An arm of a case, as results are kept."""
    return f"{case}: {arm}"


def less(kept: Results, case: str, arm: str, what: str, seeds: Sequence[int]) -> Interval:
    """A number of an arm minus the accuracy before the swap, within the seed."""
    own = kept.values(at(case, arm), seeds, lambda r: r[what])
    return paired_interval(own, kept.values(at(case, BEFORE), seeds, lambda r: r["later"]))


def case_bars(case: str, kept: Results, seeds: Sequence[int]) -> Bars:
    """The bars of one case."""
    found = {arm: [kept.found[at(case, arm), s] for s in seeds] for arm in (BEFORE, *ARMS[case])}
    bars: Bars = {}
    if case == RELAY:
        apart = kept.contrast(at(case, DISTILL), at(case, RAW), seeds, lambda r: r["right_after"])
        bars["primary contrast, distill minus raw right after: lower end above"] = (apart.low, 0.0, apart.low > 0.0)
        raw, most = kept.mean(at(case, RAW), seeds, lambda r: r["right_after"]), CHANCE[case] + FALLS
        bars[f"{case}: raw right after, upper end at most"] = (raw.high, most, raw.high <= most)
    for arm, loss in ((DISTILL, SHOCK), (MIXTURE, MIXED_SHOCK)):
        shock = less(kept, case, arm, "right_after", seeds)
        bars[f"{case}: {arm} right after minus before, lower end at least"] = (shock.low, -loss, shock.low >= -loss)
    later = less(kept, case, DISTILL, "later", seeds)
    bars[f"{case}: distill trained on minus before, lower end above"] = (later.low, -LATER, later.low > -LATER)
    own = [r["weights"] for r in found[BEFORE]]
    changed = sum(r["weights"] != w for arm in ARMS[case] if arm in MODES for r, w in zip(found[arm], own, strict=True))
    bars[f"{case}: third seats that a swap changed"] = (changed, 0, changed == 0)
    refused = fmean(s["refused"] is not None for r in found[DISTILL] for s in r["swaps"].values())
    bars[f"{case}: newcomers that the gate refused, share"] = (refused, REFUSED, refused <= REFUSED)
    equal = [arm for arm in (KEPT, SCRATCH) if arm in found]
    tokens = [(r["tokens"], d["tokens"]) for arm in equal for r, d in zip(found[arm], found[DISTILL], strict=True)]
    most = max(abs(own - wanted) / wanted for own, wanted in tokens)
    bars[f"{case}: generated tokens, largest difference"] = (most, SAME_TOKENS, most <= SAME_TOKENS)
    return bars


def tell(case: str, kept: Results, seeds: Sequence[int]) -> dict[str, Any]:
    """Print the table of a case, and give its figures."""

    def own(arm: str, seed: int) -> Any:
        return kept.found[at(case, arm), seed]

    start = kept.mean(at(case, BEFORE), seeds, lambda r: r["later"])
    figures: dict[str, Any] = {BEFORE: {"accuracy": start}}
    taught = fmean(n["accuracy"] for s in seeds for n in own(BEFORE, s)["newcomers"].values())
    print(f"\n{case}, {len(seeds)} seeds: before {shown(start)}; newcomers at their former seats {taught:.3f}")
    print("  arm: right after, minus before; trained on, minus before, minus kept")
    at_equal = kept.mean(at(case, KEPT), seeds, lambda r: r["at_equal_tokens"])
    for arm in ARMS[case]:
        later = kept.mean(at(case, arm), seeds, lambda r: r["later"])
        # A team from scratch had the tokens of distill, those of its swaps included.
        beside = kept.values(at(case, KEPT), seeds, lambda r, arm=arm: r["at_equal_tokens" if arm == SCRATCH else "later"])
        found: dict[str, Any] = {"later": later, "later_minus_before": less(kept, case, arm, "later", seeds)}
        found["later_minus_kept"] = paired_interval(kept.values(at(case, arm), seeds, lambda r: r["later"]), beside)
        first = ""
        if arm in MODES:
            found["right_after"] = kept.mean(at(case, arm), seeds, lambda r: r["right_after"])
            found["right_after_minus_before"] = less(kept, case, arm, "right_after", seeds)
            first = f"{shown(found['right_after'])}   {shown(found['right_after_minus_before'], sign='+')}"
        print(
            f"  {arm:8} {first:48}   {shown(later)}   {shown(found['later_minus_before'], sign='+')}   "
            f"{shown(found['later_minus_kept'], sign='+')}"
        )
        swaps = [list(own(arm, s).get("swaps", {}).values()) for s in seeds]
        costs = {
            "tokens": fmean(own(arm, s)["tokens"] for s in seeds),
            "played": fmean(sum(w["tokens"]["played"] for w in row) for row in swaps),
            "trained": fmean(sum(w["tokens"]["trained"] for w in row) for row in swaps),
            "parameters": sum(own(arm, seeds[0])["parameters"].values()),
            "cpu_seconds": fmean(own(arm, s)["cpu_seconds"] for s in seeds),
        }
        print(
            f"           {costs['tokens']:,.0f} tokens generated, {costs['played']:,.0f} of them by swaps, which read "
            f"{costs['trained']:,.0f}; {costs['parameters']:,} parameters, {costs['cpu_seconds']:.0f} s"
        )
        figures[arm] = {**found, **costs}
    print(f"  kept, where it has generated as many tokens as distill: {shown(at_equal)}")
    figures[KEPT]["at_equal_tokens"] = at_equal
    apart = paired_interval(
        kept.values(at(case, DISTILL), seeds, lambda r: r["later"]),
        kept.values(at(case, KEPT), seeds, lambda r: r["at_equal_tokens"]),
    )
    print(f"  distill minus that: {shown(apart, sign='+')}")
    figures[DISTILL]["later_minus_kept_at_equal_tokens"] = apart
    return figures


def given(kept: Results, case: str, arm: str, seed: int) -> int:
    """The tokens that an arm is to generate where they are those of distill; 0 elsewhere."""
    return int(kept.found[at(case, DISTILL), seed]["tokens"]) if arm in (KEPT, SCRATCH) else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(
        __doc__, seeds=SEEDS, fewest=2, quick="two seeds of the relay, one stage: shows that it runs", keep=KEEPS_RESULTS
    )
    parser.add_argument("--processes", type=int, default=2, help="how many arms run side by side (default: 2)")
    args = parser.parse_args(argv)
    cases = (RELAY,) if args.quick else (RELAY, SUMS)
    seeds = list(range(args.seed, args.seed + (2 if args.quick else args.seeds)))
    size = QUICK if args.quick else FULL
    settings = {"quick": args.quick, "size": asdict(size), "relays": code(Path(relays.__file__))}
    with ExitStack() as stack:
        kept = stack.enter_context(results(args.keep, __file__, settings))
        place = args.keep / "teams" if args.keep else stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-claim-"))
        # The teams first: every other arm begins with a copy of one; last what is given the tokens of distill.
        steps: list[Mapping[str, Sequence[str]]] = [dict.fromkeys(cases, (BEFORE,)), dict.fromkeys(cases, tuple(MODES))]
        for of in (*steps, dict.fromkeys(cases, (KEPT, SCRATCH))):
            tasks = {
                (at(case, arm), seed): (case, arm, seed, args.quick, str(place), given(kept, case, arm, seed))
                for seed in seeds
                for case in cases
                for arm in of[case]
                if arm in (BEFORE, *ARMS[case])
            }
            run_missing(kept, measure, tasks, processes=args.processes)
    figures = {case: tell(case, kept, seeds) for case in cases}
    bars: Bars = {}
    if args.quick:
        done, wanted = len(kept.found), len(seeds) * (1 + len(ARMS[RELAY]))
        bars["results"] = (done, wanted, done == wanted)
    else:
        for case in cases:
            bars |= case_bars(case, kept, seeds)
    return last_line("plug_and_play", quick=args.quick, figures=figures, bars=bars)


if __name__ == "__main__":
    sys.exit(guarded(main))
