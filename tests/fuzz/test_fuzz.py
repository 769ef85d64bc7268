"""Fixed examples of each kind, and those that once failed. `make fuzz` tries new ones."""

import itertools

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from tests.fuzz.configs import configs
from tests.fuzz.example import Counts, Example, names_of_program, statements
from tests.fuzz.functions import INPUTS as functions_inputs
from tests.fuzz.functions import OPS, functions
from tests.fuzz.layers import INPUTS as layers_inputs
from tests.fuzz.layers import LAYERS, layers
from tests.fuzz.once_failed import ONCE_FAILED


# Short ones, to save time. One as `fuse` runs it by default, in Inductor, which takes seconds.
@pytest.mark.parametrize(
    ("kind", "number", "quick"),
    [(functions(6), 19, True), (layers(4), 9, True), (configs(), 1, True), (layers(4), 1, False)],
    ids=["functions", "layers", "configs", "by_default"],
)
def test_fixed_examples(kind: SearchStrategy[Example], number: int, quick: bool) -> None:
    counts = Counts()
    limits = settings(
        max_examples=number,
        phases=(Phase.generate,),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )

    def check(example: Example) -> None:
        counts.check_quickly(example) if quick else counts.check_by_default(example)

    limits(given(example=kind)(check))()
    assert counts.verdicts["right"] > number // 2, counts.verdicts


@pytest.mark.parametrize(
    ("groups", "inputs"), [(OPS, functions_inputs), (LAYERS, layers_inputs)], ids=["ops", "layers"]
)
def test_each_template_runs(groups: tuple[tuple[str, ...], ...], inputs: tuple[str, ...]) -> None:
    made = [f"x{place} = {kind}" for place, kind in enumerate(inputs) if "{a}" not in kind]
    for template in (template for group in groups for template in group):
        for places in itertools.product(range(len(made)), repeat=3):
            values = names_of_program()
            exec("\n".join((*made, "self.f0 = nn.Linear(16, 16)")), values)
            if statements([(template, *places, True)], [line.split()[0] for line in made], values)[1]:
                break
        else:
            pytest.fail(f"{template} runs with no inputs")


@pytest.mark.parametrize("name", ONCE_FAILED)
def test_what_once_failed(name: str) -> None:
    assert ONCE_FAILED[name].judge() == ("right", "")
