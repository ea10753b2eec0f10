"""The trainings that tables consist of, at the paper's size and at the demo's. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from dpn_cli.config.paths import find_data
from dpn_cli.reproduce.experiment import PaperTrial, Score
from tasks.vtab.tasks import DEMO_TASKS, TASKS, Task

# Titles of data sets, by the names of their folders in $DPN_DATA_DIR.
DATA_SETS = {
    "imagenet": "ImageNet-1k",
    "imagenet21k": "ImageNet-21k",
    "jft": "JFT-4B, which is not public: any large folder of classes",
    "sun397": "SUN397",
    "vtab-1k": "VTAB-1k",
    "ADEChallengeData2016": "ADE20K",
    "photographs": "labelled photographs in train/CLASS and val/CLASS, such as CIFAR-10's",
    "pairs": "images with captions, as 'dpn lit train --data' takes them",
}
TOP1: Score = ("top1",)
MIOU: Score = ("miou",)
ZEROSHOT: Score = ("zeroshot", "top1")
PROBE: Score = ("fewshot", "accuracy", "25", "values")
# A search has the test score of each stage's choice, and its own.
STAGES: tuple[Score, ...] = (("stages", 0, "test_top1"), ("stages", 1, "test_top1"), TOP1)
# Light x 1/2, 1/4, 1/8; contrast likewise; dusk x 1/2, 1/8, 1/32; Gaussian noise of 20, 46 and 97 grey levels.
SHIFTED = ("--shifts", "gain,flat_contrast,dusk,gaussian_noise", "--severity", "1,3,5")
# Figures 2 and 4 are drawn from the trainings of Table 1.
LOGGED = ("--set", "log.layer_norms=true")
DEMO = ("--data", "demo")
# Scenes as files in the folders of a data set with a test split, which the search needs.
SCENES = "scenes"
SMALL_STAGES = "stages=[{epochs: 1, grid: {lr: [0.001, 0.0003]}}, {epochs: 1, grid: {mixup: [0.0, 0.2]}}, {epochs: 2}]"


def select_real_data() -> dict[str, str]:
    """Return the data sets in $DPN_DATA_DIR and in the current folder, by name."""
    locations = {name: find_data(name) for name in DATA_SETS}
    return {name: location for name, location in locations.items() if location != "demo"}


class Trainings:
    """Makes the trainings of the tables at the paper's size."""

    small = False
    tasks: Sequence[Task] = TASKS

    def select_archs(self, archs: Sequence[str]) -> Sequence[str]:
        """Return the architectures of a table that are trained."""
        return archs

    def imagenet(self, arch: str, stem: str, seed: int, placement: str = "pre,pre") -> PaperTrial:
        """Pre-training on ImageNet-1k, Appendix C."""
        placement_options = () if placement == "pre,pre" else ("--placement", placement)
        name = f"imagenet/{_slug(arch, stem, *placement_options[1:])}/seed{seed}"
        words = ("imagenet", "--arch", arch, "--stem", stem, *placement_options, "--seed", str(seed), *LOGGED)
        network = None if placement_options else (arch, stem)
        return PaperTrial(name, "pretrain", words, (("--data", "imagenet"),), network=network)

    def deit(self, arch: str, stem: str, seed: int, norm: str = "ln") -> PaperTrial:
        """Pre-training on ImageNet-1k with DeiT's config."""
        normed = () if norm == "ln" else ("--norm", norm)
        name = f"deit/{_slug(arch, stem, *normed[1:])}/seed{seed}"
        words = ("imagenet", "--base-config", "deit", "--arch", arch, "--stem", stem, *normed, "--seed", str(seed))
        return PaperTrial(name, "pretrain", words, (("--data", "imagenet"),))

    def s16plus(self, stem: str, seed: int) -> PaperTrial:
        """Pre-training of S/16+ on ImageNet-1k."""
        words = ("s16plus", "--stem", stem, "--seed", str(seed))
        return PaperTrial(f"s16plus/{stem}/seed{seed}", "pretrain", words, (("--data", "imagenet"),))

    def large(self, source: str, steps: int, arch: str, stem: str, seed: int = 0) -> PaperTrial:
        """Pre-training by steps on ImageNet-21k or JFT, with a final probe on ImageNet-1k; once for all seeds."""
        words = (source, "--arch", arch, "--stem", stem, "--steps", str(steps))
        data = (("--data", source), ("--fewshot-data", "imagenet"))
        return PaperTrial(f"{source}-{steps // 1000}k/{_slug(arch, stem)}/seed0", "pretrain", words, data)

    def highres(self, pixels: int, start: PaperTrial, seed: int) -> PaperTrial:
        """Fine-tuning on ImageNet-1k at another resolution, Appendix D."""
        words = ("--image-size", str(pixels), "--seed", str(seed))
        name = f"highres-{pixels}/{_slug_of_start(start)}/seed{seed}"
        return PaperTrial(name, "finetune highres", words, (("--data", "imagenet"),), start)

    def vtab(self, start: PaperTrial, seeds: int) -> PaperTrial:
        """The sweep over VTAB-1k, with seeds of its own."""
        words = ("--seeds", str(seeds))
        return PaperTrial(
            f"vtab/{_slug_of_start(start)}/{seeds}-seeds", "finetune vtab", words, (("--data", "vtab-1k"),), start
        )

    def lit(self, start: PaperTrial, seed: int) -> PaperTrial:
        """A text tower trained against a frozen image tower, scored on ImageNet-1k."""
        data = (("--data", "pairs"), ("--zeroshot-data", "imagenet"))
        return PaperTrial(f"lit/{_slug_of_start(start)}/seed{seed}", "lit train", ("--seed", str(seed)), data, start)

    def segmentation(self, fraction: str, start: PaperTrial, seed: int) -> PaperTrial:
        """Segmentation of ADE20K with a part of its training images, Appendix G."""
        name = f"ade20k/{_slug_of_start(start)}-{fraction.replace('/', '-')}/seed{seed}"
        words = ("--fraction", fraction, "--seed", str(seed))
        return PaperTrial(name, "segment ade20k", words, (("--data", "ADEChallengeData2016"),), start)

    shifted_arch = "nano/4"

    def photographs(self, stem: str, seed: int, *remedy: str) -> PaperTrial:
        """A small network from scratch, scored under shifts; a `remedy` is an option and its value."""
        words: tuple[str, ...] = ("--arch", self.shifted_arch, "--stem", stem, "--config", "pretrain_own")
        words += ("--image-size", "32", "--augment", "none", "--flip")
        words += ("--set", "data.crop=inception", "--set", "data.eval_resize=32")
        words += (*remedy, "--steps", "1000", "--batch-size", "128", "--seed", str(seed), *SHIFTED)
        name = f"photographs/{_slug(stem, *(word.strip('-') for word in remedy))}/seed{seed}"
        return PaperTrial(name, "pretrain", words, (("--data", "photographs"),))

    def distilled(self, start: PaperTrial, seed: int) -> PaperTrial:
        """A student of such a plain network, without labels."""
        words = ("--jitter", "0", "--steps", "1000", "--batch-size", "64", "--seed", str(seed), *SHIFTED)
        name = f"distill/{_slug_of_start(start)}/seed{seed}"
        return PaperTrial(name, "distill", words, (("--data", "photographs"),), start, start_option="--teacher")

    def sun397(self, arch: str, stem: str) -> PaperTrial:
        """The search of Appendix F."""
        words = ("sun397", "--arch", arch, "--stem", stem)
        return PaperTrial(f"sun397/{_slug(arch, stem)}/seed0", "pretrain", words, (("--data", "sun397"),))


class SmallTrainings(Trainings):
    """Makes the same trainings at the demo's size: its tower, generated scenes and few steps."""

    small = True
    tasks = DEMO_TASKS
    arch = "nano/8"
    steps = 100

    def select_archs(self, archs: Sequence[str]) -> Sequence[str]:
        """One architecture stands for all."""
        return archs[:1]

    def imagenet(self, arch: str, stem: str, seed: int, placement: str = "pre,pre") -> PaperTrial:
        """The demo's pre-training."""
        placement_options = () if placement == "pre,pre" else ("--placement", placement)
        words = ("--stem", stem, *placement_options, "--seed", str(seed), *self._length(), *LOGGED, *DEMO)
        return PaperTrial(f"imagenet/{_slug(stem, *placement_options[1:])}/seed{seed}", "pretrain", words)

    def deit(self, arch: str, stem: str, seed: int, norm: str = "ln") -> PaperTrial:
        """DeiT's config on the demo's scenes."""
        normed = () if norm == "ln" else ("--norm", norm)
        words = (
            "imagenet",
            "--base-config",
            "deit",
            *self._network(stem),
            *normed,
            "--seed",
            str(seed),
            *self._length(),
        )
        return PaperTrial(f"deit/{_slug(stem, *normed[1:])}/seed{seed}", "pretrain", (*words, *DEMO))

    def s16plus(self, stem: str, seed: int) -> PaperTrial:
        """The config of S/16+ on the demo's scenes."""
        words = ("s16plus", *self._network(stem), "--seed", str(seed), *self._length(), *DEMO)
        return PaperTrial(f"s16plus/{stem}/seed{seed}", "pretrain", words)

    def large(self, source: str, steps: int, arch: str, stem: str, seed: int = 0) -> PaperTrial:
        """Pre-training on the demo's scenes, with a probe on them."""
        longer = 1 if steps < 500_000 else 2
        words = (source, *self._network(stem), *self._length(longer), "--fewshot-data", "demo", *DEMO)
        augment = ("--augment", "none") if source == "imagenet21k" else ()
        return PaperTrial(f"{source}-{steps // 1000}k/{_slug(stem)}/seed0", "pretrain", (*words, *augment))

    def highres(self, pixels: int, start: PaperTrial, seed: int) -> PaperTrial:
        """Fine-tuning on the demo's scenes."""
        size = {224: "64", 384: "96"}[pixels]
        words = ("--image-size", size, "--seed", str(seed), *self._length(), *DEMO)
        return PaperTrial(f"highres-{size}/{_slug_of_start(start)}/seed{seed}", "finetune highres", words, start=start)

    def vtab(self, start: PaperTrial, seeds: int) -> PaperTrial:
        """The demo's tasks."""
        words = ("--seeds", str(seeds), "--steps", str(self.steps // 2), *DEMO)
        return PaperTrial(f"vtab/{_slug_of_start(start)}/{seeds}-seeds", "finetune vtab", words, start=start)

    def lit(self, start: PaperTrial, seed: int) -> PaperTrial:
        """A text tower for the demo's scenes."""
        words = ("--seed", str(seed), "--steps", str(self.steps), *DEMO)
        return PaperTrial(f"lit/{_slug_of_start(start)}/seed{seed}", "lit train", words, start=start)

    def segmentation(self, fraction: str, start: PaperTrial, seed: int) -> PaperTrial:
        """The demo's masks."""
        words = ("--fraction", fraction, "--seed", str(seed), "--steps", str(self.steps), *DEMO)
        name = f"ade20k/{_slug_of_start(start)}-{fraction.replace('/', '-')}/seed{seed}"
        return PaperTrial(name, "segment ade20k", words, start=start)

    shifted_arch = arch

    def photographs(self, stem: str, seed: int, *remedy: str) -> PaperTrial:
        """The demo's pre-training, scored under shifts."""
        words = ("--stem", stem, *remedy, "--seed", str(seed), *self._length(), *SHIFTED, *DEMO)
        name = f"photographs/{_slug(stem, *(word.strip('-') for word in remedy))}/seed{seed}"
        return PaperTrial(name, "pretrain", words)

    def distilled(self, start: PaperTrial, seed: int) -> PaperTrial:
        """A student of the demo's plain network."""
        words = ("--seed", str(seed), *self._length(), *SHIFTED, *DEMO)
        name = f"distill/{_slug_of_start(start)}/seed{seed}"
        return PaperTrial(name, "distill", words, start=start, start_option="--teacher")

    def sun397(self, arch: str, stem: str) -> PaperTrial:
        """A search on scenes in files."""
        words = ("sun397", *self._network(stem), "--batch-size", "32", "--set", SMALL_STAGES)
        return PaperTrial(f"sun397/{_slug(stem)}/seed0", "pretrain", words, (("--data", SCENES),))

    def _network(self, stem: str) -> tuple[str, ...]:
        return ("--arch", self.arch, "--image-size", "64", "--stem", stem)

    def _length(self, times: int = 1) -> tuple[str, ...]:
        return ("--batch-size", "64", "--steps", str(times * self.steps))


def _slug(*parts: str) -> str:
    return "-".join(parts).replace("/", "-").replace("*", "star").replace(",", "_")


def _slug_of_start(start: PaperTrial) -> str:
    """Return the name of what starts from a training: that of the training, without its seed."""
    return start.group.replace("/", "-")
