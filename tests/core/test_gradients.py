"""Gradients of every loss and divergence against finite differences, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from baton.core import divergence, losses
from baton.core.losses import Objective, Ppo, SequenceRatio
from baton.types import AdvantageBatch, TokenBatch

F64 = torch.float64
MASK = torch.tensor(
    [[False, True, True, False, True], [False, False, True, True, False], [False, True, False, False, False]]
)
EPISODE = torch.tensor([0, 0, 1])


def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities now and then, and one advantage per episode; ratios stay off the clip's corners."""
    generator = torch.Generator().manual_seed(seed)
    old = -3.0 * torch.rand(MASK.shape, generator=generator, dtype=F64) - 0.05
    x = 0.7 * torch.randn(MASK.shape, generator=generator, dtype=F64)
    for corner in (0.8, 1.2):
        edge = torch.tensor(corner, dtype=F64).log()
        x = torch.where((x - edge).abs() < 1e-3, x + 0.01, x)
    advantage = torch.randn(2, generator=generator, dtype=F64)[EPISODE][:, None].expand(MASK.shape)
    return (old + x).requires_grad_(), old, advantage


SEEDS = pytest.mark.parametrize("seed", range(8))


@SEEDS
def test_ppo(seed: int) -> None:
    logp, old, advantage = inputs(seed)
    assert gradcheck(lambda x: losses.ppo(x, old, advantage, MASK, clip=0.2, denominator=6.0).total, (logp,))


@SEEDS
def test_sequence_over_rows_of_one_episode(seed: int) -> None:
    logp, old, advantage = inputs(seed)

    def total(x: Tensor) -> Tensor:
        return losses.sequence(x, old, advantage, MASK, episode_B=EPISODE, clip=0.2, denominator=2.0).total

    assert gradcheck(total, (logp,))
    # All rows of an episode share one ratio, so their tokens share one gradient.
    (gradient,) = torch.autograd.grad(total(logp), logp)
    shared = gradient[:2][MASK[:2]]
    assert torch.equal(shared, shared[0].expand_as(shared))


@SEEDS
def test_dis_is_the_gradient_of_its_loss_with_the_weights_held(seed: int) -> None:
    logp, old, advantage = inputs(seed)
    band = losses.REASONING
    (gradient,) = torch.autograd.grad(losses.dis(logp, old, advantage, MASK, band=band, denominator=6.0).total, logp)
    ratio = (logp - old).exp().detach()
    weight = torch.where(MASK & (ratio > band.low) & (ratio < band.high), ratio, 0.0)
    step = 1e-6
    for b, t in torch.cartesian_prod(torch.arange(3), torch.arange(5)).tolist():
        moved = [logp.detach().clone() for _ in range(2)]
        moved[0][b, t] += step
        moved[1][b, t] -= step
        up, down = (-(weight * advantage * x).sum() / 6.0 for x in moved)
        assert gradient[b, t].item() == pytest.approx(((up - down) / (2 * step)).item(), abs=1e-8)


def test_likelihood_reads_no_behavior_policy() -> None:
    logp, _, advantage = inputs(2)
    assert gradcheck(lambda x: losses.likelihood(x, advantage, MASK, denominator=6.0).total, (logp,))
    term = losses.likelihood(logp, advantage, MASK, denominator=6.0)
    assert term.diagnostics == {"tokens": 6.0}
    (gradient,) = torch.autograd.grad(term.total, logp)
    assert torch.allclose(gradient, torch.where(MASK, -advantage / 6.0, 0.0))


def test_the_kl_term() -> None:
    kl = torch.rand(MASK.shape, generator=torch.Generator().manual_seed(0), dtype=F64).requires_grad_()
    assert gradcheck(lambda x: losses.kl_term(x, MASK, denominator=6.0), (kl,))


@pytest.mark.parametrize("weight", [Ppo(), SequenceRatio()])
def test_an_objective_with_a_penalty_through_the_logits(weight: losses.Weight) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(*MASK.shape, 4, generator=generator, dtype=F64).requires_grad_()
    start = torch.randn(*MASK.shape, 4, generator=generator, dtype=F64)
    ids = torch.randint(4, MASK.shape, generator=generator)
    old_law = divergence.log_law(start, temperature=0.9)
    old = old_law.gather(-1, ids[..., None])[..., 0]
    lengths = torch.tensor([5, 4, 2])
    batch = TokenBatch(
        ids=ids,
        mask=MASK,
        behavior_logprobs=old,
        versions=torch.zeros_like(ids),
        lengths=lengths,
        episode=EPISODE,
        agent="a",
        episode_ids=("x", "x", "y"),
        groups=("q", "q", "q"),
        temperature=0.9,
    )
    advantages = torch.where(MASK, torch.tensor([[0.7], [0.7], [-0.4]], dtype=F64), 0.0)
    scored = AdvantageBatch(batch=batch, advantages=advantages, team={"a": 0})
    objective = Objective(weight=weight, penalty=0.3)

    def total(x: Tensor) -> Tensor:
        law = divergence.log_law(x, temperature=0.9)
        kl = divergence.kl(law.flatten(0, 1), old_law.flatten(0, 1)).unflatten(0, MASK.shape)
        return objective(
            law.gather(-1, ids[..., None])[..., 0],
            scored,
            kl_BT=kl,
            denominator=objective.denominator(batch),
            n_act=batch.n_act,
        ).total

    assert gradcheck(total, (logits,))
    assert objective.needs_kl


def test_the_objective_adds_penalty_times_mean_kl_and_reports_the_sum() -> None:
    logp, old, advantage = (tensor.detach() for tensor in inputs(1))
    batch = TokenBatch(
        ids=torch.zeros(MASK.shape, dtype=torch.long),
        mask=MASK,
        behavior_logprobs=old,
        versions=torch.zeros(MASK.shape, dtype=torch.long),
        lengths=torch.tensor([5, 5, 5]),
        episode=EPISODE,
        agent="a",
        episode_ids=("x", "x", "y"),
        groups=("q", "q", "q"),
        temperature=1.0,
    )
    scored = AdvantageBatch(batch=batch, advantages=advantage, team={"a": 0})
    kl = torch.full(MASK.shape, 0.25, dtype=F64)
    totals = [
        Objective(weight=Ppo(), penalty=penalty)(logp, scored, kl_BT=kl, denominator=6.0, n_act=6) for penalty in (0.0, 2.0)
    ]
    assert (totals[1].total - totals[0].total).item() == pytest.approx(2.0 * 0.25)
    assert totals[1].diagnostics["kl_sum"] == pytest.approx(6 * 0.25) and "kl_sum" not in totals[0].diagnostics


def test_divergences_of_laws() -> None:
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(3, 6, generator=generator, dtype=F64).requires_grad_() for _ in range(2))

    def law(logits: Tensor) -> Tensor:
        return divergence.log_law(logits, temperature=0.7)

    assert gradcheck(lambda x, y: divergence.kl(law(x), law(y)), (a, b))
    assert gradcheck(lambda x: divergence.entropy(law(x)), (a,))
    assert gradcheck(lambda x, y: divergence.total_variation(law(x), law(y)), (a, b))
    assert gradcheck(divergence.k3, (a.detach().requires_grad_(),))


def test_the_gradient_of_the_penalty_is_zero_where_the_policy_has_not_moved() -> None:
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(6), dtype=F64).requires_grad_()
    anchor = divergence.log_law(logits.detach(), temperature=1.0)
    value = divergence.kl(divergence.log_law(logits, temperature=1.0), anchor).sum()
    (gradient,) = torch.autograd.grad(value, logits)
    assert gradient.abs().max().item() < 1e-15
