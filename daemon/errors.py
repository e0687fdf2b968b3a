"""How calls fail. Every message names the value, what was expected and what to do."""


class QuotaError(Exception):
    """A call that changed nothing."""


class InvalidRequestError(QuotaError):
    """The request contradicts itself or a value is out of its range."""


class UnknownInstanceError(QuotaError):
    """A name that was never seen."""


class ConflictError(QuotaError):
    """Somebody else has set the limit: the revision is taken, or is not the expected one."""


class StaleError(QuotaError):
    """The revision is below the current one."""


class StorageFullError(QuotaError):
    """The state directory has no room for the spec."""


class StorageError(QuotaError):
    """The spec could not be written, for another reason than room."""


class SupersededError(QuotaError):
    """The limit that a call waited for is no longer the one to reach."""


class StoppingError(QuotaError):
    """The daemon stops; it is a new daemon's to answer."""


class StartError(Exception):
    """The daemon can't start; the message is for the operator."""
