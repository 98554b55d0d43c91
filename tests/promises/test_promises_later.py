"""What a list looks for in the first step alone: a construct that a loss uses in a later step."""

import torch
import torch.nn.functional as F
from problems import Cut, Once
from promise import Loop, constructs, error, indexed, keeps_the_promise, mlp, rows, weighted
from torch import nn
from torch.utils.checkpoint import checkpoint

ALL = "reverse sqrt memory blocks unroll forward tasks"


class Words(nn.Module):
    """An embedding of tokens, by nn.Embedding or by the function with padding."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Parameter(torch.randn(4, 3)), nn.Linear(3, 1)
        self.double()

    def forward(self, x, padding=None):
        tokens = (x > 0).long() + (x > 1).long()
        return self.out(F.embedding(tokens, self.table, padding_idx=padding).tanh().mean(1))


def when(then, steps=(2, 3)):
    """h is the weighted loss, and in some steps `then(model, x, parameters)` is added: what is looked for.

    The step is given in the batch, so that a step that is run again does what it did.
    """

    def build(lam):
        m, batch = mlp(), indexed()
        held = list(m.parameters())  # made before the block

        def h(m, x, y, i, k):
            loss = weighted(lam)(m, x, y, i)
            return loss + then(m, x, held) if int(k) in steps else loss

        return Loop(m, h, error, lambda k: (*batch, k), rows(5))

    return build


def hooked(m, x, held):
    z = m[0](x)
    z.register_hook(lambda grad: 0.5 * grad)
    return m[2](z.tanh()).square().mean()


def hooked_as_a_method(m, x, held):
    """The same by a name that was taken before."""
    z = m[0](x)
    register(z, lambda grad: 0.5 * grad)
    return m[2](z.tanh()).square().mean()


register = torch.Tensor.register_hook


def semi(cut):
    """A term whose gradient leaves a path out; what is left out depends on the weights."""
    return lambda m, x, held: (m(x) * cut(m[0](x).square().sum(1, keepdim=True))).mean()


def no_grad(z):
    with torch.no_grad():
        return z.clone()


def in_fused_attention(m, x, held):
    z = m[0](x)[None, None]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(z, z, z).square().mean()


def padded(lam):
    m, batch = Words(), indexed()

    def h(m, x, y, i, k):
        return (torch.sigmoid(lam[i]) * (m(x, 0 if int(k) >= 2 else None).squeeze(-1) - y).square()).mean()

    return Loop(m, h, error, lambda k: (*batch, k), rows(5))


def padded_and_checkpointed(lam):
    m, batch = Words(), indexed()

    def h(m, x, y, i, k):
        run = lambda x: m(x, 0 if int(k) >= 2 else None)
        out = checkpoint(run, x, use_reentrant=False) if int(k) >= 2 else run(x)
        return (torch.sigmoid(lam[i]) * (out.squeeze(-1) - y).square()).mean()

    return Loop(m, h, error, lambda k: (*batch, k), rows(5))


CONSTRUCTS = {
    "a parameter list made before": when(lambda m, x, held: 0.3 * sum(p.square().sum() for p in held)),
    "one closed-over parameter": when(lambda m, x, held: 0.3 * (held[0] * m[0].weight).sum()),
    "once_differentiable": when(lambda m, x, held: Once.apply(m(x)).mean()),
    "a backward that cuts": when(lambda m, x, held: Cut.apply(m(x)).mean()),
    "checkpointing": when(lambda m, x, held: checkpoint(m, x, use_reentrant=False).square().mean()),
    "reentrant checkpointing": when(
        lambda m, x, held: checkpoint(m, x.requires_grad_(), use_reentrant=True).square().mean()
    ),
    "a hook on a tensor": when(hooked),
    "a hook by another name": when(hooked_as_a_method),
    "cdist": when(lambda m, x, held: torch.cdist(m[0](x), m[0](x).roll(1, 0)).mean()),
    "a fused attention": when(in_fused_attention),
    "detach": when(semi(torch.Tensor.detach)),
    "no_grad": when(semi(no_grad)),
    "padding": padded,
    "padding under checkpointing": padded_and_checkpointed,
}
IN_ONE_STEP = {
    "detach in step 2 of 4": when(semi(torch.Tensor.detach), steps=(1,)),
    "no_grad in step 2 of 4": when(semi(no_grad), steps=(1,)),
    "data in step 2 of 4": when(semi(lambda z: z.data), steps=(1,)),
    "numpy in step 2 of 4": when(semi(lambda z: torch.from_numpy(z.detach().numpy())), steps=(1,)),
    "a backward that cuts, in step 2 of 4": when(lambda m, x, held: Cut.apply(m(x)).mean(), steps=(1,)),
    "detach in the first step of 4": when(semi(torch.Tensor.detach), steps=(0,)),
}
NAMES = {
    "a parameter list made before": "parameter|0\\.weight",
    "one closed-over parameter": "parameter|0\\.weight",
    "once_differentiable": "once",
    "a backward that cuts": r"Cut|step k = [34]",
    "checkpointing": "checkpoint",
    "reentrant checkpointing": "checkpoint",
    "a hook on a tensor": "hook",
    "a hook by another name": "hook",
    "cdist": "cdist",
    "a fused attention": "attention",
    "detach": r"detach|step k = [34]",
    "no_grad": r"no_grad|detach|step k = [34]",
    "padding": "padding",
    "padding under checkpointing": "padding|checkpoint",
}


@constructs({n: (n, b) for n, b in CONSTRUCTS.items()}, ALL)
def test_a_construct_in_a_later_step(construct, variant):
    name, build = construct
    keeps_the_promise(build, variant, NAMES[name])


@constructs(IN_ONE_STEP, ALL)
def test_a_path_that_is_cut_in_one_step_alone(construct, variant):
    """The sentinel looks at the last step of a kind; the step that cuts is another one."""
    keeps_the_promise(construct, variant, r"detach|no_grad|Cut|numpy|\.data|step k = [12]")


# --- what changes the gradient alone: flags and coefficients of an object ------------------------------------------


class Reversed(torch.autograd.Function):
    """Gradient reversal: the identity, whose gradient is multiplied by −c."""

    @staticmethod
    def forward(ctx, x, c):
        ctx.c = c
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return -ctx.c * grad, None


class Switch:
    on, c = True, 1.0


def scheduled(loss, change, bias=False):
    """A loss that reads an object, which the loop changes between its steps. The value of the loss stays the same."""

    def build(lam):
        m, state = mlp(bias=bias), Switch()
        state.parts = list(m)

        def h(m, x, y, i):
            return (torch.sigmoid(lam[i]) * loss(m, x, y, state)).mean()

        return Loop(m, h, error, indexed(), rows(5), before=lambda k: change(state, k))

    return build


def frozen(m, x, y, state):
    """A warm-up of the head: the features are detached."""
    z = m[0](x)
    z = z.detach() if state.on else z
    return (m[2](z.tanh()).squeeze(-1) - y).square()


def frozen_by_no_grad(m, x, y, state):
    with torch.set_grad_enabled(not state.on):
        z = m[0](x)
    return (m[2](z.tanh()).squeeze(-1) - y).square()


def adversarial(m, x, y, state):
    z = m[0](x)
    main = (m[2](z.tanh()).squeeze(-1) - y).square()
    return main + m[2](Reversed.apply(z, state.c).tanh()).squeeze(-1).square()


def warm(state, k):
    state.on = k < 2


def ramp(state, k):
    state.c = (k + 1) / 4


def scaled(m, x, y, state):
    """A gradient that is scaled, as loss weights by a trick do: x·c + (x·(1 − c)).detach()."""
    z = m[0](x)
    z = z * state.c + (z * (1 - state.c)).detach()
    return (m[2](z.tanh()).squeeze(-1) - y).square()


SCHEDULES = {
    "warm-up by detach": scheduled(frozen, warm),
    "warm-up by no_grad": scheduled(frozen_by_no_grad, warm),
    "gradient reversal": scheduled(adversarial, ramp),
    "a scaled gradient": scheduled(scaled, ramp),
    "warm-up by detach, with biases": scheduled(frozen, warm, bias=True),
    "gradient reversal, with biases": scheduled(adversarial, ramp, bias=True),
}


@constructs(SCHEDULES, f"{ALL} micro accumulate")
def test_a_schedule_that_changes_the_gradient_alone(construct, variant):
    named = r"(?<!hyper)gradient|second derivative of h|flag|attribute|number|Reversed|state\.c"
    keeps_the_promise(construct, variant, named)
