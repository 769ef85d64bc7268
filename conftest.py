"""Imports the package before pytest does.

Given one file of it, `--doctest-modules` would else run that file twice, as itself and as a part of its package, and
the second one finds its names in the registry taken.
"""

import fuselayers as fuselayers
