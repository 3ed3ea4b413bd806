"""A run as one HTML page that needs nothing else: no script, no outside request, no file beside it.

Everything on it is what the run recorded; the only figures computed here are the intervals of the rewards and the tokens a
message, from the episodes files. The same run directory gives the same page, byte for byte.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from baton import console as show
from baton import records
from baton.config import Config
from baton.core import scores
from baton.errors import ConfigError, MissingError, RunError
from baton.journal import Run, open_run
from baton.records import Record
from baton.types import AgentId
from baton.ui import certificates, chart, handovers
from baton.ui.chart import Timeline, text

EPISODES = 20
"""Conversations on the page."""
SHOWN_AGENTS = 6
"""Agents whose figures are open; those of the others unfold."""
MAX_POINTS = 4000
"""Points of the length figures, all agents together; of a larger run every n-th update is drawn."""

ENDINGS: Mapping[str | None, str] = {
    "finished": "finished: all stages are done",
    "converged": "converged: three stages in a row had nothing left to learn from",
    "stalled": "stalled: three stages in a row rejected every update",
    "interrupted": "interrupted by the user; it can be resumed",
    None: "without an ending: it is still running, or was killed",
}
REASONS: Mapping[str, str] = {
    "radius": "outside the radius at every scale",
    "no_signal": "too few telling groups, no step taken",
    "non_finite": "a number was not finite",
    "not_published": "the sampler did not serve what was sent",
}
"""What a rejection's reason means; each has a shape of its own."""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""No script can run and nothing can be fetched, whatever a model wrote."""

EPISODE_COLUMNS = ("use", "task_id", "reward", "turns.list.element.agent")


# ---- what the page is made from --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Played:
    """What the episodes file of one update adds to its record."""

    reward: float
    """Mean over prompts of the mean reward of each prompt's episodes."""
    interval: scores.Interval | None
    """None where one prompt, or an infinite reward, allows none."""
    messages: Mapping[AgentId, int]
    """Messages of each agent, in all episodes."""
    episodes: int


@dataclass(frozen=True, kw_only=True)
class View:
    """A run directory, read once."""

    run: Run
    config: Config
    start: Record
    updates: Sequence[Record]
    stages: Sequence[Record]
    agents: Sequence[AgentId]
    played: Sequence[Played | None]
    """One for each update; None where its episodes file is gone or cannot be read."""
    timeline: Timeline
    evaluations: Sequence[tuple[str, Record]]
    """(file name, report), the newest last."""
    unreadable: Sequence[str]
    """Files that are there and could not be used."""

    @property
    def name(self) -> str:
        return self.run.path.resolve().name


def read_view(run: Run) -> View:
    """Everything that the page needs.

    Raises:
        RunError: the run never got to its first record, or its journal is damaged.
    """
    start, updates = run.start, run.updates
    unreadable: list[str] = []
    played: list[Played | None] = []
    for update in updates:
        file = run.path / update["episodes_file"]
        try:
            rows = records.read_episodes(file, EPISODE_COLUMNS)
        except RunError:
            unreadable += [str(update["episodes_file"])] if file.exists() else []
            played.append(None)
        else:
            played.append(_played([row for row in rows if row["use"] == "train"]))
    evaluations: list[tuple[str, Record]] = []
    for path in sorted((run.path / "evaluations").glob("*.json")):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            evaluations.append((path.name, {**found, "rows": [dict(row) for row in found["rows"]]}))
        except (OSError, ValueError, TypeError, KeyError):
            unreadable.append(f"evaluations/{path.name}")
    return View(
        run=run,
        config=run.config,
        start=start,
        updates=updates,
        stages=run.records("stage"),
        agents=[str(member["agent"]) for member in start["position"]["team"]["members"]],
        played=played,
        timeline=chart.timeline(_stages(updates)),
        evaluations=evaluations,
        unreadable=unreadable,
    )


def _stages(updates: Sequence[Record]) -> list[int]:
    return [int(u["stage"]) for u in updates]


def _played(rows: Sequence[Record]) -> Played | None:
    prompts: dict[str, list[float]] = {}
    for row in rows:
        if row["reward"] is not None:
            prompts.setdefault(row["task_id"], []).append(row["reward"])
    means = [sum(r) / len(r) for r in prompts.values()]
    if not means:
        return None
    try:
        interval = scores.mean_interval(means)
    except MissingError:
        interval = None
    said = Counter(t["agent"] for row in rows for t in row["turns"])
    return Played(reward=sum(means) / len(means), interval=interval, messages=said, episodes=len(rows))


# ---- the page --------------------------------------------------------------------------------------------------


def report(path: str | Path) -> str:
    """A run as one self-contained HTML page: its updates, divergences, rewards, lengths, certificate terms, conversations.

    Raises:
        RunError: there is no run, or it never got to its first record.
    """
    view = read_view(open_run(path))
    sections = (
        ("updates", "Updates", _lanes(view)),
        ("divergence", "Divergence against the radius", _divergences(view)),
        ("reward", "Reward", _rewards(view)),
        ("evaluation", "Evaluation", _evaluations(view)),
        ("lengths", "Lengths", _lengths(view)),
        ("certificate", "Certificate terms", _certificates(view)),
        ("episodes", "Episodes to read", _episodes(view)),
    )
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in sections)
    body = "".join(f'<section id="{key}"><h2>{title}</h2>{content}</section>' for key, title, content in sections)
    version = view.start["versions"].get("baton-rl", "")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>{text(view.name)} · baton</title>\n<style>\n{style}</style></head>\n<body>'
        f"{_shapes()}<header>{_head(view)}</header>\n<nav>{links}</nav>\n<main>{body}</main>\n"
        f"<footer>Made by <code>baton report</code> from the run directory alone. Run made with baton {text(version)}."
        "</footer></body></html>\n"
    )


def _shapes() -> str:
    """The marks: a full disc, a disc filled by the share that was kept, and a shape for each reason of a rejection."""
    wedges = ""
    for n in (2, 4, 8, 16):
        x, y = 5 * math.sin(math.tau / n), -5 * math.cos(math.tau / n)
        wedges += (
            f'<g id="shrunk-{n}" class="shrunk"><circle r="4.4"/><path d="M0,0 0,-4.4 A4.4,4.4 0 0 1 {x:.2f},{y:.2f}z"/></g>'
        )
    return (
        '<svg class="defs" aria-hidden="true"><defs><circle id="accepted" class="accepted" r="5"/>'
        f'{wedges}<g id="shrunk-part" class="shrunk"><circle r="4.4"/><circle r="1.6" class="core"/></g>'
        '<path id="radius" class="rejected" d="M-4,-4 4,4 M-4,4 4,-4"/>'
        '<path id="no_signal" class="rejected" d="M-4.5,0 4.5,0"/>'
        '<path id="non_finite" class="rejected" d="M0,-4.5 4.5,4 -4.5,4z"/>'
        '<path id="not_published" class="rejected" d="M-4,-4 4,-4 4,4 -4,4z M-4,-4 4,4"/>'
        '<path id="rejected" class="rejected" d="M0,-5 5,0 0,5 -5,0z"/>'
        '<circle id="dot" class="dot" r="2.6"/><path id="look" class="look" d="M-4,0 4,0"/></defs></svg>'
    )


def _shape(update: Record) -> str:
    if update["word"] == "accepted":
        return "accepted"
    if update["word"] == "shrunk":
        n = 1 / update["verdict"]["scale"]
        return f"shrunk-{round(n)}" if n in (2, 4, 8, 16) else "shrunk-part"
    reason = update["verdict"]["reason"]
    return reason if reason in REASONS else "rejected"


def _icon(shape: str) -> str:
    return f'<svg class="icon" viewBox="-7 -7 14 14" aria-hidden="true"><use href="#{shape}"/></svg>'


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), wide: Sequence[int] = ()
) -> str:
    """A table in its own scrolling box. Cells are HTML and keep to one line, save in the columns `wide`."""
    style = {**dict.fromkeys(right, " class=num"), **dict.fromkeys(wide, " class=wide")}

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}{style.get(i, '')}>{cell}</{tag}>" for i, cell in enumerate(cells))

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    table = f"<table><thead><tr>{line(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _note(words: str) -> str:
    return f'<p class="hint">{words}</p>'


def _amount(value: float) -> str:
    return f"{value + 0.0:.4g}"  # a sum over nothing may be -0.0


def _plural(n: int, word: str) -> str:
    return f"{n:,} {word}{'' if n == 1 else 's'}"


# ---- head ------------------------------------------------------------------------------------------------------


def _head(view: View) -> str:
    words = Counter(str(u["word"]) for u in view.updates)
    reward = show.decimal(view.start["start_accuracy"])
    last = show.decimal(view.updates[-1]["episodes"]["reward"]) if view.updates else "-"

    def commonest(word: str, otherwise: str) -> str:
        shapes = Counter(_shape(u) for u in view.updates if u["word"] == word)
        return shapes.most_common(1)[0][0] if shapes else otherwise

    measured = _measured(view)
    if measured:
        untrained, team = (show.decimal(measured[name]["value"]) for name in ("untrained team", "team"))
        result = (f"{untrained} → {team}", "test prompts, untrained → trained")
    elif view.updates:
        result = (f"{reward} → {last}", "train prompts, start → last update")
    else:
        result = (reward, "train prompts, at the start")
    tiles = (
        result,
        (str(len(view.updates)), "updates proposed"),
        (f"{_icon('accepted')}{words['accepted']}", "accepted whole"),
        (f"{_icon(commonest('shrunk', 'shrunk-2'))}{words['shrunk']}", "accepted shrunk"),
        (f"{_icon(commonest('rejected', 'radius'))}{words['rejected']}", "rejected"),
    )
    tiled = "".join(f"<div><b>{value}</b><span>{label}</span></div>" for value, label in tiles)
    return (
        f'<p class="brand">baton · run report</p><h1 dir="auto">{text(view.name)}</h1>'
        f'<p class="lead">{_sentence(view, words)}</p>{_swap(view)}<div class="tiles">{tiled}</div>'
        f"{_facts(view)}{_agents(view)}"
    )


def _swap(view: View) -> str:
    """What the run began with, where that was a swap."""
    swap = view.start.get("swap")
    if swap is None:
        return ""
    lines = [line for line in handovers.swap_lines(swap, None) if line]
    return _note("This run began with a swap. " + "<br>".join(text(line) for line in lines))


def _measured(view: View) -> Mapping[str, Record] | None:
    """The rows of the newest evaluation by name, where it is of the team as it is now and has measured both teams."""
    if not view.evaluations:
        return None
    found = view.evaluations[-1][1]
    rows = {str(row.get("name")): row for row in found["rows"] if row.get("value") is not None}
    is_of_now = found.get("versions") == dict(view.run.position.team.versions)
    return rows if is_of_now and {"team", "untrained team"} <= rows.keys() else None


def _sentence(view: View, words: Mapping[str, int]) -> str:
    start, result = view.start, ""
    if measured := _measured(view):
        team, untrained = measured["team"], measured["untrained team"]
        said = [
            f"{show.decimal(row['value'])}"
            + (f" {show.interval(row['low'], row['high'])}" if row.get("low") is not None else "")
            for row in (team, untrained)
        ]
        prompts = _plural(int(team["n"]), "test prompt")
        result = f"On {prompts} the team's mean reward is {said[0]}, the untrained team's {said[1]}. "
    began = f"{show.decimal(start['start_accuracy'])} on {_plural(start['start_prompts'], 'train prompt')}"
    if not view.updates:
        return f"No update is complete yet; the team starts at a mean reward of {began}."
    reasons = Counter(str(u["verdict"]["reason"]) for u in view.updates if u["word"] == "rejected")
    why = ", ".join(f"{text(reason)} {n}" for reason, n in reasons.most_common())
    verdicts = [
        *([f"{words['accepted']} accepted whole"] if words["accepted"] else []),
        *([f"{words['shrunk']} accepted shrunk"] if words["shrunk"] else []),
        *([f"{words['rejected']} rejected ({why}) and taken back exactly"] if words["rejected"] else []),
    ]
    stages = _plural(len({s["stage"] for s in view.stages}), "stage") if view.stages else "the first stage"
    unfinished = " and one that is unfinished" if view.updates[-1]["position"]["entries"] and view.stages else ""
    proposed = f"{_plural(len(view.updates), 'update')} {'was' if len(view.updates) == 1 else 'were'} proposed"
    return (
        f"{result}In {stages}{unfinished}, {proposed}: {', '.join(verdicts)}. In training the mean reward went from {began} "
        f"to {show.decimal(view.updates[-1]['episodes']['reward'])} in the episodes of the last update."
    )


def _when(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _facts(view: View) -> str:
    start, config = view.start, view.config
    times = [float(r["time"]) for r in (start, *view.updates[-1:], *view.stages[-1:])]
    spent = show.duration(sum(float(u["seconds"]["total"]) for u in view.updates))
    done = max((int(u["stage"]) for u in view.updates), default=0)
    made = ", ".join(f"{name.removesuffix('-rl')} {version}" for name, version in start["versions"].items())
    resumed = len(view.run.records("resume"))
    facts = [
        ("Schedule", f"{config.algorithm.name}, stage {done} of {config.algorithm.stages}"),
        ("Ending", ENDINGS.get(view.run.ending, str(view.run.ending))),
        ("Task", f"{config.env.name}, protocol {config.protocol.name}, groups of {start['group']}"),
        ("Gate", f"preset {config.gate.preset}, {config.gate.probe_prompts} probe prompts"),
        ("Seed", str(config.seed)),
        ("Start", _when(times[0])),
        ("Last record", f"{_when(max(times))}; {spent} in updates{f', resumed {resumed} times' if resumed else ''}"),
        ("Made with", f"{made}, python {start['python']}, {start['machine']}, {_plural(int(start['threads']), 'thread')}"),
    ]
    if start["facts"]:
        proven = (f"{name} = {show.decimal(value, 4)}" for name, value in start["facts"].items())
        facts.append(("Proven", ", ".join(proven)))
    if view.unreadable:
        facts.append(("Unreadable", f"left out: {', '.join(view.unreadable)}"))
    return f"<dl>{''.join(f'<div><dt>{text(k)}</dt><dd>{text(v)}</dd></div>' for k, v in facts)}</dl>"


def _agents(view: View) -> str:
    models = {m["agent"]: m["model"] for m in view.start["position"]["team"]["members"]}
    options = {a.name: a for a in view.config.agents}
    rows: list[list[str]] = []
    for own in show.summary(view.updates, view.agents)["agents"]:
        name = str(own["agent"])
        parameters = view.start["parameters"].get(name)
        radius = view.config.radius(options[name]) if name in options else None
        rejected = ", ".join(f"{reason} {n}" for reason, n in own["rejected"].items())
        rows.append(
            [
                f"<b><bdi>{text(name)}</bdi></b>",
                text(models[name]),
                f"{parameters:,}" if parameters else "-",
                f"v{own['version']}",
                str(own["accepted"]),
                str(own["shrunk"]),
                text(rejected) or "0",
                "-" if radius is None else f"{chart.number(radius.token)} / {chart.number(radius.message_mean)}",
                show.decimal(own["kl_over_radius"]),
            ]
        )
    head = ["agent", "model", "parameters", "version", "accepted", "shrunk", "rejected", "radius token / mean, nats"]
    table = _table([*head, "mean KL / radius"], rows, right=(2, 4, 5, 8))
    is_long = len(rows) > 2 * SHOWN_AGENTS
    return f"<details><summary>{_plural(len(rows), 'agent')}</summary>{table}</details>" if is_long else table


# ---- updates ---------------------------------------------------------------------------------------------------


def _told(view: View, index: int) -> str:
    """The numbers of one update, a line each: what its mark says."""
    u, played = view.updates[index], view.played[index]
    word, reason = show.verdict_words(u)
    lines = [f"stage {u['stage']}, {u['agent']}: {word}{f' ({reason})' if reason else ''}, {show.versions(u)}"]
    gate: Record | None = u["verdict"]["gate"]
    if gate is not None:
        lines.append(f"KL {show.against(gate['q_gate'], gate['radius_token'], digits=3)} nats at the gate's quantile")
        lines.append(f"message mean {show.against(gate['message_mean'], gate['radius_message_mean'], digits=4)} nats")
        lines.append(f"{_plural(len(u['looks']), 'look')}, {gate['n_states']} states of {gate['n_units']} probe prompts")
    episodes = u["episodes"]
    spread = f" {show.interval(played.interval.low, played.interval.high)}" if played and played.interval else ""
    lines.append(
        f"reward {show.decimal(episodes['reward'])}{spread}, {episodes['n']} episodes of {episodes['prompts']} prompts"
    )
    failed = sum(episodes["failed"].values())
    if failed:
        lines.append(f"{_plural(failed, 'episode')} failed")
    if u["verdict"].get("detail"):
        lines.append(show.cut_to(u["verdict"]["detail"], 200))
    return "\n".join(lines)


def _legend(view: View) -> str:
    seen = {_shape(u) for u in view.updates}
    keys = [("accepted", "accepted whole")]
    keys += [(f"shrunk-{n}", f"shrunk to 1/{n}") for n in (2, 4, 8, 16) if f"shrunk-{n}" in seen]
    keys += [("shrunk-part", "shrunk to another share")] if "shrunk-part" in seen else []
    keys += [(name, f"rejected: {name}, {meaning}") for name, meaning in REASONS.items() if name in seen]
    keys += [("rejected", "rejected for another reason")] if "rejected" in seen else []
    return '<ul class="legend">' + "".join(f"<li>{_icon(shape)}{words}</li>" for shape, words in keys) + "</ul>"


def _lanes(view: View) -> str:
    if not view.updates:
        return _note("No update is complete yet.")
    lane, line = 30, chart.timeline(_stages(view.updates), keep_apart=True)
    height = lane * len(view.agents) + 8
    middle = {name: chart.TOP + lane * (i + 0.5) for i, name in enumerate(view.agents)}
    names = [show.cut_to(name, 16) for name in view.agents]
    left = 18 + 7.6 * max(map(len, names), default=1)
    axis = "".join(
        f'<text x="{left - 12:.0f}" y="{middle[full] + 4:.1f}" class="lane end">{text(name)}</text>'
        for full, name in zip(view.agents, names, strict=True)
    )
    plot = "".join(chart.across(y, "grid") for y in middle.values())
    # The order in which agents took their turns is visible only where columns are wide.
    points = [(x, middle[u["agent"]]) for x, u in zip(line.at, view.updates, strict=True)]
    if not line.is_dense and len(view.agents) <= 12:
        plot += chart.path(points, height=height, style="baton")
    plot += "".join(
        chart.mark(x, y, _shape(u), _told(view, i), f' data-update="{u["index"]}"')
        for i, ((x, y), u) in enumerate(zip(points, view.updates, strict=True))
    )
    taken: dict[AgentId, float] = {}
    for (x, y), u in zip(points, view.updates, strict=True):
        # The share in figures, where there is room beside the last one of the lane.
        if u["word"] == "shrunk" and (x - taken.get(u["agent"], -100.0)) / 100 * line.width >= 26:
            taken[u["agent"]] = x
            plot += f'<text x="{x:.2f}%" y="{y + 15:.1f}" class="tick mid">{show.share(u["verdict"]["scale"])}</text>'
    width = line.width
    title = f"{_plural(len(view.updates), 'update')} of {_plural(len(view.agents), 'agent')} in the order in which they ran"
    figure = chart.frame(
        key="lanes",
        title=title,
        height=height,
        width=width,
        left=left,
        axis=axis,
        plot=chart.stage_axis(line, height=height, width=width) + f"<g{_dense(line)}>{plot}</g>",
    )
    intro = _note(
        "One lane an agent, one mark an update, from left to right as they ran. An update is proposed, measured on probe "
        "prompts, and then accepted whole, accepted shrunk, or rejected, which leaves its agent bit for bit as it was."
    )
    unfinished = ""
    if view.updates[-1]["position"]["entries"]:
        has = len(view.updates[-1]["position"]["entries"])
        unfinished = _note(f"Stage {view.updates[-1]['stage']} is unfinished: {has} of its updates are complete.")
    return f"{intro}{_legend(view)}{figure}{unfinished}{_update_table(view)}"


def _dense(line: Timeline) -> str:
    return ' class="dense"' if line.is_dense else ""


def _update_table(view: View) -> str:
    rows: list[list[str]] = []
    for u, played in zip(view.updates, view.played, strict=True):
        word, reason = show.verdict_words(u)
        gate: Record | None = u["verdict"]["gate"]
        interval = played.interval if played else None
        rows.append(
            [
                str(u["stage"]),
                f"<bdi>{text(u['agent'])}</bdi>",
                _icon(_shape(u)) + text(f"{word} {reason}".strip()),
                text(show.versions(u)).replace("-&gt;", "→"),
                show.decimal(u["episodes"]["reward"]),
                "-" if interval is None else show.interval(interval.low, interval.high),
                "-" if gate is None else show.against(gate["q_gate"], gate["radius_token"], digits=3),
                "-" if gate is None else show.against(gate["message_mean"], gate["radius_message_mean"], digits=4),
                str(len(u["looks"])),
                f"{u['beta']:.2g}",
                f"{u['lr']:.2g}",
                show.duration(u["seconds"]["total"]),
            ]
        )
    head = ["stage", "agent", "verdict", "version", "reward", "95 %", "KL / radius", "mean / radius", "looks", "beta", "lr"]
    return (
        "<details><summary>All updates as a table</summary>"
        + _table([*head, "time"], rows, right=(0, 4, 5, 6, 7, 8, 9, 10, 11))
        + "</details>"
    )


# ---- divergence ------------------------------------------------------------------------------------------------


def _by_agent(view: View, panels: Mapping[AgentId, tuple[str, str]]) -> str:
    """A block (remark, figures) for each agent; of a large team, most unfold."""
    blocks = [
        f'<div class="agent"><h3><bdi>{text(name)}</bdi> <span class="small">{remark}</span></h3>'
        f'<div class="pair">{figures}</div></div>'
        for name in view.agents
        for remark, figures in (panels[name],)
    ]
    shown, hidden = "".join(blocks[:SHOWN_AGENTS]), "".join(blocks[SHOWN_AGENTS:])
    more = f"<details><summary>{_plural(len(blocks) - SHOWN_AGENTS, 'more agent')}</summary>{hidden}</details>"
    return shown + (more if hidden else "")


def _panel(head: str, figure: str) -> str:
    return f"<figure><figcaption>{head}</figcaption>{figure}</figure>"


def _narrow(line: Timeline) -> float:
    """Pixels of a plot that stands beside another: its marks may touch, for they differ in height."""
    return max(200.0, min(24.0, 0.45 * line.column) * len(line.columns))


def _divergences(view: View) -> str:
    if not any(u["looks"] for u in view.updates):
        return _note("No update has come to a look of the gate yet.")
    measures = (
        ("q_gate", "radius_token", "per token state, at the gate's quantile"),
        ("message_mean", "radius_message_mean", "mean over messages"),
    )
    panels: dict[AgentId, tuple[str, str]] = {}
    for number, name in enumerate(view.agents):
        own = [(i, u) for i, u in enumerate(view.updates) if u["agent"] == name and u["looks"]]
        blind = sum(u["agent"] == name and not u["looks"] for u in view.updates)
        unseen = f"{_plural(blind, 'update')} ended before the gate" if blind else ""
        if not own:
            panels[name] = (unseen or "no update", "")
            continue
        figures = "".join(
            _panel(
                f"{what} <span>nats{', log scale' if scale.is_log else ''}; radius {radii}</span>",
                chart.graph(
                    key=f"kl-{number}-{field}",
                    title=f"KL of {name}, {what}, in nats against the radius",
                    y=scale,
                    x=view.timeline,
                    width=_narrow(view.timeline),
                    plot=plot,
                ),
            )
            for field, bound, what in measures
            for scale, radii, plot in (_against(view, own, field, bound),)
        )
        panels[name] = (unseen, figures)
    intro = _note(
        "How far each proposed update moved its agent: exact KL over the whole vocabulary, measured on the probe prompts. "
        "To be accepted it must be below both dashed lines. Where the whole step was outside, a bar shows it, and the line "
        "from it leads to the share that was looked at last. <code>baton inspect RUN --stage N</code> says how much "
        "evidence the probe prompts are."
    )
    return intro + _by_agent(view, panels)


def _against(view: View, own: Sequence[tuple[int, Record]], field: str, bound: str) -> tuple[chart.Scale, str, str]:
    """(scale, the radius in words, plot) of one agent's looks: the last look of each update is its mark."""
    looks = [look for _, u in own for look in u["looks"]]
    bounds = list(dict.fromkeys(float(look[bound]) for look in looks))
    scale = chart.scale([*(float(look[field]) for look in looks), *bounds], height=150, floor=0.0, log=True)
    plot = ""
    if len(bounds) == 1:
        plot += chart.across(scale.y(bounds[0]), "radius", "radius")
    marks = ""
    for i, u in own:
        x = view.timeline.at[i]
        first, last = u["looks"][0], u["looks"][-1]
        y = scale.y(last[field])
        if len(bounds) > 1:
            limit = scale.y(last[bound])
            plot += f'<svg x="{x:.2f}%" y="{limit:.1f}" class="mark"><line x1="-6" x2="6" class="radius"/></svg>'
        if len(u["looks"]) > 1:
            top = scale.y(first[field])
            plot += chart.upright(x, top, y, "shrink")
            whole = f"stage {u['stage']}, {u['agent']}: the whole step"
            marks += chart.mark(x, top, "look", f"{whole}\n{show.against(first[field], first[bound], digits=3)} nats")
        marks += chart.mark(x, y, _shape(u), _told(view, i))
    radii = (
        f"{chart.number(bounds[0])}" if len(bounds) == 1 else f"{chart.number(min(bounds))} to {chart.number(max(bounds))}"
    )
    return scale, radii, f"<g{_dense(view.timeline)}>{plot}{marks}</g>"


# ---- reward ----------------------------------------------------------------------------------------------------


def _rewards(view: View) -> str:
    if not view.updates:
        return _note("No update is complete yet.")
    start = float(view.start["start_accuracy"])
    values = [p.reward if p else float(u["episodes"]["reward"]) for u, p in zip(view.updates, view.played, strict=True)]
    ends = [end for p in view.played if p and p.interval for end in (p.interval.low, p.interval.high)]
    is_share = all(0 <= v <= 1 for v in (start, *values))
    scale = chart.scale([start, *values, *([0.0, 1.0] if is_share else ends)], height=220)
    line = view.timeline
    plot = chart.across(scale.y(start), "radius", f"start {show.decimal(start)}")
    marks = ""
    for i, (x, value, played) in enumerate(zip(line.at, values, view.played, strict=True)):
        if played and played.interval:
            plot += chart.upright(x, scale.y(played.interval.low), scale.y(played.interval.high), "spread")
        marks += chart.mark(x, scale.y(value), "dot", _told(view, i))
    plot += chart.path([(x, scale.y(v)) for x, v in zip(line.at, values, strict=True)], height=scale.height, style="trend")
    figure = chart.graph(
        key="rewards",
        title=f"Mean reward of each update's episodes, from {show.decimal(values[0])} to {show.decimal(values[-1])}",
        y=scale,
        x=line,
        width=_narrow(line),
        plot=f"<g{_dense(line)}>{plot}{marks}</g>",
    )
    gone = sum(p is None for p in view.played)
    missing = (
        _note(
            f"The episodes files of {gone} of {_plural(len(view.updates), 'update')} are gone or unreadable: their rewards "
            "are those of the record, without an interval."
        )
        if gone
        else ""
    )
    intro = _note(
        "Mean reward of the episodes that each update was trained on, played by the team as it was before that update, on "
        "train prompts. Bars are 95 % intervals over prompts. The dashed line is the untrained team on "
        f"{_plural(view.start['start_prompts'], 'train prompt')}."
    )
    return f"{intro}{_panel('mean reward', figure)}{missing}"


# ---- evaluation ------------------------------------------------------------------------------------------------


def _evaluations(view: View) -> str:
    if not view.evaluations:
        command = f"baton evaluate {view.run.path}"
        return _note(
            "The run directory holds no evaluation on test prompts. The rewards above are of train prompts and no result: "
            f"<code>{text(command)}</code> measures the team on its test prompts, beside its baselines."
        )
    newest = _evaluation(*view.evaluations[-1])
    older = "".join(_evaluation(*found) for found in reversed(view.evaluations[:-1]))
    more = f"<details><summary>{_plural(len(view.evaluations) - 1, 'older evaluation')}</summary>{older}</details>"
    intro = _note(
        "Measured on test prompts, which training never reads. Intervals are of 95 % over prompts; each difference is "
        "paired by prompt."
    )
    return intro + newest + (more if older else "")


def _evaluation(name: str, found: Record) -> str:
    measured = [row for row in found["rows"] if row.get("value") is not None]
    ends = [float(row[end]) for row in measured for end in ("value", "low", "high") if row.get(end) is not None]
    scale = chart.scale([*ends, 0.0, 1.0] if all(0 <= v <= 1 for v in ends) else ends, height=100)

    def place(value: float) -> float:
        return 100 - (scale.y(value) - chart.TOP)

    rows: list[list[str]] = []
    for row in found["rows"]:
        note = f'<br><span class="small">{text(row["note"])}</span>' if row.get("note") else ""
        value, low, high, lead = row.get("value"), row.get("low"), row.get("high"), row.get("difference")
        bar = ""
        if value is not None and low is not None and high is not None:
            bar = (
                f'<svg class="span" aria-hidden="true"><line x1="0" x2="100%" y1="8" y2="8" class="grid"/>'
                f'<line x1="{place(low):.2f}%" x2="{place(high):.2f}%" y1="8" y2="8" class="spread"/>'
                f'<svg x="{place(value):.2f}%" y="8" class="mark"><use href="#dot"/></svg></svg>'
            )
        tokens = row.get("tokens_per_answer")
        rows.append(
            [
                text(row.get("name", "")) + note,
                show.decimal(value),
                "-" if low is None or high is None else show.interval(low, high),
                bar,
                "-" if lead is None else f"{lead[0]:+.3f} {show.interval(lead[1], lead[2])}",
                str(row.get("n", 0)) if value is not None else "-",
                "-" if tokens is None else f"{tokens:.1f}",
            ]
        )
    versions = ", ".join(f"{agent}@v{n}" for agent, n in found.get("versions", {}).items())
    about = ", ".join(
        part
        for part in (
            name,
            versions,
            f"{_plural(int(found['k']), 'episode')} a prompt" if "k" in found else "",
            f"temperature {found['temperature']:g}" if "temperature" in found else "",
        )
        if part
    )
    ruler = f"{chart.number(scale.low)} <span>to</span> {chart.number(scale.high)}"
    head = ["", "mean", "95 %", f'<span class="ruler">{ruler}</span>', "team minus this", "prompts", "tokens / answer"]
    return _table(head, rows, right=(1, 2, 4, 5, 6), wide=(0,)) + f'<p class="small">{text(about)}</p>'


# ---- lengths ---------------------------------------------------------------------------------------------------


def _lengths(view: View) -> str:
    if not view.updates:
        return _note("No update is complete yet.")
    step = math.ceil(len(view.agents) * len(view.updates) / MAX_POINTS)
    chosen = range(0, len(view.updates), step)
    gone = any(view.played[i] is None for i in chosen)
    panels: dict[AgentId, tuple[str, str]] = {}
    for number, name in enumerate(view.agents):
        tokens: list[tuple[int, float]] = []
        cuts: list[tuple[int, float]] = []
        for i in chosen:
            episodes, played = view.updates[i]["episodes"], view.played[i]
            messages = played.messages.get(name, 0) if played else 0
            if messages and episodes["tokens"].get(name):
                tokens.append((i, episodes["tokens"][name] / messages))
                cuts.append((i, 100 * episodes["cut"].get(name, 0.0)))
            elif played is None and episodes["tokens"].get(name):
                cuts.append((i, 100 * episodes["cut"].get(name, 0.0)))
        if not cuts:
            panels[name] = ("sampled no token of its own", "")
            continue
        remark = "" if tokens else "tokens a message cannot be counted: the episodes files are gone"
        figures = (
            _series(view, f"length-{number}", f"tokens a message of {name}", "tokens a message", tokens) if tokens else ""
        )
        cut = "messages cut at their limit"
        figures += _series(view, f"cut-{number}", f"{cut}, {name}", cut, cuts, unit=" %", ceiling=10.0)
        panels[name] = (remark, figures)
    thinned = f" Every {step}th update is drawn." if step > 1 else ""
    missing = " Where an episodes file is gone, the count of messages is too, and the point is left out." if gone else ""
    intro = _note(f"What each agent said in the episodes of every update, whosoever update it was.{thinned}{missing}")
    return intro + _by_agent(view, panels)


def _series(
    view: View,
    key: str,
    title: str,
    head: str,
    points: Sequence[tuple[int, float]],
    *,
    unit: str = "",
    ceiling: float = 4.0,
) -> str:
    line = view.timeline
    scale = chart.scale([ceiling, *(v for _, v in points)], height=90, floor=0.0)
    places = [(line.at[i], scale.y(value)) for i, value in points]
    marks = "".join(
        chart.mark(x, y, "dot", f"stage {view.updates[i]['stage']}, update of {view.updates[i]['agent']}: {value:.3g}{unit}")
        for (x, y), (i, value) in zip(places, points, strict=True)
    )
    plot = chart.path(places, height=scale.height, style="trend") + marks
    width = _narrow(line)
    drawn = f"<g{_dense(line)}>{plot}</g>"
    return _panel(head, chart.graph(key=key, title=title, y=scale, x=line, width=width, plot=drawn, unit=unit))


# ---- certificate -----------------------------------------------------------------------------------------------


def _certificates(view: View) -> str:
    intro = _note(
        "The lower bound on a stage's gain that the method's paper prints, evaluated for comparison with the paper. It is "
        "always <b>void</b>: it rests on terms that are assumed, not measured. Nothing is concluded from it; what baton "
        "states of an update is that it stayed inside its trust region on the probe prompts."
    )
    intro = _shown(view) + intro
    if not view.stages:
        return intro + _note("No stage is complete yet.")
    bounded = [stage for stage in view.stages if stage["achieved"]]
    if not bounded:
        return intro + _note("A divergence is infinite in every stage: there is no bound.")
    last = bounded[-1]
    achieved, configured = last["achieved"], last["configured"]
    # An infinite radius bounds nothing.
    with_radii = [_amount(t["value"]) for t in configured["terms"]] if configured else ["-"] * len(achieved["terms"])
    rows = [
        [
            text(mine["name"]),
            _amount(mine["value"]),
            theirs,
            f'<span class="basis {text(mine["basis"])}">{text(mine["basis"])}</span>',
            text(mine["note"]),
        ]
        for mine, theirs in zip(achieved["terms"], with_radii, strict=True)
    ]

    def bound(certificate: Record | None) -> str:
        return _amount(certificate["lower_bound"]) if certificate else "-"

    void = f'<span class="basis assumed">void</span> {text(achieved["reason"])}'
    rows.append(["<b>sum</b>", bound(achieved), bound(configured), void, "information only"])
    bounds = [
        [
            str(stage["stage"]),
            bound(stage["achieved"]),
            bound(stage["configured"]),
            f"void ({text(stage['achieved']['reason'])})" if stage["achieved"] else "none",
            text(", ".join(f"{e['agent']} {e['word']}" for e in stage["entries"])),
        ]
        for stage in view.stages
    ]
    head = ["with achieved divergences", "with the radii"]
    return (
        f"{intro}<h3>Stage {last['stage']}, term by term</h3>"
        f"{_table(['term', *head, 'basis', 'note'], rows, right=(1, 2), wide=(4,))}"
        "<details><summary>Every stage</summary>"
        f"{_table(['stage', *head, 'verdict', 'updates'], bounds, right=(0, 1, 2), wide=(4,))}</details>"
    )


def _shown(view: View) -> str:
    """What pairs of episodes and probe episodes show; nothing where none were asked."""
    shown = [row for row in certificates.rows(view.updates, view.stages) if row[2] != "published"]
    if not shown:
        return ""
    sources = {
        "measured": (
            "episodes of both teams on the same prompts",
            certificates.pools_of("pairs", view.updates, view.stages),
        ),
        "surrogate": (
            "probe episodes of the promoted team, weighted by how much likelier the candidate makes their messages",
            certificates.pools_of("surrogate", view.updates),
        ),
    }
    of = "; ".join(
        f"<b>{kind}</b>, from {what}, for the prompt pool {text(', '.join(pools))}"
        for kind, (what, pools) in sources.items()
        if pools
    )
    note = _note(
        f"Lower bounds on the gain in mean reward: {of}. They speak for nothing else; <b>inconclusive</b> means that no "
        "gain is shown, <b>void</b> that nothing is said."
    )
    rows = [[text(cell) for cell in row] for row in shown]
    told = [(f"Stage {s['stage']}", certificates.statement(s["pairs"], "stage")) for s in view.stages if s.get("pairs")]
    told += [
        (f"Stage {u['stage']}, {u['agent']}", "; ".join(certificates.surrogate_lines(u["surrogate"])))
        for u in view.updates
        if u.get("surrogate") and u["surrogate"]["gain"]["verdict"] != "void"
    ]
    listed = "".join(f"<li>{text(who)}: {text(what)}</li>" for who, what in told)
    return (
        f"<h3>Shown</h3>{note}{_table(list(certificates.HEAD), rows, right=(0, 3, 5, 6, 7))}"
        f"<ul>{listed}</ul><h3>Published</h3>"
    )


# ---- episodes --------------------------------------------------------------------------------------------------


def choose(sizes: Sequence[int], count: int) -> list[tuple[int, int]]:
    """(update, row) of `count` episodes spread evenly over updates with so many rows, first and last update included.

    By place alone, never by outcome. An update that is met several times gives rows spread over its own.
    """
    there = [i for i, size in enumerate(sizes) if size]
    count = min(count, sum(sizes))
    if not there or not count:
        return []
    met = Counter(there[round(j * (len(there) - 1) / max(1, count - 1))] for j in range(count))
    # Small updates cannot give more than they have; the next ones do.
    left = 0
    for i in there:
        met[i], left = min(sizes[i], met[i] + left), max(0, met[i] + left - sizes[i])
    for i in reversed(there):
        more = min(left, sizes[i] - met[i])
        met[i], left = met[i] + more, left - more
    return [(i, (2 * j + 1) * sizes[i] // (2 * met[i])) for i in there for j in range(met[i])]


def _episodes(view: View) -> str:
    sizes = [played.episodes if played else 0 for played in view.played]
    chosen = choose(sizes, EPISODES)
    if not chosen:
        why = "The episodes files are gone or unreadable." if view.updates else "No update is complete yet."
        return _note(f"No episode can be shown. {why}")
    wanted: dict[int, list[int]] = {}
    for i, row in chosen:
        wanted.setdefault(i, []).append(row)
    blocks: list[str] = []
    for i, rows in wanted.items():
        update = view.updates[i]
        found = [row for row in records.read_episodes(view.run.path / update["episodes_file"]) if row["use"] == "train"]
        blocks += [_episode(update, found[row], is_open=not blocks and row == rows[0]) for row in rows]
    intro = _note(
        f"{_plural(len(blocks), 'conversation')} spread over the run from the first update to the last, chosen by their "
        "place in the files and not by their outcome. Characters that cannot be seen are spelt out in a box."
    )
    return f'{intro}<div class="episodes">{"".join(blocks)}</div>'


def _episode(update: Record, row: Record, *, is_open: bool) -> str:
    if row["outcome"] == "failed":
        outcome, kind = "failed", "rejected"
    else:
        outcome, kind = f"reward {row['reward']:g}", "accepted" if row["reward"] > 0 else "plain"
    reason = f"{row['outcome']}: {row['reason']}" if row["reason"] else str(row["outcome"])
    turns = "".join(_turn(turn) for turn in row["turns"])
    answer = show.cut_to(row["answer"] or "", 60)
    return (
        f"<details{' open' if is_open else ''}><summary><span>stage {update['stage']}</span> <span>update of "
        f'<bdi>{text(update["agent"])}</bdi></span> <b class="{kind}">{outcome}</b> '
        f'<span class="small">answer <bdi>{text(answer) or "none"}</bdi></span></summary>'
        f'<p class="small mono">{text(row["id"])}</p>{_said("prompt", row["prompt"] or "", "", "prompt")}{turns}'
        f'<p class="outcome"><b class="{kind}">{outcome}</b> {_visible(reason)}</p></details>'
    )


def _turn(turn: Record) -> str:
    versions = list(dict.fromkeys(turn["versions"] or ()))
    speaker = f"<bdi>{text(turn['agent'])}</bdi>{''.join(f'@v{v}' for v in versions)}"
    about = [f"seat {turn['seat'] + 1}"] if turn["seat"] is not None and turn["seat"] >= 0 else []
    if turn["ids"]:
        about += [_plural(len(turn["ids"]), "token"), "cut at its limit" if turn["cut"] else str(turn["finish_reason"])]
    else:
        about.append("observed, not sampled by a trained agent")
    return _said(speaker, turn["text"] or "", ", ".join(about), "turn")


def _said(who: str, what: str, about: str, kind: str) -> str:
    """One speaker's words; `who` is HTML."""
    words = _visible(what) if what else '<i class="small">nothing</i>'
    return (
        f'<div class="said {kind}"><p><b>{who}</b> <span class="small">{text(about)}</span></p>'
        f'<pre dir="auto">{words}</pre></div>'
    )


def _visible(words: str) -> str:
    """Text as HTML in which every hidden character is spelt out in a box."""
    parts = re.split("([^ -~\n]+)", words)
    return "".join(
        text(part)
        if i % 2 == 0
        else "".join(f'<span class="hidden">{text(c)}</span>' if chart.is_hidden(c) else text(c) for c in part)
        for i, part in enumerate(parts)
    )


# ---- on disk ---------------------------------------------------------------------------------------------------


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).lstrip().lower().startswith(b"<!doctype html")


def check_target(path: Path) -> None:
    """Refuse a file that cannot be written, before any work.

    Raises:
        ConfigError: names the file and why.
    """
    target = path.resolve()
    partial = target.with_name(f".{target.name}.partial")
    why: str | None = None
    try:
        if target.exists() and not target.is_file():
            why = "it is no regular file"
        elif target.exists() and target.suffix.lower() not in (".html", ".htm") and not _is_page(target):
            why = "it is there and no HTML page; it would be lost"
        else:
            partial.touch()
            partial.unlink()
    except OSError as error:
        why = error.strerror
    if why is not None:
        raise ConfigError(f"{path} cannot be written ({why}); name another file with -o FILE")


def save(path: Path, page: str) -> int:
    """Write a page, whole or not at all; returns its bytes.

    Raises:
        RunError: the disk refused.
    """
    target = path.resolve()
    partial = target.with_name(f".{target.name}.partial")
    data = page.encode()
    try:
        partial.write_bytes(data)
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RunError(f"{path} could not be written ({error.strerror}); name another file with -o FILE") from error
    return len(data)


__all__ = ["check_target", "report", "save"]
