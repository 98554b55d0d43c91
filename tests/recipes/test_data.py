"""Readers and splits: every file here is made by the test."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bilevel_recipes import data

RNG = np.random.default_rng(0)


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    head = bytes([0, 0, kind, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    return head + array.astype(">i4" if kind == 12 else np.uint8).tobytes()


def mnist_files(n: int = 30, folder: str = "MNIST") -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for part in ("train", "t10k"):
        files[f"{folder}/raw/{part}-images-idx3-ubyte"] = idx(RNG.integers(0, 256, (n, 28, 28)))
        files[f"{folder}/raw/{part}-labels-idx1-ubyte"] = idx(np.arange(n) % 10)
    return files


def write_files(root: Path, files: dict[str, bytes], zipped: bool = False) -> None:
    for name, raw in files.items():
        path = root / (f"{name}.gz" if zipped else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(raw) if zipped else raw)


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:xz") as tar:
        for name, raw in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))


@pytest.mark.parametrize("form", ["plain", "gz", "tar"])
def test_mnist_is_read_alike_from_every_layout(tmp_path: Path, form: str) -> None:
    files = mnist_files()
    if form == "tar":
        write_tar(tmp_path / "MNIST.tar.xz", files)
    else:
        write_files(tmp_path, files, form == "gz")
    images = data.load("mnist", tmp_path)
    assert images.x.tobytes() == files["MNIST/raw/train-images-idx3-ubyte"][16:]
    assert images.y.tolist() == [i % 10 for i in range(30)]
    assert images.x_test is not None
    assert images.x_test.shape == (30, 28, 28)


def test_what_torchvision_reads_is_what_we_read(tmp_path: Path) -> None:
    from bilevel_recipes.vision import torchvision

    write_files(tmp_path, mnist_files())
    theirs = torchvision("datasets").MNIST(str(tmp_path), train=True, download=False)
    assert np.array_equal(theirs.data.numpy(), data.load("mnist", tmp_path).x)


def test_a_missing_file_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"train-images.*MNIST\.tar\.xz.*--data-root"):
        data.load("mnist", tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 10, 500])
def test_a_truncated_idx_file_is_an_error(tmp_path: Path, keep: int) -> None:
    files = mnist_files()
    files["MNIST/raw/train-images-idx3-ubyte"] = files["MNIST/raw/train-images-idx3-ubyte"][:keep]
    write_files(tmp_path, files)
    with pytest.raises(ValueError, match="cut short"):
        data.load("mnist", tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_truncated_archive_is_an_error(tmp_path: Path, zipped: bool) -> None:
    if zipped:
        write_files(tmp_path, mnist_files(), zipped=True)
        path = tmp_path / "MNIST/raw/train-images-idx3-ubyte.gz"
    else:
        path = tmp_path / "MNIST.tar.xz"
        write_tar(path, mnist_files())
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match="damaged or cut short"):
        data.load("mnist", tmp_path)


def test_qmnist_labels_alone_are_never_called_qmnist(tmp_path: Path) -> None:
    write_files(tmp_path, mnist_files(30))
    rows = {p: np.stack([(np.arange(n) + 1) % 10] + [np.arange(n)] * 7, 1) for p, n in (("train", 30), ("test", 60))}
    labels = {f"QMNIST/raw/qmnist-{p}-labels-idx2-int": idx(r, 12) for p, r in rows.items()}
    write_tar(tmp_path / "QMNIST-labels-only.tar.xz", labels)
    with pytest.raises(FileNotFoundError, match="mnist-qmnist-labels"):
        data.load("qmnist", tmp_path)
    images = data.load("mnist-qmnist-labels", tmp_path)
    assert images.name == "MNIST images with QMNIST labels"
    assert images.y.tolist() == [(i + 1) % 10 for i in range(30)]
    assert images.y_test is not None
    assert len(images.y_test) == 30

    write_files(
        tmp_path,
        {
            f"QMNIST/raw/qmnist-{p}-images-idx3-ubyte": idx(RNG.integers(0, 256, (len(r), 28, 28)))
            for p, r in rows.items()
        },
    )
    write_files(tmp_path, labels)
    assert data.load("qmnist", tmp_path).x.shape == (30, 28, 28)


def test_svhn_never_splits_a_photograph(tmp_path: Path) -> None:
    n = 400
    x, house = RNG.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8), np.arange(n) // 3
    np.savez(
        tmp_path / "SVHN_subset.npz",
        x_train=x[:9],
        y_train=np.zeros(9, int),
        x_test=x,
        y_test=np.arange(n) % 10,
        house_test=house,
    )
    images = data.load("svhn", tmp_path)
    cut = data.split(images, 0.5, 200, 150, seed=1)
    rows_of = {bytes(image.tobytes()): h for image, h in zip(x, house, strict=True)}
    held = {rows_of[v.tobytes()] for v in cut.x_val}
    assert len(cut.x) == 200
    assert len(cut.x_val) == 150
    assert not held & set(house[cut.rows])


def test_cifar_is_read_from_the_binary_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = RNG.integers(0, 10, (10000, 3073), dtype=np.uint8)
    write_files(
        tmp_path,
        {
            f"cifar-10-batches-bin/{f}.bin": raw.tobytes()
            for f in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
        },
    )
    images = data.load("cifar10", tmp_path)
    assert images.x.shape == (50000, 32, 32, 3)
    assert images.x[7, 2, 5].tolist() == raw[7, 1:].reshape(3, 32, 32)[:, 2, 5].tolist()
    assert images.y[7] == raw[7, 0]
    (tmp_path / "cifar-10-batches-bin/data_batch_2.bin").write_bytes(raw.tobytes()[:-1])
    with pytest.raises(ValueError, match="cut short"):
        data.load("cifar10", tmp_path)


def own(**change: object) -> dict[str, np.ndarray]:
    part: dict[str, object] = {
        "x": RNG.integers(0, 256, (20, 8, 8), dtype=np.uint8),
        "y": np.arange(20) % 4,
        "checked": np.arange(20) < 5,
        "truth": np.arange(20) % 4,
        "test": np.arange(20) >= 16,
    }
    part.update(change)
    return {k: np.asarray(v) for k, v in part.items() if v is not None}


def test_own_npz(tmp_path: Path) -> None:
    y = np.arange(20) % 4
    y[7] = 0
    np.savez(tmp_path / "mine.npz", **own(y=y))
    images = data.load(str(tmp_path / "mine.npz"))
    cut = data.split(images, 0.6, None, None, seed=0)
    assert cut.rows.tolist() == list(range(5, 16))
    assert len(cut.y_val) == 5
    assert cut.clean is not None
    assert cut.rows[~cut.clean].tolist() == [7]  # --rho does not touch own labels
    assert images.y_test is not None
    assert images.y_test.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checked": None}, "no array checked"),
        ({"checked": np.zeros(20, bool)}, "mark some rows as checked"),
        ({"checked": np.ones(20, bool)}, "leave the rows to clean unmarked"),
        ({"y": np.arange(19) % 4}, r"y has shape \(19,\)"),
        ({"y": np.arange(20) / 4}, "y must hold integers"),
        ({"y": np.arange(20) - 1}, "integers from 0"),
        ({"x": np.zeros((20, 8, 8))}, "must be uint8"),
        ({"x": np.zeros((20, 8, 8, 2), np.uint8)}, "N × H × W × 3"),
        ({"x": np.full((20, 3), np.nan)}, "NaN"),
        ({"classes": np.array(["a", "b"])}, "2 names"),
    ],
)
def test_own_npz_that_is_wrong_says_how(tmp_path: Path, change: dict[str, object], message: str) -> None:
    np.savez(tmp_path / "mine.npz", **own(**change))
    with pytest.raises(ValueError, match=message):
        data.load(str(tmp_path / "mine.npz"))


def test_pickle_is_never_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", **own(truth=np.array([{}] * 20, dtype=object)))
    with pytest.raises(ValueError, match="never loaded"):
        data.load(str(tmp_path / "mine.npz"))


@pytest.mark.parametrize("cut", [0, 10, 700, -30])
def test_a_damaged_npz_is_an_error(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, **own())
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match="damaged"):
        data.load(str(path))


def write_images(root: Path, sizes: list[int]) -> Path:
    from PIL import Image

    lines = ["file,label,checked,truth"]
    for i, size in enumerate(sizes):
        Image.fromarray(RNG.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(root / f"{i}.png")
        lines.append(f"{i}.png,{'cat' if i % 2 else 'dog'},{int(i < 2)},dog")
    path = root / "labels.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_own_csv_with_images(tmp_path: Path) -> None:
    path = write_images(tmp_path, [12, 12, 12, 9, 12])
    with pytest.raises(ValueError, match="--image-size"):
        data.load(str(path))
    images = data.load(str(path), image_size=8)
    cut = data.split(images, 0.0, None, None, 0)
    assert images.x.shape == (5, 8, 8, 3)
    assert images.classes == ["cat", "dog"]
    assert [images.files[r] for r in cut.rows] == ["2.png", "3.png", "4.png"]
    assert cut.clean is not None
    assert cut.clean.tolist() == [True, False, True]
    (tmp_path / "3.png").write_bytes((tmp_path / "3.png").read_bytes()[:60])
    with pytest.raises(ValueError, match=r"3\.png is not a readable image"):
        data.load(str(path), image_size=8)
    (tmp_path / "4.png").unlink()
    (tmp_path / "3.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"names 3\.png"):
        data.load(str(path), image_size=8)


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"digits, mnist.*\.npz or \.csv"):
        data.load("imagenet")


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200), st.floats(0, 0.99), st.integers(2, 20), st.integers(0, 9))
def test_corrupt_changes_exactly_that_many_to_another_class(n: int, rho: float, classes: int, seed: int) -> None:
    y = np.random.default_rng(seed).integers(0, classes, n)
    noisy, clean = data.corrupt(y, rho, classes, np.random.default_rng(seed))
    assert (~clean).sum() == round(rho * n)
    assert np.array_equal(noisy == y, clean)
    assert noisy.min() >= 0
    assert noisy.max() < classes


def test_wrong_labels_are_uniform_over_the_other_classes() -> None:
    noisy, _ = data.corrupt(np.zeros(100_000, int), 0.9, 10, np.random.default_rng(0))
    counts = np.bincount(noisy, minlength=10)
    assert counts[0] == 10_000
    assert np.abs(counts[1:] - 10_000).max() < 500  # 5 standard deviations


def test_split_keeps_the_noisy_set_when_the_checked_set_shrinks() -> None:
    images = data.load("digits")
    large, small = (data.split(images, 0.6, 500, m, seed=3) for m in (400, 50))
    assert np.array_equal(large.y, small.y)
    assert np.array_equal(large.rows, small.rows)
    assert np.array_equal(large.y_val[:50], small.y_val)
    other = data.split(images, 0.6, 500, 400, seed=4)
    assert not np.array_equal(large.rows, other.rows)


def test_split_shares_no_row_and_says_when_there_are_too_few() -> None:
    images = data.load("digits")
    cut = data.split(images, 0.6, None, None, seed=0)
    rows = {images.x[r].tobytes() for r in cut.rows}
    assert (len(cut.y), len(cut.y_val)) == images.sizes
    assert len(rows & {v.tobytes() for v in cut.x_val}) <= 2  # digits holds a few equal images of its own
    with pytest.raises(ValueError, match="too few for --train 900 and --validation 500"):
        data.split(images, 0.6, 900, 500, seed=0)
