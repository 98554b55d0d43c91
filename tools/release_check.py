"""Check a release: build wheel and sdist, and try the wheel in two empty environments.

    python tools/release_check.py            (`make release-check` installs what it needs first)

In the first environment the wheel is alone with torch, and README's example runs. In the second it has the extra
`[recipes]`, and `bilevel-clean` cleans a folder of images. Prints the size of both files, what the wheel depends on,
and how long installing, importing and cleaning take.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMPORTS = """
import time
begin = time.perf_counter()
import torch
middle = time.perf_counter()
import {0} as module
print(middle - begin, time.perf_counter() - middle, module.__file__)
"""
FOLDER = """
import random, sklearn.datasets
from pathlib import Path
from PIL import Image
random.seed(0)
digits, checked = sklearn.datasets.load_digits(), []
for n, (image, label) in enumerate(zip(digits.images[:600], digits.target[:600].tolist())):
    right = n % 6 == 0 or random.random() > 0.2
    file = Path(f"digits/{label if right else (label + 1) % 10}/{n:04d}.png")
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((image * (255 / 16)).astype("uint8")).save(file)
    if n % 6 == 0:
        checked.append(f"{file.parent.name}/{file.name}")
Path("checked.txt").write_text("\\n".join(checked) + "\\n")
"""
PARTS = r"(bilevel_plugin|bilevel_recipes|bilevel_plugin-[^/]+\.dist-info)/"
ROUNDS = 7


def run(*command: str | Path, cwd: Path) -> str:
    """Return the output of a command. If it fails, show its own message and nothing else."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"release-check: {' '.join(map(str, command))[:200]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def core_dependencies(wheel: Path) -> tuple[str, list[str]]:
    """Return the wheel's version and its requirements without extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
        strange = [n for n in archive.namelist() if not re.match(PARTS, n)]
    if strange:
        sys.exit(f"release-check: the wheel has what does not belong to it: {strange[:5]}")
    return metadata["Version"], [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]


def examples() -> str:
    """Return README's Python blocks, one after the other."""
    return "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))


def environment(folder: Path, what: str) -> tuple[Path, float]:
    """Make an empty environment with torch and this package. Return the folder of its programs, and the seconds."""
    begin = time.perf_counter()
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    programs = folder / "bin"
    pip = (programs / "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt")
    run(*pip, "torch", cwd=folder.parent)  # first, so that nothing else chooses its version
    run(*pip, what, cwd=folder.parent)
    return programs, time.perf_counter() - begin


def import_seconds(python: Path, module: str, home: Path) -> tuple[float, float]:
    """Return the median import times of torch, and then of the module, which must be that of the environment."""
    code = IMPORTS.format(module)
    times = [run(python, "-c", code, cwd=home).split() for _ in range(ROUNDS + 1)][1:]  # the first one warms up
    if not all(Path(t[2]).is_relative_to(home) for t in times):
        sys.exit(f"release-check: not the wheel was imported, but {times[0][2]}")
    torch_seconds, own = (statistics.median(float(t[i]) for t in times) for i in (0, 1))
    return torch_seconds, own


def check_core(wheel: Path, version: str, home: Path) -> None:
    """Try the wheel with torch alone: README's example, and the time of the import."""
    programs, seconds = environment(home / "core", str(wheel))
    no_numpy = "ignore:Failed to initialize NumPy:UserWarning"  # torch's own, where there is none
    printed = run(programs / "python", "-W", "error", "-W", no_numpy, "-c", examples(), cwd=home)
    found = run(programs / "python", "-c", "import bilevel_plugin as b; print(b.__version__)", cwd=home).strip()
    if found != version:
        sys.exit(f"release-check: the package says that it is version {found}; the wheel is {version}")
    torch_seconds, own = import_seconds(programs / "python", "bilevel_plugin", home)
    print(f"core           installed in {seconds:.0f} s")
    print(f"import         {own * 1000:.0f} ms beyond torch's {torch_seconds * 1000:.0f} ms (median of {ROUNDS})")
    print("README says", *printed.strip().splitlines(), sep="\n  ")


def check_recipes(wheel: Path, home: Path) -> None:
    """Try the wheel with its recipes: clean a folder of images, without a clone of the repository."""
    programs, seconds = environment(home / "recipes", f"{wheel}[recipes]")
    print(f"[recipes]      installed in {seconds:.0f} s")
    torch_seconds, own = import_seconds(programs / "python", "bilevel_recipes.clean", home)
    print(f"import         {own * 1000:.0f} ms beyond torch's {torch_seconds * 1000:.0f} ms (median of {ROUNDS})")
    run(programs / "python", "-c", FOLDER, cwd=home)
    begin = time.perf_counter()
    clean = (programs / "bilevel-clean", "digits", "--checked", "checked.txt", "--out", "out", "--quiet")
    printed = run(*clean, cwd=home)
    lines = len((home / "out" / "cleaned.csv").read_text().splitlines()) - 1
    if not 300 < lines < 600 or not (home / "out" / "report.html").stat().st_size:
        sys.exit(f"release-check: 600 digits, about 100 with a wrong label, became {lines} rows in cleaned.csv")
    print(f"bilevel-clean  600 images became {lines} rows of cleaned.csv in {time.perf_counter() - begin:.1f} s")
    print(*printed.strip().splitlines(), sep="\n  ")
    run(programs / "bilevel-fewshot", "--help", cwd=home)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        run(sys.executable, "-m", "build", "--outdir", home / "dist", ROOT, cwd=home)  # the wheel from the sdist
        (wheel,), (sdist,) = (home / "dist").glob("*.whl"), (home / "dist").glob("*.tar.gz")
        version, needs = core_dependencies(wheel)
        if [re.split(r"\W", n)[0] for n in needs] != ["torch"]:
            sys.exit(f"release-check: the core should need torch alone, and needs {needs}")
        print(f"version        {version}")
        print(f"wheel          {wheel.name}, {wheel.stat().st_size / 1000:.1f} kB")
        print(f"sdist          {sdist.name}, {sdist.stat().st_size / 1000:.1f} kB")
        print(f"dependencies   {', '.join(needs)}")
        check_core(wheel, version, home)
        check_recipes(wheel, home)


if __name__ == "__main__":
    main()
