import numpy as np
import pytest
import torch

from benchmarks import cleaning_matrix
from benchmarks.cleaning_matrix import EM, HYPER, TRUE, confident, counted, no_noise, reading, true_matrix
from benchmarks.cleaning_sets import SETS, Draw, Loaded

FIVE = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.2, 0.8], [0.1, 0.9]])
GIVEN = torch.tensor([0, 1, 1, 1, 0])


def test_the_page_is_made_from_a_run_on_digits(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SETS, "few-digits", Draw("digits", 300, 60, "pairwise", 0.25))
    cleaning_matrix.main(["--sets", "few-digits", "--seeds", "1", "--out", str(tmp_path), "--cache", str(tmp_path)])
    text = (tmp_path / "cleaning_matrix.md").read_text()
    printed = capsys.readouterr()
    ways = ["none", "uniform", "counting", "confident learning", EM, "hypergradients, gd", HYPER, TRUE]
    f1 = {way: float(printed.err.split(f"few-digits 200 {way}: f1 ")[1].split()[0]) for way in ways}
    assert f1[EM] > f1["uniform"] + 0.02  # what pairwise noise is about
    assert f1[HYPER] > f1["uniform"] + 0.02
    assert f1[TRUE] > 0.85
    assert text.count("| hypergradients, bigsam | ") == 3
    assert "--sets few-digits --first-seed 200 --seeds 1" in text
    assert f"{f1[TRUE]:.3f} with the true T" in text


def test_ways_to_count():
    # two rows are predicted as class 0, with labels 0 and 1; three as class 1, with labels 1, 1 and 0; one more each
    torch.testing.assert_close(counted(FIVE, GIVEN), torch.tensor([[0.5, 0.5], [0.4, 0.6]]))
    torch.testing.assert_close(no_noise(FIVE, GIVEN), torch.tensor([[0.99, 0.01], [0.01, 0.99]]))


def test_confident_learning_counts_the_rows_of_a_true_class_that_have_a_label():
    # every row of the label 1 is of class 0 for sure in half of the cases; the label 0 is always right
    p = torch.tensor([[0.95, 0.05]] * 20 + [[0.02, 0.98]] * 20 + [[0.98, 0.02]] * 20)
    found = confident(p, torch.tensor([0] * 20 + [1] * 40))
    assert found[0, 1] == pytest.approx(0.5, abs=0.05)  # of class 0, 20 have the label 0 and 20 the label 1
    assert found[1, 0] < 0.06


def test_the_true_matrix_leaves_checked_rows_out():
    truth, given = np.array([0, 0, 0, 0, 1, 1]), np.array([0, 0, 0, 1, 1, 1])
    checked = np.array([True, True, False, False, False, False])
    one = Loaded(np.zeros((6, 1), np.float32), given, truth, checked, 2, ["a", "b"], "")
    torch.testing.assert_close(true_matrix(one), torch.tensor([[0.5, 0.5], [1e-4, 1.0]]), atol=2e-4, rtol=0)


def test_the_reading_is_counted():
    def row(**f1):
        return {way.replace("_", " "): [{"f1": v, "ap": v}] for way, v in f1.items()}

    results = {"a": row(none=0.5, EM=0.8), "b": row(none=0.6, EM=0.8)}
    for found, value in zip(results.values(), (0.9, 0.7), strict=True):
        found |= {HYPER: [{"f1": value, "ap": value}], TRUE: [{"f1": 0.95, "ap": 0.95}]}
    text = reading(results)
    assert "starts from *EM*, and is above it on 1 of 2 sets" in text
    assert "0.550 for *none*, and 0.950 with the true T" in text
    head, *lines = cleaning_matrix.block(results, "f1")[1:]
    assert head == ["T", "a", "b", "mean"]
    assert lines[0] == [["none", "0.500", "0.600", "0.550"], ["EM", "0.800", "**0.800**", "0.800"],
                        [HYPER, "**0.900**", "0.700", "0.800"], [TRUE, "0.950", "0.950", "0.950"]]  # fmt: skip


def test_a_missing_file_is_named(capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        cleaning_matrix.main(["--sets", "agnews", "--cache", str(tmp_path), "--out", str(tmp_path)])
    assert "agnews: ag_news_csv/test.csv is missing; give its folder with --data-root" in capsys.readouterr().err
