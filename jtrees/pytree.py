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
from typing import Any, TypeVar, dataclass_transform, get_type_hints, overload

from flax import struct
import jax

T = TypeVar("T")


def annotation_of(cls: type, field: dataclasses.Field) -> Any:
    """Returns the annotation of a field, which a module may postpone: it is then text."""
    return get_type_hints(cls)[field.name] if isinstance(field.type, str) else field.type


field = struct.field


@overload
@dataclass_transform(frozen_default=True, field_specifiers=(struct.field, dataclasses.field))
def dataclass(cls: type[T], /) -> type[T]: ...


@overload
@dataclass_transform(frozen_default=True, field_specifiers=(struct.field, dataclasses.field))
def dataclass(**options: Any) -> Callable[[type[T]], type[T]]: ...


def dataclass(cls: Any = None, /, **options: Any) -> Any:
    """Returns the class as a frozen dataclass and a pytree, with a method ``replace``.

    Fields are children, except fields of ``field(pytree_node=False)``, which are static. ``pytree_node`` may also be a
    function of the annotation.

    Args:
      cls: the class.
      **options: options of :func:`dataclasses.dataclass`.
    """
    if cls is None:
        return partial(dataclass, **options)
    cls = dataclasses.dataclass(frozen=True, **options)(cls)
    fields = dataclasses.fields(cls)
    is_child = lambda node, field: node(annotation_of(cls, field)) if callable(node) else node
    children = tuple(field.name for field in fields if is_child(field.metadata.get("pytree_node", True), field))
    static = tuple(field.name for field in fields if field.name not in children)

    def flatten(instance: Any) -> tuple[Sequence[Any], tuple[Any, ...]]:
        return [getattr(instance, name) for name in children], tuple(getattr(instance, name) for name in static)

    def flatten_with_keys(instance: Any) -> tuple[Sequence[Any], tuple[Any, ...]]:
        values, aux = flatten(instance)
        return [*zip(map(jax.tree_util.GetAttrKey, children), values, strict=True)], aux

    def unflatten(aux: tuple[Any, ...], values: Iterable[Any]) -> Any:
        return cls(**dict(zip(children, values, strict=True)), **dict(zip(static, aux, strict=True)))

    cls.replace = dataclasses.replace
    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls
