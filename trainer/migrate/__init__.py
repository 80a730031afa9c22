"""Rewrites programs for PyTorch Lightning into programs for this trainer: `python -m trainer.migrate PATH` (see docs/migrating.md)."""
