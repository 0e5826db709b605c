"""How one value is shown: text from files made harmless, sizes for people, sizes as people write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import CkptError

# C0 and C1 controls (escape sequences start with one), line and paragraph separators, zero-width and direction marks, byte order mark,
# lone surrogates (undecodable file names), tag characters: whatever moves the cursor, hides text or reorders it.
_HARMFUL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
_SHORT = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?)([bB]?)\s*")


class Bytes(int):
    """A number of bytes: shown to people as "1.19 GB", written to TSV and JSON as the plain number."""


def sanitize(text: str) -> str:
    """The text with every character that could steer a terminal, hide text or break a line replaced by a visible escape.

    All text from files and arguments passes here before it is shown. Rich markup needs no escaping, because nothing is ever
    printed with markup on: "[red]" stays the five characters that it is.
    """
    return _HARMFUL.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    character = match.group()
    code = ord(character)
    return _SHORT.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def human_bytes(count: int) -> str:
    """Decimal units, as disks and the Hugging Face Hub count: 512 B, 1.19 GB, 100 GB, 1.50 TB."""
    value, unit = float(count), 0
    while abs(value) >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    if unit == 0:
        return f"{count} B"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {_UNITS[unit]}"


def parse_size(text: str) -> int:
    """Bytes from "5GB", "512KiB", "64M" or "1000": decimal units, binary with an i. CkptError E001 when it is not a size above zero."""
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise CkptError("E001", "this is not a size", found=repr(text), expected="a number with a unit, such as 5GB or 512KiB")
    power = " KMGT".index(match[2].upper() or " ")
    base = 1024 if match[3] else 1000
    number = match[1]
    size = int(number) * base**power if number.isdigit() else int(float(number) * base**power)
    if size < 1:
        raise CkptError("E001", "a size must be at least one byte", found=repr(text))
    return size


def human(value: Any) -> str:
    """A cell for people: sizes with units, thousands separated, shapes as [4, 8], None as -."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Bytes):
        return human_bytes(value)
    if isinstance(value, int):
        return f"{int(value):,}"
    return plain(value)


def plain(value: Any) -> str:
    """A cell for programs: numbers in full, None as the empty string, one line, no tab."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return f"{value:.9g}"
    if isinstance(value, (tuple, list)):
        separator = ", "
        inner = separator.join(plain(v) for v in value)
        return f"[{inner}]" if all(isinstance(v, int) for v in value) else inner
    if isinstance(value, Mapping):
        return ", ".join(f"{sanitize(str(k))}={plain(v)}" for k, v in value.items())
    return sanitize(str(value))
