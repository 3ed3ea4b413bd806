"""TRL's GRPOTrainer as one side of vs_trl.py: an optimiser step whenever it is told to. Runs in TRL's own environment.

python trl_grpo.py SETTINGS         (JSON; see vs_trl.py)
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from wire import heard, peak_bytes, tell, vowels

settings: dict[str, Any] = json.loads(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(settings["folder"])
seen = {"tokens": 0, "prompt_tokens": 0}


def reward(completions: list[Any], prompts: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Also counts what was generated: everything up to the end token, with it."""
    encoded = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)["input_ids"]
    seen.update(tokens=sum(map(len, completion_ids)), prompt_tokens=sum(map(len, encoded)))
    return [vowels(completion[0]["content"]) for completion in completions]


class Steps(TrainerCallback):
    """The first step warms the libraries and is not waited for; each later one begins when it is told to."""

    began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step > 0:
            heard()
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        tell(
            seconds=time.perf_counter() - self.began,
            peak_bytes=peak_bytes(),
            versions={"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
            **seen,
        )


with tempfile.TemporaryDirectory(prefix="baton-trl-") as output:
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=getattr(torch, settings["dtype"])),
        processing_class=tokenizer,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=output,
            per_device_train_batch_size=settings["prompts"] * settings["group"],
            num_generations=settings["group"],
            gradient_accumulation_steps=1,
            max_completion_length=settings["new_tokens"],
            temperature=1.0,
            beta=0.0,
            learning_rate=settings["lr"],
            lr_scheduler_type="constant",
            max_steps=settings["steps"],
            bf16=True,
            use_cpu=True,
            gradient_checkpointing=False,
            logging_steps=10**6,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=settings["seed"],
        ),
        train_dataset=Dataset.from_list(
            [
                {"prompt": [{"role": "system", "content": settings["system"]}, {"role": "user", "content": question}]}
                for question in settings["questions"]
            ]
        ),
        callbacks=[Steps()],
    )
    trainer.train()
