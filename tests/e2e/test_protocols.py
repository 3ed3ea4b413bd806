"""Who speaks when, what each one hears, and which message is the answer (ALGORITHMS 2.7); and that timing changes nothing
(5.6)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import worlds

from baton import assemble, config, protocols, run
from baton.core.keyed import key
from baton.engines.engine import Completion, Request
from baton.engines.table import TableCodec
from baton.errors import ConfigError, TaskFault
from baton.evaluate import evaluate
from baton.protocols import ChainOptions, DebateOptions, RouterOptions, Rule, TeamProtocol, VoteOptions
from baton.rollout import Play, Seat, Table
from baton.types import Accepted, Episode, Failed, Rejected, Scored, Task, Turn

TASK = Task(id="t", env="x", prompt="the question", answer="1", views=())
VIEWED = replace(TASK, views=("first view", "second view", "third view"))
NAMES = ("ada", "bob", "cy")


def turn(seat: int, text: str, **more: Any) -> Turn:
    said: dict[str, Any] = {"prompt_ids": (0,), "ids": (1, 2), "logprobs": (-0.5, -0.5), "versions": (0, 0)}
    return Turn(kind="action", agent=NAMES[seat], seat=seat, text=text, **{**said, **more})


def shown(
    protocol: TeamProtocol, turns: Sequence[Turn], seat: int, task: Task = TASK, system: str = ""
) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in protocol.messages(task, turns, seat, system)]


def chain(seats: int = 3, **options: Any) -> TeamProtocol:
    return protocols.build(ChainOptions(**options), NAMES[:seats])


def vote(seats: int = 3) -> TeamProtocol:
    return protocols.build(VoteOptions(), NAMES[:seats])


def debate(seats: int = 3, **options: Any) -> TeamProtocol:
    return protocols.build(DebateOptions(**options), NAMES[:seats])


def router(seats: int = 3, rule: Rule | None = None, **options: Any) -> TeamProtocol:
    return protocols.build(RouterOptions(**options), NAMES[:seats], rule=rule)


def spoken(protocol: TeamProtocol, rotation: int = 0) -> list[int]:
    """Seats in the order in which they speak."""
    turns: list[Turn] = []
    while due := protocol.due(TASK, turns, rotation):
        turns += [turn(seat, "x") for seat in due]
    return [t.seat for t in turns]


# ---- chain -----------------------------------------------------------------------------------------------------


def test_a_chain_speaks_in_turn_and_the_last_message_is_the_answer() -> None:
    protocol = chain()
    assert spoken(protocol) == [0, 1, 2] and protocol.own_turns == 1
    assert protocol.answer([turn(0, "a"), turn(1, "b"), turn(2, "c")], str, key("tie")) == "c"
    assert protocol.is_cut([turn(0, "a"), turn(2, "c", cut=True)]) and not protocol.is_cut(
        [turn(0, "a", cut=True), turn(2, "c")]
    )


def test_rounds_repeat_the_order_and_count_own_turns() -> None:
    protocol = chain(rounds=2)
    assert spoken(protocol) == [0, 1, 2, 0, 1, 2] and protocol.own_turns == 2


def test_rotation_starts_at_another_seat_and_keeps_the_order() -> None:
    assert [spoken(chain(rotate=True, rounds=2), rotation=r) for r in range(3)] == [
        [0, 1, 2, 0, 1, 2],
        [1, 2, 0, 1, 2, 0],
        [2, 0, 1, 2, 0, 1],
    ]
    assert chain(rotate=True).rotates and not chain().rotates and not vote().rotates


def test_sees_all_shows_every_earlier_message_under_its_name() -> None:
    assert shown(chain(), [turn(0, "one"), turn(1, "two")], 2) == [
        ("user", "the question"),
        ("user", "[ada]: one"),
        ("user", "[bob]: two"),
    ]


def test_sees_previous_shows_the_last_speaker_and_oneself() -> None:
    protocol = chain(sees="previous", rounds=2)
    turns = [turn(0, "one"), turn(1, "two"), turn(2, "three")]
    assert shown(protocol, turns[:2], 2) == [("user", "the question"), ("user", "[bob]: two")]
    assert shown(protocol, turns, 0) == [("user", "the question"), ("assistant", "one"), ("user", "[cy]: three")]


def test_an_agent_hears_its_view_of_the_task_where_it_has_one() -> None:
    assert [shown(chain(), [], s, VIEWED)[-1] for s in range(3)] == [("user", v) for v in VIEWED.views]


def test_a_system_prompt_comes_first_and_an_empty_one_is_none() -> None:
    assert shown(chain(), [], 0, system="be brief")[0] == ("system", "be brief")
    assert shown(chain(), [], 0) == [("user", "the question")]


def test_own_earlier_turns_keep_their_sampled_ids_and_teammates_never_have_any() -> None:
    messages = chain(rounds=2).messages(TASK, [turn(0, "one"), turn(1, "two"), turn(2, "three")], 0, "")
    assert [(m.role, m.ids) for m in messages] == [("user", None), ("assistant", (1, 2)), ("user", None), ("user", None)]


def test_every_seat_is_told_its_place_by_default() -> None:
    told = [chain().default_system(s) for s in range(3)]
    assert len(set(told)) == 3 and "final answer" in told[2] and "final answer" not in told[0] + told[1]
    assert chain(1).default_system(0) == "Answer the question."
    assert len({vote().default_system(s) for s in range(3)}) == 1


# ---- vote ------------------------------------------------------------------------------------------------------


def number(text: str) -> str | None:
    return text.strip() if text.strip().isdigit() else None


def test_voters_answer_the_bare_question_at_once() -> None:
    protocol = vote()
    assert protocol.due(TASK, [], 0) == (0, 1, 2) and protocol.due(TASK, [turn(s, "x") for s in range(3)], 0) == ()
    assert shown(protocol, [turn(0, "one"), turn(1, "two")], 2) == [("user", "the question")]


def test_the_majority_of_normalised_answers_wins() -> None:
    assert vote().answer([turn(0, "7"), turn(1, "4 "), turn(2, " 4")], number, key("tie")) == "4 "


def test_unparseable_answers_do_not_vote() -> None:
    said = [turn(0, "what?"), turn(1, "what?"), turn(2, "4")]
    assert vote().answer(said, number, key("tie")) == "4"
    assert vote().answer([turn(s, f"what? {s}") for s in range(3)], number, key("tie")) == "what? 0"


def test_ties_are_drawn_by_key_and_not_by_seat() -> None:
    said = [turn(0, "7"), turn(1, "4"), turn(2, "1")]
    drawn = [vote().answer(said, number, key("tie", n)) for n in range(300)]
    assert drawn == [vote().answer(said, number, key("tie", n)) for n in range(300)]
    assert all(70 < drawn.count(answer) < 130 for answer in ("7", "4", "1"))
    turned = [vote().answer(said[::-1], number, key("tie", n)) for n in range(300)]
    assert turned == drawn, "who gave an answer does not change which answer wins"


def test_a_vote_is_cut_only_where_every_answer_was() -> None:
    assert vote().is_cut([turn(s, "x", cut=True) for s in range(3)])
    assert not vote().is_cut([turn(0, "x", cut=True), turn(1, "x")])


# ---- at the table ----------------------------------------------------------------------------------------------


class Scripted:
    """A sampler that says what it is told to and remembers what it was asked. Nobody draws."""

    def __init__(self, says: Any) -> None:
        self.says = says
        self.waves: list[list[Request]] = []

    async def submit(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        self.waves.append(list(requests))
        for request in requests:
            ids = self.says(request)
            yield Completion(id=request.id, ids=ids, logprobs=(-0.1,) * len(ids), version=0, finish_reason="stop")


@dataclass(frozen=True)
class Small(TableCodec):
    """A table's codec with a context that can be too short."""

    context: int = 60

    @property
    def context_length(self) -> int:
        return self.context


CODEC = TableCodec(("0", "1"), has_end=True)


def at_table(
    protocol: TeamProtocol, says: Any, seats: int = 3, codecs: Sequence[TableCodec] | None = None
) -> tuple[Table, Scripted]:
    sampler = Scripted(says)
    places = tuple(
        Seat(agent=NAMES[s], system="", max_new_tokens=2, temperature=1.0, codec=codecs[s] if codecs else CODEC)
        for s in range(seats)
    )

    def grade(answers: Sequence[tuple[Task, str]]) -> list[Any]:
        return [Scored(reward=float(said == task.answer)) for task, said in answers]

    return Table(seats=places, protocol=protocol, sampler=sampler, grade=grade, normalise=number), sampler  # type: ignore[arg-type]


def play(table: Table, tasks: Sequence[Task], **more: Any) -> list[Episode]:
    plays = [Play(task=t) for t in tasks]
    return asyncio.run(table.play(plays, address=("here",), versions=dict.fromkeys(NAMES, 0), **more))


def read(request: Request) -> str:
    """What a prompt says, role marks as |."""
    marks = {CODEC.vocabulary + 256 + n: "|" for n in range(3)}
    return "".join(marks.get(i) or CODEC.decode([i]) for i in request.prompt_ids)


TASKS = [replace(TASK, id=f"t{n}", prompt=f"question {n}") for n in range(4)]


def test_a_wave_is_one_agents_requests_at_one_turn_in_order_of_episode() -> None:
    table, sampler = at_table(chain(), lambda request: (1, 2))
    episodes = play(table, TASKS)
    assert [[r.agent for r in wave] for wave in sampler.waves] == [[name] * 4 for name in NAMES]
    assert all([r.id for r in wave] == [e.id for e in episodes] for wave in sampler.waves)
    assert read(sampler.waves[2][3]) == "|question 3|[ada]: 1|[bob]: 1|"
    assert all(e.outcome == Scored(reward=1.0) and e.answer == "1" for e in episodes)


def test_simultaneous_seats_do_not_hear_each_other() -> None:
    table, sampler = at_table(vote(), lambda request: (int(request.agent != "bob"), 2))
    (episode,) = play(table, TASKS[:1])
    assert [read(wave[0]) for wave in sampler.waves] == ["|question 0|"] * 3
    assert [t.text for t in episode.turns] == ["1", "0", "1"] and episode.answer == "1"


def test_a_teammates_text_never_becomes_a_control_token() -> None:
    """R39, T25: what looks like a role mark in a message is bytes."""
    table, sampler = at_table(chain(2), lambda request: (CODEC.vocabulary + 91, 2), seats=2)
    play(table, TASKS[:1])
    marks = [i for i in sampler.waves[1][0].prompt_ids if i >= CODEC.vocabulary + 256]
    assert len(marks) == 3 and read(sampler.waves[1][0]) == "|question 0|[ada]: [|"


def test_a_prompt_over_the_context_fails_that_episode_only() -> None:
    codecs = [CODEC, Small(("0", "1"), has_end=True, context=36), CODEC]
    table, sampler = at_table(chain(), lambda request: (1, 2), codecs=codecs)
    long = replace(TASK, id="long", prompt="a question that is much too long")
    short, failed, also_short = play(table, [TASKS[0], long, TASKS[1]])
    assert short.outcome == also_short.outcome == Scored(reward=1.0)
    assert isinstance(failed.outcome, Failed)
    assert failed.outcome.reason == "context: 'bob' needs 43 prompt tokens + 2 new ones, its context holds 36"
    assert [len(wave) for wave in sampler.waves] == [3, 2, 2], "an episode that failed asks nobody any more"


def test_a_seat_may_be_replaced_and_is_then_no_action_of_its_agent() -> None:
    table, sampler = at_table(chain(), lambda request: (1, 2))
    (episode,) = play(table, TASKS[:1], substitute=lambda task, seat, at: "0" if seat == 1 else None)
    assert [(t.kind, t.text) for t in episode.turns] == [("action", "1"), ("observation", "0"), ("action", "1")]
    assert read(sampler.waves[-1][0]) == "|question 0|[ada]: 1|[bob]: 0|"


def test_probe_episodes_end_at_the_agents_last_own_turn_and_are_never_scored() -> None:
    table, sampler = at_table(chain(rounds=2), lambda request: (1, 2))
    (episode,) = play(table, TASKS[:1], until="bob")
    assert [t.agent for t in episode.turns] == ["ada", "bob", "cy", "ada", "bob"]
    assert episode.outcome == Failed(reason="probe") and len(sampler.waves) == 5


# ---- timing changes nothing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["{name='chain',rounds=2}", "{name='chain',rotate=true}", "{name='vote'}"])
@pytest.mark.parametrize("schedule", ["sat", "joint"])
def test_completions_in_any_order_train_the_same_team_bit_for_bit(protocol: str, schedule: str) -> None:
    """T20: what is sampled, and what is learned from it, depends on keys and weights alone."""
    settings = worlds.parity(f"protocol={protocol}", f"algorithm.name={schedule}", "algorithm.stages=2", agents="abc")
    one, other = worlds.world(settings), worlds.world(settings, wrap_sampler=worlds.Shuffled)
    reports = [[replace(r, seconds={}) for r in stage.train()] for stage in (one, other)]
    assert reports[0] == reports[1]
    assert [e.episodes for e in one.journal.evidence] == [e.episodes for e in other.journal.evidence]
    assert all(worlds.same(one.learner(n).snapshot(), other.learner(n).snapshot()) for n in "abc")
    assert any(one.learner(n).snapshot().weights for n in "abc")


def test_an_episode_does_not_depend_on_which_others_are_played_with_it() -> None:
    stage = worlds.world(worlds.parity("protocol={name='chain',rotate=true}", agents="abc"))
    plays = [Play(task=t) for t in stage.world.train[:12]]

    def played(some: Sequence[Play]) -> dict[str, Episode]:
        versions = stage.position.team.versions
        return {e.id: e for e in asyncio.run(stage.world.table.play(some, address=("x",), versions=versions))}

    together, alone = played(plays), played(plays[7:9])
    assert alone == {name: together[name] for name in alone}
    assert len({e.turns[0].seat for e in together.values()}) == 3, "each episode draws its own rotation"


# ---- every shipped protocol runs -------------------------------------------------------------------------------


SHIPPED = (
    "{name='chain',sees='all'}",
    "{name='chain',sees='previous'}",
    "{name='chain',rounds=2}",
    "{name='chain',rotate=true}",
    "{name='vote'}",
)


@pytest.mark.parametrize("agents", ["a", "ab", "abc"])
@pytest.mark.parametrize("protocol", SHIPPED)
def test_every_protocol_trains_a_stage_and_is_evaluated(protocol: str, agents: str, tmp_path: Path) -> None:
    """G06, G01: with one, two and three agents; every sampled token has its id, log-probability and version."""
    settings = worlds.parity(f"protocol={protocol}", "algorithm.stages=1", "env.prompts=200", agents=agents)
    finished = run.train(settings, run=tmp_path / "run")
    assert len(finished.updates) == len(agents)
    report = evaluate(tmp_path / "run", episodes=20)
    assert report["prompts"] == 20 and report["rows"][0]["name"] == "team"
    team = run.load_team(tmp_path / "run")
    episode = team.play(team.plan.splits.test[0])
    team.close()
    own = 2 if "rounds" in protocol else 1
    assert [sum(t.agent == name for t in episode.turns) for name in agents] == [own] * len(agents)
    for said in episode.turns:
        assert said.ids and len(said.ids) == len(said.logprobs) == len(said.versions)
        assert all(math.isfinite(p) and p <= 0 for p in said.logprobs)


def test_the_matrix_above_has_every_shipped_protocol() -> None:
    named = {config.parse(worlds.tree("ab"), [f"protocol={p}"]).protocol.name for p in SHIPPED}
    assert named == {options.model_fields["name"].default for options in (ChainOptions, VoteOptions)}
    with pytest.raises(ConfigError, match="not implemented in this version"):
        config.parse(worlds.tree("ab"), ["protocol={name='debate'}"])
