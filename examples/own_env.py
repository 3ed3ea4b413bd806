"""Your own task, two ways. Put this file beside your config.

A class, with everything in your hands:                A function, with questions from a file:

    [env]                                                  [env]
    name = "own_env:Reverse"                               name = "own_env:right_in_any_case"
    arguments = { letters = 4 }                            data = "questions.jsonl"   # {"question": ..., "answer": ...}
"""

from __future__ import annotations

import random

from baton.types import Task


class Reverse:
    """Spell a word backwards; each right letter in place earns its share."""

    size, is_generated = 5_000, True

    def __init__(self, letters: int = 4) -> None:
        self._letters = letters

    def task(self, index: int) -> Task:
        if not 0 <= index < self.size:
            raise IndexError(f"task {index} is outside 0..{self.size - 1}")
        word = "".join(random.Random(index).choices("abcdefgh", k=self._letters))
        return Task(id=f"reverse-{index}", env="reverse", prompt=f"Spell backwards: {word}", answer=word[::-1])

    def grade(self, task: Task, answer: str) -> float:
        said = answer.strip()
        return sum(a == b for a, b in zip(said, task.answer, strict=False)) / max(len(said), len(task.answer))


def right_in_any_case(prompt: str, answer: str, gold: str) -> float:
    """1 for the gold answer, half for its other spelling. What this raises is a failed episode, never reward 0."""
    said = answer.strip()
    return 1.0 if said == gold else 0.5 * (said.casefold() == gold.casefold())
