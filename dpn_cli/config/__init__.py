"""Configs: keys, layers, launch options and initial weights. Imports no torch."""
