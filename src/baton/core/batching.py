"""From episodes to padded tensors: whose tokens, in which row, in which part (ALGORITHMS 1.1, 2.13).

Axes: B rows (one agent's token view of an episode), T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from baton.errors import ConfigError, DataError, MissingError, NonFiniteError
from baton.types import AdvantageBatch, AgentId, Episode, TokenBatch, Trajectory, Turn


def trajectories(episode: Episode, agent: AgentId) -> tuple[Trajectory, ...]:
    """This agent's own turns as rows: context with mask False, its own sampled tokens with mask True.

    A turn continues the running row when its prompt starts with everything the row holds; otherwise (a
    template that rewrites history, a context that was cut) a new row begins with `segment` one higher.
    Sampled ids are kept as they were sampled; turns without any are left out. Under a False mask
    log-probabilities read 0 and versions -1.

    Raises:
        DataError: a turn has sampled ids and no prompt, so its first token has no state.
    """
    rows: list[list[Turn]] = []
    seen: tuple[int, ...] = ()
    for turn in episode.turns:
        if turn.kind != "action" or turn.agent != agent or not turn.ids:
            continue
        if not turn.prompt_ids:
            raise DataError(
                f"episode {episode.id}: a turn of '{agent}' samples {len(turn.ids)} tokens after an empty "
                "prompt; give the model at least one id of context"
            )
        if rows and turn.prompt_ids[: len(seen)] == seen:
            rows[-1].append(turn)
        else:
            rows.append([turn])
        seen = turn.prompt_ids + turn.ids
    return tuple(_row(episode, agent, segment, turns) for segment, turns in enumerate(rows))


def token_batch(trajectories: Sequence[Trajectory], *, temperature: float) -> TokenBatch:
    """The rows as tensors, right padded, in the order given.

    `temperature` is the one all tokens were sampled at. Padding holds id 0, log-probability 0, version -1,
    mask False.

    Raises:
        MissingError: no rows; a row without an action token or with columns of different length. Names the
            episode.
        NonFiniteError: an action token has a log-probability that is not a finite number <= 0. Names it too.
        DataError: rows of two agents, an episode in two groups, or rows of one episode apart from each other.
        ConfigError: the temperature is not a positive number.
    """
    if not trajectories:
        raise MissingError("a token batch of no trajectories; collect an episode in which the agent acts")
    if not (math.isfinite(temperature) and temperature > 0.0):
        raise ConfigError(f"temperature {temperature}: need the number > 0 that the tokens were sampled at")
    agent = trajectories[0].agent
    number: dict[str, int] = {}
    group_of: dict[str, str] = {}
    previous = ""
    for trajectory in trajectories:
        _require_sound(trajectory, agent)
        name = trajectory.episode_id
        if name in number and name != previous:
            raise DataError(f"rows of episode {name} of '{agent}' are apart; keep them together")
        if group_of.setdefault(name, trajectory.group) != trajectory.group:
            raise DataError(
                f"episode {name} of '{agent}' is in group '{group_of[name]}' and in '{trajectory.group}'; "
                "an episode answers one prompt"
            )
        number.setdefault(name, len(number))
        previous = name
    width = max(len(trajectory.ids) for trajectory in trajectories)
    pad = [width - len(trajectory.ids) for trajectory in trajectories]
    pairs = list(zip(trajectories, pad, strict=True))
    return TokenBatch(
        ids=torch.tensor([row.ids + (0,) * extra for row, extra in pairs], dtype=torch.long),
        mask=torch.tensor([row.mask + (False,) * extra for row, extra in pairs], dtype=torch.bool),
        behavior_logprobs=torch.tensor(
            [row.behavior_logprobs + (0.0,) * extra for row, extra in pairs], dtype=torch.float32
        ),
        versions=torch.tensor([row.versions + (-1,) * extra for row, extra in pairs], dtype=torch.long),
        lengths=torch.tensor([len(row.ids) for row in trajectories], dtype=torch.long),
        episode=torch.tensor([number[row.episode_id] for row in trajectories], dtype=torch.long),
        agent=agent,
        episode_ids=tuple(row.episode_id for row in trajectories),
        groups=tuple(row.group for row in trajectories),
        temperature=temperature,
    )


def with_advantages(batch: TokenBatch, per_episode: Mapping[str, float], *, team: Mapping[AgentId, int]) -> AdvantageBatch:
    """The batch with its episode's advantage on each action token and 0 elsewhere.

    `team` is the team (versions) that produced the episodes that the advantages were computed from.

    Raises:
        MissingError: an episode of the batch has no advantage.
        NonFiniteError: an advantage is NaN or infinite. Both name the episode.
    """
    values: list[float] = []
    for name in batch.episode_ids:
        if name not in per_episode:
            raise MissingError(f"episode {name} of '{batch.agent}' has no advantage; leave its rows out or give it one")
        if not math.isfinite(per_episode[name]):
            raise NonFiniteError(
                f"episode {name} of '{batch.agent}' has advantage {per_episode[name]}; need a finite number"
            )
        values.append(float(per_episode[name]))
    column_B1 = torch.tensor(values, dtype=torch.float32)[:, None]
    advantages_BT = torch.where(batch.mask, column_B1, torch.zeros_like(column_B1))
    return AdvantageBatch(batch=batch, advantages=advantages_BT, team=dict(team))


def parts(batch: AdvantageBatch, count: int) -> tuple[AdvantageBatch, ...]:
    """The batch in `count` disjoint parts, one per inner step: prompts in order, siblings of a prompt
    together.

    Prompts are spread as evenly as they go, the first parts taking one more where it does not divide. Fewer
    prompts than parts give fewer parts, never an empty one (ALGORITHMS 2.13, A12).

    Raises:
        ConfigError: count below 1.
    """
    if count < 1:
        raise ConfigError(f"inner steps {count}: need at least 1")
    rows_of: dict[str, list[int]] = {}
    for row, name in enumerate(batch.batch.groups):
        rows_of.setdefault(name, []).append(row)
    prompts = list(rows_of.values())
    n_parts = min(count, len(prompts))
    share, rest = divmod(len(prompts), n_parts)
    bounds = [part * share + min(part, rest) for part in range(n_parts + 1)]
    return tuple(batch.rows([row for rows in prompts[first:last] for row in rows]) for first, last in pairwise(bounds))


def micro_batches(batch: TokenBatch, *, max_tokens: int) -> tuple[list[int], ...]:
    """Row indices of each chunk: longest episodes first, padded size (rows x longest) at most `max_tokens`.

    Every row is in one chunk. The rows of an episode stay together and in order, because a sequence ratio
    needs them all; an episode larger than `max_tokens` by itself is a chunk of its own. Ties go to the
    lower row.

    Raises:
        ConfigError: max_tokens below 1.
    """
    if max_tokens < 1:
        raise ConfigError(f"micro-batch of {max_tokens} tokens: need at least 1")
    lengths: list[int] = batch.lengths.tolist()
    rows_of: dict[str, list[int]] = {}
    for row, name in enumerate(batch.episode_ids):
        rows_of.setdefault(name, []).append(row)
    episodes = sorted(rows_of.values(), key=lambda rows: (-max(lengths[row] for row in rows), rows[0]))
    chunks: list[list[int]] = []
    longest = 0
    for rows in episodes:
        if chunks and (len(chunks[-1]) + len(rows)) * longest <= max_tokens:
            chunks[-1].extend(rows)
        else:
            chunks.append(list(rows))
            longest = max(lengths[row] for row in rows)  # sorted: no later episode of this chunk is longer
    return tuple(chunks)


def _row(episode: Episode, agent: AgentId, segment: int, turns: Sequence[Turn]) -> Trajectory:
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for turn in turns:
        context = turn.prompt_ids[len(ids) :]
        ids += [*context, *turn.ids]
        mask += [False] * len(context) + [True] * len(turn.ids)
        logprobs += [0.0] * len(context) + list(turn.logprobs)
        versions += [-1] * len(context) + list(turn.versions)
    return Trajectory(
        episode_id=episode.id,
        group=episode.group,
        agent=agent,
        segment=segment,
        ids=tuple(ids),
        mask=tuple(mask),
        behavior_logprobs=tuple(logprobs),
        versions=tuple(versions),
    )


def _require_sound(row: Trajectory, agent: AgentId) -> None:
    name = f"episode {row.episode_id}, segment {row.segment} of '{row.agent}'"
    if row.agent != agent:
        raise DataError(f"{name} is in a batch of '{agent}'; a batch holds one agent")
    if not len(row.ids) == len(row.mask) == len(row.behavior_logprobs) == len(row.versions):
        raise MissingError(
            f"{name} has {len(row.ids)} ids, {len(row.mask)} mask entries, {len(row.behavior_logprobs)} "
            f"behavior log-probabilities and {len(row.versions)} versions; need one of each per token"
        )
    if not any(row.mask):
        raise MissingError(f"{name} has no action token; leave it out of the batch")
    for position, (acts, logprob) in enumerate(zip(row.mask, row.behavior_logprobs, strict=True)):
        if acts and not (math.isfinite(logprob) and logprob <= 0.0):
            raise NonFiniteError(
                f"{name}: behavior log-probability {logprob} at token {position} is not a finite number <= 0"
            )
