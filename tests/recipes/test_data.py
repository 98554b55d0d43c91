"""Readers and splits: every file here is made by the test."""

from __future__ import annotations

import pickle
from hashlib import md5
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import RNG, idx, mnist_files, subset, write_files, write_tar
from hypothesis import given, settings
from hypothesis import strategies as st

from bilevel_recipes import data


@pytest.mark.parametrize("form", ["plain", "tar"])
def test_mnist_is_read_alike_from_a_folder_and_from_an_archive(tmp_path: Path, form: str) -> None:
    files = mnist_files()
    if form == "tar":
        write_tar(tmp_path / "MNIST.tar.xz", files)
    else:
        write_files(tmp_path, files)
    images = data.load("mnist", tmp_path)
    assert images.x.tobytes() == files["MNIST/raw/train-images-idx3-ubyte"][16:]
    assert images.y.tolist() == [i % 10 for i in range(30)]
    assert images.x_test is not None
    assert images.x_test.shape == (30, 28, 28)


def test_a_missing_file_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=rf"the files of {tmp_path} .*not found.*Give --data-root.*or --download"):
        data.load("mnist", tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 10, 500])
def test_a_truncated_idx_file_is_an_error(tmp_path: Path, keep: int) -> None:
    files = mnist_files()
    files["MNIST/raw/train-images-idx3-ubyte"] = files["MNIST/raw/train-images-idx3-ubyte"][:keep]
    write_files(tmp_path, files)
    with pytest.raises((ValueError, OSError), match=rf"^recipes\.data: .*{tmp_path}"):
        data.load("mnist", tmp_path)


def test_a_truncated_archive_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "MNIST.tar.xz"
    write_tar(path, mnist_files())
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"MNIST\.tar\.xz is damaged or cut short"):
        data.load("mnist", tmp_path)


def test_an_archive_with_damaged_files_is_named_itself(tmp_path: Path) -> None:
    files = mnist_files()
    files["MNIST/raw/train-images-idx3-ubyte"] = b"no idx"
    write_tar(tmp_path / "MNIST.tar.xz", files)
    with pytest.raises((ValueError, OSError), match=r"MNIST\.tar\.xz") as caught:
        data.load("mnist", tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_qmnist_labels_alone_are_never_called_qmnist(tmp_path: Path) -> None:
    write_files(tmp_path, mnist_files(30))
    rows = {p: np.stack([(np.arange(n) + 1) % 10] + [np.arange(n)] * 7, 1) for p, n in (("train", 30), ("test", 60))}
    labels = {f"QMNIST/raw/qmnist-{p}-labels-idx2-int": idx(r, 12) for p, r in rows.items()}
    write_tar(tmp_path / "QMNIST-labels-only.tar.xz", labels)
    with pytest.raises(OSError, match="mnist-qmnist-labels"):
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


def test_cifar_is_read_by_torchvision_if_its_hashes_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bilevel_recipes.vision import torchvision

    raw, kind = RNG.integers(0, 256, (20, 3072), dtype=np.uint8), torchvision("datasets").CIFAR10
    batch = pickle.dumps({"data": raw, "labels": [i % 10 for i in range(20)]})
    meta = pickle.dumps({"label_names": list("abcdefghij")})
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    write_files(tmp_path, {f"cifar-10-batches-py/{name}": batch for name in names})
    write_files(tmp_path, {"cifar-10-batches-py/batches.meta": meta})
    with pytest.raises(OSError, match="not found or corrupted"):  # these are not the files that torchvision knows
        data.load("cifar10", tmp_path)
    known = [[name, md5(batch).hexdigest()] for name in names]
    monkeypatch.setattr(kind, "train_list", known[:5])
    monkeypatch.setattr(kind, "test_list", known[5:])
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": md5(meta).hexdigest()})
    images = data.load("cifar10", tmp_path)
    assert images.x.shape == (100, 32, 32, 3)
    assert images.x[7, 2, 5].tolist() == raw[7].reshape(3, 32, 32)[:, 2, 5].tolist()
    assert images.y.tolist() == [i % 10 for i in range(20)] * 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y_test": None}, "has no array y_test"),
        ({"y_train": np.arange(19) % 10}, "one label for each"),
        ({"y_train": np.arange(20)}, "labels outside of 0 to 9"),
        ({"x_train": np.zeros((20, 32, 32, 3))}, "one label for each uint8 image"),
        ({"y_test": np.array([{}] * 6, dtype=object)}, "never loaded"),
    ],
)
def test_a_subset_that_is_wrong_says_how(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "CIFAR10_subset.npz", **subset(**change))
    with pytest.raises(ValueError, match=message):
        data.load("cifar10", tmp_path)


@pytest.mark.parametrize("cut", [0, 10, 700, -30])
def test_a_damaged_npz_is_an_error(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "CIFAR10_subset.npz"
    np.savez(path, **subset())
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match="damaged"):
        data.load("cifar10", tmp_path)


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match="known: digits, mnist"):
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
