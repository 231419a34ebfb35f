"""The demonstration task of code: what is asked, and what is right."""

from __future__ import annotations

import random

import pytest

from asyncrl.demo import code


def test_texts_are_as_documented() -> None:
    steps = (("add", 7), ("mul", 4))
    assert code.prompt_text(steps) == "add7mul4:"
    assert code.demonstration(steps, noise=0.0, rng=random.Random(0)) == "(x+7)*4"
    assert [code.apply_steps(steps, x) for x in code.INPUTS] == [36, 48, 72]


def test_the_teacher_is_right_without_noise_and_often_wrong_with_it() -> None:
    rng = random.Random(0)
    right = {0.0: 0, 0.28: 0}
    for index in range(400):
        steps = code.function_steps(seed=1, index=index)
        for noise in right:
            text = code.demonstration(steps, noise=noise, rng=rng)
            right[noise] += text == code.demonstration(steps, noise=0.0, rng=rng)
            assert set(text) | set(code.prompt_text(steps)) <= set(code.CHARACTERS)
    assert right[0.0] == 400 and 100 < right[0.28] < 240


def test_rows_are_a_function_of_seed_and_index_and_hold_tests() -> None:
    rows = code.prompt_rows(8, 3)
    assert rows == code.prompt_rows(16, 3)[:8] and rows != code.prompt_rows(8, 3, split="heldout")
    truth = rows[0]["reward_model"]["ground_truth"]
    steps = code.function_steps(seed=3, index=0)
    assert truth["outputs"] == [code.apply_steps(steps, x) for (x,) in truth["inputs"]]
    with pytest.raises(ValueError, match="unknown split"):
        code.function_steps(seed=0, index=0, split="test")
