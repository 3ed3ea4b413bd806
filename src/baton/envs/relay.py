"""The permutation relay: a task that provably needs the team (ALGORITHMS section 11).

n agents, m symbols. Agent i alone sees a fresh uniform permutation T_i; the first also sees a uniform start p0. The
answer is T_n(...T_1(p0)). In the order 1..n a message of one symbol suffices and the team can reach 1.0. A call that
lacks one table is right with probability exactly 1/m, whatever its size, and wrong orders are capped (`cap_*` below).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from baton.core.keyed import Key, choice, key, uniform, uniforms
from baton.envs.env import Demonstration, Grade
from baton.errors import ConfigError, MissingError
from baton.types import Task

LETTERS = "abcdefghijklmnopqrstuvwxyz"
"""Symbols of layout 'keys': a table writes the upper-case letter before what it becomes, so that a key is never a value."""

SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

NAMES = (
    *("Anna", "Ben", "Carl", "David", "Emma", "Frank", "Grace", "Henry"),
    *("Jack", "Kate", "Mary", "Paul", "Peter", "Rose", "Sam", "Tom"),
)
"""Short first names; with a leading space each is one token of the usual byte-pair vocabularies."""

_BLOCK = 512
_EDGE = " \t\r\n.,;:!?\"'`*()[]{}<>_-"


class RelayOptions(BaseModel):
    """Options of the permutation relay."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["relay"] = Field(default="relay", description="The permutation relay.")
    form: Literal["symbols", "names"] = Field(
        default="symbols",
        description="How a task is written: single characters (tiny models) or first names in sentences (language models).",
    )
    symbols: int = Field(
        default=8,
        ge=2,
        le=len(SYMBOLS),
        description="Alphabet size m, 2 to 62 (names: 2 to 16). Default 8, or 4 with form = 'names'.",
    )
    prompts: int = Field(default=20_000, ge=1, description="Number of tasks that the run draws its four prompt sets from.")
    demonstration_accuracy: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Probability that a demonstration is right; otherwise it names another symbol, uniformly. Below 1, "
        "imitation alone cannot do better than this per seat.",
    )
    layout: Literal["keys", "row", "pairs"] = Field(
        default="keys",
        description="Table text of form = 'symbols': 'keys' AcBa.. (a becomes c, b becomes a; up to 26 symbols), "
        "'row' T(0)T(1).., 'pairs' 0>T(0) 1>T(1) ..",
    )

    @model_validator(mode="before")
    @classmethod
    def _four_names(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("form") == "names" and "symbols" not in data:
            return {**data, "symbols": 4}
        return data

    @model_validator(mode="after")
    def _enough_letters(self) -> RelayOptions:
        if self.form == "symbols" and self.layout == "keys" and self.symbols > len(LETTERS):
            raise ValueError(f"symbols = {self.symbols}: layout 'keys' has {len(LETTERS)} letters; set layout = 'row'")
        return self

    @model_validator(mode="after")
    def _enough_names(self) -> RelayOptions:
        if self.form == "names" and self.symbols > len(NAMES):
            raise ValueError(f"symbols = {self.symbols}, but there are {len(NAMES)} names; lower it or use form = 'symbols'")
        return self


class RelayEnv:
    """The relay for n agents. Rewards are 0 or 1."""

    name = "relay"
    reward_range = (0.0, 1.0)
    is_generated = True
    is_isolated = False

    def __init__(self, options: RelayOptions, *, n_agents: int) -> None:
        if n_agents < 1:
            raise ConfigError(f"the relay needs at least one agent, got {n_agents}; add [[agents]]")
        self._options = options
        self._n = n_agents
        self._m = options.symbols
        self._is_names = options.form == "names"
        self._alphabet = (LETTERS if options.layout == "keys" else SYMBOLS)[: self._m]
        self._block = lru_cache(maxsize=4)(self._draw_block)

    @property
    def seats(self) -> int:
        return self._n

    @property
    def size(self) -> int:
        return self._options.prompts

    def task(self, index: int) -> Task:
        """The task with this index. `payload` holds start, tables and the words of the alphabet as JSON."""
        if not 0 <= index < self.size:
            raise MissingError(f"relay task {index} is outside 0..{self.size - 1}; raise env.prompts")
        words, start, tables = self._block(index // _BLOCK)[index % _BLOCK]
        at = start
        for table in tables:
            at = table[at]
        first, *later = [self._view(words, table) for table in tables]
        views = [self._with_start(first, words[start]), *later]
        if self._is_names:
            heard = " The last message says who has it."
            views = [f"{v}{heard if i else ''} Who gets it next? Answer with one name." for i, v in enumerate(views)]
        return Task(
            id=f"relay-{self._options.form}-{self._m}x{self._n}-{index}",
            env=self.name,
            prompt=self._full(words, start, tables),
            views=tuple(views),
            answer=words[at],
            payload=json.dumps({"words": words, "start": start, "tables": tables, "index": index}),
        )

    def grade(self, task: Task, answer: str) -> Grade:
        """1 for the right symbol and nothing else (form 'names': the first word, without punctuation and case)."""
        said = answer.strip()
        if not said:
            return Grade(0.0, "empty: no answer")
        if self._is_names:
            got = self.normalise(answer)
            if got is None:
                return Grade(0.0, "unparsed: the first word is no name")
            return Grade(1.0) if got == task.answer.casefold() else Grade(0.0, "wrong")
        if len(said) > 1:
            return Grade(0.0, "unparsed: more than one symbol")
        if said not in self._alphabet:
            return Grade(0.0, "unparsed: no symbol of the alphabet")
        return Grade(1.0) if said == task.answer else Grade(0.0, "wrong")

    def normalise(self, answer: str) -> str | None:
        said = answer.strip()
        if self._is_names:
            word = said.split(maxsplit=1)[0].strip(_EDGE).casefold() if said else ""
            return word if word in _FOLDED else None
        return said if len(said) == 1 and said in self._alphabet else None

    def demonstration(self, task: Task, seat: int) -> Demonstration:
        """A seat's reply, right with probability `demonstration_accuracy`. A seat that is not the first hears a uniform
        symbol in place of the chain's own: a warm start then teaches each hop by itself, and no seat the composition.
        """
        if not 0 <= seat < self._n:
            raise MissingError(f"the relay has seats 0..{self._n - 1}, not {seat}")
        hidden = json.loads(task.payload)
        words: list[str] = hidden["words"]
        table: list[int] = hidden["tables"][seat]
        draws = key("relay", "demonstration", task.id, seat)
        at = hidden["start"] if seat == 0 else choice(draws, self._m)
        said = table[at]
        if uniform(draws, 1) >= self._options.demonstration_accuracy:
            said = (said + 1 + choice(draws, self._m - 1, index=2)) % self._m
        heard = () if seat == 0 else ((str(seat - 1), words[at]),)
        return Demonstration(seat=seat, view=task.view(seat), heard=heard, reply=words[said])

    def ablate(self, task: Task, seat: int, key: Key) -> str:
        """A uniform symbol of this task: with it in any one seat the team is right with probability exactly 1/m."""
        words: list[str] = json.loads(task.payload)["words"]
        return words[choice(key, self._m)]

    def facts(self, n_agents: int) -> Mapping[str, float]:
        """Upper bounds of accuracy. `cap_one_call` holds for a call with one shard of n >= 2, the others for n = 3."""
        m = self._m
        if n_agents < 2:
            return {}
        caps = {"cap_one_call": cap_single(m)}
        if n_agents == 3:
            caps |= {
                "cap_wrong_order_strict": cap_wrong_order(m, codewords=m),
                "cap_wrong_order_visible": cap_wrong_order(m, codewords=m * m),
                "cap_rotated_strict": cap_rotated(m, is_visible=False),
                "cap_rotated_visible": cap_rotated(m, is_visible=True),
            }
        return caps

    # Tasks are drawn 512 at a time: one vectorised call is some twenty times cheaper than 512, and each task still
    # depends on its own key alone.
    def _draw_block(self, block: int) -> list[tuple[list[str], int, list[list[int]]]]:
        n, m = self._n, self._m
        first = block * _BLOCK
        count = min(_BLOCK, self.size - first)
        keys = [key("relay", self._options.form, m, n, index) for index in range(first, first + count)]
        draws = uniforms(keys, n * m + 1 + (len(NAMES) if self._is_names else 0))
        starts = (draws[:, 0] * m).astype(np.int64).tolist()
        tables = np.argsort(draws[:, 1 : n * m + 1].reshape(count, n, m), axis=2, kind="stable").tolist()
        if self._is_names:
            picked = np.argsort(draws[:, n * m + 1 :], axis=1, kind="stable")[:, :m].tolist()
            words = [[NAMES[i] for i in row] for row in picked]
        else:
            words = [list(self._alphabet)] * count
        return list(zip(words, starts, tables, strict=True))

    def _view(self, words: list[str], table: list[int]) -> str:
        if self._is_names:
            return " ".join(f"{words[i]} gives to {words[j]}." for i, j in enumerate(table))
        if self._options.layout == "keys":
            return "".join(f"{words[i].upper()}{words[j]}" for i, j in enumerate(table))
        if self._options.layout == "pairs":
            return " ".join(f"{words[i]}>{words[j]}" for i, j in enumerate(table))
        return "".join(words[j] for j in table)

    def _with_start(self, view: str, word: str) -> str:
        return f"{view} {word} has it." if self._is_names else f"{view} in {word}"

    def _full(self, words: list[str], start: int, tables: list[list[int]]) -> str:
        if self._is_names:
            rounds = "\n".join(f"Round {i + 1}: {self._view(words, table)}" for i, table in enumerate(tables))
            return (
                f"{rounds}\n{words[start]} has it. In each round, who has it gives it on once. "
                f"Who has it after round {len(tables)}? Answer with one name."
            )
        body = "\n".join(self._view(words, table) for table in tables)
        return f"{body} in {words[start]}"


_FOLDED = frozenset(name.casefold() for name in NAMES)


def cap_single(m: int) -> float:
    """Accuracy of one call that lacks one table, exactly, for any model: 1/m (section 11, cap A)."""
    return 1.0 / m


def cap_wrong_order(m: int, *, codewords: int) -> float:
    """Upper bound of accuracy where the holder of p0 speaks last, n = 3 (section 11, cap B).

    It holds one of C codewords about a uniform permutation and is asked at a uniform point. A fixed guess vector matches
    in at least k places with probability at most 1/k!, so accuracy <= (1/m) sum_{k=1..m} min(1, C / k!).
    `codewords` is m where it sees one message (strict), m^2 where it sees two (visible). Not tight.
    """
    return sum(min(1.0, codewords / math.factorial(k)) for k in range(1, m + 1)) / m


def cap_rotated(m: int, *, is_visible: bool) -> float:
    """Upper bound of mean accuracy where the order rotates over 123, 231 and 312, n = 3 (section 11, cap C).

    123 can reach 1. In 231 the holder of p0 is last. In 312 the second is last and knows T_3 through the one symbol that
    the third sent before it saw anything, so m codewords also when all messages are visible.
    """
    last = cap_wrong_order(m, codewords=m * m if is_visible else m)
    return (1.0 + last + cap_wrong_order(m, codewords=m)) / 3.0
