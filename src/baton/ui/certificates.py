"""What certificates say, in words and in rows: beside each number what it rests on, and no word that it does not carry.

A positive certificate is spoken of in one place, `statement`; everywhere else an update stayed inside its trust region.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton import records
from baton.console import decimal, table
from baton.core import certificate
from baton.records import Record

HEAD = ("stage", "of", "kind", "lower bound", "verdict", "n", "differ", "confidence", "holds for")
"""n: pairs where it was measured, probe prompts of a surrogate."""


def statement(found: Record, of: str) -> str:
    """What the pairs of an update or a stage (`of`) show, in one line."""
    harm = found["harm"]
    at = f"on {found['n']} pairs, {_level(found, of)}"
    if harm["verdict"] == "positive":
        least, sure = decimal(harm["lower_bound"], 4), f"confidence {harm['confidence']:.4g} for this {of} alone"
        return f"worse by at least {least} of mean reward on {found['n']} pairs, {sure}, {_pool(found)}"
    return _gain(found, of, at)


def surrogate_statement(found: Record) -> str:
    """What the probe episodes of an update show, in one line."""
    return _gain(found, "update", f"on {found['gain']['n']} probe prompts, {_level(found, 'update')}")


def _gain(found: Record, of: str, at: str) -> str:
    gain = found["gain"]
    if gain["verdict"] == "positive":
        return f"certified improvement of at least {decimal(gain['lower_bound'], 4)} of mean reward {at}, {_pool(found)}"
    if gain["verdict"] == "void":
        return f"no statement ({_why(gain)}) {at}"
    said = "trust-region-constrained, and no gain is shown" if of == "update" else "no gain is shown"
    return f"inconclusive: {said} {at} (lower bound {decimal(gain['lower_bound'], 4)})"


def _pool(found: Record) -> str:
    return f"for the prompt pool {found['pool'][:12]}"


def _why(void: Record) -> str:
    """Why a certificate makes no statement, and how much of it would be needed."""
    return f"{void['reason']}, needs {void['needed']}" if void.get("needed") else str(void["reason"])


def _level(found: Record, of: str) -> str:
    """How sure one may be, and of how much at once."""
    alone = f"{found['gain']['confidence']:.4g} for this {of} alone"
    if found["is_run_level"]:
        return f"confidence {1.0 - found['delta']:.4g} for the {of}s of the whole run together, {alone}"
    return f"confidence {alone}"


def _scope(found: Record, of: str) -> str:
    return f"the run's {of}s, {1.0 - found['delta']:.4g} together" if found["is_run_level"] else f"this {of} alone"


def update_lines(update: Record) -> list[str]:
    """The certificates of an update in full."""
    lines = pairs_lines(update["pairs"], "update") if update.get("pairs") else []
    return lines + (surrogate_lines(update["surrogate"]) if update.get("surrogate") else [])


def surrogate_lines(found: Record) -> list[str]:
    """A surrogate certificate in full."""
    turns = "speaks once" if found["turns"] == 1 else f"speaks at most {found['turns']} times"
    missing = f", {found['missing']} returns missing" if found["missing"] else ""
    told = [f"  surrogate  {surrogate_statement(found)}", f"             the agent {turns} in an episode{missing}"]
    return [*told, _terms("gain", found["gain"])]


def pairs_lines(found: Record, of: str) -> list[str]:
    """A paired evaluation in full."""
    lines = [f"  pairs      {statement(found, of)}"]
    differ = f"{found['discordance']:.1%} of the pairs differ, {found['parted']:.2%} of the tokens part"
    missing = f", {found['missing']} returns missing" if found["missing"] else ""
    lines.append(f"             {differ} (coupling {found['coupling']}){missing}")
    return [*lines, *(_terms(name, found[name]) for name in ("gain", "harm"))]


def _terms(name: str, found: Record) -> str:
    """A certificate's terms, each with what it rests on."""
    terms = ", ".join(f"{t['name']} {t['value']:.4g} ({t['basis']})" for t in found["terms"])
    return f"    {name}     {found['verdict']}: {terms or _why(found)}"


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
    """Every certificate of these updates and complete stages, side by side: published, measured and surrogate of each
    update, of their sum where every accepted one has one, and measured of the stage. Columns as `HEAD`."""
    out: list[list[str]] = []
    reports = {int(s["stage"]): s for s in stages}
    for number in sorted({int(u["stage"]) for u in updates} | reports.keys()):
        own = [u for u in updates if int(u["stage"]) == number]
        stage = reports.get(number)
        if stage is not None and stage["achieved"] is not None:
            void = f"{stage['achieved']['verdict']} ({stage['achieved']['reason']})"
            out.append([str(number), "stage", "published", f"{stage['achieved']['lower_bound']:.4g}", void, *["-"] * 4])
        for u in own:
            out += [_row(number, u["agent"], u["pairs"], "update")] if u.get("pairs") else []
            out += [_surrogate_row(number, u)] if u.get("surrogate") else []
        if stage is None:
            continue
        moved = [u for u in own if u["to_version"] is not None]
        for kind, name in (("measured", "pairs"), ("surrogate", "surrogate")):
            if moved and all(u.get(name) for u in moved):
                out.append(_sum_row(number, kind, [records.read_certificate(u[name]["gain"]) for u in moved]))
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


def _surrogate_row(stage: int, update: Record) -> list[str]:
    gain = update["surrogate"]["gain"]
    words = [str(stage), update["agent"], "surrogate", *_verdict(gain)]
    return [*words, str(gain["n"]), "-", f"{gain['confidence']:.4g}", _scope(update["surrogate"], "update")]


def _sum_row(stage: int, kind: str, gains: Sequence[certificate.Certificate]) -> list[str]:
    """A stage's updates together: each bound is of the team that the one before it left (3.7)."""
    total = certificate.summed("sum of updates", gains)
    words = [str(stage), "sum of updates", kind, *_verdict(records.plain(total))]
    return [*words, f"{total.n} or more", "-", f"{total.confidence:.4g}", "this stage alone"]


def _verdict(found: Record) -> tuple[str, str]:
    """(lower bound, verdict); of what is void there is no bound."""
    if found["verdict"] == "void":
        return "-", f"void ({_why(found)})"
    return decimal(found["lower_bound"], 4), found["verdict"]


def lines(updates: Sequence[Record], stages: Sequence[Record]) -> list[str]:
    """All certificates as a table, and what it speaks of."""
    told = [
        f"{kind}: in mean reward, for the prompt pool {', '.join(pools)}; n counts {what}"
        for kind, what, pools in (
            ("measured", "pairs", pools_of("pairs", updates, stages)),
            ("surrogate", "probe prompts", pools_of("surrogate", updates)),
        )
        if pools
    ]
    return [*table([HEAD, *rows(updates, stages)], right=(0, 3, 5, 6, 7)), "", *(told or [NO_PAIRS]), PUBLISHED]


def pools_of(name: str, *found: Sequence[Record]) -> list[str]:
    """The prompt pools that the certificates under this name speak for."""
    return sorted({one[name]["pool"][:12] for records in found for one in records if one.get(name)})


NO_PAIRS = "nothing was measured: certificate.update_pairs and certificate.stage_pairs are 0, certificate.surrogate is false"
PUBLISHED = "published: the paper's bound, for comparison; it rests on terms that are assumed and shows nothing"
