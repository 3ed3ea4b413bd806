"""`baton.train` as one side of vs_trl.py: an update of one agent whenever it is told to.

python baton_train.py SETTINGS      (JSON; see vs_trl.py)
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from wire import heard, peak_bytes, tell, vowels

import baton
from baton import records
from baton.algorithms import sat
from baton.algorithms.state import World
from baton.config import Config, parse
from baton.host import Silent
from baton.journal import RunJournal

update = sat.update

HOW = {
    "plain": {"radius": {"token": "inf", "message_mean": "inf"}, "probe": 1, "penalty": 0.0, "resting": "keep"},
    "gate": {"radius": "preset", "probe": 64, "penalty": 0.001, "resting": "auto"},
}
"""plain: rollout, step, new weights served, all in memory, as the peer does it; what is left of the gate is one probe
prompt, the comparison of sampler and learner on unchanged weights, and the proof of publication. gate: baton's defaults."""


def config(settings: Mapping[str, Any]) -> Config:
    """One agent, one optimiser step an update."""
    how = HOW[settings["how"]]
    radius = how["radius"] if how["radius"] == "preset" else {k: float(v) for k, v in how["radius"].items()}
    return parse(
        {
            "seed": settings["seed"],
            "env": {"name": "reward:reward", "data": "questions.jsonl"},
            "agents": [
                {
                    "name": "agent",
                    "model": settings["folder"],
                    "system": settings["system"],
                    "max_new_tokens": settings["new_tokens"],
                    "lr": settings["lr"],
                    "radius": radius,
                }
            ],
            "algorithm": {
                "stages": settings["steps"],
                "episodes": settings["prompts"] * settings["group"],
                "group": settings["group"],
                "inner_steps": 1,
                "min_informative": 1,
                "penalty": {"start": how["penalty"]},
            },
            "gate": {"probe_prompts": min(how["probe"], settings["prompts"] * settings["group"])},
            "engine": {
                **{"dtype": "bfloat16", "compute": "bfloat16", "batch_size": 64},
                **{"resting": how["resting"], "threads": settings["threads"]},
            },
            "checkpoint": {"keep": 1},
        }
    )


class Steps(Silent):
    """Holds the run before each update until it is wanted and tells of it once it is on disk; the first warms up."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.record: dict[str, Any] = {}

    def update(self, record: dict[str, Any]) -> None:
        self.record = record

    async def held(self, world: World, *args: Any, **more: Any) -> Any:
        """`sat.update`, when it is wanted."""
        if self.record:
            heard()
        result = await update(world, *args, **more)
        began = time.perf_counter()
        cast(RunJournal, world.journal).wait()
        record = self.record
        rows = records.read_episodes(self.run / record["episodes_file"], ["use", "turns.list.element.prompt_ids"])
        prompts = [len(turn["prompt_ids"]) for row in rows if row["use"] == "train" for turn in row["turns"]]
        tell(
            seconds=record["seconds"]["total"],
            # Otherwise written beside the next update's rollout; here apart.
            file_seconds=time.perf_counter() - began,
            parts=record["seconds"],
            tokens=sum(record["episodes"]["tokens"].values()),
            prompt_tokens=sum(prompts),
            word=record["word"],
            steps=len(record["steps"]),
            peak_bytes=peak_bytes(),
        )
        return result


def main() -> None:
    settings = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="baton-speed-") as name:
        root = Path(name)
        source = inspect.getsource(vowels)
        call = "\n\ndef reward(prompt: str, answer: str, gold: str) -> float:\n    return vowels(answer)\n"
        (root / "reward.py").write_text(source + call)
        lines = [json.dumps({"question": question, "answer": "none"}) for question in settings["questions"]]
        (root / "questions.jsonl").write_text("\n".join(lines) + "\n")
        (root / "agent.toml").write_text(config(settings).to_toml())
        steps = Steps(root / "run")
        sat.update = steps.held
        baton.train(root / "agent.toml", run=root / "run", reporter=steps)


if __name__ == "__main__":
    main()
