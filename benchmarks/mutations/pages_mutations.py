"""Breakages of predictions, of what runs keep for pages, and of curves: (file, text, replacement, what, tests)."""

P, E = "tests/test_predictions.py", "tests/test_end_report.py"
G, N, F = "tests/test_progress.py", "tests/test_engine.py", "tests/test_fewshot_comparison.py"
L, S = "tests/test_lit_samples.py tests/test_lit.py", "tests/test_segment_samples.py"
R, LC = "tests/test_report.py", "tests/test_lit_comparison.py"
CLASSES, LABELS, MASKS = "tasks/classify/prediction.py", "tasks/lit/use.py", "tasks/segment/prediction.py"
SMALL, MANY = "dpn_cli/report/thumbnails.py", "dpn_cli/report/predictions.py"
CONSOLE, TRAINING, NORMS = "dpn_cli/run/console.py", "dpn_cli/commands/training.py", "dpn_cli/engine/layer_norms.py"
PROBES, FEWSHOT = "dpn_cli/commands/probing.py", "tasks/classify/fewshot.py"
TRAIN, ZEROSHOT = "tasks/lit/train.py", "tasks/lit/zeroshot.py"
SAMPLES, PAIRS = "tasks/segment/samples.py", "tasks/lit/samples.py"

MUTATIONS = [
    (CLASSES, "how.decode or classifier.decoder", 'how.decode or "exact"', "pictures are decoded by another decoder than the run's",
     P + " tests/test_decoders.py"),
    (LABELS, "Reading(how.decode or towers.decoder, how.max_pixels)\n        autocast", 'Reading(how.decode or "exact", how.max_pixels)\n        autocast',
     "LiT's pictures are decoded by another decoder than the run's", P + " tests/test_decoders.py"),
    (CLASSES, 'result["classes"][0]["name"]', 'result["classes"][-1]["name"]', "a page counts the least likely classes", P),
    (LABELS, "files.path(good[row])", "files.path(row)", "a search shows other pictures where some are unreadable", P),
    (MASKS, "one.index in found.shown else None", "found.shown else None", "a page of segments is of any size", P),
    (MASKS, "key=lambda index: -sum(shares[index])", "key=lambda index: sum(shares[index])",
     "a legend does not begin with the largest class", P),
    (MASKS, "100 * sum(shares[index]) / len(results)", "100 * sum(shares[index]) / len(shares[index])",
     "a class's mean share leaves out pictures without it", P),
    (MANY, "100 * count / counts.total()", "100 * count / len(counts)", "shares of classes are not of all pictures", P),
    (MANY, "key=lambda one: -one[1]", "key=lambda one: one[1]", "the rarest class is listed first", P),
    (SMALL, "    image.thumbnail((side, side))\n", "", "thumbnails are as large as their pictures", P),
    (SMALL, "if file.tell() <= DENSITY * side**2:", "if True:", "thumbnails have any number of bytes", P),
    (CONSOLE, "done += more", "done += 1", "a batch counts as one picture", G),
    (CONSOLE, "or self.rich.quiet or self.barred:", "or self.rich.quiet:", "two bars are drawn over each other", G),
    (CONSOLE, "sparkline(gathered(losses, points))", "sparkline(losses)", "a curve of the loss grows without end", G),
    ("dpn_cli/engine/fit.py", "step + 1 - start, logged=logged)", "step + 1 - start, logged=True)",
     "all steps count as logged", G),
    (NORMS, "if len(gradients) < len(self.parameters):", "if False:", "norms need a gradient of every parameter", N),
    (NORMS, "means = self.sums / self.steps", "means = self.sums.clone()", "norms of layers are sums over steps", N),
    (NORMS, "self.taken, self.steps = self.steps, 0", "self.taken = self.steps", "norms are means over all steps before", N),
    (TRAINING, '            if not arguments["no_report"]:\n', "            if True:\n", "--no-report is ignored", E),
    (PROBES, "    if not how.no_report:\n", "    if False:\n", "probes of several networks have no page", F),
    (PROBES, 'if self.folder.facts.get("data", data) != data:', "if False:", "draws are of other images than before", F),
    (PROBES, "features.accuracy(shots, cell.seed)", "features.accuracy(shots, 0)", "every draw is the first", F),
    (FEWSHOT, "if not np.isfinite(found[0]).all():", "if False:", "features that are no numbers are probed", F),
    (TRAIN, '{"temperature": text.log_temperature.exp().item()}', '{"temperature": text.log_temperature.item()}', "the log has the temperature's logarithm", L),
    (TRAIN, "force=True,", "force=False,", "an accuracy at chance ends the training with an error", LC),
    (ZEROSHOT, "nearest.see(rows, logits / scale)", "nearest.see(rows, logits)", "cosines of nearest images are logits", L),
    (TRAIN, "        keep_prompts(folder, split, nearest, best)\n", "        pass\n", "the demo's run has no nearest images", L),
    (PAIRS, "texts[[firsts[one] for one in asked]]", "texts[asked]", "nearest images are of other captions", L),
    (PAIRS, '        for path in (folder / name).glob("*.jpg"):\n            path.unlink()\n', "        pass\n",
     "pictures of an earlier evaluation stay", L),
    (SAMPLES, '        for path in (folder / FOLDER).glob("*.*"):\n            path.unlink()\n', "        pass\n",
     "pictures of an earlier score stay", S),
    (SAMPLES, "middle[begin : begin + count]", "middle[:count]", "the median images are the second best", S),
    ("tasks/segment/scoring.py", "SegmentScores(counts, 1).miou", "SegmentScores(confusion, 1).miou",
     "an image's score is that of all before it", S),
    ("dpn_cli/report/content.py", "list(map(fmean, values))", "[one[0] for one in values]", "a curve over seeds is the first seed's", R),
]  # fmt: skip
