"""The word-level language experiment: the language, the models, their training; ``examples/deq_language.py`` runs it."""
