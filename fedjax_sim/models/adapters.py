"""This module makes models from flax and Equinox modules. A library is imported when its adapter is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim.models.model import Model, accepts
from fedjax_sim.prng import stream
from fedjax_sim.tree import spec
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import fail

# Names that modules use for the switch between training and evaluation, with its value in training.
SWITCHES = {
    "deterministic": False,
    "is_training": True,
    "train": True,
    "training": True,
    "use_running_average": False,
}


def _switches(call: Callable, train: bool) -> dict[str, Any]:
    """Returns those switches that `call` has as parameters, as keyword arguments of it, which are True or False."""
    return {name: value == train for name, value in SWITCHES.items() if accepts(call, name)}


def _needs_key(key: Array | None, train: bool) -> None:
    """Refuses to train without a key."""
    if train and key is None:
        fail("key", "a key when train=True", key, "Dropout and other noise draw from it.", TypeError)


def from_linen(module: Any, example_input: PyTree, *, rngs: Sequence[str] = ("dropout",)) -> Model:
    """Makes a model from a `flax.linen` module.

    Args:
      module: the module. If its call has arguments `train`, `training`, `is_training`, `deterministic` or
        `use_running_average`, they are set from `train`.
      example_input: a batch [n, ...] of inputs, or its ShapeDtypeStructs. Only shapes and dtypes are used.
      rngs: names of the random streams that the module draws from in training.

    Returns: the `Model`. Its state is a dict of all collections except "params", such as "batch_stats", or `()` if
    there are none. Values that a module sows ("intermediates") are left out.

    Guarantees: dropout masks depend on the key alone, also under `vmap` over clients, and evaluation draws none
    (tests/models/test_adapters.py::test_dropout_follows_the_key_of_each_client). Running statistics are returned
    as state (tests/models/test_adapters.py::test_batch_statistics_are_returned_as_state).

    >>> import flax.linen as nn, jax, jax.numpy as jnp
    >>> model = from_linen(nn.Dense(3), jax.ShapeDtypeStruct((1, 2), jnp.float32))
    >>> params, state = model.init(jax.random.key(0))
    >>> sorted(params), state
    (['bias', 'kernel'], ())
    """
    import flax.linen as nn
    from flax.core import unfreeze

    if not isinstance(module, nn.Module):
        shown = type(module).__name__
        fail("module", "a flax.linen module", shown, "For flax.nnx use from_nnx, for functions from_fn.", TypeError)
    inputs = spec(example_input)

    def streams(key: Array) -> dict[str, Array]:
        return {name: stream(key, name) for name in rngs}

    def init(key: Array) -> tuple[PyTree, PyTree]:
        x = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), inputs)
        keys = {"params": stream(key, "params"), **streams(key)}
        variables = unfreeze(module.init(keys, x, **_switches(module.__call__, False)))
        state = {name: value for name, value in variables.items() if name not in ("params", "intermediates")}
        return variables.get("params", {}), state or ()

    def apply(params: PyTree, state: PyTree, x: PyTree, key: Array | None, train: bool) -> tuple[PyTree, PyTree]:
        _needs_key(key, train)
        variables = {"params": params, **(state or {})}
        switches = _switches(module.__call__, train)
        if not train:
            return module.apply(variables, x, **switches), state
        assert key is not None, "`_needs_key` refuses to train without one"
        if not state:
            return module.apply(variables, x, rngs=streams(key), **switches), state
        # flax returns the changed collections only if they are declared mutable.
        out, changed = module.apply(variables, x, rngs=streams(key), mutable=list(state), **switches)
        return out, {**state, **unfreeze(changed)}

    return Model(init, apply)


def from_nnx(constructor: Callable, *, rngs: Sequence[str] = ("dropout",)) -> Model:
    """Makes a model from the constructor of a `flax.nnx` module.

    The module is put into `train()` or `eval()` mode. The arguments of its call that switch to training are set as in
    `from_linen`.

    Args:
      constructor: `nnx.Rngs -> nnx.Module`, such as `lambda rngs: Net(10, rngs=rngs)`. If the module's call takes
        `rngs`, they are passed. Random generators that a module holds are seeded anew from the key at each call.
      rngs: names of the random streams that are passed at the call.

    Returns: the `Model`. Its params are the `nnx.Param`s as nested dicts. Its state is all other variables except
    random generators, or `()` if there are none.

    Guarantees: dropout masks depend on the key alone, also under `vmap` over clients, and evaluation draws none, for
    modules that take `rngs` at the call and for modules that hold generators
    (tests/models/test_adapters.py::test_dropout_follows_the_key_of_each_client). Running statistics are returned as
    state (::test_batch_statistics_are_returned_as_state).

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> model = from_nnx(lambda rngs: nnx.Linear(2, 3, rngs=rngs))
    >>> params, state = model.init(jax.random.key(0))
    >>> sorted(params), state
    (['bias', 'kernel'], ())
    """
    from flax import nnx

    if not callable(constructor) or isinstance(constructor, nnx.Module):
        shown = type(constructor).__name__
        fail("constructor", "a function nnx.Rngs -> nnx.Module", shown, "E.g. lambda rngs: Net(rngs=rngs).", TypeError)
    names = ("params", *rngs)

    def build(key: Array) -> tuple:
        module = constructor(nnx.Rngs(**{name: stream(key, name) for name in names}))
        if not isinstance(module, nnx.Module):
            fail("constructor", "a function nnx.Rngs -> nnx.Module", type(module).__name__, error=TypeError)
        return nnx.split(module, nnx.Param, nnx.RngState, ...)

    cached_structure: list = []  # the module's structure, from an abstract construction on first use

    def structure() -> tuple:
        if not cached_structure:
            cached_structure.extend(nnx.eval_shape(lambda: build(jax.random.key(0))))
        return tuple(cached_structure)

    def init(key: Array) -> tuple[PyTree, PyTree]:
        _, params, _, state = build(key)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(state) or ()

    def apply(params: PyTree, state: PyTree, x: PyTree, key: Array | None, train: bool) -> tuple[PyTree, PyTree]:
        _needs_key(key, train)
        definition, *abstract_parts = structure()
        # The parts are parameters, random generators and all other variables. They are replaced in place, so copies
        # keep the cached structure as it is.
        parts = [jax.tree.map(lambda leaf: leaf, part) for part in abstract_parts]
        nnx.replace_by_pure_dict(parts[0], params)
        parts[1] = _seeded(parts[1], jax.random.key(0) if key is None else key)
        nnx.replace_by_pure_dict(parts[2], state or {})
        module = nnx.merge(definition, *parts)
        module.train() if train else module.eval()
        keywords = _switches(module.__call__, train)
        if train and accepts(module.__call__, "rngs"):
            assert key is not None, "`_needs_key` refuses to train without one"
            keywords["rngs"] = nnx.Rngs(**{name: stream(key, name) for name in rngs})
        out = module(x, **keywords)
        if train:
            state = nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Any(nnx.Param, nnx.RngState)))) or ()
        return out, state

    return Model(init, apply)


def from_equinox(constructor: Callable) -> Model:
    """Makes a model from the constructor of an Equinox module, whose call takes one example.

    Args:
      constructor: `key -> equinox.Module`, such as `lambda key: equinox.nn.MLP(4, 3, 8, 1, key=key)`. If the module's
        call takes `key`, each example of a minibatch gets its own in training. In evaluation the module is in inference
        mode, so dropout does nothing.

    Returns: the `Model`. Its params are the floating-point arrays by their paths, as a dict; it has no state.

    Raises: TypeError for anything but a constructor, and for a module that holds other arrays, such as statistics.

    Guarantees: outputs and gradients are those of the module itself
    (tests/models/test_adapters.py::test_equinox_modules_are_themselves), and dropout masks depend on the key alone
    (::test_dropout_follows_the_key_of_each_client).
    """
    import equinox

    if not callable(constructor) or isinstance(constructor, equinox.Module):
        shown = type(constructor).__name__
        fail("constructor", "a function key -> equinox.Module", shown, "E.g. lambda key: Net(key=key).", TypeError)

    def arrays_of(module: Any) -> dict[str, Any]:
        leaves = jax.tree_util.tree_leaves_with_path(equinox.filter(module, equinox.is_array))
        return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}

    def init(key: Array) -> tuple[PyTree, PyTree]:
        module = constructor(stream(key, "params"))
        if not isinstance(module, equinox.Module):
            fail("constructor", "a function key -> equinox.Module", type(module).__name__, error=TypeError)
        params = arrays_of(module)
        for name, leaf in params.items():
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                hint = "Statistics and counters would be those of a padded minibatch: leave them out."
                fail("constructor", "a module whose arrays are floats", f"{name} of {leaf.dtype}", hint, TypeError)
        return params, ()

    def apply(params: PyTree, state: PyTree, x: PyTree, key: Array | None, train: bool) -> tuple[PyTree, PyTree]:
        _needs_key(key, train)
        # Only the structure of this module is used: its arrays are replaced, and so never computed.
        module = equinox.filter_eval_shape(constructor, jax.random.key(0))
        is_array = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)  # noqa: E731
        paths = jax.tree_util.tree_leaves_with_path(equinox.filter(module, is_array))
        names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
        leaves, structure = jax.tree.flatten(module)
        replacements = iter(names)
        module = jax.tree.unflatten(
            structure, [params[next(replacements)] if is_array(leaf) else leaf for leaf in leaves]
        )
        module = equinox.nn.inference_mode(module, not train)
        if not train or not accepts(module.__call__, "key"):
            return jax.vmap(module)(x), state
        assert key is not None, "`_needs_key` refuses to train without one"
        keys = jax.random.split(key, jax.tree.leaves(x)[0].shape[0])
        return jax.vmap(lambda row, key: module(row, key=key))(x, keys), state

    return Model(init, apply)


def _seeded(generators: PyTree, key: Array) -> PyTree:
    """Seeds the random generators that a module holds. Each gets a key that depends on its path, and the count zero."""

    def seed(path: tuple, leaf: jax.ShapeDtypeStruct) -> Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            generator_key = stream(key, jax.tree_util.keystr(path))
            return generator_key if not leaf.shape else jax.random.split(generator_key, leaf.shape)
        return jnp.zeros(leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(seed, generators)
