"""Where the seconds of updates and stages go: relays of tiny models, trained by `baton.train` under a clock.

Four of the questions of limits.py, each a function that gives figures and bars. Files are left out of all of them: how long
an fsync takes is the disk's affair. Messages have one token, as in configs/quickstart.toml; the radii let every step pass,
so that each update has one look.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sides import FILES, PASSES, Bars, Clock, Found, Row, alternate, exponent, median, watched

import baton
from baton.config import Config, parse
from baton.errors import MissingError

OUTSIDE, GATE, ARITHMETIC, TEAM, LINEAR = 0.05, 0.35, 0.05, 1.1, 1.1
"""Highest share of an update outside generate, forward and backward; of the gate in a stage; of the gate's arithmetic; cost
of a trained token in a team of three over one agent's; exponent of a stage's cost in the number of agents."""

SCHEDULES = ("sat", "joint")
"""sat plays the whole team again for every update; in joint the agents of a stage learn from the same episodes."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is run; the full one is the quickstart's at a million parameters an agent."""

    model: str
    episodes: int
    """That each agent learns from in a stage; the numbers of agents divide it."""
    probe: int
    stages: int
    """Timed ones; one that warms the libraries goes before."""
    rounds: int
    agents: int
    threads: int
    seed: int


def size(*, quick: bool, seed: int, cores: int) -> Size:
    if quick:
        return Size(model="tiny:64k", episodes=36, probe=16, stages=1, rounds=1, agents=3, threads=1, seed=seed)
    return Size(model="tiny:1M", episodes=120, probe=64, stages=4, rounds=3, agents=6, threads=min(2, cores), seed=seed)


def relay(s: Size, *, agents: int, schedule: str, stages: int) -> Config:
    """A relay as in the quickstart. The start teaches no more than to answer with a symbol: some answers are right.

    The agents of a joint stage share its episodes, `algorithm.episodes` for each of them: a share of them here, so that each
    agent learns from as many as in `sat`.
    """
    episodes = s.episodes // agents if schedule == "joint" else s.episodes
    agent = {
        "model": s.model,
        "system": "",
        "max_new_tokens": 1,
        "lr": 5e-4,
        "radius": {"token": 100.0, "message_mean": 100.0},
        "warm_start": {
            **{"seats": "all", "lr": 1e-3, "batch": 64, "steps": 60, "demonstrations": 4000},
            **{"held_out": 128, "check_every": 20, "target": 0.2},
        },
    }
    return parse(
        {
            "seed": s.seed,
            "env": {"name": "relay", "symbols": 8},
            "protocol": {"name": "chain", "sees": "previous"},
            "agents": [{"name": f"agent{i}", **agent} for i in range(agents)],
            "algorithm": {
                **{"name": schedule, "stages": stages, "episodes": episodes, "group": 1, "min_informative": 1},
                "objective": {"baseline": "batch_mean"},
            },
            "gate": {"probe_prompts": s.probe},
            "engine": {"threads": s.threads, "batch_size": 256},
        }
    )


@dataclass(frozen=True)
class Timed:
    """An update: its line in the run, and where its seconds went."""

    record: Mapping[str, Any]
    row: Row

    @property
    def seconds(self) -> float:
        """Without files."""
        return self.row.wall - sum(self.row.own.get(name, 0.0) for name in FILES)

    @property
    def trained_tokens(self) -> int:
        """What the updated agent itself said in the episodes of its update."""
        return self.record["episodes"]["tokens"][self.record["agent"]]


def updates(config: Config, clock: Clock, *, warm: int = 1) -> list[list[Timed]]:
    """The updates of a run by stage, without those of the first ones, which warm the libraries.

    Raises:
        MissingError: an update that did not train, or that took more than one look.
    """
    agents = len(config.agents)
    clock.rows.clear()
    with tempfile.TemporaryDirectory(prefix="baton-speed-") as name:
        lines = baton.train(config, run=Path(name) / "run").updates
    for line in lines:
        if line["word"] != "accepted" or len(line["looks"]) != 1:
            raise MissingError(f"update {line['index']} was {line['word']} after {len(line['looks'])} looks, not after one")
    found = [Timed(line, row) for line, row in zip(lines, clock.rows, strict=True)]
    return [found[at : at + agents] for at in range(warm * agents, len(found), agents)]


def overhead(s: Size) -> Found:
    """Of a team of three: what an update does besides decoding and passes, and what the gate costs."""
    with watched() as clock:
        stages = updates(relay(s, agents=3, schedule="sat", stages=1 + s.stages * s.rounds), clock)
    each = [one for stage in stages for one in stage]
    outside = [1.0 - sum(u.row.own.get(name, 0.0) for name in PASSES) / u.seconds for u in each]
    # The last thing that an update remembers are the probe states; before come its own episodes.
    gate = [u.row.total("probe", "states", "look") + u.row.calls["remember"][-1] for u in each]
    arithmetic = [sum(u.row.own[name] for name in ("states", "look", "divergence")) for u in each]
    per_stage = [slice(at, at + 3) for at in range(0, len(each), 3)]
    seconds = [sum(u.seconds for u in each[at]) for at in per_stage]
    gate_share = median([sum(gate[at]) / total for at, total in zip(per_stage, seconds, strict=True)])
    arithmetic_share = median([sum(arithmetic[at]) / total for at, total in zip(per_stage, seconds, strict=True)])
    names = sorted({name for u in each for name in u.row.own} - set(FILES))
    figures = {
        "update_seconds": median([u.seconds for u in each]),
        "file_seconds": median([u.row.own.get("files", 0.0) for u in each]),
        "shares": {name or "else": median([u.row.own.get(name, 0.0) / u.seconds for u in each]) for name in names},
        "outside_share": median(outside),
        "gate_share": gate_share,
        "gate_arithmetic_share": arithmetic_share,
        "updates": len(each),
    }
    bars: Bars = {
        "outside generate, forward, backward": (median(outside), OUTSIDE, median(outside) <= OUTSIDE),
        "gate in a stage": (gate_share, GATE, gate_share <= GATE),
        "gate's arithmetic": (arithmetic_share, ARITHMETIC, arithmetic_share <= ARITHMETIC),
    }
    return figures, bars


def team(s: Size) -> Found:
    """A team of three beside one agent alone: seconds for each token that an update trains."""
    stages = 1 + s.stages

    def cost(clock: Clock, agents: int, schedule: str) -> list[float]:
        # As many updates for the one agent as for the three together.
        times = 3 // agents
        run = updates(relay(s, agents=agents, schedule=schedule, stages=times * stages), clock, warm=times)
        return [sum(u.seconds for u in stage) / sum(u.trained_tokens for u in stage) for stage in run]

    with watched() as clock:
        arms = {"alone": lambda: cost(clock, 1, "sat"), **{f"three, {n}": _arm(cost, clock, 3, n) for n in SCHEDULES}}
        rounds = alternate(arms, s.rounds)
    costs = {name: median([one for run in runs for one in run]) for name, runs in rounds.items()}
    ratios = {n: costs[f"three, {n}"] / costs["alone"] for n in SCHEDULES}
    bars: Bars = {f"team of three, {n}": (ratio, TEAM, ratio <= TEAM) for n, ratio in ratios.items()}
    return {"seconds_per_trained_token": costs, "ratios": ratios}, bars


def growth(s: Size) -> Found:
    """A stage of one to six agents: the exponent of its seconds in their number."""
    sizes = list(range(1, s.agents + 1))

    def cost(clock: Clock, agents: int, schedule: str) -> list[float]:
        run = updates(relay(s, agents=agents, schedule=schedule, stages=1 + s.stages), clock)
        return [sum(u.seconds for u in stage) for stage in run]

    with watched() as clock:
        arms = {(n, k): _arm(cost, clock, k, n) for n in SCHEDULES for k in sizes}
        rounds = alternate({f"{n}, {k}": arm for (n, k), arm in arms.items()}, s.rounds)
    seconds = {n: [median([one for run in rounds[f"{n}, {k}"] for one in run]) for k in sizes] for n in SCHEDULES}
    found = {n: exponent(sizes, of) for n, of in seconds.items()}
    bars: Bars = {f"growth with agents, {n}": (b, LINEAR, b <= LINEAR) for n, b in found.items()}
    return {"agents": sizes, "stage_seconds": seconds, "exponents": found}, bars


def _arm(cost: Any, clock: Clock, agents: int, schedule: str) -> Any:
    return lambda: cost(clock, agents, schedule)


def shown(figures: Mapping[str, Any]) -> Sequence[str]:
    """Lines for people."""
    lines: list[str] = []
    for name, value in figures.items():
        if isinstance(value, Mapping):
            inner = ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in value.items())
            lines.append(f"  {name}: {inner}")
        else:
            lines.append(f"  {name}: {value:.3g}" if isinstance(value, float) else f"  {name}: {value}")
    return lines
