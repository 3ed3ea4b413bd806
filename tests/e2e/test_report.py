"""`baton report`: what stands on the page, that nothing a model wrote can act there, and that odd runs render."""

from __future__ import annotations

import copy
import html
import json
import math
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import baton
from baton import records, run
from baton.cli import main
from baton.core import scores
from baton.ui import chart
from baton.ui import report as pages
from e2e import worlds

VOID = {"meta", "link", "br", "circle", "path", "line", "use", "polyline"}
"""Elements of the page without an end tag, or with a self-closing one."""


class Page(HTMLParser):
    """A page taken apart: elements with their attributes, and what stands in a `pre`, a `title`, a table row."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.source = page
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.words: dict[str, list[str]] = {"pre": [], "title": [], "tr": [], "summary": [], "p": []}
        self.feed(page)
        self.close()
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag in self.words:
            self.words[tag].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag, words in self.words.items():
            if tag in self.open:
                words[-1] += data

    @property
    def text(self) -> str:
        """Everything that a reader sees, without tags."""
        body = re.sub(r"<style>.*?</style>", "", self.source, flags=re.DOTALL)
        body = re.sub(r"</?(?:b|i|bdi|code)>", "", body)
        return html.unescape(re.sub(r"<[^>]*>", " ", body)).replace("\u00a0", " ")

    def marks(self) -> dict[int, str]:
        """Update -> the shape that stands in its lane."""
        found: dict[int, str] = {}
        pattern = r'<svg [^>]*class="mark" data-update="(\d+)"><title>[^<]*</title><use href="#([^"]*)"'
        for index, shape in re.findall(pattern, self.source):
            assert int(index) not in found
            found[int(index)] = shape
        return found


def taken_apart(path: Path) -> Page:
    return Page(baton.report(path))


Change = Callable[[Path, list[dict[str, Any]]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with every word: `a` may hardly move, so it is shrunk or rejected; `b` is accepted."""
    path = tmp_path_factory.mktemp("report") / "first"
    run.train(worlds.parity("algorithm.stages=4", "agents.a.radius={token=2e-4, message_mean=1e-4}", "seed=2"), run=path)
    assert {u["word"] for u in run.Run(path).updates} == {"accepted", "shrunk", "rejected"}
    return path


@pytest.fixture
def changed(trained: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of that run with other lines in its journal."""

    def make(change: Change, name: str = "changed") -> Path:
        path = tmp_path / name
        shutil.copytree(trained, path)
        lines = change(path, records.read_records(path / "stages.jsonl"))
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (path / "stages.jsonl").write_text(text, encoding="utf-8")
        return path

    return make


def edit_episodes(path: Path, lines: list[dict[str, Any]], edit: Callable[[int, dict[str, Any]], None]) -> None:
    """Change every train row of every episodes file in place."""
    for line in lines:
        if line["kind"] == "update":
            rows = records.read_episodes(path / line["episodes_file"])
            for i, row in enumerate(row for row in rows if row["use"] == "train"):
                edit(i, row)
            records.write_episodes(path / line["episodes_file"], rows)


# ---- content ---------------------------------------------------------------------------------------------------


def test_every_update_has_a_mark_in_its_lane_whose_shape_is_its_verdict(trained: Path) -> None:
    updates = run.Run(trained).updates
    page = taken_apart(trained)
    marks = page.marks()
    assert sorted(marks) == [u["index"] for u in updates]
    for u in updates:
        shape = marks[u["index"]]
        if u["word"] == "accepted":
            assert shape == "accepted"
        elif u["word"] == "shrunk":
            assert shape == f"shrunk-{round(1 / u['verdict']['scale'])}"
        else:
            assert shape == u["verdict"]["reason"] == "radius"


def test_a_mark_says_verdict_versions_divergences_reward_and_evidence(trained: Path) -> None:
    updates = run.Run(trained).updates
    said = re.findall(r'data-update="(\d+)"><title>([^<]*)</title>', baton.report(trained))
    for (index, words), u in zip(said, updates, strict=True):
        gate = u["verdict"]["gate"]
        assert int(index) == u["index"] and f"stage {u['stage']}, {u['agent']}: {u['word']}" in words
        assert (f"v{u['from_version']} -&gt; v{u['to_version']}" if u["to_version"] else "(radius)") in words
        assert (
            f"{len(u['looks'])} look" in words and f"{gate['n_states']} states of {gate['n_units']} probe prompts" in words
        )
        assert f"{u['episodes']['n']} episodes of {u['episodes']['prompts']} prompts" in words
        if u["word"] == "shrunk":
            assert f"shrunk 1/{round(1 / u['verdict']['scale'])}" in words


def test_the_table_has_a_row_for_every_update_with_the_interval_of_its_rewards(trained: Path) -> None:
    updates = run.Run(trained).updates
    rows = taken_apart(trained).words["tr"]
    for u in updates:
        prompts: dict[str, list[float]] = {}
        for row in records.read_episodes(trained / u["episodes_file"]):
            if row["use"] == "train" and row["reward"] is not None:
                prompts.setdefault(row["task_id"], []).append(row["reward"])
        interval = scores.mean_interval([sum(r) / len(r) for r in prompts.values()])
        low, high = (f"{end:.3f}".replace("0.", ".", 1) for end in (interval.low, interval.high))
        wanted = (str(u["stage"]), u["agent"], u["word"], f"[{low}, {high}]", f"{u['lr']:.2g}")
        assert any(all(word in row for word in wanted) and row.startswith(f"{u['stage']}{u['agent']}") for row in rows), (
            wanted
        )


def test_the_head_says_in_plain_words_what_became_of_the_updates(trained: Path) -> None:
    opened = run.Run(trained)
    words = Counter(u["word"] for u in opened.updates)
    text = " ".join(taken_apart(trained).text.split())
    start = f"{opened.start['start_accuracy']:.3f}".removeprefix("0")
    last = f"{opened.updates[-1]['episodes']['reward']:.3f}".removeprefix("0")
    assert (
        f"In 4 stages, 8 updates were proposed: {words['accepted']} accepted whole, {words['shrunk']} accepted shrunk, "
        f"{words['rejected']} rejected (radius {words['rejected']}) and taken back exactly. In training the mean reward "
        f"went from {start} on 64 train prompts to {last} in the episodes of the last update."
    ) in text
    for fact in ("sat, stage 4 of 4", "finished: all stages are done", "parity, protocol chain", "Seed 2", "preset demo"):
        assert fact in text, fact
    for name in ("torch", "transformers", "numpy"):
        assert f"{name} {opened.start['versions'][name]}" in text
    assert "table:01" in text and "2e-4 / 1e-4" in text and "0.5 / 0.06" in text


def test_each_agent_has_its_divergences_below_its_own_radius(trained: Path) -> None:
    page = taken_apart(trained)
    for name, token, mean in (("a", "2e-4", "1e-4"), ("b", "0.5", "0.06")):
        assert f"KL of {name}, per token state, at the gate's quantile, in nats against the radius" in page.words["title"]
        assert f"KL of {name}, mean over messages, in nats against the radius" in page.words["title"]
        assert f"radius {token}<" in page.source and f"radius {mean}<" in page.source
    # The whole step of a shrunk or rejected update stands above the look that decided.
    n = sum(len(u["looks"]) > 1 for u in run.Run(trained).updates)
    assert n and page.source.count('href="#look"') == 2 * n == page.source.count('class="shrink"')


def test_the_published_bound_is_shown_term_by_term_and_always_void(changed: Callable[..., Path]) -> None:
    def claim(path: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for line in lines:
            if line["kind"] == "stage":
                line["achieved"] |= {"verdict": "positive", "lower_bound": 3.0}
                line["achieved"]["terms"][2]["value"] = -0.0
        return lines

    page = taken_apart(changed(claim))
    text = page.text
    for term in ("gain", "curvature", "occupancy", "bias", "sample"):
        assert any(row.startswith(term) and "assumed" in row for row in page.words["tr"]), term
    assert "Stage 4, term by term" in text and text.count("void (assumed_term)") == 4
    assert "positive" not in text and "-0" not in text.split()


def test_the_page_never_says_what_no_evidence_carries(trained: Path) -> None:
    text = " ".join(taken_apart(trained).text.lower().split())
    assert "guarantee" not in text and "certified" not in text and "proven improvement" not in text


def test_twenty_episodes_are_spread_over_the_run_and_can_be_read(trained: Path) -> None:
    page = taken_apart(trained)
    heads = [words for words in page.words["summary"] if "update of" in words]
    assert len(heads) == 20
    assert heads[0].startswith("stage 1 ") and heads[-1].startswith("stage 4 ")
    assert len({head.split(" reward")[0] for head in heads}) == 8  # some of every update
    assert len(page.words["pre"]) == 20 * 3 and page.words["pre"][0].startswith("round ")
    assert "a@v0" in page.text and "b@v0" in page.text
    unfolded = [attributes for tag, attributes in page.elements if tag == "details" and "open" in attributes]
    assert len(unfolded) == 1


def test_probe_episodes_which_nobody_graded_are_not_among_them(changed: Callable[..., Path]) -> None:
    def turn_around(path: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for file in (path / "episodes").iterdir():
            records.write_episodes(file, records.read_episodes(file)[::-1])
        return lines

    page = taken_apart(changed(turn_around))
    ids = [words for words in page.words["p"] if "/parity-1x2-" in words]
    assert len(ids) == 20 and all("/sample/" in name for name in ids)


@pytest.mark.parametrize(
    ("sizes", "count"),
    [([5], 3), ([128] * 450, 20), ([1, 1, 40], 20), ([40, 1, 1], 20), ([0, 3, 0, 2], 20), ([], 20), ([2, 2], 3)],
)
def test_chosen_episodes_are_there_differ_and_reach_from_the_first_update_to_the_last(sizes: list[int], count: int) -> None:
    chosen = pages.choose(sizes, count)
    assert len(chosen) == len(set(chosen)) == min(count, sum(sizes))
    assert all(0 <= row < sizes[update] for update, row in chosen)
    there = [i for i, size in enumerate(sizes) if size]
    if there:
        assert chosen[0][0] == there[0] and chosen[-1][0] == there[-1]
    assert chosen == sorted(chosen)


def test_evaluations_in_the_run_directory_become_tables_the_newest_first(changed: Callable[..., Path]) -> None:
    def add(path: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        row = {"name": "team", "value": 0.5, "low": 0.4, "high": 0.6, "n": 77, "tokens_per_answer": 2.0, "difference": None}
        other = row | {"name": "untrained team", "value": 0.25, "difference": [0.25, 0.125, 0.375], "note": "<as it was>"}
        absent = {"name": "one model of the total size", "value": None, "low": None, "high": None, "note": "not run: why"}
        (path / "evaluations").mkdir()
        for name, value in (("0001.json", 0.3), ("0002.json", 0.5)):
            found = {"k": 2, "temperature": 1.0, "versions": {"a": 3}, "rows": [row | {"value": value}, other, absent]}
            (path / "evaluations" / name).write_text(json.dumps(found))
        (path / "evaluations" / "0003.json").write_text('{"rows": 3')
        return lines

    page = taken_apart(changed(add))
    rows = [row for row in page.words["tr"] if row.startswith(("team.", "untrained", "one model"))]
    assert rows[0] == "team.500[.400, .600]-772.0"
    assert rows[1] == "untrained team<as it was>.250[.400, .600]+0.250 [.125, .375]772.0"
    assert rows[2] == "one model of the total sizenot run: why-----"
    assert rows[3].startswith("team.300")
    assert "0002.json, a@v3, 2 episodes a prompt, temperature 1" in page.text and "1 older evaluation" in page.text
    assert "left out: evaluations/0003.json" in page.text
    assert "holds no evaluation" not in page.text


@pytest.mark.parametrize("is_of_now", [True, False])
def test_the_first_sentence_is_the_result_where_the_team_as_it_is_was_measured(
    changed: Callable[..., Path], is_of_now: bool
) -> None:
    def add(path: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        versions = dict(run.Run(path).position.team.versions) if is_of_now else {"a": 0, "b": 0}
        row = {"name": "team", "value": 0.5, "low": 0.4, "high": 0.6, "n": 77}
        rows = [row, row | {"name": "untrained team", "value": 0.25, "low": 0.2, "high": 0.3}]
        (path / "evaluations").mkdir()
        (path / "evaluations" / "001.json").write_text(json.dumps({"versions": versions, "rows": rows}))
        return lines

    text = " ".join(taken_apart(changed(add)).text.split())
    result = (
        "On 77 test prompts the team's mean reward is .500 [.400, .600], the untrained team's .250 [.200, .300]. In 4 stages"
    )
    assert (result in text) is is_of_now
    assert ("test prompts, untrained → trained" in text) is is_of_now
    assert ("train prompts, start → last update" in text) is not is_of_now


def test_a_run_without_an_evaluation_says_how_to_get_one(trained: Path) -> None:
    assert f"baton evaluate {trained}" in taken_apart(trained).text


def test_lengths_are_tokens_a_message_and_the_share_that_was_cut(changed: Callable[..., Path]) -> None:
    def longer(path: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for line in lines:
            if line["kind"] == "update":
                line["episodes"]["tokens"]["a"] = 7 * line["episodes"]["n"]
                line["episodes"]["cut"]["a"] = 0.25
        return lines

    titles = taken_apart(changed(longer)).words["title"]
    assert sum(title.endswith(": 7") for title in titles) == 8
    assert sum(title.endswith(": 25 %") for title in titles) == 8
    assert sum(title.endswith(": 1") for title in titles) == 8  # b's


def test_the_same_run_gives_the_same_page(trained: Path) -> None:
    assert baton.report(trained) == baton.report(str(trained))


# ---- what a model wrote ----------------------------------------------------------------------------------------

HOSTILE = (
    '</script></style></pre></title><script>alert(1)</script><img src=x onerror=alert(2)>"\' onload="x" &lt; &amp;'
    "\x1b[31m\x00\x07\x7f\x85\t\u202egnp\u200b\u2028\u2029\ufeff\ufdd0\uffff\U000e0041\ue000\r\n  end"
)


def poisoned(path: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every text that a model, a grader, an env or a config can choose is hostile."""

    def edit(i: int, row: dict[str, Any]) -> None:
        for turn in row["turns"]:
            turn["text"] = HOSTILE
            turn["agent"] = f"{turn['agent']}{HOSTILE}"
        row |= {"prompt": HOSTILE, "answer": HOSTILE, "reason": HOSTILE, "id": HOSTILE}
        if i % 2 == 0:
            row |= {"outcome": "failed", "reward": None}

    edit_episodes(path, lines, edit)
    text = json.dumps(lines)
    for name in ("a", "b"):
        text = text.replace(f'"agent": "{name}"', json.dumps({"agent": name + HOSTILE})[1:-1])
        text = text.replace(f'"{name}": ', json.dumps({name + HOSTILE: 0})[1:-2])
    poisonous: list[dict[str, Any]] = json.loads(text.replace('"table:01"', json.dumps(HOSTILE)))
    for line in poisonous:
        if line["kind"] == "update":
            line["episodes"]["failed"] = {HOSTILE: 1}
            line["verdict"]["detail"] = HOSTILE
        if line["kind"] == "stage":
            line["achieved"]["terms"][0] |= {"name": HOSTILE, "note": HOSTILE}
    (path / "evaluations").mkdir()
    row = {"name": HOSTILE, "value": 0.5, "low": 0.4, "high": 0.6, "note": HOSTILE}
    (path / "evaluations" / "1.json").write_text(json.dumps({"versions": {HOSTILE: 1}, "rows": [row]}))
    return poisonous


def check_harmless(page: Page) -> None:
    """No script, no handler, no reference to anything but the page's own marks; nothing invisible."""
    assert not {tag for tag, _ in page.elements} & {"script", "img", "iframe", "object", "embed", "form", "base", "a "}
    for tag, attributes in page.elements:
        assert not [
            name for name in attributes if name.startswith("on") or name in ("src", "srcset", "action", "xlink:href")
        ]
        assert re.fullmatch(r"#[\w-]+|data:,", attributes.get("href", "#x")), (tag, attributes)
    hidden = sorted({c for c in page.source if chart.is_hidden(c)})
    assert hidden == []
    assert page.source.isprintable() is False  # newlines alone
    policy = next(a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'") and "script" not in policy
    ids = Counter(a["id"] for _, a in page.elements if "id" in a)
    assert [key for key, n in ids.items() if n > 1] == []
    assert {a["href"][1:] for tag, a in page.elements if tag in ("use", "a")} <= ids.keys()
    assert dict(page.elements)["html"] == {"lang": "en"}


def test_the_page_asks_for_nothing_outside_itself(trained: Path) -> None:
    page = taken_apart(trained)
    check_harmless(page)
    assert not re.search(r"https?:|//[a-z]|src\s*=|url\(|@import", page.source)


def test_what_a_model_wrote_is_shown_and_does_nothing(changed: Callable[..., Path], trained: Path) -> None:
    page = taken_apart(changed(poisoned, "<b>&name"))
    check_harmless(page)
    plain = taken_apart(trained)
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in plain.elements} | {"br"}
    spelt = r"\x1b[31m\x00\x07\x7f\x85\t\u202egnp\u200b\u2028\u2029\ufeff\ufdd0\uffff\U000e0041\ue000\r"
    said = [words for words in page.words["pre"] if words.startswith("</script>")]
    assert len(said) == len(page.words["pre"]) == 60
    assert all(words.endswith(f"{spelt}\n  end") and "<img src=x onerror=alert(2)>\"' onload=" in words for words in said)
    assert "<b>&name" in page.words["title"][0]
    assert any("failed" in words for words in page.words["summary"])


# ---- odd runs --------------------------------------------------------------------------------------------------


def no_update(path: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == "start"]


def unfinished(path: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    fifth = [i for i, line in enumerate(lines) if line["kind"] == "update"][4]
    return lines[: fifth + 1]


def no_files(path: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    shutil.rmtree(path / "episodes")
    return lines


def damaged_files(path: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first, second, *_ = sorted((path / "episodes").iterdir())
    first.write_bytes(b"no parquet")
    second.unlink()
    return lines


def endless(path: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Divergences without bound and of exactly nothing, rejections of every kind, a scale that no one halved."""
    updates = [line for line in lines if line["kind"] == "update"]
    for look in (*updates[0]["looks"], updates[0]["verdict"]["gate"]):
        look |= {"q_gate": math.inf, "message_mean": math.inf}
    for look in (*updates[1]["looks"], updates[1]["verdict"]["gate"]):
        look |= {"q_gate": 0.0, "message_mean": 0.0}
    for update, reason in zip(updates[2:], ("no_signal", "non_finite", "not_published", "harm"), strict=False):
        gate = update["looks"][-1] if reason == "not_published" else None
        verdict = {"kind": "rejected", "reason": reason, "gate": gate, "detail": "why"}
        update |= {"word": "rejected", "verdict": verdict, "to_version": None, "replay": None}
        update["looks"] = [gate] if gate else []
    updates[-1] |= {"word": "shrunk"}
    updates[-1]["verdict"] |= {"kind": "accepted", "scale": 0.3}
    updates[-1]["episodes"]["failed"] = {"tool died": 3}
    return lines


def observed(path: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`a` is not trained: its turns are observations without ids, and it is never updated."""

    def edit(i: int, row: dict[str, Any]) -> None:
        row["turns"][0] |= {"kind": "observation", "ids": [], "logprobs": [], "versions": [], "prompt_ids": []}

    edit_episodes(path, lines, edit)
    kept = [line for line in lines if line["kind"] != "update" or line["agent"] == "b"]
    for line in kept:
        if line["kind"] == "update":
            line["episodes"]["tokens"]["a"] = 0
    return kept


def fifty_agents(path: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = [f"agent-{i:02d}" for i in range(50)]
    start = next(line for line in lines if line["kind"] == "start")
    member = start["position"]["team"]["members"][0]
    start["position"]["team"]["members"] = [member | {"agent": name} for name in names]
    out = [start]
    updates = [line for line in lines if line["kind"] == "update"]
    for stage in range(1, 4):
        for i, name in enumerate(names):
            update = copy.deepcopy(updates[(stage + i) % len(updates)])
            update |= {"stage": stage, "agent": name, "index": len(out) - 1}
            update["episodes"]["tokens"] = dict.fromkeys(names, 32)
            out.append(update)
    return out


def unicode_names(path: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def edit(i: int, row: dict[str, Any]) -> None:
        for turn, name in zip(row["turns"], ("العربية", "队长👩"), strict=True):
            turn["agent"] = name

    edit_episodes(path, lines, edit)
    text = json.dumps(lines)
    for name, other in (("a", "العربية"), ("b", "队长👩")):
        text = text.replace(f'"agent": "{name}"', f'"agent": "{other}"').replace(f'"{name}": ', f'"{other}": ')
    return json.loads(text)


ODD: dict[str, tuple[Change, tuple[str, ...]]] = {
    "no update": (
        no_update,
        ("No update is complete yet; the team starts at", "without an ending", "No episode can be shown"),
    ),
    "an unfinished stage": (
        unfinished,
        ("In 2 stages and one that is unfinished, 5 updates", "Stage 3 is unfinished: 1 of its updates"),
    ),
    "no episodes files": (
        no_files,
        ("The episodes files of 8 of 8 updates are gone", "No episode can be shown", "cannot be counted"),
    ),
    "damaged episodes files": (damaged_files, ("The episodes files of 2 of 8 updates", "left out: episodes/000000-")),
    "endless divergences": (endless, ("no_signal 1", "non_finite 1", "not_published 1", "harm 1", "inf")),
    "an agent that is not trained": (observed, ("sampled no token of its own", "observed, not sampled by a trained agent")),
    "fifty agents": (fifty_agents, ("In the first stage, 150 updates were proposed", "44 more agents", "50 agents")),
    "unicode names": (unicode_names, ("العربية", "队长👩@v0")),
}


@pytest.mark.parametrize("case", sorted(ODD))
def test_an_odd_run_renders_and_says_what_is_odd(changed: Callable[..., Path], case: str) -> None:
    change, said = ODD[case]
    path = changed(change)
    page = taken_apart(path)
    check_harmless(page)
    text = " ".join(page.text.split())
    for words in said:
        assert words in text, words
    assert ("left out:" in text) == (case == "damaged episodes files")
    assert sorted(page.marks()) == [u["index"] for u in run.Run(path).updates]
    assert not re.search(r'(?:x|y|r|x1|x2|y1|y2|points|height|width)="[^"]*(?:nan|inf)', page.source)
    for key in ("updates", "divergence", "reward", "evaluation", "lengths", "certificate", "episodes"):
        assert f'<section id="{key}">' in page.source


@pytest.mark.parametrize("schedule", ["joint", "independent"])
def test_other_schedules_render_with_the_order_in_which_they_ran(tmp_path: Path, schedule: str) -> None:
    run.train(worlds.parity(f"algorithm.name={schedule}"), run=tmp_path / "run")
    page = taken_apart(tmp_path / "run")
    check_harmless(page)
    assert sorted(page.marks()) == list(range(6))
    assert f"{schedule}, stage 3 of 3" in page.text and "In 3 stages, 6 updates" in " ".join(page.text.split())


def test_one_agent_alone_renders(tmp_path: Path) -> None:
    run.train(worlds.parity("algorithm.stages=2", agents=("solo",)), run=tmp_path / "run")
    page = taken_apart(tmp_path / "run")
    check_harmless(page)
    assert sorted(page.marks()) == [0, 1] and "2 updates of 1 agent" in page.source


# ---- figures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("agents", "stages"), [(1, 1), (2, 19), (3, 40), (3, 150), (50, 4), (50, 150)])
def test_marks_of_one_lane_never_touch_and_keep_their_order(agents: int, stages: int) -> None:
    line = chart.timeline([k for k in range(stages) for _ in range(agents)], keep_apart=True)
    assert list(line.at) == sorted(line.at) and all(0 < x < 100 for x in line.at)
    mark = 6.0 if line.is_dense else 10.0
    for k in range(stages - 1):
        # The last place of a stage and the first of the next may be one agent's.
        gap = line.at[(k + 1) * agents] - line.at[k * agents + agents - 1]
        assert gap / 100 * line.width >= mark


def test_a_column_ends_where_the_stage_changes() -> None:
    assert [stage for stage, _ in chart.timeline([1, 1, 2, 2, 2]).columns] == [1, 2]
    assert [stage for stage, _ in chart.timeline([1, 2, 1, 2]).columns] == [1, 2, 1, 2]


@pytest.mark.parametrize(
    "values", [[0.0], [1.0, 1.0], [0.02, 0.5], [1e-9, 3.0], [0.0, 1e-4, 0.5], [math.inf, 0.1], [-2.0, 3.5], [], [5e5]]
)
@pytest.mark.parametrize("log", [False, True])
def test_a_scale_holds_its_values_between_ticks_in_order(values: list[float], log: bool) -> None:
    scale = chart.scale(values, height=100, log=log)
    places = [scale.y(value) for value in sorted(values)]
    assert places == sorted(places, reverse=True)
    assert all(chart.TOP <= place <= chart.TOP + 100 for place in places)
    ticks = [scale.y(tick) for tick in scale.ticks]
    assert 2 <= len(ticks) <= 7 and len(set(ticks)) == len(ticks)
    distinct = {value for value in values if 0 < value < math.inf}
    assert len({round(scale.y(value), 6) for value in distinct}) == len(distinct)
    assert scale.is_log == (log and len(distinct) > 1 and max(distinct) > 20 * min(distinct))


# ---- the command -----------------------------------------------------------------------------------------------


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def go(*words: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return go


def test_the_command_writes_the_page_and_replaces_an_older_one(
    said: Any, changed: Callable[..., Path], tmp_path: Path
) -> None:
    path = changed(lambda path, lines: lines)
    assert said("report", path) == (0, f"{path / 'report.html'}\n", "")
    assert (path / "report.html").read_text(encoding="utf-8") == baton.report(path)
    target = tmp_path / "page.html"
    target.write_text("older")
    code, out, _ = said("report", path, "-o", target, "--json")
    assert code == 0
    assert json.loads(out) == {"run": str(path), "file": str(target), "bytes": target.stat().st_size}
    assert target.read_text(encoding="utf-8") == baton.report(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["changed", "page.html"]


@pytest.mark.parametrize("bad", ["absent/page.html", "folder", "file/page.html"])
def test_a_path_that_cannot_be_written_is_one_error_before_any_work(
    said: Any, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(pages, "read_view", lambda run: pytest.fail("work began"))
    code, out, err = said("report", trained, "--output", tmp_path / bad)
    assert code == 2 and out == ""
    assert err.startswith(f"error: {tmp_path / bad} cannot be written (") and err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_a_disk_that_fills_up_leaves_the_older_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "page.html").write_text("older")
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(baton.BatonError, match=r"could not be written \(No space left on device\)"):
        pages.save(tmp_path / "page.html", "newer")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["older"]


def test_a_folder_that_holds_no_run_is_refused(said: Any, tmp_path: Path) -> None:
    code, _, err = said("report", tmp_path)
    assert code == 1 and "is no run directory" in err
    assert list(tmp_path.iterdir()) == []


# ---- in a browser ----------------------------------------------------------------------------------------------

PROBE = """<!doctype html><body style="margin:0"><pre id="result"></pre><script>
function visible(e) {
  const r = e.getBoundingClientRect(), s = getComputedStyle(e);
  return r.width > 0 && r.height > 0 && s.visibility == "visible";
}
const frame = document.querySelector("#FRAME");
addEventListener("load", () => {
  const found = [];
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, lanes = [...page.querySelectorAll("[data-update]")];
    const one = {asked: frame.clientWidth, marks: lanes.filter(m => visible(m.querySelector("use"))).length};
    one.background = frame.contentWindow.getComputedStyle(page.body).backgroundColor;
    one.closed = page.documentElement.scrollWidth;
    page.querySelectorAll("details").forEach(d => { d.open = true; });
    one.opened = page.documentElement.scrollWidth;
    one.outside = [...page.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > frame.clientWidth + 0.5
      && !e.closest(".scroll")).map(e => e.outerHTML.slice(0, 80));
    one.scripts = page.scripts.length;
    one.height = page.documentElement.scrollHeight;
    found.push(one);
  }
  document.querySelector("#result").textContent = JSON.stringify(found);
});
</script>"""
"""A page of ours around the report: it measures each frame, closed and with everything unfolded."""


@pytest.fixture(scope="module")
def browser() -> str:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no browser: neither chromium nor chromium-browser is on the PATH (apt-get install chromium)")
    return path


def opened_in(browser: str, page: str, folder: Path, *more: str) -> tuple[list[dict[str, Any]], list[str]]:
    """What each frame (360 and 1280 pixels wide) measures, and every line on the browser's console."""
    widths = (360, 1280)
    frames = "".join(
        f'<iframe srcdoc="{html.escape(page)}" style="border:0;width:{w}px;height:800px;display:block"></iframe>'
        for w in widths
    )
    (folder / "probe.html").write_text(PROBE + frames, encoding="utf-8")
    command = [
        *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"),
        *(f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000", *more, "--dump-dom"),
        (folder / "probe.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True, errors="replace")
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found and found[1], done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(found[1])), console


@pytest.mark.parametrize("case", ["as it is", "hostile texts", "fifty agents"])
def test_the_page_opens_in_a_browser_without_an_error_and_no_wider_than_the_window(
    browser: str, trained: Path, changed: Callable[..., Path], tmp_path: Path, case: str
) -> None:
    changes: dict[str, Change] = {"hostile texts": poisoned, "fifty agents": fifty_agents}
    path = changed(changes[case]) if case in changes else trained
    frames, console = opened_in(browser, baton.report(path), tmp_path)
    assert console == []
    assert [frame["asked"] for frame in frames] == [360, 1280]
    for frame in frames:
        assert frame["marks"] == len(run.Run(path).updates)
        assert frame["closed"] <= frame["asked"] and frame["opened"] <= frame["asked"]
        assert frame["outside"] == []
        assert frame["scripts"] == 0


def test_the_page_follows_the_colours_that_a_reader_prefers(browser: str, trained: Path, tmp_path: Path) -> None:
    page = baton.report(trained)
    seen = {
        scheme: opened_in(browser, page, tmp_path, f"--blink-settings=preferredColorScheme={number}")[0][0]["background"]
        for scheme, number in (("dark", 0), ("light", 1))
    }
    assert seen == {"dark": "rgb(20, 23, 26)", "light": "rgb(246, 245, 241)"}


def test_a_script_in_the_page_would_be_refused_and_seen(browser: str, trained: Path, tmp_path: Path) -> None:
    """The control: the policy of the page stops what escaping would let through, and the test above would have seen it."""
    page = baton.report(trained).replace("</main>", "<script>document.body.innerHTML = ''</script></main>")
    frames, console = opened_in(browser, page, tmp_path)
    assert len(console) == 2 and "Content Security Policy" in console[0]
    assert all(frame["marks"] == 8 and frame["scripts"] == 1 for frame in frames)
