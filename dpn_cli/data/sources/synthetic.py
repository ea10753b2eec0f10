"""Generated demo scenes: small images of coloured shapes with labels, captions and masks.

Every scene is a pure function of ``(seed, index)``: a data set needs no storage and no fixed order.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt
from PIL import Image

from dpn_cli.data.decode import Pixels
from dpn_cli.data.sources.base import Images

_Floats = npt.NDArray[np.float64]

SCENE_SIZE = 64
"""Height and width of a rendered scene, in pixels."""

SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "cross")
"""Shape names, in the order of the mask ids and of the classes of ``demo_shape``."""

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (205, 50, 50),
    "green": (60, 170, 60),
    "blue": (55, 80, 205),
    "yellow": (205, 190, 50),
    "purple": (165, 55, 190),
    "cyan": (50, 185, 195),
}
"""Object colours as RGB grey levels, before lighting."""

LIGHTS: tuple[str, ...] = ("left", "right", "top", "bottom")
"""Sides of the image that the light can come from."""

MASK_CLASSES: tuple[str, ...] = ("background", *SHAPES)
"""Names of the mask ids 1..K in order; the raw id 0 ("other") never occurs in a demo mask."""

# Range of the main object's centre on both axes. It does not depend on the radius, so that the place says nothing
# about the size; even the largest object stays inside the image.
_CENTRE_RANGE = (0.26, 0.74)
_MAIN_RADIUS = (0.19, 0.25)
_SMALL_RADIUS = (0.09, 0.115)
# Empty space kept between two objects, and between a small object and the image's edge.
_GAP = 0.03
_EDGE = 0.01
_PLACE_TRIES = 256
_NOISE_STD = 3.0
_COUNT_WORDS = ("no", "one", "two", "three")
_POSITION_WORDS = (
    ("in the upper left", "at the top", "in the upper right"),
    ("on the left", "in the centre", "on the right"),
    ("in the lower left", "at the bottom", "in the lower right"),
)


@dataclass(frozen=True)
class SceneObject:
    """One filled shape, inscribed in the circle of its radius around its centre.

    ``shape`` is one of ``SHAPES`` and ``color`` a key of ``COLORS``.  ``x`` (rightwards), ``y`` (downwards)
    and ``radius`` are fractions of the image side; ``angle`` is a clockwise rotation in radians.
    """

    shape: str
    color: str
    x: float
    y: float
    radius: float
    angle: float


@dataclass(frozen=True)
class Scene:
    """The parameters of one image.

    ``objects`` holds 1 to 4 objects, the main and largest one first.  ``background`` is the RGB grey level
    of the background half way across the image, ``light`` the side in ``LIGHTS`` that is brightest, and
    ``light_strength`` the change in brightness from one side of the image to the other, in grey levels.
    ``noise_seed`` seeds the pixel noise.
    """

    objects: tuple[SceneObject, ...]
    background: tuple[float, float, float]
    light: str
    light_strength: float
    noise_seed: int


# The demo tasks with their class names. Classes are uniform, and tasks independent of each other but for the last,
# which combines colour and shape.
LABELS: dict[str, tuple[str, ...]] = {
    "demo_shape": SHAPES,
    "demo_color": tuple(COLORS),
    "demo_light": LIGHTS,
    "demo_count": ("1", "2", "3", "4"),
    "demo_position": ("far left", "left", "right", "far right"),
    "demo_object": tuple(f"{color} {shape}" for color in COLORS for shape in SHAPES),
}


# Which points, in units of the radius around the centre, belong to an object of angle 0.  Point-wise tests
# rather than a drawing library: they are exact, and the pixels cannot change with a library's version.
_SHAPE_MASKS: dict[str, Callable[[_Floats, _Floats], npt.NDArray[np.bool_]]] = {
    "circle": lambda u, v: u**2 + v**2 <= 1,
    "square": lambda u, v: np.maximum(abs(u), abs(v)) <= 0.5**0.5,
    "triangle": lambda u, v: np.maximum(-u, u / 2 + 0.75**0.5 * abs(v)) <= 0.5,
    "cross": lambda u, v: (np.minimum(abs(u), abs(v)) <= 0.3) & (np.maximum(abs(u), abs(v)) <= 0.91**0.5),
}
# Each pixel is sampled on a square grid; the odd side makes "covers most of the pixel" free of ties.
_GRID = 5
# The places along one axis, as fractions of the image side, where each pixel is sampled: (64, 5).
_SAMPLES = ((np.arange(SCENE_SIZE * _GRID) + 0.5) / (SCENE_SIZE * _GRID)).reshape(SCENE_SIZE, _GRID)

_RISE = np.tile(np.linspace(-0.5, 0.5, SCENE_SIZE), (SCENE_SIZE, 1))
# For each light, a (64, 64) ramp from -0.5 on the dark side to 0.5 on the lit side.
_RAMPS = {"left": -_RISE, "right": _RISE, "top": -_RISE.T, "bottom": _RISE.T}


def _free_place(rng: np.random.Generator, radius: float, objects: list[SceneObject]) -> tuple[float, float]:
    """Return the first of a fixed number of random centres that keeps the gap to all placed objects."""
    low = radius + _EDGE
    centres = rng.uniform(low, 1 - low, size=(_PLACE_TRIES, 2))
    distances = [np.hypot(centres[:, 0] - o.x, centres[:, 1] - o.y) - o.radius - radius for o in objects]
    # Clearances above the gap count as equal and argmax takes the first of equals: this is rejection
    # sampling that falls back on the least crowded centre instead of failing.
    best = int(np.argmax(np.minimum(np.min(distances, axis=0), _GAP)))
    return float(centres[best, 0]), float(centres[best, 1])


def sample_scene(seed: int, index: int) -> Scene:
    """Return scene number ``index`` of the endless series that belongs to ``seed``.

    The result depends on nothing but the two numbers.

    Raises:
        ValueError: ``seed`` or ``index`` is negative.
    """
    rng = np.random.default_rng([seed, index])

    def random_object(x: float, y: float, radius: float) -> SceneObject:
        shape, color = str(rng.choice(SHAPES)), str(rng.choice(list(COLORS)))
        return SceneObject(shape, color, x, y, radius, float(rng.uniform(0, 2 * math.pi)))

    count = int(rng.integers(1, 5))
    x, y = (float(v) for v in rng.uniform(*_CENTRE_RANGE, size=2))
    objects = [random_object(x, y, float(rng.uniform(*_MAIN_RADIUS)))]
    for _ in range(count - 1):
        radius = float(rng.uniform(*_SMALL_RADIUS))
        objects.append(random_object(*_free_place(rng, radius, objects), radius))

    # The tint shifts the mean colour of the image about as much as the main object does, so that the mean
    # colour alone does not give the object's colour away.
    red, green, blue = (float(v) for v in rng.uniform(90, 165) + rng.uniform(-20, 20, size=3))
    return Scene(
        objects=tuple(objects),
        background=(red, green, blue),
        light=str(rng.choice(LIGHTS)),
        light_strength=float(rng.uniform(40, 100)),
        noise_seed=int(rng.integers(2**32)),
    )


@lru_cache(maxsize=4096)
def demo_scene(number: int) -> Scene:
    """Return a scene of the built-in data, cached because labels, captions and images all read it."""
    return sample_scene(0, number)


def _coverage(item: SceneObject) -> _Floats:
    """Return the share of each pixel that the object covers: (64, 64), 0 to 1."""
    # Only the pixels around the object are sampled: most scenes are mostly background.
    rows, columns = ((abs(_SAMPLES - centre) <= item.radius).any(axis=1) for centre in (item.y, item.x))
    dy = (_SAMPLES[rows].reshape(-1, 1) - item.y) / item.radius
    dx = (_SAMPLES[columns].reshape(1, -1) - item.x) / item.radius
    cos, sin = math.cos(item.angle), math.sin(item.angle)
    mask = _SHAPE_MASKS[item.shape](dx * cos + dy * sin, dy * cos - dx * sin)
    samples = mask.reshape(rows.sum(), _GRID, columns.sum(), _GRID)
    coverage = np.zeros((SCENE_SIZE, SCENE_SIZE))
    coverage[np.ix_(rows, columns)] = samples.mean(axis=(1, 3))
    return coverage


def render(scene: Scene) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Draw a scene.

    Returns:
        The anti-aliased RGB image, (64, 64, 3) uint8, and the mask, (64, 64) uint8, whose pixels hold the
        id of the class that covers most of them: ``MASK_CLASSES[id - 1]``.
    """
    image = np.empty((SCENE_SIZE, SCENE_SIZE, 3))
    image[:] = scene.background
    mask = np.full((SCENE_SIZE, SCENE_SIZE), MASK_CLASSES.index("background") + 1, dtype=np.uint8)
    for item in scene.objects:
        coverage = _coverage(item)
        image += coverage[..., None] * (np.array(COLORS[item.color]) - image)
        mask[coverage > 0.5] = MASK_CLASSES.index(item.shape) + 1

    # Light is added after the objects, in grey levels, so that it shades them like the background.
    image += scene.light_strength * _RAMPS[scene.light][..., None]
    image += np.random.default_rng(scene.noise_seed).normal(0, _NOISE_STD, image.shape)
    return np.clip(np.rint(image), 0, 255).astype(np.uint8), mask


def _range_bin(value: float, bins: int) -> int:
    """Return which of ``bins`` equal parts of the main object's centre range is nearest to ``value``."""
    low, high = _CENTRE_RANGE
    return min(max(int((value - low) / (high - low) * bins), 0), bins - 1)


def caption(scene: Scene) -> str:
    """Describe a scene: "a large red circle in the upper left with two small objects, lit from the right"."""
    main = scene.objects[0]
    position_words = _POSITION_WORDS[_range_bin(main.y, 3)][_range_bin(main.x, 3)]
    others = len(scene.objects) - 1
    noun = "object" if others == 1 else "objects"
    return (
        f"a large {main.color} {main.shape} {position_words} with {_COUNT_WORDS[others]} small {noun}, "
        f"lit from the {scene.light}"
    )


def label(scene: Scene, task: str) -> int:
    """Return the scene's class index for a task in ``LABELS``.

    Raises:
        ValueError: no demo task has that name.
    """
    main = scene.objects[0]
    indices = {
        "demo_shape": SHAPES.index(main.shape),
        "demo_color": list(COLORS).index(main.color),
        "demo_light": LIGHTS.index(scene.light),
        "demo_count": len(scene.objects) - 1,
        "demo_position": _range_bin(main.x, 4),
        "demo_object": list(COLORS).index(main.color) * len(SHAPES) + SHAPES.index(main.shape),
    }
    if task not in indices:
        raise ValueError(f"unknown demo task {task!r}; the demo tasks are {', '.join(indices)}")
    return indices[task]


# The demo task of the built-in scenes, and the scene numbers of every split. Pre-training has its own scenes, which no
# other task trains or tests on.
DEMO_SPLITS: dict[str, tuple[str, dict[str, tuple[int, int]]]] = {
    "demo": ("demo_color", {"train": (0, 1000), "val": (1000, 2000)}),
    "demo:objects": ("demo_object", {"train": (1_000_000, 1_010_000), "val": (1_010_000, 1_011_000)}),
}


class SceneSplit(Images):
    """The built-in scenes with the labels of one demo task; scene numbers `start` up to `stop`."""

    def __init__(self, task: str, start: int, stop: int) -> None:
        self.task, self.start = task, start
        self.labels: Sequence[int] = [label(demo_scene(i), task) for i in range(start, stop)]
        self.sizes: Sequence[int] = [3 * SCENE_SIZE**2] * len(self.labels)  # scenes are not encoded

    def locate(self, index: int) -> str:
        """Name the scene's number."""
        return f"demo scene {self.start + index}"

    def content(self, index: int) -> bytes:
        """Return the scene's number, which decides its pixels."""
        return self.locate(index).encode()

    def open(self, index: int) -> Image.Image:
        """Return the image of a scene, 64x64."""
        return Image.fromarray(_scene_pixels(self.start + index))


@cache
def _scene_pixels(number: int) -> Pixels:
    # All demo tasks use the same scenes: 12 kB each, drawn once per process.
    image, _ = render(demo_scene(number))
    return image
