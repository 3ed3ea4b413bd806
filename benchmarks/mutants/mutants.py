"""How many small faults, put into the core one at a time, do its tests notice?

    python benchmarks/mutants/mutants.py [--module NAME ...] [--keep DIR] [--again] [--list]

A mutant is a core module with one change: a comparison with its boundary moved, another operator, a constant a little off,
a condition turned round, a guard that never raises, a statement left out, a result that is off by one, a minimum for a
maximum, a method call dropped. Error texts, docstrings, annotations, decorators and imports stay as they are. For each
mutant a process is forked that imports the changed module and runs the tests that reach the changed lines, fastest first,
to the first failure. One that none of them notices has survived; `survivors.toml` gives the reason of each, and what is
there is counted as a survivor without being run (`--again` runs it). The last line is JSON; the exit code is 0 only if the
bars hold.

Why not a library: mutmut 3 leaves decorated classes and module constants alone, which here are the objectives, bands and
limits; cosmic-ray starts a new interpreter, and imports torch, for each mutant.
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Loaded before the fork, so that no mutant pays for them. The package itself is imported by the forked process alone.
import beartype  # noqa: F401
import hypothesis
import jaxtyping  # noqa: F401
import numpy  # noqa: F401
import pytest
import scipy.special
import scipy.stats  # noqa: F401
import torch

ROOT = Path(__file__).resolve().parents[2]
CORE = Path("src/baton/core")
MODULES = sorted(path.stem for path in (ROOT / CORE).glob("*.py") if path.stem != "__init__")
TESTS = ("tests/core", "tests/golden")
REASONS = Path(__file__).with_name("survivors.toml")
KILLED = 0.90
"""The bar: share of mutants that a test notices."""
MOMENTS = itertools.count(10**9)
"""When mutants were written, for the cache of compiled files, which knows them by time and size alone."""
MEMORY = 3 * 2**30
"""Bytes that a forked process may hold; a mutant that wants more is noticed by that."""


# ---- mutants -----------------------------------------------------------------------------------------------------------

COMPARED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}
COMPARED |= {"in": "not in", "not in": "in"}
OPERATORS = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "/", "**": "*", "&": "|", "|": "&", "^": "&", ">>": "<<"}
SYMBOL: Mapping[type[ast.AST], str] = {
    **{ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is"},
    **{ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"},
    **{ast.FloorDiv: "//", ast.Pow: "**", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.RShift: ">>"},
    **{ast.And: "and", ast.Or: "or", ast.USub: "-", ast.Not: "not", ast.Invert: "~"},
}
NAMES = {"minimum": "maximum", "floor": "ceil", "any": "all", "min": "max", "exp": "expm1", "log": "log1p"}
NAMES |= {new: old for old, new in NAMES.items()} | {"float64": "float32", "float32": "float64"}
DROPPED = {"abs", "clone", "detach", "double", "float", "square"}
"""Methods without arguments that leave the shape alone: a mutant goes without the call."""


@dataclass(frozen=True)
class Mutant:
    """A module's source with the bytes from `start` to `end` replaced."""

    module: str
    name: str
    """The function, what its lines were, and what they are."""
    start: int
    end: int
    new: str
    lines: range
    """Where a test has to pass to meet it; empty where importing the module does."""


class Finder(ast.NodeVisitor):
    """Every change of a source, in the order of its text."""

    def __init__(self, module: str, source: bytes) -> None:
        self.module, self.source = module, source
        self.offsets = [0]
        for line in source.split(b"\n"):
            self.offsets.append(self.offsets[-1] + len(line) + 1)
        self.scope: list[str] = []
        self.returns = ""
        self.lines = range(0)
        self.found: list[tuple[int, int, str, str, range]] = []

    def at(self, node: ast.AST, *, end: bool = False) -> int:
        line, column = (node.end_lineno, node.end_col_offset) if end else (node.lineno, node.col_offset)  # type: ignore[attr-defined]
        return self.offsets[line - 1] + column

    def change(self, start: int, end: int, new: str) -> None:
        self.found.append((start, end, new, ".".join(self.scope) or "(module)", self.lines))

    def replace(self, node: ast.AST, new: str) -> None:
        self.change(self.at(node), self.at(node, end=True), new)

    def between(self, left: ast.AST, right: ast.AST, symbol: str, new: str) -> None:
        first = self.at(left, end=True)
        gap = self.source[first : self.at(right)].decode()
        token = re.search(r"\s+".join(map(re.escape, symbol.split())), gap)
        assert token is not None, (symbol, gap)
        self.change(first + len(gap[: token.start()].encode()), first + len(gap[: token.end()].encode()), new)

    def within(self, node: ast.AST, pattern: str, new: str) -> None:
        """The last match of a pattern in a node's text."""
        first = self.at(node)
        text = self.source[first : self.at(node, end=True)].decode()
        if matches := list(re.finditer(pattern, text)):
            self.change(
                first + len(text[: matches[-1].start()].encode()), first + len(text[: matches[-1].end()].encode()), new
            )

    # What is left alone: texts of errors, f-strings, names of types, decorators.

    def visit_Raise(self, node: ast.Raise) -> None: ...

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_Import(self, node: ast.Import) -> None: ...

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope.append(node.name)
        self.block(node.body)
        self.scope.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.scope.append(node.name)
        outer, lines = self.returns, self.lines
        self.returns = ast.unparse(node.returns) if node.returns is not None else ""
        self.lines = range(node.body[0].lineno, (node.end_lineno or 0) + 1)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self.block(node.body)
        self.returns, self.lines = outer, lines
        self.scope.pop()

    def block(self, body: Sequence[ast.stmt]) -> None:
        outer = self.lines
        for statement in body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # a docstring
            if outer:
                inner = getattr(statement, "body", None)
                last = inner[0].lineno - 1 if inner else statement.end_lineno
                self.lines = range(statement.lineno, max(statement.lineno, last or 0) + 1)
            self.visit(statement)
        self.lines = outer

    def nested(self, node: ast.If | ast.For | ast.While) -> None:
        self.block(node.body)
        self.block(node.orelse)

    # What is changed.

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not self.scope and isinstance(node.value, ast.BinOp | ast.Subscript):
            return  # the name of a type
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "NewType":
            return
        if any(isinstance(target, ast.Subscript) for target in node.targets):
            self.replace(node, "pass")
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.replace(node, "pass")
        symbol = SYMBOL[type(node.op)]
        self.between(node.target, node.value, f"{symbol}=", f"{OPERATORS[symbol]}=")
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        self.replace(node, "pass")
        self.visit(node.value)

    def visit_Continue(self, node: ast.Continue) -> None:
        self.replace(node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self.replace(node, "pass")

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.body[-1], ast.Raise):
            self.replace(node.test, "False")
        else:
            self.negated(node.test)
        self.visit(node.test)
        self.nested(node)

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self.nested(node)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self.nested(node)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        for case in node.cases:
            self.visit(case.pattern)
            self.block(case.body)

    def negated(self, node: ast.expr) -> None:
        self.replace(node, f"(not ({self.text(node)}))")

    def text(self, node: ast.AST) -> str:
        return self.source[self.at(node) : self.at(node, end=True)].decode()

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.negated(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self.negated(condition)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            return
        whole = self.text(node.value)
        if self.returns == "bool":
            self.replace(node.value, f"not ({whole})")
        elif self.returns.startswith("Bool["):
            self.replace(node.value, f"~({whole})")
        elif self.returns.startswith(("Float[", "float", "int")) and not isinstance(node.value, ast.Constant):
            self.replace(node.value, f"({whole}) + 1")
        self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, op, right in zip((node.left, *node.comparators), node.ops, node.comparators, strict=False):
            symbol = SYMBOL[type(op)]
            self.between(left, right, symbol, COMPARED[symbol])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if symbol := SYMBOL.get(type(node.op)):
            self.between(node.left, node.right, symbol, OPERATORS[symbol])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        symbol = SYMBOL[type(node.op)]
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between(left, right, symbol, "or" if symbol == "and" else "and")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        start = self.at(node)
        self.change(start, start + len(SYMBOL[type(node.op)]), "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.replace(node, str(not value))
        elif isinstance(value, int):
            self.replace(node, hex(value + 1) if self.text(node).startswith("0x") else str(value + 1))
        elif isinstance(value, float):
            self.replace(node, repr(value * 1.1 if value else 1.0))
        elif isinstance(value, str):
            self.replace(node, repr({"amax": "amin", "amin": "amax"}.get(value, value + "x")))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in NAMES:
            self.within(node, rf"\b{node.attr}$", NAMES[node.attr])
        self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in NAMES and isinstance(node.ctx, ast.Load):
            self.replace(node, NAMES[node.id])

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED and not (node.args or node.keywords):
            self.within(node, rf"\.\s*{node.func.attr}\s*\(\s*\)$", "")
        for keyword in node.keywords:
            if keyword.arg in ("min", "max"):
                start = self.at(keyword)
                self.change(start, start + 3, NAMES[keyword.arg])
        self.generic_visit(node)


def mutants(module: str, source: bytes) -> list[Mutant]:
    """Every mutant of a module that compiles. Names are unique within it."""
    finder = Finder(module, source)
    finder.block(ast.parse(source).body)
    seen: Counter[str] = Counter()
    found: list[Mutant] = []
    for start, end, new, scope, lines in sorted(finder.found, key=lambda change: change[:2]):
        try:
            compile(changed(source, start, end, new), module, "exec")
        except SyntaxError:
            continue
        first, last = source.rfind(b"\n", 0, start) + 1, source.find(b"\n", end)
        was = " ".join(source[first:last].decode().split())
        now = " ".join((source[first:start] + new.encode() + source[end:last]).decode().split())
        name = f"{scope}: {was} => {now}"
        seen[name] += 1
        if seen[name] > 1:
            name += f" ({seen[name]})"
        found.append(Mutant(module, name, start, end, new, lines))
    return found


def changed(source: bytes, start: int, end: int, new: str) -> bytes:
    return source[:start] + new.encode() + source[end:]


# ---- tests in forked processes -------------------------------------------------------------------------------------------


class Watcher:
    """A pytest plugin: which lines of the core each test reaches, and how long it takes."""

    def __init__(self) -> None:
        self.reached: dict[str, dict[str, set[int]]] = {}
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self.here: dict[str, set[int]] = {}

    def trace(self, frame: Any, event: str, arg: Any) -> Any:
        path = frame.f_code.co_filename
        if "/baton/core/" not in path:
            return None
        lines = self.here.setdefault(Path(path).stem, set())

        def line(frame: Any, event: str, arg: Any) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line(frame, event, arg)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.here = self.reached[item.nodeid] = {}
        began = time.process_time()
        sys.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            self.seconds[item.nodeid] = time.process_time() - began

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


class Chooser:
    """A pytest plugin: these tests, in this order, and the first of them that fails."""

    def __init__(self, order: Sequence[str]) -> None:
        self.place = {name: number for number, name in enumerate(order)}
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.place), key=lambda i: self.place[i.nodeid])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or "import"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


def forked(tree: Path, paths: Iterable[str], plugin: Watcher | Chooser, seconds: float) -> Any:
    """What the plugin has seen after these tests in a new process; "time" or "crash" where it came to no end within
    `seconds` of the processor."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            quiet = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(quiet, stream)
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds) + 5))
            os.chdir(tree)
            sys.path.insert(0, str(tree / "src"))
            torch.set_num_threads(1)
            options = ["-x"] if isinstance(plugin, Chooser) else []
            # As little of pytest as the outcome needs: most mutants live for less time than it takes to start.
            os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
            sys.dont_write_bytecode = False
            options += ["-p", "_hypothesis_pytestplugin", "--hypothesis-profile=mutants", "--assert=plain"]
            options += ["-p", "no:cacheprovider", "-p", "no:unraisableexception", "-p", "no:threadexception"]
            code = pytest.main([*paths, *options], plugins=[plugin])
            if isinstance(plugin, Chooser):
                passed = code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
                answer: Any = plugin.failed or ("" if passed else f"exit code {int(code)}")
            else:
                import baton

                reached = {name: {m: sorted(n) for m, n in lines.items()} for name, lines in plugin.reached.items()}
                answer = {"reached": reached, "seconds": plugin.seconds, "failed": plugin.failed, "package": baton.__file__}
        except BaseException as error:
            answer = f"crash: {error!r}"
        with os.fdopen(writer, "w") as stream:
            json.dump(answer, stream)
            stream.flush()
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return "time" if os.WTERMSIG(status) == signal.SIGXCPU else f"crash: signal {os.WTERMSIG(status)}"
    return json.loads(said)


def copied(tree: Path) -> None:
    """What the tests need, apart from the repository."""
    for name in ("src", "tests", "configs", "benchmarks"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)


def digest(tests: Iterable[Path]) -> str:
    """SHA-256 of what decides an outcome: the package, what tests share, and these tests."""
    found = hashlib.sha256()
    shared = [*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/reference/*.py"), ROOT / "tests" / "conftest.py"]
    for path in sorted([*shared, *tests]):
        found.update(f"{path.name}:{path.stat().st_size}:".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def watched(tree: Path, state_of: Mapping[str, str], keep: Path | None) -> dict[str, Any]:
    """What each test reaches of the core and how long it takes, without a change: all must pass."""
    tests: dict[str, Any] = {"reached": {}, "seconds": {}}
    stale: list[str] = []
    for file, state in state_of.items():
        kept = None if keep is None else keep / f"reached-{state}.json"
        if kept is not None and kept.exists():
            for name, own in json.loads(kept.read_text()).items():
                tests[name] |= own
        elif file:
            stale.append(file)
    if not stale:
        return tests
    began = time.monotonic()
    gc.freeze()  # what was loaded before the fork is never looked at again
    found = forked(tree, stale, Watcher(), 1800.0)
    if not isinstance(found, dict) or found["failed"] or not found["package"].startswith(str(tree)):
        raise SystemExit(f"the tests do not pass as they are: {found if isinstance(found, str) else found['failed']}")
    print(f"{len(found['seconds'])} tests pass unchanged in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    for file in stale:
        own = {name: {at: of for at, of in found[name].items() if at.startswith(f"{file}::")} for name in tests}
        for name in tests:
            tests[name] |= own[name]
        if keep is not None:
            (keep / f"reached-{state_of[file]}.json").write_text(json.dumps(own))
    return tests


def outcome(tree: Path, mutant: Mutant, tests: Mapping[str, Any], first: str) -> str:
    """The test that notices a mutant ("import", "time" and "crash" are such too), or "" where none does."""
    chosen = [
        name
        for name, reached in tests["reached"].items()
        # What importing changes is also seen by a test that calls nothing of the core and only reads its constants.
        if (
            set(reached.get(mutant.module, ())) & set(mutant.lines)
            if mutant.lines
            else mutant.module in reached or not reached
        )
    ]
    chosen.sort(key=lambda name: (name != first, tests["seconds"][name]))
    if not chosen:
        return ""
    path = tree / CORE / f"{mutant.module}.py"
    source = path.read_bytes()
    path.write_bytes(changed(source, mutant.start, mutant.end, mutant.new))
    moment = next(MOMENTS)
    os.utime(path, (moment, moment))
    try:
        # Collecting every file takes longer than most mutants live: the fastest tests are asked alone before all.
        for names in (chosen[:8], chosen):
            files = sorted({name.partition("::")[0] for name in names})
            limit = 20.0 + 5.0 * sum(tests["seconds"][name] for name in names)
            if noticed := forked(tree, files, Chooser(names), limit):
                return noticed
        return ""
    finally:
        path.write_bytes(source)


# ---- the whole -----------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--module", nargs="+", choices=MODULES, default=MODULES, help="modules of the core (default: all)")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep outcomes in DIR; a second call goes on where this ended"
    )
    parser.add_argument("--again", action="store_true", help="also run mutants that have a reason to survive")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    options = parser.parse_args()
    found = {name: mutants(name, (ROOT / CORE / f"{name}.py").read_bytes()) for name in options.module}
    if options.list:
        for name, own in found.items():
            print(*(f"{name}.{mutant.name}" for mutant in own), sep="\n")
            print(f"{name}: {len(own)} mutants", file=sys.stderr)
        return 0
    hypothesis.settings.register_profile(
        "mutants", deadline=None, derandomize=True, database=None, max_examples=60, report_multiple_bugs=False,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate], suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="baton-mutants-") as name:
        tree = Path(name)
        copied(tree)
        outcomes = run_all(tree, found, options.keep, survivors=() if options.again else reasons())
    return told(outcomes)


def reasons() -> dict[str, str]:
    """Mutant -> why no test notices it."""
    return {name: entry["why"] for entry in tomllib.loads(REASONS.read_text())["reason"] for name in entry["mutants"]}


def run_all(
    tree: Path, found: Mapping[str, Sequence[Mutant]], keep: Path | None, *, survivors: Container[str]
) -> dict[str, dict[str, str]]:
    """Module -> mutant -> what noticed it; `survivors` are counted as such without being run.

    An outcome is kept with the state of what decided it: of the file of the test that noticed the mutant, else of all tests.
    Where that is another one by now, the outcome says which test to ask first.
    """
    files = sorted(path for folder in TESTS for path in (ROOT / folder).glob("*.py"))
    state_of = {str(path.relative_to(ROOT)): digest([path]) for path in files} | {"": digest(files)}

    def state(noticed: str) -> str:
        file = noticed.partition("::")[0] if "::" in noticed else ""
        return state_of.get(file, "")

    known = {(m.module, m.name): "" for own in found.values() for m in own if f"{m.module}.{m.name}" in survivors}
    asked: dict[tuple[str, str], str] = {}
    lines: list[str] = []
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        if (keep / "mutants.jsonl").exists():
            lines = [line for line in (keep / "mutants.jsonl").read_text().splitlines(keepends=True) if line.endswith("\n")]
            # Written anew: a line that was torn by a kill must not swallow the next one.
            (keep / "mutants.jsonl").write_text("".join(lines))
    for line in reversed(lines):
        at = json.loads(line)
        (known if at["state"] == state(at["noticed"]) else asked).setdefault((at["module"], at["mutant"]), at["noticed"])
    missing = [mutant for own in found.values() for mutant in own if (mutant.module, mutant.name) not in known]
    # What survived before comes first, since that is what new tests are for, and what was noticed before comes last.
    before = [asked.get((mutant.module, mutant.name)) for mutant in missing]
    rank = [2 if noticed else int(noticed is None) for noticed in before]
    missing = [mutant for _, mutant in sorted(zip(rank, missing, strict=True), key=lambda pair: pair[0])]
    tests = watched(tree, state_of, keep) if missing else {}
    began = time.monotonic()
    for number, mutant in enumerate(missing, start=1):
        at = mutant.module, mutant.name
        known[at] = noticed = outcome(tree, mutant, tests, asked.get(at, ""))
        if keep is not None:
            with (keep / "mutants.jsonl").open("a") as stream:
                entry = {"state": state(noticed), "module": at[0], "mutant": at[1], "noticed": noticed}
                stream.write(json.dumps(entry) + "\n")
        if not noticed or number % 50 == 0:
            what = "survived" if not noticed else "noticed"
            seconds = time.monotonic() - began
            print(f"{number} of {len(missing)}, {seconds:.0f} s: {what}: {at[0]}.{at[1]}", file=sys.stderr, flush=True)
    return {module: {mutant.name: known[module, mutant.name] for mutant in own} for module, own in found.items()}


def told(outcomes: Mapping[str, Mapping[str, str]]) -> int:
    """Print survivors with their reasons, counts of each module, and the last line."""
    said = reasons()
    unexplained = 0
    figures: dict[str, dict[str, int]] = {}
    for module, own in outcomes.items():
        survivors = [name for name, noticed in own.items() if not noticed]
        for name in survivors:
            why = said.get(f"{module}.{name}", "")
            unexplained += not why
            print(f"survived: {module}.{name}\n    {why or 'no reason given'}")
        figures[module] = {"mutants": len(own), "killed": len(own) - len(survivors)}
        # A mutant can also be noticed by not loading, by not ending and by a process that dies.
        other = Counter(noticed.partition(":")[0] for noticed in own.values() if noticed and "::" not in noticed)
        figures[module] |= {f"killed by {what}": count for what, count in sorted(other.items())}
        gone = [at for at in said if at.startswith(f"{module}.") and at.removeprefix(f"{module}.") not in survivors]
        for at in gone:
            print(f"has a reason and did not survive: {at}")
    for module, counts in figures.items():
        share = counts["killed"] / counts["mutants"]
        print(f"{module:14} {counts['killed']:5} of {counts['mutants']:5} killed ({share:.1%})")
    total = sum(counts["mutants"] for counts in figures.values())
    killed = sum(counts["killed"] for counts in figures.values()) / total
    print(f"{'all':14} {killed:.1%} of {total} killed")
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks" / "claims")]
    from claim import last_line

    bars = {
        "share of mutants killed": (killed, KILLED, killed >= KILLED),
        "survivors without a reason": (float(unexplained), 0.0, unexplained == 0),
    }
    return last_line("mutants", quick=False, figures=figures, bars=bars)


if __name__ == "__main__":
    sys.exit(main())
