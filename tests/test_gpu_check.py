"""`make gpu-check` can't be tried here; all of it that is not the GPU can, on the CPU."""

import pytest
import torch

from benchmarks import gpu_check

THERE = (
    "- ok: LSTM, SGD (reverse, reverse sqrt, reverse memory=auto, reverse store=host, unroll, forward): ",
    "ridge, cg",
    "dropout, reverse sqrt",
    "bf16 against float32",
    "few-shot: tasks",
    "- ok: data cleaning, linear",
    "- ok: few-shot",
    "| ours: reverse store=host | ",
    "| ours: reverse, bf16, channels-last | ",
)


def test_without_a_gpu_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--out", str(tmp_path / "page.md")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "page.md").exists()


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(gpu_check, "MODELS", {n: gpu_check.MODELS[n] for n in ("convolution, BatchNorm", "LSTM")})
    monkeypatch.setattr(gpu_check, "OPTIMIZERS", {"SGD": gpu_check.OPTIMIZERS["SGD"]})
    flags = "--device cpu --size tiny --rounds 1 --problems P3"
    return [*flags.split(), "--runners", "autograd create_graph,ours: reverse,ours: reverse store=host"]


def test_the_page(few, tmp_path, capsys):
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    assert gpu_check.main([*few, "--out", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    assert "FAILED" not in page
    assert "all checks hold" in page
    for part in THERE:
        assert part in page
    assert "Error" not in page  # in the table a runner that fails is a row
    assert page.split("## ")[-1] in capsys.readouterr().out
    assert before == (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)


def test_a_failure_is_told_and_the_rest_goes_on(few, tmp_path, monkeypatch):
    def broken(device):
        yield "right", True, "as it should be"
        yield "wrong", False, "off by 1"
        raise RuntimeError("and out")

    monkeypatch.setattr(gpu_check, "CHECKS", {"Broken": broken})
    monkeypatch.setattr(gpu_check, "recipes", lambda device, short: iter([("after", True, "")]))
    assert gpu_check.main([*few, "--out", str(tmp_path / "page.md")]) == 1
    page = (tmp_path / "page.md").read_text()
    for part in (
        "something FAILED",
        "- ok: right",
        "- FAILED: wrong: off by 1",
        "RuntimeError: and out",
        "- ok: after",
    ):
        assert part in page


def test_one_failure_among_several_names_its_place():
    def wrong():
        raise ValueError("this\none")

    rows = [gpu_check.attempt("first", lambda: (True, "fine")), gpu_check.attempt("second", wrong)]
    what, holds, words = gpu_check.together("both", rows)
    assert (what, holds) == ("both", False)
    assert words.startswith("second: ValueError: this one (test_gpu_check.py:")
    assert gpu_check.together("both", rows[:1] * 2) == ("both (first, first)", True, "fine")
