"""Learners that leave memory between their updates.

Of a team's learners one works at a time. The others' masters, moments and serving copies are on disk already, since every
promotion is: so a learner at rest is nothing but where to read its state, and waking it is what a resume does.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from baton.core.losses import Objective
from baton.engines.engine import Anchor, Learner
from baton.types import AdvantageBatch, Snapshot, StepReport, TokenBatch, TokenDivergence, Weights


class Resting:
    """Implements `engine.Learner` by one that is made when it is first needed, and again after each `rest`.

    `make` gives a learner of version 0; what `rest` was told last is restored into it.
    """

    def __init__(self, make: Callable[[], Learner]) -> None:
        self._make = make
        self._inner: Learner | None = None
        self._saved: Callable[[], Snapshot] | None = None
        self._origin: Snapshot | None = None
        """The saved state; None where this learner was never at rest."""
        self._moved = False

    @property
    def is_awake(self) -> bool:
        """It is in memory."""
        return self._inner is not None

    @property
    def awake(self) -> Learner:
        """The learner itself, made now if it is at rest."""
        if self._inner is None:
            inner = self._make()
            if self._saved is not None:
                self._origin = self._saved()
                inner.restore(self._origin)
            self._inner, self._moved = inner, False
        return self._inner

    def rest(self, saved: Callable[[], Snapshot]) -> None:
        """Leave memory. `saved` reads the state to wake with, which has to lie where it is until then."""
        self._inner = self._origin = None
        self._saved = saved

    def logprobs(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        return self.awake.logprobs(batch)

    def remember(self, batch: TokenBatch) -> Anchor:
        return self.awake.remember(batch)

    def divergence(self, batch: TokenBatch, anchor: Anchor) -> TokenDivergence:
        return self.awake.divergence(batch, anchor)

    def project(self, batch: TokenBatch, anchor: Anchor, *, radius: float) -> Anchor:
        return self.awake.project(batch, anchor, radius=radius)

    def step(self, batch: AdvantageBatch, objective: Objective, *, lr: float, anchor: Anchor | None) -> StepReport:
        inner, self._moved = self.awake, True
        return inner.step(batch, objective, lr=lr, anchor=anchor)

    def score_gradients(self, batch: AdvantageBatch) -> tuple[Float[Tensor, " P"], Float[Tensor, " P"]]:
        return self.awake.score_gradients(batch)

    def blend(self, towards: Snapshot, origin: Snapshot, scale: float) -> None:
        inner, self._moved = self.awake, True
        inner.blend(towards, origin, scale)

    def snapshot(self, *, moments: bool = True, lend: bool = False) -> Snapshot:
        """As of any learner; where it is still what was saved, the saved state itself and no copy."""
        inner = self.awake
        if self._origin is not None and not self._moved:
            return self._origin
        return inner.snapshot(moments=moments, lend=lend)

    def restore(self, snapshot: Snapshot) -> None:
        self.awake.restore(snapshot)
        self._moved = snapshot is not self._origin

    def weights(self) -> Weights:
        return self.awake.weights()
