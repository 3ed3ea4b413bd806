"""Where updating one agent at a time wins, and where it makes no difference: small games, every return exact.

    python benchmarks/claims/conflict.py [--quick] [--seed N] [--seeds N] [--keep DIR]

Two or three tables speak once, at the same time, without hearing each other, and all are paid by one table of payoffs. They
are trained in stage mode by three arms at equal generated tokens: one agent after another behind the gate (sequential agent
tuning), all on the same episodes behind the same gate (joint), and all on the same episodes without a gate. The return of a
team is enumerated, never sampled.

- conflict: payoffs 0, 2, 2, -1 for 00, 01, 10, 11, both agents at .3 for symbol 1 (ALGORITHMS 2.14): each should say 1 only
  if the other does not. Teams whose agents are alike are worth at most .8.
- conflict, no noise: the same with episodes on a grid, in which every pair of messages is as frequent as it is probable.
- additive: random payoffs that are a sum of each agent's own part, so that no agent's best move depends on another's.
- random: random payoffs of whole joint messages.

The conflict game is also played with fewer and with more episodes an update. The last line is JSON; the exit code is 0 only
if all bars hold. What was expected, and what came out, is in docs/log.md.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from claim import KEEPS_RESULTS, Results, arguments, arm_of, guarded, last_line, results, shown

from baton.algorithms import sat
from baton.algorithms.acceptance import Trainee
from baton.algorithms.options import GateOptions, ObjectiveOptions, PenaltyOptions, SatOptions
from baton.algorithms.state import AgentState, Evidence, Pair, Position, StageReport, UpdateReport, World
from baton.core.keyed import Key, key, uniform
from baton.engines.engine import Completion, Request
from baton.engines.table import TableCodec, TableLearner, TableSampler, row_name
from baton.errors import MissingError
from baton.protocols import Debate
from baton.rollout import Seat, Table
from baton.team import Member, Team
from baton.types import AgentId, Outcome, Scored, Snapshot, Task, Turn, Weights, verdict_word

EARLY, STAGES, LATER = 7, 14, 28
"""Looks at the return, by the nominal tokens of so many sequential stages; the second is the budget (ALGORITHMS 2.14)."""

RADIUS = 0.05
"""Nats at the gate's quantile and on the mean over messages: a message has one state, so both bound the same number."""
LR = 0.5
"""AdamW on logits. A full step moves each logit by .5 and leaves the radius; half of it stays inside."""

EPISODES, PROBES, PROMPTS = 128, 16, 4096
LEVELS = 32
"""Levels of each agent's draws where there is no noise: a batch is every pair of levels once."""

SEQUENTIAL, JOINT, UNGATED = "sequential", "joint", "joint, no gate"
ARMS: Mapping[str, tuple[Any, float]] = {SEQUENTIAL: ("sat", RADIUS), JOINT: ("joint", RADIUS), UNGATED: ("joint", 1e9)}
"""Arm -> (schedule, radius in nats)."""

ALIKE = 0.8
"""The most that two agents of one law are worth in the conflict game: 4p - 5p^2 at p = .4."""
REACHED, QUICKLY = 1.9, 1.2
"""Least return of the sequential arm without noise. The best is 2; a law beyond 1 - 1/(2 levels) shows a grid one symbol."""
SAME = 0.05
"""Share of the range of payoffs below which a difference is none."""


# ---- games -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Game:
    """All agents speak one symbol at once; `pays` is the team's reward for the joint message, in the order of the seats."""

    symbols: str
    pays: Mapping[str, float]
    start: tuple[float, ...]
    """The law that each agent begins with."""

    @property
    def agents(self) -> tuple[AgentId, ...]:
        return tuple("abc"[: len(next(iter(self.pays)))])

    def worth(self, laws: Sequence[Sequence[float]]) -> float:
        """The expected reward of a team with these laws, every joint message enumerated."""
        places = [{s: law[i] for i, s in enumerate(self.symbols)} for law in laws]
        return math.fsum(
            math.prod(law[s] for law, s in zip(places, said, strict=True)) * pay for said, pay in self.pays.items()
        )


def conflict(seed: int) -> Game:
    """The game of ALGORITHMS 2.14; what the seed changes is the run."""
    return Game(symbols="01", pays={"00": 0.0, "01": 2.0, "10": 2.0, "11": -1.0}, start=(0.7, 0.3))


def additive(seed: int) -> Game:
    """Each agent's symbol is worth a uniform number, and the team is paid the sum."""
    return _scaled(seed, lambda said: math.fsum(uniform(key(seed, "additive", i, s)) for i, s in enumerate(said)))


def whole(seed: int) -> Game:
    """Each joint message is worth a uniform number."""
    return _scaled(seed, lambda said: uniform(key(seed, "random", said)))


def _scaled(seed: int, pay: Callable[[str], float]) -> Game:
    """Two agents where the seed is even, three where it is odd; three symbols; payoffs shifted and scaled to [0, 1]."""
    drawn = {s: pay(s) for s in map("".join, itertools.product("012", repeat=2 + seed % 2))}
    low, high = min(drawn.values()), max(drawn.values())
    return Game(symbols="012", pays={s: (v - low) / (high - low) for s, v in drawn.items()}, start=(1 / 3,) * 3)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A family of games and how it is played: episodes an update, or levels of a grid; stages; who takes part."""

    game: Callable[[int], Game]
    stages: int
    episodes: int = EPISODES
    levels: int | None = None
    arms: tuple[str, ...] = tuple(ARMS)

    @property
    def settings(self) -> dict[str, Any]:
        return {"stages": self.stages, "episodes": self.episodes, "levels": self.levels, "arms": self.arms}


EXACT, CONFLICT, ADDITIVE, RANDOM = "conflict, no noise", "conflict", "additive", "random"
CASES: Mapping[str, Case] = {
    EXACT: Case(game=conflict, stages=STAGES, levels=LEVELS),
    CONFLICT: Case(game=conflict, stages=LATER),
    "conflict, 32 episodes": Case(game=conflict, stages=STAGES, episodes=32, arms=(SEQUENTIAL, JOINT)),
    "conflict, 512 episodes": Case(game=conflict, stages=STAGES, episodes=512, arms=(SEQUENTIAL, JOINT)),
    ADDITIVE: Case(game=additive, stages=STAGES),
    RANDOM: Case(game=whole, stages=LATER),
}
QUICK: Mapping[str, Case] = {
    EXACT: Case(game=conflict, stages=STAGES, levels=8),
    CONFLICT: Case(game=conflict, stages=EARLY, episodes=32),
    ADDITIVE: Case(game=additive, stages=EARLY, episodes=32),
    RANDOM: Case(game=whole, stages=EARLY, episodes=32),
}


# ---- a game as a world of stage mode -----------------------------------------------------------------------------------


class NormalForm(Debate):
    """A vote, in which all speak once and nobody hears anybody, but the team's answer is all that they said."""

    def answer(self, turns: Sequence[Turn], normalise: Callable[[str], str | None], tie: Key) -> str:
        return "".join(turn.text for turn in turns)


class Watched(TableSampler):
    """Counts the tokens that it generates. With `levels`, its draws lie on a grid instead of being random.

    Message e of a wave is then the inverse CDF of agent i at the middle of level floor(e / levels^i) mod levels: over
    levels^n episodes every combination of levels comes up once, so the frequencies of joint messages are products of the
    agents' own, each within 1/(2 levels) of its probability.
    """

    def __init__(self, codecs: Mapping[AgentId, TableCodec], levels: int | None) -> None:
        super().__init__(codecs)
        self.seats = list(codecs)
        self.levels = levels
        self.tokens = 0

    def submit(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        return self.watched(list(requests), super().submit(requests))

    async def watched(self, requests: list[Request], drawn: AsyncIterator[Completion]) -> AsyncIterator[Completion]:
        said = [completion async for completion in drawn]
        if self.levels is not None:
            said = self.on_grid(requests[0], said, self.levels)
        self.tokens += sum(len(completion.ids) for completion in said)
        for completion in said:
            yield completion

    def on_grid(self, asked: Request, said: Sequence[Completion], levels: int) -> list[Completion]:
        rows = self._slots[asked.agent, asked.slot].rows
        log_p = torch.log_softmax(rows[row_name(asked.prompt_ids)] / asked.temperature, dim=0)
        level = torch.arange(len(said)) // levels ** self.seats.index(asked.agent) % levels
        at = torch.bucketize((level.double() + 0.5) / levels, log_p.exp().cumsum(0)).clamp(max=len(log_p) - 1).tolist()
        return [replace(c, ids=(i,), logprobs=(min(float(log_p[i]), 0.0),)) for c, i in zip(said, at, strict=True)]


class Unwritten:
    """A journal that keeps nothing but the version ids that it gave."""

    def __init__(self) -> None:
        self.given: Counter[AgentId] = Counter()

    def begin(self, agent: AgentId, stage: int) -> int:
        self.given[agent] += 1
        return self.given[agent]

    def commit(
        self, report: UpdateReport, evidence: Evidence, position: Position, promoted: tuple[Snapshot, Weights] | None
    ) -> None:
        pass

    def stage(self, report: StageReport, pairs: Sequence[Pair]) -> None:
        pass

    def weights(self, agent: AgentId, version: int) -> Weights:
        raise MissingError(f"{agent}@{version}: nothing is kept here")

    def rest(self) -> None:
        pass

    def tick(self, what: str, total: int) -> None:
        pass


async def train(case: Case, arm: str, seed: int) -> dict[str, Any]:
    """Train a team until it has generated the nominal tokens of the case's stages (without noise: for so many stages).

    Returns the tokens generated and the exact return, at the start and after each stage, and the verdicts.
    """
    game, episodes, levels = case.game(seed), case.episodes, case.levels
    schedule, radius = ARMS[arm]
    agents, n = game.agents, len(game.agents)
    codec = TableCodec(tuple(game.symbols))
    sampler = Watched(dict.fromkeys(agents, codec), levels)
    tasks = [Task(id=f"round {i}", env="game", prompt=f"round {i}", answer="", views=("play",) * n) for i in range(PROMPTS)]
    protocol = NormalForm(agents, rounds=1)
    state = codec.encode(protocol.messages(tasks[0], (), 0, ""))
    learners = {agent: TableLearner(agent, codec.vocabulary) for agent in agents}
    for agent, learner in learners.items():
        learner.set(state, [math.log(p) for p in game.start])
        await sampler.publish(agent, "promoted", learner.weights(), 0)

    def grade(answers: Sequence[tuple[Task, str]]) -> list[Outcome]:
        return [Scored(reward=game.pays[said]) for _, said in answers]

    def worth() -> float:
        rows = [learner.weights().tensors[row_name(state)] for learner in learners.values()]
        return game.worth([torch.softmax(row.double(), dim=0).tolist() for row in rows])

    if levels is not None:
        # A batch is the grid, whoever it is for.
        episodes = levels**n if schedule == "sat" else levels**n // n
    world = World(
        seed=seed,
        options=SatOptions(
            name=schedule,
            stages=PROMPTS,
            episodes=episodes,
            group=1,
            inner_steps=1,
            min_informative=1,
            objective=ObjectiveOptions(baseline="batch_mean"),
            penalty=PenaltyOptions(start=0.0),
        ),
        gate=GateOptions(probe_prompts=PROBES),
        group=1,
        table=Table(
            seats=tuple(Seat(agent=a, system="", max_new_tokens=1, temperature=1.0, codec=codec) for a in agents),
            protocol=protocol,
            sampler=sampler,
            grade=grade,
            normalise=str,
        ),
        sampler=sampler,
        trainees={
            a: Trainee(agent=a, learner=learner, lr=LR, radius_token=radius, radius_message_mean=radius, is_exact=True)
            for a, learner in learners.items()
        },
        train=tasks[PROBES:],
        probe=tasks[:PROBES],
        reward_range=(min(game.pays.values()), max(game.pays.values())),
        journal=Unwritten(),
    )
    start = Position(
        team=Team(members=tuple(Member(agent=a, model=f"table:{game.symbols}") for a in agents)),
        agents={a: AgentState(beta=0.0, lr=LR) for a in agents},
    )
    tokens, returns, words = [0], [worth()], Counter[str]()
    async for position, report in sat.train(world, start):
        words[verdict_word(report.verdict)] += 1
        if position.done % n == 0:
            tokens.append(sampler.tokens)
            returns.append(worth())
            if len(tokens) > case.stages if levels is not None else sampler.tokens >= budget(case, n, case.stages):
                break
    return {"agents": n, "tokens": tokens, "returns": returns, "verdicts": dict(words)}


def budget(case: Case, agents: int, stages: int) -> int:
    """Tokens of so many sequential stages in which nothing is drawn again."""
    return stages * agents * (case.episodes + PROBES) * agents


# ---- what is asked of a result -----------------------------------------------------------------------------------------


def within(case: Case, result: Mapping[str, Any], stages: int) -> list[float]:
    """The returns up to a look: at the start and after each stage that was complete within the look's tokens (without noise:
    after so many stages). A run that ended before that is held at its end."""
    if case.levels is not None:
        return result["returns"][: stages + 1]
    allowed = budget(case, result["agents"], stages)
    return [worth for worth, tokens in zip(result["returns"], result["tokens"], strict=True) if tokens <= allowed]


def reached(case: Case, stages: int) -> Callable[[Any], float]:
    """The return at a look."""
    return lambda result: within(case, result, stages)[-1]


def spent(case: Case, stages: int) -> Callable[[Any], float]:
    """Tokens generated at a look."""
    return lambda result: result["tokens"][len(within(case, result, stages)) - 1]


def harmful(case: Case, stages: int) -> Callable[[Any], float]:
    """Share of the stages up to a look that lowered the exact return by more than rounding."""

    def share(result: Any) -> float:
        steps = list(itertools.pairwise(within(case, result, stages)))
        return sum(after < before - 1e-9 for before, after in steps) / len(steps)

    return share


def looks(case: Case) -> list[int]:
    return [stages for stages in (EARLY, STAGES, LATER) if stages <= case.stages]


def told(name: str, case: Case, kept: Results, seeds: Sequence[int]) -> dict[str, Any]:
    """Print a case and return its figures: returns, harmful stages and contrasts with the sequential arm, with intervals."""
    print(f"\n{name}: {len(seeds)} seeds, {case.episodes} episodes an update")
    figures: dict[str, Any] = {"seeds": len(seeds), "episodes": case.episodes, "looks": {}}
    for stages in looks(case):
        row: dict[str, Any] = {}
        for arm in case.arms:
            place = arm_of(name, arm)
            row[arm] = {
                "return": kept.mean(place, seeds, reached(case, stages)),
                "harmful": kept.mean(place, seeds, harmful(case, stages)),
                "tokens": kept.mean(place, seeds, spent(case, stages)),
            }
            words = (
                f"  {stages:2} stages  {arm:16} {shown(row[arm]['return'])}   harmful stages {shown(row[arm]['harmful'])}"
            )
            if arm != SEQUENTIAL:
                row[arm]["sequential minus this"] = kept.contrast(
                    arm_of(name, SEQUENTIAL), place, seeds, reached(case, stages)
                )
                row[arm]["sequential minus this, harmful"] = kept.contrast(
                    arm_of(name, SEQUENTIAL), place, seeds, harmful(case, stages)
                )
                words += f"   sequential minus this {shown(row[arm]['sequential minus this'], sign='+')}"
            print(words)
        figures["looks"][str(stages)] = row
    return figures


def told_exactly(name: str, case: Case, kept: Results, seed: int) -> dict[str, Any]:
    """The same where nothing is drawn: one run an arm, no interval."""
    print(f"\n{name}: nothing is drawn, so one run an arm; {case.levels} levels")
    figures: dict[str, Any] = {}
    for arm in case.arms:
        result = kept.found[arm_of(name, arm), seed]
        figures[arm] = {"return": reached(case, case.stages)(result), "harmful": harmful(case, case.stages)(result)}
        curve = " ".join(f"{worth:.2f}" for worth in result["returns"])
        print(f"  {arm:16} {figures[arm]['return']:.3f}   harmful stages {figures[arm]['harmful']:.2f}   {curve}")
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(
        __doc__,
        seeds=16,
        fewest=2,
        quick="three seeds at the most, short and with few episodes: shows that it runs, and the cap",
        keep=KEEPS_RESULTS,
    ).parse_args(argv)
    cases = QUICK if args.quick else CASES
    seeds = range(args.seed, args.seed + (min(args.seeds, 3) if args.quick else args.seeds))
    settings = {
        "claim": "conflict",
        "cases": {name: case.settings for name, case in cases.items()},
        "arms": ARMS,
        "lr": LR,
        "probes": PROBES,
    }
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    with results(args.keep, __file__, settings) as kept:
        for name, case in cases.items():
            for seed in seeds[:1] if case.levels is not None else seeds:
                for arm in case.arms:
                    kept.of(arm_of(name, arm), seed, partial(run, case, arm, seed))
            if case.levels is not None:
                figures[name] = told_exactly(name, case, kept, args.seed)
            else:
                figures[name] = told(name, case, kept, seeds)
    best, least = figures[EXACT][SEQUENTIAL]["return"], QUICKLY if args.quick else REACHED
    alike = max(figures[EXACT][arm]["return"] for arm in (JOINT, UNGATED))
    bars: dict[str, tuple[Any, Any, bool]] = {
        "no noise: return of the sequential arm, at least": (best, least, best >= least),
        "no noise: return of a joint arm, at most": (alike, ALIKE, alike <= ALIKE + 1e-9),
    }
    if not args.quick:
        primary = figures[CONFLICT]["looks"][str(STAGES)][JOINT]["sequential minus this"]
        same = figures[ADDITIVE]["looks"][str(STAGES)][JOINT]["sequential minus this"]
        apart = max(abs(same.low), abs(same.high))
        bars |= {
            "conflict: sequential minus joint, lower end above": (primary.low, 0.0, primary.low > 0.0),
            "additive: sequential minus joint, farther end at most": (apart, SAME, apart <= SAME),
        }
    return last_line("conflict", quick=args.quick, figures=figures, bars=bars)


def run(case: Case, arm: str, seed: int) -> dict[str, Any]:
    return asyncio.run(train(case, arm, seed))


if __name__ == "__main__":
    sys.exit(guarded(main))
