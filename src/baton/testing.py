"""The contracts as code: run these against your own env, protocol, codec, sampler or learner before baton does.

Each suite raises AssertionError with one sentence that says what is wrong, and returns nothing when all is
well. Nothing here knows an engine: the caller brings prompts, batches and a `Law`, an independent computation
of the next-token law, so that an engine is never its own judge.

Axes: B rows, T tokens, N token states, V vocabulary.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from baton.core.keyed import Key, choice, key, uniforms
from baton.core.losses import REASONING, Dis, Likelihood, Objective
from baton.engines.engine import Anchor, Codec, Completion, Learner, Request, Sampler, ScoreRequest
from baton.envs.check import check_env
from baton.errors import BatonError, MissingError, NonFiniteError, PublishError
from baton.protocols import TeamProtocol, heard
from baton.types import (
    AdvantageBatch,
    AgentId,
    Message,
    Slot,
    Snapshot,
    Task,
    TokenBatch,
    TokenIds,
    Turn,
    Weights,
)

__all__ = ["Law", "check_codec", "check_env", "check_learner", "check_protocol", "check_sampler"]

Law = Callable[[Weights, TokenIds, float], Tensor]
"""Log-probabilities [V], in nats, of the token after these ids, under these served weights at this
temperature. Computed apart from the engine under test: a plain forward pass, a table looked up by hand."""


def _require(claim: bool, sentence: str) -> None:
    if not claim:
        raise AssertionError(sentence)


# ---- protocol ----------------------------------------------------------------------------------------------


def check_protocol(
    protocol: TeamProtocol,
    *,
    agents: Sequence[AgentId],
    tasks: Sequence[Task],
    says: Sequence[str],
    episodes: int = 60,
    is_append_only: bool = True,
) -> None:
    """A protocol is a pure function of the task and the turns, ends in time, and shows each seat what it may see.

    Catches: a rule with a memory or a die of its own; seats that do not exist; more turns than `own_turns` (the gate's
    probe episodes and the bounds rest on it), also an episode without end; simultaneous speakers that hear each other;
    teammates' text as an agent's own or the reverse; sampled ids that are lost; another seat's view; a conversation that
    is not append-only although it was promised; an answer that nobody gave (ALGORITHMS 2.1, 2.7).

    Args:
        agents: names in the order of the seats that the protocol was built for.
        tasks: tasks to play, best with a view for each seat.
        says: what agents say here. What the protocol reacts to belongs among it (`@name`); each text is drawn by key and
            then numbered, so that no two messages of an episode are equal.
        is_append_only: an agent's conversation always begins with its last one and its own answer to that, which makes
            its turns one row for training; without the promise each turn may be a row of its own.
    """
    _require(protocol.own_turns >= 1, f"own_turns is {protocol.own_turns}: an agent must be able to speak once")
    for seat in range(len(agents)):
        _require(bool(protocol.default_system(seat).strip()), f"seat {seat} has no default system prompt")
    for n in range(episodes):
        stage = _Play(protocol, tuple(agents), tasks[n % len(tasks)], is_append_only)
        try:
            stage.play([f"{says[choice(key('contract', n, turn), len(says))]} #{turn}" for turn in range(stage.most)], n)
        except BatonError as error:
            raise AssertionError(f"episode {n} failed on task {stage.task.id}: {error}") from error


@dataclasses.dataclass(frozen=True)
class _Play:
    """One episode of a protocol, watched."""

    protocol: TeamProtocol
    agents: tuple[AgentId, ...]
    task: Task
    is_append_only: bool

    @property
    def most(self) -> int:
        """The most messages that an episode can have."""
        return len(self.agents) * self.protocol.own_turns

    def play(self, texts: Sequence[str], n: int) -> None:
        protocol, rotation = self.protocol, n % len(self.agents) if self.protocol.rotates else 0
        turns: list[Turn] = []
        waves: list[tuple[int, tuple[int, ...]]] = []
        spoken: dict[int, tuple[Message, ...]] = {}
        while due := protocol.due(self.task, turns, rotation):
            waves.append((len(turns), due))
            wave: list[Turn] = []
            # `rollout` asks seats in this order, and appends what they said once all of them have spoken.
            for seat in sorted(due):
                _require(0 <= seat < len(self.agents), f"due names seat {seat} of {len(self.agents)}")
                own = sum(turn.seat == seat for turn in (*turns, *wave))
                _require(own < protocol.own_turns, f"'{self.agents[seat]}' is due again after {own} of {own} own turns")
                shown = self.conversation(turns, waves, seat)
                before = spoken.get(seat, ())
                _require(
                    not self.is_append_only or shown[: len(before)] == before,
                    f"'{self.agents[seat]}' is shown, on its turn {own + 1}, a conversation that does not begin with its "
                    "earlier one and its own answer: it is not append-only",
                )
                at = len(turns) + len(wave)
                said = Turn(
                    kind="action",
                    agent=self.agents[seat],
                    seat=seat,
                    text=texts[at],
                    prompt_ids=(0,),
                    ids=(at + 1,),
                    logprobs=(-1.0,),
                    versions=(0,),
                )
                spoken[seat] = (*shown, Message(role="assistant", content=said.text, ids=said.ids))
                wave.append(said)
            turns += wave
        _require(bool(turns), f"nobody is due on task {self.task.id}: an episode needs a message")
        # Asked again, backwards, with other lists: what a protocol remembers of its calls would show.
        for first, due in [*reversed(waves), (len(turns), ())]:
            again = protocol.due(self.task, tuple(turns[:first]), rotation)
            _require(
                again == due, f"due is no function of the turns: {due} after {first} messages, and {again} when asked again"
            )
        self.ending(turns)

    def conversation(
        self, turns: Sequence[Turn], waves: Sequence[tuple[int, tuple[int, ...]]], seat: int
    ) -> tuple[Message, ...]:
        """What this seat is shown, checked message by message."""
        name, protocol = self.agents[seat], self.protocol
        shown = protocol.messages(self.task, turns, seat, "")
        _require(
            protocol.messages(self.task, tuple(turns), seat, "") == shown,
            f"'{name}' is shown something else when asked again",
        )
        _require(
            protocol.messages(self.task, turns, seat, "be brief") == (Message(role="system", content="be brief"), *shown),
            f"the system prompt of '{name}' is not the first message, or changes the others",
        )
        _require(
            shown[:1] == (Message(role="user", content=self.task.view(seat)),),
            f"'{name}' is not shown its own view of the task first",
        )
        at: dict[int, int] = {}
        for place, message in enumerate(shown[1:]):
            of = [i for i, t in enumerate(turns) if message.content in (t.text, heard(t.agent, t.text).content)]
            _require(len(of) == 1 and of[0] not in at, f"'{name}' is shown '{message.content}', which nobody said, or twice")
            turn = turns[of[0]]
            is_kept = message == (
                Message(role="assistant", content=turn.text, ids=turn.ids)
                if turn.seat == seat
                else heard(turn.agent, turn.text)
            )
            _require(
                is_kept,
                f"'{name}' is shown '{turn.text}' of '{turn.agent}' as {message}: own messages are an assistant's with "
                "their sampled ids, teammates' are a user's under their names",
            )
            at[of[0]] = place
        for i, turn in enumerate(turns):
            _require(turn.seat != seat or i in at, f"'{name}' is not shown its own message '{turn.text}'")
        for first, due in waves[:-1]:
            together = range(first, first + len(due))
            own = next((at[i] for i in together if turns[i].seat == seat), None)
            early = [turns[i].text for i in together if own is not None and i in at and at[i] < own]
            _require(
                not early,
                f"'{name}' is shown {early} before its own answer of that round: simultaneous speakers hear each other",
            )
        return shown

    def ending(self, turns: Sequence[Turn]) -> None:
        """The answer is one that was given, and cut where nothing but cut messages stands behind it."""
        protocol, texts = self.protocol, [turn.text for turn in turns]
        normalisers: Sequence[Callable[[str], str | None]] = (_without_number, _unparseable)
        for normalise in normalisers:
            answer = protocol.answer(turns, normalise, key("contract", "tie"))
            _require(answer in texts, f"the answer '{answer}' is none of the messages {texts}")
            again = protocol.answer(tuple(turns), normalise, key("contract", "tie"))
            _require(again == answer, f"the answer is '{answer}', and '{again}' when asked again")
        cut = [dataclasses.replace(turn, cut=True) for turn in turns]
        _require(not protocol.is_cut(turns) and protocol.is_cut(cut), "is_cut does not follow the messages' own `cut`")


def _without_number(text: str) -> str | None:
    return text.rpartition(" #")[0]


def _unparseable(text: str) -> str | None:
    return None


# ---- codec -------------------------------------------------------------------------------------------------


def check_codec(
    codec: Codec,
    *,
    texts: Sequence[str],
    own_ids: TokenIds,
    control_texts: Sequence[str] = (),
    control_ids: Collection[int] = (),
    replies: Sequence[str] = (),
    has_system: bool = True,
) -> None:
    """A codec keeps every message, keeps sampled ids, and lets no text become a control token.

    Args:
        texts: two or more different texts, none inside another, that the model's alphabet can spell.
        own_ids: sampled ids of an agent's message; best a sequence that decoding and encoding again would change.
        control_texts: texts that spell the model's control tokens, such as its end marker.
        control_ids: ids of control tokens, in addition to the codec's `end_ids`.
        replies: texts that an agent of this model can say.
        has_system: the template knows a system message.
    """
    _require(len(set(texts)) >= 2, "the codec check needs at least two different texts")
    first, second = texts[0], texts[1]
    head = (Message(role="system", content=second),) if has_system else ()
    talk = (*head, Message(role="user", content=first))
    prompt = codec.encode(talk)
    _require(len(prompt) > 0, "encode gave no ids for a conversation")
    _require(
        codec.context_length >= len(prompt),
        f"a prompt of {len(prompt)} ids exceeds context_length {codec.context_length}",
    )
    for text in texts:
        codec.encode((Message(role="user", content=text),))
    _require(codec.encode(talk) == prompt, "encode gives other ids for the same messages after other calls")
    for text in [message.content for message in talk]:
        _require(text in codec.decode(prompt), f"the message '{text}' is not in the decoded prompt: encode lost it")
    _require(
        codec.encode((*head, Message(role="user", content=second))) != prompt,
        "two conversations have the same ids",
    )
    swapped = (*talk, Message(role="assistant", content=first), Message(role="user", content=second))
    other = (*talk, Message(role="assistant", content=second), Message(role="user", content=first))
    _require(codec.encode(swapped) != codec.encode(other), "two orders of the same messages have the same ids")

    said = Message(role="assistant", content=codec.decode(own_ids), ids=own_ids)
    later = codec.encode((*talk, said, Message(role="user", content=second)))
    _require(
        any(later[i : i + len(own_ids)] == own_ids for i in range(len(later))),
        f"sampled ids {own_ids} are not in a later prompt as they were sampled: encode rewrote them",
    )
    for end in sorted(codec.end_ids):
        _require(codec.decode((*own_ids, end)) == codec.decode(own_ids), f"decode shows the end id {end} as text")

    for text in replies:
        ids = codec.reply(text)
        _require(codec.decode(ids) == text, f"the reply '{text}' decodes to '{codec.decode(ids)}'")
        ends = [i for i, token in enumerate(ids) if token in codec.end_ids]
        _require(
            ends == ([len(ids) - 1] if codec.end_ids else []),
            f"the reply '{text}' is not its content and then one end id: end ids stand at {ends} of {len(ids)}",
        )

    control = {*control_ids, *codec.end_ids}

    def marks(content: str) -> int:
        return sum(i in control for i in codec.encode((*head, Message(role="user", content=content))))

    for text in control_texts:
        _require(
            marks(first + text) == marks(first),
            f"the text '{text}' became control tokens in a prompt: content must be encoded with special parsing off",
        )
        _require(
            codec.encode((*head, Message(role="user", content=first + text)))
            != codec.encode((*head, Message(role="user", content=first))),
            f"the text '{text}' vanished from a prompt",
        )


# ---- sampler -----------------------------------------------------------------------------------------------


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
            _require(completion.id not in heard, f"request '{completion.id}' was answered twice")
            heard[completion.id] = completion
            if pause:
                await asyncio.sleep(0.001)
        missing = [request.id for request in requests if request.id not in heard]
        _require(
            not missing,
            f"submit ended without answering {len(missing)} of {len(requests)} requests, first {missing[:1]}",
        )
        _require(len(heard) == len(requests), "submit answered a request that was not in it")
        return heard

    async def serves(self, sampler: Sampler, slot: Slot, weights: Weights, version: int, when: str) -> None:
        """Both verbs use these weights in this slot, and what they draw carries the version."""
        requests = self.requests(slot=slot, draws=1)
        heard = await self.drawn(sampler, requests)
        for request in requests:
            completion = heard[request.id]
            _require(
                completion.version == version,
                f"{when}: slot '{slot}' stamps version {completion.version}, published was {version}",
            )
            self.follows(request, completion, weights, f"{when}: slot '{slot}'")
        scores = await sampler.score([self.score_of(r, heard[r.id]) for r in requests])
        for request, score in zip(requests, scores, strict=True):
            gap = _gap(score, heard[request.id].logprobs)
            _require(
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
        _require(len(ids) == len(logprobs), f"{who} gave {len(ids)} ids and {len(logprobs)} log-probabilities")
        _require(
            1 <= len(ids) <= request.max_new_tokens,
            f"{who} gave {len(ids)} ids, the request asked for 1 to {request.max_new_tokens}",
        )
        is_ended = ids[-1] in self.end_ids
        _require(not any(i in self.end_ids for i in ids[:-1]), f"{who} went on after an end id")
        _require(
            is_ended or len(ids) == request.max_new_tokens,
            f"{who} stopped after {len(ids)} of {request.max_new_tokens} ids without an end id",
        )
        _require(
            completion.finish_reason == ("stop" if is_ended else "length"),
            f"{who} says '{completion.finish_reason}' about ids that {'end' if is_ended else 'do not end'} with an end id",
        )
        draws = uniforms([request.key], request.max_new_tokens)[0]
        for i, token in enumerate(ids):
            log_p_V = self.law_of(weights, (*request.prompt_ids, *ids[:i]), request.temperature)
            _require(0 <= token < log_p_V.numel(), f"{who} gave id {token} of a vocabulary of {log_p_V.numel()}")
            gap = abs(float(log_p_V[token]) - logprobs[i])
            _require(
                gap <= self.tolerance,
                f"{who} reports log-probability {logprobs[i]:.6g} for a token that has "
                f"{float(log_p_V[token]):.6g} under the law "
                f"at temperature {request.temperature}",
            )
            upper = log_p_V.exp().cumsum(0).numpy()
            below = float(upper[token - 1]) if token else 0.0
            _require(
                below - self.tolerance <= draws[i] <= float(upper[token]) + self.tolerance,
                f"{who} drew id {token} at uniform {draws[i]:.6g}; the inverse CDF of the law is id "
                f"{int(np.searchsorted(upper, draws[i], side='right'))}",
            )


def _gap(left: Sequence[float], right: Sequence[float]) -> float:
    if len(left) != len(right):
        return float("inf")
    return max((abs(a - b) for a, b in zip(left, right, strict=True)), default=0.0)


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
    _require(len({tuple(p) for p in prompts}) >= 3, "the sampler check needs at least three different prompts")
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
        _require(
            float(moved) > 20 * tolerance,
            f"the two weights differ by {float(moved):.3g} nats at a prompt: too little to tell a publication from none",
        )
    checks: Sequence[Callable[[Sampler, _Stage], Awaitable[None]]] = (
        _draws_are_the_law,
        _draws_have_an_address,
        _publication_lands,
        _slots_are_apart,
        _cancel_ends,
    )
    for check in checks:
        asyncio.run(_run(check, make, stage))


async def _run(check: Callable[[Sampler, _Stage], Awaitable[None]], make: Callable[[], Sampler], stage: _Stage) -> None:
    await check(make(), stage)


async def _draws_are_the_law(sampler: Sampler, stage: _Stage) -> None:
    await sampler.publish(stage.agent, "promoted", stage.weights, 1)
    for temperature in stage.temperatures:
        requests = stage.requests(temperature=temperature)
        heard = await stage.drawn(sampler, requests)
        for request in requests:
            stage.follows(request, heard[request.id], stage.weights, f"submit at temperature {temperature}")
        scores = await sampler.score([stage.score_of(r, heard[r.id]) for r in requests])
        _require(len(scores) == len(requests), f"score gave {len(scores)} answers to {len(requests)} requests")
        for request, score in zip(requests, scores, strict=True):
            gap = _gap(score, heard[request.id].logprobs)
            _require(
                gap <= stage.tolerance,
                f"score disagrees with submit about the same tokens at temperature {temperature} (gap {gap:.3g} nats)",
            )
        backwards = await sampler.score([stage.score_of(r, heard[r.id]) for r in reversed(requests)])
        for score, again in zip(reversed(scores), backwards, strict=True):
            _require(_gap(score, again) <= stage.tolerance, "scores are not in the order of their requests")


async def _draws_have_an_address(sampler: Sampler, stage: _Stage) -> None:
    await sampler.publish(stage.agent, "promoted", stage.weights, 1)
    requests = stage.requests()
    first = await stage.drawn(sampler, requests)

    async def same(requests: Sequence[Request], sentence: str, *, exactly: bool) -> None:
        again = await stage.drawn(sampler, requests)
        for request in requests:
            one, two = first[request.id], again[request.id]
            is_same = one.ids == two.ids and _gap(one.logprobs, two.logprobs) <= (0.0 if exactly else stage.tolerance)
            _require(is_same, f"{sentence}: request '{request.id}' drew {one.ids} and then {two.ids}")

    await same(requests, "the same submit drew something else the second time", exactly=True)
    await same(list(reversed(requests)), "draws depend on the order of the requests", exactly=False)
    for request in requests:
        await same([request], "draws depend on the other requests of the submit", exactly=False)

    # Two submits in flight, read at different speeds: timing must not show.
    slow, fast = await asyncio.gather(stage.drawn(sampler, requests, pause=True), stage.drawn(sampler, requests[::-1]))
    for request in requests:
        one, two, three = first[request.id], slow[request.id], fast[request.id]
        _require(
            one.ids == two.ids == three.ids
            and one.logprobs == two.logprobs
            and _gap(one.logprobs, three.logprobs) <= stage.tolerance,
            f"draws depend on timing: request '{request.id}' drew {one.ids}, {two.ids} (read slowly) and "
            f"{three.ids} (beside it)",
        )
    other_keys = [dataclasses.replace(r, key=Key(key("contract", "else", r.id))) for r in requests]
    moved = await stage.drawn(sampler, other_keys)
    _require(any(moved[r.id].ids != first[r.id].ids for r in requests), "draws do not depend on the request's key")


async def _publication_lands(sampler: Sampler, stage: _Stage) -> None:
    proof = await sampler.publish(stage.agent, "promoted", stage.weights, 1)
    _require(
        (proof.agent, proof.slot, proof.version) == (stage.agent, "promoted", 1),
        f"the proof of '{stage.agent}' promoted version 1 names '{proof.agent}' {proof.slot} version {proof.version}",
    )
    _require(
        proof.fingerprint == stage.weights.fingerprint,
        "the fingerprint of what landed is not that of what was sent",
    )
    await stage.serves(sampler, "promoted", stage.weights, 1, "after a publication")

    # Same prompts again under other weights: a prefix cache or a laid-up law of the old ones would show.
    proof = await sampler.publish(stage.agent, "promoted", stage.other, 2)
    _require(
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
        _require(
            proof.fingerprint != stage.weights.fingerprint,
            f"tensor '{name}' was corrupted on the way and the proof says that it landed as sent",
        )
    short = {name: tensor for name, tensor in stage.weights.tensors.items() if name != min(stage.weights.tensors)}
    try:
        proof = await sampler.publish(stage.agent, "candidate", dataclasses.replace(stage.weights, tensors=short), 4)
    except PublishError:
        pass
    else:
        _require(
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


async def _cancel_ends(sampler: Sampler, stage: _Stage) -> None:
    await sampler.publish(stage.agent, "promoted", stage.weights, 1)
    requests = stage.requests()
    first = await stage.drawn(sampler, requests)
    await sampler.cancel(["a request that nobody made"])
    await sampler.cancel([requests[0].id])
    again = await stage.drawn(sampler, requests)
    _require(again == first, "cancelling finished requests changed a later submit")
    heard: dict[str, Completion] = {}
    stream: AsyncIterator[Completion] = sampler.submit(requests)
    async for completion in stream:
        if not heard:
            waiting = [r.id for r in requests if r.id != completion.id]
            await sampler.cancel([waiting[-1]])
        heard[completion.id] = completion
    for request in requests:
        if request.id in heard:
            _require(
                heard[request.id].ids == first[request.id].ids,
                "cancelling one request changed another one's draws",
            )
    _require(len(heard) >= len(requests) - 1, "cancelling one request dropped others")
    again = await stage.drawn(sampler, requests)
    _require(again == first, "a cancelled request stays cancelled when it is asked again")


# ---- learner -----------------------------------------------------------------------------------------------


def check_learner(
    make: Callable[[], Learner],
    *,
    batch: AdvantageBatch,
    law: Law,
    lr: float,
    temperatures: Sequence[float] = (0.6, 1.0, 1.4),
    tolerance: float = 1e-5,
) -> None:
    """A learner reports its served weights exactly, steps where the objective points, and comes back bit for
    bit.

    Catches: log-probabilities at another temperature; a divergence of another pair, direction or layout;
    results that depend on padding or on the order of rows; a loss with a local denominator; a restore that
    forgets masters, moments or steps; a snapshot, anchor or served copy that shares memory with the masters;
    a blend that misses its ends; a penalty that is computed at 0, ignored above 0, or that turns the first
    step (G26); non-finite advantages that train (T5, T7).

    Args:
        make: a new learner; each call gives the same weights and no steps.
        batch: at least three rows of different lengths and at least two episodes, with advantages of both signs.
            Its behaviour log-probabilities are replaced by the learner's own.
        law: the independent judge.
        lr: large enough that one step moves log-probabilities by over 20 tolerances, small enough that it is nearly
            linear.
        tolerance: largest accepted difference in nats.
    """
    suite = _Bench(make, batch, law, lr, tuple(temperatures), tolerance)
    _batch_has_power(batch)
    for check in (
        _reports_the_served_law,
        _divergence_is_exact,
        _step_goes_where_the_objective_points,
        _layout_does_not_matter,
        _restore_is_exact,
        _blend_is_exact_at_both_ends,
        _penalty_acts_where_it_can,
        _scores_are_gradients,
        _nothing_moves_without_cause,
        _serves_copies,
    ):
        check(suite)


def _batch_has_power(batch: AdvantageBatch) -> None:
    tokens = batch.batch
    acting = batch.advantages[tokens.mask]
    _require(
        tokens.n_rows >= 3 and tokens.n_episodes >= 2 and len(set(tokens.lengths.tolist())) >= 2,
        "the learner check needs at least three rows of different lengths from at least two episodes",
    )
    _require(bool((acting > 0).any() and (acting < 0).any()), "the learner check needs advantages of both signs")


@dataclasses.dataclass(frozen=True)
class _Bench:
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
        return Objective(weight=Dis(band=REASONING), penalty=penalty)

    def step(self, learner: Learner, batch: AdvantageBatch) -> None:
        learner.step(batch, self.objective(), lr=self.lr, anchor=None)

    def laws(self, weights: Weights, batch: TokenBatch) -> Tensor:
        """[N, V] at the action states, by the judge."""
        states = batch.mask.nonzero().tolist()
        return torch.stack(
            [self.law(weights, tuple(batch.ids[b, :t].tolist()), batch.temperature).detach().double() for b, t in states]
        )


def _far(left: Tensor, right: Tensor) -> float:
    return float((left.detach().double() - right.detach().double()).abs().max())


def _copy(snapshot: Snapshot) -> Snapshot:
    return Snapshot(
        weights={name: t.clone() for name, t in snapshot.weights.items()},
        moments={name: t.clone() for name, t in snapshot.moments.items()},
        steps=snapshot.steps,
    )


def _same_tensors(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> str | None:
    """The first name under which the two differ in any bit that matters; None when they are equal."""
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right or not torch.equal(left[name], right[name]):
            return name
    return None


def _moved(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> str | None:
    """The first master that is not where it was; one that an engine has not stored yet is zeros."""
    for name in sorted(left.keys() | right.keys()):
        held = left.get(name, right.get(name))
        assert held is not None
        blank = torch.zeros_like(held)
        if not torch.equal(left.get(name, blank), right.get(name, blank)):
            return name
    return None


def _require_same(left: Snapshot, right: Snapshot, sentence: str) -> None:
    name = _same_tensors(left.weights, right.weights)
    _require(name is None, f"{sentence}: master '{name}' differs")
    name = _same_tensors(left.moments, right.moments)
    _require(name is None, f"{sentence}: optimiser moment '{name}' differs")
    _require(left.steps == right.steps, f"{sentence}: {left.steps} steps taken against {right.steps}")


def _reports_the_served_law(bench: _Bench) -> None:
    learner, batch = bench.start()
    bench.step(learner, batch)
    for temperature in bench.temperatures:
        tokens = dataclasses.replace(batch.batch, temperature=temperature)
        got_BT = learner.logprobs(tokens)
        _require(
            got_BT.shape == tokens.ids.shape,
            f"logprobs has shape {tuple(got_BT.shape)}, the batch {tuple(tokens.ids.shape)}",
        )
        _require(not got_BT.requires_grad, "logprobs carries a gradient")
        _require(bool((got_BT[~tokens.mask] == 0).all()), "logprobs is not 0 where the mask is False")
        want_N = bench.laws(learner.weights(), tokens).gather(1, tokens.ids[tokens.mask][:, None])[:, 0]
        far = _far(got_BT[tokens.mask], want_N)
        _require(
            far <= bench.tolerance,
            f"logprobs at temperature {temperature} are {far:.3g} nats from the law of the served weights",
        )
        _require(
            _far(learner.remember(tokens).logprobs, got_BT) <= bench.tolerance,
            "an anchor's logprobs are not the learner's at the moment it was remembered",
        )


def _divergence_is_exact(bench: _Bench) -> None:
    learner, batch = bench.start()
    for temperature in bench.temperatures:
        tokens = dataclasses.replace(batch.batch, temperature=temperature)
        snapshot, before = _copy(learner.snapshot()), learner.weights()
        anchor = learner.remember(tokens)
        remembered_BT = anchor.logprobs.clone()
        still = learner.divergence(tokens, anchor)
        row_N, position_N = tokens.mask.nonzero(as_tuple=True)
        _require(
            torch.equal(still.row, row_N) and torch.equal(still.position, position_N),
            "a divergence's states are not the batch's action tokens in row order",
        )
        _require(
            max(float(still.kl_new_old.abs().max()), float(still.kl_old_new.abs().max())) <= bench.tolerance,
            "a policy has a divergence from itself",
        )
        old_NV = bench.laws(before, tokens)
        for _ in range(3):
            bench.step(learner, batch)
        _require(torch.equal(anchor.logprobs, remembered_BT), "an anchor moved with the learner: it must be a copy")
        new_NV = bench.laws(learner.weights(), tokens)
        moved = learner.divergence(tokens, anchor)
        for name, got, p_NV, q_NV in (
            ("kl_new_old", moved.kl_new_old, new_NV, old_NV),
            ("kl_old_new", moved.kl_old_new, old_NV, new_NV),
        ):
            p = p_NV.exp()
            want = torch.where(p > 0, p * (p_NV - q_NV), torch.zeros_like(p)).sum(1)
            far = _far(got, want)
            _require(
                far <= bench.tolerance,
                f"{name} at temperature {temperature} is {far:.3g} nats from the sum over the vocabulary of both laws",
            )
        gap = (moved.kl_new_old - moved.kl_old_new).abs().max()
        size = float(moved.kl_old_new.max())
        _require(
            size > 20 * bench.tolerance and float(gap) > bench.tolerance / 10,
            f"three steps moved the policy by {size:.3g} nats: too little to tell the two directions apart; raise lr",
        )
        learner.restore(snapshot)


def _step_goes_where_the_objective_points(bench: _Bench) -> None:
    learner, batch = bench.start()
    tokens, mask_BT = batch.batch, batch.batch.mask
    before_BT = learner.logprobs(tokens).double()
    advantages_BT = torch.where(mask_BT, batch.advantages, torch.zeros_like(batch.advantages)).double()
    report = learner.step(batch, bench.objective(), lr=bench.lr, anchor=None)
    after_BT = learner.logprobs(tokens).double()
    want = -float((advantages_BT * before_BT).sum()) / tokens.n_act
    _require(
        abs(report.loss - want) <= max(bench.tolerance, 1e-5 * abs(want)),
        f"the loss of the first step is {report.loss:.6g}; -sum A log p / {tokens.n_act} action tokens is {want:.6g}",
    )
    counted = report.diagnostics.get("tokens")
    _require(counted == tokens.n_act, f"the step counted {counted} action tokens of {tokens.n_act}")
    _require(report.grad_norm > 0.0, "a batch with advantages has gradient norm 0")
    gain = float((advantages_BT * (after_BT - before_BT)).sum())
    _require(
        gain > 0.0,
        f"a step lowered the advantage-weighted log-probability by {-gain:.3g}: it goes the wrong way",
    )
    moved = _far(after_BT, before_BT)
    _require(
        moved > 20 * bench.tolerance,
        f"one step moved log-probabilities by {moved:.3g} nats only; raise lr for this check",
    )

    near, batch = bench.start()
    near.step(batch, bench.objective(), lr=bench.lr / 4, anchor=None)
    short = _far(near.logprobs(tokens), before_BT)
    _require(
        short < moved / 2,
        f"a quarter of the lr moved {short:.3g} nats, the whole {moved:.3g}: lr is not followed",
    )


def _layout_does_not_matter(bench: _Bench) -> None:
    def stepped(batch: AdvantageBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities after two steps on the batch, then both divergences of those steps, in its own
        row order."""
        learner, _ = bench.start()
        anchor = learner.remember(batch.batch)
        for _ in range(2):
            learner.step(batch, bench.objective(0.5), lr=bench.lr, anchor=anchor)
        moved = learner.divergence(batch.batch, anchor)
        return learner.logprobs(batch.batch), moved.kl_new_old, moved.kl_old_new

    _, batch = bench.start()
    plain = stepped(batch)
    again = stepped(batch)
    _require(
        all(torch.equal(a, b) for a, b in zip(plain, again, strict=True)),
        "the same steps from the same weights gave other numbers the second time",
    )
    order = list(range(batch.batch.n_rows))[::-1]
    turned = stepped(batch.rows(order))
    width = turned[0].shape[1]
    far = _far(turned[0], plain[0][order, :width])
    _require(far <= bench.tolerance, f"the order of the rows changed the step (by {far:.3g} nats)")

    junk = _with_junk(batch)
    with_junk = stepped(junk)
    far = max(
        _far(with_junk[0][:, : plain[0].shape[1]], plain[0]),
        _far(with_junk[1], plain[1]),
        _far(with_junk[2], plain[2]),
    )
    _require(far <= bench.tolerance, f"what the padding holds changed a result (by {far:.3g} nats)")


def _with_junk(batch: AdvantageBatch) -> AdvantageBatch:
    """The same batch, three columns wider, with junk wherever nothing may be read."""
    tokens = batch.batch
    wide = tokens.ids.shape[1] + 3

    def widened(values: Tensor, junk: float, unused_BT: Tensor) -> Tensor:
        out = torch.full((values.shape[0], wide), junk, dtype=values.dtype)
        out[:, : values.shape[1]] = values
        return torch.where(unused_BT, torch.full_like(out, junk), out)

    mask_BT = torch.zeros(tokens.n_rows, wide, dtype=torch.bool)
    mask_BT[:, : tokens.mask.shape[1]] = tokens.mask
    padding_BT = torch.arange(wide) >= tokens.lengths[:, None]
    filler = int(tokens.ids[tokens.mask][0])
    return dataclasses.replace(
        batch,
        batch=dataclasses.replace(
            tokens,
            ids=widened(tokens.ids, filler, padding_BT),
            mask=mask_BT,
            behavior_logprobs=widened(tokens.behavior_logprobs, -1e10, ~mask_BT),
            versions=widened(tokens.versions, -7, ~mask_BT),
        ),
        advantages=widened(batch.advantages, float("nan"), ~mask_BT),
    )


def _restore_is_exact(bench: _Bench) -> None:
    learner, batch = bench.start()
    start = learner.snapshot()
    start_copy = _copy(start)
    bench.step(learner, batch)
    one = learner.snapshot()
    one_copy = _copy(one)
    _require(one.steps == start.steps + 1, f"one step moved the step count from {start.steps} to {one.steps}")
    bench.step(learner, batch)
    two = _copy(learner.snapshot())
    _require_same(one, one_copy, "a snapshot changed when the learner stepped on: it must be a copy")
    learner.restore(one)
    _require_same(learner.snapshot(), one_copy, "restore did not bring back what the snapshot saved")
    bench.step(learner, batch)
    _require_same(learner.snapshot(), two, "a step after restore is not the step that was taken the first time")
    _require_same(one, one_copy, "a snapshot changed when the learner stepped on after restoring it")
    learner.restore(start)
    _require_same(learner.snapshot(), start_copy, "restore did not bring back the state before the first step")
    fresh, _ = bench.start()
    _require(
        learner.weights().fingerprint == fresh.weights().fingerprint,
        "the served weights after restore are not those of the start",
    )
    bench.step(learner, batch)
    _require_same(learner.snapshot(), one_copy, "the first step after restore is not the first step")
    # What one learner saved another one must be able to continue.
    heir = bench.make()
    heir.restore(one)
    bench.step(heir, batch)
    _require_same(heir.snapshot(), two, "a new learner that restored a snapshot does not continue as the old one did")


def _blend_is_exact_at_both_ends(bench: _Bench) -> None:
    learner, batch = bench.start()
    bench.step(learner, batch)
    origin = _copy(learner.snapshot())
    for _ in range(2):
        bench.step(learner, batch)
    towards = _copy(learner.snapshot())
    served = learner.weights().fingerprint
    learner.blend(towards, origin, 1.0)
    whole = learner.snapshot()
    name = _same_tensors(whole.weights, towards.weights)
    _require(name is None, f"blend(1) is not the stepped state: master '{name}' differs")
    _require(learner.weights().fingerprint == served, "blend(1) serves other weights than the stepped state did")
    name = _same_tensors(whole.moments, origin.moments)
    _require(name is None and whole.steps == origin.steps, "blend left moments or steps that are not the origin's")
    learner.blend(towards, origin, 0.5)
    half = learner.snapshot()
    for name in sorted(towards.weights):
        new = towards.weights[name].double()
        old = origin.weights[name].double() if name in origin.weights else torch.zeros_like(new)
        got = half.weights[name].double() if name in half.weights else torch.zeros_like(new)
        _require(
            _far(got, old + 0.5 * (new - old)) <= 1e-6 * max(1.0, float(new.abs().max())),
            f"blend(1/2) is not half way: master '{name}' differs",
        )
    learner.blend(towards, origin, 0.0)
    _require_same(learner.snapshot(), origin, "blend(0) is not the origin")
    _require_same(learner.snapshot(lend=True), origin, "a lent snapshot is not the state")
    light = learner.snapshot(moments=False)
    name = _same_tensors(light.weights, origin.weights)
    _require(name is None, f"a snapshot without moments has another master '{name}'")
    _require(not light.moments, "a snapshot without moments holds some")
    learner.blend(dataclasses.replace(towards, moments={}), origin, 1.0)
    name = _same_tensors(learner.snapshot().weights, towards.weights)
    _require(name is None, f"blend(1) towards a snapshot without moments is not it: master '{name}' differs")


def _penalty_acts_where_it_can(bench: _Bench) -> None:
    learner, batch = bench.start()
    tokens = batch.batch
    anchor = learner.remember(tokens)
    start = _copy(learner.snapshot())

    # G26: the gradient of a KL is zero where the two laws are one, so no penalty can turn the first step.
    bench.step(learner, batch)
    free_BT, one = learner.logprobs(tokens), _copy(learner.snapshot())
    learner.restore(start)
    learner.step(batch, bench.objective(1.0), lr=bench.lr, anchor=anchor)
    far = _far(learner.logprobs(tokens), free_BT)
    _require(
        far <= bench.tolerance,
        f"a penalty turned the first step by {far:.3g} nats; its gradient at the anchor is zero",
    )

    learner.restore(one)
    learner.step(batch, bench.objective(0.0), lr=bench.lr, anchor=anchor)
    with_anchor = _copy(learner.snapshot())
    learner.restore(one)
    bench.step(learner, batch)
    _require_same(learner.snapshot(), with_anchor, "penalty 0 reads the anchor")

    # Far enough from the anchor that the two directions differ.
    idle = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages))
    for _ in range(4):
        bench.step(learner, batch)
    away = _copy(learner.snapshot())
    there = float(learner.divergence(tokens, anchor).kl_new_old.sum())
    report = learner.step(idle, bench.objective(100.0), lr=bench.lr, anchor=anchor)
    said = report.diagnostics.get("kl_sum")
    _require(
        said is not None and abs(said - there) <= max(bench.tolerance, 1e-4 * there),
        f"the step's kl_sum is {said}, the divergence before it sums to {there:.6g} (kl_new_old)",
    )
    held = float(learner.divergence(tokens, anchor).kl_new_old.mean())
    learner.restore(away)
    bench.step(learner, idle)
    drift = float(learner.divergence(tokens, anchor).kl_new_old.mean())
    _require(
        held < drift,
        f"a penalty of 100 left the divergence at {held:.3g}, no penalty at {drift:.3g}: it does not act",
    )

    learner.restore(start)
    try:
        learner.step(batch, bench.objective(1.0), lr=bench.lr, anchor=None)
    except MissingError:
        return
    raise AssertionError("a step with a penalty and no anchor did not raise MissingError")


def _scores_are_gradients(bench: _Bench) -> None:
    learner, batch = bench.start()
    before = _copy(learner.snapshot())
    gradient, fisher = learner.score_gradients(batch)
    _require_same(learner.snapshot(), before, "measuring score gradients moves nothing")
    # The loss with w = 1 divides the same sum by the action tokens.
    report = learner.step(batch, Objective(weight=Likelihood(), penalty=0.0), lr=bench.lr, anchor=None)
    tokens = batch.batch
    norm = float(gradient.double().norm()) * tokens.n_episodes
    _require(
        abs(norm - report.grad_norm * tokens.n_act) <= 1e-3 * norm,
        f"the mean of A times the episode's score has norm {norm / tokens.n_episodes:.6g}; the loss's own gradient says "
        f"{report.grad_norm * tokens.n_act / tokens.n_episodes:.6g}",
    )
    learner.restore(before)
    names = list(dict.fromkeys(tokens.episode_ids))
    squares: Tensor | None = None
    for name in names:
        own = batch.rows([row for row, other in enumerate(tokens.episode_ids) if other == name])
        alone = dataclasses.replace(own, advantages=own.batch.mask.to(own.advantages.dtype))
        score, square = learner.score_gradients(alone)
        _require(torch.allclose(square, score.square()), "of one episode, the Fisher diagonal is its score squared")
        if squares is None or squares.shape == square.shape:
            squares = square if squares is None else squares + square
    if squares is not None and squares.shape == fisher.shape:
        _require(
            torch.allclose(squares / len(names), fisher, rtol=1e-3, atol=1e-6 * float(fisher.max())),
            "the Fisher diagonal is the mean of the episodes' squared scores, whatever their advantages",
        )


def _nothing_moves_without_cause(bench: _Bench) -> None:
    learner, batch = bench.start()
    start = _copy(learner.snapshot())
    idle = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages))
    report = learner.step(idle, bench.objective(), lr=bench.lr, anchor=None)
    _require(report.grad_norm == 0.0, f"advantages of zero have gradient norm {report.grad_norm:.3g}")
    name = _moved(learner.snapshot().weights, start.weights)
    _require(name is None, f"advantages of zero moved master '{name}'")
    learner.restore(start)
    anchor: Anchor = learner.remember(batch.batch)
    report = learner.step(idle, bench.objective(1.0), lr=bench.lr, anchor=anchor)
    _require(report.grad_norm <= 1e-4, f"the penalty has gradient norm {report.grad_norm:.3g} at its own anchor")
    learner.restore(start)
    learner.step(batch, bench.objective(), lr=0.0, anchor=None)
    name = _moved(learner.snapshot().weights, start.weights)
    _require(name is None, f"a step at lr 0 moved master '{name}'")
    for value in (float("nan"), float("inf")):
        learner.restore(start)
        advantages = torch.where(batch.batch.mask, torch.full_like(batch.advantages, value), batch.advantages)
        try:
            learner.step(dataclasses.replace(batch, advantages=advantages), bench.objective(), lr=bench.lr, anchor=None)
        except NonFiniteError:
            pass
        else:
            raise AssertionError(f"a step on advantages of {value} did not raise NonFiniteError")
        learner.restore(start)
        _require_same(learner.snapshot(), start, f"restore after a step on advantages of {value} is not exact")


def _serves_copies(bench: _Bench) -> None:
    learner, batch = bench.start()
    bench.step(learner, batch)
    served = learner.weights()
    _require(served.tensors.keys() == served.checksums.keys(), "served tensors and checksums have different names")
    twin, _ = bench.start()
    bench.step(twin, batch)
    _require(twin.weights().fingerprint == served.fingerprint, "equal weights have different fingerprints")
    copies = {name: tensor.clone() for name, tensor in served.tensors.items()}
    anchor_BT = learner.logprobs(batch.batch)
    bench.step(learner, batch)
    name = _same_tensors(served.tensors, copies)
    _require(name is None, f"served tensor '{name}' changed when the learner stepped on: it must be a copy")
    after = learner.weights()
    _require(after.fingerprint != served.fingerprint, "weights moved and the fingerprint did not")
    changed = {name for name in after.tensors if after.checksums[name] != served.checksums.get(name)}
    differ = {name for name in after.tensors if name not in copies or not torch.equal(after.tensors[name], copies[name])}
    _require(changed == differ, f"checksums do not tell the changed tensors: {sorted(changed ^ differ)[:3]}")
    _require(_far(learner.logprobs(batch.batch), anchor_BT) > 0.0, "a second step did not move the policy")
