"""Forward over reverse, block by block: the derivative of a step in about the memory of a plain training step.

∇_(w, λ) ⟨∇ℓ, u⟩ is the tangent of the gradient of ℓ along u, if ∇ℓ is a gradient: second derivatives are symmetric. So
the losses run on dual numbers (w, u), and one backward pass gives gradients whose tangents are the result. A block f,
which is one of the repeated modules of the model, keeps only its input x and the tangent ẋ of x:

    forward    y, ẏ from (x, ẋ), without a graph
    backward   given ȳ and its tangent: run f again; x̄, θ̄ = ∇⟨ȳ, f⟩, with a graph; then the tangents of x̄ and θ̄ are
               ∇_(x, θ) [⟨(x̄, θ̄), (ẋ, u_θ)⟩ + ⟨ȳ̇, f⟩]

Operations outside the blocks run on dual numbers unchanged. (Kemaev et al. 2025, MixFlow-MG, have the idea in JAX.)
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..autograd.derive import norm
from ..autograd.look import hooks_on_saved
from ..autograd.rows import stacked
from ..autograd.trees import State
from ..guards.held import warn_if_read
from ..model.losses import code_of
from ..model.model import Evaluation
from ..step.conditions import random_states, set_modes, set_random_states, undisturbed
from ..step.cotangent import CotangentOf, PulledPiece
from ..step.piece import Piece
from . import lean
from .calls import Blocks
from .choice import Which, checked, chosen
from .dual import OnDualNumbers, Unsuited, load_forward_mode, unsuited


class BlockByBlock:
    """A pullback that differentiates the chosen modules one by one; if that can't be done, it warns and uses `lean`."""

    def __init__(self, which: Which = "auto") -> None:
        self._which, self._disabled, self._warned = checked(which), False, False

    def __call__(
        self, piece: Piece, z: State, cotangent: CotangentOf, b: State, wanted: Sequence[Tensor]
    ) -> PulledPiece:
        model = piece.model
        if self._disabled:
            return lean.pull(piece, z, cotangent, b, wanted)
        if cotangent.rows is not None:
            return self._each_row(piece, z, cotangent, b, wanted)
        modes, random = [m.training for m in model.modules], random_states(model.devices, others=True)
        found, why = None, "another rank can't differentiate its step block by block"
        try:
            found = self._pull(piece, z, cotangent, b, wanted)
        except Unsuited as error:
            why = str(error)
        if model.ranks.largest(int(found is None)) == (0,) and found is not None:
            return found
        self._disabled = True
        set_modes(model.modules, modes)  # `lean` starts under the same conditions
        set_random_states(random)
        warnings.warn(
            f"bilevel.Reverse: blocks= is off for this loop, which therefore needs the memory of whole steps: {why}.",
            stacklevel=2,
        )
        return lean.pull(piece, z, cotangent, b, wanted)

    def _each_row(
        self, piece: Piece, z: State, cotangent: CotangentOf, b: State, wanted: Sequence[Tensor]
    ) -> PulledPiece:
        """Differentiate along one row of the cotangent after the other, for many outer losses."""
        model, count = piece.model, cotangent.rows or 0
        if not self._warned:
            warnings.warn(
                f"bilevel.Reverse: with blocks= the {count} rows of a vector of outer losses go through each step one "
                "after the other, which takes the time of as many hypergradients. Leave out blocks= if the graph of a "
                "step fits in memory.",
                stacklevel=2,
            )
            self._warned = True
        modes, random = [m.training for m in model.modules], random_states(model.devices)
        found: list[PulledPiece] = []
        for i in range(count):
            set_modes(model.modules, modes)  # each row runs the losses again, under the same conditions
            set_random_states(random)
            found.append(self(piece, z, _Row(cotangent, i), {n: x[i] for n, x in b.items()}, wanted))
        joint = {n: stacked([part.adjoint.get(n) for part in found]) for part in found for n in part.adjoint}
        of_wanted = [stacked(parts) for parts in zip(*(part.wanted for part in found), strict=True)]
        adjoint = {n: x for n, x in joint.items() if x is not None}
        return PulledPiece(adjoint, of_wanted, found[0].values, found[0].followed, found[0].left)

    def _pull(self, piece: Piece, z: State, cotangent: CotangentOf, b: State, wanted: Sequence[Tensor]) -> PulledPiece:
        model = piece.model
        if not model.own:
            raise Unsuited("with tasks= the weights have a task dimension, which blocks= does not support")
        if model.seen.stops:
            raise Unsuited("a loss calls stop_gradient, and the derivative of its gradient is not symmetric")
        if hooks_on_saved is None:
            raise Unsuited(f"torch {torch.__version__} can't list the hooks on saved tensors; a later release can")
        modules = chosen(model.module, self._which)
        if not modules:
            raise Unsuited(
                "the model has no ModuleList or Sequential with several modules of one class; give a class of modules "
                "to blocks="
            )
        tangents = _Tangents(piece, z, wanted, modules)
        u = cotangent.handed_over(piece)
        if not piece.terms:  # a part without samples
            return PulledPiece({}, [None] * len(wanted), {}, ())
        _check_symmetry(piece, u, tangents)
        through, of_wanted, values = tangents.along(u, b)
        adjoint = {n: x for n, x in through.items() if x is not None}
        return PulledPiece(adjoint, of_wanted, values, model.seen.statistics if model.seen.moving else ())


class _Row:
    """One row of a cotangent."""

    rows: int | None = None

    def __init__(self, cotangent: CotangentOf, row: int) -> None:
        self._cotangent, self._row, self.known = cotangent, row, cotangent.known

    def __call__(
        self, piece: Piece, d: State | None = None, without_value: frozenset[str] = frozenset(), *, end: bool = True
    ) -> State:
        return {n: x[self._row] for n, x in self._cotangent(piece, d, without_value, end=end).items()}

    def handed_over(self, piece: Piece) -> State:
        return self(piece, end=False)


def _check_symmetry(piece: Piece, u: State, tangents: _Tangents) -> None:
    """Check ⟨v, H·u⟩ = ⟨u, H·v⟩ for random u and v, once for a model with its losses.

    H·u is the tangent of the gradient along u. The identity fails where an operation changes the gradient, which
    then is not the gradient of a function.
    """
    model = piece.model
    key = model.structure(), piece.only, tuple((t.name, code_of(t.loss)) for t in piece.terms)
    if not (model.seen.warns and u) or key in _SYMMETRIC:
        return
    products: list[Tensor] = []
    sizes: list[Tensor] = []
    for i in range(2):
        with undisturbed(model):
            through = tangents.along(dict(tangents.at_random(u, i)), {})[0]
        others = tangents.at_random(u, 1 - i)
        dots = [((x * v).sum(), norm([x]) * norm([v])) for n, v in others if (x := through[n]) is not None]
        products.append(torch.stack([dot for dot, _ in dots]).sum())
        sizes.append(torch.stack([size for _, size in dots]).sum())
    size = max(sizes)
    if not size.is_meta and abs(products[0] - products[1]) > torch.finfo(size.dtype).eps ** 0.5 * size:
        raise Unsuited(
            "the derivative of the gradient is not symmetric, since an operation changes the gradient (such as an "
            "autograd.Function whose backward is not the derivative of its forward)"
        )
    _SYMMETRIC.add(key)


_SYMMETRIC: set[object] = set()  # models with their losses that passed the check


class _Tangents:
    """The tangents of the gradient of a step at z, by one backward pass on dual numbers."""

    def __init__(self, piece: Piece, z: State, wanted: Sequence[Tensor], modules: Sequence[nn.Module]) -> None:
        self._piece, self._z, self._wanted, self._modules = piece, z, wanted, modules

    def at_random(self, names: Iterable[str], seed: int) -> Generator[tuple[str, Tensor]]:
        """Yield normal numbers in the shapes of these weights, one tensor at a time, reproducibly by the seed."""
        generator = torch.Generator().manual_seed(seed)
        for n in names:
            yield n, torch.randn(self._z[n].shape, generator=generator).to(self._z[n])

    def along(self, u: State, a: State) -> tuple[dict[str, Tensor | None], Sequence[Tensor | None], State]:
        """Return ∇⟨∇ℓ, u⟩ for the weights by name, and for the wanted tensors, and the losses; u is emptied.

        For running statistics b, a·∂b⁺ is added.
        """
        piece, z = self._piece, self._z
        load_forward_mode()

        def run(inside: Evaluation) -> tuple[dict[str, Tensor | None], Sequence[Tensor | None], State]:
            with forward_ad.dual_level():
                with torch.no_grad():
                    for n in list(u):  # free each tensor of u once it is copied into the dual number
                        inside.leaves[n].copy_(forward_ad.make_dual(z[n], u.pop(n)))
                piece.model.note_versions()
                return self._tangents(inside, a)

        return piece.at(z, run, graph=True, follow=bool(piece.model.seen.moving))

    def _tangents(
        self, inside: Evaluation, a: State
    ) -> tuple[dict[str, Tensor | None], Sequence[Tensor | None], State]:
        """Return the tangents of the gradients, while the model holds dual numbers."""
        piece = self._piece
        blocks = Blocks(piece, inside, self._wanted)
        # a mode that is entered later is asked first: that of dual numbers, for embeddings with a row of padding
        with inside.with_kernels(), OnDualNumbers(inside.taking) as blocks.dual, blocks.installed(self._modules):
            with unsuited("a loss"):
                weighted, values = piece.losses(inside)
            if inside.taking.stops or inside.taking.unknown:
                raise Unsuited((inside.taking.unknown or ("a loss stops a gradient",))[0])
            with torch.enable_grad():
                outputs = [sum(weighted[1:], weighted[0])]
            along = [torch.ones_like(outputs[0])]
            for n, b in inside.left().items():
                if n in inside.statistics and n in a and b.requires_grad:
                    outputs.append(b)
                    along.append(forward_ad.make_dual(torch.zeros_like(b), a[n]))
            del weighted
            named = {**inside.leaves, **inside.statistics, **inside.watched}
            tangents = blocks.tangents_of_gradient(outputs, along, [*named.values(), *self._wanted])
            del blocks, outputs, along
        through = dict(zip(named, tangents, strict=False))
        warn_if_read(piece.model, {n: through.pop(n) for n in inside.watched})
        return through, tangents[len(named) :], values
