"""What all claims share: arguments, results that outlive the process, paired contrasts, and the last line.

A claim is a question whose contrast and bars are written down before its run (docs/log.md). Its unit is the seed: every arm
meets the same seeds, with the same task and the same start, and a contrast is a difference within a seed. `Results` keeps
what an arm gave for a seed as one JSON line, so that a script that was ended goes on behind the last complete one; a folder
that holds results of another configuration is refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import baton
from baton import records
from baton.console import Console
from baton.core.scores import Interval, mean_interval, paired_interval
from baton.core.trust_region import clopper_pearson_upper
from baton.errors import BatonError, Interrupted, MissingError, RunError
from baton.journal import Run

ROOT = Path(__file__).resolve().parents[2]

Task = TypeVar("Task")
Bars = dict[str, tuple[float, float, bool]]
"""What a claim stands on: name -> (value, bar, whether it holds)."""


# ---- arguments ---------------------------------------------------------------------------------------------------------


def at_least(fewest: int) -> Callable[[str], int]:
    """A number of seeds that the command line may give."""

    def count(text: str) -> int:
        number = int(text)
        if number < fewest:
            why = "a claim needs at least one seed" if fewest == 1 else f"an interval over seeds needs at least {fewest}"
            raise argparse.ArgumentTypeError(f"{number}: {why}")
        return number

    return count


def arguments(doc: str | None, *, seeds: int, fewest: int = 1, quick: str, keep: str) -> argparse.ArgumentParser:
    """The arguments of every claim; `quick` and `keep` say what these two mean here.

    Args:
        seeds: how many the claim rests on.
        fewest: how many it can be computed from.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument(
        "--seeds", type=at_least(fewest), default=seeds, help=f"how many seeds, counted up from --seed (default: {seeds})"
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--keep", type=Path, metavar="DIR", help=keep)
    return parser


KEEPS_RESULTS = "keep what each arm gave for each seed in DIR; a second call goes on where the first was ended"


def guarded(work: Callable[[], int]) -> int:
    """The exit code of a script: an interruption and a known failure are one line each, as everywhere."""
    try:
        return work()
    except BatonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 130 if isinstance(error, Interrupted) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


# ---- what is kept ------------------------------------------------------------------------------------------------------


@contextmanager
def runs_folder(keep: Path | None) -> Iterator[tuple[Path, list[str]]]:
    """Where the runs of a claim go, and the overrides that this needs: a folder that stays, or one that is removed."""
    if keep is not None:
        yield keep, ["checkpoint.keep_promoted=all"]
        return
    with tempfile.TemporaryDirectory(prefix="baton-claim-") as name:
        yield Path(name), []


@dataclass
class Results:
    """What each arm gave for each seed, as JSON knows it; on disk where there is a file."""

    file: Path | None = None
    found: dict[tuple[str, int], Any] = field(default_factory=dict)

    def of(self, arm: str, seed: int, work: Callable[[], Any]) -> Any:
        """The result of an arm for a seed: the one that is there, or that of `work`, durable before this returns."""
        if (arm, seed) not in self.found:
            # As it would be read again, so that a resumed script and one that was left alone see the same values.
            result = json.loads(json.dumps(work()))
            if self.file is not None:
                records.append_record(self.file, {"kind": "result", "arm": arm, "seed": seed, "result": result})
            self.found[arm, seed] = result
        return self.found[arm, seed]

    def values(self, arm: str, seeds: Sequence[int], measure: Callable[[Any], float]) -> list[float]:
        """A number of each seed's result, in the order of the seeds. Raises MissingError where one is not there."""
        missing = [seed for seed in seeds if (arm, seed) not in self.found]
        if missing:
            raise MissingError(f"arm '{arm}' has no result of seed {missing[0]}; a contrast needs every seed in both arms")
        return [float(measure(self.found[arm, seed])) for seed in seeds]

    def mean(self, arm: str, seeds: Sequence[int], measure: Callable[[Any], float]) -> Interval:
        """Mean over seeds of one arm, with its 95 % interval."""
        return mean_interval(self.values(arm, seeds, measure))

    def contrast(self, arm: str, other: str, seeds: Sequence[int], measure: Callable[[Any], float]) -> Interval:
        """Mean over seeds of `arm` minus `other`, within the seed, with its 95 % interval."""
        return paired_interval(self.values(arm, seeds, measure), self.values(other, seeds, measure))


def arm_of(case: str, way: str) -> str:
    """A way of doing things in one of several cases, as results are kept."""
    return f"{case}: {way}"


@contextmanager
def results(keep: Path | None, script: str, settings: Mapping[str, Any]) -> Iterator[Results]:
    """The results of a claim: those in `keep`, held against a second process, or new ones in memory.

    Args:
        script: the claim's `__file__`.
        settings: everything that decides a result and may change from call to call, but not which seeds are run.

    Raises:
        RunError: the folder is in use or damaged, or was measured with other settings, versions or code (names the first).
    """
    if keep is None:
        yield Results()
        return
    file = keep / "results.jsonl"
    told = json.loads(json.dumps({"settings": settings, "versions": where()["versions"], "code": code(Path(script))}))
    with ExitStack() as stack:
        try:
            stack.enter_context(records.locked(keep))
        except RunError as error:
            raise RunError(f"{keep} is in use by another process, or cannot be written; give another --keep") from error
        lines = records.read_records(file)
        if not lines:
            lines = [{"schema": records.SCHEMA, "kind": "configuration", **told}]
        head = {name: value for name, value in lines[0].items() if name not in ("schema", "kind")}
        if changed := records.differences(head, told):
            at, there, here = changed[0]
            raise RunError(
                f"{file} has results of another configuration: {at} is {there!r} there and {here!r} here; "
                "give another --keep, or remove it"
            )
        # Written anew: a line that was torn by a kill must not swallow the next one.
        records.rewrite_records(file, lines)
        yield Results(file, {(line["arm"], line["seed"]): line["result"] for line in lines[1:]})


def code(script: Path) -> str:
    """SHA-256 of what a result comes from: the package, this room, the script and the repository's configs."""
    package = Path(baton.__file__).parent
    digest = hashlib.sha256()
    for path in (*sorted(package.rglob("*.py")), *sorted((ROOT / "configs").glob("*.toml")), Path(__file__), script):
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def run_missing(
    found: Results, work: Callable[[Task], Any], tasks: Mapping[tuple[str, int], Task], *, processes: int = 2
) -> None:
    """Run what (arm, seed) has no result yet, several processes at a time; each result is durable as it comes.

    Args:
        work: a function of a module: a fresh interpreter must find it.
    """
    missing = {at: task for at, task in tasks.items() if at not in found.found}
    with ProcessPoolExecutor(min(processes, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        running = {pool.submit(work, task): at for at, task in missing.items()}
        try:
            for done, future in enumerate(as_completed(running), start=1):
                arm, seed = running[future]
                result = future.result()
                found.of(arm, seed, lambda result=result: result)
                print(f"{done} of {len(missing)}: {arm}, seed {seed}", file=sys.stderr)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


# ---- a run as a result -------------------------------------------------------------------------------------------------


def one_seed(
    config_file: Path, seed: int, run_folder: Path, overrides: Sequence[str], *, baselines: bool = True
) -> dict[str, Any]:
    """Train and evaluate one seed. Minutes are of the wall clock: of training with its warm starts, and of RL alone."""
    overrides = [f"seed={seed}", *overrides]
    config = baton.load_config(config_file, overrides)
    began = time.monotonic()
    with Console(sys.stdout, stages=config.algorithm.stages, agents=[a.name for a in config.agents]) as console:
        begun = (run_folder / "config.toml").exists()
        run = baton.train(config_file, run=run_folder, resume=begun, overrides=overrides, reporter=console)
        minutes = (time.monotonic() - began) / 60
        report = baton.evaluate(run.path, baselines=baselines, reporter=console)
    return {
        "seed": seed,
        "training_minutes": minutes,
        "rl_minutes": rl_seconds(run) / 60,
        "verdicts": dict(Counter(update["verdict"]["kind"] for update in run.updates)),
        "prompts": report["prompts"],
        "facts": report["facts"],
        "rows": report["rows"],
    }


def rl_seconds(run: Run) -> float:
    """Wall clock of a run's updates, from one durable line to the next; what passed while it was interrupted is left out."""
    times = [(r["kind"], float(r["time"])) for r in run.records() if r["kind"] in ("start", "resume", "update")]
    return sum(now - before for (_, before), (kind, now) in pairwise(times) if kind == "update")


def training_tokens(run: Run) -> int:
    """Tokens that a run generated to learn from: its updates' episodes and, where an order was measured, those. The gate's
    probe episodes are not counted; what the agents of a stage share is counted once."""
    options, updates = run.config.algorithm, run.updates
    batches = {(u["stage"] if options.shares_episodes else u["index"]): u["episodes"]["tokens"] for u in updates}
    tokens = sum(sum(spoken.values()) for spoken in batches.values())
    for update in updates if options.is_measured else ():
        rows = records.read_episodes(run.path / update["episodes_file"], ["use", "turns.list.element.ids"])
        tokens += sum(len(turn["ids"]) for row in rows if row["use"] == "order" for turn in row["turns"])
    return tokens


def tell_seed(result: Mapping[str, Any]) -> None:
    """Print what `one_seed` found."""
    updates = sum(result["verdicts"].values())
    print(
        f"\nseed {result['seed']}: training {result['training_minutes']:.1f} minutes, {updates} updates, "
        f"{result['prompts']} test prompts"
    )
    for name, value in result["facts"].items():
        print(f"  {name:46} {value:.3f}   (proven)")
    for row in result["rows"]:
        measured = "" if row["value"] is None else f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        if row["difference"]:
            mean, low, high = row["difference"]
            measured += f"  team minus this {mean:+.3f} [{low:+.3f}, {high:+.3f}]"
        print(f"  {row['name']:46} {measured} {row['note']}")


# ---- what is proven ----------------------------------------------------------------------------------------------------

CONFIDENCE = 0.999
"""One-sided, of one seed against a cap: of 32 seeds of teams that sit on their caps, one would pass in 3 % of all runs."""


def below(cap: float, counts: Iterable[tuple[int, int]]) -> tuple[float, float, bool]:
    """The bar of a proven cap of accuracy: the highest Clopper-Pearson lower end of these (right, asked), one a seed, and
    whether it stays within the cap."""
    highest = max(1.0 - clopper_pearson_upper(n - k, n, confidence=CONFIDENCE) for k, n in counts)
    return highest, cap, highest <= cap


# ---- what is said ------------------------------------------------------------------------------------------------------


def where() -> dict[str, Any]:
    """Machine and versions of a figure."""
    return {
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("baton-rl", "torch", "transformers")},
    }


def shown(interval: Interval, *, sign: str = "") -> str:
    """An interval for people: value [low, high], with `sign` "+" for differences."""
    return f"{interval.value:{sign}.3f} [{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"


def last_line(name: str, *, quick: bool, figures: Any, bars: Bars) -> int:
    """Print which bars hold, then the last line, for programs, and return the exit code: 0 only if all of them do."""
    for bar, (value, wanted, holds) in bars.items():
        print(f"{'holds' if holds else 'FAILS'}: {bar}: {value:.4g} (bar {wanted:.4g})")
    line = {
        "name": name,
        "quick": quick,
        "figures": records.plain(figures),
        "bars": {bar: {"value": value, "bar": wanted, "holds": holds} for bar, (value, wanted, holds) in bars.items()},
        **where(),
    }
    print(json.dumps(line))
    return 0 if all(holds for _, _, holds in bars.values()) else 1
