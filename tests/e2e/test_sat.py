"""Stage mode end to end on tables: it learns, it can say no, and a no leaves nothing behind (ALGORITHMS 2.2-2.6, 2.14)."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds

from baton import assemble, cli, run, starting
from baton.algorithms import sat
from baton.algorithms.acceptance import check_floor
from baton.algorithms.episodes import Shared, collect, collect_probe, draw_prompts, episode_advantages
from baton.algorithms.options import PRESETS
from baton.algorithms.state import UpdateReport
from baton.core.advantages import group
from baton.core.batching import parts, token_batch, with_advantages
from baton.core.keyed import SAMPLE, key
from baton.core.losses import TIGHT, Dis, Objective
from baton.core.trust_region import next_lr, next_penalty
from baton.engines.engine import Completion, Request, ScoreRequest
from baton.envs.pool import GraderPool
from baton.errors import BatonError, ConfigError, NonFiniteError, ReplayGapError, StaleAdvantagesError, TaskFault
from baton.rollout import Play, Table
from baton.team import update_order
from baton.types import (
    Accepted,
    AdvantageBatch,
    Episode,
    Failed,
    Message,
    PublishProof,
    Rejected,
    Scored,
    StepReport,
    Task,
    TokenDivergence,
    Trajectory,
    Weights,
)


def reasons(reports: Sequence[UpdateReport]) -> list[str]:
    return [r.verdict.reason if isinstance(r.verdict, Rejected) else "accepted" for r in reports]


# ---- it learns -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["sat", "joint"])
def test_a_team_learns_parity_from_a_coin_to_more_than_nine_in_ten(schedule: str) -> None:
    stage = worlds.world(worlds.parity("algorithm.stages=30", f"algorithm.name={schedule}"))
    assert stage.accuracy() == 0.5
    stage.train()
    assert stage.accuracy() > 0.9


def test_agents_that_train_alone_are_a_team_of_good_voters_afterwards() -> None:
    tasks, grade = worlds.lookup()
    settings = worlds.parity("protocol={name='vote'}", "algorithm.name=independent", "algorithm.stages=8", agents="abc")
    stage = worlds.world(settings, tasks=tasks, grade=grade)
    assert stage.accuracy() == 0.5
    stage.train()
    assert stage.accuracy() > 0.9


def test_one_agent_is_a_team_of_one_and_learns() -> None:
    stage = worlds.world(worlds.parity("algorithm.stages=10", agents="a"))
    stage.train()
    assert stage.accuracy() > 0.9


def test_a_lone_agent_trains_bit_for_bit_the_same_under_sat_and_independent() -> None:
    """G09: the n = 1 case is no special code; the schedules differ in nothing that a lone agent could notice."""
    ends = []
    for schedule in ("sat", "independent"):
        stage = worlds.world(worlds.parity("algorithm.stages=5", f"algorithm.name={schedule}", agents="a"))
        stage.train()
        ends.append(stage.learner("a").snapshot())
    assert worlds.same(*ends) and ends[0].steps > 0


def test_a_team_of_one_is_trained_bit_for_bit_as_the_model_alone() -> None:
    """No team, no protocol, no stage: requests, advantages and steps by hand, for a region that nothing leaves."""
    settings = worlds.parity(
        "algorithm.stages=4", "agents.a.radius={token=50.0, message_mean=50.0}", "algorithm.penalty.start=0.0", agents="a"
    )
    stage = worlds.world(settings)
    stage.train()
    alone = worlds.world(settings)
    learner, sampler, codec = alone.learner("a"), alone.world.sampler, alone.plan.seats[0].codec
    assert codec is not None

    async def sample(requests: Sequence[Request]) -> list[Completion]:
        return [completion async for completion in sampler.submit(requests)]

    cursor = 0
    for k in range(1, 5):
        tasks, cursor = draw_prompts(alone.world.train, cursor, 8, at=(1, "prompts", "a"))
        asked = [
            Request(
                id=f"{task.id}/{sibling}",
                agent="a",
                slot="promoted",
                prompt_ids=codec.encode([Message(role="user", content=task.view(0))]),
                max_new_tokens=1,
                temperature=1.0,
                key=key(1, k, "a", SAMPLE, task.id, sibling, 0, "a"),
            )
            for task in tasks
            for sibling in range(4)
        ]
        said = asyncio.run(sample(asked))
        groups = [task.id for task in tasks for _ in range(4)]
        answers = {t.id: t.answer for t in tasks}
        rewards = [float(codec.decode(c.ids) == answers[g]) for c, g in zip(said, groups, strict=True)]
        values = group(torch.tensor(rewards, dtype=torch.float64), groups).values.tolist()
        rows = [
            Trajectory(
                episode_id=request.id,
                group=g,
                agent="a",
                segment=0,
                ids=request.prompt_ids + c.ids,
                mask=(False,) * len(request.prompt_ids) + (True,),
                behavior_logprobs=(0.0,) * len(request.prompt_ids) + c.logprobs,
                versions=(-1,) * len(request.prompt_ids) + (k - 1,),
            )
            for request, c, g in zip(asked, said, groups, strict=True)
        ]
        batch = token_batch(rows, temperature=1.0)
        whole = with_advantages(batch, dict(zip([r.id for r in asked], values, strict=True)), team={"a": k - 1})
        for part in parts(whole, 2):
            learner.step(part, Objective(weight=Dis(band=TIGHT), penalty=0.0), lr=0.2, anchor=None)
        asyncio.run(sampler.publish("a", "promoted", learner.weights(), k))
    assert all(isinstance(r.verdict, Accepted) and r.verdict.scale == 1.0 for r in stage.journal.reports)
    assert learner.snapshot().steps == 8 and worlds.same(learner.snapshot(), stage.learner("a").snapshot())


def test_with_training_off_the_same_run_scores_lower() -> None:
    on, off = (worlds.world(worlds.parity("algorithm.stages=20", lr=lr)) for lr in (0.2, 1e-9))
    on.train(), off.train()
    assert off.accuracy() == pytest.approx(0.5, abs=1e-6)
    assert on.accuracy() > off.accuracy() + 0.3


@pytest.mark.parametrize(
    "objective",
    [*(f"preset='{name}'" for name in PRESETS if name != "grpo_dis"), "baseline='loo'", "baseline='batch_mean'"],
)
def test_every_objective_learns(objective: str) -> None:
    settings = worlds.parity(f"algorithm.objective={{{objective}}}", "algorithm.stages=10", agents="a")
    stage = worlds.world(settings)
    stage.train()
    assert stage.accuracy() > 0.85


def test_single_episodes_learn_against_the_batch_mean() -> None:
    """No siblings: every episode is a prompt of its own, and the batch is the baseline."""
    stage = worlds.world(
        worlds.parity("algorithm.objective.baseline=batch_mean", "algorithm.group=1", "algorithm.stages=10", agents="a")
    )
    stage.train()
    assert stage.accuracy() > 0.85


# ---- a rejection leaves nothing behind -------------------------------------------------------------------------


class Careless(worlds.Wrapped):
    """A learner that breaks where a test says."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.breaks = ""

    def step(self, batch: AdvantageBatch, objective: Any, *, lr: float, anchor: Any) -> StepReport:
        if self.breaks == "advantage":
            bad = torch.where(batch.batch.mask, torch.nan, 0.0)
            return self.inner.step(dataclasses.replace(batch, advantages=bad), objective, lr=lr, anchor=anchor)
        if self.breaks == "weight":
            lr = math.inf
        return self.inner.step(batch, objective, lr=lr, anchor=anchor)

    def divergence(self, batch: Any, anchor: Any) -> TokenDivergence:
        found = self.inner.divergence(batch, anchor)
        if self.breaks == "divergence":
            return dataclasses.replace(found, kl_new_old=found.kl_new_old * math.nan)
        return found


class Leaky(worlds.Wrapped):
    """A sampler in which a candidate does not land, in one of three ways."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.breaks = ""
        self.before: dict[str, Weights] = {}

    async def publish(self, agent: str, slot: Any, weights: Weights, version: int) -> PublishProof:
        if self.breaks == "" or slot != "candidate":
            self.before[agent] = weights
            return await self.inner.publish(agent, slot, weights, version)
        if self.breaks == "corrupted tensor":
            name = next(iter(weights.tensors))
            bad = {**weights.tensors, name: weights.tensors[name] + 1.0}
            return await self.inner.publish(agent, slot, dataclasses.replace(weights, tensors=bad), version)
        proof = await self.inner.publish(agent, slot, self.before[agent], version)
        if self.breaks == "stale cache":  # the fingerprint of what was sent, the laws of what was there before
            return dataclasses.replace(proof, fingerprint=weights.fingerprint)
        return proof


def rejected_update(kind: str) -> tuple[worlds.Stage, Any]:
    """A team after one accepted stage, whose next update of 'a' will be rejected for the reason `kind`."""
    learner: list[Careless] = []
    sampler: list[Leaky] = []
    flat: list[bool] = []

    def wrap_learner(name: str, inner: Any) -> Any:
        learner.append(Careless(inner))
        return learner[-1]

    def wrap_sampler(inner: Any) -> Any:
        sampler.append(Leaky(inner))
        return sampler[-1]

    overrides = ["algorithm.stages=4", "algorithm.order=static"]
    if kind == "radius":
        overrides.append("algorithm.line_search.halvings=0")
    stage = worlds.world(worlds.parity(*overrides), wrap_learner=wrap_learner, wrap_sampler=wrap_sampler)
    inner = stage.world.table.grade

    def grade(answers: Any) -> Any:
        return [Scored(reward=0.0) for _ in answers] if flat else inner(answers)

    trainees = {n: replace(t, lr=0.01) if kind == "radius" else t for n, t in stage.world.trainees.items()}
    stage.world = replace(stage.world, table=replace(stage.world.table, grade=grade), trainees=trainees)
    if kind == "radius":
        agents = {n: replace(s, lr=0.01) for n, s in stage.position.agents.items()}
        stage.position = replace(stage.position, agents=agents)
    assert all(isinstance(r.verdict, Accepted) for r in stage.train(2))
    reason, _, detail = kind.partition(": ")
    if reason == "non_finite":
        learner[0].breaks = detail
    if reason == "not_published":
        sampler[0].breaks = detail
    if reason == "no_signal":
        flat.append(True)
    if reason == "radius":
        state = replace(stage.position.agents["a"], lr=1000.0)
        stage.world = replace(stage.world, trainees={n: replace(t, lr=1000.0) for n, t in trainees.items()})
        stage.position = replace(stage.position, agents={**stage.position.agents, "a": state})
    return stage, sampler[0]


KINDS = [
    "radius",
    "no_signal",
    *(f"non_finite: {what}" for what in ("advantage", "weight", "divergence")),
    *(f"not_published: {what}" for what in ("corrupted tensor", "skipped publish", "stale cache")),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rejected_agent_is_left_exactly_as_it_was(kind: str) -> None:
    """T5, T11, T26: masters, moments, steps and cursor bit for bit; the promoted slot serves what it served."""
    stage, sampler = rejected_update(kind)
    before, position = stage.learner("a").snapshot(), stage.position
    asked = [
        ScoreRequest(agent="a", slot="promoted", prompt_ids=p.turns[0].prompt_ids, ids=(0,), temperature=1.0)
        for p in stage.play(4)
    ]
    served = asyncio.run(sampler.score(asked))
    (report,) = stage.train(1)
    assert isinstance(report.verdict, Rejected) and report.verdict.reason == kind.partition(":")[0]
    assert before.steps > 0 and before.moments and worlds.same(before, stage.learner("a").snapshot())
    assert stage.position.team == position.team and report.to_version is None
    assert stage.position.agents["a"].cursor == position.agents["a"].cursor > 0
    assert stage.position.agents["a"].streak == position.agents["a"].streak + 1
    assert stage.journal.promoted[-1] is None
    assert asyncio.run(sampler.score(asked)) == served


def test_the_run_goes_on_after_a_rejection_as_if_it_had_not_been() -> None:
    """Nothing else is stateful: the teammate's update after the rejection is the one that it would have been anyway."""
    ends = []
    for kind in ("not_published: stale cache", "non_finite: weight"):
        stage, sampler = rejected_update(kind)
        stage.train(1)
        stage.learner("a").breaks = sampler.breaks = ""
        stage.train(1)
        assert stage.position.team.member("b").version == 2
        ends.append(stage.learner("b").snapshot())
    assert worlds.same(*ends)


def test_no_signal_draws_three_times_the_prompts_and_takes_no_step() -> None:
    stage, _ = rejected_update("no_signal")
    (report,) = stage.train(1)
    assert report.episodes.n == 3 * 32 and report.episodes.prompts == 3 * 8
    assert report.steps == () and report.looks == () and report.episodes.degenerate_groups == 24


def test_a_failed_gate_never_promotes() -> None:
    stage, _ = rejected_update("radius")
    (report,) = stage.train(1)
    assert not report.looks[-1].passed and len(report.looks) == 1
    with pytest.raises(BatonError, match="never promoted"):
        stage.position.team.promote("a", report.verdict, 9)
    with pytest.raises(BatonError, match="gate that passed"):
        Accepted(scale=1.0, gate=report.looks[-1])


def test_the_line_search_takes_the_first_scale_that_fits() -> None:
    stage = worlds.world(worlds.parity("algorithm.stages=3", lr=2.0))
    reports = stage.train()
    shrunk = [r for r in reports if isinstance(r.verdict, Accepted) and r.verdict.scale < 1.0]
    assert shrunk
    for report in shrunk:
        assert [look.scale for look in report.looks] == [0.5**k for k in range(len(report.looks))]
        assert [look.passed for look in report.looks] == [False] * (len(report.looks) - 1) + [True]


def test_a_shrunk_update_keeps_the_moments_and_steps_of_before() -> None:
    stage = worlds.world(worlds.parity("algorithm.stages=6", lr=1.0))
    found = 0
    for _ in range(12):
        before = {n: stage.learner(n).snapshot() for n in "ab"}
        (report,) = stage.train(1)
        now = stage.learner(report.agent).snapshot()
        if isinstance(report.verdict, Accepted) and report.verdict.scale < 1.0:
            found += 1
            old = before[report.agent]
            assert now.steps == old.steps
            assert all(torch.equal(now.moments[k], v) for k, v in old.moments.items())
            assert any(not torch.equal(now.weights[k], v) for k, v in old.weights.items()) or not old.weights
    assert found > 1


def test_the_gate_judges_what_is_served_at_the_sampling_temperature() -> None:
    """T22, G52 in the loop: every divergence of every look is recomputed by hand from the two served tables."""
    settings = worlds.parity("agents.a.temperature=0.5", "agents.b.temperature=0.5", "algorithm.stages=6", lr=0.4)
    stage = worlds.world(settings)
    compared = 0
    for _ in range(12):
        before = {n: stage.learner(n).weights() for n in "ab"}
        (report,) = stage.train(1)
        if isinstance(report.verdict, Rejected):
            continue
        after = stage.learner(report.agent).weights()
        evidence = stage.journal.evidence[-1]
        assert evidence.states is not None
        record, found = evidence.looks[-1]
        assert record.scale == report.verdict.scale
        ids = evidence.states.batch.ids
        pairs = []
        for row, position in zip(found.row.tolist(), found.position.tolist(), strict=True):
            name = "row." + "".join(f"{i:04x}" for i in ids[row, :position].tolist())
            old, new = (law(w.tensors.get(name), temperature=0.5) for w in (before[report.agent], after))
            pairs.append(
                tuple(sum(p * math.log(p / q) for p, q in zip(x, y, strict=True)) for x, y in ((new, old), (old, new)))
            )
        assert found.kl_new_old.tolist() == pytest.approx([p[0] for p in pairs], abs=1e-9)
        assert found.kl_old_new.tolist() == pytest.approx([p[1] for p in pairs], abs=1e-9)
        worst = sorted(max(p) for p in pairs)
        assert record.q_point == pytest.approx(worst[math.ceil(0.99 * len(worst)) - 1], abs=1e-9)
        compared += any(p[0] > 1e-3 for p in pairs)
    assert compared > 3


def law(logits: Any, *, temperature: float) -> list[float]:
    weights = [math.exp(float(x) / temperature) for x in ((0.0, 0.0) if logits is None else logits)]
    return [w / sum(weights) for w in weights]


# ---- what adapts -----------------------------------------------------------------------------------------------


def test_beta_moves_both_ways_in_the_loop() -> None:
    """G27 in the loop: doubled where the whole step failed, halved where it passed below half the radius, else kept."""
    stage = worlds.world(worlds.parity("algorithm.stages=12"))
    reports = stage.train()
    moves = set()
    for report in reports:
        full = report.looks[0]
        expected = next_penalty(
            report.beta,
            full_step_failed=not full.passed,
            relaxed=full.passed and full.q_gate < full.radius_token / 2,
        )
        assert report.after.beta == expected
        moves.add(math.copysign(1.0, expected - report.beta) if expected != report.beta else 0.0)
    assert {1.0, -1.0} <= moves
    for agent in "ab":
        own = [r for r in reports if r.agent == agent]
        assert all(b.beta == a.after.beta and b.lr == a.after.lr for a, b in pairwise(own))


def test_the_learning_rate_halves_on_a_radius_rejection_and_returns() -> None:
    stage = worlds.world(worlds.parity("algorithm.stages=14", "algorithm.line_search.halvings=0", lr=1.0))
    reports = stage.train()
    rates = {a: [r.lr for r in reports if r.agent == a] for a in "ab"}
    for report in reports:
        reason = report.verdict.reason if isinstance(report.verdict, Rejected) else None
        assert report.after.lr == next_lr(report.lr, configured=1.0, accepted=reason is None, reason=reason)
    pairs = [(x, y) for r in rates.values() for x, y in pairwise(r)]
    assert any(y == x / 2 for x, y in pairs) and any(y == 2 * x for x, y in pairs)
    assert max(max(r) for r in rates.values()) == 1.0


def test_a_penalty_of_zero_stays_zero() -> None:
    stage = worlds.world(worlds.parity("algorithm.penalty.start=0", "algorithm.stages=2", lr=2.0))
    assert {r.after.beta for r in stage.train()} == {0.0}


# ---- whose advantages ------------------------------------------------------------------------------------------


def with_versions(episodes: Sequence[Episode], **versions: int) -> list[Episode]:
    return [replace(e, versions={**e.versions, **versions}) for e in episodes]


@pytest.mark.parametrize("baseline", ["group", "loo", "batch_mean"])
def test_siblings_of_different_team_versions_are_refused(baseline: str) -> None:
    """T24."""
    stage = worlds.world(worlds.parity(f"algorithm.objective.baseline={baseline}"))
    episodes = stage.play()
    episode_advantages(stage.world.options, episodes)
    mixed = [*episodes[:-1], *with_versions(episodes[-1:], b=1)]
    with pytest.raises(StaleAdvantagesError, match="b"):
        episode_advantages(stage.world.options, mixed)


def test_episodes_of_another_team_never_reach_a_step() -> None:
    stage = worlds.world(worlds.parity("algorithm.order=static"))

    async def old_batch() -> Shared:
        collected = await collect(stage.world, stage.position.team, 0, stage=1, who="a", prompts=8, slots={})
        probe = await collect_probe(stage.world, stage.position.team, stage=1, who="b", until="b", slots={})
        return Shared(collected=collected, probe=probe)

    shared = asyncio.run(old_batch())
    stage.train(1)  # 'a' is promoted: the batch was played by the team before it
    before = stage.learner("b").snapshot()
    with pytest.raises(StaleAdvantagesError, match=r"a@0.*a@1.*collect again"):
        asyncio.run(sat.update(stage.world, stage.position, "b", stage=1, slots={}, shared=shared))
    assert worlds.same(before, stage.learner("b").snapshot())


def test_the_names_of_agents_do_not_change_advantages() -> None:
    """G02: a baseline's key is the prompt."""
    stage = worlds.world(worlds.parity())
    episodes = stage.play()
    renamed = [
        replace(
            e,
            versions={"x": e.versions["b"], "y": e.versions["a"]},
            turns=tuple(replace(t, agent={"a": "y", "b": "x"}[t.agent]) for t in e.turns),
        )
        for e in episodes
    ]
    options = stage.world.options
    one, other = (episode_advantages(options, e) for e in (episodes, renamed))
    assert torch.equal(one.values, other.values) and one.degenerate_groups == other.degenerate_groups
    assert bool((one.values != 0).any())


class Watched(worlds.Wrapped):
    """A learner that shows the batches it steps on."""

    def __init__(self, inner: Any, seen: list[AdvantageBatch]) -> None:
        super().__init__(inner)
        self.seen = seen

    def step(self, batch: AdvantageBatch, objective: Any, *, lr: float, anchor: Any) -> StepReport:
        self.seen.append(batch)
        return self.inner.step(batch, objective, lr=lr, anchor=anchor)


@pytest.mark.parametrize("protocol", ["{name='chain',rounds=2}", "{name='chain',rotate=true,rounds=2}", "{name='vote'}"])
def test_a_step_sees_its_own_agents_tokens_and_no_others(protocol: str) -> None:
    """R40, G07: also where the speaking order changes from episode to episode."""
    check_own_tokens(protocol)


def check_own_tokens(protocol: str = "{name='chain',rounds=2}") -> None:
    seen: dict[str, list[AdvantageBatch]] = {n: [] for n in "abc"}
    stage = worlds.world(
        worlds.parity(f"protocol={protocol}", "algorithm.order=static", "algorithm.inner_steps=1", agents="abc"),
        wrap_learner=lambda name, inner: Watched(inner, seen[name]),
    )
    stage.train(3)
    for report, evidence in zip(stage.journal.reports, stage.journal.evidence, strict=True):
        (batch,) = seen[report.agent]
        values = episode_advantages(stage.world.options, evidence.episodes)
        advantage = dict(zip((e.id for e in evidence.episodes), values.values.tolist(), strict=True))
        tokens = 0
        for episode in evidence.episodes:
            rows = [b for b, name in enumerate(batch.batch.episode_ids) if name == episode.id]
            own = [t for t in episode.turns if t.agent == report.agent]
            said = [batch.batch.ids[b, t].item() for b in rows for t in batch.batch.mask[b].nonzero()[:, 0].tolist()]
            assert said == [i for t in own for i in t.ids]
            scored = torch.cat([batch.batch.behavior_logprobs[b][batch.batch.mask[b]] for b in rows])
            assert scored.tolist() == pytest.approx([p for t in own for p in t.logprobs], abs=1e-6)
            versions = {int(v) for b in rows for v in batch.batch.versions[b][batch.batch.mask[b]]}
            assert versions == {report.from_version}
            given = [float(a) for b in rows for a in batch.advantages[b][batch.batch.mask[b]]]
            assert given == pytest.approx([advantage[episode.id]] * len(given), abs=1e-6)
            assert all(not batch.advantages[b][~batch.batch.mask[b]].any() for b in rows)
            tokens += len(said)
        assert tokens == batch.batch.n_act > 0


# ---- sampler and learner must agree ----------------------------------------------------------------------------


class Warm(worlds.Wrapped):
    """A sampler that samples at another temperature than it was asked for."""

    factor = 1.0

    def submit(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        return self.inner.submit([replace(r, temperature=r.temperature * self.factor) for r in requests])


def test_a_sampler_at_another_temperature_is_found_out_before_anything_is_stepped() -> None:
    """G11: the replay test raises; it never becomes part of a ratio."""
    check_replay_at(0.8)


def check_replay_at(factor: float) -> None:
    sampler: list[Warm] = []

    def wrap(inner: Any) -> Warm:
        sampler.append(Warm(inner))
        return sampler[-1]

    stage = worlds.world(worlds.parity("algorithm.stages=12"), wrap_sampler=wrap)
    stage.train(14)  # the uniform law is the same at every temperature: first learn something
    before = {n: stage.learner(n).snapshot() for n in "ab"}
    sampler[0].factor = factor
    with pytest.raises(ReplayGapError, match="nats per token on the same weights"):
        stage.train(1)
    assert all(worlds.same(before[n], stage.learner(n).snapshot()) for n in "ab")


def test_a_radius_below_the_noise_floor_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting.local, "noise_floor", lambda learner, batch: (0.02, 70.0))
    with pytest.raises(ConfigError, match=r"agents\.first\.radius\.message_mean = 50 nats is below the noise floor 70"):
        run.train(worlds.relay(), run=tmp_path / "run")
    assert not run.Run(tmp_path / "run").records("start")


def test_a_noise_floor_that_is_no_number_is_an_error() -> None:
    trainee = worlds.world(worlds.parity()).world.trainees["a"]
    check_floor(trainee, (0.5, 0.06))
    with pytest.raises(NonFiniteError, match="noise floor"):
        check_floor(trainee, (math.nan, 0.0))


# ---- endings ---------------------------------------------------------------------------------------------------


def toml(settings: Any, folder: Path) -> Path:
    path = folder / "config.toml"
    path.write_text(settings.to_toml())
    return path


def test_three_stages_without_an_accepted_update_stall_with_exit_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """T27: it stops, names the commonest reason and its knob."""
    tight = "agents.{}.radius={{token=1e-9,message_mean=1e-9}}"
    settings = worlds.parity("algorithm.stages=9", tight.format("a"), tight.format("b"))
    assert cli.main(["train", str(toml(settings, tmp_path)), "--run", str(tmp_path / "run")]) == 3
    said = capsys.readouterr().out
    assert "stopped: three stages in a row rejected every update, mostly radius" in said and "agents.radius" in said
    ended = run.Run(tmp_path / "run")
    assert ended.ending == "stalled" and len(ended.updates) == 6
    assert {u["verdict"]["reason"] for u in ended.updates} == {"radius"}


def test_three_stages_with_nothing_left_to_learn_converge_with_exit_code_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """T27."""
    settings = worlds.parity("algorithm.stages=60", agents="a", lr=0.5)
    assert cli.main(["train", str(toml(settings, tmp_path)), "--run", str(tmp_path / "run")]) == 0
    ended = run.Run(tmp_path / "run")
    last = ended.updates[-3:]
    assert "converged" in capsys.readouterr().out and ended.ending == "converged" and len(ended.updates) < 60
    assert [u["verdict"]["reason"] for u in last] == ["no_signal"] * 3
    assert all(u["episodes"]["reward"] >= 0.95 for u in last)


def test_no_signal_at_low_reward_is_a_stall_and_not_convergence() -> None:
    stage = worlds.world(worlds.parity("algorithm.stages=9"), grade=lambda answers: [Scored(reward=0.0) for _ in answers])
    stage.train()
    assert len(stage.journal.reports) == 6 and sat.ending(stage.world, stage.position) == "stalled"


def test_one_accepted_update_in_three_stages_keeps_a_run_going() -> None:
    stage = worlds.world(worlds.parity("algorithm.stages=6", "algorithm.order=static"))
    stage.world = replace(
        stage.world, trainees={n: replace(t, radius_token=1e-9) if n == "a" else t for n, t in stage.world.trainees.items()}
    )
    stage.train()
    assert len(stage.journal.reports) == 12
    assert set(reasons([r for r in stage.journal.reports if r.agent == "a"])) == {"radius"}


# ---- orders and schedules --------------------------------------------------------------------------------------


def test_orders_are_keyed_and_differ_as_their_names_say() -> None:
    options = worlds.parity("algorithm.stages=12").algorithm
    agents = ("a", "b", "c")

    def stages(name: str, seed: int) -> list[tuple[str, ...]]:
        return [update_order(name, agents, seed=seed, stage=stage) for stage in range(1, options.stages + 1)]

    assert stages("static", 1) == [agents] * 12 and stages("reverse", 1) == [agents[::-1]] * 12
    drawn = stages("random", 1)
    assert drawn == stages("random", 1) != stages("random", 2)
    assert all(sorted(order) == list(agents) for order in drawn) and len(set(drawn)) > 2


def test_three_orders_give_certificates_of_one_form() -> None:
    """T6: the terms are the same, their values may differ, and the published bound stays void."""
    forms, values = [], []
    for order in ("static", "reverse", "random"):
        stage = worlds.world(worlds.parity("algorithm.stages=2", f"algorithm.order={order}", agents="abc"))
        stage.train()
        assert len(stage.journal.stages) == 2
        for report in stage.journal.stages:
            for name, certificate in (("achieved", report.achieved), ("configured", report.configured)):
                forms.append((name, [(t.name, t.basis) for t in certificate.terms], certificate.verdict))
                values.append([t.value for t in certificate.terms])
    assert {json.dumps(f) for f in forms} == {json.dumps(f) for f in forms[:2]}
    assert all("void" in str(f[2]) for f in forms) and len({json.dumps(v) for v in values}) > 2


def test_sat_collects_again_before_each_update_of_the_intermediate_team() -> None:
    stage = worlds.world(worlds.parity("algorithm.order=static", "algorithm.stages=1"))
    stage.train()
    first, second = (e.episodes for e in stage.journal.evidence)
    assert {tuple(e.versions.values()) for e in first} == {(0, 0)}
    assert {tuple(e.versions.values()) for e in second} == {(1, 0)}
    assert not {e.id for e in first} & {e.id for e in second}


def test_joint_updates_everyone_from_one_batch() -> None:
    stage = worlds.world(worlds.parity("algorithm.name=joint", "algorithm.stages=2"))
    stage.train()
    one, two, three, four = (e.episodes for e in stage.journal.evidence)
    assert one == two and three == four and len(one) == 2 * 32
    assert not {e.task_id for e in one} & {e.task_id for e in three}, "a stage's prompts are not the one's before"
    assert {tuple(e.versions.values()) for e in two} == {(0, 0)}
    assert [r.schedule for r in stage.journal.reports] == ["joint"] * 4


def test_independent_trains_each_agent_beside_teammates_of_the_start() -> None:
    stage = worlds.world(worlds.parity("algorithm.name=independent", "algorithm.stages=3"))
    stage.train()
    assert [r.agent for r in stage.journal.reports] == ["a"] * 3 + ["b"] * 3
    trained = stage.position.team.member("a").version
    assert trained > 0
    for evidence in stage.journal.evidence[3:]:
        for episode in evidence.episodes:
            mate = episode.turns[0]
            assert mate.agent == "a" and set(mate.versions) == {0} and episode.versions["a"] == 0
            assert mate.logprobs == (pytest.approx(math.log(0.5)),), "the start's law is uniform"


def test_prompts_are_drawn_without_repetition_until_all_were_used() -> None:
    tasks = [Task(id=str(i), env="x", prompt=str(i), answer="") for i in range(10)]
    drawn, cursor = [], 0
    for _ in range(5):
        some, cursor = draw_prompts(tasks, cursor, 4, at=(0, "p"))
        drawn += [t.id for t in some]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == sorted(t.id for t in tasks) and drawn[:10] != drawn[10:]


# ---- episodes that fail ----------------------------------------------------------------------------------------


def test_a_stage_in_which_every_episode_failed_raises_with_the_reason() -> None:
    stage = worlds.world(worlds.parity(), grade=lambda answers: [Failed(reason="grader: it broke") for _ in answers])
    with pytest.raises(TaskFault, match=r"all 32 episodes of stage 1 failed; 32 times: grader: it broke"):
        stage.train(1)


def test_failed_episodes_are_counted_and_never_trained_on() -> None:
    stage = worlds.world(worlds.parity())
    inner = stage.world.table.grade

    def grade(answers: Sequence[tuple[Task, str]]) -> list[Any]:
        return [Failed(reason="grader: odd") if n % 5 == 0 else o for n, o in enumerate(inner(answers))]

    stage.world = replace(stage.world, table=replace(stage.world.table, grade=grade))
    (report,) = stage.train(1)
    assert report.episodes.n == 32 and report.episodes.failed == {"grader: odd": 7}
    scored = [e for e in stage.journal.evidence[0].episodes if e.is_scored]
    assert len(scored) == 25
    assert report.episodes.reward == pytest.approx(sum(e.reward for e in scored) / 25)


REWARD = """
import time

def reward(prompt, answer, gold):
    if "hang" in prompt:
        time.sleep(600)
    if "raise" in prompt:
        raise ValueError("no such thing")
    return 1.0
"""


def test_a_reward_function_that_raises_or_hangs_costs_that_episode_only(tmp_path: Path) -> None:
    (tmp_path / "own_reward.py").write_text(REWARD)
    rows = [{"question": f"{n} {word}", "answer": "1"} for n, word in enumerate(["raise", "hang"] + ["fine"] * 78)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = worlds.tree("a")
    tree["env"] = {"name": "own_reward:reward", "data": "rows.jsonl"}
    tree["gate"]["probe_prompts"] = 4
    plan = assemble.prepare(worlds.config.parse(tree), root=tmp_path)
    sets = (plan.splits.train, plan.splits.probe, plan.splits.test, plan.splits.certify)
    tasks = {t.prompt.split()[1]: t for tasks in sets for t in tasks}
    stage = worlds.world(worlds.parity(agents="a"))
    with GraderPool(workers=1, process_limit_s=0.5) as pool:
        table = replace(stage.world.table, grade=assemble.grader(plan, pool))
        plays = [Play(task=tasks[word]) for word in ("fine", "raise", "hang")] + [Play(task=tasks["fine"], sibling=1)]
        episodes = asyncio.run(table.play(plays, address=(1, SAMPLE), versions={"a": 0}))
    fine, raised, hung, also_fine = (e.outcome for e in episodes)
    assert fine == also_fine == Scored(reward=1.0)
    assert isinstance(raised, Failed) and "ValueError: no such thing" in raised.reason
    assert isinstance(hung, Failed) and hung.reason.startswith("grader")


# ---- long runs -------------------------------------------------------------------------------------------------


class Counting(run.Silent):
    """Counts the episodes that are alive in this process after every tenth stage."""

    def __init__(self) -> None:
        self.alive: list[int] = []

    def stage(self, record: Any) -> None:
        if record["stage"] % 10 == 0:
            gc.collect()
            self.alive.append(sum(type(o) is Episode for o in gc.get_objects()))


def test_nothing_piles_up_over_a_hundred_stages(tmp_path: Path) -> None:
    """F05: finished episodes are let go of."""
    settings = worlds.parity(
        "algorithm.stages=100", "algorithm.episodes=8", "algorithm.group=2", "algorithm.min_informative=1",
        "gate.probe_prompts=4", "env.prompts=100", agents="a", lr=1e-4,
    )  # fmt: skip
    counting = Counting()
    run.train(settings, run=tmp_path / "run", reporter=counting)
    assert len(counting.alive) == 10
    assert 0 < max(counting.alive[5:]) <= max(counting.alive[:3])


def test_a_table_refuses_two_episodes_under_one_id() -> None:
    stage = worlds.world(worlds.parity())
    table: Table = stage.world.table
    task = stage.world.train[0]
    with pytest.raises(BatonError, match="share an id"):
        asyncio.run(table.play([Play(task=task), Play(task=task)], address=("x",), versions={}))
