"""What waits for the weights of a version: each is loaded once, and everything that needs it is done then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from baton.audit.findings import STAGES
from baton.audit.subject import Subject, Update
from baton.core import advantages
from baton.rollout import Seat
from baton.types import AgentId, Episode


def tokens_of(episodes: Sequence[Episode], agent: AgentId) -> int:
    """Tokens that an agent sampled in these episodes."""
    return sum(len(turn.ids) for e in episodes for turn in e.turns if turn.agent == agent)


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Messages of one seat in one file that one version sampled: to be scored again by it."""

    file: str
    uses: frozenset[str]
    """Rows of these uses alone."""
    seat: AgentId
    temperature: float
    tokens: int
    update: Update | None
    """The update whose replay test these tokens were part of."""


@dataclass(kw_only=True)
class Reweighed:
    """Shared episodes of a stage, to be weighted again for the teammates that were promoted since (2.3)."""

    update: Update
    file: str
    """Where the stage's first update keeps them."""
    unmet: dict[AgentId, int]
    """Changed teammates whose versions were not loaded yet."""
    log_ratios: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    """By episode, over the teammates that were."""

    def compare(self, subject: Subject) -> None:
        """The recorded effective share and mean weight against the computed log-ratios; without any, all weights are 1."""
        found = subject.found
        log_ratios = torch.tensor(list(self.log_ratios.values()) or [0.0], dtype=torch.float64)
        found.ok("counts")
        computed = {
            "effective_share": advantages.effective_sample_share(log_ratios),
            "mean_weight": float(advantages.reuse_weights(log_ratios)[1].mean())
            if subject.options.reuse.weights == "truncated"
            else 1.0,
        }
        for name, value in computed.items():
            said = float(self.update.line["reuse"][name])
            found.gap("reuse", abs(said - value))
            if not abs(said - value) <= subject.tolerances.share:
                found.at(STAGES, self.update.where).wrong("counts", f"reuse.{name}", said, value)


@dataclass(kw_only=True)
class Due:
    """All that waits for one version of one agent."""

    fingerprint: tuple[str, str] | None = None
    """As recorded, and where."""
    scorings: list[Scoring] = field(default_factory=lambda: list[Scoring]())
    promotion: Update | None = None
    """The accepted update that began with this version."""
    reweighed: list[Reweighed] = field(default_factory=lambda: list[Reweighed]())


class Waiting:
    """What waits, by agent and version."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.reweighed: list[Reweighed] = []
        self._due: dict[tuple[AgentId, int], Due] = {}

    def at(self, agent: AgentId, version: int) -> Due:
        """What waits for this version; more can be put there."""
        return self._due.setdefault((agent, version), Due())

    @property
    def versions(self) -> set[tuple[AgentId, int]]:
        """(agent, version) of which a fingerprint or a message is recorded."""
        return {at for at, due in self._due.items() if due.fingerprint is not None or due.scorings}

    @property
    def tokens(self) -> int:
        """Tokens that are to be scored."""
        return sum(scoring.tokens for due in self._due.values() for scoring in due.scorings)

    def score(
        self,
        seat: Seat,
        version: int,
        file: str,
        uses: Iterable[str],
        episodes: Sequence[Episode],
        *,
        model: AgentId | None = None,
        update: Update | None = None,
    ) -> None:
        """What this seat sampled in these episodes, by a version of its agent (or of `model`, which sat in its place)."""
        tokens = tokens_of(episodes, seat.agent)
        scoring = Scoring(
            file=file, uses=frozenset(uses), seat=seat.agent, temperature=seat.temperature, tokens=tokens, update=update
        )
        if tokens:
            self.at(model or seat.agent, version).scorings.append(scoring)

    def reweigh(self, update: Update, file: str, changed: Mapping[AgentId, int]) -> None:
        """A stage's shared episodes, for an update after these teammates were promoted; judged now if there are none."""
        weighed = Reweighed(update=update, file=file, unmet=dict(changed))
        self.reweighed.append(weighed)
        for agent, version in changed.items():
            self.at(agent, version).reweighed.append(weighed)
        if not changed:
            weighed.compare(self.subject)
