"""How far a recorded number may lie from the one that is computed again with a model: rounding differs between machines."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from baton.algorithms.acceptance import REPLAY_EXACT, REPLAY_ROUNDED
from baton.audit.findings import RELATIVE
from baton.records import Record
from baton.types import AgentId

TOKEN_TABLE, TOKEN_EXACT, TOKEN_ROUNDED = 1e-6, 1e-3, 2.0
"""Largest gap of one token's log-probability, nats: tables, fp32 serving, bf16 serving (135M: .53 in 4,000 honest
tokens). The mean over an update's tokens obeys the replay bound beside it (acceptance.py)."""
MEAN_EXACT, MEAN_ROUNDED = 1e-5, 5e-3
"""How far the recorded mean of a replay gap may lie from the recomputed one, nats: one changed number shows here too."""
SHARE_EXACT, SHARE_ROUNDED = 1e-4, 0.1
"""How far an effective share or a mean weight of reused episodes may lie from the recomputed one: fp32 serving, bf16."""
KL_FLOOR = 1e-6
"""Smallest tolerance of a divergence, nats; above it the run's own noise floor decides (`kl_tolerance`)."""


def kl_tolerance(d: Float[Tensor, " N"], floor: float) -> Float[Tensor, " N"]:
    """How far a divergence d may lie from the recorded one, nats: `KL_FLOOR + 4 (f + sqrt(f |d|))`.

    The noise floor f is the divergence of the weights from themselves, of order e^2 / 2 for an error e of the log-law; the
    same error moves KL(p || q) by about e times the spread of log p - log q, sqrt(2 KL).
    """
    f = max(floor, 0.0)
    return KL_FLOOR + 4.0 * (f + (f * d.abs()).sqrt())


@dataclass(kw_only=True)
class Tolerances:
    """What a gap is compared with, for one run."""

    is_table: bool
    is_exact: bool
    """Tables, or models that are served in fp32."""
    floors: dict[AgentId, float] = field(default_factory=lambda: dict[AgentId, float]())
    """Noise floor of each agent whose weights were met so far, nats."""

    @property
    def token(self) -> float:
        """Of one token's log-probability, nats."""
        return TOKEN_TABLE if self.is_table else TOKEN_EXACT if self.is_exact else TOKEN_ROUNDED

    @property
    def token_mean(self) -> float:
        """Of the mean of a replay test or a publication, nats: as the run itself was held to it."""
        return REPLAY_EXACT if self.is_exact else REPLAY_ROUNDED

    @property
    def replay_mean(self) -> float:
        """Of that mean from the recorded one, nats."""
        return MEAN_EXACT if self.is_exact else MEAN_ROUNDED

    @property
    def share(self) -> float:
        """Of an effective share or a mean weight of reused episodes."""
        return SHARE_EXACT if self.is_exact else SHARE_ROUNDED

    def divergences(self, d: Float[Tensor, " N"], agent: AgentId) -> Float[Tensor, " N"]:
        """Of an agent's divergences d, nats."""
        return kl_tolerance(d, self.floors.get(agent, 0.0))

    def divergence(self, d: float, agent: AgentId) -> float:
        """Of one divergence, nats."""
        return float(self.divergences(torch.tensor([d]), agent))

    def record(self) -> Record:
        """The part of the report."""
        return {
            "token": self.token,
            "token_mean": self.token_mean,
            "divergence": f"{KL_FLOOR:g} + 4 (f + sqrt(f d)), d the divergence, f the agent's noise floor",
            "noise_floor": dict(self.floors),
            "relative": RELATIVE,
        }
