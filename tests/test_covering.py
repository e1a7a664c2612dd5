"""Which part of a grid the default suite runs."""

from itertools import product

from covering import covering


def test_every_pair_occurs_in_few_rows() -> None:
    axes = {"a": "123", "b": "xyz", "c": "pq"}
    rows = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    chosen = [rows[index] for index in covering(rows, 2)]
    for first, second in (("a", "b"), ("a", "c"), ("b", "c")):
        pairs = {(row[first], row[second]) for row in chosen}
        assert pairs == set(product(axes[first], axes[second]))
    assert len(chosen) <= 11  # of 18; nine are needed for a and b


def test_every_value_occurs() -> None:
    rows = [{"a": a, "b": b} for a in "12345" for b in "xy" if (a, b) != ("1", "x")]
    chosen = [rows[index] for index in covering(rows, 1)]
    assert {row["a"] for row in chosen} == set("12345")
    assert {row["b"] for row in chosen} == set("xy")
    assert len(chosen) == 5
