"""The torch engine of one machine: a sampler with slots of served weights and a learner with fp32 masters.

Both call the same few functions here for hidden states, logits and laws, so that what was sampled is what is scored.
Axes: B rows, U different prompts of a decode batch, T tokens, N action states in row order, D width, V vocabulary.
"""

from __future__ import annotations

import asyncio
import copy
import ctypes
import inspect
import math
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicLayer

from baton.core import divergence, keyed
from baton.core.batching import micro_batches
from baton.core.losses import Objective
from baton.core.trust_region import quantile_point
from baton.engines import adapters, models
from baton.engines.adapters import Adapter, Shared
from baton.engines.chat import ChatCodec, codec_of
from baton.engines.engine import Anchor, Completion, Request, ScoreRequest
from baton.errors import DataError, MissingError, ModelError, NonFiniteError, PublishError, UnsupportedError
from baton.types import (
    AdvantageBatch,
    AgentId,
    PublishProof,
    Slot,
    Snapshot,
    StepReport,
    TokenBatch,
    TokenDivergence,
    TokenIds,
    Weights,
)

Compute = Literal["float32", "bfloat16"]
Rounding = Literal["nearest"]

CHUNK = 2**23
"""Most elements of one [states, vocabulary] tensor (32 MB in fp32) where laws are rebuilt and compared, six at a time."""

BF16_PAYS_FROM = 20_000_000
"""Parameters from which bf16 autocast trains faster than fp32 on a CPU that has bf16 products."""

GIVES_BACK_FROM = 20_000_000
"""Parameters of the network from which memory freed before and in a step goes back to the system: the allocator would keep
most of it (0.8 GB at 135M) beside what is taken next."""


# ---- one model, one way to its laws ----------------------------------------------------------------------------


class _Net:
    """A causal LM in two halves, hidden states and head, so that logits are made only where they are read.

    Either a model of its own, or an adapter on a base that others use too (`Bases`).
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        model = models.load(folder, dtype=dtype)
        # A recurrent layer would read the padding on the left of a decode batch.
        config = cast(Any, model).config
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if kinds:
            raise ModelError(
                f"{folder}: the local engine does not serve layers of kind {sorted(kinds)}; use an attention model"
            )
        self.folder = folder
        self.model = model.to(device)
        self.device = device
        self.dtype = dtype
        self.base: Any = cast(Any, model).base_model
        self.head = cast(nn.Linear, cast(Any, model).get_output_embeddings())
        self.softcap = cast(float | None, getattr(config, "final_logit_softcapping", None))
        self.layers = int(config.num_hidden_layers)
        self.cache_argument = "cache" if "cache" in inspect.signature(self.base.forward).parameters else "past_key_values"
        self.forbidden = _forbidden(folder, rows=int(self.head.weight.shape[0])).to(device)
        self.shared: Shared | None = None
        self.adapter: Adapter | None = None
        self._verify_halves()

    def body(self, **arguments: Any) -> Float[Tensor, "B T D"]:
        """Final hidden states, under this network's own adapter where it has one."""
        if self.shared is not None:
            self.shared.activate(self.adapter)
        return self.base(**arguments).last_hidden_state

    def hidden(self, ids_BT: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Final hidden states of right-padded rows: causal attention never looks at the padding, so no mask is needed."""
        return self.body(input_ids=ids_BT, use_cache=False)

    def logits(self, hidden: Float[Tensor, "S D"]) -> Float[Tensor, "S V"]:
        """Unembedding as this model defines it (bias and soft cap included)."""
        return _unembed(hidden, self.head.weight, self.head.bias, self.softcap)

    def law(self, hidden: Float[Tensor, "S D"], *, temperature: float) -> Float[Tensor, "S V"]:
        """fp32 log-probabilities of the next token at this temperature; rows beyond the tokenizer have probability 0."""
        return divergence.log_law(self.logits(hidden), temperature=temperature, forbidden=self.forbidden)

    def masters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name: every parameter of a model, or an adapter's."""
        return dict(self.model.named_parameters()) if self.adapter is None else dict(self.adapter.parameters)

    def held(self) -> dict[str, Tensor]:
        """What is served and published, by the names that it is saved under."""
        if self.adapter is None:
            return models.held_tensors(self.model)
        return {name: parameter.detach() for name, parameter in self.adapter.parameters.items()}

    def adapted(self, folder: Path, *, is_trained: bool) -> _Net:
        """This base under a new adapter of the folder's shape, whose tensors are still to be filled."""
        if self.shared is None:
            self.shared = Shared(self.model)
        net = copy.copy(self)
        net.folder = folder
        net.adapter = self.shared.add(folder, is_trained=is_trained)
        return net

    def twin(self) -> _Net:
        """The same network with tensors of its own (an adapter's twin shares the base as it does)."""
        if self.adapter is not None:
            return self.adapted(self.folder, is_trained=False)
        net = copy.copy(self)
        net.model = copy.deepcopy(self.model)
        net.base = cast(Any, net.model).base_model
        net.head = cast(nn.Linear, cast(Any, net.model).get_output_embeddings())
        return net

    def _verify_halves(self) -> None:
        ids = torch.arange(8, device=self.device).remainder(int(self.head.weight.shape[0]))[None]
        with torch.no_grad():
            whole: Tensor = cast(Any, self.model)(input_ids=ids, use_cache=False).logits[0]
            gap = float((whole.float() - self.logits(self.hidden(ids)[0]).float()).abs().max())
        bound = 1e-3 * max(1.0, float(whole.abs().max())) if self.dtype == torch.float32 else 0.1
        if not gap <= bound:
            raise ModelError(
                f"{self.folder}: head(hidden states) is {gap:.3g} away from the model's own logits (bound {bound:.3g}); "
                "this architecture scales its logits in a way that the local engine does not know"
            )


class Bases:
    """The bases that adapters share: each is loaded once per dtype and device, for samplers and learners together."""

    def __init__(self) -> None:
        self._nets: dict[tuple[Path, torch.dtype, torch.device], _Net] = {}

    def adapted(self, folder: Path, *, dtype: torch.dtype, device: torch.device, is_trained: bool) -> _Net:
        """The adapter of this folder on its base in `dtype`; the adapter's own tensors are fp32."""
        place = (adapters.base_of(folder).resolve(), dtype, device)
        if place not in self._nets:
            adapters.check_base(folder)
            self._nets[place] = _Net(place[0], dtype=dtype, device=device)
        net = self._nets[place].adapted(folder, is_trained=is_trained)
        with models.reading(folder / adapters.TENSORS):
            saved, own = load_file(folder / adapters.TENSORS), net.held()
        if saved.keys() != own.keys():
            raise ModelError(
                f"{folder / adapters.TENSORS} does not fit its {adapters.CONFIG} and base: "
                f"{sorted(saved.keys() ^ own.keys())[:4]} are on one side only"
            )
        for name, tensor in own.items():
            tensor.copy_(saved[name])
        return net


def _unembed(
    hidden: Float[Tensor, "S D"], weight: Float[Tensor, "V D"], bias: Float[Tensor, " V"] | None, softcap: float | None
) -> Float[Tensor, "S V"]:
    logits = functional.linear(hidden, weight, bias)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _forbidden(folder: Path, *, rows: int) -> Bool[Tensor, " V"]:
    """Vocabulary rows that the tokenizer has no token for (padding of the matrix)."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    known = [i for i in tokenizer.get_vocab(with_added_tokens=True).values() if i < rows]
    forbidden = torch.ones(rows, dtype=torch.bool)
    forbidden[known] = False
    return forbidden


# ---- decoding --------------------------------------------------------------------------------------------------


class _Room(DynamicLayer):
    """Keys and values of one layer in a buffer with room for the whole answer: a token is written, not concatenated."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.buffers: tuple[Tensor, Tensor] | None = None
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new = key_states.shape[-2]
        if self.buffers is None:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            self.length = new
            return key_states, value_states
        keys, values = self.buffers
        keys[:, :, self.length : self.length + new] = key_states
        values[:, :, self.length : self.length + new] = value_states
        self.length += new
        self._show()
        return cast(Tensor, self.keys), cast(Tensor, self.values)

    def take(self, rows: Int[Tensor, " R"]) -> None:
        """Keep these rows, in this order; a row may be taken more than once."""
        sources = (self.keys, self.values) if self.buffers is None else self.buffers
        taken: list[Tensor] = []
        for source in cast(tuple[Tensor, Tensor], sources):
            buffer = source.new_zeros(len(rows), source.shape[1], self.room, source.shape[3])
            buffer[:, :, : self.length] = source[rows, :, : self.length]
            taken.append(buffer)
        self.buffers = (taken[0], taken[1])
        self._show()

    def _show(self) -> None:
        assert self.buffers is not None
        self.keys = self.buffers[0][:, :, : self.length]
        self.values = self.buffers[1][:, :, : self.length]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One message to decode: `forced` gives its tokens (to be scored), otherwise `key` draws up to `limit` of them."""

    prompt: TokenIds
    limit: int
    key: keyed.Key | None = None
    forced: TokenIds | None = None


def _draw(log_law: Float[Tensor, "B V"], u: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Inverse CDF: the first token whose running sum (fp64) exceeds u, or the last possible token if none does."""
    law = log_law.exp()
    running = law.cumsum(dim=-1, dtype=torch.float64)
    if not bool(torch.isfinite(running[:, -1]).all()):
        raise NonFiniteError("the law of the next token is NaN or infinite: the served weights are not finite")
    token = torch.searchsorted(running, u[:, None], right=True)[:, 0]
    beyond = token >= law.shape[1]
    if bool(beyond.any()):
        last = law.shape[1] - 1 - (law > 0).flip(-1).to(torch.uint8).argmax(dim=-1)
        token = torch.where(beyond, last, token)
    return token


def _decode(
    net: _Net, rows: Sequence[Row], *, temperature: float, end_ids: Collection[int]
) -> list[tuple[TokenIds, tuple[float, ...]]]:
    """(ids, log-probabilities) of each row: one padded batch, equal prompts run once, rows leave as they end.

    What a row gets depends on the rows of this call alone, and forced rows go through the very operations of drawn ones:
    scoring a batch that was sampled gives its log-probabilities back bit for bit.
    """
    device = net.device
    place: dict[TokenIds, int] = {}
    prompt_of = torch.tensor([place.setdefault(row.prompt, len(place)) for row in rows], device=device)
    lengths = [len(prompt) for prompt in place]
    width = max(lengths)
    steps = max(row.limit for row in rows)
    ids_UT = torch.tensor([(0,) * (width - len(prompt)) + prompt for prompt in place], device=device)
    pad_U = torch.tensor([width - length for length in lengths], device=device)
    pad_B = pad_U[prompt_of]
    padded = min(lengths) < width
    cache = [_Room(width + steps) for _ in range(net.layers)]
    arguments: dict[str, Any] = {"use_cache": steps > 1}
    if steps > 1:
        arguments[net.cache_argument] = Cache(layers=cast(Any, cache))
    if padded:
        column_T = torch.arange(width, device=device)
        arguments["attention_mask"] = (column_T >= pad_U[:, None]).long()
        arguments["position_ids"] = (column_T - pad_U[:, None]).clamp(min=0)
    hidden_UD = net.body(input_ids=ids_UT, **arguments)[:, -1]
    log_law = net.law(hidden_UD, temperature=temperature)[prompt_of]

    limits: list[int] = [row.limit for row in rows]
    uniforms = None
    if any(row.forced is None for row in rows):
        keys = [row.key for row in rows if row.key is not None]
        if len(keys) != len(rows):
            raise MissingError("rows of a decode batch are either all drawn, each with a key, or all forced")
        uniforms = torch.from_numpy(keyed.uniforms(keys, steps)).to(device)  # [B, steps]
    ends = torch.tensor(sorted(end_ids), device=device)
    ids: list[list[int]] = [[] for _ in rows]
    logprobs: list[list[float]] = [[] for _ in rows]
    here = list(range(len(rows)))  # the row that each line of the batch works for
    done = [False] * len(rows)
    for step in range(steps):
        if uniforms is not None:
            token_B = _draw(log_law, uniforms[torch.tensor(here, device=device), step])
        else:
            forced = [cast(TokenIds, rows[r].forced) for r in here]
            token_B = torch.tensor([f[step] if step < len(f) else f[-1] for f in forced], device=device)
        logprob_B = log_law.gather(1, token_B[:, None])[:, 0]
        ended_B = torch.isin(token_B, ends) if uniforms is not None else torch.zeros_like(token_B, dtype=torch.bool)
        for r, token, logprob, ended in zip(here, token_B.tolist(), logprob_B.tolist(), ended_B.tolist(), strict=True):
            if not done[r]:
                ids[r].append(token)
                logprobs[r].append(logprob)
                done[r] = ended or len(ids[r]) == limits[r]
        alive = [line for line, r in enumerate(here) if not done[r]]
        if not alive:
            break
        kept = torch.arange(len(here), device=device)
        # Copying the cache costs about one step of a quarter of the batch: until then finished rows ride along.
        if step == 0 or 4 * len(alive) <= 3 * len(here):
            kept = torch.tensor(alive, device=device)
            for layer in cache:
                layer.take(prompt_of[kept] if step == 0 else kept)
            here = [here[line] for line in alive]
            pad_B = pad_B[kept]
        seen = width + step + 1
        arguments["position_ids"] = (seen - 1 - pad_B)[:, None]
        if padded:
            arguments["attention_mask"] = (torch.arange(seen, device=device) >= pad_B[:, None]).long()
        hidden_BD = net.body(input_ids=token_B[kept][:, None], **arguments)[:, -1]
        log_law = net.law(hidden_BD, temperature=temperature)
    return [(tuple(i), tuple(p)) for i, p in zip(ids, logprobs, strict=True)]


def _cut(rows: Sequence[Row], batch_size: int) -> list[list[int]]:
    """Row numbers of each decode batch: by prompt length, equal prompts together, otherwise in the order given.

    A batch has at most `batch_size` lines; where every answer is one token a line is a prompt, not a row.
    """
    first: dict[TokenIds, int] = {}
    for index, row in enumerate(rows):
        first.setdefault(row.prompt, index)
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i].prompt), first[rows[i].prompt], i))
    one_token = all(row.limit == 1 for row in rows)
    batches: list[list[int]] = []
    lines = batch_size
    for at, index in enumerate(order):
        repeats = at > 0 and rows[order[at - 1]].prompt == rows[index].prompt
        needed = 0 if one_token and repeats else 1
        if lines + needed > batch_size:
            batches.append([])
            lines, needed = 0, 1
        batches[-1].append(index)
        lines += needed
    return batches


# ---- sampler ---------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Held:
    """Weights in a slot: the network, the version that it was published as, and how many submits sample from it now."""

    net: _Net
    version: int
    users: int = 0


@dataclass(kw_only=True)
class _Seat:
    codec: ChatCodec
    slots: dict[Slot, _Held] = field(default_factory=lambda: dict[Slot, _Held]())


class LocalSampler:
    """Implements `engine.Sampler`: batched decoding with a KV cache, one keyed uniform per token (ALGORITHMS 5.6).

    `specs` names each agent's folder, a model or an adapter; its weights, a model's rounded to `dtype`, are in the slot
    `promoted` as version 0. The slots `candidate` and `start` hold nothing (and take no memory) until they are published.
    Adapters of one base share it (`bases`, the crew's). No processor of a model's
    generation config is applied: the law is softmax(logits / T) over the tokenizer's vocabulary, and its log-probability is
    what is recorded.
    """

    def __init__(
        self,
        specs: Mapping[AgentId, Path],
        *,
        dtype: torch.dtype,
        batch_size: int = 64,
        rounding: Rounding = "nearest",
        devices: Mapping[AgentId, torch.device] | None = None,
        bases: Bases | None = None,
    ) -> None:
        if rounding != "nearest":
            raise UnsupportedError(f"rounding '{rounding}' is not implemented by the local sampler; use 'nearest'")
        if batch_size < 1:
            raise ModelError(f"batch_size {batch_size}: a decode batch needs at least one row")
        self.dtype = dtype
        self.batch_size = batch_size
        self._in_flight: Counter[str] = Counter()
        self._cancelled: set[str] = set()
        self._seats: dict[AgentId, _Seat] = {}
        bases = bases or Bases()
        for agent, folder in specs.items():
            device = torch.device("cpu") if devices is None else devices[agent]
            if adapters.is_adapter(folder):
                net = bases.adapted(folder, dtype=dtype, device=device, is_trained=False)
            else:
                net = _Net(folder, dtype=dtype, device=device)
                net.model.requires_grad_(False)
            self._seats[agent] = _Seat(codec=codec_of(folder), slots={"promoted": _Held(net=net, version=0)})

    def codec(self, agent: AgentId) -> ChatCodec:
        """Between text and this agent's ids."""
        return self._seat(agent).codec

    def submit(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """Completions in the order of the requests.

        The requests of one (agent, slot, temperature) are cut into decode batches by prompt length and order before anything
        runs, so every float depends on the requests and their order alone. A cancelled request is not yielded.

        Raises:
            MissingError: an agent or a slot that holds nothing.
            DataError: an empty prompt, no token asked for, or prompt + answer beyond the context.
        """
        groups: dict[tuple[AgentId, Slot, float], list[int]] = {}
        rows: list[Row] = []
        for index, request in enumerate(requests):
            self._held(request.agent, request.slot)
            self._require_fit(request.agent, request.id, len(request.prompt_ids), request.max_new_tokens)
            groups.setdefault((request.agent, request.slot, request.temperature), []).append(index)
            rows.append(Row(prompt=request.prompt_ids, limit=request.max_new_tokens, key=request.key))
        return self._completions(requests, rows, groups)

    async def _completions(
        self, requests: Sequence[Request], rows: Sequence[Row], groups: Mapping[tuple[AgentId, Slot, float], list[int]]
    ) -> AsyncIterator[Completion]:
        ready: dict[int, Completion] = {}
        following = 0
        held = [self._held(agent, slot) for agent, slot, _ in groups]
        own = [request.id for request in requests]
        for one in held:
            one.users += 1
        self._in_flight.update(own)
        try:
            for ((agent, _, temperature), members), one in zip(groups.items(), held, strict=True):
                end_ids = self._seat(agent).codec.end_ids
                for batch in _cut([rows[i] for i in members], self.batch_size):
                    chosen = [members[i] for i in batch]
                    if all(requests[i].id in self._cancelled for i in chosen):
                        continue
                    with torch.inference_mode():
                        said = _decode(one.net, [rows[i] for i in chosen], temperature=temperature, end_ids=end_ids)
                    for i, (ids, logprobs) in zip(chosen, said, strict=True):
                        ready[i] = Completion(
                            id=requests[i].id,
                            ids=ids,
                            logprobs=logprobs,
                            version=one.version,
                            finish_reason="stop" if ids[-1] in end_ids else "length",
                        )
                    await asyncio.sleep(0)
                    while following in ready:
                        if requests[following].id not in self._cancelled:
                            yield ready[following]
                        del ready[following]
                        following += 1
            for i in sorted(ready):
                if requests[i].id not in self._cancelled:
                    yield ready[i]
        finally:
            for one in held:
                one.users -= 1
            self._in_flight.subtract(own)
            self._in_flight += Counter()
            self._cancelled &= self._in_flight.keys()

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[tuple[float, ...]]:
        """Log-probability of each given token, by the decoding loop itself with its tokens forced.

        The requests of one submit, scored in the same order, give the log-probabilities that it recorded bit for bit.
        """
        groups: dict[tuple[AgentId, Slot, float], list[int]] = {}
        rows: list[Row] = []
        for index, request in enumerate(requests):
            self._held(request.agent, request.slot)
            self._require_fit(request.agent, f"score {index}", len(request.prompt_ids), len(request.ids))
            groups.setdefault((request.agent, request.slot, request.temperature), []).append(index)
            rows.append(Row(prompt=request.prompt_ids, limit=len(request.ids), forced=request.ids))
        scores: list[tuple[float, ...]] = [()] * len(requests)
        for (agent, slot, temperature), members in groups.items():
            net = self._held(agent, slot).net
            for batch in _cut([rows[i] for i in members], self.batch_size):
                with torch.inference_mode():
                    said = _decode(net, [rows[members[i]] for i in batch], temperature=temperature, end_ids=())
                for i, (_, logprobs) in zip(batch, said, strict=True):
                    scores[members[i]] = logprobs
        return scores

    async def publish(self, agent: AgentId, slot: Slot, weights: Weights, version: int) -> PublishProof:
        """Copy weights into the slot and read them back. A model's slot keeps its tensors, an adapter's gets new ones.

        The proof is made from what is held; that it equals `weights.fingerprint` is for the caller to check.

        Raises:
            PublishError: tensors that do not fit the model, or a slot that a submit is sampling from.
        """
        seat = self._seat(agent)
        before = seat.slots.get(slot)
        if before is not None and before.users:
            raise PublishError(f"slot '{slot}' of '{agent}' is being sampled from; weights change only between turns")
        promoted = seat.slots["promoted"].net
        own = promoted.held()
        if own.keys() != weights.tensors.keys():
            raise PublishError(
                f"weights for '{agent}' do not fit: {sorted(own.keys() ^ weights.tensors.keys())[:4]} are on one side only"
            )
        for name, tensor in own.items():
            sent = weights.tensors[name]
            if sent.shape != tensor.shape or sent.dtype != tensor.dtype:
                raise PublishError(
                    f"weights for '{agent}': {name} is {sent.dtype} {tuple(sent.shape)}, the sampler holds {tensor.dtype} "
                    f"{tuple(tensor.shape)}; serve both sides in one dtype"
                )
        net = promoted.twin() if before is None or before.net.adapter is not None else before.net
        for name, tensor in net.held().items():
            tensor.copy_(weights.tensors[name])
        seat.slots[slot] = _Held(net=net, version=version)
        landed = models.fingerprint(models.checksums(net.held()))
        return PublishProof(agent=agent, slot=slot, version=version, fingerprint=landed)

    def drop(self, agent: AgentId, slot: Slot) -> None:
        """Empty a slot, so that it takes no memory until it is published again; nothing is sampled from it any more."""
        self._seat(agent).slots.pop(slot, None)

    async def swap(self, agent: AgentId) -> None:
        """Exchange `promoted` and `candidate`: two pointers, no weight moves."""
        slots = self._seat(agent).slots
        candidate = self._held(agent, "candidate")
        slots["promoted"], slots["candidate"] = candidate, slots["promoted"]

    async def cancel(self, ids: Collection[str]) -> None:
        """Do not yield these, if they are in flight; a batch of nothing but cancelled requests is not run.

        Other requests keep their floats: nobody moves up.
        """
        self._cancelled.update(id for id in ids if id in self._in_flight)

    def _seat(self, agent: AgentId) -> _Seat:
        if agent not in self._seats:
            raise MissingError(f"the sampler holds no agent '{agent}'; it has {', '.join(self._seats)}")
        return self._seats[agent]

    def _held(self, agent: AgentId, slot: Slot) -> _Held:
        held = self._seat(agent).slots.get(slot)
        if held is None:
            raise MissingError(f"slot '{slot}' of '{agent}' holds nothing; publish weights into it first")
        return held

    def _require_fit(self, agent: AgentId, what: str, prompt: int, answer: int) -> None:
        if prompt < 1 or answer < 1:
            raise DataError(
                f"{what} of '{agent}': {prompt} prompt ids and {answer} tokens asked for; need at least 1 of each"
            )
        context = self._seat(agent).codec.context_length
        if prompt + answer > context:
            raise DataError(
                f"{what} of '{agent}': {prompt} prompt ids + {answer} new tokens exceed the context of {context}; "
                "shorten the task or max_new_tokens"
            )


# ---- learner ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LocalAnchor:
    """The policy at `remember`: final hidden states at the action states and the unembedding (a copy where it is trained).

    Laws are rebuilt from them chunk by chunk, which takes a fraction of the memory of the log-probabilities.
    """

    logprobs: Float[Tensor, "B T"]
    hidden: Float[Tensor, "N D"]
    weight: Float[Tensor, "V D"]
    bias: Float[Tensor, " V"] | None
    softcap: float | None
    ids: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    temperature: float

    def require(self, batch: TokenBatch) -> None:
        """Raise DataError unless this is the batch that was remembered."""
        same = self.ids.shape == batch.ids.shape and torch.equal(self.mask, batch.mask)
        if not (same and torch.equal(self.ids, batch.ids) and self.temperature == batch.temperature):
            raise DataError(
                f"the anchor of '{batch.agent}' was remembered on another batch ({tuple(self.ids.shape)} at T "
                f"{self.temperature}, now {tuple(batch.ids.shape)} at T {batch.temperature}); remember this one first"
            )


class LocalLearner:
    """Implements `engine.Learner`: fp32 masters, AdamW, and everything reported from the weights as served.

    Served weights are the masters rounded to `serve_dtype` (nearest); for float32 they are the masters themselves. The
    folder of an adapter gives a learner of that adapter: its masters are served as they are, on a base in `serve_dtype` that
    it shares (`bases`, the crew's) and never writes. `compute` is the precision of the training forward only. A forward
    holds at most about `micro_tokens` padded tokens.
    """

    def __init__(
        self,
        agent: AgentId,
        folder: Path,
        *,
        serve_dtype: torch.dtype,
        compute: Compute = "float32",
        micro_tokens: int = 4096,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
        device: torch.device | str = "cpu",
        bases: Bases | None = None,
    ) -> None:
        self.agent = agent
        self.folder = folder
        self.compute = compute
        self.micro_tokens = micro_tokens
        self.grad_clip = grad_clip
        self._context = models.context_length(folder)
        self.device = torch.device(device)
        is_adapter = adapters.is_adapter(folder)
        if is_adapter:
            self._train = (bases or Bases()).adapted(folder, dtype=serve_dtype, device=self.device, is_trained=True)
        else:
            self._train = _Net(folder, dtype=torch.float32, device=self.device)
            self._train.model.requires_grad_(True)
        self._masters = self._train.masters()
        self._serve = self._train
        self._head_copy: tuple[Tensor, Tensor | None] | None = None
        self._is_large = sum(p.numel() for p in self._train.model.parameters()) >= GIVES_BACK_FROM
        if serve_dtype != torch.float32 and not is_adapter:
            self._serve = _Net(folder, dtype=serve_dtype, device=self.device)
            self._serve.model.requires_grad_(False)
        self._optimizer = torch.optim.AdamW(
            self._masters.values(), lr=0.0, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
        )

    @property
    def parameters(self) -> int:
        """Number of trained parameters, tied tensors once."""
        return sum(tensor.numel() for tensor in self._masters.values())

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        """Log-probability of each action token at `batch.temperature` under the served weights, 0 elsewhere."""
        return self._spread(batch, self._sampled(batch, self._action_hidden(batch)))

    @torch.no_grad()
    def remember(self, batch: TokenBatch) -> LocalAnchor:
        """The served policy at the action states of this batch."""
        hidden = self._action_hidden(batch)
        weight, bias = self._unembedding()
        return LocalAnchor(
            logprobs=self._spread(batch, self._sampled(batch, hidden)),
            hidden=hidden,
            weight=weight,
            bias=bias,
            softcap=self._serve.softcap,
            ids=batch.ids.clone(),
            mask=batch.mask.clone(),
            temperature=batch.temperature,
        )

    @torch.no_grad()
    def divergence(self, batch: TokenBatch, anchor: Anchor) -> TokenDivergence:
        """Exact KL per action state of the served policy now (new) against the anchor (old), both directions, in nats.

        Raises:
            DataError: the anchor was remembered on another batch.
            NonFiniteError: a NaN.
        """
        old = self._own(anchor, batch)
        hidden = self._action_hidden(batch)
        return self._compare(batch, hidden, old)

    def step(self, batch: AdvantageBatch, objective: Objective, *, lr: float, anchor: Anchor | None) -> StepReport:
        """One AdamW step on the masters; micro-batches add up to the gradient of the whole batch.

        Raises:
            MissingError: the objective needs a divergence and there is no anchor.
            NonFiniteError: loss, gradient or a stepped weight is not finite (the weights may have moved: restore).
        """
        tokens = batch.batch
        old = None
        if objective.needs_kl:
            if anchor is None:
                raise MissingError(f"the objective's penalty for '{self.agent}' needs an anchor; remember the batch first")
            old = self._own(anchor, tokens)
        denominator = objective.denominator(tokens)
        keep_BT = self._keep(batch, objective) if objective.needs_batch else None
        starts, counts = _state_ranges(tokens)
        self._give_back()
        self._optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        diagnostics: Counter[str] = Counter()
        for rows in micro_batches(tokens, max_tokens=self.micro_tokens):
            part = batch.rows(rows)
            mask = part.batch.mask.to(self.device)
            log_new, logprobs_BT = self._forward(part.batch)
            kl_BT = None
            if old is not None:
                places = torch.cat([torch.arange(starts[r], starts[r] + counts[r]) for r in rows])
                with torch.no_grad():
                    log_old = self._old_law(old, old.hidden[places.to(self.device)])
                kl_N = divergence.kl(log_new, log_old)
                kl_BT = torch.zeros(mask.shape, device=self.device).masked_scatter(mask, kl_N).cpu()
            term = objective(
                logprobs_BT,
                part,
                kl_new_old_BT=kl_BT,
                denominator=denominator,
                n_act=tokens.n_act,
                keep_BT=None if keep_BT is None else keep_BT[rows, : mask.shape[1]],
            )
            term.total.backward()
            loss += float(term.total.detach())
            diagnostics.update(term.diagnostics)
        if not math.isfinite(loss):
            raise NonFiniteError(f"loss of '{self.agent}' is {loss}; restore the snapshot")
        norm = float(nn.utils.clip_grad_norm_(self._masters.values(), self.grad_clip))
        if not math.isfinite(norm):
            raise NonFiniteError(f"gradient norm of '{self.agent}' is {norm}; restore the snapshot")
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._round()
        for name, tensor in self._masters.items():
            if not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError(f"weight {name} of '{self.agent}' is not finite after the step; restore the snapshot")
        self._give_back()
        return StepReport(loss=loss, grad_norm=norm, diagnostics=dict(diagnostics))

    def score_gradients(self, batch: AdvantageBatch) -> tuple[Float[Tensor, " P"], Float[Tensor, " P"]]:
        """One backward pass an episode, in the precision of training; see `engine.Learner`."""
        tokens = batch.batch
        size = self.parameters
        gradient, fisher = torch.zeros(size, device=self.device), torch.zeros(size, device=self.device)
        rows_of: dict[str, list[int]] = {}
        for row, name in enumerate(tokens.episode_ids):
            rows_of.setdefault(name, []).append(row)
        for rows in rows_of.values():
            part = batch.rows(rows)
            ids, mask = part.batch.ids.to(self.device), part.batch.mask.to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.compute == "bfloat16"):
                logits_NV = self._train.logits(self._train.hidden(ids[:, :-1])[mask[:, 1:]])
            log_new = divergence.log_law(logits_NV, temperature=tokens.temperature, forbidden=self._train.forbidden)
            self._optimizer.zero_grad(set_to_none=True)
            log_new.gather(1, ids[mask][:, None]).sum().backward()
            score = torch.cat(
                [(torch.zeros_like(t) if t.grad is None else t.grad).flatten() for t in self._masters.values()]
            )
            gradient += float(part.advantages[part.batch.mask][0]) * score
            fisher += score.square()
        self._optimizer.zero_grad(set_to_none=True)
        return (gradient / len(rows_of)).cpu(), (fisher / len(rows_of)).cpu()

    @torch.no_grad()
    def blend(self, towards: Snapshot, origin: Snapshot, scale: float) -> None:
        """Masters at origin + scale * (towards - origin), exact at both ends; moments and step count as at the origin."""
        self._require_names(towards.weights)
        self._require_whole(origin)
        for name, tensor in self._masters.items():
            tensor.copy_(torch.lerp(origin.weights[name], towards.weights[name], scale))
        self._set_moments(origin)
        self._round()

    @torch.no_grad()
    def snapshot(self, *, moments: bool = True, lend: bool = False) -> Snapshot:
        """Copies of masters and moments (or none), and the number of steps; `lend` gives the tensors themselves."""
        kept: dict[str, Tensor] = {}
        steps = 0
        for name, tensor in self._masters.items():
            state = self._optimizer.state.get(tensor)
            if state:
                steps = int(state["step"])
                for kind in ("exp_avg", "exp_avg_sq") if moments else ():
                    kept[f"{kind}.{name}"] = state[kind].detach().to("cpu", copy=not lend)
        weights = {name: tensor.detach().to("cpu", copy=not lend) for name, tensor in self._masters.items()}
        return Snapshot(weights=weights, moments=kept, steps=steps)

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        """Masters, moments and step count bit for bit as they were at the snapshot."""
        self._require_whole(snapshot)
        for name, tensor in self._masters.items():
            tensor.copy_(snapshot.weights[name])
        self._set_moments(snapshot)
        self._round()

    def weights(self) -> Weights:
        """Copies of the served tensors with their checksums."""
        tensors = {name: tensor.clone() for name, tensor in self._serve.held().items()}
        sums = models.checksums(tensors)
        return Weights(tensors=tensors, checksums=sums, fingerprint=models.fingerprint(sums))

    @torch.no_grad()
    def relaid(self, batch: TokenBatch) -> TokenDivergence:
        """Divergence of the served weights from themselves, scored once as always and once row by row, last row first, with
        padding added: what batch layout alone moves (ALGORITHMS 2.4, noise floor)."""
        usual = self.remember(batch)
        again = self._action_hidden(batch, layout=[[row] for row in reversed(range(batch.n_rows))], padding=3)
        return self._compare(batch, again, usual)

    # -- inside

    def _forward(self, batch: TokenBatch) -> tuple[Float[Tensor, "N V"], Float[Tensor, "B T"]]:
        """Log-laws of the masters at the action states, and the sampled tokens' log-probabilities; with gradient."""
        ids, mask = batch.ids.to(self.device), batch.mask.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.compute == "bfloat16"):
            logits_NV = self._train.logits(self._train.hidden(ids[:, :-1])[mask[:, 1:]])
        log_new = divergence.log_law(logits_NV, temperature=batch.temperature, forbidden=self._train.forbidden)
        sampled_N = log_new.gather(1, ids[mask][:, None])[:, 0]
        # Losses are made beside the batch, on the CPU.
        return log_new, torch.zeros(mask.shape, device=self.device).masked_scatter(mask, sampled_N).cpu()

    @torch.no_grad()
    def _keep(self, batch: AdvantageBatch, objective: Objective) -> Bool[Tensor, "B T"]:
        """What a mask over the whole optimiser batch keeps: one more forward, in the step's own micro-batches."""
        logprobs_BT = torch.zeros(batch.batch.mask.shape)
        for rows in micro_batches(batch.batch, max_tokens=self.micro_tokens):
            _, part_BT = self._forward(batch.batch.rows(rows))
            logprobs_BT[rows, : part_BT.shape[1]] = part_BT
        return objective.keep(logprobs_BT, batch)

    def _unembedding(self) -> tuple[Tensor, Tensor | None]:
        """The head as served now: a copy that the anchors of one policy share; of a frozen base the head itself."""
        if self._head_copy is None:
            weight, bias = self._serve.head.weight.detach(), cast("Tensor | None", self._serve.head.bias)
            if self._serve.adapter is None:
                weight, bias = weight.clone(), None if bias is None else bias.detach().clone()
            self._head_copy = (weight, bias)
        return self._head_copy

    def _action_hidden(
        self, batch: TokenBatch, *, layout: Sequence[list[int]] | None = None, padding: int = 0
    ) -> Float[Tensor, "N D"]:
        """Hidden state before each action token, in row order, whatever layout it was computed in."""
        starts, counts = _state_ranges(batch)
        out: Tensor | None = None
        for rows in micro_batches(batch, max_tokens=self.micro_tokens) if layout is None else layout:
            part = batch.rows(rows)
            # Learned positions end with the context.
            more = min(padding, max(0, self._context - part.ids.shape[1]))
            ids = functional.pad(part.ids, (0, more)).to(self.device)
            mask = functional.pad(part.mask, (0, more)).to(self.device)
            hidden = self._serve.hidden(ids[:, :-1])[mask[:, 1:]]
            if out is None:
                out = hidden.new_empty(batch.n_act, hidden.shape[1])
            out[torch.cat([torch.arange(starts[r], starts[r] + counts[r]) for r in rows]).to(self.device)] = hidden
        assert out is not None
        return out

    def _sampled(self, batch: TokenBatch, hidden: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
        ids = batch.ids[batch.mask].to(self.device)
        found = [
            self._serve.law(hidden[at], temperature=batch.temperature).gather(1, ids[at][:, None])[:, 0]
            for at in _chunks(len(ids), self._serve.forbidden.numel())
        ]
        return torch.cat(found).cpu()

    def _spread(self, batch: TokenBatch, values: Float[Tensor, " N"]) -> Float[Tensor, "B T"]:
        return torch.zeros(batch.mask.shape).masked_scatter(batch.mask, values)

    def _old_law(self, old: LocalAnchor, hidden: Float[Tensor, "S D"]) -> Float[Tensor, "S V"]:
        logits = _unembed(hidden, old.weight, old.bias, old.softcap)
        return divergence.log_law(logits, temperature=old.temperature, forbidden=self._serve.forbidden)

    def _compare(self, batch: TokenBatch, hidden: Float[Tensor, "N D"], old: LocalAnchor) -> TokenDivergence:
        new_old: list[Tensor] = []
        old_new: list[Tensor] = []
        for at in _chunks(batch.n_act, self._serve.forbidden.numel()):
            log_new = self._serve.law(hidden[at], temperature=batch.temperature)
            one, other = divergence.exact(log_new, self._old_law(old, old.hidden[at]))
            new_old.append(one.cpu())
            old_new.append(other.cpu())
        row, position = batch.mask.nonzero(as_tuple=True)
        return TokenDivergence(kl_new_old=torch.cat(new_old), kl_old_new=torch.cat(old_new), row=row, position=position)

    def _own(self, anchor: Anchor, batch: TokenBatch) -> LocalAnchor:
        if not isinstance(anchor, LocalAnchor):
            raise DataError(f"the anchor for '{self.agent}' comes from another engine ({type(anchor).__name__})")
        anchor.require(batch)
        return anchor

    def _require_names(self, weights: Mapping[str, Tensor]) -> None:
        if weights.keys() != self._masters.keys():
            odd = sorted(weights.keys() ^ self._masters.keys())
            raise MissingError(f"snapshot does not fit '{self.agent}': {odd[:4]} are on one side only")

    def _require_whole(self, snapshot: Snapshot) -> None:
        self._require_names(snapshot.weights)
        kinds = ("exp_avg", "exp_avg_sq") if snapshot.steps else ()
        needed = {f"{kind}.{name}" for kind in kinds for name in self._masters}
        if set(snapshot.moments) != needed:
            raise MissingError(
                f"snapshot of '{self.agent}' after {snapshot.steps} steps holds {len(snapshot.moments)} moments; "
                f"{len(needed)} are needed"
            )

    def _set_moments(self, snapshot: Snapshot) -> None:
        self._optimizer.state.clear()
        for name, tensor in self._masters.items():
            if snapshot.steps:
                self._optimizer.state[tensor] = {
                    "step": torch.tensor(float(snapshot.steps), device=self.device),
                    "exp_avg": snapshot.moments[f"exp_avg.{name}"].to(self.device, copy=True),
                    "exp_avg_sq": snapshot.moments[f"exp_avg_sq.{name}"].to(self.device, copy=True),
                }

    def _give_back(self) -> None:
        """Free pages of the heap go back to the system (glibc's; elsewhere nothing happens)."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if self._is_large and sys.platform == "linux" else None
        if trim is not None:
            trim(0)

    @torch.no_grad()
    def _round(self) -> None:
        self._head_copy = None
        if self._serve is not self._train:
            for name, tensor in self._serve.model.named_parameters():
                tensor.copy_(self._masters[name])


def _state_ranges(batch: TokenBatch) -> tuple[list[int], list[int]]:
    """Of each row: where its action states begin among those of the batch, and how many they are."""
    counts = batch.mask.sum(dim=1)
    return (counts.cumsum(0) - counts).tolist(), counts.tolist()


def _chunks(states: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, CHUNK // vocabulary)
    for start in range(0, states, size):
        yield slice(start, min(states, start + size))


# ---- choices and checks ----------------------------------------------------------------------------------------


def noise_floor(learner: LocalLearner, batch: TokenBatch) -> tuple[float, float]:
    """(q99 over states, mean over messages) of d, in nats, for the same weights in two batch layouts (ALGORITHMS 2.4).

    No radius below its floor means anything.
    """
    moved = learner.relaid(batch)
    d = moved.of("max")
    means, _ = divergence.message_values(d, moved.row)
    return quantile_point(d, alpha=0.01), float(means.mean())


def share_changed(before: Weights, after: Weights) -> float:
    """Share of served weights that differ between two publications of one model."""
    changed = sum(int((before.tensors[name] != tensor).sum()) for name, tensor in after.tensors.items())
    return changed / sum(tensor.numel() for tensor in after.tensors.values())


def device_of(name: str, *, key: str = "agents.device") -> torch.device:
    """The device that the config names under `key`; `auto` is the GPU where torch sees one, else the CPU.

    Raises:
        ModelError: torch has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        seen = ", ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
        # torch lists every backend that it was built with, or without.
        reason = " ".join(str(error).split())[:100]
        raise ModelError(f"{key} = '{name}' cannot be used ({reason}); torch sees {seen}") from error
    if device.type == "meta":
        raise ModelError(f"{key} = 'meta' holds no numbers; name cpu or a GPU")
    return device


def auto_dtype(parameters: int, *, memory: int | None = None, device: torch.device | str = "cpu") -> torch.dtype:
    """Serving dtype where the config says auto: float32 below 1e9 parameters where the memory allows it, else bfloat16.

    `parameters` is one agent's or a sum over the agents held together; `memory` is in bytes (default: the device's).
    float32 needs up to 28 bytes a parameter: masters, gradient and two moments (16), two served slots and the start (12).
    """
    if memory is None and torch.device(device).type == "cuda":
        memory = int(torch.cuda.get_device_properties(device).total_memory)
    if memory is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return torch.float32 if parameters < 1_000_000_000 and 28 * parameters <= memory else torch.bfloat16


def auto_compute(parameters: int, device: torch.device | str = "cpu") -> Compute:
    """Precision of the training forward where the config says auto: bfloat16 from 20M parameters on a GPU, or on a CPU with
    avx512_bf16 or amx_bf16, else float32 (emulated bf16 products are slower than fp32 ones)."""
    if torch.device(device).type == "cpu":
        info = Path("/proc/cpuinfo")
        flags = set(info.read_text(encoding="utf-8").split()) if info.is_file() else set[str]()
        pays = bool(flags & {"avx512_bf16", "amx_bf16"})
    else:
        pays = torch.device(device).type == "cuda" and torch.cuda.is_bf16_supported()
    return "bfloat16" if parameters >= BF16_PAYS_FROM and pays else "float32"
