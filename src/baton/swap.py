"""Another model takes an agent's seat, and the others keep theirs (ALGORITHMS 2.8).

A swap changes nothing of the run that it is asked of. It plays with the team as it is, makes the newcomer ready, asks the
gate and the pairs, and only then writes a run directory of its own (`swaps/001`) that begins with the team as handed over:
the others' weights, moments, penalties and rates are those of the run before, the newcomer has none yet. One rename of
`swaps/current` is the commit point, and another one undoes it: a refused or an undone swap leaves the run bit for bit.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from baton import assemble, records
from baton.algorithms import pairs, stage0
from baton.algorithms.acceptance import Trainee
from baton.algorithms.episodes import draw_prompts
from baton.algorithms.stage0 import Contexts, Distilled, SwapOptions, radii
from baton.algorithms.state import AgentState, Evidence, Pair, PairsReport, Position
from baton.assemble import Crew, Plan
from baton.config import Config
from baton.core.keyed import key, permutation
from baton.core.scores import mean_interval, paired_interval
from baton.engines import mixture
from baton.engines.chat import ChatCodec
from baton.engines.engine import Codec
from baton.envs.pool import GraderPool
from baton.errors import BatonError, ConfigError, Interrupted, RunError, UnsupportedError
from baton.evaluation import test_address, test_tasks
from baton.host import Reporter, Silent, Stop, complete, stoppable
from baton.journal import BEFORE, SWAPS, Run, current, saved_state, standing, write_team
from baton.records import Record
from baton.rollout import Play, Table
from baton.starting import Inherited, first_record, trainees_of
from baton.team import Member, Team
from baton.types import AgentId, Episode, Snapshot, Task
from baton.warm_start import Dialogue, WarmStartOptions, WarmStartRecord, warm_start

START_LINE = "stages.jsonl"


class Refused(BatonError):
    """A newcomer that may not take the seat; the run is what it was."""


# ---- asking ------------------------------------------------------------------------------------------------------------


def swap(
    path: str | Path,
    agent: AgentId,
    model: str,
    *,
    options: SwapOptions | None = None,
    reporter: Reporter | None = None,
) -> Record:
    """Give an agent's seat to another model, and the record of how that went.

    Args:
        path: a run that stands between two stages; training that goes on later has the newcomer.
        model: as in `agents.model`.

    Raises:
        ConfigError, ModelError, DataError: it cannot be asked; no weight was read.
        Refused: the gate or the pairs said no. The run is untouched in every case.
        RunError: the run stands inside a stage, or another process holds it.
    """
    home = standing(path).home
    with records.locked(home), stoppable(reporter or Silent()) as stop:
        run = Run(current(home))
        answer = complete(
            exchange(run, agent, model, options or SwapOptions(), reporter=reporter or Silent(), stop=stop, raises=True)
        )
    return answer


def undo(path: str | Path) -> Record:
    """Go back to the run as it was before its last swap; what was trained since stays in its own directory.

    Raises:
        RunError: no swap stands, or another process holds the run.
    """
    home = standing(path).home
    with records.locked(home):
        run = Run(current(home))
        if run.swap is None:
            raise RunError(f"{home} has no swap to undo")
        before = str(run.swap["before"])
        records.write_text(home / SWAPS / "current", before + "\n")
        back = Run(current(home))
        return {"undone": run.swap, "left": str(run.path), "run": str(back.path), "stages": stages_done(back)}


def stages_done(run: Run) -> int:
    """Complete stages of a run, those before its swaps included."""
    return run.position.done // max(1, sum(a.trainable for a in run.config.agents))


async def tested(
    plan: Plan, table: Table, versions: Mapping[AgentId, int], *, tick: Callable[[], None] = lambda: None
) -> list[float]:
    """Rewards of a team on the test prompts at `eval.temperature`, one episode each; a failed one counts lowest."""
    seats = tuple(replace(seat, temperature=plan.config.eval.temperature) for seat in table.seats)
    tasks = test_tasks(plan, plan.config.eval.episodes)
    episodes = await replace(table, seats=seats).play(
        [Play(task=task) for task in tasks], address=test_address(plan), versions=versions, tick=tick
    )
    return [e.reward if e.is_scored else plan.env.reward_range[0] for e in episodes]


# ---- what can be asked -------------------------------------------------------------------------------------------------


def check(run: Run, agent: AgentId, model: str, options: SwapOptions, *, is_live: bool = False) -> Config:
    """The config with the newcomer in its seat. `is_live`: whoever runs it waits for the end of a stage.

    Raises:
        ConfigError, RunError: it cannot take it, and why.
    """
    config, position = run.config, run.position
    names = [a.name for a in config.agents]
    if agent not in names:
        raise ConfigError(f"swap {agent}={model}: the team has no agent '{agent}'; it has {', '.join(names)}")
    own = next(a for a in config.agents if a.name == agent)
    if own.is_remote or model.startswith("endpoint:"):
        raise ConfigError(f"swap {agent}={model}: a model behind an endpoint has no weights here; start a run with it")
    if config.algorithm.name == "independent":
        raise ConfigError("an independent run is a baseline of agents trained apart; a swap has no team to play with")
    if position.entries and not is_live:
        done = ", ".join(e.agent for e in position.entries)
        raise RunError(
            f"{run.home} stands inside a stage ({done} updated); complete it first: baton train CONFIG --run {run.home} "
            f"--resume --set algorithm.stages={stages_done(run) + 1}"
        )
    is_mixed = options.mode == "mixture"
    if is_mixed and (config.engine.name == "table" or own.lora is not None):
        what = "tables" if config.engine.name == "table" else "adapters"
        raise UnsupportedError(f"mode 'mixture' holds two whole models and is not made for {what}; use mode 'distill'")
    if options.mode in ("distill", "mixture") and config.engine.name == "local" and mixture.is_mixture(run.folder(agent)):
        raise UnsupportedError(
            f"'{agent}' is a mixture of two models already; baton swap {run.home} --undo takes it back first"
        )
    changes: dict[str, Any] = {"model": model, "warm_start": None}
    first = next(a for a in Run(run.home).config.agents if a.name == agent)
    changes |= {"trainable": False, "lr": "auto", "radius": "preset"} if is_mixed else {}
    if not is_mixed and first.trainable and not own.trainable:
        changes |= {"trainable": True, "lr": first.lr, "radius": first.radius}
    agents = tuple(a.model_copy(update=changes) if a.name == agent else a for a in config.agents)
    if not any(a.trainable for a in agents):
        raise ConfigError(f"with a mixture in the seat of '{agent}' nobody is left to train; use mode 'distill'")
    return config.model_copy(update={"agents": agents})


def handed_over(run: Run, config: Config, agent: AgentId, model: str, lrs: Mapping[AgentId, float]) -> Position:
    """Where a run stands that begins with a swap of `run`: as it stood, with a newcomer that has learnt nothing yet and
    versions that count from 0. `lrs` has the rate of every agent that is trained from here on."""
    was = run.position
    members = tuple(
        Member(agent=agent, model=model, incarnation=m.incarnation + 1) if m.agent == agent else replace(m, version=0)
        for m in was.team.members
    )
    agents: dict[AgentId, AgentState] = {}
    for name, lr in lrs.items():
        state = was.agents.get(name)
        if state is None or name == agent:
            cursor = 0 if state is None else state.cursor
            state = AgentState(beta=config.algorithm.penalty.start, lr=lr, cursor=cursor)
        agents[name] = state
    return Position(team=Team(members=members), agents=agents, done=stages_done(run) * len(lrs))


def same_tokens(one: Codec, other: Codec) -> bool:
    """Both models spell with the same ids: every token, control tokens included, and the ids that end a message."""
    if isinstance(one, ChatCodec) and isinstance(other, ChatCodec):
        return one.tokens == other.tokens and one.end_ids == other.end_ids
    return one == other


# ---- the exchange ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Side:
    """The team before or after, at its table."""

    plan: Plan
    crew: Crew
    table: Table
    versions: Mapping[AgentId, int]


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """A newcomer that may be asked about: its folder, and what making it ready came to."""

    folder: Path
    record: Record
    distilled: Distilled | None = None
    probe: Sequence[Episode] = ()


async def exchange(
    run: Run,
    agent: AgentId,
    model: str,
    options: SwapOptions,
    *,
    reporter: Reporter,
    stop: Stop,
    raises: bool = False,
    request: str | None = None,
) -> Record:
    """A swap of a run that this process holds. Where it is refused, the answer says why (or `Refused` is raised)."""
    partial_folder: Path | None = None
    pool: GraderPool | None = None
    try:
        config = check(run, agent, model, options)
        root, origins = Path(run.start["root"]), run.origins
        plan = assemble.prepare(run.config, root=root, own=origins)
        others = {name: folder for name, folder in origins.items() if name != agent}
        newer = assemble.prepare(config, root=root, own=others)
        if options.mode in ("distill", "mixture") and not same_tokens(plan.codecs[agent], newer.codecs[agent]):
            raise ConfigError(
                f"swap {agent}={model}: its tokenizer has other tokens than the model in that seat, so no law of one lies "
                "near a law of the other; use mode 'imitate'"
            )
        threads = assemble.set_threads(config, {**plan.parameters, **newer.parameters})
        pool = assemble.grader_pool(plan, check=stop.check)
        number = 1 + max((int(p.name) for p in (run.home / SWAPS).glob("[0-9][0-9][0-9]")), default=0)
        partial_folder = run.home / SWAPS / f".{number:03d}.partial"
        shutil.rmtree(partial_folder, ignore_errors=True)
        (partial_folder / "newcomer").parent.mkdir(parents=True, exist_ok=True)
        work = _Work(
            run=run, agent=agent, model=model, options=options, plan=plan, newer=newer, pool=pool, threads=threads,
            folder=partial_folder, reporter=reporter, stop=stop, request=request,
        )  # fmt: skip
        record = await work.done()
        target = run.home / SWAPS / f"{number:03d}"
        records.sync_tree(partial_folder)
        partial_folder.replace(target)
        records.sync_folder(target.parent)
        records.write_text(run.home / SWAPS / "current", f"{number:03d}\n")
        return {"accepted": True, "run": str(target), **record}
    except BatonError as error:
        if raises or isinstance(error, Interrupted):
            raise
        reporter.say(f"no swap: {error}")
        return {"accepted": False, "agent": agent, "model": model, "mode": options.mode, "why": str(error)}
    finally:
        if pool is not None:
            pool.close()
        if partial_folder is not None:
            shutil.rmtree(partial_folder, ignore_errors=True)
            _leave_nothing(run.home / SWAPS)


def _leave_nothing(folder: Path) -> None:
    """A folder that this swap made and in which nothing came to stay is gone again."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _index(plan: Plan, agent: AgentId) -> int:
    return next(i for i, seat in enumerate(plan.seats) if seat.agent == agent)


def address(seed: int, incarnation: int, agent: AgentId) -> tuple[str | int, ...]:
    """Where the keys of a swap begin."""
    return (seed, "swap", incarnation, agent)


STAGE0 = "stage 0"
"""Behind that, the draws of Stage 0."""


def probe_prompts(plan: Plan, count: int, *, at: tuple[str | int, ...]) -> list[Task]:
    """The probe prompts on which the gate looks at a newcomer."""
    order = permutation(key(*at, "probe"), len(plan.splits.probe))
    return [plan.splits.probe[i] for i in order[:count]]


class _Work:
    """One swap from the first episode to the directory that it leaves."""

    def __init__(
        self,
        *,
        run: Run,
        agent: AgentId,
        model: str,
        options: SwapOptions,
        plan: Plan,
        newer: Plan,
        pool: GraderPool | None,
        threads: int,
        folder: Path,
        reporter: Reporter,
        stop: Stop,
        request: str | None,
    ) -> None:
        self.request = request
        self.run, self.agent, self.model, self.options = run, agent, model, options
        self.plan, self.newer, self.pool, self.threads, self.folder = plan, newer, pool, threads, folder
        self.reporter, self.stop = reporter, stop
        self.index = _index(plan, agent)
        self.member = run.position.team.member(agent)
        self.at = address(plan.config.seed, self.member.incarnation + 1, agent)
        self.tokens = {"played": 0, "trained": 0}
        self.began = time.monotonic()

    async def done(self) -> Record:
        """Make the newcomer ready, ask, and write the directory. Raises Refused where the answer is no."""
        config, folders = self.plan.config, {name: self.run.folder(name) for name in self.plan.local}
        self.reporter.say(f"{self.agent}: {self.member.model} gives its seat to {self.model} ({self.options.mode})")
        is_taught = self.options.mode in ("distill", "mixture")
        crew = assemble.crew(config, folders, learners=[self.agent] if is_taught else [])
        old = await self._side(self.plan, crew, folders, self.run.position.team.versions)
        before = await self._tested(old, "before")
        ready = await self._made_ready(old, folders)
        old_pairs = await self._paired(old, None)
        del crew, old

        seated = {**folders, self.agent: ready.folder}
        learners = [a.name for a in self.newer.config.agents if a.trainable]
        crew = assemble.crew(self.newer.config, seated, learners=learners)
        for name in learners:
            if name != self.agent:
                crew.rest(name, partial(saved_state, self.run, crew, name, self.run.files[name]))
            elif self.newer.config.engine.name == "table":
                crew.learners[name].restore(Snapshot(weights=crew.stored(ready.folder), moments={}, steps=0))
        new = await self._side(self.newer, crew, seated, {a.name: 0 for a in self.newer.config.agents})
        compared = self._judged(old_pairs, await self._paired(new, old_pairs))
        after = await self._tested(new, "after")
        record: Record = {
            "agent": self.agent,
            "mode": self.options.mode,
            "model_before": self.member.model,
            "model": self.model,
            "parameters_before": self.plan.parameters[self.agent],
            "parameters": self.newer.parameters[self.agent],
            "before": BEFORE if self.run.path == self.run.home else self.run.path.name,
            "from_version": self.member.version,
            "incarnation": self.member.incarnation + 1,
            "stages": stages_done(self.run),
            "options": self.options.model_dump(mode="json"),
            "certificates": self._void(),
            **({} if self.request is None else {"request": self.request}),
            **ready.record,
            "pairs": compared,
            "accuracy": {
                "prompts": len(before),
                "before": mean_interval(before),
                "after": mean_interval(after),
                "difference": paired_interval(after, before),
            },
            "tokens": dict(self.tokens),
            "seconds": time.monotonic() - self.began,
            "fingerprints_before": {name: self.run.fingerprint(name) for name in self.run.files},
        }
        await self._write(new, record, ready)
        return records.plain(record)

    def _void(self) -> str | None:
        """Why no bound on the law can speak of this newcomer; None where one can."""
        if self.options.mode in ("distill", "mixture"):
            return None
        same = same_tokens(self.plan.codecs[self.agent], self.newer.codecs[self.agent])
        return "void(kl_not_measured)" if same else "void(tokenizer_swap)"

    # -- playing

    def _ticker(self, what: str, side: _Side, episodes: int | None = None) -> Callable[[], None]:
        """What is called at every message: a word to who watches, and whether to stop."""
        count = self.plan.config.eval.episodes if episodes is None else episodes
        total, done = count * len(side.table.seats) * side.table.protocol.own_turns, [0]

        def tick() -> None:
            self.stop.check()
            done[0] = min(done[0] + 1, total)
            self.reporter.progress(what, done[0], total)

        return tick

    async def _side(self, plan: Plan, crew: Crew, folders: Mapping[AgentId, Path], versions: Mapping[AgentId, int]) -> _Side:
        for name, folder in folders.items():
            await crew.sampler.publish(name, "promoted", crew.load(folder), versions[name])
        return _Side(plan=plan, crew=crew, table=assemble.table(plan, crew.sampler, self.pool), versions=versions)

    async def _played(
        self,
        side: _Side,
        tasks: Sequence[Task],
        who: str,
        *,
        until: AgentId | None = None,
    ) -> list[Episode]:
        """One episode a task (numbered, so that one may come twice)."""
        episodes = await side.table.play(
            [Play(task=task, sibling=i) for i, task in enumerate(tasks)],
            address=(*self.at, who),
            versions=side.versions,
            until=until,
            tick=self._ticker(f"swap: {who}", side, len(tasks)),
        )
        self.tokens["played"] += sum(len(turn.ids) for e in episodes for turn in e.turns)
        return episodes

    async def _tested(self, side: _Side, who: str) -> list[float]:
        return await tested(side.plan, side.table, side.versions, tick=self._ticker(f"swap: {who}", side))

    # -- making ready

    async def _made_ready(self, old: _Side, folders: Mapping[AgentId, Path]) -> _Ready:
        """The newcomer's folder, and what it took. Raises Refused where the gate says no."""
        start = assemble.fresh_folder(self.newer, self.index)
        target = self.folder / "newcomer"
        target.mkdir(parents=True, exist_ok=True)
        alone = assemble.crew(self.newer.config, {self.agent: start}, learners=[self.agent])
        learner = alone.learners[self.agent]
        record: Record = {}
        distilled: Distilled | None = None
        probed: Sequence[Episode] = ()
        lr = 3.0 * self.newer.lr(self.newer.config.agents[self.index]) if self.options.lr == "auto" else self.options.lr
        if self.options.mode == "distill":
            distilled, probed = await self._distilled(old, alone, folders, start, lr)
            record = {"rounds": distilled.rounds, "gate": distilled.rounds[-1].look, "evidence": EVIDENCE}
            self.tokens["trained"] = sum(r.tokens for r in distilled.rounds)
            if not distilled.passed:
                raise Refused(self._why_not(distilled))
        elif self.options.mode == "imitate":
            record = {"imitation": await self._imitated(old, alone, lr)}
        alone.save(self.agent, target, learner.weights())
        if self.options.mode == "mixture":
            both = self.folder / "both"
            mixture.save(both, newcomer=target, incumbent=folders[self.agent], radius=self.options.radius)
            shutil.rmtree(target)
            target = both
            record = {"bound": {"kl_served_incumbent": self.options.radius}}
        return _Ready(folder=target, record=record, distilled=distilled, probe=probed)

    def _why_not(self, distilled: Distilled) -> str:
        last = distilled.rounds[-1].look
        return (
            f"after {len(distilled.rounds)} rounds {self.model} speaks {last.message_mean:.3g} nats from '{self.agent}' on "
            f"average (radius {last.radius_message_mean:g}) and {last.q_gate:.3g} in one state of a hundred (radius "
            f"{last.radius_token:g}). More contexts or steps bring it nearer, a larger radius lets it stay away, and mode "
            "'mixture' needs no training; the run is what it was"
        )

    async def _distilled(
        self, old: _Side, alone: Crew, folders: Mapping[AgentId, Path], start: Path, lr: float
    ) -> tuple[Distilled, Sequence[Episode]]:
        plan, options, gate = self.plan, self.options, self.plan.config.gate
        incumbent = old.crew.learners[self.agent]
        if plan.config.engine.name == "table":
            incumbent.restore(Snapshot(weights=old.crew.stored(folders[self.agent]), moments={}, steps=0))
        was, now = plan.seats[self.index], self.newer.seats[self.index]
        tasks = {t.id: t for t in (*plan.splits.train, *plan.splits.probe)}
        student: list[_Side] = []
        cursor = 0

        async def more(number: int) -> list[Contexts]:
            nonlocal cursor
            count = min(options.contexts, len(plan.splits.train))
            drawn, cursor = draw_prompts(plan.splits.train, cursor, count, at=(*self.at, "contexts"))
            own = drawn if number == 0 else drawn[: max(1, count // 2)]
            episodes = await self._played(old, own, f"contexts {number + 1}", until=self.agent)
            found = [stage0.contexts(episodes, tasks, protocol=plan.protocol, was=was, seat=now, index=self.index)]
            if rest := drawn[len(own) :]:
                if not student:
                    seated = {**folders, self.agent: start}
                    crew = assemble.crew(self.newer.config, seated, learners=[])
                    others = {name: folder for name, folder in folders.items() if name != self.agent}
                    student.append(await self._side(self.newer, crew, others, {n: 0 for n in seated}))
                weights = alone.learners[self.agent].weights()
                await student[0].crew.sampler.publish(self.agent, "promoted", weights, 0)
                visited = await self._played(student[0], rest, f"visited {number + 1}", until=self.agent)
                turned = stage0.contexts(visited, tasks, protocol=plan.protocol, was=now, seat=was, index=self.index)
                found.append(Contexts(incumbent=turned.newcomer, newcomer=turned.incumbent))
            return found

        probed = await self._played(old, probe_prompts(plan, gate.probe_prompts, at=self.at), "probe", until=self.agent)
        ticks = [0]

        def tick(what: str, total: int) -> None:
            self.stop.check()
            ticks[0] = ticks[0] % total + 1
            self.reporter.progress(f"swap: {what}", ticks[0], total)

        distilled = await stage0.distill(
            incumbent=incumbent,
            trainee=Trainee(
                agent=self.agent,
                learner=alone.learners[self.agent],
                lr=lr,
                radius_token=radii(options)[0],
                radius_message_mean=radii(options)[1],
                is_exact=old.crew.is_exact,
            ),
            probe=stage0.contexts(probed, tasks, protocol=plan.protocol, was=was, seat=now, index=self.index),
            more=more,
            options=options,
            gate=gate,
            lr=lr,
            at=(*self.at, STAGE0),
            tick=tick,
        )
        return distilled, probed

    async def _imitated(self, old: _Side, alone: Crew, lr: float) -> WarmStartRecord:
        """Maximum likelihood on the incumbent's whole messages, in the newcomer's own ids."""
        plan, options = self.plan, self.options
        count = min(options.contexts * options.rounds, len(plan.splits.train))
        drawn, _ = draw_prompts(plan.splits.train, 0, count, at=(*self.at, "contexts"))
        episodes = await self._played(old, drawn, "messages", until=self.agent)
        was, now = plan.seats[self.index], self.newer.seats[self.index]
        tasks = {t.id: t for t in drawn}
        rows = stage0.messages_of(episodes, tasks, protocol=plan.protocol, was=was, seat=now, index=self.index)
        steps = options.steps * options.rounds
        held_out = max(1, min(256, len(rows) // 8))
        if len(rows) < held_out + options.batch:
            raise ConfigError(
                f"{len(rows)} messages of '{self.agent}' are too few to imitate; raise contexts or lower batch"
            )

        def tick(step: int, accuracy: float) -> None:
            self.stop.check()
            self.reporter.progress("swap: imitation", step, steps, f"accuracy {accuracy:.2f}")

        record = warm_start(
            alone.learners[self.agent],
            [Dialogue(id=name, prompt_ids=prompt, reply_ids=reply) for name, prompt, reply in rows],
            WarmStartOptions(
                demonstrations=len(rows), held_out=held_out, steps=steps, batch=options.batch, lr=lr, check_every=25
            ),
            agent=self.agent,
            lr=lr,
            at=(*self.at, "imitation"),
            tick=tick,
            are_samples=True,
        )
        self.tokens["trained"] = record.tokens
        return record

    # -- asking

    async def _paired(self, side: _Side, played: Sequence[Episode] | None) -> list[Episode]:
        """Episodes on prompts of the certify set, where updates are compared on pairs: both teams' tokens are drawn with the
        same uniforms."""
        count = self.plan.config.certificate.update_pairs
        certify = self.plan.splits.certify
        tasks = [certify[n] for n in pairs.draws(len(certify), count, at=self.at)] if count else []
        return await self._played(side, tasks, "pairs" if played is None else "pairs beside") if tasks else []

    def _judged(self, promoted: Sequence[Episode], beside: Sequence[Episode]) -> PairsReport | None:
        """What the pairs show. Raises Refused where they show harm."""
        if not promoted:
            return None
        config = self.plan.config
        how = config.certificate.model_copy(update={"coupling": "inverse_cdf", "method": "betting"})
        report = pairs.judged(
            [Pair(promoted=a, beside=b) for a, b in zip(promoted, beside, strict=True)],
            how,
            pairs.update_claim(how, n_agents=1, stage=stages_done(self.run) + 1),
            reward_range=self.plan.env.reward_range,
            changed=(),
            pool=self.plan.splits.record["certify"]["sha256"],
        )
        if report.harm.verdict == "positive":
            raise Refused(
                f"the team with {self.model} as '{self.agent}' is worse by at least {report.harm.lower_bound:.3g} on "
                f"{report.n} pairs; the run is what it was"
            )
        return report

    # -- writing

    async def _write(self, new: _Side, record: Record, ready: _Ready) -> None:
        """The run directory that begins here."""
        config, here = self.newer.config, Run(self.folder)
        records.write_text(self.folder / "config.toml", config.to_toml())
        if ready.distilled is not None:
            prompts = {t.id: t.prompt for t in self.plan.splits.probe}
            rows = records.episode_rows(ready.probe, use="probe", prompts=prompts)
            records.write_episodes(self.folder / EVIDENCE, rows)
            told = Evidence(episodes=(), probe=ready.probe, states=ready.distilled.states, looks=ready.distilled.looks)
            records.write_divergences(self.folder / DIVERGENCES, told)
        trainees = trainees_of(self.newer, new.crew)
        position = handed_over(self.run, config, self.agent, self.model, {n: t.lr for n, t in trainees.items()})
        start = await first_record(
            here, self.newer, new.crew, new.table, trainees, position.team, {}, self.threads, self.stop,
            Inherited(position=position, group=int(self.run.start["group"]), swap=records.plain(record)),
        )  # fmt: skip
        changed = [
            name for name, mark in start["fingerprints"].items() if name != self.agent and mark != self.run.fingerprint(name)
        ]
        if changed:
            raise RunError(f"the weights of {', '.join(changed)} did not arrive as they were; nothing was swapped")
        record["fingerprints"] = dict(start["fingerprints"])
        start["swap"] = records.plain(record)
        records.append_record(self.folder / START_LINE, start)
        write_team(here, position, start["files"])
        for name in ("newcomer", "both"):
            shutil.rmtree(self.folder / name, ignore_errors=True)


EVIDENCE, DIVERGENCES = "episodes/stage0.parquet", "divergences/stage0.parquet"
"""The probe episodes of a distillation, and the divergence of every state at every look."""
