"""The procedural datasets of reasoning-gym by name, each scored by its own scorer.

Answer extraction, the same in training and evaluation: thinking is dropped, then the last `<answer>...</answer>`, else the
rest of the line after the last `Answer:`, else the last line that is not empty.

Some scorers evaluate the answer as code (`eval`, `sympy.parse_expr`). Here `eval` is replaced by `ast.literal_eval`, and
`parse_expr` sees arithmetic with known function names only. Grading is still isolated: a scorer can hang on a text.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import json
import re
import sys
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from baton.core.keyed import Key
from baton.envs.env import Demonstration, Grade
from baton.envs.grading import labelled, tagged, without_thinking
from baton.errors import ConfigError, DataError, MissingError, TaskFault, cause
from baton.types import Task

_CALLS_EVAL = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
_CALLS_PARSE_EXPR = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
_ARITHMETIC = re.compile(r"[0-9A-Za-z+\-*/^().,\s]*")
_WORD = re.compile(r"[A-Za-z]{2,}")
_FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh"}
    | {"atanh", "exp", "log", "ln", "sqrt", "pi", "Abs"}
)


class ReasoningGymOptions(BaseModel):
    """Options of a reasoning-gym dataset."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["reasoning_gym"] = Field(description="A procedural dataset of reasoning-gym.")
    dataset: str = Field(description="Its name there, for example 'countdown' or 'knights_knaves'.")
    prompts: int = Field(default=4_000, ge=1, description="Number of tasks that the run draws its four prompt sets from.")
    seed: int = Field(default=0, ge=0, description="Seed of the generator: another seed is another family of tasks.")
    difficulty: dict[str, JsonValue] = Field(
        default_factory=dict[str, JsonValue],
        description="Arguments of the dataset's config, for example { min_numbers = 3, max_numbers = 4 }.",
    )


class ReasoningGymEnv:
    """One reasoning-gym dataset. Rewards lie in [0, 1]; some scorers give partial credit.

    Raises:
        ConfigError: reasoning-gym is not installed, has no such dataset (names the closest), or refuses the difficulty.
    """

    name = "reasoning_gym"
    seats = None
    reward_range = (0.0, 1.0)
    is_generated = True
    is_isolated = True
    is_user_code = False

    def __init__(self, options: ReasoningGymOptions) -> None:
        self._options = options
        self._dataset = _create(options)
        self._entry = lru_cache(maxsize=64)(_decode)

    @property
    def size(self) -> int:
        return self._options.prompts

    def task(self, index: int) -> Task:
        """The task with this index. `payload` is the dataset's whole entry, `answer` its gold ("" where it has none)."""
        if not 0 <= index < self.size:
            raise MissingError(f"task {index} is outside 0..{self.size - 1}; raise env.prompts")
        entry: dict[str, Any] = self._dataset[index]
        task_id = f"{self._options.dataset}-{self._options.seed}-{index}"
        payload = json.dumps(_plain(entry))
        if _decode(payload) != entry:
            raise DataError(f"{task_id}: the entry does not survive JSON, so no worker could grade it; use another dataset")
        gold = entry["answer"]
        return Task(
            id=task_id,
            env=self.name,
            prompt=entry["question"],
            answer="" if gold is None else str(gold),
            payload=payload,
        )

    def grade(self, task: Task, answer: str) -> Grade:
        """The dataset's own score of the extracted answer. A scorer that raises on a text but not on the gold gives 0.

        Raises:
            TaskFault: the scorer raises on its own gold answer, or scores outside [0, 1].
        """
        said = _extract(answer)
        if said is None:
            return Grade(0.0, "unparsed: no answer")
        if self._options.dataset in _CALLS_PARSE_EXPR and not _is_arithmetic(said):
            return Grade(0.0, "unparsed: no arithmetic expression")
        entry = self._entry(task.payload)
        try:
            score = self._score(said, entry)
        except Exception as error:  # the documented edge: scorers raise anything on odd text
            gold = entry["answer"]
            if gold is not None:
                try:
                    self._score(gold, entry)
                except Exception as fault:
                    raise TaskFault(f"the scorer of '{self._options.dataset}' fails on its own gold: {fault!r}") from fault
            return Grade(0.0, f"unparsed: the scorer raised {type(error).__name__}")
        if not 0.0 <= score <= 1.0:
            raise TaskFault(f"the scorer of '{self._options.dataset}' gave {score}, outside [0, 1]")
        return Grade(score)

    def normalise(self, answer: str) -> str | None:
        said = _extract(answer)
        return None if said is None else f"<answer>{said}</answer>"

    def demonstration(self, task: Task, seat: int) -> Demonstration | None:
        """The gold answer in its tag: the form is taught, not the reasoning."""
        if not task.answer:
            return None
        return Demonstration(seat=seat, view=task.view(seat), heard=(), reply=f"<answer>{task.answer}</answer>")

    def ablate(self, task: Task, seat: int, key: Key) -> str | None:
        return None

    def facts(self, n_agents: int) -> Mapping[str, float]:
        return {}

    def _score(self, said: str, entry: dict[str, Any]) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's on empty text; the score is what counts
            return float(self._dataset.score_answer(answer=said, entry=entry))


def _create(options: ReasoningGymOptions) -> Any:
    try:
        library = importlib.import_module("reasoning_gym")
        known = cast("dict[str, Any]", importlib.import_module("reasoning_gym.factory").DATASETS)
    except ImportError as error:
        raise ConfigError("env 'reasoning_gym' needs reasoning-gym; pip install 'baton-rl[tasks]'") from error
    name = options.dataset
    if name not in known or name == "composite":
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else f"it has {', '.join(sorted(known))}"
        raise ConfigError(f"reasoning-gym has no dataset '{name}'; {hint}")
    taken = sorted({"seed", "size"} & set(options.difficulty))
    if taken:
        raise ConfigError(f"env.difficulty sets {taken[0]}; that is env.{'seed' if taken[0] == 'seed' else 'prompts'}")
    try:
        dataset = library.create_dataset(name, seed=options.seed, size=options.prompts, **options.difficulty)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym refuses the difficulty of '{name}': {cause(error)}") from error
    if name in _CALLS_EVAL:
        # A module global shadows the builtin: the scorer's `eval(answer)` then reads literals and runs nothing.
        vars(sys.modules[type(dataset).__module__])["eval"] = ast.literal_eval
    return dataset


def _extract(answer: str) -> str | None:
    said = without_thinking(answer)
    if said is None:
        return None
    inside = tagged(said) or labelled(said)
    if inside is None:
        lines = said.strip().splitlines()
        inside = lines[-1].strip() if lines else ""
    while "<answer>" in inside or "</answer>" in inside:  # half a tag is no part of an answer
        inside = inside.replace("<answer>", "").replace("</answer>", "").strip()
    return inside or None


def _is_arithmetic(text: str) -> bool:
    return (
        len(text) <= 1_000
        and _ARITHMETIC.fullmatch(text) is not None
        and re.search(r"\.\s*[A-Za-z]", text) is None
        and all(word in _FUNCTIONS for word in _WORD.findall(text))
    )


_TUPLE = "__tuple__"


def _plain(value: Any) -> Any:
    """JSON with tuples marked: scorers that compare tuples must get tuples back."""
    if isinstance(value, tuple):
        return {_TUPLE: [_plain(item) for item in cast("tuple[Any, ...]", value)]}
    if isinstance(value, list):
        return [_plain(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in cast("dict[str, Any]", value).items()}
    return value


def _decode(payload: str) -> dict[str, Any]:
    def revive(value: dict[str, Any]) -> Any:
        return tuple(value[_TUPLE]) if value.keys() == {_TUPLE} else value

    return json.loads(payload, object_hook=revive)
