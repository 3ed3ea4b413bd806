"""Two tokenizers, two architectures and a teammate behind a server: ten stages, killed and resumed in the middle.

    python benchmarks/drills/mixed_team.py [--quick] [--seed N]

Trains configs/mixed.toml (a Qwen3 of 64,000 parameters with a character vocabulary, SmolLM2-135M with byte pairs, and
examples/endpoint_stub.py on loopback), sends the training SIGKILL amid the sixth stage, resumes it to its end, and measures
the team. `--quick`: a second tiny model in SmolLM2's place and two stages. The last line is JSON; the exit code is 0 only if
all bars hold.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from http.server import ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

from baton import config, evaluate, run

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "mixed.toml"
START = "warm_start={steps=40, batch=32, demonstrations=600, held_out=32, lr=2e-3}"
QUICK = (
    *("algorithm.stages=2", "algorithm.episodes=32", "gate.probe_prompts=8", "eval.episodes=40", "engine.dtype=float32"),
    *("engine.compute=float32", f"agents.scout.{START}", "agents.courier.model=tiny:30k", f"agents.courier.{START}"),
)


def stub() -> Any:
    """The server's handler, from the example."""
    spec = importlib.util.spec_from_file_location("endpoint_stub", ROOT / "examples" / "endpoint_stub.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Stub


def updates(folder: Path) -> int:
    journal = folder / "stages.jsonl"
    return journal.read_bytes().count(b'"kind":"update"') if journal.is_file() else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny models only, two stages")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), stub())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    overrides = [
        f"seed={options.seed}",
        f"agents.desk.model=endpoint:http://127.0.0.1:{server.server_address[1]}/v1",
        *(QUICK if options.quick else ()),
    ]
    settings = config.load(CONFIG, overrides)
    stages = settings.algorithm.stages
    half = 2 * (stages // 2) + 1
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="baton-mixed-") as name:
        folder = Path(name) / "run"
        words = [sys.executable, "-m", "baton", "train", str(CONFIG), "--run", str(folder)]
        for override in overrides:
            words += ["--set", override]
        first = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        while first.poll() is None and updates(folder) < half:
            time.sleep(0.05)
        first.send_signal(signal.SIGKILL)
        killed = first.wait() == -signal.SIGKILL
        at = updates(folder)
        print(f"killed after {at} of {2 * stages} agent updates; resuming", flush=True)
        resumed = subprocess.run([*words, "--resume"], check=False).returncode
        done = run.open_run(folder)
        report = evaluate(folder, baselines=False)
        begun = Counter((line["agent"], line["version"]) for line in done.records("begin"))
        twice = sum(n - 1 for n in begun.values())
        remote = {row["agent"] for row in done.updates}
        verdicts = Counter(f"{u['agent']} {u['word']}" for u in done.updates)
    server.shutdown()
    total = sum(verdicts.values())
    team, untrained = report["rows"][:2]
    bars: dict[str, tuple[Any, Any, bool]] = {
        "killed_in_the_middle": (at, f"1..{2 * stages - 1}", killed and 0 < at < 2 * stages),
        "agent_updates": (total, 2 * stages, total == 2 * stages),
        "resume_exit_code": (resumed, 0, resumed == 0),
        "version_ids_used_twice": (twice, 0, twice == 0),
        "agents_that_were_updated": (sorted(remote), ["courier", "scout"], remote == {"scout", "courier"}),
    }
    line = {
        "name": "mixed_team",
        "quick": options.quick,
        "seed": options.seed,
        "figures": {"seconds": time.monotonic() - began, "verdicts": dict(verdicts), "team": team, "untrained": untrained},
        "bars": {name: {"value": value, "bar": bar, "holds": holds} for name, (value, bar, holds) in bars.items()},
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("baton-rl", "torch", "transformers")},
    }
    print(json.dumps(line))
    return 0 if all(holds for _, _, holds in bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
