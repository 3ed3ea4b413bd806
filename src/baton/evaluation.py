"""A team on its held-out test prompts, beside what a team's result never stands without (ALGORITHMS 2.7, 3.8).

Four baselines: the untrained team; the same model in all seats; the best single agent at an equal token budget; one model
of the total size with full information. One that was not run says why. Every row is paired by prompt with the team's:
same prompts, same keys.

What is measured and how a row is made of it are one list here; a report that was stored in a run directory is checked by
giving the same list the stored episodes (`baton.audit`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton import assemble, protocols, records
from baton.assemble import Crew, Plan
from baton.config import Config
from baton.core import scores
from baton.core.keyed import Key, key, permutation
from baton.engines.engine import Codec, Sampler
from baton.errors import ConfigError, RunError, TaskFault
from baton.host import Reporter, Silent, complete
from baton.journal import Run, open_run
from baton.protocols import ChainOptions, VoteOptions
from baton.records import Record
from baton.rollout import Play, Seat, Substitute, Table
from baton.types import AgentId, Episode, Failed, Task


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a score report: a mean over prompts with its interval, and what it cost in generated tokens."""

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0
    """Prompts: the independent unit."""
    tokens_per_answer: float | None = None
    pass_at_k: float | None = None
    cut: float | None = None
    failed: int = 0
    difference: tuple[float, float, float] | None = None
    """Team minus this row, paired by prompt, with its 95 % interval."""
    note: str = ""
    measurement: str = ""
    """Which episodes it rests on; empty where nothing was run."""


def evaluate(
    path: str | Path,
    *,
    k: int = 1,
    episodes: int | None = None,
    baselines: bool = True,
    full_information: str | None = None,
    reporter: Reporter | None = None,
) -> Record:
    """Evaluate a run's promoted team on its `test` prompts. Report and episodes are stored in the run, if it can be written.

    Args:
        k: episodes per prompt; reports avg@k and the unbiased pass@k of k team episodes.
        episodes: episodes in all (default eval.episodes, or what the test set holds).
        baselines: also run the seats' ablations and the four baselines.
        full_information: a model to run as the "one model of the total size"; it is asked the whole question.
    """
    reporter = reporter or Silent()
    run = open_run(path)
    plan = assemble.prepare(run.config, root=Path(run.start["root"]), own=run.origins)
    assemble.set_threads(plan.config, plan.parameters)
    versions = dict(run.position.team.versions)
    now = {name: run.folder(name, versions[name]) for name in plan.local}
    start = {name: run.folder(name, 0) for name in plan.local}
    bench = Bench(plan, k=k, episodes=episodes, reporter=reporter)
    try:
        rows = report_rows(
            bench, now, start, baselines=baselines, full_information=full_information, start_name=start_name(run)
        )
    finally:
        bench.close()
    report: Record = {
        "run": str(run.path),
        "time": time.time(),
        "k": k,
        "prompts": len(bench.tasks),
        "temperature": plan.config.eval.temperature,
        "facts": dict(plan.env.facts(len(plan.seats))),
        "versions": versions,
        "baselines": baselines,
        "full_information": full_information,
        "rows": [row_record(row) for row in rows],
    }
    return report | {"file": _store(run, bench, report, reporter)}


def start_name(run: Run) -> str:
    """What version 0 of everybody is: nobody has trained it here."""
    return "untrained team" if run.swap is None else "team as handed over by the swap"


def _store(run: Run, bench: Bench, report: Record, reporter: Reporter) -> str | None:
    """Write the report and every episode under it into the run; None, and a line, where the run cannot be written."""
    folder = run.path / "evaluations"
    prompts = {task.id: task.prompt for task in bench.tasks}
    played = [row for r in bench.results for row in records.episode_rows(r.episodes, use=r.name, prompts=prompts)]
    try:
        folder.mkdir(exist_ok=True)
        number = 1 + max((int(path.stem) for path in folder.iterdir() if path.stem.isdecimal()), default=0)
        # The report comes last: a report that is there has its episodes.
        records.write_episodes(folder / f"{number:03d}.parquet", played)
        text = json.dumps({"schema": records.SCHEMA, **report}, indent=2, ensure_ascii=False) + "\n"
        records.write_text(folder / f"{number:03d}.json", text)
    except (OSError, RunError) as error:
        reporter.say(f"not stored in the run, which cannot be written: {error}")
        return None
    return f"evaluations/{number:03d}.json"


def report_rows(
    bench: Bench,
    now: Mapping[AgentId, Path],
    start: Mapping[AgentId, Path],
    *,
    baselines: bool,
    full_information: str | None,
    start_name: str = "untrained team",
) -> list[Row]:
    """Every row of a run's report: the team (`now`: its folders), the untrained one, the ablations and the baselines."""
    team = bench.measure("team", bench.seated(now), now)
    rows = [_scored(bench.row(team))]
    if baselines:
        rows += _ablations(bench, team, now)
    untrained = bench.measure(start_name, bench.seated(start), start)
    rows.insert(1, bench.row(untrained, team))
    if baselines:
        rows += _baselines(bench, team, now, full_information)
    return rows


def _scored(row: Row) -> Row:
    """The row of what was to be measured. Raises TaskFault where nothing of it could be graded."""
    if row.value is None:
        raise TaskFault(f"{row.name}: {row.note}")
    return row


def evaluate_model(
    spec: str, config: Config, *, k: int = 1, episodes: int | None = None, root: Path, reporter: Reporter | None = None
) -> Record:
    """One model alone on the test prompts of a config's env: it is asked the whole question."""
    lone = config.model_copy(update={"agents": tuple(a.model_copy(update={"warm_start": None}) for a in config.agents)})
    plan = assemble.prepare(lone, root=root)
    assemble.set_threads(plan.config, plan.parameters)
    bench = Bench(plan, k=k, episodes=episodes, reporter=reporter or Silent())
    try:
        name = plan.config.agents[-1].name
        folder, codec, parameters = assemble.load_base(spec, config)
        result = bench.measure(spec, bench.alone(name, codec, 1), {name: folder}, whole_question=True)
        row = replace(_scored(bench.row(result)), note=f"{parameters:,} parameters, asked the whole question in one call")
    finally:
        bench.close()
    return {
        "model": spec,
        "k": k,
        "prompts": len(bench.tasks),
        "temperature": config.eval.temperature,
        "facts": dict(plan.env.facts(len(config.agents))),
        "rows": [row_record(row)],
    }


def _ablations(bench: Bench, team: Result, now: Mapping[AgentId, Path]) -> list[Row]:
    """The team with each seat in turn replaced by an uninformed message; played with the weights that are loaded already."""
    plan = bench.plan
    rows: list[Row] = []
    for seat, name in enumerate(s.agent for s in plan.seats):
        if plan.env.ablate(bench.tasks[0], seat, key("probe")) is None:
            note = "not run: the env knows no uninformed message"
            rows.append(Row(name=f"{name} replaced by chance", value=None, note=note))
            continue

        def substitute(task: Task, index: int, at: Key, seat: int = seat) -> str | None:
            return plan.env.ablate(task, index, at) if index == seat else None

        result = bench.measure(f"{name} replaced by chance", bench.seated(now), now, substitute=substitute)
        rows.append(bench.row(result, team))
    return rows


def _baselines(bench: Bench, team: Result, now: Mapping[AgentId, Path], full_information: str | None) -> list[Row]:
    seats = [seat.agent for seat in bench.plan.seats]
    rows: list[Row] = []
    # The same model in all seats: the best of the agents, each with the seats' own roles.
    if len(seats) > 1:
        relays = [
            (name, bench.measure(f"self-relay {name}", bench.seated(now, everyone=name), {s: now[name] for s in seats}))
            for name in now
        ]
        best, result = max(relays, key=lambda pair: pair[1].mean)
        note = f"{best} in every seat, the best of {len(now)}"
        rows.append(_named(bench.row(result, team), "same model in all seats", note))
        rows.append(_best_single(bench, team, now))
    rows.append(_full_information(bench, team, full_information))
    return rows


def _best_single(bench: Bench, team: Result, now: Mapping[AgentId, Path]) -> Row:
    """The best over agents of the better of (a) one answer with n times the tokens, (b) the majority of n answers, each
    agent asked the whole question (ALGORITHMS 3.8). n is the most messages that an episode of the team can have."""
    n = bench.messages
    found: list[tuple[str, Result]] = []
    for name, folder in now.items():
        codec = bench.plan.codecs[name]
        longer = bench.measure(
            f"{name} alone, {n}x tokens", bench.alone(name, codec, n), {name: folder}, whole_question=True
        )
        found.append((f"{name} alone, one answer of up to {n} times the tokens", longer))
        voters = bench.voting(name, codec, n)
        majority = bench.measure(
            f"{name} alone, majority of {n}", voters, {seat.agent: folder for seat in voters.seats}, whole_question=True
        )
        found.append((f"{name} alone, majority of {n} answers", majority))
    what, result = max(found, key=lambda pair: pair[1].mean)
    return _named(bench.row(result, team), "best single agent, equal tokens", what)


def _named(row: Row, name: str, note: str) -> Row:
    """A row under a name of its own, with what is to be said of it; why it has no value stays."""
    return replace(row, name=name, note=f"{note}; {row.note}" if row.note else note)


FULL_INFORMATION = "one model of the total size, full information"


def _full_information(bench: Bench, team: Result, spec: str | None) -> Row:
    total = bench.plan.total_parameters
    if spec is None:
        return Row(
            name=FULL_INFORMATION,
            value=None,
            note=f"not run: give a model of about {total:,} parameters with --full-information"
            if total
            else "not run: tables have no parameters to match",
        )
    folder, codec, parameters = bench.outside(spec)
    agent = bench.plan.config.agents[-1].name
    lineup = bench.alone(agent, codec, bench.messages)
    result = bench.measure(FULL_INFORMATION, lineup, {agent: folder}, whole_question=True)
    note = f"{spec}, {parameters:,} parameters (the team has {total:,})"
    return _named(bench.row(result, team), FULL_INFORMATION, note)


# ---- the bench -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Lineup:
    """Seats and rules of one measurement."""

    seats: tuple[Seat, ...]
    protocol: protocols.TeamProtocol
    everyone: AgentId | None = None
    """The agent whose model sits in every seat; None: each sits in its own."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What is played under one name: who with which weights (a folder per seat's agent), on what."""

    name: str
    lineup: Lineup
    folders: Mapping[AgentId, Path]
    plays: Sequence[Play]
    substitute: Substitute | None

    @property
    def versions(self) -> Mapping[AgentId, int]:
        """Version of the weights behind each seat's agent."""
        return {
            a: records.version_of(self.folders[a]) if a in self.folders else 0 for a in (s.agent for s in self.lineup.seats)
        }


@dataclass(frozen=True, kw_only=True)
class Result:
    """The episodes of a measurement and their means."""

    name: str
    per_prompt: tuple[float, ...]
    """Mean reward of each prompt's k episodes; a prompt whose episodes all failed is left out (None in `kept`)."""
    kept: tuple[int, ...]
    episodes: tuple[Episode, ...]
    pass_at_k: float | None

    @property
    def mean(self) -> float:
        """Of the prompts; below every other where there is none."""
        return sum(self.per_prompt) / len(self.per_prompt) if self.per_prompt else -math.inf


def test_tasks(plan: Plan, count: int) -> list[Task]:
    """The first so many test prompts (or all there are) in the order in which every report asks them."""
    order = permutation(key(plan.config.seed, "test"), len(plan.splits.test))
    return [plan.splits.test[i] for i in order[:count]]


def test_address(plan: Plan) -> tuple[str | int, ...]:
    """Where every key of a report begins: a team has one answer to a test prompt, in whichever report."""
    return (plan.config.seed, "evaluate")


class Bench:
    """The same prompts and keys for every measurement of one evaluation."""

    def __init__(self, plan: Plan, *, k: int, episodes: int | None, reporter: Reporter) -> None:
        if k < 1:
            raise ConfigError(f"k = {k}: an evaluation needs at least one episode per prompt")
        budget = episodes if episodes is not None else plan.config.eval.episodes
        if k > budget:
            raise ConfigError(f"k = {k} episodes of one prompt are more than the {budget} in all; lower k or raise episodes")
        if not plan.splits.test:
            raise ConfigError("the test set is empty; give the env more prompts")
        wanted = budget // k
        self.tasks = test_tasks(plan, wanted)
        if episodes is not None and wanted > len(self.tasks):
            reporter.say(f"--episodes {episodes}: the test set has {len(self.tasks)} prompts, each is played {k} times")
        self.plan, self.k, self.reporter = plan, k, reporter
        self.results: list[Result] = []
        self.messages = len(plan.seats) * plan.protocol.own_turns
        self._pool = assemble.grader_pool(plan)
        self._loaded: tuple[tuple[AgentId | None, ...], dict[AgentId, Path], Crew] | None = None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _seat(self, seat: Seat, **changes: Any) -> Seat:
        return replace(seat, temperature=self.plan.config.eval.temperature, **changes)

    def seated(self, folders: Mapping[AgentId, Path], everyone: AgentId | None = None) -> Lineup:
        """The team in its seats, or one agent's model in all of them."""
        codec = None if everyone is None else self.plan.codecs[everyone]
        return Lineup(
            seats=tuple(
                self._seat(s) if codec is None else self._seat(s, codec=codec, speaker=None) for s in self.plan.seats
            ),
            protocol=self.plan.protocol,
            everyone=everyone,
        )

    def alone(self, name: AgentId, codec: Codec, times: int) -> Lineup:
        """One agent that is asked the whole question and may use `times` a seat's tokens. It has the system prompt that the
        config wrote for it; a default one tells of a team."""
        protocol = protocols.build(ChainOptions(), [name])
        last = self.plan.seats[-1]
        own = next(a.system for a in self.plan.config.agents if a.name == name)
        system = protocol.default_system(0) if own == "default" else own
        longest = max(s.max_new_tokens for s in self.plan.seats)
        seat = self._seat(last, agent=name, codec=codec, speaker=None, system=system, max_new_tokens=longest * times)
        return Lineup(seats=(seat,), protocol=protocol, everyone=name)

    def voting(self, name: AgentId, codec: Codec, n: int) -> Lineup:
        """n answers of one agent and their majority."""
        one = self.alone(name, codec, 1).seats[0]
        if not codec.end_ids:  # what cannot end by itself answers in messages of its own length, or in none that can be read
            own = next(s.max_new_tokens for s in self.plan.seats if s.agent == name)
            one = replace(one, max_new_tokens=own)
        seats = tuple(replace(one, agent=f"{name}-{i + 1}") for i in range(n))
        protocol = protocols.build(VoteOptions(), [seat.agent for seat in seats])
        return Lineup(seats=seats, protocol=protocol, everyone=name)

    def measure(
        self,
        name: str,
        lineup: Lineup,
        folders: Mapping[AgentId, Path],
        *,
        substitute: Substitute | None = None,
        whole_question: bool = False,
    ) -> Result:
        """k episodes on each test prompt."""
        tasks = [replace(t, views=()) for t in self.tasks] if whole_question else self.tasks
        plays = [Play(task=task, sibling=i) for task in tasks for i in range(self.k)]
        episodes = self.play(Measurement(name=name, lineup=lineup, folders=folders, plays=plays, substitute=substitute))
        means: list[float] = []
        kept: list[int] = []
        passes: list[float] = []
        high = self.plan.env.reward_range[1]
        for p in range(len(tasks)):
            rewards = [e.reward for e in episodes[p * self.k : (p + 1) * self.k] if e.is_scored]
            if rewards:
                kept.append(p)
                means.append(sum(rewards) / len(rewards))
                right = sum(r >= high for r in rewards)
                passes.append(scores.pass_at_k(len(rewards), right, len(rewards)))
        result = Result(
            name=name,
            per_prompt=tuple(means),
            kept=tuple(kept),
            episodes=tuple(episodes),
            pass_at_k=sum(passes) / len(passes) if self.k > 1 else None,
        )
        self.results.append(result)
        return result

    @property
    def address(self) -> tuple[str | int, ...]:
        """Where every key of an evaluation begins."""
        return test_address(self.plan)

    def table(self, measurement: Measurement, sampler: Sampler) -> Table:
        """The table that a measurement is played at."""
        return Table(
            seats=measurement.lineup.seats,
            protocol=measurement.lineup.protocol,
            sampler=sampler,
            grade=assemble.grader(self.plan, self._pool),
            normalise=self.plan.env.normalise,
        )

    def outside(self, spec: str) -> tuple[Path, Codec, int]:
        """(folder, codec, parameters) of a model that is none of the team's."""
        return assemble.load_base(spec, self.plan.config)

    def play(self, measurement: Measurement) -> Sequence[Episode]:
        """The episodes of a measurement."""
        crew = self._crew(measurement.folders, measurement.lineup.everyone)
        total = len(measurement.plays) * len(measurement.lineup.seats) * measurement.lineup.protocol.own_turns
        done = [0]

        def tick() -> None:
            done[0] += 1
            self.reporter.progress(measurement.name, min(done[0], total), total)

        async def run() -> list[Episode]:
            return await self.table(measurement, crew.sampler).play(
                measurement.plays,
                address=self.address,
                versions=measurement.versions,
                substitute=measurement.substitute,
                tick=tick,
            )

        return complete(run())

    def _crew(self, folders: Mapping[AgentId, Path], everyone: AgentId | None) -> Crew:
        """These agents, loaded; where the measurement before had the same models, only the weights that differ are."""
        before: Mapping[AgentId, Path] = {}
        loaded = None
        if self._loaded is not None and self._loaded[0] == (everyone, *folders):
            before, loaded = self._loaded[1:]
        self._loaded = None  # two teams need twice the memory
        if loaded is None or not all(loaded.fits(agent, folder) for agent, folder in folders.items()):
            before, loaded = {}, None  # let go before the next is made
            loaded = assemble.crew(_only(self.plan.config, list(folders), everyone), folders, learners=[])

        async def publish() -> None:
            for agent, folder in folders.items():
                if before.get(agent) != folder:
                    version = records.version_of(folder)
                    await loaded.sampler.publish(agent, "promoted", loaded.load(folder), version)

        complete(publish())
        self._loaded = ((everyone, *folders), dict(folders), loaded)
        return loaded

    def row(self, result: Result, team: Result | None = None) -> Row:
        """A result as a line, paired with the team's where it is given; without a value where every episode failed."""
        if not result.per_prompt:
            why = next(e.outcome.reason for e in result.episodes if isinstance(e.outcome, Failed))
            note = f"no value: all {len(result.episodes)} episodes failed; first: {why}"
            return Row(name=result.name, value=None, failed=len(result.episodes), note=note)
        interval = scores.mean_interval(result.per_prompt)
        turns = [t for e in result.episodes for t in e.turns]
        difference: tuple[float, float, float] | None = None
        if team is not None:
            mine = dict(zip(result.kept, result.per_prompt, strict=True))
            theirs = dict(zip(team.kept, team.per_prompt, strict=True))
            both = sorted(mine.keys() & theirs.keys())
            if len(both) > 1:
                paired = scores.paired_interval([theirs[p] for p in both], [mine[p] for p in both])
                difference = (paired.value, paired.low, paired.high)
        return Row(
            name=result.name,
            value=interval.value,
            low=interval.low,
            high=interval.high,
            n=interval.n,
            tokens_per_answer=sum(len(t.ids) for t in turns) / len(result.episodes),
            pass_at_k=result.pass_at_k,
            cut=sum(t.cut for t in turns) / max(1, len(turns)),
            failed=sum(not e.is_scored for e in result.episodes),
            difference=difference,
            measurement=result.name,
        )


def _only(config: Config, names: Sequence[AgentId], everyone: AgentId | None) -> Config:
    """The config with one entry per name that a measurement loads: the agent of that name, or `everyone` under it."""
    known = {a.name: a for a in config.agents}
    agents = tuple(known[everyone or n].model_copy(update={"name": n}) for n in names)
    return config.model_copy(update={"agents": agents})


def row_record(row: Row) -> Record:
    """A row as a report holds it."""
    return {
        "name": row.name,
        "value": row.value,
        "low": row.low,
        "high": row.high,
        "n": row.n,
        "tokens_per_answer": row.tokens_per_answer,
        "pass_at_k": row.pass_at_k,
        "cut": row.cut,
        "failed": row.failed,
        "difference": list(row.difference) if row.difference else None,
        "note": row.note,
        "measurement": row.measurement,
    }
