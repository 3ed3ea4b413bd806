"""Graders in worker processes that may hang or die without harm to a run (ALGORITHMS 5.5)."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Literal, Protocol

from baton.envs.env import Grade
from baton.errors import ConfigError, TaskFault
from baton.types import Failed, Task


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
        code = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from baton.envs.worker import serve; serve()"
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
