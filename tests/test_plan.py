"""What a plan says beside what a run then does, and the arithmetic in between."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton import assemble, config, console, records, run
from baton.algorithms.options import CertificateOptions, SatOptions
from baton.cli import main
from baton.config import Config
from baton.core import divergence, trust_region
from baton.engines import adapters as engine_adapters
from baton.engines import local, models, table
from baton.engines.adapters import LoraOptions
from baton.engines.endpoint import Endpoint
from baton.errors import ConfigError
from baton.plan import limits, members, memory, plan, rehearsal, timing, tracing
from baton.plan.members import Member
from e2e.worlds import adapters, parity, relay, router, tree

WIDE = [
    *(f"agents.{n}.radius={{token=50.0, message_mean=50.0}}" for n in (0, 1)),
    *("algorithm.group=1", "algorithm.objective.baseline=batch_mean"),
]
"""Every update has enough to learn from at once and is accepted whole, as plans assume."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def planned(cache: None) -> Any:
    """The plan of a team of tiny models, and the run."""
    return plan(relay(*WIDE), root=Path())


@pytest.fixture(scope="module")
def made(cache: None, tmp_path_factory: pytest.TempPathFactory) -> run.Run:
    opened = run.train(relay(*WIDE), run=tmp_path_factory.mktemp("runs") / "run")
    assert {u["word"] for u in opened.updates} == {"accepted"}
    return opened


# ---- beside the run --------------------------------------------------------------------------------------------


def occupied(path: Path) -> int:
    return sum(-(-p.stat().st_size // 4096) * 4096 for p in path.rglob("*") if p.is_file())


def test_disk_is_what_the_run_leaves(planned: Any, made: run.Run) -> None:
    kept = planned["disk"]["kept"]
    assert occupied(made.path / "state") == pytest.approx(kept["state"], rel=0.02)
    assert occupied(made.path) == pytest.approx(kept["total"], rel=0.05)
    assert planned["disk"]["most"] > kept["total"] and planned["disk"]["written"] > kept["total"]


def test_tokens_are_those_that_the_run_generates(planned: Any, made: run.Run) -> None:
    rows = [row for u in made.updates for row in records.read_episodes(made.path / u["episodes_file"])]
    told = {use: sum(len(t["ids"]) for r in rows if r["use"] == use for t in r["turns"]) for use in ("train", "probe")}
    # These models seldom earn a reward, so that an update draws up to three times as many episodes.
    draws = sum(u["episodes"]["n"] for u in made.updates) / (6 * 32)
    tokens = planned["tokens"]["run"]
    assert {"train": tokens["train"] * draws, "probe": tokens["probe"]} == told
    assert planned["tokens"]["stage"] == {use: n // 3 for use, n in tokens.items()}


def test_shapes_are_those_that_the_run_trains_on(planned: Any, made: run.Run) -> None:
    rows = [r for u in made.updates[:2] for r in records.read_episodes(made.path / u["episodes_file"])]
    for agent in ("first", "second"):
        turns = [t for r in rows if r["use"] == "train" for t in r["turns"] if t["agent"] == agent]
        assert planned["episodes"][agent]["longest_row"] == max(len(t["prompt_ids"]) + len(t["ids"]) for t in turns)
        assert planned["episodes"][agent]["rows"] == 32


def test_seconds_add_up_from_parts_to_stage_to_run(planned: Any) -> None:
    times = planned["time"]
    parts = [times["update"][agent] for agent in ("first", "second")]
    assert all(sum(part[name] for name in timing.PARTS) == pytest.approx(part["total"]) for part in parts)
    assert times["stage"]["total"] == pytest.approx(sum(part["total"] for part in parts))
    assert times["run"] == pytest.approx(3 * times["stage"]["total"])
    assert all(part[name] > 0 for part in parts for name in timing.PARTS)
    assert times["threads"] == 1


def test_a_joint_stage_generates_once_for_all(cache: None) -> None:
    configs = [parity(f"algorithm.name={name}") for name in ("sat", "joint")]
    tokens = [rehearsal.rehearsed(_prepared(config)).tokens(config) for config in configs]
    # Twice the prompts, once; the probe is heard to its end, once, instead of to each agent's turn.
    assert tokens[0]["stage"] == {"train": 2 * 32 * 2, "probe": 16 * (1 + 2)}
    assert tokens[1]["stage"] == {"train": 64 * 2, "probe": 16 * 2}


def _prepared(config: Config) -> assemble.Plan:
    return assemble.prepare(config, root=Path())


# ---- memory ----------------------------------------------------------------------------------------------------


def test_a_model_traced_without_weights_holds_what_the_model_itself_holds(cache: None) -> None:
    folder = models.resolve("tiny:64k")
    rows, width, states = 16, 40, 16
    claimed = tracing.traced(folder, rows=rows, width=width, states=states, compute="float32", kl=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    live = tracing._Live()
    ids = torch.zeros(rows, width - 1, dtype=torch.long)
    with live:
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        chosen = hidden.flatten(0, 1).index_select(0, torch.zeros(states, dtype=torch.long))
        head = model.get_output_embeddings().weight
        law = divergence.log_law(torch.nn.functional.linear(chosen, head), temperature=1.0)
        loss = law.gather(1, torch.zeros(states, 1, dtype=torch.long)).sum()
        with torch.no_grad():
            old = divergence.log_law(torch.nn.functional.linear(chosen.detach(), head), temperature=1.0)
        (loss + divergence.kl(law, old).sum()).backward()
    assert live.peak == pytest.approx(claimed, rel=0.05)
    assert claimed > 4 * 65_104


def test_more_tokens_and_a_backward_hold_more(cache: None) -> None:
    folder = models.resolve("tiny:64k")
    few, many = (tracing.traced(folder, rows=r, width=40, states=r, compute="float32", kl=False) for r in (8, 32))
    read = tracing.traced(folder, rows=32, width=40, states=0, compute="float32", kl=False)
    assert 3.0 < (many - 4 * 65_104) / (few - 4 * 65_104) < 4.5
    assert read < many / 3


def member(name: str, *, item: int = 2, **more: Any) -> Member:
    shape: dict[str, Any] = {"layers": 2, "width": 8, "vocabulary": 16, "kv_per_token": 4, "lora": None, "leaves": False}
    shape |= {"is_trained": True, "learns": True, "whole": 1000, "parameters": 1000, "served": item * 1000, **more}
    return Member(agent=name, folder=Path(name), base=Path(), device="cpu", compute="float32", item=item, **shape)


WORK = {"process": 1, "anchors": 2, "activations": 3, "laws": 5, "decoding": 7, "kv": 11, "scores": 13}
ONE_LOOK: dict[str, Any] = {"line_search": {"halvings": 0}}


def held(team: list[Member], phase: memory.Phase, moved: str = "", **options: Any) -> int:
    """Bytes while the first of the team is updated and the agents named by a letter each have been before."""
    pairs = options.pop("pairs", memory.NO_PAIRS)
    own = SatOptions(**{**ONE_LOOK, **options})
    terms = memory.memory_terms(team, team[0], frozenset(moved), options=own, work=WORK, pairs=pairs)
    return sum(t.bytes for t in terms if phase in t.phases)


@pytest.mark.parametrize(("item", "own"), [(4, 4 + 4), (2, 2 + 4 + 2)])
def test_memory_of_a_parameter_is_counted_by_phase(item: int, own: int) -> None:
    team = [member("a", item=item), member("b", item=item)]
    standing = 1 + 2 * own * 1000
    assert held(team, "sample") == standing + 7 + 11
    # Before the first acceptance: gradient, new moments, a snapshot without moments.
    assert held(team, "step") == standing + (4 + 8 + 4) * 1000 + 2 + 3
    assert held(team, "gate") == standing + (8 + 4) * 1000 + 2 + 5
    # What is written is lent, what is published is a copy in a slot of its own.
    assert held(team, "commit") == standing + (8 + 4 + item + item) * 1000 + 2
    assert held(team, "sample", "ab") - held(team, "sample") == 2 * (8 + item) * 1000
    # Later: the snapshot has moments too, nothing is new.
    assert held(team, "step", "ab") == standing + 2 * (8 + item) * 1000 + (4 + 12) * 1000 + 2 + 3
    start = {"name": "independent"}
    assert held(team, "gate", **start) - held(team, "gate") == 2 * item * 1000


def test_a_line_search_holds_the_whole_step_and_compares_its_largest_tensor_in_fp64() -> None:
    team = [member("a")]
    halvings: dict[str, Any] = {"line_search": {"halvings": 1}}
    assert held(team, "gate", **halvings) - held(team, "gate") == 4 * 1000 + 20 * 8 * 16
    assert held(team, "commit", **halvings) - held(team, "commit") == 4 * 1000
    assert held(team, "step", **halvings) == held(team, "step")
    tries: dict[str, Any] = {"backtrack": {"tries": 2}}
    # The first candidate is kept while the agent is trained again, and each retry is measured against the start.
    assert held(team, "step", **tries) - held(team, "step") == 4 * 1000
    assert held(team, "gate", **tries) - held(team, "gate") == 2 * 4 * 1000 + 20 * 8 * 16


def test_learners_that_rest_hold_nothing_but_their_promoted_slot() -> None:
    big = 10**8
    own: dict[str, Any] = {"parameters": big, "whole": big, "served": 2 * big, "leaves": True}
    team = [member(name, **own) for name in "abc"]
    for moved in ("", "abc"):
        assert held(team, "sample", moved) == 1 + 3 * 2 * big + 7 + 11
        # Masters, copy, moments and gradient of one; what it goes back to is on disk.
        assert held(team, "step", moved) == 1 + 3 * 2 * big + (4 + 2 + 8 + 4) * big + 2 + 3
        # The candidate's slot was emptied and is filled again.
        assert held(team, "commit", moved) == 1 + 3 * 2 * big + (4 + 2 + 8 + 2 + 2) * big + 2
    # Shared episodes are played while whoever was updated last is still awake.
    assert held(team, "sample", "a", name="joint") - held(team, "sample", "a") == (4 + 2 + 8) * big
    assert held(team, "sample", name="joint") == held(team, "sample")
    # A measured order wakes one after another.
    assert held(team, "order", "ab", order="greedy") == 1 + 3 * 2 * big + (4 + 2 + 8) * big + 7 + 11 + 13


def test_a_small_learner_that_rests_reads_its_state_whole() -> None:
    team = [member("a", leaves=True)]
    keeps = [member("a")]
    assert held(team, "step") - held(keeps, "step") == 0
    assert held(team, "step", "a") == held(keeps, "step", "a") - 2 * 1000, "but its stale candidate is gone"


def test_adapters_share_one_base_and_hold_their_own_numbers_alone() -> None:
    own: dict[str, Any] = {"lora": LoraOptions(), "parameters": 10, "served": 40}
    one, three = [member("a", **own)], [member(name, **own) for name in "abc"]
    assert held(one, "sample") == 1 + 2 * 1000 + 10 * (4 + 4) + 7 + 11
    assert held(three, "sample") - held(one, "sample") == 2 * 10 * (4 + 4)
    assert held(one, "step") == 1 + 2 * 1000 + 10 * (4 + 4 + 4 + 8 + 4) + 2 + 3
    elsewhere = [*one, replace(three[1], device="cuda:0")]
    assert held(elsewhere, "sample") - held(one, "sample") == 2 * 1000 + 10 * (4 + 4)
    # Published again, an adapter gets new tensors beside its old candidate.
    assert held(one, "commit", "a") - held(one, "gate", "a") == 10 * (4 + 4) - 5


def test_a_frozen_teammate_holds_its_promoted_slot_alone() -> None:
    team = [member("a"), member("b", is_trained=False, learns=False)]
    for phase in memory.PHASES:
        assert held(team, phase, "a") - held(team[:1], phase, "a") == 2 * 1000


def test_an_adapter_traced_without_weights_holds_what_itself_on_its_base_holds(cache: None) -> None:
    prepared = _prepared(adapters())
    (m, _) = members.present(prepared, rehearsal.rehearsed(prepared))
    assert 0 < m.parameters < m.whole == 65_104 and m.base == prepared.bases["first"] != m.folder
    rows, width, states = 16, 40, 16
    shape: dict[str, Any] = {"rows": rows, "width": width, "states": states, "compute": "float32", "kl": False}
    claimed = tracing.traced(m.folder, **shape)
    net = local.Bases().adapted(m.folder, dtype=torch.float32, device=torch.device("cpu"), is_trained=True)
    live = tracing._Live()
    with live:
        hidden = net.hidden(torch.zeros(rows, width - 1, dtype=torch.long))
        chosen = hidden.flatten(0, 1).index_select(0, torch.zeros(states, dtype=torch.long))
        net.law(chosen, temperature=1.0).gather(1, torch.zeros(states, 1, dtype=torch.long)).sum().backward()
    assert live.peak == pytest.approx(claimed, rel=0.05)


def test_the_peak_is_the_largest_phase_and_the_sum_of_what_is_named(planned: Any) -> None:
    memory = planned["memory"]
    assert memory["peak"] == max(memory["phases"].values()) == sum(memory["terms"].values())
    assert memory["terms"]["process: python, libraries, tasks"] > 100e6
    # From the second stage on every agent has moments and a candidate slot.
    moments = [count for name, count in memory["terms"].items() if name.endswith("AdamW moments")]
    assert sum(moments) == 2 * 8 * 65_104
    assert memory["terms"]["sampler: candidate slots"] == 2 * 4 * 65_104


def test_a_machine_that_cannot_hold_the_test_gets_no_times(cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_available", lambda: 1000)
    monkeypatch.setattr(timing, "_measured", lambda *_: pytest.fail("it measured"))
    times = plan(relay(), root=Path())["time"]
    assert times["run"] is None and "not timed" in times["measured"]


@pytest.mark.parametrize(("load", "said"), [(0.1, False), (64.0, True)])
def test_a_busy_machine_is_said_beside_its_times(
    cache: None, monkeypatch: pytest.MonkeyPatch, load: float, said: bool
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    report = plan(parity(), root=Path())
    assert any("busy machine" in line for line in console.plan_lines(report)) == said


def test_layers_that_were_not_timed_take_what_the_timed_ones_took_each() -> None:
    assert timing._extended([{"step": 2.0}, {"step": 5.0}], (1, 4), 30) == {"step": 2.0 + 29 * 1.0}
    assert timing._extended([{"step": 2.0}, {"step": 1.9}], (1, 4), 30) == {"step": 2.0}


def test_a_cut_down_model_keeps_the_width_and_runs_in_the_engine(cache: None, tmp_path: Path) -> None:
    prepared = _prepared(relay())
    update = rehearsal.rehearsed(prepared)
    m = members.present(prepared, update)[0]
    before = torch.random.get_rng_state()
    folder = timing._cut_down(m, 1, tmp_path / "one")
    assert torch.equal(before, torch.random.get_rng_state())
    read = models.read_config(folder)
    assert read["num_hidden_layers"] == 1 and read["hidden_size"] == m.width
    seconds = run.complete(timing._timed_update(prepared, m, folder, update, tmp_path))
    assert set(seconds) == {"request", *timing.PARTS[1:]} and all(value > 0 for value in seconds.values())


# ---- lengths ---------------------------------------------------------------------------------------------------

LONG = ["agents.0.max_new_tokens=6", "agents.1.max_new_tokens=3"]


def lengths(config: Config, answer_tokens: int | None = None) -> list[set[int]]:
    update = rehearsal.rehearsed(_prepared(config), answer_tokens)
    return [{len(t.ids) for e in update.train for t in e.turns if t.seat == seat} for seat in (0, 1)]


def test_messages_are_as_long_as_allowed_as_demonstrated_or_as_told(cache: None) -> None:
    assert lengths(relay(*LONG)) == [{6}, {3}]
    assert lengths(relay(*LONG), 4) == [{4}, {3}]
    warm = "agents.0.warm_start={steps=1, batch=4, held_out=4, demonstrations=16}"
    # One symbol and the id that ends the message.
    assert lengths(relay(*LONG, warm)) == [{2}, {3}]


def test_a_longer_message_is_a_longer_prompt_for_the_next_seat(cache: None) -> None:
    def prompt(answer: int) -> int:
        update = rehearsal.rehearsed(_prepared(relay(*LONG)), answer)
        return max(len(t.prompt_ids) for e in update.train for t in e.turns if t.seat == 1)

    assert prompt(6) - prompt(1) == 5


# ---- who speaks, and who is trained -----------------------------------------------------------------------------


def speakers(settings: Config) -> list[tuple[str, ...]]:
    update = rehearsal.rehearsed(_prepared(settings))
    return [tuple(t.agent for t in e.turns) for e in update.train]


def test_where_messages_decide_who_is_next_everybody_speaks_in_turn_and_the_plan_says_so(cache: None) -> None:
    settings = router("protocol.max_turns=2")
    assert set(speakers(settings)) == {("r", "x", "y", "r", "x", "y")}
    (note,) = rehearsal.notes(_prepared(settings), rehearsal.rehearsed(_prepared(settings)))
    assert "router" in note and "(2)" in note
    assert rehearsal.notes(_prepared(parity()), rehearsal.rehearsed(_prepared(parity()))) == []


def debate(*overrides: str) -> Config:
    return config.parse({**tree("abc"), "protocol": {"name": "debate", "rounds": 2}}, overrides)


def test_a_debates_probe_is_heard_to_the_end_of_the_round_of_an_agents_last_turn(cache: None) -> None:
    update = rehearsal.rehearsed(_prepared(debate()))
    assert {len(e.turns) for e in (*update.train, *update.probe)} == {6}
    assert {name: {len(e.turns) for e in heard} for name, heard in update.probe_until.items()} == {
        name: {6} for name in "abc"
    }
    # Each of its turns is told apart from its other ones, and trained on.
    assert all(batch.batch.n_act == 2 * 32 for batch in update.batches.values())


def test_a_chains_probe_is_heard_to_an_agents_last_turn(cache: None) -> None:
    update = rehearsal.rehearsed(_prepared(parity("protocol.rounds=2", "protocol.sees=all")))
    assert {name: {len(e.turns) for e in heard} for name, heard in update.probe_until.items()} == {"a": {3}, "b": {4}}


def test_a_rotating_chain_is_rehearsed_from_every_seat(cache: None) -> None:
    assert {said[0] for said in speakers(parity("protocol.rotate=true"))} == {"a", "b"}


def test_episodes_that_a_stage_reuses_are_played_once_and_trained_on_by_all(cache: None) -> None:
    fresh, reused = parity(), parity("algorithm.data=reuse")
    update = rehearsal.rehearsed(_prepared(reused))
    assert len(update.train) == 2 * 32 and {b.batch.n_rows for b in update.batches.values()} == {64}
    tokens, other = update.tokens(reused)["stage"], rehearsal.rehearsed(_prepared(fresh)).tokens(fresh)["stage"]
    assert tokens == other == {"train": 2 * 32 * 2, "probe": 16 * (1 + 2)}
    assert any("played once" in note for note in rehearsal.notes(_prepared(reused), update))


def test_pairs_are_played_beside_the_candidate_and_a_stages_start_has_slots_of_its_own() -> None:
    team = [member("a"), member("b")]
    update, stage = CertificateOptions(update_pairs=256), CertificateOptions(stage_pairs=256)
    assert held(team, "commit", pairs=update) == held(team, "commit") + 7 + 11 + 11
    assert held(team, "sample", pairs=update) == held(team, "sample")
    assert held(team, "sample", pairs=stage) == held(team, "sample"), "no stage has ended yet"
    assert held(team, "sample", "a", pairs=stage) == held(team, "sample", "a") + 2 * 2 * 1000


def test_what_a_surrogate_takes_is_counted(cache: None) -> None:
    usual, whole, few = (
        plan(parity("env.prompts=3000", f"gate.probe_prompts={prompts}", f"certificate.surrogate={is_on}"), root=Path())
        for prompts, is_on in ((500, "false"), (500, "true"), (499, "true"))
    )
    # b speaks last: its gate heard whole episodes before. a's is played one message further.
    assert usual["tokens"]["stage"]["probe"] == 500 * (1 + 2) and whole["tokens"]["stage"]["probe"] == 500 * (2 + 2)
    assert few["tokens"]["stage"]["probe"] == 499 * (1 + 2), "too few are not played out"
    assert whole["time"]["stage"]["surrogate"] > 0.0
    assert "surrogate" not in usual["time"]["stage"] and "surrogate" not in few["time"]["stage"]
    logs = [p["disk"]["logs_of_an_update"]["episodes"] for p in (usual, whole)]
    assert logs[1] > logs[0]


def test_a_surrogate_scores_while_the_candidate_waits_to_be_committed() -> None:
    team = [member("a"), member("b")]
    surrogate = CertificateOptions(surrogate=True)
    assert held(team, "commit", pairs=surrogate) == held(team, "commit") + 7 + 11
    assert held(team, "sample", pairs=surrogate) == held(team, "sample")


def test_what_pairs_take_is_counted_at_most(cache: None) -> None:
    usual, paired = (
        plan(parity("env.prompts=400", *more), root=Path())
        for more in ((), ("certificate.update_pairs=256", "certificate.stage_pairs=512"))
    )
    assert paired["tokens"]["stage"]["pairs"] == 2 * (2 * 256 + 512) * 2 and "pairs" not in usual["tokens"]["stage"]
    assert paired["time"]["stage"]["pairs, at most"] > 0 and "pairs, at most" not in usual["time"]["stage"]
    assert paired["disk"]["kept"]["logs"] > usual["disk"]["kept"]["logs"]
    assert any("in pairs" in line for line in console.plan_lines(paired))


def test_what_a_measured_order_takes_is_counted_once_a_stage(cache: None) -> None:
    usual, measured = plan(parity(), root=Path()), plan(parity("algorithm.order=greedy"), root=Path())
    assert measured["tokens"]["stage"]["order"] == 64 * 2 and "order" not in usual["tokens"]["stage"]
    assert measured["time"]["stage"]["order"] > 0 and "order" not in usual["time"]["stage"]
    assert "order" in measured["memory"]["phases"] and "order" not in usual["memory"]["phases"]
    assert measured["disk"]["kept"]["logs"] > usual["disk"]["kept"]["logs"] + 2 * 4096


def test_retries_are_said_to_be_left_out(cache: None) -> None:
    settings = parity("algorithm.backtrack.tries=3")
    (note,) = rehearsal.notes(_prepared(settings), rehearsal.rehearsed(_prepared(settings)))
    assert "3 times" in note


def check_files(made: run.Run, report: Any) -> None:
    """Every version and every training state of the run takes what the plan says."""
    for agent, files in made.files.items():
        said = report["disk"]["weights_of_a_version"][agent]
        assert occupied(made.path / files["weights"]) == pytest.approx(said - 4096, rel=0.02)
        if files["training"]:
            size = (made.path / files["training"]).stat().st_size  # with a header that only files this small are told by
            assert size == pytest.approx(report["disk"]["training_state"][agent], rel=0.15)


def test_a_frozen_teammate_is_played_with_and_never_updated(cache: None, tmp_path: Path) -> None:
    settings = relay("agents.first.trainable=false", "agents.first.lr=auto", "agents.first.radius=preset", *WIDE[1:])
    report: Any = plan(settings, root=Path())
    made = run.train(settings, run=tmp_path / "run")
    assert [a["kind"] for a in report["agents"]] == ["frozen", "trained"]
    assert set(report["time"]["update"]) == set(report["disk"]["training_state"]) == {"second"}
    assert report["tokens"]["stage"]["train"] == 32 * 2, "one update a stage, and both speak"
    check_files(made, report)
    assert not made.files["first"]["training"] and made.files["second"]["training"]
    assert [row["agent"] for row in report["speed_limit"]["agents"]] == ["second"]


def test_an_endpoint_says_words_that_nobody_trains_on(cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Endpoint, "check", lambda self: None)
    own = tree("ab")
    own["agents"][0] = {"name": "a", "model": "endpoint:http://127.0.0.1:9/v1", "trainable": False, "system": ""}
    settings = config.parse(own, ["agents.a.max_new_tokens=5"])
    report: Any = plan(settings, root=Path())
    update = rehearsal.rehearsed(_prepared(settings))
    assert all(len(e.turns[0].text.split()) == 5 and not e.turns[0].ids for e in update.train)
    assert list(report["episodes"]) == list(report["time"]["update"]) == ["b"]
    assert report["agents"][0] == {"agent": "a", "kind": "endpoint", "max_new_tokens": 5}
    assert "'a' answers from an endpoint: as if with 5 words" in report["notes"][0]
    assert "endpoint" in "\n".join(console.plan_lines(report))


def test_prompts_that_outgrow_a_context_are_warned_about(cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "CONTEXT_LENGTH", 100)
    settings = debate(*(f"agents.{name}.max_new_tokens=20" for name in "abc"))
    update = rehearsal.rehearsed(_prepared(settings))
    assert set(update.too_long) == set("abc")
    assert max(len(t.prompt_ids) + 20 for e in update.train for t in e.turns) == 100
    assert "context" in rehearsal.notes(_prepared(settings), update)[0]


def test_a_plan_of_adapters_is_what_their_run_leaves(cache: None, tmp_path: Path) -> None:
    settings = adapters(*WIDE)
    report: Any = plan(settings, root=Path())
    made = run.train(settings, run=tmp_path / "run")
    check_files(made, report)
    assert made.files["first"]["training"]
    assert report["memory"]["terms"]["bases that adapters share"] == 4 * 65_104
    assert report["agents"][0]["base_parameters"] == 65_104 > report["agents"][0]["parameters"] * 2


def test_a_cut_down_adapter_lies_on_a_cut_down_base_and_wakes_in_the_engine(cache: None, tmp_path: Path) -> None:
    prepared = _prepared(adapters("engine.resting=disk", "algorithm.order=greedy"))
    update = rehearsal.rehearsed(prepared)
    m = members.present(prepared, update)[0]
    assert m.leaves
    folder = timing._cut_down(m, 1, tmp_path / "one")
    assert models.read_config(engine_adapters.base_of(folder))["num_hidden_layers"] == 1
    seconds = run.complete(timing._timed_update(prepared, m, folder, update, tmp_path))
    assert set(seconds) == {"request", "score", *timing.PARTS[1:]} and all(value > 0 for value in seconds.values())


# ---- the speed limit -------------------------------------------------------------------------------------------


def limit(*overrides: str, start: float = 0.1, goal: float = 0.98) -> Any:
    config = parity(*overrides)
    return limits.record(config, rehearsal.rehearsed(_prepared(config)), start, goal)


def test_the_speed_limit_of_one_token_is_the_specifications(cache: None) -> None:
    found = limit("gate.preset=default")
    for row in found["agents"]:
        assert row["tokens"] == 1.0
        assert row["token"] == {"delta": 0.05, "updates": 8, "greedy": 8}
        assert row["message_mean"] == {"delta": 0.01, "updates": 16, "greedy": 16}
    assert found["is_exact"] and found["length"] == pytest.approx(2.2142974)
    # Both agents' updates add up.
    assert found["stages_needed"] == {"token": 4, "message_mean": 8}
    assert [text.split()[1] for text in found["warnings"]] == ["token", "message_mean"]


def test_a_plan_with_stages_enough_is_not_warned_about(cache: None) -> None:
    assert limit("gate.preset=default", "algorithm.stages=8")["warnings"] == []
    (text,) = limit("gate.preset=default", "algorithm.stages=7")["warnings"]
    assert "message_mean" in text and "8 stages" in text and "algorithm.stages" in text


def test_tokens_widen_what_an_update_may_do(cache: None) -> None:
    config = parity("gate.preset=default", "agents.0.max_new_tokens=5")
    row, other = limits.record(config, rehearsal.rehearsed(_prepared(config)), 0.1, 0.98)["agents"]
    assert row["tokens"] == 5.0 and other["tokens"] == 1.0
    assert row["token"]["updates"] == 4 == -(-trust_region.speed_limit(0.1, 0.98, delta=0.25) // 1)


def test_one_direction_is_said_to_hold_for_small_steps_only(cache: None) -> None:
    assert not limit("gate.direction=old_new")["is_exact"]


def test_a_tiny_radius_is_not_searched_step_by_step(cache: None) -> None:
    row = limit("agents.0.radius={token=1e-10, message_mean=1e-10}")["agents"][0]
    assert row["token"]["updates"] > 100_000 and "greedy" not in row["token"]


@pytest.mark.parametrize(("start", "goal"), [(0.9, 0.5), (0.0, 0.5), (0.5, 1.0)])
def test_a_goal_that_is_no_gain_is_refused(start: float, goal: float) -> None:
    with pytest.raises(ConfigError, match="lower first"):
        plan(parity(), root=Path(), start=start, goal=goal)


# ---- from outside ----------------------------------------------------------------------------------------------


def test_the_command_says_every_part_and_what_it_rests_on(
    cache: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "parity.toml"
    path.write_text(parity().to_toml())
    assert main(["plan", str(path), "--from", "0.1", "--to", "0.98"]) == 0
    out = capsys.readouterr().out
    for text in ("an estimate", "memory ", "disk ", "time ", "generated tokens", "speed limit", "0.1 -> 0.98", "a stage"):
        assert text in out
    assert all(len(line) <= 140 for line in out.splitlines())
    assert main(["plan", str(path), "--json", "--answer-tokens", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kind"] == "plan" and report["speed_limit"]["from"] == 0.25


@pytest.mark.parametrize("words", [["--from", "2"], ["--to", "x"], ["--answer-tokens", "0"], ["--set", "seeed=1"]])
def test_the_command_refuses_bad_usage_in_one_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "parity.toml"
    path.write_text(parity().to_toml())
    assert main(["plan", str(path), *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
