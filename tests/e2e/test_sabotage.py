"""Each sabotage of the product turns a named test red (ALGORITHMS 9.4).

| sabotage                                          | guarded by                                                         |
| ------------------------------------------------- | ------------------------------------------------------------------ |
| the mask's sign is flipped in the loss            | golden: G1, G20                                                    |
| the mask's sign is flipped in the batch           | sat: a step sees its own agent's tokens                            |
| another agent's tokens in the mask                | sat: a step sees its own agent's tokens                            |
| moments are not restored                          | sat: a rejected agent is left exactly as it was (T5)               |
| the step count is not restored                    | sat: a rejected agent is left exactly as it was (T5)               |
| KL at the wrong temperature, in the core          | golden: G52                                                        |
| KL at the wrong temperature, in the engine        | sat: the gate judges what is served at the sampling temperature    |
| the replay test is left out                       | sat: a sampler at another temperature is found out (G11)           |
| a baseline takes siblings of another team         | sat: siblings of different team versions are refused (T24)         |
| advantages of another team reach the step         | sat: episodes of another team never reach a step                   |
| stale publish by the engine (old weights, new id) | contracts: the table sampler keeps its contract; sat: one agent    |
| the proof of a publication is left out            | sat: a rejected agent ..., not_published (T11)                     |
| the old version serves on after a promotion       | sat: one agent is a team of one and learns                         |
| the record comes before the weights               | durable: `serving`, which every kill test runs (T21)               |
| the reward lies on the token before the action    | sat: a step sees its own agent's tokens                            |
| the reward goes to another episode                | sat: one agent is a team of one and learns                         |
| a rejected agent's data is used up                | sat: a rejected agent is left exactly as it was (T5)               |

Every guard runs twice in this process: as it is (green), then with the product broken (red).
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import test_durable
import test_sat
import torch

from baton import run
from baton.algorithms import acceptance, sat
from baton.core import advantages, batching, divergence, losses
from baton.engines import table
from baton.errors import BatonError
from baton.types import AdvantageBatch, Episode, Snapshot, Trajectory, Weights

golden: Any = importlib.import_module("golden.test_golden")
contracts: Any = importlib.import_module("contracts.test_table")

Break = Callable[[pytest.MonkeyPatch], None]
Guard = Callable[[Path], None]


def flip_the_mask_in_the_loss(patch: pytest.MonkeyPatch) -> None:
    original = losses._under
    patch.setattr(losses, "_under", lambda mask, value: original(~mask, value))


def flip_the_mask_in_the_batch(patch: pytest.MonkeyPatch) -> None:
    original = batching._row

    def flipped(episode: Episode, agent: str, segment: int, turns: Any) -> Trajectory:
        row = original(episode, agent, segment, turns)
        mask = (False, *(not acts for acts in row.mask[1:]))
        return dataclasses.replace(row, mask=mask, behavior_logprobs=tuple(-0.7 if m else 0.0 for m in mask))

    patch.setattr(batching, "_row", flipped)


def let_teammates_into_the_mask(patch: pytest.MonkeyPatch) -> None:
    original = batching.trajectories

    def mixed(episode: Episode, agent: str) -> tuple[Trajectory, ...]:
        rows: list[Trajectory] = []
        for name in dict.fromkeys(t.agent for t in episode.turns):
            rows += [dataclasses.replace(row, agent=agent) for row in original(episode, name)]
        return tuple(rows)

    patch.setattr(batching, "trajectories", mixed)


def forget_to_restore_moments(patch: pytest.MonkeyPatch) -> None:
    original = table.TableLearner.restore

    def restore(self: table.TableLearner, snapshot: Snapshot) -> None:
        original(self, dataclasses.replace(snapshot, moments={k: v + 0.1 for k, v in snapshot.moments.items()}))

    patch.setattr(table.TableLearner, "restore", restore)


def forget_to_restore_steps(patch: pytest.MonkeyPatch) -> None:
    original = table.TableLearner.restore

    def restore(self: table.TableLearner, snapshot: Snapshot) -> None:
        now = self._steps
        original(self, snapshot)
        self._steps = max(now, self._steps)

    patch.setattr(table.TableLearner, "restore", restore)


def ignore_the_temperature_in_the_core(patch: pytest.MonkeyPatch) -> None:
    original = divergence.log_law
    patch.setattr(divergence, "log_law", lambda logits, *, temperature, **more: original(logits, temperature=1.0, **more))


def ignore_the_temperature_in_the_gate(patch: pytest.MonkeyPatch) -> None:
    original = table.exact

    def at_one(new: torch.Tensor, old: torch.Tensor) -> Any:
        return original(*(torch.log_softmax(0.5 * law, dim=-1) for law in (new, old)))

    patch.setattr(table, "exact", at_one)


def leave_out_the_replay_test(patch: pytest.MonkeyPatch) -> None:
    gap = acceptance.ReplayGap(mean=0.0, max=0.0, signed=0.0)
    patch.setattr(sat, "check_replay", lambda sums, *args, **more: (sums, gap))


def take_siblings_of_any_team(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(advantages, "_require_one_team", lambda *args: None)


def let_stale_episodes_through(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sat, "check_fresh", lambda *args: None)


def publish_stale_weights(patch: pytest.MonkeyPatch) -> None:
    original = table.TableSampler.publish

    async def stale(self: table.TableSampler, agent: str, slot: Any, weights: Weights, version: int) -> Any:
        old = self._slots.get((agent, "promoted"))
        proof = await original(self, agent, slot, weights, version)
        if old is not None:
            self._slots[agent, slot] = table._Held(old.rows, version)
        return proof

    patch.setattr(table.TableSampler, "publish", stale)


def leave_out_the_proof(patch: pytest.MonkeyPatch) -> None:
    async def trusting(sampler: Any, trainee: Any, probe: Any, weights: Weights, version: int) -> tuple[str, float]:
        await sampler.publish(trainee.agent, "candidate", dataclasses.replace(weights), version)
        return "", 0.0

    patch.setattr(sat, "publish_with_proof", trusting)


def forget_the_swap(patch: pytest.MonkeyPatch) -> None:
    async def swap(self: table.TableSampler, agent: str) -> None:
        """The candidate stays where it is."""

    patch.setattr(table.TableSampler, "swap", swap)


def write_the_record_first(patch: pytest.MonkeyPatch) -> None:
    """The promotion is recorded, then the process dies, and the weights that the record names never came."""

    def save(self: run.RunJournal, report: Any, promoted: tuple[Snapshot, Weights], before: Any) -> Any:
        version = f"state/{report.agent}/v{report.candidate_version:05d}"
        return {"weights": version, "training": before["training"], "steps": promoted[0].steps}

    patch.setattr(run.RunJournal, "_save", save)


def put_the_reward_one_token_early(patch: pytest.MonkeyPatch) -> None:
    original = batching.with_advantages

    def early(*args: Any, **more: Any) -> AdvantageBatch:
        batch = original(*args, **more)
        return dataclasses.replace(batch, advantages=batch.advantages.roll(-1, dims=1))

    patch.setattr(batching, "with_advantages", early)


def give_the_reward_to_another_episode(patch: pytest.MonkeyPatch) -> None:
    original = sat.episode_advantages

    def shifted(*args: Any) -> Any:
        values = original(*args)
        return dataclasses.replace(values, values=values.values.roll(1))

    patch.setattr(sat, "episode_advantages", shifted)


def use_up_a_rejected_agents_data(patch: pytest.MonkeyPatch) -> None:
    original = sat.adapt

    def adapt(state: Any, *args: Any) -> Any:
        after = original(state, *args)
        return dataclasses.replace(after, cursor=after.cursor + 1)

    patch.setattr(sat, "adapt", adapt)


def own_tokens(_: Path) -> None:
    test_sat.check_own_tokens()


def restored(kind: str) -> Guard:
    return lambda _: test_sat.test_a_rejected_agent_is_left_exactly_as_it_was(kind)


def complete_promotion(folder: Path) -> None:
    """T21 in this process: what the last record names is there and is what was judged."""
    run.train(test_durable.TWO, run=folder / "run")
    test_durable.serving(folder / "run")


CASES: Sequence[tuple[Break, Guard]] = (
    (flip_the_mask_in_the_loss, lambda _: golden.test_g1_the_band_is_strict_and_rejected_tokens_stay_in_the_denominator()),
    (flip_the_mask_in_the_loss, lambda _: golden.test_g20_token_losses_share_one_denominator()),
    (flip_the_mask_in_the_batch, own_tokens),
    (let_teammates_into_the_mask, own_tokens),
    (forget_to_restore_moments, restored("radius")),
    (forget_to_restore_moments, restored("non_finite: weight")),
    (forget_to_restore_steps, restored("radius")),
    (
        ignore_the_temperature_in_the_core,
        lambda _: golden.test_g52_divergences_are_taken_at_the_sampling_temperature(0.5, 0.3278133, 0.4337808),
    ),
    (
        ignore_the_temperature_in_the_gate,
        lambda _: test_sat.test_the_gate_judges_what_is_served_at_the_sampling_temperature(),
    ),
    (leave_out_the_replay_test, lambda _: test_sat.check_replay_at(0.8)),
    (take_siblings_of_any_team, lambda _: test_sat.test_siblings_of_different_team_versions_are_refused("group")),
    (let_stale_episodes_through, lambda _: test_sat.test_episodes_of_another_team_never_reach_a_step()),
    (publish_stale_weights, lambda _: contracts.test_the_table_sampler_keeps_its_contract()),
    (publish_stale_weights, lambda _: test_sat.test_one_agent_is_a_team_of_one_and_learns()),
    (leave_out_the_proof, restored("not_published: skipped publish")),
    (leave_out_the_proof, restored("not_published: stale cache")),
    (forget_the_swap, lambda _: test_sat.test_one_agent_is_a_team_of_one_and_learns()),
    (write_the_record_first, complete_promotion),
    (put_the_reward_one_token_early, own_tokens),
    (give_the_reward_to_another_episode, lambda _: test_sat.test_one_agent_is_a_team_of_one_and_learns()),
    (use_up_a_rejected_agents_data, restored("radius")),
)

RED = (AssertionError, BatonError, OSError, pytest.fail.Exception)
"""How a test turns red: a claim that fails, an error of the product, a file that is not there."""


@pytest.mark.parametrize(("sabotage", "guard"), CASES, ids=[f"{n}-{b.__name__}" for n, (b, _) in enumerate(CASES)])
def test_every_sabotage_turns_its_guard_red(
    sabotage: Break, guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "green").mkdir(), (tmp_path / "red").mkdir()
    guard(tmp_path / "green")
    sabotage(monkeypatch)
    with pytest.raises(RED):
        guard(tmp_path / "red")
