"""Inside a grader's process: one request a line, one reply a line, limits of time and memory, no way out for user code."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from baton.envs.pool import EnvSpec, Grader
from baton.errors import TaskFault, cause
from baton.types import Task

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
