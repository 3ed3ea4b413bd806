"""The claims: what they share, and that each computes what it says (by enumeration that shares nothing with it)."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import claim
import conflict
import drift
import numpy as np
import pytest
import worlds

from baton import records
from baton.core.keyed import key
from baton.engines.engine import Request
from baton.engines.table import TableCodec, TableLearner
from baton.errors import MissingError, RunError
from reference import mdp

# ---- results that outlive the process ----------------------------------------------------------------------------------

ARMS, SEEDS = ("one", "other"), (0, 1, 2)
SETTINGS = {"claim": "test", "sizes": (2, 3)}


def compute(folder: Path | None, *, dies_at: int = -1) -> tuple[list[float], int]:
    """Every arm's every seed, and how many of them had to be computed; or SIGKILL amid one."""
    computed = 0

    def work(arm: str, seed: int) -> dict[str, Any]:
        nonlocal computed
        if computed == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        computed += 1
        return {"value": (seed + 1) / (3 if arm == "one" else 7), "sizes": {2: (1, 2)}}

    with claim.results(folder, __file__, SETTINGS) as kept:
        for seed, arm in itertools.product(SEEDS, ARMS):
            kept.of(arm, seed, lambda arm=arm, seed=seed: work(arm, seed))
        return [v for arm in ARMS for v in kept.values(arm, SEEDS, lambda result: result["value"])], computed


def until_killed(folder: str) -> None:
    compute(Path(folder), dies_at=4)


def test_a_claim_goes_on_behind_the_last_result_that_a_kill_left(tmp_path: Path) -> None:
    alone, computed = compute(None)
    assert computed == 6
    assert worlds.in_its_own_process(until_killed, str(tmp_path)) == -signal.SIGKILL
    file = tmp_path / "results.jsonl"
    # Killed amid the next line as well: half of it is there.
    with file.open("a") as handle:
        handle.write('{"schema":1,"kind":"result","arm":"one","se')
    assert compute(tmp_path) == (alone, 2)
    assert compute(tmp_path) == (alone, 0)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["configuration"] + ["result"] * 6
    assert len({(line["arm"], line["seed"]) for line in lines[1:]}) == 6


@pytest.mark.parametrize("change", ["settings.sizes", "settings.claim", "code", "versions.torch"])
def test_results_of_another_configuration_are_refused_by_name(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute(tmp_path)
    kept = (tmp_path / "results.jsonl").read_bytes()
    settings: Mapping[str, Any] = SETTINGS
    if change == "code":
        monkeypatch.setattr(claim, "code", lambda script: "0" * 64)
    elif change == "versions.torch":
        monkeypatch.setattr(claim, "where", lambda: {"versions": {"baton-rl": "0.1.0", "torch": "1.0", "transformers": "5"}})
    else:
        settings = {**SETTINGS, change.removeprefix("settings."): "changed"}
    refused = pytest.raises(RunError, match=rf"another configuration: {change}.* --keep")
    with refused, claim.results(tmp_path, __file__, settings):
        pytest.fail("results of another configuration were given out")
    assert (tmp_path / "results.jsonl").read_bytes() == kept


def test_the_code_of_a_result_is_the_package_the_room_and_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("one")
    first = claim.code(script)
    script.write_text("two")
    assert claim.code(script) != first and claim.code(script) == claim.code(script)


def test_two_processes_do_not_write_into_one_folder(tmp_path: Path) -> None:
    with claim.results(tmp_path, __file__, SETTINGS), pytest.raises(RunError, match="in use by another process"):
        compute(tmp_path)


def test_a_fresh_result_is_what_a_second_call_reads(tmp_path: Path) -> None:
    with claim.results(tmp_path, __file__, SETTINGS) as kept:
        fresh = kept.of("one", 0, lambda: {"pair": (1, 2), 3: math.inf})
    with claim.results(tmp_path, __file__, SETTINGS) as kept:
        assert kept.of("one", 0, lambda: pytest.fail("computed again")) == fresh == {"pair": [1, 2], "3": math.inf}


# ---- contrasts and the last line ---------------------------------------------------------------------------------------


def test_a_contrast_is_taken_within_the_seed_and_refuses_a_seed_that_one_arm_lacks() -> None:
    """Seeds differ by 100, arms by 1 +- .1: only pairs can see it."""
    kept = claim.Results()
    for seed in (3, 1, 2):
        kept.of("one", seed, lambda seed=seed: 100.0 * seed + 1.0 + 0.1 * (seed - 2))
    for seed in (1, 2, 3):
        kept.of("other", seed, lambda seed=seed: 100.0 * seed)
    found = kept.contrast("one", "other", (1, 2, 3), float)
    # Student's t with two degrees of freedom, .975: 4.3026527.
    half = 4.3026527 * 0.1 / math.sqrt(3)
    assert (found.value, found.low, found.high) == pytest.approx((1.0, 1.0 - half, 1.0 + half), abs=1e-6)
    assert found.n == 3 and found.method == "student_paired"
    kept.of("one", 4, lambda: 401.0)
    with pytest.raises(MissingError, match="arm 'other' has no result of seed 4"):
        kept.contrast("one", "other", (1, 2, 3, 4), float)


@pytest.mark.parametrize(("holds", "code"), [((True, True), 0), ((True, False), 1)])
def test_the_last_line_is_json_and_the_exit_code_asks_for_every_bar(
    holds: tuple[bool, bool], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    bars: claim.Bars = {f"bar {i}": (1.0, 2.0, ok) for i, ok in enumerate(holds)}
    interval = claim.mean_interval([0.25, 0.5])
    assert claim.last_line("test", quick=True, figures={"x": interval}, bars=bars) == code
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(line) == {"name", "quick", "figures", "bars", "machine", "versions"}
    assert line["figures"]["x"]["value"] == 0.375
    assert [bar["holds"] for bar in line["bars"].values()] == list(holds)


def test_an_interval_over_one_seed_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for script in (conflict, drift):
        with pytest.raises(SystemExit) as stopped:
            script.main(["--seeds", "1"])
        assert stopped.value.code == 2 and "needs at least 2" in capsys.readouterr().err


# ---- the conflict game -------------------------------------------------------------------------------------------------


def test_payoffs_are_what_their_family_says() -> None:
    game = conflict.conflict(0)
    for p in np.linspace(0.0, 1.0, 21):
        assert game.worth([(1 - p, p)] * 2) == pytest.approx(4 * p - 5 * p * p)
    assert max(game.worth([(1 - p, p)] * 2) for p in np.linspace(0, 1, 1001)) == pytest.approx(conflict.ALIKE)
    for seed in range(4):
        added, whole = conflict.additive(seed), conflict.whole(seed)
        n = 2 + seed % 2
        for pays in (added.pays, whole.pays):
            assert len(pays) == 3**n and min(pays.values()) == 0.0 and max(pays.values()) == 1.0
        swaps = [(said, "0" + said[1:]) for said in added.pays if said[0] != "0"]
        gains = {said[0]: set[float]() for said, _ in swaps}
        for said, other in swaps:
            gains[said[0]].add(round(added.pays[said] - added.pays[other], 9))
        assert all(len(found) == 1 for found in gains.values()), "what an agent's symbol adds depends on nobody else"
    assert conflict.whole(0).pays != conflict.whole(2).pays


def test_on_a_grid_every_pair_of_messages_is_as_frequent_as_it_is_probable() -> None:
    levels, state, laws = 16, (5,), {"a": (0.7, 0.3), "b": (0.25, 0.75)}
    sampler = conflict.Watched(dict.fromkeys(laws, TableCodec(("0", "1"))), levels)

    async def said(agent: str) -> list[int]:
        learner = TableLearner(agent, 2)
        learner.set(state, [math.log(p) for p in laws[agent]])
        await sampler.publish(agent, "promoted", learner.weights(), 3)
        asked = [
            Request(id=f"{e}", agent=agent, slot="promoted", prompt_ids=state, max_new_tokens=1, temperature=1.0, key=key(e))
            for e in range(levels**2)
        ]
        heard = [completion async for completion in sampler.submit(asked)]
        assert all(c.logprobs[0] == pytest.approx(math.log(laws[agent][c.ids[0]])) and c.version == 3 for c in heard)
        return [c.ids[0] for c in heard]

    pairs = Counter(zip(asyncio.run(said("a")), asyncio.run(said("b")), strict=True))
    ones = {"a": 5, "b": 12}  # of 16 levels with middles (l + .5) / 16: above .7, and above .25
    for i, j in itertools.product(range(2), repeat=2):
        assert pairs[i, j] == abs(16 * (1 - i) - ones["a"]) * abs(16 * (1 - j) - ones["b"])
    assert sampler.tokens == 2 * levels**2


def test_without_noise_joint_stays_below_what_equal_agents_are_worth_and_sequential_does_not() -> None:
    case = conflict.Case(game=conflict.conflict, stages=4, levels=16)
    curves = {arm: asyncio.run(conflict.train(case, arm, 5)) for arm in conflict.ARMS}
    for arm in (conflict.JOINT, conflict.UNGATED):
        assert max(curves[arm]["returns"]) <= conflict.ALIKE + 1e-9
        assert curves[arm]["verdicts"].get("rejected", 0) == 0
    assert "shrunk" in curves[conflict.JOINT]["verdicts"] and "shrunk" not in curves[conflict.UNGATED]["verdicts"]
    assert curves[conflict.SEQUENTIAL]["returns"][-1] > 1.2
    assert all(curve["returns"][0] == pytest.approx(0.75) for curve in curves.values())


def test_arms_are_compared_at_the_tokens_that_they_had() -> None:
    case = conflict.Case(game=conflict.conflict, stages=2, episodes=32)
    budget = conflict.budget(case, 2, 2)
    assert budget == 2 * 2 * (32 + conflict.PROBES) * 2
    result = {"agents": 2, "tokens": [0, 100, budget, budget + 1], "returns": [0.75, 1.0, 0.9, 2.0]}
    assert conflict.reached(case, 2)(result) == 0.9 and conflict.spent(case, 2)(result) == budget
    assert conflict.harmful(case, 2)(result) == 0.5
    played = asyncio.run(conflict.train(case, conflict.JOINT, 5))
    assert played["tokens"][1] == (2 * 32 + conflict.PROBES) * 2, "one batch and one set of probes for both agents"
    assert played["tokens"][-1] >= budget


# ---- drift -------------------------------------------------------------------------------------------------------------


def as_game(pays: Any, seed: int) -> mdp.Game:
    """Two agents, two turns at once, as the reference knows games: a first joint message, then one of four states."""
    joints = list(itertools.product(range(2), repeat=2))
    steps: list[dict[mdp.Joint, tuple[tuple[float, int], ...]]] = [{j: ((1.0, 1 + i),) for i, j in enumerate(joints)}]
    rewards: list[dict[mdp.Joint, float]] = [dict.fromkeys(joints, 0.0)]
    for first in joints:
        said = np.array([[[first[0], last[0]], [first[1], last[1]]] for last in joints], dtype=np.int8)
        steps.append({j: ((1.0, 5),) for j in joints})
        rewards.append(dict(zip(joints, pays(seed, said).tolist(), strict=True)))
    active = ((0, 1),) * 5 + ((),)
    return mdp.Game(2, 2, ((1.0, 0),), active, (*steps, {}), (*rewards, {}))


def as_team(laws: drift.Floats) -> dict[tuple[int, int], mdp.Law]:
    firsts = list(itertools.product(range(2), repeat=2))
    team = {(agent, 0): tuple(laws[agent, 0].tolist()) for agent in range(2)}
    return team | {(a, 1 + s): tuple(laws[a, 1 + first[a]].tolist()) for a in range(2) for s, first in enumerate(firsts)}


@pytest.mark.parametrize("name", drift.GAMES)
def test_bias_and_gain_of_a_stage_are_those_of_the_enumerated_game(name: str) -> None:
    """Estimates from `reference.mdp`, under the team of the start (reuse) or as it is (resample), minus exact returns."""
    game, seed = drift.GAMES[name], 11
    for data in (drift.REUSE, drift.RESAMPLE):
        found, laws = drift.stage(game, data, seed, 2)
        first = drift.start_laws(seed, 2, game.odds)
        tree = as_game(game.pays, seed)
        teams = [as_team(np.stack([*laws[:i], *first[i:]])) for i in range(3)]
        gain = mdp.expected_return(tree, teams[2]) - mdp.expected_return(tree, teams[0])
        estimates = [mdp.surrogate(tree, teams[i if data == drift.RESAMPLE else 0], teams[i + 1], agent=i) for i in range(2)]
        assert found["gain"] == pytest.approx(gain, abs=1e-12) and found["error"] == 0.0
        assert found["bias"] == pytest.approx(math.fsum(estimates) - gain, abs=1e-12)
        moved = [
            max(math.fsum(p * math.log(p / q) for p, q in zip(a, b, strict=True)) for a, b in ((new, old), (old, new)))
            for new, old in zip(laws.reshape(-1, 2).tolist(), first.reshape(-1, 2).tolist(), strict=True)
        ]
        assert [max(moved[3 * i : 3 * i + 3]) for i in range(2)] == pytest.approx([drift.RADIUS] * 2, rel=1e-6)


def test_sampled_messages_give_what_enumerated_ones_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all arms, within four standard errors; the steps differ a little too, as their gradients are sampled."""
    for name, data in itertools.product((drift.OWN, drift.MAJORITY), drift.DATA):
        exact = drift.stage(drift.GAMES[name], data, 3, 4)[0]
        with monkeypatch.context() as patched:
            patched.setattr(drift, "EXACT_UP_TO", 3)
            sampled = drift.stage(drift.GAMES[name], data, 3, 4)[0]
        assert 0.0 < sampled["error"] < abs(exact["bias"])
        assert abs(sampled["bias"] - exact["bias"]) < 4.0 * sampled["error"]


def test_an_exponent_is_the_slope_of_a_power_law_with_paired_resampling() -> None:
    sizes, scale = (2, 4, 8), np.array([1.0, 3.0, 2.0, 5.0])[:, None]
    tables = {drift.REUSE: scale * np.power(sizes, 2.0), drift.RESAMPLE: scale * np.power(sizes, 0.5)}
    found = drift.exponents(sizes, tables)
    for name, power in ((drift.REUSE, 2.0), (drift.RESAMPLE, 0.5), (drift.BETWEEN, 1.5)):
        assert (found[name].value, found[name].low, found[name].high) == pytest.approx((power,) * 3)


# ---- both, as a user calls them ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [conflict, drift], ids=["conflict", "drift"])
def test_the_quick_form_runs_holds_its_bars_and_goes_on(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["--quick", "--seeds", "2", "--keep", str(tmp_path)]
    assert script.main(call) == 0
    first = capsys.readouterr().out
    kept = records.read_records(tmp_path / "results.jsonl")
    assert script.main(call) == 0
    assert capsys.readouterr().out == first
    assert records.read_records(tmp_path / "results.jsonl") == kept
    line = json.loads(first.splitlines()[-1])
    assert line["quick"] and all(bar["holds"] for bar in line["bars"].values())
    if script is drift:
        # The argument: where all agents meet and nobody's own gain grows, reuse misses pairs and resampling agents.
        power = line["figures"][drift.OWN]["summed"]
        assert power[drift.REUSE]["value"] == pytest.approx(2.0, abs=0.15)
        assert power[drift.RESAMPLE]["value"] == pytest.approx(1.0, abs=0.15)
