"""Baton trains a team of small language models with reinforcement learning, one agent at a time, and can say no.

Names are loaded when they are first asked for: torch takes seconds, and neither `baton --help` nor a Ctrl-C should wait.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.audit import verify
    from baton.config import Config
    from baton.config import load as load_config
    from baton.distillation import distill
    from baton.errors import BatonError
    from baton.evaluation import evaluate
    from baton.journal import Run, open_run
    from baton.run import LoadedTeam, load_team, train
    from baton.types import Episode, Task
    from baton.ui.report import report

__all__ = [
    "BatonError",
    "Config",
    "Episode",
    "LoadedTeam",
    "Run",
    "Task",
    "distill",
    "evaluate",
    "load_config",
    "load_team",
    "open_run",
    "report",
    "train",
    "verify",
]

_PLACES = {
    "BatonError": "errors",
    "Config": "config",
    "Episode": "types",
    "LoadedTeam": "run",
    "Run": "journal",
    "Task": "types",
    "distill": "distillation",
    "evaluate": "evaluation",
    "load_config": "config",
    "load_team": "run",
    "open_run": "journal",
    "report": "ui.report",
    "train": "run",
    "verify": "audit",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'baton' has no attribute '{name}'")
    found = getattr(import_module(f"baton.{_PLACES[name]}"), "load" if name == "load_config" else name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
