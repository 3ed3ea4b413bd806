"""Final answers, equality of answers, and worker processes that may hang or die without harm to a run.

No text that a model can write makes a grader raise: the worst is the lowest reward with a reason. What a grader cannot
do for a reason of its own (a gold answer that cannot be read, user code that raises) is a `TaskFault`, never reward 0.
"""

from __future__ import annotations

import ast
import json
import logging
import operator
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from types import FrameType, TracebackType
from typing import IO, Any, Literal, NoReturn, Protocol

from baton.envs.env import Grade
from baton.errors import ConfigError, TaskFault, cause
from baton.types import Failed, Task

Match = Literal["exact", "math", "aime", "dapo", "gsm8k", "countdown"]
"""How an answer is compared with the gold answer; see `score_answer`."""

# ---- the final answer ------------------------------------------------------------------------------------------

_OPENING = re.compile(r"\\(?:boxed|fbox)\s*\{")
_LABEL = re.compile(r"answer\s*:", re.IGNORECASE)


def without_thinking(text: str) -> str | None:
    """The text after the last `</think>`; None where thinking was opened and never closed."""
    after = text.rpartition("</think>")[2]
    return None if "<think>" in after else after


def extract_boxed(text: str) -> str | None:
    r"""The content of the last complete, non-empty `\boxed{...}` or `\fbox{...}`, by counting braces.

    None where there is none, and where the last non-empty box was never closed: a cut answer is no answer.
    """
    return _box(text)[0]


def final_answer(text: str) -> str | None:
    r"""What a response gives as its answer: the last box, else the rest of the line after the last `Answer:`.

    Thinking is dropped first. An unterminated last box is no answer. Bare numbers are never picked out of prose.
    """
    said = without_thinking(text)
    if said is None:
        return None
    boxed, was_cut = _box(said)
    return None if was_cut else boxed or labelled(said)


def submitted(text: str) -> str | None:
    """What a response submits as a whole: tags, boxes and labels taken off, else the text itself; None if nothing is left.

    Order: thinking dropped, the last `<answer>...</answer>`, then `final_answer` of what is there, until nothing changes.
    """
    said = without_thinking(text)
    if said is None:
        return None
    said = said.strip()
    while True:
        inner = tagged(said)
        if inner is None:
            boxed, was_cut = _box(said)
            if was_cut:
                return None
            inner = boxed or labelled(said)
        if inner is None or inner == said:
            return said or None
        said = inner


def tagged(text: str) -> str | None:
    """The stripped content of the last complete `<answer>...</answer>`; None where there is none or it is empty."""
    before, close, _ = text.rpartition("</answer>")
    _, opening, inside = before.rpartition("<answer>")
    return (inside.strip() or None) if close and opening else None


def _box(text: str) -> tuple[str | None, bool]:
    """Content of the deciding box, and whether that box was cut."""
    for opening in reversed(list(_OPENING.finditer(text))):
        depth, at = 1, opening.end()
        while at < len(text) and depth:
            char = text[at]
            if char == "\\":
                at += 1  # \{ and \} are text, not structure
            elif char in "{}":
                depth += 1 if char == "{" else -1
            at += 1
        if depth:
            if text[opening.end() :].strip():
                return None, True
            continue
        content = text[opening.end() : at - 1].strip()
        if content:
            return content, False
    return None, False


def labelled(text: str) -> str | None:
    """The rest of the line after the last `Answer:` (any case) that has one, without markdown stars; None without it."""
    for label in reversed(list(_LABEL.finditer(text))):
        line = text[label.end() :].split("\n", 1)[0].strip().strip("*").strip()
        if line:
            return line
    return None


# ---- equality --------------------------------------------------------------------------------------------------

_THOUSANDS = re.compile(r"(?<![0-9.])([0-9]{1,3}(?:,[0-9]{3})+)(?![0-9])")
_MACRO = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
_INTEGER = re.compile(r"(?:[A-Za-z]\w*\s*=)?\s*([+-]?\s*[0-9]{1,4000})\s*(?:[A-Za-z][A-Za-z\s]*)?")


def as_integer(text: str) -> int | None:
    r"""The integer that an answer writes, after `$`, `\text{}`, degree marks, thousands commas, leading zeros, a full
    stop, `x =` and trailing unit words are taken off; None if that is no integer (of at most 4,000 digits)."""
    plain = _MACRO.sub(r" \1", text).replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    plain = plain.replace("−", "-").replace("^{\\circ}", "").replace("^\\circ", "").replace("\\degree", "")
    plain = plain.replace("°", "").replace("\\$", "").replace("$", "").strip().rstrip(".").strip()
    plain = _THOUSANDS.sub(lambda found: found[1].replace(",", ""), plain)
    found = _INTEGER.fullmatch(plain)
    return int(found[1].replace(" ", "")) if found else None


def canonical(kind: Match, text: str, *, ignore_case: bool = False) -> str | None:
    r"""The answer in the form that votes are counted in: an answer again, which this function leaves as it is.

    `\boxed{33}` for "so it is \boxed{033}", the submitted text for `exact`, `<answer>...</answer>` for `countdown`.
    """
    if kind == "exact":
        said = submitted(text)
        return said.casefold() if said and ignore_case else said
    if kind == "countdown":
        inside = tagged(without_thinking(text) or "")
        return f"<answer>{' '.join(inside.split())}</answer>" if inside else None
    said = _pick(kind, text)
    if said is None:
        return None
    number = as_integer(said)
    plain = str(number) if number is not None else re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", " ".join(said.split()))
    plain = plain.rstrip("\\ ")
    wrapped = f"\\boxed{{{plain}}}"
    return wrapped if extract_boxed(wrapped) == plain else None


def _pick(kind: Match, text: str) -> str | None:
    said = without_thinking(text)
    if said is None:
        return None
    if kind == "dapo":
        return labelled(said) or extract_boxed(said)
    if kind == "gsm8k" and "####" in said:
        return said.rpartition("####")[2].strip().split("\n", 1)[0].strip() or None
    return final_answer(said)


def score_answer(kind: Match, gold: str, text: str, *, ignore_case: bool = False) -> Grade:
    r"""1 or 0 for a response against a gold answer.

    exact      `submitted` text equal to the gold text, both stripped (casefolded with `ignore_case`)
    math       `final_answer` equivalent to the gold by math-verify, which sees that one box only, gold first
    aime       `final_answer` equal as an integer; where either is none, as `math`
    dapo       as `aime`, but the last `Answer:` comes before a box
    gsm8k      as `aime`, but what follows the last `####` comes first
    countdown  the last `<answer>` is an expression of + - * / and brackets that uses each number once and has exactly the
               target's value; the gold is JSON: {"target": 13, "nums": [4, 9]}

    There is no time limit here: model text can keep math-verify busy for ever. A run grades through `GraderPool`.

    Raises:
        TaskFault: the gold answer is empty or cannot be read.
    """
    if not gold.strip():
        raise TaskFault("the gold answer is empty: nothing can be compared with it; mend or drop the row")
    if kind == "exact":
        said = submitted(text)
        if said is None:
            return Grade(0.0, "empty: no answer")
        want = submitted(gold) or gold.strip()
        is_equal = said.casefold() == want.casefold() if ignore_case else said == want
        return Grade(1.0) if is_equal else Grade(0.0, "wrong")
    if kind == "countdown":
        return _score_countdown(gold, text)
    if kind == "gsm8k":
        gold = gold.rpartition("####")[2].strip()
    gold = extract_boxed(gold) or gold
    whole = as_integer(gold) if kind != "math" else None
    if whole is None:
        _read_gold(gold)  # first, so that a bad gold is a fault whatever the model wrote
    said = _pick(kind, text)
    if said is None:
        return Grade(0.0, "unparsed: no final answer")
    number = as_integer(said) if whole is not None else None
    is_equal = number == whole if number is not None else _is_equivalent(gold, said)
    if is_equal is None:
        return Grade(0.0, "unparsed: the final answer is no mathematics that can be read")
    return Grade(1.0) if is_equal else Grade(0.0, "wrong")


@lru_cache(maxsize=512)
def _read_gold(gold: str) -> list[Any]:
    read = _parse(gold)
    if not read:
        raise TaskFault(f"math-verify reads nothing in the gold answer {gold!r}; mend or drop the row")
    return read


def _parse(answer: str) -> list[Any]:
    try:
        from math_verify import parse
    except ImportError as error:
        raise ConfigError("grading mathematics needs math-verify; pip install 'baton-rl[tasks]'") from error
    _quiet_math_verify()
    # Its own limits raise from SIGALRM and would replace ours; the pool limits the whole grading.
    return parse(f"\\boxed{{{answer}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _is_equivalent(gold: str, said: str) -> bool | None:
    """Whether math-verify finds the two equal; None where it reads nothing in what was said, or fails on it."""
    from math_verify import verify

    want = _read_gold(gold)
    try:
        read = _parse(said)
        return bool(verify(want, read, timeout_seconds=None, raise_on_error=True)) if read else None
    except Exception:  # the documented edge: sympy raises anything at all on odd text, and the gold was read
        return None


def warm_math() -> None:
    """Loads math-verify and its grammar (seconds), so that no answer's limit pays for it.

    Raises:
        ConfigError: math-verify is not installed.
    """
    _is_equivalent("\\frac{1}{2}", "0.5")


@lru_cache(maxsize=1)
def _quiet_math_verify() -> None:
    """It logs each text that it cannot read, and that it runs without its own limits; we count both."""
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _score_countdown(gold: str, text: str) -> Grade:
    try:
        row = json.loads(gold)
        target, nums = Fraction(row["target"]), sorted(int(n) for n in row["nums"])
    except (ValueError, TypeError, KeyError) as error:
        raise TaskFault(f'countdown gold {gold!r} is not JSON like {{"target": 13, "nums": [4, 9]}}') from error
    inside = tagged(without_thinking(text) or "")
    if inside is None:
        return Grade(0.0, "unparsed: no <answer>")
    # A right answer has a few characters per number; the bound keeps deep nesting away from the parser.
    if len(inside) > 200 or not re.fullmatch(r"[0-9+\-*/()\s]+", inside):
        return Grade(0.0, "unparsed: more than numbers, + - * / and brackets")
    used: list[int] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise SyntaxError

    try:
        result = value(ast.parse(inside, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return Grade(0.0, "unparsed: no expression with a value")
    if sorted(used) != nums:
        return Grade(0.0, "wrong: not each number once")
    return Grade(1.0) if result == target else Grade(0.0, "wrong")


# ---- worker processes ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """What another process needs to build a grader: the env's options as JSON, the team size, the config's folder."""

    options: str
    n_agents: int
    root: str


class Grader(Protocol):
    """The grading part of an environment. `is_user_code`: a hang is the grader's fault, not the model text's."""

    @property
    def is_user_code(self) -> bool: ...
    @property
    def reward_range(self) -> tuple[float, float]: ...
    def grade(self, task: Task, answer: str) -> Grade: ...


@dataclass(slots=True)
class _Job:
    index: int
    task: Task
    answer: str
    tries: int = 0
    is_check: bool = False
    """The gold answer is graded in place of a text that ran into the limit: whose fault was it?"""


class GraderPool:
    """Grades in worker processes that are killed and replaced when they hang (ALGORITHMS 5.5).

    Workers start at the first call (about three seconds: an interpreter, torch, the grader's libraries) and stay warm.
    Calls may come from any thread. Close it, or use it as a context manager. `check` is called five times a second while
    answers are graded; what it raises (a request to stop) ends the call.

    A built-in grader that exceeds `answer_limit_s` on a text while it grades the gold answer in time gives the lowest
    reward with the reason "late: ..."; one that fails on the gold, and user code that raises, hangs (`process_limit_s`)
    or takes its process down twice, give `Failed("grader: ...")`. `counts` has late, killed, died, retried and failed.
    """

    def __init__(
        self,
        *,
        workers: int = 2,
        answer_limit_s: float = 20.0,
        process_limit_s: float = 60.0,
        start_limit_s: float = 120.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        if workers < 1:
            raise ConfigError(f"a grader pool needs at least one worker, got {workers}")
        self.counts: Counter[str] = Counter()
        self._check = check
        self._size = workers
        self._answer_limit_s = answer_limit_s
        self._process_limit_s = process_limit_s
        self._start_limit_s = start_limit_s
        self._free: list[_Worker] = []
        self._n_workers = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def n_live(self) -> int:
        """Idle workers whose process is running."""
        with self._changed:
            return sum(worker.is_alive for worker in self._free)

    def grade_many(self, spec: EnvSpec, items: Sequence[tuple[Task, str]]) -> list[Grade | Failed]:
        """One grade or failure per (task, answer), in order. Blocks until all are there.

        Raises:
            ConfigError: the grader cannot be built in a worker; names why.
            TaskFault: a worker cannot be started, or dies while it builds the grader.
        """
        results: list[Grade | Failed | None] = [None] * len(items)
        jobs = deque(_Job(index, task, answer) for index, (task, answer) in enumerate(items))
        held = self._borrow(len(items)) if items else []
        try:
            while any(result is None for result in results):
                for worker in held:
                    if worker.phase == "idle" and jobs:
                        self._send(worker, spec, jobs)
                # A worker that this call no longer needs may serve another thread.
                for worker in [w for w in held if w.is_at_rest and not jobs]:
                    held.remove(worker)
                    self._give_back([worker])
                if not held:
                    held = self._borrow(len(jobs))
                    continue
                self._wait(held, jobs, results)
        finally:
            for worker in held:
                if not worker.is_at_rest:  # an exception on its way out: a late reply must not meet another question
                    worker.kill()
            self._give_back(held)
        return [result for result in results if result is not None]

    def close(self) -> None:
        """Ends the idle workers now, and those in use when they come back. A closed pool grades nothing."""
        with self._changed:
            self._is_closed = True
            free, self._free = self._free, []
            self._changed.notify_all()
        for worker in free:
            worker.end()

    def _borrow(self, wanted: int) -> list[_Worker]:
        """At least one worker, at most `wanted`: idle ones first, then new ones up to the pool's size."""
        with self._changed:
            while True:
                if self._is_closed:
                    raise TaskFault("the grader pool is closed; grade inside its `with` block")
                for worker in [w for w in self._free if not w.is_alive]:
                    self._free.remove(worker)
                    self._n_workers -= 1
                    worker.kill()
                taken, self._free = self._free[:wanted], self._free[wanted:]
                while len(taken) < wanted and self._n_workers < self._size:
                    taken.append(_Worker(time.monotonic() + self._start_limit_s))
                    self._n_workers += 1
                if taken:
                    return taken
                self._changed.wait()

    def _give_back(self, workers: Sequence[_Worker]) -> None:
        with self._changed:
            kept = [] if self._is_closed else [w for w in workers if w.is_at_rest and w.is_alive]
            self._free.extend(kept)
            self._n_workers -= len(workers) - len(kept)
            self._changed.notify_all()
        for worker in workers:
            if worker not in kept:
                worker.end()

    def _send(self, worker: _Worker, spec: EnvSpec, jobs: deque[_Job]) -> None:
        now = time.monotonic()
        if worker.spec != spec:
            request = {"options": spec.options, "n_agents": spec.n_agents, "root": spec.root}
            worker.send({"open": request}, "opening", now + self._start_limit_s)
            worker.opening = spec
            return
        job = jobs.popleft()
        # The worker's own alarm answers first; two seconds more mean that it cannot.
        limit = self._process_limit_s if worker.is_user_code else self._answer_limit_s + 2.0
        worker.job = job
        fields = {name: getattr(job.task, name) for name in ("id", "env", "prompt", "answer", "views", "payload")}
        worker.send({"task": fields, "answer": job.answer, "limit_s": self._answer_limit_s}, "grading", now + limit)

    def _wait(self, held: list[_Worker], jobs: deque[_Job], results: list[Grade | Failed | None]) -> None:
        """Takes in whatever the held workers say, and replaces those that say nothing in time."""
        with selectors.DefaultSelector() as selector:
            for worker in held:
                selector.register(worker.output, selectors.EVENT_READ, worker)
            nearest = min(worker.deadline for worker in held)
            self._check()
            heard = {id(key.data) for key, _ in selector.select(min(0.2, max(0.0, nearest - time.monotonic())))}
        for place, worker in enumerate(held):
            reply: Mapping[str, Any] | None = None
            if id(worker) in heard:
                reply, is_over = worker.read()
                if reply is not None:
                    self._take(worker, reply, jobs, results)
                    continue
                if not is_over:
                    continue
            elif time.monotonic() < worker.deadline:
                continue
            held[place] = self._replace(worker, is_dead=id(worker) in heard, jobs=jobs, results=results)

    def _take(
        self, worker: _Worker, reply: Mapping[str, Any], jobs: deque[_Job], results: list[Grade | Failed | None]
    ) -> None:
        phase, worker.phase = worker.phase, "idle"
        if phase == "starting":
            return
        if phase == "opening":
            if "error" in reply:
                raise ConfigError(f"the grader cannot be built in a worker process: {reply['error']}")
            worker.spec = worker.opening
            worker.is_user_code, worker.lowest = reply["is_user_code"], reply["lowest"]
            return
        job, worker.job = worker.job, None
        assert job is not None
        if "late" in reply:
            self._blame(job, jobs, results, what=reply["late"])
        elif "fault" in reply:
            self._fail(job, results, reply["fault"])
        elif job.is_check:
            self._count("late")
            reason = f"late: no grade within {self._answer_limit_s:g} s, while the gold answer has one"
            results[job.index] = Grade(worker.lowest, reason)
        else:
            results[job.index] = Grade(reply["reward"], reply["reason"])

    def _replace(
        self, worker: _Worker, *, is_dead: bool, jobs: deque[_Job], results: list[Grade | Failed | None]
    ) -> _Worker:
        worker.kill()
        self._count("died" if is_dead else "killed")
        what = f"the worker process died ({worker.exit_text})" if is_dead else "no answer within the limit"
        job = worker.job
        if job is None:
            # Building a grader does not depend on any text: a second attempt would go the same way.
            raise TaskFault(f"grader worker while {worker.phase}: {what}; limit {self._start_limit_s:g} s")
        if not is_dead and worker.is_user_code:
            # No second attempt: it would stop the same answers for as long again.
            self._fail(job, results, f"no answer within {self._process_limit_s:g} s")
        elif not is_dead:
            self._blame(job, jobs, results, what=what)
        elif job.tries == 0:
            self._count("retried")
            job.tries = 1
            jobs.appendleft(job)
        else:
            self._fail(job, results, f"{what}, twice")
        return _Worker(time.monotonic() + self._start_limit_s)

    def _blame(self, job: _Job, jobs: deque[_Job], results: list[Grade | Failed | None], *, what: str) -> None:
        """A limit was hit: the text's fault if the gold answer passes in its place."""
        if job.is_check:
            self._fail(job, results, f"{what}, on the gold answer of {job.task.id} as well")
        else:
            jobs.appendleft(_Job(job.index, job.task, job.task.answer, is_check=True))

    def _fail(self, job: _Job, results: list[Grade | Failed | None], why: str) -> None:
        self._count("failed")
        results[job.index] = Failed(reason=f"grader: {why}")

    def _count(self, what: str) -> None:
        with self._changed:
            self.counts[what] += 1


_IN_WORKER = "BATON_GRADER_WORKER"
_importing: set[str] = set()


@contextmanager
def importing(name: str) -> Generator[None]:
    """While the module of a user's task is imported."""
    _importing.add(name)
    try:
        yield
    finally:
        _importing.discard(name)


def refuse_at_import() -> None:
    """Raises ConfigError where a task's module, as it is imported, starts what imports it: a run, which imports it here and
    in graders, which would start runs of their own."""
    if _importing or os.environ.get(_IN_WORKER):
        raise ConfigError(
            "the module of a task or reward function starts baton when it is imported, and its graders import it too; put "
            "that call under: if __name__ == '__main__':"
        )


_Phase = Literal["starting", "opening", "grading", "idle"]


class _Worker:
    """One process and its two pipes. A plain subprocess, not multiprocessing: the user's main module is not run again."""

    def __init__(self, deadline: float) -> None:
        refuse_at_import()
        code = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from baton.envs.grading import serve; serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={"OMP_NUM_THREADS": "1", **os.environ, _IN_WORKER: "1"},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input: IO[bytes] = self._process.stdin
        self.output: IO[bytes] = self._process.stdout
        self._pending = b""
        self.phase: _Phase = "starting"
        self.deadline = deadline
        self.spec: EnvSpec | None = None
        self.opening: EnvSpec | None = None
        self.job: _Job | None = None
        self.is_user_code = False
        self.lowest = 0.0

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def is_at_rest(self) -> bool:
        """No question is open: any call may take it (one that still starts says so when it is ready)."""
        return self.phase in ("starting", "idle")

    @property
    def exit_text(self) -> str:
        code = self._process.returncode
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def send(self, request: Mapping[str, Any], phase: _Phase, deadline: float) -> None:
        self.phase, self.deadline = phase, deadline
        line = memoryview(json.dumps(request).encode() + b"\n")
        try:
            while line:
                line = line[self._input.write(line) :]
        except BrokenPipeError:
            pass  # it died; the end of its output says so in a moment

    def read(self) -> tuple[Mapping[str, Any] | None, bool]:
        """A reply if one is complete, and whether the output is over."""
        chunk = os.read(self.output.fileno(), 1 << 16)
        self._pending += chunk
        line, newline, rest = self._pending.partition(b"\n")
        if not newline:
            return None, not chunk
        self._pending = rest
        return json.loads(line), False

    def kill(self) -> None:
        self._process.kill()
        self._reap()

    def end(self) -> None:
        """Lets it leave by itself (its input ends), and insists after two seconds."""
        self._input.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reap()

    def _reap(self) -> None:
        self._process.wait()
        self._input.close()
        self.output.close()


# ---- inside a worker -------------------------------------------------------------------------------------------

_BUILT_IN_BYTES = 4 << 30


class _Late(BaseException):
    """The answer's limit is over. Not an Exception: graders that catch those must not swallow it."""


def serve() -> None:
    """The worker's loop: one JSON request a line on standard input, one reply a line on what was standard output."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    # User code that prints writes to standard error, and that reads gets nothing: the pipes are the protocol's.
    os.dup2(2, 1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGALRM, _raise_late)
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()

    def say(reply: Mapping[str, Any]) -> None:
        try:
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
        except BrokenPipeError:
            os._exit(0)  # nobody waits for it any more

    say({"ready": True})
    grader: Grader | None = None
    process = os.getpid()
    for line in requests:
        request = json.loads(line)
        if "open" in request:
            grader, reply = _open(EnvSpec(**request["open"]))
        else:
            assert grader is not None
            request["task"]["views"] = tuple(request["task"]["views"])
            reply = _grade(grader, Task(**request["task"]), request["answer"], request["limit_s"])
            if os.getpid() != process:
                os._exit(0)  # a child that user code forked and let return: it must not answer in our place
        say(reply)


def _open(spec: EnvSpec) -> tuple[Grader | None, Mapping[str, Any]]:
    from baton.envs import build_grader

    try:
        grader = build_grader(spec)
    except Exception as error:  # the documented edge: user code may raise anything; the parent gets it as a ConfigError
        return None, {"error": f"{cause(error)}"}
    if not grader.is_user_code:
        _limit_memory()
    return grader, {"is_user_code": grader.is_user_code, "lowest": grader.reward_range[0]}


def _grade(grader: Grader, task: Task, answer: str, limit_s: float) -> Mapping[str, Any]:
    try:
        with _limit(limit_s if not grader.is_user_code else None):
            grade = grader.grade(task, answer)
    except _Late:
        return {"late": f"no grade within {limit_s:g} s"}
    except (MemoryError, RecursionError) as error:
        if grader.is_user_code:
            return {"fault": f"{cause(error)}"}
        return {"late": type(error).__name__}
    except TaskFault as fault:
        return {"fault": str(fault)}
    except (Exception, SystemExit) as error:  # the documented edge: what a grader raises becomes `Failed`
        return {"fault": f"{cause(error)}"}
    return {"reward": grade.reward, "reason": grade.reason}


@contextmanager
def _limit(seconds: float | None) -> Generator[None]:
    if seconds is None:
        yield
        return
    # The alarm waits for the interpreter. Should C code hold that for ever with nobody left to kill the process, the
    # kernel ends it: the default action of the profiling timer.
    signal.setitimer(signal.ITIMER_PROF, 4.0 * seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _raise_late(number: int, frame: FrameType | None) -> NoReturn:
    raise _Late


def _limit_memory() -> None:
    """A power tower asks for more memory than there is; it gets MemoryError instead of the machine's killer."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = _BUILT_IN_BYTES if hard == resource.RLIM_INFINITY else min(hard, _BUILT_IN_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _leave_with(parent: int) -> None:
    """Ends a worker that hangs after its parent was killed: nobody else would."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
