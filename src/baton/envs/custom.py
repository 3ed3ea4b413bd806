"""User code as an environment: a class named by a dotted path, or a plain reward function beside a file of questions.

    name = "my_pkg.my_env:MyEnv"                                   # a class or factory
    name = "my_pkg.my_env:reward"  and  data = "questions.jsonl"   # def reward(prompt, answer, gold) -> float

The config file's folder is on the import path (last, so that it hides nothing). Grading runs in a worker process, which
may hang or die without harm to the run.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from baton.core.keyed import Key
from baton.envs.env import Demonstration, Grade
from baton.envs.grading import submitted
from baton.envs.jsonl import JsonlEnv, JsonlOptions
from baton.errors import BatonError, ConfigError, TaskFault
from baton.types import Task


class CustomOptions(BaseModel):
    """Options of user code."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="Dotted path to an environment class or factory, or to a reward function: 'my_pkg.my_env:MyEnv'.",
    )
    arguments: dict[str, JsonValue] = Field(
        default_factory=dict[str, JsonValue], description="Keyword arguments of the class or factory."
    )
    data: str = Field(
        default="",
        description="JSONL file of questions; makes `name` a reward function. Relative to the config file's folder.",
    )
    prompt_field: str = Field(default="question", description="Field of `data` that holds the question.")
    answer_field: str = Field(default="answer", description="Field of `data` that holds the gold answer.")
    reward_range: tuple[float, float] = Field(
        default=(0.0, 1.0), description="Lowest and highest reward that the reward function may give."
    )


class CustomEnv:
    """A user's environment behind the full contract: what it leaves out is filled in, what it grades is checked.

    It must have `size`, `task(index)` and `grade(task, answer)`, which may give a `Grade` or a number. The rest of `Env` is
    optional: seats None, rewards in [0, 1], a finite set of rows, the submitted text for votes, no demonstrations, no
    ablation, no facts. Grading is always isolated, and any exception of the user's `grade` is a TaskFault.
    """

    is_isolated = True
    is_user_code = True

    def __init__(self, inner: Any, *, n_agents: int | None = None) -> None:
        lacking = [name for name in ("size", "task", "grade") if not hasattr(inner, name)]
        if lacking:
            raise ConfigError(f"{type(inner).__name__} has no {', '.join(lacking)}; an env needs size, task and grade")
        self._inner = inner
        self.name: str = getattr(inner, "name", type(inner).__name__)
        self.seats: int | None = getattr(inner, "seats", None)
        self.size: int = inner.size
        self.is_generated: bool = getattr(inner, "is_generated", False)
        low, high = getattr(inner, "reward_range", (0.0, 1.0))
        self.reward_range: tuple[float, float] = (float(low), float(high))
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigError(f"{self.name}.reward_range is ({low}, {high}); give two finite numbers, the lower first")
        if self.seats is not None and n_agents is not None and n_agents != self.seats:
            raise ConfigError(f"'{self.name}' needs {self.seats} agents, the config has {n_agents}; change [[agents]]")

    def task(self, index: int) -> Task:
        return self._inner.task(index)

    def grade(self, task: Task, answer: str) -> Grade:
        try:
            given: Any = self._inner.grade(task, answer)
        except TaskFault:
            raise
        except Exception as error:  # the documented edge: what user code raises is its own failure
            raise TaskFault(f"{self.name}.grade raised {type(error).__name__}: {error}") from error
        grade = given if isinstance(given, Grade) else Grade(_number(given, f"{self.name}.grade"))
        return Grade(_inside(grade.reward, self.reward_range, f"{self.name}.grade"), grade.reason)

    def normalise(self, answer: str) -> str | None:
        return self._inner.normalise(answer) if hasattr(self._inner, "normalise") else submitted(answer)

    def demonstration(self, task: Task, seat: int) -> Demonstration | None:
        return self._inner.demonstration(task, seat) if hasattr(self._inner, "demonstration") else None

    def ablate(self, task: Task, seat: int, key: Key) -> str | None:
        return self._inner.ablate(task, seat, key) if hasattr(self._inner, "ablate") else None

    def facts(self, n_agents: int) -> Mapping[str, float]:
        return self._inner.facts(n_agents) if hasattr(self._inner, "facts") else {}


class RewardFunction:
    """The grading part of a reward function: `reward(prompt, answer, gold)`, finite and inside the range, or a TaskFault."""

    is_user_code = True

    def __init__(self, function: Callable[[str, str, str], Any], name: str, reward_range: tuple[float, float]) -> None:
        self._function = function
        self._name = name
        self.reward_range = reward_range

    def grade(self, task: Task, answer: str) -> Grade:
        try:
            given = self._function(task.prompt, answer, task.answer)
        except Exception as error:  # the documented edge: what user code raises is its own failure
            raise TaskFault(f"{self._name} raised {type(error).__name__}: {error}") from error
        return Grade(_inside(_number(given, self._name), self.reward_range, self._name))


class RewardEnv(JsonlEnv):
    """The questions of a file with a reward function as their grader."""

    is_user_code = True

    def __init__(self, options: CustomOptions, *, root: Path) -> None:
        self._grader = reward_function(options, root=root)
        rows = JsonlOptions(
            name="jsonl", path=options.data, prompt_field=options.prompt_field, answer_field=options.answer_field
        )
        super().__init__(rows, root=root)
        self.reward_range = options.reward_range

    @property
    def is_isolated(self) -> bool:
        return True

    def grade(self, task: Task, answer: str) -> Grade:
        return self._grader.grade(task, answer)


def custom_env(options: CustomOptions, *, n_agents: int, root: Path) -> CustomEnv | RewardEnv:
    """The environment that a dotted path names.

    Raises:
        ConfigError: it cannot be imported or built; names path, cause and remedy.
    """
    if options.data:
        return RewardEnv(options, root=root)
    factory = user_code(options.name, key="env.name", root=root)
    try:
        inner = factory(**options.arguments)
    except BatonError:
        raise
    except Exception as error:  # the documented edge: a user's constructor may raise anything
        raise ConfigError(
            f"env.name = '{options.name}': building it with {dict(options.arguments)} raised {type(error).__name__}: "
            f"{error}; check env.arguments, or give env.data if it is a reward function"
        ) from error
    return CustomEnv(inner, n_agents=n_agents)


def reward_function(options: CustomOptions, *, root: Path) -> RewardFunction:
    """The reward function that a dotted path names, without its data. Raises ConfigError as `custom_env` does."""
    low, high = options.reward_range
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"env.reward_range is ({low}, {high}); give two finite numbers, the lower first")
    return RewardFunction(user_code(options.name, key="env.name", root=root), options.name, options.reward_range)


def user_code(name: str, *, key: str, root: Path) -> Callable[..., Any]:
    """What the dotted path `name` names, imported with `root` last on the import path; `key` is the config key that says so.

    Raises:
        ConfigError: it cannot be imported, or is nothing that can be called; names key, path, cause and remedy.
    """
    module_name, _, attribute = name.partition(":")
    folder = str(root.resolve())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the documented edge: importing user code may raise anything
        raise ConfigError(
            f"{key} = '{name}': importing {module_name} raised {type(error).__name__}: {error}; the import path "
            f"is Python's, then {folder}"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        what = "has no such name" if found is None else f"holds a {type(found).__name__} there, which cannot be called"
        raise ConfigError(f"{key} = '{name}': {module.__file__} {what}; give a class, a factory or a function")
    return found


def _number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TaskFault(f"{name} gave {value!r}, not a number") from error


def _inside(reward: float, reward_range: tuple[float, float], name: str) -> float:
    low, high = reward_range
    value = float(reward)
    if not (math.isfinite(value) and low <= value <= high):
        raise TaskFault(f"{name} gave {value}, not a finite number in [{low}, {high}]; mend it or set reward_range")
    return value
