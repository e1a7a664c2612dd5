"""Small files of named entities in the official formats, all of the same two sentences."""

from typing import Final

from powernorm_lab.tasks.ner.sources import TaggedSentence
from powernorm_lab.tasks.ner.tag_schemes import Span

CONLL_2003: Final = """\
-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O
German JJ B-NP B-MISC
call NN I-NP O
. . O O

Peter NNP B-NP B-PER
Blackburn NNP I-NP I-PER

"""
ORIGINAL: Final = """\
-DOCSTART- -X- O O

EU NNP I-NP I-ORG
rejects VBZ I-VP O
German JJ I-NP I-MISC
call NN I-NP O
. . O O

Peter NNP I-NP I-PER
Blackburn NNP I-NP I-PER
"""
"""A file in the released scheme, IOB1."""
BMES: Final = """\
EU S-ORG
rejects O
German S-MISC
call O
. O

Peter B-PER
Blackburn E-PER
"""
"""A file with two columns, as Resume and MSRA."""
BIOES_TABS: Final = BMES.replace(" ", "\t").replace("\n", "\r\n")

FILES: Final = {
    "conll2003": CONLL_2003,
    "original": ORIGINAL,
    "bmes": BMES,
    "tabs": BIOES_TABS,
}

SENTENCES: Final = [
    TaggedSentence(
        ("EU", "rejects", "German", "call", "."), (Span("ORG", 0, 1), Span("MISC", 2, 3))
    ),
    TaggedSentence(("Peter", "Blackburn"), (Span("PER", 0, 2),)),
]
