"""The feature cache of `dpn lit`, and the batches that are made of it or without it."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dpn_cli.config.schema import Runtime
from dpn_cli.data import pixels
from dpn_cli.data.pixels import PixelSet, stream
from dpn_cli.data.resize import resize
from dpn_cli.data.sampler import rows_of_step
from dpn_cli.data.sources.base import LabelledImages
from dpn_cli.errors import DataError, StoppedError
from dpn_cli.run import files, signals
from dpn_cli.run.arrays import save_array
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import load_backbone
from support.captions import write_caption_shard, write_caption_table, write_shard_dataset
from support.images import png_bytes, write_png_images
from support.programs import claim_in_other_process
from support.ranks import CPU
from tasks.lit import cache
from tasks.lit.batches import cached_batches, encoded_batches, tokenize
from tasks.lit.cache import cached_features
from tasks.lit.captions import CaptionedFiles, CaptionedImages
from tasks.lit.data import CaptionSource, open_split
from tasks.lit.encode import image_encoder, retrieval_scores
from tasks.lit.features import Features, ImageEncoder, digest_of, views_of
from tasks.lit.tokenizer import Tokenizer

ALONE, QUIET = World(0, 1, CPU), Console(quiet=True)


def make_encoder(seed: int = 0, **changes: Any) -> ImageEncoder:
    tower = load_backbone("mu/8", image_size=16, seed=seed).eval()
    return image_encoder(tower, Runtime(workers=0), ALONE, **changes)


def data(root: Path, count: int = 6) -> CaptionedImages:
    names = write_png_images(root, count)
    return open_split(
        CaptionSource(str(write_caption_table(root / "pairs.csv", [(name, f"s {name}") for name in names]))), "train"
    )


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SHARD", 4)
    monkeypatch.setattr(cache, "BATCH", 2)


def looked_at(split: CaptionedImages) -> list[int]:
    """Note from now on which images are opened."""
    observed: list[int] = []
    original = split.open

    def noted(index: int) -> Image.Image:
        observed.append(index)
        return original(index)

    split.open = noted  # type: ignore[method-assign]
    return observed


def test_every_image_is_read_exactly_once(tmp_path: Path) -> None:
    split, encoder = data(tmp_path), make_encoder()
    observed = looked_at(split)
    features = cached_features(split, encoder, tmp_path / "cache", ALONE, QUIET)
    assert sorted(observed) == list(range(6))
    assert (len(features), features.views, features.width) == (6, 1, 32)
    assert isinstance(features.shards[0], np.memmap)
    expected = encoder.encode(torch.stack([resize(split.pixels(row), encoder.size) for row in range(6)]))
    torch.testing.assert_close(features.rows(torch.tensor([5, 0, 3])).float(), expected[[5, 0, 3]], atol=5e-4, rtol=0)
    observed.clear()
    second = cached_features(split, encoder, tmp_path / "cache", ALONE, QUIET)
    assert len(observed) <= 2 * cache.SPOT_CHECKS  # a few are looked at again, to see that the cache is theirs
    assert all(np.array_equal(one, other) for one, other in zip(features.shards, second.shards, strict=True))


@pytest.mark.parametrize(("workers", "ahead"), [("auto", 1), (0, 0)])
def test_prefetching_gets_the_shards_of_the_images_to_encode_and_of_every_batch(
    workers: Any, ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split, messages = open_split(CaptionSource(write_shard_dataset(tmp_path)), "train"), list[Any]()

    @contextmanager
    def fetched(
        data: LabelledImages, needs: Any, rows: int, workers: int, here: int
    ) -> Iterator[Callable[[int], None]]:
        messages.extend([*needs(), rows, workers])
        yield messages.append

    monkeypatch.setattr(pixels, "prefetch_shards", fetched)
    cached_features(split, replace(make_encoder(), workers=workers), tmp_path / "cache", ALONE, QUIET)
    # Batches of two of the four and two images in the shards.
    assert messages == [(0, 1, 0), (2, 2, 1), 2, ahead, -1, 0, 1, 2]


def test_views_are_a_function_of_seed_and_image(tmp_path: Path) -> None:
    split = data(tmp_path)
    one = cached_features(split, make_encoder(views=3), tmp_path / "a", ALONE, QUIET)
    other = cached_features(split, make_encoder(views=3), tmp_path / "b", ALONE, QUIET)
    assert one.views == 3
    assert all(np.array_equal(x, y) for x, y in zip(one.shards, other.shards, strict=True))
    first = [one.rows(torch.tensor([0]), torch.tensor([view])) for view in range(3)]
    assert not torch.equal(first[0], first[1])
    reseeded = replace(make_encoder(views=3), seed=1)  # the same tower
    seeded = cached_features(split, reseeded, tmp_path / "a", ALONE, QUIET)
    assert not np.array_equal(seeded.shards[0], one.shards[0])


def test_views_are_cut_from_a_larger_image_and_every_second_one_is_mirrored(tmp_path: Path) -> None:
    encoder = make_encoder(views=20)
    images = torch.randint(256, (1, 3, *encoder.read_size), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert encoder.read_size == (18, 18)
    cuts = [images[0, :, top : top + 16, left : left + 16] for top in range(3) for left in range(3)]
    views = views_of(images, [7], encoder)
    plain, mirrored = (
        [
            number
            for view in views
            for number, cut in enumerate(cuts)
            if torch.equal(view, cut.flip(-1) if flip else cut)
        ]
        for flip in (False, True)
    )
    assert len(plain) + len(mirrored) == 20
    assert min(len(plain), len(mirrored)) > 4
    assert len({*plain, *mirrored}) > 4


def test_one_of_several_views_is_drawn_at_every_visit(tmp_path: Path) -> None:
    features = Features([np.arange(24, dtype=np.float16).reshape(8, 3, 1)[at : at + 4] for at in (0, 4)], ())
    texts = tokenize(data(tmp_path, 8), Tokenizer(8, "lower"))
    stream = cached_batches(features, torch.arange(8), texts, 8, 0, ALONE)(0)
    visits = [sorted(next(stream)["image"][:, 0].int().tolist()) for _ in range(20)]
    assert all([view // 3 for view in visit] == list(range(8)) for visit in visits)
    assert {view for visit in visits for view in visit} == set(range(24))
    single = cached_batches(features, torch.arange(1), texts, 1, 0, ALONE)(0)
    assert {int(next(single)["image"]) for _ in range(20)} == {0, 1, 2}


def only(root: Path) -> Path:
    (actual,) = (root / "cache").iterdir()
    return actual


def flip_a_bit(root: Path) -> None:
    file = next(only(root).glob("*.npy"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def of_other_weights(root: Path) -> None:
    # Somebody copies the cache of another tower into this one's place.
    here = only(root)
    cached_features(data(root), make_encoder(seed=7), root / "cache", ALONE, QUIET)
    (there,) = (path for path in (root / "cache").iterdir() if path != here)
    shutil.rmtree(here)
    there.rename(here)


def of_other_features(root: Path) -> None:
    # The description is right and the content is not: features of another tower, with their own digests.
    here, described = only(root), (only(root) / "cache.json").read_text()
    of_other_weights(root)
    (here / "cache.json").write_text(described)


def of_nearly_the_same_features(root: Path) -> None:
    # A cosine of 0.99 to what the tower gives, with digests of their own: another resizing, say.
    for file in only(root).glob("*.npy"):
        features = np.load(file).astype(np.float32)
        other = np.roll(features, 1, -1)
        other -= (other * features).sum(-1, keepdims=True) * features
        other /= np.linalg.norm(other, axis=-1, keepdims=True)
        facts = json.loads(file.with_suffix(".json").read_text())
        del facts["sha256"]
        save_array(file, (0.99 * features + 0.141 * other).astype(np.float16), **facts)


def of_an_earlier_version(root: Path) -> None:
    # It kept no stamps and no contents, and its name was made of fewer facts.
    facts = json.loads((only(root) / "cache.json").read_text())
    del facts["decoder"]
    facts["version"] = 1
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    (only(root) / "cache.json").write_text(json.dumps(facts))
    for file in only(root).glob("features*.json"):
        file.write_text(json.dumps({"sha256": json.loads(file.read_text())["sha256"], "bad": []}))
    only(root).rename(root / "cache" / name)


def of_fewer_rows(root: Path) -> None:
    file = next(only(root).glob("features*.json"))
    facts = json.loads(file.read_text())
    file.write_text(json.dumps({**facts, "stamps": facts["stamps"][1:]}))


def without_description(root: Path) -> None:
    (only(root) / "cache.json").write_text("{")


def of_another_form(root: Path) -> None:
    (only(root) / "cache.json").write_text("[]")


def of_shards_of_another_form(root: Path) -> None:
    next(only(root).glob("features*.json")).write_text("[]")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (flip_a_bit, "damaged (its digest differs)"),
        (of_other_weights, "it is of another weights"),
        (of_other_features, "gives other features now"),
        (of_nearly_the_same_features, "gives other features now"),
        (without_description, "cache.json cannot be read"),
        (of_another_form, "cache.json cannot be read"),
        (of_shards_of_another_form, "damaged (its digest differs)"),
        (of_an_earlier_version, "earlier version, which did not notice images that had changed; it is removed"),
        (of_fewer_rows, "damaged (its description is of other rows)"),
    ],
)
def test_damaged_and_foreign_caches_are_rebuilt(
    spoil: Callable[[Path], None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split = data(tmp_path)
    initial = [
        np.array(part) for part in cached_features(split, make_encoder(), tmp_path / "cache", ALONE, QUIET).shards
    ]
    spoil(tmp_path)
    capsys.readouterr()
    final = cached_features(split, make_encoder(), tmp_path / "cache", ALONE, Console(quiet=True))
    assert message in capsys.readouterr().err
    assert all(np.array_equal(one, other) for one, other in zip(initial, final.shards, strict=True))
    assert only(tmp_path)


def test_networks_of_the_same_tensors_have_caches_of_their_own(tmp_path: Path) -> None:
    split, stems = data(tmp_path), ("none", "dpn_no_affine")
    towers = [load_backbone("mu/8", stem=stem, image_size=16, seed=0).eval() for stem in stems]
    assert digest_of(towers[0]) == digest_of(towers[1])
    for tower in towers:
        cached_features(split, image_encoder(tower, Runtime(workers=0), ALONE), tmp_path / "cache", ALONE, QUIET)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_every_setting_that_changes_features_has_its_own_cache(tmp_path: Path) -> None:
    tower, split = load_backbone("mu/8", pool="gap", image_size=16, seed=0).eval(), data(tmp_path)
    shifted, larger = copy.deepcopy(tower), load_backbone("mu/8", pool="gap", image_size=24, seed=0).eval()
    shifted.mean = (0.1, 0.2, 0.3)
    plain = Runtime(workers=0)
    encoders = [
        image_encoder(tower, plain, ALONE),
        image_encoder(shifted, plain, ALONE),
        image_encoder(tower, Runtime(workers=0, precision="bf16"), ALONE),
        replace(image_encoder(tower, plain, ALONE), size=larger.config.image_size),
        *(image_encoder(tower, plain, ALONE, views=1, seed=seed) for seed in (0, 1)),
    ]
    for number, encoder in enumerate(encoders, 1):
        cached_features(
            split, replace(encoder, encode=lambda x: torch.ones(len(x), 32)), tmp_path / "cache", ALONE, QUIET
        )
        assert len(list((tmp_path / "cache").iterdir())) == number


def test_features_with_nan_are_not_cached(tmp_path: Path) -> None:
    encoder = replace(make_encoder(), encode=lambda images: torch.full((len(images), 32), torch.nan))
    with pytest.raises(DataError, match="features are not finite: its weights are damaged"):
        cached_features(data(tmp_path), encoder, tmp_path / "cache", ALONE, QUIET)
    assert not list((tmp_path / "cache").glob("*/*.npy"))


def test_other_weights_data_or_views_have_a_cache_of_their_own(tmp_path: Path) -> None:
    split, root = data(tmp_path), tmp_path / "cache"
    for encoder in (make_encoder(), make_encoder(seed=1), make_encoder(views=2)):
        cached_features(split, encoder, root, ALONE, QUIET)
    (tmp_path / "0.png").write_bytes(png_bytes(0, 24))
    cached_features(open_split(CaptionSource(str(tmp_path / "pairs.csv")), "train"), make_encoder(), root, ALONE, QUIET)
    assert len(list(root.iterdir())) == 4


def test_a_stopped_cache_continues_behind_its_last_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split, encoder = data(tmp_path, 11), make_encoder()
    full = cached_features(split, encoder, tmp_path / "whole", ALONE, QUIET)
    calls = iter(range(100))

    def stop() -> None:
        if next(calls) == 3:
            raise StoppedError(15)

    monkeypatch.setattr(signals, "check_here", stop)
    with pytest.raises(StoppedError):
        cached_features(split, encoder, tmp_path / "cache", ALONE, QUIET)
    monkeypatch.undo()
    monkeypatch.setattr(cache, "SHARD", 4)
    monkeypatch.setattr(cache, "BATCH", 2)
    monkeypatch.setattr(cache, "SPOT_CHECKS", 1)
    observed = looked_at(split)
    second = cached_features(split, encoder, tmp_path / "cache", ALONE, QUIET)
    assert sorted(observed) == [0, 0, *range(4, 11)]  # 0 is the spot check: its digest, its pixels
    assert all(np.array_equal(one, other) for one, other in zip(full.shards, second.shards, strict=True))


def test_a_cache_that_another_process_fills_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, pairs, waits = make_encoder(), data(tmp_path / "images"), list[int]()
    cached_features(pairs, case, tmp_path / "cache", ALONE, QUIET)
    (folder,) = (tmp_path / "cache").iterdir()
    monkeypatch.setattr(files, "PATIENCE", 0.0)
    with claim_in_other_process(folder) as other:

        def end() -> None:
            other.kill()
            waits.append(other.wait())

        monkeypatch.setattr(signals, "check_here", end)
        assert len(cached_features(pairs, case, tmp_path / "cache", ALONE, QUIET)) == 6
    assert len(waits) == 1


def test_unreadable_images_are_named_or_left_out_and_counted(tmp_path: Path) -> None:
    split = data(tmp_path, 5)
    for number in (1, 4):  # the last one has a shard of its own
        (tmp_path / f"{number}.png").write_bytes(b"no image")
    split = open_split(CaptionSource(str(tmp_path / "pairs.csv")), "train")
    with pytest.raises(DataError, match=r"1.png: not a readable image .*fetch it again"):
        cached_features(split, make_encoder(), tmp_path / "cache", ALONE, QUIET)
    features = cached_features(split, make_encoder(skip_bad=True), tmp_path / "cache", ALONE, QUIET)
    assert features.bad == [1, 4]
    with pytest.raises(DataError, match=r"1.png: not a readable image, as are 1 others"):
        cached_features(split, make_encoder(), tmp_path / "cache", ALONE, QUIET)


def test_sentences_belong_to_the_images_that_could_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    split: Any = SimpleNamespace(captions=[("0",), ("1", "1"), ("2",), ("3", "3")])
    towers: Any = SimpleNamespace(
        text=torch.nn.Linear(4, 4), encode_texts=lambda texts: torch.eye(4)[[int(text) for text in texts]]
    )
    monkeypatch.setattr("tasks.lit.encode.encode_all", lambda *of: (torch.eye(4)[[0, 2, 3]], [0, 2, 3]))
    actual = retrieval_scores(towers, split, make_encoder(), None, Runtime(), ALONE, QUIET)
    assert {actual["image_to_text@1"], actual["text_to_image@1"]} == {100}
    assert (actual["images"], actual["captions"], actual["unreadable"]) == (3, 4, 1)


def test_one_shard_is_enough_for_two_workers(tmp_path: Path) -> None:
    write_caption_shard(tmp_path / "one.tar", range(11), text=lambda number: f"sentence {number}")
    split = open_split(CaptionSource(f"wds:{tmp_path}/one.tar"), "train")
    both = replace(make_encoder(), workers=2)
    single, actual = (
        cached_features(split, encoder, tmp_path / name, ALONE, QUIET)
        for name, encoder in (("a", make_encoder()), ("b", both))
    )
    assert all(np.array_equal(one, other) for one, other in zip(single.shards, actual.shards, strict=True))
    contents = [
        [json.loads(path.read_text())["contents"] for path in sorted((tmp_path / name).glob("*/features*.json"))]
        for name in "ab"
    ]
    assert contents[0] == contents[1]
    assert len({digest for shard in contents[0] for digest in shard}) == 11
    texts = tokenize(split, Tokenizer(8, "lower"))
    plain, several = (
        list(encoded_batches(split, encoder, texts, 4, 5, ALONE, steps=3, micro=4)(0))
        for encoder in (make_encoder(), both)
    )
    assert all(torch.equal(one["image"], other["image"]) for one, other in zip(plain, several, strict=True))


def test_batches_are_a_function_of_the_step(tmp_path: Path) -> None:
    split, tokenizer, encoder = data(tmp_path, 10), Tokenizer(8, "lower"), make_encoder()
    texts = tokenize(split, tokenizer, tmp_path / "cache")
    features = cached_features(split, encoder, tmp_path / "cache", ALONE, QUIET)
    good = torch.tensor([row for row in range(10) if row != 3])
    batches = cached_batches(features, good, texts, 4, 5, ALONE)
    stream = batches(0)
    first = [next(stream) for _ in range(5)]
    resumed = batches(3)
    for step in (3, 4):
        second = next(resumed)
        assert all(torch.equal(second[name], first[step][name]) for name in ("image", "tokens"))
    rows = good[rows_of_step(9, 4, 5, 2)]
    assert torch.equal(first[2]["image"], features.rows(rows))
    assert torch.equal(first[2]["tokens"], texts.tokens[rows].long())
    halves = [next(cached_batches(features, good, texts, 4, 5, World(rank, 2, CPU))(1)) for rank in (0, 1)]
    assert torch.equal(torch.cat([half["image"] for half in halves]), first[1]["image"])


@pytest.mark.parametrize("views", [0, 2])
def test_batches_without_a_cache_are_the_same_and_resume(
    views: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split, encoder = data(tmp_path, 10), make_encoder(views=views)
    texts = tokenize(split, Tokenizer(8, "lower"))
    read: list[int] = []

    @contextmanager
    def streamed(*arguments: Any, **extra: Any) -> Iterator[Iterator[PixelSet]]:
        def noted(parts: Iterator[PixelSet]) -> Iterator[PixelSet]:
            for part in parts:
                read.append(len(part.images))
                yield part

        with stream(*arguments, **extra) as parts:
            yield noted(parts)

    monkeypatch.setattr("tasks.lit.batches.stream", streamed)
    batches = encoded_batches(split, encoder, texts, 4, 5, ALONE, steps=4, micro=3)
    full = list(batches(0))
    assert len(full) == 4
    assert read == [2] * 8  # never a whole batch, of which every worker would keep several
    (last,) = list(batches(3))
    assert torch.equal(last["image"], full[3]["image"])
    halves = [
        next(encoded_batches(split, encoder, texts, 4, 5, World(rank, 2, CPU), steps=4, micro=3)(3)) for rank in (0, 1)
    ]
    torch.testing.assert_close(torch.cat([half["image"] for half in halves]), last["image"])
    if not views:
        features = cached_features(split, encoder, tmp_path / "cache", ALONE, QUIET)
        cached = next(cached_batches(features, torch.arange(10), texts, 4, 5, ALONE)(3))
        torch.testing.assert_close(cached["image"].float(), last["image"], atol=1e-3, rtol=0)
        assert torch.equal(cached["tokens"], last["tokens"])


def test_without_a_cache_an_image_is_cut_anew_at_every_visit(tmp_path: Path) -> None:
    split = data(tmp_path, 1)
    encoder = replace(make_encoder(views=1), encode=lambda images: images.flatten(1).float())
    texts = tokenize(split, Tokenizer(8, "lower"))
    visits = list(encoded_batches(split, encoder, texts, 1, 5, ALONE, steps=10, micro=1)(0))
    assert len({visit["image"].numpy().tobytes() for visit in visits}) > 4


def test_tokens_are_cached_per_tokenizer_and_list_of_captions(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    files = {ending: CaptionedFiles(tmp_path) for ending in ("x", "y")}
    for ending, several in files.items():
        for name in write_png_images(tmp_path, 2):
            several.add(name, [f"Image {name} {ending}"], "here")
    for several in files.values():
        for tokenizer in (Tokenizer(12, "whitespace"), Tokenizer(12, "lower"), Tokenizer(6, "whitespace")):
            kept, made = tokenize(several, tokenizer, root), tokenize(several, tokenizer)
            assert torch.equal(kept.tokens, made.tokens)


def test_one_of_several_captions_is_drawn_at_every_visit(tmp_path: Path) -> None:
    files = CaptionedFiles(tmp_path)
    for name in write_png_images(tmp_path, 4):
        files.add(name, [f"{name} caption {letter}" for letter in "abcd"], "here")
    tokenizer = Tokenizer(12, "whitespace")
    texts = tokenize(files, tokenizer, tmp_path / "cache")
    assert torch.equal(tokenize(files, tokenizer, tmp_path / "cache").tokens, texts.tokens)  # from the disk
    features = cached_features(files, make_encoder(), tmp_path / "cache", ALONE, QUIET)
    stream = cached_batches(features, torch.arange(4), texts, 4, 0, ALONE)(0)
    table = {tuple(row): number for number, row in enumerate(texts.tokens.tolist())}
    visits = [sorted(table[tuple(row)] for row in next(stream)["tokens"].tolist()) for _ in range(40)]
    assert all([number // 4 for number in visit] == [0, 1, 2, 3] for visit in visits)
    assert {number for visit in visits for number in visit} == set(range(16))
