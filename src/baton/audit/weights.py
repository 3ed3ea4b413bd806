"""The kept versions, agent by agent: fingerprints, log-probabilities, noise floors, and divergences from one to the next.

At most two versions of one agent are in memory at a time, one of them as the law that it gave its probe states (an anchor).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from baton import assemble, records, starting
from baton.algorithms.acceptance import ProbeStates, ReplaySums, Trainee, check_replay, look
from baton.algorithms.episodes import agent_batch, episode_advantages
from baton.algorithms.state import Position
from baton.assemble import Crew
from baton.audit.episodes import EpisodeFiles
from baton.audit.findings import NOT_CALLED, NOT_SAMPLED, PRUNED, STAGES
from baton.audit.subject import Subject, Update, own_rows
from baton.audit.tolerances import KL_FLOOR
from baton.audit.waiting import Due, Reweighed, Scoring, Waiting
from baton.core import batching
from baton.engines.engine import Anchor, Learner
from baton.errors import ReplayGapError
from baton.records import LookRows
from baton.types import AgentId, Snapshot, TokenBatch


@dataclass(frozen=True, kw_only=True)
class _Judged:
    """A promoted update whose divergence waits for its second version."""

    update: Update
    states: ProbeStates
    anchor: Anchor
    recorded: LookRows


class Weights:
    """The versions of a run, and all that waits for one of them."""

    def __init__(self, subject: Subject, files: EpisodeFiles, waiting: Waiting, positions: Sequence[Position]) -> None:
        self.subject, self.files, self.waiting = subject, files, waiting
        self.first, self.now = positions[0].team, positions[-1].team

    def check(self) -> None:
        """Agent by agent, version by version: what waits for it, and the divergence from the version before."""
        subject, found = self.subject, self.subject.found
        named = self.waiting.versions
        done = 0
        found.skip("log-probs", NOT_SAMPLED, self.waiting.tokens)
        for agent in subject.plan.local:
            crew: Crew | None = None
            origin = records.version_folder(agent, 0)
            with found.at(origin).reading("weights"):
                crew = assemble.crew(subject.plan.config, {agent: subject.run.path / origin}, learners=[agent])
            judged: _Judged | None = None
            versions = {v for a, v in named if a == agent} | {0, self.now.versions.get(agent, 0)}
            for version in sorted(versions):
                done += 1
                subject.reporter.progress("versions", done, len(named))
                due = self.waiting.at(agent, version)
                learner = None if crew is None else self._load(crew, agent, version, due)
                if learner is None:
                    self._without(agent, version, due, judged)
                    judged = None
                else:
                    judged = self._version(learner, agent, version, due, judged)
        for weighed in self.waiting.reweighed:
            if weighed.unmet:
                lost = ", ".join(f"{a}@{v}" for a, v in weighed.unmet.items())
                what = "reused episodes whose changed versions are not to be had are not weighted again"
                found.skip("counts", what, 1, lost)

    def _version(self, learner: Learner, agent: AgentId, version: int, due: Due, judged: _Judged | None) -> _Judged | None:
        """All that waits for the version that is loaded; gives the half of a divergence that waits for the next one."""
        found = self.subject.found
        for scoring in due.scorings:
            with found.at(scoring.file).reading("log-probs"):
                self._score(scoring, learner, agent, version)
        for weighed in due.reweighed:
            with found.at(weighed.file).reading("counts"):
                self._reweigh(weighed, learner, agent)
        if agent not in self.subject.world.trainees:
            return None
        trainee = replace(self.subject.world.trainees[agent], learner=learner)
        if version == 0:
            with found.at(STAGES, "line 1").reading("counts"):
                self._floor(agent, learner)
        if judged is not None and judged.update.line["candidate_version"] == version:
            with found.at(judged.update.episodes_file).reading("divergences"):
                self._divergence(judged, trainee)
        if due.promotion is not None:
            with found.at(records.version_folder(agent, version)).reading("divergences"):
                return self._judge(trainee, due.promotion)
        return None

    def _load(self, crew: Crew, agent: AgentId, version: int, due: Due) -> Learner | None:
        """The agent's learner with the weights of a version, as they are served; None where they are not to be had."""
        found, folder = self.subject.found, records.version_folder(agent, version)
        here = found.at(folder)
        if not (self.subject.run.path / folder).is_dir():
            if version in (0, self.now.versions.get(agent)):
                here.wrong("weights", "is gone: version 0 and the promoted version are always kept")
            else:
                found.skip("weights", PRUNED, 1, f"{agent}@{version}")
            return None
        with here.reading("weights"):
            weights = crew.load(self.subject.run.path / folder)
            found.ok("weights")
            if due.fingerprint is not None:
                recorded, place = due.fingerprint
                if recorded != weights.fingerprint:
                    told = f"the tensors of {agent}@{version} are not those that {place} names: fingerprint"
                    here.wrong("weights", told, recorded, weights.fingerprint)
            learner = crew.learners[agent].awake
            if agent in self.subject.world.trainees:
                learner.restore(Snapshot(weights=weights.tensors, moments={}, steps=0))
            return learner
        return None

    def _without(self, agent: AgentId, version: int, due: Due, judged: _Judged | None) -> None:
        """Count what hangs on weights that are not there."""
        found, name = self.subject.found, f"{agent}@{version}"
        is_kept = (self.subject.run.path / records.version_folder(agent, version)).is_dir()
        why = "the weights cannot be read" if is_kept else PRUNED
        found.skip("log-probs", why, sum(scoring.tokens for scoring in due.scorings), name)
        for _ in filter(None, (due.promotion, judged)):
            found.skip("divergences", why, 1, name)

    # ---- one version ----

    def _floor(self, agent: AgentId, learner: Learner) -> None:
        """The noise floor of version 0 on the start's episodes: compared with the record, and the scale of tolerances."""
        found, start, floors = self.subject.found, self.subject.start, self.subject.tolerances.floors
        file = start.get("episodes_file")
        recorded = start["noise_floor"][agent]
        floors[agent] = float(recorded["token"])
        if file is None:
            found.skip("counts", "the start line names no episodes: the noise floors are taken as they are", 1, agent)
            return
        rows = own_rows([records.read_episode(row) for row in self.files.rows(file)], agent)
        if not rows:
            found.skip("counts", NOT_CALLED, 1, agent)
            return
        floor = starting.noise_floor(learner, self.subject.batch(rows, agent))
        floors[agent] = floor[0]
        found.ok("counts")
        for name, said, computed in zip(
            ("token", "message_mean"), (recorded["token"], recorded["message_mean"]), floor, strict=True
        ):
            # Rounding differs from machine to machine: the floor's size is what counts.
            if not abs(said - computed) <= KL_FLOOR + max(abs(said), abs(computed)) / 2:
                found.at(STAGES, "line 1").wrong("counts", f"noise_floor.{agent}.{name}", said, computed)

    def _score(self, scoring: Scoring, learner: Learner, agent: AgentId, version: int) -> None:
        """The sampled tokens of one seat in one file, scored by the version that is loaded."""
        found, options = self.subject.found, self.subject.options
        rows = [
            (number, records.read_episode(row), row["use"])
            for number, row in enumerate(self.files.rows(scoring.file), start=1)
            if row["use"] in scoring.uses
        ]
        number_of = {episode.id: number for number, episode, _ in rows}
        rest = [episode for _, episode, _ in rows]
        batches: list[TokenBatch] = []
        if scoring.update is not None:
            # The replay test's own batches: the same machine gives the recorded gap bit for bit.
            scored = [e for _, e, use in rows if use == "train" and e.is_scored]
            values = episode_advantages(options, scored)
            whole = agent_batch(scored, values, scoring.seat, temperature=scoring.temperature, team=self.first)
            batches = [p.batch for p in batching.parts(whole, options.inner_steps)]
            rest = [e for _, e, use in rows if use != "train" or not e.is_scored]
        tested = len(batches)
        others = own_rows(rest, scoring.seat)
        if others:
            batches.append(batching.token_batch(others, temperature=scoring.temperature))
        limit = self.subject.tolerances.token
        gaps: list[Tensor] = []
        for batch in batches:
            # A seat may have been played with another agent's model.
            again = learner.logprobs(replace(batch, agent=agent))
            gap = (again - batch.behavior_logprobs)[batch.mask].double()
            gaps.append(gap)
            found.ok("log-probs", gap.numel())
            found.gap("log-probs", float(gap.abs().max()))
            bad = (~(gap.abs() <= limit)).nonzero()[:, 0].tolist()
            if bad:
                row, position = (index[bad[0]].item() for index in batch.mask.nonzero(as_tuple=True))
                here = found.at(scoring.file, f"row {number_of[batch.episode_ids[int(row)]]}")
                more = f" ({len(bad) - 1} more tokens here)" if len(bad) > 1 else ""
                told = f"token {int(position)} of '{scoring.seat}' under {agent}@{version}{more}: log-probability"
                one = float(batch.behavior_logprobs[int(row), int(position)])
                here.wrong("log-probs", told, one, one + float(gap[bad[0]]))
        if scoring.update is not None:
            self._replay(scoring.file, scoring.update, torch.cat(gaps[:tested]), agent)

    def _replay(self, file: str, update: Update, gap: Float[Tensor, " N"], agent: AgentId) -> None:
        """The replay test of an update (B18), as it was made."""
        found, tolerances = self.subject.found, self.subject.tolerances
        try:
            check_replay(ReplaySums(), gap, agent=agent, is_exact=tolerances.is_exact)
        except ReplayGapError as error:
            found.at(file).wrong("log-probs", f"the replay test fails: {str(error).partition(':')[2].strip()}")
        where = f"update {update.line['index']}"
        computed = {"mean": float(gap.abs().mean()), "max": float(gap.abs().max()), "signed": float(gap.mean())}
        for name, value in computed.items():
            said = update.line["replay"][name]
            if not abs(said - value) <= (tolerances.token if name == "max" else tolerances.replay_mean):
                found.at(STAGES, where).wrong("log-probs", f"replay.{name} of {where}", said, value)

    def _reweigh(self, weighed: Reweighed, learner: Learner, agent: AgentId) -> None:
        """What one changed teammate's version makes of the shared episodes, as `episodes.log_ratio_sums` does."""
        episodes = [records.read_episode(row) for row in self.files.rows(weighed.file) if row["use"] == "train"]
        scored = [e for e in episodes if e.is_scored]
        for episode in scored:
            weighed.log_ratios.setdefault(episode.id, 0.0)
        rows = own_rows(scored, agent)
        if rows:
            batch = self.subject.batch(rows, agent)
            now = learner.logprobs(batch).double().sum(1).tolist()
            then = torch.where(batch.mask, batch.behavior_logprobs.double(), 0.0).sum(1).tolist()
            for name, one, other in zip(batch.episode_ids, now, then, strict=True):
                weighed.log_ratios[name] += one - other
        del weighed.unmet[agent]
        if not weighed.unmet:
            weighed.compare(self.subject)

    # ---- from one version to the next ----

    def _judge(self, trainee: Trainee, update: Update) -> _Judged | None:
        """The first half of a promoted update's divergence: the probe states, and the law of the version before."""
        run, agent = self.subject.run, trainee.agent
        if not (run.path / records.version_folder(agent, update.version)).is_dir():
            self.subject.found.skip("divergences", PRUNED, 1, f"{agent}@{update.version}")
            return None
        probe = [records.read_episode(row) for row in self.files.rows(update.episodes_file) if row["use"] == "probe"]
        states = self.subject.probe_states(probe, agent, update.stage)
        recorded = records.read_divergences(run.path / update.divergences_file)[-1]
        anchor = trainee.learner.remember(states.batch)
        return _Judged(update=update, states=states, anchor=anchor, recorded=recorded)

    def _divergence(self, judged: _Judged, trainee: Trainee) -> None:
        """The second half: the KLs of the promoted version from the one before, per state and as judged."""
        found, tolerances, agent = self.subject.found, self.subject.tolerances, trainee.agent
        line, here = judged.update.line, found.at(judged.update.divergences_file)
        found.ok("divergences")
        scale, looks = float(judged.recorded.scale), self.subject.options.looks
        gate, again = look(trainee, judged.states, judged.anchor, self.subject.config.gate, looks=looks, scale=scale)
        who = f"{agent}@{line['from_version']} to @{line['candidate_version']}"
        for direction in ("kl_new_old", "kl_old_new"):
            said: Tensor = getattr(judged.recorded.divergence, direction).double()
            computed: Tensor = getattr(again, direction).double()
            if said.shape != computed.shape:
                here.wrong("divergences", f"{who}: number of states", said.numel(), computed.numel())
                return
            gap = torch.where(said == computed, 0.0, (said - computed).abs())
            found.gap("divergences", float(gap.max()))
            bad = (~(gap <= tolerances.divergences(computed, agent))).nonzero()[:, 0].tolist()
            if bad:
                more = f" ({len(bad) - 1} more states)" if len(bad) > 1 else ""
                told = f"{who}, state {bad[0] + 1} of the accepted look{more}: {direction}"
                here.wrong("divergences", told, float(said[bad[0]]), float(computed[bad[0]]))
        recorded = line["looks"][-1]
        for name in ("q_point", "q_ucb", "message_mean"):
            one, other = recorded[name], getattr(gate, name)
            is_same = (
                one is other if one is None or other is None else abs(one - other) <= tolerances.divergence(other, agent)
            )
            if not is_same:
                told = f"{who}, from the weights: {name}"
                found.at(STAGES, judged.update.where).wrong("divergences", told, one, other)
