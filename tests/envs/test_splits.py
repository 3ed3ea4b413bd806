"""Four disjoint prompt sets for any ids, salts, shares and duplicates (T18)."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.envs import CustomOptions, Grade, RelayOptions, build, split
from baton.envs.custom import CustomEnv
from baton.errors import ConfigError, DataError
from baton.types import Task


@dataclass
class Rows:
    tasks: list[Task]
    is_generated: bool = False
    name: str = "rows"

    @property
    def size(self) -> int:
        return len(self.tasks)

    def task(self, index: int) -> Task:
        return self.tasks[index]

    def grade(self, task: Task, answer: str) -> Grade:
        return Grade(0.0)


def rows(prompts: list[str], *, is_generated: bool = False, ids: list[str] | None = None) -> CustomEnv:
    names = ids or [f"id-{i}" for i in range(len(prompts))]
    tasks = [Task(id=i, env="rows", prompt=p, answer="") for i, p in zip(names, prompts, strict=True)]
    return CustomEnv(Rows(tasks, is_generated))


def sets(splits) -> dict[str, tuple[Task, ...]]:
    return {name: getattr(splits, name) for name in ("train", "probe", "certify", "test")}


@given(
    prompts=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=120),
    unique=st.integers(0, 300),
    seed=st.integers(0, 2**63),
    weights=st.tuples(*[st.floats(0.01, 1.0)] * 4),
    needs=st.tuples(st.integers(0, 60), st.integers(0, 90), st.integers(0, 90)),
    is_generated=st.booleans(),
)
def test_the_four_prompt_sets_are_disjoint_complete_and_large_enough(
    prompts, unique, seed, weights, needs, is_generated
) -> None:
    env = rows([*prompts, *(f"unique {i}" for i in range(unique))], is_generated=is_generated)
    shares = tuple(w / sum(weights) for w in weights)
    try:
        splits = split(
            env, seed=seed, train_prompts_needed=needs[0], probe_needed=needs[1], certify_needed=needs[2], shares=shares
        )
    except ConfigError:
        return
    chosen = sets(splits)
    everything = [task for tasks in chosen.values() for task in tasks]
    assert len({task.id for task in everything}) == len(everything)
    assert len({task.prompt for task in everything}) == len(everything)
    assert {task.prompt for task in everything} == {env.task(i).prompt for i in range(env.size)}
    first: dict[str, str] = {}
    for i in range(env.size):
        first.setdefault(env.task(i).prompt, env.task(i).id)
    assert all(first[task.prompt] == task.id for task in everything), "of equal prompts the first id stays"
    assert len(splits.train) >= needs[0] and len(splits.probe) >= needs[1] and len(splits.certify) >= needs[2]
    assert len(splits.probe) <= len(everything) // 4 and len(splits.certify) <= len(everything) // 4
    assert splits.record["equal_prompts_removed"] == env.size - len(everything)
    if is_generated:
        place = {env.task(i).id: i for i in range(env.size)}
        spans = sorted((place[t[0].id], place[t[-1].id]) for t in chosen.values() if t)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(spans)), "index ranges do not interleave"


def test_a_finite_set_is_split_by_the_hash_of_the_id() -> None:
    env = rows([f"q{i}" for i in range(2_000)])
    splits = split(env, seed=7, train_prompts_needed=1, probe_needed=0, certify_needed=0)
    for task in splits.test:
        u = int.from_bytes(hashlib.sha256((splits.record["salt"] + task.id).encode()).digest()[:8], "big") / 2**64
        assert u < 0.1
    shares = {name: len(tasks) / 2_000 for name, tasks in sets(splits).items()}
    assert shares == pytest.approx({"train": 0.8, "probe": 0.05, "certify": 0.05, "test": 0.1}, abs=0.03)


def test_the_test_set_does_not_move_with_what_the_gate_needs() -> None:
    env = rows([f"q{i}" for i in range(1_000)])
    small = split(env, seed=3, train_prompts_needed=1, probe_needed=0, certify_needed=0)
    large = split(env, seed=3, train_prompts_needed=1, probe_needed=200, certify_needed=150)
    assert small.test == large.test and len(large.probe) == 200 and len(large.certify) == 150
    assert small.record["test"] == large.record["test"] and small.record["probe"] != large.record["probe"]
    assert split(env, seed=4, train_prompts_needed=1, probe_needed=0, certify_needed=0).test != small.test


def test_prompts_are_equal_only_if_all_views_are() -> None:
    def task(i: int, view: str) -> Task:
        return Task(id=f"t{i}", env="rows", prompt="same", views=("a", view), answer="")

    env = CustomEnv(Rows([task(i, str(i // 2)) for i in range(80)]))
    splits = split(env, seed=0, train_prompts_needed=1, probe_needed=1, certify_needed=1)
    assert splits.record["equal_prompts_removed"] == 40


def test_too_few_prompts_is_a_config_error_with_count_need_and_remedy() -> None:
    env = rows(["same"] * 10 + [f"q{i}" for i in range(99)])
    with pytest.raises(
        ConfigError, match=r"100 distinct prompts \(9 equal ones removed\).*probe gets 25 and needs 64.*give more"
    ):
        split(env, seed=0, train_prompts_needed=8, probe_needed=64, certify_needed=0)
    with pytest.raises(ConfigError, match=r"train gets \d+ and needs 90"):
        split(env, seed=0, train_prompts_needed=90, probe_needed=10, certify_needed=10)


def test_two_tasks_with_one_id_are_an_error_not_an_overlap() -> None:
    with pytest.raises(DataError, match="0 and 2 of 'rows' have one id, 'a'"):
        split(rows(["p", "q", "r"], ids=["a", "b", "a"]), seed=0, train_prompts_needed=1, probe_needed=0, certify_needed=0)


def test_shares_that_do_not_sum_to_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="sum to 1"):
        split(rows(["p"]), seed=0, train_prompts_needed=0, probe_needed=0, certify_needed=0, shares=(0.8, 0.1, 0.1, 0.1))


def test_a_small_relay_removes_equal_prompts_across_its_ranges(tmp_path) -> None:
    env = build(RelayOptions(symbols=3, prompts=900), n_agents=2, root=tmp_path)  # 3!^2 * 3 = 108 distinct
    splits = split(env, seed=0, train_prompts_needed=4, probe_needed=4, certify_needed=4)
    everything = [task.prompt for tasks in sets(splits).values() for task in tasks]
    assert len(everything) == len(set(everything)) == 900 - splits.record["equal_prompts_removed"] <= 108


def test_a_name_with_a_colon_is_user_code() -> None:
    assert CustomOptions(name="a.b:C").name == "a.b:C"


def test_a_small_generated_family_that_repeats_itself_still_fills_all_four_sets() -> None:
    """108 distinct tasks, every one of them among the first 2,000 of 20,000: places are taken among the distinct ones."""
    env = build(RelayOptions(symbols=3), n_agents=2, root=Path())
    splits = split(env, seed=0, train_prompts_needed=8, probe_needed=8, certify_needed=0)
    sizes = [len(s) for s in (splits.train, splits.probe, splits.certify, splits.test)]
    assert sum(sizes) == 108 and min(sizes) > 0 and abs(sizes[3] - 11) <= 1
