"""The nouns of `baton.types`: every invariant is broken once, and every worked use holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from baton.errors import BatonError, DataError, MissingError, NonFiniteError
from baton.types import (
    Accepted,
    AdvantageBatch,
    Episode,
    Failed,
    GateRecord,
    Rejected,
    Scored,
    Task,
    TokenBatch,
    TokenDivergence,
    Truncated,
    Turn,
    verdict_word,
)


def action(**changes: Any) -> Turn:
    """Two sampled tokens of 'solver'."""
    fields: dict[str, Any] = {
        "prompt_ids": (7, 8),
        "ids": (1, 2),
        "logprobs": (-0.5, 0.0),
        "versions": (3, 3),
    }
    return Turn(kind="action", agent="solver", seat=0, text="ab", **(fields | changes))


def episode(outcome: Scored | Truncated | Failed) -> Episode:
    return Episode(
        id="e1",
        group="p1",
        task_id="t1",
        versions={"solver": 3},
        turns=(action(),),
        answer="ab",
        outcome=outcome,
    )


def gate(**changes: Any) -> GateRecord:
    fields: dict[str, Any] = {
        "q_point": 0.02,
        "q_ucb": None,
        "q_gate": 0.02,
        "message_mean": 0.004,
        "n_units": 64,
        "n_states": 400,
        "certified": False,
        "certifiable_level": 0.931,
        "radius_token": 0.05,
        "radius_message_mean": 0.01,
        "direction": "max",
        "scale": 1.0,
        "passed": True,
    }
    return GateRecord(**(fields | changes))


def batch(**changes: Any) -> TokenBatch:
    """Three rows of two episodes: lengths 2, 4, 3; token ids say row and column."""
    fields: dict[str, Any] = {
        "ids": torch.tensor([[0, 1, -9, -9], [10, 11, 12, 13], [20, 21, 22, -9]]),
        "mask": torch.tensor([[0, 1, 0, 0], [0, 0, 1, 1], [0, 1, 0, 0]], dtype=torch.bool),
        "behavior_logprobs": torch.tensor([[0.0, -1.0, 9.0, 9.0], [0.0, 0.0, -2.0, -3.0], [0.0, -4.0, 0.0, 9.0]]),
        "versions": torch.tensor([[-1, 3, -1, -1], [-1, -1, 4, 4], [-1, 5, -1, -1]]),
        "lengths": torch.tensor([2, 4, 3]),
        "episode": torch.tensor([0, 0, 1]),
        "agent": "solver",
        "episode_ids": ("e0", "e0", "e1"),
        "groups": ("p0", "p0", "p1"),
        "temperature": 0.7,
    }
    return TokenBatch(**(fields | changes))


def with_entry(name: str, row: int, column: int, value: bool | float) -> dict[str, Any]:
    tensor = getattr(batch(), name).clone()
    tensor[row, column] = value
    return {name: tensor}


def divergence(new_old: list[float], old_new: list[float]) -> TokenDivergence:
    states = torch.arange(len(new_old))
    return TokenDivergence(
        kl_new_old=torch.tensor(new_old),
        kl_old_new=torch.tensor(old_new),
        row=states,
        position=states,
    )


# ---- tasks, turns, episodes -----------------------------------------------------------------------------


def test_a_seat_sees_its_view_and_everyone_the_prompt_where_there_is_none() -> None:
    relay = Task(id="relay-17", env="relay", prompt="all tables", views=("table 1", "table 2"), answer="2")
    assert (relay.view(0), relay.view(1)) == ("table 1", "table 2")
    open_task = Task(id="sum-1", env="sums", prompt="1 + 1", answer="2")
    assert open_task.view(1) == "1 + 1"


def test_a_noun_cannot_be_changed() -> None:
    for noun, name in ((action(), "text"), (batch(), "temperature"), (Rejected(reason="radius"), "reason")):
        with pytest.raises(FrozenInstanceError):
            setattr(noun, name, getattr(noun, name))


@pytest.mark.parametrize(
    "changes",
    [{"logprobs": (-0.5,)}, {"versions": (3,)}, {"ids": (1,)}, {"logprobs": ()}, {"versions": ()}],
    ids=["a log-probability", "a version", "an id", "every log-probability", "every version"],
)
def test_a_sampled_token_without_id_log_probability_or_version_is_missing_something(
    changes: dict[str, Any],
) -> None:
    with pytest.raises(MissingError, match="'solver'"):
        action(**changes)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.1])
def test_a_log_probability_is_a_finite_number_that_is_not_positive(bad: float) -> None:
    with pytest.raises(NonFiniteError, match="token 1 "):
        action(logprobs=(-0.5, bad))


@pytest.mark.parametrize("carried", [{"ids": (1,)}, {"logprobs": (-1.0,)}, {"ids": (1,), "logprobs": (-1.0,)}])
def test_an_observation_carries_text_only(carried: dict[str, Any]) -> None:
    assert Turn(kind="observation", agent="frozen", seat=1, text="hello").ids == ()
    with pytest.raises(DataError, match="'frozen'"):
        Turn(kind="observation", agent="frozen", seat=1, text="hello", **carried)


def test_a_failed_episode_has_no_reward_and_the_others_have_theirs() -> None:
    assert (episode(Scored(reward=1.0)).reward, episode(Truncated(reward=0.5)).reward) == (1.0, 0.5)
    assert episode(Scored(reward=0.0)).is_scored and episode(Truncated(reward=0.0)).is_scored
    failed = episode(Failed(reason="grader"))
    assert not failed.is_scored
    with pytest.raises(MissingError, match=r"e1 .*grader"):
        _ = failed.reward


# ---- token batches --------------------------------------------------------------------------------------


def test_a_batch_counts_rows_episodes_and_action_tokens() -> None:
    whole = batch()
    assert (whole.n_rows, whole.n_episodes, whole.n_act) == (3, 2, 4)


def test_a_batch_without_rows_is_missing() -> None:
    empty: dict[str, Any] = {
        name: getattr(batch(), name)[:0] for name in ("ids", "mask", "behavior_logprobs", "versions", "lengths", "episode")
    }
    with pytest.raises(MissingError, match="no rows"):
        batch(**empty, episode_ids=(), groups=())


@pytest.mark.parametrize("name", ["episode_ids", "groups"])
def test_every_row_names_its_episode_and_its_prompt(name: str) -> None:
    with pytest.raises(DataError, match=f"2 {name} for 3 rows"):
        batch(**{name: ("a", "b")})


def test_a_row_without_a_trainable_token_is_named() -> None:
    with pytest.raises(MissingError, match=r"row 2 \(e1\)"):
        batch(**with_entry("mask", 2, 1, False))


def test_the_mask_may_select_neither_padding_nor_the_first_token() -> None:
    with pytest.raises(DataError, match="padding"):
        batch(**with_entry("mask", 2, 3, True))
    with pytest.raises(DataError, match="first token"):
        batch(**with_entry("mask", 1, 0, True))


def test_tensors_of_different_widths_are_refused_under_test() -> None:
    with pytest.raises(TypeCheckError):
        batch(versions=torch.zeros(3, 5, dtype=torch.long))


ROW_TENSORS = ("ids", "mask", "behavior_logprobs", "versions")


@given(
    index=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    junk=st.integers(0, 3),
    as_tensor=st.booleans(),
)
def test_rows_are_the_named_rows_in_that_order_padded_to_the_longest(index: list[int], junk: int, as_tensor: bool) -> None:
    whole = batch()
    wide: dict[str, Any] = {
        name: torch.cat([getattr(whole, name), torch.zeros_like(getattr(whole, name)[:, :junk])], dim=1)
        for name in ROW_TENSORS
    }
    picked = replace(whole, **wide).rows(torch.tensor(index) if as_tensor else index)
    lengths = whole.lengths.tolist()
    assert tuple(picked.ids.shape) == (len(index), max(lengths[i] for i in index))
    assert picked.lengths.tolist() == [lengths[i] for i in index]
    assert picked.episode.tolist() == [whole.episode.tolist()[i] for i in index]
    assert picked.episode_ids == tuple(whole.episode_ids[i] for i in index)
    assert picked.groups == tuple(whole.groups[i] for i in index)
    assert (picked.agent, picked.temperature) == ("solver", 0.7)
    for b, i in enumerate(index):
        for name in ROW_TENSORS:
            there, here = getattr(whole, name)[i], getattr(picked, name)[b]
            assert torch.equal(here[: lengths[i]], there[: lengths[i]])
        assert not bool(picked.mask[b, lengths[i] :].any())


def test_rows_of_an_advantage_batch_keep_advantages_and_team() -> None:
    values = torch.arange(12.0).reshape(3, 4)
    whole = AdvantageBatch(batch=batch(), advantages=values, team={"solver": 3, "critic": 1})
    picked = whole.rows([2, 0])
    assert picked.batch.episode_ids == ("e1", "e0")
    assert picked.advantages.tolist() == [[8.0, 9.0, 10.0], [0.0, 1.0, 2.0]]
    assert dict(picked.team) == {"solver": 3, "critic": 1}


# ---- divergences and verdicts ---------------------------------------------------------------------------


def test_a_divergence_of_no_states_decides_nothing() -> None:
    with pytest.raises(MissingError, match="no states"):
        divergence([], [])


@pytest.mark.parametrize("bad", [math.nan, -2e-4])
def test_a_divergence_is_neither_nan_nor_clearly_negative_in_either_direction(bad: float) -> None:
    with pytest.raises(NonFiniteError, match="kl_new_old"):
        divergence([0.1, bad], [0.1, 0.1])
    with pytest.raises(NonFiniteError, match="kl_old_new"):
        divergence([0.1, 0.1], [0.1, bad])


def test_rounding_below_zero_and_plus_infinity_are_kept_as_they_are() -> None:
    kept = divergence([-5e-5, math.inf], [0.0, 0.2])
    assert kept.kl_new_old.tolist() == torch.tensor([-5e-5, math.inf]).tolist()
    assert kept.of("max").tolist() == torch.tensor([0.0, math.inf]).tolist()


def test_a_divergence_names_its_direction() -> None:
    both = divergence([0.25, 0.5], [0.75, 0.125])
    assert both.of("new_old").tolist() == [0.25, 0.5]
    assert both.of("old_new").tolist() == [0.75, 0.125]
    assert both.of("max").tolist() == [0.75, 0.5]


@pytest.mark.parametrize("scale", [0.0, -0.5, 1.5, math.nan])
def test_an_accepted_update_has_a_scale_between_nothing_and_the_whole(scale: float) -> None:
    with pytest.raises(DataError, match=r"\(0, 1\]"):
        Accepted(scale=scale, gate=gate())


def test_an_update_is_accepted_only_by_a_gate_that_passed() -> None:
    with pytest.raises(DataError, match="gate that passed"):
        Accepted(scale=1.0, gate=gate(passed=False))


def test_a_verdict_has_a_word_for_people() -> None:
    assert verdict_word(Accepted(scale=1.0, gate=gate())) == "accepted"
    assert verdict_word(Accepted(scale=0.25, gate=gate(scale=0.25))) == "shrunk"
    assert verdict_word(Rejected(reason="radius", gate=gate(passed=False))) == "rejected"
    assert verdict_word(Rejected(reason="no_signal")) == "rejected"


@pytest.mark.parametrize(
    ("broken", "builtin"),
    [
        (lambda: action(versions=()), LookupError),
        (lambda: action(logprobs=(-1.0, math.nan)), ArithmeticError),
        (lambda: Accepted(scale=2.0, gate=gate()), ValueError),
    ],
    ids=["missing", "non-finite", "data"],
)
def test_every_refusal_is_a_baton_error_and_the_built_in_that_it_replaces(
    broken: Callable[[], object], builtin: type[Exception]
) -> None:
    with pytest.raises(BatonError) as refused:
        broken()
    assert isinstance(refused.value, builtin)
