"""SaveConfigCallback: the configuration of a run, beside what its logger writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from callbacks.callback import Callback
from trainer.errors import MisconfigurationException

__all__ = ["SaveConfigCallback"]


class SaveConfigCallback(Callback):
    """Writes the whole configuration to "config.yaml" in the folder of the first logger, at the start of the first run.

    `program.py fit --config <that file>` does the run again. Nothing is written where no logger has a folder. Override `save_config` to
    keep it elsewhere, too.

    Args:
        parser: The parser that read the configuration.
        config: The configuration.
        config_filename: Name of the file.
        overwrite: Whether it may replace a file with another content.
        multifile: Whether parts that came from files of their own go to such files.
        save_to_log_dir: False writes no file: all there is to do is in `save_config`.

    Raises:
        MisconfigurationException: the file is there, with another content, and this is no run that goes on in it; it cannot be written;
            `save_to_log_dir=False` while nobody has overridden `save_config`.
    """

    def __init__(
        self,
        parser: Any,
        config: Any,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        if not save_to_log_dir and type(self).save_config is SaveConfigCallback.save_config:
            raise MisconfigurationException("SaveConfigCallback(save_to_log_dir=False) does nothing. Override save_config, or leave it out.")
        self.parser, self.config = parser, config
        self.config_filename, self.overwrite, self.multifile = config_filename, overwrite, multifile
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Save, once. Collective."""
        if self.already_saved:
            return
        trouble = trainer.broadcast(self._write(trainer) if self.save_to_log_dir and trainer.is_global_zero else "")
        if trouble:
            raise MisconfigurationException(trouble)
        if trainer.is_global_zero:
            self.save_config(trainer, module, stage)
        self.already_saved = True

    def save_config(self, trainer: Any, module: Any, stage: str) -> None:
        """Keep the configuration elsewhere, too: `self.parser.dump(self.config)` is its text. Rank 0 only, so no collectives in here."""

    def _write(self, trainer: Any) -> str:
        """Write the file; return what is wrong, or nothing."""
        folder = trainer.log_dir if trainer.loggers else None
        if folder is None:
            return ""
        path = Path(folder, self.config_filename)
        try:
            if path.exists() and not self.overwrite and not trainer.continues and path.read_text() != self._text():
                return (
                    f"{path} holds the configuration of another run. Remove it, or choose another folder; save_config_kwargs={{'overwrite': True}} "
                    "of the command line replaces it, and save_config_callback=None writes none."
                )
            os.makedirs(folder, exist_ok=True)
            if self.multifile:
                self.parser.save(self.config, path, skip_unset=False, overwrite=True, multifile=True)
            else:
                path.write_text(self._text())
        except (OSError, TypeError) as error:  # the latter is jsonargparse's PathError
            return f"Cannot write {path}: {getattr(error, 'strerror', None) or error}"
        return ""

    def _text(self) -> str:
        return self.parser.dump(self.config, skip_unset=False)
