"""What is measured in a network, against closed forms, brute force and second libraries."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.decomposition import PCA
from sklearn.metrics.pairwise import cosine_similarity

from dpn_cli.analysis.attention import uniform_distance
from dpn_cli.analysis.first_norm import first_norm_maps, profile_map, regions
from dpn_cli.analysis.hooks import record_activations
from dpn_cli.analysis.patch_probes import ordinary_patch, probe_stem
from dpn_cli.analysis.plots import sections_of
from dpn_cli.analysis.positions import position_similarity
from dpn_cli.analysis.projection import effective_rank, principal_filters, singular_values
from dpn_cli.analysis.summary import examine
from dpn_cli.weights.backbone import Backbone, load_backbone
from support.backbones import CENTRE, set_stem_norm
from support.images import noise_images


def network(stem: str = "dpn", arch: str = "nano/8", pool: str = "tok", seed: int = 0) -> Backbone:
    model = load_backbone(arch, stem=stem, image_size=(32, 24), pool=pool, seed=seed)  # type: ignore[arg-type]
    model.eval()
    return model


def test_a_planted_pattern_is_found_at_its_position() -> None:
    model = network()
    set_stem_norm(model)
    maps = first_norm_maps(model)
    red, green, blue = maps["scale"]
    assert torch.equal(red, torch.ones(8, 8).double())
    assert torch.equal(blue, red)
    assert green[CENTRE, CENTRE].eq(2).all()
    assert green.sum() == 64 + 4
    described = profile_map(green)
    assert described.means == {"centre": 2, "corners": 1, "edges": 1, "all": 68 / 64}
    assert described.profile[0] == 2
    assert described.profile[1:] == [1] * (len(described.profile) - 1)
    assert described.radius[0] == pytest.approx(math.sqrt(0.5))
    assert described.left_right == described.up_down == pytest.approx(1)
    assert profile_map(red).left_right is None
    rows = profile_map(maps["bias"][2])
    assert rows.left_right == pytest.approx(1)
    assert rows.up_down == pytest.approx(-1)
    assert rows.means["centre"] == 3.5


@pytest.mark.parametrize(("stem", "names"), [("rms", ["scale"]), ("affine_only", ["scale", "bias"]), ("post", [])])
def test_other_stems_have_the_maps_that_they_learn(stem: str, names: list[str]) -> None:
    assert list(first_norm_maps(network(stem))) == names
    assert not first_norm_maps(network("dpn_no_affine"))


def test_regions_of_a_patch_of_16_pixels() -> None:
    masks = {name: int(mask.sum()) for name, mask in regions((16, 16)).items()}
    assert masks == {"centre": 16, "corners": 16, "edges": 4 * 12 * 2, "all": 256}
    assert not regions((16, 16))["edges"].logical_and(regions((16, 16))["corners"]).any()


@pytest.mark.parametrize("pool", ["tok", "gap"])
def test_attention_without_preference_is_as_far_as_uniform_attention(pool: str) -> None:
    model = network(pool=pool)
    for block in model.blocks:
        block.attn.qkv.weight.data.zero_()
    centres = [(row * 8, column * 8) for row in range(4) for column in range(3)]
    by_hand = np.mean([math.dist(centre, other) for centre in centres for other in centres])
    observed = record_activations(model, [noise_images()])
    assert observed.uniform == pytest.approx(by_hand)
    np.testing.assert_allclose(observed.distances, np.full((4, 2), by_hand), rtol=1e-6)
    assert uniform_distance((14, 14), (16, 16)) == pytest.approx(117, abs=1)


def test_attention_to_oneself_is_no_distance_away_and_to_a_neighbour_one_patch() -> None:
    model = network(pool="tok")
    for block in model.blocks:  # which change nothing, so that all see the positions alone
        block.norm1 = torch.nn.Identity()
        block.attn.proj.weight.data.zero_()
        block.mlp.fc2.weight.data.zero_()
        q, k, _ = block.attn.qkv.weight.data.chunk(3)
        q.copy_(torch.eye(64) * 400)
        k.copy_(torch.eye(64))
    model.patch_embed.norm = torch.nn.Identity()
    model.patch_embed.proj.weight.data.zero_()
    model.pos_embed.data.copy_(torch.eye(12, 32).repeat(1, 2)[None])  # one number per place and head
    assert record_activations(model, [noise_images()]).distances.abs().max() < 1e-5
    to = torch.tensor([1, 2, 1])  # the patch to the right; the last column looks to the left
    right = torch.stack([F.one_hot(torch.tensor(row * 3) + to, 32) for row in range(4)]).flatten(0, 1).float()
    for block in model.blocks:
        q = block.attn.qkv.weight.data.chunk(3)[0]
        q.zero_()
        q[:32, :12] = q[32:, 32:44] = right.T * 400
    np.testing.assert_allclose(record_activations(model, [noise_images()]).distances, np.full((4, 2), 8.0), rtol=1e-5)


def test_attention_matches_the_heads_and_the_network_is_unchanged() -> None:
    model, pixels = network(pool="gap"), noise_images(2)
    initial = model.forward_features(model.normalize(pixels))
    observed = record_activations(model, [pixels[:1], pixels[1:]])
    assert [block.attn.fused_attn for block in model.blocks] == [True] * 4
    assert torch.equal(model.forward_features(model.normalize(pixels)), initial)
    block = model.blocks[0]
    x = model.patch_embed(model.normalize(pixels)) + model.pos_embed
    q, k, _ = block.attn.qkv(block.norm1(x)).detach().double().view(2, 12, 3, 2, 32).unbind(2)
    weight = torch.einsum("bqhd,bkhd->bhqk", q, k).div(math.sqrt(32)).softmax(-1)
    centres = torch.cartesian_prod(torch.arange(4.0) * 8, torch.arange(3.0) * 8).double()
    far = (centres[:, None] - centres).norm(dim=-1)
    np.testing.assert_allclose(observed.distances[0], (weight * far).sum(-1).mean((0, 2)), rtol=1e-5)


def test_lengths_of_tokens_are_measured_at_every_position() -> None:
    model, pixels = network("post_posemb"), noise_images(2)
    model.cls_token.data.fill_(0.5)
    observed = {length.stage: length for length in record_activations(model, [pixels]).lengths}
    assert list(observed) == ["stem", "with positions", "block 1", "block 2", "block 3", "block 4", "final norm"]
    with torch.no_grad():
        stem = model.patch_embed(model.normalize(pixels))
        final = model.forward_features(model.normalize(pixels))
    assert observed["stem"].class_token is None
    assert observed["stem"].mean == pytest.approx(float(stem.norm(dim=-1).mean()), rel=1e-5)
    assert observed["with positions"].class_token == pytest.approx(0.5 * 8)
    assert observed["final norm"].mean == pytest.approx(float(final[:, 1:].norm(dim=-1).mean()), rel=1e-5)
    assert observed["final norm"].class_token == pytest.approx(float(final[:, 0].norm(dim=-1).mean()), rel=1e-5)
    assert observed["with positions"].mean == pytest.approx(8, rel=1e-3)  # a norm comes after them in this stem
    one = observed["stem"]
    assert one.low < one.mean < one.high < one.largest
    assert one.largest == pytest.approx(float(stem.norm(dim=-1).max()))


@pytest.mark.parametrize("stem", ["none", "dpn"])
def test_explained_variance_matches_a_least_squares_fit(stem: str) -> None:
    model, pixels = network(stem), noise_images(3)
    shares = record_activations(model, [pixels[:2], pixels[2:]]).shares
    image = model.normalize(pixels)
    with torch.no_grad():
        tokens = model.patch_embed(image).flatten(0, 1).double().numpy()
    patches = image.view(3, 3, 4, 8, 3, 8).permute(0, 2, 4, 3, 5, 1).reshape(36, -1).double().numpy()
    columns = {"brightness": patches.mean(1), "contrast": patches.std(1)}
    for name, kept in {**{name: [name] for name in columns}, "both": list(columns)}.items():
        x = np.stack([np.ones(36), *(columns[one] for one in kept)], 1)
        _, remaining, *_ = np.linalg.lstsq(x, tokens, rcond=None)
        expected = 1 - remaining.sum() / ((tokens - tokens.mean(0)) ** 2).sum()
        assert shares[name] == pytest.approx(expected, rel=1e-6)


def test_brightness_and_contrast_explain_more_of_a_plain_stem() -> None:
    shares = {stem: record_activations(network(stem), [noise_images(3)]).shares["both"] for stem in ("none", "dpn")}
    assert shares["none"] is not None
    assert shares["dpn"] is not None
    assert shares["none"] > shares["dpn"]


def test_tokens_that_do_not_vary_have_no_explanation() -> None:
    model = network("none")
    model.patch_embed.proj.weight.data.zero_()
    model.patch_embed.proj.bias.data.fill_(1)
    assert record_activations(model, [noise_images()]).shares == {"brightness": None, "contrast": None, "both": None}


def test_filters_are_the_principal_components_of_the_projection() -> None:
    model = network()
    set_stem_norm(model)
    weight = (model.patch_embed.proj.weight * first_norm_maps(model)["scale"]).detach().double()
    library = PCA(5).fit(weight.flatten(1).numpy())
    actual = principal_filters(model, 5)
    np.testing.assert_allclose(actual.shares, library.explained_variance_ratio_, rtol=1e-9)
    cosine = (actual.patterns.flatten(1) * torch.from_numpy(library.components_)).sum(1)
    np.testing.assert_allclose(cosine.abs(), 1, rtol=1e-9)
    assert (actual.patterns.flatten(1).amax(1) >= -actual.patterns.flatten(1).amin(1)).all()


def test_singular_values_with_and_without_the_scale() -> None:
    model = network()
    model.patch_embed.norm_in.weight.data.mul_(3)
    matrix = model.patch_embed.proj.weight.detach().double().flatten(1)
    values = torch.linalg.eigvalsh(matrix @ matrix.T).flip(0).sqrt()
    np.testing.assert_allclose(singular_values(model, with_scale=False), values, rtol=1e-9)
    np.testing.assert_allclose(singular_values(model, with_scale=True), 3 * values, rtol=1e-6)
    assert effective_rank(torch.tensor([2.0, 2.0, 2.0, 0.0])) == pytest.approx(3)
    assert effective_rank(torch.tensor([3.0, 1.0])) == pytest.approx(0.9**-0.9 * 0.1**-0.1)


def test_similarity_of_positions_is_their_cosine() -> None:
    model = network()
    actual = position_similarity(model, most=2)
    assert (actual.rows, actual.columns) == ([0, 3], [0, 2])
    table = cosine_similarity(model.pos_embed[0].detach().numpy())
    np.testing.assert_allclose(actual.maps[1, 0].flatten(), table[9], rtol=1e-5)
    centres = [(row, column) for row in range(4) for column in range(3)]
    far = np.array([[math.dist(centre, other) for other in centres] for centre in centres])
    rings = [far.astype(int) == ring for ring in range(4)]
    np.testing.assert_allclose(actual.profile, [table[ring].mean() for ring in rings], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(actual.distance, [far[ring].mean() for ring in rings], rtol=1e-9)


def test_a_dpn_stem_sees_no_light_and_amplifies_a_little_noise() -> None:
    image = noise_images(1)
    model = network()
    ordinary = ordinary_patch(model, image)
    patches = image[0].float().view(3, 4, 8, 3, 8).permute(1, 3, 0, 2, 4).reshape(12, 3, 8, 8)
    middle = patches.flatten(1).std(1).sort().values[6]
    assert float(ordinary.std()) == pytest.approx(float(middle))
    kinds = {one.name: one for one in probe_stem(model, ordinary)}
    plain = {one.name: one for one in probe_stem(network("none"), ordinary)}
    for name in ("half the light", "half the contrast"):
        assert kinds[name].change < 1e-4 < 0.1 < plain[name].change
    set_stem_norm(model)
    (flat,) = (one for one in probe_stem(model, ordinary) if one.name == "flat grey")
    assert torch.equal(flat.normalised, torch.arange(8.0)[:, None].expand(3, 8, 8))  # the first norm's bias
    little = kinds["flat, noise of one level"]
    assert little.contrast == pytest.approx(0.5 / 127.5, rel=0.05)
    assert little.contrast_after == pytest.approx(1 / math.sqrt(1 + 1e-6 / little.contrast**2), rel=1e-4)
    assert kinds["flat grey"].contrast_after == 0
    assert plain["flat grey"].contrast_after == 0
    assert plain["ordinary"].contrast_after == plain["ordinary"].contrast


def test_rotary_positions_have_no_similarity_and_registers_are_no_class_token() -> None:
    model = load_backbone("nano/8", stem="dpn", image_size=32, pool="gap", posemb="rope", registers=2).eval()
    summary = examine("a", model, [torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)])
    assert summary.similarity is None
    assert summary.facts["positions"] == "rotary"
    assert summary.facts["registers"] == "2"
    assert any("they are rotary, and have no embedding" in line for line in summary.left_out)
    assert summary.to_dict()["positions"] == "rotary"
    assert "Position embeddings" not in [section.title for section in sections_of([summary])]
    assert summary.observed is not None
    assert {length.class_token for length in summary.observed.lengths} == {None}
