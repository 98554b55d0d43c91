"""Files that are cut short, damaged, oversized, mislabelled or malicious: read, or refused in one line; nothing else.

`make soak` runs these with 400 examples for each kind of file, and counts in $BAD_DATA_LOG what each of them got.
"""

from __future__ import annotations

import io
import lzma
import os
import pickle
import struct
import sys
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import idx, mnist_files, subset, write_files, write_tar
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from bilevel_recipes import data
from bilevel_recipes.few_shot import sources

ROOT = Path(__file__).parents[2]
TRUSTED = tuple(
    {str(ROOT), sys.prefix, sys.base_prefix, *map(os.path.realpath, (sys.prefix, sys.base_prefix)), "/proc"}
)

UNPACKED = os.path.join(tempfile.gettempdir(), "tmp")  # what an archive is unpacked to, and gone when it was read


class Watch:
    """While on, notes programs that are started, and files opened outside of a folder and of temporary ones."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.seen: list[str] = []
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect"):
            self.seen.append(event)
        if event in ("open", "os.mkdir", "os.symlink", "os.remove", "os.rename") and isinstance(args[0], (str, bytes)):
            within = f"/proc/self/fd/{args[1]}" if event == "os.remove" and args[1] >= 0 else "."
            path = os.path.abspath(os.path.join(os.path.realpath(within), os.fsdecode(args[0])))
            writes = event != "open" or bool((args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if not path.startswith((self.folder, *((UNPACKED,) if writes else (UNPACKED, *TRUSTED)))):
                self.seen.append(f"{event} {path}")


WATCH = Watch()


def attempt(kind: str, root: Path, load: Callable[[Path], Any]) -> str:
    """What a reader makes of the files in root; anything but data or a plain error fails the test."""
    WATCH.folder, WATCH.seen = str(root), []
    begin = time.monotonic()
    try:
        load(root)
        outcome = "read"
    except (ValueError, OSError) as error:
        message = str(error)
        outcome = type(error).__name__
        assert message.startswith("recipes."), message
        assert str(root) in message or any(part in message for part in ("MNIST", "mnist")), message
    finally:
        WATCH.folder = None
    assert WATCH.seen == []
    assert time.monotonic() - begin < 30
    if log := os.environ.get("BAD_DATA_LOG"):
        with open(log, "a") as handle:
            handle.write(f"{kind},{outcome}\n")
    return outcome


# --- whole files, to be damaged --------------------------------------------------------------------------------


def png(size: int = 12) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.arange(size * size * 3, dtype=np.uint8).reshape(size, size, 3)).save(out, "PNG")
    return out.getvalue()


def npz(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    return out.getvalue()


def put(root: Path, files: dict[str, bytes]) -> None:
    write_files(root, files)


def packed_tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, raw in mnist_files(4).items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return out.getvalue()


TRAIN = "MNIST/raw/train-images-idx3-ubyte"
SUBSET = "CIFAR10_subset.npz"
QMNIST = {
    f"QMNIST/raw/qmnist-{part}-labels-idx2-int": idx(np.stack([np.arange(4)] * 8, 1), 12) for part in ("train", "test")
}
PNGS = {f"{i}.png": png() for i in range(4)}
MINI = b"filename,label\n0.png,n01\n1.png,n02\n"
PICKLE = {"data": np.zeros((3, 8, 8, 3), np.uint8), "labels": [0, 1, 1]}
MINI_CSV = {f"{split}.csv": MINI for split in ("train", "val", "test")}

# kind -> files, the one to damage, how it is read
KINDS: dict[str, tuple[dict[str, bytes], str, Callable[[Path], Any]]] = {
    "idx": (mnist_files(4), TRAIN, lambda r: data.load("mnist", r)),
    "tar.xz": ({"MNIST.tar.xz": lzma.compress(packed_tar())}, "MNIST.tar.xz", lambda r: data.load("mnist", r)),
    "tar in xz": ({"MNIST.tar.xz": packed_tar()}, "MNIST.tar.xz", lambda r: data.load("mnist", r)),
    "labels alone": (
        {**mnist_files(4), **QMNIST},
        "QMNIST/raw/qmnist-train-labels-idx2-int",
        lambda r: data.load("mnist-qmnist-labels", r),
    ),
    "npz": ({SUBSET: npz(**subset())}, SUBSET, lambda r: data.load("cifar10", r)),
    "image": ({**PNGS}, "2.png", lambda r: data.read_picture(r / "2.png")),
    "few-shot csv": (
        {**MINI_CSV, **{f"images/{n}": b for n, b in PNGS.items()}},
        "train.csv",
        lambda r: sources.SOURCES["mini-imagenet"](r, False),
    ),
    "pickle": (
        {f"mini-imagenet-cache-{s}.pkl": pickle.dumps(PICKLE, 4) for s in ("train", "val", "test")},
        "mini-imagenet-cache-train.pkl",
        lambda r: sources.SOURCES["mini-imagenet"](r, False),
    ),
}


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Bytes cut off, flipped, put in, taken out, repeated, or numbers made as large as they can be."""
    edits = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["cut", "flip", "put", "drop", "repeat", "huge"]),
                st.floats(0, 1),
                st.binary(max_size=8),
            ),
            min_size=1,
            max_size=4,
        )
    )

    def damage(raw: bytes) -> bytes:
        for how, where, what in edits:
            i = int(where * len(raw))
            raw = {
                "cut": raw[:i],
                "flip": raw[:i] + bytes(b ^ 255 for b in raw[i : i + 1]) + raw[i + 1 :],
                "put": raw[:i] + what + raw[i:],
                "drop": raw[:i] + raw[i + 1 + len(what) :],
                "repeat": raw[:i] + raw[max(0, i - 40) :],
                "huge": raw[:i] + b"\x7f\xff\xff\xff" + raw[i + 4 :],
            }[how]
        return raw

    return damage


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")  # Pillow and zipfile warn of what they then refuse
def test_damaged_files_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, kind: str) -> None:
    files, victim, load = KINDS[kind]
    root = tmp_path_factory.mktemp("fuzz")
    put(root, files)
    if kind != "tar in xz":
        load(root)  # whole, they are read

    @given(damages())
    def run(damage: Callable[[bytes], bytes]) -> None:
        raw = damage(files[victim])
        (root / victim).write_bytes(lzma.compress(raw, preset=0) if kind == "tar in xz" else raw)
        attempt(kind, root, load)

    run()


@pytest.mark.parametrize("kind", ["idx", "npz", "pickle"])
@pytest.mark.filterwarnings("ignore")
def test_files_of_noise_are_refused(tmp_path: Path, kind: str) -> None:
    files, victim, load = KINDS[kind]
    put(tmp_path, files)

    @given(st.binary(max_size=200))
    def run(raw: bytes) -> None:
        (tmp_path / victim).write_bytes(raw)
        assert attempt("noise", tmp_path, load) != "read"

    run()


# --- files that mean harm --------------------------------------------------------------------------------------


def npy(shape: str, body: bytes = b"") -> bytes:
    head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + body


def zipped(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        for name, raw in members.items():
            z.writestr(f"{name}.npy", raw)
    return out.getvalue()


def tar_with(info: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:xz") as tar:
        tar.addfile(info)
    return out.getvalue()


def link(target: str) -> bytes:
    info = tarfile.TarInfo(TRAIN)
    info.type, info.linkname = tarfile.SYMTYPE, target
    return tar_with(info)


def large_png() -> bytes:
    raw = bytearray(png())
    raw[16:24] = struct.pack(">II", 60000, 60000)
    raw[29:33] = struct.pack(">I", zlib.crc32(raw[12:29]))
    return bytes(raw)


ZEROS = bytes(3 << 20)  # with the limits at a mebibyte, see below
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(%pipe%touch ran) (w) file\n%%EOF\n"
HARM: dict[str, tuple[str, str, Callable[[], bytes], str]] = {
    "idx: a header of terabytes": (
        "idx", TRAIN, lambda: b"\0\0\x08\x03" + struct.pack(">3i", 2**31 - 1, 2**31 - 1, 2**31 - 1), "is damaged"),
    "idx: sizes whose product overflows to 0": (
        "idx", TRAIN, lambda: b"\0\0\x08\x04" + struct.pack(">4i", 65536, 65536, 65536, 65536), "AssertionError"),
    "idx: 255 dimensions": ("idx", TRAIN, lambda: b"\0\0\x08\xff" + b"\0\0\0\1" * 255 + b"\0", "AssertionError"),
    "idx: labels of other length": (
        "idx", "MNIST/raw/train-labels-idx1-ubyte", lambda: idx(np.arange(3)), "one label for each"),
    "idx: labels beyond 9": (
        "idx", "MNIST/raw/train-labels-idx1-ubyte", lambda: idx(np.arange(4) + 200), "outside of 0 to 9"),
    "tar.xz: a bomb": ("tar.xz", "MNIST.tar.xz", lambda: lzma.compress(ZEROS, preset=0), "more than 1 MiB"),
    "tar.xz: a link out of it": ("tar.xz", "MNIST.tar.xz", lambda: link("/etc/passwd"), "no plain file"),
    "tar.xz: a link up": ("tar.xz", "MNIST.tar.xz", lambda: link("../../../../etc/passwd"), "no plain file"),
    "npz: a header of terabytes": ("npz", SUBSET, lambda: zipped(x=npy("(1000000000000, 1000)")), "damaged, or no"),
    "npz: a bomb": ("npz", SUBSET, lambda: zipped(x=npy(str((len(ZEROS), 1)), ZEROS)), "would unpack to"),
    "npz: pickled objects": (
        "npz", SUBSET, lambda: npz(**subset(y_test=np.array([{}] * 6, dtype=object))), "never loaded"),
    "npz: a label of 10^12": ("npz", SUBSET, lambda: npz(**subset(y_test=np.full(6, 10**12))), "outside of 0 to 9"),
    "npz: names that lead out": ("npz", SUBSET, lambda: zipped(**{"../../x": npy("(1,)", b"a")}), "no array x_train"),
    "image: 3.6 gigapixels": ("image", "2.png", large_png, "not a readable image"),
    "image: PostScript": ("image", "2.png", lambda: EPS, "not a readable image"),
    "few-shot csv: a label that leads out": (
        "few-shot csv", "train.csv", lambda: b"filename,label\npasswd,../../../../etc\n", "which is not in"),
    "few-shot csv: an absolute name": (
        "few-shot csv", "train.csv", lambda: b"filename,label\n/etc/passwd,a\n", "which is not in"),
    "pickle: a program": (
        "pickle", "mini-imagenet-cache-train.pkl", lambda: b"cos\nsystem\n(S'touch ran'\ntR.", "asks for os.system"),
    "pickle: an array of terabytes": (
        "pickle", "mini-imagenet-cache-train.pkl",
        lambda: b"cnumpy\nndarray\n(I1000000000000000\nI1\ntR.", "damaged, or no pickle"),
    "pickle: classes that are no rows": (
        "pickle", "mini-imagenet-cache-train.pkl",
        lambda: pickle.dumps({"image_data": PICKLE["data"], "class_dict": {"a": [99]}}), "holds no images"),
}  # fmt: skip


@pytest.mark.parametrize("case", HARM)
@pytest.mark.filterwarnings("ignore")
def test_files_that_mean_harm_are_refused(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert data._MOST < data._MOST_UNPACKED < 2**31
    monkeypatch.setattr(data, "_MOST", 2**20)
    monkeypatch.setattr(data, "_MOST_UNPACKED", 2**20)
    kind, victim, make, says = HARM[case]
    files, _, load = KINDS[kind]
    put(tmp_path, files)
    (tmp_path / victim).write_bytes(make())
    assert attempt("meant to harm", tmp_path, load) in ("ValueError", "OSError")
    with pytest.raises((ValueError, OSError), match=says.replace(".", r"\.")):
        load(tmp_path)
    assert not list(tmp_path.rglob("ran"))
    assert not (ROOT / "ran").exists()


def test_a_download_with_another_hash_is_no_data(tmp_path: Path) -> None:
    """What torchvision says of a file whose hash is wrong, or of no network, comes as one of our errors."""
    (tmp_path / "train_32x32.mat").write_bytes(b"not the file that its hash is known of")
    with pytest.raises(OSError, match=r"torchvision could not get the files .*not found or corrupted"):
        data.load("svhn", tmp_path)


def test_writing_a_tar_for_the_tests_is_what_is_read(tmp_path: Path) -> None:
    write_tar(tmp_path / "MNIST.tar.xz", mnist_files(4))
    assert attempt("tar.xz", tmp_path, lambda r: data.load("mnist", r)) == "read"
