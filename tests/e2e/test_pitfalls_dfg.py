"""What others were bitten by: checkpoints and resume (D), use (F), teams (G); the entries that no other file has.

| entry                                             | where its check is                                                 |
| ------------------------------------------------- | ------------------------------------------------------------------ |
| D01 D02 D06 D07 D08                               | test_durable                                                       |
| D10 D12 D13                                       | test_durable                                                       |
| D03 D04 D05 D09 D14                               | here                                                               |
| D11, G03 G04 G05                                  | nothing to check: this version has no adapters                     |
| F01 F02 F03 F04, F07                              | tests/test_configs; warnings are errors in every test              |
| F05                                               | test_sat: nothing piles up over a hundred stages                   |
| F06                                               | test_cli: a long wait is named and named again when it ends        |
| G01 G06                                           | test_protocols: every protocol trains a stage and is evaluated     |
| G02 G07 G09                                       | test_sat: names and advantages; own tokens; a lone agent           |
| G08                                               | here                                                               |
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import worlds

from baton import assemble, records, run
from baton.errors import RunError


class Listening(run.Silent):
    """Keeps what a person would have read."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def test_learning_rates_and_penalties_go_on_across_a_resume(tmp_path: Path) -> None:
    """D03: the list of rates of a run that was stopped is the list of one that was not, halvings and all."""
    more = ("algorithm.line_search.halvings=0",)
    straight = run.train(worlds.parity("algorithm.stages=8", *more, lr=1.0), run=tmp_path / "straight")
    for stages in (3, 5, 8):
        stopped = run.train(
            worlds.parity(f"algorithm.stages={stages}", *more, lr=1.0), run=tmp_path / "stopped", resume=stages > 3
        )
    rates = [[(u["agent"], u["lr"], u["beta"], u["after"]["streak"]) for u in r.updates] for r in (straight, stopped)]
    assert rates[0] == rates[1] and len({lr for _, lr, _, _ in rates[0]}) > 2


def test_a_run_that_starts_from_anothers_agent_takes_its_weights_and_nothing_else(tmp_path: Path) -> None:
    """D04: going on with a run and starting from a model are two things; the second has a fresh optimiser."""
    first = run.train(worlds.relay("algorithm.stages=2"), run=tmp_path / "first")
    assert first.files["first"]["steps"] > 0
    folder = first.folder("first")
    second = run.train(worlds.relay("algorithm.stages=1", f"agents.first.model={folder}"), run=tmp_path / "second")
    start = second.start
    assert start["files"]["first"]["steps"] == 0 and start["files"]["first"]["training"] is None
    assert start["position"]["agents"]["first"]["cursor"] == 0 and start["position"]["team"]["members"][0]["version"] == 0
    held = [assemble.weights_of(worlds._tensors(f)).fingerprint for f in (folder, second.folder("first", 0))]
    assert held[0] == held[1]


def test_version_steps_and_position_come_from_one_record(tmp_path: Path) -> None:
    """D05: every line agrees with itself and with the one before it, across a kill."""
    settings = worlds.parity("algorithm.stages=3", lr=0.1)
    worlds.kill(settings, tmp_path / "run", "after the weights", nth=5)
    worlds.go_on(settings, tmp_path / "run")
    opened = run.Run(tmp_path / "run")
    lines = [opened.start, *opened.updates]
    for before, line in pairwise(lines):
        agent = line["agent"]
        versions = [{m["agent"]: m["version"] for m in at["position"]["team"]["members"]} for at in (before, line)]
        assert line["position"]["done"] == before["position"]["done"] + 1
        assert line["stage"] == math.ceil(line["position"]["done"] / 2)
        assert line["from_version"] == versions[0][agent]
        assert versions[1][agent] == (line["from_version"] if line["to_version"] is None else line["to_version"])
        assert line["files"][agent]["weights"] == f"state/{agent}/v{versions[1][agent]:05d}"
        whole = line["word"] == "accepted"
        assert line["files"][agent]["steps"] == before["files"][agent]["steps"] + (len(line["steps"]) if whole else 0)


@pytest.mark.parametrize("stop", [4, 5])
def test_epochs_of_prompts_go_on_across_a_resume(stop: int, tmp_path: Path) -> None:
    """D09: stopped exactly at the end of an epoch, and one update into the next."""

    def settings(stages: int) -> Any:
        return worlds.parity(f"algorithm.stages={stages}", "env.prompts=48", "gate.probe_prompts=8", agents="a", lr=0.05)

    def prompts(path: Path) -> list[list[str]]:
        return [
            [r["task_id"] for r in records.read_episodes(path / u["episodes_file"]) if r["use"] == "train"]
            for u in run.Run(path).updates
        ]

    straight = run.train(settings(8), run=tmp_path / "straight")
    assert straight.start["splits"]["train"]["prompts"] == 32
    stopped = run.train(settings(stop), run=tmp_path / "stopped")
    assert stopped.position.agents["a"].cursor == 8 * stop
    stopped = run.train(settings(8), run=tmp_path / "stopped", resume=True)
    drawn = prompts(stopped.path)
    assert drawn == prompts(straight.path)
    epochs = [[t for update in drawn[at : at + 4] for t in dict.fromkeys(update)] for at in (0, 4)]
    assert len(set(epochs[0])) == len(set(epochs[1])) == 32 and epochs[0] != epochs[1]


def test_a_resume_says_where_it_goes_on_and_what_no_longer_holds(tmp_path: Path) -> None:
    """D14: and where the libraries differ from those of the start, that the promise of equal bits is gone."""
    run.train(worlds.parity("algorithm.stages=1", lr=0.1), run=tmp_path / "run")
    same, other = Listening(), Listening()
    run.train(worlds.parity("algorithm.stages=2", lr=0.1), run=tmp_path / "run", resume=True, reporter=same)
    assert any(line == "resuming after 2 of 4 agent updates" for line in same.said)
    assert not any("not bitwise" in line for line in same.said)
    journal = tmp_path / "run" / "stages.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    lines[0]["versions"]["torch"] = "1.0"
    records.rewrite_records(journal, lines)
    run.train(worlds.parity("algorithm.stages=3", lr=0.1), run=tmp_path / "run", resume=True, reporter=other)
    (said,) = [line for line in other.said if "not bitwise" in line]
    assert "versions.torch: 1.0 then" in said and "without that promise" in said


def test_every_update_has_a_loss_a_gradient_and_a_divergence_of_its_own(tmp_path: Path) -> None:
    """G08: one loss and one backward per agent, recorded per agent."""
    finished = run.train(worlds.parity("algorithm.stages=2", agents="abc", lr=0.1), run=tmp_path / "run")
    seen: dict[str, list[tuple[float, float]]] = {n: [] for n in "abc"}
    for update in finished.updates:
        assert update["word"] in ("accepted", "shrunk") and len(update["steps"]) == 2
        for step in update["steps"]:
            assert math.isfinite(step["loss"]) and step["grad_norm"] > 0.0
            assert 0.0 < step["diagnostics"]["kept"] <= step["diagnostics"]["tokens"]
            seen[update["agent"]].append((step["loss"], step["grad_norm"]))
        assert update["looks"][0]["q_gate"] > 0.0 and update["episodes"]["tokens"][update["agent"]] > 0
    assert len({tuple(values) for values in seen.values()}) == 3


def test_a_resume_with_other_agents_is_refused(tmp_path: Path) -> None:
    """The team is part of what a checkpoint is of: another number of agents is another run."""
    run.train(worlds.parity("algorithm.stages=1"), run=tmp_path / "run")
    with pytest.raises(RunError, match="was started with another config"):
        run.train(worlds.parity("algorithm.stages=2", agents="abc"), run=tmp_path / "run", resume=True)
