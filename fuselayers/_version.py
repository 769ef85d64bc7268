"""The version of the package, which setup.py reads from here."""

__version__ = "0.1.0"
