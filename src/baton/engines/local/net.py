"""One model, or an adapter on one, and one way from its tokens to its laws.

Axes: B rows, T tokens, S states, D width, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import math
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from baton.core import divergence
from baton.engines import adapters, mixture, models
from baton.engines.adapters import Adapter, Shared
from baton.errors import ModelError


class Net:
    """A causal LM in two halves, hidden states and head, so that logits are made only where they are read.

    Either a model of its own, or an adapter on a base that others use too (`Bases`).
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        model = models.load(folder, dtype=dtype)
        # A recurrent layer would read the padding on the left of a decode batch.
        config = cast(Any, model).config
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if kinds:
            raise ModelError(
                f"{folder}: the local engine does not serve layers of kind {sorted(kinds)}; use an attention model"
            )
        self.folder = folder
        self.model = model.to(device)
        self.device = device
        self.dtype = dtype
        self.base: Any = cast(Any, model).base_model
        self.head = cast(nn.Linear, cast(Any, model).get_output_embeddings())
        self.softcap = cast(float | None, getattr(config, "final_logit_softcapping", None))
        self.layers = int(config.num_hidden_layers)
        self.cache_argument = "cache" if "cache" in inspect.signature(self.base.forward).parameters else "past_key_values"
        self.forbidden = _forbidden(folder, rows=int(self.head.weight.shape[0])).to(device)
        self.shared: Shared | None = None
        self.adapter: Adapter | None = None
        self._verify_halves()

    def body(self, **arguments: Any) -> Float[Tensor, "B T D"]:
        """Final hidden states, under this network's own adapter where it has one."""
        if self.shared is not None:
            self.shared.activate(self.adapter)
        return self.base(**arguments).last_hidden_state

    def hidden(self, ids_BT: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Final hidden states of right-padded rows: causal attention never looks at the padding, so no mask is needed."""
        return self.body(input_ids=ids_BT, use_cache=False)

    def logits(self, hidden: Float[Tensor, "S D"]) -> Float[Tensor, "S V"]:
        """Unembedding as this model defines it (bias and soft cap included)."""
        return unembed(hidden, self.head.weight, self.head.bias, self.softcap)

    def law(self, hidden: Float[Tensor, "S D"], *, temperature: float) -> Float[Tensor, "S V"]:
        """fp32 log-probabilities of the next token at this temperature; rows beyond the tokenizer have probability 0."""
        return divergence.log_law(self.logits(hidden), temperature=temperature, forbidden=self.forbidden)

    def masters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name: every parameter of a model, or an adapter's."""
        return dict(self.model.named_parameters()) if self.adapter is None else dict(self.adapter.parameters)

    def held(self) -> dict[str, Tensor]:
        """What is served and published, by the names that it is saved under."""
        if self.adapter is None:
            return models.held_tensors(self.model)
        return {name: parameter.detach() for name, parameter in self.adapter.parameters.items()}

    def adapted(self, folder: Path, *, is_trained: bool) -> Net:
        """This base under a new adapter of the folder's shape, whose tensors are still to be filled."""
        if self.shared is None:
            self.shared = Shared(self.model)
        net = copy.copy(self)
        net.folder = folder
        net.adapter = self.shared.add(folder, is_trained=is_trained)
        return net

    def twin(self) -> Net:
        """The same network with tensors of its own (an adapter's twin shares the base as it does)."""
        if self.adapter is not None:
            return self.adapted(self.folder, is_trained=False)
        net = copy.copy(self)
        net.model = copy.deepcopy(self.model)
        net.base = cast(Any, net.model).base_model
        net.head = cast(nn.Linear, cast(Any, net.model).get_output_embeddings())
        return net

    def _verify_halves(self) -> None:
        ids = torch.arange(8, device=self.device).remainder(int(self.head.weight.shape[0]))[None]
        with torch.no_grad():
            whole: Tensor = cast(Any, self.model)(input_ids=ids, use_cache=False).logits[0]
            gap = float((whole.float() - self.logits(self.hidden(ids)[0]).float()).abs().max())
        bound = 1e-3 * max(1.0, float(whole.abs().max())) if self.dtype == torch.float32 else 0.1
        if not gap <= bound:
            raise ModelError(
                f"{self.folder}: head(hidden states) is {gap:.3g} away from the model's own logits (bound {bound:.3g}); "
                "this architecture scales its logits in a way that the local engine does not know"
            )


class Mixture:
    """Two networks of one tokenizer that serve one seat: the newcomer's law, moved into the ball around the incumbent's in
    each state (ALGORITHMS 2.8). Nothing of it is trained."""

    adapter = None

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        self.newcomer = Net(folder, dtype=dtype, device=device)
        self.incumbent = Net(folder / mixture.INCUMBENT, dtype=dtype, device=device)
        self.radius = mixture.radius_of(folder)
        self.folder, self.device = folder, device
        for net in (self.newcomer, self.incumbent):
            net.model.requires_grad_(False)

    def law(self, newcomer_SV: Float[Tensor, "S V"], incumbent_SW: Float[Tensor, "S W"]) -> Float[Tensor, "S V"]:
        """What is served where these are the two models' own laws."""
        more = newcomer_SV.shape[1] - incumbent_SW.shape[1]
        current = functional.pad(incumbent_SW, (0, more), value=-math.inf)
        return divergence.project(newcomer_SV, current, radius=self.radius)[0]

    def held(self) -> dict[str, Tensor]:
        """See `Net.held`: the tensors of both."""
        return self.newcomer.held() | {f"{mixture.INCUMBENT}.{k}": v for k, v in self.incumbent.held().items()}

    def twin(self) -> Mixture:
        """The same with tensors of its own."""
        other = copy.copy(self)
        other.newcomer, other.incumbent = self.newcomer.twin(), self.incumbent.twin()
        return other


class Bases:
    """The bases that adapters share: each is loaded once per dtype and device, for samplers and learners together."""

    def __init__(self) -> None:
        self._nets: dict[tuple[Path, torch.dtype, torch.device], Net] = {}

    def adapted(self, folder: Path, *, dtype: torch.dtype, device: torch.device, is_trained: bool) -> Net:
        """The adapter of this folder on its base in `dtype`; the adapter's own tensors are fp32."""
        place = (adapters.base_of(folder).resolve(), dtype, device)
        if place not in self._nets:
            adapters.check_base(folder)
            self._nets[place] = Net(place[0], dtype=dtype, device=device)
        net = self._nets[place].adapted(folder, is_trained=is_trained)
        with models.reading(folder / adapters.TENSORS):
            saved, own = load_file(folder / adapters.TENSORS), net.held()
        if saved.keys() != own.keys():
            raise ModelError(
                f"{folder / adapters.TENSORS} does not fit its {adapters.CONFIG} and base: "
                f"{sorted(saved.keys() ^ own.keys())[:4]} are on one side only"
            )
        for name, tensor in own.items():
            tensor.copy_(saved[name])
        return net


def unembed(
    hidden: Float[Tensor, "S D"], weight: Float[Tensor, "V D"], bias: Float[Tensor, " V"] | None, softcap: float | None
) -> Float[Tensor, "S V"]:
    """Logits of hidden states under a head."""
    logits = functional.linear(hidden, weight, bias)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _forbidden(folder: Path, *, rows: int) -> Bool[Tensor, " V"]:
    """Vocabulary rows that the tokenizer has no token for (padding of the matrix)."""
    return _without_token((folder / "tokenizer.json").read_bytes(), rows)


@lru_cache(maxsize=8)
def _without_token(tokenizer: bytes, rows: int) -> Bool[Tensor, " V"]:
    """The same from a tokenizer file's content, which a team's agents share."""
    vocabulary = Tokenizer.from_buffer(tokenizer).get_vocab(with_added_tokens=True)
    known = [i for i in vocabulary.values() if i < rows]
    forbidden = torch.ones(rows, dtype=torch.bool)
    forbidden[known] = False
    return forbidden
