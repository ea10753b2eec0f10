"""Breakages of checks before a run: (file, text, replacement, what it breaks, tests that should notice)."""

D, C = "tests/test_doctor.py", "tests/test_datacheck.py"
DOCTOR, DATA = "dpn_cli/doctor/", "dpn_cli/data/"

MUTATIONS = [
    (DOCTOR + "apart.py", "except (EOFError, OSError):", "except KeyError:", "a process that dies ends the command", D),
    (
        DOCTOR + "devices.py",
        'r"torchvision::\\w+ does not exist|different CUDA"',
        'r"nothing"',
        "the classic error of torchvision has no remedy of its own",
        D,
    ),
    (
        DOCTOR + "packages.py",
        'if here and required.name == "torch" and not',
        'if here and required.name == "torch" and',
        "a torchvision that fits torch is a problem",
        D,
    ),
    (
        DOCTOR + "packages.py",
        'return None\n    return Finding(required.name, "warning"',
        'pass\n    return Finding(required.name, "warning"',
        "every version is outside the tested ones",
        D,
    ),
    (
        DOCTOR + "machine.py",
        "shares += [int(quota) / int(period)] if quota.isdecimal() else []",
        "shares += []",
        "a container's share of the cores is not seen",
        D,
    ),
    (
        DOCTOR + "ranks.py",
        "if rank.versions.get(name) != first.versions[name]",
        "if False",
        "ranks with other versions are not told",
        D,
    ),
    (DOCTOR + "ranks.py", "not in known:", "in known:", "findings of other machines are not told", D),
    (
        DATA + "examine.py",
        "hashlib.sha256(repr(pixels.shape).encode())",
        "hashlib.sha256(str(id(pixels)).encode())",
        "no two pictures are the same",
        C,
    ),
    (DATA + "examine.py", "examined.unreadable[row] = str(one)", "pass", "unreadable pictures are not told", C),
    (
        DATA + "findings.py",
        "if len({part.side for part, _ in group}) > 1:",
        "if len(group) > 2:",
        "the same picture in two splits is no problem",
        C,
    ),
    (DATA + "findings.py", "(labels < 0) | (labels >= known)", "labels < 0", "labels above the classes pass", C),
    (
        DATA + "faults.py",
        "    _gathered[-1].append(error)",
        "    _gathered[0].append(error)",
        "errors are gathered by another block",
        C,
    ),
    (
        "tasks/classify/datacheck.py",
        'parts["minival"].side = parts["train"].side',
        "pass",
        "twins in training and minival are a problem",
        C,
    ),
    (
        "tasks/classify/datacheck.py",
        "and tuple(classes) != order",
        "and tuple(classes) == order",
        "the official order is the wrong one",
        C,
    ),
    (
        "tasks/segment/datacheck.py",
        "return seen(pixels, stored, wrong=[str(error)])",
        "return seen(pixels, stored)",
        "masks of another size pass",
        C,
    ),
    (
        "tasks/lit/datacheck.py",
        '"skip_bad_images": False',
        '"skip_bad_images": True',
        "pairs without text are left out in silence",
        C,
    ),
    ("tasks/vtab/datacheck.py", "if set(parts[0].stored) == {COPIED}:", "if False:", "copies as JPEG are not told", C),
    (
        "dpn_cli/commands/datacheck.py",
        "if count := len(findings.problems):",
        "if count := 0:",
        "a check with problems ends with 0",
        C,
    ),
]
