"""Draws are a pure function of their address."""

from __future__ import annotations

import hashlib
import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from baton.core import keyed

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        # The digits of pi, the third vector of the authors' own file.
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    out = keyed.philox4x32(np.array([counter], dtype=np.uint64), np.array([key], dtype=np.uint64))
    assert out[0].tolist() == list(words)


def test_uniforms_are_uniform_and_use_53_bits() -> None:
    draws = keyed.uniforms([keyed.key("uniformity", i) for i in range(200)], 500)
    assert draws.min() >= 0.0 and draws.max() < 1.0
    assert stats.kstest(draws.ravel(), "uniform").pvalue > 1e-3
    assert stats.kstest(draws[:, 0], "uniform").pvalue > 1e-3  # the first draw under each key, as sampling uses it
    scaled = draws.ravel() * 2.0**53
    assert np.array_equal(scaled, np.floor(scaled))
    low_bits = scaled.astype(np.uint64) & np.uint64(0xFF)
    assert stats.chisquare(np.bincount(low_bits.astype(np.int64), minlength=256)).pvalue > 1e-3


def test_neighbouring_draws_and_neighbouring_keys_are_uncorrelated() -> None:
    draws = keyed.uniforms([keyed.key("pairs", i) for i in range(300)], 300)
    for left, right in ((draws[:, :-1], draws[:, 1:]), (draws[:-1], draws[1:])):
        r = np.corrcoef(left.ravel(), right.ravel())[0, 1]
        assert abs(r) < 4.0 / math.sqrt(left.size)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6, unique=True), st.integers(1, 9), st.randoms())
def test_a_draw_does_not_depend_on_what_was_drawn_before_or_beside_it(
    numbers: list[int], count: int, shuffler: random.Random
) -> None:
    keys = [keyed.key("run", n) for n in numbers]
    together = keyed.uniforms(keys, count)
    order = list(range(len(keys)))
    shuffler.shuffle(order)
    for place in order:
        alone = keyed.uniforms([keys[place]], count + 3)[0, :count]
        assert np.array_equal(alone, together[place])


def test_addresses_are_typed_and_cannot_run_into_each_other() -> None:
    addresses = [
        ("a", "b"),
        ("ab",),
        ("a", "b", ""),
        ("b", "a"),
        (1,),
        ("1",),
        (11,),
        (1, 1),
        ("1", 1),
        (-1,),
        (),
        ("",),
        ("s1:a",),
        ("as1:b",),
        ("\u00e9",),
        ("e\u0301",),
    ]
    keys = [keyed.key(*address) for address in addresses]
    assert all(len(key) == 20 for key in keys)
    for (a, left), (b, right) in itertools.combinations(zip(addresses, keys, strict=True), 2):
        assert left != right, (a, b)
    assert keyed.key("a", 1) == keyed.key("a", 1)


def test_an_address_has_the_same_key_for_ever() -> None:
    """A run goes on after a crash, and is checked by others, with the draws that it began with."""
    assert keyed.key("order", 3) == hashlib.sha256(b"s5:orderi1:3").digest()[:20]
    assert keyed.key("\u00e9", -1) == hashlib.sha256(b"s2:\xc3\xa9i2:-1").digest()[:20]


def test_purposes_have_the_names_that_runs_were_drawn_with() -> None:
    purposes = [keyed.ORDER, keyed.PROMPTS, keyed.SAMPLE, keyed.PROBE, keyed.PAIRS, keyed.ROUND]
    assert purposes == ["order", "prompts", "sample", "probe", "pairs", "round"]


def test_every_word_of_a_key_matters() -> None:
    base = bytes(range(20))
    draw = keyed.uniforms([keyed.Key(base)], 1)[0, 0]
    for byte in range(20):
        other = bytearray(base)
        other[byte] ^= 1
        assert keyed.uniforms([keyed.Key(bytes(other))], 1)[0, 0] != draw, byte


def test_permutations_are_uniform() -> None:
    counts = {p: 0 for p in itertools.permutations(range(3))}
    for i in range(3000):
        counts[tuple(keyed.permutation(keyed.key("order", i), 3))] += 1
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


@given(st.integers(0, 10**6), st.integers(0, 40))
def test_a_permutation_holds_every_index_once(seed: int, size: int) -> None:
    assert sorted(keyed.permutation(keyed.key("order", seed), size)) == list(range(size))


def test_choices_are_uniform_and_inside_the_range() -> None:
    draws = [keyed.choice(keyed.key("probe", i), 7) for i in range(3500)]
    assert set(draws) == set(range(7))
    assert stats.chisquare(np.bincount(draws, minlength=7)).pvalue > 1e-3


def test_a_later_choice_under_a_key_is_that_entry_of_its_uniforms() -> None:
    at = keyed.key("probe", "q")
    uniforms = keyed.uniforms([at], 5)[0]
    assert [keyed.choice(at, 1000, index=i) for i in range(5)] == [int(u * 1000) for u in uniforms]
    assert keyed.choice(at, 1000) == int(uniforms[0] * 1000) and keyed.uniform(at) == uniforms[0]
