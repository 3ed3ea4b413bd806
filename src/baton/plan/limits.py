"""The speed limit: the fewest accepted updates that the trust regions allow."""

from __future__ import annotations

import math

from baton.config import Config
from baton.core import trust_region
from baton.plan.rehearsal import Rehearsal
from baton.records import Record


def record(config: Config, update: Rehearsal, start: float, goal: float) -> Record:
    """The fewest accepted updates from `start` to `goal` that each radius allows (ALGORITHMS 2.13), and whether the plan's
    updates can be enough.

    An accepted update of an agent with L tokens an episode moves the law of the team's answer by at most sqrt(2 L delta) of
    Fisher-Rao length; what all agents' updates of a stage allow adds up.
    """
    way = trust_region.fisher_rao(start, goal)
    direction = config.gate.direction
    rows: list[Record] = []
    reach = {"token": 0.0, "message_mean": 0.0}
    for agent in config.agents:
        if not agent.trainable:
            continue
        radius = config.radius(agent)
        length = update.batches[agent.name].batch.n_act / len(update.train)
        row: Record = {"agent": agent.name, "tokens": length}
        for name, delta in (("token", radius.token), ("message_mean", radius.message_mean)):
            allowed = delta * max(1.0, length)
            reach[name] += math.sqrt(2.0 * allowed)
            row[name] = {
                "delta": delta,
                "updates": math.ceil(trust_region.speed_limit(start, goal, delta=allowed)),
            }
            if row[name]["updates"] <= 10_000:  # each step is searched for: a tiny radius would take minutes
                row[name]["greedy"] = trust_region.greedy_exact_steps(start, goal, delta=allowed, direction=direction)
        rows.append(row)
    stages = config.algorithm.stages
    needed = {name: math.ceil(way / each - 1e-12) for name, each in reach.items()}
    warnings = [
        f"the {name} radii allow {start:g} -> {goal:g} in no fewer than {n} stages, the plan has {stages}: raise "
        "algorithm.stages or the radii"
        for name, n in needed.items()
        if n > stages
    ]
    return {
        "from": start,
        "to": goal,
        "length": way,
        "direction": direction,
        "is_exact": direction == "max",
        "agents": rows,
        "stages_needed": needed,
        "stages": stages,
        "warnings": warnings,
    }
