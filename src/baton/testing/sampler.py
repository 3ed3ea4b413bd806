"""The contract of a sampler: draws, addresses, publications, slots, cancellation.

Axes: V vocabulary.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from baton.core.keyed import Key, key, uniforms
from baton.engines.engine import Completion, CoupledRequest, Request, Sampler, ScoreRequest
from baton.errors import BatonError, PublishError
from baton.testing.claims import Law, require
from baton.types import AgentId, Slot, TokenIds, Weights


def check_sampler(
    make: Callable[[], Sampler],
    *,
    agent: AgentId,
    weights: Weights,
    other: Weights,
    law: Law,
    prompts: Sequence[TokenIds],
    end_ids: Collection[int] = (),
    max_new_tokens: int = 4,
    temperatures: Sequence[float] = (0.6, 1.0, 1.4),
    tolerance: float = 1e-5,
) -> None:
    """A sampler draws from the law of the weights in the slot, at the request's own uniforms, and nothing
    else matters.

    Catches: draws that depend on call order, timing or companions; log-probabilities of another law or
    temperature; wrong lengths, versions and finish reasons; a publication without effect, a corrupted tensor,
    a stale copy; `score` that disagrees with `submit`; slots that mix; a swap that is none (ALGORITHMS 5.4,
    5.6; T11).

    Args:
        make: a new sampler that knows the agent and has nothing published.
        weights, other: two served states whose laws differ visibly at the prompts.
        law: the independent judge.
        prompts: at least three different prompts.
        end_ids: the ids that end a message.
        tolerance: largest accepted difference in nats between the engine's log-probabilities and the law's.
    """
    require(len({tuple(p) for p in prompts}) >= 3, "the sampler check needs at least three different prompts")
    stage = _Stage(
        agent,
        weights,
        other,
        law,
        prompts,
        frozenset(end_ids),
        max_new_tokens,
        tuple(temperatures),
        tolerance,
    )
    for prompt in prompts:
        here, there = (stage.law_of(held, tuple(prompt), 1.0) for held in (weights, other))
        # A forbidden token is -inf in both.
        moved = torch.where(here == there, torch.zeros_like(here), here - there).abs().max()
        require(
            float(moved) > 20 * tolerance,
            f"the two weights differ by {float(moved):.3g} nats at a prompt: too little to tell a publication from none",
        )
    checks: Sequence[Callable[[Sampler, _Stage], Awaitable[None]]] = (
        _draws_are_the_law,
        _draws_have_an_address,
        _publication_lands,
        _slots_are_apart,
        _coupled_messages,
        _cancel_ends,
    )
    for check in checks:
        asyncio.run(_run(check, make, stage))


async def _run(check: Callable[[Sampler, _Stage], Awaitable[None]], make: Callable[[], Sampler], stage: _Stage) -> None:
    await check(make(), stage)


@dataclasses.dataclass(frozen=True)
class _Stage:
    """What every check of a sampler needs."""

    agent: AgentId
    weights: Weights
    other: Weights
    law: Law
    prompts: Sequence[TokenIds]
    end_ids: frozenset[int]
    max_new_tokens: int
    temperatures: Sequence[float]
    tolerance: float

    def requests(self, *, temperature: float = 1.0, slot: Slot = "promoted", draws: int = 3) -> list[Request]:
        return [
            Request(
                id=f"{slot}-{temperature}-{p}-{draw}",
                agent=self.agent,
                slot=slot,
                prompt_ids=tuple(prompt),
                max_new_tokens=self.max_new_tokens,
                temperature=temperature,
                key=key("contract", p, draw),
            )
            for p, prompt in enumerate(self.prompts)
            for draw in range(draws)
        ]

    def law_of(self, weights: Weights, ids: TokenIds, temperature: float) -> Tensor:
        return self.law(weights, ids, temperature).detach().double()

    async def drawn(self, sampler: Sampler, requests: Sequence[Request], *, pause: bool = False) -> dict[str, Completion]:
        heard: dict[str, Completion] = {}
        async for completion in sampler.submit(requests):
            require(completion.id not in heard, f"request '{completion.id}' was answered twice")
            heard[completion.id] = completion
            if pause:
                await asyncio.sleep(0.001)
        missing = [request.id for request in requests if request.id not in heard]
        require(
            not missing,
            f"submit ended without answering {len(missing)} of {len(requests)} requests, first {missing[:1]}",
        )
        require(len(heard) == len(requests), "submit answered a request that was not in it")
        return heard

    async def serves(self, sampler: Sampler, slot: Slot, weights: Weights, version: int, when: str) -> None:
        """Both verbs use these weights in this slot, and what they draw carries the version."""
        requests = self.requests(slot=slot, draws=1)
        heard = await self.drawn(sampler, requests)
        for request in requests:
            completion = heard[request.id]
            require(
                completion.version == version,
                f"{when}: slot '{slot}' stamps version {completion.version}, published was {version}",
            )
            self.follows(request, completion, weights, f"{when}: slot '{slot}'")
        scores = await sampler.score([self.score_of(r, heard[r.id]) for r in requests])
        for request, score in zip(requests, scores, strict=True):
            gap = _gap(score, heard[request.id].logprobs)
            require(
                gap <= self.tolerance,
                f"{when}: slot '{slot}' scores with other weights than it draws with (gap {gap:.3g} nats)",
            )

    def score_of(self, request: Request, completion: Completion) -> ScoreRequest:
        return ScoreRequest(
            agent=request.agent,
            slot=request.slot,
            prompt_ids=request.prompt_ids,
            ids=completion.ids,
            temperature=request.temperature,
        )

    def follows(self, request: Request, completion: Completion, weights: Weights, who: str) -> None:
        """The completion is the inverse CDF of these weights' law at the request's uniforms, with its log-
        probabilities."""
        ids, logprobs = completion.ids, completion.logprobs
        require(len(ids) == len(logprobs), f"{who} gave {len(ids)} ids and {len(logprobs)} log-probabilities")
        require(
            1 <= len(ids) <= request.max_new_tokens,
            f"{who} gave {len(ids)} ids, the request asked for 1 to {request.max_new_tokens}",
        )
        is_ended = ids[-1] in self.end_ids
        require(not any(i in self.end_ids for i in ids[:-1]), f"{who} went on after an end id")
        require(
            is_ended or len(ids) == request.max_new_tokens,
            f"{who} stopped after {len(ids)} of {request.max_new_tokens} ids without an end id",
        )
        require(
            completion.finish_reason == ("stop" if is_ended else "length"),
            f"{who} says '{completion.finish_reason}' about ids that {'end' if is_ended else 'do not end'} with an end id",
        )
        draws = uniforms([request.key], request.max_new_tokens)[0]
        for i, token in enumerate(ids):
            log_p_V = self.law_of(weights, (*request.prompt_ids, *ids[:i]), request.temperature)
            require(0 <= token < log_p_V.numel(), f"{who} gave id {token} of a vocabulary of {log_p_V.numel()}")
            gap = abs(float(log_p_V[token]) - logprobs[i])
            require(
                gap <= self.tolerance,
                f"{who} reports log-probability {logprobs[i]:.6g} for a token that has "
                f"{float(log_p_V[token]):.6g} under the law "
                f"at temperature {request.temperature}",
            )
            upper = log_p_V.exp().cumsum(0).numpy()
            below = float(upper[token - 1]) if token else 0.0
            require(
                below - self.tolerance <= draws[i] <= float(upper[token]) + self.tolerance,
                f"{who} drew id {token} at uniform {draws[i]:.6g}; the inverse CDF of the law is id "
                f"{int(np.searchsorted(upper, draws[i], side='right'))}",
            )


def _gap(left: Sequence[float], right: Sequence[float]) -> float:
    if len(left) != len(right):
        return float("inf")
    return max((abs(a - b) for a, b in zip(left, right, strict=True)), default=0.0)


async def _draws_are_the_law(sampler: Sampler, stage: _Stage) -> None:
    await sampler.publish(stage.agent, "promoted", stage.weights, 1)
    for temperature in stage.temperatures:
        requests = stage.requests(temperature=temperature)
        heard = await stage.drawn(sampler, requests)
        for request in requests:
            stage.follows(request, heard[request.id], stage.weights, f"submit at temperature {temperature}")
        scores = await sampler.score([stage.score_of(r, heard[r.id]) for r in requests])
        require(len(scores) == len(requests), f"score gave {len(scores)} answers to {len(requests)} requests")
        for request, score in zip(requests, scores, strict=True):
            gap = _gap(score, heard[request.id].logprobs)
            require(
                gap <= stage.tolerance,
                f"score disagrees with submit about the same tokens at temperature {temperature} (gap {gap:.3g} nats)",
            )
        backwards = await sampler.score([stage.score_of(r, heard[r.id]) for r in reversed(requests)])
        for score, again in zip(reversed(scores), backwards, strict=True):
            require(_gap(score, again) <= stage.tolerance, "scores are not in the order of their requests")


async def _draws_have_an_address(sampler: Sampler, stage: _Stage) -> None:
    await sampler.publish(stage.agent, "promoted", stage.weights, 1)
    requests = stage.requests()
    first = await stage.drawn(sampler, requests)

    async def same(requests: Sequence[Request], sentence: str, *, exactly: bool) -> None:
        again = await stage.drawn(sampler, requests)
        for request in requests:
            one, two = first[request.id], again[request.id]
            is_same = one.ids == two.ids and _gap(one.logprobs, two.logprobs) <= (0.0 if exactly else stage.tolerance)
            require(is_same, f"{sentence}: request '{request.id}' drew {one.ids} and then {two.ids}")

    await same(requests, "the same submit drew something else the second time", exactly=True)
    await same(list(reversed(requests)), "draws depend on the order of the requests", exactly=False)
    for request in requests:
        await same([request], "draws depend on the other requests of the submit", exactly=False)

    # Two submits in flight, read at different speeds: timing must not show.
    slow, fast = await asyncio.gather(stage.drawn(sampler, requests, pause=True), stage.drawn(sampler, requests[::-1]))
    for request in requests:
        one, two, three = first[request.id], slow[request.id], fast[request.id]
        require(
            one.ids == two.ids == three.ids
            and one.logprobs == two.logprobs
            and _gap(one.logprobs, three.logprobs) <= stage.tolerance,
            f"draws depend on timing: request '{request.id}' drew {one.ids}, {two.ids} (read slowly) and "
            f"{three.ids} (beside it)",
        )
    other_keys = [dataclasses.replace(r, key=Key(key("contract", "else", r.id))) for r in requests]
    moved = await stage.drawn(sampler, other_keys)
    require(any(moved[r.id].ids != first[r.id].ids for r in requests), "draws do not depend on the request's key")


async def _publication_lands(sampler: Sampler, stage: _Stage) -> None:
    proof = await sampler.publish(stage.agent, "promoted", stage.weights, 1)
    require(
        (proof.agent, proof.slot, proof.version) == (stage.agent, "promoted", 1),
        f"the proof of '{stage.agent}' promoted version 1 names '{proof.agent}' {proof.slot} version {proof.version}",
    )
    require(
        proof.fingerprint == stage.weights.fingerprint,
        "the fingerprint of what landed is not that of what was sent",
    )
    await stage.serves(sampler, "promoted", stage.weights, 1, "after a publication")

    # Same prompts again under other weights: a prefix cache or a laid-up law of the old ones would show.
    proof = await sampler.publish(stage.agent, "promoted", stage.other, 2)
    require(
        proof.fingerprint == stage.other.fingerprint,
        "the second publication has the fingerprint of something else",
    )
    await stage.serves(sampler, "promoted", stage.other, 2, "after a second publication into the same slot")

    name = min(stage.weights.tensors)
    torn = stage.weights.tensors[name].clone()
    torn.view(-1)[0] += 1.0
    corrupted = dataclasses.replace(stage.weights, tensors={**stage.weights.tensors, name: torn})
    try:
        proof = await sampler.publish(stage.agent, "candidate", corrupted, 3)
    except PublishError:
        pass
    else:
        require(
            proof.fingerprint != stage.weights.fingerprint,
            f"tensor '{name}' was corrupted on the way and the proof says that it landed as sent",
        )
    short = {name: tensor for name, tensor in stage.weights.tensors.items() if name != min(stage.weights.tensors)}
    try:
        proof = await sampler.publish(stage.agent, "candidate", dataclasses.replace(stage.weights, tensors=short), 4)
    except PublishError:
        pass
    else:
        require(
            proof.fingerprint != stage.weights.fingerprint,
            f"tensor '{name}' was missing and the proof says that all landed",
        )
    await stage.serves(sampler, "promoted", stage.other, 2, "after failed publications into the other slot")

    mine = {name: tensor.clone() for name, tensor in stage.weights.tensors.items()}
    await sampler.publish(stage.agent, "promoted", dataclasses.replace(stage.weights, tensors=mine), 5)
    for tensor in mine.values():
        tensor.zero_()
    await stage.serves(sampler, "promoted", stage.weights, 5, "after the sender changed its own tensors")


async def _slots_are_apart(sampler: Sampler, stage: _Stage) -> None:
    await sampler.publish(stage.agent, "promoted", stage.weights, 1)
    for slot in ("candidate", "start"):
        try:
            await stage.drawn(sampler, stage.requests(slot=slot, draws=1))
        except BatonError:
            continue
        raise AssertionError(f"slot '{slot}' answers although nothing was published into it")
    await sampler.publish(stage.agent, "start", stage.weights, 1)
    await sampler.publish(stage.agent, "candidate", stage.other, 2)
    await stage.serves(sampler, "promoted", stage.weights, 1, "with a candidate beside it")
    await stage.serves(sampler, "candidate", stage.other, 2, "with a promoted beside it")
    await sampler.swap(stage.agent)
    await stage.serves(sampler, "promoted", stage.other, 2, "after a swap")
    await stage.serves(sampler, "candidate", stage.weights, 1, "after a swap")
    await stage.serves(sampler, "start", stage.weights, 1, "after a swap")
    # A promoted agent must not be reached by the next candidate.
    await sampler.publish(stage.agent, "candidate", stage.weights, 3)
    await stage.serves(sampler, "promoted", stage.other, 2, "after a publication into the swapped-out slot")


COUPLED_DRAWS = 200
"""Messages a prompt whose first tokens are counted."""


async def _coupled_messages(sampler: Sampler, stage: _Stage) -> None:
    """`couple`: the same weights say the same; other weights speak their own law, and part from what was said as often as
    the total variation of the two laws (ALGORITHMS 3.6). Counts are held within five standard deviations."""
    await sampler.publish(stage.agent, "promoted", stage.weights, 1)
    await sampler.publish(stage.agent, "start", stage.weights, 1)
    await sampler.publish(stage.agent, "candidate", stage.other, 2)
    requests = [dataclasses.replace(r, id=f"{r.id}-coupled") for r in stage.requests(draws=COUPLED_DRAWS)]
    said = await stage.drawn(sampler, requests)

    async def beside(slot: Slot, order: Sequence[Request]) -> dict[str, Completion]:
        asked = [
            CoupledRequest(request=dataclasses.replace(r, slot=slot), beside="promoted", ids=said[r.id].ids) for r in order
        ]
        heard = await sampler.couple(asked)
        require([c.id for c in heard] == [r.id for r in order], "couple does not answer its requests in their order")
        return {c.id: c for c in heard}

    twins = await beside("start", requests)
    for r in requests:
        one, two = said[r.id], twins[r.id]
        require(one.ids == two.ids, f"coupled with the same weights, request '{r.id}' says {two.ids} beside {one.ids}")
        require(_gap(one.logprobs, two.logprobs) <= stage.tolerance, "couple reports log-probabilities of another law")
    heard = await beside("candidate", requests)
    backwards = await beside("candidate", list(reversed(requests)))
    for r in requests:
        completion = heard[r.id]
        require(backwards[r.id].ids == completion.ids, "coupled draws depend on the order of the requests")
        require(completion.version == 2, f"couple stamps version {completion.version}, published was 2")
        for i, token in enumerate(completion.ids):
            log_q_V = stage.law_of(stage.other, (*r.prompt_ids, *completion.ids[:i]), r.temperature)
            gap = abs(float(log_q_V[token]) - completion.logprobs[i])
            require(gap <= stage.tolerance, f"couple reports a log-probability {gap:.3g} nats from the law of its slot")
        ends = completion.ids[-1] in stage.end_ids
        require(ends or len(completion.ids) == r.max_new_tokens, "a coupled message is too short")
        require(not any(t in stage.end_ids for t in completion.ids[:-1]), "a coupled message goes on after an end id")
    for p, prompt in enumerate(stage.prompts):
        own = requests[p * COUPLED_DRAWS : (p + 1) * COUPLED_DRAWS]
        law_p, law_q = (stage.law_of(held, tuple(prompt), 1.0).exp() for held in (stage.weights, stage.other))
        tv = 0.5 * float((law_p - law_q).abs().sum())
        parted = sum(heard[r.id].ids[0] != said[r.id].ids[0] for r in own) / len(own)
        require(
            abs(parted - tv) <= 5.0 * (tv * (1.0 - tv) / len(own)) ** 0.5 + 1e-9,
            f"coupled first tokens differ in {parted:.3f} of {len(own)} messages, the laws ask for {tv:.3f}",
        )
        token = int((law_q - law_p).abs().argmax())
        share, q = sum(heard[r.id].ids[0] == token for r in own) / len(own), float(law_q[token])
        require(
            abs(share - q) <= 5.0 * (q * (1.0 - q) / len(own)) ** 0.5 + 1e-9,
            f"coupled, id {token} comes first in {share:.3f} of {len(own)} messages; its slot's law gives it {q:.3f}",
        )


async def _cancel_ends(sampler: Sampler, stage: _Stage) -> None:
    await sampler.publish(stage.agent, "promoted", stage.weights, 1)
    requests = stage.requests()
    first = await stage.drawn(sampler, requests)
    await sampler.cancel(["a request that nobody made"])
    await sampler.cancel([requests[0].id])
    again = await stage.drawn(sampler, requests)
    require(again == first, "cancelling finished requests changed a later submit")
    heard: dict[str, Completion] = {}
    stream: AsyncIterator[Completion] = sampler.submit(requests)
    async for completion in stream:
        if not heard:
            waiting = [r.id for r in requests if r.id != completion.id]
            await sampler.cancel([waiting[-1]])
        heard[completion.id] = completion
    for request in requests:
        if request.id in heard:
            require(
                heard[request.id].ids == first[request.id].ids,
                "cancelling one request changed another one's draws",
            )
    require(len(heard) >= len(requests) - 1, "cancelling one request dropped others")
    again = await stage.drawn(sampler, requests)
    require(again == first, "a cancelled request stays cancelled when it is asked again")
