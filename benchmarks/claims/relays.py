"""The relay dealt otherwise, as environments of our own: backwards to the seats, or to one agent alone.

Both have the tasks of `baton.envs.relay` for three agents, with their ids and answers, and so the same prompt sets.
A config names one by its dotted path: `env = {name = "relays:Backwards", arguments = {...}}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton.core.keyed import Key, choice, key, uniform
from baton.envs.env import Demonstration, Grade
from baton.envs.relay import RelayEnv, RelayOptions
from baton.types import Task

SEATS = 3


class Dealt:
    """The relay of three agents, with all that does not depend on who sees what."""

    name = "relay"
    reward_range = (0.0, 1.0)
    is_generated = True

    def __init__(self, **options: Any) -> None:
        self._options = RelayOptions(**options)
        self._relay = RelayEnv(self._options, n_agents=SEATS)
        self.size = self._relay.size

    def grade(self, task: Task, answer: str) -> Grade:
        return self._relay.grade(task, answer)

    def normalise(self, answer: str) -> str | None:
        return self._relay.normalise(answer)

    def facts(self, n_agents: int) -> Mapping[str, float]:
        return self._relay.facts(SEATS)


class Backwards(Dealt):
    """The last table lies before the first speaker, and who has the start speaks last: the order 3, 2, 1.

    The holder of a table imitates what it would in the right order: what the table says of the symbol that it is told, or of
    the start. What differs is who speaks when: the first speaker imitates as if the second had asked, though in play nobody
    does, and the last one hears a symbol, as in play, though its reply does not depend on it.
    """

    seats = SEATS

    def task(self, index: int) -> Task:
        task = self._relay.task(index)
        return replace(task, views=task.views[::-1])

    def demonstration(self, task: Task, seat: int) -> Demonstration:
        given = self._relay.demonstration(replace(task, views=task.views[::-1]), SEATS - 1 - seat)
        words: list[str] = json.loads(task.payload)["words"]
        said = given.heard[0][1] if given.heard else words[choice(key("relay", "backwards", task.id), len(words))]
        return replace(given, seat=seat, heard=((str(seat - 1 if seat else 1), said),))

    def ablate(self, task: Task, seat: int, at: Key) -> str:
        return self._relay.ablate(task, SEATS - 1 - seat, at)


class Alone(Dealt):
    """One agent answers alone.

    Args:
        shard: it sees this seat's part of the question (0: the start and the first table); None: the whole question.
        works: it writes one symbol for each table, and the last one is its answer; else the answer alone.
        options: those of the relay.
    """

    seats = 1

    def __init__(self, *, shard: int | None = None, works: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._shard, self._works = shard, works

    def task(self, index: int) -> Task:
        task = self._relay.task(index)
        return replace(task, views=() if self._shard is None else (task.views[self._shard],))

    def grade(self, task: Task, answer: str) -> Grade:
        return self._relay.grade(task, self._last(answer))

    def normalise(self, answer: str) -> str | None:
        return self._relay.normalise(self._last(answer))

    def _last(self, answer: str) -> str:
        return answer.strip()[-1:] if self._works else answer

    def demonstration(self, task: Task, seat: int) -> Demonstration:
        """The answer, right as often as a seat's demonstration in the relay; or, where it works, the symbols of three such
        seats, each of which goes on from the one before, right or wrong."""
        hidden = json.loads(task.payload)
        words: list[str] = hidden["words"]
        draws = key("relay", "alone", task.id)
        at: int = hidden["start"]
        said: list[int] = []
        for i, table in enumerate(hidden["tables"]):
            at = table[at]
            if (self._works or i == SEATS - 1) and uniform(draws, 2 * i) >= self._options.demonstration_accuracy:
                at = (at + 1 + choice(draws, len(words) - 1, index=2 * i + 1)) % len(words)
            said.append(at)
        reply = "".join(words[i] for i in (said if self._works else said[-1:]))
        return Demonstration(seat=0, view=task.view(0), heard=(), reply=reply)
