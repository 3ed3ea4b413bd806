"""What the gate's yes is worth: accepted updates measured again on a thousand prompts that the gate did not see.

    python benchmarks/claims/gate_audit.py [--quick] [--seed N] [--seeds N] [--keep DIR]

The relay of configs/quickstart.toml is trained for some stages at each of five token radii; the bound on the mean is off, so
that the quantile alone decides. Every fourth stage, each accepted update is measured again: the weights before and after it,
on one state of each of 1,000 test prompts, played by the team of that moment. Two questions:

- Of the updates that were let through, how many have a true 99 % quantile beyond the radius (more than 10 of 1,000 states)?
  Asked of the run's own verdicts (64 probe prompts, one episode each) and of other designs. These judge the same
  displacements again, from the whole length down, on fresh probe prompts: 16 to 459 of them, with one or four episodes
  (siblings) each. What the run rejected is not on disk and not judged again.
- Which share of the states lies beyond the radius, before the line search (the first look of every update) and after it (the
  accepted ones, on the 1,000 prompts), as a power of the radius? The SAT paper's Figure 1c shows violations that grow with
  the radius, and the paper claims that they do so as its square root.

459 prompts are the fewest that certify the quantile for five looks at once (ALGORITHMS 2.4). The primary contrast is the
share beyond the radius with 64 prompts minus that with 459. The last line is JSON; the exit code is 0 only if all bars hold.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from claim import KEEPS_RESULTS, ROOT, Bars, Results, arguments, guarded, last_line, results, run_missing, shown
from jaxtyping import Float

import baton
from baton import assemble, records
from baton.algorithms.acceptance import probe_states
from baton.algorithms.state import Position
from baton.assemble import Crew, Plan
from baton.core import batching, trust_region
from baton.core.keyed import key, permutation, uniforms
from baton.core.scores import mean_interval
from baton.errors import MissingError
from baton.host import complete
from baton.journal import Run
from baton.rollout import Play, Table
from baton.types import AgentId, Snapshot, Task, TokenDivergence

CONFIG = ROOT / "configs" / "quickstart.toml"
SEEDS = 8
RADII = (0.001, 0.003, 0.01, 0.03, 0.1)
"""Nats, at the .99 quantile. The SAT paper's figure has .001 to .05."""
STAGES, EVERY = 24, 4
"""Stages of a run, and of which its accepted updates are measured again: the last of every four."""
PROBE, CROWDED, SIBLINGS, FRESH = 459, 115, 4, 1000
"""Prompts that the designs share; of how many of them siblings are played, and how many; prompts of the truth."""
ALPHA, ETA, LOOKS = 0.01, 0.05, 5
"""The product's own: the .99 quantile, missed by 5 % of the bounds over five looks."""
SCALES = (1.0, *trust_region.SCALES)
SQUARE_ROOT = 0.5
RESAMPLINGS = 2000
"""Of seeds, for an exponent's interval."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """What a gate looks at: prompts, episodes of each, and whether it takes siblings for independent."""

    prompts: int
    siblings: int = 1
    is_naive: bool = False

    @property
    def episodes(self) -> int:
        return self.prompts * self.siblings


OWN, FEW, CERTIFIED = "the run's own, 64 prompts", "64 prompts", "459 prompts"
DESIGNS: Mapping[str, Design] = {
    "16 prompts": Design(prompts=16),
    FEW: Design(prompts=64),
    "64 prompts, 4 siblings": Design(prompts=64, siblings=SIBLINGS),
    "115 prompts, 4 siblings": Design(prompts=115, siblings=SIBLINGS),
    "115 prompts, 4 siblings as units": Design(prompts=115, siblings=SIBLINGS, is_naive=True),
    CERTIFIED: Design(prompts=PROBE),
}
"""The last two count 460 and 459 units, and so do both certify; only one of them has so many."""


# ---- one update, measured again ----------------------------------------------------------------------------------------


def accepted_scale(design: Design, looked: Float[torch.Tensor, "L N"], *, radius: float) -> float | None:
    """The first of SCALES that this design lets through, by the product's own gate; None where it lets none.

    Args:
        looked: divergence at each of SCALES and each state of `plays`, nats. The one state of a prompt on which a certified
            bound rests is that of its first sibling, which is as good as any; a naive design takes each for a prompt's.
    """
    first = [n * SIBLINGS if n < CROWDED else CROWDED * (SIBLINGS - 1) + n for n in range(design.prompts)]
    at = torch.tensor([place + g for place in first for g in range(design.siblings)])
    unit = torch.arange(len(at)) if design.is_naive else torch.arange(design.prompts).repeat_interleave(design.siblings)
    drawn = torch.arange(0, len(at), 1 if design.is_naive else design.siblings)
    for scale, d in zip(SCALES, looked[:, at], strict=True):
        record = trust_region.gate(
            TokenDivergence(kl_new_old=d, kl_old_new=d, row=torch.arange(len(at)), position=torch.zeros(len(at)).long()),
            message=torch.arange(len(at)),
            unit=unit,
            drawn=drawn,
            direction="max",
            alpha=ALPHA,
            eta=ETA,
            looks=LOOKS,
            radius_token=radius,
            radius_message_mean=math.inf,
            scale=scale,
        )
        if record.passed:
            return scale
    return None


def plays(tasks: Sequence[Task]) -> list[Play]:
    """The episodes that all designs share: SIBLINGS of each of the first CROWDED prompts, then one of each other."""
    return [Play(task=t, sibling=g) for n, t in enumerate(tasks) for g in range(SIBLINGS if n < CROWDED else 1)]


def exceeds(beyond: int, states: int) -> bool:
    """Whether the quantile of these states lies beyond the radius: more than ALPHA of them do."""
    return beyond > ALPHA * states


class Auditor:
    """A finished run, its weights and its table: measures its updates again."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.plan: Plan = assemble.prepare(run.config, root=Path(run.start["root"]), own=run.origins)
        assemble.set_threads(self.plan.config, self.plan.parameters)
        names = list(self.plan.local)
        self.crew: Crew = assemble.crew(run.config, run.origins, learners=names)
        self.table: Table = assemble.table(self.plan, self.crew.sampler, None)
        self.served: dict[AgentId, int] = {}

    def weights(self, agent: AgentId, version: int) -> Any:
        return self.crew.load(self.run.path / records.version_folder(agent, version))

    async def seat(self, versions: Mapping[AgentId, int]) -> None:
        """Serve these versions."""
        for agent, version in versions.items():
            if self.served.get(agent) != version:
                await self.crew.sampler.publish(agent, "promoted", self.weights(agent, version), version)
                self.served[agent] = version

    async def looked(
        self, line: Mapping[str, Any], before: Position, asked: Sequence[Play], use: str
    ) -> Float[torch.Tensor, "L N"]:
        """Divergence of an accepted displacement at each of SCALES, nats, on its agent's states in fresh episodes."""
        agent, scale = str(line["agent"]), float(line["verdict"]["scale"])
        await self.seat(before.team.versions)
        at = (self.plan.config.seed, int(line["index"]), agent, use)
        episodes = await self.table.play(asked, address=at, versions=before.team.versions, until=agent)
        rows = [row for e in episodes for row in batching.trajectories(e, agent)]
        temperature = next(s.temperature for s in self.plan.seats if s.agent == agent)
        batch = batching.token_batch(rows, temperature=temperature)
        states = probe_states(batch, self.plan.config.gate, at=at)
        learner = self.crew.learners[agent].awake
        old, new = (self.weights(agent, int(line[name])).tensors for name in ("from_version", "candidate_version"))
        origin = Snapshot(weights=old, moments={}, steps=0)
        # The masters are served as they are (float32) and scales are powers of two: the whole displacement comes back.
        whole = Snapshot(weights={n: old[n] + (new[n] - old[n]) / scale for n in old}, moments={}, steps=0)
        learner.restore(origin)
        anchor = learner.remember(states.batch)
        d: list[torch.Tensor] = []
        for share in SCALES:
            learner.blend(whole, origin, share)
            d.append(learner.divergence(states.batch, anchor).of("max").double())
        return torch.stack(d)

    def audited(self, line: Mapping[str, Any], before: Position, *, prompts: tuple[int, int]) -> dict[str, Any]:
        """What an accepted update's record becomes: states beyond the radius at every scale of so many fresh ones, and what
        each design would have let through."""
        radius = float(line["verdict"]["gate"]["radius_token"])
        sets = self.plan.splits
        at = (self.plan.config.seed, int(line["index"]), "audit")
        probe, fresh = (
            [tasks[i] for i in permutation(key(*at, name), len(tasks))[:n]]
            for name, tasks, n in (("probe", sets.probe, prompts[0]), ("fresh", sets.test, prompts[1]))
        )
        pool = complete(self.looked(line, before, plays(probe), "audit probe"))
        truth = complete(self.looked(line, before, [Play(task=t) for t in fresh], "audit fresh"))
        return {
            "agent": line["agent"],
            "stage": line["stage"],
            "states": truth.shape[1],
            "beyond": [int(n) for n in (truth > radius).sum(1)],
            "accepted": {OWN: float(line["verdict"]["scale"])}
            | {
                name: accepted_scale(design, pool, radius=radius)
                for name, design in DESIGNS.items()
                if design.prompts <= len(probe)
            },
        }


def first_looks(run: Run, lines: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """(states beyond the radius, states) over the first looks of these updates, as the run recorded them."""
    beyond = states = 0
    for line in lines:
        if line["looks"]:
            name = f"{int(line['index']):06d}-{line['agent']}"
            d = records.read_divergences(run.path / "divergences" / f"{name}.parquet")[0].divergence.of("max")
            beyond += int((d > float(line["looks"][0]["radius_token"])).sum())
            states += d.numel()
    return beyond, states


def measure(task: tuple[float, int, bool]) -> dict[str, Any]:
    """Train at one radius on one seed, and measure its accepted updates again."""
    radius, seed, quick = task
    made = [f"seed={seed}", "engine.threads=1", "algorithm.min_informative=1", f"algorithm.stages={STAGES}"]
    made += ["checkpoint.keep_promoted=all", *(f"agents.{i}.radius={{token={radius}, message_mean=inf}}" for i in range(3))]
    prompts = (PROBE, FRESH)
    if quick:
        made += ["algorithm.stages=2", "env.prompts=1000", *(f"agents.{i}.warm_start.steps=10" for i in range(3))]
        prompts = (64, 100)
    with tempfile.TemporaryDirectory(prefix="baton-claim-") as folder:
        run = baton.train(CONFIG, run=Path(folder) / "run", overrides=made)
        auditor, before = Auditor(run), records.read_position(run.start["position"])
        found: list[dict[str, Any]] = []
        for line in run.updates:
            is_due = int(line["stage"]) % (2 if quick else EVERY) == 0
            if is_due and line["word"] != "rejected":
                found.append(auditor.audited(line, before, prompts=prompts))
            before = records.read_position(line["position"])
        words = [str(u["word"]) for u in run.updates]
        return {
            "updates": found,
            "first_looks": first_looks(run, run.updates),
            "words": {word: words.count(word) for word in sorted(set(words))},
        }


# ---- what is asked of the results --------------------------------------------------------------------------------------


def share(beyond: int, of: int) -> tuple[float, float, float]:
    """A share with its two-sided 95 % Clopper-Pearson interval."""
    if of < 1:
        raise MissingError("a share of nothing; let at least one update through")
    upper = trust_region.clopper_pearson_upper(beyond, of, confidence=0.975)
    return beyond / of, 1.0 - trust_region.clopper_pearson_upper(of - beyond, of, confidence=0.975), upper


def let_through(updates: Sequence[Mapping[str, Any]], design: str) -> tuple[int, int]:
    """(updates whose true quantile is beyond the radius, updates) among those that a design lets through."""
    beyond = accepted = 0
    for update in updates:
        if (scale := update["accepted"].get(design)) is not None:
            accepted += 1
            beyond += exceeds(update["beyond"][SCALES.index(scale)], update["states"])
    return beyond, accepted


def exponent(radii: Sequence[float], beyond: Sequence[int], states: Sequence[int]) -> float:
    """The power p of share = c * radius^p that makes these counts most likely (Poisson; a count may be 0).

    The likelihood's equation says that the mean of log radius, weighted by the counts, is the one weighted by the fitted
    counts; the latter grows with p, so halving an interval finds it. -inf or inf where all that is beyond lies at the least
    or the largest radius.

    Raises:
        MissingError: no state is beyond any radius, or only one radius was measured.
    """
    logs, k, n = np.log(np.asarray(radii)), np.asarray(beyond, dtype=float), np.asarray(states, dtype=float)
    measured = n > 0
    logs, k, n = logs[measured], k[measured], n[measured]
    if not k.sum() or len(set(logs.tolist())) < 2:
        raise MissingError(f"{int(k.sum())} states beyond {len(logs)} radii have no exponent")
    wanted = float((k * logs).sum() / k.sum())
    for end, power in ((logs.min(), -math.inf), (logs.max(), math.inf)):
        if math.isclose(wanted, end):
            return power

    def fitted(p: float) -> float:
        weights = np.log(n) + p * logs
        weights = np.exp(weights - weights.max())
        return float((weights * logs).sum() / weights.sum())

    low, high = -50.0, 50.0
    for _ in range(80):
        middle = (low + high) / 2.0
        low, high = (middle, high) if fitted(middle) < wanted else (low, middle)
    return (low + high) / 2.0


def exponent_interval(radii: Sequence[float], counts: Sequence[Sequence[tuple[int, int]]]) -> tuple[float, float, float]:
    """The exponent of all seeds together, and a 95 % interval by drawing the seeds again.

    Args:
        counts: seed by seed, (states beyond, states) at each radius.
    """
    table = np.asarray(counts)

    def of(seeds: Sequence[int]) -> float:
        total = table[list(seeds)].sum(axis=0)
        return exponent(radii, total[:, 0].tolist(), total[:, 1].tolist())

    draws = (uniforms([key("gate_audit", "seeds")], RESAMPLINGS * len(table))[0] * len(table)).astype(int)
    again: list[float] = []
    for seeds in draws.reshape(RESAMPLINGS, len(table)):
        try:
            again.append(of(seeds))
        except MissingError:
            continue
    again.sort()
    cut = len(again) // 40
    return of(range(len(table))), again[cut], again[-1 - cut]


def arm(radius: float) -> str:
    return f"radius {radius:g}"


def told_designs(found: Results, radii: Sequence[float], seeds: Sequence[int]) -> dict[str, Any]:
    """Print and return, for each design, how many of the updates that it lets through are beyond, in all and by radius."""
    figures: dict[str, Any] = {}
    names = [OWN, *DESIGNS]
    print(f"\n{len(seeds)} seeds: share of accepted updates whose true 99 % quantile is beyond the radius (Clopper-Pearson)")
    for name in names:
        by_radius = {r: [let_through(found.found[arm(r), s]["updates"], name) for s in seeds] for r in radii}
        total = np.sum([counts for counts in by_radius.values()], axis=(0, 1)).tolist()
        if not total[1]:
            continue
        value, low, high = share(*total)
        of_seed = [np.sum([by_radius[r][i] for r in radii], axis=0).tolist() for i in range(len(seeds))]
        figures[name] = {
            "beyond": total[0],
            "accepted": total[1],
            "share": [value, low, high],
            "by_radius": {arm(r): np.sum(counts, axis=0).tolist() for r, counts in by_radius.items()},
            "by_seed": [b / n if n else math.nan for b, n in of_seed],
            "probe_episodes": 64 if name == OWN else DESIGNS[name].episodes,
        }
        parts = "  ".join(f"{r:g}: {b}/{n}" for r, (b, n) in zip(radii, figures[name]["by_radius"].values(), strict=True))
        print(f"  {name:34} {value:.3f} [{low:.3f}, {high:.3f}] of {total[1]:4}   {parts}")
    return figures


def told_shares(found: Results, radii: Sequence[float], seeds: Sequence[int]) -> dict[str, Any]:
    """Print and return the share of states beyond the radius, before and after the line search, and its exponents."""
    before = [[tuple(found.found[arm(r), s]["first_looks"]) for r in radii] for s in seeds]
    after = [[after_states(found.found[arm(r), s]["updates"]) for r in radii] for s in seeds]
    figures: dict[str, Any] = {}
    for name, counts in (("before", before), ("after", after)):
        total = np.sum(counts, axis=0).tolist()
        shares = {arm(r): b / n if n else None for r, (b, n) in zip(radii, total, strict=True)}
        figures[name] = {"states": {arm(r): n for r, (_, n) in zip(radii, total, strict=True)}, "shares": shares}
        told = "  ".join(f"{r:g}: {'-' if v is None else f'{v:.4f}'}" for r, v in zip(radii, shares.values(), strict=True))
        try:
            value, low, high = exponent_interval(radii, counts)
            figures[name]["exponent"] = [v if math.isfinite(v) else None for v in (value, low, high)]
            told += f"   exponent {value:+.2f} [{low:+.2f}, {high:+.2f}] (square root: +{SQUARE_ROOT})"
        except MissingError as error:
            told += f"   {error}"
        print(f"  states beyond the radius, {name} the line search: {told}")
    return figures


def after_states(updates: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """(states beyond the radius, states) of accepted updates as they were promoted, on fresh prompts."""
    beyond = [update["beyond"][SCALES.index(update["accepted"][OWN])] for update in updates]
    return sum(beyond), sum(update["states"] for update in updates)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(
        __doc__, seeds=SEEDS, fewest=2, quick="two radii, two seeds, two stages: shows that it runs", keep=KEEPS_RESULTS
    )
    args = parser.parse_args(argv)
    seeds = list(range(args.seed, args.seed + (2 if args.quick else args.seeds)))
    radii = RADII[1::2] if args.quick else RADII
    with results(args.keep, __file__, {"quick": args.quick}) as found:
        run_missing(found, measure, {(arm(r), seed): (r, seed, args.quick) for seed in seeds for r in radii})
    designs = told_designs(found, radii, seeds)
    figures: dict[str, Any] = {"designs": designs, **told_shares(found, radii, seeds)}
    words = {arm(r): [found.found[arm(r), s]["words"] for s in seeds] for r in radii}
    figures["words"] = words
    if args.quick:
        done = len(found.found)
        bars: Bars = {"results": (done, len(radii) * len(seeds), done == len(radii) * len(seeds))}
        return last_line("gate_audit", quick=True, figures=figures, bars=bars)
    less = [a - b for a, b in zip(designs[FEW]["by_seed"], designs[CERTIFIED]["by_seed"], strict=True)]
    figures["64_minus_459"] = primary = mean_interval(less)
    print(f"  64 prompts minus 459: {shown(primary, sign='+')}")
    certified = designs[CERTIFIED]["share"][2]
    bars = {
        "primary contrast, 64 prompts minus 459: lower end above": (primary.low, 0.0, primary.low > 0.0),
        "459 prompts, certified: upper end at most eta": (certified, ETA, certified <= ETA),
    }
    return last_line("gate_audit", quick=False, figures=figures, bars=bars)


if __name__ == "__main__":
    sys.exit(guarded(main))
