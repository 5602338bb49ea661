"""Which gradients replicas add up when an optimizer applies them: the same ones on all replicas, variable by variable.

Python may leave out a layer on some replicas: by `random.random()`, or in a step that runs eagerly, because none of
their rows needs it. They then have gradients of other variables, and what is packed by position would meet the wrong
one. So replicas list what they have, and hear the lists of all, once a trace or, run eagerly, once a step:

replica 0   a  b  -    list               a  b  0
replica 1   a  -  c   ------>  a, b, c -> a  0  c  -> sums, optimizer.apply

One that lacks a gradient adds zeros: the sum is the gradient of the global batch. A variable without a gradient on all
replicas has none, as in one process. State that only some have written, such as the moving mean of a layer that the
others have left out, is averaged as all state is; the others have the old value. Where replicas have exchanged other
things before, such as the statistics of a BatchNormalization that some have left out, their sums are wrong already:
that is refused.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import traceback
import warnings
import weakref
from typing import Any

import keras
import tensorflow as tf

from tfdist.arguments import is_new
from tfdist.compat.keras import hooks_of
from tfdist.inspection.model_state import is_sharded
from tfdist.steps.gradients import is_common, is_half
from tfdist.steps.keras_step import KerasStep

_DENSE, _PART = "dense", "part"
_NONE = "", False, False
# Attributes of a model: what its replicas have agreed on, and whether it was warned of.
_AGREED = "_tfdist_common_gradients"
_REMEDY = (
    "Expected: the same layers on all replicas, with `keras.utils.set_random_seed(number)` on every process where "
    "Python's random numbers choose; or keras.ops.cond, which chooses in every step."
)


@dataclasses.dataclass
class Listing:
    """What a replica has when an optimizer applies gradients.

    Attributes:
        optimizer: its class, and how many have applied gradients in this step, with this one.
        meetings: the layers, by their places in the model, in which the replica has exchanged something.
        gradients: by variable (how all processes call it, and how often it was there before), of what kind its gradient
            is ("" for none, "dense", the dtype of a sparse one's indices, "part" for that of a sharded weight), whether
            it was computed in float16, and whether all replicas have looked up the same rows, too. In the order of the
            optimizer's list.
        state: variables that have to be averaged.
    """

    optimizer: list
    meetings: list[int]
    gradients: dict[tuple[str, int], tuple[str, bool, bool]]
    state: list[str]

    def to_json(self) -> str:
        gradients = [[*key, *kind] for key, kind in self.gradients.items()]
        return json.dumps([self.optimizer, self.meetings, gradients, self.state])

    @classmethod
    def from_json(cls, text: str) -> Listing:
        optimizer, meetings, gradients, state = json.loads(text)
        return cls(optimizer, meetings, {(name, n): tuple(kind) for name, n, *kind in gradients}, state)

    @property
    def halves(self) -> list[bool]:
        return [half for _, half, _ in self.gradients.values()]

    @property
    def common(self) -> set[int]:
        """The places of gradients of rows of a table that all replicas look up."""
        return {i for i, (_, _, common) in enumerate(self.gradients.values()) if common}

    def is_as(self, other: Listing) -> bool:
        """Whether nothing has to be changed for the other one."""
        return self == other and list(self.gradients) == list(other.gradients)


def agree(step: KerasStep, optimizer: Any, grads: list, variables: list, state: list) -> tuple[list, list, list]:
    """Gradients, variables and state to average that all replicas have; notes how they were made, `here.listing`.

    Args:
        step: the step, on this replica.
        optimizer: who applies the gradients.
        grads: this replica's.
        variables: theirs.
        state: what this replica has to average.

    Raises:
        NotImplementedError: on all replicas, if they have taken branches that do not go together.
    """
    here = step.here
    here.applied += 1
    places = {id(layer): i for i, layer in enumerate(step.model._flatten_layers())}
    counts: collections.Counter = collections.Counter()
    gradients = {}
    for gradient, variable in zip(grads, variables, strict=True):
        name = _name(variable)
        common = is_common(gradient, here.state.is_of_no_row)
        gradients[name, counts[name]] = _kind(gradient, variable), is_half(gradient), common
        counts[name] += 1
    own = here.listing = Listing(
        optimizer=[type(optimizer).__name__, here.applied],
        meetings=[places.get(id(layer), -1) for layer in here.meetings],
        gradients=gradients,
        state=list(map(_name, state)),
    )
    # In a branch, or in a tf.function that the step calls, replicas are traced one after the other.
    if not step.can_meet():
        return grads, variables, state
    tf.distribute.get_replica_context().merge_call(_agree_with_all, args=(step, optimizer))
    agreed = here.listing
    if own.is_as(agreed):
        return grads, variables, state
    known = {_name(variable): variable for variable in (*step.model.variables, *variables, *state)}
    if strange := {name for name, _ in agreed.gradients} - set(known):
        raise NotImplementedError(
            f"Received: gradients of variables of other replicas ({strange.pop()}) that are not the model's. {_REMEDY}"
        )
    mine = dict(zip(gradients, zip(grads, variables, strict=True), strict=True))
    pairs = [mine.get(key, (None, known[key[0]])) for key in agreed.gradients]
    kinds = [kind for kind, _, _ in agreed.gradients.values()]
    grads = [_of_kind(kind, gradient, variable) for kind, (gradient, variable) in zip(kinds, pairs, strict=True)]
    return grads, [variable for _, variable in pairs], [known[name] for name in agreed.state]


def forget(model: keras.Model) -> None:
    """Forgets what was agreed on: Keras makes another function."""
    object.__setattr__(model, _AGREED, {})


def check_meetings(step: KerasStep, error: Exception) -> None:
    """Says why TensorFlow could not bring the replicas of this process together, if it has failed there.

    Raises:
        NotImplementedError: if they have exchanged other things.
    """
    if not traceback.extract_tb(error.__traceback__)[-1].filename.endswith(("mirrored_run.py", "distribute_utils.py")):
        return  # the user's own
    paths = [[getattr(layer, "path", "") for layer in part.meetings] for part in step.parts.values()]
    for i, other in enumerate(paths[1:], 1):
        if other != paths[0]:
            raise NotImplementedError(_parted(step, "replica 0", f"replica {i}", paths[0], other)) from error


def _agree_with_all(strategy: tf.distribute.Strategy, step: KerasStep, optimizer: Any) -> None:
    """Replaces the lists of this process' replicas by what all replicas agree on."""
    parts, peers = list(step.parts.values()), hooks_of(strategy).peers
    listings = [part.listing for part in parts]
    known = vars(step.model).setdefault(_AGREED, {}) if peers is not None and not tf.executing_eagerly() else {}
    # Python's `train_step` may have been given other weights to train meanwhile, or batches of other sizes.
    case = weakref.ref(optimizer), parts[0].applied, *map(_name, step.model.trainable_variables), *_sizes(step)
    if (agreed := known.get(case)) is None:
        names = [f"replica {i}" for i in range(len(listings))]
        if peers is not None:
            told = peers.gather(
                "gradients", [one.to_json() for one in listings], f"apply the gradients of a {step.purpose[1]}"
            )
            names = [name for name, of_one in zip(peers.names, told, strict=True) for _ in of_one]
            listings = [Listing.from_json(text) for of_one in told for text in of_one]
        agreed = known[case] = _union(step, listings, names)
        if not tf.executing_eagerly() and (peers is None or peers.rank == 0):
            _warn_of_branches(step, listings, names)
    else:
        # Perhaps no other process traces the step once more: nobody is asked.
        for listing in listings:
            _check_among(step, listing, agreed)
    for part in parts:
        part.listing = agreed


def _sizes(step: KerasStep) -> list[tuple]:
    """What all processes know of the sizes of a row; nothing where each has batches of its own."""
    if not step.is_of_all:
        return []
    specs = tf.nest.flatten(step.batch, expand_composites=False)
    return [tuple(one.shape[1:]) for one in specs if isinstance(one, tf.TensorSpec) and one.shape.rank]


def _union(step: KerasStep, listings: list[Listing], names: list[str]) -> Listing:
    """What all have together; a variable stands where all have it, or by its name."""
    first = listings[0]
    for listing, name in zip(listings, names, strict=True):
        if (listing.optimizer, listing.meetings) != (first.optimizer, first.meetings):
            paths = [[_path_of_layer(step, place) for place in one.meetings] for one in (first, listing)]
            raise NotImplementedError(_parted(step, names[0], name, *paths, first.optimizer, listing.optimizer))
    if all(listing.is_as(first) for listing in listings):
        return first
    keys, state = list(first.gradients), first.state
    if any(list(listing.gradients) != keys for listing in listings):
        keys = sorted({key for listing in listings for key in listing.gradients}, key=_order)
    if any(listing.state != state for listing in listings):
        state = sorted({name for listing in listings for name in listing.state}, key=_order)
    gradients = {}
    for key in keys:
        found = [listing.gradients.get(key, _NONE) for listing in listings]
        having = [one for one in found if one[0]]
        kinds = {kind for kind, _, _ in having}
        if _PART in kinds and len(having) < len(found):
            raise NotImplementedError(
                f"Received: a train_step of model '{step.model.name}' in which some replicas have a gradient of "
                f"sharded weight '{_path(step, key[0])}', and others leave its layer out. {_REMEDY}"
            )
        common = len(kinds) == 1 and all(one for _, _, one in having)
        kind = kinds.pop() if len(kinds) == 1 else _DENSE if kinds else ""
        gradients[key] = kind, any(half for _, half, _ in having), common
    return Listing(first.optimizer, first.meetings, gradients, state)


def _check_among(step: KerasStep, listing: Listing, agreed: Listing) -> None:
    """Refuses what the others did not agree on when this step was traced first."""
    for key, (kind, *_) in listing.gradients.items():
        if kind and agreed.gradients.get(key, _NONE)[0] not in (kind, _DENSE):
            raise NotImplementedError(
                f"Received: a train_step of model '{step.model.name}' that is traced once more, for a batch of "
                f"another shape, and takes another branch of Python: it has a gradient of '{_path(step, key[0])}' now. "
                f"{_REMEDY}"
            )
    if more := set(listing.state) - set(agreed.state):
        raise NotImplementedError(
            f"Received: a train_step of model '{step.model.name}' that is traced once more, and writes other state: "
            f"'{_path(step, more.pop())}'. {_REMEDY}"
        )


def _warn_of_branches(step: KerasStep, listings: list[Listing], names: list[str]) -> None:
    """Warns once of a choice that Python has made for good."""
    having = [[key for key, (kind, *_) in listing.gradients.items() if kind] for listing in listings]
    apart = next((key for one in having for key in one if any(key not in other for other in having)), None)
    if apart is None or not is_new(step.model, "branches"):
        return
    with_it, without = (
        next(name for name, keys in zip(names, having, strict=True) if (apart in keys) == has) for has in (True, False)
    )
    warnings.warn(
        f"Received: a train_step of model '{step.model.name}' that takes other branches of Python on {with_it} than on "
        f"{without}, which has no gradient of '{_path(step, apart[0])}' and adds zeros. They were chosen when the step "
        f"was traced, and hold for all steps. {_REMEDY}",
        stacklevel=2,
    )


def _parted(
    step: KerasStep, one: str, other: str, of_one: list[str], of_other: list[str], *optimizers: list[Any]
) -> str:
    """What is said of replicas that have done other things; an optimizer is its class and a number."""
    if optimizers and optimizers[0] != optimizers[1]:
        at, at_other = (f"the {number}. call of optimizer.apply, of {name}," for name, number in optimizers)
    else:
        i = next((i for i, pair in enumerate(zip(of_one, of_other, strict=False)) if pair[0] != pair[1]), None)
        i = min(len(of_one), len(of_other)) if i is None else i
        at, at_other = (_place(paths[i]) if i < len(paths) else "its end" for paths in (of_one, of_other))
    return (
        f"Received: a train_step of model '{step.model.name}' that takes different branches on {one} and {other}: in "
        f"exchanging statistics, losses or gradients, one has come to {at} and the other to {at_other}. {_REMEDY}"
    )


def _place(path: str) -> str:
    return f"layer '{path}'" if path else "optimizer.apply or a loss"


def _path_of_layer(step: KerasStep, place: int) -> str:
    return "" if place < 0 else list(step.model._flatten_layers())[place].path


def _kind(gradient: Any, variable: Any) -> str:
    if gradient is None:
        return ""
    if is_sharded(variable):
        return _PART
    return gradient.indices.dtype.name if isinstance(gradient, tf.IndexedSlices) else _DENSE


def _of_kind(kind: str, gradient: Any, variable: Any) -> Any:
    """The gradient as all replicas have it: zeros if this one has none."""
    if not kind or (gradient is not None and kind != _DENSE):
        return gradient
    if gradient is not None:
        return tf.convert_to_tensor(gradient)
    if kind == _DENSE:
        return tf.zeros(variable.shape, variable.dtype)
    rows, shape = tf.zeros([0, *variable.shape[1:]], variable.dtype), tf.constant(list(variable.shape), kind)
    return tf.IndexedSlices(rows, tf.zeros([0], kind), shape)


def _name(variable: Any) -> str:
    """What all processes call a variable: they make their variables in the same order, under names that may differ."""
    number = getattr(getattr(variable, "_value", variable), "_tfdist_number", None)
    return str(getattr(variable, "path", variable.name) if number is None else number)


def _order(key: Any) -> tuple:
    name = key if isinstance(key, str) else key[0]
    return (len(name), name, key) if name.isdecimal() else (0, name, key)


def _path(step: KerasStep, name: str) -> str:
    return next((v.path for v in step.model.variables if _name(v) == name), name)
