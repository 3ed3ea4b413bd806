"""A run's team, taught to one model that sees the whole question and answers alone.

For people who have to ship one model. The student first imitates what the team says on train prompts. Where the answer is
the message of one agent that shares the student's tokens, the student then answers by itself, and at each of its own
prefixes that agent, which has read its teammates, says how it would have gone on (on-policy distillation: KL(teacher ||
student) over the whole vocabulary). Team and student then meet on the run's test prompts, with the keys of `baton evaluate`.
The run is read and never written.

A teacher has heard one transcript. Averaged over transcripts, its law of the first token is the team's own; of later ones it
is that of a speaker whose teammates do not depend on the prefix. The two are the same where the teammates are sure.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from baton import assemble, records
from baton.algorithms.episodes import draw_prompts
from baton.assemble import Crew, Plan
from baton.config import AgentOptions, Config
from baton.core import batching
from baton.core.keyed import Key, key, permutation
from baton.core.losses import Objective
from baton.engines import mixture
from baton.engines.engine import Anchor, Codec
from baton.errors import BatonError, ConfigError, DataError, RunError
from baton.evaluation import Bench, Lineup, Measurement, Result, Row, row_record
from baton.host import Reporter, Silent, Stop, complete, stoppable
from baton.journal import Run, open_run
from baton.protocols import Chain, ChainOptions, RouterOptions
from baton.records import Record
from baton.rollout import Play, Seat
from baton.swap import same_tokens
from baton.types import AdvantageBatch, AgentId, Episode, Snapshot, Task, TokenIds, Trajectory, Turn, Weights
from baton.warm_start import Dialogue, WarmStartOptions, WarmStartRecord, warm_start


class DistillOptions(BaseModel):
    """How a team is taught to one model."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    says: Literal["answer", "transcript"] = Field(
        default="answer",
        description="what the student says: the team's answer alone; or each message of the team on a line of its own, the "
        "last line being the answer: its working, for a question that takes more steps than one message has room for",
    )
    keep: Literal["all", "right"] = Field(
        default="all",
        description="which of the team's plays are learned from: all, so that what the student is comes from the team "
        "alone; or right, those of the highest reward: it learns from the grader as well, and mostly from easy prompts",
    )
    max_new_tokens: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description="tokens of the student's answer; auto: those of the team's longest seat, or of a transcript's messages",
    )
    prompts: int = Field(default=8192, ge=2, description="train prompts that the team plays for imitation, or all there are")
    steps: int = Field(default=1000, ge=1, description="most optimiser steps of imitation")
    target: float = Field(
        default=1.0, gt=0, le=1, description="imitation ends once held-out messages have this mean probability"
    )
    batch: int = Field(default=64, ge=1, description="messages per step")
    lr: Literal["auto"] | Annotated[float, Field(gt=0)] = Field(
        default="auto",
        description="AdamW learning rate of imitation, of which rounds take a third; auto: 1.5 times that of its size",
    )
    rounds: int = Field(default=8, ge=0, description="rounds of on-policy learning after imitation; 0: imitation alone")
    contexts: int = Field(default=512, ge=1, description="train prompts that team and student play in a round")
    passes: int = Field(default=2, ge=1, description="times that a round's states are stepped on")


@dataclass(frozen=True, kw_only=True, slots=True)
class Followed:
    """One round of on-policy learning."""

    messages: int
    """The student's own messages that a teacher went along with."""
    states: int
    tokens: int
    """Tokens that the steps read, question and message."""
    steps: int
    first_loss: float
    """Mean KL(teacher || student) of the first pass, nats a token."""
    last_loss: float
    reward: float | None
    """Of the student's messages, before the round's steps; train prompts."""


RECORD = "distill.json"
"""What lies in the student's folder beside the model: how it was made, and what it then reached."""


def distill(
    path: str | Path,
    model: str,
    folder: str | Path,
    *,
    options: DistillOptions | None = None,
    reporter: Reporter | None = None,
) -> Record:
    """Teach a run's promoted team to one model, and measure both on the run's test prompts.

    Args:
        model: what the student begins as, a spec as in `agents.model`.
        folder: where the student goes: a plain `from_pretrained` folder (of a table: its one file) with `distill.json`.
            It may be there, but must be empty.

    Raises:
        ConfigError, ModelError, DataError: it cannot be done; the folder is as it was.
        RunError: there is no started run, or the folder cannot be written.
    """
    reporter, target, run = reporter or Silent(), Path(folder).resolve(), open_run(path)
    _check_target(target, run)
    with stoppable(reporter) as stop:
        plan = assemble.prepare(run.config, root=Path(run.start["root"]), own=run.origins)
        bench = _Bench(plan, k=1, episodes=None, reporter=reporter)
        try:
            pupil = _pupil(run, bench, model, options or DistillOptions())
            return _Work(run=run, bench=bench, pupil=pupil, target=target, reporter=reporter, stop=stop).done()
        finally:
            bench.close()


# ---- what can be asked -------------------------------------------------------------------------------------------------


def _check_target(target: Path, run: Run) -> None:
    """Raise ConfigError unless the student can be put there without touching anything."""
    if target.exists() and not target.is_dir():
        raise ConfigError(f"-o {target}: it is a file; name a folder that is not there yet")
    if target.is_dir() and (there := sorted(p.name for p in target.iterdir())):
        raise ConfigError(f"-o {target}: it holds {there[0]}{' and more' if there[1:] else ''}; choose another folder")
    if run.home.resolve() in target.parents:
        raise ConfigError(f"-o {target}: it lies in the run {run.home}, which is not written; choose a folder outside")
    nearest = next(p for p in target.parents if p.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise ConfigError(f"-o {target}: {nearest} cannot be written; choose another folder")


@dataclass(frozen=True, kw_only=True)
class _LastLine(Chain):
    """One agent whose last line is its answer."""

    def answer(self, turns: Sequence[Turn], normalise: Callable[[str], str | None], tie: Key) -> str:
        return turns[-1].text.rstrip("\n").rpartition("\n")[2]


@dataclass(frozen=True, kw_only=True)
class _Pupil:
    """The student before it has learnt anything, and who can teach it."""

    model: str
    source: Path
    parameters: int
    codec: Codec
    lineup: Lineup
    config: Config
    """The run's, with the student as its one agent: what an engine is loaded from."""
    options: DistillOptions
    lr: float
    teachers: frozenset[AgentId]
    """Agents that can go along with the student's own words; none where `why_alone` says why."""
    why_alone: str | None

    @property
    def seat(self) -> Seat:
        return self.lineup.seats[0]


def _pupil(run: Run, bench: Bench, model: str, options: DistillOptions) -> _Pupil:
    """The student as it comes; touches no weight.

    Raises:
        ConfigError, ModelError: it cannot be this run's student, and why.
    """
    plan, config = bench.plan, bench.plan.config
    is_table = config.engine.name == "table"
    if model.startswith("endpoint:"):
        raise ConfigError(f"model '{model}': what answers behind an endpoint has no weights here to teach; name a model")
    if model.startswith("table:") and not is_table:
        raise ConfigError(f"model '{model}': the run's engine holds models, not tables; name one, for example tiny:195k")
    longest, messages = max(seat.max_new_tokens for seat in plan.seats), bench.messages
    limit = options.max_new_tokens
    if limit == "auto":
        # Of a transcript: every message and, where none of them is the answer, that; each ends in a line break or an end.
        lines = messages if _has_last_speaker(config) else messages + 1
        limit = longest if options.says == "answer" else lines * (longest + 1)
    last = config.agents[-1]
    # In the last seat's name, so that its messages have the keys that `baton evaluate MODEL` gives them.
    whole = {"trainable": True, "adapter": "none", "warm_start": None, "endpoint": None, "lr": "auto", "radius": "preset"}
    agent: AgentOptions = last.model_copy(update={"model": model, "max_new_tokens": limit, **whole})
    if is_table:
        source, codec, parameters = Path(), assemble.table_codec(agent), 0
    else:
        source, codec, parameters = assemble.load_base(model, config)
    one = bench.alone(last.name, codec, 1)
    seat = replace(one.seats[0], max_new_tokens=limit)
    protocol = one.protocol
    if options.says == "transcript":
        if not _can_break_lines(codec):
            raise ConfigError(f"model '{model}': says = 'transcript' needs line breaks, which it cannot spell; use 'answer'")
        protocol = _LastLine(agents=(last.name,), options=ChainOptions())
    sets = {name: tuple(_whole(t) for t in getattr(plan.splits, name)) for name in ("train", "probe", "certify", "test")}
    assemble.check_contexts((seat,), protocol, replace(plan.splits, **sets))
    able = {name for name, other in plan.codecs.items() if same_tokens(codec, other)}
    able -= {name for name in able if not is_table and mixture.is_mixture(run.folder(name))}
    why = _why_alone(config, options, able)
    # Twice this, a warm start's rate, left one tiny student of six guessing for 2,000 steps (docs/log.md, 2026-12-01).
    lr = 1.5 * assemble.auto_lr(parameters) if options.lr == "auto" else options.lr
    return _Pupil(
        model=model,
        source=source,
        parameters=parameters,
        codec=codec,
        lineup=replace(one, seats=(seat,), protocol=protocol),
        config=config.model_copy(update={"agents": (agent,)}),
        options=options,
        lr=lr,
        teachers=frozenset(able & set(_last_speakers(config)) if why is None else ()),
        why_alone=why,
    )


def _has_last_speaker(config: Config) -> bool:
    """The team's answer is one agent's message."""
    return isinstance(config.protocol, ChainOptions | RouterOptions)


def _why_alone(config: Config, options: DistillOptions, able: set[AgentId]) -> str | None:
    """Why nobody can go along with the student's own words; None where somebody can."""
    if options.rounds == 0:
        return "rounds = 0"
    if not _has_last_speaker(config):
        return f"the answer of a {config.protocol.name} is a majority: no agent's law is the team's"
    if options.says == "transcript":
        return "a transcript has several speakers, and none whose law goes on from the student's words"
    speakers = _last_speakers(config)
    if able.isdisjoint(speakers):
        return f"no last speaker ({', '.join(speakers)}) has the student's tokens, or each is a mixture of two models"
    return None


def _last_speakers(config: Config) -> list[AgentId]:
    """Who can have the last word of an episode."""
    is_fixed = isinstance(config.protocol, ChainOptions) and not config.protocol.rotate
    return [a.name for a in (config.agents[-1:] if is_fixed else config.agents)]


def _can_break_lines(codec: Codec) -> bool:
    try:
        return "\n" in codec.decode(codec.reply("a\nb"))
    except BatonError:
        return False


def _whole(task: Task) -> Task:
    """The task as one that sees everything is asked it."""
    return replace(task, views=())


class _Bench(Bench):
    """Measures what is in memory."""

    team: Crew
    student: Crew

    def _crew(self, folders: Mapping[AgentId, Path], everyone: AgentId | None) -> Crew:
        return self.team if everyone is None else self.student


# ---- teaching ----------------------------------------------------------------------------------------------------------


class _Work:
    """One distillation from the first episode to the student's folder."""

    def __init__(self, *, run: Run, bench: _Bench, pupil: _Pupil, target: Path, reporter: Reporter, stop: Stop) -> None:
        self.run, self.bench, self.pupil, self.target = run, bench, pupil, target
        self.reporter, self.stop = reporter, stop
        self.plan: Plan = bench.plan
        self.options = pupil.options
        self.name = pupil.seat.agent
        self.at: tuple[str | int, ...] = (self.plan.config.seed, "distill")
        self.now = {name: run.folder(name) for name in self.plan.local}
        self.versions = dict(run.position.team.versions)
        self.cursor = 0
        self.tokens = {"played": 0, "sampled": 0, "trained": 0}
        self.began = time.monotonic()

    def done(self) -> Record:
        """Load, teach, measure, write."""
        plan, pupil, bench, options = self.plan, self.pupil, self.bench, self.options
        threads = assemble.set_threads(plan.config, {**plan.parameters, "/student": pupil.parameters})
        self.reporter.say(f"teaching {', '.join(a.name for a in plan.config.agents)} to {pupil.model}")
        bench.team = assemble.crew(plan.config, self.now, learners=sorted(pupil.teachers))
        for agent, folder in self.now.items():
            weights = bench.team.load(folder)
            complete(bench.team.sampler.publish(agent, "promoted", weights, self.versions[agent]))
            if agent in pupil.teachers and plan.config.engine.name == "table":
                bench.team.learners[agent].restore(Snapshot(weights=bench.team.stored(folder), moments={}, steps=0))
        bench.student = assemble.crew(pupil.config, {self.name: pupil.source}, learners=[self.name])
        team = bench.measure("team", bench.seated(self.now), self.now)
        rows = [self._row(bench.row(team), team), self._measured("student as it came", team)]
        imitation = self._imitated()
        rounds: list[Followed] = []
        if pupil.why_alone is None:
            self._publish()
            rows.append(self._measured("student after imitation", team))
            rounds = [self._followed(number) for number in range(options.rounds)]
        else:
            self.reporter.say(f"imitation alone: {pupil.why_alone}")
        weights = self._publish()
        rows.append(self._measured("student", team))
        first, final = rows[0], rows[-1]
        record: Record = {
            "run": str(self.run.path),
            "model": pupil.model,
            "folder": str(self.target),
            "protocol": plan.config.protocol.name,
            "options": {**options.model_dump(mode="json"), "max_new_tokens": pupil.seat.max_new_tokens, "lr": pupil.lr},
            "system": pupil.seat.system,
            "temperature": plan.config.eval.temperature,
            "parameters": {"team": plan.total_parameters, "student": pupil.parameters},
            "imitation": imitation,
            "on_policy": {"teachers": sorted(pupil.teachers), "rounds": rounds, "why_not": pupil.why_alone},
            "rows": rows,
            "kept": {
                name: final[name] / first[name] if first[name] and final[name] is not None else None
                for name in ("value", "tokens_per_answer", "read_per_answer")
            },
            "prompts": len(bench.tasks),
            "facts": dict(plan.env.facts(len(plan.seats))),
            "tokens": self.tokens,
            "seconds": time.monotonic() - self.began,
            "threads": threads,
            "versions": self.versions,
            "fingerprints": {name: self.run.fingerprint(name) for name in self.run.files},
            "fingerprint": weights.fingerprint,
        }
        record = records.plain(record)
        self._write(record, weights)
        return record

    # -- measuring

    def _publish(self) -> Weights:
        weights = self.bench.student.learners[self.name].weights()
        complete(self.bench.student.sampler.publish(self.name, "promoted", weights, 0))
        return weights

    def _measured(self, name: str, team: Result) -> Record:
        result = self.bench.measure(name, self.pupil.lineup, {}, whole_question=True)
        return self._row(self.bench.row(result, team), result)

    def _row(self, row: Row, result: Result) -> Record:
        if row.value is None:
            raise DataError(f"{row.name}: {row.note}")
        read = sum(len(t.prompt_ids) for e in result.episodes for t in e.turns) / len(result.episodes)
        return {**row_record(row), "read_per_answer": read}

    # -- playing

    def _ticker(self, what: str, total: int) -> Callable[[], None]:
        done = [0]

        def tick() -> None:
            self.stop.check()
            done[0] = min(done[0] + 1, total)
            self.reporter.progress(f"distill: {what}", done[0], total)

        return tick

    def _played(self, tasks: Sequence[Task], who: str, number: int, *, is_student: bool) -> list[Episode]:
        """One episode a task, at the temperature of evaluations: what is taught is what is measured."""
        lineup = self.pupil.lineup if is_student else self.bench.seated(self.now)
        crew = self.bench.student if is_student else self.bench.team
        measurement = Measurement(name=who, lineup=lineup, folders={}, plays=(), substitute=None)
        total = len(tasks) * len(lineup.seats) * lineup.protocol.own_turns
        episodes = complete(
            self.bench.table(measurement, crew.sampler).play(
                [Play(task=task) for task in tasks],
                address=(*self.at, who, number),
                versions={self.name: number} if is_student else self.versions,
                tick=self._ticker(f"{who} plays", total),
            )
        )
        self.tokens["sampled" if is_student else "played"] += sum(len(t.ids) for e in episodes for t in e.turns)
        return episodes

    def _plays(self, count: int, number: int) -> tuple[list[Task], list[Episode]]:
        """The next train prompts and what of the team's plays on them is to be learned from."""
        train, high = self.plan.splits.train, self.plan.env.reward_range[1]
        drawn, self.cursor = draw_prompts(train, self.cursor, min(count, len(train)), at=(*self.at, "prompts"))
        found: list[tuple[Task, Episode]] = []
        for task, episode in zip(drawn, self._played(drawn, "team", number, is_student=False), strict=True):
            # What was cut has no end to be learned.
            is_whole = episode.is_scored and not self.plan.protocol.is_cut(episode.turns)
            if is_whole and (self.options.keep == "all" or episode.reward >= high):
                found.append((task, episode))
        return [task for task, _ in found], [episode for _, episode in found]

    # -- learning

    def _imitated(self) -> Record:
        """Maximum likelihood on what the team said, in the student's own ids."""
        options, pupil = self.options, self.pupil
        tasks, episodes = self._plays(options.prompts, 0)
        asked = min(options.prompts, len(self.plan.splits.train))
        held_out = max(1, min(256, len(episodes) // 8))
        if len(episodes) < held_out + options.batch:
            why = "whole answers" if options.keep == "all" else "whole answers of the highest reward"
            raise DataError(
                f"the team gave {len(episodes)} {why} to {asked} train prompts; {held_out + options.batch} are needed: "
                f"raise prompts, lower batch{'' if options.keep == 'all' else ', or keep all'}"
            )
        dialogues: list[Dialogue] = []
        cut = 0
        for task, episode in zip(tasks, episodes, strict=True):
            prompt = pupil.codec.encode(pupil.lineup.protocol.messages(_whole(task), (), 0, pupil.seat.system))
            reply = pupil.codec.reply(self._lesson(episode))
            cut += len(reply) > pupil.seat.max_new_tokens > 1
            dialogues.append(Dialogue(id=episode.id, prompt_ids=prompt, reply_ids=reply[: pupil.seat.max_new_tokens]))

        def tick(step: int, accuracy: float) -> None:
            self.stop.check()
            self.reporter.progress("distill: imitation", step, options.steps, f"accuracy {accuracy:.2f}")

        made: WarmStartRecord = warm_start(
            self.bench.student.learners[self.name],
            dialogues,
            WarmStartOptions(
                demonstrations=len(dialogues),
                held_out=held_out,
                steps=options.steps,
                batch=options.batch,
                target=options.target,
                check_every=25,
            ),
            agent=self.name,
            lr=pupil.lr,
            at=(*self.at, "imitation"),
            tick=tick,
        )
        self.tokens["trained"] += made.tokens
        told: Record = records.plain(made)
        return {**told, "prompts": asked, "messages": len(dialogues), "held_out": held_out, "longer_than_limit": cut}

    def _lesson(self, episode: Episode) -> str:
        """What the student is to say where the team played this."""
        if self.options.says == "answer":
            return episode.answer
        lines = [turn.text.strip().replace("\n", " ") for turn in episode.turns]
        answer = episode.answer.strip().replace("\n", " ")
        return "\n".join(lines if lines[-1] == answer else [*lines, answer])

    def _followed(self, number: int) -> Followed:
        """A round: the student's own messages on fresh prompts, and the last speaker's law at each of their prefixes."""
        options, learner = self.options, self.bench.student.learners[self.name]
        self._publish()
        tasks, episodes = self._plays(options.contexts, number + 1)
        own = self._played([_whole(task) for task in tasks], "student", number, is_student=True)
        rewards = [e.reward for e in own if e.is_scored]
        pairs = [(said, heard) for said, played in zip(own, episodes, strict=True) if (heard := self._heard(said, played))]
        if not pairs:
            raise DataError(
                f"round {number + 1}: nobody could teach a message of the student; raise contexts or set rounds = 0"
            )
        lessons = self._lessons(pairs, number)
        objective = Objective(weight=None, penalty=1.0, direction="old_new")
        tick = self._ticker(f"round {number + 1} of {options.rounds}", options.passes * len(lessons))
        means: list[float] = []
        read = 0
        for step in range(options.passes):
            losses: list[float] = []
            for place in permutation(key(*self.at, "pass", number, step), len(lessons)):
                lesson, law = lessons[place]
                losses.append(learner.step(lesson, objective, lr=self.pupil.lr / 3.0, anchor=law).loss)
                read += int(lesson.batch.lengths.sum())
                tick()
            means.append(sum(losses) / len(losses))
        self.tokens["trained"] += read
        return Followed(
            messages=len(pairs),
            states=sum(lesson.batch.n_act for lesson, _ in lessons),
            tokens=read,
            steps=options.passes * len(lessons),
            first_loss=means[0],
            last_loss=means[-1],
            reward=sum(rewards) / len(rewards) if rewards else None,
        )

    def _heard(self, own: Episode, played: Episode) -> Turn | None:
        """The team's last turn, where its speaker can go on from what the student said to the same question."""
        last = played.turns[-1]
        if not own.turns or not own.turns[0].ids or last.kind != "action" or last.agent not in self.pupil.teachers:
            return None
        return last

    def _lessons(self, pairs: Sequence[tuple[Episode, Turn]], number: int) -> list[tuple[AdvantageBatch, Anchor]]:
        """The student's messages in batches, each with its teacher's laws."""
        temperature = self.plan.config.eval.temperature
        found: list[tuple[AdvantageBatch, Anchor]] = []
        order = permutation(key(*self.at, "parts", number), len(pairs))
        for teacher in sorted({heard.agent for _, heard in pairs}):
            seat = next(s for s in self.plan.seats if s.agent == teacher)
            assert seat.codec is not None
            mine = [pairs[i] for i in order if pairs[i][1].agent == teacher]
            for first in range(0, len(mine), self.options.batch):
                student: list[Trajectory] = []
                team: list[Trajectory] = []
                for own, heard in mine[first : first + self.options.batch]:
                    # A teacher never went on beyond its own limit: its law there was never trained.
                    said = own.turns[0].ids[: seat.max_new_tokens]
                    if len(heard.prompt_ids) + len(said) > seat.codec.context_length:
                        raise ConfigError(
                            f"'{teacher}' has read {len(heard.prompt_ids)} tokens, and its context of "
                            f"{seat.codec.context_length} has no room for the student's {len(said)}; lower max_new_tokens, "
                            "or set rounds = 0"
                        )
                    student.append(_row(own, self.name, own.turns[0].prompt_ids, said))
                    team.append(_row(own, teacher, heard.prompt_ids, said))
                batch = batching.token_batch(student, temperature=temperature)
                there = batching.token_batch(team, temperature=temperature)
                law = self.bench.team.learners[teacher].remember(there).at(batch)
                idle = dict.fromkeys(batch.episode_ids, 0.0)
                found.append((batching.with_advantages(batch, idle, team={}), law))
        return found

    # -- writing

    def _write(self, record: Record, weights: Weights) -> None:
        """The student's folder, whole or not at all. Raises RunError where what was written is not what was taught."""
        partial = self.target.with_name(f".{self.target.name}.partial")
        made = [p for p in self.target.parents if not p.exists()]
        crew = self.bench.student
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            crew.save(self.name, partial, weights)
            if crew.load(partial).fingerprint != weights.fingerprint:
                raise RunError(f"{self.target}: the weights on disk are not those that were taught; nothing is left there")
            records.write_text(partial / RECORD, json.dumps({"schema": records.SCHEMA, **record}, indent=2) + "\n")
            records.sync_tree(partial)
            partial.replace(self.target)
            records.sync_folder(self.target.parent)
        except OSError as error:
            raise RunError(f"{self.target} cannot be written ({error.strerror}); choose another folder") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            if not self.target.exists():
                for parent in made:
                    if parent.is_dir() and not any(parent.iterdir()):
                        parent.rmdir()


def _row(episode: Episode, agent: AgentId, prompt: TokenIds, said: TokenIds) -> Trajectory:
    """A message after one reader's prompt; its behavior log-probabilities are not read."""
    context = len(prompt)
    return Trajectory(
        episode_id=episode.id,
        group=episode.group,
        agent=agent,
        segment=0,
        ids=prompt + said,
        mask=(False,) * context + (True,) * len(said),
        behavior_logprobs=(0.0,) * (context + len(said)),
        versions=(-1,) * (context + len(said)),
    )
