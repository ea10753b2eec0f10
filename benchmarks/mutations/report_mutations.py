"""Breakages of reports: (file, text, replacement, what it breaks, tests)."""

R, A, E = "tests/test_report.py", "tests/test_answers.py", "tests/test_end_report.py"
S, L, P = "tests/test_segment_samples.py", "tests/test_lit_samples.py", "tests/test_predictions.py"
SAMPLES, PAIRS = "tasks/segment/samples.py", "tasks/lit/samples.py"
PREDICTIONS, CONSOLE, G = "dpn_cli/report/predictions.py", "dpn_cli/run/console.py", "tests/test_progress.py"
PAGE, CHARTS, SIDE = "dpn_cli/report/page.py", "dpn_cli/report/charts.py", "dpn_cli/report/side.py"
READING, CONTENT, COMMAND = "dpn_cli/report/reading.py", "dpn_cli/report/content.py", "dpn_cli/commands/report.py"
VTAB, SEGMENT, LIT = "tasks/vtab/figures.py", "tasks/segment/figures.py", "tasks/lit/figures.py"
CONFUSIONS = "dpn_cli/report/confusions.py"
CALIBRATION, ANSWERS, SCORING = "tasks/classify/calibration.py", "tasks/classify/answers.py", "dpn_cli/scoring.py"

MUTATIONS = [
    (PREDICTIONS, "place * count // most", "place", "a page shows the first pictures only", P),
    (PREDICTIONS, "        self.unreadable.append(path)\n", "", "damaged pictures are forgotten", P),
    (PREDICTIONS, "if skip_bad or not", "if not", "accepted pictures end the command with an error", P),
    (PREDICTIONS, "if index in self.small else None", "", "a page of many pictures is of any size", P),
    (PREDICTIONS, "collate_fn=list", "collate_fn=lambda items: items[::-1]", "batches are in another order", P),
    ("dpn_cli/report/tables.py", "enumerate(value, 1)", "enumerate(value)", "columns of a table begin at 0", P),
    (CONSOLE, "                    if tick.logged:\n", "                    if True:\n", "curves are of all steps", G),
    (CONSOLE, "(value - low) / height", "(value - low)", "curves leave their blocks", G),
    ("dpn_cli/report/html.py", "autoescape=True", "autoescape=False", "names from elsewhere are read as HTML", R),
    (PAGE, "    _clear(folder)\n", "", "figures of an earlier page stay", R),
    (CHARTS, '"text.parse_math": False', '"text.parse_math": True', "a dollar in a name is read as mathematics", R),
    (CHARTS, '"svg.hashsalt": "dpn"', '"svg.hashsalt": None', "the same run gives another page every time", R),
    (CHARTS, 'rf"\\g<1>{prefix}-"', 'r"\\g<1>"', "figures of one page share ids", R),
    (CHARTS, '.replace(INK, "currentColor")', "", "figures are black on dark paper", R),
    (CHARTS, "    text = printable(text)\n", "    text = str(text)\n", "control characters reach the page", R),
    (
        SIDE,
        "paired_difference(ours, theirs)",
        "paired_difference(theirs, ours)",
        "the difference has the other sign",
        R,
    ),
    (SIDE, "    if differs:\n", "    if False:\n", "runs with other recipes are paired", R),
    (SIDE, '"about", "backbone"', '"about", "lr", "backbone"', "runs with other learning rates are paired", R),
    (READING, "math.isfinite(value)", "True", "a loss that is no number ends the report", R),
    (READING, "result or partial or {}", "result or {}", "a comparison with failures has no numbers", R),
    (CONTENT, "list(map(min, values))", "list(map(max, values))", "a band over seeds lacks its lower end", R),
    (CONTENT, "pairwise(bounds)]", "pairwise(bounds[:-1])]", "long curves lack their end", R),
    (COMMAND, "if value != usual.get(key):", "if False:", "a given value is called the recipe's", R),
    (
        VTAB,
        "task.paper[PAPER_COLUMNS.index(column)]",
        "task.paper[0]",
        "every network is compared with the plain B/32",
        R,
    ),
    (VTAB, "and lr == f\"{found['lr']:g}\"", "", "every learning rate is marked as chosen", R),
    (SEGMENT, "found.sort(key=lambda one: -one[1])", "pass", "classes are not in order of IoU", R),
    (LIT, "100 * min(1.0, k / images)", "100.0 * k", "chance is a hundred times too high", R),
    (CALIBRATION, 'side="right") - 1', 'side="right")', "confidences are in the next bin", A),
    (
        CALIBRATION,
        "place[answer.true], place[answer.predicted]",
        "place[answer.predicted], place[answer.true]",
        "the confusion matrix is transposed",
        A,
    ),
    (CONFUSIONS, "1 - (shares + shares.T) / 2", "(shares + shares.T) / 2", "classes that are confused stand apart", A),
    (
        ANSWERS,
        "(-answer.confidence, answer.row)",
        "(answer.confidence, answer.row)",
        "the least sure mistakes are kept",
        A,
    ),
    (SCORING, 'logits.sigmoid() if loss == "sigmoid" else ', "", "sigmoid classifiers have softmax confidences", A),
    (
        "dpn_cli/data/pixels.py",
        "tuple(rows.tolist())",
        "tuple(range(len(rows)))",
        "answers are of other rows where pictures are left out",
        A,
    ),
    (COMMAND, "    if os.environ.get(NO_REPORT):\n        return\n", "", "the variable leaves no page out", E),
    (COMMAND, "if not _is_newest(", "if (", "a page is drawn again at every --resume", E),
    (
        COMMAND,
        "except (StoppedError, KeyboardInterrupt):",
        "except KeyboardInterrupt:",
        "a signal at the page is a failure of it",
        E,
    ),
    (
        COMMAND,
        "    except Exception as error:  # a chart",
        "    except OSError as error:  # a chart",
        "a chart that fails ends the command",
        E,
    ),
    (SAMPLES, "(-one.miou, one.row)", "(one.miou, one.row)", "the best images are the worst", S),
    (SAMPLES, "truth == IGNORE, 2,", "truth == IGNORE, 1,", "pixels that nobody judges are errors", S),
    (
        SEGMENT,
        "counts[true][predicted] = pixels",
        "counts[predicted][true] = pixels",
        "the confusions of pixels are transposed",
        S,
    ),
    (
        "tasks/segment/scoring.py",
        "if bool(counts.any()):",
        "if True:",
        "an image without labelled pixels has a score",
        S,
    ),
    (PAIRS, "texts[firsts] @ images[places].T", "images[places] @ texts[firsts].T", "the heat map is transposed", L),
    (
        PAIRS,
        "sorted(self.best[place] + found)[:NEAREST]",
        "sorted(found)[:NEAREST]",
        "the nearest images are those of the last part",
        L,
    ),
    (
        PAIRS,
        '"row": good[place], "image": data.where(good[place]), "cosine"',
        '"row": place, "image": data.where(place), "cosine"',
        "pictures are of other rows where some are unreadable",
        L,
    ),
    (SIDE, "[100 * share]", "[share]", "the curve over fractions is not in percent", R),
]
