"""The theorems about deep equilibrium models, one a file, each run and asserted; ``deq_theory.py`` runs them all.

Every file has ``run(setting) -> results``: it prints its tables, draws its figure, raises ``AssertionError`` where a claim
does not hold, and returns the numbers.
"""
