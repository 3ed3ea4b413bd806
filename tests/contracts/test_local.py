"""The torch engine against the contracts and the faults that its kind is known for (PITFALLS a, b; T7, T11, T20, T22)."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.core import divergence
from baton.core.batching import micro_batches, token_batch, with_advantages
from baton.core.coupling import inverse_cdf
from baton.core.keyed import key, uniforms
from baton.core.losses import TIGHT, Dis, Gspo, Is, Objective, Ppo, SecondMoment, SequenceRatio, SequenceTrust, binary_kl
from baton.engines import models
from baton.engines.engine import Completion, Request, ScoreRequest
from baton.engines.local import (
    LocalLearner,
    LocalSampler,
    auto_compute,
    auto_dtype,
    laws,
    noise_floor,
    share_changed,
)
from baton.engines.local import sampler as local_sampler
from baton.engines.local.net import unembed
from baton.errors import DataError, MissingError, ModelError, NonFiniteError, PublishError, UnsupportedError
from baton.testing import check_learner, check_sampler
from baton.types import AdvantageBatch, Message, Slot, TokenBatch, TokenIds, Trajectory, Weights

LR = 3e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.resolve("tiny:30k", cache=tmp_path_factory.mktemp("models"))


def sampler_of(folder: Path, **options: object) -> LocalSampler:
    return LocalSampler({"a": folder}, dtype=options.pop("dtype", torch.float32), **options)  # type: ignore[arg-type]


def learner_of(folder: Path, **options: object) -> LocalLearner:
    return LocalLearner("a", folder, serve_dtype=options.pop("serve_dtype", torch.float32), **options)  # type: ignore[arg-type]


def prompts_of(sampler: LocalSampler, count: int, *, equal: bool = False) -> list[TokenIds]:
    draw = random.Random(count)
    tables = [" ".join(str(draw.randrange(8)) for _ in range(4 if equal else 1 + i % 5)) for i in range(count)]
    return [sampler.codec("a").encode([Message(role="user", content=f"t: {table}")]) for table in tables]


def requests_of(
    prompts: Sequence[TokenIds], *, tokens: int, temperature: float = 1.0, slot: Slot = "promoted"
) -> list[Request]:
    return [
        Request(
            id=f"r{i}",
            agent="a",
            slot=slot,
            prompt_ids=prompt,
            max_new_tokens=tokens,
            temperature=temperature,
            key=key("test", i),
        )
        for i, prompt in enumerate(prompts)
    ]


def drawn(sampler: LocalSampler, requests: Sequence[Request]) -> list[Completion]:
    async def gather() -> list[Completion]:
        return [completion async for completion in sampler.submit(requests)]

    return asyncio.run(gather())


def batch_of(prompts: Sequence[TokenIds], said: Sequence[Completion], *, temperature: float = 1.0) -> TokenBatch:
    rows = [
        Trajectory(
            episode_id=f"e{i}",
            group=f"g{i // 2}",
            agent="a",
            segment=0,
            ids=prompt + one.ids,
            mask=(False,) * len(prompt) + (True,) * len(one.ids),
            behavior_logprobs=(0.0,) * len(prompt) + one.logprobs,
            versions=(-1,) * len(prompt) + (one.version,) * len(one.ids),
        )
        for i, (prompt, one) in enumerate(zip(prompts, said, strict=True))
    ]
    return token_batch(rows, temperature=temperature)


def played(
    folder: Path, *, count: int = 12, tokens: int = 5, temperature: float = 1.0, dtype: torch.dtype = torch.float32
) -> AdvantageBatch:
    sampler = sampler_of(folder, dtype=dtype)
    prompts = prompts_of(sampler, count)
    said = drawn(sampler, requests_of(prompts, tokens=tokens, temperature=temperature))
    batch = batch_of(prompts, said, temperature=temperature)
    scores = {name: (-1.0) ** i * (1 + i % 3) for i, name in enumerate(batch.episode_ids)}
    return with_advantages(batch, scores, team={"a": 0})


def gap(learner: LocalLearner, batch: TokenBatch) -> float:
    return float((learner.logprobs(batch) - batch.behavior_logprobs).abs()[batch.mask].max())


def plain_law(folder: Path):
    """The judge: transformers' own whole-model forward of one unpadded prompt."""
    model = models.load(folder, dtype=torch.float32)
    names = dict(model.named_parameters())

    def law(weights: Weights, prompt: TokenIds, temperature: float) -> Tensor:
        with torch.no_grad():
            for name, tensor in weights.tensors.items():
                names[name].copy_(tensor)
            logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
        return torch.log_softmax(logits.double() / temperature, dim=-1)

    return law


# ---- contracts -------------------------------------------------------------------------------------------------


def test_the_sampler_keeps_the_contract(folder: Path):
    learner = learner_of(folder)
    first = learner.weights()
    batch = played(folder)
    for _ in range(5):
        learner.step(batch, Objective(weight=Dis(band=TIGHT), penalty=0.0), lr=LR, anchor=None)
    check_sampler(
        lambda: sampler_of(folder, batch_size=5),
        agent="a",
        weights=first,
        other=learner.weights(),
        law=plain_law(folder),
        prompts=prompts_of(sampler_of(folder), 4),
        end_ids={5},
        tolerance=2e-5,
    )


def test_the_learner_keeps_the_contract(folder: Path):
    for micro_tokens in (24, 4096):
        check_learner(
            lambda micro_tokens=micro_tokens: learner_of(folder, micro_tokens=micro_tokens),
            batch=played(folder, count=6, tokens=3),
            law=plain_law(folder),
            lr=1e-3,
            tolerance=2e-5,
        )


# ---- one law on both sides -------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_sampler_and_learner_agree_at_any_temperature_batch_and_micro_batch(temperature: float, folder: Path):
    for batch_size in (1, 5, 64):
        sampler = sampler_of(folder, batch_size=batch_size)
        prompts = prompts_of(sampler, 12)
        said = drawn(sampler, requests_of(prompts, tokens=6, temperature=temperature))
        batch = batch_of(prompts, said, temperature=temperature)
        for micro_tokens in (1, 40, 4096):
            assert gap(learner_of(folder, micro_tokens=micro_tokens), batch) < 1e-4
        if temperature != 1.0:
            assert gap(learner_of(folder), dataclasses.replace(batch, temperature=1.0)) > 1e-2


def test_bf16_serving_agrees_within_its_bound_and_is_not_fp32(folder: Path):
    batch = played(folder, dtype=torch.bfloat16).batch
    served = learner_of(folder, serve_dtype=torch.bfloat16)
    difference = (served.logprobs(batch) - batch.behavior_logprobs).abs()[batch.mask]
    assert float(difference.mean()) < 0.04
    assert gap(learner_of(folder), batch) > gap(served, batch) or gap(served, batch) < 1e-6


def test_scoring_a_submit_gives_its_log_probabilities_back_bit_for_bit(folder: Path):
    sampler = sampler_of(folder, batch_size=5)
    prompts = prompts_of(sampler, 6) * 8
    requests = requests_of(prompts, tokens=7)
    said = drawn(sampler, requests)
    assert len({len(one.ids) for one in said}) > 1, "rows of different lengths leave the batch at different steps"
    scored = asyncio.run(
        sampler.score(
            [
                ScoreRequest(agent="a", slot="promoted", prompt_ids=request.prompt_ids, ids=one.ids, temperature=1.0)
                for request, one in zip(requests, said, strict=True)
            ]
        )
    )
    assert [tuple(scores) for scores in scored] == [one.logprobs for one in said]


def test_a_shared_prefill_draws_what_separate_ones_draw(folder: Path):
    shared, apart = sampler_of(folder, batch_size=64), sampler_of(folder, batch_size=1)
    for tokens in (1, 5):
        requests = requests_of([p for p in prompts_of(shared, 3) for _ in range(4)], tokens=tokens)
        together, alone = drawn(shared, requests), drawn(apart, requests)
        assert [one.ids for one in together] == [one.ids for one in alone]
        for one, other in zip(together, alone, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_prompt_beside_a_longer_one_draws_what_it_draws_alone(folder: Path):
    sampler = sampler_of(folder)
    short, long = (sampler.codec("a").encode([Message(role="user", content=text)]) for text in ("a", "b" * 40))
    requests = requests_of([short, long], tokens=6)
    assert [one.ids for one in drawn(sampler, requests)] == [drawn(sampler, [request])[0].ids for request in requests]


def test_tokenizer_settings_and_thread_count_stay_as_they_were(folder: Path):
    sampler = sampler_of(folder)
    rendering = sampler.codec("a")._rendering
    before = (rendering.padding_side, rendering.truncation_side, torch.get_num_threads(), torch.get_rng_state().tolist())
    drawn(sampler, requests_of(prompts_of(sampler, 3), tokens=3))
    assert before == (
        rendering.padding_side,
        rendering.truncation_side,
        torch.get_num_threads(),
        torch.get_rng_state().tolist(),
    )


def test_draws_follow_the_law(folder: Path):
    """Chi-square of 4,000 first tokens of one prompt against the softmax that transformers gives."""
    from scipy.stats import chisquare

    sampler = sampler_of(folder, batch_size=4000)
    prompt = prompts_of(sampler, 1)[0]
    said = drawn(sampler, requests_of([prompt] * 4000, tokens=1, temperature=0.7))
    law = plain_law(folder)(learner_of(folder).weights(), prompt, 0.7).exp()
    seen = Counter(one.ids[0] for one in said)
    common = [i for i in range(len(law)) if float(law[i]) * 4000 > 8]
    expected = [float(law[i]) * 4000 for i in common] + [float(law.sum() - law[common].sum()) * 4000]
    observed = [seen[i] for i in common] + [4000 - sum(seen[i] for i in common)]
    total = sum(expected)
    assert chisquare(observed, [4000 * e / total for e in expected]).pvalue > 1e-3


def test_the_draw_is_the_inverse_cdf_at_its_edges():
    law = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]).log()
    cases = {0.0: 1, 0.2499: 1, 0.25: 3, 0.7499: 3, 0.75: 4, 0.9999999: 4, 1.0: 4, 1.5: 4}
    for u, token in cases.items():
        assert int(inverse_cdf(law.exp(), torch.tensor([u], dtype=torch.float64))) == token, u
    with pytest.raises(NonFiniteError):
        inverse_cdf(torch.full((1, 3), math.nan), torch.tensor([0.5], dtype=torch.float64))


def test_each_token_uses_the_uniform_at_its_own_index(folder: Path):
    """Token i is the inverse CDF at uniform i of the request's key: redone here with a loop in double precision."""
    sampler = sampler_of(folder)
    prompt = prompts_of(sampler, 1)[0]
    (said,) = drawn(sampler, requests_of([prompt], tokens=5))
    law, weights = plain_law(folder), learner_of(folder).weights()
    ids: list[int] = []
    for u in uniforms([key("test", 0)], 5)[0][: len(said.ids)]:
        running = 0.0
        for token, p in enumerate(law(weights, (*prompt, *ids), 1.0).exp().tolist()):
            running += p
            if running > u:
                ids.append(token)
                break
    assert tuple(ids) == said.ids


# ---- what is stored is what was sampled ------------------------------------------------------------------------


def test_an_answer_that_does_not_end_is_stored_as_sampled_and_called_cut(folder: Path):
    sampler = sampler_of(folder)
    said = drawn(sampler, requests_of(prompts_of(sampler, 300), tokens=3))
    (end,) = sampler.codec("a").end_ids
    assert {one.finish_reason for one in said} == {"stop", "length"}
    for one in said:
        stops = [i for i, token in enumerate(one.ids) if token == end]
        assert len(one.ids) == len(one.logprobs) <= 3
        assert (one.finish_reason == "stop") == bool(stops) and stops in ([], [len(one.ids) - 1])
        assert one.finish_reason == "stop" or len(one.ids) == 3


def test_a_generation_config_with_processors_changes_nothing(folder: Path, tmp_path: Path):
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text(
        '{"eos_token_id": 5, "temperature": 0.1, "top_k": 1, "suppress_tokens": [20, 21], "repetition_penalty": 9.0}'
    )
    plain, processed = sampler_of(folder), sampler_of(tmp_path / "m")
    requests = requests_of(prompts_of(plain, 8), tokens=4)
    assert drawn(plain, requests) == drawn(processed, requests)


def padded_vocabulary(folder: Path, target: Path) -> Path:
    """The same model with 26 rows more in its embedding than the tokenizer has tokens; they would win every argmax."""
    import json

    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = torch.cat([embedding, 5 * embedding[20:46]])
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "vocab_size": 128}))
    return target


def test_vocabulary_rows_without_a_token_are_never_drawn_and_count_nowhere(folder: Path, tmp_path: Path):
    padded = padded_vocabulary(folder, tmp_path / "m")
    plain, sampler = sampler_of(folder), sampler_of(padded)
    requests = requests_of(prompts_of(plain, 10), tokens=4)
    expected, said = drawn(plain, requests), drawn(sampler, requests)
    assert [one.ids for one in said] == [one.ids for one in expected]
    batch = batch_of([r.prompt_ids for r in requests], said)
    learner = learner_of(padded)
    assert gap(learner, batch) < 1e-4
    anchor = learner.remember(batch)
    advantages = with_advantages(batch, dict.fromkeys(batch.episode_ids, 1.0), team={"a": 0})
    learner.step(advantages, Objective(weight=Dis(band=TIGHT), penalty=0.1), lr=1e-3, anchor=anchor)
    moved = learner.divergence(batch, anchor)
    assert bool(torch.isfinite(moved.of("max")).all()) and float(moved.of("max").max()) > 0


# ---- steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [Dis(band=TIGHT), Ppo(), SequenceRatio()])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_micro_batches_add_up_to_the_gradient_of_one_large_batch(
    weight: Dis | Ppo | SequenceRatio, penalty: float, folder: Path
):
    batch = played(folder, count=8)
    objective = Objective(weight=weight, penalty=penalty)
    gradients: list[Tensor] = []
    away = learner_of(folder)
    start = away.snapshot()
    away.step(batch, objective, lr=1e-3, anchor=away.remember(batch.batch))  # so that the penalty pulls
    for micro_tokens in (4096, 60, 30, 1):
        assert micro_tokens == 4096 or len(micro_batches(batch.batch, max_tokens=micro_tokens)) > 1
        learner = learner_of(folder, micro_tokens=micro_tokens, grad_clip=math.inf)
        anchor = learner.remember(batch.batch)
        learner.blend(away.snapshot(), start, 1.0)
        grabbed: list[Tensor] = []
        learner._optimizer.register_step_pre_hook(
            lambda optimizer, *_, grabbed=grabbed: grabbed.extend(
                p.grad.flatten() for p in optimizer.param_groups[0]["params"]
            )
        )
        learner.step(batch, objective, lr=1e-3, anchor=anchor)
        gradients.append(torch.cat(grabbed))
    for other in gradients[1:]:
        assert float((other - gradients[0]).abs().max()) < 1e-6 * max(1.0, float(gradients[0].abs().max()))


@pytest.mark.parametrize(
    "objective",
    [
        Objective(weight=Gspo(), penalty=0.0),
        Objective(weight=Is(), penalty=0.0, mask=SequenceTrust(), level="sequence"),
        Objective(weight=Is(), penalty=0.0, mask=SecondMoment()),
    ],
)
def test_masks_and_levels_do_not_depend_on_the_micro_batch_size(objective: Objective, folder: Path):
    """A mask over the whole batch (the limit is set to bite) takes a forward of its own, before the first gradient."""
    batch = played(folder, count=8)
    away = learner_of(folder)
    start = away.snapshot()
    away.step(batch, Objective(weight=Dis(band=TIGHT), penalty=0.0), lr=1e-2, anchor=None)
    now, old, mask = away.logprobs(batch.batch), batch.batch.behavior_logprobs, batch.batch.mask
    if isinstance(objective.mask, SecondMoment):
        limit = float((now - old)[mask].square().mean()) / 2
        objective = dataclasses.replace(objective, mask=SecondMoment(limit=limit))
    elif isinstance(objective.mask, SequenceTrust):
        means = (binary_kl(now, old, mask).sum(1) / mask.sum(1)).sort().values
        objective = dataclasses.replace(objective, mask=SequenceTrust(limit=float(means[3] + means[4]) / 2))
    steps: list[tuple[Tensor, float]] = []
    for micro_tokens in (4096, 30, 1):
        learner = learner_of(folder, micro_tokens=micro_tokens)
        learner.blend(away.snapshot(), start, 1.0)
        report = learner.step(batch, objective, lr=1e-3, anchor=None)
        dropped = report.diagnostics.get("masked", 1.0)
        assert 0.0 < dropped < batch.batch.n_act
        steps.append((torch.tensor([report.loss, report.grad_norm]), dropped))
    for numbers, dropped in steps[1:]:
        assert torch.allclose(numbers, steps[0][0], rtol=1e-4, atol=1e-6) and dropped == steps[0][1]


def test_the_clip_bounds_the_whole_gradient_and_the_report_shows_it_before(folder: Path):
    batch = played(folder)
    objective = Objective(weight=Dis(band=TIGHT), penalty=0.0)
    seen: list[float] = []
    for clip in (math.inf, 1e-3):
        learner = learner_of(folder, grad_clip=clip)
        learner._optimizer.register_step_pre_hook(
            lambda optimizer, *_: seen.append(
                math.sqrt(sum(float(p.grad.double().square().sum()) for p in optimizer.param_groups[0]["params"]))
            )
        )
        report = learner.step(batch, objective, lr=1e-3, anchor=None)
        seen.append(report.grad_norm)
    free, reported, clipped, before = seen
    assert reported == before == pytest.approx(free, rel=1e-5) and clipped == pytest.approx(1e-3, rel=1e-3)


def test_the_same_run_gives_the_same_bits_whatever_the_timing(folder: Path):
    """T20: draws, log-probabilities and weights of two runs, one of which is read slowly beside another submit."""

    async def run(*, slowly: bool) -> tuple[list[Completion], str, str]:
        sampler, learner = sampler_of(folder, batch_size=4), learner_of(folder, micro_tokens=60)
        prompts = prompts_of(sampler, 10)
        requests = requests_of(prompts, tokens=5)

        async def read() -> list[Completion]:
            said: list[Completion] = []
            async for completion in sampler.submit(requests):
                said.append(completion)
                if slowly:
                    await asyncio.sleep(random.Random(len(said)).random() / 500)
            return said

        other = requests_of(prompts[::-1], tokens=3, temperature=0.8)
        said, _ = await asyncio.gather(read(), read_all(sampler, other) if slowly else asyncio.sleep(0))
        batch = with_advantages(batch_of(prompts, said), {f"e{i}": (-1.0) ** i for i in range(10)}, team={"a": 0})
        anchor = learner.remember(batch.batch)
        for _ in range(2):
            learner.step(batch, Objective(weight=Dis(band=TIGHT), penalty=0.1), lr=LR, anchor=anchor)
        proof = await sampler.publish("a", "candidate", learner.weights(), 1)
        return said, learner.weights().fingerprint, proof.fingerprint

    quick, slow = asyncio.run(run(slowly=False)), asyncio.run(run(slowly=True))
    assert quick == slow and quick[1] == quick[2]


async def read_all(sampler: LocalSampler, requests: Sequence[Request]) -> list[Completion]:
    return [completion async for completion in sampler.submit(requests)]


def test_tied_weights_stay_tied_and_count_once(folder: Path):
    learner = learner_of(folder, serve_dtype=torch.bfloat16)
    batch = played(folder)
    learner.step(batch, Objective(weight=Dis(band=TIGHT), penalty=0.0), lr=LR, anchor=None)
    learner.restore(learner.snapshot())
    for net in (learner._train, learner._serve):
        assert net.head.weight is net.base.embed_tokens.weight
    assert "lm_head.weight" not in learner.weights().tensors and "lm_head.weight" not in learner.snapshot().weights
    assert learner.parameters == models.describe(folder).parameters


def test_an_anchor_of_another_batch_temperature_or_engine_is_refused(folder: Path):
    learner, batch = learner_of(folder), played(folder).batch
    anchor = learner.remember(batch)
    for wrong in (batch.rows(list(range(batch.n_rows))[::-1]), dataclasses.replace(batch, temperature=0.9)):
        with pytest.raises(DataError, match="remembered on another batch"):
            learner.divergence(wrong, anchor)

    class Other:
        logprobs = anchor.logprobs

    with pytest.raises(DataError, match="another engine"):
        learner.divergence(batch, Other())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_anchors_of_one_policy_share_its_head_and_those_of_another_do_not(dtype: torch.dtype, folder: Path):
    learner, batch = learner_of(folder, serve_dtype=dtype), played(folder)
    start = learner.snapshot()
    one, two = learner.remember(batch.batch), learner.remember(batch.batch)
    before = one.weight.clone()
    assert one.weight.data_ptr() == two.weight.data_ptr() != learner._serve.head.weight.data_ptr()
    learner.step(batch, Objective(weight=Dis(band=TIGHT), penalty=0.0), lr=LR, anchor=None)
    moved = learner.remember(batch.batch)
    assert torch.equal(moved.weight, learner._serve.head.weight) and torch.equal(one.weight, before)
    assert not torch.equal(moved.weight, before)
    learner.restore(start)
    assert torch.equal(learner.remember(batch.batch).weight, before)


def test_a_weight_that_became_infinite_is_reported_and_restored_away(folder: Path):
    learner, batch = learner_of(folder), played(folder)
    before = learner.snapshot()
    with pytest.raises(NonFiniteError, match="weight"):
        learner.step(batch, Objective(weight=Dis(band=TIGHT), penalty=0.0), lr=math.inf, anchor=None)
    learner.restore(before)
    assert learner.weights().fingerprint == learner_of(folder).weights().fingerprint


def test_a_snapshot_that_lacks_something_is_refused(folder: Path):
    learner, batch = learner_of(folder), played(folder)
    learner.step(batch, Objective(weight=Dis(band=TIGHT), penalty=0.0), lr=LR, anchor=None)
    whole = learner.snapshot()
    name = min(whole.weights)
    few = {key_: value for key_, value in whole.weights.items() if key_ != name}
    with pytest.raises(MissingError, match=name):
        learner.restore(dataclasses.replace(whole, weights=few))
    with pytest.raises(MissingError, match="moments"):
        learner.restore(dataclasses.replace(whole, moments={}))


def test_autocast_trains_near_the_fp32_step_and_reports_served_fp32_laws(folder: Path):
    batch = played(folder)
    objective = Objective(weight=Dis(band=TIGHT), penalty=0.0)
    exact, fast = learner_of(folder), learner_of(folder, compute="bfloat16")
    assert torch.equal(exact.logprobs(batch.batch), fast.logprobs(batch.batch)), "autocast is for training forwards only"
    norms = [learner.step(batch, objective, lr=1e-3, anchor=None).grad_norm for learner in (exact, fast)]
    assert norms[1] == pytest.approx(norms[0], rel=0.05) and norms[0] != norms[1]


# ---- serving dtype ---------------------------------------------------------------------------------------------


def test_five_small_steps_of_a_bf16_model_are_judged_as_served(folder: Path, tmp_path: Path):
    """T22: the gate's divergence is that of the rounded weights, and the served files give it again."""
    start = learner_of(folder, serve_dtype=torch.bfloat16).weights()
    models.save(tmp_path / "start", start, source=folder)
    batch = played(tmp_path / "start", dtype=torch.bfloat16)
    learner = learner_of(tmp_path / "start", serve_dtype=torch.bfloat16)
    assert learner.weights().fingerprint == start.fingerprint
    anchor = learner.remember(batch.batch)
    for _ in range(5):
        learner.step(batch, Objective(weight=Dis(band=TIGHT), penalty=0.0), lr=1e-6, anchor=None)
    served = learner.divergence(batch.batch, anchor)

    masters = learner_of(tmp_path / "start")
    master_anchor = masters.remember(batch.batch)
    masters.restore(learner.snapshot())
    of_masters = masters.divergence(batch.batch, master_anchor)
    changed = share_changed(start, learner.weights())
    assert 0.0 < changed < 0.2, "steps of 1e-6 move few weights across a bf16 boundary"
    assert share_changed(learner_of(tmp_path / "start").weights(), masters.weights()) > 0.9
    assert not torch.allclose(served.kl_new_old, of_masters.kl_new_old, rtol=0.2)

    models.save(tmp_path / "end", learner.weights(), source=folder)
    before = learner_of(tmp_path / "start", serve_dtype=torch.bfloat16).remember(batch.batch)
    again = learner_of(tmp_path / "end", serve_dtype=torch.bfloat16).divergence(batch.batch, before)
    assert torch.equal(again.kl_new_old, served.kl_new_old) and torch.equal(again.kl_old_new, served.kl_old_new)


def test_served_weights_are_the_masters_rounded_to_nearest(folder: Path):
    learner, batch = learner_of(folder, serve_dtype=torch.bfloat16), played(folder)
    learner.step(batch, Objective(weight=Dis(band=TIGHT), penalty=0.0), lr=LR, anchor=None)
    for name, master in learner.snapshot().weights.items():
        assert torch.equal(learner.weights().tensors[name], master.bfloat16())


def test_the_noise_floor_is_what_layout_alone_moves(folder: Path):
    batch = played(folder, count=24).batch
    q99, mean = noise_floor(learner_of(folder), batch)
    assert 0.0 < q99 < 1e-5 and abs(mean) <= q99
    assert noise_floor(learner_of(folder, serve_dtype=torch.bfloat16), batch)[0] < 0.05


def test_a_divergence_does_not_depend_on_how_it_is_chunked(folder: Path, monkeypatch: pytest.MonkeyPatch):
    batch = played(folder)
    learner = learner_of(folder)
    anchor = learner.remember(batch.batch)
    learner.step(batch, Objective(weight=Dis(band=TIGHT), penalty=0.0), lr=LR, anchor=None)
    whole = learner.divergence(batch.batch, anchor)
    monkeypatch.setattr(laws, "CHUNK", 250)
    pieces = learner.divergence(batch.batch, anchor)
    assert torch.allclose(whole.kl_new_old, pieces.kl_new_old, rtol=1e-4, atol=1e-6)
    assert float(whole.of("max").max()) > 1e-3


# ---- slots -----------------------------------------------------------------------------------------------------


def test_a_copy_that_skips_or_corrupts_a_tensor_is_seen_in_the_proof(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """T11: the proof is made from what is held, not from what was sent."""
    sampler = sampler_of(folder)
    weights = learner_of(folder).weights()
    moved = {name: tensor + 1 for name, tensor in weights.tensors.items()}
    sums = models.checksums(moved)
    sent = Weights(tensors=moved, checksums=sums, fingerprint=models.fingerprint(sums))
    copy = Tensor.copy_
    small = min(tensor.numel() for tensor in moved.values())

    def skip(self: Tensor, source: Tensor) -> Tensor:
        return self if self.numel() == small else copy(self, source)

    def corrupt(self: Tensor, source: Tensor) -> Tensor:
        copy(self, source).view(-1)[-1] *= 1.0000002
        return self

    for fault in (skip, corrupt):
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "copy_", fault)
            proof = asyncio.run(sampler.publish("a", "promoted", sent, 2))
        assert proof.fingerprint != sent.fingerprint, fault.__name__
    assert asyncio.run(sampler.publish("a", "promoted", sent, 3)).fingerprint == sent.fingerprint


def test_weights_of_another_dtype_shape_or_name_do_not_land(folder: Path):
    sampler = sampler_of(folder)
    weights = learner_of(folder).weights()
    before = drawn(sampler, requests_of(prompts_of(sampler, 2), tokens=2))
    name = max(weights.tensors)
    for wrong in (
        {**weights.tensors, name: weights.tensors[name].bfloat16()},
        {**weights.tensors, name: weights.tensors[name][:-1]},
        {**weights.tensors, "extra": torch.zeros(1)},
    ):
        with pytest.raises(PublishError):
            asyncio.run(sampler.publish("a", "promoted", dataclasses.replace(weights, tensors=wrong), 9))
    assert drawn(sampler, requests_of(prompts_of(sampler, 2), tokens=2)) == before


def test_weights_do_not_change_under_a_submit_that_samples_from_them(folder: Path):
    sampler, weights = sampler_of(folder, batch_size=1), learner_of(folder).weights()

    async def interfere() -> None:
        stream = sampler.submit(requests_of(prompts_of(sampler, 4), tokens=2))
        await anext(stream)
        with pytest.raises(PublishError, match="sampled from"):
            await sampler.publish("a", "promoted", weights, 1)
        await sampler.publish("a", "candidate", weights, 1)
        await sampler.swap("a")
        assert {completion.version async for completion in stream} == {0}, "a submit stays with the weights it began with"
        await sampler.publish("a", "candidate", weights, 2)

    asyncio.run(interfere())


def test_requests_that_cannot_be_served_are_refused_with_their_reason(folder: Path):
    sampler = sampler_of(folder)
    (fine,) = requests_of(prompts_of(sampler, 1), tokens=2)
    for wrong, error, word in (
        (dataclasses.replace(fine, agent="b"), MissingError, "no agent 'b'"),
        (dataclasses.replace(fine, slot="start"), MissingError, "slot 'start'"),
        (dataclasses.replace(fine, prompt_ids=()), DataError, "0 prompt ids"),
        (dataclasses.replace(fine, max_new_tokens=5000), DataError, "context of 4096"),
    ):
        with pytest.raises(error, match=word):
            sampler.submit([wrong])
    with pytest.raises(UnsupportedError, match="stochastic"):
        sampler_of(folder, rounding="stochastic")
    with pytest.raises(ModelError, match="batch_size"):
        sampler_of(folder, batch_size=0)


def test_a_batch_of_cancelled_requests_is_not_run_and_others_keep_their_place(folder: Path, monkeypatch: pytest.MonkeyPatch):
    sampler = sampler_of(folder, batch_size=2)
    requests = requests_of(prompts_of(sampler, 6, equal=True), tokens=2)
    whole = drawn(sampler, requests)
    calls: list[int] = []
    decode = local_sampler.decode
    monkeypatch.setattr(local_sampler, "decode", lambda net, rows, **k: (calls.append(len(rows)), decode(net, rows, **k))[1])

    async def interrupted() -> list[Completion]:
        said: list[Completion] = []
        async for completion in sampler.submit(requests):
            said.append(completion)
            if len(said) == 1:
                await sampler.cancel(["r2", "r3", "r5"])
        return said

    assert asyncio.run(interrupted()) == [whole[0], whole[1], whole[4]] and calls == [2, 2]


# ---- choices ---------------------------------------------------------------------------------------------------


def test_the_serving_dtype_is_fp32_for_small_models_where_the_memory_allows():
    assert auto_dtype(135_000_000, memory=24 * 2**30) == torch.float32
    assert auto_dtype(135_000_000, memory=3 * 2**30) == torch.bfloat16
    assert auto_dtype(1_000_000_000, memory=2**50) == torch.bfloat16
    assert auto_dtype(60_000) == torch.float32


def test_bf16_compute_is_for_models_that_are_large_enough(monkeypatch: pytest.MonkeyPatch):
    for flags, expected in (("fpu avx512_bf16", "bfloat16"), ("amx_bf16", "bfloat16"), ("fpu avx2", "float32")):
        monkeypatch.setattr(Path, "read_text", lambda self, flags=flags, **_: f"flags : {flags}")
        assert auto_compute(20_000_000) == expected
        assert auto_compute(19_000_000) == "float32"


def test_a_model_that_scales_its_logits_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    load = models.load

    def scaled(path: Path, *, dtype: torch.dtype) -> torch.nn.Module:
        model = load(path, dtype=dtype)
        model.register_forward_hook(lambda _module, _args, out: setattr(out, "logits", out.logits / 8) or out)
        return model

    monkeypatch.setattr(models, "load", scaled)
    with pytest.raises(ModelError, match="scales its logits"):
        sampler_of(folder)


def test_a_soft_cap_is_part_of_the_law():
    hidden, weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)), torch.eye(4) * 50
    capped = unembed(hidden, weight, None, 30.0)
    assert torch.allclose(capped, 30 * torch.tanh(hidden @ weight.t() / 30)) and float(capped.abs().max()) <= 30
    assert divergence.log_law(capped, temperature=1.0).shape == (3, 4)


def test_learned_positions_are_measured_up_to_the_very_end_of_the_context(tmp_path: Path) -> None:
    """The noise floor's second layout pads rows, and has nowhere to go beyond the last position."""
    from transformers import GPT2Config, GPT2LMHeadModel

    source = models.resolve("tiny:30k", cache=tmp_path)
    folder = tmp_path / "gpt2"
    shutil.copytree(source, folder)
    vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=vocabulary, n_positions=12, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    )
    model.save_pretrained(folder)
    learner = LocalLearner("a", folder, serve_dtype=torch.float32)
    row = Trajectory(
        episode_id="e",
        group="p",
        agent="a",
        segment=0,
        ids=tuple(range(8, 20)),
        mask=(False,) * 10 + (True,) * 2,
        behavior_logprobs=(0.0,) * 10 + (-1.0,) * 2,
        versions=(-1,) * 10 + (0,) * 2,
    )
    q99, mean = noise_floor(learner, token_batch([row], temperature=1.0))
    assert 0.0 <= mean <= q99 < 1e-4 or abs(mean) < 1e-4
