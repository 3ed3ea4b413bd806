"""A run can be checked by somebody who only has its directory: an honest one holds, and what was changed afterwards is found
and named, also where the simple sums were mended too (ALGORITHMS 2.2, 2.4, 2.5, 2.12, 5.6)."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tomli_w
import torch
import worlds
from safetensors.torch import load_file, save_file
from test_frozen import first_bit, server, with_endpoint

import baton
from baton import assemble, console, records, run
from baton.audit import (
    CHECKS,
    FAILED_EPISODE,
    FOREIGN,
    KL_FLOOR,
    NOT_ALLOCATED,
    NOT_CALLED,
    NOT_COUPLED,
    NOT_HEARD,
    NOT_MEASURED,
    NOT_PROMOTED,
    NOT_SAMPLED,
    NOT_STEPPED,
    PRUNED,
    kl_tolerance,
)
from baton.cli import main
from baton.config import Config, digest_of
from baton.errors import BatonError, ConfigError, RunError
from baton.evaluation import evaluate
from baton.records import Record
from baton.types import Snapshot

KEEP = "checkpoint.keep_promoted=all"
TABLES = worlds.parity(KEEP, "algorithm.stages=4", "env.prompts=200", "agents.b.lr=5")
"""a learns; b steps so far that it is shrunk or rejected."""
MODELS = worlds.relay(KEEP, "algorithm.stages=2", "agents.second.radius={token=0.5,message_mean=0.005}")
OTHERS = {
    "joint": worlds.parity(KEEP, "algorithm.name=joint", "env.prompts=300", "agents.b.lr=5", agents="abc"),
    "vote": worlds.parity(KEEP, "protocol={name='vote'}", "env.prompts=200", "agents.b.lr=5", agents="abc"),
    "rounds": worlds.parity(KEEP, "protocol={name='chain',rotate=true,rounds=2}", "env.prompts=200", "algorithm.stages=2"),
    "independent": worlds.parity(KEEP, "algorithm.name=independent", "env.prompts=200", agents="ab"),
    "batch mean": worlds.parity("algorithm.group=1", "algorithm.objective.baseline=batch_mean", "algorithm.stages=2", KEEP),
}

SHORT = (KEEP, "algorithm.stages=2", "env.prompts=200")
ABC = {"agents": "abc"}
REUSE = worlds.parity(*SHORT, "algorithm.data=reuse", "algorithm.order=static", **ABC)
RETRIES = worlds.parity(*SHORT, "algorithm.backtrack.tries=3", "agents.b.lr=5")
RADII = worlds.parity(*SHORT, "algorithm.radius_allocation=greedy", **ABC)
BOTH = ("certificate.update_pairs=256", "certificate.stage_pairs=256")
PAIRS = worlds.parity(*SHORT, "env.prompts=400", "agents.b.lr=5", *BOTH)
WHOLE = ("certificate.surrogate=true", "gate.probe_prompts=500", "env.prompts=3000")
SURROGATE = worlds.parity(*SHORT, *WHOLE, "agents.b.lr=5")
OPTIONS = {
    "reuse": (REUSE, set[str]()),
    "reuse without weights": (
        worlds.parity(*SHORT, "algorithm.data=reuse", "algorithm.order=static", "algorithm.reuse.weights=none", **ABC),
        set[str](),
    ),
    "reuse given up": (
        worlds.parity(*SHORT, "algorithm.data=reuse", "algorithm.order=static", "algorithm.reuse.ess_floor=1.0"),
        set[str](),
    ),
    "retries": (RETRIES, set[str]()),
    "order greedy": (worlds.parity(*SHORT, "algorithm.order=greedy"), {NOT_MEASURED}),
    "order bandit": (worlds.parity(*SHORT, "algorithm.order=bandit", "algorithm.stages=3", **ABC), set[str]()),
    "radii greedy": (RADII, {NOT_MEASURED}),
    "radii by gains that are not recorded": (
        worlds.parity(*SHORT, "algorithm.radius_allocation=greedy", "algorithm.order=grad_norm"),
        {NOT_MEASURED, NOT_ALLOCATED},
    ),
    "joint radii": (
        worlds.parity(*SHORT, "algorithm.name=joint", "algorithm.radius_allocation=greedy"),
        {NOT_MEASURED},
    ),
    "frozen": (worlds.parity(*SHORT, "agents.a.trainable=false", 'agents.a.lr="auto"'), set[str]()),
    "frozen, joint": (
        worlds.parity(*SHORT, "algorithm.name=joint", "agents.a.trainable=false", 'agents.a.lr="auto"', **ABC),
        set[str](),
    ),
    "frozen model": (
        worlds.relay(
            KEEP,
            "algorithm.stages=1",
            "engine.dtype=bfloat16",
            *("agents.first.trainable=false", 'agents.first.lr="auto"', 'agents.first.radius="preset"'),
        ),
        set[str](),
    ),
    "pairs": (PAIRS, {NOT_COUPLED}),
    "pairs apart, of models": (
        worlds.relay(
            KEEP, "algorithm.stages=1", "env.prompts=400", "certificate.stage_pairs=256", "certificate.coupling=none"
        ),
        {NOT_COUPLED},
    ),
    "pairs of a joint stage": (
        worlds.parity(*SHORT, "algorithm.name=joint", "env.prompts=400", *BOTH, "certificate.method=bernstein"),
        {NOT_COUPLED},
    ),
    "surrogate": (SURROGATE, set[str]()),
    "surrogate of a debate, beside pairs": (
        worlds.parity(*SHORT, *WHOLE, *BOTH, "algorithm.stages=1", "protocol={name='debate',rounds=2}", lr=0.05),
        {NOT_COUPLED},
    ),
    "surrogate of a joint stage": (
        worlds.parity(*SHORT, *WHOLE, "algorithm.name=joint", "certificate.run_level=true", **ABC),
        set[str](),
    ),
    "surrogate of few prompts": (worlds.parity(*SHORT, "certificate.surrogate=true"), set[str]()),
    "surrogate of a model": (
        worlds.relay(KEEP, *WHOLE, "env.symbols=6", "algorithm.stages=1", "agents.second.radius={token=50,message_mean=50}"),
        set[str](),
    ),
    "adapters": (worlds.adapters(KEEP, "algorithm.stages=1"), set[str]()),
    "adapters in bf16": (worlds.adapters(KEEP, "algorithm.stages=1", "engine.dtype=bfloat16"), set[str]()),
    "an adapter and a model": (
        worlds.relay(KEEP, "algorithm.stages=1", "agents.1.adapter=lora", "agents.1.lr=0.03"),
        set[str](),
    ),
    "nobody calls": (
        worlds.router(*SHORT, "agents.r.model='table:01'", "agents.r.max_new_tokens=1", "algorithm.min_informative=1"),
        {NOT_CALLED},
    ),
}
"""Config and what of it cannot be checked."""
PLAIN = [settings for name, (settings, _) in OPTIONS.items() if not name.startswith(("frozen", "adapters in"))]
"""Evaluated like any other, so they are not."""

EXPECTED = {
    NOT_STEPPED,
    NOT_SAMPLED,
    NOT_PROMOTED,
}
"""What no audit can check; of an honest run that keeps all versions, nothing else (but a model from outside)."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Config], Path]]:
    """The run of a config, trained and evaluated once; copies are to be changed, it is not."""
    folder = tmp_path_factory.mktemp("honest")
    done: dict[str, Path] = {}

    def of(settings: Config) -> Path:
        text = settings.to_toml()
        if text not in done:
            done[text] = folder / str(len(done))
            run.train(settings, run=done[text])
            if settings not in PLAIN:
                evaluate(done[text], episodes=16, full_information="tiny:64k" if settings is MODELS else None)
        return done[text]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_CACHE", str(folder / "cache"))
        yield of


@pytest.fixture
def copy(made: Callable[[Config], Path], tmp_path: Path) -> Callable[[Config], Path]:
    def of(settings: Config) -> Path:
        return Path(shutil.copytree(made(settings), tmp_path / "run"))

    return of


# ---- helpers of a forger ---------------------------------------------------------------------------------------


def faults(path: Path) -> list[str]:
    """Every fault as `check: line`."""
    report = baton.verify(path)
    assert report["holds"] == (not report["faults"])
    return [f"{fault['check']}: {console.fault_line(fault)}" for fault in report["faults"]]


def named(found: Sequence[str], check: str, *words: str) -> bool:
    """Whether some fault of this check holds all the words."""
    return any(line.startswith(f"{check}: ") and all(word in line for word in words) for line in found)


def lines_of(path: Path) -> list[Record]:
    return records.read_records(path / "stages.jsonl")


def rewrite(path: Path, lines: Sequence[Record]) -> None:
    records.rewrite_records(path / "stages.jsonl", lines)


def change_update(path: Path, index: int, change: Callable[[Record], Any]) -> Record:
    """Change the line of update `index`; gives it."""
    lines = lines_of(path)
    line = next(one for one in lines if one["kind"] == "update" and one["index"] == index)
    change(line)
    rewrite(path, lines)
    return line


def change_rows(path: Path, file: str, change: Callable[[list[Record]], Any]) -> None:
    rows = records.read_episodes(path / file)
    change(rows)
    records.write_episodes(path / file, rows)


def update_of(path: Path, word: str, agent: str | None = None) -> Record:
    """The first update with this verdict."""
    return next(u for u in run.Run(path).updates if u["word"] == word and agent in (None, u["agent"]))


def mend_sums(path: Path) -> None:
    """What a forger mends after changing rewards: mean rewards, and the positions that carry them."""
    lines = lines_of(path)
    for line in lines:
        if line["kind"] == "update":
            rows = [r for r in records.read_episodes(path / line["episodes_file"]) if r["use"] == "train"]
            rewards = [r["reward"] for r in rows if r["outcome"] != "failed"]
            line["episodes"]["reward"] = sum(rewards) / len(rewards)
            for lost in line["position"]["stalled"][-1:]:
                lost[1] = line["episodes"]["reward"] if line["word"] == "rejected" else lost[1]
    rewrite(path, lines)


# ---- honest runs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tables", "models", *OTHERS])
def test_an_honest_run_holds_and_nothing_unexpected_goes_unchecked(name: str, made: Callable[[Config], Path]) -> None:
    path = made({"tables": TABLES, "models": MODELS, **OTHERS}[name])
    words = {u["word"] for u in run.Run(path).updates}
    assert words >= {
        "tables": {"accepted", "shrunk", "rejected"},
        "models": {"accepted", "shrunk", "rejected"},
        "joint": {"accepted", "shrunk", "rejected"},
    }.get(name, {"accepted"})
    report = baton.verify(path)
    assert report["faults"] == [] and report["holds"]
    assert {one["reason"] for one in report["not_checked"]} <= EXPECTED | ({FOREIGN} if name == "models" else set())
    assert {check["check"] for check in report["checks"] if check["checked"]} == set(CHECKS) - {"pairs", "surrogate", "swap"}
    checked = {check["check"]: check["checked"] for check in report["checks"]}
    updates = run.Run(path).updates
    promoted = [u for u in updates if u["to_version"] is not None]
    assert checked["verdicts"] == len(updates) and checked["divergences"] == len(promoted)
    assert checked["gate"] == sum(len(u["looks"]) for u in updates)
    assert report["largest_gaps"]["divergences"] == 0.0, "the same machine and threads give the same bits"


@pytest.mark.parametrize("name", OPTIONS)
def test_an_honest_run_of_every_kind_holds(name: str, made: Callable[[Config], Path]) -> None:
    settings, expected = OPTIONS[name]
    path = made(settings)
    updates = run.Run(path).updates
    used = {
        "reuse": any(u["reuse"]["changed"] and not u["reuse"]["is_resampled"] for u in updates if u["reuse"]),
        "reuse given up": any(u["reuse"]["is_resampled"] for u in updates if u["reuse"]),
        "retries": any(u["word"] != "rejected" and u["verdict"]["gate"]["attempt"] for u in updates),
    }
    assert used.get(name, True), "the run does what it is here for"
    assert name == "nobody calls" or any(u["to_version"] is not None for u in updates)
    report = baton.verify(path)
    assert report["faults"] == []
    assert {one["reason"] for one in report["not_checked"]} <= EXPECTED | expected
    assert {one["reason"] for one in report["not_checked"]} >= expected
    checked = {check["check"]: check["checked"] for check in report["checks"]}
    assert checked["verdicts"] == len(updates) and checked["gate"] == sum(len(u["looks"]) for u in updates)
    assert checked["divergences"] == sum(u["to_version"] is not None for u in updates)
    assert report["largest_gaps"].get("divergences", 0.0) == 0.0


@pytest.mark.parametrize("name", ["debate", "router"])
def test_an_honest_run_of_a_shipped_example_holds(name: str, tmp_path: Path) -> None:
    """Also where an agent was not asked often enough to be updated."""
    config = Path(__file__).parents[2] / "configs" / f"{name}.toml"
    short = [KEEP, "algorithm.stages=3", "algorithm.episodes=32", "gate.probe_prompts=16", "env.prompts=300"]
    path = run.train(config, run=tmp_path / "run", overrides=short).path
    evaluate(path, episodes=16)
    if name == "router":
        details = {u["verdict"].get("detail", "") for u in run.Run(path).updates}
        assert any("acted" in detail for detail in details)
    report = baton.verify(path)
    assert report["faults"] == [] and {one["reason"] for one in report["not_checked"]} <= EXPECTED


def test_a_rule_of_the_users_runs_only_where_it_was_read_and_its_failures_are_repeated(tmp_path: Path) -> None:
    rule = (
        "def route(task, turns, names):\n"
        "    if len(turns) == 1 and task.id.endswith('3'):\n"
        "        raise KeyError('no')\n"
        "    return len(turns) if len(turns) < 2 else None\n"
    )
    (tmp_path / "verified_rules.py").write_text(rule)
    tree = worlds.tree() | {"protocol": {"name": "router", "rule": "verified_rules:route"}}
    (tmp_path / "c.toml").write_text(tomli_w.dumps(tree))
    path = run.train(tmp_path / "c.toml", run=tmp_path / "run", overrides=[KEEP, "algorithm.stages=1"]).path
    with pytest.raises(ConfigError, match=r"protocol.rule 'verified_rules:route' is code.*--root DIR"):
        baton.verify(path)
    report = baton.verify(path, root=tmp_path)
    assert report["faults"] == [] and FAILED_EPISODE not in {one["reason"] for one in report["not_checked"]}
    file = run.Run(path).updates[0]["episodes_file"]
    rows = records.read_episodes(path / file)
    failed = next(n for n, row in enumerate(rows) if row["reason"].startswith("rule: "))
    change_rows(path, file, lambda rows: rows[failed].update(reason="rule: another"))
    found = [f"{f['check']}: {console.fault_line(f)}" for f in baton.verify(path, root=tmp_path)["faults"]]
    assert named(found, "episodes", file, f"row {failed + 1}", "failure")


def test_what_a_teammate_behind_an_endpoint_said_is_taken_as_it_is_and_its_server_is_not_asked(tmp_path: Path) -> None:
    with server(first_bit) as (url, _):
        settings = with_endpoint(url, KEEP, "algorithm.stages=1", "gate.probe_prompts=8", "algorithm.episodes=16")
        path = run.train(settings, run=tmp_path / "run").path
        evaluate(path, episodes=4)
    report = baton.verify(path)
    assert report["faults"] == []
    assert {one["reason"] for one in report["not_checked"]} <= EXPECTED | {NOT_HEARD}
    assert {one["check"] for one in report["not_checked"] if one["reason"] == NOT_HEARD} == {"episodes"}
    file = run.Run(path).updates[0]["episodes_file"]
    change_rows(path, file, lambda rows: rows[0]["turns"][0].update(text="another"))
    assert named(faults(path), "episodes", file, "row 1", "turn 2: the prompt is not what 'b' is shown")


def test_a_stage_that_shares_its_episodes_and_ended_early_is_scored_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = records.append_record

    def dying(path: Path, record: Record) -> None:
        append(path, record)
        if record["kind"] == "update":
            raise _Died

    with monkeypatch.context() as patch:
        patch.setattr(records, "append_record", dying)
        with pytest.raises(_Died):
            run.train(REUSE, run=tmp_path / "run")
    files = (tmp_path / "run" / "episodes").glob("*.parquet")
    turns = [t for file in files for row in records.read_episodes(file) for t in row["turns"]]
    report = baton.verify(tmp_path / "run")
    checked = {check["check"]: check["checked"] for check in report["checks"]}
    assert report["faults"] == [] and checked["log-probs"] == sum(len(t["ids"]) for t in turns)


def test_every_token_of_every_episode_is_scored_again(made: Callable[[Config], Path]) -> None:
    path = made(TABLES)
    files = [*(path / "episodes").glob("*.parquet"), *(path / "evaluations").glob("*.parquet")]
    turns = [t for file in files for row in records.read_episodes(file) for t in row["turns"]]
    report = baton.verify(path)
    checked = {check["check"]: check["checked"] for check in report["checks"]}
    assert checked["log-probs"] == sum(len(t["ids"]) for t in turns)


def test_verifying_writes_nothing_and_holds_one_agent_at_a_time(
    made: Callable[[Config], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(MODELS)
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(path.rglob("*"))}
    loaded: list[tuple[str, ...]] = []
    crew = assemble.crew

    def counted(config: Config, folders: Any, *, learners: Sequence[str]) -> Any:
        loaded.append((*folders, *learners))
        return crew(config, folders, learners=learners)

    monkeypatch.setattr(assemble, "crew", counted)
    assert baton.verify(path)["holds"]
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(path.rglob("*"))} == before
    assert loaded == [("first", "first"), ("second", "second")]


def test_a_moved_run_is_verified_without_the_models_it_came_from(
    copy: Callable[[Config], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy(MODELS)
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "empty"))
    assert baton.verify(path)["holds"]
    assert not (tmp_path / "empty").exists()


def test_what_was_pruned_is_said_and_not_held_against_the_run(tmp_path: Path) -> None:
    path = run.train(worlds.parity("algorithm.stages=4", "checkpoint.keep=1", lr=0.1), run=tmp_path / "run").path
    report = baton.verify(path)
    assert report["holds"]
    pruned = {one["check"]: one for one in report["not_checked"] if one["reason"] == PRUNED}
    kept = {agent: len(list((path / "state" / agent).glob("v*"))) for agent in "ab"}
    promoted = [u for u in run.Run(path).updates if u["to_version"] is not None]
    assert pruned["weights"]["count"] == len(promoted) + 2 - sum(kept.values())
    assert {"log-probs", "divergences"} < set(pruned) and "a@1" in pruned["weights"]["places"]
    checked = {check["check"]: check["checked"] for check in report["checks"]}
    assert checked["divergences"] + pruned["divergences"]["count"] == len(promoted)


class _Died(BaseException):
    """Stands for a process that ends here."""


@pytest.mark.parametrize(("schedule", "when", "nth"), [("sat", "before", 2), ("sat", "after", 1), ("joint", "after", 3)])
def test_a_run_that_died_and_was_resumed_holds(
    schedule: str, when: str, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version ids without an update, a stage taken back, a line 'resume', team.json one line behind: all of it is honest."""
    settings = worlds.parity(KEEP, "algorithm.stages=2", f"algorithm.name={schedule}", lr=0.1)
    append, left = records.append_record, [nth]

    def dying(path: Path, record: Record) -> None:
        left[0] -= record["kind"] == "update"
        is_now = record["kind"] == "update" and left[0] == 0
        if is_now and when == "before":
            raise _Died
        append(path, record)
        if is_now:
            raise _Died

    with monkeypatch.context() as patch:
        patch.setattr(records, "append_record", dying)
        with pytest.raises(_Died):
            run.train(settings, run=tmp_path / "run")
    assert faults(tmp_path / "run") == [], "dead"
    run.train(settings, run=tmp_path / "run", resume=True)
    assert faults(tmp_path / "run") == [], "resumed"
    opened = run.Run(tmp_path / "run")
    assert opened.records("resume") and len(opened.records("begin")) == 4 + (
        0 if (schedule, when) == ("sat", "after") else 1
    )


def test_the_newest_updates_alone_can_be_looked_into(made: Callable[[Config], Path]) -> None:
    report = baton.verify(made(TABLES), updates=2)
    assert report["holds"]
    checked = {check["check"]: check["checked"] for check in report["checks"]}
    assert checked["verdicts"] == 8 and checked["divergences"] <= 2
    (left_out,) = [one for one in report["not_checked"] if "newest 2" in one["reason"]]
    assert left_out["count"] == 6


def test_code_that_a_run_names_is_not_executed_unasked(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    (path / "mine.py").write_text("from pathlib import Path\nPath(__file__).with_name('executed').touch()\n")
    lines = lines_of(path)
    lines[0]["root"] = str(path)
    rewrite(path, lines)
    tree = worlds.tree() | {"env": {"name": "mine:Env"}}
    (path / "config.toml").write_text(tomli_w.dumps(tree))
    with pytest.raises(ConfigError, match="--root DIR"):
        baton.verify(path)
    assert not (path / "executed").exists()
    with pytest.raises(ConfigError, match="mine:Env"):
        baton.verify(path, root=path)
    assert (path / "executed").exists(), "asked to, it is what would have been executed"


def test_a_task_whose_files_are_elsewhere_names_the_remedy(tmp_path: Path) -> None:
    rows = [json.dumps({"question": f"{i} ?", "answer": str(i % 2)}) for i in range(120)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    tree = worlds.tree("a") | {"env": {"name": "jsonl", "path": "rows.jsonl"}}
    (tmp_path / "c.toml").write_text(tomli_w.dumps(tree))
    path = run.train(tmp_path / "c.toml", run=tmp_path / "run", overrides=["algorithm.stages=1", KEEP]).path
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "rows.jsonl").rename(tmp_path / "elsewhere" / "rows.jsonl")
    with pytest.raises(ConfigError, match=r"rows\.jsonl.*--root DIR names another folder"):
        baton.verify(path)
    assert baton.verify(path, root=tmp_path / "elsewhere")["holds"]


# ---- what was changed afterwards -------------------------------------------------------------------------------


def test_a_tensor_of_a_promoted_version(copy: Callable[[Config], Path]) -> None:
    """Also where the fingerprint was mended: the version then says other things than were recorded."""
    path = copy(MODELS)
    update = update_of(path, "accepted", "first")
    folder = f"state/first/v{update['to_version']:05d}"
    file = path / folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name][0, 0] += 0.5
    save_file(tensors, file, metadata={"format": "pt"})
    found = faults(path)
    assert named(found, "weights", folder, f"the tensors of first@{update['to_version']}", "fingerprint")
    forged = assemble.weights_of(tensors).fingerprint
    change_update(path, update["index"], lambda line: line.update(fingerprint=forged))
    found = faults(path)
    assert not named(found, "weights") and named(found, "divergences", f"first@0 to @{update['to_version']}", "kl_new_old")


def test_version_0_has_a_fingerprint_too(copy: Callable[[Config], Path]) -> None:
    path = copy(MODELS)
    file = path / "state/second/v00000/model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[0] += 1e-6
    save_file(tensors, file, metadata={"format": "pt"})
    assert named(faults(path), "weights", "the tensors of second@0", "stages.jsonl line 1")


def test_a_reward_also_where_every_sum_was_mended(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    file = run.Run(path).updates[2]["episodes_file"]

    def better(rows: list[Record]) -> None:
        row = next(r for r in rows if r["use"] == "train" and r["reward"] == 0.0)
        row["reward"] = 1.0

    change_rows(path, file, better)
    found = faults(path)
    assert named(found, "rewards", file, "reward of the answer", "recorded 1.0, recomputed 0.0")
    assert named(found, "counts", "episodes.reward")
    mend_sums(path)
    found = faults(path)
    assert named(found, "rewards", file, "recorded 1.0, recomputed 0.0") and not named(found, "counts", "episodes.reward")


def compared(path: Path) -> Record:
    """The first update with pairs."""
    return next(u for u in run.Run(path).updates if u["pairs"])


def test_a_reward_of_a_pair_and_what_follows_from_it(copy: Callable[[Config], Path]) -> None:
    path = copy(PAIRS)
    update = compared(path)

    def better(rows: list[Record]) -> None:
        row = next(r for r in rows if r["use"] == "beside" and r["reward"] == 0.0)
        row["reward"] = 1.0

    change_rows(path, update["episodes_file"], better)
    found = faults(path)
    assert named(found, "rewards", update["episodes_file"], "recorded 1.0, recomputed 0.0")
    assert named(found, "pairs", "pairs.gain.lower_bound")


@pytest.mark.parametrize("change", ["gain", "harm", "pool", "discordance", "none"])
def test_what_the_pairs_of_an_update_are_said_to_show(change: str, copy: Callable[[Config], Path]) -> None:
    path = copy(PAIRS)
    update = compared(path)

    def other(line: Record) -> None:
        said = line["pairs"]
        if change in ("gain", "harm"):
            said[change] |= {"lower_bound": 0.5, "verdict": "positive", "is_vacuous": False}
        elif change == "none":
            line["pairs"] = None
        else:
            said[change] = "x" if change == "pool" else 0.9

    change_update(path, update["index"], other)
    found = faults(path)
    assert named(found, "pairs")
    assert named(found, "verdicts", "verdict", "rejected harm") == (change == "harm")


def test_pairs_that_were_left_out_or_drawn_elsewhere(copy: Callable[[Config], Path]) -> None:
    path = copy(PAIRS)
    file = compared(path)["episodes_file"]
    kept = records.read_episodes(path / file)
    last = max(n for n, row in enumerate(kept) if row["use"] == "pair")
    records.write_episodes(path / file, [row for n, row in enumerate(kept) if n != last])
    assert named(faults(path), "pairs", file, "episodes of the promoted team, and of the other")
    both = {last, max(n for n, row in enumerate(kept) if row["use"] == "beside")}
    records.write_episodes(path / file, [row for n, row in enumerate(kept) if n not in both])
    assert named(faults(path), "pairs", file, "no more pairs were played")
    test = next(row for row in kept if row["use"] == "train")
    swapped = [dict(row, task_id=test["task_id"], prompt=test["prompt"]) if n == last else row for n, row in enumerate(kept)]
    records.write_episodes(path / file, swapped)
    assert named(
        faults(path), "episodes", file, f"row {last + 1}", "the task is of the train set, these are drawn from certify"
    )


def test_a_teammate_who_says_two_things_to_one_prompt(copy: Callable[[Config], Path]) -> None:
    """Side by side, whoever is in both teams says the same, and what is the same has one outcome."""
    path = copy(PAIRS)
    update = next(u for u in run.Run(path).updates if u["pairs"] and u["agent"] == "b")

    def other(rows: list[Record]) -> None:
        said = next(r for r in rows if r["use"] == "beside")["turns"][0]
        said["ids"], said["text"] = [1 - said["ids"][0]], str(1 - said["ids"][0])

    change_rows(path, update["episodes_file"], other)
    assert named(faults(path), "pairs", update["episodes_file"], "pair 1", "'a' has one version, and says two things")


def test_the_pairs_of_a_stage(copy: Callable[[Config], Path]) -> None:
    path = copy(PAIRS)
    stage = next(line for line in lines_of(path) if line["kind"] == "stage" and line["pairs"])
    file = records.stage_pairs_file(stage["stage"])
    lines = lines_of(path)
    for line in lines:
        if line["kind"] == "stage" and line["stage"] == stage["stage"]:
            line["pairs"]["gain"]["lower_bound"] += 0.01
    rewrite(path, lines)
    assert named(faults(path), "sequence", "pairs.gain.lower_bound")
    change_rows(path, file, lambda rows: rows[-1]["turns"][0].update(text="x"))
    assert named(faults(path), "episodes", file, "the text is not that of the sampled ids")
    (path / file).unlink()
    assert named(faults(path), "files", file, "is gone")


def restated(path: Path) -> Record:
    """The first update of b with a surrogate that says something."""
    return next(u for u in run.Run(path).updates if u["surrogate"] and u["surrogate"]["gain"]["verdict"] != "void")


@pytest.mark.parametrize("change", ["gain", "turns", "missing", "pool", "delta", "none"])
def test_what_a_surrogate_is_said_to_show(change: str, copy: Callable[[Config], Path]) -> None:
    path = copy(SURROGATE)

    def other(line: Record) -> None:
        said = line["surrogate"]
        if change == "gain":
            said["gain"] |= {"lower_bound": 0.5, "verdict": "positive", "is_vacuous": False}
        elif change == "none":
            line["surrogate"] = None
        else:
            said[change] = "x" if change == "pool" else 2

    change_update(path, restated(path)["index"], other)
    assert named(faults(path), "surrogate", "surrogate" if change == "none" else f"surrogate.{change}")


def test_a_surrogate_of_an_update_that_has_none(copy: Callable[[Config], Path]) -> None:
    path = copy(SURROGATE)
    rejected = update_of(path, "rejected")
    change_update(path, rejected["index"], lambda line: line.update(surrogate=restated(path)["surrogate"]))
    assert named(faults(path), "surrogate", "an accepted update has one where it is configured, no other has")


def test_a_log_probability_of_a_candidate_also_where_its_bound_was_mended(copy: Callable[[Config], Path]) -> None:
    path = copy(SURROGATE)
    update = restated(path)

    def likelier(rows: list[Record]) -> None:
        reward = {r["id"]: r["reward"] for r in rows}
        for row in rows:
            if row["use"] == "restated" and reward[row["id"].removesuffix("/restated")] == 1.0:
                row["turns"][0]["logprobs"] = [0.0]

    change_rows(path, update["episodes_file"], likelier)
    report = baton.verify(path)
    (bound,) = (f["recomputed"] for f in report["faults"] if f["what"] == "surrogate.gain.lower_bound")
    told = [f for f in report["faults"] if f["check"] == "surrogate" and f["what"].startswith("surrogate.gain.")]
    assert bound > update["surrogate"]["gain"]["lower_bound"]

    def mended(line: Record) -> None:
        for fault in told:
            *way, last = fault["what"].split(".")
            node: Any = line
            for part in way:
                node = node[int(part) if part.isdecimal() else part]
            node[last] = fault["recomputed"]

    change_update(path, update["index"], mended)
    found = faults(path)
    who = f"'{update['agent']}' under {update['agent']}@{update['to_version']}"
    assert named(found, "log-probs", update["episodes_file"], who) and not named(found, "surrogate")


def test_a_reward_of_a_probe_episode(copy: Callable[[Config], Path]) -> None:
    path = copy(SURROGATE)
    update = restated(path)

    def better(rows: list[Record]) -> None:
        next(r for r in rows if r["use"] == "probe" and r["reward"] == 0.0)["reward"] = 1.0

    change_rows(path, update["episodes_file"], better)
    found = faults(path)
    assert named(found, "rewards", update["episodes_file"], "recorded 1.0, recomputed 0.0")
    assert named(found, "surrogate", "surrogate.gain.lower_bound")


@pytest.mark.parametrize("change", ["left out", "another message", "another version", "a reward"])
def test_what_a_candidate_is_said_to_have_scored(change: str, copy: Callable[[Config], Path]) -> None:
    path = copy(SURROGATE)
    file = restated(path)["episodes_file"]

    def other(rows: list[Record]) -> None:
        row = next(r for r in rows if r["use"] == "restated")
        turn = row["turns"][0]
        if change == "left out":
            rows.remove(row)
        elif change == "another message":
            turn["ids"] = [1 - turn["ids"][0]]
        elif change == "another version":
            turn["versions"] = [0]
        else:
            row |= {"outcome": "scored", "reward": 1.0}

    change_rows(path, file, other)
    words = ("as the candidate scores them", "499", "500") if change == "left out" else ("row",)
    assert named(faults(path), "surrogate", file, *words)


def test_a_candidate_whose_weights_were_pruned_is_not_held_against_the_run(tmp_path: Path) -> None:
    run.train(worlds.parity(*WHOLE, "algorithm.stages=3"), run=tmp_path / "run")
    report = baton.verify(tmp_path / "run")
    assert report["holds"] and PRUNED in {one["reason"] for one in report["not_checked"] if one["check"] == "log-probs"}
    checked = {check["check"]: check["checked"] for check in report["checks"]}
    assert checked["surrogate"] == sum(u["surrogate"] is not None for u in run.Run(tmp_path / "run").updates) > 0


def test_a_run_from_before_surrogates_holds(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    lines = lines_of(path)
    for line in lines:
        line.pop("surrogate", None)
    rewrite(path, lines)
    text = (path / "config.toml").read_text()
    assert "surrogate = false\n" in text
    (path / "config.toml").write_text(text.replace("surrogate = false\n", ""))
    assert named(faults(path), "files", "config.toml", "digest"), "a key that was there is gone"
    lines[0]["digest"] = digest_of(tomllib.loads((path / "config.toml").read_text()))
    rewrite(path, lines)
    assert faults(path) == []
    assert main(["inspect", str(path), "--certificates"]) == 0 and baton.report(path)


def test_a_failed_episode_that_was_given_a_reward(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    file = run.Run(path).updates[0]["episodes_file"]
    change_rows(path, file, lambda rows: rows[3].update(outcome="failed", reason="grader: died"))
    assert named(faults(path), "rewards", file, "row 4", "a failed episode has a reward")


def test_the_text_of_an_answer(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    file = run.Run(path).updates[1]["episodes_file"]
    change_rows(path, file, lambda rows: rows[5].update(answer="x"))
    assert named(faults(path), "episodes", file, "row 6", "answer", 'recorded "x"')


def test_sampled_ids_also_where_text_answer_and_reward_were_mended(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    file = run.Run(path).updates[-1]["episodes_file"]

    def other(rows: list[Record], *, text: bool) -> None:
        row = next(r for r in rows if r["use"] == "train" and r["reward"] == (0.0 if not text else row_reward))
        said = row["turns"][-1]
        said["ids"] = [1 - said["ids"][0]] if not text else said["ids"]
        if text:
            said["text"] = row["answer"] = str(said["ids"][0])
            row["reward"], row["reason"] = 1.0, ""

    row_reward = 0.0
    change_rows(path, file, lambda rows: other(rows, text=False))
    assert named(faults(path), "episodes", file, "turn 2", "the text is not that of the sampled ids")
    # The forger mends all that follows from the ids; the version would hardly have said them with that probability.
    change_rows(path, file, lambda rows: other(rows, text=True))
    mend_sums(path)
    found = faults(path)
    assert not named(found, "episodes") and not named(found, "rewards")
    assert named(found, "log-probs", file, "token", "of 'b' under b@", "log-probability")


def test_a_log_probability(copy: Callable[[Config], Path]) -> None:
    path = copy(MODELS)
    update = run.Run(path).updates[1]
    file = update["episodes_file"]

    def less(rows: list[Record]) -> None:
        rows[7]["turns"][0]["logprobs"][0] -= 0.004

    change_rows(path, file, less)
    assert named(faults(path), "log-probs", file, "row 8", "token", "of 'first' under first@")


def test_a_token_that_names_another_version(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    file = run.Run(path).updates[-1]["episodes_file"]
    change_rows(path, file, lambda rows: rows[0]["turns"][0].update(versions=[0]))
    assert named(faults(path), "episodes", file, "row 1", "turn 1.versions", "recorded 0")


def test_a_prompt_that_was_not_shown(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    file = run.Run(path).updates[0]["episodes_file"]
    change_rows(path, file, lambda rows: rows[0]["turns"][1]["prompt_ids"].pop(3))
    assert named(faults(path), "episodes", file, "row 1", "turn 2: the prompt is not what 'b' is shown")


def change_divergences(path: Path, update: Record, change: Callable[[dict[str, list[Any]]], Any]) -> str:
    file = f"divergences/{update['index']:06d}-{update['agent']}.parquet"
    columns = pq.read_table(path / file).to_pydict()
    change(columns)
    pq.write_table(records.pa.table(columns, schema=records.DIVERGENCES), path / file)
    return file


def test_a_divergence_of_a_rejected_update(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    update = update_of(path, "rejected")

    def smaller(columns: dict[str, list[Any]]) -> None:
        columns["kl_old_new"][2] /= 2
        columns["kl_new_old"][2] /= 2

    change_divergences(path, update, smaller)
    assert named(faults(path), "gate", "stages.jsonl", "look 1 (scale 1)", "message_mean")


def test_divergences_of_a_promoted_update_scaled_with_everything_that_follows(copy: Callable[[Config], Path]) -> None:
    """The gate's record fits the forged divergences; the weights do not."""
    path = copy(MODELS)
    update = update_of(path, "accepted", "first")

    def halved(columns: dict[str, list[Any]]) -> None:
        for name in ("kl_old_new", "kl_new_old"):
            columns[name] = [value / 2 for value in columns[name]]

    file = change_divergences(path, update, halved)

    def follow(line: Record) -> None:
        for gate in (*line["looks"], line["verdict"]["gate"]):
            for name in ("q_point", "q_gate", "message_mean", "message_sum"):
                gate[name] /= 2

    change_update(path, update["index"], follow)
    found = faults(path)
    assert not named(found, "gate")
    assert named(found, "divergences", file, "of the accepted look", "kl_new_old")
    assert named(found, "divergences", "stages.jsonl", "from the weights: q_point")


def test_probe_states_that_the_key_does_not_draw(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    file = change_divergences(path, update_of(path, "accepted"), lambda c: c["prompt"].__setitem__(0, c["prompt"][1]))
    assert named(faults(path), "gate", file, "not those that the probe episodes and keys give (prompt")


def test_a_quantile_of_the_gate(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    update = update_of(path, "accepted")
    change_update(path, update["index"], lambda line: line["looks"][0].update(q_point=line["looks"][0]["q_point"] * 0.9))
    assert named(faults(path), "gate", "look 1 (scale 1).q_point")


def test_a_radius_of_the_config(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    text = (path / "config.toml").read_text()
    wider = text.replace('preset = "demo"', 'preset = "default"')
    assert wider != text
    (path / "config.toml").write_text(wider)
    found = faults(path)
    assert named(found, "files", "config.toml", "digest")
    digest = run.Run(path).config.digest
    lines = lines_of(path)
    lines[0]["digest"] = digest
    rewrite(path, lines)
    found = faults(path)
    assert not named(found, "files", "config.toml") and named(found, "gate", "radius_token", "recomputed 0.05")


def test_a_rejection_that_became_an_acceptance(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    update = update_of(path, "rejected")

    def promote(line: Record) -> None:
        gate = line["looks"][-1] | {"passed": True}
        line.update(word="shrunk", verdict={"kind": "accepted", "scale": gate["scale"], "gate": gate})
        line.update(to_version=line["candidate_version"])

    change_update(path, update["index"], promote)
    found = faults(path)
    assert named(found, "verdicts", "verdict", 'recorded "accepted 0.0625", recomputed "rejected radius"')
    assert named(found, "verdicts", "to_version") and named(found, "verdicts", "word")
    change_update(path, update["index"], lambda line: line["looks"][-1].update(passed=True))
    assert named(faults(path), "gate", "look 5 (scale 0.0625).passed", "recorded true, recomputed false")


def test_a_look_that_was_left_out(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    change_update(path, update_of(path, "shrunk")["index"], lambda line: line["looks"].pop(0))
    assert named(faults(path), "verdicts", "scales of the looks")


@pytest.mark.parametrize("name", ["lr", "beta"])
def test_what_adapts(name: str, copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    change_update(path, 4, lambda line: line.update({name: line[name] * 2}))
    assert named(faults(path), "verdicts", name)
    change_update(path, 4, lambda line: line["after"].update({name: line["after"][name] * 2}))
    assert named(faults(path), "verdicts", f"after.{name}")


def test_a_mean_reward(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    change_update(path, 3, lambda line: line["episodes"].update(reward=0.99))
    assert named(faults(path), "counts", "episodes.reward", "recorded 0.99")


def test_the_start_accuracy_also_with_the_rewards_under_it(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    lines = lines_of(path)
    lines[0]["start_accuracy"] = 0.0
    rewrite(path, lines)
    assert named(faults(path), "counts", "stages.jsonl line 1", "start_accuracy", "recorded 0.0")
    change_rows(path, "episodes/start.parquet", lambda rows: [row.update(reward=0.0) for row in rows])
    found = faults(path)
    assert not named(found, "counts", "start_accuracy") and named(found, "rewards", "episodes/start.parquet")


def test_a_noise_floor(copy: Callable[[Config], Path]) -> None:
    path = copy(MODELS)
    lines = lines_of(path)
    lines[0]["noise_floor"]["first"]["token"] = 0.01
    rewrite(path, lines)
    assert named(faults(path), "counts", "noise_floor.first.token", "recorded 0.01")


def test_an_update_line_that_was_deleted(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    lines = lines_of(path)
    (gone,) = [n for n, line in enumerate(lines) if line["kind"] == "update" and line["index"] == 3]
    rewrite(path, lines[:gone] + lines[gone + 1 :])
    found = faults(path)
    assert named(found, "sequence", "no line tells of update 3")
    assert named(found, "sequence", "episodes/000003-", "no line of stages.jsonl tells of")


def test_the_last_update_and_its_stage_deleted(copy: Callable[[Config], Path]) -> None:
    """Nothing comes after them that would leave a gap."""
    path = copy(TABLES)
    lines = lines_of(path)
    last = max(n for n, line in enumerate(lines) if line["kind"] == "update")
    rewrite(path, [line for line in lines[:last] if line["kind"] != "end"])
    assert named(faults(path), "files", "team.json")
    rewrite(path, [*lines[:last], lines[-1]])
    assert named(faults(path), "sequence", "ending", 'recorded "finished"')


def test_a_stage_line_that_is_missing_or_says_something_else(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    lines = lines_of(path)
    first = next(n for n, line in enumerate(lines) if line["kind"] == "stage")
    rewrite(path, lines[:first] + lines[first + 1 :])
    assert named(faults(path), "sequence", "the line of stage 1 is missing")
    lines[first]["achieved"]["lower_bound"] = 1.0
    rewrite(path, lines)
    assert named(faults(path), "sequence", "achieved.lower_bound", "recorded 1.0")


def test_a_version_id_that_was_used_before(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    lines = lines_of(path)
    second = [line for line in lines if line["kind"] == "begin" and line["agent"] == "a"][1]
    second["version"] = 1
    rewrite(path, lines)
    found = faults(path)
    assert named(found, "sequence", "a version id is given twice") and named(found, "sequence", "candidate_version")


@pytest.mark.parametrize(
    ("at", "value"), [("agents.a.cursor", 5), ("team.members.0.version", 9), ("done", 7), ("agents.a.replay.tokens", 1)]
)
def test_a_position_that_does_not_follow_from_the_one_before(at: str, value: int, copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)

    def move(line: Record) -> None:
        node: Any = line["position"]
        *way, last = at.split(".")
        for part in way:
            node = node[int(part)] if part.isdigit() else node[part]
        node[last] = value

    change_update(path, 5, move)
    assert named(faults(path), "sequence", f"position.{at}", f"recorded {value}")


def test_agents_that_came_in_another_order(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    change_update(path, 0, lambda line: line.update(agent="a" if line["agent"] == "b" else "b"))
    assert named(faults(path), "sequence", "whose turn.agent")


def test_a_probe_episode_on_a_train_task(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    file = run.Run(path).updates[0]["episodes_file"]

    def swap(rows: list[Record]) -> None:
        probe = next(r for r in rows if r["use"] == "probe")
        other = next(r for r in rows if r["use"] == "train")
        probe["id"] = probe["id"].replace(probe["task_id"], other["task_id"])
        probe["task_id"] = other["task_id"]

    change_rows(path, file, swap)
    assert named(faults(path), "episodes", file, "the task is of the train set, these are drawn from probe")


def test_train_episodes_in_another_order_or_left_out(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    file = run.Run(path).updates[0]["episodes_file"]
    change_rows(path, file, lambda rows: rows.insert(0, rows.pop(4)))
    assert named(faults(path), "episodes", file, "row 1", "task_id")
    change_rows(path, file, lambda rows: rows.pop(0))
    assert named(faults(path), "episodes", file, "train, draw 1 episodes", "recorded 31, recomputed 32")


def test_a_value_of_an_evaluation_also_with_the_rewards_under_it(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    file = path / "evaluations/001.json"
    report = json.loads(file.read_text())
    report["rows"][0]["value"] = 1.0
    file.write_text(json.dumps(report))
    assert named(faults(path), "evaluations", "evaluations/001.json row 'team'", "value", "recorded 1.0")
    change_rows(
        path, "evaluations/001.parquet", lambda rows: [r.update(reward=1.0) for r in rows if r["use"] == "untrained team"]
    )
    found = faults(path)
    assert named(found, "rewards", "evaluations/001.parquet", "recorded 1.0, recomputed 0.0")
    assert named(found, "evaluations", "row 'untrained team'", "difference")


def test_an_evaluation_of_versions_that_never_played_together(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    file = path / "evaluations/001.json"
    report = json.loads(file.read_text())
    report["versions"]["a"] = 77
    file.write_text(json.dumps(report))
    assert named(faults(path), "evaluations", "the run was never at these versions")


def test_team_json_prompt_sets_and_replay(copy: Callable[[Config], Path]) -> None:
    path = copy(MODELS)
    team = json.loads((path / "team.json").read_text())
    team["agents"][0]["version"] = 0
    (path / "team.json").write_text(json.dumps(team))
    lines = lines_of(path)
    lines[0]["splits"]["probe"]["sha256"] = "0" * 64
    rewrite(path, lines)
    change_update(path, 0, lambda line: line["replay"].update(max=0.01))
    found = faults(path)
    assert named(found, "files", "team.json", "agents.0.version", "recorded 0")
    assert named(found, "files", "splits.probe.sha256")
    assert named(found, "log-probs", "replay.max of update 0")


def test_a_joint_stage_whose_files_differ(copy: Callable[[Config], Path]) -> None:
    path = copy(OTHERS["joint"])
    file = run.Run(path).updates[1]["episodes_file"]

    def better(rows: list[Record]) -> None:
        next(r for r in rows if r["use"] == "train" and r["reward"] == 0.0)["reward"] = 1.0

    change_rows(path, file, better)
    found = faults(path)
    assert named(found, "episodes", file, "the agents of a joint stage share their episodes")
    assert named(found, "rewards", file, "recorded 1.0, recomputed 0.0")
    assert not [line for line in found if "versions" in line], "they were played by the team of the stage's start"


def test_a_vote_that_was_counted_another_way(copy: Callable[[Config], Path]) -> None:
    path = copy(OTHERS["vote"])
    file = run.Run(path).updates[0]["episodes_file"]

    def turn_around(rows: list[Record]) -> None:
        row = next(r for r in rows if r["use"] == "train" and len({t["text"] for t in r["turns"]}) > 1)
        row["answer"] = "1" if row["answer"] == "0" else "0"

    change_rows(path, file, turn_around)
    assert named(faults(path), "episodes", file, "answer")


def test_the_radii_that_a_stage_gave(copy: Callable[[Config], Path]) -> None:
    """Also where the looks were mended to fit."""
    path = copy(RADII)
    update = run.Run(path).updates[0]

    def wider(line: Record) -> None:
        line["position"]["stage"]["radii"][line["agent"]] *= 2

    change_update(path, update["index"], wider)
    assert named(faults(path), "sequence", f"position.stage.radii.{update['agent']}")
    change_update(path, 0, lambda line: [gate.update(radius_token=gate["radius_token"] * 2) for gate in line["looks"]])
    assert named(faults(path), "gate", "look 1 (scale 1).radius_token")


def test_a_gain_below_zero(copy: Callable[[Config], Path]) -> None:
    path = copy(OPTIONS["order greedy"][0])
    last = run.Run(path).updates[0]["position"]["stage"]["order"][-1]
    change_update(path, 0, lambda line: line["position"]["stage"]["gains"].update({last: -1.0}))
    assert named(faults(path), "sequence", f"gain of '{last}', which acted", "recorded -1.0")


def test_radii_that_do_not_add_up_also_where_their_gains_are_not_recorded(copy: Callable[[Config], Path]) -> None:
    path = copy(OPTIONS["radii by gains that are not recorded"][0])
    change_update(path, 0, lambda line: line["position"]["stage"]["radii"].update(a=1.0, b=1.0))
    assert named(faults(path), "sequence", "are no shares of 1 nats in quanta of 0.125")


def test_an_order_that_does_not_follow_from_its_gains(copy: Callable[[Config], Path]) -> None:
    path = copy(OPTIONS["order greedy"][0])
    order = run.Run(path).updates[0]["position"]["stage"]["order"]
    change_update(path, 0, lambda line: line["position"]["stage"]["gains"].update({order[0]: 0.0}))
    found = faults(path)
    assert named(found, "sequence", "position.stage.order.0") and named(found, "sequence", "whose turn.agent")


def test_the_episodes_of_an_order(copy: Callable[[Config], Path]) -> None:
    path = copy(OPTIONS["order greedy"][0])
    file = run.Run(path).updates[0]["episodes_file"]
    first = next(n for n, r in enumerate(records.read_episodes(path / file)) if r["use"] == "order")
    change_rows(path, file, lambda rows: rows[first].update(reward=1.0 - rows[first]["reward"]))
    assert named(faults(path), "rewards", file, f"row {first + 1}")
    change_rows(path, file, lambda rows: rows.pop(first))
    assert named(faults(path), "episodes", file, "order, draw 1 episodes", "recorded 63, recomputed 64")


def test_what_a_bandit_remembers(copy: Callable[[Config], Path]) -> None:
    path = copy(OPTIONS["order bandit"][0])
    updates = run.Run(path).updates
    agent = updates[3]["agent"]
    change_update(path, 4, lambda line: line["position"]["agents"][agent].update(gain=0.9))
    assert named(faults(path), "sequence", f"position.agents.{agent}.gain", "recorded 0.9")


def retried(path: Path) -> Record:
    return next(u for u in run.Run(path).updates if u["word"] != "rejected" and u["verdict"]["gate"]["attempt"])


@pytest.mark.parametrize("name", ["lr", "beta", "shrink_lr", "shrink_beta"])
def test_what_a_retry_was_trained_with(name: str, copy: Callable[[Config], Path]) -> None:
    path = copy(RETRIES)
    change_update(path, retried(path)["index"], lambda line: line["retries"][0].update({name: line["retries"][0][name] * 2}))
    assert named(faults(path), "verdicts", f"retries.0.{name}")


def test_a_retry_that_was_left_out_or_is_of_another_length(copy: Callable[[Config], Path]) -> None:
    path = copy(RETRIES)
    update = retried(path)
    n = len(update["retries"])
    change_update(path, update["index"], lambda line: line["retries"][-1].update(shrink_total=0.9))
    assert named(faults(path), "verdicts", f"scales of the looks.{n}", "recomputed 0.9")
    change_update(path, update["index"], lambda line: line["retries"].clear())
    assert named(faults(path), "verdicts", "number of retries", "recorded 0")


@pytest.mark.parametrize("name", ["effective_share", "mean_weight"])
def test_a_share_of_reused_episodes(name: str, copy: Callable[[Config], Path]) -> None:
    path = copy(REUSE)
    update = next(u for u in run.Run(path).updates if u["reuse"]["changed"])
    change_update(path, update["index"], lambda line: line["reuse"].update({name: line["reuse"][name] - 0.01}))
    assert named(faults(path), "counts", f"reuse.{name}")


def test_weights_of_reuse_whose_versions_were_pruned_are_not_held_against_the_run(copy: Callable[[Config], Path]) -> None:
    path = copy(REUSE)
    update = next(u for u in run.Run(path).updates if u["reuse"]["changed"])
    agent = update["reuse"]["changed"][0]
    version = dict(records.read_position(update["position"]).team.versions)[agent]
    assert version < dict(run.Run(path).position.team.versions)[agent], "it was promoted again"
    shutil.rmtree(path / f"state/{agent}/v{version:05d}")
    report = baton.verify(path)
    assert report["holds"]
    lost = {one["check"]: one for one in report["not_checked"] if f"{agent}@{version}" in str(one["places"])}
    assert {"weights", "counts", "log-probs", "divergences"} <= set(lost)


def test_looks_of_one_scale_are_told_apart(copy: Callable[[Config], Path]) -> None:
    """A retry can be as long as the first training."""
    path = copy(TABLES)
    update = update_of(path, "rejected")
    file = change_divergences(path, update, lambda c: c.update(scale=[1.0] * len(c["scale"])))
    looks = records.read_divergences(path / file)
    assert len(looks) == len(update["looks"]) > 1 and {len(one.episode) for one in looks} == {16}


def test_who_had_changed_when_episodes_were_reused(copy: Callable[[Config], Path]) -> None:
    path = copy(REUSE)
    update = next(u for u in run.Run(path).updates if u["reuse"]["changed"])
    change_update(path, update["index"], lambda line: line["reuse"]["changed"].clear())
    assert named(faults(path), "counts", "reuse.changed")
    change_update(path, update["index"], lambda line: line["reuse"].update(is_resampled=True))
    found = faults(path)
    assert named(found, "counts", "reuse.is_resampled") and named(found, "episodes", "row 1", "task_id")


def test_a_tensor_of_an_adapter_and_of_a_frozen_model(copy: Callable[[Config], Path], tmp_path: Path) -> None:
    for settings, file, frozen in (
        (OPTIONS["adapters"][0], "adapter_model.safetensors", ""),
        (OPTIONS["frozen model"][0], "model.safetensors", "first@0"),
    ):
        path = copy(settings)
        update = next(u for u in run.Run(path).updates if u["to_version"] is not None)
        agent, version = ("first", 0) if frozen else (update["agent"], update["to_version"])
        name, file = f"{agent}@{version}", f"state/{agent}/v{version:05d}/{file}"
        tensors = load_file(path / file)
        next(iter(tensors.values())).view(-1)[0] += 0.25
        save_file(tensors, path / file, metadata={"format": "pt"})
        assert named(faults(path), "weights", f"the tensors of {name}", "fingerprint")
        shutil.rmtree(path)


def test_an_adapter_whose_base_is_not_here_names_the_remedy(copy: Callable[[Config], Path], tmp_path: Path) -> None:
    path = copy(OPTIONS["adapters"][0])
    file = path / "state/first/v00000/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(ConfigError, match=r"is an adapter of .*gone, which cannot be used"):
        baton.verify(path)


# ---- damage ----------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize("file", ["episodes/start.parquet", "episodes/000002-*.parquet", "divergences/000002-*.parquet"])
def test_a_damaged_parquet_file_is_a_fault_in_one_line(file: str, copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    (target,) = path.glob(file)
    cut(target)
    found = faults(path)
    assert [line for line in found if target.name in line and "is damaged" in line]
    assert all("\n" not in line for line in found)


def test_damaged_weights_are_a_fault_in_one_line(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    cut(path / "state/a/v00001/table.safetensors")
    report = baton.verify(path)
    (fault,) = report["faults"]
    assert fault["check"] == "weights" and "state/a/v00001" in fault["file"]
    lost = {one["check"]: one["count"] for one in report["not_checked"] if one["reason"] == "the weights cannot be read"}
    assert lost["divergences"] == 2, "the update that made it and the one after it"
    assert lost["log-probs"] > 0


def test_damaged_weights_of_version_0_are_a_fault_in_one_line(copy: Callable[[Config], Path]) -> None:
    path = copy(MODELS)
    cut(path / "state/first/v00000/model.safetensors")
    assert faults(path) and not baton.verify(path)["holds"]


def test_a_training_file_that_cannot_be_read_is_found(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    file = sorted(path.glob("state/*/training-*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:40])
    assert named(faults(path), "files", str(file.relative_to(path)), "cannot be read")


def last_training(path: Path, agent: str) -> Path:
    return path / baton.Run(path).files[agent]["training"]


def test_a_bit_of_a_moment_that_flipped_is_found(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    file = last_training(path, "a")
    whole = bytearray(file.read_bytes())
    whole[-3] ^= 1
    file.write_bytes(bytes(whole))
    assert named(faults(path), "files", str(file.relative_to(path)), "is damaged")


def test_masters_that_do_not_round_to_what_was_promoted_are_found(copy: Callable[[Config], Path]) -> None:
    path = copy(OPTIONS["frozen model"][0])
    agent = next(a for a, f in baton.Run(path).files.items() if f["training"] is not None)
    file = last_training(path, agent)
    masters, moments = records.load_training(file)
    name = sorted(masters)[0]
    moved = {**masters, name: masters[name] + 0.25}
    records.save_training(file, Snapshot(weights=moved, moments=moments, steps=1), with_masters=True)
    assert named(faults(path), "weights", str(file.relative_to(path)), f"master {name} rounds to other weights")


def test_weights_that_are_gone_although_they_are_always_kept(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    shutil.rmtree(path / "state/a/v00000")
    assert named(faults(path), "weights", "state/a/v00000", "is gone")


@pytest.mark.parametrize(
    "text", ["{half a line\n", '{"schema":1,"kind":"update"}\n', '{"schema":1,"kind":"what"}\n', "[]\n"]
)
def test_a_line_that_is_no_record_is_a_fault_and_no_traceback(text: str, copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    with (path / "stages.jsonl").open("a") as handle:
        handle.write(text + "\n")
    assert named(faults(path), "sequence", "stages.jsonl")


@pytest.mark.parametrize("key", ["kind", "warm_start", "position", "files", "group", "root", "facts", "noise_floor"])
@pytest.mark.parametrize("value", ["(gone)", 3, None, {"a": []}])
def test_a_start_whose_line_was_damaged_is_a_fault_and_no_traceback(
    copy: Callable[[Config], Path], key: str, value: object
) -> None:
    path = copy(TABLES)
    first, *rest = (path / "stages.jsonl").read_text().splitlines(keepends=True)
    line = json.loads(first)
    if value == "(gone)":
        del line[key]
    else:
        line[key] = value
    (path / "stages.jsonl").write_text(json.dumps(line) + "\n" + "".join(rest))
    try:
        found = baton.verify(path)
    except BatonError:
        return
    # Where the files of the config lay, and that somebody was warm-started, is the run's own word.
    assert found["faults"] or key == "root" or (key == "warm_start" and isinstance(value, dict))


def test_a_config_that_is_no_config_is_a_fault(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    (path / "config.toml").write_text("seed = [")
    assert named(faults(path), "files", "config.toml")


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run directory"):
        baton.verify(tmp_path)


# ---- what is stored for it -------------------------------------------------------------------------------------


def test_an_episode_comes_back_from_its_row(made: Callable[[Config], Path]) -> None:
    path = made(TABLES)
    rows = records.read_episodes(path / run.Run(path).updates[0]["episodes_file"])
    prompts = {row["task_id"]: row["prompt"] for row in rows}
    again = [records.episode_rows([records.read_episode(row)], use=row["use"], prompts=prompts)[0] for row in rows]
    assert again == rows


def test_evaluations_are_numbered_and_hold_their_episodes(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    report = evaluate(path, k=2, episodes=8)
    assert report["file"] == "evaluations/002.json"
    stored = json.loads((path / report["file"]).read_text())
    assert stored["rows"] == report["rows"] and stored["versions"] == dict(run.Run(path).position.team.versions)
    rows = records.read_episodes(path / "evaluations/002.parquet")
    team = [row["reward"] for row in rows if row["use"] == "team"]
    assert len(team) == 8 and sum(team) / 8 == pytest.approx(stored["rows"][0]["value"])
    assert {row["measurement"] for row in report["rows"] if row["value"] is not None} <= {row["use"] for row in rows}
    assert baton.verify(path)["holds"]


def test_a_run_that_cannot_be_written_is_evaluated_all_the_same(copy: Callable[[Config], Path]) -> None:
    path = copy(TABLES)
    shutil.rmtree(path / "evaluations")
    (path / "evaluations").write_text("in the way")
    said: list[str] = []

    class Listener(run.Silent):
        def say(self, text: str) -> None:
            said.append(text)

    report = evaluate(path, episodes=8, baselines=False, reporter=Listener())
    assert report["file"] is None and report["rows"][0]["n"] == 8
    assert ["not stored in the run" in line for line in said] == [True]


# ---- the command line ------------------------------------------------------------------------------------------


def test_the_command_says_what_was_checked_and_exits_by_it(
    copy: Callable[[Config], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy(TABLES)
    assert main(["verify", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == f"{path}: everything that was checked holds"
    assert [line.split()[0] for line in out.splitlines()[1 : 1 + len(CHECKS)]] == list(CHECKS)
    assert NOT_STEPPED in out
    change_update(path, 3, lambda line: line["episodes"].update(reward=0.99))
    assert main(["verify", str(path), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert not document["holds"] and document["faults"][0]["recorded"] == 0.99
    assert main(["verify", str(path)]) == 1
    out = capsys.readouterr().out
    assert "wrong: counts" in out and "recorded 0.99, recomputed" in out and "fault" in out.splitlines()[-1]


def test_the_tolerance_of_a_divergence_grows_with_the_noise_floor() -> None:
    d = torch.tensor([0.0, 0.05])
    still, noisy = kl_tolerance(d, 0.0), kl_tolerance(d, 1e-5)
    assert still.tolist() == pytest.approx([KL_FLOOR, KL_FLOOR])
    assert noisy[0] == pytest.approx(4e-5 + 1e-6) and noisy[1] == pytest.approx(1e-6 + 4 * (1e-5 + (5e-7) ** 0.5))
