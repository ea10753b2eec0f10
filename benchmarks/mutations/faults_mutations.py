"""Breakages of what survives faults and damage: (file, text, replacement, what it breaks, tests that should notice)."""

KINDS = "tests/test_kinds.py"

MUTATIONS = [
    ("dpn_cli/weights/written.py", "    _sort_metadata(path)\n\n", "    pass\n\n",
     "weight files of equal contents have different digests", KINDS),
]  # fmt: skip
