"""What a method sees: ``f`` on matrices, evaluated once per point and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat
from implicitkit.foundation.operators import Operator
from implicitkit.linear.factors.sparse_form import confirmed, confirmed_bordered, sparse_blocks
from implicitkit.linear.price import price_of_dense, price_of_dense_like
from implicitkit.problem.linearised_samples import selection
from implicitkit.solver.evaluating import programs
from implicitkit.solver.evaluating.bounded_fits import Fits
from implicitkit.solver.evaluating.counted import Counted
from implicitkit.solver.evaluating.differentiated import curvature, none_of, plain, refuse, slope, with_graph
from implicitkit.solver.evaluating.failing_trials import Outside
from implicitkit.solver.evaluating.fit_graphs import residuals_graph, residuals_jacobian
from implicitkit.sparsity.patterns import SMALLEST
from implicitkit.system import System

_GRADIENTS = ("minimise", "least_squares")  # what is solved by those whose ``f`` is a gradient


class Evaluations(Counted):
    """``f`` for a solver of some kind, over a :class:`~implicitkit.system.System` (table in :class:`Method`).

    The last point is remembered, by identity of ``z``: whatever was computed there is not computed again.

    What is returned has no graph, unless ``z`` has one: a part that differentiates ``f``, its :meth:`value` or its
    :meth:`residuals` itself, by autograd or by a transform of ``torch.func``, or maps it over points by ``torch.vmap``, gets
    what it asks for.

    Attributes:
        active: which samples are still at work, ``(batch,)``: a line search need not care for the others. at_work: how many.
        norm: ``|F|_2`` of each sample at the point where a step begins. tolerance: what it must come down to.
        best: the point with the smallest residual so far, ``(batch, n)``. best_norm: that residual, ``(batch,)``.
        stuck: set by a step, ``(batch,)`` bool: samples that the method gives up (status ``STALLED``).
        at_rounding: set by a step, ``(batch,)`` bool: samples that it leaves where they are, since the residual there is
            all rounding errors; such a sample is stuck, and has converged.
        falling: set by a step, ``(batch,)`` bool: samples whose objective was followed along a line, and fell to its end.
        ahead: how many steps may be taken at once, unseen. taken, dear: set by a step: how many it took; cost beyond that.
        keeps: is every point linearised? graphs: is the graph of the next point kept, since a method begins, or has used
            that of the last?
        weighs: set by a method: are rows kept where to drop them costs more than to evaluate them?
        linearises: set by a method that goes on with the Jacobian at the points it tries: graphs are kept for that.
        curved, remark: set by a step: ``HessianFactors`` of where it began; what to say if samples fail.
    """

    def __init__(self, system: System, theta: Sequence[Tensor], solves: str, whole: Counted | None = None) -> None:
        super().__init__(whole)
        self.system, self.theta, self.solves = system, tuple(theta), solves
        self.problem: Any = system.problem
        self.kind, self.eps = self.problem.kind, system.eps
        self.of_map, self.of_gradient = solves == "fixed_point", solves in _GRADIENTS
        device = system.layout.device
        self.active = torch.ones(system.batch, dtype=torch.bool, device=device)
        self.norm = self.best = self.best_norm = self.tolerance = torch.zeros((), device=device)  # the driver says
        self.stuck: Tensor | None = None
        self.falling: Tensor | None = None
        self.doubted: Tensor | None = None  # samples that no method before this one has solved, ``(batch,)``
        self.ahead, self.taken, self.weighs, self.at_work, self.remark, self.dear = 1, 1, False, system.batch, "", 0
        self.at_rounding: Tensor | None = None
        graph = self.of_gradient or not self.kind.returns_state
        self._how = "program" if self.kind.returns_program else "graph" if graph else "plain"
        self.curved: Any = None
        self._point: dict[str, Any] = {}
        self.lent: dict[str, Any] = {}  # a point of others, with what they know there
        self.jacobian_there: tuple[Tensor, Tensor] | None = None  # a point, and the dense Jacobian formed there last
        self._limits: tuple[tuple[Tensor, Tensor] | None] | None = None
        self._outside = Outside()
        fit = getattr(self.problem, "is_fit", False)
        self.fits = Fits(lambda z: self.problem.flat_residuals(self.kernel, z)) if fit else None
        self.linearises, self.frugal = False, True  # have products been enough for normal equations so far?
        # the graph of a point, where residuals or conditions of optimality are linearised: a fit's at once
        self.keeps, self.graphs = solves == "least_squares", solves == "constrained"

    @property
    def batch(self) -> int:
        """Samples in a call."""
        return self.system.batch

    @property
    def size(self) -> int:
        """Unknowns of one sample."""
        return self.system.size

    def __call__(self, z: Tensor) -> Tensor:
        """``f(z)``, shape ``(batch, n)``: map, residual or gradient by the kind of solver."""
        return self._get(z, "f")

    def residual(self, z: Tensor) -> Tensor:
        """The residual of the problem, ``(batch, n)``: what convergence is judged by."""
        return self._get(z, "residual")

    def value(self, z: Tensor) -> Tensor:
        """The objective of a minimiser, ``(batch,)``."""
        return self._get(z, "value")

    def values(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Objective ``(batch,)`` and constraints ``(batch, m)`` of a program: known wherever its residual is."""
        found = self._get(w, "values")
        return found[:, 0], found[:, 1:]

    def residuals(self, z: Tensor) -> Tensor:
        """The residual vector of a least-squares method, ``(batch, m)``."""
        return self._get(z, "residuals") if self.fits is None else self.fits.at(z).residuals

    def linearize(self, z: Tensor) -> Operator:
        """The Jacobian of ``f`` at ``z`` by its products, from one evaluation: that of ``f`` if its graph is there."""
        problem, z = self.problem, plain(z)
        made = self._point.pop("made", None) if self._point.get("z") is z else None
        if made is None:
            self._count()
        equations, known = self._equations(self.uncounted), {}
        if not self.of_map:
            iteration = not self.of_gradient and self.kind.iteration
            known = {"symmetric": self.of_gradient or problem.symmetric, "fixed_point": iteration}
        patterned = not self.of_map and (not self.of_gradient or self.kind.minimisation)  # else it is another one
        sparse = self._sparse(equations, z) if patterned else None
        A = autodiff.linearise(equations, z, sparse=sparse, made=made, **known)[1]
        if not (self.of_map or self.of_gradient):
            A.near = problem.near_inverse
        A.selected_anew(selection(self.system, z, self.theta, self._of_fewer, **known))
        A.formed_dense = lambda J: setattr(self, "jacobian_there", (z, J) if J.shape[1] < SMALLEST else None)
        return A

    def _equations(self, kernel: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """``f``, as a function that is to be differentiated, of this kernel of the user's function."""
        if self.of_map:
            return kernel
        if not self.of_gradient:
            return lambda y: self.problem.flat_residual(kernel, y)
        return lambda y: autodiff.gradient(lambda x: self.problem.flat_objective(kernel, x), y)[1]

    def _of_fewer(self, system: System, theta: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
        """The equations (:meth:`_equations`) of some samples, counted as the evaluation that it takes."""
        self.count(system.batch)
        return self._equations(lambda y: system.live(y, *theta))

    def _sparse(self, function: Callable[[Tensor], Tensor], z: Tensor) -> Any:
        """How the Jacobian of the problem's residual becomes sparse; ``None`` if it is too small to be worth it."""
        return sparse_blocks(self.system.sparsity, function, z) if z.shape[1] >= self.problem.sparse_from else None

    def is_sparse(self, z: Tensor) -> bool:
        """Has the Jacobian of the residual (of a residual vector: its own) a sparsity pattern?"""
        if z.shape[1] < self.problem.sparse_from:
            return False
        if self.kind.of_residuals:
            return self.residuals_pattern(z) is not None
        if self.kind.returns_program:
            saddle = lambda y: self.problem.flat_saddle(self.uncounted, y)  # noqa: E731
            if self.system.sparsity("saddle").find(saddle, z) is None:
                return programs.has_low_rank(self, z)
        return self.system.sparsity().find_either(self._of_problem, z) is not None

    def price(self, z: Tensor, A: Operator, alike: int | None = None) -> float:
        """How many products with the Jacobian ``A`` of the problem's residual factors of it cost
        (:mod:`implicitkit.linear.price`), where so many samples have one matrix (``None``: as is known)."""
        price = A.price(alike)
        return self.price_of_dense(z, alike or 1, A) if price is None else float(price.factors)

    def price_of_dense(self, z: Tensor, alike: int = 1, A: Operator | None = None) -> float:
        """The :meth:`price` of dense factors where so many samples have one matrix; ``A``: what is known of its products."""
        weight = sum(t.numel() for t in self.theta) // max(1, self.system.batch)
        if A is not None:
            return price_of_dense_like(A, alike, weight).factors
        return price_of_dense(len(z), z.shape[1], weight, alike).factors

    def price_of_sparse(self, z: Tensor) -> float | None:
        """The :meth:`price` of sparse factors; ``None`` where there is no pattern."""
        if z.shape[1] < self.problem.sparse_from:
            return None
        price = sparse_blocks(self.system.sparsity, self._of_problem, z).price()
        return None if price is None else float(price.factors)

    def remembered(self, z: Tensor, name: str, find: Callable[[], Any]) -> Any:
        """What ``find()`` has found when it was first asked for in such a situation (:meth:`System.situation`), as long as
        the pattern of the residual's Jacobian is remembered; ``None`` where there is none."""
        if z.shape[1] < self.problem.sparse_from:
            return None
        ready = self.system.sparsity().find(self._of_problem, z)
        return None if ready is None else ready.remembered((name, self.system.situation(self.theta)), find)

    def jacobian(self, z: Tensor) -> Tensor:
        """The Jacobian of ``f`` at ``z``, shape ``(batch, n, n)``."""
        return self.linearize(z).dense()

    residuals_jacobian = residuals_jacobian

    def residuals_pattern(self, z: Tensor) -> Any:
        """The pattern of the Jacobian of :meth:`residuals`, with its colouring, or of one with a low-rank part; ``None``
        where there is none."""
        return self.system.sparsity("residuals").find_either(self._of_fit, z)

    def residuals_sparse(self, z: Tensor) -> tuple[Any, Any] | None:
        """:meth:`residuals_jacobian` as a pattern and the entries of every sample, ``(batch, nnz)``, or with a low-rank
        part (:class:`~implicitkit.sparsity.low_rank.Entries`); ``None`` where it has no sparsity pattern."""
        sparsity = self.system.sparsity("residuals")
        if z.shape[1] < SMALLEST or sparsity.find_either(self._of_fit, z) is None:
            return None
        products = self.residuals_products(z)
        found = confirmed(sparsity, self._of_fit, z, *products)
        return confirmed_bordered(sparsity, self._of_fit, z, *products) if found is None else found

    def smooth(self, w: Tensor) -> Tensor:
        """:meth:`saddle` without its derivative, ``(batch, n + m)``."""
        return self.problem.flat_saddle(self.kernel, w).detach()

    def saddle(self, w: Tensor) -> tuple[Tensor, Operator]:
        """``(dL/dz, constraints)`` of a program, ``(batch, n + m)``, and its symmetric derivative, from the graph of that
        point if it is there."""
        self.keeps = True
        return programs.linearised(self, self._point if self._point.get("z") is w else {"z": w})

    def rounded(self, w: Tensor) -> Tensor:
        """Conditions of a program that are a unit in the last place of what they add up at ``w``, ``(batch, n + m)``."""
        return programs.rounded(self, w) if self.kind.returns_program else torch.zeros_like(w, dtype=torch.bool)

    def made(self, w: Tensor) -> Any:
        """What ``autodiff.vjp`` of a program's kernel gave at ``w``, if that graph is there; that of the next is kept."""
        first = self.first(w)
        return None if first is None else first[1]

    def first(self, w: Tensor) -> Any:
        """The point with a graph, and :meth:`made`."""
        self.graphs, point = True, self._point
        return point["first"] if point.get("z") is w and "first" in point else None

    residuals_graph = residuals_graph

    def residuals_products(self, z: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """Products with :meth:`residuals_jacobian` and with its transposed (:meth:`residuals_graph`)."""
        return autodiff.products(*self.residuals_graph(z))

    def second_derivative(self, z: Tensor) -> Tensor:
        """``d^2 f/dz^2`` of scalar equations, shape ``(batch, 1)``."""
        self._count()
        return curvature(self._of_problem, plain(z))

    def select(self, rows: Tensor, samples: Tensor) -> Evaluations:
        """This function for some rows only; what is known at the last point is kept for them."""
        system, theta = self.system.select(rows, self.theta)
        small = Evaluations(system, theta, self.solves, self.whole)
        small.evaluations, small.sample_evaluations = self.evaluations, self.sample_evaluations
        small.frugal, small.weighs, small.linearises = self.frugal, self.weighs, self.linearises
        small._outside = self._outside.select(samples)
        if self._point:
            z = self._point["z"]
            for name in ("f", "residual") + (("value",) if self.of_gradient else ()):
                self._get(z, name)
            keep = ("z", "f", "residual", "value", "residuals")
            small._point = {k: v.index_select(0, samples) for k, v in self._point.items() if k in keep}
        return small

    def beside(self, solves: str, system: System | None = None, theta: Sequence[Tensor] = ()) -> Evaluations:
        """This function for a solver of some kind, of some samples if their ``system`` is given: it remembers a point of its
        own, and its evaluations count here, too."""
        other = Evaluations(system or self.system, theta if system else self.theta, solves, self)
        other._limits = None if system else self._limits
        return other

    def prime(self, z: Tensor, output: Tensor) -> None:
        """Tell the kernel's value at ``z``, known from elsewhere: counted as the evaluation it was."""
        self._count()
        if self._how == "plain":
            self._point = {"z": z, "out": output}

    def know(self, z: Tensor, residual: Tensor) -> None:
        """Tell the residual at ``z``, which another has evaluated and counted."""
        self._point = {"z": z, "residual": residual}

    def known_at(self, z: Tensor) -> dict[str, Any]:
        """What is remembered, if it is of ``z``, which is plain then."""
        return self._point if self._point.get("z") is z and self._how != "visible" else {}

    def exchange(self, point: dict[str, Any]) -> dict[str, Any]:
        """What is known at the last point, in the place of which this is remembered (of another point, or nothing)."""
        last, self._point = self._point, point
        return last

    def selected(self) -> Tensor:
        """The point remembered (after :meth:`select`, its remaining rows)."""
        return self._point["z"]

    def _count(self) -> None:
        self.count(self.system.batch)

    @property
    def inner(self) -> str:
        """What the last solve inside the function said that had no solution, at a trial point; empty if all had one."""
        return self._outside.inner

    def _of_problem(self, z: Tensor) -> Tensor:
        return self.problem.flat_residual(self.uncounted, z)

    def _of_fit(self, z: Tensor) -> Tensor:
        return self.problem.flat_residuals(self.uncounted, z)

    def uncounted(self, z: Tensor) -> Tensor:
        """:meth:`kernel` for what is no function of the user's: bounds, proximal maps."""
        return self._outside.evaluate(self.system.live, z, self.theta)

    def _get(self, z: Tensor, name: str) -> Tensor:
        point, how = self._point, self._how
        if name in point and point["z"] is z and not z.requires_grad:
            return point[name]
        if how != "visible" and isinstance(z, Tensor) and compat.tracked(z):
            point, how = {"z": z}, "visible"
        elif not point or point["z"] is not z:
            self._point = point = {"z": z}
        if name not in point:
            try:
                getattr(self, f"_compute_{how}")(point, name)
            except Exception:
                refuse(self, z)
                raise
            if name not in point:
                raise none_of(self, name)
        return point[name]

    def _compute_plain(self, point: dict[str, Any], name: str) -> None:
        """Fixed points and roots: the kernel's value is all there is."""
        z = point["z"]
        if self.linearises and "out" not in point:
            point["made"] = autodiff.recorded(self._equations(self.kernel), z)
            point["f"] = point["residual"] = point["made"][0].detach()
            return
        out = point.get("out")
        if out is None:
            self.count(self.system.batch)
            out = self._outside.evaluate(self.system.live, z, self.theta)
            out = out.detach() if compat.tracked(out) else out  # a function may switch gradients on for itself
            point["out"] = out
        if self.of_map:
            point["f"] = out
        if name == "residual" or not self.of_map:
            point["residual"] = self.problem.flat_residual(lambda _: out, z)
            if not self.of_map:
                point["f"] = point["residual"]

    def _compute_program(self, point: dict[str, Any], name: str) -> None:
        """Constrained minimisation."""
        programs.compute(self, point, name)

    def _compute_visible(self, point: dict[str, Tensor], name: str) -> None:
        """What a part differentiates, or maps over points, itself."""
        self._count()
        point |= with_graph(self, lambda y: self.system.kernel(y, *self.theta), point["z"], name)

    def limits(self, z: Tensor) -> tuple[Tensor, Tensor] | None:
        """The bounds of a program, ``(batch, size)``, ``None`` where its set is another: looked for once, since they do not
        depend on where one is; ``z``: states, ``(batch, size)`` or with multipliers behind."""
        if self._limits is None:
            found = self.problem.limits(self.uncounted, z[:, : self.problem.size])
            self._limits = (None if found is None else (found[0].detach(), found[1].detach()),)
        return self._limits[0]

    def kernel(self, z: Tensor) -> Tensor:
        """The user's function on matrices, counted."""
        self._count()
        return self.uncounted(z)

    def _compute_graph(self, point: dict[str, Tensor], name: str) -> None:
        """Minimisers: value and residual vector from one evaluation, the gradient from its graph when asked for."""
        problem, z = self.problem, point["z"]
        if "leaf" not in point:
            self._count()
            point["leaf"] = leaf = z.detach().requires_grad_()
            with torch.enable_grad():
                point["out"] = out = self.uncounted(leaf)
                if self.kind.returns_state:
                    point["equations"] = problem.flat_residual(lambda _: out, leaf)
                    point["residual"] = point["equations"].detach()
            if self.kind.returns_scalar:
                point["objective"], point["value"] = out, out.detach()
            else:
                point["vector"] = point["equations"] if self.kind.returns_state else out
                point["residuals"] = r = point["vector"].detach()
                point["value"] = 0.5 * r.square().sum(1)
        if name in ("f", "residual") and name not in point:
            of_vector = not self.kind.returns_scalar  # R'r, by the graph of r
            end = point["vector"] if of_vector else point.pop("objective")
            if end.requires_grad:
                kept = self.keeps
                cotangent = point["residuals"] if of_vector else torch.ones_like(end)
                g = slope(point, end, cotangent, kept, self.linearises and not of_vector)
            else:
                g, kept = None, False
            if g is None:
                half = lambda out: out if self.kind.returns_scalar else 0.5 * out.square().sum(1)  # noqa: E731
                autodiff.refuse_hidden(lambda y: half(self.kernel(y)), z, point["value"])
                g = torch.zeros_like(z)
            for key in ("out", "equations") if kept else ("out", "equations", "vector"):
                point.pop(key, None)
            point["f"] = g
            point.setdefault("residual", g)
