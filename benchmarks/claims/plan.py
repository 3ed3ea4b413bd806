"""What `baton plan` says beside what the run then shows.

    python benchmarks/claims/plan.py [--seed N] [--quick] [--only TEAM]

Plans and then trains, each in a process of its own: configs/quickstart.toml cut to a few stages, and one short stage of
three SmolLM2-135M, as whole models (which leave memory between their updates) and as LoRA adapters on one base. Compares the
peak of resident memory (ru_maxrss), the disk space of the run directory, and the time of a stage. Ends with one JSON line.
Exit 0 only if memory and disk are within 15 %; time is reported and bars nothing, because it is a property of the minute as
well as of the machine. `--quick` leaves out SmolLM2, `--only` all teams but one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import memory
from claim import ROOT, Bars, last_line

import baton

WITHIN = 0.15
TINY = ["algorithm.stages=10", "engine.threads=1"]
QUICK = ["algorithm.stages=3", "engine.threads=1", *(f"agents.{i}.warm_start.steps=60" for i in range(3))]
TEAMS = {"tiny": "", "whole models": "none", "adapters": "lora"}
"""Team -> what is trained of each SmolLM2 (`memory.tree`)."""


def in_its_own_process(words: list[str], cache: str) -> Any:
    """The JSON that a fresh interpreter prints last; a cache of its own, so that warm starts are trained."""
    done = subprocess.run(
        [sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "BATON_CACHE": cache}
    )
    return json.loads(done.stdout[done.stdout.index("{") :])


def find_models(config: str, overrides: list[str]) -> None:
    """Make what a package's model becomes once: that takes more memory than planning, and must not be measured."""
    from baton import assemble
    from baton.config import load

    assemble.prepare(load(config, overrides), root=Path(config).parent)
    print("{}")


def train(config: str, folder: str, overrides: list[str]) -> None:
    """The run, in the process that is measured: peak memory in bytes, seconds of each stage, verdicts."""
    run = baton.train(config, run=folder, overrides=overrides)
    lines = run.records()
    ends = [line["time"] for line in lines if line["kind"] in ("start", "stage")]
    result = {
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "stages": [end - begin for begin, end in pairwise(ends)],
        "words": [update["word"] for update in run.updates],
        "episodes": [update["episodes"]["n"] for update in run.updates],
    }
    print(json.dumps(result))


def occupied(folder: Path) -> int:
    """Bytes that the file system gave to a folder's files, as du counts."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def compare(team: str, seed: int, quick: bool) -> dict[str, Any]:
    """One team, planned and run."""
    changed = [f"seed={seed}", *((QUICK if quick else TINY) if team == "tiny" else [])]
    settings = [word for one in changed for word in ("--set", one)]
    with tempfile.TemporaryDirectory(prefix="baton-plan-") as folder:
        if team == "tiny":
            file = str(ROOT / "configs" / "quickstart.toml")
        else:
            file = str(memory.write(Path(folder), TEAMS[team], 3, seed=seed, quick=True))
        own = str(Path(folder) / "cache")
        in_its_own_process([__file__, "--find", file, *changed], own)
        planned = in_its_own_process(["-m", "baton", "plan", file, "--json", *settings], own)
        shown = in_its_own_process([__file__, "--train", file, str(Path(folder) / "run"), *changed], own)
        disk = occupied(Path(folder) / "run")
    rows = {
        "memory": (planned["memory"]["peak"], shown["peak"]),
        "disk": (planned["disk"]["kept"]["total"], disk),
        "seconds a stage": (planned["time"]["stage"]["total"], sum(shown["stages"]) / len(shown["stages"])),
    }
    print(
        f"\n{team}: {len(shown['words'])} updates, "
        + ", ".join(f"{w} {shown['words'].count(w)}" for w in set(shown["words"]))
    )
    for what, (said, measured) in rows.items():
        print(f"  {what:16} planned {said:>15,.1f}   run {measured:>15,.1f}   {said / measured - 1:+.1%}")
    return {
        **{
            what: {"planned": said, "run": measured, "error": said / measured - 1} for what, (said, measured) in rows.items()
        },
        "terms": planned["memory"]["terms"],
        "phases": planned["memory"]["phases"],
        "stages": shown["stages"],
        "verdicts": shown["words"],
        "episodes": shown["episodes"],
    }


def main() -> int:
    if sys.argv[1:2] == ["--train"]:
        _, _, config, folder, *overrides = sys.argv
        train(config, folder, overrides)
        return 0
    if sys.argv[1:2] == ["--find"]:
        find_models(sys.argv[2], sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of both runs")
    parser.add_argument("--quick", action="store_true", help="the tiny team alone, three stages after a short start")
    parser.add_argument("--only", choices=list(TEAMS), help="one team")
    args = parser.parse_args()
    chosen = [args.only] if args.only else ["tiny"] if args.quick else list(TEAMS)
    figures = {team: compare(team, args.seed, args.quick) for team in chosen}
    bars: Bars = {}
    for name, found in figures.items():
        for what in ("memory", "disk"):
            error = abs(found[what]["error"])
            bars[f"{name}: {what} off by"] = (error, WITHIN, error <= WITHIN)
    return last_line("plan", quick=args.quick, figures=figures, bars=bars)


if __name__ == "__main__":
    sys.exit(main())
