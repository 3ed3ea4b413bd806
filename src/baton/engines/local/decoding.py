"""Messages from a network: one padded batch at a time, its keys and values kept, a keyed uniform for each token.

Axes: B rows of a decode batch, U its different prompts, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from baton.core import keyed
from baton.core.coupling import inverse_cdf
from baton.engines.local.net import Net
from baton.errors import MissingError
from baton.types import TokenIds


class _Room(DynamicLayer):
    """Keys and values of one layer in a buffer with room for the whole answer: a token is written, not concatenated."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.buffers: tuple[Tensor, Tensor] | None = None
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new = key_states.shape[-2]
        if self.buffers is None:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            self.length = new
            return key_states, value_states
        keys, values = self.buffers
        keys[:, :, self.length : self.length + new] = key_states
        values[:, :, self.length : self.length + new] = value_states
        self.length += new
        self._show()
        return cast(Tensor, self.keys), cast(Tensor, self.values)

    def take(self, rows: Int[Tensor, " R"]) -> None:
        """Keep these rows, in this order; a row may be taken more than once."""
        sources = (self.keys, self.values) if self.buffers is None else self.buffers
        taken: list[Tensor] = []
        for source in cast(tuple[Tensor, Tensor], sources):
            buffer = source.new_zeros(len(rows), source.shape[1], self.room, source.shape[3])
            buffer[:, :, : self.length] = source[rows, :, : self.length]
            taken.append(buffer)
        self.buffers = (taken[0], taken[1])
        self._show()

    def _show(self) -> None:
        assert self.buffers is not None
        self.keys = self.buffers[0][:, :, : self.length]
        self.values = self.buffers[1][:, :, : self.length]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One message to decode: `forced` gives its tokens (to be scored), otherwise `key` draws up to `limit` of them."""

    prompt: TokenIds
    limit: int
    key: keyed.Key | None = None
    forced: TokenIds | None = None


def decode(
    net: Net, rows: Sequence[Row], *, temperature: float, end_ids: Collection[int]
) -> list[tuple[TokenIds, tuple[float, ...]]]:
    """(ids, log-probabilities) of each row: one padded batch, equal prompts run once, rows leave as they end.

    What a row gets depends on the rows of this call alone, and forced rows go through the very operations of drawn ones:
    scoring a batch that was sampled gives its log-probabilities back bit for bit.
    """
    device = net.device
    place: dict[TokenIds, int] = {}
    prompt_of = torch.tensor([place.setdefault(row.prompt, len(place)) for row in rows], device=device)
    lengths = [len(prompt) for prompt in place]
    width = max(lengths)
    steps = max(row.limit for row in rows)
    ids_UT = torch.tensor([(0,) * (width - len(prompt)) + prompt for prompt in place], device=device)
    pad_U = torch.tensor([width - length for length in lengths], device=device)
    pad_B = pad_U[prompt_of]
    padded = min(lengths) < width
    cache = [_Room(width + steps) for _ in range(net.layers)]
    arguments: dict[str, Any] = {"use_cache": steps > 1}
    if steps > 1:
        arguments[net.cache_argument] = Cache(layers=cast(Any, cache))
    if padded:
        column_T = torch.arange(width, device=device)
        arguments["attention_mask"] = (column_T >= pad_U[:, None]).long()
        arguments["position_ids"] = (column_T - pad_U[:, None]).clamp(min=0)
    hidden_UD = net.body(input_ids=ids_UT, **arguments)[:, -1]
    log_law = net.law(hidden_UD, temperature=temperature)[prompt_of]

    limits: list[int] = [row.limit for row in rows]
    uniforms = None
    if any(row.forced is None for row in rows):
        keys = [row.key for row in rows if row.key is not None]
        if len(keys) != len(rows):
            raise MissingError("rows of a decode batch are either all drawn, each with a key, or all forced")
        uniforms = torch.from_numpy(keyed.uniforms(keys, steps)).to(device)  # [B, steps]
    ends = torch.tensor(sorted(end_ids), device=device)
    ids: list[list[int]] = [[] for _ in rows]
    logprobs: list[list[float]] = [[] for _ in rows]
    here = list(range(len(rows)))  # the row that each line of the batch works for
    done = [False] * len(rows)
    for step in range(steps):
        if uniforms is not None:
            token_B = inverse_cdf(log_law.exp(), uniforms[torch.tensor(here, device=device), step])
        else:
            forced = [cast(TokenIds, rows[r].forced) for r in here]
            token_B = torch.tensor([f[step] if step < len(f) else f[-1] for f in forced], device=device)
        logprob_B = log_law.gather(1, token_B[:, None])[:, 0]
        ended_B = torch.isin(token_B, ends) if uniforms is not None else torch.zeros_like(token_B, dtype=torch.bool)
        for r, token, logprob, ended in zip(here, token_B.tolist(), logprob_B.tolist(), ended_B.tolist(), strict=True):
            if not done[r]:
                ids[r].append(token)
                logprobs[r].append(logprob)
                done[r] = ended or len(ids[r]) == limits[r]
        alive = [line for line, r in enumerate(here) if not done[r]]
        if not alive:
            break
        kept = torch.arange(len(here), device=device)
        # Copying the cache costs about one step of a quarter of the batch: until then finished rows ride along.
        if step == 0 or 4 * len(alive) <= 3 * len(here):
            kept = torch.tensor(alive, device=device)
            for layer in cache:
                layer.take(prompt_of[kept] if step == 0 else kept)
            here = [here[line] for line in alive]
            pad_B = pad_B[kept]
        seen = width + step + 1
        arguments["position_ids"] = (seen - 1 - pad_B)[:, None]
        if padded:
            arguments["attention_mask"] = (torch.arange(seen, device=device) >= pad_B[:, None]).long()
        hidden_BD = net.body(input_ids=token_B[kept][:, None], **arguments)[:, -1]
        log_law = net.law(hidden_BD, temperature=temperature)
    return [(tuple(i), tuple(p)) for i, p in zip(ids, logprobs, strict=True)]


def decode_batches(rows: Sequence[Row], batch_size: int) -> list[list[int]]:
    """Row numbers of each decode batch: by prompt length, equal prompts together, otherwise in the order given.

    A batch has at most `batch_size` lines; where every answer is one token a line is a prompt, not a row.
    """
    first: dict[TokenIds, int] = {}
    for index, row in enumerate(rows):
        first.setdefault(row.prompt, index)
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i].prompt), first[rows[i].prompt], i))
    one_token = all(row.limit == 1 for row in rows)
    batches: list[list[int]] = []
    lines = batch_size
    for at, index in enumerate(order):
        repeats = at > 0 and rows[order[at - 1]].prompt == rows[index].prompt
        needed = 0 if one_token and repeats else 1
        if lines + needed > batch_size:
            batches.append([])
            lines, needed = 0, 1
        batches[-1].append(index)
        lines += needed
    return batches
