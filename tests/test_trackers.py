"""Trackers are told what the run directory holds, once; and whatever they do, the run is the same."""

from __future__ import annotations

import json
import shutil
import sqlite3
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from baton import run, trackers
from baton.config import Config
from baton.errors import ConfigError, RunError
from baton.trackers import Trackers, metrics_of
from e2e.worlds import final, parity

STAGES = "algorithm.stages={}"


def tracked(*names: str, stages: int = 2) -> Config:
    return parity(STAGES.format(stages), f"track.names={list(names)}")


class Heard(run.Silent):
    """A reporter that keeps what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


class Notebook:
    """A tracker that writes down what it is told, in this process."""

    def __init__(self) -> None:
        self.started: list[Mapping[str, Any]] = []
        self.told: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def start(self, config: Mapping[str, Any]) -> None:
        self.started.append(config)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.told.append((step, dict(metrics)))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    """What `track.names = ["wandb"]` builds in this test."""
    book = Notebook()
    monkeypatch.setattr(trackers, "build", lambda *_, **__: book)
    return book


def expected(path: Path) -> list[tuple[int, dict[str, float]]]:
    """What a tracker should have been told of a run, from its journal alone."""
    told: list[tuple[int, dict[str, float]]] = []
    step = 0
    for line in run.Run(path).records():
        if line["kind"] in ("update", "stage"):
            step += line["kind"] == "update"
            told.append((step, metrics_of(line)))
    return told


# ---- what is told ----------------------------------------------------------------------------------------------


def test_an_update_and_a_stage_are_told_with_their_own_numbers(notebook: Notebook, tmp_path: Path) -> None:
    opened = run.train(tracked("wandb"), run=tmp_path / "run")
    assert notebook.told == expected(opened.path) and len(notebook.told) == 6
    update = opened.updates[0]
    agent, gate = update["agent"], update["verdict"]["gate"]
    step, told = notebook.told[0]
    assert step == 1
    assert told == {
        f"reward/{agent}": update["episodes"]["reward"],
        f"kl/{agent}": gate["q_gate"],
        f"kl_radius/{agent}": gate["radius_token"],
        f"message_mean/{agent}": gate["message_mean"],
        f"message_mean_radius/{agent}": gate["radius_message_mean"],
        f"accepted/{agent}": float(update["word"] != "rejected"),
        f"scale/{agent}": update["verdict"]["scale"],
        f"beta/{agent}": update["beta"],
        f"lr/{agent}": update["lr"],
        f"tokens/{agent}": sum(update["episodes"]["tokens"].values()),
        f"cut/{agent}": update["episodes"]["cut"][agent],
        f"failed/{agent}": 0.0,
        f"seconds/{agent}": update["seconds"]["total"],
    }
    stage = opened.records("stage")[0]
    assert notebook.told[2] == (
        2,
        {"stage/number": 1.0, "stage/accepted": 1.0, "stage/published_bound": stage["achieved"]["lower_bound"]},
    )
    assert notebook.started[0]["seed"] == 1 and notebook.finished == 1


def test_an_update_without_a_gate_has_no_divergence() -> None:
    record = {
        "kind": "update",
        "agent": "a",
        "to_version": None,
        "verdict": {"kind": "rejected", "reason": "no_signal", "gate": None},
        "episodes": {"reward": 1.0, "tokens": {"a": 3, "b": 4}, "cut": {"a": 0.5, "b": 0.0}, "failed": {"late": 2}},
        "beta": 0.1,
        "lr": 0.2,
        "seconds": {"total": 3.0},
    }
    told = metrics_of(record)
    assert not any("kl" in name or "mean" in name for name in told)
    assert (told["accepted/a"], told["scale/a"], told["tokens/a"], told["failed/a"], told["cut/a"]) == (0, 0, 7, 2, 0.5)


def test_a_surrogate_is_told_where_it_says_something() -> None:
    record = {
        "kind": "update",
        "agent": "a",
        "to_version": 1,
        "verdict": {"kind": "accepted", "scale": 1.0, "gate": None},
        "episodes": {"reward": 1.0, "tokens": {"a": 3}, "cut": {"a": 0.5}, "failed": {}},
        "beta": 0.1,
        "lr": 0.2,
        "seconds": {"total": 3.0},
        "surrogate": {"gain": {"verdict": "inconclusive", "lower_bound": -0.25}},
    }
    assert metrics_of(record)["surrogate_gain_at_least/a"] == -0.25
    record["surrogate"] = {"gain": {"verdict": "void", "lower_bound": float("-inf")}}
    assert "surrogate_gain_at_least/a" not in metrics_of(record)


# ---- resume ----------------------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_where_it_stopped_without_telling_a_line_twice(notebook: Notebook, tmp_path: Path) -> None:
    run.train(tracked("wandb", stages=1), run=tmp_path / "run")
    run.train(tracked("wandb", stages=3), run=tmp_path / "run", resume=True)
    assert notebook.told == expected(tmp_path / "run")
    assert [step for step, _ in notebook.told] == [1, 2, 2, 3, 4, 4, 5, 6, 6]


def test_a_tracker_that_is_added_on_resume_hears_of_the_run_from_its_start(notebook: Notebook, tmp_path: Path) -> None:
    run.train(tracked(stages=1), run=tmp_path / "run")
    assert notebook.told == []
    run.train(tracked("wandb", stages=2), run=tmp_path / "run", resume=True)
    assert notebook.told == expected(tmp_path / "run")


def test_lines_that_a_taken_back_stage_plays_again_are_not_told_again(notebook: Notebook, tmp_path: Path) -> None:
    run.train(tracked("wandb", stages=1), run=tmp_path / "run")
    journal = run.Run(tmp_path / "run").records()
    told = Trackers(tracked("wandb").track, tmp_path / "run", say=print)
    # The stage's second update and its line are gone, as `settle` leaves a joint stage that was killed.
    second = next(i for i, line in enumerate(journal) if line["kind"] == "update" and line["index"] == 1)
    told.start({}, journal[:second])
    for line in journal[second:]:
        if line["kind"] in ("update", "stage"):
            told.tell(line)
    assert len(notebook.told) == 3


def test_another_run_in_the_same_folder_is_told_from_its_start(notebook: Notebook, tmp_path: Path) -> None:
    run.train(tracked("wandb", stages=1), run=tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    (tmp_path / "other" / "stages.jsonl").unlink()
    for folder in ("v00001", "v00002"):
        for path in (tmp_path / "other" / "state").glob(f"*/{folder}"):
            shutil.rmtree(path)
    notebook.told.clear()
    run.train(tracked("wandb", stages=1), run=tmp_path / "other")
    assert notebook.told == expected(tmp_path / "other") and len(notebook.told) == 3


def test_a_mark_that_cannot_be_read_counts_as_none(notebook: Notebook, tmp_path: Path) -> None:
    run.train(tracked("wandb", stages=1), run=tmp_path / "run")
    notebook.told.clear()
    for text in ("{", "[]", '{"run": 3}', '{"run": "x", "told": 7}'):
        (tmp_path / "run" / "trackers.json").write_text(text)
        told = Trackers(tracked("wandb").track, tmp_path / "run", say=print)
        told.start({}, run.Run(tmp_path / "run").records())
    assert len(notebook.told) == 12


def test_trackers_may_change_on_resume_and_nothing_else_may(notebook: Notebook, tmp_path: Path) -> None:
    run.train(tracked(stages=1), run=tmp_path / "run")
    run.train(tracked("wandb", stages=1), run=tmp_path / "run", resume=True)
    assert run.Run(tmp_path / "run").config.track.names == ("wandb",)
    with pytest.raises(RunError, match=r"\[track\] may"):
        run.train(parity("algorithm.stages=1", "seed=2"), run=tmp_path / "run", resume=True)


# ---- failures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["build", "start", "log", "finish", "mark"])
def test_a_tracker_that_raises_is_named_once_and_the_run_is_bitwise_the_same(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fall(*_: object, **__: object) -> None:
        raise OSError("no\nroute")

    book = Notebook()
    monkeypatch.setattr(trackers, "build", fall if where == "build" else lambda *_, **__: book)
    if where == "mark":
        (tmp_path / "told" / "trackers.json").mkdir(parents=True)
    elif where != "build":
        monkeypatch.setattr(book, where, fall)
    heard = Heard()
    run.train(tracked("wandb"), run=tmp_path / "told", reporter=heard)
    (said,) = [line for line in heard.lines if "failed" in line]
    why = "IsADirectoryError: " if where == "mark" else "OSError: no route"
    assert said.startswith(f"tracker wandb failed ({why}") and said.endswith(
        "goes on without it, and its directory has everything"
    )
    run.train(tracked(), run=tmp_path / "untold")
    assert final(tmp_path / "told") == final(tmp_path / "untold")


def test_one_that_fails_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    well, ill = Notebook(), Notebook()
    monkeypatch.setattr(ill, "log", lambda *_: 1 / 0)
    monkeypatch.setattr(trackers, "build", lambda name, *_, **__: well if name == "wandb" else ill)
    heard = Heard()
    run.train(tracked("tensorboard", "wandb"), run=tmp_path / "run", reporter=heard)
    assert well.told == expected(tmp_path / "run")
    assert sum("tracker tensorboard failed" in line for line in heard.lines) == 1


def test_an_absent_package_is_refused_with_its_install_command_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def absent(name: str) -> str:
        raise trackers.PackageNotFoundError(name)

    monkeypatch.setattr(trackers, "package_version", absent)
    monkeypatch.setattr("baton.assemble.prepare", lambda *_, **__: pytest.fail("it got as far as the models"))
    with pytest.raises(ConfigError, match=r"'trackio' is not installed; pip install 'baton-rl\[trackio\]'"):
        run.train(tracked("trackio"), run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---- the real ones ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_holds_the_records_also_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra baton-rl[tensorboard] is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for stages in (1, 2):
        run.train(tracked("tensorboard", stages=stages), run=tmp_path / "run", resume=stages > 1)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    read: dict[str, list[tuple[int, float]]] = {}
    for tag in events.Tags()["scalars"]:
        read[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
    told: dict[str, list[tuple[int, float]]] = {}
    for step, metrics in expected(tmp_path / "run"):
        for name, value in metrics.items():
            told.setdefault(name, []).append((step, pytest.approx(value, rel=1e-6)))
    assert read == told
    assert [tag for tag in events.Tags()["tensors"] if tag.startswith("config")] == ["config/text_summary"]


def chunks(data: bytes) -> Iterator[bytes]:
    """Records of a .wandb file: seven bytes of head, then blocks of 32 KiB with the framing of LevelDB's log."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""


def test_wandb_offline_writes_a_run_with_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra baton-rl[wandb] is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    heard = Heard()
    run.train(tracked("wandb"), run=tmp_path / "run", reporter=heard)
    assert not [line for line in heard.lines if "failed" in line]
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    told: list[dict[str, float]] = []
    project = ""
    for data in chunks(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        project = record.run.project or project
        if record.HasField("history"):
            items = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
            told.append({k: v for k, v in items.items() if k == "_step" or not k.startswith("_")})
    by_step: dict[int, dict[str, float]] = {}
    for step, metrics in expected(tmp_path / "run"):
        by_step.setdefault(step, {"_step": step}).update(metrics)
    assert told == [pytest.approx(by_step[step]) for step in sorted(by_step)]
    assert project == "baton"


def test_trackio_is_told_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="the extra baton-rl[trackio] is not installed")
    heard = Heard()
    for stages in (1, 2):
        run.train(tracked("trackio", stages=stages), run=tmp_path / "run", resume=stages > 1, reporter=heard)
    assert not [line for line in heard.lines if "failed" in line]
    (file,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as found:
        rows = found.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert [(step, json.loads(metrics)) for _, step, metrics in rows] == expected(tmp_path / "run")
    assert len({name for name, _, _ in rows}) == 1 and rows[0][0].startswith("run-")


def test_what_a_tracker_prints_stays_out_of_the_runs_output(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notebook, "log", lambda *_: print("look at me"))
    run.train(tracked("wandb", stages=1), run=tmp_path / "run")
    out, err = capsys.readouterr()
    assert out == "" and err == "look at me\n" * 3
