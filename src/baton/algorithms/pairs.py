"""Paired evaluation: two teams on the same prompts with the same uniforms, and what that shows (ALGORITHMS 3.6).

Neither team's episodes are changed by the other's: each has its own team's law, prompts are drawn independently with
replacement from a pool that nothing is trained or gated on, and what is shared only makes fewer pairs differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from baton.algorithms.options import CertificateOptions
from baton.algorithms.state import Pair, PairsReport, World
from baton.core import certificate
from baton.core.keyed import PAIRS, key, uniforms
from baton.rollout import Beside, Play
from baton.types import AgentId, Episode, Slot

WAVE = 64
"""Pairs between two looks."""
HARM = 0.05
"""Share of harmless updates of a stage that may be rejected for harm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What a paired evaluation is asked: its levels, and which of the two teams it speaks for."""

    gain: float
    harm: float
    is_newer_beside: bool
    """The team that may be better is the one played beside the promoted one; else it is the promoted one."""


def update_claim(options: CertificateOptions, *, n_agents: int, stage: int) -> Claim:
    """Step 15: the candidate, beside the promoted team."""
    level = certificate.miss_rate(options.delta, n_agents=n_agents, stage=stage if options.run_level else None)
    return Claim(gain=level, harm=certificate.miss_rate(HARM, n_agents=n_agents), is_newer_beside=True)


def stage_claim(options: CertificateOptions, *, stage: int) -> Claim:
    """Step 20: the promoted team, beside which the team of the stage's start is played."""
    level = certificate.miss_rate(options.delta, stage=stage if options.run_level else None)
    return Claim(gain=level, harm=HARM, is_newer_beside=False)


def draws(pool: int, count: int, *, at: tuple[str | int, ...]) -> list[int]:
    """`count` places in a pool of that many prompts, independent and with replacement."""
    return [int(u * pool) for u in uniforms([key(*at, PAIRS)], count)[0]]


async def compare(
    world: World,
    *,
    stage: int,
    who: str,
    versions: Mapping[AgentId, int],
    other: Mapping[AgentId, int],
    slots: Mapping[AgentId, Slot],
    count: int,
    claim: Claim,
) -> tuple[PairsReport, list[Pair]]:
    """Play pairs until a look decides, `count` at most: the promoted team, and the one whose changed agents have their
    weights in `slots` (of versions `other`)."""
    options, at = world.certificate, (world.seed, stage, who, PAIRS)
    plays = [Play(task=world.certify[n], sibling=i) for i, n in enumerate(draws(len(world.certify), count, at=at))]
    total = 2 * count * len(world.table.seats) * world.table.protocol.own_turns
    found: list[Pair] = []

    def tick() -> None:
        world.journal.tick(f"{who}: pairs", total)

    while True:
        wave = plays[len(found) : len(found) + WAVE]
        played = await world.table.play(wave, address=at, versions=versions, tick=tick)
        beside, apart = None, at
        if options.coupling == "none":
            apart = (*at, "apart")
        else:
            beside = Beside(episodes=played, slots={}, coupling=options.coupling)
        others = await world.table.play(wave, address=apart, versions=other, slots=slots, tick=tick, beside=beside)
        found += [Pair(promoted=a, beside=b) for a, b in zip(played, others, strict=True)]
        report = judged(found, options, claim, reward_range=world.reward_range, changed=tuple(slots), pool=world.pool)
        if len(found) == count or is_over(found, report, options, claim, count=count, reward_range=world.reward_range):
            return report, found


def is_over(
    pairs: Sequence[Pair],
    report: PairsReport,
    options: CertificateOptions,
    claim: Claim,
    *,
    count: int,
    reward_range: tuple[float, float],
) -> bool:
    """No further pair is played: harm or a gain is shown, or neither could be by the `count`-th pair. A bound for a fixed n
    is asked once, behind the last pair."""
    if options.method != "betting":
        return False
    if "positive" in (report.gain.verdict, report.harm.verdict):
        return True
    if not options.give_up:
        return False
    low, high = reward_range
    newer, older = _sides(pairs, low, claim)
    return not any(
        certificate.may_still_show(
            torch.tensor([(low if a is None else a) - (high if b is None else b) for a, b in zip(one, other, strict=True)]),
            count=count,
            width=high - low,
            level=level,
        )
        for one, other, level in ((newer, older, claim.gain), (older, newer, claim.harm))
    )


def _sides(pairs: Sequence[Pair], low: float, claim: Claim) -> tuple[list[float | None], list[float | None]]:
    """Returns of the newer team and of the older one."""
    returns = [_returns(p, low) for p in pairs]
    beside, promoted = [b for _, b in returns], [a for a, _ in returns]
    return (beside, promoted) if claim.is_newer_beside else (promoted, beside)


def judged(
    pairs: Sequence[Pair],
    options: CertificateOptions,
    claim: Claim,
    *,
    reward_range: tuple[float, float],
    changed: Sequence[AgentId],
    pool: str,
) -> PairsReport:
    """What these pairs show: the gain, and the harm, of the newer team."""
    low, high = reward_range
    newer, older = _sides(pairs, low, claim)
    compared = [_tokens(p.promoted, p.beside, changed) for p in pairs]
    tokens = sum(n for n, _ in compared)
    return PairsReport(
        n=len(pairs),
        discordance=sum(a != b for a, b in zip(newer, older, strict=True)) / len(pairs),
        parted=sum(apart for _, apart in compared) / tokens if tokens else 0.0,
        missing=sum(not e.is_scored for p in pairs for e in (p.promoted, p.beside)),
        coupling=options.coupling,
        delta=options.delta,
        is_run_level=options.run_level,
        pool=pool,
        gain=certificate.measured(newer, older, low=low, high=high, level=claim.gain, method=options.method),
        harm=certificate.measured(older, newer, low=low, high=high, level=claim.harm),
    )


def _returns(pair: Pair, low: float) -> tuple[float | None, float | None]:
    """(promoted, beside). What failed and is word for word the same differs by nothing, whatever it is worth."""
    one, other = pair.promoted, pair.beside
    if not one.is_scored and not other.is_scored and [t.said for t in one.turns] == [t.said for t in other.turns]:
        return low, low
    return one.reward if one.is_scored else None, other.reward if other.is_scored else None


def _tokens(one: Episode, other: Episode, changed: Sequence[AgentId]) -> tuple[int, int]:
    """(tokens of changed agents on a shared prefix, 1 if the last of them differs else 0)."""
    compared = 0
    for a, b in zip(one.turns, other.turns, strict=False):
        if a.agent in changed:
            for x, y in zip(a.ids, b.ids, strict=False):
                compared += 1
                if x != y:
                    return compared, 1
        if a.said != b.said:
            break
    return compared, 0
