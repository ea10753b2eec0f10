"""Breakages of distillation: (file, text, replacement, what it breaks, tests)."""

D, L, S = "tests/test_distill.py", "tests/test_distill_losses.py", "tests/test_distill_start.py"
HOME = "tasks/classify/distill/"
TRAIN, LOSSES, STUDENT, DATA = (f"{HOME}{name}.py" for name in ("train", "losses", "student", "data"))
NEAR, RECIPE, COMMAND, SCORES = (f"{HOME}{name}.py" for name in ("nearness", "recipe", "command", "scores"))
FIT, NORMS, IMAGES, AUGMENT = (
    "dpn_cli/weights/retrofit.py", "dpn_cli/model/norms.py", "dpn_cli/data/images.py", "dpn_cli/data/augment.py"
)  # fmt: skip

MUTATIONS = [
    (TRAIN, "            train_only(student, (*STEM, *POSITIONS))\n", "", "the stem's stage trains all weights", D),
    (TRAIN, "batches=lambda start: batches(first + start)", "batches=batches", "the second stage begins with the first batch", D),
    (TRAIN, '"lr": recipe.stem_lr or recipe.lr, ', "", "stem_lr is ignored", D),
    (TRAIN, '"ema": None}', '"lr": recipe.lr}', "the stem's stage is averaged, too", D),
    (TRAIN, "ema_decay=recipe.ema", "ema_decay=None", "--ema is ignored", D),
    (TRAIN, "        observed.freeze_unseen()\n", "", "ranks wait for gradients that nobody computes", D),
    (TRAIN, '"trained_on": record(self.pictures.train)', '"trained_on": None', "the file does not know what it was trained on", D),
    (LOSSES, "value * temperature**2", "value", "the temperature shrinks the gradients", L),
    (LOSSES, " / self.deviations[name]", "", "channels count by their size", L),
    (LOSSES, "theirs, ours = theirs / temperature, ours / temperature", "theirs = theirs / temperature", "one temperature", L),
    (LOSSES, "attention.q_norm(q), attention.k_norm(k)\n", "attention.q_norm(k), attention.k_norm(q)\n", "queries are keys", L),
    (LOSSES, "losses.attention / len(maps)", "losses.attention", "more pairs of blocks count more", L),
    (STUDENT, "not in (\"none\", \"dpn_no_affine\")", "!= \"none\"", "norms without scales are fitted", S),
    (STUDENT, 'taught.get("flip", True) if data.flip is None', "True if data.flip is None", "digits are mirrored", S),
    (STUDENT, '("whole" if teacher.resize_side is None else "inception")', '"inception"', "digits are cropped", S),
    (STUDENT, "drop_path=recipe.backbone.drop_path", "drop_path=0.0", "--drop-path is ignored", D),
    (STUDENT, "depths[0] > depths[1] and", "False and", "a deeper student is compared with nothing", D),
    (FIT, "nn.init.constant_(first.bias, brightness)", "nn.init.zeros_(first.bias)", "patches lose their mean brightness", S),
    (FIT, "centre = mean[\"v\"] if bias is not None", "centre = mean[\"v\"] if True", "RMS stems are fitted with a bias that is not there", S),
    (FIT, "tokens = model.norm_posemb(tokens + model.pos_embed)", "tokens = model.norm_posemb(tokens)", "post_posemb is fitted without positions", S),
    (NORMS, "torch.lerp(x, self.norm(x), self.progress)", "self.norm(x)", "anneal does not begin at the teacher", D),
    (NEAR, "float(everything[6:].square().sum()) / max(tokens, 1)", "0.0", "variance around zero, not around the mean", D),
    (NEAR, "divergence(right, given, loss)", "divergence(given, right, loss)", "the divergence of the teacher from the student", D),
    (DATA, "match_classes(classes, names)", "None", "classes in another order are scored wrong", S),
    (DATA, "            if data.val_source:\n", "            if False:\n", "--val-data of other classes is dropped in silence", S),
    (IMAGES, 'FolderPictures(inner if inner.is_dir() else root)', "FolderPictures(root)", "validation images are trained on", "tests/test_distill.py"),
    (AUGMENT, "color_jitter=how.jitter or None", "color_jitter=None", "colours stay as they are", S),
    (RECIPE, '{"losses": {"tokens": 0.0, "representation": 0.0}}', "{}", "other widths are compared token by token", D),
    (COMMAND, 'before.get("teacher", now["teacher"]) != now["teacher"]', "False", "another teacher continues the run", D),
    (SCORES, "None if pictures.columns is None else pictures.columns.to(self.world.device)", "None", "top-1 of permuted classes", D),
]  # fmt: skip
