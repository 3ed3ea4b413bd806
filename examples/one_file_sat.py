"""SAT in one file, without the library: a team of two tables learns, one agent at a time, behind a gate that can say no.

The task: agent A alone sees a bit and sends one of two symbols; agent B sees only the symbol and answers. They win if the
answer is the bit, so both must settle on a code. Everything is exact and runs in a second:

    python examples/one_file_sat.py

One stage: in a random order, each agent (1) plays episodes with the team as it is NOW, (2) takes gradient steps on its own
log-probabilities, (3) is measured on fresh probe states, exact KL in both directions, and (4) is accepted whole, accepted
shrunk, or put back exactly as it was.
"""

from __future__ import annotations

import math
import random

Table = dict[int, list[float]]
"""State -> logits of the two symbols."""

RADIUS, QUANTILE, HALVINGS, EPISODES, GROUP, LR, STEPS = 0.05, 0.99, 4, 64, 4, 4.0, 2


def law(logits: list[float]) -> list[float]:
    """Softmax."""
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


def kl(p: list[float], q: list[float]) -> float:
    """KL(p || q) in nats."""
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def draw(p: list[float], rng: random.Random) -> int:
    """Inverse CDF."""
    return 0 if rng.random() < p[0] else 1


def play(team: list[Table], bit: int, rng: random.Random) -> tuple[list[tuple[int, int]], float]:
    """One episode: the (state, symbol) of each agent's turn, and the team's reward."""
    symbol = draw(law(team[0][bit]), rng)
    answer = draw(law(team[1][symbol]), rng)
    return [(bit, symbol), (symbol, answer)], float(answer == bit)


def true_return(team: list[Table]) -> float:
    """The exact expected reward, by enumeration."""
    a, b = team
    return sum(0.5 * law(a[bit])[s] * law(b[s])[bit] for bit in (0, 1) for s in (0, 1))


def collect(team: list[Table], agent: int, rng: random.Random) -> list[tuple[int, int, float]]:
    """Fresh episodes of the team as it is: (state, symbol, advantage) of one agent, group-relative."""
    rows: list[tuple[int, int, float]] = []
    for _ in range(EPISODES // GROUP):
        bit = rng.randrange(2)
        episodes = [play(team, bit, rng) for _ in range(GROUP)]
        rewards = [reward for _, reward in episodes]
        mean = sum(rewards) / GROUP
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / GROUP)
        for turns, reward in episodes:
            if std > 0:  # a group without contrast teaches nothing
                rows.append((*turns[agent], (reward - mean) / (std + 1e-8)))
    return rows


def step(table: Table, rows: list[tuple[int, int, float]]) -> Table:
    """One gradient step on the mean of advantage * log-probability: a new table, the old one untouched."""
    new = {state: list(logits) for state, logits in table.items()}
    for state, symbol, advantage in rows:
        p = law(table[state])
        for i in (0, 1):
            new[state][i] += LR * advantage * ((i == symbol) - p[i]) / len(rows)
    return new


def blend(start: Table, end: Table, scale: float) -> Table:
    """start + scale * (end - start)."""
    return {s: [a + scale * (b - a) for a, b in zip(start[s], end[s], strict=True)] for s in start}


def gate(old: Table, new: Table, states: list[int]) -> float:
    """The quantile over probe states of max(KL(new || old), KL(old || new)): an order statistic, nothing interpolated."""
    values = sorted(max(kl(law(new[s]), law(old[s])), kl(law(old[s]), law(new[s]))) for s in states)
    return values[math.ceil(QUANTILE * len(values)) - 1]


def update(team: list[Table], agent: int, rng: random.Random) -> tuple[str, float]:
    """One agent's update; the team changes only if the gate passes."""
    rows = collect(team, agent, rng)
    current = team[agent]
    if not rows:
        return "rejected (no signal)", 0.0
    candidate = current
    for k in range(STEPS):
        candidate = step(candidate, rows[k::STEPS])
    probe = [play(team, rng.randrange(2), rng)[0][agent][0] for _ in range(64)]
    for halving in range(HALVINGS + 1):
        shrunk = blend(current, candidate, 0.5**halving)
        measured = gate(current, shrunk, probe)
        if measured <= RADIUS:
            team[agent] = shrunk  # the promotion: nothing else in this file writes to the team
            return ("accepted" if halving == 0 else f"shrunk 1/{2**halving}"), measured
    return "rejected (radius)", measured


def main() -> None:
    rng = random.Random(0)
    team: list[Table] = [{0: [0.1, 0.0], 1: [0.0, 0.0]}, {0: [0.0, 0.0], 1: [0.0, 0.1]}]
    print(f"start: true return {true_return(team):.3f}")
    for stage in range(1, 31):
        order = [0, 1]
        rng.shuffle(order)
        for agent in order:
            verdict, measured = update(team, agent, rng)
            print(f"stage {stage:2}  {'AB'[agent]}  {verdict:20} kl {measured:.4f}/{RADIUS}  return {true_return(team):.3f}")
    print(f"end: true return {true_return(team):.3f}")


if __name__ == "__main__":
    main()
