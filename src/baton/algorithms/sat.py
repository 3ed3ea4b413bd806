"""SAT, sequential agent tuning: in a stage the agents update in turn, each on rollouts of the team as it is now.

The numbered comments are the steps of ALGORITHMS 2.2. Steps 15 and 20 (paired evaluation) are not here yet.
Schedules (2.14): `sat` collects again before each agent's update; `joint` lets every agent update on the same episodes,
each behind its own gate; `independent` trains each agent beside teammates frozen at the run's start.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, assert_never

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
from baton.core import batching, certificate, losses, trust_region
from baton.core.keyed import PROBE, PROMPTS, SAMPLE, key, permutation
from baton.engines.engine import Sampler
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
    is_batch = world.options.objective.resolved[2] == "batch_mean"
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
    baseline = options.objective.resolved[2]
    if baseline == "group":
        return adv.group(rewards, groups, teams=teams, clip=options.objective.advantage_clip)
    if baseline == "loo":
        return adv.loo(rewards, groups, teams=teams)
    return adv.batch_mean(rewards, groups, teams=teams)


def check_fresh(team: Team, episodes: Sequence[Episode], agent: AgentId, schedule: str) -> None:
    """Advantages hold under the team that played: refuse episodes of another one.

    `sat` demands the intermediate team itself; `joint` and `independent` only this agent's own version, since there
    teammates are by definition those of the stage's or the run's start.

    Raises:
        StaleAdvantagesError: names the agent and both versions.
    """
    checked = team.agents if schedule == "sat" else (agent,)
    for episode in episodes:
        for name in checked:
            played, now = episode.versions.get(name), team.member(name).version
            if played != now:
                raise StaleAdvantagesError(
                    f"episodes for '{agent}' were played by {name}@{played}, "
                    f"but the team now has {name}@{now}; collect again"
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


# ---- one agent update ------------------------------------------------------------------------------------------


@dataclass
class _Draft:
    """What an update has found out so far; becomes the UpdateReport."""

    verdict: Verdict | None = None
    looks: list[tuple[GateRecord, TokenDivergence]] = field(
        default_factory=lambda: list[tuple[GateRecord, TokenDivergence]]()
    )
    steps: list[StepReport] = field(default_factory=lambda: list[StepReport]())
    states: ProbeStates | None = None
    replay: ReplayGap | None = None
    published_gap: float | None = None
    fingerprint: str = ""
    promoted: tuple[Snapshot, Weights] | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict[str, float]())


async def propose(
    world: World,
    position: Position,
    trainee: Trainee,
    collected: Collected,
    probe: Sequence[Episode],
    draft: _Draft,
    *,
    origin: Snapshot,
    stage: int,
    version: int,
) -> AgentState:
    """Steps 5 to 14 for one agent: step, look, shrink, publish with proof. Fills `draft`; returns the state with the
    replay sums. The learner is left at the accepted candidate, or wherever it failed (the caller restores `origin`)."""
    state, learner, options = position.agents[trainee.agent], trainee.learner, world.options
    if collected.informative < options.min_informative:  # 5
        draft.verdict = Rejected(
            reason="no_signal",
            detail=f"{collected.informative} informative groups after {len(collected.all)} episodes, "
            f"algorithm.min_informative = {options.min_informative}",
        )
        return state
    began = world.clock()
    temperature = next(s.temperature for s in world.table.seats if s.agent == trainee.agent)
    check_fresh(position.team, collected.scored, trainee.agent, options.name)
    values = episode_advantages(options, collected.scored)  # 7
    rows = [t for e in probe for t in batching.trajectories(e, trainee.agent)]
    if why := unheard(world.gate, collected.scored, values, rows, trainee.agent, looks=1 + options.line_search.halvings):
        draft.verdict = Rejected(reason="no_signal", detail=why)  # 5
        return state
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
    objective = losses.Objective(weight=options.objective.weight_of(), penalty=state.beta)
    looks = 1 + options.line_search.halvings
    try:
        for part, anchor in zip(parts, anchors, strict=True):  # 9
            world.journal.tick(f"{trainee.agent}: steps", len(parts))
            draft.steps.append(learner.step(part, objective, lr=state.lr, anchor=anchor if objective.needs_kl else None))
        draft.seconds["train"] = world.clock() - began
        began = world.clock()
        draft.looks.append(look(trainee, states, current, world.gate, looks=looks, scale=1.0))  # 10
        if not draft.looks[-1][0].passed and options.line_search.halvings:
            first = learner.snapshot()
            for scale in trust_region.line_search_scales(options.line_search.halvings):  # 11
                world.journal.tick(f"{trainee.agent}: line search", options.line_search.halvings)
                learner.blend(first, origin, scale)
                draft.looks.append(look(trainee, states, current, world.gate, looks=looks, scale=scale))  # 12
                if draft.looks[-1][0].passed:
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
    draft.promoted = (learner.snapshot(), weights)
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
    given: tuple[Collected, Sequence[Episode]] | None = None,
) -> tuple[Position, UpdateReport]:
    """One agent's update, from its episodes to the durable record. `given` are a joint stage's episodes."""
    trainee, state = world.trainees[agent], position.agents[agent]
    began = world.clock()
    version = world.journal.begin(agent, stage)
    before = position.team.member(agent).version
    if given is None:
        prompts = world.options.episodes // world.group
        collected = await collect(world, position.team, state.cursor, stage=stage, who=agent, prompts=prompts, slots=slots)
        probe = await collect_probe(world, position.team, stage=stage, who=agent, until=agent, slots=slots)
    else:
        collected, probe = given
    draft = _Draft(seconds={"rollout": world.clock() - began})
    origin = trainee.learner.snapshot()  # 8
    state = await propose(world, position, trainee, collected, probe, draft, origin=origin, stage=stage, version=version)
    verdict, looks = draft.verdict, tuple(record for record, _ in draft.looks)
    if verdict is None:
        raise MissingError(f"the update of '{agent}' in stage {stage} ended without a verdict")
    if isinstance(verdict, Accepted):
        state = replace(state, cursor=collected.cursor if given is None else state.cursor)
    else:
        trainee.learner.restore(origin)  # 18
    after = adapt(state, trainee, verdict, looks, world.options)
    team = position.team.promote(agent, verdict, version) if isinstance(verdict, Accepted) else position.team
    report = UpdateReport(
        stage=stage,
        index=position.done,
        schedule=world.options.name,
        agent=agent,
        from_version=before,
        candidate_version=version,
        verdict=verdict,
        looks=looks,
        episodes=stats(world, collected, episode_advantages(world.options, collected.scored)),
        probe_episodes=len(probe),
        steps=tuple(draft.steps),
        beta=position.agents[agent].beta,
        lr=position.agents[agent].lr,
        replay=draft.replay,
        published_gap=draft.published_gap,
        fingerprint=draft.fingerprint,
        after=after,
        seconds={**draft.seconds, "total": world.clock() - began},
    )
    rejection = () if isinstance(verdict, Accepted) else ((verdict.reason, report.episodes.reward),)
    entry = StageEntry(
        agent=agent,
        q_gate=verdict.gate.q_gate if isinstance(verdict, Accepted) else 0.0,
        radius=trainee.radius_token,
        episodes=report.episodes.n,
        word=verdict_word(verdict),
    )
    entries = (*position.entries, entry)
    # An independent agent's stage is its own update.
    is_whole = world.options.name == "independent" or len(entries) == len(world.trainees)
    position = replace(
        position,
        team=team,
        agents={**position.agents, agent: after},
        done=position.done + 1,
        stalled=() if isinstance(verdict, Accepted) else position.stalled + rejection,
        entries=() if is_whole else entries,
    )
    evidence = Evidence(episodes=collected.all, probe=probe, states=draft.states, looks=draft.looks)
    world.journal.commit(report, evidence, position, draft.promoted)  # 16
    if isinstance(verdict, Accepted):
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


def plan(options: SatOptions, agents: Sequence[AgentId], seed: int) -> list[tuple[int, AgentId]]:
    """Every (stage, agent) of a run, in order; stages count from 1. `independent` finishes one agent before the next."""
    stages = range(1, options.stages + 1)
    match options.name:
        case "sat":
            return [(k, a) for k in stages for a in update_order(options.order, agents, seed=seed, stage=k)]
        case "joint":
            return [(k, a) for k in stages for a in agents]
        case "independent":
            return [(k, a) for a in agents for k in stages]
        case _:
            assert_never(options.name)


async def train(world: World, position: Position) -> AsyncIterator[tuple[Position, UpdateReport]]:
    """Run the plan from `position`, yielding after each complete agent update; ends early where `ending` says so.

    A joint run starts at a stage boundary: its agents share the stage's episodes.
    """
    options, agents = world.options, tuple(world.trainees)
    steps = plan(options, agents, world.seed)
    given: tuple[Collected, list[Episode]] | None = None
    while position.done < len(steps) and ending(world, position) is None:
        stage, agent = steps[position.done]
        slots: Mapping[AgentId, Slot] = {}
        if options.name == "independent":
            slots = {a: "start" for a in position.team.agents if a != agent}
        elif options.name == "joint" and position.done % len(agents) == 0:
            prompts = len(agents) * options.episodes // world.group
            # Every stage consumes the same number of prompts, whichever of its updates were accepted.
            given = (
                await collect(
                    world, position.team, (stage - 1) * prompts, stage=stage, who="team", prompts=prompts, slots=slots
                ),
                await collect_probe(world, position.team, stage=stage, who="team", until=None, slots=slots),
            )
        position, report = await update(world, position, agent, stage=stage, slots=slots, given=given)
        yield position, report
