"""Small data sets in the official formats."""

from pathlib import Path
from typing import Final

from powernorm_lab.data.corpus import SPLITS
from powernorm_lab.tasks.classify.readers import LabeledTexts

TREES: Final = (
    "(3 (2 It) (4 (4 (2 's) (3 (2 a) (4 (3 lovely) (2 film)))) (2 .)))\n"
    "(1 (2 Dull) (2 (2 -LRB-) (2 (2 1\\/2) (2 -RRB-))))\n"
)
YELP: Final = (
    '"2","Great food.\\nWould say ""wow"", again"\n"1","Cold\nand slow"\n"2","Fine"\n"1","Never"\n'
)
SOGOU: Final = (
    '"1","ti yu","qiu sai , ""da"" ying"\r\n"3","cai jing","gu piao"\r\n"2","qi che","xin che"\r\n'
)
REVIEWS: Final = (
    'text,label,source\n"Bad.<br /><br />Very ""bad""",0,imdb\ngood one,1,imdb\n'
    "a sentence .,1,rotten_tomatoes\n"
)


def write_rt(folder: Path, num_sentences: int = 30) -> Path:
    for name, word in (("neg", "dull"), ("pos", "d\xe9j\xe0 vu \x97 lovely")):
        lines = (f"{word} film {i} . " for i in range(num_sentences))
        content = "\n".join([*lines, ""])
        (folder / f"rt-polarity.{name}").write_bytes(content.replace("\x97", "-").encode("cp1252"))
    return folder


def write_imdb(folder: Path) -> Path:
    for split in ("train", "test"):
        for name, text in (("pos", "Lovely!<br /><br />Really."), ("neg", "Dull.")):
            reviews = folder / split / name
            reviews.mkdir(parents=True)
            for i in range(20):
                (reviews / f"{i}_7.txt").write_text(f"{text} {split} {i}", encoding="utf-8")
    (folder / "train" / "unsup").mkdir()
    return folder


def write_trees(folder: Path) -> Path:
    for name in ("train", "dev", "test"):
        (folder / f"{name}.txt").write_text(TREES)
    return folder


def write_csv(folder: Path, content: str = YELP) -> Path:
    for name in ("train", "test"):
        (folder / f"{name}.csv").write_bytes(content.encode())
    return folder


def read_all(texts: LabeledTexts) -> dict[str, list[tuple[str, str]]]:
    return {split: [(row.label, row.text) for row in texts.read[split]()] for split in SPLITS}
