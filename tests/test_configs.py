"""Every config that we publish parses, says what it means, and nothing in it is silently ignored."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from baton.cli import main
from baton.config import Config, explain, keys, load, parse
from baton.core import losses
from baton.engines.adapters import LoraOptions
from baton.errors import ConfigError, UnsupportedError

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
REFERENCE = ROOT / "configs" / "sat.toml"

TAGS = {"env.name", "protocol.name"}
"""Keys that say which member of a union a table is: required although each member has only one value for them."""
DEFAULT_FACTORIES: Mapping[str, object] = {"env.difficulty": {}, "env.arguments": {}}


# ---- reading the reference -------------------------------------------------------------------------------------


def uncommented(text: str) -> str:
    """The reference with its alternatives made live (their tables repeat: for reading line by line only)."""
    return re.sub(r"^#\| ?", "", text, flags=re.MULTILINE)


def documented(text: str) -> list[tuple[str, str, str]]:
    """(dotted key, default as the comment says it, sentence) of every key that has a comment of the promised form."""
    found: list[tuple[str, str, str]] = []
    section = ""
    for line in uncommented(text).splitlines():
        table = re.match(r"^\[+([a-z_.]+)\]+", line)
        pair = re.match(r"^([a-z_]+) = ", line)
        if table:
            section = table[1] + "."
        said = re.search(r"  # (required|default (?P<default>.+?)); (?P<sentence>\S.*)$", line)
        if said and (table or pair):
            key = section[:-1] if table else section + pair[1]  # pyright: ignore[reportOptionalSubscript]
            found.append((key, said["default"] or "required", said["sentence"]))
    return found


def alternatives(text: str) -> list[dict[str, Any]]:
    """The `#|` blocks as trees."""
    blocks = re.findall(r"(?:^#\|.*\n)+", text, flags=re.MULTILINE)
    return [tomllib.loads(uncommented(block)) for block in blocks]


def the_tree() -> dict[str, Any]:
    return tomllib.loads(REFERENCE.read_text(encoding="utf-8"))


def as_written(default: Any) -> Any:
    """A class default as TOML would give it."""
    return list(default) if isinstance(default, tuple) else default


def test_the_reference_documents_every_key_of_the_tree_with_its_default() -> None:
    said = {
        (key, repr(default if default in ("required", "none") else tomllib.loads(f"x = {default}")["x"]))
        for key, default, _ in documented(REFERENCE.read_text(encoding="utf-8"))
    }
    tables = set(re.findall(r"^\[+([a-z_.]+)\]+", uncommented(REFERENCE.read_text(encoding="utf-8")), flags=re.MULTILINE))
    absent: list[tuple[str, str]] = []
    for key, _, default in keys():
        if isinstance(default, BaseModel) or key in ("env", "agents"):
            assert key in tables, f"configs/sat.toml has no table [{key}]"
            continue
        if key in TAGS or (default is PydanticUndefined and key not in DEFAULT_FACTORIES):
            expected = "required"
        else:
            expected = DEFAULT_FACTORIES.get(key, "none" if default is None else as_written(default))
        if (key, repr(expected)) not in said:
            absent.append((key, repr(expected)))
    assert not absent, f"configs/sat.toml does not say, or says otherwise: {absent}"


def test_the_reference_documents_no_key_that_does_not_exist() -> None:
    known = {key for key, _, _ in keys()}
    assert {key for key, _, _ in documented(REFERENCE.read_text(encoding="utf-8"))} <= known


def test_the_alternatives_of_the_reference_parse_in_place_of_what_they_replace() -> None:
    found = alternatives(REFERENCE.read_text(encoding="utf-8"))
    assert len(found) >= 6
    for alternative in found:
        tree = the_tree()
        for table, value in alternative.items():
            if isinstance(value, list):
                tree["agents"] += value
            elif table == "agents":
                tree["agents"][0] |= value
            else:
                tree[table] = value
        config = parse(tree)
        assert parse(tomllib.loads(config.to_toml())) == config


def test_what_the_reference_asks_for_is_the_default_unless_the_relay_needs_otherwise() -> None:
    # Two members of a union may give one key two defaults; the reference asks for the chain's.
    defaults: dict[str, list[Any]] = {}
    for key, _, default in keys():
        if not key.startswith("env."):
            defaults.setdefault(key, []).append(as_written(default))
    own = {key for key, value in flat(the_tree()) if key in defaults.keys() - TAGS and value not in defaults[key]}
    warm = {f"agents.warm_start.{name}" for name in ("target", "lr", "batch", "steps", "demonstrations")}
    assert own == {"protocol.sees", "agents.name", "agents.model", "agents.system", "agents.max_new_tokens"} | warm


def flat(node: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(node, dict):
        return [pair for k, v in node.items() for pair in flat(v, f"{path}.{k}" if path else k)]
    if isinstance(node, list) and path == "agents":
        return [pair for entry in node for pair in flat(entry, path)]
    return [(path, node)]


# ---- every file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_config_parses_and_survives_being_written_and_read(path: Path) -> None:
    config = load(path)
    again = parse(tomllib.loads(config.to_toml()))
    assert again == config
    assert again.digest == config.digest


@pytest.mark.parametrize("name", ["debate", "router"])
def test_the_example_of_a_protocol_uses_it_and_needs_no_model(name: str) -> None:
    config = load(ROOT / "configs" / f"{name}.toml")
    assert config.protocol.name == name and config.engine.name == "table"


def test_the_published_settings_are_the_papers() -> None:
    config = load(ROOT / "configs" / "published_sat.toml")
    assert config.algorithm.objective.choice == ("sequence", "none", "sequence", "group")
    assert (config.algorithm.stages, config.algorithm.inner_steps, config.algorithm.group) == (10, 10, 4)
    assert config.algorithm.episodes // 4 == 128
    assert {(a.lr, a.temperature, a.max_new_tokens, config.radius(a).token) for a in config.agents} == {
        (1e-5, 0.8, 32768, 0.05)
    }


# ---- an option that does nothing (F04) -------------------------------------------------------------------------

CHANGED: Mapping[str, object] = {
    "seed": 7,
    "env.form": "names",
    "env.symbols": 5,
    "env.prompts": 9000,
    "env.demonstration_accuracy": 0.5,
    "env.layout": "pairs",
    "protocol.sees": "all",
    "protocol.rounds": 2,
    "protocol.rotate": True,
    "agents.name": "another",
    "agents.model": "tiny:200k",
    "agents.system": "Be brief.",
    "agents.max_new_tokens": 3,
    "agents.temperature": 0.7,
    "agents.trainable": False,
    "agents.adapter": "lora",
    "agents.device": "cpu",
    "agents.lr": 3e-4,
    "agents.warm_start.source": "dialogues.jsonl",
    "agents.warm_start.seats": "all",
    "agents.warm_start.demonstrations": 500,
    "agents.warm_start.held_out": 32,
    "agents.warm_start.steps": 11,
    "agents.warm_start.batch": 16,
    "agents.warm_start.lr": 1e-4,
    "agents.warm_start.target": 0.5,
    "agents.warm_start.check_every": 10,
    "algorithm.name": "joint",
    "algorithm.stages": 3,
    "algorithm.episodes": 64,
    "algorithm.group": 8,
    "algorithm.order": "static",
    "algorithm.data": "reuse",
    "algorithm.radius_allocation": "greedy",
    "algorithm.backtrack.tries": 3,
    "algorithm.inner_steps": 3,
    "algorithm.min_informative": 2,
    "algorithm.objective.preset": "sequence",
    "algorithm.objective.weight": "ppo",
    "algorithm.objective.mask": "second_moment",
    "algorithm.objective.level": "sequence",
    "algorithm.objective.band": "coding",
    "algorithm.objective.baseline": "loo",
    "algorithm.objective.advantage_clip": 3.0,
    "algorithm.penalty.start": 0.01,
    "algorithm.penalty.low": 0.0005,
    "algorithm.penalty.high": 5.0,
    "algorithm.line_search.halvings": 2,
    "gate.preset": "demo",
    "gate.probe_prompts": 32,
    "gate.quantile": 0.95,
    "gate.eta": 0.1,
    "gate.direction": "old_new",
    "gate.max_states_per_message": 64,
    "gate.max_states": 4096,
    "engine.dtype": "bfloat16",
    "engine.compute": "float32",
    "engine.batch_size": 8,
    "engine.micro_tokens": 1024,
    "engine.resting": "disk",
    "engine.threads": 2,
    "certificate.update_pairs": 256,
    "certificate.stage_pairs": 512,
    "eval.episodes": 100,
    "eval.temperature": 0.8,
    "certificate.surrogate": True,
    "checkpoint.keep": 1,
    "checkpoint.keep_promoted": "all",
    "track.names": ("tensorboard", "wandb"),
    "track.project": "relays",
}
MAY_CHANGE_ON_RESUME = ("algorithm.stages", "checkpoint.", "eval.", "track.")


def put(tree: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    node: Any = tree
    *way, last = path.split(".")
    for part in way:
        node = node[part]
        node = node[0] if isinstance(node, list) else node
    node[last] = value
    return tree


def get(config: Config, path: str) -> object:
    node: Any = config
    for part in path.split("."):
        node = getattr(node[0] if isinstance(node, tuple) else node, part)
    return node


@pytest.mark.parametrize("path", sorted(CHANGED))
def test_changing_a_key_changes_the_resolved_config_and_its_digest(path: str) -> None:
    before, after = parse(the_tree()), parse(put(the_tree(), path, CHANGED[path]))
    assert get(before, path) != CHANGED[path]
    assert get(after, path) == CHANGED[path]
    assert get(parse(tomllib.loads(after.to_toml())), path) == CHANGED[path]
    assert (before.digest == after.digest) == path.startswith(MAY_CHANGE_ON_RESUME)


def test_no_live_key_of_the_reference_is_left_out_of_that_test() -> None:
    live = {key for key, _ in flat(the_tree())}
    otherwise = {
        *TAGS,
        "engine.name",  # wants table models: see the refusals below
        "agents.radius",  # has its own test below
        "gate.require_certified",  # wants 459 probe prompts: likewise
        "algorithm.reuse.ess_floor",  # wants data = reuse: tests/e2e/test_sat_options.py
        "algorithm.reuse.weights",  # likewise
        "algorithm.ordering_episodes",  # wants a measured order: likewise
        "algorithm.objective.clip",  # wants weight ppo, gspo or sequence: likewise
        "algorithm.objective.cap",  # wants weight is: likewise
        "algorithm.objective.limit",  # wants a mask that has one: likewise
        "certificate.coupling",  # wants pairs: tests/e2e/test_pairs.py
        "certificate.method",  # likewise
        "certificate.delta",  # wants pairs or a surrogate: likewise
        "certificate.run_level",  # likewise
        "certificate.give_up",  # likewise
    }
    assert live - otherwise == set(CHANGED)


@pytest.mark.parametrize(
    ("keys_", "weight", "mask", "level"),
    [
        ({"weight": "ppo", "clip": 0.1}, losses.Ppo(clip=0.1), None, "token"),
        ({"weight": "gspo", "clip": 0.1}, losses.Gspo(clip=0.1), None, "token"),
        ({"weight": "sequence", "clip": 0.1}, losses.SequenceRatio(clip=0.1), None, "token"),
        ({"weight": "is"}, losses.Is(), None, "token"),
        ({"weight": "is", "cap": 3}, losses.Is(cap=3.0), None, "token"),
        ({"weight": "is", "mask": "band", "band": "coding"}, losses.Is(), losses.CODING, "token"),
        ({"band": "reasoning"}, losses.Dis(band=losses.REASONING), None, "token"),
        ({"level": "sequence"}, losses.Dis(band=losses.TIGHT), None, "sequence"),
        ({"mask": "binary_kl"}, losses.Dis(band=losses.TIGHT), losses.BinaryKl(limit=0.05), "token"),
        ({"mask": "binary_kl", "limit": 0.1}, losses.Dis(band=losses.TIGHT), losses.BinaryKl(limit=0.1), "token"),
        (
            {"preset": "dppo", "mask": "probability_symmetric"},
            losses.Is(cap=20.0),
            losses.ProbabilityDifference(limit=0.2, form="symmetric"),
            "token",
        ),
        (
            {"preset": "dppo", "mask": "probability_symmetric", "limit": 0.1, "cap": "none"},
            losses.Is(),
            losses.ProbabilityDifference(limit=0.1, form="symmetric"),
            "token",
        ),
        ({"preset": "m2po", "limit": 0.5}, losses.Is(), losses.SecondMoment(limit=0.5), "token"),
        ({"preset": "flash_reinforce", "weight": "ppo"}, losses.Ppo(), losses.SequenceTrust(limit=3e-3), "sequence"),
    ],
)
def test_a_key_of_the_objective_overrides_its_preset_and_reaches_the_loss(
    keys_: dict[str, object], weight: losses.Weight, mask: losses.Mask | None, level: str
) -> None:
    tree = the_tree()
    for key, value in keys_.items():
        put(tree, f"algorithm.objective.{key}", value)
    loss = parse(tree).algorithm.objective.loss(penalty=0.25)
    assert (loss.weight, loss.mask, loss.level, loss.penalty) == (weight, mask, level, 0.25)


def test_a_preset_that_compares_with_the_whole_batch_needs_no_siblings() -> None:
    for preset, baseline in {"flash_reinforce": "batch_mean", "reinforce_is": "batch_mean", "gspo": "group"}.items():
        tree = put(put(the_tree(), "algorithm.objective.preset", preset), "algorithm.group", 1)
        if baseline == "batch_mean":
            assert parse(tree).algorithm.objective.choice.baseline == baseline
        else:
            with pytest.raises(ConfigError, match="compares siblings"):
                parse(tree)


def test_an_adapter_is_its_defaults_or_a_table_of_its_own() -> None:
    plain, named, own = (parse(put(the_tree(), "agents.adapter", v)).agents[0] for v in ("none", "lora", {"rank": 4}))
    assert plain.lora is None and named.lora == LoraOptions()
    assert own.lora == LoraOptions(rank=4) and own.lora.alpha == 32.0
    assert parse(the_tree()).agents[1].lora is None
    with pytest.raises(ConfigError, match=r"agents\.0\.adapter\.rnk: unknown key; did you mean agents\.adapter\.rank"):
        parse(put(the_tree(), "agents.adapter", {"rnk": 4}))


@pytest.mark.parametrize(("key", "value"), [("adapter", "lora"), ("device", "cpu")])
def test_a_table_takes_neither_adapter_nor_device(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=r"agents\.b: a table has no adapter and no device"):
        parse(
            {
                "env": {"name": "parity"},
                "agents": [{"name": "a", "model": "table:01"}, {"name": "b", "model": "table:01", key: value}],
                "engine": {"name": "table"},
            }
        )


def test_a_gate_with_enough_prompts_may_require_what_it_can_certify() -> None:
    tree = put(put(the_tree(), "gate.require_certified", True), "gate.probe_prompts", 459)
    assert parse(tree).gate.require_certified


def test_an_agents_own_radius_wins_over_the_presets() -> None:
    tree = put(the_tree(), "agents.radius", {"token": 0.2, "message_mean": 0.03})
    config = parse(put(tree, "gate.preset", "demo"))
    own, presets = (config.radius(agent) for agent in config.agents[:2])
    assert (own.token, own.message_mean) == (0.2, 0.03)
    assert (presets.token, presets.message_mean) == (0.5, 0.06)


def test_every_key_is_read_somewhere_in_the_source() -> None:
    read: set[str] = set()
    for path in (ROOT / "src" / "baton").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
    unread = {key for key, _, _ in keys() if key.rsplit(".", 1)[-1] not in read}
    assert not unread, f"keys that nothing reads: {sorted(unread)}"


# ---- what a key means ------------------------------------------------------------------------------------------


def test_every_number_of_the_config_has_a_unit() -> None:
    bare = {key.path for key in explain() if "number" in key.kind and not key.unit}
    assert not bare, f"config.UNITS says nothing of {sorted(bare)}"


def test_a_key_is_explained_with_its_sentence_its_bounds_its_default_and_its_unit() -> None:
    (key,) = explain("agents.0.lr")
    assert key.path == "agents.lr" and key.sentence.startswith("AdamW learning rate")
    assert key.kind == '"auto" or number, above 0' and key.default == '"auto"'
    (key,) = explain("gate.probe_prompts")
    assert (key.kind, key.default, key.unit) == ("whole number, at least 1", "64", "prompts")
    (key,) = explain("agents.model")
    assert key.default == "required"


def test_a_section_explains_all_its_keys_and_a_choice_is_told_once() -> None:
    found = explain("protocol")
    assert [key.path for key in found][:2] == ["protocol", "protocol.name"]
    (choice,) = [key for key in found if key.path == "protocol.name"]
    assert '"chain"' in choice.kind and '"vote"' in choice.kind and choice.only == "" and choice.default == '"chain"'
    assert {key.only for key in found if key.path == "protocol.sees"} == {'protocol.name = "chain"'}
    assert {key.path for key in explain()} == {key for key, _, _ in keys()}


def test_keys_of_one_name_are_told_apart_by_the_choice_that_has_them() -> None:
    assert {key.only: key.default for key in explain("env.prompts")} == {
        'env.name = "relay"': "20000",
        'env.name = "parity"': "4096",
        'env.name = "reasoning_gym"': "4000",
    }


@pytest.mark.parametrize(
    ("asked", "nearest"), [("gate.probe_promts", "gate.probe_prompts"), ("stages", "algorithm.stages"), ("gates", "gate")]
)
def test_a_wrong_key_is_answered_with_the_nearest(asked: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"{asked}: unknown key; .*{re.escape(nearest)}"):
        explain(asked)


# ---- what is refused (F01, F02, F03) ---------------------------------------------------------------------------

REFUSED: Mapping[str, tuple[list[tuple[str, object]], list[str]]] = {
    "a misspelt key": ([("algorithm.stagess", 3)], ["algorithm.stagess", "algorithm.stages"]),
    "a misspelt key of an agent": ([("agents.max_new_token", 3)], ["agents.0.max_new_token", "agents.max_new_tokens"]),
    "a key at the wrong level": ([("algorithm.probe_prompts", 3)], ["algorithm.probe_prompts", "gate.probe_prompts"]),
    "a key at the top level": ([("stages", 3)], ["stages", "algorithm.stages"]),
    "a hyphen": ([("algorithm.inner-steps", 3)], ["algorithm.inner-steps", "underscores", "algorithm.inner_steps"]),
    "a section that is none": ([("gates", {"quantile": 0.9})], ["gates", "gate"]),
    "episodes that are no groups": (
        [("algorithm.episodes", 7), ("algorithm.group", 4)],
        ["episodes = 7", "group = 4", "prompts x group", "4 or 8"],
    ),
    "episodes that the automatic group could not fill": ([("algorithm.episodes", 12)], ["multiple of 8", "8 or 16"]),
    "a group of one": ([("algorithm.group", 1)], ["group = 1", "2 or more"]),
    "a band that the weight does not read": (
        [("algorithm.objective.weight", "ppo"), ("algorithm.objective.band", "tight")],
        ["band = 'tight'", "weight 'ppo'"],
    ),
    "a clip that the weight does not read": ([("algorithm.objective.clip", 0.1)], ["clip = 0.1", "weight 'dis'"]),
    "a cap that the weight does not read": (
        [("algorithm.objective.cap", 20)],
        ["cap = 20", "weight 'dis'", "weight = 'is'"],
    ),
    "a cap that would move an unmoved token": (
        [("algorithm.objective.weight", "is"), ("algorithm.objective.cap", 0.5)],
        ["algorithm.objective.cap", "0.5"],
    ),
    "a limit without a mask that has one": (
        [("algorithm.objective.limit", 0.1)],
        ["limit = 0.1", "mask 'none'", "binary_kl"],
    ),
    "a limit of a band": (
        [(f"algorithm.objective.{k}", v) for k, v in {"weight": "is", "mask": "band", "limit": 0.1}.items()],
        ["limit = 0.1", "mask 'band'"],
    ),
    "a band twice": ([("algorithm.objective.mask", "band")], ["mask = 'band'", "weight 'dis'", "weight = 'is'"]),
    "an advantage clip that the baseline does not read": (
        [("algorithm.objective.baseline", "loo"), ("algorithm.objective.advantage_clip", 3.0)],
        ["advantage_clip = 3.0", "baseline 'loo'", "baseline = 'group'"],
    ),
    "the table engine with models that are none": ([("engine.name", "table")], ["engine.name", "table:SYMBOLS"]),
    "probe prompts that certify nothing": ([("gate.require_certified", True)], ["64 probe prompts", "459 or more"]),
    "more informative groups than an update has": (
        [("algorithm.min_informative", 99)],
        ["min_informative = 99", "can have 96"],
    ),
    "more inner steps than groups": ([("algorithm.inner_steps", 99)], ["inner_steps = 99", "can have 32"]),
    "a rate that is no number": ([("agents.lr", float("inf"))], ["agents.0.lr", "finite"]),
    "penalty bounds the wrong way round": (
        [("algorithm.penalty", {"start": 0.0, "low": 5.0, "high": 1.0})],
        ["low = 5.0 is above high = 1.0"],
    ),
    "a warm start that holds everything out": (
        [("agents.warm_start", {"demonstrations": 64, "held_out": 64})],
        ["held_out = 64", "demonstrations = 64"],
    ),
    "two agents of one name": ([("agents.name", "second")], ["'second'", "2 times"]),
    "sampling that training could not score": ([("agents.top_p", 0.9)], ["agents.0.top_p", "remove the key"]),
    "a tracker that nobody knows": (
        [("track", {"names": ["mlflow"]})],
        ["track.names", "'mlflow'", "tensorboard, wandb, trackio", "pip install 'baton-rl["],
    ),
    "a tracker named twice": ([("track", {"names": ["wandb", "wandb"]})], ["track.names", "'wandb'", "2 times"]),
    "a value of the wrong type": ([("algorithm.stages", "many")], ["algorithm.stages", '"many"', "a whole number"]),
    "a table that is a number": ([("env", 1)], ["env = 1", "table"]),
    "a protocol that is a number": ([("protocol", 1)], ["protocol = 1", "table"]),
    "a list of agents that is a number": ([("agents", 1)], ["agents = 1", "list of tables"]),
    "a section that is a switch": ([("gate", False)], ["gate = false", "table"]),
    "a switch for a number": ([("seed", True)], ["seed = true", "a whole number"]),
    "a switch for a number of an agent": ([("agents.lr", True)], ["agents.0.lr = true", "a number"]),
    "a text for a number": ([("gate.probe_prompts", "64")], ['gate.probe_prompts = "64"', "a whole number"]),
    "a text for a switch": ([("agents.trainable", "no")], ['agents.0.trainable = "no"', "true or false"]),
    "an agent named as a role of the chat": ([("agents.name", "user")], ["'user'", "role"]),
    "a range of a class": (
        [("env", {"name": "mine:Env", "reward_range": [-1.0, 1.0]})],
        ["reward_range has no effect for a class", "give the class a `reward_range`"],
    ),
    "a range the wrong way round": (
        [("env", {"name": "mine:reward", "data": "rows.jsonl", "reward_range": [1.0, 0.0]})],
        ["reward_range = (1.0, 0.0)", "the lower first"],
    ),
    "arguments of a reward function": (
        [("env", {"name": "mine:reward", "data": "rows.jsonl", "arguments": {"a": 1}})],
        ["arguments has no effect for a reward function"],
    ),
    "a key of another protocol": (
        [("protocol", {"name": "vote", "rounds": 2})],
        ["protocol.rounds: unknown key", 'protocol.name = "chain" and to protocol.name = "debate"'],
    ),
    "a protocol without a name": ([("protocol", {"rounds": 2})], ["protocol.name: this key is required"]),
    "a value out of range": ([("gate.quantile", 1.5)], ["gate.quantile", "1.5", "less than 1"]),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_the_config_is_refused_in_words_that_help(case: str) -> None:
    changes, words = REFUSED[case]
    tree = the_tree()
    for path, value in changes:
        put(tree, path, value)
    with pytest.raises(ConfigError) as refusal:
        parse(tree)
    for word in words:
        assert word in str(refusal.value)


LATER: Mapping[str, object] = {
    "algorithm.name": "sao",
    "algorithm.objective.preset": "troll",
    "algorithm.objective.baseline": "critic",
    "gate.preset": "certified",
}


@pytest.mark.parametrize("path", sorted(LATER))
def test_what_a_later_version_brings_is_refused_and_never_ignored(path: str) -> None:
    with pytest.raises(UnsupportedError, match="not implemented in this version"):
        parse(put(the_tree(), path, LATER[path]))


def test_a_misspelt_key_ends_the_command_with_code_2_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(REFERENCE.read_text(encoding="utf-8").replace("inner_steps", "inner_step"), encoding="utf-8")
    assert main(["train", str(path), "--run", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "algorithm.inner_step:" in said and "algorithm.inner_steps" in said
    assert not (tmp_path / "run").exists()


def _parity() -> dict[str, Any]:
    return tomllib.loads((ROOT / "configs" / "parity.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("overrides", "said", "unsaid"),
    [
        (["env.name=nope"], ["env.name = 'nope': unknown", "relay"], ["_family", "tag"]),
        (
            ["agents.0.radius.token=0", "agents.0.radius.message_mean=1"],
            ["agents.0.radius.token = 0"],
            ["preset", "at least 1"],
        ),
        (
            ["agents.0.lr=fast"],
            ['agents.0.lr = "fast"', "'auto', or", "valid number"],
            ["constrained", "at least 1", "several"],
        ),
        (["algorithm.episodes=30", "algorithm.group=auto"], ["no multiple of 8", "24 or 32"], ["28"]),
        (["algorithm.penalty.start=1e-5"], ["start = 1e-05 is outside low = 0.001"], []),
        (
            ["algorithm.penalty.start=1e-5", "algorithm.objective.weight=ppo", "algorithm.objective.band=tight"],
            ["start = 1e-05", "band = 'tight'"],
            [],
        ),
    ],
)
def test_a_fault_is_told_in_the_files_own_words(overrides: list[str], said: list[str], unsaid: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(_parity(), overrides)
    message = str(caught.value)
    assert all(text in message for text in said), message
    assert not any(text in message for text in unsaid), message


def test_a_missing_key_beside_a_misspelt_one_names_both() -> None:
    tree = _parity()
    tree["agents"][0]["radius"] = {"tokn": 0.1, "message_mean": 0.1}
    with pytest.raises(ConfigError, match=r"(?s)radius\.token: this key is required.*radius\.tokn: unknown key"):
        parse(tree)


@pytest.mark.parametrize(("said", "value"), [(".1", 0.1), ("2.", 2.0), (".5e-2", 0.005)])
def test_a_number_may_leave_out_the_digit_at_its_point_on_the_command_line(said: str, value: float) -> None:
    assert parse(_parity(), [f"agents.0.lr={said}"]).agents[0].lr == value
    for word in ("1.2.3", ".", ".e1"):
        with pytest.raises(ConfigError, match="lr"):
            parse(_parity(), [f"agents.0.lr={word}"])
