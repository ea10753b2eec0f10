"""Outputs of teacher and student for an image, and the losses between the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dpn_cli.data.loader import blend
from dpn_cli.engine.fit import Batch
from dpn_cli.engine.losses import Loss
from dpn_cli.weights.backbone import Backbone
from tasks.classify.distill.config import Losses

NetworkOutputs = dict[str, Tensor]
"""Outputs of a network by name: ``tokens`` (b, t, d) after the final norm, ``tokens.K`` after the K-th pair of
blocks, ``representation`` (b, d), ``logits`` (b, classes), and ``attention.K`` (b, heads, t, t) before the softmax."""


class ObservedNetwork(nn.Module):
    """A ViT that returns the outputs of one forward pass for `losses`.

    `blocks` are those whose tokens and attention are compared, in the order of the pairs of ``losses.layers``; without
    pairs the attention is that of the last block.
    """

    def __init__(self, network: Backbone, losses: Losses, blocks: Sequence[int]) -> None:
        super().__init__()
        self.network, self.losses = network, losses
        self._recorded: NetworkOutputs = {}
        for pair, block in enumerate(blocks):
            if losses.tokens:
                network.blocks[block].register_forward_hook(partial(self._see_tokens, pair))
        for pair, block in enumerate(blocks or (len(network.blocks) - 1,)):
            if losses.attention:
                network.blocks[block].attn.register_forward_pre_hook(partial(self._see_attention, pair))

    def forward(self, image: Tensor) -> NetworkOutputs:
        """Map images (b, 3, h, w) in the network's input range to the outputs to compare."""
        self._recorded = {}
        network, losses = self.network, self.losses
        tokens = network.forward_features(image)
        outputs = {"tokens": tokens} if losses.tokens else {}
        if losses.representation or losses.logits:
            representation = network.forward_head(tokens, pre_logits=True)
            if losses.representation:
                outputs["representation"] = representation
            if losses.logits:
                one_head = network.head_dist is None
                outputs["logits"] = network.head(representation) if one_head else network.forward_head(tokens)
        return {**outputs, **self._recorded}

    def _see_tokens(self, pair: int, module: nn.Module, inputs: tuple[Tensor, ...], tokens: Tensor) -> None:
        self._recorded[f"tokens.{pair}"] = tokens

    def _see_attention(self, pair: int, attention: Any, inputs: tuple[Tensor, ...]) -> None:
        heads = attention.num_heads
        q, k, _ = rearrange(attention.qkv(inputs[0]), "b t (three h d) -> three b h t d", three=3, h=heads)
        q, k = attention.q_norm(q), attention.k_norm(k)
        self._recorded[f"attention.{pair}"] = attention.scale * q @ k.transpose(-2, -1)

    def freeze_unused(self) -> None:
        """Freeze head and pooling if no loss depends on them."""
        unused_prefixes = [] if self.losses.logits else ["head.", "head_dist."]
        unused_prefixes += (
            [] if self.losses.logits or self.losses.representation else ["fc_norm.", "attn_pool.", "pre_logits."]
        )
        for name, parameter in self.network.named_parameters():
            if unused_prefixes and name.startswith(tuple(unused_prefixes)):
                parameter.requires_grad_(False)


def inputs_of(network: Backbone, batch: Batch, *, noisy: bool = False) -> Tensor:
    """Return the images of a batch (b, 3, h, w) in the network's input range, mixed if the batch has a mix.

    With `noisy`, those with noise where the batch has them.
    """
    key = "noisy_image" if noisy and "noisy_image" in batch else "image"
    image = network.normalize(batch[key])
    return blend(image, network.normalize(batch[f"other_{key}"]), batch["mix"]) if "mix" in batch else image


def divergence(teacher_logits: Tensor, student_logits: Tensor, loss: Loss, temperature: float = 1.0) -> Tensor:
    """Return the Kullback-Leibler divergence of each row of logits (b, classes) from the teacher's, in nats: (b,).

    With the softmax loss it is that of one distribution over the classes; with the sigmoid loss the sum over classes of
    that of yes and no. Both logits are divided by the temperature first, and the result is multiplied by its square,
    which keeps the size of gradients (arXiv 1503.02531 §2.1).
    """
    teacher_logits, student_logits = teacher_logits / temperature, student_logits / temperature
    if loss == "softmax":
        value = F.kl_div(
            student_logits.log_softmax(-1), teacher_logits.log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)
    else:
        target = teacher_logits.sigmoid()
        entropies = (
            F.binary_cross_entropy_with_logits(logits, target, reduction="none")
            for logits in (student_logits, teacher_logits)
        )
        cross, entropy = entropies
        value = (cross - entropy).sum(-1)
    return value * temperature**2


class Distance:
    """The engine's loss of a batch: how far the student is from the teacher on the same images.

    Args:
        teacher: returns the teacher's outputs for a batch, without gradients; see `ObservedNetwork`.
        student: normalises the student's images.
        losses: the weight of each term.
        deviations: standard deviations (d,) of the teacher's tokens per channel, by the names of `NetworkOutputs`.
        loss: the loss that trained the teacher's logits.
    """

    def __init__(
        self,
        teacher: Callable[[Batch], NetworkOutputs],
        student: Backbone,
        losses: Losses,
        deviations: dict[str, Tensor],
        loss: Loss,
    ) -> None:
        self.teacher, self.student, self.losses = teacher, student, losses
        self.deviations, self.loss = deviations, loss

    def __call__(self, trainable: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of the batch's rows, a scalar."""
        teacher_outputs = self.teacher(batch)
        student_outputs = trainable(inputs_of(self.student, batch, noisy=True))
        return self.compare({name: value.float() for name, value in teacher_outputs.items()}, student_outputs)

    def compare(self, teacher_outputs: NetworkOutputs, student_outputs: NetworkOutputs) -> Tensor:
        """Return the weighted sum of the terms; tokens and attention are means over the compared layers."""
        losses, parts = self.losses, list[Tensor]()
        token_names = [name for name in teacher_outputs if name.startswith("tokens")]
        for name in token_names:
            difference = (student_outputs[name].float() - teacher_outputs[name]) / self.deviations[name]
            parts.append(difference.square().mean() * (losses.tokens / len(token_names)))
        if losses.representation:
            cosine = F.cosine_similarity(
                student_outputs["representation"].float(), teacher_outputs["representation"], dim=-1
            )
            parts.append((1 - cosine).mean() * losses.representation)
        if losses.logits:
            distance = divergence(
                teacher_outputs["logits"], student_outputs["logits"].float(), self.loss, losses.temperature
            )
            parts.append(distance.mean() * losses.logits)
        maps = [name for name in teacher_outputs if name.startswith("attention")]
        for name in maps:
            rows = F.kl_div(
                student_outputs[name].float().log_softmax(-1),
                teacher_outputs[name].log_softmax(-1),
                reduction="none",
                log_target=True,
            )
            parts.append(rows.sum(-1).mean() * (losses.attention / len(maps)))
        return torch.stack(parts).sum()
