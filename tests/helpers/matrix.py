"""Every strategy against one process, as data: the rows and columns of the table in docs/strategies.md, and how a cell is measured.

    python -m tests.helpers.matrix --write      # measure every cell and rewrite the table

All rows of as many ranks are measured in one start of these ranks.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import re
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from callbacks import EMAWeightAveraging, ModelCheckpoint
from tests.helpers.layers import Curve, Cut, Layers
from tests.helpers.modules import loader, quiet, weights
from tests.helpers.ranks import run_ranks
from trainer import DDPStrategy, FSDPStrategy, MisconfigurationException, ModelParallelDDPStrategy, ModelParallelStrategy

__all__ = ["COLUMNS", "ROWS", "Cell", "Row", "measure_all", "page_table", "table_of"]

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
BEGIN, END = "<!-- matrix: written by python -m tests.helpers.matrix --write -->", "<!-- end of matrix -->"
BATCH, SAVED_AT, STEPS = 4, 4, 8  # samples of a joined batch; the step of the checkpoint, inside the first epoch; steps of a fit
EXACT, MIXED = 1e-6, 0.01  # the rounding of bf16 moves the weights of 6 steps by 0.002, the steps by 0.4
Plain = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """A strategy: how many devices, how many processes they are, and which columns it refuses, with the words of its error."""

    title: str
    make: Callable[[], Any]
    devices: int = 1
    ranks: int = 1
    module: Callable[..., Layers] = Layers
    refuses: dict[str, str] = field(default_factory=dict)
    shares: int | None = None  # of the data, where that is not the number of ranks

    @property
    def slug(self) -> str:
        return re.sub(r"\W+", "-", self.title)

    def fit(self, resume_from: Path | None = None, dtype: torch.dtype = torch.float64, callbacks: Any = (), **settings: Any) -> Any:
        """Fit a new module; return (module, trainer, curve)."""
        module, curve = self.module(dtype), Curve()
        settings = {"max_steps": STEPS, "log_every_n_steps": 1, "seed": 5, **settings}
        trainer = quiet(accelerator="cpu", devices=self.devices, strategy=self.make(), callbacks=[curve, *callbacks], **settings)
        each = BATCH // (self.shares or self.ranks)
        train = loader(module.rows(23, dtype), each, shuffle=True)  # the last joined batch is a short one
        trainer.fit(module, train, loader(module.rows(5, dtype), 2), ckpt_path=resume_from)  # 3 batches: uneven shards
        assert trainer.global_step == settings["max_steps"]
        return module, trainer, curve


# -- columns: what a row's ranks compute, to be compared with what one process computes -------------------------------------------


def loss_curve(row: Row, plain: Plain, folder: Path) -> Any:
    return plain()[2].loss


def final_weights(row: Row, plain: Plain, folder: Path) -> Any:
    return weights(plain()[0])


def accumulation(row: Row, plain: Plain, folder: Path) -> Any:
    module, _, curve = row.fit(accumulate_grad_batches=4, max_steps=6)  # windows of 4 and 2 batches, the last batch short
    return weights(module), curve.loss


def clipping(row: Row, plain: Plain, folder: Path) -> Any:
    return weights(row.fit(gradient_clip_val=0.2)[0])


def bf16_mixed(row: Row, plain: Plain, folder: Path) -> Any:
    module, _, curve = row.fit(precision="bf16-mixed", dtype=torch.float32, max_steps=6)
    return weights(module), curve.loss


def ema(row: Row, plain: Plain, folder: Path) -> Any:
    module, _, curve = row.fit(callbacks=[EMAWeightAveraging(decay=0.8)])
    return weights(module), curve.val


def validation(row: Row, plain: Plain, folder: Path) -> Any:
    module, trainer, curve = plain()
    return curve.val, trainer.validate(module, loader(module.rows(5, torch.float64), 2), verbose=False)


def predict_order(row: Row, plain: Plain, folder: Path) -> Any:
    module, trainer, _ = plain()
    return trainer.predict(module, loader(module.rows(7, torch.float64), 2))


def resume(row: Row, plain: Plain, folder: Path) -> Any:
    """Stop inside an epoch and go on; the whole fit is the expectation, and this row's own is met to the bit."""
    save = ModelCheckpoint(folder, row.slug, every_n_train_steps=SAVED_AT, enable_version_counter=False)
    row.fit(callbacks=[save], max_steps=SAVED_AT)
    found, whole = weights(row.fit(folder / f"{row.slug}.ckpt")[0]), weights(plain()[0])
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items()), "the resumed fit is not equal to the bit"
    return found


COLUMNS: dict[str, Callable[[Row, Plain, Path], Any]] = {
    "loss curve": loss_curve,
    "final weights": final_weights,
    "accumulation": accumulation,
    "clipping": clipping,
    "bf16-mixed": bf16_mixed,
    "EMA": ema,
    "validation mean": validation,
    "predict order": predict_order,
    "resume": resume,
}
ACROSS = "resume elsewhere"


# -- rows -----------------------------------------------------------------------------------------------------------------------

SINGLE = Row("single_device", lambda: "single_device")
ROWS = [
    SINGLE,
    Row("dp", lambda: "dp", devices=2),
    Row("ddp", lambda: "ddp", devices=2, ranks=2),
    Row(
        "ddp, static graph",
        lambda: DDPStrategy(static_graph=True, gradient_as_bucket_view=True),
        devices=2,
        ranks=2,
        refuses={"accumulation": "accumulate_grad_batches=4 with static_graph=True"},
    ),
    Row("fsdp", lambda: "fsdp", devices=2, ranks=2),
    Row("fsdp, hybrid (2 x 2)", lambda: FSDPStrategy(shard_size=2), devices=4, ranks=4),
    Row("model_parallel", lambda: ModelParallelDDPStrategy(stack="layers", micro_batches=2), devices=2),
    Row("model_parallel_ddp (2 x 2)", lambda: ModelParallelDDPStrategy(2, "layers", micro_batches=2), devices=4, ranks=2),
    Row("mesh, 2 tensor", lambda: ModelParallelStrategy(1, 2), devices=2, ranks=2, shares=1, module=Cut),
    Row("mesh, 2 data x 2 tensor", lambda: ModelParallelStrategy(2, 2), devices=4, ranks=4, shares=2, module=Cut),
    Row("mesh, 2 pipeline", lambda: ModelParallelStrategy(1, 1, 2, "layers"), devices=2, ranks=2, shares=1),
    Row("mesh, 2 data x 2 pipeline", lambda: ModelParallelStrategy(2, 1, 2, "layers"), devices=4, ranks=4, shares=2),
]
SOURCES = ("single_device", "ddp", "fsdp", "model_parallel_ddp (2 x 2)")  # whose files every row resumes from


# -- measuring ----------------------------------------------------------------------------------------------------------------


@dataclass
class Cell:
    """What was found: a deviation from one process, or the error that came in the place of numbers."""

    deviation: float | None = None
    error: str | None = None
    tolerance: float = EXACT
    expected_error: str | None = None

    @property
    def good(self) -> bool:
        if self.expected_error is not None:
            return self.error is not None and re.search(self.expected_error, self.error) is not None
        return self.error is None and self.deviation is not None and self.deviation <= self.tolerance

    @property
    def mark(self) -> str:
        if not self.good:
            return "✗"
        return "refused" if self.expected_error is not None else "=" if self.tolerance == EXACT else "≈"


def in_rank(row: Row, folder: Path) -> dict[str, Any]:
    """What a rank measures of a row by itself: column -> numbers, or the text of the error."""
    warnings.filterwarnings("ignore")
    plain = functools.cache(row.fit)  # one fit serves several columns
    return {name: attempt(functools.partial(column, row, plain, folder)) for name, column in COLUMNS.items()}


def across(row: Row, folder: Path) -> dict[str, Any]:
    """The weights after resuming from each of the other rows' files, or the text of the first error."""

    def resumed() -> Any:
        return {name: weights(row.fit(folder / f"{slug(name)}.ckpt")[0]) for name in sources_of(row.ranks) if name != row.title}

    return {ACROSS: attempt(resumed)}


def rows_in_rank(rows: Sequence[Row], folder: Path) -> dict[str, dict[str, Any]]:
    """All that a rank measures of rows of as many ranks: row -> column -> numbers, or the text of the error."""
    found = {row.title: in_rank(row, folder) for row in rows}  # which leaves the files that the rows resume from
    return {row.title: found[row.title] | across(row, folder) for row in rows}


def slug(title: str) -> str:
    return next(row.slug for row in ROWS if row.title == title)


def attempt(measure: Callable[[], Any]) -> Any:
    """Numbers, or the text of the error: one that the package raised on its own account, or of a comparison."""
    try:
        return measure()
    except (MisconfigurationException, AssertionError) as error:
        return str(error) or type(error).__name__


def sources_of(ranks: int) -> list[str]:
    """The rows whose files are resumed from by rows of so many ranks: by those of one process all."""
    return [row.title for row in ROWS] if ranks == 1 else list(SOURCES)


def measure_all(folder: Path) -> dict[str, dict[str, Cell]]:
    """Measure every cell; return row -> column -> Cell. `folder` takes the checkpoints."""
    rows = {ranks: [row for row in ROWS if row.ranks == ranks] for ranks in sorted({row.ranks for row in ROWS})}
    alone = {row.title: in_rank(row, folder) for row in rows[1]}
    numbers: dict[str, list[dict[str, Any]]] = {}
    for ranks in list(rows)[1:]:
        by_rank = run_ranks(rows_in_rank, ranks, timeout=600, rows=rows[ranks], folder=folder)
        numbers |= {row.title: [found[row.title] for found in by_rank] for row in rows[ranks]}
    numbers |= {row.title: [alone[row.title] | across(row, folder)] for row in rows[1]}  # from the files of all rows
    expected = numbers[SINGLE.title][0]
    return {row.title: {name: _cell(row, name, numbers[row.title], expected) for name in [*COLUMNS, ACROSS]} for row in ROWS}


def _cell(row: Row, name: str, by_rank: list[dict[str, Any]], expected: dict[str, Any]) -> Cell:
    if name == ACROSS:
        right: Any = {source: expected["final weights"] for source in sources_of(row.ranks) if source != row.title}
    else:
        right = expected[name]
    return compare([rank[name] for rank in by_rank], right, MIXED if name == "bf16-mixed" else EXACT, row.refuses.get(name))


def compare(by_rank: list[Any], expected: Any, tolerance: float, refused: str | None) -> Cell:
    """Compare what each rank found with what was expected."""
    errors = [found for found in by_rank if isinstance(found, str)]
    if errors:
        return Cell(error=errors[0], tolerance=tolerance, expected_error=refused)
    return Cell(max(deviation(found, expected) for found in by_rank), None, tolerance, refused)


def deviation(found: Any, expected: Any) -> float:
    """The largest difference between the numbers of two structures; infinite where their shapes or keys differ."""
    if isinstance(expected, (dict, list, tuple)):
        if type(found) is not type(expected) or _keys(found) != _keys(expected):
            return float("inf")
        return max((deviation(found[key], expected[key]) for key in _keys(expected)), default=0.0)
    found, expected = torch.as_tensor(found), torch.as_tensor(expected)
    if found.shape != expected.shape or found.dtype != expected.dtype or not torch.isfinite(found).all():
        return float("inf")
    return float((found - expected).abs().max())


def _keys(value: Any) -> list[Any]:
    return list(value) if isinstance(value, dict) else list(range(len(value)))


# -- the page -------------------------------------------------------------------------------------------------------------------


def table_of(cells: dict[str, dict[str, Cell]]) -> list[list[str]]:
    """The table as rows of texts, headings first."""
    columns = [*COLUMNS, ACROSS]
    return [["strategy", *columns], *([title, *(cells[title][name].mark for name in columns)] for title in cells)]


def page_table() -> list[list[str]]:
    """The table that stands in docs/strategies.md."""
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in text.strip().splitlines() if not line.startswith("|---")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def write(cells: dict[str, dict[str, Cell]]) -> None:
    """Put the table into the page, between its two marks."""
    head, *body = table_of(cells)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join([f'`{row[0]}`', *row[1:]])} |" for row in body)]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text("\n".join([before + BEGIN, *lines, END]) + rest.partition(END)[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite the table in docs/strategies.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cells = measure_all(Path(folder))
    for title, row in cells.items():
        print(title)
        for name, cell in row.items():
            print(f"    {name:18}{cell.mark:9}{'' if cell.deviation is None else f'{cell.deviation:.1e}':10}{(cell.error or '')[:140]}")
    if args.write:
        write(cells)


if __name__ == "__main__":
    importlib.import_module("tests.helpers.matrix").main()  # under its own name: what travels to the ranks then goes by reference
