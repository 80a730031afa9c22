"""Installs the package of plug-ins under tests/plugin_package: writes what pip would leave, without the time that pip takes."""

from __future__ import annotations

import configparser
from pathlib import Path

__all__ = ["PACKAGE", "write_dist_info"]

PACKAGE = Path(__file__).parents[1] / "plugin_package"


def write_dist_info(folder: Path, name: str | None = None) -> None:
    """Make in `folder` the .dist-info of the package (under another `name`): its metadata and entry points, read off its setup.cfg."""
    config = configparser.ConfigParser()
    config.read(PACKAGE / "setup.cfg")
    name, version = name or config["metadata"]["name"], config["metadata"]["version"]
    made = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = config["options.entry_points"].items()
    (made / "entry_points.txt").write_text("".join(f"[{group}]\n{entries.strip()}\n" for group, entries in groups))
