"""How near baton is to what this machine can do, and what a team costs over its agents.

    python benchmarks/speed/limits.py [--quick] [--seed N] [--only PART] [--peers DIR]

learner: an optimiser step of SmolLM2-135M, 8 rows of 128 + 128 tokens, beside the bare matrix products of its linear layers
    (forward and both of backward, attention's left out) and beside a bare loop of forward, backward and AdamW.
decode: tokens per second at 8, 32 and 64 messages of 128 tokens, beside vLLM on the CPU where `make peers` could install it.
overhead: of a relay of three models of a million parameters, the share of an update outside decoding, forward and backward;
    the share of the gate in a stage, and that of its arithmetic.
team: seconds for each trained token, a team of three beside one agent alone.
growth: the exponent of a stage's seconds in the number of agents, 1 to 6.

What is compared takes turns in one go; a figure is a ratio of medians. The last line is JSON; the exit code is 0 only if all
bars hold. `--quick` takes models of 65,000 parameters and leaves the peer out: it shows that everything runs, in under a
minute, and its figures say nothing about the bars.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import shares
import torch
from sides import ROOT, Bars, Found, guarded, last_line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of ids, draws and runs")
    parser.add_argument("--quick", action="store_true", help="tiny models, no peer: under a minute")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="where `make peers` put vLLM")
    parser.add_argument("--only", choices=["learner", "decode", "overhead", "team", "growth"], help="one part alone")
    args = parser.parse_args()
    cores = os.cpu_count() or 1
    shape, threads = (machine.SMALL, 1) if args.quick else (machine.FULL, cores)
    small = shares.size(quick=args.quick, seed=args.seed, cores=cores)
    parts: dict[str, Callable[[], Found]] = {
        "learner": lambda: machine.learner(shape, args.seed),
        "decode": lambda: machine.decoding(shape, args.seed, None if args.quick else args.peers, threads),
        "overhead": lambda: shares.overhead(small),
        "team": lambda: shares.team(small),
        "growth": lambda: shares.growth(small),
    }
    figures: dict[str, Any] = {"seed": args.seed}
    bars: Bars = {}
    for name in [args.only] if args.only else parts:
        torch.set_num_threads(threads)  # a run of tiny models sets its own
        figures[name], more = parts[name]()
        bars |= more
        print(f"{name}:", *shares.shown(figures[name]), sep="\n", flush=True)
        gc.collect()
    return last_line("limits", quick=args.quick, figures=figures, bars=bars)


if __name__ == "__main__":
    sys.exit(guarded(main))
