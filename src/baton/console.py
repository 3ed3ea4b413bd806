"""What a person sees: the reporter of a terminal or a pipe, and records as text.

In a terminal a bar with the time left stands under the lines that stay; anywhere else there are plain lines and no control
codes. Nothing here computes a result: every function turns records, as they lie in a run directory, into text.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO, cast

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

Record = dict[str, Any]
Clock = Callable[[], float]

WIDTH = 100
"""Columns that no update line exceeds."""

STYLES: Mapping[str, str] = {"accepted": "green", "shrunk": "yellow", "rejected": "red"}
"""Colours of a verdict's word (in a terminal that has not set NO_COLOR)."""


# ---- the reporter ----------------------------------------------------------------------------------------------


def is_terminal(stream: TextIO) -> bool:
    """Whether cursor movements mean something where this stream goes."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


class Console:
    """Implements `run.Reporter` on a stream: one line an update, one for what is worth keeping, and how long steps go.

    In a terminal a long step is a bar with the time left, which leaves no trace. Elsewhere it is a line, at most every
    `quiet` seconds. Whoever waits longer than `quiet` seconds without a word is named, and named again when it goes on:
    the context manager keeps a watch on that.

    Example: with Console(sys.stdout, stages=40, agents=("first", "second")) as console: train(config, reporter=console)
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        stages: int | None = None,
        agents: Sequence[str] = (),
        quiet: float = 10.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._stream, self._stages, self._agents = stream, stages, tuple(agents)
        self._quiet, self._clock = quiet, clock
        self._rich = RichConsole(file=stream, force_terminal=True, highlight=False) if is_terminal(stream) else None
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._lock = threading.RLock()
        self._waiting_to_print: list[Callable[[], None]] = []
        self._is_printing = False
        self._over = threading.Event()
        self._watch: threading.Thread | None = None
        self._doing, self._step, self._done = "starting", "", 0
        self._began = self._heard = self._printed = self._refreshed = clock()
        self._is_long = False

    def __enter__(self) -> Console:
        self._watch = threading.Thread(target=self._keep_watch, daemon=True, name="console watch")
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._watch is not None:
            self._watch.join()
        self._stop_bar()

    # What the run calls.

    def say(self, text: str) -> None:
        """One line worth keeping."""
        self._went_on(text)
        self._line([(printable(text), "")])

    def progress(self, what: str, done: int, total: int, note: str = "") -> None:
        """A long step is at `done` of `total`."""
        self._went_on(what)
        now = self._clock()
        if what != self._step or done < self._done:
            self._step, self._began = what, now
        self._done = done
        if self._rich is not None:
            self._draw(what, done, total, note, now)
        elif now - self._printed >= self._quiet:
            left = (now - self._began) / max(1, done) * (total - done)
            end = f", {duration(left)} left" if 0 < done < total else ""
            self._line([(f"{what} {done}/{total}{end}{'  ' + note if note else ''}", "")])

    def update(self, record: Record) -> None:
        """The line of a complete agent update, and one for its failed episodes where there are any."""
        self._went_on("the next update")
        self._line(update_line(record, stages=self._stages, agents=self._agents))
        failed = failed_line(record)
        if failed:
            self._line([(failed, "yellow")])

    def stage(self, record: Record) -> None:
        """Nothing: a stage is its updates' lines; `baton inspect` shows the rest."""

    def write(self, lines: Iterable[str]) -> None:
        """Several lines of text."""
        for line in lines:
            self._line([(line, "")])

    # The watch.

    def beat(self) -> None:
        """Name what is waited for if nothing was heard for `quiet` seconds (again after each further such time)."""
        if self._rich is not None:
            if self._bar is not None:
                self._do(self._bar.refresh)
            return
        now = self._clock()
        if now - self._heard >= self._quiet and now - self._printed >= self._quiet:
            self._is_long = True
            self._line([(f"still at: {self._doing} ({duration(now - self._heard)})", "")])

    def _went_on(self, doing: str) -> None:
        now = self._clock()
        if self._is_long:
            self._is_long = False
            self._line([(f"went on after {duration(now - self._heard)} at: {self._doing}", "")])
        self._doing, self._heard = printable(doing), now

    def _keep_watch(self) -> None:
        while not self._over.wait(min(1.0, self._quiet)):
            try:
                self.beat()
            except OSError:
                return  # the reader is gone; the run meets that at its own next line

    # Printing.

    def _do(self, action: Callable[[], None]) -> None:
        """Print, one at a time. A signal handler may speak while this very thread is printing (a stream is not reentrant):
        its line then follows."""
        with self._lock:
            self._waiting_to_print.append(action)
            if self._is_printing:
                return
            self._is_printing = True
            try:
                while self._waiting_to_print:
                    self._waiting_to_print.pop(0)()
            finally:
                self._is_printing = False

    def _line(self, parts: Sequence[tuple[str, str]]) -> None:
        rich = self._rich
        self._printed = self._clock()
        if rich is not None:
            self._do(lambda: rich.print(Text.assemble(*parts), soft_wrap=True))
            return

        def plain() -> None:
            self._stream.write("".join(text for text, _ in parts) + "\n")
            self._stream.flush()

        self._do(plain)

    def _draw(self, what: str, done: int, total: int, note: str, now: float) -> None:
        rich = self._rich
        if self._bar is None:
            bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[note]}"),
                console=rich,
                transient=True,
                auto_refresh=False,
                get_time=self._clock,
            )
            self._bar = bar
            self._task = bar.add_task(what, total=total, note=note)
            self._do(bar.start)
            # A killed process cannot show the cursor again, so it is never hidden.
            self._do(lambda: cast("None", bar.console.show_cursor(True)))
        bar, task = self._bar, cast("TaskID", self._task)
        is_new = bar.tasks[0].description != what or done < bar.tasks[0].completed
        if is_new:
            bar.reset(task, total=total, completed=done, description=what, note=note)
        else:
            bar.update(task, total=total, completed=done, note=note)
        if is_new or done == total or now - self._refreshed >= 0.1:
            self._refreshed = now
            self._do(bar.refresh)

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._do(self._bar.stop)
            self._bar = self._task = None


class JsonLines:
    """Implements `run.Reporter` for programs: one JSON line an update on `stream`; all else goes to people's console."""

    def __init__(self, stream: TextIO, console: Console) -> None:
        self._stream = stream
        self.say, self.progress = console.say, console.progress

    def update(self, record: Record) -> None:
        """The update's record as it lies in stages.jsonl."""
        self._stream.write(to_json(record) + "\n")
        self._stream.flush()

    def stage(self, record: Record) -> None:
        """Nothing: its updates were written."""


def to_json(value: Any, *, indent: int | None = None) -> str:
    """JSON that every reader accepts: an infinite divergence is the text "Infinity"."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in cast("Sequence[Any]", value)]
    return value


# ---- words and numbers -----------------------------------------------------------------------------------------


def printable(text: str) -> str:
    """Text without control characters but newline and tab: what a model writes must not steer a terminal."""
    return "".join(c if c in "\n\t" or not _is_control(c) else f"\\x{ord(c):02x}" for c in text)


def _is_control(c: str) -> bool:
    return ord(c) < 32 or 127 <= ord(c) < 160


def decimal(value: float | None, digits: int = 3) -> str:
    """A number in few columns: .431, -.431, 1.25, 12.3, inf; `-` where there is none."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1:
        return f"{value:.2f}" if size < 10 else f"{value:.1f}" if size < 100 else f"{value:.0f}"
    text = f"{value:.{digits}f}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def against(value: float | None, radius: float, *, digits: int) -> str:
    """A divergence and its radius, .046/.050, with decimals enough for the radius to show two of its digits."""
    if math.isinf(radius):
        return f"{decimal(value, digits)}/inf"
    if radius < 1e-3:
        return f"{'-' if value is None else f'{value:.0e}'}/{radius:.0e}"
    places = max(digits, 1 - math.floor(math.log10(radius)))
    return f"{decimal(value, places)}/{decimal(radius, places)}"


def share(scale: float) -> str:
    """1, 1/2, 1/4, ..."""
    return "1" if scale == 1.0 else f"1/{round(1 / scale)}"


def duration(seconds: float) -> str:
    """1.2s, 85s, 12m, 3.4h."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    return f"{seconds:.0f}s" if seconds < 120 else f"{seconds / 60:.0f}m" if seconds < 7200 else f"{seconds / 3600:.1f}h"


def cut_to(text: str, width: int) -> str:
    """The text in at most `width` columns, on one line."""
    line = " ".join(printable(text).split())
    return line if len(line) <= width else line[: max(0, width - 3)] + "..."


def table(rows: Sequence[Sequence[str]], *, right: Iterable[int] = ()) -> list[str]:
    """Aligned columns; the first row is the header. Columns named in `right` are right-aligned."""
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    pads = [str.rjust if c in set(right) else str.ljust for c in range(len(widths))]
    return ["  ".join(p(cell, w) for p, cell, w in zip(pads, row, widths, strict=True)).rstrip() for row in rows]


# ---- updates ---------------------------------------------------------------------------------------------------


def verdict_words(record: Record) -> tuple[str, str]:
    """(accepted | shrunk 1/4 | rejected, the reason of a rejection or nothing)."""
    verdict = record["verdict"]
    word = str(record["word"])
    return (f"shrunk {share(verdict['scale'])}" if word == "shrunk" else word), str(verdict.get("reason", ""))


def versions(record: Record) -> str:
    """v2 -> v3, or v2 where the update was rejected."""
    before, after = record["from_version"], record["to_version"]
    return f"v{before}" if after is None else f"v{before} -> v{after}"


def update_line(record: Record, *, stages: int | None = None, agents: Sequence[str] = ()) -> list[tuple[str, str]]:
    """One update in at most 100 columns, as (text, style) parts; a long agent name gives way."""
    word, reason = verdict_words(record)
    gate: Record | None = record["verdict"]["gate"]
    of = f"/{stages}" if stages is not None else ""
    head = f"stage {record['stage']}{of}".ljust(len(f"stage {stages}{of}") if stages is not None else 0) + "  "
    rest = f"  reward {decimal(record['episodes']['reward'])}"
    if gate is not None:
        rest += f"  kl {against(gate['q_gate'], gate['radius_token'], digits=3)}"
        # What was not published was inside the region: its long reason takes this place.
        if reason != "not_published":
            rest += f"  mean {against(gate['message_mean'], gate['radius_message_mean'], digits=4)}"
    rest += f"  {versions(record)}" + (f" {reason}" if reason else "")
    rest += f"  {duration(record['seconds']['total'])}"
    width = max(1, min(max((len(a) for a in (*agents, record["agent"])), default=1), WIDTH - len(head) - 2 - 12 - len(rest)))
    name = str(record["agent"])
    if len(name) > width:
        # Both ends: teammates often share the beginning.
        end = (width - 1) // 2
        name = f"{name[: width - 1 - end]}~{name[len(name) - end :]}"
    return [(f"{head}{name.ljust(width)}  ", ""), (word.ljust(12), STYLES[str(record["word"])]), (rest, "")]


def failed_line(record: Record) -> str:
    """How many of an update's episodes failed and mostly why; empty where none did."""
    failed: Mapping[str, int] = record["episodes"]["failed"]
    if not failed:
        return ""
    reason, n = Counter(failed).most_common(1)[0]
    head = f"  {sum(failed.values())} of {record['episodes']['n']} episodes failed, {n} times: "
    return head + cut_to(reason, WIDTH - len(head))


def update_table(updates: Sequence[Record]) -> list[str]:
    """One row an update: verdict, divergences against radii, versions, step size and replay gap."""
    head = ["stage", "agent", "verdict", "reward", "kl/radius", "mean/radius", "scale", "certified", "version"]
    rows: list[Sequence[str]] = [[*head, "beta", "lr", "replay"]]
    for u in updates:
        word, reason = verdict_words(u)
        gate: Record | None = u["verdict"]["gate"]
        rows.append(
            [
                str(u["stage"]),
                cut_to(u["agent"], 16),
                f"{word.split()[0]} {reason}".strip(),
                decimal(u["episodes"]["reward"]),
                "-" if gate is None else against(gate["q_gate"], gate["radius_token"], digits=3),
                "-" if gate is None else against(gate["message_mean"], gate["radius_message_mean"], digits=4),
                "-" if gate is None else share(gate["scale"]),
                certified(gate),
                versions(u),
                f"{u['beta']:.2g}",
                f"{u['lr']:.2g}",
                "-" if u["replay"] is None else f"{u['replay']['mean']:.0e}",
            ]
        )
    return table(rows, right=(0, 3, 9, 10))


def certified(gate: Record | None) -> str:
    """Whether the probe prompts certify the quantile, or up to which level they would."""
    if gate is None:
        return "-"
    return "yes" if gate["certified"] else f"no, {decimal(gate['certifiable_level'])}"


def update_details(record: Record) -> list[str]:
    """Everything that decided one update, in full."""
    word, reason = verdict_words(record)
    verdict, episodes = record["verdict"], record["episodes"]
    lines = [f"{record['agent']}  {word}{' ' + reason if reason else ''}  {versions(record)}"]
    if verdict.get("detail"):
        lines.append(f"  why        {cut_to(verdict['detail'], 300)}")
    for look in record["looks"]:
        kl = against(look["q_gate"], look["radius_token"], digits=4)
        mean = against(look["message_mean"], look["radius_message_mean"], digits=4)
        upper = "none" if look["q_ucb"] is None else decimal(look["q_ucb"], 4)
        lines.append(
            f"  scale {share(look['scale']).ljust(5)}kl {kl} ({look['direction']}; point {decimal(look['q_point'], 4)}, "
            f"upper bound {upper})  mean {mean}  {'inside' if look['passed'] else 'outside'}"
        )
    gate: Record | None = verdict["gate"]
    if gate is not None:
        able = "certified" if gate["certified"] else f"not certified: they reach level {decimal(gate['certifiable_level'])}"
        lines.append(f"  evidence   {gate['n_states']} states of {gate['n_units']} probe prompts, {able}")
    lines.append(
        f"  episodes   {episodes['n']} of {episodes['prompts']} prompts, reward {decimal(episodes['reward'])}, "
        f"{episodes['degenerate_groups']} groups with equal rewards, {sum(episodes['failed'].values())} failed"
    )
    for name, n in Counter(cast("dict[str, int]", episodes["failed"])).most_common():
        lines.append(f"    failed {n} times: {cut_to(name, 200)}")
    for number, step in enumerate(record["steps"], start=1):
        lines.append(f"  step {number}     loss {step['loss']:.4g}, gradient norm {step['grad_norm']:.4g}")
    replay = record["replay"]
    gap = "not measured" if replay is None else f"{replay['mean']:.1e} nats a token, at most {replay['max']:.1e}"
    lines.append(f"  settings   beta {record['beta']:.3g}, lr {record['lr']:.3g}; replay gap {gap}")
    lines.append("  seconds    " + ", ".join(f"{k} {v:.1f}" for k, v in record["seconds"].items()))
    return lines


# ---- a run -----------------------------------------------------------------------------------------------------


def start_lines(start: Record) -> list[str]:
    """What a run decided once: start accuracy, warm starts, prompt sets, noise floors, proven facts."""
    accuracy = f"{decimal(start['start_accuracy'])} on {start['start_prompts']} train prompts"
    lines = [f"  accuracy     {accuracy}; groups of {start['group']}"]
    for name, warm in start["warm_start"].items():
        reached = f"accuracy {decimal(warm['accuracy'][0][1])} -> {decimal(warm['accuracy'][-1][1])}"
        cached = " (from the cache)" if warm["cached"] else ""
        lines.append(f"  warm start   {name}: {warm['steps']} steps, {warm['tokens']:,} tokens, {reached}{cached}")
    splits = start["splits"]
    sets = ", ".join(f"{name} {splits[name]['prompts']}" for name in ("train", "probe", "certify", "test"))
    lines.append(f"  prompts      {sets}; {splits['equal_prompts_removed']} equal ones removed")
    for name, floor in start["noise_floor"].items():
        lines.append(f"  noise floor  {name}: {floor['token']:.1e} nats a token, {floor['message_mean']:.1e} a message")
    for name, value in start["facts"].items():
        lines.append(f"  proven       {name} = {decimal(value, 4)}")
    found = ", ".join(f"{name} {version}" for name, version in start["versions"].items())
    lines.append(f"  made with    python {start['python']}, {found}, threads {start['threads']}")
    return lines


def summary(updates: Sequence[Record], agents: Sequence[str]) -> Record:
    """What a run came to, per agent, over all its updates. `kl_over_radius` is the mean over promoted updates."""
    failed: Counter[str] = Counter()
    for u in updates:
        failed.update(cast("dict[str, int]", u["episodes"]["failed"]))
    rows: list[Record] = []
    for name in agents:
        own = [u for u in updates if u["agent"] == name]
        words = Counter(str(u["word"]) for u in own)
        gates = [u["verdict"]["gate"] for u in own if u["to_version"] is not None]
        promoted = [u["to_version"] for u in own if u["to_version"] is not None]
        rows.append(
            {
                "agent": name,
                "version": promoted[-1] if promoted else 0,
                "accepted": words["accepted"],
                "shrunk": words["shrunk"],
                "rejected": dict(Counter(str(u["verdict"]["reason"]) for u in own if u["word"] == "rejected")),
                "reward": own[-1]["episodes"]["reward"] if own else None,
                "kl_over_radius": sum(g["q_gate"] / g["radius_token"] for g in gates) / len(gates) if gates else None,
            }
        )
    return {
        "updates": len(updates),
        "stages": max((int(u["stage"]) for u in updates), default=0),
        "agents": rows,
        "failed_episodes": dict(failed.most_common()),
    }


def summary_lines(result: Record) -> list[str]:
    """`summary` as one table, with the failed episodes by reason below it."""
    rows: list[Sequence[str]] = [["agent", "version", "accepted", "shrunk", "rejected", "last reward", "mean kl/radius"]]
    for a in result["agents"]:
        reasons = ", ".join(f"{reason} {n}" for reason, n in a["rejected"].items())
        rejected = f"{sum(a['rejected'].values())} ({reasons})" if reasons else "0"
        counts = (str(a["accepted"]), str(a["shrunk"]), rejected)
        name = cut_to(a["agent"], 20)
        rows.append([name, f"v{a['version']}", *counts, decimal(a["reward"]), decimal(a["kl_over_radius"])])
    lines = table(rows, right=(2, 3, 5, 6))
    for reason, n in result["failed_episodes"].items():
        lines.append(f"failed episodes: {n} times {cut_to(reason, 70)}")
    return lines


# ---- episodes --------------------------------------------------------------------------------------------------


def episode_lines(row: Record) -> list[str]:
    """One conversation: the question, every message under its agent and version, the outcome and why."""
    if row["use"] == "probe":
        outcome = "probe: played for the gate, not graded"
    elif row["outcome"] == "failed":
        outcome = f"failed: {cut_to(row['reason'], 300)}"
    else:
        why = f" ({cut_to(row['reason'], 200)})" if row["reason"] else ""
        cut = ", answer cut at its token limit" if row["outcome"] == "truncated" else ""
        outcome = f"reward {row['reward']:g}{why}{cut}"
    return [f"{printable(row['id'])}  {printable(outcome)}", *_block("prompt", row["prompt"]), *turn_lines(row["turns"])]


def turn_lines(turns: Sequence[Record]) -> list[str]:
    """Who said what, each message under its agent and version."""
    lines: list[str] = []
    for turn in turns:
        version = f"@v{turn['versions'][0]}" if turn["versions"] else ""
        end = f"{len(turn['ids'])} tokens, {'cut' if turn['cut'] else turn['finish_reason']}" if turn["ids"] else ""
        lines += _block(f"{turn['agent']}{version}", turn["text"], end)
    return lines


def answer_lines(row: Record) -> list[str]:
    """An answered question: every message, then the team's answer."""
    return [*turn_lines(row["turns"]), *_block("answer", row["answer"])]


def _block(name: str, text: str, note: str = "") -> list[str]:
    head = f"  {name}" + (f"  [{note}]" if note else "")
    return [head, *(f"    {line}" for line in printable(text).split("\n"))]


def count_episodes(rows: Sequence[Record]) -> Record:
    """How a batch ended: failed ones (no reward at all) apart from those of reward 0 or below."""
    graded = [r for r in rows if r["outcome"] != "failed"]
    return {
        "episodes": len(rows),
        "failed": len(rows) - len(graded),
        "reward_zero": sum(r["reward"] <= 0 for r in graded),
        "reward_above_zero": sum(r["reward"] > 0 for r in graded),
        "reasons": dict(Counter(str(r["reason"]) for r in graded if r["reason"]).most_common(5)),
    }


def count_line(record: Record, counts: Record) -> str:
    """The head over an update's episodes."""
    return (
        f"stage {record['stage']}, update of {record['agent']}: {counts['episodes']} episodes, {counts['failed']} failed, "
        f"{counts['reward_zero']} with reward 0 or less, {counts['reward_above_zero']} above"
    )


# ---- evaluations -----------------------------------------------------------------------------------------------


def score_lines(report: Record) -> list[str]:
    """An evaluation as a table: value with its 95 % interval, the team's lead over each row, what an answer costs."""
    has_pass = any(row.get("pass_at_k") is not None for row in report["rows"])
    head = ["", f"avg@{report['k']}", "95 %", *([f"pass@{report['k']}"] if has_pass else []), "team minus this", "prompts"]
    rows: list[Sequence[str]] = [[*head, "tokens/answer", "failed"]]
    notes: list[str] = []
    for row in report["rows"]:
        mark = ""
        if row["note"]:
            notes.append(f"{len(notes) + 1}) {row['note']}")
            mark = f" {len(notes)})"
        lead = row.get("difference")
        cells = [
            row["name"] + mark,
            decimal(row["value"]),
            interval(row["low"], row["high"]),
            *([decimal(row.get("pass_at_k"))] if has_pass else []),
            "-" if lead is None else f"{lead[0]:+.3f} {interval(lead[1], lead[2])}",
            str(row["n"]) if row["value"] is not None else "-",
            "-" if row["tokens_per_answer"] is None else f"{row['tokens_per_answer']:.1f}",
            str(row.get("failed", 0)),
        ]
        rows.append(cells)
    lines = table(rows, right=(1, *range(3, len(rows[0]))))
    lines += notes
    lines += [f"proven: {name} = {decimal(value, 4)}" for name, value in report.get("facts", {}).items()]
    return lines


def interval(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"[{decimal(low)}, {decimal(high)}]"


# ---- verification ----------------------------------------------------------------------------------------------


def audit_lines(report: Record, *, limit: int = 50) -> list[str]:
    """`verify` for people: one line per kind of check, what was not checked and why, and each fault in a line of its own."""
    rows: list[Sequence[str]] = [["", "checked", "not checked", "wrong", ""]]
    for check in report["checks"]:
        counts = [f"{check[name]:,}" if check[name] else "-" for name in ("checked", "not_checked", "wrong")]
        rows.append([check["check"], *counts, check["what"]])
    lines = table(rows, right=(1, 2, 3))
    if report["not_checked"]:
        lines += ["", "not checked"]
    for one in report["not_checked"]:
        count = f"{one['count']:,} " if one["count"] else ""
        places = (
            f" ({', '.join(one['places'])}{', ...' if one['count'] > len(one['places']) else ''})" if one["places"] else ""
        )
        lines.append(f"  {count}{one['check']}: {printable(one['reason'])}{places}")
    if report["tolerances"]:
        lines += ["", *_tolerance_lines(report)]
    by_check: dict[str, list[Record]] = {}
    for fault in report["faults"]:
        by_check.setdefault(fault["check"], []).append(fault)
    for name, faults in by_check.items():
        lines += ["", f"wrong: {name}", *(f"  {fault_line(fault)}" for fault in faults[:limit])]
        if len(faults) > limit:
            lines.append(f"  and {len(faults) - limit:,} more (--json has them all)")
    n = len(report["faults"])
    end = f"{n:,} fault{'' if n == 1 else 's'}" if n else "everything that was checked holds"
    return [*lines, "", f"{report['run']}: {end}"]


def _tolerance_lines(report: Record) -> list[str]:
    said, gaps = report["tolerances"], report["largest_gaps"]
    floor = max(said["noise_floor"].values(), default=0.0)
    return [
        "compared within a tolerance, in nats",
        f"  log-probs    {said['token']:g} a token, {said['token_mean']:g} in the mean; "
        f"largest gap {gaps.get('log-probs', 0.0):.1e}",
        f"  divergences  {said['divergence']} (at most {floor:.1e}); largest gap {gaps.get('divergences', 0.0):.1e}",
    ]


def fault_line(fault: Record) -> str:
    """Where, what, what was recorded and what was recomputed."""
    place = " ".join(part for part in (fault["file"], fault["where"]) if part)
    values = ""
    if fault["recorded"] is not None or fault["recomputed"] is not None:
        values = f" recorded {_value(fault['recorded'])}, recomputed {_value(fault['recomputed'])}"
    return printable(f"{place}: {fault['what']}{values}").replace("\n", " ")


def _value(value: Any) -> str:
    return cut_to(to_json(value), 120)


# ---- plans -----------------------------------------------------------------------------------------------------


def size(count: float) -> str:
    """Bytes for people: 12 kB, 3.4 MB, 7.1 GB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}" if count < 10 * unit else f"{count / unit:.0f} {name}"
    return f"{count:.0f} B"


def plan_lines(report: Record) -> list[str]:
    """`plan.plan` as text: what the figures rest on stands under each of them."""
    lines = ["an estimate, for updates that are accepted whole; nothing was loaded", ""]
    rows: list[Sequence[str]] = [["agent", "parameters", "serving", "update", "longest", "own tokens", "message length"]]
    for a in report["agents"]:
        if a["kind"] == "endpoint":
            rows.append([cut_to(a["agent"], 20), "", "endpoint", "frozen", "", "", ""])
            continue
        e = report["episodes"][a["agent"]]
        is_trained = a["kind"] == "trained"
        served = f"{a['serving']}, trained in {a['compute']}" if is_trained else a["serving"]
        tokens = f"{e['rows']} rows, {e['trained_tokens']:,} tokens" if is_trained else "frozen"
        cells = [cut_to(a["agent"], 20), f"{a['parameters']:,}", served, tokens, str(e["longest_row"])]
        rows.append([*cells, f"{e['own_tokens']:,}", e["message_length"]])
    lines += table(rows, right=(1, 4, 5))
    lines += [f"  assumed: {note}" for note in report["notes"]]
    lines += ["", *_plan_memory(report["memory"]), "", *_plan_disk(report["disk"]), "", *_plan_time(report["time"])]
    tokens = report["tokens"]
    lines += ["", "generated tokens"]
    for what in ("stage", "run"):
        more = f", {tokens[what]['order']:,} to measure the order" if "order" in tokens[what] else ""
        more += f", at most {tokens[what]['pairs']:,} in pairs" if "pairs" in tokens[what] else ""
        lines.append(
            f"  {what.ljust(6)} {tokens[what]['train']:,} in episodes, {tokens[what]['probe']:,} for the gate{more}"
        )
    lines.append("  up to three times as many episodes where too few groups are informative")
    return [*lines, "", *_plan_limit(report["speed_limit"])]


def _plan_memory(memory: Record) -> list[str]:
    at = memory["at"]
    lines = [f"memory   {size(memory['peak'])} at the peak ({at['phase']}, update of {cut_to(at['agent'], 20)})"]
    lines += table([[f"  {size(count)}", name] for name, count in memory["terms"].items()], right=(0,))
    others = ", ".join(f"{name} {size(total)}" for name, total in memory["phases"].items() if total)
    return [*lines, f"  phases: {others}"]


def _plan_disk(disk: Record) -> list[str]:
    kept = disk["kept"]
    total = (
        f"{size(kept['total'])} after the last stage, {size(disk['most'])} at most, {size(disk['written'])} written in all"
    )
    lines = [f"disk     {total}"]
    for agent, total in disk["accepted_update"].items():
        parts = f"weights {size(disk['weights_of_a_version'][agent])}, training state {size(disk['training_state'][agent])}"
        lines.append(f"  an accepted update of {cut_to(agent, 20)}: {size(total)} ({parts})")
    logs = ", ".join(f"{name} {size(count)}" for name, count in disk["logs_of_an_update"].items())
    return [*lines, f"  of every update stay: {logs}; kept versions and resume points: {size(kept['state'])}"]


def _plan_time(times: Record) -> list[str]:
    if times["run"] is None:
        return [f"time     {times['measured']}"]
    stage = times["stage"]
    parts = ", ".join(f"{name} {duration(stage[name])}" for name in stage if name != "total")
    speed = f"{times['step_gflops_per_second']:.0f} GFLOP/s in steps of {times['step_gflops']:.3g} GFLOP a stage"
    lines = [
        f"time     {duration(stage['total'])} a stage, {duration(times['run'])} for all stages, {times['threads']} threads",
        f"  a stage: {parts}",
        f"  measured: {times['measured']}; {speed}",
        "  each further look of the gate adds its time again; loading, version 0 and the start's episodes come before",
    ]
    if times["busy"]:
        lines.append(f"  warning: these are a busy machine's times: {times['busy']}")
    if times["warm_starts_at_most"]:
        lines.append(f"  warm starts before it: at most {duration(times['warm_starts_at_most'])} (none where cached)")
    return lines


def _plan_limit(limit: Record) -> list[str]:
    way = f"{limit['from']:g} -> {limit['to']:g}"
    exact = "" if limit["is_exact"] else f"; for direction {limit['direction']} it holds for small steps only"
    lines = [f"speed limit   fewest accepted updates from {way} that a radius allows{exact}"]
    rows: list[Sequence[str]] = [["  agent alone", "tokens", "token", "greedy", "message mean", "greedy"]]
    for a in limit["agents"]:
        cells = [str(a[name].get(what, "-")) for name in ("token", "message_mean") for what in ("updates", "greedy")]
        rows.append([f"  {cut_to(a['agent'], 20)}", f"{a['tokens']:.1f}", *cells])
    lines += table(rows, right=(1, 2, 3, 4, 5))
    needed = limit["stages_needed"]
    by = f"{needed['token']} stages by the token radii, {needed['message_mean']} by the message means"
    lines.append(f"  all agents together: {by}; the plan has {limit['stages']}")
    return [*lines, *(f"  warning: {text}" for text in limit["warnings"])]


# ---- the config ------------------------------------------------------------------------------------------------


def key_lines(keys: Sequence[Record]) -> list[str]:
    """Keys of the config, each with its sentence, what it may be, its default and its unit."""
    lines: list[str] = []
    for key in keys:
        lines += ["", key["path"], f"  {key['sentence']}", f"  type     {key['kind']}", f"  default  {key['default']}"]
        lines += [f"  unit     {key['unit']}"] if key["unit"] else []
        lines += [f"  only     where {key['only']}"] if key["only"] else []
    return lines[1:]


# ---- the doctor ------------------------------------------------------------------------------------------------


def health_lines(report: Record) -> list[str]:
    """`doctor.examine` as lines: status, what, finding, and the remedy below where there is one."""
    wide = max(len(check["name"]) for check in report["checks"])
    lines: list[str] = []
    for check in report["checks"]:
        lines.append(f"{check['status']:<4}  {check['name'].ljust(wide)}  {check['finding']}")
        if check["remedy"]:
            lines.append(f"      {' ' * wide}  -> {check['remedy']}")
    return lines
