"""What goes wrong outside baton (user code, files, keys, Ctrl-C) ends in one line that names it, and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from test_cli import TABLES, config, first  # noqa: F401  (fixtures)

import baton
from baton.cli import main

SOURCE = str(Path(baton.__file__).parents[1])

OWN = """
[env]
name = "own_task:Own"
[engine]
name = "table"
[gate]
probe_prompts = 8
[algorithm]
stages = 2
episodes = 32
[[agents]]
name = "only"
model = "table:01"
max_new_tokens = 1
"""

ODD_ID = """def task(self, i):
    task = Task(id=f"t{i}", env="own", prompt=f"q{i}", answer="0")
    object.__setattr__(task, "id", i)
    return task"""

TASK = 'return Task(id=f"t{i}", env="own", prompt=f"q{i}", answer="0")'
VIEWED = "def task(self, i): return Task(id=f't{{i}}', env='own', prompt=f'q{{i}}', answer='0', views={views})"

GOOD = {
    "size": "size = 200",
    "task": f"def task(self, i): {TASK}",
    "grade": "def grade(self, task, answer): return answer == task.answer",
    "more": "",
}


def own_task(folder: Path, **changes: str) -> Path:
    """A config whose task is a file beside it, with one part of it replaced."""
    body = "\n".join(f"    {line}" for part in (GOOD | changes).values() for line in part.split("\n"))
    (folder / "own_task.py").write_text(f"import os, time\nfrom baton import Task\nclass Own:\n{body}\n", encoding="utf-8")
    path = folder / "own.toml"
    path.write_text(OWN, encoding="utf-8")
    sys.modules.pop("own_task", None)
    return path


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The one line of a command that is refused; no run directory is left."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*words: str | Path, code: int = 2) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == code
        said = capsys.readouterr().err
        lines = [line for line in said.splitlines() if not line.startswith("note")]
        assert len(lines) == 1 and lines[0].startswith("error: "), said
        assert not (tmp_path / "run").exists()
        return lines[0]

    return run


# ---- user code -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": "def task(self, i): raise KeyError('gone')"}, "Own.task(0) raised KeyError: 'gone'"),
        ({"task": "def task(self, i): return None"}, "Own.task(0) gave None; it must give a baton.Task"),
        (
            {"task": ODD_ID},
            "Own.task(0).id is 0; it must be a text",
        ),
        ({"size": "size = '200'"}, "Own.size is '200'; it must be a whole number"),
        ({"size": "size = 0"}, "Own.size is 0; it must be a whole number"),
        ({"size": "@property\ndef size(self): raise OSError('no\\nfile')"}, "Own.size raised OSError: no file"),
        ({"more": "reward_range = (1, 0)"}, "Own.reward_range = (1, 0): give two finite numbers"),
        ({"more": "reward_range = 5"}, "Own.reward_range = 5: give two finite numbers"),
        ({"more": "seats = 'one'"}, "Own.seats is 'one'"),
        ({"more": "def __init__(self): raise SystemExit('set MYDATA')"}, "raised SystemExit: set MYDATA"),
        ({"more": "def __init__(self): raise SystemExit"}, "raised SystemExit"),
        ({"task": VIEWED.format(views="('a', 'b')")}, "Own.task(0).views is ('a', 'b'); it must be a tuple of 1 texts"),
        ({"task": VIEWED.format(views="('\\ud800',)")}, "Own.task(0).views[0] is '\\ud800'; it must be a text"),
    ],
)
def test_a_task_of_ones_own_that_breaks_its_contract_is_named(
    refused: Callable[..., str], tmp_path: Path, changes: dict[str, str], said: str
) -> None:
    assert said in refused("train", own_task(tmp_path, **changes), "--run", tmp_path / "run")


@pytest.mark.parametrize(
    ("grade", "said"),
    [
        ("def grade(self, task, answer): raise ValueError('two\\nlines')", "Own.grade raised ValueError: two lines"),
        ("def grade(self, task, answer): return '1'", "Own.grade gave '1', not a number"),
        ("def grade(self, task, answer): return 1 if answer else None", "Own.grade gave None, not a number"),
        ("def grade(self, task, answer): os._exit(3)", "the worker process died (exit code 3), twice"),
    ],
)
def test_code_that_cannot_grade_says_so_before_a_model_loads(
    refused: Callable[..., str], tmp_path: Path, grade: str, said: str
) -> None:
    line = refused("train", own_task(tmp_path, grade=grade), "--run", tmp_path / "run")
    whose = "an empty answer" if "if answer" in grade else "its own answer '0'"
    assert said in line and f"{whose} cannot be graded" in line


def test_a_module_that_trains_when_it_is_imported_does_not_start_itself_again_and_again(tmp_path: Path) -> None:
    path = own_task(tmp_path)
    with (tmp_path / "own_task.py").open("a") as file:
        file.write(f"import baton\nbaton.train({str(path)!r}, run={str(tmp_path / 'run')!r})\n")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "own_task.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")])},
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1 and "if __name__ == '__main__':" in done.stderr.splitlines()[-1]
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], stdout=subprocess.PIPE, text=True, check=False).stdout
    assert not left, "a process of that task is still running"


def test_a_rule_of_ones_own_is_named_by_its_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own_rule.py").write_text("def rule(task, turns, agents):\n    raise KeyError('who')\n", encoding="utf-8")
    path = tmp_path / "rule.toml"
    path.write_text(TABLES.replace('name = "chain"\nsees = "previous"', 'name = "router"\nrule = "own_rule:rule"'))
    assert main(["train", str(path), "--run", str(tmp_path / "run")]) == 1
    assert "protocol.rule = 'own_rule:rule' raised KeyError: 'who'" in capsys.readouterr().err


def test_what_code_of_ones_own_prints_stays_away_from_what_programs_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = own_task(tmp_path, more="def __init__(self): print('hello')", task="def task(self, i): print('hi'); " + TASK)
    assert main(["config", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["env"]["name"] == "own_task:Own" and "hello" in err and "hi" in err


# ---- files and folders -----------------------------------------------------------------------------------------


def test_a_folder_with_other_files_becomes_no_run(refused: Callable[..., str], config: Path, tmp_path: Path) -> None:  # noqa: F811
    own = tmp_path / "thesis"
    own.mkdir()
    (own / "chapter.tex").write_text("a year of work")
    line = refused("train", config, "--run", own, code=1)
    assert "holds other files (chapter.tex) and no run" in line and "--run DIR" in line
    assert [path.name for path in own.iterdir()] == ["chapter.tex"]


def test_a_model_that_was_cut_off_is_named(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from baton.engines import models

    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    folder = models.resolve("tiny:60k")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    path = tmp_path / "cut.toml"
    path.write_text(f'[env]\nname = "parity"\n[[agents]]\nname = "a"\nmodel = "{folder}"\n', encoding="utf-8")
    line = refused("train", path, "--run", tmp_path / "run")
    assert str(file) in line and "cut off or damaged" in line


def test_a_run_whose_tensors_were_cut_off_names_the_file(
    config: Path,  # noqa: F811
    first: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "cut"
    shutil.copytree(first, path)
    file = sorted(path.glob("state/first/v*/table.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-8])
    more = ["--set", "agents.second.lr=5", "--set", "algorithm.stages=3"]
    assert main(["train", str(config), "--run", str(path), "--resume", *more]) == 1
    said = capsys.readouterr().err
    assert f"error: {file} cannot be read" in said and "restore it from a copy" in said and "Traceback" not in said


def test_a_report_does_not_replace_a_file_that_is_none(
    first: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "kept"
    shutil.copytree(first, path)
    before = (path / "stages.jsonl").read_bytes()
    assert main(["report", str(path), "-o", str(path / "stages.jsonl")]) == 2
    assert "no HTML page; it would be lost" in capsys.readouterr().err
    assert (path / "stages.jsonl").read_bytes() == before
    for _ in range(2):  # an older page is replaced
        assert main(["report", str(path), "-o", str(tmp_path / "page.html")]) == 0


def test_a_runs_files_have_the_rights_that_the_umask_gives(first: Path) -> None:  # noqa: F811
    mask = os.umask(0)
    os.umask(mask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in first.rglob("*.safetensors")}
    assert modes and set(modes.values()) == {0o666 & ~mask}, modes


def test_a_question_that_is_no_text_is_refused(first: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert main(["try", str(first), "\udcff"]) == 2
    assert "is no text" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["seed = [", "seed = 1\n", "\x00\n"])
def test_a_damaged_config_of_a_run_is_named(
    first: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(first, path)
    (path / "config.toml").write_text(text)
    for command in ("evaluate", "inspect", "episodes", "report"):
        assert main([command, str(path)]) == 1
        said = capsys.readouterr().err
        assert f"error: {path / 'config.toml'} is damaged" in said and "restore it from a copy" in said, said


def test_a_version_0_that_somebody_removed_is_not_explained_with_a_setting(
    first: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "pruned"
    shutil.copytree(first, path)
    shutil.rmtree(path / "state" / "first" / "v00000")
    assert main(["evaluate", str(path)]) == 1
    said = capsys.readouterr().err
    assert "v00000 of 'first' is not there; it was removed" in said and "keep_promoted" not in said


# ---- settings that would have no effect ------------------------------------------------------------------------


def test_a_baseline_that_is_left_out_is_not_asked_for(refused: Callable[..., str], first: Path) -> None:  # noqa: F811
    line = refused("evaluate", first, "--no-baselines", "--full-information", "tiny:60k")
    assert "--full-information" in line and "--no-baselines" in line


def test_a_model_is_not_asked_to_sit_at_a_table_of_tables(refused: Callable[..., str], first: Path, config: Path) -> None:  # noqa: F811
    for words in (["evaluate", first, "--full-information", "tiny:60k"], ["evaluate", "tiny:60k", "--config", config]):
        assert "engine.name = 'table'" in refused(*words)


def test_more_episodes_of_a_prompt_than_episodes_in_all_are_refused(refused: Callable[..., str], first: Path) -> None:  # noqa: F811
    assert "k = 1000000000" in refused("evaluate", first, "--k", "1000000000", "--episodes", "5")


def test_a_baseline_that_nobody_can_grade_is_a_row_that_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Graded are texts of one symbol; the baseline with twice the tokens says more, and the rest is measured."""
    path = own_task(tmp_path, grade="def grade(self, task, answer): return len(answer) if len(answer) < 2 else None")
    pair = (
        OWN.replace("[[agents]]", '[protocol]\nname = "chain"\nsees = "all"\n[[agents]]')
        + """
[[agents]]
name = "other"
model = "table:01"
max_new_tokens = 1
"""
    )
    path.write_text(pair, encoding="utf-8")
    assert main(["train", str(path), "--run", str(tmp_path / "run"), "--set", "algorithm.stages=1"]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["team"]["value"] is not None and rows["best single agent, equal tokens"]["value"] is not None
    assert main(["verify", str(tmp_path / "run"), "--root", str(tmp_path)]) == 0


def test_more_episodes_than_there_are_test_prompts_are_not_promised(
    first: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["evaluate", str(first), "--no-baselines", "--episodes", "100000"]) == 0
    assert "--episodes 100000: the test set has" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("agents.a.model=no/such/model", "no folder on this machine"),
        ("agents.a.model=tiny:1k", "'tiny:1k' is outside 30k"),
        ("agents.a.device=cuda:7", "agents.a.device = 'cuda:7' cannot be used"),
        ("agents.a.warm_start={source='gone.jsonl'}", "agents.warm_start.source: cannot read"),
    ],
)
def test_config_names_what_is_not_there(refused: Callable[..., str], tmp_path: Path, setting: str, said: str) -> None:
    path = tmp_path / "one.toml"
    path.write_text('[env]\nname = "parity"\n[[agents]]\nname = "a"\nmodel = "tiny:60k"\n', encoding="utf-8")
    line = refused("config", path, "--set", setting)
    assert said in line and len(line) < 300


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("engine.threads=4096", "engine.threads = 4096: this machine has"),
        ("agents.first.model=table:0", "table:0"),
        ("agents.first.warm_start={steps=2}", "tables start from zeros"),
    ],
)
def test_a_start_that_is_refused_leaves_no_folder(
    refused: Callable[..., str],
    config: Path,  # noqa: F811
    tmp_path: Path,
    setting: str,
    said: str,
) -> None:
    assert said in refused("train", config, "--set", setting, "--run", tmp_path / "run")


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------


def interrupted(words: Sequence[str | Path], *, ready: Callable[[], bool], times: int = 1) -> tuple[int, str, float]:
    """Exit code, stderr, and seconds from the Ctrl-C to the end of a command that gets it once it is `ready`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "baton", *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while process.poll() is None and not ready():
            time.sleep(0.02)
        began = time.monotonic()
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        _, said = process.communicate(timeout=60)
        return process.returncode, said, time.monotonic() - began
    finally:
        process.kill()


def test_ctrl_c_while_python_still_imports_is_one_line() -> None:
    began = time.monotonic()
    code, said, _ = interrupted(["--help"], ready=lambda: time.monotonic() - began > 0.3)
    assert (code, said) in {(130, "interrupted\n"), (0, "")}  # the latter where the machine was faster


@pytest.mark.parametrize("place", ["grade", "__init__"])
def test_ctrl_c_is_heard_while_code_of_ones_own_sleeps(tmp_path: Path, place: str) -> None:
    mark = tmp_path / "asleep"
    asleep = f"open({str(mark)!r}, 'w').close(); time.sleep(300)"
    if place == "grade":
        path = own_task(tmp_path, grade=f"def grade(self, task, answer): {asleep}")
    else:
        path = own_task(tmp_path, more=f"def __init__(self): {asleep}")
    words = ["train", path, "--run", tmp_path / "run"]
    code, said, waited = interrupted(words, ready=mark.exists)
    assert code == 130 and waited < 30 and "Traceback" not in said, said
    assert f"baton train {path}" in said and "--resume" not in said
    assert not (tmp_path / "run" / "config.toml").exists()


def test_a_second_ctrl_c_stops_at_once_and_still_says_how_to_go_on(tmp_path: Path) -> None:
    # Grades what is graded beforehand, the right answer 0 and an empty one, and falls asleep in the start's episodes.
    mark = tmp_path / "asleep"
    grade = f"""def grade(self, task, answer):
    if answer == "1":
        open({str(mark)!r}, "w").close()
        time.sleep(300)
    return 1"""
    path = own_task(tmp_path, grade=grade)
    code, said, waited = interrupted(["train", path, "--run", tmp_path / "run"], ready=mark.exists, times=2)
    assert code == 130 and waited < 30 and "Traceback" not in said, said
    assert "go on with:" in said and "--resume" in said
