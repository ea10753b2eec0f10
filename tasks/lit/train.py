"""LiT: data checked, images encoded once, the text tower trained, both towers kept in one file, retrieval scored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpn_cli.arch import SIZES, size_name
from dpn_cli.data.leakage import record
from dpn_cli.data.sources.base import LabelledImages, fingerprint
from dpn_cli.data.turned_images import describe_turned_sample
from dpn_cli.engine import fit as engine
from dpn_cli.errors import DataError, DpnError
from dpn_cli.run import distributed
from dpn_cli.run.artifact_kinds import DIGEST, resolve
from dpn_cli.run.baseline_warnings import result_warning
from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.console import Console, count_noun
from dpn_cli.run.distributed import World
from dpn_cli.run.files import file_digest
from dpn_cli.run.run import Run
from dpn_cli.run.run_dir import RunFolder, describe_device
from dpn_cli.weights.backbone import Backbone, backbone_of
from tasks.lit.batches import TokenBatches, cached_batches, encoded_batches, tokenize
from tasks.lit.cache import BATCH, cached_features, data_fingerprint
from tasks.lit.captions import CaptionedImages, Subset, captions_fingerprint
from tasks.lit.config import LitConfig, resolve_steps
from tasks.lit.data import open_pairs
from tasks.lit.encode import cache_root, image_encoder, retrieval_scores
from tasks.lit.features import Features, ImageEncoder, digest_of
from tasks.lit.final_zeroshot import open_zeroshot, source_of, zeroshot_of_run
from tasks.lit.loss import ContrastiveLoss
from tasks.lit.text_tower import TextTower
from tasks.lit.tokenizer import Tokenizer, open_tokenizer
from tasks.lit.towers import WEIGHTS, Towers, load_lit, save_towers

Json = dict[str, Any]


def load_tower(config: LitConfig, world: World) -> Backbone:
    """Load the image tower, frozen for good. Raises as `load_backbone` does."""
    checkpoint = config.backbone.checkpoint and resolve(config.backbone.checkpoint, "dpn lit train")
    tower = backbone_of(config.backbone, checkpoint=checkpoint, seed=config.seed)
    tower.requires_grad_(False).to(world.device).eval()
    return tower


def encoder_of(config: LitConfig, tower: Backbone, world: World) -> ImageEncoder:
    """Return how the images that are trained on are encoded.

    Views are the same for every seed, so that seeds share a cache; which view is seen at a visit is up to the seed.
    """
    skip_bad = config.data.skip_bad_images
    return image_encoder(tower, config.runtime, world, views=config.cache.views, skip_bad=skip_bad)


def train(run: Run[LitConfig]) -> Json:
    """Run or finish a training in the folder of the run and return its result, which is written there too.

    Raises `DpnError` and its subclasses; what was encoded and trained until then is kept.
    """
    config, folder, world, console = run.config, run.folder, run.world, run.console
    pairs, val = open_pairs(source_of(config))
    tokenizer = open_tokenizer(config.text.tokenizer, config.text.context, config.text.clean)
    tower = load_tower(config, world)
    initial_digest = digest_of(tower)
    facts = _check_data(pairs, val, open_zeroshot(config), tokenizer, initial_digest, folder, world)
    if world.leads:
        folder.update(backbone=tower.report.to_dict(), **{DIGEST: None})
        if message := describe_turned_sample(pairs, len(pairs.captions), pairs.reading.exif):
            console.info(message)
    console.info(tower.report.summary())
    plain = replace(encoder_of(config, tower, world), views=0)
    root = cache_root(config.cache.folder) if config.cache.use else None
    if not distributed.from_leader((folder.path / WEIGHTS).is_file()):
        resolve_steps(config, len(pairs.captions))  # raises before anything is encoded
        if root:  # and an unreadable image to be scored on before anything is trained
            cached_features(val, plain, root, world, console)
        training = _TextTraining(run, pairs, tower, tokenizer, facts)
        run.record_precision(config.runtime, training.text, tower)
        with run.outputs("lit", run.tracker(config.runtime.report_to)) as outputs:
            job = job_of(training.config, training.text, training.batches(), world, outputs)
            fit_result = engine.fit(engine.prepare(training.text, config.runtime, world), job)
        training.keep(fit_result)
    towers = load_lit(str(folder.path)).to(world.device)
    if digest_of(tower) != initial_digest:
        raise DpnError(f"{folder.path}: the training changed the frozen image tower; its result is invalid")
    if digest_of(towers.image) != initial_digest:
        raise DataError(f"{folder.path / WEIGHTS}: holds another image tower than the run's; start another run with -o")
    scores = retrieval_scores(towers, val, plain, root, config.runtime, world, console, features_folder=folder.path)
    result = {
        "task": "lit",
        "arch": towers.facts["arch"],
        "stem": config.backbone.stem,
        "image_size": list(towers.image.config.image_size),
        "text": {"size": size_name(towers.text.size), "context": tokenizer.context},
        "tokenizer": tokenizer.to_dict(),
        "loss": config.loss,
        "retrieval": scores,
        **{name: towers.facts[name] for name in ("pairs", "left_out", "cut", "train_loss", "temperature")},
        "timing": folder.timing,
        "precision": folder.precision,
        "steps": towers.facts["steps"],
        "batch_size": config.batch_size,
        "image_tower": initial_digest,
        "data": facts["data"],
        DIGEST: file_digest(folder.path / WEIGHTS),
        "decoder": val.reading.versions(),
        "differs_from_paper": run.differs,
        **zeroshot_of_run(towers, run),
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
            f"held-out {direction.replace('_', ' ')} R@5",
            retrieval[f"{direction}@5"],
            {"chance": retrieval["chance@5"]},
            retrieval[count],
        )
        for direction, count in (("image_to_text", "images"), ("text_to_image", "captions"))
    ]
    if scored:
        floors = scored.get("floors") or {"chance": scored["chance"]}
        scores.append(("zero-shot top-1", scored["top1"], floors, scored["images"]))
    for score in scores:
        if warning := result_warning(*score):
            yield warning


def _check_data(
    train: CaptionedImages,
    val: CaptionedImages,
    labelled: LabelledImages | None,
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
    saved_facts = distributed.from_leader(folder.facts)
    words = {
        "data": "images have",
        "captions": "captions have",
        "tokenizer": "tokenizer or its settings have",
        "image_tower": "image tower's weights have",
    }
    for name, word in words.items():
        if name in saved_facts and saved_facts[name] != facts[name]:
            raise DataError(f"{folder.path}: the {word} changed since this run started; start another with -o")
    if world.leads:
        folder.update(device=describe_device(world.device), ranks=world.size, status="running", **facts)
    return facts


def fingerprints(train: CaptionedImages, val: CaptionedImages) -> Json:
    """Return hashes of the images and of the sentences of both splits."""
    return {
        "data": {"train": data_fingerprint(train), "val": data_fingerprint(val)},
        "captions": {"train": captions_fingerprint(train), "val": captions_fingerprint(val)},
    }


def new_text_tower(config: LitConfig, tower: Backbone, tokenizer: Tokenizer) -> TextTower:
    """Return the text tower before training. Raises `DpnError` when the image tower has no size that it could take."""
    name = config.text.size or size_name(tower.config.size)
    if name is None:
        raise DpnError(f"--text-size: the image tower has no standard size; choose one of {', '.join(SIZES)}")
    bias = config.bias if config.loss == "siglip" else None
    text = TextTower(
        SIZES[name], tokenizer.vocabulary, tokenizer.context, tower.embed_dim, config.temperature, bias, config.seed
    )
    text.transformer.set_grad_checkpointing(config.text.grad_checkpointing)
    return text


def _prepare(
    config: LitConfig,
    data: CaptionedImages,
    tokenizer: Tokenizer,
    encoder: ImageEncoder,
    world: World,
    console: Console,
) -> tuple[Features | None, Tensor, TokenBatches]:
    """Return the cached features (None without a cache), which images they are of, and all captions as tokens."""
    root = cache_root(config.cache.folder)
    features = cached_features(data, encoder, root, world, console) if config.cache.use else None
    unreadable = set(features.bad) if features else set()
    readable = torch.tensor([row for row in range(len(data.captions)) if row not in unreadable], dtype=torch.long)
    if world.leads:
        tokenize(data, tokenizer, root)
    distributed.barrier()
    texts = tokenize(data, tokenizer, root)
    console.info(
        f"{len(readable)} images with {texts.count(readable)} captions to train on; {texts.cut} captions are longer "
        f"than {tokenizer.context} tokens and are cut, their end token kept"
    )
    if unreadable or data.dropped:
        console.warn(f"{len(unreadable)} unreadable images and {data.dropped} without text or file are left out")
    return features, readable, texts


def job_of(
    config: LitConfig, text: TextTower, batches: engine.Batches, world: World, outputs: engine.Outputs
) -> engine.TrainJob:
    """Return the engine's job: the text tower's training by a config whose duration is in steps."""
    return engine.TrainJob.from_config(
        config,
        loss_fn=ContrastiveLoss(config.loss, world),
        gauges=lambda: {"temperature": text.log_temperature.exp().item()},
        batches=batches,
        world=world,
        outputs=outputs,
    )


class _TextTraining:
    """The training of a text tower: what is trained on, the tower, and what is kept of it."""

    def __init__(
        self, run: Run[LitConfig], data: CaptionedImages, tower: Backbone, tokenizer: Tokenizer, facts: Json
    ) -> None:
        self.run, self.data, self.tower, self.tokenizer, self.facts = run, data, tower, tokenizer, facts
        world, console = run.world, run.console
        self.encoder = encoder_of(run.config, tower, world)
        self.features, self.good, self.texts = _prepare(run.config, data, tokenizer, self.encoder, world, console)
        self.config = config = resolve_steps(run.config, len(self.good), console.info)
        self.text = new_text_tower(config, tower, tokenizer)
        console.info(
            f"text tower {config.text.size or size_name(tower.config.size)}: "
            f"{sum(p.numel() for p in self.text.parameters()) / 1e6:.2f} M weights to train, the image tower is "
            f"frozen; {count_noun(config.schedule.steps, 'step')} of {config.batch_size} pairs, "
            f"{config.schedule.steps * config.batch_size / len(self.good):.2f} epochs"
        )

    def batches(self) -> engine.Batches:
        """Return batches of cached features, or of images that are encoded at every visit."""
        config, world = self.config, self.run.world
        if self.features is None:
            return encoded_batches(
                self.data, self.encoder, self.texts, config.batch_size, config.seed, world,
                steps=config.schedule.steps, micro=BATCH,
            )  # fmt: skip
        return cached_batches(self.features, self.good, self.texts, config.batch_size, config.seed, world)

    def keep(self, result: engine.FitResult) -> None:
        """Write both towers' file."""
        config, data, good, world = self.config, self.data, self.good, self.run.world
        loss = distributed.reduce_over_ranks(torch.tensor(result.loss)).item() / world.size
        path = self.run.folder.path
        trained = {
            "arch": self.tower.config.arch,
            "pairs": {"images": len(good), "captions": self.texts.count(good)},
            "left_out": {"without_text_or_file": data.dropped, "unreadable": len(data.captions) - len(good)},
            "cut": self.texts.cut,
            "train_loss": loss,
            "temperature": self.text.log_temperature.exp().item(),
            "steps": config.schedule.steps,
            "config": config.model_dump(mode="json"),
            "data": self.facts["data"],
            "trained_on": record(Subset(data, good.tolist())) if world.leads else None,
        }
        if world.leads:
            reading = data.reading
            towers = Towers(self.tower, self.text, self.tokenizer, config.loss, trained, reading.decoder, reading.exif)
            self.run.folder.record_time(result.seconds, result.wait_seconds)
            save_towers(towers, path / WEIGHTS)
            Checkpoints(path / "checkpoints").clear()
        distributed.barrier()
