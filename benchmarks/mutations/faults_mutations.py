"""Breakages of what survives faults and damage: (file, text, replacement, what it breaks, tests that should notice)."""

KINDS, FAULTS, KILLED = "tests/test_kinds.py", "tests/test_faults.py", "tests/test_killed_runs.py"

MUTATIONS = [
    (
        "dpn_cli/weights/written.py",
        "    _sort_metadata(path)\n\n",
        "    pass\n\n",
        "weight files of equal contents have different digests",
        KINDS,
    ),
    (
        "dpn_cli/data/reading.py",
        "if listed not in (None, status.st_size):",
        "if False:",
        "a picture that is replaced under a training is trained on",
        FAULTS,
    ),
    (
        "dpn_cli/data/classified.py",
        "self.where(index), self.reading, self.sizes[index])",
        "self.where(index), self.reading)",
        "a picture of class folders is replaced unnoticed",
        FAULTS,
    ),
    (
        "dpn_cli/data/labelled.py",
        "return open_image(self.paths[index], self.where(index), self.reading, self.sizes[index])",
        "return open_image(self.paths[index], self.where(index), self.reading)",
        "a picture of a list is replaced unnoticed",
        FAULTS,
    ),
    (
        "tasks/lit/captions.py",
        "self.where(index), self.reading, self.sizes[index])",
        "self.where(index), self.reading)",
        "a picture with captions is replaced unnoticed",
        FAULTS,
    ),
    (
        "tasks/segment/pairs.py",
        "self.where_mask(index), self.reading, self.sizes[index][1])",
        "self.where_mask(index), self.reading)",
        "a mask is replaced unnoticed",
        FAULTS,
    ),
    (
        "tasks/segment/train.py",
        "            folder.note_time(done.seconds, done.wait_seconds)\n",
        "",
        "a segmentation forgets how long it took",
        KILLED,
    ),
    (
        "tasks/lit/train.py",
        '            "steps": recipe.schedule.steps,\n            "recipe"',
        '            "steps": recipe.schedule.steps,\n            "seconds": done.seconds,\n            "recipe"',
        "equal LiT runs have unequal weight files",
        KILLED,
    ),
    (
        "dpn_cli/run/process.py",
        "    except KeyboardInterrupt:\n",
        "    except InterruptedError:\n",
        "Ctrl-C before the work begins is a traceback",
        "tests/test_process.py",
    ),
]
