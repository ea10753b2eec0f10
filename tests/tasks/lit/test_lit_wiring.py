"""What `dpn lit train` was asked reaches the training: data, seed, weights, views, captions; and what is scored."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from open_clip.tokenizer import SimpleTokenizer
from PIL import Image
from torch import Tensor, nn

from dpn_cli.arch import SIZES
from dpn_cli.config.load import merge
from dpn_cli.config.schema import Runtime
from dpn_cli.data.decode import ReadOptions
from dpn_cli.data.resize import resize
from dpn_cli.data.sampler import rows_of_step
from dpn_cli.engine import fit as engine
from dpn_cli.engine.fit import Batch, TrainJob
from dpn_cli.errors import DataError, DpnError
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import Backbone, export_backbone, load_backbone
from support.captions import caption_of, write_colour_pairs
from support.images import png_bytes, write_png_images
from support.lit import lit_config, train_lit
from support.ranks import CPU
from tasks.lit import cache
from tasks.lit.batches import cached_batches, encoded_batches, tokenize
from tasks.lit.cache import cached_features
from tasks.lit.captions import CaptionedFiles
from tasks.lit.config import LitConfig
from tasks.lit.data import CaptionSource, open_split
from tasks.lit.encode import encode_all, image_encoder
from tasks.lit.features import Features, views_of
from tasks.lit.final_zeroshot import source_of
from tasks.lit.loss import ContrastiveLoss
from tasks.lit.retrieval import recalls
from tasks.lit.text_tower import TextTower
from tasks.lit.tokenizer import Tokenizer
from tasks.lit.towers import load_lit
from tasks.lit.train import load_tower

ALONE, QUIET = World(0, 1, CPU), Console(quiet=True)
TINY: dict[str, Any] = {
    "backbone": {"arch": "mu/8", "pool": "gap", "image_size": 16},
    "schedule": {"steps": 2, "warmup": 0},
    "batch_size": 4,
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_colour_pairs(tmp_path_factory.mktemp("pairs"), range(12))


def config_of(pairs: Path, **changes: Any) -> LitConfig:
    return lit_config(pairs, **merge(TINY, changes))


class ReachedError(Exception):
    """Raised in the place of a training."""


@dataclass
class Reached:
    """What a training is given."""

    text: TextTower
    first: Batch
    second: Batch
    job: TrainJob


def reached(config: LitConfig, path: Path, monkeypatch: pytest.MonkeyPatch) -> Reached:
    """Run `dpn lit train` up to its training."""
    actual: list[Reached] = []

    def fit(model: nn.Module, job: TrainJob) -> None:
        visits = job.batches(0)
        assert isinstance(model, TextTower)
        actual.append(Reached(model, next(visits), next(visits), job))
        visits.close()
        raise ReachedError

    with monkeypatch.context() as patched:
        patched.setattr(engine, "fit", fit)
        with pytest.raises(ReachedError):
            train_lit(config, path)
    return actual[0]


def by_hand(tower: Backbone, numbers: Sequence[int]) -> Tensor:
    """Encode images with a tower, without the parts under test."""
    images = [resize(np.asarray(Image.open(io.BytesIO(png_bytes(number)))), (16, 16)) for number in numbers]
    with torch.no_grad():
        return F.normalize(tower.eval()(tower.normalize(torch.stack(images))), dim=-1)


@pytest.mark.parametrize(
    ("backbone", "use_cache"),
    [({"pool": "gap"}, True), ({"pool": "tok"}, True), ({"pre_logits": True}, True), ({"stem": "none"}, False)],
)
def test_a_training_sees_the_chosen_towers_features_in_the_seeds_order(
    backbone: dict[str, Any], use_cache: bool, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"backbone": backbone, "cache": {"use": use_cache}, "seed": 3}
    actual = reached(config_of(pairs, **changes), tmp_path / "run", monkeypatch)
    options = {"stem": "dpn", "pool": "gap", **backbone}
    tower = load_backbone("mu/8", image_size=16, seed=3, **options)
    for step, batch in enumerate((actual.first, actual.second)):
        rows = rows_of_step(12, 4, 3, step).tolist()
        torch.testing.assert_close(batch["image"].float(), by_hand(tower, rows), atol=1e-3, rtol=0)
        texts = SimpleTokenizer(context_length=12, clean="canonicalize")([caption_of(row) for row in rows])
        assert torch.equal(batch["tokens"], texts)


def test_the_checkpoints_weights_are_the_towers(pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = load_backbone("mu/8", image_size=16, seed=9)
    export_backbone(tower, tmp_path / "tower.safetensors")
    backbone = {"arch": None, "pool": None, "checkpoint": str(tmp_path / "tower.safetensors")}
    actual = reached(config_of(pairs, backbone=backbone), tmp_path / "run", monkeypatch)
    rows = rows_of_step(12, 4, 0, 0).tolist()
    torch.testing.assert_close(actual.first["image"].float(), by_hand(tower, rows), atol=1e-3, rtol=0)


def test_the_configs_values_reach_the_training(pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {
        "seed": 5,
        "lr": 0.25,
        "loss": "siglip",
        "temperature": 7.0,
        "bias": -3.0,
        "optim": {"weight_decay": 0.125},
        "schedule": {"steps": 9, "warmup": 2},
        "text": {"size": "nano", "context": 5, "clean": "whitespace", "grad_checkpointing": True},
    }
    config = config_of(pairs, **changes)
    actual = reached(config, tmp_path / "run", monkeypatch)
    job = actual.job
    assert (job.optim, job.schedule, job.runtime) == (config.optim, config.schedule, config.runtime)
    assert (job.lr, job.batch_size, job.seed, job.ema_decay) == (0.25, 4, 5, None)
    assert (config.optim.weight_decay, config.schedule.steps) == (0.125, 9)
    assert isinstance(job.loss_fn, ContrastiveLoss)
    assert job.loss_fn.kind == "siglip"
    assert actual.text.bias is not None
    assert actual.text.bias.item() == -3
    assert actual.text.log_temperature.exp().item() == pytest.approx(7)
    assert actual.text.transformer.transformer.grad_checkpointing
    by_seed = [TextTower(SIZES["nano"], 49408, 5, 32, 7.0, -3.0, seed).state_dict() for seed in (5, 0)]
    assert all(torch.equal(value, by_seed[0][name]) for name, value in actual.text.state_dict().items())
    assert not all(torch.equal(value, by_seed[1][name]) for name, value in actual.text.state_dict().items())
    rows = rows_of_step(12, 4, 5, 0).tolist()
    texts = SimpleTokenizer(context_length=5, clean="whitespace")([caption_of(row) for row in rows])
    assert torch.equal(actual.first["tokens"], texts)


def test_training_views_come_from_the_cache_for_every_seed(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(pairs, seed=3, cache={"views": 4})
    actual = reached(config, tmp_path / "run", monkeypatch)
    encoder = image_encoder(load_tower(config, ALONE), Runtime(workers=0), ALONE, views=4)
    split, sample = open_split(CaptionSource(str(pairs)), "train"), set()
    for step, batch in enumerate((actual.first, actual.second)):
        for row, feature in zip(rows_of_step(12, 4, 3, step).tolist(), batch["image"].float(), strict=True):
            views = encoder.encode_views(resize(split.pixels(row), encoder.read_size)[None], [row])[0]
            near = [view for view in range(4) if torch.allclose(feature, views[view], atol=1e-3, rtol=0)]
            assert near
            sample.update(near)
    assert len(sample) > 1


def test_views_depend_on_the_image_and_not_on_its_batch(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = image_encoder(load_tower(config_of(pairs), ALONE), Runtime(workers=0), ALONE, views=3, seed=1)
    split, actual = open_split(CaptionSource(str(pairs)), "train"), []
    for batch in (2, 5):
        monkeypatch.setattr(cache, "BATCH", batch)
        actual.append(cached_features(split, encoder, tmp_path / str(batch), ALONE, QUIET).shards[0])
    assert np.abs(actual[0] - actual[1]).max() < 1e-3
    image = torch.randint(256, (1, 3, *encoder.read_size), dtype=torch.uint8)
    together = views_of(image.repeat(3, 1, 1, 1), [7, 7, 8], encoder)
    assert torch.equal(together[:3], together[3:6])
    assert not torch.equal(together[:3], together[6:])


def test_the_view_reports_nothing_of_the_caption(tmp_path: Path) -> None:
    files = CaptionedFiles(tmp_path)
    for name in write_png_images(tmp_path, 8):
        files.add(name, [f"{name} one", f"{name} two"], "here")
    texts = tokenize(files, Tokenizer(8, "whitespace"))
    features = Features([np.arange(16, dtype=np.float16).reshape(8, 2, 1)], ())
    visits = cached_batches(features, torch.arange(8), texts, 8, 0, ALONE)(0)
    captions = {tuple(row): number for number, row in enumerate(texts.tokens.tolist())}
    observed: set[tuple[int, int]] = set()
    for _ in range(30):
        batch = next(visits)
        tokens = [captions[tuple(row)] for row in batch["tokens"].tolist()]
        observed.update(zip(batch["image"][:, 0].int().tolist(), tokens, strict=True))
    assert observed == {
        (2 * image + view, 2 * image + text) for image in range(8) for view in (0, 1) for text in (0, 1)
    }


def test_views_and_captions_are_drawn_by_the_seed(tmp_path: Path) -> None:
    files = CaptionedFiles(tmp_path)
    (name,) = write_png_images(tmp_path, 1)
    files.add(name, [f"caption {letter}" for letter in "abcdefgh"], "here")
    texts = tokenize(files, Tokenizer(8, "whitespace"))
    features = Features([np.arange(8, dtype=np.float16).reshape(1, 8, 1)], ())
    sample: list[list[list[int]]] = []
    for seed in (5, 5, 6):
        visits = cached_batches(features, torch.arange(1), texts, 1, seed, ALONE)(0)
        batches = [next(visits) for _ in range(20)]
        sample.append([[*batch["image"][0].int().tolist(), *batch["tokens"][0].tolist()] for batch in batches])
    assert sample[0] == sample[1]
    views, captions = ([[row[part] for row in rows] for rows in sample] for part in (slice(1), slice(1, None)))
    assert views[0] != views[2]
    assert captions[0] != captions[2]


def test_cuts_without_a_cache_are_of_the_seed_and_the_images_of_one_batch_differ(tmp_path: Path) -> None:
    files = CaptionedFiles(tmp_path)
    for name in write_png_images(tmp_path, 1) * 4:
        files.add(name, ["a dog"], "here")
    tower = load_backbone("mu/8", image_size=16, seed=0).eval()
    encoder = image_encoder(tower, Runtime(workers=0), ALONE, views=1)
    encoder = replace(encoder, encode=lambda images: images.flatten(1).float())
    texts = tokenize(files, Tokenizer(8, "lower"))
    visits = [next(encoded_batches(files, encoder, texts, 4, seed, ALONE, steps=1, micro=4)(0)) for seed in (5, 5, 6)]
    same, second, other = (visit["image"] for visit in visits)
    assert torch.equal(same, second)
    assert not torch.equal(same, other)
    assert len({image.numpy().tobytes() for image in same}) > 1


@pytest.mark.parametrize("views", [0, 2])
def test_retrieval_is_scored_on_the_held_out_pairs(views: int, pairs: Path, tmp_path: Path) -> None:
    held = write_colour_pairs(tmp_path / "held", range(20, 31))
    config = config_of(pairs, data={"val_source": str(held)}, cache={"views": views})
    result = train_lit(config, tmp_path / "run")
    towers = load_lit(str(tmp_path / "run")).to(CPU)
    plain = image_encoder(towers.image, Runtime(workers=0), ALONE)
    images, _ = encode_all(open_split(CaptionSource(str(held)), "train"), plain, tmp_path / "cache", ALONE, QUIET)
    torch.testing.assert_close(images, by_hand(towers.image, range(20, 31)), atol=1e-3, rtol=0)
    expected = recalls(images, towers.encode_texts([caption_of(number) for number in range(20, 31)]), torch.arange(11))
    assert {name: result["retrieval"][name] for name in expected} == expected
    assert (result["retrieval"]["images"], result["pairs"]["images"]) == (11, 12)
    assert result["data"]["train"] != result["data"]["val"]


def test_unreadable_images_are_not_trained_on_and_the_others_keep_their_captions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_colour_pairs(tmp_path, range(12))
    (tmp_path / "0.png").write_bytes(b"no image")
    config = config_of(folder, data={"skip_bad_images": True}, batch_size=11)
    actual = reached(config, tmp_path / "run", monkeypatch)
    assert actual.first["image"].float().norm(dim=-1).min() > 0.9
    texts = SimpleTokenizer(context_length=12, clean="canonicalize")([caption_of(number) for number in range(1, 12)])
    features = by_hand(load_tower(config, ALONE), range(1, 12))
    for feature, tokens in zip(actual.first["image"].float(), actual.first["tokens"], strict=True):
        number = int((features @ feature).argmax())
        assert torch.equal(tokens, texts[number])


def test_the_configs_data_are_opened(pairs: Path) -> None:
    data = {
        "val_source": "other.csv",
        "val_fraction": 0.25,
        "images": "images",
        "image_column": "a",
        "caption_column": "b",
        "skip_bad_images": True,
        "decode": "pillow",
        "max_pixels": 1000,
        "exif": False,
    }
    reading = ReadOptions("pillow", 1000)
    expected = CaptionSource(str(pairs), "other.csv", 0.25, "images", "a", "b", True, reading)
    assert source_of(config_of(pairs, data=data | {"exif": True})) == replace(
        expected, reading=replace(reading, exif=True)
    )
    assert source_of(config_of(pairs, data=data)) == expected


def test_a_tower_that_changes_is_refused(pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    towers, original = list[Backbone](), engine.fit

    def loaded(config: LitConfig, world: World) -> Backbone:
        towers.append(load_tower(config, world))
        return towers[-1]

    def fit(*arguments: Any) -> Any:
        towers[-1].patch_embed.proj.weight.data += 1
        return original(*arguments)

    monkeypatch.setattr("tasks.lit.train.load_tower", loaded)
    monkeypatch.setattr(engine, "fit", fit)
    with pytest.raises(DpnError, match="the training changed the frozen image tower"):
        train_lit(config_of(pairs), tmp_path / "run")


def test_a_run_continues_with_its_own_held_out_pairs_only(pairs: Path, tmp_path: Path) -> None:
    held = write_colour_pairs(tmp_path / "held", range(20, 25))
    config = config_of(pairs, data={"val_source": str(held)})
    train_lit(config, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    table = held.read_text()
    held.write_text(table.replace("house", "tower", 1))
    with pytest.raises(DataError, match="the captions have changed since this run started"):
        train_lit(config, tmp_path / "run", resume=True)
    held.write_text("".join(table.splitlines(keepends=True)[:-1]))
    with pytest.raises(DataError, match="the images have changed since this run started"):
        train_lit(config, tmp_path / "run", resume=True)
    held.write_text(table)
    assert train_lit(config, tmp_path / "run", resume=True)["retrieval"]["images"] == 5


def test_a_run_continues_with_its_own_image_tower_only(pairs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tower.safetensors"
    config = config_of(pairs, backbone={"arch": None, "pool": None, "checkpoint": str(folder)})
    export_backbone(load_backbone("mu/8", image_size=16, seed=1), folder)
    train_lit(config, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    content = folder.read_bytes()
    export_backbone(load_backbone("mu/8", image_size=16, seed=2), folder)
    with pytest.raises(DataError, match="the image tower's weights have changed since this run started"):
        train_lit(config, tmp_path / "run", resume=True)
    folder.write_bytes(content)
    assert train_lit(config, tmp_path / "run", resume=True)["retrieval"]["images"] == 12
