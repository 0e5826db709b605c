"""Runs the opcodes of a pickle (protocols 0 to 5) without importing or calling anything the pickle names.

The interpreter is written out instead of using pickle.Unpickler because a hostile pickle can make that one allocate gigabytes (PUT with
a huge index), overflow the C stack or hash for ever (deeply nested or shared tuples as dict keys). Runs of opcodes that the pickler
always writes together are recognised as one step, which keeps a large `.metadata` as fast as the C unpickler.
Source of the opcodes: CPython 3.11 Lib/pickle.py and Lib/pickletools.py.
"""

from __future__ import annotations

import re

from .pickle_opcodes import RARE
from .pickle_state import Damaged, State
from .pickle_values import Size

# What follows a reference to torch.Size: the tuple of its integers, the tuple of arguments, REDUCE; both tuples may be remembered.
_SIZE = re.compile(rb"(?:\)|(\(?)((?:K.|M..|J....)+)([\x85\x86\x87t])(\x94?))\x85(\x94?)R", re.DOTALL)
_INTEGER = re.compile(rb"K(.)|M(..)|J(....)", re.DOTALL)
_ARITY = {0x85: 1, 0x86: 2, 0x87: 3}


def integers(code: bytes) -> tuple[int, ...]:
    """The integers pushed by a run of BININT1, BININT2 and BININT opcodes."""
    return tuple(
        a[0] if a else b[0] | b[1] << 8 if b else int.from_bytes(c, "little", signed=True) for a, b, c in _INTEGER.findall(code)
    )


def run(state: State) -> object:
    """The value of the pickle. Damaged, Excessive, and whatever the policy raises; IndexError, ValueError, KeyError, TypeError,
    struct.error and UnicodeError also mean a damaged pickle."""
    data, stack, marks, memo, fast = state.data, state.stack, state.marks, state.memo, state.fast
    sparse = state.sparse
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
            value = memo[index] if index < len(memo) else sparse[index]
            if type(value) is type and not sparse:
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
            state.set_items(stack[-1], items)
        elif op == 0x62:  # BUILD
            content = stack.pop()
            value = stack[-1]
            if type(value) in fast and type(content) is dict:
                value.__dict__ = content
            else:
                state.policy.build(value, content)
        elif op == 0x7D:  # EMPTY_DICT
            push({})
        elif op == 0x94:  # MEMOIZE
            if sparse:
                sparse[len(memo) + len(sparse)] = stack[-1]
            else:
                remember(stack[-1])
        elif op == 0x28:  # MARK
            marks.append(len(stack))
        elif op == 0x71:  # BINPUT
            state.put(data[at])
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
            if text == state.skip and len(marks) == 1 and state.may_stop(at):
                return stack[0]
            push(text)
        elif op == 0x2E:  # STOP
            if marks and marks[-1] >= len(stack):
                raise Damaged("it ends inside a list")
            return stack.pop()
        else:
            handler = RARE.get(op)
            if handler is None:
                raise Damaged(f"byte {at - 1} is no pickle opcode")
            at = handler(state, at)
