"""A model that is tuned in a second."""

from tests.cli.conftest import TINY_MODEL

TINY = [*TINY_MODEL, "feedforward=mlp", "model.dropout=0"]
