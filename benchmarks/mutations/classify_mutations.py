"""Breakages of classification: (file, text, replacement, what it breaks, tests that should notice)."""

H = "tests/test_training_wiring.py tests/test_highres.py"
P = "tests/test_pretrain.py tests/test_pretrain_recipe.py tests/test_pretrain_stages.py"
V = "tests/test_scoring.py tests/test_eval_splits.py tests/test_highres.py"
TRAIN, CHECK = "tasks/classify/train.py", "tasks/classify/check.py"
SCORING, CLASSIFIER = "dpn_cli/scoring.py", "tasks/classify/classifier.py"

MUTATIONS = [
    (TRAIN, "model.load_state_dict(evaluated_weights(best[0]))", "pass",
     "the best checkpoint is noted and the last one kept", H),
    (TRAIN, "evaluate(classifier, data.val, recipe, world)", "evaluate(classifier, data.minival, recipe, world)",
     "validation is scored on minival", H),
    (TRAIN, "evaluate(self.classifier, self.data.minival, self.recipe, self.world)",
     "evaluate(self.classifier, self.data.val, self.recipe, self.world)",
     "validation images choose the checkpoint", H),
    (TRAIN, "crop_batches(data.train, ", "crop_batches(data.val, ",
     "training on the validation images", H),
    (TRAIN, "ema_decay=recipe.ema,\n            evaluate", "ema_decay=None,\n            evaluate",
     "no average of the weights is kept", H),
    (TRAIN, "recipe.batch_size, recipe.seed, world, **how", "recipe.batch_size, 0, world, **how",
     "all seeds see the same batches", H),
    (TRAIN, "num_classes=classes, seed=recipe.seed)", "num_classes=classes)",
     "all seeds start from the same weights", H),
    (TRAIN, "nn.init.constant_(model.head.bias, head_bias_of(recipe, classes))", "pass",
     "the head's bias is zero", H + " " + P),
    (TRAIN, "blend(target, one_hot(batch[\"other_label\"]), batch[\"mix\"])", "target",
     "mixup's labels are not mixed", H + " " + P),
    (CHECK, 'before["classes"] != facts["classes"]', "False",
     "a resumed run takes other classes", H),
    (CHECK, 'before["data"] != facts["data"]', "False",
     "a resumed run takes other images", H + " tests/test_loader.py"),
    (SCORING, "logits.topk(min(5, classes), dim=-1)", "logits.topk(min(4, classes), dim=-1)",
     "top-5 counts four", V),
    (SCORING, "range(world.rank, len(split.labels), world.size)", "range(0, len(split.labels), world.size)",
     "every rank scores the first rank's images", "tests/test_distributed.py"),
    (SCORING, "logits if columns is None else logits[:, columns]", "logits",
     "a part of the classes is scored against all", V),
    (CLASSIFIER, 'logits.sigmoid() if self.loss == "sigmoid"', 'logits.sigmoid() if self.loss == "softmax"',
     "probabilities are those of the other loss", V),
]  # fmt: skip
