"""What the processes of tests/test_parallel.py run: each case on all data, or on a rank's share of them."""

import copy
import datetime
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contract import ROOM
from torch import nn

import bilevel_plugin as bilevel
from bilevel_plugin.autograd.look import hooks_on_saved

SAMPLES, STEPS = 12, 6


def data():
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    y, y_val = torch.randint(3, (2, SAMPLES), generator=generator)
    return draw(SAMPLES, 4), y, draw(SAMPLES, 4), y_val, draw(SAMPLES)


def smooth_model():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def solve(
    make,
    share,
    group=None,
    engine="reverse",
    solver="gd",
    optimizer=None,
    steps=STEPS,
    wrt_start=True,
    micro=None,
    fetch=False,
):
    """Gradients for weights of the samples (a rank's own), a regulariser, a rate and w_0 (of all); and g.

    Alone, the batch is taken whole, also where the ranks take theirs in parts.
    """
    x, y, x_val, y_val, start = (part[share] for part in data())
    model = make()
    lam = start.clone().requires_grad_()
    mu, rate = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (-3.0, 0.3))

    def h(model, x, y, rows):
        decay = sum(p.square().sum() for p in model.parameters())
        return (torch.sigmoid(lam[rows]) * F.cross_entropy(model(x), y, reduction="none")).mean() + mu.exp() * decay

    g = lambda model, x, y: F.cross_entropy(model(x), y)
    options = {"local": lam, "group": group} if group else {}
    if optimizer:
        options |= {"optimizer": optimizer(model.parameters(), rate), "solver": solver}
    else:
        rules = {"gd": bilevel.GD(rate), "bigsam": bilevel.BiGSAM(rate), "penalty": bilevel.Penalty(rate, 0.5)}
        options |= {"solver": rules[solver]}
    inputs = [lam, mu, rate, *(model.parameters() if wrt_start else ())]
    with bilevel.inner(model, h, g, engine=engine, **options) as loop:
        rows = torch.arange(len(x))
        batch = {"fetch": lambda: {"x": x, "y": y, "rows": rows}} if fetch else {"x": x, "y": y, "rows": rows}
        loop.run(steps, outer=(x_val, y_val), micro=micro if group else None, **batch)
        grads = loop.hypergrad(inputs)
        own = loop.hypergrad(mu, loss=(loop(x_val) ** 2).mean())
        weights = sum(w.square().sum() for w in loop.weights.values())  # and of the weights themselves
        own = torch.stack([own, loop.hypergrad(mu, loss=weights * loop(x_val).square().mean())])
        loop.backward()
        torch.testing.assert_close([mu.grad, lam.grad], [grads[1], grads[0]], rtol=1e-12, atol=1e-15)
        return {"local": grads[0], "shared": [loop.value, own, *grads[1:]]}


def features(make, share, group=None, **_):
    """The outer variable is an encoder, behind the tensors of the batch; and again with one named input."""
    x, y, x_val, y_val, _ = (part[share] for part in data())
    encoder, head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double(), nn.Linear(4, 3).double()
    ramps(encoder, head)
    loss = lambda head, f, y: F.cross_entropy(head(f), y)
    with bilevel.inner(head, loss, loss, lr=0.4, solver="bigsam", group=group) as loop:
        loop.run(STEPS, encoder(x), y, outer=(encoder(x_val), y_val))
        loop.backward(retain_graph=True)
        first = loop.hypergrad(encoder[0].weight)
        torch.testing.assert_close(first, encoder[0].weight.grad, rtol=1e-12, atol=1e-15)
    return {"local": torch.zeros(len(x)), "shared": [p.grad for p in encoder.parameters()]}


def on_the_way(make, share, group=None, engine="reverse"):
    """Outer losses at several steps: g with weights that can be learned, and a loss of one's own."""
    x, y, x_val, y_val, start = (part[share] for part in data())
    model, lam = make(), start.clone().requires_grad_()
    mu, c = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (-3.0, 0.7))
    h = lambda model, x, y, rows: (torch.sigmoid(lam[rows]) * F.cross_entropy(model(x), y, reduction="none")).mean()
    g = lambda model, x, y: F.cross_entropy(mu.exp() * model(x), y)
    options = {"local": lam, "group": group} if group else {}
    with bilevel.inner(model, h, g, solver="gd", lr=0.3, engine=engine, **options) as loop:
        for k in range(STEPS):
            loop.step(x, y, torch.arange(len(x)))
            loop.add_outer_loss(weight=c**k, outer=(x_val, y_val))
            if k == 2:
                loop.add_outer_loss(weight=c, loss=loop(x_val).square().mean() * mu.exp())
        grads = loop.hypergrad([lam, mu, c, *model.parameters()])
        return {"local": grads[0], "shared": [loop.value, *grads[1:]]}


def sgd(parameters, rate):
    return torch.optim.SGD(parameters, rate, momentum=0.9, weight_decay=0.01)


def adam(parameters, rate):
    return torch.optim.Adam(parameters, rate)


def linear():
    return zeroed(nn.Linear(4, 3).double())


def zeroed(model):
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


def ramps(*modules):
    """Weights that are the same everywhere, without a seed."""
    with torch.no_grad():
        for i, p in enumerate(p for module in modules for p in module.parameters()):
            p.copy_(torch.linspace(-1, 1, p.numel(), dtype=torch.float64).roll(i).view_as(p))


SETTLED = {"make": linear, "solver": "penalty", "steps": 120, "wrt_start": False}
CASES = {
    "reverse": {},
    "bigsam": {"solver": "bigsam"},
    "sqrt": {"engine": bilevel.Reverse(checkpoint="sqrt")},
    "truncate": {"engine": bilevel.Reverse(truncate=3), "wrt_start": False},
    "memory": {"engine": bilevel.Reverse(memory=ROOM), "solver": "bigsam"},
    "little memory": {"engine": bilevel.Reverse(memory="12kB")},
    "unroll": {"engine": "unroll", "solver": "bigsam"},
    "momentum": {"optimizer": sgd, "solver": "bigsam"},
    "momentum, unrolled": {"optimizer": sgd, "engine": "unroll"},
    "adam": {"optimizer": adam},
    "momentum, run backwards": {"optimizer": sgd, "engine": bilevel.Reverse("reversible")},
    "adam, run backwards": {"optimizer": adam, "engine": bilevel.Reverse("reversible")},
    "in parts": {"solver": "bigsam", "micro": 3},
    "momentum, in parts": {"optimizer": sgd, "solver": "bigsam", "micro": 5},  # more than a rank of three has samples
    "adam, in parts": {"optimizer": adam, "micro": 3},
    "unroll, in parts": {"engine": "unroll", "micro": 3},
    "blocks": {"engine": bilevel.Reverse(blocks=nn.Linear)},
    "adam, blocks": {"optimizer": adam, "engine": bilevel.Reverse(blocks=nn.Linear), "micro": 2},
    "memory, in parts": {"engine": bilevel.Reverse(memory="40kB"), "micro": 3},
    "fetched": {"micro": 2, "fetch": True, "engine": bilevel.Reverse(checkpoint=2)},
    "cg": {"engine": "cg", **SETTLED},
    "neumann": {"engine": "neumann", **SETTLED},
    "features": {"run": features},
    "on the way": {"run": on_the_way},
    "on the way, sqrt": {"run": on_the_way, "engine": bilevel.Reverse(checkpoint="sqrt")},
    "on the way, memory": {"run": on_the_way, "engine": bilevel.Reverse(memory=ROOM)},
    "on the way, unrolled": {"run": on_the_way, "engine": "unroll"},
}
if hooks_on_saved is None:  # torch 2.6, where blocks= is off
    CASES = {name: case for name, case in CASES.items() if "blocks" not in name}


def run(name, share, group=None):
    case = {"make": smooth_model, **CASES[name]}
    return case.pop("run", solve)(share=share, group=group, **case)


def message(function):
    """What a call that has to fail says."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was wrong"


def failures(rank, group):
    """Mistakes on one rank that all ranks have to be told of."""
    x, y, x_val, y_val, _ = data()
    loss = lambda model, x, y: F.cross_entropy(model(x), y)
    block = lambda model, **options: bilevel.inner(model, loss, loss, solver="gd", lr=0.1, group=group, **options)

    def other_start():
        model = smooth_model()
        with torch.no_grad():
            model[0].bias += rank
        with block(model) as loop:
            loop.step(x, y)

    def one_step_more():
        with block(smooth_model()) as loop:
            loop.run(2 + (rank == 0), x, y, outer=(x_val, y_val))
            _ = loop.value

    def one_nan():
        with block(smooth_model()) as loop:
            loop.step(x / (0.0 if rank == 1 else 1.0), y)

    def other_inputs():
        c, d = (torch.zeros(n, dtype=torch.float64, requires_grad=True) for n in (1, 2))
        weighted = lambda model, x, y: loss(model, x, y) * (1 + c.sum() + d.sum())
        with bilevel.inner(smooth_model(), weighted, loss, lr=0.1, group=group) as loop:
            loop.run(2, x, y, outer=(x_val, y_val))
            loop.hypergrad(c if rank == 0 else d)

    def unused_everywhere():
        with block(smooth_model()) as loop:
            loop.run(2, x, y, outer=(x_val, y_val))
            loop.hypergrad(torch.zeros(1, requires_grad=True))

    def own_rate():
        model = smooth_model()
        sgd = torch.optim.SGD(model.parameters(), 0.1 * (1 + rank))
        with bilevel.inner(model, loss, loss, optimizer=sgd, group=group) as loop:
            loop.run(2, x, y, outer=(x_val, y_val))
            loop.backward(model)

    def outer_variable_in_direction():
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        with block(smooth_model(), direction=lambda d: {n: scale * v for n, v in d.items()}) as loop:
            loop.run(2, x, y, outer=(x_val, y_val))
            loop.hypergrad(scale)

    mistakes = (
        other_start, own_rate, one_step_more, one_nan, other_inputs, unused_everywhere, outer_variable_in_direction
    )  # fmt: skip
    return {f.__name__: message(f) for f in mistakes}


def traffic(group, engine):
    """Elements that one more step sums over the group, over |w|."""
    counted, plain = [], dist.all_reduce

    def counting(tensor, *args, **kwargs):
        counted.append(tensor.numel())
        return plain(tensor, *args, **kwargs)

    x, y, x_val, y_val, _ = data()
    c = torch.zeros((), dtype=torch.float64, requires_grad=True)
    loss = lambda model, x, y: (1 + c) * F.cross_entropy(model(x), y)

    def volume(steps):
        counted.clear()
        with bilevel.inner(model, loss, loss, solver="gd", lr=0.1, group=group, engine=engine) as loop:
            loop.run(steps, x, y, outer=(x_val, y_val))
            loop.hypergrad(c)
        return sum(counted)

    model = linear()
    size = sum(p.numel() for p in model.parameters())
    dist.all_reduce = counting
    try:
        return (volume(6) - volume(4)) / 2, size
    finally:
        dist.all_reduce = plain


def ddp(rank, size):
    """Task parallel: each rank has heads of its own for its own tasks, and the encoder is under DDP."""
    x, y, x_val, y_val, _ = data()
    tasks = slice(None) if size == 0 else slice(rank, None, size)
    batches = [part.view(6, 2, -1) for part in (x, x_val)]
    labels = [part.view(6, 2) % 2 for part in (y, y_val)]
    encoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    ramps(encoder)
    wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(encoder)) if size else encoder
    loss = lambda head, f, y: F.cross_entropy(head(f), y)
    head = zeroed(nn.Linear(4, 2).double())
    f, f_val = wrapped(torch.cat([part[tasks] for part in batches], 1)).split(2, 1)
    n = len(f)
    with bilevel.inner(head, loss, loss, lr=0.4, tasks=n, engine="unroll") as loop:
        loop.run(3, f, labels[0][tasks], outer=(f_val, labels[1][tasks]))
        loop.backward()
    return [p.grad / n for p in wrapped.parameters()]


def stored(group, folder, normalised=False, optimizer=None):
    """Bytes of 8 iterates (in memory, in a file), of a state's common and rank-local part, and the gradient."""
    x, y, x_val, y_val, _ = data()
    model = nn.Sequential(nn.Linear(4, 40), *[nn.BatchNorm1d(40)] * normalised, nn.Tanh(), nn.Linear(40, 3)).double()
    ramps(model)
    c = torch.zeros((), dtype=torch.float64, requires_grad=True)
    loss = lambda model, x, y: (1 + c) * F.cross_entropy(model(x), y)
    found = []
    for store in ("device", Path(folder)):
        options = {"optimizer": optimizer(model.parameters(), 0.1)} if optimizer else {"lr": 0.1}
        engine = bilevel.Reverse(store=store)
        with bilevel.inner(model, loss, loss, solver="gd", group=group, engine=engine, **options) as loop:
            loop.run(8, x, y, outer=(x_val, y_val))
            local = sum(loop._run.z[n].nbytes for n in loop._run.model.seen.statistics)
            state = sum(z.nbytes for z in loop._run.z.values()) - local
            kept = loop._run.tape.states.store.file or loop._run.tape.states.store
            found.append((kept.nbytes, state, local, loop.hypergrad(c)))
    return found


def main(rank, size, folder):
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", (Path(folder) / "store").as_uri(), timeout, size, rank)
    group = dist.group.WORLD
    share = slice(rank * SAMPLES // size, (rank + 1) * SAMPLES // size)
    found = {name: run(name, share, group) for name in CASES}
    found["failures"] = failures(rank, group)
    engines = {"unroll": "unroll", "memory": bilevel.Reverse(memory="1GB"), "reverse": "reverse"}
    found["traffic"] = {name: traffic(group, engine) for name, engine in engines.items()}
    found["ddp"] = ddp(rank, size)
    kinds = {"plain": {}, "statistics": {"normalised": True}, "momentum": {"optimizer": sgd}}
    found["stored"] = {name: stored(group, folder, **kind) for name, kind in kinds.items()}
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
