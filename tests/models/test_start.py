"""Models that start from a file of arrays."""

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save

from fedjax_sim import InvalidType
from fedjax_sim.models import from_fn, lora, mlp, started_from
from tests.refusals import refused

KEY = jax.random.key(0)
MODEL = mlp(input_shape=(3,), num_outputs=2, hidden=(4,))


def arrays(model=MODEL, seed=1):
    params = jax.jit(model.init)(jax.random.key(seed))[0]
    named = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in named}


def written(path, content):
    path.write_bytes(save(content))
    return str(path)


def test_starts_with_the_bits_of_the_file(tmp_path):
    """Catches leaves that are drawn anew or swapped, a key that matters, and another dtype."""
    path = written(tmp_path / "model.safetensors", arrays())
    started = started_from(MODEL, path=path)
    params, state = started.init(KEY)
    expected = jax.jit(MODEL.init)(jax.random.key(1))[0]
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert state == () and [layer.name for layer in started.layers] == ["hidden_0", "output"]
    short = from_fn(lambda key: {"w": jax.numpy.zeros(3, "bfloat16")}, lambda params, x: x)
    path = written(tmp_path / "short.safetensors", {"w": np.array([1, 2, 3], ml_dtypes.bfloat16)})
    assert started_from(short, path=path).init(KEY)[0]["w"].tolist() == [1, 2, 3]


def test_adapters_go_around_a_start(tmp_path):
    """Catches frozen parameters that are not those of the file: a pre-trained model is what LoRA adapts."""
    path = written(tmp_path / "model.safetensors", content := arrays())
    params, state = lora(started_from(MODEL, path=path), rank=1).init(KEY)
    for layer in ("hidden_0", "output"):
        np.testing.assert_array_equal(state["frozen"][layer]["kernel"], content[f"{layer}/kernel"])
    adapters = {f"hidden_0/kernel/{name}": np.asarray(leaf) for name, leaf in params["hidden_0"]["kernel"].items()}
    other = lora(MODEL, rank=1, matrices=["hidden_0"])
    again, _ = started_from(other, path=written(tmp_path / "adapters.safetensors", adapters)).init(KEY)
    np.testing.assert_array_equal(again["hidden_0"]["kernel"]["a"], adapters["hidden_0/kernel/a"])


def test_a_part_starts_from_the_file(tmp_path):
    """A new output layer on a pre-trained body. Catches a body that is drawn, and arrays that are read."""
    path = written(tmp_path / "model.safetensors", arrays(mlp(input_shape=(3,), num_outputs=7, hidden=(4,))))
    with pytest.raises(ValueError, match="'output/kernel' as"):
        started_from(MODEL, path=path, leaves=["output/kernel"])
    with refused("leaves", value="hidden", hint="'hidden_0'"):
        started_from(MODEL, path=path, leaves=["hidden"])
    with refused("leaves", rule="at least one"):
        started_from(MODEL, path=path, leaves=[])
    number = from_fn(lambda key: jax.numpy.zeros(3), lambda params, x: x)
    with refused("leaves", rule="no dict", kind=InvalidType):
        started_from(number, path=path, leaves=["w"])
    params, _ = jax.jit(started_from(MODEL, path=path, leaves=["hidden_0"]).init)(KEY)
    drawn, _ = jax.jit(MODEL.init)(KEY)
    jax.tree.map(np.testing.assert_array_equal, params["output"], drawn["output"])
    np.testing.assert_array_equal(
        params["hidden_0"]["kernel"], arrays(mlp(input_shape=(3,), num_outputs=7, hidden=(4,)))["hidden_0/kernel"]
    )


def test_other_files_are_refused(tmp_path):
    """Catches a leaf that would keep its draw, an array that nobody reads, and a cast or a broadcast."""
    path = tmp_path / "model.safetensors"
    content = arrays()
    without = {name: x for name, x in content.items() if name != "output/bias"}
    cases = {
        "a file with the array 'output/bias', got \"a file with": without,
        "arrays of the model's leaves .*, got 'output/scale'": content | {"output/scale": np.zeros(2, np.float32)},
        r"'output/bias' as float32\[2\], got 'float32\[3\]'": content | {"output/bias": np.zeros(3, np.float32)},
        r"'output/bias' as float32\[2\], got 'float64\[2\]'": content | {"output/bias": np.zeros(2)},
        "finite numbers in 'output/bias', got '1 that are not'": content
        | {"output/bias": np.array([0, np.nan], np.float32)},
    }
    for message, arrays_there in cases.items():
        with pytest.raises(ValueError, match=f"path: expected {message}"):
            started_from(MODEL, path=written(path, arrays_there))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"path: expected a \.safetensors file"):
        started_from(MODEL, path=str(path))
    np.savez(tmp_path / "model.npz", **content)
    with pytest.raises(ValueError, match=r"path: expected a \.safetensors file"):
        started_from(MODEL, path=str(tmp_path / "model.npz"))
    with refused("path", value=str(tmp_path / "none.safetensors"), rule="existing"):
        started_from(MODEL, path=str(tmp_path / "none.safetensors"))
