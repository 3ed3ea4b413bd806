"""From episodes to rows, parts and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.core import batching
from baton.errors import BatonError, ConfigError, DataError, MissingError, NonFiniteError
from baton.types import AdvantageBatch, Episode, Scored, Trajectory, Turn


def turn(agent: str, prompt: tuple[int, ...], ids: tuple[int, ...], version: int = 3) -> Turn:
    return Turn(
        kind="action",
        agent=agent,
        seat=0,
        text="",
        prompt_ids=prompt,
        ids=ids,
        logprobs=tuple(-0.1 * (i + 1) for i in range(len(ids))),
        versions=(version,) * len(ids),
    )


def episode(*turns: Turn) -> Episode:
    return Episode(id="e", group="q", task_id="q", versions={"a": 3}, turns=turns, answer="", outcome=Scored(reward=1.0))


def rows(shape: list[tuple[str, str, int]]) -> list[Trajectory]:
    """(episode, group, tokens) of each row; the first token is context."""
    return [
        Trajectory(
            episode_id=name,
            group=group,
            agent="a",
            segment=0,
            ids=tuple(range(tokens)),
            mask=(False,) + (True,) * (tokens - 1),
            behavior_logprobs=(0.0,) + (-1.0,) * (tokens - 1),
            versions=(-1,) + (0,) * (tokens - 1),
        )
        for name, group, tokens in shape
    ]


def scored(shape: list[tuple[str, str, int]]) -> AdvantageBatch:
    batch = batching.token_batch(rows(shape), temperature=1.0)
    return batching.with_advantages(batch, {name: 1.0 for name, _, _ in shape}, team={"a": 0})


# ---- trajectories ------------------------------------------------------------------------------------------


def test_an_append_only_conversation_is_one_row_with_only_own_tokens_under_the_mask() -> None:
    talk = episode(
        turn("a", (1, 2), (3, 4)),
        turn("b", (9,), (8,)),
        Turn(kind="observation", agent="tool", seat=-1, text="ok"),
        turn("a", (1, 2, 3, 4, 5), (6,), version=4),
    )
    (row,) = batching.trajectories(talk, "a")
    assert row.ids == (1, 2, 3, 4, 5, 6)
    assert row.mask == (False, False, True, True, False, True)
    assert row.behavior_logprobs == (0.0, 0.0, -0.1, -0.2, 0.0, -0.1)
    assert row.versions == (-1, -1, 3, 3, -1, 4)
    assert (row.episode_id, row.group, row.agent, row.segment) == ("e", "q", "a", 0)


@pytest.mark.parametrize("prompt", [(1, 2, 3), (1, 2, 3, 7, 5), (2, 3, 4)])
def test_a_rewritten_or_cut_history_begins_a_new_row(prompt: tuple[int, ...]) -> None:
    talk = episode(turn("a", (1, 2), (3, 4)), turn("a", prompt, (6,)), turn("a", (*prompt, 6, 0), (7,)))
    first, second = batching.trajectories(talk, "a")
    assert first.ids == (1, 2, 3, 4) and first.segment == 0
    assert second.ids == (*prompt, 6, 0, 7) and second.segment == 1
    assert second.mask == (*[False] * len(prompt), True, False, True)


def test_turns_without_sampled_ids_leave_no_trace() -> None:
    silent = Turn(kind="action", agent="a", seat=0, text="hello")
    assert batching.trajectories(episode(silent), "a") == ()
    (row,) = batching.trajectories(episode(silent, turn("a", (1,), (2,))), "a")
    assert row.ids == (1, 2)
    assert batching.trajectories(episode(turn("b", (1,), (2,))), "a") == ()


def test_a_turn_without_a_prompt_is_refused_by_episode() -> None:
    with pytest.raises(DataError, match="episode e"):
        batching.trajectories(episode(turn("a", (), (2,))), "a")


# ---- token batches -----------------------------------------------------------------------------------------


def test_rows_are_right_padded_in_their_order() -> None:
    batch = batching.token_batch(rows([("x", "q", 2), ("y", "q", 4), ("y", "q", 3)]), temperature=0.7)
    assert batch.ids.tolist() == [[0, 1, 0, 0], [0, 1, 2, 3], [0, 1, 2, 0]]
    assert batch.mask.tolist()[0] == [False, True, False, False]
    assert batch.versions.tolist()[0] == [-1, 0, -1, -1]
    assert batch.behavior_logprobs.tolist()[0] == [0.0, -1.0, 0.0, 0.0]
    assert batch.behavior_logprobs.dtype == torch.float32
    assert batch.lengths.tolist() == [2, 4, 3] and batch.episode.tolist() == [0, 1, 1]
    assert (batch.episode_ids, batch.groups, batch.temperature) == (("x", "y", "y"), ("q",) * 3, 0.7)
    assert (batch.n_act, batch.n_episodes) == (6, 2)


X, Y = rows([("x", "q", 2), ("y", "q", 3)])


@pytest.mark.parametrize(
    ("make", "error", "names"),
    [
        (lambda: batching.token_batch([], temperature=1.0), MissingError, "no trajectories"),
        (
            lambda: batching.token_batch([X, replace(Y, mask=(False,) * 3)], temperature=1.0),
            MissingError,
            "episode y, segment 0 of",
        ),
        (lambda: batching.token_batch([X, replace(Y, versions=(0,))], temperature=1.0), MissingError, "y"),
        (lambda: batching.token_batch([X, replace(Y, agent="b")], temperature=1.0), DataError, "'a'"),
        (lambda: batching.token_batch([X, Y, X], temperature=1.0), DataError, "x"),
        (lambda: batching.token_batch([X, replace(X, group="r")], temperature=1.0), DataError, "'r'"),
        (lambda: batching.token_batch([X], temperature=0.0), ConfigError, "temperature"),
        (lambda: batching.token_batch([X], temperature=math.nan), ConfigError, "temperature"),
        (lambda: batching.with_advantages(BATCH, {"x": 1.0}, team={}), MissingError, "y"),
        (lambda: batching.with_advantages(BATCH, {"x": 1.0, "y": math.nan}, team={}), NonFiniteError, "y"),
        (lambda: batching.with_advantages(BATCH, {"x": math.inf, "y": 0.0}, team={}), NonFiniteError, "x"),
        (lambda: batching.parts(scored([("x", "q", 2)]), 0), ConfigError, "inner steps"),
        (lambda: batching.micro_batches(BATCH, max_tokens=0), ConfigError, "micro-batch"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(make: Callable[[], object], error: type[BatonError], names: str) -> None:
    with pytest.raises(error, match=names):
        make()


BATCH = batching.token_batch([X, Y], temperature=1.0)


# ---- parts and micro-batches -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_groups", "count", "sizes"),
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (5, 3, [2, 2, 1]), (2, 3, [1, 1]), (1, 2, [1]), (3, 1, [3])],
)
def test_parts_are_whole_groups_as_even_as_they_go(n_groups: int, count: int, sizes: list[int]) -> None:
    # Siblings arrive interleaved: episode i of every prompt, then episode i + 1.
    batch = scored([(f"{g}.{i}", f"q{g}", 2 + g) for i in range(3) for g in range(n_groups)])
    got = batching.parts(batch, count)
    assert [len(set(part.batch.groups)) for part in got] == sizes
    order = [name for part in got for name in part.batch.episode_ids]
    assert order == [f"{g}.{i}" for g in range(n_groups) for i in range(3)]
    assert sum(part.batch.n_act for part in got) == batch.batch.n_act


@st.composite
def ragged(draw: st.DrawFn) -> list[tuple[str, str, int]]:
    shape = []
    for number in range(draw(st.integers(1, 7))):
        group = draw(st.sampled_from("qrs"))
        shape += [(f"e{number}", group, tokens) for tokens in draw(st.lists(st.integers(2, 9), min_size=1, max_size=3))]
    return shape


@given(ragged(), st.integers(1, 4))
def test_parts_hold_every_row_once_and_never_split_a_group(shape: list[tuple[str, str, int]], count: int) -> None:
    got = batching.parts(scored(shape), count)
    n_groups = len({group for _, group, _ in shape})
    assert len(got) == min(count, n_groups)
    found = [
        (e, g, int(n)) for p in got for e, g, n in zip(p.batch.episode_ids, p.batch.groups, p.batch.lengths, strict=True)
    ]
    assert sorted(found) == sorted(shape)
    where = [set(part.batch.groups) for part in got]
    assert sum(len(groups) for groups in where) == n_groups
    sizes = [len(groups) for groups in where]
    assert max(sizes) - min(sizes) <= 1


@given(ragged(), st.integers(1, 60))
def test_micro_batches_hold_every_row_once_within_their_size(shape: list[tuple[str, str, int]], max_tokens: int) -> None:
    batch = batching.token_batch(rows(shape), temperature=1.0)
    chunks = batching.micro_batches(batch, max_tokens=max_tokens)
    assert sorted(row for chunk in chunks for row in chunk) == list(range(len(shape)))
    for chunk in chunks:
        episodes = [shape[row][0] for row in chunk]
        assert all(episodes.count(name) == sum(e == name for e, _, _ in shape) for name in episodes)
        size = len(chunk) * max(shape[row][2] for row in chunk)
        assert size <= max_tokens or len(set(episodes)) == 1
        part = batch.rows(chunk)
        assert part.ids.shape[1] == max(shape[row][2] for row in chunk)
    longest = [max(shape[row][2] for row in chunk) for chunk in chunks]
    assert longest == sorted(longest, reverse=True)


def test_micro_batches_take_the_longest_first_and_break_ties_by_row() -> None:
    batch = batching.token_batch(rows([("a", "q", 3), ("b", "q", 5), ("c", "q", 3), ("d", "q", 5)]), temperature=1.0)
    assert batching.micro_batches(batch, max_tokens=10) == ([1, 3], [0, 2])
    assert batching.micro_batches(batch, max_tokens=9) == ([1], [3], [0, 2])
    assert batching.micro_batches(batch, max_tokens=100) == ([1, 3, 0, 2],)


def test_advantages_follow_their_rows_into_parts() -> None:
    batch = batching.token_batch(rows([("x", "q", 3), ("y", "r", 2), ("z", "q", 2)]), temperature=1.0)
    whole = batching.with_advantages(batch, {"x": 1.0, "y": 2.0, "z": 3.0}, team={"a": 5})
    first, second = batching.parts(whole, 2)
    assert first.advantages.tolist() == [[0.0, 1.0, 1.0], [0.0, 3.0, 0.0]] and first.team == {"a": 5}
    assert second.advantages.tolist() == [[0.0, 2.0]]
    assert whole.advantages.dtype == torch.float32
