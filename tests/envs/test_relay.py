"""The relay needs the team, and its caps are the specification's (ALGORITHMS 11, G44, T28)."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from pydantic import ValidationError

from baton.core.keyed import key
from baton.envs import RelayOptions, build
from baton.envs.relay import LETTERS, NAMES, RelayEnv, cap_rotated, cap_single, cap_wrong_order
from baton.errors import ConfigError, MissingError


def relay(n_agents: int = 3, **options: object) -> RelayEnv:
    return RelayEnv(RelayOptions.model_validate({"name": "relay", **options}), n_agents=n_agents)


def _play(env: RelayEnv, index: int, *, noise_seat: int | None = None) -> float:
    """A perfect team reading its views alone, with one seat perhaps replaced by noise."""
    task = env.task(index)
    heard = ""
    for seat, view in enumerate(task.views):
        body, _, start = view.partition(" in ")
        heard = start or heard
        heard = body[body.index(heard.upper()) + 1]
        if seat == noise_seat:
            heard = env.ablate(task, seat, key("noise", index))
    return env.grade(task, heard).reward


def test_a_team_that_reads_only_its_views_reaches_one() -> None:
    env = relay(prompts=300)
    assert all(_play(env, index) == 1.0 for index in range(300))


@pytest.mark.parametrize("seat", [0, 1, 2])
def test_a_noise_seat_scores_one_over_m_within_three_standard_errors(seat: int) -> None:
    m, n = 8, 6_000
    env = relay(symbols=m, prompts=n)
    mean = sum(_play(env, index, noise_seat=seat) for index in range(n)) / n
    assert abs(mean - 1 / m) < 3 * math.sqrt((1 / m) * (1 - 1 / m) / n)


def test_relay_caps_are_those_of_g44() -> None:
    cases = {
        (4, 4): 0.7083333,
        (8, 8): 0.4266121,
        (8, 64): 0.5795635,
        (16, 16): 0.2391152,
        (16, 256): 0.3383426,
        (64, 64): 0.0724485,
        (64, 4096): 0.1082315,
    }
    for (m, codewords), value in cases.items():
        assert cap_wrong_order(m, codewords=codewords) == pytest.approx(value, abs=1e-6)
    assert cap_rotated(8, is_visible=False) == pytest.approx(0.6177414, abs=1e-6)
    assert cap_rotated(8, is_visible=True) == pytest.approx(0.6687252, abs=1e-6)
    assert cap_rotated(16, is_visible=False) == pytest.approx(0.4927434, abs=1e-6)
    assert cap_rotated(16, is_visible=True) == pytest.approx(0.5258193, abs=1e-6)
    assert [cap_single(m) for m in (4, 8, 16, 64)] == [0.25, 0.125, 0.0625, 0.015625]


@pytest.mark.parametrize("m", [2, 3, 4, 5])
def test_a_guess_vector_matches_a_permutation_in_k_places_with_probability_at_most_one_over_k_factorial(m: int) -> None:
    permutations = list(itertools.permutations(range(m)))
    # Relabelling the symbols permutes the guess vectors among themselves: sorted ones stand for all.
    for guess in itertools.combinations_with_replacement(range(m), m):
        matches = [sum(g == p for g, p in zip(guess, permutation, strict=True)) for permutation in permutations]
        for k in range(1, m + 1):
            assert sum(x >= k for x in matches) * math.factorial(k) <= len(permutations)


def test_printed_caps_claim_nothing_beyond_the_proven_cases() -> None:
    env = relay(2)
    assert env.facts(1) == {}
    assert set(env.facts(2)) == {"cap_one_call"}
    assert relay().facts(3)["cap_wrong_order_strict"] == cap_wrong_order(8, codewords=8)


def test_a_task_is_a_function_of_its_index_alone() -> None:
    few, many = relay(prompts=10), relay(prompts=5_000)
    shuffled = [many.task(i) for i in (9, 4_000, 3, 700)]
    assert shuffled[0] == few.task(9) and shuffled[2] == few.task(3)
    assert many.task(4_000) == relay(prompts=4_001).task(4_000)
    with pytest.raises(MissingError, match="10 is outside"):
        few.task(10)


def test_tables_and_starts_are_uniform() -> None:
    counts = [[0] * 4 for _ in range(4)]
    starts = [0] * 4
    n = 4_000
    env = relay(symbols=4, prompts=n)
    for index in range(n):
        hidden = json.loads(env.task(index).payload)
        starts[hidden["start"]] += 1
        for i, j in enumerate(hidden["tables"][1]):
            counts[i][j] += 1
    four_errors = 4 * math.sqrt(n * 0.25 * 0.75)
    assert all(abs(c - n / 4) < four_errors for c in itertools.chain(starts, *counts))


def test_only_the_first_seat_sees_the_start_and_each_its_own_table() -> None:
    task = relay(4, symbols=3).task(5)
    assert [" in " in view for view in task.views] == [True, False, False, False]
    tables = json.loads(task.payload)["tables"]
    assert task.views[2] == "".join(f"{key}{'abc'[value]}" for key, value in zip("ABC", tables[2], strict=True))
    assert all(view.split(" in ")[0] in task.prompt for view in task.views) and " in " in task.prompt


def test_the_layouts_write_the_same_task() -> None:
    keys, row, pairs = (relay(symbols=4, layout=layout).task(7) for layout in ("keys", "row", "pairs"))
    hidden = [json.loads(task.payload) for task in (keys, row, pairs)]
    assert all(one["tables"] == hidden[0]["tables"] and one["start"] == hidden[0]["start"] for one in hidden)
    table = hidden[0]["tables"][1]
    assert row.answer == pairs.answer == str("abcd".index(keys.answer))
    assert row.views[1] == "".join(map(str, table))
    assert pairs.views[1] == " ".join(f"{i}>{j}" for i, j in enumerate(table))


@pytest.mark.parametrize(
    ("answer", "reward", "reason"),
    [
        ("{right}", 1.0, ""),
        (" {right}\n", 1.0, ""),
        ("", 0.0, "empty"),
        ("  ", 0.0, "empty"),
        ("{right}{right}", 0.0, "more than one"),
        ("{right} 1", 0.0, "more than one"),
        ("z", 0.0, "no symbol of the alphabet"),
        ("٣", 0.0, "no symbol of the alphabet"),
    ],
)
def test_one_symbol_and_nothing_else_is_an_answer(answer: str, reward: float, reason: str) -> None:
    env = relay()
    task = env.task(0)
    grade = env.grade(task, answer.replace("{right}", task.answer))
    assert grade.reward == reward and reason in grade.reason


@pytest.mark.parametrize("form", ["symbols", "names"])
def test_demonstrations_are_right_and_what_later_seats_hear_is_unrelated_to_the_chain(form: str) -> None:
    env = relay(form=form, symbols=4, prompts=400)
    is_on_chain = 0
    for index in range(400):
        task = env.task(index)
        hidden = json.loads(task.payload)
        words, at = hidden["words"], hidden["start"]
        for seat, table in enumerate(hidden["tables"]):
            shown = env.demonstration(task, seat)
            assert shown.view == task.views[seat]
            heard = words.index(shown.heard[0][1]) if seat else at
            assert shown.reply == words[table[heard]]
            is_on_chain += seat > 0 and heard == at
            at = table[at]
    assert abs(is_on_chain - 200) < 3.5 * math.sqrt(800 * 0.25 * 0.75)


def test_demonstrators_err_as_often_as_asked_and_uniformly_over_the_other_symbols() -> None:
    """Per seat: right with probability q, each of the 7 other symbols with (1 - q) / 7; within 4 standard errors."""
    n, right_share = 6_000, 0.6
    clean, erring = relay(prompts=n), relay(prompts=n, demonstration_accuracy=right_share)
    for seat in range(3):
        offsets = [0] * 8
        for index in range(n):
            right = clean.demonstration(clean.task(index), seat)
            said = erring.demonstration(erring.task(index), seat)
            assert (said.view, said.heard) == (right.view, right.heard)
            offsets[(LETTERS.index(said.reply) - LETTERS.index(right.reply)) % 8] += 1
        for offset, count in enumerate(offsets):
            p = right_share if offset == 0 else (1 - right_share) / 7
            assert abs(count / n - p) < 4 * math.sqrt(p * (1 - p) / n)


def test_names_are_written_as_sentences_with_a_question() -> None:
    env = relay(form="names")
    task = env.task(1)
    words = json.loads(task.payload)["words"]
    assert len(words) == 4 and set(words) <= set(NAMES)
    assert task.views[0].count(" gives to ") == 4 and " has it. Who gets it next?" in task.views[0]
    assert "The last message says who has it." in task.views[1] and " has it. Who" in task.views[1]
    assert task.prompt.count("Round ") == 3
    assert len({env.task(i).prompt for i in range(5_000)}) == 5_000


@pytest.mark.parametrize(
    ("template", "reward"),
    [("{n}", 1.0), ("{n}.", 1.0), (" **{n}** gets it", 1.0), ("{u}", 1.0), ("It is {n}", 0.0), ("{n}{n}", 0.0), ("", 0.0)],
)
def test_the_first_word_must_be_the_name(template: str, reward: float) -> None:
    env = relay(form="names")
    task = env.task(2)
    assert env.grade(task, template.format(n=task.answer, u=task.answer.upper())).reward == reward


def test_names_differ_in_their_first_letters_and_case() -> None:
    assert len(NAMES) >= 12 and len({name.casefold() for name in NAMES}) == len(NAMES) and all(n.isalpha() for n in NAMES)


def test_options_refuse_what_the_relay_cannot_be() -> None:
    assert RelayOptions(form="names").symbols == 4 and RelayOptions().symbols == 8
    with pytest.raises(ValidationError, match="16 names"):
        RelayOptions(form="names", symbols=17)
    with pytest.raises(ValidationError):
        RelayOptions(symbols=63)
    with pytest.raises(ValidationError):
        RelayOptions.model_validate({"name": "relay", "alphabet": 4})
    with pytest.raises(ConfigError, match="at least one agent"):
        relay(0)


def test_the_relay_takes_as_many_seats_as_there_are_agents(tmp_path) -> None:
    env = build(RelayOptions(), n_agents=5, root=tmp_path)
    assert env.seats == 5 and len(env.task(0).views) == 5
