"""Readers of few-shot data sets, and the unpickler that runs nothing: every file here is made by the test."""

from __future__ import annotations

import collections
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from bilevel_recipes.few_shot import sources
from bilevel_recipes.few_shot.sources import load, shrink
from bilevel_recipes.unpickle import read_pickle

RNG = np.random.default_rng(0)
# the alphabets of which Vinyals et al. validate on, as characters of images_background
VALIDATION = (75, 116), (180, 226), (333, 355), (496, 518), (739, 780)


# --- pickles ---------------------------------------------------------------------------------------------------


class Evil:
    """Unpickled by pickle.load, this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_malicious_pickle_is_refused_and_nothing_of_it_runs(tmp_path: Path, protocol: int) -> None:
    made, file = tmp_path / "made", tmp_path / "mini-imagenet-cache-train.pkl"
    file.write_bytes(pickle.dumps({"image_data": np.zeros(3), "class_dict": Evil(made)}, protocol))
    pickle.loads(file.read_bytes())
    assert made.is_dir()  # this is what it does if it is let
    made.rmdir()
    with pytest.raises(ValueError, match=r"asks for (posix|nt|os)\.mkdir.*not read"):
        load("mini-imagenet", str(tmp_path))
    assert not made.exists()


@pytest.mark.parametrize("name", ["numpy\nload", "builtins\neval", "builtins\ngetattr", "numpy.f2py\ncompile"])
def test_names_beyond_arrays_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.pkl").write_bytes(f"c{name}\n.".encode())
    with pytest.raises(ValueError, match=name.replace("\n", ".")):
        read_pickle(tmp_path / "x.pkl")


def test_the_unpickler_hands_out_nothing_that_a_pickle_could_change(tmp_path: Path) -> None:
    """BUILD sets attributes of what find_class gave: of a copy that is thrown away, or not at all."""
    stream = b"\x80\x04c_codecs\nencode\nN}\x8c\x0c__defaults__\x8c\x01x\x85s\x86b."
    (tmp_path / "x.pkl").write_bytes(stream)
    read_pickle(tmp_path / "x.pkl")
    (tmp_path / "y.pkl").write_bytes(pickle.dumps(b"\xff\x00", 2))
    assert read_pickle(tmp_path / "y.pkl") == b"\xff\x00"


ARRAY = arrays.arrays(
    st.sampled_from(["u1", "<i8", ">i4", "<f4", "?", "<U3", "S2"]), arrays.array_shapes(max_dims=3, max_side=4)
)
TREE = st.recursive(
    ARRAY | st.integers() | st.text() | st.binary() | st.none() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=6,
)


@given(TREE, st.integers(0, pickle.HIGHEST_PROTOCOL), st.booleans())
def test_arrays_and_plain_containers_come_back(
    tmp_path_factory: pytest.TempPathFactory, tree: Any, protocol: int, fortran: bool
) -> None:
    tree = [tree, np.asfortranarray(RNG.random((2, 3))) if fortran else np.float32(1.5), {1, 2}]
    path = tmp_path_factory.getbasetemp() / "tree.pkl"
    path.write_bytes(pickle.dumps(tree, protocol))
    found = read_pickle(path)

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, np.ndarray):
            return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        if isinstance(a, (list, tuple)):
            return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
        return type(a) is type(b) and a == b

    assert same(pickle.loads(path.read_bytes()), found)


def test_a_damaged_pickle_says_so(tmp_path: Path) -> None:
    whole = pickle.dumps({"data": RNG.integers(0, 255, 5000)})
    for raw in (whole[:100], b"", b"not a pickle"):
        (tmp_path / "x.pkl").write_bytes(raw)
        with pytest.raises(ValueError, match="damaged, or no pickle"):
            read_pickle(tmp_path / "x.pkl")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_pickle(tmp_path / "none.pkl")


# --- MiniImageNet ----------------------------------------------------------------------------------------------


def pictures(n: int, size: int = 84) -> Any:
    return RNG.integers(0, 256, (n, size, size, 3)).astype(np.uint8)


@pytest.mark.parametrize("form", ["ren", "lee"])
def test_mini_imagenet_from_cached_pickles(tmp_path: Path, form: str) -> None:
    x = pictures(6, 64)
    for split in ("train", "val", "test"):
        if form == "ren":
            rows = collections.OrderedDict(n02=[0, 2, 4], n01=[1, 3, 5])
            name, content = f"mini-imagenet-cache-{split}.pkl", {"image_data": x, "class_dict": rows}
        else:
            name = f"miniImageNet_category_split_{split}{'_phase_train' if split == 'train' else ''}.pickle"
            content = {"data": x, "labels": [9, 4, 9, 4, 9, 4]}
        (tmp_path / name).write_bytes(pickle.dumps(content, 2))
    source = load("mini-imagenet", str(tmp_path))
    assert source.part("val").y.tolist() == [1, 0, 1, 0, 1, 0]
    assert np.array_equal(source.part("test").x, x)


def test_mini_imagenet_from_images_and_the_csv_splits(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for split, label in (("train", "n03"), ("val", "n01"), ("test", "n02")):
        lines = ["filename,label"]
        for i in range(2):
            Image.fromarray(pictures(1)[0]).save(tmp_path / "images" / f"{label}{i}.png")
            lines.append(f"{label}{i}.png,{label}")
        (tmp_path / f"{split}.csv").write_text("\n".join(lines))
    source = load("mini-imagenet", str(tmp_path))
    assert source.part("train").x.shape == (2, 64, 64, 3)
    (tmp_path / "images" / "n020.png").unlink()
    sources.load.cache_clear()
    with pytest.raises(FileNotFoundError, match=r"names n020\.png"):
        load("mini-imagenet", str(tmp_path))
    (tmp_path / "images" / "n020.png").write_bytes(b"text")
    with pytest.raises(ValueError, match="not a readable image"):
        load("mini-imagenet", str(tmp_path))


def test_mistakes_name_the_fix(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="give --data-root"):
        load("mini-imagenet", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"0 of Omniglot's 1623.*--download"):
        load("omniglot", str(tmp_path))
    with pytest.raises(ValueError, match="digits, omniglot"):
        load("imagenet")
    with pytest.raises(ValueError, match="has no split 'val'; it has train, test"):
        load("digits").part("val")
    (tmp_path / "mini-imagenet-cache-train.pkl").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match="image_data and class_dict, or data and labels"):
        load("mini-imagenet", str(tmp_path))
    wrong = {"data": np.zeros((3, 4, 4), np.float32), "labels": [0, 1, 2]}
    (tmp_path / "mini-imagenet-cache-train.pkl").write_bytes(pickle.dumps(wrong))
    with pytest.raises(ValueError, match="uint8 and a label for each"):
        load("mini-imagenet", str(tmp_path))


# --- Omniglot, digits ------------------------------------------------------------------------------------------


@given(arrays.arrays(np.uint8, (3, 21, 21), elements=st.integers(0, 1)), st.sampled_from([7, 10, 21]))
def test_shrink_keeps_the_share_of_ink(ink: Any, size: int) -> None:
    small = shrink(ink, size)
    assert small.shape == (3, size, size)
    assert np.allclose(small.mean((1, 2)) / 255, ink.mean((1, 2)), atol=0.51 / 255)
    if size == 7:  # 3 × 3 pixels become one
        assert np.array_equal(small, np.rint(255 * ink.reshape(3, 7, 3, 7, 3).mean((2, 4), dtype=np.float32)))


def test_omniglot_alike_from_folders_and_from_the_npz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,623 characters of one drawing each; the split of Vinyals et al."""
    ink = (RNG.random((1623, 105, 105)) < 0.1).astype(np.uint8)
    counts = {"background": 964, "evaluation": 659}
    packed, first = {}, 0
    for part, n in counts.items():
        packed[f"{part}_bits"] = np.packbits(ink[first : first + n], axis=-1)
        packed[f"{part}_character"] = np.arange(n, dtype=np.int16)
        first += n
    np.savez(tmp_path / "Omniglot.npz", **packed)
    source = load("omniglot", str(tmp_path))
    assert {k: len(np.unique(p.y)) for k, p in source.parts.items()} == {"train": 1028, "val": 172, "test": 423}
    val = [c for begin, end in VALIDATION for c in range(begin, end)]
    split = {"train": sorted(set(range(1200)) - set(val)), "val": val, "test": range(1200, 1623)}
    for name, characters in split.items():
        assert np.array_equal(source.part(name).x, shrink(ink[list(characters)], 28))
    for i, image in enumerate(ink):
        part, j = ("background", i) if i < 964 else ("evaluation", i - 964)
        folder = tmp_path / f"py/omniglot-py/images_{part}/Alphabet{j // 40:02}/character{j % 40:02}"
        folder.mkdir(parents=True)
        Image.fromarray(255 * (1 - image)).save(folder / "0001_01.png", compress_level=1)
    again = load("omniglot", str(tmp_path / "py"))
    assert all(np.array_equal(again.part(k).x, p.x) and np.array_equal(again.part(k).y, p.y)
               for k, p in source.parts.items())  # fmt: skip


def test_digits_train_and_test_classes_differ() -> None:
    source = load("digits")
    assert source.part("train").x.shape[1:] == (8, 8)
    rows = [{image.tobytes() for image in source.part(part).x} for part in ("train", "test")]
    assert not rows[0] & rows[1]
    assert np.unique(source.part("test").y).tolist() == [0, 1, 2, 3]
