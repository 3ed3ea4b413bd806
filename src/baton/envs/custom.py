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
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from baton.core.keyed import Key
from baton.envs.env import Demonstration, Grade
from baton.envs.grading import submitted
from baton.envs.jsonl import JsonlEnv, JsonlOptions
from baton.envs.pool import importing
from baton.errors import BatonError, ConfigError, MissingError, TaskFault, cause, is_text
from baton.types import Task

_UNIT = (0.0, 1.0)


def _check_range(given: Any, name: str) -> tuple[float, float]:
    """Two finite numbers, the lower first. Raises ConfigError."""
    try:
        low, high = (float(one) for one in given)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"{name} = {given!r}: give two finite numbers, the lower first")
    return low, high


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
        default=_UNIT, description="Lowest and highest reward that the reward function may give."
    )

    @model_validator(mode="after")
    def _read_and_ordered(self) -> CustomOptions:
        for name in ("arguments", "reward_range", "prompt_field", "answer_field"):
            is_set = getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True)
            if is_set and (name == "arguments") == bool(self.data):
                kind = "a reward function (env.data is set)" if self.data else "a class (env.data is not set)"
                remedy = "; give the class a `reward_range`" if name == "reward_range" else ""
                raise ValueError(f"{name} has no effect for {kind}; remove it{remedy}")
        _check_range(self.reward_range, "reward_range")
        return self


class CustomEnv:
    """A user's environment behind the full contract: what it leaves out is filled in, what it grades is checked.

    It must have `size`, `task(index)` and `grade(task, answer)`, which may give a `Grade`, a number, True or False. The rest
    of `Env` is optional: seats None, rewards in [0, 1], a finite set of rows, the submitted text for votes, no
    demonstrations, no ablation, no facts. Grading is always isolated, and any exception of the user's `grade` is a
    TaskFault; what else of it raises, or gives what its contract does not, is a ConfigError that names the method.
    """

    is_isolated = True
    is_user_code = True

    def __init__(self, inner: Any, *, n_agents: int | None = None) -> None:
        self._inner = inner
        self._n = n_agents
        lacking = [name for name in ("size", "task", "grade") if self._own(name, None) is None]
        if lacking:
            raise ConfigError(f"{type(inner).__name__} has no {', '.join(lacking)}; an env needs size, task and grade")
        self.name: str = str(self._own("name", type(inner).__name__))
        self.seats: int | None = self._own("seats", None)
        self.size: int = self._own("size", 0)
        counts: dict[str, Any] = {"size": self.size} | ({} if self.seats is None else {"seats": self.seats})
        for name, value in counts.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{self.name}.{name} is {value!r}; it must be a whole number of at least 1")
        self.is_generated: bool = bool(self._own("is_generated", False))
        self.reward_range: tuple[float, float] = _check_range(self._own("reward_range", _UNIT), f"{self.name}.reward_range")
        if self.seats is not None and n_agents is not None and n_agents != self.seats:
            raise ConfigError(f"'{self.name}' needs {self.seats} agents, the config has {n_agents}; change [[agents]]")

    def _own(self, name: str, default: Any) -> Any:
        """An attribute of the user's object, which may be a property that raises."""
        try:
            with redirect_stdout(sys.stderr):
                return getattr(self._inner, name, default)
        except (Exception, SystemExit) as error:  # the documented edge: user code may raise anything
            raise ConfigError(f"{type(self._inner).__name__}.{name} raised {cause(error)}") from error

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            # Standard output is the command's: with --json it is read by programs.
            with redirect_stdout(sys.stderr):
                return getattr(self._inner, name)(*arguments)
        except BatonError:
            raise
        except (Exception, SystemExit) as error:  # the documented edge: user code may raise anything
            shown = ", ".join(repr(a.id if isinstance(a, Task) else a) for a in arguments)
            raise ConfigError(f"{self.name}.{name}({shown}) raised {cause(error)}") from error

    def task(self, index: int) -> Task:
        if not 0 <= index < self.size:
            raise MissingError(f"task {index} is outside 0..{self.size - 1}: {self.name} has {self.size} tasks")
        given = self._call("task", index)
        if not isinstance(given, Task):
            raise ConfigError(f"{self.name}.task({index}) gave {given!r}; it must give a baton.Task")
        texts = {name: getattr(given, name) for name in ("id", "env", "prompt", "answer", "payload")}
        texts |= {f"views[{i}]": view for i, view in enumerate(given.views)}
        for name, text in texts.items():
            if not is_text(text):
                raise ConfigError(f"{self.name}.task({index}).{name} is {text!r}; it must be a text")
        if given.views and self._n is not None and (isinstance(given.views, str) or len(given.views) != self._n):
            raise ConfigError(
                f"{self.name}.task({index}).views is {given.views!r}; it must be a tuple of {self._n} texts, one a seat"
            )
        return given

    def grade(self, task: Task, answer: str) -> Grade:
        try:
            given: Any = self._inner.grade(task, answer)
        except TaskFault:
            raise
        except Exception as error:  # the documented edge: what user code raises is its own failure
            raise TaskFault(f"{self.name}.grade raised {cause(error)}") from error
        grade = given if isinstance(given, Grade) else Grade(_number(given, f"{self.name}.grade"))
        return Grade(_inside(grade.reward, self.reward_range, f"{self.name}.grade"), grade.reason)

    def normalise(self, answer: str) -> str | None:
        return self._call("normalise", answer) if hasattr(self._inner, "normalise") else submitted(answer)

    def demonstration(self, task: Task, seat: int) -> Demonstration | None:
        return self._call("demonstration", task, seat) if hasattr(self._inner, "demonstration") else None

    def ablate(self, task: Task, seat: int, key: Key) -> str | None:
        return self._call("ablate", task, seat, key) if hasattr(self._inner, "ablate") else None

    def facts(self, n_agents: int) -> Mapping[str, float]:
        return self._call("facts", n_agents) if hasattr(self._inner, "facts") else {}


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
            raise TaskFault(f"{self._name} raised {cause(error)}") from error
        return Grade(_inside(_number(given, self._name), self.reward_range, self._name))


class RewardEnv(JsonlEnv):
    """The questions of a file with a reward function as their grader."""

    is_user_code = True

    def __init__(self, options: CustomOptions, *, root: Path) -> None:
        self._grader = reward_function(options, root=root)
        rows = JsonlOptions(
            name="jsonl", path=options.data, prompt_field=options.prompt_field, answer_field=options.answer_field
        )
        super().__init__(rows, root=root, key="env.data")
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
        with redirect_stdout(sys.stderr):
            inner = factory(**options.arguments)
    except BatonError:
        raise
    except (Exception, SystemExit) as error:  # the documented edge: a user's constructor may raise anything
        raise ConfigError(
            f"env.name = '{options.name}': building it with {dict(options.arguments)} raised {cause(error)}; "
            "check env.arguments, or give env.data if it is a reward function"
        ) from error
    return CustomEnv(inner, n_agents=n_agents)


def reward_function(options: CustomOptions, *, root: Path) -> RewardFunction:
    """The reward function that a dotted path names, without its data. Raises ConfigError as `custom_env` does."""
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
        with importing(module_name), redirect_stdout(sys.stderr):
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the documented edge: importing user code may raise anything
        raise ConfigError(
            f"{key} = '{name}': importing {module_name} raised {cause(error)}; the import path is Python's, then {folder}"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        what = "has no such name" if found is None else f"holds a {type(found).__name__} there, which cannot be called"
        raise ConfigError(f"{key} = '{name}': {module.__file__} {what}; give a class, a factory or a function")
    return found


def _number(value: Any, name: str) -> float:
    try:
        # A text that happens to read as a number is a mistake; True and False are 1 and 0 (numpy's and torch's too).
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise TaskFault(f"{name} gave {value!r}, not a number")


def _inside(reward: float, reward_range: tuple[float, float], name: str) -> float:
    low, high = reward_range
    value = float(reward)
    if not (math.isfinite(value) and low <= value <= high):
        raise TaskFault(f"{name} gave {value}, not a finite number in [{low}, {high}]; mend it or set reward_range")
    return value
