"""`kill -9` at 20 random moments of a training run, resumed each time: the final weights are those of a run left alone.

    python benchmarks/drills/kill_resume.py [--quick] [--seed N]

Two agents of 64,000 parameters learn a relay of four symbols, warm start and all, one thread. First one run goes from
start to end. Then, for each kill, a run of its own (with a model cache of its own, so that making the models and the warm
start can be interrupted too) is sent SIGKILL at a random moment after its imports, one in each of 20 equal slices of the
time that the whole run takes, and is resumed until it is done. Compared, bit for bit: every file of every agent's promoted
version, its optimiser's moments, and what every update decided. `--quick` kills three times. The last line is JSON; the
exit code is 0 only if all bars hold.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

from baton import config, run

KILLS, QUICK_KILLS = 20, 3
POLL = 0.005
"""Seconds between two looks at a run's files."""

START = {"steps": 20, "batch": 32, "demonstrations": 512, "held_out": 32, "lr": 3e-3, "target": 0.9}
SETTINGS: dict[str, Any] = {
    "env": {"name": "relay", "symbols": 4, "prompts": 2000},
    "protocol": {"name": "chain", "sees": "previous"},
    "agents": [
        {"name": name, "model": "tiny:64k", "system": "", "max_new_tokens": 1, "lr": 4e-4, "warm_start": START}
        for name in ("first", "second")
    ],
    "algorithm": {"stages": 10, "episodes": 64, "group": 8},
    "gate": {"preset": "demo", "probe_prompts": 32},
    "checkpoint": {"keep": 1},
    "engine": {"threads": 1},
}


def train(folder: Path, seed: int) -> None:
    """The process that is killed. It says `go` once its imports are done, so that moments fall into the run itself."""
    importlib.import_module("transformers.models.qwen3.modeling_qwen3")  # what `tiny:` models need, else loaded on first use
    settings = config.parse({**SETTINGS, "seed": seed})
    print("go", flush=True)
    run.train(settings, run=folder, resume=(folder / "config.toml").is_file())


def cache(folder: Path) -> Path:
    """Every run makes its models and warm starts itself."""
    return folder.with_name(folder.name + "-cache")


def launch(folder: Path, seed: int) -> subprocess.Popen[str]:
    """Start or resume the run in a process of its own, and wait until it says `go`."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--train", str(folder), "--seed", str(seed)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "BATON_CACHE": str(cache(folder))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "go\n":
        raise SystemExit(f"the run did not start:\n{process.communicate()[1]}")
    return process


def progress(folder: Path) -> int:
    """Milestones that the run has passed: the resolved config, each finished warm start, each line of its journal."""
    journal, warm = folder / "stages.jsonl", cache(folder) / "warm"
    starts = sum(not p.name.startswith(".") for p in warm.iterdir()) if warm.is_dir() else 0
    lines = journal.read_bytes().count(b"\n") if journal.is_file() else 0
    return (folder / "config.toml").is_file() + starts + lines


def finish(process: subprocess.Popen[str]) -> None:
    """Let the run go to its end."""
    _, errors = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"a run that was left alone ended with code {process.returncode}:\n{errors[-4000:]}")


def watch(folder: Path, seed: int) -> list[tuple[int, float]]:
    """Let a run go to its end; (milestone, seconds after `go` at which it was passed), the last one its final line."""
    process, timeline = launch(folder, seed), [(0, 0.0)]
    began = time.monotonic()
    while process.poll() is None:
        passed = progress(folder)
        if passed > timeline[-1][0]:
            timeline.append((passed, time.monotonic() - began))
        time.sleep(POLL)
    finish(process)
    return timeline


def kill_at(folder: Path, seed: int, milestone: int, later: float) -> bool:
    """Start the run and kill it so many seconds after a milestone. False where it was done before that."""
    process = launch(folder, seed)
    while progress(folder) < milestone and process.poll() is None:
        time.sleep(POLL)
    try:
        process.wait(timeout=later)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


def place(folder: Path) -> str:
    """Where a killed run stands, in words."""
    if not (folder / "config.toml").is_file():
        return "before the resolved config"
    lines = run.Run(folder).records()
    if not lines:
        return "before the start record"
    updates = sum(line["kind"] == "update" for line in lines)
    partial = sorted(p.name for p in folder.rglob(".*.partial"))
    return f"after {updates} updates, last line '{lines[-1]['kind']}'" + (f", half written {partial[0]}" if partial else "")


def end(folder: Path) -> dict[str, Any]:
    """What must be equal to the bit: files of every agent, and what every update decided."""
    opened = run.Run(folder)

    def digest(path: Path) -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest()

    files: dict[str, Any] = {}
    for agent, held in opened.files.items():
        files[agent] = {p.name: digest(p) for p in sorted((folder / held["weights"]).iterdir())}
        files[agent]["training"] = held["training"] and digest(folder / held["training"])
        files[agent]["steps"] = held["steps"]
    decided = [(u["stage"], u["agent"], u["word"], u["looks"], u["episodes"], u["beta"], u["lr"]) for u in opened.updates]
    # A kill uses a version number up.
    stages = [[{k: v for k, v in e.items() if k != "from_version"} for e in s["entries"]] for s in opened.records("stage")]
    return {"files": files, "decided": decided, "stages": stages}


def reused_versions(folder: Path) -> int:
    """Version ids that were handed out twice."""
    begun = Counter((line["agent"], line["version"]) for line in run.Run(folder).records("begin"))
    return sum(n - 1 for n in begun.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_KILLS} kills instead of {KILLS}")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run and of the moments (default 0)")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train, options.seed)
        return 0

    kills = QUICK_KILLS if options.quick else KILLS
    draw = random.Random(options.seed)
    began = time.monotonic()
    equal, missed, reused, moments, places = 0, 0, 0, list[float](), list[str]()
    with tempfile.TemporaryDirectory(prefix="baton-kill-") as name:
        root = Path(name)
        timeline = watch(root / "alone", options.seed)
        length = timeline[-1][1]
        wanted = end(root / "alone")
        words = Counter(decided[2] for decided in wanted["decided"])
        print(f"left alone: {length:.1f} s, {len(wanted['decided'])} updates, {dict(words)}", flush=True)
        for n in range(kills):
            folder = root / f"killed-{n}"
            moment = (n + draw.random()) / kills * length
            # Counted from the last milestone before it, so that a machine that has become faster or slower since is hit
            # at the same place; one that has become much faster may be done, and the moment is brought forward.
            milestone, passed = max(at for at in timeline if at[1] <= moment)
            later = moment - passed
            while not kill_at(folder, options.seed, milestone, later):
                missed += 1
                later /= 2
                folder = root / f"killed-{n}-again-{missed}"
            where = place(folder)
            finish(launch(folder, options.seed))
            is_equal = end(folder) == wanted
            equal += is_equal
            reused += reused_versions(folder)
            moments.append(round(moment, 3))
            places.append(where)
            verdict = "the same" if is_equal else "DIFFERENT"
            print(f"kill {n + 1:2d} of {kills} at {moment:5.2f} s, {where}: {verdict}", flush=True)
    line = {
        "name": "kill_resume",
        "quick": options.quick,
        "seed": options.seed,
        "figures": {
            "kills": kills,
            "run_seconds": length,
            "seconds": time.monotonic() - began,
            "moments_seconds": moments,
            "places": places,
            "done_before_the_kill": missed,
            "updates": dict(words),
        },
        "bars": {
            "runs_bitwise_equal": {"value": equal, "bar": kills, "holds": equal == kills},
            "distinct_moments": {"value": len(set(moments)), "bar": kills, "holds": len(set(moments)) == kills},
            "version_ids_used_twice": {"value": reused, "bar": 0, "holds": reused == 0},
            "accepted_updates": {
                "value": words["accepted"] + words["shrunk"],
                "bar": 3,
                "holds": words["accepted"] + words["shrunk"] >= 3,
            },
        },
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count(), "threads": 1},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    print(json.dumps(line))
    return 0 if all(bar["holds"] for bar in line["bars"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
