"""What a learner keeps: snapshots, blends and served weights, bit for bit."""

from __future__ import annotations

import dataclasses

import torch

from baton.testing.bench import Bench, copied, far_apart, first_difference, require_same
from baton.testing.claims import require


def restore_is_exact(bench: Bench) -> None:
    """A restored learner is where it was, and goes on as it did."""
    learner, batch = bench.start()
    start = learner.snapshot()
    start_copy = copied(start)
    bench.step(learner, batch)
    one = learner.snapshot()
    one_copy = copied(one)
    require(one.steps == start.steps + 1, f"one step moved the step count from {start.steps} to {one.steps}")
    bench.step(learner, batch)
    two = copied(learner.snapshot())
    require_same(one, one_copy, "a snapshot changed when the learner stepped on: it must be a copy")
    learner.restore(one)
    require_same(learner.snapshot(), one_copy, "restore did not bring back what the snapshot saved")
    bench.step(learner, batch)
    require_same(learner.snapshot(), two, "a step after restore is not the step that was taken the first time")
    require_same(one, one_copy, "a snapshot changed when the learner stepped on after restoring it")
    learner.restore(start)
    require_same(learner.snapshot(), start_copy, "restore did not bring back the state before the first step")
    fresh, _ = bench.start()
    require(
        learner.weights().fingerprint == fresh.weights().fingerprint,
        "the served weights after restore are not those of the start",
    )
    bench.step(learner, batch)
    require_same(learner.snapshot(), one_copy, "the first step after restore is not the first step")
    # What one learner saved another one must be able to continue.
    heir = bench.make()
    heir.restore(one)
    bench.step(heir, batch)
    require_same(heir.snapshot(), two, "a new learner that restored a snapshot does not continue as the old one did")


def blend_is_exact_at_both_ends(bench: Bench) -> None:
    """Scale 0 is the origin, scale 1 the stepped masters, and moments are the origin's."""
    learner, batch = bench.start()
    bench.step(learner, batch)
    origin = copied(learner.snapshot())
    for _ in range(2):
        bench.step(learner, batch)
    towards = copied(learner.snapshot())
    served = learner.weights().fingerprint
    learner.blend(towards, origin, 1.0)
    whole = learner.snapshot()
    name = first_difference(whole.weights, towards.weights)
    require(name is None, f"blend(1) is not the stepped state: master '{name}' differs")
    require(learner.weights().fingerprint == served, "blend(1) serves other weights than the stepped state did")
    name = first_difference(whole.moments, origin.moments)
    require(name is None and whole.steps == origin.steps, "blend left moments or steps that are not the origin's")
    learner.blend(towards, origin, 0.5)
    half = learner.snapshot()
    for name in sorted(towards.weights):
        new = towards.weights[name].double()
        old = origin.weights[name].double() if name in origin.weights else torch.zeros_like(new)
        got = half.weights[name].double() if name in half.weights else torch.zeros_like(new)
        require(
            far_apart(got, old + 0.5 * (new - old)) <= 1e-6 * max(1.0, float(new.abs().max())),
            f"blend(1/2) is not half way: master '{name}' differs",
        )
    learner.blend(towards, origin, 0.0)
    require_same(learner.snapshot(), origin, "blend(0) is not the origin")
    require_same(learner.snapshot(lend=True), origin, "a lent snapshot is not the state")
    light = learner.snapshot(moments=False)
    name = first_difference(light.weights, origin.weights)
    require(name is None, f"a snapshot without moments has another master '{name}'")
    require(not light.moments, "a snapshot without moments holds some")
    learner.blend(dataclasses.replace(towards, moments={}), origin, 1.0)
    name = first_difference(learner.snapshot().weights, towards.weights)
    require(name is None, f"blend(1) towards a snapshot without moments is not it: master '{name}' differs")


def serves_copies(bench: Bench) -> None:
    """Served weights do not move with the masters, and checksums and fingerprint tell what did."""
    learner, batch = bench.start()
    bench.step(learner, batch)
    served = learner.weights()
    require(served.tensors.keys() == served.checksums.keys(), "served tensors and checksums have different names")
    twin, _ = bench.start()
    bench.step(twin, batch)
    require(twin.weights().fingerprint == served.fingerprint, "equal weights have different fingerprints")
    copies = {name: tensor.clone() for name, tensor in served.tensors.items()}
    anchor_BT = learner.logprobs(batch.batch)
    bench.step(learner, batch)
    name = first_difference(served.tensors, copies)
    require(name is None, f"served tensor '{name}' changed when the learner stepped on: it must be a copy")
    after = learner.weights()
    require(after.fingerprint != served.fingerprint, "weights moved and the fingerprint did not")
    changed = {name for name in after.tensors if after.checksums[name] != served.checksums.get(name)}
    differ = {name for name in after.tensors if name not in copies or not torch.equal(after.tensors[name], copies[name])}
    require(changed == differ, f"checksums do not tell the changed tensors: {sorted(changed ^ differ)[:3]}")
    require(far_apart(learner.logprobs(batch.batch), anchor_BT) > 0.0, "a second step did not move the policy")
