"""CSVLogger: metrics.csv and hparams.yaml, with the standard library only."""

from __future__ import annotations

import csv
import os
import uuid
from typing import Any

from callbacks.loggers.base import DummyExperiment, FileLogger
from callbacks.loggers.plain import as_dict, to_yaml

__all__ = ["CSVLogger", "ExperimentWriter"]


class CSVLogger(FileLogger):
    """Write published numbers to "<save_dir>/<name>/version_<n>/metrics.csv", a row for each publication.

    The columns are "step" (optimizer steps), "epoch" and one for each metric; a metric may turn up later. A run that is
    started into the folder of an earlier one (same `version`) continues its file: rows of the steps that it does again are replaced.

    Args:
        save_dir, name, version, prefix: see FileLogger; name defaults to "csv_logs".
        flush_logs_every_n_steps: Rows are written once this many steps have passed since the last writing; also at every checkpoint
            and at the end.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = "csv_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        self._flush_every = flush_logs_every_n_steps
        self._writer: ExperimentWriter | None = None

    def __getstate__(self) -> dict[str, Any]:
        self.save()
        return {**super().__getstate__(), "_writer": None}

    @property
    def experiment(self) -> Any:
        """The writer of the two files (an ExperimentWriter)."""
        if not self._writes:
            return DummyExperiment()
        if self._writer is None:
            self._writer = ExperimentWriter(str(self.log_dir or os.getcwd()))
        return self._writer

    def _continue_after(self, step: int) -> None:
        self.experiment.continue_after(step)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        experiment = self.experiment
        experiment.log_metrics(self._named(metrics), step)
        if self._writes and experiment.pending_steps >= self._flush_every:
            experiment.save()

    def log_hyperparams(self, params: Any = None, metrics: dict[str, float] | None = None) -> None:
        """Write hparams.yaml. Empty `params` write nothing."""
        if params:
            self.experiment.log_hparams(as_dict(params))

    def save(self) -> None:
        if self._writer is not None:
            self._writer.save()

    def finalize(self, status: str) -> None:
        self.settle()
        self.save()
        self._writer = None


class ExperimentWriter:
    """Holds rows in memory and appends them to metrics.csv; rewrites the file, as a whole and atomically, for a new column."""

    NAME_METRICS_FILE = "metrics.csv"
    NAME_HPARAMS_FILE = "hparams.yaml"

    def __init__(self, log_dir: str) -> None:
        self.log_dir = log_dir
        self.metrics_file_path = os.path.join(log_dir, self.NAME_METRICS_FILE)
        self.metrics: list[dict[str, Any]] = []
        self.hparams: dict[str, Any] = {}
        self._columns: list[str] | None = None  # of the file; None: not looked yet
        self._saved_step: int | None = None
        self._step = 0

    @property
    def pending_steps(self) -> int:
        """Optimizer steps since the rows were written last."""
        return 0 if self._saved_step is None else self._step - self._saved_step

    def log_hparams(self, params: dict[str, Any]) -> None:
        """Write hparams.yaml anew with `params` added."""
        self.hparams.update(params)
        os.makedirs(self.log_dir, exist_ok=True)
        _replace(os.path.join(self.log_dir, self.NAME_HPARAMS_FILE), lambda file: file.write(to_yaml(self.hparams)))

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Hold a row. Without a step it stands at the newest one."""
        self._step = self._step if step is None else int(step)
        if self._saved_step is None:
            self._saved_step = self._step - 1
        self.metrics.append({"step": self._step, **{name: _number(name, value) for name, value in metrics.items()}})

    def continue_after(self, step: int) -> None:
        """Drop the rows of later steps than `step`, and what a writer that was killed left half-written."""
        for name in os.listdir(self.log_dir):
            if name.startswith((self.NAME_METRICS_FILE + ".", self.NAME_HPARAMS_FILE + ".")) and name.endswith(".tmp"):
                os.remove(os.path.join(self.log_dir, name))
        old = self._read()
        kept = [row for row in old if (row["step"] or "").isdigit() and int(row["step"]) <= step]
        if len(kept) < len(old):
            self._rewrite(kept)

    def save(self) -> None:
        """Write the rows held in memory."""
        if not self.metrics:
            return
        os.makedirs(self.log_dir, exist_ok=True)
        old = self._read() if self._columns is None else None
        columns = list(self._columns or ["step", "epoch"])
        columns += dict.fromkeys(name for row in self.metrics for name in row if name not in columns)
        if self._columns is not None and columns == self._columns and os.path.exists(self.metrics_file_path):
            with open(self.metrics_file_path, "a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, columns, restval="", lineterminator="\n").writerows(self.metrics)
        else:
            old = self._read() if old is None else old
            self._columns = columns
            self._rewrite([*old, *self.metrics])
        self._saved_step = self._step
        self.metrics = []

    def _read(self) -> list[dict[str, Any]]:
        """Rows of the file. A last line without its end (the process was killed while writing) is dropped."""
        if not os.path.exists(self.metrics_file_path):
            return []
        with open(self.metrics_file_path, newline="", encoding="utf-8") as file:
            text = file.read()
        whole, _, torn = text.rpartition("\n")
        reader = csv.DictReader(whole.splitlines())
        rows = list(reader)
        if self._columns is None:
            self._columns = list(reader.fieldnames or [])
            if torn:
                self._rewrite(rows)
        return rows

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        columns = self._columns or ["step", "epoch"]

        def write(file: Any) -> None:
            writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

        _replace(self.metrics_file_path, write)


def _number(name: str, value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return int(value) if name == "epoch" and float(value).is_integer() else value


def _replace(path: str, write: Any) -> None:
    temporary = f"{path}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        with open(temporary, "w", newline="", encoding="utf-8") as file:
            write(file)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)
