"""The command line: parse, call, print.

    baton train CONFIG         train a team, or resume a run
    baton inspect RUN          what was accepted, shrunk or rejected, and why
    baton episodes RUN         read the conversations
    baton evaluate RUN|MODEL   scores on the test prompts, beside what they must be compared with
    baton report RUN           a run as one HTML page
    baton verify RUN           check a run from its directory alone
    baton doctor               is this machine fit, and how fast is it
    baton config CONFIG        the resolved config; --explain KEY says what a key means
    baton plan CONFIG          memory, disk and time of a run, before anything loads
    baton try RUN QUESTION     talk to a run's team
    baton swap RUN AGENT=MODEL another model takes a seat, the others keep theirs
    baton distill RUN MODEL    teach a run's team to one model that answers alone

Exit codes: 0; 1 something failed on the way (or the doctor or an audit found a fault); 2 bad input, refused before work
began; 3 the run stalled; 130 interrupted. Bad input and known failures are one line on stderr; a traceback is our fault.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any, NoReturn, cast

from baton import assemble, doctor, records, requests, run, trackers
from baton import config as configs
from baton import console as show
from baton import plan as planning
from baton import swap as swaps
from baton.algorithms.stage0 import MODES, SwapOptions
from baton.audit import verify
from baton.distillation import DistillOptions, distill
from baton.errors import BatonError, ConfigError, DataError, Interrupted, ModelError, RunError, is_text
from baton.evaluation import evaluate, evaluate_model
from baton.host import deaf
from baton.journal import SWAPS, Run, current, open_run, standing
from baton.records import Record
from baton.ui import certificates, handovers
from baton.ui import report as pages

FAILED, BAD_INPUT, STALLED, INTERRUPTED, NO_READER = 1, 2, 3, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    for stream in (sys.stdout, sys.stderr):
        # Models write any character; a terminal of another encoding gets \\u escapes, not a crash.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        try:
            arguments = _parser().parse_args(argv)
        except SystemExit as stop:  # --help and --version
            return int(stop.code or 0)
        code: int = arguments.command(arguments)
        sys.stdout.flush()
        return code
    except (ConfigError, ModelError, DataError) as error:
        return _refuse(error, BAD_INPUT)
    except BatonError as error:
        return _refuse(error, FAILED)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, a pager) has left. Python flushes stdout once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        return _refuse(RunError(f"{error.filename}: {error.strerror}"), FAILED)
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.ENOSPC):
            raise
        return _refuse(RunError(f"{error.filename or 'standard output'}: {error.strerror}"), FAILED)


def _refuse(error: BatonError, code: int) -> int:
    print(f"error: {show.printable(str(error))}", file=sys.stderr)
    return code


# ---- arguments -------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Wrong usage is bad input like any other."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            close = difflib.get_close_matches(str(value), choices, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"choose from {', '.join(choices)}"
            raise argparse.ArgumentError(action, f"'{value}' is none of its choices; {hint}")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of at least 1")
    return int(text)


def _chance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1.0:
        raise argparse.ArgumentTypeError(f"{text} is no probability between 0 and 1")
    return value


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no whole number of at least 0")
    return int(text)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.05 <= value <= 10:
        raise argparse.ArgumentTypeError(f"{text} is no number from 0.05 to 10")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="baton",
        description="Train a team of small language models, one agent at a time, by a trainer that can say no.",
        epilog="example: baton train configs/sat.toml --set algorithm.stages=10",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"baton {package_version('baton-rl')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, function: Any, what: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=what,
            description=what[0].upper() + what[1:] + ".",
            epilog=f"example: {example}",
            allow_abbrev=False,
        )
        sub.set_defaults(command=function)
        return sub

    train = command(
        "train",
        _train,
        "train a team as a TOML file says, or go on with a run",
        "baton train configs/relay_tiny.toml --run runs/first --set seed=1 --set agents.solver.lr=3e-4",
    )
    train.add_argument("config", metavar="CONFIG", help="TOML file")
    train.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one key, e.g. algorithm.stages=80; agents by name: agents.solver.lr=1e-4 (repeatable)",
    )
    train.add_argument("--run", metavar="DIR", help="run directory (default: runs/NAME of the config file)")
    train.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run there; algorithm.stages, [checkpoint], [eval] and [track] may differ from its config",
    )
    _json(train, "one JSON line an update as it happens, then one summary line")

    inspect = command(
        "inspect",
        _inspect,
        "show what a run accepted, shrunk or rejected, and why",
        "baton inspect runs/first --stage 3",
    )
    inspect.add_argument("run", metavar="RUN", help="run directory")
    inspect.add_argument("--stage", type=_count, metavar="N", help="one stage, with every look of the gate")
    inspect.add_argument(
        "--certificates",
        action="store_true",
        help="every certificate: the published bounds, what pairs of episodes show, what probe episodes show",
    )
    _json(inspect)

    episodes = command(
        "episodes",
        _episodes,
        "read the conversations that a run trained on, newest update first",
        "baton episodes runs/first --stage 3 --agent solver --limit 2",
    )
    episodes.add_argument("run", metavar="RUN", help="run directory")
    episodes.add_argument("--stage", type=_count, metavar="N", help="episodes of this stage")
    episodes.add_argument("--agent", metavar="NAME", help="episodes of this agent's updates")
    episodes.add_argument(
        "--failed",
        action="store_true",
        help="only those whose outcome is `failed`: something broke that is not the model's answer (a wrong answer has "
        "reward 0 and did not fail)",
    )
    episodes.add_argument("--limit", type=_count, default=10, metavar="N", help="show at most N (default 10)")
    _json(episodes)

    measure = command(
        "evaluate",
        _evaluate,
        "measure a run's team, or one model, on the test prompts",
        "baton evaluate runs/first --k 4",
    )
    measure.add_argument("target", metavar="RUN|MODEL", help="run directory, or a model (which needs --config)")
    measure.add_argument("--k", type=_count, default=1, metavar="K", help="episodes per prompt (default 1)")
    measure.add_argument("--episodes", type=_count, metavar="N", help="episodes in all (default: eval.episodes)")
    measure.add_argument("--config", metavar="CONFIG", help="for a model: the TOML file that names the task")
    measure.add_argument("--no-baselines", action="store_true", help="for a run: the team and its untrained self only")
    measure.add_argument(
        "--full-information", metavar="MODEL", help="for a run: a model of the team's total size, asked everything at once"
    )
    _json(measure)

    page = command(
        "report",
        _report,
        "write a run as one HTML page that needs no other file",
        "baton report runs/first -o first.html",
    )
    page.add_argument("run", metavar="RUN", help="run directory")
    page.add_argument("-o", "--output", metavar="FILE", help="the page (default: RUN/report.html); an older one is replaced")
    _json(page)
    audit = command(
        "verify",
        _verify,
        "check a run from its directory alone: weights, episodes, rewards, looks, verdicts and accuracies",
        "baton verify runs/first",
    )
    audit.add_argument("run", metavar="RUN", help="run directory; nothing is written into it")
    audit.add_argument("--updates", type=_count, metavar="N", help="look into the files of the newest N updates only")
    audit.add_argument(
        "--root",
        metavar="DIR",
        help="folder of the files that the config names; needed for a run from elsewhere, and for an env of your own code",
    )
    _json(audit)

    health = command(
        "doctor", _doctor, "check this machine for training, and measure its speed (10 s)", "baton doctor --json"
    )
    _json(health)
    _tools(command)
    return parser


def _tools(command: Callable[..., argparse.ArgumentParser]) -> None:
    """`config`, `plan`, `try`, `swap` and `distill`."""
    settings = command(
        "config",
        _config,
        "print a config with every default filled in, once all is checked that needs no model; or explain its keys",
        "baton config --explain gate.probe_prompts",
    )
    settings.add_argument("config", metavar="CONFIG", nargs="?", help="TOML file")
    settings.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one key (repeatable)")
    settings.add_argument(
        "--explain",
        nargs="?",
        const="",
        metavar="KEY",
        help="say what a key, or every key of a section, means (no KEY: all)",
    )
    _json(settings)

    ahead = command(
        "plan",
        _plan,
        "say what a run will take (memory, disk, time, tokens, fewest updates) before any model loads",
        "baton plan configs/smollm2.toml --from 0.25 --to 0.95",
    )
    ahead.add_argument("config", metavar="CONFIG", help="TOML file")
    ahead.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one key (repeatable)")
    ahead.add_argument(
        "--from", dest="start", type=_chance, default=0.25, metavar="P", help="accuracy at the start (default 0.25)"
    )
    ahead.add_argument("--to", dest="goal", type=_chance, default=0.95, metavar="P", help="accuracy wanted (default 0.95)")
    ahead.add_argument(
        "--answer-tokens",
        type=_count,
        metavar="N",
        help="expected tokens of a message (default: a warm start's demonstrations', else agents.max_new_tokens)",
    )
    _json(ahead)

    talk = command(
        "try",
        _try,
        "ask a run's promoted team a question: one episode, who said what, and the team's answer",
        'baton try runs/first "table: AcBaCb ; in: A" --temperature 0.5',
    )
    talk.add_argument("run", metavar="RUN", help="run directory")
    talk.add_argument(
        "question",
        metavar="QUESTION",
        nargs="?",
        help="what every seat is asked, or a JSON list of one text per seat; without it, in a terminal, questions are read "
        "until Ctrl-D, each an episode of its own",
    )
    talk.add_argument("--view", action="append", default=[], metavar="TEXT", help="what the next seat is asked (repeatable)")
    talk.add_argument("--views", metavar="FILE", help="JSON file with a list of one text per seat")
    talk.add_argument("--temperature", type=_temperature, metavar="T", help="of every seat (default: each seat's own)")
    talk.add_argument("--seed", type=_seed, metavar="N", help="another seed is another answer (default: the run's)")
    _json(talk, "one JSON document an episode on stdout, nothing else")

    exchange = command(
        "swap",
        _swap,
        "give an agent's seat to another model: made to speak as the one before, judged by the gate, and the others keep "
        "theirs; or take the last swap back",
        "baton swap runs/first solver=tiny:1M --continue 20",
    )
    exchange.add_argument("run", metavar="RUN", help="run directory that stands between two stages")
    exchange.add_argument("seat", metavar="AGENT=MODEL", nargs="?", help="whose seat, and the model as in agents.model")
    exchange.add_argument(
        "--mode",
        choices=list(MODES),
        help="; ".join(f"{name}: {what}" for name, what in MODES.items()) + " (default: distill)",
    )
    exchange.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"of {', '.join(n for n in SwapOptions.model_fields if n != 'mode')} (repeatable)",
    )
    exchange.add_argument("--continue", dest="more", type=_count, metavar="N", help="then train N stages more")
    exchange.add_argument("--undo", action="store_true", help="go back to the run before its last swap, bit for bit")
    exchange.add_argument(
        "--live", action="store_true", help="ask the job that runs there: it swaps between two stages and trains on"
    )
    _json(exchange)

    teach = command(
        "distill",
        _distill,
        "teach a run's team to one model that sees the whole question and answers alone, and measure both; the run is only "
        "read",
        "baton distill runs/first tiny:195k -o student",
    )
    teach.add_argument("run", metavar="RUN", help="run directory")
    teach.add_argument("model", metavar="MODEL", help="what the student begins as, as in agents.model")
    teach.add_argument(
        "-o", "--output", metavar="FOLDER", required=True, help="where the student goes: a new or empty folder"
    )
    teach.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"of {', '.join(DistillOptions.model_fields)} (repeatable)",
    )
    _json(teach)


def _distill(arguments: argparse.Namespace) -> int:
    options = configs.options_of(DistillOptions, arguments.set)
    with show.Console(sys.stderr if arguments.json else sys.stdout) as console:
        record = distill(arguments.run, arguments.model, arguments.output, options=options, reporter=console)
    if arguments.json:
        print(show.to_json(record, indent=2))
    else:
        _print(["", *handovers.distill_lines(record)])
    return 0


def _swap(arguments: argparse.Namespace) -> int:
    home = standing(arguments.run).home
    if arguments.undo:
        if arguments.seat or arguments.more or arguments.live or arguments.set or arguments.mode is not None:
            raise ConfigError("--undo takes the last swap back and nothing else; leave out AGENT=MODEL and other options")
        undone = swaps.undo(home)
        if arguments.json:
            print(show.to_json(undone, indent=2))
        else:
            _print(handovers.undone_lines(undone))
        return 0
    agent, is_seat, model = str(arguments.seat or "").partition("=")
    if not (agent and is_seat and model):
        raise ConfigError(f"swap {arguments.seat or '(nothing)'}: write AGENT=MODEL, for example solver=tiny:1M; or --undo")
    options = configs.options_of(SwapOptions, arguments.set, mode=arguments.mode or "distill")
    if arguments.live:
        if arguments.more:
            raise ConfigError("--continue with --live: the job that runs there trains on anyway; leave it out")
        return _swap_live(home, agent, model, options, as_json=arguments.json)
    if records.is_locked(home):
        raise RunError(f"a job runs on {home}; --live asks it to swap, or stop it first (Ctrl-C)")
    with show.Console(sys.stderr if arguments.json else sys.stdout, stages=0, agents=[agent]) as console:
        record = swaps.swap(home, agent, model, options=options, reporter=console)
    more: Record | None = None
    if arguments.more:
        config = open_run(home).config
        stages = int(record["stages"]) + int(arguments.more)
        config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"stages": stages})})
        agents = [a.name for a in config.agents]
        with show.Console(sys.stderr if arguments.json else sys.stdout, stages=stages, agents=agents) as console:
            try:
                run.train(config, run=home, resume=True, reporter=console)
                more = run.since_swap(home, record)
            except (Interrupted, KeyboardInterrupt):
                more = None
        if more is None:
            words = ["baton", "train", str(open_run(home).path / "config.toml"), "--run", str(home), "--resume"]
            again = shlex.join([*words, "--set", f"algorithm.stages={stages}"])
            with deaf():
                if arguments.json:
                    print(show.to_json({"swap": record, "continued": None, "next": [again]}, indent=2), flush=True)
                else:
                    _print(["", *handovers.swap_lines(record, None)])
                print(
                    f"the swap stands; interrupted in the stages after it; go on with:\n{again}", file=sys.stderr, flush=True
                )
            return INTERRUPTED
    if arguments.json:
        print(show.to_json({"swap": record, "continued": more}, indent=2))
    else:
        _print(["", *handovers.swap_lines(record, more)])
    return 0


def _swap_live(home: Path, agent: str, model: str, options: SwapOptions, *, as_json: bool) -> int:
    """Leave the request, and wait for the job's answer."""
    if not records.is_locked(home):
        raise RunError(f"no job runs on {home}; leave out --live")
    # What can be refused is refused before anybody waits.
    there = standing(home)
    config = swaps.check(there, agent, model, options, is_live=True)
    newcomer = tuple(a for a in config.agents if a.name == agent)
    assemble.check_names(config.model_copy(update={"agents": newcomer}), root=Path(there.start["root"]))
    if config.engine.name == "table":
        assemble.table_codec(newcomer[0])
    place = requests.ask(home, requests.Request(agent=agent, model=model, options=options))
    print(f"asked; the job answers between two stages ({place})", file=sys.stderr, flush=True)
    try:
        while not place.is_file():
            if not records.is_locked(home):
                requests.withdraw(home)
                raise RunError(f"the job on {home} ended before it took the swap; leave out --live")
            time.sleep(0.5)
    except KeyboardInterrupt:
        print(f"the request stays; remove {place.with_name(requests.REQUEST)} to take it back", file=sys.stderr)
        raise
    answer = json.loads(place.read_text(encoding="utf-8"))
    if not answer["accepted"]:
        raise RunError(f"no swap: {answer['why']}")
    if as_json:
        print(show.to_json({"swap": answer, "continued": None}, indent=2))
    else:
        _print(handovers.swap_lines(answer, None))
    return 0


def _json(parser: argparse.ArgumentParser, what: str = "one JSON document on stdout, nothing else") -> None:
    parser.add_argument("--json", action="store_true", help=what)


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


# ---- train -----------------------------------------------------------------------------------------------------


def _train(arguments: argparse.Namespace) -> int:
    config = configs.load(arguments.config, arguments.set)
    target = Path(arguments.run) if arguments.run else Path("runs") / Path(arguments.config).stem
    agents = [agent.name for agent in config.agents]
    with show.Console(
        sys.stderr if arguments.json else sys.stdout, stages=config.algorithm.stages, agents=agents
    ) as console:
        reporter = show.JsonLines(sys.stdout, console) if arguments.json else console
        try:
            ending = run.train(
                arguments.config, run=target, resume=arguments.resume, overrides=arguments.set, reporter=reporter
            ).ending
        except (Interrupted, KeyboardInterrupt):
            ending = "interrupted"
    result: Record = {"kind": "summary", "run": str(target), "ending": ending}
    result |= show.summary(Run(current(target)).updates, agents)
    if ending == "interrupted":
        # Before the resolved config is written there is nothing to resume: the same command then starts the run.
        has_begun = (target / "config.toml").is_file()
        result["next"] = [_again(arguments, target, resume=has_begun)]
        with deaf():
            if arguments.json:
                print(show.to_json(result), flush=True)
            print(f"interrupted after {result['updates']} agent updates; go on with:", file=sys.stderr)
            print(result["next"][0], file=sys.stderr, flush=True)
        return INTERRUPTED
    result["next"] = [f"baton {verb} {shlex.quote(str(target))}" for verb in ("evaluate", "episodes")]
    if arguments.json:
        print(show.to_json(result))
    else:
        _print(["", *show.summary_lines(result), "", *result["next"]])
    return STALLED if ending == "stalled" else 0


def _again(arguments: argparse.Namespace, target: Path, *, resume: bool) -> str:
    """The command that goes on with this run."""
    words = ["baton", "train", arguments.config, "--run", str(target), *(["--resume"] if resume else [])]
    for override in arguments.set:
        words += ["--set", override]
    return shlex.join(words)


# ---- inspect, episodes -----------------------------------------------------------------------------------------


def _of_stage(found: Sequence[Record], stage: int | None) -> list[Record]:
    return [record for record in found if stage is None or record["stage"] == stage]


def _require_stage(updates: Sequence[Record], stage: int | None, path: str) -> None:
    there = sorted({int(u["stage"]) for u in updates})
    if stage is not None and stage not in there:
        has = f"it has stages {there[0]} to {there[-1]}" if there else "it has no complete update yet"
        raise ConfigError(f"--stage {stage}: {path} has no such stage; {has}")


def _inspect(arguments: argparse.Namespace) -> int:
    opened = open_run(arguments.run)
    start, updates = opened.start, opened.updates
    stages = opened.records("stage")
    _require_stage(updates, arguments.stage, arguments.run)
    chosen, complete = _of_stage(updates, arguments.stage), _of_stage(stages, arguments.stage)
    if arguments.json:
        document = {"run": str(opened.path), "ending": opened.ending, "start": start, "updates": chosen, "stages": complete}
        print(show.to_json(document, indent=2))
        return 0
    config = opened.config
    plan, ending = config.algorithm, opened.ending or "running, or killed"
    if opened.swap is not None and opened.ending is None and not updates:
        ending = "not trained yet since the swap that it began with"
    print(f"{opened.path}: {plan.name}, {len(updates)} agent updates of {plan.stages} stages, {ending}")
    if opened.swap is not None:
        _print([f"began with a swap (the run before: {opened.home / SWAPS / str(opened.swap['before'])})", ""])
        _print([*handovers.swap_lines(opened.swap, None), ""])
    if arguments.stage is None:
        _print(["start", *show.start_lines(start)])
        if updates:
            _print(["", *show.update_table(chosen)])
        if arguments.certificates:
            _print(["", *certificates.lines(chosen, complete)])
        elif complete:
            _print(["", "the published bound, for information only", *map(certificates.published_line, complete)])
            told = [f"stage {s['stage']}: {certificates.statement(s['pairs'], 'stage')}" for s in complete if s.get("pairs")]
            _print(["", *told] if told else [])
        _print(["", *show.summary_lines(show.summary(updates, [a.name for a in config.agents]))])
        return 0
    for update in chosen:
        _print(["", *show.update_details(update), *certificates.update_lines(update)])
    for stage in complete:
        pairs = certificates.pairs_lines(stage["pairs"], "stage") if stage.get("pairs") else []
        _print(["", *certificates.published_lines(stage), *pairs])
    if arguments.certificates:
        _print(["", *certificates.lines(chosen, complete)])
    return 0


def _episodes(arguments: argparse.Namespace) -> int:
    opened = open_run(arguments.run)
    agents = [agent.name for agent in opened.config.agents]
    if arguments.agent is not None and arguments.agent not in agents:
        raise ConfigError(f"--agent {arguments.agent}: {arguments.run} has no such agent; it has {', '.join(agents)}")
    _require_stage(opened.updates, arguments.stage, arguments.run)
    updates = [u for u in _of_stage(opened.updates, arguments.stage) if arguments.agent in (None, u["agent"])]
    found: list[Record] = []
    left = arguments.limit
    for update in reversed(updates):
        if left == 0:
            break
        path = opened.path / update["episodes_file"]
        if not path.is_file():
            raise RunError(f"{path} is gone; restore it, or choose another --stage")
        # Probe episodes are the gate's: most end at its agent and are never graded, and nothing about them failed.
        rows = [row for row in records.read_episodes(path) if row["use"] not in ("probe", "restated")]
        wanted = [row for row in rows if row["outcome"] == "failed"] if arguments.failed else rows
        shown = [{**row, "versions": json.loads(row["versions"])} for row in wanted[:left]]
        left -= len(shown)
        head = {"stage": update["stage"], "agent": update["agent"], "counts": show.count_episodes(rows)}
        if arguments.json:
            found.append({**head, "episodes": shown})
        elif shown or not arguments.failed:
            print(show.count_line(update, head["counts"]))
            for row in shown:
                _print(["", *show.episode_lines(row)])
            print()
    if arguments.json:
        print(show.to_json({"run": str(opened.path), "updates": found}, indent=2))
    elif left == arguments.limit:
        print("no failed episodes" if arguments.failed else "no episodes")
    return 0


# ---- evaluate, report, verify, doctor --------------------------------------------------------------------------


def _evaluate(arguments: argparse.Namespace) -> int:
    is_run = (Path(arguments.target) / "stages.jsonl").is_file()
    if is_run and arguments.config:
        raise ConfigError(f"--config: the run {arguments.target} has a config of its own; leave it out")
    if not is_run and not arguments.config:
        raise ConfigError(f"{arguments.target} is no run directory; to evaluate a model, name the task with --config CONFIG")
    for name, is_set in (("--no-baselines", arguments.no_baselines), ("--full-information", arguments.full_information)):
        if not is_run and is_set:
            raise ConfigError(f"{name} is for runs; a model is measured alone")
    if arguments.no_baselines and arguments.full_information:
        raise ConfigError("--full-information is one of the baselines that --no-baselines leaves out; drop one of the two")
    with show.Console(sys.stderr) as console:
        if is_run:
            report = evaluate(
                arguments.target,
                k=arguments.k,
                episodes=arguments.episodes,
                baselines=not arguments.no_baselines,
                full_information=arguments.full_information,
                reporter=console,
            )
        else:
            report = evaluate_model(
                arguments.target,
                configs.load(arguments.config),
                k=arguments.k,
                episodes=arguments.episodes,
                root=Path(arguments.config).resolve().parent,
                reporter=console,
            )
    if arguments.json:
        print(show.to_json(report, indent=2))
    else:
        _print(show.score_lines(report))
    return 0


def _report(arguments: argparse.Namespace) -> int:
    opened = open_run(arguments.run)
    target = Path(arguments.output) if arguments.output else opened.path / "report.html"
    pages.check_target(target)
    size = pages.save(target, pages.report(opened.path))
    print(show.to_json({"run": str(opened.path), "file": str(target), "bytes": size}) if arguments.json else str(target))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    with show.Console(sys.stderr) as console:
        report = verify(arguments.run, updates=arguments.updates, root=arguments.root, reporter=console)
    if arguments.json:
        print(show.to_json(report, indent=2))
    else:
        _print(show.audit_lines(report))
        opened = open_run(arguments.run)
        if opened.swap is not None:
            before = shlex.quote(str(opened.home / SWAPS / str(opened.swap["before"])))
            print(f"it began with a swap; the run before: baton verify {before}")
    return 0 if report["holds"] else FAILED


def _doctor(arguments: argparse.Namespace) -> int:
    with show.Console(sys.stderr) as console:
        report = doctor.examine(reporter=console)
    if arguments.json:
        print(show.to_json(report, indent=2))
    else:
        _print(show.health_lines(report))
    return 0 if report["fit"] else FAILED


# ---- config, plan, try -----------------------------------------------------------------------------------------


def _config(arguments: argparse.Namespace) -> int:
    if (arguments.config is None) == (arguments.explain is None):
        raise ConfigError("give one of the two: a CONFIG to print, or --explain [KEY]")
    if arguments.explain is not None:
        if arguments.set:
            raise ConfigError("--set changes a CONFIG; --explain reads none")
        found = [records.plain(key) for key in configs.explain(arguments.explain)]
        if arguments.json:
            print(show.to_json({"keys": found}, indent=2))
        else:
            _print(show.key_lines(found))
        return 0
    config = configs.load(arguments.config, arguments.set)
    trackers.check(config.track)
    root = Path(arguments.config).resolve().parent
    env, _ = assemble.game(config, root=root)
    assemble.prompt_sets(config, env)
    assemble.check_names(config, root=root)
    if arguments.json:
        print(show.to_json(config.model_dump(mode="json"), indent=2))
    else:
        print(config.to_toml(), end="")
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    config = configs.load(arguments.config, arguments.set)
    trackers.check(config.track)
    with show.Console(sys.stderr) as console:
        report = planning.plan(
            config,
            root=Path(arguments.config).resolve().parent,
            start=arguments.start,
            goal=arguments.goal,
            answer_tokens=arguments.answer_tokens,
            reporter=console,
        )
    if arguments.json:
        print(show.to_json(report, indent=2))
    else:
        _print(show.plan_lines(report))
    return 0


def _try(arguments: argparse.Namespace) -> int:
    given = [name for name in ("question", "view", "views") if getattr(arguments, name)]
    if len(given) > 1:
        raise ConfigError("give one of the three: QUESTION, --view for each seat, or --views FILE")
    if not given and not sys.stdin.isatty():
        raise ConfigError("give a QUESTION, --view or --views; only a terminal is asked for questions")
    asked = _views(arguments) if arguments.view or arguments.views else _asked(arguments.question or "")
    for text in [asked] if isinstance(asked, str) else asked:
        if not is_text(text):
            raise DataError(f"the question {text!r} is no text: half a surrogate pair, or bytes that are not UTF-8")
    team = run.load_team(arguments.run)
    try:
        if given:
            _ask(arguments, team, asked)
        else:
            _talk(arguments, team)
    finally:
        team.close()
    return 0


def _views(arguments: argparse.Namespace) -> list[str]:
    if arguments.view:
        return list(arguments.view)
    try:
        asked = _asked(Path(arguments.views).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--views {arguments.views}: {getattr(error, 'strerror', None) or error}") from error
    if isinstance(asked, str):
        raise ConfigError(f'--views {arguments.views}: the file must hold a JSON list of texts, like ["one", "two"]')
    return asked


def _asked(text: str) -> str | list[str]:
    """A question, or the texts of a JSON list of nothing but texts."""
    try:
        value: Any = json.loads(text) if text.lstrip().startswith("[") else None
    except ValueError:
        return text
    texts = cast("list[Any]", value) if isinstance(value, list) else []
    return texts if texts and all(isinstance(one, str) for one in texts) else text


def _ask(arguments: argparse.Namespace, team: run.LoadedTeam, question: str | list[str], *, sibling: int = 0) -> None:
    """One episode, shown. Raises DataError where a message could not be asked for."""
    episode = team.play(question, sibling=sibling, temperature=arguments.temperature, seed=arguments.seed)
    (row,) = records.episode_rows([episode], use="try", prompts={})
    reason = "" if row["reason"] == run.UNGRADED else str(row["reason"])
    if arguments.json:
        said = {"run": arguments.run, "question": question, "turns": row["turns"], "answer": row["answer"]}
        print(show.to_json({**said, "versions": dict(episode.versions), "failed": reason or None}), flush=True)
    else:
        _print(show.turn_lines(row["turns"]) if reason else show.answer_lines(row))
    if reason:
        raise DataError(reason)


def _talk(arguments: argparse.Namespace, team: run.LoadedTeam) -> None:
    """Questions from a terminal until Ctrl-D; a question that cannot be asked is said and costs nothing."""
    with suppress(ImportError):
        importlib.import_module("readline")  # what `input` edits with, where it is there
    seats = ", ".join(f"{m.agent}@v{m.version}" for m in team.team.members)
    print(f"{seats}; one question a line, Ctrl-D ends", file=sys.stderr)
    number = 0
    while True:
        try:
            line = input("" if arguments.json else "> ")
        except EOFError:
            if not arguments.json:
                print()
            return
        if not line.strip():
            continue
        try:
            _ask(arguments, team, _asked(line), sibling=number)
        except BatonError as error:
            _refuse(error, BAD_INPUT)
        number += 1


if __name__ == "__main__":
    sys.exit(main())
