"""Breakages of data: (file, text, replacement, what it breaks, tests that should notice)."""

C = "tests/test_classified.py"
L = "tests/test_loader.py tests/test_pixels.py"
X = "tests/test_crops.py tests/test_pixels.py"
P = "tests/test_pack.py"
LOADER, PIXELS, CROPS = "dpn_cli/data/loader.py", "dpn_cli/data/pixels.py", "dpn_cli/data/crops.py"
CLASSIFIED, LABELLED, SHARDS = "dpn_cli/data/classified.py", "dpn_cli/data/labelled.py", "dpn_cli/data/shards.py"

MUTATIONS = [
    (LOADER, "manual_seed(fold(self.seed, CROP, step, place))", "manual_seed(fold(self.seed, CROP, 0, place))",
     "crops are the same at every step", L),
    (LOADER, "manual_seed(fold(self.seed, CROP, step, place))", "manual_seed(fold(self.seed, CROP, step, 0))",
     "all crops of a batch are the same", L),
    (LOADER, "slice(world.rank * share, (world.rank + 1) * share)", "slice(0, share)",
     "every rank trains on the first rank's images", L + " tests/test_distributed.py"),
    (LOADER, "max(draw, 1 - draw)", "draw",
     "mixup's share is not folded to at least a half", L),
    (LOADER, '"other_label": labels.roll(1, 0)', '"other_label": labels',
     "mixup blends images and not labels", L),
    (LOADER, "default_rng((seed, MIX, step))", "default_rng((seed, MIX))",
     "mixup's share is the same at every step", L),
    (LOADER, "return weight * first + (1 - weight) * other", "return weight * other + (1 - weight) * first",
     "mixup gives the larger share to the other image", L),
    (CROPS, "AREA, RATIO = (0.05, 1.0)", "AREA, RATIO = (0.08, 1.0)",
     "the smallest crop is timm's", X),
    (CROPS, "(0.75, 1.33)", "(0.75, 4 / 3)",
     "the widest crop is torchvision's", X),
    (CLASSIFIED, "MINIVAL_MOST_SHARE = 0.01,", "MINIVAL_MOST_SHARE = 0.02,",
     "minival is twice the paper's", C),
    (CLASSIFIED, "Part(train, sorted(order[:cut])), Part(train, sorted(order[cut:]))",
     "Part(train, sorted(order)), Part(train, sorted(order[cut:]))",
     "minival is trained on", C),
    (CLASSIFIED, "hashlib.sha256(os.fsencode(split.key(index)))", "hashlib.sha256(str(index).encode())",
     "the order of images depends on what else is in the data set", C),
    (CLASSIFIED, "rest = sorted(set(range(len(labels))) - set(apart))", "rest = sorted(set(range(len(labels))))",
     "images set apart for validation are trained on", C),
    (CLASSIFIED, "rows = order[labels[order] == label]", "rows = order",
     "images are not set apart class by class", C),
    (CLASSIFIED, "tuple(sorted(entry.name for", "tuple((entry.name for",
     "classes are in the order of the file system", C),
    (CLASSIFIED, '"validation", "val", "valid", "test")', '"test", "validation", "val", "valid")',
     "a hub data set is validated on its test split", C),
    (CLASSIFIED, "labels += [label] * len(found)", "labels += [0] * len(found)",
     "every picture has the first class", C),
    ("dpn_cli/fewshot.py", "[:shots] for label in range(classes)", "[: shots + 1] for label in range(classes)",
     "the probe draws one image too many", "tests/test_fewshot.py"),
    ("dpn_cli/fewshot.py", "generator = np.random.default_rng(seed)", "generator = np.random.default_rng(0)",
     "all draws of the probe are the same", "tests/test_fewshot.py"),
    ("dpn_cli/fewshot.py", "CONSTANT = 100.0", "CONSTANT = 1.0",
     "the probe's bias is penalised", "tests/test_fewshot.py"),
    ("dpn_cli/fewshot.py", "pre_logits=True", "pre_logits=False",
     "the probe reads logits", "tests/test_fewshot.py"),
    ("dpn_cli/data/randaugment.py", "return share * 1.8 + 0.1", "return share * 1.9 + 0.1",
     "RandAugment's blends are stronger", "tests/test_randaugment.py"),
    ("dpn_cli/data/randaugment.py", "_levels >= threshold", "_levels > threshold",
     "RandAugment's solarize leaves the threshold itself alone", "tests/test_randaugment.py"),
]  # fmt: skip
