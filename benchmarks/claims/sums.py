"""A sum in three hands, as an environment of our own: a chain whose whole question one model finds easy.

Each of three seats sees one digit below `below`; a message is the sum so far, and the answer the sum of all, both modulo
`below`. A call that lacks a digit is right with probability exactly 1/below, whatever its size; whoever sees all three needs
one token. A config names it `env = {name = "sums:Sums", arguments = {...}}`.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.core.keyed import Key, choice, key, uniform
from baton.envs.env import Demonstration, Grade
from baton.types import Task

SEATS = 3


class Sums:
    """Sums modulo `below` of three digits. Rewards are 0 or 1.

    Args:
        below: digits are those below it (at most 10).
        prompts: number of tasks; their numbers stand in every view, so that no two are equal.
        demonstration_accuracy: probability that a demonstration of a seat is right, else it names another digit.
    """

    name = "sums"
    seats = SEATS
    reward_range = (0.0, 1.0)
    is_generated = True

    def __init__(self, *, below: int = 4, prompts: int = 20_000, demonstration_accuracy: float = 1.0) -> None:
        self.below, self.size, self._accuracy = below, prompts, demonstration_accuracy

    def task(self, index: int) -> Task:
        digits = [choice(key("sums", self.below, index), self.below, index=i) for i in range(SEATS)]
        return Task(
            id=f"sums-{self.below}-{index}",
            env=self.name,
            prompt=f"round {index} ; {' '.join(map(str, digits))}",
            views=tuple(f"round {index} ; {digit}" for digit in digits),
            answer=str(sum(digits) % self.below),
        )

    def grade(self, task: Task, answer: str) -> Grade:
        return Grade(float(answer.strip() == task.answer))

    def normalise(self, answer: str) -> str | None:
        said = answer.strip()
        return said if said.isdecimal() else None

    def demonstration(self, task: Task, seat: int) -> Demonstration:
        """A seat's reply to a digit drawn for it, not to what its teammates would say: each hop is taught by itself."""
        draws = key("sums", "demonstration", task.id, seat)
        heard = choice(draws, self.below) if seat else 0
        said = (heard + int(task.view(seat).rpartition(" ")[2])) % self.below
        if uniform(draws, 1) >= self._accuracy:
            said = (said + 1 + choice(draws, self.below - 1, index=2)) % self.below
        before = ((str(seat - 1), str(heard)),) if seat else ()
        return Demonstration(seat=seat, view=task.view(seat), heard=before, reply=str(said))

    def ablate(self, task: Task, seat: int, at: Key) -> str:
        return str(choice(at, self.below))

    def facts(self, n_agents: int) -> Mapping[str, float]:
        return {"cap_one_call": 1.0 / self.below}
