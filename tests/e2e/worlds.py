"""Small worlds that the end-to-end tests share: teams of tables on games whose true accuracy is enumerated.

`world` is stage mode in this process, without a run directory: a sampler, learners, a journal that only remembers.
`config` is the same as a config for `baton.run.train`. `kill` runs a training in a process of its own that sends itself
SIGKILL at a named point of the durable sequence.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import itertools
import json
import math
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from baton import assemble, config, run
from baton.algorithms import sat
from baton.algorithms.acceptance import Trainee
from baton.algorithms.options import resolve_group
from baton.algorithms.state import AgentState, Evidence, Pair, Position, StageReport, UpdateReport, World
from baton.assemble import Plan
from baton.config import Config
from baton.core.batching import token_batch, trajectories
from baton.engines.engine import Completion, Learner, Request, Sampler
from baton.rollout import Grader, Table
from baton.team import Member, Team
from baton.types import Episode, Scored, Snapshot, Task, Turn, Weights

# ---- configs ---------------------------------------------------------------------------------------------------


def tree(agents: Sequence[str] = ("a", "b"), *, bits: int = 1, lr: float = 0.2) -> dict[str, Any]:
    """Tables that play parity, one symbol a message."""
    return {
        "seed": 1,
        "env": {"name": "parity", "bits": bits, "prompts": 400},
        "protocol": {"name": "chain", "sees": "previous"},
        "agents": [{"name": n, "model": "table:01", "system": "", "max_new_tokens": 1, "lr": lr} for n in agents],
        "algorithm": {"stages": 3, "episodes": 32, "group": 4, "min_informative": 2},
        "gate": {"preset": "demo", "probe_prompts": 16},
        "engine": {"name": "table"},
    }


def parity(*overrides: str, agents: Sequence[str] = ("a", "b"), bits: int = 1, lr: float = 0.2) -> Config:
    """The config of such a team, with `a.b=c` overrides."""
    return config.parse(tree(agents, bits=bits, lr=lr), overrides)


def relay(*overrides: str) -> Config:
    """Two tiny models that hand a symbol on: the torch engine at its smallest.

    The first may move as far as it likes (accepted whole, so it has moments), the second is shrunk.
    """
    agents = [
        {"name": n, "model": "tiny:64k", "system": "", "max_new_tokens": 1, "lr": 3e-3, "radius": radius}
        for n, radius in (("first", {"token": 50.0, "message_mean": 50.0}), ("second", {"token": 0.5, "message_mean": 0.06}))
    ]
    return config.parse(
        {
            "seed": 20,
            "env": {"name": "relay", "symbols": 4, "prompts": 200},
            "protocol": {"name": "chain", "sees": "previous"},
            "agents": agents,
            "algorithm": {"stages": 3, "episodes": 32, "group": 8, "min_informative": 1},
            "gate": {"probe_prompts": 8},
            "engine": {"threads": 1},
        },
        overrides,
    )


def adapters(*overrides: str) -> Config:
    """The same two seats as adapters of different rank on one base."""
    parts = [f"agents.{i}.adapter={{rank={rank}, alpha=8}}" for i, rank in enumerate((4, 2))]
    return relay(*parts, "agents.0.lr=0.03", "agents.1.lr=0.03", *overrides)


# ---- stage mode in this process --------------------------------------------------------------------------------


@dataclass
class Memory:
    """A journal that remembers instead of writing."""

    versions: dict[str, int] = field(default_factory=dict)
    reports: list[UpdateReport] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    promoted: list[tuple[Snapshot, Weights] | None] = field(default_factory=list)
    stages: list[StageReport] = field(default_factory=list)
    pairs: list[Sequence[Pair]] = field(default_factory=list)
    start: dict[str, Weights] = field(default_factory=dict)

    def begin(self, agent: str, stage: int) -> int:
        self.versions[agent] = self.versions.get(agent, 0) + 1
        return self.versions[agent]

    def commit(
        self, report: UpdateReport, evidence: Evidence, position: Position, promoted: tuple[Snapshot, Weights] | None
    ) -> None:
        self.reports.append(report)
        self.evidence.append(evidence)
        self.promoted.append(promoted)

    def stage(self, report: StageReport, pairs: Sequence[Pair]) -> None:
        self.stages.append(report)
        self.pairs.append(pairs)

    def weights(self, agent: str, version: int) -> Weights:
        if version == 0:
            return self.start[agent]
        done = zip(self.reports, self.promoted, strict=True)
        return next(p[1] for r, p in done if p is not None and (r.agent, r.candidate_version) == (agent, version))

    def rest(self) -> None:
        """Tables do not."""

    def tick(self, what: str, total: int) -> None:
        """Nobody watches."""


class Wrapped:
    """A sampler or a learner that behaves like the one inside, save for what a test overrides."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass
class Stage:
    """A world with what made it."""

    plan: Plan
    world: World
    position: Position
    journal: Memory

    def train(self, updates: int | None = None) -> list[UpdateReport]:
        """Go on for so many agent updates (None: to the end of the plan)."""

        async def go() -> list[UpdateReport]:
            done: list[UpdateReport] = []
            if updates == 0:
                return done
            async for position, report in sat.train(self.world, self.position):
                self.position = position
                done.append(report)
                if len(done) == updates:
                    break
            return done

        return asyncio.run(go())

    def learner(self, agent: str) -> Learner:
        return self.world.trainees[agent].learner

    def accuracy(self) -> float:
        """The true accuracy of the promoted tables, by enumeration."""
        weights = {a: t.learner.weights() for a, t in self.world.trainees.items()}
        return accuracy(self.world.table, self.world.train, weights)

    def play(self, count: int = 8, **more: Any) -> list[Episode]:
        """Fresh episodes of the team as it is, on the first `count` train prompts, two siblings each."""
        from baton.rollout import Play

        plays = [Play(task=t, sibling=s) for t in self.world.train[:count] for s in range(2)]
        return asyncio.run(self.world.table.play(plays, address=("test",), versions=self.position.team.versions, **more))


def world(
    settings: Config,
    *,
    wrap_learner: Callable[[str, Learner], Any] = lambda name, inner: inner,
    wrap_sampler: Callable[[Sampler], Any] = lambda inner: inner,
    tasks: Sequence[Task] | None = None,
    grade: Grader | None = None,
) -> Stage:
    """Stage mode at its start, with hand-made tasks, graders, samplers and learners where a test brings its own."""
    plan = assemble.prepare(settings, root=Path.cwd())
    names = [a.name for a in settings.agents if a.trainable]
    crew = assemble.crew(settings, {n: plan.bases[n] for n in plan.local}, learners=names)
    sampler: Sampler = wrap_sampler(crew.sampler)
    journal = Memory()
    trainees: dict[str, Trainee] = {}
    for agent in settings.agents:
        if not agent.trainable:
            continue
        radius = settings.radius(agent)
        trainees[agent.name] = Trainee(
            agent=agent.name,
            learner=wrap_learner(agent.name, crew.learners[agent.name]),
            lr=plan.lr(agent),
            radius_token=radius.token,
            radius_message_mean=radius.message_mean,
            is_exact=crew.is_exact,
        )

    async def publish() -> None:
        for name in names:
            for slot in ("promoted", "start"):
                journal.start[name] = crew.learners[name].weights()
                await sampler.publish(name, slot, journal.start[name], 0)

    asyncio.run(publish())
    table: Table = assemble.table(plan, sampler, None)
    own = World(
        seed=settings.seed,
        options=settings.algorithm,
        gate=settings.gate,
        group=resolve_group(settings.algorithm, 0.5),
        table=table if grade is None else replace(table, grade=grade),
        sampler=sampler,
        trainees=trainees,
        train=plan.splits.train if tasks is None else tasks,
        probe=plan.splits.probe if tasks is None else tasks,
        reward_range=plan.env.reward_range,
        journal=journal,
        certify=plan.splits.certify if tasks is None else tasks,
        certificate=settings.certificate,
    )
    start = Position(
        team=Team(members=tuple(Member(agent=a.name, model=a.model) for a in settings.agents)),
        agents={n: AgentState(beta=settings.algorithm.penalty.start, lr=t.lr) for n, t in trainees.items()},
    )
    return Stage(plan, own, start, journal)


def handed_on(task: Task, turns: Sequence[Turn], names: Sequence[str]) -> int | None:
    """A user's rule for routers: whoever spoke hands on to the next seat, or goes on itself where its message is odd."""
    if not turns:
        return len(task.id) % len(names)
    return None if len(turns) == 3 else (turns[-1].seat + 1 - ord(turns[-1].text[-1:] or "0") % 2) % len(names)


def specialists(count: int = 64) -> tuple[list[Task], Grader]:
    """A game for a router of three: seat 0 reads which of the other two knows the bit that is asked for."""
    tasks: list[Task] = []
    for i in range(count):
        who, bit = i % 2, i // 2 % 2
        told = [f"bit {bit}" if seat == who else "bit ?" for seat in range(2)]
        task = Task(id=f"s{i}", env="specialists", prompt=f"round {i}", answer=str(bit), views=(f"ask {'xy'[who]}", *told))
        tasks.append(task)
    return tasks, lookup()[1]


def router(*overrides: str) -> Config:
    """Tables for that game: the router can say @x or @y, the specialists 0 or 1."""
    own = tree("rxy")
    own["protocol"] = {"name": "router", "max_turns": 1}
    own["agents"][0] |= {"model": "table:@xy", "max_new_tokens": 2}
    return config.parse(own, overrides)


def lookup(count: int = 64) -> tuple[list[Task], Grader]:
    """A game for voters: each seat reads the same two-bit number and should say its last bit."""
    tasks = [
        Task(id=f"l{i}", env="lookup", prompt=f"round {i}", views=(f"which: {i % 4}",) * 9, answer=str(i % 2))
        for i in range(count)
    ]

    def grade(answers: Sequence[tuple[Task, str]]) -> list[Scored]:
        return [Scored(reward=float(said.strip() == task.answer)) for task, said in answers]

    return tasks, grade


def accuracy(table: Table, tasks: Sequence[Task], weights: Mapping[str, Weights]) -> float:
    """Probability of a right answer over the distinct views of these tasks, every message enumerated.

    For tables that say one symbol a message. Laws are softmaxes by hand over rows found by spelling their names.
    """
    distinct = list({task.views: task for task in tasks}.values())

    def law(seat: int, task: Task, turns: Sequence[Turn]) -> list[float]:
        place = table.seats[seat]
        ids = place.codec.encode(table.protocol.messages(task, turns, seat, place.system))
        row = weights[place.agent].tensors.get("row." + "".join(f"{i:04x}" for i in ids))
        logits = [0.0, 0.0] if row is None else [float(x) / place.temperature for x in row]
        total = math.fsum(math.exp(x - max(logits)) for x in logits)
        return [math.exp(x - max(logits)) / total for x in logits]

    def value(task: Task, turns: tuple[Turn, ...]) -> float:
        due = table.protocol.due(task, turns, 0)
        if not due:
            said = table.protocol.answer(turns, table.normalise, hashlib.sha256(b"tie").digest()[:20])  # type: ignore[arg-type]
            outcome = table.grade([(task, said)])[0]
            assert isinstance(outcome, Scored)
            return outcome.reward
        laws = [law(seat, task, turns) for seat in due]
        total = 0.0
        for said in itertools.product(range(2), repeat=len(due)):
            p = math.prod(one[i] for one, i in zip(laws, said, strict=True))
            spoken = tuple(
                Turn(
                    kind="action",
                    agent=table.seats[seat].agent,
                    seat=seat,
                    text=str(i),
                    prompt_ids=(0,),
                    ids=(i,),
                    logprobs=(0.0,),
                    versions=(0,),
                )
                for seat, i in zip(due, said, strict=True)
            )
            total += p * value(task, (*turns, *spoken))
        return total

    return math.fsum(value(task, ()) for task in distinct) / len(distinct)


def own_batch(episodes: Sequence[Episode], agent: str) -> Any:
    """An agent's token batch of these episodes, at temperature 1."""
    return token_batch([t for e in episodes for t in trajectories(e, agent)], temperature=1.0)


def same(one: Snapshot, other: Snapshot) -> bool:
    """Bit for bit: masters, moments, steps."""

    def equal(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
        return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)

    return one.steps == other.steps and equal(one.weights, other.weights) and equal(one.moments, other.moments)


class Shuffled(Wrapped):
    """A sampler whose completions arrive in another order."""

    def submit(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        async def go() -> AsyncIterator[Completion]:
            said = [c async for c in self.inner.submit(requests)]
            for completion in sorted(said, key=lambda c: hashlib.sha256(c.id.encode()).digest()):
                yield completion

        return go()


# ---- run directories -------------------------------------------------------------------------------------------


def final(path: Path) -> dict[str, Any]:
    """All that a run ends with, save version numbers (a kill uses one up): files of the team bit for bit, what adapts,
    and what each update decided."""
    opened = run.Run(path)
    files = opened.files
    team = json.loads((path / "team.json").read_text())
    assert {a["name"]: a["weights"] for a in team["agents"]} == {n: f["weights"] for n, f in files.items()}
    return {
        "weights": {
            n: {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted((path / f["weights"]).iterdir())}
            for n, f in files.items()
        },
        "training": {
            n: f["training"] and hashlib.sha256((path / f["training"]).read_bytes()).hexdigest() for n, f in files.items()
        },
        "steps": {n: f["steps"] for n, f in files.items()},
        "agents": opened.position.agents,
        "updates": [(u["stage"], u["agent"], u["word"], u["looks"], u["episodes"]) for u in opened.updates],
        "stages": [
            (s["stage"], [{k: v for k, v in e.items() if k != "from_version"} for e in s["entries"]])
            for s in opened.records("stage")
        ],
    }


def check_ledger(path: Path) -> None:
    """Version ids are never used twice, and what each agent serves is what its last accepted record names."""
    opened = run.Run(path)
    begun: dict[str, list[int]] = {}
    for line in opened.records("begin"):
        begun.setdefault(line["agent"], []).append(line["version"])
    assert all(v == sorted(set(v)) for v in begun.values()), begun
    team = opened.position.team
    for agent, files in opened.files.items():
        accepted = [u for u in opened.updates if u["agent"] == agent and u["to_version"] is not None]
        version = accepted[-1]["to_version"] if accepted else 0
        assert team.member(agent).version == version
        assert files["weights"] == f"state/{agent}/v{version:05d}"
        held = assemble.weights_of(_tensors(path / files["weights"]))
        assert not accepted or held.fingerprint == accepted[-1]["fingerprint"]


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = list(folder.glob("*.safetensors"))
    assert len(files) == 1, f"{folder} holds {len(files)} weight files"
    return load_file(files[0])


# ---- sudden death ----------------------------------------------------------------------------------------------

Pick = Callable[..., bool]


def _any(*_: Any, **__: Any) -> bool:
    return True


def _is_kind(kind: str) -> Pick:
    return lambda path, record: record["kind"] == kind


def _is_candidate(path: Path, *_: Any) -> bool:
    return path.name != "v00000"


def _into_candidate(_self: Any, agent: str, slot: str, *_: Any) -> bool:
    return slot == "candidate"


POINTS: Mapping[str, tuple[str, str, Pick]] = {
    "amid the files of the start": ("baton.records:write_folder", "amid", _any),
    "before the start record": ("baton.records:append_record", "before", _is_kind("start")),
    "amid the start record": ("baton.records:append_record", "amid", _is_kind("start")),
    "after the start record": ("baton.records:append_record", "after", _is_kind("start")),
    "after the version id": ("baton.records:append_record", "after", _is_kind("begin")),
    "before the candidate is published": ("SAMPLER.publish", "before", _into_candidate),
    "after the candidate is published": ("SAMPLER.publish", "after", _into_candidate),
    "after the proof": ("baton.algorithms.sat:publish_with_proof", "after", _any),
    "before the weights": ("baton.records:write_folder", "before", _is_candidate),
    "amid the weights": ("baton.records:write_folder", "amid", _is_candidate),
    "after the weights": ("baton.records:write_folder", "after", _is_candidate),
    "before the moments": ("baton.records:save_training", "before", _any),
    "after the moments": ("baton.records:save_training", "after", _any),
    "before the record": ("baton.records:append_record", "before", _is_kind("update")),
    "amid the record": ("baton.records:append_record", "amid", _is_kind("update")),
    "after the record": ("baton.records:append_record", "after", _is_kind("update")),
    "while pruning": ("baton.journal:_remove", "before", _any),
    "before the swap": ("SAMPLER.swap", "before", _any),
    "after the swap": ("SAMPLER.swap", "after", _any),
    "after the stage line": ("baton.records:append_record", "after", _is_kind("stage")),
}
"""Where a process can die: (function, before | amid | after its call, which calls)."""


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arm(point: str, nth: int, engine: str) -> None:
    """Send this process SIGKILL at the nth call that the point picks."""
    target, when, pick = POINTS[point]
    if target.startswith("SAMPLER"):
        module = importlib.import_module(f"baton.engines.{engine}")
        owner: Any = module.TableSampler if engine == "table" else module.LocalSampler
        name = target.partition(".")[2]
    else:
        home, _, name = target.partition(":")
        owner = importlib.import_module(home)
    original = getattr(owner, name)
    left = [nth]

    def is_now(*args: Any, **kwargs: Any) -> bool:
        left[0] -= pick(*args, **kwargs)
        return left[0] == 0 and pick(*args, **kwargs)

    def hooked(*args: Any, **kwargs: Any) -> Any:
        now = is_now(*args, **kwargs)
        if now and when == "before":
            _die()
        if now and when == "amid":
            _half(name, original, *args)
        result = original(*args, **kwargs)
        if now and when == "after":
            _die()
        return result

    async def hooked_async(*args: Any, **kwargs: Any) -> Any:
        now = is_now(*args, **kwargs)
        if now and when == "before":
            _die()
        result = await original(*args, **kwargs)
        if now and when == "after":
            _die()
        return result

    setattr(owner, name, hooked_async if asyncio.iscoroutinefunction(original) else hooked)


def _half(name: str, original: Any, path: Path, what: Any) -> None:
    """Die with half of it on disk: a torn line, or a folder whose files are there and whose name is not."""
    if name == "append_record":
        line = json.dumps({"schema": 1, **what})
        with path.open("a") as handle:
            handle.write(line[: len(line) // 2])
            handle.flush()
            os.fsync(handle.fileno())
        _die()

    def write(partial: Path) -> None:
        what(partial)
        _die()

    original(path, write)


def _job(settings: str, path: str, resume: bool, point: str, nth: int, cache: str) -> None:
    os.environ["BATON_CACHE"] = cache
    torch.set_num_threads(1)
    import tomllib

    parsed = config.parse(tomllib.loads(settings))
    if point:
        _arm(point, nth, parsed.engine.name)
    run.train(parsed, run=path, resume=resume)


def in_its_own_process(function: Callable[..., None], *arguments: Any, limit: float = 120.0) -> int:
    """Exit code of the function in a fresh process, forked from a server that has imported baton and done nothing else
    (an interpreter of its own costs seconds, and a fork of pytest would inherit what the tests did)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["baton.run", "transformers.models.qwen3.modeling_qwen3", "peft"])
    process = context.Process(target=function, args=arguments)
    process.start()
    process.join(limit)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"{function.__name__} was still running after {limit} s")
    return process.exitcode


def kill(settings: Config, path: Path, point: str, nth: int = 1, *, resume: bool = False) -> None:
    """Train until the process dies at a point."""
    cache = os.environ.get("BATON_CACHE", "")
    code = in_its_own_process(_job, settings.to_toml(), str(path), resume, point, nth, cache)
    assert code == -signal.SIGKILL, f"'{point}', call {nth}, was never reached (exit code {code})"


def go_on(settings: Config, path: Path) -> None:
    """Resume to the end, in another process."""
    cache = os.environ.get("BATON_CACHE", "")
    assert in_its_own_process(_job, settings.to_toml(), str(path), True, "", 0, cache) == 0
