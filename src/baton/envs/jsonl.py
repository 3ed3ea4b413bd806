"""Questions and answers from a JSONL file, and dialogues for a supervised warm start.

One JSON object a line. What is wrong with a row is said when the file is read, with the row's number, never while a run
grades: a missing field, an empty answer, a value that is no text.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from baton.core.keyed import Key
from baton.envs.env import Demonstration, Grade
from baton.envs.grading import Match, canonical, score_answer
from baton.errors import ConfigError, DataError, MissingError
from baton.types import Message, Task

_REQUEST: dict[Match, str] = {
    "math": "Put your final answer within \\boxed{}.",
    "aime": "Put your final answer within \\boxed{}.",
    "dapo": 'Put your answer on its own line after "Answer:".',
    "gsm8k": "Put your final answer on its own line after ####.",
    "countdown": "Put your expression within <answer> </answer>.",
}


class JsonlOptions(BaseModel):
    """Options of a file of questions and answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["jsonl"] = Field(description="Questions and answers from a JSONL file.")
    path: str = Field(description="The file, relative to the config file's folder.")
    prompt_field: str = Field(default="question", description="Field that holds the question.")
    answer_field: str = Field(default="answer", description="Field that holds the gold answer (text or a number).")
    id_field: str = Field(default="", description="Field that holds a row's id; empty: file name and row number.")
    match: Match = Field(
        default="exact",
        description="How answers are compared: exact, math (equivalence of the box), aime, dapo, gsm8k or countdown.",
    )
    ignore_case: bool = Field(default=False, description="With match = 'exact': upper and lower case are equal.")
    request: str = Field(
        default="",
        description="Text after every question that says how to answer; by default what `match` reads, none for 'exact'.",
    )

    @model_validator(mode="before")
    @classmethod
    def _ask_for_what_is_read(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and "request" not in data and data.get("match") in _REQUEST:
            return {**data, "request": _REQUEST[data["match"]]}
        return data


class AnswerGrader:
    """Compares an answer with `Task.answer` alone: what grading needs of a file, without the file."""

    reward_range = (0.0, 1.0)
    is_user_code = False

    def __init__(self, match: Match, *, ignore_case: bool) -> None:
        self._match: Match = match
        self._ignore_case = ignore_case

    def grade(self, task: Task, answer: str) -> Grade:
        """1 or 0; see `score_answer`."""
        return score_answer(self._match, task.answer, answer, ignore_case=self._ignore_case)

    def normalise(self, answer: str) -> str | None:
        return canonical(self._match, answer, ignore_case=self._ignore_case)


class JsonlEnv(AnswerGrader):
    """The rows of one file. Ids are row identities: two rows that differ by a space are two tasks.

    `equal_rows` lists (row, first row with the same question) for the record; the split removes them.

    Raises:
        ConfigError: there is no such file, or it has no rows.
        DataError: a row that cannot be used; names row, field and the fields present.
    """

    name = "jsonl"
    seats = None
    is_generated = False

    def __init__(self, options: JsonlOptions, *, root: Path, key: str = "env.path") -> None:
        super().__init__(options.match, ignore_case=options.ignore_case)
        self._options = options
        self._tasks: list[Task] = []
        self.equal_rows: list[tuple[int, int]] = []
        if self.is_isolated and find_spec("math_verify") is None:
            raise ConfigError(f"env.match = '{options.match}' needs math-verify; pip install 'baton-rl[tasks]'")
        path = root / options.path
        first: dict[str, int] = {}
        ids: dict[str, int] = {}
        for number, row in _rows(path, key):
            question = _text(row, options.prompt_field, path, number)
            gold = _text(row, options.answer_field, path, number, allows_object=options.match == "countdown")
            task_id = _text(row, options.id_field, path, number) if options.id_field else f"{path.stem}-{number}"
            if ids.setdefault(task_id, number) != number:
                raise DataError(f"{path.name} row {number}: id '{task_id}' is that of row {ids[task_id]}; ids must differ")
            if first.setdefault(question, number) != number:
                self.equal_rows.append((number, first[question]))
            prompt = f"{question}\n\n{options.request}" if options.request else question
            self._tasks.append(Task(id=task_id, env=self.name, prompt=prompt, answer=gold))
        if not self._tasks:
            raise ConfigError(f"{path} has no rows; {key} needs at least one question")

    @property
    def is_isolated(self) -> bool:
        """Everything but `exact` and `countdown` may ask math-verify, which can hang."""
        return self._options.match not in ("exact", "countdown")

    @property
    def size(self) -> int:
        return len(self._tasks)

    def task(self, index: int) -> Task:
        if not 0 <= index < self.size:
            raise MissingError(f"task {index} is outside 0..{self.size - 1}: {self._options.path} has {self.size} rows")
        return self._tasks[index]

    def demonstration(self, task: Task, seat: int) -> Demonstration | None:
        """The gold answer in the form that `match` reads. None for `countdown`, whose gold is not an answer."""
        match = self._options.match
        if match == "countdown":
            return None
        gold = task.answer.rpartition("####")[2].strip() if match == "gsm8k" else task.answer
        form = {"exact": "{}", "dapo": "Answer: {}", "gsm8k": "#### {}"}.get(match, "\\boxed{{{}}}")
        return Demonstration(seat=seat, view=task.view(seat), heard=(), reply=form.format(gold))

    def ablate(self, task: Task, seat: int, key: Key) -> str | None:
        return None

    def facts(self, n_agents: int) -> Mapping[str, float]:
        return {}


def load_dialogues(path: Path) -> list[tuple[Message, ...]]:
    """Dialogues for a supervised warm start: rows {"messages": [{"role", "content"}, ...]}, the last by the assistant.

    Raises:
        ConfigError: there is no such file.
        DataError: a row that is no such dialogue; names the row and what is wrong.
    """
    dialogues: list[tuple[Message, ...]] = []
    for number, row in _rows(path, "agents.warm_start.source"):
        where = f"{path.name} row {number}"
        if "messages" not in row:
            raise DataError(f"{where}: missing 'messages'; present: {', '.join(sorted(row)) or 'nothing'}")
        entries = row["messages"]
        if not isinstance(entries, list) or not entries:
            raise DataError(f"{where}: 'messages' must be a list of at least one message")
        messages: list[Message] = []
        for entry in cast("list[Any]", entries):
            if not isinstance(entry, dict) or not cast("dict[str, Any]", entry).keys() >= {"role", "content"}:
                raise DataError(f"{where}: message {len(messages)} needs 'role' and 'content', got {entry!r}")
            role, content = entry["role"], entry["content"]
            if role not in ("system", "user", "assistant"):
                raise DataError(f"{where}: role {role!r} is none of system, user, assistant")
            if not isinstance(content, str):
                raise DataError(f"{where}: content of message {len(messages)} is {type(content).__name__}, not text")
            messages.append(Message(role=role, content=content))
        if messages[-1].role != "assistant" or not messages[-1].content:
            raise DataError(f"{where}: the last message must be the assistant's and not empty: it is what is learned")
        dialogues.append(tuple(messages))
    return dialogues


def _rows(path: Path, key: str) -> Generator[tuple[int, dict[str, Any]]]:
    """(row number from 1, object) of each line that is not blank; `key` is the config key that names the file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"{key}: cannot read {path}: {error.strerror}; paths are relative to the config file's folder"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    # Not splitlines(): JSON text may hold U+2028, which is no end of line here.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line, parse_constant=_refuse_constant)
        except ValueError as error:
            raise DataError(f"{path.name} row {number}: not JSON: {error}") from error
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{path.name} row {number}: half a surrogate pair is no text; mend the escape") from error
        if not isinstance(row, dict):
            raise DataError(f"{path.name} row {number}: {type(row).__name__}, not an object of fields")
        yield number, cast("dict[str, Any]", row)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no value of JSON")


def _text(row: dict[str, Any], name: str, path: Path, number: int, *, allows_object: bool = False) -> str:
    where = f"{path.name} row {number}"
    if name not in row:
        raise DataError(f"{where}: missing '{name}'; present: {', '.join(sorted(row)) or 'nothing'}")
    value = row[name]
    kinds = (str, int, float, *((dict,) if allows_object else ()))
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise DataError(f"{where}: '{name}' is {type(value).__name__}, not text or a number")
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    if not text.strip():
        raise DataError(f"{where}: '{name}' is empty; a row that cannot be graded must be mended or dropped")
    return text
