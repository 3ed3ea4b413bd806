"""What a run began with: its config and prompt sets, and the line of the start."""

from __future__ import annotations

import tomllib

from baton import records, starting
from baton.algorithms.options import resolve_group
from baton.algorithms.state import AgentState, Position
from baton.audit.episodes import EpisodeFiles, Part, Playing
from baton.audit.findings import RELATIVE, STAGES
from baton.audit.subject import Subject
from baton.audit.swapped import check_swap
from baton.audit.waiting import Waiting
from baton.config import digest_of
from baton.records import Record
from baton.team import Member, Team

LINE = "line 1"


def check_facts(subject: Subject) -> None:
    """The config, the prompt sets and what else was known before a weight was read."""
    found, start, plan = subject.found, subject.start, subject.plan
    here = found.at(STAGES, LINE)
    found.ok("files", 2)
    written = tomllib.loads((subject.run.path / "config.toml").read_text(encoding="utf-8"))
    found.at("config.toml").compare("files", "digest", start.get("digest"), digest_of(written))
    here.compare("files", "splits", start.get("splits"), plan.splits.record)
    here.compare("files", "parameters", start.get("parameters"), dict(plan.parameters))
    here.compare("counts", "facts", start.get("facts"), dict(plan.env.facts(len(subject.agents))))
    machine = starting.facts(subject.config, subject.threads)
    for at, then, now in records.differences({name: start.get(name) for name in machine}, machine, relative=RELATIVE):
        reason = f"another {at} than the run's ({then} then, {now} now): numbers need not be equal bit for bit"
        found.skip("log-probs", reason)
    for name in start["warm_start"]:
        found.skip("weights", "warm starts are not trained again", 1, name)


def check_start(subject: Subject, files: EpisodeFiles, waiting: Waiting) -> None:
    """The first position, and the episodes of the start accuracy; the fingerprints and tokens of version 0 wait for it."""
    found, start, plan, world = subject.found, subject.start, subject.plan, subject.world
    here = found.at(STAGES, LINE)
    fingerprints = start.get("fingerprints")
    for name in plan.local:
        if fingerprints is None:
            found.skip("weights", "the start line holds no fingerprint of version 0", 1, f"{name}@0")
        else:
            waiting.at(name, 0).fingerprint = (str(fingerprints.get(name)), str(here))
    found.ok("sequence")
    if (swap := start.get("swap")) is not None:
        check_swap(subject, swap, files)
    else:
        members = tuple(Member(agent=a.name, model=a.model) for a in subject.config.agents)
        beta = subject.options.penalty.start
        states = {n: AgentState(beta=beta, lr=t.lr) for n, t in world.trainees.items()}
        expected = records.position_record(Position(team=Team(members=members), agents=states))
        here.compare("sequence", "position", start["position"], expected)
    file = start.get("episodes_file")
    if file is None:
        found.skip("counts", "the start line names no episodes: the start accuracy is taken as it is")
        return
    with here.reading("counts"):
        rows = files.read("counts", file)
        if rows is None:
            return
        playing = Playing(table=world.table, address=starting.start_address(plan), versions={n: 0 for n in subject.agents})
        episodes = files.check(Part(file, rows), playing, starting.start_plays(plan), "start")
        scored = [e.reward for e in episodes if e.is_scored]
        accuracy = sum(scored) / len(scored)
        low, high = plan.env.reward_range
        found.ok("counts")
        computed: Record = {
            "start_accuracy": accuracy,
            "start_prompts": len(scored),
            "is_repeatable": all(seat.speaker is None for seat in plan.seats),
        }
        if swap is None:
            computed["group"] = resolve_group(subject.options, (accuracy - low) / (high - low))
        here.compare("counts", "", {name: start.get(name) for name in computed}, computed)
        for seat in plan.seats:
            waiting.score(seat, 0, file, ["start"], episodes)
