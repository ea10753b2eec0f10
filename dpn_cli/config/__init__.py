"""Configs: their keys, their layers, and where a training starts. Imports no torch."""
