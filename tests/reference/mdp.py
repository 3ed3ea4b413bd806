"""Small team games solved by enumeration: loops, float64, nothing shared with the code under test.

A game is a directed acyclic graph of full states (transcript and hidden environment state). In each state
some agents are active at once, and each picks one of `n_actions` messages; nobody is active at the end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Law = tuple[float, ...]
Team = Mapping[tuple[int, int], Law]
"""The law of (agent, state)."""
Joint = tuple[int, ...]
"""One action per active agent, in the order of `active`."""


@dataclass(frozen=True)
class Game:
    """States are numbered so that every step goes to a higher number. `active[s]` empty: the episode is
    over."""

    n_agents: int
    n_actions: int
    start: tuple[tuple[float, int], ...]
    active: tuple[tuple[int, ...], ...]
    steps: tuple[Mapping[Joint, tuple[tuple[float, int], ...]], ...]
    rewards: tuple[Mapping[Joint, float], ...]

    def joints(self, state: int) -> list[Joint]:
        return list(itertools.product(range(self.n_actions), repeat=len(self.active[state])))

    def states_of(self, agent: int) -> list[int]:
        return [s for s, active in enumerate(self.active) if agent in active]


def joint_law(game: Game, team: Team, state: int) -> dict[Joint, float]:
    """pi(a|s) = product over the active agents."""
    active = game.active[state]
    return {
        joint: math.prod(team[agent, state][a] for agent, a in zip(active, joint, strict=True))
        for joint in game.joints(state)
    }


def values(game: Game, team: Team) -> list[float]:
    """V(s): the expected sum of rewards from this state on."""
    value = [0.0] * len(game.active)
    for state in reversed(range(len(game.active))):
        if game.active[state]:
            law = joint_law(game, team, state)
            value[state] = math.fsum(p * q_value(game, value, state, joint) for joint, p in law.items())
    return value


def q_value(game: Game, value: list[float], state: int, joint: Joint) -> float:
    return game.rewards[state][joint] + math.fsum(p * value[s] for p, s in game.steps[state][joint])


def expected_return(game: Game, team: Team) -> float:
    value = values(game, team)
    return math.fsum(p * value[s] for p, s in game.start)


def own_turn_laws(game: Game, team: Team, agent: int) -> list[dict[int, float]]:
    """Entry k: the probability of each state at this agent's (k+1)-th turn. Sums below 1 where it may not
    come."""
    laws: list[dict[int, float]] = []
    here: dict[tuple[int, int], float] = {}
    for p, s in game.start:
        here[s, 0] = here.get((s, 0), 0.0) + p
    for state in range(len(game.active)):
        for turn in [t for s, t in here if s == state]:
            mass = here[state, turn]
            if not game.active[state]:
                continue
            own = agent in game.active[state]
            if own:
                while len(laws) <= turn:
                    laws.append({})
                laws[turn][state] = laws[turn].get(state, 0.0) + mass
            for joint, p in joint_law(game, team, state).items():
                for q, following in game.steps[state][joint]:
                    at = (following, turn + own)
                    here[at] = here.get(at, 0.0) + mass * p * q
    return laws


def most_turns(game: Game, agent: int) -> int:
    """m: the most own turns on any path that the rules allow."""
    longest = [0] * len(game.active)
    for state in reversed(range(len(game.active))):
        ahead = [longest[s] for joint in game.steps[state].values() for p, s in joint if p > 0]
        longest[state] = max(ahead, default=0) + (agent in game.active[state])
    return max(longest[s] for p, s in game.start if p > 0)


def return_range(game: Game) -> tuple[float, float]:
    """The lowest and the highest return that any path can have."""
    low, high = [0.0] * len(game.active), [0.0] * len(game.active)
    for state in reversed(range(len(game.active))):
        if game.active[state]:
            ends = [
                (game.rewards[state][joint] + low[s], game.rewards[state][joint] + high[s])
                for joint, following in game.steps[state].items()
                for p, s in following
                if p > 0
            ]
            low[state], high[state] = min(a for a, _ in ends), max(b for _, b in ends)
    return min(low[s] for _, s in game.start), max(high[s] for _, s in game.start)


def surrogate(game: Game, team: Team, candidate: Team, agent: int) -> float:
    """sum_k E_{d_k} E_{a ~ candidate} A(s_k, a): states and advantages of the promoted team, own action of
    the candidate."""
    value = values(game, team)
    mixed = {**team, **{(agent, s): candidate[agent, s] for s in game.states_of(agent)}}
    total: list[float] = []
    for law in own_turn_laws(game, team, agent):
        for state, mass in law.items():
            for joint, p in joint_law(game, mixed, state).items():
                total.append(mass * p * (q_value(game, value, state, joint) - value[state]))
    return math.fsum(total)


def advantage_sizes(game: Game, team: Team, agent: int) -> tuple[float, float]:
    """(A_max, span): sup |A(s, a)| and sup_s (max_a A - min_a A) over the agent's own states."""
    value = values(game, team)
    largest = span = 0.0
    for state in game.states_of(agent):
        gains = [q_value(game, value, state, joint) - value[state] for joint in game.joints(state)]
        largest = max(largest, max(abs(g) for g in gains))
        span = max(span, max(gains) - min(gains))
    return largest, span


# ---- random games ------------------------------------------------------------------------------------------


def random_law(rng: np.random.Generator, n: int, scale: float) -> Law:
    return soft(rng.normal(size=n) * scale)


def soft(logits: np.ndarray) -> Law:
    shifted = np.exp(logits - logits.max())
    return tuple((shifted / shifted.sum()).tolist())


def random_team(rng: np.random.Generator, game: Game) -> dict[tuple[int, int], Law]:
    scale = rng.choice([0.3, 1.0, 2.0])
    return {
        (agent, s): random_law(rng, game.n_actions, scale) for agent in range(game.n_agents) for s in game.states_of(agent)
    }


def moved(rng: np.random.Generator, game: Game, team: Team, agent: int) -> dict[tuple[int, int], Law]:
    """A candidate of one agent, anywhere from a hair's breadth away to nearly deterministic."""
    scale = 10.0 ** rng.uniform(-3.0, 1.0)
    new = dict(team)
    for s in game.states_of(agent):
        new[agent, s] = soft(np.log(np.array(team[agent, s])) + rng.normal(size=game.n_actions) * scale)
    return new


def random_game(rng: np.random.Generator) -> Game:
    """Two or three agents; a layered MDP or a full history tree; turn taking, random, by state, or
    simultaneous."""
    n_agents = int(rng.integers(2, 4))
    n_actions = int(rng.integers(2, 4))
    kind = rng.choice(["layered", "tree"])
    play = rng.choice(["turns", "random", "state", "simultaneous"])
    horizon = int(rng.integers(2, 7))
    if kind == "tree":
        # A tree has (joint actions)^horizon leaves.
        n_actions = 2
        horizon = min(horizon, 3 if play == "simultaneous" else 5)

    def speakers(layer: int) -> tuple[int, ...]:
        if play == "turns":
            return (layer % n_agents,)
        if play == "simultaneous":
            return tuple(range(min(n_agents, 2)))
        return (int(rng.integers(n_agents)),)

    is_terminal_reward = bool(rng.integers(2))
    layer_active = [speakers(layer) for layer in range(horizon)]
    active: list[tuple[int, ...]] = []
    steps: list[dict[Joint, tuple[tuple[float, int], ...]]] = []
    rewards: list[dict[Joint, float]] = []
    width = int(rng.integers(2, 4))
    first = 0
    size = 1 if kind == "tree" else width
    for layer in range(horizon):
        following = first + size
        child = following
        for _ in range(size):
            who = speakers(layer) if play == "state" else layer_active[layer]
            active.append(who)
            moves: dict[Joint, tuple[tuple[float, int], ...]] = {}
            pays: dict[Joint, float] = {}
            for joint in itertools.product(range(n_actions), repeat=len(who)):
                if kind == "tree":
                    moves[joint] = ((1.0, child),)
                    child += 1
                else:
                    odds = rng.dirichlet([0.5] * width)
                    moves[joint] = tuple((float(p), following + i) for i, p in enumerate(odds))
                is_paid = layer == horizon - 1 or not is_terminal_reward
                pays[joint] = float(rng.choice([0.0, 1.0, rng.normal()])) if is_paid else 0.0
            steps.append(moves)
            rewards.append(pays)
        first = following
        size = child - following if kind == "tree" else width
    for _ in range(size):
        active.append(())
        steps.append({})
        rewards.append({})
    start = ((1.0, 0),) if kind == "tree" else tuple((1.0 / width, s) for s in range(width))
    return Game(n_agents, n_actions, start, tuple(active), tuple(steps), tuple(rewards))


def bit_game() -> Game:
    """G30: the one agent's first message is a bit, its second wins (reward 1) iff it repeats the bit."""
    steps = (
        {(0,): ((1.0, 1),), (1,): ((1.0, 2),)},
        {(0,): ((1.0, 3),), (1,): ((1.0, 3),)},
        {(0,): ((1.0, 3),), (1,): ((1.0, 3),)},
        {},
    )
    rewards = ({(0,): 0.0, (1,): 0.0}, {(0,): 1.0, (1,): 0.0}, {(0,): 0.0, (1,): 1.0}, {})
    return Game(1, 2, ((1.0, 0),), ((0,), (0,), (0,), ()), steps, rewards)
