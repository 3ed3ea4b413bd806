"""What a plan says beside what a run then does, and the arithmetic in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton import assemble, console, plan, records, run
from baton.cli import main
from baton.config import Config
from baton.core import divergence, trust_region
from baton.engines import models
from baton.errors import ConfigError
from e2e.worlds import parity, relay

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
    return plan.plan(relay(*WIDE), root=Path())


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
    assert all(sum(part[name] for name in plan.PARTS) == pytest.approx(part["total"]) for part in parts)
    assert times["stage"]["total"] == pytest.approx(sum(part["total"] for part in parts))
    assert times["run"] == pytest.approx(3 * times["stage"]["total"])
    assert all(part[name] > 0 for part in parts for name in plan.PARTS)
    assert times["threads"] == 1


def test_a_joint_stage_generates_once_for_all(cache: None) -> None:
    configs = [parity(f"algorithm.name={name}") for name in ("sat", "joint")]
    tokens = [plan.rehearsed(_prepared(config)).tokens(config) for config in configs]
    # Twice the prompts, once; the probe is heard to its end, once, instead of to each agent's turn.
    assert tokens[0]["stage"] == {"train": 2 * 32 * 2, "probe": 16 * (1 + 2)}
    assert tokens[1]["stage"] == {"train": 64 * 2, "probe": 16 * 2}


def _prepared(config: Config) -> assemble.Plan:
    return assemble.prepare(config, root=Path())


# ---- memory ----------------------------------------------------------------------------------------------------


def test_a_model_traced_without_weights_holds_what_the_model_itself_holds(cache: None) -> None:
    folder = models.resolve("tiny:64k")
    rows, width, states = 16, 40, 16
    claimed = plan.traced(folder, rows=rows, width=width, states=states, compute="float32", kl=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    live = plan._Live()
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
    few, many = (plan.traced(folder, rows=r, width=40, states=r, compute="float32", kl=False) for r in (8, 32))
    read = plan.traced(folder, rows=32, width=40, states=0, compute="float32", kl=False)
    assert 3.0 < (many - 4 * 65_104) / (few - 4 * 65_104) < 4.5
    assert read < many / 3


def member(name: str, *, item: int) -> plan._Member:
    shape: dict[str, Any] = {"layers": 2, "width": 8, "vocabulary": 16, "kv_per_token": 4}
    return plan._Member(
        agent=name, folder=Path(), parameters=1000, served=item * 1000, compute="float32", item=item, **shape
    )


WORK = {"process": 1, "anchors": 2, "activations": 3, "laws": 5, "decoding": 7, "kv": 11}


def held(terms: list[plan.Term], phase: plan.Phase) -> int:
    return sum(t.bytes for t in terms if phase in t.phases)


@pytest.mark.parametrize(("item", "own"), [(4, 4 + 4), (2, 2 + 4 + 2)])
def test_memory_of_a_parameter_is_counted_by_phase(item: int, own: int) -> None:
    team = [member("a", item=item), member("b", item=item)]
    terms = plan.memory_terms(team, team[0], frozenset(), has_start=False, work=WORK)
    standing = 1 + 2 * own * 1000
    assert held(terms, "sample") == standing + 7 + 11
    # Before the first acceptance: gradient, new moments, a snapshot without moments.
    assert held(terms, "step") == standing + (4 + 8 + 4) * 1000 + 2 + 3
    assert held(terms, "commit") == standing + (8 + 4 + 12 + 12 + item + item) * 1000 + 2
    later = plan.memory_terms(team, team[0], frozenset({"a", "b"}), has_start=False, work=WORK)
    assert held(later, "sample") - held(terms, "sample") == 2 * (8 + item) * 1000
    with_start = plan.memory_terms(team, team[0], frozenset(), has_start=True, work=WORK)
    assert held(with_start, "gate") - held(terms, "gate") == 2 * item * 1000


def test_the_peak_is_the_largest_phase_and_the_sum_of_what_is_named(planned: Any) -> None:
    memory = planned["memory"]
    assert memory["peak"] == max(memory["phases"].values()) == sum(memory["terms"].values())
    assert memory["terms"]["process: python, libraries, tasks"] > 100e6
    # From the second stage on every agent has moments and a candidate slot.
    assert memory["terms"]["learners: AdamW moments"] == 2 * 8 * 65_104
    assert memory["terms"]["sampler: candidate slots"] == 2 * 4 * 65_104


def test_a_machine_that_cannot_hold_the_test_gets_no_times(cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_available", lambda: 1000)
    monkeypatch.setattr(plan, "_measured", lambda *_: pytest.fail("it measured"))
    times = plan.plan(relay(), root=Path())["time"]
    assert times["run"] is None and "not timed" in times["measured"]


@pytest.mark.parametrize(("load", "said"), [(0.1, False), (64.0, True)])
def test_a_busy_machine_is_said_beside_its_times(
    cache: None, monkeypatch: pytest.MonkeyPatch, load: float, said: bool
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    report = plan.plan(parity(), root=Path())
    assert any("busy machine" in line for line in console.plan_lines(report)) == said


def test_layers_that_were_not_timed_take_what_the_timed_ones_took_each() -> None:
    assert plan._extended([{"step": 2.0}, {"step": 5.0}], (1, 4), 30) == {"step": 2.0 + 29 * 1.0}
    assert plan._extended([{"step": 2.0}, {"step": 1.9}], (1, 4), 30) == {"step": 2.0}


def test_a_cut_down_model_keeps_the_width_and_runs_in_the_engine(cache: None, tmp_path: Path) -> None:
    config = relay()
    prepared = _prepared(config)
    update = plan.rehearsed(prepared)
    m = plan._Member.of(prepared, prepared.seats[0], update)
    before = torch.random.get_rng_state()
    folder = plan._cut_down(m, 1, tmp_path / "one")
    assert torch.equal(before, torch.random.get_rng_state())
    read = models.read_config(folder)
    assert read["num_hidden_layers"] == 1 and read["hidden_size"] == m.width
    seconds = run.complete(plan._timed_update(prepared, m, folder, update, tmp_path))
    assert set(seconds) == {"request", *plan.PARTS[1:]} and all(value > 0 for value in seconds.values())


# ---- lengths ---------------------------------------------------------------------------------------------------

LONG = ["agents.0.max_new_tokens=6", "agents.1.max_new_tokens=3"]


def lengths(config: Config, answer_tokens: int | None = None) -> list[set[int]]:
    update = plan.rehearsed(_prepared(config), answer_tokens)
    return [{len(t.ids) for e in update.train for t in e.turns if t.seat == seat} for seat in (0, 1)]


def test_messages_are_as_long_as_allowed_as_demonstrated_or_as_told(cache: None) -> None:
    assert lengths(relay(*LONG)) == [{6}, {3}]
    assert lengths(relay(*LONG), 4) == [{4}, {3}]
    warm = "agents.0.warm_start={steps=1, batch=4, held_out=4, demonstrations=16}"
    # One symbol and the id that ends the message.
    assert lengths(relay(*LONG, warm)) == [{2}, {3}]


def test_a_longer_message_is_a_longer_prompt_for_the_next_seat(cache: None) -> None:
    def prompt(answer: int) -> int:
        update = plan.rehearsed(_prepared(relay(*LONG)), answer)
        return max(len(t.prompt_ids) for e in update.train for t in e.turns if t.seat == 1)

    assert prompt(6) - prompt(1) == 5


# ---- the speed limit -------------------------------------------------------------------------------------------


def limit(*overrides: str, start: float = 0.1, goal: float = 0.98) -> Any:
    config = parity(*overrides)
    return plan._limits(config, plan.rehearsed(_prepared(config)), start, goal)


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
    row, other = plan._limits(config, plan.rehearsed(_prepared(config)), 0.1, 0.98)["agents"]
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
        plan.plan(parity(), root=Path(), start=start, goal=goal)


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
