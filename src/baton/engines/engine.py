"""The seam: what an engine must offer so that everything above it runs unchanged.

A new engine implements `Sampler` and `Learner` (and a `Codec` for its models) and passes `baton.testing.check_sampler`,
`check_learner` and `check_codec`; nothing else changes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from baton.core.keyed import Key
from baton.core.losses import Objective
from baton.types import (
    AdvantageBatch,
    AgentId,
    Failed,
    FinishReason,
    Message,
    PublishProof,
    Slot,
    Snapshot,
    StepReport,
    TokenBatch,
    TokenDivergence,
    TokenIds,
    Weights,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One message to sample. Token i of it is the inverse CDF of the law at uniform i under `key` (ALGORITHMS 5.6)."""

    id: str
    agent: AgentId
    slot: Slot
    prompt_ids: TokenIds
    max_new_tokens: int
    temperature: float
    key: Key


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What was sampled: ids (the end token included where the model ended), their log-probabilities under the law they
    were drawn from (temperature applied), and the version that the slot held."""

    id: str
    ids: TokenIds
    logprobs: tuple[float, ...]
    version: int
    finish_reason: FinishReason


def completed(
    request: Request, ids: TokenIds, logprobs: tuple[float, ...], *, version: int, end_ids: Collection[int]
) -> Completion:
    """What was sampled for a request: it stopped by itself if its last id ends a message."""
    reason: FinishReason = "stop" if ids[-1] in end_ids else "length"
    return Completion(id=request.id, ids=ids, logprobs=logprobs, version=version, finish_reason=reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class CoupledRequest:
    """A message wanted beside one that was sampled: `request` names what to sample from, and `ids` is what the slot `beside`
    of the same agent said to the same prompt, with the same key, limit and temperature."""

    request: Request
    beside: Slot
    ids: TokenIds


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRequest:
    """Log-probabilities wanted for `ids` after `prompt_ids`, from the sampler's own kernels."""

    agent: AgentId
    slot: Slot
    prompt_ids: TokenIds
    ids: TokenIds
    temperature: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRequest:
    """One message wanted from a teammate that has no ids here."""

    messages: tuple[Message, ...]
    max_new_tokens: int
    temperature: float
    key: Key
    """A seed where the other side takes one; a hint, not a promise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What it said."""

    text: str
    finish_reason: FinishReason


class Speaker(Protocol):
    """A frozen teammate outside this process."""

    async def speak(self, requests: Sequence[TextRequest]) -> Sequence[Reply | Failed]:
        """One reply for each request, in order; what could not be had is `Failed`, which ends that episode."""
        ...


class Codec(Protocol):
    """Between text and one model's ids: its chat template and its tokenizer."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Every id that ends a message (tokenizer and generation config together)."""
        ...

    @property
    def context_length(self) -> int: ...

    def encode(self, messages: Sequence[Message]) -> TokenIds:
        """Prompt ids up to and including the generation prompt.

        Content is encoded apart from the template with special-token parsing off, so that text can never become a control
        token; a message with `ids` keeps them. Raises ModelError where the template loses or repeats a message.
        """
        ...

    def reply(self, text: str) -> TokenIds:
        """A message as the agent itself would sample it: its content, then the id that ends it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text without control tokens."""
        ...


class Sampler(Protocol):
    """Holds served weights in slots and samples from them."""

    def submit(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """Sample every request. What is drawn depends on the requests and their order alone, never on timing."""
        ...

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[tuple[float, ...]]: ...

    async def couple(self, requests: Sequence[CoupledRequest]) -> Sequence[Completion]:
        """One message for each request, in order: of its own slot's law exactly, and while it agrees with `ids` each token
        differs as rarely as the two laws allow (`core.coupling`; ALGORITHMS 3.6)."""
        ...

    async def publish(self, agent: AgentId, slot: Slot, weights: Weights, version: int) -> PublishProof:
        """Put weights into a slot and read back what landed. The proof's fingerprint is computed from what is held."""
        ...

    async def swap(self, agent: AgentId) -> None:
        """Exchange the promoted and the candidate slot (after the commit record is durable)."""
        ...

    async def cancel(self, ids: Collection[str]) -> None: ...


class Anchor(Protocol):
    """The policy as it was at `Learner.remember`, at the action states of that batch; the engine's own."""

    @property
    def logprobs(self) -> Float[Tensor, "B T"]:
        """Log-probability of each sampled token at the sampling temperature (0 where the mask is False)."""
        ...

    def at(self, batch: TokenBatch) -> Anchor:
        """The same laws for another model of one tokenizer: `batch` holds the same action states in the same order, after
        that model's own prompts. Its `logprobs` are not to be read. Raises DataError where the states differ in number."""
        ...


class Learner(Protocol):
    """Owns one agent's fp32 masters and optimiser. Everything it reports about a policy is about the weights as served."""

    def logprobs(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        """Log-probability of each action token at `batch.temperature`, 0 elsewhere; served weights, no gradient."""
        ...

    def remember(self, batch: TokenBatch) -> Anchor: ...

    def divergence(self, batch: TokenBatch, anchor: Anchor) -> TokenDivergence:
        """Exact KL of the policy now (new) against the anchor (old), both scored in the same batch layout."""
        ...

    def project(self, batch: TokenBatch, anchor: Anchor, *, radius: float) -> Anchor:
        """The served policy now, moved towards the anchor until KL(moved || anchor) <= radius in each state (2.8).

        Raises:
            DataError: a state where no law on the tokens of both is that near.
        """
        ...

    def step(self, batch: AdvantageBatch, objective: Objective, *, lr: float, anchor: Anchor | None) -> StepReport:
        """One optimiser step on the whole batch, in micro-batches whose sum equals one large batch.

        `anchor` is of `batch.batch` (remembered or projected there) and is required when `objective.needs_kl`. Where
        `objective.needs_batch`, the whole batch is scored first and each micro-batch is given its part of `keep`.

        Raises:
            NonFiniteError: loss, gradient or a stepped weight is not finite (the weights may have moved: restore).
        """
        ...

    def score_gradients(self, batch: AdvantageBatch) -> tuple[Float[Tensor, " P"], Float[Tensor, " P"]]:
        """(mean over episodes of A times the episode's score, mean of its square), over the masters' P numbers.

        An episode's score is the gradient of the summed log-probability of its own tokens; A is its advantage. The second is
        the diagonal of the Fisher information per message (ALGORITHMS 2.6). Nothing is stepped.
        """
        ...

    def blend(self, towards: Snapshot, origin: Snapshot, scale: float) -> None:
        """Masters become origin + scale * (towards - origin); moments and step count become the origin's."""
        ...

    def snapshot(self, *, moments: bool = True, lend: bool = False) -> Snapshot:
        """The exact state, as copies. Without moments it takes a third of the memory and can only be blended towards; lent,
        it may be the learner's own tensors, to be read before the learner moves."""
        ...

    def restore(self, snapshot: Snapshot) -> None: ...

    def weights(self) -> Weights: ...
