"""The relay dealt otherwise, as environments of our own: backwards to the seats, to one agent alone, or in a private code.

All have the tasks of `baton.envs.relay` for three agents, with their ids and answers, and so the same prompt sets.
A config names one by its dotted path: `env = {name = "relays:Backwards", arguments = {...}}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton.core.keyed import Key, choice, key, permutation, uniform, uniforms
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


class Coded(Dealt):
    """The relay in a private code: what a seat hands on is its symbol under a permutation that this team agreed on.

    Demonstrations speak the code, so that a team learns it before it plays; the answer is plain. Another `code` is another
    team: its agents are as able, and what they say means something else.

    Args:
        code: whose permutations.
        sums: each seat sees one operation on a digit (+3, x7, ...) in place of a table.
        options: those of the relay.
    """

    seats = SEATS

    def __init__(self, *, code: int, sums: bool = False, **options: Any) -> None:
        super().__init__(**({"symbols": len(DIGITS), "layout": "row"} if sums else {}) | options)
        self._code, self._sums = code, sums

    def task(self, index: int) -> Task:
        if not self._sums:
            return self._relay.task(index)
        draws = uniforms([key("relays", "sums", index)], 1 + SEATS)[0]
        start, picked = int(draws[0] * len(DIGITS)), [OPERATIONS[int(u * len(OPERATIONS))] for u in draws[1:]]
        at, tables = start, [[operate(word, digit) for digit in range(len(DIGITS))] for word in picked]
        for table in tables:
            at = table[at]
        # A number of its own makes a task's demonstrations differ from those of tasks with the same operation.
        mark = f"#{index:05d}"
        views = (f"{picked[0]} on {start} {mark}", *(f"{word} {mark}" for word in picked[1:]))
        return Task(
            id=f"sums-{index}",
            env=self.name,
            prompt=f"{' '.join(picked)} on {start} {mark}",
            views=views,
            answer=DIGITS[at],
            payload=json.dumps({"words": list(DIGITS), "start": start, "tables": tables, "index": index}),
        )

    def spoken(self, seat: int, words: list[str]) -> list[str]:
        """Of each symbol, what this seat says for it."""
        if seat == SEATS - 1:
            return words
        return [words[i] for i in permutation(key("relays", "code", self._code, seat), len(words))]

    def demonstration(self, task: Task, seat: int) -> Demonstration:
        """A seat's reply, right as often as in the relay; a seat that is not the first hears a uniform symbol, in code."""
        hidden = json.loads(task.payload)
        words: list[str] = hidden["words"]
        draws = key("relays", "coded", task.id, seat)
        at = hidden["start"] if seat == 0 else choice(draws, len(words))
        said = hidden["tables"][seat][at]
        if uniform(draws, 1) >= self._options.demonstration_accuracy:
            said = (said + 1 + choice(draws, len(words) - 1, index=2)) % len(words)
        heard = () if seat == 0 else ((str(seat - 1), self.spoken(seat - 1, words)[at]),)
        return Demonstration(seat=seat, view=task.view(seat), heard=heard, reply=self.spoken(seat, words)[said])

    def ablate(self, task: Task, seat: int, at: Key) -> str:
        words: list[str] = json.loads(task.payload)["words"]
        return words[choice(at, len(words))]


DIGITS = "0123456789"
OPERATIONS = (*(f"+{n}" for n in range(10)), *(f"x{n}" for n in (3, 7, 9)))
"""Each a permutation of the digits (modulo 10)."""


def operate(operation: str, digit: int) -> int:
    """The digit that an operation makes of a digit."""
    number = int(operation[1:])
    return (digit + number if operation[0] == "+" else digit * number) % len(DIGITS)
