"""Episodes to rows and rows to padded tables, token by token (DESIGN 4, step 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Row:
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def add(self, token: int, own: bool, logprob: float, version: int) -> None:
        self.ids.append(token)
        self.mask.append(own)
        self.logprobs.append(logprob)
        self.versions.append(version)


Spoken = tuple[Sequence[int], Sequence[int], Sequence[float], Sequence[int]]
"""Prompt ids, sampled ids, their log-probabilities, their versions: one own action turn."""


def rows(turns: Sequence[Spoken]) -> list[Row]:
    """A turn joins the running row iff its prompt begins with that row; otherwise it opens a new one."""
    out: list[Row] = []
    for prompt, ids, logprobs, versions in turns:
        if len(ids) == 0:
            continue
        start = 0
        if out and len(prompt) >= len(out[-1].ids):
            running = out[-1].ids
            if all(prompt[i] == running[i] for i in range(len(running))):
                start = len(running)
        if start == 0:
            out.append(Row())
        for token in prompt[start:]:
            out[-1].add(token, False, 0.0, -1)
        for token, logprob, version in zip(ids, logprobs, versions, strict=True):
            out[-1].add(token, True, logprob, version)
    return out
