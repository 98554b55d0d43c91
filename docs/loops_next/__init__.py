"""Eight more loops for the gallery, written against `companions=`, `loop.compute` and `bilevel.sam` before these exist.

The files are those of docs/loops: setup.py, plain.py and wrapped.py in a folder for each loop. When the library has
these names, the folders go to docs/loops, and this one goes away (its two modules with it).

`python -m docs.loops_next [names]` prints the errors of each loop: with the library where it has what the loop needs,
and else with oracle.py in its place, which keeps the graph of the whole training.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from docs.loops import Entry

FOLDER = Path(__file__).parent
NAMES = ("byol", "dcgan", "dqn", "mean_teacher", "moco", "ppo", "sam", "self_paced")
NEEDS = {"byol": "ema", "dqn": "copy", "mean_teacher": "ema", "moco": "ema", "ppo": "compute", "sam": "sam",
         "self_paced": "compute"}  # fmt: skip


@dataclass(frozen=True)
class Next(Entry):
    """A loop of this folder, with the checks of docs/loops."""

    def module(self, file: str) -> ModuleType:
        return importlib.import_module(f"docs.loops_next.{self.name}.{file}")

    def code(self, file: str) -> list[str]:
        import docs.loops as gallery

        kept, gallery.FOLDER = gallery.FOLDER, FOLDER
        try:
            return super().code(file)
        finally:
            gallery.FOLDER = kept
