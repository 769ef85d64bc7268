"""Names and values in error texts. Every package uses this file, so it imports nothing that imports torch."""

import difflib
import functools
import numbers
from collections.abc import Iterable, Sequence
from typing import Final

from .other_names import ours_for, plain

_LONGEST: Final = 80


def shown(value: object) -> str:
    """Return a caller's value as text for an error, cut after 80 characters.

    >>> shown("mpl"), shown(3), len(shown(10_000 * "x"))
    ("'mpl'", '3', 83)
    """
    try:
        # The repr of numpy's whole numbers names their type.
        text = str(value) if isinstance(value, numbers.Integral) else repr(value)
    except ValueError:  # Python formats no integer of more than 4,300 digits
        return f"a very long {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def name_of(function: object) -> str:
    """Return the name of a function, of a partial one too, or of a class, or of the class of another object.

    >>> name_of(len), name_of(3)
    ('len', 'int')
    """
    function = function.func if isinstance(function, functools.partial) else function
    return str(getattr(function, "__name__", type(function).__name__))


def no_such(kind: str, name: object, known: Iterable[str], *, elsewhere: Sequence[str] = ()) -> str:
    """Return an error text: `name` is no `kind`, the likely meaning, all known names.

    Args:
        kind: in words: "feedforward", "mlp option".
        name: the caller's name, of any type.
        known: the valid names, in any order.
        elsewhere: paths where the name, or this library's name for it, is valid: "attention.num_heads".

    >>> no_such("feedforward", "mpl", ["mlp", "fused_mlp"])
    "no feedforward 'mpl'; did you mean 'mlp'? there are: fused_mlp, mlp"
    >>> no_such("backend", "quantum", ["eager", "inductor"])
    "no backend 'quantum'; there are: eager, inductor"
    >>> no_such("norm option", "d_model", ["eps"], elsewhere=["model.hidden_dim"])
    "no norm option 'd_model'; did you mean 'model.hidden_dim'? there are: eps"
    """
    choices = sorted(set(known))
    meant = _meant(name, choices, elsewhere) if isinstance(name, str) and len(name) <= _LONGEST else []
    hint = f" did you mean {' or '.join(meant)}?" if meant else ""
    if not choices:
        return f"no {kind} {shown(name)};{hint} there are none"
    return f"no {kind} {shown(name)};{hint} there are: {', '.join(choices)}"


def _meant(name: str, choices: list[str], elsewhere: Sequence[str]) -> list[str]:
    """Return the likely meanings of a name, quoted: another spelling, another library's name, then a typo."""
    # Case and hyphens are the most common errors ("LayerNorm", "fused-mlp"), so compare without them.
    spelt = {plain(choice): choice for choice in choices}
    if plain(name) in spelt:
        return [repr(spelt[plain(name)])]
    for ours in ours_for(name):
        choice, space, advice = ours.partition(" ")
        if choice in choices:
            return [f"{choice!r}{space}{advice}"]
    if elsewhere:
        return [repr(path) for path in elsewhere]
    nearest = difflib.get_close_matches(plain(name), list(spelt), n=1, cutoff=0.6)
    return [repr(spelt[nearest[0]])] if nearest else []
