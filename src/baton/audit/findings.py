"""What an audit has found: what was looked at, what does not follow from the rest, and what could not be judged and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from safetensors import SafetensorError

from baton import records
from baton.errors import BatonError, cause
from baton.records import Record

CHECKS: Mapping[str, str] = {
    "files": "config, prompt sets, team.json, every file that a line names",
    "sequence": "lines: none missing, version ids used once, each position, order and radius from what was before",
    "episodes": "tasks drawn by key, prompt ids, texts of the sampled ids, answers",
    "rewards": "answers, graded again",
    "counts": "mean rewards, counts and weights of reuse of each update; start accuracy and noise floors",
    "pairs": "paired evaluations: prompts drawn by key, where they end, gain and harm from the returns",
    "surrogate": "surrogates: the candidate's messages are the probe episodes' own, the bound follows from both",
    "gate": "looks: probe states drawn by key, all fields from the recorded divergences",
    "verdicts": "updates: verdict, retries, version, beta, lr and streak from the looks",
    "weights": "kept versions: fingerprints of their tensors",
    "log-probs": "sampled tokens, scored again by the version that sampled them",
    "divergences": "promoted updates: both KLs from the weights of both versions",
    "swap": "the start of a run that begins with a swap: what was handed over, and the newcomer's looks",
    "evaluations": "rows: value, interval and difference from the stored episodes",
}
"""What is checked, in the order of the report, and what is counted there."""

NOT_STEPPED = "optimiser steps (loss, gradient, where a step went, moments) are not taken again"
NOT_SAMPLED = "messages are not sampled again: that a token is the one its key draws is not shown, only its probability"
NOT_PROMOTED = (
    "the weights of a candidate that was not promoted are not kept: its recorded divergences are taken as they are"
)
FAILED_EPISODE = "what failed is not failed again; it has no reward"
NOT_PUBLISHED = "a publication that failed is not repeated"
PRUNED = "pruned versions are not kept (checkpoint.keep_promoted = 'all' keeps every one)"
FOREIGN = "a model from outside the run is not kept in it"
AFTER_A_GAP = "what an update began with is unknown after a missing line"
NOT_FINITE = "a step that was not finite is not taken again"
NOT_COUPLED = "that two teams' tokens differ no more often than their laws ask is not shown, only what each team said"
NOT_MEASURED = "predicted gains are taken as they are: the gradients under them are not computed again"
NOT_ALLOCATED = "order 'grad_norm' records norms, not the gains that the radii were shared out by: only their sum is checked"
NOT_HEARD = "what a teammate behind an endpoint said cannot be computed here: its text is taken as it is"
NOT_CALLED = "nobody called the agent at the start: its noise floor rests on words of its own that are not kept"

STAGES = "stages.jsonl"
"""The file of the lines."""
SHOWN = 3
"""Places that are named of what was not checked for one reason."""
RELATIVE = 1e-9
"""Relative tolerance of a number that is computed again from recorded numbers by the same operations."""

ODD = (
    BatonError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    OSError,
    RuntimeError,
    SafetensorError,
)
"""What a stranger's files can raise on the way through code that trusts its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Something recorded that does not follow from the rest of the run."""

    check: str
    file: str
    where: str
    """Line, row or look in the file."""
    what: str
    recorded: Any = None
    recomputed: Any = None


@dataclass
class Findings:
    """What an audit has found so far."""

    checked: Counter[str] = field(default_factory=lambda: Counter[str]())
    faults: list[Fault] = field(default_factory=lambda: list[Fault]())
    unchecked: dict[tuple[str, str], int] = field(default_factory=lambda: dict[tuple[str, str], int]())
    """(check, reason) -> how many."""
    places: dict[tuple[str, str], list[str]] = field(default_factory=lambda: dict[tuple[str, str], list[str]]())
    """(check, reason) -> the first few of them."""
    gaps: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    """Largest gap in nats where numbers are compared within a tolerance."""

    def ok(self, check: str, count: int = 1) -> None:
        """So many were looked at."""
        self.checked[check] += count

    def skip(self, check: str, reason: str, count: int = 1, place: Place | str = "") -> None:
        """So many could not be looked at, and why."""
        if not count:
            return
        at = (check, reason)
        self.unchecked[at] = self.unchecked.get(at, 0) + count
        places = self.places.setdefault(at, [])
        if place and len(places) < SHOWN:
            places.append(str(place))

    def gap(self, name: str, value: float) -> None:
        """The largest gap so far."""
        self.gaps[name] = max(value, self.gaps.get(name, 0.0))

    def at(self, file: str, where: str = "") -> Place:
        """A place of which faults can be told: a file of the run, and the line, row or look in it."""
        return Place(found=self, file=file, where=where)

    def report(self) -> Record:
        """All of it as data: `checks`, `faults`, `not_checked`, and whether the run `holds`."""
        skipped = Counter[str]()
        for (check, _), count in self.unchecked.items():
            skipped[check] += count
        wrong = Counter(fault.check for fault in self.faults)
        return {
            "holds": not self.faults,
            "checks": [
                {
                    "check": name,
                    "what": what,
                    "checked": self.checked[name],
                    "not_checked": skipped[name],
                    "wrong": wrong[name],
                }
                for name, what in CHECKS.items()
            ],
            "faults": [records.plain(fault) for fault in self.faults],
            "not_checked": [
                {"check": check, "reason": reason, "count": count, "places": self.places[check, reason]}
                for (check, reason), count in self.unchecked.items()
            ],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where in a run's files something is recorded. What is wrong there goes to the findings."""

    found: Findings
    file: str
    where: str

    def __str__(self) -> str:
        return f"{self.file} {self.where}"

    def wrong(self, check: str, what: str, recorded: Any = None, recomputed: Any = None) -> None:
        """One line for people."""
        self.found.faults.append(
            Fault(check=check, file=self.file, where=self.where, what=what, recorded=recorded, recomputed=recomputed)
        )

    def compare(self, check: str, what: str, recorded: Any, recomputed: Any) -> bool:
        """Whether two records are equal, with a fault for each field that is not."""
        differ = records.differences(recorded, records.plain(recomputed), relative=RELATIVE)
        for at, one, other in differ:
            self.wrong(check, f"{what}{'.' if what and at else ''}{at}", one, other)
        return not differ

    def reading(self, check: str) -> _Reading:
        """Read a stranger's data inside: what does not fit is a fault in one line."""
        return _Reading(self, check)


@dataclass(frozen=True)
class _Reading:
    """Data of any shape may be met inside: what it raises becomes a fault, never a traceback."""

    place: Place
    check: str

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, ODD):
            return False
        self.place.wrong(self.check, f"cannot be read: {in_one_line(error)}")
        return True


def in_one_line(error: BaseException) -> str:
    """What an error says."""
    return " ".join(str(error).split()) if isinstance(error, BatonError) else cause(error)
