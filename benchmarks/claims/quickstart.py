"""The relay, from a warm start to a measured team: `make quickstart` (SEED=3, SEEDS=5, QUICK=1).

Trains configs/quickstart.toml, evaluates the team on its held-out test prompts beside the proven caps, with each seat
replaced by chance, and ends with one JSON line. Exit 0 only if the bar holds: .95, in 4 of 5 seeds where five are run.
`--keep DIR` keeps the runs there with every promoted version, for `baton verify`; a second call goes on where the first
was ended.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import baton
from baton.console import Console
from baton.errors import BatonError, Interrupted
from baton.run import Run

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "quickstart.toml"
BAR = 0.95


def one_seed(
    config_file: Path, seed: int, run_folder: Path, overrides: Sequence[str], *, baselines: bool = True
) -> dict[str, Any]:
    """Train and evaluate one seed. Minutes are of the wall clock: of training with its warm starts, and of RL alone."""
    overrides = [f"seed={seed}", *overrides]
    config = baton.load_config(config_file, overrides)
    began = time.monotonic()
    with Console(sys.stdout, stages=config.algorithm.stages, agents=[a.name for a in config.agents]) as console:
        begun = (run_folder / "config.toml").exists()
        run: Run = baton.train(config_file, run=run_folder, resume=begun, overrides=overrides, reporter=console)
        minutes = (time.monotonic() - began) / 60
        report = baton.evaluate(run.path, baselines=baselines, reporter=console)
    print(f"\nseed {seed}: training {minutes:.1f} minutes, {len(run.updates)} updates, {report['prompts']} test prompts")
    for name, value in report["facts"].items():
        print(f"  {name:46} {value:.3f}   (proven)")
    for row in report["rows"]:
        measured = "" if row["value"] is None else f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        if row["difference"]:
            mean, low, high = row["difference"]
            measured += f"  team minus this {mean:+.3f} [{low:+.3f}, {high:+.3f}]"
        print(f"  {row['name']:46} {measured} {row['note']}")
    return {
        "seed": seed,
        "training_minutes": minutes,
        "rl_minutes": sum(update["seconds"]["total"] for update in run.updates) / 60,
        "verdicts": dict(Counter(update["verdict"]["kind"] for update in run.updates)),
        "prompts": report["prompts"],
        "rows": report["rows"],
    }


@contextmanager
def runs_folder(keep: Path | None) -> Iterator[tuple[Path, list[str]]]:
    """Where the runs of a claim go, and the overrides that this needs: a folder that stays, or one that is removed."""
    if keep is not None:
        yield keep, ["checkpoint.keep_promoted=all"]
        return
    with tempfile.TemporaryDirectory(prefix="baton-claim-") as name:
        yield Path(name), []


def install_minutes() -> float | None:
    """Minutes that `make install` took, where it left a note; None where the environment was made by hand."""
    note = Path(sys.prefix) / ".install_seconds"
    return int(note.read_text()) / 60 if note.is_file() else None


def where() -> dict[str, Any]:
    """Machine and versions of a figure."""
    return {
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("baton-rl", "torch", "transformers")},
    }


def at_least_one(text: str) -> int:
    """A number of seeds."""
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count}: a claim needs at least one seed")
    return count


def guarded(work: Callable[[], int]) -> int:
    """The exit code of a script: an interruption and a known failure are one line each, as everywhere."""
    try:
        return work()
    except BatonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 130 if isinstance(error, Interrupted) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=at_least_one, default=1, help="how many seeds, counted up from --seed")
    parser.add_argument("--quick", action="store_true", help="4 stages: shows that it runs, not what it reaches")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs in DIR")
    args = parser.parse_args()
    short = ["algorithm.stages=4", "eval.episodes=200", *(f"agents.{i}.warm_start.steps=60" for i in range(3))]
    quick = short if args.quick else []
    with runs_folder(args.keep) as (folder, extra):
        seeds = range(args.seed, args.seed + args.seeds)
        results = [one_seed(CONFIG, seed, folder / f"seed-{seed}", [*quick, *extra]) for seed in seeds]
    reached = sum(result["rows"][0]["value"] >= BAR for result in results)
    needed = args.seeds if args.seeds < 5 else args.seeds * 4 // 5
    bars: dict[str, tuple[Any, Any, bool]] = {"seeds at .95 or better": (reached, needed, reached >= needed)}
    if args.quick:
        # What a run of seconds can show: that every update was judged.
        judged = [sum(result["verdicts"].values()) for result in results]
        bars = {"updates judged, fewest of a seed": (min(judged), 12, min(judged) == 12)}
    line = {
        "name": "quickstart",
        "quick": args.quick,
        "figures": {"seeds": results, "install_minutes": install_minutes()},
        "bars": {name: {"value": value, "bar": bar, "holds": holds} for name, (value, bar, holds) in bars.items()},
        **where(),
    }
    print(json.dumps(line))
    return 0 if all(holds for _, _, holds in bars.values()) else 1


if __name__ == "__main__":
    sys.exit(guarded(main))
