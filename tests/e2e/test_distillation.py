"""A team taught to one model: what the student becomes, what is measured and refused, and that the run stays as it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds

import baton
from baton import assemble, distillation, records
from baton.cli import main
from baton.config import load as load_config
from baton.core.keyed import key
from baton.distillation import DistillOptions, distill
from baton.engines.models import _write_tiny, tiny_shape  # pyright: ignore[reportPrivateUsage]
from baton.engines.table import row_name
from baton.errors import ConfigError, DataError
from baton.evaluation import evaluate, evaluate_model
from baton.host import Silent
from baton.journal import Run
from baton.types import Message, Turn

QUICK = DistillOptions(lr=0.5, steps=100, batch=32, rounds=2, contexts=320, passes=4)


def files(folder: Path) -> dict[str, str]:
    """Every file of a folder and its checksum."""
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two tables that have learned parity."""
    return baton.train(worlds.parity("algorithm.stages=20"), run=tmp_path_factory.mktemp("tables") / "run")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two tiny models with a table each, hardly trained."""
    return baton.train(worlds.relay("algorithm.stages=1", "eval.episodes=20"), run=tmp_path_factory.mktemp("models") / "run")


# ---- a team of tables --------------------------------------------------------------------------------------------------


def enumerated(folder: Path, run: Run) -> tuple[float, float]:
    """(the student's, the team's) probability of a right answer on the train prompts, every message enumerated."""
    plan = assemble.prepare(run.config, root=Path(run.start["root"]))
    crew = assemble.crew(plan.config, {n: Path() for n in plan.local}, learners=[])
    rows = crew.stored(folder)
    codec = plan.codecs["b"]
    right = []
    for task in plan.splits.train:
        ids = codec.encode([Message(role="user", content=task.prompt)])
        law = torch.softmax(rows.get(row_name(ids), torch.zeros(2)).double(), dim=0)
        right.append(float(law[int(task.answer)]))
    team = {name: crew.load(run.folder(name)) for name in plan.local}
    exact = worlds.accuracy(assemble.table(plan, crew.sampler, None), plan.splits.train, team)
    return sum(right) / len(right), exact


def test_a_student_of_tables_answers_train_prompts_as_its_team_does(tables: Run, tmp_path: Path) -> None:
    before = files(tables.path)
    record = distill(tables.path, "table:01", tmp_path / "student", options=QUICK)
    student, team = enumerated(tmp_path / "student", tables)
    assert team > 0.9
    assert student > 0.95 * team
    assert record["on_policy"]["teachers"] == ["b"], "the last speaker"
    assert files(tables.path) == before, "the run is read and never written"


def test_the_student_moves_to_the_law_of_its_teacher_at_its_own_words(tables: Run, tmp_path: Path) -> None:
    options = QUICK.model_copy(update={"steps": 1, "rounds": 4})
    record = distill(tables.path, "table:01", tmp_path / "student", options=options)
    losses = [r["last_loss"] for r in record["on_policy"]["rounds"]]
    assert record["on_policy"]["rounds"][0]["first_loss"] > 0.3, "one step of imitation leaves nearly everything to learn"
    assert losses[-1] < 0.25
    alone = distill(tables.path, "table:01", tmp_path / "alone", options=options.model_copy(update={"rounds": 0}))
    assert alone["on_policy"] == {"teachers": [], "rounds": [], "why_not": "rounds = 0"}
    assert enumerated(tmp_path / "student", tables)[0] > enumerated(tmp_path / "alone", tables)[0] + 0.2


def test_the_record_counts_and_compares_what_it_says(tables: Run, tmp_path: Path) -> None:
    record = distill(tables.path, "table:01", tmp_path / "student", options=QUICK)
    stored = json.loads((tmp_path / "student" / distillation.RECORD).read_text())
    assert stored == {"schema": records.SCHEMA, **record}
    names = ["team", "student as it came", "student after imitation", "student"]
    assert [row["name"] for row in record["rows"]] == names
    team, student = record["rows"][0], record["rows"][-1]
    assert (team["tokens_per_answer"], student["tokens_per_answer"]) == (2.0, 1.0)
    assert record["kept"]["tokens_per_answer"] == 0.5
    assert record["kept"]["value"] == pytest.approx(student["value"] / team["value"])
    assert student["difference"][0] == pytest.approx(team["value"] - student["value"])
    assert team["value"] == evaluate(tables.path, baselines=False)["rows"][0]["value"], "the row of `baton evaluate`"
    rounds = record["on_policy"]["rounds"]
    assert record["tokens"]["played"] == 2 * (record["imitation"]["prompts"] + 2 * 320)
    assert record["tokens"]["sampled"] == 2 * 320 == sum(r["states"] for r in rounds)
    assert record["tokens"]["trained"] == record["imitation"]["tokens"] + sum(r["tokens"] for r in rounds)
    assert record["versions"] == dict(tables.position.team.versions)


def test_the_same_command_gives_the_same_student(tables: Run, tmp_path: Path) -> None:
    one, two = (distill(tables.path, "table:01", tmp_path / n, options=QUICK)["fingerprint"] for n in ("one", "two"))
    assert one == two


def test_keep_right_learns_from_nothing_that_was_wrong(tables: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = assemble.prepare(tables.config, root=Path(tables.start["root"]))
    answers = {task.prompt: task.answer for task in plan.splits.train}
    taught: dict[str, list[bool]] = {}
    learn = distillation.warm_start

    def watched(learner: Any, dialogues: Any, *rest: Any, **named: Any) -> Any:
        codec = plan.codecs["b"]
        said = [(codec.decode(d.prompt_ids), codec.decode(d.reply_ids)) for d in dialogues]
        taught[keep] = [reply == answers[prompt] for prompt, reply in said]
        return learn(learner, dialogues, *rest, **named)

    monkeypatch.setattr(distillation, "warm_start", watched)
    for keep in ("all", "right"):
        options = QUICK.model_copy(update={"keep": keep, "rounds": 0})
        distill(tables.path, "table:01", tmp_path / keep, options=options)
    assert all(taught["right"]) and not all(taught["all"])
    assert len(taught["right"]) == sum(taught["all"])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (("protocol={name='vote'}",), "the answer of a vote is a majority"),
        (("protocol={name='debate'}",), "the answer of a debate is a majority"),
    ],
)
def test_where_the_answer_is_nobodys_message_the_student_imitates_alone(
    changes: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    run = baton.train(worlds.parity("algorithm.stages=1", *changes), run=tmp_path / "run")
    record = distill(run.path, "table:01", tmp_path / "student", options=QUICK)
    assert why in record["on_policy"]["why_not"]
    assert record["on_policy"]["rounds"] == []
    assert [row["name"] for row in record["rows"]] == ["team", "student as it came", "student"]


def test_a_router_teaches_through_whoever_spoke_last(tmp_path: Path) -> None:
    config = load_config(Path(__file__).parents[2] / "configs" / "router.toml", ["algorithm.stages=1"])
    run = baton.train(config, run=tmp_path / "run")
    model = next(a.model for a in run.config.agents if a.name == "b")
    limit = next(a.max_new_tokens for a in run.config.agents if a.name == "b")
    # What `a` says as the last speaker is no word of the student's, and never right.
    options = QUICK.model_copy(update={"max_new_tokens": limit, "batch": 8, "keep": "right", "prompts": 1024})
    record = distill(run.path, model, tmp_path / "student", options=options)
    assert record["on_policy"]["teachers"] == ["b"], "the other has other symbols"
    assert all(0 < r["messages"] < 320 for r in record["on_policy"]["rounds"])


# ---- a team of models --------------------------------------------------------------------------------------------------

SMALL = DistillOptions(steps=4, batch=8, rounds=1, contexts=16, passes=1, prompts=64)


def test_a_student_of_models_is_a_plain_folder_that_evaluates_as_it_was_measured(models: Run, tmp_path: Path) -> None:
    record = distill(models.path, "tiny:64k", tmp_path / "deep" / "student", options=SMALL)
    folder = tmp_path / "deep" / "student"
    assert {"config.json", "model.safetensors", "distill.json"} <= {p.name for p in folder.iterdir()}
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(p.numel() for p in loaded.parameters()) == record["parameters"]["student"]
    alone = evaluate_model(str(folder), models.config, root=Path(models.start["root"]))["rows"][0]
    student, told = record["rows"][-1], ("value", "n", "tokens_per_answer")
    assert [alone[name] for name in told] == [student[name] for name in told]
    assert record["on_policy"]["rounds"][0]["messages"] == 16


def test_a_teacher_goes_along_no_further_than_it_ever_spoke(models: Run, tmp_path: Path) -> None:
    options = SMALL.model_copy(update={"max_new_tokens": 3, "steps": 1})
    record = distill(models.path, "tiny:64k", tmp_path / "student", options=options)
    (only,) = record["on_policy"]["rounds"]
    assert only["states"] == only["messages"] == 16, "its seat has one token; its law after that was never trained"
    assert record["tokens"]["sampled"] > 16


def test_a_transcript_is_the_teams_messages_a_line_each(models: Run, tmp_path: Path) -> None:
    options = SMALL.model_copy(update={"says": "transcript", "steps": 60, "prompts": 160, "lr": 3e-3})
    record = distill(models.path, "tiny:64k", tmp_path / "student", options=options)
    assert "several speakers" in record["on_policy"]["why_not"]
    assert record["options"]["max_new_tokens"] == 4, "two messages of a token, a break, an end"
    assert record["rows"][-1]["tokens_per_answer"] <= 4
    assert record["imitation"]["accuracy"][-1][1] > 100 * record["imitation"]["accuracy"][0][1]


def test_the_last_line_of_a_transcript_is_the_answer() -> None:
    protocol = distillation._LastLine(agents=("a",), options=distillation.ChainOptions())  # pyright: ignore[reportPrivateUsage]
    for said in ("x\nyes\nz\n", "x\nz", "z"):
        turn = Turn(kind="observation", agent="a", seat=0, text=said)
        assert protocol.answer([turn], str, key("tie")) == "z"


def test_a_student_with_other_tokens_imitates_alone(models: Run, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    _write_tiny(other, tiny_shape("tiny:64k"), 3)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    record = distill(models.path, str(other), tmp_path / "student", options=SMALL)
    assert "no last speaker (second) has the student's tokens" in record["on_policy"]["why_not"]
    assert record["on_policy"]["rounds"] == []


# ---- the command, and what it refuses ------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_as_json_the_record(
    tables: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["distill", str(tables.path), "table:01", "-o", str(tmp_path / "one"), "--set", "lr=0.5", "--set", "steps=5"]
    words += ["--set", "rounds=1"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "student after imitation" in out and "% of the team's accuracy, for 50.0% of its tokens" in out
    words[4] = str(tmp_path / "two")
    assert main([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["options"]["steps"] == 5 and record["rows"][0]["name"] == "team"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("table:01", "--set", "stepz=5"), "did you mean steps?"),
        (("table:01", "--set", "keep=best"), "keep"),
        (("endpoint:http://127.0.0.1:1/v1",), "has no weights here to teach"),
        (("tiny:64k",), "is no table"),
        (("table:01", "--set", "says=transcript"), "needs line breaks"),
        (("table:ab",), "none of the table's symbols"),
        (("table:01", "--set", "batch=4000"), "lower batch"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_folder(
    words: tuple[str, ...], named: str, tables: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["distill", str(tables.path), *words, "-o", str(tmp_path / "deep" / "student")]) == 2
    said = capsys.readouterr().err
    (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert named in error
    assert list(tmp_path.iterdir()) == []


def test_a_table_cannot_learn_from_models(models: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds models, not tables"):
        distill(models.path, "table:01", tmp_path / "student")


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("a model was loaded")


def holding(folder: Path, run: Run) -> Path:
    folder.mkdir()
    (folder / "precious.txt").write_text("mine")
    return folder


def a_file(folder: Path, run: Run) -> Path:
    folder.write_text("mine")
    return folder


def inside(folder: Path, run: Run) -> Path:
    return run.path / "student"


@pytest.mark.parametrize(
    ("place", "why"), [(holding, "it holds precious.txt"), (a_file, "it is a file"), (inside, "it lies in the run")]
)
def test_a_place_that_is_taken_is_refused_before_anything_loads(
    place: Callable[[Path, Run], Path], why: str, tables: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "prepare", _never)
    before = files(tables.path)
    target = place(tmp_path / "student", tables)
    mine = files(tmp_path)
    with pytest.raises(ConfigError, match=why):
        distill(tables.path, "table:01", target)
    assert (files(tmp_path), files(tables.path)) == (mine, before)


def test_an_empty_folder_is_a_place(tables: Run, tmp_path: Path) -> None:
    (tmp_path / "student").mkdir()
    distill(tables.path, "table:01", tmp_path / "student", options=QUICK.model_copy(update={"rounds": 0, "steps": 1}))
    assert files(tmp_path / "student").keys() == {"table.safetensors", "distill.json"}


@pytest.mark.parametrize("where", ["team plays", "imitation", "student plays", "round 1"])
def test_an_interruption_leaves_nothing(where: str, tables: Run, tmp_path: Path) -> None:
    class Impatient(Silent):
        def progress(self, what: str, done: int, total: int, note: str = "") -> None:
            if where in what:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(tables.path, "table:01", tmp_path / "deep" / "student", options=QUICK, reporter=Impatient())
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_nothing(tables: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records, "sync_tree", full)
    with pytest.raises(baton.BatonError, match="No space left on device"):
        distill(tables.path, "table:01", tmp_path / "deep" / "student", options=QUICK.model_copy(update={"rounds": 0}))
    assert list(tmp_path.iterdir()) == []


def test_no_answer_of_the_highest_reward_is_said(tables: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.envs.games.ParityEnv.reward_range", (0.0, 2.0))
    with pytest.raises(DataError, match=r"0 whole answers of the highest reward .* or keep all"):
        distill(tables.path, "table:01", tmp_path / "student", options=QUICK.model_copy(update={"keep": "right"}))
