"""What lies beside an update's line: its episodes, what they are worth, and what the gate saw of the candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from baton import records
from baton.algorithms import surrogate
from baton.algorithms.acceptance import ReplaySums, judged
from baton.algorithms.episodes import Collected, acting, draw_prompts, episode_advantages, mean_return, stats, unheard
from baton.algorithms.pairs import update_claim
from baton.algorithms.state import AgentState, Pair, Position, StageEntry
from baton.audit.episodes import EpisodeFiles, Part, Playing
from baton.audit.findings import AFTER_A_GAP, STAGES
from baton.audit.pairs import Comparisons
from baton.audit.subject import Subject, Update, own_rows
from baton.audit.waiting import Waiting, tokens_of
from baton.core import advantages
from baton.core.keyed import PROBE, PROMPTS, SAMPLE, key, permutation
from baton.records import Record
from baton.rollout import Play
from baton.team import Team
from baton.types import AgentId, Episode, Slot

USES = ("train", "probe", "order", "pair", "beside", "restated")
"""What the episodes beside an update are for, in the order in which it writes them."""


@dataclass
class Stage:
    """The stage in hand, as far as its lines were read."""

    entries: tuple[StageEntry, ...] | None = ()
    """Its updates; None where a line of it is missing."""
    team: Team | None = None
    """The team at its start; None where that is unknown."""
    file: str = ""
    """Episodes of its first update."""

    def lose(self) -> None:
        """A line is missing or cannot be read."""
        self.entries = self.team = None


@dataclass(frozen=True, kw_only=True)
class Read:
    """What an update's files said."""

    collected: Collected
    own_tokens: int
    """Sampled tokens of the agent in scored episodes."""
    has_signal: bool
    """The episodes allow an update of the agent."""

    def replay(self, state: AgentState, update: Update) -> ReplaySums:
        """The running sums after this update; only a replay test adds to them."""
        sums, gap = state.replay, update.line["replay"]
        if gap is None:
            return sums
        return ReplaySums(
            tokens=sums.tokens + self.own_tokens,
            absolute=sums.absolute + gap["mean"] * self.own_tokens,
            signed=sums.signed + gap["signed"] * self.own_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class _Played:
    """Episodes of one use, and who spoke in them."""

    use: str
    versions: Mapping[AgentId, int]
    episodes: Sequence[Episode]
    is_shared: bool
    """By the agents of the stage."""


class Evidence:
    """The files of updates, one update after the other."""

    def __init__(self, subject: Subject, files: EpisodeFiles, waiting: Waiting, stage: Stage) -> None:
        self.subject, self.files, self.waiting, self.stage = subject, files, waiting, stage
        self.comparisons = Comparisons(subject, files)
        self._shared: tuple[int, Part] | None = None
        """The shared episodes that were checked last, and their stage."""

    def check(self, update: Update, before: Position) -> Read | None:
        """An update's episodes and divergences: what was played, its rewards, its counts, its looks. None where they cannot
        be read, or belong to a stage of which the start is unknown."""
        found, world, options = self.subject.found, self.subject.world, self.subject.options
        line, agent, stage, file = update.line, update.agent, update.stage, update.episodes_file
        here = found.at(STAGES, update.where)
        rows = self.files.read("episodes", file)
        if rows is None:
            return None
        here.compare("counts", "is reused", line["reuse"] is not None, options.data == "reuse")
        is_shared, is_joint = update.is_shared(options), options.name == "joint"
        if is_shared and self.stage.team is None:
            found.skip("episodes", AFTER_A_GAP, 1, update.where)
            return None
        slots: Mapping[AgentId, Slot] = {}
        if options.name == "independent":
            slots = {a: "start" for a in self.subject.agents if a != agent}
        now = acting(before.team, slots)
        then = now if self.stage.team is None else acting(self.stage.team, slots)
        # The stage's agents share what the team of its start has played (joint: also the probe).
        who, prompts, cursor = agent, options.episodes // world.group, before.agents[agent].cursor
        if is_shared:
            prompts = len(self.subject.trained) * options.episodes // world.group
            who, cursor = "team", (stage - 1) * prompts
        judge = "team" if is_joint else agent

        train, probe, order, pair, beside, scores = self._parts(file, rows)
        shared = Part(file, [*train.rows, *(probe.rows if is_joint else ())])
        is_known = is_shared and self._is_known(stage, shared)
        address = (world.seed, stage, who, SAMPLE)
        playing = Playing(table=world.table, address=address, versions=then if is_shared else now)
        collected = self._collected(train, playing, cursor, prompts, who, is_known=is_known)
        drawn = permutation(key(world.seed, stage, judge, PROBE), len(world.probe))
        probing = Playing(
            table=world.table,
            address=(world.seed, stage, judge, PROBE),
            versions=then if is_joint else now,
            until=None if is_joint or world.certificate.plays_out(world.gate) else agent,
            drawn_from="probe",
        )
        plays = [Play(task=world.probe[i]) for i in drawn[: self.subject.config.gate.probe_prompts]]
        probed = self.files.check(probe, probing, plays, "probe", is_known=is_known and is_joint)
        ordering = self._ordering(order, stage, before)
        candidate = {**now, agent: update.version}
        pairs = self._pairs(update, pair, beside, now, candidate)
        restated = self._surrogate(update, scores, probed, collected, before.team)

        found.ok("counts")
        values = episode_advantages(options, collected.scored)
        here.compare("counts", "episodes", line["episodes"], stats(world, collected, values))
        here.compare("counts", "probe_episodes", line["probe_episodes"], len(probed))
        self._score_later(
            update,
            _Played(use="train", versions=playing.versions, episodes=collected.all, is_shared=is_shared),
            _Played(use="probe", versions=probing.versions, episodes=probed, is_shared=is_shared and is_joint),
            _Played(use="order", versions=now, episodes=ordering, is_shared=False),
            _Played(use="pair", versions=now, episodes=[p.promoted for p in pairs], is_shared=False),
            _Played(use="beside", versions=candidate, episodes=[p.beside for p in pairs], is_shared=False),
            _Played(use="restated", versions=candidate, episodes=restated, is_shared=False),
            is_known=is_known,
        )
        if line["reuse"] is not None:
            self._reuse(update, before)
        messages = own_rows(probed, agent)
        silence = unheard(self.subject.config.gate, collected.scored, values, messages, agent, looks=options.looks)
        has_signal = collected.informative >= options.min_informative and not silence
        if update.looks or (self.subject.run.path / update.divergences_file).exists():
            with found.at(update.divergences_file).reading("gate"):
                self._looks(update, probed)
        return Read(collected=collected, own_tokens=tokens_of(collected.scored, agent), has_signal=has_signal)

    def _parts(self, file: str, rows: Sequence[Record]) -> list[Part]:
        """The rows of each use, in the order in which an update writes them."""
        parts: list[Part] = []
        for use in USES:
            before = sum(len(part.rows) for part in parts)
            parts.append(Part(file, [row for row in rows if row["use"] == use], before))
        if sum(len(part.rows) for part in parts) != len(rows):
            self.subject.found.at(file).wrong("episodes", f"holds rows of another use than {', '.join(USES)}")
        return parts

    def _pairs(
        self, update: Update, pair: Part, beside: Part, now: Mapping[AgentId, int], candidate: Mapping[AgentId, int]
    ) -> list[Pair]:
        """The paired evaluation of a candidate that was published (step 15)."""
        world, recorded = self.subject.world, update.line.get("pairs")
        if recorded is None:
            if pair.rows or beside.rows:
                what = "holds pairs, and the line tells of none"
                self.subject.found.at(pair.file).wrong("pairs", what, len(pair.rows), 0)
            return []
        report, played = self.comparisons.check(
            pair,
            beside,
            stage=update.stage,
            who=update.agent,
            versions=now,
            other=candidate,
            count=world.certificate.update_pairs,
            claim=update_claim(world.certificate, n_agents=len(world.trainees), stage=update.stage),
        )
        if report is not None:
            self.subject.found.at(STAGES, update.where).compare("pairs", "pairs", recorded, report)
        return played

    def _surrogate(
        self, update: Update, part: Part, probe: Sequence[Episode], collected: Collected, team: Team
    ) -> Sequence[Episode]:
        """What the probe episodes show of an accepted candidate, by the log-probabilities that it gave their messages; gives
        those messages, which wait for its weights."""
        found, world, agent = self.subject.found, self.subject.world, update.agent
        here, recorded = found.at(part.file), update.line.get("surrogate")
        is_scored = recorded is not None and not surrogate.why_void(world, team, agent, probe)
        if len(part.rows) != (len(probe) if is_scored else 0):
            here.wrong("surrogate", "probe episodes as the candidate scores them", len(part.rows), len(probe) * is_scored)
            return ()
        if recorded is None:
            return ()
        scores = [[turn["logprobs"] for turn in row["turns"]] for row in part.rows]
        restated: Sequence[Episode] = ()
        if is_scored:
            restated = surrogate.restate(probe, agent, update.version, scores)
            prompts = {task.id: task.prompt for task in world.probe}
            expected = records.episode_rows(restated, use="restated", prompts=prompts)
            for number, (row, computed) in enumerate(zip(part.rows, expected, strict=True), start=part.first + 1):
                found.at(part.file, f"row {number}").compare("surrogate", "", row, computed)
        report = surrogate.judged(world, team, agent, probe, restated, baseline=mean_return(collected), stage=update.stage)
        found.ok("surrogate")
        found.at(STAGES, update.where).compare("surrogate", "surrogate", recorded, report)
        return restated

    def _is_known(self, stage: int, shared: Part) -> bool:
        """In a stage that shares its episodes: whether these are those of its first file, which were checked there."""
        if self._shared is None or self._shared[0] != stage:
            self._shared = (stage, shared)
            return False
        first = self._shared[1]
        if shared.rows != first.rows:
            schedule = "joint stage" if self.subject.options.name == "joint" else "stage that reuses them"
            what = f"differs from {first.file}, though the agents of a {schedule} share their episodes"
            self.subject.found.at(shared.file).wrong("episodes", what)
            return False
        return True

    def _collected(
        self, part: Part, playing: Playing, cursor: int, prompts: int, who: str, *, is_known: bool = False
    ) -> Collected:
        """Train episodes, drawn as `episodes.collect` draws them: again while too few groups are informative."""
        world, options = self.subject.world, self.subject.options
        is_batch = options.objective.choice.baseline == "batch_mean"
        count = advantages.decided_prompts if is_batch else advantages.informative_groups
        use = who if who == "order" else "train"
        episodes: list[Episode] = []
        seen: set[str] = set()
        informative = used = 0
        for draw in range(3):
            wanted = min(prompts, len(world.train) - len(seen))
            if wanted == 0:
                break
            at = (world.seed, PROMPTS, who)
            tasks, cursor = draw_prompts(world.train, cursor, wanted, at=at, skip=frozenset(seen))
            seen.update(task.id for task in tasks)
            plays = [Play(task=task, sibling=g) for task in tasks for g in range(world.group)]
            drawn = part.cut(used, len(plays))
            episodes += self.files.check(drawn, playing, plays, f"{use}, draw {draw + 1}", is_known=is_known)
            used += len(drawn.rows)
            scored = [e for e in episodes if e.is_scored]
            rewards = torch.tensor([e.reward for e in scored], dtype=torch.float64)
            informative = count(rewards, [e.group for e in scored])
            if informative >= options.min_informative:
                break
        if used < len(part.rows):
            here = self.subject.found.at(part.file, f"row {part.first + used + 1}")
            here.wrong("episodes", f"{use} episodes too many", len(part.rows), used)
        return Collected(
            scored=tuple(e for e in episodes if e.is_scored), all=tuple(episodes), cursor=cursor, informative=informative
        )

    def _ordering(self, part: Part, stage: int, before: Position) -> Sequence[Episode]:
        """What a stage's order or radii were measured on: episodes of the team of its start, beside its first update's."""
        found, world, options = self.subject.found, self.subject.world, self.subject.options
        if before.entries or not options.is_measured:
            if part.rows:
                here = found.at(part.file, f"row {part.first + 1}")
                here.wrong("episodes", "measures an order where none is measured", len(part.rows), 0)
            return ()
        prompts = max(1, options.ordering_episodes // world.group)
        address = (world.seed, stage, "order", SAMPLE)
        playing = Playing(table=world.table, address=address, versions=before.team.versions)
        collected = self._collected(part, playing, (stage - 1) * prompts, prompts, "order")
        gains = {} if before.stage is None else before.stage.gains
        for agent, gain in gains.items():
            acted = any(t.kind == "action" and t.agent == agent for e in collected.scored for t in e.turns)
            if gain < 0.0 or (gain > 0.0 and not acted):
                told = f"gain of '{agent}', which {'acted' if acted else 'did not act'} in the episodes of the order"
                found.at(part.file).wrong("sequence", told, gain, 0.0)
        return collected.all

    # ---- what waits for weights ----

    def _score_later(self, update: Update, *played: _Played, is_known: bool) -> None:
        """Each seat's tokens wait for the version that sampled them; those that a stage shares do so once."""
        for seat in self.subject.plan.seats:
            # Each trained agent scores its own tokens of shared episodes: its replay test was made on them.
            is_own = seat.agent == update.agent
            is_elsewhere = not is_own and (is_known or seat.agent in self.subject.trained)
            spoken: dict[int, list[_Played]] = {}
            for part in played:
                if not (is_elsewhere and part.is_shared):
                    spoken.setdefault(part.versions[seat.agent], []).append(part)
            for version, parts in spoken.items():
                episodes = [e for part in parts for e in part.episodes]
                tested = update if is_own and update.line["replay"] is not None else None
                uses = [part.use for part in parts]
                replayed = tested if "train" in uses else None
                self.waiting.score(seat, version, update.episodes_file, uses, episodes, update=replayed)

    def _reuse(self, update: Update, before: Position) -> None:
        """Who has changed since the shared episodes were played; what that makes of them waits for the changed versions."""
        reuse = update.line["reuse"]
        changed = tuple(entry.agent for entry in before.entries if entry.word != "rejected")
        is_resampled = self.subject.options.reuse.gives_up(reuse["effective_share"])
        computed = {"changed": changed, "is_resampled": is_resampled}
        here = self.subject.found.at(STAGES, update.where)
        here.compare("counts", "reuse", {n: reuse[n] for n in computed}, computed)
        self.waiting.reweigh(update, self.stage.file, {a: before.team.member(a).version for a in changed})

    def unfinished(self, last: Position) -> None:
        """Shared episodes of a stage that ended early: the tokens of those who had no update of their own in it."""
        trained = self.subject.trained
        if not last.entries or self._shared is None or self._shared[0] != 1 + last.done // len(trained):
            return
        _, shared = self._shared
        missing = set(trained) - {entry.agent for entry in last.entries}
        episodes = [records.read_episode(row) for row in shared.rows]
        for seat in self.subject.plan.seats:
            if seat.agent in missing and self.stage.team is not None:
                uses = {str(row["use"]) for row in shared.rows}
                self.waiting.score(seat, self.stage.team.member(seat.agent).version, shared.file, uses, episodes)

    # ---- the gate ----

    def _looks(self, update: Update, probe: Sequence[Episode]) -> None:
        """Probe states against the keyed draw, and each look's record against its divergences and its stage's radii."""
        found, gate, trainee = self.subject.found, self.subject.config.gate, update.trainee
        here = found.at(update.divergences_file)
        states = self.subject.probe_states(probe, update.agent, update.stage)
        read = records.read_divergences(self.subject.run.path / update.divergences_file)
        found.ok("files")
        here.compare("gate", "scales of the looks", [r.scale for r in read], [g.scale for g in update.looks])
        row, position = (index.tolist() for index in states.batch.mask.nonzero(as_tuple=True))
        drawn = {
            "episode": [states.batch.episode_ids[r] for r in row],
            "token": position,
            "message": states.message.tolist(),
            "prompt": states.unit.tolist(),
            "drawn": states.drawn.tolist(),
        }
        for number, (recorded, one) in enumerate(zip(update.looks, read, strict=False), start=1):
            found.ok("gate")
            at = f"look {number} (scale {recorded.scale:g})"
            ours = {
                "episode": list(one.episode),
                "token": one.divergence.position.tolist(),
                "message": one.message.tolist(),
                "prompt": one.unit.tolist(),
                "drawn": one.drawn.tolist(),
            }
            odd = [name for name in drawn if ours[name] != drawn[name]]
            if odd:
                told = f"{at}: the states are not those that the probe episodes and keys give ({', '.join(odd)}): states"
                here.wrong("gate", told, len(one.episode), len(row))
            looks = self.subject.options.looks
            computed = judged(one.divergence, one, trainee.radii, gate, looks=looks, scale=one.scale)
            # Which training a look is of is told by the retries (updates.py).
            computed = replace(computed, attempt=recorded.attempt)
            found.at(STAGES, update.where).compare("gate", at, records.plain(recorded), computed)
