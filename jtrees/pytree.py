"""Dataclasses that are pytrees, like ``flax.struct.dataclass``, and whose classes JAX distinguishes.

jaxlib 0.10.2 ignores the class when it compares tree structures of classes that are registered by
``jax.tree_util.register_dataclass``, as in flax. For example, leaves of values and leaves of logits compare equal,
although their hashes differ. The caches of traced and compiled functions test equality only if a few bits of the hashes
agree. About one pair of classes in a hundred therefore shares a program wrongly, and only in some processes. JAX
compares the classes if they are registered with their own flatten functions, as in this module.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
from functools import partial
from typing import Any, TypeVar, dataclass_transform, overload

from flax import serialization, struct
import jax

T = TypeVar("T")

field = struct.field


@overload
@dataclass_transform(frozen_default=True, field_specifiers=(struct.field, dataclasses.field))
def dataclass(cls: type[T], /) -> type[T]: ...


@overload
@dataclass_transform(frozen_default=True, field_specifiers=(struct.field, dataclasses.field))
def dataclass(**options: Any) -> Callable[[type[T]], type[T]]: ...


def dataclass(cls: Any = None, /, **options: Any) -> Any:
    """Returns the class as a frozen dataclass and a pytree, with a method ``replace``.

    Fields are children, except fields of ``field(pytree_node=False)``, which are static. :mod:`flax.serialization`
    supports the class like a class of flax.

    Args:
      cls: the class.
      **options: options of :func:`dataclasses.dataclass`.
    """
    if cls is None:
        return partial(dataclass, **options)
    cls = dataclasses.dataclass(frozen=True, **options)(cls)
    fields = dataclasses.fields(cls)
    children = tuple(field.name for field in fields if field.metadata.get("pytree_node", True))
    static = tuple(field.name for field in fields if field.name not in children)

    def flatten(instance: Any) -> tuple[Sequence[Any], tuple[Any, ...]]:
        return [getattr(instance, name) for name in children], tuple(getattr(instance, name) for name in static)

    def flatten_with_keys(instance: Any) -> tuple[Sequence[Any], tuple[Any, ...]]:
        values, aux = flatten(instance)
        return [*zip(map(jax.tree_util.GetAttrKey, children), values, strict=True)], aux

    def unflatten(aux: tuple[Any, ...], values: Iterable[Any]) -> Any:
        return cls(**dict(zip(children, values, strict=True)), **dict(zip(static, aux, strict=True)))

    def to_state(instance: Any) -> dict[str, Any]:
        return {name: serialization.to_state_dict(getattr(instance, name)) for name in children}

    def from_state(instance: Any, state: dict[str, Any]) -> Any:
        if set(state) != set(children):
            raise ValueError(f"the state of {cls.__name__} must have {sorted(children)}, got {sorted(state)!s:.80}")
        values = {n: serialization.from_state_dict(getattr(instance, n), state[n], name=n) for n in children}
        return dataclasses.replace(instance, **values)

    cls.replace = dataclasses.replace
    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    serialization.register_serialization_state(cls, to_state, from_state)
    return cls
