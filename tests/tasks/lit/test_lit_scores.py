"""What `dpn lit` scores: the zero-shot classifier beside open_clip's, prompts, recall beside a loop, chance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from open_clip import build_zero_shot_classifier
from open_clip.tokenizer import SimpleTokenizer
from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES
from timm.data import ImageNetInfo
from torch import Tensor

from dpn_cli.errors import DataError, SaveError
from dpn_cli.metrics import Confusion, Scores
from dpn_cli.run.distributed import World
from support.lit import make_towers
from tasks.lit.retrieval import recalls
from tasks.lit.towers import Towers, load_lit, save_towers
from tasks.lit.zeroshot import build_classifier, check_order, class_names, classifier_of, prompt_set, prompts_of


class OpenClipModel(torch.nn.Module):
    """What `build_zero_shot_classifier` asks of a model, made of open_clip's own transformer."""

    def __init__(self, own: Towers) -> None:
        super().__init__()
        self.text = own.text.transformer

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        features: Tensor = self.text(text)
        return F.normalize(features, dim=-1) if normalize else features


def test_the_zero_shot_classifier_is_open_clips() -> None:
    own, names = make_towers(), IMAGENET_CLASSNAMES[:70]
    actual = build_classifier(own, names, prompt_set("clip_paper"))
    templates = [*OPENAI_IMAGENET_TEMPLATES, lambda name: name]
    tokenizer = SimpleTokenizer(context_length=16, clean="canonicalize")
    expected = build_zero_shot_classifier(OpenClipModel(own), tokenizer, names, templates, num_classes_per_batch=7)
    torch.testing.assert_close(actual, expected.T, atol=2e-6, rtol=0)


def test_a_cached_classifier_belongs_to_its_tower_names_prompts_and_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = World(0, 1, torch.device("cpu"))
    asked = [(["a cat", "a dog"], ["{}"]), (["a dog", "a cat"], ["{}"]), (["a cat", "a dog"], ["one {}", "{}"])]
    for _ in range(2):  # the second time from the folder
        for own in (make_towers(2), make_towers(3)):
            for names, templates in asked:
                actual = classifier_of(own, names, templates, tmp_path, single)
                assert torch.equal(actual, build_classifier(own, names, templates))
        assert len(list(tmp_path.iterdir())) == 6
    own, (names, templates) = make_towers(2), asked[0]
    with torch.autocast("cpu", torch.bfloat16):
        half = classifier_of(own, names, templates, tmp_path, single)
    assert not torch.equal(half, build_classifier(own, names, templates))
    assert len(list(tmp_path.iterdir())) == 7

    def refuse(path: Path, *_: Any) -> str:
        raise SaveError(f"{path}: not written")

    monkeypatch.setattr("tasks.lit.zeroshot.write_weights", refuse)  # as in a folder that may only be read
    assert torch.equal(
        classifier_of(own, names, templates, tmp_path / "locked", single), build_classifier(own, names, templates)
    )


def test_prompts_and_names_are_big_visions(tmp_path: Path) -> None:
    assert [len(prompt_set(name)) for name in ("clip_paper", "clip_best", "plain")] == [81, 8, 1]
    assert prompt_set("clip_best")[-1] == "{}"
    assert prompts_of(["Great_Dane"], ["itap of a {}.", "{}"]) == [["itap of a great dane", "great dane"]]
    wnids = ImageNetInfo("imagenet-1k").label_names()
    assert class_names(wnids, None) == (list(IMAGENET_CLASSNAMES), "open_clip's ImageNet names")
    assert class_names([str(number) for number in range(1000)], None)[0] == list(IMAGENET_CLASSNAMES)
    assert class_names([wnids[7], wnids[3]], None)[0] == [IMAGENET_CLASSNAMES[7], IMAGENET_CLASSNAMES[3]]
    assert class_names(["red_car", "bus"], None) == (["red car", "bus"], "the names of --data's classes")
    (tmp_path / "names.txt").write_text("one, uno\ntwo\n")
    assert class_names(["a", "b"], str(tmp_path / "names.txt"))[0] == ["one", "two"]
    with pytest.raises(DataError, match=r"names.txt: 2 names for the 3 classes"):
        class_names(["a", "b", "c"], str(tmp_path / "names.txt"))
    with pytest.raises(DataError, match="'dog' is not an ImageNet class folder"):
        class_names(["dog"], "imagenet")
    with pytest.raises(DataError, match=r"'one, uno' has no \{\} for the class name"):
        prompt_set(str(tmp_path / "names.txt"))
    with pytest.raises(DataError, match="choose clip_paper, clip_best, plain, demo, or a file"):
        prompt_set("clip_wrst")


def brute_force(images: Tensor, texts: Tensor, owner: Tensor, k: int) -> tuple[float, float]:
    similarity = (images @ texts.T).tolist()
    to_text = to_image = 0
    for row, values in enumerate(similarity):
        order = sorted(range(len(values)), key=lambda i, values=values: -values[i])  # type: ignore[misc]
        to_text += any(int(owner[i]) == row for i in order[:k])
    for number in range(len(texts)):
        column = [values[number] for values in similarity]
        order = sorted(range(len(column)), key=lambda i, column=column: -column[i])  # type: ignore[misc]
        to_image += int(owner[number]) in order[:k]
    return 100 * to_text / len(images), 100 * to_image / len(texts)


@pytest.mark.parametrize("levels", [None, 2, 1])
def test_recall_is_a_brute_force_loops(levels: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.lit.retrieval.ROWS", 7)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(20, 4, generator=generator)
    owner = torch.cat([torch.arange(20), torch.randint(20, (25,), generator=generator)])
    texts = images[owner] + torch.randn(45, 4, generator=generator)
    if levels:  # many equal similarities; with one level all are equal, as from a network that knows nothing
        images, texts = ((value > 0).float() * (levels - 1) for value in (images, texts))
    actual = recalls(images, texts, owner)
    for k in (1, 5, 10):
        assert (actual[f"image_to_text@{k}"], actual[f"text_to_image@{k}"]) == pytest.approx(
            brute_force(images, texts, owner, k)
        )


def test_features_that_are_no_numbers_never_score(tmp_path: Path) -> None:
    images = torch.eye(20)
    actual = recalls(images, images * torch.nan, torch.arange(20))
    assert set(actual.values()) == {0.0}
    own = make_towers()
    with torch.no_grad():
        own.text.log_temperature.fill_(torch.nan)
    save_towers(own, tmp_path / "weights.safetensors")
    with pytest.raises(DataError, match="not a file of two LiT towers .weights that are NaN or infinite"):
        load_lit(str(tmp_path))


def scores(right: int, images: int, classes: int) -> Scores:
    return Scores(images, right, right, 0.0, 0, Confusion(classes, {0: right}))


def test_an_accuracy_that_chance_explains_is_refused() -> None:
    check_order(scores(400, 1000, 10), 10)
    for right in (0, 100, 110):
        with pytest.raises(DataError, match="class names are probably in another order than the labels"):
            check_order(scores(right, 1000, 10), 10)
