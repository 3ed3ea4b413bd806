"""Teams whose agents are adapters on one base: trained, killed, resumed, extended, played, evaluated, exported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from safetensors.torch import load_file, save_file

from baton import assemble, evaluate, records, run
from baton.config import Config
from baton.engines import adapters, local, models
from baton.errors import ModelError, RunError


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The uninterrupted run of a config, made once per config."""
    folder = tmp_path_factory.mktemp("straight")
    made: dict[str, Path] = {}

    def of(settings: Config) -> Path:
        text = settings.to_toml()
        if text not in made:
            made[text] = folder / str(len(made))
            run.train(settings, run=made[text])
        return made[text]

    return of


BF16 = worlds.adapters("engine.dtype=bfloat16", "checkpoint.keep=1")


def test_a_team_of_adapters_that_is_killed_goes_on_bit_for_bit(straight: Any, tmp_path: Path) -> None:
    worlds.kill(BF16, tmp_path / "run", "after the weights", nth=2)
    worlds.kill(BF16, tmp_path / "run", "before the swap", nth=1, resume=True)
    worlds.go_on(BF16, tmp_path / "run")
    assert worlds.final(tmp_path / "run") == worlds.final(straight(BF16))
    worlds.check_ledger(tmp_path / "run")
    files = run.Run(tmp_path / "run").files
    assert max(f["steps"] for f in files.values()) > 2, "moments of before the kill were used after it"


def test_a_finished_run_of_adapters_with_more_stages_equals_a_longer_one(straight: Any, tmp_path: Path) -> None:
    short, long = (worlds.adapters(f"algorithm.stages={n}", "checkpoint.keep=1") for n in (1, 3))
    run.train(short, run=tmp_path / "run")
    run.train(long, run=tmp_path / "run", resume=True)
    assert worlds.final(tmp_path / "run") == worlds.final(straight(long))


def test_what_is_saved_of_an_agent_is_its_adapter_alone(straight: Any) -> None:
    """No weight of the base is written; masters are what is served, so only moments lie beside them."""
    opened = run.Run(straight(BF16))
    for agent, rank in (("first", 4), ("second", 2)):
        saved = load_file(opened.folder(agent) / adapters.TENSORS)
        assert {t.dtype for t in saved.values()} == {torch.float32}
        assert {min(t.shape) for t in saved.values()} == {rank}
        assert not (opened.folder(agent) / "model.safetensors").exists()
    masters, moments = records.load_training(opened.path / opened.files["first"]["training"])
    assert (
        not masters and {n.partition(".")[2] for n in moments} == load_file(opened.folder("first") / adapters.TENSORS).keys()
    )
    first, second = (adapters.base_of(opened.folder(n)) for n in ("first", "second"))
    assert first == second, "seats of one model share its weights"


def test_a_version_of_the_run_is_an_adapter_that_peft_loads(straight: Any) -> None:
    """The logits of PEFT and transformers alone are those that the run serves."""
    import warnings

    from peft import PeftModel

    opened = run.Run(straight(worlds.adapters("algorithm.stages=3", "checkpoint.keep=1")))
    folder = opened.folder("first")
    assert opened.position.team.member("first").version > 0
    base = models.load(adapters.base_of(folder), dtype=torch.float32)
    ids = torch.arange(3, 15)[None]
    with torch.no_grad(), warnings.catch_warnings():
        plain = base(input_ids=ids).logits
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads a property that transformers has renamed
        theirs = PeftModel.from_pretrained(base, folder)(input_ids=ids).logits
        crew = assemble.crew(opened.config, {"first": folder}, learners=["first"])
        net: Any = crew.learners["first"].awake
        served = net._serve.logits(net._serve.hidden(ids))
    assert torch.allclose(theirs, served, atol=1e-5) and not torch.allclose(theirs, plain, atol=1e-3)
    accepted = [u for u in opened.updates if u["agent"] == "first" and u["to_version"] is not None]
    assert crew.load(folder).fingerprint == accepted[-1]["fingerprint"]


def test_a_team_of_adapters_plays_and_is_evaluated_with_its_baselines(straight: Any) -> None:
    path = straight(BF16)
    team = run.load_team(path)
    task = team.plan.splits.test[0]
    episode = team.play(task)
    team.close()
    assert episode.is_scored and dict(episode.versions) == dict(run.Run(path).position.team.versions)
    rows = {row["name"]: row for row in evaluate(path, episodes=8)["rows"]}
    assert rows["team"]["value"] is not None and rows["untrained team"]["value"] is not None
    assert rows["same model in all seats"]["value"] is not None
    assert rows["best single agent, equal tokens"]["value"] is not None
    note = rows["one model of the total size, full information"]["note"]
    assert f"{models.describe(adapters.base_of(run.Run(path).folder('first'))).parameters:,}" in note, (
        "a shared base counts once"
    )


def test_a_whole_model_and_adapters_train_in_one_team(straight: Any, tmp_path: Path) -> None:
    settings = worlds.relay("agents.1.adapter=lora", "agents.1.lr=0.03", "engine.dtype=bfloat16", "checkpoint.keep=1")
    worlds.kill(settings, tmp_path / "run", "before the record", nth=3)
    worlds.go_on(settings, tmp_path / "run")
    assert worlds.final(tmp_path / "run") == worlds.final(straight(settings))
    opened = run.Run(tmp_path / "run")
    assert [adapters.is_adapter(opened.folder(n)) for n in ("first", "second")] == [False, True]
    masters, _ = records.load_training(opened.path / opened.files["first"]["training"])
    assert masters, "a rounded model keeps its masters beside it"
    assert {u["word"] for u in opened.updates} & {"accepted", "shrunk"}


def test_version_0_of_every_adapter_is_the_base(straight: Any) -> None:
    opened = run.Run(straight(BF16))
    names = ["first", "second"]
    crew = assemble.crew(opened.config, {n: opened.folder(n, 0) for n in names}, learners=names)
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        nets: list[Any] = [crew.learners[n].awake for n in names]
        plain = models.load(adapters.base_of(opened.folder("first", 0)), dtype=torch.bfloat16)(input_ids=ids).logits
        for net in nets:
            assert torch.equal(net._serve.logits(net._serve.hidden(ids)), plain)
    a, b = (load_file(opened.folder(n, 0) / adapters.TENSORS) for n in names)
    name = next(n for n in b if ".lora_A." in n)
    assert not torch.equal(a[name][:2], b[name]), "each seat's first draw is its own"


def test_an_adapter_whose_base_is_gone_says_so(straight: Any, tmp_path: Path) -> None:
    shutil.copytree(straight(BF16), tmp_path / "run")
    for path in (tmp_path / "run").glob(f"state/*/v*/{adapters.CONFIG}"):
        settings = json.loads(path.read_text())
        path.write_text(json.dumps({**settings, "base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(ModelError, match=r"is an adapter of .*gone, which cannot be used"):
        run.load_team(tmp_path / "run")


# ---- choices ---------------------------------------------------------------------------------------------------


def test_the_learning_rate_of_an_adapter_goes_by_its_base() -> None:
    assert [assemble.auto_lr(n, is_adapter=True) for n in (60_000, 135_000_000, 999_999_999, 1_000_000_000)] == [
        1e-4,
        1e-4,
        1e-4,
        1e-5,
    ]
    settings = worlds.adapters("agents.0.lr=auto", "agents.0.warm_start={steps=1}")
    plan = assemble.prepare(settings, root=Path())
    assert plan.lr(settings.agents[0]) == 1e-4 and plan.bases["first"] == plan.bases["second"]
    assert plan.total_parameters == plan.parameters["first"]


def test_a_shared_base_is_counted_once_where_a_dtype_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(local, "auto_dtype", lambda n, **_: (asked.append(n), torch.float32)[1])
    for settings in (worlds.adapters("engine.dtype=auto"), worlds.relay("engine.dtype=auto")):
        plan = assemble.prepare(settings, root=Path())
        folders = {a.name: assemble.start_folder(plan, i, tick=lambda *_: None)[0] for i, a in enumerate(settings.agents)}
        assemble.serve_dtype(settings, folders)
    one = models.describe(plan.bases["first"]).parameters
    assert asked == [one, 2 * one]


def test_a_device_that_torch_does_not_have_is_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    for name, said in (("cuda:7", "cannot be used"), ("gpu", "cannot be used"), ("meta", "holds no numbers")):
        with pytest.raises(ModelError, match=rf"agents\.second\.device = '{name}' {said}"):
            run.train(worlds.relay(f"agents.second.device={name}"), run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_each_agent_works_where_the_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = worlds.relay("agents.first.device=cpu:0", "agents.second.device=cpu")
    plan = assemble.prepare(settings, root=Path())
    crew: Any = assemble.crew(settings, plan.bases, learners=["first", "second"])
    for name, device in (("first", torch.device("cpu:0")), ("second", torch.device("cpu"))):
        assert crew.sampler._seats[name].slots["promoted"].net.device == device
        assert crew.learners[name].awake.device == device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert local.device_of("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert local.device_of("auto") == torch.device("cuda")


# ---- warm starts -----------------------------------------------------------------------------------------------

START = {"steps": 2, "batch": 8, "demonstrations": 48, "held_out": 8, "check_every": 1}


def begun(index: int, *overrides: str, seats: str = "own") -> tuple[Path, bool]:
    start = "{" + ", ".join(f"{k}={v}" for k, v in START.items()) + f', seats="{seats}"}}'
    settings = worlds.adapters(*(f"agents.{i}.warm_start={start}" for i in range(2)), "agents.1.adapter.rank=4", *overrides)
    plan = assemble.prepare(settings, root=Path())
    folder, record, is_cached = assemble.start_folder(plan, index, tick=lambda *_: None)
    assert record is not None and record.steps == START["steps"]
    return folder, is_cached


def test_a_warm_start_of_an_adapter_is_an_adapter_from_the_cache(straight: Any, tmp_path: Path) -> None:
    (folder, made), (again, cached) = begun(0), begun(0)
    assert folder == again and (made, cached) == (False, True)
    assert adapters.is_adapter(folder) and any(
        t.any() for n, t in load_file(folder / adapters.TENSORS).items() if "lora_B" in n
    )
    for other in ("agents.0.adapter.rank=3", "agents.0.adapter.alpha=9", 'agents.0.adapter.targets=["q_proj"]', "seed=21"):
        assert begun(0, other)[1] is False, f"{other}: another start"


def test_one_warm_start_of_adapters_serves_all_seats() -> None:
    (one, made), (two, copied) = (begun(i, seats="all") for i in range(2))
    assert one == two and (made, copied) == (False, True)
    own = [begun(i)[0] for i in range(2)]
    assert own[0] != own[1]


def test_a_run_of_adapters_begins_with_its_warm_start(tmp_path: Path) -> None:
    start = "{" + ", ".join(f"{k}={v}" for k, v in START.items()) + "}"
    settings = worlds.adapters(f"agents.0.warm_start={start}", "algorithm.stages=1")
    opened = run.train(settings, run=tmp_path / "run")
    assert opened.start["warm_start"]["first"]["steps"] == 2
    first = load_file(opened.folder("first", 0) / adapters.TENSORS)
    assert any(bool(t.any()) for n, t in first.items() if ".lora_B." in n)
    with pytest.raises(RunError, match=r"agents\.0\.adapter"):
        run.train(
            worlds.adapters(f"agents.0.warm_start={start}", "agents.0.adapter.rank=3"), run=tmp_path / "run", resume=True
        )


def test_a_rank_that_no_map_of_the_base_can_have_is_refused() -> None:
    settings = worlds.adapters("agents.0.adapter={rank=5000, alpha=8}")
    plan = assemble.prepare(settings, root=Path())
    with pytest.raises(ModelError, match=r"adapter\.rank = 5000: .* wide and has no more; lower it"):
        assemble.fresh_folder(plan, 0)


def test_adapters_on_a_base_that_changed_since_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    run.train(worlds.adapters("algorithm.stages=1"), run=tmp_path / "run")
    base = adapters.base_of(run.Run(tmp_path / "run").folder("first", 0))
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] += 1.0
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="whose weights are not those that it was made for"):
        run.load_team(tmp_path / "run")


def test_a_run_speaks_with_its_own_tokenizer_and_template(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models.resolve("tiny:64k", seed=20000), folder)
    overrides = [f"agents.{i}.model={folder}" for i in range(2)]
    run.train(worlds.relay("algorithm.stages=1", *overrides), run=tmp_path / "run")

    def said() -> list[tuple[int, ...]]:
        team = run.load_team(tmp_path / "run")
        try:
            return [turn.prompt_ids for turn in team.play("table: abcd ; in: a").turns]
        finally:
            team.close()

    before = said()
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "chat_template": "Q: " + settings["chat_template"]}))
    assert said() == before
    run.train(worlds.relay("algorithm.stages=2", *overrides), run=tmp_path / "run", resume=True)
    assert said()[0] == before[0]
