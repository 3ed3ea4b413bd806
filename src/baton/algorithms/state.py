"""The nouns of stage mode: where a run stands, what an update was, and what a run hands in."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from baton.algorithms.acceptance import (
    ProbeStates,
    ReplayGap,
    ReplaySums,
    Trainee,
)
from baton.algorithms.options import CertificateOptions, GateOptions, SatOptions
from baton.core import certificate
from baton.engines.engine import Sampler
from baton.rollout import Table
from baton.team import Team
from baton.types import (
    Accepted,
    AgentId,
    Episode,
    GateRecord,
    Snapshot,
    StepReport,
    Task,
    TokenDivergence,
    Verdict,
    Weights,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentState:
    """What adapts from update to update. A rejection changes beta, lr and streak, and leaves the cursor where it was."""

    beta: float
    lr: float
    streak: int = 0
    cursor: int = 0
    """Train prompts that this agent's accepted updates have consumed."""
    replay: ReplaySums = field(default_factory=ReplaySums)
    """Judged while an update has fewer than 1,000 own tokens."""
    gain: float | None = None
    """Order `bandit`: mean of what the team's reward did after this agent's updates, the latest half (2.6)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """What a stage decides before its first update: who moves when, and how far each may go."""

    order: tuple[AgentId, ...]
    radii: Mapping[AgentId, float]
    """Token radius of each agent, nats; the message-mean radius goes with it."""
    gains: Mapping[AgentId, float]
    """Predicted gain of each agent where it was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageEntry:
    """What a stage keeps of one of its updates until the stage is complete."""

    agent: AgentId
    q_gate: float
    """Achieved divergence in nats; 0 for a rejected update, which moved nothing."""
    radius: float
    episodes: int
    word: str
    from_version: int = 0
    """Promoted when the update began."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands between two agent updates: everything that decides what comes next."""

    team: Team
    agents: Mapping[AgentId, AgentState]
    done: int = 0
    """Agent updates that are complete, over the whole plan."""
    stalled: tuple[tuple[str, float], ...] = ()
    """(reason, mean reward) of every update since the last one that was accepted."""
    entries: tuple[StageEntry, ...] = ()
    """Updates of the stage in hand."""
    stage: StagePlan | None = None
    """Of the stage in hand, or of the last one."""
    moved: tuple[AgentId, float, bool] | None = None
    """Order `bandit`: who updated last, the mean reward of its episodes, whether it was accepted."""


@dataclass(frozen=True, kw_only=True)
class EpisodeStats:
    """Counts of one batch of episodes."""

    n: int
    failed: Mapping[str, int]
    reward: float
    tokens: Mapping[AgentId, int]
    cut: Mapping[AgentId, float]
    prompts: int
    degenerate_groups: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """A training from the same start with more penalty and a smaller rate, and what made it shorter than the first (2.5)."""

    beta: float
    lr: float
    shrink_total: float
    """Norm of its displacement over that of the first training's (masters)."""
    shrink_lr: float
    shrink_beta: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Reuse:
    """How a stage's shared episodes were made to speak for the team as it is now (2.3)."""

    changed: tuple[AgentId, ...]
    """Teammates that were accepted since the episodes were played."""
    effective_share: float
    """Effective sample size of the untruncated weights over the number of episodes."""
    mean_weight: float
    """Mean of the truncated weights that multiplied the loss."""
    is_resampled: bool
    """Below the floor: the episodes were left alone and fresh ones played."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairsReport:
    """What a paired evaluation found (3.6). Pair i is of the i-th prompt drawn, with replacement, from the pool."""

    n: int
    discordance: float
    """Share of pairs whose returns differ."""
    parted: float
    """Share of tokens of changed agents that differ, of those before which everything was the same."""
    missing: int
    """Returns that an episode failed to give; each counts against what is claimed."""
    coupling: str
    delta: float
    """Chance that any statement of this kind is wrong: in this stage, or (run level) in all stages together."""
    is_run_level: bool
    pool: str
    """SHA-256 of the prompts that were drawn from."""
    gain: certificate.Certificate
    harm: certificate.Certificate
    """The same with the teams exchanged: positive means that the newer one is worse."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SurrogateReport:
    """What an update's probe episodes say of its accepted candidate (3.6): one of each prompt, drawn without replacement."""

    turns: int
    """m: the most that the agent can take in an episode."""
    missing: int
    """Returns that an episode failed to give; each counts against the gain."""
    delta: float
    """Chance that any statement of this kind is wrong: in this stage, or (run level) in all stages together."""
    is_run_level: bool
    pool: str
    """SHA-256 of the prompts that were drawn from."""
    gain: certificate.Certificate


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One prompt, played by the promoted team and by the other."""

    promoted: Episode
    beside: Episode

    def of(self, is_beside: bool) -> Episode:
        return self.beside if is_beside else self.promoted


@dataclass(frozen=True, kw_only=True)
class UpdateReport:
    """All that one agent update was and decided; one line of `stages.jsonl`."""

    stage: int
    index: int
    schedule: str
    agent: AgentId
    from_version: int
    candidate_version: int
    verdict: Verdict
    looks: tuple[GateRecord, ...]
    episodes: EpisodeStats
    probe_episodes: int
    steps: tuple[StepReport, ...]
    """Of the first training, then of each retry."""
    retries: tuple[Retry, ...]
    reuse: Reuse | None
    beta: float
    lr: float
    replay: ReplayGap | None
    published_gap: float | None
    pairs: PairsReport | None
    surrogate: SurrogateReport | None
    """Of an accepted update where it was asked for; what was rejected has changed nothing."""
    fingerprint: str
    after: AgentState
    seconds: Mapping[str, float]

    @property
    def to_version(self) -> int | None:
        """The promoted version; absent iff rejected."""
        return self.candidate_version if isinstance(self.verdict, Accepted) else None


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """One stage: every update in its order, and the published bound of 3.1 with the achieved divergences and with the
    configured radii (information only: its verdict is always void; None where one of them is infinite)."""

    stage: int
    entries: tuple[StageEntry, ...]
    achieved: certificate.Certificate | None
    configured: certificate.Certificate | None
    pairs: PairsReport | None = None
    """The team against that of the stage's start; None where no pairs were asked for, or nothing had changed."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the record of an update lies beside: its episodes, and the divergence at every probe state of every look."""

    episodes: Sequence[Episode]
    probe: Sequence[Episode]
    states: ProbeStates | None
    looks: Sequence[tuple[GateRecord, TokenDivergence]]
    pairs: Sequence[Pair] = ()
    ordering: Sequence[Episode] = ()
    """Beside a stage's first update: the episodes that its order or its radii were measured on."""
    restated: Sequence[Episode] = ()
    """The agent's own messages of the probe episodes with the accepted candidate's log-probabilities (`surrogate`)."""


class Journal(Protocol):
    """The durable side of a run (`baton.run`); `commit` is the only way a promotion becomes real."""

    def begin(self, agent: AgentId, stage: int) -> int:
        """A version id for the candidate, durable before anything of the candidate is, and never given twice."""
        ...

    def commit(
        self, report: UpdateReport, evidence: Evidence, position: Position, promoted: tuple[Snapshot, Weights] | None
    ) -> None:
        """Make the update durable, now or beside what follows, in the order of the calls: the weights first, then the record
        that names them (the commit point). The learner may go on at once."""
        ...

    def stage(self, report: StageReport, pairs: Sequence[Pair]) -> None:
        """Write the line of a complete stage, and the pairs that it rests on before it."""
        ...

    def weights(self, agent: AgentId, version: int) -> Weights:
        """What a version that is still kept serves."""
        ...

    def rest(self) -> None:
        """Learners that leave memory between their updates do so now; what they were given since is forgotten."""
        ...

    def tick(self, what: str, total: int) -> None:
        """One more unit of `total` of this long step is done. Raises Interrupted when the user asked to stop."""
        ...


@dataclass(frozen=True, kw_only=True)
class World:
    """Everything that stage mode acts on."""

    seed: int
    options: SatOptions
    gate: GateOptions
    group: int
    table: Table
    sampler: Sampler
    trainees: Mapping[AgentId, Trainee]
    train: Sequence[Task]
    probe: Sequence[Task]
    reward_range: tuple[float, float]
    journal: Journal
    certify: Sequence[Task] = ()
    pool: str = ""
    """SHA-256 of the prompts of `certify`."""
    probe_pool: str = ""
    """SHA-256 of the prompts of `probe`."""
    certificate: CertificateOptions = field(default_factory=CertificateOptions)
    clock: Clock = time.monotonic


class Clock(Protocol):
    def __call__(self) -> float: ...


Ending = Literal["finished", "converged", "stalled"]
