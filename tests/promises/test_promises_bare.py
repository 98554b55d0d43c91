"""What ended in a bare error of torch, or in a riddle."""

import copy
import gc
import io
import pickle

import pytest
import torch
from promise import (
    Loop,
    Refused,
    constructs,
    each,
    error,
    indexed,
    is_right,
    keeps_the_promise,
    mlp,
    opened,
    rows,
    squares,
    start,
    weighted,
)
from torch import nn

import bilevel_plugin as bilevel

ALL = "reverse sqrt memory blocks unroll forward tasks"


def standard(lam):
    return Loop(mlp(), weighted(lam), error, indexed(), rows(5))


# --- what leaves the block ----------------------------------------------------------------------------------------


@each(ALL)
@pytest.mark.parametrize("moment", ["before the steps", "after the steps"])
@pytest.mark.parametrize("how", ["torch.save", "pickle", "deepcopy", "weights_only"])
def test_the_weights_can_be_saved_and_loaded(variant, moment, how):
    def use(block, loop, lam):
        weights = dict(block.weights)
        if how == "deepcopy":
            weights = {n: x.detach() for n, x in weights.items()}  # torch's own rule for tensors with a graph
            return weights, copy.deepcopy(weights)
        if how == "pickle":
            return weights, pickle.loads(pickle.dumps({n: x.detach() for n, x in weights.items()}))
        file = io.BytesIO()
        torch.save(weights, file)
        file.seek(0)
        return weights, torch.load(file, weights_only=how == "weights_only")

    weights, again = opened(standard, variant, use, steps=0 if moment == "before the steps" else 2)
    for n, x in weights.items():
        torch.testing.assert_close(again[n].detach(), x.detach(), rtol=0, atol=0)


@each("reverse sqrt memory blocks unroll forward")
def test_a_file_of_the_weights_is_loaded_by_another_process(variant, tmp_path):
    """It holds tensors alone: nothing of this library has to be imported."""
    import zipfile

    def use(block, loop, lam):
        torch.save(dict(block.weights), tmp_path / "w.pt")

    opened(standard, variant, use)
    with zipfile.ZipFile(tmp_path / "w.pt") as file:
        (name,) = (n for n in file.namelist() if n.endswith("data.pkl"))
        assert b"bilevel" not in file.read(name)


# --- graphs, generators -------------------------------------------------------------------------------------------


@each(ALL)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_graph_made_before_the_block_and_differentiated_after_it(variant, steps):
    """The weights are what they were, and so is the graph."""
    torch.manual_seed(0)
    model, (x, y, i), lam = mlp(), indexed(), start().requires_grad_()
    loss = weighted(lam)(model, x, y, i)
    expected = torch.autograd.grad(weighted(lam)(model, x, y, i), list(model.parameters()))
    opened(
        lambda _: Loop(model, weighted(lam), error, (x, y, i), rows(5)),
        variant,
        lambda block, loop, _: block.hypergrad(lam) if steps else None,
        steps=steps,
    )
    try:
        found = torch.autograd.grad(loss, list(model.parameters()))
    except RuntimeError as why:
        raise AssertionError(f"a bare error of torch: {why}") from why
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_an_abandoned_generator_closes_its_own_block():
    """Two blocks of one `inner(...)` object; the first one's generator is dropped while the second is open."""
    torch.manual_seed(0)
    lam = start().requires_grad_()
    loop = standard(lam)
    opener = bilevel.inner(loop.model, loop.h, loop.g, solver="gd", lr=0.3, check=False)

    def train():
        with opener as block:
            while True:
                block.step(*loop.batch, outer=loop.outer)
                yield block

    first = train()
    next(first)
    with opener as second:
        second.step(*loop.batch, outer=loop.outer)
        first.close()
        gc.collect()
        try:
            second.step(*loop.batch, outer=loop.outer)
            second.hypergrad(lam)
        except RuntimeError as why:
            raise AssertionError(f"the second block was closed: {why}") from why


def test_two_generators_of_one_object_end_in_the_order_they_began():
    torch.manual_seed(0)
    lam = start().requires_grad_()
    loops = standard(lam), standard(lam)
    before = [{n: p.detach().clone() for n, p in loop.model.named_parameters()} for loop in loops]
    openers = [bilevel.inner(x.model, x.h, x.g, solver="gd", lr=0.3, check=False) for x in loops]

    def train(opener, loop):
        with opener as block:
            for _ in range(2):
                block.step(*loop.batch, outer=loop.outer)
                yield block

    one, other = train(openers[0], loops[0]), train(openers[1], loops[1])
    for _ in range(2):
        next(one)
        next(other)
    one.close()
    assert float(next(iter([loops[1].model[0].weight])).detach().norm()) > 0
    other.close()
    for loop, weights in zip(loops, before, strict=True):
        for n, p in loop.model.named_parameters():
            assert torch.equal(p, weights[n])


# --- unusual constructs of torch ----------------------------------------------------------------------------------


def conditional(lam):
    def h(m, x, y, i):
        loss = weighted(lam)(m, x, y, i)
        return torch.cond(x.sum() > 0, lambda z: 2 * z, lambda z: 0.5 * z, (loss,))

    return Loop(mlp(), h, error, indexed(), rows(5))


def jagged(lam):
    """Sequences of several lengths as one nested tensor."""
    _, y, i = indexed()
    torch.manual_seed(5)
    parts = [torch.randn(n, 3, dtype=torch.float64) for n in (2, 3, 1, 4, 2, 3)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)

    def h(m, x, y, i):
        out = torch.stack([m(part).mean() for part in x.unbind()])
        return (torch.sigmoid(lam[i]) * (out - y).square()).mean()

    return Loop(mlp(), h, error, (x, y, i), rows(5))


def by_jvp(lam):
    """A directional derivative of the model in h."""

    def h(m, x, y, i):
        along = torch.func.jvp(m, (x,), (torch.ones_like(x),))[1]
        return weighted(lam)(m, x, y, i) + 0.1 * along.square().mean()

    return Loop(mlp(), h, error, indexed(), rows(5))


def by_jvp_of_weights(lam):
    """A directional derivative along the weights (a linearised network)."""

    def h(m, x, y, i):
        weights = dict(m.named_parameters())
        run = lambda w: torch.func.functional_call(m, w, (x,))
        out, along = torch.func.jvp(run, (weights,), ({n: w.detach() for n, w in weights.items()},))
        return weighted(lam)(lambda _: out + 0.1 * along, x, y, i)

    return Loop(mlp(), h, error, indexed(), rows(5))


def by_dual_level(lam):
    from torch.autograd import forward_ad

    def h(m, x, y, i):
        with forward_ad.dual_level():
            out = m(forward_ad.make_dual(x, torch.ones_like(x)))
            along = forward_ad.unpack_dual(out).tangent
        return weighted(lam)(m, x, y, i) + 0.1 * along.square().mean()

    return Loop(mlp(), h, error, indexed(), rows(5))


def by_hessian(lam):
    """∇²m by torch.func, of one sample."""

    def h(m, x, y, i):
        bent = torch.func.hessian(lambda one: m(one).sum())(x[0])
        return weighted(lam)(m, x, y, i) + 0.05 * bent.square().sum()

    return Loop(mlp(), h, error, indexed(), rows(5))


UNUSUAL = {
    "torch.cond": conditional,
    "a jagged tensor": jagged,
    "jvp": by_jvp,
    "jvp along the weights": by_jvp_of_weights,
    "a dual level": by_dual_level,
    "a hessian": by_hessian,
}
UNUSUAL_NAMES = r"torch\.cond|nested|jagged|jvp|forward.mode|forward AD|dual|torch\.func|second derivative of h"


@constructs(UNUSUAL, "reverse sqrt memory blocks unroll forward")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of torch, which traces torch.cond
def test_unusual_constructs(construct, variant):
    keeps_the_promise(construct, variant, UNUSUAL_NAMES)


@each(ALL)
def test_a_counter_of_operations_around_the_block(variant):
    from torch.utils.flop_counter import FlopCounterMode

    def counted(lam):
        return Loop(mlp(), weighted(lam), error, indexed(), rows(5))

    with FlopCounterMode(display=False) as counter:
        is_right(counted, variant)
    assert counter.get_total_flops() > 0


@each("reverse sqrt memory blocks unroll forward")
def test_a_counter_of_operations_in_a_loss(variant):
    """A user's own mode of operations, inside of h."""
    from torch.utils.flop_counter import FlopCounterMode

    def build(lam):
        def h(m, x, y, i):
            with FlopCounterMode(display=False):
                return weighted(lam)(m, x, y, i)

        return Loop(mlp(), h, error, indexed(), rows(5))

    keeps_the_promise(build, variant, "mode|FlopCounter")


@each("reverse sqrt memory blocks unroll forward")
@pytest.mark.parametrize("ask", ["hypergrad", "backward"])
def test_a_sparse_embedding_as_the_outer_variable(variant, ask):
    """A weight for each sample, held by an embedding with sparse gradients."""
    dense, sparse = [], []
    for found, is_sparse in ((dense, False), (sparse, True)):
        torch.manual_seed(0)
        table = nn.Embedding(6, 1, sparse=is_sparse).double()

        def build(_, table=table):
            h = lambda m, x, y, i: (torch.sigmoid(table(i)[:, 0]) * squares(m, x, y)).mean()
            return Loop(mlp(), h, error, indexed(), rows(5))

        def use(block, loop, _, table=table):
            if ask == "hypergrad":
                return block.hypergrad(table.weight)
            block.backward()
            return table.weight.grad

        try:
            found.append(opened(build, variant, use))
        except Refused as why:
            if "sparse" not in str(why):
                raise
            return
    torch.testing.assert_close(sparse[0].to_dense() if sparse[0].is_sparse else sparse[0], dense[0])
