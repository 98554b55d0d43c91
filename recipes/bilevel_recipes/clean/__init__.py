"""Find wrong labels in a data set of your own, with the help of a few labels that were checked."""

from .cleaner import Cleaner
from .judge import Options
from .read import Rows, read
from .verdict import Verdict

__all__ = ["Cleaner", "Options", "Rows", "Verdict", "read"]
