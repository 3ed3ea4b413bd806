"""Every protocol passes the contract that outside authors run, and the contract refuses what breaks it (ALGORITHMS 2.7)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from baton import protocols
from baton.errors import ConfigError, TaskFault
from baton.protocols import (
    ChainOptions,
    DebateOptions,
    ProtocolOptions,
    RouterOptions,
    Rule,
    TeamProtocol,
    VoteOptions,
    heard,
)
from baton.testing import check_protocol
from baton.types import Message, Task, Turn

NAMES = ("ada", "bob", "cy")
TASK = Task(id="t", env="x", prompt="the question", answer="1")
TASKS = [
    replace(TASK, id=f"t{n}", prompt=f"question {n}", views=tuple(f"part {s} of question {n}" for s in range(3)))
    for n in range(4)
]
SAYS = ("7", "4", "", "@ada, what is it?", "I ask @bob", "@cy", "@nobody", "mail me at a @ b")


def made(options: ProtocolOptions, agents: int = 3, rule: Rule | None = None) -> TeamProtocol:
    return protocols.build(options, NAMES[:agents], rule=rule)


def check(protocol: TeamProtocol, agents: int = 3, **more: Any) -> None:
    check_protocol(protocol, agents=NAMES[:agents], tasks=TASKS, says=SAYS, **more)


PROMISED: Sequence[ProtocolOptions] = (
    ChainOptions(),
    ChainOptions(rounds=3),
    ChainOptions(rounds=2, rotate=True),
    ChainOptions(sees="previous"),
    VoteOptions(),
    DebateOptions(),
    DebateOptions(rounds=1),
    DebateOptions(rounds=4),
    RouterOptions(),
    RouterOptions(max_turns=1),
    RouterOptions(max_turns=5),
)


@pytest.mark.parametrize("agents", [1, 2, 3])
@pytest.mark.parametrize("options", PROMISED, ids=repr)
def test_every_protocol_passes_the_contract(options: ProtocolOptions, agents: int) -> None:
    check(made(options, agents), agents)


def test_a_chain_that_forgets_promises_no_growing_conversation_and_is_held_to_the_rest() -> None:
    forgetful = made(ChainOptions(sees="previous", rounds=2, rotate=True))
    check(forgetful, is_append_only=False)
    with pytest.raises(AssertionError, match="not append-only"):
        check(forgetful)


def shortest_view_first(task: Task, turns: Sequence[Turn], names: Sequence[str]) -> int | None:
    """A user's rule: seats in the order of their task's id, until somebody says 7."""
    if turns and turns[-1].text.startswith("7"):
        return None
    return (len(turns) + int(task.id[1:])) % len(names)


def test_a_rule_that_a_user_wrote_passes_the_contract() -> None:
    options = RouterOptions(rule="mine:shortest_view_first")
    check(made(options, rule=shortest_view_first))
    assert made(options, rule=shortest_view_first).due(TASKS[2], (), 0) == (2,), "it sees the task"


# ---- router ----------------------------------------------------------------------------------------------------


def said(seat: int, text: str) -> Turn:
    return Turn(kind="observation", agent=NAMES[seat], seat=seat, text=text)


@pytest.mark.parametrize(
    ("text", "next_seat"),
    [
        ("@bob knows", (1,)),
        ("(@bob)", (1,)),
        ("7@cy", (2,)),
        ("@bob or @cy", (1,)),
        ("@bobby", ()),
        ("@bob-", ()),
        ("@Bob", ()),
        ("@nobody, @bob", ()),
        ("bob", ()),
        ("@ bob", ()),
        ("@ada", ()),
        ("", ()),
    ],
)
def test_the_first_name_that_a_message_mentions_is_due(text: str, next_seat: tuple[int, ...]) -> None:
    """An unknown name, no name or one's own end the episode."""
    assert made(RouterOptions()).due(TASK, [], 0) == (0,)
    assert made(RouterOptions()).due(TASK, [said(0, text)], 0) == next_seat


def test_naming_an_agent_that_had_its_turns_ends_the_episode() -> None:
    talk = [said(0, "@bob"), said(1, "@ada"), said(0, "@bob"), said(1, "@ada")]
    router = made(RouterOptions())
    assert [router.due(TASK, talk[:n], 0) for n in range(5)] == [(0,), (1,), (0,), (1,), ()]
    assert made(RouterOptions(max_turns=1)).due(TASK, talk[:2], 0) == ()
    assert router.own_turns == 2 and router.answer(talk, str, b"") == "@ada"  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [3, -1, True, "bob", 1.0, (1,)])
def test_a_rule_that_gives_no_seat_is_told_what_it_gave(given: Any) -> None:
    router = made(RouterOptions(rule="mine:odd"), rule=lambda task, turns, names: given)
    with pytest.raises(ConfigError) as refusal:
        router.due(TASK, [said(0, "x")], 0)
    for part in ("protocol.rule = 'mine:odd'", repr(given), "0..2", "ada, bob, cy", "task t"):
        assert part in str(refusal.value)


def test_somebody_has_to_begin() -> None:
    router = made(RouterOptions(rule="mine:nobody"), rule=lambda task, turns, names: None)
    assert router.due(TASK, [said(0, "x")], 0) == ()
    with pytest.raises(ConfigError, match="gave None after 0 messages"):
        router.due(TASK, [], 0)


def test_what_a_rule_raises_is_a_fault_of_the_task() -> None:
    router = made(RouterOptions(rule="mine:broken"), rule=lambda task, turns, names: names.index("dan"))  # type: ignore[attr-defined]
    with pytest.raises(TaskFault, match=r"protocol\.rule = 'mine:broken' raised ValueError"):
        router.due(TASK, [], 0)


def test_a_rule_cannot_change_what_was_said() -> None:
    def greedy(task: Task, turns: Any, names: Sequence[str]) -> int:
        turns.clear()
        return 0

    turns = [said(0, "x")]
    with pytest.raises(TaskFault):
        made(RouterOptions(rule="mine:greedy"), rule=greedy).due(TASK, turns, 0)
    assert len(turns) == 1


def test_a_dotted_path_must_be_loaded_by_whoever_builds_the_protocol() -> None:
    with pytest.raises(ConfigError, match="'mine:rule' was not loaded"):
        made(RouterOptions(rule="mine:rule"))


# ---- the contract refuses --------------------------------------------------------------------------------------


class Broken:
    """A protocol that is another one, save for what a test breaks."""

    def __init__(self, inner: TeamProtocol, **broken: Callable[..., Any]) -> None:
        self._inner, self._broken = inner, broken

    def __getattr__(self, name: str) -> Any:
        if name in self._broken:
            return lambda *args: self._broken[name](self._inner, *args)
        return getattr(self._inner, name)


class Remembering:
    """A rule with a memory: whoever it picked is not picked again, whatever was said."""

    def __init__(self) -> None:
        self.picked: list[int] = []

    def __call__(self, task: Task, turns: Sequence[Turn], names: Sequence[str]) -> int | None:
        if turns and len(self.picked) >= len(names):
            return None
        self.picked.append(len(self.picked) % len(names))
        return self.picked[-1]


def hears_at_once(inner: TeamProtocol, task: Task, turns: Sequence[Turn], seat: int, system: str) -> tuple[Message, ...]:
    """A debate rendered in the order of seats: one's own answer stands behind what one had not heard."""
    own = tuple(
        Message(role="assistant", content=t.text, ids=t.ids) if t.seat == seat else heard(t.agent, t.text) for t in turns
    )
    head = (Message(role="system", content=system),) if system else ()
    return (*head, Message(role="user", content=task.view(seat)), *own)


def messages_with(change: Callable[[Message], Message]) -> Callable[..., tuple[Message, ...]]:
    def render(inner: TeamProtocol, *args: Any) -> tuple[Message, ...]:
        return tuple(change(m) for m in inner.messages(*args))

    return render


DIE = itertools.count()
"""Another number at each call."""


DEBATE, ROUTER = made(DebateOptions()), made(RouterOptions())
BREACHES: dict[str, tuple[Any, str]] = {
    "a rule with a memory": (made(RouterOptions(rule="mine:remembering"), rule=Remembering()), "no function of the turns"),
    "a rule that raises": (
        made(RouterOptions(rule="mine:broken"), rule=lambda task, turns, names: 1 // len(turns)),
        "episode 0 failed on task t0: protocol.rule = 'mine:broken' raised ZeroDivisionError",
    ),
    "a seat that does not exist": (Broken(DEBATE, due=lambda inner, *args: (3,)), "due names seat 3 of 3"),
    "an episode without end": (
        Broken(made(ChainOptions(rounds=2)), due=lambda inner, task, turns, rotation: (len(turns) % 3,)),
        "'ada' is due again after 2 of 2 own turns",
    ),
    "a seat that is asked twice at once": (
        Broken(made(VoteOptions()), due=lambda inner, *args: (0, 0)),
        "due again after 1",
    ),
    "nobody ever": (Broken(DEBATE, due=lambda inner, *args: ()), "nobody is due"),
    "simultaneous speakers that hear each other": (
        Broken(DEBATE, messages=hears_at_once),
        "hear each other|not append-only",
    ),
    "a view of another seat": (
        Broken(
            ROUTER, messages=lambda inner, task, turns, seat, system: inner.messages(task, turns, (seat + 1) % 3, system)
        ),
        "own view",
    ),
    "lost ids": (Broken(DEBATE, messages=messages_with(lambda m: replace(m, ids=None))), "with their sampled ids"),
    "a teammate's words as one's own": (
        Broken(ROUTER, messages=messages_with(lambda m: replace(m, role="assistant") if "[" in m.content else m)),
        "a user's under their names",
    ),
    "a message that nobody said": (
        Broken(ROUTER, messages=lambda inner, *args: (*inner.messages(*args), Message(role="user", content="hurry"))),
        "'hurry', which nobody said",
    ),
    "own words that are lost": (
        Broken(DEBATE, messages=lambda inner, *args: tuple(m for m in inner.messages(*args) if m.role != "assistant")),
        "not shown its own message|not append-only",
    ),
    "a system prompt that is lost": (
        Broken(ROUTER, messages=lambda inner, task, turns, seat, system: inner.messages(task, turns, seat, "")),
        "system prompt",
    ),
    "a die in the rendering": (
        Broken(ROUTER, messages=lambda inner, *args: inner.messages(*args)[next(DIE) % 2 :]),
        "something else when asked again",
    ),
    "a die in the answer": (
        Broken(DEBATE, answer=lambda inner, turns, *args: turns[next(DIE) % 2].text),
        "the answer is '.*', and '.*' when asked again",
    ),
    "an answer that nobody gave": (Broken(DEBATE, answer=lambda inner, *args: "42"), "'42' is none of the messages"),
    "cut messages that count as whole": (Broken(ROUTER, is_cut=lambda inner, turns: False), "is_cut"),
    "no word to a seat": (Broken(ROUTER, default_system=lambda inner, seat: ""), "seat 0 has no default system prompt"),
}


@pytest.mark.parametrize("breach", sorted(BREACHES))
def test_the_contract_refuses(breach: str) -> None:
    protocol, words = BREACHES[breach]
    with pytest.raises(AssertionError, match=words):
        check(protocol)


def test_simultaneous_speakers_are_kept_apart_also_where_nothing_grows() -> None:
    with pytest.raises(AssertionError, match="simultaneous speakers hear each other"):
        check(Broken(DEBATE, messages=hears_at_once), is_append_only=False)  # type: ignore[arg-type]
