"""The relay, from a warm start to a measured team: `make quickstart` (SEED=3, SEEDS=5, QUICK=1).

Trains configs/quickstart.toml, evaluates the team on its held-out test prompts beside the proven caps, with each seat
replaced by chance, and ends with one JSON line. Exit 0 only if the bar holds: .95, in 4 of 5 seeds where five are run.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import baton
from baton.console import Console
from baton.run import Run

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "quickstart.toml"
BAR = 0.95


def one_seed(seed: int, folder: Path, *, is_quick: bool) -> dict[str, Any]:
    """Train and evaluate one seed; minutes are of the wall clock, warm starts included."""
    overrides = [f"seed={seed}"] + (["algorithm.stages=4", "eval.episodes=500"] if is_quick else [])
    config = baton.load_config(CONFIG, overrides)
    began = time.monotonic()
    with Console(sys.stdout, stages=config.algorithm.stages, agents=[a.name for a in config.agents]) as console:
        run: Run = baton.train(CONFIG, run=folder / f"seed-{seed}", overrides=overrides, reporter=console)
        minutes = (time.monotonic() - began) / 60
        report = baton.evaluate(run.path, reporter=console)
    print(f"\nseed {seed}: training {minutes:.1f} minutes, {len(run.updates)} updates, {report['prompts']} test prompts")
    for name, value in report["facts"].items():
        print(f"  {name:40} {value:.3f}   (proven)")
    for row in report["rows"]:
        measured = "" if row["value"] is None else f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        print(f"  {row['name']:40} {measured} {row['note']}")
    return {"seed": seed, "training_minutes": minutes, "updates": len(run.updates), "rows": report["rows"]}


def install_minutes() -> float | None:
    """Minutes that `make install` took, where it left a note; None where the environment was made by hand."""
    note = Path(sys.prefix) / ".install_seconds"
    return int(note.read_text()) / 60 if note.is_file() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, counted up from --seed")
    parser.add_argument("--quick", action="store_true", help="4 stages: shows that it runs, not what it reaches")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-quickstart-") as name:
        seeds = range(args.seed, args.seed + args.seeds)
        results = [one_seed(seed, Path(name), is_quick=args.quick) for seed in seeds]
    reached = sum(result["rows"][0]["value"] >= BAR for result in results)
    needed = args.seeds if args.seeds < 5 else args.seeds * 4 // 5
    line = {
        "name": "quickstart",
        "quick": args.quick,
        "figures": {"seeds": results, "install_minutes": install_minutes()},
        "bars": {"seeds at .95 or better": {"value": reached, "bar": needed, "holds": reached >= needed}},
        "machine": {"machine": platform.machine(), "processor": platform.processor()},
        "versions": {name: version(name) for name in ("baton-rl", "torch", "transformers")},
    }
    print(json.dumps(line))
    return 0 if reached >= needed else 1


if __name__ == "__main__":
    sys.exit(main())
