"""What ``dpn doctor`` looks at before a run: the machine, the installed packages, torch and its devices, the ranks."""
