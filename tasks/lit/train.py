"""LiT: data checked, images encoded once, the text tower trained, both towers kept in one file, retrieval scored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpn_cli.arch import SIZES, size_name
from dpn_cli.data.labelled import Labelled, fingerprint
from dpn_cli.data.reading import Reading
from dpn_cli.data.trained_on import record
from dpn_cli.engine import fit as engine
from dpn_cli.errors import DataError, DpnError
from dpn_cli.run import distributed
from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.console import Console, several
from dpn_cli.run.distributed import World
from dpn_cli.run.files import file_digest
from dpn_cli.run.folder import RunFolder, describe_device
from dpn_cli.run.kinds import DIGEST, resolve
from dpn_cli.run.sanity import result_warning
from dpn_cli.run.session import Session
from dpn_cli.weights.backbone import Backbone, backbone_of
from tasks.lit.batches import Texts, cached_batches, encoded_batches, tokenize
from tasks.lit.cache import BATCH, cached_features, data_fingerprint
from tasks.lit.captions import Captioned, Subset, captions_fingerprint
from tasks.lit.data import DEMO_SPLITS, CaptionSource, SceneClasses, open_pairs
from tasks.lit.encode import cache_root, image_encoder, retrieval_scores
from tasks.lit.evaluate import open_labelled, zeroshot
from tasks.lit.features import Features, ImageEncoder, digest_of
from tasks.lit.loss import ContrastiveLoss
from tasks.lit.options import Scoring
from tasks.lit.recipe import LitRecipe, in_steps
from tasks.lit.samples import NearestImages, keep_prompts
from tasks.lit.text import TextTower
from tasks.lit.tokens import Tokenizer, open_tokenizer
from tasks.lit.towers import WEIGHTS, Towers, load_towers, save_towers
from tasks.lit.zeroshot import build_classifier, classify, prompt_set

Json = dict[str, Any]


def source_of(recipe: LitRecipe) -> CaptionSource:
    """Return where the recipe's captioned images are."""
    data = recipe.data
    return CaptionSource(
        data.source or "demo",
        data.val_source,
        data.val_fraction,
        data.images,
        data.image_column,
        data.caption_column,
        data.skip_bad_images,
        Reading(data.decode, data.max_pixels),
    )


def load_tower(recipe: LitRecipe, world: World) -> Backbone:
    """Load the image tower, frozen for good. Raises as `load_backbone` does."""
    place = recipe.backbone.checkpoint and resolve(recipe.backbone.checkpoint, "dpn lit train")
    tower = backbone_of(recipe.backbone, checkpoint=place, seed=recipe.seed)
    tower.requires_grad_(False).to(world.device).eval()
    return tower


def recipe_encoder(recipe: LitRecipe, tower: Backbone, world: World) -> ImageEncoder:
    """Return how the images that are trained on are encoded.

    Views are the same for every seed, so that seeds share a cache; which view is seen at a visit is up to the seed.
    """
    skip_bad = recipe.data.skip_bad_images
    return image_encoder(tower, recipe.runtime, world, views=recipe.cache.views, skip_bad=skip_bad)


def train(begun: Session[LitRecipe]) -> Json:
    """Run or finish a training in the folder of the run and return its result, which is written there too.

    Raises `DpnError` and its subclasses; what was encoded and trained until then is kept.
    """
    recipe, folder, world, console = begun.recipe, begun.folder, begun.world, begun.console
    pairs, val = open_pairs(source_of(recipe))
    tokenizer = open_tokenizer(recipe.text.tokenizer, recipe.text.context, recipe.text.clean)
    tower = load_tower(recipe, world)
    before = digest_of(tower)
    facts = _check_data(pairs, val, open_zeroshot(recipe), tokenizer, before, folder, world)
    if world.leads:
        folder.update(backbone=tower.report.to_dict(), **{DIGEST: None})
    console.info(tower.report.summary())
    plain = replace(recipe_encoder(recipe, tower, world), views=0)
    root = cache_root(recipe.cache.folder) if recipe.cache.use else None
    if not distributed.from_leader((folder.path / WEIGHTS).is_file()):
        in_steps(recipe, len(pairs.captions))  # what cannot be trained is told before anything is encoded
        if root:  # and an unreadable image to be scored on before anything is trained
            cached_features(val, plain, root, world, console)
        training = _TextTraining(begun, pairs, tower, tokenizer, facts)
        with begun.outputs("lit", begun.tracker(recipe.runtime.report_to)) as outputs:
            job = job_of(training.recipe, training.text, training.batches(), world, outputs)
            done = engine.fit(engine.prepare(training.text, recipe.runtime, world), job)
        training.keep(done)
    towers = load_towers(str(folder.path)).to(world.device)
    if digest_of(tower) != before:
        raise DpnError(f"{folder.path}: the training changed the frozen image tower; its result is invalid")
    if digest_of(towers.image) != before:
        raise DataError(f"{folder.path / WEIGHTS}: holds another image tower than the run's; start another run with -o")
    scores = retrieval_scores(towers, val, plain, root, recipe.runtime, world, console, keep=folder.path)
    result = {
        "task": "lit",
        "arch": towers.facts["arch"],
        "stem": recipe.backbone.stem,
        "image_size": list(towers.image.config.image_size),
        "text": {"size": size_name(towers.text.size), "context": tokenizer.context},
        "tokenizer": tokenizer.to_dict(),
        "loss": recipe.loss,
        "retrieval": scores,
        **{name: towers.facts[name] for name in ("pairs", "left_out", "cut", "train_loss", "temperature")},
        "timing": folder.timing,
        "steps": towers.facts["steps"],
        "batch_size": recipe.batch_size,
        "image_tower": before,
        "data": facts["data"],
        DIGEST: file_digest(folder.path / WEIGHTS),
        "decoder": val.reading.versions(),
        "differs_from_paper": begun.differs,
        **_zeroshot(towers, begun),
    }
    for warning in _warnings(result):
        console.warn(warning)
    if world.leads:
        folder.finish(result)
    return result


def _warnings(result: Json) -> Iterator[str]:
    """Yield what to say of scores that are not above chance."""
    retrieval, scored = result["retrieval"], result.get("zeroshot")
    scores = [
        (
            f"held-out {way.replace('_', ' ')} R@5",
            retrieval[f"{way}@5"],
            {"chance": retrieval["chance@5"]},
            retrieval[count],
        )
        for way, count in (("image_to_text", "images"), ("text_to_image", "captions"))
    ]
    if scored:
        floors = scored.get("floors") or {"chance": scored["chance"]}
        scores.append(("zero-shot top-1", scored["top1"], floors, scored["images"]))
    for score in scores:
        if warning := result_warning(*score):
            yield warning


def _check_data(
    train: Captioned,
    val: Captioned,
    labelled: Labelled | None,
    tokenizer: Tokenizer,
    image_tower: str,
    folder: RunFolder,
    world: World,
) -> Json:
    """See that a resumed run meets the images, captions, tokenizer and image tower it began with."""
    facts: Json = {
        **fingerprints(train, val),
        "tokenizer": tokenizer.to_dict(),
        "image_tower": image_tower,
    }
    if labelled:
        facts["data"]["zeroshot"] = fingerprint(labelled)
    before = distributed.from_leader(folder.facts)
    words = {
        "data": "images have",
        "captions": "captions have",
        "tokenizer": "tokenizer or its settings have",
        "image_tower": "image tower's weights have",
    }
    for name, word in words.items():
        if name in before and before[name] != facts[name]:
            raise DataError(f"{folder.path}: the {word} changed since this run began; start another with -o")
    if world.leads:
        folder.update(device=describe_device(world.device), ranks=world.size, status="running", **facts)
    return facts


def fingerprints(train: Captioned, val: Captioned) -> Json:
    """Return hashes of the images and of the sentences of both splits."""
    return {
        "data": {"train": data_fingerprint(train), "val": data_fingerprint(val)},
        "captions": {"train": captions_fingerprint(train), "val": captions_fingerprint(val)},
    }


def new_text_tower(recipe: LitRecipe, tower: Backbone, tokenizer: Tokenizer) -> TextTower:
    """Return the text tower before training. Raises `DpnError` when the image tower has no size that it could take."""
    name = recipe.text.size or size_name(tower.config.size)
    if name is None:
        raise DpnError(f"--text-size: the image tower has no standard size; choose one of {', '.join(SIZES)}")
    bias = recipe.bias if recipe.loss == "siglip" else None
    text = TextTower(
        SIZES[name], tokenizer.vocabulary, tokenizer.context, tower.embed_dim, recipe.temperature, bias, recipe.seed
    )
    text.transformer.set_grad_checkpointing(recipe.text.grad_checkpointing)
    return text


def _prepare(
    recipe: LitRecipe, data: Captioned, tokenizer: Tokenizer, encoder: ImageEncoder, world: World, console: Console
) -> tuple[Features | None, Tensor, Texts]:
    """Return the cached features (None without a cache), which images they are of, and all captions as tokens."""
    root = cache_root(recipe.cache.folder)
    features = cached_features(data, encoder, root, world, console) if recipe.cache.use else None
    bad = set(features.bad) if features else set()
    good = torch.tensor([row for row in range(len(data.captions)) if row not in bad], dtype=torch.long)
    if world.leads:
        tokenize(data, tokenizer, root)
    distributed.barrier()
    texts = tokenize(data, tokenizer, root)
    console.info(
        f"{len(good)} images with {texts.count(good)} captions to train on; {texts.cut} captions are longer than "
        f"{tokenizer.context} tokens and are cut, their end token kept"
    )
    if bad or data.dropped:
        console.warn(f"{len(bad)} unreadable images and {data.dropped} without text or file are left out")
    return features, good, texts


def job_of(
    recipe: LitRecipe, text: TextTower, batches: engine.Batches, world: World, outputs: engine.Outputs
) -> engine.Job:
    """Return the engine's job: the text tower's training by a recipe whose duration is in steps."""
    return engine.Job.of(
        recipe,
        loss_fn=ContrastiveLoss(recipe.loss, world),
        gauges=lambda: {"temperature": text.log_temperature.exp().item()},
        batches=batches,
        world=world,
        outputs=outputs,
    )


class _TextTraining:
    """The training of a text tower: what is trained on, the tower, and what is kept of it."""

    def __init__(
        self, begun: Session[LitRecipe], data: Captioned, tower: Backbone, tokenizer: Tokenizer, facts: Json
    ) -> None:
        self.begun, self.data, self.tower, self.tokenizer, self.facts = begun, data, tower, tokenizer, facts
        world, console = begun.world, begun.console
        self.encoder = recipe_encoder(begun.recipe, tower, world)
        self.features, self.good, self.texts = _prepare(begun.recipe, data, tokenizer, self.encoder, world, console)
        self.recipe = recipe = in_steps(begun.recipe, len(self.good), console.info)
        self.text = new_text_tower(recipe, tower, tokenizer)
        console.info(
            f"text tower {recipe.text.size or size_name(tower.config.size)}: "
            f"{sum(p.numel() for p in self.text.parameters()) / 1e6:.2f} M weights to train, the image tower is "
            f"frozen; {several(recipe.schedule.steps, 'step')} of {recipe.batch_size} pairs, "
            f"{recipe.schedule.steps * recipe.batch_size / len(self.good):.2f} epochs"
        )

    def batches(self) -> engine.Batches:
        """Return batches of cached features, or of images that are encoded at every visit."""
        recipe, world = self.recipe, self.begun.world
        if self.features is None:
            return encoded_batches(
                self.data, self.encoder, self.texts, recipe.batch_size, recipe.seed, world,
                steps=recipe.schedule.steps, micro=BATCH,
            )  # fmt: skip
        return cached_batches(self.features, self.good, self.texts, recipe.batch_size, recipe.seed, world)

    def keep(self, done: engine.FitResult) -> None:
        """Write both towers' file."""
        recipe, data, good, world = self.recipe, self.data, self.good, self.begun.world
        loss = distributed.reduce_over_ranks(torch.tensor(done.loss)).item() / world.size
        path = self.begun.folder.path
        trained = {
            "arch": self.tower.config.arch,
            "pairs": {"images": len(good), "captions": self.texts.count(good)},
            "left_out": {"without_text_or_file": data.dropped, "unreadable": len(data.captions) - len(good)},
            "cut": self.texts.cut,
            "train_loss": loss,
            "temperature": self.text.log_temperature.exp().item(),
            "steps": recipe.schedule.steps,
            "recipe": recipe.model_dump(mode="json"),
            "data": self.facts["data"],
            "trained_on": record(Subset(data, good.tolist())) if world.leads else None,
        }
        if world.leads:
            towers = Towers(self.tower, self.text, self.tokenizer, recipe.loss, trained, data.reading.decoder)
            self.begun.folder.note_time(done.seconds, done.wait_seconds)
            save_towers(towers, path / WEIGHTS)
            Checkpoints(path / "checkpoints").clear()
        distributed.barrier()


def zeroshot_options(recipe: LitRecipe, folder: Path) -> Scoring | None:
    """Return the options of ``dpn lit eval`` by which a run is scored at its end; None where it is not."""
    data = recipe.data
    if data.zeroshot is None:
        return None
    return Scoring(
        run=str(folder),
        source=data.zeroshot,
        skip_bad_images=data.skip_bad_images,
        force=True,  # what is not above chance is a warning at the end of a training
        runtime=recipe.runtime,
        output_dir=folder,
    )


def open_zeroshot(recipe: LitRecipe) -> Labelled | None:
    """Open the labelled images that a run is scored on at its end. Raises `DataError`."""
    options = zeroshot_options(recipe, Path())
    return open_labelled(options, source_of(recipe).reading)[0] if options else None


def _zeroshot(towers: Towers, begun: Session[LitRecipe]) -> Json:
    """Return the zero-shot accuracy on the images that the recipe names, of the demo on its own, else nothing."""
    recipe, world = begun.recipe, begun.world
    if options := zeroshot_options(recipe, begun.folder.path):
        return {"zeroshot": zeroshot(towers, options, source_of(recipe).reading, world, begun.console)}
    return {"zeroshot": demo_zeroshot(towers, recipe, world, begun.folder.path)} if recipe.demo else {}


def demo_zeroshot(towers: Towers, recipe: LitRecipe, world: World, folder: Path) -> Json:
    """Return the zero-shot accuracy on held-out scenes: which of 24 coloured shapes is the largest object.

    The leading rank writes what a page shows of it to a folder.
    """
    split = SceneClasses(*DEMO_SPLITS["val"])
    nearest = NearestImages(split.classes)
    with engine.precision_of(recipe.runtime, world.device):
        weights = build_classifier(towers, split.classes, prompt_set("demo"))
        scores = classify(towers, weights, split, world, workers=0, batch_size=BATCH, skip_bad=False, nearest=nearest)
    best = nearest.gather()
    if world.leads:
        keep_prompts(folder, split, nearest, best)
    return {
        "top1": scores.top1,
        "images": scores.images,
        "classes": len(split.classes),
        "chance": 100 / len(split.classes),
        "floors": scores.floors,
        "prompts": "demo",
    }
