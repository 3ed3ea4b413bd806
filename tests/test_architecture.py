"""The layout of docs/design.md, enforced: who imports whom, what the core may not touch, how small it is.

The checker reads source text and knows nothing of the file system, so that bad text can be fed to it.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "baton"

ADDED_TO_THE_SHELL = frozenset(
    [
        "assemble",
        "audit",
        "console",
        "distillation",
        "doctor",
        "host",
        "journal",
        "plan",
        "records",
        "requests",
        "resting",
        "starting",
        "swap",
        "trackers",
    ]
)
"""Rooms beside `run` that the first layout did not have; docs/design.md has to give each a line."""

ROWS: tuple[frozenset[str], ...] = (
    frozenset({"types", "errors"}),
    frozenset({"core"}),
    frozenset({"engines", "envs", "team", "protocols"}),
    frozenset({"rollout", "warm_start"}),
    frozenset({"algorithms"}),
    frozenset({"config"}),
    frozenset({"run", "evaluation", "testing", "serve", "ui"}) | ADDED_TO_THE_SHELL,
    frozenset({"cli", "__main__", "__init__"}),
)
"""Rooms from the ground up. A room imports itself and the rows before it; `__init__` is the front."""

PEERS_MAY_MEET = frozenset({"types", "errors", *ROWS[6], *ROWS[7]})
"""Rooms that may import others of their own row: the nouns, the shell, the front."""

ONLY_THE_PROTOCOLS = {"rollout", "warm_start", "algorithms"}
"""Rooms that may see of `engines` and `envs` nothing but what is to be implemented."""
PROTOCOL_MODULE = {"engines": "baton.engines.engine", "envs": "baton.envs.env"}

PURE_STANDARD = frozenset(
    [
        "__future__",
        "bisect",
        "collections",
        "dataclasses",
        "enum",
        "fractions",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
        "math",
        "operator",
        "statistics",
        "types",
        "typing",
    ]
)
CORE_OUTSIDE = PURE_STANDARD | {"torch", "jaxtyping", "numpy", "scipy"}
NOUNS_OUTSIDE = frozenset(sys.stdlib_module_names) | {"torch", "jaxtyping"}

WORLDLY_CALLS = frozenset({"open", "print", "input", "exec", "eval", "compile", "__import__", "breakpoint"})
WORLDLY_ATTRIBUTES = frozenset(
    {
        *(
            "torch.save",
            "torch.load",
            "torch.manual_seed",
            "torch.seed",
            "torch.initial_seed",
            "torch.random",
        ),
        *("torch.get_rng_state", "torch.set_rng_state", "torch.default_generator", "torch.set_num_threads"),
        *("torch.set_default_dtype", "torch.set_default_device", "torch.cuda.manual_seed"),
        *("numpy.random", "numpy.save", "numpy.load", "numpy.savetxt", "numpy.loadtxt", "numpy.fromfile"),
        "scipy.io",
    }
)
"""Input, output, process-wide settings and random state that no argument carries."""
DRAWS = frozenset(
    f"torch.{name}"
    for name in [
        "rand",
        "randn",
        "randint",
        "randperm",
        "normal",
        "bernoulli",
        "multinomial",
        "poisson",
        "rand_like",
        "randn_like",
    ]
)
"""Draws that read the process-wide generator unless one is passed."""


def modules(source: Path) -> dict[str, Path]:
    """Dotted name of every module under `source` (the package folder itself is its last part)."""
    found: dict[str, Path] = {}
    for path in sorted(source.rglob("*.py")):
        parts = [source.name, *path.relative_to(source).with_suffix("").parts]
        if parts[-1] == "__init__" and len(parts) > 1:
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


def imports(tree: ast.AST, *, module: str, is_package: bool, known: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Line and dotted target of every import, also inside functions and `if TYPE_CHECKING`.

    `from P import n` is an import of P.n where that is a module, else of P.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                package = package[: len(package) - (node.level - 1)]
                origin = ".".join([*package, origin] if origin else package)
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                yield node.lineno, inner if inner in known else origin


def room_of(module: str) -> str:
    """`baton.core.losses` -> `core`; the package itself -> `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def row_of(room: str) -> int | None:
    return next((i for i, row in enumerate(ROWS) if room in row), None)


def refusal(module: str, target: str) -> str | None:
    """Why `module` may not import `target`, or None where it may."""
    room, outside = room_of(module), target.split(".")[0]
    if outside != "baton":
        if room == "core" and outside not in CORE_OUTSIDE:
            return f"core is pure and may not import {outside}"
        if room in ROWS[0] and outside not in NOUNS_OUTSIDE:
            return f"{room} may import the standard library, torch and jaxtyping, not {outside}"
        return None
    there = room_of(target)
    mine, theirs = row_of(room), row_of(there)
    if mine is None:
        return None  # said once, of the module itself
    if theirs is None:
        return f"it imports room '{there}', which is not in the layout"
    if room != there and not (theirs < mine or (theirs == mine and room in PEERS_MAY_MEET)):
        return f"{room} may not import {there}: imports point down only"
    if room in ONLY_THE_PROTOCOLS and there in PROTOCOL_MODULE and target != PROTOCOL_MODULE[there]:
        return f"{room} may import of {there} only {PROTOCOL_MODULE[there]}, not {target}"
    return None


def full_name(node: ast.expr, aliases: dict[str, str]) -> str | None:
    """Dotted name of an attribute chain with import aliases undone: `np.random` -> `numpy.random`."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        left = full_name(node.value, aliases)
        return None if left is None else f"{left}.{node.attr}"
    return None


def worldly(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything in a module of the core that touches the world or hidden state."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = name
                if name in WORLDLY_ATTRIBUTES:
                    yield node.lineno, name
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = full_name(node.func, aliases)
            if called in WORLDLY_CALLS:
                yield node.lineno, f"{called}("
            if called in DRAWS and not any(keyword.arg == "generator" for keyword in node.keywords):
                yield node.lineno, f"{called} without a generator"
        elif isinstance(node, ast.Attribute):
            name = full_name(node, aliases)
            if name in WORLDLY_ATTRIBUTES:
                yield node.lineno, name
        elif isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"


def violations(source: str, *, module: str, is_package: bool = False, known: frozenset[str] = frozenset()) -> list[str]:
    """What this text would break as module `module` of the layout; empty where it is in order."""
    tree = ast.parse(source)
    found: list[str] = []
    if row_of(room_of(module)) is None:
        found.append(f"{module}: not in the layout: stop, the layout is missing an idea")
    if any(part in {"utils", "util"} or part.endswith("_utils") for part in module.split(".")):
        found.append(f"{module}: there is no utils; put it beside its one caller")
    for line, target in imports(tree, module=module, is_package=is_package, known=known):
        reason = refusal(module, target)
        if reason:
            found.append(f"{module}:{line}: {reason}")
    if room_of(module) == "core":
        found += [f"{module}:{line}: core may not use {name}" for line, name in worldly(tree)]
    return found


MODULES = modules(SOURCE)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_keeps_to_its_room(module: str) -> None:
    path = MODULES[module]
    found = violations(
        path.read_text(encoding="utf-8"),
        module=module,
        is_package=path.name == "__init__.py",
        known=frozenset(MODULES),
    )
    assert not found, "\n".join(found)


KNOWN = frozenset(
    [
        "baton",
        "baton.types",
        "baton.errors",
        "baton.core",
        "baton.core.losses",
        "baton.engines",
        "baton.engines.engine",
        "baton.engines.table",
        "baton.envs",
        "baton.envs.env",
        "baton.envs.relay",
        "baton.team",
        "baton.rollout",
        "baton.algorithms",
        "baton.algorithms.sat",
        "baton.config",
        "baton.run",
        "baton.cli",
    ]
)

BAD = {
    "core does not import upwards": ("baton.core.losses", "from baton.config import Config", "point down"),
    "core does not import the shell": ("baton.core.losses", "import baton.run", "point down"),
    "not even inside a function": ("baton.core.losses", "def f():\n    from baton import team", "point down"),
    "not even for types alone": (
        "baton.core.losses",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from baton.engines.engine import Learner",
        "point down",
    ),
    "not even relatively": ("baton.core.losses", "from ..engines import table", "point down"),
    "nouns import no core": ("baton.types", "from baton.core import losses", "point down"),
    "nouns import no third party": ("baton.errors", "import numpy", "not numpy"),
    "engines do not see envs": ("baton.engines.table", "from baton.envs.env import Env", "point down"),
    "team does not see engines": ("baton.team", "from baton.engines.engine import Learner", "point down"),
    "rollout sees no concrete engine": (
        "baton.rollout",
        "from baton.engines.table import TableSampler",
        "only",
    ),
    "nor through the package": ("baton.rollout", "from baton.engines import table", "only"),
    "nor the package itself": ("baton.rollout", "import baton.engines", "only"),
    "algorithms see no concrete env": ("baton.algorithms.sat", "from baton.envs.relay import Relay", "only"),
    "algorithms see no config": ("baton.algorithms.sat", "from baton.config import Config", "point down"),
    "config does not see run": ("baton.config", "from baton.run import train", "point down"),
    "run does not see the command line": ("baton.run", "from baton.cli import main", "point down"),
    "nobody imports the front": ("baton.run", "from baton import train", "point down"),
    "no room without a place": ("baton.misc", "x = 1", "not in the layout"),
    "no import of a room without a place": ("baton.run", "import baton.misc", "not in the layout"),
    "no utils": ("baton.engines.utils", "x = 1", "no utils"),
    "no tensor_utils either": ("baton.core.tensor_utils", "x = 1", "no utils"),
    "core has no clock": ("baton.core.losses", "import time", "may not import time"),
    "core has no calendar": ("baton.core.losses", "from datetime import datetime", "may not import datetime"),
    "core has no dice": ("baton.core.losses", "import random", "may not import random"),
    "core has no environment": ("baton.core.losses", "import os", "may not import os"),
    "core has no log": ("baton.core.losses", "import logging", "may not import logging"),
    "core has no paths": ("baton.core.losses", "from pathlib import Path", "may not import pathlib"),
    "core has no models": ("baton.core.losses", "import transformers", "may not import transformers"),
    "core opens nothing": ("baton.core.losses", "f = open('x')", "open("),
    "core prints nothing": ("baton.core.losses", "def f():\n    print(1)", "print("),
    "core seeds nothing": ("baton.core.losses", "import torch\ntorch.manual_seed(0)", "torch.manual_seed"),
    "core draws from no hidden state": (
        "baton.core.losses",
        "import torch\nx = torch.rand(3)",
        "without a generator",
    ),
    "nor from numpy's": ("baton.core.losses", "import numpy as np\nx = np.random.rand(3)", "numpy.random"),
    "nor by another name": (
        "baton.core.losses",
        "from torch import rand as r\nx = r(3)",
        "without a generator",
    ),
    "core keeps no state": ("baton.core.losses", "n = 0\ndef f():\n    global n\n    n += 1", "global n"),
    "core saves nothing": ("baton.core.losses", "import torch as t\nt.save(1, 'x')", "torch.save"),
}


@pytest.mark.parametrize("rule", sorted(BAD))
def test_the_checker_refuses(rule: str) -> None:
    module, source, reason = BAD[rule]
    found = violations(source, module=module, known=KNOWN)
    assert len(found) >= 1 and all(reason in line for line in found), found


GOOD = {
    "core may compute": (
        "baton.core.losses",
        "import math\nimport torch\nimport scipy.stats\nfrom baton.types import Task",
    ),
    "core may be handed its randomness": (
        "baton.core.losses",
        "import torch\ndef f(g):\n    return torch.rand(3, generator=g)",
    ),
    "rollout may see the protocols": (
        "baton.rollout",
        "from baton.engines.engine import Sampler\nfrom baton.team import Team",
    ),
    "by either spelling": (
        "baton.algorithms.sat",
        "from baton.engines import engine\nfrom baton.envs import env",
    ),
    "an engine may see its neighbours": (
        "baton.engines.table",
        "from .engine import Sampler\nfrom baton.core import losses",
    ),
    "config may name options": (
        "baton.config",
        "from baton.algorithms.sat import SatOptions\nfrom baton.envs import EnvOptions",
    ),
    "the shell may see everything below": (
        "baton.run",
        "import rich\nfrom baton.engines.table import TableLearner",
    ),
    "the command line sees all": ("baton.cli", "import os\nfrom baton.run import train\nimport baton"),
}


@pytest.mark.parametrize("rule", sorted(GOOD))
def test_the_checker_allows(rule: str) -> None:
    module, source = GOOD[rule]
    assert violations(source, module=module, known=KNOWN) == []


def test_a_room_that_was_added_has_its_line_in_the_design() -> None:
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    absent = [room for room in sorted(ADDED_TO_THE_SHELL) if not re.search(rf"── {room}(\.py|/) ", design)]
    assert not absent, f"docs/design.md says nothing of {absent}"


def lines_of(*paths: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def test_what_carries_the_idea_is_small_enough_to_read() -> None:
    rooms = {"core", "algorithms", "team", "protocols"}
    sizes = {name: lines_of(path) for name, path in MODULES.items() if room_of(name) in rooms}
    assert sum(sizes.values()) < 5_500, sizes


def test_the_one_file_example_is_there_and_shorter_than_150_lines() -> None:
    example = ROOT / "examples" / "one_file_sat.py"
    assert example.is_file(), f"{example} is missing"
    assert lines_of(example) < 150


def test_the_public_names_are_sorted_and_can_be_imported() -> None:
    baton = importlib.import_module("baton")
    names = list(baton.__all__)
    assert names, "baton exports nothing"
    assert names == sorted(names)
    assert len(set(names)) == len(names)
    absent = [name for name in names if not hasattr(baton, name)]
    assert not absent, f"in baton.__all__ but not there: {absent}"
