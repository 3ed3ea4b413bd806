"""Who acts when, what each agent then sees, and which message is the team's answer.

A protocol is a pure function of the turns so far. `rollout` asks `due` whose turn it is, renders `messages` for each of
them, appends what they said, and repeats until nobody is due; then `answer` names the team's answer (ALGORITHMS 2.7).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, assert_never

from pydantic import BaseModel, ConfigDict, Field

from baton.core.keyed import Key, choice
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
        default=False, description="rotate the speaking order per episode (caps a relay at .62-.67, ALGORITHMS 11)"
    )


class VoteOptions(BaseModel):
    """All agents answer the bare question at once; the majority of the normalised answers is the answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: Literal["vote"] = "vote"


ProtocolOptions = ChainOptions | VoteOptions

LATER_PROTOCOLS = ("debate", "router")
"""Protocols that the specification names and this version refuses."""


class TeamProtocol(Protocol):
    """The rules of one episode for `n` seats."""

    @property
    def own_turns(self) -> int:
        """m: the most turns that one agent takes in an episode."""
        ...

    @property
    def rotates(self) -> bool:
        """The speaking order starts at another seat in every episode (`rotation`, drawn per episode)."""
        ...

    def due(self, turns: Sequence[Turn], rotation: int) -> tuple[int, ...]:
        """Seats that speak now (several: at once, none sees the others); empty when the episode is over."""
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
        Message(role="assistant", content=turn.text, ids=turn.ids) if turn.seat == seat else heard(turn.agent, turn.text)
        for turn in turns
    )
    return (*head, Message(role="user", content=task.view(seat)), *said)


@dataclass(frozen=True)
class Chain:
    """Turn taking: one active agent per state, by position."""

    seats: int
    options: ChainOptions

    @property
    def own_turns(self) -> int:
        return self.options.rounds

    @property
    def rotates(self) -> bool:
        return self.options.rotate

    def due(self, turns: Sequence[Turn], rotation: int) -> tuple[int, ...]:
        if len(turns) >= self.seats * self.options.rounds:
            return ()
        return ((len(turns) + rotation) % self.seats,)

    def messages(self, task: Task, turns: Sequence[Turn], seat: int, system: str) -> tuple[Message, ...]:
        if self.options.sees == "previous":
            turns = [t for i, t in enumerate(turns) if t.seat == seat or i == len(turns) - 1]
        return _conversation(task, turns, seat, system)

    def answer(self, turns: Sequence[Turn], normalise: Callable[[str], str | None], tie: Key) -> str:
        return turns[-1].text

    def is_cut(self, turns: Sequence[Turn]) -> bool:
        return turns[-1].cut

    def default_system(self, seat: int) -> str:
        if self.seats == 1:
            return "Answer the question."
        where = f"You are step {seat + 1} of {self.seats} in a team that solves a task together. "
        sees = "" if seat == 0 else "You see your part of the task and the earlier steps' messages, each under its name. "
        if seat < self.seats - 1:
            return where + sees + "Reply with what the next step needs, and nothing else."
        return where + sees + "Reply with the final answer, and nothing else."


@dataclass(frozen=True)
class Vote:
    """Simultaneous play: one joint step, then a majority."""

    seats: int
    options: VoteOptions

    @property
    def own_turns(self) -> int:
        return 1

    @property
    def rotates(self) -> bool:
        return False

    def due(self, turns: Sequence[Turn], rotation: int) -> tuple[int, ...]:
        return () if turns else tuple(range(self.seats))

    def messages(self, task: Task, turns: Sequence[Turn], seat: int, system: str) -> tuple[Message, ...]:
        return _conversation(task, (), seat, system)

    def answer(self, turns: Sequence[Turn], normalise: Callable[[str], str | None], tie: Key) -> str:
        """The raw text behind the most frequent normalised answer; unparseable ones do not vote; ties by keyed draw."""
        parsed = [(normalise(turn.text), turn.text) for turn in turns]
        count = Counter(value for value, _ in parsed if value is not None)
        if not count:
            return turns[0].text
        most = max(count.values())
        tied = sorted(value for value, votes in count.items() if votes == most)
        winner = tied[choice(tie, len(tied))]
        return next(text for value, text in parsed if value == winner)

    def is_cut(self, turns: Sequence[Turn]) -> bool:
        return all(turn.cut for turn in turns)

    def default_system(self, seat: int) -> str:
        return "Answer the question. End with the answer alone on the last line."


def build(options: ProtocolOptions, seats: int) -> TeamProtocol:
    """The protocol of these options for a team of `seats` agents."""
    match options:
        case ChainOptions():
            return Chain(seats, options)
        case VoteOptions():
            return Vote(seats, options)
        case _:
            assert_never(options)
