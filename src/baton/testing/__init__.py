"""The contracts as code: run these against your own env, protocol, codec, sampler or learner before baton does.

Each suite raises AssertionError with one sentence that says what is wrong, and returns nothing when all is well. Nothing
here knows an engine: the caller brings prompts, batches and a `Law`, an independent computation of the next-token law, so
that an engine is never its own judge.
"""

from baton.envs.check import check_env
from baton.testing.claims import Law
from baton.testing.codec import check_codec
from baton.testing.learner import check_learner
from baton.testing.protocol import check_protocol
from baton.testing.sampler import check_sampler

__all__ = ["Law", "check_codec", "check_env", "check_learner", "check_protocol", "check_sampler"]
