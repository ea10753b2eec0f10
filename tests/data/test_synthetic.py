import math
import re
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest

from dpn_cli.data.sources.synthetic import (
    COLORS,
    LABELS,
    LIGHTS,
    MASK_CLASSES,
    SCENE_SIZE,
    SHAPES,
    Scene,
    SceneObject,
    caption,
    label,
    render,
    sample_scene,
)
from tasks.vtab.tasks import DEMO_TASKS

# Area of each shape inscribed in a circle of radius 1.
UNIT_AREA = {
    "circle": math.pi,
    "square": 2.0,
    "triangle": 3 * math.sqrt(3) / 4,
    "cross": 8 * 0.3 * math.sqrt(1 - 0.3**2) - 4 * 0.3**2,
}
# Chi-square values that a uniform distribution exceeds once in 1000 draws, by degrees of freedom.
CHI_SQUARE_LIMIT = {3: 16.27, 5: 20.52, 9: 27.88, 15: 37.70, 23: 49.73}


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return [sample_scene(7, index) for index in range(2000)]


def scene_of(*objects: SceneObject, light: str = "left") -> Scene:
    return Scene(objects, background=(120.0, 120.0, 120.0), light=light, light_strength=40.0, noise_seed=0)


def disc(x: float = 0.5, y: float = 0.5, radius: float = 0.2, color: str = "red") -> SceneObject:
    return SceneObject("circle", color, x, y, radius, angle=0.0)


def pixel_centres() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    line = (np.arange(SCENE_SIZE) + 0.5) / SCENE_SIZE
    x, y = np.meshgrid(line, line)
    return x, y


def test_same_seed_and_index_give_the_same_pixels() -> None:
    first, second = sample_scene(3, 5), sample_scene(3, 5)
    assert first == second
    for one, other in zip(render(first), render(second), strict=True):
        np.testing.assert_array_equal(one, other)


def test_seed_and_index_both_change_the_image() -> None:
    images = {render(sample_scene(seed, index))[0].tobytes() for seed in range(4) for index in range(4)}
    assert len(images) == 16


def test_a_scene_does_not_depend_on_earlier_scenes() -> None:
    forwards = [render(sample_scene(11, index))[0] for index in range(12)]
    for index in reversed(range(12)):
        np.testing.assert_array_equal(render(sample_scene(11, index))[0], forwards[index])


@pytest.mark.parametrize("arguments", [(-1, 0), (0, -1)])
def test_negative_arguments_are_refused(arguments: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="negative"):
        sample_scene(*arguments)


def test_the_vtab_demo_has_labels_that_scenes_determine() -> None:
    assert all(len(LABELS[task.name]) == task.classes for task in DEMO_TASKS)


@pytest.mark.parametrize("task", LABELS)
def test_labels_are_class_indices_and_near_uniform(task: str, scenes: list[Scene]) -> None:
    classes = len(LABELS[task])
    labels = [label(scene, task) for scene in scenes]
    assert set(labels) == set(range(classes))
    expected = len(scenes) / classes
    chi_square = ((np.bincount(labels) - expected) ** 2 / expected).sum()
    assert chi_square < CHI_SQUARE_LIMIT[classes - 1]


@pytest.mark.parametrize(("one", "other"), list(combinations([task for task in LABELS if task != "demo_object"], 2)))
def test_labels_of_two_tasks_are_independent(one: str, other: str, scenes: list[Scene]) -> None:
    table = np.zeros((len(LABELS[one]), len(LABELS[other])))
    for scene in scenes:
        table[label(scene, one), label(scene, other)] += 1
    expected = np.outer(table.sum(axis=1), table.sum(axis=0)) / len(scenes)
    freedom = (len(LABELS[one]) - 1) * (len(LABELS[other]) - 1)
    assert ((table - expected) ** 2 / expected).sum() < CHI_SQUARE_LIMIT[freedom]


def test_label_class_names_match_the_scene(scenes: list[Scene]) -> None:
    for scene in scenes[:200]:
        main = scene.objects[0]
        assert LABELS["demo_shape"][label(scene, "demo_shape")] == main.shape
        assert LABELS["demo_color"][label(scene, "demo_color")] == main.color
        assert LABELS["demo_object"][label(scene, "demo_object")] == f"{main.color} {main.shape}"
        assert LABELS["demo_light"][label(scene, "demo_light")] == scene.light
        assert LABELS["demo_count"][label(scene, "demo_count")] == str(len(scene.objects))


@pytest.mark.parametrize(
    ("x", "expected"),
    [(0.1, 0), (0.26, 0), (0.37, 0), (0.39, 1), (0.49, 1), (0.51, 2), (0.61, 2), (0.63, 3), (0.74, 3)],
)
def test_position_label_is_the_column_of_the_main_object(x: float, expected: int) -> None:
    assert label(scene_of(disc(x=x), disc(x=0.9, radius=0.08)), "demo_position") == expected


def test_an_unknown_task_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'demo_size'.*demo_shape.*demo_position"):
        label(scene_of(disc()), "demo_size")


def test_main_object_is_first_and_clearly_the_largest(scenes: list[Scene]) -> None:
    for scene in scenes:
        main, *others = scene.objects
        assert 0.19 <= main.radius <= 0.25
        assert all(0.09 <= other.radius <= 0.115 for other in others)


def test_objects_lie_inside_the_image_and_apart(scenes: list[Scene]) -> None:
    for scene in scenes:
        for item in scene.objects:
            assert min(item.x, item.y) - item.radius >= 0.01
            assert max(item.x, item.y) + item.radius <= 0.99
        for one, other in combinations(scene.objects, 2):
            assert math.hypot(one.x - other.x, one.y - other.y) > one.radius + other.radius + 0.02


def test_mask_holds_the_ids_of_the_scene_and_no_others(scenes: list[Scene]) -> None:
    assert MASK_CLASSES == ("background", "circle", "square", "triangle", "cross")
    for scene in scenes[:200]:
        mask = render(scene)[1]
        assert mask.shape == (SCENE_SIZE, SCENE_SIZE)
        assert mask.dtype == np.uint8
        names = {"background", *(item.shape for item in scene.objects)}
        assert set(np.unique(mask)) == {MASK_CLASSES.index(name) + 1 for name in names}


def test_mask_area_and_centroid_agree_with_the_geometry_of_every_object(scenes: list[Scene]) -> None:
    x, y = pixel_centres()
    measured, expected = [], []
    for scene in scenes[:200]:
        mask = render(scene)[1]
        for item in scene.objects:
            near = np.hypot(x - item.x, y - item.y) <= item.radius + 0.01
            inside = near & (mask == MASK_CLASSES.index(item.shape) + 1)
            measured.append(np.count_nonzero(inside))
            expected.append(UNIT_AREA[item.shape] * (item.radius * SCENE_SIZE) ** 2)
            # Rounding an outline to whole pixels moves the area by a few rows at most.
            assert measured[-1] == pytest.approx(expected[-1], abs=2.5 * item.radius * SCENE_SIZE)
            assert x[inside].mean() == pytest.approx(item.x, abs=0.5 / SCENE_SIZE)
            assert y[inside].mean() == pytest.approx(item.y, abs=0.5 / SCENE_SIZE)
    # Over many objects the rounding cancels; shapes drawn too large or too small would not.
    assert sum(measured) == pytest.approx(sum(expected), rel=0.005)


def test_largest_object_in_the_mask_is_the_main_one(scenes: list[Scene]) -> None:
    x, y = pixel_centres()
    for scene in scenes[:200]:
        sample = render(scene)[1] > 1
        near = [np.hypot(x - item.x, y - item.y) <= item.radius + 0.01 for item in scene.objects]
        areas = [np.count_nonzero(sample & disc_around) for disc_around in near]
        assert all(areas[0] > area for area in areas[1:])


@pytest.mark.parametrize("angle", [0.0, 1.0, math.pi / 2, 3.0, 5.0])
def test_a_triangle_points_in_the_direction_of_its_angle(angle: float) -> None:
    image, mask = render(scene_of(SceneObject("triangle", "red", 0.5, 0.5, 0.24, angle)))
    step = 0.7 * 0.24 * SCENE_SIZE

    def id_at(reach: float) -> int:
        row, column = (int(SCENE_SIZE / 2 + reach * part) for part in (math.sin(angle), math.cos(angle)))
        assert (image[row, column, 0] > image[row, column, 1] + 100) == (mask[row, column] != 1)
        return int(mask[row, column])

    assert id_at(step) == MASK_CLASSES.index("triangle") + 1
    assert id_at(-step) == MASK_CLASSES.index("background") + 1


def test_an_object_may_stick_out_of_the_image() -> None:
    mask = render(scene_of(disc(x=0.0, y=1.0, radius=0.25)))[1]
    assert np.count_nonzero(mask == 2) == pytest.approx(math.pi * 16**2 / 4, rel=0.02)


@pytest.mark.parametrize("color", COLORS)
def test_object_pixels_have_the_named_color(color: str) -> None:
    image, mask = render(scene_of(disc(color=color)))
    mean = image[mask == MASK_CLASSES.index("circle") + 1].mean(axis=0)
    # The outline blends with the background, so the mean stays a little short of the pure colour.
    np.testing.assert_allclose(mean, COLORS[color], atol=8)


def test_outline_is_anti_aliased() -> None:
    image, _ = render(scene_of(disc(color="red", radius=0.24)))
    # Red minus green is 0 on the grey background and 155 on the disc, whatever the light.
    excess = image[..., 0].astype(int) - image[..., 1]
    assert np.count_nonzero((excess > 30) & (excess < 125)) > 40


@pytest.mark.parametrize("light", LIGHTS)
def test_the_lit_half_of_the_background_is_brighter(light: str, scenes: list[Scene]) -> None:
    x, y = pixel_centres()
    lit = {"left": x < 0.5, "right": x > 0.5, "top": y < 0.5, "bottom": y > 0.5}[light]
    chosen = [scene for scene in scenes if scene.light == light][:50]
    for scene in chosen:
        image, mask = render(scene)
        grey, background = image.mean(axis=2), mask == 1
        assert grey[lit & background].mean() > grey[~lit & background].mean() + 10


def test_brightness_changes_smoothly_by_the_light_strength(scenes: list[Scene]) -> None:
    x, y = pixel_centres()
    for scene in scenes[:100]:
        image, mask = render(scene)
        assert 40 <= scene.light_strength <= 100
        along = {"left": -x, "right": x, "top": -y, "bottom": y}[scene.light]
        grey = image.mean(axis=2)
        background = mask == 1
        # Pixels on an outline belong partly to an object: leave out those next to one.
        for axis in (0, 1):
            for shift in (-1, 1):
                background = background & np.roll(background, shift, axis)
        slope, offset = np.polyfit(along[background], grey[background], 1)
        assert slope == pytest.approx(scene.light_strength, abs=3)
        residual = grey[background] - (slope * along[background] + offset)
        # Averaging three independent channels divides the noise of 3 grey levels by sqrt(3).
        assert residual.std() == pytest.approx(3 / math.sqrt(3), abs=0.3)


def test_light_shades_objects_too() -> None:
    image, _ = render(scene_of(disc(radius=0.24), light="right"))
    rows = slice(SCENE_SIZE // 2 - 4, SCENE_SIZE // 2 + 4)
    left, right = image[rows, 20:26].mean(), image[rows, 38:44].mean()
    assert right - left == pytest.approx(40 * 18 / SCENE_SIZE, abs=2)


def test_background_level_and_light_strength_vary(scenes: list[Scene]) -> None:
    assert np.std([np.mean(scene.background) for scene in scenes]) > 15
    assert np.std([scene.light_strength for scene in scenes]) > 10


def test_noise_follows_the_noise_seed() -> None:
    quiet = scene_of(disc())
    other = Scene(quiet.objects, quiet.background, quiet.light, quiet.light_strength, noise_seed=1)
    difference = render(quiet)[0].astype(int) - render(other)[0]
    assert difference.std() == pytest.approx(3 * math.sqrt(2), abs=0.3)


@pytest.mark.parametrize(
    ("x", "y", "others", "light", "expected"),
    [
        (0.3, 0.3, 2, "right", "in the upper left with two small objects, lit from the right"),
        (0.5, 0.7, 1, "top", "at the bottom with one small object, lit from the top"),
        (0.7, 0.5, 3, "left", "on the right with three small objects, lit from the left"),
        (0.5, 0.5, 0, "bottom", "in the centre with no small objects, lit from the bottom"),
    ],
)
def test_caption_reads_as_a_sentence(x: float, y: float, others: int, light: str, expected: str) -> None:
    small = [disc(0.1, 0.1 + 0.3 * n, 0.08, "blue") for n in range(others)]
    assert caption(scene_of(disc(x, y), *small, light=light)) == f"a large red circle {expected}"


def test_captions_describe_the_scene(scenes: list[Scene]) -> None:
    pattern = re.compile(r"a large (\w+) (\w+) \w+ the [\w ]+ with (\w+) small objects?, lit from the (\w+)")
    for scene in scenes:
        match = pattern.fullmatch(caption(scene))
        assert match, caption(scene)
        main = scene.objects[0]
        count = ("no", "one", "two", "three")[len(scene.objects) - 1]
        assert match.groups() == (main.color, main.shape, count, scene.light)


def test_every_shape_and_color_also_occurs_among_the_small_objects(scenes: list[Scene]) -> None:
    small = [item for scene in scenes for item in scene.objects[1:]]
    assert {item.shape for item in small} == set(SHAPES)
    assert {item.color for item in small} == set(COLORS)
