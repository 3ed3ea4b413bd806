"""What a run will take, said before any of its models loads: memory, disk, time, tokens, and the fewest accepted updates
that its trust regions allow (ALGORITHMS 2.13).

Configs, tokenizers, tasks and safetensors headers are read; weights are not. Three things stand in for the run:

- one update's episodes, rendered by the protocol itself with messages of the expected length: they give every shape;
- each model's own forward and backward traced on tensors without storage: they give the activations;
- a few layers of each model with random weights, run through the engine itself: they give the speed of this machine.

Everything assumes updates that are accepted whole. What shrinks or is rejected writes less and looks more often. What cannot
be known before (whom a router calls, what a teammate behind an endpoint says) is assumed, and the plan says how (`notes`).
"""

from __future__ import annotations

from pathlib import Path

from baton import assemble
from baton.config import Config
from baton.errors import ConfigError
from baton.host import Reporter, Silent
from baton.plan import disk, limits, members, memory, rehearsal, timing
from baton.records import Record

__all__ = ["plan"]


def plan(
    config: Config,
    *,
    root: Path,
    start: float = 0.25,
    goal: float = 0.95,
    answer_tokens: int | None = None,
    reporter: Reporter | None = None,
) -> Record:
    """What a run of this config would take on this machine, as one record.

    Args:
        root: the folder that relative paths of the config start from.
        start, goal: probabilities of a right answer between which the speed limit is stated.
        answer_tokens: expected length of every message (default: a demonstration's where the agent is warm-started on
            them, else agents.max_new_tokens).

    Raises:
        ConfigError, ModelError, DataError: what `baton train` would refuse, with the same words.
    """
    reporter = reporter or Silent()
    if not 0.0 < start < goal < 1.0:
        raise ConfigError(f"--from {start:g} --to {goal:g}: give two probabilities between 0 and 1, the lower first")
    prepared = assemble.prepare(config, root=root)
    assemble.check_models(prepared)
    threads = assemble.set_threads(config, prepared.parameters)
    reporter.say("one update's episodes, with messages of the expected length")
    update = rehearsal.rehearsed(prepared, answer_tokens)
    team = members.present(prepared, update)
    reporter.say("tracing each model without its weights")
    held = memory.record(prepared, team, update)
    written = disk.record(prepared, team, update)
    reporter.say("timing a few layers of each model with random weights")
    seconds = timing.record(prepared, team, update, reporter)
    return {
        "kind": "plan",
        "notes": rehearsal.notes(prepared, update),
        "agents": members.record(prepared, team),
        "episodes": update.record(),
        "memory": held,
        "disk": written,
        "time": {**seconds, "threads": threads},
        "tokens": update.tokens(config),
        "speed_limit": limits.record(config, update, start, goal),
    }
