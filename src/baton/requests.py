"""What is asked of a job that runs, from outside, and its answer: two files in the run directory.

A request lies there until the job takes it between two stages. It has an id, and what a swap leaves names the id that it
answers, so that a job which dies between the two does not do it twice.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from pathlib import Path

from baton import records
from baton.algorithms.stage0 import SwapOptions
from baton.errors import RunError, cause
from baton.journal import SWAPS, Run, current, standing
from baton.records import Record
from baton.types import AgentId


@dataclass(frozen=True, kw_only=True)
class Request:
    """A swap that is asked for."""

    agent: AgentId
    model: str
    options: SwapOptions
    id: str = ""
    """Its own: the directory that a swap leaves names the request that it answers."""


REQUEST, ANSWER = "request.json", "answer.json"


def ask(path: str | Path, request: Request) -> Path:
    """Leave a request for the job that runs there; the file that its answer will be in.

    Raises:
        RunError: a request waits already.
    """
    home = standing(path).home
    folder = home / SWAPS
    if (folder / REQUEST).exists():
        raise RunError(f"{folder / REQUEST} waits already; let the job take it, or remove it")
    (folder / ANSWER).unlink(missing_ok=True)
    told = {"agent": request.agent, "model": request.model, "options": request.options.model_dump(mode="json")}
    told["id"] = request.id or uuid.uuid4().hex
    records.write_text(folder / REQUEST, json.dumps(told, indent=2) + "\n")
    return folder / ANSWER


def withdraw(home: Path) -> None:
    """Take a request back."""
    (home / SWAPS / REQUEST).unlink(missing_ok=True)


def asked_of(home: Path) -> Request | None:
    """What is asked of the job that runs there."""
    path = home / SWAPS / REQUEST
    if not path.is_file():
        return None
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        names = [str(told[name]) if isinstance(told[name], str) else "" for name in ("agent", "model", "id")]
        if not all(names):
            raise ValueError("agent, model and id have to be texts")
        asked = Request(agent=names[0], model=names[1], options=SwapOptions(**told["options"]), id=names[2])
    except (ValueError, KeyError, TypeError) as error:
        answer(home, {"accepted": False, "why": f"{path} is no request: {cause(error)}"})
        return None
    done = Run(current(home))
    if done.swap is not None and done.swap.get("request") == asked.id:
        # The process died between the swap and its answer.
        answer(home, {"accepted": True, "run": str(done.path), **done.swap})
        return None
    return asked


def answer(home: Path, told: Record) -> None:
    """Tell whoever asked, and take the request away."""
    records.write_text(home / SWAPS / ANSWER, json.dumps(records.plain(told), indent=2) + "\n")
    (home / SWAPS / REQUEST).unlink(missing_ok=True)
