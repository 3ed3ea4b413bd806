"""The relay dealt otherwise, as environments of our own: backwards to the seats, to one agent alone, or in private codes;
and a chain of sums.

The first three have the tasks of `baton.envs.relay` for three agents, with their ids and answers, and so the same prompt
sets. A config names one by its dotted path: `env = {name = "relays:Backwards", arguments = {...}}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton.core.keyed import Key, choice, key, permutation, uniform
from baton.envs.env import Demonstration, Grade
from baton.envs.relay import LETTERS, RelayEnv, RelayOptions
from baton.errors import MissingError
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
    """Every seat but the last says its symbol in a code of its own: a permutation that belongs to the team.

    Tasks, answers and grades are the relay's, so nothing but the demonstrations shows a code, and no other team can read it.

    Args:
        code: which team's codes; those of another number are drawn anew.
        options: those of the relay.
    """

    seats = SEATS

    def __init__(self, *, code: int, **options: Any) -> None:
        super().__init__(**options)
        self._codes = [permutation(key("relay", "code", code, seat), self._options.symbols) for seat in range(SEATS - 1)]

    def task(self, index: int) -> Task:
        return self._relay.task(index)

    def said(self, word: str, words: list[str], seat: int) -> str:
        """How this seat says a symbol."""
        return words[self._codes[seat][words.index(word)]] if seat < SEATS - 1 else word

    def demonstration(self, task: Task, seat: int) -> Demonstration:
        given, words = self._relay.demonstration(task, seat), json.loads(task.payload)["words"]
        heard = tuple((who, self.said(what, words, int(who))) for who, what in given.heard)
        return replace(given, heard=heard, reply=self.said(given.reply, words, seat))

    def ablate(self, task: Task, seat: int, at: Key) -> str:
        return self._relay.ablate(task, seat, at)


DIGITS = "0123456789"
OPERATIONS = (*(("+", k) for k in range(10)), *(("*", k) for k in (1, 3, 7, 9)))
"""All of them can be undone, modulo 10: a wrong digit on the way is a wrong answer."""


class Sums:
    """A digit goes through three seats, and each does one operation modulo 10 to it that nobody else sees.

    A view begins with two letters that number the task and mean nothing: without them there were 14 views in all.

    Args:
        prompts: number of tasks.
        demonstration_accuracy: probability that a demonstration is right; otherwise it says another digit, uniformly.
    """

    name = "sums"
    seats = SEATS
    reward_range = (0.0, 1.0)
    is_generated = True

    def __init__(self, *, prompts: int = 20_000, demonstration_accuracy: float = 1.0) -> None:
        self.size, self._accuracy = prompts, demonstration_accuracy

    def task(self, index: int) -> Task:
        if not 0 <= index < self.size:
            raise MissingError(f"task {index} is outside 0..{self.size - 1}")
        draws = key("sums", index)
        start = choice(draws, 10)
        done = [OPERATIONS[choice(draws, len(OPERATIONS), index=1 + seat)] for seat in range(SEATS)]
        at = start
        for operation in done:
            at = result(operation, at)
        number = "".join(LETTERS[index // 26**i % 26] for i in range(2))
        shown = [f"{kind}{k}" for kind, k in done]
        return Task(
            id=f"sums-{index}",
            env=self.name,
            prompt=f"{number} {' '.join(shown)} in {start}",
            views=(f"{number} {shown[0]} in {start}", *(f"{number} {one}" for one in shown[1:])),
            answer=str(at),
            payload=json.dumps({"start": start, "operations": done}),
        )

    def grade(self, task: Task, answer: str) -> Grade:
        said = self.normalise(answer)
        if said is None:
            return Grade(0.0, "unparsed: no single digit" if answer.strip() else "empty: no answer")
        return Grade(1.0) if said == task.answer else Grade(0.0, "wrong")

    def normalise(self, answer: str) -> str | None:
        said = answer.strip()
        return said if len(said) == 1 and said in DIGITS else None

    def demonstration(self, task: Task, seat: int) -> Demonstration:
        """A seat that is not the first hears a uniform digit in place of the chain's own, as in the relay."""
        hidden, draws = json.loads(task.payload), key("sums", "demonstration", task.id, seat)
        at: int = hidden["start"] if seat == 0 else choice(draws, 10)
        kind, k = hidden["operations"][seat]
        said = result((kind, k), at)
        if uniform(draws, 1) >= self._accuracy:
            said = (said + 1 + choice(draws, 9, index=2)) % 10
        heard = () if seat == 0 else ((str(seat - 1), str(at)),)
        return Demonstration(seat=seat, view=task.view(seat), heard=heard, reply=str(said))

    def ablate(self, task: Task, seat: int, at: Key) -> str:
        return str(choice(at, 10))

    def facts(self, n_agents: int) -> Mapping[str, float]:
        """The accuracy of the best call that lacks one operation, exactly: it knows the digit that goes in."""
        best = [
            max(sum(result(one, at) == said for one in OPERATIONS) for said in range(10)) / len(OPERATIONS)
            for at in range(10)
        ]
        return {"cap_one_call": sum(best) / len(best)}


def result(operation: tuple[str, int], at: int) -> int:
    """What an operation makes of a digit."""
    kind, k = operation
    return (at + k if kind == "+" else at * k) % 10
