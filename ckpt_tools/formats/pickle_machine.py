"""Runs the opcodes of a pickle (protocols 0 to 5) without importing or calling anything the pickle names.

The interpreter is written out instead of using pickle.Unpickler because a hostile pickle can make that one allocate gigabytes (PUT with
a huge index), overflow the C stack or hash for ever (deeply nested or shared tuples as dict keys). Runs of opcodes that the pickler
always writes together are recognised as one step, which keeps a large `.metadata` as fast as the C unpickler.
Source of the opcodes: CPython 3.11 Lib/pickle.py and Lib/pickletools.py.
"""

from __future__ import annotations

import re
import struct
from codecs import escape_decode
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

from .pickle_values import DefaultDict, DTypeRef, Global, NumpyArray, NumpyScalar, Record, Size, StorageRef, TensorRef


class Damaged(Exception):
    """The bytes are not a pickle that could have been written by a pickler."""


class Excessive(Exception):
    """The pickle asks for more nesting, memory or time than its data can need."""


class Policy(Protocol):
    """What the names in a pickle become. All may raise Damaged, Excessive or CkptError."""

    def resolve(self, module: str, name: str) -> object:
        """The value of a global: a Global, a DTypeRef, or one of `fast`."""

    def call(self, function: object, args: tuple[Any, ...]) -> object:
        """The value of function(*args)."""

    def new(self, cls: object, args: tuple[Any, ...], keywords: dict[str, Any] | None) -> object:
        """The value of cls.__new__(cls, *args, **keywords)."""

    def build(self, value: object, state: Any) -> None:
        """Gives an object its state."""

    def persistent(self, identifier: object) -> object:
        """The value of a persistent id."""


MAX_INTEGER_BYTES = 1024
MAX_KEY_DEPTH = 50
MAX_KEY_NODES = 1_000_000  # in all dict keys and set elements of one pickle that are neither strings nor small integers
# Keys whose hash is cheap and cannot be made to collide on purpose; everything else is looked at by `check_keys`.
_PLAIN_KEYS = {str, bytes, bool, type(None), Global, DTypeRef}
_LEAF_KEYS = _PLAIN_KEYS | {int, float, complex, NumpyScalar}
_SIZE = re.compile(rb"(?:\)|(\(?)((?:K.|M..|J....)+)([\x85\x86\x87t])(\x94?))\x85(\x94?)R", re.DOTALL)
_INTEGER = re.compile(rb"K(.)|M(..)|J(....)", re.DOTALL)
_ARITY = {0x85: 1, 0x86: 2, 0x87: 3}


def integers(code: bytes) -> tuple[int, ...]:
    """The integers pushed by a run of BININT1, BININT2 and BININT opcodes."""
    return tuple(
        a[0] if a else b[0] | b[1] << 8 if b else int.from_bytes(c, "little", signed=True) for a, b, c in _INTEGER.findall(code)
    )


def key_nodes(key: object, limit: int) -> int:
    """How many values hashing or comparing a dict key can visit. Excessive beyond `limit` or a nesting of 50; Damaged when such a value
    is no key."""
    nodes = 0
    pending: list[tuple[object, int]] = [(key, 0)]
    while pending:
        node, depth = pending.pop()
        nodes += 1
        if nodes > limit or depth > MAX_KEY_DEPTH:
            raise Excessive("dict keys are nested too deeply or are too large")
        kind = type(node)
        if kind in _LEAF_KEYS:
            if kind is int and not -(2**60) < node < 2**60:  # type: ignore[operator]
                raise Excessive("a dict key is an integer of more than 60 bits")
        elif kind is tuple or kind is Size or kind is frozenset:
            pending.extend((child, depth + 1) for child in node)  # type: ignore[attr-defined]
        elif kind is Record:
            pending.extend((part, depth + 1) for part in (*node.args, node.state, *node.items, *node.pairs, *node.pairs.values()))  # type: ignore[attr-defined]
        elif depth and kind in (list, dict):  # inside a Record: never hashed, but compared
            pending.extend((child, depth + 1) for child in node)  # type: ignore[attr-defined]
            if kind is dict:
                pending.extend((child, depth + 1) for child in node.values())  # type: ignore[attr-defined]
        elif not depth or kind not in _COMPARED:
            raise Damaged(f"a {kind.__name__} as dict key")
    return nodes


_COMPARED = {bytearray, set, TensorRef, StorageRef, NumpyArray}


class Machine:
    """One run over `data`; `fast` are stand-in classes without constructor work, created and filled directly."""

    __slots__ = ("data", "fast", "globals", "key_budget", "marks", "memo", "policy", "skip", "sparse", "stack")

    def __init__(self, data: bytes, policy: Policy, fast: frozenset[type] = frozenset(), skip: str | None = None) -> None:
        self.data = data
        self.policy = policy
        self.fast = fast
        self.skip = skip
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.sparse: dict[int, Any] = {}
        self.globals: dict[tuple[str, str], object] = {}
        self.key_budget = MAX_KEY_NODES

    def run(self) -> object:
        """The value of the pickle. Damaged, Excessive, and whatever the policy raises; IndexError, ValueError, KeyError, TypeError,
        struct.error and UnicodeError also mean a damaged pickle."""
        data, stack, marks, memo, fast = self.data, self.stack, self.marks, self.memo, self.fast
        push, remember = stack.append, memo.append
        size_at = _SIZE.match
        sizes: dict[bytes, Size] = {}
        at = 0
        while True:
            op = data[at]
            at += 1
            if op == 0x68 or op == 0x6A:  # BINGET, LONG_BINGET
                if op == 0x68:
                    index = data[at]
                    at += 1
                else:
                    index = int.from_bytes(data[at : at + 4], "little")
                    at += 4
                value = memo[index] if index < len(memo) else self.sparse[index]
                if type(value) is type:
                    if value is Size:
                        found = size_at(data, at)
                        if found is not None:
                            mark, code, end, inner_put, outer_put = found.groups()
                            size = sizes.get(code)
                            if size is None:
                                size = sizes[code] = Size(integers(code or b""))
                            # "(" and "t" go together; the other opcodes say how many integers there are
                            if code and (not mark if end == b"t" else mark or len(size) != _ARITY[end[0]]):
                                raise Damaged("torch.Size of something else than integers")
                            if inner_put:
                                remember(tuple(size))
                            if outer_put:
                                remember((tuple(size),))
                            push(size)
                            at = found.end()
                            continue
                    elif data[at : at + 2] == b")\x81":
                        value = object.__new__(value)
                        at += 2
                        push(value)
                        if data[at] == 0x94:
                            remember(value)
                            at += 1
                        continue
                push(value)
            elif op == 0x4B:  # BININT1
                push(data[at])
                at += 1
            elif op == 0x4D:  # BININT2
                push(data[at] | data[at + 1] << 8)
                at += 2
            elif op == 0x4A:  # BININT
                push(int.from_bytes(data[at : at + 4], "little", signed=True))
                at += 4
            elif op == 0x4E:  # NONE
                push(None)
            elif op == 0x75:  # SETITEMS
                start = marks.pop()
                items = stack[start:]
                del stack[start:]
                self.set_items(stack[-1], items)
            elif op == 0x62:  # BUILD
                state = stack.pop()
                value = stack[-1]
                if type(value) in fast and type(state) is dict:
                    value.__dict__ = state
                else:
                    self.policy.build(value, state)
            elif op == 0x7D:  # EMPTY_DICT
                push({})
            elif op == 0x94:  # MEMOIZE
                remember(stack[-1])
            elif op == 0x28:  # MARK
                marks.append(len(stack))
            elif op == 0x71:  # BINPUT
                self.put(data[at])
                at += 1
            elif op == 0x8C or op == 0x58:  # SHORT_BINUNICODE, BINUNICODE
                if op == 0x8C:
                    start = at + 1
                    end_at = start + data[at]
                else:
                    start = at + 4
                    end_at = start + int.from_bytes(data[at:start], "little")
                if end_at > len(data):
                    raise Damaged("a string runs past the end")
                text = data[start:end_at].decode("utf-8", "surrogatepass")
                at = end_at
                if text == self.skip and len(marks) == 1 and self.may_stop(at):
                    return stack[0]
                push(text)
            elif op == 0x2E:  # STOP
                return stack.pop()
            else:
                handler = _RARE.get(op)
                if handler is None:
                    raise Damaged(f"byte {at - 1} is no pickle opcode")
                at = handler(self, at)

    def may_stop(self, at: int) -> bool:
        """Closes the outermost object before the key `skip`, whose value nobody needs, when what is needed was there before."""
        stack = self.stack
        if len(stack) < 2 or type(stack[0]) not in self.fast or type(stack[1]) is not dict or self.marks != [2] or len(stack) % 2:
            return False
        if self.data.find(b"mcore_data", at) >= 0 or self.data[-1:] != b".":
            return False
        state = stack[1]
        self.set_items(state, [*stack[2:], self.skip, None])
        stack[0].__dict__ = state
        return True

    def take(self, count: int, at: int) -> bytes:
        """The next `count` bytes; Damaged when there are fewer."""
        if count < 0 or count > len(self.data) - at:
            raise Damaged("a value runs past the end")
        return self.data[at : at + count]

    def line(self, at: int) -> tuple[str, int]:
        """The text up to the next newline, and the position behind it."""
        end = self.data.index(b"\n", at)
        return self.data[at:end].decode("utf-8"), end + 1

    def put(self, index: int) -> None:
        """Remembers the top of the stack."""
        memo = self.memo
        if index == len(memo):
            memo.append(self.stack[-1])
        elif index < len(memo):
            memo[index] = self.stack[-1]
        else:
            self.sparse[index] = self.stack[-1]

    def get(self, index: int) -> None:
        """Pushes a remembered value."""
        self.stack.append(self.memo[index] if 0 <= index < len(self.memo) else self.sparse[index])

    def since_mark(self) -> list[Any]:
        """Takes everything above the last mark off the stack."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def check_keys(self, keys: list[Any]) -> None:
        """Excessive when a key could make hashing slow, Damaged when it is no key."""
        kinds = set(map(type, keys)) - _PLAIN_KEYS - self.fast
        if kinds == {int} and all(abs(k) < 2**60 for k in keys if type(k) is int):
            return
        if kinds:
            for key in keys:
                if type(key) in kinds:
                    self.key_budget -= key_nodes(key, self.key_budget)

    def set_items(self, target: object, items: list[Any]) -> None:
        """target[items[0]] = items[1], and so on."""
        keys = items[::2]
        if len(items) % 2:
            raise Damaged("a key without a value")
        self.check_keys(keys)
        kind = type(target)
        if kind is dict or kind is OrderedDict or kind is DefaultDict:
            target.update(zip(keys, items[1::2], strict=True))  # type: ignore[attr-defined]
        elif kind is Record:
            target.pairs.update(zip(keys, items[1::2], strict=True))  # type: ignore[attr-defined]
        else:
            raise Damaged(f"items set on a {kind.__name__}")

    def append(self, target: object, items: list[Any]) -> None:
        """Appends to a list, or to the items of a Record."""
        if type(target) is list:
            target.extend(items)
        elif type(target) is Record:
            target.items.extend(items)
        else:
            raise Damaged(f"items appended to a {type(target).__name__}")

    def global_value(self, module: object, name: object) -> None:
        """Pushes what the policy makes of a global."""
        if type(module) is not str or type(name) is not str:
            raise Damaged("the name of a global is not a string")
        key = module, name
        value = self.globals.get(key)
        if value is None:
            value = self.globals[key] = self.policy.resolve(module, name)
        self.stack.append(value)

    def call(self, function: object, args: object) -> None:
        """Pushes the value of a call."""
        if type(args) is not tuple:
            raise Damaged("arguments are not a tuple")
        if function is Size:
            values = args[0] if len(args) == 1 else None
            if not isinstance(values, tuple | list) or not all(type(n) is int for n in values):
                raise Damaged("torch.Size of something else than integers")
            self.stack.append(Size(values))
            return
        self.stack.append(self.policy.call(function, args))

    def new(self, cls: object, args: object, keywords: object = None) -> None:
        """Pushes a new object."""
        if type(args) is not tuple or not (keywords is None or type(keywords) is dict):
            raise Damaged("arguments are not a tuple")
        if type(cls) is type and cls in self.fast and not args and not keywords:
            self.stack.append(object.__new__(cls))
            return
        self.stack.append(self.policy.new(cls, args, keywords))


def _integer(machine: Machine, length: int, at: int) -> int:
    if length > MAX_INTEGER_BYTES:
        raise Excessive(f"an integer of {length} bytes")
    machine.stack.append(int.from_bytes(machine.take(length, at), "little", signed=True))
    return at + length


def _unsigned(machine: Machine, width: int, at: int) -> int:
    return int.from_bytes(machine.take(width, at), "little")


def _sized(width: int, decode: Callable[[bytes], object]) -> Callable[[Machine, int], int]:
    def handler(machine: Machine, at: int) -> int:
        length = _unsigned(machine, width, at)
        machine.stack.append(decode(machine.take(length, at + width)))
        return at + width + length

    return handler


def _constant(value: Callable[[], object]) -> Callable[[Machine, int], int]:
    def handler(machine: Machine, at: int) -> int:
        machine.stack.append(value())
        return at

    return handler


def _text_or_bytes(raw: bytes) -> str | bytes:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:  # raw bytes of a Python 2 string
        return raw


def _tuple_of(count: int) -> Callable[[Machine, int], int]:
    def handler(machine: Machine, at: int) -> int:
        stack = machine.stack
        if len(stack) < count:
            raise Damaged("the stack is empty")
        stack[-count:] = [tuple(stack[-count:])]
        return at

    return handler


def _float_line(machine: Machine, at: int) -> int:
    text, end = machine.line(at)
    machine.stack.append(float(text))
    return end


def _int_line(machine: Machine, at: int) -> int:
    text, end = machine.line(at)
    if len(text) > 2 * MAX_INTEGER_BYTES:
        raise Excessive("an integer of more than 2,000 digits")
    machine.stack.append(text == "01" if text in ("00", "01") else int(text.rstrip("L")))
    return end


def _string_line(machine: Machine, at: int) -> int:
    text, end = machine.line(at)
    if len(text) < 2 or text[0] != text[-1] or text[0] not in "'\"":
        raise Damaged("a string without quotes")
    machine.stack.append(_text_or_bytes(escape_decode(text[1:-1].encode("latin-1"))[0]))
    return end


def _unicode_line(machine: Machine, at: int) -> int:
    end = machine.data.index(b"\n", at)
    machine.stack.append(machine.data[at:end].decode("raw-unicode-escape"))
    return end + 1


def _persistent_line(machine: Machine, at: int) -> int:
    text, end = machine.line(at)
    machine.stack.append(machine.policy.persistent(text))
    return end


def _put_line(machine: Machine, at: int) -> int:
    text, end = machine.line(at)
    index = int(text[:20])
    if index < 0:
        raise Damaged("a negative memo index")
    machine.put(index)
    return end


def _get_line(machine: Machine, at: int) -> int:
    text, end = machine.line(at)
    machine.get(int(text[:20]))
    return end


def _global_line(machine: Machine, at: int) -> int:
    module, middle = machine.line(at)
    name, end = machine.line(middle)
    machine.global_value(module, name)
    return end


def _instance_line(machine: Machine, at: int) -> int:
    args = machine.since_mark()
    end = _global_line(machine, at)
    machine.call(machine.stack.pop(), tuple(args))
    return end


def _long_put(machine: Machine, at: int) -> int:
    machine.put(_unsigned(machine, 4, at))
    return at + 4


def _proto(machine: Machine, at: int) -> int:
    if machine.data[at] > 5:
        raise Damaged(f"pickle protocol {machine.data[at]} is unknown")
    return at + 1


def _frame(machine: Machine, at: int) -> int:
    machine.take(_unsigned(machine, 8, at), at + 8)
    return at + 8


def _binary_float(machine: Machine, at: int) -> int:
    machine.stack.append(struct.unpack(">d", machine.take(8, at))[0])
    return at + 8


def _stack_op(action: Callable[[Machine], object]) -> Callable[[Machine, int], int]:
    def handler(machine: Machine, at: int) -> int:
        action(machine)
        return at

    return handler


def _pop(machine: Machine) -> None:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()


def _append(machine: Machine) -> None:
    value = machine.stack.pop()
    machine.append(machine.stack[-1], [value])


def _appends(machine: Machine) -> None:
    items = machine.since_mark()
    machine.append(machine.stack[-1], items)


def _set_item(machine: Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.set_items(machine.stack[-1], [key, value])


def _add_items(machine: Machine) -> None:
    items = machine.since_mark()
    machine.check_keys(items)
    target = machine.stack[-1]
    if type(target) is set:
        target.update(items)
    else:
        machine.append(target, items)


def _frozen_set(machine: Machine) -> None:
    items = machine.since_mark()
    machine.check_keys(items)
    machine.stack.append(frozenset(items))


def _dict(machine: Machine) -> None:
    items = machine.since_mark()
    value: dict[Any, Any] = {}
    machine.set_items(value, items)
    machine.stack.append(value)


def _reduce(machine: Machine) -> None:
    args, function = machine.stack.pop(), machine.stack.pop()
    machine.call(function, args)


def _new(machine: Machine) -> None:
    args, cls = machine.stack.pop(), machine.stack.pop()
    machine.new(cls, args)


def _new_ex(machine: Machine) -> None:
    keywords, args, cls = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    machine.new(cls, args, keywords)


def _object(machine: Machine) -> None:
    items = machine.since_mark()
    machine.call(items[0], tuple(items[1:]))


def _stack_global(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.global_value(module, name)


def _persistent(machine: Machine) -> None:
    machine.stack.append(machine.policy.persistent(machine.stack.pop()))


def _extension(machine: Machine, at: int) -> int:
    raise Damaged("copyreg extension codes are not read")


def _buffer(machine: Machine, at: int) -> int:
    raise Damaged("the pickle refers to buffers outside itself")


_RARE: dict[int, Callable[[Machine, int], int]] = {
    ord("0"): _stack_op(_pop),
    ord("1"): _stack_op(Machine.since_mark),
    ord("2"): _stack_op(lambda m: m.stack.append(m.stack[-1])),
    ord("F"): _float_line,
    ord("I"): _int_line,
    ord("L"): _int_line,
    0x8A: lambda m, at: _integer(m, _unsigned(m, 1, at), at + 1),
    0x8B: lambda m, at: _integer(m, _unsigned(m, 4, at), at + 4),
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
    ord("t"): _stack_op(lambda m: m.stack.append(tuple(m.since_mark()))),
    ord("l"): _stack_op(lambda m: m.stack.append(m.since_mark())),
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
