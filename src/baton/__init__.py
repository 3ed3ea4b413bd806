"""Baton trains a team of small language models with reinforcement learning, one agent at a time, and can say no."""

from baton.config import Config
from baton.config import load as load_config
from baton.errors import BatonError
from baton.evaluate import evaluate
from baton.run import LoadedTeam, Run, load_team, open_run, train
from baton.types import Episode, Task
from baton.ui.report import report
from baton.verify import verify

__all__ = [
    "BatonError",
    "Config",
    "Episode",
    "LoadedTeam",
    "Run",
    "Task",
    "evaluate",
    "load_config",
    "load_team",
    "open_run",
    "report",
    "train",
    "verify",
]
