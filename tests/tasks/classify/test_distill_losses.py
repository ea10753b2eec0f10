"""The losses of `dpn distill` against other libraries and closed forms, and what they are computed from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, kl_divergence

from dpn_cli.engine.losses import Loss
from dpn_cli.weights.backbone import Backbone, load_backbone
from tasks.classify.distill.config import Losses
from tasks.classify.distill.losses import Distance, NetworkOutputs, ObservedNetwork, divergence, inputs_of

ALL = Losses(tokens=2.0, representation=0.5, logits=3.0, attention=0.7, temperature=2.0, layers=((0, 1), (2, 3)))


def network(stem: str, seed: int) -> Backbone:
    model = load_backbone("nano/8", stem=stem, image_size=16, num_classes=5, seed=seed)
    model.eval()
    g = torch.Generator().manual_seed(seed)
    torch.nn.init.normal_(model.get_parameter("head.weight"), generator=g)
    return model


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_divergence_is_torchs(loss: Loss, temperature: float) -> None:
    their_values, actual = torch.randn(2, 6, 5, dtype=torch.float64) * 3
    kind: Any = Categorical if loss == "softmax" else Bernoulli
    expected = kl_divergence(kind(logits=their_values / temperature), kind(logits=actual / temperature))
    expected = (expected if loss == "softmax" else expected.sum(-1)) * temperature**2
    torch.testing.assert_close(divergence(their_values, actual, loss, temperature), expected)
    assert float(divergence(their_values, their_values, loss).abs().max()) < 1e-12


def test_observed_activations_equal_timms() -> None:
    model, image = network("dpn", 0), torch.randn(2, 3, 16, 16)
    observed = ObservedNetwork(model, ALL, [0, 2])(image)
    final, (first, third) = model.forward_intermediates(
        image, indices=[0, 2], output_fmt="NLC", return_prefix_tokens=False
    )
    torch.testing.assert_close(observed["tokens"], final)
    torch.testing.assert_close(observed["tokens.0"][:, 1:], first)
    torch.testing.assert_close(observed["tokens.1"][:, 1:], third)
    torch.testing.assert_close(observed["logits"], model(image))
    torch.testing.assert_close(observed["representation"], model.forward_head(final, pre_logits=True))
    block = model.blocks[2]
    x = block.norm1(observed["tokens.0"] if len(model.blocks) == 2 else model.blocks[1](observed["tokens.0"]))
    v = block.attn.qkv(x).chunk(3, -1)[2].unflatten(-1, (2, -1)).transpose(1, 2)
    mixed = (observed["attention.1"].softmax(-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(block.attn.proj(mixed), block.attn(x))


def test_without_pairs_of_blocks_the_last_attention_counts() -> None:
    model, image = network("dpn", 0), torch.randn(2, 3, 16, 16)
    last = ObservedNetwork(model, Losses(tokens=0, representation=0, logits=0, attention=1.0), [])(image)
    assert set(last) == {"attention.0"}
    second = network("dpn", 0)
    both = ObservedNetwork(second, Losses(attention=1.0, layers=((3, 3),)), [3])(image)
    assert torch.equal(last["attention.0"], both["attention.0"])


def by_hand(expected: NetworkOutputs, actual: NetworkOutputs, deviations: dict[str, Tensor]) -> Tensor:
    """The loss of one image after another."""
    total = torch.zeros((), dtype=torch.float64)
    count = len(expected["logits"])
    for row in range(count):
        apart = [
            (((actual[n][row] - expected[n][row]) / deviations[n]) ** 2).mean()
            for n in ("tokens", "tokens.0", "tokens.1")
        ]
        total += 2.0 * sum(apart) / 3
        a, b = actual["representation"][row], expected["representation"][row]
        total += 0.5 * (1 - (a @ b) / a.norm() / b.norm())
        p = Categorical(logits=expected["logits"][row] / 2), Categorical(logits=actual["logits"][row] / 2)
        total += 3.0 * 4 * kl_divergence(*p)
        for n in ("attention.0", "attention.1"):
            rows = kl_divergence(Categorical(logits=expected[n][row]), Categorical(logits=actual[n][row]))
            total += 0.7 / 2 * rows.mean()
    return total / count


def test_the_loss_is_the_sum_of_its_parts() -> None:
    teacher, student = network("none", 1), network("dpn", 2)
    batch = {"image": torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)}
    seeing, observed = ObservedNetwork(teacher, ALL, [1, 3]), ObservedNetwork(student, ALL, [0, 2])
    deviations = {name: torch.rand(64) + 0.5 for name in ("tokens", "tokens.0", "tokens.1")}
    distance = Distance(lambda part: seeing(teacher.normalize(part["image"])), student, ALL, deviations, "softmax")
    with torch.no_grad():
        value = distance(observed, batch)
        their_values, actual = (
            {name: item.double() for name, item in one(net.normalize(batch["image"])).items()}
            for one, net in ((seeing, teacher), (observed, student))
        )
    expected = by_hand(their_values, actual, {name: item.double() for name, item in deviations.items()})
    torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("losses", "frozen"),
    [
        (Losses(), ()),
        (Losses(logits=0), ("head.",)),
        (Losses(logits=0, representation=0), ("head.", "pre_logits.")),
    ],
)
def test_parameters_without_effect_on_the_loss_are_frozen(losses: Losses, frozen: tuple[str, ...]) -> None:
    """Every other weight has a gradient: ranks that average gradients wait for those of all trained weights."""
    model = load_backbone("mu/8", stem="dpn", image_size=16, num_classes=5, pre_logits=True)
    torch.nn.init.normal_(model.get_parameter("head.weight"))
    observed = ObservedNetwork(model, losses, [])
    observed.freeze_unused()
    seen = observed(torch.randn(2, 3, 16, 16))
    total = torch.stack([value.square().sum() for value in seen.values()]).sum()
    total.backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (not name.startswith(frozen) if frozen else True), name
        assert (parameter.grad is not None) == parameter.requires_grad, name


def test_teacher_and_student_see_the_same_mixture_each_in_its_own_range() -> None:
    model = load_backbone("mu/8", image_size=16)
    batch = {name: torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8) for name in ("image", "other_image")}
    mixed = inputs_of(model, {**batch, "mix": torch.tensor([0.75, 0.6])})
    share = torch.tensor([0.75, 0.6])[:, None, None, None]
    pixels = share * batch["image"] + (1 - share) * batch["other_image"]
    torch.testing.assert_close(mixed, pixels / 127.5 - 1, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs_of(model, {"image": batch["image"]}), batch["image"] / 127.5 - 1)


def test_the_gradient_reaches_the_student_alone() -> None:
    teacher, student = network("none", 1), network("dpn", 2)
    seeing, observed = ObservedNetwork(teacher, Losses(), []), ObservedNetwork(student, Losses(), [])
    distance = Distance(
        lambda part: seeing(part["image"].float()), student, Losses(), {"tokens": torch.ones(64)}, "softmax"
    )
    batch = {"image": torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)}
    teacher.requires_grad_(False)
    distance(observed, batch).backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())


def test_the_student_alone_sees_noise() -> None:
    teacher, student = network("none", 0), network("dpn", 1)
    clean, noisy = torch.randint(0, 256, (2, 3, 3, 16, 16), dtype=torch.uint8)
    observed = ObservedNetwork(student, Losses(tokens=0, representation=1.0, logits=0), [])
    seen: list[Tensor] = []

    def targets(batch: dict[str, Tensor]) -> NetworkOutputs:
        seen.append(inputs_of(teacher, batch))
        return {"representation": torch.eye(3, student.embed_dim)}

    distance = Distance(targets, student, observed.losses, {}, "softmax")
    loss = distance(observed, {"image": clean, "noisy_image": noisy})
    assert torch.equal(seen[0], teacher.normalize(clean))
    assert torch.equal(loss, distance(observed, {"image": noisy}))
    assert not torch.equal(loss, distance(observed, {"image": clean}))
