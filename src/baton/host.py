"""The person at the terminal: what a long step tells them, and how they stop it."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, TypeVar

from baton.errors import Interrupted
from baton.records import Record


class Reporter(Protocol):
    """What a person sees of a run while it runs."""

    def say(self, text: str) -> None:
        """One line worth keeping."""
        ...

    def progress(self, what: str, done: int, total: int, note: str = "") -> None:
        """A long step is at `done` of `total`."""
        ...

    def update(self, record: Record) -> None:
        """An agent update is complete."""
        ...

    def stage(self, record: Record) -> None: ...


class Silent:
    """A reporter that says nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def progress(self, what: str, done: int, total: int, note: str = "") -> None:
        """Nothing."""

    def update(self, record: Record) -> None:
        """Nothing."""

    def stage(self, record: Record) -> None:
        """Nothing."""


class Stop:
    """A request to stop, made by the first Ctrl-C (or SIGTERM) and obeyed at the next tick. The second one, and the first
    while there is `nothing_to_save`, raise KeyboardInterrupt where the program stands; the third ends the process."""

    def __init__(self, reporter: Reporter) -> None:
        self.asked = False
        self.nothing_to_save = True
        self._reporter = reporter

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            signal.signal(number, signal.SIG_DFL)
            raise KeyboardInterrupt
        self.asked = True
        if self.nothing_to_save:
            raise KeyboardInterrupt
        self._reporter.say("stopping: the update in hand is dropped, everything before it is saved (again to stop at once)")

    def check(self) -> None:
        if self.asked:
            raise Interrupted("stopped by the user")


@contextmanager
def stoppable(reporter: Reporter) -> Generator[Stop]:
    """Turn the first Ctrl-C into an orderly stop while the block runs (outside the main thread, signals are the host's)."""
    stop = Stop(reporter)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deaf() -> Generator[None]:
    """Ctrl-C is not heard while the block runs: the last words to somebody who has pressed it twice."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


T = TypeVar("T")


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where an event loop is already running (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        # A loop of our own that leaves signals alone: Ctrl-C is `stoppable`'s.
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(work)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
    box: list[T | BaseException] = []

    def target() -> None:
        try:
            box.append(complete(work))
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        thread.join()  # it was asked to stop as well; its run must not outlive the lock of its directory
        raise
    result = box[0]
    if isinstance(result, BaseException):
        raise result
    return result
