"""The few-shot probe against big_vision's evaluator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from support.goldens import Arrays
from tasks.classify.probe import draw_examples, draw_rows, probe


@pytest.mark.parametrize("case", ["n_lt_d", "n_ge_d", "const_feat"])
@pytest.mark.parametrize("l2", [1, 1024, 32768])
def test_accuracies_are_big_visions(case: str, l2: int, golden: Callable[[str], Arrays]) -> None:
    arrays = golden("fewshot_lsr")
    x_train, y_train, x_test, y_test = (arrays[f"{case}/{name}"] for name in ("x_train", "y_train", "x_test", "y_test"))
    assert probe(x_train, y_train, x_test, y_test, int(arrays[f"{case}/num_classes"]), l2) == pytest.approx(
        float(arrays[f"{case}/l2_{l2}/accuracy"]), abs=1e-7
    )


def test_the_bias_is_free_of_the_penalty() -> None:
    """Classes of unequal size need a bias; scikit-learn's ridge does not penalise its own."""
    from sklearn.linear_model import Ridge

    generator = np.random.default_rng(0)
    y = np.repeat([0, 1, 2], (60, 25, 15))
    x, unseen = generator.normal(size=(100, 4)) + y[:, None], 4 * generator.normal(size=(400, 4))
    mean, std = x.mean(0), x.std(0)
    ridge = Ridge(alpha=1024).fit((x - mean) / std, 2.0 * np.eye(3)[y] - 1)
    predictions = ridge.predict((unseen - mean) / std).argmax(1)
    assert len(set(predictions.tolist())) > 1
    assert probe(x, y, unseen, predictions, 3) == 1


def test_examples_are_drawn_as_big_vision_draws_them(golden: Callable[[str], Arrays]) -> None:
    arrays = golden("fewshot_evaluator")
    x, y, classes = arrays["x_train"], arrays["y_train"], int(arrays["num_classes"])
    for seed in range(3):
        assert draw_rows(y, classes, 5, seed).tolist() == arrays[f"selected_idx_seed{seed}_5shot"].tolist()
        for column, shots in enumerate(arrays["shots"].tolist()):
            accuracy = probe(
                *draw_examples(x, y, classes, shots, seed),
                arrays["x_test"],
                arrays["y_test"],
                classes,
                float(arrays["l2_reg"]),
            )
            assert accuracy == pytest.approx(float(arrays["accuracy"][seed, column]), abs=1e-7)


def test_more_shots_hold_the_fewer_ones() -> None:
    y = np.arange(60) % 4
    fewer, more = (set(draw_rows(y, 4, shots, 1).tolist()) for shots in (3, 9))
    assert fewer < more
