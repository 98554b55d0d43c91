"""Is it fit to be released? Wheel and sdist, the wheel in an empty environment, README's example against it.

    python tools/release_check.py            (`make release-check` installs what it needs first)

Prints the size of both files, what the wheel depends on, and what `import bilevel_plugin` takes beyond `import torch`.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMPORTS = """
import time
begin = time.perf_counter()
import torch
middle = time.perf_counter()
import bilevel_plugin
print(middle - begin, time.perf_counter() - middle, bilevel_plugin.__file__, bilevel_plugin.__version__)
"""
ROUNDS = 7


def run(*command: str | Path, cwd: Path) -> str:
    """What the command printed; where it fails, its own message and no more."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"release-check: {' '.join(map(str, command))[:200]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def core_dependencies(wheel: Path) -> tuple[str, list[str]]:
    """The wheel's version and what it needs without extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
        strange = [n for n in archive.namelist() if not re.match(r"bilevel_plugin(-[^/]+\.dist-info)?/", n)]
    if strange:
        sys.exit(f"release-check: the wheel has what does not belong to it: {strange[:5]}")
    return metadata["Version"], [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]


def examples() -> str:
    """README's Python blocks, one after the other."""
    return "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        run(sys.executable, "-m", "build", "--outdir", there / "dist", ROOT, cwd=there)  # the wheel from the sdist
        (wheel,), (sdist,) = (there / "dist").glob("*.whl"), (there / "dist").glob("*.tar.gz")
        version, needs = core_dependencies(wheel)
        if [re.split(r"\W", n)[0] for n in needs] != ["torch"]:
            sys.exit(f"release-check: the core should need torch alone, and needs {needs}")
        run(sys.executable, "-m", "venv", there / "venv", cwd=there)
        python = there / "venv" / "bin" / "python"
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt")
        run(*pip, "torch", cwd=there)
        run(*pip, wheel, cwd=there)
        no_numpy = "ignore:Failed to initialize NumPy:UserWarning"  # torch's own, where there is none
        printed = run(python, "-W", "error", "-W", no_numpy, "-c", examples(), cwd=there)
        times = [run(python, "-c", IMPORTS, cwd=there).split() for _ in range(ROUNDS + 1)][1:]  # the first one warms up
        if not all(Path(t[2]).is_relative_to(there) and t[3] == version for t in times):
            sys.exit(f"release-check: not the wheel was imported, but {times[0][2:]}; the wheel is {version}")
        torch_seconds, ours = (statistics.median(float(t[i]) for t in times) for i in (0, 1))
        print(f"version        {version}")
        print(f"wheel          {wheel.name}, {wheel.stat().st_size / 1000:.1f} kB")
        print(f"sdist          {sdist.name}, {sdist.stat().st_size / 1000:.1f} kB")
        print(f"dependencies   {', '.join(needs)}")
        print(f"import         {ours * 1000:.0f} ms beyond torch's {torch_seconds * 1000:.0f} ms (median of {ROUNDS})")
        print("README says", *printed.strip().splitlines(), sep="\n  ")


if __name__ == "__main__":
    main()
