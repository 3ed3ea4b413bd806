"""Every noun that crosses a room: frozen, keyword-only, checked when it is made.

Axes: B rows (one agent's token view of an episode), T tokens, N token states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from baton.errors import DataError, MissingError, NonFiniteError

AgentId = str
TokenIds = tuple[int, ...]
Slot = Literal["promoted", "candidate", "start"]
"""Where a sampler holds weights of an agent: in the team, proposed, or the weights it began the run with."""

FinishReason = Literal["stop", "length"]
Direction = Literal["max", "new_old", "old_new"]


# ---- what is asked and what was said ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One question with a verifiable answer.

    `prompt` holds all information that any seat has; `views[i]` is what seat i sees instead (empty: everyone sees the
    prompt). `answer` is hidden from the agents. `payload` is the grader's own text (JSON), carried unread.

    Example: Task(id="relay-17", env="relay", prompt="...", views=("table: 2 0 1 ; in: 1", ...), answer="2")
    """

    id: str
    env: str
    prompt: str
    answer: str
    views: tuple[str, ...] = ()
    payload: str = ""

    def view(self, seat: int) -> str:
        """What the agent in this seat is shown of the task."""
        return self.views[seat] if self.views else self.prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One entry of a conversation as a chat template knows it. `ids` are an agent's own sampled ids, kept as they are."""

    role: Literal["system", "user", "assistant"]
    content: str
    ids: TokenIds | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One uninterrupted contribution to an episode.

    `kind="action"`: sampled tokens with one finite log-probability <= 0 and one policy version each. A frozen agent
    without ids, and the environment, give `kind="observation"` turns, which carry text only.
    """

    kind: Literal["action", "observation"]
    agent: AgentId
    seat: int
    text: str
    prompt_ids: TokenIds = ()
    ids: TokenIds = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish_reason: FinishReason = "stop"
    cut: bool = False
    """The message ended because its token limit was reached (a limit of one token is a format, not a cut)."""

    @property
    def said(self) -> tuple[AgentId, str, TokenIds]:
        """Who said what: two turns with the same are word for word the same, whatever sampled them."""
        return self.agent, self.text, self.ids

    def __post_init__(self) -> None:
        if self.kind == "observation":
            if self.ids or self.logprobs:
                raise DataError(f"observation turn of '{self.agent}' carries {len(self.ids)} sampled ids; make it an action")
            return
        if not (len(self.ids) == len(self.logprobs) == len(self.versions)):
            raise MissingError(
                f"turn of '{self.agent}': {len(self.ids)} sampled ids, {len(self.logprobs)} log-probabilities, "
                f"{len(self.versions)} versions; every sampled token needs one of each"
            )
        for position, logprob in enumerate(self.logprobs):
            if not (math.isfinite(logprob) and logprob <= 0.0):
                raise NonFiniteError(
                    f"turn of '{self.agent}': log-probability {logprob} of token {position} is not a finite number <= 0"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """The episode ended by itself and was graded. `reason` says why the grader gave this reward, if it said."""

    reward: float
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncated:
    """The answer was cut at its token limit and graded as it stood (ALGORITHMS B7: terminal)."""

    reward: float
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """Something broke that is not the model's answer: never trained, never reward 0, counted by reason."""

    reason: str


Outcome = Scored | Truncated | Failed


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """The recorded run of a team on one task. Siblings of a prompt share `group`; `versions` is the team at its start."""

    id: str
    group: str
    task_id: str
    versions: Mapping[AgentId, int]
    turns: tuple[Turn, ...]
    answer: str
    outcome: Outcome

    @property
    def reward(self) -> float:
        """The team return. Raises MissingError on a failed episode: a failure has no reward."""
        if isinstance(self.outcome, Failed):
            raise MissingError(f"episode {self.id} failed ({self.outcome.reason}) and has no reward")
        return self.outcome.reward

    @property
    def is_scored(self) -> bool:
        return not isinstance(self.outcome, Failed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One agent's token view of one episode: its context, its own sampled tokens, and the mask that tells them apart.

    `segment` counts the rows of this agent in this episode (a conversation that is not append-only gives several).
    """

    episode_id: str
    group: str
    agent: AgentId
    segment: int
    ids: TokenIds
    mask: tuple[bool, ...]
    behavior_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    """Policy version of each token of `ids`; -1 on tokens that this agent did not sample."""


# ---- tensors ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Right-padded rows of one agent. Padding has mask False, and no result may depend on what it holds.

    `mask[b, t]`: this agent sampled `ids[b, t]`. `behavior_logprobs` and `versions` mean something only there.
    `episode[b]` numbers the episodes; rows of one episode are adjacent. `temperature` is what the tokens were sampled at.
    """

    ids: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    behavior_logprobs: Float[Tensor, "B T"]
    versions: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    episode: Int[Tensor, " B"]
    agent: AgentId
    episode_ids: tuple[str, ...]
    """Per row."""
    groups: tuple[str, ...]
    """Per row: the prompt that the episode answers."""
    temperature: float

    def __post_init__(self) -> None:
        rows = self.ids.shape[0]
        if rows == 0:
            raise MissingError(f"token batch of '{self.agent}' has no rows")
        for name, value in (("episode_ids", self.episode_ids), ("groups", self.groups)):
            if len(value) != rows:
                raise DataError(f"token batch of '{self.agent}': {len(value)} {name} for {rows} rows")
        if not bool(self.mask.any(dim=1).all()):
            row = int((~self.mask.any(dim=1)).nonzero()[0, 0])
            raise MissingError(f"row {row} ({self.episode_ids[row]}) of '{self.agent}' has no trainable token; leave it out")
        position = torch.arange(self.ids.shape[1])
        if bool((self.mask & (position >= self.lengths[:, None])).any()):
            raise DataError(f"token batch of '{self.agent}': the mask selects padding")
        if bool(self.mask[:, 0].any()):
            raise DataError(f"token batch of '{self.agent}': the first token has no prefix and cannot be an action")

    @property
    def n_rows(self) -> int:
        return int(self.ids.shape[0])

    @property
    def n_act(self) -> int:
        """Number of action tokens: the global denominator of token losses."""
        return int(self.mask.sum())

    @property
    def n_episodes(self) -> int:
        return len(set(self.episode_ids))

    def rows(self, index: Sequence[int] | Int[Tensor, " R"]) -> TokenBatch:
        """The named rows, in that order, padded to the longest of them."""
        chosen = torch.as_tensor(index, dtype=torch.long)
        width = int(self.lengths[chosen].max())
        picked: list[int] = chosen.tolist()
        return TokenBatch(
            ids=self.ids[chosen, :width],
            mask=self.mask[chosen, :width],
            behavior_logprobs=self.behavior_logprobs[chosen, :width],
            versions=self.versions[chosen, :width],
            lengths=self.lengths[chosen],
            episode=self.episode[chosen],
            agent=self.agent,
            episode_ids=tuple(self.episode_ids[i] for i in picked),
            groups=tuple(self.groups[i] for i in picked),
            temperature=self.temperature,
        )


@dataclass(frozen=True, kw_only=True)
class AdvantageBatch:
    """A token batch with the advantage of each action token and the team that the advantages were evaluated under."""

    batch: TokenBatch
    advantages: Float[Tensor, "B T"]
    team: Mapping[AgentId, int]

    def rows(self, index: Sequence[int] | Int[Tensor, " R"]) -> AdvantageBatch:
        """The named rows, in that order."""
        batch = self.batch.rows(index)
        chosen = torch.as_tensor(index, dtype=torch.long)
        return AdvantageBatch(batch=batch, advantages=self.advantages[chosen, : batch.ids.shape[1]], team=self.team)


@dataclass(frozen=True, kw_only=True)
class TokenDivergence:
    """Exact full-vocabulary KL at each action-token state, in nats, both directions, in the row order of its batch.

    Both laws are the served weights' at the sampling temperature. +inf is a value (p > 0 where q = 0); NaN is an error.
    """

    kl_new_old: Float[Tensor, " N"]
    """KL(candidate || current)."""
    kl_old_new: Float[Tensor, " N"]
    """KL(current || candidate)."""
    row: Int[Tensor, " N"]
    position: Int[Tensor, " N"]

    def __post_init__(self) -> None:
        if self.kl_new_old.numel() == 0:
            raise MissingError("a divergence of no states decides nothing; give at least one action token")
        for name, value in (("kl_new_old", self.kl_new_old), ("kl_old_new", self.kl_old_new)):
            if bool(torch.isnan(value).any()):
                raise NonFiniteError(f"{name} is NaN at state {int(torch.isnan(value).nonzero()[0, 0])}")
            if bool((value < -1e-4).any()):
                raise NonFiniteError(
                    f"{name} is {float(value.min()):.3g} nats, below -1e-4: the two laws are not normalised alike"
                )

    def of(self, direction: Direction) -> Float[Tensor, " N"]:
        """Divergence per state in the named direction (`max` is the larger of the two)."""
        if direction == "new_old":
            return self.kl_new_old
        return self.kl_old_new if direction == "old_new" else torch.maximum(self.kl_new_old, self.kl_old_new)


# ---- weights ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Exact saved state of one agent's learner: fp32 masters, AdamW moments, optimiser steps. There is no RNG state."""

    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    """`exp_avg.<name>` and `exp_avg_sq.<name>`; empty before the first step."""
    steps: int


@dataclass(frozen=True, kw_only=True)
class Weights:
    """An agent's weights as served (serving dtype), with a checksum per tensor and one fingerprint over all of them."""

    tensors: Mapping[str, Tensor]
    checksums: Mapping[str, str]
    fingerprint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishProof:
    """What the sampler holds after a publication, read back from what it will sample with."""

    agent: AgentId
    slot: Slot
    version: int
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One optimiser step: the loss, the gradient norm before clipping (masters' norm), and the objective's diagnostics."""

    loss: float
    grad_norm: float
    diagnostics: Mapping[str, float] = field(default_factory=lambda: dict[str, float]())


# ---- decisions -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class GateRecord:
    """What one look at a candidate measured and decided (ALGORITHMS 2.4). All divergences in nats."""

    q_point: float
    """(1 - alpha)-quantile of the pooled states, order statistic, no interpolation."""
    q_ucb: float | None
    """Upper confidence bound of that quantile from one state per prompt; None where no order statistic certifies it."""
    q_gate: float
    """What was compared with the radius: max(q_point, q_ucb where certified)."""
    message_mean: float
    n_units: int
    """Probe prompts: the independent unit."""
    n_states: int
    certified: bool
    certifiable_level: float
    """The quantile level that n_units could certify at this confidence (equals 1 - alpha or more where certified)."""
    radius_token: float
    radius_message_mean: float
    direction: Direction
    scale: float
    """Share of the first displacement that was looked at: 1, 1/2, 1/4, ...; for a retry, the length of its own."""
    passed: bool
    attempt: int = 0
    """The retry that was looked at; 0 is the first training and what was shrunk from it."""
    message_sum: float | None = None
    """Mean over messages of the summed kl_old_new (reported, gates nothing)."""


RejectReason = Literal["radius", "harm", "non_finite", "no_signal", "not_published"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """The candidate is inside the region: scale 1 is whole, below 1 is shrunk. The only key to `Team.promote`."""

    scale: float
    gate: GateRecord

    def __post_init__(self) -> None:
        if not 0.0 < self.scale <= 1.0:
            raise DataError(f"an accepted update has a scale in (0, 1], not {self.scale}")
        if not self.gate.passed:
            raise DataError("an accepted update needs a gate that passed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """The agent stays bit for bit as it was. No gate was run for `no_signal` and `non_finite`."""

    reason: RejectReason
    gate: GateRecord | None = None
    detail: str = ""


Verdict = Accepted | Rejected


def verdict_word(verdict: Verdict) -> Literal["accepted", "shrunk", "rejected"]:
    """The word for people."""
    if isinstance(verdict, Rejected):
        return "rejected"
    return "accepted" if verdict.scale == 1.0 else "shrunk"
