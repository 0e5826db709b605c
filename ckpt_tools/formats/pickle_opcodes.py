"""What each rarer opcode of a pickle does; the frequent ones are in pickle_machine."""

from __future__ import annotations

import struct
from codecs import escape_decode
from collections.abc import Callable
from typing import Any

from .pickle_state import Damaged, Excessive, State

MAX_INTEGER_BYTES = 1024
Handler = Callable[[State, int], int]  # gets the position behind the opcode, returns the position of the next one


def _integer(state: State, length: int, at: int) -> int:
    if length > MAX_INTEGER_BYTES:
        raise Excessive(f"an integer of {length} bytes")
    state.stack.append(int.from_bytes(state.take(length, at), "little", signed=True))
    return at + length


def _unsigned(state: State, width: int, at: int) -> int:
    return int.from_bytes(state.take(width, at), "little")


def _sized(width: int, decode: Callable[[bytes], object]) -> Handler:
    def handler(state: State, at: int) -> int:
        length = _unsigned(state, width, at)
        state.stack.append(decode(state.take(length, at + width)))
        return at + width + length

    return handler


def _constant(value: Callable[[], object]) -> Handler:
    def handler(state: State, at: int) -> int:
        state.stack.append(value())
        return at

    return handler


def _text_or_bytes(raw: bytes) -> str | bytes:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:  # raw bytes of a Python 2 string
        return raw


def _tuple_of(count: int) -> Handler:
    def handler(state: State, at: int) -> int:
        stack = state.stack
        if len(stack) < count:
            raise Damaged("the stack is empty")
        stack[-count:] = [tuple(stack[-count:])]
        return at

    return handler


def _float_line(state: State, at: int) -> int:
    text, end = state.line(at)
    state.stack.append(float(text))
    return end


def _int_line(state: State, at: int) -> int:
    text, end = state.line(at)
    if len(text) > 2 * MAX_INTEGER_BYTES:
        raise Excessive("an integer of more than 2,000 digits")
    state.stack.append(text == "01" if text in ("00", "01") else int(text.rstrip("L")))
    return end


def _string_line(state: State, at: int) -> int:
    text, end = state.line(at)
    if len(text) < 2 or text[0] != text[-1] or text[0] not in "'\"":
        raise Damaged("a string without quotes")
    state.stack.append(_text_or_bytes(escape_decode(text[1:-1].encode("latin-1"))[0]))
    return end


def _unicode_line(state: State, at: int) -> int:
    end = state.data.index(b"\n", at)
    state.stack.append(state.data[at:end].decode("raw-unicode-escape"))
    return end + 1


def _persistent_line(state: State, at: int) -> int:
    text, end = state.line(at)
    state.stack.append(state.policy.persistent(text))
    return end


def _put_line(state: State, at: int) -> int:
    text, end = state.line(at)
    index = int(text[:20])
    if index < 0:
        raise Damaged("a negative memo index")
    state.put(index)
    return end


def _get_line(state: State, at: int) -> int:
    text, end = state.line(at)
    state.get(int(text[:20]))
    return end


def _global_line(state: State, at: int) -> int:
    module, middle = state.line(at)
    name, end = state.line(middle)
    state.global_value(module, name)
    return end


def _instance_line(state: State, at: int) -> int:
    args = state.since_mark()
    end = _global_line(state, at)
    state.call(state.stack.pop(), tuple(args))
    return end


def _long_put(state: State, at: int) -> int:
    state.put(_unsigned(state, 4, at))
    return at + 4


def _proto(state: State, at: int) -> int:
    if state.data[at] > 5:
        raise Damaged(f"pickle protocol {state.data[at]} is unknown")
    return at + 1


def _frame(state: State, at: int) -> int:
    state.take(_unsigned(state, 8, at), at + 8)
    return at + 8


def _binary_float(state: State, at: int) -> int:
    state.stack.append(struct.unpack(">d", state.take(8, at))[0])
    return at + 8


def _stack_op(action: Callable[[State], object]) -> Handler:
    def handler(state: State, at: int) -> int:
        action(state)
        return at

    return handler


def _pop(state: State) -> None:
    if state.marks and state.marks[-1] == len(state.stack):
        state.marks.pop()
    else:
        state.stack.pop()


def _append(state: State) -> None:
    value = state.stack.pop()
    state.append(state.stack[-1], [value])


def _appends(state: State) -> None:
    items = state.since_mark()
    state.append(state.stack[-1], items)


def _set_item(state: State) -> None:
    value, key = state.stack.pop(), state.stack.pop()
    state.set_items(state.stack[-1], [key, value])


def _add_items(state: State) -> None:
    items = state.since_mark()
    state.check_keys(items)
    target = state.stack[-1]
    if type(target) is set:
        target.update(items)
    else:
        state.append(target, items)


def _frozen_set(state: State) -> None:
    items = state.since_mark()
    state.check_keys(items)
    state.stack.append(frozenset(items))


def _dict(state: State) -> None:
    items = state.since_mark()
    value: dict[Any, Any] = {}
    state.set_items(value, items)
    state.stack.append(value)


def _reduce(state: State) -> None:
    args, function = state.stack.pop(), state.stack.pop()
    state.call(function, args)


def _new(state: State) -> None:
    args, cls = state.stack.pop(), state.stack.pop()
    state.new(cls, args)


def _new_ex(state: State) -> None:
    keywords, args, cls = state.stack.pop(), state.stack.pop(), state.stack.pop()
    state.new(cls, args, keywords)


def _object(state: State) -> None:
    items = state.since_mark()
    state.call(items[0], tuple(items[1:]))


def _stack_global(state: State) -> None:
    name, module = state.stack.pop(), state.stack.pop()
    state.global_value(module, name)


def _persistent(state: State) -> None:
    state.stack.append(state.policy.persistent(state.stack.pop()))


def _extension(state: State, at: int) -> int:
    raise Damaged("copyreg extension codes are not read")


def _buffer(state: State, at: int) -> int:
    raise Damaged("the pickle refers to buffers outside itself")


RARE: dict[int, Handler] = {
    ord("0"): _stack_op(_pop),
    ord("1"): _stack_op(State.since_mark),
    ord("2"): _stack_op(lambda s: s.stack.append(s.stack[-1])),
    ord("F"): _float_line,
    ord("I"): _int_line,
    ord("L"): _int_line,
    0x8A: lambda s, at: _integer(s, _unsigned(s, 1, at), at + 1),
    0x8B: lambda s, at: _integer(s, _unsigned(s, 4, at), at + 4),
    ord("S"): _string_line,
    ord("V"): _unicode_line,
    ord("T"): _sized(4, _text_or_bytes),
    ord("U"): _sized(1, _text_or_bytes),
    0x8D: _sized(8, lambda raw: raw.decode("utf-8", "surrogatepass")),
    ord("B"): _sized(4, bytes),
    ord("C"): _sized(1, bytes),
    0x8E: _sized(8, bytes),
    0x96: _sized(8, bytearray),
    ord("G"): _binary_float,
    0x88: _constant(lambda: True),
    0x89: _constant(lambda: False),
    ord(")"): _constant(tuple),
    ord("]"): _constant(list),
    0x8F: _constant(set),
    ord("t"): _stack_op(lambda s: s.stack.append(tuple(s.since_mark()))),
    ord("l"): _stack_op(lambda s: s.stack.append(s.since_mark())),
    ord("d"): _stack_op(_dict),
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
    ord("a"): _stack_op(_append),
    ord("e"): _stack_op(_appends),
    ord("s"): _stack_op(_set_item),
    0x90: _stack_op(_add_items),
    0x91: _stack_op(_frozen_set),
    ord("c"): _global_line,
    0x93: _stack_op(_stack_global),
    ord("i"): _instance_line,
    ord("o"): _stack_op(_object),
    ord("R"): _stack_op(_reduce),
    0x81: _stack_op(_new),
    0x92: _stack_op(_new_ex),
    ord("P"): _persistent_line,
    ord("Q"): _stack_op(_persistent),
    ord("p"): _put_line,
    ord("r"): _long_put,
    ord("g"): _get_line,
    0x80: _proto,
    0x95: _frame,
    0x82: _extension,
    0x83: _extension,
    0x84: _extension,
    0x97: _buffer,
    0x98: _buffer,
}
