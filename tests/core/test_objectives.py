"""Objectives as weight x mask x level (ALGORITHMS 4.8): against slow twins, against each preset's one line (T23), in parts.

Axes: B rows, T tokens, N action tokens, E episodes. A batch has several rows for some episodes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from baton.algorithms.episodes import episode_advantages
from baton.algorithms.options import MASKS, PRESETS, ObjectiveOptions, SatOptions
from baton.core import losses
from baton.core.losses import Band, BinaryKl, Objective, ProbabilityDifference, SecondMoment, SequenceTrust
from baton.errors import ConfigError, MissingError
from baton.types import AdvantageBatch, Episode, Scored, TokenBatch
from reference import losses as slow

F64 = torch.float64
STEP = 1e-5

WEIGHTS: Mapping[str, losses.Weight] = {
    "dis": losses.Dis(band=losses.TIGHT),
    "is": losses.Is(),
    "capped is": losses.Is(cap=1.5),
    "ppo": losses.Ppo(clip=0.2),
    "gspo": losses.Gspo(clip=0.2),
    "sequence": losses.SequenceRatio(clip=0.2),
    "likelihood": losses.Likelihood(),
}
ALL_MASKS: Mapping[str, losses.Mask | None] = {"none": None, "band": losses.TIGHT, **MASKS}
LEVELS = ("token", "sequence")
every_combination = pytest.mark.parametrize(
    ("weight", "mask", "level"), list(itertools.product(WEIGHTS, ALL_MASKS, LEVELS)), ids=lambda name: str(name)
)


@dataclass(frozen=True)
class Case:
    """Log-probabilities of the policy now, and the batch; junk stands under every False mask."""

    now: Tensor
    scored: AdvantageBatch

    @property
    def mask(self) -> Tensor:
        return self.scored.batch.mask

    @property
    def episodes(self) -> list[int]:
        return self.scored.batch.episode.tolist()

    def rows(self) -> tuple[list[list[float]], list[list[float]], list[list[float]], list[list[bool]]]:
        """What the twins read."""
        batch = self.scored.batch
        return self.now.tolist(), batch.behavior_logprobs.tolist(), self.scored.advantages.tolist(), batch.mask.tolist()

    def part(self, rows: list[int]) -> Case:
        part = self.scored.rows(rows)
        return Case(self.now[rows, : part.batch.ids.shape[1]], part)


def case_of(now: Tensor, old: Tensor, mask: Tensor, episode: list[int], advantage: Mapping[int, float]) -> Case:
    rows, width = mask.shape
    batch = TokenBatch(
        ids=torch.zeros(rows, width, dtype=torch.long),
        mask=mask,
        behavior_logprobs=torch.where(mask, old, math.nan),
        versions=torch.zeros(rows, width, dtype=torch.long),
        lengths=torch.full((rows,), width),
        episode=torch.tensor(episode),
        agent="solver",
        episode_ids=tuple(f"e{e}" for e in episode),
        groups=tuple(f"q{e // 2}" for e in episode),
        temperature=1.0,
    )
    column = torch.tensor([advantage[e] for e in episode], dtype=F64)[:, None]
    scored = AdvantageBatch(batch=batch, advantages=torch.where(mask, column, math.inf), team={"solver": 0})
    return Case(torch.where(mask, now, -math.inf), scored)


def drawn(seed: int, *, spread: float) -> Case:
    """Eight rows of five episodes, one of them in three rows; ratios lie around 1 by `spread` nats."""
    generator = torch.Generator().manual_seed(seed)
    episode = [0, 1, 1, 1, 2, 3, 3, 4]
    mask = torch.rand(8, 6, generator=generator) < 0.6
    mask[:, 0], mask[:, 2] = False, True
    old = -3.0 * torch.rand(8, 6, generator=generator, dtype=F64) - 0.02
    now = (old + spread * torch.randn(8, 6, generator=generator, dtype=F64)).clamp(max=-1e-3)
    values = torch.randn(5, generator=generator, dtype=F64).tolist()
    return case_of(now, old, mask, episode, dict(enumerate(values)))


CASES = [(seed, spread) for seed in range(6) for spread in (0.02, 0.25, 1.0)]


def evaluate(objective: Objective, case: Case, *, keep: Tensor | None = None) -> losses.LossTerm:
    if keep is None and objective.needs_batch:
        keep = objective.keep(case.now, case.scored)
    return objective(
        case.now,
        case.scored,
        kl_BT=None,
        denominator=objective.denominator(case.scored.batch),
        n_act=case.scored.batch.n_act,
        keep_BT=keep,
    )


def with_gradient(objective: Objective, case: Case) -> tuple[float, Tensor, dict[str, float]]:
    now = case.now.clone().requires_grad_()
    term = evaluate(objective, Case(now, case.scored))
    (gradient,) = torch.autograd.grad(term.total, now)
    return float(term.total.detach()), gradient, term.diagnostics


# ---- masks against their twins ---------------------------------------------------------------------------------


def slow_keep(mask: losses.Mask | None, case: Case) -> tuple[list[list[bool]], float]:
    """What is kept, and how far every comparison was from a tie."""
    now, old, advantages, own = case.rows()
    places = case.mask.nonzero().tolist()
    x = [now[b][t] - old[b][t] for b, t in places]
    match mask:
        case None:
            return own, math.inf
        case Band(low=low, high=high):
            tie = min(abs(value - math.log(edge)) for value in x for edge in (low, high))
            return slow.keep_band(now, old, own, low=low, high=high), tie
        case ProbabilityDifference(limit=limit, form=form):
            tie = min(abs(abs(math.exp(now[b][t]) - math.exp(old[b][t])) - limit) for b, t in places)
            return slow.keep_dppo(now, old, advantages, own, statistic=form, limit=limit), tie
        case BinaryKl(limit=limit):
            tie = min(abs(slow.binary_kl(now[b][t], old[b][t]) - limit) for b, t in places)
            return slow.keep_dppo(now, old, advantages, own, statistic="binary_kl", limit=limit), tie
        case SecondMoment(limit=limit):
            return slow.keep_second_moment(now, old, own, limit=limit)
        case SequenceTrust(limit=limit):
            return slow.keep_sequence_trust(now, old, own, episode=case.episodes, limit=limit)


Parts = tuple[Tensor, Tensor, Tensor, list[int], Mapping[int, float]]
"""What `case_of` takes. Checked dataclasses draw names at random, which a strategy must not do."""


@st.composite
def cases(draw: st.DrawFn) -> Parts:
    rows, width = draw(st.integers(1, 5)), draw(st.integers(2, 5))
    mask = torch.zeros(rows, width, dtype=torch.bool)
    for b in range(rows):
        mask[b, draw(st.lists(st.integers(1, width - 1), min_size=1, unique=True))] = True
    episode = sorted(draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)))
    spread = draw(st.sampled_from([0.05, 0.5, 3.0, 60.0]))
    old, now = torch.zeros(rows, width, dtype=F64), torch.zeros(rows, width, dtype=F64)
    for b, t in mask.nonzero().tolist():
        old[b, t] = draw(st.floats(-30.0, 0.0) if spread > 3.0 else st.floats(-3.0, 0.0))
        now[b, t] = min(0.0, float(old[b, t]) + draw(st.floats(-spread, spread)))
    values = {e: draw(st.sampled_from([-5.0, -0.3, 0.0, 1.0])) for e in sorted(set(episode))}
    return now, old, mask, episode, values


LIMITS = st.sampled_from([1e-3, 3e-3, 0.04, 0.15, 0.5])
DRAWN_MASKS = st.one_of(
    st.sampled_from(list(losses.BANDS.values())),
    st.builds(ProbabilityDifference, limit=LIMITS, form=st.sampled_from(["directional", "symmetric"])),
    st.builds(BinaryKl, limit=LIMITS),
    st.builds(SecondMoment, limit=LIMITS),
    st.builds(SequenceTrust, limit=LIMITS),
)


@given(parts=cases(), mask=DRAWN_MASKS)
def test_every_mask_keeps_what_its_twin_keeps(parts: Parts, mask: losses.Mask) -> None:
    case = case_of(*parts)
    keep, tie = slow_keep(mask, case)
    assume(tie > 1e-9)
    fast = Objective(weight=losses.Is(), penalty=0.0, mask=mask).keep(case.now, case.scored)
    assert fast.tolist() == keep


@given(parts=cases())
def test_the_binary_divergence_agrees_with_its_twin_at_any_probability(parts: Parts) -> None:
    case = case_of(*parts)
    now, old, _, _ = case.rows()
    fast = losses.binary_kl(case.now.requires_grad_(), case.scored.batch.behavior_logprobs, case.mask)
    assert not fast[~case.mask].any() and not fast.requires_grad
    for b, t in case.mask.nonzero().tolist():
        assert float(fast[b, t]) == pytest.approx(slow.binary_kl(now[b][t], old[b][t]), abs=1e-12)


@given(parts=cases(), mask=DRAWN_MASKS)
def test_a_mask_ignores_what_is_no_action_and_keeps_a_nan(parts: Parts, mask: losses.Mask) -> None:
    """What is not a number is not inside any limit; dropping it would hide it from the loss."""
    case = case_of(*parts)
    objective = Objective(weight=losses.Is(), penalty=0.0, mask=mask)
    keep = objective.keep(case.now, case.scored)
    assert not keep[~case.mask].any()
    b, t = case.mask.nonzero()[-1].tolist()
    broken = Case(case.now.index_put((torch.tensor(b), torch.tensor(t)), torch.tensor(math.nan, dtype=F64)), case.scored)
    assert bool(objective.keep(broken.now, broken.scored)[b, t])
    assert math.isnan(float(evaluate(objective, broken).total))


def test_equal_second_moments_stay_or_go_together() -> None:
    """Whatever the order of rows: with tau .04, one of two tokens at x = .25 would leave a mean of .021, both .042."""
    x = torch.tensor([[0.0, 0.25, 0.0, 0.25]], dtype=F64)
    mask = torch.tensor([[True, True, True, True]])
    for order in itertools.permutations(range(4)):
        now = x[:, list(order)]
        keep = losses.second_moment_mask(now, torch.zeros_like(now), mask, limit=0.03)
        assert torch.equal(keep, now == 0.0)
    assert bool(losses.second_moment_mask(x, torch.zeros_like(x), mask, limit=0.04).all())
    assert not losses.second_moment_mask(x + 1.0, torch.zeros_like(x), mask, limit=0.04).any()
    nothing = torch.zeros_like(mask)
    assert not losses.second_moment_mask(x, x, nothing, limit=0.04).any()


def test_a_mask_keeps_what_is_exactly_at_its_limit() -> None:
    half, three_quarters = (torch.tensor([[p]], dtype=F64).log() for p in (0.5, 0.75))
    one, up = torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 1, dtype=F64)
    assert float(three_quarters.exp() - half.exp()) == 0.25
    d = float(losses.binary_kl(three_quarters, half, one))
    for limit, kept in ((0.25, True), (math.nextafter(0.25, 0.0), False)):
        for form in ("directional", "symmetric"):
            rule = ProbabilityDifference(limit=limit, form=form)
            assert bool(losses.dppo_mask(three_quarters, half, up, one, rule=rule)) == kept
    for limit, kept in ((d, True), (math.nextafter(d, 0.0), False)):
        assert bool(losses.dppo_mask(three_quarters, half, up, one, rule=BinaryKl(limit=limit))) == kept
        trusted = losses.sequence_trust_mask(three_quarters, half, one, episode_B=torch.tensor([4]), limit=limit)
        assert bool(trusted) == kept
    x = torch.tensor([[0.0, 0.5]], dtype=F64)
    both = torch.ones(1, 2, dtype=torch.bool)
    for limit, kept in ((0.125, [True, True]), (0.124, [True, False])):
        assert losses.second_moment_mask(x, torch.zeros_like(x), both, limit=limit).tolist() == [kept]


def test_a_step_without_an_advantage_is_never_dropped_for_its_direction() -> None:
    up, down, own = torch.tensor([[-0.1]], dtype=F64), torch.tensor([[-3.0]], dtype=F64), torch.ones(1, 1, dtype=torch.bool)
    for now, then in ((up, down), (down, up)):
        for rule in (ProbabilityDifference(), BinaryKl()):
            assert bool(losses.dppo_mask(now, then, torch.zeros(1, 1, dtype=F64), own, rule=rule))


def test_statistics_of_masks_are_in_double_precision() -> None:
    single = torch.full((1, 2), -0.5)
    assert losses.binary_kl(single, single - 0.1, torch.ones(1, 2, dtype=torch.bool)).dtype == F64
    # In float32 the sum of these eight squares is rounded to 8, and their mean down onto the limit.
    x = torch.tensor([[1.0] * 7 + [1.0 + 2.0**-23]])
    keep = losses.second_moment_mask(x, torch.zeros_like(x), torch.ones(1, 8, dtype=torch.bool), limit=1.0)
    assert keep.tolist() == [[True] * 7 + [False]]


# ---- weight x mask x level against its twin ----------------------------------------------------------------------


def slow_term(
    objective: Objective, case: Case, keep: list[list[bool]], *, now: list[list[float]] | None = None
) -> slow.Slow:
    """The twin's policy term at `now`, detached weights where the case has them."""
    at, old, advantages, own = case.rows()
    name, numbers = {
        losses.Dis: ("dis", ("low", "high")),
        losses.Is: ("is", ("cap",)),
        losses.Ppo: ("ppo", ("clip",)),
        losses.Gspo: ("gspo", ("clip",)),
        losses.SequenceRatio: ("sequence", ("clip",)),
        losses.Likelihood: ("likelihood", ()),
    }[type(objective.weight)]
    weight = objective.weight
    source = weight.band if isinstance(weight, losses.Dis) else weight
    given_numbers = {n: getattr(source, n) for n in numbers if getattr(source, n) is not None}
    assert objective.level is not None
    return slow.policy_term(
        at if now is None else now, old, advantages, own, keep,
        episode=case.episodes, weight=name, level=objective.level, weights_at=at, **given_numbers,
    )  # fmt: skip


def is_smooth(weight: losses.Weight, case: Case) -> bool:
    """No ratio within a difference step of where this weight jumps or bends."""
    now, old, _, own = case.rows()
    x = [now[b][t] - old[b][t] for b, t in case.mask.nonzero().tolist()]
    u = list(slow.episode_log_ratios(now, old, own, case.episodes).values())
    counts = [sum(sum(own[b]) for b, e in enumerate(case.episodes) if e == k) for k in sorted(set(case.episodes))]
    edges, values = {
        losses.Dis: ((0.8, 1.25), x),
        losses.Is: ((1.5,), x),
        losses.Ppo: ((0.8, 1.2), x),
        losses.SequenceRatio: ((0.8, 1.2), u),
        losses.Gspo: ((0.8, 1.2), [s / n for s, n in zip(u, counts, strict=True)]),
        losses.Likelihood: ((), x),
    }[type(weight)]
    return all(abs(value - math.log(edge)) > 1e-3 for value in values for edge in edges)


@every_combination
def test_every_combination_has_the_value_and_the_gradient_of_its_twin(weight: str, mask: str, level: str) -> None:
    objective = Objective(weight=WEIGHTS[weight], penalty=0.0, mask=ALL_MASKS[mask], level=level)  # type: ignore[arg-type]
    seen = dropped = 0
    for seed, spread in CASES:
        case = drawn(seed, spread=spread)
        keep, tie = slow_keep(objective.mask, case)
        if tie < 1e-6 or not is_smooth(objective.weight, case):
            continue
        seen += 1
        total, gradient, diagnostics = with_gradient(objective, case)
        want = slow_term(objective, case, keep)
        assert total == pytest.approx(want.total, abs=1e-12 * max(1.0, want.scale))
        assert not gradient[~case.mask].any() and bool(torch.isfinite(gradient).all())
        masked = int(case.mask.sum()) - sum(map(sum, keep))
        assert diagnostics.get("masked") == (None if mask == "none" else masked)
        dropped += masked
        for b, t in case.mask.nonzero().tolist()[::3]:
            ends: list[float] = []
            for sign in (1.0, -1.0):
                moved = case.now.tolist()
                moved[b][t] += sign * STEP
                ends.append(slow_term(objective, case, keep, now=moved).total)
            slope = (ends[0] - ends[1]) / (2.0 * STEP)
            assert float(gradient[b, t]) == pytest.approx(slope, abs=1e-7 * max(1.0, want.scale))
    assert seen >= 6 and (dropped > 0) == (mask != "none")


@every_combination
@pytest.mark.parametrize("count", [2, 3])
def test_micro_batches_of_every_combination_add_up_to_the_batch(weight: str, mask: str, level: str, count: int) -> None:
    objective = Objective(weight=WEIGHTS[weight], penalty=0.0, mask=ALL_MASKS[mask], level=level)  # type: ignore[arg-type]
    for seed in range(3):
        case = drawn(seed, spread=0.25)
        whole, by_now, diagnostics = with_gradient(objective, case)
        keep = objective.keep(case.now, case.scored) if objective.needs_batch else None
        total, summed = 0.0, dict.fromkeys(diagnostics, 0.0)
        for first in range(count):
            rows = [row for row, e in enumerate(case.episodes) if e % count == first]
            part = case.part(rows)
            now = part.now.clone().requires_grad_()
            term = objective(
                now,
                part.scored,
                kl_BT=None,
                denominator=objective.denominator(case.scored.batch),
                n_act=case.scored.batch.n_act,
                keep_BT=None if keep is None else keep[rows],
            )
            (gradient,) = torch.autograd.grad(term.total, now)
            assert torch.allclose(gradient, by_now[rows], rtol=1e-12, atol=1e-12)
            total += float(term.total.detach())
            for name, value in term.diagnostics.items():
                summed[name] += value
        assert total == pytest.approx(whole, abs=1e-12)
        assert summed == pytest.approx(diagnostics, abs=1e-12)


def test_a_second_moment_is_of_the_whole_batch_and_of_no_part() -> None:
    objective = Objective(weight=losses.Is(), penalty=0.0, mask=SecondMoment(limit=0.04))
    now = torch.tensor([[0.0, -1.0], [0.0, -1.0]], dtype=F64)
    x = torch.tensor([[0.0, 0.1], [0.0, 0.25]], dtype=F64)  # mean square .036: the second row alone has .0625
    case = case_of(now, now - x, torch.tensor([[False, True]] * 2), [0, 1], {0: 1.0, 1: 1.0})
    part = case.part([1])
    assert bool(objective.keep(case.now, case.scored)[:, 1].all()) and not objective.keep(part.now, part.scored).any()
    assert objective.needs_batch
    with pytest.raises(MissingError, match="whole optimiser batch"):
        objective(case.now, case.scored, kl_BT=None, denominator=1.0, n_act=1)
    others = [
        Objective(weight=losses.Is(), penalty=0.0, mask=mask) for name, mask in ALL_MASKS.items() if name != "second_moment"
    ]
    assert not any(other.needs_batch for other in others)


@pytest.mark.parametrize("mask", [name for name in ALL_MASKS if name != "none"])
def test_a_policy_that_has_not_moved_loses_no_token(mask: str) -> None:
    case = drawn(1, spread=0.0)
    objective = Objective(weight=losses.Is(), penalty=0.0, mask=ALL_MASKS[mask])
    assert torch.equal(objective.keep(case.now, case.scored), case.mask)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_without_a_level_a_weight_counts_as_it_was_published(weight: str) -> None:
    case = drawn(2, spread=0.25)
    level = "sequence" if weight in ("gspo", "sequence") else "token"
    bare, said = (Objective(weight=WEIGHTS[weight], penalty=0.0, level=own) for own in (None, level))  # type: ignore[arg-type]
    assert (
        bare.denominator(case.scored.batch)
        == said.denominator(case.scored.batch)
        == (5.0 if level == "sequence" else case.mask.sum())
    )
    assert torch.equal(evaluate(bare, case).total, evaluate(said, case).total)
    other = Objective(weight=WEIGHTS[weight], penalty=0.0, level="token" if level == "sequence" else "sequence")
    assert not torch.allclose(evaluate(other, case).total, evaluate(said, case).total)


def test_a_ratio_inside_a_band_as_a_mask_is_the_banded_weight() -> None:
    for seed, level in itertools.product(range(4), LEVELS):
        case = drawn(seed, spread=0.3)
        banded = Objective(weight=losses.Dis(band=losses.TIGHT), penalty=0.0, level=level)  # type: ignore[arg-type]
        masked = Objective(weight=losses.Is(), penalty=0.0, mask=losses.TIGHT, level=level)  # type: ignore[arg-type]
        (one, by_one, said), (other, by_other, told) = with_gradient(banded, case), with_gradient(masked, case)
        assert one == pytest.approx(other, abs=1e-14) and torch.allclose(by_one, by_other, rtol=0, atol=1e-14)
        assert told["masked"] == said["rejected_low"] + said["rejected_high"] > 0


def test_a_cap_bounds_the_ratio_and_counts_what_it_bounded() -> None:
    now = torch.tensor([[0.0, math.log(1.4), math.log(1.6), 3.0, -1.0]], dtype=F64).requires_grad_()
    mask = torch.tensor([[False, True, True, True, True]])
    term = losses.importance(now, torch.zeros_like(now), torch.ones_like(now), mask, cap=1.5, denominator=1.0)
    (gradient,) = torch.autograd.grad(term.total, now)
    assert gradient[0].tolist() == pytest.approx([0.0, -1.4, -1.5, -1.5, -math.exp(-1.0)])
    assert term.diagnostics == {"tokens": 4.0, "capped": 2.0, "clamped": 0.0}
    free = losses.importance(now, torch.zeros_like(now), torch.ones_like(now), mask, cap=None, denominator=1.0)
    assert free.diagnostics["capped"] == 0.0


@pytest.mark.parametrize("make", [
    lambda: losses.Is(cap=0.5),
    lambda: losses.Is(cap=math.nan),
    lambda: losses.Is(cap=math.inf),
    lambda: losses.Band(low=0.2, high=1.0),
    lambda: losses.Gspo(clip=1.0),
    lambda: Objective(weight=losses.Is(), penalty=0.0, mask=SecondMoment(limit=0.0)),
    lambda: Objective(weight=losses.Is(), penalty=0.0, mask=BinaryKl(limit=math.nan)),
    lambda: Objective(weight=losses.Is(), penalty=0.0, mask=SequenceTrust(limit=math.inf)),
])  # fmt: skip
def test_a_number_without_a_meaning_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_the_ends_of_what_has_a_meaning_are_allowed() -> None:
    assert losses.Is(cap=1.0).cap == 1.0
    assert Band(low=0.0, high=1.05).low == 0.0


def test_weights_and_masks_begin_with_the_published_numbers() -> None:
    assert losses.Ppo().clip == losses.Gspo().clip == losses.SequenceRatio().clip == 0.2
    assert losses.Is().cap is None
    assert ProbabilityDifference() == ProbabilityDifference(limit=0.15, form="directional")
    assert (BinaryKl().limit, SecondMoment().limit, SequenceTrust().limit) == (0.05, 0.04, 3e-3)
    bands = {"tight": (0.8, 1.25), "reasoning": (0.7, 6.0), "coding": (0.2, 4.0)}
    assert {name: (band.low, band.high) for name, band in losses.BANDS.items()} == bands


# ---- T23: every preset against its one line -----------------------------------------------------------------------


@dataclass(frozen=True)
class Flat:
    """The action tokens of a batch as plain vectors; `of` gives the mean over own tokens of each token's episode."""

    logp: Tensor
    x: Tensor
    A: Tensor
    episode: Tensor

    @property
    def rho(self) -> Tensor:
        return self.x.exp()

    @property
    def q(self) -> Tensor:
        return self.logp.exp()

    @property
    def p(self) -> Tensor:
        return (self.logp - self.x).exp()

    @property
    def is_own(self) -> Tensor:
        """[E, N]"""
        return (self.episode[None] == self.episode.unique()[:, None]).to(F64)

    @property
    def own(self) -> Tensor:
        return self.is_own.sum(1)[self.episode]

    def mean(self, value: Tensor) -> Tensor:
        """[E]: per episode, the mean over its own tokens."""
        return self.is_own @ value / self.is_own.sum(1)


def clipped(ratio: Tensor, advantage: Tensor) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def two_outcomes(b: Flat) -> Tensor:
    return b.p * (b.p / b.q).log() + (1 - b.p) * ((1 - b.p) / (1 - b.q)).log()


def smallest(square: Tensor) -> Tensor:
    """M2PO's mask by the definition: of the numbers of smallest squares to keep, the most whose mean is within .04."""
    order = square.argsort().tolist()
    most = max(n for n in range(len(order) + 1) if n == 0 or square[order[:n]].mean() <= 0.04)
    return torch.tensor([i in order[:most] for i in range(len(order))])


def still(value: Tensor) -> Tensor:
    return value.detach()


FORMULAS: Mapping[str, Callable[[Flat], Tensor]] = {
    "grpo_dis": lambda b: -(still(b.rho * ((b.rho > 0.8) & (b.rho < 1.25))) * b.A * b.logp).mean(),
    "grpo": lambda b: -clipped(b.rho, b.A).mean(),
    "gspo": lambda b: -clipped(b.mean(b.x).exp(), b.mean(b.A)).mean(),
    "flash_reinforce": lambda b: -b.mean(still(b.rho * (b.mean(two_outcomes(b)) <= 3e-3)[b.episode]) * b.A * b.logp).mean(),
    "dppo": lambda b: -(still(b.rho.clamp(max=20) * ~(((b.q - b.p).abs() > 0.15) & (b.A * b.x > 0))) * b.A * b.logp).mean(),
    "m2po": lambda b: -(still(b.rho * smallest(b.x.square())) * b.A * b.logp).mean(),
    "reinforce_is": lambda b: -(still(b.rho) * b.A * b.logp).mean(),
    "sequence": lambda b: -clipped((b.is_own @ b.x).exp(), b.mean(b.A)).mean(),
}
BASELINES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "group": lambda R: (R - R.mean(1, keepdim=True)) / (R.std(1, correction=0, keepdim=True) + 1e-8),
    "batch_mean": lambda R: R - R.mean(),
}
"""Rewards [prompt, sibling] -> advantages."""


def rewarded(rewards: Tensor) -> list[Episode]:
    return [
        Episode(
            id=f"e{g * rewards.shape[1] + i}",
            group=f"q{g}",
            task_id=f"q{g}",
            versions={"solver": 0},
            turns=(),
            answer="",
            outcome=Scored(reward=float(rewards[g, i]), reason=""),
        )
        for g in range(rewards.shape[0])
        for i in range(rewards.shape[1])
    ]


def test_every_preset_of_this_version_has_its_line() -> None:
    assert set(FORMULAS) == set(PRESETS)


@pytest.mark.parametrize("spread", [0.01, 0.15, 0.6])
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_t23_a_preset_is_its_one_line_formula_forward_and_gradient(preset: str, spread: float) -> None:
    options = ObjectiveOptions(preset=preset)  # type: ignore[arg-type]
    objective = options.loss(penalty=0.0)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        rewards = torch.rand(2, 4, generator=generator, dtype=F64)
        values = episode_advantages(SatOptions(objective=options), rewarded(rewards)).values
        assert torch.allclose(values, BASELINES[options.choice.baseline](rewards).flatten(), atol=1e-12)

        episode = [0, 0, 1, 2, 3, 3, 3, 4, 5, 6, 7, 7]
        mask = torch.rand(12, 5, generator=generator) < 0.7
        mask[:, 0], mask[:, 1] = False, True
        old = -2.5 * torch.rand(12, 5, generator=generator, dtype=F64) - 0.05
        now = (old + spread * torch.randn(12, 5, generator=generator, dtype=F64)).clamp(max=-1e-3)
        case = case_of(now, old, mask, episode, dict(enumerate(values.tolist())))
        total, gradient, _ = with_gradient(objective, case)

        logp = now[mask].requires_grad_()
        owner = torch.tensor(episode)[:, None].expand(mask.shape)[mask]
        loss = FORMULAS[preset](Flat(logp, logp - old[mask], values[owner], owner))
        (by_formula,) = torch.autograd.grad(loss, logp)
        assert total == pytest.approx(float(loss.detach()), abs=1e-12)
        assert torch.allclose(gradient[mask], by_formula, rtol=0, atol=1e-12) and not gradient[~mask].any()


@pytest.mark.parametrize("preset", ["flash_reinforce", "dppo", "m2po"])
def test_t23_the_masks_of_the_presets_bite_on_those_batches(preset: str) -> None:
    objective = ObjectiveOptions(preset=preset).loss(penalty=0.0)  # type: ignore[arg-type]
    for spread, bites in ((0.01, False), (0.15, preset == "flash_reinforce"), (0.6, True)):
        sets = [drawn(seed, spread=spread) for seed in range(6)]
        kept = sum(int(objective.keep(case.now, case.scored).sum()) for case in sets)
        assert kept > 0
        if bites:
            assert kept < sum(int(case.mask.sum()) for case in sets)
