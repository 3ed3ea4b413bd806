"""The contract of a learner: what it reports, where it steps, and (in `learner_state`) what it keeps.

Axes: B rows, T tokens, N action states, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from baton.core.divergence import kl, project
from baton.core.losses import Likelihood, Objective
from baton.engines.engine import Anchor, Learner
from baton.errors import DataError, MissingError, NonFiniteError
from baton.testing.bench import Bench, copied, far_apart, first_moved, require_same
from baton.testing.claims import Law, require
from baton.testing.learner_state import blend_is_exact_at_both_ends, restore_is_exact, serves_copies
from baton.types import AdvantageBatch


def check_learner(
    make: Callable[[], Learner],
    *,
    batch: AdvantageBatch,
    law: Law,
    lr: float,
    temperatures: Sequence[float] = (0.6, 1.0, 1.4),
    tolerance: float = 1e-5,
) -> None:
    """A learner reports its served weights exactly, steps where the objective points, and comes back bit for
    bit.

    Catches: log-probabilities at another temperature; a divergence of another pair, direction or layout;
    results that depend on padding or on the order of rows; a loss with a local denominator; a restore that
    forgets masters, moments or steps; a snapshot, anchor or served copy that shares memory with the masters;
    a blend that misses its ends; a penalty that is computed at 0, ignored above 0, or that turns the first
    step (G26); non-finite advantages that train (T5, T7).

    Args:
        make: a new learner; each call gives the same weights and no steps.
        batch: at least three rows of different lengths and at least two episodes, with advantages of both signs.
            Its behaviour log-probabilities are replaced by the learner's own.
        law: the independent judge.
        lr: large enough that one step moves log-probabilities by over 20 tolerances, small enough that it is nearly
            linear.
        tolerance: largest accepted difference in nats.
    """
    suite = Bench(make, batch, law, lr, tuple(temperatures), tolerance)
    _batch_has_power(batch)
    for check in (
        _reports_the_served_law,
        _divergence_is_exact,
        _step_goes_where_the_objective_points,
        _layout_does_not_matter,
        restore_is_exact,
        blend_is_exact_at_both_ends,
        _penalty_acts_where_it_can,
        _projects_and_follows_a_teacher,
        _scores_are_gradients,
        _nothing_moves_without_cause,
        serves_copies,
    ):
        check(suite)


def _batch_has_power(batch: AdvantageBatch) -> None:
    tokens = batch.batch
    acting = batch.advantages[tokens.mask]
    require(
        tokens.n_rows >= 3 and tokens.n_episodes >= 2 and len(set(tokens.lengths.tolist())) >= 2,
        "the learner check needs at least three rows of different lengths from at least two episodes",
    )
    require(bool((acting > 0).any() and (acting < 0).any()), "the learner check needs advantages of both signs")


def _reports_the_served_law(bench: Bench) -> None:
    learner, batch = bench.start()
    bench.step(learner, batch)
    for temperature in bench.temperatures:
        tokens = dataclasses.replace(batch.batch, temperature=temperature)
        got_BT = learner.logprobs(tokens)
        require(
            got_BT.shape == tokens.ids.shape,
            f"logprobs has shape {tuple(got_BT.shape)}, the batch {tuple(tokens.ids.shape)}",
        )
        require(not got_BT.requires_grad, "logprobs carries a gradient")
        require(bool((got_BT[~tokens.mask] == 0).all()), "logprobs is not 0 where the mask is False")
        want_N = bench.laws(learner.weights(), tokens).gather(1, tokens.ids[tokens.mask][:, None])[:, 0]
        far = far_apart(got_BT[tokens.mask], want_N)
        require(
            far <= bench.tolerance,
            f"logprobs at temperature {temperature} are {far:.3g} nats from the law of the served weights",
        )
        require(
            far_apart(learner.remember(tokens).logprobs, got_BT) <= bench.tolerance,
            "an anchor's logprobs are not the learner's at the moment it was remembered",
        )


def _divergence_is_exact(bench: Bench) -> None:
    learner, batch = bench.start()
    for temperature in bench.temperatures:
        tokens = dataclasses.replace(batch.batch, temperature=temperature)
        snapshot, before = copied(learner.snapshot()), learner.weights()
        anchor = learner.remember(tokens)
        remembered_BT = anchor.logprobs.clone()
        still = learner.divergence(tokens, anchor)
        row_N, position_N = tokens.mask.nonzero(as_tuple=True)
        require(
            torch.equal(still.row, row_N) and torch.equal(still.position, position_N),
            "a divergence's states are not the batch's action tokens in row order",
        )
        require(
            max(float(still.kl_new_old.abs().max()), float(still.kl_old_new.abs().max())) <= bench.tolerance,
            "a policy has a divergence from itself",
        )
        old_NV = bench.laws(before, tokens)
        for _ in range(3):
            bench.step(learner, batch)
        require(torch.equal(anchor.logprobs, remembered_BT), "an anchor moved with the learner: it must be a copy")
        new_NV = bench.laws(learner.weights(), tokens)
        moved = learner.divergence(tokens, anchor)
        for name, got, p_NV, q_NV in (
            ("kl_new_old", moved.kl_new_old, new_NV, old_NV),
            ("kl_old_new", moved.kl_old_new, old_NV, new_NV),
        ):
            p = p_NV.exp()
            want = torch.where(p > 0, p * (p_NV - q_NV), torch.zeros_like(p)).sum(1)
            far = far_apart(got, want)
            require(
                far <= bench.tolerance,
                f"{name} at temperature {temperature} is {far:.3g} nats from the sum over the vocabulary of both laws",
            )
        gap = (moved.kl_new_old - moved.kl_old_new).abs().max()
        size = float(moved.kl_old_new.max())
        require(
            size > 20 * bench.tolerance and float(gap) > bench.tolerance / 10,
            f"three steps moved the policy by {size:.3g} nats: too little to tell the two directions apart; raise lr",
        )
        learner.restore(snapshot)


def _step_goes_where_the_objective_points(bench: Bench) -> None:
    learner, batch = bench.start()
    tokens, mask_BT = batch.batch, batch.batch.mask
    before_BT = learner.logprobs(tokens).double()
    advantages_BT = torch.where(mask_BT, batch.advantages, torch.zeros_like(batch.advantages)).double()
    report = learner.step(batch, bench.objective(), lr=bench.lr, anchor=None)
    after_BT = learner.logprobs(tokens).double()
    want = -float((advantages_BT * before_BT).sum()) / tokens.n_act
    require(
        abs(report.loss - want) <= max(bench.tolerance, 1e-5 * abs(want)),
        f"the loss of the first step is {report.loss:.6g}; -sum A log p / {tokens.n_act} action tokens is {want:.6g}",
    )
    counted = report.diagnostics.get("tokens")
    require(counted == tokens.n_act, f"the step counted {counted} action tokens of {tokens.n_act}")
    require(report.grad_norm > 0.0, "a batch with advantages has gradient norm 0")
    gain = float((advantages_BT * (after_BT - before_BT)).sum())
    require(
        gain > 0.0,
        f"a step lowered the advantage-weighted log-probability by {-gain:.3g}: it goes the wrong way",
    )
    moved = far_apart(after_BT, before_BT)
    require(
        moved > 20 * bench.tolerance,
        f"one step moved log-probabilities by {moved:.3g} nats only; raise lr for this check",
    )

    near, batch = bench.start()
    near.step(batch, bench.objective(), lr=bench.lr / 4, anchor=None)
    short = far_apart(near.logprobs(tokens), before_BT)
    require(
        short < moved / 2,
        f"a quarter of the lr moved {short:.3g} nats, the whole {moved:.3g}: lr is not followed",
    )


def _layout_does_not_matter(bench: Bench) -> None:
    def stepped(batch: AdvantageBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities after two steps on the batch, then both divergences of those steps, in its own
        row order."""
        learner, _ = bench.start()
        anchor = learner.remember(batch.batch)
        for _ in range(2):
            learner.step(batch, bench.objective(0.5), lr=bench.lr, anchor=anchor)
        moved = learner.divergence(batch.batch, anchor)
        return learner.logprobs(batch.batch), moved.kl_new_old, moved.kl_old_new

    _, batch = bench.start()
    plain = stepped(batch)
    again = stepped(batch)
    require(
        all(torch.equal(a, b) for a, b in zip(plain, again, strict=True)),
        "the same steps from the same weights gave other numbers the second time",
    )
    order = list(range(batch.batch.n_rows))[::-1]
    turned = stepped(batch.rows(order))
    width = turned[0].shape[1]
    far = far_apart(turned[0], plain[0][order, :width])
    require(far <= bench.tolerance, f"the order of the rows changed the step (by {far:.3g} nats)")

    junk = _with_junk(batch)
    with_junk = stepped(junk)
    far = max(
        far_apart(with_junk[0][:, : plain[0].shape[1]], plain[0]),
        far_apart(with_junk[1], plain[1]),
        far_apart(with_junk[2], plain[2]),
    )
    require(far <= bench.tolerance, f"what the padding holds changed a result (by {far:.3g} nats)")


def _with_junk(batch: AdvantageBatch) -> AdvantageBatch:
    """The same batch, three columns wider, with junk wherever nothing may be read."""
    tokens = batch.batch
    wide = tokens.ids.shape[1] + 3

    def widened(values: Tensor, junk: float, unused_BT: Tensor) -> Tensor:
        out = torch.full((values.shape[0], wide), junk, dtype=values.dtype)
        out[:, : values.shape[1]] = values
        return torch.where(unused_BT, torch.full_like(out, junk), out)

    mask_BT = torch.zeros(tokens.n_rows, wide, dtype=torch.bool)
    mask_BT[:, : tokens.mask.shape[1]] = tokens.mask
    padding_BT = torch.arange(wide) >= tokens.lengths[:, None]
    filler = int(tokens.ids[tokens.mask][0])
    return dataclasses.replace(
        batch,
        batch=dataclasses.replace(
            tokens,
            ids=widened(tokens.ids, filler, padding_BT),
            mask=mask_BT,
            behavior_logprobs=widened(tokens.behavior_logprobs, -1e10, ~mask_BT),
            versions=widened(tokens.versions, -7, ~mask_BT),
        ),
        advantages=widened(batch.advantages, float("nan"), ~mask_BT),
    )


def _penalty_acts_where_it_can(bench: Bench) -> None:
    learner, batch = bench.start()
    tokens = batch.batch
    anchor = learner.remember(tokens)
    start = copied(learner.snapshot())

    # G26: the gradient of a KL is zero where the two laws are one, so no penalty can turn the first step.
    bench.step(learner, batch)
    free_BT, one = learner.logprobs(tokens), copied(learner.snapshot())
    learner.restore(start)
    learner.step(batch, bench.objective(1.0), lr=bench.lr, anchor=anchor)
    far = far_apart(learner.logprobs(tokens), free_BT)
    require(
        far <= bench.tolerance,
        f"a penalty turned the first step by {far:.3g} nats; its gradient at the anchor is zero",
    )

    learner.restore(one)
    learner.step(batch, bench.objective(0.0), lr=bench.lr, anchor=anchor)
    with_anchor = copied(learner.snapshot())
    learner.restore(one)
    bench.step(learner, batch)
    require_same(learner.snapshot(), with_anchor, "penalty 0 reads the anchor")

    # Far enough from the anchor that the two directions differ.
    idle = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages))
    for _ in range(4):
        bench.step(learner, batch)
    away = copied(learner.snapshot())
    there = float(learner.divergence(tokens, anchor).kl_new_old.sum())
    report = learner.step(idle, bench.objective(100.0), lr=bench.lr, anchor=anchor)
    said = report.diagnostics.get("kl_sum")
    require(
        said is not None and abs(said - there) <= max(bench.tolerance, 1e-4 * there),
        f"the step's kl_sum is {said}, the divergence before it sums to {there:.6g} (kl_new_old)",
    )
    held = float(learner.divergence(tokens, anchor).kl_new_old.mean())
    learner.restore(away)
    bench.step(learner, idle)
    drift = float(learner.divergence(tokens, anchor).kl_new_old.mean())
    require(
        held < drift,
        f"a penalty of 100 left the divergence at {held:.3g}, no penalty at {drift:.3g}: it does not act",
    )

    learner.restore(start)
    try:
        learner.step(batch, bench.objective(1.0), lr=bench.lr, anchor=None)
    except MissingError:
        return
    raise AssertionError("a step with a penalty and no anchor did not raise MissingError")


def _projects_and_follows_a_teacher(bench: Bench) -> None:
    learner, batch = bench.start()
    tokens = batch.batch
    anchor, old_NV = learner.remember(tokens), bench.laws(learner.weights(), tokens)
    for _ in range(4):
        bench.step(learner, batch)
    start = copied(learner.snapshot())
    new_NV = bench.laws(learner.weights(), tokens)
    apart = learner.divergence(tokens, anchor).kl_new_old
    radius = float(apart.max()) / 4.0
    require(radius > bench.tolerance, f"four steps moved the policy by {4 * radius:.3g} nats only; raise lr for this check")
    target, want_NV = learner.project(tokens, anchor, radius=radius), project(new_NV, old_NV, radius=radius)[0]
    require_same(learner.snapshot(), start, "a projection moves nothing")
    for place in (target, target.at(tokens)):
        got = learner.divergence(tokens, place)
        far = max(far_apart(got.kl_new_old, kl(new_NV, want_NV)), far_apart(got.kl_old_new, kl(want_NV, new_NV)))
        require(far <= bench.tolerance, f"the policy is {far:.3g} nats from where it is away from its own projection")

    # A teacher's step minimises KL(anchor || policy): its loss is that divergence, and it brings the policy nearer.
    teacher, (student, _) = learner.remember(tokens), bench.start()
    lesson = Objective(weight=None, penalty=1.0, direction="old_new")
    before = float(student.divergence(tokens, teacher).kl_old_new.mean())
    report = student.step(batch, lesson, lr=bench.lr / 2, anchor=teacher)
    require(
        abs(report.loss - before) <= max(bench.tolerance, 1e-4 * before),
        f"the loss of a teacher's step is {report.loss:.6g}, the mean KL(anchor || policy) before it {before:.6g}",
    )
    for _ in range(3):
        student.step(batch, lesson, lr=bench.lr / 2, anchor=teacher)
    after = float(student.divergence(tokens, teacher).kl_old_new.mean())
    require(after < before, f"a teacher left the policy {after:.3g} nats away, where it was {before:.3g}")
    try:
        anchor.at(tokens.rows([0]))
    except DataError:
        return
    raise AssertionError("laws were read at the states of a smaller batch")


def _scores_are_gradients(bench: Bench) -> None:
    learner, batch = bench.start()
    before = copied(learner.snapshot())
    gradient, fisher = learner.score_gradients(batch)
    require_same(learner.snapshot(), before, "measuring score gradients moves nothing")
    # The loss with w = 1 divides the same sum by the action tokens.
    report = learner.step(batch, Objective(weight=Likelihood(), penalty=0.0), lr=bench.lr, anchor=None)
    tokens = batch.batch
    norm = float(gradient.double().norm()) * tokens.n_episodes
    require(
        abs(norm - report.grad_norm * tokens.n_act) <= 1e-3 * norm,
        f"the mean of A times the episode's score has norm {norm / tokens.n_episodes:.6g}; the loss's own gradient says "
        f"{report.grad_norm * tokens.n_act / tokens.n_episodes:.6g}",
    )
    learner.restore(before)
    names = list(dict.fromkeys(tokens.episode_ids))
    squares: Tensor | None = None
    for name in names:
        own = batch.rows([row for row, other in enumerate(tokens.episode_ids) if other == name])
        alone = dataclasses.replace(own, advantages=own.batch.mask.to(own.advantages.dtype))
        score, square = learner.score_gradients(alone)
        require(torch.allclose(square, score.square()), "of one episode, the Fisher diagonal is its score squared")
        if squares is None or squares.shape == square.shape:
            squares = square if squares is None else squares + square
    if squares is not None and squares.shape == fisher.shape:
        require(
            torch.allclose(squares / len(names), fisher, rtol=1e-3, atol=1e-6 * float(fisher.max())),
            "the Fisher diagonal is the mean of the episodes' squared scores, whatever their advantages",
        )


def _nothing_moves_without_cause(bench: Bench) -> None:
    learner, batch = bench.start()
    start = copied(learner.snapshot())
    idle = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages))
    report = learner.step(idle, bench.objective(), lr=bench.lr, anchor=None)
    require(report.grad_norm == 0.0, f"advantages of zero have gradient norm {report.grad_norm:.3g}")
    name = first_moved(learner.snapshot().weights, start.weights)
    require(name is None, f"advantages of zero moved master '{name}'")
    learner.restore(start)
    anchor: Anchor = learner.remember(batch.batch)
    report = learner.step(idle, bench.objective(1.0), lr=bench.lr, anchor=anchor)
    require(report.grad_norm <= 1e-4, f"the penalty has gradient norm {report.grad_norm:.3g} at its own anchor")
    learner.restore(start)
    learner.step(batch, bench.objective(), lr=0.0, anchor=None)
    name = first_moved(learner.snapshot().weights, start.weights)
    require(name is None, f"a step at lr 0 moved master '{name}'")
    for value in (float("nan"), float("inf")):
        learner.restore(start)
        advantages = torch.where(batch.batch.mask, torch.full_like(batch.advantages, value), batch.advantages)
        try:
            learner.step(dataclasses.replace(batch, advantages=advantages), bench.objective(), lr=bench.lr, anchor=None)
        except NonFiniteError:
            pass
        else:
            raise AssertionError(f"a step on advantages of {value} did not raise NonFiniteError")
        learner.restore(start)
        require_same(learner.snapshot(), start, f"restore after a step on advantages of {value} is not exact")
