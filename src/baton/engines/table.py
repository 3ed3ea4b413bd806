"""The exact tabular engine: a policy is a table of logits with one row per token state.

It implements the whole seam without a model, so that every algorithm runs in milliseconds against a task
whose true return is known by enumeration. A row is addressed by the ids that precede the token, and a row
that nobody has written yet is zeros (the uniform law); so the table is a dense one over all states of which
only the visited part is stored.

Axes: B rows of a batch, T tokens, N token states, V vocabulary, R rows of the table.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from baton.core.batching import micro_batches
from baton.core.coupling import coupled, inverse_cdf
from baton.core.divergence import directed, exact, log_law, project
from baton.core.keyed import beside, uniforms
from baton.core.losses import Objective
from baton.engines.engine import Anchor, Completion, CoupledRequest, Request, ScoreRequest, completed
from baton.engines.models import checksums, fingerprint
from baton.errors import ConfigError, DataError, MissingError, NonFiniteError, PublishError
from baton.types import (
    AdvantageBatch,
    AgentId,
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

ROLES = ("system", "user", "assistant")
CONTEXT_LENGTH = 65_536
"""Token states of a table cost nothing until they are visited; the bound only stops a runaway
conversation."""
MAX_ID = 0xFFFF
"""An id is four hexadecimal digits of a row's name."""
ROW = "row."


def symbols_of(model: str) -> tuple[str, ...]:
    """The alphabet of a model spec `table:SYMBOLS`: each character is one symbol, in order of its id.

    Raises:
        ConfigError: not a table spec, fewer than two symbols, or a symbol named twice.
    """
    kind, _, alphabet = model.partition(":")
    if kind != "table" or len(alphabet) < 2 or len(set(alphabet)) != len(alphabet):
        raise ConfigError(
            f"model '{model}' is no table: write table: and at least two different symbols, for example table:01"
        )
    return tuple(alphabet)


def row_name(ids: Sequence[int]) -> str:
    """The name of the row of the state after these ids: four hexadecimal digits an id, so that it can be
    read back."""
    return ROW + np.asarray(ids, dtype=">u2").tobytes().hex()


def row_ids(name: str) -> TokenIds:
    """The ids that a row's name spells."""
    return tuple(np.frombuffer(bytes.fromhex(name.removeprefix(ROW)), dtype=">u2").tolist())


@dataclass(frozen=True)
class TableCodec:
    """Text of a table agent: sampled ids are its symbols, and everything that it reads is UTF-8 bytes under
    role marks.

    Ids below `vocabulary` are symbols (the last one ends a message where `has_end`); then 256 bytes; then one
    mark per role. A prompt is a pure function of the messages, so a state has the same name in every run and
    on every machine; no text can spell a mark, because bytes and marks are different ids.

    Args:
        symbols: what the agent can say, one string an id.
        has_end: the agent ends its message by itself; leave it out where a message is one token.
    """

    symbols: tuple[str, ...]
    has_end: bool = False

    def __post_init__(self) -> None:
        if not self.symbols or len(set(self.symbols)) != len(self.symbols) or "" in self.symbols:
            raise ConfigError(f"a table's symbols must be different and not empty, not {self.symbols}")
        if self.vocabulary + 256 + len(ROLES) > MAX_ID + 1:
            raise ConfigError(f"a table has room for {MAX_ID + 1 - 256 - len(ROLES)} ids, not {self.vocabulary}")

    @property
    def vocabulary(self) -> int:
        """Number of ids that the agent can sample."""
        return len(self.symbols) + self.has_end

    @property
    def end_ids(self) -> frozenset[int]:
        return frozenset({len(self.symbols)}) if self.has_end else frozenset()

    @property
    def context_length(self) -> int:
        return CONTEXT_LENGTH

    def encode(self, messages: Sequence[Message]) -> TokenIds:
        """Role mark, then the content as bytes (or the message's own ids); ends with the assistant's mark."""
        ids: list[int] = []
        for message in messages:
            ids.append(self._mark(message.role))
            ids.extend(
                message.ids
                if message.ids is not None
                else (byte + self.vocabulary for byte in message.content.encode("utf-8"))
            )
        return (*ids, self._mark("assistant"))

    def reply(self, text: str) -> TokenIds:
        """A message as the agent would sample it. Raises DataError where the text holds something that is
        no symbol."""
        ids: list[int] = []
        rest = text
        while rest:
            found = [i for i, symbol in enumerate(self.symbols) if rest.startswith(symbol)]
            if not found:
                raise DataError(f"'{rest[0]}' of the reply '{text}' is none of the table's symbols {self.symbols}")
            longest = max(found, key=lambda i: len(self.symbols[i]))
            ids.append(longest)
            rest = rest[len(self.symbols[longest]) :]
        return (*ids, *self.end_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Symbols and bytes as text; marks and the end id are left out. Raises DataError on an id that is
        none of them."""
        text = bytearray()
        for token in ids:
            if 0 <= token < len(self.symbols):
                text += self.symbols[token].encode("utf-8")
            elif self.vocabulary <= token < self.vocabulary + 256:
                text.append(token - self.vocabulary)
            elif not 0 <= token < self.vocabulary + 256 + len(ROLES):
                raise DataError(f"id {token} is not of this table: ids end at {self.vocabulary + 255 + len(ROLES)}")
        return text.decode("utf-8", errors="replace")

    def _mark(self, role: str) -> int:
        return self.vocabulary + 256 + ROLES.index(role)


# ---- weights as served -------------------------------------------------------------------------------------


def _served(tensors: Mapping[str, Tensor]) -> Weights:
    sums = checksums(tensors)
    return Weights(tensors=tensors, checksums=sums, fingerprint=fingerprint(sums))


def _log_laws(rows: Mapping[str, Tensor], names: Sequence[str], vocabulary: int, temperature: float) -> Tensor:
    """Log-probabilities [N, V] at the named states; the one place where learner and sampler turn logits
    into a law."""
    blank = torch.zeros(vocabulary, dtype=torch.float64)
    logits = torch.stack([rows[name].double() if name in rows else blank for name in names])
    return log_law(logits, temperature=temperature)


# ---- the sampler -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Held:
    rows: Mapping[str, Tensor]
    version: int


_Laws = dict[tuple[AgentId, Slot, str, float], tuple[list[float], list[float]]]
"""Log-probabilities and their running sum at states that a submit has met."""


class TableSampler:
    """Tables in slots. What it draws is a function of the slot's table and the request alone.

    Args:
        codecs: of every agent that it will serve: its vocabulary and its end ids.
    """

    def __init__(self, codecs: Mapping[AgentId, TableCodec]) -> None:
        self._codecs = dict(codecs)
        # A table without rows is uniform: that is version 0, as a model's own weights are elsewhere.
        self._slots: dict[tuple[AgentId, Slot], _Held] = {(a, "promoted"): _Held(rows={}, version=0) for a in codecs}
        self._cancelled: set[str] = set()
        self._waiting: dict[str, int] = {}

    def _codec(self, agent: AgentId) -> TableCodec:
        if agent not in self._codecs:
            raise MissingError(f"no agent '{agent}' in this sampler; it serves {sorted(self._codecs)}")
        return self._codecs[agent]

    def _held(self, agent: AgentId, slot: Slot) -> _Held:
        if (agent, slot) not in self._slots:
            raise MissingError(f"slot '{slot}' of '{agent}' is empty; publish weights into it first")
        return self._slots[agent, slot]

    def submit(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """Completions in the order of the requests, drawn from the slots as they are now.

        Raises:
            DataError: two requests share an id, or a limit is below one token.
            MissingError: a slot is empty.
        """
        ids = [request.id for request in requests]
        if len(set(ids)) != len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise DataError(f"request id '{twice}' appears twice in one submit; give each request its own id")
        for request in requests:
            self._codec(request.agent)
            if request.max_new_tokens < 1:
                raise DataError(f"request '{request.id}' asks for {request.max_new_tokens} new tokens, at least 1 is needed")
        held = [self._held(request.agent, request.slot) for request in requests]
        return self._draw(list(requests), held)

    async def _draw(self, requests: list[Request], held: list[_Held]) -> AsyncIterator[Completion]:
        laws: _Laws = {}
        for request in requests:
            self._waiting[request.id] = self._waiting.get(request.id, 0) + 1
        try:
            width = max((request.max_new_tokens for request in requests), default=0)
            draws_NT = uniforms([request.key for request in requests], width) if requests else ()
            for request, slot, draws_T in zip(requests, held, draws_NT, strict=True):
                if request.id not in self._cancelled:
                    yield self._complete(request, slot, draws_T.tolist(), laws)
        finally:
            for request in requests:
                self._waiting[request.id] -= 1
                if not self._waiting[request.id]:
                    del self._waiting[request.id]
                    self._cancelled.discard(request.id)

    def _complete(self, request: Request, held: _Held, draws_T: Sequence[float], laws: _Laws) -> Completion:
        """One message, one state at a time: no other request can touch its numbers (ALGORITHMS 5.6).

        `laws` spares the siblings of one submit the same softmax; it ends with the submit, so it cannot go
        stale.
        """
        codec = self._codecs[request.agent]
        ids: list[int] = []
        logprobs: list[float] = []
        for draw in draws_T[: request.max_new_tokens]:
            state = (request.agent, request.slot, row_name((*request.prompt_ids, *ids)), request.temperature)
            if state not in laws:
                log_p_V = _log_laws(held.rows, [state[2]], codec.vocabulary, request.temperature)[0]
                laws[state] = log_p_V.tolist(), log_p_V.exp().cumsum(0).tolist()
            log_p, cumulative = laws[state]
            # The running sum may end a rounding error below 1; the last token that has any probability takes
            # the rest.
            last = max(i for i, value in enumerate(log_p) if value > -math.inf)
            token = min(bisect_right(cumulative, draw), last)
            ids.append(token)
            logprobs.append(min(log_p[token], 0.0))
            if token in codec.end_ids:
                break
        return completed(request, tuple(ids), tuple(logprobs), version=held.version, end_ids=codec.end_ids)

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[tuple[float, ...]]:
        """Log-probability of each of `ids` after `prompt_ids`. Raises DataError on an id that cannot be
        sampled."""
        scores: list[tuple[float, ...]] = []
        for request in requests:
            vocabulary = self._codec(request.agent).vocabulary
            _check_sampled(request.ids, vocabulary, f"score of '{request.agent}'")
            if not request.ids:
                scores.append(())
                continue
            names = [row_name((*request.prompt_ids, *request.ids[:i])) for i in range(len(request.ids))]
            held = self._held(request.agent, request.slot)
            log_p_NV = _log_laws(held.rows, names, vocabulary, request.temperature)
            scores.append(tuple(min(float(log_p_NV[i, token]), 0.0) for i, token in enumerate(request.ids)))
        return scores

    async def couple(self, requests: Sequence[CoupledRequest]) -> Sequence[Completion]:
        """Messages beside others of the same prompts, in order: of their own slot's law, as near to the others as can be."""
        return [self._coupled(one) for one in requests]

    def _coupled(self, one: CoupledRequest) -> Completion:
        request, codec = one.request, self._codec(one.request.agent)
        own, other = self._held(request.agent, request.slot), self._held(request.agent, one.beside)
        draws = torch.from_numpy(uniforms([request.key, beside(request.key)], request.max_new_tokens))  # [2, T]
        ids: list[int] = []
        logprobs: list[float] = []
        while len(ids) < request.max_new_tokens and not (ids and ids[-1] in codec.end_ids):
            at, is_together = len(ids), tuple(ids) == one.ids[: len(ids)]
            name = row_name((*request.prompt_ids, *ids))
            log_q_1V = _log_laws(own.rows, [name], codec.vocabulary, request.temperature)
            if is_together:
                log_p_1V = _log_laws(other.rows, [name], codec.vocabulary, request.temperature)
                said = torch.tensor([one.ids[at]])
                token = int(coupled(log_p_1V, log_q_1V, draws[None, :, at], token_S=said)[1])
            else:
                token = int(inverse_cdf(log_q_1V.exp(), draws[0, at : at + 1]))
            ids.append(token)
            logprobs.append(min(float(log_q_1V[0, token]), 0.0))
        return completed(request, tuple(ids), tuple(logprobs), version=own.version, end_ids=codec.end_ids)

    async def publish(self, agent: AgentId, slot: Slot, weights: Weights, version: int) -> PublishProof:
        """Copy a table into a slot; the proof's fingerprint is computed from the copy.

        Raises:
            PublishError: a tensor is no row of this agent's table, or the copy is not what the checksums promise.
                The slot keeps what it held.
        """
        vocabulary = self._codec(agent).vocabulary
        rows = {name: tensor.detach().clone() for name, tensor in weights.tensors.items()}
        for name, row in rows.items():
            if not name.startswith(ROW) or tuple(row.shape) != (vocabulary,):
                raise PublishError(
                    f"tensor '{name}' of shape {tuple(row.shape)} is no row of '{agent}': rows have {vocabulary} logits"
                )
        landed = _served(rows)
        for name in sorted(landed.checksums.keys() | weights.checksums.keys()):
            if landed.checksums.get(name) != weights.checksums.get(name):
                raise PublishError(
                    f"row '{name}' of '{agent}' did not land as sent (checksum differs); slot '{slot}' keeps what it held"
                )
        self._slots[agent, slot] = _Held(rows, version)
        return PublishProof(agent=agent, slot=slot, version=version, fingerprint=landed.fingerprint)

    async def swap(self, agent: AgentId) -> None:
        """Exchange promoted and candidate. Raises MissingError where either is empty."""
        promoted, candidate = self._held(agent, "promoted"), self._held(agent, "candidate")
        self._slots[agent, "promoted"], self._slots[agent, "candidate"] = candidate, promoted

    async def cancel(self, ids: Collection[str]) -> None:
        """These requests, where still waiting, give no completion; unknown or finished ids are ignored."""
        self._cancelled |= {i for i in ids if i in self._waiting}


def _check_sampled(ids: Sequence[int], vocabulary: int, where: str) -> None:
    for token in ids:
        if not 0 <= token < vocabulary:
            raise DataError(f"{where}: id {token} cannot be sampled, the vocabulary has {vocabulary} ids")


# ---- the learner -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableAnchor:
    """The laws at a batch's action states as they were, and where those states are."""

    logprobs: Tensor
    """[B, T]; 0 where the mask is False."""
    log_p_NV: Tensor
    names: tuple[str, ...]
    temperature: float

    def at(self, batch: TokenBatch) -> TableAnchor:
        """See `engine.Anchor`."""
        if batch.n_act != len(self.names):
            raise DataError(f"laws of {len(self.names)} states cannot be read at the {batch.n_act} of another batch")
        return replace(self, names=tuple(_state_names(batch)))


class TableLearner:
    """One agent's table: float64 masters, exact laws, exact divergences.

    `adamw` has the shared settings (ALGORITHMS 2.13) and treats the table as the dense one that it stands
    for: a row without gradient still follows its momentum. `sgd` is the plain gradient step, without state.

    Rows are kept in the order of their names, so no sum depends on the order in which states were met: a
    learner that was restored from a file steps bit for bit like one that never stopped.

    Args:
        agent: whose batches it accepts.
        vocabulary: number of ids that can be sampled.
        dtype: serving dtype; laws are of the weights rounded to it, and the gradient is taken there (2.11).
        grad_clip: largest gradient norm of a step, None for no bound.
        micro_tokens: padded size of a micro-batch, None for the whole batch at once.
    """

    def __init__(
        self,
        agent: AgentId,
        vocabulary: int,
        *,
        dtype: torch.dtype = torch.float64,
        optimiser: Literal["adamw", "sgd"] = "adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_clip: float | None = 1.0,
        micro_tokens: int | None = None,
    ) -> None:
        self._agent = agent
        self._vocabulary = vocabulary
        self._dtype = dtype
        self._optimiser = optimiser
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self._grad_clip = grad_clip
        self._micro_tokens = micro_tokens
        self._names: dict[str, int] = {}
        self._masters_RV = torch.zeros(0, vocabulary, dtype=torch.float64)
        self._avg_RV = torch.zeros_like(self._masters_RV)
        self._avg_sq_RV = torch.zeros_like(self._masters_RV)
        self._steps = 0

    def set(self, ids: Sequence[int], logits: Sequence[float] | Tensor) -> None:
        """Write the row of the state after these ids. Raises DataError unless it is `vocabulary` finite
        logits."""
        row_V = torch.as_tensor(logits, dtype=torch.float64)
        if tuple(row_V.shape) != (self._vocabulary,) or not bool(row_V.isfinite().all()):
            raise DataError(f"a row of '{self._agent}' is {self._vocabulary} finite logits, not {logits}")
        name = row_name(ids)
        self._grow([name])
        self._masters_RV[self._names[name]] = row_V
        self._prune()

    def _grow(self, names: Sequence[str]) -> None:
        """Rows of zeros for the names that have none, everything again in the order of the names."""
        if all(name in self._names for name in names):
            return
        old = self._names
        self._names = {name: i for i, name in enumerate(sorted({*old, *names}))}
        target = torch.tensor([self._names[name] for name in old], dtype=torch.long)
        wide = torch.zeros(len(self._names), self._vocabulary, dtype=torch.float64)
        self._masters_RV, self._avg_RV, self._avg_sq_RV = (
            wide.index_copy(0, target, held) for held in (self._masters_RV, self._avg_RV, self._avg_sq_RV)
        )

    # ---- laws

    def _states(self, batch: TokenBatch) -> tuple[list[str], Tensor, Tensor, Tensor]:
        """Names of the action states in row order, their row and position, and the sampled token of each."""
        if batch.agent != self._agent:
            raise DataError(f"a batch of '{batch.agent}' was given to the learner of '{self._agent}'")
        row_N, position_N = batch.mask.nonzero(as_tuple=True)
        token_N = batch.ids[row_N, position_N]
        _check_sampled(token_N.tolist(), self._vocabulary, f"batch of '{self._agent}'")
        return _state_names(batch), row_N, position_N, token_N

    def _log_laws(self, names: Sequence[str], temperature: float) -> Tensor:
        served_RV = self._masters_RV.to(self._dtype)
        rows = {name: served_RV[self._names[name]] for name in names if name in self._names}
        return _log_laws(rows, names, self._vocabulary, temperature)

    @torch.no_grad()
    def remember(self, batch: TokenBatch) -> TableAnchor:
        names, row_N, position_N, token_N = self._states(batch)
        log_p_NV = self._log_laws(names, batch.temperature)
        logprobs_BT = torch.zeros(batch.ids.shape, dtype=log_p_NV.dtype)
        logprobs_BT[row_N, position_N] = log_p_NV.gather(1, token_N[:, None])[:, 0]
        return TableAnchor(logprobs_BT, log_p_NV, tuple(names), batch.temperature)

    def logprobs(self, batch: TokenBatch) -> Tensor:
        return self.remember(batch).logprobs

    def _own(self, anchor: Anchor, names: Sequence[str], temperature: float) -> TableAnchor:
        if not isinstance(anchor, TableAnchor):
            raise DataError(f"a {type(anchor).__name__} is no anchor of a table; use this learner's `remember`")
        if anchor.names != tuple(names) or anchor.temperature != temperature:
            raise DataError(
                f"the anchor of '{self._agent}' was remembered on another batch ({len(anchor.names)} "
                "states at temperature "
                f"{anchor.temperature}, here {len(names)} at {temperature}); remember this one"
            )
        return anchor

    @torch.no_grad()
    def divergence(self, batch: TokenBatch, anchor: Anchor) -> TokenDivergence:
        names, row_N, position_N, _ = self._states(batch)
        old = self._own(anchor, names, batch.temperature)
        kl_new_old, kl_old_new = exact(self._log_laws(names, batch.temperature), old.log_p_NV)
        return TokenDivergence(kl_new_old=kl_new_old, kl_old_new=kl_old_new, row=row_N, position=position_N)

    @torch.no_grad()
    def project(self, batch: TokenBatch, anchor: Anchor, *, radius: float) -> TableAnchor:
        now = self.remember(batch)
        current = self._own(anchor, now.names, batch.temperature)
        return replace(now, log_p_NV=project(now.log_p_NV, current.log_p_NV, radius=radius)[0])

    # ---- moving

    def step(self, batch: AdvantageBatch, objective: Objective, *, lr: float, anchor: Anchor | None) -> StepReport:
        tokens = batch.batch
        names, row_N, position_N, token_N = self._states(tokens)
        if not bool(batch.advantages[tokens.mask].isfinite().all()):
            raise NonFiniteError(f"an advantage of '{self._agent}' is not finite; nothing was stepped")
        old_NV: Tensor | None = None
        if objective.needs_kl:
            if anchor is None:
                raise MissingError(
                    f"the objective's penalty {objective.penalty} needs an anchor of '{self._agent}'; remember the batch"
                )
            old_NV = self._own(anchor, names, tokens.temperature).log_p_NV
        self._grow(names)
        # The gradient is taken at the served weights, where the ratio to the sampler's law is 1, and applied
        # to the masters.
        served_RV = self._masters_RV.to(self._dtype).double().clone().requires_grad_()
        at_N = torch.tensor([self._names[name] for name in names])
        denominator, n_act = objective.denominator(tokens), tokens.n_act
        keep_BT: Tensor | None = None
        if objective.needs_batch:
            log_p_NV = log_law(served_RV.detach()[at_N], temperature=tokens.temperature)
            sampled_N = log_p_NV.gather(1, token_N[:, None])[:, 0]
            keep_BT = objective.keep(_scatter(sampled_N, row_N, position_N, tokens.ids.shape), batch)
        chunks = (
            [list(range(tokens.n_rows))]
            if self._micro_tokens is None
            else micro_batches(tokens, max_tokens=self._micro_tokens)
        )
        loss, diagnostics = 0.0, dict[str, float]()
        for chunk in chunks:
            part = batch.rows(chunk)
            # States of the chunk in its own row order, which `nonzero` of its mask gives again.
            here = torch.cat([(row_N == b).nonzero()[:, 0] for b in chunk])
            b_N, t_N = part.batch.mask.nonzero(as_tuple=True)
            log_p_NV = log_law(served_RV[at_N[here]], temperature=tokens.temperature)
            shape = part.batch.ids.shape
            logprobs_BT = _scatter(log_p_NV.gather(1, token_N[here][:, None])[:, 0], b_N, t_N, shape)
            kl_BT = (
                None if old_NV is None else _scatter(directed(log_p_NV, old_NV[here], objective.direction), b_N, t_N, shape)
            )
            term = objective(
                logprobs_BT,
                part,
                kl_BT=kl_BT,
                denominator=denominator,
                n_act=n_act,
                keep_BT=None if keep_BT is None else keep_BT[chunk, : shape[1]],
            )
            torch.autograd.backward(term.total)
            loss += float(term.total.detach())
            for name, value in term.diagnostics.items():
                diagnostics[name] = diagnostics.get(name, 0.0) + value
        gradient_RV = torch.zeros_like(self._masters_RV) if served_RV.grad is None else served_RV.grad
        norm = float(gradient_RV.norm())
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteError(f"step of '{self._agent}': loss {loss}, gradient norm {norm}; restore the last snapshot")
        self._apply(gradient_RV, norm, lr)
        self._prune()
        if not bool(self._masters_RV.isfinite().all()):
            raise NonFiniteError(
                f"step of '{self._agent}' at lr {lr} left a weight that is not finite; restore the last snapshot"
            )
        return StepReport(loss=loss, grad_norm=norm, diagnostics=diagnostics)

    def score_gradients(self, batch: AdvantageBatch) -> tuple[Tensor, Tensor]:
        """Rows of states that the table does not hold count as the zeros that they are."""
        tokens = batch.batch
        names, row_N, position_N, token_N = self._states(tokens)
        place = {name: i for i, name in enumerate(sorted({*self._names, *names}))}
        at_N = torch.tensor([place[name] for name in names])
        law_NV = self._log_laws(names, tokens.temperature).exp()
        score_NV = (torch.nn.functional.one_hot(token_N, self._vocabulary) - law_NV) / tokens.temperature
        gradient_RV = torch.zeros(len(place), self._vocabulary, dtype=torch.float64)
        fisher_RV = torch.zeros_like(gradient_RV)
        episode_N = tokens.episode[row_N]
        for e in torch.unique(episode_N):
            own = episode_N == e
            score_RV = torch.zeros_like(gradient_RV).index_add(0, at_N[own], score_NV[own].double())
            first = int(own.nonzero()[0, 0])
            gradient_RV += float(batch.advantages[row_N[first], position_N[first]]) * score_RV
            fisher_RV += score_RV.square()
        return gradient_RV.flatten() / tokens.n_episodes, fisher_RV.flatten() / tokens.n_episodes

    def _apply(self, gradient_RV: Tensor, norm: float, lr: float) -> None:
        if self._grad_clip is not None and norm > self._grad_clip:
            gradient_RV = gradient_RV * (self._grad_clip / norm)
        self._steps += 1
        self._masters_RV = self._masters_RV * (1.0 - lr * self._weight_decay)
        if self._optimiser == "sgd":
            self._masters_RV = self._masters_RV - lr * gradient_RV
            return
        first, second = self._betas
        self._avg_RV = self._avg_RV * first + gradient_RV * (1.0 - first)
        self._avg_sq_RV = self._avg_sq_RV * second + gradient_RV.square() * (1.0 - second)
        mean_RV = self._avg_RV / (1.0 - first**self._steps)
        scale_RV = (self._avg_sq_RV / (1.0 - second**self._steps)).sqrt() + self._eps
        self._masters_RV = self._masters_RV - lr * mean_RV / scale_RV

    def blend(self, towards: Snapshot, origin: Snapshot, scale: float) -> None:
        """Exact at both ends: scale 0 is the origin's masters and scale 1 is `towards`', bit for bit, rows
        included."""
        if not 0.0 <= scale <= 1.0:
            raise DataError(f"scale {scale} of a blend lies outside [0, 1]")
        blank = torch.zeros(self._vocabulary, dtype=torch.float64)
        self.restore(origin)
        names = sorted({*origin.weights, *towards.weights})
        self._grow(names)
        for name in names:
            # `lerp` gives its ends exactly; origin + 1 * (towards - origin) need not.
            self._masters_RV[self._names[name]] = torch.lerp(
                origin.weights.get(name, blank).double(), towards.weights.get(name, blank).double(), scale
            )
        self._prune()

    def _prune(self) -> None:
        """Forget rows of zeros without moments: they are what an unwritten row is, so equal tables have
        equal rows."""
        is_written_R = ((self._masters_RV != 0) | (self._avg_RV != 0) | (self._avg_sq_RV != 0)).any(dim=1)
        if bool(is_written_R.all()):
            return
        kept = [name for name, i in self._names.items() if is_written_R[i]]
        self._names = {name: i for i, name in enumerate(kept)}
        self._masters_RV, self._avg_RV, self._avg_sq_RV = (
            held[is_written_R] for held in (self._masters_RV, self._avg_RV, self._avg_sq_RV)
        )

    def snapshot(self, *, moments: bool = True, lend: bool = False) -> Snapshot:
        kept: dict[str, Tensor] = {}
        if moments and self._steps and self._optimiser == "adamw":
            for kind, held_RV in (("exp_avg", self._avg_RV), ("exp_avg_sq", self._avg_sq_RV)):
                kept |= {f"{kind}.{name}": held_RV[i].clone() for name, i in self._names.items()}
        return Snapshot(
            weights={name: self._masters_RV[i].clone() for name, i in self._names.items()},
            moments=kept,
            steps=self._steps,
        )

    def restore(self, snapshot: Snapshot) -> None:
        """The snapshot's table and nothing else: rows that were created since are gone.

        Raises:
            MissingError: steps were taken, and a row has no moments.
            DataError: a row has another vocabulary.
        """
        for name, row in snapshot.weights.items():
            if not name.startswith(ROW) or tuple(row.shape) != (self._vocabulary,):
                raise DataError(
                    f"tensor '{name}' of shape {tuple(row.shape)} is no row of '{self._agent}': "
                    f"rows have {self._vocabulary} logits"
                )
        has_moments = bool(snapshot.steps) and self._optimiser == "adamw"
        if has_moments:
            needed = {f"{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in snapshot.weights}
            missing = sorted(needed - snapshot.moments.keys())
            if missing:
                raise MissingError(f"snapshot of '{self._agent}' after {snapshot.steps} steps has no '{missing[0]}'")
        names = sorted(snapshot.weights)
        self._names = {name: i for i, name in enumerate(names)}
        self._steps = snapshot.steps
        self._masters_RV = self._stacked(snapshot.weights, names)
        blank_RV = torch.zeros_like(self._masters_RV)
        self._avg_RV, self._avg_sq_RV = (
            self._stacked(snapshot.moments, [f"{kind}.{name}" for name in names]) if has_moments else blank_RV.clone()
            for kind in ("exp_avg", "exp_avg_sq")
        )

    def _stacked(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
        """Copies of these tensors as rows; of none, a table without rows."""
        blank = torch.zeros(0, self._vocabulary, dtype=torch.float64)
        return torch.stack([tensors[name].double() for name in names]) if names else blank

    def weights(self) -> Weights:
        """Every stored row in the serving dtype."""
        return _served({name: self._masters_RV[i].to(self._dtype, copy=True) for name, i in self._names.items()})


def _state_names(batch: TokenBatch) -> list[str]:
    """Names of the rows of a batch's action states, in row order."""
    ids = batch.ids.numpy().astype(">u2")
    return [ROW + ids[b, :t].tobytes().hex() for b, t in batch.mask.nonzero().tolist()]


def _scatter(values_N: Tensor, row_N: Tensor, position_N: Tensor, shape: torch.Size) -> Tensor:
    """Values of the action states in their places of a [B, T] tensor, 0 elsewhere."""
    return torch.zeros(shape, dtype=values_N.dtype).index_put((row_N, position_N), values_N)
