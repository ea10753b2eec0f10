"""Sliding windows, losses and scores of segmentation, against recorded references, mmsegmentation and torchmetrics."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix

from dpn_cli.weights.backbone import load_backbone
from support.goldens import Arrays, to_nchw
from support.segment import import_mmseg
from tasks.segment.iou import SegmentScores, count_pixels
from tasks.segment.labels import IGNORE
from tasks.segment.loss import UpsampledCrossEntropy, segmentation_loss
from tasks.segment.model import LinearSegmenter, initialize_head, normalize
from tasks.segment.palette import Class
from tasks.segment.sliding_window import Axis, WindowPlan, axis_matrix, label_map, resize_rows, starts, view

CLASSES = 7


@pytest.fixture(scope="module")
def network() -> LinearSegmenter:
    vit = load_backbone("mu/8", image_size=32, num_classes=CLASSES, seed=1)
    initialize_head(vit, "lecun_normal", 2)
    return LinearSegmenter(vit, final_norm=True).eval()


def random_image(height: int, width: int) -> Tensor:
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def by_hand(network: LinearSegmenter, image: Tensor, out: tuple[int, int], stride: int) -> Tensor:
    """The definition: upsample every window, add it up, divide by how often, resize. Returns (classes, h, w)."""
    x = network.vit.normalize(image)
    height, width = max(x.shape[1], 32), max(x.shape[2], 32)
    padded = F.pad(x, (0, width - x.shape[2], 0, height - x.shape[1]))
    total, count = torch.zeros(CLASSES, height, width), torch.zeros(height, width)
    for top in starts(x.shape[1], 32, stride):
        for left in starts(x.shape[2], 32, stride):
            logits = network(padded[None, :, top : top + 32, left : left + 32])
            total[:, top : top + 32, left : left + 32] += F.interpolate(logits, (32, 32), mode="bilinear")[0]
            count[top : top + 32, left : left + 32] += 1
    mean = (total / count)[None, :, : x.shape[1], : x.shape[2]]
    return F.interpolate(mean, out, mode="bilinear", align_corners=False)[0]


@pytest.mark.parametrize(
    ("size", "out"), [((32, 32), (32, 32)), ((45, 90), (45, 90)), ((32, 70), (61, 133)), ((20, 50), (40, 25))]
)
@torch.inference_mode()
def test_tiles_of_two_matrices_are_the_windows_mean(
    network: LinearSegmenter, size: tuple[int, int], out: tuple[int, int]
) -> None:
    image = random_image(*size)
    expected = by_hand(network, image, out, 21)
    plan = WindowPlan(32, 21, (128, 32), batch_size=3)
    look = view(network, image, out, plan, flip=False)
    actual = look.tile(slice(None), slice(None)).permute(2, 0, 1)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)
    assert torch.equal(label_map(network, [image], out, plan).long(), actual.argmax(0))


@torch.inference_mode()
def test_a_map_larger_than_a_tile_is_put_together(network: LinearSegmenter) -> None:
    image = random_image(40, 60)
    actual = label_map(network, [image], (300, 530), WindowPlan(32, 21, (128, 32)))
    expected = by_hand(network, image, (300, 530), 21).argmax(0)
    assert (actual.long() == expected).float().mean() > 0.9999


def test_a_tile_takes_the_logits_near_it_in_an_image_of_any_size() -> None:
    for length, out in ((512, 512), (2048, 2048), (8192, 8192), (2048, 683), (600, 4096)):
        full = axis_matrix(512, starts(length, 512, 341), 32, length, out)
        for matrix in (full, full.flip(0)):
            axis = Axis(matrix, torch.device("cpu"))
            actual = torch.zeros_like(matrix)
            for start in range(0, out, 256):
                part, used = axis.part(slice(start, start + 256))
                actual[start : start + 256, used] = part
                pixels = math.ceil(256 * length / out) + 2
                # Windows that cover any of the pixels: each has all of its 32 patches in the matrix.
                assert used.stop - used.start <= 32 * math.ceil((pixels + 512) / 341 + 1)
            assert torch.equal(actual, matrix)


@torch.inference_mode()
def test_scales_and_flips_average_probabilities(network: LinearSegmenter) -> None:
    images, out = [random_image(40, 60), random_image(64, 96)], (40, 60)
    expected = torch.zeros(CLASSES, *out)
    for image in images:
        expected += by_hand(network, image, out, 21).softmax(0)
        expected += by_hand(network, image.flip(-1), out, 21).softmax(0).flip(-1)
    actual = label_map(network, images, out, WindowPlan(32, 21, (128, 32), ratios=(1.0, 1.6), flip=True))
    assert (actual.long() == expected.argmax(0)).float().mean() > 0.999


@torch.inference_mode()
def test_the_whole_image_goes_through_a_network_of_its_size(network: LinearSegmenter) -> None:
    image, own = random_image(44, 61), network.vit.pos_embed
    actual = label_map(network, [image], (44, 61), WindowPlan(32, None, (128, 32)))
    assert network.vit.pos_embed is own
    large = load_backbone("mu/8", image_size=(48, 64), num_classes=CLASSES)
    table = F.interpolate(own.detach().view(1, 4, 4, -1).permute(0, 3, 1, 2), (6, 8), mode="bilinear")
    state = {**network.vit.state_dict(), "pos_embed": table.flatten(2).transpose(1, 2)}
    large.load_state_dict(state)
    x = F.pad(large.normalize(image[None]), (0, 3, 0, 4))
    logits = F.interpolate(LinearSegmenter(large, final_norm=True).eval()(x), (48, 64), mode="bilinear")
    assert (actual.long() == logits[0, :, :44, :61].argmax(0)).float().mean() > 0.999
    assert network(network.vit.normalize(random_image(32, 32))[None]).shape == (1, CLASSES, 4, 4)


def test_windows_start_at_the_references_positions() -> None:
    assert starts(512, 512, 341) == [0]
    assert starts(683, 512, 341) == [0, 171]
    assert starts(2048, 512, 341) == [0, 341, 682, 1023, 1364, 1536]
    assert starts(300, 512, 341) == [0]


def test_images_are_resized_as_asked() -> None:
    plan = WindowPlan(512, 341, (2048, 512))
    assert plan.size((600, 800), 1.0) == (512, 683)
    assert plan.size((500, 3000), 1.0) == (341, 2048)  # padded below
    assert plan.size((600, 800), 0.5) == (256, 341)
    native = WindowPlan(512, 341, (2048, 512), native=True)
    assert native.size((600, 800), 1.0) == (600, 800)
    assert native.size((600, 800), 0.5) == (300, 400)
    assert native.size((256, 300), 1.0) == (512, 600)
    assert native.size((10, 5000), 1.0) == (10, 5000)  # never made larger than the cap
    assert native.size((10_000, 600), 1.0) == (10_000, 600)


@torch.inference_mode()
def test_slide_inference_is_mmsegmentations(network: LinearSegmenter) -> None:
    import_mmseg()
    from mmengine.config import ConfigDict
    from mmseg.models.segmentors import EncoderDecoder

    image = network.vit.normalize(random_image(45, 90))[None]
    stand_in = type("Segmentor", (), {})()
    stand_in.test_cfg, stand_in.out_channels = ConfigDict(mode="slide", crop_size=(32, 32), stride=(21, 21)), CLASSES
    stand_in.encode_decode = lambda crop, metas: F.interpolate(network(crop), crop.shape[-2:], mode="bilinear")
    expected = EncoderDecoder.slide_inference(stand_in, image, [{}])[0]
    look = view(network, random_image(45, 90), (45, 90), WindowPlan(32, 21, (128, 32)), flip=False)
    torch.testing.assert_close(look.tile(slice(None), slice(None)).permute(2, 0, 1), expected, atol=2e-5, rtol=1e-5)


def test_upsampling_is_jaxs(golden: Callable[[str], Arrays]) -> None:
    recorded = golden("logits_bilinear_upsample")
    small = to_nchw(recorded["in"])[0]
    for name, (height, width) in {"x4": (24, 28), "x16": (96, 112), "down_noantialias": (4, 3)}.items():
        down = resize_rows(torch.eye(6, dtype=torch.float64), height).float()
        across = resize_rows(torch.eye(7, dtype=torch.float64), width).float()
        torch.testing.assert_close(down @ small @ across.T, to_nchw(recorded[name])[0], atol=1e-5, rtol=1e-5)
    one = axis_matrix(24, [0], 6, 24, 24)
    torch.testing.assert_close(one @ small, (resize_rows(torch.eye(6, dtype=torch.float64), 24).float() @ small))


def test_the_loss_and_its_gradient_are_scenics(golden: Callable[[str], Arrays]) -> None:
    recorded = golden("segmentation_loss")
    logits = to_nchw(recorded["logits"]).requires_grad_()
    label = torch.from_numpy(recorded["labels"])
    valid = (label != IGNORE).sum().float() / len(label)
    batch = {"label": label.to(torch.uint8), "valid": valid.expand(len(label))}
    loss = segmentation_loss(logits, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(recorded["masked/loss"].item(), abs=1e-5)
    torch.testing.assert_close(logits.grad, to_nchw(recorded["masked/grad"]), atol=1e-7, rtol=1e-4)
    # Micro-batches weighed by their rows add up to the batch, however unequal their labelled pixels are.
    parts = [
        segmentation_loss(logits[i : i + 1], {"label": batch["label"][i : i + 1], "valid": batch["valid"][i : i + 1]})
        for i in range(len(label))
    ]
    assert torch.stack(parts).mean().item() == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("size", [(48, 80), (17, 300), (3, 4)])
def test_the_loss_in_strips_is_torchs_own(size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = (9 * torch.randn(2, 6, 7, 11, generator=generator)).permute(0, 3, 1, 2).requires_grad_()
    label = torch.randint(0, 12, (2, *size), generator=generator)
    label[label == 11] = IGNORE
    actual = UpsampledCrossEntropy.apply(logits, label.to(torch.uint8))
    (gradient,) = torch.autograd.grad(3 * actual, logits)
    upsampled = F.interpolate(logits, size, mode="bilinear", align_corners=False)
    their_values = F.cross_entropy(upsampled, label, ignore_index=IGNORE, reduction="sum")
    (expected,) = torch.autograd.grad(3 * their_values, logits)
    torch.testing.assert_close(actual, their_values, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)


def test_a_batch_without_a_labelled_pixel_has_no_loss() -> None:
    batch = {"label": torch.full((2, 8, 8), IGNORE, dtype=torch.uint8), "valid": torch.zeros(2)}
    assert segmentation_loss(torch.randn(2, 3, 2, 2), batch).item() == 0


def test_micro_batches_of_sparse_masks_add_up() -> None:
    logits = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    label = torch.full((4, 8, 8), IGNORE, dtype=torch.uint8)
    label[1, 2, 3] = 2  # a pixel for four images
    full = segmentation_loss(logits, {"label": label, "valid": torch.full((4,), 0.25)})
    upsampled = F.interpolate(logits, (8, 8), mode="bilinear")
    torch.testing.assert_close(full, F.cross_entropy(upsampled, label.long(), ignore_index=IGNORE))
    parts = [
        segmentation_loss(logits[i : i + 1], {"label": label[i : i + 1], "valid": torch.tensor([0.25])})
        for i in range(4)
    ]
    torch.testing.assert_close(torch.stack(parts).mean(), full)


def test_padding_is_zero_after_normalising(network: LinearSegmenter) -> None:
    image = random_image(32, 32)[None]
    out = normalize(network.vit, image, torch.tensor([[20, 12]]))
    torch.testing.assert_close(out[:, :, :20, :12], network.vit.normalize(image)[:, :, :20, :12])
    assert not out[:, :, 20:].any()
    assert not out[:, :, :, 12:].any()


def test_scores_are_scenics(golden: Callable[[str], Arrays]) -> None:
    recorded = golden("segmentation_miou")
    label = torch.from_numpy(recorded["labels"]).to(torch.uint8)
    result = torch.from_numpy(recorded["pred"])
    confusion = sum((count_pixels(f, t, CLASSES) for f, t in zip(result, label, strict=True)), torch.zeros(()).long())
    scores = SegmentScores(confusion, len(label))
    assert torch.equal(confusion, torch.from_numpy(recorded["confusion_matrix"]).long())
    assert scores.miou / 100 == pytest.approx(recorded["global_mean_iou"].item(), abs=1e-6)
    per_image = recorded["mean_of_per_image_miou"].item()
    assert abs(scores.miou / 100 - per_image) > 1e-3
    for actual, expected in zip((scores.iou / 100).tolist(), recorded["iou_per_class"].tolist(), strict=True):
        assert actual == pytest.approx(expected, abs=1e-6) or (math.isnan(actual) and expected == 0)
    expected = MulticlassConfusionMatrix(CLASSES, ignore_index=IGNORE)(result, label)
    assert torch.equal(confusion, expected)


def test_labels_that_are_left_out_weigh_nothing(golden: Callable[[str], Arrays]) -> None:
    recorded = golden("segmentation_cm_edge")
    truth, actual = torch.from_numpy(recorded["y_true"]), torch.from_numpy(recorded["y_pred"])
    # Scenic counts labels beyond the last class to it; here a mask with one never gets this far.
    label = torch.where((truth >= 0) & (truth < IGNORE), truth.clamp(max=3), IGNORE).to(torch.uint8)
    assert torch.equal(count_pixels(actual, label, 4), torch.from_numpy(recorded["cm_numpy"]).long())
    assert not count_pixels(actual, torch.full_like(label, IGNORE), 4).any()


def test_scores_are_mmsegmentations() -> None:
    import_mmseg()
    from mmseg.evaluation import IoUMetric

    generator = torch.Generator().manual_seed(0)
    total, results = torch.zeros(9, 9, dtype=torch.int64), []
    for _ in range(4):
        result = torch.randint(0, 8, (40, 50), generator=generator)
        label = torch.randint(0, 7, (40, 50), generator=generator)
        label[torch.rand(label.shape, generator=generator) < 0.2] = IGNORE
        total += count_pixels(result, label.to(torch.uint8), 9)
        results.append(IoUMetric.intersect_and_union(result, label, 9, IGNORE))
    metric = IoUMetric(iou_metrics=["mIoU"])
    metric.dataset_meta = {"classes": [str(i) for i in range(9)]}
    expected = metric.compute_metrics(results)
    actual = SegmentScores(total, 4)
    # mmsegmentation rounds to two digits.
    assert expected["mIoU"] == pytest.approx(actual.miou, abs=0.006)
    assert expected["aAcc"] == pytest.approx(actual.pixel_accuracy, abs=0.006)
    assert expected["mAcc"] == pytest.approx(actual.mean_accuracy, abs=0.006)
    kinds = ["mIoU", "mDice", "mFscore"]
    exact = IoUMetric.total_area_to_metrics(*(sum(parts) for parts in zip(*results, strict=True)), kinds)
    for name, values in {
        "IoU": actual.iou,
        "Dice": actual.dice,
        "Fscore": actual.fscore,
        "Precision": actual.precision,
        "Recall": actual.recall,
    }.items():
        np.testing.assert_allclose(values.numpy() / 100, exact[name], atol=1e-6)
    summary = actual.to_dict()
    assert summary["mdice"] == pytest.approx(100 * np.nanmean(exact["Dice"]), abs=1e-4)
    assert summary["mfscore"] == pytest.approx(100 * np.nanmean(exact["Fscore"]), abs=1e-4)
    assert summary["mean_precision"] == pytest.approx(100 * np.nanmean(exact["Precision"]), abs=1e-4)


def test_the_table_of_classes_names_every_class() -> None:
    confusion = torch.tensor([[6, 2, 0], [1, 3, 0], [0, 0, 0]])
    scores = SegmentScores(confusion, 1)
    table = scores.per_class([Class(name, (0, 0, 0)) for name in ("a", "b,c", "d")])
    assert table.splitlines() == [
        "class,name,pixels,predicted,iou,recall,precision,dice,fscore",
        "0,a,8,7,66.67,75.00,85.71,80.00,80.00",
        '1,"b,c",4,5,50.00,75.00,60.00,66.67,66.67',
        "2,d,0,0,,,,,",
    ]
    assert scores.majority_miou == pytest.approx(100 * 8 / 12 / 2)
