"""One agent's update by baton beside one optimiser step of TRL's GRPOTrainer: generated tokens per second, and memory.

    python benchmarks/speed/vs_trl.py [--quick] [--seed N] [--peers DIR]

SmolLM2-135M, 8 prompts x 8 completions of at most 16 tokens, the same prompts and the same reward: rollout, reward, one
AdamW step, the new weights ready to sample from. TRL runs in its own environment (`make peers`) with fp32 weights under bf16
autocast, as baton trains, and once more with bf16 weights alone. Each side is a process of its own, warmed by one step; then
they take turns, step by step, and the ratio is that of the medians. What was generated is counted, not assumed.

`baton` does what TRL does and holds everything in memory, as TRL does; files are written and timed apart (TRL writes none).
`baton, gate` is baton as it comes: 64 probe prompts, the default radii and penalty, the learner resting on disk.

The last line is JSON; the exit code is 0 only if all bars hold. `--quick` is a model of 65,000 parameters, two steps beside
TRL in one precision, and shows that it runs, in under a minute: its ratios are of what libraries do around a model.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sides import ROOT, SMOLLM2, Bars, Side, alternate, guarded, last_line, median, peer, resolved

RATIO, MEMORY = 4.0, 1.0
"""Lowest ratio of generated tokens per second, baton over TRL; highest ratio of peak memory."""

TRL = {"fp32 weights, bf16 autocast": "float32", "bf16 weights": "bfloat16"}

WORKLOAD = {"prompts": 8, "group": 8, "new_tokens": 16, "lr": 1e-5, "system": "You tell long stories."}
QUICK = {"prompts": 2, "group": 4, "new_tokens": 8, "lr": 1e-5, "system": "tell"}
"""The tiny model's alphabet is letters, digits and a few marks."""

QUESTIONS = [f"Tell a long story about {a} cats and {b} dogs." for a in range(2, 32) for b in range(2, 32)]


def contest(settings: dict[str, Any], dtype: str, rounds: int, peers: Path) -> dict[str, dict[str, Any]]:
    """Both of baton's ways and one of TRL's, taking turns. They are started one after another: a start is work too."""
    starts = {
        "baton": (sys.executable, "baton_train.py", {"how": "plain"}),
        "baton, gate": (sys.executable, "baton_train.py", {"how": "gate"}),
        "TRL": (peer("trl", peers), "trl_grpo.py", {"dtype": dtype}),
    }
    with ExitStack() as stack:
        sides: dict[str, Side] = {}
        for name, (python, script, more) in starts.items():
            sides[name] = stack.enter_context(Side(name, python, script, {**settings, **more}, threads=settings["threads"]))
            sides[name].answer()
        steps = alternate({name: side.ask for name, side in sides.items()}, rounds)
    return {name: summary(told) for name, told in steps.items()}


def summary(told: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of a side's timed steps; its peak is that of the process's whole life."""
    speeds = [step["tokens"] / step["seconds"] for step in told]
    medians = {
        key: median([step[key] for step in told])
        for key in ("seconds", "tokens", "prompt_tokens", "file_seconds")
        if key in told[0]
    }
    return {
        "tokens_per_second": median(speeds),
        "each": speeds,
        **medians,
        "peak_bytes": told[-1]["peak_bytes"],
        **{key: [step[key] for step in told] for key in ("word", "steps", "parts") if key in told[0]},
        **({"versions": told[0]["versions"]} if "versions" in told[0] else {}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of all sides")
    parser.add_argument("--quick", action="store_true", help="a tiny model, two steps: under a minute")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each side (default: 5)")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="where `make peers` put TRL")
    args = parser.parse_args()

    peer("trl", args.peers)
    rounds, threads = (2, 1) if args.quick else (args.rounds, os.cpu_count() or 1)
    workload = QUICK if args.quick else WORKLOAD
    settings = {
        **workload,
        "folder": str(resolved("tiny:64k" if args.quick else SMOLLM2)),
        "questions": QUESTIONS,
        "steps": rounds + 1,
        "threads": threads,
        "seed": args.seed,
    }
    figures: dict[str, Any] = {"seed": args.seed, "workload": workload, "rounds": rounds, "threads": threads}
    bars: Bars = {}
    for what, dtype in list(TRL.items())[: 1 if args.quick else None]:
        figures[what] = sides = contest(settings, dtype, rounds, args.peers)
        print(f"TRL with {what}:")
        for name, one in sides.items():
            files = f", files {one['file_seconds']:.2f} s" if "file_seconds" in one else ""
            print(
                f"  {name:12} {one['tokens_per_second']:8.1f} tokens/s  {one['seconds']:6.2f} s a step{files}  "
                f"{one['tokens']:.0f} tokens, prompts {one['prompt_tokens']:.0f}  peak {one['peak_bytes'] / 2**30:.2f} GiB",
                flush=True,
            )
        if not all(sides["baton"]["steps"]):
            print("an update of baton without a step measures no training", file=sys.stderr)
            return 1
        for name in ("baton", "baton, gate"):
            sides[name]["ratio"] = sides[name]["tokens_per_second"] / sides["TRL"]["tokens_per_second"]
        ratio, memory = sides["baton"]["ratio"], sides["baton"]["peak_bytes"] / sides["TRL"]["peak_bytes"]
        bars[f"speed over TRL, {what}"] = (ratio, RATIO, ratio >= RATIO)
        bars[f"memory over TRL, {what}"] = (memory, MEMORY, memory < MEMORY)
    return last_line("vs_trl", quick=args.quick, figures=figures, bars=bars)


if __name__ == "__main__":
    sys.exit(guarded(main))
