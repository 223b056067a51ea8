"""Random messages of D that P decodes: any value that the types allow, mixed with values that mean something to P."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from typing import Any, get_args

import msgspec
import msgspec.inspect as kinds

from kvferry.connector.wire import messages
from kvferry.transport.errors import ProtocolError

Known = Mapping[str, list[Any]]
"""Values that mean something, by the name of the field, or of struct and field with a dot between."""


_info = cache(kinds.type_info)


def random_request(rng: random.Random, known: Known) -> messages.Request:
    """A message of D. Each field has a known value, if there is one, in three of four cases."""
    kind = rng.choice(get_args(messages.Request))
    request: messages.Request = _struct(rng, _info(kind), known)
    return request


def _struct(rng: random.Random, info: Any, known: Known) -> Any:
    fields = {}
    for field in info.fields:
        values = known.get(f"{info.cls.__name__}.{field.name}") or known.get(field.name)
        if values and rng.random() < 0.75:
            fields[field.name] = rng.choice(values)
        elif field.required or rng.random() < 0.5:
            fields[field.name] = _value(rng, field.type, known)
    return info.cls(**fields)


def _length(rng: random.Random, least: int | None, most: int | None) -> int:
    """Mostly short; at times as long as the type allows, up to thousands."""
    least, most = least or 0, 4096 if most is None else most
    top = rng.choice([2] * 16 + [8, 8, 64, 4096])
    return rng.randint(least, max(least, min(most, top)))


def _value(rng: random.Random, info: Any, known: Known) -> Any:
    match info:
        case kinds.Metadata(type=inner):
            return _value(rng, inner, known)
        case kinds.IntType(ge=ge, gt=gt, le=le, lt=lt):
            least = ge if ge is not None else gt + 1 if gt is not None else -(1 << 62)
            most = le if le is not None else lt - 1 if lt is not None else 1 << 62
            return rng.choice([least, min(most, least + rng.randint(0, 40)), rng.randint(least, most), most])
        case kinds.FloatType():
            return rng.choice([0.0, 1.0, -1.0, 1e300, float("nan"), rng.random()])
        case kinds.BoolType():
            return rng.random() < 0.5
        case kinds.NoneType():
            return None
        case kinds.StrType(min_length=least, max_length=most):
            return "".join(rng.choices("ab%{}$\\'é", k=_length(rng, least, most)))
        case kinds.BytesType(min_length=least, max_length=most):
            return rng.randbytes(_length(rng, least, most))
        case kinds.LiteralType(values=values):
            return rng.choice(values)
        case kinds.UnionType(types=types):
            return _value(rng, rng.choice(types), known)
        case (
            kinds.VarTupleType(item_type=item, min_length=least, max_length=most)
            | kinds.ListType(item_type=item, min_length=least, max_length=most)
        ):
            count = _length(rng, least, most)
            few = [_value(rng, item, known) for _ in range(min(count, 4))]
            return tuple(few[n % len(few)] for n in range(count))
        case kinds.TupleType(item_types=items):
            return tuple(_value(rng, item, known) for item in items)
        case kinds.DictType(key_type=key, value_type=value, min_length=least, max_length=most):
            return {
                _value(rng, key, known): _value(rng, value, known) for _ in range(min(4, _length(rng, least, most)))
            }
        case kinds.StructType():
            return _struct(rng, info, known)
    raise AssertionError(f"no random value of {info}")


def decodes(request: messages.Request) -> bool:
    """Whether P takes the message. Structs are not checked when they are made."""
    try:
        messages.decode_request(messages.encode(request))
    except (ProtocolError, msgspec.MsgspecError):
        return False
    return True
