"""What a benchmark number means: averages over prompts, with intervals (ALGORITHMS 2.7; R27).

Axes: P prompts, K episodes of the whole team per prompt. The prompt is the independent unit of every
interval.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from scipy import special
from torch import Tensor

from baton.errors import ConfigError, DataError, MissingError, NonFiniteError


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean and its two-sided confidence interval over n prompts."""

    value: float
    low: float
    high: float
    n: int
    method: Literal["wilson", "student", "student_paired"]


def avg_at_n(correct: Float[Tensor, "P K"]) -> float:
    """Mean over prompts of the mean score of K team episodes, avg@K.

    Raises:
        MissingError: no prompts or no episodes.  NonFiniteError: a score is not finite (names its place).
    """
    _require_scores(correct)
    return float(correct.double().mean(dim=1).mean())


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k)/C(n, k): unbiased chance that one of k episodes is right, from c right ones of n.

    Raises:
        DataError: not 0 <= c <= n, or k outside 1..n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise DataError(f"pass@{k} from {c} right of {n}: need 0 <= right <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_at_k_mean(correct: Float[Tensor, "P K"], k: int) -> float:
    """Mean over prompts of pass@k. The K episodes are the team's, never n agents times K single answers.

    Raises:
        DataError: a score other than 0 or 1, or k above K.  MissingError, NonFiniteError: as for `avg_at_n`.
    """
    _require_scores(correct)
    if not bool(((correct == 0) | (correct == 1)).all()):
        raise DataError("pass@k counts right episodes: scores must be 0 or 1")
    n = int(correct.shape[1])
    return statistics.fmean(pass_at_k(n, int(c), k) for c in correct.sum(dim=1).tolist())


def maj_at_k(answers: Sequence[str | None], gold_equal: Callable[[str], bool]) -> float:
    """Score of the majority answer of one prompt's episodes, in [0, 1].

    `answers` are canonical (equal answers are equal strings); None did not parse and does not vote. A tie
    scores the share of right answers among the tied (house rule). No vote at all scores 0.

    Raises:
        MissingError: no episodes.
    """
    if not answers:
        raise MissingError("a majority of no episodes; give at least one answer")
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    return statistics.fmean(float(gold_equal(answer)) for answer, count in votes.items() if count == most)


def mean_interval(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Mean over prompts with its interval: Wilson's where all values are 0 or 1, else Student's t.

    Raises:
        MissingError: no prompts, or a single one that is not 0 or 1 (it has no spread).
        NonFiniteError: a value is not finite (names it).  ConfigError: confidence outside (0, 1).
    """
    _require_sample(values, confidence)
    if all(value in (0.0, 1.0) for value in values):
        return _wilson(sum(values) / len(values), len(values), confidence)
    return _student(values, confidence, "student")


def paired_interval(after: Sequence[float], before: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Mean of after - before over the same prompts in the same order, with Student's t interval.

    Raises:
        DataError: lists of different length.  MissingError: fewer than two prompts.
        NonFiniteError: a value is not finite.  ConfigError: confidence outside (0, 1).
    """
    if len(after) != len(before):
        raise DataError(f"{len(after)} scores after and {len(before)} before; pair them by prompt")
    differences = [a - b for a, b in zip(after, before, strict=True)]
    _require_sample(differences, confidence)
    return _student(differences, confidence, "student_paired")


def _wilson(share: float, n: int, confidence: float) -> Interval:
    z = float(special.ndtri(0.5 + confidence / 2.0))
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # Wilson's interval holds the share; at 0 and 1 rounding alone would put its end on the wrong side.
    low, high = min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))
    return Interval(value=share, low=low, high=high, n=n, method="wilson")


def _student(values: Sequence[float], confidence: float, method: Literal["student", "student_paired"]) -> Interval:
    n = len(values)
    if n < 2:
        raise MissingError(f"an interval from {n} prompt; one value has no spread, give at least 2 prompts")
    mean = statistics.fmean(values)
    half = float(special.stdtrit(n - 1, 0.5 + confidence / 2.0)) * statistics.stdev(values) / math.sqrt(n)
    return Interval(value=mean, low=mean - half, high=mean + half, n=n, method=method)


def _require_sample(values: Sequence[float], confidence: float) -> None:
    if not 0.0 < confidence < 1.0:
        raise ConfigError(f"confidence {confidence}: need a number in (0, 1)")
    if not values:
        raise MissingError("an interval over no prompts; give at least one")
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise NonFiniteError(f"score {index} is {value}; need a finite number")


def _require_scores(correct: Float[Tensor, "P K"]) -> None:
    if correct.numel() == 0:
        raise MissingError(f"scores of shape {tuple(correct.shape)}; give at least one episode of one prompt")
    bad = (~torch.isfinite(correct)).nonzero()
    if bad.numel():
        prompt, episode = bad[0].tolist()
        raise NonFiniteError(f"score of prompt {prompt}, episode {episode} is {float(correct[prompt, episode])}")
