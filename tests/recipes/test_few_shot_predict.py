"""New classes from a few pictures of each: the head, the three kinds of encoder, the table and the page."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from photo_folders import fails, noise, write_digits
from PIL import Image

from bilevel_recipes import on_page
from bilevel_recipes.few_shot import load_encoder, page
from bilevel_recipes.few_shot.__main__ import main, parse
from bilevel_recipes.few_shot.encoder import Spec, build_body, save_encoder
from bilevel_recipes.few_shot.heads import DEFAULT, Head, learn_rates, leave_one_out, probabilities
from bilevel_recipes.few_shot.predict import compact

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Three classes, five pictures of each to learn from, and ten others of each to recognise, in folders."""
    home = tmp_path_factory.mktemp("sets")
    return write_digits(home / "support", range(7, 10), 5), write_digits(home / "query", range(7, 10), 10, begin=5)


def predictions(folder: Path) -> list[dict[str, str]]:
    with open(folder / "predictions.csv", newline="", encoding="utf-8") as handle:
        return list(csv.DictReader(handle))


def accuracy(rows: list[dict[str, str]]) -> float:
    """The folder of a query is its class."""
    return float(np.mean([row["file"].split("/")[0] == row["class"] for row in rows]))


# --- the head --------------------------------------------------------------------------------------------------


def plain(f: torch.Tensor, y: torch.Tensor, query: torch.Tensor, ways: int, head: Head) -> torch.Tensor:
    """The same head by a plain loop, for features as they are."""
    w, b = torch.zeros(ways, f.shape[1], dtype=f.dtype), torch.zeros(ways, dtype=f.dtype)
    for rate in head.rates:
        w.requires_grad_()
        b.requires_grad_()
        every = F.cross_entropy(f @ w.T + b, y, reduction="none")
        loss = torch.stack([every[y == c].mean() for c in y.unique()]).mean() + 0.5 * head.decay * w.square().sum()
        gradients = torch.autograd.grad(loss, (w, b))
        w, b = ((p - rate * ways / head.ways * g).detach() for p, g in zip((w, b), gradients, strict=True))
    return (query @ w.T + b).softmax(-1)


def test_the_head_is_that_of_a_plain_loop() -> None:
    f, query = torch.randn(9, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    y = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2])
    head = Head([0.3, 0.2, 0.5], 5, 0.2, "raw")
    found = probabilities(f[None], y[None], query[None], 3, head)[0]
    torch.testing.assert_close(found, plain(f, y, query, 3, head), rtol=1e-10, atol=0)


def test_a_class_with_more_copies_of_its_pictures_does_not_weigh_more() -> None:
    f, query = torch.randn(4, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    more = torch.tensor([0, 1, 1, 1, 1, 2, 3])
    head = Head([0.4] * 4, 3, 0.1, "raw")
    once = probabilities(f[None], torch.tensor([[0, 1, 2, 3]]), query[None], 4, head)
    many = probabilities(f[more][None], torch.tensor([[0, 1, 1, 1, 1, 2, 3]]), query[None], 4, head)
    torch.testing.assert_close(once, many)


def test_leaving_one_out_is_fitting_a_head_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    y = torch.tensor([0, 1, 2, 0, 1, 0, 3])  # 2 and 3 have one picture: they can't be left out
    f = torch.randn(7, 5) + 1.5 * F.one_hot(y, 5)
    head = Head([0.4] * 6, 5, 0.1)
    right = 0
    for i in (0, 1, 3, 4, 5):
        rest = [j for j in range(7) if j != i]
        p = probabilities(f[rest][None], y[rest][None], f[i][None, None], 4, head)
        right += int(p.argmax() == y[i])
    assert leave_one_out(f, y, 4, head) == (right, 5)
    monkeypatch.setattr("bilevel_recipes.few_shot.heads._NUMBERS", 80)  # two tasks at a time
    assert leave_one_out(f, y, 4, head) == (right, 5)
    assert leave_one_out(f[:3], y[:3], 4, head) == (0, 0)


@pytest.mark.parametrize("features", ["sphere", "centred", "raw"])
def test_compact_features_give_the_same_heads(features: str) -> None:
    y = torch.arange(12) % 3
    f = torch.randn(12, 40) + 0.3 * torch.randn(3, 40)[y]
    g, head = compact(f), Head([0.02] * 6, 5, 0.1, features)
    assert g.shape == (12, 12)
    torch.testing.assert_close(g @ g.T, f @ f.T, atol=1e-4, rtol=0)
    for out in range(12):
        rest = torch.arange(12) != out
        p, q = (probabilities(x[None, rest], y[None, rest], x[None, [out]], 3, head) for x in (f, g))
        torch.testing.assert_close(p, q, atol=1e-4, rtol=0)
    assert leave_one_out(g, y, 3, head) == leave_one_out(f, y, 3, head)
    assert compact(f[:, :5]).shape == (12, 5)


def test_one_picture_of_each_class_gives_bounded_probabilities() -> None:
    f = torch.randn(5, 300)
    p = probabilities(f[None], torch.arange(5)[None], f[None], 5, DEFAULT)[0]
    assert p.argmax(1).tolist() == list(range(5))
    assert 0.5 < float(p.max()) < 0.95  # the decay keeps a head from certainty about what it has seen once


def test_learnt_rates_have_a_lower_loss_than_those_they_start_from() -> None:
    """Features with one useful direction among many: larger steps than at the start are better."""

    def batches(seed: int):
        generator = torch.Generator().manual_seed(seed)
        y, y_query = torch.arange(3).repeat(2).expand(4, -1), torch.arange(3).repeat(4).expand(4, -1)
        while True:
            means = 2 * torch.randn(4, 3, 6, generator=generator)
            parts = [means[:, labels[0]] + torch.randn(4, labels.shape[1], 6, generator=generator)
                     for labels in (y, y_query)]  # fmt: skip
            yield (parts[0], y), (parts[1], y_query)

    start = Head([0.02] * 3, 3)
    learnt = learn_rates(batches(0), 3, start, 60)
    test = batches(1)

    def loss(head: Head) -> float:
        (f, y), (query, y_query) = next(test)
        return -float(probabilities(f, y, query, 3, head).gather(2, y_query[..., None]).log().mean())

    assert min(learnt.rates) > 0.02
    assert np.mean([loss(learnt) for _ in range(10)]) < np.mean([loss(start) for _ in range(10)]) - 0.05


# --- the command -----------------------------------------------------------------------------------------------


def test_photographs_to_predictions_of_unseen_classes(
    sets: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two commands, in far less than two minutes of one core."""
    begin = time.process_time()
    photos, run, out = write_digits(tmp_path / "photos", range(7), 30), tmp_path / "run", tmp_path / "out"
    assert main([str(photos), "--out", str(run), "--outer-steps", "60", "--threads", "1", "--quiet"]) == 0
    assert "Accuracy in % on 600 tasks of 2 test classes" in capsys.readouterr().out
    assert main(["predict", str(run), *map(str, sets), "--out", str(out), "--quiet"]) == 0
    assert time.process_time() - begin < 120
    rows = predictions(out)
    assert len(rows) == 30
    assert accuracy(rows) > 0.6
    for row in rows:
        first, second = float(row["probability"]), float(row["its probability"])
        assert 0 < second <= first < 1
        assert row["class"] != row["second class"]
    printed = capsys.readouterr().out
    assert re.search(r"Leave-one-out accuracy on the support pictures: \d+\.\d % \(\d+ of 15\)", printed)
    shown = [float(p) for p in re.findall(r"^digit \d/\S+\s+digit \d\s+(\d+) %", printed, re.M)]
    assert len(shown) == 30
    assert shown == sorted(shown)


def test_patches_need_neither_a_run_nor_weights(
    sets: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predict", "patches", *map(str, sets), "--out", str(tmp_path), "--quiet"]
    assert main(command) == 0
    assert accuracy(predictions(tmp_path)) > 0.8
    assert "holds predictions.csv and predictions.html; pass --overwrite" in fails(capsys, *command)
    before = (tmp_path / "predictions.csv").read_bytes()
    assert main([*command, "--overwrite"]) == 0
    assert (tmp_path / "predictions.csv").read_bytes() == before


def test_a_model_with_weights_from_disk_needs_no_training(
    sets: tuple[Path, Path], weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = tmp_path / "one.png"
    Image.fromarray(noise(30, 40, 3)).save(one)
    small = tmp_path / "support"
    for folder in ("digit 7", "digit 8"):
        shutil.copytree(sets[0] / folder, small / folder)
    flags = ["--weights", str(weights), "--out", str(tmp_path / "out"), "--quiet"]
    assert main(["predict", "torchvision:resnet18", str(small), str(one), *flags]) == 0
    assert "Encoder: torchvision:resnet18 with the weights of resnet18.pth." in capsys.readouterr().out
    [row] = predictions(tmp_path / "out")
    assert row["file"] == "one.png"
    assert float(row["probability"]) + float(row["its probability"]) == pytest.approx(1, abs=2e-4)


def test_a_terminal_without_these_characters_gets_escapes(
    tmp_path: Path, sets: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    support = shutil.copytree(sets[0], tmp_path / "support")
    (support / "digit 7").rename(support / "猫")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert main(["predict", "patches", str(support), str(sets[1]), "--out", str(tmp_path / "out"), "--quiet"]) == 0
    sys.stdout.seek(0)
    assert "\\u732b" in sys.stdout.read()


def test_one_picture_of_each_class_has_no_leave_one_out_accuracy(
    sets: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_digits(tmp_path / "support", range(7, 10), 1)
    command = ["predict", "patches", str(tmp_path / "support"), str(sets[1]), "--out", str(tmp_path / "out")]
    assert main([*command, "--quiet"]) == 0
    assert "nothing is known about the accuracy; add a second one" in capsys.readouterr().out
    assert "unknown" in (tmp_path / "out" / "predictions.html").read_text()


def test_bad_input_gets_one_sentence(
    sets: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    support, query = sets
    out = ["--out", tmp_path / "out"]
    assert "there is no run nowhere; give the folder" in fails(capsys, "predict", "nowhere", support, query, *out)
    (tmp_path / "empty").mkdir()
    error = fails(capsys, "predict", tmp_path / "empty", support, query, *out)
    assert "has no encoder.json and no encoder.safetensors" in error
    assert "has no images" in fails(capsys, "predict", "patches", tmp_path / "empty", query, *out)
    assert "has no pictures" in fails(capsys, "predict", "patches", support, tmp_path / "empty", *out)
    assert "absent does not exist" in fails(capsys, "predict", "patches", support, tmp_path / "absent", *out)
    assert "has no class" in fails(capsys, "predict", "patches", support / "digit 7", query, *out)
    write_digits(tmp_path / "one", range(7, 8), 3)
    assert "has one class, digit 7; at least two" in fails(capsys, "predict", "patches", tmp_path / "one", query, *out)
    (tmp_path / "one" / "digit 8").mkdir()
    (tmp_path / "one" / "digit 8" / "x.png").write_bytes(b"?")
    assert "has one class, digit 7" in fails(capsys, "predict", "patches", tmp_path / "one", query, *out)
    error = fails(capsys, "predict", "patches", support, query, *out, "--weights", "x.pth")
    assert "--weights goes with torchvision:NAME" in error
    error = fails(capsys, "predict", "torchvision:resnet18", support, query, *out, "--weights", "x.pth")
    assert "x.pth, does not exist; name the file that has them with --weights FILE" in error
    error = fails(capsys, "predict", "torchvision:resnet18", support, query, *out, "--weights", tmp_path)
    assert "is a folder; name the file" in error
    (tmp_path / "list.csv").write_text("file")
    error = fails(capsys, "predict", "patches", support, tmp_path / "list.csv", *out)
    assert "error: list.csv: unreadable image" in error
    assert not (tmp_path / "out").exists()


def test_queries_that_are_in_the_support_set_and_classes_without_a_picture_are_named(
    sets: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    support = shutil.copytree(sets[0], tmp_path / "support")
    (support / "lost").mkdir()
    (support / "lost" / "x.png").write_bytes(b"?")
    again = next((support / "digit 7").glob("*.png"))
    shutil.copy(again, support / "digit 7" / "again.png")  # it would recognise its copy when that is left out
    (tmp_path / "query").mkdir()
    shutil.copy(again, tmp_path / "query" / "known.png")
    Image.fromarray(noise(8, 8)).save(tmp_path / "query" / "new.png")
    out = tmp_path / "out"
    assert main(["predict", "patches", str(support), str(tmp_path / "query"), "--out", str(out), "--quiet"]) == 0
    words = ["No picture is recognised as lost: no support picture of that class can be used.",
             "Query pictures that are also in the support set: 1; the first is known.png."]  # fmt: skip
    printed = capsys.readouterr().out
    assert all(part in printed and part in (out / "predictions.html").read_text() for part in words)
    assert "digit 7/again.png: the same picture as" in printed
    assert re.search(r"\(\d+ of 15\)", printed)
    assert "Learnt from 6" not in (out / "predictions.html").read_text()


def test_a_table_of_files_elsewhere_needs_root(
    sets: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted(file.relative_to(sets[0]).as_posix() for file in sets[0].glob("*/*.png"))
    (tmp_path / "list.csv").write_text("\n".join(["file;label", *(f"{f};{f.split('/')[0]}" for f in files)]))
    command = ["predict", "patches", tmp_path / "list.csv", sets[1], "--out", tmp_path / "out"]
    assert "none of the 15 pictures" in fails(capsys, *command)
    (tmp_path / "absolute.csv").write_text(f"file,label\n{sets[0] / files[0]},a\n{sets[0] / files[-1]},b\n")
    assert "is not in the folder" in (error := fails(capsys, *command[:2], tmp_path / "absolute.csv", *command[3:]))
    assert "give --root" in error
    assert main([*map(str, command), "--root", str(sets[0]), "--quiet"]) == 0
    assert accuracy(predictions(tmp_path / "out")) > 0.8


def test_the_other_queries_do_not_change_a_prediction(sets: tuple[Path, Path], tmp_path: Path) -> None:
    save_encoder(tmp_path, build_body("conv4", (1, 8, 8)), Spec("conv4", 8, 8, 1, [80.0], [95.0], DEFAULT))
    found: list[list[dict[str, str]]] = []
    for k, query in enumerate((sets[1], sets[1] / "digit 9")):
        command = ["predict", str(tmp_path), str(sets[0]), str(query), "--out", str(tmp_path / str(k)), "--quiet"]
        assert main(command) == 0
        found.append(predictions(tmp_path / str(k)))
    assert len(found[1]) == 10
    both = zip([row for row in found[0] if row["file"].startswith("digit 9/")], found[1], strict=True)
    for many, few in both:
        assert many["file"] == f"digit 9/{few['file']}"
        assert many["class"] == few["class"]
        assert float(many["probability"]) == pytest.approx(float(few["probability"]), abs=1e-4)


def test_names_that_are_no_utf_8_or_would_move_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = os.fsencode(tmp_path)
    try:
        for c in range(4):
            os.makedirs(home + b"/photos/caf\xe9 %d" % c)
            for i in range(3):
                Image.fromarray(noise(8, 8, seed=10 * c + i)).save(tmp_path / "one.png")
                shutil.move(tmp_path / "one.png", home + b"/photos/caf\xe9 %d/\x1b[2J\n%d.png" % (c, i))
    except OSError:
        pytest.skip("this file system has no such names")
    photos, run, out = tmp_path / "photos", tmp_path / "run", tmp_path / "out"
    assert main([str(photos), "--out", str(run), "--outer-steps", "1", "--test-tasks", "2", "--quiet"]) == 0
    classes = load_encoder(run).spec.about["classes"]
    assert sorted([*classes["train"], *classes["test"]]) == [f"caf\udce9 {c}" for c in range(4)]
    assert main(["predict", str(run), str(photos), str(photos), "--out", str(out), "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "caf\\udce9 0/\\x1b[2J\\n0.png" in printed
    assert "\x1b" not in printed
    assert {row["class"] for row in predictions(out)} <= {f"caf\\udce9 {c}" for c in range(4)}
    assert {row["file"] for row in predictions(out)} >= {"caf\\udce9 0/\x1b[2J\n0.png"}


def test_weights_that_give_no_numbers_are_refused(
    sets: tuple[Path, Path], weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = torch.load(weights, weights_only=True)
    state["conv1.weight"].fill_(float("nan"))
    torch.save(state, tmp_path / "nan.pth")
    one = next((sets[1] / "digit 7").glob("*.png"))
    flags = ["--weights", tmp_path / "nan.pth", "--out", tmp_path / "out"]
    error = fails(capsys, "predict", "torchvision:resnet18", sets[0], one, *flags)
    assert "the features of 15 pictures are NaN or infinite" in error


def test_the_lines_of_the_docs_load_an_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("RUN").mkdir()
    save_encoder(Path("RUN"), build_body("conv4", (3, 16, 16)), Spec("conv4", 16, 16, 3, [0] * 3, [1] * 3, DEFAULT))
    for name in ("a.png", "b.png"):
        Image.fromarray(noise(20, 30, 3)).save(name)
    from bilevel_recipes.few_shot import load_encoder

    encoder = load_encoder("RUN")
    features = encoder(encoder.prepare(["a.png", "b.png"]))
    assert features.shape == (2, 64)


def test_help_and_misspelt_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, words in (
        (["predict", "--help"], ["predict patches", "ENCODER SUPPORT QUERY", "A folder of pictures to recognise"]),
        (["photos", "--help"], ["--frozen", "bilevel-fewshot [-h] [OPTIONS] PHOTOS", "PHOTOS          A folder"]),
    ):
        with pytest.raises(SystemExit, match="0"):
            main(argv)
        found = capsys.readouterr().out
        assert all(part in found for part in words)
    with pytest.raises(SystemExit, match="2"):
        main(["predict", "patches", "a", "b", "--weihgts", "c"])
    assert "--weights" in capsys.readouterr().err
    assert parse(["predict", "patches", "a", "b"]).query == Path("b")


def test_the_program_is_for_pictures_of_ones_own_and_takes_flags_first(
    sets: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([], ["--help"], ["-h"]):
        monkeypatch.setattr(sys, "argv", ["bilevel-fewshot", *words])
        with pytest.raises(SystemExit, match="0"):
            main()
        assert "PHOTOS          A folder" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["bilevel-fewshot", "--out", str(tmp_path / "out"), str(tmp_path / "nowhere")])
    assert main() == 2
    assert "nowhere does not exist" in capsys.readouterr().err


# --- the page --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of classes and files whose names are code, with one picture that can't be read."""
    home = tmp_path_factory.mktemp("hostile")
    for c, name in enumerate((HOSTILE, "b" * 60)):
        (home / "support" / name).mkdir(parents=True)
        for i in range(2):
            Image.fromarray(noise(12, 12, 3, seed=c) // (i + 1)).save(home / "support" / name / f"{i}.png")
    (home / "query" / "deep").mkdir(parents=True)
    for i in range(4):
        Image.fromarray(noise(90, 70, 3, seed=i)).save(home / "query" / "deep" / f"{HOSTILE} {i}.jpg")
    (home / "query" / "broken.png").write_bytes(b"?")
    command = ["predict", "patches", str(home / "support"), str(home / "query"), "--out", str(home / "out")]
    assert main([*command, "--quiet"]) == 0
    return home / "out" / "predictions.html"


def test_what_can_not_be_written_or_would_be_lost_is_named(
    sets: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predict", "patches", *sets, "--out", tmp_path]
    own = tmp_path / "predictions_files" / "picture_of_mine.png"
    own.parent.mkdir()
    own.touch()
    assert "holds predictions_files; pass --overwrite, or another --out" in fails(capsys, *command)
    assert own.is_file()
    (tmp_path / "predictions.csv").mkdir()
    error = fails(capsys, *command, "--overwrite")
    assert "predictions.csv can't be written" in error
    assert error.endswith("give the same command with --overwrite.\n")


def test_rates_that_diverge_are_named(
    sets: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = Head([1e30] * 5, 5)
    save_encoder(tmp_path, build_body("conv4", (1, 8, 8)), Spec("conv4", 8, 8, 1, [80.0], [95.0], head))
    error = fails(capsys, "predict", tmp_path, *sets, "--out", tmp_path / "out")
    assert "too large for these pictures; train the encoder again with a smaller --eta.\n" in error


def test_the_page_of_the_current_folder_has_its_name(
    sets: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = shutil.copytree(sets[1], tmp_path / "new.photos")
    monkeypatch.chdir(query)
    assert main(["predict", "patches", str(sets[0]), ".", "--quiet"]) == 0
    assert "<bdi>new.photos</bdi>" in (query / "runs" / "predict_new.photos" / "predictions.html").read_text()


def test_long_names_break_between_their_words() -> None:
    assert page._breakable("a<b/c_d-e.png") == "a&lt;b/<wbr>c_<wbr>d-<wbr>e.<wbr>png"


def test_the_page_is_whole_and_escapes_names(hostile: Path) -> None:
    text = hostile.read_text()
    assert "<img src=x" not in text
    assert "&lt;img src=x" in text
    assert not re.search(r'(src|href)="(?!data:|#)', text)
    assert text.count('src="data:image/jpeg') == 4
    assert text.count('src="data:image/png') == 4
    assert "broken.png</bdi>: unreadable image" in text
    assert "<script" not in text


def test_many_pictures_are_files_beside_the_page(
    sets: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_page, "INSIDE", 1000)
    command = ["predict", "patches", *map(str, sets), "--out", str(tmp_path), "--quiet", "--overwrite"]
    assert main(command) == 0
    addresses = re.findall(r'src="(predictions_files/[^"]+)"', (tmp_path / "predictions.html").read_text())
    assert len(addresses) == 15 + 30
    assert all((tmp_path / address).is_file() for address in addresses)
    monkeypatch.undo()
    assert main(command) == 0
    assert not (tmp_path / "predictions_files").exists()


def test_cards_are_grouped_by_class_with_the_least_certain_first(sets: tuple[Path, Path], tmp_path: Path) -> None:
    assert main(["predict", "patches", *map(str, sets), "--out", str(tmp_path), "--quiet"]) == 0
    text = (tmp_path / "predictions.html").read_text()
    rows = predictions(tmp_path)
    for section in re.findall(r"<section.*?</section>", text, re.S):
        name = re.search(r"<h2><bdi>(.*?)</bdi>", section)
        assert name is not None
        percents = [int(p) for p in re.findall(r'class="first">.*?(\d+) %', section)]
        assert percents == sorted(percents)
        assert len(percents) == sum(row["class"] == name[1] for row in rows)
        edges = section.count('class="unsure"')
        close = [
            float(r["probability"]) - float(r["its probability"]) < page._CLOSE for r in rows if r["class"] == name[1]
        ]
        assert edges == sum(close)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt-get install chromium)")
def test_the_page_fits_a_phone_and_asks_nothing_of_a_network(hostile: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    seen: list[str] = []
    with sync_api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for width in (1280, 390):
            view = browser.new_page(viewport={"width": width, "height": 800})
            view.set_default_timeout(60_000)  # of milliseconds: the machine may be busy
            view.on("console", lambda m: seen.append(m.text))
            view.on("dialog", lambda d: seen.append("a dialog"))
            view.on("request", lambda r: seen.append(r.url) if not r.url.startswith(("file:", "data:")) else None)
            view.goto(hostile.as_uri())
            assert view.evaluate("document.documentElement.scrollWidth") <= width
            view.evaluate("for (const i of document.images) i.loading = 'eager'")
            view.wait_for_function("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
            assert view.locator("li img").count() == 4
            lines = view.evaluate("[...document.querySelectorAll('.second')].map(p => p.innerText.split('\\n')[0])")
            assert len(lines) == 4
            assert all(line.startswith("or ") for line in lines)  # not o, r in two lines beside a long name
        browser.close()
    assert seen == []


def test_flags_may_stand_before_the_word_predict(
    sets: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["patches", *map(str, sets), "--out", str(tmp_path / "out")]
    assert main(["--threads", "1", "--quiet", "--seed=1", "predict", *words]) == 0
    assert len(predictions(tmp_path / "out")) == 30
    with pytest.raises(SystemExit):
        main(["--threads", "1", "predict", "patches"])
    assert "bilevel-fewshot predict" in "".join(capsys.readouterr())
    assert type(parse(["photos", "--out", "predict"])).__module__.endswith("photos")
    for folder in ("predict", "run"):  # as the value of a flag it is a folder
        assert parse(["--paper", "--out", folder])[1].out == Path(folder)
        assert parse(["--quiet", "--out", folder])[1].out == Path(folder)
