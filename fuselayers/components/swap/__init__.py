"""Fused layers inside models that exist."""

from .call import swap as swap
from .call import unswap as unswap
from .fallbacks import fallbacks as fallbacks
from .report import Site as Site
from .report import Skipped as Skipped
from .report import SwapReport as SwapReport
from .rule import Rule as Rule
from .rules import RULES as RULES
