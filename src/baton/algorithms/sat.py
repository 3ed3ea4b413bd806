"""SAT, sequential agent tuning: in a stage the agents update in turn, each on rollouts of the team as it is now.

The numbered comments are the steps of ALGORITHMS 2.2. Steps 15 and 20 (paired evaluation) are not here yet.
Schedules (2.14): `sat` collects again before each agent's update, or reweights one batch a stage (2.3); `joint` lets every
agent update on the same episodes, each behind its own gate; `independent` trains each agent beside teammates frozen at the
run's start.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from baton.algorithms.acceptance import (
    ProbeStates,
    ReplayGap,
    ReplaySums,
    Trainee,
    check_replay,
    look,
    probe_states,
    publish_with_proof,
)
from baton.algorithms.options import GateOptions, SatOptions
from baton.core import advantages as adv
from baton.core import batching, certificate, trust_region
from baton.core.keyed import PROBE, PROMPTS, SAMPLE, key, permutation
from baton.engines.engine import Sampler, ScoreRequest
from baton.errors import MissingError, NonFiniteError, StaleAdvantagesError, TaskFault
from baton.rollout import Play, Table
from baton.team import Team, update_order
from baton.types import (
    Accepted,
    AdvantageBatch,
    AgentId,
    Episode,
    Failed,
    GateRecord,
    Rejected,
    Slot,
    Snapshot,
    StepReport,
    Task,
    TokenDivergence,
    Trajectory,
    Verdict,
    Weights,
    verdict_word,
)

# ---- what a run hands in ---------------------------------------------------------------------------------------


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
    configured radii (information only: its verdict is always void)."""

    stage: int
    entries: tuple[StageEntry, ...]
    achieved: certificate.Certificate
    configured: certificate.Certificate


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the record of an update lies beside: its episodes, and the divergence at every probe state of every look."""

    episodes: Sequence[Episode]
    probe: Sequence[Episode]
    states: ProbeStates | None
    looks: Sequence[tuple[GateRecord, TokenDivergence]]
    ordering: Sequence[Episode] = ()
    """Beside a stage's first update: the episodes that its order or its radii were measured on."""


class Journal(Protocol):
    """The durable side of a run (`baton.run`); `commit` is the only way a promotion becomes real."""

    def begin(self, agent: AgentId, stage: int) -> int:
        """A version id for the candidate, durable before it is returned and never given twice."""
        ...

    def commit(
        self, report: UpdateReport, evidence: Evidence, position: Position, promoted: tuple[Snapshot, Weights] | None
    ) -> None:
        """Make the update durable: the weights first, then the record that names them (the commit point)."""
        ...

    def stage(self, report: StageReport) -> None:
        """Write the line of a complete stage."""
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
    clock: Clock = time.monotonic


class Clock(Protocol):
    def __call__(self) -> float: ...


Ending = Literal["finished", "converged", "stalled"]


# ---- the data of one update ------------------------------------------------------------------------------------


def draw_prompts(
    tasks: Sequence[Task], cursor: int, count: int, *, at: tuple[str | int, ...], skip: frozenset[str] = frozenset()
) -> tuple[list[Task], int]:
    """The next `count` distinct tasks after `cursor` in a keyed shuffle per epoch, and the cursor behind them.

    Raises:
        MissingError: fewer than `count` tasks are left that are not in `skip`.
    """
    if count > len(tasks) - len(skip):
        raise MissingError(f"{count} distinct prompts wanted, {len(tasks) - len(skip)} are there")
    taken: dict[str, Task] = {}
    order: list[int] = []
    epoch = -1
    while len(taken) < count:
        if cursor // len(tasks) != epoch:
            epoch = cursor // len(tasks)
            order = permutation(key(*at, epoch), len(tasks))
        task = tasks[order[cursor % len(tasks)]]
        cursor += 1
        # Two epochs can meet inside one draw: a task is taken once.
        if task.id not in taken and task.id not in skip:
            taken[task.id] = task
    return list(taken.values()), cursor


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The episodes E of an update: scored ones to train on, all of them for the record."""

    scored: tuple[Episode, ...]
    all: tuple[Episode, ...]
    cursor: int
    informative: int


def acting(team: Team, slots: Mapping[AgentId, Slot]) -> Mapping[AgentId, int]:
    """Versions that speak: the promoted ones, and 0 for an agent that acts with its start weights."""
    return {m.agent: 0 if slots.get(m.agent) == "start" else m.version for m in team.members}


async def collect(
    world: World,
    team: Team,
    cursor: int,
    *,
    stage: int,
    who: str,
    prompts: int,
    slots: Mapping[AgentId, Slot],
) -> Collected:
    """Steps 4 and 5: fresh episodes of the team as it is, drawing up to twice as many prompts again while too few
    groups are informative.

    Raises:
        TaskFault: every episode failed (names the commonest reason).
    """
    address = (world.seed, stage, who, SAMPLE)
    episodes: list[Episode] = []
    seen: set[str] = set()
    informative = 0
    is_batch = world.options.objective.choice.baseline == "batch_mean"
    count = adv.decided_prompts if is_batch else adv.informative_groups
    for _ in range(3):
        wanted = min(prompts, len(world.train) - len(seen))
        if wanted == 0:
            break
        tasks, cursor = draw_prompts(world.train, cursor, wanted, at=(world.seed, PROMPTS, who), skip=frozenset(seen))
        seen.update(task.id for task in tasks)
        plays = [Play(task=task, sibling=g) for task in tasks for g in range(world.group)]
        total = len(plays) * len(world.table.seats) * world.table.protocol.own_turns
        episodes += await world.table.play(
            plays,
            address=address,
            versions=acting(team, slots),
            slots=slots,
            tick=lambda: world.journal.tick(f"{who}: episodes", total),  # noqa: B023
        )
        scored = tuple(e for e in episodes if e.is_scored)
        if not scored:
            reasons = Counter(e.outcome.reason for e in episodes if isinstance(e.outcome, Failed))
            reason, n = reasons.most_common(1)[0]
            raise TaskFault(f"all {len(episodes)} episodes of stage {stage} failed; {n} times: {reason}")
        informative = count(_rewards(scored), [e.group for e in scored])
        if informative >= world.options.min_informative:
            break
    return Collected(
        scored=tuple(e for e in episodes if e.is_scored), all=tuple(episodes), cursor=cursor, informative=informative
    )


async def collect_probe(
    world: World,
    team: Team,
    *,
    stage: int,
    who: str,
    until: AgentId | None,
    slots: Mapping[AgentId, Slot],
) -> list[Episode]:
    """Step 4: one episode for each of a fresh keyed draw of probe prompts, played to the agent's last own turn."""
    order = permutation(key(world.seed, stage, who, PROBE), len(world.probe))
    tasks = [world.probe[i] for i in order[: world.gate.probe_prompts]]
    total = len(tasks) * len(world.table.seats) * world.table.protocol.own_turns
    return await world.table.play(
        [Play(task=task) for task in tasks],
        address=(world.seed, stage, who, PROBE),
        versions=acting(team, slots),
        slots=slots,
        until=until,
        tick=lambda: world.journal.tick(f"{who}: probe", total),
    )


def _rewards(episodes: Sequence[Episode]) -> Float[Tensor, " E"]:
    return torch.tensor([e.reward for e in episodes], dtype=torch.float64)


def episode_advantages(options: SatOptions, episodes: Sequence[Episode]) -> adv.EpisodeAdvantages:
    """Step 7: the advantage of each episode under the configured baseline; siblings must be of one team."""
    rewards, groups, teams = _rewards(episodes), [e.group for e in episodes], [dict(e.versions) for e in episodes]
    baseline = options.objective.choice.baseline
    if baseline == "group":
        return adv.group(rewards, groups, teams=teams, clip=options.objective.advantage_clip)
    if baseline == "loo":
        return adv.loo(rewards, groups, teams=teams)
    return adv.batch_mean(rewards, groups, teams=teams)


def check_fresh(team: Team, episodes: Sequence[Episode], agents: Sequence[AgentId]) -> None:
    """Advantages hold under the team that played: refuse episodes in which one of `agents` had another version than now.

    Raises:
        StaleAdvantagesError: names the agent and both versions.
    """
    for episode in episodes:
        for name in agents:
            played, now = episode.versions.get(name), team.member(name).version
            if played != now:
                raise StaleAdvantagesError(
                    f"an episode was played by {name}@{played}, but the team now has {name}@{now}; collect again or reweight"
                )


def agent_batch(
    episodes: Sequence[Episode], values: adv.EpisodeAdvantages, agent: AgentId, *, temperature: float, team: Team
) -> AdvantageBatch:
    """One agent's own tokens of these episodes, each with its episode's advantage."""
    rows = [t for e in episodes for t in batching.trajectories(e, agent)]
    if not rows:
        raise MissingError(f"'{agent}' sampled no token in {len(episodes)} episodes; it cannot be updated")
    batch = batching.token_batch(rows, temperature=temperature)
    per_episode = {e.id: float(a) for e, a in zip(episodes, values.values.tolist(), strict=True)}
    return batching.with_advantages(batch, per_episode, team=team.versions)


def unheard(
    gate: GateOptions,
    episodes: Sequence[Episode],
    values: adv.EpisodeAdvantages,
    probe: Sequence[Trajectory],
    agent: AgentId,
    *,
    looks: int,
) -> str:
    """Why an agent that the protocol did not let act often enough cannot be updated (masked activation); empty where it can.

    Episodes without a turn of its own have no row, and such probe episodes are no units of the gate.
    """
    told = [bool(batching.trajectories(e, agent)) for e in episodes]
    pulls = sum(acts and a != 0.0 for acts, a in zip(told, values.values.tolist(), strict=True))
    if not pulls:
        acted = f"'{agent}' acted in {sum(told)} of {len(episodes)} episodes"
        return f"{acted}, none of them with an advantage" if any(told) else acted
    units, needed = len({t.group for t in probe}), 1
    if gate.require_certified:
        needed = trust_region.units_needed(level=gate.quantile, confidence_miss=gate.eta / looks)
    return "" if units >= needed else f"'{agent}' acted on {units} probe prompts, the gate needs {needed}"


def stats(world: World, collected: Collected, values: adv.EpisodeAdvantages) -> EpisodeStats:
    """Counts of a batch: failures by reason, tokens and cut share per agent."""
    failed = Counter(e.outcome.reason for e in collected.all if isinstance(e.outcome, Failed))
    agents = [seat.agent for seat in world.table.seats]
    turns = {a: [t for e in collected.all for t in e.turns if t.agent == a] for a in agents}
    return EpisodeStats(
        n=len(collected.all),
        failed=dict(failed),
        reward=float(_rewards(collected.scored).mean()),
        tokens={a: sum(len(t.ids) for t in turns[a]) for a in agents},
        cut={a: sum(t.cut for t in turns[a]) / max(1, len(turns[a])) for a in agents},
        prompts=len({e.group for e in collected.all}),
        degenerate_groups=values.degenerate_groups,
    )


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What a stage that shares its episodes plays once; without `probe`, each update plays its own."""

    collected: Collected
    probe: Sequence[Episode] | None


@dataclass(frozen=True, kw_only=True)
class UpdateData:
    """What one update rests on: its episodes, the gate's, and (reuse) the weight of each scored episode."""

    collected: Collected
    probe: Sequence[Episode]
    cursor: int
    weights: Float[Tensor, " E"] | None = None
    reuse: Reuse | None = None


async def gather(
    world: World, position: Position, agent: AgentId, *, stage: int, slots: Mapping[AgentId, Slot], shared: Shared | None
) -> UpdateData:
    """Step 4: fresh episodes of the team as it is, or the stage's shared ones. Reused ones are reweighted for the teammates
    that were accepted since, and given up for fresh ones where too little of them is left."""
    cursor = position.agents[agent].cursor
    probe = None if shared is None else shared.probe
    if probe is None:
        probe = await collect_probe(world, position.team, stage=stage, who=agent, until=agent, slots=slots)
    reuse: Reuse | None = None
    if shared is not None:
        if world.options.data != "reuse":
            return UpdateData(collected=shared.collected, probe=probe, cursor=cursor)
        changed = tuple(entry.agent for entry in position.entries if entry.word != "rejected")
        log_ratios = await log_ratio_sums(world, shared.collected.scored, changed)
        _, weights = adv.reuse_weights(log_ratios)
        share = adv.effective_sample_share(log_ratios)
        reuse = Reuse(
            changed=changed,
            effective_share=share,
            mean_weight=float(weights.mean()),
            is_resampled=share < world.options.reuse.ess_floor,
        )
        if not reuse.is_resampled:
            return UpdateData(collected=shared.collected, probe=probe, cursor=cursor, weights=weights, reuse=reuse)
    prompts = world.options.episodes // world.group
    collected = await collect(world, position.team, cursor, stage=stage, who=agent, prompts=prompts, slots=slots)
    return UpdateData(collected=collected, probe=probe, cursor=collected.cursor, reuse=reuse)


async def log_ratio_sums(world: World, episodes: Sequence[Episode], changed: Sequence[AgentId]) -> Float[Tensor, " E"]:
    """Log of the likelihood ratio of each episode under the team as it is to the team that played it: the sum over ALL turns
    of changed teammates of promoted minus recorded log-probability, by the sampler that now serves them (2.3)."""
    temperature = {seat.agent: seat.temperature for seat in world.table.seats}
    turns = [(n, t) for n, e in enumerate(episodes) for t in e.turns if t.kind == "action" and t.agent in changed]
    scores = await world.sampler.score(
        [
            ScoreRequest(
                agent=t.agent, slot="promoted", prompt_ids=t.prompt_ids, ids=t.ids, temperature=temperature[t.agent]
            )
            for _, t in turns
        ]
    )
    out = torch.zeros(len(episodes), dtype=torch.float64)
    for (n, turn), score in zip(turns, scores, strict=True):
        out[n] += math.fsum(score) - math.fsum(turn.logprobs)
    return out


# ---- one agent update ------------------------------------------------------------------------------------------


@dataclass
class _Draft:
    """What an update has found out so far; becomes the UpdateReport."""

    verdict: Verdict | None = None
    looks: list[tuple[GateRecord, TokenDivergence]] = field(
        default_factory=lambda: list[tuple[GateRecord, TokenDivergence]]()
    )
    steps: list[StepReport] = field(default_factory=lambda: list[StepReport]())
    retries: list[Retry] = field(default_factory=lambda: list[Retry]())
    states: ProbeStates | None = None
    replay: ReplayGap | None = None
    published_gap: float | None = None
    fingerprint: str = ""
    promoted: tuple[Snapshot, Weights] | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict[str, float]())


def _distance(one: Snapshot, other: Snapshot) -> float:
    """Norm of the difference of two snapshots' masters; a tensor that one of them lacks is zero there."""
    total = 0.0
    for name in one.weights.keys() | other.weights.keys():
        a, b = one.weights.get(name), other.weights.get(name)
        difference = a - b if a is not None and b is not None else a if a is not None else b
        total += float(difference.double().square().sum()) if difference is not None else 0.0
    return math.sqrt(total)


async def propose(
    world: World,
    position: Position,
    trainee: Trainee,
    data: UpdateData,
    values: adv.EpisodeAdvantages,
    draft: _Draft,
    *,
    origin: Snapshot,
    stage: int,
    version: int,
) -> AgentState:
    """Steps 5 to 14 for one agent: step, look, try again, shrink, publish with proof. Fills `draft`; returns the state with
    the replay sums. The learner is left at the accepted candidate, or wherever it failed (the caller restores `origin`)."""
    state, learner, options = position.agents[trainee.agent], trainee.learner, world.options
    collected = data.collected
    if collected.informative < options.min_informative:  # 5
        draft.verdict = Rejected(
            reason="no_signal",
            detail=f"{collected.informative} informative groups after {len(collected.all)} episodes, "
            f"algorithm.min_informative = {options.min_informative}",
        )
        return state
    began = world.clock()
    temperature = next(s.temperature for s in world.table.seats if s.agent == trainee.agent)
    # Shared episodes are of the stage's start: what has changed since is their weights' to say, or (joint) by design.
    is_shared = options.name != "sat" or (data.reuse is not None and not data.reuse.is_resampled)
    check_fresh(position.team, collected.scored, (trainee.agent,) if is_shared else position.team.agents)
    rows = [t for e in data.probe for t in batching.trajectories(e, trainee.agent)]
    if why := unheard(world.gate, collected.scored, values, rows, trainee.agent, looks=options.looks):
        draft.verdict = Rejected(reason="no_signal", detail=why)  # 5
        return state
    if data.weights is not None:
        values = replace(values, values=values.values * data.weights)
    batch = agent_batch(collected.scored, values, trainee.agent, temperature=temperature, team=position.team)
    parts = batching.parts(batch, options.inner_steps)
    anchors = [learner.remember(part.batch) for part in parts]
    gap = torch.cat(
        [(a.logprobs - p.batch.behavior_logprobs)[p.batch.mask].double() for a, p in zip(anchors, parts, strict=True)]
    )
    sums, draft.replay = check_replay(state.replay, gap, agent=trainee.agent, is_exact=trainee.is_exact)  # 6
    state = replace(state, replay=sums)
    messages = batching.token_batch(rows, temperature=temperature)
    draft.states = states = probe_states(messages, world.gate, at=(world.seed, stage, trainee.agent, PROBE))
    current = learner.remember(states.batch)

    def trained(beta: float, lr: float) -> None:
        objective = options.objective.loss(penalty=beta)
        for part, anchor in zip(parts, anchors, strict=True):
            world.journal.tick(f"{trainee.agent}: steps", len(parts))
            draft.steps.append(learner.step(part, objective, lr=lr, anchor=anchor if objective.needs_kl else None))

    def passes(scale: float, attempt: int = 0) -> bool:
        record, divergence = look(trainee, states, current, world.gate, looks=options.looks, scale=scale)
        draft.looks.append((replace(record, attempt=attempt), divergence))
        return record.passed

    try:
        trained(state.beta, state.lr)  # 9
        draft.seconds["train"] = world.clock() - began
        began = world.clock()
        if not passes(1.0) and options.looks > 1:  # 10
            first = learner.snapshot(moments=False)
            length = _distance(first, origin)
            for r in range(1, options.backtrack.tries):
                learner.restore(origin)
                # A penalty of 0 is left out for good: then a retry is a smaller rate alone.
                beta = 0.0 if state.beta == 0.0 else trust_region.retry_penalty(state.beta, r)
                lr = trust_region.retry_lr(state.lr, r)
                trained(beta, lr)
                total, by_lr, by_beta = trust_region.shrinkage(
                    length, _distance(learner.snapshot(moments=False), origin), lr / state.lr
                )
                draft.retries.append(Retry(beta=beta, lr=lr, shrink_total=total, shrink_lr=by_lr, shrink_beta=by_beta))
                if total > 0.0 and passes(min(1.0, total), attempt=r):
                    break
            if not draft.looks[-1][0].passed:
                for scale in trust_region.line_search_scales(options.line_search.halvings):  # 11
                    world.journal.tick(f"{trainee.agent}: line search", options.line_search.halvings)
                    learner.blend(first, origin, scale)
                    if passes(scale):  # 12
                        break
        draft.seconds["gate"] = world.clock() - began
    except NonFiniteError as error:
        draft.verdict = Rejected(reason="non_finite", detail=str(error))
        return state
    record = draft.looks[-1][0]
    if not record.passed:
        draft.verdict = Rejected(reason="radius", gate=record)  # 13
        return state
    began = world.clock()
    weights = learner.weights()
    why, draft.published_gap = await publish_with_proof(world.sampler, trainee, messages, weights, version)  # 14
    draft.seconds["publish"] = world.clock() - began
    if why:
        draft.verdict = Rejected(reason="not_published", gate=record, detail=why)
        return state
    draft.fingerprint = weights.fingerprint
    draft.promoted = (learner.snapshot(lend=True), weights)
    draft.verdict = Accepted(scale=record.scale, gate=record)
    return state


def adapt(
    state: AgentState, trainee: Trainee, verdict: Verdict, looks: Sequence[GateRecord], options: SatOptions
) -> AgentState:
    """Steps 13, 17, 18 and 19: beta, lr and streak after an update (ALGORITHMS 2.5)."""
    accepted = isinstance(verdict, Accepted)
    failed_full = bool(looks) and not looks[0].passed
    relaxed = bool(looks) and looks[0].passed and looks[0].q_gate < trainee.radius_token / 2
    return replace(
        state,
        beta=state.beta
        if state.beta == 0.0
        else trust_region.next_penalty(
            state.beta,
            full_step_failed=failed_full,
            relaxed=relaxed and accepted,
            low=options.penalty.low,
            high=options.penalty.high,
        ),
        lr=trust_region.next_lr(
            state.lr, configured=trainee.lr, accepted=accepted, reason=None if accepted else verdict.reason
        ),
        streak=0 if accepted else state.streak + 1,
    )


async def update(
    world: World,
    position: Position,
    agent: AgentId,
    *,
    stage: int,
    slots: Mapping[AgentId, Slot],
    shared: Shared | None = None,
    ordering: Sequence[Episode] = (),
) -> tuple[Position, UpdateReport]:
    """One agent's update, from its episodes to the durable record. `shared` are the episodes of a stage that shares them."""
    trainee, options = allowed(world.trainees[agent], position.stage), world.options
    began = world.clock()
    version = world.journal.begin(agent, stage)
    before = position.team.member(agent).version
    data = await gather(world, position, agent, stage=stage, slots=slots, shared=shared)
    collected = data.collected
    values = episode_advantages(options, collected.scored)  # 7
    counts = stats(world, collected, values)
    if options.order == "bandit":
        position = credit(position, counts.reward)
    draft = _Draft(seconds={"rollout": world.clock() - began})
    origin = trainee.learner.snapshot()  # 8
    state = await propose(world, position, trainee, data, values, draft, origin=origin, stage=stage, version=version)
    verdict, looks = draft.verdict, tuple(record for record, _ in draft.looks)
    if verdict is None:
        raise MissingError(f"the update of '{agent}' in stage {stage} ended without a verdict")
    is_accepted = isinstance(verdict, Accepted)
    if is_accepted:
        state = replace(state, cursor=data.cursor)
    else:
        trainee.learner.restore(origin)  # 18
    after = adapt(state, trainee, verdict, looks, options)
    team = position.team.promote(agent, verdict, version) if is_accepted else position.team
    report = UpdateReport(
        stage=stage,
        index=position.done,
        schedule=options.name,
        agent=agent,
        from_version=before,
        candidate_version=version,
        verdict=verdict,
        looks=looks,
        episodes=counts,
        probe_episodes=len(data.probe),
        steps=tuple(draft.steps),
        retries=tuple(draft.retries),
        reuse=data.reuse,
        beta=position.agents[agent].beta,
        lr=position.agents[agent].lr,
        replay=draft.replay,
        published_gap=draft.published_gap,
        fingerprint=draft.fingerprint,
        after=after,
        seconds={**draft.seconds, "total": world.clock() - began},
    )
    rejection = () if isinstance(verdict, Accepted) else ((verdict.reason, counts.reward),)
    entry = StageEntry(
        agent=agent,
        q_gate=verdict.gate.q_gate if isinstance(verdict, Accepted) else 0.0,
        radius=trainee.radius_token,
        episodes=counts.n,
        word=verdict_word(verdict),
    )
    entries = (*position.entries, entry)
    # An independent agent's stage is its own update.
    is_whole = options.name == "independent" or len(entries) == len(world.trainees)
    position = replace(
        position,
        team=team,
        agents={**position.agents, agent: after},
        done=position.done + 1,
        stalled=() if is_accepted else position.stalled + rejection,
        entries=() if is_whole else entries,
        moved=(agent, counts.reward, is_accepted) if options.order == "bandit" else None,
    )
    evidence = Evidence(episodes=collected.all, probe=data.probe, states=draft.states, looks=draft.looks, ordering=ordering)
    world.journal.commit(report, evidence, position, draft.promoted)  # 16
    if is_accepted:
        await world.sampler.swap(agent)
    if is_whole:
        world.journal.stage(stage_report(stage, entries))
    return position, report


# ---- stages ----------------------------------------------------------------------------------------------------


def stage_report(stage: int, entries: tuple[StageEntry, ...]) -> StageReport:
    """The report of a complete stage, with the published certificate twice (3.1)."""
    n = [e.episodes for e in entries]
    return StageReport(
        stage=stage,
        entries=entries,
        achieved=certificate.published([e.q_gate for e in entries], n),
        configured=certificate.published([e.radius for e in entries], n),
    )


STALLED_STAGES = 3


def ending(world: World, position: Position) -> Ending | None:
    """Step 21: three stages in a row without an accepted update end the run, as converged where there was nothing left
    to learn, else as stalled."""
    n = STALLED_STAGES * len(world.trainees)
    if len(position.stalled) < n or position.entries:
        return None
    low, high = world.reward_range
    enough = low + 0.95 * (high - low)
    is_converged = all(reason == "no_signal" and reward >= enough for reason, reward in position.stalled[-n:])
    return "converged" if is_converged else "stalled"


def total_updates(options: SatOptions, agents: int) -> int:
    """Agent updates of a whole run."""
    return options.stages * agents


def allowed(trainee: Trainee, stage: StagePlan | None) -> Trainee:
    """The trainee with the radii that its stage gives it (2.14)."""
    if stage is None or stage.radii[trainee.agent] == trainee.radius_token:
        return trainee
    share = stage.radii[trainee.agent] / trainee.radius_token
    return replace(
        trainee, radius_token=share * trainee.radius_token, radius_message_mean=share * trainee.radius_message_mean
    )


def credit(position: Position, reward: float) -> Position:
    """Order `bandit`: what the team's mean reward did since the last update is that agent's gain, exponential mean with
    factor .5; a rejected update moved nothing and gained 0 (2.6)."""
    if position.moved is None:
        return position
    agent, earlier, is_accepted = position.moved
    gain, old = (reward - earlier if is_accepted else 0.0), position.agents[agent].gain
    state = replace(position.agents[agent], gain=gain if old is None else 0.5 * old + 0.5 * gain)
    return replace(position, agents={**position.agents, agent: state})


async def plan_stage(world: World, position: Position, stage: int) -> tuple[StagePlan, Sequence[Episode]]:
    """Step 2: the order and the radii of a stage, and the episodes that they were measured on (2.6, 2.14).

    The predicted gain is the first-order one inside each agent's ball, from a diagonal Fisher information; an agent that did
    not act in the batch has none to make.
    """
    options, agents = world.options, tuple(world.trainees)
    radii = {a: t.radius_token for a, t in world.trainees.items()}
    if not options.is_measured:
        gains = {a: position.agents[a].gain for a in agents}
        order = (
            agents
            if options.name == "joint"
            else update_order(options.order, agents, seed=world.seed, stage=stage, gains=gains)
        )
        return StagePlan(order=order, radii=radii, gains={}), ()
    prompts = max(1, options.ordering_episodes // world.group)
    collected = await collect(
        world, position.team, (stage - 1) * prompts, stage=stage, who="order", prompts=prompts, slots={}
    )
    values = episode_advantages(options, collected.scored)
    kappas: dict[AgentId, float] = {}
    gains: dict[AgentId, float | None] = {}
    for agent in agents:
        acted = [any(t.kind == "action" and t.agent == agent for t in e.turns) for e in collected.scored]
        kappas[agent], gains[agent] = 0.0, 0.0
        if any(acted):
            temperature = next(s.temperature for s in world.table.seats if s.agent == agent)
            batch = agent_batch(collected.scored, values, agent, temperature=temperature, team=position.team)
            gradient, fisher = world.trainees[agent].learner.score_gradients(batch)
            kappas[agent], gains[agent] = trust_region.greedy_gain(gradient, fisher, delta=radii[agent])
            if options.order == "grad_norm":
                gains[agent] = float(gradient.double().norm())
            world.journal.rest()
    if options.radius_allocation == "greedy":
        mean = sum(radii.values()) / len(radii)
        given = trust_region.allocate_radius(
            [kappas[a] for a in agents], budget=mean * len(agents), quantum=mean / 4.0, cap=2.0 * mean
        )
        radii = dict(zip(agents, given, strict=True))
    order = (
        agents if options.name == "joint" else update_order(options.order, agents, seed=world.seed, stage=stage, gains=gains)
    )
    return StagePlan(order=order, radii=radii, gains={a: float(g or 0.0) for a, g in gains.items()}), collected.all


async def train(world: World, position: Position) -> AsyncIterator[tuple[Position, UpdateReport]]:
    """Run the stages from `position`, yielding after each complete agent update; ends early where `ending` says so.

    A run whose agents share a stage's episodes starts at a stage boundary.
    """
    options, agents = world.options, tuple(world.trainees)
    n = len(agents)
    shared: Shared | None = None
    while position.done < total_updates(options, n) and ending(world, position) is None:
        if options.name == "independent":
            # One agent is finished before the next begins; teammates act with their weights of the run's start.
            agent, stage = agents[position.done // options.stages], position.done % options.stages + 1
            position, report = await update(
                world, position, agent, stage=stage, slots={a: "start" for a in agents if a != agent}
            )
            yield position, report
            continue
        index, stage = position.done % n, position.done // n + 1
        ordering: Sequence[Episode] = ()
        if index == 0 or position.stage is None:
            plan, ordering = await plan_stage(world, position, stage)
            position = replace(position, stage=plan)
        if options.shares_episodes and index == 0:
            prompts = n * options.episodes // world.group
            # Every stage consumes the same number of prompts, whichever of its updates were accepted.
            collected = await collect(
                world, position.team, (stage - 1) * prompts, stage=stage, who="team", prompts=prompts, slots={}
            )
            is_joint = options.name == "joint"
            shared = Shared(
                collected=collected,
                probe=await collect_probe(world, position.team, stage=stage, who="team", until=None, slots={})
                if is_joint
                else None,
            )
        assert position.stage is not None
        position, report = await update(
            world, position, position.stage.order[index], stage=stage, slots={}, shared=shared, ordering=ordering
        )
        yield position, report
