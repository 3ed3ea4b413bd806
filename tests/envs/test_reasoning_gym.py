"""reasoning-gym's datasets: the same in every process, scored by their own scorers, safe against what models write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.envs import Grade, GraderPool, ReasoningGymOptions, build, spec
from baton.envs.reasoning_gym import ReasoningGymEnv
from baton.errors import ConfigError

# One or two of each of the library's kinds, and each dataset whose scorer or entry is special.
SAMPLE = (
    *("arc_1d", "basic_arithmetic", "binary_matrix", "caesar_cipher", "chain_sum", "circuit_logic"),
    *("countdown", "family_relationships", "gcd", "knights_knaves", "letter_counting", "maze", "n_queens"),
    *("number_sorting", "polynomial_multiplication", "prime_factorization", "propositional_logic", "puzzle24", "rearc"),
    *("shortest_path", "simple_integration", "spiral_matrix", "string_insertion", "sudoku", "syllogism", "tower_of_hanoi"),
)


def _env(dataset: str, **options: object) -> ReasoningGymEnv:
    given = {"name": "reasoning_gym", "dataset": dataset, "prompts": 4, **options}
    return ReasoningGymEnv(ReasoningGymOptions.model_validate(given))


@pytest.mark.parametrize("dataset", SAMPLE)
def test_the_gold_answer_of_a_sampled_dataset_scores_1_and_odd_text_never_raises(dataset: str) -> None:
    env = _env(dataset)
    task = env.task(1)
    assert task == _env(dataset).task(1) and task.id == f"{dataset}-0-1"
    if task.answer:
        assert env.grade(task, f"Let me see. <answer>{task.answer}</answer>") == Grade(1.0)
    for text in ("", "???", "}{", "x" * 3_000, "<answer>9/0</answer>", "[[1, 2], [3, 4]]", "None", "\\frac{1}{"):
        assert 0.0 <= env.grade(task, text).reward <= 1.0


@pytest.mark.parametrize("dataset", ["binary_matrix", "n_queens", "spiral_matrix", "string_insertion"])
def test_an_answer_is_never_run_as_code_by_scorers_that_evaluate_it(dataset: str, tmp_path: Path) -> None:
    env, mark = _env(dataset), tmp_path / "ran"
    env.grade(env.task(0), f"<answer>[open({str(mark)!r}, 'w')]</answer>")
    assert not mark.exists()


@pytest.mark.parametrize("dataset", ["countdown", "puzzle24", "polynomial_multiplication", "simple_integration"])
def test_an_answer_is_never_run_as_code_by_scorers_that_parse_it(dataset: str, tmp_path: Path) -> None:
    env, mark = _env(dataset), tmp_path / "ran"
    for text in (
        f"open({str(mark)!r}, 'w')",
        "exit()",
        "x.__class__",
        "().__class__",
        "(1).real",
        "lambda: 1",
        "__import__('os')",
    ):
        assert env.grade(env.task(0), f"<answer>{text}</answer>").reason == "unparsed: no arithmetic expression"
    assert not mark.exists()


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("<answer> 5 </answer>", "5"),
        ("<answer>4</answer> no <answer>5</answer> so", "5"),
        ("Answer: 5\nI hope so", "5"),
        ("let me see\n5\n", "5"),
        ("<think>4</think>5", "5"),
        ("<answer>5", "5"),
        ("<think>5", None),
        ("", None),
    ],
)
def test_the_tag_then_the_answer_line_then_the_last_line_is_the_answer(said: str, read: str | None) -> None:
    assert _env("gcd").normalise(said) == (None if read is None else f"<answer>{read}</answer>")


def test_entries_cross_json_with_their_tuples(tmp_path: Path) -> None:
    env = _env("rearc")
    task = env.task(0)
    assert "__tuple__" in task.payload and json.loads(task.payload)["question"] == task.prompt
    options = ReasoningGymOptions(name="reasoning_gym", dataset="rearc", prompts=4)
    with GraderPool(workers=1) as pool:
        at = spec(options, n_agents=1, root=tmp_path)
        right, wrong = pool.grade_many(at, [(task, f"<answer>{task.answer}</answer>"), (task, "no")])
    assert right == Grade(1.0) and isinstance(wrong, Grade) and wrong.reward < 0.1


def test_unknown_datasets_and_arguments_are_config_errors_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no dataset 'count_down'; did you mean countdown"):
        build(ReasoningGymOptions(name="reasoning_gym", dataset="count_down"), n_agents=1, root=tmp_path)
    with pytest.raises(ConfigError, match=r"refuses the difficulty of 'gcd'.*min_digits"):
        _env("gcd", difficulty={"min_digits": 3})
    with pytest.raises(ConfigError, match=r"env\.seed"):
        _env("gcd", difficulty={"seed": 3})


def test_difficulty_and_seed_change_the_tasks() -> None:
    easy, hard, other = _env("gcd"), _env("gcd", difficulty={"min_numbers": 4, "max_numbers": 4}), _env("gcd", seed=1)
    assert len({easy.task(0).prompt, hard.task(0).prompt, other.task(0).prompt}) == 3
