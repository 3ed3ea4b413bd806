"""A supervised start on demonstrations: small models need it to follow a protocol at all.

It has its own data (demonstrations of train prompts, a held-out part of them never stepped on), its own budget and its
own record, and it stops early where the held-out accuracy reaches its target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from baton.core import batching, losses
from baton.core.keyed import Key, key, permutation
from baton.engines.engine import Codec, Learner
from baton.envs.env import Demonstration
from baton.errors import DataError
from baton.protocols import TeamProtocol
from baton.types import AgentId, Message, Task, TokenBatch, TokenIds, Trajectory, Turn


class WarmStartOptions(BaseModel):
    """`[agents.warm_start]`: supervised training of one agent before RL."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    source: str = Field(
        default="env",
        min_length=1,
        description="`env`: the env's own demonstrations; or a JSONL of dialogues (messages)",
    )
    seats: Literal["own", "all"] = Field(
        default="own",
        description="demonstrations of the agent's own seat, or of all seats (one start that several seats share)",
    )
    demonstrations: int = Field(default=4096, ge=2, description="demonstrations drawn, the held-out ones included")
    held_out: int = Field(default=64, ge=1, description="demonstrations kept for measuring, never stepped on")
    steps: int = Field(default=200, ge=1, description="most optimiser steps")
    batch: int = Field(default=32, ge=1, description="demonstrations per step")
    lr: Literal["auto"] | Annotated[float, Field(gt=0)] = Field(
        default="auto", description="AdamW learning rate; auto: the agent's lr times 3"
    )
    target: float = Field(
        default=1.0, gt=0, le=1, description="stop once the expected accuracy on held-out demonstrations reaches this"
    )
    check_every: int = Field(default=5, ge=1, description="steps between two measurements")

    @model_validator(mode="after")
    def _something_is_left(self) -> WarmStartOptions:
        if self.held_out >= self.demonstrations:
            raise ValueError(
                f"held_out = {self.held_out} leaves none of demonstrations = {self.demonstrations} to train on; lower it"
            )
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialogue:
    """One demonstration in ids: what the agent reads and what it should say."""

    id: str
    prompt_ids: TokenIds
    reply_ids: TokenIds


@dataclass(frozen=True, kw_only=True)
class WarmStartRecord:
    """What a warm start did. `accuracy` is the expected share of held-out replies sampled exactly right, exp(sum log p),
    after 0, check_every, ... steps."""

    steps: int
    tokens: int
    losses: tuple[float, ...]
    accuracy: tuple[tuple[int, float], ...]
    reached: bool


def render(
    demo: Demonstration,
    *,
    id: str,
    protocol: TeamProtocol,
    agents: Sequence[AgentId],
    system: str,
    codec: Codec,
    max_new_tokens: int,
) -> Dialogue:
    """A seat's demonstration as the protocol would show it."""
    task = Task(id=id, env="demonstration", prompt=demo.view, answer="")
    turns = [Turn(kind="observation", agent=agents[int(seat)], seat=int(seat), text=text) for seat, text in demo.heard]
    messages = protocol.messages(task, turns, demo.seat, system)
    return Dialogue(id=id, prompt_ids=codec.encode(messages), reply_ids=codec.reply(demo.reply)[:max_new_tokens])


def render_messages(messages: Sequence[Message], *, id: str, system: str, codec: Codec) -> Dialogue:
    """A dialogue from a file: everything before the last assistant message is the prompt.

    Raises:
        DataError: it does not end with an assistant message.
    """
    if len(messages) < 2 or messages[-1].role != "assistant":
        raise DataError(f"dialogue {id} does not end with an assistant message after a user's; there is nothing to learn")
    head = list(messages[:-1])
    if system and head[0].role != "system":
        head.insert(0, Message(role="system", content=system))
    return Dialogue(id=id, prompt_ids=codec.encode(head), reply_ids=codec.reply(messages[-1].content))


def as_batch(dialogues: Sequence[Dialogue], agent: AgentId) -> TokenBatch:
    """Dialogues as rows whose mask selects the replies (their behavior log-probabilities are not read)."""
    rows = [
        Trajectory(
            episode_id=f"{n}:{d.id}",
            group=d.id,
            agent=agent,
            segment=0,
            ids=d.prompt_ids + d.reply_ids,
            mask=(False,) * len(d.prompt_ids) + (True,) * len(d.reply_ids),
            behavior_logprobs=(0.0,) * (len(d.prompt_ids) + len(d.reply_ids)),
            versions=(-1,) * (len(d.prompt_ids) + len(d.reply_ids)),
        )
        for n, d in enumerate(dialogues)
    ]
    return batching.token_batch(rows, temperature=1.0)


def expected_accuracy(learner: Learner, held_out: TokenBatch) -> float:
    """Mean probability that a reply is sampled exactly as demonstrated, temperature 1."""
    logprobs = learner.logprobs(held_out)
    return float(torch.where(held_out.mask, logprobs, torch.zeros_like(logprobs)).sum(dim=1).exp().mean())


def warm_start(
    learner: Learner,
    dialogues: Sequence[Dialogue],
    options: WarmStartOptions,
    *,
    agent: AgentId,
    lr: float,
    at: tuple[str | int, ...],
    tick: Callable[[int, float], None],
    are_samples: bool = False,
) -> WarmStartRecord:
    """Maximum likelihood on the demonstrations until the target or the budget is reached.

    `tick(step, accuracy)` is called after every step with the last measured accuracy. Equal demonstrations count once,
    unless they `are_samples` of a law that is to be learnt: then how often one comes is what it says.

    Raises:
        DataError: too few demonstrations for one batch beside the held-out ones.
    """
    distinct = list(dialogues) if are_samples else list({d.prompt_ids + d.reply_ids: d for d in dialogues}.values())
    if len(distinct) < options.held_out + options.batch:
        raise DataError(
            f"warm start of '{agent}': {len(distinct)} distinct demonstrations, {options.held_out} held out + one batch of "
            f"{options.batch} needed; lower warm_start.held_out or batch, or give more demonstrations"
        )
    order = permutation(key(*at, "held out"), len(distinct))
    held_out = as_batch([distinct[i] for i in order[: options.held_out]], agent)
    train = [distinct[i] for i in order[options.held_out :]]
    objective = losses.Objective(weight=losses.Likelihood(), penalty=0.0)
    accuracy = [(0, expected_accuracy(learner, held_out))]
    history: list[float] = []
    tokens, cursor = 0, 0
    shuffle: list[int] = []
    for step in range(1, options.steps + 1):
        if accuracy[-1][1] >= options.target:
            break
        chosen: list[Dialogue] = []
        while len(chosen) < options.batch:
            if cursor % len(train) == 0:
                shuffle = permutation(_epoch(at, cursor // len(train)), len(train))
            chosen.append(train[shuffle[cursor % len(train)]])
            cursor += 1
        batch = as_batch(chosen, agent)
        ones = {episode: 1.0 for episode in batch.episode_ids}
        report = learner.step(batching.with_advantages(batch, ones, team={}), objective, lr=lr, anchor=None)
        history.append(report.loss)
        tokens += int(batch.lengths.sum())
        if step % options.check_every == 0 or step == options.steps:
            accuracy.append((step, expected_accuracy(learner, held_out)))
        tick(step, accuracy[-1][1])
    return WarmStartRecord(
        steps=len(history),
        tokens=tokens,
        losses=tuple(history),
        accuracy=tuple(accuracy),
        reached=accuracy[-1][1] >= options.target,
    )


def _epoch(at: tuple[str | int, ...], epoch: int) -> Key:
    return key(*at, "epoch", epoch)
