"""One update's episodes without a model, rendered by the protocol itself with messages of the expected length."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from baton import assemble
from baton.algorithms.acceptance import probe_states
from baton.assemble import Plan as Prepared
from baton.config import Config
from baton.core import batching
from baton.core.keyed import choice, key, uniforms
from baton.engines.table import symbols_of
from baton.plan.schedule import group_of, ordering_episodes, pair_episodes
from baton.protocols import Router
from baton.records import Record
from baton.types import AdvantageBatch, AgentId, Episode, Scored, Task, TokenBatch, TokenIds, Turn


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The episodes of one update with messages of the expected length, and what each agent would train on."""

    train: tuple[Episode, ...]
    """Of one update, or of a stage whose agents share them."""
    probe: tuple[Episode, ...]
    """Whole episodes."""
    probe_until: Mapping[AgentId, tuple[Episode, ...]]
    """The probe episodes as each trained agent's gate has them played: to the last turn that it can have, or (surrogate) to
    the end."""
    batches: Mapping[AgentId, AdvantageBatch]
    """Own rows of every agent whose weights are here, a frozen one's too."""
    probes: Mapping[AgentId, TokenBatch]
    """Of each trained agent, the states that its gate reads."""
    expected: Mapping[AgentId, str]
    """Where each agent's message length comes from."""
    too_long: Mapping[AgentId, int]
    """Turns whose prompt left no room for the answer in the agent's context; here their prompts lack their beginning."""
    seconds_per_turn: float
    """Of rendering and encoding alone: what playing costs beside the model."""

    def record(self) -> Record:
        """Sizes of the batches of each agent whose weights are here."""
        return {
            agent: {
                "rows": batch.batch.n_rows,
                "longest_row": int(batch.batch.lengths.max()),
                "trained_tokens": int(batch.batch.lengths.sum()),
                "own_tokens": batch.batch.n_act,
                "gate_states": self.probes[agent].n_act if agent in self.probes else 0,
                "message_length": self.expected[agent],
            }
            for agent, batch in self.batches.items()
        }

    def spoken(self, agent: AgentId) -> list[Turn]:
        """What an agent says in the episodes to train on."""
        return [turn for episode in self.train for turn in episode.turns if turn.agent == agent]

    def tokens(self, config: Config) -> Record:
        """Tokens that local agents generate in a stage and in a run: to learn from, for the gate, for an order, in pairs."""
        a = config.algorithm
        stage = {
            "train": _generated(self.train) * (1 if a.shares_episodes else len(self.probes)),
            "probe": _generated(self.probe)
            if a.name == "joint"
            else sum(_generated(heard) for heard in self.probe_until.values()),
        }
        if a.is_measured:
            stage["order"] = round(_generated(self.train) * ordering_episodes(a) / len(self.train))
        if most := pair_episodes(config.certificate, len(self.probes)):
            stage["pairs"] = round(_generated(self.train) * most / len(self.train))
        return {"stage": stage, "run": {use: count * a.stages for use, count in stage.items()}}


def _generated(episodes: Sequence[Episode]) -> int:
    return sum(len(t.ids) for e in episodes for t in e.turns)


def rehearsed(prepared: Prepared, answer_tokens: int | None = None) -> Rehearsal:
    """One update's episodes as the protocol would have them, without a model: prompts are real, messages have the expected
    length, log-probabilities and rewards are made up."""
    config = prepared.config
    a = config.algorithm
    trained = [agent.name for agent in config.agents if agent.trainable]
    prompts = a.episodes // group_of(a) * (len(trained) if a.shares_episodes else 1)
    messages = [_message(prepared, i, answer_tokens) for i in range(len(prepared.seats))]
    table = _Table(prepared, [one for one, _ in messages], dict.fromkeys(prepared.local, 0))
    began = time.monotonic()
    train = [table.play(task, sibling)[0] for task in prepared.splits.train[:prompts] for sibling in range(group_of(a))]
    probe = [table.play(task, 0) for task in prepared.splits.probe[: config.gate.probe_prompts]]
    spent = time.monotonic() - began
    batches: dict[AgentId, AdvantageBatch] = {}
    probes: dict[AgentId, TokenBatch] = {}
    versions = {seat.agent: 0 for seat in prepared.seats}
    for seat in prepared.seats:
        if seat.codec is None:
            continue
        rows = [t for e in train for t in batching.trajectories(e, seat.agent)]
        signs = {e.id: 1.0 if n % 2 else -1.0 for n, e in enumerate(train)}
        batch = batching.token_batch(rows, temperature=seat.temperature)
        batches[seat.agent] = batching.with_advantages(batch, signs, team=versions)
        if seat.agent in trained:
            rows = [t for e, _ in probe for t in batching.trajectories(e, seat.agent)]
            told = batching.token_batch(rows, temperature=seat.temperature)
            probes[seat.agent] = probe_states(told, config.gate, at=("plan", seat.agent)).batch
    own, is_whole = prepared.protocol.own_turns, config.certificate.plays_out(config.gate)
    return Rehearsal(
        train=tuple(train),
        probe=tuple(e for e, _ in probe),
        probe_until={name: tuple(e if is_whole else _until(e, waves, name, own) for e, waves in probe) for name in trained},
        batches=batches,
        probes=probes,
        expected={seat.agent: why for seat, (_, why) in zip(prepared.seats, messages, strict=True)},
        too_long={name: count for name, count in table.too_long.items() if count},
        seconds_per_turn=spent / sum(len(e.turns) for e in (*train, *(e for e, _ in probe))),
    )


def shape_of(batch: TokenBatch, rows: Sequence[int]) -> tuple[int, int, int]:
    """(rows, tokens of the longest, trained tokens) of some rows of a batch."""
    part = batch.rows(list(rows))
    return part.n_rows, int(part.lengths.max()), part.n_act


def _until(episode: Episode, waves: Sequence[int], agent: AgentId, own_turns: int) -> Episode:
    """The episode up to the end of the wave of simultaneous turns in which this agent has its last one."""
    turns: list[Turn] = []
    for wave in waves:
        if sum(turn.agent == agent for turn in turns) >= own_turns:
            break
        turns += episode.turns[len(turns) : len(turns) + wave]
    return replace(episode, turns=tuple(turns))


Said = Callable[[Task, int, int], tuple[str, TokenIds]]
"""(text, ids) of a seat's message on a task, for one of its siblings, as its so manyth turn; no ids behind an endpoint."""


def _message(prepared: Prepared, index: int, answer_tokens: int | None) -> tuple[Said, str]:
    """(what a seat says, where the length of it comes from)."""
    seat, agent, env = prepared.seats[index], prepared.config.agents[index], prepared.env
    words = [f" {word}" for task in prepared.splits.train[:32] for word in task.prompt.split()] or [" a"]
    codec = seat.codec
    if codec is None:

        def remote(task: Task, sibling: int, turn: int) -> tuple[str, TokenIds]:
            draws = uniforms([key("plan", task.id, sibling, turn, index)], seat.max_new_tokens)[0]
            return "".join(words[int(draw * len(words))] for draw in draws).strip(), ()

        return remote, "a word a token of agents.max_new_tokens"
    warm = agent.warm_start
    is_shown = warm is not None and warm.source == "env" and env.demonstration(prepared.splits.train[0], index) is not None
    if answer_tokens is None and seat.max_new_tokens > 1 and is_shown:

        def shown(task: Task, sibling: int, turn: int) -> tuple[str, TokenIds]:
            demo = env.demonstration(task, index)
            ids = codec.reply(demo.reply if demo else "")[: seat.max_new_tokens]
            return codec.decode(ids), ids

        return shown, "as demonstrated"
    length = min(answer_tokens or seat.max_new_tokens, seat.max_new_tokens)
    if prepared.config.engine.name == "table":
        words = list(symbols_of(agent.model))

    def filled(task: Task, sibling: int, turn: int) -> tuple[str, TokenIds]:
        """Words of the prompts in a keyed order: as long as is wanted, and no easier to compress than answers are."""
        draws = uniforms([key("plan", task.id, sibling, turn, index)], length)[0]
        ids = codec.reply("".join(words[int(draw * len(words))] for draw in draws))
        while len(ids) < length:
            ids = (*ids[:-1], *ids)
        return codec.decode(ids[:length]), ids[:length]

    return filled, "as given" if answer_tokens else "agents.max_new_tokens"


@dataclass
class _Table:
    """Where episodes are rehearsed: who is due, what they are shown, what they say."""

    prepared: Prepared
    said: Sequence[Said]
    too_long: dict[AgentId, int]

    def _due(self, task: Task, turns: Sequence[Turn], rotation: int) -> tuple[int, ...]:
        """Whoever is due; where messages decide that, all agents in the order of the seats until each had all its turns."""
        protocol, n = self.prepared.protocol, len(self.prepared.seats)
        if isinstance(protocol, Router):
            return (len(turns) % n,) if len(turns) < n * protocol.own_turns else ()
        return protocol.due(task, turns, rotation)

    def play(self, task: Task, sibling: int) -> tuple[Episode, list[int]]:
        """An episode, and how many spoke at once in each of its waves."""
        prepared = self.prepared
        protocol, seats = prepared.protocol, prepared.seats
        rotation = choice(key("plan", task.id, sibling, "rotation"), len(seats)) if protocol.rotates else 0
        turns: list[Turn] = []
        waves: list[int] = []
        while due := self._due(task, turns, rotation):
            turns += [self._turn(task, sibling, turns, index) for index in due]
            waves.append(len(due))
        episode = Episode(
            id=f"0/1/{seats[0].agent}/sample/{task.id}/{sibling}",
            group=task.id,
            task_id=task.id,
            versions={seat.agent: 0 for seat in seats},
            turns=tuple(turns),
            answer=turns[-1].text if turns else "",
            outcome=Scored(reward=0.0),
        )
        return episode, waves

    def _turn(self, task: Task, sibling: int, turns: Sequence[Turn], index: int) -> Turn:
        seat = self.prepared.seats[index]
        text, ids = self.said[index](task, sibling, len(turns))
        if seat.codec is None:
            return Turn(kind="observation", agent=seat.agent, seat=index, text=text)
        prompt = seat.codec.encode(self.prepared.protocol.messages(task, turns, index, seat.system))
        room = seat.codec.context_length - seat.max_new_tokens
        if len(prompt) > room:
            self.too_long[seat.agent] += 1
            prompt = prompt[-room:]
        chances = uniforms([key("plan", task.id, sibling, len(turns), index, "log-probabilities")], len(ids))[0]
        return Turn(
            kind="action",
            agent=seat.agent,
            seat=index,
            text=text,
            prompt_ids=prompt,
            ids=ids,
            # fp32 numbers, each its own: parquet must not compress what a run's would not.
            logprobs=tuple(-float(np.float32(chance)) for chance in chances),
            versions=(0,) * len(ids),
        )


def notes(prepared: Prepared, update: Rehearsal) -> list[str]:
    """What the plan assumes about this team, a sentence each."""
    config, a = prepared.config, prepared.config.algorithm
    found: list[str] = []
    if isinstance(prepared.protocol, Router):
        found.append(
            "whom a router calls is not known before: as if every agent had all its turns of an episode "
            f"({prepared.protocol.own_turns}), in the order of the seats"
        )
    for agent in config.agents:
        if agent.is_remote:
            found.append(
                f"'{agent.name}' answers from an endpoint: as if with {agent.max_new_tokens} words; its time, memory and "
                "tokens are not counted"
            )
    for name, count in update.too_long.items():
        found.append(
            f"{count} prompts of '{name}' leave no room for an answer in its context: such episodes fail; shorten messages "
            "or take a model with a longer context"
        )
    if a.backtrack.tries > 1:
        found.append(f"an update that leaves the region is trained up to {a.backtrack.tries} times; here once")
    if a.data == "reuse":
        found.append("a stage's episodes are played once; where too little of them is left, an agent plays its own")
    devices = (
        sorted({str(device) for device in assemble.devices_of(config).values()}) if config.engine.name == "local" else []
    )
    if devices not in ([], ["cpu"]):
        found.append(f"memory is that of {', '.join(devices)} and of this process together")
    return found
