"""Shapes are checked at run time in `baton.core` and `baton.types` (jaxtyping with beartype), and only under pytest."""

from __future__ import annotations

import os
from pathlib import Path

from jaxtyping import install_import_hook

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # agents.device = "auto" is the CPU; a test of a GPU names it here

_hook = install_import_hook(["baton.core", "baton.types"], "beartype.beartype")
_hook.__enter__()

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("baton", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("baton")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tests may run beside other work: one thread each (two threads beside another job are slower than one)."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real benchmark rows and grading cases beside a checkout; tests that need it skip where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not (folder / "cases").is_dir():
        pytest.skip(f"no benchmark rows or grading cases: {folder} is absent")
    return folder
