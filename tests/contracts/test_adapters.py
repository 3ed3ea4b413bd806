"""Adapters against the contracts of any engine, and the faults that sharing one base is known for (PITFALLS G03-G05)."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from baton.core.batching import token_batch, with_advantages
from baton.core.keyed import key
from baton.core.losses import TIGHT, Dis, Objective
from baton.engines import adapters, models
from baton.engines.adapters import LoraOptions
from baton.engines.engine import Completion, Request
from baton.engines.local import Bases, LocalLearner, LocalSampler, noise_floor, share_changed
from baton.errors import MissingError, ModelError, PublishError
from baton.testing import check_learner, check_sampler
from baton.types import AdvantageBatch, AgentId, Message, TokenIds, Trajectory, Weights

LR = 3e-3
OBJECTIVE = Objective(weight=Dis(band=TIGHT), penalty=0.0)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def base(cache: Path) -> Path:
    return models.resolve("tiny:30k", cache=cache)


@pytest.fixture(scope="module")
def fresh(base: Path, cache: Path) -> Callable[..., Path]:
    def make(index: int = 0, **options: Any) -> Path:
        settings = LoraOptions(**{"rank": 4, "alpha": 20.0, **options})
        return adapters.start(base, "tiny:30k", settings, at=(0, index), cache=cache)

    return make


def sampler_of(folders: dict[AgentId, Path], **options: Any) -> LocalSampler:
    return LocalSampler(folders, dtype=options.pop("dtype", torch.float32), **options)


def learner_of(folder: Path, agent: str = "a", **options: Any) -> LocalLearner:
    return LocalLearner(agent, folder, serve_dtype=options.pop("serve_dtype", torch.float32), **options)


def prompts_of(sampler: LocalSampler, count: int, agent: str = "a") -> list[TokenIds]:
    return [sampler.codec(agent).encode([Message(role="user", content=f"t: {'0 7 3 5 1'[: 1 + i]}")]) for i in range(count)]


def requests_of(prompts: Sequence[TokenIds], agent: str, slot: Any) -> list[Request]:
    return [
        Request(id=f"r{i}", agent=agent, slot=slot, prompt_ids=p, max_new_tokens=3, temperature=1.0, key=key("test", i))
        for i, p in enumerate(prompts)
    ]


def drawn(sampler: LocalSampler, prompts: Sequence[TokenIds], agent: str = "a", slot: Any = "promoted") -> list[Completion]:
    requests = requests_of(prompts, agent, slot)

    async def gather() -> list[Completion]:
        return [completion async for completion in sampler.submit(requests)]

    return asyncio.run(gather())


def batch_of(prompts: Sequence[TokenIds], said: Sequence[Completion], agent: str = "a") -> AdvantageBatch:
    rows = [
        Trajectory(
            episode_id=f"e{i}",
            group=f"g{i}",
            agent=agent,
            segment=0,
            ids=prompt + one.ids,
            mask=(False,) * len(prompt) + (True,) * len(one.ids),
            behavior_logprobs=(0.0,) * len(prompt) + one.logprobs,
            versions=(-1,) * len(prompt) + (one.version,) * len(one.ids),
        )
        for i, (prompt, one) in enumerate(zip(prompts, said, strict=True))
    ]
    batch = token_batch(rows, temperature=1.0)
    return with_advantages(
        batch, {name: (-1.0) ** i * (1 + i % 3) for i, name in enumerate(batch.episode_ids)}, team={agent: 0}
    )


def played(folder: Path, *, count: int = 8, dtype: torch.dtype = torch.float32) -> AdvantageBatch:
    sampler = sampler_of({"a": folder}, dtype=dtype)
    prompts = prompts_of(sampler, count)
    return batch_of(prompts, drawn(sampler, prompts))


def trained(learner: LocalLearner, batch: AdvantageBatch, steps: int = 3) -> Weights:
    for _ in range(steps):
        learner.step(batch, OBJECTIVE, lr=LR, anchor=None)
    return learner.weights()


def peft_logits(base: Path, folder: Path, ids: Tensor) -> Tensor:
    """What PEFT and transformers alone make of the two folders."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads a property that transformers has renamed
        model = PeftModel.from_pretrained(models.load(base, dtype=torch.float32), folder)
    with torch.no_grad():
        return model(input_ids=ids).logits


def plain_law(base: Path, folder: Path) -> Any:
    """The judge: the adapter merged by hand into a model of its own, W + (alpha / r) B A."""
    model = models.load(base, dtype=torch.float32)
    names = dict(model.named_parameters())
    origin = {name: tensor.detach().clone() for name, tensor in names.items()}
    settings = json.loads((folder / adapters.CONFIG).read_text())
    scale = settings["lora_alpha"] / settings["r"]

    def law(weights: Weights, prompt: TokenIds, temperature: float) -> Tensor:
        with torch.no_grad():
            for name, tensor in names.items():
                path = f"base_model.model.{name.removesuffix('.weight')}"
                update = (
                    scale * weights.tensors[f"{path}.lora_B.weight"] @ weights.tensors[f"{path}.lora_A.weight"]
                    if f"{path}.lora_A.weight" in weights.tensors
                    else torch.zeros_like(tensor)
                )
                tensor.copy_(origin[name] + update)
            logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
        return torch.log_softmax(logits.double() / temperature, dim=-1)

    return law


# ---- contracts -------------------------------------------------------------------------------------------------


def test_a_sampler_of_adapters_keeps_the_contract(base: Path, fresh: Any) -> None:
    folder = fresh()
    learner = learner_of(folder)
    first = learner.weights()
    check_sampler(
        lambda: sampler_of({"a": folder}, batch_size=5),
        agent="a",
        weights=first,
        other=trained(learner, played(folder), steps=8),
        law=plain_law(base, folder),
        prompts=prompts_of(sampler_of({"a": folder}), 4),
        end_ids={5},
        tolerance=2e-5,
    )


@pytest.mark.parametrize("micro_tokens", [24, 4096])
def test_a_learner_of_an_adapter_keeps_the_contract(micro_tokens: int, base: Path, fresh: Any) -> None:
    folder = fresh()
    shared = Bases()
    check_learner(
        lambda: learner_of(folder, micro_tokens=micro_tokens, bases=shared),
        batch=played(folder, count=6),
        law=plain_law(base, folder),
        lr=LR,
        tolerance=2e-5,
    )


# ---- version 0 and folders -------------------------------------------------------------------------------------


def test_version_0_is_the_base_exactly(base: Path, fresh: Any) -> None:
    folder = fresh()
    adapted, plain = sampler_of({"a": folder}), sampler_of({"a": base})
    prompts = prompts_of(plain, 5)
    said = drawn(adapted, prompts)
    assert said == drawn(plain, prompts)
    batch = batch_of(prompts, said).batch
    assert torch.equal(learner_of(folder).logprobs(batch), learner_of(base).logprobs(batch))
    b = [t for n, t in learner_of(folder).weights().tensors.items() if ".lora_B." in n]
    assert b and not any(bool(t.any()) for t in b)


def test_the_first_draw_depends_on_its_address_alone_and_touches_no_global_state(
    base: Path, cache: Path, tmp_path: Path, fresh: Any
) -> None:
    before = torch.get_rng_state()
    one = load_file(fresh(0) / adapters.TENSORS)
    torch.rand(7)
    elsewhere = adapters.start(base, "tiny:30k", LoraOptions(rank=4, alpha=20.0), at=(0, 0), cache=tmp_path)
    again = load_file(elsewhere / adapters.TENSORS)
    other = load_file(fresh(1) / adapters.TENSORS)
    assert all(torch.equal(one[n], again[n]) for n in one)
    name = next(n for n in one if ".lora_A." in n)
    bound = one[name].shape[1] ** -0.5
    assert not torch.equal(one[name], other[name])
    assert float(one[name].abs().max()) <= bound and float(one[name].std()) > 0.4 * bound
    torch.set_rng_state(before)
    learner_of(fresh(0)).step(played(fresh(0)), OBJECTIVE, lr=LR, anchor=None)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
def test_a_saved_folder_is_what_peft_loads_with_the_same_logits(
    targets: Any, base: Path, fresh: Any, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    folder = fresh(targets=targets)
    learner = learner_of(folder)
    batch = played(folder)
    served = trained(learner, batch)
    adapters.save(tmp_path / "out", served, source=folder)
    ids = batch.batch.ids[:1, : int(batch.batch.lengths[0])]
    with torch.no_grad():
        own = learner._serve.logits(learner._serve.hidden(ids)[0])
    theirs = peft_logits(base, tmp_path / "out", ids)[0]
    assert torch.allclose(own, theirs, atol=1e-5) and not torch.allclose(own, peft_logits(base, folder, ids)[0], atol=1e-3)
    on_disk = load_file(tmp_path / "out" / adapters.TENSORS)
    assert models.fingerprint(models.checksums(on_disk)) == served.fingerprint
    leaves = {n.removesuffix(".lora_A.weight").rpartition(".")[2] for n in on_disk if ".lora_A." in n}
    everything = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert leaves == (everything if targets == "all-linear" else set(targets))
    assert adapters.base_of(tmp_path / "out") == base
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert sampler_of({"a": tmp_path / "out"}).codec("a") is sampler_of({"a": folder}).codec("a")
    assert learner_of(tmp_path / "out").weights().fingerprint == served.fingerprint


def test_what_cannot_be_an_adapter_is_refused_with_the_reason(base: Path, fresh: Any, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"\['nose'\] are no linear maps .* it has .*q_proj"):
        fresh(targets=("q_proj", "nose"))
    with pytest.raises(ModelError, match="is an adapter, no model"):
        models.check(str(fresh()))
    shutil.copytree(fresh(), tmp_path / "moved")
    settings = json.loads((tmp_path / "moved" / adapters.CONFIG).read_text())
    (tmp_path / "moved" / adapters.CONFIG).write_text(json.dumps({**settings, "base_model_name_or_path": "/no/where"}))
    with pytest.raises(ModelError, match=r"is an adapter of /no/where.*put that model there"):
        learner_of(tmp_path / "moved")
    (tmp_path / "moved" / adapters.CONFIG).write_text(json.dumps({**settings, "target_modules": ["q_proj"]}))
    with pytest.raises(ModelError, match="on one side only"):
        learner_of(tmp_path / "moved")


# ---- one base for all ------------------------------------------------------------------------------------------


def state_of(learner: LocalLearner) -> dict[str, Tensor]:
    snapshot = learner.snapshot()
    return {**{f"w.{n}": t for n, t in snapshot.weights.items()}, **snapshot.moments}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_samplers_and_learners_hold_the_base_once(fresh: Any) -> None:
    bases = Bases()
    sampler = sampler_of({"a": fresh(0), "b": fresh(1)}, bases=bases)
    learners = [learner_of(fresh(i), name, bases=bases) for i, name in enumerate("ab")]
    asyncio.run(sampler.publish("a", "candidate", learners[0].weights(), 1))
    nets = [held.net for seat in sampler._seats.values() for held in seat.slots.values()]
    nets += [learner._train for learner in learners] + [learner._serve for learner in learners]
    assert len({id(net.model) for net in nets}) == 1 and len(nets) == 7
    assert all(p.dtype == torch.float32 for learner in learners for p in learner._masters.values())


def test_training_one_adapter_leaves_the_other_and_the_base_bit_for_bit(base: Path, fresh: Any) -> None:
    """Each also ends where it ends when it is alone on the base, although they take turns (G03)."""
    bases = Bases()
    batch = played(fresh(0))
    one, two = (learner_of(fresh(i), bases=bases) for i in (0, 1))
    trained(two, batch, steps=1)
    before, frozen = state_of(two), {n: t.clone() for n, t in one._train.model.state_dict().items() if "lora_" not in n}
    trained(one, batch)
    assert same(before, state_of(two))
    after = one._train.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in frozen.items())
    trained(two, batch, steps=2)
    alone = [learner_of(fresh(i)) for i in (0, 1)]
    for learner in alone:
        trained(learner, batch)
    assert same(state_of(one), state_of(alone[0])) and same(state_of(two), state_of(alone[1]))
    assert not same(state_of(one), state_of(two))


def test_activating_one_adapter_switches_off_nobodys_gradient(fresh: Any) -> None:
    """G03: what is trained is what the learners own, whichever adapter was used last."""
    bases = Bases()
    batch = played(fresh(0)).batch
    sampler = sampler_of({"a": fresh(0)}, bases=bases)
    learners = [learner_of(fresh(i), bases=bases) for i in (0, 1)]
    owned = {id(p) for learner in learners for p in learner._masters.values()}
    prompts = prompts_of(sampler, 2)
    for use in (lambda: learners[1].logprobs(batch), lambda: drawn(sampler, prompts), lambda: learners[0].logprobs(batch)):
        use()
        assert {id(p) for p in learners[0]._train.model.parameters() if p.requires_grad} == owned


def test_results_do_not_depend_on_how_many_adapters_were_loaded_before(fresh: Any) -> None:
    """G04: three adapters of different targets, in either order, against each alone on a base of its own."""
    folders = {"a": fresh(0), "b": fresh(1, rank=2), "c": fresh(2, rank=8, targets=("v_proj", "up_proj"))}
    batch = played(folders["a"])
    ends: list[dict[str, tuple[str, list[Completion]]]] = []
    for names in ("abc", "cba", "a", "b", "c"):
        sampler, bases = sampler_of({n: folders[n] for n in names}), Bases()
        learners = {n: learner_of(folders[n], n, bases=bases) for n in names}
        found: dict[str, tuple[str, list[Completion]]] = {}
        for name in names:
            weights = trained(learners[name], batch)
            asyncio.run(sampler.publish(name, "promoted", weights, 1))
            found[name] = (weights.fingerprint, drawn(sampler, prompts_of(sampler, 3, name), name))
        ends.append(found)
    assert ends[0] == ends[1] == {**ends[2], **ends[3], **ends[4]}
    assert len({fingerprint for fingerprint, _ in ends[0].values()}) == 3


def test_two_ranks_are_saved_restored_published_and_swapped_each_with_its_own(fresh: Any, tmp_path: Path) -> None:
    """G05."""
    bases = Bases()
    folders = {"a": fresh(0, rank=2, alpha=2.0), "b": fresh(1, rank=8, alpha=32.0)}
    sampler = sampler_of(folders, bases=bases)
    learners = {n: learner_of(folder, n, bases=bases) for n, folder in folders.items()}
    prompts = prompts_of(sampler, 4)
    batches = {n: batch_of(prompts, drawn(sampler, prompts, n), n) for n in folders}
    for name, learner in learners.items():
        before = drawn(sampler, prompts, name)
        weights = trained(learner, batches[name])
        adapters.save(tmp_path / name, weights, source=folders[name])
        saved = json.loads((tmp_path / name / adapters.CONFIG).read_text())
        assert (saved["r"], saved["lora_alpha"]) == ((2, 2.0) if name == "a" else (8, 32.0))
        assert {t.shape[0] for n, t in load_file(tmp_path / name / adapters.TENSORS).items() if "lora_A" in n} == {
            saved["r"]
        }
        snapshot = learner.snapshot()
        heir = learner_of(folders[name], name, bases=bases)
        heir.restore(snapshot)
        assert same(state_of(heir), state_of(learner)) and snapshot.steps == 3
        proof = asyncio.run(sampler.publish(name, "candidate", weights, 1))
        assert proof.fingerprint == weights.fingerprint
        asyncio.run(sampler.swap(name))
        after = drawn(sampler, prompts, name)
        assert after != before and {one.version for one in after} == {1}
        assert [c.logprobs for c in after] == [c.logprobs for c in drawn(sampler_of({name: tmp_path / name}), prompts, name)]
        assert drawn(sampler, prompts, name, "candidate") == before
    with pytest.raises(PublishError, match="the sampler holds"):
        asyncio.run(sampler.publish("b", "candidate", learners["a"].weights(), 2))
    with pytest.raises(MissingError, match="does not fit"):
        other = learner_of(fresh(2, rank=2, targets=("q_proj",)))
        learners["a"].restore(other.snapshot())


def test_a_name_is_never_used_again_and_what_was_replaced_is_gone(fresh: Any) -> None:
    bases = Bases()
    sampler = sampler_of({"a": fresh(0)}, bases=bases)
    learner = learner_of(fresh(0), bases=bases)
    shared = learner._train.shared
    assert shared is not None
    seen: list[str] = []
    for version in range(1, 5):
        asyncio.run(sampler.publish("a", "candidate", trained(learner, played(fresh(0)), steps=1), version))
        fresh_name = sampler._seats["a"].slots["candidate"].net.adapter.name  # type: ignore[union-attr]
        assert fresh_name not in seen and len(shared.names) == 3
        seen.append(fresh_name)
        asyncio.run(sampler.swap("a"))
    sampler.drop("a", "candidate")
    assert len(shared.names) == 2
    del learner
    assert len(shared.names) == 1, "a learner that rests takes its adapter along"
    assert drawn(sampler, prompts_of(sampler, 1))[0].version == 4


def test_an_adapter_in_use_stays_until_its_last_user_is_done(fresh: Any) -> None:
    """C14: retired while a submit samples from it, it serves that submit to the end and is gone after."""
    sampler = sampler_of({"a": fresh(0)}, batch_size=1)
    prompts = prompts_of(sampler, 3)
    asyncio.run(sampler.publish("a", "candidate", trained(learner_of(fresh(0)), played(fresh(0))), 1))
    whole = drawn(sampler, prompts, slot="candidate")
    shared = sampler._seats["a"].slots["promoted"].net.shared
    assert shared is not None

    async def interrupted() -> list[Completion]:
        said: list[Completion] = []
        async for completion in sampler.submit(requests_of(prompts, "a", "candidate")):
            said.append(completion)
            sampler.drop("a", "candidate")
            assert len(shared.names) == 2
        return said

    assert asyncio.run(interrupted()) == whole and len(shared.names) == 1
    with pytest.raises(MissingError, match="slot 'candidate'"):
        drawn(sampler, prompts, slot="candidate")


def test_a_publication_that_does_not_fit_leaves_slot_and_base_as_they_were(fresh: Any) -> None:
    sampler = sampler_of({"a": fresh(0)})
    prompts, names = prompts_of(sampler, 2), lambda: sampler._seats["a"].slots["promoted"].net.shared.names  # type: ignore[union-attr]
    before, here = drawn(sampler, prompts), names()
    weights = learner_of(fresh(0)).weights()
    wrong = dataclasses.replace(weights, tensors={n: t.bfloat16() for n, t in weights.tensors.items()})
    with pytest.raises(PublishError, match="serve both sides in one dtype"):
        asyncio.run(sampler.publish("a", "promoted", wrong, 1))
    assert drawn(sampler, prompts) == before and names() == here


# ---- precision -------------------------------------------------------------------------------------------------


def test_a_bf16_base_serves_fp32_adapters_that_are_the_masters(fresh: Any) -> None:
    """No rounding lies between what is trained and what is served; sampler and learner agree within the rounded bound."""
    folder = fresh(0)
    batch = played(folder, dtype=torch.bfloat16)
    learner = learner_of(folder, serve_dtype=torch.bfloat16)
    gap = (learner.logprobs(batch.batch) - batch.batch.behavior_logprobs).abs()[batch.batch.mask]
    assert float(gap.mean()) < 0.04
    start = learner.weights()
    served = trained(learner, batch, steps=1)
    assert {t.dtype for t in served.tensors.values()} == {torch.float32}
    assert all(torch.equal(t, learner.snapshot().weights[n]) for n, t in served.tensors.items())
    assert share_changed(start, served) > 0.3, "half of an adapter moves in its first step: A waits for B"
    assert learner._train.model.dtype == torch.bfloat16
    assert noise_floor(learner, batch.batch)[0] < 0.05


def test_autocast_trains_an_adapter_near_the_fp32_step(fresh: Any) -> None:
    batch = played(fresh(0))
    norms = [
        learner_of(fresh(0), compute=compute).step(batch, OBJECTIVE, lr=LR, anchor=None).grad_norm
        for compute in ("float32", "bfloat16")
    ]
    assert norms[1] == pytest.approx(norms[0], rel=0.05) and norms[0] != norms[1]
