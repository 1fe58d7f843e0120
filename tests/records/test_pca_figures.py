from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from scgpu_tasks.records import draw, pca_figures
from scgpu_tasks.records.pca_figures import choose_colourings


def choose(obs: pd.DataFrame, first: str | None = None) -> list[pca_figures.Colouring]:
    return choose_colourings(obs, np.ones(len(obs), dtype=bool), first)


def names(obs: pd.DataFrame, first: str | None = None) -> list[str]:
    return [colouring.column for colouring in choose(obs, first)]


def test_columns_worth_a_colour_are_found_and_the_batch_key_comes_first() -> None:
    n = 90
    obs = pd.DataFrame(
        {
            "barcode": [f"cell {i}" for i in range(n)],
            "counts": np.arange(n),
            "one value": ["x"] * n,
            "donor": ["a", "b", "c"] * 30,
            "doublet": [True, False] * 45,
            "missing": [None] * n,
            "passed_qc": [True, False] * 45,
            "batch": np.arange(n) % 2,
        }
    )
    assert names(obs) == ["donor", "doublet"]
    assert names(obs, "batch") == ["batch", "donor", "doublet"]
    assert names(obs, "no such column") == ["donor", "doublet"]


def test_a_column_with_too_many_categories_comes_last_with_the_rare_ones_as_one() -> None:
    many = np.repeat(np.arange(40), np.arange(40, 0, -1))
    obs = pd.DataFrame(
        {
            "cluster": pd.Categorical([f"c{i}" for i in many]),
            "sex": pd.Categorical(np.where(many % 2, "f", "m")),
        }
    )
    sex, cluster = choose(obs)
    assert (sex.column, cluster.column) == ("sex", "cluster")
    shown = cluster.categories
    # The fifteen most frequent, in the column's own order.
    assert [c.name for c in shown[:3]] == ["c0", "c1", "c10"]
    assert shown[-1].name == "25 other categories"
    assert sum(c.cells for c in shown) == len(obs)
    for number, category in enumerate(shown):
        assert (cluster.codes == number).sum() == category.cells


def test_cells_without_a_category_are_drawn_but_not_counted() -> None:
    obs = pd.DataFrame({"type": pd.Categorical(["a", None, "b", "a", None, "b", "a"])})
    (colouring,) = choose(obs)
    assert colouring.codes.tolist() == [0, -1, 1, 0, -1, 1, 0]
    found = [(c.name, c.cells) for c in colouring.categories]
    assert found == [("a", 3), ("b", 2), ("no value", 2)]


def test_categories_without_cells_are_not_listed() -> None:
    column = pd.Categorical(["a", "b"] * 5, categories=["z", "b", "a"])
    obs = pd.DataFrame({"type": column})
    (colouring,) = choose(obs)
    assert sorted(c.name for c in colouring.categories) == ["a", "b"]


def test_large_atlases_are_drawn_from_the_same_sample_every_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pca_figures, "POINTS", 100)
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(1_000, 2)).astype(np.float32)
    first = pca_figures.components(scores, (0, 1), None, name="m")
    assert "100 cells by components 1 and 2" in first[0]
    assert pca_figures.components(scores, (0, 1), None, name="m") == first
    rows = draw.sample(1_000, 100)
    assert len(np.unique(rows)) == 100
    assert rows.max() > 900


@pytest.mark.parametrize(("apart", "labels"), [(20.0, 2), (0.0, 0)])
def test_groups_are_marked_where_they_lie_apart(apart: float, labels: int) -> None:
    rng = np.random.default_rng(0)
    codes = np.arange(400) % 2
    scores = rng.normal(size=(400, 2))
    scores[:, 0] += apart * codes
    obs = pd.DataFrame({"type": pd.Categorical.from_codes(codes, ["a", "b"])})
    (colouring,) = choose(obs)
    share = np.array([0.25, 0.0004])
    svg, marked = pca_figures.components(
        scores, (0, 1), colouring, name="m", variance_ratio=share
    )
    assert marked == bool(labels)
    assert "PC1 (25.0 %)" in svg
    assert "PC2 (&lt; 0.1 %)" in svg
    # Only these marks stand on a filled circle.
    assert svg.count("fill: var(--surface)") == labels


def test_groups_in_one_place_are_all_marked() -> None:
    codes = np.arange(800) % 8
    scores = np.random.default_rng(0).normal(size=(800, 2)) / 10
    # Three far away, and five on one spot.
    scores[codes < 3] += 10 * np.array([[1, 0], [0, 1], [1, 1]])[codes[codes < 3]]
    obs = pd.DataFrame({"type": pd.Categorical.from_codes(codes, [f"t {i}" for i in range(8)])})
    (colouring,) = choose(obs)
    svg, marked = pca_figures.components(scores, (0, 1), colouring, name="m")
    assert marked
    assert svg.count("fill: var(--surface)") == 8


@pytest.mark.parametrize(
    ("given", "marks"),
    [
        (["0", "1", "10"], ["0", "1", "10"]),
        (["NK", "B", "T"], ["B", "NK", "T"]),
        (["B cells", "T cells"], ["1", "2"]),
        (["cluster 2", "cluster 1"], ["A", "B"]),
        (["<b>", "x"], ["1", "2"]),
    ],
)
def test_a_mark_is_never_read_as_another_category(given: list[str], marks: list[str]) -> None:
    (colouring,) = choose(pd.DataFrame({"type": pd.Categorical(given * 4)}))
    assert [c.mark for c in colouring.categories] == marks
    assert [c.name for c in colouring.categories] == sorted(given)


def test_marks_far_from_the_values_do_not_squeeze_them() -> None:
    values = np.array([0.0, 10.0])
    assert draw.span(values, pad=0) == (0.0, 10.0)
    assert draw.span(np.array([np.nan]), pad=0) == (0.0, 1.0)
    assert draw.span(np.array([3.0, 3.0]), pad=0) == (2.5, 3.5)
