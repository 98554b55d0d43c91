"""Which training rows made a model do this: exact attribution through the user's own training."""

from .attribution import Attribution
from .influence import Influence
from .trust import Trust

__all__ = ["Attribution", "Influence", "Trust"]
