"""Pages that explain a run: what is on them, the charts, and the file that holds all of it."""
