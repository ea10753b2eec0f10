"""Breakages of shards, here and behind URLs: (file, text, replacement, what it breaks, tests that should notice)."""

ORDER, LOADER = "dpn_cli/data/order.py", "dpn_cli/data/loader.py"
O, S = "tests/test_order.py", "tests/test_shuffle.py"

MUTATIONS = [
    (ORDER, "if lane % 2 == 0:", "if lane < 0:", "lanes that share a shard read it at opposite ends of the epoch", O),
    (ORDER, "self.seed, SHARDS, epoch)", "self.seed, SHARDS)", "every epoch has the same order of shards", O),
    (
        ORDER,
        "self.seed, TOGETHER, epoch, lane, number)",
        "self.seed, TOGETHER)[::1] * 0 + np.arange(len(joined))",
        "shards that are read together are drawn one after the other",
        O,
    ),
    (ORDER, "[begin:end]])", "[: end - begin]])", "two lanes draw the same images of the shard that they share", O),
    (ORDER, "[:2] != (epoch, number)", "[:1] != (epoch,)", "a lane draws one block over and over", O),
    (
        ORDER,
        "together = -(-self.open_shards // self.lanes)",
        "together = 1",
        "small batches are drawn from fewer shards than are to be open",
        O,
    ),
    (
        ORDER,
        "if need.last >= start and need.first < stop)",
        "if need.last > start and need.first < stop)",
        "a shard's last step does not need it",
        O,
    ),
    (
        ORDER,
        "(high - 1) // widths[lane]",
        "high // widths[lane] - 1",
        "a shard's last, partial step does not need it",
        O,
    ),
    (
        ORDER,
        "* self.lanes // self.batch_size for place",
        "* self.lanes // (self.batch_size + 1) for place",
        "a rank takes other lanes for its own",
        O,
    ),
    (ORDER, "self.of[rows]", "self.of[: len(rows)]", "the shards of a part are those of the first images", S),
    (LOADER, "repeats, views, order)", "repeats, views)", "the loader shuffles all images together", S),
    (
        "tasks/classify/distill/cache.py",
        "views=self.views, order=order)",
        "views=self.views)",
        "targets are those of other pictures when shards are drawn",
        "tests/test_distill_cache.py",
    ),
    (
        "tasks/classify/distill/train.py",
        "            order=order,\n",
        "",
        "a distillation shuffles all images together",
        S,
    ),
    (
        "tasks/classify/train.py",
        "world, order=order, **how",
        "world, order=None, **how",
        "a classifier's training shuffles all images together",
        S,
    ),
]
