"""Messages from a network: one padded batch at a time, its keys and values kept, a keyed uniform for each token.

Axes: B rows of a decode batch, L its lines now, K those that stay, U different prompts, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from baton.core import keyed
from baton.core.coupling import coupled, inverse_cdf
from baton.engines.local.net import Mixture, Net
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


@dataclass(frozen=True, kw_only=True, slots=True)
class CoupledRow:
    """One message to decode beside `said`, which the other network gave to the same prompt with the same key."""

    prompt: TokenIds
    limit: int
    key: keyed.Key
    said: TokenIds


class _Lines:
    """A padded batch in one network: equal prompts run once, then a token at a time for each line that goes on.

    `law` holds the fp32 log-probabilities of each line's next token.
    """

    def __init__(self, net: Net, prompts: Sequence[TokenIds], *, steps: int, temperature: float) -> None:
        self.net, self.temperature = net, temperature
        place: dict[TokenIds, int] = {}
        prompt_of = torch.tensor([place.setdefault(prompt, len(place)) for prompt in prompts], device=net.device)
        lengths = [len(prompt) for prompt in place]
        width = max(lengths)
        ids_UT = torch.tensor([(0,) * (width - len(prompt)) + prompt for prompt in place], device=net.device)
        pad_U = torch.tensor([width - length for length in lengths], device=net.device)
        self._pad_L = pad_U[prompt_of]
        self._is_padded = min(lengths) < width
        self._cache = [_Room(width + steps) for _ in range(net.layers)]
        self._seen = width
        self._lines = prompt_of
        """Rows of the cache that the lines are made from; the first token makes them."""
        self._is_shared = True
        self._arguments: dict[str, Any] = {"use_cache": steps > 1}
        if steps > 1:
            self._arguments[net.cache_argument] = Cache(layers=cast(Any, self._cache))
        first = dict(self._arguments)
        if self._is_padded:
            column_T = torch.arange(width, device=net.device)
            first["attention_mask"] = (column_T >= pad_U[:, None]).long()
            first["position_ids"] = (column_T - pad_U[:, None]).clamp(min=0)
        hidden_UD = net.body(input_ids=ids_UT, **first)[:, -1]
        self.law: Tensor = net.law(hidden_UD, temperature=temperature)[prompt_of]

    def advance(self, token_L: Int[Tensor, " L"], alive: Sequence[int]) -> Int[Tensor, " K"]:
        """Read the token of each line. Gives the lines that stay in the batch, in order: those `alive`, and others as long
        as they ride along."""
        kept = torch.arange(len(token_L), device=self.net.device)
        # Copying the cache costs about one step of a quarter of the batch: until then finished rows ride along.
        if self._is_shared or 4 * len(alive) <= 3 * len(token_L):
            kept = torch.tensor(alive, device=self.net.device)
            for layer in self._cache:
                layer.take(self._lines[kept] if self._is_shared else kept)
            self._pad_L, self._is_shared = self._pad_L[kept], False
        self._seen += 1
        arguments = dict(self._arguments, position_ids=(self._seen - 1 - self._pad_L)[:, None])
        if self._is_padded:
            column_T = torch.arange(self._seen, device=self.net.device)
            arguments["attention_mask"] = (column_T >= self._pad_L[:, None]).long()
        hidden_LD = self.net.body(input_ids=token_L[kept][:, None], **arguments)[:, -1]
        self.law = self.net.law(hidden_LD, temperature=self.temperature)
        return kept


class _MixedLines:
    """The same of two networks that serve one seat: both read every token."""

    def __init__(self, mixture: Mixture, prompts: Sequence[TokenIds], *, steps: int, temperature: float) -> None:
        self._mixture = mixture
        self._newcomer = _Lines(mixture.newcomer, prompts, steps=steps, temperature=temperature)
        self._incumbent = _Lines(mixture.incumbent, prompts, steps=steps, temperature=temperature)
        self.law: Tensor = mixture.law(self._newcomer.law, self._incumbent.law)

    def advance(self, token_L: Int[Tensor, " L"], alive: Sequence[int]) -> Int[Tensor, " K"]:
        kept = self._newcomer.advance(token_L, alive)
        self._incumbent.advance(token_L, alive)
        self.law = self._mixture.law(self._newcomer.law, self._incumbent.law)
        return kept


def _lines(net: Net | Mixture, prompts: Sequence[TokenIds], *, steps: int, temperature: float) -> _Lines | _MixedLines:
    kind = _MixedLines if isinstance(net, Mixture) else _Lines
    return kind(cast(Any, net), prompts, steps=steps, temperature=temperature)


class _Said:
    """What the rows of a batch have said so far, and which line of the batch works for which row."""

    def __init__(self, limits: Sequence[int], end_ids: Collection[int], device: torch.device) -> None:
        self._limits, self._ends = limits, torch.tensor(sorted(end_ids), device=device)
        self.ids: list[list[int]] = [[] for _ in limits]
        self.logprobs: list[list[float]] = [[] for _ in limits]
        self.done = [False] * len(limits)
        self.here = list(range(len(limits)))
        """The row that each line works for."""

    def add(self, token_L: Int[Tensor, " L"], law_LV: Float[Tensor, "L V"]) -> list[int]:
        """A token for each line; gives the lines whose rows go on."""
        logprob_L = law_LV.gather(1, token_L[:, None])[:, 0]
        ended_L = torch.isin(token_L, self._ends)
        lines = zip(self.here, token_L.tolist(), logprob_L.tolist(), ended_L.tolist(), strict=True)
        for r, token, logprob, ended in lines:
            if not self.done[r]:
                self.ids[r].append(token)
                self.logprobs[r].append(logprob)
                self.done[r] = ended or len(self.ids[r]) == self._limits[r]
        return [line for line, r in enumerate(self.here) if not self.done[r]]

    def keep(self, kept_K: Int[Tensor, " K"]) -> None:
        """Only these lines are left."""
        self.here = [self.here[line] for line in kept_K.tolist()]

    def messages(self) -> list[tuple[TokenIds, tuple[float, ...]]]:
        """(ids, log-probabilities) of each row."""
        return [(tuple(i), tuple(p)) for i, p in zip(self.ids, self.logprobs, strict=True)]


def decode(
    net: Net | Mixture, rows: Sequence[Row], *, temperature: float, end_ids: Collection[int]
) -> list[tuple[TokenIds, tuple[float, ...]]]:
    """(ids, log-probabilities) of each row: one padded batch, equal prompts run once, rows leave as they end.

    What a row gets depends on the rows of this call alone, and forced rows go through the very operations of drawn ones:
    scoring a batch that was sampled gives its log-probabilities back bit for bit.
    """
    device, steps = net.device, max(row.limit for row in rows)
    uniforms = None
    if any(row.forced is None for row in rows):
        keys = [row.key for row in rows if row.key is not None]
        if len(keys) != len(rows):
            raise MissingError("rows of a decode batch are either all drawn, each with a key, or all forced")
        uniforms = torch.from_numpy(keyed.uniforms(keys, steps)).to(device)  # [B, steps]
    lines = _lines(net, [row.prompt for row in rows], steps=steps, temperature=temperature)
    # Forced tokens end nothing before all of them are read.
    said = _Said([row.limit for row in rows], end_ids if uniforms is not None else (), device)
    for step in range(steps):
        if uniforms is not None:
            token_L = inverse_cdf(lines.law.exp(), uniforms[torch.tensor(said.here, device=device), step])
        else:
            forced = [cast(TokenIds, rows[r].forced) for r in said.here]
            token_L = torch.tensor([f[step] if step < len(f) else f[-1] for f in forced], device=device)
        alive = said.add(token_L, lines.law)
        if not alive:
            break
        said.keep(lines.advance(token_L, alive))
    return said.messages()


def decode_coupled(
    net: Net | Mixture, other: Net | Mixture, rows: Sequence[CoupledRow], *, temperature: float, end_ids: Collection[int]
) -> list[tuple[TokenIds, tuple[float, ...]]]:
    """(ids, log-probabilities) of each row under `net`, beside what `other` said: both networks read the same tokens side by
    side until a row parts, and from there its tokens are the inverse CDF at the uniforms that `other` drew with.

    Raises:
        DataError: a token that `other` gives probability 0.
    """
    device, steps = net.device, max(row.limit for row in rows)
    first, second = (
        torch.from_numpy(keyed.uniforms(keys, steps)).to(device)  # [B, steps]
        for keys in ([row.key for row in rows], [keyed.beside(row.key) for row in rows])
    )
    prompts = [row.prompt for row in rows]
    own = _lines(net, prompts, steps=steps, temperature=temperature)
    beside = _lines(other, prompts, steps=steps, temperature=temperature)
    said = _Said([row.limit for row in rows], end_ids, device)
    is_together = [True] * len(rows)
    for step in range(steps):
        here = torch.tensor(said.here, device=device)
        token_L = inverse_cdf(own.law.exp(), first[here, step])
        at = [line for line, r in enumerate(said.here) if is_together[r] and not said.done[r]]
        if at:
            rows_at = here[at]
            theirs = torch.tensor([rows[r].said[step] for r in rows_at.tolist()], device=device)
            u_S2 = torch.stack([first[rows_at, step], second[rows_at, step]], dim=1)
            token_L[at] = coupled(beside.law[at], own.law[at], u_S2, token_S=theirs)[1]
            for line, their in zip(at, theirs.tolist(), strict=True):
                is_together[said.here[line]] = int(token_L[line]) == their
        alive = said.add(token_L, own.law)
        if not alive:
            break
        kept = own.advance(token_L, alive)
        beside.advance(token_L, alive)
        said.keep(kept)
    return said.messages()


def decode_batches(rows: Sequence[Row | CoupledRow], batch_size: int) -> list[list[int]]:
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
