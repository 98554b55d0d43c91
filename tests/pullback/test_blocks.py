"""Block by block: the gradient of `unroll`, whatever a block is made of; or the old way, with a word."""

import gc
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from problems import relative
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import bilevel_plugin as bilevel
from benchmarks.measure import live
from bilevel_plugin.pullback import calls as room
from bilevel_plugin.pullback.choice import chosen

N, T, C = 3, 4, 6
pytestmark = pytest.mark.usefixtures("blocks")


class Block(nn.Module):
    """Attention and an MLP; `scale` is an argument that may carry a derivative."""

    def __init__(self, width=C, norm=nn.LayerNorm, dropout=0.0):
        super().__init__()
        self.norm, self.qkv, self.out = norm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def attend(self, x):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))

    def forward(self, x, scale=1.0):
        x = x + self.dropout(self.attend(x))
        return x + scale * self.mlp(x)


class Net(nn.Module):
    """Blocks between what is none: an embedding before, a head behind."""

    def __init__(self, block=Block, layers=3, width=C, **options):
        super().__init__()
        self.inlet, self.outlet = nn.Linear(2, width), nn.Linear(width, 2)
        self.layers = nn.ModuleList(block(width, **options) for _ in range(layers))

    def through(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x):
        return self.outlet(self.through(torch.tanh(self.inlet(x))))


def batches(seed=0):
    torch.manual_seed(seed)
    return torch.randn(4, N, T, 2).double().unbind()


def losses(lam, eval_in_g=False):
    def h(model, x, y):
        return (lam.sigmoid() * (model(x) - y).square().mean((1, 2))).mean()

    def g(model, x, y):
        model.train(not eval_in_g)
        value = (model(x) - y).pow(2).mean()
        model.train()
        return value

    return h, g


def gradients(model, engine, h, g, inputs, steps=3, body=None, check=False, **options):
    """The hypergradients, from the same weights and random numbers each time."""
    x, y, xv, yv = batches()
    if "optimizer" in options:
        options["optimizer"] = options["optimizer"](model)
    torch.manual_seed(7)
    with bilevel.inner(model, h, g, engine=engine, check=check, **{"solver": "gd", **options}) as loop:
        if body is None:
            loop.run(steps, x, y, outer=(xv, yv))
        else:
            body(loop, x, y, xv, yv)
        return loop.hypergrad([*inputs, *(p for p in model.parameters() if p.requires_grad)], allow_unused=True)


def agree(model, h=None, g=None, inputs=(), lam=None, blocks="auto", tolerance=1e-10, **options):
    """blocks= against unroll. A gradient that is nothing but rounding (a bias before BatchNorm) is judged as that."""
    lam = torch.linspace(-1, 1, N).double().requires_grad_() if lam is None else lam
    h, g = h or losses(lam)[0], g or losses(lam)[1]
    options.setdefault("lr", 0.3) if "optimizer" not in options else None
    expected = gradients(model, bilevel.Unroll(), h, g, [lam, *inputs], **options)
    found = gradients(model, bilevel.Reverse(blocks=blocks), h, g, [lam, *inputs], **options)
    size = max(float(x.norm()) for x in expected)
    assert float(expected[0].norm()) > 1e-6 * size
    for mine, theirs in zip(found, expected, strict=True):
        assert float((mine - theirs).norm()) <= tolerance * max(float(theirs.norm()), 1e-3 * size)
    assert relative(found[0], expected[0]) < tolerance


def on_again(monkeypatch):
    """How often blocks were run again in a backward pass."""
    counts = []
    real = room._Call.back
    monkeypatch.setattr(room._Call, "back", lambda self, gradients: counts.append(1) or real(self, gradients))
    return counts


@pytest.fixture(autouse=True)
def ran(request, monkeypatch, blocks):
    """Every test that is not about falling back must have gone through blocks."""
    counts = on_again(monkeypatch)
    yield counts
    if "falls_back" not in request.node.name and "choice" not in request.node.name:
        assert counts


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.3, weight_decay=0.01),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), 0.2, momentum=0.9, nesterov=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), 0.05, weight_decay=0.1),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), 0.05, amsgrad=True),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), 0.05),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), 0.02, momentum=0.5),
    "two": lambda m: [torch.optim.SGD(m.layers.parameters(), 0.2), torch.optim.Adam(m.outlet.parameters(), 0.05)],
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("solver", ["gd", "bigsam"])
def test_optimizers(name, solver):
    torch.manual_seed(0)
    agree(Net().double(), optimizer=OPTIMIZERS[name], solver=solver)


@pytest.mark.parametrize(
    "options", [{"clip": 0.05}, {"direction": lambda d: {n: x.sin() for n, x in d.items()}}], ids=["clip", "direction"]
)
def test_functions_of_the_direction(options):
    torch.manual_seed(0)
    agree(Net().double(), **options)


def test_a_learned_rate_and_a_sparing_checkpoint():
    torch.manual_seed(0)
    model, lam = Net().double(), torch.linspace(-1, 1, N).double().requires_grad_()
    rate = torch.tensor(0.2).double().requires_grad_()
    h, g = losses(lam)
    expected = gradients(model, "unroll", h, g, [lam, rate], lr=rate, steps=7)
    for engine in (bilevel.Reverse("sqrt", blocks="auto"), bilevel.Reverse(3, blocks=Block)):
        found = gradients(model, engine, h, g, [lam, rate], lr=rate, steps=7)
        assert max(relative(a, b) for a, b in zip(found, expected, strict=True)) < 1e-10


@pytest.mark.parametrize("how", ["accumulate", "only"])
def test_steps_that_are_made_of_parts(how):
    torch.manual_seed(0)
    model = Net().double()

    def body(loop, x, y, xv, yv):
        for k in range(3):
            if how == "accumulate":
                loop.accumulate(x, y)
                loop.accumulate(xv, y)
                loop.step(outer=(xv, yv))
            else:
                loop.step(x, y, outer=(xv, yv), only=model.layers if k % 2 else model.outlet)

    agree(model, body=body)


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("eval_in_g", [False, True])
@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_running_statistics(norm, eval_in_g, accumulated):
    """They are inputs and results of a block: exact where g reads them, as well."""

    class Normed(nn.Module):
        def __init__(self, width):
            super().__init__()
            kind = nn.BatchNorm1d if norm == "batch" else nn.InstanceNorm1d
            self.norm = kind(width, affine=True, track_running_stats=True)
            self.mlp = nn.Sequential(nn.Linear(width, width), nn.Tanh())

        def forward(self, x):
            return x + self.mlp(self.norm(x.transpose(1, 2)).transpose(1, 2))

    torch.manual_seed(0)
    lam = torch.linspace(-1, 1, N).double().requires_grad_()
    model = Net(Normed).double()
    before = {n: b.clone() for n, b in model.named_buffers()}

    def body(loop, x, y, xv, yv):
        for _ in range(2):
            loop.step(x, y, outer=(xv, yv))
            loop.accumulate(xv, y)
            loop.step()  # an update alone, through which the adjoint of the statistics passes

    options = {"body": body} if accumulated else {}
    agree(model, *losses(lam, eval_in_g), lam=lam, **options)
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


def test_dropout_and_random_numbers_behind():
    torch.manual_seed(0)
    model = Net(dropout=0.4).double()
    lam = torch.linspace(-1, 1, N).double().requires_grad_()

    def h(model, x, y):
        noisy = model(x) + 0.1 * torch.randn(N, T, 2).double()
        return (lam.sigmoid() * (noisy - y).square().mean((1, 2))).mean()

    agree(model, h, losses(lam)[1], lam=lam)


class Trees(Net):
    """Blocks that take and return trees, one of whose results is an argument."""

    class Layer(Block):
        def forward(self, given, *, mask, options):
            x = super().forward(given["x"], scale=options[1])
            return {"x": x * mask, "sum": (given["sum"] + x.mean(), mask)}, options[0]

    def __init__(self):
        super().__init__(Trees.Layer)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def through(self, x):
        mask, given = torch.ones(T, 1, dtype=x.dtype), {"x": x, "sum": torch.zeros((), dtype=x.dtype)}
        for layer in self.layers:
            given, same = layer(given, mask=mask, options=("same", self.scale * 2))
            assert same == "same"
            assert given["sum"][1] is mask
            given["sum"] = given["sum"][0]
        return given["x"] + given["sum"]


class Twice(Net):
    """Each block twice, the weights of two blocks tied, a block inside a block, a weight used outside as well."""

    class Outer(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.inner = nn.ModuleList([Block(width), Block(width)])

        def forward(self, x):
            for block in self.inner:
                x = block(x)
            return x

    def __init__(self):
        super().__init__(Twice.Outer)
        self.layers[1].inner[0].qkv.weight = self.layers[0].inner[0].qkv.weight
        self.layers[2].inner[1].out.weight = self.layers[0].inner[0].out.weight

    def through(self, x):
        return super().through(super().through(x)) @ self.layers[0].inner[0].out.weight


@pytest.mark.parametrize("model", [Trees, Twice])
def test_ways_to_call_blocks(model):
    torch.manual_seed(0)
    agree(model().double(), lr=0.02)


@pytest.mark.parametrize("which", [[0], [1], [0, 1], "root"])
def test_a_block_on_data(which):
    """What comes to the first block requires no grad, and it is a block all the same; so may the whole model be."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)).double()
    agree(model, blocks=[model] if which == "root" else [model[i] for i in which])


def test_blocks_inside_of_blocks():
    torch.manual_seed(0)
    model = Twice().double()
    assert len(chosen(model, "auto")) == 6  # of those inside of one another, the smaller
    agree(model, blocks=(Twice.Outer, Block), lr=0.02)
    agree(model, blocks=[*model.layers[0].inner, model.layers[1]], lr=0.02)


def test_outer_variables_inside_of_blocks():
    """Closed over, as a parameter of another module, and in the batch with a graph behind it."""
    torch.manual_seed(0)
    model, other = Net().double(), nn.Linear(C, C).double()
    for p in other.parameters():
        p.requires_grad_()
    lam, raw = torch.randn(C).double().requires_grad_(), torch.randn(C).double().requires_grad_()
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda m, args: args)
        layer.attend = lambda x, real=layer.attend: real(x) * lam + other(x)

    def h(model, x, y, scale):
        x = torch.tanh(model.inlet(x))
        for layer in model.layers:
            x = layer(x, scale=scale)
        return (model.outlet(x) - y).square().mean()

    def body(loop, x, y, xv, yv):
        for _ in range(3):
            loop.step(x, y, raw.exp(), outer=(xv, yv))

    agree(model, h, lambda m, x, y: (m(x) - y).square().mean(), [raw, *other.parameters()], lam, body=body, lr=0.02)


def constant(model, x, y, lam):
    """What is computed under no_grad, or detached, is a constant, in a block and outside of one."""
    with torch.no_grad():
        target = model(x).roll(1, 0)
    return (lam.sigmoid() * (model(x) - target - y).square().mean((1, 2))).mean() + model(x).detach().mean()


def test_constants():
    torch.manual_seed(0)
    model, lam = Net().double(), torch.linspace(-1, 1, N).double().requires_grad_()
    for layer in model.layers:

        def attend(x, real=layer.attend):
            with torch.no_grad():
                size = real(x).norm()
            return real(x) * size + real(x).detach() + torch.no_grad()(real)(x)

        layer.attend = attend
    agree(model, lambda m, x, y: constant(m, x, y, lam), losses(lam)[1], lam=lam, lr=0.02)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["in a block", "around a block"])
def test_activation_checkpointing(where, reentrant):
    torch.manual_seed(0)
    model = Net(dropout=0.3).double()
    lam = torch.linspace(-1, 1, N).double().requires_grad_()
    plain = gradients(model, bilevel.Reverse(), *losses(lam), [lam], lr=0.3)
    for layer in model.layers:
        held, name = (layer, "attend") if where == "in a block" else (layer, "__call__")
        if name == "attend":
            held.attend = lambda x, real=layer.attend: checkpoint(real, x, use_reentrant=reentrant)
    if where == "around a block":

        def through(x):
            for layer in model.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

        model.through = through
    found = gradients(model, bilevel.Reverse(blocks="auto"), *losses(lam), [lam], lr=0.3)
    assert max(relative(a, b) for a, b in zip(found, plain, strict=True)) < 1e-10


def test_a_graph_behind_what_a_loss_closes_over():
    torch.manual_seed(0)
    model, raw = Net().double(), torch.randn(N, T, 2).double().requires_grad_()
    encoded = raw.exp()
    h = lambda m, x, y: (m(encoded) - y).square().mean()
    agree(model, h, lambda m, x, y: (m(x) - y).square().mean(), [], raw)


def test_autocast():
    """As far as rounding goes: with blocks and without are as far from float64 as each other."""
    torch.manual_seed(0)
    model = Net()
    lam = torch.linspace(-1, 1, N).requires_grad_()
    base_h, base_g = losses(lam)

    def cast(loss):
        def under(model, x, y):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return loss(model, x.float(), y.float())

        return under

    found = [
        gradients(model, engine, cast(base_h), cast(base_g), [lam], lr=0.3)[0]
        for engine in (bilevel.Reverse(blocks="auto"), bilevel.Reverse())
    ]
    exact = gradients(model.double(), "unroll", base_h, base_g, [lam], lr=0.3)[0]
    mine, theirs = (relative(x.double(), exact) for x in found)
    assert mine < max(3 * theirs, 0.02)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_hugging_face_models(name, transformers):
    small = {
        "vocab_size": 13,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    config, kind = {
        "gpt2": lambda: (
            transformers.GPT2Config(vocab_size=13, n_positions=16, n_embd=8, n_layer=2, n_head=2, use_cache=False),
            transformers.GPT2LMHeadModel,
        ),
        "bert": lambda: (transformers.BertConfig(**small), transformers.BertForMaskedLM),
        "llama": lambda: (transformers.LlamaConfig(**small, use_cache=False), transformers.LlamaForCausalLM),
    }[name]()
    torch.manual_seed(0)
    model = kind(config).double().train()
    words, lam = torch.randint(13, (3, 5)), torch.zeros(3).double().requires_grad_()

    def h(model, words):
        scores = F.cross_entropy(model(input_ids=words).logits.transpose(1, 2), words.roll(-1, 1), reduction="none")
        return (lam.sigmoid() * scores.mean(1)).mean()

    g = lambda m, words: m(input_ids=words, labels=words).loss

    def found(engine):
        torch.manual_seed(3)
        with bilevel.inner(model, h, g, solver="gd", lr=0.1, engine=engine, check=False) as loop:
            loop.run(2, words, outer=(words.flip(0),))
            return loop.hypergrad(lam)

    # Llama normalises in float32, whatever its weights are
    assert relative(found(bilevel.Reverse(blocks="auto")), found(bilevel.Reverse())) < (
        1e-6 if name == "llama" else 1e-10
    )


class Padded(nn.Module):
    """Words, of which one is padding, by a matrix that is the head as well: its row has no gradient as an embedding."""

    def __init__(self, inside):
        super().__init__()
        self.words, self.layers = nn.Embedding(5, C, padding_idx=1), nn.ModuleList(Block() for _ in range(2))
        nn.init.normal_(self.words.weight)
        if inside:
            self.layers[1].words = self.words
            self.layers[1].attend = lambda x: x * self.words(torch.tensor([1, 2])).sum(0)

    def forward(self, words):
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return x @ self.words.weight.T


@pytest.mark.parametrize("inside", [False, True])
def test_an_embedding_with_padding(inside):
    """A step leaves the row of padding alone where it is an embedding; g and the next step depend on it anyway."""
    torch.manual_seed(0)
    model, lam = Padded(inside).double(), torch.linspace(-1, 1, N).double().requires_grad_()
    words = torch.tensor([[0, 1, 2, 3], [1, 1, 4, 2], [3, 1, 0, 4]])

    def scores(model, words, by):  # flat, as forward mode can't differentiate torch's kernel for classes in the middle
        found = F.cross_entropy(model(words).flatten(0, 1), words.roll(by, 1).flatten(), reduction="none")
        return found.view(words.shape).mean(1)

    h = lambda m, words: (lam.sigmoid() * scores(m, words, 1)).mean()
    g = lambda m, words: scores(m, words, 2).mean()

    def run(engine, shift=0.0, v=0.0):
        with torch.no_grad():
            lam.add_(shift * v)
        with bilevel.inner(model, h, g, solver="gd", lr=0.1, engine=engine, check=False) as loop:
            loop.run(3, words, outer=(words.flip(0),))
            inputs = [lam] if engine == "forward" else [lam, model.words.weight]
            found = loop.value if shift else loop.hypergrad(inputs)
        with torch.no_grad():
            lam.sub_(shift * v)
        return found

    v = torch.randn(N).double()
    slope = (run("reverse", 1e-5, v) - run("reverse", -1e-5, v)) / 2e-5
    expected = run("unroll")
    assert abs(float(expected[0] @ v - slope)) < 1e-7 * float(expected[0].norm())
    for engine in ("reverse", bilevel.Reverse(blocks="auto"), "forward", bilevel.Reverse(memory="1GiB")):
        assert all(relative(mine, theirs) < 1e-10 for mine, theirs in zip(run(engine), expected, strict=False))


# --- falling back ---


class Cube(torch.autograd.Function):
    """It has a second derivative, and no forward mode."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, a):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * a


class Cache:
    def __init__(self):
        self.seen = []


def with_gradient(model, x, y):
    x = x.detach().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):  # as it has to be in the plain loop, too
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return slope.square().mean()


class Reversed(torch.autograd.Function):
    """A gradient reversal layer, that has a forward mode."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, a):
        return -0.5 * a

    @staticmethod
    def jvp(ctx, a):
        return a.clone()


FALLING = {
    "a reversed gradient": "is not symmetric, since an operation changes the gradient",
    "a custom function in a block": "a block does not run on dual numbers",
    "a custom function in a loss": "a loss does not run on dual numbers",
    "an object": "is given a Cache, which it may change.*use_cache",
    "a derivative in a loss": "takes a derivative of its own through a block",
    "stop_gradient": "stop_gradient",
    "in place": "changes its input in place",
    "from outside": "a graph that was made outside it",
    "from outside, and gone": "a block does not run on dual numbers, or not a second time",
    "no blocks": "has no ModuleList or Sequential with several modules of one class",
    "tasks": "with tasks= the weights have a task dimension",
    "checkpointing outside": "outside the blocks runs under activation checkpointing",
}


@pytest.mark.parametrize("case", FALLING)
def test_falls_back_with_a_word(case):
    """The gradient is the same as ever, and a warning says why it took the memory of a whole step."""
    torch.manual_seed(0)
    model, lam = Net().double(), torch.linspace(-1, 1, N).double().requires_grad_()
    base, g = losses(lam)
    h, options = base, {"lr": 0.3}
    if case == "a custom function in a block":
        model.layers[1].attend = lambda x, real=model.layers[1].attend: Cube.apply(real(x))
    elif case == "a reversed gradient":
        h = lambda m, x, y: base(m, Reversed.apply(m.inlet.weight).sum() * x, y)
        options["check"] = "first"
    elif case == "a custom function in a loss":
        h = lambda m, x, y: base(m, Cube.apply(m.inlet.bias.sum()) + x, y)
    elif case == "an object":
        model.layers[0].forward = lambda x, cache=None, real=model.layers[0].forward: real(x)
        model.through = lambda x: model.layers[1](model.layers[0](x, cache=Cache()))
    elif case == "a derivative in a loss":
        h = lambda m, x, y: base(m, x, y) + with_gradient(m, x, y)
    elif case == "stop_gradient":
        h = lambda m, x, y: base(m, x, y) + (m(x) * bilevel.stop_gradient(m(y))).mean()
    elif case == "in place":
        model.layers[1].forward = lambda x, real=model.layers[1].forward: real(x.mul_(0.9))
    elif case.startswith("from outside"):

        def attend(x):
            return model.layers[1].out(x) * model.held.mean()

        def through(x):
            model.held = x + 1
            value = Net.through(model, x)
            if case == "from outside, and gone":
                del model.held
            return value

        model.layers[1].attend, model.through = attend, through
    elif case == "checkpointing outside":
        model.outlet.forward = lambda x, real=model.outlet.forward: checkpoint(
            lambda x: real(x.tanh()), x, use_reentrant=False
        )
    elif case == "no blocks":
        model = nn.Sequential(nn.Linear(2, C), nn.Tanh(), nn.Linear(C, 2)).double()
    if case == "tasks":
        options["tasks"] = N
        h = lambda m, x, y, w: (w.sigmoid() * (m(x[None]) - y).square().mean((1, 2))).mean()

        def body(loop, x, y, xv, yv):
            loop.run(3, x, y, lam, outer=(xv[:, None], yv))

        options["body"] = body
    how = "reverse" if case == "checkpointing outside" else "unroll"  # which refuses that
    expected = gradients(model, how, h, g, [lam], **{**options, "check": False})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = gradients(model, bilevel.Reverse(blocks="auto"), h, g, [lam], **options)
    # the sentinel finds a reversed gradient: no double backward follows it
    (off,) = [w for w in caught if not issubclass(w.category, bilevel.DerivativeWarning)]
    assert re.search(f"blocks= is off for this loop.*{FALLING[case]}", str(off.message), re.DOTALL)
    assert len(caught) == 1 + (case == "a reversed gradient")
    for mine, theirs in zip(found, expected, strict=True):
        assert relative(mine, theirs) < 1e-10 or float(theirs.norm()) < 1e-12
    assert "forward" not in vars(model) or case == "an object"
    assert not any("forward" in vars(m) for m in model.modules()) or case in (
        "an object",
        "in place",
        "checkpointing outside",
    )


@pytest.mark.parametrize("wrong", ["all", 3, [], [nn.Linear(2, 2), 4], int])
def test_choice_of_blocks_that_makes_no_sense(wrong):
    with pytest.raises(TypeError, match=r"bilevel\.Reverse: blocks= takes 'auto', a class of modules, modules"):
        bilevel.Reverse(blocks=wrong)


def test_choice_of_blocks_that_the_model_has_not():
    lam = torch.zeros(N).double().requires_grad_()
    with pytest.raises(ValueError, match="blocks= names LSTM, but the model has no such module"):
        gradients(Net().double(), bilevel.Reverse(blocks=nn.LSTM), *losses(lam), [lam], lr=0.1)


def test_choice_of_blocks_by_itself():
    stage = lambda: nn.Sequential(*(Block() for _ in range(2)))
    assert len(chosen(nn.Sequential(stage(), stage()), "auto")) == 4
    assert chosen(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), "auto") == []
    model = Net(layers=2)
    assert chosen(model, "auto") == list(model.layers)
    assert chosen(model, [model.inlet]) == [model.inlet]


# --- together with ---


@pytest.mark.parametrize("name", ["momentum", "adamw"])
@pytest.mark.parametrize("micro", [2, 3])
def test_micro_batches(name, micro):
    """One part at a time, and of it one block at a time; with dropout, the parts draw one after the other."""
    torch.manual_seed(0)
    model = Net(dropout=0.2).double()

    def h(model, x, y, w):
        return (w.sigmoid() * (model(x) - y).square().mean((1, 2))).mean()

    g = losses(None)[1]
    lam = torch.linspace(-1, 1, N).double().requires_grad_()

    def body(loop, x, y, xv, yv):
        loop.run(3, x, y, lam, outer=(xv, yv), micro=micro, reduction="mean")

    agree(model, h, g, lam=lam, body=body, optimizer=OPTIMIZERS[name])


@pytest.mark.parametrize("memory", ["1MB", "150kB"])
def test_a_memory_budget_keeps_states_alone(memory):
    torch.manual_seed(0)
    model, lam = Net().double(), torch.linspace(-1, 1, N).double().requires_grad_()
    x, y, xv, yv = batches()
    found = []
    for engine in ("unroll", bilevel.Reverse(blocks="auto", memory=memory)):
        with bilevel.inner(model, *losses(lam), solver="gd", lr=0.1, engine=engine, check=False) as loop:
            loop.run(12, x, y, outer=(xv, yv))
            plan = loop.plan
            found.append(loop.hypergrad(lam))
    assert plan.graphs == 0
    assert (plan.reruns > 12) == (memory == "150kB")
    assert relative(*found) < 1e-10


def test_the_sentinel_looks_at_two_samples():
    """It would take more memory than the loop; and it tells what it would tell otherwise."""
    torch.manual_seed(0)
    model, lam, seen = Net().double(), torch.tensor(0.3).double().requires_grad_(), set()

    def h(model, x, y):
        seen.add(len(x))
        return lam.exp() * (model(x) - (2 * model(x)).detach() - y).square().mean()

    with pytest.warns(bilevel.DerivativeWarning, match="the second derivative of h is not the derivative of the loss"):
        gradients(model, bilevel.Reverse(blocks="auto"), h, losses(None)[1], [lam], lr=0.1, check="always")
    assert seen == {2, N}


def test_the_sentinel_looks_at_four_samples_where_a_layer_normalises_by_the_batch():
    """With two, its gradient is nearly zero."""

    class Normed(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm, self.mlp = nn.BatchNorm1d(width), nn.Linear(width, width)

        def forward(self, x):
            return x + self.mlp(self.norm(x)).tanh()

    torch.manual_seed(0)
    model, lam, x, seen = Net(Normed).double(), torch.tensor(0.3).double().requires_grad_(), torch.randn(8, 2), set()

    def h(model, x):
        seen.add(len(x))
        return lam.exp() * (model(x) - 1).square().mean()

    engine = bilevel.Reverse(blocks=Normed)
    with bilevel.inner(model, h, h, solver="gd", lr=0.1, engine=engine, check="always") as loop:
        loop.run(2, x.double(), outer=(x.double(),))
        assert loop.hypergrad(lam).isfinite()
    assert seen == {4, 8}


# --- what it is for ---


def test_memory_is_that_of_a_block():
    """Peak bytes of tensors are those of a plain training step, which has the graph of all blocks at once."""
    lam, x = torch.zeros(32, requires_grad=True), torch.randn(32, 16, 2)
    h, g = losses(lam)
    torch.manual_seed(0)
    model = Net(layers=16, width=16)

    def plain():
        torch.autograd.grad(h(model, x, x), list(model.parameters()))

    def run(engine):
        with bilevel.inner(model, h, g, solver="gd", lr=0.1, engine=engine, check=False) as loop:
            loop.run(2, x, x, outer=(x, x))
            loop.hypergrad(lam)

    peaks = []
    for what in (plain, lambda: run(bilevel.Reverse(blocks="auto")), lambda: run("reverse")):
        what()
        gc.collect()
        peaks.append(live(what))
    states = 6 * sum(p.nbytes for p in model.parameters())
    assert peaks[1] - states < 1.1 * peaks[0]
    assert peaks[2] - states > 2.5 * peaks[0]  # this is what it saves


def test_the_model_is_as_it_was():
    torch.manual_seed(0)
    model, lam = Net(dropout=0.2).double(), torch.zeros(N).double().requires_grad_()
    before = {n: p.clone() for n, p in model.named_parameters()}
    gradients(model, bilevel.Reverse(blocks=[Block]), *losses(lam), [lam], lr=0.3)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert not any("forward" in vars(m) for m in model.modules())
    with forward_ad.dual_level():  # none was left open, nor forward mode off
        assert forward_ad.unpack_dual(forward_ad.make_dual(lam, torch.ones(N).double()).sin()).tangent is not None
