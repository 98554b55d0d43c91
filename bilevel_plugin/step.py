"""One step of the inner problem as a function of its state, z⁺ = Φ_k(z), that can be run again alike.

z holds the weights and the optimizer's tensors. What Φ_k depends on besides z is found in the autograd graph
of its losses, never registered:

- tensors of the batch that require grad are *cut*: the losses see a stand-in leaf, and the gradient that
  gathers there goes on into the tensor's own graph once, when all steps are done;
- everything else that requires grad (closed over, parameters of other modules, rates) is a *leaf* of the graph.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from .binding import EXCLUSIVE, Binding, Conditions, Loss, State, full_precision, map_tensors, tensors_of
from .lean import Lean
from .solvers import StepRule, Value
from .updates import Step, plain

Pairs = list[tuple[Tensor, Tensor]]
_NONE: State = {}
_IN_BATCH = {n: f"a tensor in the batch of {n}" for n in ("h", "g")}
_ACCUMULATE = type(get_gradient_edge(torch.zeros((), requires_grad=True)).node)  # the node of a leaf


class Gradients:
    """Sums of gradients: for tensors that the losses use themselves, and for those that were cut."""

    def __init__(self) -> None:
        self.direct: dict[int, tuple[Tensor, Tensor]] = {}
        self.cut: dict[int, tuple[Tensor, Tensor]] = {}

    @staticmethod
    def add(sums: dict[int, tuple[Tensor, Tensor]], tensor: Tensor, grad: Tensor | None) -> None:
        if grad is not None:
            known = sums.get(id(tensor))
            if known is None:
                sums[id(tensor)] = (tensor, grad.clone())
            else:
                known[1].add_(grad)

    def values(self) -> list[Tensor]:
        return [grad for _, grad in (*self.direct.values(), *self.cut.values())]


@dataclass
class Traced:
    """A function's value together with its graph: `to`, taken at the leaves `at`."""

    at: State
    to: State
    cut: Pairs = field(default_factory=list)  # (tensor of the batch, its stand-in)
    leaves: Sequence[Tensor] = ()

    def vjp(self, a: State, inputs: Sequence[Tensor] | None, into: Gradients) -> State:
        """a·∂to/∂at, returned; a·∂to/∂λ, added to the sums, for `inputs`, or for every leaf if None."""
        wanted = self.leaves if inputs is None else inputs
        grads = self.pull(a, [*(stand_in for _, stand_in in self.cut), *wanted])
        inner, outer = grads[: len(self.at)], grads[len(self.at) :]
        for (tensor, _), grad in zip(self.cut, outer, strict=False):
            into.add(into.cut, tensor, grad)
        for tensor, grad in zip(wanted, outer[len(self.cut) :], strict=True):
            into.add(into.direct, tensor, grad)
        return {n: grad for n, grad in zip(self.at, inner, strict=True) if grad is not None}

    def drift(self, after: State) -> list[Tensor]:
        """How far a step that was run again ended from where it ended at first, over the step's own length."""
        if all(x.device.type == "cpu" and torch.equal(x, after[n]) for n, x in self.to.items()):
            return []
        with torch.no_grad():
            off = norm(x - after[n] for n, x in self.to.items())
            size, length = norm(after.values()), norm(x - after[n] for n, x in self.at.items() if n in after)
            return [off / (length + torch.finfo(size.dtype).eps * size + torch.finfo(size.dtype).tiny)]

    def pull(self, a: State, wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """a·∂to for every tensor of `at`, and for those that are wanted."""
        keys = [n for n in a if self.to[n].requires_grad]
        inputs = [*self.at.values(), *wanted]
        if not keys:
            return [None] * len(inputs)
        # retained, since the graph may run on into one that is not ours: a closed-over encoder's, say
        return torch.autograd.grad(
            [self.to[n] for n in keys], inputs, [a[n] for n in keys], allow_unused=True, retain_graph=True
        )


@dataclass
class Pullback(Traced):
    """A step as it was at `at`, run again when its derivative is asked for, and without a value of its own."""

    phi: Phi | None = None
    off: list[Tensor] = field(default_factory=list)  # how far the losses were

    def pull(self, a: State, wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
        assert self.phi is not None
        return self.phi.pull(self, a, wanted)

    def drift(self, after: State) -> list[Tensor]:
        """The same, after `pull`, by what it computed: the losses, and z⁺ as far as it was read."""
        return [*self.off, *super().drift(after)]


class Watch:
    """Notices a loss that is not finite, with its step: at once on the CPU, else when asked, so as not to wait.

    Also looks once, at the first graph of a whole step, for functions that can't be differentiated twice.
    """

    def __init__(self) -> None:
        self.before: Phi | None = None  # the last step that may be run again
        self.lean = True  # a step can be differentiated without its value, for all that is known
        self._looked = False
        self._seen: set[str] = set()
        self._later: list[tuple[int, str, Tensor]] = []

    def see(self, k: int, name: str, value: Tensor, w: State) -> float | Tensor:
        """The value, as a number if there is no need to wait for it."""
        if value.device.type == "cpu":
            if not math.isfinite(number := value.item()):
                raise self._error(k, name, value, w)
            return number
        if value.device.type != "meta":
            self._later.append((k, name, value))
        return value

    def first(self, name: str) -> bool:
        """Whether this loss was not asked about before."""
        new = name not in self._seen
        self._seen.add(name)
        return new

    def ask(self) -> None:
        """Raise if a loss so far was not finite."""
        later, self._later = self._later, []
        if later and not bool(torch.isfinite(torch.stack([value for _, _, value in later])).all()):
            raise self._error(*next(entry for entry in later if not bool(torch.isfinite(entry[2]))), {})

    def look(self, roots: Iterable[Tensor], z: State) -> None:
        if not self._looked:
            check_twice_differentiable(roots, z.values())
            self._looked = True

    @staticmethod
    def _error(k: int, name: str, value: Tensor, w: State) -> FloatingPointError:
        broken = [n for n, x in w.items() if not bool(torch.isfinite(x).all())]
        why = f"the step before made the weight {broken[0]!r} so" if broken else "a smaller rate may help"
        return FloatingPointError(f"bilevel.inner: {name} is {float(value)} at step k = {k}: {why}.")


class Phi:
    """Φ_k. Its first call is the step itself; each further call, if it is to have any, runs it again as it was then.

    `buffers` are those of the model before the step; `buffers_after`, once it was called, those after it.
    A loop may have thousands: what a step has in common with the one before, the two share.
    """

    __slots__ = (
        "_again", "_binding", "_buffers", "_losses", "_names", "_options", "_rule", "_seen", "_update", "_versions",
        "_watch", "buffers_after", "conditions", "cut", "k", "leaves", "values",
    )  # fmt: skip

    def __init__(
        self,
        k: int,
        binding: Binding,
        rule: StepRule,
        update: tuple[Step, list[Tensor]],
        losses: Sequence[tuple[str, Loss, tuple[Any, ...]]],
        buffers: State,
        watch: Watch,
        again: bool,
    ) -> None:
        self.k, self._binding, self._rule, self._watch = k, binding, rule, watch
        self._update, self._options = update
        self.cut: Pairs = []
        self._again = again
        self._losses = [(n, loss, cut_batch(batch, self.cut) if again else batch) for n, loss, batch in losses]
        self._buffers, self.buffers_after = buffers, buffers
        self.conditions: Conditions | None = None
        self.values: State = {}  # of the losses, for whom takes the step
        self._names: tuple[str, ...] = ()  # and the same, to be compared with
        self._seen: tuple[float | Tensor, ...] = ()
        self.leaves: list[Tensor] = []
        self._versions: list[tuple[str, Tensor, int]] = []

    def __call__(self, z: State, *, graph: bool) -> Traced:
        if not self._again:
            return self._run(z, graph, first=True)
        if self.conditions is not None:
            self._check_unchanged()
            with self.conditions.again():
                return self._run(z, graph, first=False)
        with EXCLUSIVE:  # between the two looks at the random state nobody else's step may draw
            conditions = Conditions(self._binding)
            traced = self._run(z, graph, first=True)
            conditions.settle()
        self.conditions = conditions
        before, self._watch.before = self._watch.before, self
        for name in ("conditions", "cut", "leaves", "_buffers", "_losses", "_names", "_options", "_versions"):
            if before is not None and alike(mine := getattr(before, name), getattr(self, name)):
                setattr(self, name, mine)
        return traced

    def _used(self) -> list[tuple[str, Loss, tuple[Any, ...], Value]]:
        """The losses that have a weight in this step, with it."""
        weights = self._rule.weights(self.k)
        return [(*loss, c) for loss, c in zip(self._losses, weights, strict=True) if isinstance(c, Tensor) or c != 0]

    def take_values(self) -> State:
        """Those of the losses, which it then forgets."""
        values, self.values = self.values, _NONE
        return values

    def largest(self, *numbers: int) -> tuple[int, ...]:
        return self._binding.largest(*numbers)

    @property
    def kind(self) -> object:
        """Steps of one kind have the same losses on batches of the same shapes, and so graphs of the same size."""
        return self._names, tuple((x.shape, x.dtype) for x in self.tensors())

    def tensors(self) -> list[Tensor]:
        """What the step was given, besides its state."""
        return [*(x for _, x, _ in self._versions), *self._buffers.values()]

    @property
    def lean(self) -> bool:
        """Whether it can be differentiated without its value: Φ(z) = z − ∇ℓ(z), and nothing that would mind."""
        assert self.conditions is not None
        plainly = self._update is plain and bool(self._seen) and self._binding.group is None
        return self._watch.lean and plainly and not self.conditions.autocast

    def pullback(self, z: State) -> Traced:
        """The step as it was at z, to be differentiated: without its value, where that can be."""
        return Pullback(z, {}, self.cut, self.leaves, self) if self.lean else self(z, graph=True)

    def pull(self, step: Pullback, a: State, wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """a·∂Φ for every tensor of its state, and for those that are wanted."""
        assert self.conditions is not None
        self._check_unchanged()
        if self._watch.lean:
            try:
                with self.conditions.again():
                    return self._pull_lean(step, a, wanted)
            except Exception:  # a loss may do what no autograd.Function takes: derivatives in forward mode, for one
                self._watch.lean = False
        with self.conditions.again():
            traced = self._run(step.at, graph=True, first=False)
        step.to = traced.to
        return traced.pull(a, wanted)

    def _pull_lean(self, step: Pullback, a: State, wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
        z = step.at
        with Lean(z.values()) as lean:
            weighted, values, _ = self._weighted(z, first=False)
        with full_precision(), torch.enable_grad():
            moves = lean.gradient(-sum(weighted[1:], weighted[0]))  # z⁺ − z
        d = {n: x for n, x in zip(z, moves, strict=True) if x is not None}
        self._watch.look([*weighted, *d.values()], z)
        step.to = {n: z[n].detach() + x.detach() for n, x in d.items() if id(z[n]) not in lean.unread}
        step.off = [x for pair in zip(values.values(), self._seen, strict=True) for x in _off(*pair)]
        grads = Traced(z, d).pull({n: x for n, x in a.items() if n in d}, wanted)
        return [*(_sum(a.get(n), grad) for n, grad in zip(z, grads, strict=False)), *grads[len(z) :]]

    def _weighted(self, z: State, first: bool) -> tuple[list[Tensor], State, State]:
        """The losses of the step at z times their weights, as they are, and the buffers after them."""
        values: State = {}
        buffers = {n: b.clone() for n, b in self._buffers.items()}
        weighted: list[Tensor] = []
        with torch.enable_grad(), self._binding.twice_differentiable():
            w = self._binding.own({n: z[n] for n in self._binding.parameters})
            for name, loss, batch, c in self._used():
                value, buffers = self._binding.loss(name, loss, w, buffers, batch)
                weighted.append((self._binding.once(c) if isinstance(c, Tensor) else c) * value)
                values[name] = value.detach()
                if first:
                    self._seen += (self._watch.see(self.k, name, values[name], w),)
                    self.values = values
                    if self._again or self._watch.first(name):
                        self._find_leaves(name, weighted[-1], z)
        return weighted, values, buffers

    def _run(self, z: State, graph: bool, first: bool) -> Traced:
        weighted, _, buffers = self._weighted(z, first)
        mine = {n: z[n] for n in self._binding.parameters}
        d: State = {}
        with full_precision(), torch.set_grad_enabled(graph):
            if weighted:  # both losses in one backward pass
                with torch.enable_grad():
                    total = sum(weighted[1:], weighted[0])
                grads = torch.autograd.grad(total, list(mine.values()), create_graph=graph, allow_unused=True)
                d = {n: x for n, x in zip(mine, grads, strict=True) if x is not None}
            to = self._update(z, d)
        if graph:
            self._watch.look([*weighted, *to.values()], z)
        if first:
            if self._again:
                self._remember()
            after = {n: _unless_equal(b, self._buffers[n]) for n, b in buffers.items()}
            self.buffers_after = self._buffers if alike(after, self._buffers) else after
        return Traced(z, to, self.cut, self.leaves)

    def _find_leaves(self, name: str, value: Tensor, z: State) -> None:
        stand_ins = [stand_in for _, stand_in in self.cut]
        found, connected = walk(value, z.values(), stand_ins)
        if not connected:
            raise disconnected(name)
        self._add_leaves(found)

    def _add_leaves(self, found: Iterable[Tensor]) -> None:
        known = {id(x) for x in self.leaves}
        self.leaves += [x for x in found if id(x) not in known]

    def _remember(self) -> None:
        """What the step depends on, as it is, to notice a change before the step is run again."""
        for option in self._options:
            self._add_leaves(walk(option, ())[0])
        self._names = tuple(self.values)
        used = (loss for loss in self._losses if loss[0] in self._names)
        self._versions = [(_IN_BATCH[n], x, x._version) for n, _, batch in used for x in tensors_of(batch)]
        self._versions += [("an outer variable", x, x._version) for x in self.leaves]

    def _check_unchanged(self) -> None:
        for what, x, version in self._versions:
            if x._version != version:
                raise RuntimeError(
                    f"bilevel.inner: {what} (shape {tuple(x.shape)}) was changed in place after step k = {self.k} used "
                    "it, so the step can't be run again as it was. Take the hypergradient before changing it, or step "
                    "on a clone."
                )


def _unless_equal(new: Tensor, old: Tensor) -> Tensor:
    """Store a buffer once if it does not change. (Its version would not tell: BatchNorm does not move it.)"""
    return old if new.device.type == "cpu" and torch.equal(new, old) else new


def alike(x: Any, y: Any) -> bool:
    """Whether two of our own containers hold the very same tensors, and equal numbers and names."""
    if x is y:
        return True
    if type(x) is not type(y):
        return False
    if isinstance(x, (tuple, list)):
        return len(x) == len(y) and all(map(alike, x, y))
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(alike(x[n], y[n]) for n in x)
    return isinstance(x, (int, str, Conditions)) and x == y


def norm(tensors: Iterable[Tensor]) -> Tensor:
    """Of all of them together."""
    return torch.stack([torch.linalg.vector_norm(x) for x in tensors]).norm()


def _off(value: Tensor, before: float | Tensor) -> list[Tensor]:
    """How far a loss is off from what it was, so scaled that one of 100 roundings is as much as a `drift` may be."""
    if isinstance(before, float) and value.item() == before:
        return []
    scale = 100 * torch.finfo(value.dtype).eps ** 0.5 * abs(before) + torch.finfo(value.dtype).tiny
    return [(value - before).abs() / scale]


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return x if y is None else y if x is None else x + y


def cut_batch(batch: tuple[Any, ...], pairs: Pairs) -> tuple[Any, ...]:
    """The batch with a leaf in place of every tensor that requires grad; which stands for which goes to `pairs`."""
    stand_ins = {id(tensor): stand_in for tensor, stand_in in pairs}

    def replace(x: Tensor) -> Tensor:
        if x.requires_grad and id(x) not in stand_ins:
            stand_ins[id(x)] = x.detach().requires_grad_()
            pairs.append((x, stand_ins[id(x)]))
        return stand_ins.get(id(x), x)

    return map_tensors(replace, batch)


def disconnected(name: str) -> ValueError:
    """The error for a loss that no inner weight moves."""
    return ValueError(
        f"bilevel.inner: {name} does not depend on the weights of the inner problem. Compute it from the model that "
        "it is given, without .detach(), .item() or torch.no_grad()."
    )


def walk(root: Tensor, z: Collection[Tensor], known: Iterable[Tensor] = ()) -> tuple[list[Tensor], bool]:
    """The leaves that the graph of root ends in, other than z and the known ones; and whether it meets z."""
    state = {id(x) for x in z}
    passed = state | {id(x) for x in known}
    found: list[Tensor] = []
    met = False
    for node in _nodes([root], stop := {x.grad_fn for x in z}):
        if node in stop:
            met = True
        elif type(node) is _ACCUMULATE:
            leaf: Tensor = getattr(node, "variable")  # noqa: B009 (the annotations do not know it)
            met = met or id(leaf) in state
            if id(leaf) not in passed:
                found.append(leaf)
    return found, met


def check_twice_differentiable(roots: Iterable[Tensor], z: Collection[Tensor]) -> None:
    """Raise where autograd would give a wrong second derivative in silence."""
    for node in _nodes(roots, {x.grad_fn for x in z}):
        if node.name() == "torch::autograd::Error":  # autograd.grad(inputs=...) takes it for a constant
            raise RuntimeError(
                "bilevel.inner: a function that h or g uses is marked once_differentiable: no second derivative.\n"
                "The hypergradient would be wrong. bilevel.gradcheck names the module; write the backward of its "
                "autograd.Function in differentiable operations."
            )
        if node.name().startswith("WeightNormInterface") and not _weight_norm_is_right():
            raise RuntimeError(
                "bilevel.inner: the second derivative of torch's weight_norm is wrong in this version of PyTorch.\n"
                "The hypergradient would be wrong. Write it as a parametrization of your own: g * v / v.norm(...)."
            )


def graph_bytes(traced: Traced, given: Iterable[Tensor]) -> int:
    """Bytes that a graph keeps alive, apart from those of its result and of what it was given."""
    aside = {x.untyped_storage().data_ptr() for x in (*given, *traced.at.values(), *traced.to.values())}
    found: dict[int, int] = {}
    for node in _nodes(traced.to.values(), {x.grad_fn for x in traced.at.values()}):
        saved = (getattr(node, name) for name in dir(node) if name.startswith("_saved_"))
        for x in tensors_of([*saved, getattr(node, "saved_tensors", ())]):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(size for where, size in found.items() if where not in aside)


@functools.cache
def _weight_norm_is_right() -> bool:
    """Fails on the CPU at least up to torch 2.13."""
    generator = torch.Generator().manual_seed(0)
    v, g = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 2), (3, 1)))
    inputs = (v.requires_grad_(), g.requires_grad_())
    fused = torch._weight_norm  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    return torch.autograd.gradgradcheck(lambda v, g: fused(v, g, 0), inputs, raise_exception=False, atol=1e-4)


def _nodes(roots: Iterable[Tensor], stop: Collection[Any]) -> Generator[Any]:
    """The nodes of a graph, up to and including those to stop at."""
    stack: list[Any] = [x.grad_fn or get_gradient_edge(x).node for x in roots if x.requires_grad]
    seen: set[Any] = {None}
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            if node not in stop:
                stack.extend(edge for edge, _ in node.next_functions)
