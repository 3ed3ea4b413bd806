"""Another model takes a seat: the newcomer is judged, the others keep theirs, and a no (or an undo) changes nothing."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from safetensors.torch import save_file

import baton
from baton import assemble, protocols, records, requests, run
from baton import swap as swaps
from baton.algorithms import stage0
from baton.algorithms.stage0 import SwapOptions
from baton.cli import main
from baton.config import Config
from baton.core import divergence
from baton.engines import mixture, models
from baton.engines.chat import codec_of
from baton.errors import BatonError, ConfigError, Interrupted, ModelError, RunError
from baton.host import complete
from baton.journal import Run
from baton.rollout import Play

NEAR = SwapOptions(radius=0.05, contexts=200, steps=300, lr=0.2)
"""A table learns its four states from anything."""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_CACHE", str(folder))
        yield folder


def content(folder: Path) -> dict[str, str]:
    """Every file below a run directory and its checksum."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def tables(*more: str) -> Config:
    """Without a cap on what a table may move, five stages are enough to agree on a code."""
    free = [f"agents.{name}.radius={{token=inf, message_mean=inf}}" for name in "ab"]
    usual = ("algorithm.episodes=128", "algorithm.stages=8", "algorithm.order=static", "eval.episodes=40")
    return worlds.parity(*usual, *free, *more, lr=0.5)


def stopped(config: Config, stages: int) -> Config:
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"stages": stages})})


def trained(folder: Path, config: Config, stages: int) -> Run:
    return run.train(stopped(config, stages), run=folder, resume=folder.exists())


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A team of tables after five stages; tests work on copies."""
    return trained(tmp_path_factory.mktemp("learned") / "run", tables(), 5).path


@pytest.fixture
def here(learned: Path, tmp_path: Path) -> Path:
    return copied(learned, tmp_path / "run")


def copied(source: Path, target: Path) -> Path:
    for path in sorted(source.rglob("*")):
        if path.is_file() and path.name != ".lock":
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(source)).write_bytes(path.read_bytes())
    return target


def last_updates(folder: Path) -> list[dict[str, Any]]:
    return baton.open_run(folder).updates


# ---- a newcomer that is near ---------------------------------------------------------------------------------------------


def test_a_newcomer_speaks_as_the_incumbent_did_and_the_others_are_as_they_were(here: Path) -> None:
    before = Run(here)
    marks, position = {n: before.fingerprint(n) for n in ("a", "b")}, before.position
    record = swaps.swap(here, "b", "table:01", options=NEAR)
    after = baton.open_run(here)
    assert after.path == here / "swaps" / "001" and after.home == here
    assert record["gate"]["passed"] and record["gate"]["message_mean"] <= 0.05
    assert after.fingerprint("a") == marks["a"] and after.fingerprint("b") != marks["b"]
    # What the other seat had learned about learning came with it; the newcomer has nothing yet.
    moved = after.position
    assert moved.agents["a"] == position.agents["a"]
    assert moved.agents["b"].streak == 0 and moved.agents["b"].beta == before.config.algorithm.penalty.start
    assert moved.done == position.done and not moved.entries
    assert [m.incarnation for m in moved.team.members] == [0, 1]
    old, new = (records.load_training(r.path / r.files["a"]["training"])[1] for r in (before, after))
    assert old.keys() == new.keys() and all(torch.equal(old[n], new[n]) for n in old)
    assert after.files["a"]["steps"] == before.files["a"]["steps"] and after.files["b"]["steps"] == 0
    difference = record["accuracy"]["difference"]
    assert difference["low"] > -0.2 and record["accuracy"]["before"]["value"] > 0.9


def test_training_goes_on_behind_the_stage_at_which_it_was_swapped_and_can_be_told_by_the_old_config(
    here: Path, tmp_path: Path
) -> None:
    swaps.swap(here, "b", "table:01", options=NEAR)
    toml = tmp_path / "team.toml"
    toml.write_text(stopped(tables(), 7).to_toml(), encoding="utf-8")
    gone_on = baton.train(toml, run=here, resume=True)
    assert gone_on.path == here / "swaps" / "001" and gone_on.ending == "finished"
    assert [u["stage"] for u in gone_on.updates] == [6, 6, 7, 7]
    assert [u["index"] for u in gone_on.updates] == [10, 11, 12, 13]
    assert Run(here).ending == "finished" and len(Run(here).updates) == 10, "the run before the swap is what it was"
    assert baton.evaluate(here, episodes=20)["rows"][0]["value"] is not None
    report = baton.verify(here)
    assert report["holds"], report["faults"]


def test_the_first_update_behind_a_swap_is_that_of_a_run_that_never_swapped(
    here: Path, learned: Path, tmp_path: Path
) -> None:
    """A seat that is given to its own weights: whoever updates first next has everything that it would have had."""
    own = copied(learned, tmp_path / "own")
    never = trained(own, tables(), 6)
    record = swaps.swap(here, "b", "table:01", options=NEAR.model_copy(update={"radius": 5.0, "steps": 1, "lr": 1e-9}))
    assert record["mode"] == "distill"
    trained(here, tables(), 6)
    first = next(u for u in last_updates(here) if u["agent"] == "a")
    other = [u for u in never.updates if u["agent"] == "a"][-1]
    # The rollouts differ (b speaks otherwise), the state that a learns with does not.
    assert (first["beta"], first["lr"], first["stage"]) == (other["beta"], other["lr"], other["stage"])


# ---- no, and back --------------------------------------------------------------------------------------------------------


def test_a_refused_swap_leaves_every_file_as_it_was_and_says_by_how_much(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(here)
    with pytest.raises(swaps.Refused, match=r"nats from 'b' on average \(radius 0\.001\)"):
        swaps.swap(here, "b", "table:01", options=SwapOptions(radius=0.001, contexts=20, rounds=2, steps=1, lr=1e-6))
    assert content(here) == before and not (here / "swaps").exists()
    assert main(["swap", str(here), "b=table:01", "--set", "radius=0.001", "--set", "steps=1", "--set", "lr=1e-6"]) == 1
    assert "the run is what it was" in capsys.readouterr().err
    assert content(here) == before and not (here / "swaps").exists()


def test_whatever_dies_on_the_way_leaves_the_run_as_it_was(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(here)
    places = ["baton.swap.first_record", "baton.swap.write_team", "baton.swap.records.sync_tree", "baton.swap.tested"]
    for place in places:
        with monkeypatch.context() as patch:

            def dies(*_: Any, **__: Any) -> Any:
                raise KeyboardInterrupt

            patch.setattr(place, dies)
            with pytest.raises(KeyboardInterrupt):
                swaps.swap(here, "b", "table:01", options=NEAR)
        assert content(here) == before, place
    trained(here, tables(), 6)


def test_undo_is_bitwise_and_training_then_is_that_of_a_run_that_never_swapped(
    here: Path, learned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(here)
    swaps.swap(here, "b", "table:01", options=NEAR)
    trained(here, tables(), 6)
    assert main(["swap", str(here), "--undo"]) == 0
    assert "bit for bit" in capsys.readouterr().out
    assert baton.open_run(here).path == here
    assert {k: v for k, v in content(here).items() if not k.startswith("swaps")} == before
    never = trained(copied(learned, tmp_path / "never"), tables(), 7)
    again = trained(here, tables(), 7)
    assert [u["fingerprint"] for u in again.updates] == [u["fingerprint"] for u in never.updates]
    assert main(["swap", str(here), "--undo"]) == 1
    assert "no swap to undo" in capsys.readouterr().err
    swaps.swap(here, "a", "table:01", options=NEAR)
    assert baton.open_run(here).path.name == "002", "a directory of an undone swap is never written again"


def test_a_second_swap_follows_the_first_and_undo_takes_back_one(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swaps.swap(here, "b", "table:01", options=NEAR)
    swaps.swap(here, "a", "table:01", options=NEAR)
    assert [m.incarnation for m in baton.open_run(here).position.team.members] == [1, 1]
    assert main(["verify", str(here)]) == 0
    assert "it began with a swap; the run before: baton verify" in capsys.readouterr().out
    assert main(["inspect", str(here)]) == 0
    assert "a: table:01" in capsys.readouterr().out
    swaps.undo(here)
    assert baton.open_run(here).path.name == "001"
    swaps.undo(here)
    assert baton.open_run(here).path == here


# ---- other modes ---------------------------------------------------------------------------------------------------------


def test_a_raw_newcomer_falls_to_chance_and_one_with_other_tokens_can_only_imitate(here: Path) -> None:
    raw = swaps.swap(here, "b", "table:01", options=SwapOptions(mode="raw"))
    assert abs(raw["accuracy"]["after"]["value"] - 0.5) < 0.3 and raw.get("gate") is None
    swaps.undo(here)
    with pytest.raises(ConfigError, match="other tokens than the model in that seat"):
        swaps.swap(here, "b", "table:10", options=NEAR)
    taught = SwapOptions(mode="imitate", contexts=100, steps=100, batch=16, lr=0.2)
    record = swaps.swap(here, "b", "table:10", options=taught)
    assert record["certificates"] == "void(tokenizer_swap)"
    assert record["accuracy"]["after"]["value"] > 0.8
    assert trained(here, tables(), 6).ending == "finished"


def test_pairs_can_say_no(here: Path) -> None:
    (here / "config.toml").write_text(tables("certificate.update_pairs=256").to_toml(), encoding="utf-8")
    before = content(here)
    with pytest.raises(swaps.Refused, match="worse by at least"):
        swaps.swap(here, "b", "table:01", options=SwapOptions(mode="raw"))
    assert content(here) == before
    record = swaps.swap(here, "b", "table:01", options=NEAR)
    assert record["pairs"]["n"] == 256 and record["pairs"]["coupling"] == "inverse_cdf"


def test_two_models_in_one_seat_serve_the_projection_exactly_and_the_others_train_on(tmp_path: Path) -> None:
    config = worlds.relay("algorithm.stages=2", "eval.episodes=20", "algorithm.order=static")
    home = trained(tmp_path / "run", config, 2).path
    record = swaps.swap(home, "second", "tiny:32k", options=SwapOptions(mode="mixture", radius=0.02))
    after = baton.open_run(home)
    folder = after.folder("second")
    assert mixture.is_mixture(folder) and record["bound"] == {"kl_served_incumbent": 0.02}
    plan = assemble.prepare(after.config, root=Path.cwd(), own=after.origins)
    crew = assemble.crew(after.config, {"second": folder}, learners=[])
    old = assemble.crew(after.config, {"second": home / "state/second/v00000"}, learners=[])
    assert plan.codecs["second"].end_ids
    net: Any = crew.sampler
    both = net._seats["second"].slots["promoted"].net
    ids = torch.randint(0, 60, (5, 12), generator=torch.Generator().manual_seed(0))
    laws = [n.law(n.hidden(ids)[:, -1], temperature=1.0) for n in (both.newcomer, both.incumbent)]
    served = both.law(*laws)
    apart = divergence.kl(served, laws[1])
    assert float(apart.max()) <= 0.02 + 1e-6 and float(divergence.kl(laws[0], laws[1]).max()) > 0.02
    torch.testing.assert_close(served, divergence.project(laws[0], laws[1], radius=0.02)[0])
    assert old.sampler is not None
    gone_on = run.train(stopped(config, 4), run=home, resume=True)
    assert [(u["stage"], u["agent"]) for u in gone_on.updates] == [(3, "first"), (4, "first")]
    assert gone_on.fingerprint("second") == after.fingerprint("second")
    assert baton.evaluate(home, episodes=10, baselines=False)["rows"][0]["value"] is not None
    with pytest.raises(ConfigError, match="mixture of two models already"):
        swaps.swap(home, "second", "tiny:32k", options=NEAR)
    swaps.undo(home)
    assert baton.open_run(home).path == home


def test_a_larger_model_takes_a_seat_and_keeps_its_own_rate(tmp_path: Path) -> None:
    config = worlds.relay("algorithm.stages=2", "eval.episodes=20", "agents.second.lr=auto")
    home = trained(tmp_path / "run", config, 1).path
    options = SwapOptions(radius=3.0, contexts=64, steps=20, rounds=2)
    record = swaps.swap(home, "second", "tiny:256k", options=options)
    assert record["parameters"] > 3 * record["parameters_before"]
    assert {name: record["fingerprints"][name] == record["fingerprints_before"][name] for name in ("first", "second")} == {
        "first": True,
        "second": False,
    }
    gone_on = run.train(stopped(config, 2), run=home, resume=True)
    assert len(gone_on.updates) == 2
    report = baton.verify(home)
    assert report["holds"], report["faults"]


FORGERIES = {
    "a look": (lambda line: line["swap"]["rounds"][0]["look"].update(message_mean=1e-9), "look"),
    "a radius": (lambda line: line["swap"]["options"].update(radius=1e-9), "look"),
    "a fingerprint": (lambda line: line["fingerprints"].update(a="0" * 64), "fingerprint"),
    "the rate of another seat": (lambda line: line["position"]["agents"]["a"].update(lr=9.0), "position"),
    "an incarnation": (lambda line: line["position"]["team"]["members"][1].update(incarnation=0), "position"),
    "the group": (lambda line: line.update(group=7), "group"),
    "the last look's copy": (lambda line: line["swap"]["gate"].update(passed=False), "gate"),
    "the mode": (lambda line: line["swap"].update(mode="raw"), "mode"),
    "the mode, in both places": (
        lambda line: (line["swap"].update(mode="raw"), line["swap"]["options"].update(mode="raw")),
        "rests on",
    ),
    "the marks before": (lambda line: line["swap"]["fingerprints_before"].update(a="0" * 64), "fingerprints_before"),
    "the model before": (lambda line: line["swap"].update(model_before="table:10"), "model_before"),
    "the stage": (lambda line: line["swap"].update(stages=3), "swap"),
    "the run before": (lambda line: line["swap"].update(before="007"), "the run before the swap"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_what_is_forged_in_a_swap_is_found(here: Path, name: str) -> None:
    swaps.swap(here, "b", "table:01", options=NEAR)
    file = baton.open_run(here).path / "stages.jsonl"
    lines = records.read_records(file)
    forge, said = FORGERIES[name]
    forge(lines[0])
    records.rewrite_records(file, lines)
    faults = [f for f in baton.verify(here)["faults"] if f["check"] == "swap"]
    assert any(said in f["what"] for f in faults), faults


def test_probe_episodes_that_are_gone_are_missed(here: Path) -> None:
    swaps.swap(here, "b", "table:01", options=NEAR)
    (baton.open_run(here).path / swaps.EVIDENCE).unlink()
    assert any("is gone" in f["what"] for f in baton.verify(here)["faults"])


def test_a_newcomer_whose_weights_were_exchanged_is_found_though_its_marks_fit(tmp_path: Path) -> None:
    config = worlds.relay("algorithm.stages=1", "eval.episodes=20")
    home = trained(tmp_path / "run", config, 1).path
    swaps.swap(home, "second", "tiny:64k", options=SwapOptions(radius=3.0, contexts=64, steps=20, rounds=1))
    here = baton.open_run(home).path
    report = baton.verify(home)
    assert report["holds"] and report["largest_gaps"]["swap"] <= 1e-4, report["faults"]
    # Other weights in its folder, and every mark of them put right.
    file = here / "state/second/v00000/model.safetensors"
    tensors = {name: tensor * 1.5 for name, tensor in records.stored(file).items()}
    mark = assemble.weights_of(tensors).fingerprint
    save_file(tensors, file, metadata={"format": "pt"})
    lines = records.read_records(here / "stages.jsonl")
    lines[0]["fingerprints"]["second"] = lines[0]["swap"]["fingerprints"]["second"] = mark
    records.rewrite_records(here / "stages.jsonl", lines)
    faults = [f["what"] for f in baton.verify(home)["faults"] if f["check"] == "swap"]
    assert any("the last look from both models' weights" in what for what in faults), faults


def test_the_table_of_a_swap_has_the_figures_of_every_other_report(here: Path) -> None:
    before = baton.evaluate(here, baselines=False)["rows"][0]["value"]
    record = swaps.swap(here, "b", "table:01", options=NEAR)
    after = baton.evaluate(here, baselines=False)["rows"][0]["value"]
    assert (record["accuracy"]["before"]["value"], record["accuracy"]["after"]["value"]) == (before, after)


def test_a_run_that_went_on_after_an_undo_still_proves_what_it_handed_over(here: Path) -> None:
    swaps.swap(here, "b", "table:01", options=NEAR)
    swaps.undo(here)
    trained(here, tables(), 7)
    report = baton.verify(here / "swaps" / "001")
    assert report["holds"], report["faults"]


def test_a_directory_that_the_run_has_left_is_read_and_not_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swaps.swap(here, "b", "table:01", options=NEAR)
    swaps.undo(here)
    left = here / "swaps" / "001"
    before = content(here)
    for call in (
        lambda: run.train(stopped(baton.open_run(left).config, 7), run=left, resume=True),
        lambda: swaps.swap(left, "b", "table:01", options=NEAR),
        lambda: swaps.undo(left),
    ):
        with pytest.raises(RunError, match="is not where the run stands"):
            call()
    assert content(here) == before
    assert main(["inspect", str(left)]) == 0 and main(["inspect", str(here / "swaps" / "000")]) == 0
    capsys.readouterr()
    assert not any(p.is_symlink() for p in here.rglob("*"))


def test_one_process_at_a_time_whatever_the_run_is_called(here: Path) -> None:
    swaps.swap(here, "b", "table:01", options=NEAR)
    with records.locked(here), pytest.raises(RunError, match="in use by another process"):
        run.train(stopped(baton.open_run(here).config, 7), run=here / "swaps" / "001", resume=True)
    gone_on = run.train(stopped(baton.open_run(here).config, 7), run=here / "swaps" / "001", resume=True)
    assert gone_on.path == here / "swaps" / "001"


def test_what_was_handed_over_is_not_called_untrained(here: Path) -> None:
    swaps.swap(here, "b", "table:01", options=NEAR)
    rows = [row["name"] for row in baton.evaluate(here, episodes=20, baselines=False)["rows"]]
    assert rows == ["team", "team as handed over by the swap"]
    assert baton.verify(here)["holds"]


def test_ctrl_c_in_the_stages_after_a_swap_names_the_command_to_go_on(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stops(*_: Any, **__: Any) -> Any:
        raise Interrupted("stopped by the user")

    monkeypatch.setattr("baton.run.train", stops)
    words = ["swap", str(here), "b=table:01", "--continue", "2"]
    for name, value in (("radius", 0.05), ("contexts", 200), ("steps", 300), ("lr", 0.2)):
        words += ["--set", f"{name}={value}"]
    assert main(words) == 130
    said = capsys.readouterr()
    assert "right after" in said.out and "the swap stands" in said.err
    monkeypatch.undo()
    command = shlex.split(said.err.strip().splitlines()[-1])
    assert command[:2] == ["baton", "train"] and main(command[1:]) == 0
    assert [u["stage"] for u in baton.open_run(here).updates] == [6, 6, 7, 7]


# ---- on a running job ----------------------------------------------------------------------------------------------------


def test_a_job_that_is_asked_swaps_between_two_stages_as_if_it_had_been_stopped(learned: Path, tmp_path: Path) -> None:
    by_hand = copied(learned, tmp_path / "by hand")
    trained(by_hand, tables(), 6)
    swaps.swap(by_hand, "b", "table:01", options=NEAR)
    trained(by_hand, tables(), 8)
    live = copied(learned, tmp_path / "live")
    place = requests.ask(live, requests.Request(agent="b", model="table:01", options=NEAR))
    with pytest.raises(RunError, match="waits already"):
        requests.ask(live, requests.Request(agent="b", model="table:01", options=NEAR))
    trained(live, tables(), 8)
    answer = json.loads(place.read_text(encoding="utf-8"))
    assert answer["accepted"] and answer["stages"] == 6
    told = [[u["fingerprint"] for u in baton.open_run(path).updates] for path in (by_hand, live)]
    assert told[0] == told[1] and len(told[0]) == 4


def test_a_run_that_another_process_holds_is_pointed_to_live(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with records.locked(here):
        assert main(["swap", str(here), "b=table:01"]) == 1
        assert "--live asks it to swap" in capsys.readouterr().err


def test_a_request_that_was_answered_by_a_swap_is_not_taken_twice(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = requests.ask(here, requests.Request(agent="b", model="table:01", options=NEAR))

    class Died(Exception):
        pass

    def dies(*_: Any) -> None:
        raise Died

    monkeypatch.setattr("baton.requests.answer", dies)
    with pytest.raises(Died):
        trained(here, tables(), 8)
    monkeypatch.undo()
    assert baton.open_run(here).path.name == "001" and not place.is_file()
    trained(here, tables(), 8)
    assert baton.open_run(here).path.name == "001" and json.loads(place.read_text(encoding="utf-8"))["accepted"]


@pytest.mark.parametrize("told", ['{"agent": "b", "model": null, "options": {}, "id": "x"}', "[]", "{", '{"agent": "b"}'])
def test_what_is_no_request_is_answered_and_ends_nothing(here: Path, told: str) -> None:
    (here / "swaps").mkdir()
    (here / "swaps" / "request.json").write_text(told, encoding="utf-8")
    assert trained(here, tables(), 6).ending == "finished"
    answer = json.loads((here / "swaps" / "answer.json").read_text(encoding="utf-8"))
    assert not answer["accepted"] and "is no request" in answer["why"]


def test_a_job_that_says_no_trains_on(here: Path) -> None:
    place = requests.ask(here, requests.Request(agent="nobody", model="table:01", options=NEAR))
    gone_on = trained(here, tables(), 6)
    answer = json.loads(place.read_text(encoding="utf-8"))
    assert not answer["accepted"] and "no agent 'nobody'" in answer["why"]
    assert gone_on.path == here and gone_on.ending == "finished"


# ---- bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["c=table:01"], "no agent 'c'; it has a, b"),
        (["b"], "write AGENT=MODEL"),
        ([], "write AGENT=MODEL"),
        (["b=endpoint:http://127.0.0.1:1/v1"], "has no weights here"),
        (["b=table:0"], "is no table"),
        (["b=table:01", "--set", "radios=1"], "did you mean radius?"),
        (["b=table:01", "--set", "radius=0"], "radius = 0"),
        (["b=table:01", "--mode", "mixture"], "is not made for tables"),
        (["b=table:01", "--mode", "destill"], "did you mean 'distill'"),
        (["b=table:01", "--live"], "no job runs on"),
        (["b=table:01", "--live", "--continue", "3"], "trains on anyway"),
        (["b=table:01", "--undo"], "takes the last swap back and nothing else"),
        (["--undo", "--mode", "raw"], "takes the last swap back and nothing else"),
        (["b=table:01", "--set", "mode=raw"], "give it as --mode"),
    ],
)
def test_bad_input_is_one_clear_error(here: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(here)
    assert main(["swap", str(here), *words]) in (1, 2)
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and said in error[0], error
    assert content(here) == before and not (here / "swaps").exists()


def test_a_run_inside_a_stage_is_not_swapped(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Enough(Exception):
        pass

    def stops(*_: Any, **__: Any) -> None:
        raise Enough

    monkeypatch.setattr("baton.algorithms.sat.close_stage", stops)
    with pytest.raises(Enough):
        trained(here, tables(), 6)
    lines = records.read_records(here / "stages.jsonl")
    records.rewrite_records(here / "stages.jsonl", lines[:-2] if lines[-1]["kind"] == "update" else lines[:-1])
    monkeypatch.undo()
    with pytest.raises(RunError, match=r"inside a stage \(a updated\); complete it first: .*algorithm\.stages=6"):
        swaps.swap(here, "b", "table:01", options=NEAR)


def test_a_model_that_is_not_there_is_named_before_anything_plays(tmp_path: Path) -> None:
    home = trained(tmp_path / "run", worlds.relay("algorithm.stages=1"), 1).path
    for model in ("tiny:9x", str(tmp_path / "nowhere")):
        with pytest.raises((ConfigError, ModelError)) as error:
            swaps.swap(home, "second", model)
        assert model in str(error.value)
    with pytest.raises(BatonError):
        swaps.swap(tmp_path / "no run", "second", "tiny:64k")


# ---- the same transcript, read by another model --------------------------------------------------------------------------


def retold(folder: Path, *, template: str = "", shuffled: bool = False) -> Path:
    """A tiny model with another chat template, or with ids that mean other characters."""
    source = models.resolve("tiny:64k", seed=77)
    for path in source.iterdir():
        (folder / path.name).parent.mkdir(parents=True, exist_ok=True)
        (folder / path.name).write_bytes(path.read_bytes())
    if template:
        told = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        (folder / "tokenizer_config.json").write_text(json.dumps({**told, "chat_template": template}), encoding="utf-8")
    if shuffled:
        told = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary: dict[str, int] = told["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        (folder / "tokenizer.json").write_text(json.dumps(told, ensure_ascii=False), encoding="utf-8")
    return folder


TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + '* ' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def test_a_newcomer_with_another_template_reads_the_same_states_in_its_own_prompts(tmp_path: Path) -> None:
    codec, other = (
        codec_of(folder) for folder in (models.resolve("tiny:64k", seed=1), retold(tmp_path / "t", template=TEMPLATE))
    )
    assert codec is not other and swaps.same_tokens(codec, other)
    assert not swaps.same_tokens(codec, codec_of(retold(tmp_path / "s", shuffled=True)))
    agents = ["first", "second"]
    for protocol in (protocols.ChainOptions(rounds=2), protocols.DebateOptions(rounds=2)):
        plan = assemble.prepare(worlds.relay("protocol=" + toml(protocol)), root=Path.cwd())
        crew = assemble.crew(plan.config, {n: plan.bases[n] for n in plan.local}, learners=[])
        table, tasks = assemble.table(plan, crew.sampler, None), plan.splits.train[:6]
        versions = dict.fromkeys(agents, 0)
        episodes = complete(table.play([Play(task=t) for t in tasks], address=("x",), versions=versions))
        was = plan.seats[1]
        now = replace(was, codec=other)
        named = {t.id: t for t in tasks}
        pair = stage0.contexts(episodes, named, protocol=plan.protocol, was=was, seat=now, index=1)
        own = [turn for e in episodes for turn in e.turns if turn.seat == 1]
        assert pair.incumbent.n_act == pair.newcomer.n_act == sum(len(turn.ids) for turn in own)
        # The same sampled ids, state by state, behind other prompts.
        assert torch.equal(pair.incumbent.ids[pair.incumbent.mask], pair.newcomer.ids[pair.newcomer.mask])
        star = other.tokens["*"]
        assert (pair.newcomer.ids == star).any() and not (pair.incumbent.ids == star).any()
        # A prompt is what the newcomer would have been sent in that seat: what was said at the same time is not in it.
        for e in episodes:
            again = stage0.read_again(plan.protocol, was, now, 1, e, named[e.task_id])
            for number, turn in enumerate(again.turns):
                if turn.seat == 1:
                    heard = stage0.heard(plan.protocol, was, 1, e, named[e.task_id], number)
                    assert turn.prompt_ids == other.encode(plan.protocol.messages(named[e.task_id], heard, 1, was.system))
                    spoke = {t.seat for t in e.turns[len(heard) : number]}
                    assert spoke <= ({0} if isinstance(protocol, protocols.DebateOptions) else set[int]())
        said = stage0.messages_of(episodes, named, protocol=plan.protocol, was=was, seat=now, index=1)
        assert [other.decode(reply) for _, _, reply in said] == [turn.text for turn in own if not turn.cut]


def test_a_newcomer_with_another_template_learns_the_projection_and_takes_the_seat(tmp_path: Path) -> None:
    config = worlds.relay("algorithm.stages=2", "eval.episodes=20")
    home = trained(tmp_path / "run", config, 1).path
    folder = retold(tmp_path / "other", template=TEMPLATE)
    options = SwapOptions(radius=0.5, contexts=100, steps=150, rounds=2, lr=3e-3)
    record = swaps.swap(home, "second", str(folder), options=options)
    first, last = record["rounds"][0], record["rounds"][-1]
    assert record["gate"]["passed"] and last["last_loss"] < first["first_loss"]
    assert len(run.train(stopped(config, 2), run=home, resume=True).updates) == 2
    with pytest.raises(ConfigError, match="other tokens"):
        swaps.swap(home, "second", str(retold(tmp_path / "strange", shuffled=True)), options=options)


def toml(options: Any) -> str:
    """A table as `--set` takes it."""
    pairs = options.model_dump(mode="json").items()
    return "{" + ", ".join(f"{k}={json.dumps(v)}" for k, v in pairs) + "}"
