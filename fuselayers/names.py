"""The error text for an unknown name. Every package uses it, so it imports nothing of ours."""

import difflib
from collections.abc import Iterable


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
        return f"no {kind} {name!r}; there are none"
    nearest = _nearest(name, choices) if isinstance(name, str) else None
    hint = f" did you mean {nearest!r}?" if nearest is not None else ""
    return f"no {kind} {name!r};{hint} there are: {', '.join(choices)}"


def _nearest(name: str, choices: list[str]) -> str | None:
    # Case and hyphens are the most common errors ("LayerNorm", "fused-mlp"), so compare without them.
    plain = {_plain(choice): choice for choice in choices}
    found = difflib.get_close_matches(_plain(name), list(plain), n=1, cutoff=0.6)
    return plain[found[0]] if found else None


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
