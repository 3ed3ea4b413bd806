"""`baton config` and `baton try` from outside."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_cli import TABLES

import baton
from baton import run
from baton.cli import main
from baton.config import keys, parse
from baton.engines.engine import ScoreRequest

ONE_STAGE = "seed = 3" + TABLES.replace("stages = 2", "stages = 1")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tables.toml"
    path.write_text(ONE_STAGE)
    return path


@pytest.fixture(scope="module")
def first(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "first"
    run.train(config, run=path)
    return path


Says = Callable[..., tuple[int, str, str]]


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Says:
    """Exit code, stdout and stderr of a command in this process."""

    def command(*words: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return command


# ---- config ----------------------------------------------------------------------------------------------------


def test_config_prints_the_resolved_config_with_what_was_set(says: Says, config: Path) -> None:
    code, out, err = says("config", config, "--set", "algorithm.stages=7")
    assert (code, err) == (0, "")
    assert parse(tomllib.loads(out)) == baton.load_config(config, ["algorithm.stages=7"])
    assert tomllib.loads(out)["checkpoint"]["keep"] == 3
    code, out, _ = says("config", config, "--json")
    assert json.loads(out)["gate"]["probe_prompts"] == 16


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("algorithm.stagse=3", "did you mean algorithm.stages?"),
        ("env.prompts=20", "needs"),
        ('env={name="jsonl", path="absent.jsonl"}', "absent.jsonl"),
        ('track={names=["mlflow"]}', "pip install 'baton-rl["),
    ],
)
def test_config_refuses_what_training_would_refuse_and_needs_no_model(
    says: Says, config: Path, setting: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.engines.models.resolve", lambda *_, **__: pytest.fail("a model was asked for"))
    code, out, err = says("config", config, "--set", setting)
    assert (code, out) == (2, "") and err.startswith("error: ") and named in err


def test_explain_says_what_a_key_means(says: Says) -> None:
    code, out, _ = says("config", "--explain", "gate.probe_prompts")
    assert code == 0
    assert out.splitlines() == [
        "gate.probe_prompts",
        "  held-out prompts per update, one episode each",
        "  type     whole number, at least 1",
        "  default  64",
        "  unit     prompts",
    ]


def test_explain_of_a_section_is_its_keys_and_of_nothing_all_keys(says: Says) -> None:
    _, out, _ = says("config", "--explain", "checkpoint", "--json")
    assert [key["path"] for key in json.loads(out)["keys"]] == ["checkpoint", "checkpoint.keep", "checkpoint.keep_promoted"]
    _, out, _ = says("config", "--explain")
    assert {line for line in out.splitlines() if line and not line.startswith(" ")} == {key for key, _, _ in keys()}
    assert 'only     where env.name = "relay"' in out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--explain", "gate.probe_promts"], "did you mean gate.probe_prompts?"),
        ([], "--explain [KEY]"),
        (["CONFIG", "--explain", "seed"], "one of the two"),
        (["--explain", "seed", "--set", "seed=1"], "--set changes a CONFIG"),
        (["nowhere.toml"], "nowhere.toml"),
    ],
)
def test_config_refuses_bad_usage_in_one_line(says: Says, config: Path, words: list[str], named: str) -> None:
    code, out, err = says("config", *[config if word == "CONFIG" else word for word in words])
    assert (code, out, err.count("\n")) == (2, "", 1) and named in err


# ---- try -------------------------------------------------------------------------------------------------------

VIEWS = ["table: 0 2 1 ; in: 1", "table: 2 0 1"]


def versions(path: Path) -> dict[str, int]:
    return {m.agent: m.version for m in run.open_run(path).position.team.members}


def test_try_shows_who_said_what_and_the_teams_answer(says: Says, first: Path) -> None:
    code, out, err = says("try", first, "which is it?")
    assert (code, err) == (0, "")
    now = versions(first)
    lines = out.splitlines()
    assert lines[0::2] == [
        f"  first@v{now['first']}  [1 tokens, length]",
        f"  second@v{now['second']}  [1 tokens, length]",
        "  answer",
    ]
    assert all(line.strip() in "012" for line in lines[1::2]) and lines[3] == lines[5]


def test_try_as_json_holds_ids_and_log_probabilities_of_the_promoted_team(says: Says, first: Path) -> None:
    code, out, _ = says("try", first, "which is it?", "--json")
    said = json.loads(out)
    assert code == 0 and said["versions"] == versions(first) and said["failed"] is None
    assert [turn["agent"] for turn in said["turns"]] == ["first", "second"]
    assert all(len(turn["ids"]) == len(turn["logprobs"]) == 1 for turn in said["turns"])
    assert said["answer"] == said["turns"][-1]["text"]


def prompts(out: str) -> list[str]:
    """What each seat read, as text (a table of three symbols reads bytes behind them, and role marks)."""
    ids = [turn["prompt_ids"] for turn in json.loads(out)["turns"]]
    return [bytes(i - 3 for i in one if 3 <= i < 259).decode() for one in ids]


def test_every_seat_gets_the_question_or_its_own_text(says: Says, first: Path, tmp_path: Path) -> None:
    (tmp_path / "views.json").write_text(json.dumps(VIEWS))
    ways = [
        ["--views", tmp_path / "views.json"],
        [word for view in VIEWS for word in ("--view", view)],
        [json.dumps(VIEWS)],
    ]
    seen = [prompts(says("try", first, *way, "--json")[1]) for way in ways]
    assert seen[0] == seen[1] == seen[2]
    assert VIEWS[0] in seen[0][0] and VIEWS[1] not in seen[0][0]
    assert VIEWS[1] in seen[0][1] and VIEWS[0] not in seen[0][1]
    assert all("one for all" in text for text in prompts(says("try", first, "one for all", "--json")[1]))


def test_a_seed_is_another_answer_and_the_runs_own_repeats_it(says: Says, first: Path) -> None:
    def answers(*words: str) -> list[str]:
        return [json.loads(says("try", first, f"question {n}", "--json", *words)[1])["answer"] for n in range(12)]

    assert answers() == answers() == answers("--seed", "3")
    assert answers("--seed", "4") != answers()


def test_a_temperature_is_every_seats(says: Says, first: Path) -> None:
    team = run.load_team(first)
    table = team.table
    views = json.dumps(next(t.views for t in team.plan.splits.train if _is_met(table.sampler, table, t)))

    def spread(temperature: str) -> float:
        turns = json.loads(says("try", first, views, "--json", "--temperature", temperature)[1])["turns"]
        return abs(turns[0]["logprobs"][0] + math.log(3))

    assert spread("10") < 0.2 < spread("0.05")
    team.close()


def _is_met(sampler: Any, table: Any, task: Any) -> bool:
    """Whether the first seat's table has a row for this task: elsewhere its law is uniform at every temperature."""
    seat = table.seats[0]
    prompt = seat.codec.encode(table.protocol.messages(task, [], 0, seat.system))
    (score,) = asyncio.run(
        sampler.score([ScoreRequest(agent=seat.agent, slot="promoted", prompt_ids=prompt, ids=(0,), temperature=0.05)])
    )
    return abs(score[0] + math.log(3)) > 0.5


class Terminal:
    """A terminal at which these lines are typed, then Ctrl-D."""

    def __init__(self, *lines: str) -> None:
        self.lines: Iterator[str] = iter(lines)

    def isatty(self) -> bool:
        return True

    def readline(self, *_: Any) -> str:
        return next(self.lines, "")


def test_without_a_question_a_terminal_is_asked_until_ctrl_d(
    says: Says, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("one?\n", "\n", '["a", "b", "c"]\n', *["one?\n"] * 11))
    code, out, err = says("try", first)
    assert code == 0 and out.endswith("> \n")
    assert f"first@v{versions(first)['first']}, second@v" in err and "Ctrl-D ends" in err
    assert "error: 3 texts for 2 seats (first, second)" in err
    told = [out.splitlines()[i + 1].strip() for i, line in enumerate(out.splitlines()) if line == "  answer"]
    # The same question again is another episode.
    assert len(told) == 12 and len(set(told)) > 1


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        ([], 2, "only a terminal"),
        (["q", "--view", "x"], 2, "one of the three"),
        (["--view", "x"], 2, "1 texts for 2 seats"),
        (["--views", "absent.json"], 2, "absent.json"),
        (["q", "--temperature", "0"], 2, "0.05 to 10"),
        (["q", "--seed", "-1"], 2, "--seed"),
    ],
)
def test_try_refuses_bad_usage_in_one_line(
    says: Says, first: Path, words: list[str], code: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    got, out, err = says("try", first, *words)
    assert (got, out, err.count("\n")) == (code, "", 1) and named in err


def test_a_views_file_that_holds_no_list_of_texts_is_refused(says: Says, first: Path, tmp_path: Path) -> None:
    for text in ("just text", "[1, 2]", "[]"):
        (tmp_path / "views.json").write_text(text)
        code, _, err = says("try", first, "--views", tmp_path / "views.json")
        assert code == 2 and "JSON list of texts" in err


def test_a_question_that_fits_no_context_is_bad_input_and_says_why(says: Says, first: Path) -> None:
    code, _, err = says("try", first, "x" * 70_000)
    assert code == 2 and "context" in err and "'first'" in err


def test_try_needs_a_run_that_began(says: Says, tmp_path: Path) -> None:
    code, _, err = says("try", tmp_path, "hello")
    assert code == 1 and "no run directory" in err
