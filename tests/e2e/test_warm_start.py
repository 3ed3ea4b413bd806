"""A warm start imitates train prompts only, stops where it is told, and is shared or cached exactly when it is the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds

from baton import assemble, config
from baton.assemble import Plan
from baton.engines.local import LocalLearner
from baton.errors import DataError
from baton.types import AdvantageBatch, StepReport
from baton.warm_start import Dialogue, WarmStartOptions, warm_start

START = {"steps": 2, "batch": 8, "demonstrations": 48, "held_out": 8, "check_every": 1}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_CACHE", str(folder))
        yield folder


def plan_of(*overrides: str, **start: Any) -> Plan:
    """A relay of three tiny models with this warm start in every seat."""
    agents = [
        {"name": n, "model": "tiny:31k", "system": "", "max_new_tokens": 1, "lr": 1e-3, "warm_start": START | start}
        for n in ("first", "second", "third")
    ]
    tree = {
        "seed": 5,
        "env": {"name": "relay", "symbols": 4, "prompts": 400},
        "protocol": {"name": "chain", "sees": "previous"},
        "agents": agents,
        "gate": {"probe_prompts": 8},
        "algorithm": {"episodes": 8},
        "engine": {"threads": 1},
    }
    return assemble.prepare(config.parse(tree, overrides), root=Path())


def start(plan: Plan, index: int) -> tuple[bytes, bool]:
    """The weights that an agent begins RL with, and whether they came from the cache."""
    folder, record, is_cached = assemble.start_folder(plan, index, tick=lambda *_: None)
    assert record is not None and record.steps == START["steps"]
    return (folder / "model.safetensors").read_bytes(), is_cached


def test_one_start_for_all_seats_is_trained_once_and_copied() -> None:
    plan = plan_of(seats="all")
    assert len(set(plan.bases.values())) == 1
    first, second, third = (assemble.dialogues(plan, i) for i in range(3))
    assert first == second == third
    assert {d.id.rpartition(":")[2] for d in first} == {"0", "1", "2"}, "demonstrations of every seat"
    (a, made), (b, copied), (c, copied_too) = (start(plan, i) for i in range(3))
    assert a == b == c and (made, copied, copied_too) == (False, True, True)


def test_a_seat_of_its_own_start_has_weights_and_demonstrations_of_its_own() -> None:
    plan = plan_of()
    assert len(set(plan.bases.values())) == 3
    for index in range(3):
        assert {d.id.rpartition(":")[2] for d in assemble.dialogues(plan, index)} == {str(index)}
    starts = [start(plan, i) for i in range(3)]
    assert len({weights for weights, _ in starts}) == 3 and not any(is_cached for _, is_cached in starts)


def test_demonstrations_come_from_train_prompts_and_read_as_an_episode_would() -> None:
    plan = plan_of(seats="all")
    train = {t.id for t in plan.splits.train}
    others = {t.id for t in (*plan.splits.probe, *plan.splits.certify, *plan.splits.test)}
    shown = assemble.dialogues(plan, 1)
    assert {d.id.rpartition(":")[0] for d in shown} <= train - others and len(shown) == START["demonstrations"]
    codec = plan.seats[1].codec
    texts = {d.id.rpartition(":")[2]: codec.decode(d.prompt_ids) for d in shown}
    assert "[first]: " in texts["1"] and "[second]: " in texts["2"] and "]: " not in texts["0"]


def test_the_cache_serves_the_same_start_and_no_other() -> None:
    plan = plan_of()
    assert start(plan, 0)[1] is False and start(plan, 0)[1] is True
    for changed in (plan_of(lr=1e-2), plan_of(batch=4), plan_of("seed=6"), plan_of("env.demonstration_accuracy=0.5")):
        assert start(changed, 0)[1] is False


class Spy(worlds.Wrapped):
    """A learner that remembers what it stepped on."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.seen: list[str] = []

    def step(self, batch: AdvantageBatch, objective: Any, *, lr: float, anchor: Any) -> StepReport:
        self.seen += batch.batch.groups
        return self.inner.step(batch, objective, lr=lr, anchor=anchor)


def run(plan: Plan, rows: Sequence[Dialogue], **options: Any) -> tuple[Spy, Any]:
    spy = Spy(LocalLearner("first", plan.bases["first"], serve_dtype=torch.float32))
    settings = WarmStartOptions.model_validate(START | options)
    return spy, warm_start(spy, rows, settings, agent="first", lr=3e-3, at=("test",), tick=lambda *_: None)


def test_held_out_demonstrations_are_never_stepped_on() -> None:
    plan = plan_of()
    rows = assemble.dialogues(plan, 0)
    spy, record = run(plan, rows, steps=20)
    assert record.steps == 20 and not record.reached
    assert len(set(spy.seen)) == len({d.prompt_ids + d.reply_ids for d in rows}) - START["held_out"]


def test_it_learns_and_stops_at_the_target() -> None:
    plan = plan_of(demonstrations=200)
    _, record = run(plan, assemble.dialogues(plan, 0), steps=200, target=0.2, batch=32, demonstrations=200)
    assert record.accuracy[0][1] < 0.05
    assert record.reached and record.steps < 200
    assert record.accuracy[-1][1] >= 0.2 > max(a for _, a in record.accuracy[:-1])
    assert record.steps == len(record.losses) == record.accuracy[-1][0]


def test_too_few_demonstrations_are_refused_with_their_number() -> None:
    plan = plan_of()
    rows = assemble.dialogues(plan, 0)[:10]
    with pytest.raises(DataError, match=r"warm start of 'first': 10 distinct demonstrations, 8 held out \+ one batch of 8"):
        run(plan, rows)
