"""What the dashboard raises on purpose; drawn in the tree of trainer_backend/errors.py."""

from trainer_backend.errors import TrainerError


class BadAddress(TrainerError):
    """An address asks for what there cannot be: a number that is none, an order that is unknown."""

    code = "address_invalid"
    status = 400
    title = "Address cannot be read"


class UnknownTurn(TrainerError):
    code = "turn_unknown"
    status = 404
    title = "No such decision"


class OnlyShows(TrainerError):
    code = "only_shows"
    status = 403
    title = "This service begins no jobs"
