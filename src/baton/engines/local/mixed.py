"""What two models serve together, read and not trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor

from baton.core.batching import micro_batches
from baton.engines import models
from baton.engines.local import laws
from baton.engines.local.net import Mixture
from baton.errors import UnsupportedError
from baton.types import AgentId, TokenBatch, Weights


class MixedLearner:
    """The part of `engine.Learner` that reads: log-probabilities and weights. Whatever would move a mixture is refused."""

    def __init__(self, agent: AgentId, folder: Path, *, dtype: torch.dtype, device: torch.device, micro_tokens: int) -> None:
        self.agent, self.micro_tokens = agent, micro_tokens
        self._mixture = Mixture(folder, dtype=dtype, device=device)

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        """Log-probability of each action token at `batch.temperature` under what is served, 0 elsewhere."""
        layout = micro_batches(batch, max_tokens=self.micro_tokens)
        nets = (self._mixture.newcomer, self._mixture.incumbent)
        hidden = [laws.action_hidden(net, batch, layout=layout) for net in nets]
        ids, found = batch.ids[batch.mask].to(self._mixture.device), list[Tensor]()
        for at in laws.chunks(len(ids), nets[0].forbidden.numel()):
            own = [net.law(h[at], temperature=batch.temperature) for net, h in zip(nets, hidden, strict=True)]
            found.append(self._mixture.law(*own).gather(1, ids[at][:, None])[:, 0])
        return torch.zeros(batch.mask.shape).masked_scatter(batch.mask, torch.cat(found).cpu())

    def weights(self) -> Weights:
        """Copies of the tensors of both models with their checksums."""
        tensors = {name: tensor.clone() for name, tensor in self._mixture.held().items()}
        sums = models.checksums(tensors)
        return Weights(tensors=tensors, checksums=sums, fingerprint=models.fingerprint(sums))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(f"'{self.agent}' is served by two models together; it is not trained")

    remember = divergence = project = step = score_gradients = blend = snapshot = restore = _refuse
