"""What `baton plan` says beside what the run then shows: `python benchmarks/claims/plan.py` (--seed N, --quick).

Plans and then trains, each in a process of its own: configs/quickstart.toml cut to a few stages, and configs/smollm2.toml
cut to one stage. Compares the peak of resident memory (ru_maxrss), the disk space of the run directory, and the time of a
stage. Ends with one JSON line. Exit 0 only if memory and disk are within 15 %; time is reported and bars nothing, because it
is a property of the minute as well as of the machine. `--quick` leaves out SmolLM2.
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

from quickstart import ROOT, where

import baton

WITHIN = 0.15
TEAMS: dict[str, tuple[str, list[str]]] = {
    "tiny": ("quickstart.toml", ["algorithm.stages=10", "engine.threads=1"]),
    "smollm2": ("smollm2.toml", ["algorithm.stages=1", "algorithm.episodes=48", "gate.probe_prompts=16"]),
}
QUICK = {"tiny": ["algorithm.stages=3", "engine.threads=1", *(f"agents.{i}.warm_start.steps=60" for i in range(3))]}


def in_its_own_process(words: list[str], cache: str) -> Any:
    """The JSON that a fresh interpreter prints last; a cache of its own, so that warm starts are trained."""
    done = subprocess.run(
        [sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "BATON_CACHE": cache}
    )
    return json.loads(done.stdout[done.stdout.index("{") :])


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


def compare(name: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """One team, planned and run."""
    file = str(ROOT / "configs" / TEAMS[name][0])
    changed = [f"seed={seed}", *overrides]
    settings = [word for one in changed for word in ("--set", one)]
    with tempfile.TemporaryDirectory(prefix="baton-plan-") as folder:
        own = str(Path(folder) / "cache")
        planned = in_its_own_process(["-m", "baton.cli", "plan", file, "--json", *settings], own)
        shown = in_its_own_process([__file__, "--train", file, str(Path(folder) / "run"), *changed], own)
        disk = occupied(Path(folder) / "run")
    rows = {
        "memory": (planned["memory"]["peak"], shown["peak"]),
        "disk": (planned["disk"]["kept"]["total"], disk),
        "seconds a stage": (planned["time"]["stage"]["total"], sum(shown["stages"]) / len(shown["stages"])),
    }
    print(
        f"\n{name}: {len(shown['words'])} updates, "
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of both runs")
    parser.add_argument("--quick", action="store_true", help="the tiny team alone, three stages after a short start")
    args = parser.parse_args()
    teams = (
        {name: QUICK[name] for name in QUICK} if args.quick else {name: settings for name, (_, settings) in TEAMS.items()}
    )
    figures = {name: compare(name, args.seed, settings) for name, settings in teams.items()}
    bars: dict[str, Any] = {}
    for name, found in figures.items():
        for what in ("memory", "disk"):
            error = abs(found[what]["error"])
            bars[f"{name}: {what} off by"] = {"value": error, "bar": WITHIN, "holds": error <= WITHIN}
    print(json.dumps({"name": "plan", "quick": args.quick, "figures": figures, "bars": bars, **where()}))
    return 0 if all(bar["holds"] for bar in bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
