"""The torch engine of one machine: a sampler with slots of served weights and a learner with fp32 masters.

Both call the same few functions of `net` for hidden states, logits and laws, so that what was sampled is what is scored.
"""

from baton.engines.local.device import Compute, auto_compute, auto_dtype, device_of
from baton.engines.local.laws import CHUNK, LocalAnchor
from baton.engines.local.learner import LocalLearner, noise_floor, share_changed
from baton.engines.local.mixed import MixedLearner
from baton.engines.local.net import Bases
from baton.engines.local.sampler import LocalSampler

__all__ = [
    "CHUNK",
    "Bases",
    "Compute",
    "LocalAnchor",
    "LocalLearner",
    "LocalSampler",
    "MixedLearner",
    "auto_compute",
    "auto_dtype",
    "device_of",
    "noise_floor",
    "share_changed",
]
