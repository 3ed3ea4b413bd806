"""Options of a stage: reused episodes, retries, measured and learned orders, radii by gain (ALGORITHMS 2.3-2.6, 2.14)."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds

from baton import config, records, run
from baton.algorithms import sat
from baton.algorithms.episodes import agent_batch, episode_advantages
from baton.core import trust_region
from baton.engines.engine import ScoreRequest
from baton.errors import ConfigError, MissingError
from baton.team import update_order
from baton.types import Accepted, AdvantageBatch, Rejected, StepReport

REUSE = ("algorithm.data=reuse", "algorithm.order=static")


class Spy(worlds.Wrapped):
    """A learner that keeps what it was stepped on."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.calls: list[tuple[AdvantageBatch, float, float]] = []

    def step(self, batch: AdvantageBatch, objective: Any, *, lr: float, anchor: Any) -> StepReport:
        self.calls.append((batch, objective.penalty, lr))
        return self.inner.step(batch, objective, lr=lr, anchor=anchor)


# ---- reuse -----------------------------------------------------------------------------------------------------


def test_a_team_learns_from_one_batch_a_stage() -> None:
    stage = worlds.world(worlds.parity(*REUSE, "algorithm.stages=30"))
    stage.train()
    assert stage.accuracy() > 0.9


def test_a_stage_plays_once_and_its_second_agent_reweights_for_the_first() -> None:
    stage = worlds.world(worlds.parity(*REUSE, "algorithm.stages=1"), wrap_learner=lambda _, inner: Spy(inner))
    first, second = stage.train()
    one, two = (e.episodes for e in stage.journal.evidence)
    assert [e.id for e in one] == [e.id for e in two] and len(one) == 2 * 32
    assert first.to_version == 1 and first.reuse is not None and second.reuse is not None
    assert (first.reuse.changed, first.reuse.effective_share, first.reuse.mean_weight) == ((), 1.0, 1.0)
    assert second.reuse.changed == ("a",) and 0.5 < second.reuse.effective_share < 1.0
    assert not second.reuse.is_resampled and 0.5 < second.reuse.mean_weight < 1.0

    # The weights by hand: teammate's probability now over that recorded, cut at 1, on every advantage that was stepped on.
    requests = [
        ScoreRequest(agent="a", slot="promoted", prompt_ids=t.prompt_ids, ids=t.ids, temperature=1.0)
        for e in two
        for t in e.turns
        if t.agent == "a"
    ]
    now = asyncio.run(stage.world.sampler.score(requests))
    ratio = {e.id: math.exp(sum(s) - sum(e.turns[0].logprobs)) for e, s in zip(two, now, strict=True)}
    values = episode_advantages(stage.world.options, two).values.tolist()
    wanted = {e.id: v * min(1.0, ratio[e.id]) for e, v in zip(two, values, strict=True)}
    seen = 0
    for batch, _, _ in stage.learner("b").calls:  # type: ignore[attr-defined]
        for row, name in enumerate(batch.batch.episode_ids):
            own = batch.advantages[row][batch.batch.mask[row]]
            assert torch.allclose(own, torch.full_like(own, wanted[name]), atol=1e-6)
            seen += 1
    assert seen == len(two)
    weights = list(ratio.values())
    assert second.reuse.effective_share == pytest.approx(
        sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights)), abs=1e-9
    )


def test_a_batch_that_says_too_little_is_given_up_for_a_fresh_one() -> None:
    stage = worlds.world(worlds.parity(*REUSE, "algorithm.reuse.ess_floor=1.0", "algorithm.stages=1"))
    first, second = stage.train()
    assert second.reuse is not None and second.reuse.is_resampled and second.reuse.effective_share < 1.0
    one, two = (e.episodes for e in stage.journal.evidence)
    assert {tuple(e.versions.values()) for e in two} == {(1, 0)} and not {e.id for e in one} & {e.id for e in two}
    assert first.reuse is not None and not first.reuse.is_resampled


def test_reused_episodes_without_weights_train_as_they_were_played_whatever_has_changed() -> None:
    settings = worlds.parity(*REUSE, "algorithm.reuse.weights=none", "agents.a.lr=2", "algorithm.stages=1")
    plain = worlds.world(settings, wrap_learner=lambda _, inner: Spy(inner))
    _, second = plain.train()
    assert second.reuse is not None and second.reuse.changed == ("a",) and second.reuse.effective_share < 1.0
    assert (second.reuse.mean_weight, second.reuse.is_resampled) == (1.0, False)
    episodes = [e for e in plain.journal.evidence[1].episodes if e.is_scored]
    values = dict(
        zip((e.id for e in episodes), episode_advantages(plain.world.options, episodes).values.tolist(), strict=True)
    )
    for batch, _, _ in plain.learner("b").calls:  # type: ignore[attr-defined]
        for row, name in enumerate(batch.batch.episode_ids):
            own = batch.advantages[row][batch.batch.mask[row]]
            assert torch.allclose(own, torch.full_like(own, values[name]), atol=1e-6)


@pytest.mark.parametrize(("point", "nth"), [("after the record", 3), ("after the stage line", 1)])
def test_a_killed_run_that_reuses_ends_as_if_it_had_not_been(tmp_path: Path, point: str, nth: int) -> None:
    settings = worlds.parity(*REUSE, "algorithm.stages=2")
    run.train(settings, run=tmp_path / "whole")
    worlds.kill(settings, tmp_path / "killed", point, nth)
    worlds.go_on(settings, tmp_path / "killed")
    assert worlds.final(tmp_path / "killed") == worlds.final(tmp_path / "whole")
    worlds.check_ledger(tmp_path / "killed")


# ---- retries ---------------------------------------------------------------------------------------------------


def stepping(*overrides: str, tries: int = 3, radius: float | None = None, lr: float = 2.0) -> worlds.Stage:
    settings = worlds.parity(f"algorithm.backtrack.tries={tries}", "algorithm.order=static", *overrides, lr=lr)
    stage = worlds.world(settings, wrap_learner=lambda _, inner: Spy(inner))
    if radius is not None:
        narrow = {n: replace(t, radius_token=radius) for n, t in stage.world.trainees.items()}
        stage.world = replace(stage.world, trainees=narrow)
    return stage


def test_a_retry_trains_again_from_the_start_with_more_penalty_and_a_smaller_rate() -> None:
    stage = stepping(radius=0.3)
    (report,) = stage.train(1)
    assert isinstance(report.verdict, Accepted) and report.verdict.gate.attempt == len(report.retries) > 0
    assert [(r.beta, r.lr) for r in report.retries] == [(0.5, 1.0), (5.0, 0.5)][: len(report.retries)]
    calls = stage.learner("a").calls  # type: ignore[attr-defined]
    assert [(p, lr) for _, p, lr in calls] == [(0.001, 2.0)] * 2 + [(r.beta, r.lr) for r in report.retries for _ in range(2)]
    retry = report.retries[-1]
    assert 0.0 < retry.shrink_total < 1.0 and report.verdict.scale == retry.shrink_total
    assert retry.shrink_total == pytest.approx(retry.shrink_lr * retry.shrink_beta)
    promoted = stage.journal.promoted[-1]
    assert promoted is not None and worlds.same(promoted[0], stage.learner("a").snapshot())
    assert [look.passed for look in report.looks] == [False] * len(report.retries) + [True]


def test_the_penalty_changes_what_a_retry_reaches() -> None:
    """T5: with the same rates, a larger penalty ends elsewhere."""
    reached = []
    for beta in (0.001, 1.0):
        stage = stepping(f"algorithm.penalty.start={beta}", radius=1e-9)
        (report,) = stage.train(1)
        reached.append([r.shrink_total for r in report.retries])
        assert report.retries[0].beta == (0.5 if beta == 0.001 else 10.0)
    assert reached[0][0] != reached[1][0]


def test_retries_that_fail_leave_the_line_search_of_the_first_displacement_and_then_an_exact_restore() -> None:
    stage = stepping(radius=1e-9)
    before = stage.learner("a").snapshot()
    (report,) = stage.train(1)
    assert isinstance(report.verdict, Rejected) and report.verdict.reason == "radius"
    assert [(look.attempt, look.scale) for look in report.looks if look.attempt == 0] == [
        (0, 1.0), (0, 0.5), (0, 0.25), (0, 0.125), (0, 0.0625)
    ]  # fmt: skip
    assert len(report.looks) == 7 and worlds.same(before, stage.learner("a").snapshot())


def test_the_gates_confidence_counts_every_look_that_a_config_allows() -> None:
    one, three = (stepping(tries=t).train(1)[0].looks[0].certifiable_level for t in (1, 3))
    assert one == pytest.approx((0.05 / 5) ** (1 / 16)) and three == pytest.approx((0.05 / 7) ** (1 / 16))


def test_a_retry_with_one_inner_step_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tries = 3 needs inner_steps >= 2"):
        worlds.parity("algorithm.backtrack.tries=3", "algorithm.inner_steps=1")


# ---- orders and radii ------------------------------------------------------------------------------------------


def test_greedy_goes_by_the_predicted_gain_of_each_agent() -> None:
    stage = worlds.world(worlds.parity("algorithm.order=greedy", "algorithm.stages=2", "algorithm.group=8"))
    stage.train()
    plan = stage.position.stage
    assert plan is not None and plan.gains[plan.order[0]] >= plan.gains[plan.order[1]]
    ordering = [e.ordering for e in stage.journal.evidence]
    assert [len(o) for o in ordering] == [64, 0, 64, 0]
    assert {tuple(e.versions.values()) for e in ordering[0]} == {(0, 0)}


@pytest.mark.parametrize("order", ["greedy", "grad_norm"])
def test_the_predicted_gain_is_that_of_the_formula(order: str) -> None:
    stage = worlds.world(worlds.parity(f"algorithm.order={order}"))
    stage.train(2)
    plan, episodes = asyncio.run(sat.plan_stage(stage.world, stage.position, 2))
    scored = [e for e in episodes if e.is_scored]
    values = episode_advantages(stage.world.options, scored)
    for agent in ("a", "b"):
        batch = agent_batch(scored, values, agent, temperature=1.0, team=stage.position.team)
        gradient, fisher = stage.learner(agent).score_gradients(batch)
        delta = stage.world.trainees[agent].radius_token
        by_hand = math.sqrt(2.0 * delta * float((gradient**2 / (fisher + 1e-8)).sum()))
        assert plan.gains[agent] == pytest.approx(by_hand if order == "greedy" else float(gradient.norm()), rel=1e-6)
    assert plan.order == tuple(sorted("ab", key=lambda a: -plan.gains[a]))


def test_a_missing_gain_is_an_error_and_equal_gains_go_by_index() -> None:
    with pytest.raises(MissingError, match="'b'"):
        update_order("greedy", "ab", seed=0, stage=1, gains={"a": 1.0})
    with pytest.raises(MissingError, match="'b'"):
        update_order("greedy", "ab", seed=0, stage=1, gains={"a": 1.0, "b": None})
    assert update_order("greedy", "abc", seed=0, stage=1, gains={"a": 1.0, "b": 2.0, "c": 2.0}) == ("b", "c", "a")
    assert update_order("bandit", "abc", seed=0, stage=1, gains={"a": 1.0, "b": None, "c": 2.0}) == ("b", "c", "a")


def test_the_bandit_credits_an_update_with_what_the_next_batch_earns() -> None:
    stage = worlds.world(worlds.parity("algorithm.order=bandit", "algorithm.stages=3", agents="abc"))
    reports = stage.train()
    gains: dict[str, float] = {}
    for one, following in pairwise(reports):
        gain = following.episodes.reward - one.episodes.reward if one.to_version is not None else 0.0
        gains[one.agent] = gain if one.agent not in gains else 0.5 * gains[one.agent] + 0.5 * gain
    last = reports[-1].agent
    for agent in "abc":
        if agent != last:
            assert stage.position.agents[agent].gain == pytest.approx(gains[agent])
    assert [r.agent for r in reports[:3]] == ["a", "b", "c"]  # unseen agents first, by index


def test_a_stages_radii_add_up_and_the_gate_uses_them() -> None:
    stage = worlds.world(
        worlds.parity("algorithm.radius_allocation=greedy", "algorithm.stages=2", agents="abc"),
    )
    reports = stage.train(3)
    plan = stage.position.stage
    assert plan is not None and sum(plan.radii.values()) == pytest.approx(3 * 0.5)
    assert all(0.125 <= r <= 1.0 for r in plan.radii.values())
    for report in reports:
        for look in report.looks:
            assert look.radius_token == pytest.approx(plan.radii[report.agent])
            assert look.radius_message_mean == pytest.approx(0.06 * plan.radii[report.agent] / 0.5)
    kappas = [plan.gains[a] / math.sqrt(0.5) for a in "abc"]
    assert list(plan.radii.values()) == pytest.approx(
        trust_region.allocate_radius(kappas, budget=1.5, quantum=0.125, cap=1.0)
    )


@pytest.mark.parametrize("how", ["algorithm.order=greedy", "algorithm.order=bandit", "algorithm.radius_allocation=greedy"])
def test_a_killed_run_keeps_its_order_and_radii(tmp_path: Path, how: str) -> None:
    settings = worlds.parity(how, "algorithm.stages=3", agents="abc")
    run.train(settings, run=tmp_path / "whole")
    worlds.kill(settings, tmp_path / "killed", "after the record", 4)
    worlds.go_on(settings, tmp_path / "killed")
    assert worlds.final(tmp_path / "killed") == worlds.final(tmp_path / "whole")
    position = run.Run(tmp_path / "whole").position
    assert records.read_position(records.position_record(position)) == position and position.stage is not None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("algorithm.data=reuse", "algorithm.name=joint"), "data = 'reuse' is for name = 'sat'"),
        (("algorithm.reuse.ess_floor=0.3",), "reuse has no effect"),
        (("algorithm.data=reuse", "algorithm.reuse={ess_floor=0.3,weights='none'}"), "ess_floor = 0.3 has no effect"),
        (("algorithm.order=greedy", "algorithm.name=joint"), "order = 'greedy' is for name = 'sat'"),
        (("algorithm.order=bandit", "algorithm.data=reuse"), "bandit"),
        (("algorithm.radius_allocation=greedy", "algorithm.name=independent"), "one agent a stage"),
        (("algorithm.ordering_episodes=100",), "ordering_episodes has no effect"),
    ],
)
def test_options_that_do_not_go_together_are_refused(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config.parse(worlds.tree(), overrides)
