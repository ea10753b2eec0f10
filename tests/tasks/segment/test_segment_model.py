"""What is trained and seen is what the config says: network, head, examples, and a segmenter saved and loaded."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpn_cli.config.load import build
from dpn_cli.engine.fit import Outputs
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import Backbone, export_backbone, load_backbone
from support.segment import segment_config
from tasks.segment import train
from tasks.segment.artifact import Segmenter, load_segmenter, save_segmenter
from tasks.segment.config import Evaluation, MaskData, SegmentConfig
from tasks.segment.labels import IGNORE, LabelRule
from tasks.segment.loader import segment_batches
from tasks.segment.model import LinearSegmenter, initialize_head
from tasks.segment.pairs import PairsSubset, ScenePairs, list_digest
from tasks.segment.palette import Class
from tasks.segment.sliding_window import label_map
from tasks.segment.transforms import SegmentAugmentation

ALONE = World(0, 1, torch.device("cpu"))


def trainable(network: LinearSegmenter) -> set[str]:
    return {name for name, parameter in network.vit.named_parameters() if parameter.requires_grad}


def head(vit: Backbone) -> nn.Linear:
    assert isinstance(vit.head, nn.Linear)
    return vit.head


def test_parameters_without_effect_on_patch_tokens_are_frozen() -> None:
    vit = load_backbone("mu/8", image_size=32, num_classes=3)
    every = {name for name, _ in vit.named_parameters()}
    assert trainable(LinearSegmenter(vit, final_norm=True)) == every - {"pre_logits.weight", "pre_logits.bias"}
    assert trainable(LinearSegmenter(vit, final_norm=False)) == every - {"norm.weight", "norm.bias"}


@pytest.mark.parametrize(
    ("scheme", "std", "largest"),
    [("truncated_normal", 0.02, 2), ("lecun_normal", 32**-0.5, 2.3 * 32**-0.5), ("zero", 0, 0)],
)
def test_the_head_is_initialized_as_configured(scheme: Any, std: float, largest: float, tmp_path: Path) -> None:
    tower = tmp_path / "tower.safetensors"
    export_backbone(load_backbone("mu/8", image_size=32), tower)
    vit = load_backbone("mu/8", image_size=32, num_classes=200, checkpoint=str(tower))
    torch.nn.init.ones_(head(vit).bias)
    initialize_head(vit, scheme, 1)
    weight = head(vit).weight.detach().clone()
    assert weight.std().item() == pytest.approx(std, rel=0.03)
    assert weight.abs().max() <= largest
    assert not head(vit).bias.any()
    assert vit.report.new[-2:] == [f"head.weight ({scheme.replace('_', ' ')})", "head.bias (zero)"]
    initialize_head(vit, scheme, 2)
    assert torch.equal(head(vit).weight, weight) == (scheme == "zero")


def test_a_network_is_built_as_the_config_says(tmp_path: Path) -> None:
    tower = load_backbone("Ti/16", image_size=48, seed=5)
    tower.pos_embed.data.normal_()
    export_backbone(tower, tmp_path / "tower.safetensors")
    base = {"checkpoint": str(tmp_path / "tower.safetensors"), "arch": None, "pool": None, "drop_path": 0.3}
    built = train.load_network(segment_config("demo", backbone=base, final_norm=True, head_init="zero"), 5)
    vit = built.vit
    assert built.final_norm
    assert not head(vit).weight.any()
    assert vit.mean == (0.485, 0.456, 0.406)
    drops = [path.drop_prob for path in (vit.blocks[-1].drop_path1, vit.blocks[-1].drop_path2)]
    assert drops == pytest.approx([0.3, 0.3])
    grid = tower.pos_embed.detach().view(1, 3, 3, -1).permute(0, 3, 1, 2)
    resized = F.interpolate(grid, (4, 4), mode="bilinear", align_corners=False)
    torch.testing.assert_close(vit.pos_embed.detach(), resized.flatten(2).transpose(1, 2), atol=1e-6, rtol=1e-5)
    changed = {"data": {"inputs": "checkpoint"}, "freeze": "stem", "final_norm": False, "seed": 1}
    other = train.load_network(segment_config("demo", backbone=base, **changed), 5)
    assert other.vit.mean == tower.mean != vit.mean
    assert not other.final_norm
    assert not any(name.startswith("patch_embed.") for name in trainable(other))
    second = train.load_network(segment_config("demo", backbone=base, seed=2), 5)
    assert not torch.equal(head(second.vit).weight, head(other.vit).weight)


def test_a_fraction_is_trained_on_and_reported() -> None:
    config = segment_config("demo", data={"fraction": "1/4"}, schedule={"steps": 40})
    data = train.open_data(config)
    assert (len(data.train), data.whole, len(data.val)) == (250, 1000, 200)
    assert train.passes(config, data) == 1.28
    message = train.describe_length(config, data)
    assert f"250 of 1000 (fraction 0.25, list {list_digest(data.train)})" in message
    assert message.endswith("40 steps of 8: 1.28 passes")


class _StopError(Exception):
    pass


def test_examples_are_made_as_the_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    augment = {"ratio": [0.7, 1.5], "cat_max": 0.6, "photometric": False}
    config = segment_config("demo", augment=augment, data={"scale": [300, 70], "flip": False})
    data = train.open_data(config)
    segmenter = Segmenter(train.load_network(config, 5), data.classes, config.data, config.evaluation, {})
    observed: list[Any] = []

    def batches(*arguments: Any, **_: Any) -> None:
        observed.extend(arguments)
        raise _StopError

    monkeypatch.setattr(train, "segment_batches", batches)
    with pytest.raises(_StopError):
        train.job_of(config, data, segmenter, ALONE, Outputs())
    assert astuple(observed[2]) == ((64, 64), (300, 70), (0.7, 1.5), 0.6, False, False)


def test_every_visit_of_an_image_is_another_example() -> None:
    one = PairsSubset(ScenePairs(0, 1), [0] * 4)
    options = SegmentAugmentation((48, 48), (256, 64))

    def steps(seed: int) -> list[torch.Tensor]:
        batches = segment_batches(one, LabelRule(5, 1, 0), options, 4, seed, ALONE, workers=0)(0)
        return [image for _, batch in zip(range(2), batches, strict=False) for image in batch["image"]]

    examples = [*steps(0), *steps(1)]
    assert len({image.numpy().tobytes() for image in examples}) == len(examples) == 16
    assert all(torch.equal(*both) for both in zip(steps(1), examples[8:], strict=True))


def test_the_loss_divides_by_the_labelled_pixels_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpn_cli.run.distributed.reduce_over_ranks", lambda count: count + 1000)  # another rank's
    mode, rank = SegmentAugmentation((48, 48), (256, 64)), World(0, 2, torch.device("cpu"))
    batch = next(iter(segment_batches(ScenePairs(0, 4), LabelRule(5, 1, 0), mode, 4, 0, rank, workers=0)(0)))
    assert batch["valid"].tolist() == [((batch["label"] != IGNORE).sum().item() + 1000) / 4] * 2


def test_padding_reaches_the_network_as_zero() -> None:
    network = LinearSegmenter(load_backbone("mu/8", image_size=32, num_classes=3), final_norm=False)
    batch = {
        "image": torch.full((1, 3, 32, 32), 9, dtype=torch.uint8),
        "extent": torch.tensor([[20, 12]]),
        "label": torch.zeros(1, 32, 32, dtype=torch.uint8),
        "valid": torch.tensor([240.0]),
    }
    shown: list[torch.Tensor] = []
    network.register_forward_pre_hook(lambda _, images: shown.extend(images))
    train.loss_of(network)(network, batch)
    assert shown[0][:, :, :20, :12].all()
    assert not shown[0][:, :, 20:].any()
    assert not shown[0][:, :, :, 12:].any()


def segmenter(data: MaskData, evaluation: Evaluation) -> Segmenter:
    vit = load_backbone("mu/8", image_size=32, num_classes=3, seed=3)
    vit.get_parameter("norm.weight").data.uniform_(0.1, 3)
    initialize_head(vit, "lecun_normal", 2)
    classes = tuple(Class(name, (index, 2, 3)) for index, name in enumerate("abc"))
    return Segmenter(LinearSegmenter(vit, final_norm=True).eval(), classes, data, evaluation, {"so": 1})


def test_images_are_seen_as_the_run_or_the_command_says() -> None:
    own = segmenter(MaskData(scale=(128, 40)), Evaluation(scales=(0.5, 1.0), flip=True, batch_size=3))
    plan = own.plan()
    assert (plan.window, plan.stride, plan.scale, plan.native) == (32, 21, (128, 40), False)
    assert (plan.ratios, plan.flip, plan.batch_size) == ((0.5, 1.0), True, 3)
    assert own.plan(Evaluation(mode="whole", stride=7)).stride is None
    assert own.plan(Evaluation(size="native")).native
    assert own.plan(Evaluation(stride=7)).stride == 7
    assert own.plan(Evaluation(stride=99)).stride == 32
    assert segmenter(MaskData(), Evaluation()).plan().scale == (128, 32)  # of the network's windows


def test_a_segmenter_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    saved = segmenter(MaskData(scale=(128, 40), label_offset=3, ignore_label=None), Evaluation(mode="whole"))
    save_segmenter(saved, tmp_path / "weights.safetensors")
    loaded = load_segmenter(str(tmp_path / "weights.safetensors"))
    assert (loaded.classes, loaded.data, loaded.evaluation, loaded.facts, loaded.rule, loaded.arch) == (
        saved.classes,
        saved.data,
        saved.evaluation,
        saved.facts,
        LabelRule(3, 3, None),
        "mu/8",
    )
    image = torch.randint(0, 256, (3, 40, 60), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        maps = [label_map(item.network, [image], (40, 60), item.plan()) for item in (saved, loaded)]
    assert torch.equal(*maps)
    assert maps[0].float().std() > 0


def test_a_folders_config_differs_from_ade20ks_as_its_images_do() -> None:
    from tasks.segment.config import resolve

    ade, folder = (
        build(SegmentConfig, resolve(name, None, {"data": {"source": "x"}}, {}), name) for name in ("ade20k", "segment")
    )
    same = ("lr", "batch_size", "optim", "schedule", "backbone")
    assert all(getattr(ade, key) == getattr(folder, key) for key in same)
    assert folder.epochs == 128
    assert (folder.data.label_offset, folder.data.ignore_label) == (0, 255)
    assert (ade.data.label_offset, ade.data.ignore_label, ade.augment.photometric) == (1, 0, True)
    assert (ade.data.caps(28), ade.data.inputs, ade.augment.ratio) == ((2048, 512), "imagenet", (0.5, 2.0))
    assert (folder.data.caps(28), folder.data.inputs, folder.augment.ratio) == ((112, 28), "checkpoint", (1, 1))
    assert (ade.final_norm, folder.final_norm, ade.data.flip, folder.data.flip) == (False, True, True, True)
    assert (ade.evaluation.mode, ade.evaluation.size, ade.evaluation.scales) == ("slide", "both", (1.0,))
    assert folder.evaluation.size == "resize"  # as training sizes the images
    assert folder.head_init == "lecun_normal"  # of any width
    assert (ade.head_init, ade.epochs, ade.evaluate_every) == ("truncated_normal", None, 16_000)


def test_norms_over_a_grid_follow_the_size() -> None:
    vit = load_backbone("nano/8", norm="dtn", image_size=32, num_classes=3)
    initialize_head(vit, "lecun_normal", 0)
    network = LinearSegmenter(vit, final_norm=False).eval()
    image = torch.randn(1, 3, 48, 16, generator=torch.Generator().manual_seed(0))
    with network.at_size((48, 16)), torch.no_grad():
        assert network(image).shape == (1, 3, 6, 2)
    assert vit.blocks[0].norm1.grid == (4, 4)
