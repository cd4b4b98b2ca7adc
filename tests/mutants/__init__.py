"""Mutation testing: single wrong changes of the mathematics, each with the tests that must notice it.

    python -m tests.mutants                          # all;  or: make mutants
    python -m tests.mutants --only linear --sample 20 --seed 1

``table.py`` and its parts name a file, the text to change, what it becomes, and a selection of tests.  The runner makes each
change in a copy of the sources, never in the tree itself, and runs only those tests.  A mutant that lives is a missing test;
a text that is not found exactly once is stale, and the row must follow the code.
"""
