"""Engines that run trainings in parallel: processes, Ray, SLURM. Know no task."""
