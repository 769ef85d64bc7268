"""The text for a name that nobody owns. Every floor uses it, so it imports nothing of ours."""

import difflib
from collections.abc import Iterable

__all__ = ["no_such"]


def no_such(kind: str, name: object, known: Iterable[str]) -> str:
    """Says that `name` is no `kind`, which known name is nearest, and which names there are.

    Args:
        kind: what was looked for, in words: "feedforward", "mlp option".
        name: what the caller wrote; anything that is not a string is printed as it came.
        known: the names that would have been right, in any order.

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
    # Note: [spelling variants] case, hyphens and joined words are the commonest slips ("LayerNorm", "fused-mlp") and
    # difflib counts each as a wrong letter, so both sides are compared without them.
    plain = {_plain(choice): choice for choice in choices}
    found = difflib.get_close_matches(_plain(name), list(plain), n=1, cutoff=0.6)
    return plain[found[0]] if found else None


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
