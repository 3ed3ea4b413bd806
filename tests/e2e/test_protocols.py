"""Who speaks when, what each one hears, and which message is the answer (ALGORITHMS 2.7); and that timing changes nothing
(5.6)."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import worlds

from baton import assemble, config, protocols, run
from baton.algorithms.state import UpdateReport
from baton.cli import main
from baton.core.batching import trajectories
from baton.core.keyed import key
from baton.engines.engine import Completion, Request
from baton.engines.table import TableCodec
from baton.envs import Splits
from baton.errors import BatonError, ConfigError
from baton.evaluation import Bench, evaluate
from baton.host import Silent
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
    options |= {"rule": "mine:rule"} if rule else {}
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


def test_own_words_that_nobody_sampled_are_shown_as_text() -> None:
    """Those of a seat that was replaced have no ids, and must not vanish from its next prompt for that."""
    said = Turn(kind="observation", agent="ada", seat=0, text="one")
    (_, own, _) = chain(2, rounds=2).messages(TASK, [said, turn(1, "two")], 0, "")
    assert (own.role, own.content, own.ids) == ("assistant", "one", None)


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


# ---- debate ----------------------------------------------------------------------------------------------------


def test_all_speak_in_every_round_of_a_debate() -> None:
    assert debate().own_turns == 2 and spoken(debate()) == [0, 1, 2, 0, 1, 2]
    talk = [turn(s, "x") for s in (0, 1, 2, 0, 1, 2)]
    assert [debate().due(TASK, talk[:n], 0) for n in (0, 3, 6)] == [(0, 1, 2), (0, 1, 2), ()]
    assert debate(rounds=4).own_turns == 4 and len(spoken(debate(rounds=4))) == 12


def test_a_debater_reads_the_earlier_rounds_and_its_own_answer_stands_before_the_others_of_its_round() -> None:
    talk = [turn(s, text) for s, text in ((0, "a1"), (1, "b1"), (2, "c1"), (0, "a2"), (1, "b2"), (2, "c2"))]
    protocol = debate(rounds=3)
    assert shown(protocol, [], 1, VIEWED) == [("user", "second view")]
    assert shown(protocol, talk, 1) == [
        ("user", "the question"),
        *(("assistant", "b1"), ("user", "[ada]: a1"), ("user", "[cy]: c1")),
        *(("assistant", "b2"), ("user", "[ada]: a2"), ("user", "[cy]: c2")),
    ]
    assert [m.ids for m in protocol.messages(TASK, talk, 1, "")[1:3]] == [(1, 2), None]


def test_the_last_round_of_a_debate_votes() -> None:
    first = [turn(s, "7", cut=True) for s in range(3)]
    last = [turn(0, "7"), turn(1, "4"), turn(2, "4", cut=True)]
    assert debate().answer([*first, *last], number, key("tie")) == "4"
    assert debate().answer([*first, turn(0, "eh"), turn(1, "4"), turn(2, "eh")], number, key("tie")) == "4"
    assert debate().answer([*first, *(turn(s, f"what? {s}") for s in range(3))], number, key("tie")) == "what? 0"
    ties = {debate(2).answer([turn(0, "1"), turn(1, "1"), turn(0, "4"), turn(1, "7")], number, key(n)) for n in range(20)}
    assert ties == {"4", "7"}
    assert not debate().is_cut([*first, *last]) and debate().is_cut([*last, *first])


def test_a_debater_is_told_that_it_will_read_the_others_and_a_voter_is_not() -> None:
    assert "You and 2 others" in debate().default_system(0) and "2 times" in debate().default_system(0)
    assert debate(rounds=1).default_system(0) == debate(1).default_system(0) == vote().default_system(0)


def test_a_routed_agent_is_told_its_name_its_teammates_and_how_to_call_them() -> None:
    told = router().default_system(1)
    assert all(word in told for word in ("You are bob", "ada, cy", "@ada"))
    by_rule = router(rule=worlds.handed_on)
    assert "@" not in by_rule.default_system(1) and router(1).default_system(0) == "Answer the question."


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


WORDS = ("0", "1", "@ada", "@bob", "@cy")
TALKERS = [TableCodec(WORDS, has_end=True)] * 3


def saying(script: dict[tuple[str, int], str]) -> Any:
    """What to say by (name, messages so far); 1 where nothing is scripted."""

    def says(request: Request) -> tuple[int, ...]:
        heard = TALKERS[0].decode(request.prompt_ids).count("]: ")
        return WORDS.index(script.get((request.agent, heard), "1")), len(WORDS)

    return says


def test_debaters_of_one_round_do_not_hear_each_other_and_each_trains_as_one_row() -> None:
    """What an agent has seen only grows at its end, so that its turns share one context."""
    table, sampler = at_table(debate(), lambda request: (int(request.agent != "bob"), 2))
    (episode,) = play(table, TASKS[:1])
    assert [read(wave[0]) for wave in sampler.waves] == [
        *["|question 0|"] * 3,
        "|question 0|1|[bob]: 0|[cy]: 1|",
        "|question 0|0|[ada]: 1|[cy]: 1|",
        "|question 0|1|[ada]: 1|[bob]: 0|",
    ]
    assert episode.outcome == Scored(reward=1.0) and episode.answer == "1"
    for name in NAMES:
        (row,) = trajectories(episode, name)
        assert sum(row.mask) == 4


def test_each_episode_of_a_router_goes_its_own_way_and_those_who_were_not_asked_have_no_row() -> None:
    def by_task(request: Request) -> tuple[int, ...]:
        asked = {"0": "@bob", "1": "@cy", "2": "0"}.get(TALKERS[0].decode(request.prompt_ids)[9], "1")
        return WORDS.index(asked if request.agent == "ada" else "1"), len(WORDS)

    table, sampler = at_table(router(), by_task, codecs=TALKERS)
    episodes = play(table, TASKS[:3])
    assert [[t.agent for t in e.turns] for e in episodes] == [["ada", "bob"], ["ada", "cy"], ["ada"]]
    assert [e.answer for e in episodes] == ["1", "1", "0"]
    assert [[r.agent for r in wave] for wave in sampler.waves] == [["ada"] * 3, ["bob"], ["cy"]]
    assert [[len(trajectories(e, name)) for name in NAMES] for e in episodes] == [[1, 1, 0], [1, 0, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("until", "spoken"),
    [("ada", "ada bob ada"), ("bob", "ada bob ada bob"), ("cy", "ada bob ada bob"), (None, "ada bob ada bob")],
)
def test_a_probe_of_a_router_ends_at_the_agents_cap_or_with_the_episode(until: str | None, spoken: str) -> None:
    script = {("ada", 0): "@bob", ("bob", 1): "@ada", ("ada", 1): "@bob", ("bob", 2): "@ada"}
    table, _ = at_table(router(), saying(script), codecs=TALKERS)
    (episode,) = play(table, TASKS[:1], until=until)
    assert " ".join(t.agent for t in episode.turns) == spoken
    assert (episode.outcome == Failed(reason="probe")) == (until is not None)


def test_a_rule_that_raises_fails_that_episode_only() -> None:
    def picky(task: Task, turns: Sequence[Turn], names: Sequence[str]) -> int | None:
        if turns and task.id == "t1":
            raise KeyError("no such team")
        return None if turns else 0

    table, _ = at_table(router(rule=picky), lambda request: (1, 2))
    episodes = play(table, TASKS[:3])
    assert [e.outcome for e in episodes] == [
        Scored(reward=1.0),
        Failed(reason="rule: protocol.rule = 'mine:rule' raised KeyError: 'no such team'"),
        Scored(reward=1.0),
    ]
    assert len(episodes[1].turns) == 1 and episodes[1].answer == ""


# ---- what is refused before a model loads ----------------------------------------------------------------------

RULES = """
def first(task, turns, names):
    return None if turns else names.index("b")

def by_name(task, turns, names):
    return names[0]

def late(task, turns, names):
    return 5 if turns else 0

def broken(task, turns, names):
    raise RuntimeError("not today")

constant = 1
"""


def ruled(rule: str, folder: Path) -> assemble.Plan:
    (folder / f"rules_{folder.name}.py").write_text(RULES, encoding="utf-8")
    rule = rule.replace("rules:", f"rules_{folder.name}:")
    return assemble.prepare(worlds.parity(f"protocol={{name='router',rule='{rule}'}}"), root=folder)


def test_a_rule_is_loaded_from_the_configs_folder(tmp_path: Path) -> None:
    protocol = ruled("rules:first", tmp_path).protocol
    assert protocol.due(TASK, [], 0) == (1,) and protocol.due(TASK, [turn(1, "x")], 0) == ()


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("rules:by_name", ["gave 'a' after 0 messages", "0..1: a, b"]),
        ("rules:late", ["gave 5 after 1 messages"]),
        ("rules:constant", ["protocol.rule", "holds a int there"]),
        ("rules:absent", ["protocol.rule", "has no such name"]),
        (
            "rules_of_nobody:f",
            ["protocol.rule = 'rules_of_nobody:f'", "importing rules_of_nobody raised ModuleNotFoundError"],
        ),
        ("mentoin", ["protocol.rule", "'mentoin' is no rule", "mention", "my_rules:route"]),
    ],
)
def test_a_rule_that_cannot_work_is_refused_before_a_model_loads(rule: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        ruled(rule, tmp_path)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_a_rule_that_raises_everywhere_is_told_at_the_start_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a grader that always fails is: nothing could be played."""
    ruled("rules:broken", tmp_path)
    monkeypatch.chdir(tmp_path)
    settings = worlds.parity(f"protocol={{name='router',rule='rules_{tmp_path.name}:broken'}}")
    with pytest.raises(BatonError, match=r"episodes of the start failed: rule: .*broken' raised RuntimeError: not today"):
        run.train(settings, run=tmp_path / "run")


@pytest.mark.parametrize(
    ("protocol", "needed"),
    [
        (vote(), 16),
        (debate(), 33),
        (debate(rounds=3), 50),
        (chain(), 32),
        (chain(rounds=2), 49),
        (router(), 16),
        (router(rule=worlds.handed_on), 31),
    ],
)
def test_a_context_must_hold_every_own_turn_that_can_be_foreseen(protocol: TeamProtocol, needed: int) -> None:
    """At least the task, and the empty messages of those who spoke before: for a debater those of all earlier rounds."""
    splits = Splits(train=(TASK,), probe=(), certify=(), test=(), record={})

    def check(context: int) -> None:
        codec = Small(("0", "1"), has_end=True, context=context)
        seats = [Seat(agent=n, system="", max_new_tokens=2, temperature=1.0, codec=codec) for n in NAMES]
        assemble.check_contexts(seats, protocol, splits)

    check(needed)
    with pytest.raises(
        ConfigError, match=rf"task t: the prompt of '\w+' has {needed - 2} tokens .* its context holds {needed - 1}"
    ):
        check(needed - 1)


# ---- timing changes nothing ------------------------------------------------------------------------------------


ROUTED = "{name='router',rule='worlds:handed_on'}"


@pytest.mark.parametrize(
    "protocol", ["{name='chain',rounds=2}", "{name='chain',rotate=true}", "{name='vote'}", "{name='debate'}", ROUTED]
)
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
    "{name='debate'}",
    "{name='router'}",
    ROUTED,
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
    took, most = [sum(t.agent == name for t in episode.turns) for name in agents], team.plan.protocol.own_turns
    assert took == [most] * len(agents) if "router" not in protocol else (sum(took) > 0 and max(took) <= most)
    for said in episode.turns:
        assert said.ids and len(said.ids) == len(said.logprobs) == len(said.versions)
        assert all(math.isfinite(p) and p <= 0 for p in said.logprobs)


def test_the_matrix_above_has_every_shipped_protocol() -> None:
    named = {config.parse(worlds.tree("ab"), [f"protocol={p}"]).protocol.name for p in SHIPPED}
    assert named == {options.model_fields["name"].default for options in get_args(protocols.ProtocolOptions)}


@pytest.mark.parametrize("alphabet", ["table:xy@b", "table:01"])
def test_a_routed_team_of_two_alphabets_has_all_its_baselines(alphabet: str, tmp_path: Path) -> None:
    """Every model sits in every seat once, with its own words; one answer alone may have as many messages as the team."""
    own = worlds.tree("ab") | {"protocol": {"name": "router"}}
    own["agents"][0] |= {"model": alphabet, "max_new_tokens": 3}
    settings = config.parse(own, ["algorithm.stages=1", "env.prompts=200"])
    run.train(settings, run=tmp_path / "run")
    rows = {row["name"]: row for row in evaluate(tmp_path / "run", episodes=20)["rows"]}
    wanted = ["same model in all seats", "best single agent, equal tokens", "a replaced by chance", "untrained team"]
    assert all(rows[name]["n"] == 20 for name in wanted)
    assert rows[wanted[1]]["value"] > 0.2, "a table without an end token is asked for answers of its own length"
    assert "of 4 answers" in rows[wanted[1]]["note"] or "up to 4 times" in rows[wanted[1]]["note"]


@pytest.mark.parametrize(("written", "alone"), [("Be brief.", "Be brief."), ("default", "Answer the question."), ("", "")])
def test_an_agent_alone_has_the_system_prompt_that_the_config_wrote_for_it(written: str, alone: str) -> None:
    """A baseline that loses its instruction is beaten for that alone."""
    settings = worlds.parity(f"agents.a.system={written!r}", "agents.b.system='Another.'")
    bench = Bench(assemble.prepare(settings, root=Path()), k=1, episodes=4, reporter=Silent())
    try:
        assert bench.alone("a", bench.plan.codecs["a"], 2).seats[0].system == alone
        assert {seat.system for seat in bench.voting("a", bench.plan.codecs["a"], 3).seats} == {alone}
    finally:
        bench.close()


# ---- masked activation (ALGORITHMS 2.1) ------------------------------------------------------------------------


def masked(rule: Rule, *overrides: str, **more: Any) -> worlds.Stage:
    """A world of two whose router follows this rule."""
    stage = worlds.world(worlds.parity("protocol={name='router'}", *overrides), **more)
    protocol = protocols.build(RouterOptions(rule="mine:rule"), ("a", "b"), rule=rule)
    stage.world = replace(stage.world, table=replace(stage.world.table, protocol=protocol))
    return stage


def told(report: UpdateReport) -> str:
    assert isinstance(report.verdict, Rejected) and report.verdict.reason == "no_signal" and not report.looks
    assert report.steps == () and report.to_version is None
    return report.verdict.detail


@pytest.mark.parametrize("schedule", ["sat", "joint", "independent"])
def test_an_agent_that_nobody_asks_is_left_as_it_was_and_the_others_train(schedule: str) -> None:
    """`mention` with tables that can name nobody: the first speaks, the second never does."""
    stage = worlds.world(worlds.parity("protocol={name='router'}", f"algorithm.name={schedule}", "algorithm.stages=2"))
    before = stage.learner("b").snapshot()
    reports = stage.train()
    assert len(reports) == 4 and isinstance(reports[0 if reports[0].agent == "a" else 1].verdict, Accepted)
    details = [told(r) for r in reports if r.agent == "b"]
    assert details == [f"'b' acted in 0 of {r.episodes.n} episodes" for r in reports][:2]
    assert worlds.same(stage.learner("b").snapshot(), before)
    assert all(r.episodes.tokens["b"] == 0 and r.episodes.cut["b"] == 0.0 for r in reports)


def test_probe_prompts_on_which_an_agent_does_not_act_are_no_units_of_its_gate() -> None:
    def sometimes(task: Task, turns: Sequence[Turn], names: Sequence[str]) -> int | None:
        return None if len(turns) == 2 else len(turns) if not turns or int(task.id.split("-")[-1]) % 3 else None

    stage = masked(sometimes, "algorithm.stages=1", "algorithm.order=static")
    reports = stage.train()
    assert [r.agent for r in reports] == ["a", "b"]
    for report, evidence in zip(reports, stage.journal.evidence, strict=True):
        acted = [e for e in evidence.probe if any(t.agent == report.agent for t in e.turns)]
        assert report.looks[0].n_units == len(acted) == (16 if report.agent == "a" else report.looks[0].n_states)
        own = [row for e in evidence.episodes for row in trajectories(e, report.agent)]
        assert report.steps[0].diagnostics["tokens"] + report.steps[1].diagnostics["tokens"] == len(own)
    assert 4 < reports[1].looks[0].n_units < 16


def only_on(ids: Collection[str]) -> Rule:
    """The first speaks; on these tasks the second after it."""

    def rule(task: Task, turns: Sequence[Turn], names: Sequence[str]) -> int | None:
        if not turns:
            return 0
        return 1 if len(turns) == 1 and task.id in ids else None

    return rule


def test_an_agent_without_a_probe_episode_is_not_judged_and_not_moved() -> None:
    train = {t.id for t in worlds.world(worlds.parity()).world.train}
    stage = masked(only_on(train), "algorithm.stages=1")
    before = stage.learner("b").snapshot()
    detail = next(told(r) for r in stage.train() if r.agent == "b")
    assert detail == "'b' acted on 0 probe prompts, the gate needs 1"
    assert worlds.same(stage.learner("b").snapshot(), before)


def test_a_gate_that_must_certify_counts_only_the_prompts_on_which_the_agent_acts() -> None:
    """Too few of them is a reason to leave the agent alone, not to end the run."""
    needed = ("gate.require_certified=true", "gate.quantile=0.7", "algorithm.stages=1", "algorithm.order=static")
    everywhere = masked(lambda task, turns, names: len(turns) if len(turns) < 2 else None, *needed)
    everywhere.train()
    probe = [e.task_id for e in everywhere.journal.evidence[1].probe]
    train = [t.id for t in everywhere.world.train]
    few, enough = (masked(only_on({*train, *probe[:n]}), *needed).train()[1] for n in (12, 13))
    assert told(few) == "'b' acted on 12 probe prompts, the gate needs 13"
    assert enough.looks[0].certified and enough.looks[0].n_units == 13


def test_an_agent_that_acts_only_where_nothing_is_at_stake_has_nothing_to_learn_from() -> None:
    """The informative groups are those of tasks on which nobody asks it; where it speaks, every answer is right."""
    tasks = [replace(TASK, id=f"t{n}", prompt=f"question {n}") for n in range(64)]
    easy = {task.id for task in tasks[::2]}

    def grade(answers: Sequence[tuple[Task, str]]) -> list[Any]:
        return [Scored(reward=float(task.id in easy or said == "1")) for task, said in answers]

    stage = masked(only_on(easy), "algorithm.stages=1", "algorithm.order=static", tasks=tasks, grade=grade)
    first, second = stage.train()
    assert isinstance(first.verdict, Accepted)
    asked = sum(e.task_id in easy for e in stage.journal.evidence[1].episodes)
    assert 0 < asked < second.episodes.n
    assert told(second) == f"'b' acted in {asked} of {second.episodes.n} episodes, none of them with an advantage"


# ---- it learns -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["sat", "joint"])
def test_debaters_learn_to_tell_each_other_what_they_know(schedule: str) -> None:
    """Each sees one bit; only what was said in the first round lets the second be right. The accuracy is enumerated."""
    stage = worlds.world(worlds.parity("protocol={name='debate'}", f"algorithm.name={schedule}", "algorithm.stages=40"))
    assert stage.accuracy() == 0.5
    stage.train()
    assert stage.accuracy() > 0.95


@pytest.mark.parametrize("schedule", ["sat", "joint"])
def test_a_router_learns_to_name_the_one_who_knows(schedule: str) -> None:
    """And the specialists learn from those episodes alone in which they were asked."""
    tasks, grade = worlds.specialists()
    stage = worlds.world(worlds.router("algorithm.stages=40", f"algorithm.name={schedule}"), tasks=tasks, grade=grade)
    assert sum(e.reward for e in stage.play(64)) < 0.2 * 128
    stage.train()
    episodes = stage.play(64)
    assert sum(e.reward for e in episodes) > 0.9 * 128
    asked = [(e.turns[0].text, [t.agent for t in e.turns]) for e in episodes]
    right = [[f"@{'xy'[int(e.task_id[1:]) % 2]}", ["r", "xy"[int(e.task_id[1:]) % 2]]] for e in episodes]
    assert sum(list(a) == r for a, r in zip(asked, right, strict=True)) > 0.9 * 128


def test_a_run_that_stalls_because_the_gate_never_hears_an_agent_says_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second agent is asked on train prompts alone, and the first may not move: every update is refused."""
    (tmp_path / "seldom.py").write_text(
        "import json, pathlib\n"
        "TRAIN = set(json.loads(pathlib.Path(__file__).with_name('train.json').read_text()))\n"
        "def rule(task, turns, agents):\n"
        "    return 0 if not turns else 1 if len(turns) == 1 and task.id in TRAIN else None\n"
    )
    settings = worlds.parity("agents.a.trainable=false", 'agents.a.lr="auto"', "algorithm.stages=4")
    splits = assemble.prepare(settings, root=tmp_path).splits
    (tmp_path / "train.json").write_text(json.dumps([t.id for t in splits.train]))
    text = config.parse(settings.model_dump(mode="json", exclude_none=True), ["protocol={name='router',rule='seldom:rule'}"])
    (tmp_path / "seldom.toml").write_text(text.to_toml())
    assert main(["train", str(tmp_path / "seldom.toml"), "--run", str(tmp_path / "run")]) == 3
    said = capsys.readouterr().out
    assert "Remedy: 'b' acted on 0 probe prompts, the gate needs 1; let the protocol call it more often" in said
    assert "all equal" not in said
