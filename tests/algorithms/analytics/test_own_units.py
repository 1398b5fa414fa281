"""Statistics answer in the data's own units, and say what they are about."""

import jax
import numpy as np
import pytest

from fedjax_sim import algorithms, population, sampling
from fedjax_sim.config.build import build
from fedjax_sim.config.document import ConfigError, load
from fedjax_sim.experiment.summary import estimate_of

AGES = np.repeat([50.0, 58.0, 66.0], [3, 5, 3])  # quartiles 50 (up to the 2.75th row), 58 and 66
ROWS = {
    "who": np.repeat(["a", "b"], 11),
    "age": np.tile(AGES, 2),
    "smokes": np.tile(["no", "yes"], 11),
    "ill": np.tile(["no", "no", "yes"], 8)[:22],
}
TABLE = ["data.name=table", "data.client=who", "data.label=ill", "data.task=binary", "data.categories=['smokes']"]
TABLE += ["data.test_file=FILE", "data.file=FILE", "sampler.name=full"]


@pytest.fixture
def settings(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("\n".join([",".join(ROWS), *(",".join(map(str, row)) for row in zip(*ROWS.values(), strict=True))]))
    return [text.replace("FILE", str(file)) for text in TABLE]


def found_by(settings, rounds):
    """What a config's statistic finds, as a run's summary and page tell it."""
    made = build(load(None, settings))
    state = made.algorithm.init(made.key, made.params, made.data.train)
    step = jax.jit(made.algorithm.step)
    for round in range(rounds):
        state, _ = step(jax.random.fold_in(made.key, round), state, made.data.train)
    return estimate_of(made.algorithm, state)["estimate"]


QUANTILES = ["algorithm.name=quantiles", "algorithm.high=120.0", "algorithm.column=0"]


def test_quantiles_of_a_table_are_in_its_units(settings):
    """Catches quartiles of standardised ages, an interval in their units, and a value that lies beyond its end."""
    found = found_by([*settings, *QUANTILES], 16)
    np.testing.assert_allclose(found["quantiles"], [50, 58, 66], atol=0.01)
    assert found["of"] == "age" and "beyond" not in found
    found = found_by([*settings, *QUANTILES[:1], "algorithm.high=55.0", "algorithm.column=0"], 12)
    assert found["beyond"] == [f"{p}: may lie above 55, the end of the interval" for p in (0.5, 0.75)]


@pytest.mark.full
def test_a_histogram_says_what_it_counts(settings):
    """Catches bins in other units, and counts without a word of what is counted, or without the classes' names."""
    bins = ["algorithm.low=45.0", "algorithm.high=60.0", "algorithm.num_bins=3", "algorithm.column=0"]
    found = found_by([*settings, "algorithm.name=histogram", *bins], 1)
    assert found["counts"] == [0, 3, 8] and found["edges"] == [45, 50, 55, 60]
    assert "age" in found["counted"] and "outside of [45, 60)" in found["counted"]
    found = found_by([*settings, "algorithm.name=histogram"], 1)
    assert found["categories"] == ["no", "yes"] and found["counts"] == [7.5, 3.5]
    found = found_by([*settings, "algorithm.name=heavy_hitters", "algorithm.threshold=0.4"], 1)
    assert found["names"] == [["no", "yes"][symbol] for symbol in found["symbols"]] and found["names"]


@pytest.mark.full
@pytest.mark.parametrize("name, mean", [("kmeans", "centroids"), ("gaussian_mixture", "means")])
def test_standardised_clusters_are_converted_back(settings, name, mean):
    """Catches centroids that are told in units of standard deviations."""
    count = {"kmeans": "num_clusters", "gaussian_mixture": "num_components"}[name]
    one = [*settings, f"algorithm.name={name}", f"algorithm.{count}=1"]
    for scaled in ([], ["data.standardise=true"], ["data.standardise={mean=[40], deviation=[7]}"]):
        found = found_by([*one, *scaled], 1)
        assert found["columns"] == ["age", "smokes = no", "smokes = yes"]
        np.testing.assert_allclose(found[mean], [[58, 0.5, 0.5]], rtol=1e-5)
        assert ("units" in found) == bool(scaled)
        if name == "gaussian_mixture":
            np.testing.assert_allclose(found["variances"], [[AGES.var(), 0.25, 0.25]], rtol=1e-4)


@pytest.mark.full
def test_thresholds_of_trees_are_converted_back(settings):
    """Catches a split at an age of half a standard deviation."""
    edges = ["algorithm.name=boosted_trees", "algorithm.num_trees=1", "algorithm.max_depth=1", "algorithm.num_bins=2"]
    own = found_by([*settings, *edges, "algorithm.low=0.0", "algorithm.high=120.0"], 1)
    scaled = [*settings, *edges, "data.standardise={mean=[60], deviation=[10]}"]
    scaled = found_by([*scaled, "algorithm.low=-6.0", "algorithm.high=6.0"], 1)
    is_age = np.array(own["features"]) == 0
    assert own["columns"][0] == scaled["columns"][0] == "age"
    assert (np.array(own["thresholds"])[is_age] == 60).all()
    assert (np.array(scaled["thresholds"])[np.array(scaled["features"]) == 0] == 60).all()


def test_standardised_features_are_refused(settings):
    """Catches an interval that is read in units of standard deviations, by a config or from Python."""
    for scaled in ("true", "{mean=[40], deviation=[7]}"):
        with pytest.raises(ConfigError, match="data: expected features in their own"):
            build(load(None, [*settings, *QUANTILES, f"data.standardise={scaled}"]))
    data = population.from_table(ROWS, client="who", label="ill", task="binary", features=["age"])
    assert data.feature_names == ("age",) and data.units.factors[0] == pytest.approx(AGES.std(), rel=0.2)
    for make in (algorithms.quantiles, algorithms.kmeans):
        options = {"column": 0} if make is algorithms.quantiles else {"num_clusters": 2, "input_shape": (1,)}
        algorithm = make(sampling.full(2), low=0.0, high=120.0, **options)
        with pytest.raises(ValueError, match="standardise=False"):
            algorithm.init(jax.random.key(0), (), data.train)
    trained = build(load(None, [*settings, "model.name=logistic"]))  # a model is trained on standardised features
    assert abs(np.asarray(trained.data.test["x"])[:, 0].mean()) < 1e-5
