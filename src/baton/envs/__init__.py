"""Environments: one file per task family, one grading room, one split. `build` turns options into an `Env`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Discriminator, Tag, TypeAdapter

from baton.envs.custom import CustomOptions, custom_env, reward_function
from baton.envs.env import Demonstration, Env, Grade
from baton.envs.games import ParityEnv, ParityOptions
from baton.envs.grading import warm_math
from baton.envs.jsonl import AnswerGrader, JsonlEnv, JsonlOptions, load_dialogues
from baton.envs.pool import EnvSpec, Grader, GraderPool
from baton.envs.reasoning_gym import ReasoningGymEnv, ReasoningGymOptions
from baton.envs.relay import RelayEnv, RelayOptions
from baton.envs.splits import Splits, split
from baton.errors import ConfigError

__all__ = [
    "CustomOptions",
    "Demonstration",
    "Env",
    "EnvOptions",
    "EnvSpec",
    "Grade",
    "GraderPool",
    "JsonlOptions",
    "ParityOptions",
    "ReasoningGymOptions",
    "RelayOptions",
    "Splits",
    "build",
    "build_grader",
    "load_dialogues",
    "spec",
    "split",
]


def _family(value: Any) -> str:
    name = cast("Mapping[str, Any]", value).get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
    return "custom" if ":" in str(name) else str(name)


EnvOptions = Annotated[
    Annotated[RelayOptions, Tag("relay")]
    | Annotated[ParityOptions, Tag("parity")]
    | Annotated[ReasoningGymOptions, Tag("reasoning_gym")]
    | Annotated[JsonlOptions, Tag("jsonl")]
    | Annotated[CustomOptions, Tag("custom")],
    Discriminator(_family),
]
"""A choice of environment, told apart by `name`; a name with a colon is a dotted path to user code."""

_Options = RelayOptions | ParityOptions | ReasoningGymOptions | JsonlOptions | CustomOptions


def build(options: _Options, *, n_agents: int, root: Path) -> Env:
    """The environment that the options name. `root` is the config file's folder: relative paths and user code start there.

    Raises:
        ConfigError: it cannot be built, or needs another number of agents.
        DataError: a row of its file that cannot be used.
    """
    match options:
        case RelayOptions():
            return RelayEnv(options, n_agents=n_agents)
        case ParityOptions():
            return ParityEnv(options, n_agents=n_agents)
        case ReasoningGymOptions():
            return ReasoningGymEnv(options)
        case JsonlOptions():
            return JsonlEnv(options, root=root)
        case CustomOptions():
            return custom_env(options, n_agents=n_agents, root=root)


def spec(options: _Options, *, n_agents: int, root: Path) -> EnvSpec:
    """What `GraderPool.grade_many` hands to its workers."""
    return EnvSpec(options=options.model_dump_json(), n_agents=n_agents, root=str(root.resolve()))


def build_grader(spec: EnvSpec) -> Grader:
    """The grading part of an environment, without the data that grading does not need. Raises as `build` does."""
    options: _Options = TypeAdapter(EnvOptions).validate_json(spec.options)
    root = Path(spec.root)
    match options:
        case RelayOptions() | ParityOptions():
            raise ConfigError(f"'{options.name}' is graded where it is played; only isolated environments need a worker")
        case ReasoningGymOptions():
            return ReasoningGymEnv(options)
        case JsonlOptions():
            if options.match not in ("exact", "countdown"):
                warm_math()
            return AnswerGrader(options.match, ignore_case=options.ignore_case)
        case CustomOptions() if options.data:
            return reward_function(options, root=root)
        case CustomOptions():
            env = custom_env(options, n_agents=spec.n_agents, root=root)
            assert not isinstance(env, JsonlEnv)
            return env
