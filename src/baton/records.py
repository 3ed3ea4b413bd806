"""The run directory as data: what a record says, and writing it so that a crash leaves the old or the new, never half.

    runs/<name>/
      config.toml            resolved
      stages.jsonl           one line per event (`kind`): start, begin, update, stage, resume, end; flushed and fsynced
      team.json              which agent at which version, in which folder
      state/<agent>/v00003/  a promoted version as a plain `from_pretrained` (or PEFT) folder, in the serving dtype
      state/<agent>/training-00012.safetensors   AdamW moments (and fp32 masters where they differ from what is served)
      episodes/, divergences/                    parquet, one file per agent update; episodes/start.parquet
      evaluations/001.json, 001.parquet          a report of `baton evaluate`, and the episodes it rests on

An update's line is the commit point of its promotion: the files it names are durable before it is written. Nothing here
is a pickle and nothing needs baton to be read.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.algorithms.acceptance import ReplaySums
from baton.algorithms.state import AgentState, Evidence, Pair, Position, StageEntry, StagePlan
from baton.core.certificate import Certificate, Term
from baton.errors import RunError, cause
from baton.team import Member, Team
from baton.types import Episode, Failed, GateRecord, Outcome, Scored, Snapshot, TokenDivergence, Truncated, Turn

SCHEMA = 1

Record = dict[str, Any]


# ---- durable writes --------------------------------------------------------------------------------------------


@contextmanager
def writing(path: Path) -> Generator[None]:
    """A write that the disk refuses (full, gone, read-only) as a RunError; what was complete before it stays."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"{path} could not be written ({error}); what was complete before is whole: make room, then call the same "
            "command again (training that has begun: with --resume)"
        ) from error


_MASK = os.umask(0)
os.umask(_MASK)
_READABLE = 0o666 & ~_MASK
"""Rights of what is written: the user's own umask decides. Some writers (safetensors) would keep everybody else out."""


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Make every file below a folder durable and readable as the umask says, then the names."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            path.chmod(_READABLE)
            with path.open("rb") as handle:
                os.fsync(handle.fileno())
    sync_folder(folder)


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """A file made by `write` under a temporary name, fsynced and renamed into place."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        write(partial)
        partial.chmod(_READABLE)
        with partial.open("rb") as handle:
            os.fsync(handle.fileno())
        partial.replace(path)
        sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """A text file, whole or not at all."""
    write_file(path, lambda partial: cast("None", partial.write_text(text, encoding="utf-8")))


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """A folder made by `write` under a temporary name, fsynced and renamed into place; an older one is replaced."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        write(partial)
        sync_tree(partial)
        if path.exists():
            shutil.rmtree(path)
        partial.replace(path)
        sync_folder(path.parent)


# ---- the journal file ------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A record's value as JSON knows it: dataclasses as objects with their kind where a union needs it, tuples as lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        name = type(value).__name__
        return {"kind": name.lower(), **out} if name in ("Accepted", "Rejected") else out
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in cast("Sequence[Any]", value)]
    return value


def append_record(path: Path, record: Record) -> None:
    """One JSON line, flushed and fsynced before this returns. Infinities are written as JSON5 does (Infinity)."""
    line = json.dumps({"schema": SCHEMA, **record}, ensure_ascii=False, separators=(",", ":")) + "\n"
    with writing(path):
        is_new = not path.exists()
        with path.open("ab") as handle:
            handle.write(line.encode())
            handle.flush()
            os.fsync(handle.fileno())
        if is_new:
            sync_folder(path.parent)


def differences(one: Any, other: Any, at: str = "", *, relative: float = 0.0) -> list[tuple[str, Any, Any]]:
    """(dotted path, one, other) wherever two JSON values differ; numbers by more than `relative` of the larger one."""
    if isinstance(one, dict) and isinstance(other, dict):
        left, right = cast("Record", one), cast("Record", other)
        absent = "(absent)"
        return [
            found
            for name in [*left, *(n for n in right if n not in left)]
            for found in differences(
                left.get(name, absent), right.get(name, absent), f"{at}.{name}" if at else name, relative=relative
            )
        ]
    if isinstance(one, list) and isinstance(other, list):
        ours, theirs = cast("list[Any]", one), cast("list[Any]", other)
        if len(ours) == len(theirs):
            pairs = enumerate(zip(ours, theirs, strict=True))
            return [f for i, (a, b) in pairs for f in differences(a, b, f"{at}.{i}" if at else str(i), relative=relative)]
    numbers = (int, float)
    if isinstance(one, numbers) and isinstance(other, numbers) and not isinstance(one, bool):
        same = one == other or (relative > 0.0 and math.isclose(one, other, rel_tol=relative, abs_tol=1e-15))
    else:
        same = type(one) is type(other) and one == other
    return [] if same else [(at, one, other)]


def read_records(path: Path) -> list[Record]:
    """Every complete line. A last line without its newline was being written when the process died and is left out.

    Raises:
        RunError: a complete line is no record, or is of another schema (names both).
    """
    if not path.exists():
        return []
    records: list[Record] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise RunError(f"{path}, line {number} is damaged ({error}); restore the file from a copy") from error
        if not isinstance(record, dict) or cast("Record", record).get("schema") != SCHEMA:
            found = cast("Record", record).get("schema") if isinstance(record, dict) else None
            raise RunError(f"{path}, line {number} has schema {found}; this version reads schema {SCHEMA}")
        records.append(cast("Record", record))
    return records


def rewrite_records(path: Path, records: Sequence[Record]) -> None:
    """Replace the journal atomically (an incomplete joint stage is taken back; a torn last line is dropped)."""
    lines = [json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n" for record in records]
    write_text(path, "".join(lines))


# ---- positions -------------------------------------------------------------------------------------------------


def position_record(position: Position) -> Record:
    """A position as JSON; `read_position` gives an equal one."""
    return cast("Record", plain(position))


def _agent_state(record: Record) -> AgentState:
    rest = {k: v for k, v in record.items() if k != "replay"}
    return AgentState(replay=ReplaySums(**record["replay"]), **rest)


def read_position(record: Record) -> Position:
    """The position that a record holds."""
    return Position(
        team=Team(members=tuple(Member(**m) for m in record["team"]["members"])),
        agents={name: _agent_state(state) for name, state in record["agents"].items()},
        done=record["done"],
        stalled=tuple((str(reason), float(reward)) for reason, reward in record["stalled"]),
        entries=tuple(StageEntry(**entry) for entry in record["entries"]),
        stage=_stage_plan(record.get("stage")),
        moved=None if record.get("moved") is None else tuple(record["moved"]),
    )


def _stage_plan(record: Record | None) -> StagePlan | None:
    if record is None:
        return None
    return StagePlan(order=tuple(record["order"]), radii=record["radii"], gains=record["gains"])


def read_looks(record: Record) -> tuple[GateRecord, ...]:
    """The looks of an update's record."""
    return tuple(GateRecord(**look) for look in record["looks"])


def read_certificate(record: Record) -> Certificate:
    """The certificate that a record holds. JSON5's infinities come back as they were."""
    rest = {k: v for k, v in record.items() if k != "terms"}
    return Certificate(terms=tuple(Term(**term) for term in record["terms"]), **rest)


# ---- versions --------------------------------------------------------------------------------------------------


def version_folder(agent: str, version: int) -> str:
    """Where a promoted version lies in a run directory."""
    return f"state/{agent}/v{version:05d}"


def version_of(folder: Path) -> int:
    """The version whose folder this is; 0 for a model from outside a run."""
    return int(folder.name[1:]) if re.fullmatch(r"v\d{5,}", folder.name) else 0


# ---- training state --------------------------------------------------------------------------------------------


def save_training(path: Path, snapshot: Snapshot, *, with_masters: bool) -> None:
    """Moments, and masters where they differ from what is served, as safetensors."""
    tensors: dict[str, Tensor] = {f"moment.{k}": v.contiguous() for k, v in snapshot.moments.items()}
    if with_masters:
        tensors |= {f"master.{k}": v.contiguous() for k, v in snapshot.weights.items()}
    # One entry: safetensors writes several in an order of its own, and equal states must be equal files.
    metadata = {"baton": json.dumps({"schema": SCHEMA, "steps": snapshot.steps, "crc32": _crc(tensors)})}
    write_file(path, lambda partial: save_file(tensors, partial, metadata=metadata))


def _crc(tensors: Mapping[str, Tensor]) -> int:
    """CRC-32 over names and bytes, by name, against damage: SHA-256 would take seconds of an update of GBs."""
    crc = 0
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(name.encode(), crc))
    return crc


def check_training(path: Path) -> None:
    """Read all of a training file. Raises RunError where it is missing, cut off, or not what was written."""
    with _reading(path), safe_open(path, "pt") as file:
        said = json.loads((file.metadata() or {}).get("baton", "{}")).get("crc32")
    if said != _crc(stored(path)):
        raise RunError(f"{path} is damaged: its tensors are not those that were written; restore it from a copy of the run")


def load_training(path: Path) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """(masters, moments); masters are empty where the served weights are the masters."""
    return stored(path, "master."), stored(path, "moment.")


READ_WHOLE = 2**26
"""Bytes up to which a file of tensors is read at once; the tensors of a larger one are read when they are asked for."""


class Stored(Mapping[str, Tensor]):
    """Tensors that lie in a safetensors file, read anew each time one is asked for: nothing is held in memory."""

    def __init__(self, path: Path, prefix: str) -> None:
        self.path, self.prefix = path, prefix
        with _reading(path), safe_open(path, "pt") as file:
            self._names = frozenset(k.removeprefix(prefix) for k in file.keys() if k.startswith(prefix))  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        with _reading(self.path), safe_open(self.path, "pt") as file:
            return file.get_tensor(self.prefix + name)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)


def stored(path: Path, prefix: str = "") -> Mapping[str, Tensor]:
    """The tensors of a file whose names begin with `prefix`, by the rest of their names."""
    with _reading(path):
        if path.stat().st_size > READ_WHOLE:
            return Stored(path, prefix)
        return {k.removeprefix(prefix): v for k, v in load_file(path).items() if k.startswith(prefix)}


@contextmanager
def _reading(path: Path) -> Generator[None]:
    """Raises RunError where a file of tensors is missing, cut off or damaged."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read ({cause(error)}); restore it from a copy of the run") from error


def moment_names(path: Path) -> frozenset[str]:
    """Which moments a training file holds; no tensor is read."""
    with _reading(path), safe_open(path, "pt") as file:
        return frozenset(k.removeprefix("moment.") for k in file.keys() if k.startswith("moment."))  # noqa: SIM118


# ---- episodes and divergences ----------------------------------------------------------------------------------


def _outcome(episode: Episode) -> tuple[str, float | None, str]:
    outcome = episode.outcome
    if isinstance(outcome, Failed):
        return "failed", None, outcome.reason
    return ("truncated" if isinstance(outcome, Truncated) else "scored"), outcome.reward, outcome.reason


def episode_rows(episodes: Sequence[Episode], *, use: str, prompts: Mapping[str, str]) -> list[Record]:
    """Episodes as rows of a parquet file; `use` is start, train, probe, order, pair, beside, restated or a measurement's."""
    rows: list[Record] = []
    for e in episodes:
        kind, reward, reason = _outcome(e)
        rows.append(
            {
                "id": e.id,
                "use": use,
                "task_id": e.task_id,
                "prompt": prompts.get(e.task_id, ""),
                "outcome": kind,
                "reward": reward,
                "reason": reason,
                "answer": e.answer,
                "versions": json.dumps(dict(e.versions)),
                "turns": [
                    {
                        "kind": t.kind,
                        "agent": t.agent,
                        "seat": t.seat,
                        "text": t.text,
                        "prompt_ids": list(t.prompt_ids),
                        "ids": list(t.ids),
                        "logprobs": list(t.logprobs),
                        "versions": list(t.versions),
                        "finish_reason": t.finish_reason,
                        "cut": t.cut,
                    }
                    for t in e.turns
                ],
            }
        )
    return rows


def pair_rows(pairs: Sequence[Pair], *, prompts: Mapping[str, str]) -> list[Record]:
    """Pairs as rows: all of the promoted team's, then the other's in the same order."""
    promoted = episode_rows([p.promoted for p in pairs], use="pair", prompts=prompts)
    return promoted + episode_rows([p.beside for p in pairs], use="beside", prompts=prompts)


def stage_pairs_file(stage: int) -> str:
    """Where the pairs of a stage lie in a run directory."""
    return f"episodes/stage-{stage:06d}.parquet"


TURN = pa.struct(
    [
        ("kind", pa.string()),
        ("agent", pa.string()),
        ("seat", pa.int32()),
        ("text", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float64())),
        ("versions", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("cut", pa.bool_()),
    ]
)
EPISODES = pa.schema(
    [
        ("id", pa.string()),
        ("use", pa.string()),
        ("task_id", pa.string()),
        ("prompt", pa.string()),
        ("outcome", pa.string()),
        ("reward", pa.float64()),
        ("reason", pa.string()),
        ("answer", pa.string()),
        ("versions", pa.string()),
        ("turns", pa.list_(TURN)),
    ]
)


def write_episodes(path: Path, rows: Sequence[Record]) -> None:
    """Episodes as parquet."""
    table = pa.Table.from_pylist(list(rows), schema=EPISODES)
    write_file(path, lambda partial: pq.write_table(table, partial, compression="zstd"))


def _read_parquet(path: Path, schema: Any, columns: Sequence[str] | None = None) -> Any:
    try:
        # Small files: a thread pool costs more than it saves.
        with pq.ParquetFile(path) as file:
            has, table = file.schema_arrow, file.read(columns=columns, use_threads=False)
    except FileNotFoundError as error:
        raise RunError(f"{path} is gone; restore it from a copy") from error
    except (OSError, pa.ArrowException) as error:
        raise RunError(f"{path} is damaged ({str(error).splitlines()[0]}); restore it from a copy") from error
    if not has.equals(schema):
        raise RunError(f"{path} is no such file: it has the columns {has.names}, wanted are {schema.names}")
    return table


def read_episodes(path: Path, columns: Sequence[str] | None = None) -> list[Record]:
    """The rows of an episodes file, with all columns or these: leaves by their path, such as `turns.list.element.agent`.

    Raises:
        RunError: it is gone, damaged, or has other columns.
    """
    return _read_parquet(path, EPISODES, columns).to_pylist()


def read_episode(row: Record) -> Episode:
    """The episode that a row holds; `episode_rows` of it gives an equal row.

    Raises:
        MissingError, NonFiniteError, DataError: a turn's columns do not fit each other, or a number is none.
    """
    outcome: Outcome
    if row["outcome"] == "failed":
        outcome = Failed(reason=row["reason"])
    else:
        kind = {"scored": Scored, "truncated": Truncated}[row["outcome"]]
        outcome = kind(reward=float(row["reward"]), reason=row["reason"])
    turns = (t | {name: tuple(t[name]) for name in ("prompt_ids", "ids", "logprobs", "versions")} for t in row["turns"])
    return Episode(
        id=row["id"],
        group=row["task_id"],
        task_id=row["task_id"],
        versions=json.loads(row["versions"]),
        turns=tuple(Turn(**t) for t in turns),
        answer=row["answer"],
        outcome=outcome,
    )


DIVERGENCES = pa.schema(
    [
        ("scale", pa.float64()),
        ("episode", pa.string()),
        ("token", pa.int64()),
        ("message", pa.int64()),
        ("prompt", pa.int64()),
        ("drawn", pa.bool_()),
        ("kl_new_old", pa.float64()),
        ("kl_old_new", pa.float64()),
    ]
)


def write_divergences(path: Path, evidence: Evidence) -> None:
    """KL of every probe state at every look, in nats, with the episode, message and token it belongs to."""
    states = evidence.states
    if states is None or not evidence.looks:
        return
    columns: dict[str, list[Any]] = {name: [] for name in DIVERGENCES.names}
    drawn = set(states.drawn.tolist())
    message, unit = states.message.tolist(), states.unit.tolist()
    for record, divergence in evidence.looks:
        rows, positions = divergence.row.tolist(), divergence.position.tolist()
        columns["scale"] += [record.scale] * len(rows)
        columns["episode"] += [states.batch.episode_ids[r] for r in rows]
        columns["token"] += positions
        columns["message"] += message
        columns["prompt"] += unit
        columns["drawn"] += [n in drawn for n in range(len(rows))]
        columns["kl_new_old"] += divergence.kl_new_old.tolist()
        columns["kl_old_new"] += divergence.kl_old_new.tolist()
    table = pa.table(columns, schema=DIVERGENCES)
    write_file(path, lambda partial: pq.write_table(table, partial, compression="zstd"))


@dataclass(frozen=True, kw_only=True)
class LookRows:
    """What a divergences file holds of one look: its states in order, each with its episode, message, prompt and KLs."""

    scale: float
    episode: tuple[str, ...]
    divergence: TokenDivergence
    """`row` numbers the episodes by first appearance."""
    message: Int[Tensor, " N"]
    unit: Int[Tensor, " N"]
    drawn: Int[Tensor, " U"]


def read_divergences(path: Path) -> list[LookRows]:
    """Every look of an update, in the order in which it was taken.

    Raises:
        RunError: the file is gone, damaged, or has other columns.  NonFiniteError: a divergence is NaN.
    """
    table = _read_parquet(path, DIVERGENCES)
    columns: dict[str, list[Any]] = table.to_pydict()
    # Every look is at the same states, so the first one comes again; two looks can be of one scale (retries).
    places = list(zip(columns["message"], columns["token"], strict=True))
    scales = columns["scale"]
    starts = [n for n in range(len(places)) if n == 0 or places[n] == places[0] or scales[n] != scales[n - 1]]
    edges = [*starts, len(places)]
    looks: list[LookRows] = []
    for first, end in pairwise(edges):
        part = {name: values[first:end] for name, values in columns.items()}
        place = {name: n for n, name in enumerate(dict.fromkeys(part["episode"]))}
        looks.append(
            LookRows(
                scale=part["scale"][0],
                episode=tuple(part["episode"]),
                divergence=TokenDivergence(
                    kl_new_old=torch.tensor(part["kl_new_old"], dtype=torch.float64),
                    kl_old_new=torch.tensor(part["kl_old_new"], dtype=torch.float64),
                    row=torch.tensor([place[name] for name in part["episode"]]),
                    position=torch.tensor(part["token"]),
                ),
                message=torch.tensor(part["message"]),
                unit=torch.tensor(part["prompt"]),
                drawn=torch.tensor(part["drawn"]).nonzero()[:, 0],
            )
        )
    return looks


# ---- one process per run ---------------------------------------------------------------------------------------


def is_locked(folder: Path) -> bool:
    """Another process holds the run directory now."""
    try:
        with (folder / ".lock").open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Hold the run directory: a second process is refused instead of writing beside the first. A directory that this call
    made and in which nothing was written is gone again afterwards: a refused config leaves no trace.

    Raises:
        RunError: another process holds it, or the directory cannot be written.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / ".lock").open("a")
    except OSError as error:
        raise RunError(f"run directory {folder} cannot be written ({error.strerror}); choose another with --run") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(f"run {folder} is in use by another process; wait for it or choose another --run") from error
        try:
            yield
        finally:
            if is_new and folder.is_dir() and [path.name for path in folder.iterdir()] == [".lock"]:
                (folder / ".lock").unlink()
                folder.rmdir()
