"""The readers of the cleaning recipe: every form, every refusal; all files are made by the test."""

from __future__ import annotations

import hashlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from bilevel_recipes.clean.features import features
from bilevel_recipes.clean.read import Rows, fingerprint, read

RNG = np.random.default_rng(0)


def table(n: int = 12, **columns: Any) -> pd.DataFrame:
    """Two numeric columns, two classes in turn, the first four rows checked."""
    base = {"a": np.linspace(0, 1, n), "b": RNG.normal(size=n), "label": ["cat", "dog"] * (n // 2)}
    return pd.DataFrame(base | {"checked": [True] * 4 + [False] * (n - 4)} | columns)


def paint(file: Path, value: int = 0, size: tuple[int, int] = (6, 5), mode: str = "L") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 0)).save(file)
    return file


def folder(home: Path, n: int = 4) -> Path:
    for k, name in enumerate(("cat", "dog")):
        for i in range(n):
            paint(home / name / f"{i}.png", 100 * k + i)
    return home


def labels(rows: Rows) -> list[str]:
    return [rows.classes[c] for c in rows.y]


def png(value: int = 0) -> bytes:
    out = io.BytesIO()
    Image.new("L", (6, 5), value).save(out, "PNG")
    return out.getvalue()


# --- forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["csv", "tsv", "parquet", "frame"])
def test_a_table_is_read_alike_from_every_form(tmp_path: Path, form: str) -> None:
    frame = table(colour=["red", "blue", "red", "green"] * 3, old=[True, False] * 6)
    frame["old"] = [True, True, False] * 4
    path = tmp_path / f"mine.{form}"
    write = {
        "csv": lambda: frame.to_csv(path, index=False),
        "tsv": lambda: frame.to_csv(path, index=False, sep="\t"),
        "parquet": lambda: frame.to_parquet(path),
        "frame": lambda: None,
    }
    write[form]()
    rows = read(frame if form == "frame" else path)
    assert rows.kind == "table"
    assert list(rows.content) == ["a", "b", "colour", "old"]
    assert rows.content["old"].tolist() == [1.0, 1.0, 0.0] * 4
    assert rows.content["colour"].astype(str).tolist() == ["red", "blue", "red", "green"] * 3
    assert rows.content["colour"].dtype == "category"
    np.testing.assert_allclose(rows.content["b"], frame["b"])
    assert rows.classes == rows.values == ["cat", "dog"]
    assert labels(rows) == frame["label"].tolist()
    assert rows.checked.tolist() == [True] * 4 + [False] * 8
    assert rows.names == [str(i) for i in range(12)]
    assert rows.used.tolist() == list(range(12))
    assert rows.skipped.empty
    assert list(rows.skipped) == ["row", "name", "reason"]
    assert rows.note == "Content: 4 columns (a, b, colour, old)."
    assert rows.title == ("data frame" if form == "frame" else path.name)


def test_the_index_and_the_table_of_a_frame_stay_the_users() -> None:
    frame = table().set_index(pd.Index([f"r{i}" for i in range(12)]))
    frame.loc["r5", "label"] = None
    rows = read(frame)
    assert rows.table is frame
    assert rows.names == [f"r{i}" for i in range(12) if i != 5]
    assert rows.skipped.to_dict("records") == [{"row": 5, "name": "r5", "reason": "no label"}]


def test_a_csv_of_a_spreadsheet_program_and_columns_that_are_numbers(tmp_path: Path) -> None:
    table().to_csv(tmp_path / "mine.csv", index=False, sep=";", encoding="utf-8-sig")
    rows = read(tmp_path / "mine.csv")
    assert list(rows.content) == ["a", "b"]
    assert rows.classes == ["cat", "dog"]
    cells = [png(i) for i in range(12)]
    frame = pd.DataFrame({0: ["cat", "dog"] * 6, 1: cells})
    rows = read(frame, label=0, image=1, checked=[True] * 4 + [False] * 8)
    assert [int(p[0, 0]) for p in rows.content] == list(range(12))
    assert rows.label == 0
    assert frame[1].tolist() == cells  # the user's own frame is not changed
    assert rows.table[1].tolist() == rows.names == [str(i) for i in range(12)]


def arrays(n: int = 12) -> dict[str, Any]:
    return {
        "x": RNG.integers(0, 256, (n, 5, 4), dtype=np.uint8),
        "y": np.arange(n) % 3,
        "checked": np.arange(n) < 6,
        "truth": (np.arange(n) + 1) % 3,
    }


@pytest.mark.parametrize("form", ["npz", "dict", "tuple"])
def test_arrays(tmp_path: Path, form: str) -> None:
    parts = arrays()
    np.savez(tmp_path / "mine.npz", **parts)
    given_as = {"npz": tmp_path / "mine.npz", "dict": parts, "tuple": (parts["x"], parts["y"], parts["checked"])}
    rows = read(given_as[form])
    assert rows.kind == "images"
    np.testing.assert_array_equal(rows.content, parts["x"])
    assert rows.classes == ["0", "1", "2"]
    assert rows.values == [0, 1, 2]
    assert rows.y.tolist() == parts["y"].tolist()
    assert rows.checked.tolist() == parts["checked"].tolist()
    assert ("truth" in rows.table) == (form != "tuple")


def test_an_npz_with_class_names_and_row_names() -> None:
    parts = arrays() | {"classes": np.array(["zebra", "ant", "bee", "unused"]), "names": [f"n{i}" for i in range(12)]}
    rows = read(parts)
    assert rows.classes == ["zebra", "ant", "bee"]  # in the order of their numbers, and only those that occur
    assert labels(rows) == [["zebra", "ant", "bee"][i % 3] for i in range(12)]
    assert rows.names == [f"n{i}" for i in range(12)]
    assert rows.table["truth"].tolist() == [["zebra", "ant", "bee"][(i + 1) % 3] for i in range(12)]


def test_arrays_of_numbers_are_embeddings_and_rows_with_nan_are_skipped() -> None:
    x = RNG.normal(size=(12, 3)).astype(np.float16)
    x[7, 1] = np.nan
    rows = read(arrays() | {"x": x})
    assert rows.kind == "embeddings"
    assert rows.content.dtype == np.float32
    np.testing.assert_array_equal(rows.content, np.delete(x, 7, 0).astype(np.float32))
    assert rows.skipped["reason"].tolist() == ["NaN or infinite in the embeddings"]
    assert read(arrays() | {"x": arrays()["x"][..., None]}).content.shape == (12, 5, 4)
    assert read(arrays() | {"x": np.zeros((12, 5, 4, 3), np.uint8)}).content.shape == (12, 5, 4, 3)


@pytest.mark.parametrize("named", [True, False])
def test_a_folder_of_images(tmp_path: Path, named: bool) -> None:
    home = folder(tmp_path / "pets")
    paint(home / "cat" / "more" / "9.PNG", 7)
    (home / "cat" / "notes.txt").write_text("x")
    (home / ".git").mkdir()
    paint(home / ".git" / "x.png")
    listed = tmp_path / "checked.txt"
    listed.write_text("cat/0.png\n./dog/1.png\n\n9.PNG\ncat/0.png\n" if named else "0\n4\n6\n")
    rows = read(str(home), checked=str(listed))
    assert rows.kind == "images"
    assert rows.title == "pets"
    assert rows.names == [f"cat/{i}.png" for i in range(4)] + ["cat/more/9.PNG"] + [f"dog/{i}.png" for i in range(4)]
    assert labels(rows) == ["cat"] * 5 + ["dog"] * 4
    assert np.flatnonzero(rows.checked).tolist() == [0, 4, 6]
    assert [int(p[0, 0]) for p in rows.content] == [0, 1, 2, 3, 7, 100, 101, 102, 103]
    assert rows.content[0].shape == (5, 6)
    assert rows.warnings == ["1 files of the folder are not images by their suffix and were left out."]


@pytest.mark.parametrize("below", [True, False])
def test_a_second_folder_of_checked_images(tmp_path: Path, below: bool) -> None:
    home = folder(tmp_path / "pets")
    second = (home if below else tmp_path) / "verified"
    paint(second / "cat" / "1.png", 1)  # the same image: that row is checked
    paint(second / "dog" / "1.png", 200)  # another image of that name: a row of its own
    paint(second / "dog" / "new.png", 201)
    rows = read(home, checked=second)
    assert rows.classes == ["cat", "dog"]
    assert len(rows.y) == 10
    marked = {rows.names[i]: int(rows.content[i][0, 0]) for i in np.flatnonzero(rows.checked)}
    assert marked == {"cat/1.png": 1, "verified/dog/1.png": 200, "verified/dog/new.png": 201}
    assert labels(rows)[-2:] == ["dog", "dog"]
    assert "1 checked images have the path of an image in pets, but other bytes" in rows.warnings[0]


@pytest.mark.parametrize("encoded", [True, False])
def test_a_hugging_face_data_set(tmp_path: Path, encoded: bool) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    files = [str(paint(tmp_path / f"{i}.png", i)) for i in range(8)]
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["zoo", "ant"]),
            "checked": datasets.Value("bool"),
        }
    )
    cells = [{"bytes": png(i), "path": None} for i in range(8)] if encoded else files
    columns = {"image": cells, "label": [0, 1] * 3 + [-1, 1], "checked": [True] * 3 + [False] * 5}
    data = datasets.Dataset.from_dict(columns, features=features)
    rows = read(data)
    assert rows.kind == "images"
    assert rows.classes == ["zoo", "ant"]
    assert labels(rows) == ["zoo", "ant"] * 3 + ["ant"]
    assert [int(p[0, 0]) for p in rows.content] == [0, 1, 2, 3, 4, 5, 7]
    assert rows.skipped["row"].tolist() == [6]
    assert rows.table["image"].tolist() == ([str(i) for i in range(8)] if encoded else files)
    with pytest.raises(TypeError, match=r"choose one, such as data\['train'\]"):
        read(datasets.DatasetDict({"train": data}))
    with pytest.raises(TypeError, match="without streaming"):
        read(data.to_iterable_dataset())


def test_images_in_a_parquet_file(tmp_path: Path) -> None:
    cells = [{"bytes": png(i), "path": f"{i}.png"} for i in range(12)]
    table(photo=cells).to_parquet(tmp_path / "mine.parquet")
    rows = read(tmp_path / "mine.parquet")
    assert rows.kind == "images"
    assert [int(p[0, 0]) for p in rows.content] == list(range(12))
    assert rows.names == rows.table["photo"].tolist() == [f"{i}.png" for i in range(12)]


# --- what is looked at -----------------------------------------------------------------------------------------

REVIEW = [f"what a film number {i} was in my town" for i in range(12)]


def test_a_text_column_is_chosen_and_named() -> None:
    rows = read(table(review=REVIEW))
    assert (rows.kind, rows.content) == ("text", REVIEW)
    assert rows.note == "Content: the text of column review. Left out: a, b."
    assert read(table(opinion=REVIEW)).kind == "text"  # the only column of several words
    assert read(table(opinion=REVIEW, review=REVIEW)).note.startswith("Content: the text of column review.")
    assert read(table(opinion=REVIEW, other=REVIEW), text="other").note == "Content: the text of column other."
    with pytest.raises(ValueError, match="opinion, other all look like text; choose one with text="):
        read(table(opinion=REVIEW, other=REVIEW))
    assert read(table(opinion=REVIEW), columns=["a"]).kind == "table"


def test_empty_texts_are_skipped(tmp_path: Path) -> None:
    frame = table(text=REVIEW)
    frame.loc[5, "text"], frame.loc[6, "text"], frame.loc[7, "text"] = "  ", None, "NA"
    frame.to_csv(tmp_path / "mine.csv", index=False)
    rows = read(tmp_path / "mine.csv", text="text")
    assert rows.skipped["row"].tolist() == [5, 6]
    assert set(rows.skipped["reason"]) == {"the text is empty"}
    assert "NA" in rows.content


def test_columns_that_are_no_features_are_left_out_with_a_word() -> None:
    frame = table(
        id=np.arange(12) + 40,
        user_id=RNG.permutation(1000)[:12],
        code=[f"x{i}" for i in range(12)],
        label_text=["Katze", "Hund"] * 6,
        when=[object()] * 12,
        truth=["dog", "cat"] * 6,
        label_score=0.5,
        void=[None] * 12,
    )
    rows = read(frame)
    assert list(rows.content) == ["a", "b"]
    assert rows.note == (
        "Content: 2 columns (a, b). Left out: id (numbers the rows), user_id (numbers the rows), code (different in "
        "nearly every row), label_text (repeats label), when (neither numbers nor text), void (empty)."
    )
    assert list(read(frame, columns=["user_id", "code"]).content) == ["user_id", "code"]  # who names them gets them
    with pytest.raises(ValueError, match=r"no column is left .*id \(numbers the rows\)\. Name feature columns"):
        read(frame[["id", "label", "checked"]])


def test_rows_with_empty_cells_are_used_and_a_missing_category_is_one() -> None:
    frame = table(colour=["red", None, "blue"] * 4, whole=pd.array([1, 2, 3] * 4, dtype="Int64"))
    frame.loc[5, "a"] = np.inf
    frame.loc[5, "b"] = np.nan
    frame.loc[6, "whole"] = pd.NA
    rows = read(frame)
    assert rows.skipped.empty
    assert rows.content["colour"].astype(str).tolist()[:3] == ["red", "", "blue"]
    assert rows.content[["a", "b", "whole"]].isna().sum().tolist() == [1, 1, 1]
    made = features(rows)
    assert np.isfinite(made.x).all()
    assert made.x.shape == (12, 3 * 2 + 3)  # each column of numbers, and where it is empty


# --- images ----------------------------------------------------------------------------------------------------


def odd_images(home: Path) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Files of many modes, with the shape and the first pixel that they should have."""
    home.mkdir()
    grey = np.full((5, 6), 200, np.uint8)
    colour = np.full((5, 6, 3), [10, 20, 30], np.uint8)
    clear = Image.new("RGBA", (6, 5), (0, 0, 0, 0))
    palette = Image.fromarray(colour).convert("P", palette=Image.Palette.ADAPTIVE)
    oriented = Image.Exif()
    oriented[0x0112] = 6
    Image.fromarray(grey).save(home / "grey.png")
    Image.fromarray(grey).convert("1").save(home / "bit.png")
    Image.fromarray(colour).save(home / "colour.bmp")
    clear.save(home / "clear.png")
    clear.convert("LA").save(home / "clear_grey.png")
    palette.save(home / "palette.gif")
    Image.fromarray(np.full((5, 6), 65535, np.uint16)).save(home / "sixteen.png")
    Image.fromarray(np.full((5, 6), 0.5, np.float32)).save(home / "fraction.tiff")
    Image.new("CMYK", (6, 5), (0, 0, 0, 255)).save(home / "print.jpg")
    Image.fromarray(grey).save(home / "turned.jpg", exif=oriented)
    Image.new("L", (1000, 500), 9).save(home / "large.jpg")
    Image.new("RGB", (3, 900), (9, 9, 9)).save(home / "thin.webp")
    return {
        "grey.png": ((5, 6), 200), "bit.png": ((5, 6), 255), "colour.bmp": ((5, 6, 3), [10, 20, 30]),
        "clear.png": ((5, 6, 3), [255] * 3), "clear_grey.png": ((5, 6), 255), "palette.gif": ((5, 6, 3), [10, 20, 30]),
        "sixteen.png": ((5, 6), 255), "fraction.tiff": ((5, 6), 128), "print.jpg": ((5, 6, 3), [0] * 3),
        "turned.jpg": ((6, 5), 200), "large.jpg": ((128, 256), 9), "thin.webp": ((256, 1, 3), [9] * 3),
    }  # fmt: skip


def test_images_of_every_mode_and_size_are_converted(tmp_path: Path) -> None:
    due = odd_images(tmp_path / "photos")
    frame = table(file=list(due))
    frame.to_csv(tmp_path / "mine.csv", index=False)
    rows = read(tmp_path / "mine.csv", root=tmp_path / "photos")
    assert rows.skipped.empty
    assert rows.names == list(due)
    assert rows.note == "Content: the images of column file. Left out: a, b."
    for picture, (name, (shape, value)) in zip(rows.content, due.items(), strict=True):
        assert picture.dtype == np.uint8
        assert picture.shape == shape, name
        np.testing.assert_allclose(picture[0, 0].astype(int), value, atol=2, err_msg=name)


def test_images_that_cannot_be_read_are_listed_together(tmp_path: Path) -> None:
    names = [f"{i}.png" for i in range(20)]
    for i, name in enumerate(names):
        paint(tmp_path / "in" / name, i)
    (tmp_path / "in" / "4.png").write_bytes(b"no image")
    (tmp_path / "in" / "5.png").write_bytes(png()[:-20])
    (tmp_path / "in" / "6.png").unlink()
    (tmp_path / "in" / "9.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 5\n")
    Image.fromarray(np.full((2, 2), -1.0, np.float32)).save(tmp_path / "in" / "10.tiff")
    paint(tmp_path / "secret.png")
    names[7], names[8], names[10] = "../secret.png", "", "10.tiff"
    rows = read(table(20, path=names), image="path", root=tmp_path / "in")
    reasons = dict(zip(rows.skipped["row"], rows.skipped["reason"], strict=True))
    assert list(reasons) == [4, 5, 6, 7, 8, 9, 10]
    assert all(reasons[row].startswith("unreadable image: ") for row in (4, 5, 9, 10))
    assert "grey values go from -1" in reasons[10]
    assert "'6.png' does not exist" in reasons[6]
    assert "'../secret.png' is not in the folder" in reasons[7]
    assert reasons[8] == "no image is named"
    assert [int(p[0, 0]) for p in rows.content] == [0, 1, 2, 3, *range(11, 20)]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # the reader does not depend on the filter
def test_an_image_of_absurd_size_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)
    for i in range(12):
        paint(tmp_path / f"{i}.png", i, (10, 5) if i == 8 else (6, 5))
    rows = read(table(file=[f"{i}.png" for i in range(12)]), root=tmp_path)
    assert rows.skipped["row"].tolist() == [8]
    assert "decompression bomb" in rows.skipped["reason"][0]


# --- labels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_as", "classes", "values"),
    [
        ([10, 9, 2] * 4, ["2", "9", "10"], [2, 9, 10]),
        (["10", "9", "2"] * 4, ["2", "9", "10"], ["2", "9", "10"]),
        ([True, False] * 6, ["False", "True"], [False, True]),
        ([1.0, 2.0, np.nan] * 4, ["1", "2"], [1.0, 2.0]),
        (pd.Categorical(["b", "a"] * 6, categories=["b", "a"]), ["a", "b"], ["a", "b"]),
        (["x", "y", "", "  ", None, "y"] * 2, ["x", "y"], ["x", "y"]),
    ],
)
def test_labels_of_every_type(given_as: Any, classes: list[str], values: list[Any]) -> None:
    frame = table(label=given_as)
    rows = read(frame)
    assert rows.classes == classes
    assert rows.values == values
    assert [rows.values[c] for c in rows.y] == [frame["label"].iloc[row] for row in rows.used]
    missing = frame["label"].isna() | (frame["label"].astype(str).str.strip() == "")
    assert rows.skipped["row"].tolist() == np.flatnonzero(missing).tolist()


def test_labels_of_a_csv_are_taken_literally(tmp_path: Path) -> None:
    table(label=["NA", "007", "7"] * 4).to_csv(tmp_path / "mine.csv", index=False)
    rows = read(tmp_path / "mine.csv")
    assert rows.classes == ["007", "7", "NA"]
    assert rows.warnings == ["The class 'NA' is taken for a class of that name; a missing label is an empty cell."]


def test_classes_that_differ_by_white_space_or_case_are_not_merged_but_named() -> None:
    rows = read(table(label=["cat", "Cat ", "dog"] * 4))
    assert rows.classes == ["Cat ", "cat", "dog"]
    assert rows.warnings == ["The classes 'Cat ' and 'cat' differ only by case or white space; they were not merged."]


CELLS = st.one_of(
    st.none(),
    st.just(""),
    st.just(" "),
    st.sampled_from(["cat", "dog", "NA", "7", "a,b", 'q"t', "é\n"]),
    st.text(max_size=3),
)


@settings(max_examples=60)
@given(st.lists(st.tuples(CELLS, st.one_of(st.just(1.5), st.floats())), min_size=1, max_size=12), st.booleans())
def test_used_and_skipped_partition_the_rows_and_y_decodes_to_the_given_labels(
    extra: list[tuple[Any, float]], as_array: bool
) -> None:
    """Fifty sound rows (so that most can be used), and others with whatever label and number."""
    sound = [("cat" if i % 2 else "dog", float(i % 7)) for i in range(50)]
    lines = [line for pair in zip(extra, sound, strict=False) for line in pair] + sound[len(extra) :]
    marks = np.isin(np.arange(len(lines)), [1, 3, len(lines) - 1, len(lines) - 2])
    frame = pd.DataFrame({"label": [a for a, _ in lines], "v": [b for _, b in lines], "u": [0.5] * len(lines)})
    rows = read(frame, checked=marks if as_array else pd.Series(marks))
    assert sorted([*rows.used, *rows.skipped["row"]]) == list(range(len(lines)))
    assert labels(rows) == [lines[row][0] for row in rows.used]
    assert rows.checked.tolist() == marks[rows.used].tolist()
    numbers = np.array([lines[row][1] for row in rows.used])
    np.testing.assert_array_equal(rows.content["v"], np.where(np.isfinite(numbers), numbers, np.nan))
    assert [int(name) for name in rows.names] == rows.used.tolist()
    for row in rows.skipped["row"]:
        name, _ = lines[row]
        assert name is None or not name.strip()


# --- checked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "marks",
    [
        ["yes", "No", "TRUE", "false", "", None] * 2,
        [1, 0, 1, 0, 0, 0] * 2,
        [1.0, 0.0, 1.0, np.nan, 0.0, np.nan] * 2,
        pd.array([True, False, True, None, False, None] * 2, dtype="boolean"),
    ],
)
@pytest.mark.parametrize("way", ["default", "column", "values"])
def test_checked_marks_of_every_type(tmp_path: Path, marks: Any, way: str) -> None:
    name = "seen" if way == "column" else "checked"
    frame = table(label=["cat", "dog", "dog"] * 4).drop(columns="checked").assign(**{name: marks})
    due = [True, False, True, False, False, False] * 2
    if way == "values":
        assert read(frame.drop(columns=name), checked=list(marks)).checked.tolist() == due
        return
    frame.to_csv(tmp_path / "mine.csv", index=False)
    for data in (frame, tmp_path / "mine.csv"):
        rows = read(data, checked=None if way == "default" else "seen")
        assert rows.checked.tolist() == due
        assert list(rows.content) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.txt", "r2\n r5 \n\nr2\n"),
        ("list.csv", "name,why\nr2,sure\nr5,\n"),
        ("list.csv", "File\nr2\nr5\n"),
        ("list.csv", ",name\n0,r2\n1,r5\n"),
        ("list.csv", "r2\nr5\n"),
        ("list.tsv", "x\trow\n1\t2\n2\t5\n"),
    ],
)
def test_a_list_of_checked_rows(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    frame = table().set_index(pd.Index([f"r{i}" for i in range(12)]))
    assert np.flatnonzero(read(frame, checked=tmp_path / name).checked).tolist() == [2, 5]


def test_all_entries_of_a_list_that_match_nothing_or_too_much_are_named(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("cat/0.png\ngone.png\n0.png\n99\n")
    with pytest.raises(ValueError, match=r"2 match no row: gone\.png, 99; 1 match several rows: 0\.png\. Correct"):
        read(folder(tmp_path / "pets"), checked=tmp_path / "list.txt")
    # where rows are called by numbers, a number is never a position
    (tmp_path / "list.txt").write_text("3\n")
    with pytest.raises(ValueError, match="1 match no row: 3"):
        read(table().set_index(pd.Index(range(100, 112))), checked=tmp_path / "list.txt")
    (tmp_path / "list.csv").write_text("who,why\n1,2\n")
    with pytest.raises(
        ValueError, match="has the columns who, why; the one that lists the checked rows is called name"
    ):
        read(table(), checked=tmp_path / "list.csv")


# --- embeddings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_file", [True, False])
def test_embeddings_are_the_content_and_the_rest_is_shown(tmp_path: Path, as_file: bool) -> None:
    x = RNG.normal(size=(12, 3))
    x[5, 0] = np.nan
    np.save(tmp_path / "x.npy", x)
    names = [paint(tmp_path / f"{i}.png", i).name for i in range(12)]
    (tmp_path / names[8]).unlink()
    frame = table(file=names)
    frame.loc[6, "label"] = None
    rows = read(frame, embeddings=tmp_path / "x.npy" if as_file else x, root=tmp_path)
    assert (rows.kind, rows.shown_kind) == ("embeddings", "images")
    assert rows.used.tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]
    np.testing.assert_array_equal(rows.content, x[rows.used])
    assert [None if p is None else int(p[0, 0]) for p in rows.shown] == [0, 1, 2, 3, 4, 7, None, 9, 10, 11]
    assert rows.skipped["reason"].tolist() == ["NaN or infinite in the embeddings", "no label"]
    assert rows.note == "Content: embeddings of 3 numbers."
    assert rows.warnings == ["1 images could not be read; their rows are judged by embeddings alone."]
    assert read(table(text=REVIEW), embeddings=np.ones((12, 2))).shown == REVIEW
    bare = read(table()[["label", "checked"]], embeddings=np.ones((12, 2), int))
    assert (bare.kind, bare.shown, bare.shown_kind) == ("embeddings", None, None)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: np.save(path, np.ones((11, 2))), r"has 11 rows, but the table has 12; compute one row"),
        (lambda path: np.save(path, np.ones(12)), r"float64 of shape \(12,\); N × D numbers"),
        (lambda path: np.save(path, np.array(["a"] * 12)[:, None]), r"<U1 of shape \(12, 1\)"),
        (
            lambda path: np.save(path, np.array([{}] * 12), allow_pickle=True),
            r"x.npy (is damaged|holds pickled objects)",
        ),
        (lambda path: path.write_bytes(b"nonsense"), r"x\.npy (is damaged|holds pickled)"),
        (
            lambda path: [np.savez(path.with_suffix(".npz"), [3]), path.with_suffix(".npz").rename(path)],
            r"several arrays; write one array with numpy\.save",
        ),
        (lambda path: None, r"there is no file .*x\.npy with embeddings"),
    ],
)
def test_refused_embeddings(tmp_path: Path, make: Any, sentence: str) -> None:
    make(tmp_path / "x.npy")
    with pytest.raises((ValueError, FileNotFoundError), match=f"^bilevel-clean: .*{sentence}"):
        read(table(), embeddings=tmp_path / "x.npy")


# --- refusals --------------------------------------------------------------------------------------------------


def many(n: int, values: Any) -> pd.DataFrame:
    return pd.DataFrame({"v": [0.0, 1.0] * (n // 2), "label": values, "checked": [True, True] + [False] * (n - 2)})


@pytest.mark.parametrize(
    ("frame", "options", "sentence"),
    [
        (table(label="cat"), {}, r"only one class, 'cat': nothing can be mislabelled"),
        (table(checked=True), {}, r"all rows are checked, so there is nothing to judge"),
        (table(checked=[1, 0] * 6), {}, r"all 6 checked rows are of one class, 'cat'; check rows of every"),
        (
            many(80, np.linspace(0, 1, 80)),
            {},
            r"80 different numbers, some with decimals in 80 rows; it looks like numbers to regress",
        ),
        (
            many(80, [f"c{i // 1.5}" for i in range(80)]),
            {},
            r"there are \d+ classes in 80 rows, so most classes have one",
        ),
        (many(80, range(80)), {}, r"there are 80 classes in 80 rows"),
        (table().rename(columns={"label": "Labels"}), {}, r"no column 'label'.*a, b, Labels, checked.*label='Labels'"),
        (table().rename(columns={"label": "target"}), {}, r"Did you mean label='target'\?"),
        (table(), {"label": "zzz"}, r"no column 'zzz'.*Did you mean label='label'\?"),
        (table().rename(columns={"label": "q"}), {}, r"no column 'label'\. .*Name one of them with label=\."),
        (table(), {"checked": "chekced"}, r"neither a column nor a file.*Did you mean checked='checked'"),
        (table(checked="maybe"), {}, r"the column checked holds maybe in 12 rows; true, yes, x and 1 mean"),
        (table(), {"checked": [True, False]}, r"checked has 2 entries, but the table has 12 rows"),
        (
            table(),
            {"checked": pd.Series([True] * 12, index=range(1, 13))},
            r"index of checked is not that of the table",
        ),
        (table(), {"columns": ["a", "x", "y"]}, r"no column x and no column y\. The columns are a, b, label, checked"),
        (table(), {"columns": []}, r"columns is empty"),
        (table(), {"columns": ["a", "label"]}, r"label holds the labels or the checked marks; leave it out"),
        (table(d=[object()] * 12), {"columns": ["d"]}, r"columns d hold neither numbers nor text"),
        (table(), {"text": "a", "columns": ["b"]}, r"text and columns were given; the features are one of them"),
        (table(), {"image": "pth"}, r"no column 'pth'"),
        (table(), {"root": "nowhere"}, r"root='nowhere' is not a folder"),
        (table(label=[[1], [2]] * 6), {}, r"column label does not hold one label in each row"),
        (table().iloc[:0], {}, r"data frame is empty"),
        (table()[[]], {}, r"data frame is empty"),
        (pd.concat([table(), table()[["a"]]], axis=1), {}, r"more than one column named a; rename"),
        (
            table(a=[np.nan] * 7 + [1.0] * 5),
            {"columns": ["a"]},
            r"7 of 12 rows can't be used(?s:.*)0: every column is empty(?s:.*)4: every column is empty\n",
        ),
        (table(label=[None] * 10 + ["cat", "dog"]), {}, r"10 of 12 rows can't be used(?s:.*)4: no label\nCorrect"),
        (table(), {"embeddings": np.ones((3, 2))}, r"embeddings has 3 rows, but the table has 12"),
        (pd.concat({"x": table()}, axis=1), {}, r"several levels"),
    ],
)
def test_refused_tables(frame: pd.DataFrame, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=f"^bilevel-clean: .*{sentence}"):
        read(frame, **options)


@pytest.mark.parametrize(
    ("name", "raw", "sentence"),
    [
        ("gone.csv", None, r"gone\.csv does not exist; give \.csv"),
        (
            "mine.docx",
            b"x",
            r"ends in '\.docx'; what can be read is \.csv, \.tsv, \.xlsx, \.jsonl, \.parquet, \.npz, or a",
        ),
        ("mine.xlsx", b"x", r"damaged, or not a \.xlsx file"),
        ("mine.jsonl", b"{", r"damaged, or not a \.jsonl file"),
        ("mine", b"x", r"ends in 'no suffix'"),
        ("mine.csv", b"", r"is empty; it needs a header"),
        ("mine.csv", b"label,checked,a\n", r"is empty"),
        ("mine.csv", b"label,a,a\ncat,1,2\n", r"more than one column named a; rename"),
        ("mine.csv", b"label,a\ncat,1,2\n", r"as many cells in each line"),
        ("mine.csv", b"label,a\ncat,1\ndog,1,2\n", r"as many cells in each line"),
        ("mine.csv", b"label,a\n\x81\xfe,1\n", r"is not a table with"),
        ("mine.parquet", b"PAR1 nonsense", r"damaged, or not a \.parquet file"),
        ("mine.npz", b"nonsense", r"is damaged, or not an \.npz"),
    ],
)
def test_refused_files(tmp_path: Path, name: str, raw: bytes | None, sentence: str) -> None:
    if raw is not None:
        (tmp_path / name).write_bytes(raw)
    with pytest.raises((ValueError, FileNotFoundError), match=f"^bilevel-clean: .*{sentence}"):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": None}, r"has no x, but y, checked, truth"),
        ({"y": np.arange(11)}, r"y of arrays has shape \(11,\), but x has 12 rows"),
        ({"checked": np.ones((12, 1))}, r"checked of arrays has shape \(12, 1\)"),
        ({"x": np.zeros((12, 5, 4))}, r"are float64; make them uint8"),
        ({"x": np.zeros((12, 5, 4, 2), np.uint8)}, r"uint8 of shape \(12, 5, 4, 2\)"),
        ({"x": np.array(["a"] * 12)}, r"Texts can be given as a column"),
        ({"x": [[1], [1, 2]]}, r"x of arrays is not one array"),
        ({"classes": ["a", "b"]}, r"y of arrays holds 2, but classes has only the 2 names of 0 to 1"),
        (
            {"classes": ["a", "b", "c"], "y": np.ones(12)},
            r"with classes, y of arrays holds numbers from 0; got float64",
        ),
    ],
)
def test_refused_arrays(change: dict[str, Any], sentence: str) -> None:
    parts = {key: value for key, value in (arrays() | change).items() if value is not None}
    with pytest.raises(ValueError, match=f"^bilevel-clean: .*{sentence}"):
        read(parts)


def test_other_refusals(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=np.array([{}, {}], dtype=object), y=np.arange(2))
    with pytest.raises(ValueError, match=r"^bilevel-clean: .*mine\.npz holds pickled objects, which are never loaded"):
        read(tmp_path / "mine.npz")
    with pytest.raises(ValueError, match="text names columns of a table; arrays has x"):
        read(arrays(), text="a")
    with pytest.raises(TypeError, match=r"^bilevel-clean: data is a path .* got int"):
        read(3)
    with pytest.raises(ValueError, match="goes with data that are a folder as well"):
        read(table(), checked=tmp_path)
    (tmp_path / "void").mkdir()
    with pytest.raises(ValueError, match="void has no images; give one with a folder for each class"):
        read(tmp_path / "void")
    with pytest.raises(ValueError, match=r"the folder of checked images .* has no images"):
        read(folder(tmp_path / "pets"), checked=tmp_path / "void")
    with pytest.raises(ValueError, match="root goes with image paths in a table; pets has the images"):
        read(tmp_path / "pets", root=tmp_path)
    assert not read(tmp_path / "pets").checked.any()
    for name in ("train", "test"):
        folder(tmp_path / "both" / name)
    with pytest.raises(ValueError, match=r"are test, train, which are splits and not classes; give one of them"):
        read(tmp_path / "both")
    for i in range(3):
        paint(tmp_path / "flat" / f"{i}.png")
    (tmp_path / "list.txt").write_text("0.png")
    with pytest.raises(ValueError, match=r"3 of 3 rows can't be used(?s:.*)the image is not in the folder of a class"):
        read(tmp_path / "flat", checked=tmp_path / "list.txt")


# --- the fingerprint -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["images", "list", "text", "table", "embeddings"])
def test_the_fingerprint_changes_with_every_part(tmp_path: Path, kind: str) -> None:
    def fresh() -> Rows:
        if kind == "text":
            return read(table(b=0.0, text=REVIEW))
        if kind == "table":
            return read(table(b=0.0, c=["x", "y", "z"] * 4))
        if kind == "list":
            return read(table(b=0.0, file=[paint(tmp_path / f"{i}.png", i).name for i in range(12)]), root=tmp_path)
        x = np.arange(240).reshape(12, 5, 4)
        return read(arrays() | {"x": x.astype(np.uint8) if kind == "images" else x.reshape(12, 20) / 7})

    rows = fresh()
    other = fresh().content
    if kind == "text":
        other[3] = other[3][:-1] + "x"
    elif kind == "table":
        other.loc[3, "c"] = "z" if other.loc[3, "c"] != "z" else "x"
    else:
        other[3] = other[3] + 1
    y, checked = rows.y.copy(), rows.checked.copy()
    y[5], checked[5] = (y[5] + 1) % 2, not checked[5]
    renamed = [*rows.classes[:-1], "other"]
    prints = [
        fingerprint(r)
        for r in (
            rows, replace(rows, content=other), replace(rows, y=y), replace(rows, checked=checked),
            replace(rows, classes=renamed),
        )
    ]  # fmt: skip
    assert len(set(prints)) == 5
    assert fingerprint(fresh()) == prints[0]
    assert len(prints[0]) == 64


def test_the_fingerprint_tells_where_a_text_ends() -> None:
    rows = read(table(text=REVIEW))
    moved = [REVIEW[0] + "x", REVIEW[1][1:], *REVIEW[2:]]
    assert fingerprint(replace(rows, content=moved)) != fingerprint(rows)
    split = [["ab", "c", *REVIEW[2:]], ["a", "bc", *REVIEW[2:]]]
    assert len({fingerprint(replace(rows, content=texts)) for texts in split}) == 2


def test_sixty_thousand_images_are_neither_copied_nor_hashed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    n, made = 60_000, hashlib.sha256
    x = np.zeros((n, 28, 28), np.uint8)
    rows = read({"x": x, "y": np.arange(n) % 10, "checked": np.arange(n) < 300})
    assert rows.content is x  # no copy of what is all used
    expected, sizes = fingerprint(rows), []

    class Counted:
        def __init__(self, data: bytes) -> None:
            self.digest = made(data)

        def update(self, data: Any) -> None:
            sizes.append(memoryview(data).nbytes)
            self.digest.update(data)

        def hexdigest(self) -> str:
            return self.digest.hexdigest()

    monkeypatch.setattr(hashlib, "sha256", Counted)
    assert fingerprint(rows) == expected
    assert x.nbytes in sizes
    assert len(sizes) < 10
