"""The learner of the torch engine: fp32 masters, AdamW, and what is served rounded from them.

Axes: B rows, T tokens, N action states in row order, D width, V vocabulary, P trained parameters.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from baton.core import divergence
from baton.core.batching import micro_batches
from baton.core.losses import Objective
from baton.core.trust_region import quantile_point
from baton.engines import adapters, models
from baton.engines.engine import Anchor
from baton.engines.local import laws
from baton.engines.local.device import Compute
from baton.engines.local.laws import LocalAnchor, Remembered
from baton.engines.local.net import Bases, Net
from baton.errors import DataError, MissingError, NonFiniteError
from baton.types import AdvantageBatch, AgentId, Snapshot, StepReport, TokenBatch, TokenDivergence, Weights

GIVES_BACK_FROM = 20_000_000
"""Parameters of the network from which memory freed before a learner is made, and before its first step, goes back to the
system: the allocator would keep most of it (0.8 GB at 135M) beside what is taken next. Steps after it take again what the
step before took."""


class LocalLearner:
    """Implements `engine.Learner`: fp32 masters, AdamW, and everything reported from the weights as served.

    Served weights are the masters rounded to `serve_dtype` (nearest); for float32 they are the masters themselves. The
    folder of an adapter gives a learner of that adapter: its masters are served as they are, on a base in `serve_dtype` that
    it shares (`bases`, the crew's) and never writes. `compute` is the precision of the training forward only. A forward
    holds at most about `micro_tokens` padded tokens.
    """

    def __init__(
        self,
        agent: AgentId,
        folder: Path,
        *,
        serve_dtype: torch.dtype,
        compute: Compute = "float32",
        micro_tokens: int = 4096,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
        device: torch.device | str = "cpu",
        bases: Bases | None = None,
    ) -> None:
        # What its predecessor left, before memory is taken for this one.
        self._gives_back = models.describe(adapters.whole(folder)).parameters >= GIVES_BACK_FROM
        if self._gives_back:
            give_back()
        self.agent = agent
        self.folder = folder
        self.compute = compute
        self.micro_tokens = micro_tokens
        self.grad_clip = grad_clip
        self._context = models.context_length(folder)
        self.device = torch.device(device)
        is_adapter = adapters.is_adapter(folder)
        if is_adapter:
            self._train = (bases or Bases()).adapted(folder, dtype=serve_dtype, device=self.device, is_trained=True)
        else:
            self._train = Net(folder, dtype=torch.float32, device=self.device)
            self._train.model.requires_grad_(True)
        self._masters = self._train.masters()
        self._serve = self._train
        self._head_copy: tuple[Tensor, Tensor | None] | None = None
        if serve_dtype != torch.float32 and not is_adapter:
            self._serve = Net(folder, dtype=serve_dtype, device=self.device)
            self._serve.model.requires_grad_(False)
        self._optimizer = torch.optim.AdamW(
            self._masters.values(), lr=0.0, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
        )

    @property
    def parameters(self) -> int:
        """Number of trained parameters, tied tensors once."""
        return sum(tensor.numel() for tensor in self._masters.values())

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        """Log-probability of each action token at `batch.temperature` under the served weights, 0 elsewhere."""
        return laws.logprobs(self._serve, batch, self._hidden(batch))

    @torch.no_grad()
    def remember(self, batch: TokenBatch) -> LocalAnchor:
        """The served policy at the action states of this batch."""
        hidden = self._hidden(batch)
        weight, bias = self._unembedding()
        return Remembered(
            logprobs=laws.logprobs(self._serve, batch, hidden),
            hidden=hidden,
            weight=weight,
            bias=bias,
            softcap=self._serve.softcap,
            ids=batch.ids.clone(),
            mask=batch.mask.clone(),
            temperature=batch.temperature,
        )

    @torch.no_grad()
    def divergence(self, batch: TokenBatch, anchor: Anchor) -> TokenDivergence:
        """Exact KL per action state of the served policy now (new) against the anchor (old), both directions, in nats.

        Raises:
            DataError: the anchor was remembered on another batch.
            NonFiniteError: a NaN.
        """
        old = self._own(anchor, batch)
        return laws.compared(self._serve, batch, self._hidden(batch), old)

    @torch.no_grad()
    def project(self, batch: TokenBatch, anchor: Anchor, *, radius: float) -> LocalAnchor:
        """The served policy moved into the ball around the anchor; see `engine.Learner`."""
        current = self._own(anchor, batch)
        return laws.project(self.remember(batch), current, forbidden=self._serve.forbidden, radius=radius)

    def step(self, batch: AdvantageBatch, objective: Objective, *, lr: float, anchor: Anchor | None) -> StepReport:
        """One AdamW step on the masters; micro-batches add up to the gradient of the whole batch.

        Raises:
            MissingError: the objective needs a divergence and there is no anchor.
            NonFiniteError: loss, gradient or a stepped weight is not finite (the weights may have moved: restore).
        """
        tokens = batch.batch
        old = None
        if objective.needs_kl:
            if anchor is None:
                raise MissingError(f"the objective's penalty for '{self.agent}' needs an anchor; remember the batch first")
            old = self._own(anchor, tokens)
        denominator = objective.denominator(tokens)
        keep_BT = self._keep(batch, objective) if objective.needs_batch else None
        places = laws.state_places(tokens)
        if self._gives_back:
            give_back()
            self._gives_back = False
        self._optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        diagnostics: Counter[str] = Counter()
        for rows in micro_batches(tokens, max_tokens=self.micro_tokens):
            part = batch.rows(rows)
            mask = part.batch.mask.to(self.device)
            log_new, logprobs_BT = self._forward(part.batch)
            kl_BT = None
            if old is not None:
                states = torch.cat([places[r] for r in rows]).to(self.device)
                with torch.no_grad():
                    log_old = old.law(states, forbidden=self._train.forbidden)
                kl_N = divergence.directed(log_new, log_old, objective.direction)
                kl_BT = torch.zeros(mask.shape, device=self.device).masked_scatter(mask, kl_N).cpu()
            term = objective(
                logprobs_BT,
                part,
                kl_BT=kl_BT,
                denominator=denominator,
                n_act=tokens.n_act,
                keep_BT=None if keep_BT is None else keep_BT[rows, : mask.shape[1]],
            )
            term.total.backward()
            loss += float(term.total.detach())
            diagnostics.update(term.diagnostics)
        if not math.isfinite(loss):
            raise NonFiniteError(f"loss of '{self.agent}' is {loss}; restore the snapshot")
        norm = float(nn.utils.clip_grad_norm_(self._masters.values(), self.grad_clip))
        if not math.isfinite(norm):
            raise NonFiniteError(f"gradient norm of '{self.agent}' is {norm}; restore the snapshot")
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._round()
        for name, tensor in self._masters.items():
            if not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError(f"weight {name} of '{self.agent}' is not finite after the step; restore the snapshot")
        return StepReport(loss=loss, grad_norm=norm, diagnostics=dict(diagnostics))

    def score_gradients(self, batch: AdvantageBatch) -> tuple[Float[Tensor, " P"], Float[Tensor, " P"]]:
        """One backward pass an episode, in the precision of training; see `engine.Learner`."""
        tokens = batch.batch
        size = self.parameters
        gradient, fisher = torch.zeros(size, device=self.device), torch.zeros(size, device=self.device)
        rows_of: dict[str, list[int]] = {}
        for row, name in enumerate(tokens.episode_ids):
            rows_of.setdefault(name, []).append(row)
        for rows in rows_of.values():
            part = batch.rows(rows)
            _, logprobs_BT = self._forward(part.batch)
            self._optimizer.zero_grad(set_to_none=True)
            logprobs_BT.sum().backward()
            score = torch.cat(
                [(torch.zeros_like(t) if t.grad is None else t.grad).flatten() for t in self._masters.values()]
            )
            gradient += float(part.advantages[part.batch.mask][0]) * score
            fisher += score.square()
        self._optimizer.zero_grad(set_to_none=True)
        return (gradient / len(rows_of)).cpu(), (fisher / len(rows_of)).cpu()

    @torch.no_grad()
    def blend(self, towards: Snapshot, origin: Snapshot, scale: float) -> None:
        """Masters at origin + scale * (towards - origin), exact at both ends; moments and step count as at the origin."""
        self._require_names(towards.weights)
        self._require_whole(origin)
        for name, tensor in self._masters.items():
            tensor.copy_(torch.lerp(origin.weights[name], towards.weights[name], scale))
        self._set_moments(origin)
        self._round()

    @torch.no_grad()
    def snapshot(self, *, moments: bool = True, lend: bool = False) -> Snapshot:
        """Copies of masters and moments (or none), and the number of steps; `lend` gives the tensors themselves."""
        kept: dict[str, Tensor] = {}
        steps = 0
        for name, tensor in self._masters.items():
            state = self._optimizer.state.get(tensor)
            if state:
                steps = int(state["step"])
                for kind in ("exp_avg", "exp_avg_sq") if moments else ():
                    kept[f"{kind}.{name}"] = state[kind].detach().to("cpu", copy=not lend)
        weights = {name: tensor.detach().to("cpu", copy=not lend) for name, tensor in self._masters.items()}
        return Snapshot(weights=weights, moments=kept, steps=steps)

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        """Masters, moments and step count bit for bit as they were at the snapshot."""
        self._require_whole(snapshot)
        for name, tensor in self._masters.items():
            tensor.copy_(snapshot.weights[name])
        self._set_moments(snapshot)
        self._round()

    def weights(self) -> Weights:
        """Copies of the served tensors with their checksums."""
        tensors = {name: tensor.clone() for name, tensor in self._serve.held().items()}
        sums = models.checksums(tensors)
        return Weights(tensors=tensors, checksums=sums, fingerprint=models.fingerprint(sums))

    @torch.no_grad()
    def relaid(self, batch: TokenBatch) -> TokenDivergence:
        """Divergence of the served weights from themselves, scored once as always and once row by row, last row first, with
        padding added: what batch layout alone moves (ALGORITHMS 2.4, noise floor)."""
        usual = self.remember(batch)
        alone = [[row] for row in reversed(range(batch.n_rows))]
        again = laws.action_hidden(self._serve, batch, layout=alone, padding=3, context=self._context)
        return laws.compared(self._serve, batch, again, usual)

    # -- inside

    def _forward(self, batch: TokenBatch) -> tuple[Float[Tensor, "N V"], Float[Tensor, "B T"]]:
        """Log-laws of the masters at the action states, and the sampled tokens' log-probabilities; with gradient."""
        ids, mask = batch.ids.to(self.device), batch.mask.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.compute == "bfloat16"):
            logits_NV = self._train.logits(self._train.hidden(ids[:, :-1])[mask[:, 1:]])
        log_new = divergence.log_law(logits_NV, temperature=batch.temperature, forbidden=self._train.forbidden)
        sampled_N = log_new.gather(1, ids[mask][:, None])[:, 0]
        # Losses are made beside the batch, on the CPU.
        return log_new, torch.zeros(mask.shape, device=self.device).masked_scatter(mask, sampled_N).cpu()

    @torch.no_grad()
    def _keep(self, batch: AdvantageBatch, objective: Objective) -> Bool[Tensor, "B T"]:
        """What a mask over the whole optimiser batch keeps: one more forward, in the step's own micro-batches."""
        logprobs_BT = torch.zeros(batch.batch.mask.shape)
        for rows in micro_batches(batch.batch, max_tokens=self.micro_tokens):
            _, part_BT = self._forward(batch.batch.rows(rows))
            logprobs_BT[rows, : part_BT.shape[1]] = part_BT
        return objective.keep(logprobs_BT, batch)

    def _unembedding(self) -> tuple[Tensor, Tensor | None]:
        """The head as served now: a copy that the anchors of one policy share; of a frozen base the head itself."""
        if self._head_copy is None:
            weight, bias = self._serve.head.weight.detach(), cast("Tensor | None", self._serve.head.bias)
            if self._serve.adapter is None:
                weight, bias = weight.clone(), None if bias is None else bias.detach().clone()
            self._head_copy = (weight, bias)
        return self._head_copy

    def _hidden(self, batch: TokenBatch) -> Float[Tensor, "N D"]:
        """Hidden states of the served weights before each action token, in row order."""
        return laws.action_hidden(self._serve, batch, layout=micro_batches(batch, max_tokens=self.micro_tokens))

    def _own(self, anchor: Anchor, batch: TokenBatch) -> LocalAnchor:
        if not isinstance(anchor, LocalAnchor):
            raise DataError(f"the anchor for '{self.agent}' comes from another engine ({type(anchor).__name__})")
        anchor.require(batch)
        return anchor

    def _require_names(self, weights: Mapping[str, Tensor]) -> None:
        if weights.keys() != self._masters.keys():
            odd = sorted(weights.keys() ^ self._masters.keys())
            raise MissingError(f"snapshot does not fit '{self.agent}': {odd[:4]} are on one side only")

    def _require_whole(self, snapshot: Snapshot) -> None:
        self._require_names(snapshot.weights)
        kinds = ("exp_avg", "exp_avg_sq") if snapshot.steps else ()
        needed = {f"{kind}.{name}" for kind in kinds for name in self._masters}
        if set(snapshot.moments) != needed:
            raise MissingError(
                f"snapshot of '{self.agent}' after {snapshot.steps} steps holds {len(snapshot.moments)} moments; "
                f"{len(needed)} are needed"
            )

    def _set_moments(self, snapshot: Snapshot) -> None:
        self._optimizer.state.clear()
        for name, tensor in self._masters.items():
            if snapshot.steps:
                self._optimizer.state[tensor] = {
                    "step": torch.tensor(float(snapshot.steps), device=self.device),
                    "exp_avg": snapshot.moments[f"exp_avg.{name}"].to(self.device, copy=True),
                    "exp_avg_sq": snapshot.moments[f"exp_avg_sq.{name}"].to(self.device, copy=True),
                }

    @torch.no_grad()
    def _round(self) -> None:
        self._head_copy = None
        if self._serve is not self._train:
            for name, tensor in self._serve.model.named_parameters():
                tensor.copy_(self._masters[name])


def give_back() -> None:
    """Free pages of the heap go back to the system (glibc's; elsewhere nothing happens)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def noise_floor(learner: LocalLearner, batch: TokenBatch) -> tuple[float, float]:
    """(q99 over states, mean over messages) of d, in nats, for the same weights in two batch layouts (ALGORITHMS 2.4).

    No radius below its floor means anything.
    """
    moved = learner.relaid(batch)
    d = moved.of("max")
    means, _ = divergence.message_values(d, moved.row)
    return quantile_point(d, alpha=0.01), float(means.mean())


def share_changed(before: Weights, after: Weights) -> float:
    """Share of served weights that differ between two publications of one model."""
    changed = sum(int((before.tensors[name] != tensor).sum()) for name, tensor in after.tensors.items())
    return changed / sum(tensor.numel() for tensor in after.tensors.values())
