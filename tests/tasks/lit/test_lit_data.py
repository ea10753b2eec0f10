"""Captioned images from every source, texts as tokens, and the feature cache."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, Features, Image, Sequence, Value
from open_clip.tokenizer import SimpleTokenizer
from PIL import Image as Pil

from dpn_cli.errors import DataError, DpnError
from support.captions import (
    CAPTIONS,
    write_caption_shard,
    write_caption_table,
    write_coco_dataset,
    write_flat_coco_dataset,
    write_folder_dataset,
    write_karpathy_dataset,
    write_shard_dataset,
    write_table_dataset,
)
from support.images import png_bytes, write_png_images, write_tar
from tasks.lit.cache import data_fingerprint
from tasks.lit.captions import CaptionedFiles, HubCaptions, Subset, stamp_of
from tasks.lit.data import CaptionSource, open_pairs, open_split
from tasks.lit.eval_splits import open_part
from tasks.lit.tokenizer import Tokenizer, open_tokenizer


def tabs(root: Path) -> str:
    rows = list(zip(write_png_images(root / "images"), CAPTIONS, strict=True))
    return str(write_caption_table(root / "pairs.tsv", rows, ("filepath", "title")))


def with_byte_order_mark(root: Path) -> str:
    folder = Path(write_table_dataset(root))
    folder.write_text(folder.read_text(), encoding="utf-8-sig")  # as Excel writes it
    return str(folder)


def with_splits(root: Path, *splits: str) -> CaptionSource:
    images = [
        {"filename": name, "split": split, "sentences": [{"raw": "a dog"}]}
        for name, split in zip(write_png_images(root, len(splits)), splits, strict=True)
    ]
    (root / "own.json").write_text(json.dumps({"images": images}))
    return CaptionSource(str(root / "own.json"))


def test_splits_without_validation_images_are_held_out_of_the_training_ones(tmp_path: Path) -> None:
    source = with_splits(tmp_path, *["train"] * 9, "test", *["restval"] * 11)
    train, val = open_pairs(source)
    assert (len(train.captions), len(val.captions)) == (18, 2)
    assert "9.png" not in {part.key(row) for part in (train, val) for row in part.labels}
    assert len(open_pairs(replace(source, val_fraction=0.25))[1].captions) == 5


def test_a_split_that_a_file_has_no_images_of_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    validated, tested = with_splits(tmp_path / "a", "val", "test"), with_splits(tmp_path / "b", "train", "test")
    with pytest.raises(DataError, match="own.json: no image of the split train or restval, only of test, val; train"):
        open_pairs(validated)
    with pytest.raises(
        DataError, match="no image of the split val, only of test, train; .* one that has val .--val-da"
    ):
        open_pairs(replace(validated, location=str(tmp_path / "b" / "own.json"), val_location=tested.location))
    with pytest.raises(DataError, match=r"no image of the split val, only of test, train; .*'lit eval --split'"):
        open_split(tested, "val")
    with pytest.raises(DataError, match="--split all: .* has splits of its own"):
        open_part(tested, "all", {})


def hub(root: Path) -> str:
    rows = [
        {"image": {"bytes": png_bytes(number), "path": None}, "text": [text]} for number, text in enumerate(CAPTIONS)
    ]
    features = Features({"image": Image(), "text": Sequence(Value("string"))})
    splits = {"train": rows[:5], "validation": rows[5:]}
    for name, part in splits.items():
        (root / "data").mkdir(parents=True, exist_ok=True)
        Dataset.from_list(part, features=features).to_parquet(root / "data" / f"{name}-00000-of-00001.parquet")
    return f"hf:{root}"


@pytest.mark.parametrize(
    ("write", "images"),
    [(write_table_dataset, ""), (with_byte_order_mark, ""), (tabs, "images"), (write_flat_coco_dataset, ""),
     (write_coco_dataset, ""), (write_coco_dataset, "coco"),
     (write_coco_dataset, "coco/val2017"), (write_folder_dataset, ""), (write_shard_dataset, ""),
     (lambda root: write_shard_dataset(root, "json"), "")],
)  # fmt: skip
def test_every_source_gives_the_same_images_and_sentences(
    write: Callable[[Path], str], images: str, tmp_path: Path
) -> None:
    folder = write(tmp_path)
    actual = open_split(CaptionSource(folder, images=str(tmp_path / images) if images else None), "train")
    first = [captions[0] for captions in actual.captions]
    assert first == CAPTIONS
    assert actual.captions[0] == (
        ("a dog", "a small dog")
        if write in (write_table_dataset, with_byte_order_mark, write_flat_coco_dataset)
        else ("a dog",)
    )
    for number in actual.labels:
        expected = np.asarray(Pil.open(io.BytesIO(png_bytes(number))))
        assert np.array_equal(actual.pixels(number), expected)
    assert len({actual.key(number) for number in actual.labels}) == 6


def test_splits_are_the_data_sets_own(tmp_path: Path) -> None:
    source = CaptionSource(write_karpathy_dataset(tmp_path / "coco"))
    train, val = open_pairs(source)
    assert [captions[0] for captions in train.captions] == CAPTIONS[:4]  # restval is trained on
    assert [captions[0] for captions in val.captions] == [CAPTIONS[4]]
    assert open_split(source, "test").captions == [(CAPTIONS[5],)]
    train, val = open_pairs(CaptionSource(hub(tmp_path / "hub")))
    assert ([captions[0] for captions in train.captions], val.captions) == (CAPTIONS[:5], [(CAPTIONS[5],)])
    assert np.array_equal(train.pixels(2), np.asarray(Pil.open(io.BytesIO(png_bytes(2)))))
    train, val = open_pairs(CaptionSource("demo"))
    assert (len(train.captions), len(val.captions)) == (8000, 1000)
    assert {train.key(index) for index in train.labels}.isdisjoint(val.key(index) for index in val.labels)
    assert train.captions[0][0].startswith("a large ")


def test_a_hub_data_set_that_names_files_has_their_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(tmp_path / name) for name in write_png_images(tmp_path, 2)]
    rows = {"image": [*paths, "zip://1.png::gone.zip"], "text": ["a", "b", "c"]}
    actual = Dataset.from_dict(rows, features=Features({"image": Image(), "text": Value("string")}))
    monkeypatch.setattr("dpn_cli.data.sources.hub.load_hub", lambda *of: {"train": actual})
    split = HubCaptions("x", "default", "train", None, None, skip_bad=False)
    assert list(split.sizes) == [len(png_bytes(0)), len(png_bytes(1)), 0]


def test_without_own_images_some_are_held_out_alike_everywhere(tmp_path: Path) -> None:
    names = write_png_images(tmp_path, 40)
    source = CaptionSource(
        str(write_caption_table(tmp_path / "pairs.csv", [(name, f"sentence {name}") for name in names]))
    )
    train, val = open_pairs(source)
    assert (len(train.captions), len(val.captions)) == (36, 4)
    held = {val.key(index) for index in val.labels}
    assert held.isdisjoint(train.key(index) for index in train.labels)
    write_caption_table(tmp_path / "turned.csv", [(name, f"sentence {name}") for name in reversed(names)])
    second = open_pairs(CaptionSource(str(tmp_path / "turned.csv")))[1]
    assert {second.key(index) for index in second.labels} == held
    assert len(open_pairs(CaptionSource(source.location, val_fraction=0.5))[1].captions) == 20
    with pytest.raises(DataError, match="too few to hold some out"):
        open_pairs(CaptionSource(str(write_caption_table(tmp_path / "two.csv", [("0.png", "a"), ("1.png", "b")]))))


def broken(root: Path, kind: str) -> str:
    names = write_png_images(root)
    rows = [("0.png", "a"), ("1.png", "b"), ("2.png", " " if kind == "text" else "c")]
    match kind:
        case "file":
            rows.append(("9.png", "d"))
        case "columns":
            return str(write_caption_table(root / "pairs.csv", rows, ("a", "b")))
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
            write_caption_shard(root / "0.tar", range(3), text=lambda number: "")
            return f"wds:{root}/0.tar"
        case "nowhere":
            return str(root / "nowhere.csv")
    assert names
    return str(write_caption_table(root / "pairs.csv", rows))


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
        open_split(CaptionSource(broken(tmp_path, kind)), "train")
    if kind in ("text", "file"):
        actual = open_split(CaptionSource(broken(tmp_path, kind), skip_bad=True), "train")
        assert (len(actual.captions), actual.dropped) == (2 if kind == "text" else 3, 1)


DEEP = "[" * 100_000 + "]" * 100_000
ONE = {"filename": "0.png", "split": "train", "sentences": [{"raw": "a dog"}]}
OFFICIAL = {"images": [{"id": 1, "file_name": "0.png"}], "annotations": [{"image_id": 1, "caption": "a dog"}]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (DEEP, "not readable as JSON .nested too deeply"),
        (f'{{"images": {DEEP}}}', "not readable as JSON .nested too deeply"),
        (f'{{"info": {DEEP}, "images": []}}', "not readable as JSON .nested too deeply"),
        ("", "not readable as JSON .Expecting value"),
        ('{"images": [{"filename"', "not readable as JSON .Expecting ':'"),
        ('{"images": ' + "1" * 5000 + "}", "not readable as JSON .Exceeds the limit"),
        ("null", "neither Karpathy's captions JSON"),
        ("[]", "neither Karpathy's captions JSON"),
        ('{"images": NaN}', "neither Karpathy's captions JSON"),
        ('{"images": {"a": 1}}', "neither Karpathy's captions JSON"),
        (json.dumps({"images": [[]]}), "neither Karpathy's captions JSON"),
        (json.dumps({"images": [ONE, {**ONE, "sentences": None}]}), "neither Karpathy's captions JSON"),
        (json.dumps({"images": [ONE, {**ONE, "filename": 5}]}), "neither Karpathy's captions JSON"),
        (json.dumps({"images": [ONE, {**ONE, "filepath": []}]}), "neither Karpathy's captions JSON"),
        (json.dumps({"images": [ONE, {**ONE, "filename": "a\0b"}]}), "no such image"),
        (json.dumps({"images": [{**ONE, "split": ["train"]}]}), "split train or restval, only of .'train'"),
        (json.dumps({**OFFICIAL, "annotations": None}), "neither Karpathy's captions JSON"),
        (json.dumps({**OFFICIAL, "annotations": [{"image_id": [1], "caption": "a"}]}), "neither Karpathy's"),
        (json.dumps({"images": [{**ONE, "sentences": [{"raw": "a \ud83d"}]}]}), "0.png: 'a .ud83d' holds half a"),
    ],
)  # fmt: skip
def test_captions_json_of_any_form_ends_in_one_line(content: str, message: str, tmp_path: Path) -> None:
    write_png_images(tmp_path, 1)
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(DataError, match=f"x.json: .*{message}") as raised:
        open_pairs(CaptionSource(str(tmp_path / "x.json")))
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 3


def test_captions_json_may_start_with_a_byte_order_mark(tmp_path: Path) -> None:
    folder = Path(write_karpathy_dataset(tmp_path))
    folder.write_text(folder.read_text(), encoding="utf-8-sig")
    assert open_split(CaptionSource(str(folder)), "val").captions == [(CAPTIONS[4],)]


def test_texts_with_half_a_character_are_left_out_when_asked(tmp_path: Path) -> None:
    write_png_images(tmp_path, 2)
    halved = {**ONE, "sentences": [{"raw": "a \ud83d"}, {"raw": "a cat"}]}
    (tmp_path / "x.json").write_text(json.dumps({"images": [halved, {**halved, "sentences": halved["sentences"][:1]}]}))
    actual = open_split(CaptionSource(str(tmp_path / "x.json"), skip_bad=True), "train")
    assert (actual.captions, actual.dropped) == ([("a cat",)], 1)


def test_a_description_in_a_shard_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", {"0.png": png_bytes(0), "0.json": DEEP.encode()})
    with pytest.raises(DataError, match="0.tar: 0.png: its .txt or .json cannot be read .maximum recursion"):
        open_split(CaptionSource(f"wds:{tmp_path}/0.tar"), "train")


def test_names_of_files_may_be_any_bytes(tmp_path: Path) -> None:
    for number in range(12):
        name = os.fsencode(tmp_path / str(number)) + b"\xff"
        Path(os.fsdecode(name + b".png")).write_bytes(png_bytes(number))
        Path(os.fsdecode(name + b".txt")).write_text("a dog")
    train, val = open_pairs(CaptionSource(str(tmp_path)))
    assert (len(train.captions), len(val.captions)) == (11, 1)
    assert len({data_fingerprint(train), data_fingerprint(val)}) == 2


def test_captions_in_shards_are_img2datasets(tmp_path: Path) -> None:
    write_caption_shard(tmp_path / "0.tar", range(2), text=lambda number: f"two lines\nof caption {number}")
    assert open_split(CaptionSource(f"wds:{tmp_path}/0.tar"), "train").captions[1] == ("two lines\nof caption 1",)
    described = [{"caption": "a dog", "title": "a page"}, {"captions": ["a dog", "two dogs"], "text": None}]
    images = {f"{number}.png": png_bytes(number) for number in range(2)}
    texts = {f"{number}.json": json.dumps(fields).encode() for number, fields in enumerate(described)}
    write_tar(tmp_path / "1.tar", images | texts)
    assert open_split(CaptionSource(f"wds:{tmp_path}/1.tar"), "train").captions == [("a dog",), ("a dog", "two dogs")]


def test_pairs_without_text_are_counted_in_every_source(tmp_path: Path) -> None:
    write_caption_shard(tmp_path / "0.tar", range(3), text=lambda number: " " if number == 1 else "a dog")
    rows = {"image": [{"bytes": png_bytes(number), "path": None} for number in range(3)], "text": ["a", None, "b"]}
    features = Features({"image": Image(), "text": Value("string")})
    (tmp_path / "hub").mkdir()
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "hub" / "train-00000-of-00001.parquet")
    for place in (f"wds:{tmp_path}/0.tar", f"hf:{tmp_path}/hub"):
        actual = open_split(CaptionSource(place, skip_bad=True), "train")
        assert (len(actual.captions), actual.dropped) == (2, 1)
        assert np.array_equal(actual.pixels(1), np.asarray(Pil.open(io.BytesIO(png_bytes(2)))))


def test_tokens_are_open_clips_and_longer_texts_keep_their_end() -> None:
    texts = [*CAPTIONS, "Many words, " * 12]
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
    (root / "text.txt").write_text("\n".join(CAPTIONS * 5).lower())
    sentencepiece.SentencePieceTrainer.train(
        input=str(root / "text.txt"), model_prefix=str(root / "small"), vocab_size=40, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    return root / "small.model"


def test_a_sentencepiece_file_has_a_sticky_end(pieces: Path, tmp_path: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    tokenizer, expected = open_tokenizer(str(pieces), 8, "lower"), SentencePieceProcessor(str(pieces))
    tokens, cut = tokenizer.encode(["A dog", "a dog " * 9])
    ids, end = expected.encode("a dog"), expected.eos_id()
    assert tokens[0].tolist() == [*ids, *[end] * (8 - len(ids))]
    assert tokens[1].tolist() == [*expected.encode("a dog " * 9)[:7], end]
    assert cut == 1
    (tmp_path / "other.model").write_text("no model")
    with pytest.raises(DataError, match=r"other.model: not a SentencePiece model"):
        open_tokenizer(str(tmp_path / "other.model"), 8, "lower")
    with pytest.raises(DataError, match="no such file or directory; leave it out"):
        open_tokenizer(str(tmp_path / "none.model"), 8, "lower")


def test_a_folder_without_readable_text_columns_is_refused(tmp_path: Path) -> None:
    path = write_caption_table(tmp_path / "pairs.csv", [("0.png", "a")], ("file", "words"))
    write_png_images(tmp_path, 1)
    with pytest.raises(DpnError, match=re.escape("which column holds the caption? The columns are 'file', 'words'")):
        open_split(CaptionSource(str(path)), "train")
    assert open_split(CaptionSource(str(path), caption_column="words"), "train").captions == [("a",)]


def test_a_pair_takes_its_texts_and_few_bytes(tmp_path: Path) -> None:
    files = CaptionedFiles(tmp_path)
    (tmp_path / "a.png").write_bytes(b"an image")
    stamp = len(stamp_of((tmp_path / "a.png").stat()))
    for number in range(200):
        files.add("a.png", [f"caption {number:03d}", "another"], "here")
    assert files.captions[17] == ("caption 017", "another")
    assert files.captions[-1] == ("caption 199", "another")
    some = Subset(files, range(0, 200, 2))
    assert (some.captions[1:3], len(some.stamps)) == ([files.captions[2], files.captions[4]], 100)
    texts, integers = len("a.pngcaption 000another") + stamp, 6 * 8
    assert len(pickle.dumps(files)) < 200 * (texts + integers) + 2000
