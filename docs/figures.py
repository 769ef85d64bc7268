"""Writes the measured tables of the pages from the data in plots, so that no figure is typed by hand.

python -m docs.figures    # after a measurement; a test fails while a page differs from its data

A table stands between `<!-- figures of NAME -->` and `<!-- end of figures -->`. It is in the file, so GitHub shows it.
"""

import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["main", "pages", "written"]

ROOT: Final = Path(__file__).parents[1]
DATA: Final = ROOT / "plots" / "cpu"
# The machine of the tables that show one machine; the data of the others are in the folders beside it.
SHOWN: Final = "amd_epyc_avx512"
MACHINES: Final = {
    SHOWN: "EPYC, AVX-512",
    "amd_epyc_avx2": "EPYC, AVX2",
    "intel_xeon_avx512": "Xeon, AVX-512",
    "intel_xeon_avx2": "Xeon, AVX2",
}
_PLACE: Final = re.compile(
    r"^<!-- figures of (?P<name>\w+) -->\n.*?^<!-- end of figures -->$", re.MULTILINE | re.DOTALL
)
_SPANS: Final = ("forward", "forward_backward")
_WAYS: Final = ("plain PyTorch", "eager layers", "fused")


def pages() -> list[Path]:
    """The files that may hold tables of figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def written(markdown: str) -> str:
    """Return a page with its tables made anew from the data."""

    def table(place: re.Match[str]) -> str:
        name = place["name"]
        return f"<!-- figures of {name} -->\n" + "\n".join(_TABLES[name]()) + "\n<!-- end of figures -->"

    return _PLACE.sub(table, markdown)


def main() -> None:
    """Write the tables of all pages."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))


def _read(file: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DATA / file).read_text(encoding="utf-8"))
    return content


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    # The first column is text, the others are numbers.
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _said(content: dict[str, Any]) -> list[str]:
    """The lines below a table: the machine, and the date if the file has one."""
    return ["", ", ".join(filter(None, (content["machine"], content.get("date")))) + "."]


def _median(row: dict[str, Any], span: str) -> float:
    return statistics.median(row["seconds"][span])


def _models(dropout: str) -> list[str]:
    """Speed and saved bytes of whole models: this library's, and the plain one through torch.compile."""
    content = _read(f"{SHOWN}/suite/results.json")
    candidates = {(row["title"], row["candidate"]): row for row in content["models"]}
    rows = []
    for title, candidate in candidates:
        if candidate == "plain" and title.endswith(f"dropout {dropout}"):
            plain, compiled, ours = (candidates[title, name] for name in ("plain", "torch.compile", "inductor"))
            span = "forward_backward"
            speeds = [f"{_median(plain, span) / _median(row, span):.2f}" for row in (compiled, ours)]
            rows.append(
                [title.partition(",")[0], *speeds, *(f"{row['kept'] / 1e6:.1f}" for row in (plain, compiled, ours))]
            )
    headings = ["", "speed: `torch.compile`", "here", "saved MB: plain", "`torch.compile`", "here"]
    return _table(headings, rows) + _said(content)


def _steps() -> list[str]:
    """Milliseconds of a training step on each machine."""
    rows = []
    for folder, name in MACHINES.items():
        content = _read(f"{folder}/train_step.json")
        plain, eager, fused = (sum(content[way]["phases"].values()) for way in _WAYS)
        rows.append([name, f"{plain:.1f}", f"{eager:.1f}", f"{fused:.1f}", f"{plain / fused:.2f} x"])
    return _table(["ms", "plain", "eager layers", "fused", "plain / fused"], rows)


def _parts_of_a_step() -> list[str]:
    content = _read(f"{SHOWN}/train_step.json")
    rows = [
        [part, *(f"{content[way][kind][part]:.1f}" for way in _WAYS)]
        for kind in ("phases", "ops")
        for part in content[_WAYS[0]][kind]
    ]
    return _table(["ms", "plain", "eager layers", "fused"], rows) + _said(content)


def _layers() -> list[str]:
    """What one layer saves, float32, in units of batch x tokens x hidden x itemsize."""
    content = _read("intel_xeon_avx512/partition.json")
    rows = [
        [
            row["layer"],
            *(f"{row[name]:.1f}" for name in ("eager", "torch.compile", "fuse")),
            f"{row['step / torch.compile']:.2f}",
        ]
        for row in content["sections"]["saved"]
        if row["dtype"] == "float32"
    ]
    return _table(["one layer of", "eager", "`torch.compile`", "`fuse`", "time"], rows) + _said(content)


def _ops() -> list[str]:
    """Speed of each op in one shape, forward / forward + backward."""
    content = _read(f"{SHOWN}/suite/results.json")
    rows = _rows_of_ops(content, [8, 256, 1024], "float32")
    titles = [title for title, candidate in rows if candidate == "plain"]
    lines = [
        [f"`{title}`", *(_speeds(rows, title, name) for name in ("fuselayers", "torch.compile"))] for title in titles
    ]
    return _table(["", "here", "`torch.compile`"], lines) + _said(content)


def _rows_of_ops(content: dict[str, Any], shape: list[int], dtype: str) -> dict[tuple[str, str], Any]:
    """The measurements of ops in one shape and dtype, by title and candidate."""
    return {
        (row["title"], row["candidate"]): row
        for row in content["rows"]
        if row["shape"] == shape and row["dtype"] == dtype
    }


def _speeds(rows: dict[tuple[str, str], Any], title: str, candidate: str) -> str:
    """Times as fast as plain PyTorch, forward / forward + backward."""
    if (title, candidate) not in rows:
        return "-"
    plain, other = rows[title, "plain"], rows[title, candidate]
    return " / ".join(f"{_median(plain, span) / _median(other, span):.2f}" for span in _SPANS)


def _gpu_steps() -> list[str]:
    """A step of a GPT on a GPU: the wall clock, with a CUDA graph of the step, and the GPU's own time."""
    content = _read("../gpu/h100/steps.json")
    rows = []
    for size, forms in content["sizes"].items():
        rows.append([f"**{size}**", *[""] * 5])
        for form, row in forms.items():
            graph = f"{row['graph']:.2f}" if "graph" in row else "-"
            numbers = f"{row['gpu']:.2f}", str(row["launches"]), f"{row['held'] / 1e6:,.0f}"
            rows.append([form, f"{row['wall']:.1f}", graph, *numbers])
    return _table(["ms", "wall", "in a CUDA graph", "the GPU's own", "launches", "saved MB"], rows) + _said(content)


def _gpu_ops() -> list[str]:
    """Speed of ops on a GPU, forward / forward + backward, and the share of a copy's rate."""
    content = _read("../gpu/h100/suite/results.json")
    rows = _rows_of_ops(content, [2, 4096, 4096], "bfloat16")
    lines = []
    for (title, candidate), row in rows.items():
        if candidate != "fuselayers":
            continue
        shares = (row["floor"][span] / _median(row, span) / content["bandwidth"] for span in _SPANS if row["floor"])
        speeds = (_speeds(rows, title, name) for name in (candidate, "torch.compile"))
        lines.append([f"`{title}`", *speeds, " / ".join(f"{100 * share:.0f} %" for share in shares) or "-"])
    return _table(["", "here", "`torch.compile`", "of a copy's rate"], lines) + _said(content)


def _fine_tune_gpt2() -> list[str]:
    content = _read("amd_epyc_avx2/fine_tune_gpt2.json")
    rows = []
    for dropout, sizes in content["saved_bytes"].items():
        shares = (f"{sizes[level] / 1e3:,.0f} ({sizes[level] / sizes['plain']:.2f})" for level in ("layers", "blocks"))
        rows.append([dropout, f"{sizes['plain'] / 1e3:,.0f}", *shares])
    losses = content["losses"]
    differences = (
        max(abs(ours / plain - 1) for ours, plain in zip(losses[level], losses["plain"], strict=True))
        for level in ("layers", "blocks")
    )
    rows.append(["largest difference of a loss", "", *(f"{100 * difference:.2f} %" for difference in differences)])
    return _table(["saved kB", "plain", "`layers`", "`blocks`"], rows) + _said(content)


def _swap() -> list[str]:
    """Sites, saved bytes and time of each family at both levels, what the default takes, and torch.compile's time."""
    content = _read(f"{SHOWN}/swap.json")
    rows = []
    for name, family in content["families"].items():
        levels = [family["levels"][level] for level in ("layers", "blocks")]
        numbers = [
            *(str(sum(row["sites"].values())) for row in levels),
            *(f"{row['saved']:.2f}" for row in levels),
            *(f"{row['time']:.2f}" for row in levels),
        ]
        default = family["levels"]["default"]
        error = max(row["error"] for row in (*levels, default))
        rows.append([name, *numbers, f"{family['compiled']:.2f}", f"`{default['level']}`", f"{error:.0e}"])
    both = [f"{what}: {level}" for what in ("sites", "saved", "time") for level in ("`layers`", "`blocks`")]
    return _table(["", *both, "`torch.compile`", "default", "error"], rows) + _said(content)


def _swap_classes() -> list[str]:
    """What `swap` does to every class of transformers, and the names of those that gain nothing at level layers."""
    content, groups = _classes_by_outcome("swap_classes")
    _, at_level_blocks = _classes_by_outcome("swap_classes_blocks")
    rows = []
    for text, classes in groups.items():
        kept, seconds = ([row[key] for row in classes.values() if key in row] for key in ("kept", "seconds"))
        cells = (
            f"{statistics.median(some):.2f}, {worst(some):.2f}" if some else ""
            for some, worst in ((kept, min), (seconds, max))
        )
        rows.append([text, str(len(classes)), *cells, str(len(at_level_blocks[text]))])
    headings = ["", "classes", "bytes kept: median, least", "seconds of `swap`: median, most"]
    named = []
    for outcome in ("saves nothing", "nothing"):
        text = _OUTCOMES[outcome]
        named += ["", f"{text[0].upper()}{text[1:]}: {', '.join(groups[text])}."]
    return [*_table([*headings, "at level `blocks`, of every fourth class"], rows), *_said(content), *named]


def _classes_by_outcome(name: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    content, *outcomes = map(json.loads, (DATA / SHOWN / f"{name}.jsonl").read_text(encoding="utf-8").splitlines())
    groups: dict[str, dict[str, Any]] = {text: {} for text in _OUTCOMES.values()}
    for row in outcomes:
        saves_nothing = row["outcome"] == "right" and row.get("kept", 0.0) >= 0.995
        groups[_OUTCOMES["saves nothing" if saves_nothing else row["outcome"]]][row["name"]] = row
    return content, groups


_OUTCOMES: Final = {
    "right": "loss and all gradients right, fewer bytes",
    "saves nothing": "right, as many bytes",
    "nothing": "no module that a rule reads",
    "wrong": "wrong",
    **dict.fromkeys(("raised", "late", "died"), "raises, takes more than 150 s, or ends the process"),
    "not run": "not made small by the script, or not run by plain `transformers`",
}


def _published_plans() -> list[str]:
    """Published trainings and what the plan predicts, of throughput or of memory."""
    rows = []
    for run in _plans()["runs"]:
        predicted = run["predicted"]["tokens_per_second"]
        published = run["tokens_per_second"]
        rows.append([run["title"], f"{published:,}", f"{predicted:,.0f}", f"{predicted / published:.2f}"])
    return _table(["run", "published", "predicted", "ratio"], rows)


def _published_memory() -> list[str]:
    rows = [
        [run["title"], f"{run['gibibytes']:.1f}", f"{run['predicted']['gibibytes']:.1f}"]
        for run in _plans()["runs"]
        if run["gibibytes"]
    ]
    return _table(["GiB of a GPU", "published", "predicted"], rows)


def _plan() -> list[str]:
    return ["```text", "$ fuselayers plan model=llama3_8b gpus=8", *_plans()["example"].splitlines(), "```"]


def _plans() -> dict[str, Any]:
    return _read("../plan/published.json")


def _which() -> list[str]:
    """What to call for each machine and model, by what is short. Gains are relative to plain PyTorch."""
    rows = []
    for folder, machine in MACHINES.items():
        steps = _read(f"{folder}/train_step.json")
        for dropout, measured in {"0.1": steps, "0": steps.get("without dropout")}.items():
            speeds, shares = _ranges(_read(f"{folder}/suite/results.json"), dropout)
            first = "plain PyTorch"
            if measured:
                plain, eager = (sum(measured[way]["phases"].values()) for way in _WAYS[:2])
                first = f'`build(name, ["fusion=off"])` {plain / eager:.2f} x'
            rows.append([f"{machine}, dropout {dropout}", f"`fuse(model)` {speeds}", f"`fuse(model)` {shares}", first])
    for size, forms in _read("../gpu/h100/steps.json")["sizes"].items():
        plain, eager, int8 = (forms[form] for form in ("plain PyTorch", "eager layers", "fused by block, int8"))
        wall = plain["wall"]
        graph = f"`make_graphed_callables` {wall / eager['graph']:.1f} x (plain {wall / plain['graph']:.1f} x)"
        held = f'`build(name, ["fusion.compress=int8"])` {int8["held"] / plain["held"]:.2f}'
        slower = f"plain PyTorch (eager layers {wall / eager['wall']:.2f} x)"
        rows.append([f"H100, {size}", graph, held, slower])
    runs = _plans()["runs"]
    times = [run["predicted"]["tokens_per_second"] / run["tokens_per_second"] for run in runs]
    sizes = [run["predicted"]["gibibytes"] / run["gibibytes"] for run in runs if run["gibibytes"]]
    planned = (f"`fuselayers plan` {_range(ratios)} of published runs" for ratios in (times, sizes))
    rows.append(["many GPUs", *planned, "`fusion.scope=block`"])
    headings = ["", "speed of a step", "saved bytes", "no wait at the first step"]
    return [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * 4, *rows)]


def _ranges(content: dict[str, Any], dropout: str) -> tuple[str, str]:
    """Speed and saved bytes of `fuse(model)` for all models, with those of torch.compile, relative to plain PyTorch."""
    models = {(row["title"], row["candidate"]): row for row in content["models"]}
    titles = [title for title, name in models if name == "plain" and title.endswith(f"dropout {dropout}")]

    def said(ratio: Callable[[Any, Any], float], unit: str) -> str:
        ours, compiled = (
            _range([ratio(models[title, "plain"], models[title, name]) for title in titles])
            for name in ("plain, inductor", "torch.compile")
        )
        return f"{ours}{unit} (`torch.compile` {compiled}{unit})"

    span = "forward_backward"
    return (
        said(lambda plain, row: _median(plain, span) / _median(row, span), " x"),
        said(lambda plain, row: row["kept"] / plain["kept"], ""),
    )


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


_TABLES: Final[dict[str, Callable[[], list[str]]]] = {
    "models_with_dropout": lambda: _models("0.1"),
    "models_without_dropout": lambda: _models("0"),
    "steps": _steps,
    "parts_of_a_step": _parts_of_a_step,
    "layers": _layers,
    "ops": _ops,
    "gpu_steps": _gpu_steps,
    "gpu_ops": _gpu_ops,
    "fine_tune_gpt2": _fine_tune_gpt2,
    "swap": _swap,
    "which": _which,
    "swap_classes": _swap_classes,
    "plan": _plan,
    "published_plans": _published_plans,
    "published_memory": _published_memory,
}

if __name__ == "__main__":
    main()
