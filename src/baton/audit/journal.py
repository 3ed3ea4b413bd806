"""The lines of a run in their order: none missing, none twice, each update from where the one before it ended."""

from __future__ import annotations

import json
from collections.abc import Collection

import torch

from baton import records
from baton.algorithms import sat
from baton.algorithms.pairs import stage_claim
from baton.algorithms.state import PairsReport, Position, StageEntry
from baton.audit.episodes import EpisodeFiles, Part
from baton.audit.evidence import Evidence, Stage
from baton.audit.findings import RELATIVE, STAGES
from baton.audit.subject import Subject
from baton.audit.updates import Updates
from baton.audit.waiting import Waiting
from baton.journal import team_record
from baton.records import Record
from baton.types import AgentId


class Journal:
    """Everything after the line of the start."""

    def __init__(self, subject: Subject, files: EpisodeFiles, waiting: Waiting) -> None:
        self.subject, self.stage = subject, Stage()
        self.evidence = Evidence(subject, files, waiting, self.stage)
        self.updates = Updates(subject, self.evidence, waiting, self.stage)
        self.positions: list[Position] = []
        """Every one that the run was at."""
        self.team_files: Record = {}
        """Files of the team after the last line that was read."""
        self.begun: dict[AgentId, Record] = {}
        """The last line of each agent that took a version id."""

    def check(self, chosen: Collection[int]) -> None:
        """Every line in its order; and the files of each update whose line is chosen (by its `id`) on the way."""
        subject, found, stage = self.subject, self.subject.found, self.stage
        total = sat.total_updates(subject.options, len(subject.trained))
        before: Position | None = records.read_position(subject.start["position"])
        self.positions, self.team_files = [before], subject.start["files"]
        index = before.done
        owed: Record | None = None
        """The update whose stage line comes next."""
        for number, line in enumerate(subject.lines[1:], start=2):
            where, kind = f"line {number}", line.get("kind")
            here = found.at(STAGES, where)
            found.ok("sequence")
            if owed is not None and kind in ("begin", "update", "end"):
                here.wrong("sequence", f"the line of stage {owed['stage']} is missing before this one")
                owed = None
            if kind == "start":
                here.wrong("sequence", "a second line of the start")
            elif kind == "begin":
                with here.reading("sequence"):
                    self._begin(line, where)
            elif kind == "update":
                with here.reading("sequence"):
                    if line["index"] != index:
                        lost = f"update {index}" if line["index"] == index + 1 else f"updates {index} to {line['index'] - 1}"
                        what = f"no line tells of {lost}" if line["index"] > index else "an update is told of twice"
                        here.wrong("sequence", f"{what}: index", line["index"], index)
                        before = None
                        stage.lose()
                    index = int(line["index"]) + 1
                    if index > total:
                        here.wrong("sequence", "more updates than stages: index", index - 1, total - 1)
                after: Position | None = None
                with here.reading("sequence"):
                    subject.reporter.progress("updates", index, total)
                    begun = self.begun.get(str(line["agent"]))
                    after = self.updates.check(line, where, before, self.team_files, begun, is_chosen=id(line) in chosen)
                    self.positions.append(after)
                    self.team_files = line["files"]
                    owed = None if after.entries else line
                if after is None:
                    stage.lose()
                before = after
            elif kind == "stage":
                with here.reading("sequence"):
                    if owed is None:
                        here.wrong("sequence", "a stage line where no stage ended")
                    elif stage.entries is not None:
                        found_pairs = self._stage_pairs(int(owed["stage"]), stage.entries, before)
                        expected = sat.stage_report(int(owed["stage"]), stage.entries, found_pairs)
                        recorded = {n: v for n, v in line.items() if n not in ("kind", "schema", "time")}
                        here.compare("sequence", "", recorded, expected)
                owed, stage.entries = None, ()
            elif kind not in ("resume", "end"):
                here.wrong("sequence", "a line of no known kind", kind)
        with found.at(STAGES, f"line {len(subject.lines)}").reading("sequence"):
            self._ending(total)
        self.evidence.unfinished(self.positions[-1])
        self._team()
        self._leftovers()

    def _stage_pairs(self, stage: int, entries: tuple[StageEntry, ...], now: Position | None) -> PairsReport | None:
        """What the pairs of a stage show (step 20); None where none were to be played."""
        world, found = self.subject.world, self.subject.found
        start = {e.agent: e.from_version for e in entries if e.word != "rejected"}
        if not world.certificate.stage_pairs or not start or now is None:
            return None
        file = records.stage_pairs_file(stage)
        rows = self.evidence.files.read("pairs", file)
        if rows is None:
            return None
        pair, beside = (Part(file, [row for row in rows if row["use"] == use]) for use in ("pair", "beside"))
        if len(pair.rows) + len(beside.rows) != len(rows):
            found.at(file).wrong("pairs", "holds rows of another use than pair and beside")
        versions = dict(now.team.versions)
        other = {**versions, **start}
        report, played = self.evidence.comparisons.check(
            pair,
            Part(file, beside.rows, len(pair.rows)),
            stage=stage,
            who="stage",
            versions=versions,
            other=other,
            count=world.certificate.stage_pairs,
            claim=stage_claim(world.certificate, stage=stage),
        )
        for seat in self.subject.plan.seats:
            uses = {"pair": versions[seat.agent], "beside": other[seat.agent]}
            for version in set(uses.values()):
                mine = [use for use, of in uses.items() if of == version]
                episodes = [p.of(use == "beside") for p in played for use in mine]
                self.evidence.waiting.score(seat, version, file, mine, episodes)
        return report

    def _begin(self, line: Record, where: str) -> None:
        """Ids are taken one after the other, each once."""
        agent, version = line["agent"], line["version"]
        here = self.subject.found.at(STAGES, where)
        last = self.begun[agent]["version"] if agent in self.begun else 0
        self.begun[agent] = line
        if agent not in self.subject.trained:
            here.wrong("sequence", "an agent that the team does not train", agent)
        elif version <= last:
            here.wrong("sequence", f"a version id is given twice or goes back: {agent}@", version, last + 1)
        elif version > last + 1:
            here.wrong(
                "sequence", f"the line that takes version {last + 1} of '{agent}' is missing: version", version, last + 1
            )

    def _ending(self, total: int) -> None:
        """How the run says that it ended, against where it stands."""
        lines, position = self.subject.lines, self.positions[-1]
        if lines[-1].get("kind") != "end" or lines[-1].get("ending") == "interrupted":
            return
        reached = "finished" if position.done == total else "(not at its end)"
        computed = sat.ending(self.subject.world, position) or reached
        self.subject.found.at(STAGES, f"line {len(lines)}").compare("sequence", "ending", lines[-1]["ending"], computed)

    def _team(self) -> None:
        """team.json, and the files of the promoted team."""
        found, folder = self.subject.found, self.subject.run.path
        here = found.at("team.json")
        found.ok("files")
        with here.reading("files"):
            said = json.loads((folder / "team.json").read_text(encoding="utf-8"))
            now = team_record(self.positions[-1], self.team_files)
            if self.subject.lines[-1].get("kind") == "update" and records.differences(said, now, relative=RELATIVE):
                found.skip("files", "the run stopped between its last update's line and team.json, which is written next")
            else:
                here.compare("files", "", said, now)
        with found.at(STAGES).reading("files"):
            for files in self.team_files.values():
                for name in ("weights", "training"):
                    if files[name] is not None:
                        found.ok("files")
                        if not (folder / files[name]).exists():
                            found.at(files[name]).wrong("files", "is gone: the promoted team's files are always kept")
                        elif name == "training":
                            with found.at(files[name]).reading("files"):
                                records.check_training(folder / files[name])
                                self._masters(files)

    def _masters(self, files: Record) -> None:
        """fp32 masters that are not served themselves: rounded, they are the promoted weights."""
        found, folder = self.subject.found, self.subject.run.path
        masters, _ = records.load_training(folder / files["training"])
        if not masters or not (folder / files["weights"]).is_dir():
            return
        served = records.stored(folder / files["weights"] / "model.safetensors")
        for name in served:
            tensor = served[name]
            if name not in masters or not torch.equal(masters[name].to(tensor.dtype), tensor):
                found.at(files["training"]).wrong("weights", f"master {name} rounds to other weights than those promoted")
                return

    def _leftovers(self) -> None:
        """Files of updates that no line names. Between an update's files and its line a process can die, so only a run that
        came to its end has none."""
        lines = self.subject.lines
        if lines[-1].get("kind") != "end":
            return
        named = {str(line.get("episodes_file")) for line in lines}
        named |= {
            records.stage_pairs_file(int(line["stage"]))
            for line in lines
            if line.get("kind") == "stage" and line.get("pairs")
        }
        folder = self.subject.run.path / "episodes"
        for path in sorted((*folder.glob("[0-9]*.parquet"), *folder.glob("stage-*.parquet"))):
            name = f"episodes/{path.name}"
            if name not in named:
                what = "belongs to an update or a stage that no line of stages.jsonl tells of"
                self.subject.found.at(name).wrong("sequence", what)
