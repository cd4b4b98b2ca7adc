"""What was published, to stand beside what is measured here: Bai, Kolter & Koltun (2019), tables 2 and 3."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["TABLES", "Row"]


class Row(NamedTuple):
    """Millions of parameters, and without embeddings; test perplexity; GB in training; which model here is of its kind."""

    name: str
    parameters: float
    inside: float | None
    perplexity: float
    memory: float | None
    here: str = ""


TABLES = {
    "Penn Treebank, words (table 2)": (
        Row("Variational LSTM", 66, None, 73.4, None, "LSTM"),
        Row("NAS cell", 54, None, 62.4, None),
        Row("NAS, black-box tuner", 24, 20, 59.7, None),
        Row("AWD-LSTM", 24, 20, 58.8, None, "LSTM"),
        Row("DARTS, second order", 23, 20, 55.7, None),
        Row("TrellisNet, 60 layers", 24, 20, 57.0, 8.5, "TrellisNet, {} tied layers"),
        Row("DEQ-TrellisNet", 24, 20, 57.1, 1.2, "DEQ-TrellisNet"),
    ),
    "WikiText-103 (table 3)": (
        Row("Generic TCN", 150, 34, 45.2, None),
        Row("Gated linear ConvNet", 230, None, 37.2, None),
        Row("AWD-QRNN", 159, 51, 33.0, 7.1),
        Row("Relational memory core", 195, 60, 31.6, None),
        Row("Transformer-XL, X-large", 257, 224, 18.7, 12.0),
        Row("TrellisNet, 70 layers", 180, 45, 29.2, 24.7, "TrellisNet, {} tied layers"),
        Row("TrellisNet, 70 layers, checkpointed", 180, 45, 29.2, 5.2),
        Row("DEQ-TrellisNet", 180, 45, 29.0, 3.3, "DEQ-TrellisNet"),
        Row("Transformer-XL medium, 16 layers", 165, 44, 24.3, 8.5, "Transformer, {} untied layers"),
        Row("DEQ-Transformer, medium", 172, 43, 24.2, 2.7, "DEQ-Transformer"),
        Row("Transformer-XL medium, 18 layers, adaptive", 110, 72, 23.6, 9.0, "Transformer, {} untied layers"),
        Row("DEQ-Transformer, medium, adaptive", 110, 70, 23.2, 3.7, "DEQ-Transformer"),
        Row("Transformer-XL small, 4 layers", 139, 4.9, 35.8, 4.8, "Transformer, untied, narrow"),
        Row("Transformer-XL small, 16 tied layers", 138, 4.5, 34.9, 6.8, "Transformer, {} tied layers"),
        Row("DEQ-Transformer, small", 138, 4.5, 32.4, 1.1, "DEQ-Transformer"),
    ),
}
