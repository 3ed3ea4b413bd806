"""What the pages say is there, is there; what they may not say, they do not say."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from pathlib import Path

import pytest

from baton import cli

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "baton"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
SPEAKING = sorted(
    path
    for folder, pattern in [
        ("src", "*.py"),
        ("examples", "*.py"),
        ("benchmarks", "*.py"),
        ("tests", "*.py"),
        ("configs", "*.toml"),
    ]
    for path in (ROOT / folder).rglob(pattern)
)

MUST_EXIST = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(f"docs/{n}.md" for n in ("concepts", "design", "equations", "evidence", "log")),
)


@pytest.mark.parametrize("name", MUST_EXIST)
def test_the_page_is_there(name: str) -> None:
    assert (ROOT / name).is_file()


# ---- links and paths -------------------------------------------------------------------------------------------


def links(text: str) -> list[str]:
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+://", target)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    broken = [t for t in links(page.read_text(encoding="utf-8")) if not (page.parent / t.split("#")[0]).exists()]
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:configs|examples|docs|tests|benchmarks|src)/[\w/.-]+\.(?:py|toml|md))`", text))
    named |= set(re.findall(r"baton train (configs/[\w.-]+)", text))
    absent = sorted(name for name in named if not (ROOT / name).is_file())
    assert not absent


def test_every_room_of_the_source_is_in_the_map_of_the_design() -> None:
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rooms = [path.name for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]
    absent = [name for name in rooms if not re.search(rf"(?<![\w.]){re.escape(name)}", design)]
    assert not absent


# ---- commands --------------------------------------------------------------------------------------------------


def commands() -> dict[str, set[str]]:
    """Command -> its options, from the parser itself."""
    parser = cli._parser()  # pyright: ignore[reportPrivateUsage]
    sub = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return {name: {o for a in p._actions for o in a.option_strings} for name, p in sub.choices.items()}


def test_the_readme_names_every_command_and_no_other() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`?baton ([a-z]+) (?:CONFIG|RUN|MODEL)", text)) | {"doctor"} == set(commands())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_and_options_in_the_pages_are_the_parsers(page: Path) -> None:
    known = commands()
    text = page.read_text(encoding="utf-8")
    spoken = re.findall(r"^baton [^\n]*$", text, flags=re.MULTILINE) + re.findall(r"`(baton [^`]*)`", text)
    for line in spoken:
        name = line.split()[1]
        assert name in known, line
        assert set(re.findall(r"--[a-z-]+", line)) <= known[name], line
    for name, row in re.findall(r"^\| `baton ([a-z]+)[^`]*` \|(.*)\|$", text, flags=re.MULTILINE):
        assert set(re.findall(r"--[a-z-]+", row)) <= known[name], row


def test_make_has_every_target_that_the_pages_name() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, flags=re.MULTILINE))
    named = {
        m for page in PAGES for m in re.findall(r"(?:^|`)make ([a-z0-9-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert named <= targets
    assert targets >= {
        "install",
        "quickstart",
        "smollm2",
        "test",
        "lint",
        "drills",
        "claims",
        "mutants",
        "replay-gap",
        "clean",
    }


def test_exit_codes_of_the_readme_are_the_command_lines() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    said = re.search(
        r"Exit codes: 0 done; (\d+) .*?; (\d+) bad input.*?;\s(\d+) the run stalled.*?; (\d+) interrupted", text, re.DOTALL
    )
    assert said and [int(n) for n in said.groups()] == [cli.FAILED, cli.BAD_INPUT, cli.STALLED, cli.INTERRUPTED]


def test_ci_is_the_readmes_test_command_and_can_be_run() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert re.search(r"\bmake test$", script.read_text(encoding="utf-8"), flags=re.MULTILINE)


# ---- equations -------------------------------------------------------------------------------------------------


def defined(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


def places() -> set[tuple[str, str]]:
    text = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")
    return set(re.findall(r"`([\w/]+\.py):(\w+)`", text))


def test_every_place_in_the_equations_exists() -> None:
    found = places()
    assert len(found) > 60
    absent = [f"{file}:{name}" for file, name in sorted(found) if name not in defined(SOURCE / file)]
    assert not absent


def test_every_public_function_of_core_and_algorithms_has_its_row() -> None:
    named = places()
    absent: list[str] = []
    for path in sorted([*(SOURCE / "core").glob("*.py"), *(SOURCE / "algorithms").glob("*.py")]):
        file = str(path.relative_to(SOURCE))
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and not node.name.startswith("_") and (file, node.name) not in named:
                absent.append(f"{file}:{node.name}")
    assert not absent


# ---- words -----------------------------------------------------------------------------------------------------

RESERVED = re.compile(r"guarantee|certified improvement", re.IGNORECASE)


def spoken_strings(path: Path) -> list[str]:
    """String literals that a program can print: docstrings and lone strings are for readers of the code."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent
    ]


def test_no_text_of_the_source_promises_what_no_certificate_shows() -> None:
    found = [(path.name, s) for path in sorted(SOURCE.rglob("*.py")) for s in spoken_strings(path) if RESERVED.search(s)]
    # The words of a positive certificate; tests/e2e/test_pairs.py holds what stands beside them.
    assert found == [("certificates.py", "certified improvement of at least ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_page_uses_the_reserved_words_only_in_the_sentence_that_reserves_them(page: Path) -> None:
    text = " ".join(page.read_text(encoding="utf-8").split())
    for sentence in re.split(r"(?<=[.:;])\s", text):
        if RESERVED.search(sentence):
            assert "positive certificate" in sentence, sentence


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_page_that_says_sat_spells_it_out_and_tells_it_apart(page: Path) -> None:
    text = " ".join(page.read_text(encoding="utf-8").split())
    if re.search(r"\bSAT\b", text):
        assert "sequential agent tuning" in text
        assert "Staleness-Adaptive Trust Region" in text and "2607.18722" in text


# Written apart, so that this file does not name one.
HOSTS = re.compile(
    "|".join(
        ["py" + r"pi\.org", "python" + r"hosted\.org", "download" + r"\.pytorch", "registry" + r"\.npm", r"/opt/" + "pypi"]
    )
)


def test_no_registry_is_named_anywhere() -> None:
    project = [ROOT / n for n in ("pyproject.toml", "constraints.txt", "Makefile", ".ci/run")]
    found = [path.name for path in [*PAGES, *SPEAKING, *project] if HOSTS.search(path.read_text(encoding="utf-8"))]
    assert not found
