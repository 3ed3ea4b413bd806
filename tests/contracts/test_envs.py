"""Every environment passes the contract that outside authors run, and the contract refuses what breaks it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from baton.core.keyed import Key
from baton.envs import CustomOptions, Grade, JsonlOptions, ReasoningGymOptions, RelayOptions, build
from baton.envs.check import check_env
from baton.envs.env import Demonstration, Env
from baton.types import Task

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _rows(folder: Path, *answers: object) -> str:
    rows = [json.dumps({"question": f"question {i}", "answer": a}) for i, a in enumerate(answers)]
    (folder / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return "rows.jsonl"


@pytest.mark.parametrize("n_agents", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "form", [{}, {"layout": "pairs"}, {"form": "names"}, {"symbols": 2}, {"symbols": 62, "layout": "row"}]
)
def test_the_relay_passes_the_contract(form: dict, n_agents: int, tmp_path: Path) -> None:
    env = build(RelayOptions.model_validate({"name": "relay", "prompts": 600, **form}), n_agents=n_agents, root=tmp_path)
    assert isinstance(env, Env)
    check_env(env)


@pytest.mark.parametrize(
    ("match", "gold"),
    [
        ("exact", "Paris"),
        ("math", "\\frac{1}{2}"),
        ("aime", "073"),
        ("dapo", "126"),
        ("gsm8k", "2 + 2 = 4\n#### 4"),
        ("countdown", {"target": 13, "nums": [4, 9]}),
    ],
)
def test_a_file_of_questions_passes_the_contract(match: str, gold: object, tmp_path: Path) -> None:
    options = JsonlOptions.model_validate({"name": "jsonl", "path": _rows(tmp_path, gold), "match": match})
    env = build(options, n_agents=2, root=tmp_path)
    if match == "countdown":
        assert env.grade(env.task(0), "<answer>4+9</answer>") == Grade(1.0)
        return
    check_env(env)


@pytest.mark.parametrize("dataset", ["gcd", "countdown", "rotate_matrix"])
def test_reasoning_gym_passes_the_contract(dataset: str, tmp_path: Path) -> None:
    check_env(
        build(ReasoningGymOptions(name="reasoning_gym", dataset=dataset, prompts=40), n_agents=2, root=tmp_path), tasks=8
    )


def test_the_example_passes_the_contract_as_written_and_as_configured() -> None:
    env = build(CustomOptions(name="own_env:Reverse"), n_agents=2, root=EXAMPLES)
    assert isinstance(env, Env)
    check_env(env)
    check_env(sys.modules["own_env"].Reverse(3))


class Sound:
    """An environment that keeps the contract; each broken one below breaks one rule."""

    name, seats, reward_range, size, is_generated, is_isolated = "sound", 2, (0.0, 1.0), 4, True, False

    def task(self, index: int) -> Task:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return Task(id=f"s{index}", env=self.name, prompt=f"say {index}", views=("a", "b"), answer=str(index))

    def grade(self, task: Task, answer: str) -> Grade:
        return Grade(float(self.normalise(answer) == task.answer))

    def normalise(self, answer: str) -> str | None:
        return answer.strip() or None

    def demonstration(self, task: Task, seat: int) -> Demonstration | None:
        return Demonstration(seat=seat, view=task.view(seat), heard=(), reply=task.answer)

    def ablate(self, task: Task, seat: int, key: Key) -> str | None:
        return None

    def facts(self, n_agents: int) -> dict[str, float]:
        return {}


def test_a_sound_env_passes() -> None:
    check_env(Sound())


class Drifts(Sound):
    calls = 0

    def task(self, index: int) -> Task:
        self.calls += 1
        task = super().task(index)
        return Task(id=task.id, env="x", prompt=f"{self.calls}", views=task.views, answer=task.answer)


class OneId(Sound):
    def task(self, index: int) -> Task:
        return Task(id="one", env="x", prompt=super().task(index).prompt, views=("a", "b"), answer=str(index))


class OneView(Sound):
    def task(self, index: int) -> Task:
        return Task(id=f"s{index}", env="x", prompt=super().task(index).prompt, views=("a",), answer=str(index))


class Pays2(Sound):
    def grade(self, task: Task, answer: str) -> Grade:
        return Grade(2.0 if answer == "None" else super().grade(task, answer).reward)


class Raises(Sound):
    def grade(self, task: Task, answer: str) -> Grade:
        return Grade(1.0 if int(answer) == int(task.answer) else 0.0)


class DeniesGold(Sound):
    def grade(self, task: Task, answer: str) -> Grade:
        return Grade(0.5)


class Shrinks(Sound):
    def grade(self, task: Task, answer: str) -> Grade:
        return Grade(float(answer == task.answer))

    def normalise(self, answer: str) -> str | None:
        return answer[1:] or None


class NoEnd(Sound):
    def task(self, index: int) -> Task:
        return Task(id=f"s{index}", env="x", prompt=f"say {index}", views=("a", "b"), answer=str(index))


class WrongView(Sound):
    def demonstration(self, task: Task, seat: int) -> Demonstration | None:
        return Demonstration(seat=seat, view="elsewhere", heard=(), reply=task.answer)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (Drifts, "not a function of its index"),
        (OneId, "have one id"),
        (OneView, "1 views for 2 seats"),
        (Pays2, "outside"),
        (DeniesGold, "the gold answer"),
        (Shrinks, "normalise|canonical|cannot vote"),
        (NoEnd, "must raise MissingError"),
        (WrongView, "another seat's view"),
    ],
)
def test_the_contract_refuses_an_env_that_breaks_a_rule(broken: type[Sound], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_env(broken())


def test_the_contract_lets_through_what_a_grader_raises() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        check_env(Raises())
