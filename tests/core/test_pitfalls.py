"""Known numerical traps of RL trainers, each with its check (PITFALLS, groups a, e and g)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton.core import advantages, batching, divergence, losses
from baton.core.losses import Dis, LossTerm, Objective, Ppo, SequenceRatio
from baton.errors import (
    BatonError,
    ConfigError,
    DataError,
    MissingError,
    NonFiniteError,
    StaleAdvantagesError,
)
from baton.types import AdvantageBatch, Trajectory

F64 = torch.float64
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], LossTerm]


def dis(logp: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> LossTerm:
    return losses.dis(logp, old, adv, mask, band=losses.TIGHT, denominator=5.0)


def ppo(logp: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> LossTerm:
    return losses.ppo(logp, old, adv, mask, clip=0.2, denominator=5.0)


def sequence(logp: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> LossTerm:
    number = torch.arange(logp.shape[0])
    return losses.sequence(logp, old, adv, mask, episode_B=number, clip=0.2, denominator=5.0)


WEIGHTS = pytest.mark.parametrize("loss", [dis, ppo, sequence])


def run(loss: Loss, logp: list[float], old: list[float], adv: list[float], mask: list[int]) -> tuple[LossTerm, Tensor]:
    x = torch.tensor([logp], dtype=F64, requires_grad=True)
    keep = torch.tensor([mask], dtype=torch.bool)
    term = loss(x, torch.tensor([old], dtype=F64), torch.tensor([adv], dtype=F64), keep)
    (gradient,) = torch.autograd.grad(term.total, x)
    return term, gradient


def trajectory(
    name: str, n: int, *, group: str = "q", logprob: float = -1.0, context: int = 2, agent: str = "a"
) -> Trajectory:
    return Trajectory(
        episode_id=name,
        group=group,
        agent=agent,
        segment=0,
        ids=tuple(range(1, context + n + 1)),
        mask=(False,) * context + (True,) * n,
        behavior_logprobs=(0.0,) * context + (logprob,) * n,
        versions=(-1,) * context + (0,) * n,
    )


def scored(rows: list[Trajectory], values: dict[str, float]) -> AdvantageBatch:
    return batching.with_advantages(batching.token_batch(rows, temperature=1.0), values, team={"a": 0})


# ---- A04, A05 ----------------------------------------------------------------------------------------------


def test_a04_the_lowest_temperature_is_scored_and_what_is_below_it_is_not() -> None:
    assert divergence.log_law(torch.tensor([[0.0, 1e-2]]), temperature=0.01)[0].exp().tolist() == pytest.approx(
        [1.0 / (1.0 + math.e), math.e / (1.0 + math.e)], rel=1e-5
    )
    with pytest.raises(ConfigError, match=r"need a finite number >= 0\.01$"):
        divergence.log_law(torch.zeros(1, 2), temperature=0.0099)


@pytest.mark.parametrize("temperature", [0.0, -1.0, 1e-6, math.nan, math.inf])
def test_a04_a_temperature_that_cannot_be_scored_is_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        divergence.log_law(torch.zeros(1, 2), temperature=temperature)


def test_a05_entropy_of_a_law_with_a_forbidden_token_is_finite_with_a_finite_gradient() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]], dtype=F64, requires_grad=True)
    value = divergence.entropy(divergence.log_law(logits, temperature=1.0))
    assert value.item() == pytest.approx(math.log(2.0), abs=1e-12)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert gradient[0].tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)
    forbidden = torch.tensor([False, False, True])
    masked = divergence.log_law(torch.tensor([[0.0, 0.0, 50.0]]), temperature=1.0, forbidden=forbidden)
    assert divergence.entropy(masked).item() == pytest.approx(math.log(2.0), abs=1e-6)
    assert masked[0, 2] == -math.inf


def test_a05_a_nan_logit_surfaces() -> None:
    law = divergence.log_law(torch.tensor([[math.nan, 0.0, 0.0]]), temperature=1.0)
    other = divergence.log_law(torch.zeros(1, 3), temperature=1.0)
    assert bool(torch.isnan(divergence.entropy(law)))
    for value in (*divergence.exact(law, other), divergence.total_variation(law, other)):
        assert bool(torch.isnan(value))


def test_a_kl_of_laws_with_absent_tokens_has_a_finite_gradient() -> None:
    logits = torch.tensor([[0.3, -0.2, 0.1]], dtype=F64, requires_grad=True)
    forbidden = torch.tensor([False, False, True])
    new = divergence.log_law(logits, temperature=1.0, forbidden=forbidden)
    old = divergence.log_law(torch.zeros(1, 3, dtype=F64), temperature=1.0, forbidden=forbidden)
    value = divergence.kl(new, old)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert bool(torch.isfinite(gradient).all()) and gradient[0, 2] == 0.0
    assert value.item() > 0.0


def test_mass_where_the_other_law_has_none_is_infinite_also_when_it_underflows() -> None:
    old = torch.tensor([[0.0, -math.inf]], dtype=torch.float32)
    for tiny in (-1.0, -200.0):  # exp(-200) is 0 in fp32; the token can still be sampled
        new = torch.tensor([[math.log1p(-math.exp(tiny)), tiny]], dtype=torch.float32)
        assert divergence.kl(new, old).item() == math.inf
        assert math.isfinite(divergence.kl(old, new).item())


# ---- A06 to A08 --------------------------------------------------------------------------------------------


def test_a06_a_penalty_of_zero_never_looks_at_the_divergence() -> None:
    batch = scored([trajectory("x", 2), trajectory("y", 3)], {"x": 1.0, "y": -1.0})
    logp = torch.where(batch.batch.mask, -1.1, 0.0).requires_grad_()
    infinite = torch.full_like(logp, math.inf)

    def total(penalty: float, kl: Tensor | None) -> Tensor:
        objective = Objective(weight=Dis(band=losses.TIGHT), penalty=penalty)
        return objective(logp, batch, kl_BT=kl, denominator=5.0, n_act=5).total

    assert torch.equal(total(0.0, infinite), total(0.0, None))
    assert total(1e-3, infinite).item() == math.inf
    with pytest.raises(MissingError, match="penalty"):
        total(1e-3, None)


def test_a07_the_difference_is_zeroed_before_any_exponential() -> None:
    mask = torch.tensor([[True, False]])
    new = torch.tensor([[-1.0, 0.0]], requires_grad=True)
    old = torch.tensor([[-1.0, -1e10]])
    estimate = divergence.k3(losses.log_ratio(new, old, mask)).sum()
    (gradient,) = torch.autograd.grad(estimate, new)
    assert estimate.item() == 0.0 and gradient.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("junk", [-math.inf, math.inf, math.nan, -1e10, 1e30])
@WEIGHTS
def test_a08_junk_in_a_masked_slot_reaches_neither_value_nor_gradient(loss: Loss, junk: float) -> None:
    clean, clean_gradient = run(loss, [-1.0, -2.0, 0.0], [-1.1, -1.9, 0.0], [0.5, 0.5, 0.0], [1, 1, 0])
    term, gradient = run(loss, [-1.0, -2.0, junk], [-1.1, -1.9, junk], [0.5, 0.5, junk], [1, 1, 0])
    assert torch.equal(term.total, clean.total) and term.diagnostics == clean.diagnostics
    assert torch.equal(gradient, clean_gradient) and gradient[0, 2] == 0.0


def test_a08_junk_in_a_masked_slot_of_the_divergence_reaches_nothing() -> None:
    kl = torch.tensor([[0.2, math.inf, math.nan]], requires_grad=True)
    term = losses.kl_term(kl, torch.tensor([[True, False, False]]), denominator=2.0)
    (gradient,) = torch.autograd.grad(term, kl)
    assert term.item() == pytest.approx(0.1) and gradient.tolist() == [[0.5, 0.0, 0.0]]


@WEIGHTS
def test_a_nan_on_an_action_token_surfaces(loss: Loss) -> None:
    for place in range(3):
        columns = [[-1.0, -2.0], [-1.1, -1.9], [0.5, 0.5]]
        columns[place][0] = math.nan
        term, _ = run(loss, *columns, [1, 1])
        assert math.isnan(term.total.item()), place


def test_a_rejected_token_contributes_nothing_even_at_probability_zero() -> None:
    term, gradient = run(dis, [-math.inf, -1.0], [-1.0, -1.0], [1.0, 1.0], [1, 1])
    assert term.total.item() == pytest.approx(1.0 / 5.0)
    assert gradient.tolist() == [[0.0, -1.0 / 5.0]]
    assert term.diagnostics["rejected_low"] == 1.0


# ---- A09 ---------------------------------------------------------------------------------------------------


def test_a09_a_rollout_without_behavior_log_probabilities_is_refused_by_name() -> None:
    rows = [trajectory("good", 2), trajectory("broken", 3)]
    missing = replace(rows[1], behavior_logprobs=())
    with pytest.raises(MissingError, match="broken"):
        batching.token_batch([rows[0], missing], temperature=1.0)
    for value in (math.nan, -math.inf, 0.5):
        absent = replace(rows[1], behavior_logprobs=(0.0, 0.0, -1.0, value, -1.0))
        with pytest.raises(NonFiniteError, match=r"broken.*token 3"):
            batching.token_batch([rows[0], absent], temperature=1.0)


# ---- A10, A11, A13 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@WEIGHTS
def test_a10_a_mean_log_ratio_of_200_over_five_tokens_stays_finite(loss: Loss, advantage: float) -> None:
    old = [-200.5] * 5
    term, gradient = run(loss, [-0.5] * 5, old, [advantage] * 5, [1] * 5)
    assert math.isfinite(term.total.item()) and bool(torch.isfinite(gradient).all())
    assert term.diagnostics["clamped"] == (1.0 if loss is sequence else 5.0)


@WEIGHTS
def test_a11_a_large_ratio_with_advantage_zero_is_zero_and_counted(loss: Loss) -> None:
    term, gradient = run(loss, [-0.5], [-60.5], [0.0], [1])
    assert term.total.item() == 0.0 and gradient.tolist() == [[0.0]]
    assert term.diagnostics["clamped"] == 1.0


def test_a11_the_bound_keeps_nan_visible_and_leaves_small_ratios_alone() -> None:
    value, clamped = losses.safe_exp(torch.tensor([math.nan, -30.0, 20.0, 20.5, math.inf], dtype=F64))
    assert math.isnan(value[0].item()) and value[1].item() == math.exp(-30.0)
    assert value[2:].tolist() == pytest.approx([math.exp(20.0)] * 3) and clamped == 2


def test_a13_k3_is_finite_and_equal_to_its_documented_value_at_the_bound() -> None:
    x = torch.tensor([-1.0 - (-60.0), 20.0, -60.0, math.nan], requires_grad=True)
    value = divergence.k3(x)
    assert value[:2].tolist() == pytest.approx([4.8516517e8] * 2, rel=1e-7)
    assert value[2].item() == pytest.approx(59.0)
    assert math.isnan(value[3].item())
    (gradient,) = torch.autograd.grad(value[0], x)
    assert gradient[0].item() == 0.0


def test_k3_does_not_cancel_near_zero_in_fp32() -> None:
    assert divergence.k3(torch.tensor([1e-3])).item() == pytest.approx(0.5e-6, rel=1e-3)


# ---- A14, A15, A20 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 24, 48, 10_000])
@pytest.mark.parametrize("weight", [Dis(band=losses.TIGHT), Ppo(), SequenceRatio()])
def test_a14_the_gradient_does_not_depend_on_the_micro_batch_size(weight: losses.Weight, max_tokens: int) -> None:
    rows = [trajectory(f"e{i}", n, group=f"q{i // 2}") for i, n in enumerate([1, 7, 2, 5, 3, 1, 9, 4])]
    batch = scored(rows, {f"e{i}": 0.3 * i - 1.0 for i in range(8)})
    generator = torch.Generator().manual_seed(1)
    noise = 0.1 * torch.randn(batch.batch.ids.shape, generator=generator)
    logp = torch.where(batch.batch.mask, -1.0 + noise, 0.0)
    kl = torch.where(batch.batch.mask, noise.square(), math.nan)
    objective = Objective(weight=weight, penalty=0.5)
    denominator, n_act = objective.denominator(batch.batch), batch.batch.n_act

    def gradient(chunks: list[list[int]]) -> tuple[Tensor, float]:
        x = logp.clone().requires_grad_()
        total = 0.0
        for chunk in chunks:
            part = batch.rows(chunk)
            width = part.batch.ids.shape[1]
            term = objective(x[chunk, :width], part, kl_BT=kl[chunk, :width], denominator=denominator, n_act=n_act)
            term.total.backward()
            total += term.total.item()
        assert x.grad is not None
        return x.grad, total

    chunks = batching.micro_batches(batch.batch, max_tokens=max_tokens)
    assert sorted(row for chunk in chunks for row in chunk) == list(range(8))
    split, split_total = gradient(list(chunks))
    whole, whole_total = gradient([list(range(8))])
    assert torch.allclose(split, whole, atol=1e-6, rtol=0) and split_total == pytest.approx(whole_total, abs=1e-6)


@WEIGHTS
def test_a15_padding_columns_do_not_change_the_loss(loss: Loss) -> None:
    short, short_gradient = run(loss, [-1.0, -2.0], [-1.1, -1.9], [0.5, 0.5], [1, 1])
    pad = [0.0] * 10
    term, gradient = run(loss, [-1.0, -2.0, *pad], [-1.1, -1.9, *pad], [0.5, 0.5, *pad], [1, 1, *[0] * 10])
    assert torch.equal(term.total, short.total) and torch.equal(gradient[:, :2], short_gradient)


def test_a20_each_action_token_and_nothing_else_carries_the_episodes_advantage() -> None:
    rows = [trajectory(f"e{n}", n, context=6 - n) for n in range(1, 6)]
    batch = scored([*rows, trajectory("long", 9)], {**{f"e{n}": float(n) for n in range(1, 6)}, "long": 7.0})
    for b, (n, value) in enumerate([(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0), (9, 7.0)]):
        carried = batch.advantages[b]
        length = int(batch.batch.lengths[b])
        assert carried.sum().item() == n * value
        assert carried[length - n : length].tolist() == [value] * n


# ---- A17 ---------------------------------------------------------------------------------------------------


def test_a17_a_nan_reward_is_refused_by_index_and_its_siblings_stand_without_it() -> None:
    rewards = torch.tensor([math.nan, 1.0, 0.0, 1.0])
    for baseline in (advantages.group, advantages.loo, advantages.batch_mean):
        with pytest.raises(NonFiniteError, match="episode 0"):
            baseline(rewards, ["q"] * 4)
    with pytest.raises(NonFiniteError, match="episode 0"):
        advantages.informative_groups(rewards, ["q"] * 4)
    survivors = advantages.group(rewards[1:], ["q"] * 3).values
    assert bool(torch.isfinite(survivors).all()) and survivors[0] > 0 > survivors[1]
    alone = advantages.group(torch.tensor([1.0]), ["q"])
    assert alone.values.tolist() == [0.0] and alone.degenerate_groups == 1


def test_a_flat_group_is_exactly_zero_although_its_mean_rounds() -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0], dtype=F64)
    result = advantages.group(rewards, ["flat"] * 3 + ["mixed"] * 2)
    assert result.values[:3].tolist() == [0.0] * 3
    assert (result.n_groups, result.degenerate_groups) == (2, 1)
    assert advantages.informative_groups(rewards, ["flat"] * 3 + ["mixed"] * 2) == 1


@pytest.mark.parametrize(("right", "decided"), [(0, 0), (1, 1), (2, 2), (16, 16), (30, 2), (31, 1), (32, 0)])
def test_single_episodes_decide_by_the_rarer_side_of_the_batch_mean(right: int, decided: int) -> None:
    rewards = torch.tensor([1.0] * right + [0.0] * (32 - right), dtype=torch.float64)
    assert advantages.decided_prompts(rewards, [f"q{i}" for i in range(32)]) == decided


def test_the_advantage_clip_bounds_an_outlier() -> None:
    rewards = torch.tensor([1.0] + [0.0] * 99)
    assert advantages.group(rewards, ["q"] * 100).values.max().item() == 5.0
    assert advantages.group(rewards, ["q"] * 100, clip=None).values.max().item() > 9.0


# ---- A26, A27 ----------------------------------------------------------------------------------------------


def test_a26_a_batch_of_rejected_tokens_is_zero_and_counts_them_all() -> None:
    term, gradient = run(dis, [-0.1, -9.0, -0.1], [-2.0, -1.0, -2.0], [1.0, -1.0, 1.0], [1, 1, 1])
    assert term.total.item() == 0.0 and gradient.tolist() == [[0.0] * 3]
    counts = {name: term.diagnostics[name] for name in ("tokens", "kept", "rejected_low", "rejected_high")}
    assert counts == {"tokens": 3.0, "kept": 0.0, "rejected_low": 1.0, "rejected_high": 2.0}


def test_a26_the_counts_are_those_of_the_mask() -> None:
    term, _ = run(dis, [-1.0, -0.1, 5.0], [-1.0, -2.0, -5.0], [1.0, 1.0, 1.0], [1, 1, 0])
    assert (term.diagnostics["tokens"], term.diagnostics["kept"], term.diagnostics["rejected_high"]) == (
        2,
        1,
        1,
    )
    term, _ = run(ppo, [-1.0, -0.1, 5.0], [-1.0, -2.0, -5.0], [1.0, 1.0, 1.0], [1, 1, 0])
    assert (term.diagnostics["tokens"], term.diagnostics["clipped"]) == (2, 1)
    term, _ = run(sequence, [-1.0, -0.1, 5.0], [-1.0, -2.0, -5.0], [1.0, 1.0, 1.0], [1, 1, 0])
    assert (term.diagnostics["episodes"], term.diagnostics["clipped"]) == (1, 1)
    term, _ = run(sequence, [-1.0, -1.9], [-1.0, -2.0], [1.0, 1.0], [1, 1])
    assert (term.diagnostics["episodes"], term.diagnostics["clipped"]) == (1, 0)


@pytest.mark.parametrize("denominator", [0.0, 3.0])
@pytest.mark.parametrize("kind", ["dis", "ppo", "sequence", "kl"])
def test_a27_an_empty_mask_gives_zero_with_zero_gradient(kind: str, denominator: float) -> None:
    x = torch.tensor([[-1.0, math.nan], [-2.0, -math.inf]], requires_grad=True)
    other, mask = torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bool)
    match kind:
        case "dis":
            total = losses.dis(x, other, other, mask, band=losses.TIGHT, denominator=denominator).total
        case "ppo":
            total = losses.ppo(x, other, other, mask, clip=0.2, denominator=denominator).total
        case "sequence":
            number = torch.tensor([0, 1])
            total = losses.sequence(x, other, other, mask, episode_B=number, clip=0.2, denominator=denominator).total
        case _:
            total = losses.kl_term(x, mask, denominator=denominator)
    (gradient,) = torch.autograd.grad(total, x)
    assert total.item() == 0.0 and math.copysign(1.0, total.item()) == 1.0
    assert gradient.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("denominator", [0.0, -1.0, math.nan, math.inf])
def test_a27_action_tokens_without_a_denominator_are_refused(denominator: float) -> None:
    one, mask = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(DataError, match="denominator"):
        losses.ppo(one, one, one, mask, clip=0.2, denominator=denominator)


# ---- E06, G02, and the rule of one team --------------------------------------------------------------------


def test_e06_repeats_of_a_task_form_one_group() -> None:
    result = advantages.group(torch.tensor([1.0, 0.0, 1.0, 0.0]), ["task"] * 4)
    assert result.values.tolist() == pytest.approx([1.0, -1.0, 1.0, -1.0], abs=1e-6)
    assert result.n_groups == 1
    apart = advantages.group(torch.tensor([1.0, 0.0, 1.0, 0.0]), ["r0", "r1", "r2", "r3"])
    assert apart.values.tolist() == [0.0] * 4 and apart.degenerate_groups == 4  # seen, not taken for a signal
    with pytest.raises(DataError, match="'r0' has one episode"):
        advantages.loo(torch.tensor([1.0, 0.0]), ["r0", "r1"])


def test_g02_the_names_of_agents_do_not_enter_the_baseline() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 1.0]), ["q", "q", "r", "r"]
    for baseline in (advantages.group, advantages.loo, advantages.batch_mean):
        plain = baseline(rewards, groups, teams=[{"solver": 3, "critic": 1}] * 4)
        renamed = baseline(rewards, groups, teams=[{"zoe": 3, "abe": 1}] * 4)
        assert torch.equal(plain.values, renamed.values)


def test_t24_siblings_of_different_teams_are_refused_and_both_are_named() -> None:
    rewards = torch.tensor([1.0, 0.0])
    mixed = [{"solver": 3, "critic": 1}, {"solver": 4, "critic": 1}]
    for baseline in (advantages.group, advantages.loo):
        with pytest.raises(StaleAdvantagesError, match=r"team \(solver@3, critic@1\) and of team \(solver@4, critic@1\);"):
            baseline(rewards, ["q", "q"], teams=mixed)
    assert advantages.group(rewards, ["q", "r"], teams=mixed).n_groups == 2
    with pytest.raises(StaleAdvantagesError, match=r"^the batch mixes"):
        advantages.batch_mean(rewards, ["q", "r"], teams=mixed)


@pytest.mark.parametrize(
    "make",
    [
        lambda: losses.Band(low=1.0, high=4.0),
        lambda: losses.Band(low=0.2, high=0.9),
        lambda: losses.Band(low=0.2, high=math.inf),
        lambda: Ppo(clip=0.0),
        lambda: SequenceRatio(clip=1.0),
        lambda: Objective(weight=Ppo(), penalty=-1.0),
        lambda: Objective(weight=Ppo(), penalty=math.nan),
        lambda: advantages.group(torch.ones(1), ["q"], clip=0.0),
        lambda: advantages.group(torch.ones(2), ["q"]),
        lambda: advantages.group(torch.ones(0), []),
        lambda: advantages.group(torch.ones(1), ["q"], teams=[]),
        lambda: divergence.log_law(torch.ones(1, 2), temperature=1.0, forbidden=torch.ones(2, dtype=torch.bool)),
    ],
)
def test_a_choice_that_has_no_meaning_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(BatonError):
        make()
