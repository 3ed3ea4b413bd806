"""Randomness with an address: every draw is a pure function of a key, never of call order (ALGORITHMS 5.6).

A key is the SHA-256 of its address, for example (run seed, stage, agent, purpose, prompt, episode, turn). The draw with
index i under it is Philox4x32-10 (Salmon et al., SC 2011) at counter i: a counter-based generator, so that draws can be
made in any order, on any machine, and again after a crash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NewType

import numpy as np
import numpy.typing as npt

Key = NewType("Key", bytes)

ORDER, PROMPTS, SAMPLE, PROBE, PAIRS, ROUND = "order", "prompts", "sample", "probe", "pairs", "round"
"""Names of purposes that enter an address; two purposes never share a draw."""

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_FEW = 4
"""Draws up to which a call of `uniforms` goes without arrays."""


def key(*address: str | int) -> Key:
    """The key at this address. Parts are typed and length-prefixed, so ("a", "b") and ("ab",) or (1,) and ("1",) differ."""
    digest = hashlib.sha256()
    for part in address:
        data = str(part).encode("utf-8")
        digest.update(b"%c%d:" % (b"i" if isinstance(part, int) else b"s", len(data)))
        digest.update(data)
    return Key(digest.digest()[:20])


def beside(at: Key) -> Key:
    """The key of the second uniforms of a draw: those that a coupled message needs beside the first ones (3.6)."""
    return key(at.hex(), "beside")


def philox4x32(counter: npt.NDArray[np.uint64], key_words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10: counters [..., 4] and keys [..., 2] of 32-bit words (held in 64 bits) to four random 32-bit words."""
    c0, c1, c2, c3 = (counter[..., i] for i in range(4))
    k0, k1 = key_words[..., 0], key_words[..., 1]
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return np.stack([c0, c1, c2, c3], axis=-1)


def uniforms(keys: Sequence[Key], count: int) -> npt.NDArray[np.float64]:
    """Uniforms in [0, 1) with 53 bits, shape [len(keys), count]: entry (k, i) depends on keys[k] and i alone."""
    if len(keys) * count <= _FEW:
        return np.array([[uniform(at, i) for i in range(count)] for at in keys]).reshape(len(keys), count)
    words = np.frombuffer(b"".join(keys), dtype="<u4").reshape(len(keys), 5).astype(np.uint64)
    counter = np.empty((len(keys), count, 4), dtype=np.uint64)
    counter[..., 0] = np.arange(count, dtype=np.uint64)
    counter[..., 1:] = words[:, None, :3]
    out = philox4x32(counter, np.broadcast_to(words[:, None, 3:], (len(keys), count, 2)))
    high, low = out[..., 0] >> np.uint64(5), out[..., 1] >> np.uint64(6)
    return (high.astype(np.float64) * 67108864.0 + low.astype(np.float64)) / 9007199254740992.0


def uniform(at: Key, index: int = 0) -> float:
    """Draw `index` under one key, the number that `uniforms` has there. A few draws are cheaper without arrays."""
    w0, w1, w2, k0, k1 = (int.from_bytes(at[i : i + 4], "little") for i in range(0, 20, 4))
    c0, c1, c2, c3 = index, w0, w1, w2
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return ((c0 >> 5) * 67108864.0 + (c1 >> 6)) / 9007199254740992.0


def permutation(at: Key, size: int) -> list[int]:
    """A uniform permutation of range(size) (ties of two 53-bit uniforms: the lower index first)."""
    return np.argsort(uniforms([at], size)[0], kind="stable").tolist()


def choice(at: Key, size: int, *, index: int = 0) -> int:
    """A uniform draw from range(size), the `index`-th under this key."""
    return int(uniform(at, index) * size)
