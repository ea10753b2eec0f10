"""Report pages of runs: their content, charts and HTML file."""
