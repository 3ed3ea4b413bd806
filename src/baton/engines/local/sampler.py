"""The sampler of the torch engine: slots of served weights, and who is sampling from them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from baton.engines import adapters, mixture, models
from baton.engines.chat import ChatCodec, codec_of
from baton.engines.engine import Completion, CoupledRequest, Request, ScoreRequest, completed
from baton.engines.local.decoding import CoupledRow, Row, decode, decode_batches, decode_coupled
from baton.engines.local.net import Bases, Mixture, Net
from baton.errors import DataError, MissingError, ModelError, PublishError, UnsupportedError
from baton.types import AgentId, PublishProof, Slot, Weights

Rounding = Literal["nearest"]

Groups = dict[tuple[AgentId, Slot, float], list[int]]
"""Places of requests by (agent, slot, temperature): those of one group follow one law and can share a decode batch."""


@dataclass(kw_only=True)
class _Held:
    """Weights in a slot: the network, the version that it was published as, and how many submits sample from it now."""

    net: Net | Mixture
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
    Adapters of one base share it (`bases`, the crew's). No processor of a model's generation config is applied: the law is
    softmax(logits / T) over the tokenizer's vocabulary, and its log-probability is what is recorded.
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
            net: Net | Mixture
            if adapters.is_adapter(folder):
                net = bases.adapted(folder, dtype=dtype, device=device, is_trained=False)
            elif mixture.is_mixture(folder):
                net = Mixture(folder, dtype=dtype, device=device)
            else:
                net = Net(folder, dtype=dtype, device=device)
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
        return self._completions(requests, *self._rows(requests))

    async def _completions(
        self, requests: Sequence[Request], rows: Sequence[Row], groups: Groups
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
                for batch in decode_batches([rows[i] for i in members], self.batch_size):
                    chosen = [members[i] for i in batch]
                    if all(requests[i].id in self._cancelled for i in chosen):
                        continue
                    with torch.inference_mode():
                        said = decode(one.net, [rows[i] for i in chosen], temperature=temperature, end_ids=end_ids)
                    for i, (ids, logprobs) in zip(chosen, said, strict=True):
                        ready[i] = completed(requests[i], ids, logprobs, version=one.version, end_ids=end_ids)
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
        rows, groups = self._rows(requests)
        scores: list[tuple[float, ...]] = [()] * len(requests)
        for (agent, slot, temperature), members in groups.items():
            net = self._held(agent, slot).net
            for batch in decode_batches([rows[i] for i in members], self.batch_size):
                with torch.inference_mode():
                    said = decode(net, [rows[members[i]] for i in batch], temperature=temperature, end_ids=())
                for i, (_, logprobs) in zip(batch, said, strict=True):
                    scores[members[i]] = logprobs
        return scores

    async def couple(self, requests: Sequence[CoupledRequest]) -> Sequence[Completion]:
        """Messages beside others of the same prompts, in order: of their own slot's law, as near to the others as can be."""
        self._rows([one.request for one in requests])
        groups: dict[tuple[AgentId, Slot, Slot, float], list[int]] = {}
        for i, one in enumerate(requests):
            self._held(one.request.agent, one.beside)
            place = (one.request.agent, one.request.slot, one.beside, one.request.temperature)
            groups.setdefault(place, []).append(i)
        heard: dict[int, Completion] = {}
        for (agent, slot, beside, temperature), members in groups.items():
            own, end_ids = self._held(agent, slot), self._seat(agent).codec.end_ids
            asked = [requests[i].request for i in members]
            rows = [
                CoupledRow(prompt=r.prompt_ids, limit=r.max_new_tokens, key=r.key, said=requests[i].ids)
                for i, r in zip(members, asked, strict=True)
            ]
            for batch in decode_batches(rows, self.batch_size):
                with torch.inference_mode():
                    said = decode_coupled(
                        own.net,
                        self._held(agent, beside).net,
                        [rows[i] for i in batch],
                        temperature=temperature,
                        end_ids=end_ids,
                    )
                for i, (ids, logprobs) in zip(batch, said, strict=True):
                    heard[members[i]] = completed(asked[i], ids, logprobs, version=own.version, end_ids=end_ids)
        return [heard[i] for i in range(len(requests))]

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

    def _rows(self, requests: Sequence[Request] | Sequence[ScoreRequest]) -> tuple[list[Row], Groups]:
        """What to decode for each request, once all of them are known to fit."""
        rows: list[Row] = []
        groups: Groups = {}
        for index, request in enumerate(requests):
            self._held(request.agent, request.slot)
            if isinstance(request, Request):
                what, row = request.id, Row(prompt=request.prompt_ids, limit=request.max_new_tokens, key=request.key)
            else:
                what, row = f"score {index}", Row(prompt=request.prompt_ids, limit=len(request.ids), forced=request.ids)
            self._require_fit(request.agent, what, prompt=len(row.prompt), answer=row.limit)
            rows.append(row)
            groups.setdefault((request.agent, request.slot, request.temperature), []).append(index)
        return rows, groups

    def _require_fit(self, agent: AgentId, what: str, *, prompt: int, answer: int) -> None:
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
