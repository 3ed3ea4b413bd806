"""What a certificate is worth: how often it is wrong, how many pairs it needs, and what coupling saves.

    python benchmarks/claims/certificates.py [--quick] [--seed N] [--seeds N] [--keep DIR]

Four questions, all without a model:

- coverage: sequences of paired differences of a known mean, looked at after every pair. In which share does the lower bound
  lie above the truth at any look?
- power: how many pairs of a given discordance (share of pairs that differ) until a gain is certified at level .05?
- coupling: a team of one agent, whose messages are Markov chains over SYMBOLS symbols, right if they end on one of RIGHT of
  them; its candidate has moved along the natural gradient until the true gain is GAIN, and in random directions by some nats
  per token, as steps on samples do. Pairs are drawn token by token: coupled maximally while their prefixes agree and after
  that apart, or by the inverse CDF at the same uniforms; by the inverse CDF throughout; or apart from the start. What is the
  discordance, and how many pairs does the gain then need? A seed is a team, met by every way of drawing.
- projection: processor seconds until the laws of CONTEXTS contexts at a vocabulary of VOCABULARY are inside the ball.

A control variate was tried as well: pairs of prompts with known base accuracies, less the accuracy's deviation from its mean
times a coefficient fitted to the pairs before. It is compared with what it costs, a wider range, paid without it.

What to expect: in at most 5 % of sequences a bound that is too high (Ville's inequality; far less where few pairs differ); a
gain of .05 within 250 pairs where at most a tenth of the pairs differ, and 1,200 where three tenths do; coupling saves most
where messages are short and steps go little astray, and little where every message parts early. The last line is JSON; the
exit code is 0 only if all bars hold.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from claim import KEEPS_RESULTS, Bars, Results, arguments, arm_of, guarded, last_line, results, shown
from torch import Tensor

from baton.core.certificate import log_wealth
from baton.core.coupling import coupled
from baton.core.divergence import kl, project
from baton.core.keyed import key, uniforms

LEVEL = 0.05
GAIN = 0.05
ENOUGH = 250
"""Median of pairs that a certified gain of GAIN may take."""

SEQUENCES, QUICK_SEQUENCES, LOOKS = 10_000, 2_000, 1_000
COVERAGE = (
    (-0.05, 0.1),
    (0.0, 0.02),
    (0.0, 0.05),
    (0.0, 0.1),
    (0.0, 0.3),
    (0.0, 1.0),
    (0.05, 0.05),
    (0.05, 0.1),
    (0.2, 0.3),
)
"""(true change, discordance) of pairs in {-1, 0, 1}."""
POWER = ((0.2, 0.3), (0.1, 0.1), (0.1, 0.3), (0.05, 0.05), (0.05, 0.1), (0.05, 0.3), (0.02, 0.05))
RUNS, PAIRS = 500, 6_000

SYMBOLS, RIGHT = 16, 4
LENGTHS, QUICK_LENGTHS = (2, 8, 32), (8,)
ASTRAY = (0.0, 0.001, 0.01)
"""Nats per token in random directions; .01 is the default radius of a message's mean."""
MAXIMAL, SAME, INVERSE, APART = "maximal, then apart", "maximal, then the same uniforms", "inverse CDF", "apart"
WAYS = (MAXIMAL, SAME, INVERSE, APART)
TEAM_RUNS, TEAM_PAIRS = 20, 2_000
MEASURES = ("discordance", "parted", "median", "80 %", f"by {ENOUGH}", "wrong", "nats per token", "off by standard errors")
PRIMARY = "8 tokens, 0.001 nats astray"

CONTEXTS, QUICK_CONTEXTS, VOCABULARY, BALL, SECONDS = 500, 50, 49_152, 0.01, 10.0

CAP = 0.2
"""Largest coefficient of the control variate."""


# ---- sequences of a known mean ---------------------------------------------------------------------------------------


def outcomes(generator: torch.Generator, runs: int, pairs: int, *, gain: float, discordance: float) -> Tensor:
    """Independent differences in {-1, 0, 1} of this mean, of which this share is not 0, [runs, pairs]."""
    u = torch.rand(runs, pairs, generator=generator, dtype=torch.float64)
    won = (discordance + gain) / 2.0
    return (u < won).double() - ((u >= won) & (u < discordance)).double()


def coverage(seed: int, gain: float, discordance: float, sequences: int) -> dict[str, float]:
    """Shares of sequences whose bound at any look lies above the true change, and above 0."""
    generator = torch.Generator().manual_seed(seed)
    wrong = positive = 0
    for begin in range(0, sequences, 500):
        d = outcomes(generator, min(500, sequences - begin), LOOKS, gain=gain, discordance=discordance)
        # The bound passes a value exactly where the wealth against it has reached 1/level.
        reached = [log_wealth(d, at, width=1.0, level=LEVEL).amax(-1) >= -math.log(LEVEL) for at in (gain, 0.0)]
        wrong, positive = wrong + int(reached[0].sum()), positive + int(reached[1].sum())
    return {"wrong": wrong / sequences, "positive": positive / sequences}


def pairs_to_positive(d: Tensor, *, width: float = 1.0) -> dict[str, float]:
    """Median and 80th percentile of the pairs until a positive verdict, at most those there are; and the share by ENOUGH."""
    reached = log_wealth(d, 0.0, width=width, level=LEVEL) >= -math.log(LEVEL)
    first = torch.where(reached.any(-1), reached.to(torch.uint8).argmax(-1) + 1, d.shape[-1]).double()
    return {
        "median": float(first.quantile(0.5)),
        "80 %": float(first.quantile(0.8)),
        f"by {ENOUGH}": float((reached[:, :ENOUGH].any(-1)).double().mean()),
    }


def power(seed: int, gain: float, discordance: float) -> dict[str, float]:
    generator = torch.Generator().manual_seed(seed)
    return pairs_to_positive(outcomes(generator, RUNS, PAIRS, gain=gain, discordance=discordance))


# ---- teams whose gain is known -----------------------------------------------------------------------------------------


def value(laws: Tensor, right: Tensor) -> Tensor:
    """Chance to end right from each place and symbol before it, [length + 1, SYMBOLS]; place 0 starts from symbol 0."""
    found = [right.double()]
    for law in reversed(laws.exp().unbind()):
        found.insert(0, law @ found[0])
    return torch.stack(found)


def teams(seed: int, length: int, astray: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-laws [place, symbol before, symbol] of a team and of a candidate whose true gain is GAIN; and which symbols are
    right: any, since neighbours in the vocabulary have nothing in common."""
    generator = torch.Generator().manual_seed(seed)
    right = torch.randperm(SYMBOLS, generator=generator) < RIGHT
    logits, noise = torch.randn(2, length, SYMBOLS, SYMBOLS, generator=generator, dtype=torch.float64)
    start = torch.log_softmax(logits, dim=-1)
    worth = value(start, right)
    advantage = worth[1:, None, :] - worth[:-1, :, None]
    low, high = 0.0, 64.0
    for _ in range(60):
        middle = (low + high) / 2.0
        moved = torch.log_softmax(start + middle * advantage + math.sqrt(2.0 * astray) * noise, dim=-1)
        low, high = (middle, high) if float(value(moved, right)[0, 0] - worth[0, 0]) < GAIN else (low, middle)
    return start, moved, right


def play(old: Tensor, new: Tensor, right: Tensor, way: str, seed: int, pairs: int) -> tuple[Tensor, Tensor]:
    """Paired differences, and whether both said the same to the end."""
    u = torch.from_numpy(uniforms([key(seed, "pairs", i) for i in range(pairs)], 2 * len(old))).view(pairs, -1, 2)
    x, y = (torch.zeros(pairs, dtype=torch.long) for _ in range(2))
    together = torch.ones(pairs, dtype=torch.bool)
    for place in range(len(old)):
        held = torch.zeros_like(together) if way in (INVERSE, APART) else together
        # A parted token is drawn at the second uniform: its own, or that of the other team.
        second = u[:, place, 0] if way in (SAME, INVERSE) else u[:, place, 1]
        at = torch.stack([u[:, place, 0], torch.where(held, u[:, place, 1], second)], dim=1)
        x, y = coupled(old[place, x], new[place, y], at, together_S=held)
        together &= x == y
    return right[y].double() - right[x].double(), together


def team(seed: int, length: int, astray: float, way: str) -> dict[str, float]:
    """What a way of drawing gives for one team: its discordance, and the pairs that its gain takes."""
    old, new, right = teams(seed, length, astray)
    d, together = play(old, new, right, way, seed, TEAM_RUNS * TEAM_PAIRS)
    sequences, error = d.view(TEAM_RUNS, TEAM_PAIRS), float(d.std()) / math.sqrt(d.numel())
    return {
        "gain": float(d.mean()),
        "off by standard errors": abs(float(d.mean()) - GAIN) / error,
        "discordance": float(d.abs().mean()),
        "parted": 1.0 - float(together.double().mean()),
        "wrong": float((log_wealth(sequences, GAIN, width=1.0, level=LEVEL).amax(-1) >= -math.log(LEVEL)).double().mean()),
        "nats per token": float(kl(new.flatten(0, 1), old.flatten(0, 1)).mean()),
        **pairs_to_positive(sequences),
    }


# ---- the rest ----------------------------------------------------------------------------------------------------------


def control(seed: int, discordance: float) -> dict[str, float]:
    """Median pairs for a gain that is larger where the base is worse: plain, with the base's accuracy as a control variate,
    and plain at the control's wider range."""
    generator = torch.Generator().manual_seed(seed)
    accuracy, u = torch.rand(2, RUNS, 3_000, generator=generator, dtype=torch.float64)
    losses = (discordance - GAIN) * 3.0 * accuracy * (1.0 - accuracy)  # means 1/2 of that, and GAIN
    wins = losses + 2.0 * GAIN * (1.0 - accuracy)
    d = (u < wins).double() - ((u >= wins) & (u < wins + losses)).double()
    h = accuracy - 0.5
    both, own = ((x * h).cumsum(-1).roll(1, -1) for x in (d, h))
    both[:, 0], own[:, 0] = 0.0, 1.0
    adjusted = d - (both / own).clamp(-CAP, CAP) * h
    wide = 1.0 + CAP / 2.0
    return {
        "correlation": float(torch.corrcoef(torch.stack([d.flatten(), h.flatten()]))[0, 1]),
        "plain": pairs_to_positive(d)["median"],
        "controlled": pairs_to_positive(adjusted, width=wide)["median"],
        "plain, wider": pairs_to_positive(d, width=wide)["median"],
    }


def projection(seed: int, contexts: int) -> dict[str, float]:
    """Seconds, and the largest distance from the boundary, in nats."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3.0 * torch.randn(2, contexts, VOCABULARY, generator=generator)
    pre, current = torch.log_softmax(logits, dim=-1)
    began, used = time.monotonic(), time.process_time()
    new, _ = project(pre, current, radius=BALL)
    seconds, processor = time.monotonic() - began, time.process_time() - used
    off = (kl(new, current) - BALL).abs().max()
    return {"seconds": seconds, "processor seconds": processor, "off the boundary": float(off)}


def told(kept: Results, seeds: Sequence[int], lengths: Sequence[int]) -> dict[str, Any]:
    """Print what each way of drawing gave in each case, and return it."""
    figures: dict[str, Any] = {}
    for length, astray in itertools.product(lengths, ASTRAY):
        case = f"{length} tokens, {astray} nats astray"
        print(f"\n{case}: {len(seeds)} teams")
        figures[case] = {}
        for way in WAYS:
            row = {name: kept.mean(arm_of(case, way), seeds, lambda result, n=name: result[n]) for name in MEASURES}
            figures[case][way] = row
            print(f"  {way:31} discordance {shown(row['discordance'])}, median pairs {shown(row['median'])}")
        saved = kept.contrast(arm_of(case, APART), arm_of(case, MAXIMAL), seeds, lambda result: result["median"])
        figures[case]["pairs saved"] = saved
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(
        __doc__,
        seeds=8,
        fewest=2,
        quick="two teams, one length of messages, fewer sequences and contexts: shows that it runs",
        keep=KEEPS_RESULTS,
    ).parse_args(argv)
    first, seeds = args.seed, range(args.seed, args.seed + (2 if args.quick else args.seeds))
    lengths = QUICK_LENGTHS if args.quick else LENGTHS
    sequences, contexts = (QUICK_SEQUENCES, QUICK_CONTEXTS) if args.quick else (SEQUENCES, CONTEXTS)
    settings = {"claim": "certificates", "lengths": lengths, "sequences": sequences, "contexts": contexts}
    figures: dict[str, Any] = {}
    with results(args.keep, __file__, settings) as kept:
        for name, cells, work in (
            ("coverage", COVERAGE, partial(coverage, sequences=sequences)),
            ("power", POWER, power),
        ):
            figures[name] = {}
            for gain, discordance in cells:
                cell = f"change {gain:+}, discordance {discordance}"
                found = kept.of(arm_of(name, cell), first, partial(work, first, gain, discordance))
                figures[name][cell] = found
                print(f"{name}: {cell}: " + ", ".join(f"{what} {number:.4g}" for what, number in found.items()))
        figures["control variate"] = {
            str(at): kept.of(arm_of("control", str(at)), first, partial(control, first, at)) for at in (0.1, 0.3)
        }
        for at, row in figures["control variate"].items():
            print(f"control variate, discordance {at}: " + ", ".join(f"{what} {number:.4g}" for what, number in row.items()))
        for seed, length, astray, way in itertools.product(seeds, lengths, ASTRAY, WAYS):
            case = f"{length} tokens, {astray} nats astray"
            kept.of(arm_of(case, way), seed, partial(team, seed, length, astray, way))
        figures["coupling"] = told(kept, seeds, lengths)
        figures["projection"] = kept.of("projection", first, partial(projection, first, contexts))
        print("\nprojection: " + ", ".join(f"{what} {number:.3g}" for what, number in figures["projection"].items()))
    wrong = max(cell["wrong"] for cell in figures["coverage"].values())
    median = figures["coupling"][PRIMARY][MAXIMAL]["median"].value
    seconds = figures["projection"]["processor seconds"]  # of all cores together, whatever else they do
    bars: Bars = {
        "largest share of sequences with a bound above the truth": (wrong, LEVEL, wrong <= LEVEL),
        f"median coupled pairs for a gain of {GAIN} ({PRIMARY})": (median, ENOUGH, median <= ENOUGH),
        f"processor seconds to project {contexts} contexts": (seconds, SECONDS, seconds <= SECONDS),
    }
    return last_line("certificates", quick=args.quick, figures=figures, bars=bars)


if __name__ == "__main__":
    sys.exit(guarded(main))
