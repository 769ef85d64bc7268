"""The version: setup.py reads it from here, and nothing else states it."""

__version__ = "0.1.0"
