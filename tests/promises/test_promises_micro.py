"""`micro=`: losses of a whole batch that look like means over samples where they are first probed."""

import torch
from promise import Loop, constructs, each, error, indexed, is_right, keeps_the_promise, mlp, rows, squares, start
from torch import nn

ENGINES = "reverse sqrt memory blocks unroll forward"


def loss(of_weights):
    """h = Σ c_i·ℓ_i, where the weights of the samples are made of λ for the whole batch."""

    def build(lam):
        def h(m, x, y, i):
            return (of_weights((lam - start())[i]) * squares(m, x, y)).sum()

        return Loop(mlp(), h, error, indexed(), rows(5))

    return build


def shares(weights):
    """w/Σw of these weights."""
    return lambda lam: weights(lam) / weights(lam).sum()


class Drawing(nn.Module):
    """A Dropout whose masks change nothing: random numbers are drawn, and the parts of a batch may draw their own."""

    def forward(self, x):
        return x + 0 * torch.randn_like(x) if self.training else x


def in_training_mode_alone(lam):
    """A term of the whole batch that h has in training mode alone, where the random numbers of a Dropout are drawn."""
    model = mlp(Drawing())

    def h(m, x, y, i):
        losses = (torch.sigmoid(lam[i]) * squares(m, x, y)).mean()
        return losses + m(x).mean().square() if m.training else losses

    return Loop(model, h, error, indexed(), rows(5))


def decorrelated(lam):
    """The same with a penalty on the covariance of the features (Barlow Twins, VICReg)."""
    model = mlp(Drawing())

    def h(m, x, y, i):
        losses = (torch.sigmoid(lam[i]) * squares(m, x, y)).mean()
        if not m.training:
            return losses
        z = m[0](x)
        z = z - z.mean(0)
        return losses + (z.T @ z / len(z)).triu(1).square().sum()

    return Loop(model, h, error, indexed(), rows(5))


def pairs_of_weight_zero(lam):
    """A term over pairs of samples, whose coefficient is λ, and λ begins at 0: only ∂²/∂w∂λ tells."""

    def h(m, x, y, i):
        out = m(x).squeeze(-1)
        return squares(m, x, y).mean() + (lam - start()).sum() * (out[:, None] - out).square().mean()

    return Loop(mlp(), h, error, indexed(), rows(5))


def later(kind):
    """A loss that is a mean over samples in the first steps, and another one from step 3 on."""

    def build(lam):
        batch = indexed()
        whole, some = torch.ones(6, dtype=torch.float64), torch.tensor([1.0, 1, 0, 0, 0, 1], dtype=torch.float64)

        def h(m, x, y, i, mask):
            losses = mask * torch.sigmoid(lam[i]) * squares(m, x, y)
            if kind == "masked":
                return losses.sum() / mask.sum()
            return losses.mean() + (0.5 * m(x).mean().square() if mask.sum() < 6 else 0)

        def given(k):
            mask = some if k >= 2 else whole
            return (*batch, mask if kind == "masked" else mask[torch.randperm(6)])

        return Loop(mlp(), h, error, given, rows(5))

    return build


def centred(lam):
    """Features that are normalised over the batch by hand."""

    def h(m, x, y, i):
        z = m[0](x)
        out = m[2](torch.tanh(z - z.mean(0))).squeeze(-1)
        return (torch.sigmoid(lam[i]) * (out - y).square()).mean()

    return Loop(mlp(), h, error, indexed(), rows(5))


def mean(lam):
    return Loop(mlp(), lambda m, x, y, i: (torch.sigmoid(lam[i]) * squares(m, x, y)).mean(), error, indexed(), rows(5))


WHOLE = {
    "softmax over the batch": loss(lambda c: torch.softmax(c, 0)),
    "shares of sigmoids": loss(shares(torch.sigmoid)),
    "shares of exponentials": loss(shares(torch.exp)),
    "weights over the root of squares": loss(lambda c: c.exp() / c.exp().norm() / len(c) ** 0.5),
    "a term in training mode alone": in_training_mode_alone,
    "a covariance in training mode alone": decorrelated,
    "pairs whose weight begins at zero": pairs_of_weight_zero,
    "a mean over a mask, whole at first": later("masked"),
    "a term of the batch, from step 3 on": later("term"),
    "normalised by hand": centred,
}


@constructs(WHOLE, ENGINES)
def test_a_loss_of_the_whole_batch(construct, variant):
    keeps_the_promise(construct, variant, "micro=", micro=2)


@each(ENGINES)
def test_a_mean_over_samples_is_right(variant):
    is_right(mean, variant, micro=2)


@each(ENGINES)
def test_a_sum_over_samples_is_right(variant):
    is_right(loss(torch.sigmoid), variant, micro=3)
