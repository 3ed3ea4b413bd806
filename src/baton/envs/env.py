"""What an environment is: a family of tasks with a grader. No environment knows who plays it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from baton.core.keyed import Key
from baton.types import Task


@dataclass(frozen=True, slots=True)
class Grade:
    """The reward of one answer, and why it is what it is where the answer alone does not show it.

    A reason has the form "kind: detail"; the kind (`late`, `unparsed`, `empty`, ...) is what records count.
    """

    reward: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One reply of one seat to imitate, for a supervised warm start. The protocol renders it.

    `view` is what the seat sees of the task; `heard` are earlier messages as (seat index as text, message), in order.
    """

    seat: int
    view: str
    heard: tuple[tuple[str, str], ...]
    reply: str


@runtime_checkable
class Env(Protocol):
    """A family of tasks with verifiable answers. `baton.testing.check_env` is this contract as code.

    Everything is a pure function of its arguments: no call changes the environment, and two processes that build it
    from the same options agree on every task and every grade.
    """

    @property
    def name(self) -> str:
        """The family; `Task.env` of each of its tasks."""
        ...

    @property
    def seats(self) -> int | None:
        """The number of agents that it needs; None: any."""
        ...

    @property
    def reward_range(self) -> tuple[float, float]:
        """The lowest and the highest reward that a grade can have."""
        ...

    @property
    def size(self) -> int:
        """`task(index)` is defined for 0 <= index < size."""
        ...

    @property
    def is_generated(self) -> bool:
        """The tasks come from a generator (split by index range), not from a finite set of rows (split by hash of id)."""
        ...

    @property
    def is_isolated(self) -> bool:
        """Grading can hang or die on a text, so a run grades in a worker process that can be killed (`GraderPool`)."""
        ...

    def task(self, index: int) -> Task:
        """The task with this index: the same for ever. Raises MissingError outside [0, size)."""
        ...

    def grade(self, task: Task, answer: str) -> Grade:
        """The reward of an answer. No text that a model can write raises; the worst is the lowest reward with a reason.

        Raises:
            TaskFault: the grader failed at its own work (its gold answer, its code); the episode becomes `Failed`.
        """
        ...

    def normalise(self, answer: str) -> str | None:
        """An answer in the form in which equal answers are one text, for votes; None: unparseable, it does not vote.

        The form is an answer again: it normalises to itself and earns what the original earned.
        """
        ...

    def demonstration(self, task: Task, seat: int) -> Demonstration | None:
        """A reply of this seat to imitate; None where the environment knows none."""
        ...

    def ablate(self, task: Task, seat: int, key: Key) -> str | None:
        """What an uninformed seat would say instead of its message, drawn with this key; None: no such ablation."""
        ...

    def facts(self, n_agents: int) -> Mapping[str, float]:
        """Proven numbers to print beside a result, such as the best accuracy of a lone call; empty where none is known."""
        ...
