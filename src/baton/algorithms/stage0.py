"""Stage 0: a newcomer takes a seat without a shock (ALGORITHMS 2.8).

Where both models share a tokenizer, the newcomer's law is moved, state by state, into a ball around the incumbent's, and the
newcomer learns those targets where the team as it is now goes; the gate then judges it on probe prompts like any other
candidate. Where they do not, it imitates the incumbent's messages, and nothing is proven.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from baton.algorithms.acceptance import ProbeStates, Trainee, look, probe_states
from baton.algorithms.options import GateOptions
from baton.core import batching
from baton.core.keyed import key, permutation
from baton.core.losses import Objective
from baton.engines.engine import Anchor, Learner
from baton.errors import DataError, MissingError
from baton.protocols import TeamProtocol
from baton.rollout import Seat
from baton.types import AdvantageBatch, Episode, GateRecord, Task, TokenBatch, TokenDivergence, TokenIds, Turn

Mode = Literal["distill", "mixture", "imitate", "raw"]
MODES: Mapping[Mode, str] = {
    "distill": "the newcomer is trained to speak as its projection onto the incumbent's ball, and the gate judges it",
    "mixture": "both models run, and what is served is the projection itself; the seat is not trained any further",
    "imitate": "the newcomer imitates the incumbent's messages, whatever its tokenizer; no gate can judge it",
    "raw": "the newcomer as it comes; no gate judges it",
}
QUANTILE_FACTOR = 5.0
"""Token radius of the gate over its radius of the mean, as of a training update's defaults (.05 and .01)."""
AIM = 0.5
"""Share of the radius at which the targets of a distillation lie: what the newcomer misses needs the rest."""


def radii(options: SwapOptions) -> tuple[float, float]:
    """(token, message mean) of the gate of a swap, nats."""
    return QUANTILE_FACTOR * options.radius, options.radius


class SwapOptions(BaseModel):
    """How a newcomer takes a seat."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    mode: Mode = Field(default="distill", description="; ".join(f"{name}: {what}" for name, what in MODES.items()))
    radius: float = Field(
        default=0.01,
        gt=0,
        description="delta_0, nats: the gate's radius of the mean over messages (its token radius is five times that), and "
        "that of a mixture in every state",
    )
    contexts: int = Field(default=512, ge=1, description="train prompts that the team plays for each round of learning")
    rounds: int = Field(
        default=5,
        ge=1,
        description="most rounds of learning; from the second on, half of the prompts are played by the team with the "
        "newcomer in its seat",
    )
    steps: int = Field(default=200, ge=1, description="most optimiser steps of a round")
    batch: int = Field(default=64, ge=1, description="messages per step")
    lr: Literal["auto"] | Annotated[float, Field(gt=0)] = Field(
        default="auto",
        description="AdamW learning rate at the start of a round, from where it falls in a line to nothing at its last step "
        "(constant where a newcomer imitates); auto: three times that of the model's size",
    )


@dataclass(frozen=True, kw_only=True)
class Contexts:
    """The same action states as each of the two models reads them, in the same order."""

    incumbent: TokenBatch
    newcomer: TokenBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One round of learning, and what the gate then saw."""

    contexts: int
    """States learnt from, all rounds so far."""
    inside: float
    """Share of this round's states in which the newcomer was inside the ball by itself."""
    steps: int
    tokens: int
    """Tokens read by these steps, context and message."""
    first_loss: float
    """Mean KL(target || newcomer) over the first pass, nats a token."""
    last_loss: float
    look: GateRecord


@dataclass(frozen=True, kw_only=True)
class Distilled:
    """What Stage 0 came to."""

    rounds: tuple[Round, ...]
    states: ProbeStates
    looks: tuple[tuple[GateRecord, TokenDivergence], ...]

    @property
    def passed(self) -> bool:
        """The gate said yes."""
        return self.rounds[-1].look.passed


# ---- one transcript, two readers ---------------------------------------------------------------------------------------


def heard(protocol: TeamProtocol, seat: Seat, index: int, episode: Episode, task: Task, number: int) -> Sequence[Turn]:
    """The turns that the speaker of a turn had heard: those before it, less those that were said at the same time.

    Raises:
        DataError: no part of the transcript gives the prompt that was recorded.
    """
    assert seat.codec is not None
    wanted = episode.turns[number].prompt_ids
    for end in range(number, -1, -1):
        turns = episode.turns[:end]
        if seat.codec.encode(protocol.messages(task, turns, index, seat.system)) == wanted:
            return turns
    raise DataError(f"episode {episode.id}: the prompt of turn {number + 1} does not follow from the turns before it")


def read_again(protocol: TeamProtocol, was: Seat, seat: Seat, index: int, episode: Episode, task: Task) -> Episode:
    """The episode with the prompts of one seat as another model reads the same transcript."""
    if was.codec is seat.codec and was.system == seat.system:
        return episode
    assert seat.codec is not None
    turns: list[Turn] = []
    for number, turn in enumerate(episode.turns):
        if turn.kind == "action" and turn.seat == index:
            before = heard(protocol, was, index, episode, task, number)
            turn = replace(turn, prompt_ids=seat.codec.encode(protocol.messages(task, before, index, seat.system)))
        turns.append(turn)
    return replace(episode, turns=tuple(turns))


def contexts(
    episodes: Sequence[Episode], tasks: Mapping[str, Task], *, protocol: TeamProtocol, was: Seat, seat: Seat, index: int
) -> Contexts:
    """The states of a seat in these episodes, for the model that sat there and for the one that is to sit there.

    Raises:
        MissingError: the seat says nothing in any of them.
    """
    again = [read_again(protocol, was, seat, index, e, tasks[e.task_id]) for e in episodes]
    sides: list[TokenBatch] = []
    for side in (episodes, again):
        rows = [row for episode in side for row in batching.trajectories(episode, was.agent)]
        if not rows:
            raise MissingError(f"'{was.agent}' says nothing in {len(episodes)} episodes; raise swap contexts")
        sides.append(batching.token_batch(rows, temperature=was.temperature))
    return Contexts(incumbent=sides[0], newcomer=sides[1])


def messages_of(
    episodes: Sequence[Episode], tasks: Mapping[str, Task], *, protocol: TeamProtocol, was: Seat, seat: Seat, index: int
) -> list[tuple[str, TokenIds, TokenIds]]:
    """(id, prompt, reply) of every whole message of a seat, in the ids of the model that is to sit there."""
    assert seat.codec is not None
    found: list[tuple[str, TokenIds, TokenIds]] = []
    for episode in episodes:
        for number, turn in enumerate(episode.turns):
            if turn.kind == "action" and turn.seat == index and not turn.cut:
                before = heard(protocol, was, index, episode, tasks[episode.task_id], number)
                prompt = seat.codec.encode(protocol.messages(tasks[episode.task_id], before, index, seat.system))
                reply = seat.codec.reply(turn.text)[: seat.max_new_tokens]
                found.append((f"{episode.id}:{number}", prompt, reply))
    return found


# ---- learning to speak as the projection -------------------------------------------------------------------------------


def probed(
    incumbent: Learner, probe: Contexts, gate: GateOptions, *, at: tuple[str | int, ...]
) -> tuple[ProbeStates, Anchor]:
    """The states that the gate looks at, as the newcomer reads them, and the incumbent's laws there."""
    drawn = probe_states(probe.incumbent, gate, at=(*at, "probe"))
    kept = drawn.batch.mask[probe.incumbent.mask]
    states = replace(drawn, batch=replace(probe.newcomer, mask=_masked(probe.newcomer, kept)))
    return states, incumbent.remember(drawn.batch).at(states.batch)


async def distill(
    *,
    incumbent: Learner,
    trainee: Trainee,
    probe: Contexts,
    more: Callable[[int], Awaitable[Sequence[Contexts]]],
    options: SwapOptions,
    gate: GateOptions,
    lr: float,
    at: tuple[str | int, ...],
    tick: Callable[[str, int], None],
) -> Distilled:
    """Rounds of learning the projection on the contexts that `more` gives, until the gate passes on those of `probe`.

    `trainee` has the newcomer's learner, without any step taken, and the gate's radii. Targets are those of the newcomer as
    it came, in every round. The learner is left where the last look was taken.
    """
    newcomer = trainee.learner
    origin = newcomer.snapshot()
    states, current = probed(incumbent, probe, gate, at=at)
    lessons: list[tuple[AdvantageBatch, Anchor]] = []
    rounds: list[Round] = []
    looks: list[tuple[GateRecord, TokenDivergence]] = []
    objective = Objective(weight=None, penalty=1.0, direction="old_new")
    taken = 0
    for number in range(options.rounds):
        fresh = await more(number)
        now = newcomer.snapshot()
        newcomer.restore(origin)
        inside: list[torch.Tensor] = []
        for of, pair in enumerate(fresh):
            for rows in _parts(pair.newcomer, options.batch, at=(*at, number, of)):
                part = pair.newcomer.rows(rows)
                there = incumbent.remember(pair.incumbent.rows(_same_episodes(pair, rows))).at(part)
                target = newcomer.project(part, there, radius=AIM * options.radius)
                inside.append(newcomer.divergence(part, there).kl_new_old <= AIM * options.radius)
                idle = dict.fromkeys(part.episode_ids, 0.0)
                lessons.append((batching.with_advantages(part, idle, team={}), target))
        newcomer.restore(now)
        passes: list[float] = []
        steps = tokens = 0
        while steps < options.steps:
            losses: list[float] = []
            for place in permutation(key(*at, "pass", taken), len(lessons)):
                lesson, target = lessons[place]
                # A constant rate leaves the newcomer as far from its targets as a step is long: outside the radius.
                falling = lr * (1.0 - steps / options.steps)
                losses.append(newcomer.step(lesson, objective, lr=falling, anchor=target).loss)
                tokens += int(lesson.batch.lengths.sum())
                steps += 1
                tick(f"{trainee.agent}: round {number + 1}", options.steps)
                if steps == options.steps:
                    break
            taken += 1
            passes.append(sum(losses) / len(losses))
            if passes[-1] < AIM * options.radius / 20.0:
                break
        record, divergence = look(trainee, states, current, gate, looks=options.rounds, scale=1.0)
        looks.append((replace(record, attempt=number), divergence))
        rounds.append(
            Round(
                contexts=sum(lesson.batch.n_act for lesson, _ in lessons),
                inside=float(torch.cat(inside).double().mean()),
                steps=steps,
                tokens=tokens,
                first_loss=passes[0],
                last_loss=passes[-1],
                look=looks[-1][0],
            )
        )
        if record.passed:
            break
    return Distilled(rounds=tuple(rounds), states=states, looks=tuple(looks))


def _masked(batch: TokenBatch, kept: torch.Tensor) -> torch.Tensor:
    """The batch's mask with only these of its action states."""
    mask = torch.zeros_like(batch.mask)
    mask[batch.mask] = kept
    return mask


def _parts(batch: TokenBatch, size: int, *, at: tuple[str | int, ...]) -> list[list[int]]:
    """Rows in parts of about `size`, the rows of an episode together, in a keyed order."""
    of: dict[str, list[int]] = {}
    for row, name in enumerate(batch.episode_ids):
        of.setdefault(name, []).append(row)
    names = list(of)
    parts: list[list[int]] = [[]]
    for place in permutation(key(*at, "parts"), len(names)):
        if len(parts[-1]) >= size:
            parts.append([])
        parts[-1] += of[names[place]]
    return parts


def _same_episodes(pair: Contexts, rows: Sequence[int]) -> list[int]:
    """The incumbent's rows of the episodes that these rows of the newcomer are of, in the same order."""
    of: dict[str, list[int]] = {}
    for row, name in enumerate(pair.incumbent.episode_ids):
        of.setdefault(name, []).append(row)
    return [row for name in dict.fromkeys(pair.newcomer.episode_ids[r] for r in rows) for row in of[name]]
