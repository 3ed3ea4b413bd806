"""Paired evaluations: what was played, when it could end, and what it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.algorithms import pairs
from baton.algorithms.state import Pair, PairsReport
from baton.audit.episodes import EpisodeFiles, Part, Playing
from baton.audit.findings import NOT_COUPLED
from baton.audit.subject import Subject
from baton.core.keyed import PAIRS
from baton.rollout import BESIDE, Play
from baton.types import AgentId


class Comparisons:
    """Pairs of an update or a stage against the plays that they should be of."""

    def __init__(self, subject: Subject, files: EpisodeFiles) -> None:
        self.subject, self.files = subject, files

    def check(
        self,
        promoted: Part,
        beside: Part,
        *,
        stage: int,
        who: str,
        versions: Mapping[AgentId, int],
        other: Mapping[AgentId, int],
        count: int,
        claim: pairs.Claim,
    ) -> tuple[PairsReport | None, list[Pair]]:
        """The report that follows from the rows, and the pairs; None where there are none or their episodes do not fit."""
        found, world = self.subject.found, self.subject.world
        options, at = world.certificate, (world.seed, stage, who, PAIRS)
        n, here = len(promoted.rows), found.at(promoted.file)
        if n != len(beside.rows):
            here.wrong("pairs", "episodes of the promoted team, and of the other", n, len(beside.rows))
            return None, []
        if not n:
            here.wrong("pairs", "holds no pair, and pairs were to be played")
            return None, []
        drawn = pairs.draws(len(world.certify), count, at=at)[:n]
        plays = [Play(task=world.certify[place], sibling=i) for i, place in enumerate(drawn)]
        is_apart = options.coupling == "none"
        first = Playing(table=world.table, address=at, versions=versions, drawn_from="certify")
        second = Playing(
            table=world.table,
            address=(*at, "apart") if is_apart else at,
            versions=other,
            drawn_from="certify",
            suffix="" if is_apart else BESIDE,
        )
        one = self.files.check(promoted, first, plays, "pair")
        two = self.files.check(beside, second, plays, "beside")
        if len(one) != n or len(two) != n:
            return None, []
        played = [Pair(promoted=a, beside=b) for a, b in zip(one, two, strict=True)]
        found.ok("pairs", n)
        found.skip("pairs", NOT_COUPLED, n)
        changed = [a for a in versions if versions[a] != other[a]]
        if not is_apart:
            for number, pair in enumerate(played, start=1):
                if why := _odd(pair, changed):
                    found.at(promoted.file, f"pair {number}").wrong("pairs", why)

        def report(part: Sequence[Pair]) -> PairsReport:
            return pairs.judged(part, options, claim, reward_range=world.reward_range, changed=changed, pool=world.pool)

        def is_over(part: Sequence[Pair]) -> bool:
            return pairs.is_over(part, report(part), options, claim, count=count, reward_range=world.reward_range)

        for looked in range(pairs.WAVE, n, pairs.WAVE):
            if is_over(played[:looked]):
                here.wrong("pairs", f"{looked} pairs decided already, and more were played", n, looked)
                break
        whole = report(played)
        if n < count and (n % pairs.WAVE or not is_over(played)):
            here.wrong("pairs", "nothing was decided yet, and no more pairs were played", n, count)
        return whole, played


def _odd(pair: Pair, changed: Sequence[AgentId]) -> str:
    """What cannot be of two teams that were played side by side; empty where nothing is."""
    for number, (a, b) in enumerate(zip(pair.promoted.turns, pair.beside.turns, strict=False), start=1):
        if a.said != b.said:
            told = f"turn {number}: '{a.agent}' has one version, and says two things to one prompt"
            return "" if a.agent in changed else told
    is_whole = len(pair.promoted.turns) == len(pair.beside.turns)
    return "word for word the same, with two outcomes" if is_whole and pair.promoted.outcome != pair.beside.outcome else ""
