"""Images with labels: where they come from, how they become pixels, in which order they are seen."""
