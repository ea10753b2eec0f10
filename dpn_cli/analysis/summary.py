"""Everything that `dpn inspect` measures in one network."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from dpn_cli.analysis.first_norm import CHANNELS, NormProfile, first_norm_maps, profile_map
from dpn_cli.analysis.hooks import Activations, record_activations
from dpn_cli.analysis.images import scenes
from dpn_cli.analysis.patch_probes import Probe, ordinary_patch, probe_stem
from dpn_cli.analysis.positions import Similarity, position_similarity
from dpn_cli.analysis.projection import Filters, effective_rank, principal_filters, singular_values
from dpn_cli.model.stem import NORMS
from dpn_cli.weights.backbone import Backbone

NO_DATA = "attention distances, token lengths and what explains the tokens are left out: they need images (--data)"


@dataclass(frozen=True)
class InspectionSummary:
    """Measurements of a network; `left_out` names those that are missing, and why.

    Args:
        name: what it is called next to another network.
        facts: what it is, for tables.
        maps: scale and bias of the first norm, see `first_norm_maps`; `described` describes them channel by channel.
        filters, values: principal filters and singular values of the projection with the first norm's scale.
        values_alone: the singular values without that scale; None where there is none.
        similarity: of the position embeddings; None where positions are rotary.
        probes: what the stem does to patches of different kinds.
        observed: what images showed; None without images.
    """

    name: str
    facts: dict[str, str]
    maps: dict[str, Tensor]
    described: dict[str, list[NormProfile]]
    filters: Filters
    values: Tensor
    values_alone: Tensor | None
    similarity: Similarity | None
    probes: list[Probe]
    observed: Activations | None
    left_out: list[str]
    normalises_first: bool
    """Whether the stem changes a patch before its projection."""

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain values for result.json; None for those that are not defined."""
        summary: dict[str, Any] = {"name": self.name, **self.facts, "left_out": self.left_out}
        summary["first_norm"] = {
            name: {channel: asdict(one) for channel, one in zip(CHANNELS, described, strict=True)}
            for name, described in self.described.items()
        }
        summary["projection"] = {
            "effective_rank": effective_rank(self.values),
            "singular_values": self.values.tolist(),
            "singular_values_without_scale": None if self.values_alone is None else self.values_alone.tolist(),
            "filter_shares": self.filters.shares.tolist(),
        }
        if (similarity := self.similarity) is not None:
            summary["positions"] = {"distance_in_patches": similarity.distance, "similarity": similarity.profile}
        summary["stem_on_patches"] = [
            {key: value for key, value in vars(probe).items() if not isinstance(value, Tensor)} for probe in self.probes
        ]
        if self.observed is not None:
            summary["images"] = self.observed.images
            summary["attention_distance"] = {
                "pixels": self.observed.distances.tolist(),
                "of_uniform_attention": self.observed.uniform,
            }
            summary["token_lengths"] = [asdict(one) for one in self.observed.lengths]
            summary["explained_by"] = self.observed.shares
        defined: dict[str, Any] = _replace_nonfinite(summary)
        return defined


def examine(name: str, model: Backbone, batches: Iterable[Tensor] | None) -> InspectionSummary:
    """Measure a network in evaluation mode; `batches` of uint8 images (b, 3, h, w) go through it, None for none.

    An ordinary patch is taken from them, or from the built-in scenes.
    """
    maps = first_norm_maps(model)
    activations = None if batches is None else record_activations(model, batches)
    ordinary = ordinary_patch(model, scenes(model)) if activations is None else activations.ordinary
    return InspectionSummary(
        name,
        _facts(model),
        maps,
        {kind: [profile_map(channel) for channel in values] for kind, values in maps.items()},
        principal_filters(model),
        singular_values(model, with_scale=True),
        singular_values(model, with_scale=False) if "scale" in maps else None,
        None if model.config.posemb == "rope" else position_similarity(model),
        probe_stem(model, ordinary),
        activations,
        _left_out(model, maps, batches is None),
        "norm_in" in NORMS[model.config.stem],
    )


def _facts(model: Backbone) -> dict[str, str]:
    config, report = model.config, model.report
    height, width = config.grid
    return {
        "file": report.source,
        "sha256": report.digest,
        "arch": config.arch,
        "stem": config.stem,
        "norms": f"{config.norm}, placement {config.placement}",
        "grid": f"{height} x {width} patches of {config.patch[0]} x {config.patch[1]} pixels",
        "positions": {"learn": "learned", "sincos2d": "fixed sines and cosines", "rope": "rotary"}[config.posemb],
        "class token": "yes" if config.has_class_token else "no",
        **({"distillation token": "yes"} if config.distillation_token else {}),
        **({"registers": str(config.registers)} if config.registers else {}),
        "parameters": f"{report.parameters / 1e6:.2f} M",
    }


def _left_out(model: Backbone, maps: dict[str, Tensor], no_images: bool) -> list[str]:
    stem, lines = model.config.stem, list[str]()
    if "norm_in" not in NORMS[stem]:
        lines.append(f"maps of the first norm are left out: the stem {stem!r} has no norm before its projection")
    elif not maps:
        lines.append(f"maps of the first norm are left out: with the stem {stem!r} it learns no scale and no bias")
    elif "bias" not in maps:
        lines.append(f"the map of the first norm's bias is left out: with the stem {stem!r} it has none")
    if model.config.posemb == "rope":
        lines.append("the similarity of positions is left out: they are rotary, and have no embedding")
    if no_images:
        lines.append(NO_DATA)
    elif model.config.pool == "map":
        lines.append("the attention with which the head pools the tokens is left out: its query is no patch")
    return lines


def _replace_nonfinite(value: Any) -> Any:
    """Return a value with None for the numbers in it that are infinite or none."""
    if isinstance(value, dict):
        return {key: _replace_nonfinite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replace_nonfinite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
