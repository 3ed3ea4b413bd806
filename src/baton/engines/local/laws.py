"""What served weights say about the tokens of a batch: hidden states, log-probabilities, exact divergence, piece by piece.

Axes: B rows, T tokens, N action states in row order, S some of them, D width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from baton.core import divergence
from baton.engines.local.net import Net, unembed
from baton.errors import DataError
from baton.types import TokenBatch, TokenDivergence

CHUNK = 2**23
"""Most elements of one [states, vocabulary] tensor (32 MB in fp32) where laws are rebuilt and compared, six at a time."""


@dataclass(frozen=True, kw_only=True)
class LocalAnchor(ABC):
    """Laws of a policy at the action states of a batch, rebuilt chunk by chunk: what they are rebuilt from takes a fraction
    of the memory of the log-probabilities."""

    logprobs: Float[Tensor, "B T"]
    ids: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    temperature: float

    @abstractmethod
    def law(self, states: slice | Int[Tensor, " S"], *, forbidden: Bool[Tensor, " V"]) -> Float[Tensor, "S V"]:
        """fp32 log-probabilities of the next token at some of the states, over the rows of who asks."""

    def at(self, batch: TokenBatch) -> LocalAnchor:
        """See `engine.Anchor`."""
        states = int(self.mask.sum())
        if batch.n_act != states:
            raise DataError(f"laws of {states} states cannot be read at the {batch.n_act} of another batch")
        return replace(self, ids=batch.ids.clone(), mask=batch.mask.clone())

    def require(self, batch: TokenBatch) -> None:
        """Raise DataError unless this is the batch that was remembered."""
        same = self.ids.shape == batch.ids.shape and torch.equal(self.mask, batch.mask)
        if not (same and torch.equal(self.ids, batch.ids) and self.temperature == batch.temperature):
            raise DataError(
                f"the anchor of '{batch.agent}' was remembered on another batch ({tuple(self.ids.shape)} at T "
                f"{self.temperature}, now {tuple(batch.ids.shape)} at T {batch.temperature}); remember this one first"
            )


@dataclass(frozen=True, kw_only=True)
class Remembered(LocalAnchor):
    """The policy at `remember`: final hidden states and the unembedding (a copy where it is trained)."""

    hidden: Float[Tensor, "N D"]
    weight: Float[Tensor, "V D"]
    bias: Float[Tensor, " V"] | None
    softcap: float | None

    def law(self, states: slice | Int[Tensor, " S"], *, forbidden: Bool[Tensor, " V"]) -> Float[Tensor, "S V"]:
        logits = unembed(self.hidden[states], self.weight, self.bias, self.softcap)
        # Another model of the same tokenizer may have fewer or more rows of padding.
        if (more := forbidden.numel() - logits.shape[1]) != 0:
            logits = functional.pad(logits, (0, more))
        return divergence.log_law(logits, temperature=self.temperature, forbidden=forbidden)


@dataclass(frozen=True, kw_only=True)
class Projected(LocalAnchor):
    """The laws on the way from one policy to another, as far as `project` went in each state."""

    pre: LocalAnchor
    current: LocalAnchor
    w: Float[Tensor, " N"]

    def law(self, states: slice | Int[Tensor, " S"], *, forbidden: Bool[Tensor, " V"]) -> Float[Tensor, "S V"]:
        one, other = (anchor.law(states, forbidden=forbidden) for anchor in (self.pre, self.current))
        return divergence.between(one, other, self.w[states])


def project(pre: LocalAnchor, current: LocalAnchor, *, forbidden: Bool[Tensor, " V"], radius: float) -> Projected:
    """`pre` moved into the ball around `current`, state by state (2.8). `current` is of the same batch."""
    states = int(pre.mask.sum())
    found = [
        divergence.project(pre.law(at, forbidden=forbidden), current.law(at, forbidden=forbidden), radius=radius)[1]
        for at in chunks(states, forbidden.numel())
    ]
    return Projected(
        logprobs=pre.logprobs,
        ids=pre.ids,
        mask=pre.mask,
        temperature=pre.temperature,
        pre=pre,
        current=current,
        w=torch.cat(found),
    )


def state_places(batch: TokenBatch) -> Sequence[Int[Tensor, " S"]]:
    """Of each row, where its action states are among those of the batch."""
    return torch.arange(batch.n_act).split(batch.mask.sum(dim=1).tolist())


def action_hidden(
    net: Net, batch: TokenBatch, *, layout: Iterable[Sequence[int]], padding: int = 0, context: int = 0
) -> Float[Tensor, "N D"]:
    """Hidden state before each action token, in row order, whatever layout it was computed in.

    Args:
        layout: the rows of each forward.
        padding: columns to add to each forward, as far as `context` has room for them (learned positions end with it).
    """
    places = state_places(batch)
    out: Tensor | None = None
    for rows in layout:
        part = batch.rows(list(rows))
        more = min(padding, max(0, context - part.ids.shape[1]))
        ids = functional.pad(part.ids, (0, more)).to(net.device)
        mask = functional.pad(part.mask, (0, more)).to(net.device)
        hidden = net.hidden(ids[:, :-1])[mask[:, 1:]]
        if out is None:
            out = hidden.new_empty(batch.n_act, hidden.shape[1])
        out[torch.cat([places[r] for r in rows]).to(net.device)] = hidden
    assert out is not None
    return out


def logprobs(net: Net, batch: TokenBatch, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "B T"]:
    """Log-probability of each action token, 0 elsewhere."""
    ids = batch.ids[batch.mask].to(net.device)
    found = [
        net.law(hidden[at], temperature=batch.temperature).gather(1, ids[at][:, None])[:, 0]
        for at in chunks(len(ids), net.forbidden.numel())
    ]
    return torch.zeros(batch.mask.shape).masked_scatter(batch.mask, torch.cat(found).cpu())


def compared(net: Net, batch: TokenBatch, hidden: Float[Tensor, "N D"], old: LocalAnchor) -> TokenDivergence:
    """Exact KL of the network (new) against the anchor (old) at each action state, both directions, in nats."""
    new_old: list[Tensor] = []
    old_new: list[Tensor] = []
    for at in chunks(batch.n_act, net.forbidden.numel()):
        log_new = net.law(hidden[at], temperature=batch.temperature)
        one, other = divergence.exact(log_new, old.law(at, forbidden=net.forbidden))
        new_old.append(one.cpu())
        old_new.append(other.cpu())
    row, position = batch.mask.nonzero(as_tuple=True)
    return TokenDivergence(kl_new_old=torch.cat(new_old), kl_old_new=torch.cat(old_new), row=row, position=position)


def chunks(states: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, CHUNK // vocabulary)
    for start in range(0, states, size):
        yield slice(start, min(states, start + size))
