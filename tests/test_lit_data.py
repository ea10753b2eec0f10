"""Captioned images from every source, texts as tokens, and the feature cache."""

from __future__ import annotations

import copy
import csv
import io
import json
import os
import re
import shutil
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, Sequence, Value
from open_clip.tokenizer import SimpleTokenizer
from PIL import Image as Pil
from test_distributed import CPU

from dpn_cli import stopping
from dpn_cli.backbone import load_backbone
from dpn_cli.console import Console
from dpn_cli.data.pixels import resize, rows_of_step, stream
from dpn_cli.distributed import World
from dpn_cli.errors import DataError, DpnError, StoppedError
from dpn_cli.recipe import Runtime
from tasks.lit import cache
from tasks.lit.batches import cached_batches, encoded_batches, tokenize
from tasks.lit.cache import Wanted, cached_features
from tasks.lit.captions import Captioned, Files, HubPairs
from tasks.lit.data import Source, open_pairs, open_split
from tasks.lit.encode import retrieval_scores, wanted_of
from tasks.lit.tokens import Tokenizer, open_tokenizer

ALONE, QUIET = World(0, 1, CPU), Console(quiet=True)
SENTENCES = ["a dog", "Two dogs!", "the cat", "a bird_house", "a red car", "one tree"]


def picture(number: int, size: int = 20) -> bytes:
    pixels = np.random.default_rng(number).integers(256, size=(size, size + 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Pil.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_pictures(folder: Path, count: int = 6) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{number}.png" for number in range(count)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(picture(number))
    return names


def write_table(path: Path, rows: list[tuple[str, str]], header: tuple[str, str] = ("file", "caption")) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows([header, *rows])
    return path


def write_shard(path: Path, numbers: range, ending: str = "txt", text: Callable[[int], str] | None = None) -> None:
    with tarfile.open(path, "w") as archive:
        for number in numbers:
            words = text(number) if text else SENTENCES[number]
            beside = words if ending == "txt" else json.dumps({"caption": words, "key": f"{number:09d}"})
            for name, content in ((f"{number:09d}.jpg", picture(number)), (f"{number:09d}.{ending}", beside.encode())):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


def table(root: Path) -> str:
    # A second sentence for the first picture, in another place of the file.
    rows = [*zip(write_pictures(root), SENTENCES, strict=True), ("0.png", "a small dog")]
    return str(write_table(root / "pairs.csv", rows))


def tabs(root: Path) -> str:
    rows = list(zip(write_pictures(root / "images"), SENTENCES, strict=True))
    return str(write_table(root / "pairs.tsv", rows, ("filepath", "title")))


def with_byte_order_mark(root: Path) -> str:
    place = Path(table(root))
    place.write_text(place.read_text(), encoding="utf-8-sig")  # as Excel writes it
    return str(place)


def coco(root: Path) -> str:
    names = write_pictures(root / "coco" / "train2017")
    listed = {
        "images": [{"id": number, "file_name": name} for number, name in enumerate(names)],
        "annotations": [{"image_id": number, "caption": text} for number, text in enumerate(SENTENCES)],
    }
    place = root / "coco" / "annotations" / "captions_train2017.json"
    place.parent.mkdir()
    place.write_text(json.dumps(listed))
    return str(place)


def karpathy(root: Path) -> str:
    splits = ["train", "train", "restval", "train", "val", "test"]
    images = [
        {"filepath": ".", "filename": name, "split": split, "sentences": [{"raw": sentence}]}
        for name, split, sentence in zip(write_pictures(root), splits, SENTENCES, strict=True)
    ]
    (root / "dataset_coco.json").write_text(json.dumps({"images": images}))
    return str(root / "dataset_coco.json")


def official(root: Path) -> str:
    names = write_pictures(root)
    images = [{"id": 10 + number, "file_name": name} for number, name in enumerate(names)]
    notes = [{"image_id": 10 + number, "caption": text} for number, text in enumerate(SENTENCES)]
    notes.append({"image_id": 10, "caption": "a small dog"})
    (root / "captions_train2017.json").write_text(json.dumps({"images": images, "annotations": notes}))
    return str(root / "captions_train2017.json")


def folder(root: Path) -> str:
    for name, sentence in zip(write_pictures(root), SENTENCES, strict=True):
        (root / name).with_suffix(".txt").write_text(sentence + "\n")
    return str(root)


def shards(root: Path, ending: str = "txt") -> str:
    root.mkdir(parents=True, exist_ok=True)
    write_shard(root / "00000.tar", range(0, 4), ending)
    write_shard(root / "00001.tar", range(4, 6), ending)
    return f"wds:{root}/{{00000..00001}}.tar"


def hub(root: Path) -> str:
    rows = [
        {"image": {"bytes": picture(number), "path": None}, "text": [text]} for number, text in enumerate(SENTENCES)
    ]
    features = Features({"image": Image(), "text": Sequence(Value("string"))})
    splits = {"train": rows[:5], "validation": rows[5:]}
    for name, part in splits.items():
        (root / "data").mkdir(parents=True, exist_ok=True)
        Dataset.from_list(part, features=features).to_parquet(root / "data" / f"{name}-00000-of-00001.parquet")
    return f"hf:{root}"


@pytest.mark.parametrize(
    ("write", "images"),
    [(table, ""), (with_byte_order_mark, ""), (tabs, "images"), (official, ""), (coco, ""), (coco, "coco"),
     (coco, "coco/val2017"), (folder, ""), (shards, ""),
     (lambda root: shards(root, "json"), "")],
)  # fmt: skip
def test_every_source_gives_the_same_pictures_and_sentences(
    write: Callable[[Path], str], images: str, tmp_path: Path
) -> None:
    place = write(tmp_path)
    found = open_split(Source(place, images=str(tmp_path / images) if images else None), "train")
    first = [captions[0] for captions in found.captions]
    assert first == SENTENCES
    assert found.captions[0] == (
        ("a dog", "a small dog") if write in (table, with_byte_order_mark, official) else ("a dog",)
    )
    for number in found.labels:
        expected = np.asarray(Pil.open(io.BytesIO(picture(number))))
        assert np.array_equal(found.pixels(number), expected)
    assert len({found.key(number) for number in found.labels}) == 6


def test_splits_are_the_data_sets_own(tmp_path: Path) -> None:
    source = Source(karpathy(tmp_path / "coco"))
    train, val = open_pairs(source)
    assert [captions[0] for captions in train.captions] == SENTENCES[:4]  # restval is trained on
    assert [captions[0] for captions in val.captions] == [SENTENCES[4]]
    assert open_split(source, "test").captions == [(SENTENCES[5],)]
    train, val = open_pairs(Source(hub(tmp_path / "hub")))
    assert ([captions[0] for captions in train.captions], val.captions) == (SENTENCES[:5], [(SENTENCES[5],)])
    assert np.array_equal(train.pixels(2), np.asarray(Pil.open(io.BytesIO(picture(2)))))
    train, val = open_pairs(Source("demo"))
    assert (len(train.captions), len(val.captions)) == (8000, 1000)
    assert {train.key(index) for index in train.labels}.isdisjoint(val.key(index) for index in val.labels)
    assert train.captions[0][0].startswith("a large ")


def test_a_hub_data_set_that_names_files_has_their_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(tmp_path / name) for name in write_pictures(tmp_path, 2)]
    rows = {"image": [*paths, "zip://1.png::gone.zip"], "text": ["a", "b", "c"]}
    found = Dataset.from_dict(rows, features=Features({"image": Image(), "text": Value("string")}))
    monkeypatch.setattr("dpn_cli.data.labelled.load_hub", lambda *of: {"train": found})
    split = HubPairs("x", "default", "train", None, None, skip_bad=False)
    assert list(split.sizes) == [len(picture(0)), len(picture(1)), 0]


def test_without_own_images_some_are_held_out_alike_everywhere(tmp_path: Path) -> None:
    names = write_pictures(tmp_path, 40)
    source = Source(str(write_table(tmp_path / "pairs.csv", [(name, f"sentence {name}") for name in names])))
    train, val = open_pairs(source)
    assert (len(train.captions), len(val.captions)) == (36, 4)
    held = {val.key(index) for index in val.labels}
    assert held.isdisjoint(train.key(index) for index in train.labels)
    write_table(tmp_path / "turned.csv", [(name, f"sentence {name}") for name in reversed(names)])
    again = open_pairs(Source(str(tmp_path / "turned.csv")))[1]
    assert {again.key(index) for index in again.labels} == held
    assert len(open_pairs(Source(source.place, val_fraction=0.5))[1].captions) == 20
    with pytest.raises(DataError, match="too few to hold some out"):
        open_pairs(Source(str(write_table(tmp_path / "two.csv", [("0.png", "a"), ("1.png", "b")]))))


def broken(root: Path, kind: str) -> str:
    names = write_pictures(root)
    rows = [("0.png", "a"), ("1.png", "b"), ("2.png", " " if kind == "text" else "c")]
    match kind:
        case "file":
            rows.append(("9.png", "d"))
        case "columns":
            return str(write_table(root / "pairs.csv", rows, ("a", "b")))
        case "json":
            (root / "x.json").write_text('{"images": [{"id": 3}]}')
            return str(root / "x.json")
        case "folder":
            return str(root)
        case "encoding":
            for name in names:
                (root / name).with_suffix(".txt").write_bytes("ein Vögelchen".encode("latin-1"))
            return str(root)
        case "long":
            rows.append(("a sentence in the wrong column " * 20, "d"))
        case "shard":
            write_shard(root / "0.tar", range(3), text=lambda number: "")
            return f"wds:{root}/0.tar"
        case "nowhere":
            return str(root / "nowhere.csv")
    assert names
    return str(write_table(root / "pairs.csv", rows))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("text", r"pairs.csv, line 4: 2.png: a pair without text; .*--skip-bad-images"),
        ("file", r"pairs.csv, line 5: .*9.png: no such image; name their folder with --images"),
        ("long", r"pairs.csv, line 5: .*a sentence in the wrong column: no such image"),
        ("encoding", r"0.txt: not a text in UTF-8 \(invalid .* at byte 5\)"),
        ("columns", r"which column holds the image\? The columns are 'a', 'b'; name one with --image-column"),
        ("json", "neither Karpathy's captions JSON"),
        ("folder", "0.txt: 0.png: a pair without text"),
        ("shard", r"0.tar: 000000000.jpg: a pair without text"),
        ("nowhere", "no such file or folder; pass a .csv"),
    ],
)
def test_flawed_data_are_named(kind: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        open_split(Source(broken(tmp_path, kind)), "train")
    if kind in ("text", "file"):
        found = open_split(Source(broken(tmp_path, kind), skip_bad=True), "train")
        assert (len(found.captions), found.dropped) == (2 if kind == "text" else 3, 1)


def test_captions_in_shards_are_img2datasets(tmp_path: Path) -> None:
    write_shard(tmp_path / "0.tar", range(2), text=lambda number: f"two lines\nof caption {number}")
    assert open_split(Source(f"wds:{tmp_path}/0.tar"), "train").captions[1] == ("two lines\nof caption 1",)
    described = [{"caption": "a dog", "title": "a page"}, {"captions": ["a dog", "two dogs"], "text": None}]
    with tarfile.open(tmp_path / "1.tar", "w") as archive:
        for number, fields in enumerate(described):
            for ending, content in (("png", picture(number)), ("json", json.dumps(fields).encode())):
                info = tarfile.TarInfo(f"{number}.{ending}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    assert open_split(Source(f"wds:{tmp_path}/1.tar"), "train").captions == [("a dog",), ("a dog", "two dogs")]


def test_pairs_without_text_are_counted_in_every_source(tmp_path: Path) -> None:
    write_shard(tmp_path / "0.tar", range(3), text=lambda number: " " if number == 1 else "a dog")
    rows = {"image": [{"bytes": picture(number), "path": None} for number in range(3)], "text": ["a", None, "b"]}
    features = Features({"image": Image(), "text": Value("string")})
    (tmp_path / "hub").mkdir()
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "hub" / "train-00000-of-00001.parquet")
    for place in (f"wds:{tmp_path}/0.tar", f"hf:{tmp_path}/hub"):
        found = open_split(Source(place, skip_bad=True), "train")
        assert (len(found.captions), found.dropped) == (2, 1)
        assert np.array_equal(found.pixels(1), np.asarray(Pil.open(io.BytesIO(picture(2)))))


def test_tokens_are_open_clips_and_longer_texts_keep_their_end() -> None:
    texts = [*SENTENCES, "Many words, " * 12]
    for clean in ("canonicalize", "lower", "whitespace"):
        tokenizer = Tokenizer(16, clean)
        tokens, cut = tokenizer.encode(texts)
        expected = SimpleTokenizer(context_length=16, clean=clean)(texts)
        assert np.array_equal(tokens, expected.numpy())
        assert cut == 1
        assert tokens[-1, -1] == 49407
    assert Tokenizer(16, "canonicalize").digest == Tokenizer(16, "lower").digest


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model of a few pieces."""
    import sentencepiece

    root = tmp_path_factory.mktemp("pieces")
    (root / "text.txt").write_text("\n".join(SENTENCES * 5).lower())
    sentencepiece.SentencePieceTrainer.train(
        input=str(root / "text.txt"), model_prefix=str(root / "small"), vocab_size=40, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    return root / "small.model"


def test_a_sentencepiece_file_has_a_sticky_end(pieces: Path, tmp_path: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    tokenizer, theirs = open_tokenizer(str(pieces), 8, "lower"), SentencePieceProcessor(str(pieces))
    tokens, cut = tokenizer.encode(["A dog", "a dog " * 9])
    ids, end = theirs.encode("a dog"), theirs.eos_id()
    assert tokens[0].tolist() == [*ids, *[end] * (8 - len(ids))]
    assert tokens[1].tolist() == [*theirs.encode("a dog " * 9)[:7], end]
    assert cut == 1
    (tmp_path / "other.model").write_text("no model")
    with pytest.raises(DataError, match=r"other.model: no SentencePiece model"):
        open_tokenizer(str(tmp_path / "other.model"), 8, "lower")
    with pytest.raises(DataError, match="no such file; leave it out"):
        open_tokenizer(str(tmp_path / "none.model"), 8, "lower")


def wanted(seed: int = 0, **changes: Any) -> Wanted:
    tower = load_backbone("mu/8", image_size=16, seed=seed).eval()
    return wanted_of(tower, Runtime(workers=0), ALONE, **changes)


def data(root: Path, count: int = 6) -> Captioned:
    names = write_pictures(root, count)
    return open_split(Source(str(write_table(root / "pairs.csv", [(name, f"s {name}") for name in names]))), "train")


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SHARD", 4)
    monkeypatch.setattr(cache, "BATCH", 2)


def opened(split: Captioned) -> list[int]:
    """Count from now on which images are opened."""
    seen: list[int] = []
    original = split.open

    def counted(index: int) -> Pil.Image:
        seen.append(index)
        return original(index)

    split.open = counted  # type: ignore[method-assign]
    return seen


def test_every_image_is_read_once_and_never_again(tmp_path: Path) -> None:
    split, want = data(tmp_path), wanted()
    seen = opened(split)
    features = cached_features(split, want, tmp_path / "cache", ALONE, QUIET)
    assert sorted(seen) == list(range(6))
    assert (len(features), features.views, features.width) == (6, 1, 32)
    assert isinstance(features.shards[0], np.memmap)
    expected = want.encode(torch.stack([resize(split.pixels(row), want.size) for row in range(6)]))
    torch.testing.assert_close(features.rows(torch.tensor([5, 0, 3])).float(), expected[[5, 0, 3]], atol=5e-4, rtol=0)
    seen.clear()
    again = cached_features(split, want, tmp_path / "cache", ALONE, QUIET)
    assert len(seen) <= cache.SPOT_CHECKS  # a few are looked at again, to see that the cache is theirs
    assert all(np.array_equal(one, other) for one, other in zip(features.shards, again.shards, strict=True))


def test_views_are_a_function_of_seed_and_image(tmp_path: Path) -> None:
    split = data(tmp_path)
    one = cached_features(split, wanted(views=3), tmp_path / "a", ALONE, QUIET)
    other = cached_features(split, wanted(views=3), tmp_path / "b", ALONE, QUIET)
    assert one.views == 3
    assert all(np.array_equal(x, y) for x, y in zip(one.shards, other.shards, strict=True))
    first = [one.rows(torch.tensor([0]), torch.tensor([view])) for view in range(3)]
    assert not torch.equal(first[0], first[1])
    seeded = cached_features(split, wanted(views=3, seed=0), tmp_path / "a", ALONE, QUIET)
    assert np.array_equal(seeded.shards[0], one.shards[0])


def test_views_are_cut_from_a_larger_image_and_every_second_one_is_mirrored(tmp_path: Path) -> None:
    want = wanted(views=20)
    images = torch.randint(256, (1, 3, *want.read_size), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert want.read_size == (18, 18)
    cuts = [images[0, :, top : top + 16, left : left + 16] for top in range(3) for left in range(3)]
    views = cache._views(images, [7], want)
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
    features = cache.Features([np.arange(24, dtype=np.float16).reshape(8, 3, 1)[at : at + 4] for at in (0, 4)], ())
    texts = tokenize(data(tmp_path, 8), Tokenizer(8, "lower"))
    stream = cached_batches(features, torch.arange(8), texts, 8, 0, ALONE)(0)
    visits = [sorted(next(stream)["image"][:, 0].int().tolist()) for _ in range(20)]
    assert all([view // 3 for view in visit] == list(range(8)) for visit in visits)
    assert {view for visit in visits for view in visit} == set(range(24))
    single = cached_batches(features, torch.arange(1), texts, 1, 0, ALONE)(0)
    assert {int(next(single)["image"]) for _ in range(20)} == {0, 1, 2}


def only(root: Path) -> Path:
    (found,) = (root / "cache").iterdir()
    return found


def flip_a_bit(root: Path) -> None:
    file = next(only(root).glob("*.npy"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def of_other_weights(root: Path) -> None:
    # Somebody copies the cache of another tower into this one's place.
    here = only(root)
    cached_features(data(root), wanted(seed=7), root / "cache", ALONE, QUIET)
    (there,) = (path for path in (root / "cache").iterdir() if path != here)
    shutil.rmtree(here)
    there.rename(here)


def of_other_features(root: Path) -> None:
    # The description is right and the content is not: features of another tower, with their own digests.
    here, described = only(root), (only(root) / "cache.json").read_text()
    of_other_weights(root)
    (here / "cache.json").write_text(described)


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
        (without_description, "cache.json cannot be read"),
        (of_another_form, "cache.json cannot be read"),
        (of_shards_of_another_form, "damaged (its digest differs)"),
    ],
)
def test_damaged_and_foreign_caches_are_made_again(
    spoil: Callable[[Path], None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split = data(tmp_path)
    before = [np.array(part) for part in cached_features(split, wanted(), tmp_path / "cache", ALONE, QUIET).shards]
    spoil(tmp_path)
    capsys.readouterr()
    after = cached_features(split, wanted(), tmp_path / "cache", ALONE, Console(quiet=True))
    assert message in capsys.readouterr().err
    assert all(np.array_equal(one, other) for one, other in zip(before, after.shards, strict=True))


@pytest.mark.parametrize("of", [data, lambda root: open_split(Source(shards(root)), "train")])
def test_images_changed_in_place_are_encoded_again(
    of: Callable[[Path], Captioned], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache, "SPOT_CHECKS", 1)  # looks at the first image only
    before = of(tmp_path)
    old = np.array(cached_features(before, wanted(), tmp_path / "cache", ALONE, QUIET).shards[0])
    original = Captioned.pixels
    # Another picture of as many bytes.
    monkeypatch.setattr(
        Captioned, "pixels", lambda split, row: np.flip(original(split, row), 1) if row == 2 else original(split, row)
    )
    for path in (*tmp_path.glob("*.png"), *tmp_path.glob("*.tar")):
        os.utime(path, (time.time() + 5,) * 2)
    after = of(tmp_path) if of is not data else open_split(Source(str(tmp_path / "pairs.csv")), "train")
    new = cached_features(after, wanted(), tmp_path / "cache", ALONE, QUIET).shards[0]
    assert "gives other features now" in capsys.readouterr().err
    assert [row for row in range(4) if not np.array_equal(old[row], new[row])] == [2]


def test_networks_of_the_same_tensors_have_caches_of_their_own(tmp_path: Path) -> None:
    split, stems = data(tmp_path), ("none", "dpn_no_affine")
    towers = [load_backbone("mu/8", stem=stem, image_size=16, seed=0).eval() for stem in stems]
    assert cache.digest_of(towers[0]) == cache.digest_of(towers[1])
    for tower in towers:
        cached_features(split, wanted_of(tower, Runtime(workers=0), ALONE), tmp_path / "cache", ALONE, QUIET)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_whatever_changes_features_has_a_cache_of_its_own(tmp_path: Path) -> None:
    tower, split = load_backbone("mu/8", pool="gap", image_size=16, seed=0).eval(), data(tmp_path)
    shifted, larger = copy.deepcopy(tower), load_backbone("mu/8", pool="gap", image_size=24, seed=0).eval()
    shifted.mean = (0.1, 0.2, 0.3)
    plain = Runtime(workers=0)
    wants = [
        wanted_of(tower, plain, ALONE),
        wanted_of(shifted, plain, ALONE),
        wanted_of(tower, Runtime(workers=0, precision="bf16"), ALONE),
        replace(wanted_of(tower, plain, ALONE), size=larger.config.image_size),
        *(wanted_of(tower, plain, ALONE, views=1, seed=seed) for seed in (0, 1)),
    ]
    for number, want in enumerate(wants, 1):
        cached_features(split, replace(want, encode=lambda x: torch.ones(len(x), 32)), tmp_path / "cache", ALONE, QUIET)
        assert len(list((tmp_path / "cache").iterdir())) == number


def test_features_that_are_no_numbers_are_not_kept(tmp_path: Path) -> None:
    want = replace(wanted(), encode=lambda images: torch.full((len(images), 32), torch.nan))
    with pytest.raises(DataError, match="features are not finite: its weights are damaged"):
        cached_features(data(tmp_path), want, tmp_path / "cache", ALONE, QUIET)
    assert not list((tmp_path / "cache").glob("*/*.npy"))


def test_other_weights_data_or_views_have_a_cache_of_their_own(tmp_path: Path) -> None:
    split, root = data(tmp_path), tmp_path / "cache"
    for want in (wanted(), wanted(seed=1), wanted(views=2)):
        cached_features(split, want, root, ALONE, QUIET)
    (tmp_path / "0.png").write_bytes(picture(0, 24))
    cached_features(open_split(Source(str(tmp_path / "pairs.csv")), "train"), wanted(), root, ALONE, QUIET)
    assert len(list(root.iterdir())) == 4


def test_a_stopped_cache_goes_on_behind_its_last_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split, want = data(tmp_path, 11), wanted()
    whole = cached_features(split, want, tmp_path / "whole", ALONE, QUIET)
    calls = iter(range(100))

    def stop() -> None:
        if next(calls) == 3:
            raise StoppedError(15)

    monkeypatch.setattr(stopping, "check_here", stop)
    with pytest.raises(StoppedError):
        cached_features(split, want, tmp_path / "cache", ALONE, QUIET)
    monkeypatch.undo()
    monkeypatch.setattr(cache, "SHARD", 4)
    monkeypatch.setattr(cache, "BATCH", 2)
    monkeypatch.setattr(cache, "SPOT_CHECKS", 1)
    seen = opened(split)
    again = cached_features(split, want, tmp_path / "cache", ALONE, QUIET)
    assert sorted(seen) == [0, *range(4, 11)]  # 0 is the spot check
    assert all(np.array_equal(one, other) for one, other in zip(whole.shards, again.shards, strict=True))


def test_unreadable_images_are_named_or_left_out_and_counted(tmp_path: Path) -> None:
    split = data(tmp_path, 5)
    for number in (1, 4):  # the last one has a shard of its own
        (tmp_path / f"{number}.png").write_bytes(b"no picture")
    split = open_split(Source(str(tmp_path / "pairs.csv")), "train")
    with pytest.raises(DataError, match=r"1.png: not a readable image .*--skip-bad-images"):
        cached_features(split, wanted(), tmp_path / "cache", ALONE, QUIET)
    features = cached_features(split, wanted(skip_bad=True), tmp_path / "cache", ALONE, QUIET)
    assert features.bad == [1, 4]
    with pytest.raises(DataError, match=r"1.png: not a readable image, as are 1 others"):
        cached_features(split, wanted(), tmp_path / "cache", ALONE, QUIET)


def test_sentences_belong_to_the_images_that_could_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    split: Any = SimpleNamespace(captions=[("0",), ("1", "1"), ("2",), ("3", "3")])
    towers: Any = SimpleNamespace(encode_texts=lambda texts: torch.eye(4)[[int(text) for text in texts]])
    monkeypatch.setattr("tasks.lit.encode.encoded", lambda *of: (torch.eye(4)[[0, 2, 3]], [0, 2, 3]))
    found = retrieval_scores(towers, split, wanted(), None, Runtime(), ALONE, QUIET)
    assert {found["image_to_text@1"], found["text_to_image@1"]} == {100}
    assert (found["images"], found["captions"], found["unreadable"]) == (3, 4, 1)


def test_one_shard_is_enough_for_two_workers(tmp_path: Path) -> None:
    write_shard(tmp_path / "one.tar", range(11), text=lambda number: f"sentence {number}")
    split = open_split(Source(f"wds:{tmp_path}/one.tar"), "train")
    both = replace(wanted(), workers=2)
    alone, found = (
        cached_features(split, want, tmp_path / name, ALONE, QUIET) for name, want in (("a", wanted()), ("b", both))
    )
    assert all(np.array_equal(one, other) for one, other in zip(alone.shards, found.shards, strict=True))
    texts = tokenize(split, Tokenizer(8, "lower"))
    plain, several = (
        list(encoded_batches(split, want, texts, 4, 5, ALONE, steps=3, micro=4)(0)) for want in (wanted(), both)
    )
    assert all(torch.equal(one["image"], other["image"]) for one, other in zip(plain, several, strict=True))


def test_batches_are_a_function_of_the_step(tmp_path: Path) -> None:
    split, tokenizer, want = data(tmp_path, 10), Tokenizer(8, "lower"), wanted()
    texts = tokenize(split, tokenizer, tmp_path / "cache")
    features = cached_features(split, want, tmp_path / "cache", ALONE, QUIET)
    good = torch.tensor([row for row in range(10) if row != 3])
    batches = cached_batches(features, good, texts, 4, 5, ALONE)
    stream = batches(0)
    first = [next(stream) for _ in range(5)]
    resumed = batches(3)
    for step in (3, 4):
        again = next(resumed)
        assert all(torch.equal(again[name], first[step][name]) for name in ("image", "tokens"))
    rows = good[rows_of_step(9, 4, 5, 2)]
    assert torch.equal(first[2]["image"], features.rows(rows))
    assert torch.equal(first[2]["tokens"], texts.tokens[rows].long())
    halves = [next(cached_batches(features, good, texts, 4, 5, World(rank, 2, CPU))(1)) for rank in (0, 1)]
    assert torch.equal(torch.cat([half["image"] for half in halves]), first[1]["image"])


@pytest.mark.parametrize("views", [0, 2])
def test_batches_without_a_cache_are_the_same_and_resume(
    views: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split, want = data(tmp_path, 10), wanted(views=views)
    texts = tokenize(split, Tokenizer(8, "lower"))
    read: list[int] = []

    def streamed(*arguments: Any, **more: Any) -> Any:
        for part in stream(*arguments, **more):
            read.append(len(part.images))
            yield part

    monkeypatch.setattr("tasks.lit.batches.stream", streamed)
    batches = encoded_batches(split, want, texts, 4, 5, ALONE, steps=4, micro=3)
    whole = list(batches(0))
    assert len(whole) == 4
    assert read == [2] * 8  # never a whole batch, of which every worker would keep several
    (last,) = list(batches(3))
    assert torch.equal(last["image"], whole[3]["image"])
    halves = [
        next(encoded_batches(split, want, texts, 4, 5, World(rank, 2, CPU), steps=4, micro=3)(3)) for rank in (0, 1)
    ]
    torch.testing.assert_close(torch.cat([half["image"] for half in halves]), last["image"])
    if not views:
        features = cached_features(split, want, tmp_path / "cache", ALONE, QUIET)
        cached = next(cached_batches(features, torch.arange(10), texts, 4, 5, ALONE)(3))
        torch.testing.assert_close(cached["image"].float(), last["image"], atol=1e-3, rtol=0)
        assert torch.equal(cached["tokens"], last["tokens"])


def test_without_a_cache_an_image_is_cut_anew_at_every_visit(tmp_path: Path) -> None:
    split = data(tmp_path, 1)
    want = replace(wanted(views=1), encode=lambda images: images.flatten(1).float())
    texts = tokenize(split, Tokenizer(8, "lower"))
    visits = list(encoded_batches(split, want, texts, 1, 5, ALONE, steps=10, micro=1)(0))
    assert len({visit["image"].numpy().tobytes() for visit in visits}) > 4


def test_one_of_several_captions_is_drawn_at_every_visit(tmp_path: Path) -> None:
    files = Files()
    for name in write_pictures(tmp_path, 4):
        files.add(tmp_path, name, [f"{name} caption {letter}" for letter in "abcd"], "here")
    tokenizer = Tokenizer(12, "whitespace")
    texts = tokenize(files, tokenizer, tmp_path / "cache")
    assert torch.equal(tokenize(files, tokenizer, tmp_path / "cache").tokens, texts.tokens)  # from the disk
    features = cached_features(files, wanted(), tmp_path / "cache", ALONE, QUIET)
    stream = cached_batches(features, torch.arange(4), texts, 4, 0, ALONE)(0)
    table = {tuple(row): number for number, row in enumerate(texts.tokens.tolist())}
    visits = [sorted(table[tuple(row)] for row in next(stream)["tokens"].tolist()) for _ in range(40)]
    assert all([number // 4 for number in visit] == [0, 1, 2, 3] for visit in visits)
    assert {number for visit in visits for number in visit} == set(range(16))


def test_a_folder_without_readable_text_columns_is_refused(tmp_path: Path) -> None:
    path = write_table(tmp_path / "pairs.csv", [("0.png", "a")], ("file", "words"))
    write_pictures(tmp_path, 1)
    with pytest.raises(DpnError, match=re.escape("which column holds the caption? The columns are 'file', 'words'")):
        open_split(Source(str(path)), "train")
    assert open_split(Source(str(path), caption_column="words"), "train").captions == [("a",)]
