"""The table engine passes the shipped contracts, and each contract fails on an engine with the fault that it
is for."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.core.advantages import batch_mean
from baton.core.batching import token_batch, trajectories, with_advantages
from baton.core.keyed import key, uniforms
from baton.core.losses import REASONING, Dis, Is, Objective, SecondMoment
from baton.engines.engine import Anchor, Completion, CoupledRequest, Learner, Request, Sampler, ScoreRequest
from baton.engines.table import (
    TableAnchor,
    TableCodec,
    TableLearner,
    TableSampler,
    _Held,
    _log_laws,
    row_ids,
    row_name,
    symbols_of,
)
from baton.envs.env import Grade
from baton.envs.games import ParityEnv, ParityOptions
from baton.errors import ConfigError, DataError, MissingError, NonFiniteError, PublishError
from baton.protocols import Chain, ChainOptions
from baton.rollout import Play, Seat, Table
from baton.testing import check_codec, check_env, check_learner, check_sampler
from baton.types import (
    AdvantageBatch,
    Message,
    PublishProof,
    Scored,
    Slot,
    Snapshot,
    StepReport,
    Task,
    TokenBatch,
    TokenDivergence,
    TokenIds,
    Trajectory,
    Turn,
    Weights,
)

CODEC = TableCodec(symbols_of("table:012"), has_end=True)
V = CODEC.vocabulary
PROMPTS = tuple(CODEC.encode((Message(role="user", content=text),)) for text in ("left", "right", "neither of the two"))


def law(weights: Weights, ids: TokenIds, temperature: float) -> Tensor:
    """The judge: a softmax by hand over a row that is found by spelling its name."""
    name = "row." + "".join(f"{i:04x}" for i in ids)
    logits = [float(x) / temperature for x in weights.tensors.get(name, torch.zeros(V))]
    top = max(logits)
    norm = top + math.log(math.fsum(math.exp(x - top) for x in logits))
    return torch.tensor([x - norm for x in logits], dtype=torch.float64)


def filled(seed: str, *, dtype: torch.dtype = torch.float64) -> TableLearner:
    """A learner whose rows at the prompts, and after one symbol, are not uniform."""
    learner = TableLearner("a", V, dtype=dtype)
    for p, prompt in enumerate(PROMPTS):
        for tail in ((), (0,), (1,), (2,)):
            learner.set((*prompt, *tail), uniforms([key(seed, p, *tail)], V)[0] * 3.0 - 1.5)
    return learner


def batch() -> AdvantageBatch:
    """Two prompts with two siblings each; one row speaks twice, so that its context and its own tokens
    alternate."""
    spoken = [(0, (1, 3)), (0, (2, 0, 3)), (1, (0, 0, 1)), (2, (3,))]
    rows: list[Trajectory] = []
    for e, (p, ids) in enumerate(spoken):
        prompt = PROMPTS[p]
        tail = (*CODEC.encode((Message(role="user", content="x"),)), 1, 3) if e == 1 else ()
        heard = (False,) * max(len(tail) - 2, 0)
        own = (False,) * len(prompt) + (True,) * len(ids) + heard + (True,) * (2 if tail else 0)
        whole = (*prompt, *ids, *tail)
        rows.append(
            Trajectory(
                episode_id=f"e{e}",
                group=f"p{p}",
                agent="a",
                segment=0,
                ids=whole,
                mask=own,
                behavior_logprobs=tuple(-1.4 if m else 0.0 for m in own),
                versions=tuple(0 if m else -1 for m in own),
            )
        )
    tokens = token_batch(rows, temperature=1.0)
    return with_advantages(tokens, {"e0": 1.0, "e1": -0.7, "e2": 0.4, "e3": -1.5}, team={"a": 0})


def run_sampler_contract(make: Callable[[], Sampler]) -> None:
    check_sampler(
        make,
        agent="a",
        weights=filled("one").weights(),
        other=filled("two").weights(),
        law=law,
        prompts=PROMPTS,
        end_ids=CODEC.end_ids,
        max_new_tokens=3,
        tolerance=1e-9,
    )


def run_learner_contract(make: Callable[[], Learner], *, lr: float = 0.05) -> None:
    check_learner(make, batch=batch(), law=law, lr=lr, tolerance=1e-6)


# ---- the engine passes -------------------------------------------------------------------------------------


def test_the_table_codec_keeps_its_contract() -> None:
    check_codec(
        CODEC,
        texts=("what is it?", "eine Zahl, größer als 7 🙂"),
        own_ids=(0, 2, 3),
        control_texts=("\x00", "assistant", "3"),
        control_ids=range(V + 256, V + 259),
        replies=("", "0", "2101"),
    )


def test_the_table_sampler_keeps_its_contract() -> None:
    run_sampler_contract(lambda: TableSampler({"a": CODEC}))


@pytest.mark.parametrize("micro_tokens", [None, 1, 200])
@pytest.mark.parametrize(("dtype", "lr"), [(torch.float64, 0.05), (torch.float32, 0.05)])
def test_the_table_learner_keeps_its_contract(micro_tokens: int | None, dtype: torch.dtype, lr: float) -> None:
    def make() -> TableLearner:
        learner = TableLearner("a", V, dtype=dtype, micro_tokens=micro_tokens)
        learner.restore(filled("one").snapshot())
        return learner

    run_learner_contract(make, lr=lr)


def test_a_table_that_starts_empty_and_steps_plainly_keeps_the_contract() -> None:
    run_learner_contract(lambda: TableLearner("a", V, optimiser="sgd"), lr=0.3)


# ---- faulty samplers ---------------------------------------------------------------------------------------


class Wrapped(TableSampler):
    """A table sampler with one fault."""

    def __init__(self) -> None:
        super().__init__({"a": CODEC})


class DrawsByCallOrder(Wrapped):
    calls = 0

    def submit(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        self.calls += 1
        return super().submit([dataclasses.replace(r, key=key("call", self.calls, r.id)) for r in requests])


class DrawsByPlaceInTheBatch(Wrapped):
    def submit(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        moved = [dataclasses.replace(r, key=requests[0].key if i else r.key) for i, r in enumerate(requests)]
        return super().submit(moved)


class DrawsByClock(Wrapped):
    """Whoever is read while another submit is in flight gets that one's key."""

    active = 0

    def submit(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        async def read() -> AsyncIterator[Completion]:
            self.active += 1
            for request in requests:
                used = request if self.active == 1 else dataclasses.replace(request, key=key("crowded", request.id))
                async for completion in super(DrawsByClock, self).submit([used]):
                    yield completion
            self.active -= 1

        return read()


class IgnoresKeys(Wrapped):
    def submit(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        return super().submit([dataclasses.replace(r, key=key("fixed")) for r in requests])


class ReportsRawLogprobs(Wrapped):
    """The log-probabilities before the temperature (A02)."""

    def _complete(self, request: Request, held: Any, draws: Any, laws: Any) -> Completion:
        said = super()._complete(request, held, draws, laws)
        raw = [
            _log_laws(held.rows, [row_name((*request.prompt_ids, *said.ids[:i]))], V, 1.0)[0, token]
            for i, token in enumerate(said.ids)
        ]
        return dataclasses.replace(said, logprobs=tuple(float(x) for x in raw))


class SamplesAtTemperatureOne(Wrapped):
    def submit(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        return super().submit([dataclasses.replace(r, temperature=1.0) for r in requests])


class DropsTheLastLogprob(Wrapped):
    def _complete(self, *args: Any) -> Completion:
        said = super()._complete(*args)
        return dataclasses.replace(said, logprobs=said.logprobs[:-1])


class ForgetsARequest(Wrapped):
    def submit(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        return super().submit(requests[:-1])


class MissesTheEnd(Wrapped):
    def _complete(self, *args: Any) -> Completion:
        return dataclasses.replace(super()._complete(*args), finish_reason="length")


class ScoresAtTemperatureOne(Wrapped):
    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[tuple[float, ...]]:
        return await super().score([dataclasses.replace(r, temperature=1.0) for r in requests])


class ScoresBackwards(Wrapped):
    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[tuple[float, ...]]:
        return sorted(await super().score(requests))


class StampsTheFirstVersion(Wrapped):
    async def publish(self, agent: str, slot: Slot, weights: Weights, version: int) -> PublishProof:
        proof = await super().publish(agent, slot, weights, 1)
        return dataclasses.replace(proof, version=version)


class SkipsThePublication(Wrapped):
    """The second publication into a slot changes the version and nothing else (sabotage: stale publish)."""

    async def publish(self, agent: str, slot: Slot, weights: Weights, version: int) -> PublishProof:
        held = self._slots.get((agent, slot))
        proof = await super().publish(agent, slot, weights, version)
        if held is not None:
            self._slots[agent, slot] = dataclasses.replace(held, version=version)
        return proof


class EchoesTheFingerprint(Wrapped):
    """Takes whatever comes and confirms it with the fingerprint that came along."""

    async def publish(self, agent: str, slot: Slot, weights: Weights, version: int) -> PublishProof:
        self._slots[agent, slot] = _Held({n: t.clone() for n, t in weights.tensors.items()}, version)
        return PublishProof(agent=agent, slot=slot, version=version, fingerprint=weights.fingerprint)


class KeepsTheSendersTensors(Wrapped):
    async def publish(self, agent: str, slot: Slot, weights: Weights, version: int) -> PublishProof:
        proof = await super().publish(agent, slot, weights, version)
        self._slots[agent, slot] = _Held(weights.tensors, version)
        return proof


class KeepsAnOldScore(Wrapped):
    """A cache that a publication does not flush."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[tuple[str, TokenIds, TokenIds, float], tuple[float, ...]] = {}

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[tuple[float, ...]]:
        fresh = await super().score(requests)
        return [
            self.cache.setdefault((r.slot, r.prompt_ids, r.ids, r.temperature), s)
            for r, s in zip(requests, fresh, strict=True)
        ]


class HasOneSlot(Wrapped):
    async def publish(self, agent: str, slot: Slot, weights: Weights, version: int) -> PublishProof:
        await super().publish(agent, "promoted", weights, version)
        return await super().publish(agent, slot, weights, version)


class SwapsNothing(Wrapped):
    async def swap(self, agent: str) -> None:
        return


class CopiesInsteadOfSwapping(Wrapped):
    async def swap(self, agent: str) -> None:
        self._slots[agent, "promoted"] = self._slots[agent, "candidate"]


class ServesTheStartFromAnEmptySlot(Wrapped):
    def _held(self, agent: str, slot: Slot):  # type: ignore[no-untyped-def]
        return super()._held(agent, slot if (agent, slot) in self._slots else "promoted")


class CouplesApart(Wrapped):
    """Draws beside what was said as if nothing had been."""

    async def couple(self, requests: Sequence[CoupledRequest]) -> Sequence[Completion]:
        alone = [dataclasses.replace(one.request, key=key("alone", one.request.id)) for one in requests]
        return [c async for c in self.submit(alone)]


class RepeatsWhatWasSaid(Wrapped):
    def _coupled(self, one: CoupledRequest) -> Completion:
        return dataclasses.replace(super()._coupled(one), ids=one.ids)


class CouplesBySharedUniforms(Wrapped):
    """The inverse CDF at the same uniforms: the right law, and apart more often than need be."""

    async def couple(self, requests: Sequence[CoupledRequest]) -> Sequence[Completion]:
        return [c async for c in self.submit([one.request for one in requests])]


class CancelsForEver(Wrapped):
    async def cancel(self, ids: Collection[str]) -> None:
        self._gone = {*getattr(self, "_gone", ()), *ids}

    def submit(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        return super().submit([r for r in requests if r.id not in getattr(self, "_gone", ())])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (DrawsByCallOrder, "inverse CDF"),
        (DrawsByPlaceInTheBatch, "inverse CDF"),
        (DrawsByClock, "timing"),
        (IgnoresKeys, "inverse CDF"),
        (ReportsRawLogprobs, "at temperature 0.6"),
        (SamplesAtTemperatureOne, "at temperature 0.6"),
        (DropsTheLastLogprob, "log-probabilities"),
        (ForgetsARequest, "without answering 1"),
        (MissesTheEnd, "says 'length'"),
        (ScoresAtTemperatureOne, "score disagrees with submit"),
        (ScoresBackwards, "score disagrees with submit"),
        (StampsTheFirstVersion, "stamps version 1, published was 2"),
        (SkipsThePublication, "under the law at temperature 0.6"),
        (EchoesTheFingerprint, "was corrupted on the way"),
        (KeepsTheSendersTensors, "after the sender changed its own tensors"),
        (
            KeepsAnOldScore,
            ("after a second publication into the same slot: slot 'promoted' scores with other weights"),
        ),
        (HasOneSlot, "with a candidate beside it"),
        (SwapsNothing, "after a swap"),
        (CopiesInsteadOfSwapping, "after a swap"),
        (ServesTheStartFromAnEmptySlot, "answers although nothing was published"),
        (CouplesApart, "coupled with the same weights, request"),
        (RepeatsWhatWasSaid, "couple reports a log-probability"),
        (CouplesBySharedUniforms, "coupled first tokens differ in"),
        (CancelsForEver, "without answering 1"),
    ],
)
def test_the_sampler_contract_catches(fault: Callable[[], Sampler], said: str) -> None:
    with pytest.raises(AssertionError, match=said.replace("(", r"\(")):
        run_sampler_contract(fault)


# ---- faulty learners ---------------------------------------------------------------------------------------


class Filled(TableLearner):
    """A table learner with one fault, started from rows that are not uniform."""

    def __init__(self) -> None:
        super().__init__("a", V)
        self.restore(filled("one").snapshot())


class IgnoresTemperature(Filled):
    def _log_laws(self, names: Sequence[str], temperature: float) -> Tensor:
        return super()._log_laws(names, 1.0)


class SwapsTheDirections(Filled):
    def divergence(self, batch: TokenBatch, anchor: Anchor) -> TokenDivergence:
        d = super().divergence(batch, anchor)
        return dataclasses.replace(d, kl_new_old=d.kl_old_new, kl_old_new=d.kl_new_old)


class MeasuresSampledTokensOnly(Filled):
    def divergence(self, batch: TokenBatch, anchor: Anchor) -> TokenDivergence:
        d = super().divergence(batch, anchor)
        gap = (self.logprobs(batch) - anchor.logprobs)[batch.mask].abs()
        return dataclasses.replace(d, kl_new_old=gap, kl_old_new=gap)


class AnchorFollows(Filled):
    def divergence(self, batch: TokenBatch, anchor: Anchor) -> TokenDivergence:
        return super().divergence(batch, self.remember(batch))


class LeavesLogprobsOnContext(Filled):
    def logprobs(self, batch: TokenBatch) -> Tensor:
        return torch.where(batch.mask, super().logprobs(batch), -1.0)


class StepsUphill(Filled):
    def step(self, batch: AdvantageBatch, objective: Objective, *, lr: float, anchor: Anchor | None) -> StepReport:
        return super().step(dataclasses.replace(batch, advantages=-batch.advantages), objective, lr=lr, anchor=anchor)


class WeighsMicroBatchesAlike(Filled):
    """Each row's loss divided by its own tokens (A14)."""

    def step(self, batch: AdvantageBatch, objective: Objective, *, lr: float, anchor: Anchor | None) -> StepReport:
        own = batch.batch.mask.sum(1, keepdim=True)
        fair = batch.batch.n_act / (own * batch.batch.n_rows)
        return super().step(dataclasses.replace(batch, advantages=batch.advantages * fair), objective, lr=lr, anchor=anchor)


class FirstRowCountsDouble(Filled):
    def step(self, batch: AdvantageBatch, objective: Objective, *, lr: float, anchor: Anchor | None) -> StepReport:
        advantages = batch.advantages.clone()
        advantages[0] *= 1.5
        report = super().step(dataclasses.replace(batch, advantages=advantages), objective, lr=lr, anchor=anchor)
        means = batch.advantages[batch.batch.mask] * self_logprobs(batch)
        return dataclasses.replace(report, loss=-float(means.sum()) / batch.batch.n_act)


def self_logprobs(batch: AdvantageBatch) -> Tensor:
    return batch.batch.behavior_logprobs[batch.batch.mask]


class IgnoresLr(Filled):
    def _apply(self, gradient_RV: Tensor, norm: float, lr: float) -> None:
        super()._apply(gradient_RV, norm, 0.05)


class ReadsPadding(Filled):
    """The width of the padded batch enters the step (A15)."""

    def step(self, batch: AdvantageBatch, objective: Objective, *, lr: float, anchor: Anchor | None) -> StepReport:
        return super().step(batch, objective, lr=lr * 24 / batch.batch.ids.shape[1], anchor=anchor)


class MultipliesByTheMask(Filled):
    def step(self, batch: AdvantageBatch, objective: Objective, *, lr: float, anchor: Anchor | None) -> StepReport:
        report = super().step(batch, objective, lr=lr, anchor=anchor)
        if bool((batch.advantages * batch.batch.mask).isnan().any()):
            self._masters_RV = self._masters_RV + 1.0 * torch.arange(V)
        return report


class ForgetsMoments(Filled):
    def restore(self, snapshot: Snapshot) -> None:
        super().restore(snapshot)
        self._avg_RV = torch.zeros_like(self._avg_RV)
        self._avg_sq_RV = torch.zeros_like(self._avg_sq_RV)


class ForgetsSteps(Filled):
    def restore(self, snapshot: Snapshot) -> None:
        taken = getattr(self, "_steps", 0)
        super().restore(snapshot)
        self._steps = max(taken, self._steps)


class KeepsNewRows(Filled):
    def restore(self, snapshot: Snapshot) -> None:
        kept = {name: self._masters_RV[i].clone() for name, i in self._names.items()}
        super().restore(snapshot)
        for name, row in kept.items():
            if name not in snapshot.weights:
                self.set(row_ids(name), row)


class RoundsMasters(Filled):
    def restore(self, snapshot: Snapshot) -> None:
        super().restore(snapshot)
        self._masters_RV = self._masters_RV.float().double()


class SharesSnapshots(Filled):
    def snapshot(self, *, moments: bool = True, lend: bool = False) -> Snapshot:
        real = super().snapshot(moments=moments)
        return dataclasses.replace(real, weights={n: self._masters_RV[i] for n, i in self._names.items()})

    def _apply(self, gradient_RV: Tensor, norm: float, lr: float) -> None:
        held = self._masters_RV
        super()._apply(gradient_RV, norm, lr)
        self._masters_RV = held.copy_(self._masters_RV)


class SharesServed(Filled):
    def weights(self) -> Weights:
        real = super().weights()
        return dataclasses.replace(real, tensors={n: self._masters_RV[i] for n, i in self._names.items()})

    def _apply(self, gradient_RV: Tensor, norm: float, lr: float) -> None:
        held = self._masters_RV
        super()._apply(gradient_RV, norm, lr)
        self._masters_RV = held.copy_(self._masters_RV)


class FingerprintsTheStart(Filled):
    def weights(self) -> Weights:
        return dataclasses.replace(super().weights(), fingerprint="0")


class BlendsFromTheWrongEnd(Filled):
    def blend(self, towards: Snapshot, origin: Snapshot, scale: float) -> None:
        super().blend(origin, towards, scale)


class BlendKeepsMoments(Filled):
    def blend(self, towards: Snapshot, origin: Snapshot, scale: float) -> None:
        super().blend(towards, origin, scale)
        moved = self.snapshot().weights
        self.restore(dataclasses.replace(towards, weights={n: moved[n] for n in towards.weights}))


class BlendRounds(Filled):
    def blend(self, towards: Snapshot, origin: Snapshot, scale: float) -> None:
        super().blend(towards, origin, scale)
        self._masters_RV = self._masters_RV + 1e-15


class PenaltyReadsAnchorAtZero(Filled):
    def step(self, batch: AdvantageBatch, objective: Objective, *, lr: float, anchor: Anchor | None) -> StepReport:
        if anchor is not None and not objective.needs_kl:
            objective = dataclasses.replace(objective, penalty=0.1)
        return super().step(batch, objective, lr=lr, anchor=anchor)


class IgnoresThePenalty(Filled):
    def step(self, batch: AdvantageBatch, objective: Objective, *, lr: float, anchor: Anchor | None) -> StepReport:
        if objective.needs_kl and anchor is None:
            raise MissingError("anchor")
        report = super().step(batch, dataclasses.replace(objective, penalty=0.0), lr=lr, anchor=anchor)
        if anchor is None:
            return report
        self_kl = float(self.divergence(batch.batch, anchor).kl_new_old.sum())
        return dataclasses.replace(report, diagnostics={**report.diagnostics, "kl_sum": self_kl})


class PenalisesTheOtherDirection(Filled):
    def step(self, batch: AdvantageBatch, objective: Objective, *, lr: float, anchor: Anchor | None) -> StepReport:
        there = None if anchor is None else float(self.divergence(batch.batch, anchor).kl_old_new.sum())
        report = super().step(batch, objective, lr=lr, anchor=anchor)
        if there is None or not objective.needs_kl:
            return report
        return dataclasses.replace(report, diagnostics={**report.diagnostics, "kl_sum": there})


class StepsWithoutAnAnchor(Filled):
    def step(self, batch: AdvantageBatch, objective: Objective, *, lr: float, anchor: Anchor | None) -> StepReport:
        if anchor is None:
            objective = dataclasses.replace(objective, penalty=0.0)
        return super().step(batch, objective, lr=lr, anchor=anchor)


class DecaysQuietly(Filled):
    def _apply(self, gradient_RV: Tensor, norm: float, lr: float) -> None:
        super()._apply(gradient_RV, norm, lr)
        self._masters_RV = self._masters_RV * (1 - lr * 1e-3)


class TrainsOnNan(Filled):
    def step(self, batch: AdvantageBatch, objective: Objective, *, lr: float, anchor: Anchor | None) -> StepReport:
        if bool(batch.advantages[batch.batch.mask].isnan().any()):
            batch = dataclasses.replace(batch, advantages=batch.advantages.nan_to_num())
        return super().step(batch, objective, lr=lr, anchor=anchor)


class StaysOutsideTheBall(Filled):
    def project(self, batch: TokenBatch, anchor: Anchor, *, radius: float) -> Anchor:
        return super().project(batch, anchor, radius=2 * radius)


class FollowsNobody(Filled):
    """A teacher's step that minimises the other divergence."""

    def step(self, batch: AdvantageBatch, objective: Objective, *, lr: float, anchor: Anchor | None) -> StepReport:
        objective = dataclasses.replace(objective, direction="new_old")
        return super().step(batch, objective, lr=lr, anchor=anchor)


class StepsByItself(Filled):
    """Every step a little different: no two runs agree."""

    taken = 0

    def _apply(self, gradient_RV: Tensor, norm: float, lr: float) -> None:
        StepsByItself.taken += 1
        super()._apply(gradient_RV, norm, lr * (1.0 + 1e-6 * StepsByItself.taken))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (IgnoresTemperature, "logprobs at temperature 0.6"),
        (SwapsTheDirections, "kl_new_old at temperature"),
        (MeasuresSampledTokensOnly, "kl_new_old at temperature"),
        (AnchorFollows, "kl_new_old at temperature"),
        (LeavesLogprobsOnContext, "not 0 where the mask is False"),
        (StepsUphill, "loss of the first step"),
        (WeighsMicroBatchesAlike, "loss of the first step"),
        (FirstRowCountsDouble, "order of the rows"),
        (IgnoresLr, "lr is not followed"),
        (ReadsPadding, "padding"),
        (MultipliesByTheMask, "padding"),
        (ForgetsMoments, "restore did not bring back .*moment"),
        (ForgetsSteps, "restore did not bring back .*steps"),
        (KeepsNewRows, "restore did not bring back .*master"),
        (RoundsMasters, "restore did not bring back .*master"),
        (SharesSnapshots, "a snapshot changed"),
        (SharesServed, "served tensor"),
        (FingerprintsTheStart, "fingerprint"),
        (BlendsFromTheWrongEnd, r"blend\(1\) is not the stepped state"),
        (BlendKeepsMoments, "moments or steps that are not the origin's"),
        (BlendRounds, r"blend\(1\) is not the stepped state"),
        (PenaltyReadsAnchorAtZero, "penalty 0 reads the anchor"),
        (IgnoresThePenalty, "kl_sum|does not act"),
        (PenalisesTheOtherDirection, "kl_sum"),
        (StaysOutsideTheBall, "from its own projection"),
        (FollowsNobody, "the loss of a teacher's step"),
        (StepsWithoutAnAnchor, "did not raise MissingError"),
        (DecaysQuietly, "advantages of zero moved"),
        (TrainsOnNan, "did not raise NonFiniteError"),
        (StepsByItself, "the second time|first time"),
    ],
)
def test_the_learner_contract_catches(fault: Callable[[], Learner], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        run_learner_contract(fault)


# ---- faulty codecs -----------------------------------------------------------------------------------------


class ParsesMarks(TableCodec):
    def encode(self, messages: Sequence[Message]) -> TokenIds:
        ids: list[int] = []
        for message in messages:
            head, *rest = message.content.split("<user>")
            ids += super().encode((dataclasses.replace(message, content=head),))[:-1]
            for part in rest:
                ids += super().encode((Message(role="user", content=part),))[:-1]
        return (*ids, self.vocabulary + 256 + 2)


class EncodesAgain(TableCodec):
    def encode(self, messages: Sequence[Message]) -> TokenIds:
        return super().encode([dataclasses.replace(m, ids=None) for m in messages])


class LosesTheSystem(TableCodec):
    def encode(self, messages: Sequence[Message]) -> TokenIds:
        return super().encode([m for m in messages if m.role != "system"])


class RemembersCalls(TableCodec):
    def encode(self, messages: Sequence[Message]) -> TokenIds:
        seen = self.__dict__.setdefault("seen", [])
        seen.append(messages)
        return (*super().encode(messages), len(seen) % 7)


class NeverEndsAReply(TableCodec):
    def reply(self, text: str) -> TokenIds:
        return super().reply(text)[:-1]


class SaysTheReplyTwice(TableCodec):
    def reply(self, text: str) -> TokenIds:
        return super().reply(text + text)


class ShowsTheEnd(TableCodec):
    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(ids) + "." * sum(i in self.end_ids for i in ids)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (ParsesMarks, "became control tokens"),
        (EncodesAgain, "not in a later prompt as they were sampled"),
        (LosesTheSystem, "encode lost it"),
        (RemembersCalls, "other ids for the same messages"),
        (ShowsTheEnd, "decode shows the end id"),
        (NeverEndsAReply, "is not its content and then one end id"),
        (SaysTheReplyTwice, "decodes to '0101'"),
    ],
)
def test_the_codec_contract_catches(fault: type[TableCodec], said: str) -> None:
    codec = fault(CODEC.symbols, has_end=True)
    with pytest.raises(AssertionError, match=said):
        check_codec(
            codec,
            texts=("hello", "world"),
            own_ids=(0, 2),
            control_texts=("<user>",),
            replies=("01",),
            control_ids=range(V + 256, V + 259),
        )


# ---- what is the table's own -------------------------------------------------------------------------------


def test_a_prompt_continues_with_the_ids_that_were_sampled() -> None:
    """Conversations are append-only: the next turn's prompt starts with the last one and what was said to
    it."""
    talk = (Message(role="system", content="s"), Message(role="user", content="q"))
    prompt = CODEC.encode(talk)
    later = CODEC.encode((*talk, Message(role="assistant", content="1", ids=(1, 3)), Message(role="user", content="r")))
    assert later[: len(prompt) + 2] == (*prompt, 1, 3)
    assert CODEC.decode((1, 3)) == "1"


def test_a_one_token_alphabet_has_no_end() -> None:
    codec = TableCodec(symbols_of("table:01"))
    assert (codec.vocabulary, codec.end_ids, codec.decode((1, 0))) == (2, frozenset(), "10")


@pytest.mark.parametrize("spec", ["table:", "table:0", "table:00", "tiny:64k", "01"])
def test_a_spec_that_names_no_alphabet_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="table:01"):
        symbols_of(spec)


def test_a_row_name_spells_its_ids() -> None:
    assert row_name((0, 1, 300)) == "row.00000001012c"
    assert row_ids(row_name((0, 1, 300))) == (0, 1, 300)


def test_the_learner_and_the_sampler_give_the_same_bits() -> None:
    learner, sampler = filled("one"), TableSampler({"a": CODEC})
    tokens = batch().batch

    async def scored() -> Sequence[tuple[float, ...]]:
        await sampler.publish("a", "promoted", learner.weights(), 1)
        asked = [
            ScoreRequest(agent="a", slot="promoted", prompt_ids=tuple(ids[:t]), ids=(ids[t],), temperature=0.7)
            for ids, mask in zip(tokens.ids.tolist(), tokens.mask.tolist(), strict=True)
            for t in range(len(ids))
            if mask[t]
        ]
        return await sampler.score(asked)

    got = [s[0] for s in asyncio.run(scored())]
    assert got == learner.logprobs(dataclasses.replace(tokens, temperature=0.7))[tokens.mask].tolist()


def test_a_sampled_law_is_met_in_frequency() -> None:
    """20,000 keyed draws from (.7, .2, .1): each share within 4 standard errors."""
    codec = TableCodec(symbols_of("table:abc"))
    learner, sampler = TableLearner("a", 3), TableSampler({"a": codec})
    learner.set((9,), [math.log(0.7), math.log(0.2), math.log(0.1)])
    n = 20_000

    async def drawn() -> list[int]:
        await sampler.publish("a", "promoted", learner.weights(), 0)
        asked = [
            Request(
                id=str(i),
                agent="a",
                slot="promoted",
                prompt_ids=(9,),
                max_new_tokens=1,
                temperature=1.0,
                key=key("freq", i),
            )
            for i in range(n)
        ]
        return [completion.ids[0] async for completion in sampler.submit(asked)]

    counts = torch.bincount(torch.tensor(asyncio.run(drawn())), minlength=3) / n
    for share, p in zip(counts.tolist(), (0.7, 0.2, 0.1), strict=True):
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / n)


def test_rows_made_after_a_snapshot_are_gone_when_it_is_restored() -> None:
    learner = TableLearner("a", V)
    empty = learner.snapshot()
    learner.step(batch(), Objective(weight=Dis(band=REASONING), penalty=0.0), lr=0.1, anchor=None)
    assert learner.snapshot().weights
    learner.restore(empty)
    assert learner.snapshot().weights == {} and learner.snapshot().moments == {}


def test_a_table_continues_bit_for_bit_from_a_snapshot_in_any_order() -> None:
    """A file may give the rows back in another order; the next step, whose gradient is clipped by its
    norm, must not care."""
    objective = Objective(weight=Dis(band=REASONING), penalty=0.0)
    loud = batch()
    loud = dataclasses.replace(loud, advantages=loud.advantages * 50)
    straight = filled("one")
    straight.step(loud, objective, lr=0.1, anchor=None)
    saved = straight.snapshot()
    straight.step(loud, objective, lr=0.1, anchor=None)
    turned = Snapshot(
        weights=dict(reversed(saved.weights.items())),
        moments=dict(reversed(saved.moments.items())),
        steps=saved.steps,
    )
    resumed = TableLearner("a", V)
    resumed.restore(turned)
    resumed.step(loud, objective, lr=0.1, anchor=None)
    assert resumed.weights().fingerprint == straight.weights().fingerprint


def test_policy_gradients_are_equal_for_one_two_and_four_micro_batches() -> None:
    """T7: the summed micro-batches are the one large batch, in weights and in the reported numbers."""
    reports: list[StepReport] = []
    snapshots: list[Snapshot] = []
    for micro_tokens in (None, 80, 1):
        learner = TableLearner("a", V, optimiser="sgd", micro_tokens=micro_tokens)
        anchor = learner.remember(batch().batch)
        learner.set(PROMPTS[0], [0.3, 0.0, -0.2, 0.1])
        reports.append(learner.step(batch(), Objective(weight=Dis(band=REASONING), penalty=0.4), lr=0.5, anchor=anchor))
        snapshots.append(learner.snapshot())
    for report, snapshot in zip(reports[1:], snapshots[1:], strict=True):
        assert report.loss == pytest.approx(reports[0].loss, abs=1e-12)
        assert report.grad_norm == pytest.approx(reports[0].grad_norm, abs=1e-12)
        assert report.diagnostics == pytest.approx(reports[0].diagnostics, abs=1e-12)
        assert snapshot.weights.keys() == snapshots[0].weights.keys()
        for name, row in snapshot.weights.items():
            assert torch.allclose(row, snapshots[0].weights[name], rtol=0, atol=1e-12)


def test_a_mask_over_the_batch_is_the_same_for_one_two_and_four_micro_batches() -> None:
    """M2PO drops by a mean over the whole optimiser batch; each micro-batch alone would drop other tokens."""
    away = TableLearner("a", V)
    for prompt, row in zip(PROMPTS, ([0.9, 0.0, -0.2, 0.1], [0.2, 0.0, 0.0, 0.0], [-0.6, 0.3, 0.0, 0.0]), strict=False):
        away.set(prompt, row)
    x = (away.logprobs(batch().batch) - batch().batch.behavior_logprobs)[batch().batch.mask]
    objective = Objective(weight=Is(), penalty=0.0, mask=SecondMoment(limit=float(x.square().mean()) / 2))
    reports: list[StepReport] = []
    snapshots: list[Snapshot] = []
    for micro_tokens in (None, 80, 1):
        learner = TableLearner("a", V, optimiser="sgd", micro_tokens=micro_tokens)
        learner.restore(away.snapshot())
        reports.append(learner.step(batch(), objective, lr=0.5, anchor=None))
        snapshots.append(learner.snapshot())
    assert 0.0 < reports[0].diagnostics["masked"] < batch().batch.n_act
    for report, snapshot in zip(reports[1:], snapshots[1:], strict=True):
        assert report.diagnostics == pytest.approx(reports[0].diagnostics, abs=1e-12)
        for name, row in snapshot.weights.items():
            assert torch.allclose(row, snapshots[0].weights[name], rtol=0, atol=1e-12)


def test_the_adamw_step_is_the_textbook_one() -> None:
    """Against torch's own AdamW over the dense table, three steps, with decay and a clip that bites."""
    learner = TableLearner("a", V, weight_decay=0.1, grad_clip=0.2)
    start = filled("one").snapshot()
    learner.restore(start)
    objective, data = Objective(weight=Dis(band=REASONING), penalty=0.0), batch()
    for _ in range(3):
        learner.step(data, objective, lr=0.05, anchor=None)
    names = sorted(
        {row_name(data.batch.ids[b, :t].tolist()) for b, t in data.batch.mask.nonzero().tolist()} | set(start.weights)
    )
    rows = torch.stack([start.weights.get(n, torch.zeros(V, dtype=torch.float64)) for n in names]).requires_grad_()
    optimiser = torch.optim.AdamW([rows], lr=0.05, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    tokens = data.batch
    for _ in range(3):
        optimiser.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for b, t in tokens.mask.nonzero().tolist():
            row = rows[names.index(row_name(tokens.ids[b, :t].tolist()))]
            log_p = torch.log_softmax(row, 0)[tokens.ids[b, t]]
            rho = (log_p - tokens.behavior_logprobs[b, t]).exp().detach()
            if 0.7 < rho < 6.0:
                loss = loss - rho * data.advantages[b, t] * log_p / tokens.n_act
        loss.backward()
        torch.nn.utils.clip_grad_norm_([rows], 0.2)
        optimiser.step()
    got = torch.stack([learner.snapshot().weights.get(n, torch.zeros(V, dtype=torch.float64)) for n in names])
    assert torch.allclose(got, rows.detach(), rtol=0, atol=1e-7)


def test_a_bf16_table_serves_its_rounded_rows_and_small_steps_hide_in_them() -> None:
    """T22: masters move at lr 1e-6, the served policy does not; what is measured is the served policy."""
    learner = TableLearner("a", V, dtype=torch.bfloat16)
    start = {n: t.bfloat16().double() for n, t in filled("one").snapshot().weights.items()}
    learner.restore(Snapshot(weights=start, moments={}, steps=0))
    data = batch()
    anchor, before = learner.remember(data.batch), learner.weights()
    for _ in range(5):
        learner.step(data, Objective(weight=Dis(band=REASONING), penalty=0.0), lr=1e-6, anchor=None)
    after, masters = learner.weights(), learner.snapshot().weights
    assert any(not torch.equal(masters[n], start[n]) for n in start)
    assert all(torch.equal(after.tensors[n], before.tensors[n]) for n in before.tensors)
    names = [(b, t) for b, t in data.batch.mask.nonzero().tolist()]
    old, new = (torch.stack([law(w, tuple(data.batch.ids[b, :t].tolist()), 1.0) for b, t in names]) for w in (before, after))
    want = (new.exp() * (new - old)).sum(1)
    assert torch.allclose(learner.divergence(data.batch, anchor).kl_new_old, want, rtol=0, atol=1e-12)


def test_a_batch_of_another_agent_or_vocabulary_is_refused() -> None:
    data = batch()
    with pytest.raises(DataError, match="batch of 'a' was given to the learner of 'b'"):
        TableLearner("b", V).logprobs(data.batch)
    with pytest.raises(DataError, match="id 3 cannot be sampled"):
        TableLearner("a", 3).logprobs(data.batch)


def test_an_anchor_of_another_batch_is_refused() -> None:
    learner, data = filled("one"), batch()
    with pytest.raises(DataError, match="remembered on another batch"):
        learner.divergence(data.batch, learner.remember(data.batch.rows([0, 1])))
    with pytest.raises(DataError, match="temperature"):
        learner.divergence(data.batch, learner.remember(dataclasses.replace(data.batch, temperature=2.0)))


def test_a_snapshot_without_its_moments_is_refused_and_changes_nothing() -> None:
    learner = filled("one")
    learner.step(batch(), Objective(weight=Dis(band=REASONING), penalty=0.0), lr=0.1, anchor=None)
    before = learner.weights().fingerprint
    torn = dataclasses.replace(filled("two").snapshot(), steps=3)
    with pytest.raises(MissingError, match="after 3 steps has no 'exp_avg"):
        learner.restore(torn)
    assert learner.weights().fingerprint == before


def test_rows_that_do_not_fit_are_refused() -> None:
    sampler = TableSampler({"a": CODEC})
    with pytest.raises(PublishError, match="rows have 4 logits"):
        asyncio.run(sampler.publish("a", "promoted", TableLearner_with_row("b", 3).weights(), 1))
    with pytest.raises(DataError, match="rows have 4 logits"):
        TableLearner("a", V).restore(TableLearner_with_row("b", 3).snapshot())
    with pytest.raises(DataError, match="finite logits"):
        TableLearner("a", V).set((1,), [0.0, float("nan"), 0.0, 0.0])


def TableLearner_with_row(agent: str, vocabulary: int) -> TableLearner:
    learner = TableLearner(agent, vocabulary)
    learner.set((1,), [1.0] * vocabulary)
    return learner


def test_twins_in_one_submit_and_empty_messages_are_refused() -> None:
    sampler = TableSampler({"a": CODEC})
    asyncio.run(sampler.publish("a", "promoted", filled("one").weights(), 1))
    ask = Request(
        id="r",
        agent="a",
        slot="promoted",
        prompt_ids=PROMPTS[0],
        max_new_tokens=1,
        temperature=1.0,
        key=key("r"),
    )
    with pytest.raises(DataError, match="'r' appears twice"):
        sampler.submit([ask, ask])
    with pytest.raises(DataError, match="asks for 0 new tokens"):
        sampler.submit([dataclasses.replace(ask, max_new_tokens=0)])
    with pytest.raises(MissingError, match="no agent 'z'"):
        sampler.submit([dataclasses.replace(ask, agent="z")])
    with pytest.raises(MissingError, match="slot 'start' of 'a' is empty"):
        sampler.submit([dataclasses.replace(ask, slot="start")])


def test_a_step_whose_weights_overflow_says_so() -> None:
    learner = TableLearner("a", V, optimiser="sgd", grad_clip=None)
    with pytest.raises(NonFiniteError, match="restore the last snapshot"):
        learner.step(batch(), Objective(weight=Dis(band=REASONING), penalty=0.0), lr=math.inf, anchor=None)


def test_a_reply_of_other_letters_is_refused() -> None:
    with pytest.raises(DataError, match="'x' of the reply '0x1'"):
        CODEC.reply("0x1")


def test_parity_keeps_the_contract_of_an_env() -> None:
    env = ParityEnv(ParityOptions(bits=2, prompts=300), n_agents=3)
    check_env(env)
    tasks = [env.task(i) for i in range(300)]
    assert len({task.prompt for task in tasks}) == 300, "equal prompts would be dropped from the prompt sets"
    for task in tasks:
        bits = "".join(view.removeprefix("bits: ") for view in task.views)
        assert env.grade(task, str(bits.count("1") % 2)) == Grade(1.0)
        assert env.grade(task, str((bits.count("1") + 1) % 2)).reward == 0.0
    assert {task.views[2] for task in tasks} == {"bits: 0 0", "bits: 0 1", "bits: 1 0", "bits: 1 1"}


def test_two_tables_learn_parity_in_seconds() -> None:
    """From the uniform law, on one batch of 64 prompts for both agents a stage; the accuracy is enumerated, not sampled."""
    env, seed = ParityEnv(ParityOptions(), n_agents=2), 1
    codec = TableCodec(symbols_of("table:01"))
    learners = {name: TableLearner(name, 2) for name in "ab"}
    sampler = TableSampler(dict.fromkeys("ab", codec))
    protocol = Chain(("a", "b"), ChainOptions(sees="previous"))
    seats = tuple(Seat(agent=n, system="", max_new_tokens=1, temperature=1.0, codec=codec) for n in "ab")
    table = Table(
        seats=seats,
        protocol=protocol,
        sampler=sampler,
        grade=lambda asked: [Scored(reward=env.grade(task, answer).reward) for task, answer in asked],
        normalise=env.normalise,
    )

    async def learn() -> float:
        for stage in range(40):
            for name, learner in learners.items():
                await sampler.publish(name, "promoted", learner.weights(), stage)
            versions = dict.fromkeys("ab", stage)
            plays = [Play(task=env.task(stage * 64 + i)) for i in range(64)]
            episodes = await table.play(plays, address=(seed, stage), versions=versions)
            advantages = batch_mean(torch.tensor([e.reward for e in episodes]), [e.group for e in episodes]).values
            gains = {e.id: float(a) for e, a in zip(episodes, advantages, strict=True)}
            for name, learner in learners.items():
                rows = [row for e in episodes for row in trajectories(e, name)]
                data = with_advantages(token_batch(rows, temperature=1.0), gains, team=versions)
                learner.step(data, Objective(weight=Dis(band=REASONING), penalty=0.0), lr=0.3, anchor=None)
        right = 0.0
        for bits in itertools.product("01", repeat=2):
            task = Task(id="t", env="parity", prompt="p", answer="", views=tuple(f"bits: {b}" for b in bits))
            first = law2(learners["a"].weights(), codec.encode(protocol.messages(task, (), 0, "")))
            for said in range(2):
                turn = Turn(kind="observation", agent="a", seat=0, text=str(said))
                second = law2(learners["b"].weights(), codec.encode(protocol.messages(task, (turn,), 1, "")))
                right += 0.25 * first[said] * second[(int(bits[0]) + int(bits[1])) % 2]
        return right

    assert asyncio.run(learn()) > 0.95


def law2(weights: Weights, ids: TokenIds) -> list[float]:
    row = weights.tensors.get(row_name(ids), torch.zeros(2))
    return torch.softmax(row, 0).tolist()


def test_an_anchor_is_the_tables_own() -> None:
    learner, data = filled("one"), batch()
    assert isinstance(learner.remember(data.batch), TableAnchor)

    class Foreign:
        logprobs = torch.zeros(1, 1)

    with pytest.raises(DataError, match="Foreign is no anchor of a table"):
        learner.divergence(data.batch, Foreign())
