"""Paired evaluation end to end: two teams on the same prompts, what is shared between them, what is concluded, and what a
run does with it (ALGORITHMS 3.6; steps 15 and 20 of 2.2)."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds

import baton
from baton import assemble, records, run
from baton.algorithms import pairs
from baton.algorithms.options import CertificateOptions
from baton.algorithms.state import Pair, PairsReport
from baton.cli import main
from baton.core.certificate import Certificate
from baton.errors import ConfigError
from baton.rollout import Beside, Coupling, Play
from baton.types import Episode, Failed, Outcome, Rejected, Scored, Slot, Task, Turn
from baton.ui import certificates

ON = ("certificate.update_pairs=256", "env.prompts=400")
USUAL = pairs.Claim(gain=0.05, harm=0.05, is_newer_beside=True)
NEVER = pairs.Claim(gain=1e-12, harm=1e-12, is_newer_beside=True)
"""Asked so strictly that no look decides anything."""


def distinct(stage: worlds.Stage) -> list[Task]:
    """One task for each thing that can be asked, so that a draw of tasks is uniform over them."""
    return list({t.views: t for t in stage.world.certify}.values())


def moved(stage: worlds.Stage, agent: str, by: float) -> dict[str, Any]:
    """A candidate whose logits lie `by` away in alternating directions, published; gives all tables of its team."""
    tables = {a: t.learner.weights() for a, t in stage.world.trainees.items()}
    rows = tables[agent].tensors
    assert rows, "train the table first"
    signs = torch.tensor([1.0, -1.0], dtype=next(iter(rows.values())).dtype)
    other = {name: row + by * (-1) ** n * signs for n, (name, row) in enumerate(sorted(rows.items()))}
    tables[agent] = assemble.weights_of(other)
    asyncio.run(stage.world.sampler.publish(agent, "candidate", tables[agent], 9))
    return tables


def compared(stage: worlds.Stage, count: int, claim: pairs.Claim = NEVER, **options: Any) -> tuple[PairsReport, list[Pair]]:
    """Pairs of the promoted team and of the candidate of b."""
    options = {"give_up": False, **options}
    world = replace(stage.world, certify=distinct(stage), certificate=CertificateOptions(update_pairs=count, **options))
    now = stage.position.team.versions
    return asyncio.run(
        pairs.compare(
            world, stage=1, who="b", versions=now, other={**now, "b": 9}, slots={"b": "candidate"}, count=count, claim=claim
        )
    )


@pytest.fixture(scope="module")
def learned() -> worlds.Stage:
    """Two tables that have seen every state."""
    stage = worlds.world(worlds.parity(*ON, "certificate.update_pairs=0"))
    stage.train(4)
    return stage


# ---- what two teams share --------------------------------------------------------------------------------------


def test_a_team_beside_itself_says_the_same_and_nobody_is_asked(learned: worlds.Stage) -> None:
    plays = [Play(task=t) for t in learned.world.certify[:20]]
    versions = learned.position.team.versions
    played = asyncio.run(learned.world.table.play(plays, address=("x",), versions=versions))
    nobody: Any = None
    silent = replace(learned.world.table, sampler=nobody)
    again = asyncio.run(silent.play(plays, address=("x",), versions=versions, beside=Beside(episodes=played, slots={})))
    assert [(e.turns, e.answer, e.outcome) for e in again] == [(e.turns, e.answer, e.outcome) for e in played]
    assert not {e.id for e in again} & {e.id for e in played}


def test_whoever_speaks_before_the_changed_agent_is_copied_and_whoever_follows_the_same_words(learned: worlds.Stage) -> None:
    moved(learned, "b", 1.0)
    _, found = compared(learned, 512)
    assert all(p.promoted.turns[0] == p.beside.turns[0] for p in found)
    parted = [p for p in found if p.promoted.turns[1].text != p.beside.turns[1].text]
    assert 0 < len(parted) < len(found)
    for p in found:
        if p not in parted:
            assert p.promoted.outcome == p.beside.outcome and p.beside.turns[1].versions == (9,)


@pytest.mark.parametrize("coupling", ["maximal", "inverse_cdf", "none"])
def test_each_team_keeps_its_law_whatever_is_shared(coupling: str, learned: worlds.Stage) -> None:
    """The mean difference is the exact one, by enumeration, within four standard errors."""
    tables = moved(learned, "b", 1.0)
    now = {a: t.learner.weights() for a, t in learned.world.trainees.items()}
    tasks = distinct(learned)
    exact = worlds.accuracy(learned.world.table, tasks, tables) - worlds.accuracy(learned.world.table, tasks, now)
    report, found = compared(learned, 4096, coupling=coupling, method="bernstein")
    d = torch.tensor([p.beside.reward - p.promoted.reward for p in found], dtype=torch.float64)
    assert abs(float(d.mean()) - exact) <= 4.0 * float(d.std()) / math.sqrt(len(d))
    assert report.gain.terms[0].value == pytest.approx(float(d.mean()))
    assert report.discordance == pytest.approx(float((d != 0).double().mean()))


def test_coupled_pairs_differ_least_and_as_often_as_the_laws_ask(learned: worlds.Stage) -> None:
    tables = moved(learned, "b", 0.3)
    reports = {c: compared(learned, 4096, coupling=c, method="bernstein")[0] for c in ("maximal", "inverse_cdf", "none")}
    # Two symbols: shared uniforms are a maximal coupling as well.
    assert reports["maximal"].parted == pytest.approx(reports["inverse_cdf"].parted, abs=0.02)
    assert reports["maximal"].discordance < 0.5 * reports["none"].discordance
    now = learned.world.trainees["b"].learner.weights().tensors
    total = [
        0.5 * float((torch.softmax(now[n], 0) - torch.softmax(tables["b"].tensors[n], 0)).abs().sum()) for n in sorted(now)
    ]
    assert min(total) - 0.02 <= reports["maximal"].parted <= max(total) + 0.02


def test_models_are_coupled_over_messages_of_several_tokens(tmp_path: Path, monkeypatch: Any) -> None:
    """Of a candidate near the promoted model most messages are the same, and all of them with the same weights. The inverse
    CDF parts far more often: mass that moves anywhere shifts every boundary behind it (ALGORITHMS 3.6, G50)."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    stage = worlds.world(worlds.relay("agents.second.max_new_tokens=6", "env.prompts=400"))
    second = stage.world.trainees["second"].learner
    now, versions = second.weights(), stage.position.team.versions
    plays = [Play(task=t, sibling=i) for i in range(4) for t in stage.world.certify[:8]]
    played = asyncio.run(stage.world.table.play(plays, address=("x",), versions=versions))

    def said(weights: Any, coupling: Coupling) -> list[tuple[int, ...]]:
        asyncio.run(stage.world.sampler.publish("second", "candidate", weights, 1))
        other = Beside(episodes=played, slots={}, coupling=coupling)
        slots: dict[str, Slot] = {"second": "candidate"}
        episodes = stage.world.table.play(plays, address=("x",), versions=versions, slots=slots, beside=other)
        return [e.turns[1].ids for e in asyncio.run(episodes)]

    torch.manual_seed(0)
    near = {n: t + 0.02 * t.std().nan_to_num(0.0) * torch.randn_like(t) for n, t in now.tensors.items()}
    parted: dict[str, int] = {}
    ways: tuple[Coupling, ...] = ("maximal", "inverse_cdf")
    for way in ways:
        assert said(now, way) == [e.turns[1].ids for e in played]
        others = said(assemble.weights_of(near), way)
        parted[way] = sum(a != b.turns[1].ids for a, b in zip(others, played, strict=True))
    assert 0 < parted["maximal"] < len(played) // 2 < parted["inverse_cdf"]


# ---- what is concluded -----------------------------------------------------------------------------------------


def episode(outcome: Outcome, *ids: int) -> Episode:
    turn = Turn(
        kind="action", agent="b", seat=0, text=str(ids), prompt_ids=(0,), ids=ids, logprobs=(0.0,) * len(ids),
        versions=(0,) * len(ids),
    )  # fmt: skip
    return Episode(id="e", group="g", task_id="g", versions={"b": 0}, turns=(turn,), answer="", outcome=outcome)


def judged(found: Sequence[Pair], claim: pairs.Claim = USUAL) -> PairsReport:
    options = CertificateOptions(update_pairs=256)
    return pairs.judged(found, options, claim, reward_range=(0.0, 1.0), changed=("b",), pool="p")


def terms(certificate: Certificate) -> dict[str, float]:
    return {t.name: t.value for t in certificate.terms}


def test_a_missing_return_counts_against_whatever_is_claimed() -> None:
    failed, right = episode(Failed(reason="x"), 1), episode(Scored(reward=1.0), 1)
    lost = judged([Pair(promoted=right, beside=failed)] * 64)
    assert lost.missing == 64 and terms(lost.gain)["imputation"] == -1.0 and terms(lost.harm)["imputation"] == 0.0
    won = judged([Pair(promoted=failed, beside=right)] * 64)
    assert terms(won.gain)["imputation"] == 0.0 and terms(won.harm)["imputation"] == -1.0
    assert won.discordance == 1.0
    assert all(terms(c)["paired gain"] == 0.0 for r in (lost, won) for c in (r.gain, r.harm)), "nothing was measured"


def test_what_failed_and_is_word_for_word_the_same_differs_by_nothing() -> None:
    failed, other = episode(Failed(reason="x"), 1), episode(Failed(reason="x"), 2)
    same = judged([Pair(promoted=failed, beside=failed)] * 64)
    assert same.missing == 128 and same.discordance == 0.0 and terms(same.gain)["imputation"] == 0.0
    apart = judged([Pair(promoted=failed, beside=other)] * 64)
    assert apart.missing == 128 and terms(apart.gain)["imputation"] == terms(apart.harm)["imputation"] == -1.0


def test_the_stage_speaks_for_the_promoted_team_and_the_update_for_the_candidate() -> None:
    better = [Pair(promoted=episode(Scored(reward=0.0), 1), beside=episode(Scored(reward=1.0), 2))] * 64
    options = CertificateOptions(stage_pairs=256, delta=0.06)
    update, stage = pairs.update_claim(options, n_agents=3, stage=4), pairs.stage_claim(options, stage=4)
    assert (update.gain, update.harm) == (pytest.approx(0.02), pytest.approx(0.05 / 3))
    assert (stage.gain, stage.harm) == (pytest.approx(0.06), 0.05)
    assert judged(better, update).gain.verdict == "positive" and judged(better, update).harm.verdict == "inconclusive"
    assert judged(better, stage).harm.verdict == "positive" and judged(better, stage).gain.verdict == "inconclusive"
    whole = options.model_copy(update={"run_level": True})
    assert pairs.stage_claim(whole, stage=4).gain == pytest.approx(0.06 * 6 / (math.pi * 4) ** 2)


def test_tokens_are_compared_up_to_the_first_that_differs() -> None:
    one, other = episode(Scored(reward=1.0), 1, 2, 3, 4), episode(Scored(reward=1.0), 1, 2, 4, 4)
    report = judged([Pair(promoted=one, beside=other), Pair(promoted=one, beside=one)])
    assert report.parted == pytest.approx(1 / 7)


def test_pairs_end_at_a_look_that_decides_and_a_fixed_n_is_played_out() -> None:
    stage = two_faced(1.0)
    stage.train(2)
    rows = stage.learner("b").weights().tensors
    better = {n: row + 0.5 * torch.tensor([-1.0, 1.0], dtype=row.dtype) for n, row in rows.items()}
    asyncio.run(stage.world.sampler.publish("b", "candidate", assemble.weights_of(better), 9))
    _, found = compared(stage, 4096, USUAL)
    reports = [judged(found[:n]) for n in range(pairs.WAVE, len(found) + 1, pairs.WAVE)]
    decided = [r.gain.verdict == "positive" or r.harm.verdict == "positive" for r in reports]
    assert len(found) % pairs.WAVE == 0 and len(found) < 4096 and decided == [False] * (len(decided) - 1) + [True]
    assert len(compared(stage, 300, USUAL, method="bernstein")[1]) == 300
    worse = {n: row - 2.0 * torch.tensor([-1.0, 1.0], dtype=row.dtype) for n, row in rows.items()}
    asyncio.run(stage.world.sampler.publish("b", "candidate", assemble.weights_of(worse), 9))
    assert len(compared(stage, 300, USUAL)[1]) < 300
    report, found = compared(stage, 300, USUAL, method="bernstein")
    assert len(found) == 300 and report.harm.verdict == "positive", "a fixed n is fixed, also where harm shows"


# ---- harm ------------------------------------------------------------------------------------------------------


def two_faced(certified: float) -> worlds.Stage:
    """A game in which the last table is paid for saying 1, and on the prompts of the pairs for saying 1 with `certified`."""
    settings = worlds.parity(
        *ON, "algorithm.order=static", "algorithm.stages=2", "agents.b.radius={token=50,message_mean=50}", lr=1.0
    )
    tasks = [Task(id=f"{kind}{i}", env="x", prompt="go", views=("", ""), answer="1") for kind in "tc" for i in range(80)]

    def grade(answers: Sequence[tuple[Task, str]]) -> list[Outcome]:
        def pay(task: Task, said: str) -> float:
            is_right = said.strip() == "1"
            return float(is_right) if task.id[0] == "t" else (certified if is_right else 1.0 - certified)

        return [Scored(reward=pay(task, said)) for task, said in answers]

    stage = worlds.world(settings, tasks=tasks[:80], grade=grade)
    stage.world = replace(stage.world, certify=tasks[80:])
    return stage


def test_a_candidate_that_is_worse_on_the_pairs_is_rejected_and_nothing_of_it_stays() -> None:
    stage = two_faced(0.0)
    stage.train(1)
    learner, before = stage.learner("b"), stage.position
    origin = learner.snapshot()
    report = stage.train(1)[0]
    assert isinstance(report.verdict, Rejected) and report.verdict.reason == "harm" and report.agent == "b"
    assert report.pairs is not None and report.pairs.harm.verdict == "positive" and report.pairs.n < 256
    assert "worse by at least" in report.verdict.detail and report.fingerprint == "" and report.looks[-1].passed
    assert worlds.same(learner.snapshot(), origin)
    assert stage.position.team == before.team and stage.position.agents["b"].streak == 1
    assert stage.position.agents["b"].lr == before.agents["b"].lr, "the rate is halved for the radius alone"
    assert stage.journal.promoted[-1] is None and len(stage.journal.evidence[-1].pairs) == report.pairs.n


def test_the_same_candidate_is_accepted_where_the_pairs_agree_with_it() -> None:
    stage = two_faced(1.0)
    report = stage.train(2)[1]
    assert not isinstance(report.verdict, Rejected)
    assert report.pairs is not None and report.pairs.gain.verdict == "positive" and report.pairs.gain.lower_bound > 0.0


def test_harm_is_rarely_seen_where_there_is_none() -> None:
    """An unchanged candidate parts from nobody: no pair differs, whatever the level."""
    stage = worlds.world(worlds.parity(*ON))
    stage.train(2)
    now = stage.world.trainees["b"].learner.weights()
    asyncio.run(stage.world.sampler.publish("b", "candidate", now, 9))
    usual = pairs.update_claim(CertificateOptions(update_pairs=256), n_agents=2, stage=1)
    report, _ = compared(stage, 256, usual)
    assert (report.n, report.discordance, report.parted) == (256, 0.0, 0.0)
    report, _ = compared(stage, 256, usual, give_up=True)
    assert (report.n, report.gain.verdict, report.harm.verdict) == (64, "inconclusive", "inconclusive")
    assert report.gain.verdict == report.harm.verdict == "inconclusive"


# ---- a run -----------------------------------------------------------------------------------------------------

RUN = (*ON, "certificate.stage_pairs=256", "algorithm.stages=2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "run"
    run.train(worlds.parity(*RUN), run=path)
    return path


def lines(path: Path, kind: str) -> list[dict[str, Any]]:
    return [r for r in records.read_records(path / "stages.jsonl") if r["kind"] == kind]


def test_every_update_and_stage_tells_of_its_pairs(trained: Path) -> None:
    accepted = [u for u in lines(trained, "update") if u["to_version"] is not None]
    assert accepted and all(u["pairs"]["n"] % pairs.WAVE == 0 and u["seconds"]["pairs"] > 0 for u in accepted)
    pool = lines(trained, "start")[0]["splits"]["certify"]
    assert pool["prompts"] >= 64 and all(u["pairs"]["pool"] == pool["sha256"] for u in accepted)
    for stage in lines(trained, "stage"):
        rows = records.read_episodes(trained / records.stage_pairs_file(stage["stage"]))
        assert [r["use"] for r in rows] == ["pair"] * stage["pairs"]["n"] + ["beside"] * stage["pairs"]["n"]
        assert len({r["id"] for r in rows}) == len(rows)


def test_a_stage_without_its_line_is_compared_again_and_comes_to_the_same(trained: Path, tmp_path: Path) -> None:
    import shutil

    again = tmp_path / "run"
    shutil.copytree(trained, again)
    kept = [r for r in records.read_records(again / "stages.jsonl") if not (r["kind"] == "stage" and r["stage"] == 2)]
    records.rewrite_records(again / "stages.jsonl", [r for r in kept if r["kind"] != "end"])
    (again / records.stage_pairs_file(2)).unlink()
    run.train(worlds.parity(*RUN), run=again, resume=True)

    def told(path: Path) -> list[dict[str, Any]]:
        return [{k: v for k, v in line.items() if k != "time"} for line in lines(path, "stage")]

    assert told(again) == told(trained)
    assert baton.verify(again)["holds"]


def test_what_is_configured_of_pairs_may_not_change_on_resume(trained: Path) -> None:
    from baton.errors import RunError

    with pytest.raises(RunError, match=r"certificate\.update_pairs: 256 in the run, 512 asked"):
        run.train(worlds.parity(*RUN, "certificate.update_pairs=512"), run=trained, resume=True)


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["certificate.update_pairs=100"], "update_pairs = 100: below 256 pairs show almost nothing"),
        (
            ["certificate.coupling=none"],
            "coupling has no effect without pairs; remove it, or set update_pairs or stage_pairs",
        ),
        (["certificate.surrogate=true", "certificate.method=bernstein"], "method has no effect without pairs"),
        (["certificate.delta=0.1"], "delta has no effect without pairs; .* or stage_pairs, or surrogate"),
        (["certificate.run_level=true"], "run_level has no effect without pairs"),
        (["certificate.update_pairs=256", "algorithm.name=independent"], "an independent agent learns beside"),
        (["eval.update_pairs=256"], "update_pairs"),
    ],
)
def test_settings_that_say_nothing_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        worlds.parity(*overrides)


def test_too_few_prompts_to_draw_pairs_from_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"certify gets 50 and needs 64 \(evaluation pairs\)"):
        worlds.world(worlds.parity("certificate.update_pairs=256", "env.prompts=200"))


# ---- words -----------------------------------------------------------------------------------------------------


def test_inspect_sets_certificates_side_by_side(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(trained), "--certificates"]) == 0
    text = capsys.readouterr().out
    for words in (
        "published",
        "measured",
        "sum",
        "void (assumed_term)",
        "this update alone",
        "this stage alone",
        "prompt pool",
    ):
        assert words in text, words
    assert main(["inspect", str(trained), "--stage", "1"]) == 0
    assert "of the pairs differ" in capsys.readouterr().out
    assert main(["inspect", str(trained), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"][0]["pairs"]["n"] >= pairs.WAVE


def test_a_run_without_pairs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run.train(worlds.parity("algorithm.stages=1"), run=tmp_path / "run")
    assert main(["inspect", str(tmp_path / "run"), "--certificates"]) == 0
    assert certificates.NO_PAIRS in capsys.readouterr().out


@pytest.mark.parametrize("verdict", ["positive", "inconclusive", "harm", "void"])
def test_the_reserved_words_stand_beside_a_positive_certificate_and_all_that_it_rests_on(verdict: str) -> None:
    right, wrong = episode(Scored(reward=1.0), 1), episode(Scored(reward=0.0), 2)
    made = {
        "positive": [Pair(promoted=wrong, beside=right)] * 64,
        "inconclusive": [Pair(promoted=right, beside=right)] * 64,
        "harm": [Pair(promoted=right, beside=wrong)] * 64,
        "void": [Pair(promoted=wrong, beside=right)] * 3,
    }
    found = records.plain(judged(made[verdict]))
    text = certificates.statement(found, "update")
    assert ("certified improvement" in text) == (verdict == "positive")
    if verdict == "positive":
        for words in ("of mean reward", "on 64 pairs", "confidence 0.95", "for this update alone", "for the prompt pool p"):
            assert words in text, words
    whole = certificates.statement({**found, "is_run_level": True}, "update")
    assert ("confidence 0.95 for the updates of the whole run together" in whole) == (verdict != "harm")


def test_harm_is_told_with_its_own_bound_and_for_the_update_alone() -> None:
    right, wrong = episode(Scored(reward=1.0), 1), episode(Scored(reward=0.0), 2)
    strict = pairs.Claim(gain=1e-4, harm=0.025, is_newer_beside=True)
    found = records.plain(judged([Pair(promoted=right, beside=wrong)] * 64, strict)) | {"is_run_level": True}
    line = {"stage": 10, "agent": "a", "to_version": None, "pairs": found}
    (row,) = certificates.rows([line], [])
    bound = f"{found['harm']['lower_bound']:.4f}".lstrip("0")
    assert row[3:6] == [bound, "worse by that", "64"] and row[7:] == ["0.975", "this update alone"]
    text = certificates.statement(found, "update")
    assert f"worse by at least {bound}" in text and "confidence 0.975 for this update alone" in text


@pytest.mark.parametrize("name", ["team", "order", "stage"])
def test_no_agent_may_have_the_address_of_what_the_team_draws_together(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the name '{name}' is where draws that no agent owns have their keys"):
        worlds.parity(agents=("a", name))
