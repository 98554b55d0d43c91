"""Replay of a step: the record of what it used, and the check that the replay ends where the step ended.

The outer variables of a step need no registration. They are found in the autograd graph of its losses.

- A tensor of the batch that requires grad is *cut*: the losses get a leaf in its place. The gradient for that leaf is
  summed over all steps, and then passed on to the graph of the tensor in one backward pass.
- Any other tensor that requires grad (closed over, a parameter of another module, a rate) is a *leaf* of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..autograd.derive import Gradients, Traced, norm
from ..autograd.graph import GRAPH_TO_WEIGHTS, find_leaves, reads_since, sequence_number
from ..autograd.trees import Pairs, State, same_bits, tensors_of
from ..kernels.switches import EXCLUSIVE
from ..model.losses import evaluating_loss
from ..model.model import OWNER, Binding
from ..model.session import NESTED
from ..pullback import micro, separate
from ..pullback.base import Pull, Pulled
from ..update.update import SUM, weight_of
from .conditions import RandomStates, drawn_from, random_states, set_modes, set_random_states
from .fetching import Source
from .step import LossMonitor, Moved, Step, Term, disconnected

_IN_BATCH = {n: f"a tensor in the batch of {n}" for n in ("h", "g")}
_CHANGED = (
    "Something that h, g or direction= reads has changed since, and is no tensor of the batch: a closed-over tensor or "
    "number, Python's or NumPy's random numbers, a counter in the model. Pass it in the batch, draw with torch, or use "
    "engine='unroll', which runs nothing again."
)


class Conditions:
    """The conditions of a call besides its arguments: train/eval modes, autocast, random states."""

    def __init__(self, binding: Binding, *, others: bool = False) -> None:
        self._binding, self._others = binding, others  # also the generators of Python and NumPy
        self._modes = [m.training for m in binding.modules]
        self._autocast = {t: (torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in binding.device_types}
        self._random: RandomStates | None = random_states(binding.devices, others=others)

    def __eq__(self, other: object) -> bool:
        """Return whether two calls that drew no random numbers had the same modes and autocast settings."""
        if not isinstance(other, Conditions) or self.draws or other.draws or self._binding is not other._binding:
            return False
        return self._modes == other._modes and self._autocast == other._autocast

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    @property
    def draws(self) -> bool:
        """Whether the call drew random numbers."""
        return self._random is not None

    @property
    def autocast(self) -> bool:
        return any(on for on, _ in self._autocast.values())

    def share_with(self, before: Conditions) -> None:
        """Share equal modes with another call, which saves memory if a model has hundreds of modules."""
        if self._modes == before._modes and self._autocast == before._autocast:
            self._modes, self._autocast = before._modes, before._autocast

    def end_of_call(self) -> None:
        """Drop the random states from which nothing was drawn."""
        if self._random is not None:
            self._random = drawn_from(self._random, random_states(self._binding.devices, others=self._others))

    @property
    def precision(self) -> float:
        """The rounding unit of the least precise type that the call computed in."""
        types = [p.dtype for p in self._binding.parameters.values()]
        types += [dtype for on, dtype in self._autocast.values() if on]
        return max(torch.finfo(t).eps for t in types)

    @property
    def unit(self) -> float:
        """The largest relative difference to allow between two ways to compute the same loss."""
        root = self.precision**0.5
        return root if self._binding.devices else min(1000 * self.precision, root)

    @contextmanager
    def replaying(self, *, autocast: bool = True) -> Generator[None]:
        """Restore the conditions of the call inside this context, and those of the caller at its end."""
        modules = self._binding.modules
        with EXCLUSIVE, ExitStack() as stack:
            modes = [m.training for m in modules]
            random = None if self._random is None else random_states(self._binding.devices, others=self._others)
            for kind, (on, dtype) in self._autocast.items():
                on = on and autocast
                if (on, dtype) != (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=on))
            try:
                set_modes(modules, self._modes)
                set_random_states(self._random)
                yield
            finally:
                set_modes(modules, modes)
                set_random_states(random)


class Recorded:
    """The record of an evaluation of losses, with which it is repeated and its values are compared."""

    __slots__ = ("_names", "_values", "_versions", "conditions")

    def __init__(self, conditions: Conditions | None = None) -> None:
        self.conditions = conditions
        self._names: tuple[str, ...] = ()
        self._values: tuple[float | Tensor, ...] = ()  # the values of the losses
        self._versions: list[tuple[str, Tensor, int]] = []

    @property
    def where(self) -> str:
        """The place of the evaluation in the loop, as errors name it."""
        raise NotImplementedError

    def ended_elsewhere(self) -> RuntimeError:
        """Return the error for a repetition with another result."""
        raise NotImplementedError

    def _note_outer_variables(self, leaves: Iterable[Tensor], binding: Binding) -> None:
        """Record the versions of outer variables, but not of parameters that blocks write to.

        These are the parameters of blocks inside a loss, and those of this block. The latter are leaves, and stand for
        w_0, where a loss uses what was computed from them before the block.
        """
        written = NESTED.union(map(id, binding.parameters.values()))
        self._versions += [("an outer variable", x, x._version) for x in leaves if id(x) not in written]

    def _check_unchanged(self) -> None:
        for what, x, version in self._versions:
            if x._version != version:
                raise RuntimeError(
                    f"bilevel.inner: {what} (shape {tuple(x.shape)}) was changed in place after {self.where} used "
                    "it, so that it can't be run again as it was. Take the hypergradient before changing it, or use a "
                    "clone."
                )

    def _check_values(self, values: State) -> None:
        """Raise if a loss has another value than at first."""
        assert self.conditions is not None
        for value, before in zip(values.values(), self._values, strict=True):
            if value.device.type == "meta" or (isinstance(before, float) and value.item() == before):
                continue
            unit = torch.finfo(value.dtype).eps
            allowed = 1000 * unit if value.device.type == "cpu" else max(1000 * unit, self.conditions.precision**0.5)
            if not abs(float(value) - float(before)) <= allowed * abs(float(before)) + torch.finfo(value.dtype).tiny:
                raise self.ended_elsewhere()


class RecordedLoss(Recorded):
    """The record of an outer loss after step k, with which it is evaluated there again."""

    __slots__ = ("_k",)

    def __init__(self, k: int, conditions: Conditions) -> None:
        super().__init__(conditions)
        self._k = k

    @property
    def where(self) -> str:
        return f"the outer loss after step k = {self._k}"

    def ended_elsewhere(self) -> RuntimeError:
        return RuntimeError(
            f"bilevel.inner: {self.where}, evaluated again for the hypergradient, has another value. {_CHANGED}"
        )

    def note(self, value: Tensor, batch: Any, leaves: Iterable[Tensor], binding: Binding) -> None:
        """Record the value of the loss and the tensors that it used, at the end of the evaluation."""
        assert self.conditions is not None
        self.conditions.end_of_call()
        self._values = (value.item() if value.device.type == "cpu" else value,)
        self._versions = [(_IN_BATCH["g"], x, x._version) for x in tensors_of(batch)]
        self._note_outer_variables(leaves, binding)

    @contextmanager
    def repeating(self) -> Generator[None]:
        """Restore the conditions of the evaluation inside this context."""
        assert self.conditions is not None
        self._check_unchanged()
        with self.conditions.replaying():
            yield

    def check(self, value: Tensor) -> None:
        """Raise if the loss has another value than at first."""
        self._check_values({"g": value})


class RecordedStep(Recorded):
    """A step that was taken, and what is needed to run it again.

    `buffers` are those of the model before the step that are not part of z. A loop may have thousands of steps, so a
    step shares with the one before what both have in common. With a `source`, the batch of h is not held: it is fetched
    again, under the `conditions` that it was fetched in.
    """

    __slots__ = ("buffers", "cut", "leaves", "source", "step")

    def __init__(
        self,
        step: Step,
        buffers: State,
        cut: Pairs,
        source: Source | None = None,
        conditions: Conditions | None = None,
    ) -> None:
        super().__init__(conditions)
        self.step, self.buffers, self.cut = step, buffers, cut
        self.source = source if any(t.name == "h" for t in step.terms) else None
        self.leaves: list[Tensor] = []

    @property
    def where(self) -> str:
        return f"step k = {self.k}"

    def ended_elsewhere(self) -> RuntimeError:
        return RuntimeError(
            f"bilevel.inner: {self.where}, run again for the hypergradient, ended elsewhere or saw another loss. "
            f"{_CHANGED}"
        )

    @property
    def k(self) -> int:
        return self.step.k

    @property
    def accumulates(self) -> bool:
        """Whether the step changes no weight, and only adds to the direction of the next step."""
        return self.step.update.accumulates

    def take(
        self, z: State, monitor: LossMonitor, *, graph: bool = False, within: Callable[[Traced], None] | None = None
    ) -> Moved:
        """Take the step for the first time, and record what it used.

        `within` is called with the graph of the step while the model holds its weights.
        """
        binding, since = self.step.binding, sequence_number()

        def note(moved: Moved) -> None:
            self._note(moved, z, monitor, since)
            if within is not None:
                within(Traced(moved.at, moved.to, self.cut, self.leaves))

        if not evaluating_loss():
            NESTED.clear()
        with EXCLUSIVE:  # no other thread may draw between the two readings of the random state
            conditions = self.conditions or Conditions(binding)
            moved = self.step.move(z, self.buffers, graph=graph, within=note, first=True)
            conditions.end_of_call()
        self.conditions = conditions
        if self.source is not None:
            self.step.terms = self._terms(())
        if graph and binding.own_parameters:  # the graph ends here; an unchanged weight is the parameter itself
            own = {id(p) for p in binding.parameters.values()}
            moved.to = {n: x.detach().clone() if id(x) in own else x.detach() for n, x in moved.to.items()}
        return moved

    def take_with_whole_graph(self, z: State, monitor: LossMonitor) -> Moved:
        """Take the step as a part of the graph of z, and record nothing but its outer variables."""
        step, binding, since = self.step, self.step.binding, sequence_number()
        moved = step.move(z, self.buffers, graph=True, first=True)
        # A weight that does not change must be a new tensor in the next step. Otherwise the direction of that step
        # would go back through this step, by a buffer that this step has changed.
        moved.to = {n: x.view_as(x) if x is z.get(n) and x.requires_grad else x for n, x in moved.to.items()}
        binding.check_not_written(z, self.k)
        for name, mean in moved.means.items():
            monitor.record_loss(self.k, name, mean, z)
        for term, value in zip(step.terms, moved.weighted, strict=True):
            self._add_leaves(leaves_of_loss(term.name, value, moved.at, binding, (), since))
        return moved

    def _note(self, moved: Moved, z: State, monitor: LossMonitor, since: int) -> None:
        binding = self.step.binding
        binding.check_not_written(z, self.k)
        self._names = tuple(moved.values)
        seen = {n: monitor.record_loss(self.k, n, mean, z) for n, mean in moved.means.items()}
        if moved.means is not moved.values:  # with several ranks, a replay compares the values of this rank
            seen = {n: x.item() if x.device.type == "cpu" else x for n, x in moved.values.items()}
        self._values = tuple(seen.values())
        state = {**moved.at, **binding.parameters} if binding.own_parameters else moved.at
        stand_ins = [x for _, x in self.cut]
        if moved.leaves is not None:
            ids = {id(x) for x in stand_ins}
            self._add_leaves(x for x in moved.leaves if id(x) not in ids)
        older: list[Any] = []
        for name, value in zip(self._names, moved.weighted, strict=False):
            self._add_leaves(leaves_of_loss(name, value, state, binding, stand_ins, since, older))
        # compiled losses have no graph to search, and none to free
        self.step.runs_into_other_graphs = bool(older) or not moved.weighted
        for option in self.step.update.options:
            self._add_leaves(x for x in find_leaves(option, known=stand_ins)[0])
        cut = {id(x) for x in stand_ins}
        self._add_leaves(x for x in moved.leaves_of_update if id(x) not in cut)
        held = [t for t in self.step.terms if self.source is None or t.name != "h"]
        self._versions = [(_IN_BATCH[n], x, x._version) for n, _, batch in held for x in tensors_of(batch)]
        self._note_outer_variables(self.leaves, binding)

    def _add_leaves(self, found: Iterable[Tensor]) -> None:
        known = {id(x) for x in self.leaves}
        self.leaves += [x for x in found if id(x) not in known]

    def share_with(self, before: RecordedStep | None) -> None:
        """Share equal objects with the step before, which saves memory."""
        if before is None:
            return
        if self.conditions is not None and before.conditions is not None:
            self.conditions.share_with(before.conditions)
        if self.source is not None and before.source is not None:
            self.source.share_with(before.source)
        for name in ("conditions", "cut", "leaves", "buffers", "_names", "_versions"):
            if holds_same_objects(mine := getattr(before, name), getattr(self, name)):
                setattr(self, name, mine)
        for name in ("terms", "weights", "update", "only", "micro", "directed"):
            if holds_same_objects(mine := getattr(before.step, name), getattr(self.step, name)):
                setattr(self.step, name, mine)

    # --- replay ---

    @contextmanager
    def _replaying(self) -> Generator[None]:
        assert self.conditions is not None
        self._check_unchanged()
        with self.conditions.replaying():
            if self.source is None:
                yield
                return
            with self._holding(self.source.fetch_again(self.k)):
                yield

    @contextmanager
    def given(self) -> Generator[Step]:
        """Yield the step with its batches, one of which may have to be fetched."""
        if self.source is None:
            yield self.step
            return
        assert self.conditions is not None
        with self.conditions.replaying():
            batch = self.source.fetch_again(self.k)
        with self._holding(batch):
            yield self.step

    @contextmanager
    def _holding(self, batch: tuple[Any, ...]) -> Generator[None]:
        self.step.terms = self._terms(batch)
        try:
            yield
        finally:
            self.step.terms = self._terms(())

    def _terms(self, batch: tuple[Any, ...]) -> tuple[Term, ...]:
        """Return the losses of the step, with this batch for h."""
        return tuple(Term(t.name, t.loss, batch) if t.name == "h" else t for t in self.step.terms)

    def replay(self, z: State) -> State:
        """Run the step again from z, without a graph, and return the next state."""
        with self._replaying():
            moved = self.step.move(z, self.buffers, graph=False)
        self._check_values(moved.values)
        return moved.to

    @contextmanager
    def traced(self, z: State) -> Generator[Traced]:
        """Yield the step from z with its graph. With own parameters, the graph is valid inside this context only."""
        binding = self.step.binding
        with self._replaying():
            step = self.step
            with binding.inside(z, self.buffers, graph=True, statistics=True) as inside:
                found = step.evaluate(inside, create_graph=True)
                at = {**z, **inside.leaves, **inside.statistics}
                with torch.enable_grad():
                    to = step.update(at, binding.mean_of_direction(found.direction))
                to.update({n: found.buffers[n] for n in binding.statistics})
                yield Traced(at, to, self.cut, self.leaves)

    def trace(self, z: State) -> Traced:
        """Run the step again with a graph that outlives the call, which needs weights that are swapped in."""
        with self._replaying():
            moved = self.step.move(z, self.buffers, graph=True)
        self._check_values(moved.values)
        return Traced(moved.at, moved.to, self.cut, self.leaves)

    def pull(
        self,
        z: State,
        a: State,
        inputs: Sequence[Tensor] | None,
        into: Gradients,
        how: Pull,
        after: State | None = None,
    ) -> Pulled:
        """Return a·∂Φ/∂z at z, and add a·∂Φ/∂λ to the sums for `inputs`, or for every leaf if None.

        `after` is the state after the step, if it is known.
        """
        wanted = self.leaves if inputs is None else inputs
        with self._replaying():
            pull = separate.pull if self.step.micro is None else micro.pull
            pulled = pull(how, self.step, z, self.buffers, a, [*(x for _, x in self.cut), *wanted], after)
        self._check_values(pulled.values)
        into.collect(self.cut, wanted, pulled.wanted)
        return pulled

    def check_end(self, z: State, pulled: Pulled, after: State) -> None:
        """Raise if a replayed step ends at another state than at first, since the gradient would be wrong.

        The kernels that have a second derivative round differently from those of the first run. If a gradient is 0 up
        to rounding, an update that divides by its size, such as Adam's, turns that rounding into a whole step. So if
        the ends differ, the step is run once more with the kernels of the first run, and the gradients are compared.
        """
        # an accumulating step changes no weight, so its sum has no length of a step to be compared with
        to = {n: x.detach() for n, x in pulled.to.items() if not n.endswith(SUM)}
        if self._ends_at(z, to, after):
            return
        if pulled.direction:
            step, moved = self.step, pulled.direction.keys()
            with self._replaying(), step.binding.inside(z, self.buffers) as inside:
                d = step.binding.mean_of_direction(step.evaluate(inside, create_graph=False).direction)
                again, *_ = step.updated(z, d, False)
            again = {n: x.detach() if weight_of(n) in moved else to[n] for n, x in again.items() if n in to}
            same = moved <= d.keys() and self._ends_at(z, again, after)
            if same and self._is_close(pulled.direction, d, {}):
                return
        raise self.ended_elsewhere()

    def _ends_at(self, z: State, to: State, after: State) -> bool:
        mine = {n: x for n, x in to.items() if n in after and x.is_floating_point()}
        if not mine or all(x.device.type == "cpu" and same_bits(x, after[n]) for n, x in mine.items()):
            return True
        return self._is_close(mine, after, z)

    def _is_close(self, xs: State, others: State, start: State) -> bool:
        """Return whether xs equal the others up to rounding, relative to their distance from the start, or from 0."""
        assert self.conditions is not None
        with torch.no_grad():
            off = norm(x - others[n] for n, x in xs.items())
            size = norm(others[n] for n in xs)
            length = norm(start[n] - others[n] for n in xs if n in start) if start else size
            drift = off / (length + torch.finfo(size.dtype).eps * size + torch.finfo(size.dtype).tiny)
        return drift.device.type == "meta" or float(drift) <= self.conditions.precision**0.5

    # --- the size of a step, for engines with a bound on memory ---

    @property
    def kind(self) -> object:
        """The kind of the step: the same losses on batches of the same shapes have graphs of the same size."""
        fetched = () if self.source is None else self.source.shapes
        return self._names, fetched, tuple((x.shape, x.dtype) for x in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the step was given besides its state."""
        return [*(x for _, x, _ in self._versions), *self.buffers.values()]


def leaves_of_loss(
    name: str,
    value: Tensor,
    state: State,
    binding: Binding,
    known: Sequence[Tensor],
    since: int,
    older: list[Any] | None = None,
) -> list[Tensor]:
    """Return the outer variables of the loss, and refuse a loss that does not depend on the weights as it should.

    Nodes of its graph that are older than the step are added to `older`.
    """
    found, connected = find_leaves(value, state.values(), known, twice=True, since=since, older=older)
    if any(getattr(x, OWNER, None) is binding.token for x in found):
        raise ValueError(GRAPH_TO_WEIGHTS)
    if not binding.own_parameters:
        refuse_hidden_parameter(name, value, state.values(), found, binding)
    if not connected:
        raise disconnected(name)
    return found


def refuse_hidden_parameter(
    name: str, value: Tensor, state: Iterable[Tensor], leaves: Iterable[Tensor], binding: Binding
) -> None:
    """Where weights are swapped in, refuse a loss that uses the model's own parameters by another reference.

    They are allowed in what was computed from them before the block, where they are an outer variable, w_0.
    """
    own = {id(p): n for n, p in binding.parameters.items()}
    state = tuple(state)
    hidden = next((own[id(x)] for x in leaves if id(x) in own and reads_since(value, x, state, binding.opened)), None)
    if hidden is not None:
        raise RuntimeError(
            f"bilevel.inner: {name} uses the parameter {hidden!r} by a reference that was made before: a list of "
            "parameters, in the loss or in a module, or a tensor that was computed from the model. It does not see the "
            "weights of this loop. Compute it inside h (or g), from the model that it is given; or use "
            "engine='reverse' without memory= and tasks=, where a list of parameters is right."
        )


def holds_same_objects(x: Any, y: Any) -> bool:
    """Return whether two nested containers hold the same tensor objects, and equal numbers and names."""
    if x is y:
        return True
    if type(x) is not type(y):
        return False
    if isinstance(x, (tuple, list)):
        return len(x) == len(y) and all(map(holds_same_objects, x, y))
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(holds_same_objects(x[n], y[n]) for n in x)
    return isinstance(x, (int, float, str, Conditions)) and x == y
