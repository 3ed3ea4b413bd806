"""The four disjoint prompt sets of a run: train, probe, certify, test (ALGORITHMS 2.12)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.envs.env import Env
from baton.errors import ConfigError, DataError
from baton.types import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Splits:
    """Four disjoint sets of distinct prompts. The words "held-out" name one of the last three or nothing.

    `record` goes into the run's config record: sizes and SHA-256 of each set, salt, and equal prompts that were removed.
    """

    train: tuple[Task, ...]
    probe: tuple[Task, ...]
    certify: tuple[Task, ...]
    test: tuple[Task, ...]
    record: Mapping[str, Any]


def split(
    env: Env,
    *,
    seed: int,
    train_prompts_needed: int,
    probe_needed: int,
    certify_needed: int,
    shares: tuple[float, float, float, float] = (0.80, 0.05, 0.05, 0.10),
) -> Splits:
    """Splits an environment's tasks into (train, probe, certify, test) of about these shares.

    Tasks whose prompt and views are all equal are removed first (the first stays). A task then has a position u in
    [0, 1): of finite sets SHA-256(salt || id) as a fraction, with the seed as salt; of generated families its rank among the
    distinct ones by index, so that the sets are disjoint ranges and the same for every seed. Test takes the lowest u up to
    its share and so depends on no setting of the gate; certify and probe follow, each with its share or what it needs, at
    most a quarter of the prompts; the rest trains.

    Raises:
        ConfigError: a set is smaller than its need; states count, need and remedy.
        DataError: two tasks have one id.
    """
    if min(shares) < 0.0 or not math.isclose(sum(shares), 1.0, abs_tol=1e-9):
        raise ConfigError(f"shares {shares} are not four numbers >= 0 that sum to 1")
    tasks = [env.task(index) for index in range(env.size)]
    _refuse_shared_ids(tasks)
    place: dict[bytes, tuple[float, int]] = {}
    salt = f"baton-split-{seed}-"
    for index, task in enumerate(tasks):
        u = index / len(tasks) if env.is_generated else _fraction(salt + task.id)
        place.setdefault(_content(task), (u, index))
    order = sorted(place.values())
    n = len(order)
    if env.is_generated:
        # Places among the distinct tasks: a small family repeats itself, and all that is new in it lies at its beginning.
        order = [(rank / n, index) for rank, (_, index) in enumerate(order)]

    # Cuts by rank beyond the share's own, so that a set that needs k prompts gets exactly k where its share gives fewer.
    quarter = n // 4
    n_test = sum(u < shares[3] for u, _ in order)
    rest = order[n_test:]
    n_certify = sum(u < shares[3] + shares[2] for u, _ in rest)
    n_certify = min(max(n_certify, certify_needed), quarter)
    n_probe = sum(shares[3] + shares[2] <= u < shares[3] + shares[2] + shares[1] for u, _ in rest)
    n_probe = min(max(n_probe, probe_needed), quarter)
    cuts = (0, n_test, n_test + n_certify, n_test + n_certify + n_probe, n)
    sets = {
        name: tuple(tasks[index] for _, index in sorted(order[low:high], key=lambda item: item[1]))
        for name, low, high in zip(("test", "certify", "probe", "train"), cuts, cuts[1:], strict=False)
    }
    needs = {
        "train": (train_prompts_needed, "prompts of one update"),
        "probe": (probe_needed, "gate.probe_prompts"),
        "certify": (certify_needed, "evaluation pairs"),
        "test": (1, "reports"),
    }
    for name, (need, what) in needs.items():
        if len(sets[name]) < need:
            raise ConfigError(
                f"'{env.name}' has {n} distinct prompts ({len(tasks) - n} equal ones removed), of which {name} gets "
                f"{len(sets[name])} and needs {need} ({what}); no set but train may take more than a quarter ({quarter}): "
                f"give more prompts or lower that setting"
            )
    record = {name: {"prompts": len(chosen), "sha256": _digest(chosen)} for name, chosen in sets.items()}
    return Splits(
        train=sets["train"],
        probe=sets["probe"],
        certify=sets["certify"],
        test=sets["test"],
        record={**record, "salt": salt, "equal_prompts_removed": len(tasks) - n},
    )


def _refuse_shared_ids(tasks: Sequence[Task]) -> None:
    first: dict[str, int] = {}
    for index, task in enumerate(tasks):
        if first.setdefault(task.id, index) != index:
            raise DataError(
                f"tasks {first[task.id]} and {index} of '{task.env}' have one id, '{task.id}': the four prompt sets would "
                f"overlap; give each row an id of its own"
            )


def _fraction(text: str) -> float:
    # 53 bits: the largest fraction that a double holds exactly, so 1.0 is never reached.
    return (int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 11) / float(1 << 53)


def _content(task: Task) -> bytes:
    return hashlib.sha256(json.dumps([task.prompt, list(task.views)]).encode()).digest()


def _digest(tasks: Sequence[Task]) -> str:
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(json.dumps([task.id, task.prompt, list(task.views), task.answer]).encode())
    return digest.hexdigest()
