"""`direction=` that is no function of the direction alone, or whose derivative is cut."""

import numpy as np
import torch
from promise import Loop, constructs, each, error, indexed, is_right, keeps_the_promise, mlp, rows, weighted

ALL = "reverse sqrt memory blocks unroll forward tasks"


def doing(make):
    """A loop whose gradients are transformed by `make()`, which has a state of its own for each loop."""

    def build(lam):
        return Loop(mlp(), weighted(lam), error, indexed(), rows(5), transform=make(lam))

    return build


def momentum(lam):
    kept = {}

    def transform(d):
        for n, x in d.items():
            kept[n] = x + 0.5 * kept[n] if n in kept else x
        return dict(kept)

    return transform


def average(lam):
    """An average of the gradients, detached as one writes it."""
    kept = {}

    def transform(d):
        for n, x in d.items():
            kept[n] = 0.5 * kept.get(n, torch.zeros_like(x)) + 0.5 * x.detach()
        return {n: 0.5 * x + 0.5 * kept[n] for n, x in d.items()}

    return transform


def warm_up(lam):
    count = [0]

    def transform(d):
        count[0] += 1
        return {n: x * min(1.0, count[0] / 3) for n, x in d.items()}

    return transform


def largest_so_far(lam):
    """Clipped at the largest norm that was seen so far."""
    seen = []

    def transform(d):
        norm = torch.sqrt(sum(x.square().sum() for x in d.values()))
        seen.append(norm.detach())
        return {n: x * (seen[0] / norm) for n, x in d.items()}

    return transform


class Noise:
    """Noise by a generator of torch of its own."""

    def __init__(self, lam):
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, d):
        return {n: x + 0.1 * torch.randn(x.shape, generator=self.generator, dtype=x.dtype) for n, x in d.items()}


def numpy_noise(lam):
    generator = np.random.default_rng(3)
    return lambda d: {n: x + 0.1 * torch.from_numpy(generator.standard_normal(x.shape)) for n, x in d.items()}


STATE = {
    "momentum by hand": momentum,
    "a detached average": average,
    "a warm-up by a counter": warm_up,
    "clipped at the first norm": largest_so_far,
    "noise of its own generator": Noise,
    "noise by NumPy": numpy_noise,
}


def norm(d):
    return torch.sqrt(sum(x.square().sum() for x in d.values()))


CUT = {
    "item": lambda lam: lambda d: {n: x / norm(d).item() for n, x in d.items()},
    "float": lambda lam: lambda d: {n: x / float(norm(d)) for n, x in d.items()},
    "tolist": lambda lam: lambda d: {n: x / norm(d).tolist() for n, x in d.items()},
    "detach": lambda lam: lambda d: {n: x / norm(d).detach() for n, x in d.items()},
    "data": lambda lam: lambda d: {n: x / norm(d).data for n, x in d.items()},
    "numpy": lambda lam: lambda d: {n: x / torch.tensor(norm(d).detach().numpy()) for n, x in d.items()},
    "no_grad": lambda lam: torch.no_grad()(lambda d: {n: x / norm(d) for n, x in d.items()}),
    "an outer variable, detached": lambda lam: lambda d: {n: x * lam[0].detach().exp() for n, x in d.items()},
    "an outer variable by item": lambda lam: lambda d: {n: x * float(lam[0]) for n, x in d.items()},
}

WHOLE = {
    "normalised": lambda lam: lambda d: {n: x / norm(d) for n, x in d.items()},
    "an outer variable": lambda lam: lambda d: {n: x * lam[0].exp() for n, x in d.items()},
    "torch's own noise": lambda lam: lambda d: {n: x + 0.1 * torch.randn_like(x) for n, x in d.items()},
    "one weight alone": lambda lam: lambda d: {n: x if n == "0.weight" else torch.zeros_like(x) for n, x in d.items()},
}

OF_STATE = {n: doing(make) for n, make in STATE.items()}
OF_CUT = {n: doing(make) for n, make in CUT.items()}
OF_WHOLE = {n: doing(make) for n, make in WHOLE.items()}


@constructs(OF_STATE, f"{ALL} micro accumulate")
def test_a_direction_with_a_state_of_its_own(construct, variant):
    keeps_the_promise(construct, variant, "direction=")


@constructs(OF_CUT, ALL)
def test_a_derivative_that_is_cut_in_direction(construct, variant):
    keeps_the_promise(construct, variant, "direction=")


@constructs(OF_WHOLE, ALL)
def test_a_function_of_the_direction_is_right(construct, variant):
    is_right(construct, variant)


@each(ALL)
def test_a_cut_in_a_later_step_alone(variant):
    """The direction is clipped by `.item()` where it is long: in the first two steps, not in the last."""

    def build(lam):
        def transform(d):
            size = norm(d)
            return {n: x * (0.9 / size.item()) if size.item() > 0.9 else x for n, x in d.items()}

        h = lambda m, x, y, i: 5 * weighted(lam)(m, x, y, i)
        return Loop(mlp(), h, error, indexed(), rows(5), transform=transform)

    keeps_the_promise(build, variant, "direction=")
