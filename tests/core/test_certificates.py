"""What may be said of an update: coupled draws, bounds that may be looked at, held-out gains, and the way into the ball."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from baton.core import certificate, coupling, divergence, keyed
from baton.errors import BatonError, ConfigError, DataError, MissingError, NonFiniteError
from reference import certificate as slow
from reference import coupling as slow_coupling
from reference import divergence as slow_divergence

F64 = torch.float64


def log(rows: list[list[float]] | list[list[int]], dtype: torch.dtype = F64) -> Tensor:
    values = torch.tensor(rows, dtype=F64)
    return (values / values.sum(-1, keepdim=True)).log().to(dtype)


# ---- coupled draws (3.6, T16) ------------------------------------------------------------------------------

COUNTS = 12


@st.composite
def counted_laws(draw: st.DrawFn, *, most: int = 5) -> list[int]:
    """A law of whole multiples of 1/COUNTS."""
    cuts = sorted(draw(st.lists(st.integers(0, COUNTS), min_size=most - 1, max_size=most - 1)))
    return [b - a for a, b in itertools.pairwise([0, *cuts, COUNTS])]


def cells(p: list[int], q: list[int]) -> np.ndarray:
    """The joint law that `coupled` makes, exactly: its uniforms on a grid no edge of which lies inside a cell."""
    total = max(1, sum(max(b - a, 0) for a, b in zip(p, q, strict=True)))
    fine = math.lcm(*(max(1, n) * total for n in p))
    grid = torch.cartesian_prod(
        (torch.arange(COUNTS, dtype=F64) + 0.5) / COUNTS, (torch.arange(fine, dtype=F64) + 0.5) / fine
    )
    log_p, log_q = (log([law]).expand(len(grid), -1) for law in (p, q))
    x, y = coupling.coupled(log_p, log_q, grid)
    joint = np.zeros((len(p), len(p)))
    np.add.at(joint, (x.numpy(), y.numpy()), 1.0 / len(grid))
    return joint


@given(p=counted_laws(), q=counted_laws())
@example(p=[6, 4, 2, 0, 0], q=[5, 4, 3, 0, 0])
@example(p=[12, 0, 0, 0, 0], q=[0, 0, 0, 0, 12])
def test_coupled_tokens_have_both_laws_exactly_and_differ_as_rarely_as_any_can(p: list[int], q: list[int]) -> None:
    joint = cells(p, q)
    old, new = np.array(p) / COUNTS, np.array(q) / COUNTS
    assert joint == pytest.approx(np.array(slow_coupling.joint(old.tolist(), new.tolist())), abs=1e-12)
    assert joint.sum(axis=1) == pytest.approx(old, abs=1e-12)
    assert joint.sum(axis=0) == pytest.approx(new, abs=1e-12)
    apart = float(divergence.total_variation(log([p]), log([q])))
    assert 1.0 - np.trace(joint) == pytest.approx(apart, abs=1e-12)


@given(data=st.data(), states=st.integers(1, 4), vocab=st.integers(2, 6))
def test_coupled_tokens_agree_with_their_twin_and_a_scored_prefix_gives_the_same(
    data: st.DataObject, states: int, vocab: int
) -> None:
    weight = st.one_of(st.just(0.0), st.floats(0.01, 1.0))
    rows = st.lists(st.lists(weight, min_size=vocab, max_size=vocab).filter(any), min_size=states, max_size=states)
    log_p, log_q = log(data.draw(rows)), log(data.draw(rows))
    numbers = st.integers(0, 10**6).map(lambda i: (i + 0.437) / (10**6 + 1))
    u = data.draw(st.lists(st.tuples(numbers, numbers), min_size=states, max_size=states))
    together = data.draw(st.lists(st.booleans(), min_size=states, max_size=states))
    draws = torch.tensor(u, dtype=F64)
    x, y = coupling.coupled(log_p, log_q, draws, together_S=torch.tensor(together))
    for s in range(states):
        p, q = log_p[s].exp().tolist(), log_q[s].exp().tolist()
        want = slow_coupling.coupled(p, q, *u[s]) if together[s] else tuple(map(slow_coupling.inverse_cdf, (p, q), u[s]))
        assert (int(x[s]), int(y[s])) == want
    again = coupling.coupled(log_p, log_q, draws, together_S=torch.tensor(together), token_S=x)
    assert torch.equal(again[0], x) and torch.equal(again[1], y)


@given(u=st.floats(0.0, 1.0, exclude_max=True), w=st.floats(0.0, 1.0, exclude_max=True), data=st.data())
def test_a_token_that_cannot_come_never_does_and_equal_laws_never_part(u: float, w: float, data: st.DataObject) -> None:
    """Also at the ends of the running sum, which in fp32 may stop short of 1 or beyond it."""
    logits = data.draw(st.lists(st.one_of(st.just(-math.inf), st.floats(-30.0, 30.0)), min_size=2, max_size=30))
    assume(any(math.isfinite(x) for x in logits))
    shift = data.draw(st.lists(st.floats(-2.0, 2.0), min_size=len(logits), max_size=len(logits)))
    log_p = torch.log_softmax(torch.tensor([logits]), dim=-1)
    log_q = torch.log_softmax(torch.tensor([logits]) + torch.tensor([shift]), dim=-1)
    draws = torch.tensor([[u, w]], dtype=F64)
    x, y = coupling.coupled(log_p, log_q, draws)
    assert math.isfinite(logits[int(x)]) and math.isfinite(logits[int(y)])
    same = coupling.coupled(log_p, log_p, draws)
    assert torch.equal(same[0], same[1]) and torch.equal(same[0], x)


def test_what_rounding_leaves_over_goes_to_a_token_that_can_come() -> None:
    short = torch.tensor([[0.3, 0.3, 0.0]], dtype=F64)
    assert coupling.inverse_cdf(short, torch.tensor([0.9], dtype=F64)).tolist() == [1]
    # Refused by a hair, and no symbol has more probability than before: there is nothing to draw from.
    log_q = log([[0.5, 0.5, 0.0]])
    log_p = log_q + torch.tensor([[1e-12, 0.0, 0.0]], dtype=F64)
    x, y = coupling.coupled(log_p, log_q, torch.tensor([[0.1, 1.0 - 1e-13]], dtype=F64))
    assert (x.tolist(), y.tolist()) == ([0], [0])


def test_a_token_that_its_law_could_not_have_sampled_is_refused() -> None:
    log_p, u = log([[1.0, 0.0], [1.0, 1.0]]), torch.full((2, 2), 0.5, dtype=F64)
    with pytest.raises(DataError, match="token 1 of state 0"):
        coupling.coupled(log_p, log_p, u, token_S=torch.tensor([1, 1]))
    with pytest.raises(NonFiniteError):
        coupling.inverse_cdf(torch.tensor([[0.5, math.nan]]), torch.tensor([0.5]))


LENGTH, VOCAB = 3, 3


def random_policy(rng: np.random.Generator) -> dict[tuple[int, ...], list[float]]:
    return {
        said: rng.dirichlet([1.0] * VOCAB).tolist()
        for k in range(LENGTH)
        for said in itertools.product(range(VOCAB), repeat=k)
    }


def test_t16_coupled_messages_keep_the_law_of_each_team_and_the_mean_difference() -> None:
    """By enumeration, with the joint law that `coupled` was shown to make; then chi-square on keyed draws."""
    rng = np.random.default_rng(16)
    pay = {m: float(rng.random()) for m in itertools.product(range(VOCAB), repeat=LENGTH)}
    old, new = random_policy(rng), random_policy(rng)
    for said, law in new.items():  # near enough that prefixes often agree to the end
        new[said] = [0.8 * a + 0.2 * b for a, b in zip(old[said], law, strict=True)]

    def alone(policy: dict[tuple[int, ...], list[float]]) -> dict[tuple[int, ...], float]:
        return {m: math.prod(policy[m[:k]][m[k]] for k in range(LENGTH)) for m in pay}

    pairs: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {((), ()): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
        for (a, b), chance in pairs.items():
            p, q = old[a], new[b]
            joint = slow_coupling.joint(p, q) if a == b else [[x * y for y in q] for x in p]
            for x, y in itertools.product(range(VOCAB), repeat=2):
                longer[(*a, x), (*b, y)] = chance * joint[x][y]
        pairs = longer
    mean, differ = 0.0, 0.0
    for side, policy in enumerate((old, new)):
        for message, want in alone(policy).items():
            assert math.fsum(c for at, c in pairs.items() if at[side] == message) == pytest.approx(want, abs=1e-12)
    for (a, b), chance in pairs.items():
        mean += chance * (pay[b] - pay[a])
        differ += chance * (a != b)
    gain = math.fsum((alone(new)[m] - alone(old)[m]) * pay[m] for m in pay)
    assert mean == pytest.approx(gain, abs=1e-12)
    uncoupled = 1.0 - math.fsum(alone(new)[m] * alone(old)[m] for m in pay)
    assert differ < 0.4 < uncoupled

    draws = 6000
    u = torch.from_numpy(keyed.uniforms([keyed.key("pairs", i) for i in range(draws)], 2 * LENGTH)).view(draws, LENGTH, 2)
    said = [[(), ()] for _ in range(draws)]
    for k in range(LENGTH):
        laws = [torch.tensor([policy[s[side]] for s in said], dtype=F64).log() for side, policy in enumerate((old, new))]
        together = torch.tensor([a == b for a, b in said])
        tokens = coupling.coupled(*laws, u[:, k], together_S=together)
        said = [[(*s[0], int(x)), (*s[1], int(y))] for s, x, y in zip(said, *tokens, strict=True)]
    for side, policy in enumerate((old, new)):
        counts = [sum(s[side] == m for s in said) for m in pay]
        assert stats.chisquare(counts, [draws * alone(policy)[m] for m in pay]).pvalue > 1e-3
    d = np.array([pay[b] - pay[a] for a, b in said])
    assert abs(d.mean() - gain) < 4.0 * d.std() / math.sqrt(draws)
    assert abs(np.corrcoef(d[:-1], d[1:])[0, 1]) < 4.0 / math.sqrt(draws)
    share = sum(a != b for a, b in said) / draws
    assert abs(share - differ) < 4.0 * math.sqrt(differ * (1.0 - differ) / draws)


# ---- bounds of a mean --------------------------------------------------------------------------------------

LEVELS = st.sampled_from([0.05, 0.05 / 3, 0.01, 0.3])
DIFFERENCES = st.lists(st.one_of(st.sampled_from([-1.0, 0.0, 1.0]), st.floats(-1.0, 1.0)), min_size=1, max_size=40)


@given(d=DIFFERENCES, gain=st.floats(-1.0, 1.0), level=LEVELS, width=st.sampled_from([1.0, 0.5, 3.0]))
def test_the_wealth_and_its_bound_agree_with_their_twins(d: list[float], gain: float, level: float, width: float) -> None:
    scaled = [x * width for x in d]
    fast = certificate.log_wealth(torch.tensor(scaled, dtype=F64), gain * width, width=width, level=level)
    assert fast.exp().tolist() == pytest.approx(slow.wealth(scaled, gain * width, width=width, level=level), rel=1e-9)
    bound = certificate.betting_bound(torch.tensor(scaled, dtype=F64), width=width, level=level)
    assert float(bound) == pytest.approx(slow.betting_bound(scaled, width=width, level=level), abs=1e-9 * width)


@settings(max_examples=20)
@given(d=DIFFERENCES, level=LEVELS, gains=st.tuples(st.floats(-1.0, 1.0), st.floats(-1.0, 1.0)))
def test_more_pairs_never_lower_a_bound_and_a_higher_claim_never_earns_more(
    d: list[float], level: float, gains: tuple[float, float]
) -> None:
    x = torch.tensor(d, dtype=F64)
    bounds = [float(certificate.betting_bound(x[:n], width=1.0, level=level)) for n in range(1, len(d) + 1, 3)]
    assert all(a <= b for a, b in itertools.pairwise(bounds))
    low, high = sorted(gains)
    wealth = [certificate.log_wealth(x, g, width=1.0, level=level) for g in (low, high)]
    assert bool((wealth[0] >= wealth[1] - 1e-12).all())


@given(values=st.lists(st.floats(-1.0, 1.0), min_size=2, max_size=30), level=LEVELS, reach=st.floats(0.5, 4.0))
def test_the_empirical_bernstein_bound_agrees_with_its_twin(values: list[float], level: float, reach: float) -> None:
    fast = certificate.bernstein_bound(torch.tensor(values, dtype=F64), reach=reach, level=level)
    assert float(fast) == pytest.approx(slow.bernstein_bound(values, reach=reach, level=level), abs=1e-9)


@given(level=st.floats(1e-6, 0.5), share=st.floats(0.05, 1.0))
def test_the_smallest_sample_sizes_agree_with_trying_every_one(level: float, share: float) -> None:
    on_edge = [-math.log(level) / math.log(1.5), 14.0 * math.log(2.0 / level) / (3.0 * share)]
    assume(all(abs(x - round(x)) > 1e-9 for x in on_edge))
    assert certificate.betting_n(level) == slow.betting_n(level)
    assert certificate.bernstein_n(level, share=share) == slow.bernstein_n(level, share)


def outcomes(runs: int, pairs: int, *, gain: float, discordance: float, seed: int) -> Tensor:
    """D in {-1, 0, 1}, independent, with this mean and this share of pairs that differ."""
    u = torch.rand(runs, pairs, generator=torch.Generator().manual_seed(seed), dtype=F64)
    won, apart = (discordance + gain) / 2.0, discordance
    return (u < won).double() - ((u >= won) & (u < apart)).double()


@pytest.mark.parametrize("discordance", [0.05, 0.1, 0.3, 1.0])
def test_t13_under_no_gain_at_most_a_twentieth_is_called_positive_however_often_one_looks(discordance: float) -> None:
    d = outcomes(2_000, 400, gain=0.0, discordance=discordance, seed=13)
    crossed = (certificate.log_wealth(d, 0.0, width=1.0, level=0.05) >= math.log(20.0)).any(-1)
    assert 0.0 < float(crossed.double().mean()) <= 0.05


@pytest.mark.parametrize(("gain", "discordance"), [(0.05, 0.1), (-0.05, 0.1), (0.2, 0.3), (0.0, 0.02)])
def test_a_bound_that_is_looked_at_after_every_pair_lies_above_the_true_change_in_at_most_a_twentieth(
    gain: float, discordance: float
) -> None:
    """10,000 sequences: the bound passes the truth exactly where the wealth against the truth reaches 1/level."""
    d = outcomes(10_000, 200, gain=gain, discordance=discordance, seed=7)
    wrong = (certificate.log_wealth(d, gain, width=1.0, level=0.05).amax(-1) >= math.log(20.0)).double().mean()
    assert float(wrong) <= 0.05
    some = d[:50]
    above = certificate.betting_bound(some, width=1.0, level=0.05) > gain
    reached = certificate.log_wealth(some, gain, width=1.0, level=0.05).amax(-1) >= math.log(20.0)
    assert torch.equal(above, reached)


def test_a_naive_interval_under_the_same_looks_is_wrong_far_more_often() -> None:
    """The check has power: what is meant for one look fails where one may look often."""
    d = outcomes(2_000, 400, gain=0.0, discordance=0.3, seed=13)
    n = torch.arange(1, 401, dtype=F64)
    z = d.cumsum(-1) / (n * 0.3).sqrt()
    assert float((z[:, 20:] > 1.645).any(-1).double().mean()) > 0.15


# ---- the measured certificate ------------------------------------------------------------------------------

RETURNS = st.lists(st.one_of(st.none(), st.sampled_from([0.0, 1.0]), st.floats(0.0, 1.0)), min_size=30, max_size=30)


@given(ours=RETURNS, theirs=RETURNS, method=st.sampled_from(["betting", "bernstein"]), level=LEVELS)
def test_a_measured_certificate_is_its_bound_term_by_term_and_counts_what_is_missing_against_the_claim(
    ours: list[float | None], theirs: list[float | None], method: str, level: float
) -> None:
    d = [(0.0 if a is None else a) - (1.0 if b is None else b) for a, b in zip(ours, theirs, strict=True)]
    made = certificate.measured(ours, theirs, low=0.0, high=1.0, level=level, method=method)
    if method == "betting":
        bound = slow.betting_bound(d, width=1.0, level=level)
    else:
        bound = slow.bernstein_bound(d, reach=2.0, level=level)
    if made.verdict == "void":
        assert (made.reason, made.terms, made.lower_bound) == ("too_few_samples", (), -math.inf)
        assert made.needed is not None and made.needed > 30
        return
    assert made.lower_bound == pytest.approx(bound, abs=1e-9)
    assert made.lower_bound == math.fsum(term.value for term in made.terms)
    real = [x for x, a, b in zip(d, ours, theirs, strict=True) if a is not None and b is not None]
    assert made.terms[0].value == pytest.approx(math.fsum(real) / 30, abs=1e-12)
    assert made.terms[1].value == pytest.approx((math.fsum(d) - math.fsum(real)) / 30, abs=1e-12)
    assert {term.basis for term in made.terms} == {"measured", "bounded"}
    assert (made.verdict == "positive") == (made.lower_bound > 0.0) == (not made.is_vacuous)
    assert (made.n, made.confidence) == (30, 1.0 - level)
    assert f"{sum(r is None for r in (*ours, *theirs))} returns missing" in made.terms[1].note


@pytest.mark.parametrize("method", ["betting", "bernstein"])
@pytest.mark.parametrize("level", [0.05, 0.05 / 3])
def test_the_size_that_a_void_certificate_names_is_the_first_that_can_be_positive(method: str, level: float) -> None:
    def best(n: int) -> certificate.Certificate:
        return certificate.measured([1.0] * n, [0.0] * n, low=0.0, high=1.0, level=level, method=method)

    needed = best(1).needed
    assert needed == (certificate.betting_n(level) if method == "betting" else certificate.bernstein_n(level))
    assert best(needed - 1).reason == "too_few_samples" and best(needed - 1).needed == needed
    assert best(needed).verdict == "positive"
    assert best(0).reason == "not_evaluated"


def test_harm_is_the_same_test_with_the_teams_exchanged() -> None:
    worse, better = [0.0, 0.0, 1.0, None] * 20, [1.0] * 80
    gain = certificate.measured(worse, better, low=0.0, high=1.0, level=0.05)
    harm = certificate.measured(better, worse, low=0.0, high=1.0, level=0.05)
    assert (gain.verdict, harm.verdict) == ("inconclusive", "positive")
    # Missing counts against harm too: as 1, not as 0. What is missing was not measured.
    assert harm.terms[0].value == pytest.approx(0.5) and gain.terms[0].value == pytest.approx(-0.5)
    assert harm.terms[1].value == 0.0 and gain.terms[1].value == pytest.approx(-0.25)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: certificate.measured([1.0], [1.0, 0.0], low=0.0, high=1.0, level=0.05), DataError),
        (lambda: certificate.measured([math.nan], [1.0], low=0.0, high=1.0, level=0.05), NonFiniteError),
        (lambda: certificate.measured([1.0], [1.0], low=1.0, high=1.0, level=0.05), ConfigError),
        (lambda: certificate.log_wealth(torch.zeros(3), 0.0, width=1.0, level=0.0), ConfigError),
        (lambda: certificate.log_wealth(torch.tensor([0.0, 1.5]), 0.0, width=1.0, level=0.05), DataError),
        (lambda: certificate.log_wealth(torch.tensor([math.nan]), 0.0, width=1.0, level=0.05), DataError),
        (lambda: certificate.bernstein_bound(torch.zeros(1), reach=1.0, level=0.05), MissingError),
        (lambda: certificate.miss_rate(0.0), ConfigError),
        (lambda: certificate.miss_rate(0.05, n_agents=0), ConfigError),
        (lambda: certificate.miss_rate(0.05, stage=0), ConfigError),
        (lambda: certificate.summed("measured", []), MissingError),
        (lambda: certificate.staleness_bound(1, 0.1, [(0, 0.1)], 1.0), ConfigError),
        (lambda: held_out(1, m=1, looks=0), ConfigError),
        (lambda: held_out(1, m=1, log_ratio=math.inf), NonFiniteError),
        (lambda: held_out(1, m=1, log_ratio=math.nan), NonFiniteError),
        (lambda: held_out(1, m=1, value=math.nan), NonFiniteError),
        (lambda: divergence.project(log([[0.5, 0.5]]), log([[0.5, 0.5]]), radius=0.0), ConfigError),
    ],
)
def test_a_statement_without_a_ground_is_refused(make: Callable[[], object], error: type[BatonError]) -> None:
    with pytest.raises(error):
        make()


# ---- the surrogate certificate -----------------------------------------------------------------------------


def held_out(
    n: int, *, m: int, looks: int = 5, fewest: int = 500, log_ratio: float = 0.1, value: float = 0.5, reward: float = 1.0
) -> certificate.Certificate:
    ones = torch.ones(n, m, dtype=F64)
    return certificate.surrogate(
        log_ratio * ones, [reward] * n, value * ones, low=0.0, high=1.0, level=0.05 / 3, looks=looks, fewest=fewest
    )


@given(
    rows=st.lists(
        st.tuples(st.lists(st.floats(-3.0, 3.0), min_size=3, max_size=3), st.floats(0.0, 1.0), st.floats(-0.5, 1.5)),
        min_size=40,
        max_size=60,
    ),
    m=st.integers(1, 3),
    level=st.sampled_from([0.05, 0.3]),
    looks=st.integers(1, 5),
)
@settings(max_examples=30)
def test_a_surrogate_certificate_agrees_with_its_twin_and_is_the_sum_of_its_terms(
    rows: list[tuple[list[float], float, float]], m: int, level: float, looks: int
) -> None:
    log_ratio = torch.tensor([r[:m] for r, _, _ in rows], dtype=F64)
    returns = torch.tensor([r for _, r, _ in rows], dtype=F64)
    values = torch.tensor([[v] * m for _, _, v in rows], dtype=F64)
    made = certificate.surrogate(log_ratio, returns.tolist(), values, low=0.0, high=1.0, level=level, looks=looks, fewest=40)
    if made.needed is not None:
        assert made.reason == "too_few_samples" and made.needed > len(rows)
        return
    ratios = log_ratio.exp().tolist()
    want = slow.surrogate(ratios, returns.tolist(), values.tolist(), low=0.0, high=1.0, level=level, looks=looks)
    assert made.lower_bound == pytest.approx(want, abs=1e-9)
    assert made.lower_bound == math.fsum(term.value for term in made.terms)
    basis = {term.name: term.basis for term in made.terms}
    drift = "bounded" if m == 1 else "measured"
    bounded = dict.fromkeys(("imputation", "sampling"), "bounded")
    assert basis == {"held-out gain": "measured", **bounded, "truncation": "measured", "drift": drift}
    assert m > 1 or made.terms[-1].value == 0.0
    assert (made.verdict == "positive") == (made.lower_bound > 0.0)
    fast = certificate.surrogate_terms(log_ratio, returns, values, cap=1.5)
    for got, twin in zip(fast, slow.surrogate_terms(ratios, returns.tolist(), values.tolist(), cap=1.5), strict=True):
        assert torch.allclose(got, torch.tensor(twin, dtype=F64), atol=1e-9, rtol=0.0)


def test_a_surrogate_is_void_below_its_size_and_names_it() -> None:
    few = held_out(128, m=1)
    assert (few.verdict, few.reason, few.needed, few.lower_bound) == ("void", "too_few_samples", 500, -math.inf)
    never = certificate.bernstein_n(0.05 / 3 / 10)
    assert held_out(never - 1, m=1, fewest=1).needed == never
    # A certain win of full weight, at the named size: the range term no longer outweighs it.
    best = held_out(never, m=1, fewest=1, log_ratio=5.0, value=0.0)
    assert best.verdict == "positive"
    assert held_out(600, m=1, reward=1.5).reason == "reward_out_of_range"


def test_a_large_held_out_gain_of_an_agent_that_speaks_once_is_positive_and_below_the_truth() -> None:
    """Two answers at .5 each, the right one moved to .9: the true gain is .4."""
    right = torch.arange(4_000, dtype=F64) % 2
    ratio = torch.where(right == 1.0, 0.9 / 0.5, 0.1 / 0.5)
    once = certificate.surrogate(
        ratio.log()[:, None], right.tolist(), torch.full((4_000, 1), 0.5), low=0.0, high=1.0, level=0.05 / 3
    )
    assert once.verdict == "positive" and 0.3 < once.lower_bound < 0.4
    twice = torch.cat([ratio.log()[:, None], torch.zeros(4_000, 1)], dim=1)
    made = certificate.surrogate(twice, right.tolist(), torch.full((4_000, 2), 0.5), low=0.0, high=1.0, level=0.05 / 3)
    # A second turn, although it never moved, costs P_mean = 2 * .4.
    assert made.verdict == "inconclusive" and made.terms[-1].value < -0.8


@given(
    steps=st.lists(st.lists(st.floats(-2.0, 2.0), min_size=2, max_size=2), min_size=40, max_size=50),
    data=st.data(),
)
@settings(max_examples=30)
def test_no_value_of_the_missing_returns_gives_a_smaller_bound_of_the_mean_than_was_counted(
    steps: list[list[float]], data: st.DataObject
) -> None:
    n = len(steps)
    log_ratio, values = torch.tensor(steps, dtype=F64), torch.full((n, 2), 0.4, dtype=F64)
    returns = data.draw(st.lists(st.sampled_from([None, 0.0, 1.0]), min_size=n, max_size=n))
    made = certificate.surrogate(log_ratio, returns, values, low=0.0, high=1.0, level=0.3, looks=1, fewest=40)
    counted = {term.name: term.value for term in made.terms}
    missing = sum(r is None for r in returns)
    assert next(t.note for t in made.terms if t.name == "imputation").startswith(f"{missing} returns missing")
    for filled in ([float(data.draw(st.floats(0.0, 1.0))) if r is None else r for r in returns] for _ in range(3)):
        whole = certificate.surrogate(log_ratio, filled, values, low=0.0, high=1.0, level=0.3, looks=1, fewest=40)
        others = {term.name: term.value for term in whole.terms}
        assert counted["held-out gain"] + counted["imputation"] <= others["held-out gain"] + 1e-12
        assert others["imputation"] == 0.0
        assert (counted["truncation"], counted["drift"]) == (others["truncation"], others["drift"])


def test_a_surrogate_wants_a_return_or_none_of_each_episode() -> None:
    ones = torch.ones(40, 1, dtype=F64)
    with pytest.raises(DataError, match="39 returns of 40 episodes"):
        certificate.surrogate(ones, [1.0] * 39, ones, low=0.0, high=1.0, level=0.1)
    with pytest.raises(NonFiniteError):
        certificate.surrogate(ones, [math.nan] * 40, ones, low=0.0, high=1.0, level=0.1)


def test_prompts_drawn_without_replacement_are_no_worse_than_with() -> None:
    """The two moments that the empirical Bernstein bound is proved by, exactly, over pools of prompts whose returns are
    random themselves: of the mean, and of minus the sample variance (docs/equations.md)."""
    rng = np.random.default_rng(5)
    n = 3
    for _ in range(40):
        pool, rate = int(rng.integers(3, 6)), float(rng.choice([0.5, 3.0, 10.0]))
        returns, chances = rng.random((pool, 2)), rng.dirichlet([1.0, 1.0], size=pool)
        totals: list[np.ndarray] = []
        for draws in (itertools.permutations(range(pool), n), itertools.product(range(pool), repeat=n)):
            cases = [(p, i) for p in draws for i in itertools.product(range(2), repeat=n)]
            prompts, picks = (np.array(column) for column in zip(*cases, strict=True))
            said, chance = returns[prompts, picks], chances[prompts, picks].prod(1)
            moments = np.exp(rate * said.sum(1)), np.exp(-rate * said.var(1, ddof=1))
            totals.append(np.array([(chance * moment).sum() / chance.sum() for moment in moments]))
        assert (totals[0] <= totals[1] + 1e-12).all()


def test_the_truncated_gain_and_the_drift_never_claim_more_than_the_truth() -> None:
    """By enumeration: own message, a teammate's reply, own message; three symbols each. 300 random teams and candidates."""
    rng = np.random.default_rng(36)
    closest = 0.0
    for _ in range(300):
        pay = rng.random((3, 2, 3)) ** rng.choice([0.2, 1.0, 5.0])
        mate = rng.dirichlet([1.0, 1.0], size=3)
        sharp = rng.choice([0.3, 1.0, 5.0])
        old, new = ((rng.dirichlet([sharp] * 3), rng.dirichlet([sharp] * 3, size=(3, 2))) for _ in range(2))
        share = rng.choice([0.01, 0.1, 0.5, 1.0])
        new = tuple((1.0 - share) * a + share * b for a, b in zip(old, new, strict=True))

        def chances(first: np.ndarray, second: np.ndarray, mate: np.ndarray = mate) -> np.ndarray:
            return first[:, None, None] * mate[:, :, None] * second

        before, after = chances(*old), chances(*new)
        steps = np.stack([np.broadcast_to((new[0] / old[0])[:, None, None], pay.shape), new[1] / old[1]], axis=-1)
        values = rng.random((3, 2, 3, 2))
        values[..., 0] = rng.random()  # a baseline sees the state, not the message
        values[..., 1] = values[..., :1, 1]
        log_ratio, mass = torch.from_numpy(steps.reshape(-1, 2)).log(), torch.from_numpy(before.ravel())
        gain, lost, apart = certificate.surrogate_terms(
            log_ratio, torch.from_numpy(pay.ravel().copy()), torch.from_numpy(values.reshape(-1, 2))
        )
        claimed = float(mass @ gain) - float(mass @ lost)
        drift = certificate.message_bound_mean((mass @ apart).clamp(0.0, 1.0).tolist(), 1.0)
        truth = float(((after - before) * pay).sum())
        assert truth >= claimed - drift - 1e-12
        closest = max(closest, claimed - truth)
    assert closest > 1e-4, "without the drift term some team would have been promised too much"


# ---- verdicts, levels, voids (3.7, T15) --------------------------------------------------------------------


def test_t15_every_void_reason_makes_no_statement_and_a_stage_is_void_with_one_of_its_steps() -> None:
    reasons = get_args(certificate.VoidReason)
    assert len(reasons) == 10
    sure = certificate.measured([1.0] * 64, [0.0] * 64, low=0.0, high=1.0, level=0.01)
    assert sure.verdict == "positive"
    for reason in reasons:
        empty = certificate.void("surrogate", reason, confidence=0.95)
        assert (empty.verdict, empty.reason, empty.terms) == ("void", reason, ())
        assert empty.lower_bound == -math.inf and empty.is_vacuous
        stage = certificate.summed("stage", [sure, empty])
        assert (stage.verdict, stage.reason, stage.lower_bound) == ("void", reason, -math.inf)
    assert certificate.published([0.0], [10**9], kappas=[10.0], curvatures=[0.0], zetas=[0.0]).verdict == "void"


def test_an_assumed_term_makes_any_certificate_void() -> None:
    terms = [certificate.Term(name=name, value=1.0, basis=basis) for name, basis in (("a", "measured"), ("b", "assumed"))]
    made = certificate.concluded("surrogate", terms, n=10, confidence=0.95)
    assert (made.verdict, made.reason, made.lower_bound) == ("void", "assumed_term", 2.0)
    assert certificate.concluded("surrogate", terms[:1], n=10, confidence=0.95).verdict == "positive"


def test_a_stage_of_updates_adds_bounds_and_miss_rates() -> None:
    steps = [
        certificate.measured([1.0] * n, [0.0] * n, low=0.0, high=1.0, level=certificate.miss_rate(0.05, n_agents=3))
        for n in (40, 64, 50)
    ]
    stage = certificate.summed("measured", steps)
    assert stage.lower_bound == pytest.approx(sum(step.lower_bound for step in steps))
    assert (stage.n, stage.verdict, len(stage.terms)) == (40, "positive", 3)
    assert stage.confidence == pytest.approx(0.95)


@given(delta=st.floats(0.001, 0.5), n_agents=st.integers(1, 8), stage=st.one_of(st.none(), st.integers(1, 50)))
def test_miss_rates_agree_with_their_twin_and_a_runs_add_up_to_what_was_allowed(
    delta: float, n_agents: int, stage: int | None
) -> None:
    fast = certificate.miss_rate(delta, n_agents=n_agents, stage=stage)
    assert fast == pytest.approx(slow.miss_rate(delta, n_agents=n_agents, stage=stage), rel=1e-12)
    total = math.fsum(n_agents * certificate.miss_rate(delta, n_agents=n_agents, stage=k) for k in range(1, 400))
    assert total <= delta * (1.0 + 1e-12)


@given(m=st.integers(1, 4), alpha=st.floats(0.0, 1.0), mates=st.lists(st.tuples(st.integers(1, 3), st.floats(0.0, 1.0))))
def test_the_staleness_bound_agrees_with_its_twin(m: int, alpha: float, mates: list[tuple[int, float]]) -> None:
    fast = certificate.staleness_bound(m, alpha, mates, 2.0)
    assert fast == pytest.approx(slow.staleness_bound(m, alpha, mates, 2.0), abs=1e-9)


# ---- into the ball (2.8) -----------------------------------------------------------------------------------


@st.composite
def two_laws(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]]]:
    """Logits of both laws, from flat to nearly certain; some tokens at -inf in one or both."""
    states, vocab = draw(st.integers(1, 4)), draw(st.integers(2, 7))
    reach = draw(st.sampled_from([0.1, 3.0, 40.0]))
    sides: list[list[list[float]]] = []
    for _ in range(2):
        holes = draw(st.booleans())
        value = st.one_of(st.floats(-reach, reach), *([st.just(-math.inf)] if holes else []))
        row = st.lists(value, min_size=vocab, max_size=vocab).filter(lambda r: any(map(math.isfinite, r)))
        sides.append(draw(st.lists(row, min_size=states, max_size=states)))
    return sides[0], sides[1]


@given(laws=two_laws(), radius=st.sampled_from([1e-4, 0.01, 0.05, 0.5, 5.0]), entries=st.sampled_from([1, 8, 1 << 18]))
def test_the_projection_agrees_with_its_twin_lands_on_the_boundary_or_leaves_the_newcomer_alone(
    laws: tuple[list[list[float]], list[list[float]]], radius: float, entries: int
) -> None:
    pre, current = (torch.log_softmax(torch.tensor(side, dtype=F64), dim=-1) for side in laws)
    shared = torch.isfinite(pre) & torch.isfinite(current)
    nearest = -current.masked_fill(~shared, -math.inf).logsumexp(-1)
    assume(bool(((nearest - radius).abs() > 1e-6).all()))
    start = divergence.kl(pre, current)
    reachable = (start <= radius) | (nearest < radius)
    if not bool(reachable.all()):
        with pytest.raises(DataError, match=f"state {int((~reachable).nonzero()[0, 0])}"):
            divergence.project(pre, current, radius=radius, entries=entries)
        return
    new, w = divergence.project(pre, current, radius=radius, entries=entries)
    reached = divergence.kl(new, current)
    inside = start <= radius
    torch.testing.assert_close(divergence.between(pre, current, w)[~inside & (w > 0)], new[~inside & (w > 0)])
    assert torch.equal(divergence.between(pre, current, w)[inside].exp(), torch.log_softmax(pre, -1)[inside].exp())
    for s in range(len(pre)):
        if float(start[s]) <= radius:
            assert float(w[s]) == 0.0 and torch.equal(new[s], pre[s])
            continue
        assert 0.0 <= float(w[s]) < 1.0
        # Where the newcomer has tokens that `current` lacks, dropping them may be enough.
        assert abs(float(reached[s]) - radius) <= 2e-9 or (float(w[s]) == 0.0 and float(reached[s]) <= radius)
        twin, lam = slow_divergence.project(pre[s].tolist(), current[s].tolist(), radius=radius)
        # Near the boundary the divergence is flat in w where the laws are close: compare what it was asked for.
        assert slow_divergence.kl(new[s].tolist(), current[s].tolist()) == pytest.approx(
            slow_divergence.kl(twin, current[s].tolist()), abs=2e-9
        )
        assert float(w[s]) == pytest.approx(lam / (1.0 + lam), abs=1e-5 if radius >= 0.01 else 1e-3)


@given(data=st.data(), radius=st.sampled_from([0.01, 0.1]))
def test_no_law_inside_the_ball_is_nearer_to_the_newcomer(data: st.DataObject, radius: float) -> None:
    numbers = st.lists(st.floats(-3.0, 3.0), min_size=4, max_size=4)
    pre, current, other = (torch.log_softmax(torch.tensor([data.draw(numbers)], dtype=F64), dim=-1) for _ in range(3))
    new, _ = divergence.project(pre, current, radius=radius)
    # Any law, drawn back towards `current` until it is inside.
    for share in (1.0, 0.3, 0.1, 0.03):
        rival = torch.log(share * other.exp() + (1.0 - share) * current.exp())
        if float(divergence.kl(rival, current)) <= radius:
            assert float(divergence.kl(rival, pre)) >= float(divergence.kl(new, pre)) - 1e-8


def test_a_law_that_is_nan_is_refused_by_name_and_fp32_laws_stay_fp32() -> None:
    pre, current = log([[0.9, 0.1], [0.9, 0.1]], torch.float32), log([[0.5, 0.5], [0.5, 0.5]], torch.float32)
    new, w = divergence.project(pre, current, radius=0.01)
    assert new.dtype == torch.float32 and w.dtype == F64
    assert float(divergence.kl(new, current)[0]) == pytest.approx(0.01, abs=1e-6)
    pre[1, 0] = math.nan
    with pytest.raises(DataError, match="state 1"):
        divergence.project(pre, current, radius=0.01)


def test_a_vocabulary_of_fifty_thousand_is_projected_in_a_moment() -> None:
    """40 contexts; the claim projects 500."""
    generator = torch.Generator().manual_seed(0)
    pre, current = (torch.log_softmax(3.0 * torch.randn(40, 49_152, generator=generator), dim=-1) for _ in range(2))
    new, w = divergence.project(pre, current, radius=0.01)
    assert bool(((w > 0.5) & (w < 1.0)).all())
    assert (divergence.kl(new.double(), current.double()) - 0.01).abs().max() < 1e-4


# ---- giving up ---------------------------------------------------------------------------------------------


@given(data=st.data(), level=st.sampled_from([0.05, 0.05 / 3]), width=st.sampled_from([1.0, 2.0]))
def test_whoever_gives_up_could_not_have_been_convinced_by_what_was_hoped_for(
    data: st.DataObject, level: float, width: float
) -> None:
    n, count = data.draw(st.integers(1, 80)), data.draw(st.integers(1, 200))
    d = [width * v for v in data.draw(st.lists(st.sampled_from([-1.0, 0.0, 0.0, 0.5, 1.0]), min_size=n, max_size=n))]
    got = certificate.may_still_show(torch.tensor(d, dtype=F64), count=count, width=width, level=level)
    # The slow twin: the wealth of the pairs so far and of those to come, one at a time.
    done = max(slow.wealth(d, 0.0, width=width, level=level)) >= 1.0 / level
    if n >= count or done:
        assert got == (n < count)
        return
    x = [(v / width + 1.0) / 2.0 for v in d]
    squares = sum((x[t] - (0.5 + sum(x[: t + 1])) / (t + 2)) ** 2 for t in range(n))
    error = 2.0 * width * math.sqrt((0.25 + squares) / (n + 1) / n)
    hoped = min(width, sum(d) / n + 2.0 * error)
    peak = max(slow.wealth([*d, *[hoped] * (count - n)], 0.0, width=width, level=level)) * level
    assume(abs(peak - 1.0) > 1e-9)
    assert got == (peak > 1.0)


def test_more_pairs_and_more_hope_never_make_it_give_up_sooner() -> None:
    d = torch.tensor([0.0] * 60 + [1.0] * 4, dtype=F64)
    answers = [certificate.may_still_show(d, count=n, width=1.0, level=0.05) for n in (65, 100, 200, 400)]
    assert answers == sorted(answers) and answers[-1] and not answers[0]
    assert not certificate.may_still_show(-d, count=400, width=1.0, level=0.05)
