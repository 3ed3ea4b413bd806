"""Device, serving dtype and precision of training: what a config says, and what `auto` comes to on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import torch

from baton.errors import ModelError

Compute = Literal["float32", "bfloat16"]

BF16_PAYS_FROM = 20_000_000
"""Parameters from which bf16 autocast trains faster than fp32 on a CPU that has bf16 products."""


def device_of(name: str, *, key: str = "agents.device") -> torch.device:
    """The device that the config names under `key`; `auto` is the GPU where torch sees one, else the CPU.

    Raises:
        ModelError: torch has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        seen = ", ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
        # torch lists every backend that it was built with, or without.
        reason = " ".join(str(error).split())[:100]
        raise ModelError(f"{key} = '{name}' cannot be used ({reason}); torch sees {seen}") from error
    if device.type == "meta":
        raise ModelError(f"{key} = 'meta' holds no numbers; name cpu or a GPU")
    return device


def auto_dtype(parameters: int, *, memory: int | None = None, device: torch.device | str = "cpu") -> torch.dtype:
    """Serving dtype where the config says auto: float32 below 1e9 parameters where the memory allows it, else bfloat16.

    `parameters` is one agent's or a sum over the agents held together; `memory` is in bytes (default: the device's).
    float32 needs up to 28 bytes a parameter: masters, gradient and two moments (16), two served slots and the start (12).
    """
    if memory is None and torch.device(device).type == "cuda":
        memory = int(torch.cuda.get_device_properties(device).total_memory)
    if memory is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return torch.float32 if parameters < 1_000_000_000 and 28 * parameters <= memory else torch.bfloat16


def auto_compute(parameters: int, device: torch.device | str = "cpu") -> Compute:
    """Precision of the training forward where the config says auto: bfloat16 from 20M parameters on a GPU, or on a CPU with
    avx512_bf16 or amx_bf16, else float32 (emulated bf16 products are slower than fp32 ones)."""
    if torch.device(device).type == "cpu":
        info = Path("/proc/cpuinfo")
        flags = set(info.read_text(encoding="utf-8").split()) if info.is_file() else set[str]()
        pays = bool(flags & {"avx512_bf16", "amx_bf16"})
    else:
        pays = torch.device(device).type == "cuda" and torch.cuda.is_bf16_supported()
    return "bfloat16" if parameters >= BF16_PAYS_FROM and pays else "float32"
