"""The dry run of a text tower's training."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dpn_cli.config.cost import Cost
from dpn_cli.data.pixels import count_readers, stream
from dpn_cli.data.resize import Size, resize
from dpn_cli.engine import fit as engine
from dpn_cli.engine.dry_run import DryRunSetup, Sampled, dry_run_fit, loaded_alone, summarize_network, with_loading
from dpn_cli.run.distributed import from_all
from dpn_cli.run.run import Run
from tasks.lit.batches import cached_batches, encoded_batches, tokenize
from tasks.lit.cache import BATCH
from tasks.lit.captions import CaptionedImages, Subset
from tasks.lit.config import LitConfig
from tasks.lit.features import Features, ImageEncoder
from tasks.lit.tokenizer import open_tokenizer
from tasks.lit.towers import Towers
from tasks.lit.train import encoder_of, job_of, load_tower, new_text_tower

# Bytes of a feature's number, and of a token.
FLOAT16, INT32 = 2, 4


def dry_run_training(run: Run[LitConfig], data: CaptionedImages, val: CaptionedImages, scored: int) -> Cost:
    """Measure a training in a dry run, its duration in steps, and return its cost, with the encoding of all images.

    Few images are encoded; with a cache they stand for those of a whole batch. `scored` is how many images are scored
    at the end. Raises as `dry_run_fit` does.
    """
    config, world, console = run.config, run.world, run.console
    tokenizer = open_tokenizer(config.text.tokenizer, config.text.context, config.text.clean)
    tower = load_tower(config, world)
    console.info(tower.report.summary())
    encoder = replace(encoder_of(config, tower, world), workers=0)
    features, seconds = _encode(_small_sample(data), encoder, count_readers(config.runtime.workers, len(data.captions)))
    size, seed = config.batch_size, config.seed

    def build_setup() -> DryRunSetup:
        text = new_text_tower(config, tower, tokenizer)
        if config.cache.use:
            repeated_rows = torch.arange(size) % len(features)
            texts = tokenize(_small_sample(data), tokenizer)
            batches = cached_batches(features, repeated_rows, texts, size, seed, world)
        else:
            texts = tokenize(data, tokenizer)
            batches = encoded_batches(data, encoder, texts, size, seed, world, steps=1, micro=BATCH)
        job = job_of(config, text, batches, world, engine.Outputs(warn=console.warn))
        towers = Towers(tower, text, tokenizer, config.loss, {}, data.reading.decoder, data.reading.exif)
        return DryRunSetup(
            engine.prepare(text, config.runtime, world), job, _sample_work(towers, encoder, _small_sample(val), scored)
        )

    text = new_text_tower(config, tower, tokenizer)
    name, weights = summarize_network(tower)
    weights += 4 * sum(parameter.numel() for parameter in text.parameters())
    del text
    cost = dry_run_fit(build_setup, name, run.folder.path, weights=weights)
    if not config.cache.use:
        return cost
    images = len(data.captions) + len(val.captions)
    numbers = (len(data.captions) * features.views + len(val.captions)) * features.width
    tokens = tokenizer.context * sum(map(len, data.captions))
    return replace(
        cost,
        cached=FLOAT16 * numbers + INT32 * tokens,
        cache_seconds=max(from_all(seconds)) / len(features) * images / world.size,
    )


def _small_sample(data: CaptionedImages) -> CaptionedImages:
    return Subset(data, range(min(BATCH, len(data.captions))))


def _read(samples: CaptionedImages, size: Size, skip_bad: bool) -> Tensor:
    with stream(samples, partial(resize, size=size), BATCH, workers=0, skip_bad=skip_bad) as parts:
        return torch.cat([part.images for part in parts])


def _encode(samples: CaptionedImages, encoder: ImageEncoder, workers: int) -> tuple[Features, float]:
    """Return the features of a few images and the seconds that they take, after one that warms up."""
    start_time = time.perf_counter()
    with loaded_alone(workers):
        images = _read(samples, encoder.read_size, encoder.skip_bad)
    read = time.perf_counter() - start_time
    encoder.encode_views(images[:1], [0])
    start_time = time.perf_counter()
    features = encoder.encode_views(images, range(len(images)))
    seconds = with_loading(time.perf_counter() - start_time, read, workers)
    return Features([features.half().numpy()], ()), seconds


def _sample_work(towers: Towers, encoder: ImageEncoder, samples: CaptionedImages, scored: int) -> Sampled:
    """Return the encoding of a few held-out images and of their sentences."""

    def load() -> Tensor:
        return _read(samples, encoder.size, encoder.skip_bad)

    def evaluate() -> None:
        encoder.encode(load())
        towers.encode_texts([text for texts in samples.captions for text in texts])

    return Sampled(len(samples.captions), evaluate, load, end=scored)
