"""A seat that two models hold together, as a folder: the newcomer's model, the incumbent's inside, and how near they stay.

What is served is the newcomer's law moved into the ball around the incumbent's, in each state (ALGORITHMS 2.8, mode
`mixture`). The folder is the newcomer's own, readable as such, with two additions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from baton.engines import models
from baton.errors import ModelError

FILE, INCUMBENT = "mixture.json", "incumbent"


def is_mixture(folder: Path) -> bool:
    """The folder holds two models."""
    return (folder / FILE).is_file()


def radius_of(folder: Path) -> float:
    """Largest KL(served || incumbent) of a state, nats. Raises ModelError where the file does not say."""
    try:
        return float(json.loads((folder / FILE).read_text(encoding="utf-8"))["radius"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / FILE} gives no radius ({error}); restore it from a copy") from error


def save(folder: Path, *, newcomer: Path, incumbent: Path, radius: float) -> None:
    """Write both model folders as one."""
    for source, target in ((newcomer, folder), (incumbent, folder / INCUMBENT)):
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted(source.iterdir()):
            if path.is_file() and not path.name.startswith("."):
                (target / path.name).write_bytes(path.read_bytes())
    models.write_json(folder / FILE, {"radius": radius})


def tensors(folder: Path) -> Mapping[str, Tensor]:
    """The tensors of both, the incumbent's under a prefix."""
    own = load_file(folder / "model.safetensors")
    return own | {f"{INCUMBENT}.{k}": v for k, v in load_file(folder / INCUMBENT / "model.safetensors").items()}
