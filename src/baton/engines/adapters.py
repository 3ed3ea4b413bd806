"""Adapters: several agents on one frozen base, each with low-rank matrices of its own (LoRA, through PEFT).

The folder of an adapter is what PEFT writes and reads, `adapter_config.json` and `adapter_model.safetensors`, and beside
them the base's tokenizer, chat template and configs: whoever reads a model folder without its weights reads this one too.
Tensors have the names of that file, for example

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight       [rank, in]

in weights, snapshots and checksums alike: no name of a slot or an agent is in them. They are float32 wherever they are, so
what is served are the masters themselves.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save_file
from torch import Tensor, nn

from baton.core import keyed
from baton.engines import models
from baton.errors import ModelError
from baton.types import Weights

CONFIG, TENSORS, BASE = "adapter_config.json", "adapter_model.safetensors", "adapter_base.json"

FORMAT = 2
"""Version of what `start` writes into the cache; a change of the first draw or of the files raises it."""

DRAW = 1
"""Version of the first draw alone, in the address of its randomness."""


class LoraOptions(BaseModel):
    """`[agents.adapter]`: low-rank adaptation. A linear map W becomes W + (alpha / rank) B A."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    rank: int = Field(default=16, ge=1, description="inner width of the two matrices of an adapted map")
    alpha: float = Field(default=32.0, gt=0, description="the update enters as alpha / rank times B A")
    targets: Literal["all-linear"] | tuple[str, ...] = Field(
        default="all-linear",
        min_length=1,
        description="which maps are adapted: all linear ones but the head, or those of these names (q_proj, v_proj, ..)",
    )


def require_peft() -> None:
    """Raise ModelError unless PEFT is installed."""
    if importlib.util.find_spec("peft") is None:
        raise ModelError("adapter = 'lora' needs the package peft; pip install 'baton-rl[lora]'")


# ---- folders ---------------------------------------------------------------------------------------------------


def is_adapter(folder: Path) -> bool:
    """The folder holds an adapter and not a whole model."""
    return (folder / CONFIG).is_file()


def whole(folder: Path) -> Path:
    """The folder of the model, where this one holds an adapter of it."""
    return base_of(folder) if is_adapter(folder) else folder


def base_of(folder: Path) -> Path:
    """The folder of the base that an adapter was made for.

    Raises:
        ModelError: it is not on this machine.
    """
    spec = str(_settings(folder)["base_model_name_or_path"])
    try:
        return models.resolve(spec)
    except ModelError as error:
        raise ModelError(
            f"{folder} is an adapter of {spec}, which cannot be used ({error}); put that model there, or name where it is "
            f"in base_model_name_or_path of {CONFIG}"
        ) from error


def start(base: Path, spec: str, options: LoraOptions, *, at: tuple[str | int, ...], cache: Path | None = None) -> Path:
    """The folder of a fresh adapter, made on first use: A uniform in +-1/sqrt(in) and keyed by `at` and its name, B zero.

    With B zero it is the base exactly. `spec` is how the config names the base; a Hub id is written as it is, anything else
    as the folder that it resolved to.

    Raises:
        ModelError: a target that names no linear map of the base, or a base without any.
    """
    maps = _linear_maps(base)
    if not maps:
        raise ModelError(
            f"{base} has no linear maps of torch's own kind (GPT-2 has Conv1D in their place), which an adapter needs; "
            'train it whole (adapter = "none")'
        )
    leaves = {name.rpartition(".")[2] for name in maps}
    targets = sorted(leaves if options.targets == "all-linear" else options.targets)
    if not leaves.issuperset(targets):
        raise ModelError(
            f"adapter.targets: {sorted(set(targets) - leaves) or targets} are no linear maps of {base}; "
            f"it has {', '.join(sorted(leaves))}"
        )
    named = spec if spec.count("/") == 1 and not Path(spec).expanduser().is_dir() else str(base.resolve())
    settings = {
        "base_model_name_or_path": named,
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "inference_mode": True,
    }
    narrow = min((min(shape), path) for path, shape in maps.items() if path.rpartition(".")[2] in targets)
    if options.rank > narrow[0]:
        raise ModelError(
            f"adapter.rank = {options.rank}: {narrow[1]} of {base} is {narrow[0]} wide and has no more; lower it"
        )
    root = models.cache_folder() if cache is None else cache
    what = [FORMAT, settings, at, models.read_config(base)]
    name = f"lora-{hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]}"

    def write(folder: Path) -> None:
        models.copy_beside(base, folder)
        models.write_json(folder / CONFIG, settings)
        models.write_json(folder / BASE, {"sha256": base_digest(base)})
        tensors: dict[str, Tensor] = {}
        for path, (inner, outer) in maps.items():
            if path.rpartition(".")[2] in targets:
                u = keyed.uniforms([keyed.key("lora", DRAW, *at, path)], options.rank * inner)[0]
                a = torch.from_numpy((2.0 * u - 1.0) / inner**0.5).float().reshape(options.rank, inner)
                tensors[_name(path, "lora_A")], tensors[_name(path, "lora_B")] = a, torch.zeros(outer, options.rank)
        save_file(tensors, folder / TENSORS, metadata={"format": "pt"})

    return models.once(root / name, write)


def base_digest(base: Path) -> str:
    """SHA-256 over the weight files of a base: an adapter means something on these alone."""
    digest = hashlib.sha256()
    for path in sorted(base.glob("*.safetensors")):
        with path.open("rb") as handle:
            digest.update(path.name.encode() + hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()


def check_base(folder: Path) -> None:
    """Raise ModelError where the base of this adapter is not the one that it was made for."""
    path = folder / BASE
    if path.is_file() and json.loads(path.read_text(encoding="utf-8"))["sha256"] != base_digest(base_of(folder)):
        raise ModelError(
            f"{folder} is an adapter of {base_of(folder)}, whose weights are not those that it was made for; put them back"
        )


def save(folder: Path, weights: Weights, *, source: Path) -> None:
    """A folder that `peft.PeftModel.from_pretrained(base, folder)` loads: these tensors, all else from `source`."""
    folder.mkdir(parents=True, exist_ok=True)
    models.copy_beside(source, folder)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.tensors.items()}
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})


def _settings(folder: Path) -> dict[str, Any]:
    """The adapter's config, where it asks for nothing but plain LoRA."""
    try:
        settings = cast(dict[str, Any], json.loads((folder / CONFIG).read_text(encoding="utf-8")))
    except json.JSONDecodeError as error:
        raise ModelError(f"{folder / CONFIG} is not JSON: {error}") from error
    if settings.get("peft_type") != "LORA" or not settings.get("base_model_name_or_path"):
        raise ModelError(
            f"{folder / CONFIG} describes no LoRA adapter with a base (peft_type {settings.get('peft_type')!r})"
        )
    return settings


def _linear_maps(base: Path) -> dict[str, tuple[int, int]]:
    """(in, out) of every linear map of the base by path, the head left out; no weight is read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        config = cast(Any, AutoConfig).from_pretrained(base, local_files_only=True, trust_remote_code=False)
        model = cast(Any, AutoModelForCausalLM).from_config(config)
    head = model.get_output_embeddings()
    return {
        path: (int(module.in_features), int(module.out_features))
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }


def _name(path: str, matrix: str) -> str:
    return f"base_model.model.{path}.{matrix}.weight"


# ---- adapters on one module ------------------------------------------------------------------------------------


class Shared:
    """One base module and the adapters on it. Its own weights are frozen and never written.

    Which adapter a forward uses and which are trained are apart: PEFT's activation also switches gradients, so every
    activation here puts them back (PITFALLS G03). Inside PEFT an adapter has a counted name, which is never given again, and
    lives as long as its `Adapter`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.requires_grad_(False)
        self._tuner: Any = None
        self._layers: list[tuple[str, Any]] = []
        self._made = 0
        self._active: str | None = None
        self._trained: dict[str, list[nn.Parameter]] = {}

    @property
    def names(self) -> frozenset[str]:
        """PEFT's names of the adapters that are here now."""
        return frozenset({name for _, layer in self._layers for name in layer.lora_A})

    def add(self, folder: Path, *, is_trained: bool) -> Adapter:
        """A new adapter of this folder's rank, alpha and targets; its tensors are the caller's to fill."""
        from peft import LoraConfig
        from peft.tuners.lora import LoraLayer, LoraModel

        settings = _settings(folder)
        name = f"adapter{self._made}"
        self._made += 1
        config = cast(Any, LoraConfig)(
            task_type="CAUSAL_LM",
            r=settings["r"],
            lora_alpha=settings["lora_alpha"],
            target_modules=settings["target_modules"],
            inference_mode=True,
        )
        with torch.random.fork_rng(devices=[]):
            if self._tuner is None:
                self._tuner = LoraModel(cast(Any, self.model), config, name)
            else:
                self._tuner.peft_config[name] = config
                self._tuner.inject_adapter(self.model, name)
        found = [(path, module) for path, module in self.model.named_modules() if isinstance(module, LoraLayer)]
        self._layers = [(path, cast(Any, module)) for path, module in found]
        # PEFT makes them in the base's dtype.
        parameters: dict[str, nn.Parameter] = {
            _name(path, matrix): getattr(layer, matrix)[name].float().weight
            for path, layer in self._layers
            for matrix in ("lora_A", "lora_B")
            if name in layer.lora_A
        }
        if is_trained:
            self._trained[name] = list(parameters.values())
        self._switch(None)
        return Adapter(self, name, dict(sorted(parameters.items())))

    def activate(self, adapter: Adapter | None) -> None:
        """Forwards from here on use this adapter, or the bare base."""
        name = None if adapter is None else adapter.name
        if name != self._active:
            self._switch(name)

    def remove(self, name: str) -> None:
        """Forget an adapter; its memory is free."""
        if self._active == name:
            self._switch(None)
        self._trained.pop(name, None)
        self._tuner.peft_config.pop(name)
        for _, layer in self._layers:
            layer.delete_adapter(name)

    def _switch(self, name: str | None) -> None:
        active = [] if name is None else [name]
        self._tuner.active_adapter = active
        for _, layer in self._layers:
            layer.set_adapter(active, inference_mode=True)
        self._active = name
        for parameters in self._trained.values():
            for parameter in parameters:
                parameter.requires_grad_(True)


class Adapter:
    """One adapter on a shared base. When nobody holds it any more it is taken off the base."""

    def __init__(self, shared: Shared, name: str, parameters: Mapping[str, nn.Parameter]) -> None:
        self.shared = shared
        self.name = name
        self.parameters = parameters
        weakref.finalize(self, shared.remove, name).atexit = False
