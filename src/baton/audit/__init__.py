"""A run checked by somebody else, from its directory alone.

Everything that a run claims is computed again from what it kept: the divergence of each promoted update from both versions'
weights, each look and verdict from the divergences, each reward from the recorded turns, each log-probability from the
version that sampled it, each count and accuracy from the episodes (ALGORITHMS 2.2, 2.4, 2.5, 2.6, 2.12, 5.6). What cannot be
checked is listed with its reason. Nothing is written, and at most two versions of one agent are in memory at a time.

A run that was forged as a whole, by training it, is a run. What is found here is a record that does not follow from its own
episodes and weights.
"""

from __future__ import annotations

from pathlib import Path

from baton.audit.episodes import EpisodeFiles
from baton.audit.evaluations import Evaluations
from baton.audit.findings import (
    CHECKS,
    FAILED_EPISODE,
    FOREIGN,
    NOT_ALLOCATED,
    NOT_CALLED,
    NOT_COUPLED,
    NOT_HEARD,
    NOT_MEASURED,
    NOT_PROMOTED,
    NOT_SAMPLED,
    NOT_STEPPED,
    PRUNED,
    STAGES,
    Fault,
    Findings,
)
from baton.audit.journal import Journal
from baton.audit.start import check_facts, check_start
from baton.audit.subject import Subject, open_subject
from baton.audit.tolerances import KL_FLOOR, kl_tolerance
from baton.audit.waiting import Waiting
from baton.audit.weights import Weights
from baton.host import Reporter, Silent
from baton.journal import open_run
from baton.records import Record


def verify(
    path: str | Path, *, updates: int | None = None, root: str | Path | None = None, reporter: Reporter | None = None
) -> Record:
    """Check a run from its directory and give what was found: `checks`, `faults`, `not_checked`, and whether it `holds`.

    Args:
        updates: look into the files of the newest so many updates only; the lines of all of them are checked.
        root: folder that relative paths of the config start from, where it is not where the run was made. Required where the
            env is code of the run's own: nothing that a stranger's config names is executed unasked.

    Raises:
        RunError: there is no started run.
        ConfigError: the run's env cannot be built here.
    """
    run = open_run(path)
    found = Findings()
    subject = open_subject(run, found, root=root, reporter=reporter or Silent())
    if subject is not None:
        try:
            _check(subject, updates)
        finally:
            subject.close()
    return {
        "run": str(run.path),
        **found.report(),
        "tolerances": subject.tolerances.record() if subject is not None else {},
        "largest_gaps": dict(found.gaps),
    }


def _check(subject: Subject, newest: int | None) -> None:
    """Lines first, each with its update's files, then the evaluations, then the weights, which all of them wait for."""
    done = [line for line in subject.lines if line.get("kind") == "update"]
    chosen = {id(line) for line in (done if newest is None else done[-newest:])}
    if len(chosen) < len(done):
        subject.found.skip("episodes", f"not asked for: the newest {newest} updates only", len(done) - len(chosen))
    files, waiting = EpisodeFiles(subject), Waiting(subject)
    whole, first = subject.found.at(STAGES), subject.found.at(STAGES, "line 1")
    with first.reading("files"):
        check_facts(subject)
    with first.reading("sequence"):
        check_start(subject, files, waiting)
    journal = Journal(subject, files, waiting)
    with whole.reading("sequence"):
        journal.check(chosen)
    with subject.found.at("evaluations").reading("evaluations"):
        Evaluations(subject, files, waiting).check(journal.positions)
    with whole.reading("weights"):
        Weights(subject, files, waiting, journal.positions).check()


__all__ = [
    "CHECKS",
    "FAILED_EPISODE",
    "FOREIGN",
    "KL_FLOOR",
    "NOT_ALLOCATED",
    "NOT_CALLED",
    "NOT_COUPLED",
    "NOT_HEARD",
    "NOT_MEASURED",
    "NOT_PROMOTED",
    "NOT_SAMPLED",
    "NOT_STEPPED",
    "PRUNED",
    "Fault",
    "Findings",
    "kl_tolerance",
    "verify",
]
