"""`dpn reproduce`: the paper's tables and figures as trainings of the ordinary commands."""
