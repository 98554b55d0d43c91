"""Features of the rows that the cleaning recipe judges."""

import numpy as np
import pandas as pd
import pytest
import timm
import torch
from safetensors.torch import save_file
from sklearn.linear_model import LogisticRegression

from bilevel_recipes.clean import backbones
from bilevel_recipes.clean.features import features
from bilevel_recipes.clean.rows import Rows
from bilevel_recipes.data import load
from bilevel_recipes.vision import torchvision


def rows(kind, content, total=None):
    """Rows with this content; those before the last len(content) of the total could not be used."""
    m = len(content)
    used = np.arange(m) + (total or m) - m
    return Rows("mine", kind, pd.DataFrame({"label": np.zeros(total or m)}), used, np.zeros(m, np.int64),
                np.zeros(m, bool), ["a", "b"], content, [f"row {i}" for i in used],
                pd.DataFrame({"row": [], "name": [], "reason": []}))  # fmt: skip


def rng():
    return np.random.default_rng(0)


def noise(*shape):
    return rng().integers(0, 256, shape, dtype=np.uint8)


TEXTS = ["the wheel of the car", "a car with a wheel", "boil the soup", "a soup with rice", "rice to boil", "the car"]
TABLE = pd.DataFrame({"a": [1.0, 2, 3, 4, 5, 7], "b": pd.Categorical(["x", "y", "x", "", "y", "x"])})
EXAMPLES = {
    "images": noise(6, 8, 8),
    "text": TEXTS,
    "table": TABLE,
    "embeddings": rng().normal(size=(6, 5)),
}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_auto_gives_finite_centred_numbers_and_says_what_they_are(kind):
    first, again = (features(rows(kind, EXAMPLES[kind])) for _ in range(2))
    assert first.x.shape[0] == 6
    assert first.x.dtype == np.float32
    assert first.x.flags.c_contiguous
    assert np.isfinite(first.x).all()
    np.testing.assert_allclose(first.x.mean(0), 0, atol=1e-4)
    assert 0.3 < np.square(first.x).mean() < 3
    np.testing.assert_array_equal(first.x, again.x)
    assert first.words.startswith("The features are ")
    assert first.words.endswith(".")
    assert first.seconds > 0


@pytest.mark.parametrize("kind", EXAMPLES)
@pytest.mark.parametrize(
    ("name", "fitting"),
    [
        ("patches", "images"),
        ("pixels", "images"),
        ("tfidf", "text"),
        ("columns", "table"),
        ("timm:resnet10t", "images"),
    ],
)
def test_features_that_do_not_fit_the_rows_are_refused(kind, name, fitting):
    if kind != fitting:
        with pytest.raises(ValueError, match=f"features '{name}' are for {fitting}, but the content of mine is {kind}"):
            features(rows(kind, EXAMPLES[kind]), name)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no features 'pixel'; choose auto, network, patches, pixels.*FILE\.npy"):
        features(rows("images", EXAMPLES["images"]), "pixel")
    with pytest.raises(ValueError, match=r"no features 'keras:vgg'; choose torchvision:NAME or timm:NAME"):
        features(rows("images", EXAMPLES["images"]), "keras:vgg")
    with pytest.raises(ValueError, match="weights were given, but features 'auto' are no model"):
        features(rows("images", EXAMPLES["images"]), weights="w.pt")


def test_rows_that_are_all_the_same_are_refused():
    same = {"images": noise(1, 8, 8).repeat(5, 0), "text": ["one word"] * 5, "embeddings": np.ones((5, 3))}
    for kind, content in {**same, "table": TABLE.iloc[[0] * 5]}.items():
        with pytest.raises(ValueError, match="all rows have the same features"):
            features(rows(kind, content))


# --- images ----------------------------------------------------------------------------------------------------


def test_patches_beat_pixels_on_small_grey_images():
    digits = load("digits")
    content = np.concatenate([digits.x, digits.x_test])
    n = len(digits.x)

    def accuracy(kind):
        x = features(rows("images", content), kind).x
        return LogisticRegression(C=0.1, max_iter=200).fit(x[:n], digits.y).score(x[n:], digits.y_test)

    assert accuracy("auto") > max(0.96, accuracy("pixels") + 0.01)


def test_images_of_many_sizes_get_the_median_one_and_colour():
    content = [noise(10, 12), noise(20, 14, 3), noise(11, 13), noise(300, 13)]
    f = features(rows("images", content), "pixels", dimensions=10_000)
    assert f.x.shape == (4, 3 * 16 * 13)  # medians: height 15.5, width 13
    assert "colour images at 16 × 13" in f.words


def test_large_images_are_reduced_to_64_pixels():
    f = features(rows("images", noise(3, 70, 140, 3)), "pixels")
    assert "at 32 × 64" in f.words
    assert f.x.shape == (3, 3)


def test_images_too_small_for_patches_are_judged_by_their_pixels():
    assert "the pixels of the grey images at 3 × 9" in features(rows("images", noise(5, 3, 9))).words


def test_constant_pixels_are_dropped():
    images = noise(30, 8, 8)
    images[:, 0] = 5
    assert features(rows("images", images), "pixels").x.shape == (30, 56)


def test_the_number_of_dimensions_is_bounded():
    f = features(rows("images", noise(40, 12, 12)), dimensions=17)
    assert f.x.shape == (40, 17)
    assert "reduced to 17 principal components" in f.words


# --- text, tables, embeddings ----------------------------------------------------------------------------------


def test_texts_of_one_topic_are_near_each_other():
    r = rng()
    topics = [["wheel", "motor", "road", "brake", "tyre"], ["soup", "rice", "oven", "salt", "spoon"]]
    y = r.integers(0, 2, 400)
    filler = [f"word{i}" for i in range(300)]
    texts = [" ".join([*r.choice(topics[c], 3), *r.choice(filler, 5)]) for c in y]
    f = features(rows("text", texts), dimensions=100)
    assert f.x.shape == (400, 100)
    assert "reduced to 100 dimensions" in f.words
    assert LogisticRegression().fit(f.x[:200], y[:200]).score(f.x[200:], y[200:]) > 0.95


def test_texts_without_a_word_in_common_are_refused():
    with pytest.raises(ValueError, match=r"no word occurs in 2 of the 150 texts.*--features FILE\.npy"):
        features(rows("text", [f"unique{i}" for i in range(150)]))


def test_a_long_tail_is_compressed_and_order_kept():
    income = np.exp(3 * rng().normal(size=500))
    x = features(rows("table", pd.DataFrame({"income": income, "age": rng().normal(size=500)}))).x
    assert abs(pd.Series(income).skew()) > 5
    assert np.abs(x[:, 0]).max() < 5
    assert (np.argsort(x[:, 0], kind="stable") == np.argsort(income, kind="stable")).mean() > 0.99
    np.testing.assert_allclose(x[:, 1], (lambda a: (a - a.mean()) / a.std())(rng().normal(size=500)), atol=1e-5)


def test_a_column_that_is_nearly_always_zero_stays_bounded():
    rare = np.zeros(200)
    rare[:5] = [1e6, 2, 3, 4, 5]
    x = features(rows("table", pd.DataFrame({"rare": rare}))).x
    assert np.isfinite(x).all()
    assert np.abs(x).max() < 15


def test_large_numbers_with_small_differences_are_kept():
    time = 1_700_000_000 + rng().integers(0, 60, 100).astype(np.float64)
    x = features(rows("table", pd.DataFrame({"time": time}))).x[:, 0]
    np.testing.assert_allclose(x, (time - time.mean()) / time.std(), atol=1e-4)


def test_rare_and_missing_levels():
    level = ["x"] * 50 + ["y"] * 47 + ["", "", "once"]
    x = features(rows("table", pd.DataFrame({"level": pd.Categorical(level)}))).x
    assert x.shape == (100, 4)  # "" (twice), x, y, and the levels that are rare
    assert len(np.unique(x[:50], axis=0)) == 1
    assert len(np.unique(x, axis=0)) == 4
    assert features(rows("table", pd.DataFrame({"flag": [True, False] * 9, "b": [None, "q", "r"] * 6}))).x.shape == (
        18,
        4,
    )


def test_many_levels_share_the_last_column():
    level = pd.Categorical([f"level {i % 300}" for i in range(3000)])
    assert features(rows("table", pd.DataFrame({"level": level}))).x.shape == (3000, 50)


def test_embeddings_come_from_a_file_for_the_table_or_the_used_rows(tmp_path):
    x = rng().normal(size=(10, 4))
    path = tmp_path / "e.npy"
    np.save(path, x)
    expected = features(rows("embeddings", x[4:])).x
    np.testing.assert_allclose(features(rows("text", TEXTS, total=10), str(path)).x, expected, atol=1e-6)
    np.save(path, x[4:])
    f = features(rows("text", TEXTS, total=10), str(path))
    np.testing.assert_allclose(f.x, expected, atol=1e-6)
    assert "e.npy, of 4 dimensions" in f.words
    np.save(path, (300 * x).astype(np.float16))  # squares of such numbers are too large for float16
    np.testing.assert_allclose(features(rows("text", TEXTS, total=10), str(path)).x, expected, atol=1e-2)


def test_files_of_embeddings_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "e.npy"
    with pytest.raises(FileNotFoundError, match=r"there is no file .*e\.npy"):
        features(rows("text", TEXTS, total=10), str(path))
    np.save(path, np.ones((7, 4)))
    with pytest.raises(ValueError, match="has 7 rows, but the table has 10"):
        features(rows("text", TEXTS, total=10), str(path))
    x = rng().normal(size=(10, 4))
    x[0], x[5, 2], x[9, 0] = np.nan, np.inf, np.nan  # the first row is not used
    np.save(path, x)
    with pytest.raises(ValueError, match=r"of 2 used rows are NaN or infinite: row 5, row 9\. "):
        features(rows("text", TEXTS, total=10), str(path))


def test_values_that_are_not_finite_never_leave():
    x = rng().normal(size=(6, 3))
    x[2, 1] = np.nan
    with pytest.raises(ValueError, match=r"the embeddings of 1 used rows are NaN or infinite: row 2\."):
        features(rows("embeddings", x))


# --- trained models --------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Models at 32 × 32 pixels, which is faster."""
    made = dict(backbones._LIBRARIES)

    def shrink(make):
        def build(name):
            b = make(name)
            return backbones.Backbone(b.model, b.head, b.cached, 32, 32, b.mean, b.deviation)

        return build

    monkeypatch.setattr(backbones, "_LIBRARIES", {library: shrink(make) for library, make in made.items()})


def test_torchvision_features_are_those_before_the_last_layer(tmp_path, small):
    model = torchvision("models").get_model("resnet18", num_classes=3)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "w.pth")
    images = noise(40, 32, 32, 3)
    f = features(rows("images", images), "torchvision:resnet18", weights=tmp_path / "w.pth", dimensions=1000)
    model.fc = torch.nn.Identity()
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    with torch.no_grad():
        raw = model.eval()(((torch.from_numpy(images) / 255 - mean) / deviation).permute(0, 3, 1, 2)).numpy()
    raw = raw[:, np.ptp(raw, axis=0) > 0]  # some units of a random network are never active
    np.testing.assert_allclose(f.x, (raw - raw.mean(0)) / raw.std(0), atol=2e-2)
    assert "512 outputs before the last layer of torchvision:resnet18 (w.pth)" in f.words


def test_timm_features_from_safetensors_and_from_the_cache(tmp_path, monkeypatch, small):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    content = [noise(20, 30), noise(9, 9, 3), noise(33, 40, 3)]
    with pytest.raises(
        FileNotFoundError, match=r"weights of timm:resnet10t are not on disk, and nothing is downloaded"
    ):
        features(rows("images", content), "timm:resnet10t")
    file = tmp_path / "checkpoints" / "resnet10t.safetensors"
    file.parent.mkdir()
    save_file(timm.create_model("resnet10t", pretrained=False, num_classes=7).state_dict(), file)
    named = features(rows("images", content), "timm:resnet10t", weights=file)
    assert named.x.shape[0] == 3
    np.testing.assert_array_equal(features(rows("images", content), "timm:resnet10t").x, named.x)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    data, file = rows("images", EXAMPLES["images"]), tmp_path / "w.pt"
    torch.save(torch.nn.Linear(3, 4).state_dict(), file)
    with pytest.raises(
        ValueError, match=r"does not hold the weights of torchvision:resnet18: \d+ of \d+ tensors differ"
    ):
        features(data, "torchvision:resnet18", weights=file)
    torch.save([1, 2], file)
    with pytest.raises(ValueError, match="holds no state dict"):
        features(data, "torchvision:resnet18", weights=file)
    torch.save(torch.nn.Linear(3, 4), file)  # a pickled module, which would run code
    with pytest.raises(ValueError, match="can't be read as weights"):
        features(data, "torchvision:resnet18", weights=file)
    with pytest.raises(FileNotFoundError, match=r"none\.pt, does not exist; name the file that has them"):
        features(data, "torchvision:resnet18", weights=tmp_path / "none.pt")


def test_models_that_are_not_there_are_refused():
    data = rows("images", EXAMPLES["images"])
    with pytest.raises(ValueError, match="torchvision has no classifier 'resnet17'"):
        features(data, "torchvision:resnet17")
    with pytest.raises(ValueError, match="does not end with a linear layer"):
        features(data, "torchvision:squeezenet1_0")
    with pytest.raises(ValueError, match="timm has no model 'resnet17t'"):
        features(data, "timm:resnet17t")
