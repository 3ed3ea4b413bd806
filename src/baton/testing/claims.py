"""What the suites share: a claim that holds or is a sentence, and the judge of laws."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from baton.types import TokenIds, Weights

Law = Callable[[Weights, TokenIds, float], Tensor]
"""Log-probabilities [V], in nats, of the token after these ids, under these served weights at this temperature. Computed
apart from the engine under test: a plain forward pass, a table looked up by hand."""


def require(claim: bool, sentence: str) -> None:
    """Raise AssertionError with this sentence unless the claim holds."""
    if not claim:
        raise AssertionError(sentence)
