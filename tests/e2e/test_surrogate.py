"""The surrogate certificate of a run: probe episodes played to the end, what a candidate makes of them, and what is said
of it (ALGORITHMS 3.5, 3.6, 6.6; step 15 of 2.2)."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import worlds

import baton
from baton import assemble, records, run
from baton.algorithms import surrogate
from baton.algorithms.state import SurrogateReport, UpdateReport
from baton.cli import main
from baton.core import certificate
from baton.records import Record
from baton.types import Accepted, Episode, Failed, Outcome, Scored, Task
from baton.ui import certificates

ON = ("certificate.surrogate=true", "gate.probe_prompts=500", "env.prompts=3000")
DEBATE = "protocol={name='debate',rounds=2}"


def terms(report: SurrogateReport | Record) -> dict[str, float]:
    made = report.gain if isinstance(report, SurrogateReport) else records.read_certificate(report["gain"])
    return {term.name: term.value for term in made.terms}


def shown(reports: Sequence[UpdateReport]) -> list[SurrogateReport]:
    return [r.surrogate for r in reports if r.surrogate is not None]


# ---- a run, recomputed from its files ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("surrogate") / "run"
    run.train(worlds.parity(*ON, "algorithm.stages=2", "agents.b.lr=5"), run=path)
    return path


def bernstein(x: Any, reach: float, level: float) -> float:
    """A lower bound of the mean, from the formula."""
    log, n = math.log(2.0 / level), len(x)
    return float(x.mean() - math.sqrt(2.0 * x.var(ddof=1) * log / n) - 7.0 * reach * log / (3.0 * (n - 1)))


def test_an_accepted_update_has_the_bound_that_its_files_give_by_hand(trained: Path) -> None:
    updates = run.Run(trained).updates
    accepted = [u for u in updates if u["to_version"] is not None]
    assert accepted and len(accepted) < len(updates), "both kinds are here"
    assert all((u["surrogate"] is not None) == (u["to_version"] is not None) for u in updates)
    for u in accepted:
        rows = records.read_episodes(trained / u["episodes_file"])
        probe, after = ([r for r in rows if r["use"] == use] for use in ("probe", "restated"))
        before = [[t for t in r["turns"] if t["agent"] == u["agent"]] for r in probe]
        assert len(probe) == len(after) == 500 and all(len(own) == 1 for own in before)
        assert [[t["ids"] for t in r["turns"]] for r in after] == [[t["ids"] for t in own] for own in before]
        assert all(set(t["versions"]) == {u["to_version"]} for r in after for t in r["turns"])
        logs = [sum(r["turns"][0]["logprobs"]) - sum(own[0]["logprobs"]) for r, own in zip(after, before, strict=True)]
        rewards = np.array([r["reward"] for r in probe])
        mean = np.mean([r["reward"] for r in rows if r["use"] == "train"])
        level = 0.05 / 2 / (2 * 5)  # two agents; two terms at five looks
        capped = np.minimum(np.exp(logs), 2.0)
        gain = (capped - 1.0) * (rewards - mean)
        zeta = -bernstein(-(1.0 - capped), 2.0, level)
        found = u["surrogate"]
        assert found["gain"]["lower_bound"] == pytest.approx(bernstein(gain, 2.0, level) - max(0.0, zeta), abs=1e-12)
        assert terms(found)["held-out gain"] == pytest.approx(gain.mean(), abs=1e-12)
        assert (found["turns"], found["missing"], found["gain"]["n"]) == (1, 0, 500)
        assert found["gain"]["confidence"] == pytest.approx(0.975) and u["seconds"]["surrogate"] > 0.0
        assert found["pool"] == run.Run(trained).start["splits"]["probe"]["sha256"]
        assert math.fsum(terms(found).values()) == found["gain"]["lower_bound"]


def test_nothing_that_an_update_decides_is_moved_by_it(trained: Path, tmp_path: Path) -> None:
    settings = worlds.parity(*ON[1:], "algorithm.stages=2", "agents.b.lr=5")
    run.train(settings, run=tmp_path / "run")
    assert worlds.final(tmp_path / "run") == worlds.final(trained)
    for u in run.Run(tmp_path / "run").updates:
        rows = records.read_episodes(tmp_path / "run" / u["episodes_file"])
        assert u["surrogate"] is None
        assert {r["reason"] for r in rows if r["use"] == "probe"} == {"probe"}, "played to the agent's turn, not graded"


@pytest.mark.parametrize("point", ["after the candidate is published", "before the record", "amid the record"])
def test_a_run_that_died_comes_to_the_same(point: str, trained: Path, tmp_path: Path) -> None:
    settings = worlds.parity(*ON, "algorithm.stages=2", "agents.b.lr=5")
    worlds.kill(settings, tmp_path / "run", point, 2)
    worlds.go_on(settings, tmp_path / "run")
    assert worlds.final(tmp_path / "run") == worlds.final(trained)
    told = [[u["surrogate"] for u in run.Run(path).updates] for path in (tmp_path / "run", trained)]
    assert told[0] == told[1]


# ---- against the truth -----------------------------------------------------------------------------------------


def pool_accuracy(stage: worlds.Stage, tables: dict[str, Any]) -> float:
    """The true mean reward on the probe pool."""
    tasks = {t.views: t for t in stage.world.probe}
    counts = Counter(t.views for t in stage.world.probe)
    each = {views: worlds.accuracy(stage.world.table, [task], tables) for views, task in tasks.items()}
    return math.fsum(each[views] * n for views, n in counts.items()) / len(stage.world.probe)


def gains(stage: worlds.Stage, updates: int) -> list[tuple[SurrogateReport, float]]:
    """(surrogate, true gain) of each accepted update."""
    found: list[tuple[SurrogateReport, float]] = []
    for _ in range(updates):
        before = {a: t.learner.weights() for a, t in stage.world.trainees.items()}
        (report,) = stage.train(1)
        if report.surrogate is not None:
            after = {**before, report.agent: stage.learner(report.agent).weights()}
            found.append((report.surrogate, pool_accuracy(stage, after) - pool_accuracy(stage, before)))
    return found


FREE = "agents.{}.radius={{token=50,message_mean=50}}"


def test_the_true_gain_lies_above_the_bound_over_seeds() -> None:
    found: list[tuple[SurrogateReport, float]] = []
    for seed in range(6):
        more = (f"seed={seed}", "algorithm.stages=3", FREE.format("a"), FREE.format("b"))
        found += gains(worlds.world(worlds.parity(*ON, *more, lr=0.6)), 6)
    assert len(found) >= 24
    assert all(truth >= report.gain.lower_bound for report, truth in found)
    # Apart from sampling and truncation the gain is the true one: their errors have no side.
    errors = [terms(report)["held-out gain"] - truth for report, truth in found]
    assert min(errors) < 0.0 < max(errors) and max(truth for _, truth in found) > 0.05


def one_answer(settings: Any, *, faulty: int = 0) -> worlds.Stage:
    """A game that pays the last table for saying 1; grading fails on every `faulty`-th prompt."""
    tasks = [Task(id=f"t{i}", env="x", prompt="go", views=("", ""), answer="1") for i in range(1200)]

    def grade(answers: Sequence[tuple[Task, str]]) -> list[Outcome]:
        def outcome(task: Task, said: str) -> Outcome:
            is_lost = faulty and int(task.id[1:]) % faulty == 0
            return Failed(reason="lost") if is_lost else Scored(reward=float(said.strip() == "1"))

        return [outcome(*one) for one in answers]

    return worlds.world(settings, tasks=tasks, grade=grade)


def test_a_large_gain_of_an_agent_that_speaks_once_is_positive_and_below_the_truth() -> None:
    settings = worlds.parity(
        *ON, "gate.probe_prompts=1000", "env.prompts=6000", FREE.format("b"), "algorithm.order=static", lr=0.4
    )
    stage = one_answer(settings)
    found = [(r, t) for r, t in gains(stage, 2) if t > 0.0]
    assert [r.gain.verdict for r, _ in found] == ["positive"]
    assert 0.0 < found[0][0].gain.lower_bound < found[0][1]


def test_an_agent_that_speaks_twice_pays_for_its_drift() -> None:
    stage = worlds.world(worlds.parity(*ON, DEBATE, "algorithm.stages=1", *map(FREE.format, "ab"), lr=0.6))
    reports = shown(stage.train())
    assert reports
    for report in reports:
        assert report.turns == 2 and {t.name: t.basis for t in report.gain.terms}["drift"] == "measured"
        assert terms(report)["drift"] < -0.05
    evidence = next(e for e, r in zip(stage.journal.evidence, stage.journal.reports, strict=True) if r.surrogate)
    assert all(len(e.turns) == 2 for e in evidence.restated)


def test_a_missing_return_counts_against_the_gain() -> None:
    settings = worlds.parity(*ON, FREE.format("b"), "algorithm.order=static", lr=0.4)
    stages = [one_answer(settings, faulty=n) for n in (0, 4)]
    whole, holed = (shown(stage.train(2))[-1] for stage in stages)
    assert (whole.missing, terms(whole)["imputation"]) == (0, 0.0)
    assert 80 < holed.missing < 170 and terms(holed)["imputation"] < 0.0
    evidence = stages[1].journal.evidence[-1]
    mean = stages[1].journal.reports[-1].episodes.reward
    lost = 0.0
    for probe, after in zip(evidence.probe, evidence.restated, strict=True):
        if not probe.is_scored:
            ratio = min(2.0, math.exp(after.turns[0].logprobs[0] - probe.turns[1].logprobs[0]))
            lost += min((ratio - 1.0) * (reward - mean) for reward in (0.0, 1.0))
    assert terms(holed)["imputation"] == pytest.approx(lost / 500)


def test_an_unchanged_model_has_a_ratio_of_one_in_bfloat16_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoding loop that sampled the messages scores them, in the same batches."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    monkeypatch.setattr(certificate, "FEWEST_PROMPTS", 24)
    more = ("engine.dtype=bfloat16", "agents.second.max_new_tokens=4", "protocol={name='chain',rounds=2}")
    settings = worlds.relay("certificate.surrogate=true", "gate.probe_prompts=24", "env.prompts=200", *more)
    stage = worlds.world(settings)
    team, world = stage.position.team, stage.world
    from baton.algorithms.episodes import collect_probe

    probe = asyncio.run(collect_probe(world, team, stage=1, who="second", until=None, slots={}))
    now = stage.learner("second").weights()
    asyncio.run(world.sampler.publish("second", "candidate", now, 1))
    told = asyncio.run(surrogate.evaluate(world, team, "second", probe, version=1, baseline=0.0, stage=1))[1]
    own = [[t.logprobs for t in e.turns if t.agent == "second"] for e in probe]
    assert {len(e) for e in own} == {2} and [[t.logprobs for t in e.turns] for e in told] == own
    torch.manual_seed(0)
    near = {n: t + 0.05 * t.float().std().nan_to_num(0.0).to(t.dtype) * torch.randn_like(t) for n, t in now.tensors.items()}
    asyncio.run(world.sampler.publish("second", "candidate", assemble.weights_of(near), 1))
    told = asyncio.run(surrogate.evaluate(world, team, "second", probe, version=1, baseline=0.0, stage=1))[1]
    assert [[t.logprobs for t in e.turns] for e in told] != own


# ---- where nothing is said --------------------------------------------------------------------------------------


def reasons(reports: Sequence[UpdateReport]) -> list[str]:
    return [report.gain.reason for report in shown(reports)]


def test_too_few_prompts_are_named_and_nothing_is_played_or_scored_for_them() -> None:
    stage = worlds.world(worlds.parity("certificate.surrogate=true", "algorithm.stages=1"))
    reports = stage.train()
    assert reasons(reports) and set(reasons(reports)) == {"too_few_samples"}
    assert {(r.gain.n, r.gain.needed, r.missing) for r in shown(reports)} == {(16, 500, 0)}
    for evidence in stage.journal.evidence:
        assert evidence.restated == () and {e.outcome for e in evidence.probe} == {Failed(reason="probe")}


def test_in_a_joint_stage_only_the_first_accepted_update_is_of_the_team_that_played() -> None:
    settings = worlds.parity(*ON, "algorithm.name=joint", "algorithm.stages=1", *map(FREE.format, "abc"), agents="abc")
    stage = worlds.world(settings)
    reports = stage.train()
    assert [isinstance(r.verdict, Accepted) for r in reports] == [True] * 3
    assert reasons(reports) == ["", "stale_data", "stale_data"]
    assert [len(e.restated) for e in stage.journal.evidence] == [500, 0, 0]


def test_episodes_that_are_reused_to_learn_from_leave_the_probe_fresh() -> None:
    more = ("algorithm.data=reuse", "algorithm.order=static", "algorithm.stages=1", *map(FREE.format, "ab"))
    stage = worlds.world(worlds.parity(*ON, *more))
    reports = stage.train()
    assert all(isinstance(r.verdict, Accepted) for r in reports) and reasons(reports) == ["", ""]
    versions = [{v for e in evidence.probe for v in [e.versions["a"]]} for evidence in stage.journal.evidence]
    assert versions == [{0}, {1}], "b's probe episodes were played by the team that a had joined"


def test_an_independent_agent_learns_beside_a_team_that_is_gone_when_another_was_trained_before() -> None:
    more = ("algorithm.name=independent", "algorithm.stages=1", *map(FREE.format, "ab"))
    assert reasons(worlds.world(worlds.parity(*ON, *more)).train()) == ["", "stale_data"]


def test_own_lag_is_told_from_a_teammates() -> None:
    stage = worlds.world(worlds.parity(*ON))
    team = stage.position.team
    played = Episode(id="e", group="g", task_id="g", versions=team.versions, turns=(), answer="", outcome=Scored(reward=1.0))
    for versions, why in (({}, ""), ({"b": 3}, "stale_data"), ({"a": 3, "b": 3}, "own_lag")):
        probe = [played, replace(played, versions={**team.versions, **versions})]
        assert surrogate.why_void(stage.world, team, "a", probe) == why


def test_a_return_outside_its_range_is_void() -> None:
    stage = worlds.world(worlds.parity(*ON, "algorithm.stages=1", *map(FREE.format, "ab")))
    stage.world = replace(stage.world, reward_range=(0.25, 1.0))
    assert set(reasons(stage.train())) == {"reward_out_of_range"}


def test_the_level_is_shared_by_the_agents_and_spread_over_the_stages() -> None:
    stage = worlds.world(worlds.parity(*ON, "certificate.delta=0.1", "certificate.run_level=true", "algorithm.stages=2"))
    for report in stage.train():
        if report.surrogate is not None:
            level = 0.1 / 2 * 6 / (math.pi * report.stage) ** 2
            assert report.surrogate.gain.confidence == pytest.approx(1.0 - level)
            assert (report.surrogate.delta, report.surrogate.is_run_level) == (0.1, True)


# ---- words -----------------------------------------------------------------------------------------------------


def test_inspect_and_the_report_set_it_beside_the_others(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(trained), "--certificates"]) == 0
    text = capsys.readouterr().out
    for words in ("published", "surrogate", "sum of updates", "this update alone", "prompt pool", "n counts probe prompts"):
        assert words in text, words
    assert main(["inspect", str(trained), "--stage", "1"]) == 0
    text = capsys.readouterr().out
    for name in ("held-out gain", "imputation", "sampling", "truncation", "drift"):
        assert f"{name} " in text, name
    assert "(measured)" in text and "(bounded)" in text
    assert main(["inspect", str(trained), "--json"]) == 0
    told = [u["surrogate"] for u in json.loads(capsys.readouterr().out)["updates"]]
    assert any(one and one["gain"]["kind"] == "surrogate" for one in told)
    page = baton.report(trained)
    assert "<td>surrogate</td>" in page.replace(' class="wide"', "") and "held-out gain" in page


def line(gain: certificate.Certificate, *, is_run_level: bool = False) -> Record:
    report = SurrogateReport(turns=1, missing=0, delta=0.05, is_run_level=is_run_level, pool="abc", gain=gain)
    return {"stage": 3, "agent": "a", "to_version": 2, "surrogate": records.plain(report)}


def made(value: float) -> certificate.Certificate:
    term = certificate.Term(name="held-out gain", value=value, basis="measured")
    return certificate.concluded("surrogate", [term], n=600, confidence=0.975)


def test_the_reserved_words_stand_beside_a_positive_one_and_all_that_it_rests_on() -> None:
    text = certificates.surrogate_statement(line(made(0.25))["surrogate"])
    for words in ("certified improvement of at least .2500 of mean reward", "on 600 probe prompts", "confidence 0.975"):
        assert words in text, words
    assert text.endswith("for this update alone, for the prompt pool abc")
    whole = certificates.surrogate_statement(line(made(0.25), is_run_level=True)["surrogate"])
    assert "confidence 0.95 for the updates of the whole run together" in whole
    for gain in (made(-0.1), certificate.void("surrogate", "stale_data", n=600, confidence=0.975)):
        assert "certified" not in certificates.surrogate_statement(line(gain)["surrogate"])


def test_a_stage_adds_the_bounds_of_its_updates_and_never_over_a_void_one() -> None:
    both = [line(made(0.25)), {**line(made(-0.05)), "agent": "b"}]
    stage = {"stage": 3, "achieved": None}
    rows = certificates.rows(both, [stage])
    assert [row[2:6] for row in rows] == [
        ["surrogate", ".2500", "positive", "600"],
        ["surrogate", "-.0500", "inconclusive", "600"],
        ["surrogate", ".2000", "positive", "600 or more"],
    ]
    assert rows[2][1] == "sum of updates" and rows[2][7] == "0.95"
    both[1] = {**line(certificate.void("surrogate", "stale_data", n=600, confidence=0.975)), "agent": "b"}
    assert certificates.rows(both, [stage])[2][3:5] == ["-", "void (stale_data)"]
    few = line(certificate.void("surrogate", "too_few_samples", n=64, confidence=0.975, needed=500))
    assert certificates.rows([few], [])[0][3:5] == ["-", "void (too_few_samples, needs 500)"]
    assert "needs 500" in certificates.surrogate_statement(few["surrogate"])
