"""What it costs to judge a stage by the episodes of its start: the surrogate's bias as a power of the team's size.

    python benchmarks/claims/drift.py [--quick] [--seed N] [--seeds N] [--keep DIR]

n tables speak twice, all at once each time; each remembers its own first symbol and hears nobody. In a stage each agent in
turn takes one exact gradient step, cut where its divergence from its start is RADIUS nats. The surrogate estimates what that
step gains: on data of the stage's start (reuse), on the same data with baton's truncated weights (reuse, weighted), or on
data of the team as it is then (resample). The bias of a step is that estimate minus the exact change of the return, the bias
of a stage the sum over its agents. Both are expectations: over every joint message up to EXACT_UP_TO agents, beyond that
over sampled ones, with a standard error.

Games, all cooperative (one payoff for everybody):

- own part and pairs: 2 for every "1", and 1 for every two messages that agree; the team starts even, so that what an agent
  can gain is its own part, whatever the size of the team;
- all pairs: 1 for every two messages that agree; the team starts leaning to "1", and what an agent can gain grows with it;
- chain: the same between the messages of one agent, and of an agent and the next;
- random pairs: for every two messages a random payoff of what they say;
- majority: 1 if more than half of all messages are "1", 1/2 if exactly half are.

What to expect: a step has a fixed length, so a bias of second order counts interactions. Resampling misses those between an
agent's own two turns: n of them, each as large as what the agent can gain. Reuse also misses those between agents: n(n-1)/2
where all meet, n-1 in a chain. Where signs are random, a sum of so many grows as its root.

TeamTR (arXiv 2605.15207) reports exponents of 1.94 for reuse and 1.07 for resampling. The last line is JSON; the exit code
is 0 only if all bars hold. What was expected, and what came out, is in docs/log.md.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from claim import KEEPS_RESULTS, Bars, Results, arguments, arm_of, guarded, last_line, results, shown

from baton.core.advantages import reuse_weights
from baton.core.batching import token_batch, with_advantages
from baton.core.keyed import key, uniforms
from baton.core.losses import Band, Dis, Objective
from baton.engines.table import TableLearner
from baton.errors import NonFiniteError
from baton.types import Trajectory

RADIUS = 0.01
"""Nats, the larger of both directions in an agent's worst state (TeamTR gates at .01)."""
SIZES, QUICK_SIZES = (2, 3, 4, 6, 8, 12, 16), (2, 3, 4)
EXACT_UP_TO = 8
"""Agents up to which all 4^n joint messages are enumerated."""
SAMPLES = 4**EXACT_UP_TO
LEANING, EVEN = (1.0, 2.0), (-0.1, 0.1)
"""Ranges of the log-odds of "1" at the start. A team that leans this far steps to its side at every size; leaning less, an
agent's own first message would outweigh the others' in small teams and not in large ones."""

SITUATIONS = ((), (0,), (1,))
"""What an agent has said when it speaks: nothing, or one of two symbols."""
REUSE, WEIGHTED, RESAMPLE = "reuse", "reuse, weighted", "resample"
DATA = (REUSE, WEIGHTED, RESAMPLE)
TEAMTR = {REUSE: 1.94, RESAMPLE: 1.07}

APART, TOGETHER = 0.8, 0.3
"""Least difference of the exponents of reuse and resample where all agents meet (TeamTR: .87), and largest in a chain."""
RESAMPLINGS = 2000
"""Of seeds, for an exponent's interval."""

Floats = npt.NDArray[np.float64]
Bits = npt.NDArray[np.int8]
"""Axes: E joint messages, n agents, 2 turns; a law has 3 situations and 2 symbols."""


# ---- games -------------------------------------------------------------------------------------------------------------


def all_pairs(seed: int, said: Bits) -> Floats:
    ones = said.sum(axis=(1, 2), dtype=np.int64)
    others = said[0].size - ones
    return (ones * (ones - 1) + others * (others - 1)) / 2.0


def own_and_pairs(seed: int, said: Bits) -> Floats:
    return 2.0 * said.sum(axis=(1, 2), dtype=np.int64) + all_pairs(seed, said)


def chain(seed: int, said: Bits) -> Floats:
    signs = 2.0 * said - 1.0
    both = signs.sum(axis=2)
    # Of two signs x, y the agreement is (1 + xy) / 2; of an agent and the next there are four pairs.
    own = (1.0 + signs[:, :, 0] * signs[:, :, 1]).sum(axis=1) / 2.0
    return own + (4.0 + both[:, :-1] * both[:, 1:]).sum(axis=1) / 2.0


def random_pairs(seed: int, said: Bits) -> Floats:
    flat = said.reshape(len(said), -1).astype(np.float64)
    pairs = list(itertools.combinations(range(flat.shape[1]), 2))
    pay = uniforms([key(seed, "pair", u, v) for u, v in pairs], 4)  # for 00, 01, 10, 11
    one, other = (np.array(places) for places in zip(*pairs, strict=True))
    linear = np.zeros(flat.shape[1])
    np.add.at(linear, one, pay[:, 2] - pay[:, 0])
    np.add.at(linear, other, pay[:, 1] - pay[:, 0])
    mixed = np.zeros((flat.shape[1],) * 2)
    mixed[one, other] = pay[:, 0] - pay[:, 1] - pay[:, 2] + pay[:, 3]
    return pay[:, 0].sum() + flat @ linear + np.einsum("eu,eu->e", flat @ mixed, flat)


def majority(seed: int, said: Bits) -> Floats:
    ones = said.sum(axis=(1, 2), dtype=np.int64)
    half = said[0].size // 2
    return np.where(ones > half, 1.0, np.where(ones == half, 0.5, 0.0))


@dataclass(frozen=True, kw_only=True)
class Game:
    """What joint messages [E, n, 2] earn under a seed, and where the log-odds of "1" begin."""

    pays: Callable[[int, Bits], Floats]
    odds: tuple[float, float]
    expected: Mapping[str, float]
    """Exponents by the argument above, for large teams."""


OWN, PAIRS, CHAIN, RANDOM, MAJORITY = "own part and pairs", "all pairs", "chain", "random pairs", "majority"
GAMES: Mapping[str, Game] = {
    OWN: Game(pays=own_and_pairs, odds=EVEN, expected={REUSE: 2.0, RESAMPLE: 1.0}),
    PAIRS: Game(pays=all_pairs, odds=LEANING, expected={REUSE: 2.0, RESAMPLE: 2.0}),
    CHAIN: Game(pays=chain, odds=LEANING, expected={REUSE: 1.0, RESAMPLE: 1.0}),
    RANDOM: Game(pays=random_pairs, odds=LEANING, expected={REUSE: 1.0, RESAMPLE: 1.0}),
    MAJORITY: Game(pays=majority, odds=LEANING, expected={}),
}


# ---- one agent's step --------------------------------------------------------------------------------------------------

EXACT = Objective(weight=Dis(band=Band(low=0.0, high=2.0)), penalty=0.0)
"""With behaviour probability 1 the ratio is the action's own probability, and a batch of every action an expectation."""


@dataclass(frozen=True)
class Agent:
    """A table that is stepped by exact gradients."""

    name: str
    learner: TableLearner

    @classmethod
    def at(cls, name: str, laws: Floats) -> Agent:
        learner = TableLearner(name, 2, optimiser="sgd", grad_clip=None)
        for said, law in zip(SITUATIONS, laws, strict=True):
            learner.set((2, *said), np.log(law).tolist())
        return cls(name, learner)

    def step(self, worth: Floats, *, radius: float) -> Floats:
        """The law after one gradient step on sum_s,a p(a|s) worth[s, a], whose length is such that the largest divergence of
        its situations from before, in either direction, is `radius` nats."""
        cases = [(s, a) for s in range(3) for a in range(2)]
        rows = [
            Trajectory(
                episode_id=f"{s}{a}",
                group="all",
                agent=self.name,
                segment=0,
                ids=(2, *SITUATIONS[s], a),
                mask=(*(False,) * (1 + len(SITUATIONS[s])), True),
                behavior_logprobs=(0.0,) * (2 + len(SITUATIONS[s])),
                versions=(0,) * (2 + len(SITUATIONS[s])),
            )
            for s, a in cases
        ]
        tokens = token_batch(rows, temperature=1.0)
        batch = with_advantages(tokens, {f"{s}{a}": float(worth[s, a]) for s, a in cases}, team={self.name: 0})
        anchor, origin = self.learner.remember(tokens), self.learner.snapshot()
        length = self.learner.step(batch, EXACT, lr=1.0, anchor=None).grad_norm
        if length == 0.0:
            raise NonFiniteError(f"agent {self.name} has no gradient, so no step of it has a length")
        self.learner.restore(origin)
        self.learner.step(batch, EXACT, lr=1.0 / length, anchor=None)
        towards, scale = self.learner.snapshot(), 1.0
        for _ in range(100):
            self.learner.blend(towards, origin, scale)
            moved = float(self.learner.divergence(tokens, anchor).of("max").max())
            if abs(moved / radius - 1.0) < 1e-9:
                break
            # Divergence grows as the square of a small displacement.
            scale = min(1.0, scale * math.sqrt(radius / moved))
        else:
            raise NonFiniteError(f"agent {self.name}: no share of its step is {radius} nats long, the last one {moved}")
        return self.learner.logprobs(tokens)[tokens.mask].exp().numpy().reshape(3, 2)


# ---- one stage ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def enumerated(n: int) -> Bits:
    """Every joint message of n agents."""
    index = np.arange(4**n)[:, None] >> np.arange(2 * n)
    return (index & 1).astype(np.int8).reshape(-1, n, 2)


def chances(laws: Floats, said: Bits) -> Floats:
    """Probability of each of an agent's two messages in these episodes, [E, 2]."""
    return np.stack([laws[0, said[:, 0]], laws[1 + said[:, 0], said[:, 1]]], axis=1)


def start_laws(seed: int, n: int, span: tuple[float, float]) -> Floats:
    """Where a team begins: log-odds of "1" from `span` for each agent and situation; agent i is the same at every n."""
    low, high = span
    odds = low + (high - low) * uniforms([key(seed, "start", i) for i in range(n)], 3)
    ones = 1.0 / (1.0 + np.exp(-odds))
    return np.stack([1.0 - ones, ones], axis=2)


def draw(seed: int, laws: Floats) -> tuple[Bits, Floats]:
    """Joint messages and their weights (sum 1): all of them with their probabilities, or samples that count alike."""
    n = len(laws)
    if n <= EXACT_UP_TO:
        said = enumerated(n)
        return said, np.prod([chances(laws[i], said[:, i]).prod(axis=1) for i in range(n)], axis=0)
    u = np.random.default_rng((seed, n)).random((SAMPLES, n, 2))
    first = (u[:, :, 0] < laws[:, 0, 1]).astype(np.int8)
    second = (u[:, :, 1] < np.where(first == 1, laws[:, 2, 1], laws[:, 1, 1])).astype(np.int8)
    return np.stack([first, second], axis=2), np.full(SAMPLES, 1.0 / SAMPLES)


def stage(game: Game, data: str, seed: int, n: int) -> tuple[dict[str, float], Floats]:
    """One stage of n steps, and the laws at its end: the summed bias and its standard error, the sum of absolute biases, the
    exact gain, and the mean weight of the episodes that the estimates rest on.

    Every expectation is over episodes of the start, `ratio` times where it is one of the team as it is.
    """
    laws = start_laws(seed, n, game.odds)
    said, chance = draw(seed, laws)
    pay = game.pays(seed, said)
    mean = float(chance @ pay)
    log_ratio = np.zeros(len(said))
    terms = np.zeros(len(said))
    gain = absolute = weight = 0.0
    for i in range(n):
        ratio = np.exp(log_ratio)
        if data == RESAMPLE:
            counted, above = ratio, pay - float(chance @ (ratio * pay)) / float(chance @ ratio)
        else:
            truncated = reuse_weights(torch.from_numpy(log_ratio))[1].numpy()
            counted, above = (truncated if data == WEIGHTED else np.ones_like(ratio)), pay - mean
        own = said[:, i]
        old = chances(laws[i], own)
        value = chance * counted * above
        worth = np.zeros((3, 2))
        np.add.at(worth[0], own[:, 0], value)
        np.add.at(worth, (1 + own[:, 0], own[:, 1]), value)
        laws[i] = Agent.at(f"agent{i}", laws[i]).step(worth / laws[i], radius=RADIUS)
        each = chances(laws[i], own) / old
        exact = ratio * (each.prod(axis=1) - 1.0) * (pay - mean)
        bias = counted * (each - 1.0).sum(axis=1) * above - exact
        gain += float(chance @ exact)
        absolute += abs(float(chance @ bias))
        weight += float(chance @ counted) / n
        terms += bias
        log_ratio += np.log(each).sum(axis=1)
    error = 0.0 if n <= EXACT_UP_TO else float(terms.std(ddof=1)) / math.sqrt(len(terms))
    return {"bias": float(chance @ terms), "error": error, "absolute": absolute, "gain": gain, "weight": weight}, laws


def stages(game: str, data: str, seed: int, sizes: Sequence[int]) -> dict[str, dict[str, float]]:
    return {str(n): stage(GAMES[game], data, seed, n)[0] for n in sizes}


# ---- exponents ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Exponent:
    """A power of n with a 95 % interval over resampled seeds."""

    value: float
    low: float
    high: float
    seeds: int


def slope(sizes: Sequence[int], values: Floats) -> Floats:
    """Slope of log values [..., sizes] against log sizes, by least squares."""
    x = np.log(sizes) - np.log(sizes).mean()
    return np.log(values) @ x / float(x @ x)


BETWEEN = f"{REUSE} - {RESAMPLE}"


def exponents(sizes: Sequence[int], tables: Mapping[str, Floats]) -> dict[str, Exponent]:
    """Exponent of the mean over seeds of each arm's table [seeds, sizes], and the difference between reuse and resample, in
    which both resample the same seeds."""
    count = len(tables[REUSE])
    picks = np.random.default_rng(0).integers(count, size=(RESAMPLINGS, count))
    found = {name: (slope(sizes, t.mean(axis=0)), slope(sizes, t[picks].mean(axis=1))) for name, t in tables.items()}
    found[BETWEEN] = (found[REUSE][0] - found[RESAMPLE][0], found[REUSE][1] - found[RESAMPLE][1])
    return {
        name: Exponent(
            value=float(value), low=float(np.quantile(drawn, 0.025)), high=float(np.quantile(drawn, 0.975)), seeds=count
        )
        for name, (value, drawn) in found.items()
    }


def told(game: str, kept: Results, seeds: Sequence[int], sizes: Sequence[int]) -> dict[str, Any]:
    """Print a game and return its figures: for each size the mean bias, its mean size, that as a share of the exact gain,
    and the standard error of a sampled seed; then the exponents of size and share."""

    def table(data: str, measure: Callable[[Mapping[str, float]], float]) -> Floats:
        rows = [kept.values(arm_of(game, data), seeds, lambda result, n=n: measure(result[str(n)])) for n in sizes]
        return np.array(rows).T

    summed = {data: np.abs(table(data, lambda s: s["bias"])) for data in DATA}
    shares = {data: np.abs(table(data, lambda s: s["bias"] / s["gain"])) for data in DATA}
    figures: dict[str, Any] = {
        "summed": exponents(sizes, summed),
        "absolute": exponents(sizes, {data: table(data, lambda s: s["absolute"]) for data in DATA}),
        "share of the gain": exponents(sizes, shares),
        "expected": GAMES[game].expected,
        "sizes": {},
    }
    print(f"\n{game}: {len(seeds)} seeds; mean size of a stage's bias, and its mean share of the stage's gain")
    for j, n in enumerate(sizes):
        row: dict[str, Any] = {}
        for data in DATA:
            errors = table(data, lambda s: s["error"])[:, j]
            row[data] = {
                "bias": kept.mean(arm_of(game, data), seeds, lambda result, n=n: result[str(n)]["bias"]),
                "size": float(summed[data][:, j].mean()),
                "share": float(shares[data][:, j].mean()),
                "standard error of a seed": float(np.sqrt(np.square(errors).mean())),
                "weight": float(table(data, lambda s: s["weight"])[:, j].mean()),
            }
        figures["sizes"][str(n)] = row
        print(f"  n {n:2}  " + "   ".join(_cell(data, row[data]) for data in DATA))
    for what in ("summed", "absolute", "share of the gain"):
        print(f"  exponent, {what}: " + "; ".join(f"{name} {shown(e)}" for name, e in figures[what].items()))
    if GAMES[game].expected:
        print(
            "  expected of large teams: " + "; ".join(f"{name} {value:.0f}" for name, value in GAMES[game].expected.items())
        )
    return figures


def _cell(data: str, found: Mapping[str, Any]) -> str:
    error = found["standard error of a seed"]
    return f"{data} {found['size']:.2e}{f' (s.e. {error:.0e})' if error else ''} {found['share']:.1%}"


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(
        __doc__,
        seeds=16,
        fewest=2,
        quick="three seeds and three sizes at the most: shows that it runs",
        keep=KEEPS_RESULTS,
    ).parse_args(argv)
    sizes = QUICK_SIZES if args.quick else SIZES
    seeds = range(args.seed, args.seed + (min(args.seeds, 3) if args.quick else args.seeds))
    settings = {
        "claim": "drift",
        "sizes": sizes,
        "radius": RADIUS,
        "odds": {name: game.odds for name, game in GAMES.items()},
        "samples": SAMPLES,
    }
    torch.set_num_threads(1)
    with results(args.keep, __file__, settings) as kept:
        figures: dict[str, Any] = {}
        for game in GAMES:
            for seed, data in itertools.product(seeds, DATA):
                kept.of(arm_of(game, data), seed, partial(stages, game, data, seed, sizes))
            figures[game] = told(game, kept, seeds, sizes)
    meet, neighbours = (figures[game]["summed"][BETWEEN] for game in (OWN, CHAIN))
    if args.quick:
        bars: Bars = {
            "own part and pairs: exponent of reuse minus that of resample, above": (meet.value, 0.0, meet.value > 0)
        }
    else:
        apart = max(abs(neighbours.low), abs(neighbours.high))
        bars = {
            "own part and pairs: exponent of reuse minus that of resample, lower end": (meet.low, APART, meet.low >= APART),
            "chain: exponent of reuse minus that of resample, farther end at most": (apart, TOGETHER, apart <= TOGETHER),
        }
    return last_line("drift", quick=args.quick, figures={**figures, "TeamTR": TEAMTR}, bars=bars)


if __name__ == "__main__":
    sys.exit(guarded(main))
