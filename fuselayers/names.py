"""Names and values in error texts. Every package uses it, so it imports nothing of ours."""

import difflib
import numbers
from collections.abc import Iterable
from typing import Final

_LONGEST: Final = 80


def shown(value: object) -> str:
    """Return a caller's value as an error text quotes it, cut after 80 characters.

    >>> shown("mpl"), shown(3), len(shown(10_000 * "x"))
    ("'mpl'", '3', 83)
    """
    try:
        # The repr of numpy's whole numbers names their type.
        text = str(value) if isinstance(value, numbers.Integral) else repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return f"a very long {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def no_such(kind: str, name: object, known: Iterable[str]) -> str:
    """Return the text: `name` is no `kind`, the nearest known name, all known names.

    Args:
        kind: in words: "feedforward", "mlp option".
        name: from the caller, of any type.
        known: the valid names, in any order.

    >>> no_such("feedforward", "mpl", ["mlp", "fused_mlp"])
    "no feedforward 'mpl'; did you mean 'mlp'? there are: fused_mlp, mlp"
    >>> no_such("backend", "quantum", ["eager", "inductor"])
    "no backend 'quantum'; there are: eager, inductor"
    """
    choices = sorted(set(known))
    if not choices:
        return f"no {kind} {shown(name)}; there are none"
    nearest = _nearest(name, choices) if isinstance(name, str) and len(name) <= _LONGEST else None
    hint = f" did you mean {nearest!r}?" if nearest is not None else ""
    return f"no {kind} {shown(name)};{hint} there are: {', '.join(choices)}"


def _nearest(name: str, choices: list[str]) -> str | None:
    # Case and hyphens are the most common errors ("LayerNorm", "fused-mlp"), so compare without them.
    plain = {_plain(choice): choice for choice in choices}
    found = difflib.get_close_matches(_plain(name), list(plain), n=1, cutoff=0.6)
    return plain[found[0]] if found else None


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
