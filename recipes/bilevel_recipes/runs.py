"""Runs on disk: files that are whole or absent, checkpoints without pickle, settings that a resume must match."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import resource
import sys
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from . import ranks, tables
from .device import set_tf32

FORMAT = 1  # of a checkpoint; another number is not read


def write(path: Path, content: bytes) -> None:
    """Write a file so that a kill at any moment leaves the old one or the new one: temp, fsync, rename."""
    temp = path.with_name(f".{path.name}.tmp")
    try:
        with open(temp, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temp, path)
        _sync(path.parent)
    except OSError as error:
        temp.unlink(missing_ok=True)
        why = error.strerror or str(error)
        raise OSError(
            f"recipes: {path} can't be written ({why}); what was there before is kept. Make room, or see to the "
            "folder's permissions, and go on with --resume"
        ) from error


def _sync(folder: Path) -> None:
    """A rename itself must survive a power cut too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    write(path, text.encode())


def write_page(path: Path, page: str) -> None:
    """Write a Markdown page that a command made, and add the notes that are kept beside it in NAME_notes.md."""
    notes = path.with_name(f"{path.stem}_notes.md")
    added = f"\n{notes.read_text(encoding='utf-8').strip()}\n" if notes.is_file() else ""
    write_text(path, f"{page.rstrip()}\n{added}")


def save(path: Path, state: dict[str, Any]) -> None:
    """A checkpoint of tensors and plain values. The one before it is kept beside it, in case the disk damages this."""
    if not ranks.is_main():
        return
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    if path.is_file():
        link = path.with_name(f".{path.name}.link")
        link.unlink(missing_ok=True)
        try:
            os.link(path, link)
        except OSError:  # a file system without links, or a full one: then there is no second copy
            pass
        else:
            os.replace(link, before(path))
    write(path, buffer.getvalue())


def before(path: Path) -> Path:
    """Where the checkpoint before the last one is."""
    return path.with_name(f"{path.name}.before")


def load(path: Path) -> dict[str, Any] | None:
    """The checkpoint, or None where there is none; never unpickles code (`weights_only=True`).

    If it is damaged, the one before it: a run that goes on from there comes to the same result.
    """
    if not path.is_file():
        return None
    try:
        return _load(path)
    except _Damaged as error:
        try:
            state = _load(before(path))
        except (_Damaged, FileNotFoundError):
            raise ValueError(
                f"recipes: {path} is not a readable checkpoint ({error}); delete it to redo this run"
            ) from error
        print(f"recipes: {path} is damaged ({error}); going on from the one before it", file=sys.stderr)
        return state


class _Damaged(Exception):
    """A file that is no whole checkpoint."""


def _load(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as whole:  # torch.load does not look at the checksums that torch.save writes
            broken = whole.testzip()
        state: Any = None if broken else torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # zipfile and torch raise a dozen kinds here
        raise _Damaged(str(error).split("\n")[0]) from error
    if broken:
        raise _Damaged(f"the checksum of {broken} is wrong")
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"recipes: {path} was written by another version of the recipes (format {found}; this one reads {FORMAT}); "
            "finish the run with that version, or begin one in a new --out"
        )
    return {k: v for k, v in state.items() if k != "format"}


def open_folder(folder: Path, settings: dict[str, Any], resume: bool) -> None:
    """Make the run's folder, or go on in the one that is there, if it was made with these settings."""
    file, wanted = folder / "settings.json", json.loads(json.dumps(settings))
    if file.is_file():
        if not resume:
            raise FileExistsError(f"recipes: {folder} holds a run; pass --resume to go on with it, or another --out")
        try:
            had = dict(json.loads(file.read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"recipes: {file} is damaged ({error}); give a new --out") from error
        changed = [k for k in wanted.keys() | had.keys() if wanted.get(k) != had.get(k)]
        if changed:
            what = ", ".join(f"{k}: {had.get(k)!r} then, {wanted.get(k)!r} now" for k in sorted(changed))
            raise ValueError(
                f"recipes: {folder} was made with other settings ({what}); resume with those, or a new --out"
            )
        return
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(wanted, indent=2) + "\n")


def write_results(folder: Path, command: str, settings: Any, **figures: Any) -> None:
    """results.json: how it was made, and every figure."""
    made = {"command": command, "settings": asdict(settings), "versions": versions()}
    text = json.dumps(tables.plain({**made, **figures}), indent=1, ensure_ascii=False)
    write_text(folder / "results.json", text + "\n")


def file_name(job: Any) -> str:
    """The checkpoint's name for a job, a dataclass of plain values."""
    words = "_".join(str(v) for v in asdict(job).values() if v != "")
    plain = re.sub(r"[^\w.-]", "-", words)
    return f"{plain}_{zlib.crc32(words.encode()):08x}.pt"  # two paths may differ in what - replaced


def sweep(
    todo: Sequence[Any],
    folder: Path,
    one: Callable[[Any, Path, dict[str, Any] | None], dict[str, Any]],
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Do the jobs that are not done yet, and return the record of every one.

    one(job, path, state) does a job, or goes on with it from the state that it saved in path; what it returns, and has
    saved there, holds the record. A job has a `file` and, for the progress bar, a `title`.
    """
    records: list[dict[str, Any]] = []
    bar = tqdm(todo, desc="runs", disable=quiet, unit="run", position=0)
    for job in bar:
        path = folder / "runs" / job.file
        state = load(path)
        if state is None or "record" not in state:
            bar.set_postfix_str(job.title)
            state = one(job, path, state)
        records.append(state["record"])
    return records


def set_up(device: str, threads: int | None, tf32: bool = False) -> None:
    """Set torch's threads and the precision of a GPU, and make sure of the device."""
    if threads:
        torch.set_num_threads(threads)
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"recipes: --device {device}, but torch sees no CUDA device here; use --device cpu")
    set_tf32(tf32)


def versions() -> dict[str, Any]:
    """What a figure depends on beside the settings."""
    from importlib.metadata import PackageNotFoundError, version

    def of(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "bilevel_plugin": of("bilevel_plugin"),
        "cleanlab": of("cleanlab"),
        "threads": torch.get_num_threads(),
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
