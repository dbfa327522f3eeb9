"""What may go wrong while a run is under way. Users' mistakes, which are found before it, are ValueErrors."""

from basis_rl.text import printable


class NonFiniteGradients(RuntimeError):
    """Too many optimizer steps in a row had gradients that are not finite. The weights are those before them."""


class WeightsLost(NonFiniteGradients):
    """A step has made weights that are not finite, or far too large to compute with."""


class _Quoting(RuntimeError):
    """Its message may quote a server; what controls a terminal is escaped."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class RolloutError(_Quoting):
    """The server did not do what it was asked. Raised on every rank at once."""


class RequestRefused(_Quoting):
    """The server is well and says that the request is wrong, so that waiting would not help. On every rank at once."""


class WrongAnswer(RequestRefused):
    """The server answers what was not asked for, or for another run, so that waiting would not help either."""


class SyncError(RuntimeError):
    """The engine has other weights than the trained model. Raised on every rank at once."""


class ServerLost(RuntimeError):
    """The server did not come back in time. Raised on every rank at once."""


class PeerLost(RuntimeError):
    """Another rank of the run is gone, or cannot be reached. Each rank that is left raises it by itself."""


class DiskFull(RuntimeError):
    """A checkpoint or a log could not be written."""


class FolderLost(DiskFull):
    """The run's folder was removed or renamed during the run."""


class RewardFailed(RuntimeError):
    """A reward function raised an exception, or returned an invalid reward. Raised on every rank at once."""


class StopAsked(BaseException):
    """A signal to stop came while a server was waited for; its argument is the signal's number. On every rank at once;
    no error, so `except Exception` lets it pass."""


class SelectionFailed(RuntimeError):
    """The prompt sampler failed, or has no prompts for a generation batch. Raised on every rank at once."""
