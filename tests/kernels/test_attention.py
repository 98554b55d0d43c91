"""Attention in chunks of queries is attention: values and derivatives, in a block and by itself, in linear memory."""

import importlib
import warnings
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention as by_its_own_name
from torch.utils.checkpoint import checkpoint

import bilevel_plugin as bilevel
from benchmarks.measure import live
from bilevel_plugin.kernels.replace import replaced
from bilevel_plugin.kernels.switches import Patched

chunks = importlib.import_module("bilevel_plugin.kernels.attention")
MATH = torch.ops.aten._scaled_dot_product_attention_math
DOUBLE = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward mode uses it


def plain(q, k, v, mask=None, **options):
    """The kernel of torch, on switches that leave one only."""
    before = chunks.LONG
    chunks.LONG = 2**62
    try:
        with replaced():
            return F.scaled_dot_product_attention(q, k, v, mask, **options)
    finally:
        chunks.LONG = before


@pytest.fixture
def always(monkeypatch):
    """Chunks for every length, as small as they get: d rows each. How often they were taken."""
    taken, whole = [], chunks.in_chunks

    def counted(tensors, part, chunk):
        taken.append(-(-tensors[0].shape[-2] // chunk))
        return whole(tensors, part, chunk)

    monkeypatch.setattr(chunks, "LONG", 1)
    monkeypatch.setattr(chunks, "CHUNK", 1)
    monkeypatch.setattr(chunks, "in_chunks", counted)
    return taken


def tensors(*shapes, seed=0, dtype=DOUBLE):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g, dtype=dtype).requires_grad_() for s in shapes]


def derivatives(f, xs, orders=3):
    """f, ∇φ(f), the product of the Hessian of φ(f) with a vector, and one order more."""
    out = f(*xs)
    us = tensors(*[x.shape for x in xs], seed=1, dtype=out.dtype)
    weight = tensors(out.shape, seed=2, dtype=out.dtype)[0].detach()
    found, value = [out], (out * weight).sin().sum()
    for _ in range(orders):
        grads = torch.autograd.grad(value, xs, create_graph=True, materialize_grads=True)
        found += grads
        value = sum((g * u.detach()).sum() for g, u in zip(grads, us, strict=True))
    return found


def agree(ours, theirs, tol=1e-10):
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=tol, atol=tol)


def square(*shape, seed=3, full=()):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4
    mask[..., 0] = True
    for row in full:
        mask[..., row, :] = False
    return mask


Q, K = (2, 2, 7, 3), (2, 2, 5, 3)
DROPOUT = {
    "dropout": ([Q, K, K], {"dropout_p": 0.3}),
    "dropout, grouped": ([(2, 4, 7, 3), K, K], {"dropout_p": 0.3, "enable_gqa": True}),
}
CASES = {  # shapes of q, k, v (and of a mask that is differentiated for), and the options
    "plain": ([Q, K, (2, 2, 5, 4)], {}),
    "two dimensions": ([(7, 3), (5, 3), (5, 3)], {}),
    "three dimensions": ([(2, 7, 3), (2, 5, 3), (2, 5, 3)], {}),
    "five dimensions": ([(2, 1, 2, 4, 3), (2, 1, 2, 5, 3), (2, 1, 2, 5, 3)], {}),
    "keys for all": ([Q, (1, 2, 5, 3), (1, 2, 5, 3)], {}),
    "one row": ([(2, 2, 1, 3), K, K], {}),
    "causal": ([Q, Q, Q], {"is_causal": True}),
    "causal, L > S": ([Q, K, K], {"is_causal": True}),
    "causal, L < S": ([K, Q, Q], {"is_causal": True}),
    "scale": ([Q, K, K], {"scale": 0.3}),
    "negative scale": ([Q, K, K], {"scale": -0.3}),
    "no scale": ([Q, K, K], {"scale": 0.0}),
    "boolean mask": ([Q, K, K], {"mask": square(7, 5)}),
    "rows that see nothing": ([Q, K, K], {"mask": square(7, 5, full=(2, 6))}),
    "padding": ([Q, K, K], {"mask": square(2, 1, 1, 5)}),
    "boolean mask for each head": ([Q, K, K], {"mask": square(2, 2, 7, 5)}),
    "mask of numbers": ([Q, K, K, (7, 5)], {}),
    "mask of one row": ([Q, K, K, (1, 5)], {}),
    "mask of one column": ([Q, K, K, (7, 1)], {}),
    "mask for each head": ([Q, K, K, (1, 2, 7, 5)], {}),
    "mask for each sample": ([Q, K, K, (2, 1, 1, 5)], {}),
    "grouped queries": ([(2, 4, 7, 3), K, K], {"enable_gqa": True}),
    "grouped queries, causal": ([(2, 4, 7, 3), K, K], {"enable_gqa": True, "is_causal": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_derivatives_are_those_of_the_plain_kernel(always, name):
    shapes, options = CASES[name]
    xs, mask = tensors(*shapes), options.get("mask")
    rest = {n: x for n, x in options.items() if n != "mask"}

    def both(f):
        return derivatives(lambda q, k, v, m=mask: f(q, k, v, m, **rest), xs)

    agree(both(chunks.attention), both(plain))
    assert always
    assert max(always) == -(-shapes[0][-2] // 3)


@pytest.mark.parametrize("name", [*CASES, *DROPOUT])
def test_forward_over_reverse_is_double_backward(always, name):
    shapes, options = {**CASES, **DROPOUT}[name]
    xs, us = tensors(*shapes), [u.detach() for u in tensors(*shapes, seed=1)]
    rest = {n: x for n, x in options.items() if n != "mask"}
    mask = options.get("mask")

    def call(q, k, v, m=mask):
        torch.manual_seed(0)
        return chunks.attention(q, k, v, m, **rest).sin().sum()

    grads = torch.autograd.grad(call(*xs), xs, create_graph=True)
    expected = torch.autograd.grad(grads, xs, us)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x.detach().requires_grad_(), u) for x, u in zip(xs, us, strict=True)]
        value = call(*duals)
        found = [forward_ad.unpack_dual(x).tangent for x in torch.autograd.grad(value, duals)]
        slope = forward_ad.unpack_dual(value).tangent
    with forward_ad.dual_level():  # reverse over forward, which torch's own kernel has not
        value = call(*[forward_ad.make_dual(x, u) for x, u in zip(xs, us, strict=True)])
        over_forward = torch.autograd.grad(forward_ad.unpack_dual(value).tangent, xs)
    agree(found, expected)
    agree(over_forward, expected)
    agree([slope], [sum((g * u).sum() for g, u in zip(grads, us, strict=True))])


def test_a_tangent_for_some_of_the_arguments(always):
    q, k, v = tensors(Q, K, K)
    u = tensors(K, seed=1)[0].detach()
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(chunks.attention(q, forward_ad.make_dual(k, u), v)).tangent
        expected = forward_ad.unpack_dual(plain(q, forward_ad.make_dual(k, u), v)).tangent
    agree([found], [expected])


@given(st.data())
def test_any_shape_and_any_chunk(data):
    size = st.integers(1, 6)
    heads, rows, keys, d, e = (data.draw(size) for _ in range(5))
    options = {"is_causal": data.draw(st.booleans()), "scale": data.draw(st.sampled_from([None, 0.5]))}
    shapes = [(heads, rows, d), (heads, keys, d), (heads, keys, e)]
    if not options["is_causal"] and data.draw(st.booleans()):
        shapes.append((data.draw(st.sampled_from([1, heads])), data.draw(st.sampled_from([1, rows])), keys))
    xs, part = tensors(*shapes), chunks._Attention(**options)
    chunk = data.draw(st.integers(1, rows))
    wanted = data.draw(st.lists(st.booleans(), min_size=len(xs), max_size=len(xs)).filter(any))
    for x, w in zip(xs, wanted, strict=True):
        x.requires_grad_(w)
    at = [x for x in xs if x.requires_grad]

    def filled(f):
        return lambda *given: f(
            [next(it) if w else x for x, w in zip(xs, wanted, strict=True)] if (it := iter(given)) else []
        )

    ours = derivatives(filled(lambda inputs: chunks.in_chunks(inputs, part, chunk)), at)
    agree(ours, derivatives(filled(lambda inputs: plain(*inputs, **options)), at))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.4, "seed": 7}])
def test_gradgradcheck(options):
    part = chunks._Attention(**options)
    xs = tensors((4, 2), (3, 2), (3, 2), *([] if "is_causal" in options else [(4, 3)]))
    assert torch.autograd.gradcheck(lambda *x: chunks.in_chunks(x, part, 3), xs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda *x: chunks.in_chunks(x, part, 3), xs, check_fwd_over_rev=True)


def test_arguments_that_are_one_tensor_or_share_memory(always):
    (x,) = tensors((2, 7, 3))
    agree(derivatives(lambda x: chunks.attention(x, x, x), [x]), derivatives(lambda x: plain(x, x, x), [x]))
    (x,) = tensors((2, 7, 9))
    split = lambda f: derivatives(lambda x: f(*x.chunk(3, -1), is_causal=True), [x])
    agree(split(chunks.attention), split(plain))
    (x,) = tensors((2, 3, 7))
    agree(
        derivatives(lambda x: chunks.attention(x.mT, x.mT, x.mT), [x]),
        derivatives(lambda x: plain(x.mT, x.mT, x.mT), [x]),
    )


# --- dropout ---


@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_dropout_is_a_mask_that_comes_again(always, options):
    """By the formula with the mask written out, in every derivative."""
    xs = tensors(Q, K, K)

    def ours(q, k, v):
        torch.manual_seed(0)
        return chunks.attention(q, k, v, dropout_p=0.3, **options)

    with torch.no_grad():  # with the identity for V, the result is the matrix of what is left of the scores
        kept = ours(*xs[:2], torch.eye(5).to(xs[2]).expand(*xs[2].shape[:-2], 5, 5)) != 0

    def formula(q, k, v):
        scores = q @ k.mT / 3**0.5
        if options:
            scores = scores.masked_fill(~torch.ones(7, 5, dtype=torch.bool).tril(), -torch.inf)
        return (scores.softmax(-1) * kept / 0.7) @ v

    agree(derivatives(ours, xs), derivatives(formula, xs))


def test_dropout_draws_anew_in_each_call_and_as_often_as_it_should(always):
    v = torch.eye(50).expand(4, 50, 50)
    q = torch.zeros(4, 50, 4)
    torch.manual_seed(0)
    one, two = (chunks.attention(q, q, v, dropout_p=0.25) for _ in range(2))
    torch.manual_seed(0)
    again = chunks.attention(q, q, v, dropout_p=0.25)
    assert torch.equal(one, again)
    assert not torch.equal(one, two)
    assert abs((one == 0).double().mean() - 0.25) < 0.02
    rows = (one[0] == 0).float()
    assert len({tuple(r.tolist()) for r in rows}) == 50  # no chunk has the numbers of another
    torch.testing.assert_close(one[one != 0], torch.full_like(one[one != 0], 1 / 50 / 0.75))


# --- types, devices, transforms ---


@pytest.mark.parametrize("mask", [None, square(40, 40), torch.zeros(40, 40), torch.zeros(1, 40)])
def test_autocast(always, mask):
    q, k, v = tensors((2, 40, 4), (2, 40, 4), (2, 40, 4), dtype=torch.float32)

    def both(f, **options):
        with torch.autocast("cpu", torch.bfloat16, **options):
            out = f(q, k, v, mask)
            assert out.dtype == (torch.bfloat16 if not options else torch.float32)
            value = out.float().square().sum()
            return [out, *torch.autograd.grad(value, (q, k, v))]  # under autocast, as few do

    ours, theirs, exact = both(chunks.attention), both(plain), both(plain, enabled=False)
    assert len(always) == 1
    for x, y, z in zip(ours, theirs, exact, strict=True):
        assert x.dtype == y.dtype
        assert (x - z).norm() <= 1.3 * (y - z).norm() + 1e-6  # no further from the truth than the plain kernel


def test_sums_over_chunks_are_not_rounded(always):
    """The gradient for a key is a sum over all chunks: here 100 of them, in bf16."""
    q, k, v = (x.detach().bfloat16().requires_grad_() for x in tensors((1, 400, 4), (1, 6, 4), (1, 6, 4)))
    high = [x.detach().double().requires_grad_() for x in (q, k, v)]
    grads = lambda f, xs: torch.autograd.grad(f(*xs).sum(), xs)
    ours, theirs, exact = grads(chunks.attention, (q, k, v)), grads(plain, (q, k, v)), grads(plain, high)
    for x, y, z in zip(ours, theirs, exact, strict=True):
        assert (x - z).norm() <= 1.1 * (y - z).norm() + 1e-6


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_meta(always, dropout_p):
    xs = [torch.empty(2, 7, 3, device="meta", requires_grad=True) for _ in range(3)]
    grads = torch.autograd.grad(chunks.attention(*xs, dropout_p=dropout_p).sum(), xs, create_graph=True)
    assert [x.shape for x in torch.autograd.grad(grads, xs, [torch.empty_like(x) for x in xs])] == [(2, 7, 3)] * 3
    assert always == [3]


def test_functional_transforms_and_the_compiler_take_the_plain_kernel(always):
    q, k, v = (x.detach() for x in tensors((4, 2, 7, 3), (4, 2, 7, 3), (4, 2, 7, 3)))
    with replaced():
        found = torch.func.vmap(F.scaled_dot_product_attention)(q, k, v)
        agree([found], [MATH(q, k, v)[0]])
        torch.func.grad(lambda q: F.scaled_dot_product_attention(q, k, v).sum())(q)
    with Patched(fused=False):  # as compiled steps run
        compiled = torch.compile(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v), backend="eager", fullgraph=True
        )
        agree([compiled(q, k, v)], [MATH(q, k, v)[0]])
    assert not always


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_go_to_the_kernel(always, layout):
    parts = [torch.randn(n, 2, 3) for n in (4, 6)]
    x = torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)
    x = x.contiguous() if layout == torch.strided else x
    with replaced():
        found = F.scaled_dot_product_attention(x, x, x)
    for y, part in zip(found.unbind(), parts, strict=True):
        p = part.transpose(0, 1)
        torch.testing.assert_close(y, MATH(p, p, p)[0])
    assert not always


def test_short_sequences_are_left_to_the_kernel_bit_for_bit(monkeypatch):
    monkeypatch.setattr(chunks, "in_chunks", None)
    q, k, v = tensors(Q, K, K)
    with replaced():
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), MATH(q, k, v)[0])
        length = int(chunks.LONG**0.5) + 1
        x = torch.zeros(length, 1)
        with pytest.raises(TypeError, match="not callable"):  # the test's own: from here on there would be chunks
            F.scaled_dot_product_attention(x, x, x)
        x = x[:-2]
        F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    "case",
    [
        lambda f, q, k: f(q, k, k, torch.zeros(7, 5), is_causal=True),
        lambda f, q, k: f(q, k, k, torch.zeros(7, 5, dtype=torch.long)),
        lambda f, q, k: f(q, k, k, torch.zeros(4, 5)),
        lambda f, q, k: f(q, k, k, torch.zeros(3, 2, 7, 5, dtype=DOUBLE)),
        lambda f, q, k: f(q, k.float(), k.float()),
        lambda f, q, k: f(q, k, k, dropout_p=1.5),
        lambda f, q, k: f(q, k[..., :2], k),
        lambda f, q, k: f(q.long(), k.long(), k.long()),
    ],
)
def test_what_the_kernel_refuses_is_refused(always, case):
    q, k = tensors(Q, K)
    with pytest.raises(Exception) as theirs:  # noqa: PT011 (whatever torch raises)
        case(plain, q, k)
    with replaced(), pytest.raises(type(theirs.value)) as ours:
        case(chunks.attention, q, k)
    assert str(ours.value) == str(theirs.value)


# --- in a block ---

WIDTH, LENGTH = 4, 6


class ByName(nn.Module):
    """Self-attention whose function is found in one of the ways in which models do it."""

    def __init__(self, function, dropout=0.0, checkpointed=None):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.function, self.dropout, self.checkpointed = function, dropout, checkpointed

    def attend(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1)
        out = self.function()(q, k, v, dropout_p=self.dropout, is_causal=True)
        return out.transpose(1, 2).flatten(2)

    def forward(self, x):
        if self.checkpointed is None:
            return self.attend(x)
        return checkpoint(self.attend, x, use_reentrant=self.checkpointed)


class Multihead(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        self.inside, self.need_weights = nn.MultiheadAttention(WIDTH, 2, batch_first=True), need_weights

    def forward(self, x):
        return self.inside(x, x, x, need_weights=self.need_weights)[0]


MODELS = {  # and whether there are chunks
    "F": (lambda: ByName(lambda: F.scaled_dot_product_attention), True),
    "torch.nn.functional": (lambda: ByName(lambda: torch.nn.functional.scaled_dot_product_attention), True),
    "imported": (lambda: ByName(lambda: by_its_own_name), True),
    "multi-head": (lambda: Multihead(False), True),
    "multi-head with its weights": (lambda: Multihead(True), False),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, activation="gelu", batch_first=True), True),
    "decoder layer": (lambda: Decoder(), True),
    "dropout": (lambda: ByName(lambda: F.scaled_dot_product_attention, 0.2), True),
    "dropout, imported": (lambda: ByName(lambda: by_its_own_name, 0.2), True),
    "encoder layer with dropout": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.1, batch_first=True), True),
}


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 8, 0.0, activation="gelu", batch_first=True)

    def forward(self, x):
        return self.layer(x, x[:, :3])


def hypergradient(model, engine, *, create_graph=False, steps=3, check=False, dtype=DOUBLE, **options):
    torch.manual_seed(0)
    model = nn.Sequential(model(), nn.Linear(WIDTH, 2)).to(dtype)
    x = torch.randn(3, LENGTH, WIDTH, dtype=dtype)
    lam, shift = torch.zeros(3, dtype=dtype, requires_grad=True), torch.zeros(WIDTH, dtype=dtype, requires_grad=True)
    h = lambda m, x: (lam.sigmoid() * m(x + shift).square().sum((1, 2))).mean()
    g = lambda m, x: m(x).cos().sum()
    with bilevel.inner(model, h, g, engine=engine, solver="bigsam", lr=0.05, check=check, **options) as loop:
        for _ in range(steps):
            loop.step(x, outer=(x,))
        found = loop.hypergrad([lam, shift], create_graph=create_graph)
        if create_graph:
            found = [*found, *torch.autograd.grad(sum(f.sin().sum() for f in found), [lam, shift])]
    assert F.scaled_dot_product_attention is by_its_own_name
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("engine", ["reverse", "unroll", "forward"])
def test_hypergradients(always, name, engine, monkeypatch):
    model, in_chunks = MODELS[name]
    found = hypergradient(model, engine)
    assert bool(always) == in_chunks
    agree(found, hypergradient(model, "unroll"))
    if "dropout" not in name:
        monkeypatch.setattr(chunks, "LONG", 2**62)
        agree(found, hypergradient(model, "unroll"))


def test_hypergradients_that_are_differentiated_again(always, monkeypatch):
    found = hypergradient(MODELS["encoder layer"][0], "unroll", create_graph=True, steps=2)
    assert always
    monkeypatch.setattr(chunks, "LONG", 2**62)
    agree(found, hypergradient(MODELS["encoder layer"][0], "unroll", create_graph=True, steps=2))


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_activation_checkpointing(always, by_name, reentrant, dropout):
    """Also of a function that was imported by its own name."""
    function = lambda: by_its_own_name if by_name else F.scaled_dot_product_attention
    model = lambda checkpointed: lambda: ByName(function, dropout, checkpointed)
    found = hypergradient(model(reentrant), "reverse")
    assert always
    agree(found, hypergradient(model(None), "unroll"))


@pytest.mark.parametrize("engine", ["reverse", bilevel.Reverse(memory="1GiB"), bilevel.Reverse(checkpoint=2)])
def test_optimizers(always, engine):
    model, _ = MODELS["encoder layer"]

    def run(engine):
        torch.manual_seed(0)
        inner = nn.Sequential(model(), nn.Linear(WIDTH, 2)).double()
        optimizer = torch.optim.Adam(inner.parameters(), 0.01, eps=1e-3)
        x, lam = torch.randn(3, LENGTH, WIDTH, dtype=DOUBLE), torch.ones((), dtype=DOUBLE, requires_grad=True)
        loss = lambda m, x: m(x * lam).square().mean()
        with bilevel.inner(inner, loss, loss, solver="gd", optimizer=optimizer, engine=engine, check=False) as loop:
            loop.run(3, x, outer=(x,))
            return [loop.hypergrad(lam)]

    agree(run(engine), run("unroll"))
    assert always


def test_tasks(always):
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(Multihead(False), nn.Linear(WIDTH, 1)).double(),
        torch.randn(2, 3, LENGTH, WIDTH, dtype=DOUBLE),
    )
    lam = torch.ones((), dtype=DOUBLE, requires_grad=True)
    loss = lambda m, x: m(x * lam).square().mean()

    def run(x, **tasks):
        with bilevel.inner(model, loss, loss, solver="gd", lr=0.1, check=False, **tasks) as loop:
            loop.run(2, x, outer=(x,))
            return loop.hypergrad(lam)

    together = run(x, tasks=2)
    assert not always
    agree([together], [run(x[0]) + run(x[1])])
    assert always


@pytest.mark.parametrize("function", [lambda: F.scaled_dot_product_attention, lambda: by_its_own_name])
def test_an_outer_variable_as_the_mask_passes_the_sentinel(always, function):
    """In float32, which the sentinel lifts to float64, mask and all."""
    torch.manual_seed(0)
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(3, LENGTH, WIDTH)
    lam = torch.zeros(LENGTH, LENGTH, requires_grad=True)

    def loss(m, x):
        y = m(x)
        return function()(y, y, y, attn_mask=lam).square().mean()

    def run(engine):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with bilevel.inner(model, loss, loss, solver="gd", lr=0.1, check="always", engine=engine) as loop:
                loop.run(2, x, outer=(x,))
                return [loop.hypergrad(lam)]

    found = run("reverse")
    agree(found, run("unroll"), 1e-5)
    assert float(found[0].abs().max()) > 0
    assert always


def test_autocast_in_a_block(always):
    torch.manual_seed(0)
    model, x = nn.Sequential(Multihead(False), nn.Linear(WIDTH, 1)), torch.randn(3, LENGTH, WIDTH)
    lam = torch.ones((), requires_grad=True)

    def loss(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            return m(x * lam).float().square().mean()

    def run(engine):
        with bilevel.inner(model, loss, loss, solver="gd", lr=0.1, check=False, engine=engine) as loop:
            loop.run(2, x, outer=(x,))
            return [loop.hypergrad(lam)]

    agree(run("reverse"), run("unroll"), 1e-2)
    assert always


def test_a_function_of_somebody_elses_is_left_alone(always, monkeypatch):
    calls = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **o: calls.append(1) or by_its_own_name(*a, **o))
    theirs = F.scaled_dot_product_attention
    with replaced():
        assert F.scaled_dot_product_attention is theirs
    assert F.scaled_dot_product_attention is theirs


def test_a_reference_that_was_taken_in_a_block_is_the_kernel_afterwards(always):
    q, k, v = (x.detach() for x in tensors(Q, K, K))
    with replaced():
        with replaced():
            pass
        taken = F.scaled_dot_product_attention
        taken(q, k, v)
    assert len(always) == 1
    assert F.scaled_dot_product_attention is by_its_own_name
    assert torch.equal(taken(q, k, v), by_its_own_name(q, k, v))
    assert len(always) == 1


# --- memory ---


def pullback(f, length):
    """∇⟨∇ℓ, u⟩."""
    xs = [x.detach().requires_grad_() for x in tensors(*[(2, length, 8)] * 3, dtype=torch.float32)]
    us = [torch.ones_like(x) for x in xs]

    def run():
        grads = torch.autograd.grad(f(*xs).square().sum(), xs, create_graph=True)
        torch.autograd.grad(grads, xs, us)

    return run


def test_peak_of_a_pullback_is_linear_in_the_length(always, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 2**13)

    def grows(f):
        return live(pullback(f, 1024)) / live(pullback(f, 256))

    pullback(chunks.attention, 64)()
    assert grows(chunks.attention) < 1.1 * 4
    assert grows(plain) > 12
    assert live(pullback(chunks.attention, 1024)) < 0.05 * live(pullback(plain, 1024))
    assert max(always) > 100


def test_forward_over_reverse_is_linear_too(always, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 2**13)

    def run(length):
        def inside():
            with forward_ad.dual_level():
                xs = [torch.randn(2, length, 8, requires_grad=True) for _ in range(3)]
                duals = [forward_ad.make_dual(x, torch.ones_like(x)) for x in xs]
                torch.autograd.grad(chunks.attention(*duals).square().sum(), duals)

        return inside

    run(64)()
    assert live(run(1024)) < 1.1 * 4 * live(run(256))


@pytest.mark.skipif(find_spec("tqdm") is None, reason="the page is written by the recipes, which need tqdm")
def test_the_page_of_the_benchmark_is_made():
    from benchmarks.attention import page

    text = page((16, 32), [(1, 2, 16)], 1)
    assert text.count("\n| ") == 3 * 4 + 3
    assert chunks.LONG == 2**23
