"""The fast functions of `baton.core` against their slow twins, on drawn shapes, masks and extremes.

Values agree to 1e-9 in float64 and 1e-5 in float32, relative to the size of what was added up (at least 1).
Gradients of every loss agree with central differences of the twin's surrogate, detached weights held fixed.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from baton.core import advantages, batching, certificate, divergence, losses, scores, trust_region
from baton.errors import BatonError, ConfigError, DataError, MissingError, NonFiniteError, StaleAdvantagesError
from baton.types import AdvantageBatch, Episode, Scored, TokenBatch, TokenDivergence, Trajectory, Turn
from reference import advantages as slow_advantages
from reference import batching as slow_batching
from reference import certificate as slow_certificate
from reference import divergence as slow_divergence
from reference import losses as slow_losses
from reference import scores as slow_scores
from reference import trust_region as slow_region

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
STEP = 1e-5
"""Of the central differences: their own error is STEP^2, below what is asked of a gradient."""

both_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
JUNK = st.sampled_from([-math.inf, math.inf, math.nan, 1e30, -1e10, 0.0])


def close(fast: float, slow: float, *, tol: float = 1e-9, scale: float = 1.0) -> bool:
    """Equal within `tol` of the larger of 1 and `scale`; infinities and NaN equal only their like."""
    if math.isnan(slow) or math.isnan(fast):
        return math.isnan(slow) and math.isnan(fast)
    if math.isinf(slow) or math.isinf(fast):
        return slow == fast
    return abs(fast - slow) <= tol * max(1.0, abs(slow), scale)


def all_close(fast: Tensor, slow: Sequence[float], *, tol: float = 1e-9) -> bool:
    values = fast.detach().double().tolist()
    return len(values) == len(slow) and all(close(f, s, tol=tol) for f, s in zip(values, slow, strict=True))


def table(tensor: Tensor) -> list[list[float]]:
    return tensor.detach().double().tolist()


# ---- the twins themselves, against the published vectors ----------------------------------------------


def test_the_slow_twins_reproduce_the_test_vectors() -> None:
    logp = [[-1.0, -1.1, -1.2, -1.3]]
    ratios = [0.7, 0.8, 2.0, 6.0]
    behavior = [[lp - math.log(r) for lp, r in zip(logp[0], ratios, strict=True)]]
    g1 = slow_losses.dis(logp, behavior, [[1.0] * 4], [[True] * 4], low=0.7000001, high=5.9999999, denominator=4.0)
    assert close(g1.total, (0.8 * 1.1 + 2.0 * 1.2) / 4.0)
    assert g1.counts == {"kept": 2, "rejected_low": 1, "rejected_high": 1, "clamped": 0}
    for r, a, term in ((1.5, 1.0, 1.2), (1.5, -1.0, -1.5), (0.5, 1.0, 0.5), (0.5, -1.0, -0.8)):
        g17 = slow_losses.sequence([[math.log(r)]], [[0.0]], [[a]], [[True]], episode=[0], clip=0.2, denominator=1.0)
        assert close(g17.total, -term)

    g6 = slow_advantages.group([1.0, 0.0, 0.0, 0.0, 2.0, 2.0], list("aaaabb"), clip=5.0, eps=1e-8)
    assert [round(x, 6) for x in g6[0]] == [1.732051, -0.57735, -0.57735, -0.57735, 0.0, 0.0]
    assert g6[1:] == (2, 1)
    assert all(map(close, slow_advantages.loo([1.0, 0.0, 0.0, 0.0], list("aaaa")), [1.0, -1 / 3, -1 / 3, -1 / 3]))
    for p, g4, g8 in ((0.1, 0.3438, 0.5695328), (0.15, 0.4774875, 0.7275092)):
        assert close(slow_advantages.informative_share(p, 4), g4, tol=1e-7)
        assert close(slow_advantages.informative_share(p, 8), g8, tol=1e-7)

    old, new = [math.log(0.5)] * 2, [math.log(0.9), math.log(0.1)]
    assert close(slow_divergence.kl(new, old), 0.3680642, tol=1e-7)
    assert close(slow_divergence.kl(old, new), 0.5108256, tol=1e-7)
    assert close(slow_divergence.total_variation(old, new), 0.4)
    for t, new_old, old_new in ((1.0, 0.1109441, 0.1201145), (0.5, 0.3278133, 0.4337808)):
        current = slow_divergence.log_law([0.0, 0.0], temperature=t, forbidden=None)
        candidate = slow_divergence.log_law([1.0, 0.0], temperature=t, forbidden=None)
        assert close(slow_divergence.kl(candidate, current), new_old, tol=1e-7)
        assert close(slow_divergence.kl(current, candidate), old_new, tol=1e-7)

    rank = slow_region.order_statistic_rank
    single = {(59, 0.95): 59, (128, 0.95): 126, (299, 0.99): 299, (512, 0.99): 511, (1000, 0.99): 996}
    single |= {(2000, 0.99): 1988, (5000, 0.99): 4962, (58, 0.95): None, (298, 0.99): None}
    assert {case: rank(case[0], level=case[1], miss=0.05)[0] for case in single} == single
    five = {(64, 0.95): None, (89, 0.95): None, (90, 0.95): 90, (128, 0.95): 128, (458, 0.99): None}
    five |= {(459, 0.99): 459, (1000, 0.99): 998}
    assert {case: rank(case[0], level=case[1], miss=0.01)[0] for case in five} == five
    assert close(slow_region.certifiable_level(64, miss=0.01), 0.9305720, tol=1e-7)
    g24 = {(0, 128): 0.0231324, (0, 299): 0.0099691, (1, 299): 0.0157668, (1, 512): 0.0092316}
    g24 |= {(5, 512): 0.0204229, (3, 1000): 0.0077352}
    for (k, n), p in g24.items():
        assert close(slow_region.clopper_pearson_upper(k, n, confidence=0.95), p, tol=1e-7)
    assert close(slow_region.fisher_rao(0.1, 0.98), 2.2142974, tol=1e-7)
    steps = [slow_region.greedy_exact_steps(0.1, 0.98, delta=d, direction="max") for d in (0.05, 0.01, 0.5)]
    assert steps == [8, 16, 3]

    g33 = {0.05: -47062.387, 0.01: -21103.635, 0.001: -6743.686, 0.0: -102.564}
    for delta, bound in g33.items():
        zeros = [0.0] * 3
        got, _ = slow_certificate.published(
            [delta] * 3, [512] * 3, gamma=0.99, a_max=5.0, delta_conf=0.05,
            kappas=zeros, curvatures=zeros, zetas=zeros,
        )  # fmt: skip
        assert abs(got - bound) < 1e-3
    assert [round(slow_certificate.alpha_from_kl(d), 7) for d in (0.01, 1.0, 1.6, 2.0)] == [
        0.0707107, 0.7071068, 0.8933664, 0.9298735,
    ]  # fmt: skip
    assert [slow_certificate.zero_violation_n(a, confidence=0.95)[0] for a in (0.01, 0.05)] == [299, 59]
    assert slow_certificate.dkw_n_is_smallest(18445, 0.01, eta=0.05)
    assert close(slow_certificate.discount_at(0.99, 32768) / 9.42e-144, 1.0, tol=1e-3)

    # Textbook quantiles: t of 1, 2, 5 and 30 degrees of freedom, z, and Wilson's interval of 8 in 10.
    quantiles = [slow_scores.student_quantile(0.95, dof) for dof in (1, 2, 5, 30)]
    assert [round(q, 4) for q in quantiles] == [12.7062, 4.3027, 2.5706, 2.0423]
    assert close(slow_scores.normal_quantile(0.95), 1.959963984540054)
    low, high = slow_scores.wilson([1.0] * 8 + [0.0] * 2, confidence=0.95)
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)


# ---- losses -------------------------------------------------------------------------------------------


@dataclass
class Case:
    """Rows of float64 with junk under the mask; `episode` numbers the rows."""

    new: Tensor
    old: Tensor
    adv: Tensor
    mask: Tensor
    episode: Tensor
    denominator: float

    def to(self, dtype: torch.dtype) -> Case:
        return Case(
            self.new.to(dtype),
            self.old.to(dtype),
            self.adv.to(dtype),
            self.mask,
            self.episode,
            self.denominator,
        )

    def slow(self) -> tuple[list[list[float]], list[list[float]], list[list[float]], list[list[bool]]]:
        """What the twin reads: the numbers as this dtype holds them."""
        return table(self.new), table(self.old), table(self.adv), self.mask.tolist()

    def exponents(self) -> list[float]:
        """Log-ratio of every action token."""
        return (self.new - self.old)[self.mask].double().tolist()


ADVANTAGES = st.one_of(st.sampled_from([0.0, 5.0, -5.0, 1.0, -1.0]), st.floats(-5.0, 5.0))


@st.composite
def cases(draw: st.DrawFn, *, calm: bool = False, per_token: bool = True, trainable_rows: bool = False) -> Case:
    """`calm`: log-ratios within 1.5; otherwise both log-probabilities lie anywhere in [-60, 0]."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(2 if trainable_rows else 1, 5))
    mask = torch.tensor(
        draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=rows, max_size=rows))
    )
    if trainable_rows:
        mask[:, 0] = False
        for b in range(rows):
            mask[b, draw(st.integers(1, width - 1))] = True
    episode, current = [], 0
    for b in range(rows):
        current += int(b > 0 and draw(st.booleans()))
        episode.append(current)
    per_episode = [draw(ADVANTAGES) for _ in range(current + 1)]
    new, old, adv = (torch.zeros(rows, width, dtype=torch.float64) for _ in range(3))
    for b in range(rows):
        for t in range(width):
            if bool(mask[b, t]):
                p = draw(st.floats(-4.0, 0.0) if calm else st.floats(-60.0, 0.0))
                q = p + draw(st.floats(-1.5, 1.5)) if calm else draw(st.floats(-60.0, 0.0))
                old[b, t], new[b, t] = p, q
                adv[b, t] = draw(ADVANTAGES) if per_token else per_episode[episode[b]]
            else:
                new[b, t], old[b, t], adv[b, t] = draw(JUNK), draw(JUNK), draw(JUNK)
    return Case(new, old, adv, mask, torch.tensor(episode), draw(st.sampled_from([1.0, 3.0, 17.0])))


@st.composite
def bands(draw: st.DrawFn) -> losses.Band:
    named = st.sampled_from([losses.TIGHT, losses.REASONING, losses.CODING])
    free = st.builds(losses.Band, low=st.floats(0.05, 0.95), high=st.floats(1.05, 10.0))
    return draw(st.one_of(named, free))


CLIPS = st.sampled_from([0.2, 0.1, 0.5])


def off_kinks(exponents: Sequence[float], *edges: float) -> bool:
    """No exponent within float32 rounding or a difference step of where the weight jumps or bends."""
    bends = [math.log(edge) for edge in edges] + [slow_losses.BOUND]
    return all(abs(x - bend) > 1e-3 for x in exponents for bend in bends)


def check_value(term: losses.LossTerm, slow: slow_losses.Slow, dtype: torch.dtype) -> None:
    assert close(float(term.total), slow.total, tol=TOLERANCE[dtype], scale=slow.scale), (term.total, slow)
    for name, count in slow.counts.items():
        assert term.diagnostics[name] == count, (name, term.diagnostics, slow.counts)


def check_gradient(
    loss: Callable[[Tensor], Tensor], surrogate: Callable[[list[list[float]]], slow_losses.Slow], case: Case
) -> None:
    """Autograd of `loss` against central differences of `surrogate`, by entry; exactly 0 under the mask."""
    new = case.new.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(new), new)
    assert bool(torch.isfinite(gradient).all()), "a masked entry reached the gradient"
    assert bool((gradient[~case.mask] == 0.0).all())
    for b, t in case.mask.nonzero().tolist():
        moved = table(case.new)
        moved[b][t] += STEP
        up = surrogate(moved).terms
        moved[b][t] -= 2.0 * STEP
        down = surrogate(moved).terms
        # Term by term, so that what this entry does not touch cancels exactly, however large it is.
        slope = math.fsum(u - d for u, d in zip(up, down, strict=True)) / (2.0 * STEP)
        assert close(float(gradient[b, t]), slope, tol=1e-6), (b, t, slope, gradient)


@both_dtypes
@given(case=cases())
def test_log_ratio_is_the_difference_under_the_mask_and_zero_elsewhere(dtype: torch.dtype, case: Case) -> None:
    case = case.to(dtype)
    new, old, _, mask = case.slow()
    fast = losses.log_ratio(case.new, case.old, case.mask)
    for fast_row, slow_row in zip(table(fast), slow_losses.log_ratio(new, old, mask), strict=True):
        assert all(close(f, s, tol=TOLERANCE[dtype]) for f, s in zip(fast_row, slow_row, strict=True))


@given(st.lists(st.one_of(st.floats(-800.0, 800.0), st.just(math.nan)), min_size=1, max_size=6))
@example([20.0, 21.0, 60.0, 200.0, -200.0, math.nan])
def test_safe_exp_is_exp_up_to_its_bound_and_counts_what_it_bounded(xs: list[float]) -> None:
    assert losses.LOG_RATIO_BOUND == slow_losses.BOUND
    value, bounded = losses.safe_exp(torch.tensor(xs, dtype=torch.float64))
    slow = [slow_losses.exp_bounded(x) for x in xs]
    assert all_close(value, [s for s, _ in slow])
    assert int(bounded) == sum(hit for _, hit in slow)


@both_dtypes
@given(case=cases(), band=bands())
def test_dis_agrees_with_its_twin(dtype: torch.dtype, case: Case, band: losses.Band) -> None:
    case = case.to(dtype)
    assume(off_kinks(case.exponents(), band.low, band.high))
    fast = losses.dis(case.new, case.old, case.adv, case.mask, band=band, denominator=case.denominator)
    slow = slow_losses.dis(*case.slow(), low=band.low, high=band.high, denominator=case.denominator)
    check_value(fast, slow, dtype)


@pytest.mark.parametrize("calm", [True, False])
@given(data=st.data(), band=bands())
def test_dis_has_the_gradient_of_its_surrogate(calm: bool, data: st.DataObject, band: losses.Band) -> None:
    case = data.draw(cases(calm=calm))
    assume(off_kinks(case.exponents(), band.low, band.high))
    new, old, adv, mask = case.slow()
    check_gradient(
        lambda x: losses.dis(x, case.old, case.adv, case.mask, band=band, denominator=case.denominator).total,
        lambda rows: slow_losses.dis(
            rows, old, adv, mask, low=band.low, high=band.high, denominator=case.denominator, weights_at=new
        ),
        case,
    )


@both_dtypes
@given(case=cases(), clip=CLIPS)
def test_ppo_agrees_with_its_twin(dtype: torch.dtype, case: Case, clip: float) -> None:
    case = case.to(dtype)
    assume(off_kinks(case.exponents(), 1.0 - clip, 1.0 + clip))
    fast = losses.ppo(case.new, case.old, case.adv, case.mask, clip=clip, denominator=case.denominator)
    check_value(fast, slow_losses.ppo(*case.slow(), clip=clip, denominator=case.denominator), dtype)


@pytest.mark.parametrize("calm", [True, False])
@given(data=st.data(), clip=CLIPS)
def test_ppo_has_the_gradient_of_its_twin(calm: bool, data: st.DataObject, clip: float) -> None:
    case = data.draw(cases(calm=calm))
    assume(off_kinks(case.exponents(), 1.0 - clip, 1.0 + clip))
    _, old, adv, mask = case.slow()
    check_gradient(
        lambda x: losses.ppo(x, case.old, case.adv, case.mask, clip=clip, denominator=case.denominator).total,
        lambda rows: slow_losses.ppo(rows, old, adv, mask, clip=clip, denominator=case.denominator),
        case,
    )


def sums_off_kinks(case: Case, clip: float) -> bool:
    new, old, _, mask = case.slow()
    u = slow_losses.episode_log_ratios(new, old, mask, case.episode.tolist())
    return off_kinks(list(u.values()), 1.0 - clip, 1.0 + clip)


@both_dtypes
@given(case=cases(per_token=False), clip=CLIPS)
def test_the_sequence_loss_agrees_with_its_twin(dtype: torch.dtype, case: Case, clip: float) -> None:
    case = case.to(dtype)
    assume(sums_off_kinks(case, clip))
    fast = losses.sequence(
        case.new, case.old, case.adv, case.mask,
        episode_B=case.episode, clip=clip, denominator=case.denominator,
    )  # fmt: skip
    slow = slow_losses.sequence(*case.slow(), episode=case.episode.tolist(), clip=clip, denominator=case.denominator)
    # A sum of up to 20 float32 log-ratios of size 60 carries its rounding into the exponent.
    sloppy = 1.0 if dtype == torch.float64 else 20.0
    check_value(fast, replace(slow, scale=slow.scale * sloppy), dtype)


@pytest.mark.parametrize("calm", [True, False])
@given(data=st.data(), clip=CLIPS)
def test_the_sequence_loss_has_the_gradient_of_its_twin(calm: bool, data: st.DataObject, clip: float) -> None:
    case = data.draw(cases(calm=calm, per_token=False))
    assume(sums_off_kinks(case, clip))
    _, old, adv, mask = case.slow()
    episode = case.episode.tolist()
    check_gradient(
        lambda x: (
            losses.sequence(
                x,
                case.old,
                case.adv,
                case.mask,
                episode_B=case.episode,
                clip=clip,
                denominator=case.denominator,
            ).total
        ),
        lambda rows: slow_losses.sequence(rows, old, adv, mask, episode=episode, clip=clip, denominator=case.denominator),
        case,
    )


@both_dtypes
@given(case=cases())
def test_the_kl_term_agrees_with_its_twin(dtype: torch.dtype, case: Case) -> None:
    kl = torch.where(case.mask, -case.old, case.old).to(dtype)
    slow = slow_losses.kl_term(table(kl), case.mask.tolist(), denominator=case.denominator)
    leaf = kl.clone().requires_grad_()
    fast = losses.kl_term(leaf, case.mask, denominator=case.denominator)
    assert close(float(fast.detach()), slow.total, tol=TOLERANCE[dtype], scale=slow.scale)
    (gradient,) = torch.autograd.grad(fast, leaf)
    assert torch.allclose(gradient, case.mask.to(dtype) / case.denominator)


def batch_of(case: Case) -> AdvantageBatch:
    rows, width = case.mask.shape
    names = tuple(f"e{e}" for e in case.episode.tolist())
    batch = TokenBatch(
        ids=torch.zeros(rows, width, dtype=torch.long),
        mask=case.mask,
        behavior_logprobs=case.old,
        versions=torch.zeros(rows, width, dtype=torch.long),
        lengths=torch.full((rows,), width),
        episode=case.episode,
        agent="solver",
        episode_ids=names,
        groups=names,
        temperature=1.0,
    )
    return AdvantageBatch(batch=batch, advantages=case.adv, team={"solver": 0})


WEIGHTS = st.one_of(
    st.builds(losses.Dis, band=bands()),
    st.builds(losses.Ppo, clip=CLIPS),
    st.builds(losses.SequenceRatio, clip=CLIPS),
)


def slow_policy_term(weight: losses.Weight, case: Case, rows: list[list[float]], denominator: float) -> slow_losses.Slow:
    new, old, adv, mask = case.slow()
    if isinstance(weight, losses.Dis):
        return slow_losses.dis(
            rows, old, adv, mask,
            low=weight.band.low, high=weight.band.high, denominator=denominator, weights_at=new,
        )  # fmt: skip
    if isinstance(weight, losses.Ppo):
        return slow_losses.ppo(rows, old, adv, mask, clip=weight.clip, denominator=denominator)
    return slow_losses.sequence(
        rows, old, adv, mask, episode=case.episode.tolist(), clip=weight.clip, denominator=denominator
    )


def weight_off_kinks(weight: losses.Weight, case: Case) -> bool:
    if isinstance(weight, losses.Dis):
        return off_kinks(case.exponents(), weight.band.low, weight.band.high)
    if isinstance(weight, losses.Ppo):
        return off_kinks(case.exponents(), 1.0 - weight.clip, 1.0 + weight.clip)
    return sums_off_kinks(case, weight.clip)


@given(
    case=cases(calm=True, per_token=False, trainable_rows=True),
    weight=WEIGHTS,
    penalty=st.sampled_from([0.0, 1e-3, 0.5, 10.0]),
)
def test_the_objective_is_the_policy_term_plus_the_penalised_kl(case: Case, weight: losses.Weight, penalty: float) -> None:
    assume(weight_off_kinks(weight, case))
    batch = batch_of(case)
    n_act = int(case.mask.sum())
    objective = losses.Objective(weight=weight, penalty=penalty)
    per_episode = isinstance(weight, losses.SequenceRatio)
    denominator = objective.denominator(batch.batch)
    assert denominator == (len(set(case.episode.tolist())) if per_episode else n_act)
    assert objective.needs_kl == (penalty > 0.0)

    kl = torch.where(case.mask, -case.old, case.old) if penalty else torch.full_like(case.old, math.nan)
    policy = slow_policy_term(weight, case, case.slow()[0], denominator)
    slow_kl = slow_losses.kl_term(table(kl), case.mask.tolist(), denominator=n_act) if penalty else policy
    expected = policy.total + (penalty * slow_kl.total if penalty else 0.0)

    def fast(new: Tensor) -> losses.LossTerm:
        return objective(new, batch, kl_BT=kl, denominator=denominator, n_act=n_act)

    term = fast(case.new)
    assert close(float(term.total), expected, scale=policy.scale + penalty * slow_kl.scale)
    if penalty:
        assert close(term.diagnostics["kl_sum"], slow_kl.total * n_act)
        with pytest.raises(MissingError):
            objective(case.new, batch, kl_BT=None, denominator=denominator, n_act=n_act)
    else:
        without = objective(case.new, batch, kl_BT=None, denominator=denominator, n_act=n_act)
        assert torch.equal(without.total, term.total)
    check_gradient(
        lambda new: fast(new).total,
        lambda rows: slow_policy_term(weight, case, rows, denominator),
        case,
    )


@given(case=cases(calm=True, per_token=False, trainable_rows=True), weight=WEIGHTS)
def test_micro_batches_add_up_to_the_whole_batch(case: Case, weight: losses.Weight) -> None:
    assume(weight_off_kinks(weight, case))
    batch = batch_of(case)
    kl = torch.where(case.mask, -case.old, case.old)
    objective = losses.Objective(weight=weight, penalty=0.1)
    denominator, n_act = objective.denominator(batch.batch), batch.batch.n_act
    whole = objective(case.new, batch, kl_BT=kl, denominator=denominator, n_act=n_act)
    total, diagnostics = 0.0, dict.fromkeys(whole.diagnostics, 0.0)
    for e in range(int(case.episode.max()) + 1):
        index = (case.episode == e).nonzero()[:, 0]
        part = objective(case.new[index], batch.rows(index), kl_BT=kl[index], denominator=denominator, n_act=n_act)
        total += float(part.total)
        for name, value in part.diagnostics.items():
            diagnostics[name] += value
    assert close(total, float(whole.total))
    assert all(close(diagnostics[name], value) for name, value in whole.diagnostics.items())


LOSSES: dict[str, Callable[..., losses.LossTerm]] = {
    "dis": lambda new, old, adv, mask, episode, denominator: losses.dis(
        new, old, adv, mask, band=losses.TIGHT, denominator=denominator
    ),
    "ppo": lambda new, old, adv, mask, episode, denominator: losses.ppo(
        new, old, adv, mask, clip=0.2, denominator=denominator
    ),
    "sequence": lambda new, old, adv, mask, episode, denominator: losses.sequence(
        new, old, adv, mask, episode_B=episode, clip=0.2, denominator=denominator
    ),
}
every_loss = pytest.mark.parametrize("name", sorted(LOSSES))


@every_loss
@given(junk=st.tuples(JUNK, JUNK, JUNK), rows=st.integers(1, 3), width=st.integers(1, 4))
def test_nothing_to_train_gives_exactly_zero_and_a_zero_gradient(
    name: str, junk: tuple[float, float, float], rows: int, width: int
) -> None:
    new, old, adv = (torch.full((rows, width), x, dtype=torch.float64) for x in junk)
    new.requires_grad_()
    term = LOSSES[name](new, old, adv, torch.zeros(rows, width, dtype=torch.bool), torch.arange(rows), 1.0)
    assert float(term.total.detach()) == 0.0
    (gradient,) = torch.autograd.grad(term.total, new)
    assert bool((gradient == 0.0).all())


@every_loss
@pytest.mark.parametrize("which", ["new", "old", "adv"])
def test_a_nan_on_an_action_token_is_never_swallowed(name: str, which: str) -> None:
    inputs = {k: torch.full((1, 2), v, dtype=torch.float64) for k, v in {"new": -1.0, "old": -1.1, "adv": 1.0}.items()}
    inputs[which][0, 1] = math.nan
    mask = torch.ones(1, 2, dtype=torch.bool)
    try:
        term = LOSSES[name](inputs["new"], inputs["old"], inputs["adv"], mask, torch.zeros(1, dtype=torch.long), 2.0)
    except NonFiniteError:
        return
    assert math.isnan(float(term.total))


# ---- advantages ---------------------------------------------------------------------------------------


@st.composite
def rewarded(draw: st.DrawFn, *, smallest: int = 1) -> tuple[list[float], list[str]]:
    """Interleaved groups of unequal size, some constant, some larger than what the clip of 5 lets through."""
    rewards: list[tuple[float, str]] = []
    value = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-10.0, 10.0))
    for name in "abcd"[: draw(st.integers(1, 4))]:
        size = draw(st.one_of(st.integers(smallest, 6), st.just(40)))
        shape = draw(st.sampled_from(["constant", "one_hot", "free"]))
        base = draw(value)
        for i in range(size):
            r = draw(value) if shape == "free" else base + float(shape == "one_hot" and i == 0)
            rewards.append((r, name))
    order = draw(st.permutations(rewards)) if len(rewards) <= 12 else rewards
    return [r for r, _ in order], [g for _, g in order]


@given(case=rewarded(), clip=st.sampled_from([5.0, None, 1.0]), eps=st.sampled_from([1e-8, 1e-2]))
@example(case=([0.1] * 3, ["a"] * 3), clip=5.0, eps=1e-8)
def test_group_advantages_agree_with_their_twin(case: tuple[list[float], list[str]], clip: float | None, eps: float) -> None:
    rewards, groups = case
    fast = advantages.group(torch.tensor(rewards, dtype=torch.float64), groups, clip=clip, eps=eps)
    values, n_groups, degenerate = slow_advantages.group(rewards, groups, clip=clip, eps=eps)
    # A spread near rounding is divided by about eps: the quotient carries that rounding.
    assert all_close(fast.values, values, tol=1e-9 if eps > 1e-4 else 1e-6)
    assert (fast.n_groups, fast.degenerate_groups) == (n_groups, degenerate)


@given(case=rewarded(smallest=2))
def test_leave_one_out_agrees_with_its_twin(case: tuple[list[float], list[str]]) -> None:
    rewards, groups = case
    fast = advantages.loo(torch.tensor(rewards, dtype=torch.float64), groups)
    assert all_close(fast.values, slow_advantages.loo(rewards, groups))
    degenerate = len(set(groups)) - slow_advantages.informative_groups(rewards, groups)
    assert (fast.n_groups, fast.degenerate_groups) == (len(set(groups)), degenerate)


@given(case=rewarded())
def test_the_batch_mean_baseline_agrees_with_its_twin(case: tuple[list[float], list[str]]) -> None:
    rewards, groups = case
    fast = advantages.batch_mean(torch.tensor(rewards, dtype=torch.float64), groups)
    assert all_close(fast.values, slow_advantages.batch_mean(rewards))
    constant = len(set(rewards)) == 1  # one baseline: every group says nothing, or none
    assert (fast.n_groups, fast.degenerate_groups) == (len(set(groups)), len(set(groups)) if constant else 0)


@given(case=rewarded())
def test_informative_groups_agree_with_their_twin(case: tuple[list[float], list[str]]) -> None:
    rewards, groups = case
    fast = advantages.informative_groups(torch.tensor(rewards, dtype=torch.float64), groups)
    assert fast == slow_advantages.informative_groups(rewards, groups)


@given(
    rewards=st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=12),
    prompts=st.lists(st.sampled_from("abcd"), min_size=12, max_size=12),
)
def test_decided_prompts_agree_with_their_twin(rewards: list[float], prompts: list[str]) -> None:
    groups = prompts[: len(rewards)]
    fast = advantages.decided_prompts(torch.tensor(rewards, dtype=torch.float64), groups)
    assert fast == slow_advantages.decided_prompts(rewards, groups)


@given(p=st.floats(0.0, 1.0), size=st.integers(1, 8))
def test_the_informative_share_agrees_with_enumeration(p: float, size: int) -> None:
    assert close(advantages.informative_share(p, size), slow_advantages.informative_share(p, size))


STEPS = st.lists(
    st.tuples(st.floats(-5.0, 5.0), st.floats(-5.0, 5.0), st.one_of(st.floats(0.0, 3.0), st.just(1.0))),
    min_size=1,
    max_size=8,
)


@given(steps=STEPS, gamma=st.sampled_from([1.0, 0.99, 0.5, 0.0]), lam=st.sampled_from([1.0, 0.95, 0.0]))
def test_the_truncated_trace_agrees_with_its_unrolled_twin(
    steps: list[tuple[float, float, float]], gamma: float, lam: float
) -> None:
    columns = [list(column) for column in zip(*steps, strict=True)]
    fast = advantages.truncated_trace(*(torch.tensor(c, dtype=torch.float64) for c in columns), gamma=gamma, lam=lam)
    assert all_close(fast, slow_advantages.truncated_trace(*columns, gamma=gamma, lam=lam))


@given(logs=st.lists(st.floats(-30.0, 30.0), min_size=1, max_size=12), shift=st.sampled_from([0.0, -900.0, 900.0, 1e6]))
def test_the_effective_sample_share_agrees_with_its_twin_at_any_scale_of_the_weights(
    logs: list[float], shift: float
) -> None:
    share = slow_advantages.effective_sample_share([math.exp(x) for x in logs])
    found = advantages.effective_sample_share(torch.tensor(logs, dtype=torch.float64) + shift)
    assert close(found, share, tol=1e-9 if shift < 1e6 else 1e-6)
    assert 1.0 / len(logs) - 1e-9 <= found <= 1.0


@given(logs=st.lists(st.floats(-60.0, 60.0), min_size=1, max_size=12))
def test_a_reuse_weight_is_the_ratio_and_its_truncation_at_one(logs: list[float]) -> None:
    weights, truncated = advantages.reuse_weights(torch.tensor(logs, dtype=torch.float64))
    assert all_close(weights, [math.exp(x) for x in logs])
    assert all_close(truncated, [min(1.0, math.exp(x)) for x in logs])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_ratio_that_is_no_number_is_refused_by_name_and_a_zero_is_not(bad: float) -> None:
    logs = torch.tensor([0.0, -math.inf, bad], dtype=torch.float64)
    for read in (advantages.reuse_weights, advantages.effective_sample_share):
        with pytest.raises(NonFiniteError):
            read(logs)
    with pytest.raises(NonFiniteError, match="episode 2"):
        advantages.reuse_weights(logs)
    assert advantages.reuse_weights(logs[:2])[0].tolist() == [1.0, 0.0]
    assert advantages.effective_sample_share(logs[:2]) == pytest.approx(0.5)
    for nothing, error in ((logs[1:2], NonFiniteError), (logs[:0], MissingError)):
        with pytest.raises(error):
            advantages.effective_sample_share(nothing)
    for place in range(3):
        steps = [torch.zeros(2), torch.zeros(2), torch.ones(2)]
        steps[place][1] = bad
        with pytest.raises(NonFiniteError):
            advantages.truncated_trace(*steps, gamma=1.0, lam=0.95)
    with pytest.raises(ConfigError):
        advantages.truncated_trace(*steps[:2], torch.ones(2), gamma=1.01, lam=0.95)


@pytest.mark.parametrize("estimator", [advantages.group, advantages.loo, advantages.batch_mean])
def test_every_baseline_refuses_a_nan_reward_and_siblings_of_two_teams(
    estimator: Callable[..., advantages.EpisodeAdvantages],
) -> None:
    with pytest.raises(NonFiniteError, match="2"):
        estimator(torch.tensor([0.0, 1.0, math.nan, 1.0], dtype=torch.float64), list("aabb"))
    teams = [{"solver": 3}, {"solver": 4}]
    with pytest.raises(StaleAdvantagesError) as refused:
        estimator(torch.tensor([0.0, 1.0], dtype=torch.float64), list("aa"), teams=teams)
    assert "3" in str(refused.value) and "4" in str(refused.value)


def test_baselines_of_float32_rewards_are_computed_in_double_precision() -> None:
    """A mean rounded to float32 would lie on a reward that it is a little above, or on the wrong side of it."""
    step = 2.0**-20
    rewards = torch.tensor([1.0] * 999 + [1.0 + step])
    fast = advantages.batch_mean(rewards, ["q"] * 1000).values
    assert fast.dtype == torch.float32 and fast[0].item() == pytest.approx(-step / 1000, rel=1e-6)
    ulp = 2.0**-23
    assert advantages.decided_prompts(torch.tensor([1.0, 1.0, 1.0 + ulp]), list("abc")) == 1
    assert advantages.decided_prompts(torch.tensor([1.0, 1.0 + ulp, 1.0, 1.0]), list("aabb")) == 1
    weights, truncated = advantages.reuse_weights(torch.tensor([-0.1, 0.2]))
    assert weights.dtype == truncated.dtype == torch.float64
    found = advantages.effective_sample_share(torch.tensor([1e4, 1e4 - 1.0]))
    assert close(found, slow_advantages.effective_sample_share([1.0, math.exp(-1.0)]))


def test_the_spread_of_a_group_is_held_off_zero_by_1e_8() -> None:
    values = advantages.group(torch.tensor([0.0, 2e-8], dtype=torch.float64), ["q"] * 2).values
    assert values.tolist() == pytest.approx([-0.5, 0.5], rel=1e-9)


def test_a_flat_group_is_exactly_zero_to_leave_one_out_too() -> None:
    found = advantages.loo(torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0], dtype=torch.float64), list("aaabb"))
    assert found.values.tolist() == [0.0, 0.0, 0.0, -1.0, 1.0]
    assert (found.n_groups, found.degenerate_groups) == (2, 1)


def test_a_prompt_at_the_mean_of_the_batch_is_on_neither_side_of_it() -> None:
    for rewards in ([1.0, 0.5, 0.25, 0.25], [0.0, 0.5, 0.75, 0.75]):
        assert advantages.decided_prompts(torch.tensor(rewards, dtype=torch.float64), list("abcd")) == 1


@pytest.mark.parametrize("n", range(1, 60))
def test_equal_weights_are_a_whole_effective_sample_and_no_more(n: int) -> None:
    share = advantages.effective_sample_share(torch.full((n,), 0.3, dtype=torch.float64))
    assert share <= 1.0 and close(share, 1.0)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: advantages.informative_share(-0.01, 4),
        lambda: advantages.informative_share(1.01, 4),
        lambda: advantages.informative_share(math.nan, 4),
        lambda: advantages.informative_share(0.5, 0),
        lambda: advantages.truncated_trace(*(torch.ones(1),) * 3, gamma=1.0, lam=1.01),
        lambda: advantages.truncated_trace(*(torch.ones(1),) * 3, gamma=1.01, lam=1.0),
    ],
)
def test_a_share_or_a_discount_outside_its_range_is_refused(ask: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        ask()


def test_leave_one_out_refuses_a_group_of_one() -> None:
    with pytest.raises(DataError):
        advantages.loo(torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64), list("aab"))


# ---- divergence ---------------------------------------------------------------------------------------


@st.composite
def logit_rows(
    draw: st.DrawFn, *, reach: float, states: int, vocab: int, support: list[list[bool]] | None = None
) -> list[list[float]]:
    """Logits, some at -inf (at least one finite in a row); `support` says which must stay finite."""
    rows: list[list[float]] = []
    for s in range(states):
        keep = draw(st.integers(0, vocab - 1))
        row: list[float] = []
        for v in range(vocab):
            finite = v == keep or draw(st.integers(0, 4)) > 0 or (support is not None and support[s][v])
            row.append(draw(st.floats(-reach, reach)) if finite else -math.inf)
        rows.append(row)
    return rows


@both_dtypes
@given(data=st.data(), states=st.integers(1, 4), vocab=st.integers(2, 7), temperature=st.floats(0.2, 3.0))
def test_log_law_agrees_with_its_twin(
    dtype: torch.dtype, data: st.DataObject, states: int, vocab: int, temperature: float
) -> None:
    logits = torch.tensor(data.draw(logit_rows(reach=60.0, states=states, vocab=vocab)), dtype=dtype)
    forbidden = data.draw(st.one_of(st.none(), st.lists(st.booleans(), min_size=vocab, max_size=vocab)))
    if forbidden is not None:
        allowed = ~torch.tensor(forbidden)
        assume(bool((torch.isfinite(logits) & allowed).any(dim=1).all()))
    fast = divergence.log_law(
        logits, temperature=temperature, forbidden=None if forbidden is None else torch.tensor(forbidden)
    )
    for fast_row, logit_row in zip(fast, table(logits), strict=True):
        slow = slow_divergence.log_law(logit_row, temperature=temperature, forbidden=forbidden)
        assert all_close(fast_row, slow, tol=TOLERANCE[fast.dtype])


def laws(logits: list[list[float]], dtype: torch.dtype = torch.float64) -> Tensor:
    rows = [slow_divergence.log_law(row, temperature=1.0, forbidden=None) for row in logits]
    return torch.tensor(rows, dtype=dtype)


PAIRWISE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Sequence[float], Sequence[float]], float]]] = {
    "kl": (divergence.kl, slow_divergence.kl),
    "total_variation": (divergence.total_variation, slow_divergence.total_variation),
    "exact, new to old": (lambda p, q: divergence.exact(p, q)[0], slow_divergence.kl),
    "exact, old to new": (
        lambda p, q: divergence.exact(p, q)[1],
        lambda p, q: slow_divergence.kl(q, p),
    ),
}


@both_dtypes
@pytest.mark.parametrize("name", sorted(PAIRWISE))
@given(data=st.data(), states=st.integers(1, 4), vocab=st.integers(2, 7))
def test_divergences_agree_with_their_twins(
    name: str, dtype: torch.dtype, data: st.DataObject, states: int, vocab: int
) -> None:
    fast, slow = PAIRWISE[name]
    # Within 20 of each other no float32 probability underflows, so "p > 0" means the same on both sides.
    reach = 60.0 if dtype == torch.float64 else 20.0
    p = laws(data.draw(logit_rows(reach=reach, states=states, vocab=vocab)), dtype)
    q = laws(data.draw(logit_rows(reach=reach, states=states, vocab=vocab)), dtype)
    expected = [slow(a, b) for a, b in zip(table(p), table(q), strict=True)]
    assert all_close(fast(p, q), expected, tol=TOLERANCE[dtype])


@both_dtypes
@given(data=st.data(), states=st.integers(1, 4), vocab=st.integers(2, 7))
def test_entropy_agrees_with_its_twin(dtype: torch.dtype, data: st.DataObject, states: int, vocab: int) -> None:
    p = laws(data.draw(logit_rows(reach=20.0, states=states, vocab=vocab)), dtype)
    expected = [slow_divergence.entropy(row) for row in table(p)]
    assert all_close(divergence.entropy(p), expected, tol=TOLERANCE[dtype])


def check_law_gradient(fast: Callable[[Tensor], Tensor], slow: Callable[[Sequence[float]], float], p: Tensor) -> None:
    """Derivative by each log-probability: differences where it is finite, 0 at an entry of probability 0."""
    leaf = p.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(fast(leaf).sum(), leaf)
    assert bool((gradient[torch.isinf(p)] == 0.0).all())
    for s, v in torch.isfinite(p).nonzero().tolist():
        row = table(p)[s]
        row[v] += STEP
        up = slow(row)
        row[v] -= 2.0 * STEP
        assert abs(float(gradient[s, v]) - (up - slow(row)) / (2.0 * STEP)) < 1e-6


@given(data=st.data(), vocab=st.integers(2, 7))
def test_kl_and_entropy_have_the_gradients_of_their_twins(data: st.DataObject, vocab: int) -> None:
    logits_p = data.draw(logit_rows(reach=5.0, states=1, vocab=vocab))
    support = [[math.isfinite(x) for x in row] for row in logits_p]
    logits_q = data.draw(logit_rows(reach=5.0, states=1, vocab=vocab, support=support))
    p, q = laws(logits_p), laws(logits_q)
    check_law_gradient(lambda x: divergence.kl(x, q), lambda row: slow_divergence.kl(row, table(q)[0]), p)
    check_law_gradient(divergence.entropy, slow_divergence.entropy, p)
    # q may be 0 only where p is: there, too, nothing is to flow.
    leaf = q.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(divergence.kl(p, leaf).sum(), leaf)
    expected = [-math.exp(x) for x in table(p)[0]]
    assert all_close(gradient[0], expected)


@pytest.mark.parametrize("name", sorted(PAIRWISE))
def test_a_nan_law_gives_nan_and_never_a_number(name: str) -> None:
    bad = torch.tensor([[math.nan, math.log(0.5)]], dtype=torch.float64)
    good = torch.tensor([[math.log(0.5), math.log(0.5)]], dtype=torch.float64)
    for p, q in ((bad, good), (good, bad)):
        try:
            value = PAIRWISE[name][0](p, q)
        except NonFiniteError:
            continue
        assert math.isnan(float(value[0]))


@given(x=st.floats(-60.0, 19.0))
def test_k3_agrees_with_its_twin_below_its_bound(x: float) -> None:
    fast = divergence.k3(torch.tensor([x], dtype=torch.float64))
    assert all_close(fast, [slow_divergence.k3(x)])


def test_k3_stays_finite_beyond_its_bound_and_nan_stays_nan() -> None:
    x = torch.tensor([25.0, 59.0, 1e4, math.nan], dtype=torch.float64)
    value = divergence.k3(x)
    assert bool(torch.isfinite(value[:3]).all()) and bool((value[:3] > slow_divergence.k3(19.9)).all())
    assert math.isnan(float(value[3]))


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_law_needs_a_positive_temperature(temperature: float) -> None:
    with pytest.raises(BatonError):
        divergence.log_law(torch.zeros(1, 2), temperature=temperature)


@given(
    st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(0, 4)), min_size=1, max_size=12),
)
def test_message_values_agree_with_their_twin(states: list[tuple[float, int]]) -> None:
    values, row = [v for v, _ in states], [r for _, r in states]
    means, sums = divergence.message_values(torch.tensor(values, dtype=torch.float64), torch.tensor(row))
    slow_means, slow_sums = slow_divergence.message_values(values, row)
    assert all_close(means, slow_means) and all_close(sums, slow_sums)


# ---- trust region -------------------------------------------------------------------------------------

LEVELS = st.one_of(st.sampled_from([0.9, 0.95, 0.99]), st.floats(0.5, 0.995))
MISSES = st.one_of(st.sampled_from([0.05, 0.01, 0.1]), st.floats(0.001, 0.3))


@given(n=st.one_of(st.integers(1, 120), st.sampled_from([299, 459, 512, 1000, 5000])), level=LEVELS, miss=MISSES)
def test_the_order_statistic_rank_agrees_with_its_twin(n: int, level: float, miss: float) -> None:
    rank, tie = slow_region.order_statistic_rank(n, level=level, miss=miss)
    assume(tie > 1e-9)
    assert trust_region.order_statistic_rank(n, level=level, confidence_miss=miss) == rank


@given(n=st.integers(1, 5000), miss=MISSES)
def test_the_certifiable_level_agrees_with_its_twin(n: int, miss: float) -> None:
    assert close(trust_region.certifiable_level(n, confidence_miss=miss), slow_region.certifiable_level(n, miss=miss))


@given(level=st.floats(0.5, 0.97), miss=MISSES)
@example(level=0.95, miss=0.01)
@example(level=0.95, miss=0.05)
def test_units_needed_agrees_with_its_twin(level: float, miss: float) -> None:
    n = slow_region.units_needed(level=level, miss=miss)
    assume(slow_region.order_statistic_rank(n, level=level, miss=miss)[1] > 1e-9)
    assume(n == 1 or slow_region.order_statistic_rank(n - 1, level=level, miss=miss)[1] > 1e-9)
    assert trust_region.units_needed(level=level, confidence_miss=miss) == n


@given(data=st.data(), n=st.integers(1, 80), confidence=st.floats(0.5, 0.999))
def test_clopper_pearson_agrees_with_its_twin(data: st.DataObject, n: int, confidence: float) -> None:
    k = data.draw(st.integers(0, n))
    fast = trust_region.clopper_pearson_upper(k, n, confidence=confidence)
    assert close(fast, slow_region.clopper_pearson_upper(k, n, confidence=confidence))


ALPHAS = st.sampled_from([0.01, 0.05, 0.1, 0.2, 0.25, 0.3, 0.5, 0.07, 0.9])


@given(values=st.lists(st.one_of(st.floats(0.0, 1.0), st.just(math.inf)), min_size=1, max_size=40), alpha=ALPHAS)
def test_the_point_quantile_agrees_with_its_twin(values: list[float], alpha: float) -> None:
    fast = trust_region.quantile_point(torch.tensor(values, dtype=torch.float64), alpha=alpha)
    assert fast == slow_region.quantile_point(values, alpha=alpha)


@given(n=st.integers(1, 20_000), alpha=ALPHAS)
def test_the_point_quantile_takes_the_rank_that_was_written_at_any_size(n: int, alpha: float) -> None:
    # The values are their own ranks; (1 - .1) * 30 and its like must not be rounded up to the next rank.
    fast = trust_region.quantile_point(torch.arange(1.0, n + 1.0, dtype=torch.float64), alpha=alpha)
    assert fast == slow_region.quantile_point(list(range(1, n + 1)), alpha=alpha)


def test_the_point_quantile_needs_values_and_each_of_them_a_number() -> None:
    with pytest.raises(MissingError):
        trust_region.quantile_point(torch.zeros(0, dtype=torch.float64), alpha=0.01)
    with pytest.raises(NonFiniteError):
        trust_region.quantile_point(torch.tensor([0.1, math.nan], dtype=torch.float64), alpha=0.5)


@dataclass
class Probe:
    divergence: TokenDivergence
    message: list[int]
    unit: list[int]
    drawn: list[int]


@st.composite
def probes(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> Probe:
    """States of messages of prompts, one drawn per prompt; now and then +inf or rounding below 0."""
    value = st.one_of(st.floats(0.0, 0.2), st.floats(0.0, 0.2), st.sampled_from([0.0, -5e-5, math.inf]))
    new_old, old_new, message, unit, drawn = [], [], [], [], []
    number = 0
    for prompt in range(draw(st.integers(1, 14))):
        first = len(unit)
        for _ in range(draw(st.integers(1, 2))):
            for _ in range(draw(st.integers(1, 3))):
                new_old.append(draw(value))
                old_new.append(draw(value))
                message.append(number)
                unit.append(prompt)
            number += 1
        drawn.append(draw(st.integers(first, len(unit) - 1)))
    states = torch.arange(len(unit))
    record = TokenDivergence(
        kl_new_old=torch.tensor(new_old, dtype=dtype), kl_old_new=torch.tensor(old_new, dtype=dtype),
        row=torch.tensor(message), position=states,
    )  # fmt: skip
    return Probe(record, message, unit, draw(st.permutations(drawn)))


@both_dtypes
@given(
    data=st.data(),
    direction=st.sampled_from(["max", "new_old", "old_new"]),
    alpha=st.sampled_from([0.01, 0.1, 0.25, 0.5]),
    eta=st.sampled_from([0.05, 0.2, 0.45]),
    looks=st.sampled_from([1, 5]),
    radius_message_mean=st.sampled_from([0.01, 0.08, 1.0]),
)
def test_the_gate_agrees_with_its_twin(
    dtype: torch.dtype,
    data: st.DataObject,
    direction: str,
    alpha: float,
    eta: float,
    looks: int,
    radius_message_mean: float,
) -> None:
    probe = data.draw(probes(dtype))
    new_old = probe.divergence.kl_new_old.double().tolist()
    old_new = probe.divergence.kl_old_new.double().tolist()
    # A radius that equals a measured value must let it through: <= and not <.
    finite = [x for x in (*new_old, *old_new) if 0.0 < x < math.inf]
    radius_token = data.draw(st.one_of(st.floats(1e-3, 0.3), st.sampled_from([*finite, 0.05])))
    slow = slow_region.gate(
        new_old, old_new, message=probe.message, drawn=probe.drawn, direction=direction,
        alpha=alpha, eta=eta, looks=looks, radius_token=radius_token, radius_message_mean=radius_message_mean,
    )  # fmt: skip
    assume(slow.tie > 1e-9 and abs(slow.message_mean - radius_message_mean) > 1e-6)
    fast = trust_region.gate(
        probe.divergence,
        message=torch.tensor(probe.message),
        unit=torch.tensor(probe.unit),
        drawn=torch.tensor(probe.drawn),
        direction=direction,
        alpha=alpha,
        eta=eta,
        looks=looks,
        radius_token=radius_token,
        radius_message_mean=radius_message_mean,
        scale=0.5,
    )
    tol = TOLERANCE[dtype]
    assert (fast.q_point, fast.q_ucb, fast.q_gate) == (slow.q_point, slow.q_ucb, slow.q_gate)
    assert close(fast.message_mean, slow.message_mean, tol=tol)
    assert fast.message_sum is None or close(fast.message_sum, slow.message_sum, tol=tol)
    assert (fast.n_units, fast.n_states, fast.certified) == (slow.n_units, slow.n_states, slow.certified)
    assert close(fast.certifiable_level, slow.certifiable_level)
    assert (fast.radius_token, fast.radius_message_mean) == (radius_token, radius_message_mean)
    assert (fast.direction, fast.scale) == (direction, 0.5)
    assert fast.passed == slow.passed


@given(probe=probes(), data=st.data())
def test_a_gate_that_must_be_certified_names_the_prompts_it_would_need(probe: Probe, data: st.DataObject) -> None:
    alpha, needed = data.draw(st.sampled_from([(0.01, "459"), (0.05, "90")]))
    with pytest.raises(BatonError, match=needed):
        trust_region.gate(
            probe.divergence,
            message=torch.tensor(probe.message),
            unit=torch.tensor(probe.unit),
            drawn=torch.tensor(probe.drawn),
            direction="max",
            alpha=alpha,
            eta=0.05,
            looks=5,
            radius_token=0.05,
            radius_message_mean=0.01,
            require_certified=True,
        )


@given(probe=probes(), data=st.data())
def test_the_gate_refuses_a_draw_that_is_not_one_state_of_each_prompt(probe: Probe, data: st.DataObject) -> None:
    drop = data.draw(st.integers(0, len(probe.drawn) - 1))
    fewer = probe.drawn[:drop] + probe.drawn[drop + 1 :]
    for drawn in (fewer, [*probe.drawn, probe.drawn[drop]]):
        with pytest.raises((DataError, MissingError)):
            trust_region.gate(
                probe.divergence,
                message=torch.tensor(probe.message),
                unit=torch.tensor(probe.unit),
                drawn=torch.tensor(drawn, dtype=torch.long),
                direction="max",
                alpha=0.01,
                eta=0.05,
                looks=5,
                radius_token=0.05,
                radius_message_mean=0.01,
            )


@given(
    beta=st.floats(1e-3, 10.0),
    move=st.sampled_from([(True, False), (False, True), (False, False)]),
    bounds=st.sampled_from([(1e-3, 10.0), (0.01, 1.0)]),
)
def test_the_next_penalty_agrees_with_its_twin(beta: float, move: tuple[bool, bool], bounds: tuple[float, float]) -> None:
    low, high = bounds
    beta = min(max(beta, low), high)
    failed, relaxed = move
    expected = slow_region.next_penalty(beta, full_step_failed=failed, relaxed=relaxed, low=low, high=high)
    assert close(
        trust_region.next_penalty(beta, full_step_failed=failed, relaxed=relaxed, low=low, high=high),
        expected,
    )


REASONS = ["radius", "harm", "non_finite", "no_signal", "not_published"]


@given(
    share=st.floats(1e-3, 1.0),
    configured=st.sampled_from([1e-3, 1e-6]),
    fate=st.sampled_from([(True, None), *((False, reason) for reason in REASONS)]),
)
def test_the_next_learning_rate_agrees_with_its_twin(share: float, configured: float, fate: tuple[bool, str | None]) -> None:
    accepted, reason = fate
    fast = trust_region.next_lr(share * configured, configured=configured, accepted=accepted, reason=reason)
    slow = slow_region.next_lr(share * configured, configured=configured, accepted=accepted, reason=reason)
    assert fast == pytest.approx(slow, rel=1e-12)


def test_the_line_search_halves_the_first_displacement() -> None:
    assert tuple(trust_region.SCALES) == (1 / 2, 1 / 4, 1 / 8, 1 / 16)
    assert trust_region.line_search_scales(4) == tuple(0.5**i for i in range(1, 5))
    assert trust_region.line_search_scales(0) == ()


@given(beta=st.floats(1e-3, 10.0), lr=st.floats(1e-7, 1.0), r=st.integers(1, 6))
def test_a_retrys_penalty_and_lr_agree_with_their_twins(beta: float, lr: float, r: int) -> None:
    slow = slow_region.retry(beta, lr, r)
    assert (trust_region.retry_penalty(beta, r), trust_region.retry_lr(lr, r)) == pytest.approx(slow, rel=1e-12)


@given(first=st.floats(1e-6, 10.0), share=st.floats(0.0, 2.0), r=st.integers(1, 4))
def test_the_factors_of_a_shrinkage_multiply_to_the_whole(first: float, share: float, r: int) -> None:
    total, lr, beta = trust_region.shrinkage(first, share * first, 0.5**r)
    assert lr == 0.5**r and total == pytest.approx(share) and lr * beta == pytest.approx(total)


ENTRIES = st.lists(st.tuples(st.floats(-3.0, 3.0), st.floats(0.0, 4.0)), min_size=1, max_size=6)


@both_dtypes
@given(entries=ENTRIES, delta=st.sampled_from([0.01, 0.05, 0.5]), eps=st.sampled_from([1e-8, 1e-2]))
def test_the_greedy_gain_is_the_most_that_the_ball_allows(
    dtype: torch.dtype, entries: list[tuple[float, float]], delta: float, eps: float
) -> None:
    g, f = (torch.tensor(column, dtype=dtype) for column in zip(*entries, strict=True))
    kappa, gain = trust_region.greedy_gain(g, f, delta=delta, eps=eps)
    slow = slow_region.greedy_gain(g.tolist(), f.tolist(), delta=delta, eps=eps)
    assert gain == pytest.approx(slow, rel=TOLERANCE[dtype], abs=1e-12)
    assert gain == pytest.approx(kappa * math.sqrt(delta), rel=1e-12)


KAPPAS = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 10.0)), min_size=1, max_size=4)


@given(kappas=KAPPAS, spare=st.integers(0, 10), most=st.integers(1, 8))
def test_the_radii_in_quanta_are_the_best_of_all_ways_to_give_them_out(kappas: list[float], spare: int, most: int) -> None:
    total = len(kappas) + spare
    delta = trust_region.allocate_radius(kappas, budget=total * 0.0125, quantum=0.0125, cap=most * 0.0125)
    quanta = [round(d / 0.0125) for d in delta]
    assert all(1 <= q <= most for q in quanta) and sum(quanta) == min(total, most * len(kappas))
    found = math.fsum(k * math.sqrt(q) for k, q in zip(kappas, quanta, strict=True))
    assert close(found, slow_region.allocate_radius(kappas, total=total, most=most))


@pytest.mark.parametrize("n", [1, 2, 3, 7])
@pytest.mark.parametrize("kappa", [0.0, 0.3])
def test_equal_gains_share_the_budget_equally_and_the_first_takes_what_is_over(n: int, kappa: float) -> None:
    uniform = trust_region.allocate_radius([kappa] * n, budget=n * 0.05, quantum=0.05 / 4, cap=0.1)
    assert uniform == pytest.approx((0.05,) * n, rel=1e-12)
    over = trust_region.allocate_radius([kappa] * n, budget=n * 0.05 + 0.0125, quantum=0.0125, cap=0.1)
    assert over == pytest.approx((0.0625, *(0.05,) * (n - 1)), rel=1e-12)


def test_a_budget_of_decimal_quanta_is_not_rounded_down_to_one_less() -> None:
    assert 0.3 / 0.1 < 3.0
    assert trust_region.allocate_radius([1.0] * 3, budget=0.3, quantum=0.1, cap=0.3) == (0.1, 0.1, 0.1)


def test_the_continuous_radii_of_an_agent_without_a_gain_and_of_huge_gains() -> None:
    assert trust_region.allocate_radius_continuous([2.0, 0.0], 0.1) == (0.1, 0.0)
    assert trust_region.allocate_radius_continuous([1e200, 1e200], 0.1) == (0.05, 0.05)


def test_a_flat_curvature_is_held_off_zero_by_1e_8() -> None:
    kappa, _ = trust_region.greedy_gain(
        torch.tensor([1e-4], dtype=torch.float64), torch.zeros(1, dtype=torch.float64), delta=1.0
    )
    assert kappa == pytest.approx(math.sqrt(2.0), rel=1e-9)


def test_a_dominant_agent_stops_at_its_cap_and_no_one_is_left_at_zero() -> None:
    delta = trust_region.allocate_radius((100.0, 1.0, 0.0), budget=0.15, quantum=0.0125, cap=0.1)
    assert delta == pytest.approx((0.1, 0.0375, 0.0125))


@given(kappas=st.lists(st.floats(1e-2, 10.0), min_size=1, max_size=5), budget=st.sampled_from([0.05, 0.1, 2.0]))
def test_the_continuous_radii_agree_with_their_twin_and_with_ever_finer_quanta(kappas: list[float], budget: float) -> None:
    delta = trust_region.allocate_radius_continuous(kappas, budget)
    assert math.fsum(delta) == pytest.approx(budget, rel=1e-12)
    assert delta == pytest.approx(slow_region.allocate_radius_continuous(kappas, budget), rel=1e-6)
    quantum = budget / 200
    fine = trust_region.allocate_radius(kappas, budget=budget, quantum=quantum, cap=budget)
    assert all(abs(a - max(b, quantum)) <= (len(kappas) + 1) * quantum for a, b in zip(fine, delta, strict=True))


@pytest.mark.parametrize("ask", [
    lambda: trust_region.retry_penalty(0.1, 0),
    lambda: trust_region.retry_penalty(-0.1, 1),
    lambda: trust_region.retry_lr(0.1, 0),
    lambda: trust_region.retry_lr(0.0, 1),
    lambda: trust_region.shrinkage(0.0, 1.0, 0.5),
    lambda: trust_region.shrinkage(math.inf, 1.0, 0.5),
    lambda: trust_region.shrinkage(1.0, math.nan, 0.5),
    lambda: trust_region.shrinkage(1.0, math.inf, 0.5),
    lambda: trust_region.shrinkage(1.0, 1.0, math.inf),
    lambda: trust_region.shrinkage(1.0, 1.0, 0.0),
    lambda: trust_region.greedy_gain(torch.ones(2), torch.ones(2), delta=0.0),
    lambda: trust_region.greedy_gain(torch.tensor([1.0, math.nan]), torch.ones(2), delta=0.1),
    lambda: trust_region.greedy_gain(torch.ones(2), torch.tensor([1.0, math.inf]), delta=0.1),
    lambda: trust_region.greedy_gain(torch.ones(2), torch.tensor([1.0, -1.0]), delta=0.1),
    lambda: trust_region.greedy_gain(torch.zeros(1), torch.zeros(1), delta=0.1, eps=0.0),
    lambda: trust_region.allocate_radius([], budget=1.0, quantum=0.1, cap=1.0),
    lambda: trust_region.allocate_radius([1.0, math.nan], budget=1.0, quantum=0.1, cap=1.0),
    lambda: trust_region.allocate_radius([1.0, -1.0], budget=1.0, quantum=0.1, cap=1.0),
    lambda: trust_region.allocate_radius([1.0, math.inf], budget=1.0, quantum=0.1, cap=1.0),
    lambda: trust_region.allocate_radius([1.0], budget=1.0, quantum=0.0, cap=1.0),
    lambda: trust_region.allocate_radius([1.0, 1.0], budget=0.1, quantum=0.1, cap=1.0),
    lambda: trust_region.allocate_radius([1.0, 1.0], budget=1.0, quantum=0.1, cap=0.05),
    lambda: trust_region.allocate_radius([1.0, 1.0], budget=1.0, quantum=0.0, cap=1.0),
    lambda: trust_region.allocate_radius_continuous([0.0, 0.0], 0.1),
    lambda: trust_region.allocate_radius_continuous([1.0], 0.0),
    lambda: trust_region.allocate_radius_continuous([], 0.1),
    lambda: trust_region.allocate_radius_continuous([1.0, -1.0], 0.1),
])  # fmt: skip
def test_an_allocation_or_a_retry_without_a_meaning_is_refused(ask: Callable[[], object]) -> None:
    with pytest.raises(BatonError):
        ask()


def test_a_penalty_that_was_left_out_stays_out_in_every_retry() -> None:
    assert [trust_region.retry_penalty(0.0, r) for r in (1, 2)] == [0.0, 0.0]


PROBABILITIES = st.floats(0.001, 0.999)


@given(p0=PROBABILITIES, p1=PROBABILITIES, delta=st.floats(1e-4, 1.0))
def test_the_speed_limit_agrees_with_its_twin(p0: float, p1: float, delta: float) -> None:
    length = slow_region.fisher_rao(p0, p1)
    assert close(trust_region.fisher_rao(p0, p1), length)
    assert close(trust_region.speed_limit(p0, p1, delta=delta), length / math.sqrt(2.0 * delta))


@given(
    ends=st.sampled_from([(0.1, 0.98), (0.25, 0.9), (0.4, 0.6), (0.9, 0.2), (0.01, 0.99)]),
    delta=st.sampled_from([0.05, 0.01, 0.5]),
    direction=st.sampled_from(["max", "new_old", "old_new"]),
)
def test_greedy_exact_steps_agree_with_their_twin(ends: tuple[float, float], delta: float, direction: str) -> None:
    fast = trust_region.greedy_exact_steps(*ends, delta=delta, direction=direction)
    assert fast == slow_region.greedy_exact_steps(*ends, delta=delta, direction=direction)


# ---- certificate --------------------------------------------------------------------------------------

DELTAS = st.floats(0.0, 1.0)


@given(
    agents=st.lists(
        st.tuples(DELTAS, st.integers(1, 5000), st.floats(0.0, 10.0), st.floats(0.0, 10.0), DELTAS),
        min_size=1,
        max_size=4,
    ),
    gamma=st.sampled_from([0.5, 0.9, 0.99]),
    a_max=st.sampled_from([1.0, 5.0]),
    delta_conf=st.sampled_from([0.05, 0.01]),
    measured=st.booleans(),
)
def test_the_published_bound_agrees_with_its_twin_and_is_the_sum_of_its_terms(
    agents: list[tuple[float, int, float, float, float]],
    gamma: float,
    a_max: float,
    delta_conf: float,
    measured: bool,
) -> None:
    deltas, n, kappas, curvatures, zetas = (list(column) for column in zip(*agents, strict=True))
    given_terms = {"kappas": kappas, "curvatures": curvatures, "zetas": zetas}
    zeros = dict.fromkeys(given_terms, [0.0] * len(agents))
    slow, scale = slow_certificate.published(
        deltas, n, gamma=gamma, a_max=a_max, delta_conf=delta_conf, **(given_terms if measured else zeros)
    )
    fast = certificate.published(
        deltas, n, gamma=gamma, a_max=a_max, delta_conf=delta_conf, **(given_terms if measured else {})
    )
    assert close(fast.lower_bound, slow, scale=scale)
    assert close(math.fsum(term.value for term in fast.terms), fast.lower_bound, scale=scale)
    assert (fast.kind, fast.verdict, fast.reason) == ("published", "void", "assumed_term")
    assert fast.is_vacuous == (fast.lower_bound <= 0.0)


@given(delta=DELTAS, gamma=st.floats(0.0, 0.995), a_max=st.floats(0.0, 10.0))
def test_occupancy_penalties_agree_with_their_twins(delta: float, gamma: float, a_max: float) -> None:
    for name in ("occupancy_penalty_printed", "occupancy_penalty_trpo"):
        fast = getattr(certificate, name)(delta, gamma=gamma, a_max=a_max)
        assert close(fast, getattr(slow_certificate, name)(delta, gamma=gamma, a_max=a_max))


@given(n=st.integers(1, 10**6), eps=st.floats(0.01, 0.9), eta=st.floats(0.001, 0.5))
def test_the_dkw_sizes_agree_with_their_twins(n: int, eps: float, eta: float) -> None:
    assert close(certificate.dkw_epsilon(n, eta=eta), slow_certificate.dkw_epsilon(n, eta=eta))
    assert slow_certificate.dkw_n_is_smallest(certificate.dkw_n(eps, eta=eta), eps, eta=eta)


@given(alpha=st.floats(0.005, 0.9), confidence=st.floats(0.5, 0.999))
def test_the_zero_violation_size_agrees_with_its_twin(alpha: float, confidence: float) -> None:
    n, closest = slow_certificate.zero_violation_n(alpha, confidence=confidence)
    assume(closest > 1e-9)
    assert certificate.zero_violation_n(alpha, confidence=confidence) == n


@given(m=st.integers(1, 8), delta=DELTAS, a_max=st.floats(0.0, 5.0))
def test_message_bounds_by_the_supremum_agree_with_their_twins(m: int, delta: float, a_max: float) -> None:
    assert close(certificate.message_bound_amax(m, delta, a_max), slow_certificate.message_bound_amax(m, delta, a_max))
    assert close(certificate.message_bound_span(m, delta, a_max), slow_certificate.message_bound_span(m, delta, a_max))


@given(abar=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6), alpha=DELTAS, span=st.floats(0.0, 5.0))
def test_message_bounds_by_the_mean_agree_with_their_twins(abar: list[float], alpha: float, span: float) -> None:
    assert close(certificate.message_bound_mean(abar, span), slow_certificate.message_bound_mean(abar, span))
    fast = certificate.message_bound_mixed(abar, alpha, span)
    assert close(fast, slow_certificate.message_bound_mixed(abar, alpha, span))


@given(gamma=st.floats(0.0, 0.999), a_max=st.floats(0.0, 10.0))
def test_the_drift_constant_agrees_with_its_twin(gamma: float, a_max: float) -> None:
    slow = slow_certificate.teamtr_drift(gamma=gamma, a_max=a_max)
    assert certificate.teamtr_drift(gamma=gamma, a_max=a_max) == pytest.approx(slow, rel=1e-12)


@given(delta=st.floats(0.0, 10.0))
def test_alpha_from_kl_agrees_with_its_twin(delta: float) -> None:
    assert close(certificate.alpha_from_kl(delta), slow_certificate.alpha_from_kl(delta))


@given(gamma=st.sampled_from([0.5, 0.9, 0.99, 1.0]), n=st.integers(0, 3000))
@example(gamma=0.99, n=32768)
@example(gamma=0.99, n=74141)
def test_the_discount_agrees_with_repeated_multiplication(gamma: float, n: int) -> None:
    # In the subnormals every product rounds by much, so only above them is multiplying a truth.
    slow = slow_certificate.discount_at(gamma, n)
    fast = certificate.discount_at(gamma, n)
    assert fast == pytest.approx(slow, rel=1e-9) if slow > 1e-300 else fast <= 1e-300


# ---- scores -------------------------------------------------------------------------------------------


@given(data=st.data(), prompts=st.integers(1, 5), samples=st.integers(1, 6))
def test_avg_and_pass_agree_with_their_twins(data: st.DataObject, prompts: int, samples: int) -> None:
    row = st.lists(st.sampled_from([0.0, 1.0]), min_size=samples, max_size=samples)
    correct = data.draw(st.lists(row, min_size=prompts, max_size=prompts))
    k = data.draw(st.integers(1, samples))
    grid = torch.tensor(correct, dtype=torch.float64)
    assert close(scores.avg_at_n(grid), slow_scores.avg_at_n(correct))
    slow = [slow_scores.pass_at_k(samples, int(sum(r)), k) for r in correct]
    assert close(scores.pass_at_k_mean(grid, k), math.fsum(slow) / prompts)
    fast = [scores.pass_at_k(samples, int(sum(r)), k) for r in correct]
    assert all(map(close, fast, slow))
    with pytest.raises(BatonError):
        scores.pass_at_k(samples, int(sum(correct[0])), samples + 1)


@given(answers=st.lists(st.sampled_from([None, "1", "2", "3"]), min_size=1, max_size=9))
def test_the_majority_agrees_with_its_twin(answers: list[str | None]) -> None:
    def right(answer: str) -> bool:
        return answer == "2"

    assert close(scores.maj_at_k(answers, right), slow_scores.maj_at_k(answers, right))


CONFIDENCES = st.sampled_from([0.95, 0.9, 0.99])


@given(values=st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=40), confidence=CONFIDENCES)
def test_the_interval_of_a_proportion_agrees_with_its_twin(values: list[float], confidence: float) -> None:
    fast = scores.mean_interval(values, confidence=confidence)
    low, high = slow_scores.wilson(values, confidence=confidence)
    assert close(fast.value, sum(values) / len(values)) and close(fast.low, low) and close(fast.high, high)
    assert fast.n == len(values) and "wilson" in fast.method.lower()


@given(values=st.lists(st.floats(-3.0, 3.0), min_size=2, max_size=25), confidence=CONFIDENCES)
def test_the_interval_of_a_mean_agrees_with_its_twin(values: list[float], confidence: float) -> None:
    assume(any(v not in (0.0, 1.0) for v in values))
    fast = scores.mean_interval(values, confidence=confidence)
    low, high = slow_scores.student(values, confidence=confidence)
    scale = max(abs(low), abs(high))
    assert close(fast.value, math.fsum(values) / len(values))
    assert close(fast.low, low, scale=scale) and close(fast.high, high, scale=scale)
    assert fast.n == len(values) and "wilson" not in fast.method.lower()


@given(
    pairs=st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)), min_size=2, max_size=25),
    confidence=CONFIDENCES,
)
@example(pairs=[(1.0, 0.0), (1.0, 0.0), (1.0, 1.0)], confidence=0.95)
def test_the_paired_interval_agrees_with_its_twin(pairs: list[tuple[float, float]], confidence: float) -> None:
    after, before = [a for a, _ in pairs], [b for _, b in pairs]
    fast = scores.paired_interval(after, before, confidence=confidence)
    gains = [a - b for a, b in pairs]
    low, high = slow_scores.student(gains, confidence=confidence)
    scale = max(abs(low), abs(high))
    assert close(fast.value, math.fsum(gains) / len(gains))
    assert close(fast.low, low, scale=scale) and close(fast.high, high, scale=scale)
    assert fast.n == len(pairs)


# ---- batching -----------------------------------------------------------------------------------------

TOKEN = st.integers(0, 3)


@st.composite
def spoken_turns(draw: st.DrawFn) -> list[slow_batching.Spoken]:
    """Turns whose prompts extend what was said, repeat it cut short, or have nothing to do with it."""
    turns: list[slow_batching.Spoken] = []
    running: list[int] = []
    for _ in range(draw(st.integers(0, 4))):
        how = draw(st.sampled_from(["extends", "cut", "free"]))
        if how == "extends":
            prompt = running + draw(st.lists(TOKEN, max_size=2))
        elif how == "cut":
            prompt = running[:-1] + draw(st.lists(TOKEN, max_size=2))
        else:
            prompt = draw(st.lists(TOKEN, max_size=4))
        prompt = prompt or [draw(TOKEN)]
        ids = draw(st.lists(TOKEN, max_size=3))
        logprobs = [draw(st.floats(-60.0, 0.0)) for _ in ids]
        versions = [draw(st.integers(0, 9)) for _ in ids]
        turns.append((prompt, ids, logprobs, versions))
        running = prompt + ids if ids else running
    return turns


def episode_of(turns: Sequence[slow_batching.Spoken], *, name: str, group: str) -> Episode:
    """The turns of 'solver' among those of others: a trained teammate, a frozen agent, the environment."""
    said: list[Turn] = []
    for prompt, ids, logprobs, versions in turns:
        said.append(Turn(kind="observation", agent="frozen", seat=1, text="?"))
        said.append(
            Turn(
                kind="action", agent="solver", seat=0, text="!", prompt_ids=tuple(prompt), ids=tuple(ids),
                logprobs=tuple(logprobs), versions=tuple(versions),
            )
        )  # fmt: skip
        said.append(
            Turn(
                kind="action", agent="critic", seat=2, text=".", prompt_ids=tuple(prompt), ids=(1, 2),
                logprobs=(-1.0, -2.0), versions=(5, 5),
            )
        )  # fmt: skip
    return Episode(
        id=name,
        group=group,
        task_id=group,
        versions={"solver": 0},
        turns=tuple(said),
        answer="",
        outcome=Scored(reward=1.0),
    )


@given(turns=spoken_turns())
def test_trajectories_agree_with_their_twin(turns: list[slow_batching.Spoken]) -> None:
    fast = batching.trajectories(episode_of(turns, name="e", group="g"), "solver")
    slow = slow_batching.rows(turns)
    assert len(fast) == len(slow)
    for segment, (row, twin) in enumerate(zip(fast, slow, strict=True)):
        assert (row.episode_id, row.group, row.agent, row.segment) == ("e", "g", "solver", segment)
        assert list(row.ids) == twin.ids
        assert list(row.mask) == twin.mask
        assert list(row.versions) == twin.versions
        own = [i for i, sampled in enumerate(twin.mask) if sampled]
        assert [row.behavior_logprobs[i] for i in own] == [twin.logprobs[i] for i in own]
        assert len(row.behavior_logprobs) == len(row.ids)


@st.composite
def row_sets(draw: st.DrawFn, *, longest: int = 6) -> list[dict[str, Any]]:
    """Rows of several episodes of a few prompts; the first token of each row is its number."""
    out: list[dict[str, Any]] = []
    for e in range(draw(st.integers(1, 6))):
        group = draw(st.sampled_from(string.ascii_lowercase[:4]))
        for segment in range(draw(st.sampled_from([1, 1, 1, 2]))):
            length = draw(st.integers(2, longest))
            mask = [False, *draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))]
            mask[draw(st.integers(1, length - 1))] = True
            out.append(
                dict(
                    episode_id=f"e{e}",
                    group=group,
                    agent="solver",
                    segment=segment,
                    ids=(len(out), *(draw(TOKEN) for _ in range(length - 1))),
                    mask=tuple(mask),
                    behavior_logprobs=tuple(draw(st.floats(-60.0, 0.0)) if own else 0.0 for own in mask),
                    versions=tuple(draw(st.integers(0, 9)) if own else -1 for own in mask),
                )
            )
    return out


def built(fields: list[dict[str, Any]]) -> list[Trajectory]:
    """The rows, made outside the strategy: the type check draws at random, which a strategy may not."""
    return [Trajectory(**row) for row in fields]


@given(fields=row_sets())
def test_the_token_batch_agrees_with_its_rows_token_by_token(fields: list[dict[str, Any]]) -> None:
    rows = built(fields)
    batch = batching.token_batch(rows, temperature=0.7)
    width = max(len(row.ids) for row in rows)
    assert tuple(batch.ids.shape) == (len(rows), width)
    assert batch.lengths.tolist() == [len(row.ids) for row in rows]
    assert (batch.agent, batch.temperature) == ("solver", 0.7)
    assert batch.episode_ids == tuple(row.episode_id for row in rows)
    assert batch.groups == tuple(row.group for row in rows)
    for b, row in enumerate(rows):
        for t in range(width):
            own = t < len(row.ids) and row.mask[t]
            assert bool(batch.mask[b, t]) == own
            if t < len(row.ids):
                assert int(batch.ids[b, t]) == row.ids[t]
            if own:
                assert int(batch.versions[b, t]) == row.versions[t]
                assert close(float(batch.behavior_logprobs[b, t]), row.behavior_logprobs[t], tol=1e-6)
        for c, other in enumerate(rows):
            assert (int(batch.episode[b]) == int(batch.episode[c])) == (row.episode_id == other.episode_id)


@given(fields=row_sets(), data=st.data())
def test_an_episodes_advantage_lies_on_each_of_its_action_tokens(fields: list[dict[str, Any]], data: st.DataObject) -> None:
    rows = built(fields)
    batch = batching.token_batch(rows, temperature=1.0)
    names = sorted({row.episode_id for row in rows})
    per_episode = {name: data.draw(ADVANTAGES) for name in names}
    fast = batching.with_advantages(batch, per_episode, team={"solver": 3})
    assert dict(fast.team) == {"solver": 3}
    for b, row in enumerate(rows):
        for t in range(batch.ids.shape[1]):
            expected = per_episode[row.episode_id] if t < len(row.ids) and row.mask[t] else 0.0
            assert close(float(fast.advantages[b, t]), expected, tol=1e-6)
    absent = data.draw(st.sampled_from(names))
    with pytest.raises(MissingError, match=absent):
        batching.with_advantages(batch, {n: a for n, a in per_episode.items() if n != absent}, team={"solver": 3})
    with pytest.raises(NonFiniteError, match=absent):
        batching.with_advantages(batch, per_episode | {absent: math.nan}, team={"solver": 3})


@given(fields=row_sets(), count=st.integers(1, 5))
def test_parts_are_whole_groups_in_prompt_order_and_as_even_as_groups_allow(
    fields: list[dict[str, Any]], count: int
) -> None:
    rows = built(fields)
    batch = batching.token_batch(rows, temperature=1.0)
    whole = batching.with_advantages(batch, {row.episode_id: float(i) for i, row in enumerate(rows)}, team={"solver": 0})
    parts = batching.parts(whole, count)
    order = list(dict.fromkeys(row.group for row in rows))
    assert len(parts) == min(count, len(order))
    groups = [list(dict.fromkeys(part.batch.groups)) for part in parts]
    assert [name for part in groups for name in part] == order, "prompt order, no group in two parts"
    sizes = [len(part) for part in groups]
    assert max(sizes) - min(sizes) <= 1
    seen: list[int] = []
    for part in parts:
        assert dict(part.team) == {"solver": 0}
        for b in range(part.batch.n_rows):
            number = int(part.batch.ids[b, 0])
            seen.append(number)
            row = rows[number]
            assert part.batch.episode_ids[b] == row.episode_id
            on_tokens = part.advantages[b][part.batch.mask[b]]
            assert bool((on_tokens == whole.advantages[number][batch.mask[number]]).all())
    assert sorted(seen) == list(range(len(rows))), "every row once"
    for name in order:
        inside = [n for n in seen if rows[n].group == name]
        assert inside == sorted(inside), "rows of a group keep their order"


@given(fields=row_sets(longest=9), max_tokens=st.integers(4, 60))
def test_micro_batches_cover_every_row_once_within_the_budget(fields: list[dict[str, Any]], max_tokens: int) -> None:
    rows = built(fields)
    batch = batching.token_batch(rows, temperature=1.0)
    chunks = batching.micro_batches(batch, max_tokens=max_tokens)
    lengths = [len(row.ids) for row in rows]

    def padded(index: Sequence[int]) -> int:
        return len(index) * max(lengths[i] for i in index)

    assert sorted(i for chunk in chunks for i in chunk) == list(range(len(rows)))
    owners = [{rows[i].episode_id for i in chunk} for chunk in chunks]
    for chunk, owner in zip(chunks, owners, strict=True):
        assert padded(chunk) <= max_tokens or len(owner) == 1
    for a in range(len(owners)):
        for b in range(a):
            assert not owners[a] & owners[b], "an episode was split"
    if padded(range(len(rows))) <= max_tokens:
        assert len(chunks) == 1, "what fits into one is one"
    if len({row.episode_id for row in rows}) == len(rows):
        assert [i for chunk in chunks for i in chunk] == sorted(range(len(rows)), key=lambda i: (-lengths[i], i))
        for chunk, following in pairwise(chunks):
            assert padded([*chunk, following[0]]) > max_tokens, "a row that still fitted was put off"
