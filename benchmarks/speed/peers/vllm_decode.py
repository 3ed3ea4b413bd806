"""vLLM on the CPU as one side of limits.py: decodes a batch whenever it is told to. Runs in vLLM's own environment.

python vllm_decode.py SETTINGS      (JSON: folder, rows, context)
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

# In this process: a second one would have to be told to sleep as well.
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}

import vllm
from vllm import LLM, SamplingParams
from wire import heard, peak_bytes, tell

settings: dict[str, Any] = json.loads(sys.argv[1])
engine = LLM(
    model=settings["folder"],
    dtype="bfloat16",
    max_num_seqs=settings["rows"],
    max_model_len=settings["context"],
    seed=0,
)
tell(version=vllm.__version__)
while True:
    told = heard()
    # The sampled token's log-probability is part of the work: reinforcement learning needs it.
    law = SamplingParams(temperature=1.0, max_tokens=told["new_tokens"], ignore_eos=True, logprobs=0, detokenize=False)
    began = time.perf_counter()
    said = engine.generate([{"prompt_token_ids": ids} for ids in told["prompts"]], law, use_tqdm=False)
    seconds = time.perf_counter() - began
    tell(seconds=seconds, tokens=sum(len(one.outputs[0].token_ids) for one in said), peak_bytes=peak_bytes())
