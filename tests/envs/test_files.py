"""Rows, dialogues and user code: what is wrong is said at load, with its place."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from baton.envs import CustomOptions, EnvOptions, Grade, JsonlOptions, RelayOptions, build, load_dialogues
from baton.envs.jsonl import JsonlEnv
from baton.errors import ConfigError, DataError, TaskFault
from baton.types import Task

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _file(folder: Path, *rows: object, name: str = "rows.jsonl") -> str:
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    (folder / name).write_text(text + "\n", encoding="utf-8")
    return name


def _env(folder: Path, *rows: object, **options: object) -> JsonlEnv:
    return JsonlEnv(JsonlOptions.model_validate({"name": "jsonl", "path": _file(folder, *rows), **options}), root=folder)


GOOD = {"question": "1+1?", "answer": "2"}


def test_a_missing_field_is_named_with_its_row_and_the_fields_present(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": "1"} for i in range(16)]
    with pytest.raises(DataError, match="row 17: missing 'answer'; present: id, question"):
        _env(tmp_path, *rows, {"question": "q", "id": "x"})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "q", "answer": ""}, "row 2: 'answer' is empty"),
        ({"question": " ", "answer": "1"}, "row 2: 'question' is empty"),
        ({"question": "q", "answer": None}, "row 2: 'answer' is NoneType"),
        ({"question": ["q"], "answer": "1"}, "row 2: 'question' is list"),
        ("{", "row 2: not JSON"),
        ('{"question": "q", "answer": NaN}', "row 2: not JSON: NaN"),
        ({"question": "q", "answer": {"a": 1}}, "row 2: 'answer' is dict"),
        ('{"question": "\\ud800", "answer": "1"}', "row 2: half a surrogate pair"),
        ("[1]", "row 2: list, not an object"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused_at_load(tmp_path: Path, row: object, said: str) -> None:
    with pytest.raises(DataError, match=said):
        _env(tmp_path, GOOD, row)


def test_rows_equal_up_to_a_space_are_two_tasks_and_equal_ones_are_reported(tmp_path: Path) -> None:
    env = _env(tmp_path, GOOD, {"question": "1+1? ", "answer": "2"}, "", {"question": "1+1?", "answer": 3})
    assert [env.task(i).id for i in range(env.size)] == ["rows-1", "rows-2", "rows-4"]
    assert env.equal_rows == [(4, 1)] and env.task(2).answer == "3"


def test_ids_come_from_a_field_where_one_is_named(tmp_path: Path) -> None:
    assert _env(tmp_path, {**GOOD, "key": 7}, id_field="key").task(0).id == "7"
    with pytest.raises(DataError, match="row 2: id '7' is that of row 1"):
        _env(tmp_path, {**GOOD, "key": 7}, {**GOOD, "key": "7"}, id_field="key")


def test_the_prompt_asks_for_what_the_grader_reads(tmp_path: Path) -> None:
    assert _env(tmp_path, GOOD, match="math").task(0).prompt == "1+1?\n\nPut your final answer within \\boxed{}."
    assert _env(tmp_path, GOOD).task(0).prompt == "1+1?"
    assert _env(tmp_path, GOOD, match="math", request="Say it.").task(0).prompt == "1+1?\n\nSay it."


def test_a_file_that_is_absent_or_empty_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent.jsonl"):
        JsonlEnv(JsonlOptions(name="jsonl", path="absent.jsonl"), root=tmp_path)
    with pytest.raises(ConfigError, match="no rows"):
        _env(tmp_path, "")


def test_dialogues_are_read_and_must_end_with_the_assistant(tmp_path: Path) -> None:
    user, reply = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
    path = tmp_path / _file(tmp_path, {"messages": [user, reply]}, {"messages": [reply]})
    first, second = load_dialogues(path)
    assert [(m.role, m.content) for m in first] == [("user", "hi"), ("assistant", "ho")] and len(second) == 1
    for bad, said in (
        ({"dialogue": []}, "row 1: missing 'messages'; present: dialogue"),
        ({"messages": []}, "at least one"),
        ({"messages": [reply, user]}, "last message must be the assistant's"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "role 'bot'"),
        ({"messages": [{"role": "assistant"}]}, "needs 'role' and 'content'"),
        ({"messages": [{"role": "assistant", "content": 3}]}, "is int, not text"),
    ):
        with pytest.raises(DataError, match=said):
            load_dialogues(tmp_path / _file(tmp_path, bad, name="bad.jsonl"))


def test_the_family_is_told_by_its_name() -> None:
    read = TypeAdapter(EnvOptions).validate_python
    assert isinstance(read({"name": "relay", "symbols": 4}), RelayOptions)
    assert isinstance(read({"name": "jsonl", "path": "x"}), JsonlOptions)
    assert isinstance(read({"name": "my_pkg.my_env:MyEnv"}), CustomOptions)
    for bad in ({"name": "relais"}, {"name": "relay", "path": "x"}, {"name": "a b:c"}, {}):
        with pytest.raises(ValidationError):
            read(bad)


# ---- user code -------------------------------------------------------------------------------------------------


def test_the_example_env_and_its_reward_function_are_built_from_their_paths(tmp_path: Path) -> None:
    env = build(CustomOptions(name="own_env:Reverse", arguments={"letters": 3}), n_agents=2, root=EXAMPLES)
    task = env.task(4)
    assert env.grade(task, task.answer) == Grade(1.0) and env.is_isolated and len(task.answer) == 3
    assert env.grade(task, "") == Grade(0.0)
    data = str(tmp_path / _file(tmp_path, {"question": "capital?", "answer": "Paris"}))
    rows = build(CustomOptions(name="own_env:right_in_any_case", data=data), n_agents=1, root=EXAMPLES)
    assert [rows.grade(rows.task(0), a).reward for a in ("Paris", "paris", "Rome")] == [1.0, 0.5, 0.0]
    assert len((EXAMPLES / "own_env.py").read_text().splitlines()) < 40


def test_user_code_that_cannot_be_imported_or_built_is_one_config_error(tmp_path: Path) -> None:
    (tmp_path / "broken_user_env.py").write_text("import no_such_package_at_all", encoding="utf-8")
    (tmp_path / "odd_user_env.py").write_text("x = 3\nclass Bare: pass\ndef make(n): return n", encoding="utf-8")
    for name, said in (
        ("broken_user_env:A", "importing broken_user_env raised ModuleNotFoundError"),
        ("odd_user_env:A", "has no such name"),
        ("odd_user_env:x", "holds a int there"),
        ("odd_user_env:Bare", "has no size, task, grade"),
        ("odd_user_env:make", "building it with"),
    ):
        with pytest.raises(ConfigError, match=said):
            build(CustomOptions(name=name), n_agents=1, root=tmp_path)
    assert sys.path[0] != str(tmp_path.resolve())


def test_rewards_that_are_no_finite_number_in_range_are_faults(tmp_path: Path) -> None:
    (tmp_path / "ranged_user_env.py").write_text(
        "def reward(prompt, answer, gold):\n    return {'inf': float('inf'), 'none': None, 'one': 1.0}[answer]\n",
        encoding="utf-8",
    )
    _file(tmp_path, GOOD)
    options = CustomOptions(name="ranged_user_env:reward", data="rows.jsonl", reward_range=(-1.0, 0.5))
    env = build(options, n_agents=1, root=tmp_path)
    for answer, said in (
        ("inf", "not a finite"),
        ("none", "not a number"),
        ("one", r"1.0, not .*\[-1.0, 0.5\]"),
        ("?", "KeyError"),
    ):
        with pytest.raises(TaskFault, match=said):
            env.grade(env.task(0), answer)
    with pytest.raises(ValidationError, match="lower first"):
        CustomOptions(name="ranged_user_env:reward", data="rows.jsonl", reward_range=(1.0, 0.0))


def test_true_and_false_are_rewards_and_a_text_is_none(tmp_path: Path) -> None:
    (tmp_path / "said_user_env.py").write_text(
        "def reward(prompt, answer, gold):\n    return {'yes': True, 'no': False, 'text': '1'}[answer]\n", encoding="utf-8"
    )
    _file(tmp_path, GOOD)
    env = build(CustomOptions(name="said_user_env:reward", data="rows.jsonl"), n_agents=1, root=tmp_path)
    assert [env.grade(env.task(0), answer).reward for answer in ("yes", "no")] == [1.0, 0.0]
    with pytest.raises(TaskFault, match="gave '1', not a number"):
        env.grade(env.task(0), "text")


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    env = JsonlEnv(JsonlOptions(name="jsonl", path="rows.jsonl"), root=tmp_path)
    assert env.task(0).prompt == "1+1?"


@pytest.mark.parametrize("options", [{"path": "none.jsonl"}, {"path": "empty.jsonl"}])
def test_a_file_is_named_by_the_key_that_names_it(tmp_path: Path, options: dict[str, str]) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "keyed_user_env.py").write_text("def reward(prompt, answer, gold): return 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"env\.path"):
        JsonlEnv(JsonlOptions(name="jsonl", **options), root=tmp_path)
    with pytest.raises(ConfigError, match=r"env\.data"):
        build(CustomOptions(name="keyed_user_env:reward", data=options["path"]), n_agents=1, root=tmp_path)


def test_an_env_for_another_number_of_agents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "seated_user_env.py").write_text(
        "class E:\n    size, seats = 1, 3\n    def task(self, i): ...\n    def grade(self, t, a): ...\n", encoding="utf-8"
    )
    with pytest.raises(ConfigError, match="needs 3 agents, the config has 2"):
        build(CustomOptions(name="seated_user_env:E"), n_agents=2, root=tmp_path)


def test_a_task_without_views_shows_every_seat_the_prompt() -> None:
    assert Task(id="t", env="e", prompt="p", answer="").view(3) == "p"
