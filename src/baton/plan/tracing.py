"""A model's own forward and backward on tensors without storage: what a step holds, without its weights."""

from __future__ import annotations

import weakref
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baton.core import divergence
from baton.engines import adapters, local, models


class _Live(TorchDispatchMode):
    """Counts the bytes of every tensor that an operation made and that is still held; `peak` is the most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage: Any = leaf.untyped_storage()
                if storage not in self._known:
                    size = int(storage.nbytes())
                    self._known[storage] = size
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._free, size)
        return out

    def _free(self, size: int) -> None:
        self.now -= size


@lru_cache(maxsize=256)
def traced(
    folder: Path,
    *,
    rows: int,
    width: int,
    states: int,
    compute: local.Compute,
    kl: bool,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Most bytes held at once, beside the weights, by a forward and backward of this model (or of this adapter on its base)
    on [rows, width] tokens with the loss at `states` of them (0: a forward alone), as `LocalLearner.step` does it.

    `dtype` is that of the weights; an adapter's own are fp32.

    The model is its own code on tensors without storage: no weight is read, nothing is computed.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM

    live = _Live()
    base = adapters.base_of(folder) if adapters.is_adapter(folder) else folder
    adapter: adapters.Adapter | None = None  # held, or it leaves the base again
    with models.quiet(), torch.random.fork_rng(devices=[]), torch.device("meta"):
        settings = cast(Any, AutoConfig).from_pretrained(base, local_files_only=True)
        model = cast(Any, AutoModelForCausalLM).from_config(settings, dtype=dtype, attn_implementation="sdpa").eval()
        if base != folder:
            shared = adapters.Shared(model)
            adapter = shared.add(folder, is_trained=states > 0)
            shared.activate(adapter)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _without_storage(model)
        ids = torch.zeros(rows, max(1, width - 1) if states else width, dtype=torch.long)
        head = model.get_output_embeddings().weight
        with live, torch.set_grad_enabled(states > 0):
            with torch.autocast("cpu", torch.bfloat16, enabled=compute == "bfloat16"):
                hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
                if not states:
                    return live.peak
                chosen = hidden.flatten(0, 1).index_select(0, torch.zeros(states, dtype=torch.long))
                logits = torch.nn.functional.linear(chosen, head)
            law = divergence.log_law(logits, temperature=1.0)
            loss = law.gather(1, torch.zeros(states, 1, dtype=torch.long)).sum()
            if kl:
                with torch.no_grad():
                    old = divergence.log_law(torch.nn.functional.linear(chosen.detach(), head), temperature=1.0)
                loss = loss + divergence.kl(law, old).sum()
            del logits
            loss.backward()
    return live.peak


def _without_storage(model: Any) -> None:
    """Give a module on the device `meta`, inside a mode of fake tensors, tensors that say they are on the CPU."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in made:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
                held[name] = None if tensor is None else made[id(tensor)]
