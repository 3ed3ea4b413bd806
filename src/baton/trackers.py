"""Who else is told how a run goes: TensorBoard, wandb, trackio. The run directory stays the truth.

A tracker gets numbers that are in `stages.jsonl` already, after the line is durable. One that fails (its package, the disk,
the network) is named once and left alone from then on: it never stops or changes training. `trackers.json` in the run
directory holds how many lines each one was told, so that a resumed run tells each line at most once, and a tracker that
was added later everything from the start.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any, Protocol, assert_never

from baton.config import TrackerName, TrackOptions
from baton.errors import ConfigError
from baton.records import Record


class Tracker(Protocol):
    """One place that a run is told to. Any exception switches it off for the rest of the process."""

    def start(self, config: Record) -> None:
        """Open the place, or go on with it; `config` is the resolved config."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers after `step` agent updates. A step is told once, steps never decrease."""
        ...

    def finish(self) -> None:
        """Nothing more comes from this process."""
        ...


# ---- what is told ----------------------------------------------------------------------------------------------


def metrics_of(record: Record) -> dict[str, float]:
    """The numbers of an `update` or `stage` line, each under `what/agent` or `stage/what`.

    What was not measured is absent: an update without a gate has no divergence.
    """
    if record["kind"] == "stage":
        entries, pairs = record["entries"], record.get("pairs")
        measured = {} if pairs is None else {"stage/gain_at_least": float(pairs["gain"]["lower_bound"])}
        return (
            measured
            | {
                "stage/number": float(record["stage"]),
                "stage/accepted": sum(entry["word"] != "rejected" for entry in entries) / len(entries),
            }
            | ({"stage/published_bound": float(record["achieved"]["lower_bound"])} if record["achieved"] else {})
        )
    agent, verdict, episodes = str(record["agent"]), record["verdict"], record["episodes"]
    accepted = record["to_version"] is not None
    found = {
        "reward": episodes["reward"],
        "accepted": float(accepted),
        "scale": verdict["scale"] if accepted else 0.0,
        "beta": record["beta"],
        "lr": record["lr"],
        "tokens": sum(episodes["tokens"].values()),
        "cut": episodes["cut"][agent],
        "failed": sum(episodes["failed"].values()),
        "seconds": record["seconds"]["total"],
    }
    if (pairs := record.get("pairs")) is not None:
        found |= {"gain_at_least": pairs["gain"]["lower_bound"], "discordance": pairs["discordance"]}
    surrogate = record.get("surrogate")
    if surrogate is not None and surrogate["gain"]["verdict"] != "void":
        found["surrogate_gain_at_least"] = surrogate["gain"]["lower_bound"]
    gate: Record | None = verdict["gate"]
    if gate is not None:
        found |= {
            "kl": gate["q_gate"],
            "kl_radius": gate["radius_token"],
            "message_mean": gate["message_mean"],
            "message_mean_radius": gate["radius_message_mean"],
        }
    return {f"{name}/{agent}": float(value) for name, value in found.items()}


# ---- to whom ---------------------------------------------------------------------------------------------------


class TensorBoard:
    """Event files in `tensorboard/` of the run directory, flushed with every line."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def start(self, config: Record) -> None:
        is_new = not self._folder.exists()
        self._writer = _load("torch.utils.tensorboard").SummaryWriter(str(self._folder))
        if is_new:
            text = json.dumps(config, indent=2, ensure_ascii=False)
            self._writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class Wandb:
    """A wandb run of its own (WANDB_MODE, WANDB_ENTITY and the rest of its environment count); its files lie in the run
    directory. The terminal stays ours, and neither a login that nobody answers nor a network that is gone holds a run up
    for longer than a minute or two."""

    def __init__(self, folder: Path, *, project: str, id: str) -> None:
        self._folder, self._project, self._id = folder, project, id
        self._run: Any = None

    def start(self, config: Record) -> None:
        wandb = _load("wandb")
        self._run = wandb.init(
            project=self._project,
            name=self._folder.resolve().name,
            id=self._id,
            dir=str(self._folder),
            config=config,
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, init_timeout=30, login_timeout=60, finish_timeout=120),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        self._run.finish()


class Trackio:
    """A trackio run (TRACKIO_DIR, TRACKIO_SPACE_ID and the rest of its environment count). Trackio knows runs by name, so
    the id is part of it: two folders of one name stay two runs."""

    def __init__(self, folder: Path, *, project: str, id: str) -> None:
        self._name, self._project = f"{folder.resolve().name}-{id}", project
        self._package: Any = None
        self._run: Any = None

    def start(self, config: Record) -> None:
        self._package = _load("trackio")
        self._run = self._package.init(
            project=self._project, name=self._name, config=config, resume="allow", embed=False, auto_log_cpu=False
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        self._package.finish()


def _load(module: str) -> Any:
    """A tracker's package; what it warns of is its own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


def check(options: TrackOptions) -> None:
    """Refuse a tracker whose package is absent (called before any model loads).

    Raises:
        ConfigError: names the tracker and how to install it.
    """
    for name in options.names:
        try:
            # Not find_spec: wandb leaves a folder `wandb` where it worked, which Python takes for a package.
            package_version(name)
        except PackageNotFoundError:
            raise ConfigError(
                f"track.names: '{name}' is not installed; pip install 'baton-rl[{name}]', or take it out of track.names"
            ) from None


def build(name: TrackerName, folder: Path, *, project: str, id: str) -> Tracker:
    """The tracker of this name for the run in `folder`; `id` tells it from every other run."""
    match name:
        case "tensorboard":
            return TensorBoard(folder)
        case "wandb":
            return Wandb(folder, project=project, id=id)
        case "trackio":
            return Trackio(folder, project=project, id=id)
        case _:
            assert_never(name)


# ---- telling them ----------------------------------------------------------------------------------------------


class Trackers:
    """Tells every tracker of a run each line once, and survives all of them.

    Args:
        folder: the run directory.
        say: where a failure is named (once for each tracker).
    """

    def __init__(self, options: TrackOptions, folder: Path, *, say: Callable[[str], None]) -> None:
        self._options, self._folder, self._say = options, folder, say
        self._live: dict[str, Tracker] = {}
        self._told: dict[str, int] = {}
        self._lines = self._updates = 0
        self._id = ""

    def start(self, config: Record, lines: Sequence[Record]) -> None:
        """Open every tracker and tell it what it has not heard of the run's journal so far (`lines`, with its line of kind
        `start`)."""
        if not self._options.names:
            return
        first = next(line for line in lines if line["kind"] == "start")
        self._id = hashlib.sha256(f"{first['digest']} {first['time']}".encode()).hexdigest()[:12]
        self._told = self._read()
        for name in self._options.names:
            self._say(f"tracking with {name}")
            self._guard(name, lambda name=name: self._open(name, config))
        for line in lines:
            if line["kind"] in ("update", "stage"):
                self.tell(line)

    def tell(self, record: Record) -> None:
        """One more line of kind `update` or `stage`, in the order of the journal."""
        self._lines += 1
        self._updates += record["kind"] == "update"
        for name, tracker in list(self._live.items()):
            if self._told.get(name, 0) < self._lines:
                self._guard(name, lambda name=name, tracker=tracker: self._tell(name, tracker, record))

    def finish(self) -> None:
        """The run ends or stops here."""
        for name, tracker in list(self._live.items()):
            self._guard(name, tracker.finish)
        self._live.clear()

    def _open(self, name: TrackerName, config: Record) -> None:
        tracker = build(name, self._folder, project=self._options.project, id=self._id)
        tracker.start(config)
        self._live[name] = tracker

    def _tell(self, name: str, tracker: Tracker, record: Record) -> None:
        # The mark comes first: after a crash between the two a line is missing there, never told twice.
        self._told[name] = self._lines
        partial = self._folder / ".trackers.json.partial"
        partial.write_text(json.dumps({"run": self._id, "told": self._told}) + "\n", encoding="utf-8")
        partial.replace(self._folder / "trackers.json")
        tracker.log(self._updates, metrics_of(record))

    def _read(self) -> dict[str, int]:
        """Lines told to each tracker by earlier processes of this very run. A mark that cannot be read counts as none."""
        try:
            saved = json.loads((self._folder / "trackers.json").read_text(encoding="utf-8"))
            return {str(k): int(v) for k, v in saved["told"].items()} if saved["run"] == self._id else {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _guard(self, name: str, action: Callable[[], object]) -> None:
        try:
            with redirect_stdout(sys.stderr):  # what a package prints is not the run's output
                action()
        # Whatever someone else's package raises: training goes on.
        except Exception as error:
            self._live.pop(name, None)
            reason = " ".join(str(error).split())[:300]
            self._say(
                f"tracker {name} failed ({type(error).__name__}: {reason}); the run goes on without it, and its directory "
                "has everything"
            )
