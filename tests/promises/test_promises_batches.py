"""Losses that change what they are given: a batch that is popped from, or edited in place."""

import torch
from promise import Loop, constructs, error, indexed, keeps_the_promise, mlp, rows, weighted


def popped(lam):
    """h of a Hugging Face loop: the labels are taken out of the batch."""
    x, y, i = indexed()

    def h(m, inputs):
        labels = inputs.pop("labels")
        return weighted(lam)(m, inputs["x"], labels, inputs["i"])

    return Loop(mlp(), h, error, lambda k: ({"x": x, "labels": y, "i": i},), rows(5))


def popped_list(lam):
    batch = indexed()

    def h(m, inputs):
        i, y, x = inputs.pop(), inputs.pop(), inputs.pop()
        return weighted(lam)(m, x, y, i)

    return Loop(mlp(), h, error, lambda k: (list(batch),), rows(5))


def nested(lam):
    """The same one level deeper."""
    x, y, i = indexed()

    def h(m, inputs):
        meta = inputs["meta"]
        return weighted(lam)(m, inputs["x"], meta.pop("y"), meta.pop("i"))

    return Loop(mlp(), h, error, lambda k: ({"x": x, "meta": {"y": y, "i": i}},), rows(5))


def added(lam):
    """h puts what it has computed into the batch."""
    x, y, i = indexed()

    def h(m, inputs):
        inputs["out"] = m(inputs["x"])
        return (torch.sigmoid(lam[inputs["i"]]) * (inputs["out"].squeeze(-1) - inputs["y"]).square()).mean()

    return Loop(mlp(), h, error, lambda k: ({"x": x, "y": y, "i": i},), rows(5))


def divided(lam):
    """x.div_(255) in h, on a batch that each step has of its own."""
    x, y, i = indexed()

    def h(m, x, y, i):
        return weighted(lam)(m, x.div_(2.55), y, i)

    return Loop(mlp(), h, error, lambda k: (x.clone() * 2, y, i), rows(5))


def masked(lam):
    x, y, i = indexed()

    def h(m, x, y, i):
        x[torch.rand(x.shape) < 0.2] = 0
        return weighted(lam)(m, x, y, i)

    return Loop(mlp(), h, error, lambda k: (x.clone(), y, i), rows(5))


def appended(lam):
    """A list of features that h is given, and appends to."""
    x, y, i = indexed()

    def h(m, x, y, i, seen):
        seen.append(m[0](x))
        return weighted(lam)(m, x, y, i) + 0.1 * seen[-1].square().mean()

    return Loop(mlp(), h, error, lambda k: (x, y, i, []), rows(5))


def appended_to_one(lam):
    """The same list in all steps, of numbers for a log."""
    x, y, i = indexed()
    log = []

    def h(m, x, y, i, log):
        loss = weighted(lam)(m, x, y, i)
        log.append(loss.detach())
        return loss

    return Loop(mlp(), h, error, lambda k: (x, y, i, log), rows(5))


def sorted_in_place(lam):
    """A list of samples that h puts in order."""
    x, y, i = indexed()

    def h(m, samples):
        samples.sort(key=lambda s: int(s[2]))
        samples.reverse()
        x, y, i = (torch.stack(column) for column in zip(*samples, strict=True))
        return weighted(lam)(m, x, y, i)

    return Loop(mlp(), h, error, lambda k: (list(zip(x, y, i, strict=True)),), rows(5))


CHANGED = {
    "popped from a dict": popped,
    "popped from a list": popped_list,
    "popped from a dict in a dict": nested,
    "put into a dict": added,
    "divided in place": divided,
    "masked in place": masked,
    "appended to a list": appended,
    "appended to one list": appended_to_one,
    "sorted in place": sorted_in_place,
}


@constructs(CHANGED, "reverse sqrt memory blocks unroll forward")
def test_a_loss_that_changes_its_batch(construct, variant):
    keeps_the_promise(construct, variant, "batch of h|batch")
