"""A run survives everything: killed at any point it goes on, and ends bit for bit where it would have ended anyway
(ALGORITHMS 2.2 step 16, 5.6, R35, R36; T20, T21). Processes die by SIGKILL at named points, sent by themselves."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from safetensors import safe_open

from baton import assemble, cli, records, run
from baton.config import Config
from baton.errors import ConfigError, RunError
from baton.evaluation import evaluate


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The uninterrupted run of a config, made once per config."""
    folder = tmp_path_factory.mktemp("straight")
    made: dict[str, Path] = {}

    def of(settings: Config) -> Path:
        text = settings.to_toml()
        if text not in made:
            made[text] = folder / str(len(made))
            run.train(settings, run=made[text])
        return made[text]

    yield of


TWO = worlds.parity("algorithm.stages=3", "checkpoint.keep=1", lr=0.1)
"""Two tables, three stages, six updates: each accepted or shrunk."""

BEFORE = ("before the candidate is published", "after the candidate is published", "after the proof", "before the weights")
BEFORE += ("amid the weights", "after the weights", "before the moments", "after the moments", "before the record")
BEFORE += ("after the version id", "amid the record")
AFTER = ("after the record", "before the swap", "after the swap", "while pruning")
BESIDE = ("before the candidate is published", "after the candidate is published", "after the proof", "before the swap")
BESIDE += ("after the swap",)
"""Points of the loop, while the update before may still be written beside it."""
START = ("amid the files of the start", "before the start record", "amid the start record", "after the start record")


def serving(path: Path) -> None:
    """Whatever happened, the run can be loaded and plays with what its records name."""
    worlds.check_ledger(path)
    team = run.load_team(path)
    task = team.plan.splits.test[0]
    episode = team.play(task)
    team.close()
    assert episode.is_scored and dict(episode.versions) == dict(run.Run(path).position.team.versions)


@pytest.mark.parametrize("point", [*BEFORE, *AFTER])
def test_a_run_killed_at_any_point_of_a_promotion_ends_bit_for_bit_where_it_would_have(
    point: str, straight: Any, tmp_path: Path
) -> None:
    """T20, T21: before the record the old version serves, after it the new one; never anything between."""
    worlds.kill(TWO, tmp_path / "run", point, nth=3)
    killed = run.Run(tmp_path / "run")
    updates = len(killed.updates)
    if point != "while pruning":
        wanted = 2 if point in BEFORE else 3
        assert wanted - (point in BESIDE) <= updates <= wanted
    serving(tmp_path / "run")
    worlds.go_on(TWO, tmp_path / "run")
    serving(tmp_path / "run")
    assert worlds.final(tmp_path / "run") == worlds.final(straight(TWO))


@pytest.mark.parametrize("point", START)
def test_a_run_killed_at_its_start_begins_again_and_ends_the_same(point: str, straight: Any, tmp_path: Path) -> None:
    worlds.kill(TWO, tmp_path / "run", point, nth=2 if point == START[0] else 1)
    assert len(run.Run(tmp_path / "run").records("start")) == (point == "after the start record")
    worlds.go_on(TWO, tmp_path / "run")
    assert worlds.final(tmp_path / "run") == worlds.final(straight(TWO))
    worlds.check_ledger(tmp_path / "run")


@pytest.mark.parametrize("point", ["after the record", "before the swap", "after the stage line"])
def test_a_run_killed_at_its_very_last_step_is_complete_after_a_resume(point: str, straight: Any, tmp_path: Path) -> None:
    """team.json and the stage's line are written after the record: a resume makes up for them."""
    worlds.kill(TWO, tmp_path / "run", point, nth=3 if "stage" in point else 6)
    assert 6 - (point in BESIDE) <= len(run.Run(tmp_path / "run").updates) <= 6
    worlds.go_on(TWO, tmp_path / "run")
    assert worlds.final(tmp_path / "run") == worlds.final(straight(TWO))


def test_a_run_killed_again_and_again_still_gets_there(straight: Any, tmp_path: Path) -> None:
    worlds.kill(TWO, tmp_path / "run", "amid the start record")
    for point in ("amid the record", "after the weights", "after the record", "amid the weights", "before the record"):
        worlds.kill(TWO, tmp_path / "run", point, nth=1, resume=True)
        worlds.check_ledger(tmp_path / "run")
    worlds.go_on(TWO, tmp_path / "run")
    assert worlds.final(tmp_path / "run") == worlds.final(straight(TWO))
    begun = [r["version"] for r in run.Run(tmp_path / "run").records("begin")]
    assert len(begun) == 6 + 4, "every start of an update takes a version id of its own"


JOINT = worlds.parity("algorithm.stages=3", "algorithm.name=joint", "checkpoint.keep=1", agents="abc", lr=0.1)


@pytest.mark.parametrize("point", ["after the version id", "before the record", "amid the record", "after the record"])
def test_a_joint_stage_killed_at_its_second_agent_is_played_again_as_a_whole(
    point: str, straight: Any, tmp_path: Path
) -> None:
    worlds.kill(JOINT, tmp_path / "run", point, nth=5)
    serving(tmp_path / "run")
    worlds.go_on(JOINT, tmp_path / "run")
    serving(tmp_path / "run")
    assert worlds.final(tmp_path / "run") == worlds.final(straight(JOINT))
    assert [u["position"]["done"] for u in run.Run(tmp_path / "run").updates] == list(range(1, 10))


def test_an_independent_run_goes_on_beside_the_start_of_its_teammates(straight: Any, tmp_path: Path) -> None:
    settings = worlds.parity("algorithm.stages=3", "algorithm.name=independent", "checkpoint.keep=1", lr=0.1)
    worlds.kill(settings, tmp_path / "run", "after the record", nth=4)
    worlds.go_on(settings, tmp_path / "run")
    assert worlds.final(tmp_path / "run") == worlds.final(straight(settings))


def test_states_that_a_table_meets_first_in_a_shrunk_update_survive_a_resume(straight: Any, tmp_path: Path) -> None:
    """A shrunk update leaves the moments alone, but the table has grown rows: both must come back."""
    settings = worlds.parity("algorithm.stages=4", "algorithm.episodes=16", bits=4, lr=1.0)
    reference = straight(settings)
    words = [u["word"] for u in run.Run(reference).updates]
    nth = max(n for n, word in enumerate(words[:-1], start=1) if word == "shrunk")
    worlds.kill(settings, tmp_path / "run", "after the record", nth=nth)
    worlds.go_on(settings, tmp_path / "run")
    assert worlds.final(tmp_path / "run") == worlds.final(reference)


# ---- the torch engine ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Model files of this module alone."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_CACHE", str(folder))
        yield folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_torch_engine_resumes_bit_for_bit(dtype: str, straight: Any, cache: Path, tmp_path: Path) -> None:
    """Also where what is served is rounded and the fp32 masters lie beside it."""
    settings = worlds.relay(f"engine.dtype={dtype}")
    worlds.kill(settings, tmp_path / "run", "after the weights", nth=2)
    worlds.kill(settings, tmp_path / "run", "before the swap", nth=1, resume=True)
    worlds.go_on(settings, tmp_path / "run")
    assert worlds.final(tmp_path / "run") == worlds.final(straight(settings))
    worlds.check_ledger(tmp_path / "run")
    assert {u["word"] for u in run.Run(tmp_path / "run").updates} >= {"accepted", "shrunk"}
    assert run.Run(tmp_path / "run").files["first"]["steps"] > 2, "moments of before the kill were used after it"


@pytest.mark.parametrize(
    "protocol",
    [
        "{name='chain',rounds=2}",
        "{name='vote'}",
        "{name='debate'}",
        "{name='router'}",
        "{name='router',rule='worlds:handed_on',max_turns=1}",
    ],
)
def test_models_under_every_protocol_train_are_killed_resumed_and_evaluated(
    protocol: str, straight: Any, cache: Path, tmp_path: Path
) -> None:
    """Also where nobody ever calls the second one: its noise floor is measured and it is left as it was."""
    settings = worlds.relay(f"protocol={protocol}", "algorithm.stages=2")
    worlds.kill(settings, tmp_path / "run", "after the version id", nth=3)
    worlds.go_on(settings, tmp_path / "run")
    assert worlds.final(tmp_path / "run") == worlds.final(straight(settings))
    serving(tmp_path / "run")
    opened = run.Run(tmp_path / "run")
    words = {name: [u["word"] for u in opened.updates if u["agent"] == name] for name in ("first", "second")}
    assert set(opened.start["noise_floor"]) == {"first", "second"}
    if "handed_on" not in protocol and "router" in protocol:
        assert words["second"] == ["rejected", "rejected"] and opened.position.team.member("second").version == 0
    else:
        assert all(set(said) & {"accepted", "shrunk"} for said in words.values()), words
    rows = {row["name"]: row for row in evaluate(tmp_path / "run", episodes=16)["rows"]}
    assert len(rows) == 7 and all(row["n"] == 16 or row["note"].startswith("not run") for row in rows.values())


def test_a_resumed_run_outlives_the_version_that_it_was_resumed_from(straight: Any, cache: Path, tmp_path: Path) -> None:
    """Each version takes its tokenizer and config from version 0, not from one that pruning will remove."""
    short, long = (worlds.relay(f"algorithm.stages={n}", "checkpoint.keep=1") for n in (1, 5))
    resumed_from = run.train(short, run=tmp_path / "run").folder("first")
    run.train(long, run=tmp_path / "run", resume=True)
    assert not resumed_from.exists() and len(versions(tmp_path / "run", "first")) > 3
    assert worlds.final(tmp_path / "run") == worlds.final(straight(long))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_agent_is_a_plain_model_of_the_configured_dtype_with_its_tie(
    dtype: str, straight: Any, cache: Path
) -> None:
    """D10, D12: loaded strictly by transformers alone it gives the logits that the run serves."""
    from transformers import AutoModelForCausalLM

    opened = run.Run(straight(worlds.relay(f"engine.dtype={dtype}")))
    folder = opened.folder("first")
    assert opened.position.team.member("first").version > 0
    said = json.loads((folder / "config.json").read_text())
    assert said.get("dtype", said.get("torch_dtype")) == dtype and said["tie_word_embeddings"]
    with safe_open(folder / "model.safetensors", "pt") as file:
        kinds = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    assert kinds == {"F32" if dtype == "float32" else "BF16"}
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), output_loading_info=True)
    assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    crew = assemble.crew(opened.config, {"first": folder}, learners=["first"])
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        net: Any = crew.learners["first"].awake
        served = net._serve.logits(net._serve.hidden(ids))
        assert torch.equal(model(input_ids=ids).logits, served)
    accepted = [u for u in opened.updates if u["agent"] == "first" and u["to_version"] is not None]
    assert crew.load(folder).fingerprint == accepted[-1]["fingerprint"]


# ---- resume and extend -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["sat", "joint"])
def test_a_finished_run_with_more_stages_equals_a_longer_one(schedule: str, straight: Any, tmp_path: Path) -> None:
    """D08: and the planned number is the one that was asked for."""
    name = f"algorithm.name={schedule}"
    short, long = (worlds.parity(f"algorithm.stages={n}", name, lr=0.1) for n in (2, 4))
    run.train(short, run=tmp_path / "run")
    assert run.Run(tmp_path / "run").ending == "finished"
    went_on = run.train(long, run=tmp_path / "run", resume=True)
    assert worlds.final(tmp_path / "run") == worlds.final(straight(long))
    assert went_on.ending == "finished" and went_on.config.algorithm.stages == 4


def test_a_finished_run_resumes_to_nothing_new(tmp_path: Path, straight: Any) -> None:
    settings = worlds.parity("algorithm.stages=2", lr=0.1)
    shutil.copytree(straight(settings), tmp_path / "run")
    before = worlds.final(tmp_path / "run")
    run.train(settings, run=tmp_path / "run", resume=True)
    assert worlds.final(tmp_path / "run") == before


def test_only_stages_checkpoint_and_eval_may_change(tmp_path: Path, straight: Any) -> None:
    settings = worlds.parity("algorithm.stages=2", lr=0.1)
    shutil.copytree(straight(settings), tmp_path / "run")
    with pytest.raises(RunError, match=r"agents\.0\.lr: 0\.1 in the run, 0\.3 asked") as refused:
        run.train(worlds.parity("algorithm.stages=3", "agents.a.lr=0.3"), run=tmp_path / "run", resume=True)
    assert "algorithm.stages" not in str(refused.value).partition("\n")[2]
    changed = ["algorithm.stages=3", "checkpoint.keep=1", "checkpoint.keep_promoted=all", "eval.episodes=7"]
    resumed = run.train(worlds.parity(*changed, lr=0.1), run=tmp_path / "run", resume=True)
    assert resumed.config.checkpoint.keep == 1 and resumed.config.eval.episodes == 7 and len(resumed.updates) == 6
    with pytest.raises(RunError, match=r"algorithm\.stages = 1: the run is at stage 3 already"):
        run.train(worlds.parity(*changed, "algorithm.stages=1", lr=0.1), run=tmp_path / "run", resume=True)


def test_an_independent_run_cannot_be_extended(tmp_path: Path) -> None:
    name = "algorithm.name=independent"
    run.train(worlds.parity("algorithm.stages=1", name), run=tmp_path / "run")
    with pytest.raises(RunError, match="cannot be extended"):
        run.train(worlds.parity("algorithm.stages=2", name), run=tmp_path / "run", resume=True)


def test_data_goes_on_where_it_stopped(straight: Any, tmp_path: Path) -> None:
    """D01: prompts after a resume are the ones that the straight run drew then, and none was used before."""
    worlds.kill(TWO, tmp_path / "run", "after the record", nth=4)
    worlds.go_on(TWO, tmp_path / "run")

    def drawn(path: Path) -> list[list[str]]:
        return [
            [row["id"] for row in records.read_episodes(path / u["episodes_file"]) if row["use"] == "train"]
            for u in run.Run(path).updates
        ]

    ids = drawn(tmp_path / "run")
    assert ids == drawn(straight(TWO))
    prompts = [{i.split("/")[-2] for i in update} for update in ids]
    for agent in "ab":
        own = [p for p, u in zip(prompts, run.Run(tmp_path / "run").updates, strict=True) if u["agent"] == agent]
        assert len(set.union(*own)) == sum(map(len, own))


def test_everything_that_adapts_comes_back(tmp_path: Path, straight: Any) -> None:
    """D02: per agent masters, moments and steps, beta, lr, streak, cursor and position; nothing is rebuilt."""
    settings = worlds.parity("algorithm.stages=2", lr=0.1)
    opened = run.Run(straight(settings))
    plan = assemble.prepare(settings, root=tmp_path)
    names = [a.name for a in settings.agents]
    crew = assemble.crew(settings, {n: opened.folder(n) for n in names}, learners=names)
    stage = worlds.world(settings)
    stage.train()
    assert opened.position.agents == stage.position.agents and opened.position.done == stage.position.done == 4
    for name in names:
        crew.rest(name, lambda name=name: run.saved_state(opened, crew, name, opened.files[name]))
        back = crew.learners[name].snapshot()
        assert back.moments and worlds.same(back, stage.learner(name).snapshot())
    assert plan.splits.record == opened.start["splits"]


def test_nothing_to_resume_is_an_error_and_not_a_fresh_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """D06."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "config.toml").write_text(TWO.to_toml())
    assert cli.main(["train", str(tmp_path / "config.toml"), "--run", str(tmp_path / "empty"), "--resume"]) != 0
    assert "nothing to resume" in capsys.readouterr().err
    assert not (tmp_path / "empty" / "stages.jsonl").exists()


@pytest.mark.parametrize("resume", [True, False])
def test_versions_without_a_journal_are_an_error_and_not_a_fresh_run(resume: bool, straight: Any, tmp_path: Path) -> None:
    """D06: the records are gone, the weights are there; starting over would write into them."""
    shutil.copytree(straight(TWO), tmp_path / "run")
    (tmp_path / "run" / "stages.jsonl").unlink()
    with pytest.raises(RunError, match=r"state/a/v0000\d.*stages\.jsonl"):
        run.train(TWO, run=tmp_path / "run", resume=resume)


def test_a_second_run_in_a_taken_directory_is_refused(straight: Any) -> None:
    before = worlds.final(straight(TWO))
    with pytest.raises(RunError, match="already holds a run; --resume continues it"):
        run.train(TWO, run=straight(TWO))
    assert worlds.final(straight(TWO)) == before


def test_two_processes_on_one_run_are_refused(straight: Any, tmp_path: Path) -> None:
    shutil.copytree(straight(TWO), tmp_path / "run")
    with (tmp_path / "run" / ".lock").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="in use by another process"):
            run.train(TWO, run=tmp_path / "run", resume=True)
    run.train(TWO, run=tmp_path / "run", resume=True)


def _hold(path: str) -> None:
    with records.locked(Path(path)):
        (Path(path) / "held").touch()
        time.sleep(60)


def test_a_dead_process_holds_nothing(tmp_path: Path) -> None:
    """The lock goes with the process: a killed run can be resumed at once, without a file to remove by hand."""
    import multiprocessing

    process = multiprocessing.get_context("forkserver").Process(target=_hold, args=(str(tmp_path),))
    process.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    with pytest.raises(RunError, match="in use"), records.locked(tmp_path):
        pass
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    with records.locked(tmp_path):
        pass


def test_a_refused_config_leaves_no_folder_and_touches_none_that_was_there(tmp_path: Path) -> None:
    refused = worlds.parity("gate.probe_prompts=4000")
    (tmp_path / "mine").mkdir()
    for name in ("new", "mine"):
        with pytest.raises(ConfigError, match="prompts"):
            run.train(refused, run=tmp_path / name)
    assert not (tmp_path / "new").exists() and (tmp_path / "mine").is_dir()


# ---- damaged and foreign files ---------------------------------------------------------------------------------


def test_a_damaged_line_is_named(straight: Any, tmp_path: Path) -> None:
    shutil.copytree(straight(TWO), tmp_path / "run")
    journal = tmp_path / "run" / "stages.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join([*lines[:3], lines[3][:40] + "\n", *lines[4:]]))
    with pytest.raises(RunError, match=r"stages\.jsonl, line 4 is damaged.*restore the file from a copy"):
        run.train(TWO, run=tmp_path / "run", resume=True)


def test_a_run_of_another_schema_names_both(straight: Any, tmp_path: Path) -> None:
    """D07."""
    shutil.copytree(straight(TWO), tmp_path / "run")
    journal = tmp_path / "run" / "stages.jsonl"
    journal.write_text(journal.read_text().replace('{"schema":1,', '{"schema":7,'))
    with pytest.raises(RunError, match=r"has schema 7; this version reads schema 1"):
        run.train(TWO, run=tmp_path / "run", resume=True)


def test_weights_that_are_gone_are_an_error_that_names_them(straight: Any, tmp_path: Path) -> None:
    shutil.copytree(straight(TWO), tmp_path / "run")
    files = run.Run(tmp_path / "run").files["b"]
    shutil.rmtree(tmp_path / "run" / files["weights"])
    with pytest.raises(RunError, match=r"the weights of 'b' .* are gone"):
        run.train(worlds.parity("algorithm.stages=4", "checkpoint.keep=1", lr=0.1), run=tmp_path / "run", resume=True)


def _full_disk(settings: str, path: str, nth: int, what: str) -> None:
    """Train on a disk that takes no byte more from the nth save on: a real write error in the middle of the file."""
    import tomllib

    from baton import config

    def limited(original: Any) -> Any:
        left = [nth]

        def save(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
            return original(*args, **kwargs)

        return save

    setattr(records, what, limited(getattr(records, what)))
    try:
        run.train(config.parse(tomllib.loads(settings)), run=path)
    except RunError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        os._exit(42 if "could not be written" in str(error) else 43)


@pytest.mark.parametrize("what", ["write_folder", "save_training", "append_record", "write_episodes"])
def test_a_disk_that_fills_up_during_a_save_leaves_the_state_before_it(what: str, straight: Any, tmp_path: Path) -> None:
    """D13: a clear error, the previous version loads, and with room again the run goes on to the same end."""
    nth = {"write_folder": 4, "save_training": 3, "append_record": 7, "write_episodes": 3}[what]
    assert worlds.in_its_own_process(_full_disk, TWO.to_toml(), str(tmp_path / "run"), nth, what) == 42
    serving(tmp_path / "run")
    worlds.go_on(TWO, tmp_path / "run")
    assert worlds.final(tmp_path / "run") == worlds.final(straight(TWO))


@pytest.mark.parametrize("name", ["training", "weights"])
def test_a_bit_that_flipped_in_what_a_run_goes_on_from_is_refused(name: str, tmp_path: Path) -> None:
    settings = worlds.parity("algorithm.stages=2")
    path = run.train(settings, run=tmp_path / "run").path
    file = path / run.Run(path).files["a"][name]
    file = file / "table.safetensors" if name == "weights" else file
    whole = bytearray(file.read_bytes())
    whole[-3] ^= 1
    file.write_bytes(bytes(whole))
    journal = (path / "stages.jsonl").read_bytes()
    with pytest.raises(RunError, match="is damaged: its tensors are not those that were"):
        run.train(worlds.parity("algorithm.stages=3"), run=path, resume=True)
    assert (path / "stages.jsonl").read_bytes() == journal
    whole[-3] ^= 1
    file.write_bytes(bytes(whole))
    worlds.go_on(worlds.parity("algorithm.stages=3"), path)
    assert len(run.Run(path).records("stage")) == 3


# ---- what is kept ----------------------------------------------------------------------------------------------


def kept(path: Path, agent: str) -> list[str]:
    return sorted(p.name for p in (path / "state" / agent).iterdir())


def versions(path: Path, agent: str) -> list[int]:
    return [u["to_version"] for u in run.Run(path).updates if u["agent"] == agent and u["to_version"] is not None]


@pytest.mark.parametrize(("keep", "promoted"), [(1, "last 2"), (3, "last 2"), (1, "all")])
def test_pruning_keeps_what_the_config_says(keep: int, promoted: str, tmp_path: Path) -> None:
    settings = worlds.parity("algorithm.stages=6", f"checkpoint.keep={keep}", f"checkpoint.keep_promoted={promoted}", lr=0.1)
    path = run.train(settings, run=tmp_path / "run").path
    points = [u["files"] for u in run.Run(path).updates][-keep:]
    for agent in "ab":
        all_versions = versions(path, agent)
        assert len(all_versions) > 4
        wanted = {"v00000", *(f"v{v:05d}" for v in all_versions[-2:])}
        wanted |= {Path(f[agent]["weights"]).name for f in points}
        if promoted == "all":
            wanted |= {f"v{v:05d}" for v in all_versions}
        wanted |= {Path(f[agent]["training"]).name for f in points}
        assert kept(path, agent) == sorted(wanted)


def test_a_version_that_was_never_promoted_takes_no_ones_place(tmp_path: Path) -> None:
    """A candidate whose record was never written is no version: the last two promoted ones stay, it goes."""
    worlds.kill(TWO, tmp_path / "run", "after the weights", nth=6)
    orphans = {a: set(kept(tmp_path / "run", a)) for a in "ab"}
    worlds.kill(TWO, tmp_path / "run", "amid the weights", nth=1, resume=True)
    worlds.go_on(TWO, tmp_path / "run")
    for agent in "ab":
        last = [f"v{v:05d}" for v in versions(tmp_path / "run", agent)[-2:]]
        folders = [name for name in kept(tmp_path / "run", agent) if not name.startswith("training")]
        assert folders == ["v00000", *last], (folders, orphans)


def test_an_older_version_that_was_not_kept_says_which_key_keeps_it(straight: Any) -> None:
    with pytest.raises(RunError, match="keep_promoted = 'all' keeps every version"):
        run.Run(straight(TWO)).folder("a", 1)


@pytest.mark.parametrize("kind", ["begin", "update", "stage"])
def test_nothing_is_written_behind_a_line_that_could_not_be(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Lines are written beside the loop, which may have asked for the next ones already."""
    append, left = records.append_record, [2]

    def full(path: Path, record: Any) -> None:
        left[0] -= record["kind"] == kind
        if record["kind"] == kind and left[0] == 0:
            raise RunError(f"{path} could not be written")
        append(path, record)

    with monkeypatch.context() as patch:
        patch.setattr(records, "append_record", full)
        with pytest.raises(RunError, match="could not be written"):
            run.train(TWO, run=tmp_path / "run")
    kinds = [line["kind"] for line in records.read_records(tmp_path / "run" / "stages.jsonl")]
    whole = ["start", *["begin", "update", "begin", "update", "stage"] * 3]
    assert kinds == whole[: [n for n, k in enumerate(whole) if k == kind][1]]
    worlds.go_on(TWO, tmp_path / "run")
    worlds.check_ledger(tmp_path / "run")
