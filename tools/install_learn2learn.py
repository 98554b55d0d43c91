"""Install learn2learn, as it was released, into the environment that runs this.

    python tools/install_learn2learn.py            (`make test` runs it, and goes on if it fails)

Its last release carries C files that a Cython of 2022 wrote, and they do not compile for Python 3.11 or later. They are
made anew here from the .pyx files beside them. Nothing else of the package is changed. The package comes without its
dependencies, which would bring another torch: of those that are not here already, only gym is needed to import it.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
IMPORTS = "from bilevel_recipes.vision import torchvision; torchvision('datasets'); import learn2learn"


def pinned(name: str) -> str:
    """Return `name==version` from constraints.txt."""
    found = re.search(rf"^{name}==\S+$", CONSTRAINTS.read_text(), re.M)
    if found is None:
        sys.exit(f"install_learn2learn: constraints.txt has no version of {name}")
    return found[0]


def run(*command: str | Path, path: Path | None = None) -> None:
    """Run Python with these arguments. If it fails, show its own message and nothing else."""
    env = {**os.environ, "PYTHONPATH": str(path)} if path else None
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, env=env, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"install_learn2learn: {' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")


def pip(command: str, *arguments: str | Path, path: Path | None = None) -> None:
    run("-m", "pip", "--quiet", "--disable-pip-version-check", command, "--no-deps", *arguments, path=path)


def installed(requirement: str) -> bool:
    name, version = requirement.split("==")
    try:
        return importlib.metadata.version(name) == version
    except importlib.metadata.PackageNotFoundError:
        return False


def build(folder: Path) -> None:
    """Fetch the source, make its C files again, and install it. Cython is installed in the temporary folder alone."""
    tools, source = folder / "tools", pinned("learn2learn")
    pip("install", "--target", tools, pinned("cython"))
    pip("download", "--no-binary", "learn2learn", "--no-build-isolation", "--dest", folder, source, path=tools)
    with tarfile.open(next(folder.glob("learn2learn-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    root = folder / source.replace("==", "-")
    for stale in (root / "learn2learn").rglob("*.c"):
        stale.unlink()
    shutil.rmtree(root / "tests")  # setup.py would install it as a package named `tests`, for all to import
    run("-m", "cython", "-3", *sorted((root / "learn2learn").rglob("*.pyx")), path=tools)
    pip("install", "--no-build-isolation", root, path=tools)


def main() -> None:
    if not installed(pinned("gym")):
        pip("install", "--no-build-isolation", pinned("gym"))
    if not installed(pinned("learn2learn")):
        with tempfile.TemporaryDirectory() as folder:
            build(Path(folder))
    run("-W", "ignore", "-c", IMPORTS)
    print(f"install_learn2learn: {pinned('learn2learn')} is installed, and can be imported")


if __name__ == "__main__":
    main()
