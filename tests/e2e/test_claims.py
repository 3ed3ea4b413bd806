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

import certificates
import claim
import conflict
import distill
import drift
import gate_audit
import monotone
import numpy as np
import order
import plug_and_play
import pytest
import relays
import sat_ablation
import sizes
import sums
import team_vs_one
import torch
import worlds
from scipy import optimize, stats
from transformers import AutoModelForCausalLM

import baton
from baton import assemble, config, records, swap
from baton.core.keyed import key
from baton.engines import models
from baton.engines.chat import codec_of
from baton.engines.engine import Request
from baton.engines.table import TableCodec, TableLearner, row_name
from baton.envs.relay import RelayEnv, RelayOptions
from baton.errors import ConfigError, MissingError, RunError
from baton.testing import check_env
from baton.types import Message, Turn
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
    for script in (conflict, drift, order, gate_audit, team_vs_one):
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


# ---- caps that are theorems, and the relay dealt otherwise -------------------------------------------------------------


def test_the_bar_of_a_cap_fails_where_one_seed_lies_surely_above_it() -> None:
    """427 of 1,000 is the cap of the reversed order; the 99.9 % lower end of 480 lies above it, that of 470 does not."""
    cap = 0.4266
    for right, holds in ((125, True), (427, True), (470, True), (480, False)):
        low = stats.beta.ppf(0.001, right, 1000 - right + 1)
        assert claim.below(cap, [(100, 1000), (right, 1000)]) == (pytest.approx(low), cap, holds)
    assert claim.below(cap, [(0, 10)]) == (0.0, cap, True)


def as_ordered(right: Mapping[str, int], asked: Mapping[str, int]) -> dict[str, Any]:
    caps = {"cap_wrong_order_strict": 0.4266, "cap_rotated_strict": 0.6177}
    return {"right": right, "asked": asked, "caps": caps}


def test_each_wrong_rotation_is_held_against_its_own_cap() -> None:
    fair = as_ordered({"0": 660, "1": 90, "2": 95}, {"0": 680, "1": 660, "2": 660})
    assert all(holds for *_, holds in order.cap_bars({order.REVERSED: [fair], order.ROTATED: [fair, fair]}).values())
    # Below the cap of all rotations, and above what 231 can reach.
    odd = as_ordered({"0": 660, "1": 400, "2": 95}, {"0": 680, "1": 660, "2": 660})
    bars = order.cap_bars({order.REVERSED: [fair], order.ROTATED: [fair, odd]})
    assert [name.split(":")[0] for name, (*_, holds) in bars.items() if not holds] == ["rotated, order 231"]


def test_a_measured_order_has_fewer_stages_of_the_same_tokens() -> None:
    plain, greedy = order.stages(order.RIGHT, 100) * 384, order.stages(order.GREEDY, 100) * (384 + 64)
    assert plain == 38_400 and plain - 448 < greedy <= plain
    assert {order.stages(arm, 100) for arm in order.ARMS if arm != order.GREEDY} == {100}


def test_the_relay_dealt_otherwise_keeps_its_tasks_and_answers() -> None:
    options: dict[str, Any] = {"symbols": 5, "prompts": 60}
    relay = RelayEnv(RelayOptions(**options), n_agents=3)
    backwards, whole, works = relays.Backwards(**options), relays.Alone(**options), relays.Alone(works=True, **options)
    for env in (backwards, whole, works):
        check_env(env)
    for index in range(20):
        task, hidden = relay.task(index), json.loads(relay.task(index).payload)
        assert backwards.task(index).views == task.views[::-1] and backwards.task(index).answer == task.answer
        assert (
            whole.task(index).view(0) == task.prompt and relays.Alone(shard=0, **options).task(index).views == task.views[:1]
        )
        at, said = hidden["start"], ""
        for table in hidden["tables"]:
            at = table[at]
            said += hidden["words"][at]
        assert works.demonstration(works.task(index), 0).reply == said and said[-1] == task.answer
        assert works.grade(task, said).reward == works.grade(task, task.answer).reward == 1.0
        assert whole.grade(task, said).reward == 0.0 and whole.demonstration(task, 0).reply == task.answer
        last = backwards.demonstration(backwards.task(index), 2)
        assert last.view == task.views[0] and last.reply == said[0] and len(last.heard) == 1


def test_a_demonstrator_of_the_work_errs_as_often_as_three_seats_that_go_on_from_each_other() -> None:
    env = relays.Alone(works=True, symbols=8, prompts=3000, demonstration_accuracy=0.6)
    right, hops = 0, [0, 0, 0]
    for index in range(env.size):
        task = env.task(index)
        hidden, said = json.loads(task.payload), env.demonstration(task, 0).reply
        at = hidden["start"]
        for i, table in enumerate(hidden["tables"]):
            hops[i] += hidden["words"][table[at]] == said[i]
            at = hidden["words"].index(said[i])
        right += said[-1] == task.answer
    assert all(abs(n / env.size - 0.6) < 0.04 for n in hops)
    # Right, or wrong and by chance back: 1/8 + 7/8 ((.6 - 1/8) / (7/8))^3.
    assert right / env.size == pytest.approx(0.125 + 0.875 * (0.475 / 0.875) ** 3, abs=0.04)


# ---- seats that are given away -------------------------------------------------------------------------------------------


def test_a_private_code_is_the_teams_and_nothing_but_its_demonstrations_shows_it() -> None:
    options: dict[str, Any] = {"symbols": 5, "prompts": 200}
    relay = RelayEnv(RelayOptions(**options), n_agents=3)
    own, other = (relays.Coded(code=code, **options) for code in (3, 4))
    check_env(own)
    spoken: dict[int, dict[str, set[str]]] = {0: {}, 1: {}}
    for task in map(relay.task, range(200)):
        assert own.task(int(json.loads(task.payload)["index"])) == task
        for seat in range(3):
            plain, coded = relay.demonstration(task, seat), own.demonstration(task, seat)
            assert plain.view == coded.view and len(plain.heard) == len(coded.heard)
            for speaker, said, told in (
                (seat, plain.reply, coded.reply),
                *((int(who), a, b) for (who, a), (_, b) in zip(plain.heard, coded.heard, strict=True)),
            ):
                if speaker == 2:
                    assert said == told
                else:
                    spoken[speaker].setdefault(said, set()).add(told)
    # One word for one symbol, whoever says or hears it; and another team's are others.
    for seat, words in spoken.items():
        assert all(len(told) == 1 for told in words.values())
        assert sorted(told for (told,) in words.values()) == sorted("abcde")
        assert {w: other.said(w, list("abcde"), seat) for w in words} != {w: told for w, (told,) in words.items()}


def test_a_chain_of_sums_is_right_where_every_seat_is_and_a_call_without_one_seat_guesses() -> None:
    env = relays.Sums(prompts=400)
    check_env(env)
    by_digit = {at: Counter(relays.result(one, at) for one in relays.OPERATIONS) for at in range(10)}
    likeliest = sum(max(counts.values()) for counts in by_digit.values()) / (10 * len(relays.OPERATIONS))
    assert env.facts(3)["cap_one_call"] == pytest.approx(likeliest) and 0.1 < likeliest < 0.2
    for task in map(env.task, range(50)):
        hidden, digit = json.loads(task.payload), int(task.view(0)[-1])
        for seat, (kind, k) in enumerate(hidden["operations"]):
            given = env.demonstration(task, seat)
            heard = int(given.heard[0][1]) if given.heard else digit
            assert int(given.reply) == (heard + k if kind == "+" else heard * k) % 10
            assert task.view(seat).split()[1] == f"{kind}{k}"
            digit = (digit + k if kind == "+" else digit * k) % 10
        assert task.answer == str(digit)
    # Whatever a seat is told, each digit leads to another answer.
    assert all(len({relays.result(one, at) for at in range(10)}) == 10 for one in relays.OPERATIONS)


def test_a_model_that_is_respelt_says_the_same_in_other_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    source = models.resolve("tiny:30k")
    plug_and_play.respell(source, tmp_path / "other")
    one, other = codec_of(source), codec_of(tmp_path / "other")
    assert not swap.same_tokens(one, other) and one.tokens.keys() == other.tokens.keys()
    messages = [Message(role="user", content="AbBa in c")]
    ids = [codec.encode(messages) for codec in (one, other)]
    last = len(one.tokens) - 1
    assert ids[1] == tuple(last - i for i in ids[0]) and other.end_ids == {last - i for i in one.end_ids}
    laws: list[torch.Tensor] = []
    for folder, prompt in zip((source, tmp_path / "other"), ids, strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            laws.append(model(torch.tensor([prompt])).logits[0, -1])
    assert torch.allclose(laws[0], laws[1].flip(0), atol=1e-5)


def test_the_arms_of_a_swap_begin_with_one_team_and_its_control_has_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(plug_and_play, "SMALL", "tiny:30k")
    monkeypatch.setattr(plug_and_play, "LARGE", "tiny:40k")
    case, kept = plug_and_play.RELAY, claim.Results()
    tokens = 0
    for arm in (plug_and_play.BEFORE, plug_and_play.DISTILL, plug_and_play.IMITATE, plug_and_play.KEPT):
        given = (case, arm, 1, True, str(tmp_path / "teams"), tokens)
        found = kept.of(plug_and_play.at(case, arm), 1, lambda given=given: plug_and_play.measure(given))
        if arm == plug_and_play.DISTILL:
            tokens = found["tokens"]
            assert plug_and_play.given(kept, case, plug_and_play.KEPT, 1) == tokens
        if arm in plug_and_play.MODES:
            assert found["swaps"].keys() == set(plug_and_play.SWAPPED)
            assert all(s["refused"] is None and s["parameters"] > 35_000 for s in found["swaps"].values())
            # Both seats have changed hands, and the third has not.
            assert found["weights"] == kept.found[plug_and_play.at(case, plug_and_play.BEFORE), 1]["weights"]
            a_stage = plug_and_play.stage_tokens(plug_and_play.QUICK)
            played = sum(s["tokens"]["played"] for s in found["swaps"].values())
            # A batch of a team that is never right is drawn again, so a stage may have more.
            assert played > 0 and found["tokens"] - played >= 2 * a_stage
    assert kept.found[plug_and_play.at(case, plug_and_play.KEPT), 1]["tokens"] >= tokens - a_stage / 2


def test_the_bars_of_given_seats_can_fail() -> None:
    def failing(**changes: Any) -> set[str]:
        kept = claim.Results()
        for seed in (0, 1, 2):
            for arm in (plug_and_play.BEFORE, *plug_and_play.ARMS[plug_and_play.RELAY]):
                refused = changes.get("refused") if arm == plug_and_play.DISTILL else None
                falls = {plug_and_play.RAW: changes.get("raw", 0.15)}
                found: dict[str, Any] = {
                    "later": 0.8 + 0.01 * seed,
                    "right_after": falls.get(arm, 0.8 + changes.get(arm, 0.0)) + 0.01 * seed,
                    "tokens": 1000 + (changes.get("tokens", 0) if arm == plug_and_play.SCRATCH else 0),
                    "weights": "b" if arm == changes.get("touched") else "a",
                    "swaps": {"X": {"refused": refused}},
                }
                if arm == plug_and_play.DISTILL:
                    found["later"] += changes.get("later", 0.0)
                kept.of(plug_and_play.at(plug_and_play.RELAY, arm), seed, lambda found=found: found)
        bars = plug_and_play.case_bars(plug_and_play.RELAY, kept, (0, 1, 2))
        return {name.removeprefix("relay: ").split(",")[0] for name, (*_, holds) in bars.items() if not holds}

    assert failing() == set()
    assert failing(raw=0.3) == {"raw right after"}
    assert failing(raw=0.9) == {"raw right after", "primary contrast"}
    assert failing(distill=-0.06) == {"distill right after minus before"}
    assert failing(mixture=-0.03) == {"mixture right after minus before"}
    assert failing(later=-0.03) == {"distill trained on minus before"}
    assert failing(touched="mixture") == {"third seats that a swap changed"}
    assert failing(refused="no") == {"newcomers that the gate refused"}
    assert failing(tokens=30) == {"generated tokens"}


# ---- the gate, audited -------------------------------------------------------------------------------------------------


def test_a_share_has_the_clopper_pearson_interval() -> None:
    for k, n in ((0, 40), (3, 40), (40, 40), (7, 900)):
        low, high = (stats.beta.ppf(q, k + (q > 0.5), n - k + (q < 0.5)) for q in (0.025, 0.975))
        found = gate_audit.share(k, n)
        assert found == pytest.approx((k / n, 0.0 if k == 0 else low, 1.0 if k == n else high))
    with pytest.raises(MissingError, match="a share of nothing"):
        gate_audit.share(0, 0)


def test_a_quantile_is_beyond_the_radius_as_the_gate_counts_it() -> None:
    for beyond in (9, 10, 11):
        d = torch.cat([torch.full((1000 - beyond,), 0.01), torch.full((beyond,), 0.1)])
        assert gate_audit.exceeds(beyond, 1000) == (gate_audit.trust_region.quantile_point(d, alpha=0.01) > 0.05)
    through = [{"accepted": {"a": 0.5, "b": None}, "beyond": [300, 11, 2, 0, 0], "states": 1000}]
    assert gate_audit.let_through(through, "a") == (1, 1) and gate_audit.let_through(through, "b") == (0, 0)
    through.append({"accepted": {"a": 0.25}, "beyond": [300, 11, 2, 0, 0], "states": 1000})
    assert gate_audit.let_through(through, "a") == (1, 2)


def test_an_exponent_is_the_most_likely_power_also_where_nothing_is_beyond() -> None:
    radii = (0.001, 0.01, 0.1, 1.0)
    for power in (-0.7, 0.0, 0.5):
        beyond = [round(1e9 * 0.01 * (r / 0.1) ** power) for r in radii]
        assert gate_audit.exponent(radii, beyond, [10**9] * 4) == pytest.approx(power, abs=1e-5)
    beyond, states = [0, 3, 2, 9], [500, 1000, 400, 1000]

    def unlikely(at: Any) -> float:
        mean = np.array(states) * np.exp(at[0] + at[1] * np.log(radii))
        return float((mean - np.array(beyond) * np.log(mean)).sum())

    best = optimize.minimize(unlikely, [-5.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-12}).x[1]
    assert gate_audit.exponent(radii, beyond, states) == pytest.approx(best, abs=1e-4)
    assert gate_audit.exponent(radii, [5, 0, 0, 0], states) == -math.inf
    assert gate_audit.exponent(radii, [0, 0, 0, 5], states) == math.inf
    with pytest.raises(MissingError, match="no exponent"):
        gate_audit.exponent(radii, [0] * 4, states)
    counts = [[(round(1000 * r**0.5), 1000) for r in radii], [(round(2000 * r**0.5), 2000) for r in radii]]
    assert gate_audit.exponent_interval(radii, counts) == pytest.approx((0.5, 0.5, 0.5), abs=0.01)


def looked(bad: Mapping[int, int]) -> torch.Tensor:
    """Divergences of the shared episodes, squares of the scale: .02 nats, and .5 at so many siblings of these prompts."""
    prompts = [n for n in range(gate_audit.PROBE) for _ in range(gate_audit.SIBLINGS if n < gate_audit.CROWDED else 1)]
    whole = torch.full((len(prompts),), 0.02, dtype=torch.float64)
    for prompt, count in bad.items():
        whole[prompts.index(prompt) : prompts.index(prompt) + count] = 0.5
    return torch.stack([whole * scale**2 for scale in gate_audit.SCALES])


def test_a_design_sees_its_own_prompts_and_siblings_and_no_others() -> None:
    tasks = [RelayEnv(RelayOptions(prompts=500), n_agents=3).task(n) for n in range(gate_audit.PROBE)]
    asked = gate_audit.plays(tasks)
    assert len(asked) == looked({}).shape[1] == 115 * 4 + 344
    assert [p.sibling for p in asked[:5]] == [0, 1, 2, 3, 0] and asked[460].task == tasks[115]

    def scales(bad: Mapping[int, int]) -> dict[str, float | None]:
        return {n: gate_audit.accepted_scale(d, looked(bad), radius=0.05) for n, d in gate_audit.DESIGNS.items()}

    assert set(scales({}).values()) == {1.0}
    # One prompt of 115 whose siblings are all beyond: 4 states of 460 are no quantile, and the largest of 460 units is.
    wrong = scales({100: 4})
    assert wrong["115 prompts, 4 siblings"] == wrong["16 prompts"] == wrong["64 prompts"] == 1.0
    assert wrong["115 prompts, 4 siblings as units"] == 0.25 and wrong[gate_audit.CERTIFIED] == 0.25
    beyond = scales({400: 1})
    assert [name for name, scale in beyond.items() if scale != 1.0] == [gate_audit.CERTIFIED]
    assert scales({3: 4})["16 prompts"] == scales({3: 4})["64 prompts"] == 0.25 and scales({40: 4})["16 prompts"] == 1.0
    # Two prompts of 115 are more than 1 % of the states.
    assert scales({100: 4, 101: 4})["115 prompts, 4 siblings"] == 0.25


def test_an_accepted_update_is_measured_again_as_it_was_judged(tmp_path: Path) -> None:
    """From the weights before and after it, on the run's own probe episodes, at the scale at which it was accepted."""
    made = ["seed=3", "engine.threads=1", "env.prompts=1000", "algorithm.stages=1", "algorithm.episodes=32"]
    made += ["checkpoint.keep_promoted=all", "algorithm.min_informative=1"]
    made += [
        f"agents.{i}.{change}"
        for i in range(3)
        for change in ("radius={token=0.002, message_mean=inf}", "warm_start.steps=1")
    ]
    run = baton.train(gate_audit.CONFIG, run=tmp_path / "run", overrides=made)
    auditor, before = gate_audit.Auditor(run), records.read_position(run.start["position"])
    scales: list[float] = []
    for line in run.updates:
        if line["word"] != "rejected":
            rows = records.read_episodes(run.path / line["episodes_file"])
            played = [records.read_episode(row) for row in rows if row["use"] == "probe"]

            class Recorded:
                async def play(self, asked: Any, *, played: Any = played, **_: Any) -> Any:
                    return played

            auditor.table = Recorded()  # type: ignore[assignment]
            d = asyncio.run(auditor.looked(line, before, [], "again"))
            scale = float(line["verdict"]["scale"])
            name = f"{int(line['index']):06d}-{line['agent']}.parquet"
            for recorded in records.read_divergences(run.path / "divergences" / name):
                now = d[gate_audit.SCALES.index(recorded.scale)]
                assert torch.allclose(now, recorded.divergence.of("max").double(), rtol=1e-2, atol=2e-6)
            scales.append(scale)
        before = records.read_position(line["position"])
    assert min(scales) < 1.0, "a whole step would not need to be put together again"
    beyond, states = gate_audit.first_looks(run, run.updates)
    assert states == 64 * len(run.updates) and 0 < beyond <= states


# ---- one against three -------------------------------------------------------------------------------------------------


def test_one_model_generates_in_as_many_updates_the_tokens_of_the_team() -> None:
    team = team_vs_one.TEAM
    for tokens in (1, 2, 3):
        one = team.alone(tokens)
        assert (one.updates, one.total, one.agents) == (team.updates, team.total, 1)
    assert team.alone(2).episodes == 192 and team.alone(3).episodes == team.episodes
    with pytest.raises(ConfigError, match="no whole number of episodes of 5"):
        team.alone(5)
    for tokens in (1, 2, 3):
        batches = team_vs_one.lessons(team_vs_one.TAUGHT, tokens, batch=team_vs_one.BATCH)
        assert batches * tokens * team_vs_one.BATCH == team_vs_one.TAUGHT


def test_every_arm_is_a_config_with_the_same_budget() -> None:
    def spent(config: Any, tokens: int) -> tuple[int, int]:
        options, warm = config.algorithm, [a.warm_start for a in config.agents]
        taught = warm[:1] if warm[0].seats == "all" else warm
        shown = sum(w.steps * w.batch for w in taught) * (tokens if len(config.agents) == 1 else 1)
        return options.stages * len(config.agents) * options.episodes * tokens, shown

    for size in team_vs_one.TOTAL:
        teams = [team_vs_one.team_changes(size, arm, quick=False) for arm in (team_vs_one.TEAM_ARM, team_vs_one.SHARED)]
        ones = [team_vs_one.one_changes(size, arm, quick=False) for arm in ("answer", team_vs_one.WORKS)]
        configs = [baton.load_config(team_vs_one.CONFIG, made) for made in (*teams, *ones)]
        assert {spent(c, n) for c, n in zip(configs, (3, 3, 2, 3), strict=True)} == {
            (team_vs_one.TEAM.total, team_vs_one.TAUGHT)
        }
        few = baton.load_config(team_vs_one.CONFIG, team_vs_one.one_changes(size, team_vs_one.SHARD, quick=False))
        assert few.env.arguments["shard"] == 0 and few.algorithm.stages == team_vs_one.FEW
    for changed in order.ARMS.values():
        baton.load_config(order.CONFIG, [*order.COMMON, *changed])


@pytest.mark.parametrize("change", ["order=greedy", "order=random", "name=joint"])
def test_the_tokens_of_a_training_are_those_of_its_files_without_the_probes(tmp_path: Path, change: str) -> None:
    made = ["algorithm.stages=2", f"algorithm.{change}", "algorithm.group=4"]
    run = baton.train(claim.ROOT / "configs" / "parity.toml", run=tmp_path / "run", overrides=made)
    counted: dict[tuple[str, str], int] = {}
    for update in run.updates:
        for row in records.read_episodes(run.path / update["episodes_file"]):
            if row["use"] != "probe":
                counted[row["use"], row["id"]] = sum(len(turn["ids"]) for turn in row["turns"])
    assert claim.training_tokens(run) == sum(counted.values())
    assert ("order" in {use for use, _ in counted}) == (change == "order=greedy")


def test_the_bars_of_one_against_three_can_fail() -> None:
    def bars(works: float, lone: int, tokens: int) -> list[str]:
        kept = claim.Results()
        seeds = (0, 1)
        for seed in seeds:
            costs = {"team": 57_600, "answer": 57_600, "works": tokens}
            for name, arm in team_vs_one.COSTS.items():
                at, given = team_vs_one.at("64k", arm), {"training_tokens": costs.get(name, 1)}
                row = {"rows": {arm: {"value": lone / 1000, "n": 1000}}, "facts": {"cap_one_call": 0.125}, "costs": {}}
                kept.of(at, seed, lambda row=row: row)["costs"][name] = given
        less = {
            name: claim.paired_interval([0.5, 0.52], [value, value + 0.02])
            for name, value in (("one model, whole question, works", works), ("one call, one shard", lone / 1000))
        }
        found = team_vs_one.size_bars("64k", kept, seeds, less)
        return [name for name, (*_, holds) in found.items() if not holds]

    assert bars(0.6, 130, 57_600) == []
    assert [name.split(": ")[1].split(",")[0] for name in bars(0.4, 170, 50_000)] == [
        "primary contrast",
        "one call",
        "generated tokens",
    ]


# ---- monotone ----------------------------------------------------------------------------------------------------------


def test_a_teams_true_accuracy_is_enumerated() -> None:
    """Uniform tables guess; tables that say their view and add up the two bits are always right."""
    plan = assemble.prepare(config.load(monotone.CONFIG), root=monotone.CONFIG.parent)
    tasks = list({t.views: t for t in map(plan.env.task, range(plan.env.size))}.values())
    assert len(tasks) == 4
    assert monotone.accuracy(plan, tasks, {"a": {}, "b": {}}) == pytest.approx(0.5)
    seats, protocol = plan.seats, plan.protocol
    tables: dict[str, dict[str, torch.Tensor]] = {"a": {}, "b": {}}
    for task in tasks:
        first = seats[0].codec.encode(protocol.messages(task, (), 0, seats[0].system))
        own, other = (int(view.rstrip(".")[-1]) for view in task.views)
        tables["a"][row_name(first)] = torch.tensor([50.0, 0.0] if own == 0 else [0.0, 50.0])
        turn = Turn(
            kind="action", agent="a", seat=0, text=str(own), prompt_ids=first, ids=(own,), logprobs=(0.0,), versions=(0,)
        )
        second = seats[1].codec.encode(protocol.messages(task, (turn,), 1, seats[1].system))
        tables["b"][row_name(second)] = torch.tensor([50.0, 0.0] if own == other else [0.0, 50.0])
    assert monotone.accuracy(plan, tasks, tables) == pytest.approx(1.0)
    assert monotone.accuracy(plan, [*tasks, *tasks[:1]], tables | {"a": {}}) == pytest.approx(0.5)


def test_a_run_tells_of_each_accepted_update_what_it_truly_did() -> None:
    found = monotone.one((("certificate.update_pairs=256", "gate.preset=demo"), 1, 3))
    assert found["changes"] and all(0 < c["n"] <= 256 and c["bound"] is not None for c in found["changes"])
    assert found["accuracy"] == pytest.approx(0.5 + sum(c["change"] for c in found["changes"]))
    assert monotone.share({"changes": [{"change": -0.1}, {"change": 0.1}, {"change": 0.0}]}, 0.0) == pytest.approx(1 / 3)


# ---- both, as a user calls them ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [conflict, drift, monotone], ids=["conflict", "drift", "monotone"])
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


# ---- certificates --------------------------------------------------------------------------------------------------------


def test_the_teams_of_the_certificates_gain_what_is_said_and_every_way_of_drawing_keeps_it() -> None:
    old, new, right = certificates.teams(3, 2, 0.001)

    def chance(laws: torch.Tensor) -> float:
        first, second = laws.exp().tolist()
        ends = [i for i in range(certificates.SYMBOLS) if bool(right[i])]
        return math.fsum(first[0][a] * second[a][b] for a in range(certificates.SYMBOLS) for b in ends)

    assert int(right.sum()) == certificates.RIGHT
    assert chance(new) - chance(old) == pytest.approx(certificates.GAIN, abs=1e-9)
    distance = 0.5 * float((new[0, 0].exp() - old[0, 0].exp()).abs().sum())
    discordance = {}
    for way in certificates.WAYS:
        d, together = certificates.play(old, new, right, way, 3, 4_000)
        assert abs(float(d.mean()) - certificates.GAIN) < 4.0 * float(d.std()) / math.sqrt(4_000)
        assert not bool(d[together].any())
        assert 1.0 - float(together.double().mean()) >= distance - 0.03
        discordance[way] = float(d.abs().mean())
    assert discordance[certificates.MAXIMAL] < 0.1 < 0.3 < discordance[certificates.APART]


def test_pairs_to_a_verdict_are_counted_up_to_those_there_are() -> None:
    d = torch.ones(3, 300, dtype=torch.float64)
    d[1] = 0.0
    counted = certificates.pairs_to_positive(d)
    assert counted["median"] == 8.0 and counted["by 250"] == pytest.approx(2 / 3)
    assert certificates.pairs_to_positive(d[1:2])["median"] == 300.0


# ---- taking turns, by size ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sizes.SIZES)
def test_the_arms_of_a_size_differ_in_the_schedule_alone(name: str) -> None:
    family = sizes.SIZES[name].family
    one, other = (
        baton.load_config(family.config, sat_ablation.changes(family, arm, 3))
        for arm in (sat_ablation.FIRST, sat_ablation.SECOND)
    )
    changed = records.differences(one.model_dump(mode="json"), other.model_dump(mode="json"))
    assert [(at, a, b) for at, a, b in changed] == [("algorithm.name", "sat", "joint")]
    assert one.gate.preset == other.gate.preset and all(math.isfinite(one.radius(a).token) for a in one.agents)


# ---- distill -------------------------------------------------------------------------------------------------------------


def test_the_sums_are_an_environment_whose_every_digit_is_needed() -> None:
    env = sums.Sums(prompts=400, demonstration_accuracy=0.8)
    check_env(env)
    tasks = [env.task(i) for i in range(env.size)]
    held = [[int(view[-1]) for view in task.views] for task in tasks]
    assert [int(task.answer) for task in tasks] == [sum(digits) % 4 for digits in held]
    for seat in range(3):
        alone = Counter((digits[seat], task.answer) for digits, task in zip(held, tasks, strict=True))
        assert max(alone.values()) < 0.11 * len(tasks), "one digit says nothing: a sixteenth of the tasks each"
        given = [env.demonstration(task, seat) for task in tasks]
        heard = [int(demo.heard[0][1]) if demo.heard else 0 for demo in given]
        right = [int(demo.reply) == (h + digits[seat]) % 4 for demo, h, digits in zip(given, heard, held, strict=True)]
        assert 0.74 < sum(right) / len(right) < 0.86


@pytest.mark.parametrize(
    ("student", "tokens", "failing"),
    [(0.97, 1.0, []), (0.92, 1.0, ["primary contrast"]), (0.97, 1.1, ["sums"])],
)
def test_the_bars_of_a_student_can_fail(
    student: float,
    tokens: float,
    failing: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def made(task: str, seed: int, *, quick: bool) -> dict[str, Any]:
        values = {"team": 0.98, "student after imitation": 0.9, "student": student - 0.001 * seed}
        kept = {"value": values["student"] / 0.98, "tokens_per_answer": tokens / 3.0, "read_per_answer": 0.3}
        return {"rows": [{"name": n, "value": v} for n, v in values.items()], "kept": kept}

    monkeypatch.setattr(distill, "measure", made)
    assert distill.main([]) == bool(failing)
    bars = json.loads(capsys.readouterr().out.splitlines()[-1])["bars"]
    assert [name.split(":")[0].split(",")[0] for name, bar in bars.items() if not bar["holds"]] == failing
