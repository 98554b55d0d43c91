"""python tools/mend_torchvision.py: make `import torchvision` work in this environment beside a CPU-only torch.

torchvision from the package index is built for CUDA. Beside a CPU torch its C++ operators do not load, and its import
then fails on two names that it only wants to register. transformers, peft and Lightning import torchvision where it is
installed, so theirs fails too: `from transformers import BertForSequenceClassification`.

The remedy is torchvision's own CPU build (pip install torchvision --index-url https://download.pytorch.org/whl/cpu).
Where that index is out of reach, this puts two small files beside the package: one that declares the two names when
torchvision is imported, and a .pth that has Python load it at its start. Where the import works it does nothing.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

NAME = "torchvision_without_operators"
CODE = '''"""Written by bilevel_plugin's tools/mend_torchvision.py, which says why."""

import sys


class DeclareOperators:
    """Finds no module: it only acts just before torchvision registers its operators."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision._meta_registrations":
            import torch
            import torchvision.extension

            if not torchvision.extension._has_ops():
                self.library = torch.library.Library("torchvision", "FRAGMENT")  # the names last as long as it does
                for operator in ("nms", "qnms"):
                    self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, DeclareOperators())
'''


def failure() -> str:
    """Return the error of `import torchvision` in a fresh process, or "" if it works."""
    run = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True)
    return run.stderr.strip() if run.returncode else ""


def main() -> int:
    error = failure()
    if not error or error.endswith("No module named 'torchvision'"):
        return 0
    if "operator torchvision::nms does not exist" not in error:
        print(error, file=sys.stderr)
        return 1
    folder = Path(sysconfig.get_path("purelib"))
    (folder / f"{NAME}.py").write_text(CODE)
    (folder / f"{NAME}.pth").write_text(f"import {NAME}\n")
    error = failure()
    print(error or f"torchvision is built for CUDA and torch is not: wrote {folder / NAME}.pth", file=sys.stderr)
    return bool(error)


if __name__ == "__main__":
    sys.exit(main())
