"""The speed scripts: their arithmetic and their clock, without timing anything."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
import sides

from baton.errors import MissingError, RunError


def test_the_exponent_of_a_power_is_found_whatever_its_factor() -> None:
    sizes = [1, 2, 3, 4, 5, 6]
    for power in (0.5, 1.0, 1.9):
        assert sides.exponent(sizes, [7.0 * n**power for n in sizes]) == pytest.approx(power)
    with pytest.raises(MissingError, match="at least two"):
        sides.exponent([3, 3], [1.0, 2.0])


def test_each_round_begins_with_another_arm() -> None:
    calls: list[str] = []

    def arm(name: str) -> int:
        calls.append(name)
        return calls.count(name)

    found = sides.alternate({n: lambda n=n: arm(n) for n in "abc"}, 3)
    assert "".join(calls) == "abcbcacab"
    assert found == {n: [1, 2, 3] for n in "abc"}


def test_a_clock_counts_time_for_the_innermost_name_and_adds_up_to_the_wall() -> None:
    at = [0.0]
    clock = sides.Clock(now=lambda: at[0])

    def wait(seconds: float) -> None:
        at[0] += seconds

    async def inner() -> None:
        wait(2.0)

    inside = clock.timed("inner", inner)

    async def outer() -> None:
        wait(1.0)
        await inside()
        await inside()
        wait(0.5)

    wait(0.25)
    asyncio.run(clock.timed("outer", outer)())
    clock.timed("end", lambda: wait(4.0), marks=True)()
    clock.timed("end", lambda: wait(3.0), marks=True)()
    first, second = clock.rows
    assert first.own == {"": 0.25, "outer": 1.5, "inner": 4.0, "end": 4.0}
    assert first.calls == {"inner": [2.0, 2.0], "outer": [5.5], "end": [4.0]}
    assert (first.wall, first.total("outer", "end", "absent")) == (9.75, 9.5)
    assert (second.own, second.wall) == ({"": 0.0, "end": 3.0}, 3.0)


ECHO = """
from wire import heard, tell
print("a library says something")
tell(ready=True)
while True:
    tell(twice=2 * heard()["number"])
"""


def test_a_side_answers_when_asked_and_says_why_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "wire.py").write_text((sides.HERE / "peers" / "wire.py").read_text())
    (tmp_path / "peers" / "echo.py").write_text(ECHO)
    monkeypatch.setattr(sides, "HERE", tmp_path)
    with sides.Side("echo", sys.executable, "echo.py", {}, threads=1) as side:
        assert side.answer() == {"ready": True}
        assert side.ask(number=21) == {"twice": 42}
        with pytest.raises(RunError, match=r"(?s)'echo' ended with 1: .*KeyError"):
            side.ask(wrong=1)


def test_a_peer_that_is_not_installed_is_absent(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="make peers"):
        sides.peer("trl", tmp_path)


def test_an_update_beside_trl_is_one_optimiser_step_of_the_workload() -> None:
    sys.path.insert(0, str(sides.HERE / "peers"))
    import baton_train
    import vs_trl

    settings = {**vs_trl.WORKLOAD, "folder": "tiny:64k", "seed": 0, "steps": 6, "threads": 1}
    plain, gated = (baton_train.config({**settings, "how": how}) for how in ("plain", "gate"))
    for config in (plain, gated):
        assert config.algorithm.inner_steps == 1
        assert config.algorithm.episodes == 64
        assert json.loads(json.dumps(vs_trl.WORKLOAD))["group"] == config.algorithm.group
    assert plain.radius(plain.agents[0]).token == float("inf")
    assert gated.radius(gated.agents[0]).token == 0.05
