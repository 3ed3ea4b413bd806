"""Reports of `baton evaluate` that a run holds: the list that made each is given its stored episodes again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton import records
from baton.algorithms.state import Position
from baton.assemble import Plan
from baton.audit.episodes import EpisodeFiles, Part, Playing
from baton.audit.subject import Subject
from baton.audit.waiting import Waiting
from baton.engines.engine import Codec
from baton.errors import DataError
from baton.evaluation import Bench, Measurement, report_rows, row_record, start_name
from baton.host import Silent
from baton.records import Record
from baton.types import AgentId, Episode


class Evaluations:
    """The stored reports of a run."""

    def __init__(self, subject: Subject, files: EpisodeFiles, waiting: Waiting) -> None:
        self.subject, self.files, self.waiting = subject, files, waiting

    def check(self, positions: Sequence[Position]) -> None:
        """Every report; `positions` are those that the run was at."""
        for path in sorted((self.subject.run.path / "evaluations").glob("*.json")):
            file = f"evaluations/{path.name}"
            with self.subject.found.at(file).reading("evaluations"):
                self._report(file, json.loads(path.read_text(encoding="utf-8")), positions)

    def _report(self, file: str, report: Record, positions: Sequence[Position]) -> None:
        """Make the report's rows of its stored episodes, by the list that made the report."""
        subject, found = self.subject, self.subject.found
        here = found.at(file)
        episodes = file.removesuffix(".json") + ".parquet"
        rows = self.files.read("evaluations", episodes)
        if rows is None:
            return
        versions: dict[AgentId, int] = report["versions"]
        if not any(dict(p.team.versions) == versions for p in positions):
            here.wrong("evaluations", "the run was never at these versions", versions)
            return
        config = subject.plan.config
        config = config.model_copy(
            update={"eval": config.eval.model_copy(update={"temperature": float(report["temperature"])})}
        )
        count = int(report["prompts"]) * int(report["k"])
        plan = replace(subject.plan, config=config)
        bench = _StoredBench(self, episodes, rows, plan, k=int(report["k"]), count=count)
        try:
            now = {n: subject.run.path / records.version_folder(n, versions[n]) for n in plan.local}
            start = {n: subject.run.path / records.version_folder(n, 0) for n in plan.local}
            made = report_rows(
                bench,
                now,
                start,
                baselines=report["baselines"],
                full_information=report["full_information"],
                start_name=start_name(subject.run),
            )
        finally:
            bench.close()
        here.compare("evaluations", "prompts", report["prompts"], len(bench.tasks))
        here.compare("evaluations", "facts", report["facts"], dict(plan.env.facts(len(subject.agents))))
        played = {result.name for result in bench.results}
        for use in sorted({str(row["use"]) for row in rows} - played):
            found.at(episodes).wrong("evaluations", "episodes of a measurement that is none of the report's", use)
        said = {str(row["name"]): row for row in report["rows"]}
        here.compare("evaluations", "rows", list(said), [row.name for row in made])
        for row in made:
            found.ok("evaluations")
            if row.name in said:
                # A note is words beside the numbers, and may name a model that is not here.
                computed = row_record(replace(row, note=said[row.name]["note"]))
                found.at(file, f"row '{row.name}'").compare("evaluations", "", said[row.name], computed)


class _StoredBench(Bench):
    """Gives an evaluation's rows the episodes that were stored, each checked on the way."""

    def __init__(self, audit: Evaluations, file: str, rows: Sequence[Record], plan: Plan, *, k: int, count: int) -> None:
        super().__init__(plan, k=k, episodes=count, reporter=Silent())
        self.audit, self.file = audit, file
        self.parts: dict[str, Part] = {}
        uses = [str(row["use"]) for row in rows]
        for use in dict.fromkeys(uses):
            own = [row for row, of in zip(rows, uses, strict=True) if of == use]
            self.parts[use] = Part(file, own, uses.index(use))

    def outside(self, spec: str) -> tuple[Path, Codec, int]:
        """A model of which the run holds nothing."""
        nobody: Any = None
        return Path(), nobody, 0

    def play(self, measurement: Measurement) -> Sequence[Episode]:
        """The stored episodes of this name."""
        name, plays = measurement.name, measurement.plays
        if name not in self.parts:
            raise DataError(f"{self.file} holds no episodes of '{name}'")
        nobody: Any = None
        playing = Playing(
            table=self.table(measurement, nobody),
            address=self.address,
            versions=measurement.versions,
            substitute=measurement.substitute,
            drawn_from="test",
            foreign=frozenset(agent for agent, folder in measurement.folders.items() if folder == Path()),
        )
        episodes = self.audit.files.check(self.parts[name], playing, plays, name)
        if len(episodes) != len(plays):
            raise DataError(f"{len(episodes)} episodes of '{name}', the report speaks of {len(plays)}")
        for seat in measurement.lineup.seats:
            if seat.codec is not None:
                folder = measurement.folders[seat.agent]
                version = records.version_of(folder)
                self.audit.waiting.score(seat, version, self.file, [name], episodes, model=folder.parent.name)
        return episodes
