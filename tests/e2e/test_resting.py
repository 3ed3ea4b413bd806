"""Learners that are read from disk for their updates and forgotten after: the same run in less memory."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds

import baton
from baton import assemble, records, run
from baton import journal as journals
from baton.config import Config
from baton.engines import models
from baton.engines.local import LocalLearner
from baton.engines.table import TableLearner
from baton.resting import Resting
from baton.types import Snapshot


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_CACHE", str(folder))
        yield folder


WORLDS = {
    "tables": lambda *more: worlds.parity(*more, lr=0.1),
    "bf16": lambda *more: worlds.relay("engine.dtype=bfloat16", *more),
    "adapters": lambda *more: worlds.adapters("engine.dtype=bfloat16", *more),
    "joint": lambda *more: worlds.relay("algorithm.name=joint", *more),
    "independent": lambda *more: worlds.relay("algorithm.name=independent", "algorithm.stages=2", *more),
}


def journal(path: Path) -> list[dict[str, Any]]:
    """All lines without what no two runs share: times, and the digest of a config that says keep or disk."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items() if k not in ("time", "seconds", "digest")}
        return [plain(v) for v in value] if isinstance(value, list) else value

    return [plain(line) for line in records.read_records(path / "stages.jsonl")]


@pytest.mark.parametrize("name", sorted(WORLDS))
def test_a_run_from_disk_is_the_run_in_memory_bit_for_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for resting in ("keep", "disk"):
        # Files of tiny models are read whole; here tensor by tensor, as large ones are.
        monkeypatch.setattr(records, "READ_WHOLE", 0 if resting == "disk" and name != "tables" else records.READ_WHOLE)
        run.train(WORLDS[name](f"engine.resting={resting}"), run=tmp_path / resting)
    assert worlds.final(tmp_path / "disk") == worlds.final(tmp_path / "keep")
    assert journal(tmp_path / "disk") == journal(tmp_path / "keep")
    assert max(f["steps"] for f in run.Run(tmp_path / "disk").files.values()) > 2, "moments were read back and used"


def test_a_rejected_agent_wakes_as_it_was(tmp_path: Path) -> None:
    """Rejections restore from the files, and the next update begins from them again."""
    settings = [
        worlds.relay(f"engine.resting={how}", "agents.0.radius={token=1e-4, message_mean=1e-4}") for how in ("keep", "disk")
    ]
    for number, config in enumerate(settings):
        run.train(config, run=tmp_path / str(number))
    assert worlds.final(tmp_path / "0") == worlds.final(tmp_path / "1")
    assert {u["word"] for u in run.Run(tmp_path / "1").updates if u["agent"] == "first"} == {"rejected"}


def test_a_run_from_disk_that_is_killed_goes_on_to_the_same_end(tmp_path: Path) -> None:
    settings = worlds.relay("engine.dtype=bfloat16", "engine.resting=disk", "checkpoint.keep=1")
    run.train(settings, run=tmp_path / "straight")
    worlds.kill(settings, tmp_path / "run", "after the weights", nth=2)
    worlds.kill(settings, tmp_path / "run", "before the swap", nth=1, resume=True)
    worlds.go_on(settings, tmp_path / "run")
    assert worlds.final(tmp_path / "run") == worlds.final(tmp_path / "straight")


def test_at_most_one_learner_is_in_memory_and_none_while_the_team_plays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crews: list[Any] = []
    built = assemble.crew
    monkeypatch.setattr(assemble, "crew", lambda *a, **k: (crews.append(built(*a, **k)), crews[-1])[1])
    counts: dict[str, set[int]] = {"play": set(), "step": set(), "floor": set()}

    def counting(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[what].add(sum(learner.is_awake for learner in crews[0].learners.values()))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    counting(LocalLearner, "step", "step")
    counting(LocalLearner, "relaid", "floor")
    counting(run.assemble.local.LocalSampler, "submit", "play")
    run.train(worlds.relay("engine.resting=disk", "algorithm.stages=2"), run=tmp_path / "run")
    assert counts == {"play": {0}, "step": {1}, "floor": {1}}
    counts["play"].clear(), crews.clear()
    counting(LocalLearner, "score_gradients", "score")
    counts["score"] = set()
    measured = worlds.relay("engine.resting=disk", "algorithm.stages=2", "algorithm.order=greedy")
    run.train(measured, run=tmp_path / "measured")
    assert counts == {"play": {0}, "step": {1}, "floor": {1}, "score": {1}}
    counts["play"].clear(), crews.clear()
    run.train(worlds.relay("engine.resting=keep", "algorithm.stages=2"), run=tmp_path / "kept")
    assert 2 in counts["play"]


def test_no_slot_holds_a_stale_candidate_while_the_team_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[set[str]] = []
    submit = run.assemble.local.LocalSampler.submit

    def watched(self: Any, requests: Any) -> Any:
        held.append({slot for seat in self._seats.values() for slot in seat.slots})
        return submit(self, requests)

    monkeypatch.setattr(run.assemble.local.LocalSampler, "submit", watched)
    run.train(worlds.relay("engine.resting=disk", "algorithm.stages=2"), run=tmp_path / "disk")
    assert len(held) > 8 and all(slots == {"promoted"} for slots in held)


def test_large_learners_leave_memory_by_themselves() -> None:
    for resting, expected in (("auto", [False, False, True]), ("keep", [False] * 3), ("disk", [True] * 3)):
        config: Config = worlds.relay(f"engine.resting={resting}")
        assert [assemble.leaves(config, n) for n in (65_000, 19_999_999, 20_000_000)] == expected


# ---- the wrapper -----------------------------------------------------------------------------------------------


def saved() -> Snapshot:
    learner = TableLearner("a", 2)
    learner.restore(Snapshot(weights={"row.0001": torch.tensor([0.5, -0.5], dtype=torch.float64)}, moments={}, steps=0))
    return learner.snapshot()


def test_what_a_learner_woke_with_is_its_snapshot_until_it_moves() -> None:
    made: list[TableLearner] = []
    learner = Resting(lambda: (made.append(TableLearner("a", 2)), made[-1])[1])
    origin = saved()
    learner.rest(lambda: origin)
    assert not made and not learner.is_awake
    assert learner.snapshot() is origin and learner.is_awake
    moved = Snapshot(weights={"row.0001": torch.ones(2, dtype=torch.float64)}, moments={}, steps=0)
    learner.blend(moved, origin, 1.0)
    now = learner.snapshot()
    assert now is not origin and torch.equal(now.weights["row.0001"], torch.ones(2, dtype=torch.float64))
    learner.restore(origin)
    assert learner.snapshot() is origin and worlds.same(made[0].snapshot(), origin)
    learner.restore(moved)
    assert learner.snapshot() is not origin
    learner.rest(lambda: moved)
    assert learner.snapshot() is moved and worlds.same(made[1].snapshot(), moved) and len(made) == 2


def test_tensors_of_a_large_file_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = Snapshot(weights={"w": torch.arange(6.0)}, moments={"exp_avg.w": torch.ones(6)}, steps=2)
    records.save_training(tmp_path / "t.safetensors", snapshot, with_masters=True)
    whole = records.load_training(tmp_path / "t.safetensors")
    monkeypatch.setattr(records, "READ_WHOLE", 0)
    masters, moments = records.load_training(tmp_path / "t.safetensors")
    assert isinstance(masters, records.Stored) and isinstance(whole[0], dict)
    for one, other in ((masters, whole[0]), (moments, whole[1])):
        assert list(one) == list(other) and len(one) == 1 and all(torch.equal(one[n], other[n]) for n in one)
    with pytest.raises(KeyError):
        moments["w"]


# ---- what is loaded, and who waits -----------------------------------------------------------------------------


def test_a_team_and_its_start_are_measured_on_models_that_are_loaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And come to what they come to when each is loaded anew."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    run.train(worlds.relay("algorithm.stages=1"), run=tmp_path / "run")
    made: list[tuple[str, ...]] = []
    crew = assemble.crew

    def counted(config: Any, folders: Any, *, learners: Any) -> Any:
        made.append(tuple(folders))
        return crew(config, folders, learners=learners)

    monkeypatch.setattr(assemble, "crew", counted)
    kept = baton.evaluate(tmp_path / "run", baselines=False, episodes=16)["rows"]
    assert made == [("first", "second")]
    monkeypatch.setattr(assemble.LocalCrew, "fits", lambda *_: False)
    anew = baton.evaluate(tmp_path / "run", baselines=False, episodes=16)["rows"]
    assert len(made) == 3 and kept == anew
    assert {row["name"] for row in kept} == {"team", "untrained team"}


def test_the_models_of_another_measurement_are_not_taken_for_these(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    settings = worlds.relay()
    small, large = (models.resolve(spec) for spec in ("tiny:64k", "tiny:100k"))
    crew = assemble.crew(settings, dict.fromkeys(("first", "second"), small), learners=[])
    assert crew.fits("first", small) and not crew.fits("first", large)


@pytest.mark.skipif(sys.platform != "linux", reason="niceness of a thread is Linux's")
def test_whoever_writes_gives_way_to_the_loop() -> None:
    with ThreadPoolExecutor(max_workers=1, initializer=journals._give_way) as pool:  # pyright: ignore[reportPrivateUsage]
        there = pool.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result()
    assert there == journals.GIVES_WAY and os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 19
