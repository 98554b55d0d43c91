"""The benchmarks run on a tiny size, and all that are exact agree."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from problems import relative

from benchmarks import goals, measure, page, quality, report, whole_run
from benchmarks.__main__ import main
from benchmarks.problems import make, mean_loss
from benchmarks.runners import BY_NAME, RUNNERS, judge

NAMES = ("P1", "P3", "P4-5", "P5", "P8-128-3", "P8-128-3-adamw")  # one of each kind
PAIRS = [
    (r, name) for r in RUNNERS for name in NAMES
    if r.takes(name) and not r.missing(name) and not r.compiled  # compiling takes seconds
]  # fmt: skip


@functools.cache
def reference(name):
    return judge(make(name, "tiny", smooth=True, dtype=torch.float64))()


@pytest.mark.filterwarnings("ignore")  # the peers' own
@pytest.mark.parametrize(("runner", "name"), PAIRS, ids=lambda x: x if isinstance(x, str) else x.name)
def test_exact(runner, name):
    """In float64, on a smooth problem, twice in a row: the model is left as it was."""
    expected = reference(name)
    run = runner.build(make(name, "tiny", smooth=True, dtype=torch.float64))
    # TorchOpt takes the bias corrections of Adam in float32
    tolerance = 1e-4 if name.endswith("adamw") and runner.name == "TorchOpt" else 1e-10 if "P8" in name else 1e-8
    for found in (run(), run()):
        for a, b in zip(found, expected, strict=True):
            assert relative(a, b) <= tolerance or torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_right(name):
    """The loop by hand against central differences of the plain one, along a random direction."""
    found = reference(name)
    direction = [torch.randn_like(x) for x in found]

    def value(step):
        p = make(name, "tiny", smooth=True, dtype=torch.float64)
        with torch.no_grad():
            for x, d in zip(p.outer, direction, strict=True):
                x.add_(d, alpha=step)
        inner, outer = p.batches()
        if p.adamw:
            p.train(inner)
            return p.g(p.model, *outer).detach()
        for k in range(p.steps):
            grads = torch.autograd.grad(
                p.h(p.model, *inner[k % len(inner)]), list(p.model.parameters()), retain_graph=True
            )
            with torch.no_grad():
                for x, grad in zip(p.model.parameters(), grads, strict=True):
                    x.sub_(grad, alpha=p.lr)
        return p.g(p.model, *outer).detach()

    slope = (value(1e-5) - value(-1e-5)) / 2e-5
    assert relative(sum((a * b).sum() for a, b in zip(found, direction, strict=True)), slope) <= 1e-6


def test_command(tmp_path):
    """The whole way from the command to the pages and pictures, on two problems."""
    (tmp_path / "goals_notes.md").write_text("## A note\n")
    flags = ["--size", "tiny", "--problems", "P1,P8-128-3", "--rounds", "1", "--threads", "1"]
    flags += ["--runners", "ours: unroll,higher,hypertorch", "--parts", "table,growth,run", "--out", str(tmp_path)]
    out = subprocess.run(
        [sys.executable, "-m", "benchmarks", *flags], check=True, capture_output=True, text=True
    ).stdout
    results = json.loads((tmp_path / "benchmarks.json").read_text())
    for name in ("ours: unroll", "higher"):
        for problem in ("P1", "P8-128-3"):
            row = results["table"][problem]["rows"][name]
            assert "failed" not in row
            assert row["error"] < (1e-5 if problem == "P1" else 1e-10)
            assert row["operators"] > 100
        assert f"\n| {name} |" in out
    training = results["table"]["P8-128-3"]["training"]
    assert training["live"] > 0
    assert "\n| plain training | 1.00 |" in out
    assert "- hypertorch: not on the package index" in out
    run = results["run"]["rows"]
    assert set(run["higher"]) == {"3", "6"}
    assert all(row["seconds"] > 0 and row["plain"] > 0 for row in run["higher"].values())
    assert "\n| ours: checkpoint=sqrt | " in out
    page = (tmp_path / "goals.md").read_text()
    assert "| `unroll`: time, relative to K plain steps | P1 | ≤ 2.30 | " in page
    assert "not measured" in page
    assert page.endswith("## A note\n")
    for picture in ("pareto", "growth", "run"):
        assert (tmp_path / f"benchmarks_{picture}.png").is_file()


def test_reached():
    curve = [(float(k), 0.95 if k > 3 else 0.8) for k in range(20)]
    assert quality.reached(curve, 0.9) == 4.0
    assert quality.reached(curve[:9], 0.9) is None  # it did not stay there for long enough


def test_only_the_exact_are_compared_with():
    rows = {
        "wrong": {"group": "peer", "error": 0.5, "seconds": [1.0]},
        "right": {"group": "peer", "error": 1e-6, "seconds": [2.0, 3.0, 9.0]},
        "no peer": {"group": "reference", "error": 1e-6, "seconds": [0.1]},
        "absent": {"group": "peer", "failed": "not installed"},
    }
    assert report.best(rows, "seconds") == 3.0


def test_summary_is_relative_to_the_best_peer():
    def rows(peer):
        return {"ours: unroll": {"group": "ours", "error": 1e-7, "seconds": [3.0], "live": 10}, "higher": peer}

    ran = {"group": "peer", "error": 1e-7, "seconds": [2.0], "live": 40, "remark": ""}
    ended = {"group": "peer", "failed": "ended: it held too much"}
    table = {n: {"title": "data, model", "steps": 3, "rows": rows(p)} for n, p in (("P1", ran), ("P2", ended))}
    assert report.summary(table)[-2:] == [
        "| P1: model, K = 3 | – | – | – | 1.50,\u00a00.25 |",
        "| P2: model, K = 3 | – | – | – | ran |",
    ]


def test_a_remark_on_several_problems_is_made_once():
    absent = {"group": "peer", "failed": "not installed"}
    table = {n: {"rows": {"Betty": absent} | other} for n, other in (("P1", {}), ("P2", {"BOAT": absent}))}
    assert report.repeated(table) == ["- Betty: not installed."]
    assert report.remarks(table["P1"], table) == []
    assert report.remarks(table["P2"], table) == ["- BOAT: not installed."]


# --- P9 and the memory of plain training ------------------------------------------------------------------------


def whole_run_by_hand(shift, steps=6):
    """g after a run with momentum, at λ + shift."""
    task = whole_run.make("tiny", torch.float64)
    with torch.no_grad():
        task.lam.add_(shift)
    torch.manual_seed(3)
    optimizer = task.optimizer()
    for _ in range(steps):
        optimizer.zero_grad()
        task.h(task.model, *task.draw()).backward(inputs=list(task.model.parameters()))
        optimizer.step()
    return mean_loss(task.model, *task.outer).detach()


@pytest.mark.filterwarnings("ignore")  # the peers' own
@pytest.mark.parametrize("case", [c for c in whole_run.CASES if not c.missing()], ids=lambda c: c.name)
def test_whole_run(case):
    """Against differences of the plain run that draws the same batches; twice, with the model left as it was."""
    task = whole_run.make("tiny", torch.float64)
    run = case.build(task)
    direction = torch.randn(len(task.lam), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    slope = (whole_run_by_hand(1e-5 * direction) - whole_run_by_hand(-1e-5 * direction)) / 2e-5
    for _ in range(2):
        torch.manual_seed(3)
        assert relative(run(6) @ direction, slope) <= 1e-7


def test_batches_of_a_run_differ():
    """Cut out, mirrored and noisy, and the same again from the same random state."""
    task = whole_run.make("quick")
    torch.manual_seed(0)
    (x, y, i), (other, *_) = task.draw(), task.draw()
    assert x.shape == (32, 3, 16, 16)
    assert torch.equal(y, task.labels[i])
    assert not torch.equal(x, other)
    torch.manual_seed(0)
    assert torch.equal(task.draw()[0], x)
    image = task.images[i[0]]
    pieces = image.unfold(1, 16, 1).unfold(2, 16, 1).permute(1, 2, 0, 3, 4).flatten(0, 1)
    nearest = min((x[0] - piece).abs().max() for piece in (*pieces, *pieces.flip(-1)))
    assert nearest < 0.4  # the noise has a standard deviation of 0.05


class Greedy(torch.autograd.Function):
    """Holds 4 MB for a moment of its backward pass."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        held = torch.ones(1_000_000)
        return 2 * grad * held[0]


def test_live_bytes_see_the_backward_pass():
    x = torch.ones(3, requires_grad=True)
    assert 4_000_000 <= measure.live(lambda: Greedy.apply(x).sum().backward()) < 4_010_000


def test_iterates_are_what_a_longer_loop_holds_more():
    """K·|z| against the growth of live bytes from K = 3 to 12; rows are bought in bulk, up to an eighth more."""
    for name, factor in (("P8-128-3", 1), ("P8-128-3-adamw", 3)):
        p = make(name, "tiny")
        weights = sum(x.numel() * x.element_size() for x in p.model.parameters())
        counters = 4 * len(list(p.model.parameters())) * (factor > 1)  # Adam counts its steps for each parameter
        assert p.iterates() == 3 * (factor * weights + counters)
        run, found = BY_NAME["ours: reverse"].build(p), []
        for k in (3, 12):
            p.steps = k
            run()
            found.append(measure.live(run) - p.iterates())
        assert abs(found[1] - found[0]) <= 0.15 * p.iterates()


def test_a_process_that_holds_too_much_is_ended():
    setting = measure.Setting("tiny", 1, "keep", limit=1)
    found = measure.apart(whole_run.plain_run, setting, 3)
    assert found["limit"] == 1
    assert "ended: it held more than" in found["failed"]


def test_peak_of_a_process():
    """In a process of its own: in this one another test may have told malloc to keep what it frees."""
    code = (
        "import torch; from benchmarks import whole_run\n"
        "with whole_run.Peak() as peak: held = torch.ones(25_000_000)\n"
        "print(peak.bytes / held.nbytes)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True
    )
    assert 0.9 < float(run.stdout) < 1.5


# --- the page of goals ------------------------------------------------------------------------------------------


def test_goals_show_the_worst():
    def table(mine, peer, error=1e-6):
        rows = {"ours: reverse memory=tenth": {"group": "ours", "error": error, "seconds": [mine]}}
        return {"plain": [1.0], "rows": rows | {"peer": {"group": "peer", "error": 1e-6, "seconds": [peer]}}}

    goal = goals.Goal("time", goals.over_peer("seconds", goals.TENTH, {"P1": 1.5, "P2": 1.5}))
    assert goal.row({"table": {"P1": table(1.4, 1.0), "P2": table(1.2, 1.0)}})[1:] == [
        "P1 (worst of 2)",
        "≤ 1.50",
        "1.40",
        "reached",
    ]
    assert goal.row({"table": {"P1": table(1.6, 1.0)}})[1:] == ["P1", "≤ 1.50", "1.60", "**missed**"]
    assert goal.row({"table": {"P1": table(1.4, 1.0, error=0.1)}})[-1] == "not measured"
    assert goal.row({})[-1] == "not measured"


def test_goal_of_blocks_is_without_the_iterates():
    row = {"group": "ours", "error": 1e-14, "seconds": [3.0], "live": 300.0}
    rows = {"ours: reverse blocks=auto": row, "ours: reverse": row | {"seconds": [2.0]}}
    found = {"table": {"P8-128-3": {"rows": rows, "training": {"live": 100.0, "iterates": 180}}}}
    assert goals.large("memory", 1.0)(found) == {"P8-128-3": (1.2, 1.0)}
    assert goals.large("time", 1.4)(found) == {"P8-128-3": (1.5, 1.4)}
    assert goals.large("error", 1e-10)(found) == {"P8-128-3": (1e-14, 1e-10)}


def test_goal_of_a_whole_run_is_without_the_states():
    row = {"seconds": 30.0, "plain": 10.0, "state": 1e5}
    rows = {"100": row | {"own": 5e6}, "10000": row | {"own": 31e6}}
    ended = {"100": row | {"own": 5e6}, "10000": {"failed": "ended", "limit": 1}}
    found = {"run": {"rows": {"ours: fetch=, checkpoint=sqrt": rows, "ours: fetch=, store=": ended, "higher": rows}}}
    ((place, (figure, _)),) = goals.whole_run("memory")(found).items()
    assert place == "P9, fetch=, checkpoint=sqrt, K = 10,000"
    assert figure == pytest.approx(26 - 2 * (100 - 10) * 0.1)
    assert goals.whole_run("time")(found) == {place: (3.0, 3.5)}


def test_a_page_is_what_a_command_prints_with_its_notes(tmp_path, capfd):
    path = tmp_path / "a.md"
    (tmp_path / "a_notes.md").write_text("## A note\n")
    assert page.main([str(path), sys.executable, "-c", "print('# A')"]) == 0
    assert path.read_text() == "# A\n\n## A note\n"
    assert page.main([str(path), sys.executable, "-c", "print('# B'); raise SystemExit(3)"]) == 3
    assert path.read_text() == "# A\n\n## A note\n"
    capfd.readouterr()


def test_figures_of_two_machines_are_not_mixed(tmp_path, capsys):
    (tmp_path / "benchmarks.json").write_text('{"machine": {"cpu": "Another CPU"}}')
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path), "--merge", "--parts", "overhead", "--size", "tiny"])
    assert "measured on Another CPU" in capsys.readouterr().err
    assert not (tmp_path / "benchmarks.md").exists()
