"""What certificates say, in words and in rows: beside each number what it rests on, and no word that it does not carry.

A positive certificate is spoken of in one place, `statement`; everywhere else an update stayed inside its trust region.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton import records
from baton.console import decimal, table
from baton.core import certificate
from baton.records import Record

HEAD = ("stage", "of", "kind", "lower bound", "verdict", "pairs", "differ", "confidence", "holds for")


def statement(found: Record, of: str) -> str:
    """What the pairs of an update or a stage (`of`) show, in one line."""
    gain, harm = found["gain"], found["harm"]
    at = f"on {found['n']} pairs, {_level(found, of)}"
    pool = f"for the prompt pool {found['pool'][:12]}"
    if harm["verdict"] == "positive":
        least, sure = decimal(harm["lower_bound"], 4), f"confidence {harm['confidence']:.4g} for this {of} alone"
        return f"worse by at least {least} of mean reward on {found['n']} pairs, {sure}, {pool}"
    if gain["verdict"] == "positive":
        return f"certified improvement of at least {decimal(gain['lower_bound'], 4)} of mean reward {at}, {pool}"
    if gain["verdict"] == "void":
        return f"no statement ({gain['reason']}) {at}"
    said = "trust-region-constrained, and no gain is shown" if of == "update" else "no gain is shown"
    return f"inconclusive: {said} {at} (lower bound {decimal(gain['lower_bound'], 4)})"


def _level(found: Record, of: str) -> str:
    """How sure one may be, and of how much at once."""
    alone = f"{found['gain']['confidence']:.4g} for this {of} alone"
    if found["is_run_level"]:
        return f"confidence {1.0 - found['delta']:.4g} for the {of}s of the whole run together, {alone}"
    return f"confidence {alone}"


def _scope(found: Record, of: str) -> str:
    return f"the run's {of}s, {1.0 - found['delta']:.4g} together" if found["is_run_level"] else f"this {of} alone"


def pairs_lines(found: Record, of: str) -> list[str]:
    """A paired evaluation in full."""
    lines = [f"  pairs      {statement(found, of)}"]
    differ = f"{found['discordance']:.1%} of the pairs differ, {found['parted']:.2%} of the tokens part"
    missing = f", {found['missing']} returns missing" if found["missing"] else ""
    lines.append(f"             {differ} (coupling {found['coupling']}){missing}")
    for name in ("gain", "harm"):
        terms = ", ".join(f"{t['name']} {t['value']:.4g} ({t['basis']})" for t in found[name]["terms"])
        lines.append(f"    {name}     {found[name]['verdict']}: {terms or found[name]['reason']}")
    return lines


def published_line(stage: Record) -> str:
    """The published bound of a stage, which is information and nothing more."""
    achieved, configured = stage["achieved"], stage["configured"]
    if achieved is None:
        return f"stage {stage['stage']}: no published bound: a divergence is infinite"
    radii = (
        "none with the radii, of which one is infinite"
        if configured is None
        else f"{configured['lower_bound']:.4g} with the radii"
    )
    return (
        f"stage {stage['stage']}: published bound {achieved['lower_bound']:.4g} with achieved divergences, "
        f"{radii}; {achieved['verdict']} ({achieved['reason']})"
    )


def published_lines(stage: Record) -> list[str]:
    """The published bound of a stage term by term."""
    rows: list[Sequence[str]] = [["  term", "value", "basis", "note"]]
    if stage["achieved"] is None:
        return [published_line(stage)]
    for term in stage["achieved"]["terms"]:
        rows.append([f"  {term['name']}", f"{term['value']:.4g}", term["basis"], term["note"]])
    return [published_line(stage), *table(rows, right=(1,))]


def rows(updates: Sequence[Record], stages: Sequence[Record]) -> list[list[str]]:
    """Every certificate of these updates and complete stages, side by side: published, and measured of each update, of
    their sum where every accepted one was measured, and of the stage. Columns as `HEAD`."""
    out: list[list[str]] = []
    reports = {int(s["stage"]): s for s in stages}
    for number in sorted({int(u["stage"]) for u in updates} | reports.keys()):
        own = [u for u in updates if int(u["stage"]) == number]
        stage = reports.get(number)
        if stage is not None and stage["achieved"] is not None:
            void = f"{stage['achieved']['verdict']} ({stage['achieved']['reason']})"
            out.append([str(number), "stage", "published", f"{stage['achieved']['lower_bound']:.4g}", void, *["-"] * 4])
        out += [_row(number, u["agent"], u["pairs"], "update") for u in own if u.get("pairs")]
        if stage is None:
            continue
        moved = [u for u in own if u["to_version"] is not None]
        if moved and all(u.get("pairs") for u in moved):
            gains = [records.read_certificate(u["pairs"]["gain"]) for u in moved]
            total = certificate.summed("sum of updates", gains)
            words = [str(number), "sum of updates", "measured", decimal(total.lower_bound, 4), total.verdict]
            out.append([*words, f"{total.n} or more", "-", f"{total.confidence:.4g}", "this stage alone"])
        if stage.get("pairs"):
            out.append(_row(number, "stage", stage["pairs"], "stage"))
    return out


def _row(stage: int, name: str, found: Record, of: str) -> list[str]:
    is_harm = found["harm"]["verdict"] == "positive"
    told = found["harm" if is_harm else "gain"]
    bound, word = decimal(told["lower_bound"], 4), "worse by that" if is_harm else told["verdict"]
    scope = f"this {of} alone" if is_harm else _scope(found, of)
    words = [str(stage), name, "measured", bound, word, str(found["n"])]
    return [*words, f"{found['discordance']:.1%}", f"{told['confidence']:.4g}", scope]


def lines(updates: Sequence[Record], stages: Sequence[Record]) -> list[str]:
    """All certificates as a table, and what it speaks of."""
    found = [u["pairs"] for u in updates if u.get("pairs")] + [s["pairs"] for s in stages if s.get("pairs")]
    pools = sorted({p["pool"][:12] for p in found})
    told = [f"measured: in mean reward, for the prompt pool {', '.join(pools)}"] if pools else [NO_PAIRS]
    return [*table([HEAD, *rows(updates, stages)], right=(0, 3, 5, 6, 7)), "", *told, PUBLISHED]


NO_PAIRS = "nothing was measured: certificate.update_pairs and certificate.stage_pairs are 0"
PUBLISHED = "published: the paper's bound, for comparison; it rests on terms that are assumed and shows nothing"
