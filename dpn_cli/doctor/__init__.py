"""Checks of ``dpn doctor`` before a run: machine, packages, torch and its devices, ranks."""
