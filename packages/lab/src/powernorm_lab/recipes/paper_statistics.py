"""Published statistics of norms: TID, and scores by kind of statistics."""

import tomllib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, Final

from powernorm.files import package_folder
from powernorm.records import PaperStatistic

_FILE: Final = package_folder("powernorm_lab.recipes") / "wang2022_statistics.toml"
SOURCE: Final = "Wang et al. 2022"
"""Beginning of the sources of the paper's results."""


@cache
def printed_statistics() -> tuple[PaperStatistic, ...]:
    """Return all published statistics, of every data set, norm and placement.

    >>> rows = printed_statistics()
    >>> [row["value"] for row in rows if row["dataset"] == "WMT16 En-De" and row["norm"] == "bn"
    ...  and row["metric"] == "var_last"]
    [17.9, 30.1]
    """
    with _FILE.open("rb") as file:
        tables = tomllib.load(file)
    return (*_tid(tables), *_scores(tables["scores"]))


def statistics_of(datasets: Collection[str], placement: str) -> list[PaperStatistic]:
    """Return the published statistics of data sets, named as in results, at a placement."""
    return [
        row
        for row in printed_statistics()
        if row["dataset"] in datasets and row["placement"] == placement
    ]


def _tid(tables: Mapping[str, Any]) -> Iterator[PaperStatistic]:
    for row in tables["tid"]:
        for dataset, value in zip(tables["datasets"], row["values"], strict=True):
            yield PaperStatistic(
                norm=row["norm"],
                placement=row["placement"],
                dataset=dataset,
                metric=row["metric"],
                value=value,
                source=f"{SOURCE}, Table {row['table']}",
            )


def _scores(tables: Mapping[str, Any]) -> Iterator[PaperStatistic]:
    for row in tables["rows"]:
        for (placement, norm), value in zip(tables["columns"], row["values"], strict=True):
            statistic = PaperStatistic(
                norm=norm,
                placement=placement,
                dataset=tables["dataset"],
                metric=tables["metric"],
                value=value,
                source=f"{SOURCE}, Table {row['table']}",
                statistics=row["statistics"],
            )
            if "size" in row:
                statistic["size"] = row["size"]
            yield statistic
