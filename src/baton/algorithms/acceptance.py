"""Whether a candidate may become the policy: everything that is measured before the answer is yes.

Sampler and learner agree on unchanged weights (replay); the served candidate stays in its trust region on probe states
that took no part in the step (look); what was published is what was judged (prove). ALGORITHMS 2.4, B18, 5.4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from baton.algorithms.options import GateOptions
from baton.core import trust_region
from baton.core.keyed import key, uniforms
from baton.engines.engine import Anchor, Learner, Sampler, ScoreRequest
from baton.errors import ConfigError, NonFiniteError, PublishError, ReplayGapError
from baton.types import AgentId, GateRecord, TokenBatch, TokenDivergence, Weights


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """One trainable agent: its learner and its own trust region."""

    agent: AgentId
    learner: Learner
    lr: float
    radius_token: float
    radius_message_mean: float
    is_exact: bool
    """fp32 on both sides of the replay test (ALGORITHMS B18)."""

    @property
    def radii(self) -> tuple[float, float]:
        """(token, message mean), nats."""
        return self.radius_token, self.radius_message_mean


# ---- the replay test ---------------------------------------------------------------------------------------------------

REPLAY_EXACT, REPLAY_ROUNDED, REPLAY_SIGNED = 1e-4, 0.08, 0.02
"""Largest mean abs gap with fp32 on both sides; with bf16 on either side; largest abs signed mean there (B18), nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySums:
    """Running sums of the replay gap of one agent, in nats over own tokens."""

    tokens: int = 0
    absolute: float = 0.0
    signed: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayGap:
    """Gap of one update between sampler and learner on unchanged weights, nats per own token."""

    mean: float
    max: float
    signed: float


def check_replay(
    sums: ReplaySums, gap: Float[Tensor, " N"], *, agent: AgentId, is_exact: bool
) -> tuple[ReplaySums, ReplayGap]:
    """Step 6: sampler and learner must agree on unchanged weights (B18). Returns the new sums and this update's gap.

    Below 1,000 tokens the running mean over the run's updates is judged.

    Raises:
        ReplayGapError: they do not.
    """
    n, total, signed, worst = gap.numel(), float(gap.abs().sum()), float(gap.sum()), float(gap.abs().max())
    running = ReplaySums(tokens=sums.tokens + n, absolute=sums.absolute + total, signed=sums.signed + signed)
    tokens, judged_abs, judged_signed = (
        (n, total, signed) if n >= 1000 else (running.tokens, running.absolute, running.signed)
    )
    mean, mean_signed = judged_abs / tokens, abs(judged_signed / tokens)
    bound = REPLAY_EXACT if is_exact else REPLAY_ROUNDED
    if not mean <= bound or (not is_exact and not mean_signed <= REPLAY_SIGNED):
        raise ReplayGapError(
            f"'{agent}': sampler and learner differ by {mean:.3g} nats per token on the same weights over {tokens} tokens "
            f"(bound {bound:g}; signed mean {mean_signed:.3g}, bound {REPLAY_SIGNED:g}): the temperature, the weights or "
            "a kernel differs between them. Run `baton doctor`; engine.dtype = 'float32' narrows it down"
        )
    return running, ReplayGap(mean=total / n, max=worst, signed=signed / n)


async def publish_with_proof(
    sampler: Sampler, trainee: Trainee, probe: TokenBatch, weights: Weights, version: int
) -> tuple[str, float | None]:
    """Step 14: publish into the candidate slot and prove that it landed: fingerprint and log-prob probe (5.4).

    `probe` selects whole messages of the agent. Returns ("", gap) or (why it did not, gap where one was measured), the gap
    in nats per token.
    """
    try:
        proof = await sampler.publish(trainee.agent, "candidate", weights, version)
    except PublishError as error:
        return str(error), None
    if proof.fingerprint != weights.fingerprint or proof.version != version:
        return f"the sampler holds {proof.fingerprint[:12]}, {weights.fingerprint[:12]} was sent", None
    rows = probe.rows(list(range(min(4, probe.n_rows))))
    expected = trainee.learner.logprobs(rows)
    requests: list[ScoreRequest] = []
    wanted: list[Float[Tensor, " N"]] = []
    for b in range(rows.n_rows):
        ids = rows.ids[b].tolist()
        for first, end in _runs(rows.mask[b].tolist()):
            requests.append(
                ScoreRequest(
                    agent=trainee.agent,
                    slot="candidate",
                    prompt_ids=tuple(ids[:first]),
                    ids=tuple(ids[first:end]),
                    temperature=rows.temperature,
                )
            )
            wanted.append(expected[b, first:end])
    scores = await sampler.score(requests)
    gaps: list[float] = []
    for score, want in zip(scores, wanted, strict=True):
        gaps += (torch.tensor(score, dtype=torch.float64) - want.double()).abs().tolist()
    gap = sum(gaps) / len(gaps)
    if not gap <= (REPLAY_EXACT if trainee.is_exact else REPLAY_ROUNDED):
        return f"probe messages score {gap:.3g} nats per token apart in sampler and learner", gap
    return "", gap


def _runs(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """(first, end) of each stretch of own tokens: the messages of a row, without the context between them."""
    edges = [n for n, (one, other) in enumerate(pairwise((False, *mask, False))) if one != other]
    return list(zip(edges[::2], edges[1::2], strict=True))


# ---- the gate --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ProbeStates:
    """The token states that every look of one update is judged on: drawn once (ALGORITHMS 2.4)."""

    batch: TokenBatch
    """Probe rows whose mask selects the drawn states."""
    message: Int[Tensor, " N"]
    unit: Int[Tensor, " N"]
    """Prompt of each state."""
    drawn: Int[Tensor, " U"]
    """One state per prompt."""


def probe_states(batch: TokenBatch, options: GateOptions, *, at: tuple[str | int, ...]) -> ProbeStates:
    """Draw the states of the gate: at most `max_states_per_message` of a message and `max_states` in all, and one per
    prompt for the certified bound. Draws are keyed by prompt, message and token."""
    row, position = (index.tolist() for index in batch.mask.nonzero(as_tuple=True))
    messages: list[list[int]] = []
    for n in range(len(row)):
        follows = n > 0 and row[n] == row[n - 1] and position[n] == position[n - 1] + 1
        if follows:
            messages[-1].append(n)
        else:
            messages.append([n])
    cap = min(options.max_states_per_message, max(1, options.max_states // len(messages)))
    kept: list[tuple[int, int]] = []
    for m, states in enumerate(messages):
        if len(states) > cap:
            draws = uniforms([key(*at, batch.groups[row[states[0]]], m, "states")], len(states))[0]
            states = sorted(sorted(states, key=lambda n: draws[n - states[0]])[:cap])
        kept += [(n, m) for n in states]
    mask = torch.zeros_like(batch.mask)
    for n, _ in kept:
        mask[row[n], position[n]] = True
    units = {group: u for u, group in enumerate(dict.fromkeys(batch.groups))}
    unit = [units[batch.groups[row[n]]] for n, _ in kept]
    of_unit: dict[int, list[int]] = {}
    for i, u in enumerate(unit):
        of_unit.setdefault(u, []).append(i)
    names = list(units)
    draws = uniforms([key(*at, names[u], "unit") for u in of_unit], 1)[:, 0]
    drawn = [states[int(draw * len(states))] for states, draw in zip(of_unit.values(), draws, strict=True)]
    return ProbeStates(
        batch=replace(batch, mask=mask),
        message=torch.tensor([m for _, m in kept]),
        unit=torch.tensor(unit),
        drawn=torch.tensor(drawn),
    )


def look(
    trainee: Trainee, states: ProbeStates, anchor: Anchor, options: GateOptions, *, looks: int, scale: float
) -> tuple[GateRecord, TokenDivergence]:
    """Steps 10 and 12: measure the served candidate against `current` on the probe states, and judge it."""
    divergence = trainee.learner.divergence(states.batch, anchor)
    return judged(divergence, states, trainee.radii, options, looks=looks, scale=scale), divergence


class Placed(Protocol):
    """Which message and prompt each state is of, and which state of each prompt was drawn."""

    @property
    def message(self) -> Int[Tensor, " N"]: ...
    @property
    def unit(self) -> Int[Tensor, " N"]: ...
    @property
    def drawn(self) -> Int[Tensor, " U"]: ...


def judged(
    divergence: TokenDivergence,
    states: Placed,
    radii: tuple[float, float],
    options: GateOptions,
    *,
    looks: int,
    scale: float,
) -> GateRecord:
    """What the gate says of these divergences; `radii` are (token, message mean) in nats. Whoever audits asks the same."""
    token, message_mean = radii
    return trust_region.gate(
        divergence,
        message=states.message,
        unit=states.unit,
        drawn=states.drawn,
        direction=options.direction,
        alpha=1.0 - options.quantile,
        eta=options.eta,
        looks=looks,
        radius_token=token,
        radius_message_mean=message_mean,
        require_certified=options.require_certified,
        scale=scale,
    )


def check_floor(trainee: Trainee, floor: tuple[float, float]) -> None:
    """Refuse a radius that lies below the noise floor (q99, message mean), both in nats (ALGORITHMS 2.4).

    Raises:
        ConfigError: names the radius, the floor and the remedy.
    """
    for name, radius, value in (
        ("token", trainee.radius_token, floor[0]),
        ("message_mean", trainee.radius_message_mean, floor[1]),
    ):
        if not math.isfinite(value):
            raise NonFiniteError(f"'{trainee.agent}': the noise floor ({name}) is {value}")
        if radius < value:
            raise ConfigError(
                f"agents.{trainee.agent}.radius.{name} = {radius:g} nats is below the noise floor {value:.3g} of these "
                "weights scored twice: such a gate would judge rounding. Raise the radius or set engine.dtype = 'float32'"
            )
