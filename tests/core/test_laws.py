"""Laws of the core that hold for any batch, any law, any radius. Axes: B rows, T tokens, S states, V vocabulary."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from scipy import stats
from torch import Tensor

from baton.core import advantages, certificate, divergence, losses, scores, trust_region
from baton.core.losses import BANDS, Dis, Gspo, Is, Likelihood, Objective, Ppo, SequenceRatio
from baton.errors import BatonError, ConfigError, DataError, MissingError, NonFiniteError
from baton.types import AdvantageBatch, Direction, GateRecord, TokenBatch, TokenDivergence

F64 = torch.float64
JUNK = (-math.inf, math.inf, math.nan, 1e30, -1e30, -77.0)
WEIGHTS = [
    Dis(band=BANDS["tight"]),
    Dis(band=BANDS["coding"]),
    Is(),
    Is(cap=1.5),
    Ppo(clip=0.2),
    Gspo(clip=0.2),
    SequenceRatio(clip=0.2),
    Likelihood(),
]
DIRECTIONS: tuple[Direction, ...] = ("max", "new_old", "old_new")


# ---- losses ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A batch, the log-probabilities of the policy now, and its KL to the anchor."""

    logp: Tensor
    kl: Tensor
    scored: AdvantageBatch


@dataclass(frozen=True)
class Drawn:
    """What a case is built from. Checked dataclasses draw names at random, which a strategy must not do."""

    logp: Tensor
    old: Tensor
    kl: Tensor
    mask: Tensor
    lengths: list[int]
    episode: list[int]
    value: dict[int, float]

    def case(self) -> Case:
        batch = TokenBatch(
            ids=torch.zeros_like(self.mask, dtype=torch.long),
            mask=self.mask,
            behavior_logprobs=self.old,
            versions=torch.zeros_like(self.mask, dtype=torch.long),
            lengths=torch.tensor(self.lengths),
            episode=torch.tensor(self.episode),
            agent="a",
            episode_ids=tuple(f"e{e}" for e in self.episode),
            groups=tuple(f"q{e // 2}" for e in self.episode),
            temperature=1.0,
        )
        column = torch.tensor([self.value[e] for e in self.episode], dtype=F64)[:, None]
        scored = AdvantageBatch(batch=batch, advantages=torch.where(self.mask, column, 0.0), team={"a": 0})
        return Case(logp=self.logp, kl=self.kl, scored=scored)


@st.composite
def drawn_cases(draw: st.DrawFn) -> Drawn:
    n_rows, width = draw(st.integers(1, 8)), draw(st.integers(2, 6))
    lengths = [draw(st.integers(2, width)) for _ in range(n_rows)]
    mask = torch.zeros(n_rows, width, dtype=torch.bool)
    for b, length in enumerate(lengths):
        own = draw(st.lists(st.integers(1, length - 1), min_size=1, max_size=length - 1, unique=True))
        mask[b, own] = True
    episode = sorted(draw(st.lists(st.integers(0, 4), min_size=n_rows, max_size=n_rows)))

    def fill(low: float, high: float) -> Tensor:
        flat = draw(st.lists(st.floats(low, high), min_size=n_rows * width, max_size=n_rows * width))
        return torch.tensor(flat, dtype=F64).reshape(n_rows, width)

    old = fill(-4.0, 0.0)
    spread = draw(st.sampled_from([0.1, 1.0, 30.0]))
    return Drawn(
        logp=old + fill(-spread, spread),
        old=old,
        kl=fill(0.0, 2.0),
        mask=mask,
        lengths=lengths,
        episode=episode,
        value={e: draw(st.sampled_from([-5.0, -1.0, -0.3, 0.0, 0.5, 2.0])) for e in sorted(set(episode))},
    )


def evaluate(
    objective: Objective, case: Case, *, junk: float | None = None
) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
    """Loss, gradient by log-probabilities, gradient by KL, diagnostics; `junk` fills everything under a False mask."""
    batch, mask = case.scored.batch, case.scored.batch.mask

    def filled(tensor: Tensor) -> Tensor:
        return tensor.clone() if junk is None else torch.where(mask, tensor, junk)

    logp, kl = filled(case.logp).requires_grad_(), filled(case.kl).requires_grad_()
    tokens = TokenBatch(**{**vars(batch), "behavior_logprobs": filled(batch.behavior_logprobs)})
    scored = AdvantageBatch(batch=tokens, advantages=filled(case.scored.advantages), team={"a": 0})
    term = objective(logp, scored, kl_BT=kl, denominator=objective.denominator(batch), n_act=batch.n_act)
    by_logp, by_kl = torch.autograd.grad(term.total, (logp, kl), allow_unused=True)
    by_kl = torch.zeros_like(kl) if by_kl is None else by_kl
    return term.total.detach(), by_logp, by_kl, term.diagnostics


def part_of(case: Case, rows: Sequence[int]) -> Case:
    scored = case.scored.rows(list(rows))
    width = scored.batch.ids.shape[1]
    return Case(logp=case.logp[rows, :width], kl=case.kl[rows, :width], scored=scored)


@given(drawn_cases(), st.sampled_from(WEIGHTS), st.sampled_from([0.0, 0.5]), st.sampled_from(JUNK))
def test_padding_moves_neither_the_loss_nor_the_gradient(
    drawn: Drawn, weight: losses.Weight, penalty: float, junk: float
) -> None:
    case = drawn.case()
    objective = Objective(weight=weight, penalty=penalty)
    total, by_logp, by_kl, diagnostics = evaluate(objective, case)
    again, by_logp_again, by_kl_again, diagnostics_again = evaluate(objective, case, junk=junk)
    assert torch.equal(total, again) and diagnostics == diagnostics_again
    assert torch.equal(by_logp, by_logp_again) and torch.equal(by_kl, by_kl_again)
    outside = ~case.scored.batch.mask
    assert not by_logp_again[outside].any() and not by_kl_again[outside].any()
    assert bool(torch.isfinite(by_logp).all()) and bool(torch.isfinite(total))


@given(drawn_cases(), st.sampled_from(WEIGHTS), st.randoms(use_true_random=False))
def test_the_order_of_episodes_moves_neither_the_loss_nor_the_gradient(
    drawn: Drawn, weight: losses.Weight, shuffler: random.Random
) -> None:
    case = drawn.case()
    names = case.scored.batch.episode_ids
    order = list(dict.fromkeys(names))
    shuffler.shuffle(order)
    rows = [row for name in order for row in range(len(names)) if names[row] == name]
    objective = Objective(weight=weight, penalty=0.5)
    total, by_logp, by_kl, diagnostics = evaluate(objective, case)
    moved, moved_by_logp, moved_by_kl, moved_diagnostics = evaluate(objective, part_of(case, rows))
    width = moved_by_logp.shape[1]
    close = {"rtol": 1e-12, "atol": 1e-12}
    assert torch.allclose(moved, total, **close)
    assert torch.allclose(moved_by_logp, by_logp[rows, :width], **close)
    assert torch.allclose(moved_by_kl, by_kl[rows, :width], **close)
    assert moved_diagnostics == pytest.approx(diagnostics, rel=1e-12)


@given(drawn_cases(), st.sampled_from(WEIGHTS), st.sampled_from([1, 2, 4]))
def test_one_large_batch_is_the_sum_of_its_micro_batches(drawn: Drawn, weight: losses.Weight, count: int) -> None:
    """T7: loss, gradient and diagnostics, for whole episodes dealt out to 1, 2 and 4 micro-batches."""
    case = drawn.case()
    batch = case.scored.batch
    objective = Objective(weight=weight, penalty=0.5)
    whole, by_logp, by_kl, diagnostics = evaluate(objective, case)
    names = list(dict.fromkeys(batch.episode_ids))
    total, summed = 0.0, dict.fromkeys(diagnostics, 0.0)
    for first in range(count):
        rows = [row for row, name in enumerate(batch.episode_ids) if name in names[first::count]]
        if not rows:
            continue
        part = part_of(case, rows)
        logp, kl = part.logp.clone().requires_grad_(), part.kl.clone().requires_grad_()
        term = objective(logp, part.scored, kl_BT=kl, denominator=objective.denominator(batch), n_act=batch.n_act)
        got = torch.autograd.grad(term.total, (logp, kl))
        width = logp.shape[1]
        assert torch.allclose(got[0], by_logp[rows, :width], rtol=1e-12, atol=1e-12)
        assert torch.allclose(got[1], by_kl[rows, :width], rtol=1e-12, atol=1e-12)
        total += term.total.item()
        for name, count_here in term.diagnostics.items():
            summed[name] += count_here
    assert total == pytest.approx(whole.item(), rel=1e-12, abs=1e-12)
    assert summed == pytest.approx(diagnostics, rel=1e-12)


@given(drawn_cases())
def test_on_policy_every_weight_has_the_plain_policy_gradient(drawn: Drawn) -> None:
    case = drawn.case()
    batch = case.scored.batch
    still = Case(logp=batch.behavior_logprobs.clone(), kl=case.kl, scored=case.scored)
    plain = -case.scored.advantages
    own = torch.tensor([[float(drawn.mask[torch.tensor(drawn.episode) == e].sum())] for e in drawn.episode], dtype=F64)
    for weight in WEIGHTS:
        objective = Objective(weight=weight, penalty=0.0)
        _, by_logp, _, _ = evaluate(objective, still)
        share = 1.0 / own if isinstance(weight, Gspo) else 1.0  # each token moves the mean by its share
        assert torch.allclose(by_logp, plain * share / objective.denominator(batch), rtol=1e-12, atol=1e-12)
        if isinstance(weight, SequenceRatio):
            continue
        for level, scale in (("token", 1.0 / batch.n_act), ("sequence", 1.0 / own / batch.n_episodes)):
            _, by_logp, _, _ = evaluate(Objective(weight=weight, penalty=0.0, level=level), still)  # type: ignore[arg-type]
            assert torch.allclose(by_logp, plain * scale, rtol=1e-12, atol=1e-12)


@given(drawn_cases())
def test_token_losses_count_tokens_and_sequence_losses_count_episodes(drawn: Drawn) -> None:
    batch = drawn.case().scored.batch
    for weight in WEIGHTS:
        expected = len(set(drawn.episode)) if isinstance(weight, SequenceRatio | Gspo) else int(drawn.mask.sum())
        assert Objective(weight=weight, penalty=0.0).denominator(batch) == expected


@given(drawn_cases())
def test_a_wider_band_keeps_what_a_narrower_one_kept(drawn: Drawn) -> None:
    case = drawn.case()
    tight, wide = losses.Band(low=0.8, high=1.25), losses.Band(low=0.2, high=6.0)
    kept = [evaluate(Objective(weight=Dis(band=band), penalty=0.0), case)[3] for band in (tight, wide)]
    assert kept[0]["kept"] <= kept[1]["kept"]
    for counts in kept:
        assert counts["kept"] + counts["rejected_low"] + counts["rejected_high"] == counts["tokens"]


def test_unequal_advantages_in_one_episode_are_refused_by_the_sequence_ratio() -> None:
    x, mask = torch.zeros(2, 2, dtype=F64), torch.tensor([[False, True], [False, True]])
    uneven = torch.tensor([[0.0, 1.0], [0.0, 2.0]], dtype=F64)
    number = torch.tensor([5, 5])
    with pytest.raises(DataError, match="one advantage"):
        losses.sequence(x, x, uneven, mask, episode_B=number, clip=0.2, denominator=1.0)
    three, own = torch.zeros(3, 2, dtype=F64), torch.tensor([[False, True]] * 3)
    second = torch.tensor([[0.0, 3.0], [0.0, 1.0], [0.0, 2.0]], dtype=F64)
    with pytest.raises(DataError, match=r"episode number 1 of this batch has advantages from 1\.0 to 2\.0"):
        losses.sequence(three, three, second, own, episode_B=torch.tensor([5, 8, 8]), clip=0.2, denominator=1.0)
    apart = losses.sequence(x, x, uneven, mask, episode_B=torch.tensor([5, 6]), clip=0.2, denominator=2.0)
    assert apart.total.item() == -1.5


# ---- advantages --------------------------------------------------------------------------------------------


@st.composite
def rewards(draw: st.DrawFn) -> tuple[list[float], list[str]]:
    n = draw(st.integers(1, 12))
    reward = st.sampled_from([0.0, 0.25, 0.5, 1.0, -2.0, 0.1])
    return draw(st.lists(reward, min_size=n, max_size=n)), draw(
        st.lists(st.sampled_from(["q", "r", "s"]), min_size=n, max_size=n)
    )


@given(rewards())
def test_the_group_mean_of_advantages_is_zero(case: tuple[list[float], list[str]]) -> None:
    values, groups = case
    tensor = torch.tensor(values, dtype=F64)
    normed = advantages.group(tensor, groups, clip=None).values
    for name in set(groups):
        own = normed[[g == name for g in groups]]
        assert abs(own.mean().item()) < 1e-12
        spread = own.std(correction=0).item()
        assert spread == 0.0 or spread == pytest.approx(1.0, abs=1e-5)
        if groups.count(name) >= 2:
            pair = [i for i, g in enumerate(groups) if g == name]
            alone = advantages.loo(tensor[pair], [name] * len(pair)).values
            assert abs(alone.mean().item()) < 1e-12
    assert abs(advantages.batch_mean(tensor, groups).values.mean().item()) < 1e-12


@given(rewards(), st.randoms(use_true_random=False))
def test_t14_the_order_of_samples_changes_no_advantage(case: tuple[list[float], list[str]], shuffler: random.Random) -> None:
    values, groups = case
    order = list(range(len(values)))
    shuffler.shuffle(order)
    tensor = torch.tensor(values, dtype=F64)
    shuffled = [groups[i] for i in order]
    baselines: list[Callable[..., advantages.EpisodeAdvantages]] = [advantages.group, advantages.batch_mean]
    if min(groups.count(name) for name in groups) >= 2:
        baselines.append(advantages.loo)
    for baseline in baselines:
        before, after = baseline(tensor, groups), baseline(tensor[order], shuffled)
        assert torch.allclose(after.values, before.values[order], rtol=0, atol=1e-12)
        assert (after.n_groups, after.degenerate_groups) == (before.n_groups, before.degenerate_groups)
    assert advantages.informative_groups(tensor, groups) == advantages.informative_groups(tensor[order], shuffled)


@given(rewards())
def test_another_prompts_rewards_do_not_enter_a_group(case: tuple[list[float], list[str]]) -> None:
    values, groups = case
    name = groups[0]
    own = [i for i, g in enumerate(groups) if g == name]
    tensor = torch.tensor(values, dtype=F64)
    among = advantages.group(tensor, groups).values[own]
    assert torch.equal(among, advantages.group(tensor[own], [name] * len(own)).values)


@pytest.mark.parametrize(("accuracy", "group"), [(0.1, 4), (0.5, 3), (0.0, 4), (1.0, 2), (0.3, 1)])
def test_the_informative_share_is_an_enumeration(accuracy: float, group: int) -> None:
    share = 0.0
    for bits in range(2**group):
        right = bits.bit_count()
        if 0 < right < group:
            share += accuracy**right * (1 - accuracy) ** (group - right)
    assert advantages.informative_share(accuracy, group) == pytest.approx(share, abs=1e-12)


# ---- divergences -------------------------------------------------------------------------------------------


@st.composite
def pairs_of_laws(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    n_states, n_tokens = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    size = n_states * n_tokens
    logits = st.lists(st.floats(-40.0, 40.0), min_size=size, max_size=size)
    laws = [
        divergence.log_law(torch.tensor(draw(logits), dtype=F64).reshape(n_states, n_tokens), temperature=1.0)
        for _ in range(2)
    ]
    return laws[0], laws[1]


@given(pairs_of_laws())
def test_kl_is_at_least_pinsker_and_zero_only_between_equals(laws: tuple[Tensor, Tensor]) -> None:
    p, q = laws
    new_old, old_new = divergence.exact(p, q)
    distance = divergence.total_variation(p, q)
    for value in (new_old, old_new):
        assert bool((value >= 2.0 * distance.square() - 1e-12).all())
    for law in (p, q):
        assert not divergence.kl(law, law).any() and not divergence.total_variation(law, law).any()
    assert bool(((distance <= 1e-7) | (new_old > 0.0)).all())
    assert torch.equal(divergence.kl(q, p), old_new)


@given(pairs_of_laws())
def test_kl_entropy_and_distance_are_sums_over_the_vocabulary(laws: tuple[Tensor, Tensor]) -> None:
    p, q = (law.exp() for law in laws)
    for s in range(p.shape[0]):
        kl = math.fsum(a * math.log(a / b) for a, b in zip(p[s].tolist(), q[s].tolist(), strict=True) if a > 0 < b)
        assume(min(p[s].min().item(), q[s].min().item()) > 0.0)
        assert divergence.kl(*laws)[s].item() == pytest.approx(kl, abs=1e-9)
        entropy = -math.fsum(a * math.log(a) for a in p[s].tolist())
        assert divergence.entropy(laws[0])[s].item() == pytest.approx(entropy, abs=1e-9)


@given(pairs_of_laws(), st.integers(0, 5))
def test_a_token_absent_from_both_laws_changes_nothing(laws: tuple[Tensor, Tensor], place: int) -> None:
    p, q = laws
    place = min(place, p.shape[1])
    hole = torch.full((p.shape[0], 1), -math.inf, dtype=F64)
    wide = [torch.cat([law[:, :place], hole, law[:, place:]], dim=1) for law in (p, q)]
    assert torch.allclose(divergence.kl(*wide), divergence.kl(p, q), rtol=1e-12, atol=1e-12)
    assert torch.allclose(divergence.entropy(wide[0]), divergence.entropy(p), rtol=1e-12, atol=1e-12)
    wide[0] = torch.cat([p[:, :place] - 0.1, torch.full_like(hole, math.log(-math.expm1(-0.1))), p[:, place:] - 0.1], 1)
    assert bool((divergence.kl(*wide) == math.inf).all())


@given(st.lists(st.floats(-15.0, 15.0), min_size=1, max_size=8))
def test_k3_is_never_negative_and_zero_only_at_zero(values: list[float]) -> None:
    x = torch.tensor(values, dtype=F64)
    value = divergence.k3(x)
    assert bool((value >= 0.0).all())
    assert torch.allclose(value, x.exp() - 1.0 - x, rtol=1e-9, atol=1e-9)
    assert bool(((x.abs() < 1e-6) | (value > 0.0)).all())


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0.0, 9.0)), min_size=1, max_size=12))
def test_message_values_come_in_order_of_first_appearance(states: list[tuple[int, float]]) -> None:
    by_message: dict[int, list[float]] = {}
    for message, value in states:
        by_message.setdefault(message, []).append(value)
    means, sums = divergence.message_values(
        torch.tensor([value for _, value in states], dtype=F64), torch.tensor([message for message, _ in states])
    )
    assert sums.tolist() == pytest.approx([math.fsum(own) for own in by_message.values()], abs=1e-12)
    assert means.tolist() == pytest.approx([math.fsum(own) / len(own) for own in by_message.values()], abs=1e-12)


def test_no_states_are_no_messages() -> None:
    means, sums = divergence.message_values(torch.zeros(0), torch.zeros(0, dtype=torch.long))
    assert means.shape == sums.shape == (0,)


def test_logits_become_a_law_in_fp32_at_their_temperature() -> None:
    logits = torch.tensor([[[3.0, 1.0, -2.0]]], dtype=torch.bfloat16)
    law = divergence.log_law(logits, temperature=0.5)
    assert law.dtype == torch.float32 and law.shape == logits.shape
    assert law.exp().sum().item() == pytest.approx(1.0, abs=1e-6)
    assert (law[0, 0, 0] - law[0, 0, 1]).item() == pytest.approx(4.0, abs=1e-5)


# ---- the gate ----------------------------------------------------------------------------------------------


def measured(new_old: Sequence[float], old_new: Sequence[float] | None = None) -> TokenDivergence:
    index = torch.arange(len(new_old))
    first = torch.tensor(new_old, dtype=F64)
    second = first if old_new is None else torch.tensor(old_new, dtype=F64)
    return TokenDivergence(kl_new_old=first, kl_old_new=second, row=index, position=index)


def look(
    values: TokenDivergence,
    *,
    units: Sequence[int] | None = None,
    messages: Sequence[int] | None = None,
    drawn: Sequence[int] | None = None,
    direction: Direction = "max",
    alpha: float = 0.01,
    eta: float = 0.05,
    looks: int = 5,
    radius_token: float = 0.05,
    radius_message_mean: float = 0.01,
    require_certified: bool = False,
    scale: float = 1.0,
) -> GateRecord:
    n = values.kl_new_old.numel()
    unit = list(range(n)) if units is None else list(units)
    first = [unit.index(name) for name in dict.fromkeys(unit)]
    return trust_region.gate(
        values,
        message=torch.tensor(unit if messages is None else messages),
        unit=torch.tensor(unit),
        drawn=torch.tensor(first if drawn is None else drawn, dtype=torch.long),
        direction=direction,
        alpha=alpha,
        eta=eta,
        looks=looks,
        radius_token=radius_token,
        radius_message_mean=radius_message_mean,
        require_certified=require_certified,
        scale=scale,
    )


SMALL = st.lists(st.floats(0.0, 0.2), min_size=1, max_size=20)


@given(SMALL, st.floats(1e-6, 0.3), st.floats(1e-6, 0.3), st.floats(1.0, 10.0), st.floats(1.0, 10.0))
def test_a_larger_radius_never_turns_a_pass_into_a_failure(
    values: list[float], token: float, message: float, grow_token: float, grow_message: float
) -> None:
    near = look(measured(values), radius_token=token, radius_message_mean=message)
    far = look(measured(values), radius_token=token * grow_token, radius_message_mean=message * grow_message)
    assert far.passed or not near.passed
    assert near.passed == (near.q_gate <= token and near.message_mean <= message)


@given(SMALL, st.sampled_from(DIRECTIONS))
def test_both_radii_must_hold_at_their_boundary(values: list[float], direction: Direction) -> None:
    seen = look(measured(values), direction=direction, radius_token=1.0, radius_message_mean=1.0)
    assume(seen.q_gate > 0.0 and seen.message_mean > 0.0)

    def passed(token: float, message: float) -> bool:
        return look(measured(values), direction=direction, radius_token=token, radius_message_mean=message).passed

    assert passed(seen.q_gate, seen.message_mean)
    assert not passed(math.nextafter(seen.q_gate, 0.0) or 5e-324, 1.0)
    assert not passed(1.0, math.nextafter(seen.message_mean, 0.0) or 5e-324)


@pytest.mark.parametrize(("direction", "q"), [("max", 0.04), ("new_old", 0.01), ("old_new", 0.04)])
def test_the_gate_reads_the_direction_that_it_names(direction: Direction, q: float) -> None:
    record = look(measured([0.01, 0.0], [0.02, 0.04]), direction=direction)
    assert record.q_point == q and record.direction == direction
    assert record.message_sum == pytest.approx(0.03)  # always kl_old_new


def test_an_infinite_divergence_fails_whatever_the_radius() -> None:
    values = [0.001] * 999 + [math.inf]
    for radius in (0.05, math.inf):
        record = look(measured(values), radius_token=radius, radius_message_mean=radius)
        assert not record.passed
    assert record.q_point == 0.001 and record.message_mean == math.inf
    assert not look(measured([math.inf]), radius_token=math.inf, radius_message_mean=math.inf).passed
    fine = [0.001] * 1000
    assert look(measured(values, fine), direction="old_new", radius_token=math.inf).passed


def test_few_catastrophic_tokens_of_a_long_message_show_in_the_gate() -> None:
    """R10: 2 % of the states carry the whole change; the mean over the message alone would pass it."""
    values = [1e-4] * 980 + [0.4] * 20
    record = look(measured(values), units=[0] * 1000)
    assert record.message_mean < 0.01 and record.q_point == 0.4 and not record.passed


def test_the_message_mean_weighs_messages_and_not_tokens() -> None:
    record = look(measured([0.0] * 99 + [0.04]), units=[0] * 99 + [1])
    assert record.message_mean == pytest.approx(0.02)
    assert (record.n_states, record.n_units) == (100, 2) and not record.passed


@given(st.integers(1, 400), st.floats(0.001, 0.5))
def test_a_quantile_is_one_of_the_values_and_leaves_at_most_alpha_above(n: int, alpha: float) -> None:
    values = torch.randperm(n, generator=torch.Generator().manual_seed(n)).double()
    q = trust_region.quantile_point(values, alpha=alpha)
    assert q in values.tolist()
    above = int((values > q).sum())
    assert above <= alpha * n + 1e-9 and (q == 0.0 or above + 1 > alpha * n - 1e-6)


def test_a_quantile_rank_is_not_moved_by_rounding() -> None:
    hundred = torch.arange(1, 101).double()
    for percent in range(1, 100):
        assert trust_region.quantile_point(hundred, alpha=percent / 100) == 100 - percent


@pytest.mark.parametrize("n", [89, 90, 128, 300])
def test_the_bound_is_the_order_statistic_of_the_drawn_states_alone(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    d = torch.rand(4 * n, generator=generator, dtype=F64)
    units = [i % n for i in range(4 * n)]
    drawn = torch.arange(n) + n * torch.randint(4, (n,), generator=generator)
    record = look(measured(d.tolist()), units=units, drawn=drawn[torch.randperm(n)].tolist(), alpha=0.05)
    rank = trust_region.order_statistic_rank(n, level=0.95, confidence_miss=0.01)
    assert record.certified == (rank is not None) == (n >= 90)
    if rank is not None:
        assert record.q_ucb == torch.sort(d[drawn]).values[rank - 1].item()
        assert record.q_gate == max(record.q_point, record.q_ucb) and record.certifiable_level >= 0.95
    else:
        assert record.q_ucb is None and record.q_gate == record.q_point and record.certifiable_level < 0.95
    assert record.n_units == n


def test_a_gate_that_must_certify_names_the_prompts_it_needs() -> None:
    for alpha, looks, needed in ((0.01, 5, 459), (0.05, 5, 90), (0.01, 1, 299), (0.05, 1, 59)):
        with pytest.raises(ConfigError, match=f"need {needed} prompts"):
            look(measured([0.0] * 58), alpha=alpha, looks=looks, require_certified=True)
        assert look(measured([0.0] * needed), alpha=alpha, looks=looks, require_certified=True).certified


@given(st.integers(1, 300), st.floats(0.5, 0.999), st.floats(0.001, 0.3))
def test_the_rank_is_the_smallest_that_keeps_its_promise(n: int, level: float, miss: float) -> None:
    rank = trust_region.order_statistic_rank(n, level=level, confidence_miss=miss)
    if rank is None:
        assert stats.binom.cdf(n - 1, n, level) < 1 - miss
        return
    assert stats.binom.cdf(rank - 1, n, level) >= 1 - miss - 1e-12
    assert rank == 1 or stats.binom.cdf(rank - 2, n, level) < 1 - miss + 1e-12
    assert trust_region.certifiable_level(n, confidence_miss=miss) >= level - 1e-12


def test_t12_missing_nan_and_misshapen_monitor_inputs_are_errors() -> None:
    one = torch.tensor([0])
    with pytest.raises(MissingError):
        measured([])
    for column in ("kl_new_old", "kl_old_new"):
        values = {"kl_new_old": [0.0, 0.1], "kl_old_new": [0.0, 0.1]}
        values[column] = [0.0, math.nan]
        with pytest.raises(NonFiniteError, match=column):
            measured(values["kl_new_old"], values["kl_old_new"])
        values[column] = [0.0, -1e-3]
        with pytest.raises(NonFiniteError, match=column):
            measured(values["kl_new_old"], values["kl_old_new"])
    assert look(measured([-1e-6, 0.0])).passed  # rounding noise is kept, not an error
    with pytest.raises(MissingError):
        trust_region.quantile_point(torch.empty(0), alpha=0.01)
    with pytest.raises(NonFiniteError, match="value 1"):
        trust_region.quantile_point(torch.tensor([0.0, math.nan]), alpha=0.01)
    with pytest.raises(DataError, match=r"^message has shape \(3,\) for 2 states"):
        look(measured([0.0, 0.1]), units=[0, 0, 1], messages=[0, 0, 0], drawn=[0, 2])
    with pytest.raises((DataError, TypeCheckError)):
        look(measured([0.0, 0.1]), units=[0, 1], messages=[0])
    with pytest.raises((DataError, TypeCheckError)):
        trust_region.gate(
            measured([0.0]),
            message=one,
            unit=one,
            drawn=torch.tensor([[0]]),
            direction="max",
            alpha=0.01,
            eta=0.05,
            looks=5,
            radius_token=0.05,
            radius_message_mean=0.01,
        )
    with pytest.raises(MissingError, match="drawn"):
        look(measured([0.0, 0.1]), drawn=[])


@pytest.mark.parametrize("drawn", [[-1, 0], [0, 4], [0, 9]])
def test_a_drawn_state_is_one_of_the_states(drawn: list[int]) -> None:
    with pytest.raises(DataError, match="outside the 4 states"):
        look(measured([0.0] * 4), units=[0, 0, 1, 1], drawn=drawn)


@pytest.mark.parametrize("drawn", [[0], [0, 1], [0, 1, 2], [0, 2, 2]])
def test_siblings_never_count_as_independent(drawn: list[int]) -> None:
    with pytest.raises(DataError, match="draw"):
        look(measured([0.0] * 4), units=[0, 0, 1, 1], drawn=drawn)
    assert look(measured([0.0] * 4), units=[0, 0, 1, 1], drawn=[3, 1]).n_units == 2


@pytest.mark.parametrize(
    "change",
    [
        {"radius_token": 0.0},
        {"radius_token": math.nan},
        {"radius_message_mean": -1.0},
        {"alpha": 0.0},
        {"alpha": 1.0},
        {"eta": 0.0},
        {"eta": 1.0},
        {"looks": 0},
        {"scale": 0.0},
        {"scale": 1.01},
    ],
)
def test_a_gate_without_a_meaning_is_refused_by_name(change: dict[str, float]) -> None:
    (name,) = change
    with pytest.raises(ConfigError, match=rf"^{name} "):
        look(measured([0.0]), **change)  # type: ignore[arg-type]


# ---- T19: the unit of a quantile is the prompt -------------------------------------------------------------


def sibling_values(
    rng: np.random.Generator, runs: int, prompts: int, siblings: int, correlation: float
) -> npt.NDArray[np.float64]:
    """Standard normal values [runs, prompts, siblings]; siblings of a prompt correlate, prompts do not."""
    common = rng.standard_normal((runs, prompts, 1))
    own = rng.standard_normal((runs, prompts, siblings))
    return math.sqrt(correlation) * common + math.sqrt(1.0 - correlation) * own


def miss_rate(values: npt.NDArray[np.float64], level: float, miss: float) -> float:
    """Share of runs [runs, units] whose order-statistic bound lies below the true quantile."""
    rank = trust_region.order_statistic_rank(values.shape[1], level=level, confidence_miss=miss)
    assert rank is not None
    bound = np.partition(values, rank - 1, axis=1)[:, rank - 1]
    return float((bound < stats.norm.ppf(level)).mean())


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8, 0.9, 0.95, 1.0])
@pytest.mark.parametrize(("prompts", "miss"), [(90, 0.01), (128, 0.05)])
def test_t19_one_state_per_prompt_keeps_the_promised_miss_rate(prompts: int, miss: float, correlation: float) -> None:
    runs = 8000
    rng = np.random.default_rng(19)
    values = sibling_values(rng, runs, prompts, 4, correlation)
    picked = rng.integers(4, size=(runs, prompts, 1))
    one_each = np.take_along_axis(values, picked, axis=2)[:, :, 0]
    error = math.sqrt(miss * (1.0 - miss) / runs)
    assert miss_rate(one_each, 0.95, miss) <= miss + 3.0 * error


def test_t19_counting_siblings_breaks_the_promise() -> None:
    """The check has power: at correlation .9 the bound misses more than three times as often as it says."""
    rng = np.random.default_rng(19)
    for prompts, level, miss in ((23, 0.95, 0.01), (115, 0.99, 0.01)):
        values = sibling_values(rng, 4000, prompts, 4, 0.9)
        assert miss_rate(values.reshape(4000, -1), level, miss) > 3.0 * miss


# ---- T17: the speed limit ----------------------------------------------------------------------------------


def random_laws(rng: np.random.Generator, n: int, tokens: int) -> npt.NDArray[np.float64]:
    """Laws from nearly uniform to nearly deterministic."""
    logits = rng.standard_normal((n, tokens)) * np.exp(rng.uniform(-4.0, 2.0, (n, 1)))
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("tokens", [2, 6])
def test_t17_the_larger_divergence_is_at_least_half_the_squared_length(tokens: int) -> None:
    rng = np.random.default_rng(17)
    p, q = random_laws(rng, 50_000, tokens), random_laws(rng, 50_000, tokens)
    near = rng.random(50_000) < 0.5  # half of the pairs close to each other, where the bound is tight
    q[near] = 0.98 * p[near] + 0.02 * q[near]
    new_old, old_new = (kl.numpy() for kl in divergence.exact(torch.tensor(p).log(), torch.tensor(q).log()))
    larger = np.maximum(new_old, old_new)
    # The answer is the first token: coarse-graining to it only shortens the way.
    way = 2.0 * np.abs(np.arcsin(np.sqrt(p[:, 0])) - np.arcsin(np.sqrt(q[:, 0])))
    assert np.all(larger >= way**2 / 2.0 - 1e-12)
    for i in range(100):
        assert trust_region.fisher_rao(p[i, 0], q[i, 0]) == pytest.approx(way[i], abs=1e-12)
    whole = 2.0 * np.arccos(np.minimum(1.0, np.sqrt(p * q).sum(axis=1)))
    # arccos near 1 has an error of 1e-8, not of the last digit.
    assert np.all(larger >= (np.maximum(0.0, whole - 1e-7)) ** 2 / 2.0)
    # Power: one direction alone does break it.
    assert np.any(new_old < way**2 / 2.0 - 1e-3)


PROBABILITY = st.floats(0.01, 0.99)


@given(PROBABILITY, PROBABILITY, st.sampled_from([0.01, 0.05, 0.5]))
def test_no_run_is_faster_than_the_speed_limit(p0: float, p1: float, delta: float) -> None:
    steps = trust_region.greedy_exact_steps(p0, p1, delta=delta)
    assert steps >= trust_region.speed_limit(p0, p1, delta=delta) - 1e-9
    assert (steps == 0) == (p0 == p1)
    assert steps == trust_region.greedy_exact_steps(1.0 - p0, 1.0 - p1, delta=delta) or abs(p0 - p1) < 1e-9


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_greedy_step_goes_to_the_radius_and_not_beyond(direction: Direction) -> None:
    old = divergence.log_law(torch.tensor([[0.2, 0.8]], dtype=F64).log(), temperature=1.0)

    def d(p: float) -> float:
        new = torch.tensor([[p, 1.0 - p]], dtype=F64).log()
        kls = [kl.item() for kl in divergence.exact(new, old)]
        return {"max": max(kls), "new_old": kls[0], "old_new": kls[1]}[direction]

    for p1 in (0.21, 0.3, 0.4, 0.5):
        steps = trust_region.greedy_exact_steps(0.2, p1, delta=0.05, direction=direction)
        assert (steps == 1) == (d(p1) <= 0.05)


# ---- after the judgement -----------------------------------------------------------------------------------


@given(st.floats(1e-3, 10.0), st.sampled_from([(True, False), (False, True), (False, False)]))
def test_a_penalty_stays_in_its_bounds_and_moves_as_told(beta: float, flags: tuple[bool, bool]) -> None:
    failed, relaxed = flags
    after = trust_region.next_penalty(beta, full_step_failed=failed, relaxed=relaxed)
    assert 1e-3 <= after <= 10.0
    assert (after >= beta) if failed else (after <= beta)
    assert failed or relaxed or after == beta


def test_the_learning_rate_halves_on_the_radius_only_and_returns() -> None:
    def after(lr: float, *, accepted: bool, reason: str | None) -> float:
        return trust_region.next_lr(lr, configured=1e-3, accepted=accepted, reason=reason)  # type: ignore[arg-type]

    assert after(1e-3, accepted=False, reason="radius") == 5e-4
    assert after(2.5e-4, accepted=True, reason=None) == 5e-4
    assert after(8e-4, accepted=True, reason=None) == 1e-3
    for reason in ("harm", "non_finite", "no_signal", "not_published"):
        assert after(5e-4, accepted=False, reason=reason) == 5e-4


@pytest.mark.parametrize(
    "make",
    [
        lambda: trust_region.next_penalty(0.0, full_step_failed=True, relaxed=False),
        lambda: trust_region.next_penalty(1.0, full_step_failed=True, relaxed=False, low=0.0),
        lambda: trust_region.next_penalty(11.0, full_step_failed=True, relaxed=False),
        lambda: trust_region.next_penalty(math.nan, full_step_failed=True, relaxed=False),
        lambda: trust_region.next_penalty(1.0, full_step_failed=True, relaxed=True),
        lambda: trust_region.next_lr(1e-3, configured=1e-4, accepted=True, reason=None),
        lambda: trust_region.next_lr(0.0, configured=1e-4, accepted=True, reason=None),
        lambda: trust_region.next_lr(1e-3, configured=1e-3, accepted=True, reason="radius"),
        lambda: trust_region.next_lr(1e-3, configured=1e-3, accepted=False, reason=None),
        lambda: trust_region.line_search_scales(-1),
        lambda: trust_region.fisher_rao(-0.1, 0.5),
        lambda: trust_region.speed_limit(0.1, 0.5, delta=0.0),
        lambda: trust_region.fisher_rao(0.5, 1.05),
        *(lambda p=p: trust_region.greedy_exact_steps(0.1, p, delta=0.05) for p in (0.0, 1.0, 1.05)),
        *(lambda p=p: trust_region.greedy_exact_steps(p, 0.1, delta=0.05) for p in (0.0, 1.0, 1.05)),
        lambda: trust_region.greedy_exact_steps(0.1, 0.5, delta=0.0),
        lambda: trust_region.order_statistic_rank(0, level=0.9, confidence_miss=0.1),
        lambda: trust_region.order_statistic_rank(9, level=0.0, confidence_miss=0.1),
        lambda: trust_region.certifiable_level(10, confidence_miss=0.0),
        lambda: trust_region.certifiable_level(0, confidence_miss=0.1),
        lambda: trust_region.units_needed(level=1.0, confidence_miss=0.1),
        lambda: trust_region.units_needed(level=0.9, confidence_miss=1.05),
        *(lambda c=c: trust_region.clopper_pearson_upper(0, 9, confidence=c) for c in (0.0, 1.0, 1.05)),
        *(lambda a=a: trust_region.quantile_point(torch.ones(3), alpha=a) for a in (0.0, 1.0)),
        lambda: trust_region.clopper_pearson_upper(3, 2),
        lambda: trust_region.clopper_pearson_upper(0, 0),
        lambda: certificate.published([], []),
        lambda: certificate.published([0.1], [1, 2]),
        lambda: certificate.published([0.1], [0]),
        lambda: certificate.published([math.inf], [10]),
        lambda: certificate.published([-0.1], [10]),
        lambda: certificate.published([0.1], [10], gamma=1.0),
        lambda: certificate.published([0.1], [10], a_max=0.0),
        lambda: certificate.published([0.1], [10], delta_conf=0.0),
        lambda: certificate.published([0.1], [10], delta_conf=1.0),
        lambda: certificate.published([0.1], [10], delta_conf=1.05),
        lambda: certificate.published([0.1], [10], kappas=[math.nan]),
        lambda: certificate.published([0.1], [10], gamma=-0.1),
        lambda: certificate.occupancy_penalty_printed(-0.1, gamma=0.9, a_max=1.0),
        lambda: certificate.occupancy_penalty_trpo(-0.1, gamma=0.9, a_max=1.0),
        lambda: certificate.message_bound_amax(0, 0.1, 1.0),
        lambda: certificate.message_bound_amax(2, -0.1, 1.0),
        lambda: certificate.message_bound_span(0, 0.1, 1.0),
        lambda: certificate.message_bound_mean([-0.1], 1.0),
        lambda: certificate.message_bound_mixed([1.05], 0.1, 1.0),
        lambda: certificate.message_bound_mixed([], 0.1, 1.0),
        lambda: certificate.message_bound_span(2, -0.1, 1.0),
        lambda: certificate.message_bound_mean([1.5], 1.0),
        lambda: certificate.message_bound_mean([], 1.0),
        lambda: certificate.alpha_from_kl(math.nan),
        lambda: certificate.dkw_epsilon(0, eta=0.05),
        lambda: scores.avg_at_n(torch.empty(0, 3)),
        lambda: scores.avg_at_n(torch.tensor([[1.0, math.nan]])),
        lambda: scores.pass_at_k(3, 1, 4),
        lambda: scores.pass_at_k(3, 4, 1),
        lambda: scores.pass_at_k_mean(torch.tensor([[0.5, 1.0]]), 1),
        lambda: scores.maj_at_k([], bool),
        lambda: scores.mean_interval([]),
        lambda: scores.mean_interval([0.5]),
        lambda: scores.mean_interval([0.5, math.nan]),
        lambda: scores.mean_interval([0.5, 0.4], confidence=1.0),
        lambda: scores.mean_interval([0.5, 0.4], confidence=0.0),
        lambda: scores.pass_at_k_mean(torch.empty(0, 3), 1),
        lambda: scores.paired_interval([0.5, math.inf], [0.5, 0.4]),
        lambda: scores.paired_interval([1.0, 0.0], [1.0]),
        lambda: scores.paired_interval([1.0], [1.0]),
    ],
)
def test_what_has_no_answer_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(BatonError):
        make()


def test_the_trust_region_at_the_ends_of_its_ranges() -> None:
    # One draw is above the median half of the time, which is what a miss rate of a half allows.
    assert trust_region.order_statistic_rank(1, level=0.5, confidence_miss=0.5) == 1
    assert trust_region.units_needed(level=0.5, confidence_miss=0.6) == 1
    assert trust_region.next_penalty(10.0, full_step_failed=True, relaxed=False) == 10.0
    assert trust_region.shrinkage(2.0, 0.0, 0.5) == (0.0, 0.5, 0.0)
    assert trust_region.fisher_rao(0.0, 1.0) == pytest.approx(math.pi, rel=1e-12)
    assert trust_region.greedy_exact_steps(0.3, 0.3, delta=0.05) == 0


def test_a_radius_below_the_smallest_step_is_refused_and_not_tried_for_ever() -> None:
    with pytest.raises(ConfigError, match=r"no step of double precision fits inside it at probability 0\.5"):
        trust_region.greedy_exact_steps(0.5, 0.9, delta=1e-40)
    for delta in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match=rf"^radius {delta}: need a number of nats > 0$"):
            trust_region.greedy_exact_steps(0.1, 0.5, delta=delta)


def test_a_step_that_just_reaches_the_target_is_the_last_one() -> None:
    delta = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    for radius, steps in ((delta, 1), (math.nextafter(delta, 0.0), 2)):
        assert trust_region.greedy_exact_steps(0.5, 0.75, delta=radius, direction="new_old") == steps


# ---- certificate -------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.floats(0, 2), st.integers(1, 10_000), st.floats(0, 5), st.floats(0, 5), st.floats(0, 1)),
        min_size=1,
        max_size=4,
    ),
    st.floats(0.0, 0.99),
)
def test_the_terms_of_a_certificate_sum_to_its_bound(
    steps: list[tuple[float, int, float, float, float]], gamma: float
) -> None:
    deltas, n, kappas, curvatures, zetas = (list(column) for column in zip(*steps, strict=True))
    result = certificate.published(deltas, n, gamma=gamma, kappas=kappas, curvatures=curvatures, zetas=zetas)
    assert result.lower_bound == pytest.approx(math.fsum(term.value for term in result.terms), rel=1e-12)
    assert result.is_vacuous == (result.lower_bound <= 0.0)
    assert (result.verdict, result.reason, result.n) == ("void", "assumed_term", min(n))
    assert result.confidence == 0.95
    basis = {term.name: term.basis for term in result.terms}
    assert basis == {
        "gain": "measured",
        "curvature": "measured",
        "occupancy": "assumed",
        "bias": "measured",
        "sample": "assumed",
    }
    assert not any(term.note for term in result.terms if term.basis == "measured")
    values = {term.name: term.value for term in result.terms}
    assert values["gain"] == pytest.approx(sum(k * math.sqrt(d) for k, d in zip(kappas, deltas, strict=True)))
    assert values["curvature"] == pytest.approx(-sum(a * d for a, d in zip(curvatures, deltas, strict=True)))
    assert values["bias"] == pytest.approx(-sum(zetas) / (1 - gamma))


@pytest.mark.parametrize("name", ["deltas", "n_episodes", "kappas", "curvatures", "zetas"])
def test_a_certificate_names_the_input_and_the_step_that_it_cannot_use(name: str) -> None:
    inputs: dict[str, Sequence[float]] = {"deltas": [0.1, 0.2], "n_episodes": [9, 8]}
    if name != "n_episodes":  # a whole number is finite
        with pytest.raises(NonFiniteError, match=rf"^{name}\[1\] is inf"):
            certificate.published(**inputs | {name: [1.0, math.inf]})  # type: ignore[arg-type]
    if name == "n_episodes":
        with pytest.raises(DataError, match=r"^a step of 0 episodes"):
            certificate.published([0.1, 0.2], [9, 0])
    if name == "deltas":
        with pytest.raises(ConfigError, match=r"^radius -0\.2: "):
            certificate.published([0.1, -0.2], [9, 8])
    if name != "deltas":
        three = [1, 2, 3] if name == "n_episodes" else [1.0, 2.0, 3.0]
        with pytest.raises(DataError, match=f"^3 {name} for 2 deltas"):
            certificate.published(**inputs | {name: three})  # type: ignore[arg-type]


def test_a_certificate_with_an_assumed_term_cannot_be_positive() -> None:
    def build(bound: float, *bases: certificate.Basis) -> certificate.Certificate:
        return certificate.Certificate(
            kind="measured",
            terms=tuple(certificate.Term(name="gain", value=bound, basis=basis) for basis in bases),
            lower_bound=bound,
            is_vacuous=bound <= 0,
            verdict="positive",
            reason="",
            n=256,
            confidence=0.95,
        )

    assert build(0.1, "measured").verdict == "positive"
    for bound, *bases in ((0.0, "measured"), (0.1, "assumed"), (0.1, "measured", "assumed")):
        with pytest.raises(DataError, match="cannot be positive"):
            build(bound, *bases)


def test_an_agent_that_speaks_once_needs_no_divergence_term() -> None:
    assert certificate.message_bound_amax(1, 0.5, 1.0) == certificate.message_bound_span(1, 0.5, 1.0) == 0.0
    assert certificate.message_bound_mean([0.4], 1.0) == certificate.message_bound_mixed([0.4], 0.3, 1.0) == 0.0


def test_a_bound_of_exactly_zero_is_vacuous() -> None:
    cost = -certificate.published([1.0], [10], gamma=0.0).lower_bound
    result = certificate.published([1.0], [10], gamma=0.0, kappas=[cost])
    assert cost > 0.0 and result.lower_bound == 0.0 and result.is_vacuous


def test_a_mean_variation_that_is_none_is_refused_by_its_turn() -> None:
    with pytest.raises(DataError, match=r"^abar of own turn 2 is 1\.5"):
        certificate.message_bound_mean([0.5, 1.5], 1.0)


def test_the_ends_of_a_mean_variation_and_no_divergence_at_all_are_allowed() -> None:
    assert certificate.message_bound_mean([0.0, 1.0], 1.0) == 0.0 and certificate.message_bound_mean([1.0, 0.0], 1.0) == 2.0
    assert (
        certificate.message_bound_amax(2, 0.0, 1.0) == certificate.occupancy_penalty_trpo(0.0, gamma=0.0, a_max=1.0) == 0.0
    )


def test_message_bounds_at_the_values_of_the_specification() -> None:
    assert [certificate.message_bound_amax(m, 0.01, 1.0) for m in (1, 2, 3, 4)] == pytest.approx([0, 0.02, 0.06, 0.12])
    assert [certificate.message_bound_span(m, 0.01, 1.0) for m in (1, 2, 3, 4)] == pytest.approx([0, 0.01, 0.03, 0.06])
    assert certificate.message_bound_mean([0.15, 0.9], 1.0) == pytest.approx(0.30)
    assert certificate.message_bound_mixed([0.1, 0.2, 0.9], 0.5, 2.0) == pytest.approx(2 * 2.0 * 0.5 * (2 * 0.1 + 0.2))


@given(st.floats(0.0, 50.0))
def test_the_distance_that_a_kl_allows_is_the_smaller_of_two_bounds(delta: float) -> None:
    alpha = certificate.alpha_from_kl(delta)
    assert 0.0 <= alpha <= 1.0
    assert alpha == pytest.approx(min(math.sqrt(delta / 2), math.sqrt(1 - math.exp(-delta))), abs=1e-8)


# ---- scores ------------------------------------------------------------------------------------------------


def test_average_and_pass_are_means_over_prompts() -> None:
    correct = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    assert scores.avg_at_n(correct) == 0.5
    assert scores.pass_at_k_mean(correct, 1) == 0.5
    assert scores.pass_at_k_mean(correct, 2) == pytest.approx((0.5 + 1.0) / 2)
    assert scores.pass_at_k_mean(correct, 4) == 1.0


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = [bits for bits in range(2**n) if bits.bit_count() == k]
    hit = sum((bits & (2**c - 1)) > 0 for bits in subsets)
    assert scores.pass_at_k(n, c, k) == pytest.approx(hit / len(subsets), abs=1e-12)


@pytest.mark.parametrize(
    ("answers", "score"),
    [
        (["7", "7", "3"], 1.0),
        (["3", "3", "7"], 0.0),
        (["7", "3"], 0.5),
        (["7", "3", "4"], 1 / 3),
        (["7", None, None], 1.0),
        ([None, None], 0.0),
    ],
)
def test_a_tie_scores_the_share_of_right_answers_among_the_tied(answers: list[str | None], score: float) -> None:
    assert scores.maj_at_k(answers, lambda answer: answer == "7") == pytest.approx(score)


def test_proportions_have_wilson_intervals_and_other_means_students() -> None:
    share = scores.mean_interval([1.0] * 5 + [0.0] * 15)
    reference = stats.binomtest(5, 20).proportion_ci(method="wilson")
    assert (share.value, share.n, share.method) == (0.25, 20, "wilson")
    assert (share.low, share.high) == pytest.approx((reference.low, reference.high), abs=1e-9)
    for value in (0.0, 1.0):
        edge = scores.mean_interval([value] * 8)
        assert edge.low <= value <= edge.high and edge.high - edge.low > 0.2
    values = [0.25, 0.5, 1.0, 0.0, 0.75]
    mean = scores.mean_interval(values, confidence=0.9)
    low, high = stats.t.interval(0.9, 4, loc=np.mean(values), scale=stats.sem(values))
    assert (mean.low, mean.high) == pytest.approx((low, high)) and mean.method == "student"


def test_the_average_of_float32_scores_is_taken_in_double_precision() -> None:
    correct = torch.tensor([[1.0] * 999 + [1.0 + 2.0**-20]])
    assert scores.avg_at_n(correct) == pytest.approx(1.0 + 2.0**-20 / 1000, abs=1e-14)


def test_an_interval_of_a_share_ends_at_0_and_at_1() -> None:
    for n in range(1, 60):
        assert scores.mean_interval([1.0] * n).high == 1.0 and scores.mean_interval([0.0] * n).low == 0.0


def test_a_paired_interval_is_about_the_differences() -> None:
    before = [0.1, 0.9, 0.4, 0.6]
    after = [0.2, 1.0, 0.5, 0.75]
    interval = scores.paired_interval(after, before)
    assert interval.value == pytest.approx(0.1125) and interval.n == 4 and interval.method == "student_paired"
    assert 0.0 < interval.low < 0.1125 < interval.high  # the spread between prompts does not enter


@settings(max_examples=20)
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=10), st.floats(0.5, 0.98))
def test_a_higher_confidence_is_a_wider_interval(values: list[float], confidence: float) -> None:
    narrow = scores.mean_interval(values, confidence=confidence)
    wide = scores.mean_interval(values, confidence=0.99)
    assert wide.low <= narrow.low <= narrow.value <= narrow.high <= wide.high
