"""The downstream tasks: one package or module each; none imports another."""
