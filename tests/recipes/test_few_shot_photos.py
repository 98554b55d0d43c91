"""Few-shot on a folder of one's own: reading, the split into classes, training, the encoder as a file."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from photo_folders import fails, noise, write_digits
from PIL import Image
from safetensors.torch import save

from bilevel_recipes.few_shot import Episodes, Images, load_encoder, photos
from bilevel_recipes.few_shot.__main__ import main, parse
from bilevel_recipes.few_shot.augment import Augment
from bilevel_recipes.few_shot.collection import (
    labelled,
    look,
    make_folder,
    own_name,
    read,
    resize,
    unlabelled,
)
from bilevel_recipes.few_shot.encoder import Encoder, Head, Spec, build_body, check_size, save_encoder
from bilevel_recipes.few_shot.evaluate import Score
from bilevel_recipes.few_shot.photos import gather, split_classes
from bilevel_recipes.few_shot.sources import Part

QUICK = ["--outer-steps", "10", "--images", "40", "--test-tasks", "20", "--quiet", "--threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data") / "photos", range(6), 12)


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "out"
    assert main([str(folder), *QUICK, "--out", str(out)]) == 0
    return out


# --- the encoder as a file -------------------------------------------------------------------------------------


def test_a_run_leaves_an_encoder_that_two_lines_load(run: Path, folder: Path) -> None:
    encoder = load_encoder(run)
    assert not encoder.training
    files = sorted((folder / "digit 0").glob("*.png"))[:3]
    x = encoder.prepare(files)
    assert x.shape == (3, 1, 8, 8)
    pixels = np.stack([np.asarray(Image.open(f)) for f in files])
    about = json.loads((run / "encoder.json").read_text())
    torch.testing.assert_close(x[:, 0] * about["deviation"][0] + about["mean"][0], torch.from_numpy(pixels).float())
    assert torch.equal(encoder.prepare(list(pixels)), x)
    assert torch.equal(encoder.prepare([Image.open(f) for f in files]), x)
    assert encoder(x).shape == (3, 64)
    np.testing.assert_array_equal(encoder.encode(files), encoder(x).numpy())
    assert about["architecture"] == "conv4"
    assert {part: sum(found.values()) for part, found in about["about"]["classes"].items()} == {
        "train": 48, "val": 0, "test": 24
    }  # fmt: skip
    assert about["about"]["command"].startswith("bilevel-fewshot ")
    assert 0 <= about["about"]["accuracy"]["after"]["head"]["mean"] <= 1
    assert about["about"]["versions"]["torch"] == torch.__version__


def test_colours_and_sizes_are_brought_to_those_of_the_encoder(run: Path) -> None:
    encoder = load_encoder(run)
    colour = noise(40, 30, 3)
    assert encoder.prepare([colour, noise(5, 9)]).shape == (2, 1, 8, 8)
    transparent = Image.fromarray(np.dstack([noise(8, 8, 3), np.zeros((8, 8), np.uint8)]))
    white = Image.new("L", (8, 8), 255)
    assert torch.equal(encoder.prepare([transparent]), encoder.prepare([white]))
    with pytest.raises(ValueError, match="a picture is a uint8 array of H × W or H × W × 3; got float64"):
        encoder.prepare([noise(8, 8) / 255])
    with pytest.raises(TypeError, match="got int"):
        encoder.prepare([3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="does not exist"):
        encoder.prepare([run / "nothing.png"])


def damaged(run: Path, tmp_path: Path) -> Path:
    for name in ("encoder.json", "encoder.safetensors"):
        shutil.copy(run / name, tmp_path / name)
    return tmp_path


def test_a_changed_byte_of_the_weights_is_refused(run: Path, tmp_path: Path) -> None:
    file = damaged(run, tmp_path) / "encoder.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"bilevel-fewshot: .* is damaged, or of another run"):
        load_encoder(tmp_path)


def test_weights_of_another_architecture_are_refused(run: Path, tmp_path: Path) -> None:
    about = json.loads((damaged(run, tmp_path) / "encoder.json").read_text())
    content = save({"0.weight": torch.zeros(2)})
    (tmp_path / "encoder.safetensors").write_bytes(content)
    about["sha256"] = hashlib.sha256(content).hexdigest()
    (tmp_path / "encoder.json").write_text(json.dumps(about))
    with pytest.raises(
        ValueError, match=r"not hold the weights that encoder\.json describes, of conv4 for images of 8"
    ):
        load_encoder(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "its format is 2, and this version reads 1"),
        ({"channels": 2}, "height, width and channels"),
        ({"height": 10**9}, "height, width and channels"),
        ({"height": 4096, "width": 4096}, "height, width and channels"),  # they would take 18 GB
        ({"architecture": "timm:vit", "height": 1025}, "height, width and channels"),
        ({"mean": ["x"]}, "have to be numbers"),
        ({"head": {"ways": 5}}, "it has no rates"),
        ({"head": 5}, "it holds no JSON object where one is needed"),
        ({"mean": [1.0, 2.0]}, "one for each channel"),
        ({"deviation": [0.0]}, "deviations have to be above 0"),
        ({"head": {"rates": [], "ways": 5}}, "rates at least 0"),
        ({"head": {"rates": [float("nan")], "ways": 5}}, "finite"),
        ({"head": {"rates": [0.4], "ways": 5, "features": "flat"}}, "features are one of sphere"),
        ({"surplus": 1}, "surplus"),
        ({"architecture": None}, "architecture is None"),
        ({"height": True}, "height, width and channels"),
        ({"head": {"rates": [0.4], "ways": 5.5}}, "ways are 5.5"),
        ({"mean": None}, "does not describe an encoder"),
    ],
)
def test_a_description_that_is_wrong_is_refused(run: Path, tmp_path: Path, change: dict, message: str) -> None:
    file = damaged(run, tmp_path) / "encoder.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError, match=message) as error:
        load_encoder(tmp_path)
    assert str(error.value).startswith("bilevel-fewshot: ")


def test_an_unknown_architecture_and_a_missing_file_are_refused(run: Path, tmp_path: Path) -> None:
    file = damaged(run, tmp_path) / "encoder.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architecture": "conv9"}))
    with pytest.raises(ValueError, match=r"no encoder 'conv9'; choose conv4.* torchvision:NAME"):
        load_encoder(tmp_path)
    for text in ("{", "[]", "[" * 100_000, "{}"):
        file.write_text(text)
        with pytest.raises(ValueError, match="does not describe an encoder"):
            load_encoder(tmp_path)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no encoder\.json; give the folder of a finished run"):
        load_encoder(tmp_path)


def test_an_encoder_comes_back_with_the_same_features(tmp_path: Path) -> None:
    body = build_body("conv4", (3, 16, 12), seed=3)
    with torch.no_grad():
        body(torch.randn(4, 3, 16, 12))  # BatchNorm's statistics are no longer those of the start
    encoder = Encoder(body, Spec("conv4", 16, 12, 3, [1.0, 2.0, 3.0], [4.0, 5.0, 6.0], Head([0.1], 5))).eval()
    save_encoder(tmp_path, encoder.body, encoder.spec)
    again = load_encoder(tmp_path)
    assert again.spec == encoder.spec
    pictures = [noise(20, 20, 3), noise(7, 40)]
    np.testing.assert_array_equal(again.encode(pictures), encoder.encode(pictures))


# --- reading ---------------------------------------------------------------------------------------------------


def test_the_split_is_by_class_and_by_seed() -> None:
    names = [f"class {i:02d}" for i in range(25)]
    parts = split_classes(names * 3, 0)
    assert [len(parts[part]) for part in ("train", "val", "test")] == [16, 4, 5]
    assert sorted(name for part in parts.values() for name in part) == names
    assert split_classes(names[::-1], 0) == parts
    assert split_classes(names, 1) != parts
    sizes = {n: [len(p) for p in split_classes(names[:n], 0).values()] for n in (2, 3, 4, 10, 12)}
    assert sizes == {2: [2, 0, 0], 3: [3, 0, 0], 4: [2, 0, 2], 10: [8, 0, 2], 12: [8, 2, 2]}


def test_a_csv_gives_what_the_folder_gives(folder: Path, tmp_path: Path) -> None:
    direct = labelled(folder)
    with open(tmp_path / "list.csv", "w", newline="") as handle:
        csv.writer(handle).writerows([("file", "label"), *zip(direct.names, direct.labels, strict=True), ("x.png", "")])
    listed = labelled(tmp_path / "list.csv", folder)
    assert (listed.names, listed.labels) == (direct.names, direct.labels)
    assert listed.skipped == [("x.png", "it has no label")]
    at = look(listed)
    assert (at.height, at.width, at.colour) == (8, 8, False)
    x, files = read(listed, lambda pictures: resize(pictures, at))
    assert x.shape == (72, 8, 8)
    np.testing.assert_array_equal(x[5], np.asarray(Image.open(folder / files.names[5])))


def test_unreadable_pictures_are_listed_and_left_out(tmp_path: Path) -> None:
    for c, label in enumerate("ab"):
        (tmp_path / label).mkdir()
        for i in range(3):
            Image.fromarray(noise(20 + i, 30, 3, seed=c)).save(tmp_path / label / f"{i}.png")
    (tmp_path / "a" / "broken.png").write_bytes(b"not a picture")
    (tmp_path / "loose.png").write_bytes(b"nor this")
    (tmp_path / "notes.txt").write_text("x")
    files = labelled(tmp_path)
    at = look(files)
    assert (at.height, at.width, at.colour) == (21, 21, True)
    x, usable = read(files, lambda pictures: resize(pictures, at))
    assert x.shape == (6, 21, 21, 3)
    assert usable.names == [f"{label}/{i}.png" for label in "ab" for i in range(3)]
    assert [name for name, _ in usable.skipped] == ["loose.png", "a/broken.png"]
    assert any("that were left out: 1. Pictures are files that end in .bmp" in words for words in usable.warnings)


def test_folders_behind_links_are_read_and_circles_end(tmp_path: Path) -> None:
    for name in ("photos/a", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
        Image.fromarray(noise(9, 9)).save(tmp_path / name / "1.png")
    (tmp_path / "photos" / "b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "photos" / "a" / "round").symlink_to(tmp_path / "photos")
    assert labelled(tmp_path / "photos").names == unlabelled(tmp_path / "photos").names == ["a/1.png", "b/1.png"]
    assert labelled(tmp_path / "photos").labels == ["a", "b"]


def test_rows_without_a_file_or_a_label_are_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("file,label\na.png,x\n ,y\nb.png,\n")
    found = labelled(tmp_path / "list.csv", folder)
    assert found.names == ["a.png"]
    assert found.skipped == [("row 2", "it names no file"), ("b.png", "it has no label")]


def test_pictures_of_earlier_predictions_are_no_data(tmp_path: Path) -> None:
    write_digits(tmp_path / "photos", range(2), 3)
    for home in ("", "runs/predict_query/"):
        (own := tmp_path / "photos" / f"{home}predictions_files").mkdir(parents=True)
        Image.fromarray(noise(8, 8)).save(own / "picture_000000.png")
    for found in (labelled(tmp_path / "photos"), unlabelled(tmp_path / "photos")):
        assert len(found.names) == 6
        assert "folders predictions_files that were left out: 2." in found.warnings[0]


def test_results_have_the_name_of_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photos.v2").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "photos.v2")
    (tmp_path / "list.csv").touch()
    monkeypatch.chdir(tmp_path / "photos.v2")
    assert [own_name(Path(path)) for path in (".", "../link/", "../list.csv", "/")] == [
        "photos.v2", "link", "list", "pictures"
    ]  # fmt: skip


def test_folders_that_can_not_be_written_to_are_refused_before_the_work(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write anywhere
    for command in ([folder], ["predict", "patches", folder, folder]):
        error = fails(capsys, *command, "--out", tmp_path / "deep" / "out")
        assert f"{tmp_path} can't be written to; see to its permissions, or give another --out" in error
    monkeypatch.undo()
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
    with pytest.raises(OSError, match=r"can't be made \(Read-only file system\); give another --out"):
        make_folder(tmp_path / "out")


def test_a_run_that_is_there_is_refused_before_pictures_are_read(
    run: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(photos, "gather", None)
    error = fails(capsys, folder, *QUICK, "--out", run)
    assert "holds a run; pass --resume to go on with it, or another --out" in error


def test_other_pictures_are_named_when_a_run_is_resumed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_digits(tmp_path / "other", range(5), 12)
    error = fails(capsys, tmp_path / "other", *QUICK, "--out", run, "--resume")
    assert "pictures: '72 of 6 classes, checksum " in error
    assert "then, '60 of 5 classes, checksum " in error


def test_training_that_did_not_help_is_said_to(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    means = iter([0.7, 0.7, 0.6, 0.7])

    def measure(*_: Any, **__: Any) -> dict[str, Score]:
        score = Score(next(means), 0.01)
        return {"head": score, "nearest mean": score}

    monkeypatch.setattr(photos, "_measure", measure)
    for out, said in (("same", True), ("better", False)):
        monkeypatch.setattr(photos, "_train", lambda m, *_: (m.encoder.spec.head, {}))
        assert main([str(folder), *QUICK, "--out", str(tmp_path / out)]) == 0
        printed = capsys.readouterr().out
        assert ("Training has not raised the accuracy" in printed) == said
        assert (
            "72 pictures. Classes: 4 for training, 0 for validation, 2 for test. Their turns by 90° make 16" in printed
        )


def test_folders_without_pictures_are_named(tmp_path: Path) -> None:
    for name in ("a", "b", "nothing", ".hidden"):
        (tmp_path / name).mkdir()
    for name in "ab":
        Image.fromarray(noise(9, 9)).save(tmp_path / name / "1.png")
    assert labelled(tmp_path).warnings == [f"These folders of {tmp_path} have no pictures: nothing."]


def test_a_picture_is_used_once_and_not_at_all_if_two_classes_have_it(tmp_path: Path) -> None:
    """Otherwise a class for training and one for test, or a task's two sets, could share it."""
    shared = noise(20, 30, 3)
    for label in "abc":
        (tmp_path / label).mkdir()
        for i in range(3):
            Image.fromarray(noise(20, 30, 3, seed=10 * ord(label) + i)).save(tmp_path / label / f"{i}.png")
    Image.fromarray(shared).save(tmp_path / "a" / "shared.bmp")
    Image.fromarray(shared).save(tmp_path / "b" / "shared.png")  # other bytes, the same picture
    shutil.copy(tmp_path / "c" / "1.png", tmp_path / "c" / "again.png")
    found = gather(parse([str(tmp_path), "--quiet"]))
    assert found.files.names == [f"{label}/{i}.png" for label in "abc" for i in range(3)]
    assert found.classes["train"] == {"a": 3, "b": 3, "c": 3}
    assert sum(images.items for images in found.images.values()) == 9 * 4  # with their turns
    assert found.files.skipped == [
        ("a/shared.bmp", "the same picture is in the class b, as b/shared.png"),
        ("b/shared.png", "the same picture is in the class a, as a/shared.bmp"),
        ("c/again.png", "the same picture as c/1.png"),
    ]


def test_large_photographs_are_reduced_to_84_pixels_unless_told_otherwise(tmp_path: Path) -> None:
    Image.fromarray(noise(300, 400, 3)).save(tmp_path / "one.jpg")
    files = unlabelled(tmp_path / "one.jpg")
    assert (look(files).height, look(files, 120).width) == (84, 120)


def test_mirroring_swaps_left_and_right_in_about_half_of_the_images() -> None:
    x = np.tile(np.arange(8, dtype=np.uint8), (40, 8, 1))
    part = Images(Part(x, np.repeat(np.arange(4), 10)), turns=1)
    (support, _), (query, _) = next(Episodes(part, 10, 4, 2, 5, augment=Augment(mirror=True)))
    rising = torch.cat([support, query], 1)[:, :, 0, 0].diff(dim=-1).sign()[..., 0]
    assert 0.4 < float((rising > 0).float().mean()) < 0.6
    assert set(rising.unique().tolist()) == {-1.0, 1.0}
    (plain, _), _ = next(Episodes(part, 10, 4, 2, 5))
    assert bool((plain[:, :, 0, 0].diff(dim=-1) > 0).all())


# --- training --------------------------------------------------------------------------------------------------


def test_grey_pictures_are_turned_and_many_colour_classes_are_mirrored(folder: Path, tmp_path: Path) -> None:
    found = gather(parse([str(folder), "--quiet"]))
    assert (found.augment, found.images["train"].classes, found.images["test"].classes) == ("rotate", 16, 2)
    for c in range(15):
        (tmp_path / f"{c:02d}").mkdir()
        for i in range(3):
            Image.fromarray(noise(10, 10, 3, seed=10 * c + i)).save(tmp_path / f"{c:02d}" / f"{i}.png")
    found = gather(parse([str(tmp_path), "--quiet"]))
    assert (found.augment, found.images["train"].classes) == ("flip", 10)
    assert found.encoder.spec.channels == 3
    assert len(found.classes["val"]) == 2
    assert gather(parse([str(tmp_path), "--quiet", "--augment", "none"])).augment == "none"


def test_a_stopped_training_goes_on_to_the_same_encoder(
    folder: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(folder), *QUICK, "--out", str(tmp_path)]
    real = photos.runs.save

    def stop(path: Path, state: dict) -> None:
        real(path, state)
        if state["step"] == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(photos.runs, "save", stop)
    assert main(command) == 130
    assert "--resume" in capsys.readouterr().err
    monkeypatch.undo()
    assert "pass --resume" in fails(capsys, *command)
    assert "outer_steps: 10 then, 20 now" in fails(capsys, *command, "--resume", "--outer-steps", "20")
    assert main([*command, "--resume"]) == 0
    assert (tmp_path / "encoder.safetensors").read_bytes() == (run / "encoder.safetensors").read_bytes()


def test_the_encoder_of_the_best_validation_step_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_digits(tmp_path / "photos", range(10), 4)
    others = write_digits(tmp_path / "others", range(2), 4, begin=4)
    for c in (0, 1):  # twelve classes, so that two are for validation
        shutil.copytree(others / f"digit {c}", tmp_path / "photos" / f"other {c}")
    real, seen = photos._measure, []

    def measured(m, part, c, head, tasks=None):
        found = real(m, part, c, head, tasks)
        if part == "val":
            seen.append({name: value.clone() for name, value in m.encoder.body.state_dict().items()})
            best = len(seen) == 3
            found = {"head": type(found["head"])(0.9 if best else 0.5, 0.1)}
        return found

    monkeypatch.setattr(photos, "_measure", measured)
    assert main([str(tmp_path / "photos"), *QUICK, "--out", str(tmp_path / "out")]) == 0
    about = json.loads((tmp_path / "out" / "encoder.json").read_text())["about"]
    assert about["taken_after_step"] == 3
    kept = load_encoder(tmp_path / "out").body.state_dict()
    assert all(torch.equal(kept[name], value) for name, value in seen[2].items())


def test_two_classes_are_trained_on_and_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_digits(tmp_path / "two", range(2), 6)
    assert main([str(tmp_path / "two"), *QUICK, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "was not measured" in printed
    assert "2 for training, 0 for validation, 0 for test" in printed
    assert load_encoder(tmp_path / "out").spec.about["accuracy"] is None


def test_a_frozen_model_keeps_its_weights_and_learns_rates(
    folder: Path, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--encoder", "torchvision:resnet18", "--weights", str(weights), "--frozen", "--image-size", "32"]
    assert main([str(folder), *QUICK, *flags, "--out", str(tmp_path / "out")]) == 0
    assert "It stays as it is; the rates of the heads were learnt." in capsys.readouterr().out
    encoder = load_encoder(tmp_path / "out")
    given = torch.load(weights, weights_only=True)
    assert all(torch.equal(value, given[name]) for name, value in encoder.body.state_dict().items())
    assert len(set(encoder.spec.head.rates)) == 5  # they have moved, each by itself
    assert all(0.1 < rate < 2 for rate in encoder.spec.head.rates)
    assert encoder.spec.mean == pytest.approx([255 * m for m in (0.485, 0.456, 0.406)])


def test_a_model_can_be_trained_from_its_weights(folder: Path, weights: Path, tmp_path: Path) -> None:
    flags = ["--encoder", "torchvision:resnet18", "--weights", str(weights), "--image-size", "32", "--outer-steps", "1"]
    assert main([str(folder), *QUICK, *flags, "--images", "20", "--out", str(tmp_path)]) == 0
    moved = load_encoder(tmp_path).body.state_dict()
    given = torch.load(weights, weights_only=True)
    change = (moved["layer1.0.conv1.weight"] - given["layer1.0.conv1.weight"]).abs().max()
    assert 0 < float(change) <= 1.01e-4  # one step of Adam, with the small rate of trained weights


# --- errors ----------------------------------------------------------------------------------------------------


def test_bad_input_gets_one_sentence(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere does not exist; give a folder" in fails(capsys, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "has no images" in fails(capsys, tmp_path / "empty")
    (tmp_path / "text.txt").write_text("x")
    assert "is neither a folder nor a .csv file; give a folder" in fails(capsys, tmp_path / "text.txt")
    (tmp_path / "wrong.csv").write_text("path,label\na.png,x\n")
    assert "has no column file; its columns are 'path', 'label'" in fails(capsys, tmp_path / "wrong.csv")
    (tmp_path / "bars.csv").write_text("file|label\na.png|x\n")
    assert "Cells are separated by commas or semicolons in a .csv" in fails(capsys, tmp_path / "bars.csv")
    (tmp_path / "short.csv").write_text("file,label\n")
    error = fails(capsys, tmp_path / "short.csv", "--root", folder)
    assert "short.csv has no class; at least two are needed. The column label names the class of each file" in error
    (tmp_path / "lost.csv").write_text("file,label\na.png,x\nb.png,y\n")
    assert "in that which --root names" in fails(capsys, tmp_path / "lost.csv")
    (tmp_path / "ragged.csv").write_text("file,label\na.png,x\na.png,x,y\n")
    assert "as many cells in each line" in fails(capsys, tmp_path / "ragged.csv")
    error = fails(capsys, folder, "--out", tmp_path / "text.txt" / "run")
    assert "text.txt is a file; give another --out" in error
    write_digits(tmp_path / "one", range(1), 3)
    assert "has one class, digit 0; at least two are needed" in fails(capsys, tmp_path / "one")
    write_digits(tmp_path / "tiny", range(3), 1)
    error = fails(capsys, tmp_path / "tiny")
    assert "two classes need at least 2 pictures that can be used" in error
    assert error.endswith("too small are digit 0 (1), digit 1 (1), digit 2 (1). Add pictures.\n")
    (tmp_path / "tiny" / "digit 9").mkdir()
    (tmp_path / "tiny" / "digit 9" / "x.png").write_bytes(b"?")
    error = fails(capsys, tmp_path / "tiny")
    assert "digit 9 (0). Add pictures. The first picture that was skipped: digit 9/x.png: unreadable image" in error
    shutil.rmtree(tmp_path / "tiny" / "digit 9")
    shutil.copytree(tmp_path / "tiny", tmp_path / "splits" / "train")
    assert "which are splits and not classes" in fails(capsys, tmp_path / "splits")
    (tmp_path / "bad" / "a").mkdir(parents=True)
    (tmp_path / "bad" / "b").mkdir()
    for label in "ab":
        (tmp_path / "bad" / label / "x.png").write_bytes(b"?")
    assert "none of the 2 pictures" in fails(capsys, tmp_path / "bad")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--encoder", "conv9"], "no encoder 'conv9'; choose conv4"),
        (["--frozen"], "--frozen goes with --encoder torchvision:NAME"),
        (["--weights", "x.pth"], "--weights goes with --encoder torchvision:NAME"),
        (["--encoder", "torchvision:resnet9"], "torchvision has no classifier 'resnet9'"),
        (
            ["--encoder", "torchvision:resnet18", "--frozen", "--weights", "no.pth"],
            "the weights of torchvision:resnet18",
        ),
        (["--encoder", "torchvision:resnet18", "--frozen", "--augment", "flip"], "does not go with --frozen"),
        (["--encoder", "torchvision:vit_b_32", "--image-size", "64"], "vit_b_32 can't take images of 64 × 64 pixels"),
        (["--encoder", "conv4-pool"], "use conv4"),
        (["--image-size", "4"], "from 8 to 256 pixels; got 4"),
        (["--root", "x"], "leave it out, or correct it"),
        (["--shots", "12"], "two classes need at least 13 pictures"),
    ],
)
def test_flags_that_can_not_be_met(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert message in fails(capsys, folder, *QUICK, *flags, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_that_returns_more_in_training_is_refused_and_its_statistics_are_kept() -> None:
    """As GoogLeNet does, with its auxiliary classifiers."""

    class Two(torch.nn.BatchNorm2d):
        def forward(self, x: torch.Tensor) -> Any:
            return (super().forward(x + 5), x) if self.training else x

    model = Two(3)
    check_size(model, "two", (3, 8, 8))
    with pytest.raises(ValueError, match=r"two can't take .* it returns tuple instead of features"):
        check_size(model, "two", (3, 8, 8), train=True)
    assert torch.equal(model.running_mean, torch.zeros(3))


def test_a_pickled_model_is_refused_in_plain_words(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(build_body("torchvision:resnet18", (3, 32, 32)), tmp_path / "whole.pth")
    flags = ["--encoder", "torchvision:resnet18", "--weights", tmp_path / "whole.pth"]
    error = fails(capsys, folder, *flags, "--out", tmp_path / "out")
    assert "holds more than tensors; write it with torch.save(model.state_dict(), FILE)" in error
    assert "weights_only" not in error


def test_an_encoder_that_was_copied_to_a_folder_is_not_overwritten(
    folder: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = damaged(run, tmp_path) / "encoder.json"
    before = copied.read_bytes()
    for more in ([], ["--resume"]):
        assert "holds an encoder, but not its run; give" in fails(capsys, folder, *QUICK, *more, "--out", tmp_path)
    assert copied.read_bytes() == before


def test_a_task_of_one_class_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(folder), "--ways", "1"])
    assert "it must be at least 2; got 1" in capsys.readouterr().err


def test_small_classes_are_left_out_and_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "photos")
    (tmp_path / "photos" / "rare").mkdir()
    Image.fromarray(noise(8, 8)).save(tmp_path / "photos" / "rare" / "only.png")
    found = gather(parse([str(tmp_path / "photos"), "--quiet"]))
    assert found.files.skipped == [("rare/only.png", "its class has no more than 1 picture that can be used")]
    assert (
        "Classes that were left out, with their numbers of pictures that can be used: rare (1)." in found.files.warnings
    )
    assert "rare" not in {name for part in found.classes.values() for name in part}
