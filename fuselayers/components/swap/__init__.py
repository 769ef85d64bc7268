"""Fused layers inside models that exist."""

from .report import Site as Site
from .report import SwapReport as SwapReport
from .rules import Rule as Rule
from .shipped import RULES as RULES
from .swap import swap as swap
from .swap import unswap as unswap
