"""Published and recomputed values of ALGORITHMS 9.1: one test, or one parametrised test, per value."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from baton.core import advantages, batching, certificate, coupling, divergence, losses, trust_region
from baton.core.losses import Band
from baton.types import TokenBatch, TokenDivergence, Trajectory
from reference.certificate import hoeffding_bound

F64 = torch.float64


def close(value: float, abs: float = 1e-6) -> object:
    return pytest.approx(value, abs=abs, rel=0)


def law(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=F64).log()


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=F64)


ALL = torch.ones(1, 4, dtype=torch.bool)


# ---- losses ------------------------------------------------------------------------------------------------


def test_g1_the_band_is_strict_and_rejected_tokens_stay_in_the_denominator() -> None:
    logp = row(0.7, 0.8, 2.0, 6.0).log().requires_grad_()
    term = losses.dis(logp, row(0, 0, 0, 0), row(1, 1, 1, 1), ALL, band=losses.REASONING, denominator=4.0)
    (gradient,) = torch.autograd.grad(term.total, logp)
    assert (-4.0 * gradient[0]).tolist() == close([0.0, 0.8, 2.0, 0.0])
    assert term.total.item() == close((-0.8 * math.log(0.8) - 2.0 * math.log(2.0)) / 4.0)
    counts = {name: term.diagnostics[name] for name in ("tokens", "kept", "rejected_low", "rejected_high")}
    assert counts == {"tokens": 4.0, "kept": 2.0, "rejected_low": 1.0, "rejected_high": 1.0}
    as_mask = losses.band_mask(logp, row(0, 0, 0, 0), ALL, band=losses.REASONING)
    assert as_mask.tolist() == [[False, True, True, False]]


def test_g7_the_clip_of_the_sequence_ratio_in_log_space() -> None:
    assert math.log1p(-0.2) == close(-0.2231436, 1e-7) and math.log1p(0.2) == close(0.1823216, 1e-7)
    for u, edge in ((-3.0, -0.2231436), (3.0, 0.1823216)):
        advantage = math.copysign(1.0, u)  # the side on which the minimum takes the clipped ratio
        term = losses.sequence(
            row(u),
            row(0.0),
            row(advantage),
            ALL[:, :1],
            episode_B=torch.tensor([0]),
            clip=0.2,
            denominator=1.0,
        )
        assert math.log(float(-term.total / advantage)) == close(edge, 1e-7)


@pytest.mark.parametrize(("ratio", "advantage", "value"), [(1.5, 1, 1.2), (1.5, -1, -1.5), (0.5, 1, 0.5), (0.5, -1, -0.8)])
def test_g17_the_clipped_sequence_term(ratio: float, advantage: float, value: float) -> None:
    # Spread over two tokens and two rows: the ratio is of the whole episode.
    half = math.log(ratio) / 4.0
    two = torch.full((2, 2), 1.0, dtype=F64)
    term = losses.sequence(
        half * two,
        0.0 * two,
        advantage * two,
        two > 0,
        episode_B=torch.tensor([7, 7]),
        clip=0.2,
        denominator=1.0,
    )
    assert float(-term.total) == close(value)


def test_g19_the_weight_is_a_constant_to_the_gradient() -> None:
    logp = row(math.log(0.5)).requires_grad_()
    term = losses.dis(logp, row(math.log(0.25)), row(1.0), ALL[:, :1], band=losses.REASONING, denominator=1.0)
    (gradient,) = torch.autograd.grad(term.total, logp)
    assert float(-gradient) == close(2.0)
    moving = (logp - math.log(0.25)).exp() * logp
    assert float(torch.autograd.grad(moving.sum(), logp)[0]) == close(0.6137056)


def test_g20_token_losses_share_one_denominator() -> None:
    def sample(episode: str, *logprobs: float) -> Trajectory:
        n = len(logprobs)
        return Trajectory(
            episode_id=episode,
            group="q",
            agent="a",
            segment=0,
            ids=(1,) * (n + 1),
            mask=(False,) + (True,) * n,
            behavior_logprobs=(0.0, *logprobs),
            versions=(-1,) + (0,) * n,
        )

    batch = batching.token_batch([sample("x", -4.0), sample("y", -1.0, -1.0, -1.0)], temperature=1.0)
    scored = batching.with_advantages(batch, {"x": 1.0, "y": 1.0}, team={"a": 0})
    objective = losses.Objective(weight=losses.Dis(band=losses.TIGHT), penalty=0.0)
    assert objective.denominator(batch) == 4.0

    def total(part: TokenBatch, rows: list[int], denominator: float) -> float:
        logp = part.behavior_logprobs[rows]
        term = objective(
            logp[:, : int(part.lengths[rows].max())],
            scored.rows(rows),
            kl_BT=None,
            denominator=denominator,
            n_act=4,
        )
        return float(term.total)

    assert total(batch, [0, 1], 4.0) == close(1.75)
    assert total(batch, [0], 4.0) + total(batch, [1], 4.0) == close(1.75)
    assert (total(batch, [0], 1.0) + total(batch, [1], 3.0)) / 2.0 == close(2.5)  # the wrong mean of means
    sequences = losses.Objective(weight=losses.SequenceRatio(), penalty=0.0)
    assert sequences.denominator(batch) == 2.0


def binary_kls(*pairs: tuple[float, float]) -> tuple[Tensor, Tensor, Tensor]:
    """(log q, log p, mask) of (p, q) pairs, one token each."""
    p, q = (row(*(pair[i] for pair in pairs)).log() for i in (0, 1))
    return q, p, torch.ones_like(p, dtype=torch.bool)


def test_g45_sequence_trust_keeps_or_drops_the_whole_trajectory() -> None:
    far = binary_kls((0.5, 0.55), (0.9, 0.95))
    d = losses.binary_kl(*far)
    assert d[0].tolist() == close([0.0050252, 0.0206542], 1e-7) and float(d.mean()) == close(0.0128397, 1e-7)
    near = binary_kls((0.5, 0.53), (0.9, 0.91))
    assert float(losses.binary_kl(*near).mean()) == close(0.0011972, 1e-7)
    episode = torch.tensor([3])
    assert not losses.sequence_trust_mask(*far, episode_B=episode, limit=5e-3).any()
    assert bool(losses.sequence_trust_mask(*near, episode_B=episode, limit=3e-3).all())


def test_g46_the_second_moment_mask_drops_the_largest_until_the_mean_fits() -> None:
    x = row(1.0, 1.1, 2.0, 4.0).log()
    square = x.square()[0]
    assert square.tolist() == close([0.0, 0.0090840, 0.4804530, 1.9218121], 1e-7)
    means = [float(square[:n].mean()) for n in (1, 2, 3)]
    assert means == close([0.0, 0.0045420, 0.1631790], 1e-7)
    keep = losses.second_moment_mask(x, torch.zeros_like(x), ALL, limit=0.04)
    assert keep.tolist() == [[True, True, False, False]]


def test_g47_the_probability_difference_drops_what_moves_further_away() -> None:
    q, p, mask = binary_kls((0.1, 0.3), (0.001, 0.003), (0.3, 0.1))
    rule = losses.ProbabilityDifference()
    assert rule.limit == 0.15
    assert losses.dppo_mask(q, p, torch.ones_like(q), mask, rule=rule).tolist() == [[False, True, True]]
    assert losses.dppo_mask(q, p, -torch.ones_like(q), mask, rule=rule).tolist() == [[True, True, False]]
    symmetric = losses.ProbabilityDifference(form="symmetric")
    assert losses.dppo_mask(q, p, torch.ones_like(q), mask, rule=symmetric).tolist() == [[False, True, False]]


def test_g40_a_band_is_two_bounds_and_not_one_minus_eps() -> None:
    loose = 1 - 0.8
    assert repr(loose) == "0.19999999999999996"

    def kept(low: float) -> float:
        term = losses.dis(row(0.2).log(), row(0.0), row(1.0), ALL[:, :1], band=Band(low=low, high=4.0), denominator=1.0)
        return term.diagnostics["kept"]

    assert kept(loose) == 1.0 and kept(0.2) == 0.0
    assert Band(low=0.2, high=4.0) == losses.CODING


# ---- advantages --------------------------------------------------------------------------------------------


def test_g6_group_norm_uses_the_population_std_and_a_flat_group_is_zero() -> None:
    mixed = advantages.group(row(1, 0, 0, 0)[0], ["q"] * 4)
    assert mixed.values.tolist() == close([1.7320508, *[-0.5773503] * 3])
    flat = advantages.group(row(2, 2, 2, 2)[0], ["q"] * 4)
    assert flat.values.tolist() == [0.0] * 4 and flat.degenerate_groups == 1


def test_g18_leave_one_out() -> None:
    values = advantages.loo(row(1, 0, 0, 0)[0], ["q"] * 4).values
    assert values.tolist() == close([1.0, *[-1 / 3] * 3])


@pytest.mark.parametrize(("ratios", "trace"), [((1, 0.5, 0.8), (0.0938, 0.408, 0.8)), ((1, 1, 1), (0.432, 0.56, 0.8))])
def test_g16_the_trace_of_truncated_ratios(ratios: tuple[float, ...], trace: tuple[float, ...]) -> None:
    rewards, values = row(0, 0, 1)[0], row(0.5, 0.4, 0.2)[0]
    found = advantages.truncated_trace(rewards, values, row(*ratios)[0], gamma=1.0, lam=0.95)
    assert found.tolist() == close(list(trace), 1e-12)


@pytest.mark.parametrize(("weights", "share"), [((1, 1, 1, 1), 1.0), ((4, 0, 0, 0), 0.25), ((1, 2, 3, 4), 0.8333333)])
def test_g34_effective_sample_size(weights: tuple[float, ...], share: float) -> None:
    assert advantages.effective_sample_share(row(*weights)[0].log()) == close(share, 1e-7)


@pytest.mark.parametrize(
    ("accuracy", "group", "share"),
    [(0.1, 4, 0.3438), (0.15, 4, 0.4774875), (0.1, 8, 0.5695328), (0.15, 8, 0.7275092)],
)
def test_g49_share_of_informative_groups(accuracy: float, group: int, share: float) -> None:
    assert advantages.informative_share(accuracy, group) == close(share, 1e-7)


# ---- divergences -------------------------------------------------------------------------------------------


def test_g11_another_temperature_shows_as_a_log_ratio() -> None:
    logits = row(2.0, 0.0)
    trainer = divergence.log_law(logits, temperature=1.0)
    engine = divergence.log_law(logits, temperature=0.8)
    x = trainer - engine
    assert x[0].tolist() == close([-0.0480383, 0.4519617])
    assert float((engine.exp() * divergence.k3(x)).sum()) == close(0.0101092)


def test_g21_both_directions_and_total_variation() -> None:
    old, new = law(0.5, 0.5), law(0.9, 0.1)
    new_old, old_new = divergence.exact(new, old)
    assert float(new_old) == close(0.3680642) and float(old_new) == close(0.5108256)
    assert float(divergence.total_variation(new, old)) == close(0.4)


def test_g22_message_kl_is_the_sum_of_token_kls_in_the_sampling_direction_only() -> None:
    first, second = law(0.9, 0.1), {0: law(0.9, 0.1), 1: law(0.5, 0.5)}
    half = law(0.5, 0.5)
    messages = list(product((0, 1), repeat=2))
    new = torch.stack([first[0, a] + second[a][0, b] for a, b in messages])[None]
    old = torch.full_like(new, math.log(0.25))
    new_old, old_new = divergence.exact(new, old)
    assert float(new_old) == close(0.6993220) and float(old_new) == close(0.7662384)

    # Every message once: equal weights are its law under the old policy.
    tokens = [(message, at) for message in messages for at in (first, second[message[0]])]
    number = torch.tensor([messages.index(message) for message, _ in tokens])
    token_new_old = torch.cat([divergence.kl(at, half) for _, at in tokens])
    token_old_new = torch.cat([divergence.kl(half, at) for _, at in tokens])
    _, sums = divergence.message_values(token_old_new, number)
    assert float(sums.mean()) == close(0.7662384)
    _, sums = divergence.message_values(token_new_old, number)
    assert float(sums.mean()) == close(0.5520963)


@pytest.mark.parametrize(("temperature", "new_old", "old_new"), [(1.0, 0.1109441, 0.1201145), (0.5, 0.3278133, 0.4337808)])
def test_g52_divergences_are_taken_at_the_sampling_temperature(temperature: float, new_old: float, old_new: float) -> None:
    current = divergence.log_law(row(0.0, 0.0), temperature=temperature)
    candidate = divergence.log_law(row(1.0, 0.0), temperature=temperature)
    kls = divergence.exact(candidate, current)
    assert [float(kl) for kl in kls] == close([new_old, old_new])


# ---- trust region ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "level", "miss", "rank"),
    [
        (59, 0.95, 0.05, 59),
        (128, 0.95, 0.05, 126),
        (299, 0.99, 0.05, 299),
        (512, 0.99, 0.05, 511),
        (1000, 0.99, 0.05, 996),
        (2000, 0.99, 0.05, 1988),
        (5000, 0.99, 0.05, 4962),
        (58, 0.95, 0.05, None),
        (298, 0.99, 0.05, None),
        (64, 0.95, 0.05 / 5, None),
        (89, 0.95, 0.05 / 5, None),
        (90, 0.95, 0.05 / 5, 90),
        (128, 0.95, 0.05 / 5, 128),
        (458, 0.99, 0.05 / 5, None),
        (459, 0.99, 0.05 / 5, 459),
        (1000, 0.99, 0.05 / 5, 998),
    ],
)
def test_g23_order_statistic(n: int, level: float, miss: float, rank: int | None) -> None:
    assert trust_region.order_statistic_rank(n, level=level, confidence_miss=miss) == rank


@pytest.mark.parametrize(("n", "level"), [(64, 0.9305720), (32, 0.8659643)])
def test_g23_certifiable_level(n: int, level: float) -> None:
    assert trust_region.certifiable_level(n, confidence_miss=0.01) == close(level, 1e-7)


@pytest.mark.parametrize(("level", "miss", "n"), [(0.99, 0.01, 459), (0.95, 0.01, 90), (0.99, 0.05, 299), (0.95, 0.05, 59)])
def test_g23_units_needed_are_the_fewest_with_a_rank(level: float, miss: float, n: int) -> None:
    assert trust_region.units_needed(level=level, confidence_miss=miss) == n
    assert trust_region.order_statistic_rank(n, level=level, confidence_miss=miss) == n
    assert trust_region.order_statistic_rank(n - 1, level=level, confidence_miss=miss) is None


@pytest.mark.parametrize(
    ("k", "n", "upper"),
    [
        (0, 128, 0.0231324),
        (0, 299, 0.0099691),
        (1, 299, 0.0157668),
        (1, 512, 0.0092316),
        (5, 512, 0.0204229),
        (3, 1000, 0.0077352),
    ],
)
def test_g24_clopper_pearson(k: int, n: int, upper: float) -> None:
    assert trust_region.clopper_pearson_upper(k, n) == close(upper, 1e-7)


def test_g25_the_line_search_stops_at_a_quarter() -> None:
    current = divergence.log_law(row(0.0, 0.0), temperature=1.0)
    index = torch.tensor([0])
    seen: list[tuple[float, float, bool]] = []
    for scale in (1.0, *trust_region.line_search_scales(4)):
        candidate = divergence.log_law(row(scale * math.log(9.0), 0.0), temperature=1.0)
        new_old, old_new = divergence.exact(candidate, current)
        measured = TokenDivergence(kl_new_old=new_old, kl_old_new=old_new, row=index, position=index)
        record = trust_region.gate(
            measured,
            message=index,
            unit=index,
            drawn=index,
            direction="new_old",
            alpha=0.01,
            eta=0.05,
            looks=5,
            radius_token=0.05,
            radius_message_mean=0.05,
            scale=scale,
        )
        seen.append((scale, record.q_gate, record.passed))
    assert [scale for scale, _, _ in seen] == [1.0, *trust_region.SCALES]
    assert [q for _, q, _ in seen][:4] == close([0.3680642, 0.1308120, 0.0363408, 0.0093411])
    assert next(scale for scale, _, passed in seen if passed) == 1 / 4


@pytest.mark.parametrize(
    ("steps", "beta", "expected", "kl"),
    [
        (1, 0.0, (0.4484409, 0.3213219, 0.2302372), None),
        (1, 1.0, (0.4484409, 0.3213219, 0.2302372), None),
        (2, 0.0, (0.5735213, 0.2698210, 0.1566577), 0.1358976),
        (2, 1.0, (0.5323712, 0.2881667, 0.1794621), 0.0961778),
    ],
)
def test_g26_the_penalty_acts_from_the_second_inner_step(
    steps: int, beta: float, expected: tuple[float, ...], kl: float | None
) -> None:
    advantage = row(1.0, 0.0, -1.0)
    current = divergence.log_law(row(0.0, 0.0, 0.0), temperature=1.0)
    logits = row(0.0, 0.0, 0.0).requires_grad_()
    for _ in range(steps):
        policy = divergence.log_law(logits, temperature=1.0)
        penalty = losses.kl_term(
            divergence.kl(policy, current)[:, None], torch.ones(1, 1, dtype=torch.bool), denominator=1.0
        )
        (gradient,) = torch.autograd.grad((policy.exp() * advantage).sum() - beta * penalty, logits)
        logits = (logits + gradient).detach().requires_grad_()
    policy = divergence.log_law(logits.detach(), temperature=1.0)
    assert policy.exp()[0].tolist() == close(list(expected), 1e-7)
    if kl is not None:
        assert float(divergence.kl(policy, current)) == close(kl, 1e-7)


def test_g26b_what_a_retry_shrinks_by_and_through_what() -> None:
    """A 3-way softmax from logits 0 by hand: two exact steps on E[A] - beta KL, A = (1, 0, -1)."""

    def trained(beta: float, lr: float) -> tuple[list[float], float, float]:
        z = [0.0, 0.0, 0.0]
        for _ in range(2):
            p = [math.exp(x) / sum(map(math.exp, z)) for x in z]
            gain = p[0] - p[2]
            kl = sum(q * math.log(3.0 * q) for q in p)
            z = [x + lr * q * (a - gain - beta * (math.log(3.0 * q) - kl)) for x, q, a in zip(z, p, (1, 0, -1), strict=True)]
        p = [math.exp(x) / sum(map(math.exp, z)) for x in z]
        return p, sum(q * math.log(3.0 * q) for q in p), math.hypot(*z)

    _, kl, first = trained(0.001, 1.0)
    assert kl == close(0.1358551, 1e-7)
    for r, want, want_kl, total, by_beta in (
        (1, (0.4464036, 0.3169573, 0.2366391), 0.0333446, 0.4875345, 0.9750690),
        (2, (0.3785981, 0.3305184, 0.2908836), 0.0057805, 0.2022680, 0.8090722),
    ):
        beta, lr = trust_region.retry_penalty(0.001, r), trust_region.retry_lr(1.0, r)
        assert (beta, lr) == {1: (close(0.5), 0.5), 2: (close(5.0), 0.25)}[r]
        p, kl, moved = trained(beta, lr)
        assert p == close(list(want), 1e-7) and kl == close(want_kl, 1e-7)
        assert trust_region.shrinkage(first, moved, lr) == close((total, lr, by_beta), 1e-7)


def test_g27_a_retry_raises_the_penalty_tenfold_and_halves_the_lr() -> None:
    assert [trust_region.retry_penalty(0.001, r) for r in (1, 2)] == close([0.5, 5.0])
    assert [trust_region.retry_penalty(0.2, r) for r in (1, 2)] == close([2.0, 10.0])
    assert [trust_region.retry_lr(1e-3, r) for r in (1, 2, 3)] == close([5e-4, 2.5e-4, 1.25e-4], 1e-12)


def test_g38_the_greedy_gain() -> None:
    kappa, gain = trust_region.greedy_gain(row(1, 2)[0], row(1, 4)[0], delta=0.02, eps=0.0)
    assert kappa == close(2.0) and gain == close(0.2828427, 1e-7)


def test_g48_the_budget_follows_the_squared_gain() -> None:
    assert trust_region.allocate_radius_continuous((2.0, 1.0), 0.10) == close((0.08, 0.02), 1e-12)


def test_g27_the_penalty_doubles_on_failure_and_halves_when_relaxed() -> None:
    beta, path = 0.001, []
    for _ in range(5):
        beta = trust_region.next_penalty(beta, full_step_failed=True, relaxed=False)
        path.append(beta)
    assert path == close([0.002, 0.004, 0.008, 0.016, 0.032])
    assert trust_region.next_penalty(0.002, full_step_failed=False, relaxed=True) == close(0.001)
    assert trust_region.next_penalty(0.001, full_step_failed=False, relaxed=True) == close(0.001)
    assert trust_region.next_penalty(8.0, full_step_failed=True, relaxed=False) == close(10.0)
    assert trust_region.next_penalty(0.5, full_step_failed=False, relaxed=False) == 0.5


def test_g43_the_length_of_the_way() -> None:
    assert trust_region.fisher_rao(0.10, 0.98) == close(2.2142974)


@pytest.mark.parametrize(("delta", "limit", "updates"), [(0.05, 7.0022233, 8), (0.01, 15.6574473, 16), (0.5, 2.2142974, 3)])
def test_g43_speed_limit_and_the_greedy_run_that_meets_it(delta: float, limit: float, updates: int) -> None:
    assert trust_region.speed_limit(0.10, 0.98, delta=delta) == close(limit)
    assert math.ceil(trust_region.speed_limit(0.10, 0.98, delta=delta)) == updates
    assert trust_region.greedy_exact_steps(0.10, 0.98, delta=delta, direction="max") == updates


# ---- certificate -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "eps"), [(128, 0.1200403), (512, 0.0600202), (2048, 0.0300101), (20000, 0.0096032)])
def test_g9_dkw_error(n: int, eps: float) -> None:
    assert certificate.dkw_epsilon(n, eta=0.05) == close(eps, 1e-7)


def test_g9_sample_sizes() -> None:
    assert certificate.dkw_n(0.01, eta=0.05) == 18_445
    assert certificate.zero_violation_n(0.01, confidence=0.95) == 299
    assert certificate.zero_violation_n(0.05, confidence=0.95) == 59


@pytest.mark.parametrize(
    ("gamma", "delta", "printed", "trpo", "tolerance"),
    [
        (0.99, 0.05, 15653.274, 4950.0, 1e-3),
        (0.99, 0.01, 7000.357, 990.0, 1e-3),
        (0.99, 0.001, 2213.707, 99.0, 1e-3),
        (0.9, 0.05, 142.3025, 45.0, 1e-4),
        (0.5, 0.05, 3.1622777, 1.0, 1e-6),
    ],
)
def test_g10_occupancy_penalty(gamma: float, delta: float, printed: float, trpo: float, tolerance: float) -> None:
    # The table rounds to its last digit: half a unit of it is the tolerance.
    assert certificate.occupancy_penalty_printed(delta, gamma=gamma, a_max=5.0) == close(printed, tolerance / 2)
    assert certificate.occupancy_penalty_trpo(delta, gamma=gamma, a_max=5.0) == close(trpo)


def test_g39_the_drift_constant() -> None:
    assert certificate.teamtr_drift(gamma=0.99, a_max=5.0) == close(70003.571, 5e-4)


@pytest.mark.parametrize(("delta", "alpha"), [(0.01, 0.0707107), (1.0, 0.7071068), (1.6, 0.8933664), (2.0, 0.9298735)])
def test_g29_total_variation_from_kl(delta: float, alpha: float) -> None:
    assert certificate.alpha_from_kl(delta) == close(alpha, 1e-7)


@pytest.mark.parametrize(("delta", "bound"), [(0.05, -47062.387), (0.01, -21103.635), (0.001, -6743.686), (0.0, -102.564)])
def test_g33_the_published_bound_is_vacuous_and_void(delta: float, bound: float) -> None:
    result = certificate.published([delta] * 3, [512] * 3)
    assert result.lower_bound == close(bound, 5e-4)
    assert result.is_vacuous and (result.kind, result.verdict, result.reason) == (
        "published",
        "void",
        "assumed_term",
    )
    unmeasured = {term.name: term for term in result.terms if term.note == "not measured"}
    assert set(unmeasured) == {"gain", "curvature", "bias"}
    assert all(term.value == 0.0 and term.basis == "assumed" for term in unmeasured.values())


def test_g42_a_discounted_terminal_reward_is_worth_nothing() -> None:
    assert certificate.discount_at(0.99, 32_768) == pytest.approx(9.42e-144, rel=1e-3)
    assert certificate.discount_at(0.99, 74_141) == 0.0 < certificate.discount_at(0.99, 74_140)


@pytest.mark.parametrize(
    ("pre", "current", "delta", "lam", "new"),
    [
        ((0.9, 0.1), (0.5, 0.5), 0.01, 6.7293789, (0.5705926, 0.4294074)),
        ((0.7, 0.2, 0.1), (0.2, 0.3, 0.5), 0.02, 4.7234877, (0.2748075, 0.3085280, 0.4166646)),
        ((0.98, 0.01, 0.01), (0.1, 0.6, 0.3), 0.05, 6.2508846, (0.2057602, 0.5123610, 0.2818788)),
    ],
)
def test_g8_g8b_a_newcomer_enters_the_ball(
    pre: tuple[float, ...], current: tuple[float, ...], delta: float, lam: float, new: tuple[float, ...]
) -> None:
    log_new, w = divergence.project(law(*pre), law(*current), radius=delta)
    assert float(w / (1.0 - w)) == close(lam)
    assert log_new.exp()[0].tolist() == close(list(new), 1e-7)
    assert float(divergence.kl(log_new, law(*current))) == close(delta, 1e-9)


def test_g8_inside_the_ball_nothing_moves() -> None:
    pre, current = law(0.9, 0.1), law(0.5, 0.5)
    distance = float(divergence.kl(pre, current))
    assert distance == close(0.3680642, 1e-7)
    for delta in (distance, 0.3680643, 1.0):
        new, w = divergence.project(pre, current, radius=delta)
        assert torch.equal(new, pre) and float(w) == 0.0


def test_g28_the_held_out_gain_of_one_message() -> None:
    """E under the old law: both messages weigh the same."""
    log_ratio, returns = row(1.8, 0.2).log().T, row(1.0, 0.0)[0]
    for baseline in (0.0, 0.3):
        gain, lost, apart = certificate.surrogate_terms(log_ratio, returns, torch.full((2, 1), baseline, dtype=F64))
        assert float(gain.mean()) == close(0.4, 1e-12)
        assert float(apart.mean()) == close(0.4, 1e-12)
        assert float(lost.mean()) == close(0.0, 1e-12)
    gain, lost, _ = certificate.surrogate_terms(log_ratio, returns, torch.zeros(2, 1, dtype=F64), cap=1.5)
    assert (float(gain.mean()), float(lost.mean())) == close((0.25, 0.15), 1e-12)


D31 = torch.tensor([1, 0, 0, 1, 0, -1, 1, 0, 1, 0] * 10, dtype=F64)


def test_g31_the_wealth_of_a_bet_on_a_gain() -> None:
    wealth = certificate.log_wealth(D31, 0.0, width=1.0, level=0.05).exp()
    assert int((wealth >= 20.0).nonzero()[0]) + 1 == 31
    assert float(wealth[-1]) == close(965.0737, 1e-4)
    # Stakes: the first pair, X = 1, against m so small that the cap of .5/m leaves them free.
    free = certificate.log_wealth(D31[:3], -1.0 + 2e-9, width=1.0, level=0.05)
    assert math.expm1(float(free[0])) == close(5.880087, 1e-5)
    assert math.expm1(float(free[1] - free[0])) == close(4.177527 / 2.0, 1e-5)
    assert math.expm1(float(free[2] - free[1])) == close(3.563871 / 2.0, 1e-5)
    assert float(certificate.betting_bound(D31, width=1.0, level=0.05)) == close(0.1264042, 1e-7)
    returns = [(1.0 if x > 0 else 0.0, 1.0 if x < 0 else 0.0) for x in D31.tolist()]
    made = certificate.measured(*zip(*returns, strict=True), low=0.0, high=1.0, level=0.05)
    assert made.verdict == "positive" and made.lower_bound == close(0.1264042, 1e-7)


def test_g32_at_a_fixed_number_of_pairs() -> None:
    assert float(certificate.bernstein_bound(D31, reach=2.0, level=0.05)) == close(-0.0486846, 1e-7)
    assert hoeffding_bound(D31.tolist(), reach=2.0, level=0.05) == close(0.0552253, 1e-7)


def test_g37_the_cost_of_a_teammates_update() -> None:
    alpha = certificate.alpha_from_kl(0.01)
    assert certificate.staleness_bound(1, alpha, [(1, alpha)], 1.0) == close(0.01, 1e-12)
    assert certificate.staleness_bound(1, alpha, [(2, alpha)], 1.0) == close(0.02, 1e-12)


def test_g41_the_first_of_two_turns() -> None:
    log_ratio = torch.stack([row(0.5, 1.2, 0.9, 1.4)[0].log(), torch.zeros(4, dtype=F64)], dim=1)
    gain, _, apart = certificate.surrogate_terms(log_ratio, row(0.5, -0.5, 0.5, -0.5)[0], torch.zeros(4, 2, dtype=F64))
    assert float(gain.mean()) == close(-0.15, 1e-12)
    assert apart.mean(0).tolist() == close([0.15, 0.0], 1e-12)
    assert certificate.message_bound_mean(apart.mean(0).tolist(), 1.0) == close(0.30, 1e-12)


def test_g50_two_laws_part_half_as_often_when_they_are_coupled() -> None:
    p, q = law(0.5, 0.3, 0.2), law(0.4, 0.3, 0.3)
    grid = torch.cartesian_prod((torch.arange(10, dtype=F64) + 0.5) / 10, (torch.arange(10, dtype=F64) + 0.5) / 10)
    old, new = (one.expand(100, 3) for one in (p, q))
    x, y = coupling.coupled(old, new, grid)
    assert float((x != y).double().mean()) == close(0.1, 1e-12)
    same = grid[:, 0]
    apart = coupling.inverse_cdf(old.exp(), same) != coupling.inverse_cdf(new.exp(), same)
    assert float(apart.double().mean()) == close(0.2, 1e-12)


def test_g51_the_range_term_of_a_surrogate() -> None:
    each = certificate.miss_rate(0.05, n_agents=3) / (2 * 5)
    for n, term in ((32, 1.0673), (128, 0.2605), (512, 0.0647)):
        # The bound of constants is their value less the range term.
        assert -float(certificate.bernstein_bound(torch.zeros(n), reach=2.0, level=each)) == close(term, 5e-5)
    assert certificate.bernstein_n(each, share=0.1) == 332
