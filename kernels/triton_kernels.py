"""The Triton programs: move boxes, cast, dequantise, quantise. All rounding is done on integers. Imports triton.

Written for CUDA; under TRITON_INTERPRET=1 they run on the CPU, where the interpreter's own fp32 -> bf16 truncates: it is not used here.
"""

# mypy: disable-error-code="untyped-decorator, misc, no-untyped-def, no-any-return"

import triton  # noqa: TID253  - nobody imports this module on the way of a conversion
import triton.language as tl  # noqa: TID253


@triton.jit
def move_boxes(
    table,
    tile_rows,
    COLUMNS: tl.constexpr,
    OUTER: tl.constexpr,
    KIND: tl.constexpr,
    ITEM: tl.constexpr,
    LANES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """One tile of one box per program. table: int64 [boxes, COLUMNS] as in `descriptors`, with addresses in units in columns 1 and 3;
    tile_rows: int32 [tiles], the box of each tile. KIND 0 straight, 1 turned, 2 scattered; ITEM bytes per word, LANES words per unit."""
    program = tl.program_id(0)
    row = table + tl.load(tile_rows + program).to(tl.int64) * COLUMNS
    tile = program - tl.load(row + COLUMNS - 1)
    # multiplying by the unit here is what tells the compiler how everything is aligned, so that it loads 16 bytes at a time
    source = tl.load(row + 1) * (ITEM * LANES)
    target = tl.load(row + 3) * (ITEM * LANES)
    columns = tl.load(row + 4) * LANES
    rows = tl.load(row + 5)
    if KIND == 1:
        rows = rows * LANES
    across = tl.cdiv(columns, TILE_COLUMNS)
    column = (tile % across) * TILE_COLUMNS
    tile = tile // across
    down = tl.cdiv(rows, TILE_ROWS)
    first = (tile % down) * TILE_ROWS
    tile = tile // down
    from_outer = tl.zeros((), tl.int64)
    to_outer = tl.zeros((), tl.int64)
    for axis in tl.static_range(OUTER):
        size = tl.load(row + 10 + 3 * axis)
        index = tile % size
        tile = tile // size
        from_outer += index * tl.load(row + 11 + 3 * axis)
        to_outer += index * tl.load(row + 12 + 3 * axis)
    if ITEM == 8:
        from_pointer = source.to(tl.pointer_type(tl.int64))
        to_pointer = target.to(tl.pointer_type(tl.int64))
    elif ITEM == 4:
        from_pointer = source.to(tl.pointer_type(tl.int32))
        to_pointer = target.to(tl.pointer_type(tl.int32))
    elif ITEM == 2:
        from_pointer = source.to(tl.pointer_type(tl.int16))
        to_pointer = target.to(tl.pointer_type(tl.int16))
    else:
        from_pointer = source.to(tl.pointer_type(tl.int8))
        to_pointer = target.to(tl.pointer_type(tl.int8))
    from_pointer = tl.multiple_of(from_pointer, ITEM * LANES) + from_outer * LANES
    to_pointer = tl.multiple_of(to_pointer, ITEM * LANES) + to_outer * LANES
    c = column + tl.arange(0, TILE_COLUMNS)[None, :].to(tl.int64)
    r = first + tl.arange(0, TILE_ROWS)[:, None].to(tl.int64)
    if KIND == 0:
        from_place = r * (tl.load(row + 8) * LANES) + c
        to_place = r * (tl.load(row + 9) * LANES) + c
    elif KIND == 1:
        from_place = r + c * (tl.load(row + 6) * LANES)
        to_place = r * (tl.load(row + 9) * LANES) + c
    else:
        from_place = r * tl.load(row + 8) + c * tl.load(row + 6)
        to_place = r * tl.load(row + 9) + c * tl.load(row + 7)
    inside = (r < rows) & (c < columns)
    tl.store(to_pointer + to_place, tl.load(from_pointer + from_place, mask=inside, other=0), mask=inside)


@triton.jit
def _widen_small(code, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, FINITE: tl.constexpr):
    BIAS: tl.constexpr = (1 << (EXPONENT - 1)) - 1
    magnitude = code & ((1 << (EXPONENT + MANTISSA)) - 1)
    sign = ((code >> (EXPONENT + MANTISSA)) & 1) << 31
    exponent = magnitude >> MANTISSA
    mantissa = magnitude & ((1 << MANTISSA) - 1)
    normal = (magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23)
    # the smallest positive value, 2 ** (1 - BIAS - MANTISSA), is a normal float32 whose exponent field is written here
    SMALLEST: tl.constexpr = (128 - BIAS - MANTISSA) << 23
    step = tl.full(magnitude.shape, SMALLEST, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (mantissa.to(tl.float32) * step).to(tl.int32, bitcast=True)
    bits = tl.where(exponent == 0, subnormal, normal)
    if FINITE:
        beyond = magnitude == ((1 << (EXPONENT + MANTISSA)) - 1)
    else:
        beyond = exponent == (1 << EXPONENT) - 1
    return tl.where(beyond, 0x7F800000 | (mantissa << (23 - MANTISSA)), bits) | sign


@triton.jit
def widen(code, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, FINITE: tl.constexpr):
    """float32 bits (int32) of the patterns `code` (int32) of a format; exact, NaN bits shifted up."""
    if EXPONENT == 8:  # float32 and bfloat16 differ in length only
        return code << (23 - MANTISSA)
    else:
        return _widen_small(code, EXPONENT, MANTISSA, FINITE)


@triton.jit
def _narrow_small(bits, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, FINITE: tl.constexpr):
    BIAS: tl.constexpr = (1 << (EXPONENT - 1)) - 1
    SHIFT: tl.constexpr = 23 - MANTISSA
    TOP: tl.constexpr = ((1 << EXPONENT) - 1) << MANTISSA
    BEYOND: tl.constexpr = (TOP | ((1 << MANTISSA) - 1)) if FINITE else TOP
    QUIET: tl.constexpr = BEYOND if FINITE else TOP | (1 << (MANTISSA - 1))
    PAYLOAD: tl.constexpr = 0 if FINITE else (1 << MANTISSA) - 1
    magnitude = bits & 0x7FFFFFFF
    exponent = magnitude >> 23
    # normal results: rebias, then round away SHIFT bits
    moved = magnitude - ((127 - BIAS) << 23)
    normal = (moved + ((1 << (SHIFT - 1)) - 1) + ((moved >> SHIFT) & 1)) >> SHIFT
    # subnormal results: the whole mantissa is shifted to the fixed point of the format; 26 bits leave nothing of it
    mantissa = tl.where(exponent == 0, magnitude, (magnitude & 0x7FFFFF) | 0x800000)
    shift = tl.minimum(SHIFT + 128 - BIAS - tl.maximum(exponent, 1), 26)
    shift = tl.maximum(shift, 1)
    half = (tl.full(shift.shape, 1, tl.int32) << (shift - 1)) - 1
    subnormal = (mantissa + half + ((mantissa >> shift) & 1)) >> shift
    code = tl.minimum(tl.where(exponent >= 128 - BIAS, normal, subnormal), BEYOND)
    code = tl.where(magnitude > 0x7F800000, QUIET | ((magnitude >> SHIFT) & PAYLOAD), code)
    return code | (((bits >> 31) & 1) << (EXPONENT + MANTISSA))


@triton.jit
def narrow(bits, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, FINITE: tl.constexpr):
    """Patterns (int32) of a format for float32 `bits` (int32): nearest even, overflow to infinity (NaN when FINITE), quiet NaN."""
    if MANTISSA == 23:
        return bits
    else:
        return _narrow_small(bits, EXPONENT, MANTISSA, FINITE)


@triton.jit
def plain_nan(bits):
    """float32 bits in which every NaN is the positive quiet one."""
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)


@triton.jit
def cast_elements(
    source,
    target,
    count,
    addend,
    ADD: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    F: tl.constexpr,
    TO_E: tl.constexpr,
    TO_M: tl.constexpr,
    TO_F: tl.constexpr,
    TILE: tl.constexpr,
):
    """target[i] = source[i] (+ addend in float32), contiguous patterns of two formats (E exponent bits, M mantissa bits, F finite)."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < count
    bits = widen(tl.load(source + place, mask=inside, other=0).to(tl.int32), E, M, F)
    if ADD:
        total = (bits.to(tl.float32, bitcast=True) + addend).to(tl.int32, bitcast=True)
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | 0x400000, total)
    tl.store(target + place, narrow(bits, TO_E, TO_M, TO_F).to(target.dtype.element_ty), mask=inside)


@triton.jit
def dequantise(
    values,
    scales,
    target,
    rows,
    columns,
    scale_rows,
    scale_columns,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    UNIFORM: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    F: tl.constexpr,
    TO_E: tl.constexpr,
    TO_M: tl.constexpr,
    TO_F: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """target[b, r, c] = values[b, r, c] * scales[b, r // BLOCK_ROWS, c // BLOCK_COLUMNS]. UNIFORM: a tile lies in one block."""
    tile = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(columns, TILE_COLUMNS)
    down = tl.cdiv(rows, TILE_ROWS)
    column = (tile % across) * TILE_COLUMNS
    tile = tile // across
    row = (tile % down) * TILE_ROWS
    batch = tile // down
    r = row + tl.arange(0, TILE_ROWS)[:, None]
    c = column + tl.arange(0, TILE_COLUMNS)[None, :]
    inside = (r < rows) & (c < columns)
    place = (batch * rows + r) * columns + c
    bits = widen(tl.load(values + place, mask=inside, other=0).to(tl.int32), E, M, F)
    scale_base = scales + batch * scale_rows * scale_columns
    if UNIFORM:
        scale = tl.load(scale_base + (row // BLOCK_ROWS) * scale_columns + column // BLOCK_COLUMNS)
    else:
        scale = tl.load(scale_base + (r // BLOCK_ROWS) * scale_columns + c // BLOCK_COLUMNS, mask=inside, other=0.0)
    product = (bits.to(tl.float32, bitcast=True) * scale).to(tl.int32, bitcast=True)
    tl.store(target + place, narrow(plain_nan(product), TO_E, TO_M, TO_F).to(target.dtype.element_ty), mask=inside)


@triton.jit
def quantise(
    values,
    target,
    scales,
    rows,
    columns,
    largest,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    F: tl.constexpr,
    TO_E: tl.constexpr,
    TO_M: tl.constexpr,
    TO_F: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """One block per program; the tile is the block rounded up to powers of two. `largest` = the largest float8."""
    block = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(columns, BLOCK_COLUMNS)
    down = tl.cdiv(rows, BLOCK_ROWS)
    tile = block // across
    row = tl.arange(0, TILE_ROWS)[:, None]
    column = tl.arange(0, TILE_COLUMNS)[None, :]
    r = (tile % down) * BLOCK_ROWS + row
    c = (block % across) * BLOCK_COLUMNS + column
    inside = (row < BLOCK_ROWS) & (column < BLOCK_COLUMNS) & (r < rows) & (c < columns)
    place = ((tile // down) * rows + r) * columns + c
    bits = widen(tl.load(values + place, mask=inside, other=0).to(tl.int32), E, M, F)
    # magnitudes of floats order like their patterns, so the largest is found on integers
    magnitude = bits & 0x7FFFFFFF
    top = tl.max(tl.max(tl.where(magnitude >= 0x7F800000, 0, magnitude), 1), 0)
    quotient = tl.div_rn(top.to(tl.float32, bitcast=True), largest)
    floor = tl.full(top.shape, 0x00800000, tl.int32)
    scale_bits = tl.where(top == 0, 0x3F800000, tl.maximum(quotient.to(tl.int32, bitcast=True), floor))
    scale = scale_bits.to(tl.float32, bitcast=True)
    tl.store(scales + block, scale)
    spread = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32) + scale
    result = tl.div_rn(bits.to(tl.float32, bitcast=True), spread).to(tl.int32, bitcast=True)
    result = tl.where(magnitude > 0x7F800000, bits, result)
    tl.store(target + place, narrow(result, TO_E, TO_M, TO_F).to(target.dtype.element_ty), mask=inside)


@triton.jit
def dequantise_fp4(blocks, scales, target, count, TO_E: tl.constexpr, TO_M: tl.constexpr, TO_F: tl.constexpr, TILE: tl.constexpr):
    """target[i] = 4-bit float i (low half of a byte first) * 2 ** (scales[i // 32] - 127), built from its bits; `count` values."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < count
    byte = tl.load(blocks + place // 2, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + place // 32, mask=inside, other=0).to(tl.int32) & 0xFF
    code = (byte >> ((place % 2).to(tl.int32) * 4)) & 15
    magnitude = code & 7
    # codes 2 to 7 are 1.m * 2 ** (e - 1) with e = magnitude >> 1; code 1 is 0.5
    exponent = tl.where(magnitude < 2, -1, (magnitude >> 1) - 1) + scale
    mantissa = 0x800000 | (tl.where(magnitude < 2, 0, magnitude & 1) << 22)
    normal = (tl.minimum(tl.maximum(exponent, 0), 254) << 23) | (mantissa & 0x7FFFFF)
    subnormal = mantissa >> tl.minimum(tl.maximum(1 - exponent, 0), 31)
    bits = tl.where(exponent >= 255, 0x7F800000, tl.where(exponent <= 0, subnormal, normal))
    bits = tl.where(magnitude == 0, 0, bits) | ((code >> 3) << 31)
    bits = tl.where(scale == 255, 0x7FC00000, bits)
    tl.store(target + place, narrow(bits, TO_E, TO_M, TO_F).to(target.dtype.element_ty), mask=inside)
