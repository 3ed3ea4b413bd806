"""Games small enough for a table: every state is met often, and the true accuracy can be enumerated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.core.keyed import Key, choice, key
from baton.envs.env import Grade
from baton.errors import ConfigError, MissingError
from baton.types import Task


class ParityOptions(BaseModel):
    """Options of the parity game."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["parity"] = Field(default="parity", description="The parity game.")
    bits: int = Field(default=1, ge=1, le=16, description="Bits that each seat sees.")
    prompts: int = Field(default=4096, ge=1, description=("Number of tasks that the run draws its four prompt sets from."))


class ParityEnv:
    """Each seat sees bits of its own; the answer is the parity of all of them. Rewards are 0 or 1.

    One symbol a message suffices (the parity so far). Whoever lacks one seat's bits is right with probability
    exactly 1/2. Prompts are numbered, so that no two are equal; views are not, so that a table meets the same
    few states in every prompt set (2^bits for the first seat, twice that for a later one that hears one
    symbol).

    Example: ParityEnv(ParityOptions(bits=2), n_agents=2).task(5) has views ("bits: 0 1", "bits: 1 1") and
    answer "1".
    """

    name = "parity"
    reward_range = (0.0, 1.0)
    is_generated = True
    is_isolated = False

    def __init__(self, options: ParityOptions, *, n_agents: int) -> None:
        if n_agents < 1:
            raise ConfigError(f"parity needs at least one agent, got {n_agents}; add [[agents]]")
        self._options = options
        self._n = n_agents

    @property
    def seats(self) -> int:
        return self._n

    @property
    def size(self) -> int:
        return self._options.prompts

    def task(self, index: int) -> Task:
        if not 0 <= index < self.size:
            raise MissingError(f"parity task {index} is outside 0..{self.size - 1}; raise env.prompts")
        bits = self._options.bits
        drawn = choice(key("parity", bits, self._n, index), 1 << (bits * self._n))
        held = [drawn >> (bits * seat) & ((1 << bits) - 1) for seat in range(self._n)]
        views = tuple("bits: " + " ".join(f"{value:0{bits}b}") for value in held)
        return Task(
            id=f"parity-{bits}x{self._n}-{index}",
            env=self.name,
            prompt=f"round {index} ; " + " ; ".join(views),
            views=views,
            answer=str(drawn.bit_count() % 2),
        )

    def grade(self, task: Task, answer: str) -> Grade:
        """1 for the right bit and nothing else."""
        said = self.normalise(answer)
        if said is None:
            return Grade(0.0, "unparsed: neither 0 nor 1" if answer.strip() else "empty: no answer")
        return Grade(1.0) if said == task.answer else Grade(0.0, "wrong")

    def normalise(self, answer: str) -> str | None:
        said = answer.strip()
        return said if said in ("0", "1") else None

    def demonstration(self, task: Task, seat: int) -> None:
        """None: a table starts from the uniform law and learns the code by itself."""
        return None

    def ablate(self, task: Task, seat: int, key: Key) -> str:
        """A uniform bit: with it in any one seat the team is right with probability exactly 1/2."""
        return str(choice(key, 2))

    def facts(self, n_agents: int) -> Mapping[str, float]:
        """`cap_one_call`: the best accuracy of a call that lacks one seat's bits, exactly."""
        return {"cap_one_call": 0.5} if n_agents > 1 else {}
