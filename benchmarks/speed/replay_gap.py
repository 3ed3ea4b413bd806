"""How far sampler and learner are apart about the same weights and tokens, and what it costs to bring that to exactly zero.

    python benchmarks/speed/replay_gap.py [--quick] [--seed N]

For each model (tiny, and SmolLM2 where its package is installed), dtype and decode batch of 1 to 64: messages are sampled,
the learner scores them on the weights that it published, and the gap |learner - sampler| per token is reported in nats.
The exact mode scores the same messages on the same weights through the decode batches that sampled them, with forced
tokens. Its cost is timed beside the learner's scoring, alternating, as a ratio of medians. The last line is JSON; the exit
code is 0 only if all bars hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers

from baton.core.batching import token_batch
from baton.core.keyed import key
from baton.engines import models
from baton.engines.engine import Completion, Request, ScoreRequest
from baton.engines.local import LocalLearner, LocalSampler
from baton.errors import ModelError
from baton.types import Message, TokenBatch, Trajectory

MEAN_BAR = 1e-4
"""ALGORITHMS B18: mean absolute gap with fp32 on both sides, in nats."""


def requests_of(sampler: LocalSampler, *, rows: int, tokens: int, seed: int) -> list[Request]:
    """Prompts of different lengths, four siblings each."""
    requests: list[Request] = []
    for i in range(rows):
        question = f"What is {(i // 4) * 37 % 101} + {(i // 4) * 61 % 89}?" + " Think." * (i // 4 % 5)
        prompt = sampler.codec("a").encode([Message(role="user", content=question)])
        address = key("replay_gap", seed, i)
        requests.append(
            Request(
                id=f"r{i}",
                agent="a",
                slot="promoted",
                prompt_ids=prompt,
                max_new_tokens=tokens,
                temperature=1.0,
                key=address,
            )
        )
    return requests


async def sample(sampler: LocalSampler, requests: list[Request]) -> list[Completion]:
    return [completion async for completion in sampler.submit(requests)]


def batch_of(requests: list[Request], said: list[Completion]) -> TokenBatch:
    return token_batch(
        [
            Trajectory(
                episode_id=request.id,
                group=request.id,
                agent="a",
                segment=0,
                ids=request.prompt_ids + one.ids,
                mask=(False,) * len(request.prompt_ids) + (True,) * len(one.ids),
                behavior_logprobs=(0.0,) * len(request.prompt_ids) + one.logprobs,
                versions=(-1,) * len(request.prompt_ids) + (0,) * len(one.ids),
            )
            for request, one in zip(requests, said, strict=True)
        ],
        temperature=1.0,
    )


def measure(
    folder: Path, *, dtype: torch.dtype, batch_size: int, rows: int, tokens: int, repeats: int, seed: int
) -> dict[str, float]:
    """Gaps in nats over all sampled tokens, and the cost of exact scoring over the learner's."""
    sampler = LocalSampler({"a": folder}, dtype=dtype, batch_size=batch_size)
    learner = LocalLearner("a", folder, serve_dtype=dtype)
    # What the learner holds is what the sampler serves: through a publication, as in a run.
    weights = learner.weights()
    proof = asyncio.run(sampler.publish("a", "promoted", weights, 1))
    assert proof.fingerprint == weights.fingerprint, "the publication did not land"
    requests = requests_of(sampler, rows=rows, tokens=tokens, seed=seed)
    said = asyncio.run(sample(sampler, requests))
    batch = batch_of(requests, said)
    forced = [
        ScoreRequest(agent="a", slot="promoted", prompt_ids=request.prompt_ids, ids=one.ids, temperature=1.0)
        for request, one in zip(requests, said, strict=True)
    ]
    learner_seconds: list[float] = []
    exact_seconds: list[float] = []
    gap = torch.zeros(0)
    exact = 0.0
    for _ in range(repeats):
        began = time.perf_counter()
        logprobs = learner.logprobs(batch)
        between = time.perf_counter()
        scored = asyncio.run(sampler.score(forced))
        ended = time.perf_counter()
        learner_seconds.append(between - began)
        exact_seconds.append(ended - between)
        gap = (logprobs - batch.behavior_logprobs)[batch.mask].double()
        exact = max(
            abs(a - b) for one, scores in zip(said, scored, strict=True) for a, b in zip(one.logprobs, scores, strict=True)
        )
    return {
        "tokens": float(gap.numel()),
        "mean_abs": float(gap.abs().mean()),
        "max_abs": float(gap.abs().max()),
        "mean_signed": float(gap.mean()),
        "exact_max_abs": exact,
        "exact_cost_ratio": statistics.median(exact_seconds) / statistics.median(learner_seconds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="fewer rows, tokens and batch sizes: under a minute")
    options = parser.parse_args()

    specs = {"tiny": "tiny:64k"}
    try:
        models.check(models.SMOLLM2)
        specs["smollm2"] = models.SMOLLM2
    except ModelError as missing:
        print(f"smollm2 left out: {missing}", flush=True)
    figures: dict[str, dict[str, float]] = {}
    for name, spec in specs.items():
        folder = models.resolve(spec)
        large = name == "smollm2"
        sizes = [8] if options.quick and large else [1, 8, 64] if options.quick else [1, 4, 16, 64]
        for dtype in (torch.float32, torch.bfloat16):
            for batch_size in sizes:
                rows, tokens = (8, 4) if options.quick and large else (64, 8) if options.quick else (64, 16)
                if large and not options.quick:
                    rows = max(batch_size, 16)  # one message at a time costs a 135M model seconds
                figure = measure(
                    folder,
                    dtype=dtype,
                    batch_size=batch_size,
                    rows=rows,
                    tokens=tokens,
                    repeats=1 if options.quick and large else 3,
                    seed=options.seed,
                )
                label = f"{name}/{str(dtype).removeprefix('torch.')}/batch{batch_size}"
                figures[label] = figure
                print(
                    f"{label:26s} {figure['tokens']:5.0f} tokens  mean {figure['mean_abs']:.2e}  max {figure['max_abs']:.2e}"
                    f"  exact mode {figure['exact_max_abs']:.1e} at {figure['exact_cost_ratio']:.2f}x",
                    flush=True,
                )
    fp32 = [figure for label, figure in figures.items() if "float32" in label]
    mean, exact = max(f["mean_abs"] for f in fp32), max(f["exact_max_abs"] for f in fp32)
    bars = {
        "fp32_mean_gap": {"value": mean, "bar": MEAN_BAR, "holds": mean <= MEAN_BAR},
        "fp32_exact_gap": {"value": exact, "bar": 0.0, "holds": exact == 0.0},
    }
    line = {
        "name": "replay_gap",
        "quick": options.quick,
        "seed": options.seed,
        "figures": figures,
        "bars": bars,
        "machine": {
            "cpu": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    print(json.dumps(line))
    return 0 if all(bar["holds"] for bar in bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
