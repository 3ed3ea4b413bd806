"""Advantages along a chain: golden values of SAO (G2-G5, G12-G15, G35, G36), the slow twin, what must not matter (T14)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from baton.core import returns
from baton.errors import ConfigError, NonFiniteError
from reference import returns as slow

F64 = torch.float64


def gae(values: list[float], mask: list[int], reward: float, *, gamma: float, lam: float, **more: float) -> list[float]:
    """Of one row whose reward lies on its last action token."""
    mask_BT = torch.tensor([mask], dtype=torch.bool)
    rewards_BT = torch.where(returns.last_action(mask_BT), reward, 0.0).double()
    bootstrap = torch.tensor([more["bootstrap"]], dtype=F64) if more else None
    made = returns.skip_gae(
        torch.tensor([values], dtype=F64), rewards_BT, mask_BT, gamma=gamma, lam=lam, bootstrap_B=bootstrap
    )
    return made[0].tolist()


def close(values: list[float], digits: float = 1e-6) -> object:
    return pytest.approx(values, abs=digits)


# ---- golden values -------------------------------------------------------------------------------------------------------


def test_g2_observations_are_skipped_whatever_their_values() -> None:
    assert gae([10, 99, 99, 4], [1, 0, 0, 1], 1.0, gamma=1.0, lam=1.0) == [-9.0, 0.0, 0.0, -3.0]
    assert gae([10, math.nan, -5, 4], [1, 0, 0, 1], 1.0, gamma=1.0, lam=1.0) == [-9.0, 0.0, 0.0, -3.0]


def test_g3_discounted() -> None:
    made = gae([1, 1, 1], [1, 1, 1], 8.0, gamma=0.5, lam=0.5)
    assert made == [-0.1875, 1.25, 7.0] and [a + 1.0 for a in made] == [0.8125, 2.25, 8.0]


def test_g4_one_discount_a_boundary() -> None:
    values = [0.5, -0.5, 2.0, -1.0, 0.0]
    made = gae(values, [1, 0, 1, 0, 1], -2.0, gamma=0.99, lam=0.95)
    assert made == close([-2.1700805, 0.0, -3.881, 0.0, -2.0])
    assert [a + v for a, v in zip(made, values, strict=True)][::2] == close([-1.6700805, -1.881, -2.0])
    unmasked = returns.skip_gae(
        torch.tensor([values]).double(), torch.tensor([[0.0, 0, 0, 0, -2]]).double(), torch.ones(1, 5, dtype=torch.bool),
        gamma=0.99, lam=0.95,
    )  # fmt: skip
    assert float(unmasked[0, 0]) == pytest.approx(-2.0402482, abs=1e-6)


def test_g5_the_lambda_of_a_length() -> None:
    made = returns.adaptive_lambda(torch.tensor([0, 1, 2, 4, 100, 16000]), alpha=1.5)
    assert made.tolist() == close([0.0, 1 / 3, 2 / 3, 0.8333333, 0.9933333, 0.99995833], 1e-7)
    assert float(returns.adaptive_lambda(torch.tensor([1]), alpha=0.5)[0]) == 0.0


def test_g12_an_observation_at_the_tail_takes_nothing() -> None:
    assert gae([0.5, 0.2, 9.0], [1, 1, 0], 1.0, gamma=1.0, lam=1.0) == close([0.5, 0.8, 0.0])


def test_g13_the_value_behind_a_cut() -> None:
    assert gae([0.2, 0.5], [1, 1], 0.0, gamma=1.0, lam=0.5, bootstrap=0.6) == close([0.35, 0.1])


def test_g14_with_the_lambda_of_its_length() -> None:
    lam = float(returns.adaptive_lambda(torch.tensor([4]))[0])
    assert gae([0.5, 0.2, 0.3, 0.4], [1, 1, 1, 1], 1.0, gamma=1.0, lam=lam) == close([0.2, 0.6, 0.6, 0.6])


def test_g15_and_g36_the_chain_of_the_team_and_that_of_one_agent() -> None:
    values = [0.2, 0.3, 0.5, 0.6, 0.9, 0.4]
    team, a, b = [1, 1, 1, 1, 0, 1], [1, 1, 0, 0, 0, 1], [0, 0, 1, 1, 0, 0]
    assert gae(values, team, 1.0, gamma=1.0, lam=0.5) == close([0.2375, 0.275, 0.15, 0.1, 0.0, 0.6])
    assert gae(values, a, 1.0, gamma=1.0, lam=0.5) == close([0.3, 0.4, 0.0, 0.0, 0.0, 0.6])
    assert gae(values, b, 1.0, gamma=1.0, lam=0.5) == close([0.0, 0.0, 0.3, 0.4, 0.0, 0.0])
    for chain in (team, a, b):
        at_one = gae(values, chain, 1.0, gamma=1.0, lam=1.0)
        assert at_one == close([1.0 - v if acts else 0.0 for v, acts in zip(values, chain, strict=True)])
    own = zip(gae(values, a, 1.0, gamma=1.0, lam=0.5), gae(values, a, 1.0, gamma=1.0, lam=1.0), a, strict=True)
    gaps = [abs(one - other) for one, other, acts in own if acts]
    assert sum(gaps) / len(gaps) == pytest.approx(0.2666667, abs=1e-6)


def test_g35_explained_variance_and_nothing_to_explain() -> None:
    values = torch.tensor([0.8, 0.3, 0.6, 0.1], dtype=F64)
    assert returns.explained_variance(torch.tensor([1.0, 0, 1, 0], dtype=F64), values) == pytest.approx(0.71, abs=1e-12)
    assert returns.explained_variance(torch.ones(4, dtype=F64), values) is None
    assert returns.explained_variance(torch.zeros(0), torch.zeros(0)) is None


# ---- the slow twin, and what must not matter -----------------------------------------------------------------------------

NUMBER = st.floats(-3.0, 3.0)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Values, rewards and mask of a few rows; some chains are empty."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    made = [
        torch.tensor(draw(st.lists(st.lists(kind, min_size=width, max_size=width), min_size=rows, max_size=rows)))
        for kind in (NUMBER, NUMBER, st.booleans())
    ]
    return made[0].double(), made[1].double(), made[2]


@given(batch=batches(), gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]), data=st.data())
def test_advantages_agree_with_their_twin(batch: tuple[Tensor, Tensor, Tensor], gamma: float, data: st.DataObject) -> None:
    values, rewards, mask = batch
    rows = len(values)
    lam = torch.tensor(data.draw(st.lists(st.floats(0.0, 1.0), min_size=rows, max_size=rows)), dtype=F64)
    bootstrap = torch.tensor(data.draw(st.lists(NUMBER, min_size=rows, max_size=rows)), dtype=F64)
    made = returns.skip_gae(values, rewards, mask, gamma=gamma, lam=lam, bootstrap_B=bootstrap)
    for b in range(rows):
        want = slow.skip_gae(
            values[b].tolist(), rewards[b].tolist(), mask[b].tolist(),
            gamma=gamma, lam=float(lam[b]), bootstrap=float(bootstrap[b]),
        )  # fmt: skip
        assert made[b].tolist() == pytest.approx(want, abs=1e-9)
    tokens = mask.sum(1)
    assert returns.adaptive_lambda(tokens).tolist() == pytest.approx([slow.adaptive_lambda(int(n), 1.5) for n in tokens])


@given(batch=batches(), data=st.data())
def test_t14_what_is_masked_and_the_order_of_rows_change_nothing(
    batch: tuple[Tensor, Tensor, Tensor], data: st.DataObject
) -> None:
    values, rewards, mask = batch
    made = returns.skip_gae(values, rewards, mask, gamma=0.9, lam=0.7)
    junk = torch.where(mask, values, math.nan), torch.where(mask, rewards, math.inf)
    assert torch.equal(returns.skip_gae(*junk, mask, gamma=0.9, lam=0.7), made)
    order = data.draw(st.permutations(range(len(values))))
    assert torch.equal(returns.skip_gae(values[order], rewards[order], mask[order], gamma=0.9, lam=0.7), made[order])
    # At lam = 1 and gamma = 1 an advantage is the sum of the rewards from there on, less the value: a critic's target.
    at_one = returns.skip_gae(values, rewards, mask, gamma=1.0, lam=1.0)
    later = torch.where(mask, rewards, 0.0).flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(torch.where(mask, at_one + values, 0.0), torch.where(mask, later, 0.0))


@given(batch=batches())
def test_the_reward_lies_on_the_last_action_token(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    mask = batch[2]
    for row, last in zip(mask.tolist(), returns.last_action(mask).tolist(), strict=True):
        want = max((t for t, acts in enumerate(row) if acts), default=None)
        assert last == [t == want for t in range(len(row))]


@given(batch=batches(), denominator=st.floats(0.5, 20.0))
def test_the_value_loss_and_its_gradient(batch: tuple[Tensor, Tensor, Tensor], denominator: float) -> None:
    values, targets, mask = batch
    values = values.clone().requires_grad_()
    loss = returns.value_loss(values, torch.where(mask, targets, math.nan), mask, denominator=denominator)
    want = sum(
        slow.value_loss(v, t, m, denominator)
        for v, t, m in zip(values.tolist(), targets.tolist(), mask.tolist(), strict=True)
    )
    assert float(loss.detach()) == pytest.approx(want, abs=1e-9)
    (gradient,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(gradient, torch.where(mask, 2.0 * (values.detach() - targets) / denominator, 0.0))
    # Micro-batches with the denominator of the whole add up.
    rows = [slice(b, b + 1) for b in range(len(values))]
    parts = [returns.value_loss(values[r], targets[r], mask[r], denominator=denominator) for r in rows]
    torch.testing.assert_close(torch.stack(parts).sum(), loss)


@given(own=st.lists(NUMBER, min_size=1, max_size=8), data=st.data())
def test_explained_variance_agrees_with_its_twin(own: list[float], data: st.DataObject) -> None:
    values = data.draw(st.lists(NUMBER, min_size=len(own), max_size=len(own)))
    got = returns.explained_variance(torch.tensor(own, dtype=F64), torch.tensor(values, dtype=F64))
    want = slow.explained_variance(own, values)
    assert (got is None) == (want is None)
    if got is not None and want is not None:
        assume(torch.tensor(own, dtype=F64).var(correction=0) > 1e-6)
        assert got == pytest.approx(want, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"gamma": 1.1}, ConfigError),
        ({"lam": -0.1}, ConfigError),
        ({"lam": torch.tensor([0.5, 1.5])}, ConfigError),
        ({"values_BT": torch.tensor([[math.nan, 0.0], [0.0, 0.0]])}, NonFiniteError),
        ({"rewards_BT": torch.tensor([[0.0, 0.0], [0.0, math.inf]])}, NonFiniteError),
        ({"bootstrap_B": torch.tensor([0.0, math.nan])}, NonFiniteError),
    ],
)
def test_what_is_no_number_is_refused(change: dict[str, object], error: type[Exception]) -> None:
    zeros = torch.zeros(2, 2)
    given_: dict[str, object] = {
        "values_BT": zeros, "rewards_BT": zeros, "mask_BT": torch.ones(2, 2, dtype=torch.bool), "gamma": 1.0, "lam": 1.0,
    }  # fmt: skip
    with pytest.raises(error):
        returns.skip_gae(**(given_ | change))  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        returns.value_loss(zeros, zeros, zeros == 0, denominator=0.0)
    with pytest.raises(ConfigError):
        returns.adaptive_lambda(torch.tensor([1]), alpha=0.0)
    with pytest.raises(NonFiniteError):
        returns.explained_variance(torch.tensor([1.0, math.nan]), torch.zeros(2))
