from fuselayers.components import registry
from fuselayers.configs import GROUPS, choices
from fuselayers.configs.tables import TABLES, option_rows
from fuselayers.other_names import _THEIRS, ours_for, plain


def test_every_name_that_a_hint_gives_is_ours() -> None:
    known = {row.option for table in TABLES for row in option_rows(table)}
    known |= {name for kind in registry.KINDS for name in registry.names(kind)}
    known |= set(GROUPS)
    known |= {name for group in GROUPS for name in choices(group)}
    assert {ours.partition(" ")[0] for ours in _THEIRS} <= known


def test_their_names_are_written_plainly_and_are_no_other_spelling_of_ours() -> None:
    for ours, theirs in _THEIRS.items():
        for name in theirs.split():
            assert name == plain(name)
            assert name != plain(ours)
        assert len(set(theirs.split())) == len(theirs.split()), ours


def test_a_name_may_have_several_meanings() -> None:
    assert ours_for("Sliding-Window") == ("window", "local")
    assert ours_for("nothing_of_the_kind") == ()
