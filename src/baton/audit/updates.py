"""The line of an update: whose turn it was, which verdict follows from its looks, and which position from the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from baton import records
from baton.algorithms import sat
from baton.algorithms.acceptance import Trainee
from baton.algorithms.state import AgentState, Position, Retry, StageEntry, StagePlan
from baton.audit.evidence import Evidence, Read, Stage
from baton.audit.findings import (
    AFTER_A_GAP,
    NOT_ALLOCATED,
    NOT_FINITE,
    NOT_MEASURED,
    NOT_PROMOTED,
    NOT_PUBLISHED,
    NOT_STEPPED,
    STAGES,
)
from baton.audit.subject import Subject, Update
from baton.audit.waiting import Waiting
from baton.core import trust_region
from baton.host import complete
from baton.records import Record
from baton.team import update_order
from baton.types import Accepted, AgentId, GateRecord, Rejected, Verdict, verdict_word


class Updates:
    """Update lines, one after the other."""

    def __init__(self, subject: Subject, evidence: Evidence, waiting: Waiting, stage: Stage) -> None:
        self.subject, self.evidence, self.waiting, self.stage = subject, evidence, waiting, stage

    def check(
        self,
        line: Record,
        where: str,
        before: Position | None,
        team_files: Record,
        begun: Record | None,
        *,
        is_chosen: bool,
    ) -> Position:
        """Check one line against what was before it (position, files of the team, the line that begins the update) and,
        where it is chosen, against its own files; gives the position it records."""
        found, options = self.subject.found, self.subject.options
        here = found.at(STAGES, where)
        agent, index, stage = str(line["agent"]), int(line["index"]), int(line["stage"])
        after = records.read_position(line["position"])
        plan = self._whose_turn(line, where, before, after)
        trainee = sat.allowed(self.subject.world.trainees[agent], plan)
        update = Update(line=line, where=where, trainee=trainee, looks=records.read_looks(line))
        here.compare("sequence", "schedule", line["schedule"], options.name)
        if begun is None:
            here.wrong("sequence", f"no line begins this update of '{agent}'")
        else:
            here.compare("sequence", "candidate_version", line["candidate_version"], begun["version"])
            here.compare("sequence", "stage", stage, begun["stage"])
        here.compare("files", "episodes_file", line["episodes_file"], f"episodes/{index:06d}-{agent}.parquet")

        read: Read | None = None
        if before is None:
            found.skip("episodes", AFTER_A_GAP, 1, where)
        else:
            if not before.entries:
                self.stage.team, self.stage.file = before.team, update.episodes_file
            before = replace(before, stage=plan)
            if options.order == "bandit":
                before = sat.credit(before, float(line["episodes"]["reward"]))
            if is_chosen:
                read = self.evidence.check(update, before)
        retries = tuple(Retry(**retry) for retry in line["retries"])
        verdict = self._verdict(update, retries, None if read is None else read.has_signal)
        self._compare_verdict(update, verdict)
        is_accepted = isinstance(verdict, Accepted)
        if is_chosen:
            found.skip("verdicts", NOT_STEPPED, 1 if line["steps"] else 0)
            at_hand = sum(g.passed for g in update.looks) if is_accepted else 0
            found.skip("divergences", NOT_PROMOTED, len(update.looks) - at_hand)
        if before is None:
            return after

        here.compare("sequence", "from_version", line["from_version"], before.team.member(agent).version)
        if is_chosen and is_accepted:
            self.waiting.at(agent, int(line["from_version"])).promotion = update
        here.compare("files", "files", line["files"], _files_after(update, verdict, team_files))
        state = before.agents[agent]
        here.compare("verdicts", "beta", line["beta"], state.beta)
        here.compare("verdicts", "lr", line["lr"], state.lr)
        here.compare("verdicts", "retries", line["retries"], [_retry(state, n, r) for n, r in enumerate(retries, 1)])
        # What only the episodes tell is taken as recorded where they were not looked into.
        recorded = after.agents[agent]
        sums = recorded.replay if read is None else read.replay(state, update)
        cursor = state.cursor
        if is_accepted and not update.is_shared(options):
            cursor = recorded.cursor if read is None else read.collected.cursor
        adapted = sat.adapt(replace(state, replay=sums, cursor=cursor), trainee, verdict, update.looks, options)
        here.compare("verdicts", "after", line["after"], adapted)
        here.compare("sequence", "position", line["position"], self._position(update, before, verdict, adapted))
        return after

    # ---- whose turn ----

    def _whose_turn(self, line: Record, where: str, before: Position | None, after: Position) -> StagePlan | None:
        """Whose turn it is, and what its stage has decided: of the stage's first update as `sat.plan_stage` decides it."""
        options, trained, index = self.subject.options, self.subject.trained, int(line["index"])
        n = len(trained)
        plan: StagePlan | None = None
        if options.name == "independent":
            turn = {"stage": index % options.stages + 1, "agent": trained[min(index // options.stages, n - 1)]}
        else:
            stage = index // n + 1
            if before is None:
                plan = after.stage
            elif before.stage is not None and index % n:
                plan = before.stage
            else:
                plan = self._planned(where, before, after.stage, stage)
            order = trained if plan is None else plan.order
            turn = {"stage": stage, "agent": order[index % n]}
        ours = {"stage": line["stage"], "agent": line["agent"]}
        self.subject.found.at(STAGES, where).compare("sequence", "whose turn", ours, turn)
        return plan

    def _planned(self, where: str, before: Position, recorded: StagePlan | None, stage: int) -> StagePlan | None:
        """Order and radii of a stage. Where they were measured, they follow from the recorded gains."""
        found, world, options, trained = self.subject.found, self.subject.world, self.subject.options, self.subject.trained
        here = found.at(STAGES, where)
        if not options.is_measured:
            return complete(sat.plan_stage(world, before, stage))[0]
        if recorded is None or set(recorded.gains) != set(trained):
            here.wrong("sequence", "position.stage tells of no gain of each agent", recorded)
            return None
        found.skip("sequence", NOT_MEASURED, 1, f"stage {stage}")
        gains: dict[AgentId, float | None] = {a: float(recorded.gains[a]) for a in trained}
        order = (
            trained
            if options.name == "joint"
            else update_order(options.order, trained, seed=world.seed, stage=stage, gains=gains)
        )
        radii = {a: t.radius_token for a, t in world.trainees.items()}
        if options.radius_allocation == "greedy":
            mean = sum(radii.values()) / len(radii)
            if options.order == "grad_norm":
                found.skip("sequence", NOT_ALLOCATED, 1, f"stage {stage}")
                quanta = [recorded.radii[a] / (mean / 4.0) for a in trained]
                if not all(q in range(1, 9) for q in quanta) or sum(quanta) != 4 * len(quanta):
                    what = f"position.stage.radii are no shares of {mean * len(radii):g} nats in quanta of {mean / 4.0:g}"
                    here.wrong("sequence", what, dict(recorded.radii))
                radii = dict(recorded.radii)
            else:
                given = trust_region.allocate_radius(
                    [float(recorded.gains[a]) / math.sqrt(radii[a]) for a in trained],
                    budget=mean * len(radii),
                    quantum=mean / 4.0,
                    cap=2.0 * mean,
                )
                radii = dict(zip(trained, given, strict=True))
        return StagePlan(order=order, radii=radii, gains=recorded.gains)

    # ---- the verdict ----

    def _verdict(self, update: Update, retries: Sequence[Retry], has_signal: bool | None) -> Verdict:
        """The verdict that follows from the looks (and from the episodes, where they were read)."""
        found, looks, options = self.subject.found, update.looks, self.subject.options
        here, recorded, pairs = found.at(STAGES, update.where), update.line["verdict"], update.line.get("pairs")
        most = options.backtrack.tries - 1
        steps = [(1.0, 0), *((min(1.0, r.shrink_total), n) for n, r in enumerate(retries, 1) if r.shrink_total > 0.0)]
        if len(retries) == most:
            steps += [(scale, 0) for scale in trust_region.line_search_scales(options.line_search.halvings)]
        made = steps[: len(looks)]
        here.compare("verdicts", "scales of the looks", [g.scale for g in looks], [x for x, _ in made])
        here.compare("verdicts", "attempts of the looks", [g.attempt for g in looks], [n for _, n in made])
        passed = [n for n, g in enumerate(looks) if g.passed]
        if passed and passed[0] != len(looks) - 1:
            here.wrong("verdicts", f"look {passed[0] + 1} passed, and {len(looks)} were taken")
        reason = recorded.get("reason")
        tried = _tries(looks, most) if passed or reason == "radius" else len(retries)
        here.compare("verdicts", "number of retries", len(retries), tried)
        verdict: Verdict
        if passed:
            verdict = Accepted(scale=looks[-1].scale, gate=looks[-1])
            if reason == "not_published":
                found.skip("verdicts", NOT_PUBLISHED, 1, update.where)
                verdict = Rejected(reason="not_published", gate=looks[-1])
            elif pairs is not None and pairs["harm"]["verdict"] == "positive":
                verdict = Rejected(reason="harm", gate=looks[-1])
        elif len(looks) == len(steps) and len(retries) == most:
            verdict = Rejected(reason="radius", gate=looks[-1])
        elif not looks and (reason == "no_signal" if has_signal is None else not has_signal):
            verdict = Rejected(reason="no_signal")
        else:
            if reason == "non_finite":
                found.skip("verdicts", NOT_FINITE, 1, update.where)
            verdict = Rejected(reason="non_finite")
        return verdict

    def _compare_verdict(self, update: Update, verdict: Verdict) -> None:
        """The recorded verdict, and what a line holds with one verdict and not with another."""
        line, here, recorded = update.line, self.subject.found.at(STAGES, update.where), update.line["verdict"]
        said = str(recorded["kind"]) + "".join(f" {recorded[n]}" for n in ("scale", "reason") if n in recorded)
        follows = f"accepted {verdict.scale}" if isinstance(verdict, Accepted) else f"rejected {verdict.reason}"
        if said != follows:
            here.wrong("verdicts", "verdict", said, follows)
        else:
            here.compare("verdicts", "verdict.gate", recorded["gate"], verdict.gate)
        if (line["replay"] is None) != (follows == "rejected no_signal"):
            here.wrong("verdicts", "the replay test is made unless there is no signal: replay", line["replay"])
        word, is_accepted = verdict_word(verdict), isinstance(verdict, Accepted)
        is_compared = is_accepted or follows == "rejected harm"
        asked = self.subject.world.certificate.update_pairs > 0 and is_compared
        if (line.get("pairs") is not None) != asked:
            here.wrong(
                "pairs",
                "a published candidate is compared where pairs are configured, no other is: pairs",
                line.get("pairs"),
            )
        if (line.get("surrogate") is not None) != (self.subject.world.certificate.surrogate and is_accepted):
            what = "an accepted update has one where it is configured, no other has: surrogate"
            here.wrong("surrogate", what, line.get("surrogate"))
        version = update.version
        self.subject.found.ok("verdicts")
        here.compare("verdicts", "word", line["word"], word)
        here.compare("verdicts", "to_version", line["to_version"], version if is_accepted else None)
        if bool(line["fingerprint"]) != is_accepted:
            here.wrong("verdicts", f"a fingerprint and '{word}' do not fit: fingerprint", line["fingerprint"])
        if is_accepted:
            self.waiting.at(update.agent, version).fingerprint = (str(line["fingerprint"]), str(here))
            bound = self.subject.tolerances.token_mean
            if line["published_gap"] is None or not line["published_gap"] <= bound:
                here.wrong("verdicts", f"published_gap, at most {bound:g}", line["published_gap"])

    # ---- what follows ----

    def _position(self, update: Update, before: Position, verdict: Verdict, adapted: AgentState) -> Record:
        """The position after an update, as `sat.update` makes it."""
        agent, options = update.agent, self.subject.options
        reward = float(update.line["episodes"]["reward"])
        entries = (*before.entries, _entry(update.line, update.trainee, verdict))
        if self.stage.entries is not None:
            self.stage.entries = entries
        is_whole = options.name == "independent" or len(entries) == len(self.subject.trained)
        is_accepted = isinstance(verdict, Accepted)
        lost = () if isinstance(verdict, Accepted) else ((verdict.reason, reward),)
        expected = replace(
            before,
            team=before.team.promote(agent, verdict, update.version) if is_accepted else before.team,
            agents={**before.agents, agent: adapted},
            done=before.done + 1,
            stalled=() if is_accepted else before.stalled + lost,
            entries=() if is_whole else entries,
            moved=(agent, reward, is_accepted) if options.order == "bandit" else None,
        )
        return records.position_record(expected)


def _tries(looks: Sequence[GateRecord], most: int) -> int:
    """How often was trained again before these looks came to an end, `most` at most: a retry is made because every candidate
    before it failed, and none is left out before the line search."""
    last = looks[-1] if looks else None
    if last is None or not last.passed:
        return most
    return 0 if len(looks) == 1 else last.attempt or most


def _files_after(update: Update, verdict: Verdict, before: Record) -> Record:
    """The files after an update: those before it, with the promoted agent's own in place of its old ones."""
    expected = dict(before)
    line, agent = update.line, update.agent
    if isinstance(verdict, Accepted):
        # What was shrunk keeps the moments of its start; a retry has its own training's.
        trained = len(line["steps"]) // (1 + len(line["retries"]))
        steps = before[agent]["steps"] + (trained if verdict.scale == 1.0 or verdict.gate.attempt else 0)
        weights = records.version_folder(agent, update.version)
        training = line["files"][agent]["training"]
        own = f"state/{agent}/training-{line['index']:06d}.safetensors"
        training = training if training == own else before[agent]["training"]
        expected[agent] = {"weights": weights, "training": training, "steps": steps}
    return expected


def _retry(state: AgentState, number: int, retry: Retry) -> Retry:
    """Retry `number` of an update that began in this state, with the length that was recorded of it (2.5)."""
    lr = trust_region.retry_lr(state.lr, number)
    ratio = lr / state.lr
    return replace(
        retry,
        beta=trust_region.retry_penalty(state.beta, number),
        lr=lr,
        shrink_lr=ratio,
        shrink_beta=retry.shrink_total / ratio,
    )


def _entry(line: Record, trainee: Trainee, verdict: Verdict) -> StageEntry:
    """What a stage keeps of an update."""
    return StageEntry(
        agent=str(line["agent"]),
        q_gate=verdict.gate.q_gate if isinstance(verdict, Accepted) else 0.0,
        radius=trainee.radius_token,
        episodes=int(line["episodes"]["n"]),
        word=verdict_word(verdict),
        from_version=int(line["from_version"]),
    )
