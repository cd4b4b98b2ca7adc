r"""Is a point a solution?  The argument, question by question.

Each has a file, and its number stands in :mod:`judge` where it is asked: the cheapest first.

**While a solve runs**, of samples that claim to have converged (:meth:`judge.Judge.examine`):

1. Is the residual small?  ``|F| <= atol + rtol |z|`` of a fixed point, of others at first ``atol + rtol |F(z0)|``:
   :mod:`tolerance`.
2. Is it small beside what cancels in it, ``|F_i| <= atol + rtol S_i``?  Backward error (Rigal & Gaches 1967):
   :mod:`backward_error`.
3. Or is it nothing but rounding, ``|F_i| <= 10 |F_i(z + 2 eps w) - F_i - 2 eps J w|_i``?  :mod:`rounding_level`.
4. Do steps get on, ``|F| <= |F_before| / 2``?  Then one more is worth it: :mod:`last_step`.

**Once a solver has ended** (:meth:`judge.Judge.review`), 2 and 3 are asked once more of samples that it gave up, with 100
``rtol`` if that is no more than ``sqrt(eps)`` (:meth:`judge.Judge.last_word`): it may be unable to lower what is left.  And
of all that have converged, since ``F`` may be small where an infimum is not attained:

5. Is a zero near by the factors ``N`` of the last step, ``|N^{-1} F| << |z|``, ``F`` changing as ``N`` says?  Then nothing
   more is asked.  Kantorovich (1948): :mod:`kantorovich`.  Or did ``F`` fall more steeply in the last step than on any way
   to infinity, ``d log|F| / d log|z| > 1e5``?  :mod:`last_step`.
6. Far out, ``|z|_inf > 5`` (8 of a fixed point; less where a minimisation began nearer to the origin): is ``F`` small
   because ``z`` is large (``exp(-z)``)?  :mod:`runaway`, which asks
   a. what ``F`` is along the ray from the origin to ``z``: :mod:`along_the_ray`;
   b. whether a zero has underflowed, ``exp(-1000 z)``: :mod:`underflow`;
   c. the Newton correction ``J d = -F``, small beside ``z`` or ``|F(z + d)| <= |F| / 10``: :mod:`newton_correction`;
   d. whether that is determined, ``|J^{-1}| |J| |z| eps`` (Higham 2002, eq. 7.12), or ``J`` singular: :mod:`condition`;
   e. of a fit, Gauss and Newton's, ``min |J d + r|``: :mod:`stationary_fit`;
   f. whether many unknowns go together, their differences at rest: :mod:`runaway_together`;
   g. whether minima go on along a curve, back to near the origin: :mod:`curve_of_minima`.
7. Near the origin, and ``|F|`` below ``atol``: is it the beginning of a zero at infinity (``erfc``), or of none at all
   (``1e-7 (z^3 - 8)`` at 0)?  :mod:`runaway_near_origin`.

**Of a minimisation**, whose residual is a gradient (:mod:`implicitkit.solver.finding` asks these):

8. Is the Hessian positive semidefinite?  Lanczos: :mod:`curvature`.  An inflection, third order: :mod:`inflection`.  A kink,
   ``0`` in the hull of gradients nearby (Clarke): :mod:`kinks`.
9. Is there a minimum at all, or does the objective fall for ever?  :mod:`unbounded`.
10. Is it lower than where the search began?  :mod:`higher_than_start`.

**Is there anything to converge to**, where a function draws random numbers, or a map is ``z + 1``?  :mod:`no_solution`.

Everything is answered by ``F`` beside ``z`` (:mod:`differences`), and no look at a point is taken twice
(:mod:`runaway_record`).  ``docs/decisions/converged.md`` says why each question is there, and what none of them sees.
"""
