"""What a pickle has built so far: the stack, the memo and the operations on them, safe against hostile keys and sizes."""

from __future__ import annotations

from collections import OrderedDict
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


MAX_KEY_DEPTH = 50
MAX_KEY_NODES = 1_000_000  # in all dict keys and set elements of one pickle that are neither strings nor small integers
# Keys whose hash is cheap and cannot be made to collide on purpose; everything else is looked at by `check_keys`.
_PLAIN_KEYS = {str, bytes, bool, type(None), Global, DTypeRef}
_LEAF_KEYS = _PLAIN_KEYS | {int, float, complex, NumpyScalar}
_COMPARED = {bytearray, set, TensorRef, StorageRef, NumpyArray}


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


class State:
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
