"""Who acts when, what each agent then sees, and which message is the team's answer.

A protocol is a pure function of the task and the turns so far. `rollout` asks `due` whose turn it is, renders `messages`
for each of them, appends what they said, and repeats until nobody is due; then `answer` names the team's answer (ALGORITHMS
2.7). Whoever is not due emits nothing: it has no row, no unit of the gate and a ratio of 1 there (2.1, masked activation).
`baton.testing.check_protocol` is this contract as code.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any, Literal, Protocol, assert_never

from pydantic import BaseModel, ConfigDict, Field, field_validator

from baton.core.keyed import Key, choice
from baton.errors import ConfigError, TaskFault, cause
from baton.types import AgentId, Message, Task, Turn


class ChainOptions(BaseModel):
    """Agents speak in turn; the last speaker's message is the answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: Literal["chain"] = "chain"
    sees: Literal["all", "previous"] = Field(
        default="all", description="which earlier messages an agent sees: `all`, or only the `previous` speaker's"
    )
    rounds: int = Field(default=1, ge=1, description="times that each agent speaks")
    rotate: bool = Field(
        default=False, description="rotate the speaking order per episode (a relay then cannot pass .62-.67)"
    )


class VoteOptions(BaseModel):
    """All agents answer the bare question at once; the majority of the normalised answers is the answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: Literal["vote"] = "vote"


class DebateOptions(BaseModel):
    """All agents answer at once, several times, hearing the others' earlier rounds; the majority of the last one counts."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: Literal["debate"] = "debate"
    rounds: int = Field(default=2, ge=1, description="times that all agents answer")


class RouterOptions(BaseModel):
    """A rule picks who speaks; the last speaker's message is the answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: Literal["router"] = "router"
    rule: str = Field(
        default="mention",
        description="`mention`: the first agent begins, then whoever the last message names as @name; or a dotted path such "
        "as my_rules:route to a function (task, turns, names) -> seat or None",
    )
    max_turns: int = Field(
        default=2, ge=1, description="own turns of an agent, at most; picking one that had them ends the episode"
    )

    @field_validator("rule")
    @classmethod
    def _is_known(cls, rule: str) -> str:
        if rule != "mention" and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", rule):
            raise ValueError(f"'{rule}' is no rule; write mention, or a dotted path such as my_rules:route")
        return rule


ProtocolOptions = ChainOptions | VoteOptions | DebateOptions | RouterOptions

Rule = Callable[[Task, Sequence[Turn], Sequence[AgentId]], int | None]
"""Who speaks next, as an index of the names; None: the episode is over. Part of the environment: pure and untrained."""


class TeamProtocol(Protocol):
    """The rules of one episode."""

    @property
    def own_turns(self) -> int:
        """m: the most turns that one agent can take in an episode."""
        ...

    @property
    def rotates(self) -> bool:
        """The speaking order starts at another seat in every episode (`rotation`, drawn per episode)."""
        ...

    def due(self, task: Task, turns: Sequence[Turn], rotation: int) -> tuple[int, ...]:
        """Seats that speak now (several: at once, none sees the others); empty when the episode is over.

        Raises:
            TaskFault: the environment's part of it failed; the episode becomes `Failed`.
        """
        ...

    def messages(self, task: Task, turns: Sequence[Turn], seat: int, system: str) -> tuple[Message, ...]:
        """The conversation as this seat sees it. Teammates' messages enter as user text under their names."""
        ...

    def answer(self, turns: Sequence[Turn], normalise: Callable[[str], str | None], tie: Key) -> str:
        """The team's answer."""
        ...

    def is_cut(self, turns: Sequence[Turn]) -> bool:
        """The answer was cut at its token limit."""
        ...

    def default_system(self, seat: int) -> str:
        """What a seat is told where the config gives it no system prompt of its own."""
        ...


def heard(name: AgentId, text: str) -> Message:
    """A teammate's message as another agent reads it."""
    return Message(role="user", content=f"[{name}]: {text}")


def _conversation(task: Task, turns: Sequence[Turn], seat: int, system: str) -> tuple[Message, ...]:
    head = (Message(role="system", content=system),) if system else ()
    said = tuple(
        Message(role="assistant", content=turn.text, ids=turn.ids or None)
        if turn.seat == seat
        else heard(turn.agent, turn.text)
        for turn in turns
    )
    return (*head, Message(role="user", content=task.view(seat)), *said)


@dataclass(frozen=True)
class Chain:
    """Turn taking: one active agent per state, by position."""

    agents: tuple[AgentId, ...]
    options: ChainOptions

    @property
    def own_turns(self) -> int:
        return self.options.rounds

    @property
    def rotates(self) -> bool:
        return self.options.rotate

    def due(self, task: Task, turns: Sequence[Turn], rotation: int) -> tuple[int, ...]:
        if len(turns) >= len(self.agents) * self.options.rounds:
            return ()
        return ((len(turns) + rotation) % len(self.agents),)

    def messages(self, task: Task, turns: Sequence[Turn], seat: int, system: str) -> tuple[Message, ...]:
        if self.options.sees == "previous":
            turns = [t for i, t in enumerate(turns) if t.seat == seat or i == len(turns) - 1]
        return _conversation(task, turns, seat, system)

    def answer(self, turns: Sequence[Turn], normalise: Callable[[str], str | None], tie: Key) -> str:
        return turns[-1].text

    def is_cut(self, turns: Sequence[Turn]) -> bool:
        return turns[-1].cut

    def default_system(self, seat: int) -> str:
        n = len(self.agents)
        if n == 1:
            return "Answer the question."
        where = f"You are step {seat + 1} of {n} in a team that solves a task together. "
        sees = "" if seat == 0 else "You see your part of the task and the earlier steps' messages, each under its name. "
        if seat < n - 1:
            return where + sees + "Reply with what the next step needs, and nothing else."
        return where + sees + "Reply with the final answer, and nothing else."


@dataclass(frozen=True)
class Debate:
    """Simultaneous play: all are active in each round, then the last one's majority. A vote is a debate of one round."""

    agents: tuple[AgentId, ...]
    rounds: int

    @property
    def own_turns(self) -> int:
        return self.rounds

    @property
    def rotates(self) -> bool:
        return False

    def due(self, task: Task, turns: Sequence[Turn], rotation: int) -> tuple[int, ...]:
        n = len(self.agents)
        return tuple(range(n)) if len(turns) < n * self.rounds else ()

    def messages(self, task: Task, turns: Sequence[Turn], seat: int, system: str) -> tuple[Message, ...]:
        """A round's own message stands before the others' of that round: it was said without hearing them, and so what an
        agent has seen only ever grows at its end."""
        n = len(self.agents)
        rounds = [turns[first : first + n] for first in range(0, len(turns), n)] if self.rounds > 1 else []
        own_first = [turn for said in rounds for turn in sorted(said, key=lambda t: t.seat != seat)]
        return _conversation(task, own_first, seat, system)

    def answer(self, turns: Sequence[Turn], normalise: Callable[[str], str | None], tie: Key) -> str:
        """The raw text behind the last round's most frequent normalised answer; unparseable ones do not vote; ties by keyed
        draw."""
        last = self._last_round(turns)
        parsed = [(normalise(turn.text), turn.text) for turn in last]
        count = Counter(value for value, _ in parsed if value is not None)
        if not count:
            return last[0].text
        most = max(count.values())
        tied = sorted(value for value, votes in count.items() if votes == most)
        winner = tied[choice(tie, len(tied))]
        return next(text for value, text in parsed if value == winner)

    def is_cut(self, turns: Sequence[Turn]) -> bool:
        return all(turn.cut for turn in self._last_round(turns))

    def _last_round(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        return turns[-len(self.agents) :]

    def default_system(self, seat: int) -> str:
        ending = "End with the answer alone on the last line."
        if self.rounds == 1 or len(self.agents) == 1:
            return f"Answer the question. {ending}"
        return (
            f"You and {len(self.agents) - 1} others answer the same question, {self.rounds} times. After each time you read "
            f"their answers, each under its name: keep yours or mend it. The majority of the last answers counts. {ending}"
        )


def mention(task: Task, turns: Sequence[Turn], names: Sequence[AgentId]) -> int | None:
    """The rule `mention`: the first seat begins; then whoever the last message names first, as @name. A message that names
    nobody, nobody known or its own speaker is the last."""
    if not turns:
        return 0
    found = re.search(r"@([A-Za-z0-9_-]+)", turns[-1].text)
    return names.index(found[1]) if found and found[1] in names and found[1] != turns[-1].agent else None


@dataclass(frozen=True)
class Router:
    """Turn taking by state: the rule picks the one active agent."""

    agents: tuple[AgentId, ...]
    options: RouterOptions
    rule: Rule

    @property
    def own_turns(self) -> int:
        return self.options.max_turns

    @property
    def rotates(self) -> bool:
        return False

    def due(self, task: Task, turns: Sequence[Turn], rotation: int) -> tuple[int, ...]:
        """
        Raises:
            TaskFault: the rule raised.
            ConfigError: it gave something that is no seat.
        """
        name = self.options.rule
        try:
            with redirect_stdout(sys.stderr):  # standard output is the command's
                picked: Any = self.rule(task, tuple(turns), self.agents)
        except (Exception, SystemExit) as error:  # the documented edge: what user code raises is its own failure
            raise TaskFault(f"protocol.rule = '{name}' raised {cause(error)}") from error
        if picked is None and turns:
            return ()
        if not isinstance(picked, int) or isinstance(picked, bool) or not 0 <= picked < len(self.agents):
            raise ConfigError(
                f"protocol.rule = '{name}' gave {picked!r} after {len(turns)} messages of task {task.id}; it must give a "
                f"seat (an int of 0..{len(self.agents) - 1}: {', '.join(self.agents)}), or None once somebody has spoken"
            )
        return (picked,) if sum(turn.seat == picked for turn in turns) < self.options.max_turns else ()

    def messages(self, task: Task, turns: Sequence[Turn], seat: int, system: str) -> tuple[Message, ...]:
        return _conversation(task, turns, seat, system)

    def answer(self, turns: Sequence[Turn], normalise: Callable[[str], str | None], tie: Key) -> str:
        return turns[-1].text

    def is_cut(self, turns: Sequence[Turn]) -> bool:
        return turns[-1].cut

    def default_system(self, seat: int) -> str:
        others = [name for name in self.agents if name != self.agents[seat]]
        if not others:
            return "Answer the question."
        where = f"You are {self.agents[seat]}, in a team with {', '.join(others)}. "
        if self.options.rule != "mention":
            return where + "You may be asked when it helps. The last message of the team is its final answer."
        return (
            where
            + f"Write @ and a name, for example @{others[0]}, and that teammate speaks next. A message that names nobody "
            "is the final answer."
        )


def build(options: ProtocolOptions, agents: Sequence[AgentId], *, rule: Rule | None = None) -> TeamProtocol:
    """The protocol of these options for a team of these agents, in the order of their seats.

    Args:
        rule: the function that `RouterOptions.rule` names, where that is a dotted path.
    """
    names = tuple(agents)
    match options:
        case ChainOptions():
            return Chain(names, options)
        case VoteOptions():
            return Debate(names, 1)
        case DebateOptions():
            return Debate(names, options.rounds)
        case RouterOptions():
            if rule is None and options.rule != "mention":
                raise ConfigError(f"protocol.rule = '{options.rule}' was not loaded; give build the function as `rule`")
            return Router(names, options, rule or mention)
        case _:
            assert_never(options)
