"""Where a learner is checked: a fresh one, a batch as if it had sampled it, and how two of its states compare.

Axes: B rows, T tokens, N action states, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from baton.core.losses import REASONING, Dis, Objective
from baton.engines.engine import Learner
from baton.testing.claims import Law, require
from baton.types import AdvantageBatch, Snapshot, TokenBatch, Weights


@dataclasses.dataclass(frozen=True)
class Bench:
    """What every check of a learner needs."""

    make: Callable[[], Learner]
    raw: AdvantageBatch
    law: Law
    lr: float
    temperatures: Sequence[float]
    tolerance: float

    def start(self) -> tuple[Learner, AdvantageBatch]:
        """A new learner, and the batch as if this learner had sampled it."""
        learner = self.make()
        own = learner.logprobs(self.raw.batch).detach().to(self.raw.batch.behavior_logprobs.dtype)
        tokens = dataclasses.replace(self.raw.batch, behavior_logprobs=own)
        return learner, dataclasses.replace(self.raw, batch=tokens)

    def objective(self, penalty: float = 0.0) -> Objective:
        """The loss of all checks, ratios as constant weights, with this penalty."""
        return Objective(weight=Dis(band=REASONING), penalty=penalty)

    def step(self, learner: Learner, batch: AdvantageBatch) -> None:
        """A step without a penalty."""
        learner.step(batch, self.objective(), lr=self.lr, anchor=None)

    def laws(self, weights: Weights, batch: TokenBatch) -> Tensor:
        """[N, V] at the action states, by the judge."""
        states = batch.mask.nonzero().tolist()
        return torch.stack(
            [self.law(weights, tuple(batch.ids[b, :t].tolist()), batch.temperature).detach().double() for b, t in states]
        )


def far_apart(left: Tensor, right: Tensor) -> float:
    """The largest difference between two entries of the same place."""
    return float((left.detach().double() - right.detach().double()).abs().max())


def copied(snapshot: Snapshot) -> Snapshot:
    """The same snapshot in memory of its own."""
    return Snapshot(
        weights={name: t.clone() for name, t in snapshot.weights.items()},
        moments={name: t.clone() for name, t in snapshot.moments.items()},
        steps=snapshot.steps,
    )


def first_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> str | None:
    """The first name under which the two differ in any bit that matters; None when they are equal."""
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right or not torch.equal(left[name], right[name]):
            return name
    return None


def first_moved(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> str | None:
    """The first master that is not where it was; one that an engine has not stored yet is zeros."""
    for name in sorted(left.keys() | right.keys()):
        held = left.get(name, right.get(name))
        assert held is not None
        blank = torch.zeros_like(held)
        if not torch.equal(left.get(name, blank), right.get(name, blank)):
            return name
    return None


def require_same(left: Snapshot, right: Snapshot, sentence: str) -> None:
    """Raise AssertionError with this sentence, and the first difference, unless the two are equal bit for bit."""
    name = first_difference(left.weights, right.weights)
    require(name is None, f"{sentence}: master '{name}' differs")
    name = first_difference(left.moments, right.moments)
    require(name is None, f"{sentence}: optimiser moment '{name}' differs")
    require(left.steps == right.steps, f"{sentence}: {left.steps} steps taken against {right.steps}")
