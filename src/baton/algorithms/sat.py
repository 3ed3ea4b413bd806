"""SAT, sequential agent tuning: in a stage the agents update in turn, each on rollouts of the team as it is now.

The numbered comments are the steps of ALGORITHMS 2.2.
Schedules (2.14): `sat` collects again before each agent's update, or reweights one batch a stage (2.3); `joint` lets every
agent update on the same episodes, each behind its own gate; `independent` trains each agent beside teammates frozen at the
run's start.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from baton.algorithms import pairs, surrogate
from baton.algorithms.acceptance import (
    ProbeStates,
    ReplayGap,
    Trainee,
    check_replay,
    look,
    probe_states,
    publish_with_proof,
)
from baton.algorithms.episodes import (
    Shared,
    UpdateData,
    agent_batch,
    check_fresh,
    collect,
    collect_probe,
    episode_advantages,
    gather,
    mean_return,
    stats,
    unheard,
)
from baton.algorithms.options import SatOptions
from baton.algorithms.state import (
    AgentState,
    Ending,
    Evidence,
    Pair,
    PairsReport,
    Position,
    Retry,
    StageEntry,
    StagePlan,
    StageReport,
    SurrogateReport,
    UpdateReport,
    World,
)
from baton.core import advantages as adv
from baton.core import batching, certificate, trust_region
from baton.core.keyed import PROBE
from baton.errors import MissingError, NonFiniteError
from baton.team import update_order
from baton.types import (
    Accepted,
    AgentId,
    Episode,
    GateRecord,
    Rejected,
    Slot,
    Snapshot,
    StepReport,
    TokenDivergence,
    Verdict,
    Weights,
    verdict_word,
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
    retries: list[Retry] = field(default_factory=lambda: list[Retry]())
    states: ProbeStates | None = None
    replay: ReplayGap | None = None
    published_gap: float | None = None
    fingerprint: str = ""
    promoted: tuple[Snapshot, Weights] | None = None
    compared: tuple[PairsReport, Sequence[Pair]] | None = None
    restated: tuple[SurrogateReport, Sequence[Episode]] | None = None
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
    """Steps 5 to 15 for one agent: step, look, try again, shrink, publish with proof, compare. Fills `draft`; returns the
    state with the replay sums. The learner is left at the accepted candidate, or wherever it failed (the caller restores
    `origin`)."""
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
    if world.certificate.update_pairs:  # 15
        began = world.clock()
        now = position.team.versions
        draft.compared = await pairs.compare(
            world,
            stage=stage,
            who=trainee.agent,
            versions=now,
            other={**now, trainee.agent: version},
            slots={trainee.agent: "candidate"},
            count=world.certificate.update_pairs,
            claim=pairs.update_claim(world.certificate, n_agents=len(world.trainees), stage=stage),
        )
        draft.seconds["pairs"] = world.clock() - began
        if draft.compared[0].harm.verdict == "positive":
            draft.verdict = Rejected(reason="harm", gate=record, detail=harm_detail(draft.compared[0]))
            return state
    if world.certificate.surrogate:
        began = world.clock()
        draft.restated = await surrogate.evaluate(
            world, position.team, trainee.agent, data.probe, version=version, baseline=mean_return(collected), stage=stage
        )
        draft.seconds["surrogate"] = world.clock() - began
    draft.fingerprint = weights.fingerprint
    draft.promoted = (learner.snapshot(lend=True), weights)
    draft.verdict = Accepted(scale=record.scale, gate=record)
    return state


def harm_detail(found: PairsReport) -> str:
    """Why a candidate is refused."""
    return f"worse by at least {found.harm.lower_bound:.4g} on {found.n} pairs (confidence {found.harm.confidence:.4g})"


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
        pairs=None if draft.compared is None else draft.compared[0],
        surrogate=None if draft.restated is None else draft.restated[0],
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
        from_version=before,
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
    evidence = Evidence(
        episodes=collected.all,
        probe=data.probe,
        states=draft.states,
        looks=draft.looks,
        pairs=() if draft.compared is None else draft.compared[1],
        ordering=ordering,
        restated=() if draft.restated is None else draft.restated[1],
    )
    world.journal.commit(report, evidence, position, draft.promoted)  # 16
    if is_accepted:
        await world.sampler.swap(agent)
    if is_whole:
        await close_stage(world, position, stage, entries)
    return position, report


# ---- stages ----------------------------------------------------------------------------------------------------


async def close_stage(world: World, position: Position, stage: int, entries: tuple[StageEntry, ...]) -> None:
    """Step 20: what a complete stage shows, and its line."""
    start = {e.agent: e.from_version for e in entries if e.word != "rejected"}
    found: PairsReport | None = None
    played: Sequence[Pair] = ()
    if world.certificate.stage_pairs and start:
        world.journal.rest()
        for agent, version in start.items():
            await world.sampler.publish(agent, "start", world.journal.weights(agent, version), version)
        now = position.team.versions
        found, played = await pairs.compare(
            world,
            stage=stage,
            who="stage",
            versions=now,
            other={**now, **start},
            slots=dict.fromkeys(start, "start"),
            count=world.certificate.stage_pairs,
            claim=pairs.stage_claim(world.certificate, stage=stage),
        )
    world.journal.stage(stage_report(stage, entries, found), played)


def stage_report(stage: int, entries: tuple[StageEntry, ...], found: PairsReport | None) -> StageReport:
    """The report of a complete stage, with the published certificate twice (3.1)."""
    n = [e.episodes for e in entries]

    def published(deltas: Sequence[float]) -> certificate.Certificate | None:
        return certificate.published(deltas, n) if all(map(math.isfinite, deltas)) else None

    return StageReport(
        stage=stage,
        entries=entries,
        achieved=published([e.q_gate for e in entries]),
        configured=published([e.radius for e in entries]),
        pairs=found,
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
    world.journal.rest()
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
