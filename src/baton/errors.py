"""Every error that baton raises on purpose, under one root.

    BatonError
    ├── ConfigError (ValueError)            a key, a value or a combination that cannot be run; raised before any model loads
    │   └── UnsupportedError                a name the specification knows and this version does not implement
    ├── DataError (ValueError)              a row, a prompt or an answer that cannot be used; names the row
    ├── ModelError (ValueError)             a model or tokenizer that is missing or cannot be trained or served here
    ├── MissingError (LookupError)          something a decision needs is absent; nothing is put in its place
    ├── NonFiniteError (ArithmeticError)    a NaN or an infinity where a number decides; names the place
    ├── StaleAdvantagesError (ValueError)   advantages of one team, weights of another
    ├── ReplayGapError (RuntimeError)       sampler and learner disagree about the same weights
    ├── PublishError (RuntimeError)         weights did not land in the sampler as sent
    ├── RunError (RuntimeError)             a run directory that cannot be created, read, resumed or extended
    ├── TaskFault (RuntimeError)            an env, tool or grader failed at its own work; the episode becomes `Failed`
    └── Interrupted (RuntimeError)          the user asked to stop; what was complete is on disk

The message of each names the thing, the value, the bound and the remedy.
"""


def cause(error: BaseException) -> str:
    """An exception of somebody else's code on one line, its type first: what a message of ours quotes."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def is_text(value: object) -> bool:
    """Whether a value is a text that can be written: Python's may hold halves of surrogate pairs."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class BatonError(Exception):
    """The root: `except BatonError` catches everything that baton raises on purpose."""


class ConfigError(BatonError, ValueError):
    """A configuration that cannot be run."""


class UnsupportedError(ConfigError):
    """A name from the specification that this version does not implement; it is refused, never ignored."""


class DataError(BatonError, ValueError):
    """A row, prompt or answer that cannot be used."""


class ModelError(BatonError, ValueError):
    """A model or tokenizer that is missing, or that cannot be trained or served as asked."""


class MissingError(BatonError, LookupError):
    """An input that a decision needs is absent."""


class NonFiniteError(BatonError, ArithmeticError):
    """A NaN or an infinity where a number decides."""


class StaleAdvantagesError(BatonError, ValueError):
    """Advantages were evaluated under another team than the one that is about to use them."""


class ReplayGapError(BatonError, RuntimeError):
    """Sampler and learner give different log-probabilities for the same tokens under the same weights."""


class PublishError(BatonError, RuntimeError):
    """The weights that the sampler holds are not the weights that were sent."""


class RunError(BatonError, RuntimeError):
    """A run directory that cannot be created, read, resumed or extended."""


class TaskFault(BatonError, RuntimeError):
    """An environment, tool or grader failed at its own work: the episode is `Failed`, never reward 0."""


class Interrupted(BatonError, RuntimeError):
    """The user asked to stop."""
