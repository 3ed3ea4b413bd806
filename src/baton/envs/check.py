"""The contract of an environment as code: `check_env`, re-exported by `baton.testing`."""

from __future__ import annotations

import math
from typing import Any

from baton.core.keyed import key
from baton.envs.custom import CustomEnv
from baton.envs.env import Env
from baton.types import Task

GARBAGE = (
    "",
    " \n\t ",
    "\x00\x07\x1b[31m",
    "<|im_end|><|endoftext|></s>[INST]",
    "<think>never closed \\boxed{1}",
    "</think>" * 50,
    "\\boxed{" * 50 + "1",
    "}}}{{{ \\boxed{}} \\boxed{\\",
    "\\frac{1}{",
    "((((" * 20,
    "<answer></answer><answer>",
    "Answer:",
    "0 1 2 3 4 5 6 7 8 9",
    "\ud800 \u202e \U0001f600 ٣ ½ −",
    "a" * 20_000,
    "nan",
    "-1e400",
    "None",
)
"""Texts of the kind that models write when they are not well."""


def check_env(env: Env | Any, *, tasks: int = 32) -> None:
    """Raises AssertionError, with the task and the rule, where an environment breaks the contract of `Env`.

    Checked on about `tasks` tasks spread over the index range: `task` is a function of its index, ids differ, one view per
    seat, the gold answer (in the form of the last seat's demonstration, where that is a whole answer) earns the top of the
    range, no garbage raises or leaves the range, `normalise` is idempotent and its result earns what the answer earned,
    demonstrations and ablations are functions of their arguments, facts are numbers. An object that has only `size`,
    `task` and `grade` is taken as a config would take it.
    """
    env = env if isinstance(env, Env) else CustomEnv(env)
    low, high = env.reward_range
    assert math.isfinite(low) and math.isfinite(high) and low < high, f"reward_range {env.reward_range}"
    assert env.size >= 1, f"size {env.size}: an environment needs a task"
    assert env.seats is None or env.seats >= 1, f"seats {env.seats}"
    step = max(1, env.size // tasks)
    indices = sorted({*range(0, env.size, step), env.size - 1})
    seen: dict[str, int] = {}
    for index in indices:
        task = env.task(index)
        assert task == env.task(index), f"task({index}) is not a function of its index"
        assert seen.setdefault(task.id, index) == index, f"tasks {seen[task.id]} and {index} have one id, {task.id}"
        assert task.id and task.prompt.strip(), f"{task.id}: empty id or prompt"
        if task.views and env.seats is not None:
            assert len(task.views) == env.seats, f"{task.id}: {len(task.views)} views for {env.seats} seats"
        _check_grades(env, task)
        for seat in range(env.seats or 1):
            _check_demonstration(env, task, seat)
    for text in GARBAGE:
        once = env.normalise(text)
        assert once is None or env.normalise(once) == once, f"normalise is not idempotent on {text[:40]!r}: {once!r}"
    for n_agents in range(1, 5):
        for name, value in env.facts(n_agents).items():
            assert math.isfinite(value), f"facts({n_agents})['{name}'] is {value}"
    for index in (-1, env.size):
        try:
            env.task(index)
        except LookupError:
            continue
        raise AssertionError(f"task({index}) is outside 0..{env.size - 1} and must raise MissingError")


def _check_grades(env: Env, task: Task) -> None:
    low, high = env.reward_range
    for text in GARBAGE:
        reward = env.grade(task, text).reward
        assert low <= reward <= high, f"{task.id}: {text[:40]!r} earns {reward}, outside {env.reward_range}"
        once = env.normalise(text)
        if once is not None:
            again = env.grade(task, once).reward
            assert again == reward, f"{task.id}: {text[:40]!r} earns {reward}, its canonical form {again}: {once[:40]!r}"
    if not task.answer:
        return
    demonstrated = env.demonstration(task, (env.seats or 1) - 1)
    # A file's gold answer may need the form that its grader reads; the demonstration has it.
    gold = task.answer if demonstrated is None or demonstrated.heard else demonstrated.reply
    reward = env.grade(task, gold).reward
    assert reward == high, f"{task.id}: the gold answer {gold[:40]!r} earns {reward}, not {high}"
    once = env.normalise(gold)
    assert once is not None, f"{task.id}: the gold answer {gold[:40]!r} cannot vote"
    assert env.normalise(once) == once, f"{task.id}: normalise is not idempotent on {gold[:40]!r}"


def _check_demonstration(env: Env, task: Task, seat: int) -> None:
    shown = env.demonstration(task, seat)
    if shown is None:
        return
    assert shown == env.demonstration(task, seat), f"{task.id}: demonstration of seat {seat} is not a function of its task"
    assert shown.seat == seat and shown.view == task.view(seat), f"{task.id}: demonstration shows another seat's view"
    assert shown.reply, f"{task.id}: demonstration of seat {seat} has no reply"
    said = env.ablate(task, seat, key("check", task.id, seat))
    assert said == env.ablate(task, seat, key("check", task.id, seat)), f"{task.id}: ablate is not a function of its key"
