"""The relay, from a warm start to a measured team: `make quickstart` (SEED=3, SEEDS=5, QUICK=1).

Trains configs/quickstart.toml, evaluates the team on its held-out test prompts beside the proven caps, with each seat
replaced by chance, and ends with one JSON line. Exit 0 only if the bar holds: .95, in 4 of 5 seeds where five are run.
`--keep DIR` keeps the runs there with every promoted version, for `baton verify`; a second call goes on where the first
was ended.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from claim import ROOT, Bars, arguments, guarded, last_line, one_seed, results, runs_folder, tell_seed

CONFIG = ROOT / "configs" / "quickstart.toml"
BAR = 0.95


def install_minutes() -> float | None:
    """Minutes that `make install` took, where it left a note; None where the environment was made by hand."""
    note = Path(sys.prefix) / ".install_seconds"
    return int(note.read_text()) / 60 if note.is_file() else None


def main() -> int:
    args = arguments(
        __doc__, seeds=1, quick="4 stages: shows that it runs, not what it reaches", keep="keep the runs in DIR"
    ).parse_args()
    short = ["algorithm.stages=4", "eval.episodes=200", *(f"agents.{i}.warm_start.steps=60" for i in range(3))]
    quick = short if args.quick else []
    seeds = range(args.seed, args.seed + args.seeds)
    with (
        runs_folder(args.keep) as (folder, extra),
        results(args.keep, __file__, {"claim": "quickstart", "config": CONFIG.read_text(), "quick": quick}) as kept,
    ):
        found: list[dict[str, Any]] = []
        for seed in seeds:
            work = partial(one_seed, CONFIG, seed, folder / f"seed-{seed}", [*quick, *extra])
            found.append(kept.of("team", seed, work))
            tell_seed(found[-1])
    reached = sum(result["rows"][0]["value"] >= BAR for result in found)
    needed = args.seeds if args.seeds < 5 else args.seeds * 4 // 5
    bars: Bars = {"seeds at .95 or better": (reached, needed, reached >= needed)}
    if args.quick:
        # What a run of seconds can show: that every update was judged.
        judged = [sum(result["verdicts"].values()) for result in found]
        bars = {"updates judged, fewest of a seed": (min(judged), 12, min(judged) == 12)}
    figures = {"seeds": found, "install_minutes": install_minutes()}
    return last_line("quickstart", quick=args.quick, figures=figures, bars=bars)


if __name__ == "__main__":
    sys.exit(guarded(main))
