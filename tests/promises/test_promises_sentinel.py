"""The sentinel: what it looks at once is looked at again where the same code takes another path."""

import warnings

import pytest
import torch
from promise import error, indexed, mlp, rows, start, weighted
from torch import nn

import bilevel_plugin as bilevel


def warnings_of(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if issubclass(w.category, bilevel.DerivativeWarning)]


OFTEN = {"check": "first"}  # how often the sentinel is to look, in the blocks of these tests


def block(model, h, g=error, lam=None, batch=None, **options):
    with bilevel.inner(model, h, g, **{"solver": "gd", "lr": 0.3, **OFTEN, **options}) as loop:
        for _ in range(2):
            loop.step(*(batch or indexed()), outer=rows(5))
        loop.hypergrad(lam)


class Config:
    def __init__(self, cut):
        self.cut = cut


class Cuts(nn.Module):
    """A model that cuts a path if its configuration says so."""

    def __init__(self, cut):
        super().__init__()
        self.a, self.out, self.cut = nn.Linear(3, 4), nn.Linear(4, 1), cut
        self.double()

    def forward(self, x):
        z = self.a(x)
        gate = torch.sigmoid(z.detach() if self.cut else z)
        return self.out((gate * z).tanh())


def in_an_object():
    config = Config(False)

    def run(cut):
        config.cut = cut
        lam, model = start().requires_grad_(), mlp()

        def h(m, x, y, i):
            z = m[0](x)
            gate = torch.sigmoid(z.detach() if config.cut else z)
            return (torch.sigmoid(lam[i]) * (m[2]((gate * z).tanh()).squeeze(-1) - y).square()).mean()

        block(model, h, lam=lam)

    return run


def in_a_closure():
    def run(cut):
        lam, model = start().requires_grad_(), mlp()

        def h(m, x, y, i):
            z = m[0](x)
            gate = torch.sigmoid(z.detach() if cut else z)
            return (torch.sigmoid(lam[i]) * (m[2]((gate * z).tanh()).squeeze(-1) - y).square()).mean()

        block(model, h, lam=lam)

    return run


def in_the_model():
    def run(cut):
        lam = start().requires_grad_()
        block(Cuts(cut), weighted(lam), lam=lam)

    return run


def in_the_batch():
    def run(cut):
        lam, model = start().requires_grad_(), mlp()

        def h(m, x, y, i, how):
            z = m[0](x)
            gate = torch.sigmoid(z.detach() if how["cut"] else z)
            return (torch.sigmoid(lam[i]) * (m[2]((gate * z).tanh()).squeeze(-1) - y).square()).mean()

        block(model, h, lam=lam, batch=(*indexed(), {"cut": cut}))

    return run


def by_mode():
    def run(cut):
        lam = start().requires_grad_()
        model = mlp().train(cut)

        def h(m, x, y, i):
            z = m[0](x)
            gate = torch.sigmoid(z.detach() if m.training else z)
            return (torch.sigmoid(lam[i]) * (m[2]((gate * z).tanh()).squeeze(-1) - y).square()).mean()

        block(model, h, lam=lam)

    return run


def in_g():
    config = Config(False)

    def run(cut):
        config.cut = cut
        lam, model = start().requires_grad_(), mlp()

        def g(m, x, y):
            z = m[0](x)
            return error(lambda z: m[2](z.tanh()), z.detach() * 0.5 + 0.5 * z if config.cut else z, y)

        block(model, weighted(lam), g, lam=lam)

    return run


def by_direction():
    """The second block has a direction= that cuts; the losses are the same."""

    def run(cut):
        lam = start().requires_grad_()
        norm = lambda d: sum(x.square().sum() for x in d.values()).sqrt()
        clip = lambda d: {n: x / (norm(d).item() if cut else norm(d)) for n, x in d.items()}
        block(mlp(), weighted(lam), lam=lam, direction=clip)

    return run


def by_functions_of_one_code():
    """Losses made by functools.partial, or by a class with a call: the code is one, the options differ."""
    import functools

    def loss(cut, lam, m, x, y, i):
        z = m[0](x)
        gate = torch.sigmoid(z.detach() if cut else z)
        return (torch.sigmoid(lam[i]) * (m[2]((gate * z).tanh()).squeeze(-1) - y).square()).mean()

    def run(cut):
        lam = start().requires_grad_()
        block(mlp(), functools.partial(loss, cut, lam), lam=lam)

    return run


WAYS = {f.__name__: f for f in (in_an_object, in_a_closure, in_the_model, in_the_batch, by_mode, in_g, by_direction,
                                by_functions_of_one_code)}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_second_configuration_of_the_same_code_is_looked_at(way):
    run = WAYS[way]()
    assert not warnings_of(lambda: run(False)), "the first configuration is right"
    assert warnings_of(lambda: run(True)), "the second one cuts a path, and nothing says so"


@pytest.mark.parametrize("way", WAYS)
def test_the_cut_is_found_where_it_is_looked_at(way, monkeypatch):
    """Each of them is found by a sentinel that looks in every block."""
    monkeypatch.setitem(OFTEN, "check", "always")
    run = WAYS[way]()
    assert warnings_of(lambda: run(True))


def test_a_wrong_part_for_the_outer_variable_is_not_drowned():
    """∂²h/∂w∂λ is cut, and the weights' own part is a million times larger."""
    lam = start().requires_grad_()

    def h(m, x, y, i):
        out = m(x).squeeze(-1)
        cut = (1e-3 * torch.sigmoid(lam[i]) * out * torch.sigmoid(lam[i]).detach()).mean()
        return cut + 100 * (out - y).square().mean()

    def run():
        block(mlp(), h, lam=lam, lr=1e-3, check="always")

    assert warnings_of(run)


def test_a_later_loss_of_the_same_loop_is_looked_at():
    """The loop's h is right; another h= in a middle step cuts a path."""
    lam = start().requires_grad_()

    def cuts(m, x, y, i):
        z = m[0](x)
        return (torch.sigmoid(lam[i]) * (m[2]((torch.sigmoid(z.detach()) * z).tanh()).squeeze(-1) - y).square()).mean()

    def run():
        with bilevel.inner(mlp(), weighted(lam), error, solver="gd", lr=0.3, check="always") as loop:
            loop.step(*indexed(), outer=rows(5))
            loop.step(*indexed(), h=cuts)
            loop.step(*indexed())
            loop.hypergrad(lam)

    assert warnings_of(run)


def test_an_added_outer_loss_is_looked_at():
    """g is right on the last batch, and cut on the one that was added before (another branch)."""
    lam = start().requires_grad_()

    def g(m, x, y, cut):
        z = m[0](x)
        z = z * 0.5 + 0.5 * z.detach() if cut else z
        return error(lambda z: m[2](z.tanh()), z, y)

    def run():
        with bilevel.inner(mlp(), weighted(lam), g, solver="gd", lr=0.3, check="always") as loop:
            for k in range(2):
                loop.step(*indexed(), outer=(*rows(5), False))
                loop.add_outer_loss(outer=(*rows(5), k == 0))
            loop.hypergrad(lam)

    assert warnings_of(run)
