"""A fuzzer for derivatives: random problems with closed forms, under random compositions of transforms.

    python -m tests.fuzz --seconds 600 --seed 0          # or: make fuzz SECONDS=600 SEED=0
    python -m tests.fuzz --case "root.power x=args w=closure do=jacfwd:w,grad:x"

A case is one line of text that says everything (:mod:`case`), so whatever goes wrong is reproduced by that line.  What is
right is known without implicitkit: the same composition of transforms, applied to the closed form of the solution, in double
precision.  A composition that torch refuses on the closed form is no case.

===========  =======================================================================================================
transforms   the grammar: any composition, up to depth three, each with a variable of its own
holders      ways in which the function of a solve comes by a tensor
rows         problems of every kind with the closed forms of their solutions (``smooth``, ``sets``, ``structures``)
messy        functions that are not functions: random, in place, stale, without a solution; wrong options
judge        right, refused, wrong, unhelpful, slow
===========  =======================================================================================================
"""
