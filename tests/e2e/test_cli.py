"""The command line from outside: what it prints, what it refuses, how it ends."""

from __future__ import annotations

import functools
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import baton
from baton import console, doctor, records
from baton.cli import main

TABLES = """
[env]
name = "relay"
layout = "row"
symbols = 3
prompts = 250
[protocol]
name = "chain"
sees = "previous"
[engine]
name = "table"
[gate]
preset = "demo"
probe_prompts = 16
[algorithm]
stages = 2
episodes = 32
[[agents]]
name = "first"
model = "table:012"
max_new_tokens = 1
lr = 0.2
[[agents]]
name = "second"
model = "table:012"
max_new_tokens = 1
lr = 0.2
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tables.toml"
    path.write_text(TABLES)
    return path


@pytest.fixture(scope="module")
def first(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which some updates were accepted, some shrunk, some rejected."""
    path = tmp_path_factory.mktemp("runs") / "first"
    assert main(["train", str(config), "--run", str(path), "--set", "agents.second.lr=5"]) == 0
    return path


@pytest.fixture
def broken(first: Path, tmp_path: Path) -> Path:
    """The same run where the first episode of the last update failed, and a message holds an escape sequence."""
    path = tmp_path / "broken"
    shutil.copytree(first, path)
    lines = [json.loads(line) for line in (path / "stages.jsonl").read_text().splitlines()]
    update = [line for line in lines if line["kind"] == "update"][-1]
    rows = records.read_episodes(path / update["episodes_file"])
    rows[0] |= {"outcome": "failed", "reward": None, "reason": "grader: died"}
    rows[0]["turns"][0]["text"] = "\x1b[31mred"
    records.write_episodes(path / update["episodes_file"], rows)
    return path


class Said:
    """Exit code, stdout and stderr of one command in this process."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.fixture
def baton_says(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("FORCE_COLOR", "1")

    def run(*words: str | Path) -> Said:
        capsys.readouterr()
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert "\x1b" not in out + err
        return Said(code, out, err)

    return run


# ---- train -----------------------------------------------------------------------------------------------------


def test_train_prints_a_line_an_update_and_then_one_table_and_the_commands_to_go_on(
    baton_says: Any, config: Path, tmp_path: Path
) -> None:
    said = baton_says("train", config, "--run", tmp_path / "a")
    lines = said.out.splitlines()
    updates = [line for line in lines if line.startswith("stage ")]
    assert said.code == 0 and said.err == ""
    assert len(updates) == 4 and all(len(line) <= 100 for line in updates)
    assert all("accepted" in line and "kl ." in line and "mean ." in line and " -> v" in line for line in updates)
    assert [line for line in lines if line.startswith("agent ")] == [
        "agent   version  accepted  shrunk  rejected  last reward  mean kl/radius"
    ]
    assert lines[-2:] == [f"baton evaluate {tmp_path / 'a'}", f"baton episodes {tmp_path / 'a'}"]


def test_train_as_json_gives_a_line_an_update_and_a_summary(baton_says: Any, config: Path, tmp_path: Path) -> None:
    said = baton_says("train", config, "--run", tmp_path / "a", "--json")
    *updates, last = (json.loads(line) for line in said.out.splitlines())
    assert [u["kind"] for u in updates] == ["update"] * 4
    assert last["kind"] == "summary" and last["ending"] == "finished" and last["updates"] == 4
    assert sum(a["accepted"] + a["shrunk"] + sum(a["rejected"].values()) for a in last["agents"]) == 4
    assert "start accuracy" in said.err and "start accuracy" not in said.out


def test_a_run_that_refuses_every_update_exits_as_stalled(baton_says: Any, config: Path, tmp_path: Path) -> None:
    radii = [f"agents.{name}.radius={{token=1e-9, message_mean=1e-9}}" for name in ("first", "second")]
    more = [word for radius in [*radii, "algorithm.stages=9"] for word in ("--set", radius)]
    said = baton_says("train", config, "--run", tmp_path / "a", *more)
    assert said.code == 3
    assert "3 (radius 3)" in said.out and "agents.radius" in said.out


def test_a_run_goes_on_with_more_stages(baton_says: Any, config: Path, first: Path, tmp_path: Path) -> None:
    longer = tmp_path / "longer"
    shutil.copytree(first, longer)
    same = ("--set", "agents.second.lr=5", "--set", "algorithm.stages=3")
    said = baton_says("train", config, "--run", longer, "--resume", *same)
    assert said.code == 0 and "resuming after 4 of 6" in said.out
    assert [line.split()[1] for line in said.out.splitlines() if line.startswith("stage ")] == ["3/3", "3/3"]


def test_ctrl_c_prints_the_line_that_goes_on_and_that_line_finishes_the_run(
    baton_says: Any, config: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a run"
    words = ["train", str(config), "--run", str(path), "--set", "algorithm.stages=6", "--set", "agents.first.lr=0.1"]
    source = str(Path(baton.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; from baton.cli import main; sys.exit(main())", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("stage 1/6"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    again = shlex.split(err.splitlines()[-1])
    assert again == ["baton", *words[:4], "--resume", *words[4:]]
    said = baton_says(*again[1:])
    assert said.code == 0
    assert len(baton.open_run(path).updates) == 12


def test_an_infinite_radius_is_no_gate_and_every_command_can_say_so(baton_says: Any, config: Path, tmp_path: Path) -> None:
    free = [w for i in range(2) for w in ("--set", f"agents.{i}.radius={{token=inf, message_mean=inf}}")]
    said = baton_says("train", config, "--run", tmp_path / "a", *free, "--set", "agents.first.lr=5")
    updates = [line for line in said.out.splitlines() if line.startswith("stage ")]
    assert said.code == 0 and len(updates) == 4 and all("accepted" in line and "/inf" in line for line in updates)
    said = baton_says("inspect", tmp_path / "a")
    assert said.code == 0 and "none with the radii, of which one is infinite" in said.out
    for words in (("inspect", "--stage", "1"), ("report",), ("verify",), ("episodes",)):
        said = baton_says(words[0], tmp_path / "a", *words[1:])
        assert said.code == 0 and "Traceback" not in said.err, (words, said.out, said.err)
    assert baton_says("inspect", tmp_path / "a", "--json").json["stages"][0]["configured"] is None
    said = baton_says("plan", config, *free)
    assert said.code == 0, said.err


# ---- what is refused -------------------------------------------------------------------------------------------

BAD_SETTINGS = {
    "unknown key": (["algorithm.stagse=3"], "algorithm.stagse: unknown key; did you mean algorithm.stages?"),
    "misspelt section": (["algoritm.stages=3"], "algoritm"),
    "hyphen": (["algorithm.min-informative=2"], "algorithm.min_informative"),
    "wrong level": (["stages=3"], "did you mean algorithm.stages?"),
    "wrong type": (["algorithm.episodes=many"], "algorithm.episodes"),
    "no multiple": (["algorithm.group=4", "algorithm.episodes=30"], "nearest: 28 or 32"),
    "reshaped sampling": (["agents.first.top_p=0.9"], "top_p"),
    "temperature 0": (["agents.first.temperature=0"], "agents.0.temperature"),
    "temperature -1": (["agents.first.temperature=-1"], "agents.0.temperature"),
    "temperature 1e-6": (["agents.first.temperature=1e-6"], "agents.0.temperature"),
    "radius 0": (["agents.first.radius={token=0, message_mean=0.1}"], "radius.token"),
    "two of a name": (["agents.second.name=first"], "'first' is used 2 times"),
    "an order that learns without fresh data": (
        ["algorithm.order=bandit", "algorithm.data=reuse"],
        "learns from fresh episodes",
    ),
    "later preset": (["algorithm.objective.preset=troll"], "not implemented"),
    "another protocol's key": (
        ["protocol={name='debate',sees='all'}"],
        'protocol.sees: unknown key; it belongs to protocol.name = "chain"',
    ),
    "a rule that is none": (["protocol={name='router',rule='mentoin'}"], "protocol.rule: 'mentoin' is no rule"),
    "too few prompts": (["env.prompts=20"], "needs"),
    "missing model": (["engine.name=local", "agents.first.model=/no/such", "agents.second.model=tiny:64k"], "/no/such"),
    "no value": (["algorithm.stages"], "key=value"),
    "no such agent": (["agents.third.lr=1"], "third"),
}


@pytest.mark.parametrize("case", sorted(BAD_SETTINGS))
def test_bad_settings_are_refused_in_one_line_before_work_begins(
    baton_says: Any, config: Path, tmp_path: Path, case: str
) -> None:
    settings, named = BAD_SETTINGS[case]
    said = baton_says("train", config, "--run", tmp_path / "a", *[w for s in settings for w in ("--set", s)])
    assert said.code == 2, said.err
    assert said.err.startswith("error: ") and named in said.err
    # Several faults are listed below the line, indented.
    assert said.out == "" and all(line.startswith("  ") for line in said.err.splitlines()[1:])
    assert not (tmp_path / "a" / "stages.jsonl").exists()


BAD_USAGE = {
    "no such config": (["train", "nowhere.toml"], "nowhere.toml"),
    "no command": ([], "--help"),
    "unknown command": (["trian"], "trian"),
    "unknown flag": (["train", "CONFIG", "--resum"], "--resum"),
    "a limit of 0": (["episodes", "RUN", "--limit", "0"], "0 is no whole number of at least 1"),
    "no such stage": (["inspect", "RUN", "--stage", "9"], "stages 1 to 2"),
    "no such agent": (["episodes", "RUN", "--agent", "third"], "first, second"),
    "a model without its task": (["evaluate", "tiny:64k"], "--config"),
    "a run with a second config": (["evaluate", "RUN", "--config", "CONFIG"], "--config"),
    "a flag that would do nothing": (["evaluate", "tiny:64k", "--config", "CONFIG", "--no-baselines"], "--no-baselines"),
}


@pytest.mark.parametrize("case", sorted(BAD_USAGE))
def test_bad_usage_is_refused_in_one_line(baton_says: Any, config: Path, first: Path, case: str) -> None:
    words, named = BAD_USAGE[case]
    said = baton_says(*[{"CONFIG": config, "RUN": first}.get(word, word) for word in words])
    assert said.code == 2
    assert said.err.startswith("error: ") and named in said.err
    assert said.out == "" and said.err.count("\n") == 1


def test_run_directories_that_cannot_serve_are_refused(baton_says: Any, config: Path, first: Path, tmp_path: Path) -> None:
    for words, named in (
        (["train", config, "--run", first], "--resume continues it"),
        (["train", config, "--run", tmp_path / "none", "--resume"], "nothing to resume"),
        (["train", config, "--run", first, "--resume"], "agents.1.lr: 5.0 in the run, 0.2 asked"),
        (["train", config, "--run", config / "below"], "cannot be written"),
        (["inspect", tmp_path], "no run directory"),
        (["episodes", tmp_path], "no run directory"),
    ):
        said = baton_says(*words)
        assert said.code == 1, words
        assert said.err.startswith("error: ") and named in said.err
        assert said.out == ""


def test_a_fault_of_our_own_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    def fall(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("baton.config.load", fall)
    with pytest.raises(ZeroDivisionError):
        main(["train", str(config)])


@pytest.mark.parametrize("command", ["train", "inspect", "episodes", "evaluate", "doctor"])
def test_every_command_explains_itself_with_an_example(baton_says: Any, command: str) -> None:
    said = baton_says(command, "--help")
    assert said.code == 0 and f"example: baton {command}" in said.out and "--json" in said.out


def test_the_version_is_printed(baton_says: Any) -> None:
    assert baton_says("--version").out.startswith("baton 0.")


# ---- inspect ---------------------------------------------------------------------------------------------------


def test_inspect_shows_the_start_every_verdict_and_the_void_certificate(baton_says: Any, first: Path) -> None:
    out = baton_says("inspect", first).out
    for text in ("accuracy", "train ", "noise floor", "cap_one_call = .3333", "void (assumed_term)"):
        assert text in out
    for update in baton.open_run(first).updates:
        word, reason = update["word"], update["verdict"].get("reason", "")
        gate = update["verdict"]["gate"]
        row = next(r for r in out.splitlines() if r.split()[:2] == [str(update["stage"]), update["agent"]])
        assert f"{word} {reason}".strip() in row
        assert f"{gate['q_gate']:.3f}".lstrip("0") + "/.500" in row
        assert f"{gate['message_mean']:.4f}".lstrip("0") + "/.0600" in row
        assert "no, .750" in row
        assert (f"v{update['from_version']} -> v" in row) == (word != "rejected")


def test_inspect_of_a_stage_shows_every_look_and_every_term(baton_says: Any, first: Path) -> None:
    out = baton_says("inspect", first, "--stage", "1").out
    looks = [look for u in baton.open_run(first).updates if u["stage"] == 1 for look in u["looks"]]
    assert len(looks) > 2
    assert out.count("inside") + out.count("outside") == len(looks)
    assert "occupancy" in out and "not measured" in out and "stage 2" not in out


def test_inspect_as_json_is_the_records(baton_says: Any, first: Path) -> None:
    whole = baton_says("inspect", first, "--json").json
    assert whole["ending"] == "finished" and whole["start"]["kind"] == "start"
    assert len(whole["updates"]) == 4 and len(whole["stages"]) == 2
    one = baton_says("inspect", first, "--stage", "2", "--json").json
    assert {u["stage"] for u in one["updates"]} == {2} and len(one["stages"]) == 1


# ---- episodes --------------------------------------------------------------------------------------------------


def test_episodes_show_prompt_turns_and_outcome_of_the_newest_update(baton_says: Any, first: Path) -> None:
    out = baton_says("episodes", first, "--limit", "1").out
    last = baton.open_run(first).updates[-1]
    row = records.read_episodes(first / last["episodes_file"])[0]
    assert f"stage 2, update of {last['agent']}: {last['episodes']['n']} episodes, 0 failed" in out
    assert out.count("stage ") == 1 and out.count("  prompt\n") == 1
    assert row["id"] in out and f"reward {row['reward']:g}" in out
    assert all(line.strip() in out for line in row["prompt"].splitlines())
    for turn in row["turns"]:
        assert f"{turn['agent']}@v{turn['versions'][0]}  [1 tokens, length]\n    {turn['text']}\n" in out


def test_failed_episodes_are_kept_apart_from_wrong_answers(baton_says: Any, first: Path, broken: Path) -> None:
    assert baton_says("episodes", first, "--failed").out == "no failed episodes\n"
    said = baton_says("episodes", broken, "--failed")
    assert "1 failed" in said.out and "failed: grader: died" in said.out and "reward 0\n" not in said.out
    (update,) = [u for u in baton_says("episodes", broken, "--failed", "--json").json["updates"] if u["episodes"]]
    assert update["counts"]["failed"] == 1 and update["counts"]["reward_zero"] > 0
    assert [e["outcome"] for e in update["episodes"]] == ["failed"]


def test_what_a_model_writes_cannot_steer_the_terminal(baton_says: Any, broken: Path) -> None:
    assert "\\x1b[31mred" in baton_says("episodes", broken, "--failed").out


def test_episodes_can_be_chosen_by_stage_and_agent(baton_says: Any, first: Path) -> None:
    chosen = baton_says("episodes", first, "--stage", "1", "--agent", "second", "--limit", "3", "--json").json
    assert [(u["stage"], u["agent"], len(u["episodes"])) for u in chosen["updates"]] == [(1, "second", 3)]
    assert chosen["updates"][0]["episodes"][0]["versions"].keys() == {"first", "second"}


# ---- evaluate, doctor ------------------------------------------------------------------------------------------


def test_evaluate_prints_the_team_beside_its_baselines(baton_says: Any, first: Path) -> None:
    said = baton_says("evaluate", first, "--k", "2", "--episodes", "20")
    assert said.code == 0
    names = ("team", "untrained team", "same model in all seats", "best single agent", "one model of the total size")
    assert all(any(line.startswith(name) for line in said.out.splitlines()) for name in names)
    assert "avg@2" in said.out and "pass@2" in said.out


def test_evaluate_as_json_without_baselines_is_two_rows(baton_says: Any, first: Path) -> None:
    report = baton_says("evaluate", first, "--no-baselines", "--episodes", "5", "--json").json
    assert [row["name"] for row in report["rows"]] == ["team", "untrained team"]
    assert report["rows"][0]["n"] == 5


def test_evaluate_measures_a_model_alone(
    baton_says: Any, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    local = config.parent / "local.toml"
    local.write_text(TABLES.replace('name = "table"', 'name = "local"').replace("table:012", "tiny:64k"))
    report = baton_says("evaluate", "tiny:64k", "--config", local, "--episodes", "4", "--json").json
    assert report["model"] == "tiny:64k" and len(report["rows"]) == 1


@pytest.fixture
def quick_doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "examine", functools.partial(doctor.examine, 0.1))


@pytest.mark.usefixtures("quick_doctor")
def test_the_doctor_measures_the_machine_and_proves_that_both_halves_agree(baton_says: Any) -> None:
    said = baton_says("doctor", "--json")
    report = said.json
    checks = {check["name"]: check for check in report["checks"]}
    assert said.code == 0 and report["fit"]
    assert {"torch", "threads", "load", "memory", "bfloat16", "GPU", "cache folder", "sampling", "replay"} <= checks.keys()
    assert report["speed"]["sampled_per_second"] > 0 and report["speed"]["trained_per_second"] > 0
    assert report["speed"]["replay_gap"] < 1e-4 and report["speed"]["published_as_sent"]
    assert all(check["remedy"] for check in report["checks"] if check["status"] != "ok")


@pytest.mark.usefixtures("quick_doctor")
def test_the_doctor_fails_where_the_cache_cannot_be_written(
    baton_says: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "file" / "cache"))
    said = baton_says("doctor")
    assert said.code == 1
    assert "fail  cache folder" in said.out and "-> set BATON_CACHE" in said.out and "fail  speed" in said.out


@pytest.mark.usefixtures("quick_doctor")
def test_the_doctor_names_what_is_missing_and_how_to_get_it(baton_says: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "package_version", lambda name: "0.1")
    monkeypatch.setattr(doctor, "requires", lambda name: ["torch<3,>=2.6", 'gguf>=0.10; extra == "gguf"'])
    checks = {c["name"]: c for c in baton_says("doctor", "--json").json["checks"]}
    assert checks["torch"]["status"] == "warn" and checks["torch"]["remedy"] == "pip install 'torch<3,>=2.6'"
    assert checks["gguf"]["status"] == "warn" and checks["gguf"]["remedy"] == "pip install 'baton-rl[gguf]'"
    assert checks["numpy"]["status"] == "ok"


# ---- the console -----------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Iterator[Clock]:
    yield Clock()


def test_progress_away_from_a_terminal_is_a_line_at_most_every_ten_seconds(clock: Clock) -> None:
    out = io.StringIO()
    reporter = console.Console(out, clock=clock)
    for second in range(31):
        clock.now = float(second)
        reporter.progress("first: episodes", second + 1, 61)
    lines = out.getvalue().splitlines()
    assert lines == ["first: episodes 11/61, 45s left", "first: episodes 21/61, 38s left", "first: episodes 31/61, 29s left"]


def test_a_long_wait_is_named_and_named_again_when_it_ends(clock: Clock) -> None:
    out = io.StringIO()
    reporter = console.Console(out, clock=clock)
    reporter.say("loading 2 agents")
    for clock.now in (5.0, 10.0, 12.0, 20.0):
        reporter.beat()
    clock.now = 34.0
    reporter.progress("first: episodes", 1, 100)
    assert out.getvalue().splitlines() == [
        "loading 2 agents",
        "still at: loading 2 agents (10s)",
        "still at: loading 2 agents (20s)",
        "went on after 34s at: loading 2 agents",
    ]


def test_the_watch_speaks_by_itself() -> None:
    out = io.StringIO()
    with console.Console(out, quiet=0.05) as reporter:
        reporter.say("reading")
        end = time.monotonic() + 5
        while "still at: reading" not in out.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
    assert "still at: reading" in out.getvalue()


def test_a_terminal_gets_a_bar_with_the_time_left_below_lines_that_stay(
    clock: Clock, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    update = baton.open_run(first).updates[0]
    out = Terminal()
    with console.Console(out, stages=2, clock=clock) as reporter:
        for second in range(5):
            clock.now = float(second)
            reporter.progress("first: episodes", second * 8 + 1, 64, "noted")
        reporter.update(update)
        # A process that is killed now must not leave the terminal without its cursor.
        assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l") > -1
    text = out.getvalue()
    assert "first: episodes" in text and "33/64" in text and "00:0" in text
    assert "\x1b[32m" in text or "\x1b[31m" in text or "\x1b[33m" in text


def test_no_color_is_respected(first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    console.Console(out).update(baton.open_run(first).updates[0])
    assert "stage 1" in out.getvalue() and "\x1b[3" not in out.getvalue()


def test_a_line_said_by_a_signal_handler_inside_another_line_follows_it() -> None:
    class Interrupting(io.StringIO):
        """Calls back while a line is written, as a signal handler does."""

        def write(self, text: str, /) -> int:
            if text.startswith("outer"):
                reporter.say("inner")
            return super().write(text)

    out = Interrupting()
    reporter = console.Console(out)
    reporter.say("outer")
    assert out.getvalue() == "outer\ninner\n"


def look(q: float, radius: float, mean: float) -> dict[str, Any]:
    return {"q_gate": q, "radius_token": radius, "message_mean": mean, "radius_message_mean": radius / 5}


EXTREMES = {
    "wide": ("accepted", 1.0, "", look(0.046, 0.05, 0.0041), 0.431),
    "shrunk to the last": ("shrunk", 1 / 16, "", look(0.046, 0.05, 0.0041), -123.4),
    "infinite": ("rejected", None, "radius", look(float("inf"), 0.05, float("inf")), -12.3),
    "tiny radius": ("rejected", None, "radius", look(2e-4, 1e-9, 1e-5), 0.5),
    "large radius": ("accepted", 1.0, "", look(3.21, 12.0, 1.5), 0.5),
    "not published": ("rejected", None, "not_published", look(0.046, 0.05, 0.0041), 0.5),
    "no gate": ("rejected", None, "no_signal", None, 0.5),
}


@pytest.mark.parametrize("case", sorted(EXTREMES))
def test_an_update_line_never_exceeds_a_hundred_columns(case: str) -> None:
    word, scale, reason, gate, reward = EXTREMES[case]
    verdict = {"gate": gate, **({"scale": scale} if scale else {"reason": reason})}
    record = {
        "word": word,
        "verdict": verdict,
        "stage": 123,
        "agent": "a-name-of-forty-characters-that-is-valid",
        "episodes": {"n": 128, "reward": reward, "failed": {"grader: " + "x" * 200: 3, "late": 1}},
        "from_version": 122,
        "to_version": None if reason else 123,
        "seconds": {"total": 4321.0},
    }
    line = "".join(text for text, _ in console.update_line(record, stages=400, agents=["b"]))
    assert len(line) <= 100
    assert line.startswith("stage 123/400  a") and word in line and reason in line
    failed = console.failed_line(record)
    assert len(failed) <= 100 and failed.startswith("  4 of 128 episodes failed, 3 times: grader: xxx")


def test_an_infinite_divergence_is_valid_json() -> None:
    assert json.loads(console.to_json({"kl": [float("inf"), 1.0]})) == {"kl": ["Infinity", 1.0]}


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["evalute", "runs/x"], "'evalute' is none of its choices; did you mean 'evaluate'?"),
        (["frobnicate"], "'frobnicate' is none of its choices; choose from train, "),
    ],
)
def test_a_misspelt_command_is_told_the_nearest_one(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert hint in capsys.readouterr().err
